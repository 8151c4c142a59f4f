"""Prompts on Hopper, warp-specialized: two warpgroups multiply, a third loads keys, with barriers between them.

Prompts are compute-bound: tensor cores should always have products under way. In
`fastattn.kernels.triton.attention` all warps of a program wait for the same products, and then take exponentials
together. Here each of two consumer warpgroups has 64 of the 128 query rows of a tile; while one computes its softmax,
the products of the other may go on. A producer warpgroup copies keys and values into two slots of shared memory, ahead
of both:

    load         | keys 2, values 1 -> slot 0         | keys 3, values 2 -> slot 1         |
    group 0      | scores 1 | values 0 and softmax 1  | scores 2 | values 1 and softmax 2  |
    group 1            | scores 1 | values 0 and softmax 1  | scores 2 | values 1 and softmax 2  |

A slot holds the keys of a step and the values of the step before, whose products are issued together: so the product
with the values overlaps with a softmax, too. Programs are persistent: each takes tile after tile, from the end of the
last sequence on (the last rows of a sequence see most keys), and loads the keys of the next tile while the last rows of
this one are stored. The two consumers are not forced to alternate: barriers for that (ping-pong) gained nothing here.

How keys come is in `fastattn.kernels.triton.load_hopper`: by whole tiles (TMA) from rows, and from blocks that hold
whole steps; else by 16 bytes per thread.

Triton does not let a kernel assign work to warps, so this one is written in Gluon, Triton's lower-level language, with
explicit layouts and barriers. Gluon has no interpreter.

Source: Shah et al. 2024, "FlashAttention-3": roles for warps (3.1), and the product with the values beside the next
    softmax (3.2). Hopper's asynchronous products and barriers: the PTX manual, "wgmma" and "mbarrier".
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
from fastattn.kernels.triton.hopper import is_aligned, is_there, store_padding
from fastattn.kernels.triton.keys import keys_of
from fastattn.kernels.triton.launch import CHANGING, Launch
from fastattn.kernels.triton.load_hopper import SLOTS, Room, bring, clear_rows, find_tile, parity
from fastattn.kernels.triton.masks import all_visible_in_window, mask_of
from fastattn.kernels.triton.merge import Out, Part, Softmax, Whole, normalize, update_softmax
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
# Registers per consumer and per producer thread, whose 2 * consumer + producer is at most 65536 / 128: where keys come
# by whole tiles; from rows, which have three dimensions; from pages, which have four.
REGISTERS = {"tiles": (232, 40), 3: (216, 72), 4: (208, 88)}


class Sizes(NamedTuple):
    """The constants of a launch.

    Attributes:
        ROWS: rows of a tile.
        KEYS: keys of a step.
        PAGES: whether keys lie in pages, not in rows.
        IN_BULK: whether keys and values come by whole tiles.
        KEY_ROWS: rows of the map of keys from block to block.
        VALUE_ROWS: the same, of values.
        SAME_OFFSETS: whether values have the offsets of their keys.
        INT64_OFFSETS: whether an offset may be 2**31 elements or more.
        REGISTERS: registers of a consumer thread, and of a producer thread.
    """

    ROWS: Any
    KEYS: Any
    PAGES: Any
    IN_BULK: Any
    KEY_ROWS: Any
    VALUE_ROWS: Any
    SAME_OFFSETS: Any
    INT64_OFFSETS: Any
    REGISTERS: Any


class Seen(NamedTuple):
    """The keys that each row of a consumer warpgroup sees, from the first step on.

    Attributes:
        begin: the first key of the first step.
        first: [rows], the first key that each row sees.
        last: [rows], the last one.
    """

    begin: Any
    first: Any
    last: Any


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
    tensors = query, key, value
    known = not (quantization.kind or uses_positions(plan, options)) and asked_of(plan, options) <= KNOWS
    return (
        is_there(query.device)
        and plan.batch.max_query_len * (query.shape[1] // value.shape[-2]) > ROWS  # else one tile may hold all
        and tuning.most_splits == 1
        and not tuning.run
        and known
        and plan.first_visible is None
        and (query.shape[2], value.shape[-1]) in ((64, 64), (128, 128))
        and query.itemsize == 2
        and query.dtype == key.dtype == value.dtype
        and all(is_aligned(x, *x.stride()[:-1]) for x in tensors)
    )


def _reach(pool: Tensor) -> int:
    """Return how far the last element of a pool is from its first one."""
    return sum((size - 1) * stride for size, stride in zip(pool.shape, pool.stride(), strict=True))


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
    maps = [heads_as_columns(x, KEYS) for x in (key, value)]
    begins_in_a_block = key.ndim == 4 and plan.window_size[0] >= 0  # a window does, and its tile has two blocks
    in_bulk = None not in maps and not begins_in_a_block
    sizes = Sizes(
        ROWS=ROWS,
        KEYS=KEYS,
        PAGES=key.ndim == 4,
        IN_BULK=in_bulk,
        KEY_ROWS=rows_of_block(key),
        VALUE_ROWS=rows_of_block(value),
        SAME_OFFSETS=key.stride() == value.stride(),
        INT64_OFFSETS=any(_reach(x) >= 2**31 for x in (key, value)),
        REGISTERS=REGISTERS["tiles" if in_bulk else key.ndim],
    )
    programs = count_tiles(batch, num_tokens, group, ROWS) * num_kv_heads
    keys = keys_of(query, key, value, plan, ROWS, quantization=quantization, aligned=False)
    of_keys: dict[str, Any] = {"keys.key": key, "keys.value": value}
    if in_bulk:
        keys = keys._replace(key=None, value=None)
        of_keys = {"key_tiles": maps[0], "value_tiles": maps[1]}
    return Launch(
        _attend_kernel,
        (min(programs, devices.num_sms(query.device)),),
        {"queries.query": query, **of_keys, "out.out": out.out, "out.lse": out.lse} | layer_args(query, options),
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
def _multiply_keys(q, room, slot, SCORES: gl.constexpr):
    """Start the products of queries with the keys in a slot."""
    HALF: gl.constexpr = q.shape[0]
    KEYS: gl.constexpr = room.key.shape[1]
    nothing = gl.zeros([HALF, KEYS], gl.float32, SCORES)
    return warpgroup_mma(q, room.key.index(slot).permute((1, 0)), nothing, use_acc=False, is_async=True)


@gluon.jit
@no_type_check
def _in_16_bits(x, dtype: gl.constexpr):
    """Round to 16 bits, two numbers at a time and in their order; `x.to` swaps each pair, and swaps it again."""
    PAIR: gl.constexpr = "cvt.rn.bf16x2.f32 $0, $2, $1;" if dtype == gl.bfloat16 else "cvt.rn.f16x2.f32 $0, $2, $1;"
    return gl.inline_asm_elementwise(PAIR, "=r,r,r", [x], dtype=dtype.value, is_pure=True, pack=2)


@gluon.jit
@no_type_check
def _softmax(products, first_key, seen, row_max, row_sum, options, MASKED: gl.constexpr):
    """Update the online softmax by a step of products."""
    KEYS: gl.constexpr = products.shape[1]
    if MASKED:
        j = first_key + gl.arange(0, KEYS, layout=gl.SliceLayout(0, products.type.layout))
        visible = (j[None, :] >= seen.first[:, None]) & (j[None, :] <= seen.last[:, None])
        products = gl.where(visible, products, float("-inf"))
    return update_softmax(products, row_max, row_sum, options.scale, False)


@gluon.jit
@no_type_check
def _attend_steps(state, first, end, q, room, seen, options, MASKED: gl.constexpr):
    """Attend to the keys of some steps, and add the values of the steps before them."""
    KEYS: gl.constexpr = room.key.shape[1]
    weights, acc, row_max, row_sum, items = state
    SCORES: gl.constexpr = row_max.type.layout.parent
    OUTPUT: gl.constexpr = acc.type.layout
    for step in range(first, end):
        slot = items % SLOTS
        mbarrier.wait(room.full.index(slot), parity(items))
        if not room.IN_BULK:
            fence_async_shared()
        products = _multiply_keys(q, room, slot, SCORES)
        sums = warpgroup_mma(weights, room.value.index(slot), acc, is_async=True)
        products = warpgroup_mma_wait(1, deps=[products])
        first_key = seen.begin + step * KEYS
        x, rescale, row_max, row_sum = _softmax(products, first_key, seen, row_max, row_sum, options, MASKED)
        # This wait is over at once; without its branch the compiler moves the softmax past the wait for the values.
        mbarrier.wait(room.full.index(slot), parity(items))
        acc, _, x = warpgroup_mma_wait(0, deps=[sums, weights, x])
        tl.debug_barrier()  # all four warps have read the slot, before one thread says so for the group
        mbarrier.arrive(room.empty.index(slot))
        weights = gl.convert_layout(_in_16_bits(x, room.key.dtype), gl.DotOperandLayout(0, OUTPUT, 2))
        acc = acc * gl.convert_layout(rescale, gl.SliceLayout(1, OUTPUT))[:, None]
        items += 1
    return weights, acc, row_max, row_sum, items


@gluon.jit
@no_type_check
def _multiply(queries, mask, options, out, room, programs, TILE, WHO: gl.constexpr):
    """Attend from a half of each tile to the keys that are loaded."""
    HALF: gl.constexpr = TILE.ROWS // 2
    DV: gl.constexpr = room.value.shape[2]
    # Results of `wgmma`, version 3: four warps of 16 rows each, with all columns.
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE.KEYS, 16])
    OUTPUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DV, 16])
    if WHO == 0:
        HEADS: gl.constexpr = queries.HEADS
        first_padding = gl.load(queries.cu_seqlens_q + queries.num_seqs).to(gl.int64) * HEADS + gl.program_id(0)
        end = queries.num_tokens.to(gl.int64) * HEADS
        store_padding(out.out, out.lse, first_padding, end, gl.num_programs(0), DV)
    tiles = gl.program_id(0) * 0  # tiles done before this one: 0, in a form that a loop may change
    items = gl.program_id(0) * 0  # slots of keys and values consumed before, of all tiles
    for program in range(gl.program_id(0), programs, gl.num_programs(0)):
        tile = find_tile(program, programs, queries, mask, TILE)
        if tile.first_row < tile.num_rows:
            # Each row sees an interval of keys; all rows of the tile see the steps from `plain_from` to `plain_to`.
            rows = tile.first_row + WHO * HALF + gl.arange(0, HALF, layout=gl.SliceLayout(1, SCORES))
            positions = tile.context + rows // queries.GROUP
            first_seen, last_seen = positions * 0, positions * 0 + (tile.run.end - 1)
            if mask.LEFT:
                first_seen = positions - gl.minimum(mask.left, positions)
            if mask.RIGHT:
                last_seen = positions + gl.minimum(mask.right, tile.run.end - 1 - positions)
            all_from, all_to = all_visible_in_window(mask, tile, tile.run, tile.run)
            # that is, ceil((all_from - begin) / KEYS), but at least 1, as the first step is always masked
            plain_from = gl.minimum(1 + gl.maximum(all_from - tile.run.begin - 1, 0) // TILE.KEYS, tile.steps)
            plain_to = gl.maximum(gl.maximum(all_to - tile.run.begin, 0) // TILE.KEYS, plain_from)

            query_slot = tiles % SLOTS
            q = room.query.index(query_slot * 2 + WHO)
            mbarrier.wait(room.has_queries.index(query_slot), parity(tiles))
            slot = items % SLOTS
            mbarrier.wait(room.full.index(slot), parity(items))
            fence_async_shared()  # queries come by `cp.async`, which products see only behind a fence
            products = _multiply_keys(q, room, slot, SCORES)
            products = warpgroup_mma_wait(0, deps=[products])
            tl.debug_barrier()
            mbarrier.arrive(room.empty.index(slot))
            row_max = gl.full([HALF], float("-inf"), gl.float32, gl.SliceLayout(1, SCORES))
            row_sum = gl.zeros([HALF], gl.float32, gl.SliceLayout(1, SCORES))
            seen = Seen(tile.run.begin, first_seen, last_seen)
            x, _, row_max, row_sum = _softmax(products, tile.run.begin, seen, row_max, row_sum, options, True)
            weights = gl.convert_layout(_in_16_bits(x, room.key.dtype), gl.DotOperandLayout(0, OUTPUT, 2))
            # The first step is always masked; then come masked steps, steps that all rows see, and masked steps again.
            state = weights, gl.zeros([HALF, DV], gl.float32, OUTPUT), row_max, row_sum, items + 1
            if mask.LEFT:
                state = _attend_steps(state, 1, plain_from, q, room, seen, options, True)
            state = _attend_steps(state, plain_from, plain_to, q, room, seen, options, False)
            state = _attend_steps(state, plain_to, tile.steps, q, room, seen, options, True)
            weights, acc, row_max, row_sum, items = state
            mbarrier.arrive(room.no_queries.index(query_slot))  # its reads ended before the last `debug_barrier`
            tiles += 1
            slot = items % SLOTS
            mbarrier.wait(room.full.index(slot), parity(items))
            fence_async_shared()
            behind = tile.run.end - tile.run.begin - (tile.steps - 1) * TILE.KEYS  # the first row that is no key's
            if TILE.IN_BULK and behind < TILE.KEYS:
                clear_rows(room.value.index(slot), behind)
            sums = warpgroup_mma(weights, room.value.index(slot), acc, is_async=True)
            acc, _ = warpgroup_mma_wait(0, deps=[sums, weights])
            tl.debug_barrier()
            mbarrier.arrive(room.empty.index(slot))
            items += 1
            _store(queries, tile, options, out, Softmax(row_max, row_sum, acc), WHO * HALF)


@gluon.jit
@no_type_check
def _store(queries, tile, options, out, softmax, first):
    """Store the outputs of a half of a tile, from its row `first` on, and their log-sum-exps."""
    HALF: gl.constexpr = softmax.acc.shape[0]
    DV: gl.constexpr = softmax.acc.shape[1]
    OUTPUT: gl.constexpr = softmax.acc.type.layout
    row_max = gl.convert_layout(softmax.row_max, gl.SliceLayout(1, OUTPUT))
    row_sum = gl.convert_layout(softmax.row_sum, gl.SliceLayout(1, OUTPUT))
    rows = tile.first_row + first + gl.arange(0, HALF, layout=gl.SliceLayout(1, OUTPUT))
    is_row = rows < tile.num_rows
    heads = tile.kv_head * queries.GROUP + rows % queries.GROUP
    sink = None
    if options.sinks is not None:
        sink = gl.load(options.sinks + heads, mask=is_row, other=0.0).to(gl.float32)
    values, logs = normalize(row_max, row_sum, softmax.acc, sink)
    places = (tile.first_query + rows // queries.GROUP).to(gl.int64) * queries.HEADS + heads
    at = gl.arange(0, DV, layout=gl.SliceLayout(0, OUTPUT))
    gl.store(out.out + (places[:, None] * DV + at[None, :]), values.to(out.out.dtype.element_ty), mask=is_row[:, None])
    gl.store(out.lse + places, logs, mask=is_row)


@gluon.jit(do_not_specialize=CHANGING)
@no_type_check
def _attend_kernel(queries, keys, mask, options, out, programs, key_tiles, value_tiles, TILE):
    """Attend from tiles of query rows to all their keys, with two consumer warpgroups and a producer."""
    TYPE: gl.constexpr = queries.query.dtype.element_ty
    HALF: gl.constexpr = TILE.ROWS // 2
    SHARED: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    BARRIERS: gl.constexpr = mbarrier.MBarrierLayout()
    room = Room(
        gl.allocate_shared_memory(TYPE, [2 * SLOTS, HALF, keys.HEAD_SIZE], SHARED),
        gl.allocate_shared_memory(TYPE, [SLOTS, TILE.KEYS, keys.HEAD_SIZE], SHARED),
        gl.allocate_shared_memory(TYPE, [SLOTS, TILE.KEYS, keys.VALUE_HEAD_SIZE], SHARED),
        gl.allocate_shared_memory(gl.int64, [SLOTS, 1], BARRIERS),
        gl.allocate_shared_memory(gl.int64, [SLOTS, 1], BARRIERS),
        gl.allocate_shared_memory(gl.int64, [SLOTS, 1], BARRIERS),
        gl.allocate_shared_memory(gl.int64, [SLOTS, 1], BARRIERS),
        TILE.IN_BULK,
    )
    for slot in gl.static_range(SLOTS):
        mbarrier.init(room.has_queries.index(slot), count=128)  # every producer thread
        mbarrier.init(room.no_queries.index(slot), count=2)  # both consumer warpgroups
    for slot in gl.static_range(SLOTS):
        mbarrier.init(room.full.index(slot), count=1 if TILE.IN_BULK else 128)
        mbarrier.init(room.empty.index(slot), count=2)
    fence_async_shared()
    tl.debug_barrier()
    gl.warp_specialize(
        [
            (_multiply, (queries, mask, options, out, room, programs, TILE, 0)),
            (_multiply, (queries, mask, options, out, room, programs, TILE, 1)),
            (bring, (queries, keys, mask, room, programs, key_tiles, value_tiles, TILE)),
        ],
        [4, 4],  # warps of the second and the third; the first has those of the launch, and the registers that are left
        [TILE.REGISTERS[0], TILE.REGISTERS[1]],
    )
