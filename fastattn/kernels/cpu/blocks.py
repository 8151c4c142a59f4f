"""Gather the blocks of several sequences side by side, and clear what no query may see.

Sequences of 6 and 3 keys in blocks of 2, gathered as one rectangle; `x` is hidden, `0` is hidden and cleared:

    keys of a    0 1 | 2 3 | 4 5         columns 0, 1, 2 of its block table
    keys of b    0 1 | 2 0 | x x         columns 0, 1, and 0 again: a block that b sees whole pads the row

The unused slots of a partly filled block may hold anything, also NaN, which neither a bias of `-inf` nor a weight of 0
removes; so they are cleared. A block that the sequence sees whole holds only its own keys, which a bias can hide.
"""

from dataclasses import dataclass, field

import torch
from jaxtyping import Bool, Float, Int32, Int64
from torch import Tensor

from fastattn.kernels.cpu.dequantize import QuantizedPool


def read_blocks(
    pool: Float[Tensor, "n p hk d"] | QuantizedPool,
    blocks: Int32[Tensor, "m"],
    out: Float[Tensor, "m p hk d"] | None = None,
) -> Float[Tensor, "m p hk d"]:
    """Gather some blocks of a pool into `out`, or into new memory if that is None."""
    if isinstance(pool, Tensor):
        return pool.index_select(0, blocks) if out is None else torch.index_select(pool, 0, blocks, out=out)
    return pool.read(
        blocks, torch.empty(len(blocks), *pool.shape[1:], dtype=pool.dtype, device="cpu") if out is None else out
    )


@dataclass(frozen=True)
class KVChunk:
    """Some columns of the blocks of all sequences, gathered at a time.

    Attributes:
        blocks: blocks of the first sequence, then of the next, and so on.
        keys: the keys of a sequence that are in them.
        stale: the gathered rows that may hold anything; None if there are none.
    """

    blocks: Int32[Tensor, "m"]
    keys: slice
    stale: Int64[Tensor, "_"] | None

    def gather(
        self, pool: Float[Tensor, "n p heads d"] | QuantizedPool, out: Float[Tensor, "m p heads d"]
    ) -> Float[Tensor, "m p heads d"]:
        """Read the blocks of keys or of values into `out`, and return it."""
        read_blocks(pool, self.blocks, out)
        if self.stale is not None:
            out.flatten(0, 1).index_fill_(0, self.stale, 0.0)
        return out


@dataclass(frozen=True)
class Blocks:
    """Blocks of some sequences side by side.

    Attributes:
        table: blocks of the pool, as many for each sequence as the longest one reads. A sequence that is cut into runs
            has a row for each of them.
        positions: position of each key of the blocks in its sequence.
        hidden: the keys that no query of their sequence sees.
        stale: the hidden keys that may hold anything.
    """

    table: Int32[Tensor, "b m"]
    positions: Int32[Tensor, "b s"]
    hidden: Bool[Tensor, "b s"]
    stale: Bool[Tensor, "b s"]
    _kv_chunks: dict[int, list[KVChunk]] = field(default_factory=dict, init=False)  # by columns at a time

    def kv_chunks(self, step: int) -> list[KVChunk]:
        """Cut the blocks into KV chunks of `step` columns, fewer at the end."""
        if step not in self._kv_chunks:
            block_size = self.stale.shape[1] // self.table.shape[1]
            kv_chunks = []
            for column in range(0, self.table.shape[1], step):
                some = self.table[:, column : column + step]
                keys = slice(column * block_size, (column + some.shape[1]) * block_size)
                stale = self.stale[:, keys].flatten().nonzero()[:, 0]
                kv_chunks.append(KVChunk(some.flatten(), keys, stale if len(stale) else None))
            self._kv_chunks[step] = kv_chunks  # whole: threads may share a plan
        return self._kv_chunks[step]


def side_by_side(
    block_table: Int32[Tensor, "b columns"],
    first_keys: Int32[Tensor, "b"],
    seq_lens: Int32[Tensor, "b"],
    block_size: int,
    runs: int = 1,
) -> Blocks:
    """Lay out the blocks of some sequences side by side.

    Args:
        block_table: the block table of the sequences.
        first_keys: position of the first key that a query of each sequence sees.
        seq_lens: keys of each sequence, at least one more than `first_keys`.
        block_size: tokens in a block, `p`.
        runs: runs of equally many blocks that each sequence is cut into; each is a row, as a sequence is.

    Returns:
        The blocks from the one with the first key to the one with the last.
    """
    first_keys, seq_lens = first_keys[:, None], seq_lens[:, None]
    first_block, last_block = first_keys // block_size, (seq_lens - 1) // block_size
    columns_of_a_run = -(-(int((last_block - first_block).max()) + 1) // runs)
    columns = first_block + torch.arange(runs * columns_of_a_run, dtype=torch.int32, device="cpu")
    past_the_end = columns > last_block
    whole_block = -(-first_keys // block_size)  # the first that is seen whole, if there is one
    has_whole_block = whole_block < seq_lens // block_size
    filler = torch.where(has_whole_block, whole_block, last_block)
    table = block_table.gather(1, torch.where(past_the_end, filler, columns).long())
    positions = (columns[..., None] * block_size + torch.arange(block_size, dtype=torch.int32, device="cpu")).flatten(1)
    hidden = (positions >= seq_lens) | (positions < first_keys)
    clean = (past_the_end & has_whole_block).repeat_interleave(block_size, dim=1)
    return Blocks(*(x.reshape(len(x) * runs, -1) for x in (table, positions, hidden, hidden & ~clean)))
