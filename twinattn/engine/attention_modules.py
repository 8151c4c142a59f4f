"""The attention modules of transformers that compute what an engine has to: between their projections, over its pools.

Most models call their attention through transformers' `AttentionInterface`, see `models`. The `forward` of these
modules is replaced while an engine runs the model; projections, norms and rotary positions stay the module's own.

    class                                            what is replaced
    BloomAttention, MptAttention, FalconAttention    attention that calls no interface, and its bias
    DiffLlamaAttention                               two calls of the interface, and the subtraction
    Llama4TextAttention                              the scale of queries by position, which takes rows for positions
"""

import importlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor

UnderWay = Callable[[], tuple[Any, Any] | None]  # returns the pools of the layers and the step while an engine runs


def replace_attention(model: Any, under_way: UnderWay) -> None:
    """Make the modules of a model that are in `REPLACED` call the engine that runs it; without one they are as before.

    Args:
        model: the model.
        under_way: returns the pools of the model's layers and the step while an engine runs it, else None.
    """
    for module in model.modules():
        for base in type(module).__mro__:
            if base.__name__ in REPLACED:
                attention, alibi_slopes = REPLACED[base.__name__]
                module.forward = partial(_forward, module, under_way, attention, alibi_slopes(module))


def _forward(
    module: Any,
    under_way: UnderWay,
    attention: Callable[..., Tensor],
    alibi_slopes: Float[Tensor, "h"] | None,
    hidden_states: Float[Tensor, "..."],
    *args: Any,
    **options: Any,
) -> Any:
    """Call an attention of `REPLACED` in place of a `forward`, if an engine runs the model; else it is what it was."""
    running = under_way()
    if "layer_pools" in options:
        running = options.pop("layer_pools"), options.pop("step")
    if running is None:
        return type(module).forward(module, hidden_states, *args, **options)
    pools, step = running
    attend = partial(pools.attend, module, alibi_slopes=alibi_slopes)
    return attention(module, attend, hidden_states, *args, step=step, **options), None


def _split_heads(x: Float[Tensor, "1 t width"], head_size: int) -> Float[Tensor, "1 h t d"]:
    return rearrange(x, "1 t (h d) -> 1 h t d", d=head_size)


def _project(module: Any, hidden_states: Float[Tensor, "1 t width"]) -> Iterator[Float[Tensor, "1 _ t d"]]:
    """Yield the queries, keys and values of a module whose projections have the names of Llama's."""
    for project in (module.q_proj, module.k_proj, module.v_proj):
        yield _split_heads(project(hidden_states), module.head_dim)


def _merge_heads(x: Float[Tensor, "1 t h d"]) -> Float[Tensor, "1 t width"]:
    return rearrange(x, "1 t h d -> 1 t (h d)")


def _code(module: Any) -> Any:
    """Return the Python module that a module's class stands in."""
    return importlib.import_module(type(module).__module__)


def _differential_attention(
    module: Any,
    attend: Callable[..., Tensor],
    hidden_states: Float[Tensor, "1 t width"],
    position_embeddings: tuple[Tensor, Tensor],
    attention_mask: Tensor | None = None,
    **options: Any,
) -> Float[Tensor, "1 t width"]:
    """Take DiffLlama between its projections: it subtracts and norms around two calls of the interface."""
    query, key, value = _project(module, hidden_states)
    query, key = _code(module).apply_rotary_pos_emb(query, key, *position_embeddings)
    out: Tensor = module.o_proj(_merge_heads(attend(query, key, value, **options)))
    return out


def _llama4_attention(
    module: Any,
    attend: Callable[..., Tensor],
    hidden_states: Float[Tensor, "1 t width"],
    position_embeddings: Tensor,
    attention_mask: Tensor | None = None,
    *,
    step: Any,
    **options: Any,
) -> Float[Tensor, "1 t width"]:
    """Take Llama 4, whose layers without rotary positions scale each query by the position of its token.

    The module's own code counts positions along its rows, and those of a step are of several sequences.

    Source: Meta 2025, Llama 4 (`attn_temperature_tuning`); Nakanishi 2025, "Scalable-Softmax Is Superior for
        Attention".
    """
    query, key, value = _project(module, hidden_states)
    if module.use_rope:
        rows = (rearrange(x, "1 h t d -> 1 t h d") for x in (query, key))
        turned = _code(module).apply_rotary_emb(*rows, position_embeddings)
        query, key = (rearrange(x, "1 t h d -> 1 h t d") for x in turned)
    if hasattr(module, "qk_norm"):
        query, key = module.qk_norm(query), module.qk_norm(key)
    if module.attn_temperature_tuning and not module.use_rope:
        periods = torch.floor((step.positions.float() + 1.0) / module.floor_scale)
        query = (query * (torch.log1p(periods) * module.attn_scale + 1.0)[:, None]).to(query.dtype)
    dropout = module.attention_dropout if module.training else 0.0
    options |= dict(step=step, scaling=module.scaling, dropout=dropout)
    out: Tensor = module.o_proj(_merge_heads(attend(query, key, value, **options)))
    return out


def _bloom_attention(
    module: Any,
    attend: Callable[..., Tensor],
    hidden_states: Float[Tensor, "1 t width"],
    residual: Float[Tensor, "1 t width"],
    *,
    alibi: Tensor,
    attention_mask: Tensor | None,
    **options: Any,
) -> Float[Tensor, "1 t width"]:
    """Take Bloom, whose bias is `slope * key position`: a constant more for each query, so the same softmax."""
    tokens = module._reshape(module.query_key_value(hidden_states))
    dropout = max(module.attention_dropout.p, module.hidden_dropout) if module.training else 0.0
    out: Tensor = module.dense(
        _merge_heads(attend(*tokens, scaling=module.inv_norm_factor, dropout=dropout, **options))
    )
    return out + residual


def _mpt_attention(
    module: Any,
    attend: Callable[..., Tensor],
    hidden_states: Float[Tensor, "1 t width"],
    *,
    position_bias: Tensor,
    attention_mask: Tensor | None,
    **options: Any,
) -> Float[Tensor, "1 t width"]:
    """Take MPT, whose bias is `slope * (key position - last position)`: the same softmax too."""
    fused = module.Wqkv(hidden_states)
    if module.clip_qkv:
        fused = fused.clamp(min=-module.clip_qkv, max=module.clip_qkv)
    tokens = (_split_heads(x, module.head_dim) for x in fused.chunk(3, dim=2))
    dropout = module.attn_dropout_p if module.training else 0.0
    out: Tensor = module.out_proj(
        _merge_heads(attend(*tokens, scaling=module.softmax_scale, dropout=dropout, **options))
    )
    return out


def _falcon_attention(
    module: Any,
    attend: Callable[..., Tensor],
    hidden_states: Float[Tensor, "1 t width"],
    *,
    alibi: Tensor | None,
    attention_mask: Tensor | None,
    position_embeddings: tuple[Tensor, Tensor],
    **options: Any,
) -> Float[Tensor, "1 t width"]:
    """Take Falcon, with rotary positions or with ALiBi."""
    fused = module.query_key_value(hidden_states)
    query, key, value = (rearrange(x, "1 t h d -> 1 h t d") for x in module._split_heads(fused))
    if module.new_decoder_architecture:  # repeats each KV head for its query heads
        key, value = (x[:, :: module.num_heads // module.num_kv_heads] for x in (key, value))
    if alibi is None:
        query, key = _code(module).apply_rotary_pos_emb(query, key, *position_embeddings)
    dropout = module.attention_dropout.p if module.training else 0.0
    options |= dict(scaling=module.inv_norm_factor, dropout=dropout)
    out: Tensor = module.dense(_merge_heads(attend(query, key, value, **options)))
    return out


def _no_slopes(module: Any) -> None:
    """Return None, where there is no ALiBi."""


def _bloom_slopes(module: Any) -> Float[Tensor, "h"]:
    """Return the slopes of ALiBi in Bloom's code: what it adds to the score of a key at position 1."""
    mask = torch.ones(1, 2, dtype=torch.int64, device=module.dense.weight.device)
    bias: Tensor = _code(module).build_alibi_tensor(mask, module.num_heads, torch.float32)
    return bias[:, 0, 1]


def _mpt_slopes(module: Any) -> Float[Tensor, "h"]:
    """Return the slopes of ALiBi in MPT's code: what it takes off the score of the last key but one."""
    bias: Tensor = _code(module).build_mpt_alibi_tensor(module.n_heads, 2, device=module.out_proj.weight.device)
    return -bias[:, 0, 0]


def _falcon_slopes(module: Any) -> Float[Tensor, "h"] | None:
    """Return the slopes of a Falcon with ALiBi, whose bias is divided by `sqrt(d)` as the scores are.

    Its code rounds a bias to bfloat16: here the slopes are rounded so, but not their products with positions past 256.
    """
    if not module.config.alibi:
        return None
    return _bloom_slopes(module).bfloat16().float() * module.inv_norm_factor


REPLACED: dict[str, tuple[Callable[..., Tensor], Callable[[Any], Tensor | None]]] = {
    # Modules that compute attention themselves, by the name of their class: what to call instead, and their slopes.
    "DiffLlamaAttention": (_differential_attention, _no_slopes),
    "Llama4TextAttention": (_llama4_attention, _no_slopes),
    "BloomAttention": (_bloom_attention, _bloom_slopes),
    "MptAttention": (_mpt_attention, _mpt_slopes),
    "FalconAttention": (_falcon_attention, _falcon_slopes),
}
