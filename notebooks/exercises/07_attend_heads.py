"""7 · Attention, for all heads: fewer KV heads than query heads (GQA)."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor


def attend_heads(
    query: Float[Tensor, "t h d"],
    key: Float[Tensor, "s hk d"],
    value: Float[Tensor, "s hk dv"],
    visible: Bool[Tensor, "t s"],
) -> tuple[Float[Tensor, "t h dv"], Float[Tensor, "t h"]]:
    """Return the outputs and the log-sum-exps of exercise 6 for every query head.

    There are g = h / hk query heads per KV head, and neighbours share one: query head i reads KV head i // g.
    4 query heads and 2 KV heads: the query heads 0 and 1 read KV head 0, and 2 and 3 read KV head 1.
    """
    raise NotImplementedError
