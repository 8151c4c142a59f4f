"""Kernels over rows that are wrong."""

from math import inf, log

import torch
from outsider_flash import flash, in_rows, rows


def top_left_if_more_queries(query, key, value, cu_seqlens_q, seq_lens, window_size=(-1, -1), causal=True):
    """Positions are clamped at 0: with more queries than keys, all that come before the first key see it."""

    def sees(i, j, s):
        mask = torch.ones(i.shape[0], j.shape[1], dtype=torch.bool)
        mask = mask & (j >= i - window_size[0]) if window_size[0] >= 0 else mask
        right = 0 if causal else window_size[1]
        return mask & (j <= i.clamp(min=0) + right) if right >= 0 else mask

    sequences = in_rows(query, key, value, cu_seqlens_q, seq_lens)
    return flash(query, sequences, value_size=value.shape[2], sees=sees)


def zero_scale_is_default(query, key, value, cu_seqlens_q, seq_lens, softmax_scale=None):
    """A scale of 0 is taken for none given, as `or` does."""
    scale = softmax_scale or query.shape[2] ** -0.5
    return flash(
        query, in_rows(query, key, value, cu_seqlens_q, seq_lens), value_size=value.shape[2], softmax_scale=scale
    )


def largest_before_the_scale(query, key, value, cu_seqlens_q, seq_lens, softmax_scale=None):
    """The largest product is found before the scale: under a negative one exp overflows."""
    scale = query.shape[2] ** -0.5 if softmax_scale is None else softmax_scale
    out = torch.zeros(*query.shape[:2], value.shape[2])
    for q0, q1, s, read in in_rows(query, key, value, cu_seqlens_q, seq_lens):
        k, v = (x.float().repeat_interleave(query.shape[1] // key.shape[1], 1) for x in read(torch.arange(s)))
        mask = torch.arange(s) <= torch.arange(s - q1 + q0, s)[:, None]
        if not mask.any():
            continue
        x = torch.einsum("thd,shd->hts", query[q0:q1].float(), k).masked_fill(~mask, -inf)
        top = x.amax(-1, keepdim=True)
        weights = torch.exp(scale * (x - top.masked_fill(top == -inf, 0.0)).masked_fill(~mask, 0.0)) * mask
        total = weights.sum(-1, keepdim=True)
        out[q0:q1] = torch.einsum("hts,shd->thd", weights / total.masked_fill(total == 0, 1.0), v)
    return out.to(query.dtype)


def lse_in_base_two(query, key, value, cu_seqlens_q, seq_lens, return_lse=False):
    """The log-sum-exp is a logarithm of base 2."""
    sequences = in_rows(query, key, value, cu_seqlens_q, seq_lens)
    out, lse = flash(query, sequences, value_size=value.shape[2], return_lse=True)
    return (out, lse / log(2)) if return_lse else out


def last_key_of_a_row_of_128_lost(query, key, value, cu_seqlens_q, seq_lens):
    """A sequence of exactly a multiple of 128 keys loses the last of them, by an index that is compared with <."""
    out = flash(
        query,
        in_rows(query, key, value, cu_seqlens_q, seq_lens),
        value_size=value.shape[2],
        span=lambda i, s: (0, s - 1 if s and s % 128 == 0 else s),
    )
    for q0, q1, s in rows(query, cu_seqlens_q, seq_lens):
        if not s:
            out[q0:q1] = 0.0
    return out


def left_side_on_both_sides(query, key, value, cu_seqlens_q, seq_lens, causal=True, window_size=(-1, -1)):
    """Without a causal mask, a window reaches as far to the right as to the left."""
    sequences = in_rows(query, key, value, cu_seqlens_q, seq_lens)
    window = (window_size[0], window_size[0])
    return flash(query, sequences, value_size=value.shape[2], causal=causal, window_size=window)
