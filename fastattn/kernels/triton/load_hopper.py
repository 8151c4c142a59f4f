"""What `prompts_hopper` and `differential_hopper` load: the tiles of a persistent program, and their producer.

A producer warpgroup copies the queries of a tile, and step by step its keys and values, into slots of shared memory. It
waits until a slot is empty, and a barrier tells the consumers that it is full; keys and values have slots of their own.
Steps go from the last keys of a tile to the first. Keys and values come in two ways:

    bring_tiles    one thread starts a copy of a whole tile (TMA); the barrier counts its bytes
    bring_rows     each thread copies 16 bytes at a time (`cp.async`); the barrier counts threads

The first takes rows, and blocks that hold whole steps; the second takes the rest: smaller pages, windows over pages,
which may begin within a block, and tensors that have no map. Queries come by `cp.async` in both. A tile of TMA may end
past the keys of its sequence, where memory may be NaN: `clear_rows` is for the values of the last step.

A panel is 64 elements of a row: as many are contiguous in shared memory. The panels of a row lie side by side in
memory, or apart, as those of a pair of heads do (`Room`). A slot is one place in shared memory, whose sizes are powers
of two: for rows of 192 elements it is three places, of a panel each.

A program begins with the tile of its own number, and draws each further one from a counter in memory (`draw`): who is
done first takes the next. The producer draws, and leaves the number beside the queries for the consumers. The last
program to end sets the counter to 0 again, for the next launch.

Source: Shah et al. 2024, "FlashAttention-3" (3.1); the PTX manual, "cp.async.bulk.tensor" and "cp.async".
"""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, no_type_check

import torch
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, fence_async_shared, mbarrier, tma

from fastattn.kernels.triton.hopper import PANEL, copy_rows
from fastattn.kernels.triton.launch import Launch
from fastattn.kernels.triton.masks import Run, all_visible_in_window, visible_keys
from fastattn.kernels.triton.queries import find_rows

SLOTS = tl.constexpr(2)  # for tiles of queries, for keys, and for values
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


class Seen(NamedTuple):
    """The keys that each row of a consumer warpgroup sees, an interval, and the steps that need no mask.

    Attributes:
        first: [rows], the first key that each row sees, counted from the first key of the first step; as steps go from
            the last keys to the first, below 0 for keys of other steps.
        last: [rows], the last key that each row sees, also counted from the first key of the first step.
        plain_from: the first step of those that all rows of the tile see.
        plain_to: the step after the last of those.
        LEFT: whether a row may see no keys before its first one.
    """

    first: Any
    last: Any
    plain_from: Any
    plain_to: Any
    LEFT: Any


class Room(NamedTuple):
    """Shared memory, and the barriers of its slots.

    Attributes:
        query: [slots * parts * places, rows, d / places]; a tile has a part for each consumer, or one for both.
        key: [slots * places, keys, d / places].
        value: [slots, keys, dv].
        number: [slots, 1], the number of each tile of queries.
        has_queries: barriers of query tiles that are loaded.
        no_queries: barriers of query tiles that are consumed.
        has_keys: barriers of slots of keys that are loaded.
        no_keys: barriers of slots of keys that are consumed.
        has_values: barriers of slots of values that are loaded.
        no_values: barriers of slots of values that are consumed.
        IN_BULK: whether keys and values come by whole tiles; else consumers need a fence to see them.
        query_apart: how far panels of a query row are apart in memory.
        key_apart: the same, of a key and of a value.
        rows_apart: the same, in rows of their tensor map; read where a panel is a tile of its own.
        columns_apart: the same, in columns.
        value_row: the row of the map of values that has the first of them.
    """

    query: Any
    key: Any
    value: Any
    number: Any
    has_queries: Any
    no_queries: Any
    has_keys: Any
    no_keys: Any
    has_values: Any
    no_values: Any
    IN_BULK: Any
    query_apart: Any = PANEL.value
    key_apart: Any = PANEL.value
    rows_apart: Any = 0
    columns_apart: Any = PANEL.value
    value_row: Any = 0


_counters: dict[tuple[torch.device, int], Tensor] = {}


def counters_of(device: torch.device) -> Tensor:
    """Return two counters that are 0, [2] in int32: of tiles that are drawn, and of programs that have ended.

    Launches on one stream run one after the other, and each leaves zeros, so all share the counters of their stream. A
    launch that is captured into a CUDA graph may run on any, beside others: it has its own, which the graph sets to 0.
    """
    if device.type != "cuda" or torch.cuda.is_current_stream_capturing():
        return torch.zeros(2, dtype=torch.int32, device=device)
    place = device, torch._C._cuda_getCurrentRawStream(device.index)
    found = _counters.get(place)
    if found is None:
        found = _counters.setdefault(place, torch.zeros(2, dtype=torch.int32, device=device))
    return found


class CountedLaunch(Launch):
    """A launch of a kernel whose argument `counters` is `counters_of` the stream.

    Its arguments are those of `Launch`; neither `changing` nor the tensors of `replay` have the counters, and the first
    of each says on which device the launch is.
    """

    def __init__(
        self, kernel: Any, grid: tuple[int, ...], changing: Mapping[str, Tensor | float | None], *constant: Any
    ) -> None:
        super().__init__(kernel, grid, {**changing, "counters": _counters_beside(changing.values())}, *constant)

    def replay(self, *tensors: Tensor | float | None) -> None:
        """Launch on the current stream with other tensors."""
        super().replay(*tensors, _counters_beside(tensors))


def _counters_beside(tensors: Iterable[Tensor | float | None]) -> Tensor:
    query = next(iter(tensors))
    assert isinstance(query, Tensor)
    return counters_of(query.device)


@gluon.jit
@no_type_check
def parity(count, NUMBER: gl.constexpr = SLOTS):
    """Return the parity of the round in which one of some slots is filled, after `count` others were.

    A wait names a round by it. Who fills a slot waits for the round before, `parity(count) ^ 1`. The first such wait is
    over at once: slots are empty then.
    """
    return count // NUMBER & 1


@gluon.jit
@no_type_check
def places_of(shared, slot, PLACES: gl.constexpr):
    """Return the places of a slot in shared memory: one or three, see the module."""
    if PLACES == 1:
        return (shared.index(slot),)
    else:
        return shared.index(slot * 3), shared.index(slot * 3 + 1), shared.index(slot * 3 + 2)


@gluon.jit
@no_type_check
def barrier_of(tiles, WHO: gl.constexpr, QUERY_SLOTS: gl.constexpr):
    """Return the number of the barriers of a tile of queries: its slot; with one slot those of each part."""
    return WHO if QUERY_SLOTS == 1 else tiles % QUERY_SLOTS


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
def find_seen(tile, queries, mask, first, LAYOUT: gl.constexpr, TILE):
    """Return the keys that the rows of one consumer see, from row `first` of the tile on; step 0 has the last keys."""
    rows = tile.first_row + first + gl.arange(0, TILE.OWN_ROWS, layout=LAYOUT)
    positions = tile.context + rows // queries.GROUP
    first_seen, last_seen = positions * 0, positions * 0 + (tile.run.end - 1)
    if mask.LEFT:
        first_seen = positions - gl.minimum(mask.left, positions)
    if mask.RIGHT:
        last_seen = positions + gl.minimum(mask.right, tile.run.end - 1 - positions)
    all_from, all_to = all_visible_in_window(mask, tile, tile.run, tile.run)
    # The first step is always masked, as are all whose end some row does not see, and all whose begin one does not.
    plain_from = gl.maximum(tile.steps - gl.maximum(all_to - tile.run.begin, 0) // TILE.KEYS, 1)
    plain_from = gl.minimum(plain_from, tile.steps)
    plain_to = tile.steps - (gl.maximum(all_from - tile.run.begin, 0) + TILE.KEYS - 1) // TILE.KEYS
    plain_to = gl.maximum(plain_to, plain_from)
    begin = tile.run.begin + (tile.steps - 1) * TILE.KEYS
    return Seen(first_seen - begin, last_seen - begin, plain_from, plain_to, mask.LEFT)


@gluon.jit
@no_type_check
def _copy_places(shared, slot, head, offsets, is_row, apart, PLACES: gl.constexpr, LAYOUT: gl.constexpr):
    """Start to copy rows into the places of a slot; their panels are `apart` elements apart."""
    places = places_of(shared, slot, PLACES)
    for i in gl.static_range(PLACES):
        copy_rows(places[i], head + i * apart, offsets, is_row, LAYOUT, apart)


@gluon.jit
@no_type_check
def _copy_queries(queries, tile, room, slot, part, TILE, LAYOUT: gl.constexpr):
    """Start to copy a part of a tile of queries."""
    head = queries.query + (tile.kv_head * queries.GROUP).to(gl.int64) * queries.strides[1]
    rows = tile.first_row + part * TILE.OWN_ROWS + gl.arange(0, TILE.OWN_ROWS, layout=gl.SliceLayout(1, LAYOUT))
    tokens = (tile.first_query + rows // queries.GROUP).to(gl.int64)
    offsets = tokens * queries.strides[0] + (rows % queries.GROUP).to(gl.int64) * queries.strides[1]
    slot = slot * (TILE.ROWS // TILE.OWN_ROWS) + part
    _copy_places(room.query, slot, head, offsets, rows < tile.num_rows, room.query_apart, TILE.PLACES, LAYOUT)


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
def draw(counter):
    """Start to add 1 to a counter; `drawn` waits for the number that was there."""
    LINE: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    nothing = gl.zeros([128], gl.int32, LINE)
    is_first = gl.arange(0, 128, layout=LINE) == 0  # one of the 128 threads draws
    return gl.atomic_add(counter + nothing, nothing + 1, mask=is_first, sem="relaxed")


@gluon.jit
@no_type_check
def drawn(ticket):
    """Return, to all threads, the number that one of them has drawn."""
    return gl.sum(gl.where(gl.arange(0, 128, layout=ticket.type.layout) == 0, ticket, 0), 0)


@gluon.jit
@no_type_check
def _next_tile(number, programs, queries, mask, counter, TILE):
    """Return the first number from this one on whose tile has rows, and the tile; any tile if there is none."""
    tile = find_tile(gl.minimum(number, programs - 1), programs, queries, mask, TILE)
    while (number < programs) & (tile.first_row >= tile.num_rows):
        number = gl.num_programs(0) + drawn(draw(counter))
        tile = find_tile(gl.minimum(number, programs - 1), programs, queries, mask, TILE)
    return number, tile


@gluon.jit
@no_type_check
def _bring_queries(queries, tile, number, programs, room, tiles, TILE, LAYOUT: gl.constexpr):
    """Start to copy the queries of a tile, and tell the consumers its number; with no tile left the number alone.

    With one slot a part is copied as soon as its own consumer has left it: the first is ahead of the second.
    """
    PARTS: gl.constexpr = TILE.ROWS // TILE.OWN_ROWS
    TOGETHER: gl.constexpr = 1 if TILE.QUERY_SLOTS == 1 else PARTS  # parts that share barriers
    for first in gl.static_range(0, PARTS, TOGETHER):
        at = barrier_of(tiles, first, TILE.QUERY_SLOTS)
        mbarrier.wait(room.no_queries.index(at), parity(tiles, TILE.QUERY_SLOTS) ^ 1)
        if number < programs:
            for part in gl.static_range(first, first + TOGETHER):
                _copy_queries(queries, tile, room, tiles % TILE.QUERY_SLOTS, part, TILE, LAYOUT)
            async_copy.mbarrier_arrive(room.has_queries.index(at), increment_count=False)
        else:
            async_copy.mbarrier_arrive(room.has_queries.index(at), increment_count=False)
        room.number.index(at).store(gl.zeros([1], gl.int32, gl.BlockedLayout([1], [32], [4], [0])) + number)
        tl.debug_barrier()
        mbarrier.arrive(room.has_queries.index(at))


@gluon.jit
@no_type_check
def read_number(room, tiles, WHO: gl.constexpr, TILE):
    """Wait for the queries of a tile, and return its number: how a consumer learns what the producer has drawn."""
    at = barrier_of(tiles, WHO, TILE.QUERY_SLOTS)
    mbarrier.wait(room.has_queries.index(at), parity(tiles, TILE.QUERY_SLOTS))
    return gl.sum(room.number.index(at).load(gl.BlockedLayout([1], [32], [4], [0])), 0)


@gluon.jit
@no_type_check
def _row_of_map(where, tile, step, ROWS_OF_BLOCK: gl.constexpr, TILE):
    """Return the row of a tensor map with which a step begins; steps are counted from the last."""
    j = tile.run.begin + (tile.steps - 1 - step) * TILE.KEYS
    at = _read_table(where, tile, j, TILE.PAGES)
    return at * ROWS_OF_BLOCK + j % where.BLOCK_SIZE if TILE.PAGES else at + j


@gluon.jit
@no_type_check
def _bring_tile(tiles, at, column, shared, item, full, empty, apart):
    """Start to copy keys, or values, into the slot of an item: one tile, or panels `apart` in the map, a tile each."""
    PLACES: gl.constexpr = shared.shape[0] // SLOTS
    SIZE: gl.constexpr = shared.shape[2]
    WIDTH: gl.constexpr = tiles.block_shape[1]
    BYTES: gl.constexpr = PLACES * shared.shape[1] * SIZE * 2  # an element has two bytes
    slot = item % SLOTS
    mbarrier.wait(empty.index(slot), parity(item) ^ 1)
    mbarrier.expect(full.index(slot), BYTES)
    places = places_of(shared, slot, PLACES)
    for i in gl.static_range(PLACES * SIZE // WIDTH):
        place = places[i * WIDTH // SIZE].slice(i * WIDTH % SIZE, WIDTH, 1)
        # The call is made by one thread, which the compiler elects.
        tma.async_copy_global_to_shared(tiles, [at + i * apart[0], column + i * apart[1]], full.index(slot), place)


@gluon.jit
@no_type_check
def bring_tiles(first, end, items, keys, tile, room, maps, TILE):
    """Load by whole tiles: the keys of some steps, each before the values of the step before it."""
    key_tiles, value_tiles = maps
    key_column = tile.kv_head * keys.key_strides[-2]  # see `heads_as_columns`
    value_column = tile.kv_head * keys.value_strides[-2]
    apart = room.rows_apart, room.columns_apart
    for step in range(first, end):
        item = items + step
        if step < tile.steps:
            at = _row_of_map(keys.where, tile, step, TILE.KEY_ROWS, TILE)
            _bring_tile(key_tiles, at, key_column, room.key, item, room.has_keys, room.no_keys, apart)
        if step > 0:
            at = _row_of_map(keys.where, tile, step - 1, TILE.VALUE_ROWS, TILE) + room.value_row
            _bring_tile(value_tiles, at, value_column, room.value, item - 1, room.has_values, room.no_values, apart)


@gluon.jit
@no_type_check
def bring_rows(items, keys, tile, room, TILE, LAYOUT: gl.constexpr):
    """Load by rows: the keys of all steps, each before the values of the step before it."""
    key_head = keys.key + tile.kv_head.to(gl.int64) * keys.key_strides[-2]
    value_head = keys.value + tile.kv_head.to(gl.int64) * keys.value_strides[-2]
    j = tile.run.begin + (tile.steps - 1) * TILE.KEYS + gl.arange(0, TILE.KEYS, layout=gl.SliceLayout(1, LAYOUT))
    blocks = _read_table(keys.where, tile, j, TILE.PAGES)
    value_at = _offsets(keys.where, blocks, j, keys.value_strides, TILE)
    is_value = j < 0  # none: the first step has no step before it
    for step in range(tile.steps + 1):
        is_key = j < tile.run.end
        key_at = _offsets(keys.where, blocks, j, keys.key_strides, TILE)
        next_at = key_at
        if not TILE.SAME_OFFSETS:
            next_at = _offsets(keys.where, blocks, j, keys.value_strides, TILE)
        if step < tile.steps:
            j -= TILE.KEYS
            blocks = _read_table(keys.where, tile, gl.maximum(j, 0), TILE.PAGES)
            slot = (items + step) % SLOTS
            mbarrier.wait(room.no_keys.index(slot), parity(items + step) ^ 1)
            _copy_places(room.key, slot, key_head, key_at, is_key, room.key_apart, TILE.PLACES, LAYOUT)
            async_copy.mbarrier_arrive(room.has_keys.index(slot), increment_count=False)
        if step > 0:
            slot = (items + step - 1) % SLOTS
            mbarrier.wait(room.no_values.index(slot), parity(items + step - 1) ^ 1)
            copy_rows(room.value.index(slot), value_head, value_at, is_value, LAYOUT, room.key_apart)
            async_copy.mbarrier_arrive(room.has_values.index(slot), increment_count=False)
        value_at = next_at
        is_value = is_key


@gluon.jit
@no_type_check
def bring(queries, keys, mask, room, programs, maps, counters, TILE):
    """Draw tiles, and load for the consumers; the queries of the next tile come amid the steps of this one.

    With one slot for queries they come after all steps, and between them and those the first keys of the next tile.
    """
    # A thread has 8 elements, 16 bytes; 8 threads have a row of 64 elements.
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    KEYS_FIRST: gl.constexpr = TILE.IN_BULK and TILE.QUERY_SLOTS == 1
    tiles = gl.program_id(0) * 0  # tiles loaded before this one: 0, in a form that a loop may change
    items = gl.program_id(0) * 0  # steps loaded before, of all tiles
    number, tile = _next_tile(gl.program_id(0), programs, queries, mask, counters, TILE)
    if KEYS_FIRST:
        bring_tiles(0, gl.minimum(gl.maximum(programs - number, 0), 1), items, keys, tile, room, maps, TILE)
    _bring_queries(queries, tile, number, programs, room, tiles, TILE, LAYOUT)
    while number < programs:
        ticket = draw(counters)  # its number is needed only after some steps
        if KEYS_FIRST:
            bring_tiles(1, tile.steps + 1, items, keys, tile, room, maps, TILE)
        elif TILE.IN_BULK:
            some = gl.minimum(tile.steps + 1, 2)
            bring_tiles(0, some, items, keys, tile, room, maps, TILE)
        else:
            bring_rows(items, keys, tile, room, TILE, LAYOUT)
        number, next_tile = _next_tile(gl.num_programs(0) + drawn(ticket), programs, queries, mask, counters, TILE)
        tiles += 1
        if KEYS_FIRST:
            first = gl.minimum(gl.maximum(programs - number, 0), 1)
            bring_tiles(0, first, items + tile.steps, keys, next_tile, room, maps, TILE)
        _bring_queries(queries, next_tile, number, programs, room, tiles, TILE, LAYOUT)
        if TILE.IN_BULK and not KEYS_FIRST:
            bring_tiles(some, tile.steps + 1, items, keys, tile, room, maps, TILE)
        items += tile.steps
        tile = next_tile
    if drawn(draw(counters + 1)) == gl.num_programs(0) - 1:  # the last program: no other draws any more
        gl.store(counters, 0)
        gl.store(counters + 1, 0)
    async_copy.commit_group()
    async_copy.wait_group(0)  # a warp may not end while its copies are under way


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
