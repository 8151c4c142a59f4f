"""Merge partial outputs in one pass over them; the twin of `refattn.merge`."""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from fastattn import dispatch
from refattn.checks_of_calls import check_partials, check_sinks


def merge(
    outs: Sequence[Float[Tensor, "t h dv"]], lses: Sequence[Float[Tensor, "t h"]]
) -> tuple[Float[Tensor, "t h dv"], Float[Tensor, "t h"]]:
    """Combine the outputs of the same queries over disjoint sets of keys into the output over all of them.

    Arguments, results and errors are those of `refattn.merge.merge`.
    """
    check_partials(outs, lses)
    wider = torch.promote_types(outs[0].dtype, lses[0].dtype)
    out, lse = dispatch.run("merge", outs=outs, lses=[part.to(wider) for part in lses])
    return out, lse.to(lses[0].dtype)


def add_sinks(
    out: Float[Tensor, "t h dv"], lse: Float[Tensor, "t h"], sinks: Float[Tensor, "h"]
) -> tuple[Float[Tensor, "t h dv"], Float[Tensor, "t h"]]:
    """Add sinks to outputs that were computed without them; the twin of `refattn.merge.add_sinks`."""
    check_sinks(out, lse, sinks)
    share, total = dispatch.run(
        "add_sinks", out=out, lse=lse.to(torch.promote_types(out.dtype, lse.dtype)), sinks=sinks
    )
    return share, total.to(lse.dtype)
