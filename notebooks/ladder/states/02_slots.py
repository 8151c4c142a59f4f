"""2 · Slots: a state is read and written where it is.

A program reads the slot of its sequence, loads the state from there, and stores it there. A sequence that begins takes
zeros, whatever its slot holds; one without tokens touches nothing.

Gain: two copies of all states go. A decode reads a state and writes it, and that is all it has to do to memory; the
copies did both again, twice. For a prompt it is nothing: its state is read once, and its tokens are many.

Source: `MambaSpec` of vLLM; refattn/state_cache.py; docs/paths/recurrent.md.
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
    states,  # [n, hv, dv, dk]
    cu_seqlens_q,  # [b+1]
    state_indices, has_initial_state,  # [b]
    out,  # [t, hv, dv]
    scale,
    HEADS: tl.constexpr, GROUP: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr,
):  # fmt: skip
    sequence, head = tl.program_id(0), tl.program_id(1)
    first, last = tl.load(cu_seqlens_q + sequence), tl.load(cu_seqlens_q + sequence + 1)
    if first == last:
        return
    slot = tl.load(state_indices + sequence).to(tl.int64)
    has_state = tl.load(has_initial_state + sequence) != 0
    at_v, at_k = tl.arange(0, DV), tl.arange(0, DK)
    of_state = states + (slot * HEADS + head) * DV * DK + at_v[:, None] * DK + at_k[None, :]
    state = tl.load(of_state, mask=has_state, other=0.0).to(tl.float32)
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
    fold[b, heads](
        *(*tensors, cu_seqlens_q, state_indices, has_initial_state, out, scale),
        **dict(HEADS=heads, GROUP=group, DK=key_size, DV=value_size, num_warps=8),
    )
    return out
