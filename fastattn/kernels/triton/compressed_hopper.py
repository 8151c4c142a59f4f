"""Attention to a window and to entries on Hopper, in one launch; the twin of `refattn.compressed.attention`.

A tile is 64 heads of one query, so all its rows see the same keys: those of its window, then its entries. They come in
steps of 64, the window from one pool and the entries from another. The window ends where a step ends, and the entries
begin with the next one, so what the tile sees is one run of places, and no row has a mask of its own:

    window of 100, 90 entries       |          | window   | entries  | entries  |
    places                          0    28   64        128        192     218
                                         ^ first                            ^ end

Keys have 512 elements, which are also their values. Two warpgroups multiply, a third one loads, as in
`fastattn.kernels.triton.latents_hopper`, whose consumers these are. In a prompt a tile has few keys, and there are many
tiles. So a program goes on with another tile: while the consumers multiply, the producer looks up the keys of the next
one, and copies its queries as soon as both have left the room of these. With few tiles, the steps are split, and
`reduce_splits` merges.

    copy        | keys 2   | queries, keys 0 and 1 of the next tile
    consumer 0  | keys 0   | keys 2            | store |  next tile
    consumer 1  |    keys 1      | keys 2      | store |     next tile

Two quantized pools have a scale each. Products are of one scale, the larger one: elements of the other pool are
multiplied by the ratio of both when they are converted to float16.

Source: as `latents_hopper`; DeepSeek-AI 2026, "DeepSeek-V4".
"""

from typing import Any, NamedTuple, no_type_check

import torch
import triton.language as tl
from jaxtyping import Float, Float32
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, warpgroup_mma_wait

from fastattn.kernels.problem import Problem, with_positive_scale
from fastattn.kernels.replay import Bound, key_of_launch, memo_of
from fastattn.kernels.triton.attention import launch_reduction
from fastattn.kernels.triton.hopper import is_there, leave
from fastattn.kernels.triton.latents_hopper import (
    attend_first,
    attend_own_of_first,
    attend_second,
    multiply_values,
    own_sums,
    see_copies,
    shrink,
)
from fastattn.kernels.triton.launch import CHANGING, Launch, SplitLaunches, can_overlap
from fastattn.kernels.triton.load_compressed_hopper import Beside, Pool, Sight, bring, find_tile, hear, load_query
from fastattn.kernels.triton.load_latents_hopper import Room
from fastattn.kernels.triton.merge import Out, Part, Softmax, Whole, normalize, part, whole
from fastattn.kernels.triton.quantized import FORMATS
from fastattn.kernels.triton.queries import Given, contiguous, has_scale_above_0, options_of, queries_of
from fastattn.kernels.triton.tuning import sms_of
from refattn.entries import CompressedPlan
from refattn.keys import Latents
from refattn.options import AttentionOptions

ROWS, KEYS, SIZE = 64, 64, 512  # heads of a tile, keys of a step, elements of a key
FURTHEST = 2**31 - 1
# Registers per consumer and per producer thread, as in `latents_hopper`: without rotary keys the producer has fewer.
REGISTERS = {"": (216, 72), "e4m3": (200, 104), "e5m2": (200, 104)}


class Sizes(NamedTuple):
    """The constants of a launch.

    Attributes:
        ROWS: heads of a tile.
        KEYS: keys of a step.
        SIZE: elements of a key.
        SPLIT: whether a program has a split of the steps, and stores a partial output.
        FORMAT: "e4m3" or "e5m2", or empty for keys in the type of the queries.
        RESCALED: whether quantized pools have different scales.
        REGISTERS: registers of a consumer thread, and of a producer thread.
    """

    ROWS: Any
    KEYS: Any
    SIZE: Any
    SPLIT: Any
    FORMAT: Any
    RESCALED: Any
    REGISTERS: Any


def attend_compressed(
    query: Float[Tensor, "t h d"],
    window: Latents,
    entries: Latents,
    plan: CompressedPlan,
    options: AttentionOptions,
    out: Float[Tensor, "t h d"] | None,
) -> tuple[Float[Tensor, "t h d"], Float32[Tensor, "t h"]]:
    """Attend to a window and to entries with one softmax; see `fastattn.dispatch`.

    Args:
        query: the new tokens.
        window: the pool of keys by token.
        entries: the pool of entries; in blocks of one entry if these are selected.
        plan: both tables, and who sees what.
        options: the layer's options; a scale and sinks.
        out: memory for the outputs, which overlaps no input; new memory if it is None, or not contiguous.
    """
    out = out if out is None or out.is_contiguous() else None
    scales = float(window.cache_scale), float(entries.cache_scale)
    tensors = query, window.cache, entries.cache
    key = None
    if has_scale_above_0(options):  # else the query is changed
        key = key_of_launch(("attend_compressed", scales[0] == scales[1]), (*tensors, out, *scales), options)
    bound = None if key is None else memo_of(plan).bound.get(key)
    if bound is not None:
        return bound.run(query, window, entries, options, out)
    out = torch.empty_like(query, memory_format=torch.contiguous_format) if out is None else out
    lse = query.new_empty(query.shape[:2], dtype=torch.float32)
    if not lse.numel() or not plan.batch.num_seqs:
        return out.zero_(), lse.fill_(-torch.inf)
    launches = _launch_all(query, window, entries, plan, options, Out(out, lse))
    if key is not None:
        memo_of(plan).bound[key] = Bound("triton", launches.attend)
    return out, lse


def unsupported_reason(problem: Problem) -> str | None:
    """Return why this kernel cannot compute a problem that our kernels could compute by two calls, or None."""
    if not is_there(problem.device):
        return "attends to a window and to entries in one launch on Hopper, by the versions of Triton that are known"
    if problem.num_heads % ROWS or problem.head_size != SIZE:
        sizes = f"{problem.num_heads} of {problem.head_size}"
        return f"attends to a window and to entries in one launch with multiples of {ROWS} heads of {SIZE}, not {sizes}"
    stored = problem.stored or (problem.dtype, problem.dtype)
    if problem.dtype.itemsize != 2 or stored[0] != stored[1] or problem.far_scales:
        return "attends in one launch to pools of 16 bits, or of one type of fp8 under scales that are not far apart"
    if problem.softcap or problem.alibi or problem.window[1] != 0:
        return "attends to a window and to entries in one launch without a cap, and to no token after a query"
    return None if problem.aligned else "attends in one launch to rows that are contiguous and aligned"


class Launches(SplitLaunches):
    """The launches of a call, replayed with the tensors and the scales of another layer."""

    def attend(
        self, query: Tensor, window: Latents, entries: Latents, options: AttentionOptions, out: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Replay."""
        of_layer = layer_args(window, entries, options)
        sinks = contiguous(options.sinks)
        return self.replay((query, window.cache, entries.cache), of_layer.values(), (sinks,), out)


def _launch_all(
    query: Tensor, window: Latents, entries: Latents, plan: CompressedPlan, options: AttentionOptions, out: Out
) -> Launches:
    """Launch the kernel, and the reduction if steps are split."""
    splits = count_splits(query, plan, options)
    shape = num_tokens, num_heads, size = query.shape
    if splits == 1:
        launch = _launch(query, window, entries, plan, options, out, whole())
        return Launches(out.out.shape, (num_tokens, num_heads, size), [(launch, 0)], 1, None, with_lse=True)
    parts = query.new_empty(splits, *shape, dtype=torch.float32)
    part_lses = query.new_empty(splits, *shape[:2], dtype=torch.float32)
    split = part(splits, run=0, balance=False, overlap=False, after_level=False)
    launch = _launch(query, window, entries, plan, options, Out(parts, part_lses), split)
    reduction = launch_reduction(parts, part_lses, out, plan.batch, options, overlap=can_overlap(query.device))
    return Launches(out.out.shape, (num_tokens, num_heads, size), [(launch, 0)], splits, reduction, with_lse=True)


def count_splits(query: Tensor, plan: CompressedPlan, options: AttentionOptions) -> int:
    """Return in how many splits the steps of a tile are computed: no more than there are SMs for all tiles.

    Under `batch_invariant` there are none, as their number depends on the batch.
    """
    if options.batch_invariant:
        return 1
    steps = -(-min(plan.batch.max_seq_len, _tokens(plan)) // KEYS) + -(-plan.entries.batch.max_seq_len // KEYS)
    return max(1, min(sms_of(query.device) // _tiles(query), steps))


def _tiles(query: Tensor) -> int:
    return query.shape[0] * (query.shape[1] // ROWS)


def _tokens(plan: CompressedPlan) -> int:
    """Return the most tokens that a query sees as they are."""
    left, _ = plan.window.window
    return FURTHEST if left < 0 else min(left + 1, FURTHEST)


def _launch(
    query: Tensor,
    window: Latents,
    entries: Latents,
    plan: CompressedPlan,
    options: AttentionOptions,
    out: Out,
    split: Whole | Part,
) -> Launch:
    """Launch the kernel."""
    query, scale = with_positive_scale(query, options.softmax_scale)
    kind = FORMATS.get(window.cache.dtype, "")
    sizes = Sizes(
        ROWS=ROWS,
        KEYS=KEYS,
        SIZE=SIZE,
        SPLIT=isinstance(split, Part),
        FORMAT=kind,
        RESCALED=window.cache_scale != entries.cache_scale,
        REGISTERS=REGISTERS[kind],
    )
    pools = [_pool_of(window.cache, plan.batch.block_table), _pool_of(entries.cache, plan.entries.batch.block_table)]
    if plan.selected:
        pools[1] = pools[1]._replace(seq_lens=plan.entries.batch.seq_lens)
    programs = _tiles(query) if kind else min(_tiles(query), sms_of(query.device))
    return Launch(
        _attend_kernel,
        (programs, split.splits if isinstance(split, Part) else 1),
        {"queries.query": query, "keys.key": pools[0].key, "entries.key": pools[1].key}
        | {"out.out": out.out, "out.lse": out.lse}
        | layer_args(window, entries, options),
        dict(
            queries=queries_of(query, plan.batch, query.shape[1], query.shape[1]),
            keys=pools[0],
            entries=pools[1],
            sight=Sight(_tokens(plan), 1.0, tl.constexpr(plan.ratio)),
            options=options_of(options, scale),
            split=split,
            out=out,
            TILE=Sizes(*map(tl.constexpr, sizes)),
        ),
        dict(num_warps=4),
    )


def _pool_of(cache: Tensor, table: Tensor | None) -> Pool:
    """Return a pool as the kernel takes it, fp8 as bytes."""
    assert table is not None  # the plan has checked it
    return Pool(
        key=cache.view(torch.uint8) if cache.dtype in FORMATS else cache,
        block_table=table,
        seq_lens=None,
        table_row_stride=table.stride(0),
        table_stride=table.stride(1),
        block_stride=cache.stride(0),
        token_stride=cache.stride(1),
        ratio=1.0,
        BLOCK_SIZE=tl.constexpr(cache.shape[1]),
    )


def layer_args(window: Latents, entries: Latents, options: AttentionOptions) -> Given:
    """Return the arguments that differ between layers besides their tensors: sinks, and scales of fp8 pools."""
    given: Given = {} if options.sinks is None else {"options.sinks": options.sinks.contiguous()}
    if window.cache.dtype in FORMATS:
        largest = max(window.cache_scale, entries.cache_scale)
        assert options.softmax_scale is not None  # the path has set it
        given["options.scale"] = (abs(options.softmax_scale) or 1.0) * largest  # above 0
        given |= {"sight.number": float(largest)}
        given |= {"keys.ratio": window.cache_scale / largest, "entries.ratio": entries.cache_scale / largest}
    return given


# --- the consumers: they multiply ---


@gluon.jit
@no_type_check
def _attend_last_of_first(state, room, count, span, SCORES: gl.constexpr):
    """Take a last step of the first consumer, after which the other one has none."""
    state = attend_own_of_first(state, room, count, span, SCORES)
    leave(room.empty.index(1))
    return state


@gluon.jit
@no_type_check
def _attend_last_of_second(state, room, count):
    """Take a last step of the other consumer, after which the second one has none, and skip that."""
    acc, sums, row_max = state
    now, slot = count >> 2 & 1, count & 1
    old_max = row_max
    mbarrier.wait(room.ready.index(0), now)
    see_copies(room)
    row_max = room.row_max.index(0).load(row_max.type.layout)
    acc, sums = shrink(acc, sums, old_max, row_max)
    outputs = multiply_values(room, acc, 1, slot ^ 1)
    acc = warpgroup_mma_wait(0, deps=[outputs])
    leave(room.empty.index(0))
    mbarrier.wait(room.full.index(1), now)
    leave(room.empty.index(1))
    mbarrier.arrive(room.ready.index(1))
    leave(room.read.index(1))
    return acc, sums, row_max


@gluon.jit
@no_type_check
def _multiply(queries, sight, options, rooms, out, TILE, WHO: gl.constexpr):
    """Attend to the keys that are loaded into the slots, tile by tile, and store half of the columns of each output."""
    HALF: gl.constexpr = TILE.SIZE // 2
    # Results of `wgmma`, version 3: four warps of 16 rows each, with all columns.
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE.KEYS, 16])
    OUTPUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 16])
    OF_ROWS: gl.constexpr = gl.SliceLayout(1, SCORES)
    room, beside = rooms
    tiles = gl.program_id(0) * 0
    number = gl.program_id(0)
    # `count` is 4 * pair + WHO, which the compiler does not know, as in `latents_hopper._multiply`.
    count = gl.program_id(0) * 0 + WHO
    four = gl.num_programs(2) + 3
    span = hear(beside, tiles, tiles, TILE)
    while span.steps >= 0:
        row_max = gl.full([TILE.ROWS], float("-inf"), gl.float32, OF_ROWS)
        sums = own_sums(gl.zeros([TILE.ROWS, TILE.KEYS], gl.float32, SCORES))
        state = gl.zeros([TILE.ROWS, HALF], gl.float32, OUTPUT), sums, row_max
        if span.steps <= WHO:  # no step of its own
            leave(room.query_read.index(0))
        end = count + 4 * (span.steps // 2)
        while count < end:
            if WHO == 0:
                state = attend_first(state, room, count, span, SCORES)
            else:
                state = attend_second(state, room, count, span, SCORES)
            count += four
        if span.steps % 2 == 1:
            if WHO == 0:
                state = _attend_last_of_first(state, room, count, span, SCORES)
            else:
                state = _attend_last_of_second(state, room, count)
            count += four
        acc, sums, row_max = state
        mine = (tiles & 1) * 2  # the other one may still read sums of the tile before
        room.row_sum.index(mine + WHO).store(gl.convert_layout(gl.sum(sums, 1), OF_ROWS))
        mbarrier.arrive(room.summed.index(0))
        mbarrier.wait(room.summed.index(0), tiles & 1)
        row_sum = room.row_sum.index(mine).load(OF_ROWS) + room.row_sum.index(mine + 1).load(OF_ROWS)
        tile = find_tile(queries, number, TILE)
        _store(sight, options, beside, tile, Softmax(row_max, row_sum, acc), out, TILE, WHO)
        tiles += 1
        number += gl.num_programs(0)
        span = hear(beside, tiles, count >> 2, TILE)


@gluon.jit
@no_type_check
def _columns(x, WHICH: gl.constexpr, LAYOUT: gl.constexpr):
    """Return a half of the columns of a tile."""
    ROWS: gl.constexpr = x.shape[0]
    HALF: gl.constexpr = x.shape[1] // 2
    first, second = gl.split(x.reshape([ROWS, 2, HALF]).permute((0, 2, 1)))
    return gl.convert_layout(first if WHICH == 0 else second, LAYOUT, assert_trivial=True)


@gluon.jit
@no_type_check
def _store(sight, options, beside, tile, softmax, out, TILE, WHO: gl.constexpr):
    """Store the half of the outputs that a consumer has, and log-sum-exps.

    Outputs go by shared memory, some columns at a time, so that each thread stores 16 contiguous bytes; products leave
    4 with it.
    """
    OUTPUT: gl.constexpr = softmax.acc.type.layout
    HALF: gl.constexpr = softmax.acc.shape[1]
    QUARTER: gl.constexpr = HALF // 4
    TWO: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF // 2, 16])
    ONE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, QUARTER, 16])
    LINES: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    TYPE: gl.constexpr = out.out.dtype.element_ty
    row_max = gl.convert_layout(softmax.row_max, gl.SliceLayout(1, OUTPUT))
    row_sum = gl.convert_layout(softmax.row_sum, gl.SliceLayout(1, OUTPUT))
    rows = gl.arange(0, TILE.ROWS, layout=gl.SliceLayout(1, OUTPUT))
    sink = None
    if options.sinks is not None and not TILE.SPLIT:
        sink = gl.load(options.sinks + tile.head + rows).to(gl.float32)
    # One division per row, not one per element.
    share, logs = normalize(row_max, row_sum, gl.full([TILE.ROWS, 1], 1.0, gl.float32, OUTPUT), sink)
    if TILE.FORMAT != "":
        share *= sight.number
    values = softmax.acc * share
    if WHO == 0:
        gl.store(out.lse + tile.place + rows, logs)
    if TILE.SPLIT:
        at = WHO * HALF + gl.arange(0, HALF, layout=gl.SliceLayout(0, OUTPUT))
        gl.store(out.out + (tile.place + rows)[:, None] * TILE.SIZE + at[None, :], values)
    else:
        line = tile.place + gl.arange(0, TILE.ROWS, layout=gl.SliceLayout(1, LINES))
        at_line = WHO * HALF + gl.arange(0, QUARTER, layout=gl.SliceLayout(0, LINES))
        pointers = out.out + (line[:, None] * TILE.SIZE + at_line[None, :])
        room = beside.lines.index(WHO)
        for quarter in gl.static_range(4):
            some = _columns(_columns(values, quarter // 2, TWO), quarter % 2, ONE)
            room.store(some.to(TYPE).to(room.dtype, bitcast=True))
            gl.store(pointers + quarter * QUARTER, room.load(LINES).to(TYPE, bitcast=True))


# --- a program ---


@gluon.jit(do_not_specialize=CHANGING)
@no_type_check
def _attend_kernel(queries, keys, entries, sight, options, split, out, TILE):
    """Attend from some heads of queries to their windows and entries, with two consumers and a producer.

    Quantized queries would have no room in the registers of the producer: such a program has one tile.
    """
    LOG2E: gl.constexpr = 1.4426950408889634
    TYPE: gl.constexpr = queries.query.dtype.element_ty if TILE.FORMAT == "" else gl.float16
    QUERIES: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    SHARED: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    NUMBERS: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    BARRIERS: gl.constexpr = mbarrier.MBarrierLayout()
    power = gl.full([TILE.ROWS], 1.0, gl.float32, gl.SliceLayout(1, QUERIES))
    if TILE.FORMAT != "":
        q, power = load_query(queries, find_tile(queries, gl.program_id(0), TILE), QUERIES, TILE)
    room = Room(
        query=gl.allocate_shared_memory(TYPE, [1, TILE.ROWS, TILE.SIZE], SHARED),
        rope_query=None,
        key=gl.allocate_shared_memory(TYPE, [2, TILE.KEYS, TILE.SIZE], SHARED),
        rope_key=None,
        weights=gl.allocate_shared_memory(TYPE, [TILE.ROWS, TILE.KEYS], SHARED),
        factor=gl.allocate_shared_memory(gl.float32, [TILE.ROWS], NUMBERS, power * (options.scale * LOG2E)),
        last=None,
        row_max=gl.allocate_shared_memory(gl.float32, [2, TILE.ROWS], NUMBERS),
        row_sum=gl.allocate_shared_memory(gl.float32, [4, TILE.ROWS], NUMBERS),
        full=gl.allocate_shared_memory(gl.int64, [2, 1], BARRIERS),
        empty=gl.allocate_shared_memory(gl.int64, [2, 1], BARRIERS),
        ready=gl.allocate_shared_memory(gl.int64, [2, 1], BARRIERS),
        read=gl.allocate_shared_memory(gl.int64, [2, 1], BARRIERS),
        summed=gl.allocate_shared_memory(gl.int64, [1, 1], BARRIERS),
        query_read=gl.allocate_shared_memory(gl.int64, [1, 1], BARRIERS),
        IN_FLIGHT=True if TILE.FORMAT == "" else None,
    )
    beside = Beside(
        told=gl.allocate_shared_memory(gl.int32, [4], NUMBERS),
        known=gl.allocate_shared_memory(gl.int64, [1, 1], BARRIERS),
        lines=gl.allocate_shared_memory(TYPE, [2, TILE.ROWS, TILE.SIZE // 8], SHARED),
    )
    if TILE.FORMAT != "":
        room.query.index(0).store(q)
    for slot in gl.static_range(2):
        mbarrier.init(room.full.index(slot), count=128 if TILE.FORMAT == "" else 1)
        mbarrier.init(room.empty.index(slot), count=256)
        mbarrier.init(room.ready.index(slot), count=1)
        mbarrier.init(room.read.index(slot), count=128)
    mbarrier.init(room.summed.index(0), count=2)
    mbarrier.init(room.query_read.index(0), count=256)
    mbarrier.init(beside.known.index(0), count=1)
    fence_async_shared()
    tl.debug_barrier()
    gl.warp_specialize(
        [
            (_multiply, (queries, sight, options, (room, beside), out, TILE, 0)),
            (_multiply, (queries, sight, options, (room, beside), out, TILE, 1)),
            (bring, (queries, (keys, entries), sight, split, (room, beside), out, TILE)),
        ],
        [4, 4],
        [TILE.REGISTERS[0], TILE.REGISTERS[1]],
    )
