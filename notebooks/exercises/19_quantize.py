"""19 · A cache of 8 bits."""

import torch
from jaxtyping import Float, Int8
from torch import Tensor


def quantize(x: Float[Tensor, "t hk d"]) -> tuple[Int8[Tensor, "t hk d"], Float[Tensor, "t hk"]]:
    """Return int8 values and a scale for each token and head, so that scale * quantized is close to x.

    The largest number of a row, by its size, becomes 127 or -127; the others are rounded to the nearest value. A row of
    zeros has the scale 1. [0.5, -2.0, 1.0]: scale 2 / 127 = 0.01575, quantized values [32, -127, 64].
    """
    raise NotImplementedError
