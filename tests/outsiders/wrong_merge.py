"""Merges that are wrong."""

from math import inf

import torch


def weighed_against_the_first(outs, lses):
    """Weights are relative to the first part that sees something: exp overflows where a later one is larger by 89."""
    stack = torch.stack([lse.float() for lse in lses])
    base = torch.full_like(stack[0], -inf)
    for lse in reversed(stack):
        base = torch.where(lse == -inf, base, lse)
    finite = base.masked_fill(base == -inf, 0.0)
    weights = torch.exp(stack - finite)
    total = weights.sum(0)
    parts = torch.stack(outs).float().masked_fill((weights == 0)[..., None], 0.0)
    out = (weights[..., None] * parts).sum(0) / total.masked_fill(total == 0, 1.0)[..., None]
    return out.to(outs[0].dtype), finite + total.log()


def merged_into_the_first(outs, lses):
    """The sum is kept in the first part: the answer is right, and the caller's first part is gone."""
    lse = torch.stack([x.float() for x in lses]).logsumexp(0)
    base = lse.masked_fill(lse == -inf, 0.0)
    total = torch.zeros(outs[0].shape)
    for out, part in zip(outs, lses, strict=True):
        weight = torch.exp(part.float() - base)[..., None]
        term = weight * out.float().masked_fill(weight == 0, 0.0)
        total = total + term
    return outs[0].copy_(total), lse
