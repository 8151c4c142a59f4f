"""Index keys, their scores, and the selection of the best, in Triton; the kernel `triton` of `fastattn.sparse`.

    write_index     a program for some tokens: the scale, the codes, both into their part of the page
    score_index     a program for a tile of queries and some steps of `BLOCK_N` keys, each read once for all of them
    select          a program for a query: its threshold by counts of five bits at a time, and then one pass in order;
                    of few long rows, a program for some scores of a query, and a launch for each count
    plan_selected   a program for a query: whose it is, the slots of its keys, one after the other

A score is a product with one query, of one shape, so no bit of it depends on the batch. The threshold is exact, and
ties go to lower positions as they are counted in order: nothing is sorted, and no two programs race. Splits of a row
agree on its next five bits between two launches: each of them sums the counts of all, which the launch before wrote.

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
from fastattn.kernels.gpu.tile import (
    CHANGING,
    Tuning,
    converts_fp8,
    find_tile,
    fit,
    multiprocessors,
    pad,
    visible_keys,
)
from fastattn.kernels.problem import as_bytes
from refattn.interface import Batch, Plan
from refattn.interface.selection import SCALE_BYTES, SMALLEST, holds_codes, index_size_of

BLOCK_ROWS = 16  # tokens of a program that writes
BLOCK_N = 128  # keys of a step of a program that scores, of at most 256 bytes as they are multiplied
STEPS = 16  # of such a program, at most
PROGRAMS = 2  # for each multiprocessor, so many that steps become programs of their own
SCORE_WARPS = 4
STAGES = 3  # steps of keys that are read ahead
STAGES_OF_QUERIES = 2  # where a tile has several, which are what is read ahead then
QUERIES = 4  # queries of such a program, at most
BLOCK = 4096  # scores that are read at a time, at most 2**15
BITS = 5  # of a digit; at least 5, as a warp counts 32 digits by a vote for each bit
SELECT_WARPS = 4
SPLIT = 4096  # scores of a split, at least; a row of no more is never split
MOST_SPLITS = 64  # of a row
ROWS_TO_FILL = 2  # for each multiprocessor, from which on no row is split
BLOCK_SEQS = 256  # sequences that are looked at at a time, for that of a row
BLOCK_KEYS = 2048  # selected keys that are looked up at a time
PLAN_WARPS = 8


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
    asked = Tuning(
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
    enough = PROGRAMS * multiprocessors(query.device)
    while steps > 1 and tiles * -(-batch.max_seq_len // (steps * block_n)) < enough:
        steps //= 2
    _score_index_kernel[(tiles * -(-batch.max_seq_len // (steps * block_n)),)](
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
        QUERY_CODES=query_codes,
        HARDWARE=converts_fp8(query.device),
        num_warps=tuning.num_warps,
        num_stages=tuning.num_stages,
    )
    return result


def select(scores: Float32[Tensor, "t s"], topk: int) -> Int32[Tensor, "t {topk}"]:
    """Select the highest scores, of equal ones the first; see `fastattn.sparse.select`.

    It is one launch where there are many rows, or short ones; else one for each digit, and one that writes.
    """
    t, s = scores.shape
    selected = torch.empty(t, topk, dtype=torch.int32, device=scores.device)
    if not t or not s:
        return selected.fill_(-1)
    fixed = dict(BLOCK=min(BLOCK, pad(s)), BITS=BITS, num_warps=SELECT_WARPS)
    if s <= SPLIT or t >= ROWS_TO_FILL * multiprocessors(scores.device):
        _select_kernel[(t,)](scores, selected, scores.stride(), s, topk, **fixed)
        return selected
    split_blocks = -(-max(SPLIT, -(-s // MOST_SPLITS)) // BLOCK)
    splits, steps = -(-s // (split_blocks * BLOCK)), -(-32 // BITS)
    counts = torch.empty(t, splits, steps, 2**BITS, dtype=torch.int32, device=scores.device)
    states = torch.empty(t, steps, 2, dtype=torch.int32, device=scores.device)
    work = (scores, counts, states, scores.stride(), s, topk, splits, split_blocks)
    fixed["SPLITS"] = pad(splits)
    for step in range(steps):
        _count_kernel[(t, splits)](*work, step, **fixed)
    _write_kernel[(t, splits)](*work, selected, **fixed)
    return selected


def selected_slots(batch: Batch, positions: Int32[Tensor, "t k"], *, block_size: int) -> Int32[Tensor, "t k"]:
    """Return the slots of selected keys, in one launch; see `fastattn.sparse.slots`."""
    slots = torch.empty(positions.shape, dtype=torch.int32, device=batch.device)
    if slots.numel():
        _launch_plan(batch, positions, block_size, slots)
    return slots


def plan_selected(
    batch: Batch, positions: Int32[Tensor, "t k"], *, block_size: int
) -> tuple[Int32[Tensor, "_"], Int32[Tensor, "t"], Int32[Tensor, "t k"], Int32[Tensor, "t"]]:
    """Make a sequence of each query row, in one launch; see `fastattn.kernels.torch_selection.plan_selected`."""
    t, k = positions.shape
    rows, seq_lens, table, sequences = (
        torch.empty(shape, dtype=torch.int32, device=batch.device) for shape in ((t + 1,), (t,), (t, k), (t,))
    )
    if not t:
        return rows.zero_(), seq_lens, table, sequences
    _launch_plan(batch, positions, block_size, table, rows, seq_lens, sequences)
    return rows, seq_lens, table, sequences


def _launch_plan(
    batch: Batch,
    positions: Int32[Tensor, "t k"],
    block_size: int,
    slots: Int32[Tensor, "t k"],
    new_cu_seqlens_q: Int32[Tensor, "_"] | None = None,
    new_seq_lens: Int32[Tensor, "t"] | None = None,
    sequences: Int32[Tensor, "t"] | None = None,
) -> None:
    """Look up selected keys: each in its place, or, where there are lengths to be written, one after the other."""
    t, k = positions.shape
    assert batch.block_table is not None  # the path has checked it
    _plan_selected_kernel[(t,)](
        batch.cu_seqlens_q,
        batch.seq_lens,
        batch.block_table,
        positions,
        slots,
        new_cu_seqlens_q,
        new_seq_lens,
        sequences,
        batch.block_table.stride(),
        positions.stride(),
        batch.num_seqs,
        batch.block_table.shape[1],
        k,
        block_size,
        BLOCK_SEQS=BLOCK_SEQS,
        BLOCK_KEYS=min(BLOCK_KEYS, pad(max(k, 1))),
        num_warps=PLAN_WARPS,
    )


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
def _read_keys(
    index_cache,
    scales,
    table,
    table_stride,
    cache_strides,
    j,
    seen,
    SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HARDWARE: tl.constexpr,
):
    """Read the keys of a step that are seen, [keys, d], and their scales, which only codes have."""
    column = (j // BLOCK_SIZE).to(tl.int64)
    blocks = tl.load(table + column * table_stride, mask=seen, other=0).to(tl.uint32).to(tl.int64)
    places = (j % BLOCK_SIZE).to(tl.int64)
    PAD: tl.constexpr = triton.next_power_of_2(SIZE) if SIZE > 16 else 16
    at_d = tl.arange(0, PAD)[None, :]
    in_key = seen[:, None] & (at_d < SIZE)
    scale = tl.full(j.shape, 1.0, tl.float32)
    if scales is None:
        at = blocks * cache_strides[0] + places * cache_strides[1]
        k = tl.load(index_cache + at[:, None] + at_d.to(tl.int64) * cache_strides[2], in_key, 0.0)
    else:
        at = blocks * cache_strides[0] + places * SIZE
        scale = tl.load(scales + blocks * (cache_strides[0] // 4) + places, seen, 0.0)
        k = from_codes(tl.load(index_cache + at[:, None] + at_d, in_key, 0), "e4m3", HARDWARE)
    return k, scale


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
    QUERY_CODES: tl.constexpr,
    HARDWARE: tl.constexpr,
):
    """Read the index heads of one query, [heads, d], and their weights."""
    PAD: tl.constexpr = triton.next_power_of_2(SIZE) if SIZE > 16 else 16
    HEADS: tl.constexpr = triton.next_power_of_2(NUM_HEADS) if NUM_HEADS > 16 else 16
    at_d, heads = tl.arange(0, PAD)[None, :], tl.arange(0, HEADS)
    is_head = (heads < NUM_HEADS) & is_row
    at = query + token * query_strides[0] + heads.to(tl.int64)[:, None] * query_strides[1]
    q = tl.load(at + at_d.to(tl.int64) * query_strides[2], is_head[:, None] & (at_d < SIZE), 0)
    if QUERY_CODES:
        q = from_codes(q, "e4m3", HARDWARE)
    w = tl.load(weights + token * weight_strides[0] + heads * weight_strides[1], is_head, 0.0)
    return q, w


@triton.jit
@no_type_check
def _score(q, w, k, scale, CODES: tl.constexpr):
    """Return the scores of the keys of a step, which are the rows of the product: so a thread has sums of its own."""
    if q.dtype == k.dtype:
        products = tl.dot(k, tl.trans(q), input_precision="ieee")
    elif CODES and q.dtype == tl.bfloat16:
        products = tl.dot(k.to(tl.bfloat16), tl.trans(q), input_precision="ieee")  # which holds every code
    else:
        products = tl.dot(k.to(tl.float32), tl.trans(q.to(tl.float32)), input_precision="ieee")
    positive = tl.where(products < 0.0, 0.0, products)  # NaN stays
    sums = tl.sum(positive * w[None, :], 1)
    if CODES:
        sums *= scale
    return sums


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
    QUERY_CODES: tl.constexpr,
    HARDWARE: tl.constexpr,
):
    runs = tl.cdiv(width, steps * BLOCK_N)  # of keys, one for each program of a tile
    tile = tl.program_id(0) // runs
    sequence, first_row = find_tile(cu_seqlens_q, tile, num_seqs, 1, QUERIES, ONE_TILE)
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

    if ONE_ROW:
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
            QUERY_CODES,
            HARDWARE,
        )
        for first in range(scored_from, scored_to, BLOCK_N):
            j = first + tl.arange(0, BLOCK_N)
            seen = (j >= first_key) & (j < last_key)
            k, scale = _read_keys(
                index_cache, scales, table, table_stride, cache_strides, j, seen, SIZE, BLOCK_SIZE, HARDWARE
            )
            sums = _score(q, w, k, scale, scales is not None)
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
            k, scale = _read_keys(
                index_cache, scales, table, table_stride, cache_strides, j, seen, SIZE, BLOCK_SIZE, HARDWARE
            )
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
                    QUERY_CODES,
                    HARDWARE,
                )
                sums = _score(q, w, k, scale, scales is not None)
                begins, ends = _interval(
                    first_visible, last_visible, token, context + row, seq_len, left, right, LEFT, RIGHT
                )
                visible = (j >= begins) & (j < ends)
                tl.store(result + token * width + j, tl.where(visible, sums, float("-inf")), j < width)
    token = (tl.load(cu_seqlens_q + num_seqs) + tile).to(tl.int64)  # rows of padding
    while token < num_tokens:
        _hide(result + token * width, begin, end, width, BLOCK_N)
        token += tl.num_programs(0) // runs


@triton.jit
@no_type_check
def _in_order(numbers):
    """Return unsigned integers that are ordered as numbers are: both zeros alike, NaN above all."""
    bits = tl.where(numbers == 0.0, 0.0, numbers).to(tl.int32, bitcast=True)
    order = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    order = tl.where(numbers != numbers, 0x7FFFFFFF, order)
    return (order ^ -2147483648).to(tl.uint32, bitcast=True)


@triton.jit
@no_type_check
def _read_scores(row_scores, stride, j, width, MASKED: tl.constexpr):
    """Read scores, `-inf` past the last one; without a mask, which would be read one by one, where all are there."""
    at = row_scores + j.to(tl.int64) * stride
    return tl.load(at, mask=(j < width) if MASKED else None, other=float("-inf") if MASKED else None)


@triton.jit
@no_type_check
def _count_digits(row_scores, stride, first, end, width, lowest, step, BLOCK: tl.constexpr, BITS: tl.constexpr):
    """Count the digits of a step in some blocks of scores, of those that have the bits that are known so far.

    A digit is `BITS` bits. That of the last step repeats bits that are known, if 32 bits are no multiple.
    """
    shift = tl.maximum(32 - BITS - BITS * step, 0)
    known = tl.full([], 0xFFFFFFFF, tl.uint32) << (31 - BITS * step) << 1  # in two: none in the first step
    counts = tl.zeros([2**BITS], tl.int32)
    whole = width // BLOCK
    for MASKED in tl.static_range(2):
        for block in range(tl.maximum(first, whole) if MASKED else first, end if MASKED else tl.minimum(end, whole)):
            numbers = _read_scores(row_scores, stride, block * BLOCK + tl.arange(0, BLOCK), width, MASKED)
            order = _in_order(numbers)
            counted = (numbers != float("-inf")) & ((order & known) == lowest)
            counts += tl.histogram(((order >> shift) & (2**BITS - 1)).to(tl.int32), 2**BITS, mask=counted)
    return counts


@triton.jit
@no_type_check
def _find_digit(counts, lowest, wanted, step, BITS: tl.constexpr):
    """Return the lowest number that is selected, by one more digit, and how many are wanted of those that have it."""
    digits = tl.arange(0, 2**BITS)
    above = tl.sum(counts, 0) - tl.cumsum(counts, 0)  # numbers with a larger digit
    digit = tl.min(tl.where(above < wanted, digits, 2**BITS - 1), 0)
    wanted -= tl.sum(tl.where(digits == digit, above, 0), 0)
    return lowest | (digit.to(tl.uint32) << tl.maximum(32 - BITS - BITS * step, 0)), wanted


@triton.jit
@no_type_check
def _write_positions(
    row_scores, stride, row_selected, first, end, width, lowest, wanted, above, ties, BLOCK: tl.constexpr
):
    """Write the positions that are selected in some blocks, in order; return how many there are up to their end.

    Before them there are `above` numbers above the lowest one that is selected, and `ties` that equal it. Both are
    counted in one sum, in a half of 32 bits each.
    """
    whole = width // BLOCK
    for MASKED in tl.static_range(2):
        for block in range(tl.maximum(first, whole) if MASKED else first, end if MASKED else tl.minimum(end, whole)):
            j = block * BLOCK + tl.arange(0, BLOCK)
            numbers = _read_scores(row_scores, stride, j, width, MASKED)
            order = _in_order(numbers)
            is_key = numbers != float("-inf")
            is_above, is_tie = is_key & (order > lowest), is_key & (order == lowest)
            both = is_above.to(tl.int32) + (is_tie.to(tl.int32) << 16)
            sums, total = tl.cumsum(both, 0), tl.sum(both, 0)
            place = ties + (sums >> 16)
            column = above + (sums & 0xFFFF) + tl.minimum(place, wanted) - 1
            tl.store(row_selected + column, j, is_above | (is_tie & (place <= wanted)))
            above += total & 0xFFFF
            ties += total >> 16
    return above + tl.minimum(ties, wanted)


@triton.jit
@no_type_check
def _fill_rest(row_selected, count, topk, BLOCK: tl.constexpr):
    for first in range(count, topk, BLOCK):
        column = first + tl.arange(0, BLOCK)
        tl.store(row_selected + column, tl.full([BLOCK], -1, tl.int32), column < topk)


@triton.jit(do_not_specialize=["width", "topk"])
@no_type_check
def _select_kernel(scores, selected, score_strides, width, topk, BLOCK: tl.constexpr, BITS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    row_scores, row_selected = scores + row * score_strides[0], selected + row * topk
    lowest = tl.full([], 0, tl.uint32)  # of what is selected, its highest bits first
    wanted = topk  # of the numbers that have these bits
    blocks = tl.cdiv(width, BLOCK)
    for step in range((31 + BITS) // BITS):
        counts = _count_digits(row_scores, score_strides[1], 0, blocks, width, lowest, step, BLOCK, BITS)
        lowest, wanted = _find_digit(counts, lowest, wanted, step, BITS)
    none = wanted * 0
    count = _write_positions(
        row_scores, score_strides[1], row_selected, 0, blocks, width, lowest, wanted, none, none, BLOCK
    )
    _fill_rest(row_selected, count, topk, BLOCK)


@triton.jit
@no_type_check
def _agree(row_counts, row_states, steps, topk, splits, SPLITS: tl.constexpr, BITS: tl.constexpr):
    """Return what `_find_digit` finds in the last of some steps, from the counts of all splits and the state before."""
    STEPS: tl.constexpr = (31 + BITS) // BITS
    lowest = tl.full([], 0, tl.uint32)
    wanted = topk
    if steps > 0:
        step = steps - 1
        lowest = tl.load(row_states + 2 * step).to(tl.uint32, bitcast=True)
        wanted = tl.load(row_states + 2 * step + 1)
        split, digits = tl.arange(0, SPLITS)[:, None], tl.arange(0, 2**BITS)[None, :]
        of_splits = tl.load(row_counts + (split * STEPS + step) * 2**BITS + digits, split < splits, 0)
        lowest, wanted = _find_digit(tl.sum(of_splits, 0), lowest, wanted, step, BITS)
    return lowest, wanted


@triton.jit(do_not_specialize=["width", "topk", "splits", "split_blocks", "step"])
@no_type_check
def _count_kernel(
    scores,
    counts,  # [t, splits, steps, digits]
    states,  # [t, steps, 2]: before each step, the lowest number so far, and how many are wanted
    score_strides,
    width,
    topk,
    splits,
    split_blocks,
    step,
    BLOCK: tl.constexpr,
    SPLITS: tl.constexpr,
    BITS: tl.constexpr,
):
    """Count the digits of a step in one split of a row; what it reads of others, the launch before has written."""
    row, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    STEPS: tl.constexpr = (31 + BITS) // BITS
    row_counts, row_states = counts + row * splits * STEPS * 2**BITS, states + row * STEPS * 2
    lowest, wanted = _agree(row_counts, row_states, step, topk, splits, SPLITS, BITS)
    if split == 0:
        tl.store(row_states + 2 * step, lowest.to(tl.int32, bitcast=True))
        tl.store(row_states + 2 * step + 1, wanted)
    first = split * split_blocks
    end = tl.minimum(first + split_blocks, tl.cdiv(width, BLOCK))
    row_scores = scores + row * score_strides[0]
    of_split = _count_digits(row_scores, score_strides[1], first, end, width, lowest, step, BLOCK, BITS)
    tl.store(row_counts + (split * STEPS + step) * 2**BITS + tl.arange(0, 2**BITS), of_split)


@triton.jit(do_not_specialize=["width", "topk", "splits", "split_blocks"])
@no_type_check
def _write_kernel(
    scores,
    counts,
    states,
    score_strides,
    width,
    topk,
    splits,
    split_blocks,
    selected,
    BLOCK: tl.constexpr,
    SPLITS: tl.constexpr,
    BITS: tl.constexpr,
):
    """Write what is selected in one split of a row, after what is selected in those before it."""
    row, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    STEPS: tl.constexpr = (31 + BITS) // BITS
    row_counts, row_states = counts + row * splits * STEPS * 2**BITS, states + row * STEPS * 2
    lowest, wanted = _agree(row_counts, row_states, STEPS, topk, splits, SPLITS, BITS)
    others, digits = tl.arange(0, SPLITS)[:, None], tl.arange(0, 2**BITS)[None, :]
    above, ties = split * 0, split * 0
    for step in tl.static_range(STEPS):
        earlier = tl.load(row_counts + (others * STEPS + step) * 2**BITS + digits, others < split, 0)
        digit = ((lowest >> max(32 - BITS - BITS * step, 0)) & (2**BITS - 1)).to(tl.int32)
        above += tl.sum(tl.sum(tl.where(digits > digit, earlier, 0), 1), 0)
        ties = tl.sum(tl.sum(tl.where(digits == digit, earlier, 0), 1), 0)  # in the last step, of the whole number
    first = split * split_blocks
    end = tl.minimum(first + split_blocks, tl.cdiv(width, BLOCK))
    row_scores, row_selected = scores + row * score_strides[0], selected + row * topk
    count = _write_positions(
        row_scores, score_strides[1], row_selected, first, end, width, lowest, wanted, above, ties, BLOCK
    )
    if split == splits - 1:
        _fill_rest(row_selected, count, topk, BLOCK)


@triton.jit(do_not_specialize=[*CHANGING, "positions", "columns", "k"])
@no_type_check
def _plan_selected_kernel(
    cu_seqlens_q,
    seq_lens,
    block_table,
    positions,
    slots,  # [t, k]
    new_cu_seqlens_q,
    new_seq_lens,  # None: every slot stays in the place of its position
    sequences,
    table_strides,
    position_strides,
    num_seqs,
    columns,
    k,
    block_size,
    BLOCK_SEQS: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
):
    """Look up the selected keys of one query row; a row of padding has none.

    Its sequence is found by counting those that end before it: all are read at once, where halving would wait for one
    after the other.
    """
    row = tl.program_id(0).to(tl.int64)
    sequence = tl.program_id(0) * 0
    for first in range(0, num_seqs, BLOCK_SEQS):
        i = first + tl.arange(0, BLOCK_SEQS)
        ends = tl.load(cu_seqlens_q + 1 + i, i < num_seqs, 0)
        sequence += tl.sum(((i < num_seqs) & (ends <= row)).to(tl.int32), 0)
    is_row = (sequence < num_seqs) & (columns > 0)
    seq_len = tl.load(seq_lens + sequence, is_row, 0)
    blocks = block_table + sequence.to(tl.int64) * table_strides[0]
    row_positions, row_slots = positions + row * position_strides[0], slots + row * k
    count = tl.program_id(0) * 0
    for first in range(0, k, BLOCK_KEYS):
        at = first + tl.arange(0, BLOCK_KEYS)
        position = tl.load(row_positions + at.to(tl.int64) * position_strides[1], at < k, -1)
        is_key = (position >= 0) & (position < seq_len)
        position = tl.where(is_key, position, 0)
        column = tl.minimum(position // block_size, columns - 1).to(tl.int64)
        slot = tl.load(blocks + column * table_strides[1], is_key, 0) * block_size + position % block_size
        if new_seq_lens is None:
            tl.store(row_slots + at, tl.where(is_key, slot, -1), at < k)
        else:
            is_key &= slot >= 0
            place = count + tl.cumsum(is_key.to(tl.int32), 0) - 1
            tl.store(row_slots + place, slot, is_key)
            count += tl.sum(is_key.to(tl.int32), 0)
    if new_seq_lens is not None:
        for first in range(count, k, BLOCK_KEYS):
            at = first + tl.arange(0, BLOCK_KEYS)
            tl.store(row_slots + at, tl.zeros([BLOCK_KEYS], tl.int32), at < k)
        tl.store(new_seq_lens + row, count)
        tl.store(sequences + row, tl.maximum(tl.minimum(sequence, num_seqs - 1), 0))
        end = tl.load(cu_seqlens_q + num_seqs)
        tl.store(new_cu_seqlens_q + row + 1, tl.minimum(tl.program_id(0) + 1, end))
        if row == 0:
            tl.store(new_cu_seqlens_q, 0)
