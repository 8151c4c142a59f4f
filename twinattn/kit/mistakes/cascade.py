"""Mistakes in a cascade: in shared keys, own keys, and their merge."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from refattn.batch import Prefix
from twinattn.kit.mistakes.formula import Attention
from twinattn.kit.mistakes.splits import Split
from twinattn.kit.mistakes.where import given, with_prefixes


class OverPrefixes(Attention, is_base=True):
    """A base with the prefixes of each sequence."""

    where = with_prefixes

    paths: tuple[str, ...] = ("cascade",)

    @property
    def prefixes(self) -> list[Prefix]:
        """All prefixes, outer ones first."""
        return sorted(self.arguments.get("prefixes") or [], key=lambda prefix: prefix.end)

    def _ends(self, i: int) -> list[int]:
        """Return the ends of the prefixes of a sequence, outer ones first."""
        return [prefix.end for prefix in self.prefixes if prefix.first <= i < prefix.last]

    def _shared(self, i: int) -> int:
        """Return how many keys a sequence shares with any other."""
        return max(self._ends(i), default=0)


class PrefixTwice(OverPrefixes):
    """The shared keys are counted twice: in their own level, and in each sequence."""

    def _keys(self, i: int) -> Tensor:
        return torch.cat([torch.arange(self._shared(i)), super()._keys(i)])


class PrefixDropped(OverPrefixes):
    """The shared keys are left out: each sequence sees only its own."""

    def _keys(self, i: int) -> Tensor:
        return torch.arange(self._shared(i), self.lens[i][1])


class OwnKeysDropped(OverPrefixes):
    """Only the shared keys are seen."""

    def _keys(self, i: int) -> Tensor:
        return torch.arange(self._shared(i)) if self._ends(i) else super()._keys(i)


class PrefixOfEveryone(OverPrefixes):
    """A prefix is used for all sequences, also for those before its first and after its last one."""

    def _slots(self, i: int, j: Tensor) -> Tensor:
        slots = super()._slots(i, j)
        for prefix in self.prefixes[:1]:
            slots = torch.where(j < prefix.end, super()._slots(prefix.first, j), slots)
        return slots


class KeysBetweenPrefixesLost(OverPrefixes):
    """Where one prefix lies inside another, the keys of the outer or of the inner one are in no level."""

    variants: Sequence[Any] = ("inner", "outer")

    def _keys(self, i: int) -> Tensor:
        ends = self._ends(i)
        if len(ends) < 2:
            return super()._keys(i)
        first, last = (ends[0], ends[-1]) if self.variant == "inner" else (0, ends[-2])
        return torch.cat([torch.arange(first), torch.arange(last, self.lens[i][1])])


class PrefixesPastADepth(OverPrefixes):
    """Of prefixes one inside another, those past a depth are in no level: their keys are lost."""

    variants: Sequence[Any] = (2, 3, 4, 8, 15, 16)

    def _keys(self, i: int) -> Tensor:
        j, ends = super()._keys(i), self._ends(i)
        lost = (ends[self.variant - 1], ends[-1]) if len(ends) > self.variant else (0, 0)
        return j[(j < lost[0]) | (j >= lost[1])]


class RowsOfPrefixPastACount(OverPrefixes):
    """The rows of a group times its heads are packed, and past a count they do not see the shared keys."""

    variants: Sequence[Any] = (4096, 2**15, 2**16)

    def _visible(self, pos: Tensor, j: Tensor, s: int, q: int) -> Tensor:
        seen = super()._visible(pos, j, s, q)
        for prefix in self.prefixes:
            if prefix.first <= self.sequence < prefix.last:
                begin = self.first_rows[self.sequence] - self.first_rows[prefix.first]
                past = (begin + torch.arange(q))[:, None] >= self.variant // self.query.shape[1]
                seen = seen & ~(past & (j < prefix.end))
        return seen


class WindowIgnoredInSharedLevel(OverPrefixes):
    """The window is ignored in the level of shared keys: all of them are seen."""

    where = with_prefixes & given("window_size")

    def _visible(self, pos: Tensor, j: Tensor, s: int, q: int) -> Tensor:
        shared = self.mask._replace(left=-1).visible(pos, j, s) & (j < self._shared(self.sequence))
        return super()._visible(pos, j, s, q) | shared


class SinksOfEveryLevel(OverPrefixes):
    """The sink is counted twice, in the level of shared keys and in that of the sequence's own keys."""

    where = with_prefixes & given("sinks")

    def _of_sinks(self, peak: Tensor) -> Tensor | float:
        return (1 + len(self._ends(self.sequence))) * super()._of_sinks(peak)


class Levels(OverPrefixes, Split, is_base=True):
    """A base: shared keys and own keys, merged."""

    variants: Sequence[Any] = (None,)

    def _softmax(self, scores: Tensor, visible: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        ends = sorted(set(self._ends(self.sequence)))
        if not ends:
            return Attention._softmax(self, scores, visible, value)
        sinks, parts = self.sinks, []
        for first, last in zip([0, *ends], [*ends, visible.shape[-1]], strict=True):
            self.sinks = sinks if first == ends[-1] else None
            parts.append(Attention._softmax(self, scores[..., first:last], visible[:, first:last], value[first:last]))
        outs, lses = (torch.stack(x) for x in zip(*parts, strict=True))
        return self._merged(outs, lses)


class LevelsAveraged(Levels):
    """The outputs over shared and own keys are averaged, not weighted by their log-sum-exp."""

    def _merged(self, outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
        return outs.mean(0), lses.logsumexp(0)


class LevelsMergedBaseTwo(Levels):
    """The outputs over shared and own keys are merged with a log-sum-exp of the wrong base."""

    variants: Sequence[Any] = (math.log(2), 1 / math.log(2))

    def _merged(self, outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
        out, lse = super()._merged(outs, lses * self.variant)
        return out, lse / self.variant
