"""10 · A cap that unmasks.

A model with capped scores reads a little into the future: its loss is too good to be true.

Reported: FlashAttention 1025: https://github.com/Dao-AILab/flash-attention/issues/1025
"""

from typing import Any

import torch
from torch import Tensor


def broken(scores: Tensor, visible: Tensor, softcap: float) -> Tensor:
    """Return the weights of the keys for each query: cap the scores to between -softcap and softcap, mask, softmax."""
    scores = scores.masked_fill(~visible, -torch.inf)
    scores = softcap * torch.tanh(scores / softcap)
    return scores.softmax(-1)


def failing_case() -> dict[str, Any]:
    """Return a small case that `broken` gets wrong.

    dict(query_len=..., seq_len=..., softcap=...): causal, and each query sees a key.
    """
    return dict(query_len=2, seq_len=2, softcap=1.0)


def mended(scores: Tensor, visible: Tensor, softcap: float) -> Tensor:
    """Do what `broken` should do."""
    scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~visible, -torch.inf)
    return scores.softmax(-1)
