"""Mistakes in the merge of partial outputs over splits of the keys."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from twinattn.kit.example import Arguments, Example
from twinattn.kit.mistakes.formula import INFINITY, SPLITS, Attention


class Split(Attention, is_base=True):
    """A base: keys in splits of `variant`, merged."""

    variants: Sequence[Any] = SPLITS

    @classmethod
    def may_show(cls, example: Example, arguments: Arguments, variant: Any) -> bool:
        """Return whether there is a second split."""
        is_split = variant is None or max((s for _, s in example.lens), default=0) > (
            variant[0] if isinstance(variant, tuple) else variant
        )
        return is_split and super().may_show(example, arguments, variant)

    def _softmax(self, scores: Tensor, visible: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        sizes = range(0, max(1, visible.shape[-1]), self.variant)
        parts = [
            super(Split, self)._softmax(
                scores[..., n : n + self.variant], visible[:, n : n + self.variant], value[n : n + self.variant]
            )
            for n in sizes
        ]
        outs, lses = (torch.stack(x) for x in zip(*parts, strict=True))
        return self._merged(outs, lses)

    def _merged(self, outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
        """Merge the parts, `[parts, t, h, dv]` and `[parts, t, h]`."""
        lse = lses.logsumexp(0)
        weights = (lses - lse).exp().masked_fill(lses == -INFINITY, 0.0)
        return (weights[..., None] * outs).sum(0), lse


class SplitsAveraged(Split):
    """The outputs of the splits of the keys are averaged, not weighted by their log-sum-exp."""

    def _merged(self, outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
        return outs.mean(0), lses.logsumexp(0)


class SplitsAdded(Split):
    """The outputs of the splits of the keys are added up, not weighted."""

    def _merged(self, outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
        return outs.sum(0), lses.logsumexp(0)


class LastSplitDropped(Split):
    """The last split of the keys is left out of the merge."""

    def _merged(self, outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
        return super()._merged(outs[:-1], lses[:-1]) if len(outs) > 1 else super()._merged(outs, lses)


class SplitsMergedBaseTwo(Split):
    """Splits with a natural log-sum-exp are merged as if it had base 2, or the other way round."""

    variants: Sequence[Any] = tuple((size, factor) for size in SPLITS for factor in (math.log(2), 1 / math.log(2)))

    def __init__(self, example: Example, arguments: Arguments, variant: Any = None) -> None:
        super().__init__(example, arguments, variant[0])
        self.factor = variant[1]

    def _merged(self, outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
        out, lse = super()._merged(outs, lses * self.factor)
        return out, lse / self.factor if len(outs) > 1 else lses[0]
