"""35 · The reduction of splits, in Triton."""

from typing import no_type_check

import torch
import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor


@triton.jit
@no_type_check
def reduce_kernel(outs, lses, out, num_parts, HEADS: tl.constexpr, D: tl.constexpr, PARTS: tl.constexpr):
    """Merge the partial outputs of one head by their log-sum-exps, a tile of PARTS at a time.

    Program h merges head h. Part p of head h has its log-sum-exp, a natural logarithm, at `lses + p * HEADS + h`, and
    its output begins at `outs + (p * HEADS + h) * D`; the merged one begins at `out + h * D`. A part that saw no key
    has a log-sum-exp of -inf, and anything in its output. At least one part of every head saw one.
    """
    head, dims = tl.program_id(0), tl.arange(0, D)
    row_max, row_sum, acc = -float("inf"), 0.0, tl.zeros([D], tl.float32)
    for first in range(0, num_parts, PARTS):
        part = first + tl.arange(0, PARTS)
        scores = tl.load(lses + part * HEADS + head, mask=part < num_parts, other=-float("inf"))
        has_keys = (scores > -float("inf"))[:, None]
        values = tl.load(outs + (part * HEADS + head)[:, None] * D + dims[None, :], mask=has_keys, other=0.0)
        new_max = tl.maximum(row_max, tl.max(scores, 0))
        base = tl.where(new_max == -float("inf"), 0.0, new_max)
        rescale = tl.exp(row_max - base)
        weights = tl.exp(scores - base)
        row_max, row_sum = new_max, row_sum * rescale + tl.sum(weights, 0)
        acc = acc * rescale + tl.sum(weights[:, None] * values, 0)
    tl.store(out + head * D + dims, acc / row_sum)


def triton_reduce(outs: Float[Tensor, "p h d"], lses: Float[Tensor, "p h"]) -> Float[Tensor, "h d"]:
    """Launch the kernel, one program per head; everything is contiguous, and `d` is a power of two."""
    num_parts, heads, size = outs.shape
    out = torch.empty_like(outs[0])
    reduce_kernel[(heads,)](outs, lses, out, num_parts, HEADS=heads, D=size, PARTS=4)
    return out
