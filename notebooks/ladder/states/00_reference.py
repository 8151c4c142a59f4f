"""0 · The formula.

The gated delta rule. A head has a state, a matrix. Each token lets it fade, looks up what it returns for the token's
key, writes the difference to the token's value under that key, and reads it with the query.

Gain: none, this is the reference. It says what is right, and every rung is held to it. Each token takes some ten
launches, one after the other, each of which reads or writes the states of all heads.

Source: Yang et al. 2024, "Gated Delta Networks"; refattn/recurrent.py.
"""

from itertools import pairwise

import torch
from einops import einsum, repeat
from jaxtyping import Bool, Float, Int32
from torch import Tensor

from refattn.modes import compute_dtype


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
    compute, group = compute_dtype(query.dtype), value.shape[1] // key.shape[1]
    scale = key.shape[2] ** -0.5 if scale is None else scale
    q, k = (repeat(x.to(compute), "t h dk -> t (h g) dk", g=group) for x in (query, key))
    v, decay, rate = value.to(compute), log_decay.to(compute).exp(), beta.to(compute)
    out = torch.empty_like(v)
    slots, has_state = state_indices.tolist(), has_initial_state.tolist()
    for sequence, (first, last) in enumerate(pairwise(cu_seqlens_q.tolist())):
        if first == last:
            continue
        state = states[slots[sequence]].to(compute)  # [hv, dv, dk]
        state = state if has_state[sequence] else torch.zeros_like(state)
        for row in range(first, last):
            state = state * decay[row, :, None, None]
            seen = einsum(state, k[row], "hv dv dk, hv dk -> hv dv")
            written = rate[row, :, None] * (v[row] - seen)
            state = state + einsum(written, k[row], "hv dv, hv dk -> hv dv dk")
            out[row] = einsum(state, q[row] * scale, "hv dv dk, hv dk -> hv dv")
        states[slots[sequence]] = state
    return out.to(query.dtype)
