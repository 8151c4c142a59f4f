"""The modules of transformers that select keys ("indexers"): what they do between their projections, over paged keys.

An indexer has a cache of its own, so its `forward` is replaced while an engine runs the model. Projections, norms and
rotary positions stay the module's own; the write of index keys, their scores and the selection are those of the twin:

    class                                    rotary positions     of which part    model
    DeepseekV32Indexer, AXK2Indexer          halves               the first        DeepSeek-V3.2, A.X-K2
    GlmMoeDsaIndexer                         interleaved          the first        GLM-5
    HYV4Indexer                              halves               the last         Hunyuan 4

A layer without an indexer attends to what the last one before it has selected: the model passes on the positions.

transformers scores keys as the model has them, without the Hadamard rotation and the fp8 of DeepSeek's own kernel: the
rotation changes no product, and fp8 rounds. So index keys are kept in the model's type.
"""

from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int32
from torch import Tensor

from twinattn.engine import compressed_modules


class Kind(NamedTuple):
    """A kind of indexer.

    Attributes:
        rotate: the function in the module's own code that applies rotary positions.
        rotary_first: whether they are those of the first elements of a key; else of the last ones.
    """

    rotate: str
    rotary_first: bool


HALVES = Kind("apply_rotary_pos_emb", rotary_first=True)
KINDS: dict[str, Kind] = {  # by the name of the class
    "DeepseekV32Indexer": HALVES,
    "AXK2Indexer": HALVES,
    "GlmMoeDsaIndexer": Kind("apply_rotary_pos_emb_interleave", rotary_first=True),
    "HYV4Indexer": Kind("apply_rotary_pos_emb", rotary_first=False),
}


class IndexTokens(NamedTuple):
    """What an indexer makes of new tokens.

    Attributes:
        query: index queries.
        weights: of the index heads, with all factors, in float32.
        key: index keys.
    """

    query: Float[Tensor, "t h d"]
    weights: Float[Tensor, "t h"]
    key: Float[Tensor, "t d"]


def unknown(model: Any) -> str | None:
    """Return the class of an indexer that is none of `KINDS`; None if there is none."""
    names = (type(module).__name__ for module in model.modules())
    known = {*KINDS, compressed_modules.INDEXER}
    return next((name for name in names if name.endswith("Indexer") and name not in known), None)


def replace_indexers(model: Any, under_way: Callable[[], tuple[Any, Any] | None]) -> None:
    """Make the indexers of a model call the engine that runs it; without one they are what they were.

    Args:
        model: the model.
        under_way: returns the pools of the model's layers and the step while an engine runs it, else None.
    """
    for module in model.modules():
        if type(module).__name__ in KINDS:
            module.forward = partial(_forward, module, KINDS[type(module).__name__], under_way)


def _forward(
    module: Any,
    kind: Kind,
    under_way: Callable[[], tuple[Any, Any] | None],
    hidden_states: Float[Tensor, "1 t width"],
    query_latent: Float[Tensor, "1 t r"],
    position_embeddings: tuple[Tensor, Tensor],
    *args: Any,
    **options: Any,
) -> Int32[Tensor, "1 t k"]:
    """Select by the pool of the engine that runs the model, if one does; else the module's own way.

    Raises:
        ValueError: if the model passes more than a mask and positions to the indexer of an engine, such as a cache.
    """
    running = under_way()
    if running is None:
        selected: Tensor = type(module).forward(
            module, hidden_states, query_latent, position_embeddings, *args, **options
        )
        return selected
    others = dict(enumerate(args[2:], 5)) | options  # past attention_mask and position_ids, which the step has
    for name, value in others.items():
        if value is not None:
            raise ValueError(f"{name}: expected None in the indexer of an engine, got {type(value).__name__}")
    pools, step = running
    tokens = index_tokens(module, kind, hidden_states, query_latent, position_embeddings)
    positions: Tensor = pools.select(module, tokens, step=step)
    return positions[None]


@torch.no_grad()
def index_tokens(
    module: Any,
    kind: Kind,
    hidden_states: Float[Tensor, "1 t width"],
    query_latent: Float[Tensor, "1 t r"],
    position_embeddings: tuple[Tensor, Tensor],
) -> IndexTokens:
    """Return the index queries, weights and keys of new tokens.

    Args:
        module: the indexer.
        kind: how it rotates.
        hidden_states: of the new tokens.
        query_latent: the latents that the layer makes its queries of.
        position_embeddings: cosines and sines.
    """
    query = module.wq_b(query_latent).unflatten(-1, (module.n_heads, module.head_dim))  # [1, t, h, d]
    key = module.k_norm(module.wk(hidden_states).to(module.k_norm.weight.dtype)).to(hidden_states.dtype)
    rotary, rest = module.qk_rope_head_dim, module.head_dim - module.qk_rope_head_dim
    sizes = [rotary, rest] if kind.rotary_first else [rest, rotary]
    query_parts, key_parts = list(query.split(sizes, dim=-1)), list(key.unsqueeze(2).split(sizes, dim=-1))
    place = 0 if kind.rotary_first else 1
    rotate = getattr(import_module(type(module).__module__), kind.rotate)
    query_parts[place], key_parts[place] = rotate(
        query_parts[place], key_parts[place], *position_embeddings, unsqueeze_dim=2
    )
    weights = module.weights_proj(hidden_states.to(module.weights_proj.weight.dtype)).float()
    factor = module.n_heads**-0.5 * module.softmax_scale  # above 0, so it moves through the ReLU
    return IndexTokens(torch.cat(query_parts, dim=-1)[0], weights[0] * factor, torch.cat(key_parts, dim=-1)[0, :, 0])
