"""Local attention: a sequence is cut into chunks, and a token sees its own chunk up to itself, nothing before it.

Chunks of 4, a sequence of 6 tokens of which the last 4 are new:

    keys          0 1 2 3 | 4 5
    query 2       1 1 1 . | . .      chunk 0 is a sequence of 4 tokens, the last 2 of them new
    query 3       1 1 1 1 | . .
                  --------+----
    query 4       . . . . | 1 .      chunk 1 is a sequence of 2 tokens, both of them new
    query 5       . . . . | 1 1

Chunks know nothing of each other, so each is a sequence of its own, and there is nothing more to local attention than
causal attention over these virtual sequences. The cost of a token is that of its chunk, however long the sequence is.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from refattn.attention import attend, compute_dtype
from refattn.batch import Batch, check_block_table, check_chunk, check_lengths, check_options, check_paged
from refattn.kv_cache import gather
from refattn.masks import alibi, causal
from refattn.metadata import make_batch


def attention(
    query: Float[Tensor, "t h d"],
    key_cache: Float[Tensor, "n p hk d"],
    value_cache: Float[Tensor, "n p hk dv"],
    batch: Batch,
    *,
    chunk_size: int,
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    alibi_slopes: Float[Tensor, "h"] | None = None,
    sinks: Float[Tensor, "h"] | None = None,
    batch_invariant: bool = False,
    return_lse: bool = False,
) -> Float[Tensor, "t h dv"] | tuple[Float[Tensor, "t h dv"], Float[Tensor, "t h"]]:
    """Attend from the new tokens of each sequence to the keys of their own chunks, up to their own positions.

    Query `i` sees key `j` when `j <= i` and `i // chunk_size == j // chunk_size`; `refattn.masks.chunk` draws that.

    Args:
        query: new tokens of all sequences, one after the other; rows behind the last sequence are padding.
        key_cache: the pool of keys; any strides.
        value_cache: the pool of values.
        batch: the lengths and the block table; blocks that no query can see may be gone from it.
        chunk_size: tokens in a chunk, a multiple of the block size; the first chunk begins at position 0.
        softmax_scale: factor on the dot products; `d ** -0.5` if None.
        softcap: bound on the scores; 0 for none.
        alibi_slopes: slope of each head for the bias `-slope * abs(query position - key position)`; as both are in one
            chunk, it does not matter where positions count from.
        sinks: one extra logit a head in the denominator.
        batch_invariant: give rows that do not change by a bit with what else is in the batch. Here they never do: the
            sequences are computed one by one.
        return_lse: also return the log-sum-exp.

    Returns:
        The outputs; with `return_lse` also the natural log-sum-exp (float32, sinks included). A padding row and a query
        that sees nothing answer 0 and `-inf` (the sink, if there is one, for a query that sees nothing).

    Raises:
        ValueError: naming the argument that does not fit.

    Source: Meta 2025, Llama 4 (its layers with rotary positions); the virtual batches are vLLM's.
    """
    check_paged(query, key_cache, value_cache, batch, chunk_size=chunk_size)
    check_options(
        query,
        softmax_scale=softmax_scale,
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        sinks=sinks,
        batch_invariant=batch_invariant,
        return_lse=return_lse,
    )
    virtual = make_virtual_batches(batch, chunk_size, block_size=key_cache.shape[1])
    assert virtual.block_table is not None  # that of the batch has been checked
    compute = compute_dtype(query.dtype)
    out = query.new_zeros(*query.shape[:2], value_cache.shape[-1])
    lse = query.new_full(query.shape[:2], -torch.inf, dtype=compute)

    rows, seq_lens = virtual.query_rows(), virtual.seq_lens.tolist()
    for (q0, q1), seq_len, blocks in zip(rows, seq_lens, virtual.block_table, strict=True):
        bias = None
        if alibi_slopes is not None:
            bias = alibi(alibi_slopes, q1 - q0, seq_len, dtype=compute, device=query.device)
        out[q0:q1], lse[q0:q1] = attend(
            query[q0:q1],
            gather(key_cache, blocks, seq_len),
            gather(value_cache, blocks, seq_len),
            causal(q1 - q0, seq_len, device=query.device),
            softmax_scale=softmax_scale,
            softcap=softcap,
            bias=bias,
            sinks=sinks,
        )
    return (out, lse) if return_lse else out


def make_virtual_batches(batch: Batch, chunk_size: int, *, block_size: int) -> Batch:
    """Cut each sequence at the ends of its chunks, into virtual sequences that follow one another.

    Query lengths 4, 10, 5 and sequence lengths 6, 17, 9 in chunks of 4, where `|` ends a chunk and the new tokens are
    named by their virtual sequence:

        . . 0 0 | 1 1                                     0 1      queries 2 2          keys 4 2
        . . . . | . . . 2 | 3 3 3 3 | 4 4 4 4 | 5         2..5     queries 1 4 4 1      keys 4 4 4 1
        . . . . | 6 6 6 6 | 7                             6 7      queries 4 1          keys 4 1

    Args:
        batch: the lengths and the block table; entries of chunks that have no new tokens may hold anything.
        chunk_size: tokens in a chunk, a multiple of the block size.
        block_size: tokens in a block, `p`.

    Returns:
        A batch with the same query rows and a sequence for each chunk that has some of them. It may have more sequences
        than that, without queries. Its positions count from the beginning of a chunk, so take the rotary positions of
        new tokens from `batch`; slots are the same.

    Raises:
        ValueError: if the block size does not divide the chunk, or the batch has no block table, or (on a CPU) too few
            columns or lengths that are none.
    """
    check_chunk(chunk_size, block_size)
    block_table = check_block_table(batch, block_size=block_size)
    check_lengths(batch)
    query_lens, seq_lens, tables = [], [], []
    for query_len, seq_len, blocks in zip(
        batch.query_lens.tolist(), batch.seq_lens.tolist(), block_table.tolist(), strict=True
    ):
        position = seq_len - query_len  # of the next query; below 0 where there are more queries than keys
        while position < seq_len:
            begin = position // chunk_size * chunk_size
            end = min(begin + chunk_size, seq_len)
            keys = range(max(begin, 0), max(end, 0))
            query_lens.append(end - position)
            seq_lens.append(len(keys))
            tables.append(blocks[keys.start // block_size : -(-keys.stop // block_size)])
            position = end
    return make_batch(query_lens, seq_lens, tables, device=batch.device)
