"""Merges that are right."""

from math import inf

import torch


def two_by_two(outs, lses):
    """Parts merge two by two, in float64, the last ones first."""
    out, lse = outs[-1].double(), lses[-1].double()
    for part, part_lse in zip(reversed(outs[:-1]), reversed(lses[:-1]), strict=True):
        both = torch.logaddexp(lse, part_lse.double())
        base = both.masked_fill(both == -inf, 0.0)
        a, b = torch.exp(lse - base)[..., None], torch.exp(part_lse.double() - base)[..., None]
        out = a * out.masked_fill(a == 0, 0.0) + b * part.double().masked_fill(b == 0, 0.0)
        lse = both
    out = out.masked_fill((lse == -inf)[..., None], 0.0)
    return out.to(outs[0].dtype), lse.to(lses[0].dtype)
