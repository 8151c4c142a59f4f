"""6 · Only the blocks on the diagonal are multiplied.

Up to 16 rows, nothing outside the blocks on the diagonal takes part. `fastattn` takes these out of the matrix, 16 x 16
each, multiplies them as such, by `tl.dot` with three dimensions, and puts them back; from here on, the inverse is its.

Gain: six of ten products have a quarter of the work: two blocks of 16 x 16 x 16 in place of 32 x 32 x 32. Of a chunk of
64 they have a sixteenth. In exchange the matrix is rearranged twice, through shared memory.

Source: fastattn/kernels/triton/triangular.py, `invert_triangular`.
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
        inverse = invert_triangular(-system, PRECISION, CHUNK).to(k.dtype)
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
