"""What `fastattn.kernels.triton.prompts_hopper` loads: the tiles of a persistent program, and their producer.

A producer warpgroup copies the queries of a tile, and step by step its keys and values, into slots of shared memory; a
slot holds the keys of a step and the values of the step before. It waits until a slot is empty, and a barrier tells the
consumers that it is full. There are two producers:

    bring_tiles    one thread starts a copy of a whole tile (TMA); the barrier counts its bytes
    bring_rows     each thread copies 16 bytes at a time (`cp.async`); the barrier counts threads

The first takes rows, and blocks that hold whole steps; the second takes the rest: smaller pages, windows over pages,
which may begin within a block, and tensors that have no map. Queries come by `cp.async` in both. A tile of TMA may end
past the keys of its sequence, where memory may be NaN: `clear_rows` is for the values of the last step.

Source: Shah et al. 2024, "FlashAttention-3" (3.1); the PTX manual, "cp.async.bulk.tensor" and "cp.async".
"""

from typing import Any, NamedTuple, no_type_check

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, fence_async_shared, mbarrier, tma

from fastattn.kernels.triton.masks import Run, visible_keys
from fastattn.kernels.triton.queries import find_rows

PANEL = tl.constexpr(64)  # elements of a row that are contiguous in shared memory
SLOTS = tl.constexpr(2)  # for tiles of queries, and for steps of keys and values
CLEARED = tl.constexpr(16)  # rows that are cleared at once


class Tile(NamedTuple):
    """Rows of one sequence and one KV head, and the keys that some of them see.

    Attributes:
        sequence: the sequence of the rows.
        kv_head: the KV head that they share.
        first_row: the first row, counted in the sequence and its group of heads.
        num_rows: rows of the sequence for these heads.
        first_query: the first query row of the sequence in the batch.
        context: the position of the first query of the sequence.
        first_position: the position of the first row of the tile.
        last_position: the position of its last row.
        run: the keys.
        steps: the number of steps; at least one, also for rows that see nothing.
    """

    sequence: Any
    kv_head: Any
    first_row: Any
    num_rows: Any
    first_query: Any
    context: Any
    first_position: Any
    last_position: Any
    run: Any
    steps: Any


class Room(NamedTuple):
    """Shared memory, and the barriers of its slots.

    Attributes:
        query: [slots * 2, rows / 2, d], a half for each consumer warpgroup.
        key: [slots, keys, d].
        value: [slots, keys, dv].
        has_queries: barriers of query tiles that are loaded.
        no_queries: barriers of query tiles that are consumed.
        full: barriers of slots of keys and values that are loaded.
        empty: barriers of slots that are consumed.
        IN_BULK: whether keys and values come by whole tiles; else consumers need a fence to see them.
    """

    query: Any
    key: Any
    value: Any
    has_queries: Any
    no_queries: Any
    full: Any
    empty: Any
    IN_BULK: Any


@gluon.jit
@no_type_check
def parity(count):
    """Return the parity of the round in which a slot is filled, after `count` others were: a wait names a round by it.

    Who fills a slot waits for the round before, `parity(count) ^ 1`. The first such wait is over at once: slots are
    empty then.
    """
    return count // SLOTS & 1


@gluon.jit
@no_type_check
def find_tile(program, programs, queries, mask, TILE):
    """Return the tile of a program, counted from the last one, and the keys that its rows see."""
    KV_HEADS: gl.constexpr = queries.HEADS // queries.GROUP
    number = (programs - 1 - program) // KV_HEADS
    sequence, first_row = find_rows(queries.cu_seqlens_q, number, queries.num_seqs, queries.GROUP, TILE.ROWS, False)
    first_query = gl.load(queries.cu_seqlens_q + sequence)
    query_len = gl.load(queries.cu_seqlens_q + sequence + 1) - first_query
    seq_len = gl.load(queries.seq_lens + sequence)
    context = seq_len - query_len  # negative where a sequence has more queries than keys
    num_rows = query_len * queries.GROUP
    first_position = context + first_row // queries.GROUP
    last_position = context + (gl.minimum(first_row + TILE.ROWS, num_rows) - 1) // queries.GROUP
    first, end = visible_keys(first_position, last_position, seq_len, mask.left, mask.right, mask.LEFT, mask.RIGHT)
    end = gl.maximum(end, 0)
    return Tile(
        sequence,
        program % KV_HEADS,
        first_row,
        num_rows,
        first_query,
        context,
        first_position,
        last_position,
        Run(first, first, end),
        gl.maximum(gl.cdiv(end - first, TILE.KEYS), 1),
    )


@gluon.jit
@no_type_check
def _copy(place, pool, offsets, is_row, LAYOUT: gl.constexpr):
    """Start to copy rows of a pool into shared memory, zeros where there is no row: memory there may be NaN."""
    SIZE: gl.constexpr = place.shape[1]
    at = gl.arange(0, PANEL, layout=gl.SliceLayout(0, LAYOUT))
    pointers = pool + (offsets[:, None] + at[None, :])
    mask = is_row[:, None] & (at < PANEL)[None, :]  # the second is always true, and gives the mask its shape
    for first in gl.static_range(0, SIZE, PANEL):
        async_copy.async_copy_global_to_shared(place.slice(first, PANEL, 1), pointers + first, mask=mask)


@gluon.jit
@no_type_check
def _copy_queries(queries, tile, room, slot, LAYOUT: gl.constexpr):
    """Start to copy a tile of queries, separately for each consumer warpgroup."""
    HALF: gl.constexpr = room.query.shape[1]
    head = queries.query + (tile.kv_head * queries.GROUP).to(gl.int64) * queries.strides[1]
    for half in gl.static_range(2):
        rows = tile.first_row + half * HALF + gl.arange(0, HALF, layout=gl.SliceLayout(1, LAYOUT))
        tokens = (tile.first_query + rows // queries.GROUP).to(gl.int64)
        offsets = tokens * queries.strides[0] + (rows % queries.GROUP).to(gl.int64) * queries.strides[1]
        _copy(room.query.index(slot * 2 + half), head, offsets, rows < tile.num_rows, LAYOUT)
    async_copy.mbarrier_arrive(room.has_queries.index(slot), increment_count=False)


@gluon.jit
@no_type_check
def _read_table(where, tile, j, PAGES: gl.constexpr):
    """Return the blocks of keys of a sequence; over rows, its first key row."""
    if PAGES:
        table = where.block_table + tile.sequence.to(gl.int64) * where.table_row_stride
        column = (j // where.BLOCK_SIZE).to(gl.int64)
        found = gl.load(table + column * where.table_stride, mask=j < tile.run.end, other=0)
    else:
        found = gl.load(where.cu_seqlens_k + tile.sequence)
    return found


@gluon.jit
@no_type_check
def _offsets(where, blocks, j, strides, TILE):
    """Return the offsets of keys, or values, from the first of their head."""
    if TILE.INT64_OFFSETS:
        blocks, j = blocks.to(gl.int64), j.to(gl.int64)
    return blocks * strides[0] + j % where.BLOCK_SIZE * strides[1] if TILE.PAGES else (blocks + j) * strides[0]


@gluon.jit
@no_type_check
def bring_rows(queries, keys, mask, room, programs, TILE):
    """Load the queries of each tile, and with the keys of a step the values of the step before."""
    # A thread has 8 elements, 16 bytes; 8 threads have a row of 64 elements.
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    tiles = gl.program_id(0) * 0  # tiles loaded before this one: 0, in a form that a loop may change
    items = gl.program_id(0) * 0  # slots of keys and values filled before, of all tiles
    for program in range(gl.program_id(0), programs, gl.num_programs(0)):
        tile = find_tile(program, programs, queries, mask, TILE)
        if tile.first_row < tile.num_rows:
            slot = tiles % SLOTS
            mbarrier.wait(room.no_queries.index(slot), parity(tiles) ^ 1)
            _copy_queries(queries, tile, room, slot, LAYOUT)
            tiles += 1
            key_head = keys.key + tile.kv_head.to(gl.int64) * keys.key_strides[-2]
            value_head = keys.value + tile.kv_head.to(gl.int64) * keys.value_strides[-2]
            j = tile.run.begin + gl.arange(0, TILE.KEYS, layout=gl.SliceLayout(1, LAYOUT))
            blocks = _read_table(keys.where, tile, j, TILE.PAGES)
            value_at = _offsets(keys.where, blocks, j, keys.value_strides, TILE)
            is_value = j < 0  # none: the first step has no step before it
            for step in range(tile.steps + 1):
                slot = items % SLOTS
                is_key = j < tile.run.end
                key_at = _offsets(keys.where, blocks, j, keys.key_strides, TILE)
                next_at = key_at
                if not TILE.SAME_OFFSETS:
                    next_at = _offsets(keys.where, blocks, j, keys.value_strides, TILE)
                j += TILE.KEYS
                blocks = _read_table(keys.where, tile, j, TILE.PAGES)
                mbarrier.wait(room.empty.index(slot), parity(items) ^ 1)
                if step < tile.steps:
                    _copy(room.key.index(slot), key_head, key_at, is_key, LAYOUT)
                if step > 0:
                    _copy(room.value.index(slot), value_head, value_at, is_value, LAYOUT)
                async_copy.mbarrier_arrive(room.full.index(slot), increment_count=False)
                items += 1
                value_at = next_at
                is_value = is_key
    async_copy.wait_group(0)  # a warp may not end while its copies are under way


@gluon.jit
@no_type_check
def bring_tiles(queries, keys, mask, room, programs, key_tiles, value_tiles, TILE):
    """Load as `bring_rows` does, keys and values by whole tiles."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    KEY_BYTES: gl.constexpr = TILE.KEYS * room.key.shape[2] * 2  # an element has two bytes
    VALUE_BYTES: gl.constexpr = TILE.KEYS * room.value.shape[2] * 2
    tiles = gl.program_id(0) * 0
    items = gl.program_id(0) * 0
    for program in range(gl.program_id(0), programs, gl.num_programs(0)):
        tile = find_tile(program, programs, queries, mask, TILE)
        if tile.first_row < tile.num_rows:
            slot = tiles % SLOTS
            mbarrier.wait(room.no_queries.index(slot), parity(tiles) ^ 1)
            _copy_queries(queries, tile, room, slot, LAYOUT)
            tiles += 1
            key_column = tile.kv_head * keys.key_strides[-2]  # see `heads_as_columns`
            value_column = tile.kv_head * keys.value_strides[-2]
            values_at = tile.run.begin * 0  # rows of the values of the step before
            for step in range(tile.steps + 1):
                slot = items % SLOTS
                j = tile.run.begin + step * TILE.KEYS
                block = _read_table(keys.where, tile, j, TILE.PAGES)
                keys_at = block + j
                next_at = keys_at
                if TILE.PAGES:
                    keys_at = block * TILE.KEY_ROWS + j % keys.where.BLOCK_SIZE
                    next_at = block * TILE.VALUE_ROWS + j % keys.where.BLOCK_SIZE
                mbarrier.wait(room.empty.index(slot), parity(items) ^ 1)
                full = room.full.index(slot)
                has_keys = step < tile.steps
                has_values = step > 0
                mbarrier.expect(full, KEY_BYTES + VALUE_BYTES, has_keys & has_values)
                mbarrier.expect(full, KEY_BYTES, step == 0)
                mbarrier.expect(full, VALUE_BYTES, step == tile.steps)
                # Each call is made by one thread, which the compiler elects.
                tma.async_copy_global_to_shared(key_tiles, [keys_at, key_column], full, room.key.index(slot), has_keys)
                tma.async_copy_global_to_shared(
                    value_tiles, [values_at, value_column], full, room.value.index(slot), has_values
                )
                items += 1
                values_at = next_at
    async_copy.wait_group(0)


@gluon.jit
@no_type_check
def bring(queries, keys, mask, room, programs, key_tiles, value_tiles, TILE):
    """Load for the consumers, by whole tiles or by rows."""
    if TILE.IN_BULK:
        bring_tiles(queries, keys, mask, room, programs, key_tiles, value_tiles, TILE)
    else:
        bring_rows(queries, keys, mask, room, programs, TILE)


@gluon.jit
@no_type_check
def clear_rows(values, first):
    """Write 0 into the rows of a tile in shared memory from a first one on; a consumer calls it before it multiplies.

    Both consumers do so, each for itself: what they write is the same.
    """
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0])
    SIZE: gl.constexpr = values.shape[0]
    WORDS: gl.constexpr = values.shape[1] // 2
    # Two elements are one word: half as many loads and selections.
    words = values._reinterpret(gl.int32, [SIZE, WORDS], gl.NVMMASharedLayout(128, 32, 2))
    for start in gl.static_range(0, SIZE, CLEARED):
        if start + CLEARED > first:
            part = words.slice(start, CLEARED, 0)
            rows = start + gl.arange(0, CLEARED, layout=gl.SliceLayout(1, LAYOUT))
            part.store(gl.where((rows < first)[:, None], part.load(LAYOUT), 0))
    fence_async_shared()
    tl.debug_barrier()
