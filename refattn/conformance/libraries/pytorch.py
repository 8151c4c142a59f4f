"""PyTorch's own attention: `F.scaled_dot_product_attention`, and FlexAttention, compiled."""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional


def sdpa(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    causal: bool = False,
    mask: Tensor | None = None,
    scale: float | None = None,
) -> Tensor:
    """Call `F.scaled_dot_product_attention` over `[b, heads, length, d]`; its causal mask is aligned top-left."""
    return functional.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=causal, scale=scale, enable_gqa=True
    )


@cache
def flex(**options: Any) -> Callable[..., Any]:
    """Return FlexAttention, compiled; the options are those of `torch.compile`."""
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, **options)
