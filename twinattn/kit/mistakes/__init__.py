"""Known mistakes: an independent formula in steps, and subclasses that get one step wrong.

A kernel with the same outputs as one of them, on the same inputs, has probably made the same mistake. The report then
shows the docstring of that class. `Attention` itself is right; it shares no code with the reference.

    formula       the steps, and the list of all mistakes
    where         conditions on a call without which a mistake does not show
    masks         visible keys, lengths     splits, cascade     partial outputs
    pages         tables, slots, strides    hidden              memory that no query may see
    scores        scale, cap, ALiBi         trees, latents, quantized, packed, differential, merge, writes
    softmax       sum, sinks, LSE           empty               fully masked rows
    intervals     one for each query        selection           top-k selection, and its lists
    tiles         mistakes beyond the size of a tile, a batch, a group or a split
    limits        numbers too large for their type, or for a buffer
    beside        an option that is lost in combination with another one
    states        layers that keep a state
    backward      gradients, and masks, tiles, sinks and memory of them; mistakes of the forward have wrong ones, too
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from twinattn.kit.example import Answers, Arguments, Example
from twinattn.kit.mistakes import (
    backward,
    backward_masks,
    beside,
    cascade,
    differential,
    empty,
    hidden,
    intervals,
    latents,
    limits,
    masks,
    merge,
    packed,
    pages,
    quantized,
    scores,
    selection,
    softmax,
    splits,
    states,
    tiles,
    trees,
    writes,
)
from twinattn.kit.mistakes.backward import Backward, by_autograd
from twinattn.kit.mistakes.differential import Differential
from twinattn.kit.mistakes.formula import KNOWN, Attention, Formula
from twinattn.kit.mistakes.merge import Merge
from twinattn.kit.mistakes.selection import Selection
from twinattn.kit.mistakes.states import State
from twinattn.kit.mistakes.writes import Write

# If several mistakes explain an output equally well, the first is named, so the simplest come first.
ORDER = (
    *(intervals, selection, masks, pages, scores, softmax, empty, splits, tiles, limits, hidden, cascade, trees),
    *(latents, quantized, packed, differential, merge, writes, states, beside),
)


@dataclass(frozen=True)
class Mistake:
    """A known mistake.

    Attributes:
        name: in lower case, with hyphens.
        says: what is wrong, in a sentence.
        formula: the class that computes it.
        variant: the value of its parameter, one of `Formula.variants`.
        is_of_forward: whether the gradients are wrong because of a mistake in the forward.
    """

    name: str
    says: str
    formula: type[Formula]
    variant: Any = None
    is_of_forward: bool = False

    def may_show(self, example: Example, arguments: Arguments) -> bool:
        """Return False if this mistake surely does not show in a call."""
        return self.formula.may_show(example, arguments, self.variant)

    def answers(self, example: Example, arguments: Arguments) -> Answers:
        """Return the outputs of a kernel with this mistake."""
        return self.formula(example, arguments, self.variant).answers()


def of_path(path: str) -> Iterator[Mistake]:
    """Yield the known mistakes of a path."""
    for module in (
        (backward, backward_masks, *ORDER) if path == "varlen_backward" else ORDER
    ):  # mistakes of the backward come first
        for kind in KNOWN:
            if kind.__module__ != module.__name__:
                continue
            if path in kind.paths:
                yield from _variants(kind, kind)
            elif path == "differential" and issubclass(kind, Attention) and "chunked_prefill" in kind.paths:
                yield from _variants(kind, _of_pairs(kind))
            elif path == "varlen_backward" and issubclass(kind, Attention) and "varlen" in kind.paths:
                yield from (replace(x, is_of_forward=True) for x in _variants(kind, by_autograd(kind)))


def _of_pairs(kind: type[Attention]) -> type[Formula]:
    """Return differential attention with a mistake in both of its softmaxes."""

    class OfPairs(Differential, is_base=True):
        attention = kind
        may_show = kind.may_show

    return OfPairs


def shows_in(mistake: Mistake, size: str) -> bool:
    """Return whether to look for a mistake in a batch of this `is_large`; most show in small batches, too."""
    return not size or size in mistake.formula.past


def without_mistake(path: str) -> Mistake:
    """Return the right formula of a path as a `Mistake`."""
    formula = next(
        kind for kind in (Attention, Differential, Merge, Write, Selection, State, Backward) if path in kind.paths
    )
    return Mistake("none", "Nothing is wrong.", formula)


def _variants(kind: type[Formula], formula: type[Formula]) -> Iterator[Mistake]:
    name = re.sub(r"(?<!^)(?=[A-Z])", "-", kind.__name__).lower()
    says = " ".join((kind.__doc__ or "").split())
    for variant in kind.variants:
        yield Mistake(name, says, formula, variant)
