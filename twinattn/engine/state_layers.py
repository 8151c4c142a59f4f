"""Layers that keep a state: what it is, a step of them, and what a module of the model gets to compute with.

All is computed by the paths `recurrent` and `state_cache` of either twin. All layers of a model have the same slots,
and so one plan per step:

    decodes, with drafts    read the state in the last column, and write the one after each token to the others
    prefills                their states are copied first to where they will be: both are one slot there
    a shared state          likewise, in decodes, too: a plan gives no slot to two sequences

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
from refattn.states import StatePlan
from twinattn.engine.state_pool import Slots, StatePool
from twinattn.engine.twin import Twin

# The query rows of each part of a step, and their plan. If every part has all rows, a row is padding in all but one.
StateParts = tuple[tuple[slice, StatePlan], ...]


class StatePools(NamedTuple):
    """The pools of a layer.

    Attributes:
        states: one per slot, `[n, hv, dv, dk]`, float32 or the model's type if that is wider.
        inputs: the last inputs of the convolution before it, `[n, width - 1, c]`, in the model's type; None without.
    """

    states: Float[Tensor, "n hv dv dk"]
    inputs: Float[Tensor, "n w c"] | None


@dataclass(frozen=True)
class StateLayer:
    """A layer that keeps a state.

    Attributes:
        num_value_heads: matrices, `hv`.
        value_head_size: their rows, `dv`.
        key_head_size: their columns, `dk`.
        width: inputs that an output of the convolution depends on; 0 without a convolution.
        num_channels: its channels.
    """

    num_value_heads: int
    value_head_size: int
    key_head_size: int
    width: int = 0
    num_channels: int = 0

    def bytes_per_slot(self, dtype: torch.dtype) -> int:
        """Return the bytes of a slot in the pools of a model of a type."""
        elements = self.num_value_heads * self.value_head_size * self.key_head_size
        inputs = max(0, self.width - 1) * self.num_channels
        return elements * _state_dtype(dtype).itemsize + inputs * dtype.itemsize

    def allocate(self, twin: Twin, num_slots: int, *, dtype: torch.dtype, device: torch.device) -> StatePools:
        """Make the pools of a model of a type."""
        sizes = num_slots, self.num_value_heads, self.value_head_size, self.key_head_size
        states = twin.state_cache.allocate(*sizes, dtype=_state_dtype(dtype), device=device)
        if not self.width:
            return StatePools(states, None)
        inputs = twin.state_cache.allocate_inputs(num_slots, self.width, self.num_channels, dtype=dtype, device=device)
        return StatePools(states, inputs)


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
        path = self.twin.recurrent
        outs = [path.convolve(inputs[rows], weight, self.pools.inputs, plan, bias=bias) for rows, plan in self.parts]
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
        tokens, path = (query, key, value, log_decay, beta), self.twin.recurrent
        outs = [
            path.attention(*(x[rows] for x in tokens), self.pools.states, plan, options) for rows, plan in self.parts
        ]
        return self._join(outs)

    def _join(self, outs: Sequence[Float[Tensor, "..."]]) -> Float[Tensor, "..."]:
        """Put the outputs of the parts together."""
        if len(outs) > 1 and all(rows == slice(None) for rows, _ in self.parts):
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
    rows, pairs = rows_of(slots, query_lens, pool)
    copy_states(twin, pairs, pools)
    table = torch.tensor(rows, dtype=torch.int32, pin_memory=batch.device.type == "cuda")
    table = table.to(batch.device, non_blocking=True)
    ends = [(one.first + query_len) // pool.block_size for one, query_len in zip(slots, query_lens, strict=True)]
    parts: Sequence[Part] = [Part(batch, slice(None))]
    if min(query_lens) <= pool.decode_len < max(query_lens):
        parts = twin.metadata.split_decodes_and_prefills(batch, query_lens, decode_len=pool.decode_len)
    plans, first = [], 0
    for part in parts:
        end = first + part.batch.num_seqs
        keeps = any(one.checkpoint is not None for one in slots[first:end])
        columns = max(ends[first:end]) if keeps else 0
        plan = decode_plan if query_lens[first] <= pool.decode_len else prefill_plan
        plans.append((part.tokens, plan(twin, part.batch, table[first:end], pool, columns)))
        first = end
    return tuple(plans)


def rows_of(
    slots: Sequence[Slots], query_lens: Sequence[int], pool: StatePool
) -> tuple[list[list[int]], list[tuple[int, int]]]:
    """Return what plans of a step are made of, a row of numbers for each request; and the states to copy before it.

        columns                a decode of 3 tokens at most      a prefill        padding
        slots of a decode      5 6 -  2                          - - -  -         - - -  -
        of a prefill           -                                 5                -
        num_accepted           4                                 -                -
        a block, and its slot  7  9                              7  9             -  -

    A decode has the slots after each of its tokens, and then the one that it begins with, which `num_accepted` points
    to. At the end of a block a state is kept in a slot. All that is not there is -1, and so is all padding.

    Args:
        slots: of each request.
        query_lens: the new tokens of each.
        pool: whose slots they are.
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
    return rows, pairs


def row_len(pool: StatePool) -> int:
    """Return the numbers of a row of `rows_of`."""
    return pool.decode_len + 5


def copy_states(twin: Twin, pairs: Sequence[tuple[int, int]], pools: Sequence[StatePools]) -> None:
    """Copy states before a step, in all layers, without waiting for the device.

    Args:
        twin: the package that computes.
        pairs: from `rows_of`.
        pools: of all layers.
    """
    if pairs:
        device = pools[0].states.device
        table = torch.tensor(pairs, dtype=torch.int64, pin_memory=device.type == "cuda")
        caches = [x for layer in pools for x in layer if x is not None]
        twin.state_cache.copy(caches, table.to(device, non_blocking=True))


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
    kept = _checkpoints(rows, pool, num_blocks)
    plan: StatePlan = twin.recurrent.plan(batch, state_indices=rows[:, :width], num_accepted=rows[:, width + 1], **kept)
    return plan


def prefill_plan(
    twin: Twin, batch: Batch, rows: Int32[Tensor, "b columns"], pool: StatePool, num_blocks: int
) -> StatePlan:
    """Plan the prefills among some requests; for others it is padding. Arguments are those of `decode_plan`."""
    kept = _checkpoints(rows, pool, num_blocks)
    plan: StatePlan = twin.recurrent.plan(batch, state_indices=rows[:, pool.decode_len + 1], **kept)
    return plan


def _checkpoints(rows: Int32[Tensor, "b columns"], pool: StatePool, num_blocks: int) -> dict[str, Any]:
    """Return the slots of the states that are kept, with a column for each block that a sequence may end."""
    if not num_blocks:
        return {}
    block, slot = rows[:, -2:-1], rows[:, -1:]
    column = torch.arange(num_blocks, dtype=torch.int32, device=rows.device)
    return dict(checkpoint_indices=slot.where(column == block, -1), block_size=pool.block_size)
