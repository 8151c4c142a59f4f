"""4 · A chunk of tokens as products.

What token i writes depends on what earlier tokens wrote: its key is compared with their keys. Inside a chunk of 32
these are 32 equations, `written + system written = beta (value - state key)`, whose matrix is 0 on and above its
diagonal. So they are solved from the first row down. All else is products of tiles: of keys with the state before the
chunk, queries with keys, weights with what was written, and keys with it for the state after. A program has 16 elements
of the values, the columns of these products, and two warps.

Gain: the chain has a step per 32 tokens, and tensor cores multiply. But the equations are solved one row after the
other, 31 dependent steps again, if short ones. A decode pays for a chunk of 32 with one token in it.

Source: Yang et al. 2024, "Parallelizing Linear Transformers with the Delta Rule over Sequence Length" (3.2: the WY
form).
"""

import torch
import triton
import triton.language as tl
from jaxtyping import Bool, Float, Int32
from torch import Tensor

from twinattn.course.ladder import check_states

CHUNK = 32  # tokens of a chunk
VALUES = 16  # elements of the values in a program


@triton.jit
def fold(
    query, key,  # [t, h, dk]
    value,  # [t, hv, dv]
    log_decay, beta,  # [t, hv]
    states,  # [n, hv, dv, dk]
    cu_seqlens_q,  # [b+1]
    state_indices, has_initial_state,  # [b]
    out,  # [t, hv, dv]
    scale,
    HEADS: tl.constexpr, GROUP: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr,
    CHUNK: tl.constexpr, VALUES: tl.constexpr,
):  # fmt: skip
    sequence, head, key_head = tl.program_id(0), tl.program_id(1), tl.program_id(1) // GROUP
    first, last = tl.load(cu_seqlens_q + sequence), tl.load(cu_seqlens_q + sequence + 1)
    if first == last:
        return
    slot = tl.load(state_indices + sequence).to(tl.int64)
    has_state = tl.load(has_initial_state + sequence) != 0
    at, at_k = tl.arange(0, CHUNK), tl.arange(0, DK)
    at_v = tl.program_id(2) * VALUES + tl.arange(0, VALUES)
    of_state = states + (slot * HEADS + head) * DV * DK + at_v[None, :] * DK + at_k[:, None]
    state = tl.load(of_state, mask=has_state, other=0.0).to(tl.float32)  # [dk, values]
    for start in range(first, last, CHUNK):
        row, is_row = start + at, start + at < last
        of_key = (row * (HEADS // GROUP) + key_head)[:, None] * DK + at_k[None, :]
        k = tl.load(key + of_key, mask=is_row[:, None], other=0.0)
        q = tl.load(query + of_key, mask=is_row[:, None], other=0.0)
        of_value = (row * HEADS + head)[:, None] * DV + at_v[None, :]
        v = tl.load(value + of_value, mask=is_row[:, None], other=0.0).to(tl.float32)
        rate = tl.load(beta + row * HEADS + head, mask=is_row, other=0.0)
        logs = tl.load(log_decay + row * HEADS + head, mask=is_row, other=0.0)
        sums = tl.cumsum(logs, 0)
        decays = tl.where(at[:, None] >= at[None, :], tl.exp(sums[:, None] - sums[None, :]), 0.0)
        weights = (tl.dot(q, tl.trans(k), input_precision="ieee") * decays).to(k.dtype)
        before, since = state.to(k.dtype), tl.exp(sums)[:, None]
        result = tl.dot(q, before, input_precision="ieee") * since
        written = rate[:, None] * (v - tl.dot(k, before, input_precision="ieee") * since)
        system = tl.dot(k, tl.trans(k), input_precision="ieee") * decays * rate[:, None]
        system = tl.where(at[:, None] > at[None, :], system, 0.0)
        for i in range(1, CHUNK):
            coupling = tl.sum(tl.where(at[:, None] == i, system, 0.0), 0)  # row i
            written -= tl.where(at[:, None] == i, tl.sum(coupling[:, None] * written, 0)[None, :], 0.0)
        result += tl.dot(weights, written.to(k.dtype), input_precision="ieee")
        tl.store(out + of_value, result * scale, mask=is_row[:, None])
        total = tl.sum(logs, 0)
        kept = (written * tl.exp(total - sums)[:, None]).to(k.dtype)
        state = state * tl.exp(total) + tl.dot(tl.trans(k), kept, input_precision="ieee")
    tl.store(of_state, state)


def attention(
    query: Float[Tensor, "t h dk"],
    key: Float[Tensor, "t h dk"],
    value: Float[Tensor, "t hv dv"],
    log_decay: Float[Tensor, "t hv"],
    beta: Float[Tensor, "t hv"],
    states: Float[Tensor, "n hv dv dk"],
    cu_seqlens_q: Int32[Tensor, "_"],  # [b+1]
    state_indices: Int32[Tensor, "b"],
    has_initial_state: Bool[Tensor, "b"],
    scale: float | None = None,
) -> Float[Tensor, "t hv dv"]:
    """Fold the new tokens of each sequence into its state, and read the state after each."""
    tensors = query, key, value, log_decay, beta, states
    t, b, heads, group, key_size, value_size = check_states(*tensors, cu_seqlens_q, state_indices, has_initial_state)
    scale = key_size**-0.5 if scale is None else scale
    out = torch.empty_like(value)
    fold[b, heads, value_size // VALUES](
        *(*tensors, cu_seqlens_q, state_indices, has_initial_state, out, scale),
        **dict(HEADS=heads, GROUP=group, DK=key_size, DV=value_size),
        **dict(CHUNK=CHUNK, VALUES=VALUES, num_warps=2, num_stages=2),
    )
    return out
