"""States that are rebuilt from a checkpoint and a ring, token by token, as decodes and drafts of `recurrent` are.

One program per sequence, head and part of the values. It reads its part of the checkpoint once, and the inputs of the
ring. It writes the ring, or, where the checkpoint moves, that alone:

    a decode            two launches. What a query reads of a state is what it reads of the faded checkpoint, and of
                        each input what it wrote, times the product of the query and its key. The first launch makes
                        these products, which are the same for all values of a head; the second reads. So an element of
                        the checkpoint meets two products, however many inputs there are
    more tokens         one launch, which folds the inputs into the checkpoint, in registers, and then the tokens
    drafts              before either one that moves checkpoints without room for the drafts, as those go to the first
                        places of the ring, which all programs of the sequence have to have read; others do nothing
    flush               that launch alone

A checkpoint that moves is folded input by input, by the operations of the step, whichever launch does it.

Of what all programs of a head push, the first one pushes the decay, and the first one of the first head of a group the
key. Cursors are read where they are, so a captured graph replays with those of the next step.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, no_type_check

import torch
import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor

from fastattn.kernels.replay import key_of_launch, launch_once
from fastattn.kernels.triton.launch import Launch, can_overlap
from fastattn.kernels.triton.recurrent import TOKENS_WARPS, _gates_of, _pad, _tokens_of, _values_by_token
from fastattn.kernels.triton.states import (
    CHANGING,
    Sequence,
    States,
    find_part,
    find_sequence,
    fold_token,
    load_decay,
    load_gate,
    load_row,
    states_of,
    store_zeros,
    tables_of,
)
from refattn.options import RecurrentOptions
from refattn.rings import ReplayPlan, Ring


class Rings(NamedTuple):
    """The inputs of each slot since its checkpoint, and the sizes of a layer.

    Attributes:
        key: [n, l, h, dk].
        written: [n, l, hv, dv].
        log_decay: [n, l, hv], or [n, l, hv, dk].
        key_strides: of slots, inputs, heads and elements.
        written_strides: the same.
        log_decay_strides: the same, without the elements where a head has one decay.
        PER_CHANNEL: whether each key channel has a decay of its own.
        GROUP: value heads that share a key, hv // h.
        DK: elements of a key.
        DV: elements of a value.
        PAD_K: elements of a key in a tile.
        PAD_L: inputs of a ring in a tile.
    """

    key: Any
    written: Any
    log_decay: Any
    key_strides: Any
    written_strides: Any
    log_decay_strides: Any
    PER_CHANNEL: Any
    GROUP: Any
    DK: Any
    DV: Any
    PAD_K: Any
    PAD_L: Any


class Cursors(NamedTuple):
    """How many inputs the ring of each slot holds, which checkpoints move, and where to.

    Attributes:
        cursors: [n].
        flush: [b], or None.
        targets: [b], or None.
        cursor_stride: of slots.
        flush_stride: of sequences, 0 without `flush`.
        target_stride: the stride of `targets`.
        SIZE: inputs that a ring has room for.
        DRAFTS: whether the new tokens may be rejected.
    """

    cursors: Any
    flush: Any
    targets: Any
    cursor_stride: Any
    flush_stride: Any
    target_stride: Any
    SIZE: Any
    DRAFTS: Any


# query, key, value, log_decay, beta, states, the fields of the ring, out
Tensors = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]


def replay(
    query: Float[Tensor, "t h dk"],
    key: Float[Tensor, "t h dk"],
    value: Float[Tensor, "t hv dv"],
    log_decay: Float[Tensor, "t hv"] | Float[Tensor, "t hv dk"],
    beta: Float[Tensor, "t hv"],
    states: Float[Tensor, "n hv dv dk"],
    ring: Ring,
    plan: ReplayPlan,
    options: RecurrentOptions,
    out: Float[Tensor, "t hv dv"] | None,
) -> Float[Tensor, "t hv dv"]:
    """Rebuild states and fold new tokens in; see `fastattn.dispatch`."""
    out = torch.empty_like(value, memory_format=torch.contiguous_format) if out is None else out
    if not len(query):
        return out
    scale = query.shape[-1] ** -0.5 if options.scale is None else float(options.scale)
    tensors = query, key, value, log_decay, beta, states, *ring, out
    cache_key = key_of_launch(("replay", scale, options.delta), tensors)
    launch_once(plan, cache_key, tensors, partial(_launch_step, tensors, plan, scale, options.delta))
    return out


def flush(states: Float[Tensor, "n hv dv dk"], ring: Ring, plan: ReplayPlan) -> None:
    """Fold rings into checkpoints; see `fastattn.dispatch`."""
    if not plan.batch.num_seqs:
        return
    tensors = states, *ring
    cache_key, launch = key_of_launch(("flush",), tensors), partial(_launch_flush, tensors, plan, plan.batch.num_seqs)
    launch_once(plan, cache_key, tensors, partial(launch, _cursors_of(plan)))


def _launch_step(tensors: Tensors, plan: ReplayPlan, scale: float, delta: bool) -> Callable[..., None]:
    """Launch a step; with drafts, checkpoints move before."""
    states, fields, num_tokens = tensors[5], tensors[6:9], tensors[2].shape[0]
    cursors = _cursors_of(plan)
    before = _launch_flush((states, *fields), plan, num_tokens, cursors) if plan.drafts else None
    # With room for one input there is nothing beside the checkpoint: the step is the plain one, in its order of sums.
    is_decode = plan.batch.max_query_len == 1 and plan.ring_size > 1
    step = (_launch_decode if is_decode else _launch_tokens)(tensors, plan, cursors, scale, delta)

    def again(*tensors: Tensor) -> None:
        if before is not None:
            before(*tensors[5:9])
        step(*tensors)

    return again


def _launch_tokens(
    tensors: Tensors, plan: ReplayPlan, cursors: Cursors, scale: float, delta: bool
) -> Callable[..., None]:
    """Rebuild states, and go token by token."""
    query, key, value, log_decay, beta, states, *fields, out = tensors
    named, arguments = _arguments_of(tensors, plan, cursors, delta)
    block_v, grid = _tiles_of(plan, query, value)
    strides = dict(states=States(states, states.stride()), out_strides=out.stride())
    step = Launch(
        _step_kernel,
        grid,
        named | {"states.pool": states, "out": out},
        arguments | strides | dict(scale=scale, BLOCK_V=block_v),
        dict(num_warps=TOKENS_WARPS),
    )

    def again(*tensors: Tensor) -> None:
        *tokens, states, key, written, log_decay, out = tensors
        step.replay(*tokens, key, written, log_decay, states, out)

    return again


def _launch_decode(
    tensors: Tensors, plan: ReplayPlan, cursors: Cursors, scale: float, delta: bool
) -> Callable[..., None]:
    """Launch what the programs of a head share, and the decode itself, which begins while that runs."""
    query, key, value, log_decay, beta, states, *fields, out = tensors
    named, arguments = _arguments_of(tensors, plan, cursors, delta)
    (_, num_heads, size), overlap = value.shape, can_overlap(query.device)
    block_v, grid = _tiles_of(plan, query, value)
    rings = arguments["rings"]
    width = 2 * (rings.PAD_K.value + rings.PAD_L.value) + 4
    heads = max(1, plan.batch.num_seqs) * num_heads

    def allocate(query: Tensor) -> Tensor:
        return torch.empty(heads * width, dtype=torch.float32, device=query.device)

    shared = allocate(query)
    share = Launch(
        _share_kernel,
        (heads,),
        named | {"shared": shared},
        arguments | dict(scale=scale, BLOCK_V=_pad(size), OVERLAP=overlap),
        dict(num_warps=1),
    )
    inner = tuple(map(tl.constexpr, states.stride()[2:]))  # constants: a tile has many rows, each with an address
    strides = dict(states=States(states, (*states.stride()[:2], *inner)), out_strides=out.stride())
    decode = Launch(
        _decode_kernel,
        grid,
        named | {"states.pool": states, "out": out, "shared": shared},
        arguments | strides | dict(BLOCK_V=block_v, OVERLAP=overlap),
        dict(num_warps=TOKENS_WARPS) | ({"launch_pdl": True} if overlap else {}),
    )

    def again(*tensors: Tensor) -> None:
        *tokens, states, key, written, log_decay, out = tensors
        named, shared = (*tokens, key, written, log_decay), allocate(tensors[0])
        share.replay(*named, shared)
        decode.replay(*named, states, out, shared)

    return again


def _arguments_of(
    tensors: Tensors, plan: ReplayPlan, cursors: Cursors, delta: bool
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the arguments of each launch of a step: the tensors that change, by name, and all others."""
    query, key, value, log_decay, beta, states, *fields, _ = tensors
    ring = Ring(*fields)
    named = {"tokens.query": query, "tokens.key": key, "tokens.value": value}
    named |= {"gates.log_decay": log_decay, "gates.beta": beta}
    named |= {f"rings.{name}": x for name, x in ring._asdict().items()}
    arguments = dict(
        tokens=_tokens_of(query, key, value),
        gates=_gates_of(log_decay, beta, delta),
        rings=_rings_of(ring, states),
        tables=tables_of(plan.slots, len(query)),
        cursors=cursors,
        NUM_HEADS=value.shape[1],
    )
    return named, arguments


def _tiles_of(plan: ReplayPlan, query: Tensor, value: Tensor) -> tuple[int, tuple[int]]:
    """Return how many values a program has, and the programs of a step."""
    _, num_heads, size = value.shape
    block_v = min(_values_by_token(plan.batch.num_seqs * num_heads, query, value), _pad(size))
    return block_v, (max(1, plan.batch.num_seqs) * num_heads * triton.cdiv(size, block_v),)


def _launch_flush(
    tensors: tuple[Tensor, ...], plan: ReplayPlan, num_tokens: int, cursors: Cursors
) -> Callable[..., None]:
    """Move checkpoints to the last input of their rings: all, or before drafts those that need room."""
    states, ring, slots = tensors[0], Ring(*tensors[1:]), plan.slots
    _, num_heads, size, _ = states.shape
    block_v = min(_values_by_token(slots.batch.num_seqs * num_heads, states, states.mT), _pad(size))
    return Launch(
        _flush_kernel,
        (max(1, slots.batch.num_seqs) * num_heads * triton.cdiv(size, block_v),),
        {"states.pool": states} | {f"rings.{name}": x for name, x in ring._asdict().items()},
        dict(
            states=States(states, states.stride()),
            rings=_rings_of(ring, states),
            tables=tables_of(slots, num_tokens),
            cursors=cursors,
            NUM_HEADS=num_heads,
            BLOCK_V=block_v,
        ),
        dict(num_warps=TOKENS_WARPS),
    ).replay


def _rings_of(ring: Ring, states: Tensor) -> Rings:
    """Return rings as a kernel takes them."""
    _, num_heads, value_size, key_size = states.shape
    return Rings(
        key=ring.key,
        written=ring.written,
        log_decay=ring.log_decay,
        key_strides=ring.key.stride(),
        written_strides=ring.written.stride(),
        log_decay_strides=ring.log_decay.stride(),
        PER_CHANNEL=tl.constexpr(ring.log_decay.ndim == 4),
        GROUP=tl.constexpr(num_heads // ring.key.shape[2]),
        DK=tl.constexpr(key_size),
        DV=tl.constexpr(value_size),
        PAD_K=tl.constexpr(_pad(key_size)),
        PAD_L=tl.constexpr(triton.next_power_of_2(ring.key.shape[1])),
    )


def _cursors_of(plan: ReplayPlan) -> Cursors:
    """Return cursors, and which checkpoints move, as a kernel takes them."""
    return Cursors(
        cursors=plan.cursors,
        flush=plan.flush,
        targets=plan.target_indices,
        cursor_stride=plan.cursors.stride(0),
        flush_stride=0 if plan.flush is None else plan.flush.stride(0),
        target_stride=0 if plan.target_indices is None else plan.target_indices.stride(0),
        SIZE=tl.constexpr(plan.ring_size),
        DRAFTS=tl.constexpr(plan.drafts),
    )


# Triton's interpreter finds a function only if it stands above the one that calls it.


@triton.jit
@no_type_check
def _load_cursor(cursors, sequence):
    """Return how many inputs the ring of a sequence holds; 0 for one that begins, and for padding."""
    of_cursor = cursors.cursors + sequence.start * cursors.cursor_stride
    held = tl.load(of_cursor, (sequence.slot >= 0) & (sequence.start >= 0), 0)
    return tl.minimum(tl.maximum(held, 0), cursors.SIZE)


@triton.jit
@no_type_check
def _target_of(cursors, sequence):
    """Return the slot that the checkpoint of a sequence moves to."""
    target = sequence.slot
    if cursors.targets is not None:
        of_target = cursors.targets + sequence.number.to(tl.int64) * cursors.target_stride
        given = tl.load(of_target, sequence.slot >= 0, -1).to(tl.int64)
        target = tl.where(given >= 0, given, target)
    return target


@triton.jit
@no_type_check
def _find_ring(cursors, sequence):
    """Return a sequence where its ring is, how many inputs that holds, and whether the checkpoint moves in this step.

    Drafts without room have had theirs moved before the step: to the target, where the ring is empty.
    """
    held = _load_cursor(cursors, sequence)
    total = held + sequence.length
    if cursors.DRAFTS:
        begins, has_moved = sequence.start < 0, (sequence.start < 0) | (total > cursors.SIZE)
        held = tl.where(has_moved, 0, held)
        slot = tl.where(has_moved, _target_of(cursors, sequence), sequence.slot)
        start = tl.where(begins, -1, slot)
        sequence = Sequence(sequence.number, sequence.first_row, sequence.length, sequence.position, slot, start)
        moves = False
    else:
        moves = (sequence.start < 0) | (total >= cursors.SIZE)
        if cursors.flush is not None:
            of_flush = cursors.flush + sequence.number.to(tl.int64) * cursors.flush_stride
            moves |= tl.load(of_flush, sequence.slot >= 0, 0) != 0
    return sequence, held, moves


@triton.jit
@no_type_check
def _rebuild(state, rings, slot, held, part):
    """Return a state after the inputs in a ring, each of which goes through the operations of `fold_token`."""
    keys = rings.key + slot * rings.key_strides[0] + part.key_head * rings.key_strides[2]
    keys += part.at_k * rings.key_strides[3]
    rows = rings.written + slot * rings.written_strides[0] + part.head * rings.written_strides[2]
    rows += part.at_v * rings.written_strides[3]
    decays = rings.log_decay + slot * rings.log_decay_strides[0] + part.head * rings.log_decay_strides[2]
    for number in range(0, held):
        at = tl.cast(number, tl.int64)
        k = tl.load(keys + at * rings.key_strides[1], part.in_k, 0.0).to(tl.float32)
        v = tl.load(rows + at * rings.written_strides[1], part.in_v, 0.0).to(tl.float32)
        if rings.PER_CHANNEL:
            of_decay = decays + at * rings.log_decay_strides[1] + part.at_k * rings.log_decay_strides[3]
            state *= tl.exp(tl.load(of_decay, part.in_k, 0.0).to(tl.float32))[None, :]
        else:
            state *= tl.exp(tl.load(decays + at * rings.log_decay_strides[1]).to(tl.float32))
        state = tl.fma(v[:, None], k[None, :], state)
    return state


@triton.jit
@no_type_check
def _since(rings, gates, slot, held, row, part):
    """Return how much of each input of a ring is left after the decay of a new token, and how much of the checkpoint.

    They are powers of sums of logarithms, of those of later inputs alone: a difference of two sums would be NaN where
    both are infinite.
    """
    at = tl.arange(0, rings.PAD_L).to(tl.int64)
    decays = rings.log_decay + slot * rings.log_decay_strides[0] + part.head * rings.log_decay_strides[2]
    decays += at * rings.log_decay_strides[1]
    is_later, is_first = at + 1 < held, (at == 0) & (held > 0)
    if rings.PER_CHANNEL:
        decays = decays[:, None] + part.at_k[None, :] * rings.log_decay_strides[3]
        is_later, is_first = is_later[:, None] & part.in_k[None, :], is_first[:, None] & part.in_k[None, :]
        new = load_row(gates.log_decay, gates.log_decay_strides, row, part.head, part.at_k, part.in_k)
    else:
        new = load_gate(gates.log_decay, gates.log_decay_strides, row, part.head)
    later = tl.load(decays + rings.log_decay_strides[1], is_later, 0.0).to(tl.float32)
    first = tl.load(decays, is_first, 0.0).to(tl.float32)
    after = tl.cumsum(later, 0, reverse=True)
    left = tl.exp(after + new[None, :]) if rings.PER_CHANNEL else tl.exp(after + new)[:, None]
    return left, tl.exp(tl.sum(later + first, 0) + new)


@triton.jit
@no_type_check
def _find_shared(shared, rings, part, NUM_HEADS: tl.constexpr):
    """Return where a head has its rows for the state, those for the ring, and the product of its key and query."""
    WIDTH: tl.constexpr = 2 * (rings.PAD_K + rings.PAD_L) + 4
    of_state = shared + (part.sequence * NUM_HEADS + part.head) * WIDTH
    return of_state, of_state + 2 * rings.PAD_K, of_state + 2 * (rings.PAD_K + rings.PAD_L)


@triton.jit
@no_type_check
def _push_written(rings, slot, at, written, part):
    """Push what a token wrote: each program its part."""
    of_written = rings.written + slot * rings.written_strides[0] + at * rings.written_strides[1]
    of_written += part.head * rings.written_strides[2] + part.at_v * rings.written_strides[3]
    tl.store(of_written, written.to(rings.written.dtype.element_ty), part.in_v)


@triton.jit
@no_type_check
def _push(rings, tokens, gates, slot, at, row, part):
    """Push the key and the decay of a token: of the programs of a head one the decay, and of a group one the key."""
    if part.is_first & (part.head % rings.GROUP == 0):
        k = load_row(tokens.key, tokens.key_strides, row, part.key_head, part.at_k, part.in_k)
        of_key = rings.key + slot * rings.key_strides[0] + at * rings.key_strides[1]
        of_key += part.key_head * rings.key_strides[2] + part.at_k * rings.key_strides[3]
        tl.store(of_key, k.to(rings.key.dtype.element_ty), part.in_k)
    if part.is_first:
        of_decay = rings.log_decay + slot * rings.log_decay_strides[0] + at * rings.log_decay_strides[1]
        of_decay += part.head * rings.log_decay_strides[2]
        if rings.PER_CHANNEL:
            decay = load_row(gates.log_decay, gates.log_decay_strides, row, part.head, part.at_k, part.in_k)
            of_decay += part.at_k * rings.log_decay_strides[3]
            tl.store(of_decay, decay.to(rings.log_decay.dtype.element_ty), part.in_k)
        else:
            decay = load_gate(gates.log_decay, gates.log_decay_strides, row, part.head)
            tl.store(of_decay, decay.to(rings.log_decay.dtype.element_ty))


@triton.jit(do_not_specialize=CHANGING)
@no_type_check
def _share_kernel(
    tokens, gates, rings, shared, tables, cursors, scale,
    NUM_HEADS: tl.constexpr, BLOCK_V: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Compute what all programs of a head need of its ring, and push the key and the decay of the new token."""
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
    part = find_part(rings, NUM_HEADS, BLOCK_V)
    sequence, held, moves = _find_ring(cursors, find_sequence(tables, part.sequence))
    row, slot = sequence.first_row, sequence.slot
    if slot >= 0:
        at = tl.arange(0, rings.PAD_L).to(tl.int64)
        of_keys = rings.key + slot * rings.key_strides[0] + part.key_head * rings.key_strides[2]
        of_keys += at[:, None] * rings.key_strides[1] + part.at_k[None, :] * rings.key_strides[3]
        keys = tl.load(of_keys, (at[:, None] < held) & part.in_k[None, :], 0.0).to(tl.float32)
        left, faded = _since(rings, gates, slot, held, row, part)
        k = load_row(tokens.key, tokens.key_strides, row, part.key_head, part.at_k, part.in_k)[None, :]
        q = load_row(tokens.query, tokens.query_strides, row, part.key_head, part.at_k, part.in_k)[None, :] * scale
        keys *= left
        of_state, of_ring, of_product = _find_shared(shared, rings, part, NUM_HEADS)
        tl.store(of_state + tl.arange(0, rings.PAD_K)[None, :], k * faded)
        tl.store(of_state + rings.PAD_K + tl.arange(0, rings.PAD_K)[None, :], q * faded)
        tl.store(of_ring + at, tl.sum(keys * k, 1))
        tl.store(of_ring + rings.PAD_L + at, tl.sum(keys * q, 1))
        tl.store(of_product, tl.sum(tl.sum(k * q, 1), 0))
        if not moves:
            _push(rings, tokens, gates, slot, tl.cast(held, tl.int64), row, part)


@triton.jit(do_not_specialize=CHANGING)
@no_type_check
def _decode_kernel(
    tokens, gates, states, rings, shared, out, out_strides, tables, cursors,
    NUM_HEADS: tl.constexpr, BLOCK_V: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Read part of a checkpoint and what its ring adds, for one token, and write the ring or the checkpoint."""
    part = find_part(rings, NUM_HEADS, BLOCK_V)
    sequence = find_sequence(tables, part.sequence)
    if cursors.DRAFTS:  # else a checkpoint is where it was, and is loaded without waiting for the cursor
        sequence, held, moves = _find_ring(cursors, sequence)
    row, slot = sequence.first_row, sequence.slot
    of_out = out + part.head * out_strides[1] + part.at_v * out_strides[2]
    of_states = states_of(states, part)
    in_state = part.in_v[:, None] & part.in_k[None, :] & (slot >= 0)
    in_start = in_state & (sequence.start >= 0)
    state = tl.load(of_states + sequence.start * states.strides[0], in_start, 0.0).to(tl.float32)
    if not cursors.DRAFTS:
        sequence, held, moves = _find_ring(cursors, sequence)
    store_zeros(out, out_strides, of_out, tables, sequence, part, BLOCK_V)
    if slot >= 0:
        at = tl.arange(0, rings.PAD_L).to(tl.int64)
        of_rows = rings.written + slot * rings.written_strides[0] + part.head * rings.written_strides[2]
        of_rows += part.at_v[:, None] * rings.written_strides[3]
        in_ring = (at[None, :] < held) & part.in_v[:, None]
        rows = tl.load(of_rows + at[None, :] * rings.written_strides[1], in_ring, 0.0).to(tl.float32)
        v = load_row(tokens.value, tokens.value_strides, row, part.head, part.at_v, part.in_v)
        beta = load_gate(gates.beta, gates.beta_strides, row, part.head)
        if OVERLAP:
            tl.extra.cuda.gdc_wait()
        of_state, of_ring, of_product = _find_shared(shared, rings, part, NUM_HEADS)
        of_state += tl.arange(0, rings.PAD_K)
        if gates.DELTA:
            v -= tl.sum(state * tl.load(of_state)[None, :], 1) + tl.sum(rows * tl.load(of_ring + at)[None, :], 1)
        v *= beta
        read = tl.sum(state * tl.load(of_state + rings.PAD_K)[None, :], 1)
        read += tl.sum(rows * tl.load(of_ring + rings.PAD_L + at)[None, :], 1)
        tl.store(of_out + row * out_strides[0], (read + v * tl.load(of_product)).to(out.dtype.element_ty), part.in_v)
        if moves:
            state = _rebuild(state, rings, slot, held, part)
            k = load_row(tokens.key, tokens.key_strides, row, part.key_head, part.at_k, part.in_k)
            state = tl.fma(v[:, None], k[None, :], state * load_decay(gates, row, part))
            kept = state.to(states.pool.dtype.element_ty)  # not read before the next step, so it leaves the cache first
            target = _target_of(cursors, sequence)
            tl.store(of_states + target * states.strides[0], kept, in_state, cache_modifier=".cs")
        else:
            _push_written(rings, slot, tl.cast(held, tl.int64), v, part)


@triton.jit(do_not_specialize=CHANGING)
@no_type_check
def _step_kernel(
    tokens, gates, states, rings, out, out_strides, tables, cursors, scale,
    NUM_HEADS: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Rebuild part of one head's state, fold the tokens of a sequence in, and write the ring or the checkpoint."""
    part = find_part(rings, NUM_HEADS, BLOCK_V)
    sequence, held, moves = _find_ring(cursors, find_sequence(tables, part.sequence))
    of_out = out + part.head * out_strides[1] + part.at_v * out_strides[2]
    of_states = states_of(states, part)
    in_state = part.in_v[:, None] & part.in_k[None, :]
    in_start = in_state & (sequence.start >= 0) & (sequence.slot >= 0)
    state = tl.load(of_states + sequence.start * states.strides[0], in_start, 0.0).to(tl.float32)
    store_zeros(out, out_strides, of_out, tables, sequence, part, BLOCK_V)
    state = _rebuild(state, rings, sequence.slot, held, part)
    for token in range(0, tl.where(sequence.slot < 0, 0, sequence.length)):
        row = sequence.first_row + token
        state, written, result = fold_token(state, tokens, gates, row, part, scale)
        tl.store(of_out + row * out_strides[0], result.to(out.dtype.element_ty), part.in_v)
        if not moves and held + token < cursors.SIZE:
            at = tl.cast(held + token, tl.int64)
            _push(rings, tokens, gates, sequence.slot, at, row, part)
            _push_written(rings, sequence.slot, at, written, part)
    if not cursors.DRAFTS:
        in_slot = in_state & (sequence.slot >= 0) & moves
        kept = state.to(states.pool.dtype.element_ty)  # not read before the next step, so it leaves the cache first
        tl.store(of_states + _target_of(cursors, sequence) * states.strides[0], kept, in_slot, cache_modifier=".cs")


@triton.jit(do_not_specialize=CHANGING)
@no_type_check
def _flush_kernel(states, rings, tables, cursors, NUM_HEADS: tl.constexpr, BLOCK_V: tl.constexpr):
    """Fold a ring into part of one head's checkpoint; zeros where a sequence begins."""
    part = find_part(rings, NUM_HEADS, BLOCK_V)
    sequence = find_sequence(tables, part.sequence)
    held = _load_cursor(cursors, sequence)
    moves = sequence.slot >= 0
    if cursors.DRAFTS:
        moves &= (sequence.start < 0) | (held + sequence.length > cursors.SIZE)
    if moves:
        of_states = states_of(states, part)
        in_state = part.in_v[:, None] & part.in_k[None, :]
        in_start = in_state & (sequence.start >= 0)
        state = tl.load(of_states + sequence.start * states.strides[0], in_start, 0.0).to(tl.float32)
        state = _rebuild(state, rings, sequence.slot, held, part)
        kept = state.to(states.pool.dtype.element_ty)
        tl.store(of_states + _target_of(cursors, sequence) * states.strides[0], kept, in_state)
