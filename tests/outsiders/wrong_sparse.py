"""Attention to selected keys that is wrong."""

import torch
from outsider_flash import paged, softmax_of


def listed_twice_counts_once(query, key_cache, value_cache, cu_seqlens_q, seq_lens, block_table, positions, sinks=None):
    """The list becomes a mask, in which a position that is listed twice is one key."""
    out = torch.zeros(*query.shape[:2], value_cache.shape[3])
    for q0, q1, s, read in paged(query, key_cache, value_cache, cu_seqlens_q, seq_lens, block_table):
        j = torch.arange(s)
        sees = (positions[q0:q1, :, None] == j).any(1)
        out[q0:q1] = softmax_of(query[q0:q1], *read(j), sees, query.shape[2] ** -0.5, sinks)[0]
    return out.to(query.dtype)


def list_ends_at_the_first_hole(query, key_cache, value_cache, cu_seqlens_q, seq_lens, block_table, positions):
    """The first -1 ends the list, also if positions follow it."""
    out = torch.zeros(*query.shape[:2], value_cache.shape[3])
    for q0, q1, _, read in paged(query, key_cache, value_cache, cu_seqlens_q, seq_lens, block_table):
        for row in range(q0, q1):
            listed = positions[row].tolist()
            listed = listed[: listed.index(-1)] if -1 in listed else listed
            if listed:
                sees = torch.ones(1, len(listed), dtype=torch.bool)
                key, value = read(torch.tensor(listed))
                out[row] = softmax_of(query[row : row + 1], key, value, sees, query.shape[2] ** -0.5)[0][0]
    return out.to(query.dtype)
