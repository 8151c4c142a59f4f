"""Mistakes in the softmax: its maximum, its sum, the sinks, the log-sum-exp."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from twinattn.kit.example import Arguments, Example
from twinattn.kit.mistakes.formula import INFINITY, SPLITS, Attention
from twinattn.kit.mistakes.where import given, rounded

# --- softmax ---


class NoMaximum(Attention):
    """The maximum is not subtracted before exp: large scores overflow."""

    def _peak(self, masked: Tensor) -> Tensor:
        return super()._peak(masked) * 0

    def _exp(self, x: Tensor) -> Tensor:
        return x.float().exp().double()


class NotNormalized(Attention):
    """The weighted sum is not divided by the sum of the weights."""

    def _divisor(self, total: Tensor, weights: Tensor) -> Tensor:
        return torch.ones_like(total)


class NotNormalizedByTile(Attention):
    """The sum of the weights is that of the last tile of keys only."""

    variants: Sequence[Any] = SPLITS

    @classmethod
    def may_show(cls, example: Example, arguments: Arguments, variant: Any) -> bool:
        """Return whether there is a second tile, or a sink, which is in no tile."""
        return arguments.get("sinks") is not None or max((s for _, s in example.lens), default=0) > variant

    def _divisor(self, total: Tensor, weights: Tensor) -> Tensor:
        n = weights.shape[-1]
        return weights[..., (n - 1) // self.variant * self.variant :].sum(-1, keepdim=True) if n else total


class NotRescaled(Attention):
    """The accumulator is not rescaled when a later tile has a larger maximum."""

    variants: Sequence[Any] = tuple((size, is_sum) for size in SPLITS for is_sum in (False, True))

    @classmethod
    def may_show(cls, example: Example, arguments: Arguments, variant: Any) -> bool:
        """Return whether there is a second tile."""
        return max((s for _, s in example.lens), default=0) > variant[0]

    def _softmax(self, scores: Tensor, visible: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        size, rescales_sum = self.variant
        masked = self._hide(scores, visible)
        peak = masked.new_full((*masked.shape[:2], 1), -INFINITY)
        acc: Tensor | float = 0.0
        total = self._of_sinks(torch.zeros_like(peak)) * torch.zeros_like(peak)
        value = value.masked_fill(~visible.any(0)[:, None, None], 0.0)
        for tile, rows in zip(masked.split(size, dim=-1), value.split(size), strict=True):
            new = torch.maximum(peak, tile.amax(-1, keepdim=True)) if tile.shape[-1] else peak
            base = new.masked_fill(new == -INFINITY, 0.0)
            weights = (tile - base).exp()
            if rescales_sum:
                total = total * (peak - base).exp()
            acc = acc + self._weighted(weights, rows)
            total = total + weights.sum(-1, keepdim=True)
            peak = new
        base = peak.masked_fill(peak == -INFINITY, 0.0)
        total = total + self._of_sinks(base)
        out = (acc / total.transpose(0, 1)).masked_fill((total == 0).transpose(0, 1), 0.0)
        return out, (total.log() + base)[..., 0].T


# --- sinks ---


class SinksIgnored(Attention):
    """The sinks are ignored."""

    option = "sinks"

    def __init__(self, example: Example, arguments: Arguments, variant: Any = None) -> None:
        super().__init__(example, arguments, variant)
        self.sinks = None


class SinksOfEverySplit(Attention):
    """The sink is counted in every split of the keys, not once."""

    variants: Sequence[Any] = SPLITS

    @classmethod
    def may_show(cls, example: Example, arguments: Arguments, variant: Any) -> bool:
        """Return whether there is a second split, and a sink."""
        return max((s for _, s in example.lens), default=0) > variant and arguments.get("sinks") is not None

    def _of_sinks(self, peak: Tensor) -> Tensor | float:
        return super()._of_sinks(peak) * self.count

    def _keys(self, i: int) -> Tensor:
        self.count = max(1, -(-self.lens[i][1] // self.variant))
        return super()._keys(i)


class SinksRounded(Attention):
    """The sinks are rounded to the type of the query."""

    where = given("sinks") & rounded

    def __init__(self, example: Example, arguments: Arguments, variant: Any = None) -> None:
        super().__init__(example, arguments, variant)
        self.sinks = None if self.sinks is None else self.sinks.to(arguments["query"].dtype)


class SinksTwice(Attention):
    """The sink is counted twice."""

    option = "sinks"

    def _of_sinks(self, peak: Tensor) -> Tensor | float:
        return 2 * super()._of_sinks(peak)


class SinksScaled(Attention):
    """The sink is multiplied by softmax_scale, as if it were a product."""

    option = "sinks"

    def __init__(self, example: Example, arguments: Arguments, variant: Any = None) -> None:
        super().__init__(example, arguments, variant)
        self.sinks = None if self.sinks is None else self.sinks * self.scale


class SinksNotInLse(Attention):
    """The sink is in the output, not in the log-sum-exp."""

    option = "sinks"

    def _log(self, lse: Tensor, total: Tensor, peak: Tensor) -> Tensor:
        return (total - self._of_sinks(peak)).log() + peak


class SinksOfFirstHead(Attention):
    """All heads have the sink of head 0."""

    option = "sinks"

    def __init__(self, example: Example, arguments: Arguments, variant: Any = None) -> None:
        super().__init__(example, arguments, variant)
        self.sinks = None if self.sinks is None else self.sinks[:1].expand(self.query.shape[1])


class SinksNotShifted(Attention):
    """The maximum is not subtracted from the sink: exp(sink) is added to sums of exp(score - max)."""

    option = "sinks"

    def _of_sinks(self, peak: Tensor) -> Tensor | float:
        return 0.0 if self.sinks is None else self.sinks.double()[:, None, None].exp() + 0 * peak


class SinksNotInMaximum(Attention):
    """The maximum is that of the scores alone: exp of a sink far above them overflows."""

    where = given("sinks")

    def _peak(self, masked: Tensor) -> Tensor:
        sinks, self.sinks = self.sinks, None
        peak = super()._peak(masked)
        self.sinks = sinks
        return peak

    def _of_sinks(self, peak: Tensor) -> Tensor | float:
        of_sinks = super()._of_sinks(peak)
        return of_sinks.float().double() if isinstance(of_sinks, Tensor) else of_sinks


# --- log-sum-exp ---


class LseBaseTwo(Attention):
    """The log-sum-exp has base 2 instead of e (it lacks a factor of ln 2)."""

    def _finish(self, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
        return out, lse / math.log(2)


class LseOfBaseTwoScores(Attention):
    """The log-sum-exp is multiplied by ln 2 one time too many."""

    def _finish(self, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
        return out, lse * math.log(2)


class LseTransposed(Attention):
    """The log-sum-exp is [h, t] in memory instead of [t, h]."""

    def _finish(self, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
        return out, lse.T.reshape(lse.shape)


class LseWithoutMaximum(Attention):
    """The log-sum-exp lacks the maximum that was subtracted."""

    def _log(self, lse: Tensor, total: Tensor, peak: Tensor) -> Tensor:
        return total.log()


class LseRounded(Attention):
    """The log-sum-exp is rounded to the type of the query, and then called float32."""

    where = rounded

    def _finish(self, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
        return out, lse.to(self.arguments["query"].dtype).double()


class LseIsMaximum(Attention):
    """The largest score is returned instead of the log-sum-exp."""

    def _log(self, lse: Tensor, total: Tensor, peak: Tensor) -> Tensor:
        return peak


class LseIsSum(Attention):
    """The sum of the weights is returned instead of its logarithm."""

    def _log(self, lse: Tensor, total: Tensor, peak: Tensor) -> Tensor:
        return total


class LseOfLastTile(Attention):
    """The log-sum-exp is that of the last split of the keys only."""

    variants: Sequence[Any] = SPLITS

    @classmethod
    def may_show(cls, example: Example, arguments: Arguments, variant: Any) -> bool:
        """Return whether there is a second tile."""
        return max((s for _, s in example.lens), default=0) > variant

    def _softmax(self, scores: Tensor, visible: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        out, _ = super()._softmax(scores, visible, value)
        first = max(0, visible.shape[-1] - 1) // self.variant * self.variant
        return out, super()._softmax(scores[..., first:], visible[:, first:], value[first:])[1]
