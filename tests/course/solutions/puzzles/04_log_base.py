"""4 · Two logarithms.

Answers are 12 % off where a long shared prefix meets a short question. Benchmarks with halves of equal length pass.

Reported: vLLM 52796: https://github.com/vllm-project/vllm/issues/52796
"""

from typing import Any

import torch
from torch import Tensor


def broken(prefix: Tensor, suffix: Tensor) -> Tensor:
    """Return the mean of all values of a prefix and a suffix, merged from the means of both."""
    # All keys weigh alike here, so a log-sum-exp is the log of a number of keys. This kernel answers in base 2.
    lses = torch.tensor([len(prefix), len(suffix)], dtype=prefix.dtype).log2()
    shares = torch.exp(lses - lses.logsumexp(0))
    return shares[0] * prefix.mean(0) + shares[1] * suffix.mean(0)


def failing_case() -> dict[str, Any]:
    """Return a small case that `broken` gets wrong: dict(prefix_len=..., suffix_len=...): both at least 1."""
    return dict(prefix_len=8, suffix_len=2)


def mended(prefix: Tensor, suffix: Tensor) -> Tensor:
    """Do what `broken` should do."""
    # All keys weigh alike here, so a log-sum-exp is the log of a number of keys. This kernel answers in base 2.
    lses = torch.tensor([len(prefix), len(suffix)], dtype=prefix.dtype).log()
    shares = torch.exp(lses - lses.logsumexp(0))
    return shares[0] * prefix.mean(0) + shares[1] * suffix.mean(0)
