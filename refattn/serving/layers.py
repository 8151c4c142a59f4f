"""Kinds of layers: how each allocates its pool, writes, plans and attends, with the paths of either twin.

A layer is identified by its path and the arguments of its plan, so equal layers share one plan per step.
"""

import importlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, NamedTuple

import torch
from einops import rearrange, reduce
from jaxtyping import Float, Float32, Int64
from torch import Tensor

from refattn.interface import (
    AttentionOptions,
    Batch,
    CascadePlan,
    Fp8Scales,
    Int8Scales,
    Part,
    Plan,
    PrefillPlan,
    TreePlan,
    Trees,
)
from refattn.interface.values import describe, expect

WORKSPACE = 16384  # context tokens whose keys and values are made at a time: 1.25 GiB in DeepSeek-V3's sizes, bfloat16
Lens = Sequence[tuple[int, int]]  # of each request its new tokens, and all its tokens


class Twin:
    """The package that computes, by its modules: each is imported by name when it is first needed.

    Args:
        package: `refattn`, `fastattn`, or anything with modules of those names.
    """

    def __init__(self, package: Any) -> None:
        self.package = package

    def __getattr__(self, module: str) -> Any:
        """Return a module of the package."""
        found = getattr(self.package, module, None) or importlib.import_module(f"{self.package.__name__}.{module}")
        setattr(self, module, found)
        return found


class Amax(NamedTuple):
    """The largest magnitudes of a layer's keys and values, as `calibrate` has found them.

    Attributes:
        key: per KV head and channel, `[hk, d]` float32 on the CPU; of latents, in a layer that has them, `[1, r]`.
        value: likewise, `[hk, dv]`; of rotary keys in a layer with latents, `[1, rope]`.
    """

    key: Float32[Tensor, "hk d"]
    value: Float32[Tensor, "hk dv"]


@dataclass(frozen=True)
class Layer:
    """A layer that attends to all tokens before it, over the paged cache.

    Attributes:
        takes_trees: whether it has a mask for drafted trees; all layers take chains.
        num_kv_heads: key heads, `hk`.
        head_size: elements of a key and of a value, `d`.
    """

    takes_trees: ClassVar[bool] = True
    num_kv_heads: int
    head_size: int

    @property
    def window(self) -> int:
        """Tokens that a query sees, itself included; 0 for all."""
        return 0

    @property
    def reach(self) -> int:
        """Tokens that a query may see at most, itself included; 0 for all. No query needs the memory of older ones."""
        return self.window

    @property
    def takes_cascades(self) -> bool:
        """Whether the plan of a step may be a cascade, which shows all tokens."""
        return type(self) is Layer

    @property
    def splits_decodes(self) -> bool:
        """Whether a step's decodes are planned apart from its prefills, and so have to come first in it."""
        return False

    @property
    def has_codes(self) -> bool:
        """Whether the layer's pool holds codes."""
        return False

    @property
    def amax_sizes(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """The sizes of an `Amax` of this layer: of keys, and of values."""
        return (self.num_kv_heads, self.head_size), (self.num_kv_heads, self.head_size)

    def calibrated(self, twin: Twin, amax: Amax, device: torch.device) -> "Layer":
        """Return this layer with the scales for its codes."""
        raise NotImplementedError(f"calibration: a {type(self).__name__} has no codes")

    def bytes_per_token(self, dtype: torch.dtype) -> int:
        """Return the bytes that a token takes in the layer's pool."""
        return 2 * self.num_kv_heads * self.head_size * dtype.itemsize

    def pool_blocks(self, num_blocks: int, block_size: int, *, max_num_batched_tokens: int, max_num_seqs: int) -> int:
        """Return how many blocks the layer's pool needs, where the sequences of a server have `num_blocks`.

        With fewer than those, the layer has a `WindowPool` of its own, which holds what the tokens of any step see and
        are themselves: `q` new tokens see the `reach - 1` before them. So many tokens in a row touch at most
        `(reach - 1 + q + 2 * block_size - 2) / block_size` blocks, and a step has at most `max_num_batched_tokens` of
        them, of at most `max_num_seqs` sequences.
        """
        if not self.reach:
            return num_blocks
        seen = min(max_num_seqs, num_blocks) * (self.reach - 1 + 2 * block_size - 2)
        return min(num_blocks, (seen + max_num_batched_tokens) // block_size)

    def allocate(
        self, twin: Twin, num_blocks: int, block_size: int, *, dtype: torch.dtype, device: torch.device
    ) -> Any:
        """Make the layer's pool."""
        sizes = (num_blocks, block_size, self.num_kv_heads, self.head_size)
        return twin.kv_cache.allocate(*sizes, dtype=dtype, device=device)

    def plan(self, twin: Twin, batch: Batch, block_size: int, lens: Lens | None = None, decode_len: int = 1) -> Plan:
        """Plan a step, for all layers that are equal to this one.

        Args:
            twin: the package that computes.
            batch: the lengths and blocks of the step.
            block_size: tokens in a block.
            lens: the new tokens and all tokens of each request, decodes before prefills; None where only the device
                knows.
            decode_len: most new tokens of a decode, its drafts included.
        """
        plan: Plan = twin.chunked_prefill.plan(batch, block_size=block_size)
        return plan

    def plan_trees(self, twin: Twin, batch: Batch, trees: Trees, block_size: int) -> TreePlan:
        """Plan a step whose new tokens are drafted trees, those of a prompt as a chain."""
        window_size = (self.window - 1, 0) if self.window else (-1, -1)
        plan: TreePlan = twin.speculative.plan(batch, block_size=block_size, trees=trees, window_size=window_size)
        return plan

    def attend(
        self,
        twin: Twin,
        module: Any,
        query: Float[Tensor, "t h d"],
        key: Float[Tensor, "t hk d"] | None,
        value: Float[Tensor, "t hk dv"] | None,
        cache: Any,
        slot_mapping: Int64[Tensor, "t"],
        plan: Plan | CascadePlan | TreePlan,
        options: AttentionOptions,
    ) -> Float[Tensor, "t h dv"]:
        """Write the new keys and values into the pool, if they are the layer's own and not None, and attend over it."""
        if key is not None:
            twin.kv_cache.write(key, value, *cache, slot_mapping)
        path = twin.chunked_prefill
        if isinstance(plan, CascadePlan | TreePlan):
            path = twin.cascade if isinstance(plan, CascadePlan) else twin.speculative
        out: Tensor = path.attention(query, *cache, plan, options)
        return out


@dataclass(frozen=True)
class WindowLayer(Layer):
    """A layer whose tokens see the last few only.

    Attributes:
        window: tokens that a query sees, itself included.
    """

    window: int = 0

    def __post_init__(self) -> None:
        """Check the window.

        Raises:
            ValueError: if there is none.
        """
        if self.window < 1:
            raise ValueError(f"model: expected a sliding_window of at least 1 token in such layers, got {self.window}")

    def plan(self, twin: Twin, batch: Batch, block_size: int, lens: Lens | None = None, decode_len: int = 1) -> Plan:
        """Plan a step over trimmed tables."""
        plan: Plan = twin.sliding_window.plan(batch, window_size=(self.window - 1, 0), block_size=block_size)
        return plan


class SplitPlan(NamedTuple):
    """The plans of a step's decodes and of its prefills, and the query rows of each."""

    parts: tuple[tuple[slice, Plan | PrefillPlan | TreePlan], ...]


def _decodes_and_prefills(twin: Twin, batch: Batch, lens: Lens | None, decode_len: int) -> Sequence[Part]:
    """Return the decodes and the prefills of a step that has both; else, or where nobody knows, all of it."""
    query_lens = [query_len for query_len, _ in lens or ()]
    if query_lens and min(query_lens) <= decode_len < max(query_lens):
        parts: Sequence[Part] = twin.metadata.split_decodes_and_prefills(batch, query_lens, decode_len=decode_len)
        return parts
    return [Part(batch, slice(None))]


@dataclass(frozen=True)
class LocalLayer(Layer):
    """A layer whose tokens see their own chunk only.

    The decodes of a step and its prefills are planned apart: a plan has as many virtual sequences for each request as
    its longest prefill needs, and its kernel is one for many query rows.

    Attributes:
        chunk_size: tokens in a chunk.
    """

    takes_trees: ClassVar[bool] = False
    chunk_size: int = 0

    @property
    def reach(self) -> int:
        """Tokens that a query may see at most, itself included: those of a chunk."""
        return self.chunk_size

    @property
    def splits_decodes(self) -> bool:
        """Whether a step's decodes are planned apart from its prefills, and so have to come first in it."""
        return True

    def plan(  # type: ignore[override]  # attended by this class alone
        self, twin: Twin, batch: Batch, block_size: int, lens: Lens | None = None, decode_len: int = 1
    ) -> SplitPlan:
        """Plan a step over virtual sequences."""
        parts = _decodes_and_prefills(twin, batch, lens, decode_len)
        sizes = dict(chunk_size=self.chunk_size, block_size=block_size)
        return SplitPlan(tuple((part.tokens, twin.local.plan(part.batch, **sizes)) for part in parts))

    def attend(  # type: ignore[override]  # with the plan of this class
        self,
        twin: Twin,
        module: Any,
        query: Float[Tensor, "t h d"],
        key: Float[Tensor, "t hk d"] | None,
        value: Float[Tensor, "t hk dv"] | None,
        cache: Any,
        slot_mapping: Int64[Tensor, "t"],
        plan: SplitPlan,
        options: AttentionOptions,
    ) -> Float[Tensor, "t h dv"]:
        """Write the new keys and values into the pool, if there are any, and attend, decodes and prefills apart."""
        if key is not None:
            twin.kv_cache.write(key, value, *cache, slot_mapping)
        outs = [twin.local.attention(query[tokens], *cache, part, options) for tokens, part in plan.parts]
        return torch.cat(outs)


@dataclass(frozen=True)
class DifferentialLayer(Layer):
    """A layer of DiffLlama: two softmaxes, one subtracted, and a norm; its heads come in halves there."""

    takes_trees: ClassVar[bool] = False

    def allocate(
        self, twin: Twin, num_blocks: int, block_size: int, *, dtype: torch.dtype, device: torch.device
    ) -> Any:
        """Make the layer's pool of pairs."""
        sizes = (num_blocks, block_size, self.num_kv_heads, self.head_size)
        return twin.differential.allocate(*sizes, dtype=dtype, device=device)

    def plan(self, twin: Twin, batch: Batch, block_size: int, lens: Lens | None = None, decode_len: int = 1) -> Plan:
        """Plan a step over all tokens."""
        plan: Plan = twin.differential.plan(batch, block_size=block_size)
        return plan

    def attend(  # type: ignore[override]  # with the plan of this class
        self,
        twin: Twin,
        module: Any,
        query: Float[Tensor, "t h d"],
        key: Float[Tensor, "t hk d"] | None,
        value: Float[Tensor, "t hk d"] | None,
        cache: Any,
        slot_mapping: Int64[Tensor, "t"],
        plan: Plan,
        options: AttentionOptions,
    ) -> Float[Tensor, "t h d"]:
        """Write the new pairs into the pool, if there are any, and attend; the answer ends with the layer's norm."""
        path = twin.differential
        if key is not None:
            path.write(*map(path.interleave_halves, (key, value)), cache, slot_mapping)
        query = path.interleave_halves(query)
        vectors = (module.lambda_q1, module.lambda_k1, module.lambda_q2, module.lambda_k2)
        out: Tensor = path.attention(
            query,
            cache,
            plan,
            options,
            lambda_full=path.compute_lambda(*vectors, lambda_init=module.lambda_init),
            lambda_init=module.lambda_init,
            norm_weight=module.groupnorm.weight,
            norm_eps=module.groupnorm.eps,
        )
        return out


@dataclass(frozen=True)
class LatentLayer(Layer):
    """A layer with latent attention (MLA): its pool holds a latent and a rotary key of each token, and no values.

    Decodes, their drafts included, absorb the projection of keys into their queries and read the latents as they are.
    Prefills make keys and values of the latents, of their context `WORKSPACE` tokens at a time. Both give the same
    answers, but not to the bit, and how many tokens are made at a time depends on how many sequences share the
    workspace. So everything is absorbed under `batch_invariant`, as it is where only the device knows which sequences
    decode.

    Attributes:
        num_kv_heads: 1, which all query heads share.
        head_size: elements of a latent and of a rotary key, `r + rope`.
        latent_rank: elements of a latent, `r`.
        batch_invariant: whether no bit of a row may depend on what else is in the batch. Absorption and projection are
            products with a matrix of the model's, and as they are.
        codes: the type of the pool's codes, fp8; None for numbers of the model's type.
        cache_scale: of the codes, of latents and rotary keys alike: 1, or if it is calibrated, what makes the largest
            of them the largest code. No plan depends on it.
    """

    latent_rank: int
    batch_invariant: bool = False
    codes: torch.dtype | None = None
    cache_scale: float = field(default=1.0, compare=False)

    @property
    def has_codes(self) -> bool:
        """Whether the layer's pool holds codes."""
        return self.codes is not None

    @property
    def amax_sizes(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """The sizes of an `Amax` of this layer: of latents, and of rotary keys."""
        return (1, self.latent_rank), (1, self.head_size - self.latent_rank)

    def calibrated(self, twin: Twin, amax: Amax, device: torch.device) -> "LatentLayer":
        """Return this layer with the scale under which the largest magnitude becomes the largest code."""
        assert self.codes is not None  # as `set_scales` has made sure
        largest = max(float(x.max()) for x in amax)
        return replace(self, cache_scale=largest / torch.finfo(self.codes).max or 1.0)

    @property
    def splits_decodes(self) -> bool:
        """Whether a step's decodes are planned apart from its prefills, and so have to come first in it."""
        return True

    def bytes_per_token(self, dtype: torch.dtype) -> int:
        """Return the bytes that a token takes in the layer's pool."""
        return self.head_size * (self.codes or dtype).itemsize

    def allocate(
        self, twin: Twin, num_blocks: int, block_size: int, *, dtype: torch.dtype, device: torch.device
    ) -> Any:
        """Make the layer's pool of latents."""
        sizes = (num_blocks, block_size, self.latent_rank, self.head_size - self.latent_rank)
        return twin.mla.allocate(*sizes, dtype=self.codes or dtype, device=device)

    def plan(  # type: ignore[override]  # attended by this class alone
        self, twin: Twin, batch: Batch, block_size: int, lens: Lens | None = None, decode_len: int = 1
    ) -> SplitPlan:
        """Plan a step: absorbed, or its prefills in chunks of the workspace."""
        if lens is None or self.batch_invariant:
            return SplitPlan(((slice(None), twin.mla.plan(batch, block_size=block_size)),))

        longest = max((seq_len - query_len for query_len, seq_len in lens if query_len > decode_len), default=0)

        def plan_part(part: Batch) -> Plan | PrefillPlan:
            if part.max_query_len <= decode_len:
                absorbed: Plan = twin.mla.plan(part, block_size=block_size)
                return absorbed
            sizes = dict(block_size=block_size, workspace=max(WORKSPACE, part.num_seqs), max_context_len=longest)
            prefill: PrefillPlan = twin.mla.plan_prefill(part, **sizes)
            return prefill

        parts = _decodes_and_prefills(twin, batch, lens, decode_len)
        return SplitPlan(tuple((part.tokens, plan_part(part.batch)) for part in parts))

    def plan_trees(  # type: ignore[override]  # attended by this class alone
        self, twin: Twin, batch: Batch, trees: Trees, block_size: int
    ) -> SplitPlan:
        """Plan a step whose new tokens are drafted trees: all of them absorbed, those of prompts too."""
        return SplitPlan(((slice(None), super().plan_trees(twin, batch, trees, block_size)),))

    def attend(  # type: ignore[override]  # with the plan of this class
        self,
        twin: Twin,
        module: Any,
        query: Float[Tensor, "t h d"],
        latent: Float[Tensor, "t 1 r"],
        rope_key: Float[Tensor, "t 1 rope"],
        cache: Float[Tensor, "n p c"],
        slot_mapping: Int64[Tensor, "t"],
        plan: SplitPlan,
        options: AttentionOptions,
    ) -> Float[Tensor, "t h dv"]:
        """Write the new latents and rotary keys into the pool, and attend over it, decodes and prefills apart.

        Raises:
            ValueError: if the module's keys and values are more than a matrix times a latent.
        """
        path, num_heads, rope_size = twin.mla, query.shape[1], rope_key.shape[2]
        made_by = module.kv_b_proj
        if type(made_by) is not torch.nn.Linear or made_by.bias is not None:  # an adapter or a type of fewer bits, say
            raise ValueError(f"model: expected a kv_b_proj that is a Linear without a bias, got {made_by}")
        weight = rearrange(made_by.weight, "(h made) r -> h made r", h=num_heads)  # a view, so always up to date
        key_projection, value_projection = weight.tensor_split([query.shape[2] - rope_size], dim=1)
        latent, rope_key = latent[:, 0], rope_key[:, 0]
        scale = dict(cache_scale=self.cache_scale)
        path.write(latent, rope_key, cache, slot_mapping, **scale)

        def attend_part(tokens: slice, plan: Plan | PrefillPlan | TreePlan) -> Tensor:
            if isinstance(plan, PrefillPlan):
                new = (query[tokens], latent[tokens], rope_key[tokens])
                projections = dict(key_projection=key_projection, value_projection=value_projection)
                out: Tensor = path.prefill(*new, cache, plan, options, **projections, **scale)
                return out
            absorbed = path.absorb(query[tokens], key_projection)
            latents = path.attention(absorbed, cache, plan, options, latent_rank=self.latent_rank, **scale)
            out = path.project(latents, value_projection)
            return out

        return torch.cat([attend_part(*part) for part in plan.parts])


KV_CACHE_DTYPES = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2, "int8": torch.int8}


@dataclass(frozen=True)
class QuantizedLayer(Layer):
    """A layer whose pool holds codes of 8 bits; who sees whom in it is another kind's to say.

                            scale of a key                      of a value
        fp8                 1                                   1
        fp8, calibrated     per head: amax / largest code       likewise
        int8                per token and head, in the pool     none: values stay in the model's type
        int8, calibrated    likewise                            per head and channel: amax / 127

    Attributes:
        layer: the kind whose plan it has.
        kv_cache_dtype: what the codes are, a name of `KV_CACHE_DTYPES`.
        key_scale: of fp8 keys. No plan depends on scales, so layers with different ones are equal.
        value_scale: of fp8 values, or of int8 values if it is a tensor.
    """

    layer: Layer
    kv_cache_dtype: str
    key_scale: float | Float32[Tensor, "hk"] = field(default=1.0, compare=False)
    value_scale: float | Float32[Tensor, "..."] = field(default=1.0, compare=False)

    @property
    def has_codes(self) -> bool:
        """Whether the layer's pool holds codes."""
        return True

    def calibrated(self, twin: Twin, amax: Amax, device: torch.device) -> "QuantizedLayer":
        """Return this layer with the scales under which the largest magnitudes become the largest codes."""
        if self.kv_cache_dtype == "int8":
            scale = twin.quantized.value_scales([rearrange(amax.value, "hk d -> 1 hk d")])
            return replace(self, value_scale=scale.to(device))
        largest_code = torch.finfo(KV_CACHE_DTYPES[self.kv_cache_dtype]).max
        scales = (reduce(x, "hk d -> hk", "max") / largest_code for x in amax)
        of_key, of_value = (scale.masked_fill(scale == 0, 1.0).to(device) for scale in scales)
        return replace(self, key_scale=of_key, value_scale=of_value)

    @property
    def has_int8_values(self) -> bool:
        """Whether values are int8, too: their scales are known."""
        return self.kv_cache_dtype == "int8" and isinstance(self.value_scale, Tensor)

    @property
    def fixed_scales(self) -> list[Tensor]:
        """The scales that do not lie in the pool, where there are tensors of them."""
        return [x for x in (self.key_scale, self.value_scale) if isinstance(x, Tensor)]

    @property
    def takes_trees(self) -> bool:  # type: ignore[override]  # what a class says of the other kinds
        """Whether it has a mask for drafted trees."""
        return self.layer.takes_trees

    @property
    def takes_cascades(self) -> bool:
        """Whether the plan of a step may be a cascade."""
        return self.layer.takes_cascades

    @property
    def window(self) -> int:
        """Tokens that a query sees, itself included; 0 for all."""
        return self.layer.window

    @property
    def reach(self) -> int:
        """Tokens that a query may see at most, itself included; 0 for all."""
        return self.layer.reach

    @property
    def splits_decodes(self) -> bool:
        """Whether a step's decodes are planned apart from its prefills, and so have to come first in it."""
        return self.layer.splits_decodes

    def bytes_per_token(self, dtype: torch.dtype) -> int:
        """Return the bytes that a token takes in the layer's pool, the scale of an int8 key included."""
        of_key = self.head_size + (torch.float32.itemsize if self.kv_cache_dtype == "int8" else 0)
        keeps_values = self.kv_cache_dtype == "int8" and not self.has_int8_values
        return self.num_kv_heads * (of_key + self.head_size * (dtype.itemsize if keeps_values else 1))

    def allocate(
        self, twin: Twin, num_blocks: int, block_size: int, *, dtype: torch.dtype, device: torch.device
    ) -> Any:
        """Make the layer's pools of codes, and for int8 one of the keys' scales."""
        sizes = (num_blocks, block_size, self.num_kv_heads, self.head_size)
        if self.kv_cache_dtype == "int8":
            value_dtype = torch.int8 if self.has_int8_values else dtype
            return twin.quantized.allocate_int8(*sizes, value_dtype=value_dtype, device=device)
        return twin.kv_cache.allocate(*sizes, dtype=KV_CACHE_DTYPES[self.kv_cache_dtype], device=device)

    def plan(self, twin: Twin, batch: Batch, block_size: int, lens: Lens | None = None, decode_len: int = 1) -> Any:
        """Plan a step as the other kind does."""
        return self.layer.plan(twin, batch, block_size, lens, decode_len)

    def attend(
        self,
        twin: Twin,
        module: Any,
        query: Float[Tensor, "t h d"],
        key: Float[Tensor, "t hk d"] | None,
        value: Float[Tensor, "t hk dv"] | None,
        cache: Any,
        slot_mapping: Int64[Tensor, "t"],
        plan: Any,
        options: AttentionOptions,
    ) -> Float[Tensor, "t h dv"]:
        """Quantise and write the new keys and values, if there are any, and attend to what can be read of them."""
        *pools, last = cache
        if self.kv_cache_dtype == "int8":
            of_value = self.value_scale if isinstance(self.value_scale, Tensor) else None
            scales: Int8Scales | Fp8Scales = Int8Scales(key=last, value=of_value)
        else:
            kind = KV_CACHE_DTYPES[self.kv_cache_dtype]
            pools, scales = cache, Fp8Scales(self.key_scale, self.value_scale, format=kind)
        if key is not None:
            twin.quantized.write(key, value, *pools, slot_mapping, scales=scales)
        parts = plan.parts if isinstance(plan, SplitPlan) else ((slice(None), plan),)
        outs = [twin.quantized.attention(query[rows], *pools, part, options, scales=scales) for rows, part in parts]
        return torch.cat(outs)


def quantize(layers: Sequence[Layer], kv_cache_dtype: str) -> list[Layer]:
    """Return layers with pools of a type: those given for "auto", else with codes instead of numbers.

    Raises:
        ValueError: if there is no such type.
        NotImplementedError: if a kind of layer has no pool of such codes.
    """
    if kv_cache_dtype == "auto":
        return list(layers)
    if kv_cache_dtype not in KV_CACHE_DTYPES:
        raise ValueError(f"kv_cache_dtype: expected auto, {', '.join(KV_CACHE_DTYPES)}, got {kv_cache_dtype!r}")
    return [_quantize_layer(layer, kv_cache_dtype) for layer in layers]


def _quantize_layer(layer: Layer, kv_cache_dtype: str) -> Layer:
    """Return a layer whose pool holds codes."""
    is_latent = isinstance(layer, LatentLayer)
    if isinstance(layer, DifferentialLayer) or (is_latent and kv_cache_dtype == "int8"):
        kind, others = ("latents", ", fp8_e4m3, fp8_e5m2") if is_latent else ("pairs", "")
        raise NotImplementedError(
            f"kv_cache_dtype: the engine keeps no {kind} in a pool of {kv_cache_dtype}, only of auto{others}"
        )
    if isinstance(layer, LatentLayer):
        return replace(layer, codes=KV_CACHE_DTYPES[kv_cache_dtype])
    return QuantizedLayer(layer.num_kv_heads, layer.head_size, layer, kv_cache_dtype)


def set_scales(
    layers: Sequence[Layer], calibration: Sequence[Amax], twin: Twin, owners: Sequence[int], device: torch.device
) -> list[Layer]:
    """Return layers with pools of codes, with the scales that a calibration asks for.

    Args:
        layers: from `quantize`.
        calibration: from `calibrate`, one for each layer.
        twin: the package that computes.
        owners: of each layer the one whose pool it reads, and so whose scales it has.
        device: where the scales are to be.

    Raises:
        ValueError: if layers have no codes, or the calibration is not one of theirs.
    """
    if not all(layer.has_codes for layer in layers):
        raise ValueError('calibration: expected None, as pools of kv_cache_dtype="auto" have no scales, got some')
    if not isinstance(calibration, Sequence) or len(calibration) != len(layers):
        number = len(calibration) if isinstance(calibration, Sequence) else type(calibration).__name__
        raise ValueError(f"calibration: expected an Amax for each of {len(layers)} layers, got {number}")
    for i, (layer, amax) in enumerate(zip(layers, calibration, strict=True)):
        if not isinstance(amax, Amax):
            raise ValueError(f"calibration[{i}]: expected an Amax, got {describe(amax)}")
        for (name, largest), sizes in zip(amax._asdict().items(), layer.amax_sizes, strict=True):
            expect(largest, f"calibration[{i}].{name}", torch.float32, ("hk", "d"), sizes)
            if not largest.is_cpu or not largest.isfinite().all() or (largest < 0).any():
                raise ValueError(f"calibration[{i}].{name}: expected finite magnitudes on the CPU, got others")
    return [layer.calibrated(twin, calibration[owner], device) for layer, owner in zip(layers, owners, strict=True)]


LAYERS: dict[str, type[Layer]] = {  # by their names in transformers, which has none for the last two
    "full_attention": Layer,
    "sliding_attention": WindowLayer,
    "chunked_attention": LocalLayer,
    "differential_attention": DifferentialLayer,
    "latent_attention": LatentLayer,
}
