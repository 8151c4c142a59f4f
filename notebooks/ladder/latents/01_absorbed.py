"""1 · Absorbed: the matrices are applied to the query and to the output.

A score is the product of a query and a key, q . (W c), and that is (W^T q) . c: the matrix may be applied to the query,
once, and not to every latent. The output is a sum of values, and that is W times the same sum of latents. What is left
is attention with one KV head for all query heads: its keys are the rows of the cache, its values their first part.

Gain: nearly everything that was computed. Per pair of a query and a key there is more to multiply than before, as a
latent is longer than a head's key; but no matrix is applied to a key any more.

Source: DeepSeek-AI 2024, "DeepSeek-V2" (2.1.2); refattn/mla.py, `absorb` and `project`.
"""

import torch
from jaxtyping import Float, Int32
from torch import Tensor

from refattn import kv_cache, masks, mla
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
    """Attend from the newest token of each sequence to its latents."""
    rank = key_projection.shape[2]
    absorbed = mla.absorb(query, key_projection)
    outs = []
    for sequence, seq_len in enumerate(seq_lens.tolist()):
        key = kv_cache.gather(cache[:, :, None], block_table[sequence], seq_len)  # one KV head
        visible = masks.full(1, seq_len, device=query.device)
        row = absorbed[sequence : sequence + 1]
        out, _ = attend(row, key, key[..., :rank], visible, softmax_scale=softmax_scale)
        outs.append(out)
    return mla.project(torch.cat(outs), value_projection)
