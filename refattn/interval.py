"""Intervals: each query sees one run of keys, from a first to a last, which need not end at itself.

A prompt of 7 tokens whose tokens 2 to 4 are an image (its patches see one another), a prefix of 3 tokens that see one
another before a causal rest, and blocks of 3 tokens that are denoised together:

    image            first last     prefix            first last     blocks            first last
    1 . . . . . .    0     0        1 1 1 . . . .     0     2        1 1 1 . . .       0     2
    1 1 . . . . .    0     1        1 1 1 . . . .     0     2        1 1 1 . . .       0     2
    1 1 1 1 1 . .    0     4        1 1 1 . . . .     0     2        1 1 1 . . .       0     2
    1 1 1 1 1 . .    0     4        1 1 1 1 . . .     0     3        1 1 1 1 1 1       0     5
    1 1 1 1 1 . .    0     4        1 1 1 1 1 . .     0     4        1 1 1 1 1 1       0     5
    1 1 1 1 1 1 .    0     5        1 1 1 1 1 1 .     0     5        1 1 1 1 1 1       0     5
    1 1 1 1 1 1 1    0     6        1 1 1 1 1 1 1     0     6

So the answer to "who may see whom" is two numbers for each query. Causal masks, windows and chunks are such answers,
too; they have paths of their own because they follow from positions, and need no tensor.

    plan, attention     attention under any intervals, over pages, rows, latents, quantized values
    causal              the intervals of a causal mask, in a window or not
    image_spans         images, and other runs of tokens that see one another (Gemma 3 and 4)
    prefix_lm           a prefix whose tokens see one another (PaliGemma, T5)
    diffusion_blocks    blocks that see themselves and what is before them (block diffusion)

A chunk of a prompt must not end inside a span: its later keys are not in the cache yet. `plan` refuses that.
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
    """Plan attention of queries that see one run of keys each.

    Args:
        batch: the lengths and, over pages, the block table.
        first_visible: the position of the first key that each query row sees; rows of padding may hold anything. None:
            every row sees the keys from the first one up to itself, and those after it up to its last one, as image
            spans and prefixes have it in layers without a window. Then a kernel for causal masks may do most of it; and
            a CUDA graph has to capture the plan, too.
        last_visible: the position of the last one, before the first if the row sees nothing. The functions below return
            both. A CUDA graph reads the tensors that it was captured with: fill them anew for the next step.
        block_size: tokens in a block, `p`; None for rows, of which `varlen.attention` reads keys and values.

    Returns:
        A plan for every layer of this step whose mask this is, for whatever stores the keys: pages (`attention`),
        quantized values (`quantized.attention`), latents (`mla.attention`), pairs (`differential.attention`).

    Raises:
        ValueError: naming the argument that does not fit; on a CPU also if an interval ends after its sequence. On a
            device that is not read, and keys after the end of a sequence are seen by no query.
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
    """Return the intervals of a causal mask, or of a window: what other masks begin with.

    Args:
        batch: the lengths.
        num_tokens: query rows, `t`, the padding rows included.
        window_size: `(left, right)` in tokens, both inclusive, -1 for no limit; no query sees later keys.

    Returns:
        The position of the first and the last key that each row sees; padding rows see nothing, `(0, -1)`.

    Raises:
        ValueError: if the window is none, or (on a CPU) `num_tokens` is too small.
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
    """Return the intervals of tokens that see what is before them and, in a span, all of it.

    In a layer with a window there are two readings, and both are one run of keys:

        (causal or same span) and window        Gemma 3 and 4 in transformers 5.23
        (causal and window) or same span        `whole_spans`: an image longer than the window is seen whole

    Args:
        batch: the lengths.
        spans: the first and the last token of each span, by position, both included; rows of -1 are none. This is the
            `mm_prefix_range` of vLLM.
        num_tokens: query rows, `t`, the padding rows included.
        window_size: `(left, right)` in tokens, both inclusive, -1 for no limit. Gemma's windows have no right side.
        whole_spans: a span reaches as far as it does, whatever the window says.

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
    """Return the intervals of a prefix whose tokens see one another, before tokens that see what is before them.

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
    """Return the intervals of blocks whose tokens see their own block, and all before it.

    A sequence ends where a block does: the tokens of a block are there from the start, as masks, and are denoised
    together.

    Args:
        batch: the lengths.
        num_tokens: query rows, `t`, the padding rows included.
        diffusion_block: tokens in a block; the first one begins at position 0.

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
    """Return the intervals of queries that see the keys up to themselves, and after that up to their last one."""
    firsts, lasts = [0] * len(last_visible), [-1] * len(last_visible)
    for (q0, q1), seq_len in zip(batch.query_rows(), batch.seq_lens.tolist(), strict=True):
        for row in range(q0, q1):
            lasts[row] = max(seq_len - q1 + row, int(last_visible[row]))
    return _intervals(firsts, lasts, batch)


def _no_spans(batch: Batch) -> Int32[Tensor, "b 0 2"]:
    return torch.zeros(batch.num_seqs, 0, 2, dtype=torch.int32, device=batch.device)


def _intervals(firsts: list[int], lasts: list[int], batch: Batch) -> Intervals:
    """Return two lists of positions as tensors beside those of the batch."""
    return Intervals(*(torch.tensor(x, dtype=torch.int32, device=batch.device) for x in (firsts, lasts)))
