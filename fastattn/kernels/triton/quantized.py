"""Quantization inside a kernel: pools are dequantized where they are multiplied, queries and keys are rounded.

    fp8      scores * (query scale * key scale * softmax scale)        a scale of a head is the same for all its keys
    int8     scores * query scale * key scale of each key              products of whole numbers are exact
    both     (weights . quantized values) * value scale                 per head, or per head and channel

Quantized values become float16, exactly, or float32 if queries are float32. Queries in bfloat16 become float16, each
divided by a power of two; but quantized latents that are not read in pairs get the type of the queries. Weights are
rounded to 16 bits, as over an unquantized cache, and never to 8.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, no_type_check

import torch
import triton
import triton.language as tl
from jaxtyping import Shaped
from torch import Tensor

from fastattn.kernels.triton.launch import converts_fp8
from refattn.options import AttentionOptions
from refattn.packed_latents import LATENT_GROUP
from refattn.plan import Plan
from refattn.scales import Fp8Scales, Int8Scales


class Quantization(NamedTuple):
    """How pools are dequantized, as kernels take it: `x = number * tensor * quantized`.

    Attributes:
        kind: the format of quantized values, "e4m3", "e5m2", "int8" or "int4".
        numbers: scales of the queries, the keys and the values; 1 where a tensor has them.
        query: scales of the queries, per head `[hk]`, or per sequence and head `[b, hk]`.
        key: scales of the keys, as `query`; for int8 and int4 per token of the pool and head, `[n, p, hk]`.
        value: scales of the values, as `query`; for int8 per head and channel, `[hk, dv]`, for int4 as for keys.
        rounds_query: queries are rounded to fp8, too.
        groups: scales of packed latents, `[n, p, groups]`, one per 128 elements of a latent; None for all others.
        per_byte: elements of a KV head in a byte of a row of a pool: 2 in four bits, 1 if such a row has two heads.
        heads: KV heads of a row.
        storage: makes the storage of the kernel from the queries, the fields that all storages have, and this; None for
            those of `fastattn.kernels.triton.quantized_keys`.
    """

    kind: str
    numbers: tuple[float, float, float] = (1.0, 1.0, 1.0)
    query: Tensor | None = None
    key: Tensor | None = None
    value: Tensor | None = None
    rounds_query: bool = False
    groups: Tensor | None = None
    per_byte: int = 1
    heads: int = 1
    storage: Callable[..., Any] | None = None

    @property
    def has_bytes(self) -> bool:
        """Whether quantized keys and values are bytes alone, and may be read in pairs of these."""
        return self.groups is None


UNQUANTIZED = Quantization("")
BLOCK = 2048  # elements of a program that rounds queries
GROUP = tl.constexpr(LATENT_GROUP)  # elements of a packed latent under one scale
FORMATS = {torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2"}


def quantization_of(scales: Fp8Scales | Int8Scales) -> Quantization:
    """Return scales as kernels take them."""
    if isinstance(scales, Int8Scales):
        return Quantization("int8", key=scales.key, value=scales.value)
    of_query, query = _number_and_tensor(scales.query)
    of_key, key = _number_and_tensor(scales.key)
    of_value, value = _number_and_tensor(scales.value)
    rounds_query = scales.query is not None
    return Quantization(FORMATS[scales.format], (of_query, of_key, of_value), query, key, value, rounds_query)


def quantized_in_pairs(
    query: Tensor, key: Tensor, value: Tensor, plans: Sequence[Plan], options: AttentionOptions, per_byte: int = 1
) -> tuple[Tensor, Tensor]:
    """Return quantized pools as kernels take them: fp8 as bytes, values (of int4 keys, too) in pairs if that pays.

    With few rows the kernel is memory-bound, and gains by pairs. With 64 rows Triton 3.6 compiles pairs to code that
    reads out of bounds, on an NVIDIA H200 with two accumulators of 32 columns; a shared level has many rows. With
    queries of 32 bits it transposes pairs in local memory.
    """
    key, value = (x.view(torch.uint8) if x.dtype in FORMATS else x for x in (key, value))
    rows = max(plan.batch.max_query_len for plan in plans) * (query.shape[1] // key.shape[2])
    pays = rows <= 16 and query.element_size() == 2 and not options.batch_invariant
    if not pays:
        return key, value
    return key if per_byte == 1 else in_pairs(key), in_pairs(value)


def pools_of_level(
    query: Tensor, key: Tensor, value: Tensor, tile_rows: int, quantization: Quantization
) -> tuple[Tensor, Tensor]:
    """Return pools as one level of several takes them: in pairs if its tiles have few rows, which others need not."""
    has_pairs = value.dtype == torch.uint16
    if not quantization.kind or not quantization.has_bytes or has_pairs or tile_rows > 16 or query.itemsize != 2:
        return key, value
    return in_pairs(key) if quantization.per_byte == 2 else key, in_pairs(value)


def _number_and_tensor(scale: float | Tensor | None) -> tuple[float, Tensor | None]:
    """Return a scale as kernels take it: a number and a tensor, where the unused one is 1 or None."""
    if isinstance(scale, Tensor):
        return 1.0, scale
    return 1.0 if scale is None else scale, None


def in_pairs(value_cache: Tensor) -> Tensor:
    """View quantized values as pairs, to be read two at a time, if strides and address allow it; else unchanged."""
    *strides, last = value_cache.stride()
    numbers = (*strides, value_cache.shape[-1], value_cache.data_ptr())
    if value_cache.itemsize != 1 or last != 1 or any(number % 2 for number in numbers):
        return value_cache
    return value_cache.view(torch.uint16)


# PTX to dequantize two pairs of values, into the first of each pair and the second, and four int8 values. An int8 value
# is the last byte of 1024 + 128 + value in float16.
PAIRS_OF_E4M3 = tl.constexpr("""
    {
        .reg .b16 low, high;
        .reg .b32 sorted;
        prmt.b32 sorted, $2, $2, 0x3120;
        mov.b32 {low, high}, sorted;
        cvt.rn.f16x2.e4m3x2 $0, low;
        cvt.rn.f16x2.e4m3x2 $1, high;
    }
""")
PAIRS_OF_E5M2 = tl.constexpr("""
    {
        .reg .b32 first;
        shl.b32 first, $2, 8;
        and.b32 $0, first, 0xff00ff00;
        and.b32 $1, $2, 0xff00ff00;
    }
""")
PAIRS_OF_INT8 = tl.constexpr("""
    {
        .reg .b32 raw, magic;
        xor.b32 raw, $2, 0x80808080;
        mov.b32 magic, 0x64646464;
        prmt.b32 $0, raw, magic, 0x4240;
        prmt.b32 $1, raw, magic, 0x4341;
        mov.b32 magic, 0x64806480;
        sub.f16x2 $0, $0, magic;
        sub.f16x2 $1, $1, magic;
    }
""")
FOUR_OF_INT8 = tl.constexpr("""
    {
        .reg .b32 raw, magic;
        xor.b32 raw, $2, 0x80808080;
        mov.b32 magic, 0x64646464;
        prmt.b32 $0, raw, magic, 0x4140;
        prmt.b32 $1, raw, magic, 0x4342;
        mov.b32 magic, 0x64806480;
        sub.f16x2 $0, $0, magic;
        sub.f16x2 $1, $1, magic;
    }
""")

# PTX to quantize four numbers.
FOUR_TO_E4M3 = tl.constexpr("""
    {
        .reg .b16 low, high;
        cvt.rn.satfinite.e4m3x2.f32 low, $2, $1;
        cvt.rn.satfinite.e4m3x2.f32 high, $4, $3;
        mov.b32 $0, {low, high};
    }
""")
FOUR_TO_E5M2 = tl.constexpr("""
    {
        .reg .b16 low, high;
        cvt.rn.satfinite.e5m2x2.f32 low, $2, $1;
        cvt.rn.satfinite.e5m2x2.f32 high, $4, $3;
        mov.b32 $0, {low, high};
    }
""")

# Triton's interpreter finds a function only if it is defined above its caller.


@triton.jit
@no_type_check
def dequantize(quantized, FORMAT: tl.constexpr, HAS_FP8_CVT: tl.constexpr):
    """Convert quantized values to float16, exactly.

    Without `HAS_FP8_CVT`, instructions that a GPU may have and the interpreter lacks, the bits are moved:

        e5m2    s eeeee mm   ->  s eeeee mm 00000000       the upper half of a float16
        e4m3    s eeee mmm   ->  s 0 eeee mmm 0000000      1 / 256 of the number, as its exponent is 8 too small
    """
    if FORMAT == "int8":
        if HAS_FP8_CVT:  # the bits of 1024 + 128 + value, minus 1152: four quantized values at a time
            numbers = tl.inline_asm_elementwise(
                FOUR_OF_INT8,
                "=&r,=&r,r",
                [quantized],
                dtype=tl.float16,
                is_pure=True,
                pack=4,
            )
        else:
            numbers = quantized.to(tl.float16)
    elif HAS_FP8_CVT:
        numbers = quantized.to(tl.float8e4nv if FORMAT == "e4m3" else tl.float8e5, bitcast=True).to(tl.float16)
    elif FORMAT == "e5m2":
        numbers = (quantized.to(tl.uint16) << 8).to(tl.float16, bitcast=True)
    else:
        bits = quantized.to(tl.uint16)
        numbers = ((bits & 0x80) * 256 + (bits & 0x7F) * 128).to(tl.float16, bitcast=True) * 256.0
        numbers = tl.where((bits & 0x7F) == 0x7F, float("nan"), numbers)
    return numbers


@triton.jit
@no_type_check
def scale_groups(numbers, scales, stride, rows, is_key, SIZE: tl.constexpr):
    """Multiply latents `[keys, SIZE or more]` in float32 by the scale of each group; `rows` are offsets of tokens.

    The scale of a group is loaded once for all its elements; a reshape separates the groups.
    """
    GROUPS: tl.constexpr = numbers.shape[1] // GROUP
    at = tl.arange(0, GROUPS)
    factors = tl.load(
        scales + rows[:, None] + at[None, :] * stride,
        mask=is_key[:, None] & (at < SIZE // GROUP)[None, :],
        other=0.0,
    )
    grouped = tl.reshape(numbers.to(tl.float32), [numbers.shape[0], GROUPS, GROUP]) * factors[:, :, None]
    return tl.reshape(grouped, numbers.shape)


@triton.jit
@no_type_check
def dequantize_pairs(pairs, FORMAT: tl.constexpr, HAS_FP8_CVT: tl.constexpr):
    """Convert pairs of quantized values, 16 bits each, to float16: the first ones, and the second ones.

    An instruction transposes a matrix of 16-bit elements as it is loaded from shared memory; bytes would be loaded one
    by one. Two pairs are converted at a time, as four bytes.
    """
    if HAS_FP8_CVT:
        OTHER: tl.constexpr = PAIRS_OF_E5M2 if FORMAT == "e5m2" else PAIRS_OF_INT8
        ASM: tl.constexpr = PAIRS_OF_E4M3 if FORMAT == "e4m3" else OTHER
        first, second = tl.inline_asm_elementwise(
            ASM, "=&r,=&r,r", [pairs], dtype=(tl.float16, tl.float16), is_pure=True, pack=2
        )
    else:
        KIND: tl.constexpr = tl.int8 if FORMAT == "int8" else tl.uint8
        first = dequantize((pairs & 0xFF).to(tl.uint8).to(KIND, bitcast=True), FORMAT, HAS_FP8_CVT)
        second = dequantize((pairs >> 8).to(tl.uint8).to(KIND, bitcast=True), FORMAT, HAS_FP8_CVT)
    return first, second


@triton.jit
@no_type_check
def _to_fp8_by_bits(numbers, FORMAT: tl.constexpr):
    """Do what `to_fp8` does without instructions for it.

    A normal number loses bits of its mantissa, after an addition that rounds it. A subnormal one is counted in steps,
    by the sum with a number whose last bit is worth a step.
    """
    MANTISSA: tl.constexpr = 3 if FORMAT == "e4m3" else 2
    BIAS: tl.constexpr = 7 if FORMAT == "e4m3" else 15
    LARGEST: tl.constexpr = 448.0 if FORMAT == "e4m3" else 57344.0
    LOST: tl.constexpr = 23 - MANTISSA
    SMALLEST: tl.constexpr = 0.015625 if FORMAT == "e4m3" else 0.00006103515625  # smallest normal number, 2**(1 - BIAS)
    STEPS: tl.constexpr = 16384.0 if FORMAT == "e4m3" else 128.0  # 2**(24 - BIAS - MANTISSA)
    bits = numbers.to(tl.uint32, bitcast=True)
    size = tl.minimum(tl.abs(numbers), LARGEST)
    size_bits = size.to(tl.uint32, bitcast=True)
    normal = (size_bits + ((1 << (LOST - 1)) - 1) + ((size_bits >> LOST) & 1)) >> LOST
    normal = tl.maximum(normal.to(tl.int32) - ((127 - BIAS) << MANTISSA), 0)
    small = (size + STEPS).to(tl.int32, bitcast=True) & 0xFF
    code = tl.where(size < SMALLEST, small, normal)
    code = tl.where(numbers != numbers, 0x7F, code)
    return (code | (bits >> 24 & 0x80).to(tl.int32)).to(tl.uint8)


@triton.jit
@no_type_check
def to_fp8(numbers, FORMAT: tl.constexpr, HAS_FP8_CVT: tl.constexpr):
    """Round float32 to the nearest value of fp8, ties to even, saturating."""
    if HAS_FP8_CVT:
        ASM: tl.constexpr = FOUR_TO_E4M3 if FORMAT == "e4m3" else FOUR_TO_E5M2
        quantized = tl.inline_asm_elementwise(ASM, "=r,r,r,r,r", [numbers], dtype=tl.uint8, is_pure=True, pack=4)
    else:
        quantized = _to_fp8_by_bits(numbers, FORMAT)
    return quantized


@triton.jit
@no_type_check
def to_int8(numbers):
    """Round float32 to the nearest integer from -127 to 127, ties to even; NaN becomes 0."""
    MAGIC: tl.constexpr = 12582912.0  # 1.5 * 2**23, whose last bit is worth 1
    small = tl.minimum(tl.maximum(numbers, -127.0), 127.0)  # either may drop a NaN
    quantized = (small + MAGIC) - MAGIC
    return tl.where(numbers != numbers, 0.0, quantized).to(tl.int8)


@triton.jit
@no_type_check
def row_scale(numbers):
    """Return the scale by which the largest element of each row becomes 127: NaN for a row with NaN, 1 for zeros."""
    largest = tl.max(tl.abs(numbers), 1)
    scale = tl.div_rn(largest, tl.full(largest.shape, 127.0, tl.float32))
    scale = tl.where(scale == 0.0, 1.0, scale)
    return tl.where(tl.max((numbers != numbers).to(tl.int32), 1) > 0, float("nan"), scale)


@triton.jit
@no_type_check
def power_of_two(largest):
    """Return the largest power of two up to `largest`, or 1 for 0: divided by it, numbers up to that are below 2."""
    power = (largest.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    return tl.where(power == 0.0, 1.0, power)


@triton.jit
@no_type_check
def prepare_query(q, divisor, FORMAT: tl.constexpr, ROUND_QUERY: tl.constexpr, HAS_FP8_CVT: tl.constexpr):
    """Return the query tile in the type of the key product, divided by `divisor`, a number or one for each row.

    For int8 it is quantized, for fp8 quantized and dequantized. What is not rounded becomes float16: a row below 2
    loses nothing there that a score would show.
    """
    numbers = tl.div_rn(q.to(tl.float32), tl.zeros(q.shape, tl.float32) + divisor)
    if FORMAT == "int8":
        prepared = to_int8(numbers)
    elif ROUND_QUERY:
        prepared = dequantize(to_fp8(numbers, FORMAT, HAS_FP8_CVT), FORMAT, HAS_FP8_CVT)
        prepared = prepared.to(tl.float32 if q.dtype == tl.float32 else tl.float16)
    else:
        prepared = numbers.to(tl.float16)
    return prepared


def quantize_query(x: Tensor, scale: float, kind: torch.dtype, dtype: torch.dtype) -> Shaped[Tensor, "..."]:
    """Quantize `x / scale`; return quantized values, or these converted to `dtype`, without the scale.

    Args:
        x: queries of any shape and strides; padding rows may hold anything.
        scale: above 0.
        kind: the format, `torch.float8_e4m3fn` or `torch.float8_e5m2`.
        dtype: `kind` for quantized values, `torch.float16` or `torch.float32` for converted ones.
    """
    x = x.contiguous()
    quantized = torch.empty_like(x, dtype=torch.uint8 if dtype == kind else dtype)
    if x.numel():
        _quantize_kernel[-(-x.numel() // BLOCK),](
            x, quantized, scale, x.numel(), BLOCK=BLOCK, FORMAT=FORMATS[kind], HAS_FP8_CVT=converts_fp8(x.device)
        )
    return quantized.view(kind) if dtype == kind else quantized


@triton.jit  # specialized on multiples of 16 elements, to vectorize loads
@no_type_check
def _quantize_kernel(
    x, quantized, scale, num_elements, BLOCK: tl.constexpr, FORMAT: tl.constexpr, HAS_FP8_CVT: tl.constexpr
):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    numbers = tl.load(x + at, at < num_elements, 0.0).to(tl.float32)
    rounded = to_fp8(tl.div_rn(numbers, tl.zeros([BLOCK], tl.float32) + scale), FORMAT, HAS_FP8_CVT)
    if quantized.dtype.element_ty != tl.uint8:
        rounded = dequantize(rounded, FORMAT, HAS_FP8_CVT)
    tl.store(quantized + at, rounded.to(quantized.dtype.element_ty), at < num_elements)
