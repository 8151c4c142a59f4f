"""Kernels that people use, each called as its users call it: short examples of adapters.

An adapter takes only those arguments of a path that its library supports; what it does not take is not tested. It
converts shapes and names to those of the path (an LSE `[h, t]` to `[t, h]`), and fixes nothing.
"""

import importlib.util
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from einops import rearrange
from torch import Tensor
from torch.nn import functional

from refattn.conformance.example import PATHS
from refattn.conformance.kernel import Kernel, claims, find
from refattn.interface import Batch

HALVES = (torch.float16, torch.bfloat16)
WORKSPACE = 2**27  # bytes that FlashInfer wants for its partial results
FA3_LIBRARY = "_vllm_fa3_C"  # vLLM's build of FlashAttention-3, and the namespace of its operators
RECTANGLE = "its queries are a rectangle: as many of each sequence"
INNER_STRIDE = "must have contiguous last dimension"  # what FlashAttention and FlashMLA raise
PLANS_ON_HOST = "plans on the host, before the step"


@dataclass(frozen=True)
class Adapter:
    """A kernel that somebody ships.

    Attributes:
        name: by which it is asked for.
        path: what it computes.
        function: the adapter.
        package: its module; None if it comes with torch.
        distribution: whose version is reported.
        needs_cuda: whether it runs on a GPU only.
        missing: says why it cannot be loaded, if that takes more than a look for the package.
    """

    name: str
    path: str
    function: Callable[..., Any]
    package: str | None
    distribution: str
    needs_cuda: bool = True
    missing: Callable[[], str | None] | None = None

    def why_not(self, device: str) -> str | None:
        """Return why it does not run here, or None if it does."""
        if self.missing is not None:
            reason = self.missing()
        elif self.package is not None and not _is_installed(self.package):
            reason = f"{self.package} is not installed"
        else:
            reason = None
        if reason is None and self.needs_cuda and not device.startswith("cuda"):
            reason = "runs on a GPU only"
        return reason

    def kernel(self) -> Kernel:
        """Return what is checked."""
        if self.package is not None and self.function is _module:
            kernel = find(f"{self.package}.{self.path}")
            return Kernel(self.name, self.path, kernel.function, kernel.plan)
        return Kernel(self.name, self.path, self.function)


def _module() -> None:
    """Stand for a module that has the path's own functions."""


def _is_installed(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except Exception:  # noqa: BLE001  looking imports the parent package, which may be missing, or broken in any way
        return False


ADAPTERS: dict[str, Adapter] = {}


def adapter(
    name: str, path: str, package: str | None, distribution: str, **more: Any
) -> Callable[[Callable], Callable]:
    """Register an adapter."""

    def decorate(function: Callable) -> Callable:
        ADAPTERS[name] = Adapter(name, path, function, package, distribution, **more)
        return function

    return decorate


def kernel_of(target: str | Callable[..., Any] | ModuleType | Kernel, path: str | None = None) -> Kernel:
    """Find a kernel by the name of an adapter, or as `refattn.conformance.kernel.find` does.

    Raises:
        BadKernelError: if there is none.
    """
    if isinstance(target, Kernel):
        return target
    known = ADAPTERS.get(target) if isinstance(target, str) else None
    if known is not None and path in (None, known.path):
        return known.kernel()
    return find(target, path)


for package in ("refattn", "fastattn"):
    for path in PATHS:
        ADAPTERS[f"{package}.{path}"] = Adapter(
            f"{package}.{path}", path, _module, package, "twinattn", needs_cuda=False
        )


# --- PyTorch ---


@adapter("sdpa", "dense", None, "torch", needs_cuda=False)
def sdpa(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    batch: Batch,
    softmax_scale: float | None = None,
    causal: bool = True,
) -> Tensor:
    """Call `F.scaled_dot_product_attention` for each sequence, with an explicit mask where `is_causal` is another one.

    `is_causal` is aligned top-left, as its documentation says; the mask here is bottom-right.
    """
    out = query.new_zeros(*query.shape[:2], value.shape[-1])
    for (q0, q1), (k0, k1) in zip(batch.query_rows(), batch.key_rows(), strict=True):
        t, s = q1 - q0, k1 - k0
        mask = None
        if causal and t != s:
            mask = torch.ones(t, s, dtype=torch.bool, device=query.device).tril(s - t)
        q, k, v = (rearrange(x, "t h d -> 1 h t d") for x in (query[q0:q1], key[k0:k1], value[k0:k1]))
        answer = functional.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=causal and mask is None, scale=softmax_scale, enable_gqa=True
        )
        out[q0:q1] = rearrange(answer, "1 h t d -> t h d")
    return out


FLEX: dict[str, Any] = dict(
    heads=((4, 2),),
    head_sizes=((64, 64),),
    max_examples=6,
    not_claimed={
        "range": "would be compiled again",
        "strides": "the adapter copies its inputs into one row",
        "last stride": "the adapter copies its inputs into one row",
    },
)


@adapter("flex", "dense", None, "torch", needs_cuda=False)
@claims(**FLEX)
def flex(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    batch: Batch,
    causal: bool = True,
    window_size: tuple[int, int] = (-1, -1),
) -> Tensor:
    """Call FlexAttention, compiled, over all sequences in one row: a token sees its own document."""
    out, _ = _flex(query, key, value, batch, causal, window_size, return_lse=False)
    return out


@adapter("flex-lse", "dense", None, "torch")
@claims(**FLEX)
def flex_with_lse(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    batch: Batch,
    causal: bool = True,
    window_size: tuple[int, int] = (-1, -1),
) -> tuple[Tensor, Tensor | None]:
    """Call it for its LSE, too, which it does not return on a CPU."""
    return _flex(query, key, value, batch, causal, window_size, return_lse=True)


def _flex(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    batch: Batch,
    causal: bool,
    window_size: tuple[int, int],
    *,
    return_lse: bool,
) -> tuple[Tensor, Tensor | None]:
    from torch.nn.attention.flex_attention import create_block_mask

    device, (t, s) = query.device, (len(query), len(key))
    rows, columns = (max(256, 2 ** math.ceil(math.log2(max(n, 1)))) for n in (t, s))  # few shapes to compile for
    of_query, where = _documents(batch.query_lens, rows, batch.context_lens)
    of_key, at = _documents(batch.seq_lens, columns, torch.zeros_like(batch.seq_lens))
    left = window_size[0] if window_size[0] >= 0 else columns
    right = 0 if causal else window_size[1] if window_size[1] >= 0 else columns
    bounds = torch.tensor([left, right], device=device)

    def sees(_b: Tensor, _h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        distance = where[i] - at[j]
        return (of_query[i] == of_key[j]) & (of_key[j] >= 0) & (distance <= bounds[0]) & (-distance <= bounds[1])

    blocks = create_block_mask(sees, None, None, rows, columns, device=device.type)
    q = functional.pad(rearrange(query, "t h d -> 1 h t d"), (0, 0, 0, rows - t))
    k, v = (functional.pad(rearrange(x, "s h d -> 1 h s d"), (0, 0, 0, columns - s)) for x in (key, value))
    answer = _compiled_flex()(
        q.contiguous(), k.contiguous(), v.contiguous(), block_mask=blocks, enable_gqa=True, return_lse=return_lse
    )
    out, lse = answer if return_lse else (answer, None)
    out = rearrange(out, "1 h t d -> t h d")[:t]
    return out, None if lse is None else rearrange(lse, "1 h t -> t h")[:t]


def _documents(lengths: Tensor, size: int, first: Tensor) -> tuple[Tensor, Tensor]:
    """Return of each row whose it is, -1 of nobody, and its position."""
    rows = torch.arange(size, device=lengths.device)
    ends = lengths.cumsum(0)
    owner = torch.searchsorted(ends, rows, right=True)
    inside = owner < len(lengths)
    of = owner.clamp(max=len(lengths) - 1)
    return torch.where(inside, of, -1), rows - (ends - lengths)[of] + first[of]


@cache
def _compiled_flex() -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=False)


# --- FlashAttention ---


def _no_fa2() -> str | None:
    """Return why there is no FlashAttention-2: the folder `flash_attn` may hold FlashAttention-4 alone."""
    if not _is_installed("flash_attn_2_cuda"):
        return "flash_attn is not installed"
    return None


@adapter("fa2", "dense", "flash_attn", "flash-attn", missing=_no_fa2)
@claims(dtypes=HALVES)
def fa2(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    batch: Batch,
    softmax_scale: float | None = None,
    causal: bool = True,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
) -> Any:
    """Call `flash_attn_varlen_func` of the package `flash-attn` over rows."""
    from flash_attn import flash_attn_varlen_func

    out, lse, _ = flash_attn_varlen_func(
        *(query, key, value, batch.cu_seqlens_q, batch.cu_seqlens_k, batch.max_query_len, batch.max_seq_len),
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=window_size,
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        return_attn_probs=True,  # this is how to get the LSE
    )
    return out, lse.T


@adapter("fa2-pages", "chunked_prefill", "flash_attn", "flash-attn", missing=_no_fa2)
@claims(dtypes=HALVES, block_sizes=(256,))
def fa2_pages(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    batch: Batch,
    softmax_scale: float | None = None,
    causal: bool = True,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
) -> Any:
    """Call `flash_attn_varlen_func` of the package `flash-attn` over pages, of a multiple of 256."""
    from flash_attn import flash_attn_varlen_func

    out, lse, _ = flash_attn_varlen_func(
        *(query, key_cache, value_cache),
        *(batch.cu_seqlens_q, batch.cu_seqlens_k, batch.max_query_len, batch.max_seq_len),
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=window_size,
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        block_table=batch.block_table,
        return_attn_probs=True,
    )
    return out, lse.T


@adapter("fa2-decode", "chunked_prefill", "flash_attn", "flash-attn", missing=_no_fa2)
@claims(
    dtypes=HALVES,
    block_sizes=(256,),
    max_query_len=1,
    not_claimed={"empty rows": RECTANGLE, "padding": RECTANGLE},
    refusals=(INNER_STRIDE,),
)
def fa2_decode(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    batch: Batch,
    softmax_scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
) -> Any:
    """Call `flash_attn_with_kvcache` of the package `flash-attn`, for one query per sequence."""
    from flash_attn import flash_attn_with_kvcache

    out, lse = flash_attn_with_kvcache(
        *(query[:, None], key_cache, value_cache),
        cache_seqlens=batch.seq_lens,
        block_table=batch.block_table,
        softmax_scale=softmax_scale,
        causal=True,
        window_size=window_size,
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        return_softmax_lse=True,
    )
    return out[:, 0], lse[..., 0]


@cache
def _no_fa3() -> str | None:
    """Return why there is no FlashAttention-3, or None once one is loaded."""
    if _is_installed("flash_attn_interface"):
        return None
    vllm = importlib.util.find_spec("vllm")
    places = [Path(folder, "vllm_flash_attn") for folder in (vllm and vllm.submodule_search_locations) or ()]
    files = [folder / f"{FA3_LIBRARY}.abi3.so" for folder in places]
    alone = importlib.util.find_spec(FA3_LIBRARY)  # its name is that of a module
    files += [Path(alone.origin)] if alone and alone.origin else []
    for file in files:
        if file.is_file():
            try:
                torch.ops.load_library(file)
            except OSError as error:
                return f"{file} cannot be loaded: {error}"
            return None
    return f"neither flash_attn_interface nor vLLM's {FA3_LIBRARY} is installed"


@adapter("fa3", "dense", None, "vllm", missing=_no_fa3)
@claims(dtypes=HALVES, refusals=(INNER_STRIDE,))
def fa3(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    batch: Batch,
    softmax_scale: float | None = None,
    causal: bool = True,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
) -> Any:
    """Call FlashAttention-3 over rows: its own package, or the library in vLLM's wheel."""
    return _fa3(query, key, value, batch, softmax_scale, causal, window_size, softcap, cu_seqlens_k=batch.cu_seqlens_k)


@adapter("fa3-pages", "chunked_prefill", None, "vllm", missing=_no_fa3)
@claims(dtypes=HALVES, refusals=(INNER_STRIDE,))
def fa3_pages(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    batch: Batch,
    softmax_scale: float | None = None,
    causal: bool = True,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
) -> Any:
    """Call FlashAttention-3 over pages."""
    where: dict[str, Any] = dict(seqused_k=batch.seq_lens, page_table=batch.block_table)
    return _fa3(query, key_cache, value_cache, batch, softmax_scale, causal, window_size, softcap, **where)


@adapter("fa3-latents", "mla", None, "vllm", missing=_no_fa3)
@claims(
    dtypes=HALVES,
    heads=((16, 1), (128, 1)),
    head_sizes=((576, 512),),
    block_sizes=(64,),
    refusals=(INNER_STRIDE,),
)
def fa3_latents(query: Tensor, cache: Tensor, batch: Batch, latent_rank: int, softmax_scale: float) -> Any:
    """Call FlashAttention-3 over latents: its second query meets the values."""
    pages = cache[:, :, None, : query.shape[-1]]
    where: dict[str, Any] = dict(seqused_k=batch.seq_lens, page_table=batch.block_table)
    tensors = query[..., latent_rank:], pages[..., latent_rank:], pages[..., :latent_rank]
    return _fa3(*tensors, batch, softmax_scale, True, (-1, -1), 0.0, second=query[..., :latent_rank], **where)


def _fa3(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    batch: Batch,
    softmax_scale: float | None,
    causal: bool,
    window_size: tuple[int, int],
    softcap: float,
    second: Tensor | None = None,
    **where: Any,
) -> Any:
    asked = dict(
        max_seqlen_q=batch.max_query_len,
        softmax_scale=query.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale,
        softcap=softcap,
        num_splits=0,
    )
    if _is_installed("flash_attn_interface"):
        module = importlib.import_module("flash_attn_interface")
        asked |= dict(cu_seqlens_q=batch.cu_seqlens_q, causal=causal, window_size=window_size, qv=second)
        if "page_table" in where:
            out, lse, *_ = module.flash_attn_with_kvcache(
                *(query, key, value),
                cache_seqlens=where["seqused_k"],
                page_table=where["page_table"],
                return_softmax_lse=True,
                **asked,
            )
        else:
            out, lse, *_ = module.flash_attn_varlen_func(
                query, key, value, max_seqlen_k=batch.max_seq_len, return_attn_probs=True, **where, **asked
            )
        return out, lse.T
    unused = dict.fromkeys(
        (
            *("k_new", "v_new", "out", "cu_seqlens_k_new", "seqused_q", "kv_batch_idx", "leftpad_k"),
            *("rotary_cos", "rotary_sin", "seqlens_rotary", "q_descale", "k_descale", "v_descale"),
            *("scheduler_metadata", "pack_gqa", "s_aux", "cp_tot_seqused_k"),
            *("cu_seqlens_k", "seqused_k", "page_table"),
        )
    ) | dict(is_rotary_interleaved=True, sm_margin=0, cp_world_size=1, cp_rank=0)
    _no_fa3()  # loads the library, once in each process
    out, lse, *_ = getattr(torch.ops, FA3_LIBRARY).fwd(
        **{
            **unused,
            **dict(q=query, k=key, v=value, q_v=second, cu_seqlens_q=batch.cu_seqlens_q),
            **dict(max_seqlen_k=batch.max_seq_len, is_causal=causal),
            **dict(window_size_left=window_size[0], window_size_right=window_size[1]),
            **where,
            **asked,
        }
    )
    return out, lse.T


@adapter("fa4", "dense", "flash_attn.cute", "flash-attn-4")
@claims(dtypes=HALVES, heads=((1, 1), (4, 2)), head_sizes=((128, 128),))
def fa4(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    batch: Batch,
    softmax_scale: float | None = None,
    causal: bool = True,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
) -> Any:
    """Call `flash_attn_varlen_func` of the package `flash-attn-4` over rows."""
    where = dict(cu_seqlens_k=batch.cu_seqlens_k)
    return _fa4(query, key, value, batch, softmax_scale, causal, window_size, softcap, **where)


@adapter("fa4-pages", "chunked_prefill", "flash_attn.cute", "flash-attn-4")
@claims(dtypes=HALVES, heads=((1, 1), (4, 2)), head_sizes=((128, 128),), block_sizes=(128,))
def fa4_pages(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    batch: Batch,
    softmax_scale: float | None = None,
    causal: bool = True,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
) -> Any:
    """Call `flash_attn_varlen_func` of the package `flash-attn-4` over pages."""
    where = dict(seqused_k=batch.seq_lens, page_table=batch.block_table)
    return _fa4(query, key_cache, value_cache, batch, softmax_scale, causal, window_size, softcap, **where)


def _fa4(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    batch: Batch,
    softmax_scale: float | None,
    causal: bool,
    window_size: tuple[int, int],
    softcap: float,
    **where: Tensor | None,
) -> Any:
    from flash_attn.cute import flash_attn_varlen_func

    out, lse, *_ = flash_attn_varlen_func(
        *(query, key, value),
        cu_seqlens_q=batch.cu_seqlens_q,
        max_seqlen_q=batch.max_query_len,
        max_seqlen_k=batch.max_seq_len,
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=tuple(None if side < 0 else side for side in window_size),
        softcap=softcap,
        return_lse=True,
        **where,
    )
    return out, lse.T


# --- FlashInfer ---


@adapter("flashinfer", "chunked_prefill", "flashinfer", "flashinfer-python")
@claims(
    dtypes=HALVES,
    head_sizes=((128, 128),),
    block_sizes=(16, 64),
    not_claimed={"graph": PLANS_ON_HOST},
    refusals=("does not match qo_indptr",),
)
def flashinfer_pages(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    batch: Batch,
    softmax_scale: float | None = None,
    causal: bool = True,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
) -> Any:
    """Call FlashInfer's paged prefill. Its LSE is to the base 2, as its documentation says."""
    from flashinfer import BatchPrefillWithPagedKVCacheWrapper

    if window_size[1] > 0:
        raise NotImplementedError("FlashInfer's prefill has windows to the left only")
    wrapper = BatchPrefillWithPagedKVCacheWrapper(_workspace(query), "NHD")
    wrapper.plan(
        batch.cu_seqlens_q,
        *_flat_table(batch, key_cache.shape[1]),
        *(query.shape[1], key_cache.shape[2], query.shape[2], key_cache.shape[1]),
        causal=causal or window_size[1] == 0,
        window_left=window_size[0],
        sm_scale=softmax_scale,
        logits_soft_cap=softcap or None,
        q_data_type=query.dtype,
        kv_data_type=key_cache.dtype,
    )
    out, lse = wrapper.run(query, (key_cache, value_cache), return_lse=True)
    return out, lse * math.log(2)


@adapter("flashinfer-decode", "chunked_prefill", "flashinfer", "flashinfer-python")
@claims(
    dtypes=HALVES,
    heads=((1, 1), (4, 2), (8, 2)),
    head_sizes=((128, 128),),
    block_sizes=(16, 64),
    max_query_len=1,
    not_claimed={"graph": PLANS_ON_HOST, "empty rows": RECTANGLE, "padding": RECTANGLE},
)
def flashinfer_decode(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    batch: Batch,
    softmax_scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
) -> Any:
    """Call FlashInfer's paged decode, on tensor cores."""
    from flashinfer import BatchDecodeWithPagedKVCacheWrapper

    wrapper = BatchDecodeWithPagedKVCacheWrapper(_workspace(query), "NHD", use_tensor_cores=True)
    wrapper.plan(
        *_flat_table(batch, key_cache.shape[1]),
        *(query.shape[1], key_cache.shape[2], query.shape[2], key_cache.shape[1]),
        window_left=window_size[0],
        sm_scale=softmax_scale,
        logits_soft_cap=softcap or None,
        q_data_type=query.dtype,
        kv_data_type=key_cache.dtype,
    )
    out, lse = wrapper.run(query, (key_cache, value_cache), return_lse=True)
    return out, lse * math.log(2)


@adapter("flashinfer-latents", "mla", "flashinfer", "flashinfer-python")
@claims(
    dtypes=HALVES,
    heads=((16, 1), (128, 1)),
    head_sizes=((576, 512),),
    block_sizes=(64,),
    not_claimed={"graph": PLANS_ON_HOST},
)
def flashinfer_latents(query: Tensor, cache: Tensor, batch: Batch, latent_rank: int, softmax_scale: float) -> Any:
    """Call FlashInfer's latent attention."""
    from flashinfer.mla import BatchMLAPagedAttentionWrapper

    indptr, indices, _ = _flat_table(batch, cache.shape[1])
    wrapper = BatchMLAPagedAttentionWrapper(_workspace(query))
    wrapper.plan(
        qo_indptr=batch.cu_seqlens_q,
        kv_indptr=indptr,
        kv_indices=indices,
        kv_len_arr=batch.seq_lens,
        num_heads=query.shape[1],
        head_dim_ckv=latent_rank,
        head_dim_kpe=query.shape[2] - latent_rank,
        page_size=cache.shape[1],
        causal=True,
        sm_scale=softmax_scale,
        q_data_type=query.dtype,
        kv_data_type=cache.dtype,
    )
    out, lse = wrapper.run(
        q_nope=query[..., :latent_rank],
        q_pe=query[..., latent_rank:],
        ckv_cache=cache[..., :latent_rank],
        kpe_cache=cache[..., latent_rank : query.shape[2]],
        return_lse=True,
    )
    return out, lse * math.log(2)


@adapter("flashinfer-merge", "merge", "flashinfer", "flashinfer-python")
@claims(dtypes=HALVES)
def flashinfer_merge(outs: list[Tensor], lses: list[Tensor]) -> Any:
    """Call FlashInfer's `merge_states`, whose LSEs are to the base 2."""
    from flashinfer import merge_states

    out, lse = merge_states(torch.stack(outs, dim=1), torch.stack(lses, dim=1) / math.log(2))
    return out, lse * math.log(2)


def _workspace(x: Tensor) -> Tensor:
    return torch.zeros(WORKSPACE, dtype=torch.uint8, device=x.device)


def _flat_table(batch: Batch, block_size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Write the block table as FlashInfer wants it: where each row begins, all blocks, tokens in each last block."""
    table, lengths = batch.block_table, batch.seq_lens.tolist()
    assert table is not None
    counts = [-(-s // block_size) for s in lengths]
    indices = torch.cat([row[:count] for row, count in zip(table, counts, strict=True)])
    indptr = torch.tensor([0, *counts], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    last = torch.tensor([(s - 1) % block_size + 1 if s else 0 for s in lengths], dtype=torch.int32)
    return indptr.to(table.device), indices, last.to(table.device)


# --- FlashMLA ---


@adapter("flash_mla", "mla", "flash_mla", "sgl-flash-mla")
@claims(
    dtypes=HALVES,
    heads=((16, 1), (128, 1)),
    head_sizes=((576, 512),),
    block_sizes=(64,),
    max_query_len=1,
    not_claimed={"empty rows": RECTANGLE, "padding": RECTANGLE},
    refusals=(INNER_STRIDE,),
)
def flash_mla(query: Tensor, cache: Tensor, batch: Batch, latent_rank: int, softmax_scale: float) -> Any:
    """Call DeepSeek's FlashMLA, its half for Hopper, for one query per sequence."""
    from flash_mla import flash_mla_with_kvcache, get_mla_metadata

    schedule, _ = get_mla_metadata()
    out, lse, *_ = flash_mla_with_kvcache(
        query[:, None],
        cache[:, :, None, : query.shape[-1]],
        batch.block_table,
        batch.seq_lens,
        latent_rank,
        schedule,
        softmax_scale=softmax_scale,
        causal=True,
        use_legacy=True,
    )
    return out[:, 0], lse[..., 0]


# --- vLLM and SGLang ---


@adapter("vllm-triton", "chunked_prefill", "vllm.v1.attention.ops.triton_unified_attention", "vllm")
@claims(dtypes=HALVES)
def vllm_triton(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    batch: Batch,
    out: Tensor | None = None,
    softmax_scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Call the Triton attention of vLLM's backend `TRITON_ATTN`."""
    from vllm.v1.attention.ops.triton_unified_attention import unified_attention

    out = torch.empty_like(query) if out is None else out
    unified_attention(
        q=query,
        k=key_cache,
        v=value_cache,
        out=out,
        cu_seqlens_q=batch.cu_seqlens_q,
        max_seqlen_q=batch.max_query_len,
        seqused_k=batch.seq_lens,
        max_seqlen_k=batch.max_seq_len,
        softmax_scale=query.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale,
        causal=True,
        window_size=window_size,
        block_table=batch.block_table,
        softcap=softcap,
        q_descale=None,
        k_descale=None,
        v_descale=None,
        alibi_slopes=alibi_slopes,
        sinks=sinks,
    )
    return out


@adapter("vllm-merge", "merge", "vllm.v1.attention.ops.triton_merge_attn_states", "vllm")
@claims(parts=(2,))
def vllm_merge(outs: list[Tensor], lses: list[Tensor]) -> Any:
    """Call vLLM's merge of a prefix and a suffix; its LSEs are `[h, t]`."""
    from vllm.v1.attention.ops.triton_merge_attn_states import merge_attn_states

    out, (prefix, suffix) = torch.empty_like(outs[0]), (lse.T.contiguous() for lse in lses)
    lse = torch.empty_like(prefix)
    merge_attn_states(out, outs[0], prefix, outs[1], suffix, lse)
    return out, lse.T


@adapter("sglang-merge", "merge", "sglang.srt.layers.attention.triton_ops.merge_state", "sglang")
@claims(parts=(2,))
def sglang_merge(outs: list[Tensor], lses: list[Tensor]) -> Any:
    """Call SGLang's merge of a prefix and a suffix."""
    from sglang.srt.layers.attention.triton_ops.merge_state import merge_state_triton as merge_state

    return merge_state(outs[0], lses[0], outs[1], lses[1])
