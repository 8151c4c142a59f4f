"""3 · NaN out of nothing.

A request whose tokens are all in the shared prefix of another gets NaN, and the whole batch with it after a norm.

Reported: vLLM 27491: https://github.com/vllm-project/vllm/issues/27491
"""

from typing import Any

import torch
from torch import Tensor


def broken(outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
    """Merge partial outputs [parts, queries] into one: outputs and log-sum-exps, [queries]."""
    largest = lses.amax(0)
    shares = torch.exp(lses - largest)
    total = shares.sum(0)
    return (shares * outs).sum(0) / total, largest + total.log()


def failing_case() -> dict[str, Any]:
    """Return a small case that `broken` gets wrong.

    dict(lses=[[...], [...]]): for each part the log-sum-exp of each query; float("-inf") is allowed.
    """
    return dict(lses=[[0.0, float("-inf")], [1.0, float("-inf")]])


def mended(outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
    """Do what `broken` should do."""
    largest = lses.amax(0)
    largest = largest.masked_fill(largest == -torch.inf, 0.0)
    shares = torch.exp(lses - largest)
    total = shares.sum(0)
    return (shares * outs).sum(0) / total.masked_fill(total == 0, 1.0), largest + total.log()
