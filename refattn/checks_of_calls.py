"""Checks of attention calls: a query against a plan and its storage, latents and ranks, merges, differential heads.

They run in every layer, so they never read a tensor on a device. The checks of each storage are in `refattn.keys`.
"""

from collections.abc import Sequence

import torch
from jaxtyping import Int32
from torch import Tensor

from refattn.checks import (
    Declared,
    check,
    check_number,
    check_per_head,
    check_query,
    check_result,
    describe,
    same_device,
)
from refattn.modes import refuse_gradients
from refattn.options import PER_HEAD, AttentionOptions
from refattn.packed_latents import check_packed, is_packed
from refattn.plan import CascadePlan, ContextParallelPlan, Plan, PrefillPlan
from refattn.ranks import Group
from refattn.scales import (
    FP8_FORMATS,
    ROUNDING,
    Fp8Scales,
    Int8Scales,
    _refuse_int8,
    check_cache_scale,
    check_scales,
    stored_types,
)
from refattn.trees import AttentionPlan, TreePlan


def check_plan(plan: object, *kinds: type, source: str = "") -> None:
    """Check that a plan is of one of the given kinds; by default, of any kind.

    Raises:
        ValueError: naming the kinds, and the function that makes such plans.
    """
    kinds = kinds or (Plan, CascadePlan, TreePlan)
    if not isinstance(plan, kinds):
        *some, last = (f"a {kind.__name__}" for kind in kinds)
        named = f"{', '.join(some)} or {last}" if some else last
        raise ValueError(f"plan: expected {named}{source and f', from {source}'}, got {describe(plan)}")


def check_tokens(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    names: tuple[str, str],
    rows: str,
    plan: Plan,
    options: AttentionOptions,
    types: tuple[torch.dtype, torch.dtype] | None = None,
) -> None:
    """Check a query against keys and values with row dimensions `rows`, the plan and the options."""
    check_query(query)
    key_type, value_type = types or (query.dtype, query.dtype)
    if not isinstance(plan, Plan):
        raise ValueError(f"plan: expected a Plan, got {describe(plan)}")
    parts = {names[0]: (key, f"{rows} hk d", key_type), names[1]: (value, f"{rows} hk dv", value_type)}
    sizes = check(query=(query, "t h d"), **parts)
    if plan.batch.seq_lens.device != query.device:
        same_device(query=query, seq_lens=plan.batch.seq_lens)
    h, hk = sizes["h"], sizes["hk"]
    if not sizes["dv"]:
        raise ValueError(f"{names[1]}: expected a head size of at least 1, got {describe(value)}")
    if not hk or h % hk:
        raise ValueError(f"query: expected a number of heads that hk={hk} divides, got h={h}")
    check_options(options, query)
    if plan.needs is not None and plan.needs.query_rows > query.shape[0]:
        raise ValueError(
            f"query: expected at least {plan.needs.query_rows} rows, where cu_seqlens_q ends, got t={query.shape[0]}"
        )


def check_rows(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    plan: AttentionPlan,
    options: AttentionOptions,
    out: Tensor | None,
    return_lse: bool,
    *,
    name: str = "key",
) -> None:
    """Check a call over rows of keys and values, without a cache; `name` is the name of the rows in errors."""
    check_plan(plan, Plan)
    assert isinstance(plan, Plan)
    check_tokens(query, key, value, ("key", "value"), "s", plan, options)
    if plan.block_size is not None:
        raise ValueError(f"plan: expected one over rows, from varlen.plan, got blocks of {plan.block_size} tokens")
    check_result(query, value.shape[-1], out, return_lse)
    if plan.needs is not None and plan.needs.key_rows > key.shape[0]:
        raise ValueError(
            f"{name}: expected at least the {plan.needs.key_rows} rows that seq_lens adds up to, got {key.shape[0]}"
        )


def check_pool(name: str, pool: Tensor, plan: Plan) -> Int32[Tensor, "b m"]:
    """Check the block size and the number of blocks of a pool against a plan, and return the block table."""
    num_blocks, block_size = pool.shape[:2]
    if plan.block_size is None:
        raise ValueError("plan: expected one over pages, with a block size, got one over rows, from varlen.plan")
    if plan.block_size != block_size:
        raise ValueError(f"{name}: expected blocks of {plan.block_size} tokens, as in the plan, got p={block_size}")
    if plan.needs is not None and plan.needs.blocks > num_blocks:
        raise ValueError(
            f"{name}: expected at least {plan.needs.blocks} blocks, as the block table leads to block "
            f"{plan.needs.blocks - 1}, got n={num_blocks}"
        )
    assert plan.batch.block_table is not None  # a plan with a block size has one
    return plan.batch.block_table


def check_levels(name: str, pool: Tensor, plan: AttentionPlan, options: AttentionOptions) -> None:
    """Check the shared levels of a cascade: their blocks, and for ALiBi that they have positions."""
    for level in plan.levels[:-1]:
        check_pool(name, pool, level.own)
        check_positions(level.own, options)


def check_positions(plan: Plan, options: AttentionOptions) -> None:
    """Check that a plan has query positions if there is ALiBi; for plans whose queries are not the last tokens."""
    if options.alibi_slopes is not None and plan.positions is None:
        raise ValueError(
            "alibi_slopes: expected a plan that knows the positions of its queries, got one of a batch that does not "
            "say num_tokens, the number of its query rows; make the plan of dataclasses.replace(batch, num_tokens=...)"
        )


def check_options(options: AttentionOptions, query: Tensor) -> None:
    """Check the options with one element per head against the heads and the device of a query."""
    if not isinstance(options, AttentionOptions):
        raise ValueError(f"options: expected AttentionOptions, got {describe(options)}")
    for name in PER_HEAD:
        numbers = getattr(options, name)
        if numbers is not None:
            if numbers.shape[0] != query.shape[1]:
                raise ValueError(f"{name}: expected floating point [h={query.shape[1]}], got {describe(numbers)}")
            same_device(query=query, **{name: numbers})


def check_scale_is_given(options: AttentionOptions) -> None:
    """Check that options have a `softmax_scale`, which does not follow from the size of latents."""
    if isinstance(options, AttentionOptions) and options.softmax_scale is None:
        raise ValueError(
            "softmax_scale: expected a number, as the head size before absorption is unknown here, got None"
        )


def num_seqs_of(plan: Plan) -> tuple[int | None, bool]:
    """Return the number of sequences of a plan's batch, None if unknown; and whether that is a lower bound."""
    if plan.sequences is None:
        return plan.batch.num_seqs, False
    is_known = plan.sequences.is_cpu and plan.sequences.numel()
    return int(plan.sequences.max()) + 1 if is_known else None, True


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

    With scales the caches hold quantized values; new keys and values have the type of the query.

    Returns:
        The KV heads that the rank's query heads read.

    Raises:
        ValueError: naming the argument, what was expected and what was given.
    """
    check_query(query)
    kinds = (query.dtype, query.dtype) if scales is None else stored_types(key_cache, value_cache, scales)
    sizes = check(
        query=(query, "t h d"),
        key_cache=(key_cache, "n p hk d", kinds[0]),
        value_cache=(value_cache, "n p hk dv", kinds[1]),
        key=(key, "query: t hk d"),
        value=(value, "query: t hk dv"),
    )
    if not isinstance(plan, ContextParallelPlan):
        raise ValueError(f"plan: expected a ContextParallelPlan, got {describe(plan)}")
    if not isinstance(group, Group) or (group.rank, group.size) != (plan.shard.rank, plan.shard.num_ranks):
        came = f"rank {group.rank} of {group.size}" if isinstance(group, Group) else describe(group)
        raise ValueError(
            f"group: expected rank {plan.shard.rank} of {plan.shard.num_ranks}, as in the plan, got {came}"
        )
    h, hk = sizes["h"], sizes["hk"]
    heads = h * group.size
    per_key = heads // hk if hk and heads % hk == 0 else 0
    if not per_key or (h % per_key and per_key % h):
        raise ValueError(
            f"query: expected heads of each of {group.size} ranks that read whole KV heads of hk={hk}, or a part of "
            f"one, got h={h}"
        )
    first = group.rank * h // per_key
    own = slice(first, first + max(1, h // per_key))
    check_rows(query, key[:, own], value[:, own], plan.own, options, out, return_lse)
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

    The projections are `[h, nope, r]` and `[h, dv, r]`; the cache is checked as by `check_latents`, or is packed.

    Raises:
        ValueError: naming the argument, what was expected and what was given.
    """
    t, _, size = check_query(query)
    sizes = check(query=(query, "t h d"), latent=(latent, "query: t r"), rope_key=(rope_key, "query: t rope"))
    rank, rope = sizes["r"], sizes["rope"]
    check(
        {**sizes, "nope": size - rope},
        query=(query, "t h d"),
        key_projection=(key_projection, "query: h nope r"),
        value_projection=(value_projection, "query: h dv r"),
    )
    if is_packed(cache):
        check_packed(cache, rank, rope)
        check_cache_scale(cache, cache_scale)
    else:
        check_latents(cache, query, rank + rope, cache_scale)
    check_scale_is_given(options)
    same_device(query=query, cache=cache)
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


def check_projection(x: Tensor, name: str, projection: Tensor, projection_name: str, dims: str) -> None:
    """Check queries `[t, h, nope + rope]` for `[h, nope, r]`, or latents `[t, h, r]` for `[h, dv, r]`.

    Raises:
        ValueError: naming the argument, what was expected and what was given.
    """
    if name == "query":
        check_query(x)
    sizes = check(
        **{
            name: (x, "float t h d" if name == "query" else "float t h r"),
            projection_name: (projection, f"{name}: {dims}"),
        }
    )
    if name == "query" and sizes["nope"] > sizes["d"]:
        raise ValueError(
            f"{projection_name}: expected at most the {sizes['d']} elements of a query, got nope={sizes['nope']}"
        )


def check_lambdas(lambda_init: float, **vectors: Tensor) -> None:
    """Check the learned vectors `[d]` of the weight of differential attention's second softmax.

    Raises:
        ValueError: naming the argument, what was expected and what was given.
    """
    (first, one), *others = vectors.items()
    check(**{first: (one, "float d"), **{name: (vector, f"{first}: d") for name, vector in others}})
    check_number("lambda_init", lambda_init)


def check_halves(heads: Tensor) -> None:
    """Check heads `[t, h, d]` to be paired, the first half with the second.

    Raises:
        ValueError: if they have another shape, or their number is odd.
    """
    if check(heads=(heads, "t h d"))["h"] % 2:
        raise ValueError(f"heads: expected an even number of heads, got h={heads.shape[1]}")


def check_rows_of_pairs(key: Tensor, value: Tensor) -> None:
    """Check keys and values `[s, hk, d]` to be split into the halves of their pairs.

    Raises:
        ValueError: naming the argument, what was expected and what was given.
    """
    hk = check(key=(key, "s hk d"), value=(value, "key: s hk d"))["hk"]
    if hk % 2:
        raise ValueError(f"key: expected pairs of heads, an even number, got hk={hk}")


def check_partials(outs: Sequence[Tensor], lses: Sequence[Tensor]) -> None:
    """Check the parts of a merge: outputs `[t, h, dv]` of one shape and type, each with log-sum-exps `[t, h]`.

    Raises:
        ValueError: naming the part, what was expected and what was given.
    """
    for name, parts in (("outs", outs), ("lses", lses)):
        if not isinstance(parts, (list, tuple)):
            raise ValueError(f"{name}: expected a list of tensors, one for each part, got {describe(parts)}")
    if not outs or len(outs) != len(lses):
        raise ValueError(f"lses: expected one for each output, and at least one, got {len(lses)} for {len(outs)}")
    check(**{"outs[0]": (outs[0], "float t h dv")})
    lse_dtype = lses[0].dtype if isinstance(lses[0], Tensor) else None
    for i, (out, lse) in enumerate(zip(outs, lses, strict=True)):
        part: dict[str, Declared] = {
            f"outs[{i}]": (out, "t h dv", outs[0].dtype),
            f"lses[{i}]": (lse, "t h", lse_dtype),
        }
        check(**{"outs[0]": (outs[0], "t h dv"), **part})
        if lse.dtype not in (torch.float32, torch.float64):
            raise ValueError(f"lses[{i}]: expected float32 or float64, got {describe(lse)}")


def check_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> None:
    """Check sinks `[h]` to be added to outputs `[t, h, dv]` and their log-sum-exps `[t, h]`.

    Raises:
        ValueError: naming the argument, what was expected and what was given.
    """
    h = check(out=(out, "float t h dv"), lse=(lse, "t h"))["h"]
    if lse.dtype not in (torch.float32, torch.float64):
        raise ValueError(f"lse: expected float32 or float64, got {describe(lse)}")
    check_per_head("sinks", sinks, h)
    same_device(out=out, lse=lse, sinks=sinks)


def check_latents(cache: Tensor, query: Tensor, size: int, cache_scale: float) -> None:
    """Check a cache `[n, p, c]` of latents, with rows of at least `size` elements, and its scale."""
    _refuse_int8(cache)
    holds_fp8 = isinstance(cache, Tensor) and cache.dtype in FP8_FORMATS
    check(cache=(cache, "n p c", None if holds_fp8 else query.dtype))
    if cache.shape[2] < size:
        raise ValueError(f"cache: expected rows of at least r + rope = {size} elements, got c={cache.shape[2]}")
    if holds_fp8:
        refuse_gradients(ROUNDING, cache=cache)
    check_cache_scale(cache, cache_scale)
