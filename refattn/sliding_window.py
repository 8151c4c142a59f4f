"""Sliding windows: a query sees only the last few keys, so only their blocks are read.

A decode at position 13 under a window of 5 tokens, `(4, 0)`, in blocks of 4:

    blocks            9           2           4           7
    keys              0  1  2  3  4  5  6  7  8  9 10 11 12 13
    visible           .  .  .  .  .  .  .  .  .  1  1  1  1  1
    trimmed table                             4           7       seq_len 6 instead of 14, the first key at position 8

Whole blocks are removed from the front, which shifts queries and keys by the same amount: their distance does not
change, and the window and ALiBi depend only on that distance. So a window is chunked prefill over a trimmed batch. No
later query sees blocks 9 and 2, so a server may free them (`twinattn.engine.WindowPool`).
"""

import torch
from jaxtyping import Float
from torch import Tensor

from refattn import chunked_prefill
from refattn.batch import Batch, check_block_table, check_lengths
from refattn.checks import check_window
from refattn.metadata import make_batch
from refattn.options import AttentionOptions
from refattn.plan import Plan


def plan(batch: Batch, *, window_size: tuple[int, int], block_size: int, causal: bool = True) -> Plan:
    """Remove the leading blocks of each sequence that none of its queries can see.

    No block is removed at the end, because the last query is at the last key.

    Args:
        batch: the lengths and the block table; removed entries may hold anything.
        window_size: `(left, right)` in tokens, both inclusive, -1 for no limit: a window of W tokens is `(W - 1, 0)`.
            Only the left side removes blocks.
        block_size: tokens in a block, `p`.
        causal: hide the keys after a query's own position, whatever the right side of the window is.

    Returns:
        A plan with the same queries, a shorter block table and shorter `seq_lens`; `first_keys` has the position of
        each sequence's first remaining key. Take the slots and rotary positions of new tokens from `batch`.

    Raises:
        ValueError: if a size is out of range, or the batch has no block table or (on a CPU) too few columns.
    """
    left, _ = check_window(window_size)
    block_table = check_block_table(batch, block_size=block_size)
    check_lengths(batch)
    first_keys, seq_lens, tables = [], [], []
    for query_len, seq_len, blocks in zip(
        batch.query_lens.tolist(), batch.seq_lens.tolist(), block_table.tolist(), strict=True
    ):
        first_visible = 0 if left < 0 else max(0, seq_len - query_len - left)
        cut = first_visible // block_size  # in blocks
        first_keys.append(cut * block_size)
        seq_lens.append(seq_len - cut * block_size)
        tables.append(blocks[cut : -(-seq_len // block_size)])
    trimmed = make_batch(batch.query_lens.tolist(), seq_lens, tables, device=batch.device)
    starts = torch.tensor(first_keys, dtype=torch.int32, device=batch.device)
    return Plan(trimmed, block_size, causal, window_size, first_keys=starts)


def attention(
    query: Float[Tensor, "t h d"],
    key_cache: Float[Tensor, "n p hk d"],
    value_cache: Float[Tensor, "n p hk dv"],
    plan: Plan,
    options: AttentionOptions = AttentionOptions(),
    *,
    return_lse: bool = False,
    out: Float[Tensor, "t h dv"] | None = None,
) -> Float[Tensor, "t h dv"] | tuple[Float[Tensor, "t h dv"], Float[Tensor, "t h"]]:
    """Attend from the new tokens of each sequence to the keys in their windows; removed blocks are not read.

    With `window_size = (2, 0)`, 3 queries and 6 keys, or with `(1, 1)` and `causal=False`:

        0 1 1 1 0 0        0 0 1 1 1 0
        0 0 1 1 1 0        0 0 0 1 1 1
        0 0 0 1 1 1        0 0 0 0 1 1

    Args:
        query: new tokens of all sequences, one after the other; rows after the last sequence are padding.
        key_cache: the pool of keys; any strides.
        value_cache: the pool of values.
        plan: from `plan`, once per step.
        options: the layer's options.
        return_lse: also return the log-sum-exp.
        out: where to write the outputs; a new tensor if None.

    Returns:
        As `chunked_prefill.attention`.

    Raises:
        ValueError: naming the argument that does not fit. Nothing is written then.

    Source: Beltagy et al. 2020, "Longformer"; Jiang et al. 2023, "Mistral 7B".
    """
    return chunked_prefill.attention(query, key_cache, value_cache, plan, options, return_lse=return_lse, out=out)
