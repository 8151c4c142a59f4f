"""Differential attention that is wrong."""

import torch
from outsider_flash import paged, softmax_of


def eps_outside_the_root(
    query, cache, cu_seqlens_q, seq_lens, block_table, lambda_full, lambda_init, norm_weight, norm_eps
):
    """The norm adds its epsilon to the root, and not under it."""
    out = torch.zeros(query.shape)
    keys = [list(paged(query, *cache[half], cu_seqlens_q, seq_lens, block_table)) for half in (0, 1)]
    for (q0, q1, s, first), (_, _, _, second) in zip(*keys, strict=True):
        j, i = torch.arange(s), torch.arange(s - q1 + q0, s)[:, None]
        (k1, v1), (k2, v2) = first(j), second(j)
        value, scale = torch.cat([v1, v2], -1), query.shape[2] ** -0.5
        a, _ = softmax_of(query[q0:q1, 0::2], k1, value, j <= i, scale)
        b, _ = softmax_of(query[q0:q1, 1::2], k2, value, j <= i, scale)
        x = a - lambda_full * b
        x = x / (x.square().mean(-1, keepdim=True).sqrt() + norm_eps) * norm_weight.float() * (1 - lambda_init)
        out[q0:q1] = x.unflatten(-1, (2, -1)).flatten(1, 2)
    return out.to(query.dtype)


def sinks_by_halves(
    query, cache, cu_seqlens_q, seq_lens, block_table, lambda_full, lambda_init, norm_weight, norm_eps, sinks=None
):
    """The sinks of the first softmax are the first half of them, and not every second one."""
    out, pairs = torch.zeros(query.shape), query.shape[1] // 2
    keys = [list(paged(query, *cache[half], cu_seqlens_q, seq_lens, block_table)) for half in (0, 1)]
    for (q0, q1, s, first), (_, _, _, second) in zip(*keys, strict=True):
        j, i = torch.arange(s), torch.arange(s - q1 + q0, s)[:, None]
        (k1, v1), (k2, v2) = first(j), second(j)
        value, scale = torch.cat([v1, v2], -1), query.shape[2] ** -0.5
        halves = (None, None) if sinks is None else (sinks[:pairs], sinks[pairs:])
        a, _ = softmax_of(query[q0:q1, 0::2], k1, value, j <= i, scale, halves[0])
        b, _ = softmax_of(query[q0:q1, 1::2], k2, value, j <= i, scale, halves[1])
        x = a - lambda_full * b
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + norm_eps) * norm_weight.float() * (1 - lambda_init)
        out[q0:q1] = x.unflatten(-1, (2, -1)).flatten(1, 2)
    return out.to(query.dtype)
