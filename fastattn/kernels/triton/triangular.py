"""The inverse of a triangular matrix, block by block, in Triton.

Source: Yang et al. 2024, "Parallelizing Linear Transformers with the Delta Rule over Sequence Length".
"""

from typing import no_type_check

import triton
import triton.language as tl

# Triton's interpreter finds a function only if it is defined above its caller.


@triton.jit
@no_type_check
def _on_diagonal(matrix, SIZE: tl.constexpr, CHUNK: tl.constexpr):
    """Return the blocks on the diagonal of a matrix."""
    NUM: tl.constexpr = CHUNK // SIZE
    block = tl.arange(0, NUM)
    is_on = block[:, None, None, None] == block[None, None, :, None]
    return tl.sum(tl.where(is_on, tl.reshape(matrix, [NUM, SIZE, NUM, SIZE]), 0.0), 2)


@triton.jit
@no_type_check
def _from_diagonal(blocks, SIZE: tl.constexpr, CHUNK: tl.constexpr):
    """Return the matrix that has blocks on its diagonal, and is 0 elsewhere."""
    NUM: tl.constexpr = CHUNK // SIZE
    block = tl.arange(0, NUM)
    is_on = block[:, None, None, None] == block[None, None, :, None]
    return tl.reshape(tl.where(is_on, blocks[:, :, None, :], 0.0), [CHUNK, CHUNK])


@triton.jit
@no_type_check
def _join_blocks(inverse, coupling, PRECISION: tl.constexpr):
    """Return the inverse of a matrix of four by four blocks, from the inverse of its diagonal and what couples blocks.

    The coupling X has a fourth power of 0, so `(1 - X)^-1 = (1 + X) (1 + X^2)`.
    """
    coupled = tl.dot(inverse, coupling, input_precision=PRECISION)
    inverse += tl.dot(tl.dot(coupled, coupled, input_precision=PRECISION), inverse, input_precision=PRECISION)
    return inverse + tl.dot(coupled, inverse, input_precision=PRECISION)


@triton.jit
@no_type_check
def invert_triangular(system, PRECISION: tl.constexpr, CHUNK: tl.constexpr):
    """Return the inverse of 1 minus a matrix that is 0 on and above its diagonal.

    In blocks of 4, 16 and 64 rows, one after the other: powers of the whole matrix would grow too large. Up to 16 rows,
    only the blocks on the diagonal are multiplied.
    """
    i, j = tl.arange(0, 16)[None, :, None], tl.arange(0, 16)[None, None, :]
    blocks = _on_diagonal(system, 16, CHUNK)
    coupled = tl.where(i // 4 == j // 4, blocks, 0.0)
    squared = tl.dot(coupled, coupled, input_precision=PRECISION)
    inverse = tl.where(i == j, 1.0, 0.0) + coupled
    inverse += squared + tl.dot(squared, coupled, input_precision=PRECISION)
    inverse = _from_diagonal(_join_blocks(inverse, blocks - coupled, PRECISION), 16, CHUNK)
    if CHUNK > 16:
        at = tl.arange(0, CHUNK)
        coupling = tl.where(at[:, None] // 16 != at[None, :] // 16, system, 0.0)
        inverse = _join_blocks(inverse, coupling, PRECISION)
    return inverse
