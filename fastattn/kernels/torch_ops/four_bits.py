"""Four-bit pages in plain torch: turn rows, quantize and write them, on any device; see `refattn.four_bits`.

A Hadamard matrix turns rows by one matrix product where their last bits do not matter. A write adds and subtracts
halves in the order of the definition, so that its bytes are those of the reference and of every kernel.
"""

from functools import cache

import torch
from jaxtyping import Float, Float8e4m3fn, Float32, Int64, UInt8
from torch import Tensor

from refattn.four_bits import (
    E2M1,
    GROUP,
    GROUP_FORMAT,
    LARGEST,
    SMALLEST_INT4_SCALE,
    Int4Scales,
    Nvfp4Scales,
    turned_size,
)

LARGEST_SCALE = torch.finfo(GROUP_FORMAT).max


def write_int4(
    key: Float[Tensor, "t hk d"],
    value: Float[Tensor, "t hk dv"],
    key_cache: UInt8[Tensor, "n p hk half"],
    value_cache: UInt8[Tensor, "n p hk value_half"],
    slot_mapping: Int64[Tensor, "t"],
    scales: Int4Scales,
) -> None:
    """Turn and quantize new tokens, and write them and their scales into the pools; see `fastattn.quantized.write`."""
    written = slot_mapping >= 0
    blocks, rows = _places(slot_mapping[written], key_cache)
    for new, pool, scale in ((key, key_cache, scales.key), (value, value_cache, scales.value)):
        pool[blocks, rows], scale[blocks, rows] = _to_int4(new[written].float())


def write_nvfp4(
    key: Float[Tensor, "t hk d"],
    value: Float[Tensor, "t hk dv"],
    key_cache: UInt8[Tensor, "n p hk half"],
    value_cache: UInt8[Tensor, "n p hk value_half"],
    slot_mapping: Int64[Tensor, "t"],
    scales: Nvfp4Scales,
) -> None:
    """Quantize new tokens, and write them and the scales of their groups; see `fastattn.quantized.write`."""
    written = slot_mapping >= 0
    blocks, rows = _places(slot_mapping[written], key_cache)
    of_keys, of_values = (scales.key, scales.of_keys), (scales.value, scales.of_values)
    for new, pool, (groups, number) in ((key, key_cache, of_keys), (value, value_cache, of_values)):
        pool[blocks, rows], scale = _to_nvfp4(new[written].float(), number)
        groups.view(torch.uint8)[blocks, rows] = scale.view(torch.uint8)


def turn(x: Float[Tensor, "t h d"]) -> Float[Tensor, "t h d"]:
    """Turn rows by an orthonormal Hadamard matrix, in the type of the rows, float32 or float64."""
    size = turned_size(x.shape[-1])
    return (x.unflatten(-1, (-1, size)) @ _matrix(size).to(x)).flatten(-2)


@cache
def _matrix(size: int) -> Float[Tensor, "d d"]:
    """Return the matrix: the sign of an element is the parity of the bits that its row and its column share."""
    at = torch.arange(size, device="cpu")
    common, parity = at[:, None] & at, torch.zeros(size, size, dtype=torch.int64, device="cpu")
    while common.any():
        parity ^= common & 1
        common = common >> 1
    return (1.0 - 2.0 * parity.double()) * size**-0.5


def numbers_of_int4(
    quantized: UInt8[Tensor, "*rows half"], scales: Float32[Tensor, "*rows"], out: Float[Tensor, "*rows d"]
) -> None:
    """Dequantize rows into `out`, still turned."""
    pairs = _pairs(out.dtype).to(out.device).index_select(0, quantized.flatten().int()).view(out.shape)
    torch.sub(pairs, (scales.view(torch.int32) & LARGEST)[..., None], out=out)
    out.mul_(scales[..., None])


@cache
def _pairs(dtype: torch.dtype) -> Float[Tensor, "256 2"]:
    """Return the two elements of each byte, the first one in its low half."""
    byte = torch.arange(256, device="cpu")
    return torch.stack([byte % 16, byte // 16], -1).to(dtype)


def numbers_of_nvfp4(
    quantized: UInt8[Tensor, "*rows half"],
    scales: Float8e4m3fn[Tensor, "*rows groups"],
    number: float,
    out: Float[Tensor, "*rows d"],
) -> None:
    """Dequantize rows into `out`."""
    levels = torch.tensor([*E2M1, *(-x for x in E2M1)], dtype=out.dtype, device=out.device)
    out[..., ::2] = levels[(quantized & LARGEST).long()]
    out[..., 1::2] = levels[(quantized >> 4).long()]
    factors = scales.to(out.dtype) * torch.tensor(number, dtype=torch.float32, device=out.device)
    out.unflatten(-1, (-1, GROUP)).mul_(factors[..., None])


def _places(slots: Int64[Tensor, "_"], cache: UInt8[Tensor, "n p hk half"]) -> tuple[Tensor, Tensor]:
    return slots // cache.shape[1], slots % cache.shape[1]


def _to_int4(x: Float32[Tensor, "t hk d"]) -> tuple[UInt8[Tensor, "t hk d//2"], Float32[Tensor, "t hk"]]:
    size, last = turned_size(x.shape[-1]), x.shape[-1]
    turned, step = x, 1
    while step < size:  # halves of blocks of 2, 4, 8, ... elements
        first, second = turned.unflatten(-1, (-1, 2, step)).unbind(-2)
        turned, step = torch.stack([first + second, first - second], -2).flatten(-3), 2 * step
    turned = turned.reshape(*x.shape[:-1], last) * size**-0.5
    low, high = (edge[..., None] for edge in turned.aminmax(dim=-1))
    low, high = low.clamp(max=0), high.clamp(min=0)
    scale = ((high - low) / torch.full_like(high, LARGEST)).clamp_(min=SMALLEST_INT4_SCALE)
    zero = (-low / scale).round_().nan_to_num_(0.0).clamp_(0, LARGEST)
    scale = scale.view(torch.int32).bitwise_and_(~LARGEST).bitwise_or_(zero.int()).view(torch.float32)
    quantized = (turned / scale).round_().add_(zero).nan_to_num_(0.0).clamp_(0, LARGEST).byte()
    return quantized[..., ::2] + 16 * quantized[..., 1::2], scale[..., 0]


def _to_nvfp4(
    x: Float32[Tensor, "t hk d"], number: float
) -> tuple[UInt8[Tensor, "t hk d//2"], Float8e4m3fn[Tensor, "t hk d//16"]]:
    groups, of_all = x.unflatten(-1, (-1, GROUP)), torch.tensor(number, dtype=torch.float32, device=x.device)
    scale = (groups.abs().amax(-1, keepdim=True) / (6.0 * of_all)).clamp_(max=LARGEST_SCALE).to(GROUP_FORMAT)
    numbers = (groups / (scale.float() * of_all)).nan_to_num_(0.0)
    edges = torch.tensor([(a + b) / 2 for a, b in zip(E2M1, E2M1[1:], strict=False)], device=x.device)
    size = numbers.abs().contiguous()  # bucketize warns of other strides
    quantized = torch.bucketize(size, edges)  # at an edge: the lower number
    quantized += (size == edges[1]) | (size == edges[3]) | (size == edges[5])  # unless it is the odd one of the two
    quantized = quantized.byte() | numbers.signbit().byte() << 3
    quantized = quantized.flatten(-2)
    return quantized[..., ::2] | quantized[..., 1::2] << 4, scale[..., 0]
