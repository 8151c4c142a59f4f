"""11 · One scale for two.

An fp8 cache is fine with the default scales. With calibrated ones the model is worse than without.

Reported: vLLM 42580: https://github.com/vllm-project/vllm/issues/42580
"""

from typing import Any

import torch
from torch import Tensor


def broken(
    query: Tensor, quantized_key: Tensor, quantized_value: Tensor, key_scale: float, value_scale: float
) -> Tensor:
    """Return the answer of one query over quantized keys and values [s, d]; a number is scale times value."""
    scores = quantized_key.to(query.dtype) @ query * key_scale / len(query) ** 0.5
    return scores.softmax(0) @ quantized_value.to(query.dtype) * key_scale


def failing_case() -> dict[str, Any]:
    """Return a small case that `broken` gets wrong: dict(key_scale=..., value_scale=...)."""
    return dict(key_scale=0.5, value_scale=0.25)


def mended(
    query: Tensor, quantized_key: Tensor, quantized_value: Tensor, key_scale: float, value_scale: float
) -> Tensor:
    """Do what `broken` should do."""
    scores = quantized_key.to(query.dtype) @ query * key_scale / len(query) ** 0.5
    return scores.softmax(0) @ quantized_value.to(query.dtype) * value_scale
