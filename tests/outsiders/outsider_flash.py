"""One flash kernel as people write it for a GPU, whose steps can be replaced: that is where the mistakes sit.

It takes tiles of queries and of keys, reads the pool slot by slot, and keeps an online softmax.
"""

from collections.abc import Callable, Iterator
from math import inf
from typing import Any

import torch
from torch import Tensor

Read = Callable[[Tensor], tuple[Tensor, Tensor]]
Sequence = tuple[int, int, int, Read]  # first query row, last query row + 1, keys, and how to read some of them


def rows(query: Tensor, cu_seqlens_q: Tensor, seq_lens: Tensor) -> list[tuple[int, int, int]]:
    """List the query rows and the number of keys of each sequence."""
    ends = cu_seqlens_q.tolist()
    return list(zip(ends[:-1], ends[1:], seq_lens.tolist(), strict=True))


def slots_of(table: Tensor, j: Tensor, p: int) -> Tensor:
    """Return the slots of the keys at positions `j` of the sequence whose row of the block table this is."""
    return table[j // p].long() * p + j % p


def paged(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    cu_seqlens_q: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    slots: Callable[[Tensor, Tensor, int], Tensor] = slots_of,
) -> Iterator[Sequence]:
    """Yield the sequences of a batch over pages."""
    p = key_cache.shape[1]
    for b, (q0, q1, s) in enumerate(rows(query, cu_seqlens_q, seq_lens)):

        def read(j: Tensor, table: Tensor = block_table[b]) -> tuple[Tensor, Tensor]:
            at = slots(table, j, p)
            return key_cache[at // p, at % p], value_cache[at // p, at % p]

        yield q0, q1, s, read


def in_rows(query: Tensor, key: Tensor, value: Tensor, cu_seqlens_q: Tensor, seq_lens: Tensor) -> Iterator[Sequence]:
    """Yield the sequences of a batch whose keys are in rows."""
    first = 0
    for q0, q1, s in rows(query, cu_seqlens_q, seq_lens):

        def read(j: Tensor, first: int = first) -> tuple[Tensor, Tensor]:
            return key[first + j], value[first + j]

        yield q0, q1, s, read
        first += s


def in_window(i: Tensor, j: Tensor, window: tuple[int, int], causal: bool) -> Tensor:
    """Draw the mask of a causal flag and a window; positions of queries are a column, those of keys a row."""
    left, right = window[0], 0 if causal else window[1]
    sees = torch.ones(i.shape[0], j.shape[1], dtype=torch.bool)
    sees = sees & (j >= i - left) if left >= 0 else sees
    return sees & (j <= i + right) if right >= 0 else sees


def alibi(slopes: Tensor, i: Tensor, j: Tensor) -> Tensor:
    """Return the bias of each head, query and key."""
    return -slopes.float()[:, None, None] * (i - j).abs()


def whole(i: Tensor, s: int) -> tuple[int, int]:
    """Return the keys that a tile of queries walks over: all of them."""
    return 0, s


def flash(
    query: Tensor,
    sequences: Iterator[Sequence],
    *,
    value_size: int,
    return_lse: bool = False,
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    causal: bool = True,
    window_size: tuple[int, int] = (-1, -1),
    tiles: tuple[int, int] = (16, 32),
    sees: Callable[..., Tensor] | None = None,
    span: Callable[[Tensor, int], tuple[int, int]] = whole,
    bias: Callable[..., Tensor] = alibi,
    hidden: float = -inf,
    sum_type: torch.dtype = torch.float32,
    lse_with_sinks: bool = True,
) -> Any:
    """Attend tile by tile; `sees(i, j, s)` is the mask, `span(i, s)` the keys that a tile of queries walks over."""
    scale = query.shape[2] ** -0.5 if softmax_scale is None else softmax_scale
    t, h, _ = query.shape
    out, lse = torch.zeros(t, h, value_size), torch.full((t, h), -inf)
    for q0, q1, s, read in sequences:
        for a in range(q0, q1, tiles[0]):
            q = query[a : min(a + tiles[0], q1)].float()
            i = torch.arange(s - q1 + a, s - q1 + a + len(q))[:, None]
            top = torch.full((h, len(q)), -inf)
            total, acc = torch.zeros(h, len(q), dtype=sum_type), torch.zeros(h, len(q), value_size)
            first, last = span(i, s)
            for k0 in range(first, last, tiles[1]):
                j = torch.arange(k0, min(k0 + tiles[1], last))[None]
                mask = in_window(i, j, window_size, causal) if sees is None else sees(i, j, s)
                k, v = (x.float().masked_fill(~mask.any(0)[:, None, None], 0.0) for x in read(j[0]))
                group = h // k.shape[1]
                x = torch.einsum("thd,shd->hts", q * scale, k.repeat_interleave(group, 1))
                x = softcap * torch.tanh(x / softcap) if softcap else x
                x = x if alibi_slopes is None else x + bias(alibi_slopes, i, j)
                x = x.masked_fill(~mask, hidden)
                new = torch.maximum(top, x.amax(-1))
                base = new.masked_fill(new == -inf, 0.0)
                weights, kept = torch.exp(x - base[..., None]), torch.exp(top - base)
                total = (total.float() * kept + weights.sum(-1)).to(sum_type)
                acc = acc * kept[..., None] + weights @ v.repeat_interleave(group, 1).transpose(0, 1)
                top = new
            total, without = total.float(), total.float()
            if sinks is not None:
                new = torch.maximum(top, sinks.float()[:, None])
                kept = torch.exp(top - new)
                without, acc = without * kept, acc * kept[..., None]
                total, top = without + torch.exp(sinks.float()[:, None] - new), new
            out[a : a + len(q)] = (acc / total.masked_fill(total == 0, 1.0)[..., None]).transpose(0, 1)
            lse[a : a + len(q)] = (top + (total if lse_with_sinks else without).log()).T
    return (out.to(query.dtype), lse) if return_lse else out.to(query.dtype)


def softmax_of(
    query: Tensor, key: Tensor, value: Tensor, sees: Tensor, scale: float, sinks: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Attend in one piece, `[t, h, d]` to `[s, hk, d]` under a mask `[t, s]`; float32 output and log-sum-exp."""
    hk, unseen = key.shape[1], ~sees.any(0)[:, None, None]
    q = query.float().unflatten(1, (hk, -1))
    k, v = (x.float().masked_fill(unseen, 0.0) for x in (key, value))
    x = torch.einsum("tkgd,skd->kgts", q * scale, k).flatten(0, 1).masked_fill(~sees, -inf)
    lse = x.logsumexp(-1)
    lse = lse if sinks is None else torch.logaddexp(lse, sinks.float()[:, None])
    weights = torch.exp(x - lse.masked_fill(lse == -inf, 0.0)[..., None]).unflatten(0, (hk, -1))
    return torch.einsum("kgts,skd->tkgd", weights, v).flatten(1, 2), lse.T


def merged(outs: list[Tensor], lses: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Merge partial outputs."""
    stack = torch.stack(lses)
    lse = stack.logsumexp(0)
    weights = torch.exp(stack - lse.masked_fill(lse == -inf, 0.0))[..., None]
    parts = torch.stack(outs).masked_fill(weights == 0, 0.0)
    return (weights * parts).sum(0), lse
