"""9 · A sink in every split.

A model with attention sinks is right in the tests, and its long answers fade. Long contexts are split.

Reported: ROCm rocm-libraries 12227: https://github.com/ROCm/rocm-libraries/issues/12227
"""

from typing import Any

import torch
from torch import Tensor


def broken(scores: Tensor, values: Tensor, sink: Tensor, num_splits: int) -> Tensor:
    """Return softmax over the scores [s] and one sink, times the values [s], in `num_splits` parts of the keys."""
    outs, lses = [], []
    for split_scores, split_values in zip(
        scores.tensor_split(num_splits), values.tensor_split(num_splits), strict=True
    ):
        lse = torch.logaddexp(split_scores.logsumexp(0), sink)
        outs.append((torch.exp(split_scores - lse) * split_values).sum())
        lses.append(lse)
    shares = torch.stack(lses).softmax(0)
    return (shares * torch.stack(outs)).sum()


def failing_case() -> dict[str, Any]:
    """Return a small case that `broken` gets wrong: dict(num_keys=..., num_splits=..., sink=...)."""
    return dict(num_keys=8, num_splits=2, sink=0.0)


def mended(scores: Tensor, values: Tensor, sink: Tensor, num_splits: int) -> Tensor:
    """Do what `broken` should do."""
    outs, lses = [], []
    for split_scores, split_values in zip(
        scores.tensor_split(num_splits), values.tensor_split(num_splits), strict=True
    ):
        lse = split_scores.logsumexp(0)
        if not len(split_scores):
            continue
        outs.append((torch.exp(split_scores - lse) * split_values).sum())
        lses.append(lse)
    shares = torch.exp(torch.stack(lses) - torch.logaddexp(torch.stack(lses).logsumexp(0), sink))
    return (shares * torch.stack(outs)).sum()
