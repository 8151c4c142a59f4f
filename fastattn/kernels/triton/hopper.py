"""Shared by the warp-specialized kernels for Hopper: where they run, copies of rows, slots, and padding rows.

Those are `prompts_hopper`, `differential_hopper`, `latents_hopper`, `compressed_hopper` and `chunks_hopper`, which are
beside this file.

Source: the PTX manual, "cp.async" and "cp.async.mbarrier.arrive".
"""

from typing import no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy

from fastattn.kernels import device as devices
from fastattn.kernels.device import is_rocm

KNOWN = ("3.6", "3.7")  # versions of Triton: Gluon is experimental
PANEL = tl.constexpr(64)  # elements of a row that are contiguous in shared memory


def is_there(device: torch.device) -> bool:
    """Return whether a device has Hopper's asynchronous products, and Triton a known version of Gluon."""
    known = not is_rocm() and triton.__version__.startswith(KNOWN)
    return known and devices.capability(device) == (9, 0)


def is_aligned(x: Tensor, *strides: int) -> bool:
    """Return whether rows are contiguous, with an address and strides that are multiples of 16."""
    return x.stride(-1) == 1 and all(n % 16 == 0 for n in (x.data_ptr(), *strides))


def reach_of(pool: Tensor) -> int:
    """Return how far the last element of a pool is from its first one."""
    return sum((size - 1) * stride for size, stride in zip(pool.shape, pool.stride(), strict=True))


@gluon.jit
@no_type_check
def copy_rows(place, pool, offsets, is_row, LAYOUT: gl.constexpr, apart=PANEL):
    """Start to copy rows of a pool into shared memory, zeros where there is no row: memory there may be NaN.

    The panels of a row are `apart` elements apart: side by side, unless they are heads that lie elsewhere.
    """
    SIZE: gl.constexpr = place.shape[1]
    at = gl.arange(0, PANEL, layout=gl.SliceLayout(0, LAYOUT))
    pointers = pool + (offsets[:, None] + at[None, :])
    mask = is_row[:, None] & (at < PANEL)[None, :]  # the second is always true, and gives the mask its shape
    for first in gl.static_range(0, SIZE, PANEL):
        async_copy.async_copy_global_to_shared(
            place.slice(first, PANEL, 1), pointers + first // PANEL * apart, mask=mask
        )


@gluon.jit
@no_type_check
def leave(barrier):
    """Arrive at the barrier of a slot with each thread; `mbarrier.arrive` has all warps of a group meet before it.

    A thread that has no copies under way arrives at once. The barrier expects every thread of all consumers.
    """
    async_copy.mbarrier_arrive(barrier, increment_count=False)


@gluon.jit
@no_type_check
def store_padding(out, lse, row, num_rows, step, SIZE: gl.constexpr):
    """Write 0 and -inf into the rows past the last sequence, which belong to no tile: each program takes a few."""
    at = gl.arange(0, SIZE, layout=gl.BlockedLayout([2], [32], [gl.num_warps()], [0]))
    while row < num_rows:
        gl.store(out + row * SIZE + at, (at * 0).to(out.dtype.element_ty))
        gl.store(lse + row, float("-inf"))
        row += step


@gluon.jit
@no_type_check
def store_lines(out, values, places, is_row):
    """Store rows of `out [.., size]` with 16 bytes per thread: whole sectors. Products leave 4 bytes with a thread."""
    SIZE: gl.constexpr = values.shape[1]
    LINES: gl.constexpr = gl.BlockedLayout([1, 8], [256 // SIZE, SIZE // 8], [4, 1], [1, 0])
    places = gl.convert_layout(places, gl.SliceLayout(1, LINES))
    is_row = gl.convert_layout(is_row, gl.SliceLayout(1, LINES))
    values = gl.convert_layout(values.to(out.dtype.element_ty), LINES)
    at = gl.arange(0, SIZE, layout=gl.SliceLayout(0, LINES))
    gl.store(out + (places[:, None] * SIZE + at[None, :]), values, mask=is_row[:, None])
