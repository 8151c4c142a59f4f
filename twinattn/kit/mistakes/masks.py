"""Mistakes in the mask and in lengths."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from twinattn.kit.example import Arguments, Example
from twinattn.kit.mistakes.formula import Attention
from twinattn.kit.mistakes.where import (
    causal,
    given,
    not_causal,
    of_unlike_lengths,
    of_unlike_queries,
    several_queries,
    with_context,
)


class CausalTopLeft(Attention):
    """The causal mask is aligned top-left: query i is at position i instead of seq_len - query_len + i."""

    where = with_context

    def _positions(self, q: int, s: int, i: int) -> Tensor:
        return torch.arange(q)


class CausalPadded(Attention):
    """Queries are aligned to the longest sequence of the batch (max_seq_len), not to their own seq_len."""

    where = of_unlike_lengths

    def _positions(self, q: int, s: int, i: int) -> Tensor:
        return torch.arange(q) + max((s for _, s in self.lens), default=0) - q


class CausalMaxQuery(Attention):
    """Queries are at seq_len - max_query_len + i: the batch's longest query length instead of their own."""

    where = of_unlike_queries

    def _positions(self, q: int, s: int, i: int) -> Tensor:
        return torch.arange(q) + s - max((q for q, _ in self.lens), default=0)


class CausalSeesNext(Attention):
    """The causal mask shows one key too many: j <= i + 1 instead of j <= i."""

    where = several_queries

    def _visible(self, pos: Tensor, j: Tensor, s: int, q: int) -> Tensor:
        return super()._visible(pos, j, s, q) | (super()._visible(pos + 1, j, s, q) & (j == pos + 1))


class CausalHidesItself(Attention):
    """The causal mask hides a query's own key: j < i instead of j <= i."""

    def _visible(self, pos: Tensor, j: Tensor, s: int, q: int) -> Tensor:
        return super()._visible(pos, j, s, q) & (j != pos)


class CausalIgnored(Attention):
    """There is no causal mask: each query sees later keys too."""

    where = several_queries

    def _visible(self, pos: Tensor, j: Tensor, s: int, q: int) -> Tensor:
        later = (j > pos) & (j < s) & self.mask.causal
        return super()._visible(pos, j, s, q) | later


class CausalAlways(Attention):
    """causal=False is ignored: later keys are hidden."""

    where = not_causal

    def _visible(self, pos: Tensor, j: Tensor, s: int, q: int) -> Tensor:
        seen = super()._visible(pos, j, s, q)
        return seen & (j <= pos) if self.mask.right < 0 else seen


class WindowOneTooMany(Attention):
    """The window shows one key too many: a window (left, right) shows the left keys before a query and itself."""

    option = "window_size"

    def _visible(self, pos: Tensor, j: Tensor, s: int, q: int) -> Tensor:
        left = self.mask.left
        return self.mask._replace(left=left + 1 if left >= 0 else left).visible(pos, j, s)


class WindowOneTooFew(Attention):
    """The window shows one key too few: left is used as the size of the window, itself included."""

    option = "window_size"

    def _visible(self, pos: Tensor, j: Tensor, s: int, q: int) -> Tensor:
        left = self.mask.left
        hidden = (j == pos - left) if left >= 0 else torch.zeros(1, 1, dtype=torch.bool)
        return super()._visible(pos, j, s, q) & ~hidden


class WindowIgnored(Attention):
    """The window is ignored: a query sees keys before it."""

    option = "window_size"

    def _visible(self, pos: Tensor, j: Tensor, s: int, q: int) -> Tensor:
        return self.mask._replace(left=-1).visible(pos, j, s)


class WindowOfSequence(Attention):
    """The window counts back from the end of the sequence, not from each query."""

    option = "window_size"

    def _visible(self, pos: Tensor, j: Tensor, s: int, q: int) -> Tensor:
        seen, left = self.mask._replace(left=-1).visible(pos, j, s), self.mask.left
        return seen & (j >= s - 1 - left) if left >= 0 else seen


class WindowOfFirstQuery(Attention):
    """The window counts back from the first query of the sequence, for all of its queries."""

    option = "window_size"

    def _visible(self, pos: Tensor, j: Tensor, s: int, q: int) -> Tensor:
        seen, left = self.mask._replace(left=-1).visible(pos, j, s), self.mask.left
        return seen & (j >= pos[:1] - left) if left >= 0 else seen


class WindowTopLeft(Attention):
    """The window is aligned top-left: it is around row i, not around position seq_len - query_len + i."""

    option = "window_size"

    variants: Sequence[Any] = ("left side", "both sides")

    def _visible(self, pos: Tensor, j: Tensor, s: int, q: int) -> Tensor:
        _, left, right, _ = self.mask
        row = pos - (s - q)
        is_both = self.variant == "both sides" and not self.mask.causal and right >= 0
        seen = self.mask._replace(left=-1, right=-1 if is_both else right).visible(pos, j, s)
        seen = seen & (j <= row + right) if is_both else seen
        return seen & (j >= row - left) if left >= 0 else seen


class WindowRightIgnored(Attention):
    """The right side of the window is ignored: all later keys are seen."""

    option = "window_size"

    def _visible(self, pos: Tensor, j: Tensor, s: int, q: int) -> Tensor:
        return self.mask._replace(right=-1).visible(pos, j, s)


class WindowRightZero(Attention):
    """The right side of the window is taken as 0: no later key is seen."""

    where = not_causal
    variants: Sequence[Any] = (-1, 0)  # the least right side that is: there may be no limit

    def _visible(self, pos: Tensor, j: Tensor, s: int, q: int) -> Tensor:
        seen = super()._visible(pos, j, s, q)
        return seen & (j <= pos) if self.mask.right >= self.variant else seen


class WindowRightBeatsCausal(Attention):
    """The right side of the window shows later keys, although the mask is causal."""

    where = given("window_size") & causal

    def _visible(self, pos: Tensor, j: Tensor, s: int, q: int) -> Tensor:
        mask = self.mask
        return (mask._replace(causal=False) if mask.causal and mask.right > 0 else mask).visible(pos, j, s)


class WindowOfBlocks(Attention):
    """The window is rounded to whole blocks: it begins at the block that holds its first key."""

    option = "window_size"

    def _visible(self, pos: Tensor, j: Tensor, s: int, q: int) -> Tensor:
        seen, left = self.mask._replace(left=-1).visible(pos, j, s), self.mask.left
        p = self.example.block_size
        return seen & (j // p * p + p - 1 >= pos - left) if left >= 0 else seen


class ChunkIgnored(Attention):
    """Chunks are ignored: a query sees the keys of earlier chunks."""

    paths: tuple[str, ...] = ("local",)

    def _visible(self, pos: Tensor, j: Tensor, s: int, q: int) -> Tensor:
        return self.mask._replace(chunk=0).visible(pos, j, s)


class ChunkAsWindow(ChunkIgnored):
    """A chunk is treated as a sliding window of that many tokens."""

    def _visible(self, pos: Tensor, j: Tensor, s: int, q: int) -> Tensor:
        return super()._visible(pos, j, s, q) & (j > pos - self.mask.chunk)


class ChunkFromFirstQuery(ChunkIgnored):
    """Chunks are counted from the first new token, not from the beginning of the sequence."""

    def _visible(self, pos: Tensor, j: Tensor, s: int, q: int) -> Tensor:
        first = s - q
        same = (pos - first).div(self.mask.chunk, rounding_mode="floor") == (j - first).div(
            self.mask.chunk, rounding_mode="floor"
        )
        return super()._visible(pos, j, s, q) & same


class ChunkOneLate(ChunkIgnored):
    """Chunks end one token late: (i - 1) // chunk instead of i // chunk."""

    def _visible(self, pos: Tensor, j: Tensor, s: int, q: int) -> Tensor:
        return super()._visible(pos, j, s, q) & (
            (pos - 1).clamp(min=0) // self.mask.chunk == (j - 1).clamp(min=0) // self.mask.chunk
        )


class ChunkOneEarly(ChunkIgnored):
    """Chunks end one token early: (i + 1) // chunk instead of i // chunk."""

    def _visible(self, pos: Tensor, j: Tensor, s: int, q: int) -> Tensor:
        return super()._visible(pos, j, s, q) & ((pos + 1) // self.mask.chunk == (j + 1) // self.mask.chunk)


class ChunkOfLastQuery(ChunkIgnored):
    """All queries of a sequence get the chunk of its last one."""

    def _visible(self, pos: Tensor, j: Tensor, s: int, q: int) -> Tensor:
        return super()._visible(pos, j, s, q) & (j >= (s - 1) // self.mask.chunk * self.mask.chunk)


class FirstKeyDropped(Attention):
    """The first key of each sequence is never seen."""

    def _visible(self, pos: Tensor, j: Tensor, s: int, q: int) -> Tensor:
        return super()._visible(pos, j, s, q) & (j > 0)


class LastKeyDropped(Attention):
    """The last key of each sequence is never seen: seq_len - 1 keys are read."""

    def _visible(self, pos: Tensor, j: Tensor, s: int, q: int) -> Tensor:
        return super()._visible(pos, j, s, q) & (j < s - 1)


class NewTokensUnseen(Attention):
    """Only the context is seen: seq_lens is used as the length without the new tokens."""

    def _visible(self, pos: Tensor, j: Tensor, s: int, q: int) -> Tensor:
        return super()._visible(pos, j, s, q) & (j < s - q)


class PastTheEnd(Attention):
    """Keys past a sequence's end are seen: the last block is read as if it were full."""

    def _keys(self, i: int) -> Tensor:
        p = self.example.block_size
        return torch.arange(-(-self.lens[i][1] // p) * p)

    def _visible(self, pos: Tensor, j: Tensor, s: int, q: int) -> Tensor:
        return super()._visible(pos, j, s, q) | (j >= s)


class EverybodyLongest(Attention):
    """All sequences are treated as if they were as long as the longest: max_seq_len instead of seq_lens."""

    where = of_unlike_lengths

    def _keys(self, i: int) -> Tensor:
        return torch.arange(max((s for _, s in self.lens), default=0))

    def _visible(self, pos: Tensor, j: Tensor, s: int, q: int) -> Tensor:
        return super()._visible(pos, j, s, q) | (j >= s)


class LengthsOfNeighbour(Attention):
    """seq_lens is read one sequence off: each sequence has the length of the one before."""

    where = of_unlike_lengths

    def __init__(self, example: Example, arguments: Arguments, variant: Any = None) -> None:
        super().__init__(example, arguments, variant)
        lengths = [s for _, s in self.lens]
        self.lens = tuple((q, lengths[max(i - 1, 0)]) for i, (q, _) in enumerate(self.lens))


class WindowLostInLaterChunks(Attention):
    """A window is dropped for new tokens after their first chunk."""

    where = given("window_size")
    paths: tuple[str, ...] = ("local",)

    def _visible(self, pos: Tensor, j: Tensor, s: int, q: int) -> Tensor:
        later = pos // self.mask.chunk != pos[:1] // self.mask.chunk
        without = self.mask._replace(left=-1).visible(pos, j, s)
        return torch.where(later, without, super()._visible(pos, j, s, q))


class WindowCutByChunk(Attention):
    """A window counts only where it is narrower than half of a chunk."""

    where = given("window_size")
    paths: tuple[str, ...] = ("local",)

    def _visible(self, pos: Tensor, j: Tensor, s: int, q: int) -> Tensor:
        is_wide = self.mask.left >= self.mask.chunk // 2
        return (self.mask._replace(left=-1) if is_wide else self.mask).visible(pos, j, s)
