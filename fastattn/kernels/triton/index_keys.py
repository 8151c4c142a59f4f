"""Index keys and their scores, in Triton; the kernel `triton` of `fastattn.sparse`.

    write_index     a program for some tokens: the scale, the quantized values, both into their part of the page
    score_index     a program for a tile of queries and some steps of `BLOCK_N` keys, each read once for all of them

All scores come from products of one shape, with one query, so no bit of a score depends on the batch.

Source: DeepGEMM, `fp8_paged_mqa_logits`.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, no_type_check

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Float32, Int64, Shaped
from torch import Tensor

from fastattn.kernels.problem import as_bytes
from fastattn.kernels.replay import key_of_launch, launch_once
from fastattn.kernels.triton.constants import next_power_of_2
from fastattn.kernels.triton.launch import CHANGING, Launch, converts_fp8, overlapping, pdl_wait
from fastattn.kernels.triton.masks import visible_keys
from fastattn.kernels.triton.quantized import dequantize, dequantize_pairs, power_of_two, to_fp8
from fastattn.kernels.triton.queries import count_tiles, find_rows, queries_of
from fastattn.kernels.triton.tuning import LaunchConfig, fit, pad, sms_of
from refattn.batch import Batch
from refattn.index_keys import SCALE_BYTES, SMALLEST, holds_fp8, index_size_of
from refattn.plan import Plan

BLOCK_ROWS = 16  # tokens of a program that writes
BLOCK_N = 64  # keys of a step; half of it if a key has more than 256 bytes in the product
STEPS = 16  # most steps of a program that scores
PROGRAMS = 2  # programs per SM; with fewer, a program gets fewer steps
SCORE_WARPS = 4
STAGES = 3  # pipeline stages over steps of keys
STAGES_OF_QUERIES = 2  # pipeline stages over the queries of a tile, if it has several
QUERIES = 4  # most queries of a program that scores


class Pool(NamedTuple):
    """The pool of index keys.

    Attributes:
        index_cache: [n, p, d]; quantized, [n, p, c] bytes or [n, p * d / 2] pairs of bytes.
        scales: [n, p], a view of the same memory; None where it is unquantized.
        strides: of blocks, tokens and elements of the pool.
        block_table: [b, m].
        table_row_stride: its stride of sequences.
        table_stride: its stride of blocks.
        SIZE: d.
        BLOCK_SIZE: p.
        HAS_FP8_CVT: whether the GPU converts fp8.
    """

    index_cache: Any
    scales: Any
    strides: Any
    block_table: Any
    table_row_stride: Any
    table_stride: Any
    SIZE: Any
    BLOCK_SIZE: Any
    HAS_FP8_CVT: Any


class Visible(NamedTuple):
    """The mask: an interval of each query [t], or, if that is None, a window.

    A side of the window without its flag has no limit.
    """

    first_visible: Any
    last_visible: Any
    left: Any
    right: Any
    LEFT: Any
    RIGHT: Any


class IndexSizes(NamedTuple):
    """The constants of a launch.

    Attributes:
        QUERIES: queries of a tile, at most.
        KEYS: keys of a step.
        ONE_TILE: whether a tile holds all queries of any sequence.
        ONE_ROW: whether no sequence has more than one query.
    """

    QUERIES: Any
    KEYS: Any
    ONE_TILE: Any
    ONE_ROW: Any


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
    """Score the visible keys of each query, in one launch, or two; see `fastattn.sparse.scores`."""
    result = torch.empty(len(query), plan.batch.max_seq_len, dtype=torch.float32, device=query.device)
    if not plan.batch.num_seqs or not result.numel():
        return result.fill_(-torch.inf)
    quantized_values = holds_fp8(index_cache)
    pairs = quantized_values and query.element_size() <= 2
    halved = pairs and query.dtype == torch.bfloat16
    if halved:
        query, weights = _in_float16(query, weights)
    tensors = (
        as_bytes(query) if query.element_size() == 1 else query,
        weights.float(),
        _in_pairs(index_cache) if pairs else index_cache,
        _scales(index_cache) if quantized_values else None,
        result,
    )
    key = key_of_launch(("score_index", halved, index_cache.shape, index_cache.stride()), tensors)
    launch_once(plan, key, tensors, partial(_launch_scores, *tensors, index_cache, plan, halved))
    return result


def _launch_scores(
    query: Tensor,
    weights: Tensor,
    keys: Tensor,
    scales: Tensor | None,
    result: Tensor,
    index_cache: Tensor,
    plan: Plan,
    halved: bool,
) -> Callable[..., None]:
    """Launch the scores, and return the replay."""
    batch = plan.batch
    key_bytes = query.shape[2] * max(query.element_size(), 2)
    tuning = _tune(query, index_cache, key_bytes, one_row=batch.max_query_len <= 1)
    tiles, steps = count_tiles(batch, len(query), 1, QUERIES), STEPS
    enough = PROGRAMS * sms_of(query.device)
    while steps > 1 and tiles * -(-batch.max_seq_len // (steps * tuning.block_n)) < enough:
        steps //= 2
    tile = QUERIES, tuning.block_n, batch.max_query_len <= QUERIES, batch.max_query_len <= 1
    early = overlapping(query.device, after_ours=halved)
    return Launch(
        _score_index_kernel,
        (tiles * -(-batch.max_seq_len // (steps * tuning.block_n)),),
        {"queries.query": query, "weights": weights, "pool.index_cache": keys, "pool.scales": scales}
        | {"result": result},
        dict(
            queries=queries_of(query, batch, query.shape[1], group=1),
            weight_strides=weights.stride(),
            pool=_pool_of(keys, scales, index_cache, batch),
            mask=_visible_of(plan),
            width=batch.max_seq_len,
            steps=steps,
            TILE=IndexSizes(*map(tl.constexpr, tile)),
            OVERLAP=early.pop("OVERLAP"),
        ),
        dict(num_warps=tuning.num_warps, num_stages=tuning.num_stages) | early,
    ).replay


def _tune(query: Tensor, index_cache: Tensor, key_bytes: int, *, one_row: bool) -> LaunchConfig:
    """Return a launch config whose steps and stages fit into shared memory.

    Args:
        query: the queries, as they are multiplied.
        index_cache: the pool.
        key_bytes: bytes of a key, as it is multiplied.
        one_row: whether no sequence has more than one query.
    """
    _, num_heads, size = query.shape
    asked = LaunchConfig(
        block_m=pad(max(num_heads, 16)),
        block_n=BLOCK_N if key_bytes <= 256 else BLOCK_N // 2,
        num_warps=SCORE_WARPS,
        num_stages=STAGES if one_row else STAGES_OF_QUERIES,
        splits=1,
        most_splits=1,
    )
    stored_bytes = size * index_cache.itemsize
    return fit(asked, query.device, row_bytes=pad(size) * key_bytes // size, key_bytes=stored_bytes)


def _pool_of(keys: Tensor, scales: Tensor | None, index_cache: Tensor, batch: Batch) -> Pool:
    """Return a pool of index keys as a kernel takes it."""
    table = batch.block_table
    assert table is not None  # the path has checked it
    return Pool(
        index_cache=keys,
        scales=scales,
        strides=index_cache.stride(),
        block_table=table,
        table_row_stride=table.stride(0),
        table_stride=table.stride(1),
        SIZE=tl.constexpr(index_size_of(index_cache)),
        BLOCK_SIZE=tl.constexpr(index_cache.shape[1]),
        HAS_FP8_CVT=tl.constexpr(converts_fp8(index_cache.device)),
    )


def _visible_of(plan: Plan) -> Visible:
    """Return the mask of a plan as a kernel takes it."""
    left, right = plan.window
    return Visible(
        first_visible=plan.first_visible,
        last_visible=plan.last_visible,
        left=left,
        right=right,
        LEFT=tl.constexpr(left >= 0),
        RIGHT=tl.constexpr(right >= 0),
    )


def _in_float16(
    query: Float[Tensor, "t h d"], weights: Float[Tensor, "t h"]
) -> tuple[Float[Tensor, "t h d"], Float[Tensor, "t h"]]:
    """Return queries in float16, the type of dequantized values, and their weights, in one launch.

    Each head is divided by a power of two, and its weight is multiplied by it.
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
    """Return a view of the quantized values in pairs; their number is even, as scales follow them."""
    (n, p, _), size = index_cache.shape, index_cache.shape[2] - SCALE_BYTES
    in_bytes = index_cache.as_strided((n, p * size), (index_cache.stride(0), 1), index_cache.storage_offset())
    return in_bytes.view(torch.uint16)


def _scales(index_cache: Shaped[Tensor, "n p c"]) -> Float32[Tensor, "n p"]:
    """Return a view of the scales: those of a block follow all of its quantized values."""
    (n, p, _), size = index_cache.shape, index_cache.shape[2] - SCALE_BYTES
    first, block = index_cache.storage_offset() + p * size, index_cache.stride(0)
    in_bytes = index_cache.as_strided((n, p * SCALE_BYTES), (block, 1), first)
    return in_bytes.view(torch.float32)


# Triton's interpreter finds a function only if it is defined above its caller.


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
    PAD: tl.constexpr = next_power_of_2(SIZE)
    at_d = tl.arange(0, PAD).to(tl.int64)[None, :]
    in_key = is_written[:, None] & (at_d < SIZE)
    numbers = tl.load(key + (token * key_strides[0])[:, None] + at_d * key_strides[1], in_key, 0.0)
    if scales is None:
        at = block * cache_strides[0] + place * cache_strides[1]
        tl.store(index_cache + at[:, None] + at_d * cache_strides[2], numbers, in_key)
    else:
        numbers = numbers.to(tl.float32)
        largest = tl.maximum(tl.max(tl.abs(numbers), 1), SMALLEST)
        is_nan = tl.max((numbers != numbers).to(tl.int32), 1) > 0  # a maximum may drop NaN
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
    heads = tl.arange(0, next_power_of_2(NUM_HEADS))
    at_d = tl.arange(0, next_power_of_2(SIZE))[None, :]
    is_head = heads < NUM_HEADS
    in_query = is_head[:, None] & (at_d < SIZE)
    at = token * query_strides[0] + heads.to(tl.int64)[:, None] * query_strides[1]
    q = tl.load(query + at + at_d.to(tl.int64) * query_strides[2], in_query, 0.0).to(tl.float32)
    power = tl.minimum(power_of_two(tl.max(tl.abs(q), 1)), 1.7014118346046923e38)  # infinity stays infinity
    halved = tl.div_rn(q, tl.zeros(q.shape, tl.float32) + power[:, None]).to(tl.float16)
    tl.store(halves + (token * NUM_HEADS + heads[:, None]) * SIZE + at_d, halved, in_query)
    at = token * weight_strides[0] + heads.to(tl.int64) * weight_strides[1]
    w = tl.load(weights + at, is_head, 0.0).to(tl.float32)
    tl.store(of_halves + token * NUM_HEADS + heads, w * power, is_head)


class Tile(NamedTuple):
    """The queries of a program.

    Attributes:
        sequence: the sequence of the queries.
        first_query: the query row of its first query.
        first_row: the first query of the tile, counted in the sequence.
        last_row: one past the last query of the tile.
        context: keys before the first query of the sequence.
        seq_len: keys of the sequence.
    """

    sequence: Any
    first_query: Any
    first_row: Any
    last_row: Any
    context: Any
    seq_len: Any


@triton.jit
@no_type_check
def _interval(mask, tile, row):
    """Return the first key that a query sees, and the one past the last."""
    if mask.first_visible is None:
        position = tile.context + row
        first, end = visible_keys(position, position, tile.seq_len, mask.left, mask.right, mask.LEFT, mask.RIGHT)
    else:
        token = (tile.first_query + row).to(tl.int64)
        first = tl.load(mask.first_visible + token)
        end = tl.minimum(tl.load(mask.last_visible + token), tile.seq_len - 1) + 1
    return tl.maximum(first, 0), tl.minimum(end, tile.seq_len)


@triton.jit
@no_type_check
def _find_blocks(pool, sequence, first, end, KEYS: tl.constexpr):
    """Return the block of each key of a step, or a single block that holds them all."""
    row = pool.block_table + sequence.to(tl.int64) * pool.table_row_stride
    if pool.BLOCK_SIZE % KEYS == 0:
        column = tl.full([], 0, tl.int64) + first // pool.BLOCK_SIZE
        blocks = tl.load(row + column * pool.table_stride, first < end, 0)
    else:
        j = first + tl.arange(0, KEYS)
        blocks = tl.load(row + (j // pool.BLOCK_SIZE).to(tl.int64) * pool.table_stride, j < end, 0)
    return blocks.to(tl.uint32).to(tl.int64)


@triton.jit
@no_type_check
def _read_scales(pool, blocks, first, seen, KEYS: tl.constexpr):
    """Read the scales of the keys of a step that are seen; 1 where the cache is unquantized."""
    scale = tl.full([KEYS], 1.0, tl.float32)
    if pool.scales is not None:
        places = (first + tl.arange(0, KEYS)) % pool.BLOCK_SIZE
        scale = tl.load(pool.scales + blocks * (pool.strides[0] // 4) + places, seen, 0.0)
    return scale


@triton.jit
@no_type_check
def _read_keys(pool, blocks, first, seen, KEYS: tl.constexpr):
    """Read the keys of a step that are seen, [keys, d] or [keys, pairs]."""
    PER_LOAD: tl.constexpr = 2 if pool.index_cache.dtype.element_ty == tl.uint16 else 1
    FORMAT: tl.constexpr = PER_LOAD == 2 or pool.index_cache.dtype.element_ty == tl.uint8
    PAD: tl.constexpr = next_power_of_2(pool.SIZE) if pool.SIZE > 16 * PER_LOAD else 16 * PER_LOAD
    LOADS: tl.constexpr = pool.SIZE // PER_LOAD
    at_d = tl.arange(0, PAD // PER_LOAD)[None, :]
    first_place, places = first * 0, (first + tl.arange(0, KEYS)) % pool.BLOCK_SIZE
    if pool.BLOCK_SIZE % KEYS == 0:  # the same in all steps: computed once
        first_place, places = tl.full([], first, tl.int32) % pool.BLOCK_SIZE, tl.arange(0, KEYS)
    of_blocks = blocks * (pool.strides[0] // PER_LOAD)
    if FORMAT:
        rows = pool.index_cache + (of_blocks + first_place * LOADS)
        at = places[:, None] * LOADS + at_d
    else:
        rows = pool.index_cache + (of_blocks + (blocks * 0 + first_place) * pool.strides[1])  # in 64 bits
        at = places.to(tl.int64)[:, None] * pool.strides[1] + at_d.to(tl.int64) * pool.strides[2]
    if pool.BLOCK_SIZE % KEYS:
        rows = rows[:, None]
    return tl.load(rows + at, seen[:, None] & (at_d < LOADS), 0)


@triton.jit
@no_type_check
def _read_query(queries, weights, weight_strides, pool, token, is_row):
    """Read the index heads of one query, [heads, d], and their weights."""
    LEAST: tl.constexpr = 32 if pool.index_cache.dtype.element_ty == tl.uint16 else 16  # fewest elements of a product
    PAD: tl.constexpr = next_power_of_2(pool.SIZE) if pool.SIZE > LEAST else LEAST
    HEADS: tl.constexpr = next_power_of_2(queries.HEADS) if queries.HEADS > 16 else 16
    at_d, heads = tl.arange(0, PAD)[None, :], tl.arange(0, HEADS)
    is_head = (heads < queries.HEADS) & is_row
    at = queries.query + token * queries.strides[0] + heads.to(tl.int64)[:, None] * queries.strides[1]
    q = tl.load(at + at_d.to(tl.int64) * queries.strides[2], is_head[:, None] & (at_d < pool.SIZE), 0)
    if q.dtype == tl.uint8:
        q = dequantize(q, "e4m3", pool.HAS_FP8_CVT)
    at = token * weight_strides[0] + heads.to(tl.int64) * weight_strides[1]
    return q, tl.load(weights + at, is_head, 0.0)


@triton.jit
@no_type_check
def _multiply(q, k, HAS_FP8_CVT: tl.constexpr):
    """Return the products of a step, with keys as rows: so a thread sums over heads by itself.

    Pairs of quantized values come out of shared memory in the layout that a product reads from registers. First and
    second elements are multiplied separately.
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


@triton.jit
@no_type_check
def _find_queries(queries, number, TILE):
    """Return the queries of a tile."""
    sequence, first_row = find_rows(
        queries.cu_seqlens_q, number, queries.num_seqs, queries.GROUP, TILE.QUERIES, TILE.ONE_TILE
    )
    first_query = tl.load(queries.cu_seqlens_q + sequence)
    query_len = tl.load(queries.cu_seqlens_q + sequence + 1) - first_query
    seq_len = tl.load(queries.seq_lens + sequence)
    last_row = tl.minimum(first_row + TILE.QUERIES, query_len)
    return Tile(sequence, first_query, first_row, last_row, seq_len - query_len, seq_len)


@triton.jit(do_not_specialize=[*CHANGING, "width", "steps"])
@no_type_check
def _score_index_kernel(
    queries,
    weights,
    weight_strides,
    pool,
    mask,
    result,  # [t, width]
    width,
    steps,
    TILE,
    OVERLAP: tl.constexpr,
):
    pdl_wait(OVERLAP)
    KEYS: tl.constexpr = TILE.KEYS
    runs = tl.cdiv(width, steps * KEYS)  # splits of the keys, one for each program of a tile
    number = tl.program_id(0) // runs
    tile = _find_queries(queries, number, TILE)
    begin = tl.program_id(0) % runs * steps * KEYS
    end = tl.minimum(begin + steps * KEYS, width)

    # Only steps with keys that some query of the tile sees are read.
    first_key, last_key = tile.seq_len, tile.seq_len * 0
    for row in range(tile.first_row, tile.last_row):
        first, last = _interval(mask, tile, row)
        first_key = tl.minimum(first_key, tl.where(first < last, first, tile.seq_len))
        last_key = tl.maximum(last_key, tl.where(first < last, last, 0))
    scored_from = tl.minimum(tl.maximum(first_key // KEYS * KEYS, begin), end)
    scored_to = tl.maximum(tl.minimum(tl.cdiv(last_key, KEYS) * KEYS, end), scored_from)
    for row in range(tile.first_row, tile.last_row):
        row_result = result + (tile.first_query + row).to(tl.int64) * width
        _hide(row_result, begin, scored_from, width, KEYS)
        _hide(row_result, scored_to, end, width, KEYS)

    # The table is read a step ahead, so that loads of keys do not wait for it; for one query, the scales are, too.
    next_blocks = _find_blocks(pool, tile.sequence, scored_from, last_key, KEYS)
    if TILE.ONE_ROW:
        j = scored_from + tl.arange(0, KEYS)
        seen = (j >= first_key) & (j < last_key)
        next_scale = _read_scales(pool, next_blocks, scored_from, seen, KEYS)
        token = tile.first_query.to(tl.int64)
        q, w = _read_query(queries, weights, weight_strides, pool, token, tile.last_row > 0)
        for first in range(scored_from, scored_to, KEYS):
            j = first + tl.arange(0, KEYS)
            seen = (j >= first_key) & (j < last_key)
            k = _read_keys(pool, next_blocks, first, seen, KEYS)
            scale, ahead = next_scale, first + KEYS
            next_blocks = _find_blocks(pool, tile.sequence, ahead, last_key, KEYS)
            next_seen = (j + KEYS >= first_key) & (j + KEYS < last_key)
            next_scale = _read_scales(pool, next_blocks, ahead, next_seen, KEYS)
            sums = _score(q, w, k, scale, pool.HAS_FP8_CVT)
            tl.store(result + token * width + j, tl.where(seen, sums, float("-inf")), j < width)
    else:
        for first in range(scored_from, scored_to, KEYS):
            j = first + tl.arange(0, KEYS)
            seen = j < 0
            for row in range(tile.first_row, tile.last_row):
                begins, ends = _interval(mask, tile, row)
                seen |= (j >= begins) & (j < ends)
            k = _read_keys(pool, next_blocks, first, seen, KEYS)
            scale = _read_scales(pool, next_blocks, first, seen, KEYS)
            next_blocks = _find_blocks(pool, tile.sequence, first + KEYS, last_key, KEYS)
            for row in range(tile.first_row, tile.last_row):
                token = (tile.first_query + row).to(tl.int64)
                q, w = _read_query(queries, weights, weight_strides, pool, token, row < tile.last_row)
                sums = _score(q, w, k, scale, pool.HAS_FP8_CVT)
                begins, ends = _interval(mask, tile, row)
                visible = (j >= begins) & (j < ends)
                tl.store(result + token * width + j, tl.where(visible, sums, float("-inf")), j < width)
    token = (tl.load(queries.cu_seqlens_q + queries.num_seqs) + number).to(tl.int64)  # rows of padding
    while token < queries.num_tokens:
        _hide(result + token * width, begin, end, width, KEYS)
        token += tl.num_programs(0) // runs
