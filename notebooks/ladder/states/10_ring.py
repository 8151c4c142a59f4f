"""10 · Inputs are replayed: a state is read, and seldom written.

Of one token a state changes little: a decay, and a row under a key. So a slot has a checkpoint and a ring of the inputs
since. What a vector reads of the state is what it reads of the checkpoint, faded, and of each input what was written
times the product of both keys. When the ring is full, the checkpoint moves.

Gain: the state is written once in sixteen steps, which is nearly half of the bytes. But all sixteen programs of a head
make the same products with the ring, and so much arithmetic no longer hides behind the loads.

Source: "ReplaySSM" in SGLang, vLLM and TensorRT-LLM, 2026; refattn/replay.py; exercise 32.
"""

import torch
import triton
import triton.language as tl
from jaxtyping import Bool, Float, Int32
from torch import Tensor

from twinattn.course.ladder import check_states

VALUES = 8  # rows of a state in a program


@triton.jit
def decode(
    query, key,  # [b, h, dk]
    value,  # [b, hv, dv]
    log_decay, beta,  # [b, hv]
    checkpoints,  # [n, hv, dv, dk]
    ring_key, ring_written, ring_log_decay,  # [n, l, h, dk], [n, l, hv, dv], [n, l, hv]
    cursors,  # [n]
    state_indices, has_initial_state,  # [b]
    out,  # [b, hv, dv]
    scale,
    HEADS: tl.constexpr, GROUP: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, VALUES: tl.constexpr,
    ROOM: tl.constexpr, PAD: tl.constexpr,
):  # fmt: skip
    sequence, head, key_head = tl.program_id(0), tl.program_id(1), tl.program_id(1) // GROUP
    slot = tl.load(state_indices + sequence).to(tl.int64)
    has_state = tl.load(has_initial_state + sequence) != 0
    held = tl.load(cursors + slot, mask=has_state, other=0)
    at_v, at_k = tl.program_id(2) * VALUES + tl.arange(0, VALUES), tl.arange(0, DK)
    at, is_held = tl.arange(0, PAD), tl.arange(0, PAD) < held
    of_state = checkpoints + (slot * HEADS + head) * DV * DK + at_v[:, None] * DK + at_k[None, :]
    state = tl.load(of_state, mask=has_state, other=0.0).to(tl.float32)
    of_keys = ring_key + (slot * ROOM * (HEADS // GROUP) + key_head) * DK + at_k  # input i is i * KEY further on
    of_rows = ring_written + (slot * ROOM * HEADS + head) * DV + at_v
    of_logs = ring_log_decay + slot * ROOM * HEADS + head
    KEY: tl.constexpr = HEADS // GROUP * DK
    keys = tl.load(of_keys[None, :] + at[:, None] * KEY, mask=is_held[:, None], other=0.0).to(tl.float32)
    rows = tl.load(of_rows[:, None] + at[None, :] * (HEADS * DV), mask=is_held[None, :], other=0.0).to(tl.float32)
    logs = tl.load(of_logs + at * HEADS, mask=is_held, other=0.0).to(tl.float32)
    new = tl.load(log_decay + sequence * HEADS + head)
    k = tl.load(key + sequence * KEY + key_head * DK + at_k).to(tl.float32)
    q = tl.load(query + sequence * KEY + key_head * DK + at_k).to(tl.float32) * scale
    v = tl.load(value + (sequence * HEADS + head) * DV + at_v).to(tl.float32)

    # What is left of the checkpoint, and of each input, once this token has let the state fade.
    total = tl.sum(logs, 0) + new
    faded, left = tl.exp(total), tl.exp(total - tl.cumsum(logs, 0))
    of_key, of_query = tl.sum(keys * k[None, :], 1) * left, tl.sum(keys * q[None, :], 1) * left
    seen = tl.sum(state * k[None, :], 1) * faded + tl.sum(rows * of_key[None, :], 1)
    written = tl.load(beta + sequence * HEADS + head) * (v - seen)
    read = tl.sum(state * q[None, :], 1) * faded + tl.sum(rows * of_query[None, :], 1)
    tl.store(out + (sequence * HEADS + head) * DV + at_v, read + written * tl.sum(k * q, 0))
    if has_state & (held + 1 < ROOM):  # push the token: the row by its program, the rest by one of the head or group
        is_first = tl.program_id(2) == 0
        tl.store(of_rows + held * (HEADS * DV), written)
        tl.store(of_logs + held * HEADS, new, mask=is_first)
        tl.store(of_keys + held * KEY, k, mask=is_first & (head % GROUP == 0))
    else:  # the checkpoint moves: input by input, as the steps had it
        for i in range(0, held):
            state *= tl.exp(tl.load(of_logs + i * HEADS).to(tl.float32))
            row = tl.load(of_rows + i * (HEADS * DV)).to(tl.float32)
            state += row[:, None] * tl.load(of_keys + i * KEY).to(tl.float32)[None, :]
        tl.store(of_state, state * tl.exp(new) + written[:, None] * k[None, :])


def attention(
    query: Float[Tensor, "b h dk"],
    key: Float[Tensor, "b h dk"],
    value: Float[Tensor, "b hv dv"],
    log_decay: Float[Tensor, "b hv"],
    beta: Float[Tensor, "b hv"],
    checkpoints: Float[Tensor, "n hv dv dk"],
    ring_key: Float[Tensor, "n l h dk"],
    ring_written: Float[Tensor, "n l hv dv"],
    ring_log_decay: Float[Tensor, "n l hv"],
    cursors: Int32[Tensor, "n"],
    state_indices: Int32[Tensor, "b"],
    has_initial_state: Bool[Tensor, "b"],
    scale: float | None = None,
) -> Float[Tensor, "b hv dv"]:
    """Read the state of each sequence after its newest token, and keep the token in a ring or in the checkpoint."""
    tensors, tables = (query, key, value, log_decay, beta, checkpoints), (state_indices, has_initial_state)
    ring = dict(ring_key=ring_key, ring_written=ring_written, ring_log_decay=ring_log_decay, cursors=cursors)
    _, b, heads, group, key_size, value_size = check_states(*tensors, None, *tables, **ring)
    room, out = ring_key.shape[1], torch.empty_like(value)
    decode[b, heads, value_size // VALUES](
        *(*tensors, *ring.values(), *tables, out, key_size**-0.5 if scale is None else scale),
        **dict(HEADS=heads, GROUP=group, DK=key_size, DV=value_size, VALUES=VALUES),
        **dict(ROOM=room, PAD=triton.next_power_of_2(room), num_warps=1),
    )
    return out
