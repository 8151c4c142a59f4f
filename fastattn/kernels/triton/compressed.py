"""Entries from the rows of their tokens, in Triton: a program for some channels of an entry, and an online softmax.

Each channel has a softmax of its own, so there is no matrix product: a program keeps a maximum, a sum and a weighted
sum per channel, and reads each row once. No bit of an entry depends on the batch.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, no_type_check

import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor

from fastattn.kernels.replay import key_of_launch, launch_once
from fastattn.kernels.triton.launch import CHANGING, Launch
from refattn.entries import CompressedPlan

BLOCK_CHANNELS = 64  # channels per program
BLOCK_TOKENS = 16  # most tokens per step


class Rows(NamedTuple):
    """The pool of rows, and what entries are computed from.

    Attributes:
        pool: [n, p, c], a value and its gate.
        bias: [ratio, w] of the gates, or None.
        strides: of blocks, tokens and elements of the pool.
        bias_strides: of tokens and channels.
        WIDTH: w, elements of a value.
        SIZE: elements of an entry.
        RATIO: tokens of an entry.
        BLOCK_SIZE: p.
    """

    pool: Any
    bias: Any
    strides: Any
    bias_strides: Any
    WIDTH: Any
    SIZE: Any
    RATIO: Any
    BLOCK_SIZE: Any


class Entries(NamedTuple):
    """The sequences of entries, and the block table of their tokens.

    Attributes:
        cu_seqlens_q: [b+1], where the new entries of each sequence begin.
        seq_lens: [b], in entries.
        block_table: [b, m], of tokens.
        table_row_stride: of its sequences.
        table_stride: of its columns.
        num_seqs: b.
        steps: bits of b, the steps of a binary search over the sequences.
    """

    cu_seqlens_q: Any
    seq_lens: Any
    block_table: Any
    table_row_stride: Any
    table_stride: Any
    num_seqs: Any
    steps: Any


class Softmax(NamedTuple):
    """The state of an online softmax, per channel."""

    max: Any
    sum: Any
    acc: Any


def compress(
    row_cache: Float[Tensor, "n p c"], bias: Float[Tensor, "ratio w"] | None, plan: CompressedPlan
) -> Float[Tensor, "e d"]:
    """Compute the new entries, in one launch; see `fastattn.compressed.compress`."""
    width = row_cache.shape[2] // 2
    out = row_cache.new_empty(len(plan.slots), width // 2 if plan.overlap else width)
    if not out.numel():
        return out
    if not plan.batch.num_seqs:
        return out.zero_()
    tensors = row_cache, bias, out
    launch_once(plan, key_of_launch("compress", tensors), tensors, partial(_launch, *tensors, plan))
    return out


def _launch(row_cache: Tensor, bias: Tensor | None, out: Tensor, plan: CompressedPlan) -> Callable[..., None]:
    """Launch the kernel, and return the replay."""
    width, table = row_cache.shape[2] // 2, plan.batch.block_table
    assert table is not None  # the plan has checked it
    tokens = min(BLOCK_TOKENS, triton.next_power_of_2(plan.ratio))
    return Launch(
        _compress_kernel,
        (len(out), triton.cdiv(out.shape[1], BLOCK_CHANNELS)),
        {"rows.pool": row_cache, "rows.bias": bias, "out": out},
        dict(
            rows=Rows(
                row_cache,
                bias,
                row_cache.stride(),
                (0, 0) if bias is None else bias.stride(),
                *map(tl.constexpr, (width, out.shape[1], plan.ratio, plan.block_size)),
            ),
            entries=Entries(
                plan.new.cu_seqlens_q,
                plan.new.seq_lens,
                table,
                table.stride(0),
                table.stride(1),
                plan.batch.num_seqs,
                plan.batch.num_seqs.bit_length(),
            ),
            OVERLAP=plan.overlap,
            TOKENS=tokens,
            CHANNELS=BLOCK_CHANNELS,
        ),
        {},
    ).replay


# Triton's interpreter finds a function only if it is defined above its caller.


@triton.jit
@no_type_check
def _add_rows(softmax, rows, of_table, table_stride, first, column, in_entry, TOKENS: tl.constexpr):
    """Add `RATIO` tokens from a first one on to a softmax over some columns of their rows."""
    for step in range(0, rows.RATIO, TOKENS):
        j = step + tl.arange(0, TOKENS)
        is_token = j < rows.RATIO
        token = first + j
        block = tl.load(of_table + (token // rows.BLOCK_SIZE) * table_stride, is_token, 0).to(tl.int64)
        place = block * rows.strides[0] + (token % rows.BLOCK_SIZE).to(tl.int64) * rows.strides[1]
        where = rows.pool + place[:, None] + column[None, :] * rows.strides[2]
        is_there = is_token[:, None] & in_entry[None, :]
        value = tl.load(where, is_there, 0.0).to(tl.float32)
        gate = tl.load(where + rows.WIDTH * rows.strides[2], is_there, 0.0).to(tl.float32)
        if rows.bias is not None:
            at = j.to(tl.int64)[:, None] * rows.bias_strides[0] + column[None, :] * rows.bias_strides[1]
            gate += tl.load(rows.bias + at, is_there, 0.0).to(tl.float32)
        gate = tl.where(is_token[:, None], gate, float("-inf"))
        new_max = tl.maximum(softmax.max, tl.max(gate, 0))
        is_nan = tl.max((gate != gate).to(tl.int32), 0) > 0  # a maximum may ignore it
        new_max = tl.where(is_nan, float("nan"), new_max)
        rescale = tl.where(softmax.max == float("-inf"), 0.0, tl.exp(softmax.max - new_max))
        weight = tl.where(gate == float("-inf"), 0.0, tl.exp(gate - new_max[None, :]))
        softmax = Softmax(
            new_max, softmax.sum * rescale + tl.sum(weight, 0), softmax.acc * rescale + tl.sum(weight * value, 0)
        )
    return softmax


@triton.jit(do_not_specialize=[*CHANGING, "steps"])
@no_type_check
def _compress_kernel(rows, entries, out, OVERLAP: tl.constexpr, TOKENS: tl.constexpr, CHANNELS: tl.constexpr):
    """Compute some channels of one entry; zeros for a padding row."""
    row = tl.program_id(0).to(tl.int64)
    channel = (tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)).to(tl.int64)
    in_entry = channel < rows.SIZE
    low = row * 0
    high = low + entries.num_seqs  # the sequence is in low..high, or num_seqs for padding
    for _ in range(entries.steps):
        middle = (low + high) // 2
        before = (middle < entries.num_seqs) & (
            tl.load(entries.cu_seqlens_q + middle + 1, middle < entries.num_seqs, 0) <= row
        )
        low = tl.where(before, middle + 1, low)
        high = tl.where(before, high, middle)
    at = out + row * rows.SIZE + channel
    if low >= entries.num_seqs:
        tl.store(at, tl.zeros([CHANNELS], out.dtype.element_ty), in_entry)
        return
    end = tl.load(entries.cu_seqlens_q + low + 1)
    entry = tl.load(entries.seq_lens + low) + row - end
    of_table = entries.block_table + low * entries.table_row_stride
    softmax = Softmax(
        tl.full([CHANNELS], float("-inf"), tl.float32),
        tl.zeros([CHANNELS], tl.float32),
        tl.zeros([CHANNELS], tl.float32),
    )
    first = entry * rows.RATIO
    if OVERLAP and entry > 0:
        before = first - rows.RATIO
        softmax = _add_rows(softmax, rows, of_table, entries.table_stride, before, channel, in_entry, TOKENS)
    own = channel + rows.WIDTH - rows.SIZE
    softmax = _add_rows(softmax, rows, of_table, entries.table_stride, first, own, in_entry, TOKENS)
    tl.store(at, (softmax.acc / softmax.sum).to(out.dtype.element_ty), in_entry)
