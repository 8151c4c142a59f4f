"""Shared by the warp-specialized kernels for Hopper: where they run, and padding rows.

Source: `fastattn.kernels.triton.prompts_hopper` and `fastattn.kernels.triton.latents_hopper`.
"""

from typing import no_type_check

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from fastattn.kernels import device as devices
from fastattn.kernels.device import is_rocm

KNOWN = ("3.6", "3.7")  # versions of Triton: Gluon is experimental


def is_there(device: torch.device) -> bool:
    """Return whether a device has Hopper's asynchronous products, and Triton a known version of Gluon."""
    known = not is_rocm() and triton.__version__.startswith(KNOWN)
    return known and devices.capability(device) == (9, 0)


def is_aligned(x: Tensor, *strides: int) -> bool:
    """Return whether rows are contiguous, with an address and strides that are multiples of 16."""
    return x.stride(-1) == 1 and all(n % 16 == 0 for n in (x.data_ptr(), *strides))


@gluon.jit
@no_type_check
def store_padding(out, lse, row, num_rows, step, SIZE: gl.constexpr):
    """Write 0 and -inf into the rows past the last sequence, which belong to no tile: each program takes a few."""
    at = gl.arange(0, SIZE, layout=gl.BlockedLayout([2], [32], [gl.num_warps()], [0]))
    while row < num_rows:
        gl.store(out + row * SIZE + at, (at * 0).to(out.dtype.element_ty))
        gl.store(lse + row, float("-inf"))
        row += step
