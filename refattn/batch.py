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
from typing import NamedTuple

import torch
from jaxtyping import Float, Int32
from torch import Tensor


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

    def __post_init__(self) -> None:
        """Check the types, shapes and devices; the contents are not read, they may be on a device."""
        _expect(self.seq_lens, "seq_lens", torch.int32, ("b",), (None,))
        b = self.seq_lens.shape[0]
        _expect(self.cu_seqlens_q, "cu_seqlens_q", torch.int32, ("b + 1",), (b + 1,))
        same_device(seq_lens=self.seq_lens, cu_seqlens_q=self.cu_seqlens_q)
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
    if batch.device.type != "cpu" or not b:
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
    if slot_mapping.device.type != "cpu" or not slot_mapping.numel():
        return
    slots, uses = slot_mapping.unique(return_counts=True)
    last = key_cache.shape[0] * key_cache.shape[1] - 1
    if int(slots[0]) < -1 or int(slots[-1]) > last:
        wrong = int(slots[0]) if int(slots[0]) < -1 else int(slots[-1])
        raise ValueError(f"slot_mapping: expected slots in 0..{last}, or -1 for padding, got {wrong}")
    twice = slots[(uses > 1) & (slots >= 0)]
    if twice.numel():
        raise ValueError(f"slot_mapping: expected each slot once, got slot {int(twice[0])} for several tokens")


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


def check_sizes(**sizes: int) -> None:
    """Check that each of the named sizes is a positive int.

    Raises:
        ValueError: naming the first that is not.
    """
    for name, size in sizes.items():
        if not isinstance(size, int) or size < 1:
            raise ValueError(f"{name}: expected a positive int, got {size!r}")


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
