"""Gather the blocks of several sequences side by side, and clear what no query may see.

Sequences of 6 and 3 keys in blocks of 2, gathered as one rectangle; `x` is hidden, `0` is hidden and written over:

    keys of a    0 1 | 2 3 | 4 5         columns 0, 1, 2 of its block table
    keys of b    0 1 | 2 0 | x x         columns 0, 1, and 0 again: a block that b sees whole fills up the row

The unused slots of a partly filled block may hold anything, also NaN, which neither a bias of `-inf` nor a weight of 0
removes; so they are overwritten. A block that the sequence sees whole holds only its own keys, which a bias can hide.
"""

from dataclasses import dataclass, field

import torch
from jaxtyping import Bool, Float, Int32, Int64
from torch import Tensor


@dataclass(frozen=True)
class Blocks:
    """Blocks of some sequences side by side.

    Attributes:
        table: blocks of the pool, as many for each sequence as the longest one reads.
        positions: position of each key of the blocks in its sequence.
        hidden: the keys that no query of their sequence sees.
        stale: those of them that may hold anything.
    """

    table: Int32[Tensor, "b m"]
    positions: Int32[Tensor, "b s"]
    hidden: Bool[Tensor, "b s"]
    stale: Bool[Tensor, "b s"]
    _rows: dict[int, list[Int64[Tensor, "_"]]] = field(default_factory=dict, init=False)  # by columns at a time

    def clear_stale(self, rows: Float[Tensor, "rows ..."], column: int, step: int) -> None:
        """Write 0 to the stale keys, in place.

        Args:
            rows: the keys or values of `step` columns (fewer at the end), gathered, one row for each key.
            column: the first of the columns, a multiple of `step`.
            step: columns that are gathered at a time.
        """
        if step not in self._rows:
            width = step * (self.stale.shape[1] // self.table.shape[1])
            self._rows[step] = [part.flatten().nonzero()[:, 0] for part in self.stale.split(width, dim=1)]
        stale = self._rows[step][column // step]
        if len(stale):
            rows.index_fill_(0, stale, 0.0)


def side_by_side(
    block_table: Int32[Tensor, "b columns"],
    first_keys: Int32[Tensor, "b"],
    seq_lens: Int32[Tensor, "b"],
    block_size: int,
) -> Blocks:
    """Lay out the blocks of some sequences side by side.

    Args:
        block_table: the block table of the sequences.
        first_keys: position of the first key that a query of each sequence sees.
        seq_lens: keys of each sequence, at least one more than `first_keys`.
        block_size: tokens in a block, `p`.

    Returns:
        The blocks from the one with the first key to the one with the last.
    """
    first_keys, seq_lens = first_keys[:, None], seq_lens[:, None]
    first_block, last_block = first_keys // block_size, (seq_lens - 1) // block_size
    columns = first_block + torch.arange(int((last_block - first_block).max()) + 1, dtype=torch.int32)
    past_the_end = columns > last_block
    whole_block = (first_keys + block_size - 1) // block_size  # the first that is seen whole, if there is one
    has_whole_block = (whole_block + 1) * block_size <= seq_lens
    filler = torch.where(has_whole_block, whole_block, last_block)
    table = block_table.gather(1, torch.where(past_the_end, filler, columns).long())
    positions = (columns[..., None] * block_size + torch.arange(block_size, dtype=torch.int32)).flatten(1)
    hidden = (positions >= seq_lens) | (positions < first_keys)
    clean = (past_the_end & has_whole_block).repeat_interleave(block_size, dim=1)
    return Blocks(table, positions, hidden, hidden & ~clean)
