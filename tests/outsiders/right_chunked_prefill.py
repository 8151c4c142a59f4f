"""Kernels over pages that are right, each in an unusual way."""

from math import inf

import numpy as np
import torch
from outsider_flash import alibi, flash, in_window, merged, paged, rows, slots_of, softmax_of
from torch.nn.functional import scaled_dot_product_attention

from twinattn.kit import claims


def all_options_by_tiles(
    query,
    key_cache,
    value_cache,
    cu_seqlens_q,
    seq_lens,
    block_table,
    causal=True,
    window_size=(-1, -1),
    softmax_scale=None,
    softcap=0.0,
    alibi_slopes=None,
    sinks=None,
    return_lse=False,
    out=None,
):
    """Tiles of 7 queries and 13 keys, an online softmax, every option, and the output in place."""
    pages = paged(query, key_cache, value_cache, cu_seqlens_q, seq_lens, block_table)
    options = dict(softmax_scale=softmax_scale, softcap=softcap, alibi_slopes=alibi_slopes, sinks=sinks)
    options |= dict(causal=causal, window_size=window_size, tiles=(7, 13))
    result, lse = flash(query, pages, value_size=value_cache.shape[3], return_lse=True, **options)
    result = result if out is None else out.copy_(result)
    return (result, lse) if return_lse else result


def decode_of_split_keys(query, key_cache, value_cache, seq_lens, block_table, sinks=None, return_lse=False):
    """A decode whose keys are split into runs of 40, merged once, with the sink as one more part."""
    out, lse = torch.zeros(*query.shape[:2], value_cache.shape[3]), torch.full(query.shape[:2], -inf)
    ends = torch.arange(len(seq_lens) + 1)
    for b, (_, _, s, read) in enumerate(paged(query, key_cache, value_cache, ends, seq_lens, block_table)):
        parts = [
            softmax_of(query[b : b + 1], *read(j), torch.ones(1, len(j), dtype=torch.bool), query.shape[2] ** -0.5)
            for j in torch.arange(s).split(40)
        ]
        if sinks is not None:
            parts.append((torch.zeros_like(out[b : b + 1]), sinks.float()[None]))
        if parts:
            out[b : b + 1], lse[b : b + 1] = merged(*map(list, zip(*parts, strict=True)))
    return (out.to(query.dtype), lse) if return_lse else out.to(query.dtype)


def padded_to_rectangles(query, key_cache, value_cache, cu_seqlens_q, seq_lens, block_table, softmax_scale=None):
    """All sequences in one rectangle of queries and one of keys, in one call of PyTorch's attention; no LSE."""
    p, lens = key_cache.shape[1], rows(query, cu_seqlens_q, seq_lens)
    out = query.new_zeros(*query.shape[:2], value_cache.shape[3])
    most_q, most_s = max((b - a for a, b, _ in lens), default=0), max((s for *_, s in lens), default=0)
    if not most_q or not most_s:
        return out
    q = query.new_zeros(len(lens), most_q, *query.shape[1:])
    k = key_cache.new_zeros(len(lens), most_s, *key_cache.shape[2:])
    v = value_cache.new_zeros(len(lens), most_s, *value_cache.shape[2:])
    sees = torch.zeros(len(lens), 1, most_q, most_s, dtype=torch.bool)
    for b, (q0, q1, s) in enumerate(lens):
        q[b, : q1 - q0], at = query[q0:q1], slots_of(block_table[b], torch.arange(s), p)
        k[b, :s], v[b, :s] = key_cache[at // p, at % p], value_cache[at // p, at % p]
        i, j = torch.arange(s - q1 + q0, s)[:, None], torch.arange(s)[None]
        sees[b, 0, : q1 - q0, :s] = j <= i
        k[b, :s][~sees[b, 0].any(0)[:s]] = 0.0
        v[b, :s][~sees[b, 0].any(0)[:s]] = 0.0
    nothing = ~sees.any(-1, keepdim=True)
    heads_first = (x.transpose(1, 2).float() for x in (q, k, v))
    scale = query.shape[2] ** -0.5 if softmax_scale is None else softmax_scale
    x = scaled_dot_product_attention(*heads_first, attn_mask=sees | nothing, scale=scale, enable_gqa=True)
    x = x.masked_fill(nothing, 0.0).transpose(1, 2)
    for b, (q0, q1, _) in enumerate(lens):
        out[q0:q1] = x[b, : q1 - q0].to(out.dtype)
    return out


def float64_inside(query, key_cache, value_cache, cu_seqlens_q, seq_lens, block_table, softcap=0.0, return_lse=False):
    """Everything in float64, head by head, with a plain softmax; the log-sum-exp goes back to float32."""
    out, lse = torch.zeros(*query.shape[:2], value_cache.shape[3]), torch.full(query.shape[:2], -inf)
    group = query.shape[1] // key_cache.shape[2]
    for q0, q1, s, read in paged(query, key_cache, value_cache, cu_seqlens_q, seq_lens, block_table):
        key, value = (x.double() for x in read(torch.arange(s)))
        mask = in_window(torch.arange(s - q1 + q0, s)[:, None], torch.arange(s)[None], (-1, -1), True)
        key, value = (x.masked_fill(~mask.any(0)[:, None, None], 0.0) for x in (key, value))
        for head in range(query.shape[1]):
            x = query[q0:q1, head].double() @ key[:, head // group].T * query.shape[2] ** -0.5
            x = softcap * torch.tanh(x / softcap) if softcap else x
            x = x.masked_fill(~mask, -inf)
            out[q0:q1, head] = (x.softmax(-1).masked_fill(~mask, 0.0) @ value[:, head // group]).float()
            lse[q0:q1, head] = x.logsumexp(-1).float()
    return (out.to(query.dtype), lse) if return_lse else out.to(query.dtype)


@claims(dtypes=(torch.float32, torch.float16))
def in_numpy(query, key_cache, value_cache, cu_seqlens_q, seq_lens, block_table, sinks=None):
    """NumPy, with groups by reshape; it does not claim bfloat16, which NumPy does not know."""
    q, keys, values = (x.float().numpy() for x in (query, key_cache, value_cache))
    out = np.zeros((*q.shape[:2], values.shape[3]), np.float32)
    table, p, hk = block_table.numpy(), keys.shape[1], keys.shape[2]
    for b, (q0, q1, s) in enumerate(rows(query, cu_seqlens_q, seq_lens)):
        if q0 == q1 or not s:
            continue
        at = np.arange(s)
        k, v = (x[table[b, at // p], at % p] for x in (keys, values))
        sees = at <= np.arange(s - q1 + q0, s)[:, None]
        k, v = (np.where(sees.any(0)[:, None, None], x, np.float32(0)) for x in (k, v))
        grouped = q[q0:q1].reshape(q1 - q0, hk, -1, q.shape[2]) * np.float32(q.shape[2] ** -0.5)
        x = np.where(sees, np.einsum("tkgd,skd->kgts", grouped, k), -np.inf)
        top = x.max(-1, keepdims=True)
        top = (
            np.where(np.isfinite(top), top, 0)
            if sinks is None
            else np.maximum(top, sinks.float().numpy().reshape(hk, -1, 1, 1))
        )
        weights = np.exp(x - top)
        total = weights.sum(-1, keepdims=True)
        total = total + (0 if sinks is None else np.exp(sinks.float().numpy().reshape(hk, -1, 1, 1) - top))
        weights = weights / np.where(total == 0, 1, total)
        out[q0:q1] = np.einsum("kgts,skd->tkgd", weights, v).reshape(q1 - q0, *out.shape[1:])
    return torch.from_numpy(out).to(query.dtype)


@claims(dtypes=(torch.bfloat16,))
def weights_in_bfloat16(query, key_cache, value_cache, cu_seqlens_q, seq_lens, block_table):
    """Weights are rounded to bfloat16 before they meet the values, as tensor cores want them; sums are float32."""
    out = torch.zeros(*query.shape[:2], value_cache.shape[3])
    for q0, q1, s, read in paged(query, key_cache, value_cache, cu_seqlens_q, seq_lens, block_table):
        sees = torch.arange(s)[None] <= torch.arange(s - q1 + q0, s)[:, None]
        group = query.shape[1] // key_cache.shape[2]
        k, v = (
            x.float().masked_fill(~sees.any(0)[:, None, None], 0.0).repeat_interleave(group, 1)
            for x in read(torch.arange(s))
        )
        x = torch.einsum("thd,shd->hts", query[q0:q1].float(), k) * query.shape[2] ** -0.5
        x = x.masked_fill(~sees, -inf)
        top = x.amax(-1, keepdim=True).masked_fill(~sees.any(-1)[:, None], 0.0) if s else x.new_zeros(1)
        weights = torch.exp(x - top)
        total = weights.sum(-1).T[..., None]
        sums = torch.einsum("hts,shd->thd", weights.to(torch.bfloat16).float(), v)
        out[q0:q1] = sums / total.masked_fill(total == 0, 1.0)
    return out.to(query.dtype)


def chunks_of_queries_over_one_gather(
    query, key_cache, value_cache, cu_seqlens_q, seq_lens, block_table, alibi_slopes=None, sinks=None, return_lse=False
):
    """All keys of the batch are gathered at once into rows; queries come in chunks of 5, from the last to the first."""
    p, lens = key_cache.shape[1], rows(query, cu_seqlens_q, seq_lens)
    at = [slots_of(block_table[b], torch.arange(s), p) for b, (_, _, s) in enumerate(lens)]
    at = torch.cat([*at, torch.zeros(0, dtype=torch.long)])
    keys, values = key_cache[at // p, at % p], value_cache[at // p, at % p]
    out, lse = torch.zeros(*query.shape[:2], value_cache.shape[3]), torch.full(query.shape[:2], -inf)
    first = 0
    for q0, q1, s in lens:
        own = keys[first : first + s], values[first : first + s]
        for a in reversed(range(q0, q1, 5)):
            end = min(a + 5, q1)
            seen = max(0, s - q1 + end)
            one = iter([(0, end - a, seen, lambda j, own=own: (own[0][j], own[1][j]))])
            options = dict(alibi_slopes=alibi_slopes, bias=alibi, sinks=sinks, return_lse=True)
            if s - q1 + end < 0:  # the flash kernel counts positions from the end of what it reads
                lse[a:end] = -inf if sinks is None else sinks.float()
                continue
            out[a:end], lse[a:end] = flash(query[a:end], one, value_size=value_cache.shape[3], **options)
        first += s
    return (out.to(query.dtype), lse) if return_lse else out.to(query.dtype)


@claims(not_claimed={"strides": "takes contiguous tensors only", "last stride": "takes contiguous tensors only"})
def contiguous_pools(query, key_cache, value_cache, cu_seqlens_q, seq_lens, block_table):
    """Contiguous pools only, as rows by `view`; it refuses others by name."""
    if not (key_cache.is_contiguous() and value_cache.is_contiguous() and query.is_contiguous()):
        raise NotImplementedError("takes contiguous tensors only")
    p = key_cache.shape[1]
    keys, values = (x.view(-1, *x.shape[2:]) for x in (key_cache, value_cache))

    def sequences():
        for b, (q0, q1, s) in enumerate(rows(query, cu_seqlens_q, seq_lens)):
            at = slots_of(block_table[b], torch.arange(s), p)
            yield q0, q1, s, lambda j, at=at: (keys[at[j]], values[at[j]])

    return flash(query, sequences(), value_size=value_cache.shape[3])
