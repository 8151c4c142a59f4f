"""The kernel of attention over pages or rows, and its launch: a tile of rows, one key head, a run of the keys.

One body answers in whole, in parts of several splits, over what comes after another kernel's keys, and repairs what
another kernel answered. Which splits there are is said by whoever launches it (`fastattn.kernels.triton.attention`).

Source: as `fastattn.kernels.gpu.tile`; the tiles of a ragged batch are found as in vLLM's Triton attention.
"""

from math import gcd
from typing import no_type_check

import triton
import triton.language as tl
from torch import Tensor

from fastattn.kernels.device import is_rocm
from fastattn.kernels.gpu.decode import attend_few_rows
from fastattn.kernels.gpu.launch import Launch
from fastattn.kernels.gpu.quantized import NO_CODES, Codes, are_pairs, size_of
from fastattn.kernels.gpu.tile import (
    CHANGING,
    INTERPRETED,
    LaunchConfig,
    attend_kv_split,
    converts_fp8,
    find_intervals,
    find_positions,
    find_tile,
    is_wide,
    keeps_values_twice,
    normalize,
    pad,
    store_rows,
    visible_keys,
    with_positive_scale,
)
from fastattn.kernels.problem import cu_seqlens_k_of, uses_positions
from refattn.batch import Batch
from refattn.options import AttentionOptions
from refattn.plan import Plan
from refattn.trees import TreePlan

BLOCK_SEQS = 128  # sequences that are counted at a time
LARGEST_TILE = 512  # query rows and keys, together, of a tile of a kernel whose answers are recomputed


def launch_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    plan: Plan,
    options: AttentionOptions,
    tuning: LaunchConfig,
    out: Tensor,
    lse: Tensor | None,
    *,
    overlap: bool | None = None,
    after: bool = False,
    shared: bool = False,
    codes: Codes = NO_CODES,
    tree: TreePlan | None = None,
    prefix_lse: Tensor | None = None,
) -> Launch:
    """Launch the kernel for one level, and return what can be replayed with other tensors of the same shapes.

    Args:
        query: query rows of all sequences.
        key: the pool of keys if it has four dimensions, else the key rows of all sequences; any strides.
        value: the pool of values, or the value rows.
        plan: the lengths, the block table for pages, and who may see whom.
        options: those of the layer.
        tuning: the shape of the launch.
        out: the answer, or the first of the parts.
        lse: likewise; None to recompute the answer.
        overlap: whether the launch after this one may begin early; None if this one gives the answer, not parts. To
            recompute: whether this one may begin early, and waits for the one before.
        after: another level was launched before, that what follows has to wait for, too.
        shared: `value` is a view of the first elements of each key: load them once, as key and as value.
        codes: what the pools hold, if it is codes; see `fastattn.kernels.triton.attention.attend`.
        tree: the trees at the end of the sequences, whose plan this is.
        prefix_lse: the log-sum-exps `[h, t]` of what `out` holds already, the answer over the keys before the trees, or
            outside of the intervals, which then has our conventions; None to attend to all keys.
    """
    batch = plan.batch
    num_tokens, num_heads, head_size = query.shape
    num_kv_heads, value_head_size = value.shape[-2], size_of(value)
    group = num_heads // num_kv_heads
    block_table = batch.block_table if key.ndim == 4 else None
    left, right = plan.window
    positions = plan.positions if uses_positions(plan, options) else None
    intervals = plan.first_visible is not None
    query, scale = with_positive_scale(query, options.softmax_scale)
    one_tile = _is_one_tile(batch, group, tuning.block_m)
    tiles = count_tiles(batch, num_tokens, group, tuning.block_m)
    ends, starts = 0, 0
    if lse is None and positions is None and not one_tile:
        ends, starts = _tiles_to_recompute(plan, group, tuning.block_m)
        if ends and batch.num_seqs * (ends + starts) < tiles:
            tiles = batch.num_seqs * (ends + starts)
        else:
            ends, starts = 0, 0
    return Launch(
        _attend_kernel,
        (tiles * num_kv_heads, tuning.most_splits),
        dict(query=query, key=key, value=value, out=out, lse=lse)
        | of_layer(query, options, codes)
        | ({} if prefix_lse is None else {"prefix_lse": prefix_lse}),
        dict(
            alibi_slopes=None,
            sinks=None,
            scale=scale,
            query_number=1.0,
            value_number=1.0,
            query_scales=None,
            key_scales=None,
            value_scales=None,
            group_scales=None,
            prefix_lse=None,
            block_table=block_table,
            cu_seqlens_q=batch.cu_seqlens_q,
            cu_seqlens_k=cu_seqlens_k_of(plan) if block_table is None else None,
            seq_lens=batch.seq_lens,
            query_positions=positions,  # tables of a plan lie side by side, and are read anew in each replay
            first_keys=None if positions is None and not intervals else plan.first_keys,
            first_visible=plan.first_visible,
            last_visible=plan.last_visible,
            tree_lens=None if tree is None else tree.trees.lens,
            depths=None if tree is None else tree.depths,
            ancestors=None if tree is None else tree.ancestors,
            tree_width=0 if tree is None else tree.trees.max_len,
            prefix_lse_head_stride=0 if prefix_lse is None else prefix_lse.stride(0),
            query_strides=query.stride(),
            key_strides=key.stride(),
            value_strides=value.stride(),
            query_scale_strides=_strides_by_head(codes.query),
            key_scale_strides=_strides_by_head(codes.key),
            value_scale_strides=_strides_by_head(codes.value),
            group_scale_strides=() if codes.groups is None else codes.groups.stride(),
            sequences=plan.sequences if codes.kind else None,
            table_row_stride=0 if block_table is None else block_table.stride(0),
            table_stride=1 if block_table is None else block_table.stride(1),
            num_tokens=num_tokens,
            num_seqs=batch.num_seqs,
            splits=tuning.splits,
            softcap=options.softcap,
            left=left,
            right=right,
            NUM_HEADS=num_heads,
            GROUP=group,
            HEAD_SIZE=head_size,
            VALUE_HEAD_SIZE=value_head_size,
            BLOCK_SIZE=0 if block_table is None else key.shape[1],
            INT64_OFFSETS=block_table is not None
            and is_wide(key.shape[1], key.stride(1), value.stride(1), *_strides_by_head(codes.key)[1:2]),
            BLOCK_M=tuning.block_m,
            BLOCK_N=tuning.block_n,
            BLOCK_SEQS=BLOCK_SEQS,
            SPLIT=overlap is not None and lse is not None,
            RUN=tuning.run,
            BALANCE=tuning.most_splits > tuning.splits,
            ONE_TILE=one_tile,
            SOFTCAP=options.softcap > 0,
            LEFT=left >= 0,
            RIGHT=right >= 0,
            LARGEST_TILE=LARGEST_TILE,
            ENDS=ends,
            STARTS=starts,
            OVERLAP=bool(overlap),
            AFTER=bool(overlap and after),
            CODES=codes.kind,
            ROUND_QUERY=codes.rounds_query,
            HAS_FP8_CVT=converts_fp8(query.device),
            MASK_WORDS=0 if tree is None else tree.trees.num_words,
            VALUES_IN_KEYS=shared,
            SAME_STRIDES=_in_bytes(key) == _in_bytes(value),
            ALIBI_SQRT=options.alibi_sqrt,
            ROW_ALIGN=_alignment_of_rows(value, codes),
        ),
        dict(num_warps=tuning.num_warps, num_stages=tuning.num_stages)
        | ({"launch_pdl": True} if overlap and (after or lse is None) else {})
        | ({"maxnreg": tuning.registers} if tuning.registers and not (INTERPRETED or is_rocm()) else {}),
    )


def of_layer(query: Tensor, options: AttentionOptions, codes: Codes = NO_CODES) -> dict[str, Tensor | float | None]:
    """Return what a layer has for itself beside its tokens, as arguments of the kernel: most have nothing."""
    arguments: dict[str, Tensor | float | None] = {}
    if options.alibi_slopes is not None:
        arguments["alibi_slopes"] = options.alibi_slopes.contiguous()
    if options.sinks is not None:
        arguments["sinks"] = options.sinks.contiguous()
    if codes.kind:
        of_query, of_key, of_value = codes.numbers
        scale = query.shape[-1] ** -0.5 if options.softmax_scale is None else options.softmax_scale
        arguments["scale"] = (abs(scale) or 1.0) * of_key * of_query  # of the scores, above 0
        arguments |= dict(query_number=of_query, value_number=of_value)
        arguments |= dict(query_scales=codes.query, key_scales=codes.key, value_scales=codes.value)
        arguments["group_scales"] = codes.groups
    return arguments


def has_scale_above_0(options: AttentionOptions) -> bool:
    """Return whether the query is multiplied as it is; see `with_positive_scale`."""
    return options.softmax_scale is None or options.softmax_scale > 0


def contiguous(numbers: Tensor | None) -> Tensor | None:
    """Return numbers such that a pointer to the first leads to all of them."""
    return None if numbers is None else numbers.contiguous()


def _in_bytes(pool: Tensor) -> list[int]:
    """Return how many bytes apart blocks are, tokens of a block, and heads."""
    return [stride * pool.itemsize for stride in pool.stride()[:3]]


def _strides_by_head(scales: Tensor | None) -> tuple[int, ...]:
    """Return the strides of scales, with one of 0 for the sequences where there is one for each head only."""
    if scales is None:
        return ()
    return (0, *scales.stride()) if scales.ndim == 1 else scales.stride()


def _alignment_of_rows(value: Tensor, codes: Codes) -> int:
    """Return how many bytes packed rows are multiples of, up to 16, for loads of several numbers; 0 for others.

    Triton asks only whether strides are multiples of 16, and those of 656 bytes are 328 numbers.
    """
    return 0 if codes.groups is None else gcd(16, *value.stride()[:2])


def _is_one_tile(batch: Batch, group: int, block_m: int) -> bool:
    """Return whether a tile holds all query rows of any sequence."""
    return batch.max_query_len * group <= block_m


def count_tiles(batch: Batch, num_tokens: int, group: int, block_m: int) -> int:
    """Bound the number of tiles: one that is not full for each sequence, beside the full ones."""
    if _is_one_tile(batch, group, block_m):
        return batch.num_seqs
    if batch.num_seqs == 1:
        return -(-num_tokens * group // block_m)
    return batch.num_seqs + num_tokens * group // block_m


def _tiles_to_recompute(plan: Plan, group: int, block_m: int) -> tuple[int, int]:
    """Return how many tiles at the end and at the start of a sequence another kernel can have spoilt; 0 for any of all.

    They are those of the rows that the kernel looks at: the last ones, and in a window also the first ones.
    """
    left, right = plan.window
    if right < 0:
        return 0, 0
    ends = -(-(LARGEST_TILE + right) * group // block_m) + 1
    return ends, -(-LARGEST_TILE * group // block_m) + 1 if left >= 0 else 0


def bytes_of_a_program(query: Tensor, key: Tensor, value: Tensor, shared: bool) -> tuple[int, int]:
    """Return the bytes of a row of a tile, the longer of query and value, and of a key of a step with its value."""
    head_size, value_head_size = query.shape[2], size_of(value)
    if shared:
        elements = pad(head_size - value_head_size) + pad(value_head_size)
        row_bytes = elements * query.element_size()  # of a key, too, but for codes that become numbers in registers
        key_bytes = elements * key.element_size() if are_pairs(value) else row_bytes
        return row_bytes, key_bytes
    row_bytes = max(pad(head_size), pad(value_head_size)) * query.element_size()
    if key.dtype != query.dtype:  # codes, and a place where they become numbers
        return row_bytes, 2 * row_bytes + bytes_of_a_row(key) + bytes_of_a_row(value)
    return row_bytes, 2 * row_bytes


def spare_stages(query: Tensor, shared: bool, codes: Codes, block_m: int) -> int:
    """Return how many steps in flight take no shared memory; -1 if one takes it twice."""
    if not shared or codes.kind or query.itemsize != 2:
        return 0
    if block_m == 16:
        return 1
    return -int(not INTERPRETED and keeps_values_twice(query.device))


def bytes_of_a_row(x: Tensor) -> int:
    """Return the bytes that a tile has for a key or a value."""
    return pad(x.shape[-1]) * x.element_size()


# Triton's interpreter finds a function only if it stands above the one that calls it.


@triton.jit
@no_type_check
def _count_steps(
    cu_seqlens_q,
    seq_lens,
    num_seqs,
    left,
    right,
    LEFT: tl.constexpr,
    RIGHT: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_SEQS: tl.constexpr,
):
    """Count the steps of keys that the queries of all sequences see, one tile per sequence."""
    total = 0
    for first in range(0, num_seqs, BLOCK_SEQS):
        sequence = first + tl.arange(0, BLOCK_SEQS)
        is_sequence = sequence < num_seqs
        query_len = tl.load(cu_seqlens_q + sequence + 1, is_sequence, 0) - tl.load(
            cu_seqlens_q + sequence, is_sequence, 0
        )
        seq_len = tl.load(seq_lens + sequence, is_sequence, 0)
        first_seen, last_key = visible_keys(seq_len - query_len, seq_len - 1, seq_len, left, right, LEFT, RIGHT)
        first_key = first_seen // BLOCK_N * BLOCK_N
        steps = tl.where((query_len > 0) & (last_key > first_key), tl.cdiv(last_key - first_key, BLOCK_N), 0)
        total += tl.sum(steps, 0)
    return total


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
    """Write 0 and -inf into the rows past the last sequence, which belong to no tile: each program takes a few."""
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
def _wait_for_level_before():
    """End no earlier than the launch before: the reduction waits for ours alone, which is over when all programs are.

    One program is enough, and the others make room. The last one is the last to be put in place.
    """
    if (tl.program_id(0) == tl.num_programs(0) - 1) & (tl.program_id(1) == tl.num_programs(1) - 1):
        tl.extra.cuda.gdc_wait()


@triton.jit
@no_type_check
def _merge_prefix(
    row_max,
    row_sum,
    acc,
    out,
    prefix_lse,
    prefix_lse_head_stride,
    places,
    tokens,
    heads,
    has_prefix,
    VALUE_HEAD_SIZE: tl.constexpr,
    ADAPTED: tl.constexpr,
):
    """Take what another kernel answered over the keys before a tree into the softmax over its nodes.

    The other answer has an infinite log-sum-exp, of either sign, where it met NaN; where it saw no key, it is ignored.
    If it is `ADAPTED`, both are said by the log-sum-exp: NaN, and minus infinity.
    """
    LOG2E: tl.constexpr = 1.4426950408889634
    at_dv = tl.arange(0, acc.shape[1])
    logs = tl.load(prefix_lse + heads * prefix_lse_head_stride + tokens, mask=has_prefix, other=float("-inf"))
    if not ADAPTED:
        logs = tl.where(has_prefix & (tl.abs(logs) == float("inf")), float("nan"), logs)
    values = tl.load(
        out + places[:, None] * VALUE_HEAD_SIZE + at_dv[None, :],
        mask=has_prefix[:, None] & (at_dv < VALUE_HEAD_SIZE)[None, :],
        other=0.0,
    )
    new_row_max = tl.maximum(row_max, logs * LOG2E)
    base = tl.where(new_row_max == float("-inf"), 0.0, new_row_max)
    alpha, weight = tl.exp2(row_max - base), tl.exp2(logs * LOG2E - base)
    acc = acc * alpha[:, None] + weight[:, None] * values.to(tl.float32)
    return new_row_max, row_sum * alpha + weight, acc


@triton.jit(do_not_specialize=CHANGING)
@no_type_check
def _attend_kernel(
    query,
    key,
    value,
    out,  # [t, h, dv] in the type of the query, or [splits, t, h, dv] in float32
    lse,  # [t, h] or [splits, t, h]; None to recompute `out`
    block_table,
    cu_seqlens_q,
    cu_seqlens_k,
    seq_lens,
    query_positions,
    first_keys,
    first_visible,  # [t], None where a window says who sees whom
    last_visible,
    tree_lens,
    depths,  # [b, w]
    ancestors,  # [b, w, MASK_WORDS]
    tree_width,
    prefix_lse,  # [h, t]; None but where `out` holds the answer over the keys before a tree
    prefix_lse_head_stride,
    alibi_slopes,
    sinks,
    query_strides,
    key_strides,
    value_strides,
    table_row_stride,
    table_stride,
    num_tokens,
    num_seqs,
    splits,
    scale,
    softcap,
    left,
    right,
    query_number,  # of codes: their scales, and the sequences of the batch that those are of
    value_number,
    query_scales,
    key_scales,
    value_scales,
    group_scales,  # of packed latents
    query_scale_strides,
    key_scale_strides,
    value_scale_strides,
    group_scale_strides,
    sequences,
    NUM_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    VALUE_HEAD_SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    INT64_OFFSETS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_SEQS: tl.constexpr,
    SPLIT: tl.constexpr,
    RUN: tl.constexpr,
    BALANCE: tl.constexpr,
    ONE_TILE: tl.constexpr,
    SOFTCAP: tl.constexpr,
    LEFT: tl.constexpr,
    RIGHT: tl.constexpr,
    LARGEST_TILE: tl.constexpr,
    ENDS: tl.constexpr,
    STARTS: tl.constexpr,
    OVERLAP: tl.constexpr,
    AFTER: tl.constexpr,
    CODES: tl.constexpr,
    ROUND_QUERY: tl.constexpr,
    HAS_FP8_CVT: tl.constexpr,
    MASK_WORDS: tl.constexpr,
    VALUES_IN_KEYS: tl.constexpr,
    SAME_STRIDES: tl.constexpr,
    ALIBI_SQRT: tl.constexpr,
    ROW_ALIGN: tl.constexpr,
):
    REPAIR: tl.constexpr = lse is None
    if OVERLAP and REPAIR:
        tl.extra.cuda.gdc_wait()  # for what has fixed up the outputs
    elif OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()  # the reduction may be put in place now; it waits for our results itself
    LOG2E: tl.constexpr = 1.4426950408889634
    NUM_KV_HEADS: tl.constexpr = NUM_HEADS // GROUP
    kv_head = tl.program_id(0) % NUM_KV_HEADS
    tile = tl.program_id(0) // NUM_KV_HEADS
    split = tl.program_id(1)

    # Which rows of which sequence.
    if ENDS > 0:
        sequence = tile // (ENDS + STARTS)
    else:
        sequence, first_row = find_tile(cu_seqlens_q, tile, num_seqs, GROUP, BLOCK_M, ONE_TILE)
    first_query = tl.load(cu_seqlens_q + sequence)
    query_len = tl.load(cu_seqlens_q + sequence + 1) - first_query
    seq_len = tl.load(seq_lens + sequence)
    if ENDS > 0:  # the last tiles, from the end on, and then the first ones that are none of the last
        place = tile % (ENDS + STARTS)
        of_sequence = tl.cdiv(query_len * GROUP, BLOCK_M)
        here = tl.where(place < ENDS, of_sequence - 1 - place, place - ENDS)
        is_one = (here >= 0) & ((place < ENDS) | (here < of_sequence - ENDS))
        first_row = tl.where(is_one, here * BLOCK_M, query_len * GROUP)
    if first_row >= query_len * GROUP:
        if not (SPLIT or REPAIR):
            _fill_padding_rows(
                out, lse, cu_seqlens_q, tile, kv_head, num_tokens, num_seqs, NUM_KV_HEADS, GROUP, VALUE_HEAD_SIZE
            )
        if AFTER:
            _wait_for_level_before()
        return
    context = seq_len - query_len  # negative where a sequence has more queries than keys
    rows = first_row + tl.arange(0, BLOCK_M)
    is_row = rows < query_len * GROUP
    tokens = (first_query + rows // GROUP).to(tl.int64)
    heads = kv_head * GROUP + rows % GROUP
    positions, first_position, last_position = find_positions(
        query_positions, first_keys, sequence, tokens, rows, is_row, first_row, context, query_len, GROUP, BLOCK_M
    )

    # Which keys: those that some row sees, and of them the run of this split.
    first_seen, last_key = visible_keys(first_position, last_position, seq_len, left, right, LEFT, RIGHT)
    first_of_rows, last_of_rows = None, None
    if first_visible is not None:
        first_of_rows, last_of_rows, first_seen, last_key = find_intervals(
            first_visible, last_visible, first_keys, sequence, tokens, is_row, seq_len
        )
    tree_start, node_depths, row_ancestors = None, None, None
    if MASK_WORDS > 0:
        tree_len = tl.load(tree_lens + sequence)
        tree_start = seq_len - tree_len
        nodes = sequence.to(tl.int64) * tree_width + tree_len - query_len + rows // GROUP  # of the rows
        node_depths = depths + sequence.to(tl.int64) * tree_width
        row_ancestors = ancestors + nodes * MASK_WORDS
        if prefix_lse is not None:
            first_seen = tl.maximum(first_seen, tree_start)
    first_key = first_seen // BLOCK_N * BLOCK_N
    if prefix_lse is not None:
        if MASK_WORDS > 0:
            first_key = first_seen  # no other row has to begin its steps there
        elif first_seen >= last_key:
            return  # the other answer is the whole one
    places = split.to(tl.int64) * num_tokens * NUM_HEADS + tokens * NUM_HEADS + heads
    if REPAIR:
        VALUE_PAD: tl.constexpr = triton.next_power_of_2(VALUE_HEAD_SIZE)
        at_dv = tl.arange(0, VALUE_PAD)
        may_have_nan = is_row
        if RIGHT and (not LEFT or query_positions is None):
            # What is nobody's lies past the sequence's end, which only its last rows load, or before the first window.
            at_an_end = positions - seq_len + LARGEST_TILE >= -right
            if LEFT:
                begin = context - tl.minimum(left, tl.maximum(context, 0))
                at_an_end |= (begin > 0) & (positions - begin - LARGEST_TILE < left)
            may_have_nan &= at_an_end
        given = tl.load(
            out + places[:, None] * VALUE_HEAD_SIZE + at_dv[None, :],
            mask=may_have_nan[:, None] & (at_dv < VALUE_HEAD_SIZE)[None, :],
            other=0.0,
        )
        if tl.max((given != given).to(tl.int32)) == 0:
            return
    if SPLIT:
        if RUN > 0:
            begin = first_key // RUN * RUN + split * RUN
            first_key = tl.multiple_of(tl.maximum(first_key, begin), BLOCK_N)
            last_key = tl.minimum(last_key, begin + RUN)
        else:
            steps = tl.cdiv(tl.maximum(last_key - first_key, 0), BLOCK_N)
            if BALANCE:
                KNOWN: tl.constexpr = query_positions is None  # else all keys are counted
                all_steps = _count_steps(
                    cu_seqlens_q,
                    seq_lens,
                    num_seqs,
                    left,
                    right,
                    LEFT and KNOWN,
                    RIGHT and KNOWN,
                    BLOCK_N,
                    BLOCK_SEQS,
                )
                share = steps.to(tl.float32) * num_seqs / tl.maximum(all_steps, 1).to(tl.float32)  # 1 is the average
                splits = tl.minimum(tl.maximum((share * splits + 0.9).to(tl.int32), 1), tl.num_programs(1))
            keys = tl.cdiv(steps, splits) * BLOCK_N
            first_key += split * keys
            last_key = tl.minimum(last_key, first_key + keys)
        if first_key >= last_key:
            tl.store(lse + places, tl.full([BLOCK_M], float("-inf"), tl.float32), mask=is_row)
            if AFTER:
                _wait_for_level_before()
            return

    slopes = None
    if alibi_slopes is not None:
        slopes = tl.load(alibi_slopes + heads, mask=is_row, other=0.0).to(tl.float32) * LOG2E
    if CODES == "e4m3" or CODES == "e5m2":  # what is the same for all keys of a head goes to the scores, or the answer
        member, of_head = sequence.to(tl.int64), kv_head.to(tl.int64)
        if sequences is not None:
            member = tl.load(sequences + sequence).to(tl.int64)
        if query_scales is not None:
            query_number = tl.load(query_scales + member * query_scale_strides[0] + of_head * query_scale_strides[1])
            scale *= query_number
        if key_scales is not None:
            scale *= tl.load(key_scales + member * key_scale_strides[0] + of_head * key_scale_strides[1])
        if value_scales is not None:
            value_number = tl.load(value_scales + member * value_scale_strides[0] + of_head * value_scale_strides[1])
    if BLOCK_M == 8:
        row_max, row_sum, acc = attend_few_rows(
            query + tokens * query_strides[0] + heads.to(tl.int64) * query_strides[1],
            query_strides[2],
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
            query_number,
            key_scales if CODES == "int8" else None,
            key_strides,
            value_strides,
            key_scale_strides,
            table_row_stride,
            table_stride,
            scale,
            softcap,
            left,
            right,
            HEAD_SIZE,
            VALUE_HEAD_SIZE,
            BLOCK_SIZE,
            BLOCK_M,
            BLOCK_N,
            SOFTCAP,
            LEFT,
            RIGHT,
            CODES,
            ROUND_QUERY,
            HAS_FP8_CVT,
            SAME_STRIDES,
            ALIBI_SQRT,
        )
    else:
        row_max, row_sum, acc = attend_kv_split(
            query + tokens * query_strides[0] + heads.to(tl.int64) * query_strides[1],
            query_strides[2],
            is_row,
            positions,
            first_position,
            last_position,
            key,
            value,
            block_table,
            cu_seqlens_k,
            sequence,
            kv_head,
            first_key,
            first_seen,
            last_key,
            slopes,
            query_number,
            key_scales if CODES == "int8" else None,
            key_strides,
            value_strides,
            key_scale_strides,
            table_row_stride,
            table_stride,
            scale,
            softcap,
            left,
            right,
            HEAD_SIZE,
            VALUE_HEAD_SIZE,
            BLOCK_SIZE,
            INT64_OFFSETS,
            BLOCK_M,
            BLOCK_N,
            SOFTCAP,
            LEFT,
            RIGHT,
            CODES,
            ROUND_QUERY,
            HAS_FP8_CVT,
            VALUES_IN_KEYS,
            tree_start,
            node_depths,
            row_ancestors,
            MASK_WORDS,
            ALIBI_SQRT,
            first_of_rows,
            last_of_rows,
            group_scales,
            group_scale_strides,
            ROW_ALIGN,
            prefix_lse is None,
            SPLIT,
        )
    if prefix_lse is not None:
        row_max, row_sum, acc = _merge_prefix(
            row_max,
            row_sum,
            acc,
            out,
            prefix_lse,
            prefix_lse_head_stride,
            places,
            tokens,
            heads,
            is_row & (tree_start > 0) if MASK_WORDS > 0 else is_row,
            VALUE_HEAD_SIZE,
            MASK_WORDS == 0,
        )
    sink = None
    if sinks is not None and not SPLIT:
        sink = tl.load(sinks + heads, mask=is_row, other=0.0).to(tl.float32)
    values, logs = normalize(row_max, row_sum, acc, sink)
    if CODES == "int8" and value_scales is not None:
        at_dv = tl.arange(0, values.shape[1]).to(tl.int64)
        at_scale = kv_head.to(tl.int64) * value_scale_strides[0] + at_dv * value_scale_strides[1]
        values *= tl.load(value_scales + at_scale, mask=at_dv < VALUE_HEAD_SIZE, other=0.0)[None, :]
    elif CODES != "":
        values *= value_number
    store_rows(values, logs, places, is_row, out, lse, VALUE_HEAD_SIZE)
    if not (SPLIT or REPAIR):
        _fill_padding_rows(
            out, lse, cu_seqlens_q, tile, kv_head, num_tokens, num_seqs, NUM_KV_HEADS, GROUP, VALUE_HEAD_SIZE
        )
    if AFTER:
        _wait_for_level_before()
