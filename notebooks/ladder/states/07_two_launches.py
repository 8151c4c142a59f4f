"""7 · All chunks at once, and one pass between them.

The inverse does not depend on the state, and what tokens write is linear in it: u - w state, where u and w are products
of the inverse. So a first launch computes them for all chunks at once, and the weights of the output. A second one goes
from chunk to chunk with the state: four products, and nothing else is left in the chain.

Gain: most of the work is out of the chain, and no longer done by each program that has some of a head's values. No
thread has both a state and an inverse in its registers. The price is u, w and the weights, which go to memory and come
back. The chain now waits for its own products, one after the other, so a prompt takes as long as it has chunks.

Source: Yang et al. 2024 (3.2), and flash-linear-attention; fastattn/kernels/triton/chunks.py.
"""

import torch
import triton
import triton.language as tl
from jaxtyping import Bool, Float, Int32
from torch import Tensor

from fastattn.kernels.triton.triangular import invert_triangular
from twinattn.course.ladder import check_states

CHUNK = 32  # tokens of a chunk
VALUES = 16  # elements of the values in a program


@triton.jit
def first_chunk(cu_seqlens_q, sequence, CHUNK: tl.constexpr):
    # Each sequence before may have a chunk that is not full.
    return tl.load(cu_seqlens_q + sequence) // CHUNK + sequence


@triton.jit
def solve(
    query, key, value, log_decay, beta, cu_seqlens_q,
    own,  # [t, hv, dv]: what tokens write where the state before their chunk is 0
    answers,  # [t, hv, dk]: whose products with that state are subtracted
    weights,  # [t, hv, CHUNK]: of what the chunk's tokens write, in the output of each
    num_seqs,
    HEADS: tl.constexpr, GROUP: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr,
    CHUNK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    chunk, head, key_head = tl.program_id(0), tl.program_id(1), tl.program_id(1) // GROUP
    sequence, high = chunk * 0, num_seqs - 1
    while sequence < high:  # by halving: the last sequence whose first chunk is not after this one
        middle = (sequence + high + 1) // 2
        if first_chunk(cu_seqlens_q, middle, CHUNK) <= chunk:
            sequence = middle
        else:
            high = middle - 1
    start = tl.load(cu_seqlens_q + sequence) + (chunk - first_chunk(cu_seqlens_q, sequence, CHUNK)) * CHUNK
    last = tl.load(cu_seqlens_q + sequence + 1)
    if start >= last:
        return
    at, at_k, at_v = tl.arange(0, CHUNK), tl.arange(0, DK), tl.arange(0, DV)
    row, is_row = start + at, start + at < last
    of_key = (row * (HEADS // GROUP) + key_head)[:, None] * DK + at_k[None, :]
    k = tl.load(key + of_key, mask=is_row[:, None], other=0.0)
    q = tl.load(query + of_key, mask=is_row[:, None], other=0.0)
    own_row = (row * HEADS + head)[:, None]
    rate = tl.load(beta + row * HEADS + head, mask=is_row, other=0.0)
    sums = tl.cumsum(tl.load(log_decay + row * HEADS + head, mask=is_row, other=0.0), 0)
    decays = tl.where(at[:, None] >= at[None, :], tl.exp(sums[:, None] - sums[None, :]), 0.0)
    products = tl.dot(q, tl.trans(k), input_precision="ieee") * decays
    tl.store(weights + own_row * CHUNK + at[None, :], products, mask=is_row[:, None])
    system = tl.dot(k, tl.trans(k), input_precision="ieee") * decays * rate[:, None]
    system = tl.where(at[:, None] > at[None, :], system, 0.0)
    inverse = invert_triangular(-system, PRECISION, CHUNK).to(k.dtype)
    v = tl.load(value + own_row * DV + at_v[None, :], mask=is_row[:, None], other=0.0)
    solved = tl.dot(inverse, (v * rate[:, None]).to(k.dtype), input_precision="ieee")
    tl.store(own + own_row * DV + at_v[None, :], solved, mask=is_row[:, None])
    solved = tl.dot(inverse, (k * (rate * tl.exp(sums))[:, None]).to(k.dtype), input_precision="ieee")
    tl.store(answers + own_row * DK + at_k[None, :], solved, mask=is_row[:, None])


@triton.jit
def fold(
    query, key, log_decay, own, answers, weights,
    states,  # [n, hv, dv, dk]
    cu_seqlens_q, state_indices, has_initial_state, out, scale,
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
        row, is_row = start + at, (start + at < last)[:, None]
        of_key = (row * (HEADS // GROUP) + key_head)[:, None] * DK + at_k[None, :]
        k = tl.load(key + of_key, mask=is_row, other=0.0)
        q = tl.load(query + of_key, mask=is_row, other=0.0)
        own_row = (row * HEADS + head)[:, None]
        u = tl.load(own + own_row * DV + at_v[None, :], mask=is_row, other=0.0)
        w = tl.load(answers + own_row * DK + at_k[None, :], mask=is_row, other=0.0)
        products = tl.load(weights + own_row * CHUNK + at[None, :], mask=is_row, other=0.0)
        logs = tl.load(log_decay + row * HEADS + head, mask=start + at < last, other=0.0)
        sums, total, before = tl.cumsum(logs, 0), tl.sum(logs, 0), state.to(k.dtype)
        written = u - tl.dot(w, before, input_precision="ieee")
        result = tl.dot(q, before, input_precision="ieee") * tl.exp(sums)[:, None]
        result += tl.dot(products, written.to(k.dtype), input_precision="ieee")
        tl.store(out + own_row * DV + at_v[None, :], result * scale, mask=is_row)
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
    precision = "ieee" if query.dtype == torch.float32 else "tf32"
    own, answers, weights = (query.new_empty(t, heads, n) for n in (value_size, key_size, CHUNK))
    sizes = dict(HEADS=heads, GROUP=group, DK=key_size, DV=value_size, CHUNK=CHUNK)
    solve[t // CHUNK + b, heads](
        *(*tensors[:5], cu_seqlens_q, own, answers, weights, b),
        **dict(**sizes, PRECISION=precision, num_warps=2),
    )
    inputs = query, key, log_decay, own, answers, weights, states
    fold[b, heads, value_size // VALUES](
        *(*inputs, cu_seqlens_q, state_indices, has_initial_state, out, scale),
        **dict(**sizes, VALUES=VALUES, num_warps=2, num_stages=2),
    )
    return out
