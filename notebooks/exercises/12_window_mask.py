"""12 · A sliding window."""

import torch
from jaxtyping import Bool
from torch import Tensor


def window_mask(query_len: int, seq_len: int, window: int) -> Bool[Tensor, "t s"]:
    """Return True where a query may see a key: itself and those before it, `window` keys in all.

    The queries are the last `query_len` of `seq_len` tokens.
    query_len 2, seq_len 5, window 3:
        . 1 1 1 .
        . . 1 1 1
    """
    raise NotImplementedError
