"""Prompts of differential attention on Hopper, warp-specialized: two warpgroups take one softmax of a pair each.

It is `fastattn.kernels.triton.differential` for prompts, with the roles, turns and slots of `prompts_hopper`: two
consumer warpgroups multiply, and a producer loads ahead of them. A row has the queries of both heads of its pair side
by side, `[q1 q2]`, a key is `[k1 k2]`, and a value `[v1 v2]`: a tile of them is one of heads of 128 elements whose
halves lie apart in memory. Both consumers have the same 64 rows, keys and values, and each has one of the softmaxes:

    group 0      | issue q1 k1, p1 v of the step before |              softmax 1               | issue q1 k1, ..
    group 1      |              softmax 2               | issue q2 k2, p2 v of the step before |     softmax 2

So a consumer has one tile of scores and one output in its registers, and its steps are those of `prompts_hopper`. At
the end of a tile the second output goes through shared memory to the first consumer, which subtracts.

Source: Ye et al. 2024, "Differential Transformer"; Shah et al. 2024, "FlashAttention-3". Hopper's asynchronous products
    and barriers: the PTX manual, "wgmma", "mbarrier", "bar".
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

from fastattn.kernels import device as devices
from fastattn.kernels.problem import asked_of, uses_positions
from fastattn.kernels.triton.hopper import is_aligned, is_there, leave, reach_of, store_lines, store_padding
from fastattn.kernels.triton.launch import CHANGING
from fastattn.kernels.triton.load_hopper import (
    SLOTS,
    CountedLaunch,
    Room,
    bring,
    clear_rows,
    find_seen,
    find_tile,
    parity,
    read_number,
)
from fastattn.kernels.triton.masks import mask_of
from fastattn.kernels.triton.merge import Out
from fastattn.kernels.triton.prompts_hopper import (
    KNOWS,
    Sizes,
    attend_steps,
    finish,
    first_step,
    give_turn,
    in_16_bits,
)
from fastattn.kernels.triton.queries import Given, count_tiles, options_of, queries_of
from fastattn.kernels.triton.tensor_map import heads_as_columns
from fastattn.kernels.triton.tuning import LaunchConfig
from refattn.options import AttentionOptions
from refattn.plan import Plan

HEAD_SIZE = 64  # elements of a query and of a key; both halves of a value are 128
ROWS = 64  # rows of a tile
KEYS = 128  # keys of a step
REGISTERS = {"tiles": (232, 40), "pages": (216, 72)}  # by how keys come, see `prompts_hopper`


class Table(NamedTuple):
    """The block table, as `keys.Pages` has it, without functions."""

    block_table: Any
    table_row_stride: Any
    table_stride: Any
    BLOCK_SIZE: Any


class PairedKeys(NamedTuple):
    """A pool of pairs of heads, `[half, key or value, n, p, pairs, d]`, as the kernel takes it.

    Attributes:
        cache: the pool; None where it comes by tiles.
        half_stride: of halves.
        value_stride: of keys and values.
        strides: of blocks, tokens and pairs, and of elements.
        map_half: rows of the tensor map between halves.
        map_value: rows of the map between keys and values.
        where: the block table.
        HEAD_SIZE: elements of a head.
    """

    cache: Any
    half_stride: Any
    value_stride: Any
    strides: Any
    map_half: Any
    map_value: Any
    where: Any
    HEAD_SIZE: Any


class Halves(NamedTuple):
    """The keys and values of first heads, as `load_hopper.bring` takes them; see `Numbers` of `keys`."""

    key: Any
    value: Any
    key_strides: Any
    value_strides: Any
    where: Any


class Answers(NamedTuple):
    """Where outputs go, and what is done with them before; see `merge.Out` and `differential.Difference`."""

    out: Any
    lse: Any
    lambda_full: Any
    norm_weight: Any
    norm_eps: Any
    factor: Any


class Exchange(NamedTuple):
    """Shared memory for the second output on its way to the first consumer, and its barriers.

    Attributes:
        output: [rows, dv], in float32.
        full: the barrier of an output that is there.
        empty: the barrier of an output that was read.
    """

    output: Any
    full: Any
    empty: Any


class Rows(NamedTuple):
    """The rows of a tile.

    Attributes:
        places: where they are in `[t, pairs]`.
        pairs: their pairs of query heads.
        is_row: whether they are there.
    """

    places: Any
    pairs: Any
    is_row: Any


def takes(query: Tensor, cache: Tensor, plan: Plan, options: AttentionOptions, tuning: LaunchConfig) -> bool:
    """Return whether this kernel computes a call of differential attention, as `differential` has tuned it."""
    return (
        is_there(query.device)
        and plan.batch.max_query_len * (query.shape[1] // 2 // cache.shape[4]) > ROWS  # else one tile may hold all
        and tuning.most_splits == 1
        and not uses_positions(plan, options)
        and asked_of(plan, options) <= KNOWS
        and query.shape[2] == HEAD_SIZE
        and query.itemsize == 2
        and query.dtype == cache.dtype
        and all(is_aligned(x, *x.stride()[:-1]) for x in (query, cache))
    )


def launch(
    query: Tensor,
    cache: Tensor,
    plan: Plan,
    options: AttentionOptions,
    scale: float,
    difference: Any,
    layer_args: Given,
    out: Out,
) -> CountedLaunch:
    """Launch the kernel, where `takes` allows it, instead of `differential.attend_pairs`.

    Args:
        query: [t, h, d].
        cache: [2, 2, n, p, pairs, d].
        plan: the lengths, the block table and the mask.
        options: the options of the layer.
        scale: of the scores, above 0.
        difference: a `differential.Difference` that `layer_args` fills in.
        layer_args: what differs between layers beside tokens.
        out: the outputs and log-sum-exps; rows that belong to no sequence are written, too.
    """
    batch, num_pairs = plan.batch, cache.shape[4]
    num_tokens, num_heads, _ = query.shape
    group = num_heads // 2 // num_pairs
    half_stride, value_stride, block, token, *strides = cache.stride()
    table = batch.block_table
    assert table is not None  # a plan over pages has checked it
    # A window begins within a block, and its tile has two blocks.
    tiles = heads_as_columns(cache, KEYS) if plan.window_size[0] < 0 else None
    in_bulk = tiles is not None
    sizes = Sizes(
        ROWS=ROWS,
        OWN_ROWS=ROWS,  # both consumers have all
        KEYS=KEYS,
        PLACES=1,
        QUERY_SLOTS=SLOTS.value,
        PAGES=True,
        IN_BULK=in_bulk,
        KEY_ROWS=block // token if in_bulk else 0,
        VALUE_ROWS=block // token if in_bulk else 0,
        SAME_OFFSETS=True,
        INT64_OFFSETS=reach_of(cache[0, 0]) >= 2**31,
        REGISTERS=REGISTERS["tiles" if in_bulk else "pages"],
    )
    keys = PairedKeys(
        cache=None if in_bulk else cache,
        half_stride=half_stride,
        value_stride=value_stride,
        strides=(block, token, *strides),
        map_half=half_stride // token if in_bulk else 0,
        map_value=value_stride // token if in_bulk else 0,
        where=Table(table, table.stride(0), table.stride(1), tl.constexpr(cache.shape[3])),
        HEAD_SIZE=tl.constexpr(HEAD_SIZE),
    )
    queries = queries_of(query, batch, num_heads // 2, group)
    row, head, element = query.stride()
    programs = count_tiles(batch, num_tokens, group, ROWS) * num_pairs
    pool = {"tiles": tiles} if in_bulk else {"keys.cache": cache}
    return CountedLaunch(
        _attend_kernel,
        (min(programs, devices.num_sms(query.device)),),
        {"queries.query": query, **pool, "out.out": out.out, "out.lse": out.lse} | layer_args,
        dict(
            queries=queries._replace(strides=(row, 2 * head, element)),
            keys=keys,
            mask=mask_of(plan),
            options=options_of(options, scale),
            difference=difference,
            out=out,
            programs=programs,
            head_stride=head,
            **({} if in_bulk else dict(tiles=None)),
            TILE=Sizes(*map(tl.constexpr, sizes)),
        ),
        dict(num_warps=4),
    )


@gluon.jit
@no_type_check
def _begin(queries, answers, room, WHO: gl.constexpr):
    """Write the padding rows, or let the other consumer begin; return two counts of 0, of tiles and of steps."""
    if WHO == 0:
        HEADS: gl.constexpr = 2 * queries.HEADS
        first_padding = gl.load(queries.cu_seqlens_q + queries.num_seqs).to(gl.int64) * HEADS + gl.program_id(0)
        end = queries.num_tokens.to(gl.int64) * HEADS
        store_padding(answers.out, answers.lse, first_padding, end, gl.num_programs(0), room.value.shape[2] // 2)
    else:
        give_turn(WHO)
    return gl.program_id(0) * 0, gl.program_id(0) * 0  # 0, in a form that a loop may change


@gluon.jit
@no_type_check
def _clear(tile, items, room, TILE):
    """Wait for the values of the first step, which has the last keys, and clear those past the last key of a tile."""
    behind = tile.run.end - tile.run.begin - (tile.steps - 1) * TILE.KEYS
    mbarrier.wait(room.has_values.index(items % SLOTS), parity(items))
    fence_async_shared()
    if TILE.IN_BULK and behind < TILE.KEYS:
        clear_rows(room.value.index(items % SLOTS), behind)


@gluon.jit
@no_type_check
def _add_last(acc, weights, items, room):
    """Add the values of the last step."""
    slot = (items - 1) % SLOTS
    mbarrier.wait(room.has_values.index(slot), parity(items - 1))
    fence_async_shared()
    sums = warpgroup_mma(weights, room.value.index(slot), acc, is_async=True)
    acc, _ = warpgroup_mma_wait(0, deps=[sums, weights])
    leave(room.no_values.index(slot))
    return acc


@gluon.jit
@no_type_check
def _multiply(queries, mask, options, answers, shared, programs, TILE, WHO: gl.constexpr):
    """Attend with one softmax from each tile to the keys that are loaded; the first consumer subtracts the other's."""
    room, exchange = shared
    SIZE: gl.constexpr = room.query.shape[2] // 2
    DV: gl.constexpr = room.value.shape[2]
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE.KEYS, 16])
    OUTPUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DV, 16])
    tiles, items = _begin(queries, answers, room, WHO)
    number = read_number(room, tiles, WHO, TILE)
    while number < programs:
        tile = find_tile(number, programs, queries, mask, TILE)
        seen = find_seen(tile, queries, mask, 0, gl.SliceLayout(1, SCORES), TILE)
        query_slot = tiles % SLOTS
        q = (room.query.index(query_slot).slice(WHO * SIZE, SIZE, 1),)
        x, row_max, row_sum = first_step(q, room, items, seen, options, SCORES, WHO)
        weights = gl.convert_layout(in_16_bits(x, room.key.dtype), gl.DotOperandLayout(0, OUTPUT, 2))
        _clear(tile, items, room, TILE)
        state = weights, gl.zeros([TILE.ROWS, DV], gl.float32, OUTPUT), row_max, row_sum, items + 1
        state = attend_steps(state, (1, seen.plain_from), q, room, seen, options, WHO, True)
        state = attend_steps(state, (seen.plain_from, seen.plain_to), q, room, seen, options, WHO, False)
        if mask.LEFT:
            state = attend_steps(state, (seen.plain_to, tile.steps), q, room, seen, options, WHO, True)
        weights, acc, row_max, row_sum, items = state
        tl.debug_barrier()  # all four warps have read queries and their number
        mbarrier.arrive(room.no_queries.index(query_slot))
        acc = _add_last(acc, weights, items, room)
        rows = _rows_of(queries, tile, gl.SliceLayout(1, OUTPUT), TILE)
        values = _finished(row_max, row_sum, acc, rows, options, answers, WHO)
        if WHO == 1:
            mbarrier.wait(exchange.empty.index(0), parity(tiles, 1) ^ 1)
            exchange.output.store(values)
            tl.debug_barrier()
            mbarrier.arrive(exchange.full.index(0))
        else:
            mbarrier.wait(exchange.full.index(0), parity(tiles, 1))
            others = exchange.output.load(OUTPUT)
            tl.debug_barrier()
            mbarrier.arrive(exchange.empty.index(0))
            _store_difference(values, others, rows, answers)
        tiles += 1
        number = read_number(room, tiles, WHO, TILE)


@gluon.jit
@no_type_check
def _rows_of(queries, tile, LAYOUT: gl.constexpr, TILE):
    """Return the rows of a tile."""
    rows = tile.first_row + gl.arange(0, TILE.ROWS, layout=LAYOUT)
    pairs = tile.kv_head * queries.GROUP + rows % queries.GROUP
    tokens = (tile.first_query + rows // queries.GROUP).to(gl.int64)
    return Rows(tokens * queries.HEADS + pairs, pairs, rows < tile.num_rows)


@gluon.jit
@no_type_check
def _finished(row_max, row_sum, acc, rows, options, answers, WHO: gl.constexpr):
    """Return the output of a softmax, and store its log-sum-exps."""
    LAYOUT: gl.constexpr = gl.SliceLayout(1, acc.type.layout)
    row_max = gl.convert_layout(row_max, LAYOUT)
    row_sum = gl.convert_layout(gl.sum(row_sum, 1), LAYOUT)
    values, logs = finish(row_max, row_sum, acc, options.sinks, 2 * rows.pairs + WHO, rows.is_row)
    gl.store(answers.lse + 2 * rows.places + WHO, logs, mask=rows.is_row)
    return values


@gluon.jit
@no_type_check
def _store_difference(values, others, rows, answers):
    """Subtract, norm, and store; as `differential.store_difference`."""
    SIZE: gl.constexpr = values.shape[1]
    delta = values - gl.load(answers.lambda_full).to(gl.float32) * others
    size = gl.rsqrt(gl.sum(delta * delta, 1) / SIZE + answers.norm_eps) * answers.factor
    normed = delta * size[:, None]
    if answers.norm_weight is not None:
        at = gl.arange(0, SIZE, layout=gl.SliceLayout(0, values.type.layout))
        normed *= gl.load(answers.norm_weight + at).to(gl.float32)[None, :]
    store_lines(answers.out, normed, rows.places, rows.is_row)


@gluon.jit
@no_type_check
def _initialize(room, exchange, TILE):
    """Initialize the barriers of slots, and those of the exchange."""
    for slot in gl.static_range(SLOTS):  # slots of queries
        mbarrier.init(room.has_queries.index(slot), count=128 + 1)  # every producer thread, and one for the number
        mbarrier.init(room.no_queries.index(slot), count=2)  # both consumer warpgroups
    for slot in gl.static_range(SLOTS):  # slots of keys, and of values
        mbarrier.init(room.has_keys.index(slot), count=1 if TILE.IN_BULK else 128)
        mbarrier.init(room.no_keys.index(slot), count=2 * 128)  # every consumer thread
        mbarrier.init(room.has_values.index(slot), count=1 if TILE.IN_BULK else 128)
        mbarrier.init(room.no_values.index(slot), count=2 * 128)
    mbarrier.init(exchange.full.index(0), count=1)
    mbarrier.init(exchange.empty.index(0), count=1)


@gluon.jit(do_not_specialize=CHANGING)
@no_type_check
def _attend_kernel(
    queries,
    keys,
    mask,
    options,
    difference,
    out,
    programs,
    head_stride,  # between query heads
    tiles,  # the tensor map of the pool
    counters,
    TILE,
):
    """Attend from tiles of pairs of query rows to all their keys, with two consumer warpgroups and a producer."""
    TYPE: gl.constexpr = queries.query.dtype.element_ty
    SIZE: gl.constexpr = 2 * keys.HEAD_SIZE
    SHARED: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    BARRIERS: gl.constexpr = mbarrier.MBarrierLayout()
    room = Room(
        gl.allocate_shared_memory(TYPE, [SLOTS, TILE.ROWS, SIZE], SHARED),
        gl.allocate_shared_memory(TYPE, [SLOTS, TILE.KEYS, SIZE], SHARED),
        gl.allocate_shared_memory(TYPE, [SLOTS, TILE.KEYS, SIZE], SHARED),
        gl.allocate_shared_memory(gl.int32, [SLOTS, 1], gl.SwizzledSharedLayout(1, 1, 1, [0])),
        gl.allocate_shared_memory(gl.int64, [SLOTS, 1], BARRIERS),
        gl.allocate_shared_memory(gl.int64, [SLOTS, 1], BARRIERS),
        gl.allocate_shared_memory(gl.int64, [SLOTS, 1], BARRIERS),
        gl.allocate_shared_memory(gl.int64, [SLOTS, 1], BARRIERS),
        gl.allocate_shared_memory(gl.int64, [SLOTS, 1], BARRIERS),
        gl.allocate_shared_memory(gl.int64, [SLOTS, 1], BARRIERS),
        TILE.IN_BULK,
        head_stride,
        keys.half_stride,
        keys.map_half,
        0,
        keys.map_value,
    )
    exchange = Exchange(
        gl.allocate_shared_memory(gl.float32, [TILE.ROWS, SIZE], gl.NVMMASharedLayout(128, 32, rank=2)),
        gl.allocate_shared_memory(gl.int64, [1, 1], BARRIERS),
        gl.allocate_shared_memory(gl.int64, [1, 1], BARRIERS),
    )
    _initialize(room, exchange, TILE)
    fence_async_shared()
    tl.debug_barrier()
    answers = Answers(
        out.out, out.lse, difference.lambda_full, difference.norm_weight, difference.norm_eps, difference.factor
    )
    value = None
    if not TILE.IN_BULK:
        value = keys.cache + keys.value_stride
    halves = Halves(keys.cache, value, keys.strides, keys.strides, keys.where)
    gl.warp_specialize(
        [
            (_multiply, (queries, mask, options, answers, (room, exchange), programs, TILE, 0)),
            (_multiply, (queries, mask, options, answers, (room, exchange), programs, TILE, 1)),
            (bring, (queries, halves, mask, room, programs, (tiles, tiles), counters, TILE)),
        ],
        [4, 4],
        [TILE.REGISTERS[0], TILE.REGISTERS[1]],
    )
