"""Arguments of a kernel besides keys: queries, of which a program computes a tile, and the options of a layer.

A tile's rows are the tokens of one sequence times the query heads that share a KV head, so that all of them are rows
of one matrix product: row `r` is token `r // GROUP`, head `r % GROUP` of the group.

Source: Ainslie et al. 2023, "GQA"; the tiles of a ragged batch are found as in vLLM's Triton attention.
"""

from typing import Any, NamedTuple, no_type_check

import triton
import triton.language as tl
from torch import Tensor

from fastattn.kernels.triton.quantized import UNQUANTIZED, Quantization
from refattn.batch import Batch
from refattn.options import AttentionOptions
from refattn.plan import Plan

# Triton's interpreter finds a function only if it is defined above its caller.


class Queries(NamedTuple):
    """The query rows of all sequences, as the kernel takes them.

    Attributes:
        query: [t, h, d].
        strides: of tokens, heads and elements.
        cu_seqlens_q: [b+1], where the rows of each sequence begin.
        seq_lens: [b], keys of each sequence.
        positions: [t], positions of the rows; None if they are the last ones of their sequences, or unused.
        first_keys: [b], positions of the first keys; None if they are 0, or unused.
        num_tokens: t.
        num_seqs: b.
        HEADS: query heads.
        GROUP: query heads per KV head.
    """

    query: Any
    strides: Any
    cu_seqlens_q: Any
    seq_lens: Any
    positions: Any
    first_keys: Any
    num_tokens: Any
    num_seqs: Any
    HEADS: Any
    GROUP: Any


class Sizes(NamedTuple):
    """The constants of a launch.

    Attributes:
        ROWS: rows of a tile.
        KEYS: keys of a step.
        KEYS_AXIS: the axis of the scores along which keys lie: 0 where tiles are transposed.
        PHASES: 3 where steps that need no mask are a loop of their own, else 1.
        FIRST_PHASE: the first phase.
        ONE_TILE: whether a tile holds all rows of any sequence.
        ENDS: the number of tiles at the end of each sequence that have programs, or 0 where all tiles do.
        STARTS: the number of tiles at the start of each sequence that have programs, or 0.
        LAST_FIRST: whether the last tiles, which see most keys, go first.
        BY_POSITION: whether steps begin at multiples of their size in the sequence, instead of in its table; see
            `is_by_position`.
    """

    ROWS: Any
    KEYS: Any
    KEYS_AXIS: Any
    PHASES: Any
    FIRST_PHASE: Any
    ONE_TILE: Any
    ENDS: Any
    STARTS: Any
    LAST_FIRST: Any
    BY_POSITION: Any


class Options(NamedTuple):
    """The options of a layer, `refattn.AttentionOptions`, as the kernel takes them.

    Attributes:
        scale: scale of the scores, above 0.
        softcap: above 0, or not used.
        alibi_slopes: [h], or None.
        sinks: [h], or None.
        SOFTCAP: whether scores are capped.
        ALIBI_SQRT: whether ALiBi takes the root of the distance.
    """

    scale: Any
    softcap: Any
    alibi_slopes: Any
    sinks: Any
    SOFTCAP: Any
    ALIBI_SQRT: Any


class Tile(NamedTuple):
    """The rows of a program.

    Attributes:
        number: index of the tile.
        sequence: the sequence of the rows.
        kv_head: the KV head that they share.
        first_row: the first row, counted in the sequence and its group of heads.
        num_rows: rows of the sequence for these heads.
        is_row: [rows], whether a row is one of them.
        queries: [rows], the query of each in its sequence.
        tokens: [rows], the query row of each in the batch.
        heads: [rows], the query head of each.
        positions: [rows], the position of each.
        first_position: the lowest position.
        last_position: the highest position.
        query_len: queries of the sequence.
        seq_len: keys of the sequence.
    """

    number: Any
    sequence: Any
    kv_head: Any
    first_row: Any
    num_rows: Any
    is_row: Any
    queries: Any
    tokens: Any
    heads: Any
    positions: Any
    first_position: Any
    last_position: Any
    query_len: Any
    seq_len: Any


@triton.jit
@no_type_check
def _first_tile(cu_seqlens_q, sequence, GROUP: tl.constexpr, ROWS: tl.constexpr):
    """Return the first tile of a sequence, or one after it.

    Each sequence before it may have one tile that is not full: n sequences of r rows in all have at most r // ROWS + n.
    """
    return tl.load(cu_seqlens_q + sequence) * GROUP // ROWS + sequence


@triton.jit
@no_type_check
def find_rows(cu_seqlens_q, tile, num_seqs, GROUP: tl.constexpr, ROWS: tl.constexpr, ONE_TILE: tl.constexpr):
    """Return the sequence of a tile, and its first row there; past the last row if the sequence needs fewer tiles.

    The sequence is the last one whose first tile is not after this one, found by binary search.
    """
    sequence = tile
    first_row = tile * 0
    if not ONE_TILE:
        sequence = tile * 0
        high = num_seqs - 1
        while sequence < high:
            middle = (sequence + high + 1) // 2
            if _first_tile(cu_seqlens_q, middle, GROUP, ROWS) <= tile:
                sequence = middle
            else:
                high = middle - 1
        first_row = (tile - _first_tile(cu_seqlens_q, sequence, GROUP, ROWS)) * ROWS
    return sequence, first_row


@triton.jit
@no_type_check
def _row_at_an_end(tile, num_rows, TILE):
    """Return the first row of a tile at either end of a sequence: the last tiles, from the end on, then the first ones.

    A tile is not counted twice. Where there is no such tile, the row is past the last one.
    """
    place = tile % (TILE.ENDS + TILE.STARTS)
    tiles = tl.cdiv(num_rows, TILE.ROWS)
    here = tl.where(place < TILE.ENDS, tiles - 1 - place, place - TILE.ENDS)
    is_one = (here >= 0) & ((place < TILE.ENDS) | (here < tiles - TILE.ENDS))
    return tl.where(is_one, here * TILE.ROWS, num_rows)


@triton.jit
@no_type_check
def find_tile(queries, TILE):
    """Return the rows of this program.

    Their positions are read from `queries.positions`, by query row, and counted from the first key of the sequence; if
    that is None they are the last positions of the sequence.
    """
    KV_HEADS: tl.constexpr = queries.HEADS // queries.GROUP
    kv_head = tl.program_id(0) % KV_HEADS
    tile = tl.program_id(0) // KV_HEADS
    if TILE.LAST_FIRST:
        tile = tl.num_programs(0) // KV_HEADS - 1 - tile
    if TILE.ENDS > 0:
        sequence = tile // (TILE.ENDS + TILE.STARTS)
    else:
        sequence, first_row = find_rows(
            queries.cu_seqlens_q, tile, queries.num_seqs, queries.GROUP, TILE.ROWS, TILE.ONE_TILE
        )
    first_query = tl.load(queries.cu_seqlens_q + sequence)
    query_len = tl.load(queries.cu_seqlens_q + sequence + 1) - first_query
    seq_len = tl.load(queries.seq_lens + sequence)
    num_rows = query_len * queries.GROUP
    if TILE.ENDS > 0:
        first_row = _row_at_an_end(tile, num_rows, TILE)
    rows = first_row + tl.arange(0, TILE.ROWS)
    is_row = rows < num_rows
    tokens = (first_query + rows // queries.GROUP).to(tl.int64)
    if queries.positions is None:
        context = seq_len - query_len  # negative where a sequence has more queries than keys
        positions = context + rows // queries.GROUP
        first_position = context + first_row // queries.GROUP
        last_position = context + tl.minimum((first_row + TILE.ROWS - 1) // queries.GROUP, query_len - 1)
    else:
        positions = tl.load(queries.positions + tokens, mask=is_row, other=0)
        if queries.first_keys is not None:
            positions -= tl.load(queries.first_keys + sequence)
        first_position = tl.min(tl.where(is_row, positions, 2**31 - 1), 0)
        last_position = tl.max(tl.where(is_row, positions, -(2**31)), 0)
    return Tile(
        tile,
        sequence,
        kv_head,
        first_row,
        num_rows,
        is_row,
        rows // queries.GROUP,
        tokens,
        kv_head * queries.GROUP + rows % queries.GROUP,
        positions,
        first_position,
        last_position,
        query_len,
        seq_len,
    )


def queries_of(query: Tensor, batch: Batch, num_heads: int, group: int) -> Queries:
    """Return queries at the ends of their sequences, as the kernels take them.

    Args:
        query: [t, h, d], any strides.
        batch: the lengths.
        num_heads: query heads; half as many for pairs of heads.
        group: query heads that share a KV head.
    """
    return Queries(
        query=query,
        strides=query.stride(),
        cu_seqlens_q=batch.cu_seqlens_q,
        seq_lens=batch.seq_lens,
        positions=None,
        first_keys=None,
        num_tokens=query.shape[0],
        num_seqs=batch.num_seqs,
        HEADS=tl.constexpr(num_heads),
        GROUP=tl.constexpr(group),
    )


def is_one_tile(batch: Batch, group: int, rows: int) -> bool:
    """Return whether a tile holds all query rows of any sequence."""
    return batch.max_query_len * group <= rows


def is_by_position(plan: Plan) -> bool:
    """Return `Sizes.BY_POSITION` of a plan under `batch_invariant`.

    Which blocks a window has removed follows from the first query of a sequence in the batch. A step must hold the same
    keys whatever they are.
    """
    return plan.first_keys is not None and (plan.window[0] >= 0 or plan.first_visible is not None)


def count_tiles(batch: Batch, num_tokens: int, group: int, rows: int) -> int:
    """Bound the number of tiles: the full ones, and one that is not full per sequence."""
    if is_one_tile(batch, group, rows):
        return batch.num_seqs
    if batch.num_seqs == 1:
        return -(-num_tokens * group // rows)
    return batch.num_seqs + num_tokens * group // rows


def options_of(options: AttentionOptions, scale: float) -> Options:
    """Return the options of a layer without its tensors, which `layer_args` has; `scale` is above 0."""
    return Options(
        scale=scale,
        softcap=float(options.softcap),
        alibi_slopes=None,
        sinks=None,
        SOFTCAP=tl.constexpr(options.softcap > 0),
        ALIBI_SQRT=tl.constexpr(options.alibi_sqrt),
    )


Given = dict[str, Tensor | float | None]  # arguments of a kernel and their fields, by name


def layer_args(query: Tensor, options: AttentionOptions, quantization: Quantization = UNQUANTIZED) -> Given:
    """Return the arguments that differ between layers (slopes, sinks, scales), by the names of fields; mostly none."""
    given: Given = {}
    if options.has_per_head:
        given |= {f"options.{name}": x.contiguous() for name, x in options.per_head.items()}
    if quantization.kind:
        of_query, of_key, of_value = quantization.numbers
        scale = query.shape[-1] ** -0.5 if options.softmax_scale is None else options.softmax_scale
        given["options.scale"] = (abs(scale) or 1.0) * of_key * of_query  # the scale of the scores, above 0
        if quantization.groups is not None:
            return given | {"keys.group_scales": quantization.groups}
        if quantization.storage is not None:
            return given | {"keys.key_scales": quantization.key, "keys.value_scales": quantization.value}
        given |= {"keys.query_number": of_query, "keys.value_number": of_value}
        given |= {
            "keys.query_scales": quantization.query,
            "keys.key_scales": quantization.key,
            "keys.value_scales": quantization.value,
        }
    return given


def has_scale_above_0(options: AttentionOptions) -> bool:
    """Return whether the query is used unchanged; see `with_positive_scale`."""
    return options.softmax_scale is None or options.softmax_scale > 0


def contiguous(numbers: Tensor | None) -> Tensor | None:
    """Return contiguous numbers, which a kernel reads by a pointer alone."""
    return None if numbers is None else numbers.contiguous()
