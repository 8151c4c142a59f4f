"""Merge partial answers in one pass over their outputs; the twin of `refattn.merge`."""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from fastattn.kernels.machine import runs_triton
from refattn.batch import check_options, check_partials


def merge(
    outs: Sequence[Float[Tensor, "t h dv"]], lses: Sequence[Float[Tensor, "t h"]]
) -> tuple[Float[Tensor, "t h dv"], Float[Tensor, "t h"]]:
    """Combine the answers of the same queries over disjoint sets of keys into the answer over all of them.

    Args:
        outs: the partial outputs, one tensor a part; all of one shape and type.
        lses: their log-sum-exps: natural log, float32 or float64, without sinks (see `add_sinks`).

    Returns:
        The output in the type of the first part, and its log-sum-exp. Where no part saw anything: 0 and `-inf`.

    Raises:
        ValueError: if there is no part, or the parts differ in number, shape or device.

    Source: `refattn.merge.merge`.
    """
    check_partials(outs, lses)
    if lses[0].dtype == torch.float32 and runs_triton(outs[0].device):
        from fastattn.kernels.triton_merge import merge_states

        return merge_states(outs, lses)
    lse = lses[0]
    for part_lse in lses[1:]:
        lse = _log_add_exp(lse, part_lse)
    total: Tensor | None = None
    for part_out, part_lse in zip(outs, lses, strict=True):
        # The output of a part that saw nothing may hold anything, NaN too, and 0 * NaN is NaN.
        part = part_out * torch.exp(part_lse - lse)[..., None]
        part.masked_fill_((part_lse == -torch.inf)[..., None], 0.0)
        total = part if total is None else total.add_(part)
    assert total is not None
    return total.to(outs[0].dtype), lse


def add_sinks(
    out: Float[Tensor, "t h dv"], lse: Float[Tensor, "t h"], sinks: Float[Tensor, "h"]
) -> tuple[Float[Tensor, "t h dv"], Float[Tensor, "t h"]]:
    """Give the sinks their share of answers that were computed without them.

    Args:
        out: the outputs over all keys.
        lse: their log-sum-exps, natural log.
        sinks: one logit a head.

    Returns:
        The smaller outputs, in the type of `out`, and the log-sum-exps with the sinks included.

    Raises:
        ValueError: if the shapes or devices do not match.

    Source: `refattn.merge.add_sinks`.
    """
    check_partials([out], [lse])
    check_options(out, sinks=sinks)
    sinks = sinks.to(lse.dtype)
    share = torch.exp(sinks - lse).add_(1.0).reciprocal_()[..., None]  # exp(lse) / (exp(lse) + exp(sink))
    out = (out * share).masked_fill_((lse == -torch.inf)[..., None], 0.0).to(out.dtype)
    return out, _log_add_exp(lse, sinks.expand_as(lse))


def _log_add_exp(first: Float[Tensor, "t h"], second: Float[Tensor, "t h"]) -> Float[Tensor, "t h"]:
    """Return `log(exp(first) + exp(second))`, with the same bits wherever in the tensors the numbers stand.

    `torch.logaddexp` and `torch.sigmoid` compute what is left behind the last whole vector in another way.
    """
    gap = (first - second).abs_().masked_fill_(first == second, 0.0)  # two infinities have none
    return torch.maximum(first, second) + gap.neg_().exp_().log1p_()
