"""8 · A step of a server: prompts and decodes in one batch, over the pool."""

import torch
from jaxtyping import Float, Int32
from torch import Tensor


def paged_attention(
    query: Float[Tensor, "t h d"],
    key_cache: Float[Tensor, "n p hk d"],
    value_cache: Float[Tensor, "n p hk dv"],
    cu_seqlens_q: Int32[Tensor, "b+1"],
    seq_lens: Int32[Tensor, "b"],
    block_table: Int32[Tensor, "b m"],
) -> tuple[Float[Tensor, "t h dv"], Float[Tensor, "t h"]]:
    """Return causal attention of each sequence's new tokens over all its tokens in the pool: outputs, log-sum-exps.

    Sequence i has the query rows from cu_seqlens_q[i] to before cu_seqlens_q[i + 1], and seq_lens[i] keys in the blocks
    of block_table[i]. cu_seqlens_q [0, 2, 3] and seq_lens [5, 7]: rows 0 and 1 are at positions 3 and 4 of the
    first sequence. Slots past the end of a sequence hold NaN, and table entries past its last block 10^6: use neither.
    """
    raise NotImplementedError
