"""Mistakes in the scores: scale, softcap, ALiBi."""

from typing import Any

import torch
from torch import Tensor

from twinattn.kit.example import Arguments, Example
from twinattn.kit.mistakes.formula import INFINITY, Attention
from twinattn.kit.mistakes.where import given, not_causal, of_another_scale, under_a_scale_below_0


class ScaleMissing(Attention):
    """Scores are not scaled."""

    def __init__(self, example: Example, arguments: Arguments, variant: Any = None) -> None:
        super().__init__(example, arguments, variant)
        self.scale = 1.0


class ScaleFixed(Attention):
    """The given scale is ignored: it is always head_size ** -0.5."""

    where = given("softmax_scale")

    def __init__(self, example: Example, arguments: Arguments, variant: Any = None) -> None:
        super().__init__(example, arguments, variant)
        self.scale = example.head_size**-0.5


class ScaleOfValue(Attention):
    """The scale is computed from the head size of the values."""

    where = of_another_scale

    def __init__(self, example: Example, arguments: Arguments, variant: Any = None) -> None:
        super().__init__(example, arguments, variant)
        self.scale = example.value_size**-0.5


class ScaleTwice(Attention):
    """Scores are scaled twice."""

    def __init__(self, example: Example, arguments: Arguments, variant: Any = None) -> None:
        super().__init__(example, arguments, variant)
        self.scale = self.scale**2


class ScaleZeroIsDefault(Attention):
    """A scale of 0 is treated as no scale (`scale or default`)."""

    where = given("softmax_scale")

    def __init__(self, example: Example, arguments: Arguments, variant: Any = None) -> None:
        super().__init__(example, arguments, variant)
        self.scale = self.scale or example.head_size**-0.5


class ScaleNegativePeak(Attention):
    """The maximum is taken before the scale: under a negative scale it is the smallest score, and exp overflows."""

    where = under_a_scale_below_0

    def _peak(self, masked: Tensor) -> Tensor:
        if self.scale >= 0:
            return super()._peak(masked)
        low = masked.masked_fill(masked == -INFINITY, INFINITY).amin(-1, keepdim=True)
        return low.masked_fill(low == INFINITY, 0.0)

    def _exp(self, x: Tensor) -> Tensor:
        return x.float().exp().double() if self.scale < 0 else super()._exp(x)


class SoftcapIgnored(Attention):
    """The softcap is ignored."""

    option = "softcap"

    def __init__(self, example: Example, arguments: Arguments, variant: Any = None) -> None:
        super().__init__(example, arguments, variant)
        self.softcap = 0.0


class SoftcapUnmasks(Attention):
    """The softcap comes after the mask: tanh(-inf) * cap = -cap, so hidden keys are seen again."""

    option = "softcap"

    def _scores(self, query: Tensor, key: Tensor, pos: Tensor, j: Tensor) -> Tensor:
        self.softcap, cap = 0.0, self.softcap
        scores = super()._scores(query, key, pos, j)
        self.softcap = cap
        return scores

    def _hide(self, scores: Tensor, visible: Tensor) -> Tensor:
        masked = super()._hide(scores, visible)
        return self.softcap * torch.tanh(masked / self.softcap) if self.softcap else masked

    def _product(self, weights: Tensor, value: Tensor, visible: Tensor) -> Tensor:
        return self._weighted(weights, value) if self.softcap else super()._product(weights, value, visible)


class SoftcapUnscaled(Attention):
    """The softcap bounds the products before they are scaled."""

    option = "softcap"

    def _scores(self, query: Tensor, key: Tensor, pos: Tensor, j: Tensor) -> Tensor:
        products = self._products(query, key)
        if self.softcap:
            products = self.softcap * torch.tanh(products / self.softcap)
        scores = self.scale * products
        if self.slopes is not None:
            scores = scores - self.slopes.double()[:, None, None] * self._distance(pos, j)
        return scores


class SoftcapWithoutFactor(Attention):
    """The factor of the softcap is missing: tanh(score / cap), not times cap."""

    option = "softcap"

    def _scores(self, query: Tensor, key: Tensor, pos: Tensor, j: Tensor) -> Tensor:
        scores = self.scale * self._products(query, key)
        if self.softcap:
            scores = torch.tanh(scores / self.softcap)
        if self.slopes is not None:
            scores = scores - self.slopes.double()[:, None, None] * self._distance(pos, j)
        return scores


class AlibiIgnored(Attention):
    """The ALiBi slopes are ignored."""

    option = "alibi_slopes"

    def __init__(self, example: Example, arguments: Arguments, variant: Any = None) -> None:
        super().__init__(example, arguments, variant)
        self.slopes = None


class AlibiAdded(Attention):
    """The ALiBi bias has the wrong sign: far keys are preferred."""

    option = "alibi_slopes"

    def _distance(self, pos: Tensor, j: Tensor) -> Tensor:
        return -super()._distance(pos, j)


class AlibiOfPositiveSlopes(Attention):
    """Slopes are taken for positive: a negative one should prefer far keys."""

    option = "alibi_slopes"

    def __init__(self, example: Example, arguments: Arguments, variant: Any = None) -> None:
        super().__init__(example, arguments, variant)
        self.slopes = None if self.slopes is None else self.slopes.abs()


class AlibiHidesFarKeys(Attention):
    """Keys whose ALiBi bias is below a bound are skipped, as if no score could make up for it."""

    option = "alibi_slopes"
    variants = (16.0, 32.0, 64.0, 100.0)

    def _scores(self, query: Tensor, key: Tensor, pos: Tensor, j: Tensor) -> Tensor:
        scores = super()._scores(query, key, pos, j)
        if self.slopes is None:
            return scores
        bias = -self.slopes.double()[:, None, None] * self._distance(pos, j)
        return scores.masked_fill(bias < -self.variant, -INFINITY)


class AlibiSigned(Attention):
    """The ALiBi distance has a sign: without a causal mask later keys get a bonus."""

    where = given("alibi_slopes") & not_causal

    def _distance(self, pos: Tensor, j: Tensor) -> Tensor:
        return pos - j


class AlibiRelative(Attention):
    """The ALiBi bias is slope * j, without the query's position: right inside one softmax, but the LSE is off."""

    option = "alibi_slopes"

    def _distance(self, pos: Tensor, j: Tensor) -> Tensor:
        return -j.expand(len(pos), -1)


class AlibiFromWindow(Attention):
    """Under a window ALiBi counts from its first key, not from the query: the weights are right, the LSE is off."""

    where = given("alibi_slopes") & given("window_size")

    def _distance(self, pos: Tensor, j: Tensor) -> Tensor:
        return super()._distance(pos, j) - max(0, self.mask.left)


class AlibiTopLeft(Attention):
    """The ALiBi bias uses row i as the query's position, not seq_len - query_len + i."""

    option = "alibi_slopes"

    def _distance(self, pos: Tensor, j: Tensor) -> Tensor:
        return (pos - pos[:1] - j).abs()


class AlibiScaled(Attention):
    """The ALiBi bias is added before the scale, which shrinks it."""

    option = "alibi_slopes"

    def _distance(self, pos: Tensor, j: Tensor) -> Tensor:
        return super()._distance(pos, j) * self.scale


class AlibiUnderCap(Attention):
    """The ALiBi bias is added before the softcap, which bounds it."""

    option = "alibi_slopes"

    def _scores(self, query: Tensor, key: Tensor, pos: Tensor, j: Tensor) -> Tensor:
        scores = self.scale * self._products(query, key)
        if self.slopes is not None:
            scores = scores - self.slopes.double()[:, None, None] * self._distance(pos, j)
        return self.softcap * torch.tanh(scores / self.softcap) if self.softcap else scores
