"""Index keys and their scores, in Triton; the kernel `triton` of `fastattn.sparse`.

    write_index     a program for some tokens: the scale, the quantized values, both into their part of the page
    score_index     a program for a tile of queries and some steps of `BLOCK_N` keys, each read once for all of them

A score is a product with one query, of one shape, so no bit of it depends on the batch.

Source: DeepGEMM, `fp8_paged_mqa_logits`.
"""

from typing import no_type_check

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Float32, Int64, Shaped
from torch import Tensor

from fastattn.kernels.problem import as_bytes
from fastattn.kernels.triton.launch import CHANGING, converts_fp8, overlapping, pdl_wait
from fastattn.kernels.triton.masks import visible_keys
from fastattn.kernels.triton.quantized import dequantize, dequantize_pairs, power_of_two, to_fp8
from fastattn.kernels.triton.queries import contiguous, count_tiles, find_rows
from fastattn.kernels.triton.tuning import LaunchConfig, fit, pad, sms_of
from refattn.index_keys import SCALE_BYTES, SMALLEST, holds_fp8, index_size_of
from refattn.plan import Plan

BLOCK_ROWS = 16  # tokens of a program that writes
BLOCK_N = 64  # keys of a step of a program that scores, of at most 256 bytes as they are multiplied
STEPS = 16  # most steps of such a program
PROGRAMS = 2  # programs per SM; below that, steps become programs of their own
SCORE_WARPS = 4
STAGES = 3  # steps of keys that are read ahead, and the one at hand
STAGES_OF_QUERIES = 2  # pipeline stages over the queries of a tile, if it has several
QUERIES = 4  # queries of such a program, at most


def write_index(
    key: Float[Tensor, "t d"], index_cache: Shaped[Tensor, "n p c"], slot_mapping: Int64[Tensor, "t"]
) -> None:
    """Write index keys into their pool, in one launch; see `fastattn.sparse.write`."""
    if not len(key):
        return
    quantized_values = holds_fp8(index_cache)
    _write_index_kernel[(-(-len(key) // BLOCK_ROWS),)](
        key,
        index_cache,
        _scales(index_cache) if quantized_values else None,
        slot_mapping,
        key.stride(),
        index_cache.stride(),
        slot_mapping.stride(0),
        len(key),
        SMALLEST=SMALLEST,
        SIZE=index_size_of(index_cache),
        BLOCK_SIZE=index_cache.shape[1],
        BLOCK_ROWS=BLOCK_ROWS,
        HAS_FP8_CVT=converts_fp8(key.device),
    )


def score_index(
    query: Float[Tensor, "t h d"], weights: Float[Tensor, "t h"], index_cache: Shaped[Tensor, "n p c"], plan: Plan
) -> Float32[Tensor, "t s"]:
    """Score the keys that queries may see, in one launch, or two; see `fastattn.sparse.scores`."""
    batch, (t, num_heads, size) = plan.batch, query.shape
    result = torch.empty(t, batch.max_seq_len, dtype=torch.float32, device=query.device)
    if not batch.num_seqs or not result.numel():
        return result.fill_(-torch.inf)
    assert batch.block_table is not None  # the path has checked it
    left, right = plan.window
    quantized_values, query_is_fp8 = holds_fp8(index_cache), query.element_size() == 1
    pairs = quantized_values and query.element_size() <= 2
    halved = pairs and query.dtype == torch.bfloat16
    if halved:
        query, weights = _in_float16(query, weights)
    query, weights = as_bytes(query) if query_is_fp8 else query, weights.float()
    key_bytes = size * (2 if query_is_fp8 else query.element_size())
    asked = LaunchConfig(
        block_m=pad(max(num_heads, 16)),
        block_n=BLOCK_N if key_bytes <= 256 else BLOCK_N // 2,
        num_warps=SCORE_WARPS,
        num_stages=STAGES if batch.max_query_len <= 1 else STAGES_OF_QUERIES,
        splits=1,
        most_splits=1,
    )
    stored_bytes = size * index_cache.itemsize
    tuning = fit(asked, query.device, row_bytes=pad(size) * key_bytes // size, key_bytes=stored_bytes)
    block_n = tuning.block_n
    tiles, steps = count_tiles(batch, t, 1, QUERIES), STEPS
    enough = PROGRAMS * sms_of(query.device)
    while steps > 1 and tiles * -(-batch.max_seq_len // (steps * block_n)) < enough:
        steps //= 2
    _score_index_kernel[(tiles * -(-batch.max_seq_len // (steps * block_n)),)](
        query,
        weights,
        _in_pairs(index_cache) if pairs else index_cache,
        _scales(index_cache) if quantized_values else None,
        result,
        batch.block_table,
        batch.cu_seqlens_q,
        batch.seq_lens,
        contiguous(plan.first_visible),
        contiguous(plan.last_visible),
        query.stride(),
        weights.stride(),
        index_cache.stride(),
        batch.block_table.stride(0),
        batch.block_table.stride(1),
        t,
        batch.num_seqs,
        batch.max_seq_len,
        steps,
        left,
        right,
        NUM_HEADS=num_heads,
        SIZE=size,
        BLOCK_SIZE=index_cache.shape[1],
        QUERIES=QUERIES,
        BLOCK_N=block_n,
        ONE_TILE=batch.max_query_len <= QUERIES,
        ONE_ROW=batch.max_query_len <= 1,
        LEFT=left >= 0,
        RIGHT=right >= 0,
        QUERY_IS_FP8=query_is_fp8,
        HAS_FP8_CVT=converts_fp8(query.device),
        num_warps=tuning.num_warps,
        num_stages=tuning.num_stages,
        **overlapping(query.device, after_ours=halved),
    )
    return result


def _in_float16(
    query: Float[Tensor, "t h d"], weights: Float[Tensor, "t h"]
) -> tuple[Float[Tensor, "t h d"], Float[Tensor, "t h"]]:
    """Return queries in the type that quantized values are turned into at once, and their weights, in one launch.

    Each head is divided by a power of two, and its weight multiplied by that.
    """
    halves = torch.empty(query.shape, dtype=torch.float16, device=query.device)
    of_halves = torch.empty(weights.shape, dtype=torch.float32, device=query.device)
    t, num_heads, size = query.shape
    _in_float16_kernel[(t,)](
        query,
        weights,
        halves,
        of_halves,
        query.stride(),
        weights.stride(),
        NUM_HEADS=num_heads,
        SIZE=size,
        **overlapping(query.device, after_ours=False),
    )
    return halves, of_halves


def _in_pairs(index_cache: Shaped[Tensor, "n p c"]) -> Shaped[Tensor, "n pairs"]:
    """Return a view of the quantized values, two at a time, whose number is even as scales follow them."""
    (n, p, _), size = index_cache.shape, index_cache.shape[2] - SCALE_BYTES
    in_bytes = index_cache.as_strided((n, p * size), (index_cache.stride(0), 1), index_cache.storage_offset())
    return in_bytes.view(torch.uint16)


def _scales(index_cache: Shaped[Tensor, "n p c"]) -> Float32[Tensor, "n p"]:
    """Return a view of the scales: those of a block follow all of its quantized values."""
    (n, p, _), size = index_cache.shape, index_cache.shape[2] - SCALE_BYTES
    first, block = index_cache.storage_offset() + p * size, index_cache.stride(0)
    in_bytes = index_cache.as_strided((n, p * SCALE_BYTES), (block, 1), first)
    return in_bytes.view(torch.float32)


# Triton's interpreter finds a function only if it stands above the one that calls it.


@triton.jit(do_not_specialize=["slot_mapping", "rows"])
@no_type_check
def _write_index_kernel(
    key,
    index_cache,
    scales,  # a view of the cache; None where it is unquantized
    slot_mapping,
    key_strides,
    cache_strides,
    slot_stride,
    rows,
    SMALLEST: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    HAS_FP8_CVT: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    slot = tl.load(slot_mapping + token * slot_stride, token < rows, -1)
    is_written = slot >= 0
    slot = tl.maximum(slot, 0)
    block, place = slot // BLOCK_SIZE, slot % BLOCK_SIZE
    PAD: tl.constexpr = triton.next_power_of_2(SIZE)
    at_d = tl.arange(0, PAD).to(tl.int64)[None, :]
    in_key = is_written[:, None] & (at_d < SIZE)
    numbers = tl.load(key + (token * key_strides[0])[:, None] + at_d * key_strides[1], in_key, 0.0)
    if scales is None:
        at = block * cache_strides[0] + place * cache_strides[1]
        tl.store(index_cache + at[:, None] + at_d * cache_strides[2], numbers, in_key)
    else:
        numbers = numbers.to(tl.float32)
        largest = tl.maximum(tl.max(tl.abs(numbers), 1), SMALLEST)
        is_nan = tl.max((numbers != numbers).to(tl.int32), 1) > 0  # a maximum may overlook NaN
        largest = tl.where(is_nan, float("nan"), largest)
        scale = tl.div_rn(largest, tl.full(largest.shape, 448.0, tl.float32))
        quantized_values = to_fp8(
            tl.div_rn(numbers, tl.broadcast_to(scale[:, None], numbers.shape)), "e4m3", HAS_FP8_CVT
        )
        at = block * cache_strides[0] + place * SIZE
        tl.store(index_cache + at[:, None] + at_d, quantized_values, in_key)
        tl.store(scales + block * (cache_strides[0] // 4) + place, scale, is_written)


@triton.jit
@no_type_check
def _in_float16_kernel(
    query,
    weights,
    halves,
    of_halves,
    query_strides,
    weight_strides,
    NUM_HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Divide the index heads of a query by a power of two each: below 2, float16 holds all that a score would show."""
    pdl_wait(OVERLAP)
    token = tl.program_id(0).to(tl.int64)
    heads = tl.arange(0, triton.next_power_of_2(NUM_HEADS))
    at_d = tl.arange(0, triton.next_power_of_2(SIZE))[None, :]
    is_head = heads < NUM_HEADS
    in_query = is_head[:, None] & (at_d < SIZE)
    at = token * query_strides[0] + heads.to(tl.int64)[:, None] * query_strides[1]
    q = tl.load(query + at + at_d.to(tl.int64) * query_strides[2], in_query, 0.0).to(tl.float32)
    power = tl.minimum(power_of_two(tl.max(tl.abs(q), 1)), 1.7014118346046923e38)  # infinity stays what it is
    halved = tl.div_rn(q, tl.zeros(q.shape, tl.float32) + power[:, None]).to(tl.float16)
    tl.store(halves + (token * NUM_HEADS + heads[:, None]) * SIZE + at_d, halved, in_query)
    at = token * weight_strides[0] + heads.to(tl.int64) * weight_strides[1]
    w = tl.load(weights + at, is_head, 0.0).to(tl.float32)
    tl.store(of_halves + token * NUM_HEADS + heads, w * power, is_head)


@triton.jit
@no_type_check
def _interval(
    first_visible, last_visible, token, position, seq_len, left, right, LEFT: tl.constexpr, RIGHT: tl.constexpr
):
    """Return the first key that a query sees, and the end of those that it sees."""
    if first_visible is None:
        first, end = visible_keys(position, position, seq_len, left, right, LEFT, RIGHT)
    else:
        first = tl.load(first_visible + token)
        end = tl.minimum(tl.load(last_visible + token), seq_len - 1) + 1
    return tl.maximum(first, 0), tl.minimum(end, seq_len)


@triton.jit
@no_type_check
def _find_blocks(table, table_stride, first, end, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr):
    """Return the block of each key of a step, or one where all of them are in the same."""
    if BLOCK_SIZE % BLOCK_N == 0:
        column = tl.full([], 0, tl.int64) + first // BLOCK_SIZE
        blocks = tl.load(table + column * table_stride, first < end, 0)
    else:
        j = first + tl.arange(0, BLOCK_N)
        blocks = tl.load(table + (j // BLOCK_SIZE).to(tl.int64) * table_stride, j < end, 0)
    return blocks.to(tl.uint32).to(tl.int64)


@triton.jit
@no_type_check
def _read_scales(scales, cache_strides, blocks, first, seen, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr):
    """Read the scales of the keys of a step that are seen; 1 where the cache holds numbers."""
    scale = tl.full([BLOCK_N], 1.0, tl.float32)
    if scales is not None:
        places = (first + tl.arange(0, BLOCK_N)) % BLOCK_SIZE
        scale = tl.load(scales + blocks * (cache_strides[0] // 4) + places, seen, 0.0)
    return scale


@triton.jit
@no_type_check
def _read_keys(
    index_cache,  # in bytes, in pairs of them, or unquantized
    cache_strides,
    blocks,
    first,
    seen,
    SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Read the keys of a step that are seen, [keys, d] or [keys, pairs]."""
    PER_LOAD: tl.constexpr = 2 if index_cache.dtype.element_ty == tl.uint16 else 1
    FORMAT: tl.constexpr = PER_LOAD == 2 or index_cache.dtype.element_ty == tl.uint8
    PAD: tl.constexpr = triton.next_power_of_2(SIZE) if SIZE > 16 * PER_LOAD else 16 * PER_LOAD
    at_d = tl.arange(0, PAD // PER_LOAD)[None, :]
    first_place, places = first * 0, (first + tl.arange(0, BLOCK_N)) % BLOCK_SIZE
    if BLOCK_SIZE % BLOCK_N == 0:  # what is alike in all steps is not computed in each
        first_place, places = first % BLOCK_SIZE, tl.arange(0, BLOCK_N)
    of_blocks = blocks * (cache_strides[0] // PER_LOAD)
    if FORMAT:
        rows = index_cache + (of_blocks + first_place * (SIZE // PER_LOAD))
        at = places[:, None] * (SIZE // PER_LOAD) + at_d
    else:
        rows = index_cache + (of_blocks + (blocks * 0 + first_place) * cache_strides[1])  # in 64 bits
        at = places.to(tl.int64)[:, None] * cache_strides[1] + at_d.to(tl.int64) * cache_strides[2]
    if BLOCK_SIZE % BLOCK_N:
        rows = rows[:, None]
    return tl.load(rows + at, seen[:, None] & (at_d < SIZE // PER_LOAD), 0)


@triton.jit
@no_type_check
def _read_query(
    query,
    weights,
    query_strides,
    weight_strides,
    token,
    is_row,
    NUM_HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    LEAST: tl.constexpr,
    QUERY_IS_FP8: tl.constexpr,
    HAS_FP8_CVT: tl.constexpr,
):
    """Read the index heads of one query, [heads, d], and their weights."""
    PAD: tl.constexpr = triton.next_power_of_2(SIZE) if SIZE > LEAST else LEAST
    HEADS: tl.constexpr = triton.next_power_of_2(NUM_HEADS) if NUM_HEADS > 16 else 16
    at_d, heads = tl.arange(0, PAD)[None, :], tl.arange(0, HEADS)
    is_head = (heads < NUM_HEADS) & is_row
    at = query + token * query_strides[0] + heads.to(tl.int64)[:, None] * query_strides[1]
    q = tl.load(at + at_d.to(tl.int64) * query_strides[2], is_head[:, None] & (at_d < SIZE), 0)
    if QUERY_IS_FP8:
        q = dequantize(q, "e4m3", HAS_FP8_CVT)
    w = tl.load(weights + token * weight_strides[0] + heads.to(tl.int64) * weight_strides[1], is_head, 0.0)
    return q, w


@triton.jit
@no_type_check
def _multiply(q, k, HAS_FP8_CVT: tl.constexpr):
    """Return the products of the keys of a step, which are the rows: so the sums over heads are a thread's own.

    Quantized values in pairs come out of shared memory in the registers that a product reads them from: the first of
    each pair are multiplied, and the second ones.
    """
    if k.dtype == tl.uint16:
        first, second = dequantize_pairs(k, "e4m3", HAS_FP8_CVT)
        q_first, q_second = tl.split(tl.reshape(q, [q.shape[0], q.shape[1] // 2, 2]))
        products = tl.dot(first.to(q.dtype), tl.trans(q_first), input_precision="ieee")  # the type holds any fp8 value
        products = tl.dot(second.to(q.dtype), tl.trans(q_second), products, input_precision="ieee")
    elif k.dtype == tl.uint8:
        products = tl.dot(dequantize(k, "e4m3", HAS_FP8_CVT).to(tl.float32), tl.trans(q), input_precision="ieee")
    elif q.dtype == k.dtype:
        products = tl.dot(k, tl.trans(q), input_precision="ieee")
    else:
        products = tl.dot(k.to(tl.float32), tl.trans(q.to(tl.float32)), input_precision="ieee")
    return products


@triton.jit
@no_type_check
def _score(q, w, k, scale, HAS_FP8_CVT: tl.constexpr):
    """Return the scores of the keys of a step."""
    products = _multiply(q, k, HAS_FP8_CVT)
    positive = tl.maximum(products, 0.0, propagate_nan=tl.PropagateNan.ALL)
    return tl.sum(positive * w[None, :], 1) * scale


@triton.jit
@no_type_check
def _hide(row_result, begin, end, width, BLOCK_N: tl.constexpr):
    for first in range(begin, end, BLOCK_N):
        j = first + tl.arange(0, BLOCK_N)
        tl.store(row_result + j, tl.full([BLOCK_N], float("-inf"), tl.float32), j < width)


@triton.jit(do_not_specialize=[*CHANGING, "width", "steps"])
@no_type_check
def _score_index_kernel(
    query,
    weights,
    index_cache,
    scales,  # a view of the cache; None where it is unquantized
    result,  # [t, width]
    block_table,
    cu_seqlens_q,
    seq_lens,
    first_visible,
    last_visible,
    query_strides,
    weight_strides,
    cache_strides,
    table_row_stride,
    table_stride,
    num_tokens,
    num_seqs,
    width,
    steps,
    left,
    right,
    NUM_HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    QUERIES: tl.constexpr,
    BLOCK_N: tl.constexpr,
    ONE_TILE: tl.constexpr,
    ONE_ROW: tl.constexpr,
    LEFT: tl.constexpr,
    RIGHT: tl.constexpr,
    QUERY_IS_FP8: tl.constexpr,
    HAS_FP8_CVT: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    pdl_wait(OVERLAP)
    runs = tl.cdiv(width, steps * BLOCK_N)  # splits of the keys, one for each program of a tile
    tile = tl.program_id(0) // runs
    sequence, first_row = find_rows(cu_seqlens_q, tile, num_seqs, 1, QUERIES, ONE_TILE)
    first_query = tl.load(cu_seqlens_q + sequence)
    query_len = tl.load(cu_seqlens_q + sequence + 1) - first_query
    seq_len = tl.load(seq_lens + sequence)
    last_row = tl.minimum(first_row + QUERIES, query_len)
    begin = tl.program_id(0) % runs * steps * BLOCK_N
    end = tl.minimum(begin + steps * BLOCK_N, width)
    table = block_table + sequence.to(tl.int64) * table_row_stride

    # The steps of the run that have keys which some query of the tile sees: no other is read.
    context = seq_len - query_len
    first_key, last_key = seq_len, seq_len * 0
    for row in range(first_row, last_row):
        token = (first_query + row).to(tl.int64)
        first, last = _interval(first_visible, last_visible, token, context + row, seq_len, left, right, LEFT, RIGHT)
        first_key = tl.minimum(first_key, tl.where(first < last, first, seq_len))
        last_key = tl.maximum(last_key, tl.where(first < last, last, 0))
    scored_from = tl.minimum(tl.maximum(first_key // BLOCK_N * BLOCK_N, begin), end)
    scored_to = tl.maximum(tl.minimum(tl.cdiv(last_key, BLOCK_N) * BLOCK_N, end), scored_from)
    for row in range(first_row, last_row):
        row_result = result + (first_query + row).to(tl.int64) * width
        _hide(row_result, begin, scored_from, width, BLOCK_N)
        _hide(row_result, scored_to, end, width, BLOCK_N)

    LEAST: tl.constexpr = 32 if index_cache.dtype.element_ty == tl.uint16 else 16  # elements of a product
    # The table is read a step ahead, so that loads of keys do not wait for it, and scales where steps are short.
    next_blocks = _find_blocks(table, table_stride, scored_from, last_key, BLOCK_SIZE, BLOCK_N)
    if ONE_ROW:
        j = scored_from + tl.arange(0, BLOCK_N)
        seen = (j >= first_key) & (j < last_key)
        next_scale = _read_scales(scales, cache_strides, next_blocks, scored_from, seen, BLOCK_SIZE, BLOCK_N)
        token = first_query.to(tl.int64)
        q, w = _read_query(
            query,
            weights,
            query_strides,
            weight_strides,
            token,
            query_len > 0,
            NUM_HEADS,
            SIZE,
            LEAST,
            QUERY_IS_FP8,
            HAS_FP8_CVT,
        )
        for first in range(scored_from, scored_to, BLOCK_N):
            j = first + tl.arange(0, BLOCK_N)
            seen = (j >= first_key) & (j < last_key)
            k = _read_keys(index_cache, cache_strides, next_blocks, first, seen, SIZE, BLOCK_SIZE, BLOCK_N)
            scale, ahead = next_scale, first + BLOCK_N
            next_blocks = _find_blocks(table, table_stride, ahead, last_key, BLOCK_SIZE, BLOCK_N)
            next_seen = (j + BLOCK_N >= first_key) & (j + BLOCK_N < last_key)
            next_scale = _read_scales(scales, cache_strides, next_blocks, ahead, next_seen, BLOCK_SIZE, BLOCK_N)
            sums = _score(q, w, k, scale, HAS_FP8_CVT)
            tl.store(result + token * width + j, tl.where(seen, sums, float("-inf")), j < width)
    else:
        for first in range(scored_from, scored_to, BLOCK_N):
            j = first + tl.arange(0, BLOCK_N)
            seen = j < 0
            for row in range(first_row, last_row):
                token = (first_query + row).to(tl.int64)
                begins, ends = _interval(
                    first_visible, last_visible, token, context + row, seq_len, left, right, LEFT, RIGHT
                )
                seen |= (j >= begins) & (j < ends)
            k = _read_keys(index_cache, cache_strides, next_blocks, first, seen, SIZE, BLOCK_SIZE, BLOCK_N)
            scale = _read_scales(scales, cache_strides, next_blocks, first, seen, BLOCK_SIZE, BLOCK_N)
            next_blocks = _find_blocks(table, table_stride, first + BLOCK_N, last_key, BLOCK_SIZE, BLOCK_N)
            for row in range(first_row, last_row):
                token = (first_query + row).to(tl.int64)
                q, w = _read_query(
                    query,
                    weights,
                    query_strides,
                    weight_strides,
                    token,
                    row < last_row,
                    NUM_HEADS,
                    SIZE,
                    LEAST,
                    QUERY_IS_FP8,
                    HAS_FP8_CVT,
                )
                sums = _score(q, w, k, scale, HAS_FP8_CVT)
                begins, ends = _interval(
                    first_visible, last_visible, token, context + row, seq_len, left, right, LEFT, RIGHT
                )
                visible = (j >= begins) & (j < ends)
                tl.store(result + token * width + j, tl.where(visible, sums, float("-inf")), j < width)
    token = (tl.load(cu_seqlens_q + num_seqs) + tile).to(tl.int64)  # rows of padding
    while token < num_tokens:
        _hide(result + token * width, begin, end, width, BLOCK_N)
        token += tl.num_programs(0) // runs
