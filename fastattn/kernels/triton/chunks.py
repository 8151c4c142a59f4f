"""Prompts of layers with a state, chunk by chunk, in Triton: the intra-chunk terms, and then the states.

    _within_kernel    the intra-chunk terms of each chunk; by the delta rule with decays per head, as if all were finite
    _repair_kernel    those of chunks that are not finite once more, so that NaN reaches later tokens and no others
    _chunks_kernel    the states, from chunk to chunk; on Hopper `fastattn.kernels.triton.chunks_hopper` has another

As in `fastattn.kernels.torch_ops.recurrent`, rounded sums of logarithms are never subtracted, so a decay of 0 or a very
small one costs later tokens no digits. With a decay per head, each logarithm has two parts here, of which one has exact
sums; see `_between`. Decays per channel are in `fastattn.kernels.triton.channels`.

Source: Yang et al. 2024, "Parallelizing Linear Transformers with the Delta Rule over Sequence Length".
"""

from typing import Any, NamedTuple, no_type_check

import triton
import triton.language as tl

from fastattn.kernels.triton.channels import channels_of, decays_of, weights_of
from fastattn.kernels.triton.instructions import exp, round_finite
from fastattn.kernels.triton.states import CHANGING, checkpoint_slot, find_sequence

# Triton's interpreter finds a function only if it is defined above its caller.


class ChunkSizes(NamedTuple):
    """The constants of all launches.

    Attributes:
        CHUNK: tokens of a chunk.
        LEVELS: sizes of blocks of tokens, 2, 4, 8 .. up to a chunk; 0 without decays per channel.
        COLUMNS: keys or values that `_within_kernel` holds at a time.
        PRECISION: the precision of matrix products.
        HEADS: value heads.
        PTX: whether instructions of NVIDIA GPUs are written as they are.
        OVERLAP: whether each launch begins while the one before it ends; see `fastattn.kernels.triton.launch`.
    """

    CHUNK: Any
    LEVELS: Any
    COLUMNS: Any
    PRECISION: Any
    HEADS: Any
    PTX: Any
    OVERLAP: Any


class Solved(NamedTuple):
    """The intra-chunk terms of all chunks, from `_within_kernel` to the launch of the states.

    Attributes:
        written: [t, hv, dv], in rows of ROW_V: what each token writes if the state before the chunk is zero.
        answered: [t, hv, dk], in rows of ROW_K: its product with the state before the chunk is subtracted from
            `written`; None without the delta rule.
        weights: [t, hv, CHUNK]: weights of what the chunk's tokens write, in the output of each query.
        decays: [t, hv, 2]: since the chunk's start, and up to its end; or [t, hv, dk]: of the chunk, in its last row.
        queries_since: [t, hv, dk], queries times the channels' decays since the chunk's start; else None.
        keys_until: [t, hv, dk], keys times the channels' decays up to its end; else None.
        ROW_K: the row stride of keys.
        ROW_V: the row stride of values.
    """

    written: Any
    answered: Any
    weights: Any
    decays: Any
    queries_since: Any
    keys_until: Any
    ROW_K: Any
    ROW_V: Any


class Chunk(NamedTuple):
    """The tokens of a chunk, in one head.

    Attributes:
        first: the first token, counted in the sequence; negative where that begins inside the chunk.
        length: tokens of the sequence.
        is_token: [CHUNK], whether there is such a token.
        first_row: the query row of the first one.
        own_first: its row in the tensors of `Solved`, [t, hv].
        own_last: the row of the last token there.
    """

    first: Any
    length: Any
    is_token: Any
    first_row: Any
    own_first: Any
    own_last: Any


class Offsets(NamedTuple):
    """Where the tokens of a chunk are, in elements from its first one on: the same for all chunks of a sequence.

    Attributes:
        written: [CHUNK, values], in `Solved.written`.
        answered: [CHUNK, dk], in the tensors of `Solved` with keys.
        weights: [CHUNK, CHUNK], in `Solved.weights`.
        keys: [CHUNK, dk], in the keys of the layer.
        queries: [CHUNK, dk], in its queries.
        out: [CHUNK, values], in its outputs.
    """

    written: Any
    answered: Any
    weights: Any
    keys: Any
    queries: Any
    out: Any


@triton.jit
@no_type_check
def _first_place(tables, number, TILE):
    return tl.load(tables.cu_seqlens_q + number) // TILE.CHUNK + 2 * number


@triton.jit
@no_type_check
def _any(of):
    """Return whether one of some conditions holds; a scalar is one."""
    return tl.max(of.to(tl.int32), 0) > 0 if len(of.shape) > 0 else of


@triton.jit
@no_type_check
def _find_chunk(tables, place, TILE):
    """Return the sequences of some chunks, given their places among all, and the first token of each, by binary search.

    Chunks end where positions are multiples of their size, so a sequence has at most two more than it fills.
    """
    number, high = place * 0, place * 0 + tables.num_seqs - 1
    while _any(number < high):
        middle = (number + high + 1) // 2
        is_before = _first_place(tables, middle, TILE) <= place
        number, high = tl.where(is_before, middle, number), tl.where(is_before, high, middle - 1)
    sequence = find_sequence(tables, number)
    return sequence, (place - _first_place(tables, number, TILE)) * TILE.CHUNK - sequence.position % TILE.CHUNK


@triton.jit
@no_type_check
def _chunk_from(sequence, first, head, TILE):
    """Return the chunk that begins at a token of a sequence."""
    at = first + tl.arange(0, TILE.CHUNK)
    is_token = tl.cast(at, tl.uint32) < tl.cast(sequence.length, tl.uint32)  # negative numbers are large ones here
    first_row = (sequence.first_row + first).to(tl.int64)
    last_row = sequence.first_row + tl.minimum(first + TILE.CHUNK, sequence.length) - 1
    own_first, own_last = first_row * TILE.HEADS + head, last_row * TILE.HEADS + head
    return Chunk(first, sequence.length, is_token, first_row, own_first, own_last)


@triton.jit
@no_type_check
def _is_in(columns, SIZE: tl.constexpr):
    """Return which columns are there: True where their number divides the size, so that the compiler drops the mask."""
    return (columns < SIZE) | (SIZE % columns.shape[0] == 0)


@triton.jit
@no_type_check
def _offsets(tokens, solved, out_strides, at_k, at_v, TILE):
    """Return where the tokens of any chunk are, from its first one on."""
    at = tl.arange(0, TILE.CHUNK)
    own = at[:, None] * TILE.HEADS
    keys = at[:, None].to(tl.int64) * tokens.key_strides[0] + at_k[None, :] * tokens.key_strides[2]
    queries = at[:, None].to(tl.int64) * tokens.query_strides[0] + at_k[None, :] * tokens.query_strides[2]
    return Offsets(
        written=own * solved.ROW_V + at_v[None, :].to(tl.int32),
        answered=own * solved.ROW_K + at_k[None, :].to(tl.int32),
        weights=own * TILE.CHUNK + at[None, :],
        keys=keys,
        queries=queries,
        out=at[:, None].to(tl.int64) * out_strides[0] + at_v[None, :] * out_strides[2],
    )


@triton.jit
@no_type_check
def _own_rows(rows, chunk, columns, ROW: tl.constexpr, TILE):
    """Return where some columns of the tokens of a chunk are in a tensor of `Solved`."""
    at = tl.arange(0, TILE.CHUNK)[:, None] * (TILE.HEADS * ROW)
    return rows + chunk.own_first * ROW + (at + columns[None, :].to(tl.int32))


@triton.jit
@no_type_check
def _decays_at(solved, chunk, TILE):
    """Load the decays of the tokens of a chunk since its start, and up to its end.

    Triton loads only that ahead which an operand of a product depends on, so the second ones depend on the first.
    """
    of_tokens = solved.decays + chunk.own_first * 2 + tl.arange(0, TILE.CHUNK) * (2 * TILE.HEADS)
    since = tl.load(of_tokens, chunk.is_token, 0.0)
    return since, since * 0.0 + tl.load(of_tokens + 1, chunk.is_token, 0.0)


@triton.jit
@no_type_check
def _total_at(solved, chunk):
    """Load the decay of a chunk."""
    return tl.load(solved.decays + chunk.own_last * 2, chunk.first < chunk.length, 1.0)


@triton.jit
@no_type_check
def _load_rows(rows, strides, chunk, head, columns, is_column):
    """Load some columns of one head, [CHUNK, columns], of the tokens of a chunk."""
    at = tl.arange(0, chunk.is_token.shape[0]).to(tl.int64)
    of_rows = rows + (head * strides[1] + chunk.first_row * strides[0])
    of_rows += at[:, None] * strides[0] + columns[None, :].to(tl.int64) * strides[2]
    return tl.load(of_rows, chunk.is_token[:, None] & is_column[None, :], 0.0)


@triton.jit
@no_type_check
def _load_rates(gates, chunk, head):
    """Load how much of itself each token of a chunk writes."""
    at = chunk.first_row + tl.arange(0, chunk.is_token.shape[0])
    of_rates = gates.beta + at * gates.beta_strides[0] + head * gates.beta_strides[1]
    return tl.load(of_rates, chunk.is_token, 0.0).to(tl.float32)


LEAST_LOG = tl.constexpr(-128.0)  # what smaller logarithms count as; exp(-104) is already 0 in float32
STEPS = tl.constexpr(1024.0)  # the exact part of a logarithm is a multiple of 1 / STEPS


@triton.jit
@no_type_check
def _between(gates, chunk, head, TILE):
    """Return the decays between two tokens of a chunk, 0 for later ones; since its start; and up to its end.

    A sum over the tokens between two is a difference of sums from the start of the chunk. A difference of rounded sums
    would lose digits, so each logarithm has two parts. Sums of multiples of 1/1024, up to 64 times 128, have at most 23
    bits: they and their differences are exact. What is left of each logarithm is below 1/1024, and so is what its sums
    may round. NaN is in the sums of its own token and all later ones, which all are NaN then.
    """
    at = tl.arange(0, TILE.CHUNK)
    of_logs = gates.log_decay + (chunk.first_row + at) * gates.log_decay_strides[0] + head * gates.log_decay_strides[1]
    logs = tl.load(of_logs, chunk.is_token, 0.0).to(tl.float32)
    logs = tl.where(logs < LEAST_LOG, LEAST_LOG, logs)  # a maximum might drop NaN
    exact = tl.floor(logs * STEPS) / STEPS
    rest = logs - exact
    all_exact, all_rest = tl.sum(exact, 0), tl.sum(rest, 0)
    exact, rest = tl.cumsum(exact, 0), tl.cumsum(rest, 0)
    sums = (exact[:, None] - exact[None, :]) + (rest[:, None] - rest[None, :])
    between = exp(tl.where(at[:, None] >= at[None, :], sums, float("-inf")), TILE.PTX)
    return between, exp(exact + rest, TILE.PTX), exp((all_exact - exact) + (all_rest - rest), TILE.PTX)


@triton.jit
@no_type_check
def _after(is_bad, CHUNK: tl.constexpr):
    """Return, in each column, which rows of a chunk are bad or come after a bad one."""
    at = tl.arange(0, CHUNK)
    earlier = tl.where(at[:, None] >= at[None, :], 1.0, 0.0).to(tl.float16)
    return tl.dot(earlier, is_bad.to(tl.float16)) > 0.0


@triton.jit
@no_type_check
def _dot_with_earlier(weights, rows, OPERAND: tl.constexpr, PRECISION: tl.constexpr, CHUNK: tl.constexpr):
    """Multiply lower triangular weights with rows, so that NaN in a row reaches later rows, but none before."""
    is_finite = tl.abs(rows) < float("inf")
    rows = tl.where(is_finite, rows, 0.0).to(OPERAND)
    products = tl.dot(weights, rows, input_precision=PRECISION)
    return tl.where(_after(tl.where(is_finite, 0.0, 1.0), CHUNK), float("nan"), products)


@triton.jit
@no_type_check
def _first_bad(system, rates, TILE):
    """Return the first row of a system that is not finite: this row and all later ones are NaN; CHUNK if there is none.

    A key, a rate or a decay that is not finite is in the row of its token, left of the diagonal. The first row of a
    chunk has nothing there: if its key is not finite, all later rows have it, and its own product needs no care. A rate
    above 1 may be too large for its key; the diagonal, their product with the key, tells that.
    """
    at = tl.arange(0, TILE.CHUNK)
    end = at + tl.where(tl.abs(rates) > 1.0, 1, 0)
    is_good = (at[None, :] >= end[:, None]) | (tl.abs(system) < float("inf"))
    return tl.min(tl.where(is_good, TILE.CHUNK, at[:, None]))


@triton.jit
@no_type_check
def _on_diagonal(matrix, SIZE: tl.constexpr, CHUNK: tl.constexpr):
    """Return the blocks on the diagonal of a matrix."""
    NUM: tl.constexpr = CHUNK // SIZE
    block = tl.arange(0, NUM)
    is_on = block[:, None, None, None] == block[None, None, :, None]
    return tl.sum(tl.where(is_on, tl.reshape(matrix, [NUM, SIZE, NUM, SIZE]), 0.0), 2)


@triton.jit
@no_type_check
def _from_diagonal(blocks, SIZE: tl.constexpr, CHUNK: tl.constexpr):
    """Return the matrix that has blocks on its diagonal, and is 0 elsewhere."""
    NUM: tl.constexpr = CHUNK // SIZE
    block = tl.arange(0, NUM)
    is_on = block[:, None, None, None] == block[None, None, :, None]
    return tl.reshape(tl.where(is_on, blocks[:, :, None, :], 0.0), [CHUNK, CHUNK])


@triton.jit
@no_type_check
def _join_blocks(inverse, coupling, PRECISION: tl.constexpr):
    """Return the inverse of a matrix of four by four blocks, from the inverse of its diagonal and what couples blocks.

    The coupling X has a fourth power of 0, so `(1 - X)^-1 = (1 + X) (1 + X^2)`.
    """
    coupled = tl.dot(inverse, coupling, input_precision=PRECISION)
    inverse += tl.dot(tl.dot(coupled, coupled, input_precision=PRECISION), inverse, input_precision=PRECISION)
    return inverse + tl.dot(coupled, inverse, input_precision=PRECISION)


@triton.jit
@no_type_check
def invert_triangular(system, PRECISION: tl.constexpr, CHUNK: tl.constexpr):
    """Return the inverse of 1 minus a matrix that is 0 on and above its diagonal.

    In blocks of 4, 16 and 64 rows, one after the other: powers of the whole matrix would grow too large. Up to 16 rows,
    only the blocks on the diagonal are multiplied.
    """
    i, j = tl.arange(0, 16)[None, :, None], tl.arange(0, 16)[None, None, :]
    blocks = _on_diagonal(system, 16, CHUNK)
    coupled = tl.where(i // 4 == j // 4, blocks, 0.0)
    squared = tl.dot(coupled, coupled, input_precision=PRECISION)
    inverse = tl.where(i == j, 1.0, 0.0) + coupled
    inverse += squared + tl.dot(squared, coupled, input_precision=PRECISION)
    inverse = _from_diagonal(_join_blocks(inverse, blocks - coupled, PRECISION), 16, CHUNK)
    if CHUNK > 16:
        at = tl.arange(0, CHUNK)
        coupling = tl.where(at[:, None] // 16 != at[None, :] // 16, system, 0.0)
        inverse = _join_blocks(inverse, coupling, PRECISION)
    return inverse


@triton.jit
@no_type_check
def _store_decays(solved, chunk, from_start, to_end, TILE):
    """Store the decays of the tokens of a chunk since its start, and up to its end."""
    of_tokens = solved.decays + chunk.own_first * 2 + tl.arange(0, TILE.CHUNK) * (2 * TILE.HEADS)
    tl.store(of_tokens, from_start, chunk.is_token)
    tl.store(of_tokens + 1, to_end, chunk.is_token)


@triton.jit
@no_type_check
def _store_weights(solved, chunk, weights, TILE):
    """Store the weights of tokens in the outputs of later ones, and of their own."""
    at = tl.arange(0, TILE.CHUNK)
    weights = tl.where(at[:, None] >= at[None, :], weights, 0.0)  # a product of 0 and NaN would be NaN
    tl.store(_own_rows(solved.weights, chunk, at, TILE.CHUNK, TILE), weights, chunk.is_token[:, None])


@triton.jit
@no_type_check
def _solve_finite(tokens, gates, solved, chunk, head, key_head, TILE):
    """Compute the intra-chunk terms of a chunk by the delta rule, with decays per head, if all of it is finite.

    Otherwise each row of a product with the inverse, or of the inverse, has NaN, as 0 times NaN is NaN.
    """
    at, at_k = tl.arange(0, TILE.CHUNK), tl.arange(0, tokens.PAD_K)
    OPERAND: tl.constexpr = solved.written.dtype.element_ty
    keys = _load_rows(tokens.key, tokens.key_strides, chunk, key_head, at_k, at_k < tokens.DK)
    queries = _load_rows(tokens.query, tokens.query_strides, chunk, key_head, at_k, at_k < tokens.DK)
    between, from_start, to_end = _between(gates, chunk, head, TILE)
    _store_decays(solved, chunk, from_start, to_end, TILE)
    weights = tl.dot(queries, tl.trans(keys), input_precision=TILE.PRECISION) * between
    _store_weights(solved, chunk, weights, TILE)
    rates = _load_rates(gates, chunk, head)
    system = tl.dot(keys, tl.trans(keys), input_precision=TILE.PRECISION) * between * -rates[:, None]
    system = tl.where(at[:, None] > at[None, :], system, 0.0)
    inverse = invert_triangular(system, TILE.PRECISION, TILE.CHUNK).to(OPERAND)
    for first_column in tl.static_range(0, tokens.DK, TILE.COLUMNS):
        columns = first_column + tl.arange(0, TILE.COLUMNS)
        is_column = _is_in(columns, tokens.DK)
        part = _load_rows(tokens.key, tokens.key_strides, chunk, key_head, columns, is_column).to(tl.float32)
        part = tl.dot(inverse, (part * (rates * from_start)[:, None]).to(OPERAND), input_precision=TILE.PRECISION)
        of_answered = _own_rows(solved.answered, chunk, columns, solved.ROW_K, TILE)
        tl.store(of_answered, part, chunk.is_token[:, None] & is_column[None, :])
    for first_column in tl.static_range(0, tokens.DV, TILE.COLUMNS):
        columns = first_column + tl.arange(0, TILE.COLUMNS)
        is_column = _is_in(columns, tokens.DV)
        part = _load_rows(tokens.value, tokens.value_strides, chunk, head, columns, is_column).to(tl.float32)
        part = tl.dot(inverse, (part * rates[:, None]).to(OPERAND), input_precision=TILE.PRECISION)
        of_written = _own_rows(solved.written, chunk, columns, solved.ROW_V, TILE)
        tl.store(of_written, part, chunk.is_token[:, None] & is_column[None, :])


@triton.jit
@no_type_check
def _solve_carefully(tokens, gates, solved, chunk, head, key_head, TILE):
    """Compute the intra-chunk terms of a chunk, so that NaN in a token reaches later ones, and none before."""
    at, at_k = tl.arange(0, TILE.CHUNK), tl.arange(0, tokens.PAD_K)
    in_k = at_k < tokens.DK
    keys = _load_rows(tokens.key, tokens.key_strides, chunk, key_head, at_k, in_k)
    queries = _load_rows(tokens.query, tokens.query_strides, chunk, key_head, at_k, in_k)
    if gates.PER_CHANNEL:
        channels = channels_of(gates, head, at_k, in_k)
        weights = weights_of(queries, keys, channels, chunk, TILE)
    else:
        between, from_start, to_end = _between(gates, chunk, head, TILE)
        _store_decays(solved, chunk, from_start, to_end, TILE)
        weights = tl.dot(queries, tl.trans(keys), input_precision=TILE.PRECISION) * between
    _store_weights(solved, chunk, weights, TILE)
    rates = _load_rates(gates, chunk, head)
    OPERAND: tl.constexpr = solved.written.dtype.element_ty
    if gates.DELTA:
        if gates.PER_CHANNEL:
            system = weights_of(keys, keys, channels, chunk, TILE)
        else:
            system = tl.dot(keys, tl.trans(keys), input_precision=TILE.PRECISION) * between
        system *= -rates[:, None]
        first_bad = _first_bad(system, rates, TILE)
        is_good = at < first_bad
        system = tl.where((at[:, None] > at[None, :]) & is_good[:, None], system, 0.0)
        inverse = invert_triangular(system, TILE.PRECISION, TILE.CHUNK).to(OPERAND)
        rates = tl.where(is_good, rates, float("nan"))
    for first_column in range(0, tokens.DK if gates.DELTA or gates.PER_CHANNEL else 0, TILE.COLUMNS):
        columns = first_column + tl.arange(0, TILE.COLUMNS)
        is_column = columns < tokens.DK
        in_part = chunk.is_token[:, None] & is_column[None, :]
        part = _load_rows(tokens.key, tokens.key_strides, chunk, key_head, columns, is_column).to(tl.float32)
        if gates.PER_CHANNEL:
            since, until, total = decays_of(channels_of(gates, head, columns, is_column), chunk, TILE)
            tl.store(solved.decays + chunk.own_last * tokens.DK + columns, total, is_column)
            tl.store(_own_rows(solved.keys_until, chunk, columns, solved.ROW_K, TILE), part * until, in_part)
            asked = _load_rows(tokens.query, tokens.query_strides, chunk, key_head, columns, is_column).to(tl.float32)
            tl.store(_own_rows(solved.queries_since, chunk, columns, solved.ROW_K, TILE), asked * since, in_part)
        else:
            since = from_start[:, None]
        if gates.DELTA:
            part *= rates[:, None] * since
            if gates.PER_CHANNEL:
                part = _dot_with_earlier(inverse, part, OPERAND, TILE.PRECISION, TILE.CHUNK)
            else:
                part = tl.where(is_good[:, None], part, 0.0).to(OPERAND)
                part = tl.dot(inverse, part, input_precision=TILE.PRECISION)
                part = tl.where(is_good[:, None], part, float("nan"))
            tl.store(_own_rows(solved.answered, chunk, columns, solved.ROW_K, TILE), part, in_part)
    for first_column in range(0, tokens.DV, TILE.COLUMNS):
        columns = first_column + tl.arange(0, TILE.COLUMNS)
        is_column = columns < tokens.DV
        part = _load_rows(tokens.value, tokens.value_strides, chunk, head, columns, is_column).to(tl.float32)
        part *= rates[:, None]
        if gates.DELTA:
            part = _dot_with_earlier(inverse, part, OPERAND, TILE.PRECISION, TILE.CHUNK)
        else:
            is_finite = tl.abs(part) < float("inf")
            part = tl.where(_after(tl.where(is_finite, 0.0, 1.0), TILE.CHUNK), float("nan"), part)
        of_written = _own_rows(solved.written, chunk, columns, solved.ROW_V, TILE)
        tl.store(of_written, part, chunk.is_token[:, None] & is_column[None, :])


@triton.jit(do_not_specialize=CHANGING)
@no_type_check
def _within_kernel(tokens, gates, tables, solved, TILE):
    """Compute the intra-chunk terms of one chunk, in one head; its other heads are in the programs beside this one."""
    if TILE.OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
    place, head = tl.program_id(0) // TILE.HEADS, (tl.program_id(0) % TILE.HEADS).to(tl.int64)
    sequence, first = _find_chunk(tables, place, TILE)
    if (sequence.slot < 0) | (first >= sequence.length):
        return
    chunk = _chunk_from(sequence, first, head, TILE)
    if gates.DELTA and not gates.PER_CHANNEL:
        _solve_finite(tokens, gates, solved, chunk, head, head // tokens.GROUP, TILE)
    else:
        _solve_carefully(tokens, gates, solved, chunk, head, head // tokens.GROUP, TILE)


REPAIRED = tl.constexpr(16)  # chunks that a program of `_repair_kernel` looks at


@triton.jit
@no_type_check
def _is_finite(rows, row, columns, SIZE: tl.constexpr, ROW: tl.constexpr):
    """Return which of some rows of a tensor of `Solved` are finite; a negative one is."""
    in_rows = (row >= 0)[:, None] & (columns < SIZE)[None, :]
    found = tl.load(rows + row[:, None] * ROW + columns[None, :], in_rows, 0.0).to(tl.float32)
    return tl.max(tl.where(tl.abs(found) < float("inf"), 0, 1), 1) == 0


@triton.jit
@no_type_check
def _places_to_repair(tokens, tables, solved, place, head, TILE, PAD_V: tl.constexpr):
    """Return the places of those chunks that are not finite, and -1 for others.

    The row of the last token tells it, as each row does. Before the wait, only tables of the step are read.
    """
    if TILE.OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
    sequence, first = _find_chunk(tables, place, TILE)
    is_chunk = (sequence.slot >= 0) & (first < sequence.length)
    last_row = sequence.first_row + tl.minimum(first + TILE.CHUNK, sequence.length) - 1
    own_last = tl.where(is_chunk, last_row * TILE.HEADS + head, -1)
    if TILE.OVERLAP:
        tl.extra.cuda.gdc_wait()
    is_good = _is_finite(solved.answered, own_last, tl.arange(0, tokens.PAD_K), tokens.DK, solved.ROW_K)
    is_good &= _is_finite(solved.written, own_last, tl.arange(0, PAD_V), tokens.DV, solved.ROW_V)
    return tl.where(is_good, -1, place)


@triton.jit(do_not_specialize=CHANGING)
@no_type_check
def _repair_kernel(tokens, gates, tables, solved, TILE, PAD_V: tl.constexpr):
    """Compute the terms of chunks once more, with care, where `_solve_finite` met something that is not finite.

    Nearly always there are none, so a program looks at several chunks.
    """
    head, key_head = tl.program_id(1).to(tl.int64), (tl.program_id(1) // tokens.GROUP).to(tl.int64)
    places = tl.program_id(0) * REPAIRED + tl.arange(0, REPAIRED)
    places = _places_to_repair(tokens, tables, solved, places, head, TILE, PAD_V)
    place = tl.max(places, 0)
    while place >= 0:
        sequence, first = _find_chunk(tables, place, TILE)
        chunk = _chunk_from(sequence, first, head, TILE)
        _solve_carefully(tokens, gates, solved, chunk, head, key_head, TILE)
        places = tl.where(places == place, -1, places)
        place = tl.max(places, 0)


@triton.jit(do_not_specialize=CHANGING)
@no_type_check
def _chunks_kernel(tokens, states, out, out_strides, tables, solved, scale, TILE, BLOCK_V: tl.constexpr):
    """Go through the chunks of a sequence with part of one head's state, which is `[dk, dv]` here."""
    sequence = find_sequence(tables, tl.program_id(0))
    head, key_head = tl.program_id(1).to(tl.int64), (tl.program_id(1) // tokens.GROUP).to(tl.int64)
    at_v = (tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)).to(tl.int64)
    at_k, at = tl.arange(0, tokens.PAD_K).to(tl.int64), tl.arange(0, TILE.CHUNK)
    in_v, in_k = _is_in(at_v, tokens.DV), at_k < tokens.DK
    of_out = out + head * out_strides[1] + at_v[None, :] * out_strides[2]
    if TILE.OVERLAP:
        tl.extra.cuda.gdc_wait()
    if sequence.slot < 0:
        for first in range(0, sequence.length, TILE.CHUNK):
            row = sequence.first_row + first + at
            in_rows = (first + at < sequence.length)[:, None] & in_v[None, :]
            zeros = tl.zeros([TILE.CHUNK, BLOCK_V], out.dtype.element_ty)
            tl.store(of_out + row[:, None] * out_strides[0], zeros, in_rows)
        return
    of_states = states.pool + head * states.strides[1]
    of_states = of_states + at_v[None, :] * states.strides[2] + at_k[:, None] * states.strides[3]
    in_state = in_k[:, None] & in_v[None, :]
    in_start = in_state & (sequence.start >= 0)
    state = tl.load(of_states + sequence.start * states.strides[0], in_start, 0.0).to(tl.float32)
    OPERAND: tl.constexpr = solved.written.dtype.element_ty
    offsets = _offsets(tokens, solved, out_strides, at_k, at_v, TILE)
    of_keys = tokens.key + key_head * tokens.key_strides[1]
    of_queries = tokens.query + key_head * tokens.query_strides[1]
    start = -(sequence.position % TILE.CHUNK)
    if solved.keys_until is None:
        total = _total_at(solved, _chunk_from(sequence, start, head, TILE))
    for first in range(start, sequence.length, TILE.CHUNK):
        chunk = _chunk_from(sequence, first, head, TILE)
        first_row, own = chunk.first_row, chunk.own_first
        in_keys, in_values = chunk.is_token[:, None] & in_k[None, :], chunk.is_token[:, None] & in_v[None, :]
        values = tl.load(solved.written + own * solved.ROW_V + offsets.written, in_values, 0.0).to(tl.float32)
        before = state.to(OPERAND)
        at_keys = own * solved.ROW_K + offsets.answered
        if solved.answered is not None:  # with the delta rule
            answers = tl.load(solved.answered + at_keys, in_keys, 0.0)
            values -= tl.dot(answers, before, input_precision=TILE.PRECISION)
        if solved.keys_until is not None:  # with decays per channel
            keys = tl.load(solved.keys_until + at_keys, in_keys, 0.0)
            queries = tl.load(solved.queries_since + at_keys, in_keys, 0.0)
            total = tl.load(solved.decays + chunk.own_last * tokens.DK + at_k, in_k, 0.0)[:, None]
            kept, result = values, tl.dot(queries, before, input_precision=TILE.PRECISION)
        else:
            keys = tl.load(of_keys + first_row * tokens.key_strides[0] + offsets.keys, in_keys, 0.0).to(OPERAND)
            at_queries = first_row * tokens.query_strides[0] + offsets.queries
            queries = tl.load(of_queries + at_queries, in_keys, 0.0).to(OPERAND)
            since, until = _decays_at(solved, chunk, TILE)
            next_total = _total_at(solved, _chunk_from(sequence, first + TILE.CHUNK, head, TILE))
            kept = values * until[:, None]
            result = tl.dot(queries, before, input_precision=TILE.PRECISION) * since[:, None]
        state = state * total + tl.dot(tl.trans(keys), kept.to(OPERAND), input_precision=TILE.PRECISION)
        if solved.keys_until is None:
            total = next_total
        of_weights = solved.weights + own * TILE.CHUNK + offsets.weights
        own_weights = tl.load(of_weights, chunk.is_token[:, None], 0.0)
        written = round_finite(values, OPERAND, TILE.PTX)  # NaN is in all later rows: see `_dot_with_earlier`
        result += tl.dot(own_weights, written, input_precision=TILE.PRECISION)
        result = result * scale + values * 0.0  # a product of 0 with NaN or infinity is NaN
        at_out = first_row * out_strides[0] + offsets.out
        tl.store(out + head * out_strides[1] + at_out, result.to(out.dtype.element_ty), in_values)
        if tables.BLOCK_SIZE:
            end = sequence.position + tl.minimum(first + TILE.CHUNK, sequence.length)
            if (end % tables.BLOCK_SIZE == 0) & (first + TILE.CHUNK <= sequence.length):
                own = checkpoint_slot(tables, sequence, end)
                in_slot = in_state & (own >= 0)
                tl.store(of_states + own * states.strides[0], state.to(states.pool.dtype.element_ty), in_slot)
    tl.store(of_states + sequence.slot * states.strides[0], state.to(states.pool.dtype.element_ty), in_state)
