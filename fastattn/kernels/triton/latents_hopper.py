"""Decode over latents on Hopper, warp-specialized: two warpgroups multiply, a third loads keys, with barriers between.

With 64 query rows the kernel is bound by the tensor cores. In `fastattn.kernels.triton.attention` every warp loads,
dequantizes, multiplies and waits, all in step. Here a producer warpgroup only loads the next 64 keys into one of two
slots in shared memory, quantized values already converted, while two consumer warpgroups multiply with the other slot:

    load         | keys 2 -> slot 0        | keys 3 -> slot 1        |
    multiply     | softmax 1 | values 1 | scores 2 | softmax 2 | values 2 | scores 3 |
                                        ^ slot 0 is full          ^ slot 1 is empty

Each consumer computes the scores of half of the keys, and accumulates half of the columns of the output in registers:
64 rows of 512 elements in float32 fill half of all registers. Triton does not let a kernel assign work to warps, so
this one is written in Gluon, Triton's lower-level language, with explicit layouts and barriers. Triton's interpreter
does not run it; `twinattn.course.gluon` does.

64 decodes of 128 heads over 8192 latents take 340 us in fp8 and 351 in bfloat16; the other kernel takes 574 and 478
(NVIDIA H200, c8a3cc9, 2026-11-26). Designs that were tried are on docs/paths/mla.md.

Source: Hopper's asynchronous products and barriers: the PTX manual, "wgmma" and "mbarrier"; DeepSeek's FlashMLA, which
    divides the columns of the output among two warpgroups as well.
"""

from typing import Any, NamedTuple, no_type_check

import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from fastattn.kernels.kernel import BATCH, fields_of
from fastattn.kernels.kernel import options_of as known_options
from fastattn.kernels.problem import asked_of, uses_positions, with_positive_scale
from fastattn.kernels.triton.hopper import is_aligned, is_there, leave, store_padding
from fastattn.kernels.triton.keys import keys_of
from fastattn.kernels.triton.launch import CHANGING, Launch
from fastattn.kernels.triton.load_latents_hopper import Room, bring, find_run, find_tile, load_queries
from fastattn.kernels.triton.merge import Out, Part, Softmax, Whole, normalize
from fastattn.kernels.triton.quantized import Quantization
from fastattn.kernels.triton.queries import count_tiles, is_one_tile, layer_args, options_of, queries_of
from fastattn.kernels.triton.tuning import LATENT_64, LaunchConfig, is_wide
from refattn.options import AttentionOptions
from refattn.plan import Plan

KNOWS = BATCH | fields_of(
    Plan, *("batch", "block_size", "causal", "window_size", "first_keys", "positions", "sequences")
)
KNOWS |= known_options("softmax_scale", "sinks", "batch_invariant")  # fields that a plan and a layer may set
RANK, ROPE = 512, 64  # sizes of latents and of rotary keys that the layouts are for
REGISTERS = {"": 72, "e4m3": 120, "e5m2": 120}  # per producer thread; quantized values wait in registers

# [rows, 2]: each thread has both halves of the two rows of which it has elements of the scores.
HALVES = tl.constexpr(
    gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [8, 0]],
        lane_bases=[[0, 0], [0, 0], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[16, 0], [32, 0], [0, 0]],
        block_bases=[],
        shape=[64, 2],
    )
)


class Sizes(NamedTuple):
    """The constants of a launch.

    Attributes:
        ROWS: rows of a tile.
        KEYS: keys of a step.
        ONE_TILE: whether a tile holds all rows of any sequence.
        SPLIT: whether a program has a split of the keys, and stores a partial output.
        FORMAT: "e4m3" or "e5m2", or empty for latents in the type of the queries.
        REGISTERS: registers of a producer thread.
    """

    ROWS: Any
    KEYS: Any
    ONE_TILE: Any
    SPLIT: Any
    FORMAT: Any
    REGISTERS: Any


def takes(
    query: Tensor,
    key: Tensor,
    plan: Plan,
    options: AttentionOptions,
    tuning: LaunchConfig,
    quantization: Quantization,
) -> bool:
    """Return whether this kernel computes a level of attention over latents, as `attend_levels` has tuned it."""
    is_causal = plan.window == (-1, 0) and not uses_positions(plan, options)
    if quantization.kind:
        stored = quantization.kind in REGISTERS and quantization.groups is None and not quantization.rounds_query
    else:
        stored = key.dtype == query.dtype
    return (
        is_there(query.device)
        and (query.itemsize, query.shape[2], tuning.block_m) == (2, RANK + ROPE, LATENT_64.block_m)
        and not tuning.run
        and is_causal
        and asked_of(plan, options) <= KNOWS
        and stored
        and is_aligned(key, *key.stride()[:2])
        and not is_wide(key.shape[1], key.stride(1))
    )


def launch(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    plan: Plan,
    options: AttentionOptions,
    tuning: LaunchConfig,
    out: Out,
    split: Whole | Part,
    *,
    quantization: Quantization,
) -> Launch:
    """Launch the kernel, where `takes` allows it, instead of `launch_attend`.

    Args:
        query: query rows of all sequences.
        key: latents and rotary keys, as pages of one head; fp8 as bytes.
        value: the latents of `key`.
        plan: the lengths and the block table.
        options: the layer's options.
        tuning: rows of a tile, and splits.
        out: where outputs go.
        split: the share of the keys that a program has. The launch after this one never begins early.
        quantization: how the pool is quantized, if it is.
    """
    batch, num_heads = plan.batch, query.shape[1]
    query, scale = with_positive_scale(query, options.softmax_scale)
    sizes = Sizes(
        ROWS=tuning.block_m,
        KEYS=LATENT_64.block_n,
        ONE_TILE=is_one_tile(batch, num_heads, tuning.block_m),
        SPLIT=isinstance(split, Part),
        FORMAT=quantization.kind,
        REGISTERS=REGISTERS[quantization.kind],
    )
    return Launch(
        _attend_kernel,
        (count_tiles(batch, query.shape[0], num_heads, tuning.block_m), tuning.most_splits),
        {"queries.query": query, "keys.key": key, "keys.value": value, "out.out": out.out, "out.lse": out.lse}
        | layer_args(query, options, quantization),
        dict(
            queries=queries_of(query, batch, num_heads, num_heads),
            keys=keys_of(
                query, key, value, plan, tuning.block_m, shared=True, quantization=quantization, aligned=False
            ),
            options=options_of(options, scale),
            split=split,
            out=out,
            TILE=Sizes(*map(tl.constexpr, sizes)),
        ),
        dict(num_warps=8),
    )


# --- the consumers: they multiply ---


@gluon.jit
@no_type_check
def _multiply_keys(room, slot, scores):
    """Start the products of the tile of queries with the keys of a slot."""
    key, rope_key = room.key.index(slot), room.rope_key.index(slot)
    products = warpgroup_mma(room.query, key.permute((1, 0)), scores, use_acc=False, is_async=True)
    return warpgroup_mma(room.rope_query, rope_key.permute((1, 0)), products, is_async=True)


@gluon.jit
@no_type_check
def _max_of_rows(scores):
    """Return the maximum of each row, which two warps share: each takes that of its half of the keys.

    The halves are exchanged through shared memory, for which all consumer warps meet, once per step. So none stores
    weights before all have multiplied with those of the step before.
    """
    ROWS: gl.constexpr = scores.shape[0]
    KEYS: gl.constexpr = scores.shape[1]
    halves = gl.max(scores.reshape([ROWS, 2, KEYS // 2]), 2)
    row_max = gl.max(gl.convert_layout(halves, HALVES), 1)
    return gl.convert_layout(row_max, gl.SliceLayout(1, scores.type.layout), assert_trivial=True)


@gluon.jit
@no_type_check
def _own_sums(weights):
    """Return the sums of the weights that each of a row's eight threads has, [rows, 2, 4]."""
    ROWS: gl.constexpr = weights.shape[0]
    KEYS: gl.constexpr = weights.shape[1]
    return gl.sum(gl.sum(weights.reshape([ROWS, 2, KEYS // 16, 4, 2]), 4), 2)


@gluon.jit
@no_type_check
def _mask(scores, first, last_of_rows):
    """Set the scores of keys that a row does not see to -inf; `first` is the first key."""
    j = first + gl.arange(0, scores.shape[1], layout=gl.SliceLayout(0, scores.type.layout))
    return gl.where(j[None, :] <= last_of_rows[:, None], scores, float("-inf"))


@gluon.jit
@no_type_check
def _update_softmax(scores, factor, row_max, sums):
    """Update the online softmax by a step of scores; sums are kept per thread, and added up at the end."""
    new_row_max = gl.maximum(row_max, _max_of_rows(scores) * factor)
    base = gl.where(new_row_max == float("-inf"), 0.0, new_row_max)  # -inf - -inf would be NaN
    weights = gl.exp2(scores * factor[:, None] - base[:, None])
    rescale = gl.exp2(row_max - base)
    own_sums = _own_sums(weights)
    rescales = gl.convert_layout(rescale, gl.SliceLayout(1, gl.SliceLayout(2, own_sums.type.layout)))
    return weights, rescale, new_row_max, sums * rescales[:, None, None] + own_sums


@gluon.jit
@no_type_check
def _multiply(room, run, steps, last_of_rows, seen_by_all, factor, SCORES: gl.constexpr, OUTPUT: gl.constexpr):
    """Attend to the keys that are loaded into the slots; return the softmax, in layouts of the products.

    Every product is issued and awaited in one iteration, or the compiler would serialize them: also the scores of the
    next step, which are carried over in registers. Consumers meet twice per step: for the maxima, and when weights are
    stored, before the product with them.
    """
    ROWS: gl.constexpr = room.weights.shape[0]
    KEYS: gl.constexpr = room.weights.shape[1]
    RANK: gl.constexpr = room.key.shape[2]
    weights = room.weights
    acc = gl.zeros([ROWS, RANK], gl.float32, OUTPUT)
    row_max = gl.full([ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, SCORES))
    nothing = gl.zeros([ROWS, KEYS], gl.float32, SCORES)
    sums = _own_sums(nothing)
    if steps > 0:
        mbarrier.wait(room.full.index(0), 0)
        products = _multiply_keys(room, 0, nothing)
        scores = warpgroup_mma_wait(0, deps=[products])
        for step in range(1, steps):
            slot = (step - 1) & 1
            if run.begin + step * KEYS > seen_by_all:
                scores = _mask(scores, run.begin + step * KEYS - KEYS, last_of_rows)
            x, rescale, row_max, sums = _update_softmax(scores, factor, row_max, sums)
            weights.store(x.to(weights.dtype))
            acc = acc * gl.convert_layout(rescale, gl.SliceLayout(1, OUTPUT))[:, None]
            fence_async_shared()
            outputs = warpgroup_mma(weights, room.key.index(slot), acc, is_async=True)
            mbarrier.wait(room.full.index(slot ^ 1), step >> 1 & 1)
            products = _multiply_keys(room, slot ^ 1, nothing)
            outputs = warpgroup_mma_wait(2, deps=[outputs])  # the two products of the scores may go on
            leave(room.empty.index(slot))
            acc, scores = warpgroup_mma_wait(0, deps=[outputs, products])
        scores = _mask(scores, run.begin + steps * KEYS - KEYS, last_of_rows)
        x, rescale, row_max, sums = _update_softmax(scores, factor, row_max, sums)
        weights.store(x.to(weights.dtype))
        acc = acc * gl.convert_layout(rescale, gl.SliceLayout(1, OUTPUT))[:, None]
        fence_async_shared()
        acc = warpgroup_mma(weights, room.key.index((steps - 1) & 1), acc)
    return acc, row_max, gl.convert_layout(gl.sum(gl.sum(sums, 2), 1), gl.SliceLayout(1, SCORES))


# --- a program ---


@gluon.jit
@no_type_check
def _store(queries, keys, options, tile, first_place, softmax, out, TILE):
    """Store the outputs of a tile, and their log-sum-exps; `first_place` is that of the sequence's first row."""
    OUTPUT: gl.constexpr = softmax.acc.type.layout
    RANK: gl.constexpr = keys.VALUE_HEAD_SIZE
    row_max = gl.convert_layout(softmax.row_max, gl.SliceLayout(1, OUTPUT))
    row_sum = gl.convert_layout(softmax.row_sum, gl.SliceLayout(1, OUTPUT))
    rows = tile.first_row + gl.arange(0, TILE.ROWS, layout=gl.SliceLayout(1, OUTPUT))
    is_row = rows < tile.num_rows
    sink = None
    if options.sinks is not None and not TILE.SPLIT:
        sink = gl.load(options.sinks + rows % queries.HEADS, mask=is_row, other=0.0).to(gl.float32)
    values, logs = normalize(row_max, row_sum, softmax.acc, sink)
    if TILE.FORMAT != "":
        values *= keys.value_number
    at = gl.arange(0, RANK, layout=gl.SliceLayout(0, OUTPUT))
    places = first_place + rows
    gl.store(out.out + places[:, None] * RANK + at[None, :], values.to(out.out.dtype.element_ty), mask=is_row[:, None])
    gl.store(out.lse + places, logs, mask=is_row)


@gluon.jit
@no_type_check
def _store_nothing(tile, first_place, out, TILE):
    """Store the log-sum-exps of a split without keys: `-inf`."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [8], [0])
    rows = tile.first_row + gl.arange(0, TILE.ROWS, layout=LAYOUT)
    nothing = gl.full([TILE.ROWS], float("-inf"), gl.float32, LAYOUT)
    gl.store(out.lse + first_place + rows, nothing, mask=rows < tile.num_rows)


@gluon.jit(do_not_specialize=CHANGING)
@no_type_check
def _attend_kernel(queries, keys, options, split, out, TILE):
    """Attend from a tile of query rows to a run of latents, with two consumer warpgroups and a producer."""
    LOG2E: gl.constexpr = 1.4426950408889634
    TYPE: gl.constexpr = queries.query.dtype.element_ty if TILE.FORMAT == "" else gl.float16
    RANK: gl.constexpr = keys.VALUE_HEAD_SIZE
    ROPE: gl.constexpr = keys.HEAD_SIZE - RANK
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, TILE.KEYS // 2, 16])
    OUTPUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, RANK // 2, 16])
    QUERIES: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [8, 1], [1, 0])
    SHARED: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    BARRIERS: gl.constexpr = mbarrier.MBarrierLayout()
    tile = find_tile(queries, TILE)
    if not TILE.SPLIT:
        first_padding = gl.load(queries.cu_seqlens_q + queries.num_seqs).to(gl.int64) * queries.HEADS + gl.program_id(0)
        end = queries.num_tokens.to(gl.int64) * queries.HEADS
        store_padding(out.out, out.lse, first_padding, end, gl.num_programs(0), RANK)
    if tile.first_row >= tile.num_rows:
        return
    first_place = (gl.program_id(1).to(gl.int64) * queries.num_tokens + tile.first_query) * queries.HEADS
    context = gl.load(queries.seq_lens + tile.sequence) - tile.num_rows // queries.HEADS
    run = find_run(queries, split, tile, context, TILE)
    if TILE.SPLIT and run.begin >= run.end:
        _store_nothing(tile, first_place, out, TILE)
        return
    steps = gl.cdiv(run.end - run.begin, TILE.KEYS)

    q, rope, power = load_queries(queries, keys, tile, TYPE, QUERIES, TILE)
    room = Room(
        query=gl.allocate_shared_memory(TYPE, [TILE.ROWS, RANK], SHARED, q),
        rope_query=gl.allocate_shared_memory(TYPE, [TILE.ROWS, ROPE], SHARED, rope),
        key=gl.allocate_shared_memory(TYPE, [2, TILE.KEYS, RANK], SHARED),
        rope_key=gl.allocate_shared_memory(TYPE, [2, TILE.KEYS, ROPE], SHARED),
        weights=gl.allocate_shared_memory(TYPE, [TILE.ROWS, TILE.KEYS], SHARED),
        full=gl.allocate_shared_memory(gl.int64, [2, 1], BARRIERS),
        empty=gl.allocate_shared_memory(gl.int64, [2, 1], BARRIERS),
    )
    for slot in gl.static_range(2):
        mbarrier.init(room.full.index(slot), count=128 if TILE.FORMAT == "" else 1)
        mbarrier.init(room.empty.index(slot), count=256)
    fence_async_shared()

    rows = tile.first_row + gl.arange(0, TILE.ROWS, layout=gl.SliceLayout(1, SCORES))
    last_of_rows = gl.minimum(context + rows // queries.HEADS, run.end - 1)
    seen_by_all = gl.minimum(context + tile.first_row // queries.HEADS + 1, run.end)  # keys before it
    factor = gl.convert_layout(power, gl.SliceLayout(1, SCORES)) * (options.scale * LOG2E)
    table = keys.where.block_table + tile.sequence.to(gl.int64) * keys.where.table_row_stride
    # Triton 3.6 stores the producer's arguments in the scratch memory of `factor`'s conversion, without a barrier.
    tl.debug_barrier()
    acc, row_max, row_sum = gl.warp_specialize(
        [
            (_multiply, (room, run, steps, last_of_rows, seen_by_all, factor, SCORES, OUTPUT)),
            (bring, (keys, table, room, run, steps, TILE)),
        ],
        [4],
        [TILE.REGISTERS],
    )
    _store(queries, keys, options, tile, first_place, Softmax(row_max, row_sum, acc), out, TILE)
