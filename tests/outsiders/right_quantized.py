"""Kernels over fp8 pools that are right."""

import torch
from outsider_flash import flash, paged


def scales_folded_into_the_query(
    query, key_cache, value_cache, cu_seqlens_q, seq_lens, block_table, scales, softcap=0.0, return_lse=False
):
    """The scale of the keys goes into the scale of the softmax, that of the values behind the sum."""
    if any(isinstance(scale, torch.Tensor) for scale in (scales.key, scales.value)):
        raise NotImplementedError("takes one scale of keys and one of values")
    pages = paged(query, key_cache.float(), value_cache.float(), cu_seqlens_q, seq_lens, block_table)
    options = dict(softmax_scale=query.shape[2] ** -0.5 * scales.key, softcap=softcap, return_lse=True)
    out, lse = flash(query.float(), pages, value_size=value_cache.shape[3], **options)
    out = (scales.value * out).to(query.dtype)
    return (out, lse) if return_lse else out
