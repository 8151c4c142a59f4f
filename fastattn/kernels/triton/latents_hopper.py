"""Decode over latents on Hopper, warp-specialized: two warpgroups multiply, a third loads keys, with barriers between.

With 64 query rows the kernel is bound by the tensor cores. In `fastattn.kernels.triton.attention` every warp loads,
dequantizes, multiplies and waits, all in step. Here a producer warpgroup only loads the next 64 keys into one of two
slots in shared memory, quantized values already converted, while two consumer warpgroups multiply with the other slot:

    load         | keys 2 -> slot 0        | keys 3 -> slot 1        |
    multiply     | softmax 1 | values 1 | scores 2 | softmax 2 | values 2 | scores 3 |
                                        ^ slot 0 is full          ^ slot 1 is empty

Each consumer computes the scores of half of the keys, and accumulates half of the columns of the output in registers:
64 rows of 512 elements in float32 fill half of all registers. Triton does not let a kernel assign work to warps, so
this one is written in Gluon, Triton's lower-level language, with explicit layouts and barriers. Gluon has no
interpreter.

64 decodes of 128 heads over 8192 latents take 340 us in fp8 and 351 in bfloat16; the other kernel takes 574 and 478
(NVIDIA H200, c8a3cc9, 2026-11-26). Designs that were tried are on docs/paths/mla.md.

Source: Hopper's asynchronous products and barriers: the PTX manual, "wgmma" and "mbarrier"; DeepSeek's FlashMLA, which
    divides the columns of the output among two warpgroups as well.
"""

from typing import Any, no_type_check

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

from fastattn.kernels.kernel import BATCH, fields_of, options_of
from fastattn.kernels.problem import asked_of, uses_positions, with_positive_scale
from fastattn.kernels.triton.hopper import is_aligned, is_there, store_padding
from fastattn.kernels.triton.launch import CHANGING, Launch
from fastattn.kernels.triton.merge import SEQS_AT_ONCE, Out, Part, Whole, normalize
from fastattn.kernels.triton.quantized import Quantization, power_of_two
from fastattn.kernels.triton.queries import count_tiles, find_rows, layer_args
from fastattn.kernels.triton.tuning import LATENT_64, LaunchConfig, is_wide
from refattn.options import AttentionOptions
from refattn.plan import Plan

KNOWS = BATCH | fields_of(
    Plan, *("batch", "block_size", "causal", "window_size", "first_keys", "positions", "sequences")
)
KNOWS |= options_of("softmax_scale", "sinks", "batch_invariant")  # fields that a plan and a layer may set
RANK, ROPE = 512, 64  # sizes of latents and of rotary keys that the layouts are for
REGISTERS = {"": 72, "e4m3": 104, "e5m2": 104}  # per producer thread; quantized values wait in registers


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
    table = batch.block_table
    assert table is not None  # a plan over pages has checked it
    query, scale = with_positive_scale(query, options.softmax_scale)
    one_tile = batch.max_query_len * num_heads <= tuning.block_m
    of_this_layer = {name.partition(".")[2]: x for name, x in layer_args(query, options, quantization).items()}
    of_no_layer: dict[str, Any] = dict(sinks=None, scale=scale, query_number=1.0, value_number=1.0)
    of_no_layer |= dict(query_scales=None, key_scales=None, value_scales=None, group_scales=None)
    return Launch(
        _attend_kernel,
        (count_tiles(batch, query.shape[0], num_heads, tuning.block_m), tuning.most_splits),
        dict(query=query, key=key, value=value, out=out.out, lse=out.lse) | of_this_layer,
        {name: x for name, x in of_no_layer.items() if name not in of_this_layer}
        | dict(
            block_table=table,
            cu_seqlens_q=batch.cu_seqlens_q,
            seq_lens=batch.seq_lens,
            query_strides=query.stride(),
            key_strides=key.stride()[:2],
            table_row_stride=table.stride(0),
            table_stride=table.stride(1),
            num_tokens=query.shape[0],
            num_seqs=batch.num_seqs,
            splits=tuning.splits,
            NUM_HEADS=num_heads,
            RANK=RANK,
            ROPE=ROPE,
            BLOCK_SIZE=key.shape[1],
            BLOCK_M=tuning.block_m,
            BLOCK_N=LATENT_64.block_n,
            BLOCK_SEQS=SEQS_AT_ONCE.value,
            ONE_TILE=one_tile,
            SPLIT=isinstance(split, Part),
            BALANCE=tuning.most_splits > tuning.splits,
            FORMAT=quantization.kind,
            REGISTERS=REGISTERS[quantization.kind],
        ),
        dict(num_warps=8),
    )


@gluon.jit
@no_type_check
def _multiply_keys(queries, of_rope, keys, rope_keys, scores):
    """Start the products of a tile of queries with the keys of a slot."""
    products = warpgroup_mma(queries, keys.permute((1, 0)), scores, use_acc=False, is_async=True)
    return warpgroup_mma(of_rope, rope_keys.permute((1, 0)), products, is_async=True)


@gluon.jit
@no_type_check
def _update_softmax(scores, j, last_of_rows, factor, row_max, sums):
    """Update the online softmax by a step of scores; sums are kept per column, and added up at the end."""
    scores = gl.where(j[None, :] <= last_of_rows[:, None], scores, float("-inf"))
    new_row_max = gl.maximum(row_max, gl.max(scores, 1) * factor)
    base = gl.where(new_row_max == float("-inf"), 0.0, new_row_max)  # -inf - -inf would be NaN
    weights = gl.exp2(scores * factor[:, None] - base[:, None])
    rescale = gl.exp2(row_max - base)
    return weights, rescale, new_row_max, sums * rescale[:, None] + weights


@gluon.jit
@no_type_check
def _multiply(
    queries,
    of_rope,
    weights,
    slots,
    first_key,
    steps,
    last_of_rows,
    factor,
    SCORES: gl.constexpr,
    OUTPUT: gl.constexpr,
):
    """Attend to the keys that are loaded into the slots; return the softmax, in layouts of the products.

    Every product is issued and awaited in one iteration, or the compiler would serialize them: also the scores of the
    next step, which are carried over in registers.
    """
    keys, rope_keys, full, empty = slots
    BLOCK_M: gl.constexpr = queries.shape[0]
    BLOCK_N: gl.constexpr = keys.shape[1]
    RANK: gl.constexpr = keys.shape[2]
    acc = gl.zeros([BLOCK_M, RANK], gl.float32, OUTPUT)
    row_max = gl.full([BLOCK_M], float("-inf"), gl.float32, gl.SliceLayout(1, SCORES))
    sums = gl.zeros([BLOCK_M, BLOCK_N], gl.float32, SCORES)
    nothing = gl.zeros([BLOCK_M, BLOCK_N], gl.float32, SCORES)
    j = first_key + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, SCORES))
    if steps > 0:
        mbarrier.wait(full.index(0), 0)
        products = _multiply_keys(queries, of_rope, keys.index(0), rope_keys.index(0), nothing)
        scores = warpgroup_mma_wait(0, deps=[products])
        for step in range(1, steps):
            slot = (step - 1) & 1
            x, rescale, row_max, sums = _update_softmax(scores, j, last_of_rows, factor, row_max, sums)
            j += BLOCK_N
            weights.store(x.to(weights.dtype))
            acc = acc * gl.convert_layout(rescale, gl.SliceLayout(1, OUTPUT))[:, None]
            fence_async_shared()
            outputs = warpgroup_mma(weights, keys.index(slot), acc, is_async=True)
            mbarrier.wait(full.index(slot ^ 1), step >> 1 & 1)
            products = _multiply_keys(queries, of_rope, keys.index(slot ^ 1), rope_keys.index(slot ^ 1), nothing)
            outputs = warpgroup_mma_wait(2, deps=[outputs])  # the two products of the scores may go on
            tl.debug_barrier()
            mbarrier.arrive(empty.index(slot))
            acc, scores = warpgroup_mma_wait(0, deps=[outputs, products])
        x, rescale, row_max, sums = _update_softmax(scores, j, last_of_rows, factor, row_max, sums)
        weights.store(x.to(weights.dtype))
        acc = acc * gl.convert_layout(rescale, gl.SliceLayout(1, OUTPUT))[:, None]
        fence_async_shared()
        acc = warpgroup_mma(weights, keys.index((steps - 1) & 1), acc)
    return acc, row_max, gl.sum(sums, 1)


@gluon.jit
@no_type_check
def _numbers(quantization, FORMAT: gl.constexpr):
    return quantization.to(gl.float8e4nv if FORMAT == "e4m3" else gl.float8e5, bitcast=True).to(gl.float16)


@gluon.jit
@no_type_check
def _bring(
    key,
    key_strides,
    table,
    table_stride,
    slots,
    first_key,
    last_key,
    steps,
    BLOCK_SIZE: gl.constexpr,
    FORMAT: gl.constexpr,
):
    """Load keys into the slots as they become empty, zeros where there is no key.

    Unquantized latents bypass the registers. Quantized ones wait in registers for a slot, and are converted into it, 64
    columns at a time: loads of later keys could not be in flight meanwhile, as the fence waits for them.
    """
    keys, rope_keys, full, empty = slots
    BLOCK_N: gl.constexpr = keys.shape[1]
    RANK: gl.constexpr = keys.shape[2]
    ROPE: gl.constexpr = rope_keys.shape[2]
    PARTS: gl.constexpr = (RANK + ROPE) // ROPE
    QUANTIZED_PART: gl.constexpr = gl.BlockedLayout([1, 16], [8, 4], [4, 1], [1, 0])
    NUMBERS: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    LAYOUT: gl.constexpr = NUMBERS if FORMAT == "" else QUANTIZED_PART
    at = gl.arange(0, ROPE, layout=gl.SliceLayout(0, LAYOUT))
    j = first_key + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, LAYOUT))
    blocks = gl.load(table + (j // BLOCK_SIZE).to(gl.int64) * table_stride, mask=j < last_key, other=0)
    for step in range(steps):
        slot = step & 1
        rows = key + blocks.to(gl.int64) * key_strides[0] + j % BLOCK_SIZE * key_strides[1]
        pointers = rows[:, None] + at[None, :]
        is_key = (j < last_key)[:, None] & (at < ROPE)[None, :]
        loaded = ()
        if FORMAT != "":
            for part in gl.static_range(PARTS):
                loaded = loaded + (gl.load(pointers + part * ROPE, mask=is_key, other=0),)
        j += BLOCK_N
        blocks = gl.load(table + (j // BLOCK_SIZE).to(gl.int64) * table_stride, mask=j < last_key, other=0)
        mbarrier.wait(empty.index(slot), (step >> 1 & 1) ^ 1)
        for part in gl.static_range(PARTS):
            place = rope_keys.index(slot)
            if part < PARTS - 1:
                place = keys.index(slot).slice(part * ROPE, ROPE, 1)
            if FORMAT == "":
                async_copy.async_copy_global_to_shared(place, pointers + part * ROPE, mask=is_key)
            else:
                place.store(_numbers(loaded[part], FORMAT))
        if FORMAT == "":
            async_copy.commit_group()
            async_copy.wait_group(0)
        fence_async_shared()
        tl.debug_barrier()
        mbarrier.arrive(full.index(slot))


@gluon.jit
@no_type_check
def _share_of_steps(cu_seqlens_q, seq_lens, num_seqs, steps, BLOCK_N: gl.constexpr, BLOCK_SEQS: gl.constexpr):
    """Return the ratio of `steps` to the steps of an average sequence."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [8], [0])
    total = 0
    for first in range(0, num_seqs, BLOCK_SEQS):
        sequence = first + gl.arange(0, BLOCK_SEQS, layout=LAYOUT)
        is_sequence = sequence < num_seqs
        begin = gl.load(cu_seqlens_q + sequence, mask=is_sequence, other=0)
        has_queries = gl.load(cu_seqlens_q + sequence + 1, mask=is_sequence, other=0) > begin
        seq_len = gl.load(seq_lens + sequence, mask=is_sequence & has_queries, other=0)
        total += gl.sum((seq_len + BLOCK_N - 1) // BLOCK_N, 0)
    return steps.to(gl.float32) * num_seqs / gl.maximum(total, 1).to(gl.float32)


@gluon.jit(do_not_specialize=CHANGING)
@no_type_check
def _attend_kernel(
    query,
    key,
    value,  # begins where the key does
    out,  # [t, h, rank] in the type of the query, or [splits, t, h, rank] in float32
    lse,  # [t, h] or [splits, t, h]
    block_table,
    cu_seqlens_q,
    seq_lens,
    sinks,
    query_strides,
    key_strides,
    table_row_stride,
    table_stride,
    num_tokens,
    num_seqs,
    splits,
    scale,
    query_number,  # scale of a quantized query; latents have no other scales than these
    value_number,
    query_scales,
    key_scales,
    value_scales,
    group_scales,
    NUM_HEADS: gl.constexpr,
    RANK: gl.constexpr,
    ROPE: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_SEQS: gl.constexpr,
    ONE_TILE: gl.constexpr,
    SPLIT: gl.constexpr,
    BALANCE: gl.constexpr,
    FORMAT: gl.constexpr,
    REGISTERS: gl.constexpr,
):
    LOG2E: gl.constexpr = 1.4426950408889634
    TYPE: gl.constexpr = query.dtype.element_ty if FORMAT == "" else gl.float16
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, BLOCK_N // 2, 16])
    OUTPUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, RANK // 2, 16])
    QUERIES: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [8, 1], [1, 0])
    SHARED: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    tile, split = gl.program_id(0), gl.program_id(1)

    # The rows of this tile, and their sequence.
    sequence, first_row = find_rows(cu_seqlens_q, tile, num_seqs, NUM_HEADS, BLOCK_M, ONE_TILE)
    first_query = gl.load(cu_seqlens_q + sequence)
    num_rows = (gl.load(cu_seqlens_q + sequence + 1) - first_query) * NUM_HEADS
    if not SPLIT:
        first_padding = gl.load(cu_seqlens_q + num_seqs).to(gl.int64) * NUM_HEADS
        store_padding(out, lse, first_padding + tile, num_tokens.to(gl.int64) * NUM_HEADS, gl.num_programs(0), RANK)
    if first_row >= num_rows:
        return
    first_place = (split.to(gl.int64) * num_tokens + first_query) * NUM_HEADS
    seq_len = gl.load(seq_lens + sequence)
    context = seq_len - num_rows // NUM_HEADS  # the last key that the sequence's first query sees

    # The keys that some row sees, and among them the run of this split.
    first_key = tile * 0
    last_row = gl.minimum(first_row + BLOCK_M, num_rows) - 1
    last_key = gl.maximum(context + last_row // NUM_HEADS + 1, 0)
    if SPLIT:
        steps = gl.cdiv(last_key, BLOCK_N)
        if BALANCE:
            share = _share_of_steps(cu_seqlens_q, seq_lens, num_seqs, steps, BLOCK_N, BLOCK_SEQS)
            splits = gl.minimum(gl.maximum((share * splits + 0.9).to(gl.int32), 1), gl.num_programs(1))
        run = gl.cdiv(steps, splits) * BLOCK_N
        first_key = split * run
        last_key = gl.minimum(last_key, first_key + run)
        if first_key >= last_key:
            rows = first_row + gl.arange(0, BLOCK_M, layout=gl.BlockedLayout([1], [32], [8], [0]))
            nothing = gl.full([BLOCK_M], float("-inf"), gl.float32, gl.BlockedLayout([1], [32], [8], [0]))
            gl.store(lse + first_place + rows, nothing, mask=rows < num_rows)
            return
    steps = gl.cdiv(last_key - first_key, BLOCK_N)

    # With quantized values, queries are float16. Those of bfloat16 are divided by a power of two: a row below 2 loses
    # nothing.
    rows = first_row + gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, QUERIES))
    tokens = (first_query + rows // NUM_HEADS).to(gl.int64)
    query_rows = query + tokens * query_strides[0] + (rows % NUM_HEADS).to(gl.int64) * query_strides[1]
    at = gl.arange(0, RANK, layout=gl.SliceLayout(0, QUERIES)).to(gl.int64)
    at_rope = RANK + gl.arange(0, ROPE, layout=gl.SliceLayout(0, QUERIES)).to(gl.int64)
    is_row = (rows < num_rows)[:, None]
    x = gl.load(query_rows[:, None] + (at * query_strides[2])[None, :], mask=is_row, other=0.0)
    y = gl.load(query_rows[:, None] + (at_rope * query_strides[2])[None, :], mask=is_row, other=0.0)
    power = gl.full([BLOCK_M], 1.0, gl.float32, gl.SliceLayout(1, QUERIES))
    if x.dtype != TYPE:
        x, y = x.to(gl.float32), y.to(gl.float32)
        largest = gl.maximum(gl.max(gl.abs(x), 1), gl.max(gl.abs(y), 1))
        power = power_of_two(largest)
        x, y = (x / power[:, None]).to(TYPE), (y / power[:, None]).to(TYPE)
    queries = gl.allocate_shared_memory(TYPE, [BLOCK_M, RANK], SHARED, x)
    of_rope = gl.allocate_shared_memory(TYPE, [BLOCK_M, ROPE], SHARED, y)
    keys = gl.allocate_shared_memory(TYPE, [2, BLOCK_N, RANK], SHARED)
    rope_keys = gl.allocate_shared_memory(TYPE, [2, BLOCK_N, ROPE], SHARED)
    weights = gl.allocate_shared_memory(TYPE, [BLOCK_M, BLOCK_N], SHARED)
    full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(2):
        mbarrier.init(full.index(slot), count=1)
        mbarrier.init(empty.index(slot), count=1)
    fence_async_shared()

    of_scores = first_row + gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, SCORES))
    last_of_rows = gl.minimum(context + of_scores // NUM_HEADS, last_key - 1)
    factor = gl.convert_layout(power, gl.SliceLayout(1, SCORES)) * (scale * LOG2E)
    table = block_table + sequence.to(gl.int64) * table_row_stride
    slots = keys, rope_keys, full, empty
    # Triton 3.6 stores the producer's arguments in the scratch memory of `factor`'s conversion, without a barrier.
    tl.debug_barrier()
    acc, row_max, row_sum = gl.warp_specialize(
        [
            (
                _multiply,
                (queries, of_rope, weights, slots, first_key, steps, last_of_rows, factor, SCORES, OUTPUT),
            ),
            (
                _bring,
                (key, key_strides, table, table_stride, slots, first_key, last_key, steps, BLOCK_SIZE, FORMAT),
            ),
        ],
        [4],
        [REGISTERS],
    )
    row_max = gl.convert_layout(row_max, gl.SliceLayout(1, OUTPUT))
    row_sum = gl.convert_layout(row_sum, gl.SliceLayout(1, OUTPUT))
    rows = first_row + gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, OUTPUT))
    is_row = rows < num_rows
    sink = None
    if sinks is not None and not SPLIT:
        sink = gl.load(sinks + rows % NUM_HEADS, mask=is_row, other=0.0).to(gl.float32)
    values, logs = normalize(row_max, row_sum, acc, sink)
    if FORMAT != "":
        values *= value_number
    at = gl.arange(0, RANK, layout=gl.SliceLayout(0, OUTPUT))
    places = first_place + rows
    gl.store(out + places[:, None] * RANK + at[None, :], values.to(out.dtype.element_ty), mask=is_row[:, None])
    gl.store(lse + places, logs, mask=is_row)
