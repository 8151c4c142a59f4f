"""The CPU kernel: ATen's FlashAttention, called on pieces of a batch that it can compute.

ATen's call takes one dense rectangle of queries and keys, at most with a causal mask aligned top-left. So a batch
becomes pieces, and the pieces of one query merge by their log-sum-exp:

    a chunk with context     full part | causal part         (keys before the chunk | the chunk itself)
    a window, ALiBi          tiles of queries, each over the band of keys that it can see, with a mask
    a softcap                the same tiles by our own matrix products: ATen's call has no softcap
    decodes                  all sequences in one call, the query heads of a group as rows, a mask for their lengths

Memory grows with the tokens: a tile never holds more than `TILE` queries times `SLAB` keys.

Source: PyTorch, `aten::_scaled_dot_product_flash_attention_for_cpu`; the decomposition follows Dao 2023,
"FlashAttention-2", and its flash-decoding.
"""

from collections.abc import Iterator
from dataclasses import replace

import torch
from einops import rearrange, repeat
from jaxtyping import Float, Int32
from torch import Tensor
from torch.nn import functional

from fastattn.kernels import Options, Problem
from fastattn.merge import add_sinks, merge
from refattn.batch import Batch

TILE = 256  # queries of a masked tile
SLAB = 2048  # keys of a masked tile
SHORT = 16  # with at most this many queries, the heads of a group are rows of one call
WASTE = 1.5  # decodes go into one call while that reads at most this many times the keys there are

FLASH = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


def supports(problem: Problem) -> str | None:
    """Say why this kernel can't compute a problem, or None: it computes everything that is on a CPU."""
    if problem.device.type != "cpu":
        return f"computes on the CPU, the tensors are on {problem.device.type}"
    return None


def suits(problem: Problem) -> bool:
    """Say whether to take this kernel: for everything on a CPU."""
    return problem.device.type == "cpu"


def dense(
    query: Float[Tensor, "t h d"],
    key: Float[Tensor, "s hk d"],
    value: Float[Tensor, "s hk dv"],
    batch: Batch,
    options: Options,
) -> tuple[Float[Tensor, "t h dv"], Float[Tensor, "t h"]]:
    """Attend over ragged rows; see `fastattn.kernels.dense`."""
    out, lse = _empty_answer(query, value.shape[-1])
    for (q0, q1), (k0, k1) in zip(batch.query_rows(), batch.key_rows(), strict=True):
        if q1 > q0 and k1 > k0:
            out[q0:q1], lse[q0:q1] = _sequence(query[q0:q1], key[k0:k1], value[k0:k1], k1 - k0, options)
    return _with_sinks(out, lse, options.sinks, batch)


def paged(
    query: Float[Tensor, "t h d"],
    key_cache: Float[Tensor, "n p hk d"],
    value_cache: Float[Tensor, "n p hk dv"],
    batch: Batch,
    options: Options,
) -> tuple[Float[Tensor, "t h dv"], Float[Tensor, "t h"]]:
    """Attend over pages; see `fastattn.kernels.paged`."""
    out, lse = _empty_answer(query, value_cache.shape[-1])
    assert batch.block_table is not None  # the path has checked it
    query_rows, seq_lens, block_size = batch.query_rows(), batch.seq_lens.tolist(), key_cache.shape[1]

    apart = {i for i, (q0, q1) in enumerate(query_rows) if q1 > q0 and seq_lens[i]}
    if not options.batch_invariant and not options.softcap:
        for group in _groups_of_decodes(query_rows, seq_lens, apart):
            rows = torch.tensor([query_rows[i][0] for i in group])
            members = torch.tensor(group)
            out[rows], lse[rows] = _decodes(
                query[rows], key_cache, value_cache, batch.seq_lens[members], batch.block_table[members], options
            )
            apart -= set(group)

    for i in sorted(apart):
        (q0, q1), seq_len = query_rows[i], seq_lens[i]
        left, _ = options.window
        first_block = 0 if left < 0 else max(0, seq_len - (q1 - q0) - left) // block_size
        blocks = batch.block_table[i, first_block : -(-seq_len // block_size)]
        key, value = (
            rearrange(cache.index_select(0, blocks), "m p hk d -> (m p) hk d")[: seq_len - first_block * block_size]
            for cache in (key_cache, value_cache)
        )
        out[q0:q1], lse[q0:q1] = _sequence(query[q0:q1], key, value, seq_len, options)
    return _with_sinks(out, lse, options.sinks, batch)


def _sequence(
    query: Float[Tensor, "t h d"],
    key: Float[Tensor, "s hk d"],
    value: Float[Tensor, "s hk dv"],
    seq_len: int,
    options: Options,
) -> tuple[Float[Tensor, "t h dv"], Float[Tensor, "t h"]]:
    """Attend in one sequence; `key` and `value` are its last tokens, all those that a query may see."""
    context = seq_len - query.shape[0]
    left, right = options.window
    left = -1 if left >= seq_len - 1 else left  # a limit that nothing meets is none
    right = -1 if right >= query.shape[0] - 1 and not options.causal else right
    if context < 0 or left >= 0 or right > 0 or options.softcap or options.alibi_slopes is not None:
        return _tiles(query, key, value, seq_len, replace(options, window_size=(left, right), causal=False))
    if right < 0 or query.shape[0] == 1:
        return _flash(query, key, value, options.softmax_scale)
    own = _flash(query, key[context:], value[context:], options.softmax_scale, causal=True)
    if context == 0:
        return own
    before = _flash(query, key[:context], value[:context], options.softmax_scale)
    return _merge(before, own)


def _tiles(
    query: Float[Tensor, "t h d"],
    key: Float[Tensor, "s hk d"],
    value: Float[Tensor, "s hk dv"],
    seq_len: int,
    options: Options,
) -> tuple[Float[Tensor, "t h dv"], Float[Tensor, "t h"]]:
    """Attend tile by tile: some queries, and of the band of keys that they see a slab at a time."""
    out, lse = _empty_answer(query, value.shape[-1])
    first_key = seq_len - key.shape[0]
    left, right = options.window
    for q0 in range(0, query.shape[0], TILE):
        q1 = min(q0 + TILE, query.shape[0])
        positions = torch.arange(q0, q1)[:, None] + (seq_len - query.shape[0])
        begin = first_key if left < 0 else max(first_key, int(positions[0]) - left)
        end = seq_len if right < 0 else min(seq_len, int(positions[-1]) + right + 1)
        parts = []
        for k0 in range(begin, end, SLAB):
            k1 = min(k0 + SLAB, end)
            distance = positions - torch.arange(k0, k1)  # how far the key lies before the query
            hidden = torch.zeros_like(distance, dtype=torch.bool)
            if left >= 0:
                hidden |= distance > left
            if right >= 0:
                hidden |= distance < -right
            bias = torch.zeros(1, *distance.shape, dtype=_compute_dtype(query.dtype))
            if options.alibi_slopes is not None:
                bias = -rearrange(options.alibi_slopes.to(bias.dtype), "h -> h 1 1") * distance
            bias = bias.masked_fill(hidden, -torch.inf)
            rows = slice(k0 - first_key, k1 - first_key)
            if options.softcap:
                part = _capped(query[q0:q1], key[rows], value[rows], bias, options)
            else:
                part = _flash(query[q0:q1], key[rows], value[rows], options.softmax_scale, bias=bias)
            parts.append(part)
        if parts:
            out[q0:q1], lse[q0:q1] = _merge(*parts)
    return out, lse


def _decodes(
    query: Float[Tensor, "b h d"],
    key_cache: Float[Tensor, "n p hk d"],
    value_cache: Float[Tensor, "n p hk dv"],
    seq_lens: Int32[Tensor, "b"],
    block_table: Int32[Tensor, "b m"],
    options: Options,
) -> tuple[Float[Tensor, "b h dv"], Float[Tensor, "b h"]]:
    """Attend from one query of each sequence in one call, over as many blocks as the longest of them has."""
    block_size, hk = key_cache.shape[1:3]
    seq_lens = rearrange(seq_lens, "b -> b 1")
    left, _ = options.window
    first_key = torch.zeros_like(seq_lens) if left < 0 else (seq_lens - 1 - left).clamp(min=0)
    first_block, last_block = first_key // block_size, (seq_lens - 1) // block_size
    columns = first_block + torch.arange(int((last_block - first_block).max()) + 1)
    # Behind its end a sequence reads its own last block again, masked: other blocks may hold anything.
    blocks = block_table.gather(1, torch.minimum(columns, last_block).long())
    key, value = (
        rearrange(cache.index_select(0, blocks.flatten()), "(b m) p hk d -> b hk (m p) d", b=len(query))
        for cache in (key_cache, value_cache)
    )
    positions = rearrange(columns[..., None] * block_size + torch.arange(block_size), "b m p -> b (m p)")
    bias = torch.zeros(len(query), 1, 1, positions.shape[1], dtype=_compute_dtype(query.dtype))
    if options.alibi_slopes is not None:
        slopes = rearrange(options.alibi_slopes.to(bias.dtype), "(hk g) -> 1 hk g 1", hk=hk)
        bias = -slopes * rearrange(seq_lens - 1 - positions, "b s -> b 1 1 s")
    hidden = (positions >= seq_lens) | (positions < first_key)
    bias = bias.masked_fill(rearrange(hidden, "b s -> b 1 1 s"), -torch.inf)
    out, lse = _call(rearrange(query, "b (hk g) d -> b hk g d", hk=hk), key, value, options.softmax_scale, bias=bias)
    return rearrange(out, "b hk g dv -> b (hk g) dv"), rearrange(lse, "b hk g -> b (hk g)")


def _groups_of_decodes(
    query_rows: list[tuple[int, int]], seq_lens: list[int], candidates: set[int]
) -> Iterator[list[int]]:
    """Group the sequences with one query so that the longest of a group is at most `WASTE` times the shortest."""
    decodes = [i for i in candidates if query_rows[i][1] - query_rows[i][0] == 1]
    group: list[int] = []
    for i in sorted(decodes, key=lambda i: -seq_lens[i]):
        if group and seq_lens[group[0]] > WASTE * seq_lens[i]:
            yield group
            group = []
        group.append(i)
    if group:
        yield group


def _flash(
    query: Float[Tensor, "t h d"],
    key: Float[Tensor, "s hk d"],
    value: Float[Tensor, "s hk dv"],
    softmax_scale: float | None,
    *,
    causal: bool = False,
    bias: Float[Tensor, "#h t s"] | None = None,
) -> tuple[Float[Tensor, "t h dv"], Float[Tensor, "t h"]]:
    """Attend over one rectangle. With few queries, the heads that share a key head are rows of one matrix product."""
    t, hk = query.shape[0], key.shape[1]
    k, v = rearrange(key, "s hk d -> 1 hk s d"), rearrange(value, "s hk dv -> 1 hk s dv")
    if t > SHORT or causal:
        bias = None if bias is None else bias[None]
        out, lse = _call(rearrange(query, "t h d -> 1 h t d"), k, v, softmax_scale, causal=causal, bias=bias)
        return rearrange(out, "1 h t dv -> t h dv"), rearrange(lse, "1 h t -> t h")
    if bias is not None:
        bias = (
            repeat(bias, "1 t s -> 1 1 (g t) s", g=query.shape[1] // hk)
            if bias.shape[0] == 1
            else rearrange(bias, "(hk g) t s -> 1 hk (g t) s", hk=hk)
        )
    out, lse = _call(rearrange(query, "t (hk g) d -> 1 hk (g t) d", hk=hk), k, v, softmax_scale, bias=bias)
    return rearrange(out, "1 hk (g t) dv -> t (hk g) dv", t=t), rearrange(lse, "1 hk (g t) -> t (hk g)", t=t)


def _call(
    query: Float[Tensor, "b h t d"],
    key: Float[Tensor, "b hk s d"],
    value: Float[Tensor, "b hk s dv"],
    softmax_scale: float | None,
    *,
    causal: bool = False,
    bias: Float[Tensor, "b #h #t s"] | None = None,
) -> tuple[Float[Tensor, "b h t dv"], Float[Tensor, "b h t"]]:
    """Call ATen, which wants one head size for keys and values and answers a row that sees nothing with an LSE of 0."""
    d, dv = query.shape[-1], value.shape[-1]
    scale = d**-0.5 if softmax_scale is None else softmax_scale
    if d != dv:
        query, key, value = (functional.pad(x, (0, max(d, dv) - x.shape[-1])) for x in (query, key, value))
    mask = None if bias is None else bias.to(query.dtype)
    out, lse = FLASH(query, key, value, 0.0, causal, attn_mask=mask, scale=scale)
    if bias is not None:
        saw_nothing = (bias == -torch.inf).all(-1).expand_as(lse)
        lse = lse.masked_fill(saw_nothing, -torch.inf)
        out = out.masked_fill(saw_nothing[..., None], 0.0)
    return out[..., :dv], lse


def _capped(
    query: Float[Tensor, "t h d"],
    key: Float[Tensor, "s hk d"],
    value: Float[Tensor, "s hk dv"],
    bias: Float[Tensor, "#h t s"],
    options: Options,
) -> tuple[Float[Tensor, "t h dv"], Float[Tensor, "t h"]]:
    """Attend over one rectangle with a softcap, by two matrix products."""
    compute = _compute_dtype(query.dtype)
    scale = query.shape[-1] ** -0.5 if options.softmax_scale is None else options.softmax_scale
    h, group = query.shape[1], query.shape[1] // key.shape[1]
    q = rearrange(query.to(compute) * (scale / options.softcap), "t (hk g) d -> hk (g t) d", g=group)
    k, v = rearrange(key.to(compute), "s hk d -> hk d s"), rearrange(value.to(compute), "s hk dv -> hk s dv")
    scores = rearrange((q @ k).tanh_().mul_(options.softcap), "hk (g t) s -> (hk g) t s", g=group) + bias
    lse = scores.logsumexp(-1)  # [h, t]
    weights = scores.sub_(lse[..., None]).exp_().nan_to_num_(0.0)  # NaN is -inf minus -inf: a row that sees nothing
    out = rearrange(weights, "(hk g) t s -> hk (g t) s", g=group) @ v
    out = rearrange(out, "hk (g t) dv -> t (hk g) dv", g=group)
    return out.to(query.dtype), rearrange(lse, "h t -> t h", h=h)


def _merge(*parts: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    if len(parts) == 1:
        return parts[0]
    outs, lses = zip(*parts, strict=True)
    return merge(outs, lses)


def _empty_answer(
    query: Float[Tensor, "t h d"], value_size: int
) -> tuple[Float[Tensor, "t h dv"], Float[Tensor, "t h"]]:
    out = query.new_zeros(*query.shape[:2], value_size)
    return out, query.new_full(query.shape[:2], -torch.inf, dtype=_compute_dtype(query.dtype))


def _with_sinks(
    out: Float[Tensor, "t h dv"], lse: Float[Tensor, "t h"], sinks: Float[Tensor, "h"] | None, batch: Batch
) -> tuple[Float[Tensor, "t h dv"], Float[Tensor, "t h"]]:
    if sinks is not None:
        rows = slice(int(batch.cu_seqlens_q[-1]))  # padding rows see no sink either
        out[rows], lse[rows] = add_sinks(out[rows], lse[rows], sinks)
    return out, lse


def _compute_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32
