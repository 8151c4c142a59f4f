"""Compressed keys beside a window, by the fastest kernels; the twin of `refattn.compressed`.

The window and the entries are one launch where a kernel takes both, else two calls of latent attention, whose outputs
merge.
"""

from dataclasses import replace

import torch
from jaxtyping import Bool, Float, Float32, Int32, Shaped
from torch import Tensor

from fastattn import dispatch, sliding_window, sparse
from fastattn.kernels import order
from fastattn.kernels.problem import compressed_problem, places
from fastattn.metadata import positions, slot_mapping
from refattn.batch import Batch
from refattn.entries import (
    CompressedPlan,
    check_candidates,
    check_compress,
    check_compressed,
    check_compressed_plan,
    check_entries,
    check_is_compressed,
    most_entries,
)
from refattn.keys import Latents
from refattn.modes import refuse_gradients
from refattn.options import AttentionOptions
from refattn.plan import Plan


def plan(
    batch: Batch,
    *,
    ratio: int,
    overlap: bool = False,
    window_size: tuple[int, int],
    entry_table: Int32[Tensor, "b m"],
    block_size: int,
    entry_block_size: int,
) -> CompressedPlan:
    """Plan a step of all layers with entries of one ratio; the twin of `refattn.compressed.plan`.

    All sizes follow from Python ints, so nothing synchronizes with a device. If no sequence has more than one new
    token, each query sees all entries of its sequence, and the plan needs no intervals.
    """
    check_compressed_plan(
        batch,
        ratio=ratio,
        overlap=overlap,
        window_size=window_size,
        entry_table=entry_table,
        block_size=block_size,
        entry_block_size=entry_block_size,
    )
    lens = batch.seq_lens // ratio
    earlier = (batch.seq_lens - batch.query_lens).clamp(min=0) // ratio
    ends = torch.nn.functional.pad((lens - earlier).cumsum(0, dtype=torch.int32), (1, 0))
    longest, most = batch.max_seq_len // ratio, -(-batch.max_query_len // ratio)
    entries = replace(batch, seq_lens=lens, block_table=entry_table, max_seq_len=longest, num_keys=None)
    new = replace(entries, cu_seqlens_q=ends, max_query_len=most, num_tokens=None)

    num_tokens = int(batch.cu_seqlens_q[-1]) if batch.device.type == "cpu" else batch.num_tokens
    if num_tokens is None:  # as many as there may be
        num_tokens = batch.num_seqs * batch.max_query_len
    num_rows = most_entries(num_tokens, batch.num_seqs, ratio)
    first_visible = last_visible = None
    if batch.max_query_len > 1:
        last_visible = ((places(batch, num_tokens)[1] + 1) // ratio - 1).int()
        first_visible = torch.zeros_like(last_visible)
    return CompressedPlan(
        batch,
        block_size,
        ratio,
        overlap,
        sliding_window.plan(batch, window_size=window_size, block_size=block_size),
        Plan(entries, entry_block_size, causal=False, first_visible=first_visible, last_visible=last_visible),
        new,
        entry_block_size,
        slot_mapping(new, num_rows, block_size=entry_block_size),
        positions(new, num_rows) * ratio,
    )


def compress(
    row_cache: Float[Tensor, "n p c"], plan: CompressedPlan, *, bias: Float[Tensor, "ratio w"] | None = None
) -> Float[Tensor, "e d"]:
    """Compute the entries that the new tokens complete, from their rows; the twin of `refattn.compressed.compress`.

    Raises:
        NotImplementedError: if no kernel computes the combination, with the reason of each.
    """
    check_compress(row_cache, plan, bias)
    entries: Tensor = dispatch.run("compress", row_cache=row_cache, bias=bias, plan=plan)
    return entries


def select_entries(plan: CompressedPlan, positions: Int32[Tensor, "t k"]) -> CompressedPlan:
    """Return the plan with selected entries in place of all; the twin of `refattn.compressed.select_entries`."""
    check_is_compressed(plan, selected=False)
    selected = sparse.plan(plan.entries.batch, positions=positions, block_size=plan.entry_block_size)
    return replace(plan, entries=selected, selected=True)


def candidates(scores: Float32[Tensor, "t s"], *, size: int, topk: int) -> Bool[Tensor, "t s"]:
    """Return the entries among which later indexers select; the twin of `refattn.compressed.candidates`."""
    check_candidates(scores, size=size, topk=topk)
    num_entries = scores.shape[1]
    size = min(size, num_entries)  # a block is no longer than all entries
    if not scores.numel():
        return torch.zeros_like(scores, dtype=torch.bool)
    at = torch.arange(num_entries, device=scores.device)
    newest = at.where(scores != -torch.inf, -size).amax(1, keepdim=True)  # a query that sees none has no such block
    padded = torch.nn.functional.pad(scores, (0, -num_entries % size), value=-torch.inf)
    best = padded.unflatten(1, (-1, size)).amax(2)
    number = torch.arange(best.shape[1], device=scores.device)
    best.masked_fill_(number == newest.div(size, rounding_mode="floor"), torch.inf)
    selected = sparse.select(best, topk).long()
    chosen = torch.zeros(len(best), best.shape[1] + 1, dtype=torch.bool, device=scores.device)
    chosen.scatter_(1, selected.where(selected >= 0, best.shape[1]), True)
    return chosen[:, :-1].repeat_interleave(size, 1)[:, :num_entries]


def attention(
    query: Float[Tensor, "t h d"],
    cache: Shaped[Tensor, "n p d"],
    entry_cache: Shaped[Tensor, "m p2 d"],
    plan: CompressedPlan,
    options: AttentionOptions = AttentionOptions(),
    *,
    cache_scale: float = 1.0,
    entry_scale: float = 1.0,
    return_lse: bool = False,
    out: Float[Tensor, "t h d"] | None = None,
) -> Float[Tensor, "t h d"] | tuple[Float[Tensor, "t h d"], Float[Tensor, "t h"]]:
    """Attend to a window and to entries, with one softmax over both; the twin of `refattn.compressed.attention`.

    Raises:
        NotImplementedError: if no kernel computes the combination, with the reason of each; if selected entries are in
            a pool that cannot be viewed as blocks of one without a copy.
    """
    check_entries(entry_cache, plan)
    entries = sparse.by_token("entry_cache", entry_cache) if plan.selected else entry_cache
    scales = dict(cache_scale=cache_scale, entry_scale=entry_scale)
    check_compressed(query, cache, entries, plan, options, out, return_lse, **scales)
    refuse_gradients(dispatch.NO_BACKWARD, query=query, cache=cache, entry_cache=entry_cache, options=options)
    size = query.shape[2]
    if options.softmax_scale is None:  # latents have no default
        options = replace(options, softmax_scale=size**-0.5)
    window, its_entries = Latents(cache, size, cache_scale), Latents(entries, size, entry_scale)
    kernel = order.choose_fused(compressed_problem(query, window, its_entries, plan, options), order.forced.get())
    if kernel is not None:
        memory = dispatch.memory_for(out, query, cache, entries, options.sinks)
        call = dict(query=query, window=window, entries=its_entries, plan=plan, options=options, out=memory)
        result, lse = dispatch.launch(kernel.attend_compressed, **call)
    else:
        parts = [
            dispatch.attend(query, its_entries, plan.entries, options.without_sinks(), None, True),
            dispatch.attend(query, window, plan.window, options, None, True),
        ]
        outs, lses = zip(*parts, strict=True)
        result, lse = dispatch.run("merge", outs=outs, lses=lses)
    if out is not None and result is not out:
        result = out.copy_(result)
    return (result, lse) if return_lse else result
