"""Layers that keep a state, and replay their last inputs: the twin of `refattn.replay`."""

import torch
from jaxtyping import Bool, Float, Int32
from torch import Tensor

from fastattn import dispatch
from refattn import allocation
from refattn.batch import Batch, check_batch
from refattn.options import RecurrentOptions
from refattn.rings import ReplayPlan, Ring, check_advance, check_flush, check_replay, plan_of_slots
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
    """Plan a step of all layers that replay their inputs; the twin of `refattn.replay.plan`."""
    check_batch(batch)
    has_state = batch.seq_lens > batch.query_lens if has_initial_state is None else has_initial_state
    slots = StatePlan(batch, state_indices, has_state)
    return ReplayPlan(slots, cursors, ring_size, flush, drafts, target_indices)


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
    """Rebuild the state of each sequence, fold its new tokens in, and read it after each.

    Arguments, results and errors are those of `refattn.replay.attention`.

    Raises:
        NotImplementedError: if no kernel computes the combination, with the reason of each.
    """
    check_replay(query, key, value, log_decay, beta, states, ring, plan, options, out)
    tensors = dict(query=query, key=key, value=value, log_decay=log_decay, beta=beta, states=states)
    memory = dispatch.memory_for(out, *tensors.values())
    result: Tensor = dispatch.run("replay", **tensors, ring=ring, plan=plan, options=options, out=memory)
    return result if out is None or memory is out else out.copy_(result)


def flush(
    states: list[Float[Tensor, "n hv dv dk"]],
    rings: list[Ring],
    cursors: Int32[Tensor, "n"],
    state_indices: Int32[Tensor, "b"],
    target_indices: Int32[Tensor, "b"] | None = None,
) -> None:
    """Move the checkpoints of some slots to their last input, in all layers; the twin of `refattn.replay.flush`.

    Nothing is written unless there is a kernel for every layer.
    """
    check_flush(states, rings, cursors, state_indices, target_indices)
    ring_size = rings[0].key.shape[1]
    plan = ReplayPlan(plan_of_slots(state_indices), cursors, ring_size, target_indices=target_indices)
    dispatch.run_each("flush", [dict(states=x, ring=ring, plan=plan) for x, ring in zip(states, rings, strict=True)])
    targets = state_indices if target_indices is None else target_indices.where(state_indices >= 0, -1)
    _put(cursors, targets, torch.zeros_like(state_indices))


def advance(cursors: Int32[Tensor, "n"], plan: ReplayPlan, num_accepted: Int32[Tensor, "b"] | None = None) -> None:
    """Move the cursors of a step, in place; the twin of `refattn.replay.advance`, which never synchronizes."""
    check_advance(cursors, plan, num_accepted)
    lens, slots, has_state = plan.batch.query_lens, plan.slots.state_indices, plan.slots.has_initial_state
    is_idle = (slots < 0) | (lens == 0)
    held = plan.cursors[slots.masked_fill(is_idle, 0)].where(has_state, 0)
    total = held + lens
    if num_accepted is not None:
        moves = ~has_state | (total > plan.ring_size)
        after = num_accepted + held.masked_fill(moves, 0)
    else:
        moves = ~has_state | (total >= plan.ring_size)
        moves = moves if plan.flush is None else moves | plan.flush
        after = total.masked_fill(moves, 0)
    if plan.target_indices is not None:
        slots = plan.target_indices.where(moves & (plan.target_indices >= 0), slots)
    _put(cursors, slots.masked_fill(is_idle, -1), after)


def _put(cursors: Int32[Tensor, "n"], slots: Int32[Tensor, "b"], values: Int32[Tensor, "b"]) -> None:
    """Set the cursors of some slots; negative ones are padding, and meet in an entry that is dropped."""
    padded = torch.cat([cursors, cursors.new_zeros(1)])
    padded.scatter_(0, slots.where(slots >= 0, len(cursors)).long(), values)
    cursors.copy_(padded[:-1])
