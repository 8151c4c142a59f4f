"""States from chunk to chunk on Hopper, warp-specialized: warpgroups fold the chunks, another loads them.

It is `fastattn.kernels.triton.chunks._chunks_kernel` for a decay per head, the delta rule and bfloat16. In that
kernel all warps load, multiply and wait in step, and the four products of a chunk depend on one another. Here a
producer warpgroup copies the next chunks into slots of shared memory, and each consumer warpgroup folds them into the
state of 64 values. Two consumers of a program share what is loaded, and one multiplies while the other computes:

    load     | chunk 3 -> slot 0                     | chunk 4 -> slot 1                     |
    values 0 | outputs, state, weights 1 | answers 2 | outputs, state, weights 2 | answers 3 |
             |                           | store 1   |                           | store 2   |
    values 1 |  store 0 | outputs, state, weights 1 | answers 2 | outputs, state, weights 2 | ..

The answers of a chunk, its product with the state before it, begin as soon as there is that state: what is left to do
for the outputs of the chunk before is done beside them.

A state lies transposed in registers, `[values, keys]`, so that it is the first operand of its products, rounded, as it
is, and so are the values that a chunk writes. Nothing but outputs goes back through shared memory.

The launch begins while the one before it ends: keys, queries and states do not depend on that one, and the first are
loaded before the wait for it.

Where few sequences leave SMs idle, a program has one consumer: two on one SM take longer for a chunk than on two SMs.

Triton does not let a kernel assign work to warps, so this one is written in Gluon, with explicit layouts and barriers.
Triton's interpreter does not run it; `twinattn.course.gluon` does.

Source: Yang et al. 2024, "Parallelizing Linear Transformers with the Delta Rule over Sequence Length"; Hopper's
    asynchronous products and barriers: the PTX manual, "wgmma" and "mbarrier".
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

from fastattn.kernels import device as devices
from fastattn.kernels.triton.hopper import copy_rows, is_there, leave
from fastattn.kernels.triton.states import CHANGING, checkpoint_slot, find_sequence

KEYS, VALUES, CHUNK = 128, 64, 64  # the sizes that the layouts are for: of a key, a consumer's values, and a chunk
SLOTS = 3  # chunks in shared memory: no more fit
# By consumers: registers of a consumer thread and of a producer thread.
REGISTERS = {1: (240, 96), 2: (232, 40)}


class Sizes(NamedTuple):
    """The constants of a launch.

    Attributes:
        CHUNK: tokens of a chunk.
        HEADS: value heads.
        KEYS: elements of a key.
        VALUES: values of a consumer.
        CONSUMERS: consumer warpgroups of a program.
        SLOTS: chunks in shared memory.
        REGISTERS: registers of a consumer thread, and of a producer thread.
    """

    CHUNK: Any
    HEADS: Any
    KEYS: Any
    VALUES: Any
    CONSUMERS: Any
    SLOTS: Any
    REGISTERS: Any


class Work(NamedTuple):
    """What a program does: the chunks of a sequence, for some values of one head.

    Attributes:
        sequence: the sequence.
        start: where its first chunk begins, counted from its first new token; below 0 if it began before.
        head: the value head.
        first_value: the first element of a value.
    """

    sequence: Any
    start: Any
    head: Any
    first_value: Any


class Output(NamedTuple):
    """The outputs of all sequences.

    Attributes:
        rows: [t, hv, dv].
        scale: by what the products of queries with a state are multiplied.
        TOKEN_STRIDE: of tokens; one by one, as Triton 3.6 loses a tuple of constants in a NamedTuple behind an `if`.
        head_stride: of heads.
        ELEMENT_STRIDE: of elements.
    """

    rows: Any
    scale: Any
    TOKEN_STRIDE: Any
    head_stride: Any
    ELEMENT_STRIDE: Any


class Room(NamedTuple):
    """Shared memory, and the barriers of its slots; what `Solved` has is named as there.

    Attributes:
        keys: [slots, chunk, keys].
        queries: [slots, chunk, keys].
        answered: [slots, chunk, keys].
        written: [slots, chunk, values], of all consumers; and then their outputs on the way to memory.
        weights: [slots, chunk, chunk].
        since: [slots, chunk], the decays since the start of the chunk.
        until: [slots, chunk], the decays up to its end.
        full: barriers of slots that are loaded.
        empty: barriers of slots that are consumed.
    """

    keys: Any
    queries: Any
    answered: Any
    written: Any
    weights: Any
    since: Any
    until: Any
    full: Any
    empty: Any


def takes(query: Tensor, value: Tensor, solved: Any, chunk: int) -> bool:
    """Return whether this kernel folds the chunks of a call."""
    return (
        is_there(query.device)
        and (query.shape[2], chunk) == (KEYS, CHUNK)
        and value.shape[2] % VALUES == 0
        and solved.answered is not None
        and solved.keys_until is None
        and query.dtype == value.dtype == solved.written.dtype
        and query.itemsize == 2
    )


def consumers_of(num_states: int, value: Tensor) -> int:
    """Return how many consumers a program has: two, unless more programs of one find an SM of their own."""
    parts = value.shape[2] // VALUES
    return 1 if parts % 2 or num_states * parts <= devices.num_sms(value.device) else 2


def sizes_of(num_heads: int, consumers: int) -> Sizes:
    """Return the constants of a launch."""
    given = CHUNK, num_heads, KEYS, VALUES, consumers, SLOTS, REGISTERS[consumers]
    return Sizes(*map(tl.constexpr, given))


@gluon.jit
@no_type_check
def _parity(count, TILE):
    """Return the parity of the round in which a slot is filled, after `count` others were."""
    return count // TILE.SLOTS & 1


@gluon.jit
@no_type_check
def _copy_decays(place, decays, row, is_token, LINE: gl.constexpr, TILE):
    """Start to copy a decay of each token; `row` is that of the chunk's first token."""
    at = gl.arange(0, TILE.CHUNK, layout=LINE)
    pointers = decays + row * 2 + at * (2 * TILE.HEADS)
    async_copy.async_copy_global_to_shared(place, pointers, mask=is_token)


@gluon.jit
@no_type_check
def _is_token(sequence, at):
    return (at >= 0) & (at < sequence.length)


@gluon.jit
@no_type_check
def _bring(tokens, solved, work, room, TILE):
    """Load the chunks of a sequence into the slots as they become empty."""
    sequence, start, head, first_value = work
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    LINE: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    of_keys = tokens.key + (head // tokens.GROUP) * tokens.key_strides[1]
    of_queries = tokens.query + (head // tokens.GROUP) * tokens.query_strides[1]
    at = gl.arange(0, TILE.CHUNK, layout=gl.SliceLayout(1, LAYOUT))
    in_line = gl.arange(0, TILE.CHUNK, layout=LINE)
    items = start * 0
    for first in range(start, sequence.length + TILE.CHUNK, TILE.CHUNK):  # and a chunk without tokens
        slot = items % TILE.SLOTS
        is_row = _is_token(sequence, first + at)
        in_chunk = _is_token(sequence, first + in_line)
        first_row = sequence.first_row + first
        own = first_row * TILE.HEADS + head
        of_own = at * TILE.HEADS
        mbarrier.wait(room.empty.index(slot), _parity(items, TILE) ^ 1)
        rows = at.to(gl.int64)
        at_keys, at_queries = first_row * tokens.key_strides[0], first_row * tokens.query_strides[0]
        copy_rows(room.keys.index(slot), of_keys + at_keys, rows * tokens.key_strides[0], is_row, LAYOUT)
        copy_rows(room.queries.index(slot), of_queries + at_queries, rows * tokens.query_strides[0], is_row, LAYOUT)
        if items == 0:
            tl.extra.cuda.gdc_wait()
        of_answered = solved.answered + own * solved.ROW_K
        copy_rows(room.answered.index(slot), of_answered, of_own * solved.ROW_K, is_row, LAYOUT)
        of_written = solved.written + own * solved.ROW_V + first_value
        copy_rows(room.written.index(slot), of_written, of_own * solved.ROW_V, is_row, LAYOUT)
        copy_rows(room.weights.index(slot), solved.weights + own * TILE.CHUNK, of_own * TILE.CHUNK, is_row, LAYOUT)
        _copy_decays(room.since.index(slot), solved.decays, own, in_chunk, LINE, TILE)
        _copy_decays(room.until.index(slot), solved.decays + 1, own, in_chunk, LINE, TILE)
        async_copy.mbarrier_arrive(room.full.index(slot), increment_count=False)
        items += 1
    async_copy.commit_group()
    async_copy.wait_group(0)  # a warp may not end while its copies are under way


@gluon.jit
@no_type_check
def _total_at(solved, sequence, first, head, TILE):
    """Load the decay of the chunk that begins at a token, which its last token has; 1 past the last chunk."""
    last_row = sequence.first_row + gl.minimum(first + TILE.CHUNK, sequence.length) - 1
    return gl.load(solved.decays + (last_row * TILE.HEADS + head) * 2, mask=first < sequence.length, other=1.0)


@gluon.jit
@no_type_check
def _store_rows(output, work, first, rows, place, TILE):
    """Store the outputs of a chunk, `rows [values, chunk]`, by way of a place in shared memory: 16 bytes per thread."""
    LINES: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    sequence = work.sequence
    place.permute((1, 0)).store(rows.to(output.rows.dtype.element_ty))
    rows = place.load(LINES)
    at = first + gl.arange(0, TILE.CHUNK, layout=gl.SliceLayout(1, LINES))
    at_v = work.first_value + gl.arange(0, TILE.VALUES, layout=gl.SliceLayout(0, LINES))
    of_rows = output.rows + work.head * output.head_stride + (sequence.first_row + at)[:, None] * output.TOKEN_STRIDE
    is_row = _is_token(sequence, at)[:, None] & (at_v >= 0)[None]
    gl.store(of_rows + at_v[None, :] * output.ELEMENT_STRIDE, rows, mask=is_row)


@gluon.jit
@no_type_check
def _await_chunk(room, items, TILE):
    """Wait until the slot of a chunk is loaded, by `cp.async`, which products see only past a fence."""
    mbarrier.wait(room.full.index(items % TILE.SLOTS), _parity(items, TILE))
    fence_async_shared()


@gluon.jit
@no_type_check
def _round(x, FINITE: gl.constexpr, dtype: gl.constexpr):
    """Round to 16 bits, two numbers at a time, and what is not finite to some finite number if asked.

    The compiler may not move it: operands that it computed between the instructions of a product would make each of
    these a product of its own, and a wait for the product before it would wait for most of them.
    """
    PAIR: gl.constexpr = "cvt.rn.bf16x2.f32 $0, $2, $1;" if dtype == gl.bfloat16 else "cvt.rn.f16x2.f32 $0, $2, $1;"
    KIND: gl.constexpr = "bf16x2" if dtype == gl.bfloat16 else "f16x2"
    LOW: gl.constexpr = "0xff7fff7f" if dtype == gl.bfloat16 else "0xfbfffbff"  # the lowest finite number, twice
    HIGH: gl.constexpr = "0x7f7f7f7f" if dtype == gl.bfloat16 else "0x7bff7bff"
    # The maximum of NaN and a number is the number.
    ABOVE: gl.constexpr = "mov.b32 bound, " + LOW + "; max." + KIND + " $0, $0, bound;"
    BELOW: gl.constexpr = "mov.b32 bound, " + HIGH + "; min." + KIND + " $0, $0, bound;"
    BOUNDS: gl.constexpr = " { .reg .b32 bound; " + ABOVE + " " + BELOW + " }" if FINITE else ""
    return gl.inline_asm_elementwise(PAIR + BOUNDS, "=r,r,r", [x], dtype=dtype.value, is_pure=False, pack=2)


@gluon.jit
@no_type_check
def _fold(solved, states, output, tables, work, room, WHO: gl.constexpr, TILE):
    """Fold the chunks that are loaded into the state of a consumer's values, and store its outputs."""
    RESULT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE.CHUNK, 16])  # [values, chunk]
    STATE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE.KEYS, 16])  # [values, keys]
    OPERAND: gl.constexpr = solved.written.dtype.element_ty
    sequence, start, head, first_value = work
    first_value += WHO * TILE.VALUES
    at_v = (first_value + gl.arange(0, TILE.VALUES, layout=gl.SliceLayout(1, STATE))).to(gl.int64)
    at_k = gl.arange(0, TILE.KEYS, layout=gl.SliceLayout(0, STATE)).to(gl.int64)
    of_states = states.pool + head * states.strides[1]
    of_states = of_states + (at_v[:, None] * states.strides[2] + at_k[None, :] * states.strides[3])
    has_start = (at_v >= 0)[:, None] & (at_k >= 0)[None, :] & (sequence.start >= 0)
    state = gl.load(of_states + sequence.start * states.strides[0], mask=has_start, other=0.0).to(gl.float32)
    nothing = gl.zeros([TILE.VALUES, TILE.CHUNK], gl.float32, RESULT)
    tl.extra.cuda.gdc_wait()
    total = _total_at(solved, sequence, start, head, TILE)
    items = start * 0
    _await_chunk(room, items, TILE)
    before = gl.convert_layout(_round(state, False, OPERAND), gl.DotOperandLayout(0, RESULT, 2))
    answers = warpgroup_mma(before, room.answered.index(0).permute((1, 0)), nothing, use_acc=False, is_async=True)
    answers, before = warpgroup_mma_wait(0, deps=[answers, before])
    for first in range(start, sequence.length, TILE.CHUNK):
        slot = items % TILE.SLOTS
        next_total = _total_at(solved, sequence, first + TILE.CHUNK, head, TILE)
        result = warpgroup_mma(before, room.queries.index(slot).permute((1, 0)), nothing, use_acc=False, is_async=True)
        place = room.written.index(slot).slice(WHO * TILE.VALUES, TILE.VALUES, 1)
        written = place.permute((1, 0)).load(RESULT)
        until = room.until.index(slot).load(gl.SliceLayout(0, RESULT))
        values = written.to(gl.float32) - answers
        kept = gl.convert_layout(_round(values * until[None, :], False, OPERAND), gl.DotOperandLayout(0, STATE, 2))
        state = warpgroup_mma(kept, room.keys.index(slot), state * total, is_async=True)
        # NaN is in all later rows of `values`: see `chunks._dot_with_earlier`.
        finite = gl.convert_layout(_round(values, True, OPERAND), gl.DotOperandLayout(0, RESULT, 2))
        since = room.since.index(slot).load(gl.SliceLayout(0, RESULT))
        result, before = warpgroup_mma_wait(1, deps=[result, before])
        result = result * since[None, :] + values * 0.0  # a product of 0 with NaN or infinity is NaN
        result = warpgroup_mma(finite, room.weights.index(slot).permute((1, 0)), result, is_async=True)
        items += 1
        _await_chunk(room, items, TILE)
        state, kept = warpgroup_mma_wait(1, deps=[state, kept])
        before = gl.convert_layout(_round(state, False, OPERAND), gl.DotOperandLayout(0, RESULT, 2))
        of_next = room.answered.index(items % TILE.SLOTS).permute((1, 0))
        answers = warpgroup_mma(before, of_next, nothing, use_acc=False, is_async=True)
        result, finite = warpgroup_mma_wait(1, deps=[result, finite])
        own = Work(sequence, start, head, first_value)
        _store_rows(output, own, first, result * output.scale, place, TILE)
        leave(room.empty.index(slot))
        answers, before = warpgroup_mma_wait(0, deps=[answers, before])
        if tables.BLOCK_SIZE:
            end = sequence.position + gl.minimum(first + TILE.CHUNK, sequence.length)
            if (end % tables.BLOCK_SIZE == 0) & (first + TILE.CHUNK <= sequence.length):
                kept_in = checkpoint_slot(tables, sequence, end)
                in_slot = (at_v >= 0)[:, None] & (at_k >= 0)[None, :] & (kept_in >= 0)
                gl.store(of_states + kept_in * states.strides[0], state.to(states.pool.dtype.element_ty), mask=in_slot)
        total = next_total
    gl.store(of_states + sequence.slot * states.strides[0], state.to(states.pool.dtype.element_ty))


@gluon.jit
@no_type_check
def _store_zeros(output, work, TILE):
    """Store the outputs of tokens that have no state: 0."""
    LINES: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    at_v = gl.arange(0, TILE.VALUES * TILE.CONSUMERS, layout=gl.SliceLayout(0, LINES))
    zeros = gl.zeros([TILE.CHUNK, TILE.VALUES * TILE.CONSUMERS], output.rows.dtype.element_ty, LINES)
    for first in range(0, work.sequence.length, TILE.CHUNK):
        at = first + gl.arange(0, TILE.CHUNK, layout=gl.SliceLayout(1, LINES))
        of_rows = (
            output.rows + work.head * output.head_stride + (work.sequence.first_row + at)[:, None] * output.TOKEN_STRIDE
        )
        mask = (at < work.sequence.length)[:, None] & (at_v >= 0)[None, :]
        gl.store(of_rows + (work.first_value + at_v)[None, :] * output.ELEMENT_STRIDE, zeros, mask=mask)


@gluon.jit(do_not_specialize=CHANGING)
@no_type_check
def _fold_kernel(tokens, states, output, tables, solved, TILE):
    """Go through the chunks of a sequence with some values of one head's state."""
    OPERAND: gl.constexpr = solved.written.dtype.element_ty
    SHARED: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    LINE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    BARRIERS: gl.constexpr = mbarrier.MBarrierLayout()
    SLOTS: gl.constexpr = TILE.SLOTS
    sequence = find_sequence(tables, gl.program_id(0))
    start = -(sequence.position % TILE.CHUNK)
    first_value = gl.program_id(2) * (TILE.VALUES * TILE.CONSUMERS)
    work = Work(sequence, start, gl.program_id(1).to(gl.int64), first_value)
    if sequence.slot < 0:
        _store_zeros(output, work, TILE)
        if gl.program_id(0) == 0:
            tl.extra.cuda.gdc_wait()  # this launch ends no earlier than the one before, though all are idle
        return
    room = Room(
        gl.allocate_shared_memory(OPERAND, [SLOTS, TILE.CHUNK, TILE.KEYS], SHARED),
        gl.allocate_shared_memory(OPERAND, [SLOTS, TILE.CHUNK, TILE.KEYS], SHARED),
        gl.allocate_shared_memory(OPERAND, [SLOTS, TILE.CHUNK, TILE.KEYS], SHARED),
        gl.allocate_shared_memory(OPERAND, [SLOTS, TILE.CHUNK, TILE.VALUES * TILE.CONSUMERS], SHARED),
        gl.allocate_shared_memory(OPERAND, [SLOTS, TILE.CHUNK, TILE.CHUNK], SHARED),
        gl.allocate_shared_memory(gl.float32, [SLOTS, TILE.CHUNK], LINE),
        gl.allocate_shared_memory(gl.float32, [SLOTS, TILE.CHUNK], LINE),
        gl.allocate_shared_memory(gl.int64, [SLOTS, 1], BARRIERS),
        gl.allocate_shared_memory(gl.int64, [SLOTS, 1], BARRIERS),
    )
    for slot in gl.static_range(SLOTS):
        mbarrier.init(room.full.index(slot), count=128)  # every producer thread
        mbarrier.init(room.empty.index(slot), count=128 * TILE.CONSUMERS)  # every consumer thread
    fence_async_shared()
    tl.debug_barrier()
    if TILE.CONSUMERS == 2:
        gl.warp_specialize(
            [
                (_fold, (solved, states, output, tables, work, room, 0, TILE)),
                (_fold, (solved, states, output, tables, work, room, 1, TILE)),
                (_bring, (tokens, solved, work, room, TILE)),
            ],
            [4, 4],
            [TILE.REGISTERS[0], TILE.REGISTERS[1]],
        )
    else:
        gl.warp_specialize(
            [
                (_fold, (solved, states, output, tables, work, room, 0, TILE)),
                (_bring, (tokens, solved, work, room, TILE)),
            ],
            [4],
            [TILE.REGISTERS[1]],
        )
