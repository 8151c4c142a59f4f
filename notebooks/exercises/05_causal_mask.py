"""5 · Who may see whom."""

import torch
from jaxtyping import Bool
from torch import Tensor


def causal_mask(query_len: int, seq_len: int) -> Bool[Tensor, "t s"]:
    """Return True where a query may see a key: up to its own position.

    A sequence has `seq_len` tokens, and the queries are its last `query_len`; every token is a key.
    query_len 2, seq_len 4:
        1 1 1 .
        1 1 1 1
    """
    raise NotImplementedError
