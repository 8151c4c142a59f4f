"""Mistakes beyond the size of a tile, a batch, a group or a split; and mistakes with memory for the output."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from twinattn.kit.example import Answers, Arguments, Example
from twinattn.kit.mistakes.formula import INFINITY, Attention
from twinattn.kit.mistakes.where import given, in_groups, in_odd_groups, not_causal, written_into_a_view

SIZES = (16, 32, 64, 128, 256)
COUNTS = (4, 8, 16, 32, 64, 128, 256)
THRESHOLDS = (64, 128, 256, 512, 1024)  # a kernel may split more keys than these

# --- tiles ---


class FullTileLosesLastKey(Attention):
    """The last key is lost if the keys of a sequence fill the last tile, or block, exactly."""

    variants: Sequence[Any] = SIZES

    @classmethod
    def may_show(cls, example: Example, arguments: Arguments, variant: Any) -> bool:
        """Return whether keys fill a tile."""
        return any(s % variant == 0 for _, s in example.lens)

    def _visible(self, pos: Tensor, j: Tensor, s: int, q: int) -> Tensor:
        seen = super()._visible(pos, j, s, q)
        return seen & (j != s - 1) if s % self.variant == 0 else seen


class FullTileDropped(Attention):
    """The last tile of keys, or block, is dropped if the keys of a sequence fill it exactly."""

    variants: Sequence[Any] = SIZES

    @classmethod
    def may_show(cls, example: Example, arguments: Arguments, variant: Any) -> bool:
        """Return whether keys fill a tile."""
        return any(s % variant == 0 for _, s in example.lens)

    def _visible(self, pos: Tensor, j: Tensor, s: int, q: int) -> Tensor:
        seen = super()._visible(pos, j, s, q)
        return seen & (j < s - self.variant) if s % self.variant == 0 else seen


class PartOfTileDropped(Attention):
    """The last tile of keys is dropped if it is not full."""

    variants: Sequence[Any] = SIZES

    @classmethod
    def may_show(cls, example: Example, arguments: Arguments, variant: Any) -> bool:
        """Return whether keys do not fill a tile."""
        return any(s % variant for _, s in example.lens)

    def _visible(self, pos: Tensor, j: Tensor, s: int, q: int) -> Tensor:
        return super()._visible(pos, j, s, q) & (j < s // self.variant * self.variant)


class LaterQueriesOffByOne(Attention):
    """The causal mask is off by one from the second tile of queries on."""

    variants: Sequence[Any] = tuple((size, more) for size in SIZES for more in (1, -1))

    @classmethod
    def may_show(cls, example: Example, arguments: Arguments, variant: Any) -> bool:
        """Return whether there is a second tile."""
        return any(q > variant[0] for q, _ in example.lens)

    def _visible(self, pos: Tensor, j: Tensor, s: int, q: int) -> Tensor:
        size, more = self.variant
        seen, later = super()._visible(pos, j, s, q), pos - pos[0] >= size
        return seen | (later & (j == pos + 1) & (j < s)) if more > 0 else seen & ~(later & (j == pos))


class LaterQueriesUnwritten(Attention):
    """Only the first tile of queries of a sequence is computed."""

    variants: Sequence[Any] = tuple((size, value) for size in SIZES for value in (math.nan, 0.0))

    @classmethod
    def may_show(cls, example: Example, arguments: Arguments, variant: Any) -> bool:
        """Return whether there is a second tile."""
        return any(q > variant[0] for q, _ in example.lens)

    def _sequence(self, i: int, query: Tensor) -> tuple[Tensor, Tensor]:
        size, value = self.variant
        out, lse = super()._sequence(i, query)
        out[size:], lse[size:] = value, math.nan if math.isnan(value) else -INFINITY
        return out, lse


class LaterQueriesFromTheirTile(Attention):
    """Queries count their positions from the beginning of their tile."""

    variants: Sequence[Any] = SIZES

    @classmethod
    def may_show(cls, example: Example, arguments: Arguments, variant: Any) -> bool:
        """Return whether there is a second tile."""
        return any(q > variant for q, _ in example.lens)

    def _positions(self, q: int, s: int, i: int) -> Tensor:
        return s - q + torch.arange(q) % self.variant


# --- sequences ---


class PastACount(Attention, is_base=True):
    """A base: something is wrong from some sequence on; large batches are tried for large counts only."""

    past = ("sequences",)

    @classmethod
    def may_show(cls, example: Example, arguments: Arguments, variant: Any) -> bool:
        """Return whether the batch has more sequences than the count."""
        count = len(example.lens)
        return bool(count // 10 <= variant[0] < count) if count > 100 else variant[0] < count


class LengthsPastACount(PastACount):
    """From some sequence on, seq_lens is read elsewhere: from the beginning again, or at one fixed entry."""

    variants: Sequence[Any] = tuple((count, how) for count in COUNTS for how in ("again", "last", "first"))

    def __init__(self, example: Example, arguments: Arguments, variant: Any = None) -> None:
        super().__init__(example, arguments, variant)
        count, how = variant
        at = {"again": lambda i: i % count, "last": lambda i: min(i, count - 1), "first": lambda i: 0}[how]
        lens = example.lens
        self.lens = tuple((q, s if i < count else lens[at(i)][1]) for i, (q, s) in enumerate(lens))


class TablesPastACount(PastACount):
    """From some sequence on, the block table of another one is read."""

    variants: Sequence[Any] = tuple((count, how) for count in COUNTS for how in ("again", "last"))

    def _blocks(self, i: int, column: Tensor) -> Tensor:
        count, how = self.variant
        return super()._blocks(i if i < count else (i % count if how == "again" else count - 1), column)


class SequencesPastACount(PastACount):
    """From some sequence on, nothing is computed."""

    variants: Sequence[Any] = tuple((count, value) for count in COUNTS for value in (math.nan, 0.0))

    def _sequence(self, i: int, query: Tensor) -> tuple[Tensor, Tensor]:
        out, lse = super()._sequence(i, query)
        count, value = self.variant
        if i >= count:
            out, lse = out * 0 + value, lse * 0 + (math.nan if math.isnan(value) else -INFINITY)
        return out, lse


# --- heads ---


class GroupsOfPowersOfTwo(Attention):
    """The number of query heads per KV head is rounded to a power of two: groups of 3 or 7 read a wrong KV head."""

    where = in_odd_groups

    variants: Sequence[Any] = ("up", "down")

    def _grouped(self, x: Tensor) -> Tensor:
        h, hk = self.query.shape[1], x.shape[1]
        exact = math.log2(h // hk)
        group = 2 ** (math.ceil(exact) if self.variant == "up" else math.floor(exact))
        return x[:, (torch.arange(h) // group).clamp(max=hk - 1)]


class GroupsPastATile(Attention):
    """A tile of query heads counts as a KV head: those of a larger group read the next KV head."""

    where = in_groups
    variants: Sequence[Any] = (4, 8, 16)

    @classmethod
    def may_show(cls, example: Example, arguments: Arguments, variant: Any) -> bool:
        """Return whether a group is larger than the tile."""
        h, hk = example.heads
        return bool(h // max(hk, 1) > variant) and super().may_show(example, arguments, variant)

    def _grouped(self, x: Tensor) -> Tensor:
        h, hk = self.query.shape[1], x.shape[1]
        return x[:, (torch.arange(h) // min(h // hk, self.variant)).clamp(max=hk - 1)]


class KvHeadsWrap(Attention):
    """Numbers of KV heads have too few bits: from some head on, the first ones are read again."""

    variants: Sequence[Any] = (2, 4, 8, 16, 32)

    @classmethod
    def may_show(cls, example: Example, arguments: Arguments, variant: Any) -> bool:
        """Return whether there are more KV heads."""
        return bool(example.heads[1] > variant) and super().may_show(example, arguments, variant)

    def _grouped(self, x: Tensor) -> Tensor:
        return super()._grouped(x[:, torch.arange(x.shape[1]) % self.variant])


class PartOfHeadDropped(Attention):
    """Products are summed over whole tiles of a head, and the elements after the last one are dropped."""

    variants: Sequence[Any] = (16, 32, 64, 128)

    @classmethod
    def may_show(cls, example: Example, arguments: Arguments, variant: Any) -> bool:
        """Return whether a head does not fill its tiles."""
        return bool(example.head_size % variant) and super().may_show(example, arguments, variant)

    def _products(self, query: Tensor, key: Tensor) -> Tensor:
        size = query.shape[-1] // self.variant * self.variant
        return super()._products(query[..., :size], key[..., :size])


class WindowRightPastATile(Attention):
    """A right side of a window that is a tile of keys, or longer, is taken for no limit."""

    where = given("window_size") & not_causal
    variants: Sequence[Any] = SIZES

    @classmethod
    def may_show(cls, example: Example, arguments: Arguments, variant: Any) -> bool:
        """Return whether the right side is as long as the tile."""
        right = arguments.get("window_size", (-1, -1))[1]
        return bool(right >= variant) and super().may_show(example, arguments, variant)

    def __init__(self, example: Example, arguments: Arguments, variant: Any = None) -> None:
        super().__init__(example, arguments, variant)
        if self.mask.right >= self.variant:
            self.mask = self.mask._replace(right=-1)


# --- keys that are split ---


class InSplits(Attention, is_base=True):
    """A base: an option is left out in decodes over many keys, which are split."""

    variants: Sequence[Any] = THRESHOLDS

    @classmethod
    def may_show(cls, example: Example, arguments: Arguments, variant: Any) -> bool:
        """Return whether there is a decode over more keys than the threshold, and the option is given."""
        return any(q == 1 and s > variant for q, s in example.lens) and super().may_show(example, arguments, variant)

    def _sequence(self, i: int, query: Tensor) -> tuple[Tensor, Tensor]:
        before = self.mask, self.scale, self.softcap, self.slopes, self.sinks
        if len(query) == 1 and self.lens[i][1] > self.variant:
            self._forget()
        try:
            return super()._sequence(i, query)
        finally:
            self.mask, self.scale, self.softcap, self.slopes, self.sinks = before

    def _forget(self) -> None:
        """Leave an option out."""
        raise NotImplementedError


class SoftcapIgnoredInSplits(InSplits):
    """The softcap is left out in decodes whose keys are split."""

    where = given("softcap")

    def _forget(self) -> None:
        self.softcap = 0.0


class WindowIgnoredInSplits(InSplits):
    """The window is ignored in decodes whose keys are split."""

    where = given("window_size")

    def _forget(self) -> None:
        self.mask = self.mask._replace(left=-1)


class SinksIgnoredInSplits(InSplits):
    """The sinks are left out in decodes whose keys are split."""

    where = given("sinks")

    def _forget(self) -> None:
        self.sinks = None


class AlibiIgnoredInSplits(InSplits):
    """ALiBi is left out in decodes whose keys are split."""

    where = given("alibi_slopes")

    def _forget(self) -> None:
        self.slopes = None


class ScaleFixedInSplits(InSplits):
    """The given scale is ignored in decodes whose keys are split."""

    where = given("softmax_scale")

    def _forget(self) -> None:
        self.scale = self.example.head_size**-0.5


class AlibiFromSplit(Attention):
    """ALiBi counts keys from the beginning of their split."""

    variants: Sequence[Any] = (*SIZES, *THRESHOLDS[2:])

    @classmethod
    def may_show(cls, example: Example, arguments: Arguments, variant: Any) -> bool:
        """Return whether there is a second split, and ALiBi."""
        return max((s for _, s in example.lens), default=0) > variant and arguments.get("alibi_slopes") is not None

    def _distance(self, pos: Tensor, j: Tensor) -> Tensor:
        return super()._distance(pos, j % self.variant)


# --- memory for the output ---


class OutStridesAssumed(Attention):
    """out= is written as if it were contiguous: its strides are ignored."""

    where = written_into_a_view

    def answers(self) -> Answers:
        """Compute the outputs, and write them contiguously."""
        answers, given = super().answers(), self.arguments.get("out")
        if given is not None and not given.is_contiguous():
            memory = torch.full((given.untyped_storage().nbytes() // given.itemsize,), 7.0, dtype=torch.float64)
            written = answers["out"].flatten()
            memory[given.storage_offset() : given.storage_offset() + len(written)] = written
            answers["out"] = memory.as_strided(given.shape, given.stride(), given.storage_offset())
        return answers
