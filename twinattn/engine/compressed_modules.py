"""The modules of transformers that compute entries ("compressors"): between their projections, over paged rows.

A compressor has a cache of its own, with a buffer of open rows, so its `forward` is replaced while an engine runs the
model. Projections, norms and rotary positions stay the module's own; the rows in pages, the entries of a step and their
selection are those of the twin. The layer's attention goes on by itself: it gets no entries from the module, and the
pools know which ones its queries see.

    class                        entries              which a query sees
    DeepseekV4HCACompressor      of many tokens       all that are complete
    DeepseekV4CSACompressor      that overlap         those that its indexer selects, by entries of index keys
"""

from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int64
from torch import Tensor

KINDS = ("DeepseekV4HCACompressor", "DeepseekV4CSACompressor")
INDEXER = "DeepseekV4Indexer"  # a part of the latter, which is not called by itself


class Rows(NamedTuple):
    """The values and the gates of new tokens, each row of one compressor."""

    value: Float[Tensor, "t w"]
    gate: Float[Tensor, "t w"]


def replace_compressors(model: Any, under_way: Callable[[], tuple[Any, Any] | None]) -> None:
    """Make the compressors of a model call the engine that runs it; without one they are what they were.

    Args:
        model: the model.
        under_way: returns the pools of the model's layers and the step while an engine runs it, else None.
    """
    for module in model.modules():
        if type(module).__name__ in KINDS:
            module.forward = partial(_forward, module, under_way)


def _forward(
    module: Any,
    under_way: Callable[[], tuple[Any, Any] | None],
    hidden_states: Float[Tensor, "1 t width"],
    query_latent: Float[Tensor, "1 t r"],
    position_ids: Int64[Tensor, "1 t"],
    cache: Any,
    layer_idx: int,
) -> tuple[Float[Tensor, "1 1 e d"], Tensor | None]:
    """Compute entries in the pools of the engine that runs the model, if one does; else in the module's own way.

    Raises:
        ValueError: if the model passes a cache to the compressor of an engine.
    """
    running = under_way()
    if running is None:
        entries, bias = type(module).forward(module, hidden_states, query_latent, position_ids, cache, layer_idx)
        return entries, bias
    if cache is not None:
        raise ValueError(f"cache: expected None in the compressor of an engine, got {type(cache).__name__}")
    pools, step = running
    pools.compress(module, layer_idx, hidden_states, query_latent, position_ids, step=step)
    return hidden_states.new_zeros(1, 1, 0, module.head_dim), None  # no keys beside those of the new tokens


def rows_of(module: Any, hidden_states: Float[Tensor, "1 t width"]) -> Rows:
    """Return the rows of new tokens, of a compressor or an indexer."""
    return Rows(module.kv_proj(hidden_states)[0], module.gate_proj(hidden_states)[0])


def finish(module: Any, entries: Float[Tensor, "e d"], positions: Int64[Tensor, "_"]) -> Float[Tensor, "e d"]:
    """Return new entries after the module's norm and rotation, in their type."""
    normed = module.kv_norm(entries)
    return rotate(module, normed[None], positions[None])[0].to(entries.dtype)


def rotate(module: Any, x: Float[Tensor, "1 t ..."], positions: Int64[Tensor, "1 t"]) -> Float[Tensor, "1 t ..."]:
    """Rotate rows by their positions, as the module does; further dimensions are heads."""
    cos, sin = module.rotary_emb(x, position_ids=positions, layer_type=module.rope_layer_type)
    code = import_module(type(module).__module__)
    heads = x if x.ndim == 4 else x[:, :, None]
    rotated: Tensor = code.apply_rotary_pos_emb(heads, cos, sin, unsqueeze_dim=2)
    return rotated.view_as(x)


@torch.no_grad()
def index_queries(
    module: Any,
    hidden_states: Float[Tensor, "1 t width"],
    query_latent: Float[Tensor, "1 t r"],
    position_ids: Int64[Tensor, "1 t"],
) -> tuple[Float[Tensor, "t h d"], Float[Tensor, "t h"]]:
    """Return the index queries of new tokens, and the weights of their heads with all factors, in float32."""
    query = module.q_b_proj(query_latent).unflatten(-1, (-1, module.head_dim))
    scorer = module.scorer
    weights = scorer.weights_proj(hidden_states).float() * (scorer.weights_scaling * scorer.softmax_scale)
    return rotate(module, query, position_ids)[0], weights[0]
