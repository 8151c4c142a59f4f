"""Kernels over intervals that are wrong."""

import torch
from outsider_flash import flash, paged, softmax_of


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


def alibi_from_the_last_visible_key(
    query,
    key_cache,
    value_cache,
    cu_seqlens_q,
    seq_lens,
    block_table,
    first_visible,
    last_visible,
    alibi_slopes=None,
    return_lse=False,
):
    """Distances are counted from the last visible key of a query, and not from the query."""
    out, lse = torch.zeros(*query.shape[:2], value_cache.shape[3]), torch.full(query.shape[:2], -torch.inf)
    for q0, q1, s, read in paged(query, key_cache, value_cache, cu_seqlens_q, seq_lens, block_table):
        for row in range(q0, q1):
            first, last = max(0, int(first_visible[row])), min(s - 1, int(last_visible[row]))
            if first <= last:
                one = iter([(0, 1, last - first + 1, lambda j, first=first, read=read: read(first + j))])
                options = dict(alibi_slopes=alibi_slopes, causal=False, return_lse=True)
                part = flash(query[row : row + 1], one, value_size=value_cache.shape[3], **options)
                out[row], lse[row] = part[0][0], part[1][0]
    return (out.to(query.dtype), lse) if return_lse else out.to(query.dtype)
