"""A mask of transformers as a ragged batch: which query rows and key rows are a sequence, and the plan over them.

A mask comes as `transformers.visible_keys`: for each query, the first key that it sees and the one after the last.
"""

from types import ModuleType
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Int32, Int64
from torch import Tensor

from refattn.plan import Plan

COPIES = 4  # at most this many copies of the cache's keys, where sequences share some


class Layout(NamedTuple):
    """A mask as a ragged batch.

    Attributes:
        plan: over the rows.
        query_rows: of all `b q` query rows, those that see a key, in the order of the plan; None for all.
        key_rows: of all `b kv` key rows, those of the plan's sequences, one after the other.
        rest: of other query rows, for which the mask is read from its end to its beginning.
    """

    plan: Plan
    query_rows: Int64[Tensor, "t"] | None
    key_rows: Int64[Tensor, "s"] | slice
    rest: "Layout | None" = None


def layout_of(
    mask: Int32[Tensor, "_ 1 q 2"],
    batch_size: int,
    num_keys: int,
    edges: tuple[Tensor | None, Tensor | None],
    metadata: ModuleType,
) -> Layout:
    """Return the layout of a mask: the one that an earlier layer left with it, if it is of the same batch."""
    before: tuple[int, int, Any, Any, Layout] | None = getattr(mask, "layout_of_rows", None)
    if before is not None and before[:2] == (batch_size, num_keys) and before[2] is edges[0] and before[3] is edges[1]:
        return before[-1]
    seen = mask.as_subclass(Tensor)[:, 0].expand(batch_size, -1, -1)
    if edges[0] is not None:
        seen = _in_documents(seen, num_keys, edges[0], edges[1])
    layout = _lay_out_in_parts(seen, num_keys, metadata)
    mask.layout_of_rows = (batch_size, num_keys, *edges, layout)  # type: ignore[attr-defined]
    return layout


def _in_documents(
    seen: Int32[Tensor, "b q 2"], num_keys: int, cu_seq_lens_q: Tensor, cu_seq_lens_k: Tensor | None
) -> Int32[Tensor, "b q 2"]:
    """Keep what a query sees of its own packed sequence."""
    edges, q = cu_seq_lens_q.cpu().long(), seen.shape[1]
    same = cu_seq_lens_k is None or torch.equal(edges, cu_seq_lens_k.cpu().long())
    if seen.shape[0] != 1 or q != num_keys or not same or int(edges[0]) != 0 or int(edges[-1]) != q:
        raise NotImplementedError(
            "cu_seq_lens_q: expected the edges of sequences packed into one row without a cache, from 0 to "
            f"{q}, the same for keys, got {edges.tolist()}"
        )
    number = torch.searchsorted(edges[1:], torch.arange(q), right=True)
    begin, end = edges[number], edges[number + 1]
    first, after = seen[0].cpu().long().unbind(-1)
    first, after = torch.maximum(first, begin), torch.minimum(after, end)
    return torch.stack([first, torch.maximum(first, after)], dim=-1)[None].int().to(seen.device)


def _lay_out_in_parts(seen: Int32[Tensor, "b q 2"], num_keys: int, metadata: ModuleType) -> Layout:
    """Make a ragged batch of a mask, or two: one of the queries of images under a window, and one of the others.

    The queries of an image see up to its end, whatever its length, and a window hides from each what the one before it
    still sees. Read from its end, such a mask is causal: queries that see keys from the same one on, each one more.

        keys       0 1 2 3 4 5                 5 4 3 2 1 0
        query 1    1 1 1 1 1 .      query 3    . 1 1 . . .
        query 2    . 1 1 1 1 .      query 2    . 1 1 1 1 .   and so on, with the window of the other queries' plan
        query 3    . . 1 1 1 .      query 1    . 1 1 1 1 1   left out
    """
    first, end = seen.cpu().long().unbind(-1)  # [b, q]
    some = end > first
    if _window_of(first, end) is None and some.shape[1] > 1:
        joins = (end.diff() == 0) & some[:, 1:] & some[:, :-1]
        moves = joins & (first.diff() > 0)
        run = torch.nn.functional.pad(~joins, (1, 0), value=True).flatten().cumsum(0) - 1  # queries with one end
        moved = torch.zeros(int(run[-1]) + 1, dtype=torch.int64)
        moved.index_add_(0, run, torch.nn.functional.pad(moves, (1, 0)).flatten().long())
        images = (moved[run] > 0).view_as(some).to(seen.device)[..., None]
        if images.any():
            layout, backwards = lay_out(seen * ~images, num_keys, metadata), (seen * images).flip(1)
            rest = lay_out(torch.where(images.flip(1), num_keys - backwards.flip(2), backwards), num_keys, metadata)
            size, q = some.numel(), some.shape[1]
            query_rows = torch.arange(size, device=seen.device) if rest.query_rows is None else rest.query_rows
            key_rows = torch.arange(len(seen) * num_keys, device=seen.device)[rest.key_rows]
            query_rows, key_rows = (
                row // width * width + width - 1 - row % width for row, width in ((query_rows, q), (key_rows, num_keys))
            )
            return layout._replace(rest=rest._replace(query_rows=query_rows, key_rows=key_rows))
    return lay_out(seen, num_keys, metadata)


def lay_out(seen: Int32[Tensor, "b q 2"], num_keys: int, metadata: ModuleType) -> Layout:
    """Make a ragged batch of a mask.

    Neighbouring queries are one sequence while what they see goes on: from the same first key, or in a window that
    moves with them. A sequence's keys are those that any of its queries sees. Where its queries are not the last of
    them, or do not stand one after the other, the plan has their positions.

    Raises:
        NotImplementedError: if no window and no positions describe the mask, or its sequences share most of their keys.
        ValueError: if a query sees keys that are not there.
    """
    first, end = seen.cpu().long().unbind(-1)  # [b, q]
    if seen.numel() and int(end.max()) > num_keys:
        raise ValueError(f"attention_mask: expected one for {num_keys} keys, got {int(end.max())} that are seen")
    some = end > first
    window = _window_of(first, end)
    starts = some & ~torch.nn.functional.pad(_goes_on(first, end, window), (1, 0))
    number = starts.flatten().cumsum(0)[some.flatten()] - 1  # the sequence number of each row that sees something
    first, end = first[some], end[some]
    begin = first[starts[some]]  # the first key of each sequence
    after = torch.zeros_like(begin).scatter_reduce_(0, number, end, "amax")
    query_lens, seq_lens = number.bincount(minlength=len(begin)), after - begin
    positions, everything = _positions(first - begin[number], end - begin[number], seq_lens[number], window)
    followers = torch.arange(len(number)) - query_lens.cumsum(0)[number]  # -1 for the last query of a sequence
    as_they_follow = everything or torch.equal(positions, seq_lens[number] + followers)

    total, held = int(seq_lens.sum()), seen.shape[0] * num_keys
    if total > COPIES * held:
        raise NotImplementedError(
            f"attention_mask: expected sequences that share few keys, got {total} keys of the {held} in the cache"
        )
    begin += starts.nonzero()[:, 0] * num_keys  # as a row of the whole cache
    key_rows = torch.arange(total) + (begin - seq_lens.cumsum(0) + seq_lens).repeat_interleave(seq_lens)
    plan = Plan(
        metadata.make_batch(query_lens.tolist(), seq_lens.tolist(), device=seen.device),
        None,
        not everything,
        (-1, -1) if window is None or everything else (window - 1, 0),
        positions=None if as_they_follow else positions.int().to(seen.device),
    )
    query_rows = None if bool(some.all()) else some.flatten().nonzero()[:, 0].to(seen.device)
    one_run = total > 0 and torch.equal(key_rows, torch.arange(total) + key_rows[0])
    run = slice(int(key_rows[0]), int(key_rows[0]) + total) if one_run else key_rows.to(seen.device)
    return Layout(plan, query_rows, run)


def _window_of(first: Int64[Tensor, "b q"], end: Int64[Tensor, "b q"]) -> int | None:
    """Return how many keys a query sees where what it sees moves by one; None if another sees more: it is no window."""
    count = end - first
    moved = (first.diff() == 1) & (end.diff() == 1) & (count[:, 1:] > 0)
    width = int((count[:, 1:] * moved).max()) if moved.numel() else 0
    return width if width and width == int(count.max()) else None


def _goes_on(first: Int64[Tensor, "b q"], end: Int64[Tensor, "b q"], window: int | None) -> Bool[Tensor, "b r"]:
    """Return of each query but the first whether it belongs to the sequence of the one before it."""
    step, count = first.diff(), end - first
    on = (step == 0) & (end.diff() >= 0)
    if window is not None:
        full = (end.diff() == 1) & (count[:, 1:] == window)
        on |= (step == 1) & (full | ((end.diff() == 0) & (count[:, 1:] < window)))
    return on & (count[:, 1:] > 0) & (count[:, :-1] > 0)


def _positions(
    first: Int64[Tensor, "t"], end: Int64[Tensor, "t"], seq_lens: Int64[Tensor, "t"], window: int | None
) -> tuple[Int64[Tensor, "t"], bool]:
    """Return where each query stands among the keys of its sequence, and whether all of them see all of those.

    Past the last key a window says it; else the last key that a query sees is its own.

    Raises:
        NotImplementedError: if a query there would see something else.
    """
    everything = bool(((first == 0) & (end == seq_lens)).all())
    positions = end - 1
    if window is not None:
        positions = torch.where((end == seq_lens) & (first > 0), first + window - 1, positions)
        sees = torch.stack([(positions - window + 1).clamp(min=0), (positions + 1).minimum(seq_lens)])
    else:
        sees = torch.stack([torch.zeros_like(first), end])
    if not torch.equal(sees, torch.stack([first, end])):
        raise NotImplementedError("attention_mask: expected one window for all queries, or none, got several")
    return positions, everything
