"""Set right what FlashAttention answers otherwise than we do: empty rows, padding rows, sinks.

One launch, and no second pass over the outputs: only rows that saw nothing are written (all, where it adds sinks).
"""

from typing import no_type_check

import torch
import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor

from refattn.batch import Batch

BLOCK_TOKENS = 32
BLOCK_SEQS = 64  # that are counted at a time


def adapt(
    out: Float[Tensor, "t h dv"],
    lse: Float[Tensor, "h t"],
    batch: Batch,
    sinks: Float[Tensor, "h"] | None = None,
    *,
    has_sinks: bool = False,
) -> tuple[Float[Tensor, "t h dv"], Float[Tensor, "t h"]]:
    """Answer 0 and `-inf` in padding rows and where the kernel said `+inf` or `-inf`, and add the sinks.

    Args:
        out: the kernel's outputs, changed in place; padding rows may hold anything.
        lse: its log-sum-exps, natural log, changed in place.
        batch: the lengths.
        sinks: one logit a head, where the kernel did not add them itself.
        has_sinks: it did, so that its log-sum-exps do not say which sequences have no keys.

    Returns:
        The same tensors, the log-sum-exps with tokens first.
    """
    num_tokens, num_heads, value_head_size = out.shape
    _adapt_kernel[-(-num_tokens // BLOCK_TOKENS), num_heads](
        out,
        lse,
        batch.cu_seqlens_q,
        batch.seq_lens if has_sinks else None,
        sinks,
        *out.stride(),
        *lse.stride(),
        num_tokens,
        batch.num_seqs,
        VALUE_HEAD_SIZE=value_head_size,
        BLOCK_TOKENS=BLOCK_TOKENS,
        BLOCK_SEQS=BLOCK_SEQS,
        num_warps=4 if sinks is not None else 1,
    )
    return out, lse.T


def nothing(
    query: Float[Tensor, "t h d"], value_head_size: int
) -> tuple[Float[Tensor, "t h dv"], Float[Tensor, "t h"]]:
    """Answer for a batch without a sequence, a query row or a key."""
    out = query.new_zeros(*query.shape[:2], value_head_size)
    return out, query.new_full(query.shape[:2], -torch.inf, dtype=torch.float32)


@triton.jit(do_not_specialize=["cu_seqlens_q", "seq_lens", "num_tokens", "num_seqs", "lse_head_stride"])
@no_type_check
def _adapt_kernel(
    out,
    lse,
    cu_seqlens_q,
    seq_lens,
    sinks,
    out_token_stride,
    out_head_stride,
    out_stride,
    lse_head_stride,
    lse_token_stride,
    num_tokens,
    num_seqs,
    VALUE_HEAD_SIZE: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_SEQS: tl.constexpr,
):
    tokens = tl.program_id(0).to(tl.int64) * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)
    head = tl.program_id(1)
    is_token = tokens < num_tokens
    is_query = tokens < tl.load(cu_seqlens_q + num_seqs)
    logs = tl.load(
        lse + head * lse_head_stride + tokens * lse_token_stride, mask=is_token & is_query, other=float("-inf")
    )
    logs = tl.where(logs == float("inf"), float("-inf"), logs)
    saw_nothing = logs == float("-inf")
    if seq_lens is not None:
        sequence = tl.zeros([BLOCK_TOKENS], tl.int32)  # how many end before the token
        for first in range(0, num_seqs, BLOCK_SEQS):
            seqs = first + tl.arange(0, BLOCK_SEQS)
            ends = tl.load(cu_seqlens_q + 1 + seqs, mask=seqs < num_seqs, other=num_tokens + 1)
            sequence += tl.sum((ends[None, :] <= tokens[:, None]).to(tl.int32), 1)
        saw_nothing |= tl.load(seq_lens + sequence, mask=is_token & is_query, other=0) == 0

    VALUE_PAD: tl.constexpr = triton.next_power_of_2(VALUE_HEAD_SIZE)
    at_dv = tl.arange(0, VALUE_PAD)
    places = (tokens * out_token_stride + head * out_head_stride)[:, None] + (at_dv * out_stride)[None, :]
    in_value = (at_dv < VALUE_HEAD_SIZE)[None, :]
    nowhere = tl.zeros([BLOCK_TOKENS, VALUE_PAD], out.dtype.element_ty)
    tl.store(out + places, nowhere, mask=(is_token & saw_nothing)[:, None] & in_value)
    if sinks is not None:
        sink = tl.load(sinks + head).to(tl.float32)
        share = 1.0 / (1.0 + tl.exp(sink - logs))  # exp(lse) / (exp(lse) + exp(sink))
        some = (is_token & (logs > float("-inf")))[:, None] & in_value
        values = tl.load(out + places, mask=some, other=0.0).to(tl.float32) * share[:, None]
        tl.store(out + places, values.to(out.dtype.element_ty), mask=some)
        higher = tl.maximum(logs, sink)
        logs = tl.where(is_query, higher + tl.log(tl.exp(logs - higher) + tl.exp(sink - higher)), logs)
    tl.store(lse + head * lse_head_stride + tokens * lse_token_stride, logs, mask=is_token)
