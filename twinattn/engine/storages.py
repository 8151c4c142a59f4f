"""Where the keys of a layer are: each storage allocates a pool, writes new tokens into it, and attends over it.

    PagedStorage             keys and values in pages
    QuantizedStorage         of 8 bits
    FourBitStorage           of 4 bits
    PairedStorage            in pairs of heads (DiffLlama)
    LatentStorage            latents and rotary keys (MLA)
    SelectedLatentStorage    of which a query sees those that an indexer selects (DeepSeek sparse attention)

`compressed_storage` has those of DeepSeek-V4. A storage without a path for cascades or for drafted trees says so. All
is computed by the paths of either twin.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, NamedTuple

import torch
from einops import rearrange, reduce
from jaxtyping import Float, Float32, Int32, Int64
from torch import Tensor

from refattn.entries import CompressedPlan
from refattn.four_bits import E2M1, GROUP, GROUP_FORMAT, Int4Scales, Nvfp4Scales
from refattn.options import AttentionOptions
from refattn.packed_latents import packed_size
from refattn.plan import CascadePlan, Plan, PrefillPlan
from refattn.scales import Fp8Scales, Int8Scales
from refattn.trees import TreePlan
from twinattn.engine.cache_kinds import INDEX_KEYS, PAGES, CacheKind
from twinattn.engine.index_modules import IndexTokens
from twinattn.engine.twin import Twin

LARGEST_NVFP4 = E2M1[-1] * torch.finfo(GROUP_FORMAT).max  # under a number of 1
PATHS = {CascadePlan: "cascade", TreePlan: "speculative"}  # paths of these plans; chunked_prefill takes others
AnyPlan = Plan | CascadePlan | TreePlan | PrefillPlan | CompressedPlan
Scale = float | Float32[Tensor, "..."]
Ranges = tuple[float, float]  # what the largest key and the largest value become in fp8; None for the format's largest
# Query, key, value `[t, heads, size]`, keys and values None in a layer that has none of its own; and where keys are
# selected, the positions of those, `[t, k]`.
Tokens = Sequence[Any]


class CalibrationStats(NamedTuple):
    """The largest magnitudes of a layer's keys and values, as `calibrate` has found them.

    Attributes:
        key: per KV head and channel, `[hk, d]` float32 on the CPU; of latents, in a layer that has them, `[1, r]`.
        value: per KV head and channel, `[hk, dv]`; of rotary keys in a layer with latents, `[1, rope]`.
    """

    key: Float32[Tensor, "hk d"]
    value: Float32[Tensor, "hk dv"]


@dataclass(frozen=True)
class PagedStorage:
    """Keys and values in pages, in the type of the model.

    Attributes:
        num_kv_heads: KV heads, `hk`.
        head_size: elements of a key and of a value, `d`.
    """

    kind: ClassVar[str] = "Pages"  # what errors call it
    takes_cascades: ClassVar[bool] = True
    takes_trees: ClassVar[bool] = True
    num_kv_heads: int
    head_size: int

    def bytes_per_token(self, dtype: torch.dtype) -> int:
        """Return the bytes of a token in the pool of a model of a type."""
        return 2 * self.num_kv_heads * self.head_size * dtype.itemsize

    def allocate(self, twin: Twin, *blocks: int, dtype: torch.dtype, device: torch.device) -> Any:
        """Allocate a pool of `num_blocks` x `block_size` tokens."""
        return twin.kv_cache.allocate(*blocks, self.num_kv_heads, self.head_size, dtype=dtype, device=device)

    def write(self, twin: Twin, key: Tensor, value: Tensor, cache: Any, slot_mapping: Int64[Tensor, "t"]) -> None:
        """Write new tokens into the pool."""
        twin.kv_cache.write(key, value, *cache, slot_mapping)

    def attend(
        self, twin: Twin, module: Any, tokens: Tokens, cache: Any, plan: AnyPlan, options: AttentionOptions
    ) -> Float[Tensor, "t h d"]:
        """Attend over the pool under a plan."""
        path = getattr(twin, PATHS.get(type(plan), "chunked_prefill"))
        return path.attention(tokens[0], *cache, plan, options)


@dataclass(frozen=True)
class QuantizedStorage:
    """Keys and values in pages of 8 bits.

                            scale of a key                                     of a value
        fp8                 1                                                  1
        fp8, calibrated     per head: amax / largest number of the format      likewise
        fp8, first step     per head: amax / KEY_RANGE                         per head: amax / VALUE_RANGE
        int8                per token and head, in the pool                    none: values stay in the model's type
        int8, calibrated    likewise                                           per head and channel: amax / 127

    Attributes:
        num_kv_heads: KV heads, `hk`.
        head_size: elements of a key and of a value, `d`.
        dtype: fp8 or int8.
        key_scale: of fp8 keys. No plan depends on scales, so layers with different ones are equal.
        value_scale: of fp8 values, or of int8 values if it is a tensor.
    """

    kind: ClassVar[str] = "QuantizedPages"
    takes_cascades: ClassVar[bool] = True
    takes_trees: ClassVar[bool] = True
    num_kv_heads: int
    head_size: int
    dtype: torch.dtype
    key_scale: Scale = field(default=1.0, compare=False)
    value_scale: Scale = field(default=1.0, compare=False)

    def calibrated(
        self, twin: Twin, amax: CalibrationStats, device: torch.device, ranges: Ranges | None
    ) -> "QuantizedStorage":
        """Return this storage with scales by the largest keys and values."""
        if self.dtype == torch.int8:
            scale = twin.quantized.value_scales([rearrange(amax.value, "hk d -> 1 hk d")])
            return replace(self, value_scale=scale.to(device))
        key_scale, value_scale = _fp8_scales(amax, self.dtype, device, ranges)
        return replace(self, key_scale=key_scale, value_scale=value_scale)

    def value_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Return the type of values in the pool of a model of a type: its own for int8 without scales of values."""
        return dtype if self.dtype == torch.int8 and not isinstance(self.value_scale, Tensor) else self.dtype

    def bytes_per_token(self, dtype: torch.dtype) -> int:
        """Return the bytes of a token in the pool of a model of a type, the scale of an int8 key included."""
        of_scale = torch.float32.itemsize if self.dtype == torch.int8 else 0
        return self.num_kv_heads * (self.head_size * (1 + self.value_dtype(dtype).itemsize) + of_scale)

    def allocate(self, twin: Twin, *blocks: int, dtype: torch.dtype, device: torch.device) -> Any:
        """Allocate a pool of `num_blocks` x `block_size` tokens, and for int8 one for the scales of keys."""
        sizes = *blocks, self.num_kv_heads, self.head_size
        if self.dtype == torch.int8:
            return twin.quantized.allocate_int8(*sizes, value_dtype=self.value_dtype(dtype), device=device)
        return twin.kv_cache.allocate(*sizes, dtype=self.dtype, device=device)

    def pools_and_scales(self, cache: Any) -> tuple[Sequence[Tensor], Fp8Scales | Int8Scales]:
        """Return the pools of keys and of values, and their scales."""
        if self.dtype != torch.int8:
            return cache, Fp8Scales(self.key_scale, self.value_scale, format=self.dtype)
        *pools, key_scales = cache
        return pools, Int8Scales(key_scales, self.value_scale if isinstance(self.value_scale, Tensor) else None)

    def write(self, twin: Twin, key: Tensor, value: Tensor, cache: Any, slot_mapping: Int64[Tensor, "t"]) -> None:
        """Quantize new tokens and write them into the pool."""
        pools, scales = self.pools_and_scales(cache)
        twin.quantized.write(key, value, *pools, slot_mapping, scales=scales)

    def attend(
        self, twin: Twin, module: Any, tokens: Tokens, cache: Any, plan: AnyPlan, options: AttentionOptions
    ) -> Float[Tensor, "t h d"]:
        """Attend over the pool under a plan."""
        pools, scales = self.pools_and_scales(cache)
        return twin.quantized.attention(tokens[0], *pools, plan, options, scales=scales)


@dataclass(frozen=True)
class FourBitStorage:
    """Keys and values in pages of 4 bits; the pool has the scales of both, which a write finds.

                            of each                              besides
        int4                token and head, with a zero point    -
        nvfp4               16 elements, e4m3                    1 for all
        nvfp4, calibrated   likewise                             the largest key, or value / (6 * 448)

    Attributes:
        num_kv_heads: KV heads, `hk`.
        head_size: elements of a key and of a value, `d`.
        format: "int4" or "nvfp4".
        of_keys: of nvfp4, the number for all scales of keys. No plan depends on it.
        of_values: that of values.
    """

    kind: ClassVar[str] = "FourBitPages"
    takes_cascades: ClassVar[bool] = True
    takes_trees: ClassVar[bool] = True
    num_kv_heads: int
    head_size: int
    format: str
    of_keys: float = field(default=1.0, compare=False)
    of_values: float = field(default=1.0, compare=False)

    def calibrated(
        self, twin: Twin, amax: CalibrationStats, device: torch.device, ranges: Ranges | None
    ) -> "FourBitStorage":
        """Return this storage with the numbers of nvfp4 by the largest keys and values."""
        of_keys, of_values = (float(x.max()) / LARGEST_NVFP4 or 1.0 for x in amax)
        return replace(self, of_keys=of_keys, of_values=of_values)

    def bytes_per_token(self, dtype: torch.dtype) -> int:
        """Return the bytes of a token in the pool, the scales included."""
        of_scales = torch.float32.itemsize if self.format == "int4" else self.head_size // GROUP
        return 2 * self.num_kv_heads * (self.head_size // 2 + of_scales)

    def allocate(self, twin: Twin, *blocks: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, ...]:
        """Allocate a pool of `num_blocks` x `block_size` tokens, and those of their scales."""
        allocate = twin.quantized.allocate_int4 if self.format == "int4" else twin.quantized.allocate_nvfp4
        key_cache, value_cache, scales = allocate(*blocks, self.num_kv_heads, self.head_size, device=device)
        return key_cache, value_cache, scales.key, scales.value

    def scales(self, cache: tuple[Tensor, ...]) -> Int4Scales | Nvfp4Scales:
        """Return the scales in the pool."""
        _, _, key, value = cache
        if self.format == "int4":
            return Int4Scales(key, value)
        return Nvfp4Scales(key, value, self.of_keys, self.of_values)

    def write(self, twin: Twin, key: Tensor, value: Tensor, cache: Any, slot_mapping: Int64[Tensor, "t"]) -> None:
        """Quantize new tokens and write them into the pool."""
        twin.quantized.write(key, value, *cache[:2], slot_mapping, scales=self.scales(cache))

    def attend(
        self, twin: Twin, module: Any, tokens: Tokens, cache: Any, plan: AnyPlan, options: AttentionOptions
    ) -> Float[Tensor, "t h d"]:
        """Attend over the pool under a plan."""
        return twin.quantized.attention(tokens[0], *cache[:2], plan, options, scales=self.scales(cache))


@dataclass(frozen=True)
class PairedStorage:
    """Pairs of heads in pages, for DiffLlama: two softmaxes, one subtracted, and a norm. Its heads come in halves.

    Attributes:
        num_kv_heads: KV heads, `hk`.
        head_size: elements of a key and of a value, `d`.
        dtype: fp8; None for the type of the model.
        key_scale: of fp8 keys, as in `QuantizedStorage`; in the order of interleaved pairs.
        value_scale: of fp8 values, likewise.
    """

    kind: ClassVar[str] = "Pairs"
    takes_cascades: ClassVar[bool] = True
    takes_trees: ClassVar[bool] = True
    num_kv_heads: int
    head_size: int
    dtype: torch.dtype | None = None
    key_scale: Scale = field(default=1.0, compare=False)
    value_scale: Scale = field(default=1.0, compare=False)

    @property
    def scales(self) -> Fp8Scales | None:
        """The scales of fp8."""
        return None if self.dtype is None else Fp8Scales(self.key_scale, self.value_scale, format=self.dtype)

    def calibrated(
        self, twin: Twin, amax: CalibrationStats, device: torch.device, ranges: Ranges | None
    ) -> "PairedStorage":
        """Return this storage with scales by the largest keys and values, which come in the order of the model."""
        in_pairs = (twin.differential.interleave_halves(rearrange(x, "hk d -> 1 hk d"))[0] for x in amax)
        key_scale, value_scale = _fp8_scales(CalibrationStats(*in_pairs), self.dtype, device, ranges)
        return replace(self, key_scale=key_scale, value_scale=value_scale)

    def bytes_per_token(self, dtype: torch.dtype) -> int:
        """Return the bytes of a token in the pool of a model of a type."""
        return 2 * self.num_kv_heads * self.head_size * (self.dtype or dtype).itemsize

    def allocate(self, twin: Twin, *blocks: int, dtype: torch.dtype, device: torch.device) -> Any:
        """Allocate a pool of `num_blocks` x `block_size` tokens."""
        sizes = *blocks, self.num_kv_heads, self.head_size
        return twin.differential.allocate(*sizes, dtype=self.dtype or dtype, device=device)

    def write(self, twin: Twin, key: Tensor, value: Tensor, cache: Any, slot_mapping: Int64[Tensor, "t"]) -> None:
        """Write new tokens into the pool, their heads in pairs."""
        path = twin.differential
        path.write(*map(path.interleave_halves, (key, value)), cache, slot_mapping, scales=self.scales)

    def attend(
        self, twin: Twin, module: Any, tokens: Tokens, cache: Any, plan: AnyPlan, options: AttentionOptions
    ) -> Float[Tensor, "t h d"]:
        """Attend over the pool under a plan; the output has passed the layer's norm."""
        path, lambda_init = twin.differential, module.lambda_init
        vectors = module.lambda_q1, module.lambda_k1, module.lambda_q2, module.lambda_k2
        return path.attention(
            path.interleave_halves(tokens[0]),
            cache,
            plan,
            options,
            lambda_full=path.compute_lambda(*vectors, lambda_init=lambda_init),
            lambda_init=lambda_init,
            norm_weight=module.groupnorm.weight,
            norm_eps=module.groupnorm.eps,
            scales=self.scales,
        )


@dataclass(frozen=True)
class LatentStorage:
    """Latents and rotary keys in pages (MLA), and no values.

    Decodes, their drafts included, absorb the projection of keys into their queries and read the latents as they are.
    Prefills under a causal mask compute keys and values from the latents, of their context `WORKSPACE` tokens at a
    time. Both give the same outputs, but not to the bit, and how many tokens are computed at a time depends on how many
    sequences share the workspace. So everything is absorbed under `batch_invariant`, as it is where only the device
    knows which sequences decode.

    Attributes:
        latent_rank: elements of a latent, `r`.
        rope_size: elements of a rotary key.
        batch_invariant: whether no bit of a row may depend on what else is in the batch. Absorption and projection are
            products with a matrix of the model's, and as they are.
        dtype: fp8, with one scale; `torch.uint8` for packed rows, which have their own; None for the type of the model.
        cache_scale: of fp8, of latents and rotary keys alike: 1, or if it is calibrated, what makes the largest of them
            the largest number of the format. No plan depends on it. Of packed rows it is 1.
    """

    kind: ClassVar[str] = "Latents"
    takes_cascades: ClassVar[bool] = True
    takes_trees: ClassVar[bool] = True
    num_kv_heads: ClassVar[int] = 1  # one head that all query heads share
    latent_rank: int
    rope_size: int
    batch_invariant: bool = False
    dtype: torch.dtype | None = None
    cache_scale: float = field(default=1.0, compare=False)

    @property
    def expands_prefills(self) -> bool:
        """Whether prefills compute keys and values."""
        return not self.batch_invariant

    @property
    def head_size(self) -> int:
        """Elements of a latent and of a rotary key together."""
        return self.latent_rank + self.rope_size

    def calibrated(
        self, twin: Twin, amax: CalibrationStats, device: torch.device, ranges: Ranges | None
    ) -> "LatentStorage":
        """Return this storage with a scale by the largest number: one for both, so the range is that of keys."""
        largest = max(float(x.max()) for x in amax)
        return replace(self, cache_scale=largest / (ranges or largest_numbers(self.dtype))[0] or 1.0)

    def bytes_per_token(self, dtype: torch.dtype) -> int:
        """Return the bytes of a token in the pool of a model of a type, the scales of a packed row included."""
        if self.dtype == torch.uint8:
            return packed_size(self.latent_rank, self.rope_size)
        return self.head_size * (self.dtype or dtype).itemsize

    def allocate(self, twin: Twin, *blocks: int, dtype: torch.dtype, device: torch.device) -> Any:
        """Allocate a pool of `num_blocks` x `block_size` tokens."""
        return twin.mla.allocate(*blocks, self.latent_rank, self.rope_size, dtype=self.dtype or dtype, device=device)

    def write(self, twin: Twin, key: Tensor, value: Tensor, cache: Any, slot_mapping: Int64[Tensor, "t"]) -> None:
        """Write new latents and rotary keys into the pool."""
        twin.mla.write(key[:, 0], value[:, 0], cache, slot_mapping, cache_scale=self.cache_scale)

    def attend(
        self, twin: Twin, module: Any, tokens: Tokens, cache: Any, plan: AnyPlan, options: AttentionOptions
    ) -> Float[Tensor, "t h dv"]:
        """Attend over the pool under a plan: absorbed, or under that of a prefill with keys and values computed.

        Raises:
            ValueError: if the module's keys and values are more than a matrix times a latent.
        """
        query, latent, rope_key = tokens
        key_projection, value_projection = self.projections(module, query)
        path, scale = twin.mla, dict(cache_scale=self.cache_scale)
        if isinstance(plan, PrefillPlan):
            projections = dict(key_projection=key_projection, value_projection=value_projection)
            return path.prefill(query, latent[:, 0], rope_key[:, 0], cache, plan, options, **projections, **scale)
        absorbed = path.absorb(query, key_projection)
        latents = path.attention(absorbed, cache, plan, options, latent_rank=self.latent_rank, **scale)
        return path.project(latents, value_projection)

    def projections(
        self, module: Any, query: Float[Tensor, "t h d"]
    ) -> Sequence[Float[Tensor, "h nope r"] | Float[Tensor, "h dv r"]]:
        """Return the matrices that make keys and values of latents, views of the module's, so always up to date.

        Raises:
            ValueError: if they are more than a matrix times a latent.
        """
        linear = module.kv_b_proj
        if type(linear) is not torch.nn.Linear or linear.bias is not None:  # an adapter or a type of fewer bits, say
            raise ValueError(f"model: expected a kv_b_proj that is a Linear without a bias, got {linear}")
        weight = rearrange(linear.weight, "(h made) r -> h made r", h=query.shape[1])
        return weight.tensor_split([query.shape[2] - self.rope_size], dim=1)


@dataclass(frozen=True)
class SelectedLatentStorage(LatentStorage):
    """Latents of which a query sees those that an indexer has selected for it (DeepSeek sparse attention).

    The index keys that it selects by have a pool of their own, with the blocks and slots of the latents: so whatever
    happens to a block happens to both. All queries absorb, as no two see the same keys.

    Attributes:
        topk: keys that a query sees, at most.
        index_size: elements of an index key, in the type of the model whatever `dtype` is; 0 in a layer that sees what
            an earlier layer has selected, and has no index keys.
        kinds: what its pools hold.
    """

    kind: ClassVar[str] = "SelectedLatents"
    kinds: ClassVar[tuple[CacheKind, ...]] = (PAGES, INDEX_KEYS)
    takes_cascades: ClassVar[bool] = False
    takes_trees: ClassVar[bool] = False
    expands_prefills: ClassVar[bool] = False
    topk: int = field(kw_only=True)
    index_size: int = field(kw_only=True)

    def bytes_per_token(self, dtype: torch.dtype) -> int:
        """Return the bytes of a token in the pools of a model of a type."""
        return super().bytes_per_token(dtype) + self.index_size * dtype.itemsize

    def allocate(self, twin: Twin, *blocks: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, ...]:
        """Make a pool of latents, and one of index keys if there are any."""
        latents = super().allocate(twin, *blocks, dtype=dtype, device=device)
        if not self.index_size:
            return (latents,)
        return latents, twin.sparse.allocate(*blocks, index_size=self.index_size, dtype=dtype, device=device)

    def write(self, twin: Twin, key: Tensor, value: Tensor, cache: Any, slot_mapping: Int64[Tensor, "t"]) -> None:
        """Write new latents and rotary keys into their pool; `select` has written the index keys."""
        super().write(twin, key, value, cache[0], slot_mapping)

    def select(
        self, twin: Twin, tokens: IndexTokens, cache: Any, slot_mapping: Int64[Tensor, "t"], plan: Plan
    ) -> Int32[Tensor, "t k"]:
        """Write new index keys into their pool, and return the positions of the keys that each query is to see.

        Raises:
            ValueError: if this layer has no index keys.
        """
        if not self.index_size:
            raise ValueError("model: expected a layer without index keys to select none, got one that does")
        twin.sparse.write(tokens.key, cache[1], slot_mapping)
        scores = twin.sparse.scores(tokens.query, tokens.weights, cache[1], plan)
        return twin.sparse.select(scores, min(self.topk, scores.shape[1]))

    def attend(
        self, twin: Twin, module: Any, tokens: Tokens, cache: Any, plan: AnyPlan, options: AttentionOptions
    ) -> Float[Tensor, "t h dv"]:
        """Attend over the latents that were selected, absorbed.

        Raises:
            ValueError: if nothing was, or as `LatentStorage`.
        """
        query, _, _, positions = tokens
        if positions is None:
            raise ValueError("indices: expected the positions of selected keys, got none")
        assert isinstance(plan, Plan) and plan.block_size is not None  # a causal mask over pages
        key_projection, value_projection = self.projections(module, query)
        selected = twin.sparse.plan(plan.batch, positions=positions, block_size=plan.block_size)
        latents = twin.sparse.latent_attention(
            twin.mla.absorb(query, key_projection),
            cache[0],
            selected,
            options,
            latent_rank=self.latent_rank,
            cache_scale=self.cache_scale,
        )
        return twin.mla.project(latents, value_projection)


Storage = PagedStorage | QuantizedStorage | FourBitStorage | PairedStorage | LatentStorage | SelectedLatentStorage


def _fp8_scales(
    amax: CalibrationStats, dtype: torch.dtype | None, device: torch.device, ranges: Ranges | None
) -> list[Float32[Tensor, "hk"]]:
    """Return the scales of keys and of values per KV head; 1 where a head is all zeros."""
    scales = [
        reduce(x, "hk d -> hk", "max") / largest
        for x, largest in zip(amax, ranges or largest_numbers(dtype), strict=True)
    ]
    return [scale.masked_fill(scale == 0, 1.0).to(device) for scale in scales]


def largest_numbers(dtype: torch.dtype | None) -> Ranges:
    """Return the largest number of a format of fp8, for keys and for values."""
    assert dtype is not None  # the layer is quantized
    return (torch.finfo(dtype).max,) * 2
