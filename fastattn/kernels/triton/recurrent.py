"""Layers that keep a state: tokens one by one for decodes and drafts, by chunks for prompts; and their convolution.

    decode, drafts    one program per sequence, head and part of the values; its state stays in registers from the first
                      token to the last: it is read once, and written once per slot that keeps it; the last sequence's
                      programs also write zeros to the rows after it
    prompts           first what the tokens of a chunk are to one another, for all chunks at once (the triangular system
                      of each); then one program per sequence, head and part of the values goes from chunk to chunk
                      with its state

A program reads the lengths and the slots itself, so nothing depends on the host, and a captured graph replays with
other lengths, slots and padding. Of prompts, one program more than there are sequences writes the zeros.

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

from math import gcd
from typing import Any, no_type_check

import torch
import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor

from fastattn.kernels import device as devices
from fastattn.kernels.triton.launch import INTERPRETED
from refattn.options import RecurrentOptions
from refattn.states import StatePlan

CHUNK = 64  # tokens whose system of equations is solved at once
FEWEST_IN_CHUNK = 16  # rows of a product of matrices, at least
ALIGNED = 16  # elements, multiples of which the compiler knows as such
FEW = 16  # tokens, up to which sequences go token by token
BLOCK_V = 8  # values of a state in one program that goes token by token, of this many warps
TOKENS_WARPS = 1
FEW_PROGRAMS = 8  # of a multiprocessor; if there are no more, each takes half as many values
CHUNKS_BLOCK_V = 32  # and in one that goes chunk by chunk; twice as many where not all programs run at once
CHUNKS_WARPS = 4
COLUMNS = 64  # of keys or values that such a program holds at a time
WITHIN_WARPS = 4
WITHIN_REGISTERS = 168  # of a thread of it on an NVIDIA GPU: three such programs on a multiprocessor, and few spills
MOST_STAGES = 3  # chunks in shared memory at once
BLOCK_T, BLOCK_C = 32, 128  # tokens and channels of a tile of the convolution

CHANGING = ("num_seqs", "num_tokens", "table_stride", "column_stride", "checkpoint_stride", "checkpoint_column_stride")


def recurrent(
    query: Float[Tensor, "t h dk"],
    key: Float[Tensor, "t h dk"],
    value: Float[Tensor, "t hv dv"],
    log_decay: Float[Tensor, "t hv"] | Float[Tensor, "t hv dk"],
    beta: Float[Tensor, "t hv"],
    states: Float[Tensor, "n hv dv dk"],
    plan: StatePlan,
    options: RecurrentOptions,
    out: Float[Tensor, "t hv dv"] | None,
) -> Float[Tensor, "t hv dv"]:
    """Fold new tokens into states; see `fastattn.dispatch`."""
    num_tokens, num_heads, value_head_size = value.shape
    key_head_size, per_channel = query.shape[-1], log_decay.ndim == 3
    out = torch.empty_like(value, memory_format=torch.contiguous_format) if out is None else out
    if not num_tokens:
        return out
    chunk = _chunk_size(plan, query, per_channel)
    by_token = plan.per_draft or chunk < FEWEST_IN_CHUNK or plan.batch.max_query_len <= FEW
    if not by_token:
        query, key, value = _aligned(query), _aligned(key), _aligned(value)
        log_decay = _aligned(log_decay) if per_channel else log_decay
    tensors = dict(query=query, key=key, value=value, beta=beta, log_decay=log_decay, states=states, out=out)
    arguments = {
        **tensors,
        **{f"{name}_strides": x.stride() for name, x in tensors.items()},
        **_tables(plan, num_tokens),
        "scale": key_head_size**-0.5 if options.scale is None else float(options.scale),
        "GROUP": num_heads // query.shape[1],
        "DK": key_head_size,
        "DV": value_head_size,
        "PAD_K": _pad(key_head_size),
        "DELTA": options.delta,
    }
    values_of = _values_by_token if by_token else _values_at_once
    block_v = min(values_of(plan.batch.num_seqs * num_heads, query, value), _pad(value_head_size))
    parts = triton.cdiv(value_head_size, block_v)
    arguments["PER_CHANNEL"] = per_channel
    if by_token:  # programs in the order of their parts in memory: a state is read as one piece
        num_programs = max(1, plan.batch.num_seqs) * num_heads * parts
        _tokens_kernel[(num_programs,)](**arguments, NUM_HEADS=num_heads, BLOCK_V=block_v, num_warps=TOKENS_WARPS)
        return out
    precision = "ieee" if devices.is_rocm() else "tf32x3" if query.dtype == torch.float32 else "tf32"
    arguments |= {"CHUNK": chunk, "PRECISION": precision}
    arguments |= {"ROW_K": _pitch(key_head_size), "ROW_V": _pitch(value_head_size)}
    # What 16 bits round here is what they round anyway, but fp16 may not hold it: products are in bfloat16, or in 32.
    operand = torch.bfloat16 if query.dtype == torch.bfloat16 else torch.float32
    like_keys = num_tokens, num_heads, _pitch(key_head_size)

    def empty(*shape: int, dtype: torch.dtype = operand) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=value.device)

    made = {
        "written": empty(num_tokens, num_heads, _pitch(value_head_size)),
        "answered": empty(*like_keys) if options.delta else None,
        "weights": empty(num_tokens, num_heads, chunk),
        "decays": empty(num_tokens, num_heads, key_head_size if per_channel else 2, dtype=torch.float32),
        "queries_since": empty(*like_keys) if per_channel else None,
        "keys_until": empty(*like_keys) if per_channel else None,
    }
    num_places = num_tokens // chunk + 2 * plan.batch.num_seqs  # of chunks: the first may begin inside one
    own = {name: x for name, x in arguments.items() if name not in _OF_STATES}
    levels = chunk.bit_length() - 1 if per_channel else 0
    on_nvidia = {} if INTERPRETED or devices.is_rocm() else {"maxnreg": WITHIN_REGISTERS}
    _within_kernel[(num_places, num_heads)](
        **own, **made, LEVELS=levels, COLUMNS=COLUMNS, num_warps=WITHIN_WARPS, **on_nvidia
    )
    own = {name: x for name, x in arguments.items() if name not in _OF_CHUNKS}
    grid = (plan.batch.num_seqs + 1, num_heads, parts)
    _chunks_kernel[grid](**own, **made, BLOCK_V=block_v, num_warps=CHUNKS_WARPS, num_stages=_stages(query, chunk))
    return out


def _aligned(rows: Tensor) -> Tensor:
    """Copy rows that are not read 16 bytes at a time, into some that are: side by side, each from a multiple of 16 on.

    Seen on an H100: where Triton 3.6 cannot load rows of bfloat16 ahead, 4 bytes and more at a time, what it compiles
    answers wrongly, or reads what is not there.
    """
    *strides, last = rows.stride()
    if last == 1 and rows.data_ptr() % 16 == 0 and not any(stride % ALIGNED for stride in strides):
        return rows
    size = rows.shape[-1]
    return rows.new_empty(*rows.shape[:-1], _pitch(size))[..., :size].copy_(rows)


def _pitch(size: int) -> int:
    """Return from where to where rows begin in memory that is made for them."""
    return -(-size // ALIGNED) * ALIGNED


def _values_by_token(num_states: int, query: Tensor, value: Tensor) -> int:
    """Return how many values of a state are in one program that goes token by token.

    With keys of fewer than 64 elements the bits would depend on it, and so on the number of requests.
    """
    programs = num_states * triton.cdiv(value.shape[-1], BLOCK_V)
    may_be_fewer = not INTERPRETED and _pad(query.shape[-1]) >= 64
    is_few = may_be_fewer and programs <= FEW_PROGRAMS * devices.num_multiprocessors(query.device)
    return BLOCK_V // 2 if is_few else BLOCK_V


def _values_at_once(num_states: int, query: Tensor, value: Tensor) -> int:
    """Return how many are in one that goes chunk by chunk.

    Keys are read by every program of their state, so fewer are better, unless a multiprocessor is left without one.
    """
    programs = num_states * triton.cdiv(value.shape[-1], CHUNKS_BLOCK_V)
    all_at_once = INTERPRETED or programs <= devices.num_multiprocessors(query.device)
    return CHUNKS_BLOCK_V if all_at_once else _most_values_at_once(query)


def _most_values_at_once(query: Tensor) -> int:
    """Bound them: a state of 128 keys and 64 values takes half of a thread's registers."""
    return 2 * CHUNKS_BLOCK_V if _pad(query.shape[-1]) <= 128 else CHUNKS_BLOCK_V


def _pad(size: int) -> int:
    """Return the elements of a tile that holds some, in rows that can be multiplied."""
    return max(FEWEST_IN_CHUNK, triton.next_power_of_2(size))


_OF_STATES = ("states", "states_strides", "out", "out_strides", "scale")
_OF_CHUNKS = ("value", "value_strides", "log_decay", "log_decay_strides", "beta", "beta_strides")


def _chunk_size(plan: StatePlan, query: Tensor, per_channel: bool) -> int:
    """Return how many tokens a chunk has: blocks end with one, and two of them fit into shared memory; 0 if none does.

    Two on an NVIDIA GPU: what Triton 3.6 compiles for one at a time answers wrongly on Hopper.
    """
    size = CHUNK if plan.block_size is None else gcd(CHUNK, plan.block_size)
    if per_channel or query.shape[-1] * query.element_size() > 256:
        size = min(size, CHUNK // 2)
    while size >= FEWEST_IN_CHUNK and not _stages(query, size):
        size //= 2
    return size if size >= FEWEST_IN_CHUNK else 0


def _stages(query: Tensor, chunk: int) -> int:
    """Return how many chunks are in shared memory at once; 0 if they are too large.

    One of 64 tokens with keys of 128 takes 60 KiB in bfloat16.
    """
    if INTERPRETED:
        return 1
    elements = chunk * (3 * _pad(query.shape[-1]) + _most_values_at_once(query) + chunk)
    room = devices.shared_memory(query.device) - 8192
    stages = min(MOST_STAGES, room // (elements * (2 if query.dtype == torch.bfloat16 else 4)))
    return stages if stages >= (1 if devices.is_rocm() else 2) else 0


def _tables(plan: StatePlan, num_tokens: int) -> dict[str, Any]:
    """Return the tables of a plan as arguments of a kernel."""
    indices, checkpoints = plan.state_indices, plan.checkpoint_indices
    return dict(
        cu_seqlens_q=plan.batch.cu_seqlens_q,
        seq_lens=plan.batch.seq_lens,
        state_indices=indices,
        has_initial_state=plan.has_initial_state,
        num_accepted=plan.num_accepted,
        checkpoints=checkpoints,
        table_stride=indices.stride(0),
        column_stride=indices.stride(1) if plan.per_draft else 0,
        has_stride=plan.has_initial_state.stride(0),
        accepted_stride=0 if plan.num_accepted is None else plan.num_accepted.stride(0),
        checkpoint_stride=0 if checkpoints is None else checkpoints.stride(0),
        checkpoint_column_stride=0 if checkpoints is None else checkpoints.stride(1),
        num_seqs=plan.batch.num_seqs,
        num_tokens=num_tokens,
        PER_DRAFT=plan.per_draft,
        BLOCK_SIZE=plan.block_size or 0,
    )


@triton.jit
@no_type_check
def _find_sequence(
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
):
    """Return a sequence's first row, its length, the position of its first token, its first slot, and its state's.

    The state's slot is -1 if there is none; both are if there is nothing to do: for padding, as what is after the last
    sequence, and for one without new tokens, whose entries may be anything: no index is followed.
    """
    sequence = sequence.to(tl.int64)
    is_sequence = sequence < num_seqs
    first_row = tl.load(cu_seqlens_q + sequence)
    length = tl.load(cu_seqlens_q + sequence + 1, is_sequence, num_tokens) - first_row
    position = tl.maximum(tl.load(seq_lens + sequence, is_sequence, 0) - length, 0)
    row = state_indices + sequence * table_stride
    slot = tl.load(row, is_sequence, -1)  # without waiting for the length
    slot = tl.where(length > 0, slot, -1)
    start = slot
    if num_accepted is not None:
        accepted = tl.load(num_accepted + sequence * accepted_stride, slot >= 0, 1)
        start = tl.load(row + (accepted - 1).to(tl.int64) * column_stride, slot >= 0, -1)
    has_state = tl.load(has_initial_state + sequence * has_stride, is_sequence, 0) != 0
    slot = tl.where(has_state & (start < 0), -1, slot)
    return first_row.to(tl.int64), length, position, slot.to(tl.int64), tl.where(has_state, start, -1).to(tl.int64)


@triton.jit(do_not_specialize=CHANGING)
@no_type_check
def _tokens_kernel(
    query,
    key,
    value,
    log_decay,
    beta,
    states,
    out,
    query_strides,
    key_strides,
    value_strides,
    log_decay_strides,
    beta_strides,
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
    DELTA: tl.constexpr,
    PER_CHANNEL: tl.constexpr,
    PER_DRAFT: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Fold the tokens of a sequence into part of one head's state, one by one."""
    PARTS: tl.constexpr = (DV + BLOCK_V - 1) // BLOCK_V
    part = tl.program_id(0) % PARTS
    head = tl.program_id(0) // PARTS % NUM_HEADS
    key_head, head = (head // GROUP).to(tl.int64), head.to(tl.int64)
    sequence = tl.program_id(0) // (PARTS * NUM_HEADS)
    first_row, length, position, slot, start = _find_sequence(
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
    at_v = (part * BLOCK_V + tl.arange(0, BLOCK_V)).to(tl.int64)
    at_k = tl.arange(0, PAD_K).to(tl.int64)
    in_v, in_k = at_v < DV, at_k < DK
    of_out = out + head * out_strides[1] + at_v * out_strides[2]
    of_states = (
        states + head * states_strides[1] + at_v[:, None] * states_strides[2] + at_k[None, :] * states_strides[3]
    )
    in_state = in_v[:, None] & in_k[None, :]
    state = tl.load(of_states + start * states_strides[0], in_state & (start >= 0), 0.0).to(tl.float32)
    first_zero = tl.where(slot < 0, 0, length)
    last_zero = tl.where(sequence + 1 >= num_seqs, num_tokens - first_row, length)
    for token in range(first_zero, last_zero):  # of padding; those after the last sequence are the last one's to write
        tl.store(of_out + (first_row + token) * out_strides[0], tl.zeros([BLOCK_V], out.dtype.element_ty), in_v)
    for token in range(0, tl.where(slot < 0, 0, length)):
        row = first_row + token
        at = row * key_strides[0] + key_head * key_strides[1]
        k = tl.load(key + at + at_k * key_strides[2], in_k, 0.0).to(tl.float32)
        at = row * query_strides[0] + key_head * query_strides[1]
        q = tl.load(query + at + at_k * query_strides[2], in_k, 0.0).to(tl.float32) * scale
        at = row * value_strides[0] + head * value_strides[1]
        v = tl.load(value + at + at_v * value_strides[2], in_v, 0.0).to(tl.float32)
        of_decay = log_decay + row * log_decay_strides[0] + head * log_decay_strides[1]
        if PER_CHANNEL:
            state *= tl.exp(tl.load(of_decay + at_k * log_decay_strides[2], in_k, 0.0).to(tl.float32))[None, :]
        else:
            state *= tl.exp(tl.load(of_decay).to(tl.float32))
        if DELTA:
            v -= tl.sum(state * k[None, :], 1)
        v *= tl.load(beta + row * beta_strides[0] + head * beta_strides[1]).to(tl.float32)
        state += v[:, None] * k[None, :]
        answer = tl.sum(state * q[None, :], 1)
        tl.store(of_out + row * out_strides[0], answer.to(out.dtype.element_ty), in_v)
        kept = state.to(states.dtype.element_ty)
        if PER_DRAFT:
            at = sequence.to(tl.int64) * table_stride + tl.cast(token, tl.int64) * column_stride
            own = tl.load(state_indices + at).to(tl.int64)
            tl.store(of_states + own * states_strides[0], kept, in_state & (own >= 0))
        if BLOCK_SIZE:  # noqa: SIM102 (without blocks the compiler leaves all of it out)
            if (position + token + 1) % BLOCK_SIZE == 0:
                column = ((position + token + 1) // BLOCK_SIZE - 1).to(tl.int64)
                at = sequence.to(tl.int64) * checkpoint_stride + column * checkpoint_column_stride
                own = tl.load(checkpoints + at).to(tl.int64)
                tl.store(of_states + own * states_strides[0], kept, in_state & (own >= 0))
    if not PER_DRAFT:
        kept = state.to(states.dtype.element_ty)  # not read before the next step, so it leaves the cache first
        tl.store(of_states + slot * states_strides[0], kept, in_state & (slot >= 0), cache_modifier=".cs")


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
    """Return what is the weight of tokens i and j, if i is in the second half of a block of two, and j in the first."""
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
    queries_since,  # [t, hv, dk], likewise: times the decays of the channels since the chunk's start; None without such
    keys_until,  # [t, hv, dk], likewise: times those up to its end
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
    first_row, length, position, slot, _ = _find_sequence(
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
    products = tl.where(at[:, None] >= at[None, :], products, 0.0)  # which 0 times NaN would not be
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
    first_row, length, position, slot, start = _find_sequence(
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


def convolve(
    inputs: Float[Tensor, "t c"],
    weight: Float[Tensor, "c width"],
    states: Float[Tensor, "n w c"],
    plan: StatePlan,
    bias: Float[Tensor, "c"] | None,
    silu: bool,
    out: Float[Tensor, "t c"] | None,
) -> Float[Tensor, "t c"]:
    """Convolve each channel with its last inputs, then write the last of them; see `fastattn.dispatch`.

    The second launch writes what the first one reads, so that tiles of tokens need not wait for one another.
    """
    (num_tokens, channels), width = inputs.shape, weight.shape[1]
    out = torch.empty_like(inputs, memory_format=torch.contiguous_format) if out is None else out
    if not num_tokens:
        return out
    num_seqs, blocks = plan.batch.num_seqs, triton.cdiv(channels, BLOCK_C)
    shared = dict(
        inputs=inputs,
        states=states,
        inputs_strides=inputs.stride(),
        states_strides=states.stride(),
        **_tables(plan, num_tokens),
        CHANNELS=channels,
        WIDTH=width,
        BLOCK_C=BLOCK_C,
    )
    tiles = triton.cdiv(max(plan.batch.max_query_len, 1), BLOCK_T)
    _convolve_kernel[(num_seqs + 1, blocks, tiles)](
        **shared,
        weight=weight,
        bias=bias,
        out=out,
        weight_strides=weight.stride(),
        bias_stride=0 if bias is None else bias.stride(0),
        out_strides=out.stride(),
        SILU=silu,
        BLOCK_T=BLOCK_T,
    )
    if width > 1 and num_seqs:
        _keep_inputs_kernel[(num_seqs, blocks)](**shared)
    return out


@triton.jit(do_not_specialize=CHANGING)
@no_type_check
def _convolve_kernel(
    inputs,
    states,
    weight,
    bias,
    out,
    inputs_strides,
    states_strides,
    weight_strides,
    bias_stride,
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
    CHANNELS: tl.constexpr,
    WIDTH: tl.constexpr,
    SILU: tl.constexpr,
    PER_DRAFT: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Compute some tokens and channels of a sequence."""
    sequence = tl.program_id(0)
    first_row, length, _, slot, start = _find_sequence(
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
    channel = (tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)).to(tl.int64)
    in_channels = (channel < CHANNELS)[None, :]
    for first in range(tl.program_id(2) * BLOCK_T, length, tl.num_programs(2) * BLOCK_T):
        token = first + tl.arange(0, BLOCK_T)
        total = tl.zeros([BLOCK_T, BLOCK_C], tl.float32)
        if slot >= 0:
            if bias is not None:
                total += tl.load(bias + channel * bias_stride, channel < CHANNELS, 0.0).to(tl.float32)[None, :]
            for w in tl.static_range(WIDTH):
                source = token + (w - WIDTH + 1)
                of_inputs = inputs + (first_row + source)[:, None] * inputs_strides[0]
                is_new = ((source >= 0) & (source < length))[:, None] & in_channels
                x = tl.load(of_inputs + channel[None, :] * inputs_strides[1], is_new, 0.0).to(tl.float32)
                at = start * states_strides[0] + (source + WIDTH - 1).to(tl.int64)[:, None] * states_strides[1]
                is_old = ((source < 0) & (start >= 0))[:, None] & in_channels
                x += tl.load(states + at + channel[None, :] * states_strides[2], is_old, 0.0).to(tl.float32)
                of_weight = weight + channel * weight_strides[0] + tl.cast(w, tl.int64) * weight_strides[1]
                total += x * tl.load(of_weight, channel < CHANNELS, 0.0).to(tl.float32)[None, :]
            if SILU:
                total = total / (1.0 + tl.exp(-total))
        of_out = out + (first_row + token)[:, None] * out_strides[0] + channel[None, :] * out_strides[1]
        tl.store(of_out, total.to(out.dtype.element_ty), (token < length)[:, None] & in_channels)


@triton.jit(do_not_specialize=CHANGING)
@no_type_check
def _keep_inputs_kernel(
    inputs,
    states,
    inputs_strides,
    states_strides,
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
    CHANNELS: tl.constexpr,
    WIDTH: tl.constexpr,
    PER_DRAFT: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Write the last inputs of some channels of a sequence; the slot that they are read from is the last one."""
    sequence = tl.program_id(0)
    first_row, length, position, slot, start = _find_sequence(
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
    if slot < 0:
        return
    channel = (tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)).to(tl.int64)
    in_channels = channel < CHANNELS
    of_inputs = inputs + channel * inputs_strides[1]
    of_states = states + channel * states_strides[2]
    if BLOCK_SIZE:
        for end in range(BLOCK_SIZE - position % BLOCK_SIZE, length + 1, BLOCK_SIZE):
            column = ((position + end) // BLOCK_SIZE - 1).to(tl.int64)
            of_slot = checkpoints + sequence.to(tl.int64) * checkpoint_stride + column * checkpoint_column_stride
            own = tl.load(of_slot).to(tl.int64)
            _keep(
                of_inputs, of_states, inputs_strides[0], states_strides, first_row, end, start, own, in_channels, WIDTH
            )
    if PER_DRAFT:
        row = state_indices + sequence.to(tl.int64) * table_stride
        last = 0
        for token in range(0, length):
            own = tl.load(row + tl.cast(token, tl.int64) * column_stride).to(tl.int64)
            if own == start:
                last = token + 1
            else:
                _keep(
                    of_inputs,
                    of_states,
                    inputs_strides[0],
                    states_strides,
                    first_row,
                    token + 1,
                    start,
                    own,
                    in_channels,
                    WIDTH,
                )
        if (last > 0) & (start >= 0):
            _keep(
                of_inputs,
                of_states,
                inputs_strides[0],
                states_strides,
                first_row,
                last,
                start,
                start,
                in_channels,
                WIDTH,
            )
    else:
        _keep(
            of_inputs, of_states, inputs_strides[0], states_strides, first_row, length, start, slot, in_channels, WIDTH
        )


@triton.jit
@no_type_check
def _keep(
    of_inputs, of_states, row_stride, states_strides, first_row, end, start, slot, in_channels, WIDTH: tl.constexpr
):
    """Write the inputs before some token to a slot, oldest first: each is read before its own memory is written."""
    for w in tl.static_range(WIDTH - 1):
        source = end + (w - WIDTH + 1)
        x = tl.load(of_inputs + (first_row + source) * row_stride, in_channels & (source >= 0), 0.0)
        old = of_states + start * states_strides[0] + tl.cast(source + WIDTH - 1, tl.int64) * states_strides[1]
        before = tl.load(old, in_channels & (source < 0) & (start >= 0), 0.0).to(tl.float32)
        x = tl.where(source >= 0, x.to(tl.float32), before).to(of_states.dtype.element_ty)
        own = of_states + slot * states_strides[0] + tl.cast(w, tl.int64) * states_strides[1]
        tl.store(own, x, in_channels & (slot >= 0))
