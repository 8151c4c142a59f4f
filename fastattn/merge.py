"""Merge partial answers in one pass over their outputs; the twin of `refattn.merge`."""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from fastattn.kernels import dispatch
from refattn.interface.checks import check_partials, check_sinks


def merge(
    outs: Sequence[Float[Tensor, "t h dv"]], lses: Sequence[Float[Tensor, "t h"]]
) -> tuple[Float[Tensor, "t h dv"], Float[Tensor, "t h"]]:
    """Combine the answers of the same queries over disjoint sets of keys into the answer over all of them.

    Args:
        outs: the partial outputs, one tensor per part; all of one shape and type.
        lses: their log-sum-exps: natural log, float32 or float64, without sinks (see `add_sinks`).

    Returns:
        The output in the type of the first part, and its log-sum-exp in the type of theirs; both are computed in
        float64 if one of them is float64. Where no part saw anything: 0 and `-inf`.

    Raises:
        ValueError: if there is no part, or the parts differ in number, shape or device.

    Source: `refattn.merge.merge`.
    """
    check_partials(outs, lses)
    wider = torch.promote_types(outs[0].dtype, lses[0].dtype)
    out, lse = dispatch.merge(outs, [part.to(wider) for part in lses])
    return out, lse.to(lses[0].dtype)


def add_sinks(
    out: Float[Tensor, "t h dv"], lse: Float[Tensor, "t h"], sinks: Float[Tensor, "h"]
) -> tuple[Float[Tensor, "t h dv"], Float[Tensor, "t h"]]:
    """Add sinks to the softmax of answers that were computed without them.

    Args:
        out: the outputs over all keys.
        lse: their log-sum-exps, natural log.
        sinks: one logit per head.

    Returns:
        The smaller outputs and the log-sum-exps with the sinks included, in the types of `out` and `lse`.

    Raises:
        ValueError: if the shapes or devices do not match.

    Source: `refattn.merge.add_sinks`.
    """
    check_partials([out], [lse])
    check_sinks(out, sinks)
    share, total = dispatch.add_sinks(out, lse.to(torch.promote_types(out.dtype, lse.dtype)), sinks)
    return share, total.to(lse.dtype)
