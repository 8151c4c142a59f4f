"""10 · Softmax in one pass: the idea of FlashAttention."""

from collections.abc import Iterable

import torch
from jaxtyping import Float
from torch import Tensor


def online_softmax(
    tiles: Iterable[tuple[Float[Tensor, "k"], Float[Tensor, "k d"]]],
) -> tuple[Float[Tensor, "d"], Float[Tensor, ""]]:
    """Return the answer of one query over all its keys, and its LSE; the keys come tile by tile, and each only once.

    A tile is the scores of some keys and their values; its memory is used again for the next tile. Scores
    may be large (exp(1000) is inf), or -inf for hidden keys.
    Tiles ([0, 0], [1, 3]) and ([0], [5]): out 3, LSE log(3).
    """
    raise NotImplementedError
