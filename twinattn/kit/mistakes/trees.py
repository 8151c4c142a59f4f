"""Mistakes in trees of drafted tokens."""

from dataclasses import replace

import torch
from torch import Tensor

from twinattn.kit.example import Arguments, Example
from twinattn.kit.mistakes.formula import Attention
from twinattn.kit.mistakes.where import given, has, most_nodes, of_growing_trees


class TreeIgnored(Attention):
    """The tree is ignored: a node sees all nodes before it, siblings among them."""

    paths: tuple[str, ...] = ("speculative",)

    def _in_tree(self, visible: Tensor, mask: Tensor) -> Tensor:
        return visible


class BranchHidden(Attention):
    """A node sees the keys before the tree and itself, but not its ancestors in the tree."""

    paths: tuple[str, ...] = ("speculative",)

    def _in_tree(self, visible: Tensor, mask: Tensor) -> Tensor:
        q, s = mask.shape
        return visible & torch.cat([mask[:, : s - q], torch.eye(q, dtype=torch.bool)], dim=-1)


class WindowOverTree(Attention, is_base=True):
    """A base with the mask of a tree without a window."""

    paths: tuple[str, ...] = ("speculative",)

    def _related(self) -> Tensor:
        """Return the mask without a window, `[t, s]`."""
        options = {name: value for name, value in self.example.options.items() if name != "window_size"}
        return replace(self.example, options=options).masks()[self.sequence]


class WindowBySlot(WindowOverTree):
    """The window counts slots, not positions along a branch: siblings push earlier keys out of it."""

    where = given("window_size")

    def _in_tree(self, visible: Tensor, mask: Tensor) -> Tensor:
        (t, s), left = mask.shape, self.window_of_tree
        in_window = torch.arange(s) >= torch.arange(s - t, s)[:, None] - left
        return super()._in_tree(visible, self._related() & (in_window if left >= 0 else True))


class WindowIgnored(WindowOverTree):
    """The window is ignored: a query sees keys before it."""

    where = given("window_size")

    def _in_tree(self, visible: Tensor, mask: Tensor) -> Tensor:
        return super()._in_tree(visible, self._related())


class AncestorsInOneWord(WindowOverTree):
    """The ancestors of a node are bits of one word: nodes past its end wrap around, or are lost."""

    variants = tuple((bits, how) for bits in (32, 64) for how in ("wrap", "wrap, and later nodes too", "are lost"))

    @classmethod
    def may_show(cls, example: Example, arguments: Arguments, variant: tuple[int, str]) -> bool:
        """Return whether there are more nodes than bits, or a window, which counts them, too."""
        return most_nodes(example) > variant[0] or has(arguments, "window_size")

    def _in_tree(self, visible: Tensor, mask: Tensor) -> Tensor:
        bits, how = self.variant
        parents = self.example.parents(self.sequence)
        words: list[set[int]] = []
        for node, parent in enumerate(parents):
            words.append({node % bits} | (words[parent] if parent >= 0 else set()))
        n, (t, s) = len(parents), mask.shape
        at, bit = torch.arange(n), torch.zeros(n, bits, dtype=torch.bool)
        for row, word in zip(bit, words, strict=True):
            row[list(word)] = True
        seen = mask.clone()
        seen[:, s - n :] = bit[n - t :, at % bits] if how != "are lost" else mask[:, s - n :] & (at < bits)
        if how != "wrap":
            return torch.cat([seen, visible[:, s:]], dim=-1)
        return super()._in_tree(visible, seen)


class BranchPastACount(WindowOverTree):
    """The search for ancestors stops after a number of steps: earlier ones are lost."""

    variants = (4, 8, 16, 32, 64)

    @classmethod
    def may_show(cls, example: Example, arguments: Arguments, variant: int) -> bool:
        """Return whether a branch may be longer than the limit."""
        return most_nodes(example) > variant

    def _in_tree(self, visible: Tensor, mask: Tensor) -> Tensor:
        depths: list[int] = []
        for parent in self.example.parents(self.sequence):
            depths.append(depths[parent] + 1 if parent >= 0 else 0)
        (t, s), n, seen = mask.shape, len(depths), mask.clone()
        depth = torch.tensor(depths)
        seen[:, s - n :] &= depth[n - t :, None] - depth <= self.variant
        return super()._in_tree(visible, seen)


class TreeOfTheQueries(WindowOverTree):
    """The tree is assumed to begin with the first query row: all queries see the nodes before it."""

    where = of_growing_trees

    def _in_tree(self, visible: Tensor, mask: Tensor) -> Tensor:
        (t, s), seen = mask.shape, mask.clone()
        seen[:, s - len(self.example.parents(self.sequence)) : s - t] = True
        return super()._in_tree(visible, seen)


class AlibiBySlot(Attention):
    """ALiBi counts slots, not positions along a branch."""

    where = given("alibi_slopes")

    paths: tuple[str, ...] = ("speculative",)

    def _distance(self, pos: Tensor, j: Tensor) -> Tensor:
        return (pos - j).abs()
