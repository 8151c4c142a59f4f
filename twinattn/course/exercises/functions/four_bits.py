"""Four bits: a decode over keys and values that are turned, quantized and packed, two elements per byte."""

from collections.abc import Iterator
from functools import partial

import torch
from jaxtyping import Float, Int, UInt8
from torch import Tensor

from twinattn.course.exercises.exercise import Exercise, Trial, draw


def int4_decode(
    query: Float[Tensor, "d"],
    pairs: UInt8[Tensor, "2 s half"],
    scales: Float[Tensor, "2 s"],
    zeros: Int[Tensor, "2 s"],
    matrix: Float[Tensor, "d d"],
) -> Float[Tensor, "d"]:
    """Return the output of one query over turned keys and values of four bits."""
    return _int4_decode(query, pairs, scales, zeros, matrix)


def _int4_decode(
    query: Tensor,
    pairs: Tensor,
    scales: Tensor,
    zeros: Tensor,
    matrix: Tensor,
    *,
    halves: str = "low first",
    zero: str = "before the scale",
    turns_query: bool = True,
    turns_back: bool = True,
    scale_twice: bool = False,
    scales_of_keys: bool = False,
    softmax_scale: bool = True,
) -> Tensor:
    """Decode, or do what people write instead."""
    low, high = (pairs & 15).float(), (pairs >> 4).float()
    if halves == "high first":
        low, high = high, low
    elements = torch.cat([low, high], -1) if halves == "apart" else torch.stack([low, high], -1).flatten(-2)
    of_all = scales[:1].expand_as(scales) if scales_of_keys else scales
    of_all = (of_all**2 if scale_twice else of_all)[..., None]
    points = zeros.float()[..., None]
    rows = {
        "before the scale": (elements - points) * of_all,
        "after the scale": elements * of_all - points,
        "": elements * of_all,
    }[zero]
    key, value = rows
    scores = key @ (matrix @ query if turns_query else query)
    weights = (scores * len(query) ** -0.5 if softmax_scale else scores).softmax(0)
    out = weights @ value
    return matrix @ out if turns_back else out


def _hadamard(size: int) -> Tensor:
    matrix = torch.ones(1, 1)
    while len(matrix) < size:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return matrix * size**-0.5


def _int4_decode_trials() -> Iterator[Trial]:
    one = dict(query=torch.tensor([1.0, 0.0]), pairs=torch.tensor([[[0x78]], [[0x9A]]], dtype=torch.uint8))
    one |= dict(scales=torch.full((2, 1), 2**0.5), zeros=torch.full((2, 1), 8), matrix=_hadamard(2))
    yield Trial("the worked example", one)
    for says, length, size in (
        ("5 keys of 4 elements", 5, 4),
        ("9 keys of 16 elements", 9, 16),
        ("a key of zeros, whose elements are its zero point", 3, 8),
    ):
        random = torch.Generator().manual_seed(length)
        pairs = torch.randint(0, 256, (2, length, size // 2), generator=random).to(torch.uint8)
        zeros = torch.randint(0, 16, (2, length), generator=random)
        if "zeros" in says:
            pairs[0, 1], zeros[0, 1] = 0x77, 7
        scales = torch.rand(2, length, generator=random) * torch.tensor([[0.1], [0.4]]) + 0.02
        yield Trial(says, dict(query=draw(size), pairs=pairs, scales=scales, zeros=zeros, matrix=_hadamard(size)))


INT4_DECODE = Exercise(
    "int4_decode",
    int4_decode,
    _int4_decode_trials,
    {
        "element 2 i is the low half of byte i, and 2 i + 1 the high half; here they have changed places": (
            partial(_int4_decode, halves="high first")
        ),
        "the halves of a byte are neighbours; here the low halves are the first half of a row": (
            partial(_int4_decode, halves="apart")
        ),
        "the zero point is to be taken off, too": partial(_int4_decode, zero=""),
        "the zero point is taken off before the scale, not after it": partial(_int4_decode, zero="after the scale"),
        "keys are turned, so the query has to be: a score is (H q) . (H k)": partial(_int4_decode, turns_query=False),
        "values are turned, so the output is turned back, once": partial(_int4_decode, turns_back=False),
        "each element is multiplied by its scale once": partial(_int4_decode, scale_twice=True),
        "values have scales of their own, scales[1]": partial(_int4_decode, scales_of_keys=True),
        "scores are divided by the root of the head size": partial(_int4_decode, softmax_scale=False),
    },
    (
        "Of a byte, `pairs & 15` is the first element and `pairs >> 4` the second. Stack them, and flatten the rows.",
        "An element stands for (element - zero) * scale. No key is turned back: turn the query, and then the output.",
    ),
    level=2,
    minutes=15,
)
