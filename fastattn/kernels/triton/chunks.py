"""Prompts of layers with a state, chunk by chunk, in Triton: the intra-chunk terms, and then the states.

As in `fastattn.kernels.torch_ops.recurrent`, rounded sums of logarithms are never subtracted, so a decay of 0 or a very
small one costs later tokens no digits. With a decay per head, each logarithm has two parts here, of which one has exact
sums; see `_between`.

With a decay per channel, the weight of two tokens is a sum over channels, each with a product of decays of its own. The
usual way divides: `(q[i] exp(g[i])) . (k[j] exp(-g[j]))`, with g the sum of logarithms since some token, and `exp(-g)`
overflows after a few strong gates. Here a pair of tokens is split at a token between them, the middle of the smallest
block of 2, 4, 8 .. tokens that holds both: the decays up to the middle belong to the key, those after it to the query.

    a chunk of 8, the pairs of each product of matrices      j  0 1 2 3 4 5 6 7
                                                          i  1  a
    a   halves of 1 token                                    2  b b
    b   halves of 2                                          3  b b a
    c   halves of 4                                          4  c c c c
                                                             5  c c c c a
                                                             6  c c c c b b
                                                             7  c c c c b b a

So every exponent is a sum of logarithms of decays, and no factor is larger than 1, however strong the gates are.

Source: Yang et al. 2024, "Parallelizing Linear Transformers with the Delta Rule over Sequence Length".
"""

from typing import Any, NamedTuple, no_type_check

import triton
import triton.language as tl

from fastattn.kernels.triton.states import CHANGING, checkpoint_slot, find_sequence

# Triton's interpreter finds a function only if it is defined above its caller.


class ChunkSizes(NamedTuple):
    """The constants of both launches.

    Attributes:
        CHUNK: tokens of a chunk.
        LEVELS: sizes of blocks of tokens, 2, 4, 8 .. up to a chunk; 0 without decays per channel.
        COLUMNS: keys or values that `_within_kernel` holds at a time.
        PRECISION: the precision of matrix products.
    """

    CHUNK: Any
    LEVELS: Any
    COLUMNS: Any
    PRECISION: Any


class Solved(NamedTuple):
    """The intra-chunk terms of all chunks, from `_within_kernel` to `_chunks_kernel`.

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
        row: [CHUNK], the query row of each token.
        is_token: [CHUNK], whether there is such a token.
        own_row: [CHUNK], the row of each in the tensors of `Solved`, [t, hv].
        own_last: the row of the last token there.
    """

    first: Any
    length: Any
    row: Any
    is_token: Any
    own_row: Any
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


class Channels(NamedTuple):
    """Logarithms of decays of some channels of a head: pointers to those of row 0, and the row stride."""

    log_decay: Any
    stride: Any
    is_channel: Any


@triton.jit
@no_type_check
def _first_place(tables, number, TILE):
    return tl.load(tables.cu_seqlens_q + number) // TILE.CHUNK + 2 * number


@triton.jit
@no_type_check
def _find_chunk(tables, place, TILE):
    """Return the sequence of a chunk, given its place among all chunks, and its number there, by binary search.

    Chunks end where positions are multiples of their size, so a sequence has at most two more than it fills.
    """
    number = place * 0
    high = tables.num_seqs - 1
    while number < high:
        middle = (number + high + 1) // 2
        if _first_place(tables, middle, TILE) <= place:
            number = middle
        else:
            high = middle - 1
    return number, place - _first_place(tables, number, TILE)


@triton.jit
@no_type_check
def _chunk_from(sequence, first, head, TILE):
    """Return the chunk that begins at a token of a sequence."""
    at = tl.arange(0, TILE.CHUNK)
    row = sequence.first_row + first + at
    is_token = (first + at >= 0) & (first + at < sequence.length)
    last_row = sequence.first_row + tl.minimum(first + TILE.CHUNK, sequence.length) - 1
    heads = tl.num_programs(1)
    return Chunk(first, sequence.length, row, is_token, row * heads + head, last_row * heads + head)


@triton.jit
@no_type_check
def _offsets(tokens, solved, out_strides, at_k, at_v, TILE):
    """Return where the tokens of any chunk are, from its first one on."""
    at = tl.arange(0, TILE.CHUNK)
    own = at[:, None] * tl.num_programs(1)
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
def _decays_at(solved, chunk):
    """Load the decay of a chunk, and those of its tokens since its start and up to its end."""
    of_tokens = solved.decays + chunk.own_row * 2
    total = tl.load(solved.decays + chunk.own_last * 2, chunk.first < chunk.length, 1.0)
    since = tl.load(of_tokens, chunk.is_token, 0.0)
    return total, since, tl.load(of_tokens + 1, chunk.is_token, 0.0)


@triton.jit
@no_type_check
def _load_rows(rows, strides, chunk, head, columns, is_column):
    """Load some columns of one head, [CHUNK, columns], of the tokens of a chunk."""
    of_rows = rows + head * strides[1] + chunk.row[:, None] * strides[0]
    return tl.load(of_rows + columns[None, :] * strides[2], chunk.is_token[:, None] & is_column[None, :], 0.0)


LEAST_LOG = tl.constexpr(-128.0)  # what smaller logarithms count as; exp(-104) is already 0 in float32
STEPS = tl.constexpr(1024.0)  # the exact part of a logarithm is a multiple of 1 / STEPS


@triton.jit
@no_type_check
def _between(log_decay, stride, chunk, TILE):
    """Return the decays between two tokens of a chunk, 0 for later ones; since its start; and up to its end.

    A sum over the tokens between two is a difference of sums from the start of the chunk. A difference of rounded sums
    would lose digits, so each logarithm has two parts. Sums of multiples of 1/1024, up to 64 times 128, have at most 23
    bits: they and their differences are exact. What is left of each logarithm is below 1/1024, and so is what its sums
    may round. NaN is in the sums of its own token and all later ones, which all are NaN then.
    """
    at = tl.arange(0, TILE.CHUNK)
    logs = tl.load(log_decay + chunk.row * stride, chunk.is_token, 0.0).to(tl.float32)
    logs = tl.where(logs < LEAST_LOG, LEAST_LOG, logs)  # a maximum might drop NaN
    exact = tl.floor(logs * STEPS) / STEPS
    rest = logs - exact
    all_exact, all_rest = tl.sum(exact, 0), tl.sum(rest, 0)
    exact, rest = tl.cumsum(exact, 0), tl.cumsum(rest, 0)
    sums = (exact[:, None] - exact[None, :]) + (rest[:, None] - rest[None, :])
    between = tl.exp(tl.where(at[:, None] >= at[None, :], sums, float("-inf")))
    return between, tl.exp(exact + rest), tl.exp((all_exact - exact) + (all_rest - rest))


@triton.jit
@no_type_check
def _channels_of(gates, head, columns, is_column):
    """Return some channels of a head."""
    strides = gates.log_decay_strides
    return Channels(gates.log_decay + head * strides[1] + columns[None, :] * strides[2], strides[0], is_column)


@triton.jit
@no_type_check
def _read_logs(channels, chunk, BLOCK: tl.constexpr, TILE):
    """Return the logarithms of each token, and those of the token after it, 0 after the last one of a block."""
    at = tl.arange(0, TILE.CHUNK)
    of_tokens = channels.log_decay + chunk.row[:, None] * channels.stride
    is_channel = channels.is_channel[None, :]
    logs = tl.load(of_tokens, chunk.is_token[:, None] & is_channel, 0.0).to(tl.float32)
    following = chunk.first + at + 1
    has_next = (following >= 0) & (following < chunk.length) & (at % BLOCK != BLOCK - 1)
    later = tl.load(of_tokens + channels.stride, has_next[:, None] & is_channel, 0.0).to(tl.float32)
    return logs, later


@triton.jit
@no_type_check
def _decays_of(channels, chunk, TILE):
    """Return the decays of channels since the start of a chunk, after each token up to its end, and of all tokens."""
    logs, later = _read_logs(channels, chunk, TILE.CHUNK, TILE)
    return tl.exp(tl.cumsum(logs, 0)), tl.exp(tl.cumsum(later, 0, reverse=True)), tl.exp(tl.sum(logs, 0))


@triton.jit
@no_type_check
def _pairs(left, right, channels, chunk, HALF: tl.constexpr, TILE):
    """Return the weight of tokens i and j, for i in the second half of a block, and j in the first."""
    PAD_K: tl.constexpr = left.shape[1]
    logs, later = _read_logs(channels, chunk, HALF, TILE)
    since = tl.cumsum(tl.reshape(logs, [TILE.CHUNK // HALF, HALF, PAD_K]), 1)
    until = tl.cumsum(tl.reshape(later, [TILE.CHUNK // HALF, HALF, PAD_K]), 1, reverse=True)
    left *= tl.exp(tl.reshape(since, [TILE.CHUNK, PAD_K]))
    right *= tl.exp(tl.reshape(until, [TILE.CHUNK, PAD_K]))
    return tl.dot(left, tl.trans(right), input_precision=TILE.PRECISION)


@triton.jit
@no_type_check
def _weights(left, right, channels, chunk, TILE):
    """Return `sum over d of left[i, d] right[j, d] D[i, j, d]` for j <= i, and 0 for others."""
    at = tl.arange(0, TILE.CHUNK)
    left, right = left.to(tl.float32), right.to(tl.float32)
    weights = tl.where(at[:, None] == at[None, :], tl.sum(left * right, 1)[:, None], 0.0)
    for level in tl.static_range(TILE.LEVELS):
        products = _pairs(left, right, channels, chunk, 1 << level, TILE)
        half_i, half_j = at[:, None] >> level, at[None, :] >> level
        weights = tl.where((half_i > half_j) & (half_i // 2 == half_j // 2), products, weights)
    return weights


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


@triton.jit(do_not_specialize=CHANGING)
@no_type_check
def _within_kernel(tokens, gates, tables, solved, TILE):
    """Compute the intra-chunk terms of one chunk, in one head; all chunks are independent here."""
    number, place = _find_chunk(tables, tl.program_id(0), TILE)
    head, key_head = tl.program_id(1).to(tl.int64), (tl.program_id(1) // tokens.GROUP).to(tl.int64)
    sequence = find_sequence(tables, number)
    first = place * TILE.CHUNK - sequence.position % TILE.CHUNK
    if (sequence.slot < 0) | (first >= sequence.length):
        return
    chunk = _chunk_from(sequence, first, head, TILE)
    at = tl.arange(0, TILE.CHUNK)
    at_k = tl.arange(0, tokens.PAD_K).to(tl.int64)
    in_k = at_k < tokens.DK
    keys = _load_rows(tokens.key, tokens.key_strides, chunk, key_head, at_k, in_k)
    queries = _load_rows(tokens.query, tokens.query_strides, chunk, key_head, at_k, in_k)
    if gates.PER_CHANNEL:
        channels = _channels_of(gates, head, at_k, in_k)
        products = _weights(queries, keys, channels, chunk, TILE)
    else:
        of_decays = gates.log_decay + head * gates.log_decay_strides[1]
        between, from_start, to_end = _between(of_decays, gates.log_decay_strides[0], chunk, TILE)
        tl.store(solved.decays + chunk.own_row * 2, from_start, chunk.is_token)
        tl.store(solved.decays + chunk.own_row * 2 + 1, to_end, chunk.is_token)
        products = tl.dot(queries, tl.trans(keys), input_precision=TILE.PRECISION) * between
    products = tl.where(at[:, None] >= at[None, :], products, 0.0)  # a product of 0 and NaN would be NaN
    own_weights = solved.weights + chunk.own_row[:, None] * TILE.CHUNK + at[None, :]
    tl.store(own_weights, products, chunk.is_token[:, None])

    of_rates = gates.beta + chunk.row * gates.beta_strides[0] + head * gates.beta_strides[1]
    rates = tl.load(of_rates, chunk.is_token, 0.0).to(tl.float32)
    OPERAND: tl.constexpr = solved.written.dtype.element_ty
    if gates.DELTA:
        if gates.PER_CHANNEL:
            system = _weights(keys, keys, channels, chunk, TILE)
        else:
            system = tl.dot(keys, tl.trans(keys), input_precision=TILE.PRECISION) * between
        system *= -rates[:, None]
        first_bad = _first_bad(system, rates, TILE)
        is_good = at < first_bad
        system = tl.where((at[:, None] > at[None, :]) & is_good[:, None], system, 0.0)
        inverse = invert_triangular(system, TILE.PRECISION, TILE.CHUNK).to(OPERAND)
        rates = tl.where(is_good, rates, float("nan"))
    for first_column in range(0, tokens.DK if gates.DELTA or gates.PER_CHANNEL else 0, TILE.COLUMNS):
        columns = (first_column + tl.arange(0, TILE.COLUMNS)).to(tl.int64)
        is_column = columns < tokens.DK
        in_part = chunk.is_token[:, None] & is_column[None, :]
        part = _load_rows(tokens.key, tokens.key_strides, chunk, key_head, columns, is_column).to(tl.float32)
        at_part = chunk.own_row[:, None] * solved.ROW_K + columns[None, :]
        if gates.PER_CHANNEL:
            since, until, total = _decays_of(_channels_of(gates, head, columns, is_column), chunk, TILE)
            tl.store(solved.decays + chunk.own_last * tokens.DK + columns, total, is_column)
            tl.store(solved.keys_until + at_part, part * until, in_part)
            asked = _load_rows(tokens.query, tokens.query_strides, chunk, key_head, columns, is_column).to(tl.float32)
            tl.store(solved.queries_since + at_part, asked * since, in_part)
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
            tl.store(solved.answered + at_part, part, in_part)
    for first_column in range(0, tokens.DV, TILE.COLUMNS):
        columns = (first_column + tl.arange(0, TILE.COLUMNS)).to(tl.int64)
        is_column = columns < tokens.DV
        part = _load_rows(tokens.value, tokens.value_strides, chunk, head, columns, is_column).to(tl.float32)
        part *= rates[:, None]
        if gates.DELTA:
            part = _dot_with_earlier(inverse, part, OPERAND, TILE.PRECISION, TILE.CHUNK)
        else:
            is_finite = tl.abs(part) < float("inf")
            part = tl.where(_after(tl.where(is_finite, 0.0, 1.0), TILE.CHUNK), float("nan"), part)
        of_written = solved.written + chunk.own_row[:, None] * solved.ROW_V + columns[None, :]
        tl.store(of_written, part, chunk.is_token[:, None] & is_column[None, :])


@triton.jit(do_not_specialize=CHANGING)
@no_type_check
def _chunks_kernel(tokens, states, out, out_strides, tables, solved, scale, TILE, BLOCK_V: tl.constexpr):
    """Go through the chunks of a sequence with part of one head's state, which is `[dk, dv]` here."""
    sequence = find_sequence(tables, tl.program_id(0))
    head, key_head = tl.program_id(1).to(tl.int64), (tl.program_id(1) // tokens.GROUP).to(tl.int64)
    at_v = (tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)).to(tl.int64)
    at_k, at = tl.arange(0, tokens.PAD_K).to(tl.int64), tl.arange(0, TILE.CHUNK)
    in_v, in_k = at_v < tokens.DV, at_k < tokens.DK
    of_out = out + head * out_strides[1] + at_v[None, :] * out_strides[2]
    if sequence.slot < 0:
        for first in range(0, sequence.length, TILE.CHUNK):
            row = sequence.first_row + first + at
            in_rows = (first + at < sequence.length)[:, None] & in_v[None, :]
            tl.store(
                of_out + row[:, None] * out_strides[0], tl.zeros([TILE.CHUNK, BLOCK_V], out.dtype.element_ty), in_rows
            )
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
        decays = _decays_at(solved, _chunk_from(sequence, start, head, TILE))
    for first in range(start, sequence.length, TILE.CHUNK):
        chunk = _chunk_from(sequence, first, head, TILE)
        first_row = (sequence.first_row + first).to(tl.int64)
        own = first_row * tl.num_programs(1) + head  # the row of the first token in the tensors of `Solved`
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
            total, since, until = decays
            decays = _decays_at(solved, _chunk_from(sequence, first + TILE.CHUNK, head, TILE))  # for the next chunk
            kept = values * until[:, None]
            result = tl.dot(queries, before, input_precision=TILE.PRECISION) * since[:, None]
        state = state * total + tl.dot(tl.trans(keys), kept.to(OPERAND), input_precision=TILE.PRECISION)
        of_weights = solved.weights + own * TILE.CHUNK + offsets.weights
        own_weights = tl.load(of_weights, chunk.is_token[:, None], 0.0)
        is_finite = tl.abs(values) < float("inf")  # NaN in a row is in all later ones: see `_dot_with_earlier`
        result += tl.dot(own_weights, tl.where(is_finite, values, 0.0).to(OPERAND), input_precision=TILE.PRECISION)
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
