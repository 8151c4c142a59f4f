"""9 · Merge partial outputs."""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor


def merge(
    outs: Sequence[Float[Tensor, "t h d"]], lses: Sequence[Float[Tensor, "t h"]]
) -> tuple[Float[Tensor, "t h d"], Float[Tensor, "t h"]]:
    """Combine the answers of the same queries over disjoint keys into the answer over all of them, with its LSE.

    Each part is the output and the log-sum-exp over its own keys; a part that saw nothing has the LSE -inf.
    outs 2 and 5 with LSEs log(2) and log(1), from 2 keys and 1 key of equal weight: out 3, LSE log(3).
    """
    raise NotImplementedError
