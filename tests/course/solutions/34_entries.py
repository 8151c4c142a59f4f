"""34 · Compressed keys: entries that overlap."""

import torch
from jaxtyping import Float
from torch import Tensor


def entries(values: Float[Tensor, "s two_d"], gates: Float[Tensor, "s two_d"], ratio: int) -> Float[Tensor, "e d"]:
    """Return the complete entries of a sequence: one for each `ratio` tokens.

    The value and the gate of a token have two halves. Entry e is a weighted sum of the second halves of the values of
    its own tokens, and of the first halves of the values of the `ratio` tokens before them. Its weights are a softmax
    over the same halves of the gates of all these tokens, for each channel by itself. Entry 0 has only its own tokens.
    values [[1, 5], [3, 7], [100, 9], [100, 11]], gates 0, ratio 2:    [[6], [6]]
    """
    d, count = values.shape[1] // 2, len(values) // ratio
    out = values.new_zeros(count, d)
    for e in range(count):
        own, before = slice(e * ratio, (e + 1) * ratio), slice(max(e - 1, 0) * ratio, e * ratio)
        gate = torch.cat([gates[before, :d], gates[own, d:]])
        value = torch.cat([values[before, :d], values[own, d:]])
        out[e] = (gate.softmax(0) * value).sum(0)
    return out
