"""6 · What the last tenant left.

A user gets NaN once in a while, after another user's request overflowed. The mask is right, and was checked.

Reported: found in the fast twin of this project
"""

from typing import Any

import torch
from torch import Tensor


def broken(query: Tensor, key_cache: Tensor, value_cache: Tensor, blocks: list[int], seq_len: int) -> Tensor:
    """Return the answer of one query over the tokens of a sequence, in some blocks of the pools [n, p, d]."""
    key, value = (cache[blocks].flatten(0, 1) for cache in (key_cache, value_cache))
    scores = key @ query / len(query) ** 0.5
    scores = scores.masked_fill(torch.arange(len(key)) >= seq_len, -torch.inf)
    return scores.softmax(0) @ value


def failing_case() -> dict[str, Any]:
    """Return a small case that `broken` gets wrong.

    dict(seq_len=..., block_size=..., stale=...): `stale` is what lies in slots that no token has been written to.
    """
    return dict(seq_len=3, block_size=4, stale=float("nan"))


def mended(query: Tensor, key_cache: Tensor, value_cache: Tensor, blocks: list[int], seq_len: int) -> Tensor:
    """Do what `broken` should do."""
    key, value = (cache[blocks].flatten(0, 1)[:seq_len] for cache in (key_cache, value_cache))
    scores = key @ query / len(query) ** 0.5
    scores = scores.masked_fill(torch.arange(len(key)) >= seq_len, -torch.inf)
    return scores.softmax(0) @ value
