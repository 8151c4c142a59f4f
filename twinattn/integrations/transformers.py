"""Attention of transformers models by either twin, over the caches of transformers.

    from twinattn.integrations import transformers as integration

    integration.register()
    model = AutoModelForCausalLM.from_pretrained(..., attn_implementation="fastattn")      # or "refattn"

In transformers, a function says who may see whom: causal, a window, a chunk, padding, packed sequences, or any of them
together. Here that function is evaluated once per forward pass: for each query, the first key that it sees and the one
after the last, int32 `[b, 1, q, 2]`. The layers get that tensor as their mask.

    keys       0 1 2 3 4 5 6                the first layer makes a plan of it: queries that see
    query 0    . . 1 . . . .     2, 3       keys from the same one on are a sequence, and the
    query 1    . . 1 1 . . .     2, 4       plan has its positions and its window. The next
    query 2    . . . 1 1 . .     3, 5       layers find the plan with the mask (`mask_layout`).

So padding, packed sequences and chunks all become sequences of a ragged batch, for `varlen`. If the cache has gaps, the
keys are copied into contiguous rows. Padding is neither read nor computed; queries of padding return 0. Each query must
see one contiguous run of keys, and what neither twin can compute raises an error that names it: a model whose attention
does not go through AttentionInterface when it is made, one that computes with the mask itself when it does so. Where a
layer has a bias of its scores, or a mask that is added to them, there is no such batch: see `_attend_biased`.

For `generate_batch`, the continuous batching of transformers, call `use_in_generate_batch`. For a server with a paged
cache, which the twins read directly, see `twinattn.engine.Engine`.
"""

from collections.abc import Callable
from functools import partial, wraps
from types import ModuleType
from typing import Any

import torch
from einops import rearrange
from jaxtyping import Bool, Float, Int32
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._pytree import tree_leaves
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import causal_mask_function, sdpa_mask

import fastattn.metadata
import fastattn.varlen
import refattn.attention
import refattn.metadata
import refattn.varlen
from refattn.batch import Batch
from refattn.options import AttentionOptions
from refattn.plan import Plan
from twinattn.engine.models import HARMLESS
from twinattn.integrations.mask_layout import Layout, layout_of

TWINS = {"refattn": (refattn.varlen, refattn.metadata), "fastattn": (fastattn.varlen, fastattn.metadata)}
PAGED_PREFIX = "flash_"  # `generate_batch` takes a name with "flash" in it, and draws no mask for it
ENTRIES = 1 << 24  # entries of the mask that are built at a time
OF_THE_STEP = (  # arguments of `generate_batch`
    "block_table",
    "cu_seq_lens_k",
    "cu_seq_lens_q",
    "logits_indices",
    "logits_processor_args",
    "max_length_k",
    "max_length_q",
    "read_index",
    "write_index",
)
# What transformers passes along that asks nothing of an attention.
IGNORED = HARMLESS | {
    "cache",  # the model itself has used it; past_key_values until transformers 5.23
    "cache_position",
    "encoder_hidden_states",
    "is_causal",
    "layer_idx",
    "layer_past",
    "logits_to_keep",
    "output_hidden_states",
    "past_key_values",
    "return_dict",
}


def register() -> None:
    """Make `attn_implementation="refattn"` and `"fastattn"` known to transformers; to do so again changes nothing.

    transformers would also take these names for models that have an attention of their own. From here on, it refuses.
    """
    check = PreTrainedModel.get_correct_attn_implementation
    if not hasattr(check, "refuses_twins"):
        PreTrainedModel.get_correct_attn_implementation = _refusing_twins(check)
    for name, twin in TWINS.items():
        AttentionInterface.register(name, partial(_attention, twin))
        AttentionMaskInterface.register(name, visible_keys)
        AttentionInterface.register(PAGED_PREFIX + name, partial(_paged_attention, twin))
        AttentionMaskInterface.register(PAGED_PREFIX + name, _no_mask)


def use_in_generate_batch(model: Any, name: str) -> None:
    """Make a model compute with a twin in `generate_batch`, the continuous batching of transformers.

    `model.set_attn_implementation(...)` gives it another attention again. There, transformers would look for a kernel
    of that name to download, so here the name is set in the configuration.

    Args:
        model: a model of transformers, for nothing but `generate_batch` from here on.
        name: "refattn" or "fastattn".

    Raises:
        ValueError: if there is no twin of that name, or the model's attention cannot be replaced.
    """
    if name not in TWINS:
        raise ValueError(f"name: expected one of {', '.join(TWINS)}, got {name!r}")
    if not model._can_set_attn_implementation():
        raise ValueError(f"model: expected one built on AttentionInterface, got {type(model).__name__}")
    if model.config.get_text_config(decoder=True).model_type == "diffllama":
        raise NotImplementedError(
            "model: DiffLlama attends twice in each layer, and the cache of generate_batch has room for the keys and "
            "values of one; twinattn.engine.Engine serves it"
        )
    register()
    model.config._attn_implementation = PAGED_PREFIX + name
    model.generate_batch = partial(_generate_batch, model)


def _generate_batch(model: Any, inputs: Any, *args: Any, **options: Any) -> Any:
    """Call `generate_batch` of transformers, which logs the errors of its own thread, and returns without the tokens.

    Raises:
        RuntimeError: if there was one, with its text.
    """
    outputs = type(model).generate_batch(model, inputs, *args, **options)
    errors = [output.error for output in outputs.values() if output.error is not None]
    if errors or len(outputs) < len(inputs):
        first, right = errors[0] if errors else "transformers has logged why", len(outputs) - len(errors)
        raise RuntimeError(f"generate_batch: expected {len(inputs)} outputs without an error, got {right}; {first}")
    return outputs


def _refusing_twins(check: Callable[..., str]) -> Callable[..., str]:
    """Make transformers' check of an implementation refuse the twins for a model that would not call them."""

    @wraps(check)
    def get_correct_attn_implementation(self: Any, requested_attention: str | None, *args: Any, **options: Any) -> str:
        if requested_attention in (*TWINS, *(PAGED_PREFIX + name for name in TWINS)):
            # False only where transformers has read the source; of a class in a notebook it has none to read.
            self._can_set_attn_implementation()
            if getattr(self, "_can_set_attn_implementation_cached_value", None) is False:
                raise NotImplementedError(
                    f"attn_implementation: expected a model built on transformers' AttentionInterface for "
                    f"{requested_attention!r}, got {type(self).__name__}, which has an attention of its own; in a "
                    "model of several parts, name those that are: "
                    f'attn_implementation={{"text_config": "{requested_attention}"}}'
                )
        return check(self, requested_attention, *args, **options)

    vars(get_correct_attn_implementation)["refuses_twins"] = True
    return get_correct_attn_implementation


class VisibleKeys(Tensor):
    """What each query sees, int32 `[b, 1, q, 2]`: for a model a mask to pass on, and no numbers to compute with.

    A model that adds its mask to the scores would else add these, and answer wrongly without a word. What is made of
    them is of this class, too.
    """

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Refuse to be combined with scores, queries or values.

        Raises:
            NotImplementedError: naming the function.
        """
        for x in tree_leaves((args, kwargs)):
            if isinstance(x, Tensor) and not isinstance(x, VisibleKeys) and x.is_floating_point():
                raise NotImplementedError(
                    "attention_mask: expected a model that passes its mask to AttentionInterface, got one that calls "
                    f'{getattr(func, "__name__", func)} with it; attn_implementation="eager" computes this model'
                )
        return super().__torch_function__(func, types, args, kwargs or {})


@torch.compiler.disable
def visible_keys(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Tensor] = causal_mask_function,
    attention_mask: Bool[Tensor, "b _"] | None = None,
    *,
    allow_is_causal_skip: bool = True,
    use_vmap: bool = False,
    device: torch.device | str = "cpu",
    **others: Any,
) -> Int32[Tensor, "b 1 q 2"]:
    """Return of each query the first key that it sees, and the one after the last; twice 0 if it sees none.

    Args:
        batch_size: rows of the batch.
        q_length: queries of each.
        kv_length: keys of each, in the cache.
        q_offset: position of the first query.
        kv_offset: position of the first key.
        mask_function: who sees whom, by positions.
        attention_mask: which positions are no padding.
        allow_is_causal_skip: whether the function is one of transformers' own, without additions: a query at a position
            of padding is then padding, too, and sees nothing.
        use_vmap: how to call the function.
        device: where the mask is to be.
        others: what else transformers passes to all masks.

    Raises:
        NotImplementedError: if a query sees keys with gaps between them.
    """
    chunk = max(1, ENTRIES // max(1, batch_size * kv_length))
    parts = []
    for first in range(0, q_length, chunk):
        visible = sdpa_mask(
            batch_size=batch_size,
            q_length=min(chunk, q_length - first),
            kv_length=kv_length,
            q_offset=q_offset + first,
            kv_offset=kv_offset,
            mask_function=mask_function,
            attention_mask=attention_mask,
            allow_is_causal_skip=False,
            allow_is_bidirectional_skip=False,
            use_vmap=use_vmap,
            device=device,
        )
        parts.append(_runs(visible))
    seen = torch.cat(parts, dim=2)
    if allow_is_causal_skip and attention_mask is not None:
        positions = torch.arange(q_length, device=seen.device) + q_offset
        real = attention_mask.to(seen.device)[:, positions.clamp(max=attention_mask.shape[1] - 1)]
        seen = seen * rearrange(real, "b q -> b 1 q 1")
    return seen.as_subclass(VisibleKeys)


def _no_mask(*args: Any, attention_mask: Tensor | None = None, **others: Any) -> None:
    """Draw nothing where `generate_batch` says by lengths who sees whom."""
    if attention_mask is not None:
        raise NotImplementedError(
            f"attn_implementation: the names that begin with {PAGED_PREFIX!r} are for generate_batch, which has no "
            "padding; elsewhere leave that out"
        )


def _runs(visible: Bool[Tensor, "b heads q kv"]) -> Int32[Tensor, "b heads q 2"]:
    """Return where the visible keys of each query begin and end."""
    count, marks = visible.sum(-1), visible.byte()
    first = marks.argmax(-1) * (count > 0)
    end = (visible.shape[-1] - marks.flip(-1).argmax(-1)) * (count > 0)
    if not torch.equal(end - first, count):
        raise NotImplementedError(
            "attention_mask: expected the keys that a query sees to be one run, got one with a gap; neither twin "
            'computes arbitrary masks over rows, attn_implementation="sdpa" does'
        )
    return torch.stack([first, end], dim=-1).int()


# --- the attention of a layer ---


@torch.compiler.disable
def _attention(
    twin: tuple[ModuleType, ModuleType],
    module: Any,
    query: Float[Tensor, "b h q d"],
    key: Float[Tensor, "b hk kv d"],
    value: Float[Tensor, "b hk kv dv"],
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Float[Tensor, "h"] | None = None,
    sliding_window: int | None = None,
    is_causal: bool | None = None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    max_length_q: int | None = None,
    max_length_k: int | None = None,
    position_bias: Float[Tensor, "..."] | None = None,
    **others: Any,
) -> tuple[Float[Tensor, "b q h dv"], None]:
    """Compute the attention of a layer; transformers calls this in place of its own.

    Args:
        twin: the module of the path and the module of its tables.
        module: the layer's attention in the model.
        query: of the new tokens.
        key: of all tokens in the cache, as it is.
        value: likewise.
        attention_mask: `visible_keys`; a mask of a user's own, boolean, `[b, 1, q, kv]`; one that is added to the
            scores, floating point, that can be expanded to `[b, h, q, kv]`; or None.
        scaling: the softmax scale.
        softcap: bound on the scores.
        s_aux: the sinks.
        sliding_window: read where there is no mask; else the mask has it already.
        is_causal: likewise, in place of the layer's own.
        cu_seq_lens_q: where packed sequences begin and end, in a batch of one without a cache.
        cu_seq_lens_k: the same once more.
        max_length_q: not needed.
        max_length_k: not needed.
        position_bias: added to the scores, like a mask of floating point (T5).
        others: what else the model was called with.

    Raises:
        NotImplementedError: naming what neither twin computes.
        ValueError: if the mask is one for other queries or keys.
    """
    _check_others(others)
    query, key, value = _as_autocast_has_them(query, key, value)
    is_added = attention_mask is not None and attention_mask.is_floating_point()
    if is_added or position_bias is not None:
        if cu_seq_lens_q is not None:
            raise NotImplementedError("cu_seq_lens_q: expected none beside a bias of the scores, got packed sequences")
        added = {"position_bias": position_bias, "attention_mask": attention_mask if is_added else None}
        bias = _sum_of(added, query, key)
        if not is_added:
            causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
            bias = bias.masked_fill(~_visible(attention_mask, query, key, bool(causal), sliding_window), -torch.inf)
        options = AttentionOptions(scaling, softcap or 0.0, sinks=s_aux)
        attend = _attend_biased_by_reference if twin[0] is refattn.varlen else _attend_biased
        return _without_gradients(partial(attend, options), query, key, value, bias), None
    if attention_mask is None:
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        attention_mask = _without_mask(query, key, bool(causal), sliding_window)
    elif attention_mask.dtype == torch.bool and attention_mask.ndim == 4 and attention_mask.shape[1] == 1:
        attention_mask = _runs(attention_mask)
    elif attention_mask.dtype != torch.int32 or attention_mask.ndim != 4 or attention_mask.shape[1::2] != (1, 2):
        kind = str(attention_mask.dtype).removeprefix("torch.")
        raise NotImplementedError(
            "attention_mask: expected [b, s] of zeros and ones, a boolean [b, 1, q, kv] or floating point, got "
            f"{kind} {list(attention_mask.shape)}; neither twin supports one boolean mask per head"
        )
    if attention_mask.shape[0] not in (1, query.shape[0]) or attention_mask.shape[2] != query.shape[2]:
        b, q, came = query.shape[0], query.shape[2], list(attention_mask.shape)
        raise ValueError(f"attention_mask: expected one for {b} rows of {q} queries, got {came}")
    layout = layout_of(attention_mask, query.shape[0], key.shape[2], (cu_seq_lens_q, cu_seq_lens_k), twin[1])
    options = AttentionOptions(scaling, softcap or 0.0, sinks=s_aux)
    return _without_gradients(partial(_attend, twin[0], layout, options), query, key, value), None


def _attend(
    path: ModuleType,
    layout: Layout,
    options: AttentionOptions,
    query: Float[Tensor, "b h q d"],
    key: Float[Tensor, "b hk kv d"],
    value: Float[Tensor, "b hk kv dv"],
) -> Float[Tensor, "b q h dv"]:
    queries = rearrange(query, "b h q d -> (b q) h d")
    keys, values = (rearrange(x, "b hk kv d -> (b kv) hk d") for x in (key, value))
    every_row = None
    part: Layout | None = layout
    while part is not None:
        rows = queries if part.query_rows is None else queries[part.query_rows]
        out = path.attention(rows, keys[part.key_rows], values[part.key_rows], part.plan, options)
        if part.query_rows is not None:
            every_row = out.new_zeros(len(queries), *out.shape[1:]) if every_row is None else every_row
            out = every_row.index_copy_(0, part.query_rows, out)
        part = part.rest
    return rearrange(out, "(b q) h dv -> b q h dv", b=query.shape[0])


# --- the attention of a layer whose scores have a bias ---


def _attend_biased(
    options: AttentionOptions,
    query: Float[Tensor, "b h q d"],
    key: Float[Tensor, "b hk kv d"],
    value: Float[Tensor, "b hk kv dv"],
    bias: Float[Tensor, "b h q kv"],
) -> Float[Tensor, "b q h dv"]:
    """Attend by PyTorch's own attention, the fastest that takes a number for each score.

    Args:
        options: those of the layer.
        query: of the new tokens.
        key: of all tokens in the cache.
        value: likewise.
        bias: added to the scaled scores; `-inf` hides a key.

    Raises:
        NotImplementedError: for a softcap or sinks, which it does not have.
    """
    if options.softcap or options.sinks is not None:
        name = "softcap" if options.softcap else "s_aux"
        raise NotImplementedError(f'{name}: expected none beside a bias of the scores; "refattn" computes both')
    visible = bias > -torch.inf
    is_unseen = ~visible.any(2).any(1)[:, None, :, None]  # [b, 1, kv, 1]: they may hold anything, and 0 * NaN is NaN
    low = bias.clamp(min=torch.finfo(query.dtype).min).to(query.dtype).masked_fill(~visible, -torch.inf)
    key, value = (x.masked_fill(is_unseen, 0.0) for x in (key, value))
    grouped = query.shape[1] != key.shape[1]
    out = scaled_dot_product_attention(query, key, value, low, scale=options.softmax_scale, enable_gqa=grouped)
    out = out.masked_fill(~visible.any(-1, keepdim=True), 0.0)
    return rearrange(out, "b h q dv -> b q h dv").contiguous()


def _attend_biased_by_reference(
    options: AttentionOptions,
    query: Float[Tensor, "b h q d"],
    key: Float[Tensor, "b hk kv d"],
    value: Float[Tensor, "b hk kv dv"],
    bias: Float[Tensor, "b h q kv"],
) -> Float[Tensor, "b q h dv"]:
    """Attend by the formula of the reference, a sequence at a time; arguments are those of `_attend_biased`."""
    scale, softcap, sinks = options.softmax_scale, options.softcap, options.sinks
    rows = []
    for q, k, v, scores in zip(query, key, value, bias, strict=True):
        visible = scores > -torch.inf  # [h, q, kv]
        q, k, v = (rearrange(x, "h s size -> s h size") for x in (q, k, v))
        out, _ = refattn.attention.attend(
            q, k, v, visible.any(0), softmax_scale=scale, softcap=softcap, bias=scores, sinks=sinks
        )
        rows.append(out.masked_fill(~rearrange(visible.any(-1), "h q -> q h 1"), 0.0))
    return torch.stack(rows)


def _sum_of(added: dict[str, Tensor | None], query: Tensor, key: Tensor) -> Float[Tensor, "b h q kv"]:
    """Return the sum of what is added to the scores.

    Raises:
        ValueError: naming what cannot be expanded to one number for each score.
    """
    size = torch.Size([*query.shape[:3], key.shape[2]])
    total = torch.zeros(1, dtype=torch.float32, device=query.device)
    for name, x in added.items():
        if x is not None:
            if x.ndim != 4 or any(one not in (1, all_of) for one, all_of in zip(x.shape, size, strict=True)):
                raise ValueError(f"{name}: expected a number for each of the scores {list(size)}, got {list(x.shape)}")
            total = total + x
    return total.expand(size)


def _visible(
    mask: Tensor | None, query: Tensor, key: Tensor, causal: bool, sliding_window: int | None
) -> Bool[Tensor, "_ 1 q kv"]:
    """Return a mask, or what a layer without one sees, as a truth for each score; keys may have gaps here.

    Raises:
        ValueError: if the mask is one for other queries or keys.
    """
    b, q, kv = query.shape[0], query.shape[2], key.shape[2]
    if mask is None:
        mask = _without_mask(query, key, causal, sliding_window)
    if mask.dtype == torch.bool and mask.ndim == 4:
        visible = mask
    elif mask.dtype == torch.int32 and mask.ndim == 4 and mask.shape[1::2] == (1, 2):
        first, end = mask.as_subclass(Tensor).long().unbind(-1)  # [b, 1, q]
        j = torch.arange(kv, device=mask.device)
        visible = (j >= first[..., None]) & (j < end[..., None])
    else:
        raise NotImplementedError(
            f"attention_mask: expected one of transformers, or a boolean one, beside a bias, got {mask.dtype}"
        )
    if visible.shape[0] not in (1, b) or visible.shape[2] not in (1, q) or visible.shape[3] != kv:
        came = list(mask.shape)
        raise ValueError(f"attention_mask: expected one for {b} rows of {q} queries over {kv} keys, got {came}")
    return visible


@torch.compiler.disable
def _paged_attention(
    twin: tuple[ModuleType, ModuleType],
    module: Any,
    query: Float[Tensor, "b h t d"],
    key: Float[Tensor, "b hk s d"],
    value: Float[Tensor, "b hk s dv"],
    attention_mask: None,
    *,
    cache: Any = None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Float[Tensor, "h"] | None = None,
    sliding_window: int | None = None,
    **step: Any,
) -> tuple[Float[Tensor, "b t h dv"], None]:
    """Compute the attention of a layer in `generate_batch`, over the rows that a cache is read into when it is written.

    Raises:
        NotImplementedError: naming what neither twin computes; without a cache of `generate_batch`.
    """
    if cache is None and not isinstance(step.get("cu_seq_lens_k"), Tensor):
        raise NotImplementedError(
            f"attn_implementation: the names that begin with {PAGED_PREFIX!r} are for generate_batch, which has a "
            "paged cache; elsewhere leave that out"
        )
    if step.get("block_table") is not None:
        raise NotImplementedError("max_blocks_per_request: expected 0, as the cache writes its keys, got block tables")
    _check_others({name: x for name, x in step.items() if name not in OF_THE_STEP})
    query, key, value = _as_autocast_has_them(query, key, value)
    if cache is not None:  # until transformers 5.23; since then the model itself has updated it
        key, value = cache.update(key_states=key, value_states=value, layer_idx=module.layer_idx, kwargs=step)
    starts, ends = step["cu_seq_lens_q"].int(), step["cu_seq_lens_k"].int()
    batch = Batch(starts, ends.diff(), None, int(step["max_length_q"]), int(step["max_length_k"]))
    left = -1 if sliding_window is None else sliding_window - 1
    layout = Layout(Plan(batch, None, True, (left, 0) if left >= 0 else (-1, -1)), None, slice(None))
    options = AttentionOptions(scaling, softcap or 0.0, sinks=s_aux)
    return _without_gradients(partial(_attend, twin[0], layout, options), query, key, value), None


def _check_others(others: dict[str, Any]) -> None:
    """Refuse what an attention would have to do and neither twin does.

    Raises:
        NotImplementedError: naming it.
    """
    for name, value in others.items():
        if name in ("dropout", "output_attentions"):
            if value:
                what = "computes dropout" if name == "dropout" else "has weights of its softmax to return"
                raise NotImplementedError(f'{name}: neither twin {what}, got {value}; attn_implementation="eager" does')
        elif name not in IGNORED and value is not None and value is not False:
            got = f"{str(value.dtype)[6:]} {list(value.shape)}" if isinstance(value, Tensor) else repr(value)
            raise NotImplementedError(
                f"{name}: expected no option of attention that the twins do not know, got {got}; "
                'attn_implementation="eager" may'
            )


def _as_autocast_has_them(*tensors: Tensor) -> list[Tensor]:
    """Cast as autocast does for the attention of PyTorch: rotary positions leave some of them in float32."""
    kind = tensors[0].device.type
    if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
        return [x if x.dtype == torch.float64 else x.to(dtype) for x in tensors]
    return list(tensors)


class _Forward(torch.autograd.Function):
    """A forward without a backward, whatever the parameters of a model say about gradients."""

    @staticmethod
    def forward(ctx: Any, compute: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
        return compute(*tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        raise NotImplementedError('backward: the twins have no gradients; attn_implementation="sdpa" has')


def _without_gradients(compute: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
    if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
        out: Tensor = _Forward.apply(compute, *tensors)
        return out
    return compute(*tensors)


def _without_mask(query: Tensor, key: Tensor, causal: bool, sliding_window: int | None) -> Int32[Tensor, "b 1 q 2"]:
    """Return `visible_keys` where a model draws no mask: all keys, or up to a query's own."""
    b, q, kv = query.shape[0], query.shape[2], key.shape[2]
    if causal and 1 < q != kv:
        raise NotImplementedError(f"attention_mask: expected one for {q} queries over {kv} keys, got None")
    if sliding_window is not None and sliding_window < kv and not causal:
        raise NotImplementedError("attention_mask: expected one with the window of a bidirectional layer, got None")
    end = torch.arange(kv - q, kv) + 1 if causal else torch.full((q,), kv)
    first = torch.zeros_like(end) if sliding_window is None else (end - sliding_window).clamp(min=0)
    return torch.stack([first, end], dim=-1).int().to(query.device).expand(b, 1, q, 2)
