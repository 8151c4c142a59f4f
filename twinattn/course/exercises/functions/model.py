"""What is around attention in a model: the norm before it, the rotation of its queries and keys, the next token."""

from collections.abc import Iterator

import torch
from torch import Tensor

from twinattn.course.exercises.exercise import Exercise, Trial, draw
from twinattn.course.first_engine import rms_norm, rotate


def _norm_trials() -> Iterator[Trial]:
    row = torch.tensor([[3.0, 4.0]])
    yield Trial("the worked example", dict(x=row, weight=torch.tensor([1.0, 2.0]), eps=0.5))
    yield Trial("three rows", dict(x=draw(3, 4), weight=draw(4, seed=1), eps=1e-5))
    yield Trial("a row of zeros", dict(x=torch.zeros(1, 3), weight=torch.ones(3), eps=1e-6))


RMS_NORM = Exercise(
    "rms_norm",
    rms_norm,
    _norm_trials,
    {
        "this is the root of the sum of squares; the norm divides by that of their mean": (
            lambda x, weight, eps: x / torch.sqrt(x.square().sum(-1, keepdim=True) + eps) * weight
        ),
        "eps is added under the root": (
            lambda x, weight, eps: x / (x.square().mean(-1, keepdim=True).sqrt() + eps) * weight
        ),
        "the mean is over all rows; each token has its own": (
            lambda x, weight, eps: x / torch.sqrt(x.square().mean() + eps) * weight
        ),
        "the mean is subtracted as in a LayerNorm; an RMS norm only divides": (
            lambda x, weight, eps: (
                (x - x.mean(-1, keepdim=True)) / torch.sqrt(x.var(-1, correction=0, keepdim=True) + eps) * weight
            )
        ),
        "the weight is missing": lambda x, weight, eps: x / torch.sqrt(x.square().mean(-1, keepdim=True) + eps),
    },
    (
        "Per row: the mean of the squares, plus eps, under a root. The row is divided by it.",
        "The weight multiplies last, element by element.",
    ),
    minutes=3,
    in_page=True,
)


def _by_positions(x: Tensor, positions: Tensor, base: float, *, neighbours: bool = False, back: bool = False) -> Tensor:
    """Rotate pairs of neighbours, or in the other direction."""
    half = x.shape[-1] // 2
    if neighbours:
        paired = torch.cat([x[..., 0::2], x[..., 1::2]], -1)
        turned = rotate(paired, positions, base)
        return torch.stack([turned[..., :half], turned[..., half:]], -1).flatten(-2)
    return rotate(x, -positions if back else positions, base)


def _rotate_trials() -> Iterator[Trial]:
    def trial(says: str, t: int, h: int, d: int, positions: list[int]) -> Trial:
        return Trial(says, dict(x=draw(t, h, d), positions=torch.tensor(positions), base=100.0))

    one = torch.tensor([[[1.0, 0.0]]])
    yield Trial("the worked example", dict(x=one, positions=torch.tensor([1]), base=100.0))
    yield trial("two pairs, which turn at different speeds", 1, 1, 4, [1])
    yield trial("two heads, and a chunk that begins at position 5", 3, 2, 4, [5, 6, 7])
    yield trial("position 0 stays as it is", 1, 1, 6, [0])
    yield trial("two requests in one row", 4, 1, 6, [0, 1, 2, 9])


ROTATE = Exercise(
    "rotate",
    rotate,
    _rotate_trials,
    {
        "element i forms a pair with element i + d / 2, not with its neighbour": (
            lambda x, positions, base: _by_positions(x, positions, base, neighbours=True)
        ),
        "the pairs turn the other way: (a, b) becomes (a cos - b sin, b cos + a sin)": (
            lambda x, positions, base: _by_positions(x, positions, base, back=True)
        ),
        "a token's row in the batch is not its position: use positions": (
            lambda x, positions, base: rotate(x, torch.arange(len(x)), base)
        ),
        "all pairs turn at the same speed; pair i turns by base ** (-2 i / d) per token": (
            lambda x, positions, base: rotate(x, positions, 1.0)
        ),
        "the exponent is -2 i / d; here it is -i / d": lambda x, positions, base: rotate(x, positions, base**0.5),
    },
    (
        "With two pairs, elements 0 and 2 are the first one. Its angle is the position itself; the angle of the second "
        "is position * base ** (-2 / d).",
        "A point (a, b), turned by an angle, is (a cos - b sin, b cos + a sin): a is element i, b element i + d / 2.",
    ),
    level=2,
    minutes=10,
    in_page=True,
)


def sample(
    logits: Tensor, temperature: float, top_p: float, u: float, *, without_last: bool = False, anew: bool = True
) -> int:
    """Return the next token; without the one that reaches `top_p`, or with the old shares of those kept, if wanted."""
    if temperature == 0:
        return int(logits.argmax())
    order = logits.argsort(descending=True)
    shares = torch.softmax(logits[order].double() / temperature, 0)
    before = shares.cumsum(0) - shares
    kept = shares.cumsum(0) <= top_p if without_last else before < top_p
    kept[0] = True
    total = shares[kept].sum() if anew else 1.0
    drawn = ((before <= u * total) & kept).nonzero().max()
    return int(order[drawn])


def _sample_trials() -> Iterator[Trial]:
    shares = torch.tensor([0.1, 0.5, 0.25, 0.15]).log()
    for says, temperature, top_p, u in (
        ("the worked example", 1.0, 1.0, 0.8),
        ("temperature 0 takes the most likely token, whatever u is", 0.0, 1.0, 0.9),
        ("a low temperature: the likely tokens become more likely", 0.5, 1.0, 0.7),
        ("a high temperature", 2.0, 1.0, 0.45),
        ("top_p 0.7 keeps two tokens, as the first has only half", 1.0, 0.7, 0.95),
        ("u is a share of what was kept", 1.0, 0.7, 0.6),
        ("a top_p below the share of the most likely token keeps that one", 1.0, 0.1, 0.99),
    ):
        yield Trial(says, dict(logits=shares, temperature=temperature, top_p=top_p, u=u))


SAMPLE = Exercise(
    "sample",
    sample,
    _sample_trials,
    {
        "the logits are divided by the temperature, not multiplied": (
            lambda logits, temperature, top_p, u: (
                sample(logits, 1 / temperature, top_p, u) if temperature else int(logits.argmax())
            )
        ),
        "temperature is not used": lambda logits, temperature, top_p, u: (
            sample(logits, 1.0, top_p, u) if temperature else int(logits.argmax())
        ),
        "the token that reaches top_p is kept, too": (
            lambda logits, temperature, top_p, u: sample(logits, temperature, top_p, u, without_last=True)
        ),
        "what is kept has to sum to 1 again before u draws from it": (
            lambda logits, temperature, top_p, u: sample(logits, temperature, top_p, u, anew=False)
        ),
        "top_p is not used": lambda logits, temperature, top_p, u: sample(logits, temperature, 1.0, u),
        "tokens are drawn in the order of their ids; go from the most likely one down": (
            lambda logits, temperature, top_p, u: (
                int((torch.softmax(logits / temperature, 0).cumsum(0) <= u).sum())
                if temperature
                else int(logits.argmax())
            )
        ),
    },
    (
        "Sort the tokens by their probabilities, the most likely one first, and keep them until top_p is reached.",
        "Multiply u by the sum of what was kept, and go down the list until the running sum is larger than that.",
    ),
    level=2,
    minutes=10,
    explains={"ZeroDivisionError": "With temperature 0 nothing is drawn: return the most likely token."},
    in_page=True,
)
