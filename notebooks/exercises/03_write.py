"""3 · Write new keys and values into the pool."""

import torch
from jaxtyping import Float, Int64
from torch import Tensor


def write(
    key: Float[Tensor, "t hk d"],
    value: Float[Tensor, "t hk dv"],
    key_cache: Float[Tensor, "n p hk d"],
    value_cache: Float[Tensor, "n p hk dv"],
    slot_mapping: Int64[Tensor, "t"],
) -> None:
    """Write the key and the value of each new token to its slot, in place; slot -1 marks padding: skip it.

    The caches have `n` blocks of `p` tokens, and a token has `hk` heads. Nothing is returned.
    In blocks of 4, the slot 9 is row 1 of block 2: `key_cache[2][1]`.
    """
    raise NotImplementedError
