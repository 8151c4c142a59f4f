"""The search's own answer: softmax in float64 under a dense mask, from the positions of queries and keys alone.

It reads numbers by slot, one sequence at a time, and shares no code with the reference: neither the formula, nor the
masks, nor gathering, nor merging.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from refattn.conformance.search.workload import Workload


class Sight(NamedTuple):
    """Who may see whom in a sequence, and how far apart they are."""

    visible: Tensor  # [t, s]
    distance: Tensor  # [t, s], in tokens


class Answer(NamedTuple):
    """What a path returns, in float64.

    Attributes:
        out: the outputs `[t, h, dv]`.
        lse: the log-sum-exps `[t, h]`.
        free: rows `[t]` about which nothing is said, as a NaN lies in another row's sight.
    """

    out: Tensor
    lse: Tensor
    free: Tensor


def sight(work: Workload, i: int) -> Sight:
    """Return the mask of a sequence by the rules on positions that its path states."""
    q, s = work.lens[i]
    at, of = torch.arange(s - q, s), torch.arange(s)
    left, right = work.window
    if work.has_trees:
        return _sight_in_tree(work, i)
    distance = at[:, None] - of[None]
    visible = torch.ones(q, s, dtype=torch.bool)
    if work.causal:
        visible &= distance >= 0
    if left >= 0:
        visible &= distance <= left
    if right >= 0:
        visible &= -distance <= right
    if work.plan_path == "local":
        size = work.chunk_blocks * work.block_size
        visible &= (at // size)[:, None] == (of // size)[None]
    return Sight(visible, distance.abs())


def _sight_in_tree(work: Workload, i: int) -> Sight:
    """Nodes see every key before their tree, and in it their ancestors and themselves; siblings stand side by side."""
    (q, s), parents, left = work.lens[i], work.parents(i), work.window[0]
    first = s - len(parents)
    depth, related = [], torch.zeros(len(parents), len(parents), dtype=torch.bool)
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
    h, group = query.shape[1], query.shape[1] // max(1, key.shape[1])
    outs, lses = [], []
    hidden = ~seen.visible
    for head in range(h):
        keys, values = key[:, head // group].double(), value[:, head // group].double()
        score = scale * (query[:, head].double() @ keys.T)
        if softcap:
            score = softcap * torch.tanh(score / softcap)
        if slopes is not None:
            distance = seen.distance.double()
            score = score - float(slopes[head]) * (distance.sqrt() if by_root else distance)
        score[hidden] = -torch.inf
        top = score.max(-1).values if score.shape[1] else torch.full((len(score),), -torch.inf, dtype=torch.float64)
        if sinks is not None:
            top = torch.maximum(top, sinks[head].double())
        top = torch.where(top == -torch.inf, 0.0, top)
        weight = torch.exp(score - top[:, None])
        total = weight.sum(-1)
        if sinks is not None:
            total = total + torch.exp(sinks[head].double() - top)
        odd = ~values.isfinite()
        out = (weight @ values.masked_fill(odd, 0.0)) / torch.where(total == 0, 1.0, total)[:, None]
        out[seen.visible.double() @ odd.double() > 0] = torch.nan
        outs.append(out)
        lses.append(top + total.log())
    if not outs:
        nothing = torch.zeros(len(query), 0, dtype=torch.float64)
        return Answer(
            nothing[..., None].expand(-1, 0, value.shape[-1]), nothing, torch.zeros(len(query), dtype=torch.bool)
        )
    spoilt_keys = ~(key.isfinite().flatten(1).all(1) & value.isfinite().flatten(1).all(1))
    tainted = spoilt_keys & seen.visible.any(0)  # what nobody sees taints nobody
    sees = (seen.visible & tainted).any(1)
    return Answer(torch.stack(outs, 1), torch.stack(lses, 1), ~sees if tainted.any() else torch.zeros_like(sees))
