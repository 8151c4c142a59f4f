"""How the next token of a request is chosen."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from random import Random
from typing import Protocol, runtime_checkable

import torch
from einops import rearrange
from jaxtyping import Float, Int64
from torch import Tensor


@dataclass(frozen=True)
class SamplingParams:
    """How the tokens of a request are chosen, and when it ends.

    Attributes:
        max_tokens: most tokens to generate.
        temperature: divides the logits; 0 takes the most likely token.
        top_p: draw from the fewest, most likely tokens whose probabilities add up to this.
        seed: seed of the request's random numbers. Each token has its own, whatever else is in the batch.
        stop_token_ids: tokens that end the answer, as its last; None for the model's own end tokens.

    Raises:
        ValueError: naming the attribute that has another type or is out of range.
    """

    max_tokens: int = 64
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    stop_token_ids: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        stops = self.stop_token_ids
        rules = dict(
            max_tokens=(type(self.max_tokens) is int and self.max_tokens >= 1, "an int of at least 1"),
            temperature=(
                type(self.temperature) in (int, float) and 0 <= self.temperature < inf,
                "0 (greedy) or more, and finite",
            ),
            top_p=(type(self.top_p) in (int, float) and 0 < self.top_p <= 1, "a probability above 0, at most 1"),
            seed=(type(self.seed) is int, "an int"),
            stop_token_ids=(
                stops is None or (type(stops) is tuple and all(type(token) is int for token in stops)),
                "a tuple of ints, or None",
            ),
        )
        for name, (holds, expected) in rules.items():
            if not holds:
                raise ValueError(f"{name}: expected {expected}, got {getattr(self, name)!r}")


GREEDY = SamplingParams()


@runtime_checkable
class Sampled(Protocol):
    """A request, as far as the choice of its next token needs it."""

    @property
    def sampling(self) -> SamplingParams:
        """How its tokens are chosen."""

    @property
    def output_ids(self) -> list[int]:
        """Its tokens so far."""


def choose(
    logits: Float[Tensor, "b v"], requests: Sequence[Sampled], ahead: Sequence[int] | None = None
) -> list[int | None]:
    """Choose the next token of each request, from its own row of logits and its own random numbers.

    There is no token for a row with NaN or `+inf`, or with nothing above `-inf`. A request may have several rows, after
    drafted tokens: `ahead` says how many of them. Each is chosen as it will be if those are accepted.
    """
    settings = settings_of(requests, [0] * len(requests) if ahead is None else ahead)
    return [None if token < 0 else token for token in sample(logits, *settings.to(logits.device)).tolist()]


def settings_of(requests: Sequence[Sampled], ahead: Sequence[int]) -> Tensor:
    """TEMPORARY"""
    settings = [request.sampling for request in requests]
    uniform = [_uniform(*row) for row in zip(requests, ahead, strict=True)]
    return torch.tensor(([s.temperature for s in settings], [s.top_p for s in settings], uniform), dtype=torch.float64)


def _uniform(request: Sampled, ahead: int = 0) -> float:
    """Return the random number in [0, 1) of a request's next token, or of one that comes later.

    It follows from the seed and the token's place alone, so a step that is run again, or a request that is computed
    again, draws the same.
    """
    return Random(f"{request.sampling.seed}/{len(request.output_ids) + ahead}").random()


def sample(logits, temperature, top_p, uniform):
    sound = logits.amax(-1).isfinite()
    return _sample(logits.where(sound[:, None], 0.0), temperature, top_p, uniform).where(sound, -1)


def _sample(
    logits: Float[Tensor, "b v"],
    temperature: Float[Tensor, "b"],
    top_p: Float[Tensor, "b"],
    uniform: Float[Tensor, "b"],
) -> Int64[Tensor, "b"]:
    """Draw a token from each row, with one random number of [0, 1) each.

    The tokens of a row are placed on a line by their probabilities, the most likely first. The line is cut after the
    token that reaches `top_p`, and the random number is a position on what is left:

        |-------- the --------|---- a ----|-- one --|- my -|·····
        0                                        top_p          1

    Args:
        logits: a row for each request, each with a finite largest one.
        temperature: divides the logits; a row with 0 gives its most likely token.
        top_p: where to cut the line.
        uniform: the random numbers.

    Source: Holtzman et al. 2020, "The Curious Case of Neural Text Degeneration".
    """
    temperature, top_p, uniform = (rearrange(x, "b -> b 1") for x in (temperature, top_p, uniform))
    # The largest is taken off first: divided by a very small temperature it would be infinite.
    scaled = (logits.double() - logits.double().amax(-1, keepdim=True)) / temperature.where(temperature > 0, 1.0)
    probabilities, token_ids = scaled.softmax(-1).sort(descending=True, stable=True)
    ends = probabilities.cumsum(-1)  # [b, v], where each token ends on the line
    length = ends.where(ends - probabilities < top_p, 0.0).amax(-1, keepdim=True)
    place = torch.searchsorted(ends, uniform * length, right=True)
    drawn = token_ids.gather(-1, place.minimum(torch.searchsorted(ends, length)))  # not past the cut, by rounding
    return rearrange(drawn.where(temperature > 0, logits.argmax(-1, keepdim=True)), "b 1 -> b")
