"""Layers that keep a state, by chunks of tokens instead of one by one; the twin of `refattn.recurrent`."""

from jaxtyping import Bool, Float, Int32
from torch import Tensor

from fastattn.kernels import dispatch
from refattn.interface import Batch, RecurrentOptions, StatePlan
from refattn.interface.states import check_convolution, check_recurrent


def plan(
    batch: Batch,
    *,
    state_indices: Int32[Tensor, "b"] | Int32[Tensor, "b c"],
    has_initial_state: Bool[Tensor, "b"] | None = None,
    num_accepted: Int32[Tensor, "b"] | None = None,
    checkpoint_indices: Int32[Tensor, "b m"] | None = None,
    block_size: int | None = None,
) -> StatePlan:
    """Plan a step of all layers that keep a state; the twin of `refattn.recurrent.plan`."""
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
    return dispatch.recurrent(query, key, value, log_decay, beta, states, plan, options, out)


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
    """Mix each channel of a token with its last few inputs; the twin of `refattn.recurrent.convolve`.

    Raises:
        NotImplementedError: if no kernel computes the combination, with the reason of each.
    """
    check_convolution(inputs, weight, bias, states, plan, silu, out)
    return dispatch.convolve(inputs, weight, states, plan, bias, silu, out)
