"""Kernels over rows whose outputs are right, and whose gradients are wrong."""

from math import inf

import torch
from outsider_flash import in_rows, in_window


def _differentiable(query, key, value, cu_seqlens_q, seq_lens, cap=None, heads=None, lse_of=None, window=(-1, -1)):
    """Attend by one softmax per sequence, in the compute type; the hooks change what autograd sees."""
    outs, lses, end = [], [], 0
    group, wide = query.shape[1] // key.shape[1], torch.promote_types(query.dtype, torch.float32)
    for q0, q1, s, read in in_rows(query, key, value, cu_seqlens_q, seq_lens):
        k, v = (x.to(wide).repeat_interleave(group, 1) for x in read(torch.arange(s)))
        k = k if heads is None else heads(k, group)
        sees = in_window(torch.arange(s - q1 + q0, s)[:, None], torch.arange(s)[None], window, True)
        k, v = (x.masked_fill(~sees.any(0)[:, None, None], 0.0) for x in (k, v))
        q = query[q0:q1].to(wide).masked_fill(~sees.any(1)[:, None, None], 0.0)
        x = torch.einsum("thd,shd->hts", q * query.shape[2] ** -0.5, k)
        x = x if cap is None else cap(x)
        x = x.masked_fill(~sees, -inf)
        blind = ~sees.any(1)[:, None]
        weights = x.masked_fill(blind, 0.0).softmax(-1).masked_fill(~sees, 0.0)
        outs.append(torch.einsum("hts,shd->thd", weights, v))
        lse = x.masked_fill(blind, 0.0).logsumexp(-1).masked_fill(blind[:, 0], -inf) if s else x.sum(-1) - inf
        lses.append((lse if lse_of is None else lse_of(lse)).T)
        end = q1
    outs.append(query.new_zeros(len(query) - end, query.shape[1], value.shape[2], dtype=wide))
    lses.append(query.new_full((len(query) - end, query.shape[1]), -inf, dtype=wide))
    return torch.cat(outs).to(query.dtype), torch.cat(lses)


def cap_without_derivative(query, key, value, cu_seqlens_q, seq_lens, softcap=0.0):
    """The gradient goes through the softcap as if it were not there."""

    def cap(x):
        return x + (softcap * torch.tanh(x / softcap) - x).detach() if softcap else x

    return _differentiable(query, key, value, cu_seqlens_q, seq_lens, cap)[0]


def key_of_the_first_head_only(query, key, value, cu_seqlens_q, seq_lens):
    """Of a group of heads only the first one adds to the gradient of its key."""

    def heads(k, group):
        first = torch.arange(k.shape[1]) % group == 0
        return torch.where(first[:, None], k, k.detach())

    return _differentiable(query, key, value, cu_seqlens_q, seq_lens, heads=heads)[0]


def lse_gradient_lost_under_a_window(query, key, value, cu_seqlens_q, seq_lens, window_size=(-1, -1), return_lse=False):
    """With a window, the log-sum-exp has no gradient."""

    def lse_of(lse):
        return lse if window_size[0] < 0 else lse.detach()

    out, lse = _differentiable(query, key, value, cu_seqlens_q, seq_lens, lse_of=lse_of, window=window_size)
    return (out, lse) if return_lse else out
