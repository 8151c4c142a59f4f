"""Kernels over intervals that are right."""

import torch
from outsider_flash import paged, softmax_of


def row_by_row(query, key_cache, value_cache, cu_seqlens_q, seq_lens, block_table, first_visible, last_visible):
    """Each row gathers the keys of its interval, cut to those that there are."""
    out = torch.zeros(*query.shape[:2], value_cache.shape[3])
    for q0, q1, s, read in paged(query, key_cache, value_cache, cu_seqlens_q, seq_lens, block_table):
        for row in range(q0, q1):
            first, last = max(0, int(first_visible[row])), min(s - 1, int(last_visible[row]))
            j = torch.arange(first, max(first, last + 1))
            if len(j):
                sees = torch.ones(1, len(j), dtype=torch.bool)
                out[row] = softmax_of(query[row : row + 1], *read(j), sees, query.shape[2] ** -0.5)[0][0]
    return out.to(query.dtype)
