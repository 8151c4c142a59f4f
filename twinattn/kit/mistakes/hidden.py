"""Mistakes with memory that no query may see, and with visible NaN."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from twinattn.kit.example import Answers
from twinattn.kit.mistakes.formula import INFINITY, Attention
from twinattn.kit.mistakes.masks import PastTheEnd
from twinattn.kit.mistakes.where import padded, with_nan


class HiddenTimesNan(Attention):
    """Values that a window or a chunk hides are multiplied by a weight of 0: NaN there reaches the output."""

    where = with_nan

    def _product(self, weights: Tensor, value: Tensor, visible: Tensor) -> Tensor:
        return self._weighted(weights, value)


class ZeroTimesNan(PastTheEnd):
    """Values past a sequence's end are multiplied by a weight of 0: NaN and infinity there reach the output as NaN."""

    where = with_nan

    def _visible(self, pos: Tensor, j: Tensor, s: int, q: int) -> Tensor:
        return Attention._visible(self, pos, j, s, q)

    def _product(self, weights: Tensor, value: Tensor, visible: Tensor) -> Tensor:
        return self._weighted(weights, value)


class MaskAdded(PastTheEnd):
    """The mask is added to the scores: a NaN or infinite key past a sequence's end makes a score of NaN."""

    where = with_nan

    def _visible(self, pos: Tensor, j: Tensor, s: int, q: int) -> Tensor:
        return Attention._visible(self, pos, j, s, q)

    def _hide(self, scores: Tensor, visible: Tensor) -> Tensor:
        return scores + torch.zeros_like(scores).masked_fill(~visible, -INFINITY)

    def _product(self, weights: Tensor, value: Tensor, visible: Tensor) -> Tensor:
        return self._weighted(weights, value)


class WholePoolTimesNan(Attention):
    """Every block of the pool is multiplied by a weight of 0: NaN in blocks of no sequence reaches the output."""

    where = with_nan

    def _product(self, weights: Tensor, value: Tensor, visible: Tensor) -> Tensor:
        return super()._product(weights, value, visible) + 0 * self._grouped(
            self.value_pool.double().sum(0, keepdim=True)
        )


class FiniteSentinel(Attention):
    """Hidden scores become a finite number: hidden keys get weight where all visible scores are lower."""

    variants: Sequence[Any] = (-1e4, -65504.0, -1e9, -1e30)

    def _hide(self, scores: Tensor, visible: Tensor) -> Tensor:
        return scores.masked_fill(~visible, self.variant)

    def _product(self, weights: Tensor, value: Tensor, visible: Tensor) -> Tensor:
        return self._weighted(weights, value)


class PaddingComputed(Attention):
    """Rows after the last sequence are computed as if they belonged to it."""

    where = padded

    def answers(self) -> Answers:
        """Compute the outputs."""
        answers = super().answers()
        rows = self.query[self.example.num_tokens :]
        if len(rows):
            q, s = self.lens[-1]
            self.lens = (*self.lens[:-1], (len(rows), s))
            out, lse = self._sequence(len(self.lens) - 1, rows)
            answers["out"][self.example.num_tokens :], answers["lse"][self.example.num_tokens :] = out, lse
        return answers


class PaddingUnwritten(Attention):
    """Rows after the last sequence are not written: they hold what was in memory before."""

    where = padded

    def _finish(self, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
        out[self.example.num_tokens :] = torch.nan
        lse[self.example.num_tokens :] = self.variant
        return out, lse

    variants: Sequence[Any] = (torch.nan, -INFINITY, 0.0)


class NanHidden(Attention):
    """NaN is turned into a number, so that a broken model looks like a working one."""

    where = with_nan

    variants: Sequence[Any] = (0.0,)

    def _finish(self, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
        return out.nan_to_num(self.variant), lse


class NanKeySkipped(Attention):
    """A key whose score is NaN is left out of the sum, as if no query saw it."""

    where = with_nan

    def _hide(self, scores: Tensor, visible: Tensor) -> Tensor:
        return super()._hide(scores, visible).nan_to_num(-INFINITY, posinf=INFINITY, neginf=-INFINITY)

    def _product(self, weights: Tensor, value: Tensor, visible: Tensor) -> Tensor:
        return super()._product(weights, value.nan_to_num(0.0), visible)
