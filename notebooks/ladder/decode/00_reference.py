"""0 · The formula.

The keys and values of each sequence are copied out of their pages, repeated for the heads that share them, and the
scores of all keys lie in memory before the softmax reads them. A dozen launches per sequence, one after the other.

Gain: none, this is the reference. It says what is right, and every rung is held to it.

Source: Vaswani et al. 2017, "Attention Is All You Need"; refattn/attention.py.
"""

import torch
from jaxtyping import Float, Int32
from torch import Tensor

from refattn import kv_cache, masks
from refattn.attention import attend


def attention(
    query: Float[Tensor, "b h d"],
    key_cache: Float[Tensor, "n p hk d"],
    value_cache: Float[Tensor, "n p hk d"],
    seq_lens: Int32[Tensor, "b"],
    block_table: Int32[Tensor, "b m"],
    softmax_scale: float | None = None,
) -> Float[Tensor, "b h d"]:
    """Attend from the newest token of each sequence to its tokens in the cache."""
    outs = []
    for sequence, seq_len in enumerate(seq_lens.tolist()):
        blocks = block_table[sequence]
        key, value = (kv_cache.gather(cache, blocks, seq_len) for cache in (key_cache, value_cache))
        visible = masks.full(1, seq_len, device=query.device)
        out, _ = attend(query[sequence : sequence + 1], key, value, visible, softmax_scale=softmax_scale)
        outs.append(out)
    return torch.cat(outs)
