"""Where the keys are, in a kernel: int4 pages, and their write; see `fastattn.kernels.triton.keys`.

    scores    scale[j] * (hadamard(query) . q[j] - zero[j] * sum(hadamard(query)))      a program turns its queries once
    output    hadamard(sum of weight[j] * scale[j] * (q[j] - zero[j]))                  and its partial output

A unit of a pool is a byte, of two elements, or two bytes, of four. A tile of units becomes two or four tiles, of every
second or every fourth element, as the query does: as many products, or weighted sums, each of a part of the size.
Nothing is converted: the bits of an element are the last four bits of a number of 16 bits, a very small float16 for
keys and a bfloat16 for values. Weights times scales are in a unit, a power of two, so large that these products are no
smaller than a float32 may be. What zero points take away is summed beside, for all elements:

    sum of w[j] * (q[j] - zero[j])  =  sum of w[j] * q[j]  -  sum of w[j] * zero[j]

Without PTX a value is 16 + element in bfloat16, and both sums are larger: a matrix core may take small numbers for 0.

Units of two bytes take the way of all 16 bits into the layout of a tensor core; bytes are read one by one where they
are transposed. They serve many rows, queries in float32, and pools that cannot be viewed in pairs of bytes. In float32
zero points are taken away before the products.

Source: `refattn.four_bits`; bits as numbers: Kim et al. 2022, "Who Says Elephants Can't Run".
"""

from typing import Any, NamedTuple, no_type_check

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int64, UInt8
from torch import Tensor

from fastattn.kernels.device import is_rocm
from fastattn.kernels.triton.constants import next_power_of_2
from fastattn.kernels.triton.keys import (
    How,
    multiply_keys,
    multiply_values,
    query_tile,
    same_scale,
    token_tile,
    value_offset,
    zeros,
)
from fastattn.kernels.triton.launch import INTERPRETED
from fastattn.kernels.triton.quantized import Quantization, power_of_two
from fastattn.kernels.triton.quantized_keys import Step
from refattn.batch import Batch
from refattn.four_bits import LARGEST, SMALLEST_INT4_SCALE, Int4Scales, turned_size

LAST = tl.constexpr(LARGEST)  # the last four bits
SMALLEST = tl.constexpr(SMALLEST_INT4_SCALE)

# PTX to take the elements of two units, of four bytes: two, or four, times as many numbers of 16 bits.
# They are the bits of a small float16, 2**-24 or 16 * 2**-24 of the element, or of a small bfloat16, 2**-133 of it.
OF_BYTES = tl.constexpr("""
    {
        .reg .b32 low, high;
        and.b32 low, $4, 0x0f0f0f0f;
        and.b32 high, $4, 0xf0f0f0f0;
        prmt.b32 $0, low, 0, 0x4140;
        prmt.b32 $1, low, 0, 0x4342;
        prmt.b32 $2, high, 0, 0x4140;
        prmt.b32 $3, high, 0, 0x4342;
    }
""")
OF_UNITS = tl.constexpr("""
    {
        .reg .b32 high;
        shr.u32 high, $4, 8;
        and.b32 $0, $4, 0x000f000f;
        and.b32 $1, $4, 0x00f000f0;
        and.b32 $2, high, 0x000f000f;
        and.b32 $3, high, 0x00f000f0;
    }
""")
BLOCK_ROWS = 16  # rows of a program that writes
TYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}

# Triton's interpreter finds a function only if it is defined above its caller.


class Int4(NamedTuple):
    """Keys and values in four bits, in pages.

    Attributes:
        how: its functions, `INT4`.
        where: pages.
        key: the pool of keys, in units.
        value: the pool of values, in units.
        key_strides: as in `Numbers`, and so on; sizes are those of elements.
        key_scales: [n, p, hk], each with its zero point in its last four bits.
        value_scales: the same, of the values.
        key_scale_strides: of blocks, tokens and heads.
        value_scale_strides: the same, of the values.
        KEY_UNIT: elements of a unit of keys, 2 or 4.
        VALUE_UNIT: elements of a unit of values, 2 or 4.
        KEY_TYPE: the type of the product of queries and keys.
        VALUE_TYPE: that of the product of weights and values.
        KEY_BLOCK: elements of a key that are turned together.
        VALUE_BLOCK: elements of a value that are.
        KEY_STAGES: log2(KEY_BLOCK).
        VALUE_STAGES: log2(VALUE_BLOCK).
        HAS_PTX: whether the compiler takes PTX.
        HEADS: KV heads of a program, 1 or 2; of two the first half of the rows are the queries of the first one.
    """

    how: Any
    where: Any
    key: Any
    value: Any
    key_strides: Any
    value_strides: Any
    HEAD_SIZE: Any
    VALUE_HEAD_SIZE: Any
    KEY_PAD: Any
    VALUE_PAD: Any
    VALUE_SHIFT: Any
    key_scales: Any
    value_scales: Any
    key_scale_strides: Any
    value_scale_strides: Any
    KEY_UNIT: Any
    VALUE_UNIT: Any
    KEY_TYPE: Any
    VALUE_TYPE: Any
    KEY_BLOCK: Any
    VALUE_BLOCK: Any
    KEY_STAGES: Any
    VALUE_STAGES: Any
    HAS_PTX: Any
    HEADS: Any


class Query(NamedTuple):
    """A tile of turned queries in parts, the unit of each row's products, and the sum of each row."""

    parts: Any
    unit: Any
    sums: Any


class Parts(NamedTuple):
    """Of each unit the first element, the second, the third and the fourth; the last two are 0 where units have two."""

    first: Any
    second: Any
    third: Any
    fourth: Any


class Weighted(NamedTuple):
    """Weighted sums of the parts of values, what is too much in each element, and the bits of the unit of both."""

    parts: Any
    excess: Any
    unit: Any


@triton.jit
@no_type_check
def turn(x, BLOCK: tl.constexpr, STAGES: tl.constexpr):
    """Turn rows `[rows, size]` by an orthonormal Hadamard matrix, `BLOCK = 2**STAGES` elements at a time, in float32.

    Each stage adds and subtracts neighbours, and puts the differences behind the sums; after all, each sum is where the
    definition has it.
    """
    ROWS: tl.constexpr = x.shape[0]
    SIZE: tl.constexpr = x.shape[1]
    for _ in tl.static_range(STAGES):
        first, second = tl.split(tl.reshape(x, [ROWS, SIZE // BLOCK, BLOCK // 2, 2]))
        x = tl.reshape(tl.permute(tl.join(first + second, first - second), (0, 1, 3, 2)), [ROWS, SIZE])
    return x * (BLOCK**-0.5)


@triton.jit
@no_type_check
def by_ptx(units, dtype: tl.constexpr):
    """Take the parts of units by PTX."""
    if units.dtype == tl.uint8:
        first, second = tl.inline_asm_elementwise(
            OF_BYTES, "=&r,=&r,=&r,=&r,r", (units,), dtype=(dtype.value,) * 2, is_pure=True, pack=4
        )
        parts = Parts(first, second, 0, 0)
    else:
        first, second, third, fourth = tl.inline_asm_elementwise(
            OF_UNITS, "=&r,=&r,=&r,=&r,r", (units,), dtype=(dtype.value,) * 4, is_pure=True, pack=2
        )
        parts = Parts(first, second, third, fourth)
    return parts


@triton.jit
@no_type_check
def key_parts(units, dtype: tl.constexpr, HAS_PTX: tl.constexpr):
    """Take the parts of keys: elements, and 16 times elements, in units of 2**-24 in float16."""
    if HAS_PTX and dtype == tl.float16:
        parts = by_ptx(units, dtype)
    else:
        is_half: tl.constexpr = dtype == tl.float16
        bits = units.to(tl.uint16)
        first, second = bits & 0x0F, bits & 0xF0
        first = first.to(dtype, bitcast=True) if is_half else first.to(dtype)
        second = second.to(dtype, bitcast=True) if is_half else second.to(dtype)
        third, fourth = 0, 0
        if units.dtype == tl.uint16:
            third, fourth = (bits >> 8) & 0x0F, (bits >> 8) & 0xF0
            third = third.to(dtype, bitcast=True) if is_half else third.to(dtype)
            fourth = fourth.to(dtype, bitcast=True) if is_half else fourth.to(dtype)
        parts = Parts(first, second, third, fourth)
    return parts


@triton.jit
@no_type_check
def sixteen_more(bits, SHIFT: tl.constexpr):
    """Return 16 + the element from the bit `SHIFT` on, in bfloat16."""
    return ((((bits >> SHIFT) & 0x0F) << 3) | 0x4180).to(tl.bfloat16, bitcast=True)


@triton.jit
@no_type_check
def value_parts(units, HAS_PTX: tl.constexpr):
    """Take the parts of values in bfloat16: the bits of small numbers, or without PTX elements, 16 more."""
    if HAS_PTX:
        parts = by_ptx(units, tl.bfloat16)
    else:
        bits = units.to(tl.uint16)
        third, fourth = 0, 0
        if units.dtype == tl.uint16:
            third, fourth = sixteen_more(bits, 8), sixteen_more(bits, 12)
        parts = Parts(sixteen_more(bits, 0), sixteen_more(bits, 4), third, fourth)
    return parts


@triton.jit
@no_type_check
def zero_points(scale):
    """Return the zero point of each scale."""
    return (scale.to(tl.int32, bitcast=True) & LAST).to(tl.float32)


@triton.jit
@no_type_check
def is_of_head(HEADS: tl.constexpr, ROWS: tl.constexpr):
    """Return which row is a query of which KV head, [rows, heads, 1]."""
    return (tl.arange(0, ROWS)[:, None] // (ROWS // HEADS) == tl.arange(0, HEADS)[None, :])[:, :, None]


@triton.jit
@no_type_check
def beside(part, HEADS: tl.constexpr):
    """Put a part of queries, [rows, size], beside zeros for the elements of other KV heads, [rows, heads * size]."""
    if HEADS > 1:
        ROWS: tl.constexpr = part.shape[0]
        SIZE: tl.constexpr = part.shape[1]
        wide = tl.broadcast_to(part[:, None, :], [ROWS, HEADS, SIZE])
        part = tl.reshape(tl.where(is_of_head(HEADS, ROWS), wide, tl.zeros_like(wide)), [ROWS, HEADS * SIZE])
    return part


@triton.jit
@no_type_check
def own_part(part, HEADS: tl.constexpr):
    """Return of sums of the values of all KV heads, [rows, heads * size], those of the head of each row."""
    if HEADS > 1:
        ROWS: tl.constexpr = part.shape[0]
        SIZE: tl.constexpr = part.shape[1] // HEADS
        part = tl.reshape(part, [ROWS, HEADS, SIZE])
        part = tl.sum(tl.where(is_of_head(HEADS, ROWS), part, 0.0), 1)
    return part


@triton.jit
@no_type_check
def for_rows(of_keys, HEADS: tl.constexpr, TILE):
    """Spread scales of keys, [keys] or of two heads [keys, heads], along the rows of a tile."""
    if HEADS > 1:
        tl.static_assert(TILE.KEYS_AXIS == 0)
        EACH: tl.constexpr = TILE.ROWS // HEADS
        wide = tl.broadcast_to(of_keys[:, :, None], [TILE.KEYS, HEADS, EACH])
        spread = tl.reshape(wide, [TILE.KEYS, TILE.ROWS])
    else:
        spread = tl.expand_dims(of_keys, 1 - TILE.KEYS_AXIS)
    return spread


@triton.jit
@no_type_check
def unit_of(unit, scale, HEADS: tl.constexpr, TILE):
    """Return the bits of a unit that is as large as the scales of a step: a power of two, the last one or a larger one.

    Weights in it are below 2**101; times 2**-133 of an element, they and all but the smallest are normal numbers.
    """
    SMALLEST_UNIT: tl.constexpr = 101 << 23  # 2**-26: its inverse times 2**100 is still a number
    LARGEST_UNIT: tl.constexpr = 254 << 23  # of scales that are infinite or NaN
    largest = tl.max(scale.to(tl.int32, bitcast=True), 0) & 0x7F800000
    if HEADS > 1:  # for each row: what is infinite stays with its head
        largest = tl.reshape(tl.broadcast_to(largest[:, None], [HEADS, TILE.ROWS // HEADS]), [TILE.ROWS])
    return tl.maximum(tl.minimum(tl.maximum(largest, unit), LARGEST_UNIT), SMALLEST_UNIT)


@triton.jit
@no_type_check
def int4_query(keys, queries, tile, TILE):
    """Load a tile of queries and turn it. Each row is divided by a power of two, so that float16 holds it.

    Keys have second and fourth elements 16 times too large; so the queries have the others.
    """
    q = turn(query_tile(queries, tile, 0, keys.HEAD_SIZE, keys.KEY_PAD).to(tl.float32), keys.KEY_BLOCK, keys.KEY_STAGES)
    factors = power_of_two(tl.max(tl.abs(q), 1))
    q = tl.div_rn(q, tl.broadcast_to(factors[:, None], q.shape)).to(keys.KEY_TYPE)
    sums = tl.sum(q.to(tl.float32), 1) * factors
    first, second = tl.split(tl.reshape(q, [TILE.ROWS, keys.KEY_PAD // 2, 2]))
    third, fourth = 0, 0
    if keys.KEY_UNIT == 4:
        first, third = tl.split(tl.reshape(first, [TILE.ROWS, keys.KEY_PAD // 4, 2]))
        second, fourth = tl.split(tl.reshape(second, [TILE.ROWS, keys.KEY_PAD // 4, 2]))
        third = (third * 16).to(keys.KEY_TYPE)
    first = (first * 16).to(keys.KEY_TYPE)
    first, second = beside(first, keys.HEADS), beside(second, keys.HEADS)
    if keys.KEY_UNIT == 4:
        third, fourth = beside(third, keys.HEADS), beside(fourth, keys.HEADS)
    if TILE.KEYS_AXIS == 0:
        first, second = tl.trans(first), tl.trans(second)
        if keys.KEY_UNIT == 4:
            third, fourth = tl.trans(third), tl.trans(fourth)
    unit = factors * (2.0**20 if tl.float16 == keys.KEY_TYPE else 2.0**-4)
    return Query(Parts(first, second, third, fourth), unit, sums)


@triton.jit
@no_type_check
def scales_of(keys, scales, strides, tile, place, is_key):
    """Load the scales of a step, one per token and KV head."""
    of_head = scales + tile.kv_head.to(tl.int64) * (keys.HEADS * strides[2])
    offset = keys.where.offset(keys.where, place, strides)
    if keys.HEADS > 1:
        at = of_head + (offset[:, None] + tl.arange(0, keys.HEADS)[None, :])  # heads are neighbours
        loaded = tl.load(at, mask=is_key[:, None] & (tl.arange(0, keys.HEADS) >= 0)[None, :], other=0.0)
    else:
        loaded = tl.load(of_head + offset, mask=is_key, other=0.0)
    return loaded


@triton.jit
@no_type_check
def read_slots(is_key):
    """Return that all slots of a step are read, as any four bits are a number: without keys, a block of the pool's.

    Their scales are not read. A mask of the elements would take six instructions for each row of a thread.
    """
    return tl.full(is_key.shape, True, tl.int1)


@triton.jit
@no_type_check
def load_int4(keys, tile, place, is_key, TILE):
    """Load the keys of a step in units, and their scales."""
    pool = keys.key + tile.kv_head.to(tl.int64) * keys.key_strides[-2]
    offset, stride = keys.where.offset(keys.where, place, keys.key_strides), keys.key_strides[-1]
    SIZE: tl.constexpr = keys.HEADS * keys.HEAD_SIZE // keys.KEY_UNIT
    PAD: tl.constexpr = keys.HEADS * keys.KEY_PAD // keys.KEY_UNIT
    k = token_tile(pool, offset, stride, read_slots(is_key), 0, SIZE, PAD, TILE.KEYS_AXIS)
    return Step(k, scales_of(keys, keys.key_scales, keys.key_scale_strides, tile, place, is_key))


@triton.jit
@no_type_check
def int4_products(keys, q, step, TILE):
    """Multiply the parts of queries and keys, take away what zero points add, and multiply by the scale of each key.

    In float32 they are taken away from the keys: the difference of two sums would lose digits.
    """
    k = key_parts(step.key, keys.KEY_TYPE, keys.HAS_PTX)
    zero = for_rows(zero_points(step.scale), keys.HEADS, TILE)
    if tl.float32 == keys.KEY_TYPE:
        third, fourth = k.third, k.fourth
        if keys.KEY_UNIT == 4:
            third, fourth = third - zero, fourth - 16 * zero
        k = Parts(k.first - zero, k.second - 16 * zero, third, fourth)
    products = multiply_keys(q.parts.first, k.first, TILE) + multiply_keys(q.parts.second, k.second, TILE)
    if keys.KEY_UNIT == 4:
        products += multiply_keys(q.parts.third, k.third, TILE)
        products += multiply_keys(q.parts.fourth, k.fourth, TILE)
    products = products * tl.expand_dims(q.unit, TILE.KEYS_AXIS)
    if tl.float32 != keys.KEY_TYPE:
        products -= zero * tl.expand_dims(q.sums, TILE.KEYS_AXIS)
    return products * for_rows(step.scale, keys.HEADS, TILE)


@triton.jit
@no_type_check
def begin_int4(keys, TILE):
    """Return empty weighted sums. With few rows the excess is summed over the keys of a thread, in the end over all."""
    SIZE: tl.constexpr = keys.HEADS * keys.VALUE_PAD // keys.VALUE_UNIT
    third, fourth = 0, 0
    if keys.VALUE_UNIT == 4:
        third, fourth = zeros(SIZE, TILE), zeros(SIZE, TILE)
    unit = tl.zeros([TILE.ROWS], tl.int32) if keys.HEADS > 1 else tl.full([], 0, tl.int32)
    excess = zeros(TILE.KEYS, TILE) if TILE.ROWS <= 16 else tl.zeros([TILE.ROWS], tl.float32)
    return Weighted(Parts(zeros(SIZE, TILE), zeros(SIZE, TILE), third, fourth), excess, unit)


@triton.jit
@no_type_check
def load_int4_values(keys, tile, place, is_key, step, TILE):
    """Load the values of a step in units, and their scales."""
    pool = keys.value + tile.kv_head.to(tl.int64) * keys.value_strides[-2]
    offset, stride = value_offset(keys, place), keys.value_strides[-1]
    SIZE: tl.constexpr = keys.HEADS * keys.VALUE_HEAD_SIZE // keys.VALUE_UNIT
    PAD: tl.constexpr = keys.HEADS * keys.VALUE_PAD // keys.VALUE_UNIT
    v = token_tile(pool, offset, stride, read_slots(is_key), 0, SIZE, PAD, 1 - TILE.KEYS_AXIS)
    return Step(v, scales_of(keys, keys.value_scales, keys.value_scale_strides, tile, place, is_key))


@triton.jit
@no_type_check
def scaled(part, LARGER: tl.constexpr, zero, scale):
    """Return values: elements, `LARGER` times too large, in float16 in units of 2**-24, less zero points, scaled."""
    UNITS: tl.constexpr = 2.0**24 if part.dtype == tl.float16 else 1.0
    return ((part.to(tl.float32) * (UNITS / LARGER) - zero) * scale).to(part.dtype)


@triton.jit
@no_type_check
def add_int4(keys, acc, rescale, weights, v, TILE):
    """Rescale the weighted sums, and add a step to each.

    A weight is multiplied by the scale of its value. In float16 a small product would lose digits, and in float32 so
    would the difference of two sums; so there the values are multiplied, and nothing is in excess.
    """
    dtype: tl.constexpr = keys.VALUE_TYPE
    excess, unit = acc.excess, acc.unit
    if dtype != tl.bfloat16:
        parts = key_parts(v.key, dtype, keys.HAS_PTX)
        tl.static_assert(keys.HEADS == 1)
        zero = tl.expand_dims(zero_points(v.scale), TILE.KEYS_AXIS)
        scale = tl.expand_dims(v.scale, TILE.KEYS_AXIS)
        third, fourth = 0, 0
        if keys.VALUE_UNIT == 4:
            third, fourth = scaled(parts.third, 1, zero, scale), scaled(parts.fourth, 16, zero, scale)
        parts = Parts(scaled(parts.first, 1, zero, scale), scaled(parts.second, 16, zero, scale), third, fourth)
        weights = weights.to(dtype)
    else:
        parts = value_parts(v.key, keys.HAS_PTX)
        scale = v.scale
        if keys.HAS_PTX:
            unit = unit_of(acc.unit, v.scale, keys.HEADS, TILE)
            factor = ((100 << 23) + ((254 << 23) - unit)).to(tl.float32, bitcast=True)  # 2**100 / unit
            if keys.HEADS > 1:
                weights *= tl.expand_dims(factor, TILE.KEYS_AXIS)
            else:
                scale *= factor
            rescale *= tl.maximum((127 << 23) + (acc.unit - unit), 0).to(tl.float32, bitcast=True)
        weights = (weights * for_rows(scale, keys.HEADS, TILE)).to(dtype)
        # moved bits: a conversion takes as long as four products
        rounded = (weights.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
        zero = zero_points(v.scale) + (0.0 if keys.HAS_PTX else 16.0)
        more = rounded * for_rows(zero, keys.HEADS, TILE)
        if TILE.ROWS <= 16:
            excess = excess * tl.expand_dims(rescale, TILE.KEYS_AXIS) + more
        else:
            excess = excess * rescale + tl.sum(more, TILE.KEYS_AXIS)
    rescale = tl.expand_dims(rescale, TILE.KEYS_AXIS)
    third, fourth = 0, 0
    if keys.VALUE_UNIT == 4:
        third = multiply_values(acc.parts.third * rescale, weights, parts.third, TILE)
        fourth = multiply_values(acc.parts.fourth * rescale, weights, parts.fourth, TILE)
    first = multiply_values(acc.parts.first * rescale, weights, parts.first, TILE)
    second = multiply_values(acc.parts.second * rescale, weights, parts.second, TILE)
    return Weighted(Parts(first, second, third, fourth), excess, unit)


@triton.jit
@no_type_check
def end_int4(keys, acc, TILE):
    """Return the weighted sum, [rows, dv], with its parts interleaved again, less the excess."""
    first, second, third, fourth = acc.parts
    IN_UNITS: tl.constexpr = keys.HAS_PTX and tl.bfloat16 == keys.VALUE_TYPE
    if IN_UNITS:
        second = second * 0.0625
        if keys.VALUE_UNIT == 4:
            fourth = fourth * 0.0625
    if TILE.KEYS_AXIS == 0:
        first, second = tl.trans(first), tl.trans(second)
        if keys.VALUE_UNIT == 4:
            third, fourth = tl.trans(third), tl.trans(fourth)
    first, second = own_part(first, keys.HEADS), own_part(second, keys.HEADS)
    if keys.VALUE_UNIT == 4:
        third, fourth = own_part(third, keys.HEADS), own_part(fourth, keys.HEADS)
    if keys.VALUE_UNIT == 4:
        first, second = tl.join(first, third), tl.join(second, fourth)
    values = tl.reshape(tl.join(first, second), [TILE.ROWS, keys.VALUE_PAD])
    excess = tl.sum(acc.excess, TILE.KEYS_AXIS) if TILE.ROWS <= 16 else acc.excess
    if IN_UNITS:
        values = values * 2.0**66 * 2.0**67
    values = values - excess[:, None]
    if IN_UNITS:
        unit = acc.unit.to(tl.float32, bitcast=True)
        if keys.HEADS > 1:
            unit = unit[:, None]
        values = values * 2.0**-100 * unit
    return values


@triton.jit
@no_type_check
def turned_back(keys, values, tile):
    """Turn the output back. Elements of the padding are in blocks of their own."""
    return turn(values, keys.VALUE_BLOCK, keys.VALUE_STAGES)


INT4 = How(
    tl.constexpr(int4_query),
    tl.constexpr(load_int4),
    tl.constexpr(int4_products),
    tl.constexpr(begin_int4),
    tl.constexpr(load_int4_values),
    tl.constexpr(add_int4),
    tl.constexpr(end_int4),
    tl.constexpr(same_scale),
    tl.constexpr(turned_back),
)


def int4_quantization(scales: Int4Scales) -> Quantization:
    """Return how int4 pages are dequantized."""
    return Quantization("int4", key=scales.key, value=scales.value, per_byte=2, storage=int4_keys_of)


def int4_keys_of(query: Tensor, both: dict[str, Any], quantization: Quantization) -> Int4:
    """Return keys and values in four bits as the kernel takes them.

    Args:
        query: query rows of all sequences.
        both: the fields that all storages have, from `fastattn.kernels.triton.keys.keys_of`.
        quantization: the scales.
    """
    key_scales, value_scales = quantization.key, quantization.value
    assert key_scales is not None and value_scales is not None  # int4 has both
    blocks = [turned_size(both[name].value) for name in ("HEAD_SIZE", "VALUE_HEAD_SIZE")]
    sizes = dict(zip(("KEY_BLOCK", "VALUE_BLOCK"), blocks, strict=True))
    sizes |= {"KEY_STAGES": blocks[0].bit_length() - 1, "VALUE_STAGES": blocks[1].bit_length() - 1}
    return Int4(
        how=INT4,
        **both,
        key_scales=key_scales,
        value_scales=value_scales,
        key_scale_strides=key_scales.stride(),
        value_scale_strides=value_scales.stride(),
        KEY_UNIT=tl.constexpr(query.shape[2] * quantization.heads // both["key"].shape[-1]),
        VALUE_UNIT=tl.constexpr(both["VALUE_HEAD_SIZE"].value * quantization.heads // both["value"].shape[-1]),
        KEY_TYPE=tl.constexpr(tl.float32 if query.dtype == torch.float32 else tl.float16),
        VALUE_TYPE=tl.constexpr(TYPES[query.dtype]),
        **{name: tl.constexpr(size) for name, size in sizes.items()},
        HAS_PTX=tl.constexpr(not (INTERPRETED or is_rocm())),
        HEADS=tl.constexpr(quantization.heads),
    )


def two_heads(
    query: Tensor, key: Tensor, value: Tensor, batch: Batch, quantization: Quantization
) -> tuple[Tensor, Tensor, Quantization]:
    """Return pools in which two KV heads are one, of twice the elements, if a tile of 8 rows has the queries of both.

    A program reads 128 bytes of a token, a line of the cache, and its softmax has no empty rows.
    """
    scales = quantization.key, quantization.value
    groups = query.shape[1] // key.shape[2], batch.max_query_len
    is_even = key.shape[2] % 2 == 0 and all(x is not None and x.stride(2) == 1 for x in scales)
    are_beside = all(x.ndim == 4 and x.stride(2) == x.shape[3] and x.stride(3) == 1 for x in (key, value))
    sizes = query.shape[2], 4 * value.shape[3]
    is_power = all(size & (size - 1) == 0 and 64 <= size <= 128 for size in sizes)
    if key.dtype != torch.uint16 or value.dtype != torch.uint16 or query.dtype != torch.bfloat16:
        return key, value, quantization
    if groups != (4, 1) or not is_even or not are_beside or not is_power:
        return key, value, quantization
    key, value = (x.view(*x.shape[:2], x.shape[2] // 2, 2 * x.shape[3]) for x in (key, value))
    return key, value, quantization._replace(heads=2, per_byte=1)


# --- the write ---


def write_int4(
    key: Float[Tensor, "t hk d"],
    value: Float[Tensor, "t hk dv"],
    key_cache: UInt8[Tensor, "n p hk half"],
    value_cache: UInt8[Tensor, "n p hk value_half"],
    slot_mapping: Int64[Tensor, "t"],
    scales: Int4Scales,
) -> None:
    """Turn and quantize new tokens, and write them and their scales into the pools; see `fastattn.quantized.write`.

    Args:
        key: the new keys; any strides, as all tensors here.
        value: the new values.
        key_cache: the pool of keys.
        value_cache: the pool of values.
        slot_mapping: the slot of each token; -1 is not written.
        scales: the scales of both, written, too.
    """
    rows = key.shape[0] * key.shape[1]
    if rows == 0:
        return
    for x, cache, scale in ((key, key_cache, scales.key), (value, value_cache, scales.value)):
        size = x.shape[2]
        _write_int4_kernel[(-(-rows // BLOCK_ROWS),)](
            x,
            cache,
            scale,
            slot_mapping,
            x.stride(),
            cache.stride(),
            scale.stride(),
            slot_mapping.stride(0),
            rows,
            NUM_KV_HEADS=x.shape[1],
            SIZE=size,
            TURNED=turned_size(size),
            STAGES=turned_size(size).bit_length() - 1,
            BLOCK_SIZE=cache.shape[1],
            ROWS=BLOCK_ROWS,
        )


@triton.jit(do_not_specialize=["slot_mapping", "rows"])
@no_type_check
def _write_int4_kernel(
    x,
    cache,
    scales,
    slot_mapping,
    strides,
    cache_strides,
    scale_strides,
    slot_stride,
    rows,
    NUM_KV_HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    TURNED: tl.constexpr,
    STAGES: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
):
    # A row is a head of a token.
    PAD: tl.constexpr = next_power_of_2(SIZE)
    MAGIC: tl.constexpr = 12582912.0  # 1.5 * 2**23, whose last bit is worth 1: a sum with it is rounded to even
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    token, head = row // NUM_KV_HEADS, row % NUM_KV_HEADS
    slot = tl.load(slot_mapping + token * slot_stride, row < rows, -1)
    is_row = slot >= 0
    slot = tl.maximum(slot, 0)
    block, place = slot // BLOCK_SIZE, slot % BLOCK_SIZE
    at = tl.arange(0, PAD).to(tl.int64)[None, :]
    at_row = token * strides[0] + head * strides[1]
    numbers = tl.load(x + at_row[:, None] + at * strides[2], is_row[:, None] & (at < SIZE), 0.0).to(tl.float32)
    turned = turn(numbers, TURNED, STAGES)
    low, high = tl.minimum(tl.min(turned, 1), 0.0), tl.maximum(tl.max(turned, 1), 0.0)
    scale = tl.maximum(tl.div_rn(high - low, tl.full(high.shape, 15.0, tl.float32)), SMALLEST)
    is_nan = tl.max((turned != turned).to(tl.int32), 1) > 0  # a minimum may drop NaN
    scale = tl.where(is_nan, float("nan"), scale)
    zero = (tl.div_rn(-low, scale) + MAGIC) - MAGIC
    zero = tl.where(zero == zero, tl.minimum(tl.maximum(zero, 0.0), 15.0), 0.0)
    bits = scale.to(tl.int32, bitcast=True)
    scale = ((bits & -16) | zero.to(tl.int32)).to(tl.float32, bitcast=True)
    tl.store(scales + block * scale_strides[0] + place * scale_strides[1] + head * scale_strides[2], scale, is_row)
    quotients = tl.div_rn(turned, tl.broadcast_to(scale[:, None], turned.shape))
    quantized = ((quotients + MAGIC) - MAGIC) + zero[:, None]
    quantized = tl.where(quantized == quantized, tl.minimum(tl.maximum(quantized, 0.0), 15.0), 0.0)
    even, odd = tl.split(tl.reshape(quantized.to(tl.int32), [ROWS, PAD // 2, 2]))
    at_byte = tl.arange(0, PAD // 2).to(tl.int64)[None, :]
    at_cache = block * cache_strides[0] + place * cache_strides[1] + head * cache_strides[2]
    pairs = (even | (odd << 4)).to(tl.uint8)
    tl.store(cache + at_cache[:, None] + at_byte * cache_strides[3], pairs, is_row[:, None] & (at_byte < SIZE // 2))
