"""Decode over latents on Hopper, warp-specialized: two warpgroups multiply, a third loads keys, with barriers between.

With 64 query rows the kernel is bound by the tensor cores. In `fastattn.kernels.triton.attention` every warp loads,
dequantizes, multiplies and waits, all in step. Here a producer warpgroup only loads the next 64 keys into one of two
slots in shared memory, quantized values already converted. Of two consumer warpgroups, the first computes scores and
softmax of even steps, the second those of odd ones, and both accumulate half of the columns of the output of all steps:

    load         | keys 2 -> slot 0    |  keys 3 -> slot 1   |
    consumer 0   | values 0 | values 1 |   | scores 2 | softmax 2 | values 2 | values 3 |
    consumer 1   | values 0, softmax 1 | values 1 | scores 3      | values 2, softmax 3 | values 3 |

So the softmax of one overlaps with products of the other. Weights and maxima of a step go through shared memory, and a
row lies in four threads of each consumer. The output is rescaled step by step, in the order of steps. Its 64 rows of
512 elements in float32 fill half of all registers. Triton does not let a kernel assign work to warps, so this one is
written in Gluon, Triton's lower-level language, with explicit layouts and barriers. Triton's interpreter does not run
it; `twinattn.course.gluon` does.

64 decodes of 128 heads over 8192 latents take 304 us, and 311 in fp8 (NVIDIA H200, 06ea135, 2026-11-29); before
consumers took turns 351 and 340, and the other kernel takes 478 and 574 (c8a3cc9, 2026-11-26). Designs that were tried
are on docs/paths/mla.md.

Source: Hopper's asynchronous products and barriers: the PTX manual, "wgmma" and "mbarrier"; DeepSeek's FlashMLA, which
    divides the columns of the output, and steps, among two warpgroups as well.
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
# Registers per consumer and per producer thread, whose 2 * consumer + producer is at most 65536 / 128; quantized values
# wait in registers of the producer.
REGISTERS = {"": (216, 72), "e4m3": (192, 120), "e5m2": (192, 120)}


class Sizes(NamedTuple):
    """The constants of a launch.

    Attributes:
        ROWS: rows of a tile.
        KEYS: keys of a step.
        ONE_TILE: whether a tile holds all rows of any sequence.
        SPLIT: whether a program has a split of the keys, and stores a partial output.
        FORMAT: "e4m3" or "e5m2", or empty for latents in the type of the queries.
        REGISTERS: registers of a consumer thread, and of a producer thread.
    """

    ROWS: Any
    KEYS: Any
    ONE_TILE: Any
    SPLIT: Any
    FORMAT: Any
    REGISTERS: Any


class Span(NamedTuple):
    """The keys of a program.

    Attributes:
        begin: the first key.
        seen_by_all: the first key that some row does not see.
        pairs: pairs of steps.
    """

    begin: Any
    seen_by_all: Any
    pairs: Any


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
        dict(num_warps=4),
    )


# --- the consumers: they multiply ---


@gluon.jit
@no_type_check
def _multiply_keys(room, count, LAYOUT: gl.constexpr):
    """Return the products of the tile of queries with the keys of the slot of `count`, which `_multiply` describes."""
    ROWS: gl.constexpr = room.weights.shape[0]
    KEYS: gl.constexpr = room.weights.shape[1]
    slot, only = count & 1, count >> 1 & 1
    key = room.key.index(slot)
    if room.rope_key is not None:
        rope_key = room.rope_key.index(slot)
    nothing = gl.zeros([ROWS, KEYS], gl.float32, LAYOUT)
    products = warpgroup_mma(room.query.index(only), key.permute((1, 0)), nothing, use_acc=False, is_async=True)
    if room.rope_key is not None:
        products = warpgroup_mma(room.rope_query.index(only), rope_key.permute((1, 0)), products, is_async=True)
    return warpgroup_mma_wait(0, deps=[products])


@gluon.jit
@no_type_check
def see_copies(room):
    """Fence the copies behind the barrier just waited for, if the producer has not: products read them after it."""
    if room.IN_FLIGHT is not None:
        fence_async_shared()


@gluon.jit
@no_type_check
def _leave_query(room, span, step):
    """Leave the queries of a tile after the scores of a consumer's last step, for those of the next tile."""
    if room.query_read is not None and step + 2 >= span.until:
        leave(room.query_read.index(0))


@gluon.jit
@no_type_check
def own_sums(weights):
    """Return the sums of the weights that each of a row's four threads has, [rows, 4]."""
    ROWS: gl.constexpr = weights.shape[0]
    KEYS: gl.constexpr = weights.shape[1]
    return gl.sum(gl.sum(weights.reshape([ROWS, KEYS // 8, 4, 2]), 3), 1)


@gluon.jit
@no_type_check
def _mask(scores, step, room, span):
    """Set the scores of keys that a row does not see to -inf, in a step with some that not all rows see.

    Without `room.last` all rows see the same keys: those from `span.first` to `span.end`.
    """
    first = span.begin + step * scores.shape[1]
    if room.last is None:
        if (first < span.first) | (first + scores.shape[1] > span.end):
            j = first + gl.arange(0, scores.shape[1], layout=gl.SliceLayout(0, scores.type.layout))
            scores = gl.where(((j >= span.first) & (j < span.end))[None, :], scores, float("-inf"))
    elif first + scores.shape[1] > span.seen_by_all:
        j = first + gl.arange(0, scores.shape[1], layout=gl.SliceLayout(0, scores.type.layout))
        last = room.last.load(gl.SliceLayout(1, scores.type.layout))
        scores = gl.where(j[None, :] <= last[:, None], scores, float("-inf"))
    return scores


@gluon.jit
@no_type_check
def _base(row_max):
    """Return what is subtracted from scores: the maximum, or 0 for a row that has seen nothing."""
    return gl.where(row_max == float("-inf"), 0.0, row_max)  # -inf - -inf would be NaN


@gluon.jit
@no_type_check
def _weigh(scores, room, row_max):
    """Return the weights of a step, the sums of each thread, and the maximum of each row up to this step."""
    factor = room.factor.load(row_max.type.layout)
    row_max = gl.maximum(row_max, gl.max(scores, 1) * factor)
    weights = gl.exp2(scores * factor[:, None] - _base(row_max)[:, None])
    return weights.to(room.weights.dtype), own_sums(weights), row_max


@gluon.jit
@no_type_check
def shrink(acc, sums, old_max, row_max):
    """Rescale what is accumulated to the maxima of one more step."""
    rescale = gl.exp2(old_max - _base(row_max))
    acc = acc * gl.convert_layout(rescale, gl.SliceLayout(1, acc.type.layout))[:, None]
    return acc, sums * gl.convert_layout(rescale, gl.SliceLayout(1, sums.type.layout))[:, None]


@gluon.jit
@no_type_check
def multiply_values(room, acc, WHO: gl.constexpr, slot):
    """Start the product of the weights with a half of the columns of a slot."""
    HALF: gl.constexpr = acc.shape[1]
    return warpgroup_mma(room.weights, room.key.index(slot).slice(WHO * HALF, HALF, 1), acc, is_async=True)


@gluon.jit
@no_type_check
def _publish(room, x, row_max, WHO: gl.constexpr):
    """Store weights and maxima for both consumers."""
    room.weights.store(x)
    room.row_max.index(WHO).store(row_max)
    fence_async_shared()
    mbarrier.arrive(room.ready.index(WHO))  # all warps of this consumer meet before it


@gluon.jit
@no_type_check
def attend_own_of_first(state, room, count, span, SCORES: gl.constexpr):
    """Take a step of the first consumer: its own."""
    acc, sums, row_max = state
    now, slot = count >> 2 & 1, count & 1
    mbarrier.wait(room.full.index(0), now)
    see_copies(room)
    scores = _mask(_multiply_keys(room, count, SCORES), count >> 1, room, span)
    _leave_query(room, span, count >> 1)
    old_max = row_max
    x, own_sums, row_max = _weigh(scores, room, row_max)
    mbarrier.wait(room.read.index(1), now ^ 1)  # the other one has multiplied with the weights of the step before
    _publish(room, x, row_max, 0)
    acc, sums = shrink(acc, sums, old_max, row_max)
    sums += own_sums
    outputs = multiply_values(room, acc, 0, slot)
    acc = warpgroup_mma_wait(0, deps=[outputs])
    leave(room.empty.index(0))
    leave(room.read.index(0))
    return acc, sums, row_max


@gluon.jit
@no_type_check
def attend_first(state, room, count, span, SCORES: gl.constexpr):
    """Take two steps of the first consumer: its own, and that of the other one."""
    acc, sums, row_max = attend_own_of_first(state, room, count, span, SCORES)
    now, slot = count >> 2 & 1, count & 1
    old_max = row_max
    mbarrier.wait(room.ready.index(1), now)
    see_copies(room)
    row_max = room.row_max.index(1).load(row_max.type.layout)
    acc, sums = shrink(acc, sums, old_max, row_max)
    outputs = multiply_values(room, acc, 0, slot ^ 1)
    acc = warpgroup_mma_wait(0, deps=[outputs])
    leave(room.empty.index(1))
    return acc, sums, row_max


@gluon.jit
@no_type_check
def attend_second(state, room, count, span, SCORES: gl.constexpr):
    """Take two steps of the second consumer: that of the other one, beside its own softmax, and its own."""
    acc, sums, row_max = state
    now, slot = count >> 2 & 1, count & 1
    mbarrier.wait(room.full.index(1), now)
    see_copies(room)
    scores = _mask(_multiply_keys(room, count, SCORES), (count >> 1) + 1, room, span)
    _leave_query(room, span, (count >> 1) + 1)
    old_max = row_max
    mbarrier.wait(room.ready.index(0), now)
    row_max = room.row_max.index(0).load(row_max.type.layout)
    acc, sums = shrink(acc, sums, old_max, row_max)
    outputs = multiply_values(room, acc, 1, slot ^ 1)
    old_max = row_max
    x, own_sums, row_max = _weigh(scores, room, row_max)
    acc, x, own_sums = warpgroup_mma_wait(0, deps=[outputs, x, own_sums])
    leave(room.empty.index(0))
    mbarrier.wait(room.read.index(0), now)
    _publish(room, x, row_max, 1)
    acc, sums = shrink(acc, sums, old_max, row_max)
    sums += own_sums
    outputs = multiply_values(room, acc, 1, slot)
    acc = warpgroup_mma_wait(0, deps=[outputs])
    leave(room.empty.index(1))
    leave(room.read.index(1))
    return acc, sums, row_max


@gluon.jit
@no_type_check
def _multiply(queries, keys, options, room, work, out, TILE, WHO: gl.constexpr):
    """Attend to the keys that are loaded into the slots, and store a half of the columns of the output."""
    ROWS: gl.constexpr = room.weights.shape[0]
    KEYS: gl.constexpr = room.weights.shape[1]
    HALF: gl.constexpr = room.key.shape[2] // 2
    # Results of `wgmma`, version 3: four warps of 16 rows each, with all columns.
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    OUTPUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 16])
    OF_ROWS: gl.constexpr = gl.SliceLayout(1, SCORES)
    tile, span = work
    row_max = gl.full([ROWS], float("-inf"), gl.float32, OF_ROWS)
    sums = own_sums(gl.zeros([ROWS, KEYS], gl.float32, SCORES))
    state = gl.zeros([ROWS, HALF], gl.float32, OUTPUT), sums, row_max
    # The compiler would keep all descriptors of products with slots that it knows in registers, which have no room. So
    # slots are bits of `count`, which is 4 * pair + WHO: it does not know that 1 + 3 programs are 4.
    count = gl.program_id(0) * 0 + WHO
    four = gl.num_programs(2) + 3
    while count < 4 * span.pairs:
        if WHO == 0:
            state = attend_first(state, room, count, span, SCORES)
        else:
            state = attend_second(state, room, count, span, SCORES)
        count += four
    acc, sums, row_max = state
    room.row_sum.index(WHO).store(gl.convert_layout(gl.sum(sums, 1), OF_ROWS))
    mbarrier.arrive(room.summed.index(0))
    mbarrier.wait(room.summed.index(0), 0)
    row_sum = room.row_sum.index(0).load(OF_ROWS) + room.row_sum.index(1).load(OF_ROWS)
    _store(queries, keys, options, tile, Softmax(row_max, row_sum, acc), out, TILE, WHO)


# --- a program ---


@gluon.jit
@no_type_check
def _store(queries, keys, options, tile, softmax, out, TILE, WHO: gl.constexpr):
    """Store the half of the outputs that a consumer has, and log-sum-exps."""
    OUTPUT: gl.constexpr = softmax.acc.type.layout
    RANK: gl.constexpr = keys.VALUE_HEAD_SIZE
    HALF: gl.constexpr = softmax.acc.shape[1]
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
    at = WHO * HALF + gl.arange(0, HALF, layout=gl.SliceLayout(0, OUTPUT))
    places = tile.first_place + rows
    gl.store(out.out + places[:, None] * RANK + at[None, :], values.to(out.out.dtype.element_ty), mask=is_row[:, None])
    if WHO == 0:
        gl.store(out.lse + places, logs, mask=is_row)


@gluon.jit
@no_type_check
def _store_nothing(tile, out, TILE):
    """Store the log-sum-exps of a split without keys: `-inf`."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    rows = tile.first_row + gl.arange(0, TILE.ROWS, layout=LAYOUT)
    nothing = gl.full([TILE.ROWS], float("-inf"), gl.float32, LAYOUT)
    gl.store(out.lse + tile.first_place + rows, nothing, mask=rows < tile.num_rows)


@gluon.jit(do_not_specialize=CHANGING)
@no_type_check
def _attend_kernel(queries, keys, options, split, out, TILE):
    """Attend from a tile of query rows to a run of latents, with two consumer warpgroups and a producer."""
    LOG2E: gl.constexpr = 1.4426950408889634
    TYPE: gl.constexpr = queries.query.dtype.element_ty if TILE.FORMAT == "" else gl.float16
    RANK: gl.constexpr = keys.VALUE_HEAD_SIZE
    ROPE: gl.constexpr = keys.HEAD_SIZE - RANK
    QUERIES: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    SHARED: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    NUMBERS: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    BARRIERS: gl.constexpr = mbarrier.MBarrierLayout()
    tile = find_tile(queries, TILE)
    if not TILE.SPLIT:
        first_padding = gl.load(queries.cu_seqlens_q + queries.num_seqs).to(gl.int64) * queries.HEADS + gl.program_id(0)
        end = queries.num_tokens.to(gl.int64) * queries.HEADS
        store_padding(out.out, out.lse, first_padding, end, gl.num_programs(0), RANK)
    if tile.first_row >= tile.num_rows:
        return
    context = gl.load(queries.seq_lens + tile.sequence) - tile.num_rows // queries.HEADS
    run = find_run(queries, split, tile, context, TILE)
    if TILE.SPLIT and run.begin >= run.end:
        _store_nothing(tile, out, TILE)
        return
    pairs = gl.cdiv(run.end - run.begin, 2 * TILE.KEYS)  # pairs of steps

    q, rope, power = load_queries(queries, keys, tile, TYPE, QUERIES, TILE)
    rows = tile.first_row + gl.arange(0, TILE.ROWS, layout=gl.SliceLayout(1, QUERIES))
    last = gl.minimum(context + rows // queries.HEADS, run.end - 1)
    room = Room(
        query=gl.allocate_shared_memory(TYPE, [1, TILE.ROWS, RANK], SHARED),
        rope_query=gl.allocate_shared_memory(TYPE, [1, TILE.ROWS, ROPE], SHARED),
        key=gl.allocate_shared_memory(TYPE, [2, TILE.KEYS, RANK], SHARED),
        rope_key=gl.allocate_shared_memory(TYPE, [2, TILE.KEYS, ROPE], SHARED),
        weights=gl.allocate_shared_memory(TYPE, [TILE.ROWS, TILE.KEYS], SHARED),
        factor=gl.allocate_shared_memory(gl.float32, [TILE.ROWS], NUMBERS, power * (options.scale * LOG2E)),
        last=gl.allocate_shared_memory(gl.int32, [TILE.ROWS], NUMBERS, last),
        row_max=gl.allocate_shared_memory(gl.float32, [2, TILE.ROWS], NUMBERS),
        row_sum=gl.allocate_shared_memory(gl.float32, [2, TILE.ROWS], NUMBERS),
        full=gl.allocate_shared_memory(gl.int64, [2, 1], BARRIERS),
        empty=gl.allocate_shared_memory(gl.int64, [2, 1], BARRIERS),
        ready=gl.allocate_shared_memory(gl.int64, [2, 1], BARRIERS),
        read=gl.allocate_shared_memory(gl.int64, [2, 1], BARRIERS),
        summed=gl.allocate_shared_memory(gl.int64, [1, 1], BARRIERS),
        query_read=None,
        IN_FLIGHT=None,
    )
    room.query.index(0).store(q)
    room.rope_query.index(0).store(rope)
    for slot in gl.static_range(2):
        mbarrier.init(room.full.index(slot), count=128 if TILE.FORMAT == "" else 1)
        mbarrier.init(room.empty.index(slot), count=256)
        mbarrier.init(room.ready.index(slot), count=1)
        mbarrier.init(room.read.index(slot), count=128)
    mbarrier.init(room.summed.index(0), count=2)
    fence_async_shared()

    table = keys.where.block_table + tile.sequence.to(gl.int64) * keys.where.table_row_stride
    span = Span(run.begin, gl.minimum(context + tile.first_row // queries.HEADS + 1, run.end), pairs)
    tl.debug_barrier()
    gl.warp_specialize(
        [
            (_multiply, (queries, keys, options, room, (tile, span), out, TILE, 0)),
            (_multiply, (queries, keys, options, room, (tile, span), out, TILE, 1)),
            (bring, (keys, table, room, run, 2 * pairs, TILE)),
        ],
        [4, 4],
        [TILE.REGISTERS[0], TILE.REGISTERS[1]],
    )
