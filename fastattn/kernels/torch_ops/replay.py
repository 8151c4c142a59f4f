"""States that are rebuilt from a checkpoint and a ring, in plain torch: an input of all sequences at a time.

A token goes through the operations of `fastattn.kernels.torch_ops.recurrent`, and so does an input of a ring.
"""

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from fastattn.kernels.torch_ops.recurrent import _fade, _fold, _Tokens, _write
from refattn.options import RecurrentOptions
from refattn.rings import ReplayPlan, Ring


class _Sequence(NamedTuple):
    """A sequence with new tokens and a slot."""

    row: int  # its first query row
    length: int
    slot: int
    target: int  # where its checkpoint goes if it moves
    cursor: int  # inputs in its ring
    begins: bool
    moves_before: bool  # its checkpoint, to before the step
    moves_after: bool

    @property
    def first(self) -> tuple[int, int]:
        """The slot whose ring gets the new tokens, and where in it the first one goes."""
        return (self.target, 0) if self.moves_before else (self.slot, self.cursor)


def replay(
    query: Float[Tensor, "t h dk"],
    key: Float[Tensor, "t h dk"],
    value: Float[Tensor, "t hv dv"],
    log_decay: Float[Tensor, "t hv"] | Float[Tensor, "t hv dk"],
    beta: Float[Tensor, "t hv"],
    states: Float[Tensor, "n hv dv dk"],
    ring: Ring,
    plan: ReplayPlan,
    options: RecurrentOptions,
    out: Float[Tensor, "t hv dv"] | None,
) -> Float[Tensor, "t hv dv"]:
    """Rebuild states and fold new tokens in; see `fastattn.dispatch`."""
    compute = torch.promote_types(query.dtype, torch.float32)
    scale = query.shape[-1] ** -0.5 if options.scale is None else options.scale
    result = value.new_zeros(value.shape)
    tokens = _Tokens(query, key, value, log_decay, beta, compute, scale)
    sequences = sorted(_sequences(plan), key=lambda sequence: -sequence.length)
    state = _rebuild(states, ring, [(None if s.begins else s.slot, s.cursor) for s in sequences], compute)
    folded = [i for i, sequence in enumerate(sequences) if sequence.moves_before]
    if folded:
        slots = torch.tensor([sequences[i].target for i in folded])
        states[slots] = state[folded].to(states.dtype)
        state[folded] = states[slots].to(compute)
    for token in range(sequences[0].length if sequences else 0):
        sequences = [sequence for sequence in sequences if sequence.length > token]
        rows = torch.tensor([sequence.row + token for sequence in sequences])
        now = state[: len(sequences)]
        answer, written = _fold(now, *tokens.read(rows), tokens.group, options.delta)
        result[rows] = answer.to(result.dtype)
        pushed = [i for i, sequence in enumerate(sequences) if not sequence.moves_after]
        if pushed:
            slots, first = torch.tensor([sequences[i].first for i in pushed]).T
            at = first + token
            inputs = key[rows[pushed]], written[pushed], log_decay[rows[pushed]]
            for field, x in zip(ring, inputs, strict=True):
                field[slots, at] = x.to(field.dtype)
        moved = [i for i, sequence in enumerate(sequences) if sequence.moves_after and sequence.length == token + 1]
        if moved:
            states[torch.tensor([sequences[i].target for i in moved])] = now[moved].to(states.dtype)
    return result if out is None else out.copy_(result)


def flush(states: Float[Tensor, "n hv dv dk"], ring: Ring, plan: ReplayPlan) -> None:
    """Fold rings into checkpoints; see `fastattn.dispatch`."""
    slots, cursors = plan.slots.state_indices, plan.cursors
    targets = slots if plan.target_indices is None else plan.target_indices
    pairs = [(slot, to) for slot, to in zip(slots.tolist(), targets.tolist(), strict=True) if slot >= 0]
    compute = torch.promote_types(ring.written.dtype, torch.float32)
    rebuilt = _rebuild(states, ring, [(slot, int(cursors[slot])) for slot, _ in pairs], compute)
    states[torch.tensor([to for _, to in pairs], dtype=torch.int64)] = rebuilt.to(states.dtype)


def _sequences(plan: ReplayPlan) -> list[_Sequence]:
    """List the sequences that have new tokens and are no padding."""
    found = []
    asked = [False] * plan.batch.num_seqs if plan.flush is None else plan.flush.tolist()
    targets = [-1] * plan.batch.num_seqs if plan.target_indices is None else plan.target_indices.tolist()
    tables = plan.slots.state_indices.tolist(), targets, plan.slots.has_initial_state.tolist(), asked
    for slot, target, has_state, flushes, (q0, q1) in zip(*tables, plan.batch.query_rows(), strict=True):
        if slot < 0 or q0 == q1:
            continue
        cursor = int(plan.cursors[slot]) if has_state else 0
        total = cursor + q1 - q0
        moves_before = plan.drafts and (not has_state or total > plan.ring_size)
        moves_after = not plan.drafts and (not has_state or flushes or total >= plan.ring_size)
        target = slot if target < 0 else target
        found.append(_Sequence(q0, q1 - q0, slot, target, cursor, not has_state, moves_before, moves_after))
    return found


def _rebuild(
    states: Tensor, ring: Ring, slots: list[tuple[int | None, int]], compute: torch.dtype
) -> Float[Tensor, "b hv dv dk"]:
    """Return the states after the inputs in the rings of some slots, each with its cursor; zeros of no slot."""
    state = torch.zeros(len(slots), *states.shape[1:], dtype=compute)
    known = [i for i, (slot, _) in enumerate(slots) if slot is not None]
    indices = torch.tensor([slot or 0 for slot, _ in slots], dtype=torch.int64)
    state[known] = states[indices[known]].to(compute)
    group = states.shape[1] // ring.key.shape[2]
    for at in range(max((cursor for _, cursor in slots), default=0)):
        held = [i for i, (_, cursor) in enumerate(slots) if cursor > at]
        key, written, log_decay = (field[indices[held], at].to(compute) for field in ring)
        now = state if len(held) == len(slots) else state[held]
        _fade(now, log_decay.exp())
        _write(now, written[..., None], key.repeat_interleave(group, 1)[..., None])
        if now is not state:
            state[held] = now
    return state
