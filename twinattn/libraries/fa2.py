"""FlashAttention-2: the package `flash-attn`."""

from functools import partial

from einops import rearrange
from torch import Tensor

from refattn.batch import Batch
from twinattn.libraries import Call, is_installed, of_rectangle, with_lse


def available() -> str | None:
    """Return why it cannot be used: the folder `flash_attn` may hold FlashAttention-4 alone."""
    return None if is_installed("flash_attn_2_cuda") else "flash_attn is not installed"


def prepare(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    batch: Batch,
    softmax_scale: float | None = None,
    causal: bool = True,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    return_lse: bool = False,
    deterministic: bool = False,
) -> Call:
    """Prepare `flash_attn_varlen_func`, over rows or over pages of a multiple of 256; its backward: `deterministic`."""
    from flash_attn import flash_attn_varlen_func

    call = partial(
        flash_attn_varlen_func,
        *(query, key, value, batch.cu_seqlens_q, batch.cu_seqlens_k, batch.max_query_len, batch.max_seq_len),
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=window_size,
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        block_table=batch.block_table,
        **({"deterministic": True} if deterministic else {}),
    )
    # This is how to get the LSE.
    return with_lse(partial(call, return_attn_probs=True)) if return_lse else call


def prepare_rectangle(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    batch: Batch,
    softmax_scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    return_lse: bool = False,
    *,
    causal: bool = True,
) -> Call:
    """Prepare `flash_attn_with_kvcache`, over pages of a multiple of 256, for as many queries of each sequence."""
    from flash_attn import flash_attn_with_kvcache

    call = partial(
        flash_attn_with_kvcache,
        *(rearrange(query, "(b t) h d -> b t h d", b=batch.num_seqs), key_cache, value_cache),
        cache_seqlens=batch.seq_lens,
        block_table=batch.block_table,
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=window_size,
        softcap=softcap,
        alibi_slopes=alibi_slopes,
    )
    return of_rectangle(partial(call, return_softmax_lse=True)) if return_lse else call
