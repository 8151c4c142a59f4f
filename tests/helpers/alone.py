"""Sequences by themselves: with `batch_invariant` their rows have the bits that they have in company."""

from collections.abc import Callable
from typing import Any

import torch

from refattn.batch import Batch


def alone(batch: Batch, sequence: int, query_len: int, seq_len: int) -> Batch:
    """Return the first `seq_len` keys of one sequence of a batch, with the last `query_len` of them as queries."""
    cu_seqlens_q, seq_lens = (torch.tensor(x, dtype=torch.int32) for x in ([0, query_len], [seq_len]))
    table = batch.block_table[sequence : sequence + 1].clone()
    return Batch(cu_seqlens_q.to(batch.device), seq_lens.to(batch.device), table, query_len, seq_len)


def assert_rows_do_not_change(attention: Callable[..., Any], query: torch.Tensor, *pools_and_batch: Any) -> Any:
    """Hold the rows of each sequence to those that it has alone, and with its last queries alone; return the answer.

    `attention` takes a query, pools and a batch, and returns outputs and their log-sum-exps.
    """
    *pools, batch = pools_and_batch
    answer = attention(query, *pools, batch)
    for i, ((first, end), s) in enumerate(zip(batch.query_rows(), batch.seq_lens.tolist(), strict=True)):
        q = end - first
        for count in {q, q // 3 + 1} if q else {}:
            rows = slice(end - count, end)
            again = attention(query[rows], *pools, alone(batch, i, count, s))
            for one, other in zip(again, answer, strict=True):
                assert torch.equal(one, other[rows]), f"the last {count} of {q} rows of sequence {i} changed"
    return answer
