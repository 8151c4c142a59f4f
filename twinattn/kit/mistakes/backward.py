"""Gradients of attention in steps, and mistakes in them."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from twinattn.kit import gradients
from twinattn.kit.example import Answers, Arguments, Example
from twinattn.kit.mistakes.beside import WHERE
from twinattn.kit.mistakes.formula import INFINITY, Attention, Formula, Mask

TILES = (16, 32, 64, 128)  # rows that a kernel may take at a time


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


# --- masks of the backward alone ---


class BackwardTopLeft(Backward):
    """The backward aligns its causal mask top-left, unlike the forward."""

    def _visible(self, pos: Tensor, j: Tensor, s: int, q: int) -> Tensor:
        return self.mask.visible(pos - (s - q), j, s)


class BackwardSeesNext(Backward):
    """The backward shows each query one key too many, the one after its own."""

    def _visible(self, pos: Tensor, j: Tensor, s: int, q: int) -> Tensor:
        return self.mask.visible(pos + 1, j, s)


class BackwardHidesItself(Backward):
    """The backward hides each query's own key."""

    def _visible(self, pos: Tensor, j: Tensor, s: int, q: int) -> Tensor:
        return super()._visible(pos, j, s, q) & (j != pos) if self.mask.causal else super()._visible(pos, j, s, q)


class BackwardNotCausal(Backward):
    """The backward has no causal mask."""

    def _visible(self, pos: Tensor, j: Tensor, s: int, q: int) -> Tensor:
        return self.mask._replace(causal=False).visible(pos, j, s)


class BackwardWithoutWindow(Backward):
    """The backward has no window."""

    def _visible(self, pos: Tensor, j: Tensor, s: int, q: int) -> Tensor:
        return self.mask._replace(left=-1, right=-1).visible(pos, j, s)


class BackwardWindowOff(Backward):
    """The window of the backward is one key longer, or shorter, than that of the forward."""

    variants: Sequence[Any] = (1, -1)

    def _visible(self, pos: Tensor, j: Tensor, s: int, q: int) -> Tensor:
        if self.mask.left < 0:
            return super()._visible(pos, j, s, q)
        return self.mask._replace(left=max(self.mask.left + self.variant, 0)).visible(pos, j, s)


class BackwardWindowOneSided(Backward):
    """The backward ignores the right side of a window."""

    def _visible(self, pos: Tensor, j: Tensor, s: int, q: int) -> Tensor:
        return self.mask._replace(right=-1).visible(pos, j, s)


class BackwardKeysOfQueries(Backward):
    """The backward uses the offsets of queries for keys."""

    def _keys(self, row: int, first: int, s: int, most: int) -> slice:
        row = min(row, most - s)
        return slice(row, row + s)


# --- sums over tiles ---


class LastTileAlone(Backward):
    """Tiles overwrite a gradient instead of adding to it: only the last tile counts."""

    variants: Sequence[Any] = tuple((name, tile) for tile in TILES for name in ("dq", "dk"))

    def _products(self, ds: Tensor, p: Tensor, of: Rows) -> tuple[Tensor, Tensor, Tensor]:
        name, tile = self.variant
        n = ds.shape[-1] if name == "dq" else ds.shape[-2]
        first = max(n - 1, 0) // tile * tile
        dq, dk, dv = super()._products(ds, p, of)
        if name == "dq":
            return self.scale * (ds[..., first:] @ of.key[:, first:]), dk, dv
        rows = slice(first, None)
        return dq, self.scale * (ds[:, rows].mT @ of.query[:, rows]), p[:, rows].mT @ of.grad_out[:, rows]


class LastTileLost(Backward):
    """The last, partial tile of keys, or of queries, is missing in the gradients."""

    variants: Sequence[Any] = tuple((name, tile) for tile in TILES for name in ("keys", "queries", "dq", "dk"))

    def _products(self, ds: Tensor, p: Tensor, of: Rows) -> tuple[Tensor, Tensor, Tensor]:
        name, tile = self.variant
        dq, dk, dv = super()._products(ds, p, of)
        ds, p = ds.clone(), p.clone()
        dim = -1 if name in ("keys", "dq") else -2
        for x in (ds, p):
            x.transpose(dim, -1)[..., x.shape[dim] // tile * tile :] = 0
        less_dq, less_dk, less_dv = super()._products(ds, p, of)
        if name == "dq":
            return less_dq, dk, dv
        return dq if name == "dk" else less_dq, less_dk, less_dv


# --- sinks ---


class SinkWithoutGradient(Backward):
    """Sinks have no gradient."""

    def _of_sinks(self, p_sink: Tensor, delta: Tensor, grad_lse: Tensor) -> Tensor:
        return super()._of_sinks(0 * p_sink, delta, grad_lse)


class SinkGradientWithWrongSign(Backward):
    """The gradient of sinks has the wrong sign."""

    def _of_sinks(self, p_sink: Tensor, delta: Tensor, grad_lse: Tensor) -> Tensor:
        return -super()._of_sinks(p_sink, delta, grad_lse)


class SinkGradientNotWeighted(Backward):
    """The gradient of sinks is the sum of -delta, not multiplied by the weight of the sink."""

    def _of_sinks(self, p_sink: Tensor, delta: Tensor, grad_lse: Tensor) -> Tensor:
        return super()._of_sinks(torch.ones_like(p_sink), delta, grad_lse)


class SinkGradientOfLastRow(Backward):
    """The gradient of sinks is that of the last query of a sequence, not the sum over all."""

    def _of_sinks(self, p_sink: Tensor, delta: Tensor, grad_lse: Tensor) -> Tensor:
        return super()._of_sinks(*(x[:, -1:] for x in (p_sink, delta, grad_lse)))


class BackwardWithoutSink(Backward):
    """The weights are recomputed without the sink in their sum; perhaps also the weight of the sink."""

    variants: Sequence[Any] = ("weights", "sink, too")

    def _base(self, lse: Tensor) -> Tensor:
        self.ratio = (lse - self.without_sink).exp()
        return self.without_sink

    def _of_sinks(self, p_sink: Tensor, delta: Tensor, grad_lse: Tensor) -> Tensor:
        return super()._of_sinks(p_sink * (self.ratio if self.variant != "weights" else 1), delta, grad_lse)


# --- memory, and rows that see no key ---


class GradientTakenForContiguous(Backward):
    """The gradient of the output is read as if it were contiguous, all of it or the rows of each sequence."""

    variants: Sequence[Any] = ("all", "sequence")

    def _grad_out(self, grad_out: Tensor) -> Tensor:
        h, d = grad_out.shape[1:]
        lengths = [q for q, _ in self.example.lens]
        parts = [*grad_out.split([*lengths, len(grad_out) - sum(lengths)])] if self.variant != "all" else [grad_out]
        return torch.cat([x.as_strided(x.shape, (h * d, d, 1)) for x in parts])


class GradientTakenForDense(Backward):
    """The gradient of the output is read as if its last stride were 1, or its rows had no gaps."""

    variants: Sequence[Any] = ("last", "rows")

    def _grad_out(self, grad_out: Tensor) -> Tensor:
        a, b, c = grad_out.stride()
        strides = (a, b, 1) if self.variant == "last" else (grad_out.shape[1] * b, b, c)
        return grad_out.as_strided(grad_out.shape, strides)


class EmptyGradientIsNan(Backward):
    """The gradient of a query that sees no key is NaN, 0 * inf; perhaps also those of the keys of its sequence."""

    variants: Sequence[Any] = ("rows", "keys", "all")

    def _of_empty(self, dq: Tensor, dk: Tensor, dv: Tensor, empty: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        if not dk.shape[1]:  # without keys nothing is multiplied
            return dq, dk, dv
        spoilt = empty.any(1, keepdim=True)
        if self.variant != "keys":
            dq = dq.masked_fill(empty, torch.nan)
        if self.variant != "rows":
            dk, dv = (x.masked_fill(spoilt, torch.nan) for x in (dk, dv))
        return dq, dk, dv


class PaddingGradientUnwritten(Backward):
    """The gradients of rows after the last sequence are not written: they hold what was in memory before."""

    variants: Sequence[Any] = (("dq",), ("dq", "dk", "dv"), ("dk", "dv"))

    def _finish(self, found: Answers) -> Answers:
        padding = self.example.padding_rows
        for name in self.variant if padding else ():
            found[name][-padding:] = torch.nan
        return found


class PaddingReachesGradients(Backward):
    """Rows after the last sequence reach the gradients of the last one: NaN there is multiplied by 0."""

    variants: Sequence[Any] = (("dk", "dv"), ("dq",), ("dq", "dk", "dv"), ("dv",), ("dk",))

    def _finish(self, found: Answers) -> Answers:
        *_, (q, s) = [(0, 0), *self.example.lens]
        for name in self.variant if self.example.padding_rows else ():
            n, end = (q if name == "dq" else s), len(found[name]) - self.example.padding_rows
            found[name][end - n : end] = torch.nan
        return found


class KeysAndValuesSwapped(Backward):
    """The gradients of keys and of values are swapped."""

    def _finish(self, found: Answers) -> Answers:
        return found | {"dk": found["dv"], "dv": found["dk"]}


def by_autograd(kind: type[Attention]) -> type[Formula]:
    """Return the gradients of attention with a mistake in its forward."""

    class OfForward(Formula, is_base=True):
        may_show = kind.may_show

        def answers(self) -> Answers:
            def attention(given: Arguments) -> tuple[Any, ...]:
                return tuple(kind(self.example, given, self.variant).answers().values())

            return gradients.differentiate(attention, self.arguments)

    return OfForward
