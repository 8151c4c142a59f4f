"""The pool of states: one slot per sequence, more for drafts and checkpoints; copied whole, never appended to.

    pool of n = 5 slots        request a, at token 70      slot 3    overwritten at every token
    slot 1   a, after 32       its checkpoints             slots 1, 4
    slot 3   a, now            a draft may be rejected     the slot of the last accepted token is the state
    slot 4   a, after 64

Blocks of keys are written once and stay valid for every longer sequence, so requests with a prefix share them. A state
is overwritten at every token. So a state that later requests start from must be saved at the end of a block while it is
computed (`checkpoint_indices` of `recurrent.plan`), and copied before a request changes it:

    fork             copy(pools, [[own, new]])               two requests continue from the same tokens
    prefix hit       copy(pools, [[checkpoint, new]])        a request can start only from a saved state
    preempt          kv_cache.swap_blocks                    a slot moves to the host as a block does

Source: `MambaSpec` and `mamba_utils` of vLLM: the layout of states, and when servers save them.
"""

from collections.abc import Sequence

import torch
from jaxtyping import Int32, Int64, Shaped
from torch import Tensor

from refattn import allocation, kv_cache
from refattn.checks_of_writes import check_block_pairs
from refattn.states import check_accepted_slots

allocate = allocation.allocate_states
allocate_inputs = allocation.allocate_inputs


def copy(pools: Sequence[Shaped[Tensor, "n ..."]], pairs: Int64[Tensor, "k 2"]) -> None:
    """Copy states to other slots, in place; all sources are read before any write.

    A fork copies a state to one slot or several, a prefix hit copies a checkpoint to a request's own slot.

    Args:
        pools: the pools of all layers, of states and of convolution inputs; each gets the same copies.
        pairs: source and destination slot of each copy; a destination may occur only once.

    Raises:
        ValueError: if a slot is outside a pool or is written twice, or pools share memory. Nothing is written then.
    """
    check_block_pairs(pools, pools, pairs, names=("pools", "pools"))
    kv_cache.copy_blocks(pools, pairs)


def accepted_slots(state_indices: Int32[Tensor, "b c"], num_accepted: Int32[Tensor, "b"]) -> Int32[Tensor, "b"]:
    """Return the slot of the state after the last accepted token, which rolls back rejected drafts.

    The keys of rejected drafts are overwritten by the next step. A state cannot be truncated, so the step saves one per
    token, and the one after the last accepted token becomes the current state.

    Args:
        state_indices: the slots of the step, one per token.
        num_accepted: how many tokens of the step are accepted, at least 1: the first is not a draft.

    Returns:
        Column `num_accepted - 1` of each row. For padding (a negative first slot), the first slot.

    Raises:
        ValueError: naming the argument that does not fit; on a CPU also if `num_accepted` is outside `1..c` for a row
            that is not padding.
    """
    check_accepted_slots(state_indices, num_accepted)
    slots = [
        row[accepted - 1] if row[0] >= 0 else row[0]
        for row, accepted in zip(state_indices.tolist(), num_accepted.tolist(), strict=True)
    ]
    return torch.tensor(slots, dtype=torch.int32, device=state_indices.device)
