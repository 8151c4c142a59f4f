"""11 · What `fastattn` launches in Triton.

The same loop in one body for all storages and masks (fastattn/kernels/triton/attention.py): who may see whom, where
the keys are and what a layer asks for are arguments, and the compiler keeps of them what this call needs. `tune`
chooses the shape by the sizes of the call. On a Hopper GPU `fastattn` itself launches the next rung.

Gain: little; the log-sum-exp of each row is written, too. Three phases stand in the loop instead of two, as a window
has an edge on the left. Tiles begin in the order of their numbers here, not the longest first.

Source: fastattn/kernels/triton/attention.py, `attend` and `launch_attend`; tuning.py, `tune`.
"""

import torch
from jaxtyping import Float, Int32
from torch import Tensor

from fastattn import chunked_prefill
from fastattn.kernels.triton.attention import launch_attend
from fastattn.kernels.triton.merge import Out, whole
from fastattn.kernels.triton.tuning import bytes_of_a_program, fit, tune
from refattn.batch import Batch
from refattn.options import AttentionOptions
from refattn.plan import Plan
from twinattn.course.ladder import check_pages


def plan(
    cu_seqlens_q: Int32[Tensor, "_"],  # [b+1]
    seq_lens: Int32[Tensor, "b"],
    block_table: Int32[Tensor, "b m"],
    max_query_len: int,
    block_size: int,
) -> Plan:
    """Plan a step, once for all layers."""
    most = dict(max_query_len=max_query_len, max_seq_len=block_table.shape[1] * block_size)
    return chunked_prefill.plan(Batch(cu_seqlens_q, seq_lens, block_table, **most), block_size=block_size)


def attention(
    query: Float[Tensor, "t h d"],
    key_cache: Float[Tensor, "n p hk d"],
    value_cache: Float[Tensor, "n p hk d"],
    cu_seqlens_q: Int32[Tensor, "_"],  # [b+1]
    seq_lens: Int32[Tensor, "b"],
    block_table: Int32[Tensor, "b m"],
    max_query_len: int,
    softmax_scale: float | None = None,
    step: Plan | None = None,
) -> Float[Tensor, "t h d"]:
    """Attend from the last tokens of each sequence to all its tokens up to themselves."""
    check_pages(query, key_cache, value_cache, cu_seqlens_q, seq_lens, block_table)
    if step is None:
        step = plan(cu_seqlens_q, seq_lens, block_table, max_query_len, key_cache.shape[1])
    if len(query) == 0:
        return torch.empty_like(query)
    options, tensors = AttentionOptions(softmax_scale=softmax_scale), (query, key_cache, value_cache)
    row_bytes, key_bytes = bytes_of_a_program(*tensors, shared=False)
    tuning = tune(*tensors, step, options, row_bytes)._replace(splits=1, most_splits=1)  # a prompt has tiles enough
    tuning = fit(tuning, query.device, row_bytes=row_bytes, key_bytes=key_bytes)
    out, lse = torch.empty_like(query), query.new_empty(query.shape[:2], dtype=torch.float32)
    launch_attend(*tensors, step, options, tuning, Out(out, lse), whole())
    return out
