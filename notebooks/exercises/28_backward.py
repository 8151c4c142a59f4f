"""28 · The backward of a head."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor


def backward(
    query: Float[Tensor, "t d"],
    key: Float[Tensor, "s d"],
    value: Float[Tensor, "s dv"],
    visible: Bool[Tensor, "t s"],
    out: Float[Tensor, "t dv"],
    lse: Float[Tensor, "t"],
    grad_out: Float[Tensor, "t dv"],
) -> tuple[Float[Tensor, "t d"], Float[Tensor, "s d"], Float[Tensor, "s dv"]]:
    """Return the gradients of a head's queries, keys and values, from what the forward kept.

    The forward was out = softmax(scale * query @ key.T) @ value with scale = d ** -0.5, over the keys that visible
    shows. It kept out and the log-sum-exp of each row, lse, and no weights. grad_out is the gradient of out.
    A query that sees no key has an lse of -inf. Its gradient is 0, and it adds nothing to the others.
    query [[0, 0, 0, 0]], key [[2, 0, 0, 0], [0, 2, 0, 0]], value [[4], [0]], grad_out [[1]]: both weights are 1/2, the
    scores change by 1/2 * (4 - 2) = 1 and 1/2 * (0 - 2) = -1, so dq is [[1, -1, 0, 0]], dk is 0, dv [[1/2], [1/2]].
    """
    raise NotImplementedError
