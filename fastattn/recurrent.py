"""Recurrent layers, by chunks of tokens instead of one by one; the twin of `refattn.recurrent`."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from jaxtyping import Bool, Float, Int32
from torch import Tensor

from fastattn import dispatch
from fastattn.kernels.kernel import STATES
from fastattn.kernels.order import refuse_unknown
from fastattn.kernels.problem import places
from refattn.batch import Batch, check_batch
from refattn.modes import refuse_gradients, without_autocast
from refattn.options import RecurrentOptions
from refattn.states import StateMap, StatePlan, check_compose, check_convolution, check_recurrent, check_state_map


def plan(
    batch: Batch,
    *,
    state_indices: Int32[Tensor, "b"] | Int32[Tensor, "b c"],
    has_initial_state: Bool[Tensor, "b"] | None = None,
    num_accepted: Int32[Tensor, "b"] | None = None,
    checkpoint_indices: Int32[Tensor, "b m"] | None = None,
    block_size: int | None = None,
) -> StatePlan:
    """Plan a step of all recurrent layers; the twin of `refattn.recurrent.plan`."""
    check_batch(batch)
    has_state = batch.seq_lens > batch.query_lens if has_initial_state is None else has_initial_state
    return StatePlan(batch, state_indices, has_state, num_accepted, checkpoint_indices, block_size)


def attention(
    query: Float[Tensor, "t h dk"],
    key: Float[Tensor, "t h dk"],
    value: Float[Tensor, "t hv dv"],
    log_decay: Float[Tensor, "t hv"] | Float[Tensor, "t hv dk"],
    beta: Float[Tensor, "t hv"],
    states: Float[Tensor, "n hv dv dk"],
    plan: StatePlan,
    options: RecurrentOptions = RecurrentOptions(),
    *,
    out: Float[Tensor, "t hv dv"] | None = None,
) -> Float[Tensor, "t hv dv"]:
    """Fold the new tokens of each sequence into its state, and read the state after each.

    Arguments, results and errors are those of `refattn.recurrent.attention`.

    Raises:
        NotImplementedError: if no kernel computes the combination, with the reason of each.
    """
    check_recurrent(query, key, value, log_decay, beta, states, plan, options, out)
    tensors = dict(query=query, key=key, value=value, log_decay=log_decay, beta=beta, states=states)
    memory = dispatch.memory_for(out, *tensors.values())
    result: Tensor = dispatch.run("recurrent", **tensors, plan=plan, options=options, out=memory)
    return result if out is None or memory is out else out.copy_(result)


def state_map(
    key: Float[Tensor, "t h dk"],
    value: Float[Tensor, "t hv dv"],
    log_decay: Float[Tensor, "t hv"] | Float[Tensor, "t hv dk"],
    beta: Float[Tensor, "t hv"],
    plan: StatePlan,
    options: RecurrentOptions = RecurrentOptions(),
) -> StateMap:
    """Return the map that new tokens apply to a state; the twin of `refattn.recurrent.state_map`.

    The kernels of `attention` compute both parts: `added` in a pool of zeros, and `factor` in a pool of identities with
    values of 0. Without the delta rule `factor` is just the product of the decays.

    Raises:
        NotImplementedError: if no kernel computes the combination, with the reason of each.
    """
    check_state_map(key, value, log_decay, beta, plan, options)
    refuse_gradients(dispatch.NO_BACKWARD, key=key, value=value, log_decay=log_decay, beta=beta)
    refuse_unknown("recurrent.state_map", STATES, plan, options)
    (t, hv, dv), dk, b = value.shape, key.shape[-1], plan.batch.num_seqs
    compute, device = torch.promote_types(key.dtype, torch.float32), key.device
    slots = plan.state_indices[:, 0] if plan.per_draft else plan.state_indices
    slots = torch.arange(b, dtype=torch.int32, device=device).where(slots >= 0, -1)
    gates = log_decay, beta

    added = torch.zeros(b, hv, dv, dk, dtype=compute, device=device)
    from_zeros = StatePlan(plan.batch, slots, torch.zeros(b, dtype=torch.bool, device=device))
    attention(key, key, value, *gates, added, from_zeros, options)
    if options.delta:
        factor = torch.eye(dk, dtype=compute, device=device).expand(b, hv, dk, dk).contiguous()
        nothing = key.new_zeros(()).expand(t, hv, dk)
        attention(key, key, nothing, *gates, factor, replace(from_zeros, has_initial_state=slots >= 0), options)
        return StateMap(factor, added)
    sequence, _, padding = places(plan.batch, t)
    logs = log_decay.to(compute) if log_decay.ndim == 3 else log_decay[..., None].expand(t, hv, dk).to(compute)
    unused = padding | (slots[sequence] < 0) if b else padding
    sums = torch.zeros(b + 1, hv, dk, dtype=compute, device=device)
    sums.index_add_(0, sequence.where(~unused, b), logs)
    return StateMap(sums[:b].exp().diag_embed(), added)


@without_autocast
def compose(maps: Sequence[StateMap]) -> StateMap:
    """Compose the maps of consecutive ranges of tokens into one; the twin of `refattn.recurrent.compose`."""
    check_compose(maps)
    factor, added = maps[0]
    for after in maps[1:]:
        factor, added = factor @ after.factor, added @ after.factor + after.added
    return StateMap(factor, added)


def convolve(
    inputs: Float[Tensor, "t c"],
    weight: Float[Tensor, "c width"],
    states: Float[Tensor, "n w c"],
    plan: StatePlan,
    *,
    bias: Float[Tensor, "c"] | None = None,
    silu: bool = True,
    out: Float[Tensor, "t c"] | None = None,
) -> Float[Tensor, "t c"]:
    """Apply a causal convolution to each channel, then SiLU; the twin of `refattn.recurrent.convolve`.

    Raises:
        NotImplementedError: if no kernel computes the combination, with the reason of each.
    """
    check_convolution(inputs, weight, bias, states, plan, silu, out)
    memory = dispatch.memory_for(out, inputs, weight, states, bias)
    result: Tensor = dispatch.run(
        "convolve", inputs=inputs, weight=weight, states=states, plan=plan, bias=bias, silu=silu, out=memory
    )
    return result if out is None or memory is out else out.copy_(result)
