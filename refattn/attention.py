"""The one formula and the one loop: softmax attention of queries over keys under a boolean mask.

attend              the formula, for one sequence
attend_one_by_one   the same one query at a time: a row's bits depend only on the keys that it sees
attend_sequences    the formula for each sequence of a plan, under its mask
attend_plan         the same for each level of a plan and any storage of keys; merges the outputs of levels
attend_to           a call of a path: check the arguments, run attend_plan, cast and return
"""

from collections.abc import Iterable
from typing import Any

import torch
from einops import einsum, rearrange, repeat
from jaxtyping import Bool, Float
from torch import Tensor

from refattn import masks
from refattn.keys import Keys, read, read_query
from refattn.merge import merge
from refattn.modes import compute_dtype, without_autocast
from refattn.options import AttentionOptions
from refattn.plan import CascadePlan, Plan
from refattn.scales import type_of_outputs
from refattn.trees import TreePlan


@without_autocast
def attend(
    query: Float[Tensor, "t h d"],
    key: Float[Tensor, "s hk d"],
    value: Float[Tensor, "s hk dv"],
    visible: Bool[Tensor, "t s"],
    *,
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    bias: Float[Tensor, "h t s"] | None = None,
    sinks: Float[Tensor, "h"] | None = None,
) -> tuple[Float[Tensor, "t h dv"], Float[Tensor, "t h"]]:
    """Attend from every query to its visible keys.

    For a query `i` of head `h`, over the keys `j` with `visible[i, j]`:

        score[j] = softmax_scale * query[i, h] . key[j, h // g]
        score[j] = softcap * tanh(score[j] / softcap)              if softcap
        score[j] = score[j] + bias[h, i, j]                        if bias
        lse      = log(sum_j exp(score[j]) + exp(sinks[h]))        the sink only if given
        out      = sum_j exp(score[j] - lse) * value[j, h // g]

    The order matters: the cap and the bias come before the mask, so neither can make a hidden key visible again. A
    fully masked query returns 0 with an LSE of `-inf` (with a sink: 0, and the sink as its LSE). A key that no query
    sees may hold anything, NaN included; a visible NaN gives NaN. Every tensor may require a gradient. The gradients of
    keys that no query sees and of fully masked queries are 0, whatever these hold.

    Args:
        query: the new tokens.
        key: the keys of one sequence; query head `h` reads KV head `h // g`, with `g = h // hk` heads per group.
        value: the values of the keys; the head size may differ from that of the keys.
        visible: the mask, true where query `t` may see key `s`.
        softmax_scale: factor on the dot products; `d ** -0.5` if None.
        softcap: bound on the scores, in units of the scaled score; 0 for no bound.
        bias: added to the scaled, capped scores (ALiBi).
        sinks: one extra logit per head, in the denominator of the softmax only.

    Returns:
        The outputs in the type of `query`, and the log-sum-exp of each row: natural log, float32 (float64 for float64
        queries), the sink included.

    Source: Vaswani et al. 2017, "Attention Is All You Need"; grouped heads: Ainslie et al. 2023, "GQA"; sinks:
        OpenAI 2025, gpt-oss.
    """
    compute = compute_dtype(query.dtype)
    group = query.shape[1] // key.shape[1]
    scale = query.shape[2] ** -0.5 if softmax_scale is None else softmax_scale
    is_unseen, sees_nothing = (rearrange(~visible.any(i), "rows -> rows 1 1") for i in (0, 1))
    q = query.to(compute).masked_fill(sees_nothing, 0.0)  # masked rows may hold NaN, and 0 * NaN is NaN,
    k = key.to(compute).masked_fill(is_unseen, 0.0)  # in the outputs and in the gradients of other rows
    v = value.to(compute).masked_fill(is_unseen, 0.0)
    k, v = (repeat(x, "s hk size -> s (hk g) size", g=group) for x in (k, v))

    scores = einsum(q * scale, k, "t h d, s h d -> h t s")
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    if bias is not None:
        scores = scores + bias.to(compute)
    scores = scores.masked_fill(~visible, -torch.inf)

    lse = scores.logsumexp(-1)  # [h, t], -inf for a fully masked query
    if sinks is not None:
        lse = torch.logaddexp(lse, repeat(sinks.to(compute), "h -> h t", t=lse.shape[1]))
    weights = torch.exp(scores - lse[..., None]).masked_fill(~visible, 0.0)  # the fill turns -inf - -inf into 0
    out = einsum(weights, v, "h t s, s h dv -> t h dv")
    return out.to(query.dtype), lse.T


def attend_one_by_one(
    query: Float[Tensor, "t h d"],
    key: Float[Tensor, "s hk d"],
    value: Float[Tensor, "s hk dv"],
    visible: Bool[Tensor, "t s"],
    *,
    bias: Float[Tensor, "h t s"] | None,
    **options: Any,
) -> tuple[Float[Tensor, "t h dv"], Float[Tensor, "t h"]]:
    """Attend one query at a time, over copies of its visible keys only (`batch_invariant`).

    The last bits of a matrix product depend on its shape and on the memory layout. Here both depend only on the keys
    that the query sees, not on other rows or hidden keys. Arguments as in `attend`.
    """
    out = query.new_zeros(*query.shape[:2], value.shape[2])
    lse = query.new_zeros(query.shape[:2], dtype=compute_dtype(query.dtype))
    for i, sees in enumerate(visible):
        its_bias = None if bias is None else bias[:, i : i + 1, sees]
        everything = torch.ones(1, int(sees.sum()), dtype=torch.bool, device=query.device)
        row = attend(query[i : i + 1], key[sees], value[sees], everything, bias=its_bias, **options)
        out[i : i + 1], lse[i : i + 1] = row
    return out, lse


def attend_plan(
    query: Float[Tensor, "t h d"], keys: Keys, plan: Plan | CascadePlan | TreePlan, options: AttentionOptions
) -> tuple[Float[Tensor, "t h dv"], Float[Tensor, "t h"]]:
    """Attend level by level and merge: where the keys are, who may see whom, how partial outputs combine.

    Args:
        query: query rows of all sequences, one after the other; rows after the last sequence are padding.
        keys: the storage of the keys and values.
        plan: the rows and keys of each sequence, and the mask; one level or several.
        options: the layer's options. Sinks count once, in the last level.

    Returns:
        As `attend_sequences`.
    """
    parts = []
    for level in plan.levels:
        its_options = options if level is plan.levels[-1] else options.without_sinks()
        queries, sequences = read_query(query, keys, level), read(query, keys, level)
        parts.append(attend_sequences(queries, sequences, level, its_options, value_head_size=keys.value_head_size))
    return parts[0] if len(parts) == 1 else merge(*zip(*parts, strict=True))


def attend_sequences(
    query: Float[Tensor, "t h d"],
    sequences: Iterable[tuple[Float[Tensor, "_ hk d"], Float[Tensor, "_ hk dv"]]],
    plan: Plan | TreePlan,
    options: AttentionOptions,
    *,
    value_head_size: int,
) -> tuple[Float[Tensor, "t h dv"], Float[Tensor, "t h"]]:
    """Attend from the query rows of each sequence of a plan to its keys, as the plan's mask allows.

    Args:
        query: query rows of all sequences, one after the other; rows after the last sequence are padding.
        sequences: the keys and the values of each sequence of the plan, in order.
        plan: the rows and keys of each sequence, and the mask; one level.
        options: scale, softcap, slopes, sinks.
        value_head_size: elements of a value, `dv`.

    Returns:
        The outputs in the compute type, so that partial outputs merge without rounding in between, and the
        log-sum-exps. Padding rows are 0 and `-inf`.
    """
    compute, formula = compute_dtype(query.dtype), attend_one_by_one if options.batch_invariant else attend
    out = query.new_zeros(*query.shape[:2], value_head_size, dtype=compute)
    lse = query.new_full(query.shape[:2], -torch.inf, dtype=torch.promote_types(compute, torch.float32))
    for i, ((q0, q1), (key, value)) in enumerate(zip(plan.batch.query_rows(), sequences, strict=True)):
        if q0 == q1:
            continue  # a sequence without queries may have no keys in memory
        out[q0:q1], lse[q0:q1] = formula(
            query[q0:q1].to(compute),
            key,
            value,
            masks.visible(plan, i),
            bias=masks.bias(plan, i, options, compute),
            **of_layer(options),
        )
    return out, lse


def of_layer(options: AttentionOptions) -> dict[str, Any]:
    """Return the options that `attend` takes directly; the bias also depends on positions."""
    return dict(
        softmax_scale=options.softmax_scale,
        softcap=options.softcap,
        sinks=options.sinks,
    )


def attend_to(
    query: Float[Tensor, "t h d"],
    keys: Keys,
    plan: Plan | CascadePlan | TreePlan,
    options: AttentionOptions,
    *,
    return_lse: bool,
    out: Float[Tensor, "t h dv"] | None,
) -> Float[Tensor, "t h dv"] | tuple[Float[Tensor, "t h dv"], Float[Tensor, "t h"]]:
    """Check the arguments of a path, attend under its plan, and return the result in the form that all paths share.

    Arguments as in the path.

    Raises:
        ValueError: naming the argument that does not fit. Nothing is written then.
    """
    keys.check(query, plan, options, out, return_lse)
    result, lse = attend_plan(query, keys, plan, options)
    return finish(result, lse, type_of_outputs(query, out), return_lse=return_lse, out=out)


def finish(
    result: Float[Tensor, "t h dv"],
    lse: Float[Tensor, "t h"],
    dtype: torch.dtype,
    *,
    return_lse: bool,
    out: Float[Tensor, "t h dv"] | None,
) -> Float[Tensor, "t h dv"] | tuple[Float[Tensor, "t h dv"], Float[Tensor, "t h"]]:
    """Return the result in the type of the query, written into `out` if given, with the LSE if requested."""
    out = result.to(dtype) if out is None else out.copy_(result)
    return (out, lse) if return_lse else out
