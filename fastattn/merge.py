"""Merge partial answers in one pass over their outputs; the twin of `refattn.merge`."""

from collections.abc import Sequence

from jaxtyping import Float
from torch import Tensor

from fastattn.kernels import dispatch
from refattn.interface.checks import check_partials, check_sinks


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
    return dispatch.merge(outs, lses)


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
    check_sinks(out, sinks)
    return dispatch.add_sinks(out, lse, sinks)
