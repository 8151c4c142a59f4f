"""Latent attention that is right."""

from math import inf

import torch
from outsider_flash import paged, rows, slots_of, softmax_of


def latent_and_rope_apart(
    query, cache, cu_seqlens_q, seq_lens, block_table, latent_rank, softmax_scale, return_lse=False
):
    """Latents and rotary keys are split into two tensors, as two pointers of a kernel, and joined for the scores."""
    latents, rope = cache[..., :latent_rank].contiguous(), cache[..., latent_rank : query.shape[2]].contiguous()
    out, lse, p = torch.zeros(*query.shape[:2], latent_rank), torch.full(query.shape[:2], -inf), cache.shape[1]
    for b, (q0, q1, s) in enumerate(rows(query, cu_seqlens_q, seq_lens)):
        at = slots_of(block_table[b], torch.arange(s), p)
        latent, rotary = (x[at // p, at % p] for x in (latents, rope))
        sees = torch.arange(s)[None] <= torch.arange(s - q1 + q0, s)[:, None]
        key = torch.cat([latent, rotary], -1)[:, None]
        out[q0:q1], lse[q0:q1] = softmax_of(query[q0:q1], key, latent[:, None], sees, softmax_scale)
    return (out.to(query.dtype), lse) if return_lse else out.to(query.dtype)


def decode_with_latents_twice(query, cache, seq_lens, block_table, latent_rank, softmax_scale):
    """A decode that hands the same pool over as keys and as values."""
    out = torch.zeros(*query.shape[:2], latent_rank)
    ends, pools = torch.arange(len(seq_lens) + 1), (cache[:, :, None, : query.shape[2]], cache[:, :, None])
    for b, (_, _, s, read) in enumerate(paged(query, *pools, ends, seq_lens, block_table)):
        key, value = read(torch.arange(s))
        sees = torch.ones(1, s, dtype=torch.bool)
        out[b] = softmax_of(query[b : b + 1], key, value[..., :latent_rank], sees, softmax_scale)[0][0]
    return out.to(query.dtype)
