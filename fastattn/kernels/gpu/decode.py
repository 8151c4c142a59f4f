"""What a Triton program does for a few query rows, as in a decode: the transposed product of `attend_kv_split`.

A matrix product of a GPU has at least 16 rows, but 8 columns are enough. Four heads that share a key head fill a
quarter of a tile of 16 rows, and half of 8 columns:

    attend_kv_split      [rows 16, d] . [d, keys]     ->  scores [16, keys]
    attend_few_rows    [keys, d] . [d, rows 8]      ->  scores [keys, 8]       half the products and half the softmax

The loop that is left is short, so the arithmetic of addresses counts, too: places within a page are the same in each
step, offsets are bytes, which keys and values share if their pools have the same strides, and block numbers are
unsigned, so that a product with a stride has no high half to correct.

Source: as `fastattn.kernels.gpu.tile`. What it saves was counted in the code for an NVIDIA H200 (Triton 3.6): a step
of 128 keys in e4m3 took a warp 1772 instructions before, and 957 here.
"""

from typing import no_type_check

import triton
import triton.language as tl

from fastattn.kernels.gpu.quantized import (
    dequantize,
    dequantize_pairs,
    power_of_two,
    prepare_query,
    row_scale,
    value_type,
)
from fastattn.kernels.gpu.tile import finish_scores, unmasked_range, update_softmax

# Triton's interpreter finds a function only if it stands above the one that calls it.


@triton.jit
@no_type_check
def _in_bytes(stride, pointer):
    """Return a stride in bytes, in 64 bits."""
    return tl.full([], pointer.dtype.element_ty.primitive_bitwidth // 8, tl.int64) * stride


@triton.jit
@no_type_check
def attend_few_rows(
    query_rows,
    query_stride,
    is_row,
    positions,
    first_position,
    last_position,
    key,
    value,
    block_table,
    sequence,
    kv_head,
    first_key,
    first_seen,
    last_key,
    slopes,
    query_scale,
    key_scales,
    key_strides,
    value_strides,
    key_scale_strides,
    table_row_stride,
    table_stride,
    scale,
    softcap,
    left,
    right,
    HEAD_SIZE: tl.constexpr,
    VALUE_HEAD_SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SOFTCAP: tl.constexpr,
    LEFT: tl.constexpr,
    RIGHT: tl.constexpr,
    CODES: tl.constexpr,
    ROUND_QUERY: tl.constexpr,
    HAS_FP8_CVT: tl.constexpr,
    SAME_STRIDES: tl.constexpr,
    ALIBI_SQRT: tl.constexpr,
):
    """Do what `attend_kv_split` does, over pages, for at most 8 rows. What both take means the same.

    `SAME_STRIDES` says that in their pools a value is as many bytes from the first one as its key is.
    """
    table = block_table + sequence.to(tl.int64) * table_row_stride
    in_step = tl.arange(0, BLOCK_N)
    j = first_key + in_step
    is_key = (j >= first_seen) & (j < last_key)
    column = (j // BLOCK_SIZE).to(tl.int64)
    next_blocks = tl.load(table + column * table_stride, mask=is_key, other=0)  # a step ahead
    BYTE: tl.constexpr = tl.pointer_type(tl.uint8)
    keys_of_head = (key + kv_head.to(tl.int64) * key_strides[2]).to(BYTE)
    values_of_head = (value + kv_head.to(tl.int64) * value_strides[2]).to(BYTE)
    key_page, key_token = _in_bytes(key_strides[0], key), _in_bytes(key_strides[1], key)
    value_page, value_token = _in_bytes(value_strides[0], value), _in_bytes(value_strides[1], value)

    LEAST: tl.constexpr = 32 if CODES == "int8" else 16  # of a product
    KEY_PAD: tl.constexpr = max(triton.next_power_of_2(HEAD_SIZE), LEAST)
    PAIRS: tl.constexpr = value.dtype.element_ty == tl.uint16
    PER_LOAD: tl.constexpr = 2 if PAIRS else 1  # elements of a value that are loaded as one
    VALUE_PAD: tl.constexpr = max(triton.next_power_of_2(VALUE_HEAD_SIZE), 16 * PER_LOAD)
    at_d = tl.arange(0, KEY_PAD)
    at_dv = tl.arange(0, VALUE_PAD // PER_LOAD)
    in_key = at_d < HEAD_SIZE
    in_value = at_dv < VALUE_HEAD_SIZE // PER_LOAD

    q = tl.load(
        query_rows[:, None] + (at_d.to(tl.int64) * query_stride)[None, :],
        mask=is_row[:, None] & in_key[None, :],
        other=0.0,
    )
    query_factors = None
    VALUE_TYPE: tl.constexpr = q.dtype if CODES == "" else value_type(q.dtype, value.dtype.element_ty)
    if CODES != "":
        if CODES == "int8":
            query_factors = row_scale(q.to(tl.float32))
        elif not ROUND_QUERY and q.dtype == tl.bfloat16:
            query_factors = power_of_two(tl.max(tl.abs(q.to(tl.float32)), 1))
        if query_factors is not None:
            q = prepare_query(q, query_factors[:, None], CODES, ROUND_QUERY, HAS_FP8_CVT)
        elif ROUND_QUERY:
            q = prepare_query(q, query_scale, CODES, ROUND_QUERY, HAS_FP8_CVT)
    q = tl.trans(q)  # [d, rows]

    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([VALUE_PAD // PER_LOAD, BLOCK_M], tl.float32)  # of the first of each pair
    if PAIRS:
        acc_of_seconds = tl.zeros([VALUE_PAD // 2, BLOCK_M], tl.float32)
    all_from, all_to = unmasked_range(first_key, last_key, first_position, last_position, left, right, LEFT, RIGHT)
    for start in range(first_key, last_key, BLOCK_N):
        j = start + in_step
        is_key = in_step < last_key - start  # nothing from there on is read: it may be NaN, or no block at all
        if LEFT:
            is_key &= j >= first_seen
        blocks = next_blocks.to(tl.uint32).to(tl.int64)
        column = ((j + BLOCK_N) // BLOCK_SIZE).to(tl.int64)
        next_blocks = tl.load(table + column * table_stride, mask=in_step < last_key - start - BLOCK_N, other=0)
        places = (in_step if BLOCK_N % BLOCK_SIZE == 0 else j) % BLOCK_SIZE  # a run begins at a multiple of BLOCK_N
        key_bytes = places * key_token + blocks * key_page
        k = tl.load(
            (keys_of_head + key_bytes).to(key.dtype)[:, None] + (at_d.to(tl.int64) * key_strides[-1])[None, :],
            mask=is_key[:, None] & in_key[None, :],
            other=0,
        )  # [keys, d]
        if CODES == "":
            products = tl.dot(k, q, input_precision="ieee")
        elif CODES == "int8":
            products = tl.dot(k, q).to(tl.float32)
        else:
            products = tl.dot(dequantize(k, CODES, HAS_FP8_CVT).to(q.dtype), q, input_precision="ieee")
        if query_factors is not None:
            products = products * query_factors[None, :]
        if key_scales is not None:
            at_scale = (
                blocks * key_scale_strides[0]
                + places.to(tl.int64) * key_scale_strides[1]
                + kv_head.to(tl.int64) * key_scale_strides[2]
            )
            products = products * tl.load(key_scales + at_scale, mask=is_key, other=0.0)[:, None]
        scores = finish_scores(
            products,
            positions,
            j,
            is_key,
            (start >= all_from) & (start + BLOCK_N <= all_to),
            slopes,
            scale,
            softcap,
            left,
            right,
            SOFTCAP,
            LEFT,
            RIGHT,
            KEYS=0,
            ALIBI_SQRT=ALIBI_SQRT,
        )  # [keys, rows]
        weights, alpha, row_max, row_sum = update_softmax(
            scores, row_max, row_sum, softcap if SOFTCAP else scale, slopes is not None, KEYS=0
        )
        value_bytes = key_bytes if SAME_STRIDES else places * value_token + blocks * value_page
        v = tl.load(
            (values_of_head + value_bytes).to(value.dtype)[None, :] + (at_dv.to(tl.int64) * value_strides[-1])[:, None],
            mask=is_key[None, :] & in_value[:, None],
            other=0,
        )  # [dv, keys]
        weights = weights.to(VALUE_TYPE if CODES != "" else v.dtype)
        if PAIRS:
            v, seconds = dequantize_pairs(v, CODES, HAS_FP8_CVT)
            acc_of_seconds = tl.dot(
                seconds.to(VALUE_TYPE), weights, acc_of_seconds * alpha[None, :], input_precision="ieee"
            )
        if CODES != "":
            if v.dtype == tl.int8 or v.dtype == tl.uint8:
                v = dequantize(v, CODES, HAS_FP8_CVT)
            v = v.to(VALUE_TYPE)
        acc = tl.dot(v, weights, acc * alpha[None, :], input_precision="ieee")
    acc = tl.trans(acc)
    if PAIRS:
        acc = tl.reshape(tl.join(acc, tl.trans(acc_of_seconds)), [BLOCK_M, VALUE_PAD])
    return row_max, row_sum, acc
