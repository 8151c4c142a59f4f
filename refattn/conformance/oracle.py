"""The right answer of a workload: softmax in float64 under a dense mask, from the positions of queries and keys alone.

It reads numbers by slot, one sequence at a time, and shares no code with the reference: neither the formula, nor the
masks, nor gathering, nor merging.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from refattn.conformance.workload import Workload


class Sight(NamedTuple):
    """Who may see whom in a sequence, and how far apart they are."""

    visible: Tensor  # [t, s]
    distance: Tensor  # [t, s], in tokens


class Answer(NamedTuple):
    """What a path returns, in float64.

    Attributes:
        out: the outputs `[t, h, dv]`.
        lse: the log-sum-exps `[t, h]`.
        free: rows `[t]` about which nothing is said, as a NaN lies in another row's sight; empty for none.
    """

    out: Tensor
    lse: Tensor
    free: Tensor


def sight(work: Workload, i: int, rows: Tensor | None = None) -> Sight:
    """Return the mask of a sequence by the rules that its path states; of some queries, if `rows` says."""
    q, s = work.lens[i]
    rows = torch.arange(q) if rows is None else rows
    if work.has_trees:
        return Sight(*(x[rows] for x in _sight_in_tree(work, i)))
    first, last = (x[rows, None] for x in work.span(i))
    of = torch.arange(s)
    return Sight((of >= first) & (of <= last), (rows[:, None] + s - q - of).abs())


def _sight_in_tree(work: Workload, i: int) -> Sight:
    """Nodes see every key before their tree, and in it their ancestors and themselves; siblings stand side by side."""
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
        seen: who may see whom.
        scale: factor on the products.
        softcap: bound on the scores; 0 for none.
        slopes: of ALiBi `[h]`.
        by_root: ALiBi by the root of the distance.
        sinks: `[h]`.
    """
    (t, h, d), (s, hk, dv) = query.shape, value.shape
    if not h:
        return Answer(
            torch.zeros(t, 0, dv, dtype=torch.float64),
            torch.zeros(t, 0, dtype=torch.float64),
            torch.zeros(t, dtype=torch.bool),
        )
    of_group = query.double().transpose(0, 1).reshape(hk, h // hk * t, d)
    score = scale * (of_group @ key.double().permute(1, 2, 0)).view(h, t, s)
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
    tainted = spoilt_keys & seen.visible.any(0)  # what nobody sees taints nobody
    sees = (seen.visible & tainted).any(1)
    free = ~sees if tainted.any() else torch.zeros_like(sees)
    return Answer(out.transpose(0, 1), (top + total.log()).T, free)
