"""Arguments of the kernels of layers with a state, as NamedTuples with the names of `refattn.recurrent`.

tokens    query, key and value of each row
gates     how much of a state a token keeps, and how much of itself it writes
states    the pool
tables    the rows of each sequence, and the slots of its states: `refattn.states.StatePlan`
"""

from typing import Any, NamedTuple, no_type_check

import triton
import triton.language as tl

from refattn.states import StatePlan

CHANGING = (  # numbers, and tables: those of a part of a step begin anywhere in those of the step
    *("num_seqs", "num_tokens", "table_stride", "column_stride", "checkpoint_stride", "checkpoint_column_stride"),
    *("cu_seqlens_q", "seq_lens", "state_indices", "has_initial_state", "num_accepted", "checkpoints"),
    *("cursors", "flush", "targets"),  # tables of rings
)


class Tokens(NamedTuple):
    """The query rows of all sequences.

    Attributes:
        query: [t, h, dk].
        key: [t, h, dk].
        value: [t, hv, dv].
        query_strides: of tokens, heads and elements.
        key_strides: the same of keys.
        value_strides: the same of values.
        GROUP: value heads that share a query and a key, hv // h.
        DK: elements of a key.
        DV: elements of a value.
        PAD_K: elements of a key in a tile.
    """

    query: Any
    key: Any
    value: Any
    query_strides: Any
    key_strides: Any
    value_strides: Any
    GROUP: Any
    DK: Any
    DV: Any
    PAD_K: Any


class Gates(NamedTuple):
    """How much of a state a token keeps, and how much of itself it writes.

    Attributes:
        log_decay: [t, hv], or [t, hv, dk].
        beta: [t, hv].
        log_decay_strides: of tokens and heads, and of channels.
        beta_strides: of tokens and heads.
        PER_CHANNEL: whether each key channel has a decay of its own.
        DELTA: whether a token writes only what the state does not yet return for its key.
    """

    log_decay: Any
    beta: Any
    log_decay_strides: Any
    beta_strides: Any
    PER_CHANNEL: Any
    DELTA: Any


class States(NamedTuple):
    """The pool of states [n, hv, dv, dk], or of the last inputs of a convolution [n, w, c]."""

    pool: Any
    strides: Any


class Tables(NamedTuple):
    """The sequences of a step, and the slots of their states; see `refattn.states.StatePlan` for each table.

    Attributes:
        cu_seqlens_q: [b+1], where the rows of each sequence begin.
        seq_lens: [b].
        state_indices: [b], or [b, c] with a slot per draft.
        has_initial_state: [b].
        num_accepted: [b], or None.
        checkpoints: [b, m], or None.
        table_stride: of the sequences in `state_indices`.
        column_stride: of its columns, 0 without drafts.
        has_stride: of `has_initial_state`.
        accepted_stride: of `num_accepted`.
        checkpoint_stride: of the sequences in `checkpoints`.
        checkpoint_column_stride: of its columns.
        num_seqs: b.
        num_tokens: t, padding included.
        PER_DRAFT: whether each draft has a slot.
        BLOCK_SIZE: tokens in a block, 0 without checkpoints.
    """

    cu_seqlens_q: Any
    seq_lens: Any
    state_indices: Any
    has_initial_state: Any
    num_accepted: Any
    checkpoints: Any
    table_stride: Any
    column_stride: Any
    has_stride: Any
    accepted_stride: Any
    checkpoint_stride: Any
    checkpoint_column_stride: Any
    num_seqs: Any
    num_tokens: Any
    PER_DRAFT: Any
    BLOCK_SIZE: Any


class Sequence(NamedTuple):
    """The sequence of a program.

    Attributes:
        number: index of the sequence.
        first_row: its first query row.
        length: its new tokens.
        position: the position of the first new token.
        slot: the first slot that its state is written to; negative if there is nothing to do.
        start: the slot that its state is read from; negative if it starts from zeros.
    """

    number: Any
    first_row: Any
    length: Any
    position: Any
    slot: Any
    start: Any


class Part(NamedTuple):
    """What a program that goes token by token computes: some values of one head of one sequence.

    Attributes:
        sequence: the number of the sequence.
        head: the value head.
        key_head: that of its queries and keys.
        at_v: the elements of a value.
        at_k: those of a key, all of them.
        in_v: which of `at_v` are there.
        in_k: which of `at_k` are there.
        is_first: whether it has the first values of the head.
    """

    sequence: Any
    head: Any
    key_head: Any
    at_v: Any
    at_k: Any
    in_v: Any
    in_k: Any
    is_first: Any


def tables_of(plan: StatePlan, num_tokens: int) -> Tables:
    """Return the tables of a plan as a kernel takes them."""
    indices, accepted, checkpoints = plan.state_indices, plan.num_accepted, plan.checkpoint_indices
    return Tables(
        cu_seqlens_q=plan.batch.cu_seqlens_q,
        seq_lens=plan.batch.seq_lens,
        state_indices=indices,
        has_initial_state=plan.has_initial_state,
        num_accepted=accepted,
        checkpoints=checkpoints,
        table_stride=indices.stride(0),
        column_stride=indices.stride(1) if plan.per_draft else 0,
        has_stride=plan.has_initial_state.stride(0),
        accepted_stride=0 if accepted is None else accepted.stride(0),
        checkpoint_stride=0 if checkpoints is None else checkpoints.stride(0),
        checkpoint_column_stride=0 if checkpoints is None else checkpoints.stride(1),
        num_seqs=plan.batch.num_seqs,
        num_tokens=num_tokens,
        PER_DRAFT=tl.constexpr(plan.per_draft),
        BLOCK_SIZE=tl.constexpr(plan.block_size or 0),
    )


# Triton's interpreter finds a function only if it is defined above its caller.


@triton.jit
@no_type_check
def find_sequence(tables, number):
    """Return a sequence; there is nothing to do for padding, without new tokens, or past the last sequence.

    The entries of such a sequence may be anything: none is used as an index.
    """
    i = number.to(tl.int64)
    is_sequence = i < tables.num_seqs
    first_row = tl.load(tables.cu_seqlens_q + i)
    length = tl.load(tables.cu_seqlens_q + i + 1, is_sequence, tables.num_tokens) - first_row
    position = tl.maximum(tl.load(tables.seq_lens + i, is_sequence, 0) - length, 0)
    row = tables.state_indices + i * tables.table_stride
    slot = tl.load(row, is_sequence, -1)  # without waiting for the length
    slot = tl.where(length > 0, slot, -1)
    start = slot
    if tables.num_accepted is not None:
        accepted = tl.load(tables.num_accepted + i * tables.accepted_stride, slot >= 0, 1)
        start = tl.load(row + (accepted - 1).to(tl.int64) * tables.column_stride, slot >= 0, -1)
    has_state = tl.load(tables.has_initial_state + i * tables.has_stride, is_sequence, 0) != 0
    slot = tl.where(has_state & (start < 0), -1, slot)
    start = tl.where(has_state, start, -1)
    return Sequence(number, first_row.to(tl.int64), length, position, slot.to(tl.int64), start.to(tl.int64))


@triton.jit
@no_type_check
def draft_slot(tables, sequence, token):
    """Return the slot of the state after a draft."""
    row = tables.state_indices + sequence.number.to(tl.int64) * tables.table_stride
    return tl.load(row + tl.cast(token, tl.int64) * tables.column_stride).to(tl.int64)


@triton.jit
@no_type_check
def checkpoint_slot(tables, sequence, end):
    """Return the slot of the state after `end` tokens of a sequence, where a block ends."""
    row = tables.checkpoints + sequence.number.to(tl.int64) * tables.checkpoint_stride
    column = (end // tables.BLOCK_SIZE - 1).to(tl.int64)
    return tl.load(row + column * tables.checkpoint_column_stride).to(tl.int64)


@triton.jit
@no_type_check
def find_part(sizes, NUM_HEADS: tl.constexpr, BLOCK_V: tl.constexpr):
    """Return the part of a program; `sizes` has GROUP, DK, DV and PAD_K."""
    PARTS: tl.constexpr = (sizes.DV + BLOCK_V - 1) // BLOCK_V
    part = tl.program_id(0) % PARTS
    head = tl.program_id(0) // PARTS % NUM_HEADS
    key_head, head = (head // sizes.GROUP).to(tl.int64), head.to(tl.int64)
    at_v = (part * BLOCK_V + tl.arange(0, BLOCK_V)).to(tl.int64)
    at_k = tl.arange(0, sizes.PAD_K).to(tl.int64)
    sequence = tl.program_id(0) // (PARTS * NUM_HEADS)
    return Part(sequence, head, key_head, at_v, at_k, at_v < sizes.DV, at_k < sizes.DK, part == 0)


@triton.jit
@no_type_check
def states_of(states, part):
    """Return where the elements of a part are in the first state of the pool."""
    of_states = states.pool + part.head * states.strides[1]
    return of_states + part.at_v[:, None] * states.strides[2] + part.at_k[None, :] * states.strides[3]


@triton.jit
@no_type_check
def store_zeros(out, out_strides, of_out, tables, sequence, part, BLOCK_V: tl.constexpr):
    """Write zeros to the rows of a padding sequence; the last one has those past the end, too."""
    first_zero = tl.where(sequence.slot < 0, 0, sequence.length)
    is_last = sequence.number + 1 >= tables.num_seqs
    last_zero = tl.where(is_last, tables.num_tokens - sequence.first_row, sequence.length)
    for token in range(first_zero, last_zero):
        at_row = (sequence.first_row + token) * out_strides[0]
        tl.store(of_out + at_row, tl.zeros([BLOCK_V], out.dtype.element_ty), part.in_v)


@triton.jit
@no_type_check
def load_row(rows, strides, row, head, at, in_row):
    """Load elements of one token and head."""
    of_row = rows + row * strides[0] + head * strides[1]
    return tl.load(of_row + at * strides[2], in_row, 0.0).to(tl.float32)


@triton.jit
@no_type_check
def load_gate(gate, strides, row, head):
    """Load the gate of one token and head."""
    return tl.load(gate + row * strides[0] + head * strides[1]).to(tl.float32)


@triton.jit
@no_type_check
def load_decay(gates, row, part):
    """Load the decay of a token: one for the head, or a row with one per key channel."""
    if gates.PER_CHANNEL:
        log = load_row(gates.log_decay, gates.log_decay_strides, row, part.head, part.at_k, part.in_k)
        decay = tl.exp(log)[None, :]
    else:
        decay = tl.exp(load_gate(gates.log_decay, gates.log_decay_strides, row, part.head))
    return decay


@triton.jit
@no_type_check
def fold_token(state, tokens, gates, row, part, scale):
    """Return a state after one token, the row that the token wrote into it, and its output."""
    k = load_row(tokens.key, tokens.key_strides, row, part.key_head, part.at_k, part.in_k)
    q = load_row(tokens.query, tokens.query_strides, row, part.key_head, part.at_k, part.in_k) * scale
    v = load_row(tokens.value, tokens.value_strides, row, part.head, part.at_v, part.in_v)
    state *= load_decay(gates, row, part)
    if gates.DELTA:
        v -= tl.sum(state * k[None, :], 1)
    v *= load_gate(gates.beta, gates.beta_strides, row, part.head)
    state = tl.fma(v[:, None], k[None, :], state)  # left to the compiler, either product may be the one that is rounded
    return state, v, tl.sum(state * q[None, :], 1)
