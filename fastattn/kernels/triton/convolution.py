"""The convolution of layers with a state, in Triton: short, causal, by channel; a state keeps the last inputs."""

from typing import no_type_check

import torch
import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor

from fastattn.kernels.triton.states import CHANGING, find_sequence, tables_of
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
    """Convolve each channel with its last inputs, then write the last of them; see `fastattn.dispatch`.

    The second launch writes what the first one reads, so that tiles of tokens need not wait for one another.
    """
    (num_tokens, channels), width = inputs.shape, weight.shape[1]
    out = torch.empty_like(inputs, memory_format=torch.contiguous_format) if out is None else out
    if not num_tokens:
        return out
    num_seqs, blocks = plan.batch.num_seqs, triton.cdiv(channels, BLOCK_C)
    shared = dict(
        inputs=inputs,
        states=states,
        inputs_strides=inputs.stride(),
        states_strides=states.stride(),
        **tables_of(plan, num_tokens),
        CHANNELS=channels,
        WIDTH=width,
        BLOCK_C=BLOCK_C,
    )
    tiles = triton.cdiv(max(plan.batch.max_query_len, 1), BLOCK_T)
    _convolve_kernel[(num_seqs + 1, blocks, tiles)](
        **shared,
        weight=weight,
        bias=bias,
        out=out,
        weight_strides=weight.stride(),
        bias_stride=0 if bias is None else bias.stride(0),
        out_strides=out.stride(),
        SILU=silu,
        BLOCK_T=BLOCK_T,
    )
    if width > 1 and num_seqs:
        _keep_inputs_kernel[(num_seqs, blocks)](**shared)
    return out


# Triton's interpreter finds a function only if it stands above the one that calls it.


@triton.jit
@no_type_check
def _keep(
    of_inputs, of_states, row_stride, states_strides, first_row, end, start, slot, in_channels, WIDTH: tl.constexpr
):
    """Write the inputs before some token to a slot, oldest first: each is read before its own memory is written."""
    for w in tl.static_range(WIDTH - 1):
        source = end + (w - WIDTH + 1)
        x = tl.load(of_inputs + (first_row + source) * row_stride, in_channels & (source >= 0), 0.0)
        old = of_states + start * states_strides[0] + tl.cast(source + WIDTH - 1, tl.int64) * states_strides[1]
        before = tl.load(old, in_channels & (source < 0) & (start >= 0), 0.0).to(tl.float32)
        x = tl.where(source >= 0, x.to(tl.float32), before).to(of_states.dtype.element_ty)
        own = of_states + slot * states_strides[0] + tl.cast(w, tl.int64) * states_strides[1]
        tl.store(own, x, in_channels & (slot >= 0))


@triton.jit(do_not_specialize=CHANGING)
@no_type_check
def _convolve_kernel(
    inputs,
    states,
    weight,
    bias,
    out,
    inputs_strides,
    states_strides,
    weight_strides,
    bias_stride,
    out_strides,
    cu_seqlens_q,
    seq_lens,
    state_indices,
    has_initial_state,
    num_accepted,
    checkpoints,
    table_stride,
    column_stride,
    has_stride,
    accepted_stride,
    checkpoint_stride,
    checkpoint_column_stride,
    num_seqs,
    num_tokens,
    CHANNELS: tl.constexpr,
    WIDTH: tl.constexpr,
    SILU: tl.constexpr,
    PER_DRAFT: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Compute some tokens and channels of a sequence."""
    sequence = tl.program_id(0)
    first_row, length, _, slot, start = find_sequence(
        sequence,
        cu_seqlens_q,
        seq_lens,
        state_indices,
        has_initial_state,
        num_accepted,
        table_stride,
        column_stride,
        has_stride,
        accepted_stride,
        num_seqs,
        num_tokens,
    )
    channel = (tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)).to(tl.int64)
    in_channels = (channel < CHANNELS)[None, :]
    for first in range(tl.program_id(2) * BLOCK_T, length, tl.num_programs(2) * BLOCK_T):
        token = first + tl.arange(0, BLOCK_T)
        total = tl.zeros([BLOCK_T, BLOCK_C], tl.float32)
        if slot >= 0:
            if bias is not None:
                total += tl.load(bias + channel * bias_stride, channel < CHANNELS, 0.0).to(tl.float32)[None, :]
            for w in tl.static_range(WIDTH):
                source = token + (w - WIDTH + 1)
                of_inputs = inputs + (first_row + source)[:, None] * inputs_strides[0]
                is_new = ((source >= 0) & (source < length))[:, None] & in_channels
                x = tl.load(of_inputs + channel[None, :] * inputs_strides[1], is_new, 0.0).to(tl.float32)
                at = start * states_strides[0] + (source + WIDTH - 1).to(tl.int64)[:, None] * states_strides[1]
                is_old = ((source < 0) & (start >= 0))[:, None] & in_channels
                x += tl.load(states + at + channel[None, :] * states_strides[2], is_old, 0.0).to(tl.float32)
                of_weight = weight + channel * weight_strides[0] + tl.cast(w, tl.int64) * weight_strides[1]
                total += x * tl.load(of_weight, channel < CHANNELS, 0.0).to(tl.float32)[None, :]
            if SILU:
                total = total / (1.0 + tl.exp(-total))
        of_out = out + (first_row + token)[:, None] * out_strides[0] + channel[None, :] * out_strides[1]
        tl.store(of_out, total.to(out.dtype.element_ty), (token < length)[:, None] & in_channels)


@triton.jit(do_not_specialize=CHANGING)
@no_type_check
def _keep_inputs_kernel(
    inputs,
    states,
    inputs_strides,
    states_strides,
    cu_seqlens_q,
    seq_lens,
    state_indices,
    has_initial_state,
    num_accepted,
    checkpoints,
    table_stride,
    column_stride,
    has_stride,
    accepted_stride,
    checkpoint_stride,
    checkpoint_column_stride,
    num_seqs,
    num_tokens,
    CHANNELS: tl.constexpr,
    WIDTH: tl.constexpr,
    PER_DRAFT: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Write the last inputs of some channels of a sequence; the slot that they are read from is the last one."""
    sequence = tl.program_id(0)
    first_row, length, position, slot, start = find_sequence(
        sequence,
        cu_seqlens_q,
        seq_lens,
        state_indices,
        has_initial_state,
        num_accepted,
        table_stride,
        column_stride,
        has_stride,
        accepted_stride,
        num_seqs,
        num_tokens,
    )
    if slot < 0:
        return
    channel = (tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)).to(tl.int64)
    in_channels = channel < CHANNELS
    of_inputs = inputs + channel * inputs_strides[1]
    of_states = states + channel * states_strides[2]
    if BLOCK_SIZE:
        for end in range(BLOCK_SIZE - position % BLOCK_SIZE, length + 1, BLOCK_SIZE):
            column = ((position + end) // BLOCK_SIZE - 1).to(tl.int64)
            of_slot = checkpoints + sequence.to(tl.int64) * checkpoint_stride + column * checkpoint_column_stride
            own = tl.load(of_slot).to(tl.int64)
            _keep(
                of_inputs, of_states, inputs_strides[0], states_strides, first_row, end, start, own, in_channels, WIDTH
            )
    if PER_DRAFT:
        row = state_indices + sequence.to(tl.int64) * table_stride
        last = 0
        for token in range(0, length):
            own = tl.load(row + tl.cast(token, tl.int64) * column_stride).to(tl.int64)
            if own == start:
                last = token + 1
            else:
                _keep(
                    of_inputs,
                    of_states,
                    inputs_strides[0],
                    states_strides,
                    first_row,
                    token + 1,
                    start,
                    own,
                    in_channels,
                    WIDTH,
                )
        if (last > 0) & (start >= 0):
            _keep(
                of_inputs,
                of_states,
                inputs_strides[0],
                states_strides,
                first_row,
                last,
                start,
                start,
                in_channels,
                WIDTH,
            )
    else:
        _keep(
            of_inputs, of_states, inputs_strides[0], states_strides, first_row, length, start, slot, in_channels, WIDTH
        )
