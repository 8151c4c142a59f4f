"""1 · One program per sequence and head.

A program loads the state of one head, goes through the tokens of its sequence, and stores the state. In between it
stays in registers: 128 x 128 elements of float32 are a quarter of those of an SM. States are copied out of their pool
before, and back after.

Gain: one launch in place of ten per token, and no state goes to memory between two tokens. What is left for a prompt is
a chain: a token waits for the one before it.

Source: Yang et al. 2024, "Parallelizing Linear Transformers with the Delta Rule over Sequence Length"; notebook 17.
"""

import torch
import triton
import triton.language as tl
from jaxtyping import Bool, Float, Int32
from torch import Tensor

from twinattn.course.ladder import check_states


@triton.jit
def fold(
    query, key,  # [t, h, dk]
    value,  # [t, hv, dv]
    log_decay, beta,  # [t, hv]
    states,  # [b, hv, dv, dk], of these sequences
    cu_seqlens_q,  # [b+1]
    out,  # [t, hv, dv]
    scale,
    HEADS: tl.constexpr, GROUP: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr,
):  # fmt: skip
    sequence, head = tl.program_id(0), tl.program_id(1)
    first, last = tl.load(cu_seqlens_q + sequence), tl.load(cu_seqlens_q + sequence + 1)
    if first == last:
        return
    at_v, at_k = tl.arange(0, DV), tl.arange(0, DK)
    of_state = states + (sequence * HEADS + head) * DV * DK + at_v[:, None] * DK + at_k[None, :]
    state = tl.load(of_state)
    for row in range(first, last):
        k = tl.load(key + (row * (HEADS // GROUP) + head // GROUP) * DK + at_k).to(tl.float32)
        q = tl.load(query + (row * (HEADS // GROUP) + head // GROUP) * DK + at_k).to(tl.float32)
        v = tl.load(value + (row * HEADS + head) * DV + at_v).to(tl.float32)
        state *= tl.exp(tl.load(log_decay + row * HEADS + head))
        written = tl.load(beta + row * HEADS + head) * (v - tl.sum(state * k[None, :], 1))
        state += written[:, None] * k[None, :]
        tl.store(out + (row * HEADS + head) * DV + at_v, tl.sum(state * q[None, :], 1) * scale)
    tl.store(of_state, state)


def attention(
    query: Float[Tensor, "t h dk"],
    key: Float[Tensor, "t h dk"],
    value: Float[Tensor, "t hv dv"],
    log_decay: Float[Tensor, "t hv"],
    beta: Float[Tensor, "t hv"],
    states: Float[Tensor, "n hv dv dk"],
    cu_seqlens_q: Int32[Tensor, "_"],  # [b+1]
    state_indices: Int32[Tensor, "b"],
    has_initial_state: Bool[Tensor, "b"],
    scale: float | None = None,
) -> Float[Tensor, "t hv dv"]:
    """Fold the new tokens of each sequence into its state, and read the state after each."""
    tensors = query, key, value, log_decay, beta, states
    t, b, heads, group, key_size, value_size = check_states(*tensors, cu_seqlens_q, state_indices, has_initial_state)
    scale = key_size**-0.5 if scale is None else scale
    out = torch.empty_like(value)
    before = states.index_select(0, state_indices).float()
    own = before.masked_fill(~has_initial_state[:, None, None, None], 0.0)
    fold[b, heads](
        *(*tensors[:5], own, cu_seqlens_q, out, scale),
        **dict(HEADS=heads, GROUP=group, DK=key_size, DV=value_size, num_warps=8),
    )
    has_tokens = (cu_seqlens_q[1:] > cu_seqlens_q[:-1])[:, None, None, None]
    states.index_copy_(0, state_indices.long(), own.where(has_tokens, before).to(states.dtype))
    return out
