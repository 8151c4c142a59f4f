"""Layers that keep a state, wrong."""

import torch


def _recurrent(query, key, value, log_decay, beta, states, slots, has_state, ends, scale, start=None, decays=True):
    """Fold token by token; `decays(k)` says whether token `k` of a sequence lets the state fade."""
    group = value.shape[1] // query.shape[1]
    scale = query.shape[2] ** -0.5 if scale is None else scale
    query, key = (x.float().repeat_interleave(group, 1) for x in (query, key))
    out = torch.zeros(value.shape)
    for b, slot in enumerate(slots.tolist()):
        if slot < 0:
            continue
        if start is not None:
            start(b, slot)
        q0, q1 = int(ends[b]), int(ends[b + 1])
        if q0 == q1:
            continue
        state = states[slot].float().clone() if has_state[b] else torch.zeros(states.shape[1:])
        for k, row in enumerate(range(q0, q1)):
            if decays is True or decays(k):
                state = state * log_decay[row].float().exp()[:, None, None]
            seen = torch.einsum("hvk,hk->hv", state, key[row])
            delta = beta[row].float()[:, None] * (value[row].float() - seen)
            state = state + torch.einsum("hv,hk->hvk", delta, key[row])
            out[row] = torch.einsum("hvk,hk->hv", state, query[row] * scale)
        states[slot] = state.to(states.dtype)
    return out.to(query.dtype if value.dtype == torch.float32 else value.dtype)


def fresh_state_cleared_first(
    query, key, value, log_decay, beta, states, state_indices, has_initial_state, cu_seqlens_q, scale=None
):
    """States of beginners are cleared in the pool before the step, also of a sequence without new tokens."""

    def start(b, slot):
        if not has_initial_state[b]:
            states[slot] = 0.0

    arguments = (query, key, value, log_decay, beta, states, state_indices, has_initial_state, cu_seqlens_q, scale)
    return _recurrent(*arguments, start=start)


def no_decay_between_chunks(
    query, key, value, log_decay, beta, states, state_indices, has_initial_state, cu_seqlens_q, scale=None
):
    """The first token of every chunk of 64 but the first does not let the state before it fade."""
    arguments = (query, key, value, log_decay, beta, states, state_indices, has_initial_state, cu_seqlens_q, scale)
    return _recurrent(*arguments, decays=lambda k: k == 0 or k % 64 != 0)
