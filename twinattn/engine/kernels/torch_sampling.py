"""Draw tokens in plain torch, on any device, one row after the other; part of the kernel `torch`.

Weights and sums are those of the formula, in the order of the ids, so that a row has the same bits in every batch. What
is saved is the search for the largest logit, and most of the sort: a nucleus is looked for among few tokens.
"""

import torch
from jaxtyping import Float, Float64, Int64, Shaped
from torch import Tensor

BLOCK = 256  # logits whose largest is found at a time


def sample(
    logits: Float[Tensor, "b v"],
    temperature: Float[Tensor, "b"],
    top_p: Float[Tensor, "b"] | None,
    uniform: Float[Tensor, "b"],
) -> Int64[Tensor, "b"]:
    """Draw a token from each row; see `twinattn.engine.fast_sampling.sample`."""
    largest, tokens = _largest(logits)
    is_sound = largest.isfinite()
    tokens = tokens.where(is_sound, -1)
    drawn = [row for row, degree in enumerate(temperature.tolist()) if degree > 0]
    for row in drawn:
        if is_sound[row]:
            cut = 1.0 if top_p is None else float(top_p[row])
            tokens[row] = _draw(logits[row], largest[row], temperature[row], cut, uniform[row])
    return tokens


def _largest(logits: Float[Tensor, "b v"]) -> tuple[Float[Tensor, "b"], Int64[Tensor, "b"]]:
    """Return the largest logit of each row, NaN if there is one, and the first token that has it.

    Of blocks first, and then in the first block that has it: on a CPU `amax` takes a twentieth of the time of `argmax`.
    """
    b, v = logits.shape
    whole = v // BLOCK * BLOCK
    blocks = logits[:, :whole].unflatten(1, (-1, BLOCK)).amax(-1) if whole else logits[:, :0]
    if whole < v:
        blocks = torch.cat([blocks, logits[:, whole:].amax(-1, keepdim=True)], dim=-1)
    largest, block = blocks.max(-1, keepdim=True)
    # The last block may be shorter; its last token comes again then, after itself.
    ids = (block * BLOCK + torch.arange(BLOCK, device=logits.device)).clamp(max=v - 1)
    return largest[:, 0], ids.gather(1, logits.gather(1, ids).argmax(-1, keepdim=True))[:, 0]


def _draw(
    logits: Float[Tensor, "v"],
    largest: Float[Tensor, ""],
    temperature: Float[Tensor, ""],
    top_p: float,
    uniform: Float[Tensor, ""],
) -> Shaped[Tensor, ""]:
    weights = logits.double() - largest.double()
    weights.div_(temperature).exp_()
    if top_p < 1:
        weights = _cut(logits, weights, top_p)
    ends = weights.cumsum_(0)
    return torch.searchsorted(ends, uniform * ends[-1], right=True)


def _cut(logits: Float[Tensor, "v"], weights: Float64[Tensor, "v"], top_p: float) -> Float64[Tensor, "v"]:
    """Return the weights, 0 outside of the nucleus.

    Tokens that are less likely than half of `(1 - top_p) / v` have, all together, less than what the nucleus leaves
    out; so none of them is in it, and none is sorted.
    """
    total = weights.sum()
    (candidates,) = (weights >= (1 - top_p) / (2 * len(weights)) * total).nonzero(as_tuple=True)
    by_likelihood = candidates[logits[candidates].argsort(descending=True, stable=True)]
    ends = weights[by_likelihood].cumsum(0)
    before = torch.nn.functional.pad(ends[:-1], (1, 0))
    nucleus = by_likelihood[before < top_p * total]
    return torch.zeros_like(weights).index_copy_(0, nucleus, weights[nucleus])
