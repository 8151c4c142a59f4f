"""The ragged batch: sequences of different lengths in one row of query tokens, and the checks of its shape.

Three sequences with 2, 1 and 3 new tokens, of 5, 7 and 3 tokens in all, in blocks of 4 tokens:

    query tokens    a3 a4 | b6 | c0 c1 c2        t = 6
    cu_seqlens_q    0       2    3          6    where each sequence's queries begin and end
    seq_lens        5, 7, 3                      keys: context + new tokens
    block_table     [[9, 2], [4, 7], [1, -1]]    key 4 of `a` is row 0 of block 2; behind the last block is nothing

Query rows behind the last sequence (`t > cu_seqlens_q[-1]`) are padding.
"""

import sys
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import isfinite
from typing import Any, NamedTuple
from weakref import ref

import torch
from jaxtyping import Float, Int32
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

LARGEST_INT32 = 2**31 - 1
QUERY_TYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


@dataclass(frozen=True, eq=False)
class Batch:
    """The lengths of a batch of sequences, and where in the pool their keys are.

    Attributes:
        cu_seqlens_q: where the query rows of each sequence begin; the last entry is where they all end.
        seq_lens: keys of each sequence, in tokens: its context and its new tokens.
        block_table: the pool blocks of each sequence, in order; None where there is no cache (`dense`). Entries behind
            a sequence's last block are never read.
        max_query_len: at least the largest number of queries of a sequence, in tokens.
        max_seq_len: at least the largest of `seq_lens`.
        num_keys: about how many keys all sequences have together, where whoever built the batch knows it. A kernel may
            share out its work by it; a wrong number costs time and changes no answer.

    The maxima are Python ints, given by whoever built the batch, so that no path has to ask the device for them; a
    batch whose tensors are advanced in place (a CUDA graph) states the maxima that it may grow to.

    Raises:
        ValueError: if a tensor has another type, shape or device than its neighbours.
    """

    cu_seqlens_q: Int32[Tensor, "_"]  # [b + 1]
    seq_lens: Int32[Tensor, "b"]
    block_table: Int32[Tensor, "b m"] | None
    max_query_len: int
    max_seq_len: int
    num_keys: int | None = None

    def __post_init__(self) -> None:
        """Check the types, shapes and devices; the contents are not read, they may be on a device."""
        _expect(self.seq_lens, "seq_lens", torch.int32, ("b",), (None,))
        b = self.seq_lens.shape[0]
        _expect(self.cu_seqlens_q, "cu_seqlens_q", torch.int32, ("b + 1",), (b + 1,))
        device = self.seq_lens.device
        if self.cu_seqlens_q.device != device:
            same_device(seq_lens=self.seq_lens, cu_seqlens_q=self.cu_seqlens_q)
        for name, lengths in (("seq_lens", self.seq_lens), ("cu_seqlens_q", self.cu_seqlens_q)):
            if not lengths.is_contiguous():  # kernels take a pointer to them, and no stride
                raise ValueError(f"{name}: expected its entries side by side, got a stride of {lengths.stride(0)}")
        if self.block_table is not None:
            _expect(self.block_table, "block_table", torch.int32, ("b", "m"), (b, None))
            if self.block_table.device != device:
                same_device(seq_lens=self.seq_lens, block_table=self.block_table)
        check_int("max_query_len", self.max_query_len)
        check_int("max_seq_len", self.max_seq_len)
        if self.num_keys is not None:
            check_int("num_keys", self.num_keys, at_most=None)

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

    @property
    def version(self) -> tuple[int, ...] | None:
        """What changes with every write to the tensors, so that what was worked out on a CPU can be kept till then.

        None where torch does not count the writes: in inference mode. It does not see those of NumPy, nor those of a
        CUDA graph.
        """
        return version_of(self.cu_seqlens_q, self.seq_lens, self.block_table)

    def query_rows(self) -> list[tuple[int, int]]:
        """Give the first query row of each sequence and the row behind its last one, as Python ints.

        This reads the tensors on the host: for the reference and for kernels that run there.
        """
        return list(pairwise(self.cu_seqlens_q.tolist()))

    def key_rows(self) -> list[tuple[int, int]]:
        """Give the first key row of each sequence and the row behind its last one, as Python ints (`dense`)."""
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
        """Whether the other prefix continues this one, for some of its sequences."""
        return self.first <= other.first and other.last <= self.last and self.end < other.end


@dataclass(frozen=True, eq=False)
class Level:
    """One level of a cascade: a batch whose "sequences" are groups, each a run of neighbouring sequences.

    Attributes:
        batch: the query rows of each group, how many keys its sequences share at this level, and the blocks of those.
        first_keys: the position of each group's first key of this level in its sequences.
    """

    batch: Batch
    first_keys: Int32[Tensor, "b"]


@dataclass(frozen=True)
class Machine:
    """What a cost model knows of the hardware that runs a kernel.

    Attributes:
        workers: tiles that are computed at the same time (streaming multiprocessors, cores).
        bytes_per_second: memory read by all workers together, on long sequences.
        flops_per_second: operations by all workers together, on full tiles.
        launch_seconds: what one more launch costs before anything is computed.
        tile_rows: query rows of a tile; a tile with fewer rows takes as long.
        tile_keys: keys of a tile.
    """

    workers: int
    bytes_per_second: float
    flops_per_second: float
    launch_seconds: float
    tile_rows: int
    tile_keys: int


def check_dense(query: Tensor, key: Tensor, value: Tensor, batch: Batch) -> None:
    """Check the tensors of a path that has no cache: query `[t, h, d]`, key `[s, hk, d]`, value `[s, hk, dv]`.

    Raises:
        ValueError: naming the argument, what was expected and what came.
    """
    _check_tokens(query, key, value, ("key", "value"), ("s", "hk", "d"), batch)
    if batch.seq_lens.is_cpu:
        check_lengths(batch, query.shape[0])
        total = int(batch.seq_lens.sum())
        if total > key.shape[0]:
            raise ValueError(f"key: expected at least the {total} rows that seq_lens adds up to, got {key.shape[0]}")
        if total > LARGEST_INT32:  # where a sequence's keys begin is an int32
            raise ValueError(f"seq_lens: expected at most {LARGEST_INT32} keys together, got {total}")


def check_paged(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    batch: Batch,
    *,
    window_size: tuple[int, int] = (-1, -1),
    chunk_size: int | None = None,
) -> Int32[Tensor, "b m"]:
    """Check the tensors of a path over the paged cache: query `[t, h, d]`, caches `[n, p, hk, d]` and `[n, p, hk, dv]`.

    On a CPU the contents of the batch are checked as well; on a device that would have to wait for it.

    Args:
        query: the query rows.
        key_cache: the pool of keys.
        value_cache: the pool of values.
        batch: the lengths and the block table.
        window_size: of a path that never reads blocks before its windows, which may be gone then.
        chunk_size: of a path that never reads blocks before its chunks, likewise.

    Returns:
        The block table, which is there then.

    Raises:
        ValueError: naming the argument, what was expected and what came.
    """
    _check_tokens(query, key_cache, value_cache, ("key_cache", "value_cache"), ("n", "p", "hk", "d"), batch)
    num_blocks, block_size, *_ = key_cache.shape
    check_window(window_size)
    if chunk_size is not None:
        check_chunk(chunk_size, block_size)
    block_table = check_block_table(
        batch, block_size=block_size, num_blocks=num_blocks, left=window_size[0], chunk_size=chunk_size
    )
    check_lengths(batch, query.shape[0])
    return block_table


def check_block_table(
    batch: Batch,
    *,
    block_size: int,
    num_blocks: int | None = None,
    left: int = -1,
    chunk_size: int | None = None,
    new_lens: Tensor | None = None,
    name: str = "block_table",
) -> Int32[Tensor, "b m"]:
    """Check that the table has a block of the pool for every key of every sequence.

    Args:
        batch: the lengths and the table; their contents are checked on a CPU only.
        block_size: tokens in a block, `p`.
        num_blocks: blocks in the pool, where entries are to be checked against it.
        left: left side of a window, before which entries are not checked; -1 for no limit.
        chunk_size: tokens in a chunk, before which entries are not checked; None without chunks.
        new_lens: tokens by which each sequence is about to grow.
        name: what errors call the table.

    Returns:
        The block table.

    Raises:
        ValueError: if the batch has no table, and on a CPU if it has too few columns or an entry outside the pool.
    """
    check_batch(batch)
    check_sizes(block_size=block_size)
    if batch.block_table is None:
        raise ValueError(f"{name}: expected int32 [b, m], got None: this path reads a paged cache")
    b, m = batch.block_table.shape
    if not batch.seq_lens.is_cpu or not b:
        return batch.block_table
    question = ("block_table", block_size, num_blocks, left, chunk_size)
    if new_lens is None and _has_passed(batch, question, batch.version):
        return batch.block_table
    lengths = batch.seq_lens.long() if new_lens is None else batch.seq_lens.long() + new_lens
    blocks_needed = (lengths + block_size - 1) // block_size
    longest = int(blocks_needed.argmax())
    if int(blocks_needed[longest]) > m:
        raise ValueError(
            f"{name}: expected at least {int(blocks_needed[longest])} columns for the "
            f"{int(lengths[longest])} keys of sequence {longest} in blocks of {block_size}, got {m}"
        )
    if num_blocks is None:
        return batch.block_table
    columns = torch.arange(m)
    used = columns < blocks_needed[:, None]
    if left >= 0 or chunk_size is not None:
        first_keys = batch.context_lens.long()  # that the first query of each sequence sees
        first_keys = first_keys - left if chunk_size is None else first_keys // chunk_size * chunk_size
        used &= columns >= first_keys.clamp(min=0)[:, None] // block_size
    outside = used & ((batch.block_table < 0) | (batch.block_table >= num_blocks))
    if outside.any():
        i, column = outside.nonzero()[0].tolist()
        raise ValueError(
            f"{name}: expected entries in 0..{num_blocks - 1} for the blocks that sequence {i} uses, "
            f"got {int(batch.block_table[i, column])} in column {column}"
        )
    if new_lens is None:
        _let_pass(batch, question, batch.version)
    return batch.block_table


def check_lengths(batch: Batch, num_tokens: int | None = None, *, prefix: str = "") -> None:
    """Check on a CPU that the lengths of a batch are lengths, and that its maxima are not too small.

    Args:
        batch: the lengths; on a device they are not read.
        num_tokens: query rows that there are, `t`, where the batch is to be checked against them.
        prefix: what errors put before the name of a tensor.

    Raises:
        ValueError: if `cu_seqlens_q` does not rise from 0, to at most `num_tokens`; if a length is negative; if a
            sequence is longer than the stated maximum.
    """
    check_batch(batch)
    if not batch.seq_lens.is_cpu or _has_passed(batch, ("lengths", num_tokens), batch.version):
        return
    starts = batch.cu_seqlens_q
    falls = bool((starts[1:] < starts[:-1]).any())  # the difference of two int32 might not be one
    if int(starts[0]) != 0 or falls or (num_tokens is not None and int(starts[-1]) > num_tokens):
        end = "" if num_tokens is None else f" to at most t={num_tokens} rows"
        raise ValueError(f"{prefix}cu_seqlens_q: expected to rise from 0{end}, got {starts.tolist()}")
    if (batch.seq_lens < 0).any():
        raise ValueError(f"{prefix}seq_lens: expected lengths of at least 0, got {batch.seq_lens.tolist()}")
    for name, stated, lengths in (
        ("max_query_len", batch.max_query_len, batch.query_lens),
        ("max_seq_len", batch.max_seq_len, batch.seq_lens),
    ):
        if lengths.numel() and int(lengths.max()) > stated:
            raise ValueError(f"{prefix}{name}: expected at least {int(lengths.max())}, the longest, got {stated}")
    _let_pass(batch, ("lengths", num_tokens), batch.version)


def check_num_tokens(num_tokens: int, batch: Batch) -> None:
    """Check the number of query rows that a table is asked for: at least those of the batch, the rest is padding.

    Raises:
        ValueError: if it is no int of at least 0; on a CPU also if it is too small, or the lengths are none.
    """
    check_lengths(batch)
    check_int("num_tokens", num_tokens)
    if batch.seq_lens.is_cpu and num_tokens < int(batch.cu_seqlens_q[-1]):
        raise ValueError(
            f"num_tokens: expected at least {int(batch.cu_seqlens_q[-1])}, the query rows of the batch, "
            f"got {num_tokens}"
        )


def check_advance(batch: Batch, slots: Tensor, *, block_size: int) -> Int32[Tensor, "b m"]:
    """Check a step in place: the slots, and that the block table has room for the tokens that come.

    Returns:
        The block table.

    Raises:
        ValueError: naming the argument, what was expected and what came.
    """
    check_lengths(batch)
    _expect(slots, "slots", torch.int64, ("t",), (None,))
    same_device(seq_lens=batch.seq_lens, slots=slots)
    if batch.seq_lens.is_cpu and slots.shape[0] < int(batch.cu_seqlens_q[-1]):
        raise ValueError(
            f"slots: expected int64 [t], at least {int(batch.cu_seqlens_q[-1])} query rows, got {_describe(slots)}"
        )
    return check_block_table(batch, block_size=block_size, new_lens=batch.query_lens)


def check_split(batch: Batch, query_lens: Sequence[int], decode_len: int) -> None:
    """Check the new tokens of each sequence of a batch, as its builder knows them.

    Raises:
        ValueError: if there are more or fewer of them than sequences; on a CPU also if the batch has others.
    """
    check_lengths(batch)
    check_requests(query_lens, query_lens, None, num_seqs=batch.num_seqs)
    check_int("decode_len", decode_len)
    if batch.seq_lens.is_cpu and batch.query_lens.tolist() != list(query_lens):
        raise ValueError(f"query_lens: expected {batch.query_lens.tolist()}, as in the batch, got {list(query_lens)}")


def check_options(
    query: Tensor,
    *,
    causal: bool = True,
    window_size: tuple[int, int] = (-1, -1),
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    alibi_slopes: Float[Tensor, "h"] | None = None,
    sinks: Float[Tensor, "h"] | None = None,
    batch_invariant: bool = False,
    return_lse: bool = False,
) -> None:
    """Check the options that every path shares, beside a query `[t, h, d]` that has been checked.

    Raises:
        ValueError: naming the option, what was expected and what came.
    """
    check_flag("causal", causal)
    check_window(window_size)
    if softmax_scale is not None:
        check_number("softmax_scale", softmax_scale)
    check_number("softcap", softcap, at_least=0.0)
    check_flag("batch_invariant", batch_invariant)
    check_flag("return_lse", return_lse)
    if alibi_slopes is not None:
        check_per_head("alibi_slopes", alibi_slopes, query)
    if sinks is not None:
        check_per_head("sinks", sinks, query)


def check_per_head(name: str, numbers: Tensor, query: Tensor) -> None:
    """Check an option with one number per head, `[h]`: any floating point type; on a CPU also that all are finite.

    Raises:
        ValueError: naming the option, what was expected and what came.
    """
    h = query.shape[1]
    if not isinstance(numbers, Tensor) or not numbers.is_floating_point() or numbers.shape != (h,):
        raise ValueError(f"{name}: expected floating point [h={h}], got {_describe(numbers)}")
    if numbers.device != query.device:
        same_device(query=query, **{name: numbers})
    if numbers.is_cpu and not all(map(isfinite, numbers.tolist())):
        raise ValueError(f"{name}: expected finite numbers, got {numbers.tolist()}")


def check_slots(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor) -> None:
    """Check a write of new tokens `[t, hk, d]` into the pool `[n, p, hk, d]` by slots `[t]`.

    Raises:
        ValueError: naming the argument; on a CPU also if a slot is outside the pool, or given twice.
    """
    _expect(key_cache, "key_cache", None, ("n", "p", "hk", "d"), (None, None, None, None))
    _expect(value_cache, "value_cache", None, ("n", "p", "hk", "dv"), (*key_cache.shape[:3], None))
    check_sizes(block_size=key_cache.shape[1])
    _expect(key, "key", key_cache.dtype, ("t", "hk", "d"), (None, *key_cache.shape[2:]))
    _expect(value, "value", value_cache.dtype, ("t", "hk", "dv"), (key.shape[0], *value_cache.shape[2:]))
    _expect(slot_mapping, "slot_mapping", torch.int64, ("t",), (key.shape[0],))
    same_device(key=key, value=value, key_cache=key_cache, value_cache=value_cache, slot_mapping=slot_mapping)
    if not slot_mapping.is_cpu or not slot_mapping.numel():
        return
    question, version = ("slots", key_cache.shape[0] * key_cache.shape[1]), version_of(slot_mapping)
    if _has_passed(slot_mapping, question, version):
        return
    slots, uses = slot_mapping.unique(return_counts=True)
    last = key_cache.shape[0] * key_cache.shape[1] - 1
    if int(slots[0]) < -1 or int(slots[-1]) > last:
        wrong = int(slots[0]) if int(slots[0]) < -1 else int(slots[-1])
        raise ValueError(f"slot_mapping: expected slots in 0..{last}, or -1 for padding, got {wrong}")
    twice = slots[(uses > 1) & (slots >= 0)]
    if twice.numel():
        raise ValueError(f"slot_mapping: expected each slot once, got slot {int(twice[0])} for several tokens")
    _let_pass(slot_mapping, question, version)


def check_translated(slot_mapping: Tensor, *, num_slots: int) -> None:
    """Check slots of one pool that are to become slots of another.

    Raises:
        ValueError: if they are no int64 `[t]`; on a CPU also if one is outside the pool, -1 for padding excepted.
    """
    _expect(slot_mapping, "slot_mapping", torch.int64, ("t",), (None,))
    if slot_mapping.is_cpu and slot_mapping.numel():
        low, high = int(slot_mapping.min()), int(slot_mapping.max())
        if low < -1 or high >= num_slots:
            wrong = low if low < -1 else high
            raise ValueError(f"slot_mapping: expected slots in 0..{num_slots - 1}, or -1 for padding, got {wrong}")


def check_block_pairs(
    sources: Sequence[Tensor],
    destinations: Sequence[Tensor],
    pairs: Tensor,
    *,
    names: tuple[str, str] = ("sources", "destinations"),
) -> None:
    """Check a copy of whole blocks between caches whose first dimension is the block.

    Raises:
        ValueError: if the caches differ in number, block shape or type, and (where the pairs are on a CPU) if a block
            is outside its pool, or is written twice.
    """
    for name, caches in zip(names, (sources, destinations), strict=True):
        if not isinstance(caches, (list, tuple)):
            raise ValueError(f"{name}: expected a list of caches, got {_describe(caches)}")
        for i, cache in enumerate(caches):
            if not isinstance(cache, Tensor) or cache.ndim < 1:
                raise ValueError(f"{name}[{i}]: expected a cache [n, ...], got {_describe(cache)}")
    if len(sources) != len(destinations):
        raise ValueError(f"{names[1]}: expected {len(sources)} caches, as in sources, got {len(destinations)}")
    for i, (source, destination) in enumerate(zip(sources, destinations, strict=True)):
        if source.dtype != destination.dtype or source.shape[1:] != destination.shape[1:]:
            raise ValueError(
                f"{names[1]}[{i}]: expected blocks as in {_describe(source)}, got {_describe(destination)}"
            )
    _expect(pairs, "pairs", torch.int64, ("k", "2"), (None, 2))
    if not pairs.is_cpu or not pairs.numel() or not sources:
        return
    for column, caches in ((0, sources), (1, destinations)):
        n = min(cache.shape[0] for cache in caches)
        if int(pairs[:, column].min()) < 0 or int(pairs[:, column].max()) >= n:
            raise ValueError(f"pairs: expected blocks in 0..{n - 1}, got {pairs[:, column].tolist()}")
    if pairs[:, 1].unique().numel() != pairs.shape[0]:
        raise ValueError(f"pairs: expected each destination once, got {pairs[:, 1].tolist()}")


def check_requests(
    query_lens: Sequence[int],
    seq_lens: Sequence[int],
    block_tables: Sequence[Sequence[int]] | None,
    *,
    num_seqs: int | None = None,
    block_size: int | None = None,
) -> None:
    """Check what a scheduler says of its requests: as many lengths as sequences, none of them negative, and blocks.

    Args:
        query_lens: new tokens of each request.
        seq_lens: tokens of each request.
        block_tables: blocks of each request; None where they are not asked for.
        num_seqs: how many requests there are; as many as `seq_lens` if None.
        block_size: tokens in a block, where each request needs blocks for all its tokens.

    Raises:
        ValueError: naming the argument, what was expected and what came.
    """
    for name, lengths in (("query_lens", query_lens), ("seq_lens", seq_lens)):
        _check_list(name, lengths, "lengths")
    expected = len(seq_lens) if num_seqs is None else num_seqs
    if len(query_lens) != expected:
        raise ValueError(f"query_lens: expected {expected} lengths, one a sequence, got {len(query_lens)}")
    for name, lengths in (("query_lens", query_lens), ("seq_lens", seq_lens)):
        if not {*map(type, lengths)} <= {int}:
            wrong = next(length for length in lengths if type(length) is not int)
            raise ValueError(f"{name}: expected Python ints, got {_describe(wrong)}")
        if lengths and min(lengths) < 0:
            raise ValueError(f"{name}: expected lengths of at least 0, got {list(lengths)}")
        if lengths and max(lengths) > LARGEST_INT32:
            raise ValueError(f"{name}: expected lengths of at most {LARGEST_INT32}, got {max(lengths)}")
    if sum(query_lens) > LARGEST_INT32:
        raise ValueError(f"query_lens: expected at most {LARGEST_INT32} tokens together, got {sum(query_lens)}")
    if block_tables is None:
        return
    _check_list("block_tables", block_tables, "lists of blocks")
    if len(block_tables) != expected:
        raise ValueError(f"block_tables: expected {expected} rows, one a sequence, got {len(block_tables)}")
    for i, blocks in enumerate(block_tables):
        _check_list(f"block_tables[{i}]", blocks, "blocks")
        try:
            array("i", blocks)  # the quickest way to look at each of them
        except (TypeError, OverflowError):
            fits = range(-LARGEST_INT32 - 1, LARGEST_INT32 + 1)
            bad: object = next((block for block in blocks if not isinstance(block, int) or block not in fits), blocks)
            raise ValueError(f"block_tables[{i}]: expected int32 blocks, got {_describe(bad)}") from None
        if block_size is not None and len(blocks) * block_size < seq_lens[i]:
            needed = -(-seq_lens[i] // block_size)
            raise ValueError(f"block_tables[{i}]: expected {needed} blocks for {seq_lens[i]} tokens, got {len(blocks)}")


def check_partials(outs: Sequence[Tensor], lses: Sequence[Tensor]) -> None:
    """Check the parts of a merge: outputs `[t, h, dv]`, all alike, and a log-sum-exp `[t, h]` for each.

    Raises:
        ValueError: naming the part, what was expected and what came.
    """
    for name, parts in (("outs", outs), ("lses", lses)):
        if not isinstance(parts, (list, tuple)):
            raise ValueError(f"{name}: expected a list of tensors, one for each part, got {_describe(parts)}")
    if not outs or len(outs) != len(lses):
        raise ValueError(f"lses: expected one for each output, and at least one, got {len(lses)} for {len(outs)}")
    _expect(outs[0], "outs[0]", None, ("t", "h", "dv"), (None, None, None))
    if not outs[0].is_floating_point():
        raise ValueError(f"outs[0]: expected a floating point type, got {_describe(outs[0])}")
    shape, dtype, device = outs[0].shape, outs[0].dtype, outs[0].device
    lse_dtype = lses[0].dtype if isinstance(lses[0], Tensor) else None
    for i, (out, lse) in enumerate(zip(outs, lses, strict=True)):
        _expect(out, f"outs[{i}]", dtype, ("t", "h", "dv"), shape)
        _expect(lse, f"lses[{i}]", lse_dtype, ("t", "h"), shape[:2])
        if lse.dtype not in (torch.float32, torch.float64):
            raise ValueError(f"lses[{i}]: expected float32 or float64, got {_describe(lse)}")
        for name, tensor in ((f"outs[{i}]", out), (f"lses[{i}]", lse)):
            if tensor.device != device:
                raise ValueError(f"{name}: expected {device}, where outs[0] is, got {tensor.device}")


def check_gather(cache: Tensor, blocks: Tensor, seq_len: int) -> None:
    """Check that a row of a block table covers a sequence of `seq_len` tokens of a cache `[n, p, hk, d]`.

    Raises:
        ValueError: if there are too few blocks, and on a CPU if one is outside the pool.
    """
    _expect(cache, "cache", None, ("n", "p", "hk", "d"), (None, None, None, None))
    check_sizes(block_size=cache.shape[1])
    _expect(blocks, "blocks", torch.int32, ("m",), (None,))
    same_device(cache=cache, blocks=blocks)
    room = blocks.shape[0] * cache.shape[1]
    if not _is_int(seq_len) or not 0 <= seq_len <= room:
        raise ValueError(f"seq_len: expected 0..{room} for {blocks.shape[0]} blocks, got {_describe(seq_len)}")
    needed = -(-seq_len // cache.shape[1])
    if blocks.is_cpu and needed:
        used = blocks[:needed]
        if int(used.min()) < 0 or int(used.max()) >= cache.shape[0]:
            raise ValueError(f"blocks: expected entries in 0..{cache.shape[0] - 1}, got {used.tolist()}")


def check_prefixes(
    prefixes: Sequence[Prefix],
    query_lens: Sequence[int],
    seq_lens: Sequence[int],
    block_tables: Sequence[Sequence[int]],
    *,
    block_size: int,
) -> None:
    """Check prefixes against what a scheduler knows of its requests: whole blocks, the same ones, before any query.

    Raises:
        ValueError: naming the prefix, what was expected and what came.
    """
    check_sizes(block_size=block_size)
    check_requests(query_lens, seq_lens, block_tables, block_size=block_size)
    check_tree(prefixes)
    for i, prefix in enumerate(prefixes):
        first, last, end = prefix
        if not 0 <= first < last <= len(seq_lens):
            raise ValueError(f"prefixes[{i}]: expected sequences in 0..{len(seq_lens)}, got {first}..{last}")
        if end < 1 or end % block_size:
            raise ValueError(f"prefixes[{i}]: expected a multiple of the block size {block_size}, got {end} keys")
        blocks = list(block_tables[first][: end // block_size])
        for member in range(first, last):
            context_len = seq_lens[member] - query_lens[member]
            if end > context_len:
                raise ValueError(
                    f"prefixes[{i}]: expected to end before the first query of each sequence, "
                    f"at {context_len} of sequence {member}, got {end} keys"
                )
            if len(blocks) * block_size < end or list(block_tables[member][: len(blocks)]) != blocks:
                raise ValueError(f"prefixes[{i}]: expected sequences {first} and {member} to share {end} keys by block")
        for other in prefixes[:i]:
            apart = last <= other.first or other.last <= first
            if not apart and not other.encloses(prefix) and not prefix.encloses(other):
                raise ValueError(f"prefixes[{i}]: expected to be apart from {other} or nested with it, got {prefix}")


def check_tree(prefixes: Sequence[Prefix]) -> None:
    """Check the types of some prefixes.

    Raises:
        ValueError: naming what is no list, or no `Prefix` of Python ints.
    """
    _check_list("prefixes", prefixes, "prefixes")
    for i, prefix in enumerate(prefixes):
        if not isinstance(prefix, Prefix) or not all(map(_is_int, prefix)):
            raise ValueError(f"prefixes[{i}]: expected a Prefix of Python ints, got {_describe(prefix)}")


def check_machine(machine: Machine) -> None:
    """Check the machine of a cost model.

    Raises:
        ValueError: if it is none.
    """
    if not isinstance(machine, Machine):
        raise ValueError(f"machine: expected a Machine, got {_describe(machine)}")


def check_levels(batch: Batch, levels: Sequence[Level], *, block_size: int, num_blocks: int) -> None:
    """Check that the levels of a cascade hold the keys of a batch: shared ones first, each sequence's own at last.

    Args:
        batch: the lengths and the block table of the whole, which have been checked.
        levels: the levels.
        block_size: tokens in a block, `p`.
        num_blocks: blocks in the pool, `n`.

    Raises:
        ValueError: if there is no level, on a CPU also if the levels are of another batch, or a shared level reaches
            into the queries, or a block is outside the pool.
    """
    if not isinstance(levels, (list, tuple)):
        raise ValueError(f"levels: expected a list of levels, got {_describe(levels)}")
    if not levels:
        raise ValueError("levels: expected at least one, the keys that nobody shares, got none")
    for i, level in enumerate(levels):
        if not isinstance(level, Level) or not isinstance(level.batch, Batch):
            raise ValueError(f"levels[{i}]: expected a Level with a Batch, got {_describe(level)}")
        _expect(level.first_keys, f"levels[{i}].first_keys", torch.int32, ("b",), (level.batch.num_seqs,))
        same_device(seq_lens=batch.seq_lens, **{f"levels[{i}]": level.batch.seq_lens, "first_keys": level.first_keys})
        if level.batch.block_table is None:
            raise ValueError(f"levels[{i}]: expected a batch with a block table, got None")
    if not batch.seq_lens.is_cpu:
        return
    tensors = [
        x for one in levels for x in (one.batch.cu_seqlens_q, one.batch.seq_lens, one.batch.block_table, one.first_keys)
    ]
    version = version_of(batch.cu_seqlens_q, batch.seq_lens, batch.block_table, *tensors)
    evidence = None if version is None else (version, *map(ref, levels))
    question = ("levels", block_size, num_blocks)
    if _has_passed(batch, question, evidence):
        return
    starts, seq_lens = batch.cu_seqlens_q.tolist(), batch.seq_lens.tolist()
    for i, level in enumerate(levels):
        edges = level.batch.cu_seqlens_q.tolist()
        inside = edges[0] == 0 and edges[-1] == starts[-1] and edges == sorted(edges) and set(edges) <= set(starts)
        if not inside or (i == len(levels) - 1 and edges != starts):
            raise ValueError(f"levels[{i}]: expected groups of the sequences at query rows {starts}, got {edges}")
        check_lengths(level.batch, prefix=f"levels[{i}].batch.")

    keys = [0] * len(seq_lens)  # of each sequence, in the levels so far
    for i, level in enumerate(levels):
        edges, lengths, first_keys = (
            x.tolist() for x in (level.batch.cu_seqlens_q, level.batch.seq_lens, level.first_keys)
        )
        assert level.batch.block_table is not None
        group = 0
        for member, (start, end) in enumerate(pairwise(starts)):
            if start == end:
                continue  # a sequence without queries reads nothing, in whatever group it is
            while edges[group + 1] <= start:
                group += 1
            if not lengths[group]:
                continue
            if first_keys[group] != keys[member]:
                raise ValueError(
                    f"levels[{i}].first_keys: expected {keys[member]} for sequence {member}, as the "
                    f"levels before hold so many of its keys, got {first_keys[group]}"
                )
            keys[member] += lengths[group]
            before = seq_lens[member] - (end - start)
            if i < len(levels) - 1 and keys[member] > before:
                raise ValueError(
                    f"levels[{i}]: expected to end before the first query of each sequence, at {before} "
                    f"of sequence {member}, got {keys[member]} keys"
                )
        if lengths and max(lengths) > level.batch.block_table.shape[1] * block_size:
            raise ValueError(
                f"levels[{i}]: expected blocks for {max(lengths)} keys, got {level.batch.block_table.shape[1]} columns"
            )
        table = f"levels[{i}].batch.block_table"
        check_block_table(level.batch, block_size=block_size, num_blocks=num_blocks, name=table)
    for member, (start, end) in enumerate(pairwise(starts)):
        if end > start and keys[member] != seq_lens[member]:
            raise ValueError(f"levels: expected the {seq_lens[member]} keys of sequence {member}, got {keys[member]}")
    _let_pass(batch, question, evidence)


def check_differential(
    query: Tensor,
    cache: Tensor,
    batch: Batch,
    *,
    lambda_full: Tensor,
    lambda_init: float,
    norm_weight: Tensor | None,
    norm_eps: float,
) -> Int32[Tensor, "b m"]:
    """Check what differential attention asks for beside the shared options.

    The query is `[t, h, d]` in pairs of heads, the cache `[2, 2, n, p, hk/2, d]`.

    Returns:
        The block table, which is there then.

    Raises:
        ValueError: naming the argument, what was expected and what came.
    """
    _check_query(query)
    _expect(cache, "cache", query.dtype, ("2", "2", "n", "p", "hk/2", "d"), (2, 2, None, None, None, query.shape[2]))
    h, pairs = query.shape[1], cache.shape[4]
    if h % 2 or pairs == 0 or (h // 2) % pairs:
        raise ValueError(f"query: expected pairs of heads, in a number that hk/2={pairs} divides, got h={h}")
    check_batch(batch)
    _expect(lambda_full, "lambda_full", None, (), ())
    _check_floating("lambda_full", lambda_full)
    device = query.device
    if cache.device != device or lambda_full.device != device or batch.seq_lens.device != device:
        same_device(query=query, cache=cache, lambda_full=lambda_full, seq_lens=batch.seq_lens)
    if lambda_full.is_cpu and not isfinite(lambda_full.item()):
        raise ValueError(f"lambda_full: expected a finite number, got {lambda_full.item()}")
    check_number("lambda_init", lambda_init)
    check_number("norm_eps", norm_eps, above=0.0)
    if norm_weight is not None:
        _expect(norm_weight, "norm_weight", None, ("2 * d",), (2 * query.shape[2],))
        _check_floating("norm_weight", norm_weight)
        same_device(query=query, norm_weight=norm_weight)
    block_table = check_block_table(batch, block_size=cache.shape[3], num_blocks=cache.shape[2])
    check_lengths(batch, query.shape[0])
    return block_table


def check_lambdas(lambda_init: float, **vectors: Tensor) -> None:
    """Check the learned vectors `[d]` that make the weight of differential attention's second softmax.

    Raises:
        ValueError: naming the argument, what was expected and what came.
    """
    (first, one), *_ = vectors.items()
    _expect(one, first, None, ("d",), (None,))
    for name, vector in vectors.items():
        _expect(vector, name, one.dtype, ("d",), one.shape)
        _check_floating(name, vector)
    same_device(**vectors)
    check_number("lambda_init", lambda_init)


def check_pairs(cache: Tensor, **tokens: Tensor) -> None:
    """Check new keys and values `[t, hk, d]` of differential attention, before either half of them is written.

    Raises:
        ValueError: naming the first that does not fit the cache `[2, 2, n, p, hk/2, d]`.
    """
    _expect(cache, "cache", None, ("2", "2", "n", "p", "hk/2", "d"), (2, 2, None, None, None, None))
    for name, tensor in tokens.items():
        _expect(tensor, name, cache.dtype, ("t", "hk", "d"), (None, 2 * cache.shape[4], cache.shape[5]))


def check_halves(heads: Tensor) -> None:
    """Check heads `[t, h, d]` whose first half is to be paired with the second.

    Raises:
        ValueError: if they are of another shape, or of an odd number.
    """
    _expect(heads, "heads", None, ("t", "h", "d"), (None, None, None))
    if heads.shape[1] % 2:
        raise ValueError(f"heads: expected an even number of heads, got h={heads.shape[1]}")


def check_sizes(**sizes: int) -> None:
    """Check that each of the named sizes is a positive int.

    Raises:
        ValueError: naming the first that is not.
    """
    for name, size in sizes.items():
        if not _is_int(size) or size < 1:
            raise ValueError(f"{name}: expected a positive int, got {_describe(size)}")


def check_int(name: str, value: int, *, at_most: int | None = LARGEST_INT32) -> None:
    """Check a length or a count: a Python int of at least 0, and one that an int32 can hold unless told otherwise.

    Raises:
        ValueError: naming it.
    """
    if not _is_int(value) or value < 0:
        raise ValueError(f"{name}: expected a Python int of at least 0, got {_describe(value)}")
    if at_most is not None and value > at_most:
        raise ValueError(f"{name}: expected at most {at_most}, got {value}")


def check_number(name: str, value: float, *, at_least: float | None = None, above: float | None = None) -> None:
    """Check a finite Python number, and that it is not too small.

    Raises:
        ValueError: naming it.
    """
    is_number = isinstance(value, (float, int)) and not isinstance(value, bool)
    finite = is_number and -sys.float_info.max <= value <= sys.float_info.max
    if not finite or (at_least is not None and value < at_least) or (above is not None and value <= above):
        bound = "" if at_least is None else f" of at least {at_least:g}"
        bound = bound if above is None else f" above {above:g}"
        raise ValueError(f"{name}: expected a finite number{bound}, got {_describe(value)}")


def check_flag(name: str, value: bool) -> None:
    """Check a choice of yes or no.

    Raises:
        ValueError: naming it, if it is neither True nor False.
    """
    if value is not True and value is not False:
        raise ValueError(f"{name}: expected True or False, got {_describe(value)}")


def check_window(window_size: tuple[int, int]) -> None:
    """Check a window by itself, as `check_options` does beside a query.

    Raises:
        ValueError: if it is no pair of ints of at least -1 that an int32 can hold.
    """
    if type(window_size) is tuple and len(window_size) == 2:
        left, right = window_size
        if _is_int(left) and _is_int(right) and -1 <= left <= LARGEST_INT32 and -1 <= right <= LARGEST_INT32:
            return
    raise ValueError(
        f"window_size: expected (left, right), two ints, each at least -1 (no limit) and at most {LARGEST_INT32}, "
        f"got {window_size!r}"
    )


def check_chunk(chunk_size: int, block_size: int) -> None:
    """Check the chunks of local attention: whole blocks, so that each begins with one.

    Raises:
        ValueError: naming the size, what was expected and what came.
    """
    check_sizes(chunk_size=chunk_size, block_size=block_size)
    if chunk_size % block_size:
        raise ValueError(f"chunk_size: expected a multiple of block_size={block_size}, got {chunk_size}")


def check_held(query_len: int, seq_len: int, blocks: Sequence[int], *, block_size: int, num_full_blocks: int) -> None:
    """Check what a window pool is told of a sequence: its lengths in tokens, and its blocks in the full pool.

    Raises:
        ValueError: if there are no new tokens or more than tokens, or too few blocks, or one outside the pool.
    """
    check_int("seq_len", seq_len)
    if not _is_int(query_len) or not 1 <= query_len <= seq_len:
        raise ValueError(f"query_len: expected 1..{seq_len}, the tokens of the sequence, got {_describe(query_len)}")
    _check_list("blocks", blocks, "blocks")
    if len(blocks) * block_size < seq_len:
        raise ValueError(f"blocks: expected {-(-seq_len // block_size)} for {seq_len} tokens, got {len(blocks)}")
    outside = [block for block in blocks if not _is_int(block) or not 0 <= block < num_full_blocks]
    if outside:
        raise ValueError(f"blocks: expected entries in 0..{num_full_blocks - 1}, got {_describe(outside[0])}")


def check_memory(dtype: torch.dtype, device: torch.device | str) -> None:
    """Check the type and the place of memory that is to be allocated.

    Raises:
        ValueError: if they are none that torch knows.
    """
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"dtype: expected a torch.dtype, got {_describe(dtype)}")
    check_device(device)


def check_device(device: torch.device | str) -> None:
    """Check the name of a device.

    Raises:
        ValueError: if it is none.
    """
    if isinstance(device, torch.device):
        return
    try:
        torch.device(device)
    except (RuntimeError, TypeError):
        raise ValueError(f"device: expected a torch.device or its name, got {_describe(device)}") from None


def check_batch(batch: Batch) -> None:
    """Check that a batch is one; its tensors were checked when it was made.

    Raises:
        ValueError: if it is none.
    """
    if not isinstance(batch, Batch):
        raise ValueError(f"batch: expected a Batch, got {_describe(batch)}")


def same_device(**tensors: Tensor) -> None:
    """Check that the named tensors are on one device.

    Raises:
        ValueError: naming the first tensor that is elsewhere.
    """
    (first, reference), *others = tensors.items()
    for name, tensor in others:
        if tensor.device != reference.device:
            raise ValueError(f"{name}: expected {reference.device}, where {first} is, got {tensor.device}")


def _check_query(query: Tensor) -> tuple[int, ...]:
    shape = _expect(query, "query", None, ("t", "h", "d"), (None, None, None))
    if query.dtype not in QUERY_TYPES:
        types = "bfloat16, float16, float32 or float64"
        raise ValueError(f"query: expected a floating point type ({types}), got {_describe(query)}")
    if not shape[1] or not shape[2]:
        raise ValueError(f"query: expected at least one head, of a size of at least 1, got {_describe(query)}")
    return shape


def _check_tokens(
    query: Tensor, key: Tensor, value: Tensor, names: tuple[str, str], key_dims: tuple[str, ...], batch: Batch
) -> None:
    _, h, d = _check_query(query)
    shape = _expect(key, names[0], query.dtype, key_dims, (*(None,) * (len(key_dims) - 1), d))
    if not _expect(value, names[1], query.dtype, (*key_dims[:-1], "dv"), (*shape[:-1], None))[-1]:
        raise ValueError(f"{names[1]}: expected a head size of at least 1, got {_describe(value)}")
    hk = shape[-2]
    if not hk or h % hk:
        raise ValueError(f"query: expected a number of heads that hk={hk} divides, got h={h}")
    check_batch(batch)
    device = query.device
    if key.device != device or value.device != device or batch.seq_lens.device != device:
        same_device(query=query, **{names[0]: key, names[1]: value}, seq_lens=batch.seq_lens)


def _check_floating(name: str, tensor: Tensor) -> None:
    if not tensor.is_floating_point():
        raise ValueError(f"{name}: expected a floating point type, got {_describe(tensor)}")


def _check_list(name: str, values: Sequence[Any], what: str) -> None:
    if not isinstance(values, Sequence) or isinstance(values, (str, bytes)):
        raise ValueError(f"{name}: expected a list of {what}, got {_describe(values)}")


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def version_of(*tensors: Tensor | None) -> tuple[int, ...] | None:
    """Return what changes with every write to some tensors; None where torch does not count the writes."""
    there = [x for x in tensors if x is not None]
    return None if any(x.is_inference() for x in there) else tuple(x._version for x in there)


# A step has one batch, and one mapping of slots, for all layers; their contents are read for the first of them only.
_passed = WeakIdKeyDictionary()


def _has_passed(what: Batch | Tensor, question: tuple[Any, ...], evidence: tuple[Any, ...] | None) -> bool:
    """Return whether some contents have passed a check before, on the same evidence: versions of the tensors."""
    return evidence is not None and _passed.get(what, {}).get(question) == evidence


def _let_pass(what: Batch | Tensor, question: tuple[Any, ...], evidence: tuple[Any, ...] | None) -> None:
    _passed.setdefault(what, {})[question] = evidence


def _expect(
    tensor: Tensor,
    name: str,
    dtype: torch.dtype | None,
    dims: Sequence[str],
    sizes: Sequence[int | None],
) -> tuple[int, ...]:
    """Check that something is a tensor of a type and a shape, and return that; a size of None may be anything."""
    if isinstance(tensor, Tensor) and (dtype is None or tensor.dtype == dtype):
        shape = tuple(tensor.shape)
        if len(shape) == len(sizes):
            for size, actual in zip(sizes, shape, strict=True):
                if size is not None and size != actual:
                    break
            else:
                return shape
    wanted = ", ".join(
        dim if size is None or dim == str(size) else f"{dim}={size}" for dim, size in zip(dims, sizes, strict=True)
    )
    kind = f"{str(dtype).removeprefix('torch.')} " if dtype is not None else ""
    raise ValueError(f"{name}: expected {kind}[{wanted}], got {_describe(tensor)}")


def _describe(value: object) -> str:
    """Return what came instead of what was expected, in a few words."""
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    if value is None or isinstance(value, (bool, int, float, str, Prefix)):
        return repr(value)
    kind = type(value)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
