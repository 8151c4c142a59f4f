"""Rows of four bits by plain arithmetic: two elements per byte, the matrix that turns int4, the numbers of nvfp4."""

import torch
from torch import Tensor

GROUP = 16  # elements under one scale of nvfp4
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # the numbers of nvfp4, by their last three bits


def hadamard(size: int, dtype: torch.dtype) -> Tensor:
    """Return the orthonormal matrix of a head, in blocks of the largest power of two that divides its size."""
    block, matrix = size & -size, torch.ones(1, 1, dtype=dtype)
    while len(matrix) < block:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return torch.block_diag(*[matrix] * (size // block)) * block**-0.5


def interleaved(low: Tensor, high: Tensor) -> Tensor:
    """Return elements of which the even ones are in the low halves of the bytes."""
    return torch.stack([low, high], -1).flatten(-2)


def in_bytes(elements: Tensor) -> Tensor:
    """Return two elements per byte, the even ones in the low halves."""
    return (elements[..., ::2] | elements[..., 1::2] << 4).to(torch.uint8)


def elements_of(pool: Tensor) -> Tensor:
    """Return the elements of a pool of bytes, 0 to 15."""
    return interleaved(pool.int() & 15, pool.int() >> 4)


def e2m1(quantized: Tensor) -> Tensor:
    """Return the numbers of nvfp4 elements, 0 to 15: the last three bits are a size, the first one is the sign."""
    sizes = torch.tensor(E2M1, dtype=torch.float64)
    return torch.cat([sizes, -sizes])[quantized.long()]


def with_zero_points(scales: Tensor, zeros: Tensor) -> Tensor:
    """Return float32 scales with zero points, 0 to 15, in their last four bits."""
    return (scales.contiguous().view(torch.int32) & ~15 | zeros.int()).view(torch.float32)


def int4_numbers(pool: Tensor, scales: Tensor) -> Tensor:
    """Return dequantized rows of int4 in float64, turned back."""
    zero = scales.contiguous().view(torch.int32) & 15
    rows = (elements_of(pool) - zero[..., None]).double() * scales.double()[..., None]
    return rows @ hadamard(rows.shape[-1], torch.float64)


def nvfp4_numbers(pool: Tensor, scales: Tensor, number: float) -> Tensor:
    """Return dequantized rows of nvfp4 in float64."""
    of_all = float(torch.tensor(number, dtype=torch.float32))
    return e2m1(elements_of(pool)) * scales.double().repeat_interleave(GROUP, -1) * of_all
