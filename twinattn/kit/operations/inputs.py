"""Random inputs of operations: numbers, ragged batches, block tables with shuffled blocks, slots."""

from collections.abc import Callable
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from refattn.batch import Batch
from twinattn.kit.bits import with_odd_bits
from twinattn.kit.example import Arguments
from twinattn.kit.operations.operation import Case

LENS = (((2, 5), (1, 7)), ((1, 3),), ((3, 3), (0, 4), (1, 20)), ((1, 33), (5, 9), (2, 16)), ((7, 40),))
ODD_LENS = (((0, 3), (2, 2), (4, 1)), (), ((5, 2), (3, 0), (1, 9)), ((0, 0),), ((1, 1), (0, 0), (1, 1)), ((2, 1),))
FREE_BLOCKS = 3  # blocks of no sequence


class Drawn:
    """Random numbers of a case, the same in every run."""

    def __init__(self, case: Case, dtype: torch.dtype) -> None:
        self.case, self.dtype = case, dtype
        self.random = torch.Generator().manual_seed(case.seed + 1)

    def normal(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Return normal numbers."""
        return torch.randn(shape, generator=self.random).to(dtype or self.dtype)

    def uniform(self, *shape: int, low: float = 0.0, high: float = 1.0, dtype: torch.dtype | None = None) -> Tensor:
        """Return uniform numbers from `low` to `high`."""
        return (torch.rand(shape, generator=self.random) * (high - low) + low).to(dtype or self.dtype)

    def whole(self, low: int, high: int, *shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
        """Return integers from `low` to `high - 1`."""
        return torch.randint(low, high, shape, generator=self.random).to(dtype)

    def order(self, count: int) -> list[int]:
        """Return a permutation of the numbers below `count`."""
        return torch.randperm(count, generator=self.random).tolist()

    def numbers(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Return numbers of a type, by default that of the case, with all bits that a copy must preserve."""
        dtype = dtype or self.dtype
        if dtype.itemsize == 1:
            return self.whole(0, 120, *shape).to(torch.uint8).view(dtype)
        if not dtype.is_floating_point:
            return self.whole(-(2**31), 2**31, *shape).to(dtype)
        x = torch.randn(shape, generator=self.random, dtype=torch.float64).to(dtype)  # with all digits of the type
        return with_odd_bits(x)

    def lengths(self, lens: tuple[tuple[int, int], ...]) -> Arguments:
        """Return the tables of a batch from the `(query_len, seq_len)` of its sequences."""
        ends = [0, *accumulate(q for q, _ in lens)]
        return dict(
            cu_seqlens_q=torch.tensor(ends, dtype=torch.int32),
            seq_lens=torch.tensor([s for _, s in lens], dtype=torch.int32),
            max_query_len=max((q for q, _ in lens), default=0),
            max_seq_len=max((s for _, s in lens), default=0),
        )

    def table(
        self, seq_lens: list[int], block_size: int, first_block: int = 0, spare: int = 2
    ) -> tuple[Arguments, dict[str, Tensor], int]:
        """Return a block table with shuffled blocks, a mask of its unused entries, and the number of blocks."""
        counts = [-(-s // block_size) for s in seq_lens]
        n, columns = sum(counts) + FREE_BLOCKS, max(counts, default=0) + spare
        blocks = iter(x + first_block for x in self.order(n))
        table = torch.full((len(seq_lens), columns), -1, dtype=torch.int32)
        for row, count in zip(table, counts, strict=True):
            row[:count] = torch.tensor([next(blocks) for _ in range(count)], dtype=torch.int32)
        past = torch.arange(columns) >= torch.tensor(counts, dtype=torch.int64)[:, None]
        return dict(block_table=table), dict(block_table=past), n + first_block

    def slots(self, tokens: int, room: int) -> Tensor:
        """Return distinct slots for tokens, shuffled, ascending or descending; some are -1 for padding."""
        first = int(self.whole(0, max(1, room - tokens), 1))
        kinds = self.order(room)[:tokens], range(first, first + tokens), range(first + tokens - 1, first - 1, -1)
        slots = torch.tensor([*kinds[self.case.seed % 3]], dtype=torch.int64)
        slots[self.whole(0, 4, tokens) == 0] = -1
        return slots


def unused(table: Tensor, seq_lens: list[int], blocks: int, block_size: int) -> Tensor:
    """Return a mask `[n, p]` of the slots of a pool that hold no token."""
    free = torch.ones(blocks, block_size, dtype=torch.bool)
    for row, seq_len in zip(table.tolist(), seq_lens, strict=True):
        for j in range(seq_len):
            free[row[j // block_size], j % block_size] = False
    return free


def padding_of(a: Arguments, x: Tensor) -> Tensor:
    """Return a mask of the elements of `x` that are in rows of padding."""
    rows = torch.arange(len(x)) >= int(a["cu_seqlens_q"][-1])
    return rows.reshape(-1, *[1] * (x.ndim - 1)).expand(x.shape)


def batch_of(a: Arguments) -> Batch:
    """Return the batch of a call."""
    return Batch(
        a["cu_seqlens_q"],
        a["seq_lens"],
        a.get("block_table"),
        a["max_query_len"],
        a["max_seq_len"],
        num_tokens=int(a["cu_seqlens_q"][-1]),
    )


BATCH: dict[str, Callable[[Arguments], Any]] = {
    "batch": batch_of,
    "query_lens": lambda a: a["cu_seqlens_q"].diff(),
    "context_lens": lambda a: a["seq_lens"] - a["cu_seqlens_q"].diff(),
}


def rows_of(a: Arguments) -> list[tuple[int, int, int]]:
    """List the first query row of each sequence, the row after its last, and its number of tokens."""
    ends = a["cu_seqlens_q"].tolist()
    return [(ends[i], ends[i + 1], s) for i, s in enumerate(a["seq_lens"].tolist())]


def slots_of(a: Arguments, i: int, seq_len: int, block_size: int) -> list[int]:
    """List the slots of the tokens of sequence `i`."""
    row = a["block_table"][i].tolist()
    return [row[j // block_size] * block_size + j % block_size for j in range(seq_len)]
