"""Speculative decoding by the fastest kernel; the twin of `refattn.speculative`.

A tree costs as much as a causal chunk: the mask of a node is one word per 64 nodes, loaded once per row, and only the
few key tiles with drafted keys apply it. The tables of a tree are computed on the device, so a CUDA graph can capture a
whole verification and replay it with other trees.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from jaxtyping import Bool, Float, Int64, Shaped
from torch import Tensor

from fastattn import chunked_prefill, dispatch, sliding_window
from refattn import steps
from refattn.batch import Batch, check_block_table
from refattn.checks import check_flag, check_window
from refattn.checks_of_calls import check_plan
from refattn.checks_of_steps import check_num_tokens
from refattn.keys import Pages
from refattn.options import AttentionOptions
from refattn.plan import Plan
from refattn.trees import (
    Accepted,
    DraftStep,
    TreePlan,
    Trees,
    check_accepted,
    check_caches,
    check_draft_steps,
    check_drafts,
    check_probabilities,
    check_tree_mask,
    check_trees,
)

make_trees = steps.make_trees


def parents_from_mask(visible: Bool[Tensor, "w w"]) -> list[int]:
    """Return the parents of the nodes of a tree from its mask; the twin of `refattn.speculative.parents_from_mask`."""
    check_tree_mask(visible)
    w = len(visible)
    node = torch.arange(w, device=visible.device)
    above = visible.tril(-1)
    parents = torch.where(above, node, -1).amax(-1) if w else node
    of_parent = torch.where((parents >= 0)[:, None], visible[parents.clamp(min=0)], False)
    if not torch.equal(of_parent | (node == node[:, None]), visible):
        raise ValueError("visible: expected the mask of a tree, each node with its ancestors and itself, got another")
    return parents.tolist()


def positions(batch: Batch, trees: Trees, num_tokens: int) -> Int64[Tensor, "t"]:
    """Return the position of each query row, from its depth; the twin of `refattn.speculative.positions`."""
    check_trees(batch, trees)
    check_num_tokens(num_tokens, batch)
    return dispatch.run("draw_trees", batch=batch, trees=trees, num_tokens=num_tokens)[2].long()


def plan(
    batch: Batch,
    *,
    block_size: int,
    trees: Trees | None = None,
    causal: bool = True,
    window_size: tuple[int, int] = (-1, -1),
) -> Plan | TreePlan:
    """Plan attention of drafted tokens; the twin of `refattn.speculative.plan`.

    All sizes follow from Python ints, so nothing synchronizes with a device.
    """
    left, _ = check_window(window_size)
    check_flag("causal", causal)
    if trees is None:
        return chunked_prefill.plan(batch, block_size=block_size, causal=causal, window_size=window_size)
    if not causal:
        raise ValueError("causal: expected True with trees, whose nodes see their ancestors only, got False")
    check_trees(batch, trees)
    check_block_table(batch, block_size=block_size)
    if batch.device.type == "cpu":
        num_tokens = int(batch.cu_seqlens_q[-1])
    else:
        most = batch.num_seqs * min(batch.max_query_len, trees.max_len)  # every query row is a node
        num_tokens = most if batch.num_tokens is None else batch.num_tokens
    depths, ancestors, where = dispatch.run("draw_trees", batch=batch, trees=trees, num_tokens=num_tokens)
    keys, first_keys = batch, None
    if left >= 0:  # trim the window as if all nodes were query rows
        nodes = torch.nn.functional.pad(trees.lens.cumsum(0, dtype=torch.int32), (1, 0))
        all_nodes = replace(batch, cu_seqlens_q=nodes, max_query_len=trees.max_len, num_tokens=None)
        trimmed = sliding_window.plan(all_nodes, window_size=(left, 0), block_size=block_size)
        keys, first_keys = trimmed.batch, trimmed.first_keys
        keys = replace(
            keys, cu_seqlens_q=batch.cu_seqlens_q, max_query_len=batch.max_query_len, num_tokens=batch.num_tokens
        )

    def level(batch: Batch) -> Plan:
        return Plan(batch, block_size, False, (left, -1), first_keys=first_keys, positions=where)

    prefix = replace(keys, seq_lens=keys.seq_lens - trees.lens)
    return TreePlan(level(keys), level(prefix), trees, depths, ancestors)


def plan_drafts(
    batch: Batch, *, block_size: int, num_steps: int, num_branches: int = 1, window_size: tuple[int, int] = (-1, -1)
) -> list[DraftStep]:
    """Plan all passes of a draft model at once, without synchronizing.

    The twin of `refattn.speculative.plan_drafts`.
    """
    check_draft_steps(batch, block_size=block_size, num_steps=num_steps, num_branches=num_branches)
    drafts = batch.query_lens.clamp(max=1)  # [b], 0 for padding
    ends = (drafts * num_branches).cumsum(0, dtype=torch.int32)
    node = torch.arange(num_steps * num_branches, dtype=torch.int32, device=batch.device)
    parents = (node - num_branches).clamp(min=-1).expand(batch.num_seqs, -1)
    rows = replace(
        batch,
        cu_seqlens_q=torch.nn.functional.pad(ends, (1, 0)),
        max_query_len=num_branches,
        num_keys=None,
        num_tokens=None,
    )
    steps = []
    for nodes in range(num_branches, num_steps * num_branches + 1, num_branches):
        trees = Trees(parents[:, :nodes].contiguous(), drafts * nodes)
        longer = replace(rows, seq_lens=batch.seq_lens + trees.lens, max_seq_len=batch.max_seq_len + nodes)
        its_trees = trees if num_branches > 1 else None
        steps.append(
            DraftStep(longer, trees, plan(longer, block_size=block_size, trees=its_trees, window_size=window_size))
        )
    return steps


def attention(
    query: Float[Tensor, "t h d"],
    key_cache: Float[Tensor, "n p hk d"],
    value_cache: Float[Tensor, "n p hk dv"],
    plan: Plan | TreePlan,
    options: AttentionOptions = AttentionOptions(),
    *,
    return_lse: bool = False,
    out: Float[Tensor, "t h dv"] | None = None,
) -> Float[Tensor, "t h dv"] | tuple[Float[Tensor, "t h dv"], Float[Tensor, "t h"]]:
    """Attend from drafted tokens to the keys before their tree, and inside it to their ancestors and themselves.

    Arguments, results and errors are those of `refattn.speculative.attention`.

    Raises:
        NotImplementedError: if no kernel computes the combination, with the reason of each.
    """
    check_plan(plan, Plan, TreePlan, source="speculative.plan")
    return dispatch.attend(query, Pages(key_cache, value_cache), plan, options, out, return_lse)


def accept(batch: Batch, trees: Trees, drafts: Int64[Tensor, "t"], chosen: Int64[Tensor, "t"]) -> Accepted:
    """Accept the longest branch of the model's own tokens; the twin of `refattn.speculative.accept`.

    A node is accepted if its ancestor mask, which includes itself, has no node whose token differs from the model's.
    """
    check_drafts(batch, trees, drafts=drafts, chosen=chosen)
    b, w = trees.parents.shape
    if b == 0 or w == 0 or len(drafts) == 0:
        nothing = torch.zeros_like(trees.lens)
        return Accepted(torch.full_like(trees.parents, -1), nothing, nothing.long() - 1)
    node, rows, above = _nodes(batch, trees, len(drafts))
    depths, ancestors, _ = dispatch.run("draw_trees", batch=batch, trees=trees, num_tokens=0)
    differs = (above >= 0) & (drafts[rows] != chosen[rows].gather(1, above.clamp(min=0)))
    bits = differs.long() << node % 64
    wrong = torch.nn.functional.pad(bits, (0, -w % 64)).unflatten(1, (-1, 64)).sum(-1)  # no carries: distinct bits
    is_right = ((ancestors & wrong[:, None]) == 0).all(-1) & (node < trees.lens[:, None])
    lens = torch.where(is_right, depths + 1, 0)
    best = (lens * (w + 1) - node).argmax(-1, keepdim=True)  # the longest; ties go to the first
    lens = lens.gather(1, best)[:, 0]
    branch = ancestors.gather(1, best[..., None].expand(-1, -1, trees.num_words))[:, 0]  # [b, words]
    is_on_branch = (branch.gather(1, (node // 64).expand(b, -1)) >> node % 64) & 1
    return _accepted(is_on_branch.bool() & (lens > 0)[:, None], chosen[rows].gather(1, best)[:, 0])


def accept_sampled(
    batch: Batch,
    trees: Trees,
    drafts: Int64[Tensor, "t"],
    target_probs: Float[Tensor, "t v"],
    uniforms: Float[Tensor, "t"],
    draft_probs: Float[Tensor, "t v"] | None = None,
) -> Accepted:
    """Accept by rejection sampling, node by node for all trees; the twin of `refattn.speculative.accept_sampled`."""
    check_drafts(batch, trees, drafts=drafts)
    check_probabilities(batch, drafts, target_probs, uniforms, draft_probs)
    b, w = trees.parents.shape
    if b == 0 or w == 0 or len(drafts) == 0:
        nothing = torch.zeros_like(trees.lens)
        return Accepted(torch.full_like(trees.parents, -1), nothing, nothing.long() - 1)
    node, rows, above = _nodes(batch, trees, len(drafts))
    is_node = node < trees.lens[:, None]
    last = torch.zeros_like(rows[:, 0])  # the last accepted node of each sequence
    left = target_probs[rows[:, 0]].double()  # the distribution after that node
    accepted = is_node & (node == 0)
    for k in range(1, w):
        row = rows[:, k]
        token = drafts[row][:, None]
        if draft_probs is None:
            drawn_from = torch.zeros_like(left).scatter_(1, token, 1.0)
        else:
            drawn_from = draft_probs[row].double()
        is_tried = is_node[:, k] & (above[:, k] == last)
        goes_on = is_tried & (uniforms[row].double() * drawn_from.gather(1, token)[:, 0] < left.gather(1, token)[:, 0])
        rest = (left - drawn_from).clamp(min=0.0)
        total = rest.sum(-1, keepdim=True)
        rest = torch.where(total == 0, left, rest / total)
        left = torch.where(is_tried[:, None], rest, left)
        left = torch.where(goes_on[:, None], target_probs[row].double(), left)
        last = torch.where(goes_on, k, last)
        accepted[:, k] = goes_on
    ends = left.cumsum(-1)
    total = ends[:, -1:].contiguous()
    place = uniforms[rows[:, :1]].double() * total
    can_draw = (place >= 0) & (place <= total) & (total > 0) & (total < torch.inf)
    drawn = torch.minimum(torch.searchsorted(ends, place, right=True), torch.searchsorted(ends, total))
    return _accepted(accepted, torch.where(can_draw, drawn, -1)[:, 0])


def compact(
    caches: Sequence[Shaped[Tensor, "n p ..."]], batch: Batch, trees: Trees, accepted: Accepted, *, block_size: int
) -> None:
    """Move the keys and values of accepted nodes to the first slots of their tree, in place, in one launch per pool.

    The twin of `refattn.speculative.compact`.
    """
    check_accepted(batch, trees, accepted)
    check_caches(caches, batch, trees, accepted, block_size=block_size)
    dispatch.run_in_each("compact", caches, batch=batch, trees=trees, accepted=accepted, block_size=block_size)


accepted_batch = steps.accepted_batch


def _nodes(
    batch: Batch, trees: Trees, num_tokens: int
) -> tuple[Int64[Tensor, "w"], Int64[Tensor, "b w"], Int64[Tensor, "b w"]]:
    """Return the node indices, and each node's query row and parent per sequence; past the last node any row."""
    node = torch.arange(trees.max_len, device=batch.device)
    rows = (batch.cu_seqlens_q[:-1, None] + node).clamp(max=num_tokens - 1)
    return node, rows, torch.minimum(trees.parents.long(), node - 1)


def _accepted(is_accepted: Bool[Tensor, "b w"], next_tokens: Int64[Tensor, "b"]) -> Accepted:
    """Return accepted nodes from a mask, the accepted ones first."""
    lens = is_accepted.sum(-1, dtype=torch.int32)
    w = is_accepted.shape[1]
    node = torch.arange(w, device=is_accepted.device)
    nodes = torch.where(is_accepted, node, w).sort(-1).values  # rejected nodes sort to the end
    return Accepted(nodes.masked_fill(nodes == w, -1).int(), lens, next_tokens.masked_fill(lens == 0, -1))
