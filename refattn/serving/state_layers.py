"""Layers that keep a state: what it is, a step of them, and what a module of the model gets to compute with.

All is computed by the paths `recurrent` and `state_cache` of either twin. All layers of a model have the same slots,
and so one plan per step:

    decodes, with drafts    read the state in the last column, and write the one after each token to the others
    prefills                their states are copied first to where they will be: both are one slot there
    a shared state          likewise, in decodes, too: a plan gives no slot to two sequences
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from refattn.interface import Batch, Part, RecurrentOptions, StatePlan
from refattn.serving.layers import Twin
from refattn.serving.request import Request
from refattn.serving.state_pool import Slots, StatePool

StateParts = tuple[tuple[slice, StatePlan], ...]  # of a step: the query rows of each part, and their plan


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
        return outs[0] if len(outs) == 1 else torch.cat(outs)

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
        return outs[0] if len(outs) == 1 else torch.cat(outs)


def plan_states(
    twin: Twin,
    batch: Batch,
    requests: Sequence[Request],
    query_lens: Sequence[int],
    pool: StatePool,
    pools: Sequence[StatePools],
) -> StateParts:
    """Plan a step of all layers that keep a state, and copy the states of prefills to where they will be.

    Args:
        twin: the package that computes.
        batch: the lengths of the step, decodes before prefills.
        requests: of each sequence.
        query_lens: the new tokens of each.
        pool: which slots they have.
        pools: of all layers.
    """
    parts: Sequence[Part] = [Part(batch, slice(None))]
    if min(query_lens) <= pool.decode_len < max(query_lens):
        parts = twin.metadata.split_decodes_and_prefills(batch, query_lens, decode_len=pool.decode_len)
    plans, first = [], 0
    for part in parts:
        end = first + part.batch.num_seqs
        slots = [pool.slots[request] for request in requests[first:end]]
        plans.append((part.tokens, _plan_part(twin, part.batch, slots, query_lens[first:end], pool, pools)))
        first = end
    return tuple(plans)


def _plan_part(
    twin: Twin,
    batch: Batch,
    slots: Sequence[Slots],
    query_lens: Sequence[int],
    pool: StatePool,
    pools: Sequence[StatePools],
) -> StatePlan:
    """Plan some decodes or some prefills, and copy the states of the latter."""

    def table(rows: Sequence[Any], dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.tensor(rows, dtype=dtype, device=batch.device)

    options = _checkpoints(batch, slots, query_lens, pool.block_size)
    are_decodes = query_lens[0] <= pool.decode_len
    pairs, rows, columns = [], [], []
    for one in slots:
        start, unused = -1 if one.start is None else one.start, [-1] * (pool.decode_len - len(one.targets))
        if start >= 0 and (not are_decodes or pool.is_shared(start)):
            pairs.append((start, one.targets[-1]))
            start = -1
        rows.append([*one.targets, *unused, start])
        columns.append(len(one.targets) if start < 0 else pool.decode_len + 1)  # where the state is
    if pairs:
        twin.state_cache.copy([x for layer in pools for x in layer if x is not None], table(pairs, torch.int64))
    if are_decodes:
        options |= dict(state_indices=table(rows), num_accepted=table(columns))
    else:
        options["state_indices"] = table([one.targets[0] for one in slots])
    plan: StatePlan = twin.recurrent.plan(batch, **options)
    return plan


def _checkpoints(batch: Batch, slots: Sequence[Slots], query_lens: Sequence[int], block_size: int) -> dict[str, Any]:
    """Return the slots of the states that are kept, with a column for each block that a sequence may end."""
    if all(one.checkpoint is None for one in slots):
        return {}
    columns = max((one.first + query_len) // block_size for one, query_len in zip(slots, query_lens, strict=True))
    indices = torch.full((len(slots), columns), -1, dtype=torch.int32)
    for row, one in zip(indices, slots, strict=True):
        if one.checkpoint is not None:
            block, slot = one.checkpoint
            row[block] = slot
    return dict(checkpoint_indices=indices.to(batch.device), block_size=block_size)
