"""2 · Padding that writes.

A request ends in nonsense, rarely, and only where steps are padded to a fixed size for CUDA graphs.

Reported: vLLM 43810: https://github.com/vllm-project/vllm/issues/43810
"""

from typing import Any

import torch
from torch import Tensor


def broken(pool: Tensor, new: Tensor, slots: list[int]) -> Tensor:
    """Return the pool with each new row written to its slot; the slot -1 marks padding, which is skipped."""
    pool = pool.clone()
    pool[torch.tensor(slots, dtype=torch.long)] = new
    return pool


def failing_case() -> dict[str, Any]:
    """Return a small case that `broken` gets wrong.

    dict(num_slots=..., slots=[...]): the rows of the pool, and a slot for each new row.
    """
    return dict(num_slots=4, slots=[0, -1])


def mended(pool: Tensor, new: Tensor, slots: list[int]) -> Tensor:
    """Do what `broken` should do."""
    pool = pool.clone()
    for row, slot in zip(new, slots, strict=True):
        if slot >= 0:
            pool[slot] = row
    return pool
