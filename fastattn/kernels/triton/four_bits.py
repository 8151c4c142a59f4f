"""Where the keys are, in a kernel: int4 pages; see `fastattn.kernels.triton.keys`.

    scores    scale[j] * (hadamard(query) . q[j] - zero[j] * sum(hadamard(query)))      a program turns its queries once
    output    hadamard(sum of weight[j] * scale[j] * (q[j] - zero[j]))                  and its partial output

A unit of a pool is a byte, of two elements, or two bytes, of four. A tile of units becomes two or four tiles, of every
second or every fourth element, as the query does: as many products, or weighted sums, each of a part of the size. The
elements are bits of numbers of 16 bits, see `fastattn.kernels.triton.int4_elements`. In bfloat16 what zero points take
away is summed beside, for all elements:

    sum of w[j] * (q[j] - zero[j])  =  sum of w[j] * q[j]  -  sum of w[j] * zero[j]

In tiles of 8 rows values are very small numbers, so each row of weights times scales is in a unit of its own, in which
products are no smaller than a float32 may be. In others the registers lack for that, and values, like zero points, are
16 larger.

Units of two bytes take the way of all 16 bits into the layout of a tensor core; bytes are read one by one where they
are transposed. They serve many rows, queries in float32, and pools that cannot be viewed in pairs of bytes. In float32
zero points are taken away before the products.

In a decode with four queries per KV head, a program takes two KV heads. So it reads pieces of 128 bytes, a whole line
of the cache, and all 8 rows of its tile are queries. A token is a row of the elements of both:

    queries of the first head        q0 q1 q2 ...  0  0  0 ...         times      elements of the first, of the second
    queries of the second head        0  0  0 ... q0 q1 q2 ...

Of weighted sums of both heads' values, a row keeps its own half. NaN of a head stays there: elements, of whatever bits,
are none, and each row has the scales of its own head.

Source: `refattn.four_bits`.
"""

from typing import Any, NamedTuple, no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastattn.kernels.device import is_rocm
from fastattn.kernels.triton.int4_elements import Parts, parts_of, parts_sixteen_more, scaled_parts, zero_points
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
from fastattn.kernels.triton.turned_rows import turn
from refattn.batch import Batch
from refattn.four_bits import Int4Scales, turned_size

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
        HAS_SMALL: whether tensor cores multiply bfloat16 below 2**-126; others may take it for 0.
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
    HAS_SMALL: Any
    HEADS: Any


class Query(NamedTuple):
    """A tile of turned queries in parts, the unit of each row's products, and the sum of each row."""

    parts: Any
    unit: Any
    sums: Any


class Weighted(NamedTuple):
    """Weighted sums of the parts of values, what is too much in each element of a row, and the unit of the row."""

    parts: Any
    excess: Any
    unit: Any


@triton.jit
@no_type_check
def is_of_head(HEADS: tl.constexpr, ROWS: tl.constexpr):
    """Return which row is a query of which KV head, [rows, heads, 1]."""
    return (tl.arange(0, ROWS)[:, None] // (ROWS // HEADS) == tl.arange(0, HEADS)[None, :])[:, :, None]


@triton.jit
@no_type_check
def beside(part, HEADS: tl.constexpr, TILE):
    """Put a part of queries, [rows, size], beside zeros for the elements of other KV heads, and transpose it."""
    if HEADS > 1:
        SIZE: tl.constexpr = part.shape[1]
        wide = tl.broadcast_to(part[:, None, :], [TILE.ROWS, HEADS, SIZE])
        wide = tl.where(is_of_head(HEADS, TILE.ROWS), wide, tl.zeros_like(wide))
        part = tl.reshape(wide, [TILE.ROWS, HEADS * SIZE])
    if TILE.KEYS_AXIS == 0:
        part = tl.trans(part)
    return part


@triton.jit
@no_type_check
def own_part(part, HEADS: tl.constexpr, TILE):
    """Return a part of weighted sums, [rows, size]: of the values of all KV heads, those of the head of each row."""
    if TILE.KEYS_AXIS == 0:
        part = tl.trans(part)
    if HEADS > 1:
        SIZE: tl.constexpr = part.shape[1] // HEADS
        part = tl.reshape(part, [TILE.ROWS, HEADS, SIZE])
        part = tl.sum(tl.where(is_of_head(HEADS, TILE.ROWS), part, 0.0), 1)
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
def for_values(of_values, SIZE: tl.constexpr, HEADS: tl.constexpr, TILE):
    """Spread scales of values, [keys] or of two heads [keys, heads], along the elements of a tile, `SIZE` per head."""
    if HEADS > 1:
        tl.static_assert(TILE.KEYS_AXIS == 0)
        wide = tl.broadcast_to(tl.trans(of_values)[:, None, :], [HEADS, SIZE, TILE.KEYS])
        spread = tl.reshape(wide, [HEADS * SIZE, TILE.KEYS])
    else:
        spread = tl.expand_dims(of_values, TILE.KEYS_AXIS)
    return spread


@triton.jit
@no_type_check
def in_units(weights, unit, rescale, TILE):
    """Return weights in a unit of each row, the unit, and by what sums in the unit of the steps before are rescaled.

    The unit is a power of two, the largest up to the largest weight of the row, that of earlier steps included. In it
    weights are below 2**102; times an element, 2**-133 of it, those from 2**-93 of the unit on are normal numbers.
    A scale that a row gives no weight says nothing of its unit, however large.
    """
    SMALLEST: tl.constexpr = 101 << 23  # the bits of 2**-26: 2**100 over it is still a number
    LARGEST: tl.constexpr = 253 << 23  # the bits of 2**126: one over it is a normal number
    carried = unit * rescale
    largest = tl.maximum(tl.max(tl.abs(weights), TILE.KEYS_AXIS), carried)
    power = largest.to(tl.int32, bitcast=True) & 0x7F800000
    power = tl.minimum(tl.maximum(power, SMALLEST), LARGEST)
    inverse = ((254 << 23) - power).to(tl.float32, bitcast=True)
    weights = weights * tl.expand_dims(inverse * 2.0**100, TILE.KEYS_AXIS)
    return weights, power.to(tl.float32, bitcast=True), carried * inverse


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
        third, fourth = beside(third, keys.HEADS, TILE), beside(fourth, keys.HEADS, TILE)
    first = (first * 16).to(keys.KEY_TYPE)
    first, second = beside(first, keys.HEADS, TILE), beside(second, keys.HEADS, TILE)
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
        loaded = tl.load(at, mask=is_key[:, None], other=0.0)
    else:
        loaded = tl.load(of_head + offset, mask=is_key, other=0.0)
    return loaded


@triton.jit
@no_type_check
def is_read(is_key, TILE):
    """Return which slots of a step are read: with few rows all, as any four bits are a number; scales only of keys.

    Where there is no key, a slot of the pool's first block is read. A mask would take six instructions for each row of
    a thread; with many rows, its code (Triton 3.6) spills more registers without a mask.
    """
    return tl.full(is_key.shape, True, tl.int1) if TILE.ROWS <= 16 else is_key


@triton.jit
@no_type_check
def load_int4(keys, tile, place, is_key, TILE):
    """Load the keys of a step in units, and their scales."""
    pool = keys.key + tile.kv_head.to(tl.int64) * keys.key_strides[-2]
    offset, stride = keys.where.offset(keys.where, place, keys.key_strides), keys.key_strides[-1]
    SIZE: tl.constexpr = keys.HEADS * keys.HEAD_SIZE // keys.KEY_UNIT
    PAD: tl.constexpr = keys.HEADS * keys.KEY_PAD // keys.KEY_UNIT
    k = token_tile(pool, offset, stride, is_read(is_key, TILE), 0, SIZE, PAD, TILE.KEYS_AXIS)
    return Step(k, scales_of(keys, keys.key_scales, keys.key_scale_strides, tile, place, is_key))


@triton.jit
@no_type_check
def int4_products(keys, q, step, TILE):
    """Multiply the parts of queries and keys, take away what zero points add, and multiply by the scale of each key.

    In float32 they are taken away from the keys: the difference of two sums would lose digits.
    """
    k = parts_of(step.key, keys.KEY_TYPE, keys.HAS_PTX)
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
    excess = zeros(TILE.KEYS, TILE) if TILE.ROWS <= 16 else tl.zeros([TILE.ROWS], tl.float32)
    return Weighted(
        Parts(zeros(SIZE, TILE), zeros(SIZE, TILE), third, fourth), excess, tl.zeros([TILE.ROWS], tl.float32)
    )


@triton.jit
@no_type_check
def load_int4_values(keys, tile, place, is_key, step, TILE):
    """Load the values of a step in units, and their scales."""
    pool = keys.value + tile.kv_head.to(tl.int64) * keys.value_strides[-2]
    offset, stride = value_offset(keys, place), keys.value_strides[-1]
    SIZE: tl.constexpr = keys.HEADS * keys.VALUE_HEAD_SIZE // keys.VALUE_UNIT
    PAD: tl.constexpr = keys.HEADS * keys.VALUE_PAD // keys.VALUE_UNIT
    v = token_tile(pool, offset, stride, is_read(is_key, TILE), 0, SIZE, PAD, 1 - TILE.KEYS_AXIS)
    return Step(v, scales_of(keys, keys.value_scales, keys.value_scale_strides, tile, place, is_key))


@triton.jit
@no_type_check
def add_int4(keys, acc, rescale, weights, v, TILE):
    """Rescale the weighted sums, and add a step to each.

    A weight is multiplied by the scale of its value. In float16 a small product would lose digits, and in float32 so
    would the difference of two sums; so there the values are multiplied, and nothing is in excess.
    """
    IN_UNITS: tl.constexpr = keys.HAS_SMALL and TILE.KEYS_AXIS == 0
    excess, unit = acc.excess, acc.unit
    if tl.bfloat16 != keys.VALUE_TYPE:
        SIZE: tl.constexpr = keys.VALUE_PAD // keys.VALUE_UNIT
        zero = for_values(zero_points(v.scale), SIZE, keys.HEADS, TILE)
        scale = for_values(v.scale, SIZE, keys.HEADS, TILE)
        parts = scaled_parts(v.key, zero, scale, keys.VALUE_TYPE, keys.HAS_PTX)
        weights = weights.to(keys.VALUE_TYPE)
    else:
        weights = weights * for_rows(v.scale, keys.HEADS, TILE)
        zero = zero_points(v.scale)
        if IN_UNITS:
            parts = parts_of(v.key, tl.bfloat16, keys.HAS_PTX)
            weights, unit, rescale = in_units(weights, unit, rescale, TILE)
        else:
            parts = parts_sixteen_more(v.key, keys.HAS_PTX)
            zero += 16.0
        weights = weights.to(tl.bfloat16)
        # moved bits: a conversion takes as long as four products
        rounded = (weights.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
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
    IN_UNITS: tl.constexpr = keys.HAS_SMALL and TILE.KEYS_AXIS == 0 and tl.bfloat16 == keys.VALUE_TYPE
    LARGER: tl.constexpr = 16.0 if IN_UNITS else 1.0  # by how much second and fourth elements are too large
    first, second = own_part(acc.parts.first, keys.HEADS, TILE), own_part(acc.parts.second, keys.HEADS, TILE) / LARGER
    if keys.VALUE_UNIT == 4:
        third, fourth = own_part(acc.parts.third, keys.HEADS, TILE), own_part(acc.parts.fourth, keys.HEADS, TILE)
        first, second = tl.join(first, third), tl.join(second, fourth / LARGER)
    values = tl.reshape(tl.join(first, second), [TILE.ROWS, keys.VALUE_PAD])
    excess = tl.sum(acc.excess, TILE.KEYS_AXIS) if TILE.ROWS <= 16 else acc.excess
    if IN_UNITS:
        values = values * 2.0**66 * 2.0**67  # 2**133 is no float32
    values = values - excess[:, None]
    if IN_UNITS:
        values = values * 2.0**-100 * acc.unit[:, None]
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
        HAS_SMALL=tl.constexpr(not is_rocm()),
        HEADS=tl.constexpr(quantization.heads),
    )


def two_heads(
    query: Tensor, key: Tensor, value: Tensor, batch: Batch, quantization: Quantization
) -> tuple[Tensor, Tensor, Quantization]:
    """Return pools in which two KV heads are one, of twice the elements, if a tile of 8 rows has the queries of both.

    That is so for one new token of each sequence and four queries per KV head. Both heads must be neighbours in memory,
    so that a row of both is read as one, and each must fill its half of a tile: sizes are powers of two from 64 on. Two
    heads of more than 128 elements would not fit into the registers of a warp, and on ROCm two of 128 do not.

    Source: tried on an NVIDIA H200 for decodes in bfloat16 over 8 KV heads of 128 elements (docs/results/tried). Not
    timed: float16, heads of 64, other numbers of heads.
    """
    scales = [x for x in (quantization.key, quantization.value) if x is not None]  # int4 has both
    sizes = query.shape[2], 4 * value.shape[3]
    if (
        is_rocm()
        or key.dtype != torch.uint16
        or value.dtype != torch.uint16
        or key.shape[2] % 2
        or (query.shape[1] // key.shape[2], batch.max_query_len) != (4, 1)
        or any(size not in (64, 128) for size in sizes)
        or any(x.stride(2) != 1 for x in scales)
        or any(x.stride()[2:] != (x.shape[3], 1) for x in (key, value))
    ):
        return key, value, quantization
    key, value = (x.view(*x.shape[:2], x.shape[2] // 2, 2 * x.shape[3]) for x in (key, value))
    return key, value, quantization._replace(heads=2, per_byte=1)
