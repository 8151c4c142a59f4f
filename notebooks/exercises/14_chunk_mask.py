"""14 · Local chunks, as in Llama 4."""

import torch
from jaxtyping import Bool
from torch import Tensor


def chunk_mask(query_len: int, seq_len: int, chunk_size: int) -> Bool[Tensor, "t s"]:
    """Return True where a query may see a key: in its own chunk, up to itself. The first chunk begins at position 0.

    The queries are the last `query_len` of `seq_len` tokens.
    query_len 3, seq_len 5, chunk_size 2:
        . . 1 . .
        . . 1 1 .
        . . . . 1
    """
    raise NotImplementedError
