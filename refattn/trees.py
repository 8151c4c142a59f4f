"""Drafted tokens as trees, and the plan of attention over them.

A tree of six nodes: node 0 is the last confirmed token, 1 and 2 are two candidates for the next one.

    0 -- 1 -- 3            parents   -1  0  0  1  1  4        a node comes after its parent; -1 is a root
     ·    ·-- 4 -- 5       depths     0  1  1  2  2  3        distance from the root; position = root's + depth
     ·-- 2
                           node 0     1 . . . . .             a node sees its ancestors and itself,
                           node 1     1 1 . . . .             and all keys before the tree
                           node 2     1 . 1 . . .
                           node 3     1 1 . 1 . .
                           node 4     1 1 . . 1 .
                           node 5     1 1 . . 1 1

The nodes of a tree are the last tokens of their sequence. Their slots are consecutive, in the order of the tree, but
siblings have the same position.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Int32, Int64
from torch import Tensor

from refattn.batch import Batch, check_block_table, check_lengths
from refattn.checks import (
    check,
    check_can_be_written,
    check_list,
    check_own_memory,
    check_side_by_side,
    check_sizes,
    describe,
    is_int,
    is_ordinary,
    same_device,
)
from refattn.overlap import check_pools_apart
from refattn.plan import CascadePlan, Plan

WORD = 64  # bits in a word of an ancestor mask
MOST_NODES = 1024  # nodes per tree


@dataclass(frozen=True, eq=False)
class Trees:
    """The drafted tokens of each sequence as a tree; in a chain, each node is the parent of the next.

    Attributes:
        parents: the parent of each node, -1 for a root; entries past a tree's last node may hold anything.
        lens: nodes of each tree, the last tokens of its sequence.

    Raises:
        ValueError: if a tensor has a wrong type, shape or device, or `lens` is not contiguous; on a CPU also if a tree
            has more nodes than `parents` has columns, or a node does not come after its parent.
    """

    parents: Int32[Tensor, "b w"]
    lens: Int32[Tensor, "b"]

    def __post_init__(self) -> None:
        """Check the types and shapes, and the contents if they are on the host."""
        sizes = check(parents=(self.parents, "int32 b w"), tree_lens=(self.lens, "int32 b"))
        b, w = sizes["b"], sizes["w"]
        check_side_by_side("tree_lens", self.lens)
        if w > MOST_NODES:
            raise ValueError(f"parents: expected trees of at most {MOST_NODES} nodes, got {w} columns")
        if not self.lens.is_cpu or not b:
            return
        if int(self.lens.min()) < 0 or int(self.lens.max()) > w:
            raise ValueError(f"tree_lens: expected 0..{w} nodes, as parents has columns, got {self.lens.tolist()}")
        node = torch.arange(w, device=self.parents.device)
        is_node = node < self.lens[:, None]
        wrong = is_node & ((self.parents >= node) | (self.parents < -1))
        if wrong.any():
            i, k = wrong.nonzero()[0].tolist()
            raise ValueError(
                f"parents: expected a node before it, or -1, for node {k} of sequence {i}, "
                f"got {int(self.parents[i, k])}"
            )

    @property
    def max_len(self) -> int:
        """The maximum number of nodes of a tree, `w`."""
        return self.parents.shape[1]

    @property
    def num_words(self) -> int:
        """Words of 64 bits in the ancestor mask of a node."""
        return -(-self.max_len // WORD)

    def to_lists(self) -> list[list[int]]:
        """Return the parents of the nodes of each tree."""
        return [nodes[:count] for nodes, count in zip(self.parents.tolist(), self.lens.tolist(), strict=True)]


@dataclass(frozen=True, eq=False)
class TreePlan:
    """Attention of drafted tokens to the keys before their tree, and inside it to their ancestors and themselves.

    The query rows of a sequence are its last nodes: all of them in a verification, the newest when a draft model grows
    the tree.

    Attributes:
        whole: the plan over all keys of each sequence, its tree included; `positions` follow the depths.
        prefix: the plan over the keys before the tree, for the same rows.
        trees: the trees.
        depths: the number of ancestors of each node; 0 past a tree's last node.
        ancestors: the nodes that each node sees, as a bit mask: bit `k % 64` of word `k // 64` is node `k`; 0 past a
            tree's last node.

    Raises:
        ValueError: if a plan is not one over pages with positions, or a tensor has a wrong type, shape or device or is
            not contiguous; on a CPU also if a sequence has fewer keys than nodes, fewer nodes than query rows, or
            `prefix` does not have all keys before its tree.
    """

    whole: Plan
    prefix: Plan
    trees: Trees
    depths: Int32[Tensor, "b w"]
    ancestors: Int64[Tensor, "b w words"]

    def __post_init__(self) -> None:
        """Check the types and shapes, and the lengths if they are on the host."""
        for name in ("whole", "prefix"):
            level = getattr(self, name)
            if not isinstance(level, Plan) or level.block_size is None or level.positions is None:
                raise ValueError(f"{name}: expected a Plan over pages with positions, got {describe(level)}")
            if level.first_visible is not None:
                raise ValueError(f"{name}: expected no intervals, as a node sees its ancestors, got first_visible")
        if not isinstance(self.trees, Trees):
            raise ValueError(f"trees: expected Trees, got {describe(self.trees)}")
        check_trees(self.whole.batch, self.trees)
        check(
            dict(w=self.trees.max_len, words=self.trees.num_words),
            seq_lens=(self.whole.batch.seq_lens, "int32 b"),
            depths=(self.depths, "int32 b w"),
            ancestors=(self.ancestors, "int64 b w words"),
        )
        check_side_by_side("depths", self.depths)
        check_side_by_side("ancestors", self.ancestors)
        whole, prefix = self.whole.batch.seq_lens, self.prefix.batch.seq_lens
        if whole.is_cpu and not torch.equal(whole - self.trees.lens, prefix):
            raise ValueError(
                f"prefix: expected the {(whole - self.trees.lens).tolist()} keys before the trees, "
                f"got {prefix.tolist()}"
            )

    @property
    def batch(self) -> Batch:
        """The lengths and the block table."""
        return self.whole.batch

    @property
    def own(self) -> Plan:
        """The plan over the keys not shared, new tokens included: `whole`."""
        return self.whole

    @property
    def sequences(self) -> Int32[Tensor, "b"] | None:
        """The sequence of the batch that each sequence of the plan belongs to, as in a plan without trees."""
        return self.whole.sequences

    @property
    def levels(self) -> "tuple[TreePlan, ...]":
        """The levels of the plan: this one only."""
        return (self,)


AttentionPlan = Plan | CascadePlan | TreePlan  # the plans of attention over any storage


class Accepted(NamedTuple):
    """The accepted branch of each tree, from its root on, and the token that follows it.

    Attributes:
        nodes: the accepted nodes, rising; -1 past the last.
        lens: the number of accepted nodes, the root included; 0 for a sequence without a tree.
        next_tokens: the model's token after the last accepted node; -1 for a sequence without a tree, or if the model's
            probabilities are not valid.
    """

    nodes: Int32[Tensor, "b w"]
    lens: Int32[Tensor, "b"]
    next_tokens: Int64[Tensor, "b"]


class DraftStep(NamedTuple):
    """A pass of a draft model that extends several branches by one token each.

    Attributes:
        batch: the newest node of each branch as query rows, and all keys up to them.
        trees: the branches so far as interleaved chains: the nodes of a pass come after those of the previous pass.
        plan: the plan for every layer; a `TreePlan` if there are several branches.
    """

    batch: Batch
    trees: Trees
    plan: Plan | TreePlan


def check_trees(batch: Batch, trees: Trees) -> None:
    """Check that trees fit a batch.

    Raises:
        ValueError: if there is not one tree per sequence, or the devices differ; on a CPU also if the lengths of the
            batch are not valid, or a sequence has fewer keys than nodes or fewer nodes than query rows.
    """
    check_lengths(batch)
    if not isinstance(trees, Trees):
        raise ValueError(f"trees: expected Trees, from make_trees, got {describe(trees)}")
    check(seq_lens=(batch.seq_lens, "int32 b"), tree_lens=(trees.lens, "int32 b"))
    if not batch.seq_lens.is_cpu:
        return
    wrong = (batch.query_lens > trees.lens) | (trees.lens > batch.seq_lens)
    if wrong.any():
        i = int(wrong.int().argmax())
        raise ValueError(
            f"tree_lens: expected at least the {int(batch.query_lens[i])} query rows of sequence {i}, and at most its "
            f"{int(batch.seq_lens[i])} keys, got {int(trees.lens[i])} nodes"
        )


def check_draft_steps(batch: Batch, *, block_size: int, num_steps: int, num_branches: int) -> None:
    """Check the sizes of a draft: the passes of the draft model and the number of branches.

    Raises:
        ValueError: naming the size that does not fit; on a CPU also if the block table has too few columns for the
            drafts.
    """
    check_lengths(batch)
    check_sizes(block_size=block_size, num_steps=num_steps, num_branches=num_branches)
    if num_steps * num_branches > MOST_NODES:
        raise ValueError(
            f"num_steps: expected at most {MOST_NODES} nodes together, got {num_steps} steps of {num_branches}"
        )
    new_lens = batch.query_lens.long().clamp(max=1) * (num_steps * num_branches)
    check_block_table(batch, block_size=block_size, new_lens=new_lens)


def check_parents(parents: Sequence[Sequence[int]]) -> None:
    """Check the parents of nodes, as Python lists; `Trees` checks their order.

    Raises:
        ValueError: naming the first that is not a list, or not an int.
    """
    check_list("parents", parents, "trees, each a list of parents")
    for i, nodes in enumerate(parents):
        check_list(f"parents[{i}]", nodes, "parents")
        for parent in nodes:
            if not is_int(parent):
                raise ValueError(f"parents[{i}]: expected Python ints, got {describe(parent)}")


def check_tree_mask(visible: Tensor) -> None:
    """Check the type and shape of the mask of a tree.

    Raises:
        ValueError: if it is not bool `[w, w]`.
    """
    check(visible=(visible, "bool w w"))


def check_drafts(batch: Batch, trees: Trees, **tokens: Tensor) -> None:
    """Check a verification: every node is a query row, node 0 is the only root, and every row has a token.

    Raises:
        ValueError: naming the argument that does not fit; lengths and parents are read on a CPU only.
    """
    check_lengths(batch)
    check_trees(batch, trees)
    rows = check(
        seq_lens=(batch.seq_lens, "int32 b"), **{name: (tensor, "int64 t") for name, tensor in tokens.items()}
    ).get("t")
    if not trees.lens.is_cpu:
        return
    if not torch.equal(batch.query_lens, trees.lens):
        raise ValueError(
            f"tree_lens: expected {batch.query_lens.tolist()}, as every node is a query row, got {trees.lens.tolist()}"
        )
    if rows is not None and rows < int(batch.cu_seqlens_q[-1]):
        name = next(iter(tokens))
        raise ValueError(f"{name}: expected at least the {int(batch.cu_seqlens_q[-1])} query rows, got t={rows}")
    is_node = torch.arange(trees.max_len, device=trees.lens.device) < trees.lens[:, None]
    roots = (is_node & (trees.parents == -1)).sum(-1)
    if (roots > 1).any():
        i = int(roots.argmax())
        raise ValueError(f"parents: expected node 0 as the only root of sequence {i}, got {int(roots[i])} roots")


def check_probabilities(
    batch: Batch, drafts: Tensor, target_probs: Tensor, uniforms: Tensor, draft_probs: Tensor | None
) -> None:
    """Check distributions `[t, v]` and random numbers `[t]` for tokens `[t]`; on a CPU also tokens and numbers.

    Raises:
        ValueError: naming the argument that does not fit.
    """
    sizes = check(
        drafts=(drafts, "int64 t"),
        target_probs=(target_probs, "float t v"),
        uniforms=(uniforms, "float t"),
        draft_probs=(draft_probs, "float t v or None"),
    )
    t, v = sizes["t"], sizes["v"]
    if drafts.is_cpu and t and not 0 <= int(drafts.min()) <= int(drafts.max()) < v:
        raise ValueError(f"drafts: expected tokens in 0..{v - 1}, got {int(drafts.min())}..{int(drafts.max())}")
    if uniforms.is_cpu:
        numbers = uniforms[: int(batch.cu_seqlens_q[-1])]  # the rest is padding
        wrong = ~((numbers >= 0) & (numbers <= 1))
        if wrong.any():
            raise ValueError(f"uniforms: expected random numbers in [0, 1), got {float(numbers[wrong][0])}")


def check_accepted(batch: Batch, trees: Trees, accepted: Accepted) -> None:
    """Check that accepted nodes are nodes of the trees of a batch, in ascending order.

    Raises:
        ValueError: naming the argument that does not fit; nodes are read on a CPU only.
    """
    check_trees(batch, trees)
    if not isinstance(accepted, Accepted):
        raise ValueError(f"accepted: expected an Accepted, got {describe(accepted)}")
    check_accepted_lens(batch, trees, accepted.lens, name="accepted.lens")
    nodes_of = {"accepted.nodes": (accepted.nodes, "int32 b w")}
    check(dict(w=trees.max_len), tree_lens=(trees.lens, "int32 b"), **nodes_of)
    if not trees.lens.is_cpu:
        return
    for i, (nodes, count, tree_len) in enumerate(
        zip(accepted.nodes.tolist(), accepted.lens.tolist(), trees.lens.tolist(), strict=True)
    ):
        path = nodes[:count]
        if path != sorted(set(path)) or (path and not 0 <= path[0] <= path[-1] < tree_len):
            raise ValueError(f"accepted.nodes: expected rising nodes in 0..{tree_len - 1} of sequence {i}, got {path}")


def check_accepted_lens(batch: Batch, trees: Trees, lens: Tensor, *, name: str = "lens") -> None:
    """Check the number of accepted nodes of each tree; `name` is its name in errors.

    Raises:
        ValueError: if it is not int32 `[b]`; on a CPU also if it exceeds the number of nodes.
    """
    check_trees(batch, trees)
    check(tree_lens=(trees.lens, "int32 b"), **{name: (lens, "int32 b")})
    if lens.is_cpu and ((lens < 0) | (lens > trees.lens)).any():
        raise ValueError(f"{name}: expected at most {trees.lens.tolist()} nodes, got {lens.tolist()}")


def check_caches(
    caches: Sequence[Tensor], batch: Batch, trees: Trees, accepted: Accepted, *, block_size: int
) -> Int32[Tensor, "b m"]:
    """Check pools `[n, p, ...]` in which accepted nodes are to be moved, and the blocks of these moves.

    Other entries of the table are not checked: in the pool of a sliding window, freed blocks are -1.

    Returns:
        The block table.

    Raises:
        ValueError: naming the pool, what was expected and what was given; the table is read on a CPU only.
    """
    check_lengths(batch)
    block_table = check_block_table(batch, block_size=block_size)
    check_list("caches", caches, "pools")
    num_blocks = _blocks_of_moves(block_table, batch, trees, accepted, block_size) if trees.lens.is_cpu else 0
    for i, cache in enumerate(caches):
        is_pool = isinstance(cache, Tensor) and is_ordinary(cache) and cache.ndim >= 2
        if not is_pool or cache.shape[1] != block_size:
            raise ValueError(f"caches[{i}]: expected a pool [n, p={block_size}, ...], got {describe(cache)}")
        check_own_memory(f"caches[{i}]", cache)
        same_device(seq_lens=batch.seq_lens, **{f"caches[{i}]": cache})
        check_can_be_written(**{f"caches[{i}]": cache})
        if num_blocks > len(cache):
            raise ValueError(
                f"caches[{i}]: expected at least {num_blocks} blocks, as in the block table, got n={len(cache)}"
            )
    check_pools_apart("caches", caches)
    return block_table


def _blocks_of_moves(block_table: Tensor, batch: Batch, trees: Trees, accepted: Accepted, block_size: int) -> int:
    """Return the minimum number of blocks of a pool for the source and destination slots of accepted nodes.

    Raises:
        ValueError: if a sequence has no block for such a slot.
    """
    tables, firsts = block_table.tolist(), (batch.seq_lens - trees.lens).tolist()
    num_blocks = 0
    for i, (nodes, count) in enumerate(zip(accepted.nodes.tolist(), accepted.lens.tolist(), strict=True)):
        for target, node in enumerate(nodes[:count]):
            for place in (firsts[i] + target, firsts[i] + node) if node != target else ():
                block = tables[i][place // block_size]
                if block < 0:
                    raise ValueError(
                        f"block_table: expected entries of at least 0 for the blocks whose nodes move in sequence {i}, "
                        f"got {block} in column {place // block_size}"
                    )
                num_blocks = max(num_blocks, block + 1)
    return num_blocks
