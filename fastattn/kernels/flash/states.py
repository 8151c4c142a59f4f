"""The states of a step side by side, for packages that know no slots, and lengths as FlashQLA reads them.

Sequences are those of `fastattn.kernels.triton.states`: of padding, and without new tokens, no slot is read or written.
"""

from functools import partial
from typing import NamedTuple, no_type_check

import torch
import triton
import triton.language as tl
from jaxtyping import Bool, Float, Int32
from torch import Tensor

from fastattn.kernels.triton.launch import Launch
from fastattn.kernels.triton.states import CHANGING, States, find_sequence, tables_of
from refattn.states import StatePlan

ENTRIES = 128  # entries of a table that a program writes at a time
ELEMENTS = 4096  # elements of a state that a program moves


class Lengths(NamedTuple):
    """The lengths of a step as FlashQLA reads them. An empty sequence follows the last one.

    Attributes:
        cu_seqlens: [b+2], where each sequence begins.
        chunks: [n, 2], the sequence of each chunk, and its number there; a chunk of the empty one if it has no tokens.
        cu_parts: [m+1], where each part of a sequence begins.
        sequences: [m], the sequence of each part; the empty one for a part that its sequence does not need.
        first_parts: [b+2], the first part of each sequence.
        is_last: [m], whether a part has the last tokens of its sequence, or none.
    """

    cu_seqlens: Int32[Tensor, "_"]
    chunks: Int32[Tensor, "n 2"]
    cu_parts: Int32[Tensor, "_"]
    sequences: Int32[Tensor, "m"]
    first_parts: Int32[Tensor, "_"]
    is_last: Bool[Tensor, "m"]


def lengths_of(cu_seqlens_q: Int32[Tensor, "_"], num_tokens: int, *, chunk: int, part: int) -> Lengths:
    """Divide the sequences of a step into chunks and parts, in one launch.

    The host does not know how many there are, so each sequence has as many as it can need, from number
    `cu_seqlens_q[i] // size + i` on. Those that it does not need are empty.

    Args:
        cu_seqlens_q: where sequences begin, `[b+1]`.
        num_tokens: query rows, padding included.
        chunk: tokens in a chunk.
        part: tokens in a part.
    """
    device, b = cu_seqlens_q.device, len(cu_seqlens_q) - 1
    n, m = num_tokens // chunk + b + 1, num_tokens // part + b + 1
    ints = partial(torch.empty, dtype=torch.int32, device=device)
    is_last = torch.empty(m, dtype=torch.bool, device=device)
    lengths = Lengths(ints(b + 2), ints(n, 2), ints(m + 1), ints(m), ints(b + 2), is_last)
    Launch(
        _lengths_kernel,
        (b + 1,),
        dict(cu_seqlens_q=cu_seqlens_q),
        dict(
            lengths=lengths._replace(is_last=lengths.is_last.view(torch.uint8)),
            num_seqs=b,
            num_chunks=n,
            num_parts=m,
            CHUNK=chunk,
            PART=part,
            ENTRIES=ENTRIES,
        ),
        {},
    )
    return lengths


def gather_states(
    states: Float[Tensor, "n hv dv dk"], plan: StatePlan, num_tokens: int
) -> Float[Tensor, "rows hv dv dk"]:
    """Copy the state that each sequence starts from, in float32; zeros for the others, and for the empty sequence."""
    b, (hv, dv, dk) = plan.batch.num_seqs, states.shape[1:]
    before = torch.empty(b + 1, hv, dv, dk, dtype=torch.float32, device=states.device)
    Launch(
        _gather_kernel,
        (b + 1, hv, triton.cdiv(dv * dk, ELEMENTS)),
        {"states.pool": states, "before": before},
        dict(states=States(None, states.stride()), tables=tables_of(plan, num_tokens), DV=dv, DK=dk, ELEMENTS=ELEMENTS),
        {},
    )
    return before


def scatter_states(
    after: Float[Tensor, "rows hv dv dk"],
    states: Float[Tensor, "n hv dv dk"],
    out: Float[Tensor, "t hv dv"],
    plan: StatePlan,
) -> None:
    """Write the states after a step to their slots, and zeros to the rows of padding."""
    b, (hv, dv, dk) = plan.batch.num_seqs, states.shape[1:]
    Launch(
        _scatter_kernel,
        (b + 1, hv, triton.cdiv(dv * dk, ELEMENTS)),
        {"states.pool": states, "after": after, "out": out},
        dict(
            states=States(None, states.stride()),
            out_strides=out.stride(),
            tables=tables_of(plan, len(out)),
            DV=dv,
            DK=dk,
            PAD_V=triton.next_power_of_2(dv),
            ELEMENTS=ELEMENTS,
        ),
        {},
    )


@triton.jit(do_not_specialize=("cu_seqlens_q", "num_seqs", "num_chunks", "num_parts"))
@no_type_check
def _lengths_kernel(
    cu_seqlens_q,
    lengths,
    num_seqs,
    num_chunks,
    num_parts,
    CHUNK: tl.constexpr,
    PART: tl.constexpr,
    ENTRIES: tl.constexpr,
):
    i, at = tl.program_id(0), tl.arange(0, ENTRIES)
    is_sequence = i < num_seqs
    begin = tl.load(cu_seqlens_q + i)
    end = tl.load(cu_seqlens_q + i + 1, is_sequence, begin)
    tl.store(lengths.cu_seqlens + i, begin)

    first, after = begin // CHUNK + i, end // CHUNK + i + 1
    after = tl.where(is_sequence, after, num_chunks)
    needed = first + (end - begin + CHUNK - 1) // CHUNK
    for start in range(first, after, ENTRIES):
        chunk = start + at
        tl.store(lengths.chunks + 2 * chunk, tl.where(chunk < needed, i, num_seqs), chunk < after)
        tl.store(lengths.chunks + 2 * chunk + 1, tl.where(chunk < needed, chunk - first, 0), chunk < after)

    first, after = begin // PART + i, end // PART + i + 1
    after = tl.where(is_sequence, after, num_parts)
    needed = first + tl.maximum((end - begin + PART - 1) // PART, 1)
    tl.store(lengths.first_parts + i, first)
    for start in range(first, after, ENTRIES):
        part = start + at
        tl.store(lengths.cu_parts + part, tl.minimum(begin + (part - first) * PART, end), part < after)
        tl.store(lengths.sequences + part, tl.where(part < needed, i, num_seqs), part < after)
        tl.store(lengths.is_last + part, (part + 1 >= needed).to(tl.uint8), part < after)
    if i == num_seqs:
        tl.store(lengths.cu_seqlens + i + 1, begin)
        tl.store(lengths.first_parts + i + 1, num_parts)
        tl.store(lengths.cu_parts + num_parts, begin)


# Triton's interpreter finds a function only if it is defined above its caller.


@triton.jit
@no_type_check
def _elements_of(states, head, DV: tl.constexpr, DK: tl.constexpr, ELEMENTS: tl.constexpr):
    """Return where the elements of a program are in a state of the pool, and in one of contiguous memory."""
    at = tl.program_id(2).to(tl.int64) * ELEMENTS + tl.arange(0, ELEMENTS)
    in_pool = head * states.strides[1] + at // DK * states.strides[2] + at % DK * states.strides[3]
    return states.pool + in_pool, head * DV * DK + at, at < DV * DK


@triton.jit(do_not_specialize=CHANGING)
@no_type_check
def _gather_kernel(states, before, tables, DV: tl.constexpr, DK: tl.constexpr, ELEMENTS: tl.constexpr):
    number, head = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    sequence = find_sequence(tables, number)
    of_pool, at, is_element = _elements_of(states, head, DV, DK, ELEMENTS)
    has_state = is_element & (sequence.slot >= 0) & (sequence.start >= 0)
    state = tl.load(of_pool + sequence.start * states.strides[0], has_state, 0.0)
    tl.store(before + number * tl.num_programs(1) * DV * DK + at, state.to(tl.float32), is_element)


@triton.jit(do_not_specialize=CHANGING)
@no_type_check
def _scatter_kernel(
    states,
    after,
    out,
    out_strides,
    tables,
    DV: tl.constexpr,
    DK: tl.constexpr,
    PAD_V: tl.constexpr,
    ELEMENTS: tl.constexpr,
):
    number, head = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    sequence = find_sequence(tables, number)
    of_pool, at, is_element = _elements_of(states, head, DV, DK, ELEMENTS)
    is_written = is_element & (sequence.slot >= 0)
    state = tl.load(after + number * tl.num_programs(1) * DV * DK + at, is_written, 0.0)
    tl.store(of_pool + sequence.slot * states.strides[0], state.to(states.pool.dtype.element_ty), is_written)
    if (sequence.slot < 0) & (tl.program_id(2) == 0):
        at_v = tl.arange(0, PAD_V)
        of_out = out + head * out_strides[1] + at_v * out_strides[2]
        for token in range(sequence.length):
            row = (sequence.first_row + token) * out_strides[0]
            tl.store(of_out + row, tl.zeros([PAD_V], out.dtype.element_ty), at_v < DV)
