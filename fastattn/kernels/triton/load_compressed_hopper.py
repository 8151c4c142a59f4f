"""What `fastattn.kernels.triton.compressed_hopper` loads: queries and keys of tile after tile, by the producer.

Source: the PTX manual, "cp.async" and "mbarrier".
"""

from typing import Any, NamedTuple, no_type_check

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, fence_async_shared, mbarrier

from fastattn.kernels.triton.hopper import leave
from fastattn.kernels.triton.load_latents_hopper import numbers_of_bytes
from fastattn.kernels.triton.merge import SEQS_AT_ONCE
from fastattn.kernels.triton.quantized import power_of_two


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
    """The keys of a tile, or of a split, by places.

    Attributes:
        begin: where its steps begin; for a consumer, where the step of number 0 would be.
        first: the first place with a key that the tile sees.
        end: past the last one.
        steps: the number of its steps; below 0 after the last tile.
        until: the number after that of its last step, for consumers, who count the steps of all tiles.
    """

    begin: Any
    first: Any
    end: Any
    steps: Any
    until: Any


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


class Beside(NamedTuple):
    """Shared memory and a barrier beside those of `Room`.

    Attributes:
        told: [4], the steps of a tile, its first key and its end, which the producer tells the consumers.
        known: the barrier of these.
        lines: [consumers, rows, columns], some columns of the output on their way.
    """

    told: Any
    known: Any
    lines: Any


# --- tiles ---


@gluon.jit
@no_type_check
def find_tile(queries, number, TILE):
    """Return the tile of a number."""
    PER_TOKEN: gl.constexpr = queries.HEADS // TILE.ROWS
    token = number // PER_TOKEN
    head = number % PER_TOKEN * TILE.ROWS
    place = (gl.program_id(1).to(gl.int64) * queries.num_tokens + token) * queries.HEADS + head
    return Tile(token, head, place)


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
def _find_keys(queries, pools, sight, sequence, token, TILE):
    """Return where the keys of a query are, and all that it sees, by places."""
    keys, entries = pools
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
    steps = gl.cdiv(end, TILE.KEYS)
    return Source(table, entry_table, seen, border), Span(border * 0, border - tokens, end, steps, steps)


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
    return Span(begin * TILE.KEYS, span.first, span.end, steps, steps)


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
def _tell(beside, steps, first, end):
    """Tell the consumers the next tile; a negative number of steps tells them that there is none."""
    FOUR: gl.constexpr = gl.BlockedLayout([4], [32], [4], [0])
    at = gl.arange(0, 4, layout=FOUR)
    beside.told.store(gl.where(at == 0, steps, gl.where(at == 1, first, end)))
    mbarrier.arrive(beside.known.index(0))  # all warps of the producer meet before it


@gluon.jit
@no_type_check
def hear(beside, tiles, pairs, TILE):
    """Wait for what the producer tells of the next tile, after some tiles and pairs of steps."""
    FOUR: gl.constexpr = gl.BlockedLayout([4], [32], [4], [0])
    mbarrier.wait(beside.known.index(0), tiles & 1)
    at = gl.arange(0, 4, layout=FOUR)
    told = beside.told.load(FOUR)
    steps = gl.sum(gl.where(at == 0, told, 0), 0)
    first = gl.sum(gl.where(at == 1, told, 0), 0)
    end = gl.sum(gl.where(at == 2, told, 0), 0)
    return Span(-2 * pairs * TILE.KEYS, first, end, steps, 2 * pairs + steps)


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
def _find_step(pools, source, span, begin, j):
    """Return the addresses of the keys of the step at a place, which of them there are, and the ratio of their scale.

    `j` are their places after the border, below 0 for tokens. The step after the last one has no keys, or those of
    another split.
    """
    keys, entries = pools
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
def _fill(room, slot, TILE):
    """Arrive at the barrier of a slot that is filled, or skipped.

    `leave` arrives after copies of its thread; after what it has stored in another way, the other does.
    """
    if TILE.FORMAT == "":
        leave(room.full.index(slot))
    else:
        mbarrier.arrive(room.full.index(slot))


@gluon.jit
@no_type_check
def _bring_tile(queries, pools, rooms, tile, source, span, before, TILE):
    """Load the queries of a tile, and its keys into the slots as they become empty; return the pairs of steps so far.

    There are zeros where there is no key. Queries are copied before the first keys: who waits for these has both. The
    producer does not wait for its copies: those of two steps may be in flight. A last step without another one leaves a
    slot empty, which both sides skip. See `load_latents_hopper.bring`.
    """
    BYTES: gl.constexpr = gl.BlockedLayout([1, 16], [8, 4], [4, 1], [1, 0])
    NUMBERS: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    LAYOUT: gl.constexpr = NUMBERS if TILE.FORMAT == "" else BYTES
    room, beside = rooms
    tiles, pairs = before
    at = gl.arange(0, TILE.SIZE, layout=gl.SliceLayout(0, LAYOUT))[None, :]
    j = span.begin - source.border + gl.arange(0, TILE.KEYS, layout=gl.SliceLayout(1, LAYOUT))
    begin = span.begin
    rows, is_key, ratio = _find_step(pools, source, span, begin, j)
    mbarrier.wait(room.query_read.index(0), (tiles & 1) ^ 1)
    _tell(beside, span.steps, span.first - span.begin, span.end - span.begin)
    if TILE.FORMAT == "" and span.steps > 0:  # a copy without keys would not be waited for
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
        rows, is_key, ratio = _find_step(pools, source, span, begin, j)
        mbarrier.wait(room.empty.index(slot), (pairs + (step >> 1) & 1) ^ 1)
        if TILE.FORMAT == "":
            async_copy.async_copy_global_to_shared(room.key.index(slot), pointers, mask=mask)
        else:
            numbers = numbers_of_bytes(loaded, TILE.FORMAT)
            if TILE.RESCALED:
                numbers = (numbers.to(gl.float32) * factor).to(gl.float16)
            room.key.index(slot).store(numbers)
            fence_async_shared()
        _fill(room, slot, TILE)
    pairs += span.steps // 2
    if span.steps % 2 == 1:
        mbarrier.wait(room.empty.index(1), (pairs & 1) ^ 1)
        _fill(room, 1, TILE)
        pairs += 1
    return pairs


@gluon.jit
@no_type_check
def bring(queries, pools, sight, split, rooms, out, TILE):
    """Load the tiles of a program; padding, and splits without keys, the producer stores itself."""
    room, beside = rooms
    tiles = gl.program_id(0) * 0
    pairs = gl.program_id(0) * 0  # pairs of steps of all tiles before
    number = gl.program_id(0)
    while number < queries.num_tokens * (queries.HEADS // TILE.ROWS):
        tile = find_tile(queries, number, TILE)
        sequence = _find_sequence(queries, tile.token)
        known = gl.minimum(sequence, queries.num_seqs - 1)
        source, span = _find_keys(queries, pools, sight, known, tile.token, TILE)
        span = _share(span, split, TILE)
        has_keys = span.steps > 0
        if not TILE.SPLIT:
            has_keys = span.steps >= 0
        if (sequence < queries.num_seqs) & has_keys:
            pairs = _bring_tile(queries, pools, rooms, tile, source, span, (tiles, pairs), TILE)
            tiles += 1
        else:
            _store_nothing(tile, out, TILE)
        number += gl.num_programs(0)
    mbarrier.wait(room.query_read.index(0), (tiles & 1) ^ 1)
    _tell(beside, tiles * 0 - 1, tiles, tiles)


@gluon.jit
@no_type_check
def load_query(queries, tile, LAYOUT: gl.constexpr, TILE):
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
