"""Quantization: rounding to fp8, int8, int4 and nvfp4 under scales, the scales of rows and groups, turned rows."""

import torch
from einops import rearrange
from jaxtyping import Float, Float8e4m3fn, Float32, Int8, Int32, UInt8
from torch import Tensor

from refattn.four_bits import E2M1, GROUP, GROUP_FORMAT, LARGEST, SMALLEST_INT4_SCALE, turned_size, zero_points
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


def hadamard(x: Float[Tensor, "*rows d"]) -> Float[Tensor, "*rows d"]:
    """Turn rows by an orthonormal Hadamard matrix; twice gives the rows again, and products of rows stay the same.

        H(1) = 1        H(2n) = | H(n)  H(n) | / sqrt(2)        H H = 1,  (H q) . (H k) = q . k
                                | H(n) -H(n) |

    One large element becomes many small ones. A size that is no power of two is turned in blocks of the largest power
    of two that divides it: 96 elements in three blocks of 32.

    Source: the fast Walsh-Hadamard transform; for caches: Ashkboos et al. 2024, "QuaRot".
    """
    size = turned_size(x.shape[-1])
    turned = rearrange(x, "... (blocks e) -> ... blocks e", e=size)
    for _ in range(size.bit_length() - 1):
        first, second = rearrange(turned, "... (e two) -> two ... e", two=2)
        turned = torch.cat([first + second, first - second], dim=-1)
    return rearrange(turned, "... blocks e -> ... (blocks e)") * size**-0.5


def to_int4(
    x: Float[Tensor, "*rows d"],
) -> tuple[UInt8[Tensor, "*rows d//2"], Float32[Tensor, "*rows"]]:
    """Turn rows and round them to four bits, to nearest, ties to even; return two values per byte, and the scales.

        scale = (high - low) / 15        zero = round(-low / scale)        quantized = round(x / scale) + zero, 0 to 15

    `low` and `high` are the smallest and the largest element of a turned row, 0 among them, so that 0 stays 0. NaN and
    infinity make the scale of their row NaN or infinite, and it is read as NaN.
    """
    turned = hadamard(x.float())
    low, high = turned.amin(-1, keepdim=True).clamp(max=0.0), turned.amax(-1, keepdim=True).clamp(min=0.0)
    scale = ((high - low) / torch.full_like(high, LARGEST)).clamp(min=SMALLEST_INT4_SCALE)
    zero = (-low / scale).round().nan_to_num(0.0).clamp(0, LARGEST)
    scale = (scale.view(torch.int32) & ~LARGEST | zero.to(torch.int32)).view(torch.float32)
    quantized = ((turned / scale).round() + zero).nan_to_num(0.0).clamp(0, LARGEST)
    return _packed(quantized.to(torch.uint8)), rearrange(scale, "... 1 -> ...")


def from_int4(
    quantized: UInt8[Tensor, "*rows half"], scales: Float32[Tensor, "*rows"], dtype: torch.dtype
) -> Float[Tensor, "*rows 2*half"]:
    """Dequantize rows and turn them back, `hadamard(scale * (quantized - zero))`; rounded once, to `dtype`."""
    wide = torch.promote_types(dtype, torch.float32)
    zero = rearrange(zero_points(scales), "... -> ... 1")
    return hadamard(rearrange(scales.to(wide), "... -> ... 1") * (_unpacked(quantized) - zero)).to(dtype)


def to_nvfp4(
    x: Float[Tensor, "*rows d"], number: float
) -> tuple[UInt8[Tensor, "*rows d//2"], Float8e4m3fn[Tensor, "*rows d//16"]]:
    """Round rows to nvfp4, to nearest, ties to even; return two values per byte, and a scale per 16 elements.

        scale = e4m3(max |x| / (6 number))        quantized = e2m1(x / (scale number))

    What is too large saturates, infinity included; a NaN makes the scale of its group NaN.
    """
    of_all = torch.tensor(number, dtype=torch.float32, device=x.device)
    groups = rearrange(x.float(), "... (g e) -> ... g e", e=GROUP)
    largest = groups.abs().amax(-1, keepdim=True)
    scale = (largest / (6.0 * of_all)).clamp(max=torch.finfo(GROUP_FORMAT).max).to(GROUP_FORMAT)
    numbers = (groups / (scale.float() * of_all)).nan_to_num(0.0)  # a group of zeros has a scale of 0
    size = numbers.abs().clamp(max=E2M1[-1])
    steps = torch.where(size < 2, (2 * size).round(), torch.where(size < 4, size.round() + 2, (size / 2).round() + 4))
    quantized = steps.to(torch.uint8) | numbers.signbit().to(torch.uint8) << 3
    return _packed(rearrange(quantized, "... g e -> ... (g e)")), rearrange(scale, "... g 1 -> ... g")


def from_nvfp4(
    quantized: UInt8[Tensor, "*rows half"],
    scales: Float8e4m3fn[Tensor, "*rows groups"],
    number: float,
    dtype: torch.dtype,
) -> Float[Tensor, "*rows 2*half"]:
    """Dequantize rows, `number * scale * quantized`; rounded once, to `dtype`."""
    wide = torch.promote_types(dtype, torch.float32)
    numbers = torch.tensor([*E2M1, *(-x for x in E2M1)], dtype=wide, device=quantized.device)[_unpacked(quantized)]
    groups = rearrange(numbers, "... (g e) -> ... g e", e=GROUP)
    of_all = torch.tensor(number, dtype=torch.float32, device=scales.device)
    scale = rearrange(scales.to(wide), "... g -> ... g 1") * of_all
    return rearrange(groups * scale, "... g e -> ... (g e)").to(dtype)


def _packed(quantized: UInt8[Tensor, "*rows d"]) -> UInt8[Tensor, "*rows d//2"]:
    """Put two values into each byte, the first of them into the low four bits."""
    low, high = rearrange(quantized, "... (pairs two) -> two ... pairs", two=2)
    return low | high << 4


def _unpacked(quantized: UInt8[Tensor, "*rows half"]) -> Int32[Tensor, "*rows 2*half"]:
    """Return the two values of each byte."""
    pairs = torch.stack([quantized & LARGEST, quantized >> 4], dim=-1)
    return rearrange(pairs, "... pairs two -> ... (pairs two)").to(torch.int32)
