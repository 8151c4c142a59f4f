"""The ragged batch: sequences of different lengths in one row of query tokens.

Three sequences with 2, 1 and 3 new tokens, of 5, 7 and 3 tokens in all, in blocks of 4 tokens:

    query tokens    a3 a4 | b6 | c0 c1 c2        t = 6
    cu_seqlens_q    0       2    3          6    where each sequence's queries begin and end
    seq_lens        5, 7, 3                      keys: context + new tokens
    block_table     [[9, 2], [4, 7], [1, -1]]    key 4 of `a` is row 0 of block 2; -1 pads past the last block

Query rows after the last sequence (`t > cu_seqlens_q[-1]`) are padding.
"""

from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch
from jaxtyping import Int32
from torch import Tensor

from refattn.checks import LARGEST_INT32, check, check_int, check_side_by_side, check_sizes, describe


@dataclass(frozen=True, eq=False)
class Batch:
    """The lengths of a batch of sequences, and the pool blocks of their keys.

    Attributes:
        cu_seqlens_q: the first query row of each sequence, and one past the last row of all.
        seq_lens: keys of each sequence, in tokens: its context and its new tokens.
        block_table: the pool blocks of each sequence, in order; None where there is no cache (`varlen`). Entries past a
            sequence's last block are never read.
        max_query_len: an upper bound on the new tokens of a sequence.
        max_seq_len: an upper bound on `seq_lens`.
        num_keys: the total number of keys, roughly, if the builder of the batch has it. A kernel may balance its work
            by it; a wrong number costs time and does not change the output.
        num_tokens: the total number of query rows, if the builder of the batch has it. A batch on a device must give it
            if a plan needs the positions of its queries; otherwise the plan raises.

    The builder of the batch gives the maxima as Python ints, so that no path synchronizes with the device. If the
    tensors are updated in place (a CUDA graph), the maxima must hold for every later step.

    Raises:
        ValueError: if the types, shapes or devices of the tensors do not fit together.
    """

    cu_seqlens_q: Int32[Tensor, "_"]  # [b + 1]
    seq_lens: Int32[Tensor, "b"]
    block_table: Int32[Tensor, "b m"] | None
    max_query_len: int
    max_seq_len: int
    num_keys: int | None = None
    num_tokens: int | None = None

    def __post_init__(self) -> None:
        """Check the types, shapes and devices. The contents are not read, as they may be on a device."""
        b = check(seq_lens=(self.seq_lens, "int32 b"))["b"]
        check(
            {"b": b, "b + 1": b + 1},
            seq_lens=(self.seq_lens, "int32 b"),
            cu_seqlens_q=(self.cu_seqlens_q, "int32 b+1"),
            block_table=(self.block_table, "int32 b m or None"),
        )
        for name, lengths in (("seq_lens", self.seq_lens), ("cu_seqlens_q", self.cu_seqlens_q)):
            check_side_by_side(name, lengths)
        check_int("max_query_len", self.max_query_len)
        check_int("max_seq_len", self.max_seq_len)
        for name in ("num_keys", "num_tokens"):
            if getattr(self, name) is not None:
                check_int(name, getattr(self, name), at_most=None)

    @property
    def num_seqs(self) -> int:
        """Number of sequences, `b`."""
        return self.seq_lens.shape[0]

    @property
    def device(self) -> torch.device:
        """The device of the tensors."""
        return self.seq_lens.device

    @property
    def query_lens(self) -> Int32[Tensor, "b"]:
        """New tokens of each sequence."""
        return self.cu_seqlens_q.diff()

    @property
    def context_lens(self) -> Int32[Tensor, "b"]:
        """Tokens of each sequence before its new ones; negative where a sequence has more queries than keys."""
        return self.seq_lens - self.query_lens

    @property
    def cu_seqlens_k(self) -> Int32[Tensor, "_"]:
        """The first key row of each sequence when keys are contiguous (`varlen`), and the number of key rows."""
        return torch.nn.functional.pad(self.seq_lens.cumsum(0, dtype=torch.int32), (1, 0))

    def query_rows(self) -> list[tuple[int, int]]:
        """Return the first query row of each sequence and the row after its last one, as Python ints.

        This synchronizes with a device, so only the reference and CPU kernels call it.
        """
        return list(pairwise(self.cu_seqlens_q.tolist()))

    def key_rows(self) -> list[tuple[int, int]]:
        """Return the first key row of each sequence and the row after its last one, as Python ints (`varlen`)."""
        return list(pairwise(self.cu_seqlens_k.tolist()))


class Part(NamedTuple):
    """Consecutive sequences of a batch: a batch of their own, and their query rows in the full batch."""

    batch: Batch
    tokens: slice


class Prefix(NamedTuple):
    """Keys that consecutive sequences of a batch share: the first `end` of sequences `first` to `last - 1`."""

    first: int
    last: int
    end: int

    def encloses(self, other: "Prefix") -> bool:
        """Return whether the other prefix extends this one, for some or all of its sequences."""
        return self.first <= other.first and other.last <= self.last and self.end < other.end


def check_batch(batch: Batch, *, name: str = "batch") -> None:
    """Check that an argument called `name` is a `Batch`. Its tensors were checked when it was made.

    Raises:
        ValueError: if it is not.
    """
    if not isinstance(batch, Batch):
        raise ValueError(f"{name}: expected a Batch, got {describe(batch)}")


def check_lengths(batch: Batch) -> None:
    """Check on a CPU that the lengths of a batch are valid, and that its maxima and totals fit them.

    Raises:
        ValueError: if `cu_seqlens_q` does not rise from 0; if a length is negative; if a sequence is longer than the
            stated maximum; if `num_tokens` is not the number of query rows.
    """
    check_batch(batch)
    if not batch.seq_lens.is_cpu:
        return
    starts = batch.cu_seqlens_q
    falls = bool((starts[1:] < starts[:-1]).any())  # the difference of two int32 might not be one
    if int(starts[0]) != 0 or falls:
        raise ValueError(f"cu_seqlens_q: expected to rise from 0, got {starts.tolist()}")
    if (batch.seq_lens < 0).any():
        raise ValueError(f"seq_lens: expected lengths of at least 0, got {batch.seq_lens.tolist()}")
    for name, stated, lengths in (
        ("max_query_len", batch.max_query_len, batch.query_lens),
        ("max_seq_len", batch.max_seq_len, batch.seq_lens),
    ):
        if lengths.numel() and int(lengths.max()) > stated:
            raise ValueError(f"{name}: expected at least {int(lengths.max())}, the longest, got {stated}")
    if batch.num_tokens is not None and batch.num_tokens != int(starts[-1]):
        raise ValueError(f"num_tokens: expected {int(starts[-1])}, the query rows of the batch, got {batch.num_tokens}")


def check_block_table(batch: Batch, *, block_size: int, new_lens: Tensor | None = None) -> Int32[Tensor, "b m"]:
    """Check that the table has a column for every block of every sequence; `check_contents` checks the entries.

    Args:
        batch: the lengths and the table; they are read on a CPU only.
        block_size: tokens in a block, `p`.
        new_lens: tokens by which each sequence is about to grow.

    Returns:
        The block table.

    Raises:
        ValueError: if the batch has no table, and on a CPU if it has too few columns.
    """
    check_batch(batch)
    check_sizes(block_size=block_size)
    block_table = _table_of(batch)
    b, m = block_table.shape
    if batch.seq_lens.is_cpu and b:
        lengths = batch.seq_lens.long() if new_lens is None else batch.seq_lens.long() + new_lens
        longest = int(lengths.argmax())
        needed = -(-int(lengths[longest]) // block_size)
        if needed > m:
            raise ValueError(
                f"block_table: expected at least {needed} columns for the {int(lengths[longest])} keys of sequence "
                f"{longest} in blocks of {block_size}, got {m}"
            )
    return block_table


def _table_of(batch: Batch) -> Int32[Tensor, "b m"]:
    """Return the block table of a batch, or raise if it has none."""
    if batch.block_table is None:
        raise ValueError("block_table: expected int32 [b, m], got None: this path reads a paged cache")
    return batch.block_table


def check_contents(
    batch: Batch, block_size: int | None, first_keys: Tensor | None = None
) -> tuple[int, int, int] | None:
    """Check the contents of the tables of a batch, and return the minimum sizes of the tensors.

    Args:
        batch: the lengths, and the block table if there is a block size.
        block_size: tokens in a block; None where keys are in contiguous rows.
        first_keys: the position of each sequence's first key, if blocks were removed from the front of its table.
            Errors then number the columns as in the full table.

    Returns:
        The minimum numbers of query rows, key rows and blocks; None if the tables are on a device, where they are not
        read.

    Raises:
        ValueError: naming the table, what was expected and what was given.
    """
    check_lengths(batch)
    if block_size is not None:
        block_table = check_block_table(batch, block_size=block_size)
    if not batch.seq_lens.is_cpu:
        return None
    query_rows, key_rows, blocks = int(batch.cu_seqlens_q[-1]), int(batch.seq_lens.sum()), 0
    if block_size is None:
        if key_rows > LARGEST_INT32:  # where a sequence's keys begin is an int32
            raise ValueError(f"seq_lens: expected at most {LARGEST_INT32} keys together, got {key_rows}")
    elif block_table.numel():
        columns = torch.arange(block_table.shape[1], dtype=torch.int32, device=block_table.device)
        used = columns < -(-batch.seq_lens.long() // block_size).int()[:, None]
        lowest, highest = (block_table * used).aminmax()  # past a sequence's last block may be anything
        if lowest < 0:
            i, column = (used & (block_table < 0)).nonzero()[0].tolist()
            cut = 0 if first_keys is None else int(first_keys[i]) // block_size
            raise ValueError(
                f"block_table: expected entries of at least 0 for the blocks that sequence {i} uses, "
                f"got {int(block_table[i, column])} in column {cut + column}"
            )
        blocks = int(highest) + 1 if key_rows else 0
    return query_rows, key_rows, blocks


def check_written_blocks(block_table: Tensor, begins: Tensor, ends: Tensor, *, block_size: int) -> None:
    """Check on a CPU that every token to be written has a block.

    With block -1, the last row would get slot -1, and the write would skip it as padding.

    Args:
        block_table: the blocks of each sequence, `[b, m]`.
        begins: the first token of each sequence to be written, `[b]`; negative values count as 0.
        ends: one past the last of them, `[b]`.
        block_size: tokens in a block, `p`.

    Raises:
        ValueError: naming the table, what was expected and what was given.
    """
    if not block_table.is_cpu or not block_table.numel():
        return
    begins = begins.long().clamp(min=0)
    columns = torch.arange(block_table.shape[1], device=block_table.device)
    is_written = (columns >= (begins // block_size)[:, None]) & (columns < -(-ends.long() // block_size)[:, None])
    is_written &= (begins < ends)[:, None]
    wrong = is_written & (block_table < 0)
    if wrong.any():
        i, column = wrong.nonzero()[0].tolist()
        raise ValueError(
            f"block_table: expected entries of at least 0 for the new tokens of sequence {i}, "
            f"got {int(block_table[i, column])} in column {column}"
        )
