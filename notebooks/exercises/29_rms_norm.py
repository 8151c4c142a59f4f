"""29 · Before attention: the norm of a row."""

import torch
from jaxtyping import Float
from torch import Tensor


def rms_norm(x: Float[Tensor, "t n"], weight: Float[Tensor, "n"], eps: float) -> Float[Tensor, "t n"]:
    """Return each row, divided by the root of the mean of its squares plus eps, times the weight of each element.

    The row [3, 4] has the mean square 12.5; with eps 0.5 the root is 3.606. With the weights [1, 2] it becomes
    [0.832, 2.219].
    """
    raise NotImplementedError
