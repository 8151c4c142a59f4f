"""Attention over pages or rows in Triton: the keys split over programs, the parts merged by a second kernel.

One program takes a tile of query rows of one sequence, one key head, and a run of the keys that the tile can see:

                       keys  0        256       512       768  seq_len
    sequence 0, key head 0   | split 0 | split 1 | split 2 | s3 |
    sequence 1, key head 0   | split 0 | s1 |

Every split gives the softmax over its own keys and its log-sum-exp; `_reduce_kernel` merges them. How many splits a
sequence of average length gets is chosen on the host, from the number of tiles and multiprocessors; a longer one gets
more, a shorter one fewer, by its share of all keys, which the device counts: a captured graph stays right and balanced
when its sequences grow. All get the same number where the host knows that they are about as long.

Under `batch_invariant` no bit of an answer may depend on the others, nor on how many tokens of its own sequence come
with it. So a split is a fixed run of keys, whose place does not move, and parts are merged one after the other: then a
part in which a query sees nothing changes nothing.

Source: Dao et al. 2023, "Flash-Decoding"; the tiles of a ragged batch are found as in vLLM's Triton attention.
"""

from collections.abc import Callable, Sequence
from functools import cache
from typing import no_type_check

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Shaped
from torch import Tensor

from fastattn.kernels.device import is_rocm
from fastattn.kernels.gpu.codes import NO_CODES, Codes, are_pairs, codes_of, in_pairs, size_of
from fastattn.kernels.gpu.decode import attend_few_rows
from fastattn.kernels.gpu.launch import Launch, SplitLaunches
from fastattn.kernels.gpu.tile import (
    CHANGING,
    INTERPRETED,
    STEP_OF_WORDS,
    Tuning,
    attend_to_run,
    can_overlap,
    converts_fp8,
    find_positions,
    find_tile,
    fit,
    is_wide,
    keeps_values_twice,
    merge_parts,
    multiprocessors,
    normalize,
    pad,
    store_rows,
    visible_keys,
    with_scale_above_0,
)
from fastattn.kernels.problem import key_starts, latent_scales, uses_positions
from fastattn.kernels.replay import Key, key_of_launch, launch_once, recorder
from refattn.interface import (
    AttentionOptions,
    AttentionPlan,
    Batch,
    Keys,
    Latents,
    Plan,
    QuantizedPages,
    TreePlan,
)

FEWEST_KEYS = 256  # that are worth a program of their own
MOST_KEYS = 2048  # of a sequence in one program: one much longer than the others must not run alone at the end
MOST_PART_BYTES = 2**28  # that the parts of all splits may take
TOO_FEW = {1: 1.1, 2: 1.03, 3: 1.03}  # how much longer so few programs take that a multiprocessor could hold more of
LONG_RUN = 3072 * 256  # bytes of the keys of a program, from which on two of them are enough
MOSTLY = 0.9  # of the multiprocessors
EVEN = 1.25  # times the average is the longest sequence, at most, of some that need no balance
INVARIANT_RUN = 2048  # keys of a split under `batch_invariant`
BLOCK_SEQS = 128  # sequences that are counted at a time
MERGED_AT_ONCE = 64  # parts, of one head or of several
MERGED_ELEMENTS = 8192  # and elements of them, at most
LARGEST_TILE = 512  # query rows and keys, together, of a tile of a kernel whose answers are repaired


def attend(
    query: Float[Tensor, "t h d"],
    key: Float[Tensor, "s hk d"] | Shaped[Tensor, "n p hk d"],
    value: Float[Tensor, "s hk dv"] | Shaped[Tensor, "n p hk _"],
    plan: Plan,
    options: AttentionOptions,
    out: Float[Tensor, "t h dv"] | None = None,
    *,
    shared: bool = False,
    codes: Codes = NO_CODES,
) -> tuple[Float[Tensor, "t h dv"], Float[Tensor, "t h"]]:
    """Attend over pages if `key` has four dimensions, else over ragged rows.

    Args:
        query: query rows of all sequences.
        key: the pool of keys, or the key rows of all sequences; any strides.
        value: the pool of values, or the value rows.
        plan: the lengths, the block table for pages, and who may see whom.
        options: those of the layer.
        out: contiguous memory for the outputs; new memory if None.
        shared: `value` is a view of the first elements of each key: load them once, as key and as value.
        codes: what the pools hold, if it is codes; those of fp8 are seen as bytes, those of values as pairs of bytes,
            if they lie so (`fastattn.kernels.gpu.codes.in_pairs`).

    Returns:
        The outputs, and their log-sum-exps in float32.

    Source: see the module.
    """
    return attend_levels(query, key, value, [plan], options, out, shared=shared, codes=codes)


def attend_levels(
    query: Float[Tensor, "t h d"],
    key: Float[Tensor, "s hk d"] | Shaped[Tensor, "n p hk d"],
    value: Float[Tensor, "s hk dv"] | Shaped[Tensor, "n p hk _"],
    levels: Sequence[Plan],
    options: AttentionOptions,
    out: Float[Tensor, "t h dv"] | None = None,
    *,
    shared: bool = False,
    codes: Codes = NO_CODES,
    tree: TreePlan | None = None,
) -> tuple[Float[Tensor, "t h dv"], Float[Tensor, "t h"]]:
    """Attend to the keys of several levels, each with a plan of its own over the same query rows, as one softmax.

    A level's splits are parts like any other, so all levels share one reduction; and a level need not wait for the one
    before it, as long as the reduction waits for all.

    Args:
        query: query rows of all sequences.
        key: as in `attend`.
        value: as in `attend`.
        levels: the plan of each level.
        options: those of the layer; sinks count once.
        out: as in `attend`.
        shared: as in `attend`.
        codes: as in `attend`.
        tree: the trees at the end of the sequences, of the only level.

    Returns:
        The outputs, and their log-sum-exps in float32.

    Source: the module; levels of a cascade: Ye et al. 2024, "Cascade Inference".
    """
    num_tokens, num_heads = query.shape[:2]
    value_head_size = size_of(value)
    out = query.new_empty(num_tokens, num_heads, value_head_size) if out is None else out
    lse = query.new_empty(num_tokens, num_heads, dtype=torch.float32)
    batch = levels[-1].batch
    if 0 in (num_tokens, num_heads, batch.num_seqs):
        return out.zero_(), lse.fill_(-torch.inf)

    row_bytes, key_bytes = _bytes_of_a_program(query, key, value, shared)
    fewest_rows = 16 if shared or tree is not None or key.ndim == 3 else 8  # of a tile: see `attend_few_rows`
    tunings = [tune(query, key, value, level, options, row_bytes, shared, fewest_rows) for level in levels]
    if len(levels) > 1:
        tunings = [_beside_others(tuning, of_codes=bool(codes.kind)) for tuning in tunings]
    if tree is not None and tree.trees.num_words > 1:
        tunings = [tuning._replace(block_n=min(tuning.block_n, STEP_OF_WORDS)) for tuning in tunings]
    room = dict(row_bytes=row_bytes, key_bytes=key_bytes, fewest_stages=2 if shared else 1)
    spare = _spare_stages(query, shared, codes, tunings[0].block_m)
    tunings = [fit(tuning, query.device, **room, spare=spare) for tuning in tunings]
    num_parts = sum(tuning.most_splits for tuning in tunings)
    if num_parts == 1 and not options.batch_invariant:
        launch = _launch(
            query, key, value, levels[0], options, tunings[0], out, lse, shared=shared, codes=codes, tree=tree
        )
        _record(out, [(launch, 0)], 1, None, options)
        return out, lse

    parts = query.new_empty(num_parts, *out.shape, dtype=torch.float32)
    part_lses = query.new_empty(num_parts, *lse.shape, dtype=torch.float32)
    overlap = can_overlap(query.device)
    launches, first = [], 0
    for level, tuning in zip(levels, tunings, strict=True):
        pays = codes.kind and tuning.block_m <= 16 and query.itemsize == 2 and not shared
        launch = _launch(
            query,
            key,
            in_pairs(value) if pays and not are_pairs(value) else value,
            level,
            options,
            tuning,
            parts[first:] if first else parts,  # a slice takes the CPU as long as an allocation
            part_lses[first:] if first else part_lses,
            overlap=overlap,
            after=first > 0,
            shared=shared,
            codes=codes,
            tree=tree,
        )
        launches.append((launch, first))
        first += tuning.most_splits
    at_once = max(1, min(MERGED_AT_ONCE, MERGED_ELEMENTS // pad(value_head_size)))
    block_splits = 1 if options.batch_invariant else min(at_once, pad(num_parts))
    block_heads = min(at_once // block_splits, pad(num_heads))
    reduction = Launch(
        _reduce_kernel,
        (num_tokens, -(-num_heads // block_heads)),
        dict(parts=parts, part_lses=part_lses, out=out, lse=lse, sinks=_side_by_side(options.sinks)),
        dict(
            cu_seqlens_q=batch.cu_seqlens_q,
            num_tokens=num_tokens,
            num_seqs=batch.num_seqs,
            splits=num_parts,
            NUM_HEADS=num_heads,
            VALUE_HEAD_SIZE=value_head_size,
            BLOCK_HEADS=block_heads,
            BLOCK_SPLITS=block_splits,
            OVERLAP=overlap,
        ),
        dict(num_warps=4) | ({"launch_pdl": True} if overlap else {}),
    )
    _record(out, launches, num_parts, reduction, options)
    return out, lse


def attend_to_nodes(
    query: Float[Tensor, "t h d"],
    key: Float[Tensor, "n p hk d"],
    value: Float[Tensor, "n p hk dv"],
    plan: TreePlan,
    options: AttentionOptions,
    out: Float[Tensor, "t h dv"],
    prefix_lse: Float[Tensor, "h t"],
    *,
    shared: bool = False,
) -> tuple[Float[Tensor, "t h dv"], Float[Tensor, "t h"]]:
    """Attend to the nodes of trees, and take in what another kernel answered over the keys before them.

    One launch over few keys, which writes where it reads; the sinks count here.

    Args:
        query: query rows of all sequences.
        key: the pool of keys.
        value: the pool of values.
        plan: the trees.
        options: those of the layer.
        out: the answers over the keys before the trees, changed in place; rows side by side. Padding rows may hold
            anything, and so may rows whose tree has no key before it.
        prefix_lse: their log-sum-exps, natural log; infinite, of either sign, for NaN.
        shared: as in `attend`.

    Returns:
        The outputs, and their log-sum-exps in float32.

    Source: the module.
    """
    lse = query.new_empty(query.shape[:2], dtype=torch.float32)
    if not plan.trees.max_len:  # all rows are padding
        return out.zero_(), lse.fill_(-torch.inf)
    row_bytes, key_bytes = _bytes_of_a_program(query, key, value, shared)
    rows = plan.whole.batch.max_query_len * (query.shape[1] // key.shape[-2])
    tensors = query, key, value

    def launch() -> Callable[..., None]:
        if shared:
            tuning = _LATENT_16 if rows <= 16 else _LATENT_64
        else:
            tuning = Tuning(16 if rows <= 16 else 64, _fit(32, row_bytes), 4, 2, 1, 1)
        tuning = tuning._replace(block_n=max(16, min(tuning.block_n, pad(plan.trees.max_len))))
        spare = min(0, _spare_stages(query, shared, NO_CODES, tuning.block_m))
        room = dict(row_bytes=row_bytes, key_bytes=key_bytes, fewest_stages=2 if shared else 1, spare=spare)
        tuning = fit(tuning, query.device, **room)
        return _launch(
            *tensors, plan.whole, options, tuning, out, lse, shared=shared, tree=plan, prefix_lse=prefix_lse
        ).replay

    cache_key = _key_of_launch("nodes", (*tensors, out, prefix_lse), options, shared=shared)
    launch_once(plan.whole, cache_key, (*tensors, out, lse, *_of_layer(query, options).values(), prefix_lse), launch)
    return out, lse


class Launches(SplitLaunches):
    """The launches of a call, which are called as a kernel is; see `fastattn.kernels.replay`."""

    def attend(
        self,
        query: Tensor,
        keys: Keys,
        plan: AttentionPlan,
        options: AttentionOptions,
        out: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """Attend with other tensors, and other scales of the same layout; codes come as they are stored."""
        key, value, codes = pools_of(query, keys, addresses=True)
        of_reduction = (_side_by_side(options.sinks),)
        return self.replay((query, key, value), _of_layer(query, options, codes).values(), of_reduction, out)


def pools_of(query: Tensor, keys: Keys, *, addresses: bool = False) -> tuple[Tensor, Tensor, Codes]:
    """Return keys, values and what turns them into numbers.

    Latents are pages of one head, whose values are the first elements of its keys; where addresses alone are asked
    for, they are the pool as it is, where both begin.
    """
    if isinstance(keys, Latents):
        codes = NO_CODES if (scales := latent_scales(keys.cache, keys.cache_scale)) is None else codes_of(scales)
        if addresses:
            return keys.cache, keys.cache, codes
        pages = keys.cache[:, :, None, : query.shape[2]]
        return pages, pages[..., : keys.latent_rank], codes
    if isinstance(keys, QuantizedPages):
        return keys.key_cache, keys.value_cache, codes_of(keys.scales)
    key, value = keys
    return key, value, NO_CODES


def _record(
    out: Tensor,
    launches: Sequence[tuple[Launch, int]],
    num_parts: int,
    reduction: Launch | None,
    options: AttentionOptions,
) -> None:
    """Record how to replay the call that is under way; not if its scale is not positive, which changes the query."""
    into = recorder()
    if into is None or not _has_scale_above_0(options):
        return
    t, h, dv = out.shape
    made = Launches(out.shape, (t, h, dv), launches, num_parts, reduction, with_lse=into.return_lse)
    into.replay = made.attend


def _has_scale_above_0(options: AttentionOptions) -> bool:
    return options.softmax_scale is None or options.softmax_scale > 0


def _of_layer(query: Tensor, options: AttentionOptions, codes: Codes = NO_CODES) -> dict[str, Tensor | float | None]:
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
    return arguments


def _key_of_launch(name: str, tensors: tuple[Tensor, ...], options: AttentionOptions, *, shared: bool) -> Key | None:
    """Return the cache key of a launch over another kernel's output; None if it is not replayed, as in `_record`."""
    return (
        key_of_launch(f"{name} of latents" if shared else name, tensors, options)
        if _has_scale_above_0(options)
        else None
    )


def _bytes_of_a_program(query: Tensor, key: Tensor, value: Tensor, shared: bool) -> tuple[int, int]:
    """Return the bytes of a row of a tile, the longer of query and value, and of a key of a step with its value."""
    head_size, value_head_size = query.shape[2], size_of(value)
    if shared:
        elements = pad(head_size - value_head_size) + pad(value_head_size)
        row_bytes = elements * query.element_size()  # of a key, too, but for codes that become numbers in registers
        key_bytes = elements * key.element_size() if are_pairs(value) else row_bytes
        return row_bytes, key_bytes
    row_bytes = max(pad(head_size), pad(value_head_size)) * query.element_size()
    if key.dtype != query.dtype:  # codes, and a place where they become numbers
        return row_bytes, 2 * row_bytes + _row_bytes(key) + _row_bytes(value)
    return row_bytes, 2 * row_bytes


def _spare_stages(query: Tensor, shared: bool, codes: Codes, block_m: int) -> int:
    """Return how many steps in flight take no shared memory; -1 if one takes it twice."""
    if not shared or codes.kind or query.itemsize != 2:
        return 0
    if block_m == 16:
        return 1
    return -int(not INTERPRETED and keeps_values_twice(query.device))


def _row_bytes(x: Tensor) -> int:
    """Return the bytes that a tile has for a key or a value."""
    return pad(x.shape[-1]) * x.element_size()


def repair(
    out: Float[Tensor, "t h dv"],
    query: Float[Tensor, "t h d"],
    key: Float[Tensor, "s hk d"] | Float[Tensor, "n p hk d"],
    value: Float[Tensor, "s hk dv"] | Float[Tensor, "n p hk dv"],
    plan: Plan,
    options: AttentionOptions,
    *,
    shared: bool = False,
) -> None:
    """Compute again, in place, what another kernel answered with NaN because it multiplied memory that nobody sees.

    A kernel that loads whole tiles gives a weight of 0 to values past a sequence's end, before a window, or of the
    next sequence: harmless while they are finite, but 0 times NaN is NaN. The log-sum-exp does not suffer, as the
    scores of such keys are replaced. A NaN that a query may see comes out again.

    It costs a launch, and a look at the answers that a tile of at most `LARGEST_TILE` rows and keys can have spoilt:
    those of the last queries of a sequence, in a window also of the first ones, of all queries without a causal mask.

    Args:
        out: the answers; rows side by side.
        query: what they were computed from, and so on.
        key: as in `attend`.
        value: as in `attend`.
        plan: the lengths, the block table for pages, and who may see whom.
        options: those of the layer; the sinks are in `out` already.
        shared: as in `attend`.

    Source: the module.
    """
    if 0 in (*query.shape[:2], plan.batch.num_seqs):
        return
    row_bytes, key_bytes = _bytes_of_a_program(query, key, value, shared)
    tensors = query, key, value

    def launch() -> Callable[..., None]:
        tuning = _LATENT_16 if shared else Tuning(64, _fit(64, row_bytes), 4, 3, 1, 1)
        room = dict(row_bytes=row_bytes, key_bytes=key_bytes, fewest_stages=2 if shared else 1)
        tuning = fit(tuning, query.device, **room)
        return _launch(*tensors, plan, options, tuning, out, None, shared=shared).replay

    cache_key = _key_of_launch("repair", (*tensors, out), options, shared=shared)
    launch_once(plan, cache_key, (*tensors, out, None, *_of_layer(query, options).values()), launch)


def attend_to_latent_nodes(
    query: Float[Tensor, "t h d"],
    cache: Float[Tensor, "n p c"],
    plan: TreePlan,
    options: AttentionOptions,
    latent_rank: int,
    answer: tuple[Float[Tensor, "t h r"], Float[Tensor, "t h"]],
) -> tuple[Float[Tensor, "t h r"], Float[Tensor, "t h"]]:
    """Do the same over latents, given another kernel's answer over those before the trees; see `attend_to_nodes`.

    Source: the module.
    """
    pages, (out, lse) = cache[:, :, None, : query.shape[2]], answer
    return attend_to_nodes(query, pages, pages[..., :latent_rank], plan, options, out, lse.T.contiguous(), shared=True)


def repair_latents(
    out: Float[Tensor, "t h r"],
    query: Float[Tensor, "t h d"],
    cache: Float[Tensor, "n p c"],
    plan: Plan,
    options: AttentionOptions,
    latent_rank: int,
) -> None:
    """Do the same for what a kernel answered over latents; see `repair` and `fastattn.mla.attention`.

    Source: the module.
    """
    pages = cache[:, :, None, : query.shape[2]]
    repair(out, query, pages, pages[..., :latent_rank], plan, options, shared=True)


def _launch(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    plan: Plan,
    options: AttentionOptions,
    tuning: Tuning,
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
        query: as in `attend`, and what follows.
        key: likewise.
        value: likewise.
        plan: likewise.
        options: likewise.
        tuning: the shape of the launch.
        out: the answer, or the first of the parts.
        lse: likewise; None to repair the answer.
        overlap: whether the launch after this one may begin early; None if this one gives the answer, not parts.
        after: another level was launched before, that what follows has to wait for, too.
        shared: as in `attend`.
        codes: as in `attend`.
        tree: the trees at the end of the sequences, whose plan this is.
        prefix_lse: the log-sum-exps `[h, t]` of what `out` holds already, the answer over the keys before the trees;
            None to attend to all keys.
    """
    batch = plan.batch
    num_tokens, num_heads, head_size = query.shape
    num_kv_heads, value_head_size = value.shape[-2], size_of(value)
    group = num_heads // num_kv_heads
    block_table = batch.block_table if key.ndim == 4 else None
    left, right = plan.window
    positions = plan.positions if uses_positions(plan, options) else None
    query, scale = with_scale_above_0(query, options.softmax_scale)
    one_tile = _is_one_tile(batch, group, tuning.block_m)
    tiles = _count_tiles(batch, num_tokens, group, tuning.block_m)
    return Launch(
        _attend_kernel,
        (tiles * num_kv_heads, tuning.most_splits),
        dict(query=query, key=key, value=value, out=out, lse=lse)
        | _of_layer(query, options, codes)
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
            prefix_lse=None,
            block_table=block_table,
            cu_seqlens_q=batch.cu_seqlens_q,
            cu_seqlens_k=key_starts(plan) if block_table is None else None,
            seq_lens=batch.seq_lens,
            query_positions=_side_by_side(positions),
            first_keys=None if positions is None else _side_by_side(plan.first_keys),
            tree_lens=None if tree is None else _side_by_side(tree.trees.lens),
            depths=None if tree is None else _side_by_side(tree.depths),
            ancestors=None if tree is None else _side_by_side(tree.ancestors),
            tree_width=0 if tree is None else tree.trees.max_len,
            prefix_lse_head_stride=0 if prefix_lse is None else prefix_lse.stride(0),
            query_strides=query.stride(),
            key_strides=key.stride(),
            value_strides=value.stride(),
            query_scale_strides=_strides_by_head(codes.query),
            key_scale_strides=_strides_by_head(codes.key),
            value_scale_strides=_strides_by_head(codes.value),
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
            WIDE=block_table is not None
            and is_wide(key.shape[1], key.stride(1), value.stride(1), *_strides_by_head(codes.key)[1:2]),
            BLOCK_M=tuning.block_m,
            BLOCK_N=tuning.block_n,
            BLOCK_SEQS=BLOCK_SEQS,
            SPLIT=overlap is not None,
            RUN=tuning.run,
            BALANCE=tuning.most_splits > tuning.splits,
            ONE_TILE=one_tile,
            SOFTCAP=options.softcap > 0,
            LEFT=left >= 0,
            RIGHT=right >= 0,
            LARGEST_TILE=LARGEST_TILE,
            OVERLAP=bool(overlap),
            AFTER=bool(overlap and after),
            CODES=codes.kind,
            ROUND_QUERY=codes.rounds_query,
            HARDWARE=converts_fp8(query.device),
            WORDS=0 if tree is None else tree.trees.num_words,
            SHARED=shared,
            SAME_STRIDES=_in_bytes(key) == _in_bytes(value),
            ALIBI_SQRT=options.alibi_sqrt,
        ),
        dict(num_warps=tuning.num_warps, num_stages=tuning.num_stages)
        | ({"launch_pdl": True} if overlap and after else {})
        | ({"maxnreg": tuning.registers} if tuning.registers and not (INTERPRETED or is_rocm()) else {}),
    )


def _in_bytes(pool: Tensor) -> list[int]:
    """Return how many bytes apart blocks are, tokens of a block, and heads."""
    return [stride * pool.itemsize for stride in pool.stride()[:3]]


def _strides_by_head(scales: Tensor | None) -> tuple[int, ...]:
    """Return the strides of scales, with one of 0 for the sequences where there is one for each head only."""
    if scales is None:
        return ()
    return (0, *scales.stride()) if scales.ndim == 1 else scales.stride()


def _side_by_side(numbers: Tensor | None) -> Tensor | None:
    """Return numbers such that a pointer to the first leads to all of them."""
    return None if numbers is None else numbers.contiguous()


def _is_one_tile(batch: Batch, group: int, block_m: int) -> bool:
    """Return whether a tile holds all query rows of any sequence."""
    return batch.max_query_len * group <= block_m


def _count_tiles(batch: Batch, num_tokens: int, group: int, block_m: int) -> int:
    """Bound the number of tiles: one that is not full for each sequence, beside the full ones."""
    if _is_one_tile(batch, group, block_m):
        return batch.num_seqs
    if batch.num_seqs == 1:
        return -(-num_tokens * group // block_m)
    return batch.num_seqs + num_tokens * group // block_m


def tune(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    plan: Plan,
    options: AttentionOptions,
    row_bytes: int,
    shared: bool = False,
    fewest_rows: int = 16,
) -> Tuning:
    """Choose the shape of a launch from sizes that the host knows.

    Under `batch_invariant` nothing depends on the batch: not the tile, not the step, and not where a split begins.
    """
    batch, num_kv_heads = plan.batch, key.shape[-2]
    group = query.shape[1] // num_kv_heads
    visible = _most_visible_keys(plan, options)
    if options.batch_invariant:
        may_begin_inside = plan.window[0] >= 0
        splits = max(1, -(-visible // INVARIANT_RUN) + may_begin_inside)
        if shared:
            return _LATENT_64._replace(splits=splits, most_splits=splits, run=INVARIANT_RUN)
        return Tuning(64, _fit(64, row_bytes), 4, 3, splits, splits, run=INVARIANT_RUN)
    rows = batch.max_query_len * group
    many_rows = 64 if rows <= 64 or row_bytes > 256 or shared else 128
    block_m = fewest_rows if rows <= fewest_rows else 16 if rows <= 16 else many_rows
    tiles = _count_tiles(batch, query.shape[0], group, block_m)
    tune_tiles = _tune_latents if shared else _tune
    of_codes = key.dtype != query.dtype
    if block_m <= 16 and of_codes and query.dtype != torch.float32:  # steps of as many bytes, be they codes
        row_bytes = max(_row_bytes(key), _row_bytes(value))
    programs, num_multiprocessors = tiles * num_kv_heads, multiprocessors(query.device)
    tuning = tune_tiles(block_m, row_bytes, programs, visible, num_multiprocessors, of_codes)
    if shared and are_pairs(value):
        tuning = tuning._replace(block_n=2 * tuning.block_n)  # steps of as many bytes
    if batch.num_seqs == 1 or rows > block_m or _about_as_long(batch, visible):  # there is nothing to balance
        return tuning
    room = MOST_PART_BYTES // (4 * query.shape[0] * query.shape[1] * size_of(value))
    return tuning._replace(most_splits=max(tuning.splits, min(room, -(-visible // MOST_KEYS))))


def _about_as_long(batch: Batch, visible: int) -> bool:
    """Return whether the sequences are known to have about as many keys each, of those that are visible."""
    return batch.num_keys is not None and EVEN * batch.num_keys >= visible * batch.num_seqs


@cache
def _tune(
    block_m: int, row_bytes: int, programs: int, visible: int, num_multiprocessors: int, of_codes: bool = False
) -> Tuning:
    """Choose the splits that keep all multiprocessors busy to the end, and how a program works then.

    As long as all programs run at once, the time is that of the multiprocessor with the most keys to read; it takes
    about 100 KB on their way to it to keep the memory busy. More programs than fit come and go, at a small loss. One
    sequence of 131072 keys takes 127 us in 33 splits, two programs each, and 132 us in 66; of codes of 8 bits, 70 us in
    49 and 76 us in 66.

    Source: measured on an NVIDIA H200 with bfloat16 and head size 128; wider rows get shorter steps.
    """
    few_rows = block_m <= 16
    at_once = 3 if block_m == 8 and of_codes else 4 if few_rows else 128 // block_m  # that a multiprocessor holds

    def time(splits: int) -> float:
        on_one = -(-programs * splits // num_multiprocessors)
        if on_one > at_once:
            return 1.05 * programs / num_multiprocessors
        is_long = on_one == 2 and visible * row_bytes >= splits * LONG_RUN  # and there are fewer parts to merge
        return on_one / splits * (1.0 if not few_rows or on_one == at_once or is_long else TOO_FEW[on_one])

    splits = min(range(1, max(1, visible // FEWEST_KEYS) + 1), key=time)
    on_one = -(-programs * splits // num_multiprocessors)
    block_n = _fit(64, row_bytes)
    if few_rows and on_one > 3:
        return Tuning(block_m, block_n, 2, 2, splits, splits)
    return Tuning(block_m, block_n, 8 if block_m == 128 else 4, 2 if at_once == 3 else 3, splits, splits)


_LATENT_16 = Tuning(16, 32, 4, 3, 1, 1)
_LATENT_64 = Tuning(64, 64, 8, 2, 1, 1)


@cache
def _tune_latents(
    block_m: int, row_bytes: int, programs: int, visible: int, num_multiprocessors: int, of_codes: bool = False
) -> Tuning:
    """Choose how often to split the keys where each is a value, too, and how a program works then.

    A multiprocessor holds two programs of 16 rows, or one of 64. One of 16 with longer steps is as good, if nearly all
    have one: 64 sequences of 8192 keys take 144 us in two splits each, and 148 us in four.

    Source: measured on an NVIDIA H200 with bfloat16, latents of 512 elements and rotary keys of 64. With 64 rows the
    compiler (Triton 3.6) lets both halves of a program compute the same scores, as it lays the warps of a product along
    its rows if the result goes into another product.
    """
    tuning, at_once = (_LATENT_16, 2) if block_m == 16 else (_LATENT_64, 1)
    splits = min(num_multiprocessors // programs, visible // FEWEST_KEYS)
    if block_m == 16 and not of_codes and programs * splits >= MOSTLY * num_multiprocessors:
        return tuning._replace(block_n=64, splits=splits, most_splits=splits)

    def time(splits: int) -> float:
        on_one = -(-programs * splits // num_multiprocessors)
        if on_one > at_once:
            return 1.05 * programs / num_multiprocessors
        return on_one / splits * (1.0 if on_one == at_once else 1.2)

    splits = min(range(1, max(1, visible // FEWEST_KEYS) + 1), key=time)
    return tuning._replace(splits=splits, most_splits=splits)


def _beside_others(tuning: Tuning, of_codes: bool = False) -> Tuning:
    """Change a launch so that those of other levels have room beside it: one multiplies while the other reads.

    Codes take registers while they become numbers, so with them it is smaller tiles that make room, and no limit.

    Source: measured on an NVIDIA H200; with all registers or all multiprocessors taken, one level waits for the other.
    8 warps with 168 registers a thread leave 4 warps 176; the compiler takes fewer by itself
    (tests/kernels/test_compile.py).
    """
    if tuning.run:
        return tuning  # which keys a split has must not depend on other levels either
    if tuning.block_m <= 16:
        return tuning._replace(num_warps=4, num_stages=2)
    if of_codes and tuning.block_m == 128:
        splits, most_splits = max(1, tuning.splits // 2), max(1, tuning.most_splits // 2)
        return tuning._replace(block_m=64, num_warps=4, splits=splits, most_splits=most_splits)
    splits = max(1, tuning.splits * 7 // 8)
    registers = 168 if tuning.num_warps == 8 else None
    return tuning._replace(splits=splits, most_splits=max(splits, tuning.most_splits * 7 // 8), registers=registers)


def _fit(block_n: int, row_bytes: int) -> int:
    """Return the keys of a step that are as many bytes as `block_n` keys of 256 bytes."""
    return max(16, min(128, block_n * 256 // row_bytes))


def _most_visible_keys(plan: Plan, options: AttentionOptions) -> int:
    """Bound the keys that the queries of one sequence see, together; those at any positions may see all."""
    batch, (left, right) = plan.batch, plan.window
    visible = batch.max_seq_len
    if not uses_positions(plan, options) and left >= 0 and right >= 0:
        visible = min(visible, left + batch.max_query_len + right)
    return visible


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
def _take_prefix(
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
):
    """Take what another kernel answered over the keys before a tree into the softmax over its nodes.

    Its log-sum-exp is infinite, of either sign, where it saw NaN; where it saw no key nothing of it counts.
    """
    LOG2E: tl.constexpr = 1.4426950408889634
    at_dv = tl.arange(0, acc.shape[1])
    logs = tl.load(prefix_lse + heads * prefix_lse_head_stride + tokens, mask=has_prefix, other=float("-inf"))
    logs = tl.where(has_prefix & (tl.abs(logs) == float("inf")), float("nan"), logs)
    values = tl.load(
        out + places[:, None] * VALUE_HEAD_SIZE + at_dv[None, :],
        mask=has_prefix[:, None] & (at_dv < VALUE_HEAD_SIZE)[None, :],
        other=0.0,
    )
    new_row_max = tl.maximum(row_max, logs * LOG2E)
    base = tl.where(new_row_max == float("-inf"), 0.0, new_row_max)
    shrink, weight = tl.exp2(row_max - base), tl.exp2(logs * LOG2E - base)
    acc = acc * shrink[:, None] + weight[:, None] * values.to(tl.float32)
    return new_row_max, row_sum * shrink + weight, acc


@triton.jit(do_not_specialize=CHANGING)
@no_type_check
def _attend_kernel(
    query,
    key,
    value,
    out,  # [t, h, dv] in the type of the query, or [splits, t, h, dv] in float32
    lse,  # [t, h] or [splits, t, h]; None to repair `out`
    block_table,
    cu_seqlens_q,
    cu_seqlens_k,
    seq_lens,
    query_positions,
    first_keys,
    tree_lens,
    depths,  # [b, w]
    ancestors,  # [b, w, WORDS]
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
    query_scale_strides,
    key_scale_strides,
    value_scale_strides,
    sequences,
    NUM_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    VALUE_HEAD_SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WIDE: tl.constexpr,
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
    OVERLAP: tl.constexpr,
    AFTER: tl.constexpr,
    CODES: tl.constexpr,
    ROUND_QUERY: tl.constexpr,
    HARDWARE: tl.constexpr,
    WORDS: tl.constexpr,
    SHARED: tl.constexpr,
    SAME_STRIDES: tl.constexpr,
    ALIBI_SQRT: tl.constexpr,
):
    REPAIR: tl.constexpr = lse is None
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()  # the reduction may be put in place now; it waits for our results itself
    LOG2E: tl.constexpr = 1.4426950408889634
    NUM_KV_HEADS: tl.constexpr = NUM_HEADS // GROUP
    kv_head = tl.program_id(0) % NUM_KV_HEADS
    tile = tl.program_id(0) // NUM_KV_HEADS
    split = tl.program_id(1)

    # Which rows of which sequence.
    sequence, first_row = find_tile(cu_seqlens_q, tile, num_seqs, GROUP, BLOCK_M, ONE_TILE)
    first_query = tl.load(cu_seqlens_q + sequence)
    query_len = tl.load(cu_seqlens_q + sequence + 1) - first_query
    seq_len = tl.load(seq_lens + sequence)
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
    tree_start, node_depths, row_ancestors = None, None, None
    if WORDS > 0:
        tree_len = tl.load(tree_lens + sequence)
        tree_start = seq_len - tree_len
        nodes = sequence.to(tl.int64) * tree_width + tree_len - query_len + rows // GROUP  # of the rows
        node_depths = depths + sequence.to(tl.int64) * tree_width
        row_ancestors = ancestors + nodes * WORDS
        if prefix_lse is not None:
            first_seen = tl.maximum(first_seen, tree_start)
    first_key = first_seen // BLOCK_N * BLOCK_N
    if prefix_lse is not None:
        first_key = first_seen  # no other row has to begin its steps there
    places = split.to(tl.int64) * num_tokens * NUM_HEADS + tokens * NUM_HEADS + heads
    if REPAIR:
        VALUE_PAD: tl.constexpr = triton.next_power_of_2(VALUE_HEAD_SIZE)
        at_dv = tl.arange(0, VALUE_PAD)
        may_be_spoilt = is_row
        if RIGHT and (not LEFT or query_positions is None):
            # What is nobody's lies past the sequence's end, which only its last rows load, or before the first window.
            at_an_end = positions - seq_len + LARGEST_TILE >= -right
            if LEFT:
                begin = context - tl.minimum(left, tl.maximum(context, 0))
                at_an_end |= (begin > 0) & (positions - begin - LARGEST_TILE < left)
            may_be_spoilt &= at_an_end
        given = tl.load(
            out + places[:, None] * VALUE_HEAD_SIZE + at_dv[None, :],
            mask=may_be_spoilt[:, None] & (at_dv < VALUE_HEAD_SIZE)[None, :],
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
        member = sequence
        if sequences is not None:
            member = tl.load(sequences + sequence)
        if query_scales is not None:
            query_number = tl.load(query_scales + member * query_scale_strides[0] + kv_head * query_scale_strides[1])
            scale *= query_number
        if key_scales is not None:
            scale *= tl.load(key_scales + member * key_scale_strides[0] + kv_head * key_scale_strides[1])
        if value_scales is not None:
            value_number = tl.load(value_scales + member * value_scale_strides[0] + kv_head * value_scale_strides[1])
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
            HARDWARE,
            SAME_STRIDES,
            ALIBI_SQRT,
        )
    else:
        row_max, row_sum, acc = attend_to_run(
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
            WIDE,
            BLOCK_M,
            BLOCK_N,
            SOFTCAP,
            LEFT,
            RIGHT,
            CODES,
            ROUND_QUERY,
            HARDWARE,
            SHARED,
            tree_start,
            node_depths,
            row_ancestors,
            WORDS,
            ALIBI_SQRT,
        )
    if prefix_lse is not None:
        row_max, row_sum, acc = _take_prefix(
            row_max,
            row_sum,
            acc,
            out,
            prefix_lse,
            prefix_lse_head_stride,
            places,
            tokens,
            heads,
            is_row & (tree_start > 0),
            VALUE_HEAD_SIZE,
        )
    sink = None
    if sinks is not None and not SPLIT:
        sink = tl.load(sinks + heads, mask=is_row, other=0.0).to(tl.float32)
    values, logs = normalize(row_max, row_sum, acc, sink)
    if CODES == "int8" and value_scales is not None:
        at_dv = tl.arange(0, values.shape[1])
        at_scale = kv_head * value_scale_strides[0] + at_dv * value_scale_strides[1]
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


@triton.jit(do_not_specialize=CHANGING)
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
    BLOCK_HEADS: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    is_head = heads < NUM_HEADS
    is_query = token < tl.load(cu_seqlens_q + num_seqs)
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
    VALUE_PAD: tl.constexpr = triton.next_power_of_2(VALUE_HEAD_SIZE)
    at_dv = tl.arange(0, VALUE_PAD)
    places = token * NUM_HEADS + heads
    row_max = tl.full([BLOCK_HEADS], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_HEADS], tl.float32)
    acc = tl.zeros([BLOCK_HEADS, VALUE_PAD], tl.float32)
    for first in range(0, splits, BLOCK_SPLITS):
        split = first + tl.arange(0, BLOCK_SPLITS)[None, :]
        part_places = split.to(tl.int64) * num_tokens * NUM_HEADS + places[:, None]
        # No part of a padding row was written, and no value of a split without keys. The values are loaded before that
        # is known, so that one load need not wait for the other.
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
