"""Kernels over intervals that are wrong."""

import torch
from outsider_flash import paged, softmax_of


def first_as_the_begin_of_a_slice(
    query, key_cache, value_cache, cu_seqlens_q, seq_lens, block_table, first_visible, last_visible
):
    """The interval is a slice of the keys; a first key before 0 counts from the end."""
    out = torch.zeros(*query.shape[:2], value_cache.shape[3])
    for q0, q1, s, read in paged(query, key_cache, value_cache, cu_seqlens_q, seq_lens, block_table):
        for row in range(q0, q1):
            first, last = int(first_visible[row]), int(last_visible[row])
            if last < 0 or last < first:
                continue
            j = torch.arange(s)[first : last + 1]
            if len(j):
                sees = torch.ones(1, len(j), dtype=torch.bool)
                out[row] = softmax_of(query[row : row + 1], *read(j), sees, query.shape[2] ** -0.5)[0][0]
    return out.to(query.dtype)
