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

from refattn.interface.values import check_int, check_side_by_side, expect, same_device


@dataclass(frozen=True, eq=False)
class Batch:
    """The lengths of a batch of sequences, and where in the pool their keys are.

    Attributes:
        cu_seqlens_q: where the query rows of each sequence begin; the last entry is where they all end.
        seq_lens: keys of each sequence, in tokens: its context and its new tokens.
        block_table: the pool blocks of each sequence, in order; None where there is no cache (`dense`). Entries past a
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
        expect(self.seq_lens, "seq_lens", torch.int32, ("b",), (None,))
        b = self.seq_lens.shape[0]
        expect(self.cu_seqlens_q, "cu_seqlens_q", torch.int32, ("b + 1",), (b + 1,))
        device = self.seq_lens.device
        if self.cu_seqlens_q.device != device:
            same_device(seq_lens=self.seq_lens, cu_seqlens_q=self.cu_seqlens_q)
        for name, lengths in (("seq_lens", self.seq_lens), ("cu_seqlens_q", self.cu_seqlens_q)):
            check_side_by_side(name, lengths)
        if self.block_table is not None:
            expect(self.block_table, "block_table", torch.int32, ("b", "m"), (b, None))
            if self.block_table.device != device:
                same_device(seq_lens=self.seq_lens, block_table=self.block_table)
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
        """Where the keys of each sequence begin when they lie one after the other (`dense`)."""
        return torch.nn.functional.pad(self.seq_lens.cumsum(0, dtype=torch.int32), (1, 0))

    def query_rows(self) -> list[tuple[int, int]]:
        """Return the first query row of each sequence and the row after its last one, as Python ints.

        This reads the tensors on the host: for the reference and for kernels that run there.
        """
        return list(pairwise(self.cu_seqlens_q.tolist()))

    def key_rows(self) -> list[tuple[int, int]]:
        """Return the first key row of each sequence and the row after its last one, as Python ints (`dense`)."""
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
