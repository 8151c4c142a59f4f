"""Quantization: rounding to fp8 and int8 under a scale, and the scales of int8 rows and latent groups."""

import torch
from einops import rearrange
from jaxtyping import Float, Float32, Int8
from torch import Tensor

from refattn.packed_latents import LATENT_GROUP, PACKED_FORMAT, SMALLEST_SCALE


def to_fp8(x: Float[Tensor, "*rows heads size"], scale: Float32[Tensor, "heads 1"], kind: torch.dtype) -> Tensor:
    """Divide by the scale and round to the nearest value of an fp8 format; too large values saturate."""
    largest = torch.finfo(kind).max
    return (x.float() / scale).clamp(-largest, largest).to(kind)


def to_int8(
    x: Float[Tensor, "*rows heads size"], scale: Float32[Tensor, "*rows2 heads #size"]
) -> Int8[Tensor, "*rows heads size"]:
    """Divide by the scale and round to nearest, ties to even; NaN becomes 0, and is kept by a NaN scale."""
    return (x.float() / scale).round().clamp(-127, 127).nan_to_num(0.0).to(torch.int8)


def row_scale(x: Float[Tensor, "*rows heads size"]) -> Float32[Tensor, "*rows heads 1"]:
    """Return the scale of each row and head, with which its largest element becomes 127."""
    return scale_of(x.float().abs().amax(-1, keepdim=True))


def scale_of(largest: Float32[Tensor, "..."]) -> Float32[Tensor, "..."]:
    """Return the scale with which the largest element becomes 127; 1 if that scale would be 0."""
    scale = largest / torch.full_like(largest, 127.0)  # on a GPU, x / 127.0 multiplies by the reciprocal
    return scale.masked_fill(scale == 0, 1.0)


def group_scales(latent: Float[Tensor, "_"]) -> Float32[Tensor, "_"]:
    """Return the scale of each 128 elements of a latent: the largest becomes 448; `SMALLEST_SCALE` for zeros."""
    largest = rearrange(latent.float().abs(), "(g e) -> g e", e=LATENT_GROUP).amax(-1)
    return (largest / torch.full_like(largest, torch.finfo(PACKED_FORMAT).max)).clamp(min=SMALLEST_SCALE)


def per_head(scale: float | Float32[Tensor, "..."], num_kv_heads: int, sequence: int) -> Float32[Tensor, "hk 1"]:
    """Return the scale of each KV head for one sequence of the batch."""
    numbers = torch.as_tensor(scale, dtype=torch.float32, device=scale.device if isinstance(scale, Tensor) else "cpu")
    numbers = numbers[sequence] if numbers.ndim == 2 else numbers
    return rearrange(numbers.expand(num_kv_heads), "hk -> hk 1")
