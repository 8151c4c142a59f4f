"""How partial outputs combine, in a kernel: the online softmax, shares of the keys, and the merges of their outputs.

Weights are powers of two: a score times log2(e) is its exponent. A softmax under way is the highest score of each row,
the sum of the weights relative to it, and the weighted sum of the values.

The share of the keys that a program has is a NamedTuple that carries its own functions:

    Whole    all keys, and the output
    Part     a split of the keys, and a partial output, which `reduce_splits` merges
    After    the keys that another kernel has left out; its output is merged into the softmax
    Repair   all keys, but only where another kernel has written NaN

Each has the functions

    before(split)                                             before anything is read or written
    share(split, queries, mask, out, tile, run, TILE, DV)     the keys of this program, and whether it is done
    take(split, softmax, queries, out, tile, sight, DV)       the softmax, merged with the output of another kernel
    after(split, queries, out, tile, DV)                      after everything

The splits of one call are contiguous, and `reduce_splits` merges them. The partial outputs that `fastattn.merge` takes
may lie anywhere in memory, so each is an argument of its own, and each number of them is compiled anew. Up to
`PARTS_AT_ONCE` take one launch. More are merged from left to right, and the result so far, in float32, is the first
part of the next launch:

    parts       0 1 2 3 4 5 6 7 | 8 9 10 11 12 13 14 | 15 16
    launches    ^ first           ^ with its result     ^ with that of the second

Source: Milakov and Gimelshein 2018, "Online normalizer calculation for softmax"; Ye et al. 2025, "FlashInfer";
    Dao et al. 2023, "Flash-Decoding"; programmatic dependent launches: CUDA C++ Programming Guide.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, no_type_check

import torch
import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor

from fastattn.kernels.triton.constants import next_power_of_2
from fastattn.kernels.triton.masks import Run, keys_before, visible_keys

SEQS_AT_ONCE = tl.constexpr(128)  # sequences that are counted at a time
LARGEST_TILE = tl.constexpr(512)  # query rows plus keys of a tile, at most, of a kernel whose output is repaired
BLOCK_ROWS = 16
PARTS_AT_ONCE = 8  # per launch: 8 compile in 0.9 s on the host of an NVIDIA H200, 128 in 91 s


def merge(
    outs: Sequence[Float[Tensor, "t h dv"]], lses: Sequence[Float[Tensor, "t h"]]
) -> tuple[Float[Tensor, "t h dv"], Float[Tensor, "t h"]]:
    """Merge partial outputs of the same queries over disjoint keys; see `fastattn.merge.merge`.

    Args:
        outs: the partial outputs, of one shape; any strides.
        lses: their log-sum-exps, natural log, float32; an output whose LSE is `-inf` is not read.

    Returns:
        The output in the type of the first part, and its log-sum-exp. Where no part has visible keys: 0 and `-inf`.
    """
    dtype = outs[0].dtype
    while len(outs) > PARTS_AT_ONCE:
        out, lse = _merge(outs[:PARTS_AT_ONCE], lses[:PARTS_AT_ONCE], torch.float32)
        outs, lses = [out, *outs[PARTS_AT_ONCE:]], [lse, *lses[PARTS_AT_ONCE:]]
    return _merge(outs, lses, dtype)


def _merge(outs: Sequence[Tensor], lses: Sequence[Tensor], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Merge a few partial outputs in one launch, into an output of some type."""
    num_tokens, num_heads, value_head_size = outs[0].shape
    out = torch.empty(outs[0].shape, dtype=dtype, device=outs[0].device)
    lse = torch.empty(lses[0].shape, dtype=lses[0].dtype, device=lses[0].device)
    rows = num_tokens * num_heads
    if rows:
        _merge_kernel[(-(-rows // BLOCK_ROWS),)](
            tuple(outs),
            tuple(lses),
            out,
            lse,
            tuple(part.stride() for part in outs),
            tuple(part.stride() for part in lses),
            rows,
            NUM_PARTS=len(outs),
            NUM_HEADS=num_heads,
            VALUE_HEAD_SIZE=value_head_size,
            BLOCK_ROWS=BLOCK_ROWS,
        )
    return out, lse


# Triton's interpreter finds a function only if it is defined above its caller.


# --- the online softmax ---


class Softmax(NamedTuple):
    """An online softmax: the maximum of each row, the sum of its weights, and the weighted sum of the values."""

    row_max: Any
    row_sum: Any
    acc: Any


@triton.jit
@no_type_check
def update_softmax(scores, row_max, row_sum, factor, IN_BASE_2: tl.constexpr, KEYS_AXIS: tl.constexpr = 1):
    """Update the online softmax by a step of scores; return its weights, and the factor that rescales earlier sums.

    `factor`, above 0, is still missing in the scores; with `IN_BASE_2` none is. Keys lie along the axis `KEYS_AXIS`.
    """
    unit = 1.0 if IN_BASE_2 else factor * 1.4426950408889634
    new_row_max = tl.maximum(row_max, tl.max(scores, KEYS_AXIS) * unit)
    base = tl.where(new_row_max == float("-inf"), 0.0, new_row_max)  # -inf - -inf would be NaN
    weights = tl.exp2(scores * unit - tl.expand_dims(base, KEYS_AXIS))
    rescale = tl.exp2(row_max - base)
    return weights, rescale, new_row_max, row_sum * rescale + tl.sum(weights, KEYS_AXIS)


@triton.jit
@no_type_check
def merge_parts(row_max, row_sum, acc, logs, values):
    """Merge partial outputs, `logs [rows, parts]` and `values [rows, parts, dv]`, into a softmax."""
    LOG2E: tl.constexpr = 1.4426950408889634
    new_row_max = tl.maximum(row_max, tl.max(logs, 1) * LOG2E)
    base = tl.where(new_row_max == float("-inf"), 0.0, new_row_max)
    weights = tl.exp2(logs * LOG2E - base[:, None])
    rescale = tl.exp2(row_max - base)
    row_sum = row_sum * rescale + tl.sum(weights, 1)
    acc = acc * rescale[:, None] + tl.sum(weights[:, :, None] * values, 1)
    return new_row_max, row_sum, acc


@triton.jit
@no_type_check
def normalize(row_max, row_sum, acc, sink):
    """Return the outputs and the log-sum-exps of a softmax, the sinks included."""
    LOG2E: tl.constexpr = 1.4426950408889634
    if sink is not None:
        new_row_max = tl.maximum(row_max, sink * LOG2E)
        base = tl.where(new_row_max == float("-inf"), 0.0, new_row_max)
        rescale = tl.exp2((row_max - base) * 0.5)  # applied twice: a GPU flushes a factor below 1e-38 to 0
        acc = acc * rescale[:, None] * rescale[:, None]
        row_sum = row_sum * rescale * rescale + tl.exp2(sink * LOG2E - base)
        row_max = new_row_max
    row_sum = tl.where(row_sum == 0.0, 1.0, row_sum)  # a row that sees nothing: 0, and -inf by `row_max`
    return acc / row_sum[:, None], (row_max + tl.log2(row_sum)) / LOG2E


@triton.jit
@no_type_check
def store_rows(values, logs, places, is_row, out, lse, VALUE_HEAD_SIZE: tl.constexpr):
    """Store outputs in rows of `out [.., dv]` and, unless it is None, log-sum-exps in `lse [..]`."""
    at_dv = tl.arange(0, values.shape[1])
    tl.store(
        out + places[:, None] * VALUE_HEAD_SIZE + at_dv[None, :],
        values.to(out.dtype.element_ty),
        mask=is_row[:, None] & (at_dv < VALUE_HEAD_SIZE)[None, :],
    )
    if lse is not None:
        tl.store(lse + places, logs, mask=is_row)


# --- what share of the keys a program has ---


class Out(NamedTuple):
    """Where outputs go.

    Attributes:
        out: [t, h, dv] in the type of the query, or [splits, t, h, dv] in float32.
        lse: [t, h] or [splits, t, h]; None to repair `out`.
    """

    out: Any
    lse: Any


@triton.jit
@no_type_check
def places_of(queries, tile):
    """Return the offsets of the rows of a tile in `Out.lse`."""
    split = tl.program_id(1).to(tl.int64)
    return split * queries.num_tokens * queries.HEADS + tile.tokens * queries.HEADS + tile.heads


@triton.jit
@no_type_check
def nothing_before(split):
    """Do nothing."""


@triton.jit
@no_type_check
def take_nothing(split, softmax, queries, out, tile, sight, DV: tl.constexpr):
    """Return the softmax as it is."""
    return softmax


class Whole(NamedTuple):
    """All keys of a tile."""

    before: Any
    share: Any
    take: Any
    after: Any
    SINKS: Any  # whether sinks are added here


@triton.jit
@no_type_check
def share_all(split, queries, mask, out, tile, run, TILE, DV: tl.constexpr):
    """Take all keys."""
    return run, False


@triton.jit
@no_type_check
def fill_padding_rows(split, queries, out, tile, DV: tl.constexpr):
    """Write 0 and -inf into the rows past the last sequence, which belong to no tile: each program takes a few."""
    GROUP_PAD: tl.constexpr = next_power_of_2(queries.GROUP)
    DV_PAD: tl.constexpr = next_power_of_2(DV)
    KV_HEADS: tl.constexpr = queries.HEADS // queries.GROUP
    in_group = tl.arange(0, GROUP_PAD)
    is_head = in_group < queries.GROUP
    at_dv = tl.arange(0, DV_PAD)
    tiles = tl.num_programs(0) // KV_HEADS
    token = (tl.load(queries.cu_seqlens_q + queries.num_seqs) + tile.number).to(tl.int64)
    while token < queries.num_tokens:
        places = (token * KV_HEADS + tile.kv_head) * queries.GROUP + in_group
        tl.store(
            out.out + places[:, None] * DV + at_dv[None, :],
            tl.zeros([GROUP_PAD, DV_PAD], out.out.dtype.element_ty),
            mask=is_head[:, None] & (at_dv < DV)[None, :],
        )
        tl.store(out.lse + places, tl.full([GROUP_PAD], float("-inf"), tl.float32), mask=is_head)
        token += tiles


class Part(NamedTuple):
    """A split of the keys of a tile.

    Attributes:
        splits: splits of a sequence of average length.
        RUN: fixed size of a split in keys, under `batch_invariant`; 0 to divide the keys evenly.
        BALANCE: whether longer sequences get more splits, shorter ones fewer.
        OVERLAP: whether the launch after this one may begin early.
        AFTER_LEVEL: whether an earlier level may still run, which the reduction has to wait for, too.
    """

    before: Any
    share: Any
    take: Any
    after: Any
    SINKS: Any
    splits: Any
    RUN: Any
    BALANCE: Any
    OVERLAP: Any
    AFTER_LEVEL: Any


@triton.jit
@no_type_check
def let_next_begin(split):
    """Allow an early launch of the reduction, which waits for the results by itself."""
    if split.OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
@no_type_check
def _count_steps(queries, mask, TILE):
    """Count the steps of keys that the queries of all sequences see, one tile per sequence."""
    LEFT: tl.constexpr = mask.LEFT and queries.positions is None  # at other positions all keys are counted
    RIGHT: tl.constexpr = mask.RIGHT and queries.positions is None
    total = 0
    for first in range(0, queries.num_seqs, SEQS_AT_ONCE):
        sequence = first + tl.arange(0, SEQS_AT_ONCE)
        is_sequence = sequence < queries.num_seqs
        begins = tl.load(queries.cu_seqlens_q + sequence, is_sequence, 0)
        query_len = tl.load(queries.cu_seqlens_q + sequence + 1, is_sequence, 0) - begins
        seq_len = tl.load(queries.seq_lens + sequence, is_sequence, 0)
        seen, end = visible_keys(seq_len - query_len, seq_len - 1, seq_len, mask.left, mask.right, LEFT, RIGHT)
        begin = seen // TILE.KEYS * TILE.KEYS
        steps = tl.where((query_len > 0) & (end > begin), tl.cdiv(end - begin, TILE.KEYS), 0)
        total += tl.sum(steps, 0)
    return total


@triton.jit
@no_type_check
def share_run(split, queries, mask, out, tile, run, TILE, DV: tl.constexpr):
    """Take one split; one without keys stores a log-sum-exp of `-inf`."""
    number = tl.program_id(1)
    if split.RUN > 0:
        before = keys_before(queries, tile, TILE)  # runs are placed as steps are
        first = (run.begin + before) // split.RUN * split.RUN - before + number * split.RUN
        begin = tl.maximum(run.begin, first)
        if not TILE.BY_POSITION:
            begin = tl.multiple_of(begin, TILE.KEYS)
        end = tl.minimum(run.end, first + split.RUN)
    else:
        steps = tl.cdiv(tl.maximum(run.end - run.begin, 0), TILE.KEYS)
        splits = split.splits
        if split.BALANCE:
            all_steps = tl.maximum(_count_steps(queries, mask, TILE), 1)
            share = steps.to(tl.float32) * queries.num_seqs / all_steps.to(tl.float32)  # 1 is the average
            splits = tl.minimum(tl.maximum((share * splits + 0.9).to(tl.int32), 1), tl.num_programs(1))
        keys = tl.cdiv(steps, splits) * TILE.KEYS
        begin = run.begin + number * keys
        end = tl.minimum(run.end, begin + keys)
    if begin >= end:
        tl.store(out.lse + places_of(queries, tile), tl.full([TILE.ROWS], float("-inf"), tl.float32), mask=tile.is_row)
    return Run(run.first, begin, end), begin >= end


@triton.jit
@no_type_check
def wait_for_level_before(split, queries, out, tile, DV: tl.constexpr):
    """End no earlier than the launch before this one: the reduction waits for this one alone.

    It is enough that one program waits, while the others make room: the last one, which is scheduled last.
    """
    is_last = (tl.program_id(0) == tl.num_programs(0) - 1) & (tl.program_id(1) == tl.num_programs(1) - 1)
    if split.AFTER_LEVEL and is_last:
        tl.extra.cuda.gdc_wait()


class After(NamedTuple):
    """The keys of a tile that another kernel has left out: nodes of a tree, or the end of an interval.

    Attributes:
        prefix_lse: [h, t], log-sum-exps of the output in `Out.out`.
        prefix_lse_head_stride: its stride of heads.
        NODES: whether the keys are the nodes of a tree. Then the other log-sum-exp is infinite, of either sign, for
            NaN, and may be anything for a tree without keys before it; for intervals it has our conventions.
    """

    before: Any
    share: Any
    take: Any
    after: Any
    SINKS: Any
    prefix_lse: Any
    prefix_lse_head_stride: Any
    NODES: Any


@triton.jit
@no_type_check
def share_rest(split, queries, mask, out, tile, run, TILE, DV: tl.constexpr):
    """Take all keys of the mask; without any, the other output is complete."""
    is_done = False
    if not split.NODES:
        is_done = run.first >= run.end
    return run, is_done


@triton.jit
@no_type_check
def take_prefix(split, softmax, queries, out, tile, sight, DV: tl.constexpr):
    """Merge the output of another kernel into the softmax."""
    LOG2E: tl.constexpr = 1.4426950408889634
    has_prefix = tile.is_row
    if split.NODES:
        has_prefix = tile.is_row & (sight.tree_start > 0)
    at_dv = tl.arange(0, softmax.acc.shape[1])
    at = tile.heads * split.prefix_lse_head_stride + tile.tokens
    logs = tl.load(split.prefix_lse + at, mask=has_prefix, other=float("-inf"))
    if split.NODES:
        logs = tl.where(has_prefix & (tl.abs(logs) == float("inf")), float("nan"), logs)
    values = tl.load(
        out.out + places_of(queries, tile)[:, None] * DV + at_dv[None, :],
        mask=has_prefix[:, None] & (at_dv < DV)[None, :],
        other=0.0,
    )
    row_max = tl.maximum(softmax.row_max, logs * LOG2E)
    base = tl.where(row_max == float("-inf"), 0.0, row_max)
    rescale, weight = tl.exp2(softmax.row_max - base), tl.exp2(logs * LOG2E - base)
    acc = softmax.acc * rescale[:, None] + weight[:, None] * values.to(tl.float32)
    return Softmax(row_max, softmax.row_sum * rescale + weight, acc)


class Repair(NamedTuple):
    """All keys of a tile, if its output has NaN where another kernel may have multiplied hidden memory."""

    before: Any
    share: Any
    take: Any
    after: Any
    SINKS: Any
    OVERLAP: Any  # whether this launch may begin early


@triton.jit
@no_type_check
def wait_for_output(split):
    """Wait for the launch that fixes up the outputs."""
    if split.OVERLAP:
        tl.extra.cuda.gdc_wait()


@triton.jit
@no_type_check
def share_if_nan(split, queries, mask, out, tile, run, TILE, DV: tl.constexpr):
    """Take all keys if the output has NaN.

    Hidden memory lies past a sequence's end, which only its last rows load, or before the first window.
    """
    DV_PAD: tl.constexpr = next_power_of_2(DV)
    at_dv = tl.arange(0, DV_PAD)
    may_have_nan = tile.is_row
    if mask.RIGHT and (not mask.LEFT or queries.positions is None):
        at_an_end = tile.positions - tile.seq_len + LARGEST_TILE >= -mask.right
        if mask.LEFT:
            context = tl.maximum(tile.seq_len - tile.query_len, 0)
            begin = tile.seq_len - tile.query_len - tl.minimum(mask.left, context)
            at_an_end |= (begin > 0) & (tile.positions - begin - LARGEST_TILE < mask.left)
        may_have_nan &= at_an_end
    given = tl.load(
        out.out + places_of(queries, tile)[:, None] * DV + at_dv[None, :],
        mask=may_have_nan[:, None] & (at_dv < DV)[None, :],
        other=0.0,
    )
    return run, tl.max((given != given).to(tl.int32)) == 0


@triton.jit
@no_type_check
def nothing_after(split, queries, out, tile, DV: tl.constexpr):
    """Do nothing."""


def whole() -> Whole:
    """Return the share of a program with all keys of its rows."""
    return Whole(
        before=tl.constexpr(nothing_before),
        share=tl.constexpr(share_all),
        take=tl.constexpr(take_nothing),
        after=tl.constexpr(fill_padding_rows),
        SINKS=tl.constexpr(True),
    )


def part(splits: int, *, run: int, balance: bool, overlap: bool, after_level: bool) -> Part:
    """Return the share of a program with a split of the keys; see `Part`."""
    return Part(
        before=tl.constexpr(let_next_begin),
        share=tl.constexpr(share_run),
        take=tl.constexpr(take_nothing),
        after=tl.constexpr(wait_for_level_before),
        SINKS=tl.constexpr(False),
        splits=splits,
        RUN=tl.constexpr(run),
        BALANCE=tl.constexpr(balance),
        OVERLAP=tl.constexpr(overlap),
        AFTER_LEVEL=tl.constexpr(after_level),
    )


def rest(prefix_lse: Tensor, *, nodes: bool) -> After:
    """Return the share of a program with the keys that another kernel has left out; see `After`."""
    return After(
        before=tl.constexpr(nothing_before),
        share=tl.constexpr(share_rest),
        take=tl.constexpr(take_prefix),
        after=tl.constexpr(fill_padding_rows),
        SINKS=tl.constexpr(True),
        prefix_lse=prefix_lse,
        prefix_lse_head_stride=prefix_lse.stride(0),
        NODES=tl.constexpr(nodes),
    )


def repair(*, overlap: bool) -> Repair:
    """Return the share of a program that recomputes rows with NaN; see `Repair`."""
    return Repair(
        before=tl.constexpr(wait_for_output),
        share=tl.constexpr(share_if_nan),
        take=tl.constexpr(take_nothing),
        after=tl.constexpr(nothing_after),
        SINKS=tl.constexpr(True),
        OVERLAP=tl.constexpr(overlap),
    )


# --- the splits of one call ---


@triton.jit(do_not_specialize=["cu_seqlens_q", "num_tokens", "num_seqs", "splits"])
@no_type_check
def reduce_splits(
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
    BLOCK_HEADS: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Merge the partial outputs of one token and some heads, the sinks included."""
    token = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    is_head = heads < NUM_HEADS
    is_query = token < tl.load(cu_seqlens_q + num_seqs)
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
    VALUE_PAD: tl.constexpr = next_power_of_2(VALUE_HEAD_SIZE)
    at_dv = tl.arange(0, VALUE_PAD)
    places = token * NUM_HEADS + heads
    row_max = tl.full([BLOCK_HEADS], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_HEADS], tl.float32)
    acc = tl.zeros([BLOCK_HEADS, VALUE_PAD], tl.float32)
    for first in range(0, splits, BLOCK_SPLITS):
        split = first + tl.arange(0, BLOCK_SPLITS)[None, :]
        part_places = split.to(tl.int64) * num_tokens * NUM_HEADS + places[:, None]
        # Padding rows have no parts, and splits without keys have no values. Values are loaded before that is known,
        # so that one load need not wait for the other.
        is_part = is_head[:, None] & (split < splits) & is_query
        logs = tl.load(part_lses + part_places, is_part, float("-inf"))
        values = tl.load(
            parts + part_places[:, :, None] * VALUE_HEAD_SIZE + at_dv[None, None, :],
            mask=is_part[:, :, None] & (at_dv < VALUE_HEAD_SIZE)[None, None, :],
            other=0.0,
        )
        values = tl.where((logs > float("-inf"))[:, :, None], values, 0.0)
        row_max, row_sum, acc = merge_parts(row_max, row_sum, acc, logs, values)
    sink = None
    if sinks is not None:
        sink = tl.where(is_query, tl.load(sinks + heads, mask=is_head, other=0.0).to(tl.float32), float("-inf"))
    values, logs = normalize(row_max, row_sum, acc, sink)
    store_rows(values, logs, places, is_head, out, lse, VALUE_HEAD_SIZE)


# --- parts that lie anywhere ---


@triton.jit(do_not_specialize=["rows"])
@no_type_check
def _merge_kernel(
    outs,
    lses,
    out,
    lse,
    out_strides,
    lse_strides,
    rows,
    NUM_PARTS: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    VALUE_HEAD_SIZE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    is_row = row < rows
    token, head = row // NUM_HEADS, row % NUM_HEADS
    VALUE_PAD: tl.constexpr = next_power_of_2(VALUE_HEAD_SIZE)
    at_dv = tl.arange(0, VALUE_PAD).to(tl.int64)
    in_value = (at_dv < VALUE_HEAD_SIZE)[None, :]

    row_max = tl.full([BLOCK_ROWS], float("-inf"), tl.float32)
    for part in tl.static_range(NUM_PARTS):
        logs = tl.load(lses[part] + token * lse_strides[part][0] + head * lse_strides[part][1], is_row, float("-inf"))
        row_max = tl.maximum(row_max, logs)
    base = tl.where(row_max == float("-inf"), 0.0, row_max)  # -inf - -inf would be NaN
    row_sum = tl.zeros([BLOCK_ROWS], tl.float32)
    acc = tl.zeros([BLOCK_ROWS, VALUE_PAD], tl.float32)
    for part in tl.static_range(NUM_PARTS):
        logs = tl.load(lses[part] + token * lse_strides[part][0] + head * lse_strides[part][1], is_row, float("-inf"))
        values = tl.load(
            outs[part]
            + (token * out_strides[part][0] + head * out_strides[part][1])[:, None]
            + (at_dv * out_strides[part][2])[None, :],
            (logs > float("-inf"))[:, None] & in_value,  # a part without keys may hold anything
            0.0,
        )
        weights = tl.exp(logs - base)
        row_sum += weights
        acc += weights[:, None] * values.to(tl.float32)
    row_sum = tl.where(row_sum == 0.0, 1.0, row_sum)
    tl.store(
        out + row[:, None] * VALUE_HEAD_SIZE + at_dv[None, :],
        (acc / row_sum[:, None]).to(out.dtype.element_ty),
        is_row[:, None] & in_value,
    )
    tl.store(lse + row, row_max + tl.log(row_sum), is_row)
