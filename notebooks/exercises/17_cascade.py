"""17 · Cascade: a shared prefix, read once."""

import torch
from jaxtyping import Float, Int32
from torch import Tensor


def cascade(
    query: Float[Tensor, "t h d"],
    key_cache: Float[Tensor, "n p hk d"],
    value_cache: Float[Tensor, "n p hk dv"],
    cu_seqlens_q: Int32[Tensor, "b+1"],
    seq_lens: Int32[Tensor, "b"],
    block_table: Int32[Tensor, "b m"],
    prefix_len: int,
) -> tuple[Float[Tensor, "t h dv"], Float[Tensor, "t h"]]:
    """Return what exercise 8 returns: outputs and log-sum-exps, causal over all tokens of each sequence.

    All sequences begin with the same `prefix_len` tokens, whole blocks, which end before any query. Only the row of the
    first sequence names their blocks; in other rows -1 stands there. Let all queries at once see the prefix, and merge.
    """
    raise NotImplementedError
