"""vLLM's attention backends as vLLM constructs them: its configuration, a layer, the metadata builder, then a step.

    a layer    `Attention(...)` picks nothing itself here: the backend is named; it makes the backend's implementation
    a write    `impl.do_kv_cache_update(...)`, as the layer's custom operator calls it
    a step     `builder.build(0, CommonAttentionMetadata(...))`, then `impl.forward(...)` into an output that is there

No model is made, and nothing is distributed. A configuration comes from a folder with a model's sizes alone, as vLLM
makes one for a server, and is kept for its sizes.
"""

import tempfile
from functools import cache
from typing import Any

import torch
from torch import Tensor

from refattn.batch import Batch
from refattn.scales import Fp8Scales
from twinattn.libraries import Call, cannot_import

LAYER = "model.layers.0.attn"
LONGEST = 1 << 17  # tokens of a sequence; only tables of positions would grow with it
FORMATS = {torch.float8_e4m3fn: "fp8_e4m3", torch.float8_e5m2: "fp8_e5m2"}


def available() -> str | None:
    """Return why vLLM cannot be used."""
    return cannot_import("vllm", "vllm.v1.attention.backends.registry")


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
    scales: Fp8Scales | None = None,
    *,
    backend: str,
) -> Call:
    """Prepare a layer of a backend, which is causal: write the pool through it, and build the metadata of the step.

    Args:
        query: `[t, h, d]`.
        key_cache: `[n, p, hk, d]`; with scales the values in fp8, which are laid down as they are.
        value_cache: likewise.
        batch: the step.
        softmax_scale: `d ** -0.5` if None.
        window_size: of the mask; a layer of vLLM has one to the left alone.
        softcap: of the scores.
        alibi_slopes: `[h]`.
        sinks: `[h]`.
        scales: of an fp8 pool; vLLM has one number for the keys of a layer, one for its values, and one for its
            queries if the backend takes these in fp8.
        backend: vLLM's name, as FLASH_ATTN.

    Raises:
        NotImplementedError: for what vLLM's validation refuses, with its reasons, and for what its layers do not have.
    """
    from vllm.config import set_current_vllm_config

    if window_size[1] > 0:
        raise NotImplementedError("a layer of vLLM has a window to the left alone")
    blocks, block_size, kv_heads, size = key_cache.shape
    stored = "auto" if scales is None else FORMATS[scales.format]
    config = _config(query.shape[1], kv_heads, size, block_size, query.dtype, stored)
    kind = _backend(backend)
    _validate(kind, query, size, block_size, stored, sinks, window_size)
    more = {} if sinks is None else dict(sinks=sinks)
    config.compilation_config.static_forward_context.clear()
    from vllm.model_executor.layers.attention import Attention

    with set_current_vllm_config(config), torch.device(query.device):
        layer = Attention(
            query.shape[1],
            size,
            size**-0.5 if softmax_scale is None else softmax_scale,
            kv_heads,
            None if alibi_slopes is None else alibi_slopes.tolist(),
            cache_config=config.cache_config,
            logits_soft_cap=softcap or None,
            per_layer_sliding_window=window_size[0] + 1 if window_size[0] >= 0 else None,
            prefix=LAYER,
            attn_backend=kind,
            **more,
        )
        spec = layer.get_kv_cache_spec(config)
        builder = kind.get_builder_cls()(spec, [LAYER], config, query.device)
    pool = _pool(layer, key_cache, value_cache, scales)
    if scales is not None:
        query = _set_scales(layer, query, scales)
    metadata = builder.build(0, _common(batch, query))
    out = torch.zeros(query.shape, dtype=config.model_config.dtype, device=query.device)

    def call() -> Tensor:
        layer.impl.forward(layer, query, None, None, pool, metadata, out)
        return out

    return call


@cache
def _config(heads: int, kv_heads: int, size: int, block_size: int, dtype: torch.dtype, stored: str) -> Any:
    """Make vLLM's configuration of a model with these sizes, as a server makes it."""
    from transformers import Qwen3Config
    from vllm.engine.arg_utils import EngineArgs

    with tempfile.TemporaryDirectory() as folder:
        Qwen3Config(
            vocab_size=32,
            hidden_size=heads * size,
            intermediate_size=32,
            num_hidden_layers=1,
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            head_dim=size,
            max_position_embeddings=LONGEST,
            architectures=["Qwen3ForCausalLM"],
        ).save_pretrained(folder)
        arguments = EngineArgs(
            model=folder,
            skip_tokenizer_init=True,
            dtype=str(dtype).removeprefix("torch."),
            max_model_len=LONGEST,
            block_size=block_size,
            kv_cache_dtype=stored,
            enforce_eager=True,
        )
        return arguments.create_engine_config()


def _backend(name: str) -> Any:
    """Return a backend's class by vLLM's name; ours are registered first."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    from twinattn.integrations.vllm import register

    register()
    return AttentionBackendEnum[name].get_class()


def _validate(
    kind: Any, query: Tensor, size: int, block_size: int, stored: str, sinks: Tensor | None, window: tuple[int, int]
) -> None:
    """Ask a backend what vLLM asks it before it loads a model; on a CPU, where vLLM does not, for the head size alone.

    Raises:
        NotImplementedError: with its reasons.
    """
    from vllm.platforms import current_platform

    if query.device.type != "cuda":
        if not kind.supports_head_size(size):
            raise NotImplementedError("vLLM refuses: head_size not supported")
        return
    reasons = kind.validate_configuration(
        head_size=size,
        dtype=query.dtype,
        kv_cache_dtype=stored,
        block_size=block_size,
        use_mla=False,
        has_sink=sinks is not None,
        use_sparse=False,
        use_mm_prefix=False,
        use_per_head_quant_scales=False,
        device_capability=current_platform.get_device_capability(),
        attn_type="decoder",
        has_sliding_window=window[0] >= 0,
    )
    if reasons:
        raise NotImplementedError(f"vLLM refuses: {', '.join(reasons)}")


def _pool(layer: Any, key_cache: Tensor, value_cache: Tensor, scales: Fp8Scales | None) -> Tensor:
    """Make vLLM's pool `[n, hk, p, 2 d]` in the backend's layout, and write all tokens through the backend.

    Quantized values are laid down as they are: a write would quantize once more.
    """
    from vllm.v1.kv_cache_layout import KVCacheLayout

    blocks, block_size, kv_heads, size = key_cache.shape
    stored = key_cache.dtype if scales is None else torch.uint8
    (layout, *_) = layer.attn_backend.supported_kv_cache_layouts() or (KVCacheLayout.LBNHC,)
    order = layout.layer_view_order
    shape = blocks, kv_heads, block_size, 2 * size
    memory = torch.zeros([shape[axis] for axis in order], dtype=stored, device=key_cache.device)
    pool = memory.permute([order.index(axis) for axis in range(4)])
    if scales is not None:
        sides = [cache.view(torch.uint8).transpose(1, 2) for cache in (key_cache, value_cache)]
        return pool.copy_(torch.cat(sides, dim=-1))
    slots = torch.arange(blocks * block_size, device=pool.device)
    tokens = [cache.reshape(-1, kv_heads, size).contiguous() for cache in (key_cache, value_cache)]
    layer.impl.do_kv_cache_update(layer, *tokens, pool, slots)
    return pool


def _set_scales(layer: Any, query: Tensor, scales: Fp8Scales) -> Tensor:
    """Give a layer its scales, and return the queries as the layer passes them on.

    Raises:
        NotImplementedError: for scales per head or sequence, and if queries are to be in fp8 and the backend does not
            take them so, or the other way round.
    """
    numbers = dict(k=scales.key, v=scales.value, q=scales.query)
    quantizes = layer.impl.supports_quant_query_input and layer.query_quant is not None
    if any(isinstance(x, Tensor) for x in numbers.values()):
        raise NotImplementedError("a layer of vLLM has one number for all its keys, and one for its values")
    if quantizes is not (scales.query is not None):
        raise NotImplementedError(f"queries in fp8: {quantizes} for this backend, asked for {scales.query is not None}")
    for name, x in numbers.items():
        if x is not None:
            getattr(layer, f"_{name}_scale").fill_(x)
            setattr(layer, f"_{name}_scale_float", float(x))
    if not quantizes:
        return query
    rows, _ = layer.query_quant(query.reshape(len(query), -1), layer._q_scale)
    return rows.view(query.shape)


def _common(batch: Batch, query: Tensor) -> Any:
    """Make vLLM's metadata of a step."""
    from vllm.v1.attention.backend import CommonAttentionMetadata

    starts = batch.cu_seqlens_q.cpu()
    return CommonAttentionMetadata(
        query_start_loc=batch.cu_seqlens_q,
        query_start_loc_cpu=starts,
        seq_lens=batch.seq_lens,
        num_reqs=batch.num_seqs,
        num_actual_tokens=int(starts[-1]),
        max_query_len=batch.max_query_len,
        max_seq_len=batch.max_seq_len,
        block_table_tensor=batch.block_table,
        slot_mapping=torch.full((len(query),), -1, device=query.device),
        seq_lens_cpu_upper_bound=batch.seq_lens.cpu(),
    )
