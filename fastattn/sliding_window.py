"""Sliding windows by the fastest kernel over trimmed block tables; the twin of `refattn.sliding_window`."""

from dataclasses import replace

from jaxtyping import Float
from torch import Tensor

from fastattn import chunked_prefill, dispatch
from refattn.batch import Batch, check_block_table, check_lengths
from refattn.checks import check_window
from refattn.options import AttentionOptions
from refattn.plan import Plan


def plan(batch: Batch, *, window_size: tuple[int, int], block_size: int, causal: bool = True) -> Plan:
    """Remove the leading blocks that no query of a sequence can see; the twin of `refattn.sliding_window.plan`.

    All sizes follow from Python ints, so nothing synchronizes with a device, and a CUDA graph can capture the plan.
    """
    left, _ = check_window(window_size)
    block_table = check_block_table(batch, block_size=block_size)
    check_lengths(batch)
    if left < 0 or batch.max_seq_len < left + block_size:  # every query sees a key of the first block
        return Plan(batch, block_size, causal, window_size)
    # The keys that the queries of a sequence can see, and at most block_size - 1 keys before them.
    longest = min(batch.max_seq_len, left + batch.max_query_len + block_size - 1)
    columns = min(-(-longest // block_size), block_table.shape[1])
    first_keys, seq_lens, trimmed_table = dispatch.run(
        "trim", batch=batch, left=left, block_size=block_size, columns=columns
    )
    trimmed = replace(batch, seq_lens=seq_lens, block_table=trimmed_table, max_seq_len=longest, num_keys=None)
    return Plan(trimmed, block_size, causal, window_size, first_keys=first_keys)


def attention(
    query: Float[Tensor, "t h d"],
    key_cache: Float[Tensor, "n p hk d"],
    value_cache: Float[Tensor, "n p hk dv"],
    plan: Plan,
    options: AttentionOptions = AttentionOptions(),
    *,
    return_lse: bool = False,
    out: Float[Tensor, "t h dv"] | None = None,
) -> Float[Tensor, "t h dv"] | tuple[Float[Tensor, "t h dv"], Float[Tensor, "t h"]]:
    """Attend from the new tokens of each sequence to the keys in their windows; removed blocks are not read.

    Arguments, results and errors are those of `refattn.sliding_window.attention`.

    Raises:
        NotImplementedError: if no kernel computes the combination, with the reason of each.
    """
    return chunked_prefill.attention(query, key_cache, value_cache, plan, options, return_lse=return_lse, out=out)
