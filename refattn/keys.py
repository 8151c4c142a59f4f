"""Where the keys are: one type per storage, its checks of a call, and how the keys of each sequence are read.

    Rows              contiguous rows, without a cache             varlen, encoders, new tokens among themselves
    Pages             blocks of a pool, by a block table           chunked prefill, windows, local, cascades, trees
    QuantizedPages    the same in 8 bits, with scales              quantized
    Int4Pages         turned, in 4 bits, with scales per token     quantized
    Nvfp4Pages        in 4 bits, with scales per 16 elements       quantized
    Latents           a pool of latents, both key and value        mla
    PackedLatents     the same in bytes: fp8, scales, bfloat16     mla, sparse
    Pairs             pools for the two heads of each pair         differential

The plan has the mask: rows take a `Plan`, and every pool takes any plan over pages. Each storage checks its own calls;
`refattn.checks_of_calls` has the common checks. Masks, softmax and merging are the same for all (`refattn.attention`).
"""

from collections.abc import Callable, Iterator
from math import isfinite
from typing import NamedTuple

import torch
from einops import rearrange, repeat
from jaxtyping import Float, Float32, Int8, Shaped, UInt8
from torch import Tensor

from refattn.checks import (
    QUERY_TYPES,
    check,
    check_flag,
    check_number,
    check_query,
    check_result,
    check_sizes,
    describe,
)
from refattn.checks_of_calls import (
    check_latents,
    check_levels,
    check_options,
    check_plan,
    check_pool,
    check_rows,
    check_scale_is_given,
    check_tokens,
    num_seqs_of,
)
from refattn.four_bits import FourBitScales, Int4Pages, Int4Scales, Nvfp4Pages, Nvfp4Scales
from refattn.kv_cache import gather
from refattn.modes import compute_dtype, refuse_gradients
from refattn.options import AttentionOptions
from refattn.packed_latents import LATENT_GROUP, PACKED_FORMAT, check_packed, is_packed, packed_parts
from refattn.plan import CascadePlan, Plan
from refattn.rounding import from_int4, from_nvfp4, per_head, row_scale, to_fp8, to_int8
from refattn.scales import (
    FP8_FORMATS,
    ROUNDING,
    Fp8Scales,
    Int8Scales,
    check_cache_scale,
    check_no_scale_per_sequence,
    check_scale,
    check_scales,
    stored_in_pairs,
    stored_types,
    type_of_outputs,
)
from refattn.trees import AttentionPlan, TreePlan

OF_A_GROUP = "as a group of a cascade is of several sequences"  # the reason in errors


class Rows(NamedTuple):
    """Keys and values of all sequences in contiguous rows, one sequence after the other.

    Attributes:
        key: the keys.
        value: the values.
    """

    key: Float[Tensor, "s hk d"]
    value: Float[Tensor, "s hk dv"]

    @property
    def value_head_size(self) -> int:
        """Elements of a value, `dv`."""
        return self.value.shape[-1]

    def check(
        self,
        query: Tensor,
        plan: AttentionPlan,
        options: AttentionOptions,
        out: Tensor | None,
        return_lse: bool,
        *,
        name: str = "key",
    ) -> None:
        """Check a call without a cache; `name` is the path's name of the rows, for errors.

        Raises:
            ValueError: naming the argument, what was expected and what was given.
        """
        check_rows(query, *self, plan, options, out, return_lse, name=name)


class Pages(NamedTuple):
    """Keys and values in the blocks of a pool.

    Attributes:
        key_cache: the pool of keys; any strides.
        value_cache: the pool of values.
    """

    key_cache: Float[Tensor, "n p hk d"]
    value_cache: Float[Tensor, "n p hk dv"]

    @property
    def value_head_size(self) -> int:
        """Elements of a value, `dv`."""
        return self.value_cache.shape[-1]

    def check(
        self,
        query: Tensor,
        plan: AttentionPlan,
        options: AttentionOptions,
        out: Tensor | None,
        return_lse: bool,
        *,
        pool: str = "key_cache",
        types: tuple[torch.dtype, torch.dtype] | None = None,
    ) -> None:
        """Check a call over pages: query `[t, h, d]`, under any plan over pages.

        `pool` is the path's name of the pool, for errors. The caches have the type of the query, or `types`.

        Raises:
            ValueError: naming the argument, what was expected and what was given.
        """
        own, names = plan.own, ("key_cache", "value_cache")
        check_tokens(query, self.key_cache, self.value_cache, names, "n p", own, options, types)
        check_result(query, self.value_head_size, out, return_lse)
        check_pool(pool, self.key_cache, own)
        check_levels(pool, self.key_cache, plan, options)


class QuantizedPages(NamedTuple):
    """Quantized keys and values in the blocks of a pool, `x = scale * quantized`.

    Attributes:
        key_cache: the pool of keys: fp8, as its own type or as bytes, or int8.
        value_cache: the pool of values, of the same type; unquantized if `Int8Scales.value` is None.
        scales: the scales of keys and values, and whether queries are quantized too.
    """

    key_cache: Shaped[Tensor, "n p hk d"]
    value_cache: Shaped[Tensor, "n p hk dv"]
    scales: Fp8Scales | Int8Scales

    @property
    def value_head_size(self) -> int:
        """Elements of a value, `dv`."""
        return self.value_cache.shape[-1]

    def check(
        self,
        query: Tensor,
        plan: AttentionPlan,
        options: AttentionOptions,
        out: Tensor | None,
        return_lse: bool,
    ) -> None:
        """Check a call over quantized pages: the checks of pages, and that the scales fit.

        An fp8 query needs a scale; its outputs have the type of `out`, or bfloat16.

        Raises:
            ValueError: naming the argument, what was expected and what was given.
        """
        check_plan(plan)
        key_cache, value_cache, scales = self
        types = stored_types(key_cache, value_cache, scales)
        if isinstance(query, Tensor) and query.dtype in FP8_FORMATS:
            query = _as_numbers(query, scales, out)
        Pages(key_cache, value_cache).check(query, plan, options, out, return_lse, types=types)
        if isinstance(plan, CascadePlan):
            check_no_scale_per_sequence(scales, key_cache.shape[2], OF_A_GROUP)
        check_scales(scales, key_cache, value_cache, *num_seqs_of(plan.own))
        quantized = {"key_cache": key_cache}
        if types[1] not in QUERY_TYPES:
            quantized["value_cache"] = value_cache
        of_query = None if isinstance(scales, Int8Scales) else scales.query
        if isinstance(scales, Int8Scales) or of_query is not None:
            quantized |= {"query": query} | ({"scales.query": of_query} if isinstance(of_query, Tensor) else {})
        refuse_gradients(ROUNDING, **quantized)


def quantized_pages(
    key_cache: Tensor, value_cache: Tensor, scales: Fp8Scales | Int8Scales | FourBitScales
) -> QuantizedPages | Int4Pages | Nvfp4Pages:
    """Return the storage of quantized pools, by the type of their scales."""
    if isinstance(scales, Int4Scales):
        return Int4Pages(key_cache, value_cache, scales)
    if isinstance(scales, Nvfp4Scales):
        return Nvfp4Pages(key_cache, value_cache, scales)
    return QuantizedPages(key_cache, value_cache, scales)


class Latents(NamedTuple):
    """Latents with their rotary keys: one KV head for all query heads; its value is the latent.

    Attributes:
        cache: the pool; a row is a latent, its rotary key, and elements that are never read. Unquantized or fp8.
        latent_rank: elements of a latent, `r`.
        cache_scale: the scale of quantized values; 1 for an unquantized pool.
        query_scale: quantize queries to the format of the pool under this scale; None: do not quantize them.
        fp8_weights: let a kernel round the softmax weights to that format, too.
    """

    cache: Shaped[Tensor, "n p c"]
    latent_rank: int
    cache_scale: float = 1.0
    query_scale: float | None = None
    fp8_weights: bool = False

    @property
    def value_head_size(self) -> int:
        """Elements of a value: the latent."""
        return self.latent_rank

    def check(
        self,
        query: Tensor,
        plan: AttentionPlan,
        options: AttentionOptions,
        out: Tensor | None,
        return_lse: bool,
    ) -> None:
        """Check a call over latents: an absorbed query `[t, h, r + rope]`, and rows of at least `r + rope` elements.

        The cache has the type of the query, or holds fp8 values under a scale.

        Raises:
            ValueError: naming the argument, what was expected and what was given.
        """
        _, _, size = check_query(query)
        check_sizes(latent_rank=self.latent_rank)
        if self.latent_rank > size:
            raise ValueError(f"latent_rank: expected at most the query's head size of {size}, got {self.latent_rank}")
        check_latents(self.cache, query, size, self.cache_scale)
        self._check_rounding(query)
        check_scale_is_given(options)
        check_plan(plan)
        latents, types = self.cache[:, :, None], (self.cache.dtype, self.cache.dtype)
        pages = Pages(latents[..., :size], latents[..., : self.latent_rank])
        pages.check(query, plan, options, out, return_lse, pool="cache", types=types)

    def _check_rounding(self, query: Tensor) -> None:
        """Check that queries are quantized only with a quantized pool, and weights only with queries."""
        check_flag("fp8_weights", self.fp8_weights)
        if self.query_scale is None:
            if self.fp8_weights:
                raise ValueError("fp8_weights: expected a query_scale with it, as queries are rounded then, got none")
            return
        check_scale("query_scale", self.query_scale)
        if self.cache.dtype not in FP8_FORMATS:
            kind = str(self.cache.dtype).removeprefix("torch.")
            raise ValueError(f"query_scale: expected None for a cache of {kind}, which holds no fp8 values, got one")
        refuse_gradients(ROUNDING, query=query)


class PackedLatents(NamedTuple):
    """Latents in fp8 with a scale for each 128 elements, and rotary keys in bfloat16, in rows of bytes.

    Attributes:
        cache: the pool; rows as in `refattn.packed_latents`, and bytes after those are never read.
        latent_rank: elements of a latent, `r`.
    """

    cache: UInt8[Tensor, "n p c"]
    latent_rank: int

    @property
    def value_head_size(self) -> int:
        """Elements of a value: the latent."""
        return self.latent_rank

    def check(
        self,
        query: Tensor,
        plan: AttentionPlan,
        options: AttentionOptions,
        out: Tensor | None,
        return_lse: bool,
    ) -> None:
        """Check a call over packed latents: an absorbed query `[t, h, r + rope]`, and rows of enough bytes.

        Raises:
            ValueError: naming the argument, what was expected and what was given.
        """
        _, _, size = check_query(query)
        check_sizes(latent_rank=self.latent_rank)
        if self.latent_rank >= size:
            raise ValueError(f"latent_rank: expected less than the query's head size of {size}, got {self.latent_rank}")
        check_packed(self.cache, self.latent_rank, size - self.latent_rank)
        check_scale_is_given(options)
        check_plan(plan)
        # Reuse the check of pages on a dummy view; its contents are not used.
        key = self.cache[:, :, None, :1].expand(-1, -1, -1, size)
        pages = Pages(key, key[..., : self.latent_rank])
        pages.check(query, plan, options, out, return_lse, pool="cache", types=(torch.uint8, torch.uint8))


def latents_of(
    cache: Tensor,
    latent_rank: int,
    cache_scale: float = 1.0,
    query_scale: float | None = None,
    fp8_weights: bool = False,
) -> Latents | PackedLatents:
    """Return the storage of a pool of latents: packed if it holds bytes.

    Raises:
        ValueError: if packed rows, which have their own scales, come with a scale or with a rounded query.
    """
    if not is_packed(cache):
        return Latents(cache, latent_rank, cache_scale, query_scale, fp8_weights)
    check_cache_scale(cache, cache_scale)
    for name, given in (("query_scale", query_scale is not None), ("fp8_weights", fp8_weights is not False)):
        if given:
            raise ValueError(
                f"{name}: expected none for packed latents, which are dequantized before products, got one"
            )
    return PackedLatents(cache, latent_rank)


class Pairs(NamedTuple):
    """The KV heads of differential attention in two halves, one per softmax: each a pool of keys and one of values.

    Attributes:
        cache: `[half, key or value, n, p, hk/2, d]`, or `[half, key or value, s, hk/2, d]` in rows.
        scales: the scales of an fp8 cache, in the order of interleaved pairs; None for an unquantized cache.
    """

    cache: Shaped[Tensor, "2 2 *pages pairs d"]
    scales: Fp8Scales | None = None

    def of_halves(self, half: int, other: int) -> "Rows | Pages | QuantizedPages":
        """Return the keys of half `half` with the values of half `other`."""
        key, value = self.cache[half, 0], self.cache[other, 1]
        if self.scales is not None:
            return QuantizedPages(key, value, self.scales.of_halves(half, other))
        return Rows(key, value) if key.ndim == 3 else Pages(key, value)

    def check(
        self,
        query: Tensor,
        plan: AttentionPlan,
        options: AttentionOptions,
        out: Tensor | None,
        return_lse: bool,
        *,
        lambda_full: Tensor,
        lambda_init: float,
        norm_weight: Tensor | None,
        norm_eps: float,
        norm: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        """Check a call of differential attention: query `[t, h, d]` in pairs of heads, the lambdas and the norm.

        Raises:
            ValueError: naming the argument, what was expected and what was given.
        """
        check_query(query)
        check_plan(plan)
        own, cache, scales = plan.own, self.cache, self.scales
        over_rows = own.block_size is None
        letters = "2 2 s hk/2 d" if over_rows else "2 2 n p hk/2 d"
        kind = query.dtype if scales is None else stored_in_pairs(cache, scales)
        check(query=(query, "t h d"), cache=(cache, letters, kind))
        h, pairs = query.shape[1], cache.shape[-2]
        if h % 2 or pairs == 0 or (h // 2) % pairs:
            raise ValueError(f"query: expected pairs of heads, in a number that hk/2={pairs} divides, got h={h}")
        check(query=(query, "t h d"), lambda_full=(lambda_full, "float"))
        if lambda_full.is_cpu and not isfinite(lambda_full.item()):
            raise ValueError(f"lambda_full: expected a finite number, got {lambda_full.item()}")
        check_number("lambda_init", lambda_init)
        check_number("norm_eps", norm_eps, above=0.0)
        if norm is not None and (not callable(norm) or isinstance(norm, type)):
            raise ValueError(f"norm: expected a function of the differences, got {describe(norm)}")
        if norm is not None and norm_weight is not None:
            raise ValueError(f"norm_weight: expected None beside a norm of its own, got {describe(norm_weight)}")
        of_norm = (norm_weight, "float 2*d or None")
        check({"2 * d": 2 * query.shape[2]}, query=(query, "t h d"), norm_weight=of_norm)
        check_options(options, query)
        check_result(query, query.shape[2], out, return_lse)
        its_options = options.of_heads(slice(0, None, 2))
        tensors, call = (cache[0, 0], cache[0, 1]), (its_options, None, return_lse)
        if over_rows:
            if scales is not None:
                raise ValueError("scales: expected None over rows, which are not quantized, got Fp8Scales")
            Rows(*tensors).check(query[:, ::2], own, *call, name="cache")
            return
        Pages(*tensors).check(query[:, ::2], plan, *call, pool="cache", types=(kind, kind))
        if scales is not None:
            if isinstance(plan, CascadePlan):
                check_no_scale_per_sequence(scales, 2 * pairs, OF_A_GROUP)
            check_scales(scales, *tensors, *num_seqs_of(own), hk=2 * pairs)


Keys = Rows | Pages | QuantizedPages | Int4Pages | Nvfp4Pages | Latents | PackedLatents
AnyKeys = Keys | Pairs


def _as_numbers(query: Tensor, scales: Fp8Scales | Int8Scales, out: Tensor | None) -> Tensor:
    """Return a dummy for an fp8 query, with its shape and the type of its outputs, for checks only."""
    if not isinstance(scales, Fp8Scales) or scales.query is None:
        raise ValueError(f"scales.query: expected the scale of a query that comes as {describe(query)}, got none")
    check(query=(query, "t h d", scales.format))
    return torch.empty((), dtype=type_of_outputs(query, out), device=query.device).expand(query.shape)


Sequences = Iterator[tuple[Float[Tensor, "_ hk d"], Float[Tensor, "_ hk dv"]]]


def read(query: Float[Tensor, "t h d"], keys: Keys, plan: Plan | TreePlan) -> Sequences:
    """Read the keys and the values of each sequence of a plan, in order.

    Args:
        query: the queries: their type decides the compute type, their head size how much of a row of latents is read.
        keys: the storage.
        plan: a plan over rows for `Rows`, over pages for all others.

    Returns:
        The keys and values of each sequence.
    """
    if isinstance(keys, Rows):
        for first, last in plan.batch.key_rows():
            yield keys.key[first:last], keys.value[first:last]
        return
    assert plan.batch.block_table is not None  # a plan over pages has one
    for i, (blocks, seq_len) in enumerate(zip(plan.batch.block_table, plan.batch.seq_lens.tolist(), strict=True)):
        if isinstance(keys, Latents | PackedLatents):
            rows = gather(rearrange(keys.cache, "n p c -> n p 1 c"), blocks, seq_len)
            if isinstance(keys, PackedLatents):
                key = read_packed(rows, keys.latent_rank, query.shape[2] - keys.latent_rank, query.dtype)
            else:
                key = read_latents(rows[..., : query.shape[2]], keys.cache_scale, query.dtype)
            yield key, key[..., : keys.latent_rank]
            continue
        key, value = (gather(cache, blocks, seq_len) for cache in keys[:2])
        if isinstance(keys, Pages):
            yield key, value
        elif isinstance(keys, Int4Pages | Nvfp4Pages):
            by_row = (_by_row(scale) for scale in (keys.scales.key, keys.scales.value))
            of_key, of_value = (gather(scale, blocks, seq_len) for scale in by_row)
            yield _read_four_bits(key, value, of_key, of_value, keys.scales, compute_dtype(query.dtype))
        elif isinstance(keys.scales, Fp8Scales):
            yield _read_fp8(key, value, keys.scales, _member(plan, i), query)
        else:
            of_key = gather(rearrange(keys.scales.key, "n p hk -> n p hk 1"), blocks, seq_len)
            yield _read_int8(key, value, of_key, keys.scales.value, query)


def read_query(query: Float[Tensor, "t h d"], keys: Keys, plan: Plan | TreePlan) -> Float[Tensor, "t h d"]:
    """Return the queries, quantized and dequantized if the keys have a scale for them.

    Args:
        query: query rows of all sequences.
        keys: the storage of the keys.
        plan: the rows of each sequence.

    Returns:
        The queries, in the compute type if they were quantized.
    """
    if isinstance(keys, Latents) and keys.query_scale is not None:
        compute, scale = compute_dtype(query.dtype), per_head(keys.query_scale, query.shape[1], 0).to(query.device)
        return to_fp8(query, scale, keys.cache.dtype).to(compute) * scale.to(compute)
    if not isinstance(keys, QuantizedPages):
        return query
    compute, scales = compute_dtype(query.dtype), keys.scales
    if isinstance(scales, Fp8Scales) and scales.query is None:
        return query
    rounded, num_kv_heads = query.to(compute, copy=True), keys.key_cache.shape[2]
    for i, (q0, q1) in enumerate(plan.batch.query_rows()):
        x = query[q0:q1]
        if isinstance(scales, Int8Scales):
            of_rows = row_scale(x)
            rounded[q0:q1] = to_int8(x, of_rows).to(compute) * of_rows.to(compute)
            continue
        assert scales.query is not None  # otherwise returned above
        of_kv_heads = per_head(scales.query, num_kv_heads, _member(plan, i)).to(query.device)
        of_heads = repeat(of_kv_heads, "hk 1 -> (hk g) 1", g=query.shape[1] // num_kv_heads)
        quantized = x if query.dtype == scales.format else to_fp8(x, of_heads, scales.format)
        rounded[q0:q1] = quantized.to(compute) * of_heads.to(compute)
    return rounded


def read_latents(
    quantized: Shaped[Tensor, "*rows d"], cache_scale: float, dtype: torch.dtype
) -> Float[Tensor, "*rows d"]:
    """Dequantize latents to the compute type of queries of `dtype`."""
    return quantized.to(compute_dtype(dtype)) * torch.tensor(cache_scale, dtype=torch.float32, device="cpu")


def read_packed(
    rows: UInt8[Tensor, "*rows c"], latent_rank: int, rope_size: int, dtype: torch.dtype
) -> Float[Tensor, "*rows d"]:
    """Return the latents and rotary keys of packed rows, in the compute type of queries of `dtype`.

    Scales are float32 in every compute type, so the product of a scale and a quantized value is rounded once.
    """
    compute = compute_dtype(dtype)
    quantized, scales, rope_key = packed_parts(rows, latent_rank, rope_size)
    wide = torch.promote_types(compute, scales.dtype)
    groups = rearrange(quantized.view(PACKED_FORMAT).to(wide), "... (g e) -> ... g e", e=LATENT_GROUP)
    latent = rearrange(groups * scales.to(wide)[..., None], "... g e -> ... (g e)")
    return torch.cat([latent.to(compute), rope_key.to(compute)], dim=-1)


def _member(plan: Plan | TreePlan, i: int) -> int:
    """Return the batch's sequence for sequence `i` of a plan."""
    return i if plan.sequences is None else int(plan.sequences[i])


def _read_fp8(
    key: Shaped[Tensor, "s hk d"],
    value: Shaped[Tensor, "s hk dv"],
    scales: Fp8Scales,
    sequence: int,
    query: Float[Tensor, "t h d"],
) -> tuple[Float[Tensor, "s hk d"], Float[Tensor, "s hk dv"]]:
    """Dequantize the keys and values of one sequence."""
    compute, hk = compute_dtype(query.dtype), key.shape[1]
    of_key, of_value = (per_head(x, hk, sequence).to(query.device, compute) for x in (scales.key, scales.value))
    key, value = (quantized.view(scales.format).to(compute) for quantized in (key, value))
    return _times(key, of_key), _times(value, of_value)


def _by_row(scale: Shaped[Tensor, "n p hk *groups"]) -> Shaped[Tensor, "n p hk scales"]:
    """Return scales with a dimension for those of a row, one or several."""
    return scale if scale.ndim == 4 else rearrange(scale, "n p hk -> n p hk 1")


def _read_four_bits(
    key: UInt8[Tensor, "s hk half"],
    value: UInt8[Tensor, "s hk value_half"],
    of_key: Shaped[Tensor, "s hk scales"],
    of_value: Shaped[Tensor, "s hk value_scales"],
    scales: FourBitScales,
    compute: torch.dtype,
) -> tuple[Float[Tensor, "s hk d"], Float[Tensor, "s hk dv"]]:
    """Dequantize the keys and values of one sequence."""
    if isinstance(scales, Int4Scales):
        return from_int4(key, of_key[..., 0], compute), from_int4(value, of_value[..., 0], compute)
    return from_nvfp4(key, of_key, scales.of_keys, compute), from_nvfp4(value, of_value, scales.of_values, compute)


def _read_int8(
    key: Int8[Tensor, "s hk d"],
    value: Shaped[Tensor, "s hk dv"],
    of_key: Float32[Tensor, "s hk 1"],
    of_value: Float32[Tensor, "hk dv"] | None,
    query: Float[Tensor, "t h d"],
) -> tuple[Float[Tensor, "s hk d"], Float[Tensor, "s hk dv"]]:
    """Dequantize the keys and values of one sequence."""
    compute = compute_dtype(query.dtype)
    numbers = value.to(compute) * (1.0 if of_value is None else of_value.to(compute))
    return key.to(compute) * of_key.to(compute), numbers


def _times(quantized: Float[Tensor, "s hk d"], scale: Float[Tensor, "hk 1"]) -> Float[Tensor, "s hk d"]:
    """Multiply quantized values by their scale; NaN and infinity are kept, and do not enter the scale's gradient."""
    finite = quantized.isfinite()
    return torch.where(finite, quantized.masked_fill(~finite, 0.0) * scale, quantized)
