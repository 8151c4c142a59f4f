"""Differential attention in steps, and mistakes in it."""

import torch
from torch import Tensor

from twinattn.kit.example import Answers
from twinattn.kit.mistakes.formula import Attention, Formula


class Differential(Formula, is_base=True):
    """Two softmaxes over pairs of heads, subtracted and normalized."""

    paths: tuple[str, ...] = ("differential",)
    attention: type[Attention] = Attention

    def answers(self) -> Answers:
        """Attend twice, subtract, norm."""
        a, outs, lses = self.arguments, [], []
        values = [self._value_of(i) for i in (0, 1)]
        for half in (0, 1):
            its = {
                name: a[name] for name in a if name in ("batch", "causal", "window_size", "softmax_scale", "softcap")
            }
            its |= {name: a[name][half::2] for name in ("alibi_slopes", "sinks") if name in a}
            its |= dict(query=self._heads_of(a["query"], half), key_cache=a["cache"][half, 0])
            its |= dict(value_cache=torch.cat(values, dim=-1))
            answers = self.attention(self.example, its, self.variant).answers()
            outs.append(answers["out"])
            lses.append(answers["lse"])
        out = self._normed(self._difference(*outs))
        t = len(out)
        return {
            "out": self._joined(out).reshape(t, -1, self.example.head_size),
            "lse": torch.stack(lses, dim=-1).reshape(t, -1),
        }

    def _value_of(self, half: int) -> Tensor:
        """Return the values of one half of the pairs."""
        return self.arguments["cache"][half, 1]

    def _heads_of(self, query: Tensor, half: int) -> Tensor:
        """Return the first or the second head of each pair."""
        return query[:, half::2]

    def _difference(self, first: Tensor, second: Tensor) -> Tensor:
        """Subtract."""
        return first - self.arguments["lambda_full"].double() * second

    def _normed(self, x: Tensor) -> Tensor:
        """Normalize over both halves of the value."""
        a = self.arguments
        factor = self._weight() * (1 - a["lambda_init"])
        return factor * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + a["norm_eps"])

    def _weight(self) -> Tensor:
        """Return the weight of the norm; ones if there is none."""
        weight = self.arguments["norm_weight"]
        return torch.ones(1, dtype=torch.float64) if weight is None else weight.double()

    def _joined(self, x: Tensor) -> Tensor:
        """Return the output of each pair, to be split into its two heads."""
        return x


class NotSubtracted(Differential):
    """The second softmax is not subtracted."""

    def _difference(self, first: Tensor, second: Tensor) -> Tensor:
        return first


class LambdaIgnored(Differential):
    """The second softmax is subtracted whole, without lambda."""

    def _difference(self, first: Tensor, second: Tensor) -> Tensor:
        return first - second


class LambdaAdded(Differential):
    """The second softmax is added, not subtracted."""

    def _difference(self, first: Tensor, second: Tensor) -> Tensor:
        return first + self.arguments["lambda_full"].double() * second


class LambdaNotBelowZero(Differential):
    """A lambda below 0 is taken for 0."""

    def _difference(self, first: Tensor, second: Tensor) -> Tensor:
        return first - self.arguments["lambda_full"].double().clamp(min=0.0) * second


class LambdaInitForLambda(Differential):
    """lambda_init is used as lambda_full."""

    def _difference(self, first: Tensor, second: Tensor) -> Tensor:
        return first - self.arguments["lambda_init"] * second


class NormBeforeDifference(Differential):
    """The norm comes before the subtraction."""

    def _difference(self, first: Tensor, second: Tensor) -> Tensor:
        first, second = (super(NormBeforeDifference, self)._normed(x) for x in (first, second))
        return first - self.arguments["lambda_full"].double() * second

    def _normed(self, x: Tensor) -> Tensor:
        return x


class NotNormed(Differential):
    """The difference is not normalized."""

    def _normed(self, x: Tensor) -> Tensor:
        return self._weight() * (1 - self.arguments["lambda_init"]) * x


class NormOfEachHalf(Differential):
    """The norm is over each head by itself, not over both halves of the value."""

    def _normed(self, x: Tensor) -> Tensor:
        a = self.arguments
        halves = x.unflatten(-1, (2, -1))
        normed = halves * torch.rsqrt(halves.square().mean(-1, keepdim=True) + a["norm_eps"])
        return normed.flatten(-2) * self._weight() * (1 - a["lambda_init"])


class FactorMissing(Differential):
    """The factor 1 - lambda_init is missing."""

    def _normed(self, x: Tensor) -> Tensor:
        return super()._normed(x) / (1 - self.arguments["lambda_init"])


class NormWeightIgnored(Differential):
    """The weight of the norm is ignored."""

    def _normed(self, x: Tensor) -> Tensor:
        return super()._normed(x) / self._weight()


class PairsAreHalves(Differential):
    """Pairs are formed of heads i and i + h/2 instead of heads 2i and 2i + 1."""

    def _heads_of(self, query: Tensor, half: int) -> Tensor:
        return query.chunk(2, dim=1)[half]


class ValueOfFirstHalf(Differential):
    """Both halves of the value are those of the first head."""

    def _value_of(self, half: int) -> Tensor:
        return self.arguments["cache"][0, 1]
