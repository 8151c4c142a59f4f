"""0 · The formula.

The cache has one row per token: a latent, from which each head computes its key and its value by a matrix of its own,
and a rotary key, which all heads share. So all keys and values of a sequence are computed, for every head, and then
each query attends to those of its head.

Gain: none, this is the reference. It says what is right, and every rung is held to it. Each decode computes the keys
and values of all tokens again: that is some hundred times as much work as attention itself.

Source: DeepSeek-AI 2024, "DeepSeek-V2" (2.1); refattn/mla.py.
"""

import torch
from einops import einsum, repeat
from jaxtyping import Float, Int32
from torch import Tensor

from refattn import kv_cache, masks
from refattn.attention import attend


def attention(
    query: Float[Tensor, "b h d"],
    cache: Float[Tensor, "n p c"],
    seq_lens: Int32[Tensor, "b"],
    block_table: Int32[Tensor, "b m"],
    key_projection: Float[Tensor, "h nope r"],
    value_projection: Float[Tensor, "h dv r"],
    softmax_scale: float,
) -> Float[Tensor, "b h dv"]:
    """Attend from the newest token of each sequence to the keys and values of its latents."""
    heads, _, rank = key_projection.shape
    outs = []
    for sequence, seq_len in enumerate(seq_lens.tolist()):
        rows = kv_cache.gather(cache[:, :, None], block_table[sequence], seq_len)[:, 0]
        latent, rope_key = rows[:, :rank], repeat(rows[:, rank:], "s rope -> s h rope", h=heads)
        key = torch.cat([einsum(latent, key_projection, "s r, h nope r -> s h nope"), rope_key], dim=-1)
        value = einsum(latent, value_projection, "s r, h dv r -> s h dv")
        visible = masks.full(1, seq_len, device=query.device)
        out, _ = attend(query[sequence : sequence + 1], key, value, visible, softmax_scale=softmax_scale)
        outs.append(out)
    return torch.cat(outs)
