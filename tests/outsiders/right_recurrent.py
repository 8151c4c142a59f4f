"""Layers that keep a state, right."""

import torch


def decode_of_one_token(query, key, value, log_decay, beta, states, state_indices, scale=None):
    """A decode of the whole batch at once, whose padding is masked out and never indexed."""
    group, live = value.shape[1] // query.shape[1], (state_indices >= 0).nonzero().flatten()
    slots = state_indices[live].long()
    q, k = (x[live].float().repeat_interleave(group, 1) for x in (query, key))
    v, decay, write = value[live].float(), log_decay[live].float().exp(), beta[live].float()
    state = states[slots].float() * decay[..., None, None]
    seen = (state @ k[..., None])[..., 0]
    state = state + (write[..., None] * (v - seen))[..., None] * k[:, :, None]
    states[slots] = state.to(states.dtype)
    out = torch.zeros(value.shape, dtype=query.dtype)
    scale = query.shape[2] ** -0.5 if scale is None else scale
    out[live] = (state @ (q * scale)[..., None])[..., 0].to(out.dtype)
    return out
