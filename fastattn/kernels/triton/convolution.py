"""The short causal convolution of layers with a state, in Triton, per channel; a state keeps the last inputs."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, no_type_check

import torch
import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor

from fastattn.kernels.replay import key_of_launch, launch_once
from fastattn.kernels.triton.launch import Launch
from fastattn.kernels.triton.states import CHANGING, States, checkpoint_slot, draft_slot, find_sequence, tables_of
from refattn.states import StatePlan

BLOCK_T, BLOCK_C = 32, 128  # tokens and channels of a tile of the convolution


def convolve(
    inputs: Float[Tensor, "t c"],
    weight: Float[Tensor, "c width"],
    states: Float[Tensor, "n w c"],
    plan: StatePlan,
    bias: Float[Tensor, "c"] | None,
    silu: bool,
    out: Float[Tensor, "t c"] | None,
) -> Float[Tensor, "t c"]:
    """Convolve each channel with its last inputs, then store the last inputs; see `fastattn.dispatch`.

    A second launch writes the states that the first one reads, so that tiles of tokens need not wait for one another.
    """
    out = torch.empty_like(inputs, memory_format=torch.contiguous_format) if out is None else out
    if not len(inputs):
        return out
    tensors = inputs, weight, bias, states, out
    launch_once(plan, key_of_launch(("convolve", silu), tensors), tensors, partial(_launch, *tensors, plan, silu))
    return out


def _launch(
    inputs: Tensor, weight: Tensor, bias: Tensor | None, states: Tensor, out: Tensor, plan: StatePlan, silu: bool
) -> Callable[..., None]:
    """Launch both kernels, and return the replay."""
    (num_tokens, channels), width = inputs.shape, weight.shape[1]
    num_seqs, blocks = plan.batch.num_seqs, triton.cdiv(channels, BLOCK_C)
    tiles = triton.cdiv(max(plan.batch.max_query_len, 1), BLOCK_T)
    bias_stride = 0 if bias is None else bias.stride(0)
    of_both: dict[str, Tensor | None] = {"inputs.rows": inputs, "states.pool": states}
    shared = dict(
        inputs=Inputs(inputs, inputs.stride(), CHANNELS=tl.constexpr(channels), WIDTH=tl.constexpr(width)),
        states=States(states, states.stride()),
        tables=tables_of(plan, num_tokens),
        BLOCK_C=BLOCK_C,
    )
    mix = Launch(
        _convolve_kernel,
        (num_seqs + 1, blocks, tiles),
        {"weights.weight": weight, "weights.bias": bias, "out": out} | of_both,
        dict(weights=Weights(weight, bias, weight.stride(), bias_stride, SILU=tl.constexpr(silu)))
        | dict(out_strides=out.stride(), BLOCK_T=BLOCK_T)
        | shared,
        {},
    )
    keep = Launch(_keep_inputs_kernel, (num_seqs, blocks), of_both, shared, {}) if width > 1 and num_seqs else None

    def replay(inputs: Tensor, weight: Tensor, bias: Tensor | None, states: Tensor, out: Tensor) -> None:
        mix.replay(weight, bias, out, inputs, states)
        if keep is not None:
            keep.replay(inputs, states)

    return replay


class Inputs(NamedTuple):
    """The channels of all tokens.

    Attributes:
        rows: [t, c].
        strides: of tokens and channels.
        CHANNELS: c.
        WIDTH: inputs of an output, the token's own included.
    """

    rows: Any
    strides: Any
    CHANNELS: Any
    WIDTH: Any


class Weights(NamedTuple):
    """The parameters of a layer.

    Attributes:
        weight: [c, width].
        bias: [c], or None.
        strides: of channels and inputs in `weight`.
        bias_stride: of channels in `bias`.
        SILU: whether SiLU is applied to the sum.
    """

    weight: Any
    bias: Any
    strides: Any
    bias_stride: Any
    SILU: Any


# Triton's interpreter finds a function only if it is defined above its caller.


@triton.jit
@no_type_check
def _keep(inputs, states, sequence, channel, end, slot):
    """Write the inputs before some token to a slot, oldest first: each is read before its own memory is written."""
    in_channels = channel < inputs.CHANNELS
    of_inputs = inputs.rows + channel * inputs.strides[1]
    of_states = states.pool + channel * states.strides[2]
    for w in tl.static_range(inputs.WIDTH - 1):
        source = end + (w - inputs.WIDTH + 1)
        x = tl.load(of_inputs + (sequence.first_row + source) * inputs.strides[0], in_channels & (source >= 0), 0.0)
        at = sequence.start * states.strides[0] + tl.cast(source + inputs.WIDTH - 1, tl.int64) * states.strides[1]
        before = tl.load(of_states + at, in_channels & (source < 0) & (sequence.start >= 0), 0.0).to(tl.float32)
        x = tl.where(source >= 0, x.to(tl.float32), before).to(of_states.dtype.element_ty)
        own = of_states + slot * states.strides[0] + tl.cast(w, tl.int64) * states.strides[1]
        tl.store(own, x, in_channels & (slot >= 0))


@triton.jit(do_not_specialize=CHANGING)
@no_type_check
def _convolve_kernel(inputs, weights, states, out, out_strides, tables, BLOCK_T: tl.constexpr, BLOCK_C: tl.constexpr):
    """Compute some tokens and channels of a sequence."""
    sequence = find_sequence(tables, tl.program_id(0))
    channel = (tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)).to(tl.int64)
    in_channels = channel < inputs.CHANNELS
    for first in range(tl.program_id(2) * BLOCK_T, sequence.length, tl.num_programs(2) * BLOCK_T):
        token = first + tl.arange(0, BLOCK_T)
        total = tl.zeros([BLOCK_T, BLOCK_C], tl.float32)
        if sequence.slot >= 0:
            if weights.bias is not None:
                bias = tl.load(weights.bias + channel * weights.bias_stride, in_channels, 0.0)
                total += bias.to(tl.float32)[None, :]
            for w in tl.static_range(inputs.WIDTH):
                source = token + (w - inputs.WIDTH + 1)
                of_inputs = inputs.rows + (sequence.first_row + source)[:, None] * inputs.strides[0]
                is_new = ((source >= 0) & (source < sequence.length))[:, None] & in_channels[None, :]
                x = tl.load(of_inputs + channel[None, :] * inputs.strides[1], is_new, 0.0).to(tl.float32)
                before = (source + inputs.WIDTH - 1).to(tl.int64)[:, None]
                of_states = states.pool + (sequence.start * states.strides[0] + before * states.strides[1])
                is_old = ((source < 0) & (sequence.start >= 0))[:, None] & in_channels[None, :]
                x += tl.load(of_states + channel[None, :] * states.strides[2], is_old, 0.0).to(tl.float32)
                of_weight = weights.weight + channel * weights.strides[0] + tl.cast(w, tl.int64) * weights.strides[1]
                total += x * tl.load(of_weight, in_channels, 0.0).to(tl.float32)[None, :]
            if weights.SILU:
                total = total / (1.0 + tl.exp(-total))
        of_out = out + (sequence.first_row + token)[:, None] * out_strides[0] + channel[None, :] * out_strides[1]
        is_own = (token < sequence.length)[:, None] & in_channels[None, :]
        tl.store(of_out, total.to(out.dtype.element_ty), is_own)


@triton.jit(do_not_specialize=CHANGING)
@no_type_check
def _keep_inputs_kernel(inputs, states, tables, BLOCK_C: tl.constexpr):
    """Write the last inputs of some channels of a sequence; the slot that is read from is written last."""
    sequence = find_sequence(tables, tl.program_id(0))
    if sequence.slot < 0:
        return
    channel = (tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)).to(tl.int64)
    if tables.BLOCK_SIZE:
        first_end = tables.BLOCK_SIZE - sequence.position % tables.BLOCK_SIZE
        for end in range(first_end, sequence.length + 1, tables.BLOCK_SIZE):
            own = checkpoint_slot(tables, sequence, sequence.position + end)
            _keep(inputs, states, sequence, channel, end, own)
    if tables.PER_DRAFT:
        last = 0
        for token in range(0, sequence.length):
            own = draft_slot(tables, sequence, token)
            if own == sequence.start:
                last = token + 1
            else:
                _keep(inputs, states, sequence, channel, token + 1, own)
        if (last > 0) & (sequence.start >= 0):
            _keep(inputs, states, sequence, channel, last, sequence.start)
    else:
        _keep(inputs, states, sequence, channel, sequence.length, sequence.slot)
