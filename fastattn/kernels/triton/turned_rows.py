"""Rows that are turned by a Hadamard matrix, in a kernel, and the write of int4 pages, which stores them so.

    write     scale = (high - low) / 15        zero = round(-low / scale)        quantized = round(x / scale) + zero

`low` and `high` are the smallest and the largest element of a turned row. Queries, outputs and pages that are expanded
are turned by the same function.

Source: `refattn.rounding.to_int4`.
"""

from typing import no_type_check

import triton
import triton.language as tl
from jaxtyping import Float, Int64, UInt8
from torch import Tensor

from fastattn.kernels.triton.constants import next_power_of_2
from refattn.four_bits import SMALLEST_INT4_SCALE, Int4Scales, turned_size

SMALLEST = tl.constexpr(SMALLEST_INT4_SCALE)
BLOCK_ROWS = 16  # rows of a program that writes

# Triton's interpreter finds a function only if it is defined above its caller.


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
