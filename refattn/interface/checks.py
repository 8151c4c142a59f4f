"""Checks of the arguments of a call: shapes, types, devices, and whether they fit the plan.

They run in every layer, so they never read a tensor on a device, and only a few numbers per head of tensors on the CPU.
"""

from collections.abc import Sequence
from itertools import pairwise
from math import isfinite

import torch
from jaxtyping import Int32
from torch import Tensor

from refattn.interface.ambient import refuse_gradients
from refattn.interface.options import AttentionOptions
from refattn.interface.parallel import Group
from refattn.interface.plan import CascadePlan, ContextParallelPlan, Plan, PrefillPlan
from refattn.interface.scales import FP8_FORMATS, Fp8Scales, Int8Scales
from refattn.interface.trees import AttentionPlan, TreePlan
from refattn.interface.values import (
    check_can_be_written,
    check_flag,
    check_floating,
    check_list,
    check_memory,
    check_number,
    check_own_memory,
    check_per_head,
    check_sizes,
    describe,
    expect,
    is_int,
    same_device,
)

QUERY_TYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
FEW_SLOTS = 512  # up to which Python sorts them sooner than torch
ROUNDING = "rounding to codes has no gradient; use torch.no_grad(), or a cache of numbers"
OF_A_GROUP = "as a group of a cascade is of several sequences"  # why a cascade takes no scale per sequence
WRITTEN = "as a token that is written knows no sequence"  # why a write takes no scale per sequence


def check_dense(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    plan: Plan,
    options: AttentionOptions,
    out: Tensor | None,
    return_lse: bool,
    *,
    rows: str = "key",
) -> None:
    """Check a call of a path without a cache: query `[t, h, d]`, key `[s, hk, d]`, value `[s, hk, dv]`.

    Errors call the rows of keys by the name that their path has for them.

    Raises:
        ValueError: naming the argument, what was expected and what came.
    """
    _check_tokens(query, key, value, ("key", "value"), ("s", "hk", "d"), plan, options)
    if plan.block_size is not None:
        raise ValueError(f"plan: expected one over rows, from dense.plan, got blocks of {plan.block_size} tokens")
    _check_result(query, value.shape[-1], out, return_lse)
    if plan.needs is not None and plan.needs.key_rows > key.shape[0]:
        raise ValueError(
            f"{rows}: expected at least the {plan.needs.key_rows} rows that seq_lens adds up to, got {key.shape[0]}"
        )


def check_paged(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    plan: Plan,
    options: AttentionOptions,
    out: Tensor | None,
    return_lse: bool,
    *,
    pool: str = "key_cache",
    types: tuple[torch.dtype, torch.dtype] | None = None,
) -> Int32[Tensor, "b m"]:
    """Check a call over pages: query `[t, h, d]`, caches `[n, p, hk, d]` and `[n, p, hk, dv]`.

    Errors call the pool by the name that its path has for it. Caches have the type of the query, or those given.

    Returns:
        The block table of the plan.

    Raises:
        ValueError: naming the argument, what was expected and what came.
    """
    names, dims = ("key_cache", "value_cache"), ("n", "p", "hk", "d")
    _check_tokens(query, key_cache, value_cache, names, dims, plan, options, types)
    _check_result(query, value_cache.shape[-1], out, return_lse)
    return _check_pool(pool, key_cache, plan)


def check_cascade(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    plan: CascadePlan,
    options: AttentionOptions,
    out: Tensor | None,
    return_lse: bool,
) -> None:
    """Check a call over the levels of a cascade, as `check_paged` does for one plan.

    Raises:
        ValueError: naming the argument, what was expected and what came.
    """
    if not isinstance(plan, CascadePlan):
        raise ValueError(f"plan: expected a CascadePlan, got {describe(plan)}")
    check_paged(query, key_cache, value_cache, plan.levels[-1], options, out, return_lse)
    _check_levels("key_cache", key_cache, plan, options)


def check_tree(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    plan: TreePlan,
    options: AttentionOptions,
    out: Tensor | None,
    return_lse: bool,
) -> Int32[Tensor, "b m"]:
    """Check a call over drafted trees, as `check_paged` does for one plan.

    Returns:
        The block table of the plan.

    Raises:
        ValueError: naming the argument, what was expected and what came.
    """
    if not isinstance(plan, TreePlan):
        raise ValueError(f"plan: expected a Plan or a TreePlan, from speculative.plan, got {describe(plan)}")
    return check_paged(query, key_cache, value_cache, plan.whole, options, out, return_lse)


def check_context_parallel(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    plan: ContextParallelPlan,
    options: AttentionOptions,
    out: Tensor | None,
    return_lse: bool,
    *,
    group: Group,
    scales: Fp8Scales | Int8Scales | None = None,
) -> slice:
    """Check a call on a rank: its query heads `[t, h, d]`, new keys `[t, hk, d]`, its caches `[n, p, hk, d]`.

    With scales the caches hold quantised values, and new keys and values are as the query.

    Returns:
        The key heads that the rank's query heads read.

    Raises:
        ValueError: naming the argument, what was expected and what came.
    """
    t, h, d = _check_query(query)
    kinds = (query.dtype, query.dtype) if scales is None else _stored_types(key_cache, value_cache, scales)
    shape = expect(key_cache, "key_cache", kinds[0], ("n", "p", "hk", "d"), (None, None, None, d))
    values = expect(value_cache, "value_cache", kinds[1], ("n", "p", "hk", "dv"), (*shape[:-1], None))
    expect(key, "key", query.dtype, ("t", "hk", "d"), (t, shape[2], d))
    expect(value, "value", query.dtype, ("t", "hk", "dv"), (t, shape[2], values[-1]))
    if not isinstance(plan, ContextParallelPlan):
        raise ValueError(f"plan: expected a ContextParallelPlan, got {describe(plan)}")
    if not isinstance(group, Group) or (group.rank, group.size) != (plan.shard.rank, plan.shard.num_ranks):
        came = f"rank {group.rank} of {group.size}" if isinstance(group, Group) else describe(group)
        raise ValueError(
            f"group: expected rank {plan.shard.rank} of {plan.shard.num_ranks}, as in the plan, got {came}"
        )
    hk, heads = shape[2], h * group.size
    per_key = heads // hk if hk and heads % hk == 0 else 0
    if not per_key or (h % per_key and per_key % h):
        raise ValueError(
            f"query: expected heads of each of {group.size} ranks that read whole key heads of hk={hk}, or a part of "
            f"one, got h={h}"
        )
    first = group.rank * h // per_key
    own = slice(first, first + max(1, h // per_key))
    same_device(query=query, key=key, value=value, key_cache=key_cache, value_cache=value_cache)
    check_dense(query, key[:, own], value[:, own], plan.own, options, out, return_lse)
    _check_pool("key_cache", key_cache, plan.context)
    if scales is not None:
        _check_scales(scales, key_cache, value_cache, *_num_seqs(plan.context))
    return own


def check_latent(
    query: Tensor,
    cache: Tensor,
    plan: AttentionPlan,
    options: AttentionOptions,
    out: Tensor | None,
    return_lse: bool,
    *,
    latent_rank: int,
    cache_scale: float,
) -> Int32[Tensor, "b m"]:
    """Check a call over latents: an absorbed query `[t, h, r + rope]`, a cache `[n, p, c]` with `c` at least that.

    The cache has the type of the query, or holds codes of fp8 under a scale.

    Returns:
        The block table of the plan.

    Raises:
        ValueError: naming the argument, what was expected and what came.
    """
    _, _, size = _check_query(query)
    check_sizes(latent_rank=latent_rank)
    if latent_rank > size:
        raise ValueError(f"latent_rank: expected at most the query's head size of {size}, got {latent_rank}")
    _check_latents(cache, query, size, cache_scale)
    _check_scale(options)
    _check_plan(plan)
    pages, types = cache[:, :, None], (cache.dtype, cache.dtype)
    pools = pages[..., :size], pages[..., :latent_rank]
    own = plan.levels[-1].whole
    block_table = check_paged(query, *pools, own, options, out, return_lse, pool="cache", types=types)
    _check_levels("cache", cache, plan, options)
    return block_table


def check_latent_prefill(
    query: Tensor,
    latent: Tensor,
    rope_key: Tensor,
    cache: Tensor,
    plan: PrefillPlan,
    options: AttentionOptions,
    out: Tensor | None,
    return_lse: bool,
    *,
    key_projection: Tensor,
    value_projection: Tensor,
    cache_scale: float,
) -> None:
    """Check a prefill over latents: query `[t, h, nope + rope]`, new latents `[t, r]`, rotary keys `[t, rope]`.

    The projections are `[h, nope, r]` and `[h, dv, r]`; the cache is as for `check_latent`.

    Raises:
        ValueError: naming the argument, what was expected and what came.
    """
    t, h, size = _check_query(query)
    _, rank = expect(latent, "latent", query.dtype, ("t", "r"), (t, None))
    _, rope = expect(rope_key, "rope_key", query.dtype, ("t", "rope"), (t, None))
    expect(key_projection, "key_projection", query.dtype, ("h", "nope", "r"), (h, size - rope, rank))
    expect(value_projection, "value_projection", query.dtype, ("h", "dv", "r"), (h, None, rank))
    _check_latents(cache, query, rank + rope, cache_scale)
    _check_scale(options)
    same_device(
        query=query,
        latent=latent,
        rope_key=rope_key,
        cache=cache,
        key_projection=key_projection,
        value_projection=value_projection,
    )
    if not isinstance(plan, PrefillPlan):
        raise ValueError(f"plan: expected a PrefillPlan, from plan_prefill, got {describe(plan)}")
    if cache.shape[1] != plan.block_size:
        raise ValueError(f"cache: expected blocks of {plan.block_size} tokens, as in the plan, got p={cache.shape[1]}")
    if plan.blocks is not None and plan.blocks > cache.shape[0]:
        raise ValueError(
            f"cache: expected at least {plan.blocks} blocks, as in the block table, got n={cache.shape[0]}"
        )
    needs, device = plan.own.needs, plan.own.batch.device
    if device != query.device:
        raise ValueError(f"plan: expected one on {query.device}, where the query is, got {device}")
    if needs is not None and needs.query_rows > t:
        raise ValueError(f"query: expected at least {needs.query_rows} rows, where cu_seqlens_q ends, got t={t}")
    _check_options(options, query)
    for chunk in plan.chunks:
        _check_positions(chunk.plan, options)
    _check_result(query, value_projection.shape[1], out, return_lse)


def check_latent_slots(
    latent: Tensor, rope_key: Tensor, cache: Tensor, slot_mapping: Tensor, *, cache_scale: float
) -> None:
    """Check a write of new latents `[t, r]` and rotary keys `[t, rope]` into the cache `[n, p, c]` by slots `[t]`.

    They have the type of the cache, or any floating point type if it holds codes of fp8.

    Raises:
        ValueError: naming the argument; on a CPU also if a slot is outside the pool, or given twice.
    """
    expect(cache, "cache", None, ("n", "p", "c"), (None, None, None))
    _check_cache_scale(cache, cache_scale)
    kind = cache.dtype
    if kind in FP8_FORMATS:
        kind = _check_numbers("latent", latent)
        refuse_gradients(ROUNDING, latent=latent, rope_key=rope_key)
    t, rank = expect(latent, "latent", kind, ("t", "r"), (None, None))
    _, rope = expect(rope_key, "rope_key", kind, ("t", "rope"), (t, None))
    if rank + rope > cache.shape[2]:
        raise ValueError(f"cache: expected rows of at least r + rope = {rank + rope} elements, got c={cache.shape[2]}")
    pages = cache[:, :, None]
    pools = pages[..., :rank], pages[..., rank : rank + rope]
    check_can_be_written(cache=cache)
    check_slots(latent[:, None], rope_key[:, None], *pools, slot_mapping, types=(kind, kind))


def check_projection(x: Tensor, name: str, projection: Tensor, projection_name: str, dims: tuple[str, ...]) -> None:
    """Check queries `[t, h, nope + rope]` for `[h, nope, r]`, or latents `[t, h, r]` for `[h, dv, r]`.

    Raises:
        ValueError: naming the argument, what was expected and what came.
    """
    _, h, size = _check_query(x) if name == "query" else expect(x, name, None, ("t", "h", "r"), (None, None, None))
    check_floating(name, x)
    rank = None if name == "query" else size
    _, inner, _ = expect(projection, projection_name, x.dtype, dims, (h, None, rank))
    if name == "query" and inner > size:
        raise ValueError(f"{projection_name}: expected at most the {size} elements of a query, got nope={inner}")
    same_device(**{name: x, projection_name: projection})


def _check_latents(cache: Tensor, query: Tensor, size: int, cache_scale: float) -> None:
    holds_codes = isinstance(cache, Tensor) and cache.dtype in FP8_FORMATS
    expect(cache, "cache", None if holds_codes else query.dtype, ("n", "p", "c"), (None, None, None))
    if cache.shape[2] < size:
        raise ValueError(f"cache: expected rows of at least r + rope = {size} elements, got c={cache.shape[2]}")
    if holds_codes:
        refuse_gradients(ROUNDING, cache=cache)
    _check_cache_scale(cache, cache_scale)


def _check_cache_scale(cache: Tensor, cache_scale: float) -> None:
    check_number("cache_scale", cache_scale, above=0.0)
    if cache_scale != 1 and cache.dtype not in FP8_FORMATS:
        kind = str(cache.dtype).removeprefix("torch.")
        raise ValueError(
            f"cache_scale: expected 1 for a cache of {kind}, which holds no codes of fp8, got {cache_scale}"
        )


def _check_scale(options: AttentionOptions) -> None:
    if isinstance(options, AttentionOptions) and options.softmax_scale is None:
        raise ValueError(
            "softmax_scale: expected a number, as the head size before absorption is unknown here, got None"
        )


def check_differential(
    query: Tensor,
    cache: Tensor,
    plan: AttentionPlan,
    options: AttentionOptions,
    out: Tensor | None,
    return_lse: bool,
    *,
    lambda_full: Tensor,
    lambda_init: float,
    norm_weight: Tensor | None,
    norm_eps: float,
    scales: Fp8Scales | None = None,
) -> None:
    """Check what differential attention asks for beside the shared options.

    The query is `[t, h, d]` in pairs of heads, the cache `[2, 2, n, p, hk/2, d]`, and under a plan over rows
    `[2, 2, s, hk/2, d]`. With scales it holds quantised values.

    Raises:
        ValueError: naming the argument, what was expected and what came.
    """
    _check_query(query)
    _check_plan(plan)
    own = plan.levels[-1].whole
    over_rows = own.block_size is None
    dims = ("2", "2", "s", "hk/2", "d") if over_rows else ("2", "2", "n", "p", "hk/2", "d")
    kind = query.dtype if scales is None else _stored_in_pairs(cache, scales)
    expect(cache, "cache", kind, dims, (2, 2, *(None,) * (len(dims) - 3), query.shape[2]))
    h, pairs = query.shape[1], cache.shape[-2]
    if h % 2 or pairs == 0 or (h // 2) % pairs:
        raise ValueError(f"query: expected pairs of heads, in a number that hk/2={pairs} divides, got h={h}")
    same_device(query=query, cache=cache)
    expect(lambda_full, "lambda_full", None, (), ())
    check_floating("lambda_full", lambda_full)
    same_device(query=query, lambda_full=lambda_full)
    if lambda_full.is_cpu and not isfinite(lambda_full.item()):
        raise ValueError(f"lambda_full: expected a finite number, got {lambda_full.item()}")
    check_number("lambda_init", lambda_init)
    check_number("norm_eps", norm_eps, above=0.0)
    if norm_weight is not None:
        expect(norm_weight, "norm_weight", None, ("2 * d",), (2 * query.shape[2],))
        check_floating("norm_weight", norm_weight)
        same_device(query=query, norm_weight=norm_weight)
    _check_options(options, query)
    _check_result(query, query.shape[2], out, return_lse)
    its_options = options.of_heads(slice(0, None, 2))
    tensors = query[:, ::2], cache[0, 0], cache[0, 1], own, its_options, None, return_lse
    if over_rows:
        if scales is not None:
            raise ValueError("scales: expected None over rows, which are not quantised, got Fp8Scales")
        check_dense(*tensors, rows="cache")
        return
    check_paged(*tensors, pool="cache", types=(kind, kind))
    _check_levels("cache", cache[0, 0], plan, its_options)
    if scales is not None:
        if isinstance(plan, CascadePlan):
            _check_no_scale_per_sequence(scales, 2 * pairs, OF_A_GROUP)
        _check_scales(scales, cache[0, 0], cache[0, 1], *_num_seqs(own), hk=2 * pairs)


def check_lambdas(lambda_init: float, **vectors: Tensor) -> None:
    """Check the learned vectors `[d]` that make the weight of differential attention's second softmax.

    Raises:
        ValueError: naming the argument, what was expected and what came.
    """
    (first, one), *_ = vectors.items()
    expect(one, first, None, ("d",), (None,))
    for name, vector in vectors.items():
        expect(vector, name, one.dtype, ("d",), one.shape)
        check_floating(name, vector)
    same_device(**vectors)
    check_number("lambda_init", lambda_init)


def check_pairs(cache: Tensor, *, scales: Fp8Scales | None = None, **tokens: Tensor) -> None:
    """Check new keys and values `[t, hk, d]` of differential attention, before either half of them is written.

    With scales the cache holds quantised values, and tokens have any floating point type.

    Raises:
        ValueError: naming the first that does not fit the cache `[2, 2, n, p, hk/2, d]`.
    """
    kind = None if scales is None else _stored_in_pairs(cache, scales)
    expect(cache, "cache", kind, ("2", "2", "n", "p", "hk/2", "d"), (2, 2, None, None, None, None))
    hk = 2 * cache.shape[4]
    for name, tensor in tokens.items():
        kind = cache.dtype if scales is None else _check_numbers(name, tensor)
        expect(tensor, name, kind, ("t", "hk", "d"), (None, hk, cache.shape[5]))
    if tokens:
        check_own_memory("cache", cache)
    if scales is not None:
        _check_no_scale_per_sequence(scales, hk, WRITTEN, besides=("query",))
        _check_scales(scales, cache[0, 0], cache[0, 1], None, at_least=False, hk=hk)


def _stored_in_pairs(cache: Tensor, scales: Fp8Scales) -> torch.dtype:
    """Return the type that a quantised cache of pairs has to have."""
    if not isinstance(scales, Fp8Scales):
        raise ValueError(f"scales: expected Fp8Scales for a cache of pairs, got {describe(scales)}")
    return _stored_types(cache, cache, scales)[0]


def check_halves(heads: Tensor) -> None:
    """Check heads `[t, h, d]` whose first half is to be paired with the second.

    Raises:
        ValueError: if they are of another shape, or of an odd number.
    """
    expect(heads, "heads", None, ("t", "h", "d"), (None, None, None))
    if heads.shape[1] % 2:
        raise ValueError(f"heads: expected an even number of heads, got h={heads.shape[1]}")


def check_rows_of_pairs(key: Tensor, value: Tensor) -> None:
    """Check keys and values `[s, hk, d]` that are to be split into the halves of their pairs.

    Raises:
        ValueError: naming the argument, what was expected and what came.
    """
    shape = expect(key, "key", None, ("s", "hk", "d"), (None, None, None))
    expect(value, "value", key.dtype, ("s", "hk", "d"), shape)
    same_device(key=key, value=value)
    if shape[1] % 2:
        raise ValueError(f"key: expected pairs of heads, an even number, got hk={shape[1]}")


def check_quantized(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    plan: AttentionPlan,
    options: AttentionOptions,
    scales: Fp8Scales | Int8Scales,
    out: Tensor | None,
    return_lse: bool,
) -> None:
    """Check a call over quantised pages: as `check_paged`, and that the scales fit them.

    A query in fp8 has a scale, and its outputs the type of `out`, or bfloat16.

    Raises:
        ValueError: naming the argument, what was expected and what came.
    """
    _check_plan(plan)
    types = _stored_types(key_cache, value_cache, scales)
    if isinstance(query, Tensor) and query.dtype in FP8_FORMATS:
        query = _as_numbers(query, scales, out)
    own = plan.levels[-1].whole
    check_paged(query, key_cache, value_cache, own, options, out, return_lse, types=types)
    _check_levels("key_cache", key_cache, plan, options)
    if isinstance(plan, CascadePlan):
        _check_no_scale_per_sequence(scales, key_cache.shape[2], OF_A_GROUP)
    _check_scales(scales, key_cache, value_cache, *_num_seqs(own))
    codes = (
        {"key_cache": key_cache} if types[1] in QUERY_TYPES else {"key_cache": key_cache, "value_cache": value_cache}
    )
    if isinstance(scales, Int8Scales) or scales.query is not None:
        of_query = None if isinstance(scales, Int8Scales) else scales.query
        codes |= {"query": query} | ({"scales.query": of_query} if isinstance(of_query, Tensor) else {})
    refuse_gradients(ROUNDING, **codes)


def _as_numbers(query: Tensor, scales: Fp8Scales | Int8Scales, out: Tensor | None) -> Tensor:
    """Return a stand-in for a query in fp8, of its shape and the type of its outputs, whose elements are not read."""
    if not isinstance(scales, Fp8Scales) or scales.query is None:
        raise ValueError(f"scales.query: expected the scale of a query that comes as {describe(query)}, got none")
    expect(query, "query", scales.format, ("t", "h", "d"), (None, None, None))
    return torch.empty((), dtype=type_of_outputs(query, out), device=query.device).expand(query.shape)


def type_of_outputs(query: Tensor, out: Tensor | None) -> torch.dtype:
    """Return the type of the outputs for a query: its own; of a query in fp8 that of `out`, or bfloat16."""
    if query.dtype not in FP8_FORMATS:
        return query.dtype
    return out.dtype if isinstance(out, Tensor) and out.dtype in QUERY_TYPES else torch.bfloat16


def check_quantized_slots(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    scales: Fp8Scales | Int8Scales,
) -> None:
    """Check a quantising write of new tokens `[t, hk, d]` into the pool `[n, p, hk, d]` by slots `[t]`.

    Raises:
        ValueError: naming the argument; on a CPU also if a slot is outside the pool, or given twice.
    """
    stored = _stored_types(key_cache, value_cache, scales)
    for name, cache, kind in (("key_cache", key_cache, stored[0]), ("value_cache", value_cache, stored[1])):
        expect(cache, name, kind, ("n", "p", "hk", "d" if name == "key_cache" else "dv"), (None,) * 4)
    for name, tensor in (("key", key), ("value", value)):
        _check_numbers(name, tensor)
    kept_as_it_is = isinstance(scales, Int8Scales) and scales.value is None
    check_slots(
        key,
        value,
        key_cache,
        value_cache,
        slot_mapping,
        types=(key.dtype, value_cache.dtype if kept_as_it_is else key.dtype),
    )
    _check_no_scale_per_sequence(scales, key_cache.shape[2], WRITTEN, besides=("query",))
    _check_scales(scales, key_cache, value_cache, None, at_least=False)
    if isinstance(scales, Int8Scales):
        check_own_memory("scales.key", scales.key)
    refuse_gradients(ROUNDING, key=key, value=None if kept_as_it_is else value, scales=scales)


def check_int8_pools(
    num_blocks: int,
    block_size: int,
    num_kv_heads: int,
    head_size: int,
    value_head_size: int,
    layout: str,
    value_dtype: torch.dtype,
    device: torch.device | str,
) -> None:
    """Check the sizes, the layout, the type of values and the place of int8 pools that share one buffer.

    Raises:
        ValueError: naming the argument, what was expected and what came.
    """
    check_sizes(
        num_blocks=num_blocks,
        block_size=block_size,
        num_kv_heads=num_kv_heads,
        head_size=head_size,
        value_head_size=value_head_size,
    )
    check_memory(value_dtype, device, name="value_dtype")
    if value_dtype != torch.int8 and value_dtype not in QUERY_TYPES:
        kind = str(value_dtype).removeprefix("torch.")
        raise ValueError(f"value_dtype: expected int8, bfloat16, float16, float32 or float64, got {kind}")
    if layout not in ("NHD", "HND"):
        raise ValueError(f'layout: expected "NHD" or "HND", got {layout!r}')
    key_bytes = num_blocks * block_size * num_kv_heads * head_size
    if key_bytes % value_dtype.itemsize:
        raise ValueError(
            f"head_size: expected keys of a multiple of {value_dtype.itemsize} bytes in all, as a value of that size "
            f"begins where they end, got {key_bytes}"
        )


def check_values(values: Sequence[Tensor]) -> None:
    """Check values `[t, hk, dv]` that a scale is to be calibrated over; on a CPU also that all are finite.

    Raises:
        ValueError: naming the tensor, what was expected and what came.
    """
    check_list("values", values, "tensors [t, hk, dv]")
    if not values:
        raise ValueError("values: expected at least one tensor [t, hk, dv], got none")
    for i, value in enumerate(values):
        sizes = (None, None, None) if i == 0 else (None, *values[0].shape[1:])
        expect(value, f"values[{i}]", None, ("t", "hk", "dv"), sizes)
        check_floating(f"values[{i}]", value)
        same_device(**{"values[0]": values[0], f"values[{i}]": value})
        if value.is_cpu and not value.isfinite().all():
            raise ValueError(f"values[{i}]: expected finite numbers, got others")


def _stored_types(
    key_cache: Tensor, value_cache: Tensor, scales: Fp8Scales | Int8Scales
) -> tuple[torch.dtype, torch.dtype]:
    """Return the types that the pools have to have."""
    if isinstance(scales, Fp8Scales):
        is_bytes = isinstance(key_cache, Tensor) and key_cache.dtype == torch.uint8
        kind = torch.uint8 if is_bytes else scales.format
        return kind, kind
    if not isinstance(scales, Int8Scales):
        raise ValueError(f"scales: expected Fp8Scales or Int8Scales, got {describe(scales)}")
    if scales.value is not None:
        return torch.int8, torch.int8
    if not isinstance(value_cache, Tensor) or value_cache.dtype not in QUERY_TYPES:
        types = "bfloat16, float16, float32 or float64"
        raise ValueError(
            f"value_cache: expected a floating point type ({types}), as there is no scales.value, "
            f"got {describe(value_cache)}"
        )
    return torch.int8, value_cache.dtype


def _num_seqs(plan: Plan) -> tuple[int | None, bool]:
    """Return the sequences of the batch behind a plan, None if they are not known; and whether there may be more."""
    if plan.sequences is None:
        return plan.batch.num_seqs, False
    is_known = plan.sequences.is_cpu and plan.sequences.numel()
    return int(plan.sequences.max()) + 1 if is_known else None, True


def _check_no_scale_per_sequence(
    scales: Fp8Scales | Int8Scales, hk: int, why: str, *, besides: Sequence[str] = ()
) -> None:
    """Check that no scale is one per sequence and head, `besides` some, and say why it must not be."""
    for name, scale in scales.by_name().items() if isinstance(scales, Fp8Scales) else ():
        if name not in besides and isinstance(scale, Tensor) and scale.ndim == 2:
            raise ValueError(f"scales.{name}: expected a number or float32 [hk={hk}], {why}, got {describe(scale)}")


def _check_scales(
    scales: Fp8Scales | Int8Scales,
    key_cache: Tensor,
    value_cache: Tensor,
    num_seqs: int | None,
    at_least: bool,
    hk: int | None = None,
) -> None:
    """Check scales against pools, and those of fp8 against a number of sequences, if it is known.

    There are `hk` key heads, or as many as in the pool if that is None.
    """
    n, p, heads, _ = key_cache.shape
    hk = heads if hk is None else hk
    if isinstance(scales, Int8Scales):
        expect(scales.key, "scales.key", torch.float32, ("n", "p", "hk"), (n, p, hk))
        same_device(key_cache=key_cache, **{"scales.key": scales.key})
        if scales.value is not None:
            expect(scales.value, "scales.value", torch.float32, ("hk", "dv"), (hk, value_cache.shape[-1]))
            same_device(key_cache=key_cache, **{"scales.value": scales.value})
        return
    for name, scale in scales.by_name().items():
        if not isinstance(scale, Tensor):
            continue
        fits = scale.ndim == 1 or num_seqs is None or scale.shape[0] == num_seqs
        if num_seqs is not None and at_least:
            fits = fits or scale.shape[0] > num_seqs
        if scale.shape[-1] != hk or not fits:
            b = "b" if num_seqs is None else f"b>={num_seqs}" if at_least else f"b={num_seqs}"
            raise ValueError(
                f"scales.{name}: expected a number or float32 [hk={hk}] or [{b}, hk={hk}], got {describe(scale)}"
            )
        same_device(key_cache=key_cache, **{f"scales.{name}": scale})


def check_slots(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    *,
    types: tuple[torch.dtype, torch.dtype] | None = None,
) -> None:
    """Check a write of new tokens `[t, hk, d]` into the pool `[n, p, hk, d]` by slots `[t]`.

    Tokens have the types of the caches, or those given.

    Raises:
        ValueError: naming the argument; on a CPU also if a slot is outside the pool, or given twice.
    """
    expect(key_cache, "key_cache", None, ("n", "p", "hk", "d"), (None, None, None, None))
    expect(value_cache, "value_cache", None, ("n", "p", "hk", "dv"), (*key_cache.shape[:3], None))
    check_sizes(block_size=key_cache.shape[1])
    key_type, value_type = types or (key_cache.dtype, value_cache.dtype)
    expect(key, "key", key_type, ("t", "hk", "d"), (None, *key_cache.shape[2:]))
    expect(value, "value", value_type, ("t", "hk", "dv"), (key.shape[0], *value_cache.shape[2:]))
    expect(slot_mapping, "slot_mapping", torch.int64, ("t",), (key.shape[0],))
    check_can_be_written(key_cache=key_cache, value_cache=value_cache)
    same_device(key=key, value=value, key_cache=key_cache, value_cache=value_cache, slot_mapping=slot_mapping)
    check_own_memory("key_cache", key_cache)
    check_own_memory("value_cache", value_cache)
    if not slot_mapping.is_cpu or not slot_mapping.numel():
        return
    last = key_cache.shape[0] * key_cache.shape[1] - 1
    if slot_mapping.numel() <= FEW_SLOTS:
        slots = sorted(slot_mapping.tolist())
        twice = [slot for slot, following in pairwise(slots) if slot == following >= 0]
    else:
        ordered = slot_mapping.sort().values
        slots = [int(ordered[0]), int(ordered[-1])]
        twice = ordered[1:][(ordered[1:] == ordered[:-1]) & (ordered[1:] >= 0)][:1].tolist()
    if slots[0] < -1 or slots[-1] > last:
        wrong = slots[0] if slots[0] < -1 else slots[-1]
        raise ValueError(f"slot_mapping: expected slots in 0..{last}, or -1 for padding, got {wrong}")
    if twice:
        raise ValueError(f"slot_mapping: expected each slot once, got slot {twice[0]} for several tokens")


def check_block_pairs(
    sources: Sequence[Tensor],
    destinations: Sequence[Tensor],
    pairs: Tensor,
    *,
    names: tuple[str, str] = ("sources", "destinations"),
) -> None:
    """Check a copy of whole blocks between caches whose first dimension is the block.

    Raises:
        ValueError: if the caches differ in number, block shape or type, and (where the pairs are on a CPU) if a block
            is outside its pool, or is written twice.
    """
    for name, caches in zip(names, (sources, destinations), strict=True):
        if not isinstance(caches, (list, tuple)):
            raise ValueError(f"{name}: expected a list of caches, got {describe(caches)}")
        for i, cache in enumerate(caches):
            if not isinstance(cache, Tensor) or cache.ndim < 1:
                raise ValueError(f"{name}[{i}]: expected a cache [n, ...], got {describe(cache)}")
    if len(sources) != len(destinations):
        raise ValueError(f"{names[1]}: expected {len(sources)} caches, as in sources, got {len(destinations)}")
    for i, (source, destination) in enumerate(zip(sources, destinations, strict=True)):
        if source.dtype != destination.dtype or source.shape[1:] != destination.shape[1:]:
            raise ValueError(f"{names[1]}[{i}]: expected blocks as in {describe(source)}, got {describe(destination)}")
        check_own_memory(f"{names[1]}[{i}]", destination)
        check_can_be_written(**{f"{names[1]}[{i}]": destination})
    expect(pairs, "pairs", torch.int64, ("k", "2"), (None, 2))
    if not pairs.is_cpu or not pairs.numel() or not sources:
        return
    for column, caches in ((0, sources), (1, destinations)):
        n = min(cache.shape[0] for cache in caches)
        if int(pairs[:, column].min()) < 0 or int(pairs[:, column].max()) >= n:
            raise ValueError(f"pairs: expected blocks in 0..{n - 1}, got {pairs[:, column].tolist()}")
    if pairs[:, 1].unique().numel() != pairs.shape[0]:
        raise ValueError(f"pairs: expected each destination once, got {pairs[:, 1].tolist()}")


def check_gather(cache: Tensor, blocks: Tensor, seq_len: int) -> None:
    """Check that a row of a block table covers a sequence of `seq_len` tokens of a cache `[n, p, hk, d]`.

    Raises:
        ValueError: if there are too few blocks, and on a CPU if one is outside the pool.
    """
    expect(cache, "cache", None, ("n", "p", "hk", "d"), (None, None, None, None))
    check_sizes(block_size=cache.shape[1])
    expect(blocks, "blocks", torch.int32, ("m",), (None,))
    same_device(cache=cache, blocks=blocks)
    room = blocks.shape[0] * cache.shape[1]
    if not is_int(seq_len) or not 0 <= seq_len <= room:
        raise ValueError(f"seq_len: expected 0..{room} for {blocks.shape[0]} blocks, got {describe(seq_len)}")
    needed = -(-seq_len // cache.shape[1])
    if blocks.is_cpu and needed:
        used = blocks[:needed]
        if int(used.min()) < 0 or int(used.max()) >= cache.shape[0]:
            raise ValueError(f"blocks: expected entries in 0..{cache.shape[0] - 1}, got {used.tolist()}")


def check_partials(outs: Sequence[Tensor], lses: Sequence[Tensor]) -> None:
    """Check the parts of a merge: outputs `[t, h, dv]`, all alike, and a log-sum-exp `[t, h]` for each.

    Raises:
        ValueError: naming the part, what was expected and what came.
    """
    for name, parts in (("outs", outs), ("lses", lses)):
        if not isinstance(parts, (list, tuple)):
            raise ValueError(f"{name}: expected a list of tensors, one for each part, got {describe(parts)}")
    if not outs or len(outs) != len(lses):
        raise ValueError(f"lses: expected one for each output, and at least one, got {len(lses)} for {len(outs)}")
    expect(outs[0], "outs[0]", None, ("t", "h", "dv"), (None, None, None))
    if not outs[0].is_floating_point():
        raise ValueError(f"outs[0]: expected a floating point type, got {describe(outs[0])}")
    shape, dtype, device = outs[0].shape, outs[0].dtype, outs[0].device
    lse_dtype = lses[0].dtype if isinstance(lses[0], Tensor) else None
    for i, (out, lse) in enumerate(zip(outs, lses, strict=True)):
        expect(out, f"outs[{i}]", dtype, ("t", "h", "dv"), shape)
        expect(lse, f"lses[{i}]", lse_dtype, ("t", "h"), shape[:2])
        if lse.dtype not in (torch.float32, torch.float64):
            raise ValueError(f"lses[{i}]: expected float32 or float64, got {describe(lse)}")
        for name, tensor in ((f"outs[{i}]", out), (f"lses[{i}]", lse)):
            if tensor.device != device:
                raise ValueError(f"{name}: expected {device}, where outs[0] is, got {tensor.device}")


def check_sinks(out: Tensor, sinks: Tensor) -> None:
    """Check sinks `[h]` that are to be added to outputs `[t, h, dv]`.

    Raises:
        ValueError: naming the argument, what was expected and what came.
    """
    check_per_head("sinks", sinks, out.shape[1])
    same_device(out=out, sinks=sinks)


def _check_numbers(name: str, tensor: Tensor) -> torch.dtype:
    """Check that something is a tensor of a type that is computed in, and return the type."""
    if not isinstance(tensor, Tensor) or tensor.dtype not in QUERY_TYPES:
        types = "bfloat16, float16, float32 or float64"
        raise ValueError(f"{name}: expected a floating point type ({types}), got {describe(tensor)}")
    return tensor.dtype


def _check_query(query: Tensor) -> tuple[int, ...]:
    shape = expect(query, "query", None, ("t", "h", "d"), (None, None, None))
    _check_numbers("query", query)
    if not shape[1] or not shape[2]:
        raise ValueError(f"query: expected at least one head, of a size of at least 1, got {describe(query)}")
    return shape


def _check_tokens(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    names: tuple[str, str],
    key_dims: tuple[str, ...],
    plan: Plan,
    options: AttentionOptions,
    types: tuple[torch.dtype, torch.dtype] | None = None,
) -> None:
    _, h, d = _check_query(query)
    key_type, value_type = types or (query.dtype, query.dtype)
    shape = expect(key, names[0], key_type, key_dims, (*(None,) * (len(key_dims) - 1), d))
    if not expect(value, names[1], value_type, (*key_dims[:-1], "dv"), (*shape[:-1], None))[-1]:
        raise ValueError(f"{names[1]}: expected a head size of at least 1, got {describe(value)}")
    hk = shape[-2]
    if not hk or h % hk:
        raise ValueError(f"query: expected a number of heads that hk={hk} divides, got h={h}")
    if not isinstance(plan, Plan):
        raise ValueError(f"plan: expected a Plan, got {describe(plan)}")
    _check_options(options, query)
    device, lengths = query.device, plan.batch.seq_lens
    if key.device != device or value.device != device or lengths.device != device:
        same_device(query=query, **{names[0]: key, names[1]: value}, seq_lens=lengths)
    if plan.needs is not None and plan.needs.query_rows > query.shape[0]:
        raise ValueError(
            f"query: expected at least {plan.needs.query_rows} rows, where cu_seqlens_q ends, got t={query.shape[0]}"
        )


def _check_pool(name: str, pool: Tensor, plan: Plan) -> Int32[Tensor, "b m"]:
    """Check a pool against a plan: the block size, and the number of blocks."""
    num_blocks, block_size = pool.shape[:2]
    if plan.block_size is None:
        raise ValueError("plan: expected one over pages, with a block size, got one over rows, from dense.plan")
    if plan.block_size != block_size:
        raise ValueError(f"{name}: expected blocks of {plan.block_size} tokens, as in the plan, got p={block_size}")
    if plan.needs is not None and plan.needs.blocks > num_blocks:
        raise ValueError(
            f"{name}: expected at least {plan.needs.blocks} blocks, as the block table leads to block "
            f"{plan.needs.blocks - 1}, got n={num_blocks}"
        )
    assert plan.batch.block_table is not None  # a plan with a block size has one
    return plan.batch.block_table


def _check_plan(plan: AttentionPlan) -> None:
    """Check that something is a plan that any storage over pages is read under."""
    if not isinstance(plan, Plan | CascadePlan | TreePlan):
        raise ValueError(f"plan: expected a Plan, a CascadePlan or a TreePlan, got {describe(plan)}")


def _check_levels(name: str, pool: Tensor, plan: AttentionPlan, options: AttentionOptions) -> None:
    """Check the levels of a cascade that are shared: their blocks, and that their positions are known for ALiBi."""
    for level in plan.levels[:-1]:
        _check_pool(name, pool, level.whole)
        _check_positions(level.whole, options)


def _check_positions(plan: Plan, options: AttentionOptions) -> None:
    """Check that a plan says where its queries stand if there is ALiBi, as they are not the last of its tokens."""
    if options.alibi_slopes is not None and plan.positions is None:
        raise ValueError(
            "alibi_slopes: expected a plan that knows the positions of its queries, got one of a batch that does not "
            "say num_tokens, the number of its query rows; make the plan of dataclasses.replace(batch, num_tokens=...)"
        )


def _check_options(options: AttentionOptions, query: Tensor) -> None:
    """Check the options with one number per head against the heads, and the device, of a query."""
    if not isinstance(options, AttentionOptions):
        raise ValueError(f"options: expected AttentionOptions, got {describe(options)}")
    for name in ("alibi_slopes", "sinks"):
        numbers = getattr(options, name)
        if numbers is not None:
            if numbers.shape[0] != query.shape[1]:
                raise ValueError(f"{name}: expected floating point [h={query.shape[1]}], got {describe(numbers)}")
            same_device(query=query, **{name: numbers})


def _check_result(query: Tensor, value_head_size: int, out: Tensor | None, return_lse: bool) -> None:
    """Check where an answer is to go."""
    check_flag("return_lse", return_lse)
    if out is not None:
        expect(out, "out", query.dtype, ("t", "h", "dv"), (*query.shape[:2], value_head_size))
        same_device(query=query, out=out)
        check_own_memory("out", out)
        if out.requires_grad and torch.is_grad_enabled():
            raise ValueError("out: expected memory that requires no gradient, got some that does")
