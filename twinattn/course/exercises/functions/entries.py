"""Compressed keys: the entries of a sequence, each of a few tokens and as many before them."""

from collections.abc import Iterator
from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor

from twinattn.course.exercises.exercise import Exercise, Trial, draw


def entries(values: Float[Tensor, "s two_d"], gates: Float[Tensor, "s two_d"], ratio: int) -> Float[Tensor, "e d"]:
    """Return the complete entries of a sequence, which overlap."""
    return _entries(values, gates, ratio)


def _entries(
    values: Tensor,
    gates: Tensor,
    ratio: int,
    *,
    swaps: bool = False,
    pads: bool = False,
    repeats: bool = False,
    open_too: bool = False,
    axis: int = 0,
    separate: bool = False,
) -> Tensor:
    """Compute entries, or what people write instead."""
    size, count = values.shape[1] // 2, len(values) // ratio
    if open_too:
        count = -(-len(values) // ratio)
    first, second = (slice(size, None), slice(0, size)) if swaps else (slice(0, size), slice(size, None))
    found = [values.new_zeros(0, size)]
    for entry in range(count):
        own = slice(entry * ratio, (entry + 1) * ratio)
        before = slice((entry - 1) * ratio, entry * ratio) if entry else slice(0, ratio if repeats else 0)
        parts = [(gates[before, first], values[before, first]), (gates[own, second], values[own, second])]
        if pads and not entry:
            parts[0] = values.new_zeros(ratio, size), values.new_zeros(ratio, size)
        if separate:
            found.append(torch.stack([(g.softmax(0) * v).sum(0) for g, v in parts]).sum(0)[None])
            continue
        gate, value = (torch.cat(x) for x in zip(*parts, strict=True))
        found.append((gate.softmax(axis) * value).sum(0)[None])
    return torch.cat(found)


def _entries_trials() -> Iterator[Trial]:
    gates, values = torch.zeros(4, 2), torch.tensor([[1.0, 5.0], [3.0, 7.0], [100.0, 9.0], [100.0, 11.0]])
    yield Trial("the worked example", dict(values=values, gates=gates, ratio=2))
    for says, length, size, ratio in (
        ("nine tokens, of which one is open", 9, 2, 4),
        ("fewer tokens than an entry has", 3, 2, 4),
        ("entries of one token", 4, 3, 1),
        ("entries of eight", 25, 1, 8),
    ):
        pair = dict(values=draw(length, 2 * size), gates=2 * draw(length, 2 * size, seed=3))
        yield Trial(says, pair | dict(ratio=ratio))


ENTRIES = Exercise(
    "entries",
    entries,
    _entries_trials,
    {
        "the first halves are for the next entry, and the second halves for the own one": partial(_entries, swaps=True),
        "entry 0 has no tokens before its own: zeros under a gate of 0 have a weight, too": partial(
            _entries, pads=True
        ),
        "entry 0 has no tokens before its own, and here it has the first halves of its own": (
            partial(_entries, repeats=True)
        ),
        "an entry is there when all of its tokens are": partial(_entries, open_too=True),
        "each channel has a softmax over the tokens; here each token has one over the channels": (
            partial(_entries, axis=1)
        ),
        "the tokens before and the own ones share one softmax": partial(_entries, separate=True),
    },
    (
        "Write it for one entry: a softmax over 2 * ratio gates of each channel, and a weighted sum of as many values.",
        "Take the first halves of the tokens before, and the second halves of its own. Entry 0 has only these.",
    ),
    level=2,
    minutes=10,
)
