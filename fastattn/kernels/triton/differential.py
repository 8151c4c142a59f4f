"""Differential attention in Triton: both softmaxes of a pair of heads side by side, over one read of its values.

    program              one tile of query rows, one pair of key heads, and a run of the keys that the tile can see
      each step          s1 = q1 k1, s2 = q2 k2                      v1 and v2 are loaded once for both
                         out1 += exp(s1) [v1; v2], out2 += exp(s2) [v1; v2]
      at the end         out1 / sum1 - lambda * out2 / sum2, its norm, its factor

If the keys are split, a program stores its two answers instead. `_reduce_kernel` then merges each with those of the
other splits before it subtracts, because differences cannot be merged.

Source: Ye et al. 2024, "Differential Transformer"; Dao et al. 2022, "FlashAttention".
"""

from functools import cache
from typing import no_type_check

import torch
import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor

from fastattn.kernels.gpu.launch import Launch, SplitLaunches
from fastattn.kernels.gpu.tile import (
    CHANGING,
    FEWEST_COLUMNS,
    LaunchConfig,
    can_overlap,
    find_tile,
    finish_scores,
    fit,
    is_wide,
    merge_parts,
    multiprocessors,
    normalize,
    pad,
    phase_of_run,
    unmasked_range,
    update_softmax,
    visible_keys,
    with_positive_scale,
)
from fastattn.kernels.problem import Subtraction
from fastattn.kernels.replay import Run
from refattn.options import AttentionOptions
from refattn.plan import Plan

FEWEST_KEYS = 128  # that are worth a program of their own
AT_ONCE = 2  # programs that a multiprocessor holds where a tile has 16 rows


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
) -> tuple[Float[Tensor, "t h d"], Float[Tensor, "t h"], Run]:
    """Do so, and return what does it again with other tensors, too.

    Source: see the module.
    """
    batch = plan.batch
    num_tokens, num_heads, head_size = query.shape
    num_pairs, block_size = cache.shape[4], cache.shape[3]
    out = query.new_empty(query.shape) if out is None else out
    lse = query.new_empty(num_tokens, num_heads, dtype=torch.float32)
    if 0 in (num_tokens, num_heads, batch.num_seqs):
        return out.zero_(), lse.fill_(-torch.inf), differential

    group = num_heads // 2 // num_pairs  # query pairs that share a pair of key heads
    left, right = plan.window
    query, scale = with_positive_scale(query, options.softmax_scale)
    of_layer, of_reduction = _of_layer(options, subtraction)
    row_bytes = pad(head_size) * query.element_size()  # a key here has two halves, and so has its value
    tuning = fit(tune(query, cache, plan, options), query.device, row_bytes=2 * row_bytes, key_bytes=4 * row_bytes)
    one_tile = batch.max_query_len * group <= tuning.block_m
    tiles = batch.num_seqs if one_tile else batch.num_seqs + num_tokens * group // tuning.block_m
    parts, part_lses = out, lse
    split = tuning.splits > 1
    if split:
        parts = query.new_empty(tuning.splits, num_tokens, num_heads, 2 * head_size, dtype=torch.float32)
        part_lses = query.new_empty(tuning.splits, *lse.shape, dtype=torch.float32)
    else:  # rows that belong to no tile
        out.zero_()
        lse.fill_(-torch.inf)
    overlap = split and can_overlap(query.device)
    block_table = batch.block_table
    assert block_table is not None  # the path has checked it
    common = dict(PAIRS=num_heads // 2, HEAD_SIZE=head_size, OVERLAP=overlap)
    launch = Launch(
        _attend_kernel,
        (tiles * num_pairs, tuning.splits),
        dict(query=query, cache=cache, out=parts, lse=part_lses) | of_layer,
        dict(
            block_table=block_table,
            cu_seqlens_q=batch.cu_seqlens_q,
            seq_lens=batch.seq_lens,
            query_strides=query.stride(),
            cache_strides=cache.stride(),
            table_strides=block_table.stride(),
            num_tokens=num_tokens,
            num_seqs=batch.num_seqs,
            scale=scale,
            softcap=options.softcap,
            left=left,
            right=right,
            **common,
            GROUP=group,
            BLOCK_SIZE=block_size,
            INT64_OFFSETS=is_wide(block_size, cache.stride(3)),
            BLOCK_M=tuning.block_m,
            BLOCK_N=tuning.block_n,
            SPLIT=split,
            ONE_TILE=one_tile,
            SOFTCAP=options.softcap > 0,
            LEFT=left >= 0,
            RIGHT=right >= 0,
            ALIBI_SQRT=options.alibi_sqrt,
        ),
        dict(num_warps=tuning.num_warps, num_stages=tuning.num_stages),
    )
    reduction = None
    if split:
        reduction = Launch(
            _reduce_kernel,
            (num_tokens, num_heads // 2),
            dict(parts=parts, part_lses=part_lses, out=out, lse=lse) | of_reduction,
            dict(
                cu_seqlens_q=batch.cu_seqlens_q,
                num_tokens=num_tokens,
                num_seqs=batch.num_seqs,
                splits=tuning.splits,
                **common,
                BLOCK_SPLITS=min(16, pad(tuning.splits)),
            ),
            dict(num_warps=2) | ({"launch_pdl": True} if overlap else {}),
        )
    if options.softmax_scale is not None and options.softmax_scale <= 0:  # the query is changed
        return out, lse, differential
    part_shape = (num_tokens, num_heads, 2 * head_size)
    made = PairLaunches(out.shape, part_shape, [(launch, 0)], tuning.splits, reduction, with_lse=True)
    return out, lse, made.attend


class PairLaunches(SplitLaunches):
    """The launches of a call, called as the operation of the kernel; see `fastattn.dispatch`."""

    def attend(
        self,
        query: Tensor,
        cache: Tensor,
        plan: Plan,
        options: AttentionOptions,
        subtraction: Subtraction,
        out: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """Attend with other tensors, and other numbers of the subtraction."""
        of_layer, of_reduction = _of_layer(options, subtraction)
        lse = query.new_empty(query.shape[:2], dtype=torch.float32)
        if not self.is_split:  # rows that belong to no tile
            out = query.new_zeros(query.shape) if out is None else out.zero_()
            lse.fill_(-torch.inf)
        return self.replay((query, cache), of_layer.values(), of_reduction.values(), out, lse)


def _of_layer(
    options: AttentionOptions, subtraction: Subtraction
) -> tuple[dict[str, Tensor | float | None], dict[str, Tensor | float | None]]:
    """Return what differs between layers beside tokens, as arguments of the kernel and of the reduction."""
    weight, slopes, sinks = (
        None if x is None else x.contiguous() for x in (subtraction.norm_weight, options.alibi_slopes, options.sinks)
    )
    common: dict[str, Tensor | float | None] = dict(lambda_full=subtraction.lambda_full, norm_weight=weight)
    common |= dict(sinks=sinks, norm_eps=subtraction.norm_eps, factor=subtraction.factor)
    return {**common, "alibi_slopes": slopes}, common


def tune(query: Tensor, cache: Tensor, plan: Plan, options: AttentionOptions) -> LaunchConfig:
    """Choose the shape of a launch from sizes that the host knows.

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
    by_fma = query.dtype == torch.float32  # products without tensor cores: their operands take registers, too
    block_m = 16 if is_narrow or head_size > 128 or by_fma else 64  # the answers of a tile have to fit, twice
    tiles = batch.num_seqs if rows <= block_m else batch.num_seqs + query.shape[0] * group // block_m
    row_bytes = max(pad(head_size) * query.element_size(), 128) * (2 if by_fma else 1)  # narrow rows: scores fill them
    tuning = _tune(block_m, row_bytes, tiles * num_pairs, visible, multiprocessors(query.device))
    return tuning._replace(splits=1, most_splits=1) if options.batch_invariant else tuning


@cache
def _tune(block_m: int, row_bytes: int, programs: int, visible: int, num_multiprocessors: int) -> LaunchConfig:
    """Split the keys so that the programs fill the card in whole waves, which long queries do anyway.

    Source: measured on an NVIDIA H200 with bfloat16 and head size 64; wider rows get shorter steps.
    """
    if block_m > 16:
        splits = min(max(1, num_multiprocessors * 2 // programs), max(1, visible // FEWEST_KEYS))
        num_warps = 4 if row_bytes <= 128 else 8
        return LaunchConfig(block_m, max(16, 64 * 128 // row_bytes), num_warps, 2, splits, splits)

    def time(splits: int) -> float:
        on_one = -(-programs * splits // num_multiprocessors)
        if on_one > AT_ONCE:
            return 1.05 * programs / num_multiprocessors
        return on_one / splits * (1.1 if on_one == 1 else 1.0)

    splits = min(range(1, max(1, visible // FEWEST_KEYS) + 1), key=time)
    return LaunchConfig(16, max(16, 128 * 128 // row_bytes), 4, 2, splits, splits)


# Triton's interpreter finds a function only if it stands above the one that calls it.


@triton.jit
@no_type_check
def _store_difference(
    first,
    second,
    lambda_full,
    norm_weight,
    norm_eps,
    factor,
    places,
    is_row,
    out,
    VALUE_SIZE: tl.constexpr,
):
    """Subtract, norm, and store; `places` are rows of `out [t, pairs, 2 d]`."""
    at_dv = tl.arange(0, first.shape[1])
    is_column = at_dv < VALUE_SIZE
    difference = first - tl.load(lambda_full).to(tl.float32) * second
    normed = difference * tl.rsqrt(tl.sum(difference * difference, 1) / VALUE_SIZE + norm_eps)[:, None] * factor
    if norm_weight is not None:
        normed *= tl.load(norm_weight + at_dv, mask=is_column, other=0.0).to(tl.float32)[None, :]
    tl.store(
        out + places[:, None] * VALUE_SIZE + at_dv[None, :],
        normed.to(out.dtype.element_ty),
        mask=is_row[:, None] & is_column[None, :],
    )


@triton.jit(do_not_specialize=CHANGING)
@no_type_check
def _attend_kernel(
    query,
    cache,
    out,  # [t, pairs, 2 d], or [splits, t, h, 2 d] in float32
    lse,  # [t, h], or [splits, t, h]
    lambda_full,
    norm_weight,
    block_table,
    cu_seqlens_q,
    seq_lens,
    alibi_slopes,
    sinks,
    query_strides,
    cache_strides,
    table_strides,
    num_tokens,
    num_seqs,
    scale,
    softcap,
    left,
    right,
    norm_eps,
    factor,
    PAIRS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    OVERLAP: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    INT64_OFFSETS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SPLIT: tl.constexpr,
    ONE_TILE: tl.constexpr,
    SOFTCAP: tl.constexpr,
    LEFT: tl.constexpr,
    RIGHT: tl.constexpr,
    ALIBI_SQRT: tl.constexpr,
):
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
    LOG2E: tl.constexpr = 1.4426950408889634
    KEY_PAIRS: tl.constexpr = PAIRS // GROUP
    key_pair = tl.program_id(0) % KEY_PAIRS
    split = tl.program_id(1)

    # Which rows of which sequence; the last ones see most keys, and go first.
    tile = tl.num_programs(0) // KEY_PAIRS - 1 - tl.program_id(0) // KEY_PAIRS
    sequence, first_row = find_tile(cu_seqlens_q, tile, num_seqs, GROUP, BLOCK_M, ONE_TILE)
    first_query = tl.load(cu_seqlens_q + sequence)
    query_len = tl.load(cu_seqlens_q + sequence + 1) - first_query
    seq_len = tl.load(seq_lens + sequence)
    if first_row >= query_len * GROUP:
        return
    context = seq_len - query_len
    rows = first_row + tl.arange(0, BLOCK_M)
    is_row = rows < query_len * GROUP
    tokens = (first_query + rows // GROUP).to(tl.int64)
    pairs = key_pair * GROUP + rows % GROUP
    positions = context + rows // GROUP
    first_position = context + first_row // GROUP
    last_position = context + tl.minimum((first_row + BLOCK_M - 1) // GROUP, query_len - 1)

    # Which keys.
    first_seen, last_key = visible_keys(first_position, last_position, seq_len, left, right, LEFT, RIGHT)
    first_key = first_seen // BLOCK_N * BLOCK_N
    places = split.to(tl.int64) * num_tokens * PAIRS + tokens * PAIRS + pairs
    if SPLIT:
        steps = tl.cdiv(tl.maximum(last_key - first_key, 0), BLOCK_N)
        run = tl.cdiv(steps, tl.num_programs(1)) * BLOCK_N
        first_key += split * run
        last_key = tl.minimum(last_key, first_key + run)
        if first_key >= last_key:
            nothing = tl.full([BLOCK_M], float("-inf"), tl.float32)
            tl.store(lse + 2 * places, nothing, mask=is_row)
            tl.store(lse + 2 * places + 1, nothing, mask=is_row)
            return
    all_from, all_to = unmasked_range(first_key, last_key, first_position, last_position, left, right, LEFT, RIGHT)

    HEAD_PAD: tl.constexpr = triton.next_power_of_2(HEAD_SIZE) if HEAD_SIZE > 16 else 16  # the least of a product
    VALUE_SIZE: tl.constexpr = 2 * HEAD_SIZE
    VALUE_LEAST: tl.constexpr = FEWEST_COLUMNS if BLOCK_M > 16 else 1
    VALUE_PAD: tl.constexpr = max(triton.next_power_of_2(VALUE_SIZE), VALUE_LEAST)
    at_d = tl.arange(0, HEAD_PAD)
    at_dv = tl.arange(0, VALUE_PAD)
    is_query = is_row[:, None] & (at_d < HEAD_SIZE)[None, :]
    query_columns = (at_d.to(tl.int64) * query_strides[2])[None, :]
    first_head = query + tokens * query_strides[0] + 2 * pairs.to(tl.int64) * query_strides[1]
    q1 = tl.load(first_head[:, None] + query_columns, mask=is_query, other=0.0)
    q2 = tl.load((first_head + query_strides[1])[:, None] + query_columns, mask=is_query, other=0.0)
    slopes1 = None
    slopes2 = None
    if alibi_slopes is not None:
        slopes1 = tl.load(alibi_slopes + 2 * pairs, mask=is_row, other=0.0).to(tl.float32) * LOG2E
        slopes2 = tl.load(alibi_slopes + 2 * pairs + 1, mask=is_row, other=0.0).to(tl.float32) * LOG2E

    # cache [half, key or value, n, p, pairs, d]; a column of [v1; v2] knows its half
    key1 = cache + key_pair.to(tl.int64) * cache_strides[4]
    key2 = key1 + cache_strides[0]
    value = key1 + cache_strides[1]
    half, column = (at_dv // HEAD_SIZE).to(tl.int64), (at_dv % HEAD_SIZE).to(tl.int64)
    value_columns = half * cache_strides[0] + column * cache_strides[5]
    table = block_table + sequence.to(tl.int64) * table_strides[0]
    j = first_key + tl.arange(0, BLOCK_N)
    is_key = (j >= first_seen) & (j < last_key)
    column = (j // BLOCK_SIZE).to(tl.int64)
    next_blocks = tl.load(table + column * table_strides[1], mask=is_key, other=0)

    row_max1 = tl.full([BLOCK_M], float("-inf"), tl.float32)
    row_max2 = tl.full([BLOCK_M], float("-inf"), tl.float32)
    row_sum1 = tl.zeros([BLOCK_M], tl.float32)
    row_sum2 = tl.zeros([BLOCK_M], tl.float32)
    acc1 = tl.zeros([BLOCK_M, VALUE_PAD], tl.float32)
    acc2 = tl.zeros([BLOCK_M, VALUE_PAD], tl.float32)
    PHASES: tl.constexpr = 3 if BLOCK_M > 16 and (LEFT or RIGHT) else 1
    for phase in tl.static_range(PHASES):
        begin, end = phase_of_run(phase, PHASES, first_key, last_key, all_from, all_to, BLOCK_N)
        for start in range(begin, end, BLOCK_N):
            j = start + tl.arange(0, BLOCK_N)
            is_key = j < last_key  # nothing from there on is read, and nothing before the first key that a row sees
            if LEFT:
                is_key &= j >= first_seen
            in_block = j % BLOCK_SIZE
            if INT64_OFFSETS:
                in_block = in_block.to(tl.int64)
            rows_of_keys = next_blocks.to(tl.int64) * cache_strides[2] + in_block * cache_strides[3]
            column = ((j + BLOCK_N) // BLOCK_SIZE).to(tl.int64)
            next_blocks = tl.load(table + column * table_strides[1], mask=j + BLOCK_N < last_key, other=0)
            keys = rows_of_keys[None, :] + (at_d.to(tl.int64) * cache_strides[5])[:, None]
            in_key = is_key[None, :] & (at_d < HEAD_SIZE)[:, None]
            all_seen = phase == 1 if PHASES == 3 else (start >= all_from) & (start + BLOCK_N <= all_to)
            k1 = tl.load(key1 + keys, mask=in_key, other=0.0)
            scores1 = finish_scores(
                tl.dot(q1, k1, input_precision="ieee"),
                positions,
                j,
                is_key,
                all_seen,
                slopes1,
                scale,
                softcap,
                left,
                right,
                SOFTCAP,
                LEFT,
                RIGHT,
                ALIBI_SQRT=ALIBI_SQRT,
            )
            k2 = tl.load(key2 + keys, mask=in_key, other=0.0)
            scores2 = finish_scores(
                tl.dot(q2, k2, input_precision="ieee"),
                positions,
                j,
                is_key,
                all_seen,
                slopes2,
                scale,
                softcap,
                left,
                right,
                SOFTCAP,
                LEFT,
                RIGHT,
                ALIBI_SQRT=ALIBI_SQRT,
            )
            weights1, shrink1, row_max1, row_sum1 = update_softmax(
                scores1, row_max1, row_sum1, softcap if SOFTCAP else scale, slopes1 is not None
            )
            weights2, shrink2, row_max2, row_sum2 = update_softmax(
                scores2, row_max2, row_sum2, softcap if SOFTCAP else scale, slopes1 is not None
            )
            v = tl.load(
                value + rows_of_keys[:, None] + value_columns[None, :],
                mask=is_key[:, None] & (at_dv < VALUE_SIZE)[None, :],
                other=0.0,
            )
            acc1 = tl.dot(weights1.to(v.dtype), v, acc1 * shrink1[:, None], input_precision="ieee")
            acc2 = tl.dot(weights2.to(v.dtype), v, acc2 * shrink2[:, None], input_precision="ieee")

    if SPLIT:
        first, logs1 = normalize(row_max1, row_sum1, acc1, None)
        second, logs2 = normalize(row_max2, row_sum2, acc2, None)
        is_value = is_row[:, None] & (at_dv < VALUE_SIZE)[None, :]
        at_value = 2 * places[:, None] * VALUE_SIZE + at_dv[None, :]
        tl.store(out + at_value, first, mask=is_value)
        tl.store(out + at_value + VALUE_SIZE, second, mask=is_value)
    else:
        sink1 = None
        sink2 = None
        if sinks is not None:
            sink1 = tl.load(sinks + 2 * pairs, mask=is_row, other=0.0).to(tl.float32)
            sink2 = tl.load(sinks + 2 * pairs + 1, mask=is_row, other=0.0).to(tl.float32)
        first, logs1 = normalize(row_max1, row_sum1, acc1, sink1)
        second, logs2 = normalize(row_max2, row_sum2, acc2, sink2)
        _store_difference(first, second, lambda_full, norm_weight, norm_eps, factor, places, is_row, out, VALUE_SIZE)
    tl.store(lse + 2 * places, logs1, mask=is_row)
    tl.store(lse + 2 * places + 1, logs2, mask=is_row)


@triton.jit(do_not_specialize=CHANGING)
@no_type_check
def _reduce_kernel(
    parts,  # [splits, t, h, 2 d]
    part_lses,  # [splits, t, h]
    out,
    lse,
    lambda_full,
    norm_weight,
    cu_seqlens_q,
    sinks,
    num_tokens,
    num_seqs,
    splits,
    norm_eps,
    factor,
    PAIRS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    OVERLAP: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr,
):
    """Merge the parts of both heads of a pair, one token per program, and subtract."""
    token = tl.program_id(0).to(tl.int64)
    pair = tl.program_id(1)
    is_query = token < tl.load(cu_seqlens_q + num_seqs)
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
    VALUE_SIZE: tl.constexpr = 2 * HEAD_SIZE
    VALUE_PAD: tl.constexpr = triton.next_power_of_2(VALUE_SIZE)
    at_dv = tl.arange(0, VALUE_PAD)
    heads = 2 * pair + tl.arange(0, 2)
    places = token * 2 * PAIRS + heads
    row_max = tl.full([2], float("-inf"), tl.float32)
    row_sum = tl.zeros([2], tl.float32)
    acc = tl.zeros([2, VALUE_PAD], tl.float32)
    for first_split in range(0, splits, BLOCK_SPLITS):
        split = first_split + tl.arange(0, BLOCK_SPLITS)[None, :]
        part_places = split.to(tl.int64) * num_tokens * 2 * PAIRS + places[:, None]
        logs = tl.load(part_lses + part_places, (split < splits) & is_query, float("-inf"))
        values = tl.load(
            parts + part_places[:, :, None] * VALUE_SIZE + at_dv[None, None, :],
            mask=(logs > float("-inf"))[:, :, None] & (at_dv < VALUE_SIZE)[None, None, :],
            other=0.0,
        )
        row_max, row_sum, acc = merge_parts(row_max, row_sum, acc, logs, values)
    sink = None
    if sinks is not None:
        sink = tl.where(is_query, tl.load(sinks + heads).to(tl.float32), float("-inf"))
    values, logs = normalize(row_max, row_sum, acc, sink)
    first, second = tl.split(tl.trans(values))
    place = token * PAIRS + pair + tl.zeros([1], tl.int64)
    _store_difference(
        first[None, :],
        second[None, :],
        lambda_full,
        norm_weight,
        norm_eps,
        factor,
        place,
        place >= 0,
        out,
        VALUE_SIZE,
    )
    tl.store(lse + places, logs)
