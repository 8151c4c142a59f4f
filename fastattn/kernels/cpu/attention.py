"""The CPU kernel: ATen's FlashAttention, called on pieces of a batch that it can compute.

ATen's call computes one dense rectangle of queries and keys, optionally with a causal mask aligned top-left. So the
batch is split into pieces, and the partial outputs of one query merge by their log-sum-exps:

    a chunk with context     full part | causal part         (keys before the chunk | the chunk itself)
    a window                 small tiles of queries in one call, each over the band of keys that it can see, with a mask
    ALiBi, edges, positions  larger tiles one by one, over some keys at a time, with a mask
    intervals                queries that see the same keys in one call; if each sees one more, they are a chunk
    a drafted tree           full part | its nodes, with a mask
    a softcap                masked tiles by our own matrix products: ATen's call has no softcap
    decodes                  some sequences in one call, the query heads of a group as rows, a mask for their lengths
    short prompts            some in one call, padded to the longest
    rows of one length       all sequences in one call, if each is whole
    batch invariance         tiles and KV chunks of one size, which begin at multiples of it

Memory grows linearly with the tokens: a tile never holds more than `TILE` queries times `SLAB` keys.

Keys that no query of the sequence sees are not passed to ATen, because they may hold NaN: a mask only adds `-inf` to
their scores, and NaN stays NaN. Other defects of ATen's call are worked around in `_with_unit_stride`, and beside it.

Source: PyTorch, `aten::_scaled_dot_product_flash_attention_for_cpu`; the decomposition follows Dao 2023,
"FlashAttention-2", and its flash-decoding.
"""

import threading
from collections.abc import Iterator, Sequence

import torch
from einops import rearrange
from jaxtyping import Float, Int32, Int64
from torch import Tensor
from torch.nn import functional

from fastattn.kernels.cpu import rectangles
from fastattn.kernels.cpu.blocks import read_blocks
from fastattn.kernels.cpu.dequantize import QuantizedPool
from fastattn.kernels.cpu.rectangles import call_aten, flash
from fastattn.kernels.cpu.schedule import Decodes, Part, Piece, Prompts, Scratch, View, branches_of, schedule_of
from fastattn.kernels.kernel import options_of
from fastattn.kernels.problem import asked_of, compute_dtype, uses_positions
from fastattn.kernels.replay import Run
from fastattn.kernels.torch_ops.merge import add_sinks, merge
from refattn.keys import Pages
from refattn.options import AttentionOptions
from refattn.plan import Plan
from refattn.trees import AttentionPlan, TreePlan

TILE = 256  # queries of a masked tile
SLAB = 2048  # keys of a masked tile
BAND_TILE = 32  # queries of a tile of a window: small, as it reads as many keys beyond its window
BUFFER = 2**19  # elements of keys that a thread gathers at a time: 2 MiB in float32
INVARIANT_TILE = 16  # queries of a tile under `batch_invariant`; at most `rectangles.SHORT`
INVARIANT_SLAB = 512  # keys of such a tile: the block size of ATen's call

PLAIN = options_of("softmax_scale", "sinks", "alibi_sqrt")  # options of a plain call; sinks are merged in afterwards


def varlen(
    query: Float[Tensor, "t h d"],
    key: Float[Tensor, "s hk d"],
    value: Float[Tensor, "s hk dv"],
    plan: Plan,
    options: AttentionOptions,
) -> tuple[Float[Tensor, "t h dv"], Float[Tensor, "t h"]]:
    """Attend over ragged rows; see `fastattn.dispatch`."""
    query, key, value = _with_unit_stride(query), _with_unit_stride(key), _with_unit_stride(value)
    schedule, positions = schedule_of(plan), uses_positions(plan, options)
    count = 0 if positions or not _is_plain(options) else schedule.count_alike(len(query), len(key))
    if count > 1:
        q, k, v = (x.unflatten(0, (count, -1)).transpose(1, 2) for x in (query, key, value))
        answer = call_aten(q, k, v, options.softmax_scale, causal=plan.window == (-1, 0))
        out, lse = (x.transpose(1, 2).flatten(0, 1) for x in answer)
        return _with_sinks(out, lse, options.sinks, plan)
    out, lse = _empty_output(query, value.shape[-1])
    for rows, first_row, view in schedule.rows(positions):
        if out[rows].numel() and view.num_keys:
            keys = slice(first_row + view.first_key, first_row + view.end_key)
            out[rows], lse[rows] = _sequence(query[rows], key[keys], value[keys], view, options)
    return _with_sinks(out, lse, options.sinks, plan)


def paged(
    query: Float[Tensor, "t h d"],
    key_cache: Float[Tensor, "n p hk d"] | QuantizedPool,
    value_cache: Float[Tensor, "n p hk dv"] | QuantizedPool,
    plan: Plan,
    options: AttentionOptions,
) -> tuple[Float[Tensor, "t h dv"], Float[Tensor, "t h"]]:
    """Attend over pages; see `fastattn.dispatch`."""
    pieces = _pieces(query, key_cache, plan, options)
    query = _with_unit_stride(query)
    answers = [_piece(query[piece.rows], key_cache, value_cache, piece, options) for piece in pieces]
    if _follow_each_other(pieces, query.shape[0]):
        out, lse = answers[0] if len(answers) == 1 else (torch.cat(parts) for parts in zip(*answers, strict=True))
    else:
        out, lse = _empty_output(query, value_cache.shape[-1])
        for piece, answer in zip(pieces, answers, strict=True):
            out[piece.rows], lse[piece.rows] = answer
    return _with_sinks(out, lse, options.sinks, plan)


def replay_of_decodes(
    query: Float[Tensor, "t h d"],
    key_cache: Float[Tensor, "n p hk d"],
    value_cache: Float[Tensor, "n p hk dv"],
    plan: Plan,
    options: AttentionOptions,
    return_lse: bool,
) -> Run | None:
    """Return a replay of `paged` if it is a single plain call of ATen for decodes, else None."""
    pieces = _pieces(query, key_cache, plan, options)
    if not _follow_each_other(pieces, query.shape[0]) or len(pieces) > 1 or not isinstance(pieces[0], Decodes):
        return None
    (part, *others), (b, h, d), hk = pieces[0].parts, query.shape, key_cache.shape[2]
    if others or pieces[0].runs > 1 or not part.all_see_some:  # their outputs are merged
        return None
    if options.alibi_slopes is not None or options.sinks is not None or _with_unit_stride(query) is not query:
        return None
    scale = d**-0.5 if options.softmax_scale is None else options.softmax_scale
    is_long = part.bias is not None or part.keys.stop - part.keys.start >= rectangles.FEW
    if scale < rectangles.TINY or d != value_cache.shape[3] or not is_long:  # these `call_aten` works around
        return None
    bias = None if part.bias is None else part.bias.to(compute_dtype(query.dtype))

    def replay(
        query: Tensor, keys: Pages, plan: AttentionPlan, options: AttentionOptions, out: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        key, value = _gathered(keys.key_cache, keys.value_cache, part, b)
        answer, lse = rectangles.FLASH(
            query.view(b, hk, h // hk, d), key, value, 0.0, False, attn_mask=bias, scale=scale
        )
        if return_lse and not answer[..., 0].all():
            rectangles.fix_lse(answer, lse, query.view(b, hk, h // hk, d), key, scale, bias=bias)
        return answer.flatten(1, 2), lse.flatten(1, 2) if return_lse else lse

    return replay


def _pieces(
    query: Float[Tensor, "t h d"],
    key_cache: Float[Tensor, "n p hk d"] | QuantizedPool,
    plan: Plan,
    options: AttentionOptions,
) -> Sequence[Piece]:
    """Return the pieces of a batch."""
    if not query.numel():
        return ()
    positions, schedule = plan.positions is not None and uses_positions(plan, options), schedule_of(plan)
    if positions or options.batch_invariant or options.softcap or plan.first_visible is not None:
        return schedule.apart(positions)
    return schedule.together(key_cache.shape[1:], BUFFER, prompts=options.alibi_slopes is None)


def tree(
    query: Float[Tensor, "t h d"],
    key_cache: Float[Tensor, "n p hk d"] | QuantizedPool,
    value_cache: Float[Tensor, "n p hk dv"] | QuantizedPool,
    plan: TreePlan,
    options: AttentionOptions,
) -> tuple[Float[Tensor, "t h dv"], Float[Tensor, "t h"]]:
    """Attend over pages that end with a tree; see `fastattn.dispatch`."""
    before = paged(query, key_cache, value_cache, plan.prefix, options.without_sinks())
    out, lse = _empty_output(query, value_cache.shape[-1])
    query = _with_unit_stride(query)
    for branches in schedule_of(plan.whole).once("branches", lambda: list(branches_of(plan))):
        num_nodes = branches.seen.shape[1]
        key, value = (
            read_blocks(cache, branches.blocks).flatten(0, 1)[branches.first_row :][:num_nodes]
            for cache in (key_cache, value_cache)
        )
        bias = _bias(branches.distance, query.dtype, plan.whole.window, options)
        bias = bias.masked_fill_(~branches.seen, -torch.inf)
        out[branches.rows], lse[branches.rows] = rectangles.attend(query[branches.rows], key, value, bias, options)
    return _with_sinks(*_merge(before, (out, lse)), options.sinks, plan.whole)


def _with_unit_stride(x: Float[Tensor, "rows heads size"]) -> Float[Tensor, "rows heads size"]:
    """Copy a tensor that ATen's call would misread: it assumes a unit stride of the elements of a head.

    Rows and heads of queries are also rows of matrices, which must not overlap.
    """
    *strides, last = x.stride()
    return x if last == 1 and min(strides) >= x.shape[-1] else x.clone(memory_format=torch.contiguous_format)


def _follow_each_other(pieces: Sequence[Piece], count: int) -> bool:
    """Return whether the rows of some pieces, concatenated, are all `count` rows in order."""
    end = 0
    for piece in pieces:
        if not isinstance(piece.rows, slice) or piece.rows.start != end:
            return False
        end = piece.rows.stop
    return end == count > 0


def _is_plain(options: AttentionOptions) -> bool:
    """Return whether ATen's call alone computes all options that are set; one that is not in `PLAIN` needs a mask."""
    return asked_of(options) <= PLAIN


def _piece(
    query: Float[Tensor, "t h d"],
    key_cache: Float[Tensor, "n p hk d"] | QuantizedPool,
    value_cache: Float[Tensor, "n p hk dv"] | QuantizedPool,
    piece: Piece,
    options: AttentionOptions,
) -> tuple[Float[Tensor, "t h dv"], Float[Tensor, "t h"]]:
    """Attend from the query rows of a piece."""
    if isinstance(piece, Decodes):
        return _decodes(query, key_cache, value_cache, piece, options)
    if isinstance(piece, Prompts):
        return _prompts(query, key_cache, value_cache, piece, options)
    if piece.view.window == (-1, -1) and piece.view.intervals is None and _is_plain(options):
        kv_chunks = _kv_chunks(key_cache, value_cache, piece.blocks, piece.view.num_keys)
        return _merge(*(flash(query, k, v, options.softmax_scale) for k, v in kv_chunks))
    first_row = piece.view.first_key % key_cache.shape[1]
    key, value = (
        read_blocks(cache, piece.blocks).flatten(0, 1)[first_row : first_row + piece.view.num_keys]
        for cache in (key_cache, value_cache)
    )
    return _sequence(query, key, value, piece.view, options)


def _decodes(
    query: Float[Tensor, "b h d"],
    key_cache: Float[Tensor, "n p hk d"] | QuantizedPool,
    value_cache: Float[Tensor, "n p hk dv"] | QuantizedPool,
    decodes: Decodes,
    options: AttentionOptions,
) -> tuple[Float[Tensor, "b h dv"], Float[Tensor, "b h"]]:
    """Attend from one query of each sequence to the keys of all, gathered in a small buffer.

    Gathering all keys at once would write them to memory and read them back; the buffer stays in the cache.
    """
    (b, h, d), hk = query.shape, key_cache.shape[2]
    rows = query.reshape(b, hk, h // hk, d)  # the heads of a group are rows of one matrix product
    if decodes.runs > 1:
        rows = rows.repeat_interleave(decodes.runs, 0)
    outs, lses = [], []
    for part in decodes.parts:
        key, value = _gathered(key_cache, value_cache, part, len(rows))
        bias = _bias_of(part, rows, options)
        out, lse = call_aten(rows, key, value, options.softmax_scale, bias=bias, all_see_some=part.all_see_some)
        if len(decodes.parts) == decodes.runs == 1:
            return out.flatten(1, 2), lse.flatten(1, 2)
        outs.append(out.reshape(b, decodes.runs, h, -1))
        lses.append(lse.reshape(b, decodes.runs, h))
    lse = lses[0] if len(lses) == 1 else torch.cat(lses, 1)
    weights = lse.softmax(1)  # each query sees some key, but maybe not in each run
    out = (outs[0] if len(outs) == 1 else torch.cat(outs, 1)).mul(weights[..., None]).sum(1).to(query.dtype)
    return out, lse.amax(1) - weights.amax(1).log()  # the largest weight is exp(highest - lse)


def _prompts(
    query: Float[Tensor, "t h d"],
    key_cache: Float[Tensor, "n p hk d"] | QuantizedPool,
    value_cache: Float[Tensor, "n p hk dv"] | QuantizedPool,
    prompts: Prompts,
    options: AttentionOptions,
) -> tuple[Float[Tensor, "t h dv"], Float[Tensor, "t h"]]:
    """Attend in whole prompts by one call: the causal mask hides the padding after the shorter ones."""
    if prompts.places is not None:
        padded = query.new_zeros(prompts.count * prompts.part.keys.stop, *query.shape[1:])
        padded[prompts.places] = query
        query = padded
    rows = query.unflatten(0, (prompts.count, -1)).transpose(1, 2)
    key, value = _gathered(key_cache, value_cache, prompts.part, prompts.count)
    out, lse = (
        x.transpose(1, 2).flatten(0, 1) for x in call_aten(rows, key, value, options.softmax_scale, causal=True)
    )
    return (out, lse) if prompts.places is None else (out[prompts.places], lse[prompts.places])


def _gathered(
    key_cache: Float[Tensor, "n p hk d"] | QuantizedPool,
    value_cache: Float[Tensor, "n p hk dv"] | QuantizedPool,
    part: Part,
    count: int,
) -> tuple[Float[Tensor, "{count} hk s d"], Float[Tensor, "{count} hk s dv"]]:
    """Gather keys and values, with a row for each sequence or run; the next call overwrites them.

    All layers of a step gather into the same views of the thread's buffer.
    """
    caches = (key_cache,) if value_cache is key_cache else (key_cache, value_cache)
    name = threading.get_ident(), *((cache.dtype, cache.shape[3]) for cache in caches)
    scratch = part.scratch.get(name)
    if scratch is None:
        scratch = part.scratch[name] = _scratch(part, caches, count)
    for cache, blocks in zip(caches, scratch.blocks, strict=True):
        read_blocks(cache, part.kv_chunk.blocks, blocks)
    if part.kv_chunk.stale is not None:
        for rows in scratch.rows:
            rows.index_fill_(-3, part.kv_chunk.stale, 0.0)
    return scratch.rectangles[0], scratch.rectangles[-1]


def _scratch(part: Part, caches: Sequence[Float[Tensor, "_n _p _hk _d"] | QuantizedPool], count: int) -> Scratch:
    """Make views of the thread's buffer; `caches` and `count` are those of `_gathered`."""
    if len(caches) == 2 and caches[0].shape == caches[1].shape and caches[0].dtype == caches[1].dtype:
        both = _buffer(2 * part.kv_chunk.blocks.numel(), caches[0], 0).unflatten(0, (2, -1))
        blocks, rows = list(both), [both.flatten(1, 2)]
    else:
        blocks = [_buffer(part.kv_chunk.blocks.numel(), cache, number) for number, cache in enumerate(caches)]
        rows = [some.flatten(0, 1) for some in blocks]
    rectangles = [some.view(count, -1, *some.shape[2:])[:, part.keys].transpose(1, 2) for some in blocks]
    return Scratch(blocks, rows, rectangles)


def _bias_of(
    part: Part, query: Float[Tensor, "b hk g d"], options: AttentionOptions
) -> Float[Tensor, "b #hk #g s"] | None:
    """Return the bias on the scores of decodes: ALiBi, -inf on hidden keys; None for no bias."""
    compute = torch.promote_types(query.dtype, torch.float32)
    bias = None if part.bias is None else part.bias.to(compute)
    if options.alibi_slopes is None:
        return bias
    slopes = options.alibi_slopes.to(compute).unflatten(0, query.shape[1:3])
    assert part.distance is not None  # decodes have it
    distance = part.distance.to(compute)
    distance = distance.clamp(min=0).sqrt() if options.alibi_sqrt else distance
    distance = slopes[..., None] * distance[:, None, None]  # no visible key lies after the query
    return -distance if bias is None else bias - distance


class _Memory(threading.local):
    """Buffers for gathered keys and values, kept from call to call: new memory costs a page fault for every 4 KiB."""

    def __init__(self) -> None:
        self.of: dict[tuple[int, torch.dtype], Tensor] = {}


_memory = _Memory()


def _buffer(
    count: int, cache: Float[Tensor, "n p hk d"] | QuantizedPool, number: int
) -> Float[Tensor, "{count} p hk d"]:
    """Return the thread's buffer for blocks of keys (number 0) or of values (1)."""
    size = count * cache.shape[1:].numel()
    kept = _memory.of.get((number, cache.dtype))
    if kept is None or kept.numel() < size:
        with torch.inference_mode(False):  # else it could be used in inference mode only
            kept = _memory.of[number, cache.dtype] = torch.empty(size, dtype=cache.dtype, device="cpu")
    return kept[:size].view(count, *cache.shape[1:])


def _kv_chunks(
    key_cache: Float[Tensor, "n p hk d"] | QuantizedPool,
    value_cache: Float[Tensor, "n p hk dv"] | QuantizedPool,
    blocks: Int32[Tensor, "m"],
    num_keys: int,
) -> Iterator[tuple[Float[Tensor, "s hk d"], Float[Tensor, "s hk dv"]]]:
    """Gather the first keys of a sequence, some blocks at a time through a small buffer, as `_decodes` does."""
    block_size = key_cache.shape[1]
    step = max(1, BUFFER * torch.get_num_threads() // key_cache.shape[1:].numel())
    caches = [key_cache] if value_cache is key_cache else [key_cache, value_cache]
    for column in range(0, len(blocks), step):
        some = blocks[column : column + step]
        gathered = [
            read_blocks(cache, some, _buffer(len(some), cache, i)).flatten(0, 1)[: num_keys - column * block_size]
            for i, cache in enumerate(caches)
        ]
        yield gathered[0], gathered[-1]


def _sequence(
    query: Float[Tensor, "t h d"],
    key: Float[Tensor, "s hk d"],
    value: Float[Tensor, "s hk dv"],
    view: View,
    options: AttentionOptions,
) -> tuple[Float[Tensor, "t h dv"], Float[Tensor, "t h"]]:
    """Attend in one sequence; `key` and `value` are those of `view`, from its first key on."""
    context = int(view.positions[0])
    if options.batch_invariant:
        return _aligned_tiles(query, key, value, view, options)
    if view.intervals is not None:
        return _segments(query, key, value, view, options)
    if _is_plain(options) and view.window == (-1, -1):
        return flash(query, key, value, options.softmax_scale)
    if not _is_plain(options) or view.window != (-1, 0) or not view.consecutive or context < 0:
        return _tiles(query, key, value, view, options)
    own = flash(query, key[context:], value[context:], options.softmax_scale, causal=True)
    if context == 0:
        return own
    before = flash(query, key[:context], value[:context], options.softmax_scale)
    return _merge(before, own)


def _segments(
    query: Float[Tensor, "t h d"],
    key: Float[Tensor, "s hk d"],
    value: Float[Tensor, "s hk dv"],
    view: View,
    options: AttentionOptions,
) -> tuple[Float[Tensor, "t h dv"], Float[Tensor, "t h"]]:
    """Attend from queries that see an interval of keys each, one segment at a time."""
    assert view.intervals is not None
    out, lse = _empty_output(query, value.shape[-1])
    for segment in view.intervals.segments:
        rows = segment.rows
        if segment.kind == "any" or not _is_plain(options):
            for q0, q1 in _cut(rows.start, rows.stop):
                out[q0:q1], lse[q0:q1] = _masked(query[q0:q1], key, value, view, slice(q0, q1), options)
            continue
        k, v = (x[segment.first_key - view.first_key : segment.end_key - view.first_key] for x in (key, value))
        if segment.kind == "same":
            out[rows], lse[rows] = flash(query[rows], k, v, options.softmax_scale)
            continue
        context = len(k) - (rows.stop - rows.start)  # keys of the first query but for its last: all see them
        parts = [flash(query[rows], k[context:], v[context:], options.softmax_scale, causal=True)]
        if context:
            parts.append(flash(query[rows], k[:context], v[:context], options.softmax_scale))
        out[rows], lse[rows] = _merge(*parts)
    return out, lse


def _masked(
    query: Float[Tensor, "t h d"],
    key: Float[Tensor, "s hk d"],
    value: Float[Tensor, "s hk dv"],
    view: View,
    rows: slice,
    options: AttentionOptions,
) -> tuple[Float[Tensor, "t h dv"], Float[Tensor, "t h"]]:
    """Attend from a tile, the queries `rows` of a view, to the keys that it sees, a KV chunk at a time, with a mask."""
    parts, at = [], torch.arange(rows.start, rows.stop, device="cpu")
    begin, end = _seen_by(view, rows)
    for k0 in range(begin, end, SLAB):
        k1 = min(k0 + SLAB, end)
        bias = _bias_in(view, at, torch.arange(k0, k1, device="cpu"), query.dtype, options)
        k, v = (x[k0 - view.first_key : k1 - view.first_key] for x in (key, value))
        parts.append(rectangles.attend(query, k, v, bias, options))
    return _merge(*parts) if parts else _empty_output(query, value.shape[-1])


def _tiles(
    query: Float[Tensor, "t h d"],
    key: Float[Tensor, "s hk d"],
    value: Float[Tensor, "s hk dv"],
    view: View,
    options: AttentionOptions,
) -> tuple[Float[Tensor, "t h dv"], Float[Tensor, "t h"]]:
    """Attend tile by tile, to the keys that a tile sees, a KV chunk at a time."""
    out, lse = _empty_output(query, value.shape[-1])
    t = query.shape[0]
    band = _band_rows(query, key, value, view, options)
    if len(band):
        rows = slice(band.start, band.stop)
        first_key = int(view.positions[band.start]) - view.window[0] - view.first_key
        out[rows], lse[rows] = _band(query[rows], key, value, first_key, view.window, options)
    for q0, q1 in (*_cut(0, band.start), *_cut(band.stop, t)):
        out[q0:q1], lse[q0:q1] = _masked(query[q0:q1], key, value, view, slice(q0, q1), options)
    return out, lse


def _aligned_tiles(
    query: Float[Tensor, "t h d"],
    key: Float[Tensor, "s hk d"],
    value: Float[Tensor, "s hk dv"],
    view: View,
    options: AttentionOptions,
) -> tuple[Float[Tensor, "t h dv"], Float[Tensor, "t h"]]:
    """Attend in tiles of one shape, in which the place of a query or a key depends on its position alone.

    The last bits of a product depend on its shape, and on the place of a row in it. So the bits of a query do not
    depend on other queries, not even of its own sequence. Places without a query or a key hold zeros. A query of zeros
    has the position of its nearest neighbour, so that it adds no visible key.
    """
    out, lse = _empty_output(query, value.shape[-1])
    t, offset = query.shape[0], int(view.positions[0]) + view.before if view.consecutive else 0
    for q0 in range(-(offset % INVARIANT_TILE), t, INVARIANT_TILE):
        rows = slice(max(0, q0), min(q0 + INVARIANT_TILE, t))
        places = slice(rows.start - q0, rows.stop - q0)
        at = torch.arange(q0, q0 + INVARIANT_TILE, device="cpu").clamp(rows.start, rows.stop - 1)
        tile = _take(query, q0, INVARIANT_TILE)
        parts = []
        begin, end = _seen_by(view, rows)
        for k0 in range(begin - (begin + view.before) % INVARIANT_SLAB, end, INVARIANT_SLAB):
            keys = torch.arange(k0, k0 + INVARIANT_SLAB, device="cpu")
            bias = _bias_in(view, at, keys, query.dtype, options)
            missing = (keys < view.first_key) | (keys >= view.end_key)
            k, v = (_take(x, k0 - view.first_key, INVARIANT_SLAB) for x in (key, value))
            parts.append(rectangles.attend_to_each(tile, k, v, bias.masked_fill_(missing, -torch.inf), options))
        if parts:
            out[rows], lse[rows] = (x[places] for x in _merge(*parts))
    return out, lse


def _take(x: Float[Tensor, "rows heads size"], first: int, count: int) -> Float[Tensor, "{count} heads size"]:
    """Return `count` rows of `x` from row `first` on, zeros where it has none."""
    begin, end = max(0, first), min(first + count, len(x))
    return functional.pad(x[begin:end], (0, 0, 0, 0, begin - first, first + count - end)).contiguous()


def _seen_by(view: View, rows: slice) -> tuple[int, int]:
    """Return the first key that some queries of a view see, and the one past their last."""
    if view.intervals is not None:
        first, last = view.intervals.first[rows], view.intervals.last[rows]
        sees = last >= 0
        return (int(first[sees].min()), int(last.max()) + 1) if sees.any() else (view.first_key, view.first_key)
    (left, right), positions = view.window, view.positions[rows]
    begin = view.first_key if left < 0 else max(view.first_key, int(positions.min()) - left)
    end = view.end_key if right < 0 else min(view.end_key, int(positions.max()) + right + 1)
    return begin, end


def _bias_in(
    view: View, at: Int64[Tensor, "t"], keys: Int64[Tensor, "s"], dtype: torch.dtype, options: AttentionOptions
) -> Float[Tensor, "#h t s"]:
    """Return the bias on the scores of some queries of a view: ALiBi, -inf on hidden keys."""
    bias = _bias(view.positions[at][:, None] - keys, dtype, view.window, options)
    if view.intervals is None:
        return bias
    first, last = view.intervals.first[at][:, None], view.intervals.last[at][:, None]
    return bias.masked_fill_((keys < first) | (keys > last), -torch.inf)


def _cut(begin: int, end: int) -> list[tuple[int, int]]:
    return [(q0, min(q0 + TILE, end)) for q0 in range(begin, end, TILE)]


def _bias(
    distance: Int64[Tensor, "t s"], dtype: torch.dtype, window: tuple[int, int], options: AttentionOptions
) -> Float[Tensor, "#h t s"]:
    """Return the bias on scores, given how far the key lies before the query: ALiBi, -inf outside of the window."""
    left, right = window
    hidden = torch.zeros_like(distance, dtype=torch.bool)
    if left >= 0:
        hidden |= distance > left
    if right >= 0:
        hidden |= distance < -right
    bias = torch.zeros(1, *distance.shape, dtype=compute_dtype(dtype), device="cpu")
    if options.alibi_slopes is not None:
        distance = distance.abs().to(bias.dtype).sqrt() if options.alibi_sqrt else distance.abs()
        bias = -rearrange(options.alibi_slopes.to(bias.dtype), "h -> h 1 1") * distance
    return bias.masked_fill(hidden, -torch.inf)


def _band_rows(
    query: Float[Tensor, "t h d"],
    key: Float[Tensor, "s hk d"],
    value: Float[Tensor, "s hk dv"],
    view: View,
    options: AttentionOptions,
) -> range:
    """Return the rows of full tiles whose windows lie entirely inside the keys, and so have one mask."""
    t, (left, right) = query.shape[0], view.window
    if left < 0 or right < 0 or options.softcap or not view.consecutive or query.shape[-1] != value.shape[-1]:
        return range(0)
    first = max(0, view.first_key + left - int(view.positions[0]))
    return range(first, first + max(0, t - right - first) // BAND_TILE * BAND_TILE)


def _band(
    query: Float[Tensor, "t h d"],
    key: Float[Tensor, "s hk d"],
    value: Float[Tensor, "s hk dv"],
    first_key: int,
    window: tuple[int, int],
    options: AttentionOptions,
) -> tuple[Float[Tensor, "t h dv"], Float[Tensor, "t h"]]:
    """Attend in a window with one call: tiles are its batch, with one mask for all, and their keys are views."""
    left, right = window
    width = left + BAND_TILE + right
    k, v = (
        rearrange(
            x[first_key : first_key + left + len(query) + right].unfold(0, width, BAND_TILE), "m hk d s -> m hk s d"
        )
        for x in (key, value)
    )
    distance = torch.arange(BAND_TILE, device="cpu")[:, None] + left - torch.arange(width, device="cpu")
    bias = _bias(distance, query.dtype, window, options)
    q = rearrange(query, "(m t) h d -> m h t d", t=BAND_TILE)
    out, lse = call_aten(q, k, v, options.softmax_scale, bias=bias[None])
    return rearrange(out, "m h t dv -> (m t) h dv"), rearrange(lse, "m h t -> (m t) h")


def _merge(*parts: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    if len(parts) == 1:
        return parts[0]
    outs, lses = zip(*parts, strict=True)
    return merge(outs, lses)


def _empty_output(
    query: Float[Tensor, "t h d"], value_size: int
) -> tuple[Float[Tensor, "t h dv"], Float[Tensor, "t h"]]:
    out = query.new_zeros(*query.shape[:2], value_size)
    return out, out.new_full(out.shape[:2], -torch.inf, dtype=torch.promote_types(out.dtype, torch.float32))


def _with_sinks(
    out: Float[Tensor, "t h dv"], lse: Float[Tensor, "t h"], sinks: Float[Tensor, "h"] | None, plan: Plan
) -> tuple[Float[Tensor, "t h dv"], Float[Tensor, "t h"]]:
    if sinks is not None:
        rows = slice(int(plan.batch.cu_seqlens_q[-1]))  # padding rows see no sink either
        out[rows], lse[rows] = add_sinks(out[rows], lse[rows], sinks)
    return out, lse
