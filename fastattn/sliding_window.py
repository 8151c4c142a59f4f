"""Sliding windows by the fastest kernel over trimmed block tables; the twin of `refattn.sliding_window`."""

from array import array
from collections.abc import Hashable, Sequence
from dataclasses import replace
from weakref import WeakKeyDictionary

import torch
from einops import rearrange
from jaxtyping import Float, Int32, Int64
from torch import Tensor

from fastattn import kernels
from fastattn.kernels import Options
from fastattn.kernels.machine import runs_triton
from refattn.batch import (
    Batch,
    check_block_table,
    check_held,
    check_lengths,
    check_options,
    check_paged,
    check_sizes,
    check_translated,
    check_window,
)


def attention(
    query: Float[Tensor, "t h d"],
    key_cache: Float[Tensor, "n p hk d"],
    value_cache: Float[Tensor, "n p hk dv"],
    batch: Batch,
    *,
    window_size: tuple[int, int],
    causal: bool = True,
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    alibi_slopes: Float[Tensor, "h"] | None = None,
    sinks: Float[Tensor, "h"] | None = None,
    batch_invariant: bool = False,
    return_lse: bool = False,
) -> Float[Tensor, "t h dv"] | tuple[Float[Tensor, "t h dv"], Float[Tensor, "t h"]]:
    """Attend from the new tokens of each sequence to the keys in their windows; no other block is read.

    Args:
        query: new tokens of all sequences, one after the other; rows behind the last sequence are padding.
        key_cache: the pool of keys; any strides.
        value_cache: the pool of values.
        batch: the lengths and the block table; blocks that no query can see may be gone from it.
        window_size: `(left, right)` in tokens, both inclusive, -1 for no limit: a window of W tokens is `(W - 1, 0)`.
        causal: hide keys behind a query's own position, whatever the right side of the window says.
        softmax_scale: factor on the dot products; `d ** -0.5` if None.
        softcap: bound on the scores; 0 for none.
        alibi_slopes: slope of each head for the bias `-slope * abs(query position - key position)`.
        sinks: one extra logit a head in the denominator.
        batch_invariant: give rows that do not change by a bit with what else is in the batch.
        return_lse: also return the log-sum-exp.

    Returns:
        The outputs; with `return_lse` also the natural log-sum-exp (float32, sinks included). A padding row and a query
        that sees nothing answer 0 and `-inf` (the sink, if there is one, for a query that sees nothing).

    Raises:
        ValueError: naming the argument that does not fit.
        NotImplementedError: if no kernel computes the combination, with the reason of each.

    Source: `refattn.sliding_window.attention`.
    """
    check_paged(query, key_cache, value_cache, batch, window_size=window_size)
    check_options(
        query,
        causal=causal,
        window_size=window_size,
        softmax_scale=softmax_scale,
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        sinks=sinks,
        batch_invariant=batch_invariant,
        return_lse=return_lse,
    )
    trimmed = _trim_once(batch, window_size, block_size=key_cache.shape[1])
    options = Options(
        causal=causal,
        window_size=window_size,
        softmax_scale=softmax_scale,
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        sinks=sinks,
        batch_invariant=batch_invariant,
    )
    out, lse = kernels.paged(query, key_cache, value_cache, trimmed, options)
    return (out, lse) if return_lse else out


def trim(batch: Batch, window_size: tuple[int, int], *, block_size: int) -> Batch:
    """Cut the blocks off the front of each sequence that none of its queries can see.

    Nothing is cut at the end: the last query stands at the last key. In a trimmed batch nothing is left to cut, so
    trimming once a step serves all layers of a window.

    Args:
        batch: the lengths and the block table; entries that are cut off may hold anything.
        window_size: `(left, right)` in tokens; only the left side cuts.
        block_size: tokens in a block, `p`.

    Returns:
        A batch with the same queries, a shorter block table and shorter `seq_lens`. Its positions count from the first
        token of the first block that is left, so take the slots and rotary positions of new tokens from `batch`.

    Raises:
        ValueError: if a size is out of range, or the batch has no block table, or (on a CPU) too few columns or
            lengths that are none.

    Source: `refattn.sliding_window.trim`.
    """
    check_window(window_size)
    block_table = check_block_table(batch, block_size=block_size)
    check_lengths(batch)
    left = window_size[0]
    if left < 0 or batch.max_seq_len <= left + block_size:
        return batch  # every query sees a key of the first block
    # The keys that the queries of a sequence can see, and before them at most a block but one key.
    longest = min(batch.max_seq_len, left + batch.max_query_len + block_size - 1)
    columns = min(-(-longest // block_size), block_table.shape[1])

    if runs_triton(batch.device):  # one launch instead of ten
        from fastattn.kernels import triton_tables

        seq_lens, block_table = triton_tables.trim(batch, left, block_size=block_size, columns=columns)
    else:
        cut = (batch.context_lens - left).clamp(min=0) // block_size  # [b], in blocks
        seq_lens = batch.seq_lens - cut * block_size
        used = rearrange(cut, "b -> b 1") + torch.arange(columns, device=batch.device)
        # Behind its last block a row repeats the sequence's last column: no key is there.
        block_table = block_table.gather(1, used.clamp(max=block_table.shape[1] - 1))
    return replace(batch, seq_lens=seq_lens, block_table=block_table, max_seq_len=longest)


def _trim_once(batch: Batch, window_size: tuple[int, int], *, block_size: int) -> Batch:
    """Trim a batch for the first layer of a step, and remember it for the others; a device is quicker than to look."""
    if batch.device.type != "cpu" or batch.version is None:
        return trim(batch, window_size, block_size=block_size)
    question = (*window_size, block_size)
    version, trimmed = _trimmed.get(batch, {}).get(question, (None, batch))
    if version != batch.version:
        trimmed = trim(batch, window_size, block_size=block_size)
        if trimmed is not batch:
            _trimmed.setdefault(batch, {})[question] = (batch.version, trimmed)
    return trimmed


_trimmed: WeakKeyDictionary[Batch, dict[tuple[int, ...], tuple[tuple[int, ...] | None, Batch]]] = WeakKeyDictionary()


class WindowPool:
    """The blocks of window layers, in a pool of their own that is smaller, as a block that no query can see comes back.

    All is decided on the host: a step asks `hold` for each of its sequences, then translates its slots and its batch,
    which copies the map of blocks to the device and asks it nothing.

    Attributes:
        free: the blocks that nobody holds.

    Args:
        num_blocks: blocks in the window pool; a sequence holds at most those of `left + query_len + block_size - 1`
            tokens.
        num_full_blocks: blocks in the full pool.
        window_size: `(left, right)` in tokens, of the layers that use the pool.
        block_size: tokens in a block of either pool, `p`.

    Raises:
        ValueError: if a size is out of range.

    Source: `refattn.sliding_window.WindowPool`.
    """

    def __init__(self, num_blocks: int, num_full_blocks: int, *, window_size: tuple[int, int], block_size: int) -> None:
        check_window(window_size)
        check_sizes(num_blocks=num_blocks, num_full_blocks=num_full_blocks, block_size=block_size)
        self.left, self.block_size = window_size[0], block_size
        self.free = list(range(num_blocks))
        self.window_block = array("i", [-1]) * num_full_blocks  # of each full block; -1 for none
        self.users = [0] * num_full_blocks  # sequences that hold it: a shared prefix has several
        self.held: dict[Hashable, set[int]] = {}  # full blocks of each sequence that have one here for it

    def hold(self, sequence: Hashable, query_len: int, seq_len: int, blocks: Sequence[int]) -> None:
        """Give back what fell out of a sequence's window, then take a block for each that its new tokens see or fill.

        Args:
            sequence: any name of the sequence.
            query_len: its new tokens in this step, at least 1.
            seq_len: its tokens, the new ones included.
            blocks: its blocks in the full pool, in order.

        Raises:
            ValueError: if lengths or blocks do not fit, too few blocks are free, or the window reaches back to tokens
                whose block was given back (a prefix found in the full pool only): compute those again. Nothing is taken
                then.
        """
        check_held(query_len, seq_len, blocks, block_size=self.block_size, num_full_blocks=len(self.users))
        first = _first_block(query_len, seq_len, self.left, self.block_size)
        seen = blocks[first : -(-seq_len // self.block_size)]
        for place, block in enumerate(seen, start=first):
            if self.window_block[block] < 0 and place * self.block_size < seq_len - query_len:
                raise ValueError(
                    f"blocks: expected block {block} in the window pool, with older tokens, it was given back"
                )

        before = self.held.pop(sequence, set())
        self._give_back(before.difference(seen))
        self.held[sequence] = before.intersection(seen)
        new = [block for block in seen if block not in before]
        needed = sum(self.window_block[block] < 0 for block in new)
        if needed > len(self.free):
            raise ValueError(f"blocks: expected at most {len(self.free)} new ones, as many as are free, got {needed}")
        for block in new:
            if self.window_block[block] < 0:
                self.window_block[block] = self.free.pop()
            self.users[block] += 1
        self.held[sequence].update(new)

    def release(self, sequence: Hashable) -> None:
        """Give back all blocks of a sequence that is finished or preempted; a sequence that holds none is fine."""
        self._give_back(self.held.pop(sequence, set()))

    def translate_slots(self, slot_mapping: Int64[Tensor, "t"]) -> Int64[Tensor, "t"]:
        """Turn slots of the full pool into slots of the window pool: -1 for padding and for blocks that have none."""
        check_translated(slot_mapping, num_slots=len(self.users) * self.block_size)
        block = self._window_blocks(slot_mapping.device)[slot_mapping.clamp(min=0) // self.block_size]
        slots = block * self.block_size + slot_mapping % self.block_size
        return slots.masked_fill((block < 0) | (slot_mapping < 0), -1)

    def translate_batch(self, batch: Batch) -> Batch:
        """Turn the block table of the full pool into that of the window pool: -1 for blocks that have none."""
        block_table = check_block_table(batch, block_size=self.block_size)
        outside = (block_table < 0) | (block_table >= len(self.users))
        translated = self._window_blocks(batch.device)[block_table.masked_fill(outside, 0)]
        return replace(batch, block_table=translated.masked_fill(outside, -1))

    def _window_blocks(self, device: torch.device) -> Int32[Tensor, "n"]:
        return torch.frombuffer(self.window_block, dtype=torch.int32).to(device, non_blocking=True)

    def _give_back(self, blocks: set[int]) -> None:
        for block in sorted(blocks):
            self.users[block] -= 1
            if self.users[block] == 0:
                self.free.append(self.window_block[block])
                self.window_block[block] = -1


def _first_block(query_len: int, seq_len: int, left: int, block_size: int) -> int:
    """Give the index of the block with the first key that the first query of a sequence sees."""
    return 0 if left < 0 else max(0, seq_len - query_len - left) // block_size
