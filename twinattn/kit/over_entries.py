"""Compressed keys by kernels that know no pages: one list of slots per query, or the keys of prompts in rows.

Such kernels read one pool. So both pools are put into one tensor, keys of tokens first; a server would have them so.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from twinattn.kit.kernel import claims
from twinattn.libraries import Call, attn_gym, flash_mla

PROMPTS = (((5, 5), (9, 9)), ((1, 1),), ((3, 3), (0, 0), (16, 16)), ((33, 33), (2, 2)))  # no token has a context
NO_PADDING: dict[str, Any] = dict(padding=(0,))  # such kernels say nothing of rows that no sequence has
NO_ROWS, NOT_ABOVE_0 = "query dimensions must all be positive", "scale must be greater than 0"  # attention-gym's texts


def over_lists(prepare: Callable[..., Call], **limits: Any) -> Callable[..., tuple[Tensor, Tensor]]:
    """Return a kernel over pages that calls one over a list of slots per query: those of its window, then of entries.

    Args:
        prepare: takes queries, the one pool `[slots, d]`, the lists `[t, k]` with -1 for none, sinks, and the scale;
            its call returns outputs and LSEs.
        limits: what the kernel claims.
    """

    @claims(**NO_PADDING | limits)
    def kernel(
        query: Tensor,
        cache: Tensor,
        entry_cache: Tensor,
        cu_seqlens_q: Tensor,
        seq_lens: Tensor,
        block_table: Tensor,
        entry_table: Tensor,
        ratio: int,
        window_size: tuple[int, int],
        positions: Tensor | None = None,
        softmax_scale: float | None = None,
        sinks: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        at, sequence = _positions(cu_seqlens_q, seq_lens)
        window = at[:, None] + torch.arange(-window_size[0], 1, device=at.device)
        entries = _listed(positions, at, seq_lens, ratio)
        keys = _slots(window, block_table[sequence], cache.shape[1])
        others = _slots(entries, entry_table[sequence], entry_cache.shape[1])
        others = others.where(others < 0, others + cache.shape[:2].numel())
        pool = torch.cat([cache.flatten(0, 1), entry_cache.flatten(0, 1)])
        return prepare(query, pool, torch.cat([keys, others], 1).int(), sinks, softmax_scale)()

    return kernel


def over_prompts(prepare: Callable[..., Call], **limits: Any) -> Callable[..., tuple[Tensor, Tensor]]:
    """Return a kernel over pages that calls one with a window of its own over rows: those of whole prompts.

    Args:
        prepare: takes queries, the keys of their tokens `[t, d]`, entries `[e, d]`, lists of these `[t, k]` with -1 for
            none, where sequences and where their entries begin, the tokens of the window, sinks, and the scale; its
            call returns outputs and LSEs.
        limits: what the kernel claims.
    """

    @claims(**NO_PADDING | dict(lens=PROMPTS) | limits)
    def kernel(
        query: Tensor,
        cache: Tensor,
        entry_cache: Tensor,
        cu_seqlens_q: Tensor,
        seq_lens: Tensor,
        block_table: Tensor,
        entry_table: Tensor,
        ratio: int,
        window_size: tuple[int, int],
        positions: Tensor | None = None,
        softmax_scale: float | None = None,
        sinks: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        at, sequence = _positions(cu_seqlens_q, seq_lens)
        key = cache.flatten(0, 1)[_slots(at[:, None], block_table[sequence], cache.shape[1])[:, 0]]
        ends = torch.nn.functional.pad((seq_lens // ratio).cumsum(0, dtype=torch.int32), (1, 0))
        entry, its = _positions(ends, seq_lens // ratio)
        entries = entry_cache.flatten(0, 1)[_slots(entry[:, None], entry_table[its], entry_cache.shape[1])[:, 0]]
        lists = _listed(positions, at, seq_lens, ratio).int()
        rows = query, key, entries, lists, cu_seqlens_q, ends
        return prepare(*rows, window_size[0] + 1, sinks, softmax_scale)()

    return kernel


def _positions(cu_seqlens: Tensor, seq_lens: Tensor) -> tuple[Tensor, Tensor]:
    """Return the position of each row of a ragged batch in its sequence, and its sequence."""
    lens = cu_seqlens.diff().long()
    sequence = torch.arange(len(lens), device=lens.device).repeat_interleave(lens)
    first = (seq_lens - cu_seqlens[1:])[sequence].long()
    return torch.arange(len(sequence), device=lens.device) + first, sequence


def _listed(positions: Tensor | None, at: Tensor, seq_lens: Tensor, ratio: int) -> Tensor:
    """Return the entries that each query sees, -1 for none: those given, or all that are complete."""
    if positions is not None:
        return positions.long()
    every = torch.arange(int(seq_lens.max()) // ratio if len(seq_lens) else 0, device=at.device)
    return every.where(every < (at[:, None] + 1) // ratio, -1)


def _slots(tokens: Tensor, tables: Tensor, block_size: int) -> Tensor:
    """Return the slots of some tokens or entries of each row, -1 for those below 0."""
    known = tokens.clamp(min=0)
    blocks = tables.long().gather(1, known // block_size) if tables.shape[1] else known
    return (blocks * block_size + known % block_size).where(tokens >= 0, -1)


def lists_of_attn_gym(impl: str) -> Callable[..., Call]:
    """Return what prepares attention-gym's `gather_attn` for `over_lists`."""
    return partial(attn_gym.prepare_gather, return_lse=True, impl=impl)


def prompts_of_attn_gym(impl: str) -> Callable[..., Call]:
    """Return what prepares attention-gym's `gather_attn` for `over_prompts`."""
    return partial(attn_gym.prepare_window, return_lse=True, impl=impl)


def lists_of_flash_mla(
    query: Tensor, pool: Tensor, slots: Tensor, sinks: Tensor | None, softmax_scale: float | None
) -> Call:
    """Prepare FlashMLA's kernel for sparse prefills for `over_lists`."""
    size = query.shape[2]
    scale = size**-0.5 if softmax_scale is None else softmax_scale
    return flash_mla.prepare_selected(query, pool[None], slots, size, scale, return_lse=True, sinks=sinks)
