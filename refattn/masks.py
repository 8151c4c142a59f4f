"""Who may see whom: boolean masks `visible[t, s]` of one sequence, and the ALiBi bias.

A sequence of `seq_len` keys ends with its `query_len` new tokens, so query `i` has position `seq_len - query_len + i`
and key `j` has position `j`. With `query_len = 3` and `seq_len = 5`:

    causal      window (1, 0)   chunk of 2      full        interval 0..3, 0..3, 2..4
    1 1 1 0 0   0 1 1 0 0       0 0 1 0 0       1 1 1 1 1   1 1 1 1 0
    1 1 1 1 0   0 0 1 1 0       0 0 1 1 0       1 1 1 1 1   1 1 1 1 0
    1 1 1 1 1   0 0 0 1 1       0 0 0 0 1       1 1 1 1 1   0 0 1 1 1

Masks combine with `&`. `visible` returns the mask of a plan.
"""

from collections.abc import Sequence
from typing import Any

import torch
from einops import rearrange
from jaxtyping import Bool, Float, Int, Int64
from torch import Tensor

from refattn.checks import check_window
from refattn.options import AttentionOptions
from refattn.plan import Plan
from refattn.trees import TreePlan


def visible(plan: Plan | TreePlan, i: int) -> Bool[Tensor, "t s"]:
    """Return the mask of sequence `i` of a plan: its window, and the interval of each query if it has one."""
    if isinstance(plan, TreePlan):
        return visible_in_trees(plan, i)
    (q0, q1), seq_len = plan.batch.query_rows()[i], int(plan.batch.seq_lens[i])
    shown = window(q1 - q0, seq_len, plan.window, **positions(plan, i))
    if plan.first_visible is not None and plan.last_visible is not None:
        first_key = 0 if plan.first_keys is None else int(plan.first_keys[i])
        shown &= interval(plan.first_visible[q0:q1], plan.last_visible[q0:q1], seq_len, first_key=first_key)
    return shown


def visible_in_trees(plan: TreePlan, i: int) -> Bool[Tensor, "t s"]:
    """Return the mask of sequence `i` with drafted trees: in its tree, a query sees only its ancestors and itself."""
    (q0, q1), seq_len = plan.batch.query_rows()[i], int(plan.batch.seq_lens[i])
    shown = window(q1 - q0, seq_len, plan.whole.window, **positions(plan, i))
    ancestors = tree(plan.trees.to_lists()[i]).to(shown.device)
    shown[:, seq_len - len(ancestors) :] &= ancestors[len(ancestors) - (q1 - q0) :]
    return shown


def positions(plan: Plan | TreePlan, i: int) -> dict[str, Any]:
    """Return the positions of the queries of sequence `i` among its keys, if they are not its last tokens.

    With drafted trees, also return the positions of the keys: siblings share one.
    """
    if isinstance(plan, TreePlan):
        keys, num_nodes = torch.arange(int(plan.batch.seq_lens[i]), device=plan.batch.device), int(plan.trees.lens[i])
        keys[len(keys) - num_nodes :] = len(keys) - num_nodes + plan.depths[i, :num_nodes]
        return positions(plan.whole, i) | dict(key_positions=keys)
    places: dict[str, Any] = dict(device=plan.batch.device)
    if plan.positions is not None:
        first_key = 0 if plan.first_keys is None else plan.first_keys[i].long()
        places["positions"] = plan.positions[slice(*plan.batch.query_rows()[i])].long() - first_key
    return places


def bias(
    plan: Plan | TreePlan, i: int, options: AttentionOptions, compute: torch.dtype
) -> Float[Tensor, "h t s"] | None:
    """Return the ALiBi bias of sequence `i` of a plan, from the same positions as its mask; None without slopes."""
    if options.alibi_slopes is None:
        return None
    (q0, q1), seq_len = plan.batch.query_rows()[i], int(plan.batch.seq_lens[i])
    sizes = options.alibi_slopes, q1 - q0, seq_len
    return alibi(*sizes, dtype=compute, sqrt=options.alibi_sqrt, **positions(plan, i))


def query_positions(query_len: int, seq_len: int, *, device: torch.device | None = None) -> Int64[Tensor, "t"]:
    """Return the position of every query of a sequence: its last `query_len` of `seq_len` tokens.

    Positions are negative for the first queries of a sequence that has more queries than keys; a causal mask hides
    every key from those.
    """
    return torch.arange(seq_len - query_len, seq_len, device=device)


def full(query_len: int, seq_len: int, *, device: torch.device | None = None) -> Bool[Tensor, "t s"]:
    """Show every key to every query (encoder and cross attention)."""
    return torch.ones(query_len, seq_len, dtype=torch.bool, device=device)


def causal(query_len: int, seq_len: int, *, device: torch.device | None = None) -> Bool[Tensor, "t s"]:
    """Show each query the keys up to its own position: `j <= i`, aligned at the bottom right."""
    i, j = _grid(query_len, seq_len, device)
    return j <= i


def window(
    query_len: int,
    seq_len: int,
    window_size: tuple[int, int],
    *,
    positions: Int64[Tensor, "t"] | None = None,
    key_positions: Int64[Tensor, "s"] | None = None,
    device: torch.device | None = None,
) -> Bool[Tensor, "t s"]:
    """Show each query the keys from `left` before it to `right` after it, both ends included; -1 is no limit.

    A window of W tokens is `(W - 1, 0)` and shows exactly W keys. `positions` gives the positions of the queries, if
    they are not the last tokens of the sequence, and `key_positions` those of the keys, if they are not 0, 1, 2, ...

    Raises:
        ValueError: naming `window_size`, if it is not a pair of ints of at least -1.

    Source: Beltagy et al. 2020, "Longformer"; Jiang et al. 2023, "Mistral 7B".
    """
    left, right = check_window(window_size)
    i, j = _grid(query_len, seq_len, device, positions, key_positions)
    visible = full(query_len, seq_len, device=device)
    if left >= 0:
        visible = visible & (j >= i - left)
    if right >= 0:
        visible = visible & (j <= i + right)
    return visible


def chunk(query_len: int, seq_len: int, chunk_size: int, *, device: torch.device | None = None) -> Bool[Tensor, "t s"]:
    """Show each query the keys of its own chunk up to its position: `j <= i` and `i // chunk == j // chunk`.

    Source: Meta 2025, Llama 4.
    """
    i, j = _grid(query_len, seq_len, device)
    return (j <= i) & (i // chunk_size == j // chunk_size)


def interval(
    first_visible: Int[Tensor, "t"], last_visible: Int[Tensor, "t"], seq_len: int, *, first_key: int = 0
) -> Bool[Tensor, "t s"]:
    """Show each query the keys from its first visible one to its last, both included; none if last < first.

    Args:
        first_visible: the position of the first key that each query sees.
        last_visible: the position of the last key that it sees.
        seq_len: keys of the sequence, `s`; intervals are clipped to them.
        first_key: the position of the sequence's first key.
    """
    keys = first_key + torch.arange(seq_len, device=first_visible.device)
    first, last = (rearrange(x.long(), "t -> t 1") for x in (first_visible, last_visible))
    return (first <= keys) & (keys <= last)


def visible_keys(
    query_len: int,
    seq_len: int,
    *,
    causal: bool,
    window_size: tuple[int, int] = (-1, -1),
    positions: Int64[Tensor, "t"] | None = None,
    device: torch.device | None = None,
) -> Bool[Tensor, "t s"]:
    """Return the mask of a plan's `causal` and `window_size`: causal is a right window of 0.

    Raises:
        ValueError: naming `window_size`, if it is not a pair of ints of at least -1.
    """
    left, right = check_window(window_size)
    return window(query_len, seq_len, (left, 0 if causal else right), positions=positions, device=device)


def alibi(
    slopes: Float[Tensor, "h"],
    query_len: int,
    seq_len: int,
    *,
    dtype: torch.dtype,
    sqrt: bool = False,
    positions: Int64[Tensor, "t"] | None = None,
    key_positions: Int64[Tensor, "s"] | None = None,
    device: torch.device | None = None,
) -> Float[Tensor, "h t s"]:
    """Return the ALiBi bias `-slope * abs(query position - key position)`. With a slope of 1, 2 queries and 4 keys:

        -2 -1  0 -1
        -3 -2 -1  0

    The positions are absolute: a constant per row would cancel inside one softmax, but not between two sets of keys
    that are attended to separately and merged.

    Args:
        slopes: one per head, of any floating point type.
        query_len: new tokens of the sequence.
        seq_len: tokens of the sequence.
        dtype: the type that the bias is computed in: that of the scores, not of the slopes.
        sqrt: use the square root of the distance.
        positions: positions of the queries, if they are not the last tokens of the sequence.
        key_positions: positions of the keys, if they are not 0, 1, 2, ...
        device: device of the bias.

    Source: Press et al. 2022, "Train Short, Test Long"; the absolute value, for later keys, is FlashAttention's.
    """
    i, j = _grid(query_len, seq_len, device, positions, key_positions)
    distance = (i - j).abs()
    return -rearrange(slopes.to(dtype), "h -> h 1 1") * (distance.to(dtype).sqrt() if sqrt else distance)


def tree(parents: Sequence[int]) -> Bool[Tensor, "w w"]:
    """Show each node of a tree its ancestors and itself; `parents` has the parent of each node, -1 for a root.

    With the parents `-1 0 0 1`, node 3 follows 1, and 1 and 2 are siblings:

        1 0 0 0
        1 1 0 0
        1 0 1 0
        1 1 0 1

    Source: Miao et al. 2024, "SpecInfer"; Cai et al. 2024, "Medusa".
    """
    visible = torch.zeros(len(parents), len(parents), dtype=torch.bool, device="cpu")
    for node, parent in enumerate(parents):
        if parent >= 0:
            visible[node] = visible[parent]
        visible[node, node] = True
    return visible


def _grid(
    query_len: int,
    seq_len: int,
    device: torch.device | None,
    positions: Int64[Tensor, "t"] | None = None,
    key_positions: Int64[Tensor, "s"] | None = None,
) -> tuple[Int64[Tensor, "t 1"], Int64[Tensor, "1 s"]]:
    if positions is None:
        positions = query_positions(query_len, seq_len, device=device)
    if key_positions is None:
        key_positions = torch.arange(seq_len, device=device)
    return rearrange(positions, "t -> t 1"), rearrange(key_positions, "s -> 1 s")
