"""How fast a GPU reads memory: sums over a large tensor, which write almost nothing.

Decodes are compared with this rate, because they read keys and values and write only one row per sequence.
"""

from typing import no_type_check

import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor

SHAPES = (
    (1024, 8, 4),
    (2048, 8, 4),
    (4096, 4, 8),
    (4096, 16, 8),
)  # numbers of a step, steps, warps: the fastest counts


def sums(numbers: Float[Tensor, "n"], shape: tuple[int, int, int]) -> Float[Tensor, "programs"]:
    """Add up numbers, a run of them in each program.

    Args:
        numbers: float32, as many as fill whole programs.
        shape: one of `SHAPES`.

    Returns:
        The sum of each program.
    """
    block, steps, num_warps = shape
    partial = numbers.new_empty(numbers.numel() // (block * steps))
    _sum_kernel[(len(partial),)](numbers, partial, BLOCK=block, STEPS=steps, num_warps=num_warps)
    return partial


@triton.jit
@no_type_check
def _sum_kernel(numbers, partial, BLOCK: tl.constexpr, STEPS: tl.constexpr):
    program = tl.program_id(0).to(tl.int64)
    first = numbers + program * (BLOCK * STEPS) + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for step in tl.static_range(STEPS):  # unrolled, so that all loads are under way at once
        total += tl.load(first + step * BLOCK)
    tl.store(partial + program, tl.sum(total, 0))
