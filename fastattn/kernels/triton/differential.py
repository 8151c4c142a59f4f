"""Differential attention in Triton: both softmaxes of a pair of heads side by side, over one read of its values.

    program              one tile of query rows, one pair of KV heads, and a split of the keys that the tile can see
      each step          s1 = q1 k1, s2 = q2 k2                      v1 and v2 are loaded once for both
                         out1 += exp(s1) [v1; v2], out2 += exp(s2) [v1; v2]
      at the end         out1 / sum1 - lambda * out2 / sum2, its norm, its factor

If the keys are split, a program stores its two partial outputs instead. `reduce_pairs` then merges each with those of
the other splits before it subtracts, because differences cannot be merged.

Source: Ye et al. 2024, "Differential Transformer"; Dao et al. 2022, "FlashAttention".
"""

from functools import cache
from typing import Any, NamedTuple, no_type_check

import torch
import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor

from fastattn.kernels.problem import Subtraction, with_positive_scale
from fastattn.kernels.replay import Run as Replay
from fastattn.kernels.triton import differential_hopper
from fastattn.kernels.triton.attention import finish_scores
from fastattn.kernels.triton.constants import next_power_of_2
from fastattn.kernels.triton.keys import token_tile, where_of, zeros
from fastattn.kernels.triton.launch import CHANGING, Launch, SplitLaunches, can_overlap
from fastattn.kernels.triton.masks import Run, mask_of, phase_of_run
from fastattn.kernels.triton.merge import Out, merge_parts, normalize, places_of, update_softmax
from fastattn.kernels.triton.queries import (
    Given,
    Sizes,
    contiguous,
    find_tile,
    has_scale_above_0,
    is_by_position,
    is_one_tile,
    options_of,
    queries_of,
)
from fastattn.kernels.triton.tuning import LaunchConfig, fit, is_wide, pad, sms_of
from refattn.batch import Batch
from refattn.options import AttentionOptions
from refattn.plan import Plan

FEWEST_KEYS = 128  # fewest keys of a split
AT_ONCE = 2  # programs that an SM holds where a tile has 16 rows


def differential(
    query: Float[Tensor, "t h d"],
    cache: Float[Tensor, "2 2 n p pairs d"],
    plan: Plan,
    options: AttentionOptions,
    subtraction: Subtraction,
    out: Float[Tensor, "t h d"] | None = None,
) -> tuple[Float[Tensor, "t h d"], Float[Tensor, "t h"]]:
    """Attend twice over pages, subtract, and norm; see `fastattn.dispatch`.

    Source: see the module.
    """
    answer, lse, _ = bind_differential(query, cache, plan, options, subtraction, out)
    return answer, lse


def bind_differential(
    query: Float[Tensor, "t h d"],
    cache: Float[Tensor, "2 2 n p pairs d"],
    plan: Plan,
    options: AttentionOptions,
    subtraction: Subtraction,
    out: Float[Tensor, "t h d"] | None = None,
    _: bool = True,
) -> tuple[Float[Tensor, "t h d"], Float[Tensor, "t h"], Replay]:
    """Compute `differential`, and return the replay, too.

    Source: see the module.
    """
    batch = plan.batch
    num_tokens, num_heads, head_size = query.shape
    num_pairs = cache.shape[4]
    out = query.new_empty(query.shape) if out is None else out
    lse = query.new_empty(num_tokens, num_heads, dtype=torch.float32)
    if 0 in (num_tokens, num_heads, batch.num_seqs):
        return out.zero_(), lse.fill_(-torch.inf), differential

    group = num_heads // 2 // num_pairs  # query pairs that share a pair of KV heads
    query, scale = with_positive_scale(query, options.softmax_scale)
    layer_args, of_difference = _layer_args(options, subtraction)
    row_bytes = pad(head_size) * query.element_size()  # a key here has two halves, and so has its value
    tuning = fit(tune(query, cache, plan, options), query.device, row_bytes=2 * row_bytes, key_bytes=4 * row_bytes)
    one_tile = is_one_tile(batch, group, tuning.block_m)
    by_position = options.batch_invariant and is_by_position(plan)
    tiles = batch.num_seqs if one_tile else batch.num_seqs + num_tokens * group // tuning.block_m
    part_shape = (num_tokens, num_heads, 2 * head_size)
    if differential_hopper.takes(query, cache, plan, options, tuning):
        given = plan, options, scale, NOT_GIVEN, layer_args, Out(out, lse)
        launches = [(differential_hopper.launch(query, cache, *given), 0)]
        made: PairLaunches = WholeLaunches(out.shape, part_shape, launches, 1, None, with_lse=True)
        return out, lse, made.attend if has_scale_above_0(options) else differential
    parts, part_lses = out, lse
    split = tuning.splits > 1
    if split:
        parts = query.new_empty(tuning.splits, num_tokens, num_heads, 2 * head_size, dtype=torch.float32)
        part_lses = query.new_empty(tuning.splits, *lse.shape, dtype=torch.float32)
    else:  # rows that belong to no tile
        out.zero_()
        lse.fill_(-torch.inf)
    overlap = split and can_overlap(query.device)
    sizes = Sizes(
        ROWS=tuning.block_m,
        KEYS=tuning.block_n,
        KEYS_AXIS=1,
        PHASES=3 if tuning.block_m > 16 and plan.window != (-1, -1) else 1,
        FIRST_PHASE=0,
        ONE_TILE=one_tile,
        ENDS=0,
        STARTS=0,
        LAST_FIRST=True,
        BY_POSITION=by_position,
    )
    queries, constants = queries_of(query, batch, num_heads // 2, group), dict(SPLIT=split, OVERLAP=overlap)
    launch = Launch(
        attend_pairs,
        (tiles * num_pairs, tuning.splits),
        {"queries.query": query, "keys.cache": cache, "out.out": parts, "out.lse": part_lses} | layer_args,
        dict(
            queries=queries._replace(first_keys=plan.first_keys if by_position else None),
            keys=_keys_of(cache, plan, tuning.block_m, aligned=not by_position),
            mask=mask_of(plan),
            options=options_of(options, scale),
            difference=NOT_GIVEN,
            out=Out(parts, part_lses),
        )
        | dict(TILE=Sizes(*map(tl.constexpr, sizes)), **constants),
        dict(num_warps=tuning.num_warps, num_stages=tuning.num_stages),
    )
    reduction = None
    if split:
        reduction = _launch_reduction(parts, part_lses, Out(out, lse), batch, of_difference, overlap=overlap)
    made = PairLaunches(out.shape, part_shape, [(launch, 0)], tuning.splits, reduction, with_lse=True)
    return out, lse, made.attend if has_scale_above_0(options) else differential


def _keys_of(cache: Tensor, plan: Plan, tile_rows: int, *, aligned: bool) -> "PairedKeys":
    """Return the pool as the kernel takes it; `aligned` says whether steps begin at multiples of their size."""
    block_size, head_size = cache.shape[3], cache.shape[5]
    return PairedKeys(
        cache=cache,
        strides=cache.stride(),
        where=where_of(cache[0, 0], plan, wide=is_wide(block_size, cache.stride(3)), aligned=aligned),
        HEAD_SIZE=tl.constexpr(head_size),
        KEY_PAD=tl.constexpr(max(pad(head_size), 16)),
        VALUE_PAD=tl.constexpr(max(pad(2 * head_size), 64 if tile_rows > 16 else 1)),
    )


def _launch_reduction(
    parts: Tensor,
    part_lses: Tensor,
    out: Out,
    batch: Batch,
    of_difference: Given,
    *,
    overlap: bool,
) -> Launch:
    """Launch the merge of partial outputs, `[splits, t, h, 2 d]`, and the subtraction."""
    splits, num_tokens, num_heads, value_head_size = parts.shape
    return Launch(
        reduce_pairs,
        (num_tokens, num_heads // 2),
        {"parts": parts, "part_lses": part_lses, "out.out": out.out, "out.lse": out.lse} | of_difference,
        dict(
            difference=NOT_GIVEN,
            out=out,
            cu_seqlens_q=batch.cu_seqlens_q,
            num_tokens=num_tokens,
            num_seqs=batch.num_seqs,
            splits=splits,
            PAIRS=num_heads // 2,
            HEAD_SIZE=value_head_size // 2,
            OVERLAP=overlap,
            BLOCK_SPLITS=min(16, pad(splits)),
        ),
        dict(num_warps=2) | ({"launch_pdl": True} if overlap else {}),
    )


class PairLaunches(SplitLaunches):
    """The launches of a call, replayed with the arguments of the operation; see `fastattn.dispatch`."""

    writes_all_rows = False  # whether one launch also writes rows that belong to no tile

    def attend(
        self,
        query: Tensor,
        cache: Tensor,
        plan: Plan,
        options: AttentionOptions,
        subtraction: Subtraction,
        out: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """Replay with other tensors, and another subtraction."""
        layer_args, of_difference = _layer_args(options, subtraction)
        lse = query.new_empty(query.shape[:2], dtype=torch.float32)
        if not (self.is_split or self.writes_all_rows):
            out = query.new_zeros(query.shape) if out is None else out.zero_()
            lse.fill_(-torch.inf)
        return self.replay((query, cache), layer_args.values(), of_difference.values(), out, lse)


class WholeLaunches(PairLaunches):
    """The one launch of a call that `differential_hopper` computes."""

    writes_all_rows = True


def _layer_args(options: AttentionOptions, subtraction: Subtraction) -> tuple[Given, Given]:
    """Return what differs between layers beside tokens, as arguments of the kernel and of the reduction."""
    weight, slopes, sinks = map(contiguous, (subtraction.norm_weight, options.alibi_slopes, options.sinks))
    common = Difference(subtraction.lambda_full, weight, subtraction.norm_eps, subtraction.factor)._asdict()
    difference: Given = {f"difference.{name}": x for name, x in common.items()}
    layer_args = difference | {"options.alibi_slopes": slopes, "options.sinks": sinks}
    return layer_args, {**difference, "sinks": sinks}


def tune(query: Tensor, cache: Tensor, plan: Plan, options: AttentionOptions) -> LaunchConfig:
    """Choose the launch config from sizes that the host knows.

    Under `batch_invariant` nothing depends on the batch: one tile for all, and no sequence is split.
    """
    batch, head_size, num_pairs = plan.batch, query.shape[2], cache.shape[4]
    group = query.shape[1] // 2 // num_pairs
    rows = batch.max_query_len * group
    left, right = plan.window
    visible = batch.max_seq_len
    if left >= 0 and right >= 0:
        visible = min(visible, left + batch.max_query_len + right)
    is_narrow = rows <= 16 and not options.batch_invariant
    by_fma = query.dtype == torch.float32  # products are FMAs, whose operands take registers, too
    block_m = 16 if is_narrow or head_size > 128 or by_fma else 64  # both outputs of a tile have to fit
    tiles = batch.num_seqs if rows <= block_m else batch.num_seqs + query.shape[0] * group // block_m
    row_bytes = max(pad(head_size) * query.element_size(), 128) * (2 if by_fma else 1)  # scores fill narrow rows
    tuning = _tune(block_m, row_bytes, tiles * num_pairs, visible, sms_of(query.device))
    return tuning._replace(splits=1, most_splits=1) if options.batch_invariant else tuning


@cache
def _tune(block_m: int, row_bytes: int, programs: int, visible: int, num_sms: int) -> LaunchConfig:
    """Split the keys so that the programs fill the GPU in full waves, which long queries do anyway.

    Source: measured on an NVIDIA H200 with bfloat16 and head size 64; wider rows get shorter steps.
    """
    if block_m > 16:
        splits = min(max(1, num_sms * 2 // programs), max(1, visible // FEWEST_KEYS))
        num_warps = 4 if row_bytes <= 128 else 8
        return LaunchConfig(block_m, max(16, 64 * 128 // row_bytes), num_warps, 2, splits, splits)

    def time(splits: int) -> float:
        on_one = -(-programs * splits // num_sms)
        if on_one > AT_ONCE:
            return 1.05 * programs / num_sms
        return on_one / splits * (1.1 if on_one == 1 else 1.0)

    splits = min(range(1, max(1, visible // FEWEST_KEYS) + 1), key=time)
    return LaunchConfig(16, max(16, 128 * 128 // row_bytes), 4, 2, splits, splits)


# Triton's interpreter finds a function only if it is defined above its caller.


class PairedKeys(NamedTuple):
    """A pool of pairs of heads, `[half, key or value, n, p, pairs, d]`, as the kernel takes it."""

    cache: Any
    strides: Any
    where: Any
    HEAD_SIZE: Any
    KEY_PAD: Any
    VALUE_PAD: Any


class Half(NamedTuple):
    """The queries of the first or the second heads of a tile of pairs, and their ALiBi slopes, if there are any."""

    tile: Any
    slopes: Any


class Difference(NamedTuple):
    """The subtraction of both softmaxes, and the norm of the difference.

    Attributes:
        lambda_full: the factor of the second softmax.
        norm_weight: [2 d], or None.
        norm_eps: epsilon of the norm.
        factor: factor of the normed difference.
    """

    lambda_full: Any
    norm_weight: Any
    norm_eps: Any
    factor: Any


NOT_GIVEN = Difference(None, None, None, None)  # before `_layer_args` fills it in


@triton.jit
@no_type_check
def store_difference(first, second, difference, out, places, is_row, SIZE: tl.constexpr):
    """Subtract, norm, and store; `places` are rows of `out [t, pairs, 2 d]`."""
    at_dv = tl.arange(0, first.shape[1])
    is_column = at_dv < SIZE
    delta = first - tl.load(difference.lambda_full).to(tl.float32) * second
    size = tl.rsqrt(tl.sum(delta * delta, 1) / SIZE + difference.norm_eps)
    normed = delta * size[:, None] * difference.factor
    if difference.norm_weight is not None:
        normed *= tl.load(difference.norm_weight + at_dv, mask=is_column, other=0.0).to(tl.float32)[None, :]
    tl.store(
        out + places[:, None] * SIZE + at_dv[None, :],
        normed.to(out.dtype.element_ty),
        mask=is_row[:, None] & is_column[None, :],
    )


@triton.jit
@no_type_check
def _of_heads(numbers, tile, half: tl.constexpr):
    """Load the number of the first or the second head of the pair of each row."""
    return tl.load(numbers + 2 * tile.heads + half, mask=tile.is_row, other=0.0).to(tl.float32)


@triton.jit
@no_type_check
def _query_of_half(queries, keys, tile, half: tl.constexpr):
    """Load the queries of the first or the second head of a pair."""
    at = tl.arange(0, keys.KEY_PAD)
    first_head = queries.query + tile.tokens * queries.strides[0] + 2 * tile.heads.to(tl.int64) * queries.strides[1]
    return tl.load(
        (first_head + half * queries.strides[1])[:, None] + (at.to(tl.int64) * queries.strides[2])[None, :],
        mask=tile.is_row[:, None] & (at < keys.HEAD_SIZE)[None, :],
        other=0.0,
    )


@triton.jit
@no_type_check
def _keys_of_half(keys, tile, seen, offset, half: tl.constexpr):
    """Load the keys of the first or the second heads of a step."""
    pool = keys.cache + tile.kv_head.to(tl.int64) * keys.strides[4] + half * keys.strides[0]
    return token_tile(pool, offset, keys.strides[5], seen.is_key, 0, keys.HEAD_SIZE, keys.KEY_PAD, 1)


@triton.jit
@no_type_check
def _scores_of_half(half, k, mask, options, tile, seen, all_seen, TILE):
    """Return the scores of the first or the second heads of a step of keys."""
    products = tl.dot(half.tile, k, input_precision="ieee")
    scores = finish_scores(products, options.scale, half.slopes, tile.positions, seen.positions, options, 1)
    if not all_seen:
        scores = tl.where(mask.visible(mask, tile, seen, TILE), scores, float("-inf"))
    return scores


@triton.jit(do_not_specialize=CHANGING)
@no_type_check
def attend_pairs(queries, keys, mask, options, difference, out, TILE, SPLIT: tl.constexpr, OVERLAP: tl.constexpr):
    """Attend with both heads of each pair, from a tile of query rows to a run of keys."""
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
    tile = find_tile(queries, TILE)  # the query rows of this program
    if tile.first_row >= tile.num_rows:
        return
    run = mask.look(mask, queries, tile, TILE)  # the keys that some row sees
    places = places_of(queries, tile)
    if SPLIT:
        steps = tl.cdiv(tl.maximum(run.end - run.begin, 0), TILE.KEYS)
        length = tl.cdiv(steps, tl.num_programs(1)) * TILE.KEYS
        begin = run.begin + tl.program_id(1) * length
        run = Run(run.first, begin, tl.minimum(run.end, begin + length))
        if run.begin >= run.end:
            nothing = tl.full([TILE.ROWS], float("-inf"), tl.float32)
            tl.store(out.lse + 2 * places, nothing, mask=tile.is_row)
            tl.store(out.lse + 2 * places + 1, nothing, mask=tile.is_row)
            return
    q1, q2 = _query_of_half(queries, keys, tile, 0), _query_of_half(queries, keys, tile, 1)
    slopes1, slopes2 = None, None
    if options.alibi_slopes is not None:
        slopes1 = _of_heads(options.alibi_slopes, tile, 0) * 1.4426950408889634  # log2(e)
        slopes2 = _of_heads(options.alibi_slopes, tile, 1) * 1.4426950408889634
    SIZE: tl.constexpr = 2 * keys.HEAD_SIZE
    at_dv = tl.arange(0, keys.VALUE_PAD)
    half, column = (at_dv // keys.HEAD_SIZE).to(tl.int64), (at_dv % keys.HEAD_SIZE).to(tl.int64)
    columns = half * keys.strides[0] + column * keys.strides[5]  # columns of [v1; v2], by their half
    value = keys.cache + tile.kv_head.to(tl.int64) * keys.strides[4] + keys.strides[1]

    row_max1, row_max2 = (
        tl.full([TILE.ROWS], float("-inf"), tl.float32),
        tl.full([TILE.ROWS], float("-inf"), tl.float32),
    )
    row_sum1, row_sum2 = tl.zeros([TILE.ROWS], tl.float32), tl.zeros([TILE.ROWS], tl.float32)
    acc1, acc2 = zeros(keys.VALUE_PAD, TILE), zeros(keys.VALUE_PAD, TILE)
    ahead = keys.where.begin(keys.where, tile, run, TILE)
    all_from, all_to = mask.all_visible(mask, tile, run, run)
    factor = options.softcap if options.SOFTCAP else options.scale
    for phase in tl.static_range(TILE.PHASES):
        begin, end = phase_of_run(run, all_from, all_to, phase, TILE)
        for start in range(begin, end, TILE.KEYS):
            j = start + tl.arange(0, TILE.KEYS)
            is_key = j < run.end  # later slots are not read, nor those before the first key that a row sees
            if mask.LEFT:
                is_key &= j >= run.first
            seen = mask.step(mask, tile, run, start, is_key, TILE)
            all_seen = phase == 1 if TILE.PHASES == 3 else (start >= all_from) & (start + TILE.KEYS <= all_to)
            place, ahead = keys.where.find(keys.where, tile, run, start, ahead, TILE)
            offset = keys.where.offset(keys.where, place, (keys.strides[2], keys.strides[3]))
            k = _keys_of_half(keys, tile, seen, offset, 0)
            scores1 = _scores_of_half(Half(q1, slopes1), k, mask, options, tile, seen, all_seen, TILE)
            k = _keys_of_half(keys, tile, seen, offset, 1)
            scores2 = _scores_of_half(Half(q2, slopes2), k, mask, options, tile, seen, all_seen, TILE)
            weights1, rescale1, row_max1, row_sum1 = update_softmax(
                scores1, row_max1, row_sum1, factor, slopes1 is not None
            )
            weights2, rescale2, row_max2, row_sum2 = update_softmax(
                scores2, row_max2, row_sum2, factor, slopes1 is not None
            )
            v = tl.load(
                value + offset[:, None] + columns[None, :],
                mask=seen.is_key[:, None] & (at_dv < SIZE)[None, :],
                other=0.0,
            )
            acc1 = tl.dot(weights1.to(v.dtype), v, acc1 * rescale1[:, None], input_precision="ieee")
            acc2 = tl.dot(weights2.to(v.dtype), v, acc2 * rescale2[:, None], input_precision="ieee")

    sink1, sink2 = None, None
    if options.sinks is not None and not SPLIT:
        sink1, sink2 = _of_heads(options.sinks, tile, 0), _of_heads(options.sinks, tile, 1)
    first, logs1 = normalize(row_max1, row_sum1, acc1, sink1)
    second, logs2 = normalize(row_max2, row_sum2, acc2, sink2)
    if SPLIT:
        is_value = tile.is_row[:, None] & (at_dv < SIZE)[None, :]
        at_value = 2 * places[:, None] * SIZE + at_dv[None, :]
        tl.store(out.out + at_value, first, mask=is_value)
        tl.store(out.out + at_value + SIZE, second, mask=is_value)
    else:
        store_difference(first, second, difference, out.out, places, tile.is_row, SIZE)
    tl.store(out.lse + 2 * places, logs1, mask=tile.is_row)
    tl.store(out.lse + 2 * places + 1, logs2, mask=tile.is_row)


@triton.jit(do_not_specialize=CHANGING)
@no_type_check
def reduce_pairs(
    parts,  # [splits, t, h, 2 d]
    part_lses,  # [splits, t, h]
    out,
    difference,
    sinks,
    cu_seqlens_q,
    num_tokens,
    num_seqs,
    splits,
    PAIRS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    OVERLAP: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr,
):
    """Merge the partial outputs of both heads of a pair, one token per program, and subtract."""
    token = tl.program_id(0).to(tl.int64)
    pair = tl.program_id(1)
    is_query = token < tl.load(cu_seqlens_q + num_seqs)
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
    SIZE: tl.constexpr = 2 * HEAD_SIZE
    at_dv = tl.arange(0, next_power_of_2(SIZE))
    heads = 2 * pair + tl.arange(0, 2)
    places = token * 2 * PAIRS + heads
    row_max = tl.full([2], float("-inf"), tl.float32)
    row_sum = tl.zeros([2], tl.float32)
    acc = tl.zeros([2, next_power_of_2(SIZE)], tl.float32)
    for first_split in range(0, splits, BLOCK_SPLITS):
        split = first_split + tl.arange(0, BLOCK_SPLITS)[None, :]
        part_places = split.to(tl.int64) * num_tokens * 2 * PAIRS + places[:, None]
        logs = tl.load(part_lses + part_places, (split < splits) & is_query, float("-inf"))
        values = tl.load(
            parts + part_places[:, :, None] * SIZE + at_dv[None, None, :],
            mask=(logs > float("-inf"))[:, :, None] & (at_dv < SIZE)[None, None, :],
            other=0.0,
        )
        row_max, row_sum, acc = merge_parts(row_max, row_sum, acc, logs, values)
    sink = None
    if sinks is not None:
        sink = tl.where(is_query, tl.load(sinks + heads).to(tl.float32), float("-inf"))
    values, logs = normalize(row_max, row_sum, acc, sink)
    first, second = tl.split(tl.trans(values))
    place = token * PAIRS + pair + tl.zeros([1], tl.int64)
    store_difference(first[None, :], second[None, :], difference, out.out, place, place >= 0, SIZE)
    tl.store(out.lse + places, logs)
