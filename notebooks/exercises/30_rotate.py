"""30 · Before attention: queries and keys rotate by their position (RoPE)."""

import torch
from jaxtyping import Float, Int64
from torch import Tensor


def rotate(x: Float[Tensor, "t h d"], positions: Int64[Tensor, "t"], base: float) -> Float[Tensor, "t h d"]:
    """Return the heads of each token, rotated by its position.

    Elements i and i + d / 2 of a head are a point in the plane, which turns by position * base ** (-2 i / d): a point
    (a, b) becomes (a cos - b sin, b cos + a sin). Positions do not begin at 0 in a later chunk of a prompt.
    The head [1, 0] at position 1 has one pair, i = 0, and becomes [cos 1, sin 1] = [0.54, 0.84].
    """
    raise NotImplementedError
