"""Mistakes in addressing keys and values: tables, slots, strides, heads."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from twinattn.kit.example import Arguments, Example
from twinattn.kit.mistakes.formula import Attention, as_contiguous, with_strides
from twinattn.kit.mistakes.where import (
    after_a_fork,
    by_several_tables,
    in_groups,
    in_pages,
    in_several_blocks,
    in_unlike_layouts,
    of_several_kv_heads,
    with_gaps,
    with_gaps_between_rows,
    with_gaps_in_rows,
)

# --- where the keys are ---


class TableIgnored(Attention):
    """The block table is ignored: blocks are read in the order of the pool."""

    where = in_pages

    def _blocks(self, i: int, column: Tensor) -> Tensor:
        return column


class TableOfFirst(Attention):
    """Every sequence reads the first row of the block table."""

    where = by_several_tables

    def _blocks(self, i: int, column: Tensor) -> Tensor:
        return super()._blocks(0, column)


class TableOneColumnLate(Attention):
    """The block table is read one column late."""

    where = in_pages

    def _blocks(self, i: int, column: Tensor) -> Tensor:
        return super()._blocks(i, column + 1)


class TableWithoutPadding(Attention):
    """Rows of the block table are assumed to be as wide as the longest sequence needs, whatever the stride is."""

    where = by_several_tables

    def _blocks(self, i: int, column: Tensor) -> Tensor:
        p = self.example.block_size
        columns = -(-max((s for _, s in self.lens), default=0) // p)
        flat = self.batch.block_table.flatten().long()
        return flat[(i * columns + column).clamp(max=len(flat) - 1)]


class BlockForSlot(Attention):
    """An entry of the block table is used as the slot of a token: it is not multiplied by the block size."""

    def _slots(self, i: int, j: Tensor) -> Tensor:
        p = self.example.block_size
        return self._blocks(i, j // p) + j % p


class LastBlockDropped(Attention):
    """Only whole blocks are read: seq_len // block_size, not rounded up."""

    def _visible(self, pos: Tensor, j: Tensor, s: int, q: int) -> Tensor:
        p = self.example.block_size
        return super()._visible(pos, j, s, q) & (j < s // p * p)


class FirstBlockOnly(Attention):
    """Only the first block of the table is followed: later keys come from the same block again."""

    where = in_several_blocks

    def _blocks(self, i: int, column: Tensor) -> Tensor:
        return super()._blocks(i, column * 0)


class ValuesAreKeys(Attention):
    """Values are read from the pool of keys."""

    def _pools(self) -> tuple[Tensor, Tensor]:
        key, value = super()._pools()
        return (key, key) if key.shape == value.shape else (key, value)


class ValuesByStridesOfKeys(Attention):
    """Values are read with the strides of the keys, which may have another layout."""

    where = in_unlike_layouts

    def __init__(self, example: Example, arguments: Arguments, variant: Any = None) -> None:
        words = ("key", "value") if "key" in arguments else ("key_cache", "value_cache")
        key, value = (arguments[word] for word in words)
        super().__init__(example, {**arguments, words[1]: with_strides(value, key.stride())}, variant)


class PrefixTakenTooLong(Attention):
    """A sequence with the same first block as an earlier one is treated as sharing more: its context, or all."""

    where = after_a_fork

    variants: Sequence[Any] = tuple((which, what) for which in ("before", "first") for what in ("context", "full"))

    def _blocks(self, i: int, column: Tensor) -> Tensor:
        (which, what), table, (q, s) = self.variant, self.batch.block_table, self.lens[i]
        count = max(0, s - q if what == "context" else s) // self.example.block_size
        others = [i - 1] if which == "before" else range(i)
        like = [b for b in others if b >= 0 and count and table[b, 0] == table[i, 0] and self.lens[b][1] >= s]
        mine = super()._blocks(i, column)
        return torch.where(column < count, super()._blocks(like[0], column), mine) if like else mine


class ValuesInOrder(Attention):
    """The block table is followed for keys, not for values."""

    def _load(self, i: int, j: Tensor) -> tuple[Tensor, Tensor]:
        return super()._load(i, j)[0], self.value_pool[j.clamp(max=len(self.value_pool) - 1)].double()


class HeadsBeforeTokens(Attention):
    """Pages are read as [n, hk, p, d] instead of [n, p, hk, d]."""

    where = of_several_kv_heads

    def _pools(self) -> tuple[Tensor, Tensor]:
        p = self.example.block_size
        key, value = (
            x.unflatten(0, (-1, p)).flatten(1, 2).unflatten(1, (x.shape[1], p)).transpose(1, 2).flatten(0, 1)
            for x in super()._pools()
        )
        return key, value


class RowPadded(Attention):
    """A row of keys is padded to a larger size with the memory after it times 0: NaN there reaches the scores."""

    where = with_gaps_between_rows

    def _products(self, query: Tensor, key: Tensor) -> Tensor:
        return super()._products(query, key) + 0 * self._past_the_row().sum()

    def _past_the_row(self) -> Tensor:
        """Return the memory between a row of keys and the next one."""
        x = next(self.arguments[word] for word in ("cache", "key", "key_cache") if word in self.arguments)
        d = self.example.head_size
        return x.as_strided((max(0, x.stride(-2) - d),), (1,), x.storage_offset() + d).double()


class StridesAssumed(Attention):
    """A tensor is assumed to be contiguous: its strides are ignored."""

    where = with_gaps

    def __init__(self, example: Example, arguments: Arguments, variant: Any = None) -> None:
        words = variant or ("query", "key", "value", "key_cache", "value_cache", "cache")
        flat = {word: as_contiguous(arguments[word]) for word in words if word in arguments}
        super().__init__(example, {**arguments, **flat}, variant)

    variants: Sequence[Any] = (
        None,
        ("query",),
        ("key_cache", "value_cache", "key", "value", "cache"),
        ("key_cache",),
        ("value_cache",),
    )


class LastStrideAssumed(Attention):
    """The elements of a row are assumed to be contiguous: the last stride is ignored."""

    where = with_gaps_in_rows

    def __init__(self, example: Example, arguments: Arguments, variant: Any = None) -> None:
        words = variant or ("query", "key", "value", "key_cache", "value_cache", "cache")
        flat = {
            word: with_strides(arguments[word], (*arguments[word].stride()[:-1], 1))
            for word in words
            if word in arguments
        }
        super().__init__(example, {**arguments, **flat}, variant)

    variants: Sequence[Any] = StridesAssumed.variants


# --- heads ---


class GroupsInterleaved(Attention):
    """Query head h reads KV head h % hk instead of h // (heads / KV heads)."""

    where = in_groups

    def _grouped(self, x: Tensor) -> Tensor:
        return x.repeat(1, self.query.shape[1] // x.shape[1], 1)


class FirstKeyHead(Attention):
    """All query heads read KV head 0."""

    where = of_several_kv_heads

    def _grouped(self, x: Tensor) -> Tensor:
        return x[:, :1].expand(-1, self.query.shape[1], -1)
