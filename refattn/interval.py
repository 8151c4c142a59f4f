"""Intervals: each query sees one contiguous range of keys, which need not end at the query itself.

A prompt of 7 tokens with an image at tokens 2 to 4 (its patches see one another), a prefix of 3 tokens that see one
another before causal tokens, and blocks of 3 tokens that are denoised together:

    image            first last     prefix            first last     blocks            first last
    1 . . . . . .    0     0        1 1 1 . . . .     0     2        1 1 1 . . .       0     2
    1 1 . . . . .    0     1        1 1 1 . . . .     0     2        1 1 1 . . .       0     2
    1 1 1 1 1 . .    0     4        1 1 1 . . . .     0     2        1 1 1 . . .       0     2
    1 1 1 1 1 . .    0     4        1 1 1 1 . . .     0     3        1 1 1 1 1 1       0     5
    1 1 1 1 1 . .    0     4        1 1 1 1 1 . .     0     4        1 1 1 1 1 1       0     5
    1 1 1 1 1 1 .    0     5        1 1 1 1 1 1 .     0     5        1 1 1 1 1 1       0     5
    1 1 1 1 1 1 1    0     6        1 1 1 1 1 1 1     0     6

So the mask is two numbers per query. Causal masks, windows and chunks are intervals, too; they have paths of their own
because they follow from positions and need no tensor.

    plan, attention     attention under any intervals, over pages, rows, latents, quantized values
    causal              the intervals of a causal mask, with or without a window
    image_spans         images and other spans of tokens that see one another (Gemma 3 and 4)
    prefix_lm           a prefix whose tokens see one another (PaliGemma, T5)
    diffusion_blocks    blocks that see themselves and all earlier ones (block diffusion)

A chunk of a prompt must not end inside a span, because the later keys of the span are not in the cache yet; `plan`
raises then.
"""

import torch
from jaxtyping import Int32
from torch import Tensor

from refattn import chunked_prefill
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
    """Plan attention with one interval of visible keys per query.

    Args:
        batch: the lengths and, over pages, the block table.
        first_visible: the position of the first key that each query row sees; padding rows may hold anything. None:
            every row sees all keys up to itself and later ones up to `last_visible`, as image spans and prefixes do in
            layers without a window. A kernel for causal masks can then do most of the work. A CUDA graph has to capture
            the plan in this case.
        last_visible: the position of the last key that it sees; less than the first if the row is fully masked. The
            functions below return both. A CUDA graph reads the tensors that it was captured with: update them in place
            for the next step.
        block_size: tokens in a block, `p`; None for contiguous keys and values (`varlen.attention`).

    Returns:
        A plan for every layer of this step with this mask, over any storage: pages (`attention`), quantized values
        (`quantized.attention`), latents (`mla.attention`), differential heads (`differential.attention`).

    Raises:
        ValueError: naming the argument that does not fit; on a CPU also if an interval ends after its sequence. On a
            device this is not checked, and intervals are clipped to their sequence.
    """
    check_intervals(batch, first_visible, last_visible)
    if block_size is not None:
        check_sizes(block_size=block_size)
    extends_causal = first_visible is None
    if first_visible is None:
        first_visible, last_visible = _up_to(batch, last_visible)
    ends = Intervals(first_visible, last_visible)._asdict()
    return Plan(batch, block_size, causal=False, extends_causal=extends_causal, **ends)


def causal(batch: Batch, num_tokens: int, *, window_size: tuple[int, int] = (-1, -1)) -> Intervals:
    """Return the intervals of a causal mask or a window, from which other masks are made.

    Args:
        batch: the lengths.
        num_tokens: query rows, `t`, the padding rows included.
        window_size: `(left, right)` in tokens, both inclusive, -1 for no limit; no query sees later keys.

    Returns:
        The position of the first and the last key that each row sees; `(0, -1)` for padding rows.

    Raises:
        ValueError: if the window is not valid, or (on a CPU) `num_tokens` is too small.
    """
    check_batch(batch)
    return image_spans(batch, _no_spans(batch), num_tokens, window_size=window_size)


def image_spans(
    batch: Batch,
    spans: Int32[Tensor, "b n 2"],
    num_tokens: int,
    *,
    window_size: tuple[int, int] = (-1, -1),
    whole_spans: bool = False,
) -> Intervals:
    """Return the intervals of causal tokens that also see all of their own span.

    With a window there are two conventions, and both give one interval per query:

        (causal or same span) and window        Gemma 3 and 4 in transformers 5.23
        (causal and window) or same span        `whole_spans`: all of a span is visible, even outside the window

    Args:
        batch: the lengths.
        spans: the first and the last token of each span, by position, both included; rows of -1 are padding. This is
            vLLM's `mm_prefix_range`.
        num_tokens: query rows, `t`, the padding rows included.
        window_size: `(left, right)` in tokens, both inclusive, -1 for no limit. Gemma's windows have no right side.
        whole_spans: do not clip spans to the window.

    Returns:
        As `causal`.

    Raises:
        ValueError: naming the argument that does not fit; spans are read on a CPU only.

    Source: Gemma Team 2025, "Gemma 3"; vLLM's `triton_unified_attention`.
    """
    left, right = check_window(window_size)
    check_flag("whole_spans", whole_spans)
    check_spans(batch, spans)
    check_num_tokens(num_tokens, batch)
    firsts, lasts = [0] * num_tokens, [-1] * num_tokens
    for (q0, q1), seq_len, pairs in zip(batch.query_rows(), batch.seq_lens.tolist(), spans.tolist(), strict=True):
        for row in range(q0, q1):
            position = seq_len - q1 + row
            first, last = 0 if left < 0 else max(0, position - left), position
            for begin, end in pairs:
                if 0 <= begin <= position <= end:
                    first = min(first, begin) if whole_spans else first
                    last = end if whole_spans or right < 0 else min(end, position + right)
            firsts[row], lasts[row] = first, last
    return _intervals(firsts, lasts, batch)


def prefix_lm(batch: Batch, prefix_lens: Int32[Tensor, "b"], num_tokens: int) -> Intervals:
    """Return the intervals of a prefix whose tokens see one another, followed by causal tokens.

    Args:
        batch: the lengths.
        prefix_lens: tokens of the prefix of each sequence; 0 for a causal mask.
        num_tokens: query rows, `t`, the padding rows included.

    Returns:
        As `causal`.

    Raises:
        ValueError: naming the argument that does not fit.

    Source: Raffel et al. 2020, "T5"; Beyer et al. 2024, "PaliGemma".
    """
    check_prefix_lens(batch, prefix_lens)
    check_num_tokens(num_tokens, batch)
    firsts, lasts = [0] * num_tokens, [-1] * num_tokens
    for (q0, q1), seq_len, prefix in zip(
        batch.query_rows(), batch.seq_lens.tolist(), prefix_lens.tolist(), strict=True
    ):
        for row in range(q0, q1):
            position = seq_len - q1 + row
            lasts[row] = prefix - 1 if 0 <= position < prefix else position
    return _intervals(firsts, lasts, batch)


def diffusion_blocks(batch: Batch, num_tokens: int, *, diffusion_block: int) -> Intervals:
    """Return the intervals of blocks whose tokens see their own block and all earlier ones.

    A sequence ends where a block does: all tokens of a block are in the sequence from the start, as mask tokens, and
    are denoised together.

    Args:
        batch: the lengths.
        num_tokens: query rows, `t`, the padding rows included.
        diffusion_block: tokens in a diffusion block; the first one begins at position 0.

    Returns:
        As `causal`.

    Raises:
        ValueError: naming the argument that does not fit.

    Source: Arriola et al. 2025, "Block Diffusion".
    """
    check_sizes(diffusion_block=diffusion_block)
    check_num_tokens(num_tokens, batch)
    firsts, lasts = [0] * num_tokens, [-1] * num_tokens
    for (q0, q1), seq_len in zip(batch.query_rows(), batch.seq_lens.tolist(), strict=True):
        for row in range(q0, q1):
            position = seq_len - q1 + row
            lasts[row] = position if position < 0 else (position // diffusion_block + 1) * diffusion_block - 1
    return _intervals(firsts, lasts, batch)


def _up_to(batch: Batch, last_visible: Int32[Tensor, "t"]) -> Intervals:
    """Return the intervals of queries that see all keys up to themselves, and later ones up to `last_visible`."""
    firsts, lasts = [0] * len(last_visible), [-1] * len(last_visible)
    for (q0, q1), seq_len in zip(batch.query_rows(), batch.seq_lens.tolist(), strict=True):
        for row in range(q0, q1):
            lasts[row] = max(seq_len - q1 + row, int(last_visible[row]))
    return _intervals(firsts, lasts, batch)


def _no_spans(batch: Batch) -> Int32[Tensor, "b 0 2"]:
    return torch.zeros(batch.num_seqs, 0, 2, dtype=torch.int32, device=batch.device)


def _intervals(firsts: list[int], lasts: list[int], batch: Batch) -> Intervals:
    """Return two lists of positions as tensors on the device of the batch."""
    return Intervals(*(torch.tensor(x, dtype=torch.int32, device=batch.device) for x in (firsts, lasts)))
