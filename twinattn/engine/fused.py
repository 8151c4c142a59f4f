"""Fuse the layers of a transformers causal LM: `Engine(fuse(model), ...)`.

A layer of Llama's shape is four products and an attention. In the model's own code, what stands between them is many
small launches, each of which reads and writes all tokens; fused, it is one launch in each place. In bfloat16, a layer
launches so much besides its attention:

                                             own code    fused
    hidden + MLP of the layer before, norm      1 + 8    1        rms_norm
    queries, keys, values                           3    1        one product
    norms of their heads (Qwen3), rotation    16 + 10    1        qk_norm_rope
    output of attention                             1    1
    hidden + attention, norm                    1 + 8    1        rms_norm
    gate, up                                        2    1        one product
    silu(gate) * up                                 2    1        silu_mul
    down                                            1    1
                                                   53    8

The kernels round where the model's code does (`twinattn.engine.kernels.fused_layers`). Attention is called as that
code calls it, through transformers' AttentionInterface, so whatever an engine does with it stays.

A part is fused if its class is known, if it consists of plain linear layers, and if it proves itself: over random
tokens it has to compute what the model's own code does, and to call attention with the same arguments. All else stays
the model's own code, and a warning says which. That code also runs where the kernels may not compute: where gradients
are recorded, in training, under autocast and `torch.compile`, and where a submodule has been replaced or hooked since.

Source: the layers of vLLM and TensorRT-LLM: packed products, and the sum in the next norm.
"""

import logging
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from inspect import Parameter, signature
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from fastattn.kernels.device import cannot_import, cannot_interpret
from fastattn.kernels.triton import float_types, is_interpreted, unsupported_device
from twinattn.engine.arguments import check_module

logger = logging.getLogger(__name__)

# The families whose code was read, by the names of their classes: `LlamaDecoderLayer`, `LlamaAttention`, `LlamaMLP` and
# `LlamaRMSNorm`. They differ in biases, in norms of heads, in windows, and in layers without rotary positions.
FAMILIES = ("Cwm", "Llama", "Ministral", "Mistral", "Qwen2", "Qwen3", "Qwen3Moe", "SmolLM3")
PROBE = "fastattn_probe"  # the name, in the AttentionInterface, of what stands in for attention in a proof
CACHES = ("cache", "past_key_values")  # what a module's argument is called: since transformers 5.24, and before
ROUNDING = 0.02  # times the root mean square: another order of sums differs by less, another formula by more


def fuse(model: Any) -> Any:
    """Fuse the layers of a model, in place.

    Weights that are multiplied with the same input are packed into one tensor, and the model's parameters become views
    of it: memory does not double, and `state_dict`, `load_state_dict` and `save_pretrained` work as before.

    Args:
        model: a causal LM of transformers, in evaluation mode, on the device where it will run.

    Returns:
        The same model. `unfuse` gives it its own code back.

    Raises:
        NotImplementedError: for a device or a type that the kernels do not compute on.
        ValueError: if the model is none of transformers, is in training mode, or has no part that can be fused.
    """
    check_module(model)
    reason = _unsupported(model.device, model.dtype)
    if reason:
        raise NotImplementedError(f"fuse: {reason}")
    if model.training:
        raise ValueError("model: expected one in evaluation mode, got one in training; call model.eval() first")
    unfuse(model)
    parts = _parts_of(model)
    left: dict[str, list[str]] = {}  # what is left to the model's own code, by the reason
    users = Counter(x.data_ptr() for module in model.modules() for x in module.parameters(recurse=False))
    with torch.inference_mode(False), torch.no_grad(), torch.autocast(model.device.type, enabled=False):
        for name, part in parts.items():
            reason = part.cannot_fuse(model, users) or part.prove(model)
            if reason:
                left.setdefault(reason, []).append(name)
            else:
                part.module.forward = part
    if sum(map(len, left.values())) == len(parts):
        reasons = "; ".join(left) or "it has no such layer"
        raise ValueError(
            f"model: expected one with layers of {', '.join(FAMILIES)}, got {type(model).__name__}: {reasons}"
        )
    for reason, names in left.items():
        logger.warning("%d of %d parts are not fused, %s ..: %s", len(names), len(parts), names[0], reason)
    return model


def unfuse(model: Any) -> Any:
    """Restore a model's own code, in place, and return the model. Its weights stay packed."""
    for module in model.modules():
        if isinstance(vars(module).get("forward"), _Fused):
            del module.forward
    return model


@cache
def _unsupported(device: torch.device, dtype: torch.dtype) -> str | None:
    """Return why the kernels do not compute on a device in a type, or None."""
    reason = unsupported_device(device)
    if dtype not in float_types(device):
        reason = reason or f"computes {', '.join(map(str, float_types(device)))}, not {dtype}"
    reason = reason or cannot_import("triton", "triton", "jit")
    reason = reason or (cannot_interpret() if is_interpreted(device) else None)
    return reason and f"triton {reason}"


@cache
def _kernels() -> ModuleType:
    """Return the kernels of a layer: late, as Triton is not there on every machine."""
    return import_module("twinattn.engine.kernels.fused_layers")


def _parts_of(model: Any) -> "dict[str, _Fused]":
    """Return the parts of a model that may be fused, by name."""
    parts: dict[str, _Fused] = {}
    for name, decoder in model.named_modules():
        layers, last_norm = getattr(decoder, "layers", None), getattr(decoder, "norm", None)
        if not isinstance(layers, nn.ModuleList) or not any(_is_known(layer, "DecoderLayer") for layer in layers):
            continue
        next_norms = [*(getattr(layer, "input_layernorm", None) for layer in layers[1:]), last_norm]
        for i, (layer, next_norm) in enumerate(zip(layers, next_norms, strict=True)):
            parts[f"{name}.layers.{i}"] = _Layer(layer, next_norm)
            parts[f"{name}.layers.{i}.self_attn"] = _Attention(getattr(layer, "self_attn", None))
            parts[f"{name}.layers.{i}.mlp"] = _MLP(getattr(layer, "mlp", None))
        parts[f"{name}.norm"] = _Norm(last_norm)
    return parts


def _is_known(module: Any, kind: str) -> bool:
    """Return whether a module is of a class whose code was read."""
    of_transformers = type(module).__module__.startswith("transformers.models.")
    return of_transformers and type(module).__name__ in [family + kind for family in FAMILIES]


def _is_as_built(module: Any, device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether a module has no hooks, its class's `forward`, and its weight, if it has one, is as named."""
    if module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module):
        return False
    weight = module._parameters.get("weight")
    return weight is None or (weight.dtype == dtype and weight.device == device)


# --- parts ---


class _Fused:
    """The `forward` of a module in place of its class's, which it calls where the kernels may not compute.

    Attributes:
        module: the module.
        skipped: its submodules whose own code is not called, by name.
        products: those of them that are packed into one product.
        defaults: the arguments that its class's `forward` names besides `hidden_states`, with their defaults.
    """

    kind = ""  # how the name of the module's class ends

    def __init__(self, module: Any, *others: str, packed: Sequence[str] = ()) -> None:
        self.module = module
        self.skipped: dict[str, Any] = {name: getattr(module, name, None) for name in (*packed, *others)}
        self.products = _Packed([self.skipped[name] for name in packed])
        self.defaults = _defaults(module)

    def __call__(self, hidden_states: Tensor, *args: Any, **options: Any) -> Any:
        # Without a name, or by a name of another version of transformers, the class knows what an argument is.
        is_known = not args and all(name in self.defaults for name in CACHES if name in options)
        if is_known and self.can_compute(hidden_states):
            return self.compute(hidden_states, **options)
        return type(self.module).forward(self.module, hidden_states, *args, **options)

    def compute(self, hidden_states: Tensor) -> Any:
        """Compute what the module's own code does."""
        raise NotImplementedError

    def can_compute(self, hidden_states: Tensor) -> bool:
        """Return whether the kernels may compute, and all that is skipped is as it was."""
        if torch.compiler.is_compiling() or torch.is_grad_enabled() or self.module.training:
            return False
        device, dtype = hidden_states.device, hidden_states.dtype
        is_plain = type(hidden_states) is Tensor and not hidden_states.is_neg()
        if not is_plain or torch.is_autocast_enabled(device.type) or _unsupported(device, dtype):
            return False
        children = self.module._modules
        for name, child in self.skipped.items():
            if children.get(name) is not child or not _is_as_built(child, device, dtype):
                return False
        return self.products.is_packed()

    def cannot_fuse(self, model: Any, users: Counter[int]) -> str | None:
        """Return why the module cannot be fused, as far as its structure shows, or None.

        Args:
            model: the model that it is a part of.
            users: how many parameters of the model begin at an address.
        """
        module = self.module
        if not _is_known(module, self.kind):
            return f"{type(module).__name__} is no {self.kind} that is known"
        if "forward" in vars(module):
            return f"{type(module).__name__} has another forward than its class"
        for name, child in self.skipped.items():
            if child is None or not _is_as_built(child, model.device, model.dtype):
                return f"{name} has hooks, another forward than its class, or another type than the model"
            if name.endswith("norm") and not _is_known(child, "RMSNorm"):
                return f"{name} is a {type(child).__name__}"
        return self.products.cannot_pack(users)

    def prove(self, model: Any) -> str | None:
        """Compute over random tokens what the module's own code does; return that it differs, or None."""
        self.products.pack()
        tokens = _random(model, 3, model.config.get_text_config().hidden_size)
        with self.stand_ins() as calls:
            for inputs in self.inputs(model, calls):
                own = type(self.module).forward(self.module, tokens, **inputs)
                own_calls = calls.copy()
                calls.clear()
                out = self.compute(tokens, **inputs)
                if not _agree((own, own_calls), (out, calls)):
                    return f"{type(self.module).__name__} computes something else"
                calls.clear()
        return None

    def inputs(self, model: Any, calls: list[Any]) -> list[dict[str, Any]]:
        """Return what a proof calls the module with, one time after the other, besides the tokens."""
        return [{}]

    @contextmanager
    def stand_ins(self) -> Iterator[list[Any]]:
        """Replace what the module calls during a proof, and record the arguments of the calls."""
        yield []


class _Norm(_Fused):
    """A norm by the root mean square, which the layer before may have computed already."""

    kind = "RMSNorm"

    def compute(self, hidden_states: Tensor) -> Tensor:
        return _norm(self.module, hidden_states)


class _MLP(_Fused):
    """A SwiGLU; a proof shows that the activation is SiLU."""

    kind = "MLP"

    def __init__(self, module: Any) -> None:
        super().__init__(module, "act_fn", packed=("gate_proj", "up_proj"))

    def compute(self, hidden_states: Tensor) -> Any:
        return self.module.down_proj(_kernels().silu_mul(self.products(hidden_states)))


class _Attention(_Fused):
    """The products around an attention, the norms of heads if it has some, and the rotation.

    Attributes:
        options: what the module's own code passes to attention besides the tensors, as a proof finds out.
        cache_takes_options: whether it passes a cache the options of attention, to change them, as a proof finds out.
    """

    kind = "Attention"
    arguments = ("position_embeddings", "attention_mask", *CACHES)

    def __init__(self, module: Any) -> None:
        norms = ("q_norm", "k_norm") if hasattr(module, "q_norm") else ()
        super().__init__(module, *norms, packed=("q_proj", "k_proj", "v_proj"))
        self.norms = [self.skipped[name] for name in norms]
        self.options: dict[str, Any] | None = None
        self.cache_takes_options: bool | None = None

    def compute(
        self,
        hidden_states: Tensor,
        position_embeddings: Any = None,
        attention_mask: Tensor | None = None,
        cache: Any = None,
        past_key_values: Any = None,
        **options: Any,
    ) -> Any:
        module, head_size = self.module, self.module.head_dim
        cos, sin = position_embeddings if getattr(module, "use_rope", True) else (None, None)  # as layers of SmolLM3
        qkv = self.products(hidden_states)
        num_heads, num_kv_heads = (linear.out_features // head_size for linear in self.products.linears[:2])
        query_weight, key_weight = [norm.weight for norm in self.norms] or (None, None)
        eps = self.norms[0].variance_epsilon if self.norms else 0.0
        of_heads = num_heads, num_kv_heads, head_size
        query, key = _kernels().qk_norm_rope(qkv, *of_heads, cos, sin, query_weight, key_weight, eps)
        value = qkv[..., -num_kv_heads * head_size :].unflatten(-1, (num_kv_heads, head_size))
        query, key, value = (x.transpose(1, 2) for x in (query, key, value))  # transformers has the heads in front
        cache = past_key_values if cache is None else cache
        if cache is not None:
            for_cache = {"kwargs": options} if self.cache_takes_options else {}
            key, value = cache.update(key, value, module.layer_idx, **for_cache)
        name, eager = module.config._attn_implementation, self.code.eager_attention_forward
        attend = self.code.ALL_ATTENTION_FUNCTIONS.get_interface(name, eager)
        out, weights = attend(module, query, key, value, attention_mask, **self.options or {}, **options)
        return module.o_proj(out.reshape(*hidden_states.shape[:-1], -1)), weights

    @property
    def code(self) -> Any:
        """The Python module of the attention's class."""
        return sys.modules[type(self.module).__module__]

    def cannot_fuse(self, model: Any, users: Counter[int]) -> str | None:
        reason = super().cannot_fuse(model, users)
        if reason is None and len({norm.variance_epsilon for norm in self.norms}) > 1:
            return "the norms of queries and keys have different eps"
        unknown = [name for name in self.defaults if name not in self.arguments]
        if reason is None and (unknown or not any(name in self.defaults for name in CACHES)):
            return f"{type(self.module).__name__} takes {', '.join(unknown) or 'no cache by a name that is known'}"
        return reason

    def inputs(self, model: Any, calls: list[Any]) -> list[dict[str, Any]]:
        """Return a call without a cache, and one with a cache and with one option more than any family has."""
        angles = _random(model, 3, self.module.head_dim // 2)
        angles = torch.cat([angles, angles], -1)
        alone = dict(position_embeddings=(angles.cos(), angles.sin()), attention_mask=None)
        name = next(name for name in CACHES if name in self.defaults)
        return [alone, alone | {name: _Cache(self, calls), PROBE: object()}]

    @contextmanager
    def stand_ins(self) -> Iterator[list[Any]]:
        calls: list[Any] = []

        def attend(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **options: Any) -> Any:
            calls.append((module, query, key, value, mask, options))
            if self.options is None:
                self.options = options
            return query.transpose(1, 2).contiguous(), None

        config, functions = self.module.config, self.code.ALL_ATTENTION_FUNCTIONS
        before = config._attn_implementation
        functions[PROBE], config._attn_implementation = attend, PROBE
        try:
            yield calls
        finally:
            config._attn_implementation = before
            del functions[PROBE]


class _Cache:
    """The cache of a proof: it lists what it is called with, returns more keys, and adds an option, if it may."""

    def __init__(self, attention: _Attention, calls: list[Any]) -> None:
        self.attention, self.calls = attention, calls

    def update(self, key: Tensor, value: Tensor, layer_idx: int, **others: Any) -> tuple[Tensor, Tensor]:
        """Take what `transformers.Cache.update` takes."""
        self.calls.append((key, value, layer_idx, {name: dict(x) for name, x in others.items()}))
        if self.attention.cache_takes_options is None:
            self.attention.cache_takes_options = "kwargs" in others
        if "kwargs" in others:
            others["kwargs"][f"{PROBE}_cache"] = self
        return torch.cat([value, key], dim=2), torch.cat([key, value], dim=2)


class _Layer(_Fused):
    """The norms and sums of a layer; it also norms its output for the next layer, or for the last norm."""

    kind = "DecoderLayer"

    def __init__(self, module: Any, next_norm: Any) -> None:
        super().__init__(module, "input_layernorm", "post_attention_layernorm")
        self.next_norm = next_norm if _is_known(next_norm, "RMSNorm") else None

    def compute(self, hidden_states: Tensor, **options: Any) -> Any:
        layer = self.module
        normed = _norm(layer.input_layernorm, hidden_states)
        attended, _ = layer.self_attn(hidden_states=normed, **self.defaults | options)  # all that it does not use
        norm = layer.post_attention_layernorm
        normed, hidden_states = _kernels().rms_norm(attended, norm.weight, norm.variance_epsilon, hidden_states)
        added, norm = layer.mlp(normed), self.next_norm
        if norm is None or added.is_inference() or not _is_as_built(norm, added.device, added.dtype):
            return hidden_states + added
        normed, hidden_states = _kernels().rms_norm(added, norm.weight, norm.variance_epsilon, hidden_states)
        # An attribute is gone with its tensor; a class of tensors would meet every operation of the model.
        hidden_states.normed = norm, normed, hidden_states._version  # type: ignore[attr-defined]
        return hidden_states

    def inputs(self, model: Any, calls: list[Any]) -> list[dict[str, Any]]:
        """Return a call without arguments, and one with each that it has and one that it does not know."""
        return [{}, {name: object() for name in (*self.defaults, PROBE)}]

    @contextmanager
    def stand_ins(self) -> Iterator[list[Any]]:
        calls: list[Any] = []

        def attend(**options: Any) -> Any:
            calls.append(options)
            return options["hidden_states"] * 0.5, None

        def multiply(hidden_states: Tensor) -> Tensor:
            calls.append(hidden_states)
            return hidden_states * 0.5

        blocks = vars(self.module.self_attn), vars(self.module.mlp)
        before = [block.pop("forward", None) for block in blocks]
        for block, stand_in in zip(blocks, (attend, multiply), strict=True):
            block["forward"] = stand_in
        try:
            yield calls
        finally:
            for block, forward in zip(blocks, before, strict=True):
                del block["forward"]
                if forward is not None:
                    block["forward"] = forward


def _defaults(module: Any) -> dict[str, Any]:
    """Return the arguments of the `forward` of a module's class that may be passed by name, with their defaults."""
    forward = getattr(type(module), "forward", None)
    named = [*signature(forward).parameters.values()][2:] if forward else []  # the module, and `hidden_states`
    return {x.name: x.default for x in named if x.kind in (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)}


def _norm(norm: Any, hidden_states: Tensor) -> Tensor:
    """Norm the output of a layer, if the layer has not done so, or if it was changed since."""
    found = vars(hidden_states).pop("normed", None)
    if found is not None and found[0] is norm and found[2] == hidden_states._version:
        normed: Tensor = found[1]
        return normed
    return _kernels().rms_norm(hidden_states, norm.weight, norm.variance_epsilon)[0]


def _random(model: Any, num_tokens: int, width: int) -> Tensor:
    """Make random numbers, the same each time."""
    numbers = torch.randn(1, num_tokens, width, generator=torch.Generator().manual_seed(0), device="cpu")
    return numbers.to(model.device, model.dtype)


def _agree(own: Any, other: Any) -> bool:
    """Return whether tensors, in tuples, lists and dicts, are equal but for rounding, and everything else is equal."""
    if isinstance(own, Tensor) and isinstance(other, Tensor):
        if own.shape != other.shape or own.dtype != other.dtype:
            return False
        own, other = own.double(), other.double()
        return bool((own - other).square().mean() <= ROUNDING**2 * own.square().mean())
    if isinstance(own, tuple | list) and isinstance(other, tuple | list):
        return len(own) == len(other) and all(map(_agree, own, other))
    if isinstance(own, dict) and isinstance(other, dict):
        return own.keys() == other.keys() and all(_agree(own[name], other[name]) for name in own)
    return bool(own is other or own == other)


class _Packed:
    """Linear layers over the same input as one product: their weights are rows of one tensor, and views of it.

    Attributes:
        linears: the linear layers; there may be none.
    """

    def __init__(self, linears: Sequence[Any]) -> None:
        self.linears = linears
        self._weight: Tensor | None = None
        self._bias: Tensor | None = None
        self._addresses: list[int] = []

    def __call__(self, x: Tensor) -> Tensor:
        assert self._weight is not None  # it was packed
        return nn.functional.linear(x, self._weight, self._bias)

    def cannot_pack(self, users: Counter[int]) -> str | None:
        """Return why the linear layers cannot be packed, or None; `users` are as in `_Fused.cannot_fuse`."""
        weights = [x for linear in self.linears for x in linear._parameters.values() if x is not None]
        for linear in self.linears:
            if type(linear) is not nn.Linear:
                return f"a linear layer is a {type(linear).__name__}"
        for x in weights:
            if type(x) is not nn.Parameter or type(x.data) is not Tensor:
                return f"a weight is a {type(x.data).__name__}"
            if users[x.data_ptr()] > 1:
                return "a weight is shared"
        if len({(linear.bias is None, x.dtype, x.device) for linear in self.linears for x in weights}) > 1:
            return "linear layers of one input differ in types, devices, or whether they have a bias"
        return None

    @torch.inference_mode(False)
    @torch.no_grad()
    def pack(self) -> None:
        """Lay the weights side by side."""
        if not self.linears:
            return
        self._weight = _side_by_side([linear.weight for linear in self.linears])
        biases = [linear.bias for linear in self.linears]
        self._bias = None if biases[0] is None else _side_by_side(biases)
        self._addresses = self._find()

    def is_packed(self) -> bool:
        """Return whether the weights are side by side; those that were moved since are packed again, if they can be."""
        if self._find() != self._addresses:
            if self.cannot_pack(Counter()):
                return False
            self.pack()
        return True

    def _find(self) -> list[int]:
        return [x.data_ptr() for linear in self.linears for x in linear._parameters.values() if x is not None]


def _side_by_side(parameters: Sequence[nn.Parameter]) -> Tensor:
    """Copy parameters into one tensor, along its rows, and let them be views of it."""
    packed = torch.cat([x.data for x in parameters])
    for x, view in zip(parameters, packed.split([len(x) for x in parameters]), strict=True):
        x.data = view
    return packed
