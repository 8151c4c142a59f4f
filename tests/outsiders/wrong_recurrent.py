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


def accepted_counted_from_zero(
    query,
    key,
    value,
    log_decay,
    beta,
    states,
    state_indices,
    has_initial_state,
    num_accepted,
    cu_seqlens_q,
    scale=None,
):
    """A state per draft: the step begins in column `num_accepted`, one after that of the last accepted token."""
    if state_indices.ndim == 1:
        slots = state_indices
        arguments = (query, key, value, log_decay, beta, states, slots, has_initial_state, cu_seqlens_q, scale)
        return _recurrent(*arguments)
    out = torch.zeros(value.shape, dtype=query.dtype)
    for b, slots in enumerate(state_indices.tolist()):
        q0, q1 = int(cu_seqlens_q[b]), int(cu_seqlens_q[b + 1])
        if slots[0] < 0 or q0 == q1:
            continue
        accepted = 0 if num_accepted is None else min(int(num_accepted[b]), len(slots) - 1)
        state = states[slots[accepted]].clone()[None]
        has_state = has_initial_state[b : b + 1]
        for row in range(q0, q1):
            one = [x[row : row + 1] for x in (query, key, value, log_decay, beta)]
            out[row] = _recurrent(*one, state, torch.tensor([0]), has_state, torch.tensor([0, 1]), scale)[0]
            states[slots[row - q0]], has_state = state[0], torch.tensor([True])
    return out
