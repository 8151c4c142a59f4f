"""PyTorch's own attention: `F.scaled_dot_product_attention`, `varlen_attn`, and FlexAttention, compiled."""

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from refattn.batch import Batch
from twinattn.libraries import Call, with_lse


def sdpa(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    causal: bool = False,
    mask: Tensor | None = None,
    scale: float | None = None,
) -> Tensor:
    """Call `F.scaled_dot_product_attention` over `[b, heads, length, d]`; its causal mask is aligned top-left.

    On a CPU it looks for the largest product before it scales: under a negative scale large scores would overflow.
    """
    if scale is not None and scale < 0:
        query, scale = -query, -scale
    return functional.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=causal, scale=scale, enable_gqa=True
    )


def prepare_varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    batch: Batch,
    softmax_scale: float | None = None,
    causal: bool = True,
    window_size: tuple[int, int] = (-1, -1),
    return_lse: bool = False,
    batch_invariant: bool = False,
) -> Call:
    """Prepare `torch.nn.attention.varlen.varlen_attn` over rows; one split is invariant, as its documentation says."""
    from torch.nn.attention.varlen import AuxRequest, varlen_attn

    call = partial(
        varlen_attn,
        *(query, key, value, batch.cu_seqlens_q, batch.cu_seqlens_k, batch.max_query_len, batch.max_seq_len),
        scale=softmax_scale,
        window_size=(window_size[0], 0) if causal else window_size,
        enable_gqa=True,
        num_splits=1 if batch_invariant else None,
    )
    return with_lse(partial(call, return_aux=AuxRequest(lse=True))) if return_lse else call


@cache
def flex(**options: Any) -> Callable[..., Any]:
    """Return FlexAttention, compiled; the options are those of `torch.compile`."""
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, **options)
