"""Prompts of layers with a state, chunk by chunk, in Triton: what the tokens of a chunk are to one another.

As in `fastattn.kernels.torch_ops.recurrent`, sums of logarithms are never subtracted: those of a chunk are summed from
each token on, so a gate of exactly 0 or a saturated one changes nothing for the tokens after it.

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

from typing import no_type_check

import triton
import triton.language as tl

from fastattn.kernels.triton.states import CHANGING, find_sequence

# Triton's interpreter finds a function only if it stands above the one that calls it.


@triton.jit
@no_type_check
def _first_place(cu_seqlens_q, sequence, CHUNK: tl.constexpr):
    return tl.load(cu_seqlens_q + sequence) // CHUNK + 2 * sequence


@triton.jit
@no_type_check
def _find_chunk(place, cu_seqlens_q, num_seqs, CHUNK: tl.constexpr):
    """Return the sequence that has some place among all chunks, and which of its chunks it is, found by halving.

    Chunks end where positions are multiples of their size, so a sequence has at most two more than it fills.
    """
    sequence = place * 0
    high = num_seqs - 1
    while sequence < high:
        middle = (sequence + high + 1) // 2
        if _first_place(cu_seqlens_q, middle, CHUNK) <= place:
            sequence = middle
        else:
            high = middle - 1
    return sequence, place - _first_place(cu_seqlens_q, sequence, CHUNK)


@triton.jit
@no_type_check
def _between(log_decay, row, first, length, stride, CHUNK: tl.constexpr):
    """Return the decays between two tokens of a chunk, 0 for later ones; since its start; and up to its end.

    Sums go along the rows of the matrix, whose elements a thread holds more of: so they take fewer exchanges.
    """
    at = tl.arange(0, CHUNK)
    in_chunk = (first + at >= 0) & (first + at < length)
    logs = tl.load(log_decay + row * stride, in_chunk, 0.0).to(tl.float32)
    has_next = (first + at + 1 >= 0) & (first + at + 1 < length) & (at + 1 < CHUNK)
    later = tl.load(log_decay + (row + 1) * stride, has_next, 0.0).to(tl.float32)
    sums = tl.cumsum(tl.where(at[:, None] > at[None, :], later[None, :], 0.0), 1, reverse=True)
    between = tl.where(at[:, None] >= at[None, :], tl.exp(sums), 0.0)
    return between, tl.exp(tl.cumsum(logs, 0)), tl.exp(tl.cumsum(later, 0, reverse=True))


@triton.jit
@no_type_check
def _of_channels(of_decays, first_row, first, length, in_k, stride, CHUNK: tl.constexpr):
    """Return the decays of each channel since the start of a chunk, after each token up to its end, and of all."""
    logs, later = _read_logs(of_decays, first_row, first, length, in_k, stride, CHUNK, CHUNK)
    return tl.exp(tl.cumsum(logs, 0)), tl.exp(tl.cumsum(later, 0, reverse=True)), tl.exp(tl.sum(logs, 0))


@triton.jit
@no_type_check
def _read_logs(of_decays, first_row, first, length, in_k, stride, CHUNK: tl.constexpr, BLOCK: tl.constexpr):
    """Return the logarithms of each token, and those of the token after it, 0 after the last one of a block."""
    at = tl.arange(0, CHUNK)
    token = first + at
    of_tokens = of_decays + (first_row + token)[:, None] * stride
    is_real = (token >= 0) & (token < length)
    logs = tl.load(of_tokens, is_real[:, None] & in_k[None, :], 0.0).to(tl.float32)
    has_next = (token + 1 >= 0) & (token + 1 < length) & (at % BLOCK != BLOCK - 1)
    later = tl.load(of_tokens + stride, has_next[:, None] & in_k[None, :], 0.0).to(tl.float32)
    return logs, later


@triton.jit
@no_type_check
def _weights(
    left,
    right,
    of_decays,
    first_row,
    first,
    length,
    in_k,
    stride,
    CHUNK: tl.constexpr,
    PAD_K: tl.constexpr,
    LEVELS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Return `sum over d of left[i, d] right[j, d] D[i, j, d]` for j <= i, and 0 for others."""
    at = tl.arange(0, CHUNK)
    left, right = left.to(tl.float32), right.to(tl.float32)
    weights = tl.where(at[:, None] == at[None, :], tl.sum(left * right, 1)[:, None], 0.0)
    for level in tl.static_range(LEVELS):
        products = _pairs(
            left, right, of_decays, first_row, first, length, in_k, stride, CHUNK, PAD_K, 1 << level, PRECISION
        )
        half_i, half_j = at[:, None] >> level, at[None, :] >> level
        weights = tl.where((half_i > half_j) & (half_i // 2 == half_j // 2), products, weights)
    return weights


@triton.jit
@no_type_check
def _pairs(
    left,
    right,
    of_decays,
    first_row,
    first,
    length,
    in_k,
    stride,
    CHUNK: tl.constexpr,
    PAD_K: tl.constexpr,
    HALF: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Return the weight of tokens i and j, if i is in the second half of a block of two, and j in the first."""
    logs, later = _read_logs(of_decays, first_row, first, length, in_k, stride, CHUNK, HALF)
    since = tl.cumsum(tl.reshape(logs, [CHUNK // HALF, HALF, PAD_K]), 1)
    until = tl.cumsum(tl.reshape(later, [CHUNK // HALF, HALF, PAD_K]), 1, reverse=True)
    left *= tl.exp(tl.reshape(since, [CHUNK, PAD_K]))
    right *= tl.exp(tl.reshape(until, [CHUNK, PAD_K]))
    return tl.dot(left, tl.trans(right), input_precision=PRECISION)


@triton.jit
@no_type_check
def _after(is_bad, CHUNK: tl.constexpr):
    """Return which rows of a chunk have a bad one among them and those before, in each column."""
    at = tl.arange(0, CHUNK)
    earlier = tl.where(at[:, None] >= at[None, :], 1.0, 0.0).to(tl.float16)
    return tl.dot(earlier, is_bad.to(tl.float16)) > 0.0


@triton.jit
@no_type_check
def _dot_with_earlier(weights, rows, OPERAND: tl.constexpr, PRECISION: tl.constexpr, CHUNK: tl.constexpr):
    """Multiply lower triangular weights with rows, so that NaN in a row reaches those after it, and none before."""
    is_finite = tl.abs(rows) < float("inf")
    rows = tl.where(is_finite, rows, 0.0).to(OPERAND)
    products = tl.dot(weights, rows, input_precision=PRECISION)
    return tl.where(_after(tl.where(is_finite, 0.0, 1.0), CHUNK), float("nan"), products)


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
    """Return the inverse of what four blocks on a diagonal are with what couples them; their own inverses are there.

    What couples them, X, has a fourth power of 0, so `(1 - X)^-1 = (1 + X) (1 + X^2)`.
    """
    coupled = tl.dot(inverse, coupling, input_precision=PRECISION)
    inverse += tl.dot(tl.dot(coupled, coupled, input_precision=PRECISION), inverse, input_precision=PRECISION)
    return inverse + tl.dot(coupled, inverse, input_precision=PRECISION)


@triton.jit
@no_type_check
def _invert(system, PRECISION: tl.constexpr, CHUNK: tl.constexpr):
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
def _within_kernel(
    query,
    key,
    value,
    log_decay,
    beta,
    written,  # [t, hv, dv], in rows of ROW_V: what each token writes after a state of zeros
    answered,  # [t, hv, dk], in rows of ROW_K: times the state before, what it writes less; None without the delta rule
    weights,  # [t, hv, CHUNK]: of what the chunk's tokens write, in the answer to each query
    decays,  # [t, hv, 2]: since the chunk's start, and up to its end; or [t, hv, dk]: in its last row, all of it
    queries_since,  # [t, hv, dk], queries times the channels' decays since the chunk's start; else None
    keys_until,  # [t, hv, dk], keys times the channels' decays up to its end; else None
    query_strides,
    key_strides,
    value_strides,
    log_decay_strides,
    beta_strides,
    cu_seqlens_q,
    seq_lens,
    state_indices,
    has_initial_state,
    num_accepted,
    checkpoints,
    table_stride,
    column_stride,
    has_stride,
    accepted_stride,
    checkpoint_stride,
    checkpoint_column_stride,
    num_seqs,
    num_tokens,
    GROUP: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    PAD_K: tl.constexpr,
    ROW_K: tl.constexpr,
    ROW_V: tl.constexpr,
    COLUMNS: tl.constexpr,
    DELTA: tl.constexpr,
    PER_DRAFT: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    PER_CHANNEL: tl.constexpr,
    LEVELS: tl.constexpr,
    CHUNK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Compute what the tokens of one chunk are to one another, in one head; all chunks are independent here."""
    sequence, chunk = _find_chunk(tl.program_id(0), cu_seqlens_q, num_seqs, CHUNK)
    head, key_head = tl.program_id(1).to(tl.int64), (tl.program_id(1) // GROUP).to(tl.int64)
    first_row, length, position, slot, _ = find_sequence(
        sequence,
        cu_seqlens_q,
        seq_lens,
        state_indices,
        has_initial_state,
        num_accepted,
        table_stride,
        column_stride,
        has_stride,
        accepted_stride,
        num_seqs,
        num_tokens,
    )
    first = chunk * CHUNK - position % CHUNK
    if (slot < 0) | (first >= length):
        return
    at = tl.arange(0, CHUNK)
    in_chunk = (first + at >= 0) & (first + at < length)
    row = first_row + first + at
    own_row = row * tl.num_programs(1) + head
    at_k = tl.arange(0, PAD_K).to(tl.int64)
    in_keys = in_chunk[:, None] & (at_k < DK)[None, :]
    of_rows = key + key_head * key_strides[1] + row[:, None] * key_strides[0]
    keys = tl.load(of_rows + at_k[None, :] * key_strides[2], in_keys, 0.0)
    of_queries = query + key_head * query_strides[1] + row[:, None] * query_strides[0]
    queries = tl.load(of_queries + at_k[None, :] * query_strides[2], in_keys, 0.0)
    of_decays = log_decay + head * log_decay_strides[1]
    if PER_CHANNEL:
        in_k, stride = at_k < DK, log_decay_strides[0]
        of_channels = of_decays + at_k[None, :] * log_decay_strides[2]
        products = _weights(
            queries, keys, of_channels, first_row, first, length, in_k, stride, CHUNK, PAD_K, LEVELS, PRECISION
        )
    else:
        between, from_start, to_end = _between(of_decays, row, first, length, log_decay_strides[0], CHUNK)
        tl.store(decays + own_row * 2, from_start, in_chunk)
        tl.store(decays + own_row * 2 + 1, to_end, in_chunk)
        products = tl.dot(queries, tl.trans(keys), input_precision=PRECISION) * between
    products = tl.where(at[:, None] >= at[None, :], products, 0.0)  # a product of 0 and NaN would be NaN
    tl.store(weights + own_row[:, None] * CHUNK + at[None, :], products, in_chunk[:, None])

    rates = tl.load(beta + row * beta_strides[0] + head * beta_strides[1], in_chunk, 0.0).to(tl.float32)
    OPERAND: tl.constexpr = written.dtype.element_ty
    if DELTA:
        if PER_CHANNEL:
            system = _weights(
                keys, keys, of_channels, first_row, first, length, in_k, stride, CHUNK, PAD_K, LEVELS, PRECISION
            )
        else:
            system = tl.dot(keys, tl.trans(keys), input_precision=PRECISION) * between
        system *= -rates[:, None]
        system = tl.where(at[:, None] > at[None, :], system, 0.0)
        is_finite = tl.abs(system) < float("inf")
        inverse = _invert(tl.where(is_finite, system, 0.0), PRECISION, CHUNK).to(OPERAND)
        is_bad = tl.max(tl.where(is_finite, 0, 1), 1)[:, None] > 0  # then all that is written from here on is NaN
    for first_column in range(0, DK if DELTA or PER_CHANNEL else 0, COLUMNS):
        columns = (first_column + tl.arange(0, COLUMNS)).to(tl.int64)
        in_part = in_chunk[:, None] & (columns < DK)[None, :]
        part = tl.load(of_rows + columns[None, :] * key_strides[2], in_part, 0.0).to(tl.float32)
        at_part = own_row[:, None] * ROW_K + columns[None, :]
        if PER_CHANNEL:
            of_part = of_decays + columns[None, :] * log_decay_strides[2]
            since, until, total = _of_channels(
                of_part, first_row, first, length, columns < DK, log_decay_strides[0], CHUNK
            )
            last = (first_row + tl.minimum(first + CHUNK, length) - 1) * tl.num_programs(1) + head
            tl.store(decays + last * DK + columns, total, columns < DK)
            tl.store(keys_until + at_part, part * until, in_part)
            asked = tl.load(of_queries + columns[None, :] * query_strides[2], in_part, 0.0).to(tl.float32)
            tl.store(queries_since + at_part, asked * since, in_part)
        else:
            since = from_start[:, None]
        if DELTA:
            part = tl.where(is_bad, float("nan"), part * rates[:, None] * since)
            part = _dot_with_earlier(inverse, part, OPERAND, PRECISION, CHUNK)
            tl.store(answered + at_part, part, in_part)
    of_values = value + head * value_strides[1] + row[:, None] * value_strides[0]
    for first_column in range(0, DV, COLUMNS):
        columns = (first_column + tl.arange(0, COLUMNS)).to(tl.int64)
        in_part = in_chunk[:, None] & (columns < DV)[None, :]
        part = tl.load(of_values + columns[None, :] * value_strides[2], in_part, 0.0).to(tl.float32) * rates[:, None]
        if DELTA:
            part = _dot_with_earlier(inverse, tl.where(is_bad, float("nan"), part), OPERAND, PRECISION, CHUNK)
        else:
            is_finite = tl.abs(part) < float("inf")
            part = tl.where(_after(tl.where(is_finite, 0.0, 1.0), CHUNK), float("nan"), part)
        tl.store(written + own_row[:, None] * ROW_V + columns[None, :], part, in_part)


@triton.jit(do_not_specialize=CHANGING)
@no_type_check
def _chunks_kernel(
    query,
    key,
    states,
    out,
    written,
    answered,
    weights,
    decays,
    queries_since,
    keys_until,
    query_strides,
    key_strides,
    states_strides,
    out_strides,
    cu_seqlens_q,
    seq_lens,
    state_indices,
    has_initial_state,
    num_accepted,
    checkpoints,
    table_stride,
    column_stride,
    has_stride,
    accepted_stride,
    checkpoint_stride,
    checkpoint_column_stride,
    num_seqs,
    num_tokens,
    scale,
    GROUP: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    PAD_K: tl.constexpr,
    ROW_K: tl.constexpr,
    ROW_V: tl.constexpr,
    DELTA: tl.constexpr,
    PER_DRAFT: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    PER_CHANNEL: tl.constexpr,
    CHUNK: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Go through the chunks of a sequence with part of one head's state, which is `[dk, dv]` here."""
    sequence = tl.program_id(0)
    head, key_head = tl.program_id(1).to(tl.int64), (tl.program_id(1) // GROUP).to(tl.int64)
    first_row, length, position, slot, start = find_sequence(
        sequence,
        cu_seqlens_q,
        seq_lens,
        state_indices,
        has_initial_state,
        num_accepted,
        table_stride,
        column_stride,
        has_stride,
        accepted_stride,
        num_seqs,
        num_tokens,
    )
    at_v = (tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)).to(tl.int64)
    at_k, at = tl.arange(0, PAD_K).to(tl.int64), tl.arange(0, CHUNK)
    in_v, in_k = at_v < DV, at_k < DK
    of_out = out + head * out_strides[1] + at_v[None, :] * out_strides[2]
    if slot < 0:
        for first in range(0, length, CHUNK):
            row = first_row + first + at
            zeros = tl.zeros([CHUNK, BLOCK_V], out.dtype.element_ty)
            tl.store(of_out + row[:, None] * out_strides[0], zeros, (first + at < length)[:, None] & in_v[None, :])
        return
    of_states = (
        states + head * states_strides[1] + at_v[None, :] * states_strides[2] + at_k[:, None] * states_strides[3]
    )
    in_state = in_k[:, None] & in_v[None, :]
    state = tl.load(of_states + start * states_strides[0], in_state & (start >= 0), 0.0).to(tl.float32)
    OPERAND: tl.constexpr = written.dtype.element_ty
    for first in range(-(position % CHUNK), length, CHUNK):
        in_chunk = (first + at >= 0) & (first + at < length)
        row = first_row + first + at
        own_row = row * tl.num_programs(1) + head
        in_keys, in_values = in_chunk[:, None] & in_k[None, :], in_chunk[:, None] & in_v[None, :]
        values = tl.load(written + own_row[:, None] * ROW_V + at_v[None, :], in_values, 0.0).to(tl.float32)
        before = state.to(OPERAND)
        if DELTA:
            answers = tl.load(answered + own_row[:, None] * ROW_K + at_k[None, :], in_keys, 0.0)
            values -= tl.dot(answers, before, input_precision=PRECISION)
        last = (first_row + tl.minimum(first + CHUNK, length) - 1) * tl.num_programs(1) + head
        if PER_CHANNEL:
            at_keys = own_row[:, None] * ROW_K + at_k[None, :]
            keys = tl.load(keys_until + at_keys, in_keys, 0.0)
            queries = tl.load(queries_since + at_keys, in_keys, 0.0)
            total = tl.load(decays + last * DK + at_k, in_k, 0.0)[:, None]
            kept, result = values, tl.dot(queries, before, input_precision=PRECISION)
        else:
            of_keys = key + key_head * key_strides[1] + row[:, None] * key_strides[0]
            keys = tl.load(of_keys + at_k[None, :] * key_strides[2], in_keys, 0.0).to(OPERAND)
            of_queries = query + key_head * query_strides[1] + row[:, None] * query_strides[0]
            queries = tl.load(of_queries + at_k[None, :] * query_strides[2], in_keys, 0.0).to(OPERAND)
            total = tl.load(decays + last * 2)
            kept = values * tl.load(decays + own_row * 2 + 1, in_chunk, 0.0)[:, None]
            result = tl.dot(queries, before, input_precision=PRECISION)
            result *= tl.load(decays + own_row * 2, in_chunk, 0.0)[:, None]
        state = state * total + tl.dot(tl.trans(keys), kept.to(OPERAND), input_precision=PRECISION)
        own_weights = tl.load(weights + own_row[:, None] * CHUNK + at[None, :], in_chunk[:, None], 0.0)
        is_finite = tl.abs(values) < float("inf")  # NaN is in all rows after the first that has it: see above
        result += tl.dot(own_weights, tl.where(is_finite, values, 0.0).to(OPERAND), input_precision=PRECISION)
        result = tl.where(is_finite, result * scale, float("nan"))
        tl.store(of_out + row[:, None] * out_strides[0], result.to(out.dtype.element_ty), in_values)
        if BLOCK_SIZE:
            end = position + tl.minimum(first + CHUNK, length)
            if (end % BLOCK_SIZE == 0) & (first + CHUNK <= length):
                column = (end // BLOCK_SIZE - 1).to(tl.int64)
                of_slot = checkpoints + sequence.to(tl.int64) * checkpoint_stride + column * checkpoint_column_stride
                own = tl.load(of_slot).to(tl.int64)
                tl.store(of_states + own * states_strides[0], state.to(states.dtype.element_ty), in_state & (own >= 0))
    tl.store(of_states + slot * states_strides[0], state.to(states.dtype.element_ty), in_state)
