"""Mistakes with more keys, rows, slots or blocks than an integer type or a buffer can hold."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from twinattn.kit.example import Answers, Arguments, Example
from twinattn.kit.mistakes.formula import Attention
from twinattn.kit.mistakes.tiles import SIZES

WORDS = (2**15, 2**16)  # numbers in 16 bits, with and without a sign


class SlotsWrap(Attention):
    """Slot numbers have too few bits: from some slot on, another one is read."""

    paths: tuple[str, ...] = tuple(name for name in Attention.paths if name != "varlen")
    past = ("sequences", "rows")
    variants: Sequence[Any] = tuple((size, is_signed) for size in WORDS for is_signed in (False, True))

    @classmethod
    def may_show(cls, example: Example, arguments: Arguments, variant: Any) -> bool:
        """Return whether the batch is large enough."""
        slots = (
            arguments.get("first_block", 0) + sum(-(-s // example.block_size) for _, s in example.lens)
        ) * example.block_size
        return bool(slots > variant[0] // 2)

    def _load(self, i: int, j: Tensor) -> tuple[Tensor, Tensor]:
        p = self.example.block_size
        before = self.arguments.get("first_block", 0) * p  # slots of the large pool that are not in this one
        most = before + len(self.key_pool)
        slots = self._wrapped(self._slots(i, j) + before, most) - before
        inside = ((slots >= 0) & (slots < len(self.key_pool)))[:, None, None]
        at = slots.clamp(0, len(self.key_pool) - 1)
        key, value = (pool[at].double().masked_fill(~inside, 0.0) for pool in (self.key_pool, self.value_pool))
        return key, value

    def _wrapped(self, slots: Tensor, most: int) -> Tensor:
        return self._cut(slots, most)

    def _cut(self, numbers: Tensor, most: int) -> Tensor:
        """Keep the last bits of numbers; negative ones count from the end."""
        size, is_signed = self.variant
        cut = (numbers + size // 2) % size - size // 2 if is_signed else numbers % size
        return cut % most


class BlocksWrap(SlotsWrap):
    """Block numbers have too few bits: from some block on, another one is read."""

    variants: Sequence[Any] = tuple((size, is_signed) for size in (2**8, *WORDS) for is_signed in (False, True))

    @classmethod
    def may_show(cls, example: Example, arguments: Arguments, variant: Any) -> bool:
        """Return whether the batch is large enough."""
        blocks = arguments.get("first_block", 0) + sum(-(-s // example.block_size) for _, s in example.lens)
        return bool(blocks > variant[0] // 2)

    def _wrapped(self, slots: Tensor, most: int) -> Tensor:
        p = self.example.block_size
        return self._cut(slots // p, most // p) * p + slots % p


class PositionsWrap(Attention):
    """Positions of keys have too few bits: from some key on, the first ones are read again."""

    past = ("rows",)
    variants: Sequence[Any] = WORDS

    @classmethod
    def may_show(cls, example: Example, arguments: Arguments, variant: Any) -> bool:
        """Return whether the batch is large enough."""
        return max((s for _, s in example.lens), default=0) > int(variant)

    def _slots(self, i: int, j: Tensor) -> Tensor:
        return super()._slots(i, j % self.variant)


class KeysPastACount(Attention):
    """Keys beyond the size of a buffer are dropped."""

    past = ("rows",)
    variants: Sequence[Any] = tuple(2**n for n in range(9, 17))

    @classmethod
    def may_show(cls, example: Example, arguments: Arguments, variant: Any) -> bool:
        """Return whether the batch is large enough."""
        return max((s for _, s in example.lens), default=0) > int(variant)

    def _visible(self, pos: Tensor, j: Tensor, s: int, q: int) -> Tensor:
        return super()._visible(pos, j, s, q) & (j < self.variant)


class RowsWrap(Attention):
    """Row numbers of queries have too few bits: from some row on, the first queries are read again."""

    past = ("rows",)
    variants: Sequence[Any] = WORDS

    @classmethod
    def may_show(cls, example: Example, arguments: Arguments, variant: Any) -> bool:
        """Return whether the batch is large enough."""
        return example.num_tokens > int(variant)

    def answers(self) -> Answers:
        """Compute the outputs."""
        self.query = self.query[torch.arange(len(self.query)) % self.variant]
        return super().answers()


class PaddingPastATile(Attention):
    """Only the first tile of the rows after the last sequence is written."""

    variants: Sequence[Any] = SIZES

    @classmethod
    def may_show(cls, example: Example, arguments: Arguments, variant: Any) -> bool:
        """Return whether the batch is large enough."""
        return len(arguments["query"]) > example.num_tokens + int(variant)

    def _finish(self, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
        first = self.example.num_tokens + self.variant
        out[first:], lse[first:] = torch.nan, torch.nan
        return out, lse
