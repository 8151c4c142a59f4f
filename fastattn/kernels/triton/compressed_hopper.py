"""Attention to a window and to entries on Hopper, in one launch; the twin of `refattn.compressed.attention`.

A tile is 64 heads of one query, so all its rows see the same keys: those of its window, then its entries. They come in
steps of 64, the window from one pool and the entries from another. The window ends where a step ends, and the entries
begin with the next one, so what the tile sees is one run of places, and no row has a mask of its own:

    window of 100, 90 entries       |          | window   | entries  | entries  |
    places                          0    28   64        128        192     218
                                         ^ first                            ^ end

Keys have 512 elements, which are also their values. Two warpgroups multiply, a third one loads, as in
`fastattn.kernels.triton.latents_hopper`, whose consumers these are. The producer also copies the queries: few keys per
query leave no time to wait for them first. With few tiles, the steps are split, and `reduce_splits` merges.

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
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    warpgroup_mma_wait,
)

from fastattn.kernels.problem import with_positive_scale
from fastattn.kernels.replay import Bound, key_of_launch, memo_of
from fastattn.kernels.triton.attention import launch_reduction
from fastattn.kernels.triton.hopper import is_there, leave
from fastattn.kernels.triton.latents_hopper import (
    REGISTERS,
    _attend_first,
    _attend_own_of_first,
    _attend_second,
    _multiply_values,
    _own_sums,
    _shrink,
)
from fastattn.kernels.triton.launch import CHANGING, Launch, SplitLaunches, can_overlap
from fastattn.kernels.triton.load_latents_hopper import Room, numbers_of_bytes
from fastattn.kernels.triton.merge import SEQS_AT_ONCE, Out, Part, Softmax, Whole, normalize, part, whole
from fastattn.kernels.triton.quantized import FORMATS, power_of_two
from fastattn.kernels.triton.queries import Given, contiguous, has_scale_above_0, options_of, queries_of
from fastattn.kernels.triton.tuning import sms_of
from refattn.entries import CompressedPlan
from refattn.keys import Latents
from refattn.options import AttentionOptions

__all__ = ["attend_compressed", "is_there"]
ROWS, KEYS, SIZE = 64, 64, 512  # heads of a tile, keys of a step, elements of a key
FURTHEST = 2**31 - 1


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


class Pool(NamedTuple):
    """Keys in blocks of a pool, and the blocks of each sequence.

    Attributes:
        key: [n, p, d].
        block_table: [b, m]; [t, m] of selected entries.
        seq_lens: [t], the number of selected entries; None for all others.
        table_row_stride: of its rows.
        table_stride: of its columns.
        block_stride: of blocks of the pool.
        token_stride: of keys in a block.
        ratio: the scale of quantized keys over the larger one of both pools.
        BLOCK_SIZE: p.
    """

    key: Any
    block_table: Any
    seq_lens: Any
    table_row_stride: Any
    table_stride: Any
    block_stride: Any
    token_stride: Any
    ratio: Any
    BLOCK_SIZE: Any


class Sight(NamedTuple):
    """Who sees what.

    Attributes:
        tokens: the most tokens of a window.
        number: the larger scale of quantized pools.
        RATIO: tokens of an entry.
    """

    tokens: Any
    number: Any
    RATIO: Any


class Tile(NamedTuple):
    """Heads of one query.

    Attributes:
        token: its row in the batch.
        head: the first head.
        place: the place of its first head's output in `Out.lse`.
    """

    token: Any
    head: Any
    place: Any


class Span(NamedTuple):
    """The keys of a program, by places.

    Attributes:
        begin: where its steps begin.
        first: the first place with a key that the tile sees.
        end: past the last one.
        steps: the number of its steps.
    """

    begin: Any
    first: Any
    end: Any
    steps: Any


class Source(NamedTuple):
    """Where the keys of a tile are.

    Attributes:
        table: the row of the block table of tokens.
        entry_table: the row of that of entries.
        seen: tokens of the sequence up to the query.
        border: the place of the first entry, and past the last token.
    """

    table: Any
    entry_table: Any
    seen: Any
    border: Any


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
    tiles = query.shape[0] * (query.shape[1] // ROWS)
    if options.batch_invariant:
        return 1
    steps = -(-min(plan.batch.max_seq_len, _tokens(plan)) // KEYS) + -(-plan.entries.batch.max_seq_len // KEYS)
    return max(1, min(sms_of(query.device) // tiles, steps))


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
    return Launch(
        _attend_kernel,
        (query.shape[0] * (query.shape[1] // ROWS), split.splits if isinstance(split, Part) else 1),
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
        cache.view(torch.uint8) if cache.dtype in FORMATS else cache,
        table,
        None,
        *table.stride(),
        *cache.stride()[:2],
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


# --- the producer: it loads queries and keys ---


@gluon.jit
@no_type_check
def _find_rows(pool, table, index, is_key):
    """Return the addresses of keys of a sequence."""
    block = gl.load(table + (index // pool.BLOCK_SIZE).to(gl.int64) * pool.table_stride, mask=is_key, other=0)
    slot = (index % pool.BLOCK_SIZE).to(gl.int64)
    return pool.key + block.to(gl.int64) * pool.block_stride + slot * pool.token_stride


@gluon.jit
@no_type_check
def _find_step(keys, entries, source, span, begin, j):
    """Return the addresses of the keys of the step at a place, which of them there are, and the ratio of their scale.

    `j` are their places after the border, below 0 for tokens. The step after the last one has no keys, or those of
    another split.
    """
    if begin < source.border:
        is_key = j >= span.first - source.border
        rows = _find_rows(keys, source.table, source.seen + j, is_key)
        ratio = keys.ratio
    else:
        is_key = j < span.end - source.border
        rows = _find_rows(entries, source.entry_table, j, is_key)
        ratio = entries.ratio
    return rows, is_key, ratio


@gluon.jit
@no_type_check
def _copy_query(queries, room, tile, LAYOUT: gl.constexpr, TILE):
    """Start to copy the queries of a tile into shared memory."""
    heads = (tile.head + gl.arange(0, TILE.ROWS, layout=gl.SliceLayout(1, LAYOUT))).to(gl.int64)
    at = gl.arange(0, TILE.SIZE, layout=gl.SliceLayout(0, LAYOUT))[None, :]
    rows = queries.query + tile.token.to(gl.int64) * queries.strides[0] + heads * queries.strides[1]
    async_copy.async_copy_global_to_shared(room.query.index(0), rows[:, None] + at)


@gluon.jit
@no_type_check
def _bring(queries, keys, entries, source, room, tile, span, TILE):
    """Load keys into the slots as they become empty, zeros where there is no key; see `load_latents_hopper.bring`.

    Unquantized queries are copied before the first keys: who waits for these has both.
    """
    BYTES: gl.constexpr = gl.BlockedLayout([1, 16], [8, 4], [4, 1], [1, 0])
    NUMBERS: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    LAYOUT: gl.constexpr = NUMBERS if TILE.FORMAT == "" else BYTES
    at = gl.arange(0, TILE.SIZE, layout=gl.SliceLayout(0, LAYOUT))[None, :]
    j = span.begin - source.border + gl.arange(0, TILE.KEYS, layout=gl.SliceLayout(1, LAYOUT))
    begin = span.begin
    rows, is_key, ratio = _find_step(keys, entries, source, span, begin, j)
    if TILE.FORMAT == "" and span.steps > 0:  # without keys nobody waits for a copy
        _copy_query(queries, room, tile, LAYOUT, TILE)
    for step in range(span.steps):
        slot = step & 1
        pointers = rows[:, None] + at
        mask = is_key[:, None] & (at < TILE.SIZE)  # the second is always true, and gives a shape
        factor = ratio
        if TILE.FORMAT != "":
            loaded = gl.load(pointers, mask=mask, other=0)
        begin += TILE.KEYS
        j += TILE.KEYS
        rows, is_key, ratio = _find_step(keys, entries, source, span, begin, j)
        mbarrier.wait(room.empty.index(slot), (step >> 1 & 1) ^ 1)
        if TILE.FORMAT == "":
            async_copy.async_copy_global_to_shared(room.key.index(slot), pointers, mask=mask)
            async_copy.commit_group()
            async_copy.wait_group(0)
        else:
            numbers = numbers_of_bytes(loaded, TILE.FORMAT)
            if TILE.RESCALED:
                numbers = (numbers.to(gl.float32) * factor).to(gl.float16)
            room.key.index(slot).store(numbers)
        fence_async_shared()
        if TILE.FORMAT == "":
            leave(room.full.index(slot))
        else:  # `leave` arrives after copies of its thread; after what it has stored in another way, this one does
            mbarrier.arrive(room.full.index(slot))


# --- the consumers: they multiply ---


@gluon.jit
@no_type_check
def _attend_other_of_second(state, room, count):
    """Take a last step of the other consumer, after which the second one has none."""
    acc, sums, row_max = state
    now, slot = count >> 2 & 1, count & 1
    old_max = row_max
    mbarrier.wait(room.ready.index(0), now)
    row_max = room.row_max.index(0).load(row_max.type.layout)
    acc, sums = _shrink(acc, sums, old_max, row_max)
    outputs = _multiply_values(room, acc, 1, slot ^ 1)
    acc = warpgroup_mma_wait(0, deps=[outputs])
    return acc, sums, row_max


@gluon.jit
@no_type_check
def _multiply(queries, sight, options, room, work, out, TILE, WHO: gl.constexpr):
    """Attend to the keys that are loaded into the slots, and store a half of the columns of the output."""
    HALF: gl.constexpr = TILE.SIZE // 2
    # Results of `wgmma`, version 3: four warps of 16 rows each, with all columns.
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE.KEYS, 16])
    OUTPUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 16])
    OF_ROWS: gl.constexpr = gl.SliceLayout(1, SCORES)
    tile, span = work
    row_max = gl.full([TILE.ROWS], float("-inf"), gl.float32, OF_ROWS)
    sums = _own_sums(gl.zeros([TILE.ROWS, TILE.KEYS], gl.float32, SCORES))
    state = gl.zeros([TILE.ROWS, HALF], gl.float32, OUTPUT), sums, row_max
    # `count` is 4 * pair + WHO, which the compiler does not know, as in `latents_hopper._multiply`.
    count = gl.program_id(0) * 0 + WHO
    four = gl.num_programs(2) + 3
    while count < 4 * (span.steps // 2):
        if WHO == 0:
            state = _attend_first(state, room, count, span, SCORES)
        else:
            state = _attend_second(state, room, count, span, SCORES)
        count += four
    if span.steps % 2 == 1:
        if WHO == 0:
            state = _attend_own_of_first(state, room, count, span, SCORES)
        else:
            state = _attend_other_of_second(state, room, count)
    acc, sums, row_max = state
    room.row_sum.index(WHO).store(gl.convert_layout(gl.sum(sums, 1), OF_ROWS))
    mbarrier.arrive(room.summed.index(0))
    mbarrier.wait(room.summed.index(0), 0)
    row_sum = room.row_sum.index(0).load(OF_ROWS) + room.row_sum.index(1).load(OF_ROWS)
    _store(sight, options, room, tile, Softmax(row_max, row_sum, acc), out, TILE, WHO)


@gluon.jit
@no_type_check
def _store(sight, options, room, tile, softmax, out, TILE, WHO: gl.constexpr):
    """Store the half of the outputs that a consumer has, and log-sum-exps.

    Outputs go by the room of the queries, which nobody reads any more, so that each thread stores 16 contiguous bytes;
    products leave 4 with it.
    """
    OUTPUT: gl.constexpr = softmax.acc.type.layout
    HALF: gl.constexpr = softmax.acc.shape[1]
    LINES: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [4, 1], [1, 0])
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
        room_of_values = room.query.index(0).slice(WHO * HALF, HALF, 1)
        room_of_values.store(values.to(TYPE).to(room.query.dtype, bitcast=True))
        lines = room_of_values.load(LINES).to(TYPE, bitcast=True)
        line = tile.place + gl.arange(0, TILE.ROWS, layout=gl.SliceLayout(1, LINES))
        at_line = WHO * HALF + gl.arange(0, HALF, layout=gl.SliceLayout(0, LINES))
        gl.store(out.out + (line[:, None] * TILE.SIZE + at_line[None, :]), lines)


# --- a program ---


@gluon.jit
@no_type_check
def _find_sequence(queries, token):
    """Return the sequence of a query, past the last one for padding: the number of those that end before it."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    is_before = gl.zeros([SEQS_AT_ONCE], gl.int32, LAYOUT)
    for first in range(0, queries.num_seqs, SEQS_AT_ONCE):
        sequence = first + gl.arange(0, SEQS_AT_ONCE, layout=LAYOUT)
        is_sequence = sequence < queries.num_seqs
        end = gl.load(queries.cu_seqlens_q + 1 + sequence, mask=is_sequence, other=2147483647)
        is_before += (end <= token).to(gl.int32)
    return gl.sum(is_before, 0)


@gluon.jit
@no_type_check
def _find_keys(queries, keys, entries, sight, sequence, token, TILE):
    """Return where the keys of a query are, and all that it sees, by places."""
    end = gl.load(queries.cu_seqlens_q + sequence + 1)
    seen = gl.maximum(gl.load(queries.seq_lens + sequence) - (end - 1 - token), 0)  # a sequence may have fewer keys
    row = sequence
    if entries.seq_lens is None:
        visible = seen // sight.RATIO
    else:
        row = token
        visible = gl.load(entries.seq_lens + token)
    tokens = gl.minimum(seen, sight.tokens)
    border = gl.cdiv(tokens, TILE.KEYS) * TILE.KEYS
    table = keys.block_table + sequence.to(gl.int64) * keys.table_row_stride
    entry_table = entries.block_table + row.to(gl.int64) * entries.table_row_stride
    end = border + visible
    span = Span(border * 0, border - tokens, end, gl.cdiv(end, TILE.KEYS))
    return Source(table, entry_table, seen, border), span


@gluon.jit
@no_type_check
def _share(span, split, TILE):
    """Return the steps of this program."""
    steps = span.steps
    begin = span.begin
    if TILE.SPLIT:
        of_each = gl.cdiv(steps, split.splits)
        begin = gl.program_id(1) * of_each
        steps = gl.maximum(gl.minimum(steps - begin, of_each), 0)
    return Span(begin * TILE.KEYS, span.first, span.end, steps)


@gluon.jit
@no_type_check
def _store_nothing(tile, out, TILE):
    """Store the log-sum-exps of a tile without keys, `-inf`, and unless it is a split, outputs of 0."""
    LINES: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [4, 1], [1, 0])
    rows = tile.place + gl.arange(0, TILE.ROWS, layout=gl.SliceLayout(1, LINES))
    gl.store(out.lse + rows, gl.full([TILE.ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, LINES)))
    if not TILE.SPLIT:
        at = gl.arange(0, TILE.SIZE, layout=gl.SliceLayout(0, LINES))
        nothing = gl.zeros([TILE.ROWS, TILE.SIZE], out.out.dtype.element_ty, LINES)
        gl.store(out.out + (rows[:, None] * TILE.SIZE + at[None, :]), nothing)


@gluon.jit
@no_type_check
def _load_query(queries, tile, LAYOUT: gl.constexpr, TILE):
    """Load the queries of a tile as float16. A row in bfloat16 is divided by a power of two, which is returned."""
    heads = (tile.head + gl.arange(0, TILE.ROWS, layout=gl.SliceLayout(1, LAYOUT))).to(gl.int64)
    at = gl.arange(0, TILE.SIZE, layout=gl.SliceLayout(0, LAYOUT))[None, :]
    rows = queries.query + tile.token.to(gl.int64) * queries.strides[0] + heads * queries.strides[1]
    power = gl.full([TILE.ROWS], 1.0, gl.float32, gl.SliceLayout(1, LAYOUT))
    if queries.query.dtype.element_ty != gl.float16:
        # Loaded twice, in ways that differ, or the compiler would load once: registers have no room for all in float32.
        loaded = gl.load(rows[:, None] + at, eviction_policy="evict_last")
        power = power_of_two(gl.max(gl.abs(loaded.to(gl.float32)), 1))
    q = gl.load(rows[:, None] + at)
    if queries.query.dtype.element_ty != gl.float16:
        q = (q.to(gl.float32) / power[:, None]).to(gl.float16)
    return q, power


@gluon.jit(do_not_specialize=CHANGING)
@no_type_check
def _attend_kernel(queries, keys, entries, sight, options, split, out, TILE):
    """Attend from some heads of a query to its window and its entries, with two consumers and a producer."""
    LOG2E: gl.constexpr = 1.4426950408889634
    TYPE: gl.constexpr = queries.query.dtype.element_ty if TILE.FORMAT == "" else gl.float16
    QUERIES: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    SHARED: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    NUMBERS: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    BARRIERS: gl.constexpr = mbarrier.MBarrierLayout()
    PER_TOKEN: gl.constexpr = queries.HEADS // TILE.ROWS
    token = gl.program_id(0) // PER_TOKEN
    head = gl.program_id(0) % PER_TOKEN * TILE.ROWS
    first_place = (gl.program_id(1).to(gl.int64) * queries.num_tokens + token) * queries.HEADS
    tile = Tile(token, head, first_place + head)
    sequence = _find_sequence(queries, token)
    if sequence >= queries.num_seqs:
        _store_nothing(tile, out, TILE)
        return
    source, span = _find_keys(queries, keys, entries, sight, sequence, token, TILE)
    span = _share(span, split, TILE)
    if TILE.SPLIT and span.steps == 0:
        _store_nothing(tile, out, TILE)
        return
    power = gl.full([TILE.ROWS], 1.0, gl.float32, gl.SliceLayout(1, QUERIES))
    if TILE.FORMAT != "":
        q, power = _load_query(queries, tile, QUERIES, TILE)
    room = Room(
        query=gl.allocate_shared_memory(TYPE, [1, TILE.ROWS, TILE.SIZE], SHARED),
        rope_query=None,
        key=gl.allocate_shared_memory(TYPE, [2, TILE.KEYS, TILE.SIZE], SHARED),
        rope_key=None,
        weights=gl.allocate_shared_memory(TYPE, [TILE.ROWS, TILE.KEYS], SHARED),
        factor=gl.allocate_shared_memory(gl.float32, [TILE.ROWS], NUMBERS, power * (options.scale * LOG2E)),
        last=None,
        row_max=gl.allocate_shared_memory(gl.float32, [2, TILE.ROWS], NUMBERS),
        row_sum=gl.allocate_shared_memory(gl.float32, [2, TILE.ROWS], NUMBERS),
        full=gl.allocate_shared_memory(gl.int64, [2, 1], BARRIERS),
        empty=gl.allocate_shared_memory(gl.int64, [2, 1], BARRIERS),
        ready=gl.allocate_shared_memory(gl.int64, [2, 1], BARRIERS),
        read=gl.allocate_shared_memory(gl.int64, [2, 1], BARRIERS),
        summed=gl.allocate_shared_memory(gl.int64, [1, 1], BARRIERS),
    )
    if TILE.FORMAT != "":
        room.query.index(0).store(q)
    for slot in gl.static_range(2):
        mbarrier.init(room.full.index(slot), count=128 if TILE.FORMAT == "" else 1)
        mbarrier.init(room.empty.index(slot), count=256)
        mbarrier.init(room.ready.index(slot), count=1)
        mbarrier.init(room.read.index(slot), count=128)
    mbarrier.init(room.summed.index(0), count=2)
    fence_async_shared()
    tl.debug_barrier()
    gl.warp_specialize(
        [
            (_multiply, (queries, sight, options, room, (tile, span), out, TILE, 0)),
            (_multiply, (queries, sight, options, room, (tile, span), out, TILE, 1)),
            (_bring, (queries, keys, entries, source, room, tile, span, TILE)),
        ],
        [4, 4],
        [TILE.REGISTERS[0], TILE.REGISTERS[1]],
    )
