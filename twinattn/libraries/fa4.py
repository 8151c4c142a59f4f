"""FlashAttention-4: the package `flash-attn-4`."""

from functools import partial

import torch
from torch import Tensor

from refattn.batch import Batch
from twinattn.libraries import Call, missing, output_of, with_lse


def available() -> str | None:
    """Return why it cannot be used."""
    return missing("flash_attn.cute")


def prepare(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    batch: Batch,
    softmax_scale: float | None = None,
    causal: bool = True,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    return_lse: bool = False,
) -> Call:
    """Prepare `flash_attn_varlen_func`, over rows or over pages."""
    function = planned(batch, softmax_scale, causal, window_size, softcap, return_lse)
    call = partial(function, query, key, value)
    return with_lse(call) if return_lse else output_of(call)


def prepare_for_gradients(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    batch: Batch,
    softmax_scale: float | None = None,
    causal: bool = True,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    deterministic: bool = False,
    return_lse: bool = False,
) -> Call:
    """Prepare `flash_attn_varlen_func` over rows, to be differentiated.

    Raises:
        NotImplementedError: for sinks beside queries that are not bfloat16, as its sinks are.
    """
    if sinks is not None and query.dtype != torch.bfloat16:
        raise NotImplementedError("learnable_sink: bfloat16 only")
    function = planned(batch, softmax_scale, causal, window_size, softcap, return_lse)
    more = {} if sinks is None else {"learnable_sink": sinks.to(torch.bfloat16)}
    call = partial(function, query, key, value, deterministic=deterministic, **more)
    return with_lse(call) if return_lse else output_of(call)


def planned(
    batch: Batch,
    softmax_scale: float | None = None,
    causal: bool = True,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    return_lse: bool = False,
) -> Call:
    """Return `flash_attn_varlen_func` for a batch, to call with query, key and value."""
    from flash_attn.cute import flash_attn_varlen_func

    where: dict[str, Tensor | None] = dict(seqused_k=batch.seq_lens, page_table=batch.block_table)
    if batch.block_table is None:
        where = dict(cu_seqlens_k=batch.cu_seqlens_k)
    return partial(
        flash_attn_varlen_func,
        cu_seqlens_q=batch.cu_seqlens_q,
        max_seqlen_q=batch.max_query_len,
        max_seqlen_k=batch.max_seq_len,
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=tuple(None if side < 0 else side for side in window_size),
        softcap=softcap,
        return_lse=return_lse,
        **where,
    )
