"""Layers that keep a state: what it is, a step of them, and what a module of the model gets to compute with.

All is computed by the paths `recurrent`, `replay` and `state_cache` of either twin. All layers of a model have the same
slots, and so one plan per step:

    decodes, with drafts    read the state in the last column, and write the one after each token to the others
    prefills                their states are copied first to where they will be: both are one slot there
    a shared state          likewise, in decodes, too: a plan gives no slot to two sequences

With rings (`RingPool`) this is how the convolutions are planned, and states have a plan of their own:

    decodes, with drafts    rebuild a state from its checkpoint and ring, and push what the tokens write (`replay`)
    a few decodes           read a state and write one, as without
    prefills                their states are folded first to where they will be
    a shared state          likewise

Decodes and prefills have a plan each, over their own rows. In a captured step these rows are not known beforehand:
there each plan has all rows, those of the others as padding, whose outputs are 0, and the outputs of both are added.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int32
from torch import Tensor

from refattn.batch import Batch, Part
from refattn.options import RecurrentOptions
from refattn.rings import ReplayPlan, Ring
from refattn.states import StatePlan
from twinattn.engine.cache_kinds import INPUTS, RINGS, STATES, CacheKind
from twinattn.engine.ring_pool import Fold, Row, in_groups
from twinattn.engine.state_pool import Slots, StatePool
from twinattn.engine.twin import Twin


class StatePart(NamedTuple):
    """A part of a step. If every part has all rows, a row is padding in all but one.

    Attributes:
        rows: its query rows.
        inputs: the plan of the convolutions.
        states: the plan of the states; the same one without rings.
    """

    rows: slice
    inputs: StatePlan
    states: StatePlan | ReplayPlan


StateParts = tuple[StatePart, ...]


class Copies(NamedTuple):
    """What is copied before a step.

    Attributes:
        pairs: slots, and those that they are copied to: of the convolutions alone, with rings.
        folds: states that are written out of a ring, in order.
    """

    pairs: list[tuple[int, int]]
    folds: list[Fold]


class StatePools(NamedTuple):
    """The pools of a layer.

    Attributes:
        states: one per slot, `[n, hv, dv, dk]`, float32 or the model's type if that is wider.
        inputs: the last inputs of the convolution before it, `[n, width - 1, c]`, in the model's type; None without.
        ring: the inputs since each state, if they are replayed: states have slots of their own then.
    """

    states: Float[Tensor, "n hv dv dk"]
    inputs: Float[Tensor, "n w c"] | None
    ring: Ring | None = None

    @property
    def by_kind(self) -> list[tuple[CacheKind, Tensor]]:
        """All of them, with what each holds."""
        pools = [(STATES, self.states), (INPUTS, self.inputs), *((RINGS, x) for x in self.ring or ())]
        return [(kind, pool) for kind, pool in pools if pool is not None]

    @property
    def tensors(self) -> list[Tensor]:
        """All of them."""
        return [pool for _, pool in self.by_kind]


@dataclass(frozen=True)
class StateLayer:
    """A layer that keeps a state.

    Attributes:
        num_value_heads: matrices, `hv`.
        value_head_size: their rows, `dv`.
        key_head_size: their columns, `dk`.
        width: inputs that an output of the convolution depends on; 0 without a convolution.
        num_channels: its channels.
        num_heads: heads of keys, `h`; as many as of values if 0.
        per_channel: whether each key channel has a decay of its own.
    """

    num_value_heads: int
    value_head_size: int
    key_head_size: int
    width: int = 0
    num_channels: int = 0
    num_heads: int = 0
    per_channel: bool = False

    def bytes_per_slot(self, dtype: torch.dtype) -> int:
        """Return the bytes of a slot in the pools of a model of a type, without a ring."""
        elements = self.num_value_heads * self.value_head_size * self.key_head_size
        inputs = max(0, self.width - 1) * self.num_channels
        return elements * _state_dtype(dtype).itemsize + inputs * dtype.itemsize

    def allocate(self, twin: Twin, slots: StatePool, *, dtype: torch.dtype, device: torch.device) -> StatePools:
        """Make the pools of a model of a type."""
        num_states, where = slots.num_slots if slots.rings is None else slots.rings.num_slots, dict(device=device)
        sizes = self.num_value_heads, self.value_head_size, self.key_head_size
        states = twin.state_cache.allocate(num_states, *sizes, dtype=_state_dtype(dtype), **where)
        inputs = ring = None
        if self.width:
            of_inputs = slots.num_slots, self.width, self.num_channels
            inputs = twin.state_cache.allocate_inputs(*of_inputs, dtype=dtype, **where)
        if slots.rings is not None:
            of_ring = num_states, slots.rings.ring_size, self.num_heads or self.num_value_heads
            ring = twin.replay.allocate(*of_ring, *sizes, per_channel=self.per_channel, dtype=dtype, **where)
        return StatePools(states, inputs, ring)


def _state_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


@dataclass(frozen=True)
class Recurrence:
    """A layer in a step, over its own pools: what its module calls.

    Attributes:
        twin: the package that computes.
        pools: of the layer.
        parts: of the step.
    """

    twin: Twin
    pools: StatePools
    parts: StateParts

    def convolve(
        self, inputs: Float[Tensor, "t c"], weight: Float[Tensor, "c width"], bias: Float[Tensor, "c"] | None
    ) -> Float[Tensor, "t c"]:
        """Mix each channel of the new tokens with its last inputs, and apply SiLU."""
        path, pool = self.twin.recurrent, self.pools.inputs
        outs = [path.convolve(inputs[part.rows], weight, pool, part.inputs, bias=bias) for part in self.parts]
        return self._join(outs)

    def attention(
        self,
        query: Float[Tensor, "t h dk"],
        key: Float[Tensor, "t h dk"],
        value: Float[Tensor, "t hv dv"],
        log_decay: Float[Tensor, "t hv"] | Float[Tensor, "t hv dk"],
        beta: Float[Tensor, "t hv"],
        options: RecurrentOptions = RecurrentOptions(),
    ) -> Float[Tensor, "t hv dv"]:
        """Fold the new tokens into their states, and read the state after each."""
        tokens = query, key, value, log_decay, beta
        return self._join([self._attend([x[part.rows] for x in tokens], part.states, options) for part in self.parts])

    def _attend(
        self, tokens: Sequence[Tensor], plan: StatePlan | ReplayPlan, options: RecurrentOptions
    ) -> Float[Tensor, "t hv dv"]:
        """Compute some rows, by plain steps or out of a ring."""
        out: Tensor
        if isinstance(plan, ReplayPlan):
            out = self.twin.replay.attention(*tokens, self.pools.states, self.pools.ring, plan, options)
        else:
            out = self.twin.recurrent.attention(*tokens, self.pools.states, plan, options)
        return out

    def _join(self, outs: Sequence[Float[Tensor, "..."]]) -> Float[Tensor, "..."]:
        """Put the outputs of the parts together."""
        if len(outs) > 1 and all(part.rows == slice(None) for part in self.parts):
            return reduce(torch.add, outs)
        return outs[0] if len(outs) == 1 else torch.cat(list(outs))


def plan_states(
    twin: Twin,
    batch: Batch,
    slots: Sequence[Slots],
    query_lens: Sequence[int],
    pool: StatePool,
    pools: Sequence[StatePools],
) -> StateParts:
    """Plan a step of all layers that keep a state, and copy the states that it begins with where they have to be.

    Args:
        twin: the package that computes.
        batch: the lengths of the step, decodes before prefills.
        slots: of each request.
        query_lens: the new tokens of each.
        pool: whose slots they are.
        pools: of all layers.
    """
    plain = max(query_lens) == 1 and is_plain(pool, len(slots))
    rows, copies = rows_of(slots, query_lens, pool, plain=plain)
    copy_states(twin, copies, pool, pools)
    table = torch.tensor(rows, dtype=torch.int32, pin_memory=batch.device.type == "cuda")
    table = table.to(batch.device, non_blocking=True)
    ends = [(one.first + query_len) // pool.block_size for one, query_len in zip(slots, query_lens, strict=True)]
    parts: Sequence[Part] = [Part(batch, slice(None))]
    if min(query_lens) <= pool.decode_len < max(query_lens):
        parts = twin.metadata.split_decodes_and_prefills(batch, query_lens, decode_len=pool.decode_len)
    plans, first = [], 0
    for part in parts:
        end = first + part.batch.num_seqs
        keeps = any(_keeps(one) for one in slots[first:end])
        columns = max(ends[first:end]) if keeps else 0
        kind = "prefill" if query_lens[first] > pool.decode_len else "plain" if plain else "decode"
        plans.append(part_of(twin, part, table[first:end], pool, columns, kind))
        first = end
    return tuple(plans)


def _keeps(slots: Slots) -> bool:
    """Return whether a step copies a state of a request at the end of a block."""
    return slots.checkpoint is not None or (slots.ring is not None and slots.ring.checkpoint is not None)


def is_plain(pool: StatePool, num_decodes: int) -> bool:
    """Return whether a step of decodes alone reads and writes states, though there are rings: if it has a few."""
    return pool.rings is not None and num_decodes <= pool.rings.few


def rows_of(
    slots: Sequence[Slots], query_lens: Sequence[int], pool: StatePool, *, plain: bool = False
) -> tuple[list[list[int]], Copies]:
    """Return what plans of a step are made of, a row of numbers for each request; and what is copied before it.

        columns                a decode of 3 tokens at most      a prefill        padding
        slots of a decode      5 6 -  2                          - - -  -         - - -  -
        of a prefill           -                                 5                -
        num_accepted           4                                 -                -
        a block, and its slot  7  9                              7  9             -  -
        with rings             those of `ring_pool.Row`

    A decode has the slots after each of its tokens, and then the one that it begins with, which `num_accepted` points
    to. At the end of a block a state is kept in a slot. All that is not there is -1, and so is all padding.

    Args:
        slots: of each request.
        query_lens: the new tokens of each.
        pool: whose slots they are.
        plain: whether decodes read and write states, though there are rings.
    """
    rows, pairs = [], []
    for one, query_len in zip(slots, query_lens, strict=True):
        is_decode = query_len <= pool.decode_len
        start = -1 if one.start is None else one.start
        if start >= 0 and (not is_decode or pool.is_shared(start)):
            pairs.append((start, one.targets[-1]))
            start = -1
        decode, prefill, accepted = [-1] * (pool.decode_len + 1), one.targets[0], -1
        if is_decode:
            decode[: len(one.targets)], decode[-1], prefill = one.targets, start, -1
            accepted = len(one.targets) if start < 0 else len(decode)  # where the state is
        rows.append([*decode, prefill, accepted, *(one.checkpoint or (-1, -1))])
    if pool.rings is None:
        return rows, Copies(pairs, [])
    of_rings = [(one.ring, query_len) for one, query_len in zip(slots, query_lens, strict=True) if one.ring is not None]
    ring_rows, folds = pool.rings.plan(of_rings, plain=plain)
    return [[*row, *more] for row, more in zip(rows, ring_rows, strict=True)], Copies(pairs, folds)


def row_len(pool: StatePool) -> int:
    """Return the numbers of a row of `rows_of`."""
    return pool.decode_len + 5 + (0 if pool.rings is None else len(Row._fields))


def copy_states(twin: Twin, copies: Copies, pool: StatePool, pools: Sequence[StatePools]) -> None:
    """Copy states before a step, in all layers, without waiting for the device.

    Args:
        twin: the package that computes.
        copies: from `rows_of`.
        pool: whose slots they are.
        pools: of all layers.
    """
    device = pools[0].states.device
    if copies.pairs:
        table = _on_device(copies.pairs, torch.int64, device)
        caches = [x for layer in pools for x in ((layer.inputs,) if layer.ring else (layer.states, layer.inputs))]
        twin.state_cache.copy([x for x in caches if x is not None], table)
    for group in in_groups(copies.folds):
        slots, counts, targets = _on_device(list(zip(*group, strict=True)), torch.int32, device)
        cursors = torch.zeros(len(pools[0].states), dtype=torch.int32, device=device)
        cursors.index_copy_(0, slots.long(), counts)
        twin.replay.flush([x.states for x in pools], [x.ring for x in pools], cursors, slots, targets)
    if pool.rings is not None:
        pool.rings.folded()


def _on_device(numbers: Any, dtype: torch.dtype, device: torch.device) -> Tensor:
    table = torch.tensor(numbers, dtype=dtype, pin_memory=device.type == "cuda")
    return table.to(device, non_blocking=True)


def part_of(
    twin: Twin, part: Part, rows: Int32[Tensor, "b columns"], pool: StatePool, num_blocks: int, kind: str
) -> StatePart:
    """Plan the decodes or the prefills among some requests; others are padding.

    Args:
        twin: the package that computes.
        part: the lengths, and the query rows.
        rows: those of `rows_of`, on the device of the batch.
        pool: whose slots they are.
        num_blocks: blocks of a request whose ends may be kept; 0 keeps none.
        kind: "decode", "plain" for decodes that read and write states though there are rings, or "prefill".
    """
    plan = prefill_plan if kind == "prefill" else decode_plan
    inputs = plan(twin, part.batch, rows, pool, num_blocks)
    if pool.rings is None:
        return StatePart(part.tokens, inputs, inputs)
    return StatePart(part.tokens, inputs, ring_plan(twin, part.batch, rows, pool, num_blocks, kind))


def ring_plan(
    twin: Twin, batch: Batch, rows: Int32[Tensor, "b columns"], pool: StatePool, num_blocks: int, kind: str
) -> StatePlan | ReplayPlan:
    """Plan the states of some requests where there are rings. Arguments are those of `part_of`."""
    rings, columns = pool.rings, dict(zip(Row._fields, rows[:, pool.decode_len + 5 :].unbind(1), strict=True))
    assert rings is not None
    plan: StatePlan | ReplayPlan
    if kind == "prefill":
        kept = _checkpoints(columns["block"], columns["kept"], pool, num_blocks)
        plan = twin.recurrent.plan(batch, state_indices=columns["prefill"], **kept)
    elif kind == "plain":
        states, accepted = torch.stack((columns["plain"], columns["start"]), 1), (columns["start"] >= 0).int() + 1
        plan = twin.recurrent.plan(batch, state_indices=states, num_accepted=accepted)
    else:
        slots, has_drafts = columns["slot"], pool.decode_len > 1
        cursors = torch.zeros(rings.num_slots + 1, dtype=torch.int32, device=rows.device)
        cursors.scatter_(0, slots.where(slots >= 0, rings.num_slots).long(), columns["cursor"])
        plan = twin.replay.plan(
            batch,
            state_indices=slots,
            cursors=cursors[:-1],
            ring_size=rings.ring_size,
            flush=None if has_drafts else columns["flush"] > 0,
            drafts=has_drafts,
            target_indices=columns["target"],
        )
    return plan


def decode_plan(
    twin: Twin, batch: Batch, rows: Int32[Tensor, "b columns"], pool: StatePool, num_blocks: int
) -> StatePlan:
    """Plan the decodes among some requests; for others it is padding.

    Args:
        twin: the package that computes.
        batch: the lengths of the step.
        rows: those of `rows_of`, on the device of the batch.
        pool: whose slots they are.
        num_blocks: blocks of a request whose ends may be kept; 0 keeps none.
    """
    width = pool.decode_len + 1
    kept = _checkpoints(rows[:, width + 2], rows[:, width + 3], pool, num_blocks)
    plan: StatePlan = twin.recurrent.plan(batch, state_indices=rows[:, :width], num_accepted=rows[:, width + 1], **kept)
    return plan


def prefill_plan(
    twin: Twin, batch: Batch, rows: Int32[Tensor, "b columns"], pool: StatePool, num_blocks: int
) -> StatePlan:
    """Plan the prefills among some requests; for others it is padding. Arguments are those of `decode_plan`."""
    kept = _checkpoints(rows[:, pool.decode_len + 3], rows[:, pool.decode_len + 4], pool, num_blocks)
    plan: StatePlan = twin.recurrent.plan(batch, state_indices=rows[:, pool.decode_len + 1], **kept)
    return plan


def _checkpoints(
    block: Int32[Tensor, "b"], slot: Int32[Tensor, "b"], pool: StatePool, num_blocks: int
) -> dict[str, Any]:
    """Return the slots of the states that are kept, with a column for each block that a sequence may end."""
    if not num_blocks:
        return {}
    column = torch.arange(num_blocks, dtype=torch.int32, device=block.device)
    return dict(checkpoint_indices=slot[:, None].where(column == block[:, None], -1), block_size=pool.block_size)
