"""18 · Attention sinks, as in gpt-oss."""

import torch
from jaxtyping import Float
from torch import Tensor


def add_sinks(
    out: Float[Tensor, "t h d"], lse: Float[Tensor, "t h"], sinks: Float[Tensor, "h"]
) -> tuple[Float[Tensor, "t h d"], Float[Tensor, "t h"]]:
    """Return a finished answer as if each head had one more key, of score `sinks[h]` and value 0; and its LSE.

    A query that saw nothing stays at 0, and its LSE is the sink.
    out 4, lse log(3), sink log(1): out 3, lse log(4).
    """
    raise NotImplementedError
