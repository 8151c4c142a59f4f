"""Speculative decoding: the model verifies several drafted tokens in one pass and keeps those that it agrees with.

A draft is a chain, or a tree of several candidates. Here is a tree after two keys of context, with its mask. Its nodes
have consecutive slots, but positions follow from the depth, so siblings have the same position:

    0 -- 1 -- 3            node 0   1 1 1 . . . .     position 2        accepted: 0, 2 and 4, where the model agrees
     ·-- 2 -- 4            node 1   1 1 1 1 . . .              3        then node 2 moves to the slot of node 1,
                           node 2   1 1 1 . 1 . .              3        and node 4 to that of node 2:
                           node 3   1 1 1 1 . 1 .              4
                           node 4   1 1 1 . 1 . 1              4        slots   . . 0 1 2 3 4   ->   . . 0 2 4

    plan, attention     verification of chains and trees, and each step of a draft that grows a tree
    plan_drafts         all steps of a draft with several branches, planned at once
    accept              accepts where the model chose the same tokens, greedy or sampled
    accept_sampled      rejection sampling: the tokens have the model's distribution, whatever was drafted
    compact             moves the accepted keys and values to consecutive slots, in the caches of all layers
    accepted_batch      the step of a draft model over the accepted tokens

A chain is an ordinary causal chunk; a block drafted in one pass is a chunk without a causal mask.

Source: Leviathan et al. 2023, "Fast Inference from Transformers via Speculative Decoding"; Miao et al. 2024,
"SpecInfer"; Li et al. 2024, "EAGLE-2".
"""

from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float, Int64, Shaped
from torch import Tensor

from refattn import chunked_prefill, masks, sliding_window, steps
from refattn.attention import attend_to
from refattn.batch import Batch, check_block_table
from refattn.checks import check_flag, check_window
from refattn.checks_of_calls import check_plan
from refattn.checks_of_steps import check_num_tokens
from refattn.keys import Pages
from refattn.metadata import make_batch
from refattn.options import AttentionOptions
from refattn.plan import Plan
from refattn.trees import (
    WORD,
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
    """Return the parents of the nodes of a tree from its mask, the form in which other servers pass trees.

    Args:
        visible: the nodes that each node sees: its ancestors and itself.

    Raises:
        ValueError: if it is not the mask of a tree whose nodes come after their parents.
    """
    check_tree_mask(visible)
    parents = []
    for node, row in enumerate(visible.tolist()):
        seen = [other for other in range(node) if row[other]]
        parents.append(max(seen, default=-1))  # the nearest ancestor comes last
    if not torch.equal(masks.tree(parents), visible.cpu()):
        raise ValueError("visible: expected the mask of a tree, each node with its ancestors and itself, got another")
    return parents


def positions(batch: Batch, trees: Trees, num_tokens: int) -> Int64[Tensor, "t"]:
    """Return the position of each query row, from its depth in the tree; 0 for padding rows.

    Args:
        batch: the lengths; the query rows of a sequence are the last nodes of its tree.
        trees: the trees.
        num_tokens: query rows, `t`, the padding rows included.

    Returns:
        `seq_len - nodes + depth`, for rotary embeddings, windows and ALiBi.

    Raises:
        ValueError: if the trees do not fit the batch, or (on a CPU) `num_tokens` is too small.
    """
    check_trees(batch, trees)
    check_num_tokens(num_tokens, batch)
    result = torch.zeros(num_tokens, dtype=torch.int64, device=batch.device)
    for (q0, q1), seq_len, parents in zip(batch.query_rows(), batch.seq_lens.tolist(), trees.to_lists(), strict=True):
        depths = masks.tree(parents).sum(-1) - 1
        result[q0:q1] = (seq_len - len(parents) + depths)[len(parents) - (q1 - q0) :]
    return result


def plan(
    batch: Batch,
    *,
    block_size: int,
    trees: Trees | None = None,
    causal: bool = True,
    window_size: tuple[int, int] = (-1, -1),
) -> Plan | TreePlan:
    """Plan attention of drafted tokens.

    Args:
        batch: the lengths and the block table. The nodes of a tree are the last tokens of its sequence, and the query
            rows its last nodes: all of them in a verification, the newest when a draft model grows the tree.
        block_size: tokens in a block, `p`.
        trees: the trees; None for chains, which are causal chunks.
        causal: hide later drafts; False for a block of tokens that are drafted together and see one another.
        window_size: `(left, right)` in tokens, both inclusive, -1 for no limit; counted along the branch. With trees,
            blocks that no query sees are removed. The right side applies only without a causal mask.

    Returns:
        A plan for every layer of this step.

    Raises:
        ValueError: naming the argument that does not fit, such as trees of another batch, or trees with `causal=False`.
    """
    left, _ = check_window(window_size)
    check_flag("causal", causal)
    if trees is None:
        return chunked_prefill.plan(batch, block_size=block_size, causal=causal, window_size=window_size)
    if not causal:
        raise ValueError("causal: expected True with trees, whose nodes see their ancestors only, got False")
    check_trees(batch, trees)
    block_table = check_block_table(batch, block_size=block_size)

    depths = torch.zeros(trees.parents.shape, dtype=torch.int32, device="cpu")
    ancestors = torch.zeros(*trees.parents.shape, trees.num_words, dtype=torch.int64, device="cpu")
    for i, parents in enumerate(trees.to_lists()):
        for node, seen in enumerate(masks.tree(parents)):
            depths[i, node] = seen.sum() - 1
            for other in seen.nonzero().flatten().tolist():
                ancestors[i, node, other // WORD] |= 1 << other % WORD if other % WORD < WORD - 1 else -(1 << WORD - 1)

    query_lens, lens = batch.query_lens.tolist(), trees.lens.tolist()
    # Remove the blocks that no node sees, as if all nodes were query rows of a window.
    all_nodes = make_batch(lens, batch.seq_lens.tolist(), block_table.tolist(), device=batch.device)
    trimmed = sliding_window.plan(all_nodes, window_size=(left, 0), block_size=block_size)
    assert trimmed.batch.block_table is not None  # the batch has one, as checked above
    seq_lens, tables = trimmed.batch.seq_lens.tolist(), trimmed.batch.block_table.tolist()
    first_keys = None if left < 0 else trimmed.first_keys
    where = positions(batch, trees, sum(query_lens)).int()

    def level(keys: list[int]) -> Plan:
        sequences = make_batch(query_lens, keys, tables, device=batch.device)
        return Plan(sequences, block_size, False, (left, -1), first_keys=first_keys, positions=where)

    prefix = level([seq_len - nodes for seq_len, nodes in zip(seq_lens, lens, strict=True)])
    return TreePlan(level(seq_lens), prefix, trees, depths.to(batch.device), ancestors.to(batch.device))


def plan_drafts(
    batch: Batch, *, block_size: int, num_steps: int, num_branches: int = 1, window_size: tuple[int, int] = (-1, -1)
) -> list[DraftStep]:
    """Plan all passes of a draft model at once; each extends several branches of a sequence by one token.

    The masks do not depend on which tokens are drafted. Two branches after three keys, in three passes:

        node       0 1 | 2 3 | 4 5        pass 0   query rows 0 1   node 1   1 1 1 . 1
        branch     0 1   0 1   0 1        pass 1              2 3   node 3   1 1 1 . 1 . 1
        position   3 3   4 4   5 5        pass 2              4 5   node 5   1 1 1 . 1 . 1 . 1

    Args:
        batch: any step whose keys are in the cache, with blocks for all drafts. A sequence without new tokens is
            padding and gets no drafts.
        block_size: tokens in a block, `p`.
        num_steps: passes of the draft model.
        num_branches: branches of each sequence; 1 for a chain.
        window_size: as for `plan`.

    Returns:
        The batch, the trees and the plan of each pass; `positions` and `metadata.slot_mapping` follow from them.

    Raises:
        ValueError: naming the argument that does not fit.

    Source: `FlashAttentionMultiStepBackend` of SGLang. There the first drafts come from the previous step, so
        `speculative_num_steps` is one more than `num_steps`.
    """
    check_draft_steps(batch, block_size=block_size, num_steps=num_steps, num_branches=num_branches)
    assert batch.block_table is not None  # checked above
    drafts = [query_len > 0 for query_len in batch.query_lens.tolist()]
    contexts, tables = batch.seq_lens.tolist(), batch.block_table.tolist()
    steps = []
    for step in range(num_steps):
        parents = [-1] * num_branches + list(range(step * num_branches))  # a node follows its branch's previous node
        trees = make_trees([parents if is_drafted else [] for is_drafted in drafts], device=batch.device)
        query_lens = [num_branches if is_drafted else 0 for is_drafted in drafts]
        seq_lens = [context + nodes for context, nodes in zip(contexts, trees.lens.tolist(), strict=True)]
        longer = make_batch(query_lens, seq_lens, tables, device=batch.device)
        its_trees = trees if num_branches > 1 else None  # for a chain the causal mask is enough
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

    Write the new keys and values first (`kv_cache.write`).

    Args:
        query: the drafted tokens of all sequences, one after the other; rows after the last sequence are padding.
        key_cache: the pool of keys; any strides.
        value_cache: the pool of values.
        plan: from `plan`, once per step.
        options: the layer's options; sinks count once.
        return_lse: also return the log-sum-exp.
        out: where to write the outputs; a new tensor if None.

    Returns:
        As `chunked_prefill.attention`.

    Raises:
        ValueError: naming the argument that does not fit. Nothing is written then.

    Source: Miao et al. 2024, "SpecInfer" (a mask of ancestors); Cai et al. 2024, "Medusa".
    """
    check_plan(plan, Plan, TreePlan, source="speculative.plan")
    return attend_to(query, Pages(key_cache, value_cache), plan, options, return_lse=return_lse, out=out)


def accept(batch: Batch, trees: Trees, drafts: Int64[Tensor, "t"], chosen: Int64[Tensor, "t"]) -> Accepted:
    """Accept the longest branch that consists of the model's own tokens.

    After the root the model chose `chosen[root]`. If a child of the root has that token, it is accepted, and its own
    children are compared with `chosen[child]`; and so on. If `chosen` has the most likely tokens, the result equals
    greedy decoding. If it has one sample from the model's distribution after each node, the result has that
    distribution: drafts only affect the number of tokens per step.

    Args:
        batch: the lengths; every node is a query row.
        trees: the trees. Node 0 of each is its only root, a confirmed token.
        drafts: the token of each node.
        chosen: the token that the model chose after each node.

    Returns:
        The accepted nodes, their number, and the token that follows them. Of two equally long branches, the one whose
        last node comes first; for a sequence without a tree, no nodes and the token -1.

    Raises:
        ValueError: if the trees do not fit the batch, or (on a CPU) have more than one root or nodes that are not query
            rows.
    """
    check_drafts(batch, trees, drafts=drafts, chosen=chosen)
    paths, next_tokens = [], []
    for (q0, q1), parents in zip(batch.query_rows(), trees.to_lists(), strict=True):
        tokens, wanted = drafts[q0:q1].tolist(), chosen[q0:q1].tolist()
        branches: list[list[int]] = []  # from the root to each node; empty if not accepted
        for node, parent in enumerate(parents):
            if parent < 0:
                branches.append([node])
            else:
                agrees = branches[parent] and tokens[node] == wanted[parent]
                branches.append([*branches[parent], node] if agrees else [])
        paths.append(max(branches, key=len, default=[]))
        next_tokens.append(wanted[paths[-1][-1]] if paths[-1] else -1)
    return _accepted(paths, next_tokens, trees)


def accept_sampled(
    batch: Batch,
    trees: Trees,
    drafts: Int64[Tensor, "t"],
    target_probs: Float[Tensor, "t v"],
    uniforms: Float[Tensor, "t"],
    draft_probs: Float[Tensor, "t v"] | None = None,
) -> Accepted:
    """Accept by rejection sampling: every token has the model's distribution, whatever the drafts.

    Let `p` be the model's distribution after a node. Its children are tried in order; one with token `x`, drawn from
    `q`, is accepted with probability `min(1, p[x] / q[x])`. If it is rejected, the residual replaces `p`:

        p = max(p - q, 0) / sum(max(p - q, 0))

    and the next child is tried. If none is accepted, the next token is sampled from the residual.

    Args:
        batch: the lengths; every node is a query row.
        trees: the trees. Node 0 of each is its only root, a confirmed token.
        drafts: the token of each node.
        target_probs: the model's distribution after each node.
        uniforms: a random number in [0, 1) for each node: that of the root samples the next token, the others accept or
            reject their node. A 1, the result of rounding, samples the last token with a probability above 0.
        draft_probs: the distribution that each node was sampled from, given its earlier siblings; None for drafts that
            are not sampled, such as n-gram drafts.

    Returns:
        As `accept`. The next token is -1 if its probabilities are not finite or all 0.

    Raises:
        ValueError: as `accept`; also if probabilities or random numbers have a wrong shape, or (on a CPU) a random
            number is outside [0, 1].

    Source: Leviathan et al. 2023; several children: Miao et al. 2024, "SpecInfer", algorithm 2.
    """
    check_drafts(batch, trees, drafts=drafts)
    check_probabilities(batch, drafts, target_probs, uniforms, draft_probs)
    paths: list[list[int]] = []
    next_tokens: list[int] = []
    for (q0, _), parents in zip(batch.query_rows(), trees.to_lists(), strict=True):
        if not parents:
            paths.append([])
            next_tokens.append(-1)
            continue
        path, left = [0], target_probs[q0].double()  # the residual after the last accepted node
        for node in range(1, len(parents)):
            if parents[node] != path[-1]:
                continue
            token, row = int(drafts[q0 + node]), q0 + node
            if draft_probs is None:
                drawn_from = torch.zeros_like(left)
                drawn_from[token] = 1.0
            else:
                drawn_from = draft_probs[row].double()
            if uniforms[row].double() * drawn_from[token] < left[token]:
                path.append(node)
                left = target_probs[row].double()
            else:
                rest = (left - drawn_from).clamp(min=0.0)
                left = left if rest.sum() == 0 else rest / rest.sum()  # 0 only by rounding: p and q are equal
        paths.append(path)
        next_tokens.append(_draw(left, uniforms[q0]))
    return _accepted(paths, next_tokens, trees)


def _draw(probs: Float[Tensor, "v"], uniform: Float[Tensor, ""]) -> int:
    """Return the token sampled by inverting the cumulative distribution; -1 if the probabilities are not valid."""
    ends = probs.cumsum(0)
    place = uniform.double() * ends[-1]
    if not 0 <= place <= ends[-1] or not 0 < ends[-1] < torch.inf:  # both comparisons are false for NaN
        return -1
    last = int(torch.searchsorted(ends, ends[-1]))  # the last token with a probability above 0
    return min(int(torch.searchsorted(ends, place, right=True)), last)


def compact(
    caches: Sequence[Shaped[Tensor, "n p ..."]], batch: Batch, trees: Trees, accepted: Accepted, *, block_size: int
) -> None:
    """Move the keys and values of accepted nodes to the first slots of their tree, in place.

    The next step overwrites rejected nodes. Call it once per step, with the caches of all layers that share a block
    table. Only the entries of the table between which nodes move are checked; others may be -1, as in the pool of a
    sliding window.

    Args:
        caches: pools `[n, p, ...]`: keys, values, latents, scales.
        batch: the batch of the step, with its block table.
        trees: the trees of the step.
        accepted: from `accept` or `accept_sampled`.
        block_size: tokens in a block, `p`.

    Raises:
        ValueError: if a cache is not a pool with that block size; on a CPU also if accepted nodes are not in their tree
            or not ascending, or a block is outside the pool. Nothing is written then.
    """
    check_accepted(batch, trees, accepted)
    tables = check_caches(caches, batch, trees, accepted, block_size=block_size).tolist()
    moves: list[tuple[tuple[int, int], tuple[int, int]]] = []  # (block, row) from where, and to where
    rows = zip(accepted.nodes.tolist(), accepted.lens.tolist(), trees.lens.tolist(), strict=True)
    for i, (nodes, count, tree_len) in enumerate(rows):
        first = int(batch.seq_lens[i]) - tree_len
        for target, node in enumerate(nodes[:count]):
            if node == target:
                continue  # already in place
            (from_block, from_row), (to_block, to_row) = (divmod(first + k, block_size) for k in (node, target))
            moves.append(((tables[i][from_block], from_row), (tables[i][to_block], to_row)))
    for cache in caches:
        tokens = [cache[source].clone() for source, _ in moves]  # read all before writing any
        for token, (_, destination) in zip(tokens, moves, strict=True):
            cache[destination] = token


accepted_batch = steps.accepted_batch


def _accepted(paths: Sequence[Sequence[int]], next_tokens: Sequence[int], trees: Trees) -> Accepted:
    device = trees.lens.device
    nodes = torch.full(trees.parents.shape, -1, dtype=torch.int32, device="cpu")
    for i, path in enumerate(paths):
        nodes[i, : len(path)] = torch.tensor(path, dtype=torch.int32, device="cpu")
    lens = torch.tensor([len(path) for path in paths], dtype=torch.int32, device="cpu")
    return Accepted(nodes.to(device), lens.to(device), torch.tensor(next_tokens, dtype=torch.int64, device=device))
