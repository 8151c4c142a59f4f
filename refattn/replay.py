"""Layers that keep a state, and replay their last inputs: a step reads the whole state, and seldom writes it.

`refattn.recurrent` reads and writes the state of a sequence in every step. But of one token a state only changes by a
decay and by one row under one key, which are small. So a slot keeps a checkpoint and a ring of the inputs since, and a
step rebuilds the state from both, without writing it back:

    state   <- checkpoint
    state   <- decay_j * state + written_j key_j^T        for each input j in the ring, the oldest first
    state   <- decay * state                              and the new token, as in `recurrent`
    written  = beta * (value - state @ key)
    state   <- state + written key^T
    out      = scale * state @ query

`written` is what the token wrote, so no other input has to be kept to write it again. Nothing is computed anew: the
rebuilt state goes through the operations of the plain step, in their order, and has its bits. When the ring is full,
the state is written to the checkpoint and the ring is empty, here with room for 4:

    step              1     2     3     4     5     6     7
    ring before       -     a     ab    abc   -     e     ef
    checkpoint        0     0     0     0     abcd  abcd  abcd
    is written        ring  ring  ring  all   ring  ring  ring

A **cursor** per slot says how many inputs are in its ring. It is the same for all layers, and moves once per step,
after the last one (`advance`). So drafts cost no states: all are pushed, and those that are accepted are kept by moving
the cursor past them. The others lie past it, where nothing is read, and the next step overwrites them.

The checkpoint moves (`_moves` has the rule):

    ring is full, or the plan asks (`flush`)    to the end of the step: a snapshot holds exactly these tokens
    a sequence begins                           to the end of its first step, as its slot holds the state of another
    drafts, and no room for them                to before the step, as they may be rejected

With room for one input it moves in every step, and this is `recurrent.attention`.

A step with `target_indices` moves checkpoints to other slots, and leaves those that it has read as they were. So a step
that fails can be computed again, and a state at the end of a block is kept while its sequence goes on: a checkpoint is
written once.

Source: "ReplaySSM" in SGLang (GDN, KDA), vLLM (Mamba-2) and TensorRT-LLM, 2026.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from einops import einsum, repeat
from jaxtyping import Bool, Float, Int32
from torch import Tensor

from refattn import allocation
from refattn.batch import Batch, check_batch
from refattn.modes import compute_dtype, without_autocast
from refattn.options import RecurrentOptions
from refattn.recurrent import _fade, _read, _step, _write
from refattn.rings import ReplayPlan, Ring, check_advance, check_flush, check_replay
from refattn.states import StatePlan

allocate = allocation.allocate_rings
allocate_cursors = allocation.allocate_cursors


def plan(
    batch: Batch,
    *,
    state_indices: Int32[Tensor, "b"],
    cursors: Int32[Tensor, "n"],
    ring_size: int,
    has_initial_state: Bool[Tensor, "b"] | None = None,
    flush: Bool[Tensor, "b"] | None = None,
    drafts: bool = False,
    target_indices: Int32[Tensor, "b"] | None = None,
) -> ReplayPlan:
    """Plan a step of all layers that replay their inputs.

    Args:
        batch: the lengths; it needs no block table.
        state_indices: the slot of each sequence; negative for padding.
        cursors: how many inputs the ring of each slot holds; `advance` moves them after the step.
        ring_size: the inputs that a ring has room for.
        has_initial_state: which sequences have a state; others start from zeros and an empty ring. Those with a
            context, if None.
        flush: the sequences whose checkpoint moves to the end of this step; if None, those whose ring is full.
        drafts: the new tokens may be rejected: none gets into a checkpoint in this step.
        target_indices: where checkpoints that move are written; to their own slots if None, or where it is negative.

    Returns:
        A plan for every layer of this step; `ReplayPlan` says more of each table.

    Raises:
        ValueError: naming the argument that does not fit; the contents are checked on a CPU.
    """
    check_batch(batch)
    if has_initial_state is None:
        has_initial_state = batch.context_lens > 0
    slots = StatePlan(batch, state_indices, has_initial_state)
    return ReplayPlan(slots, cursors, ring_size, flush, drafts, target_indices)


@without_autocast
def attention(
    query: Float[Tensor, "t h dk"],
    key: Float[Tensor, "t h dk"],
    value: Float[Tensor, "t hv dv"],
    log_decay: Float[Tensor, "t hv"] | Float[Tensor, "t hv dk"],
    beta: Float[Tensor, "t hv"],
    states: Float[Tensor, "n hv dv dk"],
    ring: Ring,
    plan: ReplayPlan,
    options: RecurrentOptions = RecurrentOptions(),
    *,
    out: Float[Tensor, "t hv dv"] | None = None,
) -> Float[Tensor, "t hv dv"]:
    """Rebuild the state of each sequence, fold its new tokens in, one by one, and read it after each.

    Args:
        query: query rows of all sequences, as in `recurrent.attention`, and what follows.
        key: the keys.
        value: the values.
        log_decay: natural logarithm of the decay, per head or per key channel.
        beta: how much of a token is written.
        states: the checkpoints, changed in place where they move.
        ring: the inputs since, changed in place where they do not; only those before the cursor are read.
        plan: from `plan`, once per step.
        options: those of the layer.
        out: where to write the outputs; a new tensor if None.

    Returns:
        The outputs, in the type of the query. Rows of padding are 0.

    Raises:
        ValueError: naming the argument that does not fit, or shares memory with a pool. Nothing is written then.
    """
    check_replay(query, key, value, log_decay, beta, states, ring, plan, options, out)
    dtype, compute = query.dtype, compute_dtype(query.dtype)
    scale = query.shape[-1] ** -0.5 if options.scale is None else options.scale
    group = value.shape[1] // query.shape[1]
    inputs = key, log_decay
    query, key = (repeat(x.to(compute), "t h dk -> t (h g) dk", g=group) for x in (query, key))
    value, decay, beta = value.to(compute), log_decay.to(compute).exp(), beta.to(compute)

    result = torch.zeros(value.shape, dtype=compute, device=value.device)
    for sequence in _sequences(plan):
        slot, first = sequence.slot, sequence.cursor
        state = _rebuild(states, ring, None if sequence.begins else slot, first, compute)
        if sequence.moves_before:
            slot, first = sequence.target, 0
            states[slot] = state
            state = _read(states, slot, compute)
        for at, row in enumerate(sequence.rows, first):
            state, written = _step(state, key[row], value[row], decay[row], beta[row], delta=options.delta)
            result[row] = einsum(state, query[row] * scale, "hv dv dk, hv dk -> hv dv")
            if not sequence.moves_after:
                for field, pushed in zip(ring, (inputs[0][row], written, inputs[1][row]), strict=True):
                    field[slot, at] = pushed
        if sequence.moves_after:
            states[sequence.target] = state
    return result.to(dtype) if out is None else out.copy_(result)


def flush(
    states: list[Float[Tensor, "n hv dv dk"]],
    rings: list[Ring],
    cursors: Int32[Tensor, "n"],
    state_indices: Int32[Tensor, "b"],
    target_indices: Int32[Tensor, "b"] | None = None,
) -> None:
    """Move the checkpoints of some slots to their last input, in all layers, and empty their rings.

    Before a slot is copied to another, moved to the host, or given to `recurrent.attention`, all of which know the
    checkpoint alone. Inside a step, `flush` of the plan does the same at the end of it. With targets, it is a copy of a
    state: a slot keeps its checkpoint and its ring, and the target gets the state after as many inputs as the cursor
    says.

    Args:
        states: the checkpoints of all layers.
        rings: the rings of all layers.
        cursors: how many inputs of each ring are folded; 0 afterwards for the slots that are written.
        state_indices: the slots; a negative one is padding.
        target_indices: the slots that the states are written to, none of them among `state_indices`; their own if None.

    Raises:
        ValueError: naming the argument that does not fit. Nothing is written then.
    """
    check_flush(states, rings, cursors, state_indices, target_indices)
    targets = state_indices if target_indices is None else target_indices
    slots = [(slot, to) for slot, to in zip(state_indices.tolist(), targets.tolist(), strict=True) if slot >= 0]
    for pool, ring in zip(states, rings, strict=True):
        for slot, to in slots:
            pool[to] = _rebuild(pool, ring, slot, int(cursors[slot]), compute_dtype(ring.written.dtype))
    for _, to in slots:
        cursors[to] = 0


def advance(cursors: Int32[Tensor, "n"], plan: ReplayPlan, num_accepted: Int32[Tensor, "b"] | None = None) -> None:
    """Move the cursors of a step, in place: once, after its last layer.

    Args:
        cursors: those that the plan was made with.
        plan: of the step.
        num_accepted: of drafts, how many new tokens of each sequence are kept. Those of padding may be anything.

    Raises:
        ValueError: naming the argument that does not fit.
    """
    check_advance(cursors, plan, num_accepted)
    for sequence in _sequences(plan):
        before = 0 if sequence.moves_before else sequence.cursor
        kept = len(sequence.rows) if num_accepted is None else int(num_accepted[sequence.number])
        slot = sequence.target if sequence.moves_before or sequence.moves_after else sequence.slot
        cursors[slot] = 0 if sequence.moves_after else before + kept


def _rebuild(
    states: Float[Tensor, "n hv dv dk"], ring: Ring, slot: int | None, cursor: int, compute: torch.dtype
) -> Float[Tensor, "hv dv dk"]:
    """Return the state after the inputs in a ring: the checkpoint, through the operations of each step; zeros of none.

    These are products and sums of single elements, so nothing depends on how many inputs there are.
    """
    state = _read(states, slot, compute)
    group = states.shape[1] // ring.key.shape[2]
    for at in range(cursor):
        key, written, log_decay = (_read(field[slot], at, compute) for field in ring)  # copies
        state = _write(_fade(state, log_decay.exp()), written, repeat(key, "h dk -> (h g) dk", g=group))
    return state


class _Sequence(NamedTuple):
    """Its rows and slots, how many inputs its ring holds, and whether its checkpoint moves to its target, and when."""

    number: int
    rows: range
    slot: int
    target: int
    cursor: int
    begins: bool
    moves_before: bool
    moves_after: bool


def _sequences(plan: ReplayPlan) -> Iterator[_Sequence]:
    """List the sequences of a step that have new tokens and are no padding."""
    tables = plan.slots.state_indices.tolist(), plan.slots.has_initial_state.tolist()
    asked = [False] * plan.batch.num_seqs if plan.flush is None else plan.flush.tolist()
    targets = [-1] * plan.batch.num_seqs if plan.target_indices is None else plan.target_indices.tolist()
    for i, ((q0, q1), slot, has_state) in enumerate(zip(plan.batch.query_rows(), *tables, strict=True)):
        if q0 == q1 or slot < 0:
            continue
        cursor = int(plan.cursors[slot]) if has_state else 0
        before, after = _moves(plan, cursor + q1 - q0, begins=not has_state, asked=asked[i])
        target = slot if targets[i] < 0 else targets[i]
        yield _Sequence(i, range(q0, q1), slot, target, cursor, not has_state, before, after)


def _moves(plan: ReplayPlan, inputs: int, *, begins: bool, asked: bool) -> tuple[bool, bool]:
    """Return whether a checkpoint moves to before the step, and whether to its end, where it would have some inputs."""
    if plan.drafts:
        return begins or inputs > plan.ring_size, False
    return False, begins or asked or inputs >= plan.ring_size
