"""Layers that keep a state: tokens one by one for decodes and drafts, by chunks for prompts.

    decode, drafts    one program per sequence, head and part of the values; its state stays in registers from the first
                      token to the last: it is read once, and written once per slot that keeps it; the last sequence's
                      programs also write zeros to the rows after it
    prompts           first the intra-chunk terms, for all chunks at once (the triangular system of each), and once more
                      with care where they are not finite; then one program per sequence, head and part of the values
                      goes from chunk to chunk with its state: that of `fastattn.kernels.triton.chunks`, or on Hopper,
                      for the cases that it takes, that of `fastattn.kernels.triton.chunks_hopper`

A program reads the lengths and the slots itself, so nothing depends on the host, and a captured graph replays with
other lengths, slots and padding. For prompts, one more program than there are sequences writes the zeros.

Source: Yang et al. 2024, "Parallelizing Linear Transformers with the Delta Rule over Sequence Length".
"""

from collections.abc import Callable, Sequence
from functools import partial
from math import gcd
from typing import Any, no_type_check

import torch
import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor

from fastattn.kernels import device as devices
from fastattn.kernels.replay import key_of_launch, launch_once
from fastattn.kernels.triton import chunks_hopper
from fastattn.kernels.triton.chunks import REPAIRED, ChunkSizes, Solved, _chunks_kernel, _repair_kernel, _within_kernel
from fastattn.kernels.triton.chunks_hopper import Output
from fastattn.kernels.triton.launch import INTERPRETED, Launch, can_overlap
from fastattn.kernels.triton.states import (
    CHANGING,
    Gates,
    States,
    Tokens,
    checkpoint_slot,
    draft_slot,
    find_part,
    find_sequence,
    fold_token,
    states_of,
    store_zeros,
    tables_of,
)
from refattn.options import RecurrentOptions
from refattn.states import StatePlan

CHUNK = 64  # tokens of a chunk, whose triangular system is solved at once
FEWEST_IN_CHUNK = 16  # rows of a matrix product, at least
ALIGNED = 16  # elements; the compiler knows strides that are multiples of it
FEW = 16  # tokens up to which sequences go token by token
BLOCK_V = 8  # values of a state in a program of the token kernel
TOKENS_WARPS = 1
FEW_PROGRAMS = 8  # programs per SM up to which each takes half as many values
CHUNKS_BLOCK_V = 32  # values of a state in a program of the chunk kernel; twice as many if the grid exceeds one wave
CHUNKS_WARPS = 4
COLUMNS = 64  # keys or values that `_within_kernel` holds at a time
WITHIN_WARPS = 4
WITHIN_REGISTERS = 128  # per thread on an NVIDIA GPU: four such programs on an SM, and few spills
CAREFUL_REGISTERS = 168  # the same of those that care for NaN or compute in float32: three on an SM
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
    out = torch.empty_like(value, memory_format=torch.contiguous_format) if out is None else out
    if not len(query):
        return out
    scale = query.shape[-1] ** -0.5 if options.scale is None else float(options.scale)
    per_channel = log_decay.ndim == 3
    chunk = _chunk_size(plan, query, per_channel)
    by_token = plan.per_draft or chunk < FEWEST_IN_CHUNK or plan.batch.max_query_len <= FEW
    if not by_token:
        query, key, value = _aligned(query), _aligned(key), _aligned(value)
        log_decay = _aligned(log_decay) if per_channel else log_decay
    tensors = query, key, value, log_decay, beta, states, out
    launch = _launch_tokens if by_token else partial(_launch_chunks, chunk=chunk)
    cache_key = key_of_launch(("recurrent", scale, options.delta), tensors)
    launch_once(plan, cache_key, tensors, partial(launch, tensors, plan, scale, options.delta))
    return out


# query, key, value, log_decay, beta, states, out
Tensors = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]


def _launch_tokens(tensors: Tensors, plan: StatePlan, scale: float, delta: bool) -> Callable[..., None]:
    """Launch the token kernel. Programs are in the order of states in memory, so that a state is read contiguously."""
    query, key, value, log_decay, beta, states, out = tensors
    num_tokens, num_heads, size = value.shape
    block_v = min(_values_by_token(plan.batch.num_seqs * num_heads, query, value), _pad(size))
    return Launch(
        _tokens_kernel,
        (max(1, plan.batch.num_seqs) * num_heads * triton.cdiv(size, block_v),),
        {"tokens.query": query, "tokens.key": key, "tokens.value": value}
        | {"gates.log_decay": log_decay, "gates.beta": beta, "states.pool": states, "out": out},
        dict(
            tokens=_tokens_of(query, key, value),
            gates=_gates_of(log_decay, beta, delta),
            states=States(states, states.stride()),
            out_strides=out.stride(),
            tables=tables_of(plan, num_tokens),
            scale=scale,
            NUM_HEADS=num_heads,
            BLOCK_V=block_v,
        ),
        dict(num_warps=TOKENS_WARPS),
    ).replay


def _launch_chunks(tensors: Tensors, plan: StatePlan, scale: float, delta: bool, *, chunk: int) -> Callable[..., None]:
    """Launch the chunk kernels: one launch for the intra-chunk terms, one that repairs them, and one for the states."""
    query, key, value, log_decay, beta, states, out = tensors
    (num_tokens, num_heads, size), per_channel = value.shape, log_decay.ndim == 3
    solve = partial(_solved, per_channel=per_channel, delta=delta, chunk=chunk)
    solved = solve(query, value)
    made = {f"solved.{name}": x for name, x in solved._asdict().items() if not name.isupper()}
    shared = dict(
        tokens=_with_fixed_strides(_tokens_of(query, key, value)),
        tables=tables_of(plan, num_tokens),
        solved=solved,
        TILE=_chunk_sizes(query, chunk, num_heads, per_channel),
    )
    of_tokens = {"tokens.query": query, "tokens.key": key, "tokens.value": value}
    of_gates = {"gates.log_decay": log_decay, "gates.beta": beta}
    within_arguments = shared | dict(gates=_gates_of(log_decay, beta, delta))
    places = num_tokens // chunk + 2 * plan.batch.num_seqs  # most chunks: a sequence may begin inside one
    is_lean = delta and not per_channel  # the first launch takes all to be finite
    early = {"launch_pdl": True} if can_overlap(query.device) else {}
    within = Launch(
        _within_kernel,
        (places * num_heads,),
        of_tokens | of_gates | made,
        within_arguments,
        _within_options(WITHIN_REGISTERS if is_lean and query.dtype != torch.float32 else CAREFUL_REGISTERS),
    )
    repair = is_lean and Launch(
        _repair_kernel,
        (triton.cdiv(places, REPAIRED.value), num_heads),
        of_tokens | of_gates | made,
        within_arguments | dict(PAD_V=_pad(size)),
        _within_options(CAREFUL_REGISTERS) | early,
    )
    block_v = min(_values_at_once(plan.batch.num_seqs * num_heads, query, value), _pad(size))
    shared_by_states, out_strides = shared | dict(states=States(states, states.stride())), _fixed(out.stride())
    if chunks_hopper.takes(query, value, solved, chunk):
        consumers = chunks_hopper.consumers_of(plan.batch.num_seqs * num_heads, value)
        over_chunks = Launch(
            chunks_hopper._fold_kernel,
            (plan.batch.num_seqs + 1, num_heads, size // (consumers * chunks_hopper.VALUES)),
            of_tokens | {"states.pool": states, "output.rows": out} | made,
            shared_by_states
            | dict(output=Output(out, scale, *out_strides), TILE=chunks_hopper.sizes_of(num_heads, consumers)),
            dict(num_warps=4) | early,
        )
    else:
        over_chunks = Launch(
            _chunks_kernel,
            (plan.batch.num_seqs + 1, num_heads, triton.cdiv(size, block_v)),
            of_tokens | {"states.pool": states, "out": out} | made,
            shared_by_states | dict(out_strides=out_strides, scale=scale, BLOCK_V=block_v),
            dict(num_warps=CHUNKS_WARPS, num_stages=_stages(query, chunk)) | early,
        )

    def replay(
        query: Tensor, key: Tensor, value: Tensor, log_decay: Tensor, beta: Tensor, states: Tensor, out: Tensor
    ) -> None:
        made = solve(query, value)[: len(Solved._fields) - 2]
        within.replay(query, key, value, log_decay, beta, *made)
        if repair:
            repair.replay(query, key, value, log_decay, beta, *made)
        over_chunks.replay(query, key, value, states, out, *made)

    return replay


def _within_options(registers: int) -> dict[str, int]:
    """Return the options of the launches before that of the states."""
    return dict(num_warps=WITHIN_WARPS) | ({} if INTERPRETED or devices.is_rocm() else {"maxnreg": registers})


def _chunk_sizes(query: Tensor, chunk: int, num_heads: int, per_channel: bool) -> ChunkSizes:
    """Return the constants of the launches."""
    precision = "ieee" if devices.is_rocm() else "tf32x3" if query.dtype == torch.float32 else "tf32"
    levels = chunk.bit_length() - 1 if per_channel else 0
    has_ptx = not INTERPRETED and devices.capability(query.device) >= (8, 0)
    overlap = can_overlap(query.device)
    return ChunkSizes(*map(tl.constexpr, (chunk, levels, COLUMNS, precision, num_heads, has_ptx, overlap)))


def _with_fixed_strides(tokens: Tokens) -> Tokens:
    """Return tokens with strides as constants."""
    return tokens._replace(
        query_strides=_fixed(tokens.query_strides),
        key_strides=_fixed(tokens.key_strides),
        value_strides=_fixed(tokens.value_strides),
    )


def _fixed(strides: Sequence[int]) -> tuple[Any, ...]:
    """Return the strides of tokens, heads and elements; that of heads is no constant: it may depend on how many tokens.

    By constants, the addresses of a tile are one address and offsets within the instructions.
    """
    of_tokens, of_heads, of_elements = strides
    return tl.constexpr(of_tokens), of_heads, tl.constexpr(of_elements)


def _tokens_of(query: Tensor, key: Tensor, value: Tensor) -> Tokens:
    """Return tokens as a kernel takes them."""
    return Tokens(
        query=query,
        key=key,
        value=value,
        query_strides=query.stride(),
        key_strides=key.stride(),
        value_strides=value.stride(),
        GROUP=tl.constexpr(value.shape[1] // query.shape[1]),
        DK=tl.constexpr(query.shape[2]),
        DV=tl.constexpr(value.shape[2]),
        PAD_K=tl.constexpr(_pad(query.shape[2])),
    )


def _gates_of(log_decay: Tensor, beta: Tensor, delta: bool) -> Gates:
    """Return gates as a kernel takes them."""
    return Gates(
        log_decay=log_decay,
        beta=beta,
        log_decay_strides=log_decay.stride(),
        beta_strides=beta.stride(),
        PER_CHANNEL=tl.constexpr(log_decay.ndim == 3),
        DELTA=tl.constexpr(delta),
    )


def _solved(query: Tensor, value: Tensor, *, per_channel: bool, delta: bool, chunk: int) -> Solved:
    """Allocate the tensors that the first launch leaves for the second.

    bfloat16 rounds no more here than the products do anyway. float16 might overflow, so its tensors have 32 bits.
    """
    (num_tokens, num_heads, value_size), key_size = value.shape, query.shape[2]
    operand = torch.bfloat16 if query.dtype == torch.bfloat16 else torch.float32

    def empty(size: int, dtype: torch.dtype = operand) -> Tensor:
        return torch.empty(num_tokens, num_heads, size, dtype=dtype, device=value.device)

    return Solved(
        written=empty(_pitch(value_size)),
        answered=empty(_pitch(key_size)) if delta else None,
        weights=empty(chunk),
        decays=empty(key_size if per_channel else 2, torch.float32),
        queries_since=empty(_pitch(key_size)) if per_channel else None,
        keys_until=empty(_pitch(key_size)) if per_channel else None,
        ROW_K=tl.constexpr(_pitch(key_size)),
        ROW_V=tl.constexpr(_pitch(value_size)),
    )


def _aligned(rows: Tensor) -> Tensor:
    """Copy rows that cannot be read 16 bytes at a time into contiguous rows that can.

    Seen on an H100: where Triton 3.6 cannot load rows of bfloat16 ahead, 4 bytes and more at a time, the compiled code
    returns wrong results, or reads out of bounds.
    """
    *strides, last = rows.stride()
    if last == 1 and rows.data_ptr() % 16 == 0 and not any(stride % ALIGNED for stride in strides):
        return rows
    size = rows.shape[-1]
    return rows.new_empty(*rows.shape[:-1], _pitch(size))[..., :size].copy_(rows)


def _pitch(size: int) -> int:
    """Return the stride of allocated rows: a size rounded up to a multiple of `ALIGNED`."""
    return -(-size // ALIGNED) * ALIGNED


def _values_by_token(num_states: int, query: Tensor, value: Tensor) -> int:
    """Return how many values of a state a program of the token kernel has.

    It is fixed for keys of fewer than 64 elements: there, bits depend on it, and so would on the number of requests.
    """
    programs = num_states * triton.cdiv(value.shape[-1], BLOCK_V)
    may_be_fewer = not INTERPRETED and _pad(query.shape[-1]) >= 64
    is_few = may_be_fewer and programs <= FEW_PROGRAMS * devices.num_sms(query.device)
    return BLOCK_V // 2 if is_few else BLOCK_V


def _values_at_once(num_states: int, query: Tensor, value: Tensor) -> int:
    """Return how many values of a state a program of the chunk kernel has.

    Every program of a state reads its keys, so fewer programs are better, unless an SM is left without one.
    """
    programs = num_states * triton.cdiv(value.shape[-1], CHUNKS_BLOCK_V)
    all_at_once = INTERPRETED or programs <= devices.num_sms(query.device)
    return CHUNKS_BLOCK_V if all_at_once else _most_values_at_once(query)


def _most_values_at_once(query: Tensor) -> int:
    """Bound `_values_at_once`: a state of 128 keys and 64 values takes half of a thread's registers."""
    return 2 * CHUNKS_BLOCK_V if _pad(query.shape[-1]) <= 128 else CHUNKS_BLOCK_V


def _pad(size: int) -> int:
    """Return the size of a tile that holds some elements and can be multiplied."""
    return max(FEWEST_IN_CHUNK, triton.next_power_of_2(size))


def _chunk_size(plan: StatePlan, query: Tensor, per_channel: bool) -> int:
    """Return how many tokens a chunk has: blocks end with chunks, and two fit into shared memory; 0 if none do.

    On an AMD GPU one is enough. With one, Triton 3.6 compiles wrong code for Hopper.
    """
    size = CHUNK if plan.block_size is None else gcd(CHUNK, plan.block_size)
    if per_channel or query.shape[-1] * query.element_size() > 256:
        size = min(size, CHUNK // 2)
    while size >= FEWEST_IN_CHUNK and not _stages(query, size):
        size //= 2
    return size if size >= FEWEST_IN_CHUNK else 0


def _stages(query: Tensor, chunk: int) -> int:
    """Return how many chunks are in shared memory at once; 0 if they are too large.

    A chunk of 64 tokens with keys of 128 takes 64 KiB in bfloat16, with 64 values.
    """
    if INTERPRETED:
        return 1
    elements = chunk * (3 * _pad(query.shape[-1]) + _most_values_at_once(query) + chunk)
    room = devices.shared_memory(query.device) - 8192
    stages = min(MOST_STAGES, room // (elements * (2 if query.dtype == torch.bfloat16 else 4)))
    return stages if stages >= (1 if devices.is_rocm() else 2) else 0


# Triton's interpreter finds a function only if it is defined above its caller.


@triton.jit(do_not_specialize=CHANGING)
@no_type_check
def _tokens_kernel(
    tokens, gates, states, out, out_strides, tables, scale, NUM_HEADS: tl.constexpr, BLOCK_V: tl.constexpr
):
    """Fold the tokens of a sequence into part of one head's state, one by one."""
    part = find_part(tokens, NUM_HEADS, BLOCK_V)
    sequence = find_sequence(tables, part.sequence)
    of_out = out + part.head * out_strides[1] + part.at_v * out_strides[2]
    of_states = states_of(states, part)
    in_state = part.in_v[:, None] & part.in_k[None, :]
    in_start = in_state & (sequence.start >= 0)
    state = tl.load(of_states + sequence.start * states.strides[0], in_start, 0.0).to(tl.float32)
    store_zeros(out, out_strides, of_out, tables, sequence, part, BLOCK_V)
    for token in range(0, tl.where(sequence.slot < 0, 0, sequence.length)):
        row = sequence.first_row + token
        state, _, result = fold_token(state, tokens, gates, row, part, scale)
        tl.store(of_out + row * out_strides[0], result.to(out.dtype.element_ty), part.in_v)
        kept = state.to(states.pool.dtype.element_ty)
        if tables.PER_DRAFT:
            own = draft_slot(tables, sequence, token)
            tl.store(of_states + own * states.strides[0], kept, in_state & (own >= 0))
        if tables.BLOCK_SIZE:  # noqa: SIM102 (without blocks the compiler leaves all of it out)
            if (sequence.position + token + 1) % tables.BLOCK_SIZE == 0:
                own = checkpoint_slot(tables, sequence, sequence.position + token + 1)
                tl.store(of_states + own * states.strides[0], kept, in_state & (own >= 0))
    if not tables.PER_DRAFT:
        kept = state.to(states.pool.dtype.element_ty)  # not read before the next step, so it leaves the cache first
        in_slot = in_state & (sequence.slot >= 0)
        tl.store(of_states + sequence.slot * states.strides[0], kept, in_slot, cache_modifier=".cs")
