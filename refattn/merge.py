"""Merge partial outputs: softmaxes over disjoint keys combine exactly by their log-sum-exps.

keys            1 2 3 | 4 5
partial output    A       B         each with its own LSE
full output       (exp(lse_A) * A + exp(lse_B) * B) / (exp(lse_A) + exp(lse_B))
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
    """Combine the outputs of the same queries over disjoint sets of keys into the output over all of them.

        lse = log(sum_i exp(lse_i))
        out = sum_i exp(lse_i - lse) * out_i

    A part in which a query is fully masked has an LSE of `-inf` and no weight, whatever its output holds. A query that
    is fully masked in every part returns 0 and `-inf`. Outputs and log-sum-exps may require gradients.

    Args:
        outs: the partial outputs, one tensor per part; all of one shape and type.
        lses: their natural log-sum-exps, float32 or float64, without sinks (see `add_sinks`).

    Returns:
        The output in the type of `outs`, and the log-sum-exp in the type of `lses`; both are computed in float64 if
        either type is float64.

    Raises:
        ValueError: if there is no part, or the parts differ in number, shape, type or device.

    Source: Milakov and Gimelshein 2018, "Online normalizer calculation for softmax"; Ye et al. 2025, "FlashInfer".
    """
    check_partials(outs, lses)
    compute = torch.float64 if lses[0].dtype == torch.float64 else compute_dtype(outs[0].dtype)
    lse_parts = torch.stack([lse.to(compute) for lse in lses])  # [parts, t, h]
    sees_nothing = lse_parts.amax(0) == -torch.inf  # [t, h], fully masked in all parts: -inf - -inf would be NaN
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
    """Add sinks to outputs that were computed without them.

    A sink is one more logit in the denominator, like a part with zero values. Added after the merge, it counts once,
    however the keys were split.

    Args:
        out: the outputs over all keys.
        lse: their natural log-sum-exps.
        sinks: one logit per head.

    Returns:
        The scaled outputs, and the log-sum-exps with the sinks included, in the types of `out` and `lse`.

    Raises:
        ValueError: if the shapes or devices do not match.
    """
    check_sinks(out, lse, sinks)
    lse_of_sinks = sinks.to(lse.dtype).expand_as(lse)
    return merge([out, torch.zeros_like(out)], [lse, lse_of_sinks])
