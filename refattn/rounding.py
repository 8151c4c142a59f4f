"""Quantization: round to the nearest value under a scale, and find the scale of an int8 row or a group of a latent."""

import torch
from einops import rearrange
from jaxtyping import Float, Float32, Int8
from torch import Tensor

from refattn.packed_latents import LATENT_GROUP, PACKED_FORMAT, SMALLEST_SCALE


def to_fp8(x: Float[Tensor, "*rows heads size"], scale: Float32[Tensor, "heads 1"], kind: torch.dtype) -> Tensor:
    """Round to the nearest value of an fp8 format; what is too large becomes its largest number."""
    largest = torch.finfo(kind).max
    return (x.float() / scale).clamp(-largest, largest).to(kind)


def to_int8(
    x: Float[Tensor, "*rows heads size"], scale: Float32[Tensor, "*rows2 heads #size"]
) -> Int8[Tensor, "*rows heads size"]:
    """Round to the nearest, of two to the even; NaN, which has no quantized value, becomes 0 under a scale of NaN."""
    return (x.float() / scale).round().clamp(-127, 127).nan_to_num(0.0).to(torch.int8)


def row_scale(x: Float[Tensor, "*rows heads size"]) -> Float32[Tensor, "*rows heads 1"]:
    """Return the scale of each row and head: its largest element becomes 127."""
    return scale_of(x.float().abs().amax(-1, keepdim=True))


def scale_of(largest: Float32[Tensor, "..."]) -> Float32[Tensor, "..."]:
    """Return the scale by which the largest number becomes 127; 1 if it is 0, or too small to be divided."""
    scale = largest / torch.full_like(largest, 127.0)  # a GPU divides by a number as it multiplies by its reciprocal
    return scale.masked_fill(scale == 0, 1.0)


def group_scales(latent: Float[Tensor, "_"]) -> Float32[Tensor, "_"]:
    """Return the scale of each 128 elements of a latent: its largest becomes 448; the smallest normal number for 0."""
    largest = rearrange(latent.float().abs(), "(g e) -> g e", e=LATENT_GROUP).amax(-1)
    return (largest / torch.full_like(largest, torch.finfo(PACKED_FORMAT).max)).clamp(min=SMALLEST_SCALE)


def per_head(scale: float | Float32[Tensor, "..."], num_kv_heads: int, sequence: int) -> Float32[Tensor, "hk 1"]:
    """Return the scale of each KV head for one sequence of the batch."""
    numbers = torch.as_tensor(scale, dtype=torch.float32, device=scale.device if isinstance(scale, Tensor) else "cpu")
    numbers = numbers[sequence] if numbers.ndim == 2 else numbers
    return rearrange(numbers.expand(num_kv_heads), "hk -> hk 1")
