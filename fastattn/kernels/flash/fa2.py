"""FlashAttention-2: in the package `flash-attn`, over rows and over pages of a multiple of 256 tokens, and in PyTorch.

PyTorch's own, the kernel `torch_flash`, takes ragged rows and needs no other package. Both have one head size for keys
and values. Over rows, smaller values are padded with zeros.

Source: Dao 2023, "FlashAttention-2"; its split over keys for decodes is Dao et al. 2023, "Flash-Decoding";
    `aten::_flash_attention_forward` of PyTorch is built on it.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor

from fastattn.kernels.device import cannot_import, capability, on_gpu
from fastattn.kernels.flash import NO_INTERVALS, NO_POSITIONS, NOT_ALIGNED, one_head_size, pad_values, side_by_side
from fastattn.kernels.kernel import LEVELS, PAGES, PLAN, Kernel, options_of
from fastattn.kernels.problem import FAR, Problem, cu_seqlens_k_of, window_within_reach
from refattn.keys import Keys, Pages, Rows
from refattn.options import AttentionOptions
from refattn.plan import Plan
from refattn.trees import AttentionPlan

PAGE = 256  # tokens; page sizes are multiples of it
CHUNKS = "over pages it takes one query per sequence; with more, it writes LSEs out of place where a query sees nothing"


def unsupported_reason(problem: Problem) -> str | None:
    """Return why the package can't compute a problem, or None."""
    if (refused := _unsupported_by_both(problem)) is not None:
        return refused
    if problem.block_size is not None and problem.block_size % PAGE:
        return f"pages of a multiple of {PAGE} tokens, not {problem.block_size}"
    if problem.alibi_sqrt:
        return "multiplies the slopes of ALiBi by the distance, not by its root"
    if problem.block_size is not None and problem.max_query_len > 1:
        return CHUNKS
    broken = cannot_import("flash_attn", "flash-attn", "flash_attn_varlen_func", "flash_attn_with_kvcache")
    return broken or _refusal(problem.head_size, problem.dtype, problem.device)


def unsupported_reason_of_torch(problem: Problem) -> str | None:
    """Return why PyTorch's own can't compute a problem, or None."""
    if problem.softcap:
        return "PyTorch does not hand softcap on to its FlashAttention"
    if problem.alibi:
        return "PyTorch builds its FlashAttention without ALiBi: take fa2 or triton"
    return _unsupported_by_both(problem)


def _unsupported_by_both(problem: Problem) -> str | None:
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
    if problem.positions:
        return NO_POSITIONS
    if problem.intervals:
        return NO_INTERVALS
    return None if problem.aligned else NOT_ALIGNED


KERNEL = Kernel(
    "fa2",
    unsupported_reason,
    attends=("rows", "pages"),
    knows=options_of("softmax_scale", "softcap", "alibi_slopes", "sinks", "batch_invariant") | PLAN | LEVELS | PAGES,
    functions={"attend": f"{__name__}:attend"},
)
TORCH_FLASH = Kernel(
    "torch_flash",
    unsupported_reason_of_torch,
    attends=("rows",),
    knows=options_of("softmax_scale", "sinks", "batch_invariant") | PLAN | LEVELS | PAGES,
    functions={"attend": f"{__name__}:attend_by_torch"},
)


def attend(
    query: Float[Tensor, "t h d"],
    keys: Keys,
    plan: AttentionPlan,
    options: AttentionOptions,
    out: Float[Tensor, "t h dv"] | None,
) -> tuple[Float[Tensor, "t h dv"], Float[Tensor, "t h"]]:
    """Attend to rows, or to pages; see `fastattn.dispatch`."""
    (level,) = plan.levels
    if isinstance(keys, Rows):
        return varlen(query, *keys, level.own, options, out)
    assert isinstance(keys, Pages)  # the only other storage that it takes
    return paged(query, *keys, level.own, options, out)


def attend_by_torch(
    query: Float[Tensor, "t h d"],
    keys: Keys,
    plan: AttentionPlan,
    options: AttentionOptions,
    out: Float[Tensor, "t h dv"] | None,
) -> tuple[Float[Tensor, "t h dv"], Float[Tensor, "t h"]]:
    """Attend to rows by PyTorch's own; see `fastattn.dispatch`."""
    assert isinstance(keys, Rows)  # the operation is for rows alone
    (level,) = plan.levels

    def over_rows(
        causal: bool, window: tuple[int, int], scale: float, *tensors_and_lengths: Any
    ) -> tuple[Tensor, Tensor]:
        answer, lse, *_ = torch.ops.aten._flash_attention_forward(
            *tensors_and_lengths,
            0.0,
            causal,
            False,
            scale=scale,
            window_size_left=window[0],
            window_size_right=window[1],
        )
        return answer, lse

    return _varlen(query, *keys, level.own, options, over_rows)


def varlen(
    query: Float[Tensor, "t h d"],
    key: Float[Tensor, "s hk d"],
    value: Float[Tensor, "s hk dv"],
    plan: Plan,
    options: AttentionOptions,
    out: Float[Tensor, "t h dv"] | None,
) -> tuple[Float[Tensor, "t h dv"], Float[Tensor, "t h"]]:
    """Attend over ragged rows by the package; see `fastattn.dispatch`."""
    from flash_attn import flash_attn_varlen_func

    def over_rows(
        causal: bool, window: tuple[int, int], scale: float, *tensors_and_lengths: Any
    ) -> tuple[Tensor, Tensor]:
        answer, lse, _ = flash_attn_varlen_func(
            *tensors_and_lengths,
            softmax_scale=scale,
            causal=causal,
            window_size=window,
            softcap=options.softcap,
            alibi_slopes=_slopes(options),
            return_attn_probs=True,  # this is how to get the LSE
        )
        return answer, lse

    return _varlen(query, key, value, plan, options, over_rows)


def _varlen(
    query: Float[Tensor, "t h d"],
    key: Float[Tensor, "s hk d"],
    value: Float[Tensor, "s hk dv"],
    plan: Plan,
    options: AttentionOptions,
    over_rows: Callable[..., tuple[Tensor, Tensor]],
) -> tuple[Float[Tensor, "t h dv"], Float[Tensor, "t h"]]:
    """Attend over ragged rows by a function with FlashAttention-2's conventions, and convert to the project's."""
    from fastattn.kernels.flash.fixup import empty_output, fix_up
    from fastattn.kernels.flash.recompute import recompute
    from fastattn.kernels.problem import with_positive_scale

    batch = plan.batch
    if 0 in (query.shape[0], key.shape[0], batch.num_seqs):
        return empty_output(query, value.shape[-1], plan, options)
    causal, window, longest = window_for_flash(plan, options)
    signed, scale = with_positive_scale(query, options.softmax_scale)  # it masks before it scales
    out, lse = over_rows(
        causal,
        window,
        scale,
        signed,
        key,
        pad_values(value, query.shape[-1]),
        batch.cu_seqlens_q,
        cu_seqlens_k_of(plan),
        max(batch.max_query_len, 2),  # with 1 it takes row `i` for sequence `i`, wrong if one has no queries
        longest,
    )
    out, lse = fix_up(out[..., : value.shape[-1]].contiguous(), lse, plan, options)
    if plan.window[0] >= 0:  # keys left of the window may be NaN: recompute
        recompute(out, query, key, value, plan, options)
    return out, lse


def paged(
    query: Float[Tensor, "t h d"],
    key_cache: Float[Tensor, "n p hk d"],
    value_cache: Float[Tensor, "n p hk dv"],
    plan: Plan,
    options: AttentionOptions,
    out: Float[Tensor, "t h dv"] | None,
) -> tuple[Float[Tensor, "t h dv"], Float[Tensor, "t h"]]:
    """Attend over pages from at most one query per sequence; see `fastattn.dispatch`.

    Its split over keys needs exactly one query per sequence: rows are gathered by sequence, and outputs by row.
    """
    from flash_attn import flash_attn_with_kvcache

    from fastattn.kernels.flash.fixup import empty_output, fix_up
    from fastattn.kernels.flash.recompute import recompute
    from fastattn.kernels.problem import with_positive_scale

    batch = plan.batch
    assert batch.block_table is not None  # the path has checked it
    if 0 in (query.shape[0], key_cache.shape[0], batch.num_seqs, batch.block_table.shape[1]):
        return empty_output(query, value_cache.shape[-1], plan, options)
    rows = torch.arange(query.shape[0], device=query.device, dtype=torch.int32)
    sequences = torch.searchsorted(batch.cu_seqlens_q[1:], rows, right=True).clamp_(max=batch.num_seqs - 1)
    query_of_sequence = batch.cu_seqlens_q[:-1].clamp(max=query.shape[0] - 1)
    left, _ = window_within_reach(plan)  # no key lies after the one query
    longest = batch.block_table.shape[1] * key_cache.shape[1]
    if options.alibi_slopes is not None and not 0 <= left < longest:
        left = longest - 1  # see `window_for_flash`
    signed, scale = with_positive_scale(query, options.softmax_scale)
    out, lse = flash_attn_with_kvcache(
        rearrange(signed.index_select(0, query_of_sequence), "b h d -> b 1 h d"),
        key_cache,
        value_cache,
        cache_seqlens=batch.seq_lens,
        block_table=side_by_side(batch.block_table),
        softmax_scale=scale,
        window_size=(left, -1),
        softcap=options.softcap,
        alibi_slopes=_slopes(options),
        num_splits=1 if options.batch_invariant else 0,
        return_softmax_lse=True,
    )
    out = rearrange(out, "b 1 h dv -> b h dv").index_select(0, sequences)
    lse = rearrange(lse, "b h 1 -> b h").index_select(0, sequences)
    out, lse = fix_up(out, rearrange(lse, "t h -> h t"), plan, options)
    if plan.window[0] >= 0:
        recompute(out, query, key_cache, value_cache, plan, options)
    return out, lse


@cache
def _refusal(head_size: int, dtype: torch.dtype, device: torch.device) -> str | None:
    """Return why the installed build refuses a tiny call, or None: not every build has every head size."""
    from flash_attn import flash_attn_varlen_func

    rows = torch.zeros(1, 1, head_size, dtype=dtype, device=device)
    ends = torch.arange(2, dtype=torch.int32, device=device)
    try:
        with on_gpu(device):  # on another GPU the launch fails, and the failure is cached
            flash_attn_varlen_func(rows, rows, rows, ends, ends, 1, 1)
    except RuntimeError as error:
        return f"this build refuses head size {head_size} in {dtype}: {str(error).splitlines()[0]}"
    return None


def _slopes(options: AttentionOptions) -> Tensor | None:
    return None if options.alibi_slopes is None else options.alibi_slopes.float().contiguous()


def window_for_flash(plan: Plan, options: AttentionOptions) -> tuple[bool, tuple[int, int], int]:
    """Return the window of a plan in FlashAttention-2's conventions.

    It treats a side of at least `max_seqlen_k` as no limit, and a missing right side next to a left one as
    `max_seqlen_k`; with more queries than keys both are wrong. A `max_seqlen_k` that no distance reaches makes both
    right. Its causal kernel leaves out the part of ALiBi that is constant in a row, which is in our LSE. With a left
    side, even one that hides nothing, it takes the other kernel, whose bias is `-slope * |distance|` as ours.

    Returns:
        The argument `causal`, the window, and `max_seqlen_k`.
    """
    batch, (left, right) = plan.batch, window_within_reach(plan)
    longest = min(batch.max_seq_len + batch.max_query_len + 1, FAR)
    if options.alibi_slopes is not None and right == 0 and not 0 <= left < longest:
        left = longest - 1
    return left < 0 and right == 0, (left, right), longest
