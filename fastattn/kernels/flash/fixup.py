"""Fix up the outputs of FlashAttention where its conventions differ from ours: empty rows, padding rows, NaN, sinks.

FlashAttention returns an LSE of `+inf` or `-inf` both for a query that sees no key and for one that sees NaN; the
lengths tell them apart. One launch reads the log-sum-exps, of some hundred tokens at a time, and writes only the
affected rows (all rows if sinks are added).
"""

from collections.abc import Callable
from typing import Any, NamedTuple, no_type_check

import torch
import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor

from fastattn.kernels.replay import key_of_launch, launch_once
from fastattn.kernels.triton.constants import next_power_of_2
from fastattn.kernels.triton.launch import Launch, can_overlap
from refattn.options import AttentionOptions
from refattn.plan import Plan

BLOCK_TOKENS = 32
MOST_STEPS = 16  # most steps of `BLOCK_TOKENS` per program; mostly there is nothing to fix
PROGRAMS = 1024  # fewest programs, if there is work for as many
BLOCK_SEQS = 64  # sequences that are counted at a time


def fix_up(
    out: Float[Tensor, "t h dv"],
    lse: Float[Tensor, "h t"],
    plan: Plan,
    options: AttentionOptions,
    *,
    by_lengths: bool = False,
) -> tuple[Float[Tensor, "t h dv"], Float[Tensor, "t h"]]:
    """Set padding rows and fully masked rows to 0 and `-inf`, rows that see NaN to NaN, and add the sinks.

    The kernel has computed without sinks: in its sum, one far above the scores would overflow, and spoil the LSE.

    Args:
        out: the kernel's outputs, changed in place if contiguous; padding rows may hold anything.
        lse: its log-sum-exps, natural log, changed in place.
        plan: the lengths and the window, from which fully masked rows are found.
        options: what the layer fixes: its sinks are added.
        by_lengths: the LSE of a fully masked row may be any number, so that the lengths alone tell it.

    Returns:
        The same tensors, the outputs contiguous, as `recompute` requires, the log-sum-exps with tokens first.
    """
    out = out.contiguous()  # FlashAttention-2 returns the layout of the query, heads before tokens for example
    num_tokens, num_heads, value_head_size = out.shape
    batch, sinks = plan.batch, None if options.sinks is None else options.sinks.contiguous()
    left, right = plan.window
    steps = 1
    while sinks is None and steps < MOST_STEPS and num_tokens * num_heads > 2 * steps * BLOCK_TOKENS * PROGRAMS:
        steps *= 2
    overlap = can_overlap(out.device)

    def launch() -> Callable[..., None]:
        return Launch(
            _adapt_kernel,
            (-(-num_tokens // (steps * BLOCK_TOKENS)), num_heads),
            {"output.out": out, "output.lse": lse, "sinks": sinks},
            dict(
                output=Output(out, lse, lse.stride(0), lse.stride(1)),
                cu_seqlens_q=batch.cu_seqlens_q,
                seq_lens=batch.seq_lens,
                num_tokens=num_tokens,
                num_seqs=batch.num_seqs,
                left=min(left, batch.max_seq_len + batch.max_query_len),  # no sum with a position overflows then
                right=min(right, batch.max_seq_len + batch.max_query_len),
                VALUE_HEAD_SIZE=value_head_size,
                BLOCK_TOKENS=BLOCK_TOKENS,
                BLOCK_SEQS=BLOCK_SEQS,
                STEPS=steps,
                BY_LENGTHS=by_lengths,
                OVERLAP=overlap,
            ),
            dict(num_warps=4 if sinks is not None or value_head_size > 256 else 1),
        ).replay

    launch_once(plan, key_of_launch(f"fix_up {by_lengths}", (out, lse), options), (out, lse, sinks), launch)
    return out, lse.T


def empty_output(
    query: Float[Tensor, "t h d"], value_head_size: int, plan: Plan, options: AttentionOptions
) -> tuple[Float[Tensor, "t h dv"], Float[Tensor, "t h"]]:
    """Return the output for a batch without a sequence, a query row or a key: 0, and the LSE of the sinks alone."""
    out = query.new_zeros(*query.shape[:2], value_head_size)
    lse = query.new_full(query.shape[:2], -torch.inf, dtype=torch.float32)
    if options.sinks is not None:
        is_query = torch.arange(len(query), device=query.device) < plan.batch.cu_seqlens_q[-1]
        lse = torch.where(is_query[:, None], options.sinks.float(), lse)
    return out, lse


class Output(NamedTuple):
    """The output of a package [t, h, dv], contiguous, its log-sum-exps [h, t], and their strides."""

    out: Any
    lse: Any
    lse_head_stride: Any
    lse_token_stride: Any


@triton.jit(
    do_not_specialize=["cu_seqlens_q", "seq_lens", "num_tokens", "num_seqs", "lse_head_stride", "left", "right"]
)
@no_type_check
def _adapt_kernel(
    output,
    cu_seqlens_q,
    seq_lens,
    sinks,
    num_tokens,
    num_seqs,
    left,
    right,
    VALUE_HEAD_SIZE: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_SEQS: tl.constexpr,
    STEPS: tl.constexpr,
    BY_LENGTHS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()  # the next launch that reads the outputs waits by itself
    head = tl.program_id(1).to(tl.int64)
    begin = tl.program_id(0).to(tl.int64) * STEPS * BLOCK_TOKENS
    num_used = tl.load(cu_seqlens_q + num_seqs)
    if STEPS > 1 and not BY_LENGTHS:  # nearly always there is nothing to fix, as one load of all tokens shows
        all_tokens = begin + tl.arange(0, STEPS * BLOCK_TOKENS)
        at = output.lse + head * output.lse_head_stride + all_tokens * output.lse_token_stride
        all_logs = tl.load(at, mask=all_tokens < num_used, other=0.0)
        is_padding = (all_tokens >= num_used) & (all_tokens < num_tokens)
        some = (all_logs != all_logs) | (tl.abs(all_logs) == float("inf")) | is_padding
        if tl.max(some.to(tl.int32), 0) == 0:
            return
    for step in range(STEPS):
        tokens = begin + step * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)
        is_token = tokens < num_tokens
        is_query = is_token & (tokens < num_used)
        logs = tl.load(
            output.lse + head * output.lse_head_stride + tokens * output.lse_token_stride, mask=is_query, other=0.0
        )
        is_nan_or_inf = (logs != logs) | (tl.abs(logs) == float("inf"))
        sees_nothing = is_token & (tokens >= num_used)
        asked = is_query if BY_LENGTHS else is_nan_or_inf
        if tl.max(asked.to(tl.int32), 0) > 0:  # seldom: a finite LSE means a visible key
            sequence = tl.zeros([BLOCK_TOKENS], tl.int32)  # sequences that end before the token
            for first in range(0, num_seqs, BLOCK_SEQS):
                seqs = first + tl.arange(0, BLOCK_SEQS)
                ends = tl.load(cu_seqlens_q + 1 + seqs, mask=seqs < num_seqs, other=num_tokens + 1)
                sequence += tl.sum((ends[None, :] <= tokens[:, None]).to(tl.int32), 1)
            seq_len = tl.load(seq_lens + sequence, mask=asked, other=0)
            position = seq_len - tl.load(cu_seqlens_q + 1 + sequence, mask=asked, other=0) + tokens
            first_key = tl.where(left < 0, 0, tl.maximum(position - left, 0))
            last_key = tl.where(right < 0, seq_len, tl.minimum(position + right + 1, seq_len))
            sees_nothing |= asked & (first_key >= last_key)
        is_nan_or_inf |= sees_nothing
        logs = tl.where(is_nan_or_inf, float("nan"), logs)
        logs = tl.where(sees_nothing, float("-inf"), logs)

        VALUE_PAD: tl.constexpr = next_power_of_2(VALUE_HEAD_SIZE)
        at_dv = tl.arange(0, VALUE_PAD)
        places = (tokens * tl.num_programs(1) + head)[:, None] * VALUE_HEAD_SIZE + at_dv[None, :]
        in_value = (at_dv < VALUE_HEAD_SIZE)[None, :]
        if tl.max(is_nan_or_inf.to(tl.int32), 0) > 0:
            rows = tl.where(sees_nothing, 0.0, float("nan"))[:, None] + tl.zeros([BLOCK_TOKENS, VALUE_PAD], tl.float32)
            tl.store(output.out + places, rows.to(output.out.dtype.element_ty), mask=is_nan_or_inf[:, None] & in_value)
        is_changed = is_nan_or_inf
        if sinks is not None:
            sink = tl.load(sinks + head).to(tl.float32)
            # exp(lse) / (exp(lse) + exp(sink)), in two factors: a GPU flushes one below 1e-38 to 0.
            root = tl.exp(tl.minimum(logs - sink, 0.0) * 0.5)
            share = root / (1.0 + tl.exp(-tl.abs(logs - sink)))
            some = (is_query & (logs > float("-inf")))[:, None] & in_value
            values = tl.load(output.out + places, mask=some, other=0.0).to(tl.float32) * share[:, None] * root[:, None]
            tl.store(output.out + places, values.to(output.out.dtype.element_ty), mask=some)
            higher = tl.maximum(logs, sink)
            with_sink = higher + tl.log(tl.exp(logs - higher) + tl.exp(sink - higher))
            logs = tl.where(is_query, with_sink, logs)
            is_changed = is_token
        tl.store(output.lse + head * output.lse_head_stride + tokens * output.lse_token_stride, logs, mask=is_changed)
