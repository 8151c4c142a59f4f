"""Merge partial answers by their log-sum-exp, a few in each launch; called by `fastattn.merge` on a GPU.

Parts lie anywhere in memory, so each is an argument of its own, and each number of them another compilation. Up to
`PARTS_AT_ONCE` are one launch. More are merged from left to right, and what is merged so far, in float32, is the first
part of the next launch:

    parts       0 1 2 3 4 5 6 7 | 8 9 10 11 12 13 14 | 15 16
    launches    ^ first           ^ with what it gave   ^ likewise

Source: Milakov and Gimelshein 2018, "Online normalizer calculation for softmax"; Ye et al. 2025, "FlashInfer".
"""

from collections.abc import Sequence
from typing import no_type_check

import torch
import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor

BLOCK_ROWS = 16
PARTS_AT_ONCE = 8  # of a launch: one of 8 compiles in 0.9 s on the host of an NVIDIA H200, one of 128 in 91 s


def merge(
    outs: Sequence[Float[Tensor, "t h dv"]], lses: Sequence[Float[Tensor, "t h"]]
) -> tuple[Float[Tensor, "t h dv"], Float[Tensor, "t h"]]:
    """Combine answers of the same queries over disjoint keys; see `fastattn.merge.merge`.

    Args:
        outs: the partial outputs, of one shape; any strides, each its own.
        lses: their log-sum-exps, natural log, float32; an output whose LSE is `-inf` is not read.

    Returns:
        The output in the type of the first part, and its log-sum-exp. Where no part saw anything: 0 and `-inf`.
    """
    dtype = outs[0].dtype
    while len(outs) > PARTS_AT_ONCE:
        out, lse = _merge(outs[:PARTS_AT_ONCE], lses[:PARTS_AT_ONCE], torch.float32)
        outs, lses = [out, *outs[PARTS_AT_ONCE:]], [lse, *lses[PARTS_AT_ONCE:]]
    return _merge(outs, lses, dtype)


def _merge(outs: Sequence[Tensor], lses: Sequence[Tensor], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Combine a few answers in one launch, into an output of some type."""
    num_tokens, num_heads, value_head_size = outs[0].shape
    out = torch.empty(outs[0].shape, dtype=dtype, device=outs[0].device)
    lse = torch.empty(lses[0].shape, dtype=lses[0].dtype, device=lses[0].device)
    rows = num_tokens * num_heads
    if rows:
        _merge_kernel[(-(-rows // BLOCK_ROWS),)](
            tuple(outs),
            tuple(lses),
            out,
            lse,
            tuple(part.stride() for part in outs),
            tuple(part.stride() for part in lses),
            rows,
            NUM_PARTS=len(outs),
            NUM_HEADS=num_heads,
            VALUE_HEAD_SIZE=value_head_size,
            BLOCK_ROWS=BLOCK_ROWS,
        )
    return out, lse


@triton.jit(do_not_specialize=["rows"])
@no_type_check
def _merge_kernel(
    outs,
    lses,
    out,
    lse,
    out_strides,
    lse_strides,
    rows,
    NUM_PARTS: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    VALUE_HEAD_SIZE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    is_row = row < rows
    token, head = row // NUM_HEADS, row % NUM_HEADS
    VALUE_PAD: tl.constexpr = triton.next_power_of_2(VALUE_HEAD_SIZE)
    at_dv = tl.arange(0, VALUE_PAD).to(tl.int64)
    in_value = (at_dv < VALUE_HEAD_SIZE)[None, :]

    row_max = tl.full([BLOCK_ROWS], float("-inf"), tl.float32)
    for part in tl.static_range(NUM_PARTS):
        logs = tl.load(lses[part] + token * lse_strides[part][0] + head * lse_strides[part][1], is_row, float("-inf"))
        row_max = tl.maximum(row_max, logs)
    base = tl.where(row_max == float("-inf"), 0.0, row_max)  # -inf - -inf would be NaN
    row_sum = tl.zeros([BLOCK_ROWS], tl.float32)
    acc = tl.zeros([BLOCK_ROWS, VALUE_PAD], tl.float32)
    for part in tl.static_range(NUM_PARTS):
        logs = tl.load(lses[part] + token * lse_strides[part][0] + head * lse_strides[part][1], is_row, float("-inf"))
        values = tl.load(
            outs[part]
            + (token * out_strides[part][0] + head * out_strides[part][1])[:, None]
            + (at_dv * out_strides[part][2])[None, :],
            (logs > float("-inf"))[:, None] & in_value,  # what counts for nothing may hold anything
            0.0,
        )
        weights = tl.exp(logs - base)
        row_sum += weights
        acc += weights[:, None] * values.to(tl.float32)
    row_sum = tl.where(row_sum == 0.0, 1.0, row_sum)
    tl.store(
        out + row[:, None] * VALUE_HEAD_SIZE + at_dv[None, :],
        (acc / row_sum[:, None]).to(out.dtype.element_ty),
        is_row[:, None] & in_value,
    )
    tl.store(lse + row, row_max + tl.log(row_sum), is_row)
