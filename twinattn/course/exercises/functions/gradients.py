"""The backward of attention: gradients from what the forward kept."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from twinattn.course.exercises.exercise import Exercise, Trial, draw


def backward(
    query: Float[Tensor, "t d"],
    key: Float[Tensor, "s d"],
    value: Float[Tensor, "s dv"],
    visible: Bool[Tensor, "t s"],
    out: Float[Tensor, "t dv"],
    lse: Float[Tensor, "t"],
    grad_out: Float[Tensor, "t dv"],
) -> tuple[Float[Tensor, "t d"], Float[Tensor, "s d"], Float[Tensor, "s dv"]]:
    """Return the gradients of a head's queries, keys and values."""
    weights = _weights(query, key, visible, lse)
    delta = (grad_out * out).sum(-1, keepdim=True)
    of_scores = weights * (grad_out @ value.T - delta) * query.shape[-1] ** -0.5
    return of_scores @ key, of_scores.T @ query, weights.T @ grad_out


def _weights(query: Tensor, key: Tensor, visible: Tensor, lse: Tensor) -> Tensor:
    score = query @ key.T * query.shape[-1] ** -0.5
    return torch.exp(score - lse.masked_fill(lse == -torch.inf, 0.0)[:, None]).masked_fill(~visible, 0.0)


def _forward(query: Tensor, key: Tensor, value: Tensor, visible: Tensor, grad_out: Tensor) -> dict[str, Any]:
    """Return the arguments of a trial: what the forward kept, too."""
    score = (query @ key.T * query.shape[-1] ** -0.5).masked_fill(~visible, -torch.inf)
    lse = score.logsumexp(-1)
    out = _weights(query, key, visible, lse) @ value
    return dict(query=query, key=key, value=value, visible=visible, out=out, lse=lse, grad_out=grad_out)


def _backward_trials() -> Iterator[Trial]:
    keys = torch.tensor([[2.0, 0.0, 0.0, 0.0], [0.0, 2.0, 0.0, 0.0]])
    one = torch.zeros(1, 4), keys, torch.tensor([[4.0], [0.0]]), torch.ones(1, 2, dtype=torch.bool), torch.ones(1, 1)
    parts = ("dq", "dk", "dv")
    yield Trial("the worked example", _forward(*one), parts=parts)
    causal = torch.ones(4, 4, dtype=torch.bool).tril()
    drawn = draw(4, 8), draw(4, 8, seed=1), draw(4, 3, seed=2), causal, draw(4, 3, seed=3)
    yield Trial("four queries under a causal mask", _forward(*drawn), parts=parts)
    context = torch.ones(3, 7, dtype=torch.bool).tril(4)
    drawn = draw(3, 8), draw(7, 8, seed=1), draw(7, 5, seed=2), context, draw(3, 5, seed=3)
    yield Trial("three queries after four keys", _forward(*drawn), parts=parts)
    blind = torch.ones(3, 2, dtype=torch.bool).tril(-1)
    drawn = draw(3, 8), draw(2, 8, seed=1), draw(2, 5, seed=2), blind, draw(3, 5, seed=3)
    yield Trial("more queries than keys: the first sees none", _forward(*drawn), parts=parts)


def _wrong(**steps: Callable[..., Tensor]) -> Callable[..., Any]:
    """Return a backward with some of its steps replaced."""

    def function(
        query: Tensor, key: Tensor, value: Tensor, visible: Tensor, out: Tensor, lse: Tensor, grad_out: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        scale = query.shape[-1] ** -0.5
        weights = _weights(query, key, visible, lse)
        if "weights" in steps:
            weights = steps["weights"](query, key, visible, lse)
        delta = (grad_out * out).sum(-1, keepdim=True)
        delta = steps.get("delta", lambda delta, weights: delta)(delta, weights)
        of_scores = weights * (grad_out @ value.T - delta)
        of_scores = steps.get("scores", lambda of_scores, scale: of_scores * scale)(of_scores, scale)
        of_queries, of_keys = of_scores @ key, of_scores.T @ query
        return of_queries, of_keys, weights.T @ grad_out

    return function


BACKWARD = Exercise(
    "backward",
    backward,
    _backward_trials,
    {
        "delta is left out: a larger score takes weight from all other keys of its query": _wrong(
            delta=lambda delta, weights: 0 * delta
        ),
        "the scale is left out: a score is the product times d ** -0.5, and its gradient, too": _wrong(
            scores=lambda of_scores, scale: of_scores
        ),
        "the scale is there twice": _wrong(scores=lambda of_scores, scale: of_scores * scale**2),
        "the mask is left out: a hidden key has no weight, and no gradient from this query": _wrong(
            weights=lambda query, key, visible, lse: torch.exp(
                query @ key.T * query.shape[-1] ** -0.5 - lse.masked_fill(lse == -torch.inf, 0.0)[:, None]
            )
        ),
        "a query that sees no key has lse = -inf, and inf times 0 is NaN": _wrong(
            weights=lambda query, key, visible, lse: (
                torch.exp(query @ key.T * query.shape[-1] ** -0.5 - lse[:, None]) * visible
            )
        ),
        "delta is multiplied by its weight twice": _wrong(delta=lambda delta, weights: delta * weights),
    },
    (
        "The weights are not kept, but follow from `lse`: each is `exp(score - lse)`, and 0 where the key is hidden.",
        "The gradient of a weight is `grad_out @ value.T`. The weights of a query add up to 1, so of this its mean, "
        "weighted, is taken off: `delta`, which is `(grad_out * out).sum(-1)`.",
        "The gradient of a score is `weight * (grad_out @ value.T - delta)`. A score is `scale * query @ key.T`.",
    ),
    parts=("dq", "dk", "dv"),
    level=2,
    minutes=15,
)
