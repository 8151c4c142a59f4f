"""Local attention by the fastest kernel over virtual batches made on the device; the twin of `refattn.local`."""

import torch
from einops import rearrange
from jaxtyping import Float, Int32
from torch import Tensor

from fastattn import kernels
from fastattn.kernels import Options
from fastattn.kernels.machine import runs_triton
from refattn.batch import Batch, check_block_table, check_chunk, check_lengths, check_options, check_paged


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

    Args:
        query: new tokens of all sequences, one after the other; rows behind the last sequence are padding.
        key_cache: the pool of keys; any strides.
        value_cache: the pool of values.
        batch: the lengths and the block table; blocks that no query can see may be gone from it.
        chunk_size: tokens in a chunk, a multiple of the block size; the first chunk begins at position 0.
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

    Source: `refattn.local.attention`.
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
    options = Options(
        softmax_scale=softmax_scale,
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        sinks=sinks,
        batch_invariant=batch_invariant,
    )
    out, lse = kernels.paged(query, key_cache, value_cache, virtual, options)
    return (out, lse) if return_lse else out


def make_virtual_batches(batch: Batch, chunk_size: int, *, block_size: int) -> Batch:
    """Cut each sequence at the ends of its chunks, into virtual sequences that follow one another.

    Every sequence gets as many of them as `max_query_len` queries can touch, so that all sizes follow from Python ints;
    those left over have no queries. A batch of decodes has one a sequence; one of a few long prefills and many decodes
    is best parted first (`metadata.split`).

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

    Source: `refattn.local.make_virtual_batches`.
    """
    check_chunk(chunk_size, block_size)
    block_table = check_block_table(batch, block_size=block_size)
    check_lengths(batch)
    if batch.max_seq_len <= chunk_size:
        return batch  # one chunk holds every sequence
    # The most that `max_query_len` neighbours can touch is when the first of them ends a chunk.
    num_chunks = (max(batch.max_query_len, 1) + chunk_size - 2) // chunk_size + 1
    columns = min(chunk_size // block_size, block_table.shape[1])
    if runs_triton(batch.device):  # one launch instead of twenty
        from fastattn.kernels.triton_tables import cut_chunks
    else:
        cut_chunks = _cut_chunks
    cu_seqlens_q, seq_lens, virtual_table = cut_chunks(
        batch, chunk_size, block_size=block_size, num_chunks=num_chunks, columns=columns
    )
    return Batch(cu_seqlens_q, seq_lens, virtual_table, min(batch.max_query_len, chunk_size), chunk_size)


def _cut_chunks(
    batch: Batch, chunk_size: int, *, block_size: int, num_chunks: int, columns: int
) -> tuple[Int32[Tensor, "_"], Int32[Tensor, "v"], Int32[Tensor, "v columns"]]:
    """Give `cu_seqlens_q`, `seq_lens` and the block table of `num_chunks` virtual sequences for each sequence."""
    assert batch.block_table is not None
    # In 64 bits, as a chunk may end past the largest int32.
    seq_lens, context_lens = (rearrange(x.long(), "b -> b 1") for x in (batch.seq_lens, batch.context_lens))
    number = context_lens // chunk_size + torch.arange(num_chunks, device=batch.device)
    begin = number * chunk_size  # [b, chunks], of each chunk; below 0 where there are more queries than keys
    end = torch.minimum(begin + chunk_size, seq_lens)
    first_key = begin.clamp(min=0)
    rows_end = end + rearrange(batch.cu_seqlens_q[1:] - batch.seq_lens, "b -> b 1")  # query rows, left-over chunks too
    # Behind its last block a row repeats the sequence's last column: no key is there.
    used = rearrange(first_key // block_size, "b chunks -> b chunks 1") + torch.arange(columns, device=batch.device)
    used = rearrange(used.clamp(max=batch.block_table.shape[1] - 1), "b chunks columns -> b (chunks columns)")
    return (
        torch.cat([batch.cu_seqlens_q[:1], rearrange(rows_end.int(), "b chunks -> (b chunks)")]),
        rearrange((end - first_key).clamp(min=0).int(), "b chunks -> (b chunks)"),
        rearrange(batch.block_table.gather(1, used), "b (chunks columns) -> (b chunks) columns", chunks=num_chunks),
    )
