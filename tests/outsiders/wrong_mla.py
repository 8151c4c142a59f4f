"""Latent attention that is wrong."""

import torch
from outsider_flash import flash, paged


def query_padded_to_the_row(query, cache, cu_seqlens_q, seq_lens, block_table, latent_rank, softmax_scale):
    """The query is padded with zeros to the row of the cache, which may hold NaN after the key."""
    padded = torch.nn.functional.pad(query, (0, cache.shape[2] - query.shape[2]))
    pages = paged(query, cache[:, :, None], cache[:, :, None, :latent_rank], cu_seqlens_q, seq_lens, block_table)
    return flash(padded, pages, value_size=latent_rank, softmax_scale=softmax_scale)
