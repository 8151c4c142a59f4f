"""Where the keys are, in a kernel: int4 pages, and their write; see `fastattn.kernels.triton.keys`.

    scores    scale[j] * (hadamard(query) . (q[j] - zero[j]))           a program turns its queries once
    output    hadamard(sum of weight[j] * scale[j] * (q[j] - zero[j]))  and its partial output

A byte holds two elements of a row, so a tile of keys is loaded as bytes and becomes two tiles, of the even and of the
odd elements, as the query does: two products of half the length, or two weighted sums of half the width. `q - zero` is
a whole number, exact in 16 bits: the bits of 1024 + q in float16 (of 128 + q in bfloat16) are those of 1024 (128) with
q in the last four, and minus 1024 + zero that leaves the number.

Source: `refattn.four_bits`; the bits of a sum as a conversion: Kim et al. 2022, "Who Says Elephants Can't Run".
"""

from typing import Any, NamedTuple, no_type_check

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int64, UInt8
from torch import Tensor

from fastattn.kernels.triton.keys import How, query_tile, same_scale, token_tile, value_offset
from fastattn.kernels.triton.launch import converts_fp8
from fastattn.kernels.triton.quantized import Quantization, power_of_two
from fastattn.kernels.triton.quantized_keys import Pair, Step, begin_quantized, end_quantized
from refattn.four_bits import LARGEST, SMALLEST_INT4_SCALE, Int4Scales, turned_size

LAST = tl.constexpr(LARGEST)  # the last four bits
SMALLEST = tl.constexpr(SMALLEST_INT4_SCALE)

# PTX to turn four bytes into the four numbers of their low halves and the four of their high ones, less zero points.
FOUR_BYTES = """
    {{
        .reg .b32 low, high, magic, one;
        and.b32 low, $4, 0x0f0f0f0f;
        shr.u32 high, $4, 4;
        and.b32 high, high, 0x0f0f0f0f;
        mov.b32 magic, {magic};
        mov.b32 one, {one};
        prmt.b32 $0, low, magic, 0x4140;
        prmt.b32 $1, low, magic, 0x4342;
        prmt.b32 $2, high, magic, 0x4140;
        prmt.b32 $3, high, magic, 0x4342;
        fma.rn.{kind}x2 $0, $0, one, $5;
        fma.rn.{kind}x2 $1, $1, one, $6;
        fma.rn.{kind}x2 $2, $2, one, $5;
        fma.rn.{kind}x2 $3, $3, one, $6;
    }}
"""
FOUR_BYTES_FP16 = tl.constexpr(FOUR_BYTES.format(magic="0x64646464", one="0x3c003c00", kind="f16"))
FOUR_BYTES_BF16 = tl.constexpr(FOUR_BYTES.format(magic="0x43434343", one="0x3f803f80", kind="bf16"))
BLOCK_ROWS = 16  # rows of a program that writes
TYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}

# Triton's interpreter finds a function only if it is defined above its caller.


class Int4(NamedTuple):
    """Keys and values in four bits, in pages.

    Attributes:
        how: its functions, `INT4`.
        where: pages.
        key: the pool of keys, in bytes.
        value: the pool of values, in bytes.
        key_strides: as in `Numbers`, and so on; sizes are those of elements.
        key_scales: [n, p, hk], each with its zero point in its last four bits.
        value_scales: the same, of the values.
        key_scale_strides: of blocks, tokens and heads.
        value_scale_strides: the same, of the values.
        PAIRS: True: a weighted sum is one of even and one of odd elements.
        KEY_TYPE: the type of the product of queries and keys.
        VALUE_TYPE: that of the product of weights and values.
        KEY_BLOCK: elements of a key that are turned together.
        VALUE_BLOCK: elements of a value that are.
        KEY_STAGES: log2(KEY_BLOCK).
        VALUE_STAGES: log2(VALUE_BLOCK).
        HAS_PTX: whether the GPU has instructions that turn four bytes into eight numbers.
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
    PAIRS: Any
    KEY_TYPE: Any
    VALUE_TYPE: Any
    KEY_BLOCK: Any
    VALUE_BLOCK: Any
    KEY_STAGES: Any
    VALUE_STAGES: Any
    HAS_PTX: Any


class Query(NamedTuple):
    """A tile of turned queries, even and odd elements, and the factor that each row was divided by."""

    even: Any
    odd: Any
    factors: Any


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
def both_of(pairs, scale, AXIS: tl.constexpr, dtype: tl.constexpr, HAS_PTX: tl.constexpr):
    """Return the even and the odd elements of bytes, less the zero points of their tokens, which lie along 1 - AXIS."""
    zero = tl.expand_dims(scale.to(tl.int32, bitcast=True) & LAST, AXIS)
    if dtype == tl.float32:
        even = (pairs & LAST).to(tl.float32) - zero.to(tl.float32)
        odd = (pairs >> 4).to(tl.float32) - zero.to(tl.float32)
    else:
        BITS: tl.constexpr = 0x6400 if dtype == tl.float16 else 0x4300  # the bits of 1024, or of 128
        less = (zero | BITS | 0x8000).to(tl.uint16).to(dtype, bitcast=True)
        if HAS_PTX:
            ASM: tl.constexpr = FOUR_BYTES_FP16 if dtype == tl.float16 else FOUR_BYTES_BF16
            given = pairs, tl.broadcast_to(less, pairs.shape)
            even, odd = tl.inline_asm_elementwise(
                ASM, "=&r,=&r,=&r,=&r,r,r,r", given, dtype=(less.dtype, less.dtype), is_pure=True, pack=4
            )
        else:
            even = ((pairs & LAST).to(tl.uint16) | BITS).to(dtype, bitcast=True) + less
            odd = ((pairs >> 4).to(tl.uint16) | BITS).to(dtype, bitcast=True) + less
    return even, odd


@triton.jit
@no_type_check
def int4_query(keys, queries, tile, TILE):
    """Load a tile of queries and turn it. Each row is divided by a power of two, so that float16 holds it."""
    q = turn(query_tile(queries, tile, 0, keys.HEAD_SIZE, keys.KEY_PAD).to(tl.float32), keys.KEY_BLOCK, keys.KEY_STAGES)
    factors = power_of_two(tl.max(tl.abs(q), 1))
    q = tl.div_rn(q, tl.broadcast_to(factors[:, None], q.shape)).to(keys.KEY_TYPE)
    even, odd = tl.split(tl.reshape(q, [TILE.ROWS, keys.KEY_PAD // 2, 2]))
    if TILE.KEYS_AXIS == 0:
        even, odd = tl.trans(even), tl.trans(odd)
    return Query(even, odd, factors)


@triton.jit
@no_type_check
def scales_of(keys, scales, strides, tile, place, is_key):
    """Load the scales of a step, one per token."""
    of_head = scales + tile.kv_head.to(tl.int64) * strides[2]
    return tl.load(of_head + keys.where.offset(keys.where, place, strides), mask=is_key, other=0.0)


@triton.jit
@no_type_check
def load_int4(keys, tile, place, is_key, TILE):
    """Load the keys of a step in bytes, and their scales."""
    pool = keys.key + tile.kv_head.to(tl.int64) * keys.key_strides[-2]
    offset, stride = keys.where.offset(keys.where, place, keys.key_strides), keys.key_strides[-1]
    SIZE: tl.constexpr = keys.HEAD_SIZE // 2
    k = token_tile(pool, offset, stride, is_key, 0, SIZE, keys.KEY_PAD // 2, TILE.KEYS_AXIS)
    return Step(k, scales_of(keys, keys.key_scales, keys.key_scale_strides, tile, place, is_key))


@triton.jit
@no_type_check
def int4_products(keys, q, step, TILE):
    """Multiply the even elements of queries and keys, and the odd ones; then by the scale of each key."""
    even, odd = both_of(step.key, step.scale, 1 - TILE.KEYS_AXIS, keys.KEY_TYPE, keys.HAS_PTX)
    if TILE.KEYS_AXIS == 1:
        products = tl.dot(q.even, even, input_precision="ieee")
        products = tl.dot(q.odd, odd, products, input_precision="ieee")
    else:
        products = tl.dot(even, q.even, input_precision="ieee")
        products = tl.dot(odd, q.odd, products, input_precision="ieee")
    products = products * tl.expand_dims(q.factors, TILE.KEYS_AXIS)
    return products * tl.expand_dims(step.scale, 1 - TILE.KEYS_AXIS)


@triton.jit
@no_type_check
def load_int4_values(keys, tile, place, is_key, step, TILE):
    """Load the values of a step in bytes, and their scales."""
    pool = keys.value + tile.kv_head.to(tl.int64) * keys.value_strides[-2]
    offset, stride = value_offset(keys, place), keys.value_strides[-1]
    SIZE: tl.constexpr = keys.VALUE_HEAD_SIZE // 2
    v = token_tile(pool, offset, stride, is_key, 0, SIZE, keys.VALUE_PAD // 2, 1 - TILE.KEYS_AXIS)
    return Step(v, scales_of(keys, keys.value_scales, keys.value_scale_strides, tile, place, is_key))


@triton.jit
@no_type_check
def add_int4(keys, acc, rescale, weights, v, TILE):
    """Rescale both weighted sums, of even and of odd elements, and add a step to each.

    A weight is multiplied by the scale of its value. In float16 a small product would lose digits, so there the values
    are multiplied.
    """
    rescale = tl.expand_dims(rescale, TILE.KEYS_AXIS)
    dtype: tl.constexpr = keys.VALUE_TYPE
    even, odd = both_of(v.key, v.scale, TILE.KEYS_AXIS, dtype, keys.HAS_PTX)
    if dtype == tl.float16:
        scale = tl.expand_dims(v.scale, TILE.KEYS_AXIS)
        even, odd = (even.to(tl.float32) * scale).to(tl.float16), (odd.to(tl.float32) * scale).to(tl.float16)
    else:
        weights = weights * tl.expand_dims(v.scale, 1 - TILE.KEYS_AXIS)
    weights = weights.to(dtype)
    if TILE.KEYS_AXIS == 1:
        first = tl.dot(weights, even, acc.first * rescale, input_precision="ieee")
        second = tl.dot(weights, odd, acc.second * rescale, input_precision="ieee")
    else:
        first = tl.dot(even, weights, acc.first * rescale, input_precision="ieee")
        second = tl.dot(odd, weights, acc.second * rescale, input_precision="ieee")
    return Pair(first, second)


@triton.jit
@no_type_check
def turned_back(keys, values, tile):
    """Turn the output back. Elements of the padding are in blocks of their own."""
    return turn(values, keys.VALUE_BLOCK, keys.VALUE_STAGES)


INT4 = How(
    tl.constexpr(int4_query),
    tl.constexpr(load_int4),
    tl.constexpr(int4_products),
    tl.constexpr(begin_quantized),
    tl.constexpr(load_int4_values),
    tl.constexpr(add_int4),
    tl.constexpr(end_quantized),
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
        PAIRS=tl.constexpr(True),
        KEY_TYPE=tl.constexpr(tl.float32 if query.dtype == torch.float32 else tl.float16),
        VALUE_TYPE=tl.constexpr(TYPES[query.dtype]),
        **{name: tl.constexpr(size) for name, size in sizes.items()},
        HAS_PTX=tl.constexpr(converts_fp8(query.device)),
    )


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
    PAD: tl.constexpr = triton.next_power_of_2(SIZE)
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
