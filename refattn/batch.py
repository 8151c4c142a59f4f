"""The ragged batch: sequences of different lengths in one row of query tokens, and the checks of its shape.

Three sequences with 2, 1 and 3 new tokens, of 5, 7 and 3 tokens in all, in blocks of 4 tokens:

    query tokens    a3 a4 | b6 | c0 c1 c2        t = 6
    cu_seqlens_q    0       2    3          6    where each sequence's queries begin and end
    seq_lens        5, 7, 3                      keys: context + new tokens
    block_table     [[9, 2], [4, 7], [1, -1]]    key 4 of `a` is row 0 of block 2; behind the last block is nothing

Query rows behind the last sequence (`t > cu_seqlens_q[-1]`) are padding.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple
from weakref import ref

import torch
from jaxtyping import Float, Int32
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary


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
        same_device(seq_lens=self.seq_lens, cu_seqlens_q=self.cu_seqlens_q)
        for name, lengths in (("seq_lens", self.seq_lens), ("cu_seqlens_q", self.cu_seqlens_q)):
            if not lengths.is_contiguous():  # kernels take a pointer to them, and no stride
                raise ValueError(f"{name}: expected its entries side by side, got a stride of {lengths.stride(0)}")
        if self.block_table is not None:
            _expect(self.block_table, "block_table", torch.int32, ("b", "m"), (b, None))
            same_device(seq_lens=self.seq_lens, block_table=self.block_table)
        for name in ("max_query_len", "max_seq_len"):
            if not isinstance(getattr(self, name), int) or getattr(self, name) < 0:
                raise ValueError(f"{name}: expected a Python int of at least 0, got {getattr(self, name)!r}")

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
    _check_tokens(query, key, value, ("s", "hk", "d"), batch)
    if batch.device.type == "cpu":
        _check_lengths(query, batch)
        total = int(batch.seq_lens.sum())
        if total > key.shape[0]:
            raise ValueError(f"key: expected at least the {total} rows that seq_lens adds up to, got {key.shape[0]}")


def check_paged(query: Tensor, key_cache: Tensor, value_cache: Tensor, batch: Batch) -> Int32[Tensor, "b m"]:
    """Check the tensors of a path over the paged cache: query `[t, h, d]`, caches `[n, p, hk, d]` and `[n, p, hk, dv]`.

    On a CPU the contents of the batch are checked as well; on a device that would have to wait for it.

    Returns:
        The block table, which is there then.

    Raises:
        ValueError: naming the argument, what was expected and what came.
    """
    _check_tokens(query, key_cache, value_cache, ("n", "p", "hk", "d"), batch)
    block_table = check_block_table(batch, block_size=key_cache.shape[1], num_blocks=key_cache.shape[0])
    if batch.device.type == "cpu":
        _check_lengths(query, batch)
    return block_table


def check_block_table(
    batch: Batch, *, block_size: int, num_blocks: int | None = None, new_lens: Tensor | None = None
) -> Int32[Tensor, "b m"]:
    """Check that the table has a block of the pool for every key of every sequence.

    Args:
        batch: the lengths and the table; their contents are checked on a CPU only.
        block_size: tokens in a block, `p`.
        num_blocks: blocks in the pool, where entries are to be checked against it.
        new_lens: tokens by which each sequence is about to grow.

    Returns:
        The block table.

    Raises:
        ValueError: if the batch has no table, and on a CPU if it has too few columns or an entry outside the pool.
    """
    check_sizes(block_size=block_size)
    if batch.block_table is None:
        raise ValueError("block_table: expected int32 [b, m], got None: this path reads a paged cache")
    b, m = batch.block_table.shape
    question = ("block_table", block_size, num_blocks)
    if batch.device.type != "cpu" or not b or (new_lens is None and _has_passed(batch, question, batch.version)):
        return batch.block_table
    lengths = batch.seq_lens if new_lens is None else batch.seq_lens + new_lens
    blocks_needed = (lengths + block_size - 1) // block_size
    longest = int(blocks_needed.argmax())
    if int(blocks_needed[longest]) > m:
        raise ValueError(
            f"block_table: expected at least {int(blocks_needed[longest])} columns for the "
            f"{int(lengths[longest])} keys of sequence {longest} in blocks of {block_size}, got {m}"
        )
    if num_blocks is None:
        return batch.block_table
    used = torch.arange(m) < blocks_needed[:, None]
    outside = used & ((batch.block_table < 0) | (batch.block_table >= num_blocks))
    if outside.any():
        i, column = outside.nonzero()[0].tolist()
        raise ValueError(
            f"block_table: expected entries in 0..{num_blocks - 1} for the blocks that sequence {i} uses, "
            f"got {int(batch.block_table[i, column])} in column {column}"
        )
    if new_lens is None:
        _let_pass(batch, question, batch.version)
    return batch.block_table


def check_options(
    query: Tensor,
    *,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Float[Tensor, "h"] | None = None,
    sinks: Float[Tensor, "h"] | None = None,
) -> None:
    """Check the options that every path shares.

    Raises:
        ValueError: naming the option, what was expected and what came.
    """
    if len(window_size) != 2 or min(window_size) < -1:
        raise ValueError(f"window_size: expected (left, right), each at least -1 (no limit), got {window_size}")
    if not softcap >= 0:
        raise ValueError(f"softcap: expected 0 (none) or a positive bound, got {softcap}")
    for name, per_head in (("alibi_slopes", alibi_slopes), ("sinks", sinks)):
        if per_head is not None:
            if not per_head.is_floating_point() or per_head.shape != query.shape[1:2]:
                expected = f"floating point [h={query.shape[1]}]"
                raise ValueError(f"{name}: expected {expected}, got {_describe(per_head)}")
            same_device(query=query, **{name: per_head})


def check_slots(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor) -> None:
    """Check a write of new tokens `[t, hk, d]` into the pool `[n, p, hk, d]` by slots `[t]`.

    Raises:
        ValueError: naming the argument; on a CPU also if a slot is outside the pool, or given twice.
    """
    _expect(key, "key", key_cache.dtype, ("t", "hk", "d"), (None, *key_cache.shape[2:]))
    _expect(value, "value", value_cache.dtype, ("t", "hk", "dv"), (key.shape[0], *value_cache.shape[2:]))
    _expect(value_cache, "value_cache", None, ("n", "p", "hk", "dv"), (*key_cache.shape[:3], None))
    _expect(slot_mapping, "slot_mapping", torch.int64, ("t",), (key.shape[0],))
    same_device(key=key, value=value, key_cache=key_cache, value_cache=value_cache, slot_mapping=slot_mapping)
    version = version_of(slot_mapping)
    evidence = version and (version, key_cache.shape[0] * key_cache.shape[1])
    if slot_mapping.device.type != "cpu" or not slot_mapping.numel() or _has_passed(slot_mapping, ("slots",), evidence):
        return
    slots, uses = slot_mapping.unique(return_counts=True)
    last = key_cache.shape[0] * key_cache.shape[1] - 1
    if int(slots[0]) < -1 or int(slots[-1]) > last:
        wrong = int(slots[0]) if int(slots[0]) < -1 else int(slots[-1])
        raise ValueError(f"slot_mapping: expected slots in 0..{last}, or -1 for padding, got {wrong}")
    twice = slots[(uses > 1) & (slots >= 0)]
    if twice.numel():
        raise ValueError(f"slot_mapping: expected each slot once, got slot {int(twice[0])} for several tokens")
    _let_pass(slot_mapping, ("slots",), evidence)


def check_block_pairs(sources: Sequence[Tensor], destinations: Sequence[Tensor], pairs: Tensor) -> None:
    """Check a copy of whole blocks between caches whose first dimension is the block.

    Raises:
        ValueError: if the caches differ in number, block shape or type, and (where the pairs are on a CPU) if a block
            is outside its pool, or is written twice.
    """
    if len(sources) != len(destinations):
        raise ValueError(f"destinations: expected {len(sources)} caches, as in sources, got {len(destinations)}")
    for i, (source, destination) in enumerate(zip(sources, destinations, strict=True)):
        if source.dtype != destination.dtype or source.shape[1:] != destination.shape[1:]:
            raise ValueError(
                f"destinations[{i}]: expected blocks as in {_describe(source)}, got {_describe(destination)}"
            )
    _expect(pairs, "pairs", torch.int64, ("k", "2"), (None, 2))
    if pairs.device.type != "cpu" or not pairs.numel() or not sources:
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
) -> None:
    """Check what a scheduler says of its requests: as many lengths as sequences, none of them negative.

    Raises:
        ValueError: naming the argument, what was expected and what came.
    """
    expected = len(seq_lens) if num_seqs is None else num_seqs
    if len(query_lens) != expected:
        raise ValueError(f"query_lens: expected {expected} lengths, one a sequence, got {len(query_lens)}")
    if block_tables is not None and len(block_tables) != expected:
        raise ValueError(f"block_tables: expected {expected} rows, one a sequence, got {len(block_tables)}")
    for name, lengths in (("query_lens", query_lens), ("seq_lens", seq_lens)):
        if any(length < 0 for length in lengths):
            raise ValueError(f"{name}: expected lengths of at least 0, got {list(lengths)}")


def check_partials(outs: Sequence[Tensor], lses: Sequence[Tensor]) -> None:
    """Check the parts of a merge: outputs `[t, h, dv]`, all alike, and a log-sum-exp `[t, h]` for each.

    Raises:
        ValueError: naming the part, what was expected and what came.
    """
    if not outs or len(outs) != len(lses):
        raise ValueError(f"lses: expected one for each output, and at least one, got {len(lses)} for {len(outs)}")
    for i, (out, lse) in enumerate(zip(outs, lses, strict=True)):
        sizes = (None, None, None) if i == 0 else tuple(outs[0].shape)
        _expect(out, f"outs[{i}]", outs[0].dtype, ("t", "h", "dv"), sizes)
        _expect(lse, f"lses[{i}]", lses[0].dtype, ("t", "h"), tuple(out.shape[:2]))
        if lse.dtype not in (torch.float32, torch.float64):
            raise ValueError(f"lses[{i}]: expected float32 or float64, got {_describe(lse)}")
        same_device(**{"outs[0]": outs[0], f"outs[{i}] ": out, f"lses[{i}]": lse})


def check_gather(cache: Tensor, blocks: Tensor, seq_len: int) -> None:
    """Check that a row of a block table covers a sequence of `seq_len` tokens of a cache `[n, p, ...]`.

    Raises:
        ValueError: if there are too few blocks, and on a CPU if one is outside the pool.
    """
    _expect(blocks, "blocks", torch.int32, ("m",), (None,))
    same_device(cache=cache, blocks=blocks)
    needed = -(-seq_len // cache.shape[1])
    if seq_len < 0 or needed > blocks.shape[0]:
        raise ValueError(
            f"seq_len: expected 0..{blocks.shape[0] * cache.shape[1]} for {blocks.shape[0]} blocks, got {seq_len}"
        )
    if blocks.device.type == "cpu" and needed:
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
    check_requests(query_lens, seq_lens, block_tables)
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


def check_levels(batch: Batch, levels: Sequence[Level], *, block_size: int) -> None:
    """Check that the levels of a cascade hold the keys of a batch: shared ones first, each sequence's own at last.

    Raises:
        ValueError: if there is no level, on a CPU also if the levels are of another batch, or a shared level reaches
            into the queries.
    """
    if not levels:
        raise ValueError("levels: expected at least one, the keys that nobody shares, got none")
    for i, level in enumerate(levels):
        _expect(level.first_keys, f"levels[{i}].first_keys", torch.int32, ("b",), (level.batch.num_seqs,))
        same_device(seq_lens=batch.seq_lens, **{f"levels[{i}]": level.batch.seq_lens, "first_keys": level.first_keys})
        if level.batch.block_table is None:
            raise ValueError(f"levels[{i}]: expected a batch with a block table, got None")
    tensors = [
        x for one in levels for x in (one.batch.cu_seqlens_q, one.batch.seq_lens, one.batch.block_table, one.first_keys)
    ]
    version = version_of(batch.cu_seqlens_q, batch.seq_lens, batch.block_table, *tensors)
    evidence = None if version is None else (version, *map(ref, levels))
    if batch.device.type != "cpu" or _has_passed(batch, ("levels", block_size), evidence):
        return
    starts, seq_lens = batch.cu_seqlens_q.tolist(), batch.seq_lens.tolist()
    for i, level in enumerate(levels):
        edges = level.batch.cu_seqlens_q.tolist()
        if edges[-1] != starts[-1] or not set(edges) <= set(starts) or (i == len(levels) - 1 and edges != starts):
            raise ValueError(f"levels[{i}]: expected groups of the sequences at query rows {starts}, got {edges}")

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
    for member, (start, end) in enumerate(pairwise(starts)):
        if end > start and keys[member] != seq_lens[member]:
            raise ValueError(f"levels: expected the {seq_lens[member]} keys of sequence {member}, got {keys[member]}")
    _let_pass(batch, ("levels", block_size), evidence)


def check_differential(
    query: Tensor, cache: Tensor, batch: Batch, *, lambda_full: Tensor, norm_weight: Tensor | None
) -> Int32[Tensor, "b m"]:
    """Check the tensors of differential attention: query `[t, h, d]` in pairs, cache `[2, 2, n, p, hk/2, d]`.

    Returns:
        The block table, which is there then.

    Raises:
        ValueError: naming the argument, what was expected and what came.
    """
    _expect(query, "query", None, ("t", "h", "d"), (None, None, None))
    _expect(cache, "cache", query.dtype, ("2", "2", "n", "p", "hk/2", "d"), (2, 2, None, None, None, query.shape[2]))
    h, pairs = query.shape[1], cache.shape[4]
    if h % 2 or pairs == 0 or (h // 2) % pairs:
        raise ValueError(f"query: expected pairs of heads, in a number that hk/2={pairs} divides, got h={h}")
    _expect(lambda_full, "lambda_full", None, (), ())
    same_device(query=query, lambda_full=lambda_full)
    if norm_weight is not None:
        _expect(norm_weight, "norm_weight", None, ("2 * d",), (2 * query.shape[2],))
        same_device(query=query, norm_weight=norm_weight)
    return check_paged(query[:, ::2], cache[0, 0], cache[0, 1], batch)


def check_pairs(cache: Tensor, **tokens: Tensor) -> None:
    """Check new keys and values `[t, hk, d]` of differential attention, before either half of them is written.

    Raises:
        ValueError: naming the first that does not fit the cache `[2, 2, n, p, hk/2, d]`.
    """
    _expect(cache, "cache", None, ("2", "2", "n", "p", "hk/2", "d"), (2, 2, None, None, None, None))
    for name, tensor in tokens.items():
        _expect(tensor, name, cache.dtype, ("t", "hk", "d"), (None, 2 * cache.shape[4], cache.shape[5]))


def check_sizes(**sizes: int) -> None:
    """Check that each of the named sizes is a positive int.

    Raises:
        ValueError: naming the first that is not.
    """
    for name, size in sizes.items():
        if not isinstance(size, int) or size < 1:
            raise ValueError(f"{name}: expected a positive int, got {size!r}")


def check_window(window_size: tuple[int, int]) -> None:
    """Check a window by itself, as `check_options` does beside a query.

    Raises:
        ValueError: if it is not two numbers of at least -1.
    """
    if len(window_size) != 2 or min(window_size) < -1:
        raise ValueError(f"window_size: expected (left, right), each at least -1 (no limit), got {window_size}")


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
    if not 1 <= query_len <= seq_len:
        raise ValueError(f"query_len: expected 1..{seq_len}, the tokens of the sequence, got {query_len}")
    if len(blocks) * block_size < seq_len:
        raise ValueError(f"blocks: expected {-(-seq_len // block_size)} for {seq_len} tokens, got {len(blocks)}")
    outside = [block for block in blocks if not 0 <= block < num_full_blocks]
    if outside:
        raise ValueError(f"blocks: expected entries in 0..{num_full_blocks - 1}, got {outside[0]}")


def same_device(**tensors: Tensor) -> None:
    """Check that the named tensors are on one device.

    Raises:
        ValueError: naming the first tensor that is elsewhere.
    """
    (first, reference), *others = tensors.items()
    for name, tensor in others:
        if tensor.device != reference.device:
            raise ValueError(f"{name}: expected {reference.device}, where {first} is, got {tensor.device}")


def _check_tokens(query: Tensor, key: Tensor, value: Tensor, key_dims: Sequence[str], batch: Batch) -> None:
    suffix = "_cache" if len(key_dims) == 4 else ""
    names = ("query", f"key{suffix}", f"value{suffix}")
    _expect(query, names[0], None, ("t", "h", "d"), (None, None, None))
    _expect(key, names[1], query.dtype, key_dims, (*(None,) * (len(key_dims) - 1), query.shape[2]))
    _expect(value, names[2], query.dtype, (*key_dims[:-1], "dv"), (*key.shape[:-1], None))
    if not query.is_floating_point():
        raise ValueError(f"query: expected a floating point type, got {query.dtype}")
    h, hk = query.shape[1], key.shape[-2]
    if hk == 0 or h % hk:
        raise ValueError(f"query: expected a number of heads that hk={hk} divides, got h={h}")
    same_device(**dict(zip(names, (query, key, value), strict=True)), seq_lens=batch.seq_lens)


def _check_lengths(query: Tensor, batch: Batch) -> None:
    if _has_passed(batch, ("lengths", len(query)), batch.version):
        return
    starts, query_lens = batch.cu_seqlens_q, batch.query_lens
    if int(starts[0]) != 0 or (query_lens < 0).any() or int(starts[-1]) > query.shape[0]:
        raise ValueError(
            f"cu_seqlens_q: expected to rise from 0 to at most t={query.shape[0]} rows, got {starts.tolist()}"
        )
    if (batch.seq_lens < 0).any():
        raise ValueError(f"seq_lens: expected lengths of at least 0, got {batch.seq_lens.tolist()}")
    for name, stated, lengths in (
        ("max_query_len", batch.max_query_len, query_lens),
        ("max_seq_len", batch.max_seq_len, batch.seq_lens),
    ):
        if lengths.numel() and int(lengths.max()) > stated:
            raise ValueError(f"{name}: expected at least {int(lengths.max())}, the longest, got {stated}")
    _let_pass(batch, ("lengths", len(query)), batch.version)


def version_of(*tensors: Tensor | None) -> tuple[int, ...] | None:
    """Give what changes with every write to some tensors; None where torch does not count the writes."""
    there = [x for x in tensors if x is not None]
    return None if any(x.is_inference() for x in there) else tuple(x._version for x in there)


# A step has one batch, and one mapping of slots, for all layers; their contents are read for the first of them only.
_passed = WeakIdKeyDictionary()


def _has_passed(what: Batch | Tensor, question: tuple[Any, ...], evidence: tuple[Any, ...] | None) -> bool:
    """Say whether some contents have passed a check before, on the same evidence: versions of the tensors."""
    return evidence is not None and _passed.get(what, {}).get(question) == evidence


def _let_pass(what: Batch | Tensor, question: tuple[Any, ...], evidence: tuple[Any, ...] | None) -> None:
    _passed.setdefault(what, {})[question] = evidence


def _expect(
    tensor: Tensor,
    name: str,
    dtype: torch.dtype | None,
    dims: Sequence[str],
    sizes: Sequence[int | None],
) -> None:
    """Check type and shape; a size of None may be anything."""
    right_shape = tensor.ndim == len(sizes) and all(
        size is None or size == actual for size, actual in zip(sizes, tensor.shape, strict=True)
    )
    if not right_shape or (dtype is not None and tensor.dtype != dtype):
        wanted = ", ".join(
            dim if size is None or dim == str(size) else f"{dim}={size}" for dim, size in zip(dims, sizes, strict=True)
        )
        kind = f"{str(dtype).removeprefix('torch.')} " if dtype is not None else ""
        raise ValueError(f"{name}: expected {kind}[{wanted}], got {_describe(tensor)}")


def _describe(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
