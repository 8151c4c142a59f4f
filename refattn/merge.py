"""Merge partial answers: two softmaxes over disjoint keys combine, exactly, by their log-sum-exp.

keys            1 2 3 | 4 5
partial answer    A       B         each with its own LSE
whole answer      (exp(lse_A) * A + exp(lse_B) * B) / (exp(lse_A) + exp(lse_B))
"""

from collections.abc import Sequence

import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor

from refattn.checks_of_calls import check_partials, check_sinks
from refattn.modes import compute_dtype, without_autocast


@without_autocast
def merge(
    outs: Sequence[Float[Tensor, "t h dv"]], lses: Sequence[Float[Tensor, "t h"]]
) -> tuple[Float[Tensor, "t h dv"], Float[Tensor, "t h"]]:
    """Combine the answers of the same queries over disjoint sets of keys into the answer over all of them.

        lse = log(sum_i exp(lse_i))
        out = sum_i exp(lse_i - lse) * out_i

    A part in which a query sees no key has an LSE of `-inf` and no weight, whatever its output holds. A query that sees
    no key in any part returns 0 and `-inf` again. Outputs and log-sum-exps may require gradients.

    Args:
        outs: the partial outputs, one tensor per part; all of one shape and type.
        lses: their log-sum-exps: natural log, float32 or float64, without sinks (see `add_sinks`).

    Returns:
        The output in the type of the first part, and its log-sum-exp in the type of theirs; both are computed in
        float64 if one of them is float64.

    Raises:
        ValueError: if there is no part, or the parts differ in number, shape or device.

    Source: Milakov and Gimelshein 2018, "Online normalizer calculation for softmax"; Ye et al. 2025, "FlashInfer".
    """
    check_partials(outs, lses)
    compute = torch.float64 if lses[0].dtype == torch.float64 else compute_dtype(outs[0].dtype)
    lse_parts = torch.stack([lse.to(compute) for lse in lses])  # [parts, t, h]
    sees_nothing = lse_parts.amax(0) == -torch.inf  # [t, h], in any part: there -inf - -inf would be NaN
    total = lse_parts.masked_fill(sees_nothing, 0.0).logsumexp(0)
    out = torch.zeros_like(outs[0], dtype=compute)
    for part_out, part_lse in zip(outs, lse_parts, strict=True):
        saw_nothing = rearrange(part_lse == -torch.inf, "t h -> t h 1")
        weight = rearrange(torch.exp(part_lse - total), "t h -> t h 1")
        out = out + weight * part_out.to(compute).masked_fill(saw_nothing, 0.0)
    lse = total.masked_fill(sees_nothing, -torch.inf)
    return out.to(outs[0].dtype), lse.to(lses[0].dtype)


def add_sinks(
    out: Float[Tensor, "t h dv"], lse: Float[Tensor, "t h"], sinks: Float[Tensor, "h"]
) -> tuple[Float[Tensor, "t h dv"], Float[Tensor, "t h"]]:
    """Add sinks to the softmax of answers that were computed without them.

    A sink is one more logit in the denominator: a part that holds no value. Adding it after the merge counts it once,
    however the keys were split.

    Args:
        out: the outputs over all keys.
        lse: their log-sum-exps, natural log.
        sinks: one logit per head.

    Returns:
        The smaller outputs and the log-sum-exps with the sinks included, in the types of `out` and `lse`.

    Raises:
        ValueError: if the shapes or devices do not match.
    """
    check_sinks(out, lse, sinks)
    lse_of_sinks = sinks.to(lse.dtype).expand_as(lse)
    return merge([out, torch.zeros_like(out)], [lse, lse_of_sinks])
