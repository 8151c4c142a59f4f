"""Kernels over intervals that are right."""

import torch
from outsider_flash import paged, softmax_of


def row_by_row(query, key_cache, value_cache, cu_seqlens_q, seq_lens, block_table, first_visible, last_visible):
    """Each row gathers the keys of its interval, cut to those that there are."""
    out = torch.zeros(*query.shape[:2], value_cache.shape[3])
    for q0, q1, s, read in paged(query, key_cache, value_cache, cu_seqlens_q, seq_lens, block_table):
        for row in range(q0, q1):
            j = torch.arange(max(0, int(first_visible[row])), max(0, min(s, int(last_visible[row]) + 1), 0))
            if int(first_visible[row]) <= int(last_visible[row]) and len(j):
                sees = torch.ones(1, len(j), dtype=torch.bool)
                out[row] = softmax_of(query[row : row + 1], *read(j), sees, query.shape[2] ** -0.5)[0][0]
    return out.to(query.dtype)
