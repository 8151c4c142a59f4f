"""The pool of states, copied by whole slots; the twin of `refattn.state_cache`."""

from collections.abc import Sequence

from jaxtyping import Int32, Int64, Shaped
from torch import Tensor

from fastattn import dispatch
from refattn import allocation
from refattn.checks_of_writes import check_block_pairs
from refattn.states import check_accepted_slots

allocate = allocation.allocate_states
allocate_inputs = allocation.allocate_inputs


def copy(pools: Sequence[Shaped[Tensor, "n ..."]], pairs: Int64[Tensor, "k 2"]) -> None:
    """Copy states to other slots, in place; the twin of `refattn.state_cache.copy`."""
    check_block_pairs(pools, pools, pairs, names=("pools", "pools"))
    dispatch.run_in_each("copy_blocks", pools, pairs=pairs)


def accepted_slots(state_indices: Int32[Tensor, "b c"], num_accepted: Int32[Tensor, "b"]) -> Int32[Tensor, "b"]:
    """Return the slot of the state after the last accepted token; the twin of `refattn.state_cache.accepted_slots`.

    It does not synchronize with a device.
    """
    check_accepted_slots(state_indices, num_accepted)
    columns = (num_accepted - 1).clamp(0, state_indices.shape[1] - 1)
    slots = state_indices.gather(1, columns.long()[:, None])[:, 0]
    return slots.where(state_indices[:, 0] >= 0, state_indices[:, 0])
