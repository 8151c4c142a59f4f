"""Gradients of attention in steps, and mistakes in them."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from twinattn.kit import gradients
from twinattn.kit.example import Answers, Arguments, Example
from twinattn.kit.mistakes.beside import WHERE
from twinattn.kit.mistakes.formula import INFINITY, Attention, Formula, Mask


class Rows(NamedTuple):
    """The tensors of a sequence, heads first: queries and gradients `[h, t, ...]`, keys and values `[h, s, ...]`."""

    query: Tensor
    key: Tensor
    value: Tensor
    grad_out: Tensor
    grad_lse: Tensor  # [h, t, 1]
    pos: Tensor  # [t, 1]
    j: Tensor  # [1, s]


class Backward(Formula, is_base=True):
    """Gradients of attention over rows, one sequence at a time."""

    paths: tuple[str, ...] = ("varlen_backward",)

    def __init__(self, example: Example, arguments: Arguments, variant: Any = None) -> None:
        """Take the inputs of a call, on the CPU."""
        super().__init__(example, arguments, variant)
        a = arguments
        left, right = a.get("window_size", (-1, -1))
        self.mask = Mask(a.get("causal", True), left, right, 0)
        scale = a.get("softmax_scale")
        self.scale = example.head_size**-0.5 if scale is None else scale
        self.softcap, self.slopes = a.get("softcap", 0.0), a.get("alibi_slopes")
        self.sinks = a["sinks"].double() if "sinks" in a else None
        self.group = a["query"].shape[1] // a["key"].shape[1]

    def answers(self) -> Answers:
        """Differentiate in each sequence."""
        a = self.arguments
        grad_out = self._grad_out(a["grad_out"]).double()
        grad_lse = a["grad_lse"].double() if "grad_lse" in a else torch.zeros(grad_out.shape[:2], dtype=torch.float64)
        query, key, value = (a[name].detach().double() for name in ("query", "key", "value"))
        found = {"dq": torch.zeros_like(query), "dk": torch.zeros_like(key), "dv": torch.zeros_like(value)}
        of_sinks = torch.zeros(query.shape[1], dtype=torch.float64)
        row = first = 0
        for q, s in self.example.lens:
            rows, keys = slice(row, row + q), self._keys(row, first, s, len(key))
            k, v = (x[keys].transpose(0, 1).repeat_interleave(self.group, 0) for x in (key, value))
            mine, go, gl = (x[rows].transpose(0, 1) for x in (query, grad_out, grad_lse[..., None]))
            of = Rows(mine, k, v, go, gl, torch.arange(s - q, s)[:, None], torch.arange(s)[None])
            dq, dk, dv, dsinks = self._sequence(of)
            found["dq"][rows] = dq.transpose(0, 1)
            for name, x in (("dk", dk), ("dv", dv)):
                found[name][keys] = self._of_group(x).transpose(0, 1)
            of_sinks = of_sinks + dsinks
            row, first = row + q, first + s
        return self._finish(found if self.sinks is None else found | {"dsinks": of_sinks})

    def _grad_out(self, grad_out: Tensor) -> Tensor:
        return grad_out

    def _keys(self, row: int, first: int, s: int, most: int) -> slice:
        """Return the rows of the keys of a sequence."""
        return slice(first, first + s)

    def _of_group(self, x: Tensor) -> Tensor:
        """Add up the gradients of each query head `[h, s, ...]` to those of KV heads `[hk, s, ...]`."""
        return x.unflatten(0, (-1, self.group)).sum(1)

    def _finish(self, found: Answers) -> Answers:
        return found

    def _sequence(self, of: Rows) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the gradients of queries, of the keys and values of each head, and of sinks."""
        lse, out, p_sink = self._forward(of)
        capped = self._capped(of)
        visible = self._visible(of.pos, of.j, of.j.shape[1], len(of.pos))
        base = self._base(lse).masked_fill(lse == -INFINITY, 0.0)
        p = (self._biased(capped, of) - base).exp().masked_fill(~visible, 0.0)
        delta = self._delta(of.grad_out, out)
        ds = self._of_scores(p, of.grad_out @ of.value.mT, delta, of.grad_lse)
        if self.softcap:
            ds = ds * self._of_cap(capped)
        dq, dk, dv = self._products(ds, p, of)
        dq, dk, dv = self._of_empty(dq, dk, dv, lse == -INFINITY)
        return dq, dk, dv, self._of_sinks(p_sink, delta, of.grad_lse)

    def _forward(self, of: Rows) -> tuple[Tensor, Tensor, Tensor]:
        """Return the log-sum-exp, the output and the weight of the sink, all right."""
        visible = self.mask.visible(of.pos, of.j, of.j.shape[1])
        score = self._with_bias(self._cap(self.scale * (of.query @ of.key.mT)), of).masked_fill(~visible, -INFINITY)
        lse = score.logsumexp(-1, keepdim=True)
        p_sink = torch.zeros_like(lse)
        if self.sinks is not None:
            lse = torch.logaddexp(lse, self.sinks[:, None, None].expand_as(lse))
            p_sink = (self.sinks[:, None, None] - lse).exp()
        p = (score - lse.masked_fill(lse == -INFINITY, 0.0)).exp().masked_fill(~visible, 0.0)
        self.without_sink = score.logsumexp(-1, keepdim=True)
        return lse, p @ of.value, p_sink

    def _cap(self, score: Tensor) -> Tensor:
        return self.softcap * torch.tanh(score / self.softcap) if self.softcap else score

    def _capped(self, of: Rows) -> Tensor:
        """Return the scores after the softcap."""
        return self._cap(self.scale * (of.query @ of.key.mT))

    def _with_bias(self, score: Tensor, of: Rows) -> Tensor:
        if self.slopes is None:
            return score
        return score - self.slopes.double()[:, None, None] * (of.pos - of.j).abs()

    def _biased(self, score: Tensor, of: Rows) -> Tensor:
        return self._with_bias(score, of)

    def _base(self, lse: Tensor) -> Tensor:
        """Return the number that is subtracted from the scores before exp."""
        return lse

    def _visible(self, pos: Tensor, j: Tensor, s: int, q: int) -> Tensor:
        return self.mask.visible(pos, j, s)

    def _delta(self, grad_out: Tensor, out: Tensor) -> Tensor:
        return (grad_out * out).sum(-1, keepdim=True)

    def _of_scores(self, p: Tensor, of_weights: Tensor, delta: Tensor, grad_lse: Tensor) -> Tensor:
        """Return the gradient of the scores."""
        return p * (of_weights - delta + grad_lse)

    def _of_cap(self, capped: Tensor) -> Tensor:
        return 1 - (capped / self.softcap) ** 2

    def _products(self, ds: Tensor, p: Tensor, of: Rows) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients of queries, keys and values."""
        return self.scale * (ds @ of.key), self.scale * (ds.mT @ of.query), p.mT @ of.grad_out

    def _of_empty(self, dq: Tensor, dk: Tensor, dv: Tensor, empty: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return dq, dk, dv

    def _of_sinks(self, p_sink: Tensor, delta: Tensor, grad_lse: Tensor) -> Tensor:
        return (p_sink * (grad_lse - delta)).sum((1, 2))


# --- gradients of the scores ---


class NoGradient(Backward):
    """The output does not depend on its inputs for autograd: there is no gradient."""

    def _finish(self, found: Answers) -> Answers:
        return {name: torch.zeros_like(x) for name, x in found.items()}


class DeltaLeftOut(Backward):
    """The sum of the gradient times the output, delta, is not subtracted."""

    def _delta(self, grad_out: Tensor, out: Tensor) -> Tensor:
        return super()._delta(grad_out, out) * 0


class DeltaOfGradient(Backward):
    """Delta is the sum of the gradient alone, not of its product with the output."""

    def _delta(self, grad_out: Tensor, out: Tensor) -> Tensor:
        return grad_out.sum(-1, keepdim=True)


class DeltaAdded(Backward):
    """Delta is added, not subtracted."""

    def _delta(self, grad_out: Tensor, out: Tensor) -> Tensor:
        return -super()._delta(grad_out, out)


class DeltaOfFirstTile(Backward):
    """Delta is summed over the first elements of a head only."""

    variants: Sequence[Any] = (16, 32, 64)

    def _delta(self, grad_out: Tensor, out: Tensor) -> Tensor:
        return super()._delta(grad_out[..., : self.variant], out[..., : self.variant])


class LseGradientIgnored(Backward):
    """The gradient of the log-sum-exp is ignored."""

    def _of_scores(self, p: Tensor, of_weights: Tensor, delta: Tensor, grad_lse: Tensor) -> Tensor:
        return super()._of_scores(p, of_weights, delta, 0 * grad_lse)

    def _of_sinks(self, p_sink: Tensor, delta: Tensor, grad_lse: Tensor) -> Tensor:
        return super()._of_sinks(p_sink, delta, 0 * grad_lse)


class LseGradientWithWrongSign(Backward):
    """The gradient of the log-sum-exp is added to delta, from which it has to be subtracted."""

    def _of_scores(self, p: Tensor, of_weights: Tensor, delta: Tensor, grad_lse: Tensor) -> Tensor:
        return super()._of_scores(p, of_weights, delta, -grad_lse)

    def _of_sinks(self, p_sink: Tensor, delta: Tensor, grad_lse: Tensor) -> Tensor:
        return super()._of_sinks(p_sink, delta, -grad_lse)


class LseGradientOfBaseTwo(Backward):
    """The gradient of the log-sum-exp is that of a logarithm to the base 2."""

    variants: Sequence[Any] = (1.4426950408889634, 0.6931471805599453)

    def _of_scores(self, p: Tensor, of_weights: Tensor, delta: Tensor, grad_lse: Tensor) -> Tensor:
        return super()._of_scores(p, of_weights, delta, self.variant * grad_lse)

    def _of_sinks(self, p_sink: Tensor, delta: Tensor, grad_lse: Tensor) -> Tensor:
        return super()._of_sinks(p_sink, delta, self.variant * grad_lse)


class LseGradientBeside(Backward, is_base=True):
    """A base: the gradient of the log-sum-exp is ignored where an option is."""

    is_there: Callable[[Any], bool]

    def _of_scores(self, p: Tensor, of_weights: Tensor, delta: Tensor, grad_lse: Tensor) -> Tensor:
        return super()._of_scores(p, of_weights, delta, grad_lse * (not type(self).is_there(self)))

    def _of_sinks(self, p_sink: Tensor, delta: Tensor, grad_lse: Tensor) -> Tensor:
        return super()._of_sinks(p_sink, delta, grad_lse * (not type(self).is_there(self)))


for where, (_, in_words, is_there) in WHERE.items():
    body = dict(__doc__=f"The gradient of the log-sum-exp is ignored {in_words}.", __module__=__name__)
    type(f"LseGradientLost{where}", (LseGradientBeside,), body | dict(is_there=staticmethod(is_there)))


class LseGradientNotOfSinks(Backward):
    """The gradient of the log-sum-exp reaches the keys, and not the sinks."""

    def _of_sinks(self, p_sink: Tensor, delta: Tensor, grad_lse: Tensor) -> Tensor:
        return super()._of_sinks(p_sink, delta, 0 * grad_lse)


class WeightsNotDifferentiated(Backward):
    """The gradient of each score is not multiplied by its weight: the derivative of the softmax is left out."""

    def _of_scores(self, p: Tensor, of_weights: Tensor, delta: Tensor, grad_lse: Tensor) -> Tensor:
        return (p > 0) * (of_weights - delta + grad_lse)


# --- caps, scales, biases ---


class CapNotDifferentiated(Backward):
    """The derivative of the cap, 1 - tanh^2, is left out."""

    def _of_cap(self, capped: Tensor) -> Tensor:
        return torch.ones_like(capped)


class CapDerivedOfCapped(Backward):
    """The derivative of the cap squares the capped score, not the capped score divided by the cap."""

    def _of_cap(self, capped: Tensor) -> Tensor:
        return 1 - capped**2


class CapDerivedTwice(Backward):
    """The derivative of the cap is multiplied in twice."""

    def _of_cap(self, capped: Tensor) -> Tensor:
        return super()._of_cap(capped) ** 2


class CapForgotten(Backward):
    """The weights are recomputed without the cap."""

    def _biased(self, score: Tensor, of: Rows) -> Tensor:
        return self._with_bias(self.scale * (of.query @ of.key.mT), of)


class CapOverflowed(Backward):
    """The derivative of the cap takes tanh of the capped score, not of the score before the cap."""

    def _of_cap(self, capped: Tensor) -> Tensor:
        return 1 - torch.tanh(capped / self.softcap) ** 2


class ScaleMissingInDq(Backward):
    """The gradient of queries is not multiplied by the scale."""

    def _products(self, ds: Tensor, p: Tensor, of: Rows) -> tuple[Tensor, Tensor, Tensor]:
        _, dk, dv = super()._products(ds, p, of)
        return ds @ of.key, dk, dv


class ScaleMissingInDk(Backward):
    """The gradient of keys is not multiplied by the scale."""

    def _products(self, ds: Tensor, p: Tensor, of: Rows) -> tuple[Tensor, Tensor, Tensor]:
        dq, _, dv = super()._products(ds, p, of)
        return dq, ds.mT @ of.query, dv


class ScaleTwice(Backward):
    """A gradient is multiplied by the scale twice: of queries, of keys, or both."""

    variants: Sequence[Any] = ("dk", "dq", "both")

    def _products(self, ds: Tensor, p: Tensor, of: Rows) -> tuple[Tensor, Tensor, Tensor]:
        dq, dk, dv = super()._products(ds, p, of)
        return (self.scale if self.variant != "dk" else 1) * dq, (self.scale if self.variant != "dq" else 1) * dk, dv


class ScaleOfHeadSize(Backward):
    """The gradients are multiplied by the scale of the head size, whatever scale the scores have."""

    def _products(self, ds: Tensor, p: Tensor, of: Rows) -> tuple[Tensor, Tensor, Tensor]:
        scale = self.example.head_size**-0.5
        return scale * (ds @ of.key), scale * (ds.mT @ of.query), p.mT @ of.grad_out


class BaseMixedUp(Backward):
    """The weights are recomputed from a log-sum-exp of the wrong base."""

    variants: Sequence[Any] = (1.4426950408889634, 0.6931471805599453)

    def _base(self, lse: Tensor) -> Tensor:
        return lse * self.variant


class BiasForgotten(Backward):
    """The weights are recomputed without their ALiBi biases."""

    def _biased(self, score: Tensor, of: Rows) -> Tensor:
        return score


# --- groups ---


class OneHeadOfGroup(Backward):
    """The gradients of keys and values are those of one head of a group, the last or the first: a write, not a sum."""

    variants: Sequence[Any] = (-1, 0)

    def _of_group(self, x: Tensor) -> Tensor:
        return x.unflatten(0, (-1, self.group))[:, self.variant]


class MeanOfGroup(Backward):
    """The gradients of keys and values are the mean over a group of heads, not the sum."""

    def _of_group(self, x: Tensor) -> Tensor:
        return super()._of_group(x) / self.group


class GroupInTurns(Backward):
    """The gradients of keys and values are added up over every hk-th head, not over adjacent heads."""

    def _of_group(self, x: Tensor) -> Tensor:
        return x.unflatten(0, (self.group, -1)).sum(0)


def by_autograd(kind: type[Attention]) -> type[Formula]:
    """Return the gradients of attention with a mistake in its forward."""

    class OfForward(Formula, is_base=True):
        may_show = kind.may_show

        def answers(self) -> Answers:
            def attention(given: Arguments) -> tuple[Any, ...]:
                return tuple(kind(self.example, given, self.variant).answers().values())

            return gradients.differentiate(attention, self.arguments)

    return OfForward
