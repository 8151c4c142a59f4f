"""24 · Images in a prompt, as in Gemma 3."""

import torch
from jaxtyping import Bool
from torch import Tensor


def span_mask(query_len: int, seq_len: int, spans: list[tuple[int, int]], window: int) -> Bool[Tensor, "t s"]:
    """Return True where a query may see a key: (up to itself, or in the same span) and in the last `window` keys.

    The queries are the last `query_len` of `seq_len` tokens. A span is the first and the last token of an image. The
    window counts the query itself, and hides no later key.
    query_len 4, seq_len 5, spans [(2, 3)], window 3:
        1 1 . . .
        1 1 1 1 .
        . 1 1 1 .
        . . 1 1 1
    """
    raise NotImplementedError
