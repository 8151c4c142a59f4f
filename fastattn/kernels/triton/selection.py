"""Index keys, their scores, and the selection of the best, in Triton; the kernel `triton` of `fastattn.sparse`.

    write_index     a program for some tokens: the scale, the codes, both into their part of the page
    score_index     a program for a tile of queries and `BLOCK_N` keys, which are read once for all of them
    select          a program for a query: its threshold by four counts of eight bits, and then one pass in order

A score is a product with one query, of one shape, so no bit of it depends on the batch. The threshold is exact, and
ties go to lower positions as they are counted in order: nothing is sorted, and no two programs race.

Source: DeepGEMM, `fp8_paged_mqa_logits`; radix selection: Alabi et al. 2012, "Fast K-Selection Algorithms for GPUs".
"""

from typing import no_type_check

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Float32, Int32, Int64, Shaped
from torch import Tensor

from fastattn.kernels.gpu.attention_kernel import contiguous, count_tiles
from fastattn.kernels.gpu.codes import from_codes, to_fp8
from fastattn.kernels.gpu.tile import CHANGING, converts_fp8, find_tile, visible_keys
from fastattn.kernels.problem import as_bytes
from refattn.interface import Plan
from refattn.interface.selection import SCALE_BYTES, SMALLEST, holds_codes, index_size_of

BLOCK_ROWS = 16  # tokens of a program that writes
BLOCK_N = 128  # keys of a program that scores, of at most 256 bytes as they are multiplied
QUERIES = 4  # queries of such a program, at most
BLOCK = 2048  # scores that are read at a time


def write_index(
    key: Float[Tensor, "t d"], index_cache: Shaped[Tensor, "n p c"], slot_mapping: Int64[Tensor, "t"]
) -> None:
    """Write index keys into their pool, in one launch; see `fastattn.sparse.write`."""
    if not len(key):
        return
    codes = holds_codes(index_cache)
    _write_index_kernel[(-(-len(key) // BLOCK_ROWS),)](
        key,
        index_cache,
        _scales(index_cache) if codes else None,
        slot_mapping,
        key.stride(),
        index_cache.stride(),
        slot_mapping.stride(0),
        len(key),
        SMALLEST=SMALLEST,
        SIZE=index_size_of(index_cache),
        BLOCK_SIZE=index_cache.shape[1],
        BLOCK_ROWS=BLOCK_ROWS,
        HARDWARE=converts_fp8(key.device),
    )


def score_index(
    query: Float[Tensor, "t h d"], weights: Float[Tensor, "t h"], index_cache: Shaped[Tensor, "n p c"], plan: Plan
) -> Float32[Tensor, "t s"]:
    """Score the keys that queries may see, in one launch; see `fastattn.sparse.scores`."""
    batch, (t, num_heads, size) = plan.batch, query.shape
    result = torch.empty(t, batch.max_seq_len, dtype=torch.float32, device=query.device)
    if not batch.num_seqs or not result.numel():
        return result.fill_(-torch.inf)
    assert batch.block_table is not None  # the path has checked it
    left, right = plan.window
    codes, query_codes = holds_codes(index_cache), query.element_size() == 1
    query, weights = as_bytes(query) if query_codes else query, weights.float()
    key_bytes = size * (2 if query_codes else query.element_size())
    block_n = BLOCK_N if key_bytes <= 256 else BLOCK_N // 2
    programs = count_tiles(batch, t, 1, QUERIES) * -(-batch.max_seq_len // block_n)
    _score_index_kernel[(programs,)](
        query,
        weights,
        index_cache,
        _scales(index_cache) if codes else None,
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
        left,
        right,
        NUM_HEADS=num_heads,
        SIZE=size,
        BLOCK_SIZE=index_cache.shape[1],
        QUERIES=QUERIES,
        BLOCK_N=block_n,
        ONE_TILE=batch.max_query_len <= QUERIES,
        LEFT=left >= 0,
        RIGHT=right >= 0,
        QUERY_CODES=query_codes,
        HARDWARE=converts_fp8(query.device),
        num_warps=4,
        num_stages=2,
    )
    return result


def select(scores: Float32[Tensor, "t s"], topk: int) -> Int32[Tensor, "t {topk}"]:
    """Select the highest scores, of equal ones the first, in one launch; see `fastattn.sparse.select`."""
    t, s = scores.shape
    selected = torch.empty(t, topk, dtype=torch.int32, device=scores.device)
    if t and s:
        block = min(BLOCK, triton.next_power_of_2(s))
        _select_kernel[(t,)](scores, selected, scores.stride(), s, topk, BLOCK=block, num_warps=8)
        return selected
    return selected.fill_(-1)


def _scales(index_cache: Shaped[Tensor, "n p c"]) -> Float32[Tensor, "n p"]:
    """Return a view of the scales: those of a block follow all of its codes."""
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
    scales,  # a view of the cache; None where it holds numbers
    slot_mapping,
    key_strides,
    cache_strides,
    slot_stride,
    rows,
    SMALLEST: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    HARDWARE: tl.constexpr,
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
        is_nan = tl.max((numbers != numbers).to(tl.int32), 1) > 0  # which a maximum may overlook
        largest = tl.where(is_nan, float("nan"), largest)
        scale = tl.div_rn(largest, tl.full(largest.shape, 448.0, tl.float32))
        codes = to_fp8(tl.div_rn(numbers, tl.broadcast_to(scale[:, None], numbers.shape)), "e4m3", HARDWARE)
        at = block * cache_strides[0] + place * SIZE
        tl.store(index_cache + at[:, None] + at_d, codes, in_key)
        tl.store(scales + block * (cache_strides[0] // 4) + place, scale, is_written)


@triton.jit(do_not_specialize=[*CHANGING, "width"])
@no_type_check
def _score_index_kernel(
    query,
    weights,
    index_cache,
    scales,  # a view of the cache; None where it holds numbers
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
    left,
    right,
    NUM_HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    QUERIES: tl.constexpr,
    BLOCK_N: tl.constexpr,
    ONE_TILE: tl.constexpr,
    LEFT: tl.constexpr,
    RIGHT: tl.constexpr,
    QUERY_CODES: tl.constexpr,
    HARDWARE: tl.constexpr,
):
    runs = tl.cdiv(width, BLOCK_N)  # of keys, one for each program of a tile
    tile = tl.program_id(0) // runs
    sequence, first_row = find_tile(cu_seqlens_q, tile, num_seqs, 1, QUERIES, ONE_TILE)
    first_query = tl.load(cu_seqlens_q + sequence)
    query_len = tl.load(cu_seqlens_q + sequence + 1) - first_query
    seq_len = tl.load(seq_lens + sequence)
    last_row = tl.minimum(first_row + QUERIES, query_len)
    j = tl.program_id(0) % runs * BLOCK_N + tl.arange(0, BLOCK_N)
    in_width = j < width

    # Which of the keys some query of the tile sees: no other is read.
    context = seq_len - query_len
    seen = j < 0
    for row in range(first_row, last_row):
        if first_visible is None:
            first, end = visible_keys(context + row, context + row, seq_len, left, right, LEFT, RIGHT)
        else:
            first = tl.load(first_visible + first_query + row)
            end = tl.minimum(tl.load(last_visible + first_query + row), seq_len - 1) + 1
        seen |= (j >= first) & (j < end)
    seen &= j < seq_len
    PAD: tl.constexpr = triton.next_power_of_2(SIZE) if SIZE > 16 else 16
    HEADS: tl.constexpr = triton.next_power_of_2(NUM_HEADS) if NUM_HEADS > 16 else 16
    at_d, heads = tl.arange(0, PAD), tl.arange(0, HEADS)
    is_head = heads < NUM_HEADS
    if tl.max(seen.to(tl.int32), 0) > 0:
        column = (j // BLOCK_SIZE).to(tl.int64)
        table = block_table + sequence.to(tl.int64) * table_row_stride
        blocks = tl.load(table + column * table_stride, mask=seen, other=0).to(tl.uint32).to(tl.int64)
        places = (j % BLOCK_SIZE).to(tl.int64)
        in_key = seen[None, :] & (at_d < SIZE)[:, None]
        if scales is None:
            at = blocks * cache_strides[0] + places * cache_strides[1]
            k = tl.load(index_cache + at[None, :] + at_d.to(tl.int64)[:, None] * cache_strides[2], in_key, 0.0)
        else:
            at = blocks * cache_strides[0] + places * SIZE
            k = from_codes(tl.load(index_cache + at[None, :] + at_d[:, None], in_key, 0), "e4m3", HARDWARE)
            scale = tl.load(scales + blocks * (cache_strides[0] // 4) + places, seen, 0.0)
        for row in range(first_row, last_row):
            token = (first_query + row).to(tl.int64)
            at_query = query + token * query_strides[0] + heads.to(tl.int64)[:, None] * query_strides[1]
            q = tl.load(
                at_query + at_d.to(tl.int64)[None, :] * query_strides[2],
                is_head[:, None] & (at_d < SIZE)[None, :],
                0,
            )
            if QUERY_CODES:
                q = from_codes(q, "e4m3", HARDWARE)
            if q.dtype == k.dtype:
                products = tl.dot(q, k, input_precision="ieee")
            elif scales is not None and q.dtype == tl.bfloat16:
                products = tl.dot(q, k.to(tl.bfloat16), input_precision="ieee")  # which holds every code
            else:
                products = tl.dot(q.to(tl.float32), k.to(tl.float32), input_precision="ieee")
            w = tl.load(weights + token * weight_strides[0] + heads * weight_strides[1], is_head, 0.0)
            positive = tl.where(products < 0.0, 0.0, products)  # NaN stays
            sums = tl.sum(positive * w[:, None], 0)
            if scales is not None:
                sums *= scale
            if first_visible is None:
                first, end = visible_keys(context + row, context + row, seq_len, left, right, LEFT, RIGHT)
            else:
                first = tl.load(first_visible + token)
                end = tl.minimum(tl.load(last_visible + token), seq_len - 1) + 1
            visible = (j >= first) & (j < end) & seen
            tl.store(result + token * width + j, tl.where(visible, sums, float("-inf")), in_width)
    else:
        for row in range(first_row, last_row):
            token = (first_query + row).to(tl.int64)
            tl.store(result + token * width + j, tl.full([BLOCK_N], float("-inf"), tl.float32), in_width)
    token = (tl.load(cu_seqlens_q + num_seqs) + tile).to(tl.int64)  # rows of padding
    while token < num_tokens:
        tl.store(result + token * width + j, tl.full([BLOCK_N], float("-inf"), tl.float32), in_width)
        token += tl.num_programs(0) // runs


@triton.jit
@no_type_check
def _in_order(numbers):
    """Return unsigned integers that are ordered as numbers are: both zeros alike, NaN above all."""
    bits = tl.where(numbers == 0.0, 0.0, numbers).to(tl.int32, bitcast=True)
    order = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    order = tl.where(numbers != numbers, 0x7FFFFFFF, order)
    return (order ^ -2147483648).to(tl.uint32, bitcast=True)


@triton.jit(do_not_specialize=["width", "topk"])
@no_type_check
def _select_kernel(scores, selected, score_strides, width, topk, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    digits = tl.arange(0, 256)
    row_scores = scores + row * score_strides[0]
    lowest = (row * 0).to(tl.uint32)  # of what is selected, its highest bits first
    wanted = topk  # of the numbers that have these bits
    for step in tl.static_range(4):
        counts = tl.zeros([256], tl.int32)
        for first in range(0, width, BLOCK):
            j = first + at
            numbers = tl.load(row_scores + j.to(tl.int64) * score_strides[1], j < width, float("-inf"))
            order = _in_order(numbers)
            counted = numbers != float("-inf")
            if step > 0:
                counted &= (order >> (32 - 8 * step)) == (lowest >> (32 - 8 * step))
            counts += tl.histogram(((order >> (24 - 8 * step)) & 255).to(tl.int32), 256, mask=counted)
        above = tl.sum(counts, 0) - tl.cumsum(counts, 0)  # numbers with a larger digit
        digit = tl.min(tl.where(above < wanted, digits, 255), 0)
        wanted -= tl.sum(tl.where(digits == digit, above, 0), 0)
        lowest |= digit.to(tl.uint32) << (24 - 8 * step)
    ties, count = row.to(tl.int32) * 0, row.to(tl.int32) * 0
    for first in range(0, width, BLOCK):
        j = first + at
        numbers = tl.load(row_scores + j.to(tl.int64) * score_strides[1], j < width, float("-inf"))
        order = _in_order(numbers)
        is_key = numbers != float("-inf")
        is_tie = is_key & (order == lowest)
        place = ties + tl.cumsum(is_tie.to(tl.int32), 0)
        chosen = (is_key & (order > lowest)) | (is_tie & (place <= wanted))
        column = count + tl.cumsum(chosen.to(tl.int32), 0) - 1
        tl.store(selected + row * topk + column, j, chosen)
        ties += tl.sum(is_tie.to(tl.int32), 0)
        count += tl.sum(chosen.to(tl.int32), 0)
    while count < topk:
        column = count + at
        tl.store(selected + row * topk + column, -1, column < topk)
        count += BLOCK
