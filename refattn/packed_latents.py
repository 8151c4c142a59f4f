"""Packed latents: a token is a row of bytes with fp8 values, a scale per 128 of them, and a rotary key.

    bytes    0 .. 511              512 .. 527           528 .. 655
             512 fp8 (e4m3)        4 scales (float32)   64 values (bfloat16)        656 bytes, with DeepSeek's sizes

The latent is quantized and the rotary key is not: a few elements of the key are large, and they rotate with the
position.

Source: `fp8_ds_mla` of vLLM, which FlashMLA's sparse decode reads.
"""

from typing import NamedTuple

import torch
from jaxtyping import BFloat16, Float32, UInt8
from torch import Tensor

from refattn.checks import check, check_sizes

LATENT_GROUP = 128  # elements of a latent under one scale
PACKED_FORMAT = torch.float8_e4m3fn  # the format of quantized latents
SCALE_BYTES = 4  # a float32
ROPE_TYPE = torch.bfloat16  # the type of rotary keys
SMALLEST_SCALE = torch.finfo(torch.float32).tiny  # the scale of zeros, so that they stay zeros


class PackedParts(NamedTuple):
    """Views of packed rows.

    Attributes:
        quantized: the quantized latents, as bytes.
        scales: the scales of the quantized values, one per 128 of them.
        rope_key: the rotary keys.
    """

    quantized: UInt8[Tensor, "*rows r"]
    scales: Float32[Tensor, "*rows groups"]
    rope_key: BFloat16[Tensor, "*rows rope"]


def is_packed(cache: Tensor) -> bool:
    """Return whether a pool of latents is one of packed rows, in bytes."""
    return isinstance(cache, Tensor) and cache.dtype == torch.uint8


def packed_size(latent_rank: int, rope_size: int) -> int:
    """Return the bytes of a packed row.

    Raises:
        ValueError: if `latent_rank` is not a multiple of 128, or a row would not be a multiple of 4 bytes.
    """
    check_sizes(latent_rank=latent_rank, rope_size=rope_size)
    if latent_rank % LATENT_GROUP:
        raise ValueError(
            f"latent_rank: expected a multiple of {LATENT_GROUP} for packed latents, which have a scale for so many "
            f"elements each, got {latent_rank}"
        )
    if rope_size % 2:
        raise ValueError(f"rope_size: expected an even number for packed latents, got {rope_size}")
    return latent_rank + latent_rank // LATENT_GROUP * SCALE_BYTES + rope_size * ROPE_TYPE.itemsize


def packed_parts(rows: UInt8[Tensor, "*rows c"], latent_rank: int, rope_size: int) -> PackedParts:
    """Return views of packed rows, contiguous as `check_packed` requires."""
    end_of_scales = latent_rank + latent_rank // LATENT_GROUP * SCALE_BYTES
    end = packed_size(latent_rank, rope_size)
    return PackedParts(
        rows[..., :latent_rank],
        rows[..., latent_rank:end_of_scales].view(torch.float32),
        rows[..., end_of_scales:end].view(ROPE_TYPE),
    )


def check_packed(cache: Tensor, latent_rank: int, rope_size: int) -> None:
    """Check a pool `[n, p, c]` of packed rows: their size, and that scales are aligned.

    Raises:
        ValueError: naming the argument that does not fit.
    """
    size = packed_size(latent_rank, rope_size)
    sizes = check(cache=(cache, "uint8 n p c"))
    p, c = sizes["p"], sizes["c"]
    check_sizes(block_size=p)
    if c < size:
        raise ValueError(
            f"cache: expected packed rows of at least {size} bytes, for latents of {latent_rank} elements and rotary "
            f"keys of {rope_size}, got c={c}"
        )
    *strides, last = cache.stride()
    if last != 1 or any(x % SCALE_BYTES for x in (*strides, cache.storage_offset())):
        raise ValueError(
            "cache: expected packed rows whose bytes lie side by side, from multiples of 4 on, got strides "
            f"{tuple(cache.stride())} from {cache.storage_offset()} on"
        )
