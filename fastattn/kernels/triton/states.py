"""Which sequence a program of a layer with a state computes, and in which slots its state is."""

from typing import Any, no_type_check

import triton
import triton.language as tl

from refattn.states import StatePlan

CHANGING = ("num_seqs", "num_tokens", "table_stride", "column_stride", "checkpoint_stride", "checkpoint_column_stride")


def tables_of(plan: StatePlan, num_tokens: int) -> dict[str, Any]:
    """Return the tables of a plan as arguments of a kernel."""
    indices, checkpoints = plan.state_indices, plan.checkpoint_indices
    return dict(
        cu_seqlens_q=plan.batch.cu_seqlens_q,
        seq_lens=plan.batch.seq_lens,
        state_indices=indices,
        has_initial_state=plan.has_initial_state,
        num_accepted=plan.num_accepted,
        checkpoints=checkpoints,
        table_stride=indices.stride(0),
        column_stride=indices.stride(1) if plan.per_draft else 0,
        has_stride=plan.has_initial_state.stride(0),
        accepted_stride=0 if plan.num_accepted is None else plan.num_accepted.stride(0),
        checkpoint_stride=0 if checkpoints is None else checkpoints.stride(0),
        checkpoint_column_stride=0 if checkpoints is None else checkpoints.stride(1),
        num_seqs=plan.batch.num_seqs,
        num_tokens=num_tokens,
        PER_DRAFT=plan.per_draft,
        BLOCK_SIZE=plan.block_size or 0,
    )


# Triton's interpreter finds a function only if it stands above the one that calls it.


@triton.jit
@no_type_check
def find_sequence(
    sequence,
    cu_seqlens_q,
    seq_lens,
    state_indices,
    has_initial_state,
    num_accepted,
    table_stride,
    column_stride,
    has_stride,
    accepted_stride,
    num_seqs,
    num_tokens,
):
    """Return a sequence's first row, its length, the position of its first token, its first slot, and its state's.

    The state's slot is -1 if there is none; both are if there is nothing to do: for padding, as what is after the last
    sequence, and for one without new tokens, whose entries may be anything: no index is followed.
    """
    sequence = sequence.to(tl.int64)
    is_sequence = sequence < num_seqs
    first_row = tl.load(cu_seqlens_q + sequence)
    length = tl.load(cu_seqlens_q + sequence + 1, is_sequence, num_tokens) - first_row
    position = tl.maximum(tl.load(seq_lens + sequence, is_sequence, 0) - length, 0)
    row = state_indices + sequence * table_stride
    slot = tl.load(row, is_sequence, -1)  # without waiting for the length
    slot = tl.where(length > 0, slot, -1)
    start = slot
    if num_accepted is not None:
        accepted = tl.load(num_accepted + sequence * accepted_stride, slot >= 0, 1)
        start = tl.load(row + (accepted - 1).to(tl.int64) * column_stride, slot >= 0, -1)
    has_state = tl.load(has_initial_state + sequence * has_stride, is_sequence, 0) != 0
    slot = tl.where(has_state & (start < 0), -1, slot)
    return first_row.to(tl.int64), length, position, slot.to(tl.int64), tl.where(has_state, start, -1).to(tl.int64)
