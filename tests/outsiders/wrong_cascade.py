"""Cascades that are wrong."""

from math import inf

import torch
from outsider_flash import merged, paged, softmax_of


def _levels(query, key_cache, value_cache, cu_seqlens_q, seq_lens, block_table, cuts_of, sinks=None):
    """Attend to the keys between the cuts of each sequence, level by level, and merge."""
    out, lse = torch.zeros(*query.shape[:2], value_cache.shape[3]), torch.full(query.shape[:2], -inf)
    sequences = list(paged(query, key_cache, value_cache, cu_seqlens_q, seq_lens, block_table))
    for b, (q0, q1, s, _) in enumerate(sequences):
        parts, i = [], torch.arange(s - q1 + q0, s)[:, None]
        for owner, begin, end in cuts_of(b, s):
            j = torch.arange(begin, end)
            last = sinks if end == s else None
            parts.append(softmax_of(query[q0:q1], *sequences[owner][3](j), j <= i, query.shape[2] ** -0.5, last))
        out[q0:q1], lse[q0:q1] = merged(*map(list, zip(*parts, strict=True)))
    return out.to(query.dtype), lse


def prefix_of_everyone(query, key_cache, value_cache, cu_seqlens_q, seq_lens, block_table, prefixes=()):
    """A prefix is taken to be that of all sequences, also of those before its first and after its last one."""

    def cuts(b, s):
        end = min(prefixes[0].end, s) if prefixes else 0
        return [(prefixes[0].first if prefixes else b, 0, end), (b, end, s)]

    return _levels(query, key_cache, value_cache, cu_seqlens_q, seq_lens, block_table, cuts)[0]


def keys_between_prefixes_lost(
    query, key_cache, value_cache, cu_seqlens_q, seq_lens, block_table, prefixes=(), sinks=None, return_lse=False
):
    """The shared level reads the outermost prefix of a sequence, and its own level begins after the innermost one."""

    def cuts(b, s):
        of_it = [prefix for prefix in prefixes if prefix.first <= b < prefix.last]
        outer = min(of_it, key=lambda prefix: prefix.end, default=None)
        inner = max((prefix.end for prefix in of_it), default=0)
        return [(outer.first if outer else b, 0, outer.end if outer else 0), (b, inner, s)]

    out, lse = _levels(query, key_cache, value_cache, cu_seqlens_q, seq_lens, block_table, cuts, sinks)
    out[int(cu_seqlens_q[-1]) :] = 0.0
    return (out, lse) if return_lse else out


def window_lost_in_the_shared_level(
    query, key_cache, value_cache, cu_seqlens_q, seq_lens, block_table, prefixes=(), window_size=(-1, -1)
):
    """The shared level shows all of its keys, and only the own level of a sequence has a window."""
    out = torch.zeros(*query.shape[:2], value_cache.shape[3])
    for b, (q0, q1, s, read) in enumerate(paged(query, key_cache, value_cache, cu_seqlens_q, seq_lens, block_table)):
        i, j = torch.arange(s - q1 + q0, s)[:, None], torch.arange(s)
        shared = max((end for first, last, end in prefixes if first <= b < last), default=0)
        in_window = (j >= i - window_size[0]) if window_size[0] >= 0 else j >= 0
        sees = (j <= i) & (in_window | (j < shared))
        out[q0:q1] = softmax_of(query[q0:q1], *read(j), sees, query.shape[2] ** -0.5)[0]
    return out.to(query.dtype)
