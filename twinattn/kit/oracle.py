"""The oracle: attention of one sequence in float64, with a dense mask from the positions of queries and keys.

It shares no code with the reference: neither the formula, nor the masks, nor gathering, nor merging.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from twinattn.kit.workload import Workload


class Sight(NamedTuple):
    """The mask of a sequence, and the distance of each query and key."""

    visible: Tensor  # [t, s]
    distance: Tensor  # [t, s], in tokens


class Slopes(NamedTuple):
    """The gradients of a sequence, or the sizes of their terms, in float64.

    Attributes:
        dq: `[t, h, d]`.
        dk: `[s, hk, d]`.
        dv: `[s, hk, dv]`.
        dsinks: `[h]`; zeros without sinks.
        dslopes: `[h]`, of ALiBi without a root.
    """

    dq: Tensor
    dk: Tensor
    dv: Tensor
    dsinks: Tensor
    dslopes: Tensor


class Answer(NamedTuple):
    """The outputs of a path, in float64.

    Attributes:
        out: the outputs `[t, h, dv]`.
        lse: the log-sum-exps `[t, h]`.
        free: rows `[t]` that may hold anything, because another query of the sequence sees a NaN.
    """

    out: Tensor
    lse: Tensor
    free: Tensor


def sight(work: Workload, i: int, rows: Tensor | None = None) -> Sight:
    """Return the mask of a sequence by the rules of its path, for all queries or those in `rows`."""
    q, s = work.lens[i]
    rows = torch.arange(q) if rows is None else rows
    if work.has_trees:
        return Sight(*(x[rows] for x in _sight_in_tree(work, i)))
    first, last = (x[rows, None] for x in work.span(i))
    of = torch.arange(s)
    return Sight((of >= first) & (of <= last), (rows[:, None] + s - q - of).abs())


def _sight_in_tree(work: Workload, i: int) -> Sight:
    """Nodes see every key before their tree, their ancestors and themselves; siblings have the same position."""
    (q, s), parents, left = work.lens[i], work.parents(i), work.window[0]
    first = s - len(parents)
    depth: list[int] = []
    related = torch.zeros(len(parents), len(parents), dtype=torch.bool)
    for node, parent in enumerate(parents):
        depth.append(0 if parent < 0 else depth[parent] + 1)
        if parent >= 0:
            related[node] = related[parent]
        related[node, node] = True
    stands = torch.cat([torch.arange(first), first + torch.tensor(depth, dtype=torch.int64)])
    distance = stands[s - q :, None] - stands[None]
    visible = torch.ones(q, s, dtype=torch.bool)
    visible[:, first:] = related[len(parents) - q :]
    if left >= 0:
        visible &= distance <= left
    return Sight(visible, distance.abs())


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    seen: Sight,
    *,
    scale: float,
    softcap: float = 0.0,
    slopes: Tensor | None = None,
    by_root: bool = False,
    sinks: Tensor | None = None,
) -> Answer:
    """Attend in one sequence.

    Args:
        query: `[t, h, d]`.
        key: `[s, hk, d]`.
        value: `[s, hk, dv]`.
        seen: the mask and the distances.
        scale: factor on the products.
        softcap: bound on the scores; 0 for none.
        slopes: of ALiBi `[h]`.
        by_root: whether ALiBi uses the square root of the distance.
        sinks: `[h]`.
    """
    (t, h, _), (s, hk, dv) = query.shape, value.shape
    if not h:
        return Answer(
            torch.zeros(t, 0, dv, dtype=torch.float64),
            torch.zeros(t, 0, dtype=torch.float64),
            torch.zeros(t, dtype=torch.bool),
        )
    score = _products(query, key, scale).view(h, t, s)
    if softcap:
        score = softcap * torch.tanh(score / softcap)
    if slopes is not None:
        distance = seen.distance.double()
        score = score - slopes.double()[:, None, None] * (distance.sqrt() if by_root else distance)
    score = score.masked_fill(~seen.visible, -torch.inf)
    top = score.amax(-1) if s else torch.full((h, t), -torch.inf, dtype=torch.float64)
    if sinks is not None:
        top = torch.maximum(top, sinks.double()[:, None])
    top = torch.where(top == -torch.inf, 0.0, top)
    weight = torch.exp(score - top[..., None])  # [h, t, s]
    total = weight.sum(-1)
    if sinks is not None:
        total = total + torch.exp(sinks.double()[:, None] - top)
    values = value.double().transpose(0, 1)  # [hk, s, dv]
    odd = ~values.isfinite()
    out = (weight.view(hk, h // hk * t, s) @ values.masked_fill(odd, 0.0)).view(h, t, dv)
    out = out / torch.where(total == 0, 1.0, total)[..., None]
    if odd.any():
        meets = (seen.visible.double() @ odd.double() > 0).repeat_interleave(h // hk, 0)
        out = out.masked_fill(meets, torch.nan)
    spoilt_keys = ~(key.isfinite().flatten(1).all(1) & value.isfinite().flatten(1).all(1))
    tainted = spoilt_keys & seen.visible.any(0)  # unseen keys taint no output
    sees = (seen.visible & tainted).any(1)
    free = ~sees if tainted.any() else torch.zeros_like(sees)
    return Answer(out.transpose(0, 1), (top + total.log()).T, free)


def _products(query: Tensor, key: Tensor, scale: float) -> Tensor:
    """Return the scaled products of a sequence's queries with the keys of their group, `[hk, g * t, s]`."""
    (t, h, d), hk = query.shape, key.shape[1]
    of_group = query.double().transpose(0, 1).reshape(hk, h // hk * t, d)
    return scale * (of_group @ key.double().permute(1, 2, 0))


def differentiate(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    seen: Sight,
    grad_out: Tensor,
    grad_lse: Tensor,
    *,
    scale: float,
    softcap: float = 0.0,
    slopes: Tensor | None = None,
    sinks: Tensor | None = None,
) -> tuple[Slopes, Slopes]:
    """Differentiate `attend` in one sequence by hand, without autograd.

    With `p` the weights and `delta` the product of a row's gradient with its output:

        ds = p * (grad_out . v - delta + grad_lse)      times 1 - tanh^2 where scores are capped
        dq = scale * ds k       dk = scale * ds^T q       dv = p^T grad_out      dsinks = sum p_sink (grad_lse - delta)
        dslopes = - sum distance * ds, without the derivative of the cap

    Args:
        query: `[t, h, d]`.
        key: `[s, hk, d]`.
        value: `[s, hk, dv]`.
        seen: the mask and the distances.
        grad_out: of the outputs `[t, h, dv]`.
        grad_lse: of the log-sum-exps `[t, h]`.
        scale: factor on the products.
        softcap: bound on the scores; 0 for none.
        slopes: of ALiBi `[h]`.
        sinks: `[h]`.

    Returns:
        The gradients; and the same sums over the sizes of their terms, in which nothing cancels: the root of the sum of
        squares for a product over the head size, as roundings walk at random, and absolute values elsewhere. A gradient
        may be off by a rounding of these, however small it is itself.
    """
    group = query.shape[1] // max(key.shape[1], 1)
    options: dict[str, Any] = dict(scale=scale, softcap=softcap, slopes=slopes, sinks=sinks)
    out, lse, _ = attend(query, key, value, seen, **options)
    q, go, gl = (x.double().transpose(0, 1) for x in (query, grad_out, grad_lse[..., None]))  # [h, t, ...]
    k, v = (x.double().transpose(0, 1).repeat_interleave(group, 0) for x in (key, value))  # [h, s, ...]
    score = scale * (q @ k.mT)
    slope = torch.ones_like(score)  # the derivative of the cap
    if softcap:
        score = softcap * torch.tanh(score / softcap)
        slope = 1 - (score / softcap) ** 2
    if slopes is not None:
        score = score - slopes.double()[:, None, None] * seen.distance
    blind = (lse == -torch.inf).T[..., None]
    norm = lse.T[..., None].masked_fill(blind, 0.0)
    p = (score - norm).exp().masked_fill(~seen.visible, 0.0)
    p_sink = torch.zeros_like(norm) if sinks is None else (sinks.double()[:, None, None] - norm).exp()

    def sums(of_scores: Tensor, of_sinks: Tensor, go: Tensor, q: Tensor, k: Tensor, scale: float) -> Slopes:
        """Add up the gradients of scores and sinks."""
        ds, rows = p * slope * of_scores, (p_sink * of_sinks).sum((1, 2))
        of_keys = scale * (ds.mT @ q), p.mT @ go
        dk, dv = (x.unflatten(0, (-1, group)).sum(1).transpose(0, 1) for x in of_keys)
        of_biases = -(p * of_scores * seen.distance).sum((1, 2))
        return Slopes(scale * (ds @ k).transpose(0, 1), dk, dv, rows, of_biases)

    products = go * out.transpose(0, 1)
    delta, walk = products.sum(-1, keepdim=True), products.square().sum(-1, keepdim=True).sqrt()
    found = sums(go @ v.mT + gl - delta, gl - delta, go, q, k, scale)
    of_scores = (go.square() @ v.square().mT).sqrt() + gl.abs() + walk
    return found, sums(of_scores, gl.abs() + walk, go.abs(), q.abs(), k.abs(), abs(scale))
