"""How the engine uses transformers: which models it serves, what their layers are, how their attention is replaced.

Most models call their attention through transformers' `AttentionInterface` and pass on their keyword arguments, one of
which are then its pools. Where a family computes attention in a module of its own, that module's `forward` is replaced
(`attention_modules`), and a context variable holds the pools during the pass. Latent attention also goes through the
interface; there, only the method that computes keys and values from latents is replaced. Layers that keep a state have
modules of their own (`state_modules`), and so has what selects keys (`index_modules`).
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from importlib.resources import files
from inspect import signature
from math import inf
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from twinattn.engine import attention_modules, compressed_modules, index_modules, state_modules
from twinattn.engine.compressed_storage import CompressedStorage, SharedStorage
from twinattn.engine.layers import Causal, Chunk, Entries, Layer, Mask, Window
from twinattn.engine.state_layers import StateLayer
from twinattn.engine.storages import LatentStorage, PagedStorage, PairedStorage, SelectedLatentStorage, Storage

ATTENTION = "twinattn"  # the name of `paged_attention` there
# The families of models, by `config.model_type`, whose logits have been compared with those of transformers' own eager
# attention: one per line. The test that does it, tests/engine/test_engine_models.py, compares all of them.
VERIFIED = tuple(files("twinattn.engine").joinpath("verified_families.txt").read_text("utf-8").split())
# Verified families whose attention is not called through transformers' AttentionInterface; ALiBi is no part of that.
OUTSIDE = ("bloom", "falcon", "mpt")
# Verified families with latents (MLA); those in SELECTED have queries that see selected latents (DSA).
SELECTED = ("axk2", "deepseek_v32", "glm_moe_dsa", "hy_v4")
# The one with entries of several tokens beside a window, and of each kind of its layers whether entries overlap.
COMPRESSED = "deepseek_v4"
OVERLAPS = {"compressed_sparse_attention": True, "heavily_compressed_attention": False}
LATENT = (
    "axk1",
    "axk2",
    "deepseek_v2",
    "deepseek_v3",
    "deepseek_v32",
    "glm4_moe_lite",
    "glm_moe_dsa",
    "hy_v4",
    "kimi_linear",
    "longcat_flash",
    "minicpm3",
    "mistral4",
    "youtu",
)
# Those of them in whose prompts some tokens may see one another: as `(causal or same span) and window`.
# The latter says of itself that it is not causal; it is, but in a span, its prefix.
PREFIX_LM = "paligemma"
SPANNED = ("gemma3", PREFIX_LM)
# What some of the others do that the engine does not. Nothing but their own code would show it.
UNSERVED = {
    "gemma4": "whose layers have heads of different sizes",
    "gemma4_text": "whose layers have heads of different sizes",
    "nemotron": "whose attention is not passed the keyword arguments of its model",
    "stablelm": "whose attention is not passed the keyword arguments of its model",
}
# Kinds of layers without attention: those that keep a state, and those that look at one token only.
STATE, NO_ATTENTION = "linear_attention", ("linear_attention", "mlp", "moe")
# In place of a mask, for models that take one apart whether they use it or not.
NO_MASK = torch.empty(1, 1, 0, 0)
HARMLESS = {  # options of an attention that change nothing in a decoder that only infers
    "dropout",  # 0 then
    "output_attentions",
    "output_router_logits",
    "position_ids",  # the model itself has used them
    "use_cache",
}
# Types of rotary positions whose frequencies are fixed, and those whose frequencies depend on the longest sequence in
# the batch once it is longer than `max_positions`.
STATIC_ROPE = ("default", "linear", "yarn", "llama3", "proportional")
DYNAMIC_ROPE = ("dynamic", "longrope")


def check_model(model: Any, trust_model: bool) -> None:
    """Check that the engine serves a model correctly: a causal decoder whose positions are its `position_ids`.

    Raises:
        ValueError: naming what the model does that the engine does not support, or that its family is not verified.
    """
    reason = _reason_to_refuse(model)
    if reason:
        raise ValueError(f"model: expected a causal decoder of transformers, got {type(model).__name__}, {reason}")
    family = model.config.model_type
    if family not in VERIFIED and not trust_model:
        raise ValueError(
            f"model: expected one of a family whose answers were compared with transformers' own, got {family}. To try "
            "it, pass trust_model=True and compare its answers with those of model.generate; served are "
            f"{', '.join(VERIFIED)}"
        )


def _reason_to_refuse(model: Any) -> str | None:
    """Return what a model does that the engine would get wrong; None if nothing is known."""
    configs = (model.config, model.config.get_text_config())
    parameters = signature(model.forward).parameters
    if model.config.is_encoder_decoder:
        return "which has an encoder"
    if model.config.model_type in UNSERVED:
        return UNSERVED[model.config.model_type]
    is_outside = model.config.model_type in OUTSIDE
    if not is_outside and not model._can_set_attn_implementation():
        return "which is not built on transformers' AttentionInterface"
    for name in ("position_ids", "logits_to_keep"):
        if name not in parameters and not is_outside:  # ALiBi needs no positions
            return f"whose forward takes no {name}"
    is_prefix_lm = model.config.model_type == PREFIX_LM
    for option in ("alibi", "add_cross_attention", "use_bidirectional_attention"):
        if option == "use_bidirectional_attention" and is_prefix_lm:
            continue
        if any(getattr(config, option, None) for config in configs) and not is_outside:
            return f"with {option}"
    unknown = index_modules.unknown(model)
    if unknown is not None:
        return f"whose layers select keys by a {unknown}, not {', '.join(index_modules.KINDS)}"
    if any(getattr(config, "kv_lora_rank", None) for config in configs) and model.config.model_type not in LATENT:
        return f"which has latent attention (MLA) of the family {model.config.model_type}, not of {', '.join(LATENT)}"
    if any(getattr(config, "is_causal", True) is False for config in configs):
        return "with is_causal=False"
    for name, module in model.named_modules():
        if hasattr(module, "layer_idx") and getattr(module, "is_causal", True) is False and not is_prefix_lm:
            return f"whose attention {name} is not causal; a model that can be both needs is_decoder=True"
        if name.endswith("position_embeddings") and getattr(module, "padding_idx", None) is not None:
            return f"whose positions begin past padding_idx={module.padding_idx}"
    for rope_type in _rope_types(configs[-1]):
        if rope_type not in STATIC_ROPE + DYNAMIC_ROPE:
            return f"whose rotary positions are of type {rope_type}, not {', '.join(STATIC_ROPE + DYNAMIC_ROPE)}"
    return None


def _rope_types(config: Any) -> dict[str, Any]:
    """Return the types of a model's rotary positions, with their settings: one for all layers, or for each kind."""
    settings = getattr(config, "rope_parameters", None) or {}
    by_kind = settings.values() if all(isinstance(value, dict) for value in settings.values()) else [settings]
    return {one.get("rope_type") or "default": one for one in by_kind}


def max_positions(config: Any) -> int | float:
    """Return how many positions a model has, in tokens: infinity if it does not say.

    Past them a table of positions ends, and dynamic rotary positions change for every request in the batch. "longrope"
    does so earlier, past the length that the model was first trained with.
    """
    found = [getattr(config, name, None) for name in ("max_position_embeddings", "max_seq_len")]
    for rope_type, settings in _rope_types(config).items():
        if rope_type == "longrope":
            found.append(settings["original_max_position_embeddings"])
    return min((number for number in found if number), default=inf)


# The pools of a model's layers while an engine runs it, and the step: for modules that are not passed what their model
# is called with.
_UNDER_WAY: ContextVar[tuple[Any, Any] | None] = ContextVar("_UNDER_WAY", default=None)


def replace_attention(model: Any) -> None:
    """Make the layers of a model call `paged_attention`, or what is in `attention_modules.REPLACED`.

    Raises:
        ValueError: if the code of the model does not let its attention be replaced.
    """
    from transformers import AttentionInterface

    if model.config.model_type not in OUTSIDE:
        AttentionInterface.register(ATTENTION, paged_attention)
        model.set_attn_implementation(ATTENTION)
        if not is_replaced(model):
            raise ValueError(
                f"model: expected one built on transformers' AttentionInterface, got {type(model).__name__}"
            )
    for module in model.modules():
        if model.config.model_type in LATENT and hasattr(module, "expand_kv"):
            module.expand_kv = partial(_expand_latents, module)
    attention_modules.replace_attention(model, _UNDER_WAY.get)
    state_modules.replace_states(model)
    index_modules.replace_indexers(model, _UNDER_WAY.get)
    compressed_modules.replace_compressors(model, _UNDER_WAY.get)


def is_replaced(model: Any) -> bool:
    """Return whether a model has the engine's attention; it is not removed again from those in `OUTSIDE`.

    Their modules work as before while no engine runs the model.
    """
    config = model.config.get_text_config()
    return model.config.model_type in OUTSIDE or config._attn_implementation == ATTENTION


@contextmanager
def one_token_tried(model: Any) -> Iterator[None]:
    """Replace the attention of a model, and put it back if what follows fails: the model runs over one token.

    Raises:
        ValueError: saying how it failed.
        torch.OutOfMemoryError: if a GPU has no room for it.
    """
    config = model.config.get_text_config()
    before = config._attn_implementation
    try:
        replace_attention(model)  # even if the config says so: another model may have the same config
        yield
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        if config._attn_implementation != before:
            model.set_attn_implementation(before)
        raise ValueError(
            f"model: expected one whose attention the engine can take over, got {type(model).__name__}, "
            f"which fails over one token with {type(error).__name__}: {error}"
        ) from error


def run(model: Any, inputs: Mapping[str, Any], pools: Any) -> Float[Tensor, "b v"]:
    """Run a model once, so that each of its layers calls `pools.attend`, and return the logits.

    Args:
        model: the model, whose attention is replaced.
        inputs: what to call it with, and the step.
        pools: of its layers.
    """
    if model.config.model_type in OUTSIDE:
        known = signature(model.forward).parameters
        arguments = {
            name: x for name, x in inputs.items() if name != "step" and (name != "position_ids" or name in known)
        }
    else:
        arguments = dict(inputs, layer_pools=pools)
    if model.config.model_type in SELECTED:
        arguments["attention_mask"] = NO_MASK
    before = _UNDER_WAY.set((pools, inputs["step"]))
    try:
        logits: Tensor = model(**arguments, use_cache=False).logits[0]
    finally:
        _UNDER_WAY.reset(before)
    return logits


def paged_attention(
    module: Any,
    query: Float[Tensor, "1 h t d"],
    key: Float[Tensor, "1 hk t dk"],
    value: Float[Tensor, "1 hk t dv"],
    attention_mask: Tensor | None,
    *,
    layer_pools: Any = None,
    **step: Any,
) -> tuple[Float[Tensor, "1 t h dout"], None]:
    """Compute a layer's attention by the engine that runs the model; transformers calls this instead of its own.

    Raises:
        ValueError: if no engine runs the model, or the model has a mask of its own.
    """
    if layer_pools is None:
        raise ValueError(
            'engine: expected one to run this model; model.set_attn_implementation("sdpa") frees it, got None'
        )
    if attention_mask is not None and attention_mask is not NO_MASK:
        raise ValueError(f"attention_mask: expected None, as the batch says who sees whom, got {attention_mask.shape}")
    return layer_pools.attend(module, query, key, value, **step), None


def _expand_latents(
    module: Any, latent: Float[Tensor, "b 1 t r"], rope_key: Float[Tensor, "b 1 t rope"]
) -> tuple[Float[Tensor, "b hk t dk"], Float[Tensor, "b hk t dv"]]:
    """Leave latents and rotary keys as they are where the engine has the attention, which takes them for key and value.

    All else is the model's own: its norms, its rotary positions, what it multiplies queries or latents with.
    """
    if module.config._attn_implementation == ATTENTION:
        return latent, rope_key
    keys_and_values: tuple[Tensor, Tensor] = type(module).expand_kv(module, latent, rope_key)
    return keys_and_values


def check_options(options: Mapping[str, Any]) -> None:
    """Check that an attention has no option that the engine would not honour; one that is None changes nothing.

    Raises:
        ValueError: naming the option.
    """
    for name, value in options.items():
        if name not in HARMLESS and value is not None:
            got = f"{str(value.dtype)[6:]} {list(value.shape)}" if isinstance(value, Tensor) else repr(value)
            raise ValueError(f"{name}: expected no option of attention that the engine does not know, got {got}")
    if options.get("dropout"):
        raise ValueError(f"dropout: expected none in a decoder that only infers, got {options['dropout']!r}")


def state_layers(model: Any) -> dict[int, StateLayer]:
    """Return the layers of a model that keep a state, by their index.

    Raises:
        ValueError: if the model has layers with a state that the engine has no path of.
    """
    found = state_modules.state_layers(model)
    unknown = [i for i, kind in enumerate(_all_kinds(model.config.get_text_config())) if kind == STATE]
    unknown = [i for i in unknown if i not in found]
    if unknown:
        known = ", ".join(state_modules.KINDS)
        raise ValueError(
            f"model: expected layers that keep a state to be of {known}, got another in layer {unknown[0]}"
        )
    return found


def layers_of(config: Any, *, block_size: int, batch_invariant: bool = False) -> list[Layer]:
    """Return the specification of every layer with attention.

    Args:
        config: the configuration of a decoder.
        block_size: tokens in a block.
        batch_invariant: whether no bit of a row may depend on what else is in the batch.

    Raises:
        ValueError: if the model has a kind of layer without a path, sizes of heads that do not divide, or chunks that
            do not begin with a block.
    """
    masks = [_mask(kind, config) for kind in _kinds(config)]
    for mask in masks:
        if isinstance(mask, Chunk) and mask.reach % block_size:
            raise ValueError(
                f"block_size: expected a divisor of {mask.reach}, the attention_chunk_size of the model, as a chunk "
                f"begins with a block, got {block_size}"
            )
    if config.model_type == COMPRESSED:
        return [Layer(mask, _compressed(kind, config)) for mask, kind in zip(masks, _kinds(config), strict=True)]
    storage = _storage(config, batch_invariant)
    if config.model_type in SELECTED:
        return [Layer(mask, selects) for mask, selects in zip(masks, _selections(config, storage), strict=True)]
    return [Layer(mask, storage) for mask in masks]


def owners_of(config: Any) -> list[int]:
    """Return for each layer with attention the one whose pool it reads: itself, or an earlier one of its kind.

    Source: Gemma 3n, whose last layers attend to keys of the last layer of their kind before them; Sun et al. 2024,
        "You Only Cache Once".
    """
    modes = getattr(config, "kv_sharing_modes", None) or [None] * len(_kinds(config))
    producers = {kind: i for i, (kind, mode) in enumerate(zip(_kinds(config), modes, strict=True)) if mode == "store"}
    return [
        producers[kind] if mode == "reuse" else i
        for i, (kind, mode) in enumerate(zip(_kinds(config), modes, strict=True))
    ]


def attention_layers(config: Any) -> list[int]:
    """Return the indices of the layers with attention: all, or those that are not of another kind."""
    return [i for i, kind in enumerate(_all_kinds(config)) if kind not in NO_ATTENTION]


def _kinds(config: Any) -> list[str]:
    """Return the kind of each layer with attention by its name in transformers."""
    return [kind for kind in _all_kinds(config) if kind not in NO_ATTENTION]


def _all_kinds(config: Any) -> list[str]:
    """Return the kind of each layer by its name in transformers."""
    every_layer = "sliding_attention" if getattr(config, "sliding_window", None) else "full_attention"
    return list(getattr(config, "layer_types", None) or [every_layer] * config.num_hidden_layers)


def _mask(kind: str, config: Any) -> Mask:
    """Return the mask of a kind of layer, by its name in transformers.

    Raises:
        ValueError: if there is none.
    """
    if (
        kind in ("full_attention", "hybrid") or config.model_type == "diffllama"
    ):  # these layers see all keys, whatever the config says
        return Causal()
    if kind == "indexed_attention" and config.model_type in SELECTED:
        return Causal()  # and some of these keys are selected
    if kind == "sliding_attention":
        return Window(config.sliding_window or 0)
    if kind == "chunked_attention":
        return Chunk(config.attention_chunk_size)
    if kind in OVERLAPS and config.model_type == COMPRESSED:
        return Entries(config.sliding_window, config.compress_rates[kind], OVERLAPS[kind])
    kinds = "full_attention or sliding_attention or chunked_attention"
    raise ValueError(f"model: expected a decoder with layers of kind {kinds}, got {kind}")


def _storage(config: Any, batch_invariant: bool) -> Storage:
    """Return where a model keeps its keys.

    Raises:
        ValueError: if the query heads do not divide among the KV heads, or the width among the query heads.
    """
    if config.model_type in LATENT:
        return LatentStorage(config.kv_lora_rank, config.qk_rope_head_dim, batch_invariant)
    heads, width = config.num_attention_heads, config.hidden_size
    num_kv_heads = getattr(config, "num_key_value_heads", None) or heads
    if config.model_type == "falcon":
        num_kv_heads = config.num_kv_heads if config.new_decoder_architecture else 1 if config.multi_query else heads
    if heads % num_kv_heads:
        raise ValueError(
            f"model: expected num_attention_heads to be a multiple of {num_kv_heads} KV heads, got {heads}"
        )
    head_size = getattr(config, "head_dim", None)
    if head_size is None and width % heads:
        raise ValueError(f"model: expected hidden_size to be a multiple of {heads} heads, got {width}")
    storage = PairedStorage if config.model_type == "diffllama" else PagedStorage  # it calls attention twice per layer
    return storage(num_kv_heads, head_size or width // heads)


def _selections(config: Any, storage: Storage) -> list[SelectedLatentStorage]:
    """Return where each layer keeps its latents, and the index keys that it selects by, if it does."""
    kinds = getattr(config, "indexer_types", None) or ["full"] * config.num_hidden_layers
    sizes = [config.index_head_dim if kind == "full" else 0 for kind in kinds]
    return [SelectedLatentStorage(**vars(storage), topk=config.index_topk, index_size=size) for size in sizes]


def _compressed(kind: str, config: Any) -> SharedStorage:
    """Return where a layer keeps its keys, which are their values, and its entries, if it has some."""
    if kind not in OVERLAPS:
        return SharedStorage(config.head_dim)
    selects = OVERLAPS[kind]
    sizes = dict(topk=config.index_topk, index_size=config.index_head_dim) if selects else dict(topk=0, index_size=0)
    return CompressedStorage(config.head_dim, ratio=config.compress_rates[kind], overlap=selects, **sizes)


def end_token_ids(model: Any) -> tuple[int, ...]:
    """Return the tokens that end an answer, according to the model."""
    ends = getattr(model.generation_config, "eos_token_id", None)
    return () if ends is None else (ends,) if isinstance(ends, int) else tuple(ends)
