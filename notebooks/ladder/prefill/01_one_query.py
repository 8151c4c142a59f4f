"""1 · One program per query and head.

A program holds one query in registers, goes through the keys of its sequence in steps of 64, and keeps three things:
the highest score, the sum of the weights and the weighted sum of the values. This is the kernel of notebook 10.

Gain: no score goes to memory. But the keys do, again for each query: a program multiplies and adds once per element
that it loads, where a GPU could do so hundreds of times. The caches serve most of the loads; the tensor cores do
nothing.

Source: Milakov and Gimelshein 2018, "Online normalizer calculation for softmax"; notebook 10.
"""

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int32
from torch import Tensor

from twinattn.course.ladder import check_rows

KEYS = 64  # keys of a step


@triton.jit
def attend(
    query,  # [t, h, d]
    key,  # [s, hk, d]
    value,
    cu_seqlens_q,  # [b+1]
    cu_seqlens_k,
    out,  # [t, h, d]
    scale,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    SIZE: tl.constexpr,
    KEYS: tl.constexpr,
):
    head, row, sequence = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    first_query, first_key = tl.load(cu_seqlens_q + sequence), tl.load(cu_seqlens_k + sequence)
    query_len = tl.load(cu_seqlens_q + sequence + 1) - first_query
    seq_len = tl.load(cu_seqlens_k + sequence + 1) - first_key
    if row >= query_len:
        return
    position = seq_len - query_len + row
    at = tl.arange(0, SIZE)
    place = ((first_query + row).to(tl.int64) * HEADS + head) * SIZE + at
    q = tl.load(query + place).to(tl.float32)

    row_max, row_sum, acc = float("-inf"), 0.0, tl.zeros([SIZE], tl.float32)
    for start in range(0, seq_len, KEYS):
        j = start + tl.arange(0, KEYS)
        is_key = (j < seq_len)[:, None]
        token = ((first_key + j).to(tl.int64) * (HEADS // GROUP) + head // GROUP)[:, None] * SIZE + at[None, :]
        k = tl.load(key + token, mask=is_key, other=0.0).to(tl.float32)
        scores = tl.sum(q[None, :] * k, 1) * scale
        scores = tl.where(j <= position, scores, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(scores, 0))
        base = tl.where(new_max == float("-inf"), 0.0, new_max)  # a row that has seen no key yet has no maximum
        rescale = tl.exp(row_max - base)
        weights = tl.exp(scores - base)
        v = tl.load(value + token, mask=is_key, other=0.0).to(tl.float32)
        row_max, row_sum = new_max, row_sum * rescale + tl.sum(weights, 0)
        acc = acc * rescale + tl.sum(weights[:, None] * v, 0)
    tl.store(out + place, acc / tl.where(row_sum == 0.0, 1.0, row_sum))


def attention(
    query: Float[Tensor, "t h d"],
    key: Float[Tensor, "s hk d"],
    value: Float[Tensor, "s hk d"],
    cu_seqlens_q: Int32[Tensor, "_"],  # [b+1]
    cu_seqlens_k: Int32[Tensor, "_"],  # [b+1]
    max_query_len: int,
    softmax_scale: float | None = None,
) -> Float[Tensor, "t h d"]:
    """Attend from the last tokens of each sequence to all its tokens up to themselves."""
    b, heads, kv_heads, size = check_rows(query, key, value, cu_seqlens_q, cu_seqlens_k)
    scale = size**-0.5 if softmax_scale is None else softmax_scale
    out = torch.empty_like(query)
    attend[heads, max_query_len, b](
        *(query, key, value, cu_seqlens_q, cu_seqlens_k, out, scale),
        **dict(HEADS=heads, GROUP=heads // kv_heads, SIZE=size, KEYS=KEYS),
        num_stages=1,
    )
    return out
