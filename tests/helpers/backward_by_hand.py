"""A backward by hand, as a stranger writes it: tile by tile from the log-sum-exp, in an autograd function.

It is right. `test_conformance_backward.py` plants a mistake by replacing a line of this file.
"""

import torch

TILE = 16  # keys at a time, and queries


class Attention(torch.autograd.Function):
    """One sequence: `[t, h, d]` queries over `[s, hk, d]` keys."""

    @staticmethod
    def forward(ctx, query, key, value, sinks, slopes, scale, cap, causal, left, right):
        n, s, g = len(query), len(key), query.shape[1] // key.shape[1]
        q = query.float().transpose(0, 1)
        k, v = (x.float().repeat_interleave(g, 1).transpose(0, 1) for x in (key, value))
        scores, _ = compute_scores(q, k, slopes, scale, cap, range(n), range(s), n, s)
        scores = scores.masked_fill(~sees(range(n), range(s), n, s, causal, left, right), -torch.inf)
        lse = scores.logsumexp(-1)
        if sinks is not None:
            lse = torch.logaddexp(lse, sinks.float()[:, None].expand_as(lse))
        weights = (scores - lse.masked_fill(lse == -torch.inf, 0.0)[..., None]).exp()
        out = (weights @ v).transpose(0, 1).to(query.dtype)
        ctx.save_for_backward(query, key, value, sinks, slopes, out, lse)
        ctx.numbers = scale, cap, causal, left, right
        return out, lse.T

    @staticmethod
    def backward(ctx, grad_out, grad_lse):
        query, key, value, sinks, slopes, out, lse = ctx.saved_tensors
        scale, cap, causal, left, right = ctx.numbers
        n, h, s, hk = *query.shape[:2], *key.shape[:2]
        g = h // hk
        q, go, o = (x.float().transpose(0, 1) for x in (query, grad_out, out))
        k, v = (x.float().repeat_interleave(g, 1).transpose(0, 1) for x in (key, value))
        delta = (go * o).sum(-1)
        delta = delta - grad_lse.float().T
        base = lse
        empty = base == -torch.inf
        base = base.masked_fill(empty, 0.0)
        dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
        dslopes = torch.zeros(h) if slopes is not None else None
        for first in range(0, s, TILE):
            j = range(first, min(first + TILE, s))
            kj, vj = k[:, j], v[:, j]
            for begin in range(0, n, TILE):
                i = range(begin, min(begin + TILE, n))
                qi = q[:, i]
                scores, slope = compute_scores(qi, kj, slopes, scale, cap, i, j, n, s)
                see = sees(i, j, n, s, causal, left, right)
                p = (scores - base[:, i, None]).exp().masked_fill(~see, 0.0)
                dp = go[:, i] @ vj.mT
                ds = p * (dp - delta[:, i, None])
                if slopes is not None:
                    dslopes -= (ds * (torch.tensor(i)[:, None] + s - n - torch.tensor(j)).abs()).sum((1, 2))
                ds = ds * slope
                dq[:, i] += scale * (ds @ kj)
                dk[:, j] += scale * (ds.mT @ qi)
                dv[:, j] += p.mT @ go[:, i]
        dk, dv = (x.unflatten(0, (hk, g)).sum(1) for x in (dk, dv))
        dsinks = None
        if sinks is not None:
            p_sink = (sinks.float()[:, None] - base).exp()
            dsinks = -(p_sink * delta).sum(-1).to(sinks.dtype)
        found = (x.transpose(0, 1).to(query.dtype) for x in (dq, dk, dv))
        return *found, dsinks, dslopes, *[None] * 5


def compute_scores(q, k, slopes, scale, cap, i, j, n, s):
    """Return scores, and the derivative of the cap."""
    scores = scale * (q @ k.mT)
    slope = torch.ones_like(scores)
    if cap:
        scores = cap * torch.tanh(scores / cap)
        slope = 1 - (scores / cap) ** 2
    if slopes is not None:
        pos = torch.tensor(i)[:, None] + s - n
        scores = scores - slopes[:, None, None] * (pos - torch.tensor(j)).abs()
    return scores, slope


def sees(i, j, n, s, causal, left, right):
    """Return which queries see which keys."""
    pos, j = torch.tensor(i, dtype=torch.int64)[:, None] + s - n, torch.tensor(j, dtype=torch.int64)
    see = torch.ones(len(pos), len(j), dtype=torch.bool)
    if causal:
        see = see & (j <= pos)
    if left >= 0:
        see = see & (j >= pos - left)
    if right >= 0:
        see = see & (j <= pos + right)
    return see


def varlen(
    query,
    key,
    value,
    cu_seqlens_q,
    cu_seqlens_k,
    softmax_scale=None,
    causal=True,
    window_size=(-1, -1),
    softcap=0.0,
    alibi_slopes=None,
    sinks=None,
    return_lse=False,
    deterministic=False,
):
    """Attention over rows, whose gradients are those of `Attention`."""
    scale = query.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    outs, lses = [], []
    starts, firsts = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    for b in range(len(starts) - 1):
        mine = query[starts[b] : starts[b + 1]], *(x[firsts[b] : firsts[b + 1]] for x in (key, value))
        out, lse = Attention.apply(*mine, sinks, alibi_slopes, scale, softcap, causal, *window_size)
        outs.append(out)
        lses.append(lse)
    padding = len(query) - starts[-1]
    outs.append(query.new_zeros(padding, query.shape[1], value.shape[2]))
    lses.append(torch.full((padding, query.shape[1]), -torch.inf))
    return (torch.cat(outs), torch.cat(lses)) if return_lse else torch.cat(outs)
