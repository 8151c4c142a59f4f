"""The selection of keys, and mistakes in it and in reading lists of selected keys."""

import torch
from torch import Tensor

from twinattn.kit.example import Answers, Arguments, Example
from twinattn.kit.mistakes.formula import Attention, Formula


class MinusOneFollowed(Attention):
    """-1 is clamped to 0: the sequence's first key is seen."""

    paths: tuple[str, ...] = ("sparse", "sparse_latents", "packed_latents")
    variants = (False, True)  # counted each time, or once

    def _counts(self, positions: Tensor, s: int) -> Tensor:
        counts = super()._counts(positions.clamp(min=0), s)
        return counts.clamp(max=1) if self.variant else counts


class MinusOneFromTheEnd(Attention):
    """-1 is used as an index from the end: the sequence's last key is seen."""

    paths: tuple[str, ...] = ("sparse", "sparse_latents", "packed_latents")
    variants = (False, True)  # counted each time, or once

    def _counts(self, positions: Tensor, s: int) -> Tensor:
        counts = super()._counts(torch.where(positions < 0, s - 1, positions), s)
        return counts.clamp(max=1) if self.variant else counts


class MinusOneEnds(Attention):
    """The list ends at its first -1: later entries are ignored."""

    paths: tuple[str, ...] = ("sparse", "sparse_latents", "packed_latents")

    def _counts(self, positions: Tensor, s: int) -> Tensor:
        ended = (positions < 0).cumsum(1) > 0
        return super()._counts(positions.masked_fill(ended, -1), s)


class ListPastACount(Attention):
    """A list is read up to a count: later entries are ignored."""

    paths: tuple[str, ...] = ("sparse", "sparse_latents")
    variants = (16, 32, 64, 128, 256)

    @classmethod
    def may_show(cls, example: Example, arguments: Arguments, variant: int) -> bool:
        """Return whether there are longer lists."""
        return bool(arguments["positions"].shape[1] > variant)

    def _counts(self, positions: Tensor, s: int) -> Tensor:
        return super()._counts(positions[:, : self.variant], s)


class ListedTwiceCountsOnce(Attention):
    """A position that is listed twice counts once, as in a mask."""

    paths: tuple[str, ...] = ("sparse", "sparse_latents", "packed_latents")

    def _counts(self, positions: Tensor, s: int) -> Tensor:
        return super()._counts(positions, s).clamp(max=1)


class SelectionOfFirstQuery(Attention):
    """All queries of a sequence use the list of its first one."""

    paths: tuple[str, ...] = ("sparse", "sparse_latents", "packed_latents")

    def _counts(self, positions: Tensor, s: int) -> Tensor:
        return super()._counts(positions[:1].expand_as(positions), s)


class SelectionIgnored(Attention):
    """The selection is ignored: each query sees all keys up to itself."""

    paths: tuple[str, ...] = ("sparse", "sparse_latents", "packed_latents")

    def _counts(self, positions: Tensor, s: int) -> Tensor:
        q = len(positions)
        return (torch.arange(s) <= torch.arange(s - q, s)[:, None]).double()


class Selection(Formula, is_base=True):
    """The selection: the highest scores, and among equal ones the first."""

    paths: tuple[str, ...] = ("select",)

    def answers(self) -> Answers:
        """Select for each query."""
        topk = self.arguments["topk"]
        rows = [sorted(self._best(row, topk)) for row in self.arguments["scores"].tolist()]
        return {"out": torch.tensor([row + [-1] * (topk - len(row)) for row in rows], dtype=torch.int32)}

    def _best(self, scores: list[float], topk: int) -> list[int]:
        """Return the positions of the best scores."""
        keys = [j for j, score in enumerate(scores) if self._is_key(score)]
        return sorted(keys, key=lambda j: (-scores[j], self._tie(j)))[:topk]

    def _is_key(self, score: float) -> bool:
        """Return whether a score belongs to a key: it is above -inf."""
        return score > -float("inf")

    def _tie(self, j: int) -> int:
        """Return the rank of a position among equal scores."""
        return j


class TiesToHigher(Selection):
    """Equal scores go to the higher position: on a plateau the last keys are selected, not the first."""

    def _tie(self, j: int) -> int:
        return -j


class NoKeySelected(Selection):
    """If fewer keys are visible than requested, positions without a key fill up the list."""

    def _is_key(self, score: float) -> bool:
        return True


class ZeroIsNoKey(Selection):
    """Only scores above 0 are selected: a plateau of exact zeros is left out."""

    def _is_key(self, score: float) -> bool:
        return score > 0


class NegativeZeroBelow(Selection):
    """-0 is ranked below 0, by its bits."""

    def _best(self, scores: list[float], topk: int) -> list[int]:
        signs = torch.tensor(scores, dtype=torch.float64).signbit().tolist()
        keys = [j for j, score in enumerate(scores) if self._is_key(score)]
        return sorted(keys, key=lambda j: (-scores[j], scores[j] == 0 and signs[j], j))[:topk]


class PositionOfSixteenBits(Selection):
    """Positions have 16 bits: larger ones wrap around, or become negative."""

    past = ("rows",)
    variants = (-(2**15), 0)  # the lowest number

    def _best(self, scores: list[float], topk: int) -> list[int]:
        return [(j - self.variant) % 2**16 + self.variant for j in super()._best(scores, topk)]


class LowestSelected(Selection):
    """The lowest scores are selected, not the highest."""

    def _best(self, scores: list[float], topk: int) -> list[int]:
        keys = [j for j, score in enumerate(scores) if self._is_key(score)]
        return sorted(keys, key=lambda j: (scores[j], j))[:topk]
