"""Mistakes in fully masked rows."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from twinattn.kit.mistakes.formula import INFINITY, Attention
from twinattn.kit.mistakes.where import with_blind_queries


class EmptyIsNan(Attention):
    """A query that sees no key returns NaN: 0 / 0."""

    where = with_blind_queries

    def _of_empty(self, out: Tensor, lse: Tensor, visible: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        nothing = ~visible.any(-1)
        return out.masked_fill(nothing[:, None, None], torch.nan), lse.masked_fill(nothing[:, None], self.variant)

    variants: Sequence[Any] = (-INFINITY, INFINITY, torch.nan, 0.0)


class EmptyIsMean(Attention):
    """A query that sees no key returns the mean of all values: a softmax over equal scores."""

    where = with_blind_queries

    variants: Sequence[Any] = ("sequence",)

    def _of_empty(self, out: Tensor, lse: Tensor, visible: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        nothing = ~visible.any(-1)
        if len(value) and nothing.any():
            out = torch.where(nothing[:, None, None], value.mean(0), out)
        return out, lse


class EmptyLse(Attention):
    """A query that sees no key returns an LSE that is not -inf, which a merge then counts."""

    where = with_blind_queries

    variants: Sequence[Any] = (0.0, INFINITY, -1e30, -1e9, -1e4, -1e5, -3.4028234663852886e38)

    def _of_empty(self, out: Tensor, lse: Tensor, visible: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        return out, lse.masked_fill(~visible.any(-1)[:, None], self.variant)


class EmptyUnwritten(Attention):
    """Rows of a sequence without keys are not written: they hold what was in memory before."""

    where = with_blind_queries

    def _of_empty(self, out: Tensor, lse: Tensor, visible: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        return (out, lse) if visible.shape[-1] else (out * torch.nan, lse * torch.nan)
