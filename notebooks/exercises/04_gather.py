"""4 · Read a sequence back."""

import torch
from jaxtyping import Float, Int32
from torch import Tensor


def gather(cache: Float[Tensor, "n p hk d"], blocks: Int32[Tensor, "m"], seq_len: int) -> Float[Tensor, "s hk d"]:
    """Return the first `seq_len` tokens of a sequence, in order, from the blocks that it owns.

    `blocks` may be longer than needed; entries past the last block are garbage (-1 or anything): do not
    use them.
    seq_len 5 with blocks [9, 2, -1] of 4 tokens: the four rows of block 9, and row 0 of block 2.
    """
    raise NotImplementedError
