"""40 · A decode over four bits."""

import torch
from jaxtyping import Float, Int, UInt8
from torch import Tensor


def int4_decode(
    query: Float[Tensor, "d"],
    pairs: UInt8[Tensor, "2 s half"],
    scales: Float[Tensor, "2 s"],
    zeros: Int[Tensor, "2 s"],
    matrix: Float[Tensor, "d d"],
) -> Float[Tensor, "d"]:
    """Return the output of one query over s keys and values, which are stored in four bits.

    `pairs[0]` are the keys and `pairs[1]` the values, and so with scales and zero points. Byte i of a row has element
    2 i in its low four bits and element 2 i + 1 in its high ones; an element stands for (element - zero) * scale.
    Keys and values were turned before they were rounded: what is stored is H k and H v. `matrix` is H, which is
    symmetric and its own inverse. Scores are divided by the root of d. Do not turn any key back.
    One key, whose value is the byte 0x9a under scale 1.4142 and zero 8: H v is 1.4142 * [2, 1], the output [3, 1].
    """
    elements = torch.stack([pairs & 15, pairs >> 4], -1).flatten(-2).float()
    key, value = (elements - zeros[..., None]) * scales[..., None]
    weights = (key @ (matrix @ query) * len(query) ** -0.5).softmax(0)
    return matrix @ (weights @ value)
