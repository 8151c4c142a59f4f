"""Trees of drafted tokens: drawn ones, the batches that they make, and who sees whom in them, by hand."""

import random

import torch

from tests.helpers.batches import Case

CONTEXTS = (0, 1, 15, 16, 17, 33)


def draw_tree(nodes: int, seed: int, *, roots: int = 1) -> tuple[int, ...]:
    """Draw a tree: every node follows one of those before it."""
    draw = random.Random(seed)
    return tuple(-1 if node < roots else draw.randrange(node) for node in range(nodes))


def path_to(parents: tuple[int, ...], node: int) -> list[int]:
    """Climb from a node to its root, by hand."""
    path = [node]
    while parents[path[-1]] >= 0:
        path.append(parents[path[-1]])
    return path[::-1]


def masks_of_trees(case: Case, trees, window: int = -1) -> list[torch.Tensor]:
    """Draw who sees whom, one pair at a time: a window of `window` tokens before a query counts along its branch."""
    drawn = []
    for (q, s), parents in zip(case.lens, trees, strict=True):
        first, mask = s - len(parents), torch.zeros(q, s, dtype=torch.bool)
        for row, node in enumerate(range(len(parents) - q, len(parents))):
            path = path_to(parents, node)
            position = first + len(path) - 1
            for j in range(first):
                mask[row, j] = window < 0 or j >= position - window
            for depth, other in enumerate(path):
                mask[row, first + other] = window < 0 or first + depth >= position - window
        drawn.append(mask)
    return drawn


def case_of(trees, *, contexts=CONTEXTS, queries=None, **sizes) -> Case:
    """Make the batch of some trees, after contexts of several lengths; all nodes are query rows unless told."""
    lens = [(len(tree), contexts[i % len(contexts)] + len(tree)) for i, tree in enumerate(trees)]
    if queries is not None:
        lens = [(min(q, queries), s) for q, s in lens]
    return Case("trees", tuple(lens), **{"heads": (2, 1), "padding_rows": 2, **sizes})
