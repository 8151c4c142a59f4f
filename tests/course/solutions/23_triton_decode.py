"""23 · A decode in Triton, which runs here under its interpreter."""

from typing import no_type_check

import torch
import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor


@triton.jit
@no_type_check
def decode_kernel(query, key, value, out, seq_len, scale, head_stride, D: tl.constexpr, TILE: tl.constexpr):
    """Attend with one query head to all its keys, a tile of keys at a time, with exercise 10's running softmax.

    Program h computes head h. Its query begins at `query + h * D`, its output at `out + h * D`; the key of token j
    begins at `key + j * head_stride + h * D`, and its value likewise. The last tile may have fewer than TILE keys.
    """
    head = tl.program_id(0)
    dims = tl.arange(0, D)
    q = tl.load(query + head * D + dims)
    row_max = -float("inf")
    row_sum = 0.0
    acc = tl.zeros([D], dtype=tl.float32)
    for start in range(0, seq_len, TILE):
        tokens = start + tl.arange(0, TILE)
        offsets = tokens[:, None] * head_stride + head * D + dims[None, :]
        there = tokens < seq_len
        keys = tl.load(key + offsets, mask=there[:, None], other=0.0)
        values = tl.load(value + offsets, mask=there[:, None], other=0.0)
        scores = tl.where(there, tl.sum(keys * q[None, :], axis=1) * scale, -float("inf"))
        new_max = tl.maximum(row_max, tl.max(scores, axis=0))
        rescale = tl.exp(row_max - new_max)
        weights = tl.exp(scores - new_max)
        row_sum = row_sum * rescale + tl.sum(weights, axis=0)
        acc = acc * rescale + tl.sum(weights[:, None] * values, axis=0)
        row_max = new_max
    tl.store(out + head * D + dims, acc / row_sum)


def triton_decode(
    query: Float[Tensor, "h d"], key: Float[Tensor, "s h d"], value: Float[Tensor, "s h d"]
) -> Float[Tensor, "h d"]:
    """Launch the kernel, one program per head; everything is contiguous, and `d` is a power of two."""
    heads, size = query.shape
    out = torch.empty_like(query)
    decode_kernel[(heads,)](query, key, value, out, len(key), size**-0.5, heads * size, D=size, TILE=16)
    return out
