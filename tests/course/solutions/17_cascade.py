"""17 · Cascade: a shared prefix, read once."""

import torch
from jaxtyping import Float, Int32
from torch import Tensor

from refattn import chunked_prefill
from refattn.batch import Batch
from refattn.merge import merge


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
    columns = prefix_len // key_cache.shape[1]
    everyone = torch.tensor([0, len(query)], dtype=torch.int32)
    prefix_lens = torch.tensor([prefix_len], dtype=torch.int32)
    prefix_batch = Batch(everyone, prefix_lens, block_table[:1], len(query), prefix_len)
    plan = chunked_prefill.plan(prefix_batch, block_size=key_cache.shape[1], causal=False)
    prefix = chunked_prefill.attention(query, key_cache, value_cache, plan, return_lse=True)
    own_lens = seq_lens - prefix_len
    own_batch = Batch(cu_seqlens_q, own_lens, block_table[:, columns:].contiguous(), len(query), int(own_lens.max()))
    plan = chunked_prefill.plan(own_batch, block_size=key_cache.shape[1])
    own = chunked_prefill.attention(query, key_cache, value_cache, plan, return_lse=True)
    return merge([prefix[0], own[0]], [prefix[1], own[1]])
