"""The merge of partial outputs, and mistakes in it."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from twinattn.kit.example import Answers, Arguments, Example
from twinattn.kit.mistakes.formula import INFINITY, Formula, as_contiguous


class Merge(Formula, is_base=True):
    """The merge of partial outputs."""

    paths: tuple[str, ...] = ("merge",)

    def answers(self) -> Answers:
        """Merge."""
        outs = torch.stack([x.double() for x in self.arguments["outs"]])
        lses = torch.stack([x.double() for x in self.arguments["lses"]])
        out, lse = self._merged(outs, lses)
        return {"out": out, "lse": lse}

    def _merged(self, outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
        """Merge parts, `[parts, t, h, dv]`."""
        lse = lses.logsumexp(0)
        weights = (lses - lse).exp()
        parts = (weights[..., None] * outs).masked_fill((lses == -INFINITY)[..., None], 0.0)
        return parts.sum(0), lse


class MergeBaseTwo(Merge):
    """The log-sum-exps are treated as base 2: 2 ** lse instead of e ** lse."""

    variants: Sequence[Any] = ("everywhere", "in the weights")

    def _merged(self, outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
        out, lse = super()._merged(outs, lses * math.log(2))
        if self.variant == "everywhere":
            return out, lse / math.log(2)
        top = lses.amax(0)
        return out, ((lses - top) * math.log(2)).exp().sum(0).log() + top


class MergeAverages(Merge):
    """The parts are averaged."""

    def _merged(self, outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
        return outs.mean(0), super()._merged(outs, lses)[1]


class MergeSwapsWeights(Merge):
    """Each part has the weight of the other one."""

    def _merged(self, outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
        return super()._merged(outs.flip(0), lses)[0], super()._merged(outs, lses)[1]


class MergeWeighsByLse(Merge):
    """The parts are weighted by their log-sum-exp itself, not by its exponential."""

    def _merged(self, outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
        return (lses / lses.sum(0))[..., None].mul(outs).sum(0), super()._merged(outs, lses)[1]


class MergeNotNormalized(Merge):
    """The weighted parts are not divided by the sum of their weights."""

    def _merged(self, outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
        weights = (lses - lses.amax(0)).exp()
        return (weights[..., None] * outs).masked_fill((lses == -INFINITY)[..., None], 0.0).sum(0), lses.logsumexp(0)


class MergeEmptyIsNan(Merge):
    """Where a query sees no key in any part, -inf - -inf makes NaN."""

    def _merged(self, outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
        out, lse = super()._merged(outs, lses)
        nothing = lse == -INFINITY
        return out.masked_fill(nothing[..., None], torch.nan), lse.masked_fill(nothing, self.variant)

    variants: Sequence[Any] = (torch.nan, -INFINITY)


class MergeGarbageTimesZero(Merge):
    """The output of a part without visible keys is multiplied by 0: NaN in it reaches the output."""

    def _merged(self, outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
        lse = lses.logsumexp(0)
        weights = (lses - lse).exp().masked_fill(lses == -INFINITY, 0.0)
        return (weights[..., None] * outs).sum(0), lse


class MergeLseIsMaximum(Merge):
    """The LSE of the merge is the largest of the parts."""

    def _merged(self, outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
        return super()._merged(outs, lses)[0], lses.amax(0)


class MergeLseAdds(Merge):
    """The LSE of the merge is the sum of the LSEs of the parts."""

    def _merged(self, outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
        return super()._merged(outs, lses)[0], lses.sum(0)


class MergeOverflows(Merge):
    """The maximum is not subtracted before exp: large log-sum-exps overflow."""

    def _merged(self, outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
        weights = lses.float().exp().double()
        total = weights.sum(0)
        return (weights[..., None] * outs).sum(0) / total[..., None], total.log()


class MergeTwoParts(Merge):
    """Parts after the second are left out."""

    def _merged(self, outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
        return super()._merged(outs[:2], lses[:2])


class MergePartsPastACount(Merge):
    """Parts past a count are left out."""

    variants: Sequence[Any] = (4, 8, 16, 32, 64)

    def _merged(self, outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
        return super()._merged(outs[: self.variant], lses[: self.variant])


class MergeRowsPastACount(Merge):
    """From some row on, nothing is merged: the output is that of the first part, 0, or not written."""

    past = ("sequences", "rows")
    variants: Sequence[Any] = tuple(
        (count, out, lse)
        for count in (32, 64, 128)
        for out, lse in ((0.0, None), (0.0, 0.0), (math.nan, math.nan), (None, None))
    )

    def _merged(self, outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
        (count, of_out, of_lse), (out, lse) = self.variant, super()._merged(outs, lses)
        out[count:] = outs[0, count:] if of_out is None else of_out
        if of_out is None:
            lse[count:] = lses[0, count:]
        elif of_lse is not None:
            lse[count:] = of_lse
        return out, lse


class MergeStridesAssumed(Merge):
    """The log-sum-exps are assumed to be contiguous: their strides are ignored."""

    def answers(self) -> Answers:
        """Compute the outputs."""
        self.arguments = self.arguments | dict(lses=[as_contiguous(x) for x in self.arguments["lses"]])
        return super().answers()


class MergeInFloat32(Merge):
    """Log-sum-exps of float64 are rounded to float32 first."""

    @classmethod
    def may_show(cls, example: Example, arguments: Arguments, variant: Any) -> bool:
        """Return whether they are of float64."""
        return bool(arguments["lses"][0].dtype == torch.float64)

    def _merged(self, outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
        return super()._merged(outs, lses.float().double())
