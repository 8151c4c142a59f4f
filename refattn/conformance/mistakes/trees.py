"""Mistakes in trees of drafted tokens."""

import torch
from torch import Tensor

from refattn.conformance.mistakes.formula import Attention


class TreeIgnored(Attention):
    """The tree is ignored: a node sees all nodes before it, siblings among them."""

    paths: tuple[str, ...] = ("speculative",)

    def _in_tree(self, visible: Tensor, mask: Tensor) -> Tensor:
        return visible


class BranchHidden(Attention):
    """A node sees no ancestor but those before the tree: its own branch is hidden, but for itself."""

    paths: tuple[str, ...] = ("speculative",)

    def _in_tree(self, visible: Tensor, mask: Tensor) -> Tensor:
        q, s = mask.shape
        return visible & torch.cat([mask[:, : s - q], torch.eye(q, dtype=torch.bool)], dim=-1)
