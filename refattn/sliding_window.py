"""Sliding windows: a query sees the last few keys only, so only their blocks are read, and only those are kept.

A decode at position 13 under a window of 5 tokens, `(4, 0)`, in blocks of 4:

    blocks            9           2           4           7
    keys              0  1  2  3  4  5  6  7  8  9 10 11 12 13
    visible           .  .  .  .  .  .  .  .  .  1  1  1  1  1
    trimmed table                             4           7       seq_len 6 instead of 14

What is cut off in front are whole blocks, for queries and keys alike: the distance between a query and a key stays what
it was, and the window and ALiBi know nothing but that distance. So a window is one more trimmed batch (`trim`), and a
layer whose window never looks back at the blocks 9 and 2 need not keep them (`WindowPool`).
"""

from collections.abc import Hashable, Sequence

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from refattn.attention import attend, compute_dtype
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
from refattn.kv_cache import gather
from refattn.masks import alibi, visible_keys
from refattn.metadata import make_batch, update_block_table


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

    With `window_size = (2, 0)`, 3 queries and 6 keys, or with `(1, 1)` and `causal=False`:

        0 1 1 1 0 0        0 0 1 1 1 0
        0 0 1 1 1 0        0 0 0 1 1 1
        0 0 0 1 1 1        0 0 0 0 1 1

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
        batch_invariant: give rows that do not change by a bit with what else is in the batch. Here they never do: the
            sequences are computed one by one.
        return_lse: also return the log-sum-exp.

    Returns:
        The outputs; with `return_lse` also the natural log-sum-exp (float32, sinks included). A padding row and a query
        that sees nothing answer 0 and `-inf` (the sink, if there is one, for a query that sees nothing).

    Raises:
        ValueError: naming the argument that does not fit.

    Source: Beltagy et al. 2020, "Longformer"; Jiang et al. 2023, "Mistral 7B".
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
    trimmed = trim(batch, window_size, block_size=key_cache.shape[1])
    assert trimmed.block_table is not None  # that of the batch has been checked
    compute = compute_dtype(query.dtype)
    out = query.new_zeros(*query.shape[:2], value_cache.shape[-1])
    lse = query.new_full(query.shape[:2], -torch.inf, dtype=compute)

    rows, seq_lens = trimmed.query_rows(), trimmed.seq_lens.tolist()
    for (q0, q1), seq_len, blocks in zip(rows, seq_lens, trimmed.block_table, strict=True):
        visible = visible_keys(q1 - q0, seq_len, causal=causal, window_size=window_size, device=query.device)
        bias = None
        if alibi_slopes is not None:
            bias = alibi(alibi_slopes, q1 - q0, seq_len, dtype=compute, device=query.device)
        out[q0:q1], lse[q0:q1] = attend(
            query[q0:q1],
            gather(key_cache, blocks, seq_len),
            gather(value_cache, blocks, seq_len),
            visible,
            softmax_scale=softmax_scale,
            softcap=softcap,
            bias=bias,
            sinks=sinks,
        )
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
    """
    check_window(window_size)
    block_table = check_block_table(batch, block_size=block_size)
    check_lengths(batch)
    seq_lens, tables = [], []
    for query_len, seq_len, blocks in zip(
        batch.query_lens.tolist(), batch.seq_lens.tolist(), block_table.tolist(), strict=True
    ):
        cut = _first_block(query_len, seq_len, window_size[0], block_size)
        seq_lens.append(seq_len - cut * block_size)
        tables.append(blocks[cut : -(-seq_len // block_size)])
    return make_batch(batch.query_lens.tolist(), seq_lens, tables, device=batch.device)


class WindowPool:
    """The blocks of window layers, in a pool of their own that is smaller, as a block that no query can see comes back.

    A block of the full pool has one of the window pool to go with it while a sequence may look at it. One sequence
    under a window of 4 tokens, in blocks of 2:

        tokens          4        5          7
        full pool       9 2      9 2 4      9 2 4 7
        window pool     0 1      0 1 2      . 1 2 0      block 0 came back and is used again

    A token keeps its row in its block, so its slot in the window pool follows from its slot in the full pool. All is
    decided on the host: a step asks `hold` for each of its sequences, then translates its slots and its batch.

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

    Source: the hybrid caches of vLLM and SGLang.
    """

    def __init__(self, num_blocks: int, num_full_blocks: int, *, window_size: tuple[int, int], block_size: int) -> None:
        check_window(window_size)
        check_sizes(num_blocks=num_blocks, num_full_blocks=num_full_blocks, block_size=block_size)
        self.left, self.block_size = window_size[0], block_size
        self.free = list(range(num_blocks))
        self.window_block = [-1] * num_full_blocks  # of each full block; -1 for none
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
        slots = []
        for slot in slot_mapping.tolist():
            block, row = divmod(slot, self.block_size)
            window_block = self.window_block[block] if slot >= 0 else -1
            slots.append(window_block * self.block_size + row if window_block >= 0 else -1)
        return torch.tensor(slots, dtype=torch.int64, device=slot_mapping.device)

    def translate_batch(self, batch: Batch) -> Batch:
        """Turn the block table of the full pool into that of the window pool: -1 for blocks that have none."""
        block_table = check_block_table(batch, block_size=self.block_size)
        translated = torch.full_like(block_table, -1)
        for i, blocks in enumerate(block_table.tolist()):
            for column, block in enumerate(blocks):
                if 0 <= block < len(self.window_block):
                    translated[i, column] = self.window_block[block]
        return update_block_table(batch, translated)

    def _give_back(self, blocks: set[int]) -> None:
        for block in sorted(blocks):
            self.users[block] -= 1
            if self.users[block] == 0:
                self.free.append(self.window_block[block])
                self.window_block[block] = -1


def _first_block(query_len: int, seq_len: int, left: int, block_size: int) -> int:
    """Give the index of the block with the first key that the first query of a sequence sees."""
    first_query = seq_len - query_len
    return 0 if left < 0 else max(0, first_query - left) // block_size
