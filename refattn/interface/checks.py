"""Checks of calls that are more, or less, than attention to one storage: latents and ranks, merges, pairs."""

from collections.abc import Sequence

import torch
from torch import Tensor

from refattn.interface.call import check_options, check_pool, check_positions, check_query, check_result, num_seqs_of
from refattn.interface.keys import Rows, check_cache_scale, check_latents, check_scale_is_given
from refattn.interface.options import AttentionOptions
from refattn.interface.packed import check_packed, is_packed
from refattn.interface.parallel import Group
from refattn.interface.plan import ContextParallelPlan, PrefillPlan
from refattn.interface.scales import Fp8Scales, Int8Scales, check_scales, stored_types
from refattn.interface.values import check_floating, check_number, check_per_head, describe, expect, same_device


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
    t, h, d = check_query(query)
    kinds = (query.dtype, query.dtype) if scales is None else stored_types(key_cache, value_cache, scales)
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
    Rows(key[:, own], value[:, own]).check(query, plan.own, options, out, return_lse)
    check_pool("key_cache", key_cache, plan.context)
    if scales is not None:
        check_scales(scales, key_cache, value_cache, *num_seqs_of(plan.context))
    return own


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
    t, h, size = check_query(query)
    _, rank = expect(latent, "latent", query.dtype, ("t", "r"), (t, None))
    _, rope = expect(rope_key, "rope_key", query.dtype, ("t", "rope"), (t, None))
    expect(key_projection, "key_projection", query.dtype, ("h", "nope", "r"), (h, size - rope, rank))
    expect(value_projection, "value_projection", query.dtype, ("h", "dv", "r"), (h, None, rank))
    if is_packed(cache):
        check_packed(cache, rank, rope)
        check_cache_scale(cache, cache_scale)
    else:
        check_latents(cache, query, rank + rope, cache_scale)
    check_scale_is_given(options)
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
    check_options(options, query)
    for chunk in plan.chunks:
        check_positions(chunk.plan, options)
    check_result(query, value_projection.shape[1], out, return_lse)


def check_projection(x: Tensor, name: str, projection: Tensor, projection_name: str, dims: tuple[str, ...]) -> None:
    """Check queries `[t, h, nope + rope]` for `[h, nope, r]`, or latents `[t, h, r]` for `[h, dv, r]`.

    Raises:
        ValueError: naming the argument, what was expected and what came.
    """
    _, h, size = check_query(x) if name == "query" else expect(x, name, None, ("t", "h", "r"), (None, None, None))
    check_floating(name, x)
    rank = None if name == "query" else size
    _, inner, _ = expect(projection, projection_name, x.dtype, dims, (h, None, rank))
    if name == "query" and inner > size:
        raise ValueError(f"{projection_name}: expected at most the {size} elements of a query, got nope={inner}")
    same_device(**{name: x, projection_name: projection})


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


def check_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> None:
    """Check sinks `[h]` that are to be added to outputs `[t, h, dv]` and their log-sum-exps `[t, h]`.

    Raises:
        ValueError: naming the argument, what was expected and what came.
    """
    t, h, _ = expect(out, "out", None, ("t", "h", "dv"), (None, None, None))
    check_floating("out", out)
    expect(lse, "lse", None, ("t", "h"), (t, h))
    if lse.dtype not in (torch.float32, torch.float64):
        raise ValueError(f"lse: expected float32 or float64, got {describe(lse)}")
    check_per_head("sinks", sinks, h)
    same_device(out=out, lse=lse, sinks=sinks)
