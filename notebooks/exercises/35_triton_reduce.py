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
    raise NotImplementedError


def triton_reduce(outs: Float[Tensor, "p h d"], lses: Float[Tensor, "p h"]) -> Float[Tensor, "h d"]:
    """Launch the kernel, one program per head; everything is contiguous, and `d` is a power of two."""
    num_parts, heads, size = outs.shape
    out = torch.empty_like(outs[0])
    reduce_kernel[(heads,)](outs, lses, out, num_parts, HEADS=heads, D=size, PARTS=4)
    return out
