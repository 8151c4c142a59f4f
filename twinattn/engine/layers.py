"""A layer of a model is a mask over a storage: who may see whom, and where the keys are.

    mask       Causal, Window, Chunk                                plans a step
    storage    PagedStorage, QuantizedStorage, PairedStorage,
               LatentStorage, SelectedLatentStorage                 allocates a pool, writes, attends, selects keys

Every mask goes with every storage, but for keys that are selected, which are causal; a storage without a path for
cascades or for drafted trees says so. All is computed by the paths of either twin. Equal layers share one plan per
step.
"""

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, NamedTuple

import torch
from einops import rearrange, reduce
from jaxtyping import Float, Float32, Int32, Int64
from torch import Tensor

from refattn.batch import Batch, Part
from refattn.checks import check, describe
from refattn.options import AttentionOptions
from refattn.packed_latents import packed_size
from refattn.plan import CascadePlan, Plan, PrefillPlan
from refattn.scales import Fp8Scales, Int8Scales
from refattn.trees import TreePlan, Trees
from twinattn.engine import fast_sampling, sampling
from twinattn.engine.index_modules import IndexTokens

KV_CACHE_DTYPES = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2, "int8": torch.int8}
PACKED_ROWS = "fp8_ds_mla"  # bytes per latent: quantized values, a scale for each 128 of them, and a rotary key
KEY_RANGE, VALUE_RANGE = 200.0, 100.0  # what the largest numbers of a first step become in fp8, as in vLLM
WORKSPACE = 16384  # context tokens whose keys and values are made at a time: 1.25 GiB in DeepSeek-V3's sizes, bfloat16
PATHS = {CascadePlan: "cascade", TreePlan: "speculative"}  # paths of these plans; chunked_prefill takes others
Lens = Sequence[tuple[int, int]]  # per request: new tokens, all tokens
AnyPlan = Plan | CascadePlan | TreePlan | PrefillPlan
Parts = tuple[tuple[slice, AnyPlan], ...]  # per part of a step: its query rows and their plan
Scale = float | Float32[Tensor, "..."]
Ranges = tuple[float, float]  # what the largest key and the largest value become in fp8; None for the format's largest
# Query, key, value `[t, heads, size]`, keys and values None in a layer that has none of its own; and where keys are
# selected, the positions of those, `[t, k]`.
Tokens = Sequence[Any]


class Twin:
    """The package that computes, by its modules: each is imported by name when it is first needed.

    Args:
        package: `refattn`, `fastattn`, or anything with modules of those names.
    """

    def __init__(self, package: Any) -> None:
        self.package = package

    @property
    def sample(self) -> Callable[..., Tensor]:
        """What draws the next tokens: beside `fastattn` on the device, else row by row."""
        return fast_sampling.sample if getattr(self.package, "__name__", None) == "fastattn" else sampling.sample

    def __getattr__(self, module: str) -> Any:
        """Return a module of the package."""
        found = getattr(self.package, module, None) or importlib.import_module(f"{self.package.__name__}.{module}")
        setattr(self, module, found)
        return found


class CalibrationStats(NamedTuple):
    """The largest magnitudes of a layer's keys and values, as `calibrate` has found them.

    Attributes:
        key: per KV head and channel, `[hk, d]` float32 on the CPU; of latents, in a layer that has them, `[1, r]`.
        value: per KV head and channel, `[hk, dv]`; of rotary keys in a layer with latents, `[1, rope]`.
    """

    key: Float32[Tensor, "hk d"]
    value: Float32[Tensor, "hk dv"]


# --- masks: who may see whom ---


@dataclass(frozen=True)
class Causal:
    """A query sees all tokens up to its own."""

    window: ClassVar[int] = 0  # what the model passes as `sliding_window`
    reach: ClassVar[int] = 0  # most tokens that a query sees, itself included; 0 for all
    takes_trees: ClassVar[bool] = True  # whether there is a plan of it for drafted trees
    splits_decodes: ClassVar[bool] = False  # whether decodes are planned apart from prefills

    def plan(self, twin: Twin, batch: Batch, block_size: int) -> Plan:
        """Plan a step over all blocks."""
        return twin.chunked_prefill.plan(batch, block_size=block_size)


@dataclass(frozen=True)
class Window:
    """A query sees the last `window` tokens, its own included.

    Raises:
        ValueError: if there are none.
    """

    takes_trees: ClassVar[bool] = True
    splits_decodes: ClassVar[bool] = False
    window: int

    def __post_init__(self) -> None:
        if self.window < 1:
            raise ValueError(f"model: expected a sliding_window of at least 1 token in such layers, got {self.window}")

    @property
    def reach(self) -> int:
        """Most tokens that a query sees."""
        return self.window

    def plan(self, twin: Twin, batch: Batch, block_size: int) -> Plan:
        """Plan a step over trimmed tables."""
        return twin.sliding_window.plan(batch, window_size=(self.window - 1, 0), block_size=block_size)


@dataclass(frozen=True)
class Chunk:
    """A query sees the tokens of its own chunk of `reach` tokens, up to its own.

    Decodes are planned apart: a plan has as many virtual sequences for each request as its longest prefill needs, and
    its kernel is one for many query rows.
    """

    window: ClassVar[int] = 0
    takes_trees: ClassVar[bool] = False
    splits_decodes: ClassVar[bool] = True
    reach: int

    def plan(self, twin: Twin, batch: Batch, block_size: int) -> Plan:
        """Plan a step over virtual sequences."""
        return twin.local.plan(batch, chunk_size=self.reach, block_size=block_size)


Mask = Causal | Window | Chunk


# --- storages: where the keys are ---


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
        return replace(self, cache_scale=largest / (ranges or _largest_numbers(self.dtype))[0] or 1.0)

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
    """

    kind: ClassVar[str] = "SelectedLatents"
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


Storage = PagedStorage | QuantizedStorage | PairedStorage | LatentStorage | SelectedLatentStorage


# --- layers ---


@dataclass(frozen=True)
class Layer:
    """A mask over a storage.

    Attributes:
        mask: who may see whom.
        storage: where the keys are.
    """

    mask: Mask
    storage: Storage

    def __str__(self) -> str:
        return f"{type(self.mask).__name__} over {self.storage.kind}"

    @property
    def takes_cascades(self) -> bool:
        """Whether the plan of a step may be a cascade, which shows all tokens."""
        return not self.mask.reach and self.storage.takes_cascades

    @property
    def takes_trees(self) -> bool:
        """Whether it has a plan for drafted trees; all layers take chains."""
        return self.mask.takes_trees and self.storage.takes_trees

    @property
    def expands_prefills(self) -> bool:
        """Whether prefills compute keys and values from latents, where they can be told from decodes."""
        return isinstance(self.storage, LatentStorage) and self.storage.expands_prefills and not self.mask.reach

    @property
    def splits_decodes(self) -> bool:
        """Whether a step's decodes are planned apart from its prefills, and so have to come first in it."""
        return self.mask.splits_decodes or self.expands_prefills

    @property
    def fixed_scales(self) -> list[Tensor]:
        """The scales that do not lie in the pool, where there are tensors of them."""
        return [x for x in vars(self.storage).values() if isinstance(x, Tensor)]

    def calibrated(
        self, twin: Twin, amax: CalibrationStats, device: torch.device, ranges: Ranges | None = None
    ) -> "Layer":
        """Return this layer, which is quantized, with scales on a device by the largest magnitudes."""
        assert not isinstance(self.storage, PagedStorage)  # unquantized pages have no scales
        return replace(self, storage=self.storage.calibrated(twin, amax, device, ranges))

    def pool_blocks(self, num_blocks: int, block_size: int, *, max_num_batched_tokens: int, max_num_seqs: int) -> int:
        """Return how many blocks the layer's pool needs, where the sequences of a server have `num_blocks`.

        With fewer than those, the layer has a `WindowPool` of its own, which holds what the tokens of any step see and
        are themselves: `q` new tokens see the `reach - 1` before them. So many tokens in a row touch at most
        `(reach - 1 + q + 2 * block_size - 2) / block_size` blocks, and a step has at most `max_num_batched_tokens` of
        them, of at most `max_num_seqs` sequences.
        """
        if not self.mask.reach:
            return num_blocks
        seen = min(max_num_seqs, num_blocks) * (self.mask.reach - 1 + 2 * block_size - 2)
        return min(num_blocks, (seen + max_num_batched_tokens) // block_size)

    def plan(self, twin: Twin, batch: Batch, block_size: int, lens: Lens | None = None, decode_len: int = 1) -> Parts:
        """Plan a step, for all layers that are equal to this one.

        Args:
            twin: the package that computes.
            batch: the lengths and blocks of the step.
            block_size: tokens in a block.
            lens: the new tokens and all tokens of each request, decodes before prefills; None where only the device
                knows.
            decode_len: most new tokens of a decode, its drafts included.
        """
        query_lens = [query_len for query_len, _ in lens or ()]
        parts: Sequence[Part] = [Part(batch, slice(None))]
        if self.splits_decodes and query_lens and min(query_lens) <= decode_len < max(query_lens):
            parts = twin.metadata.split_decodes_and_prefills(batch, query_lens, decode_len=decode_len)
        longest = max((seq_len - query_len for query_len, seq_len in lens or () if query_len > decode_len), default=0)

        def plan_part(part: Batch) -> Plan | PrefillPlan:
            if lens is None or not self.expands_prefills or part.max_query_len <= decode_len:
                return self.mask.plan(twin, part, block_size)
            sizes = dict(block_size=block_size, workspace=max(WORKSPACE, part.num_seqs), max_context_len=longest)
            return twin.mla.plan_prefill(part, **sizes)

        return tuple((part.tokens, plan_part(part.batch)) for part in parts)

    def plan_trees(self, twin: Twin, batch: Batch, trees: Trees, block_size: int) -> Parts:
        """Plan a step whose new tokens are drafted trees, those of a prompt as a chain."""
        window_size = (self.mask.reach - 1, 0) if self.mask.reach else (-1, -1)
        plan = twin.speculative.plan(batch, block_size=block_size, trees=trees, window_size=window_size)
        return ((slice(None), plan),)

    def plan_spans(
        self, twin: Twin, batch: Batch, spans: Int32[Tensor, "b n 2"], num_tokens: int, block_size: int
    ) -> Parts:
        """Plan a step in which the tokens of a span see one another, as far as the mask looks back.

        Args:
            twin: the package that computes.
            batch: the lengths and blocks of the step; of a window pool, where a block that no query sees is -1.
            spans: the first and the last token of each, by sequence; -1 for none.
            num_tokens: query rows.
            block_size: tokens in a block.
        """
        assert batch.block_table is not None  # the engine's pools are in pages
        window_size = (self.mask.reach - 1, -1) if self.mask.reach else (-1, -1)
        seen = twin.interval.image_spans(batch, spans, num_tokens, window_size=window_size)
        some = replace(batch, block_table=batch.block_table.clamp(min=0))  # any block: no key of it is seen
        first = seen.first_visible if self.mask.reach else None
        ends = dict(first_visible=first, last_visible=seen.last_visible)
        return ((slice(None), twin.interval.plan(some, **ends, block_size=block_size)),)

    def attend(
        self,
        twin: Twin,
        module: Any,
        query: Float[Tensor, "t h d"],
        key: Float[Tensor, "t hk dk"] | None,
        value: Float[Tensor, "t hk dv"] | None,
        cache: Any,
        slot_mapping: Int64[Tensor, "t"],
        parts: Parts,
        options: AttentionOptions,
        positions: Int32[Tensor, "t k"] | None = None,
    ) -> Float[Tensor, "t h dout"]:
        """Write the new keys and values into the pool, if they are the layer's own and not None, and attend over it.

        Of latents, `key` is the latent and `value` the rotary key, each as one head. Where keys are selected, those at
        `positions` are seen.

        Raises:
            ValueError: for positions in a layer that selects no keys.
        """
        selects = isinstance(self.storage, SelectedLatentStorage)
        if positions is not None and not selects:
            raise ValueError(f"indices: expected none in a layer that sees all keys, {self}, got some")
        all_tokens = (query, key, value, positions) if selects else (query, key, value)
        if key is not None and value is not None:
            self.storage.write(twin, key, value, cache, slot_mapping)
        if len(parts) == 1:
            return self.storage.attend(twin, module, all_tokens, cache, parts[0][1], options)
        outs = []
        for rows, plan in parts:
            tokens = [None if x is None else x[rows] for x in all_tokens]
            outs.append(self.storage.attend(twin, module, tokens, cache, plan, options))
        return torch.cat(outs)


# --- quantization ---


def quantize(layers: Sequence[Layer], kv_cache_dtype: str) -> list[Layer]:
    """Return layers with pools of a type: those given for "auto", else quantized ones.

    Raises:
        ValueError: if there is no such type, or no packed rows of a layer's sizes.
        NotImplementedError: if a storage has no such type.
    """
    if kv_cache_dtype == "auto":
        return list(layers)
    if kv_cache_dtype == PACKED_ROWS:
        return [replace(layer, storage=_pack(layer.storage)) for layer in layers]
    if kv_cache_dtype not in KV_CACHE_DTYPES:
        types = ", ".join(["auto", *KV_CACHE_DTYPES, PACKED_ROWS])
        raise ValueError(f"kv_cache_dtype: expected {types}, got {kv_cache_dtype!r}")
    return [replace(layer, storage=_quantize(layer.storage, KV_CACHE_DTYPES[kv_cache_dtype])) for layer in layers]


def _quantize(storage: Storage, dtype: torch.dtype) -> Storage:
    if isinstance(storage, PagedStorage | QuantizedStorage):
        return QuantizedStorage(storage.num_kv_heads, storage.head_size, dtype)
    if dtype == torch.int8:
        latent = isinstance(storage, LatentStorage)
        kind, others = ("latents", f", {PACKED_ROWS}") if latent else (storage.kind.lower(), "")
        raise NotImplementedError(
            f"kv_cache_dtype: the engine keeps no {kind} in a pool of int8, only of auto, fp8_e4m3, fp8_e5m2{others}"
        )
    return replace(storage, dtype=dtype)


def _pack(storage: Storage) -> Storage:
    if not isinstance(storage, LatentStorage):
        kind = storage.kind.lower()
        raise NotImplementedError(
            f"kv_cache_dtype: the engine keeps no {kind} in the packed rows of {PACKED_ROWS}, only latents (MLA)"
        )
    try:
        packed_size(storage.latent_rank, storage.rope_size)
    except ValueError as error:
        raise ValueError(f"kv_cache_dtype: expected another than {PACKED_ROWS} for this model; {error}") from None
    return replace(storage, dtype=torch.uint8)


def set_scales(
    layers: Sequence[Layer],
    calibration: Sequence[CalibrationStats],
    twin: Twin,
    owners: Sequence[int],
    device: torch.device,
) -> list[Layer]:
    """Return quantized layers with the scales that a calibration asks for.

    Args:
        layers: from `quantize`.
        calibration: from `calibrate`, one for each layer.
        twin: the package that computes.
        owners: of each layer the one whose pool it reads, and so whose scales it has.
        device: where the scales are to be.

    Raises:
        ValueError: if the calibration is not that of these layers.
    """
    if not isinstance(calibration, Sequence) or len(calibration) != len(layers):
        number = len(calibration) if isinstance(calibration, Sequence) else type(calibration).__name__
        raise ValueError(f"calibration: expected CalibrationStats for each of {len(layers)} layers, got {number}")
    for i, (layer, amax) in enumerate(zip(layers, calibration, strict=True)):
        if not isinstance(amax, CalibrationStats):
            raise ValueError(f"calibration[{i}]: expected CalibrationStats, got {describe(amax)}")
        stored = layer.storage
        key_size = value_size = stored.num_kv_heads, stored.head_size
        if isinstance(stored, LatentStorage):
            key_size, value_size = (1, stored.latent_rank), (1, stored.rope_size)
        for name, largest, size in (("key", amax.key, key_size), ("value", amax.value, value_size)):
            check(dict(zip(("hk", "d"), size, strict=True)), **{f"calibration[{i}].{name}": (largest, "float32 hk d")})
            if not largest.is_cpu or not largest.isfinite().all() or (largest < 0).any():
                raise ValueError(f"calibration[{i}].{name}: expected finite magnitudes on the CPU, got others")
    return [layer.calibrated(twin, calibration[owner], device) for layer, owner in zip(layers, owners, strict=True)]


def _fp8_scales(
    amax: CalibrationStats, dtype: torch.dtype | None, device: torch.device, ranges: Ranges | None
) -> list[Float32[Tensor, "hk"]]:
    """Return the scales of keys and of values per KV head; 1 where a head is all zeros."""
    scales = [
        reduce(x, "hk d -> hk", "max") / largest
        for x, largest in zip(amax, ranges or _largest_numbers(dtype), strict=True)
    ]
    return [scale.masked_fill(scale == 0, 1.0).to(device) for scale in scales]


def _largest_numbers(dtype: torch.dtype | None) -> Ranges:
    """Return the largest number of a format of fp8, for keys and for values."""
    assert dtype is not None  # the layer is quantized
    return (torch.finfo(dtype).max,) * 2
