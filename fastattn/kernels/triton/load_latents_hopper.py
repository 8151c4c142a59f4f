"""What `fastattn.kernels.triton.latents_hopper` loads: the rows of a program, and its keys, by the producer.

Source: the PTX manual, "cp.async" and "mbarrier".
"""

from typing import Any, NamedTuple, no_type_check

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, fence_async_shared, mbarrier

from fastattn.kernels.triton.hopper import leave
from fastattn.kernels.triton.masks import Run
from fastattn.kernels.triton.merge import SEQS_AT_ONCE
from fastattn.kernels.triton.quantized import power_of_two
from fastattn.kernels.triton.queries import find_rows


class Tile(NamedTuple):
    """Rows of one sequence.

    Attributes:
        sequence: the sequence of the rows.
        first_row: the first row, counted in the sequence and its heads.
        num_rows: rows of the sequence.
        first_query: the first query row of the sequence in the batch.
        first_place: the place of the sequence's first row in the outputs of this program's split.
    """

    sequence: Any
    first_row: Any
    num_rows: Any
    first_query: Any
    first_place: Any


class Room(NamedTuple):
    """Shared memory, and the barriers of its slots.

    Attributes:
        query: [1, rows, rank].
        rope_query: [1, rows, rope].
        key: [slots, keys, rank].
        rope_key: [slots, keys, rope].
        weights: [rows, keys], of one step.
        factor: [rows], what scores are multiplied by.
        last: [rows], the last key that each row sees.
        row_max: [consumers, rows], maxima of the last step of each consumer.
        row_sum: [consumers, rows], sums of the weights of each.
        full: barriers of slots that are loaded.
        empty: barriers of slots that are consumed.
        ready: by consumer, of its weights and maxima that are stored.
        read: by consumer, of its product with its own weights.
        summed: of the sums of both.
    """

    query: Any
    rope_query: Any
    key: Any
    rope_key: Any
    weights: Any
    factor: Any
    last: Any
    row_max: Any
    row_sum: Any
    full: Any
    empty: Any
    ready: Any
    read: Any
    summed: Any


# --- the rows of a program, and its keys ---


@gluon.jit
@no_type_check
def find_tile(queries, TILE):
    """Return the tile of this program."""
    sequence, first_row = find_rows(
        queries.cu_seqlens_q, gl.program_id(0), queries.num_seqs, queries.HEADS, TILE.ROWS, TILE.ONE_TILE
    )
    first_query = gl.load(queries.cu_seqlens_q + sequence)
    num_rows = (gl.load(queries.cu_seqlens_q + sequence + 1) - first_query) * queries.HEADS
    first_place = (gl.program_id(1).to(gl.int64) * queries.num_tokens + first_query) * queries.HEADS
    return Tile(sequence, first_row, num_rows, first_query, first_place)


@gluon.jit
@no_type_check
def _share_of_steps(queries, steps, TILE):
    """Return the ratio of `steps` to the steps of an average sequence."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
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
def find_run(queries, split, tile, context, TILE):
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
def load_queries(queries, keys, tile, TYPE: gl.constexpr, LAYOUT: gl.constexpr, TILE):
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
    pointers = query_rows[:, None] + (at * queries.strides[2])[None, :]
    rope_pointers = query_rows[:, None] + (at_rope * queries.strides[2])[None, :]
    power = gl.full([TILE.ROWS], 1.0, gl.float32, gl.SliceLayout(1, LAYOUT))
    if queries.query.dtype.element_ty != TYPE:
        # Loaded twice, in ways that differ, or the compiler would load once: registers have no room for all in float32.
        q = gl.abs(gl.load(pointers, mask=is_row, other=0.0, eviction_policy="evict_last").to(gl.float32))
        rope = gl.abs(gl.load(rope_pointers, mask=is_row, other=0.0, eviction_policy="evict_last").to(gl.float32))
        power = power_of_two(gl.maximum(gl.max(q, 1), gl.max(rope, 1)))
    q = gl.load(pointers, mask=is_row, other=0.0)
    rope = gl.load(rope_pointers, mask=is_row, other=0.0)
    if queries.query.dtype.element_ty != TYPE:
        q, rope = (q.to(gl.float32) / power[:, None]).to(TYPE), (rope.to(gl.float32) / power[:, None]).to(TYPE)
    return q, rope, power


# --- the producer: it loads keys ---


@gluon.jit
@no_type_check
def numbers_of_bytes(quantization, FORMAT: gl.constexpr):
    """Convert bytes that are fp8 to float16."""
    return quantization.to(gl.float8e4nv if FORMAT == "e4m3" else gl.float8e5, bitcast=True).to(gl.float16)


@gluon.jit
@no_type_check
def _read_table(where, table, j, run):
    """Return the blocks of keys; `table` is the row of their sequence."""
    return gl.load(table + (j // where.BLOCK_SIZE).to(gl.int64) * where.table_stride, mask=j < run.end, other=0)


@gluon.jit
@no_type_check
def bring(keys, table, room, run, steps, TILE):
    """Load keys into the slots as they become empty, zeros where there is no key.

    Unquantized latents bypass the registers. Quantized ones wait in registers for a slot, and are converted into it:
    loads of later keys could not be in flight meanwhile, as the fence waits for them. All latents of a step are one
    store, or one copy: between two, the compiler would have all warps of the producer meet.
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
            room.key.index(slot).store(numbers_of_bytes(loaded, TILE.FORMAT))
            room.rope_key.index(slot).store(numbers_of_bytes(loaded_rope, TILE.FORMAT))
        fence_async_shared()
        if TILE.FORMAT == "":
            leave(room.full.index(slot))
        else:  # `leave` arrives after copies of its thread; after what it has stored in another way, this one does
            mbarrier.arrive(room.full.index(slot))
