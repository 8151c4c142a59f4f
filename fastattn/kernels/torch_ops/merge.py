"""Merge partial outputs and add sinks in plain torch, on any device; other kernels in torch call it, too."""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor


def merge(
    outs: Sequence[Float[Tensor, "t h dv"]], lses: Sequence[Float[Tensor, "t h"]]
) -> tuple[Float[Tensor, "t h dv"], Float[Tensor, "t h"]]:
    """Merge partial outputs in one pass over them; see `fastattn.merge.merge`."""
    lse = lses[0]
    for part_lse in lses[1:]:
        lse = log_add_exp(lse, part_lse)
    total: Tensor | None = None
    for part_out, part_lse in zip(outs, lses, strict=True):
        # A partial output without visible keys may hold anything, also NaN, and 0 * NaN is NaN.
        part = part_out * torch.exp(part_lse - lse)[..., None]
        part.masked_fill_((part_lse == -torch.inf)[..., None], 0.0)
        total = part if total is None else total.add_(part)
    assert total is not None
    return total.to(outs[0].dtype), lse


def add_sinks(
    out: Float[Tensor, "t h dv"], lse: Float[Tensor, "t h"], sinks: Float[Tensor, "h"]
) -> tuple[Float[Tensor, "t h dv"], Float[Tensor, "t h"]]:
    """Add sinks to the softmax of outputs that were computed without them; see `fastattn.merge.add_sinks`."""
    sinks = sinks.to(lse.dtype)
    out = (out * share_of_keys(lse, sinks)[..., None]).masked_fill_((lse == -torch.inf)[..., None], 0.0).to(out.dtype)
    return out, log_add_exp(lse, sinks.expand_as(lse))


def share_of_keys(lse: Float[Tensor, "*rows"], sinks: Float[Tensor, "#*rows"]) -> Float[Tensor, "*rows"]:
    """Return `exp(lse) / (exp(lse) + exp(sinks))`, with bits that do not depend on an element's place."""
    return torch.exp(sinks - lse).add_(1.0).reciprocal_()


def log_add_exp(first: Float[Tensor, "*rows"], second: Float[Tensor, "*rows"]) -> Float[Tensor, "*rows"]:
    """Return `log(exp(first) + exp(second))`, with bits that do not depend on an element's place.

    `torch.logaddexp` and `torch.sigmoid` compute the elements after the last full vector differently.
    """
    gap = (first - second).abs_().masked_fill_(first == second, 0.0)  # equal infinities: their difference is NaN
    return torch.maximum(first, second) + gap.neg_().exp_().log1p_()
