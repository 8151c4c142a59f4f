"""26 · A state: fold one token into it."""

import torch
from jaxtyping import Float
from torch import Tensor


def fold(
    state: Float[Tensor, "dv dk"], key: Float[Tensor, "dk"], value: Float[Tensor, "dv"], decay: float, beta: float
) -> Float[Tensor, "dv dk"]:
    """Return the state of a head after one token, by the gated delta rule.

    First the state fades: all of it is multiplied by decay. Then it answers to the key, and beta times the difference
    between the value and that answer is written under the key: an outer product.
    state [[1, 2], [0, 4]], key [0, 1], value [8, 8], decay 0.5, beta 1: the state fades to [[0.5, 1], [0, 2]] and
    answers [1, 2]; the difference [7, 6] is written, so [[0.5, 8], [0, 8]].
    """
    raise NotImplementedError
