"""The pool of states, copied whole slots at a time; the twin of `refattn.state_cache`."""

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int32, Int64, Shaped
from torch import Tensor

from fastattn import dispatch
from refattn.checks import check_memory, check_sizes
from refattn.checks_of_writes import check_block_pairs
from refattn.states import check_accepted_slots


def allocate(
    num_slots: int,
    num_value_heads: int,
    value_head_size: int,
    key_head_size: int,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> Float[Tensor, "n hv dv dk"]:
    """Make an empty pool of states; the twin of `refattn.state_cache.allocate`."""
    check_sizes(
        num_slots=num_slots,
        num_value_heads=num_value_heads,
        value_head_size=value_head_size,
        key_head_size=key_head_size,
    )
    check_memory(dtype, device)
    return torch.zeros(num_slots, num_value_heads, value_head_size, key_head_size, dtype=dtype, device=device)


def allocate_inputs(
    num_slots: int,
    width: int,
    num_channels: int,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> Float[Tensor, "n w c"]:
    """Make an empty pool for the last inputs of a convolution; the twin of `refattn.state_cache.allocate_inputs`."""
    check_sizes(num_slots=num_slots, width=width, num_channels=num_channels)
    check_memory(dtype, device)
    return torch.zeros(num_slots, width - 1, num_channels, dtype=dtype, device=device)


def copy(pools: Sequence[Shaped[Tensor, "n ..."]], pairs: Int64[Tensor, "k 2"]) -> None:
    """Copy states to other slots, in place; the twin of `refattn.state_cache.copy`."""
    check_block_pairs(pools, pools, pairs, names=("pools", "pools"))
    dispatch.run_in_each("copy_blocks", pools, pairs=pairs)


def accepted_slots(state_indices: Int32[Tensor, "b c"], num_accepted: Int32[Tensor, "b"]) -> Int32[Tensor, "b"]:
    """Return the slot of the state after the last accepted token; the twin of `refattn.state_cache.accepted_slots`.

    Nothing synchronizes with a device.
    """
    check_accepted_slots(state_indices, num_accepted)
    columns = (num_accepted - 1).clamp(0, state_indices.shape[1] - 1)
    slots = state_indices.gather(1, columns.long()[:, None])[:, 0]
    return slots.where(state_indices[:, 0] >= 0, state_indices[:, 0])
