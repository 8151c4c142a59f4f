"""Differential attention on the CPU: the second softmax is subtracted before the values are read.

    scores    [2, h/2, t, s]    both halves, by matrix products with k1 and k2
    weights   [h/2, t, s]       softmax(scores[0]) - lambda * softmax(scores[1])
    out       [h/2, t, 2 * d]   weights times v1 and v2

Every key and every value is read once, with as many products as in one plain attention over the same bytes. ATen's
FlashAttention does not return its weights, so it would have to be called four times. All scores of a tile of queries
are in memory at once, so a tile has as many queries as `SCORES` allows. It is called four times under
`batch_invariant`.

Keys that no query sees may hold anything, also NaN: their scores are overwritten, and their values are cleared.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from einops import rearrange
from jaxtyping import Float, Int64
from torch import Tensor

from fastattn.kernels.cpu.attention import paged
from fastattn.kernels.cpu.blocks import Blocks, side_by_side
from fastattn.kernels.cpu.dequantize import QuantizedPool
from fastattn.kernels.cpu.schedule import schedule_of
from fastattn.kernels.problem import Subtraction, compute_dtype
from fastattn.kernels.torch_ops.merge import log_add_exp, share_of_keys
from refattn.batch import Batch
from refattn.options import AttentionOptions
from refattn.plan import Plan

TILE = 64  # most queries of a tile
SCORES = 2**22  # most scores of a tile: 16 MiB in float32
BUFFER = 2**19  # elements of k1 (of k2, v1, v2) that are gathered at a time: 2 MiB in float32
WASTE = 1.5  # decodes are computed together while that reads at most this many times their keys


@dataclass(frozen=True)
class _Piece:
    """Sequences with equally many queries, and the band of keys that some of the queries see."""

    rows: Int64[Tensor, "b t"]  # their query rows
    positions: Int64[Tensor, "b t"]
    seq_lens: Int64[Tensor, "b 1"]
    first_keys: Int64[Tensor, "b 1"]  # position of the first key of the blocks
    blocks: Blocks
    window: tuple[int, int]  # the plan's (left, right)


def differential(
    query: Float[Tensor, "t h d"],
    cache: Float[Tensor, "2 2 n p pairs d"],
    plan: Plan,
    options: AttentionOptions,
    subtraction: Subtraction,
    _: Float[Tensor, "t h d"] | None,
) -> tuple[Float[Tensor, "t half_h 2*d"], Float[Tensor, "t h"]]:
    """Attend twice over pages and subtract; see `fastattn.dispatch`."""
    (t, h, d), dtype = query.shape, query.dtype
    compute = compute_dtype(query.dtype)
    if options.batch_invariant:
        out, lse = _by_four_calls(query.to(compute), cache, plan, options, float(subtraction.lambda_full))
        return subtraction.finish(out).to(dtype), lse
    out = query.new_zeros(t, h // 2, 2 * d, dtype=compute)
    lse = query.new_full((t, h), -torch.inf, dtype=compute)
    if options.sinks is not None:  # the LSE of a query without visible keys
        lse[: int(plan.batch.cu_seqlens_q[-1])] = options.sinks.to(compute)
    query = query.to(compute) * (d**-0.5 if options.softmax_scale is None else options.softmax_scale)
    second = float(subtraction.lambda_full)

    block_size = cache.shape[3]
    for piece in schedule_of(plan).once(("pairs", h), lambda: _pieces(plan, h)):
        query_len, num_keys = piece.rows.shape[1], piece.blocks.hidden.numel()
        tile = max(1, min(TILE, SCORES // (h * num_keys)))
        if query_len <= tile:
            out[piece.rows], lse[piece.rows] = _tile(query[piece.rows], cache, piece, piece.blocks, options, second)
            continue
        (whole,) = piece.blocks.kv_chunks(piece.blocks.table.shape[1])  # one sequence's keys, once for all its tiles
        pools = cache.index_select(2, whole.blocks)
        if whole.stale is not None:
            pools.flatten(2, 3)[:, 1].index_fill_(1, whole.stale, 0.0)
        pools = pools.to(compute)
        for first in range(0, query_len, tile):
            part, columns = _queries_of(piece, slice(first, first + tile), block_size)
            if columns.start < columns.stop:
                out[part.rows], lse[part.rows] = _tile(query[part.rows], pools, part, columns, options, second)
    return subtraction.finish(out).to(dtype), lse


def _by_four_calls(
    query: Float[Tensor, "t h d"],
    cache: Float[Tensor, "2 2 n p pairs d"],
    plan: Plan,
    options: AttentionOptions,
    lambda_full: float,
) -> tuple[Float[Tensor, "t half_h 2*d"], Float[Tensor, "t h"]]:
    """Attend as plain attention does under `batch_invariant`, with each half's weights to the values of both halves.

    With several threads, the bits of a product of matrices depend on how many there are.
    """
    pairs, is_converted = cache.shape[4], cache.dtype != query.dtype
    (key_1, value_1), (key_2, value_2) = (
        [QuantizedPool(pool, query.dtype) if is_converted else pool for pool in half] for half in cache
    )
    outs, lses = [], []
    for half, key in enumerate((key_1, key_2)):
        sinks, slopes = (
            None if x is None else _of_half(x[None], pairs, half)[0] for x in (options.sinks, options.alibi_slopes)
        )
        own, heads = replace(options, sinks=sinks, alibi_slopes=slopes), _of_half(query, pairs, half)
        parts = [paged(heads, key, value, plan, own) for value in (value_1, value_2)]
        outs.append(torch.cat([out for out, _ in parts], -1))
        lses.append(parts[0][1])
    out = outs[0] - outs[1] * lambda_full  # rounded twice, wherever an element stands in a vector of the processor
    lse = rearrange(torch.stack(lses), "two t (pairs g) -> t (pairs g two)", pairs=pairs)
    return out, lse


def _of_half(x: Float[Tensor, "t h ..."], pairs: int, half: int) -> Float[Tensor, "t half_h ..."]:
    """Return the heads of one half, those of a pair of KV heads side by side."""
    return x.unflatten(1, (pairs, -1, 2))[:, :, :, half].flatten(1, 2)


def _pieces(plan: Plan, num_heads: int) -> list[_Piece]:
    """Cut a plan into groups of decodes with about equally many keys, and all other sequences one by one."""
    batch, (left, _) = plan.batch, plan.window
    assert batch.block_table is not None and plan.block_size is not None  # a plan over pages has them
    block_size = plan.block_size
    decodes, pieces = [], []
    for i, ((q0, q1), seq_len) in enumerate(zip(batch.query_rows(), batch.seq_lens.tolist(), strict=True)):
        num_keys = seq_len if left < 0 else min(seq_len, q1 - q0 + left)
        if q1 - q0 == 1 and num_keys:
            decodes.append((num_keys, i))
        elif q1 > q0 and num_keys:
            pieces.append(_piece(batch, [i], block_size, plan.window))
    groups: list[list[int]] = []
    longest = 0
    for num_keys, i in sorted(decodes, reverse=True):
        if (
            not groups
            or longest > WASTE * num_keys
            or num_heads * (longest + block_size) * (len(groups[-1]) + 1) > SCORES
        ):
            groups.append([])
            longest = num_keys
        groups[-1].append(i)
    pieces += [_piece(batch, group, block_size, plan.window) for group in groups]
    return pieces


def _piece(batch: Batch, group: list[int], block_size: int, window: tuple[int, int]) -> _Piece:
    left, _ = window
    assert batch.block_table is not None  # the path has checked it
    members = torch.tensor(group, device="cpu")
    begins, seq_lens, query_lens = (
        x[members, None].long() for x in (batch.cu_seqlens_q, batch.seq_lens, batch.query_lens)
    )
    queries = torch.arange(int(query_lens[0]), device="cpu")
    positions = seq_lens - query_lens + queries
    first_seen = torch.zeros_like(seq_lens) if left < 0 else (positions[:, :1] - left).clamp(min=0)
    blocks = side_by_side(batch.block_table[members], first_seen[:, 0].int(), batch.seq_lens[members], block_size)
    return _Piece(begins + queries, positions, seq_lens, blocks.positions[:, :1].long(), blocks, window)


def _queries_of(piece: _Piece, queries: slice, block_size: int) -> tuple[_Piece, slice]:
    """Take some queries of one sequence, and the columns of its blocks that some of them see."""
    left, right = piece.window
    positions, first_key, seq_len = piece.positions[:, queries], int(piece.first_keys), int(piece.seq_lens)
    begin = first_key if left < 0 else max(first_key, int(positions[0, 0]) - left)
    end = seq_len if right < 0 else min(seq_len, int(positions[0, -1]) + right + 1)
    columns = slice((begin - first_key) // block_size, -(-(end - first_key) // block_size))
    first_keys = piece.first_keys + columns.start * block_size
    return replace(piece, rows=piece.rows[:, queries], positions=positions, first_keys=first_keys), columns


def _tile(
    query: Float[Tensor, "b t h d"],
    pools: Float[Tensor, "2 2 n p pairs d"],
    piece: _Piece,
    blocks: Blocks | slice,
    options: AttentionOptions,
    lambda_full: float,
) -> tuple[Float[Tensor, "b t half_h 2*d"], Float[Tensor, "b t h"]]:
    """Attend with some queries, already scaled, to the keys in some blocks; a slice names blocks already cleared."""
    t, block_size, pairs = query.shape[1], pools.shape[3], pools.shape[4]
    num_keys = block_size * (blocks.stop - blocks.start if isinstance(blocks, slice) else blocks.table.shape[1])
    q = rearrange(query, "b t (pairs g two) d -> two b pairs (g t) d", pairs=pairs, two=2)
    scores = query.new_empty(*q.shape[:-1], num_keys)
    for half in (0, 1):
        for keys, key in _kv_chunks(pools[half, 0], blocks, query.dtype):
            scores[half, ..., keys] = _products(q[half], rearrange(key, "b s pairs d -> b pairs d s"))
    if options.softcap:
        scores.div_(options.softcap).tanh_().mul_(options.softcap)
    _hide(rearrange(scores, "two b pairs (g t) s -> two b pairs g t s", t=t), piece, options)

    weights = scores.softmax(-1)
    # The largest weight is exp(highest - lse), so two reductions give the LSE.
    highest = scores.amax(-1)
    lse = highest - weights.amax(-1).log()
    saw_nothing = highest == -torch.inf
    if saw_nothing.any():
        weights.masked_fill_(saw_nothing[..., None], 0.0)
        lse.masked_fill_(saw_nothing, -torch.inf)
    if options.sinks is not None:
        sinks = rearrange(options.sinks.to(lse.dtype), "(pairs g two) -> two 1 pairs g 1", pairs=pairs, two=2)
        sinks = sinks.expand(-1, -1, -1, -1, t).flatten(3)  # [2, 1, pairs, g * t]
        weights.mul_(share_of_keys(lse, sinks)[..., None])
        lse = log_add_exp(lse, sinks.expand_as(lse))

    difference = weights[0].sub_(weights[1], alpha=lambda_full)
    out = torch.zeros_like(q)
    for half in (0, 1):
        for keys, value in _kv_chunks(pools[half, 1], blocks, query.dtype):
            out[half] += _products(difference[..., keys], rearrange(value, "b s pairs d -> b pairs s d"))
    return (
        rearrange(out, "two b pairs (g t) d -> b t (pairs g) (two d)", t=t),
        rearrange(lse, "two b pairs (g t) -> b t (pairs g two)", t=t),
    )


def _kv_chunks(
    pool: Float[Tensor, "n p pairs d"], blocks: Blocks | slice, compute: torch.dtype
) -> Iterator[tuple[slice, Float[Tensor, "b s pairs d"]]]:
    """Read some columns of the blocks at a time through a small buffer: all at once would not stay in the cache."""
    if isinstance(blocks, slice):
        neighbours = pool[blocks].flatten(0, 1)
        yield slice(len(neighbours)), neighbours[None]
        return
    b, m = blocks.table.shape
    step = max(1, BUFFER // (b * pool[0].numel()))
    buffer = pool.new_empty(b * min(step, m), *pool.shape[1:])
    for kv_chunk in blocks.kv_chunks(step):
        rows = kv_chunk.gather(pool, buffer[: len(kv_chunk.blocks)]).view(b, -1, *pool.shape[2:])
        yield kv_chunk.keys, rows.to(compute)


def _products(left: Float[Tensor, "b pairs x y"], right: Float[Tensor, "b pairs y z"]) -> Float[Tensor, "b pairs x z"]:
    """Multiply matrices without a copy; `bmm` makes one of operands that are strided in two batch dimensions."""
    if len(left) == 1:
        return torch.bmm(left[0], right[0])[None]
    return torch.stack([torch.bmm(left[:, pair], right[:, pair]) for pair in range(left.shape[1])], dim=1)


def _hide(scores: Float[Tensor, "two b pairs g t s"], piece: _Piece, options: AttentionOptions) -> None:
    """Add the bias, and set the scores of hidden keys to -inf, in place."""
    left, right = piece.window
    end = (piece.seq_lens - piece.first_keys)[..., None]
    keys = torch.arange(scores.shape[-1], device="cpu")
    distance = (piece.positions - piece.first_keys)[..., None] - keys  # [b, t, s], how far the key lies before it
    if options.alibi_slopes is not None:
        slopes = options.alibi_slopes.to(scores.dtype)
        slopes = rearrange(slopes, "(pairs g two) -> two 1 pairs g 1 1", pairs=scores.shape[2], two=2)
        apart = distance.abs().to(scores.dtype).sqrt() if options.alibi_sqrt else distance.abs()
        scores -= slopes * rearrange(apart, "b t s -> b 1 1 t s")
    hidden = (keys >= end).expand_as(distance)
    if left >= 0:
        hidden = hidden | (distance > left)
    if right >= 0:
        hidden = hidden | (distance < -right)
    # Without a limit on the left, hidden keys are a suffix, and only their scores are written.
    first = 0 if left >= 0 else int((~hidden).all(0).all(0).sum())
    scores[..., first:].masked_fill_(rearrange(hidden[..., first:], "b t s -> b 1 1 t s"), -torch.inf)
