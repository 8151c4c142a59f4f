"""1 · A window that is too wide.

The logits drift away from those of the training code, on long prompts only.

Reported: vLLM 3385: https://github.com/vllm-project/vllm/issues/3385
"""

from typing import Any

import torch
from torch import Tensor


def broken(query_len: int, seq_len: int, window: int) -> Tensor:
    """Return True where one of the last `query_len` tokens may see a key: itself and `window - 1` before it."""
    i = torch.arange(seq_len - query_len, seq_len)[:, None]
    j = torch.arange(seq_len)[None]
    return (j <= i) & (j >= i - window)


def failing_case() -> dict[str, Any]:
    """Return a small case that `broken` gets wrong: dict(query_len=..., seq_len=..., window=...)."""
    return dict(query_len=1, seq_len=5, window=3)


def mended(query_len: int, seq_len: int, window: int) -> Tensor:
    """Do what `broken` should do."""
    i = torch.arange(seq_len - query_len, seq_len)[:, None]
    j = torch.arange(seq_len)[None]
    return (j <= i) & (j > i - window)
