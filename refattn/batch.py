"""The ragged batch: sequences of different lengths in one row of query tokens.

Three sequences with 2, 1 and 3 new tokens, of 5, 7 and 3 tokens in all, in blocks of 4 tokens:

    query tokens    a3 a4 | b6 | c0 c1 c2        t = 6
    cu_seqlens_q    0       2    3          6    where each sequence's queries begin and end
    seq_lens        5, 7, 3                      keys: context + new tokens
    block_table     [[9, 2], [4, 7], [1, -1]]    key 4 of `a` is row 0 of block 2; past the last block is nothing

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
    """The lengths of a batch of sequences, and where in the pool their keys are.

    Attributes:
        cu_seqlens_q: where the query rows of each sequence begin; the last entry is where they all end.
        seq_lens: keys of each sequence, in tokens: its context and its new tokens.
        block_table: the pool blocks of each sequence, in order; None where there is no cache (`varlen`). Entries past a
            sequence's last block are never read.
        max_query_len: at least the largest number of queries of a sequence, in tokens.
        max_seq_len: at least the largest of `seq_lens`.
        num_keys: about how many keys all sequences have together, if the builder of the batch knows it. A kernel may
            share out its work by it; a wrong number costs time and changes no answer.
        num_tokens: query rows of all sequences together, if the builder of the batch knows it. A batch on a device has
            to state it where a plan needs the positions of its queries: a plan that cannot know them is refused.

    The maxima are Python ints, given by the builder of the batch, so that no path synchronizes with the device; a batch
    whose tensors are advanced in place (a CUDA graph) states the maxima that it may grow to.

    Raises:
        ValueError: if a tensor has another type, shape or device than its neighbours.
    """

    cu_seqlens_q: Int32[Tensor, "_"]  # [b + 1]
    seq_lens: Int32[Tensor, "b"]
    block_table: Int32[Tensor, "b m"] | None
    max_query_len: int
    max_seq_len: int
    num_keys: int | None = None
    num_tokens: int | None = None

    def __post_init__(self) -> None:
        """Check the types, shapes and devices; the contents are not read, they may be on a device."""
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
        """Where the tensors of the batch are."""
        return self.seq_lens.device

    @property
    def query_lens(self) -> Int32[Tensor, "b"]:
        """New tokens of each sequence."""
        return self.cu_seqlens_q.diff()

    @property
    def context_lens(self) -> Int32[Tensor, "b"]:
        """Tokens of each sequence that were there before; negative where a sequence has more queries than keys."""
        return self.seq_lens - self.query_lens

    @property
    def cu_seqlens_k(self) -> Int32[Tensor, "_"]:
        """Where the keys of each sequence begin when they lie one after the other (`varlen`)."""
        return torch.nn.functional.pad(self.seq_lens.cumsum(0, dtype=torch.int32), (1, 0))

    def query_rows(self) -> list[tuple[int, int]]:
        """Return the first query row of each sequence and the row after its last one, as Python ints.

        This reads the tensors on the host: for the reference and for kernels that run there.
        """
        return list(pairwise(self.cu_seqlens_q.tolist()))

    def key_rows(self) -> list[tuple[int, int]]:
        """Return the first key row of each sequence and the row after its last one, as Python ints (`varlen`)."""
        return list(pairwise(self.cu_seqlens_k.tolist()))


class Part(NamedTuple):
    """A run of neighbouring sequences of a batch: their own batch, and the query rows that they have in the whole."""

    batch: Batch
    tokens: slice


class Prefix(NamedTuple):
    """Keys that some neighbouring sequences of a batch share: the first `end` of sequences `first` to `last - 1`."""

    first: int
    last: int
    end: int

    def encloses(self, other: "Prefix") -> bool:
        """Return whether the other prefix continues this one, for some of its sequences."""
        return self.first <= other.first and other.last <= self.last and self.end < other.end


def check_batch(batch: Batch, *, name: str = "batch") -> None:
    """Check that a batch, which errors call by its name, is one; its tensors were checked when it was made.

    Raises:
        ValueError: if it is none.
    """
    if not isinstance(batch, Batch):
        raise ValueError(f"{name}: expected a Batch, got {describe(batch)}")


def check_lengths(batch: Batch) -> None:
    """Check on a CPU that the lengths of a batch are lengths, and that what it states of them is right.

    Raises:
        ValueError: if `cu_seqlens_q` does not rise from 0; if a length is negative; if a sequence is longer than the
            stated maximum; if there are other query rows than `num_tokens`.
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
    """Check that the table has a column for every block of every sequence; what is in them is read by `check_contents`.

    Args:
        batch: the lengths and the table; on a device they are not read.
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
    """Return the block table of a batch, which has to have one."""
    if batch.block_table is None:
        raise ValueError("block_table: expected int32 [b, m], got None: this path reads a paged cache")
    return batch.block_table


def check_contents(
    batch: Batch, block_size: int | None, first_keys: Tensor | None = None
) -> tuple[int, int, int] | None:
    """Check what the tables of a batch hold, and find out what they ask of the tensors.

    Args:
        batch: the lengths, and the block table if there is a block size.
        block_size: tokens in a block; None where keys are in contiguous rows.
        first_keys: the position of each sequence's first key, where the front of its table was cut off: errors count
            the columns from position 0.

    Returns:
        The query rows, the key rows and the blocks that there have to be at least; None where the tables are on a
        device, where they are not read.

    Raises:
        ValueError: naming the table, what was expected and what came.
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
        columns = torch.arange(block_table.shape[1], device=block_table.device)
        used = columns < -(-batch.seq_lens.long() // block_size)[:, None]
        lowest = int(block_table.masked_fill(~used, 0).min())
        if lowest < 0:
            i, column = (used & (block_table < 0)).nonzero()[0].tolist()
            cut = 0 if first_keys is None else int(first_keys[i]) // block_size
            raise ValueError(
                f"block_table: expected entries of at least 0 for the blocks that sequence {i} uses, "
                f"got {int(block_table[i, column])} in column {cut + column}"
            )
        blocks = int(block_table.masked_fill(~used, -1).max()) + 1
    return query_rows, key_rows, blocks


def check_written_blocks(block_table: Tensor, begins: Tensor, ends: Tensor, *, block_size: int) -> None:
    """Check on a CPU that there is a block for every token that is about to be written.

    A block of -1 would give the last of its rows the slot -1, which a write takes for padding.

    Args:
        block_table: the blocks of each sequence, `[b, m]`.
        begins: the first token of each sequence that is written, `[b]`, below 0 for the first that there is.
        ends: the one past the last, `[b]`.
        block_size: tokens in a block, `p`.

    Raises:
        ValueError: naming the table, what was expected and what came.
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
