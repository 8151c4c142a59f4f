"""Where the keys are, in a kernel: quantized keys and values, in 8 bits; see `fastattn.kernels.triton.keys`.

fp8      scores * (query scale * key scale * softmax scale)          a scale of a head is the same for all its keys
int8     scores * query scale * key scale of each key                products of whole numbers are exact
both     (weights . values in 8 bits) * value scale                  per head, or per head and channel
packed   latents in e4m3 with a scale per 128 elements, unquantized rotary keys after them
"""

from math import gcd
from typing import Any, NamedTuple, no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastattn.kernels.triton.keys import (
    LATENTS,
    How,
    LatentStep,
    latent_products,
    load_keys,
    multiply_keys,
    multiply_values,
    query_tile,
    strides_by_head,
    token_tile,
    value_offset,
    zeros,
)
from fastattn.kernels.triton.launch import converts_fp8
from fastattn.kernels.triton.quantized import (
    Quantization,
    dequantize,
    dequantize_pairs,
    power_of_two,
    prepare_query,
    row_scale,
    scale_groups,
)
from fastattn.kernels.triton.tuning import are_pairs
from refattn.plan import Plan

# Triton's interpreter finds a function only if it is defined above its caller.


class Quantized(NamedTuple):
    """Keys and values in 8 bits, in pages; or latents and rotary keys.

    Attributes:
        how: its functions, `QUANTIZED` or `QUANTIZED_LATENTS`.
        where: pages.
        key: the pool of keys; fp8 as bytes.
        value: the pool of values, in pairs of 16 bits each if PAIRS; may be unquantized beside int8 keys.
        key_strides: as in `Numbers`, and so on.
        query_number: the scale of the queries, for fp8.
        value_number: the scale of the values, for fp8.
        query_scales: a tensor in place of the number, per head `[hk]` or per sequence and head `[b, hk]`; else None.
        key_scales: as `query_scales`; for int8 per token of the pool and head, `[n, p, hk]`.
        value_scales: as `query_scales`; for int8 per head and channel, `[hk, dv]`.
        sequences: for each sequence of the plan, the sequence that its scales belong to; None if they are the same.
        KIND: "e4m3", "e5m2" or "int8".
        PAIRS: whether values are read two at a time.
        ROUND_QUERY: whether queries are rounded to fp8, too.
        FACTORS: whether each row of queries is divided by a factor of its own.
        HAS_FP8_CVT: whether the GPU has instructions for fp8.
        VALUE_TYPE: the type of the product of weights and values.
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
    query_number: Any
    value_number: Any
    query_scales: Any
    key_scales: Any
    value_scales: Any
    query_scale_strides: Any
    key_scale_strides: Any
    value_scale_strides: Any
    sequences: Any
    KIND: Any
    PAIRS: Any
    ROUND_QUERY: Any
    FACTORS: Any
    HAS_FP8_CVT: Any
    VALUE_TYPE: Any


class Query(NamedTuple):
    """A tile of queries, and the factor that each row was divided by, if there is one."""

    tile: Any
    factors: Any


class Step(NamedTuple):
    """The keys of a step as they are stored, and the scale of each, if there is one."""

    key: Any
    scale: Any


class Pair(NamedTuple):
    """Two sums, of the first element of each pair and of the second."""

    first: Any
    second: Any


@triton.jit
@no_type_check
def scale_of_head(keys, scales, strides, tile):
    """Load the scale of a sequence and KV head."""
    member = tile.sequence.to(tl.int64)
    if keys.sequences is not None:
        member = tl.load(keys.sequences + tile.sequence).to(tl.int64)
    return tl.load(scales + member * strides[0] + tile.kv_head.to(tl.int64) * strides[1])


@triton.jit
@no_type_check
def quantized_query(keys, queries, tile, TILE):
    """Load a tile of queries, in the type of the product with quantized keys."""
    q = query_tile(queries, tile, 0, keys.HEAD_SIZE, keys.KEY_PAD)
    factors = 0
    if keys.FACTORS:
        if keys.KIND == "int8":
            factors = row_scale(q.to(tl.float32))
        else:
            factors = power_of_two(tl.max(tl.abs(q.to(tl.float32)), 1))
        q = prepare_query(q, factors[:, None], keys.KIND, keys.ROUND_QUERY, keys.HAS_FP8_CVT)
    elif keys.ROUND_QUERY:
        number = keys.query_number
        if keys.query_scales is not None:
            number = scale_of_head(keys, keys.query_scales, keys.query_scale_strides, tile)
        q = prepare_query(q, number, keys.KIND, keys.ROUND_QUERY, keys.HAS_FP8_CVT)
    if TILE.KEYS_AXIS == 0:
        q = tl.trans(q)
    return Query(q, factors)


@triton.jit
@no_type_check
def load_quantized(keys, tile, place, is_key, TILE):
    """Load the keys of a step, and their scales where each has its own."""
    k = load_keys(keys, tile, place, is_key, TILE)
    scale = 0
    if keys.KIND == "int8" and keys.key_scales is not None:
        offset = keys.where.offset(keys.where, place, keys.key_scale_strides)
        of_head = keys.key_scales + tile.kv_head.to(tl.int64) * keys.key_scale_strides[2]
        scale = tl.load(of_head + offset, mask=is_key, other=0.0)
    return Step(k, scale)


@triton.jit
@no_type_check
def quantized_products(keys, q, step, TILE):
    """Multiply queries and keys: int8 as integers, exactly, fp8 as float16 or in float32."""
    if keys.KIND != "int8":
        products = multiply_keys(q.tile, dequantize(step.key, keys.KIND, keys.HAS_FP8_CVT).to(q.tile.dtype), TILE)
    elif TILE.KEYS_AXIS == 1:
        products = tl.dot(q.tile, step.key).to(tl.float32)
    else:
        products = tl.dot(step.key, q.tile).to(tl.float32)
    if keys.FACTORS:
        products = products * tl.expand_dims(q.factors, TILE.KEYS_AXIS)
    if keys.KIND == "int8" and keys.key_scales is not None:
        products = products * tl.expand_dims(step.scale, 1 - TILE.KEYS_AXIS)
    return products


@triton.jit
@no_type_check
def begin_quantized(keys, TILE):
    """Return an empty weighted sum, one for each element of a pair."""
    if keys.PAIRS:
        acc = Pair(zeros(keys.VALUE_PAD // 2, TILE), zeros(keys.VALUE_PAD // 2, TILE))
    else:
        acc = zeros(keys.VALUE_PAD, TILE)
    return acc


@triton.jit
@no_type_check
def load_quantized_values(keys, tile, place, is_key, step, TILE):
    """Load the values of a step as they are stored."""
    pool = keys.value + tile.kv_head.to(tl.int64) * keys.value_strides[-2]
    PER_LOAD: tl.constexpr = 2 if keys.PAIRS else 1
    SIZE: tl.constexpr = keys.VALUE_HEAD_SIZE // PER_LOAD
    PAD: tl.constexpr = keys.VALUE_PAD // PER_LOAD
    offset, stride = value_offset(keys, place), keys.value_strides[-1]
    return token_tile(pool, offset, stride, is_key, 0, SIZE, PAD, 1 - TILE.KEYS_AXIS)


@triton.jit
@no_type_check
def add_quantized(keys, acc, rescale, weights, v, TILE):
    """Rescale a weighted sum and add a step of dequantized values to it."""
    rescale = tl.expand_dims(rescale, TILE.KEYS_AXIS)
    weights = weights.to(keys.VALUE_TYPE)
    if keys.PAIRS:
        first, second = dequantize_pairs(v, keys.KIND, keys.HAS_FP8_CVT)
        seconds = multiply_values(acc.second * rescale, weights, second.to(keys.VALUE_TYPE), TILE)
        acc = Pair(multiply_values(acc.first * rescale, weights, first.to(keys.VALUE_TYPE), TILE), seconds)
    else:
        if v.dtype == tl.int8 or v.dtype == tl.uint8:
            v = dequantize(v, keys.KIND, keys.HAS_FP8_CVT)
        acc = multiply_values(acc * rescale, weights, v.to(keys.VALUE_TYPE), TILE)
    return acc


@triton.jit
@no_type_check
def end_quantized(keys, acc, TILE):
    """Return a weighted sum, [rows, dv], with pairs interleaved again."""
    if keys.PAIRS:
        first, second = acc.first, acc.second
        if TILE.KEYS_AXIS == 0:
            first, second = tl.trans(first), tl.trans(second)
        values = tl.reshape(tl.join(first, second), [TILE.ROWS, keys.VALUE_PAD])
    else:
        values = acc
        if TILE.KEYS_AXIS == 0:
            values = tl.trans(values)
    return values


@triton.jit
@no_type_check
def scale_of_fp8(keys, scale, tile):
    """Fold scales of queries and keys into the scale of the scores: all keys of a head share them."""
    if keys.KIND != "int8":
        if keys.query_scales is not None:
            scale *= scale_of_head(keys, keys.query_scales, keys.query_scale_strides, tile)
        if keys.key_scales is not None:
            scale *= scale_of_head(keys, keys.key_scales, keys.key_scale_strides, tile)
    return scale


@triton.jit
@no_type_check
def finish_quantized(keys, values, tile):
    """Multiply the output by the scale of the values: one number for fp8, one per channel for int8."""
    if keys.KIND == "int8":
        if keys.value_scales is not None:
            at = tl.arange(0, values.shape[1]).to(tl.int64)
            places = tile.kv_head.to(tl.int64) * keys.value_scale_strides[0] + at * keys.value_scale_strides[1]
            values *= tl.load(keys.value_scales + places, mask=at < keys.VALUE_HEAD_SIZE, other=0.0)[None, :]
    elif keys.value_scales is not None:
        values *= scale_of_head(keys, keys.value_scales, keys.value_scale_strides, tile)
    else:
        values *= keys.value_number
    return values


# --- quantized latents ---


class QuantizedLatentQuery(NamedTuple):
    """Queries for rotary keys, for latents (in pairs: for first elements, and for second ones), and factors of rows."""

    rope: Any
    latent: Any
    second: Any
    factors: Any


@triton.jit
@no_type_check
def quantized_latent_query(keys, queries, tile, TILE):
    """Load both tiles of queries, in the type of the product with quantized latents."""
    tl.static_assert(TILE.KEYS_AXIS == 1)
    RANK: tl.constexpr = keys.VALUE_HEAD_SIZE
    latent = query_tile(queries, tile, 0, RANK, keys.VALUE_PAD)
    rope = query_tile(queries, tile, RANK, keys.HEAD_SIZE - RANK, keys.KEY_PAD)
    factors = 0
    if keys.FACTORS:
        largest = tl.max(tl.abs(rope.to(tl.float32)), 1)
        factors = power_of_two(tl.maximum(largest, tl.max(tl.abs(latent.to(tl.float32)), 1)))
        rope = prepare_query(rope, factors[:, None], keys.KIND, keys.ROUND_QUERY, keys.HAS_FP8_CVT)
        latent = prepare_query(latent, factors[:, None], keys.KIND, keys.ROUND_QUERY, keys.HAS_FP8_CVT)
    elif keys.ROUND_QUERY:
        rope = prepare_query(rope, keys.query_number, keys.KIND, keys.ROUND_QUERY, keys.HAS_FP8_CVT)
        latent = prepare_query(latent, keys.query_number, keys.KIND, keys.ROUND_QUERY, keys.HAS_FP8_CVT)
    second = 0
    if keys.PAIRS:
        latent, second = tl.split(tl.reshape(latent, [TILE.ROWS, keys.VALUE_PAD // 2, 2]))
    return QuantizedLatentQuery(rope, latent, second, factors)


@triton.jit
@no_type_check
def load_quantized_latents(keys, tile, place, is_key, TILE):
    """Load latents, dequantized unless they are in pairs, and rotary keys as they are stored."""
    RANK: tl.constexpr = keys.VALUE_HEAD_SIZE
    latent = load_quantized_values(keys, tile, place, is_key, 0, TILE)
    if not keys.PAIRS:
        latent = dequantize(latent, keys.KIND, keys.HAS_FP8_CVT).to(keys.VALUE_TYPE)
    offset, stride = keys.where.offset(keys.where, place, keys.key_strides), keys.key_strides[-1]
    return LatentStep(
        token_tile(keys.key, offset, stride, is_key, RANK, keys.HEAD_SIZE - RANK, keys.KEY_PAD, 1), latent
    )


@triton.jit
@no_type_check
def quantized_latent_products(keys, q, step, TILE):
    """Multiply both parts of queries and keys, and both elements of each pair."""
    rope = dequantize(step.rope, keys.KIND, keys.HAS_FP8_CVT).to(q.rope.dtype)
    products = tl.dot(q.rope, rope, input_precision="ieee")
    turned = tl.trans(step.latent)
    if keys.PAIRS:
        turned, seconds = dequantize_pairs(turned, keys.KIND, keys.HAS_FP8_CVT)
        products = tl.dot(q.second, seconds.to(keys.VALUE_TYPE), products, input_precision="ieee")
        turned = turned.to(keys.VALUE_TYPE)
    products = tl.dot(q.latent, turned, products, input_precision="ieee")
    if keys.FACTORS:
        products = products * q.factors[:, None]
    return products


@triton.jit
@no_type_check
def quantized_latents_as_values(keys, tile, place, is_key, step, TILE):
    """Return the latents, which are loaded already."""
    return step.latent


# --- packed latents ---


class Packed(NamedTuple):
    """Rows of bytes: latents in e4m3, the scales of their groups, unquantized rotary keys."""

    how: Any
    where: Any
    key: Any  # rotary keys alone
    value: Any
    key_strides: Any
    value_strides: Any
    HEAD_SIZE: Any
    VALUE_HEAD_SIZE: Any
    KEY_PAD: Any
    VALUE_PAD: Any
    VALUE_SHIFT: Any
    group_scales: Any  # [n, p, groups]
    group_scale_strides: Any
    HAS_FP8_CVT: Any
    VALUE_TYPE: Any
    ROW_ALIGN: Any  # alignment of each row in bytes


@triton.jit
@no_type_check
def load_packed_latents(keys, tile, place, is_key, TILE):
    """Load latents, dequantized by the scales of their groups, and rotary keys.

    Offsets are written as multiples of `ROW_ALIGN`, so that the compiler vectorizes loads; a hint would be lost.
    """
    RANK: tl.constexpr = keys.VALUE_HEAD_SIZE
    ROPE: tl.constexpr = keys.HEAD_SIZE - RANK
    offset = keys.where.offset(keys.where, place, keys.value_strides)
    latent = token_tile(keys.value, offset, keys.value_strides[-1], is_key, 0, RANK, keys.VALUE_PAD, 0)
    offset = keys.where.offset(keys.where, place, keys.group_scale_strides)
    offset = offset // (keys.ROW_ALIGN // 4) * (keys.ROW_ALIGN // 4)
    numbers = dequantize(latent, "e4m3", keys.HAS_FP8_CVT)
    numbers = scale_groups(numbers, keys.group_scales, keys.group_scale_strides[2], offset, is_key, RANK)
    offset = keys.where.offset(keys.where, place, keys.key_strides)
    offset = offset // (keys.ROW_ALIGN // 2) * (keys.ROW_ALIGN // 2)
    rope = token_tile(keys.key, offset, keys.key_strides[-1], is_key, 0, ROPE, keys.KEY_PAD, 1)
    return LatentStep(rope, numbers.to(keys.VALUE_TYPE))


QUANTIZED = How(
    tl.constexpr(quantized_query),
    tl.constexpr(load_quantized),
    tl.constexpr(quantized_products),
    tl.constexpr(begin_quantized),
    tl.constexpr(load_quantized_values),
    tl.constexpr(add_quantized),
    tl.constexpr(end_quantized),
    tl.constexpr(scale_of_fp8),
    tl.constexpr(finish_quantized),
)
QUANTIZED_LATENTS = QUANTIZED._replace(
    query=tl.constexpr(quantized_latent_query),
    load=tl.constexpr(load_quantized_latents),
    products=tl.constexpr(quantized_latent_products),
    value=tl.constexpr(quantized_latents_as_values),
)
PACKED = LATENTS._replace(load=tl.constexpr(load_packed_latents), products=tl.constexpr(latent_products))
TYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


def quantized_keys_of(
    query: Tensor, both: dict[str, Any], plan: Plan, quantization: Quantization, *, shared: bool
) -> Quantized | Packed:
    """Return keys and values in 8 bits as the kernel takes them.

    Args:
        query: query rows of all sequences.
        both: the fields that all storages have, from `fastattn.kernels.triton.keys.keys_of`.
        plan: the lengths.
        quantization: how the pools are quantized.
        shared: whether a value is the first elements of its key.
    """
    value = both["value"]
    pairs, rounds = are_pairs(value), quantization.rounds_query
    has_fp8_cvt, query_type = tl.constexpr(converts_fp8(query.device)), query.dtype
    as_query = torch.float16 if rounds and query_type == torch.bfloat16 else query_type
    if quantization.groups is not None:
        groups = dict(
            group_scales=quantization.groups, group_scale_strides=quantization.groups.stride(), HAS_FP8_CVT=has_fp8_cvt
        )
        groups |= dict(VALUE_TYPE=tl.constexpr(TYPES[as_query]))
        return Packed(how=PACKED, **both, **groups, ROW_ALIGN=tl.constexpr(gcd(16, *value.stride()[:2])))
    changes_query = not (shared and not pairs)  # a changed query would be reloaded for each product with latents
    divided = changes_query and not rounds and query_type == torch.bfloat16
    return Quantized(
        how=QUANTIZED_LATENTS if shared else QUANTIZED,
        **both,
        query_number=quantization.numbers[0],
        value_number=quantization.numbers[2],
        query_scales=quantization.query,
        key_scales=quantization.key,
        value_scales=quantization.value,
        query_scale_strides=strides_by_head(quantization.query),
        key_scale_strides=strides_by_head(quantization.key),
        value_scale_strides=strides_by_head(quantization.value),
        sequences=plan.sequences,
        KIND=tl.constexpr(quantization.kind),
        PAIRS=tl.constexpr(pairs),
        ROUND_QUERY=tl.constexpr(rounds),
        FACTORS=tl.constexpr(quantization.kind == "int8" or divided),
        HAS_FP8_CVT=has_fp8_cvt,
        VALUE_TYPE=tl.constexpr(TYPES[value_type(query_type, value.dtype) if changes_query else as_query]),
    )


def value_type(query_type: torch.dtype, stored: torch.dtype) -> torch.dtype:
    """Return the type of the product of weights and values: it loses nothing that the query's type would show."""
    if torch.float32 in (query_type, stored):
        return torch.float32
    if stored == torch.bfloat16:
        return torch.bfloat16 if query_type == torch.bfloat16 else torch.float32
    return torch.float16  # it holds every value of 8 bits
