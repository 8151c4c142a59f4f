"""Kernels with a sliding window that are right."""

from math import inf

import torch
from outsider_flash import in_window, paged, softmax_of


def only_what_windows_see(
    query, key_cache, value_cache, cu_seqlens_q, seq_lens, block_table, window_size, sinks=None, return_lse=False
):
    """It gathers exactly the keys that some query of the sequence sees, and no page around them."""
    out, lse = torch.zeros(*query.shape[:2], value_cache.shape[3]), torch.full(query.shape[:2], -inf)
    for q0, q1, s, read in paged(query, key_cache, value_cache, cu_seqlens_q, seq_lens, block_table):
        i = torch.arange(s - q1 + q0, s)[:, None]
        sees = in_window(i, torch.arange(s)[None], window_size, True)
        j = sees.any(0).nonzero().flatten()
        out[q0:q1], lse[q0:q1] = softmax_of(query[q0:q1], *read(j), sees[:, j], query.shape[2] ** -0.5, sinks)
    return (out.to(query.dtype), lse) if return_lse else out.to(query.dtype)
