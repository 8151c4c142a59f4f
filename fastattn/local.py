"""Local attention by the fastest kernel over virtual sequences made on the device; the twin of `refattn.local`."""

from dataclasses import replace

import torch
from jaxtyping import Float
from torch import Tensor

from fastattn import chunked_prefill, dispatch
from refattn.batch import Batch, check_block_table, check_lengths
from refattn.checks import check_chunk
from refattn.options import AttentionOptions
from refattn.plan import Plan


def plan(batch: Batch, *, chunk_size: int, block_size: int, window_size: tuple[int, int] = (-1, -1)) -> Plan:
    """Split each sequence at the ends of its chunks into virtual sequences; the twin of `refattn.local.plan`.

    Every sequence gets a virtual sequence for each chunk that the longest query can touch; unused ones have no queries.
    On a device the longest query is taken as `max_query_len`, or `num_tokens` if less, so that all sizes follow from
    Python ints. A batch of decodes has one virtual sequence per sequence; split a batch of a few long prefills and many
    decodes first (`metadata.split_decodes_and_prefills`).
    """
    check_chunk(chunk_size, block_size)
    block_table = check_block_table(batch, block_size=block_size)
    check_lengths(batch)
    longest_query = batch.max_query_len if batch.num_tokens is None else min(batch.max_query_len, batch.num_tokens)
    if batch.device.type == "cpu":
        longest_query = max(batch.query_lens.tolist(), default=0)
        has_query = batch.query_lens > 0
        if not has_query.all():  # a sequence without queries reads no keys
            batch = replace(batch, seq_lens=batch.seq_lens * has_query, num_keys=None)
    if batch.max_seq_len <= chunk_size:  # one chunk holds every sequence
        return Plan(batch, block_size, window_size=window_size)
    # The most chunks are touched if the first query is the last of its chunk.
    num_chunks = (max(longest_query, 1) + chunk_size - 2) // chunk_size + 1
    columns = min(chunk_size // block_size, block_table.shape[1])
    cu_seqlens_q, first_keys, seq_lens, virtual_table = dispatch.run(
        "cut_chunks",
        batch=batch,
        chunk_size=chunk_size,
        block_size=block_size,
        num_chunks=num_chunks,
        columns=columns,
    )
    longest_query = min(longest_query, chunk_size)
    chunks = Batch(cu_seqlens_q, seq_lens, virtual_table, longest_query, chunk_size, num_tokens=batch.num_tokens)
    members = torch.arange(batch.num_seqs, dtype=torch.int32, device=batch.device).repeat_interleave(num_chunks)
    return Plan(chunks, block_size, window_size=window_size, first_keys=first_keys, sequences=members)


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

    Arguments, results and errors are those of `refattn.local.attention`.

    Raises:
        NotImplementedError: if no kernel computes the combination, with the reason of each.
    """
    return chunked_prefill.attention(query, key_cache, value_cache, plan, options, return_lse=return_lse, out=out)
