"""Prompts on Hopper, warp-specialized: two warpgroups multiply in turns, a third loads, with barriers between them.

Prompts are compute-bound: tensor cores should always have products under way. In
`fastattn.kernels.triton.attention` all warps of a program wait for the same products, and then take exponentials
together. Here each of two consumer warpgroups has 64 of the 128 query rows of a tile, and they take turns (ping-pong):
while one computes its softmax, the products of the other go on. A producer warpgroup copies keys and values into slots
of shared memory, ahead of both:

    load         | keys 2 | values 1 | keys 3 | values 2 | ..
    group 0      | issue scores 1, values 0 |         softmax 1        | issue scores 2, values 1 |
    group 1      |         softmax 0        | issue scores 1, values 0 |         softmax 1        |

A group issues the products of a step with its keys, and those of the step before with its values, in one turn: so the
product with the values overlaps with a softmax of its own group, too. It waits for that product after half of the
exponentials; the output is rescaled and the weights are rounded among the other half.

Steps go from the last keys to the first, so that the masked ones of a causal prompt come first, and a mask is one
comparison (two in a window). A row lies in four threads, whose sums are added at its end. Programs are persistent: each
draws tile after tile from a counter, from the end of the last sequence on (the last rows of a sequence see most keys),
and has the queries of the next tile loaded amid the steps of this one; with keys of 192, which leave room for one tile
of queries, after them.

How keys come, and the counter, is in `fastattn.kernels.triton.load_hopper`: by whole tiles (TMA) from rows, and from
blocks that hold whole steps; else by 16 bytes per thread.

Triton does not let a kernel assign work to warps, so this one is written in Gluon, Triton's lower-level language, with
explicit layouts and barriers. Triton's interpreter does not run it; `twinattn.course.gluon` does.

Source: Shah et al. 2024, "FlashAttention-3": roles for warps and turns (3.1), and the product with the values beside
    the next softmax (3.2). Hopper's asynchronous products and barriers: the PTX manual, "wgmma", "mbarrier", "bar".
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
from fastattn.kernels.kernel import BATCH, fields_of
from fastattn.kernels.kernel import options_of as known_options
from fastattn.kernels.problem import asked_of, uses_positions, with_positive_scale
from fastattn.kernels.triton.hopper import is_aligned, is_there, leave, reach_of, store_lines, store_padding
from fastattn.kernels.triton.keys import keys_of
from fastattn.kernels.triton.launch import CHANGING, Launch
from fastattn.kernels.triton.load_hopper import (
    SLOTS,
    CountedLaunch,
    Room,
    barrier_of,
    bring,
    clear_rows,
    find_seen,
    find_tile,
    parity,
    places_of,
    read_number,
)
from fastattn.kernels.triton.masks import mask_of
from fastattn.kernels.triton.merge import Out, Part, Whole, normalize
from fastattn.kernels.triton.quantized import UNQUANTIZED, Quantization
from fastattn.kernels.triton.queries import count_tiles, layer_args, options_of, queries_of
from fastattn.kernels.triton.tensor_map import heads_as_columns, rows_of_block
from fastattn.kernels.triton.tuning import LaunchConfig
from refattn.options import AttentionOptions
from refattn.plan import Plan

KNOWS = BATCH | fields_of(
    Plan, *("batch", "block_size", "causal", "window_size", "first_keys", "positions", "sequences")
)
KNOWS |= known_options("softmax_scale", "sinks")  # fields that a plan and a layer may set
ROWS = 128  # rows in a tile; each consumer warpgroup has half of them
KEYS = 128  # keys of a step
# By the sizes of a key and of a value: places of a key in shared memory, whose sizes are powers of two, and slots for
# tiles of queries. Both slots for keys and for values take 128, 64 and 160 KiB, and a tile of queries 32, 16 and 48, of
# 227. So keys of 192 leave room for one tile. With 64 keys in a step there would be room for two, but every step has
# waits and a turn, however short it is.
LAYOUTS = {(128, 128): (1, 2), (64, 64): (1, 2), (192, 128): (3, 1)}
LOG2E = tl.constexpr(1.4426950408889634)
# Registers per consumer and per producer thread, whose 2 * consumer + producer is at most 65536 / 128: where keys come
# by whole tiles; from rows, which have three dimensions; from pages, which have four.
REGISTERS = {"tiles": (232, 40), 3: (216, 72), 4: (208, 88)}


class Sizes(NamedTuple):
    """The constants of a launch.

    Attributes:
        ROWS: rows of a tile.
        OWN_ROWS: rows of a consumer.
        KEYS: keys of a step.
        PLACES: places of a query and of a key in shared memory.
        QUERY_SLOTS: slots for tiles of queries.
        PAGES: whether keys lie in pages, not in rows.
        IN_BULK: whether keys and values come by whole tiles.
        KEY_ROWS: rows of the map of keys from block to block.
        VALUE_ROWS: the same, of values.
        SAME_OFFSETS: whether values have the offsets of their keys.
        INT64_OFFSETS: whether an offset may be 2**31 elements or more.
        REGISTERS: registers of a consumer thread, and of a producer thread.
    """

    ROWS: Any
    OWN_ROWS: Any
    KEYS: Any
    PLACES: Any
    QUERY_SLOTS: Any
    PAGES: Any
    IN_BULK: Any
    KEY_ROWS: Any
    VALUE_ROWS: Any
    SAME_OFFSETS: Any
    INT64_OFFSETS: Any
    REGISTERS: Any


def suits(
    query: Tensor,
    num_kv_heads: int,
    value_head_size: int,
    plan: Plan,
    options: AttentionOptions,
    tuning: LaunchConfig,
) -> bool:
    """Return whether this kernel computes a level of attention, where keys and values have the type of the queries.

    It splits no keys. A launch that is tuned for smaller tiles, as for keys of 192, may be split although half of the
    SMs have a tile here; this kernel then goes first, as over heads of 128 its products take half the time.
    """
    group = query.shape[1] // num_kv_heads
    tiles = count_tiles(plan.batch, query.shape[0], group, ROWS) * num_kv_heads
    return (
        is_there(query.device)
        and plan.batch.max_query_len * group > ROWS  # else one tile may hold all
        and (tuning.most_splits == 1 or (tuning.block_m < ROWS and 2 * tiles >= devices.num_sms(query.device)))
        and not (tuning.run or uses_positions(plan, options))
        and asked_of(plan, options) <= KNOWS
        and (query.shape[2], value_head_size) in LAYOUTS
        and query.itemsize == 2
    )


def takes(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    plan: Plan,
    options: AttentionOptions,
    tuning: LaunchConfig,
    quantization: Quantization,
) -> bool:
    """Return whether this kernel computes a level of attention to rows or pages, as `attend_levels` has tuned it."""
    return (
        not quantization.kind
        and suits(query, value.shape[-2], value.shape[-1], plan, options, tuning)
        and query.dtype == key.dtype == value.dtype
        and all(is_aligned(x, *x.stride()[:-1]) for x in (query, key, value))
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
    quantization: Quantization = UNQUANTIZED,
) -> Launch:
    """Launch the kernel, where `takes` allows it, instead of `launch_attend`.

    The arguments are those there; of `tuning` and `split` this kernel needs nothing.
    """
    batch = plan.batch
    num_tokens, num_heads, head_size = query.shape
    num_kv_heads = value.shape[-2]
    group = num_heads // num_kv_heads
    query, scale = with_positive_scale(query, options.softmax_scale)
    places, query_slots = LAYOUTS[head_size, value.shape[-1]]
    maps = [heads_as_columns(key, KEYS, places), heads_as_columns(value, KEYS)]
    begins_in_a_block = key.ndim == 4 and plan.window_size[0] >= 0  # a window does, and its tile has two blocks
    in_bulk = None not in maps and not begins_in_a_block
    sizes = Sizes(
        ROWS=ROWS,
        OWN_ROWS=ROWS // 2,
        KEYS=KEYS,
        PLACES=places,
        QUERY_SLOTS=query_slots,
        PAGES=key.ndim == 4,
        IN_BULK=in_bulk,
        KEY_ROWS=rows_of_block(key),
        VALUE_ROWS=rows_of_block(value),
        SAME_OFFSETS=key.stride() == value.stride(),
        INT64_OFFSETS=any(reach_of(x) >= 2**31 for x in (key, value)),
        REGISTERS=REGISTERS["tiles" if in_bulk else key.ndim],
    )
    programs = count_tiles(batch, num_tokens, group, ROWS) * num_kv_heads
    keys = keys_of(query, key, value, plan, ROWS, quantization=quantization, aligned=False)
    of_keys: dict[str, Any] = {"keys.key": key, "keys.value": value}
    if in_bulk:
        keys = keys._replace(key=None, value=None)
        of_keys = {"key_tiles": maps[0], "value_tiles": maps[1]}
    of_layer = {"queries.query": query, **of_keys, "out.out": out.out, "out.lse": out.lse}
    return CountedLaunch(
        _attend_kernel,
        (min(programs, devices.num_sms(query.device)),),
        of_layer | layer_args(query, options),
        dict(
            queries=queries_of(query, batch, num_heads, group),
            keys=keys,
            mask=mask_of(plan),
            options=options_of(options, scale),
            out=out,
            programs=programs,
            **({} if in_bulk else dict(key_tiles=None, value_tiles=None)),
            TILE=Sizes(*map(tl.constexpr, sizes)),
        ),
        dict(num_warps=4),
    )


@gluon.jit
@no_type_check
def _multiply_keys(q, room, slot, SCORES: gl.constexpr, WHO: gl.constexpr):
    """Start the products of queries, in one place or several, with the keys in a slot.

    Where keys are wider, as of pairs of heads, these are products with each consumer's own part.
    """
    HALF: gl.constexpr = q[0].shape[0]
    SIZE: gl.constexpr = q[0].shape[1]
    KEYS: gl.constexpr = room.key.shape[1]
    PLACES: gl.constexpr = room.key.shape[0] // SLOTS
    keys = places_of(room.key, slot, PLACES)
    products = gl.zeros([HALF, KEYS], gl.float32, SCORES)
    for i in gl.static_range(PLACES):
        key = keys[i]
        if room.key.shape[2] > SIZE:
            key = key.slice(WHO * SIZE, SIZE, 1)
        products = warpgroup_mma(q[i], key.permute((1, 0)), products, use_acc=i > 0, is_async=True)
    return products


@gluon.jit
@no_type_check
def in_16_bits(x, dtype: gl.constexpr):
    """Round to 16 bits, two numbers at a time and in their order; `x.to` swaps each pair, and swaps it again."""
    PAIR: gl.constexpr = "cvt.rn.bf16x2.f32 $0, $2, $1;" if dtype == gl.bfloat16 else "cvt.rn.f16x2.f32 $0, $2, $1;"
    return gl.inline_asm_elementwise(PAIR, "=r,r,r", [x], dtype=dtype.value, is_pure=True, pack=2)


@gluon.jit
@no_type_check
def _execute(INSTRUCTION: gl.constexpr):
    """Execute an instruction once in each thread of a warpgroup; it must also copy operand 1 to operand 0."""
    x = gl.zeros([128], gl.int32, gl.BlockedLayout([1], [32], [4], [0]))
    gl.inline_asm_elementwise(INSTRUCTION, "=r,r", [x], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
@no_type_check
def _take_turn(WHO: gl.constexpr):
    """Wait until the other consumer has issued its products; Triton takes other named barriers than 8 and 9."""
    _execute("bar.sync 8, 256; mov.b32 $0, $1;" if WHO == 0 else "bar.sync 9, 256; mov.b32 $0, $1;")


@gluon.jit
@no_type_check
def give_turn(WHO: gl.constexpr):
    """Signal the other consumer, which waits in `_take_turn`, that it may issue its products."""
    _execute("bar.arrive 9, 256; mov.b32 $0, $1;" if WHO == 0 else "bar.arrive 8, 256; mov.b32 $0, $1;")


@gluon.jit
@no_type_check
def _here(sums):
    """Return sums of weights, computed before the wait that follows: the compiler moves past it what only computes.

    What may sleep it may not move. A sum of finite weights is never as large as 2**127.
    """
    IF_LARGE: gl.constexpr = "max.f32 x, $2, $3; setp.gt.f32 p, x, 0f7F000000; @p nanosleep.u32 1;"
    ASM: gl.constexpr = "{ .reg .f32 x; .reg .pred p; " + IF_LARGE + " mov.b32 $0, $2; mov.b32 $1, $3; }"
    return gl.inline_asm_elementwise(ASM, "=f,=f,f,f", [sums], dtype=gl.float32, is_pure=False, pack=2)


@gluon.jit
@no_type_check
def _sums_of_threads(weights):
    """Return the sums of the weights that each of a row's four threads has, [rows, 4]."""
    HALF: gl.constexpr = weights.shape[0]
    KEYS: gl.constexpr = weights.shape[1]
    return gl.sum(gl.sum(weights.reshape([HALF, KEYS // 8, 4, 2]), 3), 1)


@gluon.jit
@no_type_check
def _mask_keys(products, step, seen):
    """Set the products with keys that a row does not see to -inf."""
    KEYS: gl.constexpr = products.shape[1]
    column = gl.arange(0, KEYS, layout=gl.SliceLayout(0, products.type.layout))[None, :]
    visible = column <= (seen.last + step * KEYS)[:, None]
    if seen.LEFT:
        visible &= column >= (seen.first + step * KEYS)[:, None]
    return gl.where(visible, products, float("-inf"))


@gluon.jit
@no_type_check
def first_step(q, room, items, seen, options, SCORES: gl.constexpr, WHO: gl.constexpr):
    """Return the weights of the first step, its maxima, and the sums of each thread."""
    slot = items % SLOTS
    mbarrier.wait(room.has_keys.index(slot), parity(items))
    fence_async_shared()  # queries come by `cp.async`, which products see only behind a fence
    products = _multiply_keys(q, room, slot, SCORES, WHO)
    products = warpgroup_mma_wait(0, deps=[products])
    leave(room.no_keys.index(slot))
    unit = options.scale * LOG2E
    products = _mask_keys(products, 0, seen)
    row_max = gl.max(products, 1) * unit
    start = gl.where(row_max == float("-inf"), 0.0, row_max)  # -inf - -inf would be NaN
    x = gl.exp2(products * unit - start[:, None])
    return x, row_max, _sums_of_threads(x)


@gluon.jit
@no_type_check
def attend_steps(state, steps, q, room, seen, options, WHO: gl.constexpr, MASKED: gl.constexpr):
    """Attend to the keys of some steps, and add the values of the steps before them."""
    KEYS: gl.constexpr = room.key.shape[1]
    weights, acc, row_max, row_sum, items = state
    SCORES: gl.constexpr = row_max.type.layout.parent
    OUTPUT: gl.constexpr = acc.type.layout
    HALF: gl.constexpr = acc.shape[0]
    unit = options.scale * LOG2E
    for step in range(steps[0], steps[1]):
        slot = items % SLOTS
        value_slot = (items - 1) % SLOTS
        mbarrier.wait(room.has_keys.index(slot), parity(items))
        if not room.IN_BULK:
            fence_async_shared()
        _take_turn(WHO)
        products = _multiply_keys(q, room, slot, SCORES, WHO)
        mbarrier.wait(room.has_values.index(value_slot), parity(items - 1))
        if not room.IN_BULK:
            fence_async_shared()
        sums = warpgroup_mma(weights, room.value.index(value_slot), acc, is_async=True)
        give_turn(WHO)
        products = warpgroup_mma_wait(1, deps=[products])
        leave(room.no_keys.index(slot))
        if MASKED:
            products = _mask_keys(products, step, seen)
        old_max = row_max
        row_max = gl.maximum(row_max, gl.max(products, 1) * unit)
        start = gl.where(row_max == float("-inf"), 0.0, row_max)
        now, later = gl.split(products.reshape([HALF, 2, KEYS // 2]).permute((0, 2, 1)))
        starts = gl.convert_layout(start, gl.SliceLayout(1, now.type.layout))[:, None]
        x = gl.exp2(now * unit - starts)
        own_sums = _here(_sums_of_threads(x))
        acc, _, x = warpgroup_mma_wait(0, deps=[sums, weights, x])
        leave(room.no_values.index(value_slot))
        x_later = gl.exp2(later * unit - starts)
        own_sums = gl.convert_layout(own_sums + _sums_of_threads(x_later), row_sum.type.layout, assert_trivial=True)
        x = gl.join(x, x_later).permute((0, 2, 1)).reshape([HALF, KEYS])
        x = gl.convert_layout(x, SCORES, assert_trivial=True)
        rescale = gl.exp2(old_max - start)
        row_sum = row_sum * gl.convert_layout(rescale, gl.SliceLayout(1, row_sum.type.layout))[:, None] + own_sums
        weights = gl.convert_layout(in_16_bits(x, room.key.dtype), gl.DotOperandLayout(0, OUTPUT, 2))
        acc = acc * gl.convert_layout(rescale, gl.SliceLayout(1, OUTPUT))[:, None]
        items += 1
    return weights, acc, row_max, row_sum, items


@gluon.jit
@no_type_check
def _multiply(queries, mask, options, out, room, programs, TILE, WHO: gl.constexpr):
    """Attend from a half of each tile to the keys that are loaded."""
    HALF: gl.constexpr = TILE.OWN_ROWS
    DV: gl.constexpr = room.value.shape[2]
    # Results of `wgmma`, version 3: four warps of 16 rows each, with all columns.
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE.KEYS, 16])
    OUTPUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DV, 16])
    if WHO == 0:
        HEADS: gl.constexpr = queries.HEADS
        first_padding = gl.load(queries.cu_seqlens_q + queries.num_seqs).to(gl.int64) * HEADS + gl.program_id(0)
        end = queries.num_tokens.to(gl.int64) * HEADS
        store_padding(out.out, out.lse, first_padding, end, gl.num_programs(0), DV)
    else:
        give_turn(WHO)  # the first consumer begins
    tiles = gl.program_id(0) * 0  # tiles done before this one: 0, in a form that a loop may change
    items = gl.program_id(0) * 0  # steps done before, of all tiles
    number = read_number(room, tiles, WHO, TILE)
    while number < programs:
        tile = find_tile(number, programs, queries, mask, TILE)
        seen = find_seen(tile, queries, mask, WHO * HALF, gl.SliceLayout(1, SCORES), TILE)
        q = places_of(room.query, tiles % TILE.QUERY_SLOTS * 2 + WHO, TILE.PLACES)
        x, row_max, row_sum = first_step(q, room, items, seen, options, SCORES, WHO)
        weights = gl.convert_layout(in_16_bits(x, room.key.dtype), gl.DotOperandLayout(0, OUTPUT, 2))
        behind = tile.run.end - tile.run.begin - (tile.steps - 1) * TILE.KEYS  # the first row that is no key's
        if TILE.IN_BULK and behind < TILE.KEYS:
            mbarrier.wait(room.has_values.index(items % SLOTS), parity(items))
            clear_rows(room.value.index(items % SLOTS), behind)
        # After the first step come masked steps, steps that all rows see, and in a window masked steps again.
        state = weights, gl.zeros([HALF, DV], gl.float32, OUTPUT), row_max, row_sum, items + 1
        state = attend_steps(state, (1, seen.plain_from), q, room, seen, options, WHO, True)
        state = attend_steps(state, (seen.plain_from, seen.plain_to), q, room, seen, options, WHO, False)
        if mask.LEFT:
            state = attend_steps(state, (seen.plain_to, tile.steps), q, room, seen, options, WHO, True)
        weights, acc, row_max, row_sum, items = state
        tl.debug_barrier()  # all four warps have read queries and their number
        barrier = barrier_of(tiles, WHO, TILE.QUERY_SLOTS)
        mbarrier.arrive(room.no_queries.index(barrier))
        tiles += 1
        value_slot = (items - 1) % SLOTS
        mbarrier.wait(room.has_values.index(value_slot), parity(items - 1))
        fence_async_shared()
        sums = warpgroup_mma(weights, room.value.index(value_slot), acc, is_async=True)
        acc, _ = warpgroup_mma_wait(0, deps=[sums, weights])
        leave(room.no_values.index(value_slot))
        _store(queries, tile, options, out, row_max, gl.sum(row_sum, 1), acc, WHO * HALF)
        number = read_number(room, tiles, WHO, TILE)


@gluon.jit
@no_type_check
def finish(row_max, row_sum, acc, sinks, heads, is_row):
    """Return the outputs and the log-sum-exps of rows of some heads, the sinks included if there are any."""
    if sinks is not None:
        return normalize(row_max, row_sum, acc, gl.load(sinks + heads, mask=is_row, other=0.0).to(gl.float32))
    # One division for a row, where `normalize` has one for each number.
    row_sum = gl.where(row_sum == 0.0, 1.0, row_sum)  # a row that sees nothing: 0, and -inf by `row_max`
    return acc * (1.0 / row_sum)[:, None], (row_max + gl.log2(row_sum)) / LOG2E


@gluon.jit
@no_type_check
def _store(queries, tile, options, out, row_max, row_sum, acc, first):
    """Store the outputs of a half of a tile, from its row `first` on, and their log-sum-exps."""
    HALF: gl.constexpr = acc.shape[0]
    OUTPUT: gl.constexpr = acc.type.layout
    row_max = gl.convert_layout(row_max, gl.SliceLayout(1, OUTPUT))
    row_sum = gl.convert_layout(row_sum, gl.SliceLayout(1, OUTPUT))
    rows = tile.first_row + first + gl.arange(0, HALF, layout=gl.SliceLayout(1, OUTPUT))
    is_row = rows < tile.num_rows
    heads = tile.kv_head * queries.GROUP + rows % queries.GROUP
    values, logs = finish(row_max, row_sum, acc, options.sinks, heads, is_row)
    places = (tile.first_query + rows // queries.GROUP).to(gl.int64) * queries.HEADS + heads
    gl.store(out.lse + places, logs, mask=is_row)
    store_lines(out.out, values, places, is_row)


@gluon.jit(do_not_specialize=CHANGING)
@no_type_check
def _attend_kernel(queries, keys, mask, options, out, programs, key_tiles, value_tiles, counters, TILE):
    """Attend from tiles of query rows to all their keys, with two consumer warpgroups and a producer."""
    TYPE: gl.constexpr = queries.query.dtype.element_ty
    HALF: gl.constexpr = TILE.OWN_ROWS
    SIZE: gl.constexpr = keys.HEAD_SIZE // TILE.PLACES
    SHARED: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    BARRIERS: gl.constexpr = mbarrier.MBarrierLayout()
    room = Room(
        gl.allocate_shared_memory(TYPE, [2 * TILE.QUERY_SLOTS * TILE.PLACES, HALF, SIZE], SHARED),
        gl.allocate_shared_memory(TYPE, [SLOTS * TILE.PLACES, TILE.KEYS, SIZE], SHARED),
        gl.allocate_shared_memory(TYPE, [SLOTS, TILE.KEYS, keys.VALUE_HEAD_SIZE], SHARED),
        gl.allocate_shared_memory(gl.int32, [SLOTS, 1], gl.SwizzledSharedLayout(1, 1, 1, [0])),
        gl.allocate_shared_memory(gl.int64, [SLOTS, 1], BARRIERS),
        gl.allocate_shared_memory(gl.int64, [SLOTS, 1], BARRIERS),
        gl.allocate_shared_memory(gl.int64, [SLOTS, 1], BARRIERS),
        gl.allocate_shared_memory(gl.int64, [SLOTS, 1], BARRIERS),
        gl.allocate_shared_memory(gl.int64, [SLOTS, 1], BARRIERS),
        gl.allocate_shared_memory(gl.int64, [SLOTS, 1], BARRIERS),
        TILE.IN_BULK,
    )
    for slot in gl.static_range(SLOTS):
        mbarrier.init(room.has_queries.index(slot), count=128 + 1)  # every producer thread, and one for the number
        mbarrier.init(room.no_queries.index(slot), count=TILE.QUERY_SLOTS)  # both consumers, or one's half
        mbarrier.init(room.has_keys.index(slot), count=1 if TILE.IN_BULK else 128)
        mbarrier.init(room.no_keys.index(slot), count=2 * 128)  # every consumer thread
        mbarrier.init(room.has_values.index(slot), count=1 if TILE.IN_BULK else 128)
        mbarrier.init(room.no_values.index(slot), count=2 * 128)
    fence_async_shared()
    tl.debug_barrier()
    gl.warp_specialize(
        [
            (_multiply, (queries, mask, options, out, room, programs, TILE, 0)),
            (_multiply, (queries, mask, options, out, room, programs, TILE, 1)),
            (bring, (queries, keys, mask, room, programs, (key_tiles, value_tiles), counters, TILE)),
        ],
        [4, 4],  # warps of the second and the third; the first has those of the launch, and the registers that are left
        [TILE.REGISTERS[0], TILE.REGISTERS[1]],
    )
