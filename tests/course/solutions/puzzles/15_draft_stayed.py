"""15 · The draft that stayed.

With drafted tokens, the answers of a hybrid model change. Its attention layers are right: after a rejected draft the
cache is cropped to the accepted tokens.

Reported: transformers 49036: https://github.com/huggingface/transformers/issues/49036
"""

from typing import Any

import torch
from torch import Tensor


def broken(state: Tensor, keys: Tensor, values: Tensor, accepted: int) -> tuple[Tensor, Tensor]:
    """Return the keys [n, dk] and the state [dv, dk] that a step of tokens leaves, if the first `accepted` are kept."""
    for key, value in zip(keys, values, strict=True):
        state = 0.5 * state + torch.outer(value, key)
    return keys[:accepted], state


def failing_case() -> dict[str, Any]:
    """Return a small case that `broken` gets wrong.

    dict(num_tokens=..., accepted=...): the tokens of the step, the first of which is no draft, and how many are kept.
    """
    return dict(num_tokens=3, accepted=1)


def mended(state: Tensor, keys: Tensor, values: Tensor, accepted: int) -> tuple[Tensor, Tensor]:
    """Do what `broken` should do."""
    for key, value in zip(keys[:accepted], values[:accepted], strict=True):
        state = 0.5 * state + torch.outer(value, key)
    return keys[:accepted], state
