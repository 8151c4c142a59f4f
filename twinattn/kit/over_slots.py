"""Kernels of recurrent layers over slots, out of those of libraries that know none or count them from 1.

Also what such libraries do not claim, by property.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from twinattn.kit.kernel import claims
from twinattn.libraries import Call


def over_gathered_states(prepare: Callable[..., Call], **limits: Any) -> Callable[..., Tensor]:
    """Return a kernel over slots that calls one over contiguous states, as servers do.

    It gathers the states of a step (zeros for new sequences), and afterwards writes the states of sequences with new
    tokens back to their slots.
    """

    @claims(**{"not_claimed": NO_SLOTS} | limits)
    def kernel(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        log_decay: Tensor,
        beta: Tensor,
        states: Tensor,
        cu_seqlens_q: Tensor,
        state_indices: Tensor,
        has_initial_state: Tensor,
        scale: float,
    ) -> Tensor:
        slots = state_indices.long()
        moved = cu_seqlens_q.diff() > 0  # the slots of other sequences may be invalid
        before = states[slots.where(moved, 0)].masked_fill(~has_initial_state[:, None, None, None], 0.0)
        out, after = prepare(query, key, value, log_decay, beta, before, cu_seqlens_q, scale)()
        states[slots[moved]] = after[moved].to(states.dtype)
        return out

    return kernel


def over_slots_from_1(prepare: Callable[..., Call], **limits: Any) -> Callable[..., Tensor]:
    """Return a kernel over slots that calls one with slot 0 as padding: its pool gets one more slot in front."""

    @claims(**limits)
    def kernel(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        log_decay: Tensor,
        beta: Tensor,
        states: Tensor,
        cu_seqlens_q: Tensor,
        state_indices: Tensor,
        has_initial_state: Tensor,
        scale: float,
    ) -> Tensor:
        pool = torch.cat([states[:1], states])
        slots = state_indices.where(state_indices < len(states), -1)  # it would read through an invalid slot
        tables = slots + 1, cu_seqlens_q, has_initial_state
        out = prepare(query, key, value, log_decay, beta, pool, *tables, scale)()
        states.copy_(pool[1:])
        return out

    return kernel


NO_SLOTS = {
    "padding slot": "knows no slots",
    "padding": "says nothing of rows that no sequence has",
}
UNWRITTEN = {"padding": "rows past the last sequence are not written"}
FINITE = {"forgets": "decays are finite"}
NO_TOKENS, NO_SCALE = "must have nonempty dimensions", "scale must be finite and positive"  # attention-gym's texts
NO_SCALE_OF_0 = {"read scale": "takes a scale of 0 for the default"}
SAME_HEADS: dict[str, Any] = dict(heads=((1, 1), (4, 4)))  # values have as many heads as keys
