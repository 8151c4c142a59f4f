"""Layers that keep a state: tokens one by one for decodes and drafts, by chunks for prompts.

    decode, drafts    one program per sequence, head and part of the values; its state stays in registers from the first
                      token to the last: it is read once, and written once per slot that keeps it; the last sequence's
                      programs also write zeros to the rows after it
    prompts           first what the tokens of a chunk are to one another, for all chunks at once (the triangular system
                      of each); then one program per sequence, head and part of the values goes from chunk to chunk
                      with its state

A program reads the lengths and the slots itself, so nothing depends on the host, and a captured graph replays with
other lengths, slots and padding. Of prompts, one program more than there are sequences writes the zeros.

Source: Yang et al. 2024, "Parallelizing Linear Transformers with the Delta Rule over Sequence Length".
"""

from math import gcd
from typing import no_type_check

import torch
import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor

from fastattn.kernels import device as devices
from fastattn.kernels.triton.chunks import _chunks_kernel, _within_kernel
from fastattn.kernels.triton.launch import INTERPRETED
from fastattn.kernels.triton.states import CHANGING, find_sequence, tables_of
from refattn.options import RecurrentOptions
from refattn.states import StatePlan

CHUNK = 64  # tokens whose system of equations is solved at once
FEWEST_IN_CHUNK = 16  # rows of a product of matrices, at least
ALIGNED = 16  # elements, multiples of which the compiler knows as such
FEW = 16  # tokens, up to which sequences go token by token
BLOCK_V = 8  # values of a state in one program that goes token by token, of this many warps
TOKENS_WARPS = 1
FEW_PROGRAMS = 8  # per SM; if there are no more, each takes half as many values
CHUNKS_BLOCK_V = 32  # and in one that goes chunk by chunk; twice as many where not all programs run at once
CHUNKS_WARPS = 4
COLUMNS = 64  # keys or values that a program by chunks holds at a time
WITHIN_WARPS = 4
WITHIN_REGISTERS = 168  # per thread on an NVIDIA GPU: three such programs on an SM, and few spills
MOST_STAGES = 3  # chunks in shared memory at once


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
        **tables_of(plan, num_tokens),
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
    num_places = num_tokens // chunk + 2 * plan.batch.num_seqs  # most chunks: a sequence may begin inside one
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
    is_few = may_be_fewer and programs <= FEW_PROGRAMS * devices.num_sms(query.device)
    return BLOCK_V // 2 if is_few else BLOCK_V


def _values_at_once(num_states: int, query: Tensor, value: Tensor) -> int:
    """Return how many are in one that goes chunk by chunk.

    Keys are read by every program of their state, so fewer are better, unless an SM is left without one.
    """
    programs = num_states * triton.cdiv(value.shape[-1], CHUNKS_BLOCK_V)
    all_at_once = INTERPRETED or programs <= devices.num_sms(query.device)
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


# Triton's interpreter finds a function only if it stands above the one that calls it.


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
    for token in range(first_zero, last_zero):  # padding rows; the last sequence writes those past the end
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
