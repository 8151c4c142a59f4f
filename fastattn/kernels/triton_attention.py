"""Attention over pages or rows in Triton: the keys split over programs, the parts merged by a second kernel.

One program takes a tile of query rows of one sequence, one key head, and a run of the keys that the tile can see:

                       keys  0        256       512       768  seq_len
    sequence 0, key head 0   | split 0 | split 1 | split 2 | s3 |
    query rows: tokens x the query heads that share the key head (one matrix product for all of them)

Every split gives the softmax over its own keys and its log-sum-exp; `_reduce_kernel` merges them. How many splits there
are is chosen on the host from the number of tiles and multiprocessors, how many keys each has is computed on the device
from the length of the sequence, so a captured graph stays right and balanced when its sequences grow.

Source: Dao et al. 2023, "Flash-Decoding"; Kwon et al. 2023, "PagedAttention"; the tiles of a ragged batch are found as
in vLLM's Triton attention.
"""

from functools import cache
from typing import NamedTuple, no_type_check

import torch
import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor

from fastattn.kernels import Options
from fastattn.kernels.machine import capability, num_multiprocessors
from refattn.batch import Batch

INTERPRETED = triton.knobs.runtime.interpret  # kernels run in Python, on CPU tensors

FEWEST_KEYS = 128  # that are worth a program of their own
MOST_KEYS = 8192  # of one program: a sequence that is much longer than the others should not run alone at the end
INVARIANT_SPLITS = 8  # under `batch_invariant`, for every sequence


class Tuning(NamedTuple):
    """What is chosen for a launch.

    Attributes:
        block_m: query rows of a tile, tokens times the query heads of a group.
        block_n: keys that a program looks at in one step.
        num_warps: warps of a program.
        num_stages: steps in flight, the ones being loaded included.
        splits: programs among which the keys that a tile sees are divided evenly.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    splits: int


def attend(
    query: Float[Tensor, "t h d"],
    key: Float[Tensor, "s hk d"] | Float[Tensor, "n p hk d"],
    value: Float[Tensor, "s hk dv"] | Float[Tensor, "n p hk dv"],
    batch: Batch,
    options: Options,
    *,
    chunk_size: int = 0,
) -> tuple[Float[Tensor, "t h dv"], Float[Tensor, "t h"]]:
    """Attend over pages if `key` has four dimensions, else over ragged rows.

    Args:
        query: query rows of all sequences.
        key: the pool of keys, or the key rows of all sequences; any strides.
        value: the pool of values, or the value rows.
        batch: the lengths and, for pages, the block table.
        options: what else is asked.
        chunk_size: show a query only the keys of its own chunk of this many tokens (local attention); 0 for all.

    Returns:
        The outputs, and their log-sum-exps in float32.

    Source: see the module.
    """
    num_tokens, num_heads, head_size = query.shape
    num_kv_heads, value_head_size = value.shape[-2:]
    group = num_heads // num_kv_heads
    out = query.new_empty(num_tokens, num_heads, value_head_size)
    lse = query.new_empty(num_tokens, num_heads, dtype=torch.float32)
    if num_tokens == 0 or batch.num_seqs == 0:
        return out.zero_(), lse.fill_(-torch.inf)

    block_table = batch.block_table if key.ndim == 4 else None
    tuning = tune(query, key, value, batch, options, chunk_size=chunk_size)
    tiles = batch.num_seqs
    one_tile = batch.max_query_len * group <= tuning.block_m
    if not one_tile:
        tiles += num_tokens * group // tuning.block_m
    parts, part_lses = out, lse
    if tuning.splits > 1:
        parts = query.new_empty(tuning.splits, *out.shape, dtype=torch.float32)
        part_lses = query.new_empty(tuning.splits, *lse.shape, dtype=torch.float32)
    overlap = _can_overlap(query.device) and tuning.splits > 1
    left, right = options.window
    scale = head_size**-0.5 if options.softmax_scale is None else options.softmax_scale

    _attend_kernel[tiles * num_kv_heads, tuning.splits](
        query,
        key,
        value,
        parts,
        part_lses,
        block_table,
        batch.cu_seqlens_q,
        batch.cu_seqlens_k if block_table is None else None,
        batch.seq_lens,
        options.alibi_slopes,
        options.sinks,
        query.stride(),
        key.stride(),
        value.stride(),
        0 if block_table is None else block_table.stride(0),
        1 if block_table is None else block_table.stride(1),
        num_tokens,
        batch.num_seqs,
        scale,
        options.softcap,
        left,
        right,
        chunk_size,
        NUM_HEADS=num_heads,
        GROUP=group,
        HEAD_SIZE=head_size,
        VALUE_HEAD_SIZE=value_head_size,
        BLOCK_SIZE=0 if block_table is None else key.shape[1],
        BLOCK_M=tuning.block_m,
        BLOCK_N=tuning.block_n,
        SPLIT=tuning.splits > 1,
        ONE_TILE=one_tile,
        SOFTCAP=options.softcap > 0,
        LEFT=left >= 0,
        RIGHT=right >= 0,
        CHUNK=chunk_size > 0,
        OVERLAP=overlap,
        num_warps=tuning.num_warps,
        num_stages=tuning.num_stages,
    )
    if tuning.splits > 1:
        _reduce_kernel[num_tokens, num_heads](
            parts,
            part_lses,
            out,
            lse,
            batch.cu_seqlens_q,
            options.sinks,
            num_tokens,
            batch.num_seqs,
            tuning.splits,
            NUM_HEADS=num_heads,
            VALUE_HEAD_SIZE=value_head_size,
            BLOCK_SPLITS=64 if value_head_size <= 128 else 32,
            OVERLAP=overlap,
            num_warps=4 if value_head_size > 64 else 2,
            **({"launch_pdl": True} if overlap else {}),
        )
    return out, lse


def tune(
    query: Float[Tensor, "t h d"],
    key: Tensor,
    value: Tensor,
    batch: Batch,
    options: Options,
    *,
    chunk_size: int = 0,
) -> Tuning:
    """Choose the shape of a launch from sizes that the host knows.

    Under `batch_invariant` nothing depends on the other sequences of the batch: not the tile, and not where splits end.
    """
    num_kv_heads = key.shape[-2]
    group = query.shape[1] // num_kv_heads
    row_bytes = max(_pad(query.shape[2]), _pad(value.shape[-1])) * query.element_size()
    if options.batch_invariant:
        return Tuning(64, _fit(64, row_bytes), 4, 3, INVARIANT_SPLITS)

    rows = batch.max_query_len * group
    block_m = 16 if rows <= 16 else 64 if rows <= 64 or row_bytes > 256 else 128
    tiles = batch.num_seqs if rows <= block_m else batch.num_seqs + query.shape[0] * group // block_m
    return _tune(
        block_m,
        row_bytes,
        tiles * num_kv_heads,
        _most_visible_keys(batch, options, chunk_size),
        _num_multiprocessors(query.device),
    )


@cache
def _tune(block_m: int, row_bytes: int, programs: int, visible: int, multiprocessors: int) -> Tuning:
    """Choose the splits that keep all multiprocessors busy to the end, and how a program works then.

    As long as all programs run at once, the time is that of the multiprocessor with the most keys to read; it takes
    about 100 KB on their way to it to keep the memory busy. More programs than fit come and go, at a small loss.

    Source: measured on an NVIDIA H200 with bfloat16 and head size 128; a wider row gets shorter steps.
    """
    at_once = {16: 6, 64: 2, 128: 1}[block_m]  # programs that a multiprocessor holds

    def time(splits: int) -> float:
        on_one = _divide_up(programs * splits, multiprocessors)
        if on_one > at_once:
            return 1.05 * programs / multiprocessors
        return on_one / splits * (1.1 if on_one == 1 and block_m == 16 else 1.0)

    fewest = max(1, _divide_up(visible, MOST_KEYS) if block_m == 16 else 1)
    splits = min(range(fewest, max(fewest, visible // FEWEST_KEYS) + 1), key=time)
    if block_m == 128:
        return Tuning(block_m, _fit(64, row_bytes), 8, 3, splits)
    if block_m == 64 or _divide_up(programs * splits, multiprocessors) <= 3:
        return Tuning(block_m, _fit(64, row_bytes), 4, 3, splits)
    if _divide_up(programs * splits, multiprocessors) <= at_once:
        return Tuning(block_m, _fit(32, row_bytes), 1, 3, splits)
    return Tuning(block_m, _fit(32, row_bytes), 2, 4, splits)


def _fit(block_n: int, row_bytes: int) -> int:
    """Give the keys of a step that are as many bytes as `block_n` keys of 256 bytes."""
    return max(16, min(128, block_n * 256 // row_bytes))


# Triton's interpreter finds a function only if it stands above the one that calls it.


@triton.jit
@no_type_check
def _first_tile(cu_seqlens_q, sequence, GROUP: tl.constexpr, BLOCK_M: tl.constexpr):
    """Give a tile to begin a sequence with: those before it have room for one tile that is not full each."""
    return tl.load(cu_seqlens_q + sequence) * GROUP // BLOCK_M + sequence


@triton.jit
@no_type_check
def _find_sequence(cu_seqlens_q, tile, num_seqs, GROUP: tl.constexpr, BLOCK_M: tl.constexpr):
    """Find the last sequence whose first tile is not behind `tile`, by halving."""
    low = 0
    high = num_seqs - 1
    while low < high:
        middle = (low + high + 1) // 2
        if _first_tile(cu_seqlens_q, middle, GROUP, BLOCK_M) <= tile:
            low = middle
        else:
            high = middle - 1
    return low


@triton.jit
@no_type_check
def _fill_padding_rows(
    out,
    lse,
    cu_seqlens_q,
    tile,
    kv_head,
    num_tokens,
    num_seqs,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    VALUE_HEAD_SIZE: tl.constexpr,
):
    """Answer 0 and -inf in the rows behind the last sequence, which belong to no tile: each program takes a few."""
    GROUP_PAD: tl.constexpr = triton.next_power_of_2(GROUP)
    VALUE_PAD: tl.constexpr = triton.next_power_of_2(VALUE_HEAD_SIZE)
    in_group = tl.arange(0, GROUP_PAD)
    at_dv = tl.arange(0, VALUE_PAD)
    tiles = tl.num_programs(0) // NUM_KV_HEADS
    token = (tl.load(cu_seqlens_q + num_seqs) + tile).to(tl.int64)
    while token < num_tokens:
        places = (token * NUM_KV_HEADS + kv_head) * GROUP + in_group
        nothing = tl.zeros([GROUP_PAD, VALUE_PAD], out.dtype.element_ty)
        tl.store(
            out + places[:, None] * VALUE_HEAD_SIZE + at_dv[None, :],
            nothing,
            mask=(in_group < GROUP)[:, None] & (at_dv < VALUE_HEAD_SIZE)[None, :],
        )
        tl.store(lse + places, tl.full([GROUP_PAD], float("-inf"), tl.float32), mask=in_group < GROUP)
        token += tiles


@triton.jit
@no_type_check
def _tanh(x):
    size = tl.abs(x)
    square = x * x
    shrunk = tl.exp(-2.0 * size)
    large = (1.0 - shrunk) / (1.0 + shrunk)
    small = size * (1.0 - square * (1.0 / 3.0 - square * (2.0 / 15.0)))  # where 1 - shrunk would lose its digits
    return tl.where(x < 0.0, -1.0, 1.0) * tl.where(size < 0.05, small, large)


# What changes from batch to batch must not lead to another compilation.
@triton.jit(
    do_not_specialize=[
        *("block_table", "cu_seqlens_q", "cu_seqlens_k", "seq_lens", "table_row_stride"),
        *("num_tokens", "num_seqs", "left", "right", "chunk_size"),
    ]
)
@no_type_check
def _attend_kernel(
    query,
    key,
    value,
    out,  # [t, h, dv] in the type of the query, or [splits, t, h, dv] in float32
    lse,  # [t, h] or [splits, t, h]
    block_table,
    cu_seqlens_q,
    cu_seqlens_k,
    seq_lens,
    alibi_slopes,
    sinks,
    query_strides,
    key_strides,
    value_strides,
    table_row_stride,
    table_stride,
    num_tokens,
    num_seqs,
    scale,
    softcap,
    left,
    right,
    chunk_size,
    NUM_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    VALUE_HEAD_SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SPLIT: tl.constexpr,
    ONE_TILE: tl.constexpr,
    SOFTCAP: tl.constexpr,
    LEFT: tl.constexpr,
    RIGHT: tl.constexpr,
    CHUNK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()  # the reduction may be put in place now; it waits for our results itself
    LOG2E: tl.constexpr = 1.4426950408889634
    NUM_KV_HEADS: tl.constexpr = NUM_HEADS // GROUP
    kv_head = tl.program_id(0) % NUM_KV_HEADS
    tile = tl.program_id(0) // NUM_KV_HEADS
    split = tl.program_id(1)

    # Which sequence, and which of its rows: row `r` is token `r // GROUP`, head `r % GROUP` of the group.
    sequence = tile
    first_row = 0
    if not ONE_TILE:
        sequence = _find_sequence(cu_seqlens_q, tile, num_seqs, GROUP, BLOCK_M)
        first_row = (tile - _first_tile(cu_seqlens_q, sequence, GROUP, BLOCK_M)) * BLOCK_M
    first_query = tl.load(cu_seqlens_q + sequence)
    query_len = tl.load(cu_seqlens_q + sequence + 1) - first_query
    seq_len = tl.load(seq_lens + sequence)
    if first_row >= query_len * GROUP:
        if not SPLIT:
            _fill_padding_rows(
                out, lse, cu_seqlens_q, tile, kv_head, num_tokens, num_seqs, NUM_KV_HEADS, GROUP, VALUE_HEAD_SIZE
            )
        return
    context = seq_len - query_len  # negative where a sequence has more queries than keys
    rows = first_row + tl.arange(0, BLOCK_M)
    is_row = rows < query_len * GROUP
    tokens = (first_query + rows // GROUP).to(tl.int64)
    heads = kv_head * GROUP + rows % GROUP
    positions = context + rows // GROUP

    # Which keys: those that some row of the tile sees, and of them the run of this split.
    first_key, last_key = 0, seq_len
    first_position = context + first_row // GROUP
    last_position = context + tl.minimum((first_row + BLOCK_M - 1) // GROUP, query_len - 1)
    if RIGHT:
        last_key = tl.minimum(last_key, last_position + right + 1)
    if LEFT:
        first_key = tl.maximum(first_key, first_position - left)
    if CHUNK:
        first_key = tl.maximum(first_key, tl.maximum(first_position, 0) // chunk_size * chunk_size)
    first_key = first_key // BLOCK_N * BLOCK_N
    if SPLIT:
        keys = tl.cdiv(tl.cdiv(last_key - first_key, tl.num_programs(1)), BLOCK_N) * BLOCK_N
        first_key += split * keys
        last_key = tl.minimum(last_key, first_key + keys)

    if BLOCK_SIZE > 0:  # the table is read a step ahead, so that loads of keys do not wait for it
        table = block_table + sequence.to(tl.int64) * table_row_stride
        j = first_key + tl.arange(0, BLOCK_N)
        next_blocks = tl.load(table + j // BLOCK_SIZE * table_stride, mask=j < last_key, other=0)

    HEAD_PAD: tl.constexpr = triton.next_power_of_2(HEAD_SIZE)
    VALUE_PAD: tl.constexpr = triton.next_power_of_2(VALUE_HEAD_SIZE)
    at_d = tl.arange(0, HEAD_PAD)
    at_dv = tl.arange(0, VALUE_PAD)
    q = tl.load(
        query + (tokens * query_strides[0] + heads * query_strides[1])[:, None] + (at_d * query_strides[2])[None, :],
        mask=is_row[:, None] & (at_d < HEAD_SIZE)[None, :],
        other=0.0,
    )
    if alibi_slopes is not None:
        slopes = tl.load(alibi_slopes + heads, mask=is_row, other=0.0).to(tl.float32) * LOG2E
    if cu_seqlens_k is not None:
        first_key_row = tl.load(cu_seqlens_k + sequence).to(tl.int64)

    # The softmax over the run, one step of keys at a time, in base 2.
    highest = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    weighted = tl.zeros([BLOCK_M, VALUE_PAD], tl.float32)
    for start in range(first_key, last_key, BLOCK_N):
        j = start + tl.arange(0, BLOCK_N)
        is_key = j < last_key  # nothing behind it is read: it may be NaN, or no block at all
        if BLOCK_SIZE > 0:
            blocks = next_blocks.to(tl.int64)
            next_blocks = tl.load(
                table + (j + BLOCK_N) // BLOCK_SIZE * table_stride, mask=j + BLOCK_N < last_key, other=0
            )
            key_rows = blocks * key_strides[0] + j % BLOCK_SIZE * key_strides[1] + kv_head * key_strides[2]
            value_rows = blocks * value_strides[0] + j % BLOCK_SIZE * value_strides[1] + kv_head * value_strides[2]
        else:
            key_rows = (first_key_row + j) * key_strides[0] + kv_head * key_strides[1]
            value_rows = (first_key_row + j) * value_strides[0] + kv_head * value_strides[1]

        k = tl.load(
            key + key_rows[None, :] + (at_d * key_strides[-1])[:, None],
            mask=is_key[None, :] & (at_d < HEAD_SIZE)[:, None],
            other=0.0,
        )  # [d, keys]
        scores = tl.dot(q, k, input_precision="ieee")
        if SOFTCAP:
            scores = _tanh(scores * (scale / softcap)) * (softcap * LOG2E)
        else:
            scores *= scale * LOG2E
        distance = positions[:, None] - j[None, :]
        if alibi_slopes is not None:
            scores -= slopes[:, None] * distance
        visible = is_key[None, :]
        if RIGHT:
            visible = visible & (distance >= -right)
        if LEFT:
            visible = visible & (distance <= left)
        if CHUNK:
            visible = visible & (positions[:, None] // chunk_size == j[None, :] // chunk_size)
        scores = tl.where(visible, scores, float("-inf"))

        new_highest = tl.maximum(highest, tl.max(scores, 1))
        base = tl.where(new_highest == float("-inf"), 0.0, new_highest)  # -inf - -inf would be NaN
        weights = tl.exp2(scores - base[:, None])
        shrink = tl.exp2(highest - base)
        total = total * shrink + tl.sum(weights, 1)
        v = tl.load(
            value + value_rows[:, None] + (at_dv * value_strides[-1])[None, :],
            mask=is_key[:, None] & (at_dv < VALUE_HEAD_SIZE)[None, :],
            other=0.0,
        )  # [keys, dv]
        weighted = tl.dot(weights.to(v.dtype), v, weighted * shrink[:, None], input_precision="ieee")
        highest = new_highest

    if sinks is not None and not SPLIT:
        sink = tl.load(sinks + heads, mask=is_row, other=0.0).to(tl.float32) * LOG2E
        new_highest = tl.maximum(highest, sink)
        base = tl.where(new_highest == float("-inf"), 0.0, new_highest)
        weighted *= tl.exp2(highest - base)[:, None]
        total = total * tl.exp2(highest - base) + tl.exp2(sink - base)
        highest = new_highest
    total = tl.where(total == 0.0, 1.0, total)  # a row that sees nothing: 0, and -inf by `highest`
    answer = weighted / total[:, None]
    places = split.to(tl.int64) * num_tokens * NUM_HEADS + tokens * NUM_HEADS + heads
    tl.store(
        out + places[:, None] * VALUE_HEAD_SIZE + at_dv[None, :],
        answer.to(out.dtype.element_ty),
        mask=is_row[:, None] & (at_dv < VALUE_HEAD_SIZE)[None, :],
    )
    tl.store(lse + places, (highest + tl.log2(total)) / LOG2E, mask=is_row)
    if not SPLIT:
        _fill_padding_rows(
            out, lse, cu_seqlens_q, tile, kv_head, num_tokens, num_seqs, NUM_KV_HEADS, GROUP, VALUE_HEAD_SIZE
        )


@triton.jit(do_not_specialize=["cu_seqlens_q", "num_tokens", "num_seqs", "splits"])
@no_type_check
def _reduce_kernel(
    parts,  # [splits, t, h, dv]
    part_lses,  # [splits, t, h]
    out,
    lse,
    cu_seqlens_q,
    sinks,
    num_tokens,
    num_seqs,
    splits,
    NUM_HEADS: tl.constexpr,
    VALUE_HEAD_SIZE: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    num_queries = tl.load(cu_seqlens_q + num_seqs)
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
    if token >= num_queries:
        splits = 0  # a padding row: no part of it was written
    VALUE_PAD: tl.constexpr = triton.next_power_of_2(VALUE_HEAD_SIZE)
    at_dv = tl.arange(0, VALUE_PAD)
    place = token * NUM_HEADS + head
    stride = tl.cast(num_tokens, tl.int64) * NUM_HEADS

    # A fixed number of parts at a time, in order, so that parts without a key do not change a bit of the sum.
    highest = float("-inf")
    total = 0.0
    weighted = tl.zeros([VALUE_PAD], tl.float32)
    for first in range(0, splits, BLOCK_SPLITS):
        at = first + tl.arange(0, BLOCK_SPLITS)
        logs = tl.load(part_lses + at * stride + place, mask=at < splits, other=float("-inf"))
        values = tl.load(
            parts + (at * stride + place)[:, None] * VALUE_HEAD_SIZE + at_dv[None, :],
            mask=(at < splits)[:, None] & (at_dv < VALUE_HEAD_SIZE)[None, :],
            other=0.0,
        )
        new_highest = tl.maximum(highest, tl.max(logs, 0))
        base = tl.where(new_highest == float("-inf"), 0.0, new_highest)
        weights = tl.exp(logs - base)
        shrink = tl.exp(highest - base)
        total = total * shrink + tl.sum(weights, 0)
        weighted = weighted * shrink + tl.sum(weights[:, None] * values, 0)
        highest = new_highest

    if sinks is not None:
        sink = tl.where(token < num_queries, tl.load(sinks + head).to(tl.float32), float("-inf"))
        new_highest = tl.maximum(highest, sink)
        base = tl.where(new_highest == float("-inf"), 0.0, new_highest)
        shrink = tl.exp(highest - base)
        total = total * shrink + tl.exp(sink - base)
        weighted = weighted * shrink
        highest = new_highest
    total = tl.where(total == 0.0, 1.0, total)
    answer = weighted / total
    tl.store(out + place * VALUE_HEAD_SIZE + at_dv, answer.to(out.dtype.element_ty), mask=at_dv < VALUE_HEAD_SIZE)
    tl.store(lse + place, highest + tl.log(total))


def _most_visible_keys(batch: Batch, options: Options, chunk_size: int) -> int:
    """Bound the keys that the queries of one sequence see, together."""
    left, right = options.window
    visible = batch.max_seq_len
    if left >= 0 and right >= 0:
        visible = min(visible, left + batch.max_query_len + right)
    if chunk_size:
        visible = min(visible, chunk_size + batch.max_query_len - 1)
    return visible


def _pad(size: int) -> int:
    """Give the next power of two; Triton's own function is slow outside a kernel."""
    return 1 << (size - 1).bit_length()


def _divide_up(a: int, b: int) -> int:
    return -(-a // b)


def _num_multiprocessors(device: torch.device) -> int:
    return 4 if INTERPRETED else num_multiprocessors(device)


def _can_overlap(device: torch.device) -> bool:
    """Say whether a kernel can be put in place while the one before it ends (programmatic dependent launch)."""
    return not INTERPRETED and capability(device) >= (9, 0)
