"""The FlashAttention-2 inside PyTorch, over ragged rows; it needs no other package.

It has one head size for keys and values. Smaller values are padded with zeros.

Source: PyTorch, `aten::_flash_attention_forward`, built on Dao 2023, "FlashAttention-2".
"""

import torch
from jaxtyping import Float
from torch import Tensor

from fastattn.kernels.device import capability
from fastattn.kernels.flash import NO_INTERVALS, NO_POSITIONS, NOT_ALIGNED, one_head_size, pad_values
from fastattn.kernels.kernel import LEVELS, PAGES, PLAN, Kernel, options_of
from fastattn.kernels.problem import FAR, Problem, cu_seqlens_k_of, window_within_reach
from refattn.keys import Keys, Rows
from refattn.options import AttentionOptions
from refattn.plan import Plan
from refattn.trees import AttentionPlan


def unsupported_reason(problem: Problem) -> str | None:
    """Return why this kernel can't compute a problem, or None."""
    if problem.device.type != "cuda":
        return f"computes on CUDA, the tensors are on {problem.device.type}"
    if capability(problem.device) < (8, 0):
        return "needs a GPU of compute capability 8.0 or newer"
    if problem.dtype not in (torch.float16, torch.bfloat16):
        return f"computes float16 and bfloat16, not {problem.dtype}"
    if (sizes := one_head_size(problem)) is not None:
        return sizes
    if problem.head_size > 256 or problem.head_size % 8:
        return f"head sizes that are multiples of 8 up to 256, not {problem.head_size}"
    if problem.softcap:
        return "PyTorch does not hand softcap on to its FlashAttention"
    if problem.alibi:
        return "PyTorch builds its FlashAttention without ALiBi: take fa2 or triton"
    if problem.positions:
        return NO_POSITIONS
    if problem.intervals:
        return NO_INTERVALS
    if not problem.aligned:
        return NOT_ALIGNED
    return None


KERNEL = Kernel(
    "torch_flash",
    unsupported_reason,
    attends=("rows",),
    knows=options_of("softmax_scale", "sinks", "batch_invariant") | PLAN | LEVELS | PAGES,
    functions={"attend": f"{__name__}:attend"},
)


def attend(
    query: Float[Tensor, "t h d"],
    keys: Keys,
    plan: AttentionPlan,
    options: AttentionOptions,
    out: Float[Tensor, "t h dv"] | None,
) -> tuple[Float[Tensor, "t h dv"], Float[Tensor, "t h"]]:
    """Attend to rows; see `fastattn.dispatch`."""
    assert isinstance(keys, Rows)  # of no other storage is its operation
    (level,) = plan.levels
    return dense(query, *keys, level.whole, options, out)


def dense(
    query: Float[Tensor, "t h d"],
    key: Float[Tensor, "s hk d"],
    value: Float[Tensor, "s hk dv"],
    plan: Plan,
    options: AttentionOptions,
    out: Float[Tensor, "t h dv"] | None,
) -> tuple[Float[Tensor, "t h dv"], Float[Tensor, "t h"]]:
    """Attend over ragged rows; see `fastattn.dispatch`."""
    from fastattn.kernels.gpu.fixup import empty_output, fix_up
    from fastattn.kernels.gpu.recompute import recompute
    from fastattn.kernels.gpu.tile import with_positive_scale

    batch = plan.batch
    if 0 in (query.shape[0], key.shape[0], batch.num_seqs):
        return empty_output(query, value.shape[-1], plan, options)
    causal, window, longest = window_for_flash(plan, options)
    signed, scale = with_positive_scale(query, options.softmax_scale)  # it masks before it scales
    out, lse, *_ = torch.ops.aten._flash_attention_forward(
        signed,
        key,
        pad_values(value, query.shape[-1]),
        batch.cu_seqlens_q,
        cu_seqlens_k_of(plan),
        max(batch.max_query_len, 2),  # with 1 it takes row `i` for sequence `i`, which one with no queries breaks
        longest,
        0.0,
        causal,
        False,
        scale=scale,
        window_size_left=window[0],
        window_size_right=window[1],
    )
    out, lse = fix_up(out[..., : value.shape[-1]].contiguous(), lse, plan, options)
    if plan.window[0] >= 0:  # past a sequence's end it reads zeros, before a window what is there
        recompute(out, query, key, value, plan, options)
    return out, lse


def window_for_flash(plan: Plan, options: AttentionOptions) -> tuple[bool, tuple[int, int], int]:
    """Write a window so that FlashAttention-2 understands what we mean.

    It takes a side that is at least its `max_seqlen_k` for no limit, and a missing right side next to a left one for
    `max_seqlen_k`; with more queries than keys both are wrong. A `max_seqlen_k` that no distance reaches makes both
    right. Its causal kernel leaves out the part of ALiBi that is constant in a row, which is in our LSE; a left side,
    one that hides nothing if need be, makes it take the other kernel, whose bias is `-slope * |distance|` as ours.

    Returns:
        Whether to say causal, the window, and `max_seqlen_k`.
    """
    batch, (left, right) = plan.batch, window_within_reach(plan)
    longest = min(batch.max_seq_len + batch.max_query_len + 1, FAR)
    if options.alibi_slopes is not None and right == 0 and not 0 <= left < longest:
        left = longest - 1
    return left < 0 and right == 0, (left, right), longest
