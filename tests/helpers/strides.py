"""Tensors of the same numbers whose elements lie elsewhere."""

import mmap
import sys

import torch

NORESERVE = 0x4000  # Linux's MAP_NORESERVE, which Python 3.11 has no name for


def spread(x: torch.Tensor) -> torch.Tensor:
    """Put NaN between the elements."""
    wide = torch.full((*x.shape, 2), torch.nan, dtype=x.dtype, device=x.device)
    wide[..., 0] = x
    return wide[..., 0]


def shift(x: torch.Tensor) -> torch.Tensor:
    """Put an odd number of NaN before each row, head and element."""
    wide = torch.full([size + 3 for size in x.shape], torch.nan, dtype=x.dtype, device=x.device)
    view = wide[(slice(3, None),) * x.ndim]
    return view.copy_(x)


STRIDES = {
    "heads-innermost": lambda x: x.transpose(-1, -2).contiguous().transpose(-1, -2),
    "rows-innermost": lambda x: x.transpose(0, -1).contiguous().transpose(0, -1),
    "every-second-element": spread,
    "shifted": shift,
    "one-element": lambda x: x[..., :1].div(8).expand(x.shape),  # so that 64 products alike are as large as others
    "one-head": lambda x: x[..., :1, :].expand(x.shape),
    "one-row": lambda x: x[:1].expand(x.shape),
}


def far_apart(shape, strides, dtype, device):
    """Make a tensor of huge strides, of zeros; on a CPU only the pages of memory that are touched are there."""
    elements = 1 + sum(stride * (size - 1) for stride, size in zip(strides, shape, strict=True))
    if device == "cpu":
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | (NORESERVE if sys.platform == "linux" else 0)
        memory = torch.frombuffer(mmap.mmap(-1, elements * dtype.itemsize, flags), dtype=dtype)
    else:
        memory = torch.zeros(elements, dtype=dtype, device=device)
    return memory.as_strided(shape, strides)
