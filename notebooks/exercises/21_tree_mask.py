"""21 · A tree of drafted tokens."""

import torch
from jaxtyping import Bool
from torch import Tensor


def tree_mask(parents: list[int]) -> Bool[Tensor, "n n"]:
    """Return True where a drafted token may see another: its ancestors, and itself.

    `parents[i]` is the token that token i follows, always an earlier one, or -1 for a token that begins a branch.
    parents [-1, 0, 0]:
        1 . .
        1 1 .
        1 . 1
    """
    raise NotImplementedError
