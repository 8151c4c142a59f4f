"""0 · The formula.

Sequences lie one after the other, and `cu_seqlens` says where each begins: a ragged batch. The scores of all queries
of a sequence and all its keys lie in memory, a square of numbers per head; the mask hides the keys after each query.

Gain: none, this is the reference. It says what is right, and every rung is held to it. A prompt twice as long has four
times as many scores, and each of them goes to memory and back a few times.

Source: Vaswani et al. 2017, "Attention Is All You Need"; refattn/attention.py.
"""

from itertools import pairwise

import torch
from jaxtyping import Float, Int32
from torch import Tensor

from refattn import masks
from refattn.attention import attend


def attention(
    query: Float[Tensor, "t h d"],
    key: Float[Tensor, "s hk d"],
    value: Float[Tensor, "s hk d"],
    cu_seqlens_q: Int32[Tensor, "_"],  # [b+1]
    cu_seqlens_k: Int32[Tensor, "_"],  # [b+1]
    softmax_scale: float | None = None,
) -> Float[Tensor, "t h d"]:
    """Attend from the last tokens of each sequence to all its tokens up to themselves."""
    out = torch.empty_like(query)
    rows = zip(pairwise(cu_seqlens_q.tolist()), pairwise(cu_seqlens_k.tolist()), strict=True)
    for (q0, q1), (k0, k1) in rows:
        visible = masks.causal(q1 - q0, k1 - k0, device=query.device)
        out[q0:q1], _ = attend(query[q0:q1], key[k0:k1], value[k0:k1], visible, softmax_scale=softmax_scale)
    return out
