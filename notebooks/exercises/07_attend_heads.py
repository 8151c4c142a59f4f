"""7 · Attention, for all heads: fewer key heads than query heads (GQA)."""

from jaxtyping import Bool, Float
from torch import Tensor


def attend_heads(
    query: Float[Tensor, "t h d"],
    key: Float[Tensor, "s hk d"],
    value: Float[Tensor, "s hk dv"],
    visible: Bool[Tensor, "t s"],
) -> tuple[Float[Tensor, "t h dv"], Float[Tensor, "t h"]]:
    """Return the outputs and the log-sum-exps of exercise 6 for every query head.

    There are g = h / hk query heads per key head, and neighbours share one: query head i reads key head i // g.
    4 query heads and 2 key heads: the query heads 0 and 1 read key head 0, and 2 and 3 read key head 1.
    """
    raise NotImplementedError
