"""Mistakes of a backward pass alone in its masks, sums over tiles, sinks, memory, and rows that see no key."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from twinattn.kit.example import Answers
from twinattn.kit.mistakes.backward import Backward, Rows

TILES = (16, 32, 64, 128)  # rows that a kernel may take at a time

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
