"""Cascades that are right."""

from math import inf

import torch
from outsider_flash import merged, paged, softmax_of


def sorted_cuts_of_every_sequence(
    query, key_cache, value_cache, cu_seqlens_q, seq_lens, block_table, prefixes, sinks=None, return_lse=False
):
    """Each sequence is cut where any prefix that it has ends, and the parts merge from the last to the first."""
    out, lse = torch.zeros(*query.shape[:2], value_cache.shape[3]), torch.full(query.shape[:2], -inf)
    for b, (q0, q1, s, read) in enumerate(paged(query, key_cache, value_cache, cu_seqlens_q, seq_lens, block_table)):
        cuts = sorted({0, s, *(end for first, last, end in prefixes if first <= b < last)}, reverse=True)
        i, parts = torch.arange(s - q1 + q0, s)[:, None], []
        for end, begin in zip(cuts[:-1], cuts[1:], strict=True):
            j = torch.arange(begin, end)
            parts.append(softmax_of(query[q0:q1], *read(j), j <= i, query.shape[2] ** -0.5))
        if sinks is not None:
            lse_of_sinks = sinks.float().expand(q1 - q0, -1)
            parts.append((torch.zeros_like(out[q0:q1]), lse_of_sinks))
        if parts:
            out[q0:q1], lse[q0:q1] = merged(*map(list, zip(*parts, strict=True)))
    return (out.to(query.dtype), lse) if return_lse else out.to(query.dtype)
