"""Mistakes in a cascade: shared keys and own keys."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from refattn.conformance.mistakes.formula import Attention
from refattn.conformance.mistakes.splits import Split


class PrefixTwice(Attention):
    """The shared keys are counted twice: in their own level, and in each sequence."""

    paths: tuple[str, ...] = ("cascade",)

    def _keys(self, i: int) -> Tensor:
        prefixes = self.arguments.get("prefixes") or []
        end = prefixes[0].end if prefixes else 0
        return torch.cat([torch.arange(end), super()._keys(i)])


class PrefixDropped(Attention):
    """The shared keys are left out: each sequence sees only its own."""

    paths: tuple[str, ...] = ("cascade",)

    def _keys(self, i: int) -> Tensor:
        prefixes = self.arguments.get("prefixes") or []
        return torch.arange(prefixes[0].end if prefixes else 0, self.lens[i][1])


class OwnKeysDropped(Attention):
    """Only the shared keys are seen."""

    paths: tuple[str, ...] = ("cascade",)

    def _keys(self, i: int) -> Tensor:
        prefixes = self.arguments.get("prefixes") or []
        return torch.arange(prefixes[0].end) if prefixes else super()._keys(i)


class Levels(Split, is_base=True):
    """A base: shared keys and own keys, merged."""

    variants: Sequence[Any] = (None,)
    paths: tuple[str, ...] = ("cascade",)

    def _softmax(self, scores: Tensor, visible: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        prefixes = self.arguments.get("prefixes") or []
        end = prefixes[0].end if prefixes else 0
        if not end:
            return Attention._softmax(self, scores, visible, value)
        cuts = [(0, end), (end, visible.shape[-1])]
        sinks = self.sinks
        parts = []
        for first, last in cuts:
            self.sinks = sinks if first else None
            parts.append(Attention._softmax(self, scores[..., first:last], visible[:, first:last], value[first:last]))
        outs, lses = (torch.stack(x) for x in zip(*parts, strict=True))
        return self._merged(outs, lses)


class LevelsAveraged(Levels):
    """The answers over shared and own keys are averaged, not weighted by their log-sum-exp."""

    def _merged(self, outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
        return outs.mean(0), lses.logsumexp(0)


class LevelsMergedBaseTwo(Levels):
    """The answers over shared and own keys are merged with a log-sum-exp of the wrong base."""

    variants: Sequence[Any] = (math.log(2), 1 / math.log(2))

    def _merged(self, outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
        out, lse = super()._merged(outs, lses * self.variant)
        return out, lse / self.variant
