"""5 · The triangular inverse by blocks.

The matrix of the equations is inverted, by products. A block of four rows has a strictly triangular part X with a
fourth power of 0, so (1 - X)^-1 is (1 + X)(1 + X^2). Four such blocks, inverted, are in the same way a matrix of four
by four blocks: first 4 rows, then 16, then up to 64. Powers of the whole matrix would do it, too, but grow too large
where keys are alike.

Gain: ten products of 32 rows, on tensor cores in TF32, in place of 31 steps that wait for each other; and as the loop
over chunks has no other loop in it, its loads come ahead in stages. The price is registers: a program has a state,
keys, queries and several matrices of 32 x 32 at once, and its threads have hardly enough. Chunks of 64 would spill.

Source: Yang et al. 2024 (3.3: the UT transform); fastattn/kernels/triton/triangular.py, `_join_blocks`.
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
def join(inverse, coupling, PRECISION: tl.constexpr):
    """Join four blocks each: their inverses, and what couples them, X with a fourth power of 0."""
    coupled = tl.dot(inverse, coupling, input_precision=PRECISION)
    inverse += tl.dot(tl.dot(coupled, coupled, input_precision=PRECISION), inverse, input_precision=PRECISION)
    return inverse + tl.dot(coupled, inverse, input_precision=PRECISION)


@triton.jit
def invert(matrix, PRECISION: tl.constexpr, CHUNK: tl.constexpr):
    """Return (1 - matrix)^-1, for a matrix that is 0 on and above its diagonal."""
    i, j = tl.arange(0, CHUNK)[:, None], tl.arange(0, CHUNK)[None, :]
    x = tl.where(i // 4 == j // 4, matrix, 0.0)
    square = tl.dot(x, x, input_precision=PRECISION)
    inverse = tl.where(i == j, 1.0, 0.0) + x + square + tl.dot(square, x, input_precision=PRECISION)
    inverse = join(inverse, tl.where((i // 16 == j // 16) & (i // 4 != j // 4), matrix, 0.0), PRECISION)
    return join(inverse, tl.where(i // 16 != j // 16, matrix, 0.0), PRECISION)


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
    CHUNK: tl.constexpr, VALUES: tl.constexpr, PRECISION: tl.constexpr,
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
        inverse = invert(-system, PRECISION, CHUNK).to(k.dtype)
        written = tl.dot(inverse, written.to(k.dtype), input_precision="ieee")
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
    precision = "ieee" if query.dtype == torch.float32 else "tf32"
    fold[b, heads, value_size // VALUES](
        *(*tensors, cu_seqlens_q, state_indices, has_initial_state, out, scale),
        **dict(HEADS=heads, GROUP=group, DK=key_size, DV=value_size),
        **dict(CHUNK=CHUNK, VALUES=VALUES, PRECISION=precision, num_warps=2, num_stages=2),
    )
    return out
