"""How the next tokens of requests are chosen: greedily, or drawn from their logits with temperature and top-p.

A drawn token needs one random number in [0, 1). It follows from the seed of the request and from the token's place in
the answer alone, so it is known before the logits are, and it does not depend on the rest of the batch.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Float64, Int64
from torch import Tensor


@dataclass(frozen=True)
class SamplingParams:
    """How the tokens of a request are chosen, and when it ends.

    Attributes:
        max_tokens: most tokens to generate.
        temperature: divides the logits; 0 takes the most likely token.
        top_p: draw from the fewest, most likely tokens whose probabilities add up to at least this.
        seed: seed of the request's random numbers, any int. Each token has its own, whatever else is in the batch.
        stop_token_ids: tokens that end the answer, as its last; None for the model's own end tokens.
        n: samples of the prompt, each an answer of its own. Sample i has the random numbers of `seed + i`, so it is the
            answer that a request with that seed gets. Greedy samples would be equal: they are refused, as in vLLM.

    Raises:
        ValueError: naming the attribute that has another type or is out of range.
    """

    max_tokens: int = 64
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    stop_token_ids: tuple[int, ...] | None = None
    n: int = 1

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
            n=(type(self.n) is int and self.n >= 1, "an int of at least 1"),
        )
        for name, (holds, expected) in rules.items():
            if not holds:
                raise ValueError(f"{name}: expected {expected}, got {getattr(self, name)!r}")
        if self.n > 1 and self.temperature == 0:
            raise ValueError(f"n: expected 1 with temperature=0, as greedy samples are all equal, got {self.n}")

    def of_sample(self, index: int) -> "SamplingParams":
        """Return how the tokens of one of `n` samples are chosen: as those of a request with its seed."""
        return replace(self, seed=self.seed + index, n=1)


GREEDY = SamplingParams()


@runtime_checkable
class Sampled(Protocol):
    """A request, as far as the choice of its next token needs it."""

    @property
    def sampling(self) -> SamplingParams:
        """How its tokens are chosen."""

    @property
    def num_outputs(self) -> int:
        """How many tokens it has so far."""


def sample(
    logits: Float[Tensor, "b v"],
    temperature: Float[Tensor, "b"],
    top_p: Float[Tensor, "b"] | None,
    uniform: Float[Tensor, "b"],
) -> Int64[Tensor, "b"]:
    """Draw a token from each row of logits, with one random number in [0, 1) each.

    The tokens lie on a line in the order of their ids, each as long as it is likely: token i has the length
    `exp((logits[i] - max(logits)) / temperature)`. The random number is a position on the line:

        |-- 0 --|- 1 -|-------- 2 --------|3|---- 4 ----|       without top_p
        |-- 0 --|-------- 2 --------|---- 4 ----|               with top_p=0.8: tokens 1 and 3 have no length
        0                      ^ uniform = 0.55         1

    With `top_p`, only the nucleus has a length: the fewest most likely tokens whose probabilities add up to at least
    `top_p`; of equally likely tokens those with lower ids come first.

    Args:
        logits: a row for each token to draw; a token with `-inf` is never drawn.
        temperature: divides the logits; a row with 0 takes the first of its largest logits.
        top_p: the probability that the nucleus reaches, above 0; 1 takes all tokens, and so does None in every row.
        uniform: the random numbers, in [0, 1).

    Returns:
        The token of each row, computed from this row alone, in float64; -1 where the logits have NaN or `+inf`, or
        nothing above `-inf`.

    Raises:
        ValueError: if the vocabulary is empty.

    Source: Holtzman et al. 2020, "The Curious Case of Neural Text Degeneration".
    """
    check_sample(logits)
    cuts = torch.ones_like(temperature) if top_p is None else top_p
    # On the CPU a sum of float64 has one order, so that a row gives the same bits in every batch.
    rows = zip(logits.cpu(), temperature.tolist(), cuts.tolist(), uniform.tolist(), strict=True)
    return torch.tensor([_sample_row(*row) for row in rows], dtype=torch.int64, device=logits.device)


def check_sample(logits: Float[Tensor, "b v"]) -> None:
    """Check what `sample` of either twin takes."""
    if logits.shape[-1] == 0:
        raise ValueError(f"logits: expected a vocabulary of at least one token, got {list(logits.shape)}")


def _sample_row(logits: Float[Tensor, "v"], temperature: float, top_p: float, uniform: float) -> int:
    largest = logits.max()  # NaN, if there is one
    if not largest.isfinite():
        return -1
    if temperature == 0:
        return int(logits.argmax())
    # The largest is subtracted first: divided by a very small temperature it would be infinite.
    weights = ((logits.double() - largest.double()) / temperature).exp()  # [v], at most 1
    if top_p < 1:
        weights = weights.where(_nucleus(logits, weights, top_p), 0.0)
    ends = weights.cumsum(0)  # [v], where each token ends on the line
    # The first that ends after the position: there is one, as a number below 1 times the last end is below it.
    return int(torch.searchsorted(ends, uniform * ends[-1], right=True))


def _nucleus(logits: Float[Tensor, "v"], weights: Float64[Tensor, "v"], top_p: float) -> Bool[Tensor, "v"]:
    """Return which tokens are needed to reach `top_p`: those before which the sum is still below it."""
    by_likelihood = logits.argsort(descending=True, stable=True)  # equal ones in the order of ids
    ends = weights[by_likelihood].cumsum(0)
    before = torch.nn.functional.pad(ends[:-1], (1, 0))
    is_needed = torch.empty_like(by_likelihood, dtype=torch.bool)
    is_needed[by_likelihood] = before < top_p * ends[-1]
    return is_needed


def uniforms(seeds: Sequence[int], places: Sequence[int]) -> Float64[Tensor, "b"]:
    """Return the random number of each pair of a seed and a place, in [0, 1), on the CPU.

    `splitmix64` of a place is the output of the generator of that name, `place` steps after the state that the seed
    gives: no number needs the one before it, so all are computed at once, in any order and as often as needed.

    Args:
        seeds: any ints; those that are equal modulo 2**64 are the same.
        places: the number of each token in its answer, from 0.

    Returns:
        Float64 with all of its 53 random bits: a multiple of 2**-53, at most 1 - 2**-53.

    Source: Steele, Lea and Flood 2014, "Fast Splittable Pseudorandom Number Generators"; the constants are those of
        Vigna's `splitmix64.c`.
    """
    return uniforms_at(generators(seeds), torch.tensor(list(places), dtype=torch.int64))


def generators(seeds: Sequence[int]) -> Int64[Tensor, "b"]:
    """Return the state of the random number generator that each seed gives, for `uniforms_at`."""
    return _splitmix64(torch.tensor([seed % 2**64 for seed in seeds], dtype=torch.uint64).view(torch.int64))


def uniforms_at(states: Int64[Tensor, "b"], places: Int64[Tensor, "b"]) -> Float64[Tensor, "b"]:
    """Return the random number of each generator at a place, as `uniforms`."""
    bits = _splitmix64(states + places * GOLDEN_GAMMA)
    return _shift_right(bits, 11).double() * 2.0**-53


# Odd numbers of 64 bits, written as the int64 with the same bits: torch multiplies int64 modulo 2**64.
GOLDEN_GAMMA = 0x9E3779B97F4A7C15 - 2**64  # 2**64 divided by the golden ratio
MIX_1 = 0xBF58476D1CE4E5B9 - 2**64
MIX_2 = 0x94D049BB133111EB - 2**64


def _splitmix64(state: Int64[Tensor, "b"]) -> Int64[Tensor, "b"]:
    """Return the output of the step after a state, as the int64 with the same bits."""
    x = state + GOLDEN_GAMMA
    x = (x ^ _shift_right(x, 30)) * MIX_1
    x = (x ^ _shift_right(x, 27)) * MIX_2
    return x ^ _shift_right(x, 31)


def _shift_right(x: Int64[Tensor, "b"], count: int) -> Int64[Tensor, "b"]:
    """Shift in zeros; `>>` of a negative int64 shifts in ones."""
    return (x >> count) & (2 ** (64 - count) - 1)


def settings_of(requests: Sequence[Sampled], ahead: Sequence[int] | None = None) -> Float64[Tensor, "3 b"]:
    """Return what `sample` needs besides the logits: the temperatures, the top-p and the random numbers.

    Nothing here needs the logits, so a step may compute it while the model runs. Where all rows are greedy, none needs
    a random number, and all of them are 0.

    Args:
        requests: the request of each row; one may have several rows.
        ahead: how many tokens each row's token comes after the next one of its request; None for the next ones.
    """
    settings = [request.sampling for request in requests]
    places = [request.num_outputs for request in requests]
    if ahead is not None:
        places = [place + count for place, count in zip(places, ahead, strict=True)]
    columns = [s.temperature for s in settings], [s.top_p for s in settings], [0.0] * len(settings)
    result = torch.tensor(columns, dtype=torch.float64)
    if any(columns[0]):
        result[2] = uniforms([s.seed for s in settings], places)
    return result


def choose(
    logits: Float[Tensor, "b v"],
    requests: Sequence[Sampled],
    ahead: Sequence[int] | None = None,
    *,
    sample: Callable[..., Tensor] = sample,
) -> list[int | None]:
    """Choose the next token of each request, from its own row of logits and its own random numbers.

    Args:
        logits: a row for each request.
        requests: the requests. One may have several rows, after drafted tokens; each is chosen as it will be if those
            are accepted.
        ahead: how many drafted tokens come before each row's token; None for no drafts.
        sample: the `sample` of a twin.

    Returns:
        The tokens; None for a row with NaN or `+inf`, or with nothing above `-inf`.
    """
    settings = settings_of(requests, ahead)
    cuts = bool((settings[1] < 1).any())  # asked on the host: a row without top_p does not pay for it
    temperature, top_p, uniform = settings.to(logits.device)
    tokens = sample(logits, temperature, top_p if cuts else None, uniform).tolist()
    return [None if token < 0 else token for token in tokens]
