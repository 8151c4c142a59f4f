"""Local attention: a sequence is divided into chunks, and a token sees only its own chunk, up to itself.

Chunks of 4, and a sequence of 6 tokens, the last 4 of them new:

    keys          0 1 2 3 | 4 5
    query 2       1 1 1 . | . .      chunk 0 is a sequence of 4 tokens, the last 2 of them new
    query 3       1 1 1 1 | . .
                  --------+----
    query 4       . . . . | 1 .      chunk 1 is a sequence of 2 tokens, both of them new
    query 5       . . . . | 1 1

Chunks are independent, so each can be treated as a sequence of its own: local attention is causal attention over these
virtual sequences ("virtual batches" in vLLM and SGLang). The cost per token is bounded by the chunk size, not by the
length of the sequence.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from refattn import chunked_prefill
from refattn.batch import Batch, check_block_table, check_lengths
from refattn.checks import check_chunk
from refattn.metadata import make_batch
from refattn.options import AttentionOptions
from refattn.plan import Plan


def plan(batch: Batch, *, chunk_size: int, block_size: int, window_size: tuple[int, int] = (-1, -1)) -> Plan:
    """Split each sequence at the ends of its chunks into consecutive virtual sequences.

    Query lengths 4, 10, 5 and sequence lengths 6, 17, 9 in chunks of 4; `|` ends a chunk, and each new token shows the
    number of its virtual sequence:

        . . 0 0 | 1 1                                     0 1      queries 2 2          keys 4 2
        . . . . | . . . 2 | 3 3 3 3 | 4 4 4 4 | 5         2..5     queries 1 4 4 1      keys 4 4 4 1
        . . . . | 6 6 6 6 | 7                             6 7      queries 4 1          keys 4 1

    Args:
        batch: the lengths and the block table; entries of chunks without new tokens may hold anything.
        chunk_size: tokens in a chunk, a multiple of the block size; the first chunk begins at position 0.
        block_size: tokens in a block, `p`.
        window_size: `(left, right)` in tokens, both inclusive, -1 for no limit: a token sees the keys that are both in
            its window and in its chunk.

    Returns:
        A plan with the same query rows and a sequence for each chunk that has any; `first_keys` has the position where
        each chunk begins, and `sequences` the sequence that it belongs to. There may be more sequences, without
        queries. Take the slots and rotary positions of new tokens from `batch`.

    Raises:
        ValueError: if the block size does not divide the chunk, or the batch has no block table or (on a CPU) too few
            columns.
    """
    check_chunk(chunk_size, block_size)
    block_table = check_block_table(batch, block_size=block_size)
    check_lengths(batch)
    query_lens, seq_lens, tables, first_keys, sequences = [], [], [], [], []
    for sequence, (query_len, seq_len, blocks) in enumerate(
        zip(batch.query_lens.tolist(), batch.seq_lens.tolist(), block_table.tolist(), strict=True)
    ):
        position = seq_len - query_len  # the next query's position; negative if there are more queries than keys
        while position < seq_len:
            begin = position // chunk_size * chunk_size
            end = min(begin + chunk_size, seq_len)
            keys = range(max(begin, 0), max(end, 0))
            query_lens.append(end - position)
            seq_lens.append(len(keys))
            first_keys.append(keys.start)
            sequences.append(sequence)
            tables.append(blocks[keys.start // block_size : -(-keys.stop // block_size)])
            position = end
    chunks = make_batch(query_lens, seq_lens, tables, device=batch.device)
    starts, members = (torch.tensor(x, dtype=torch.int32, device=batch.device) for x in (first_keys, sequences))
    return Plan(chunks, block_size, causal=True, window_size=window_size, first_keys=starts, sequences=members)


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
    """Attend from the new tokens of each sequence to the keys of their own chunks, up to their own positions.

    Query `i` sees key `j` when `j <= i` and `i // chunk_size == j // chunk_size`; `refattn.masks.chunk` draws that.

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

    Source: Meta 2025, Llama 4 (its layers with rotary positions); the virtual batches are vLLM's.
    """
    return chunked_prefill.attention(query, key_cache, value_cache, plan, options, return_lse=return_lse, out=out)
