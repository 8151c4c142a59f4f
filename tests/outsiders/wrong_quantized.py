"""Kernels over fp8 pools that are wrong."""

import torch
from outsider_flash import flash, paged


def first_scale_for_all_heads(query, key_cache, value_cache, cu_seqlens_q, seq_lens, block_table, scales):
    """A scale per head is a tensor, of which the first number is taken for all heads and sequences."""
    k, v = (float(x.flatten()[0]) if isinstance(x, torch.Tensor) else x for x in (scales.key, scales.value))
    pages = paged(query, key_cache.float(), value_cache.float(), cu_seqlens_q, seq_lens, block_table)
    out = flash(query.float(), pages, value_size=value_cache.shape[3], softmax_scale=query.shape[2] ** -0.5 * k)
    return (v * out).to(query.dtype)


def scale_after_the_cap(query, key_cache, value_cache, cu_seqlens_q, seq_lens, block_table, scales, softcap=0.0):
    """The scale of the keys is multiplied in after the softcap."""
    pages = paged(query, key_cache.float(), value_cache.float(), cu_seqlens_q, seq_lens, block_table)
    k, cap = scales.key, softcap
    if cap:  # k * cap * tanh(x / cap) is a cap of k * cap on the scaled score
        options = dict(softmax_scale=query.shape[2] ** -0.5 * k, softcap=cap * k)
    else:
        options = dict(softmax_scale=query.shape[2] ** -0.5 * k)
    out = flash(query.float(), pages, value_size=value_cache.shape[3], **options)
    return (scales.value * out).to(query.dtype)


def sink_scaled_like_a_key(query, key_cache, value_cache, cu_seqlens_q, seq_lens, block_table, scales, sinks=None):
    """The sink is multiplied with the scale of the keys."""
    pages = paged(query, key_cache.float(), value_cache.float(), cu_seqlens_q, seq_lens, block_table)
    options = dict(softmax_scale=query.shape[2] ** -0.5 * scales.key)
    options["sinks"] = None if sinks is None else sinks * scales.key
    out = flash(query.float(), pages, value_size=value_cache.shape[3], **options)
    return (scales.value * out).to(query.dtype)
