"""6 · Attention, for one head."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor


def attend(
    query: Float[Tensor, "t d"],
    key: Float[Tensor, "s d"],
    value: Float[Tensor, "s dv"],
    visible: Bool[Tensor, "t s"],
) -> tuple[Float[Tensor, "t dv"], Float[Tensor, "t"]]:
    """Return softmax(query . key / sqrt(d)) over the visible keys, times the values; and the log-sum-exp of each row.

    The log-sum-exp is log(sum(exp(score))), a natural log. A query that sees no key returns 0 and -inf.
    query 0, two visible keys with the values 1 and 3: out 2, lse log(2) = 0.693.
    """
    raise NotImplementedError
