"""Attention over pages or rows in Triton: keys are split over programs, partial outputs merged by a second kernel.

One program takes a tile of query rows of one sequence and KV head, and a split of the keys that the tile can see:

                       keys  0        256       512       768  seq_len
    sequence 0, KV head 0    | split 0 | split 1 | split 2 | s3 |
    sequence 1, KV head 0    | split 0 | s1 |

Each split gives a partial output, the softmax over its own keys, and its log-sum-exp; `reduce_splits` merges them. The
host chooses the number of splits of a sequence of average length, from the number of tiles and SMs. A longer sequence
gets more, a shorter one fewer, by its share of all keys, which the device counts: a captured graph stays correct and
balanced while its sequences grow. All get the same number if the host knows that they are about equally long.

Under `batch_invariant` no bit of a row may depend on other sequences, or on the number of tokens of its own sequence in
the batch. So steps and splits have a fixed size and place in the sequence, also where a window has removed its first
blocks, and partial outputs are merged one after the other: one in which a query sees no key changes nothing.

The three questions of docs/questions.md (where are the keys, who may see whom, how do partial outputs combine) are
NamedTuples, `keys`, `mask` and `split`, that carry their own functions: `mask.look(mask, ...)` is a method call that is
resolved when the kernel is compiled, so one body serves every storage, mask and split.

The kernel of notebook 10 is here again under these names: its `part` is `program_id(1)`, `number` in `share_run` of
`merge.py`, `read` is `keys.how.load`, the block table is read by `keys.where.find`, `visible_keys` is in `masks.py`.
Read the files beside this one in the order of their use: `queries.py`, `masks.py`, `merge.py`, `keys.py`.

Source: Dao et al. 2023, "Flash-Decoding"; the tiles of a ragged batch are found as in vLLM's Triton attention.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import no_type_check

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Shaped
from torch import Tensor

from fastattn.kernels.device import is_rocm
from fastattn.kernels.problem import latent_scales, uses_positions, with_positive_scale
from fastattn.kernels.replay import Run as Replay
from fastattn.kernels.triton import latents_hopper, prompts_hopper
from fastattn.kernels.triton.expand import attend_dequantized, expands
from fastattn.kernels.triton.four_bits import int4_quantization, two_heads
from fastattn.kernels.triton.keys import keys_of
from fastattn.kernels.triton.launch import CHANGING, INTERPRETED, Launch, SplitLaunches, can_overlap
from fastattn.kernels.triton.masks import Run, Step, mask_of, phase_of_run
from fastattn.kernels.triton.merge import (
    LARGEST_TILE,
    After,
    Out,
    Part,
    Repair,
    Softmax,
    Whole,
    normalize,
    part,
    places_of,
    reduce_splits,
    store_rows,
    update_softmax,
    whole,
)
from fastattn.kernels.triton.quantized import (
    FORMATS,
    UNQUANTIZED,
    Quantization,
    pools_of_level,
    quantization_of,
    quantize_query,
    quantized_in_pairs,
)
from fastattn.kernels.triton.queries import (
    Queries,
    Sizes,
    contiguous,
    count_tiles,
    find_tile,
    has_scale_above_0,
    is_by_position,
    is_one_tile,
    layer_args,
    options_of,
)
from fastattn.kernels.triton.tuning import (
    LaunchConfig,
    bytes_of_a_program,
    fit,
    pad,
    share_sm,
    size_of,
    spare_stages,
    tune,
)
from refattn.batch import Batch
from refattn.four_bits import Int4Pages
from refattn.keys import Keys, Latents, PackedLatents, Pages, QuantizedPages, Rows
from refattn.options import AttentionOptions
from refattn.packed_latents import PACKED_FORMAT, packed_parts
from refattn.plan import Plan
from refattn.trees import AttentionPlan, TreePlan

SPLITS_PER_STEP = 64  # partial outputs that are merged at a time, of one head or of several
MERGED_ELEMENTS = 8192  # elements of these, at most

# Triton's interpreter finds a function only if it is defined above its caller.


@triton.jit
@no_type_check
def _tanh(x):
    size = tl.abs(x)
    square = x * x
    shrunk = tl.exp(-2.0 * size)
    large = (1.0 - shrunk) / (1.0 + shrunk)
    small = size * (1.0 - square * (1.0 / 3.0 - square * (2.0 / 15.0)))  # where 1 - shrunk would lose its digits
    return tl.where(x < 0.0, -1.0, 1.0) * tl.where(size < 0.05, small, large)


@triton.jit
@no_type_check
def finish_scores(products, scale, slopes, positions, j, options, KEYS_AXIS: tl.constexpr):
    """Turn products of queries at `positions` and keys at `j` into scores that lack a factor: the cap, else the scale.

    `update_softmax` multiplies by it, next to its subtraction. Done here, the compiler could fuse the two only
    where nothing is masked, and masked steps would round differently. With ALiBi slopes (times log2(e)), no factor is
    left, and scores are in base 2. Keys lie along the axis `KEYS_AXIS`.
    """
    LOG2E: tl.constexpr = 1.4426950408889634
    factor = scale
    scores = products
    if options.SOFTCAP:
        scores = _tanh(scores * (scale / options.softcap))
        factor = options.softcap
    if slopes is not None:
        far = tl.abs(tl.expand_dims(positions, KEYS_AXIS) - tl.expand_dims(j, 1 - KEYS_AXIS))
        if options.ALIBI_SQRT:
            far = tl.sqrt(far.to(tl.float32))
        scores = scores * (factor * LOG2E) - tl.expand_dims(slopes, KEYS_AXIS) * far
    return scores


@triton.jit(do_not_specialize=CHANGING)
@no_type_check
def attend(queries, keys, mask, options, split, out, TILE):
    """Attend from a tile of query rows to a run of keys, a step of keys at a time, by an online softmax.

    `split` says which share of the keys a program has: `Whole`, `Part`, `After` or `Repair` of `merge.py`. Its
    functions `before` and `after` order launches that follow one another, and fill padding rows.
    """
    split.before(split)
    tile = find_tile(queries, TILE)  # the query rows of this program
    if tile.first_row >= tile.num_rows:  # the grid is a bound; a program without rows may have padding to fill
        split.after(split, queries, out, tile, keys.VALUE_HEAD_SIZE)
        return
    sight = mask.look(mask, queries, tile, TILE)  # the keys that some row sees
    run = Run(sight.first, sight.begin, sight.end)  # a sight may have more fields; the loop needs these
    run, is_done = split.share(split, queries, mask, out, tile, run, TILE, keys.VALUE_HEAD_SIZE)  # this program's keys
    if is_done:  # it has none, or its outputs are complete
        split.after(split, queries, out, tile, keys.VALUE_HEAD_SIZE)
        return

    places = places_of(queries, tile)  # where the outputs of the rows go
    slopes = None
    if options.alibi_slopes is not None:
        slopes = tl.load(options.alibi_slopes + tile.heads, mask=tile.is_row, other=0.0).to(tl.float32)
        slopes = slopes * 1.4426950408889634  # log2(e)
    scale = keys.how.scale(keys, options.scale, tile)  # times the scale of fp8 keys of this head
    q = keys.how.query(keys, queries, tile, TILE)
    ahead = keys.where.begin(keys.where, tile, run, TILE)  # the blocks of the first step, read ahead; or its first row
    row_max = tl.full([TILE.ROWS], float("-inf"), tl.float32)
    row_sum = tl.zeros([TILE.ROWS], tl.float32)
    acc = keys.how.begin(keys, TILE)
    all_from, all_to = mask.all_visible(mask, tile, run, sight)  # the keys that every row sees
    # Three phases: 0 masks up to the first keys that all rows see, 1 needs no mask, 2 masks the rest. A single phase
    # is the whole run, and a branch masks the steps that need it.
    for phase in tl.static_range(TILE.FIRST_PHASE, TILE.PHASES):
        begin, end = phase_of_run(run, all_from, all_to, phase, TILE)
        for start in range(begin, end, TILE.KEYS):
            j = start + tl.arange(0, TILE.KEYS)
            is_key = j < run.end  # later slots are not read: NaN, or no block
            if mask.LEFT:
                is_key &= j >= run.first
            if TILE.PHASES == 3 and phase == 1:
                seen = Step(is_key, j, j)  # every row sees all of them; the last field is not read
            else:
                seen = mask.step(mask, tile, sight, start, is_key, TILE)
            place, ahead = keys.where.find(keys.where, tile, run, start, ahead, TILE)  # where are the keys?
            step = keys.how.load(keys, tile, place, seen.is_key, TILE)
            products = keys.how.products(keys, q, step, TILE)
            scores = finish_scores(products, scale, slopes, tile.positions, seen.positions, options, TILE.KEYS_AXIS)
            hidden = float("-inf")
            if TILE.PHASES == 3:  # who may see whom?
                if phase != 1:
                    scores = tl.where(mask.visible(mask, tile, seen, TILE), scores, hidden)
            elif (start < all_from) | (start + TILE.KEYS > all_to):
                scores = tl.where(mask.visible(mask, tile, seen, TILE), scores, hidden)
            # Scores still lack this factor, unless there are slopes.
            factor = options.softcap if options.SOFTCAP else scale
            weights, rescale, row_max, row_sum = update_softmax(
                scores, row_max, row_sum, factor, slopes is not None, TILE.KEYS_AXIS
            )
            value = keys.how.value(keys, tile, place, seen.is_key, step, TILE)
            acc = keys.how.add(keys, acc, rescale, weights, value, TILE)

    softmax = Softmax(row_max, row_sum, keys.how.end(keys, acc, TILE))  # tiles of few rows were transposed
    softmax = split.take(
        split, softmax, queries, out, tile, sight, keys.VALUE_HEAD_SIZE
    )  # `After`: with another kernel's
    sink = None
    if options.sinks is not None and split.SINKS:
        sink = tl.load(options.sinks + tile.heads, mask=tile.is_row, other=0.0).to(tl.float32)
    values, logs = normalize(softmax.row_max, softmax.row_sum, softmax.acc, sink)
    values = keys.how.finish(keys, values, tile)  # times the scale of quantized values
    store_rows(values, logs, places, tile.is_row, out.out, out.lse, keys.VALUE_HEAD_SIZE)
    split.after(split, queries, out, tile, keys.VALUE_HEAD_SIZE)


def launch_attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    plan: Plan,
    options: AttentionOptions,
    tuning: LaunchConfig,
    out: Out,
    split: Whole | Part | After | Repair,
    *,
    shared: bool = False,
    quantization: Quantization = UNQUANTIZED,
    tree: TreePlan | None = None,
) -> Launch:
    """Launch the kernel for one level, and return the launch, to replay it with other tensors of the same shapes.

    Args:
        query: query rows of all sequences.
        key: the pool of keys if it has four dimensions, else the key rows of all sequences; any strides.
        value: the pool of values, or the value rows.
        plan: the lengths, the block table for pages, and the mask.
        options: the layer's options.
        tuning: the launch config.
        out: where outputs go.
        split: the share of the keys that a program has, see `fastattn.kernels.triton.merge`.
        shared: `value` is a view of the first elements of each key: load them once, as key and as value.
        quantization: how the pools are quantized, if they are; see `attend_levels`.
        tree: the trees at the end of the sequences, if `plan` is theirs.
    """
    batch, (num_tokens, num_heads, _) = plan.batch, query.shape
    num_kv_heads, group = value.shape[-2], num_heads // value.shape[-2]
    after = isinstance(split, After)
    query, scale = with_positive_scale(query, options.softmax_scale)
    uses, one_tile = uses_positions(plan, options), is_one_tile(batch, group, tuning.block_m)
    by_position = options.batch_invariant and is_by_position(plan)
    tiles = batch.num_seqs if one_tile else count_tiles(batch, num_tokens, group, tuning.block_m)
    ends = starts = 0
    if isinstance(split, Repair) and not (uses or one_tile):
        tiles, ends, starts = _tiles_to_repair(plan, group, tuning.block_m, tiles)
    mask = mask_of(plan, tree, slopes=options.alibi_slopes is not None, nodes=after)
    first_phase, phases = _phases(plan, tree, tuning, shared=shared, in_parts=isinstance(split, Part))
    sizes = Sizes(
        ROWS=tuning.block_m,
        KEYS=tuning.block_n,
        KEYS_AXIS=0 if tuning.block_m == 8 else 1,
        PHASES=phases,
        FIRST_PHASE=first_phase,
        ONE_TILE=one_tile,
        ENDS=ends,
        STARTS=starts,
        LAST_FIRST=False,
        BY_POSITION=by_position,
    )
    queries = Queries(
        query=query,
        strides=query.stride(),
        cu_seqlens_q=batch.cu_seqlens_q,
        seq_lens=batch.seq_lens,
        positions=plan.positions if uses else None,
        first_keys=plan.first_keys if uses or by_position or plan.first_visible is not None else None,
        num_tokens=num_tokens,
        num_seqs=batch.num_seqs,
        HEADS=tl.constexpr(num_heads),
        GROUP=tl.constexpr(group),
    )
    aligned = not (after or by_position)
    keys = keys_of(query, key, value, plan, tuning.block_m, shared=shared, quantization=quantization, aligned=aligned)
    early = (isinstance(split, Repair) and split.OVERLAP.value) or (isinstance(split, Part) and split.AFTER_LEVEL.value)
    return Launch(
        attend,
        (tiles * num_kv_heads, tuning.most_splits),
        {"queries.query": query, "keys.key": key, "keys.value": value, "out.out": out.out, "out.lse": out.lse}
        | layer_args(query, options, quantization)
        | ({"split.prefix_lse": split.prefix_lse} if isinstance(split, After) else {}),
        dict(queries=queries, keys=keys, mask=mask, options=options_of(options, scale), split=split, out=out)
        | dict(TILE=Sizes(*map(tl.constexpr, sizes))),
        dict(num_warps=tuning.num_warps, num_stages=tuning.num_stages)
        | ({"launch_pdl": True} if early else {})
        | ({"maxnreg": tuning.registers} if tuning.registers and not (INTERPRETED or is_rocm()) else {}),
    )


def _phases(
    plan: Plan, tree: TreePlan | None, tuning: LaunchConfig, *, shared: bool, in_parts: bool
) -> tuple[int, int]:
    """Return the first phase of a run of keys, and the phase after the last one.

    Of three phases, 1 compares no positions, 0 and 2 do; a single one, (0, 1), does so by a branch.

    Three copies of the loop over latents would spill registers. Without a left side all rows see the first key, and
    phase 0 is empty. Without its loop the compiler reads the block table without shared memory: 256 rows after 8192
    keys, split, take 35 us instead of 39. Without splits this costs time: 8 such sequences take 203 us instead of 181
    (NVIDIA H200, Triton 3.6, 2026-11-27).
    """
    is_limited = plan.window != (-1, -1) or plan.first_visible is not None
    if tree is None and (tuning.block_m <= 16 or shared or not is_limited):
        return 0, 1
    all_see_first = plan.window[0] < 0 and plan.first_visible is None
    return int(in_parts and all_see_first), 3


def _tiles_to_repair(plan: Plan, group: int, rows: int, tiles: int) -> tuple[int, int, int]:
    """Return the number of tiles, and how many are at the end and at the start of each sequence; 0 for all tiles.

    Another kernel can have spoilt the last rows, and in a window also the first ones.
    """
    left, right = plan.window
    ends = -(-(LARGEST_TILE.value + right) * group // rows) + 1
    starts = -(-LARGEST_TILE.value * group // rows) + 1 if left >= 0 else 0
    few = plan.batch.num_seqs * (ends + starts)
    return (few, ends, starts) if right >= 0 and few < tiles else (tiles, 0, 0)


def attend_to_keys(
    query: Float[Tensor, "t h d"],
    keys: Keys,
    plan: AttentionPlan,
    options: AttentionOptions,
    out: Float[Tensor, "t h dv"] | None,
) -> tuple[Float[Tensor, "t h dv"], Float[Tensor, "t h"]]:
    """Attend to any storage under any plan, to several levels of pages alone; see `fastattn.dispatch`."""
    answer, lse, _ = bind_attend(query, keys, plan, options, out, True)
    return answer, lse


def bind_attend(
    query: Float[Tensor, "t h d"],
    keys: Keys,
    plan: AttentionPlan,
    options: AttentionOptions,
    out: Float[Tensor, "t h dv"] | None,
    return_lse: bool,
) -> tuple[Float[Tensor, "t h dv"], Float[Tensor, "t h"], Replay]:
    """Attend, and return the replay, too.

    A tree is one softmax with the keys before it, latents are loaded once as key and as value, and quantized values are
    dequantized in registers, or into memory where `expands` says so.
    """
    if isinstance(keys, Int4Pages | QuantizedPages) and expands(query, keys, plan, options):
        return *attend_dequantized(_attend_to_pages, query, keys, plan.own, options, out), attend_to_keys
    key, value, quantization = cache_tensors(query, keys)
    is_rounded = False
    if isinstance(keys, Latents) and keys.query_scale is not None:
        is_rounded = True
        # In the loop, queries and latents would be converted to the type of the query; in float16 neither is.
        out = query.new_empty(*query.shape[:2], keys.latent_rank) if out is None else out
        kind = torch.float16 if query.itemsize == 2 else query.dtype
        query = quantize_query(query, keys.query_scale, keys.cache.dtype, kind)
        quantization = quantization._replace(rounds_query=False)
    plans = [level.own for level in plan.levels]
    if quantization.kind and quantization.has_bytes:
        key, value = quantized_in_pairs(query, key, value, plans, options, quantization.per_byte)
    tree, shared = plan if isinstance(plan, TreePlan) else None, isinstance(keys, Latents | PackedLatents)
    if quantization.kind == "int4" and tree is None and len(plans) == 1 and plans[0].first_visible is None:
        key, value, quantization = two_heads(query, key, value, plans[0].batch, quantization)
    answer, lse, launches = attend_levels(
        query, key, value, plans, options, out, shared=shared, quantization=quantization, tree=tree, with_lse=return_lse
    )
    if launches is None or is_rounded or not has_scale_above_0(options):  # a replay leaves the query as it is
        return answer, lse, attend_to_keys
    return answer, lse, launches.attend


def _attend_to_pages(
    query: Tensor, key: Tensor, value: Tensor, plan: Plan, options: AttentionOptions, out: Tensor | None
) -> tuple[Tensor, Tensor]:
    return attend_to_keys(query, Pages(key, value), plan, options, out)


def attend_levels(
    query: Float[Tensor, "t h d"],
    key: Float[Tensor, "s hk d"] | Shaped[Tensor, "n p hk _"],
    value: Float[Tensor, "s hk dv"] | Shaped[Tensor, "n p hk _"],
    levels: Sequence[Plan],
    options: AttentionOptions,
    out: Float[Tensor, "t h dv"] | None = None,
    *,
    shared: bool = False,
    quantization: Quantization = UNQUANTIZED,
    tree: TreePlan | None = None,
    with_lse: bool = True,
) -> "tuple[Float[Tensor, 't h dv'], Float[Tensor, 't h'], Launches | None]":
    """Attend to the keys of several levels, each with its own plan over the same query rows, as one softmax.

    One reduction merges the splits of all levels. A level need not wait for the one before it, as long as the reduction
    waits for all.

    Args:
        query: query rows of all sequences.
        key: the pool of keys if it has four dimensions, else the key rows of all sequences; any strides.
        value: the pool of values, or the value rows.
        levels: the plan of each level: the lengths, the block table for pages, and the mask.
        options: the layer's options; sinks count once.
        out: contiguous memory for the outputs; new memory if None.
        shared: `value` is a view of the first elements of each key: load them once, as key and as value.
        quantization: how the pools are quantized, if they are; fp8 keys come as bytes, values as pairs of bytes if
            their strides allow it (`fastattn.kernels.triton.quantized.in_pairs`).
        tree: the trees at the end of the sequences, of the only level.
        with_lse: whether replays return the log-sum-exps, too.

    Returns:
        The outputs, their log-sum-exps in float32, and the launches; None if there was nothing to launch.

    Source: the module; levels of a cascade: Ye et al. 2024, "Cascade Inference".
    """
    num_tokens, num_heads = query.shape[:2]
    value_head_size = size_of(value, quantization.per_byte)
    out = query.new_empty(num_tokens, num_heads, value_head_size) if out is None else out
    lse = query.new_empty(num_tokens, num_heads, dtype=torch.float32)
    batch = levels[-1].batch
    if 0 in (num_tokens, num_heads, batch.num_seqs):
        return out.zero_(), lse.fill_(-torch.inf), None

    part_shape = num_tokens, num_heads, value_head_size
    tunings = _tune_levels(query, key, value, levels, options, tree, shared=shared, quantization=quantization)
    launch_level: Callable[..., Launch] = partial(launch_attend, shared=shared, tree=tree)
    if not INTERPRETED and tree is None and len(levels) == 1:  # kernels for Hopper do not run in the interpreter
        asked = levels[0], options, tunings[0], quantization
        if shared and latents_hopper.takes(query, key, *asked):
            launch_level = latents_hopper.launch
        if not shared and prompts_hopper.takes(query, key, value, *asked):
            launch_level, tunings = prompts_hopper.launch, [tunings[0]._replace(splits=1, most_splits=1)]
    num_parts = sum(tuning.most_splits for tuning in tunings)
    if num_parts == 1 and not options.batch_invariant:
        launch = launch_level(
            query, key, value, levels[0], options, tunings[0], Out(out, lse), whole(), quantization=quantization
        )
        return out, lse, Launches(out.shape, part_shape, [(launch, 0)], 1, None, with_lse=with_lse)

    parts = query.new_empty(num_parts, *out.shape, dtype=torch.float32)
    part_lses = query.new_empty(num_parts, *lse.shape, dtype=torch.float32)
    overlap = can_overlap(query.device)
    launches, first = [], 0
    for level, tuning in zip(levels, tunings, strict=True):
        launch = launch_level(
            query,
            *((key, value) if shared else pools_of_level(query, key, value, tuning.block_m, quantization)),
            level,
            options,
            tuning,
            Out(parts[first:], part_lses[first:]) if first else Out(parts, part_lses),  # a slice takes time on the CPU
            part(
                tuning.splits,
                run=tuning.run,
                balance=tuning.most_splits > tuning.splits,
                overlap=overlap,
                after_level=overlap and first > 0,
            ),
            quantization=quantization,
        )
        launches.append((launch, first))
        first += tuning.most_splits
    reduction = launch_reduction(parts, part_lses, Out(out, lse), batch, options, overlap=overlap)
    return out, lse, Launches(out.shape, part_shape, launches, num_parts, reduction, with_lse=with_lse)


def _tune_levels(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    levels: Sequence[Plan],
    options: AttentionOptions,
    tree: TreePlan | None,
    *,
    shared: bool,
    quantization: Quantization,
) -> list[LaunchConfig]:
    """Choose the launch config of each level; the arguments are those of `attend_levels`."""
    row_bytes, key_bytes = bytes_of_a_program(query, key, value, shared, quantization.per_byte)
    masked = tree is not None or any(level.first_visible is not None for level in levels)
    fewest_rows = 16 if shared or masked or key.ndim == 3 else 8  # a tile of 8 is transposed, see `triton/keys.py`
    launch = row_bytes, shared, fewest_rows, quantization.per_byte, quantization.kind == "int4"
    tunings = [tune(query, key, value, level, options, *launch) for level in levels]
    if len(levels) > 1:
        tunings = [share_sm(tuning, is_quantized=bool(quantization.kind)) for tuning in tunings]
    room = dict(row_bytes=row_bytes, key_bytes=key_bytes, fewest_stages=2 if shared else 1)
    spare = spare_stages(query, shared, quantization, tunings[0].block_m)
    return [fit(tuning, query.device, **room, spare=spare) for tuning in tunings]


def launch_reduction(
    parts: Tensor, part_lses: Tensor, out: Out, batch: Batch, options: AttentionOptions, *, overlap: bool
) -> Launch:
    """Launch the merge of the partial outputs of all levels, `[parts, t, h, dv]`, sinks included."""
    num_parts, num_tokens, num_heads, value_head_size = parts.shape
    at_once = max(1, min(SPLITS_PER_STEP, MERGED_ELEMENTS // pad(value_head_size)))
    block_splits = 1 if options.batch_invariant else min(at_once, pad(num_parts))
    block_heads = min(at_once // block_splits, pad(num_heads))
    return Launch(
        reduce_splits,
        (num_tokens, -(-num_heads // block_heads)),
        dict(parts=parts, part_lses=part_lses, out=out.out, lse=out.lse, sinks=contiguous(options.sinks)),
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


class Launches(SplitLaunches):
    """The launches of a call, replayed with the arguments of a kernel; see `fastattn.dispatch`."""

    def attend(
        self,
        query: Tensor,
        keys: Keys,
        plan: AttentionPlan,
        options: AttentionOptions,
        out: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """Replay with other tensors and scales of the same layout; quantized values come as they are stored."""
        key, value, quantization = cache_tensors(query, keys, addresses=True)
        sinks = None if options.sinks is None else options.sinks.contiguous()
        return self.replay((query, key, value), layer_args(query, options, quantization).values(), (sinks,), out)


def cache_tensors(query: Tensor, keys: Keys, *, addresses: bool = False) -> tuple[Tensor, Tensor, Quantization]:
    """Return keys, values and their quantization.

    Latents are pages of one head, whose values are the first elements of its keys; with `addresses`, both are the pool
    itself, where both begin. Keys of packed latents are the rotary keys alone.
    """
    if isinstance(keys, (Pages, Rows)):
        return *keys, UNQUANTIZED
    if isinstance(keys, PackedLatents):
        parts = packed_parts(keys.cache[:, :, None], keys.latent_rank, query.shape[2] - keys.latent_rank)
        return parts.rope_key, parts.quantized, Quantization(FORMATS[PACKED_FORMAT], groups=parts.scales[:, :, 0])
    if isinstance(keys, Latents):
        scales = latent_scales(keys.cache, keys.cache_scale, keys.query_scale)
        quantization = UNQUANTIZED if scales is None else quantization_of(scales)
        if addresses:
            return keys.cache, keys.cache, quantization
        pages = keys.cache[:, :, None, : query.shape[2]]
        return pages, pages[..., : keys.latent_rank], quantization
    if isinstance(keys, Int4Pages):
        return keys.key_cache, keys.value_cache, int4_quantization(keys.scales)
    assert isinstance(keys, QuantizedPages)  # nvfp4 pages are refused before
    return keys.key_cache, keys.value_cache, quantization_of(keys.scales)
