"""Intervals of keys by the fastest kernel that supports them; the twin of `refattn.interval`."""

import torch
from jaxtyping import Int32
from torch import Tensor

from fastattn import chunked_prefill
from fastattn.kernels.problem import places
from fastattn.kernels.replay import memo_of
from refattn.batch import Batch, check_batch
from refattn.checks import check_flag, check_sizes, check_window
from refattn.checks_of_steps import check_intervals, check_num_tokens, check_prefix_lens, check_spans
from refattn.plan import Intervals, Plan

attention = chunked_prefill.attention


def plan(
    batch: Batch,
    *,
    first_visible: Int32[Tensor, "t"] | None = None,
    last_visible: Int32[Tensor, "t"],
    block_size: int | None = None,
) -> Plan:
    """Plan attention with one interval of visible keys per query; the twin of `refattn.interval.plan`.

    The plan keeps the given tensors, so a captured graph uses new intervals that are written into them.
    """
    check_intervals(batch, first_visible, last_visible)
    if block_size is not None:
        check_sizes(block_size=block_size)
    ends, after = Intervals(last_visible if first_visible is None else first_visible, last_visible), None
    if first_visible is None:
        _, position, padding = places(batch, len(last_visible))
        ends = _intervals(torch.zeros_like(position), last_visible.maximum(position), padding)
        after = position.int() + 1
    plan = Plan(batch, block_size, causal=False, extends_causal=after is not None, **ends._asdict())
    if block_size is None:
        memo_of(plan).cu_seqlens_k = batch.cu_seqlens_k
    if after is not None:  # the first key that a causal kernel leaves out, per row
        memo_of(plan).after = after
    return plan


def causal(batch: Batch, num_tokens: int, *, window_size: tuple[int, int] = (-1, -1)) -> Intervals:
    """Return the intervals of a causal mask or a window; the twin of `refattn.interval.causal`."""
    check_batch(batch)
    no_spans = torch.zeros(batch.num_seqs, 0, 2, dtype=torch.int32, device=batch.device)
    return image_spans(batch, no_spans, num_tokens, window_size=window_size)


def image_spans(
    batch: Batch,
    spans: Int32[Tensor, "b n 2"],
    num_tokens: int,
    *,
    window_size: tuple[int, int] = (-1, -1),
    whole_spans: bool = False,
) -> Intervals:
    """Return the intervals of causal tokens that see all of their span; the twin of `refattn.interval.image_spans`."""
    left, right = check_window(window_size)
    check_flag("whole_spans", whole_spans)
    check_spans(batch, spans)
    check_num_tokens(num_tokens, batch)
    sequence, position, padding = places(batch, num_tokens)
    first = torch.zeros_like(position) if left < 0 else (position - left).clamp(min=0)
    last = position
    if batch.num_seqs and spans.shape[1]:
        begin, end = spans[sequence].long().unbind(-1)  # [t, n]
        inside = (begin >= 0) & (begin <= position[:, None]) & (position[:, None] <= end)
        reach = end if whole_spans or right < 0 else end.minimum(position[:, None] + right)
        last = torch.where(inside, reach, position[:, None]).amax(1)
        if whole_spans:
            first = torch.where(inside, begin, first[:, None]).amin(1).minimum(first)
    return _intervals(first, last, padding)


def prefix_lm(batch: Batch, prefix_lens: Int32[Tensor, "b"], num_tokens: int) -> Intervals:
    """Return the intervals of a prefix followed by causal tokens; the twin of `refattn.interval.prefix_lm`."""
    check_prefix_lens(batch, prefix_lens)
    check_num_tokens(num_tokens, batch)
    sequence, position, padding = places(batch, num_tokens)
    last = position
    if batch.num_seqs:
        last = torch.where(position >= 0, position.maximum(prefix_lens[sequence] - 1), position)
    return _intervals(torch.zeros_like(position), last, padding)


def diffusion_blocks(batch: Batch, num_tokens: int, *, diffusion_block: int) -> Intervals:
    """Return the intervals of diffusion blocks; the twin of `refattn.interval.diffusion_blocks`."""
    check_sizes(diffusion_block=diffusion_block)
    check_num_tokens(num_tokens, batch)
    _, position, padding = places(batch, num_tokens)
    end = (position // diffusion_block + 1) * diffusion_block - 1
    return _intervals(torch.zeros_like(position), torch.where(position < 0, position, end), padding)


def _intervals(first: Tensor, last: Tensor, padding: Tensor) -> Intervals:
    """Return positions as tables of a plan; padding rows are fully masked."""
    return Intervals(first.masked_fill(padding, 0).int(), last.masked_fill(padding, -1).int())
