"""FlashAttention-3: its own package `flash_attn_interface`, or the library in vLLM's wheel."""

import importlib
import importlib.util
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from refattn.batch import Batch
from twinattn.libraries import Call, is_installed, output_of, with_lse

INTERFACE = "flash_attn_interface"
LIBRARY = "_vllm_fa3_C"  # vLLM's build, and the namespace of its operators
SPLITS = 0  # splits of a sequence's keys: FA3 chooses
UNUSED: dict[str, Any] = dict.fromkeys(
    (
        *("k_new", "v_new", "out", "cu_seqlens_k_new", "seqused_q", "kv_batch_idx", "leftpad_k"),
        *("rotary_cos", "rotary_sin", "seqlens_rotary", "q_descale", "k_descale", "v_descale"),
        *("scheduler_metadata", "pack_gqa", "s_aux", "cp_tot_seqused_k"),
        *("cu_seqlens_k", "seqused_k", "page_table"),  # the first, or the others: a call says which
    )
) | dict(is_rotary_interleaved=True, sm_margin=0, cp_world_size=1, cp_rank=0)


def available() -> str | None:
    """Return why there is no FlashAttention-3, or None once one is loaded."""
    if is_installed(INTERFACE) or hasattr(getattr(torch.ops, LIBRARY), "fwd"):
        return None
    vllm = importlib.util.find_spec("vllm")
    folders = [Path(folder, "vllm_flash_attn") for folder in (vllm and vllm.submodule_search_locations) or ()]
    files = [folder / f"{LIBRARY}.abi3.so" for folder in folders]
    alone = importlib.util.find_spec(LIBRARY)  # its name is that of a module
    files += [Path(alone.origin)] if alone and alone.origin else []
    for file in files:
        if file.is_file():
            try:
                torch.ops.load_library(file)
            except OSError as error:
                return f"{file} cannot be loaded: {error}"
            return None
    return f"neither {INTERFACE} nor vLLM's {LIBRARY} is installed"


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
    batch_invariant: bool = False,
    *,
    value_query: Tensor | None = None,
    descales: tuple[Tensor, Tensor, Tensor] | None = None,
    is_scheduled: bool = False,
) -> Call:
    """Prepare a call over rows, or over pages of any size.

    Args:
        query: `[t, h, d]`.
        key: rows or pages.
        value: likewise.
        batch: with a block table for pages.
        softmax_scale: `d ** -0.5` if None.
        causal: of the mask.
        window_size: of the mask.
        softcap: of the scores.
        return_lse: also return the log-sum-exp.
        batch_invariant: do not split keys, as how depends on the batch.
        value_query: a second query `[t, h, dv]`, which meets the values.
        descales: of queries, keys and values in fp8, `[b, hk]` each.
        is_scheduled: share out the work now, as vLLM does, and not in the call (vLLM's library, over pages).

    Raises:
        ImportError: if there is none.
        NotImplementedError: for a schedule, where its own package is used.
    """
    if (reason := available()) is not None:
        raise ImportError(reason)
    asked: dict[str, Any] = dict(
        max_seqlen_q=batch.max_query_len,
        softmax_scale=query.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale,
        softcap=softcap,
        num_splits=1 if batch_invariant else SPLITS,
    )
    if descales is not None:
        asked |= dict(zip(("q_descale", "k_descale", "v_descale"), descales, strict=True))
    if is_installed(INTERFACE):
        if is_scheduled:
            raise NotImplementedError(f"{INTERFACE} has no schedule that is made before a call")
        call = _of_interface(query, key, value, batch, causal, window_size, value_query, asked)
    else:
        call = _of_vllm(query, key, value, batch, causal, window_size, value_query, asked, is_scheduled=is_scheduled)
    return with_lse(call) if return_lse else output_of(call)


def no_backward() -> str | None:
    """Return why it cannot be differentiated: vLLM's library has no backward."""
    return None if is_installed(INTERFACE) else f"{INTERFACE} is not installed"


def prepare_for_gradients(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    batch: Batch,
    softmax_scale: float | None = None,
    causal: bool = True,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    deterministic: bool = False,
    return_lse: bool = False,
) -> Call:
    """Prepare `flash_attn_varlen_func` of its own package over rows, to be differentiated."""
    asked = dict(max_seqlen_q=batch.max_query_len, softcap=softcap, deterministic=deterministic)
    asked |= dict(softmax_scale=query.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale)
    call = _of_interface(query, key, value, batch, causal, window_size, None, asked)
    return with_lse(call) if return_lse else output_of(call)


def prepare_latents(
    query: Tensor,
    cache: Tensor,
    batch: Batch,
    latent_rank: int,
    softmax_scale: float,
    return_lse: bool = False,
    batch_invariant: bool = False,
) -> Call:
    """Prepare a call over latents: its second query meets the values."""
    pages = cache[:, :, None, : query.shape[-1]]
    tensors = query[..., latent_rank:], pages[..., latent_rank:], pages[..., :latent_rank]
    asked: dict[str, Any] = dict(return_lse=return_lse, batch_invariant=batch_invariant)
    return prepare(*tensors, batch, softmax_scale, **asked, value_query=query[..., :latent_rank])


def _of_interface(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    batch: Batch,
    causal: bool,
    window_size: tuple[int, int],
    value_query: Tensor | None,
    asked: dict[str, Any],
) -> Call:
    module = importlib.import_module(INTERFACE)
    asked |= dict(cu_seqlens_q=batch.cu_seqlens_q, causal=causal, window_size=window_size, qv=value_query)
    if batch.block_table is None:
        where = dict(cu_seqlens_k=batch.cu_seqlens_k, max_seqlen_k=batch.max_seq_len, return_attn_probs=True)
        return partial(module.flash_attn_varlen_func, query, key, value, **where, **asked)
    where = dict(cache_seqlens=batch.seq_lens, page_table=batch.block_table, return_softmax_lse=True)
    return partial(module.flash_attn_with_kvcache, query, key, value, **where, **asked)


def _of_vllm(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    batch: Batch,
    causal: bool,
    window_size: tuple[int, int],
    value_query: Tensor | None,
    asked: dict[str, Any],
    *,
    is_scheduled: bool,
) -> Call:
    library = getattr(torch.ops, LIBRARY)
    where: dict[str, Any] = dict(seqused_k=batch.seq_lens, page_table=batch.block_table)
    if batch.block_table is None:
        where = dict(cu_seqlens_k=batch.cu_seqlens_k)
    mask = dict(is_causal=causal, window_size_left=window_size[0], window_size_right=window_size[1])
    of_batch = dict(cu_seqlens_q=batch.cu_seqlens_q, max_seqlen_k=batch.max_seq_len)
    if is_scheduled:
        where["scheduler_metadata"] = library.get_scheduler_metadata(
            batch_size=batch.num_seqs,
            max_seqlen_q=batch.max_query_len,
            num_heads=query.shape[1],
            num_heads_k=key.shape[-2],
            headdim=query.shape[2],
            headdim_v=value.shape[-1],
            qkv_dtype=query.dtype,
            seqused_k=batch.seq_lens,
            page_size=key.shape[1],
            max_seqlen_k_new=0,
            has_softcap=False,
            num_splits=SPLITS,
            pack_gqa=None,
            sm_margin=0,
            **dict.fromkeys(("cu_seqlens_k", "cu_seqlens_k_new", "seqused_q", "leftpad_k")),
            **of_batch,
            **mask,
        )
    tensors = dict(q=query, k=key, v=value, q_v=value_query)
    return partial(library.fwd, **(UNUSED | tensors | of_batch | mask | where | asked))
