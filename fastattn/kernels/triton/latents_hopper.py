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
    async_copy,
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
from fastattn.kernels.triton.masks import Run
from fastattn.kernels.triton.merge import SEQS_AT_ONCE, Out, Part, Softmax, Whole, normalize
from fastattn.kernels.triton.quantized import Quantization, power_of_two
from fastattn.kernels.triton.queries import count_tiles, find_rows, is_one_tile, layer_args, options_of, queries_of
from fastattn.kernels.triton.tuning import LATENT_64, LaunchConfig, is_wide
from refattn.options import AttentionOptions
from refattn.plan import Plan

KNOWS = BATCH | fields_of(
    Plan, *("batch", "block_size", "causal", "window_size", "first_keys", "positions", "sequences")
)
KNOWS |= known_options("softmax_scale", "sinks", "batch_invariant")  # fields that a plan and a layer may set
RANK, ROPE = 512, 64  # sizes of latents and of rotary keys that the layouts are for
REGISTERS = {"": 72, "e4m3": 104, "e5m2": 104}  # per producer thread; quantized values wait in registers

# [rows, 2]: a thread has both halves of the two rows of which products give it elements.
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


class Tile(NamedTuple):
    """Rows of one sequence.

    Attributes:
        sequence: the sequence of the rows.
        first_row: the first row, counted in the sequence and its heads.
        num_rows: rows of the sequence.
        first_query: the first query row of the sequence in the batch.
    """

    sequence: Any
    first_row: Any
    num_rows: Any
    first_query: Any


class Room(NamedTuple):
    """Shared memory, and the barriers of its slots.

    Attributes:
        query: [rows, rank].
        rope_query: [rows, rope].
        key: [slots, keys, rank].
        rope_key: [slots, keys, rope].
        weights: [rows, keys], of one step.
        full: barriers of slots that are loaded.
        empty: barriers of slots that are consumed.
    """

    query: Any
    rope_query: Any
    key: Any
    rope_key: Any
    weights: Any
    full: Any
    empty: Any


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


# --- the rows of a program, and its keys ---


@gluon.jit
@no_type_check
def _find_tile(queries, TILE):
    """Return the tile of this program."""
    sequence, first_row = find_rows(
        queries.cu_seqlens_q, gl.program_id(0), queries.num_seqs, queries.HEADS, TILE.ROWS, TILE.ONE_TILE
    )
    first_query = gl.load(queries.cu_seqlens_q + sequence)
    num_rows = (gl.load(queries.cu_seqlens_q + sequence + 1) - first_query) * queries.HEADS
    return Tile(sequence, first_row, num_rows, first_query)


@gluon.jit
@no_type_check
def _share_of_steps(queries, steps, TILE):
    """Return the ratio of `steps` to the steps of an average sequence."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [8], [0])
    total = 0
    for first in range(0, queries.num_seqs, SEQS_AT_ONCE):
        sequence = first + gl.arange(0, SEQS_AT_ONCE, layout=LAYOUT)
        is_sequence = sequence < queries.num_seqs
        begin = gl.load(queries.cu_seqlens_q + sequence, mask=is_sequence, other=0)
        has_queries = gl.load(queries.cu_seqlens_q + sequence + 1, mask=is_sequence, other=0) > begin
        seq_len = gl.load(queries.seq_lens + sequence, mask=is_sequence & has_queries, other=0)
        total += gl.sum((seq_len + TILE.KEYS - 1) // TILE.KEYS, 0)
    return steps.to(gl.float32) * queries.num_seqs / gl.maximum(total, 1).to(gl.float32)


@gluon.jit
@no_type_check
def _find_run(queries, split, tile, context, TILE):
    """Return the keys that some row of a tile sees, or the split of them that is this program's.

    `context` is the position of the sequence's first query, the last key that it sees.
    """
    begin = gl.program_id(0) * 0
    last_row = gl.minimum(tile.first_row + TILE.ROWS, tile.num_rows) - 1
    end = gl.maximum(context + last_row // queries.HEADS + 1, 0)
    if TILE.SPLIT:
        steps, splits = gl.cdiv(end, TILE.KEYS), split.splits
        if split.BALANCE:
            share = _share_of_steps(queries, steps, TILE)
            splits = gl.minimum(gl.maximum((share * splits + 0.9).to(gl.int32), 1), gl.num_programs(1))
        keys = gl.cdiv(steps, splits) * TILE.KEYS
        begin = gl.program_id(1) * keys
        end = gl.minimum(end, begin + keys)
    return Run(begin, begin, end)


@gluon.jit
@no_type_check
def _load_queries(queries, keys, tile, TYPE: gl.constexpr, LAYOUT: gl.constexpr, TILE):
    """Load the rows of a tile, the part for latents and the part for rotary keys, in the type of the products.

    With quantized values, queries are float16. Those of bfloat16 are divided by a power of two, which is returned for
    each row: a row below 2 loses nothing.
    """
    RANK: gl.constexpr = keys.VALUE_HEAD_SIZE
    ROPE: gl.constexpr = keys.HEAD_SIZE - RANK
    rows = tile.first_row + gl.arange(0, TILE.ROWS, layout=gl.SliceLayout(1, LAYOUT))
    tokens = (tile.first_query + rows // queries.HEADS).to(gl.int64)
    query_rows = queries.query + tokens * queries.strides[0]
    query_rows += (rows % queries.HEADS).to(gl.int64) * queries.strides[1]
    at = gl.arange(0, RANK, layout=gl.SliceLayout(0, LAYOUT)).to(gl.int64)
    at_rope = RANK + gl.arange(0, ROPE, layout=gl.SliceLayout(0, LAYOUT)).to(gl.int64)
    is_row = (rows < tile.num_rows)[:, None]
    q = gl.load(query_rows[:, None] + (at * queries.strides[2])[None, :], mask=is_row, other=0.0)
    rope = gl.load(query_rows[:, None] + (at_rope * queries.strides[2])[None, :], mask=is_row, other=0.0)
    power = gl.full([TILE.ROWS], 1.0, gl.float32, gl.SliceLayout(1, LAYOUT))
    if q.dtype != TYPE:
        q, rope = q.to(gl.float32), rope.to(gl.float32)
        power = power_of_two(gl.maximum(gl.max(gl.abs(q), 1), gl.max(gl.abs(rope), 1)))
        q, rope = (q / power[:, None]).to(TYPE), (rope / power[:, None]).to(TYPE)
    return q, rope, power


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
    """Return the maximum of each row, which two warps share: each takes that of its half, and they meet once."""
    ROWS: gl.constexpr = scores.shape[0]
    KEYS: gl.constexpr = scores.shape[1]
    halves = gl.max(scores.reshape([ROWS, 2, KEYS // 2]), 2)
    row_max = gl.max(gl.convert_layout(halves, HALVES), 1)
    return gl.convert_layout(row_max, gl.SliceLayout(1, scores.type.layout), assert_trivial=True)


@gluon.jit
@no_type_check
def _mask(scores, first, last_of_rows):
    """Set the scores of keys that a row does not see to -inf; `first` is the first key."""
    j = first + gl.arange(0, scores.shape[1], layout=gl.SliceLayout(0, scores.type.layout))
    return gl.where(j[None, :] <= last_of_rows[:, None], scores, float("-inf"))


@gluon.jit
@no_type_check
def _update_softmax(scores, factor, row_max, sums):
    """Update the online softmax by a step of scores; sums are kept per column, and added up at the end."""
    new_row_max = gl.maximum(row_max, _max_of_rows(scores) * factor)
    base = gl.where(new_row_max == float("-inf"), 0.0, new_row_max)  # -inf - -inf would be NaN
    weights = gl.exp2(scores * factor[:, None] - base[:, None])
    rescale = gl.exp2(row_max - base)
    return weights, rescale, new_row_max, sums * rescale[:, None] + weights


@gluon.jit
@no_type_check
def _multiply(room, run, steps, last_of_rows, seen_by_all, factor, SCORES: gl.constexpr, OUTPUT: gl.constexpr):
    """Attend to the keys that are loaded into the slots; return the softmax, in layouts of the products.

    Every product is issued and awaited in one iteration, or the compiler would serialize them: also the scores of the
    next step, which are carried over in registers.
    """
    ROWS: gl.constexpr = room.weights.shape[0]
    KEYS: gl.constexpr = room.weights.shape[1]
    RANK: gl.constexpr = room.key.shape[2]
    weights = room.weights
    acc = gl.zeros([ROWS, RANK], gl.float32, OUTPUT)
    row_max = gl.full([ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, SCORES))
    sums = gl.zeros([ROWS, KEYS], gl.float32, SCORES)
    nothing = gl.zeros([ROWS, KEYS], gl.float32, SCORES)
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
    return acc, row_max, gl.sum(sums, 1)


# --- the producer: it loads keys ---


@gluon.jit
@no_type_check
def _numbers(quantization, FORMAT: gl.constexpr):
    return quantization.to(gl.float8e4nv if FORMAT == "e4m3" else gl.float8e5, bitcast=True).to(gl.float16)


@gluon.jit
@no_type_check
def _read_table(where, table, j, run):
    """Return the blocks of keys; `table` is the row of their sequence."""
    return gl.load(table + (j // where.BLOCK_SIZE).to(gl.int64) * where.table_stride, mask=j < run.end, other=0)


@gluon.jit
@no_type_check
def _bring(keys, table, room, run, steps, TILE):
    """Load keys into the slots as they become empty, zeros where there is no key.

    Unquantized latents bypass the registers. Quantized ones wait in registers for a slot, and are converted into it, 64
    columns at a time: loads of later keys could not be in flight meanwhile, as the fence waits for them.
    """
    RANK: gl.constexpr = keys.VALUE_HEAD_SIZE
    ROPE: gl.constexpr = keys.HEAD_SIZE - RANK
    QUANTIZED_PART: gl.constexpr = gl.BlockedLayout([1, 16], [8, 4], [4, 1], [1, 0])
    NUMBERS: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    LAYOUT: gl.constexpr = NUMBERS if TILE.FORMAT == "" else QUANTIZED_PART
    at = gl.arange(0, RANK, layout=gl.SliceLayout(0, LAYOUT))[None, :]
    at_rope = RANK + gl.arange(0, ROPE, layout=gl.SliceLayout(0, LAYOUT))[None, :]
    j = run.begin + gl.arange(0, TILE.KEYS, layout=gl.SliceLayout(1, LAYOUT))
    blocks = _read_table(keys.where, table, j, run)
    for step in range(steps):
        slot = step & 1
        rows = keys.key + blocks.to(gl.int64) * keys.key_strides[0] + j % keys.where.BLOCK_SIZE * keys.key_strides[1]
        is_key = (j < run.end)[:, None]
        pointers, mask = rows[:, None] + at, is_key & (at < RANK)  # the second is always true, and gives a shape
        rope_pointers, rope_mask = rows[:, None] + at_rope, is_key & (at_rope >= RANK)
        if TILE.FORMAT != "":
            loaded = gl.load(pointers, mask=mask, other=0)
            loaded_rope = gl.load(rope_pointers, mask=rope_mask, other=0)
        j += TILE.KEYS
        blocks = _read_table(keys.where, table, j, run)
        mbarrier.wait(room.empty.index(slot), (step >> 1 & 1) ^ 1)
        if TILE.FORMAT == "":
            async_copy.async_copy_global_to_shared(room.key.index(slot), pointers, mask=mask)
            async_copy.async_copy_global_to_shared(room.rope_key.index(slot), rope_pointers, mask=rope_mask)
            async_copy.commit_group()
            async_copy.wait_group(0)
        else:
            room.key.index(slot).store(_numbers(loaded, TILE.FORMAT))
            room.rope_key.index(slot).store(_numbers(loaded_rope, TILE.FORMAT))
        fence_async_shared()
        if TILE.FORMAT == "":
            leave(room.full.index(slot))
        else:
            mbarrier.arrive(room.full.index(slot))


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
    tile = _find_tile(queries, TILE)
    if not TILE.SPLIT:
        first_padding = gl.load(queries.cu_seqlens_q + queries.num_seqs).to(gl.int64) * queries.HEADS + gl.program_id(0)
        end = queries.num_tokens.to(gl.int64) * queries.HEADS
        store_padding(out.out, out.lse, first_padding, end, gl.num_programs(0), RANK)
    if tile.first_row >= tile.num_rows:
        return
    first_place = (gl.program_id(1).to(gl.int64) * queries.num_tokens + tile.first_query) * queries.HEADS
    context = gl.load(queries.seq_lens + tile.sequence) - tile.num_rows // queries.HEADS
    run = _find_run(queries, split, tile, context, TILE)
    if TILE.SPLIT and run.begin >= run.end:
        _store_nothing(tile, first_place, out, TILE)
        return
    steps = gl.cdiv(run.end - run.begin, TILE.KEYS)

    q, rope, power = _load_queries(queries, keys, tile, TYPE, QUERIES, TILE)
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
            (_bring, (keys, table, room, run, steps, TILE)),
        ],
        [4],
        [TILE.REGISTERS],
    )
    _store(queries, keys, options, tile, first_place, Softmax(row_max, row_sum, acc), out, TILE)
