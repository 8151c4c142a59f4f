"""Layers that keep a state and the inputs since it: rings, cursors, and the plan of a step; `refattn.replay` says more.

    states    [n, hv, dv, dk]   the checkpoint of each slot
    ring      [n, l, ..]        the last inputs of each slot, those after its checkpoint, the oldest first
    cursors   [n]               how many of them there are

The cursor of a slot is the same in all layers, so it is moved once per step, after the last layer.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int32
from torch import Tensor

from refattn.batch import Batch
from refattn.checks import (
    check,
    check_can_be_written,
    check_flag,
    check_floating,
    check_list,
    check_own_memory,
    check_sizes,
    describe,
    same_device,
)
from refattn.options import RecurrentOptions
from refattn.overlap import check_apart, check_pools_apart
from refattn.states import StatePlan, check_recurrent


class Ring(NamedTuple):
    """The inputs of each slot since its checkpoint, of one layer.

    Attributes:
        key: the keys, of `h` heads. A type that holds them exactly, such as their own, rounds nothing.
        written: the row that each token wrote into the state, `beta * (value - state @ key)`, or `beta * value` without
            the delta rule.
        log_decay: the logarithms of the decays, per head or per key channel.
    """

    key: Float[Tensor, "n l h dk"]
    written: Float[Tensor, "n l hv dv"]
    log_decay: Float[Tensor, "n l hv"] | Float[Tensor, "n l hv dk"]


@dataclass(frozen=True, eq=False)
class ReplayPlan:
    """Where the checkpoint and the inputs of each sequence are before a step, and which checkpoints it moves.

    Attributes:
        slots: the rows and the slot of each sequence, and which of them begin: with zeros, and with an empty ring.
        cursors: how many inputs the ring of each slot holds, `0..ring_size`. Only those of sequences with new tokens
            that have a state are read.
        ring_size: the inputs that a ring has room for, `l`.
        flush: the sequences whose checkpoint moves to the end of this step, whether or not their ring is full: for a
            snapshot. None of them, if None.
        drafts: the new tokens may be rejected, so a checkpoint moves at most to the tokens before them.
        target_indices: the slot that each checkpoint is written to if it moves in this step; its own if the entry is
            negative, or for all if None. The sequence goes on in that slot: what it pushes after a move is in the ring
            there. The slot that it leaves keeps its checkpoint, and the inputs before its cursor. Entries of padding,
            and of sequences without new tokens, may be anything.

    Raises:
        ValueError: naming the argument that does not fit; on a CPU also if a cursor is not in its ring, more tokens of
            a sequence are drafts than a ring has room for, or a checkpoint moves to the slot of another sequence.
    """

    slots: StatePlan
    cursors: Int32[Tensor, "n"]
    ring_size: int
    flush: Bool[Tensor, "b"] | None = None
    drafts: bool = False
    target_indices: Int32[Tensor, "b"] | None = None

    def __post_init__(self) -> None:
        """Check the tables, and their contents where they are on the host."""
        if not isinstance(self.slots, StatePlan):
            raise ValueError(f"slots: expected a StatePlan, from recurrent.plan, got {describe(self.slots)}")
        check_sizes(ring_size=self.ring_size)
        check_flag("drafts", self.drafts)
        check(cursors=(self.cursors, "int32 n"))
        check(seq_lens=(self.batch.seq_lens, "int32 b"), flush=(self.flush, "bool b or None"))
        check(seq_lens=(self.batch.seq_lens, "int32 b"), target_indices=(self.target_indices, "int32 b or None"))
        same_device(seq_lens=self.batch.seq_lens, cursors=self.cursors)
        if self.flush is not None and self.drafts:
            raise ValueError("flush: expected None with drafts, as none of them may be in a checkpoint, got a tensor")
        check_one_slot_each(self.slots)
        if self.cursors.is_cpu:
            self._check_contents()

    @property
    def batch(self) -> Batch:
        """The query rows of each sequence."""
        return self.slots.batch

    def _check_contents(self) -> None:
        """Check the cursors that the step reads, and that drafts fit into a ring."""
        if self.slots.num_slots is not None and self.slots.num_slots > len(self.cursors):
            raise ValueError(
                f"cursors: expected one for each of the {self.slots.num_slots} slots of the plan, got "
                f"n={len(self.cursors)}"
            )
        tables = (self.batch.query_lens, self.slots.state_indices, self.slots.has_initial_state)
        rows = [*zip(*(x.tolist() for x in tables), strict=True)]
        owners = {slot: i for i, (query_len, slot, _) in enumerate(rows) if query_len and slot >= 0}
        targets = [-1] * len(rows) if self.target_indices is None else self.target_indices.tolist()
        for i, (query_len, slot, has_state) in enumerate(rows):
            if not query_len or slot < 0:
                continue
            if targets[i] >= 0 and (targets[i] >= len(self.cursors) or owners.setdefault(targets[i], i) != i):
                raise ValueError(
                    f"target_indices: expected a slot in 0..{len(self.cursors) - 1} that no other sequence has, got "
                    f"{targets[i]} for sequence {i}"
                )
            cursor = int(self.cursors[slot]) if has_state else 0
            if not 0 <= cursor <= self.ring_size:
                raise ValueError(f"cursors: expected 0..{self.ring_size} for slot {slot}, got {cursor}")
            if self.drafts and query_len > self.ring_size:
                raise ValueError(
                    f"drafts: expected at most ring_size={self.ring_size} tokens of a sequence, got {query_len} of "
                    f"sequence {i}"
                )


def check_one_slot_each(slots: StatePlan) -> None:
    """Check that each sequence has one slot: its checkpoint is kept, and no other state.

    Raises:
        ValueError: naming the table that does not fit.
    """
    if slots.per_draft:
        raise ValueError(
            f"state_indices: expected [b], as drafts are in the ring of one slot, got {describe(slots.state_indices)}"
        )
    if slots.checkpoint_indices is not None:
        raise ValueError("checkpoint_indices: expected None, as a step flushes where a state is wanted, got a table")


def check_replay(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    log_decay: Tensor,
    beta: Tensor,
    states: Tensor,
    ring: Ring,
    plan: ReplayPlan,
    options: RecurrentOptions,
    out: Tensor | None,
) -> None:
    """Check a call of `replay.attention`.

    Raises:
        ValueError: naming the argument, what was expected and what came.
    """
    if not isinstance(plan, ReplayPlan):
        raise ValueError(f"plan: expected a ReplayPlan, from replay.plan, got {describe(plan)}")
    check_recurrent(query, key, value, log_decay, beta, states, plan.slots, options, out)
    per_channel = log_decay.ndim == 3
    check_ring(ring, states, len(plan.cursors), plan.ring_size, query.shape[1], per_channel=per_channel)
    tensors = dict(query=query, key=key, value=value, log_decay=log_decay, beta=beta, cursors=plan.cursors)
    check_apart(_memory(ring, states), tensors | ({} if out is None else dict(out=out)))


def check_flush(
    states: list[Tensor], rings: list[Ring], cursors: Tensor, state_indices: Tensor, target_indices: Tensor | None
) -> None:
    """Check a call of `replay.flush`.

    Raises:
        ValueError: naming the argument, what was expected and what came.
    """
    check(cursors=(cursors, "int32 n"))
    check(state_indices=(state_indices, "int32 b"), target_indices=(target_indices, "int32 b or None"))
    check_own_memory("cursors", cursors)
    if not state_indices.is_cpu:
        same_device(cursors=cursors, state_indices=state_indices)
    if target_indices is not None:
        same_device(state_indices=state_indices, target_indices=target_indices)
    check_list("states", states, "pools")
    check_list("rings", rings, "rings")
    if not states:
        raise ValueError("states: expected the pool of at least one layer, got none")
    if len(states) != len(rings):
        raise ValueError(f"rings: expected one for each pool of states, got {len(rings)} for {len(states)}")
    sizes = []
    for pool, ring in zip(states, rings, strict=True):
        if not isinstance(ring, Ring):
            raise ValueError(f"rings: expected a Ring for each layer, got {describe(ring)}")
        check_floating("states", pool)
        same_device(cursors=cursors, states=pool)
        check(states=(pool, "n hv dv dk"))
        check(key=(ring.key, "n l h dk"))
        sizes.append(ring.key.shape[1])
        check_ring(ring, pool, len(cursors), sizes[0], ring.key.shape[2], per_channel=ring.log_decay.ndim == 4)
    check_pools_apart("states", states)
    rows = {f"rings[{i}].{name}": x for i, ring in enumerate(rings) for name, x in ring._asdict().items()}
    for pool in states:
        check_apart(dict(states=pool), rows | dict(cursors=cursors))
    if state_indices.is_cpu:
        slots = [slot for slot in state_indices.tolist() if slot >= 0]
        if max(slots, default=0) >= len(cursors):
            raise ValueError(f"state_indices: expected slots in 0..{len(cursors) - 1}, got {max(slots)}")
        if len({*slots}) < len(slots):
            raise ValueError(f"state_indices: expected each slot once, got {state_indices.tolist()}")
        if target_indices is not None:
            _check_targets(slots, state_indices.tolist(), target_indices.tolist(), len(cursors))
        wrong = [(slot, cursor) for slot in slots if not 0 <= (cursor := int(cursors[slot])) <= sizes[0]]
        if wrong:
            raise ValueError(f"cursors: expected 0..{sizes[0]} for slot {wrong[0][0]}, got {wrong[0][1]}")


def _check_targets(slots: list[int], indices: list[int], targets: list[int], num_slots: int) -> None:
    """Check the slots that states are written to: each once, and none of those that are read."""
    written = [to for slot, to in zip(indices, targets, strict=True) if slot >= 0]
    wrong = [to for to in written if not 0 <= to < num_slots or to in slots or written.count(to) > 1]
    if wrong:
        raise ValueError(
            f"target_indices: expected slots in 0..{num_slots - 1}, each once and none of state_indices, got {wrong[0]}"
        )


def check_advance(cursors: Tensor, plan: ReplayPlan, num_accepted: Tensor | None) -> None:
    """Check a call of `replay.advance`.

    Raises:
        ValueError: naming the argument, what was expected and what came.
    """
    if not isinstance(plan, ReplayPlan):
        raise ValueError(f"plan: expected a ReplayPlan, from replay.plan, got {describe(plan)}")
    check({"n": len(plan.cursors)}, cursors=(cursors, "int32 n"))
    check_own_memory("cursors", cursors)
    check(seq_lens=(plan.batch.seq_lens, "int32 b"), num_accepted=(num_accepted, "int32 b or None"))
    same_device(seq_lens=plan.batch.seq_lens, cursors=cursors)
    if plan.drafts != (num_accepted is not None):
        raise ValueError("num_accepted: expected with drafts, and only with them")
    if num_accepted is None or not num_accepted.is_cpu:
        return
    tables = plan.batch.query_lens, plan.slots.state_indices, num_accepted
    for i, (query_len, slot, accepted) in enumerate(zip(*(x.tolist() for x in tables), strict=True)):
        if query_len and slot >= 0 and not 0 <= accepted <= query_len:
            raise ValueError(f"num_accepted: expected 0..{query_len}, new tokens of sequence {i}, got {accepted}")


def check_ring(
    ring: Ring, states: Tensor, num_slots: int, ring_size: int, num_heads: int, *, per_channel: bool
) -> None:
    """Check the ring of a layer against its states, the plan, and the heads of its keys.

    Raises:
        ValueError: naming the field, what was expected and what came.
    """
    if not isinstance(ring, Ring):
        raise ValueError(f"ring: expected a Ring, from replay.allocate, got {describe(ring)}")
    n, hv, dv, dk = states.shape
    if n != num_slots:
        raise ValueError(f"states: expected a slot for each of the {num_slots} cursors, got n={n}")
    sizes = {"n": n, "l": ring_size, "h": num_heads, "hv": hv, "dv": dv, "dk": dk}
    check(
        sizes,
        **{"ring.key": (ring.key, "float n l h dk"), "ring.written": (ring.written, "float n l hv dv")},
        **{"ring.log_decay": (ring.log_decay, "float n l hv dk" if per_channel else "float n l hv")},
    )
    memory = _memory(ring, states)
    same_device(**memory)
    for name, x in memory.items():
        check_own_memory(name, x)
        check_can_be_written(**{name: x})
    check_apart(memory, {})


def _memory(ring: Ring, states: Tensor) -> dict[str, Tensor]:
    """Return the tensors that a step writes to, under their names in errors."""
    return dict(states=states) | {f"ring.{name}": x for name, x in ring._asdict().items()}


def plan_of_slots(state_indices: Int32[Tensor, "b"]) -> StatePlan:
    """Return a plan in which each slot has a state and is met by one token, for what a flush reads of it."""
    ends = torch.arange(len(state_indices) + 1, dtype=torch.int32, device=state_indices.device)
    batch = Batch(ends, torch.full_like(state_indices, 2), None, 1, 2)
    return StatePlan(batch, state_indices, torch.ones_like(state_indices, dtype=torch.bool))
