"""1 · One program per sequence and head, one key at a time.

A program is one of many copies of `attend`; it holds its query in registers, walks through the block table, and keeps
three things: the highest score, the sum of the weights and the weighted sum of the values. No score goes to memory.

Gain: one launch instead of dozens per sequence, and nothing is copied. But each step waits for three loads, one
after the other, and fetches only one key and one value meanwhile; every key is read once per query head.

Source: Milakov and Gimelshein 2018, "Online normalizer calculation for softmax"; notebook 10.
"""

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int32
from torch import Tensor

from twinattn.course.ladder import check_decode


@triton.jit
def attend(
    query,  # [b, h, d]
    key_cache,  # [n, p, hk, d]
    value_cache,
    seq_lens,  # [b]
    block_table,  # [b, m]
    out,  # [b, h, d]
    scale,
    columns,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    sequence, head = tl.program_id(0), tl.program_id(1)
    kv_head = head // GROUP
    at = tl.arange(0, SIZE)
    row = (sequence * HEADS + head) * SIZE + at
    q = tl.load(query + row).to(tl.float32)
    seq_len = tl.load(seq_lens + sequence)
    table = block_table + sequence * columns

    row_max, row_sum, acc = float("-inf"), 0.0, tl.zeros([SIZE], tl.float32)
    for j in range(0, seq_len):
        block = tl.load(table + j // BLOCK).to(tl.int64)
        token = ((block * BLOCK + j % BLOCK) * (HEADS // GROUP) + kv_head) * SIZE + at
        k = tl.load(key_cache + token).to(tl.float32)
        scores = tl.sum(q * k, 0) * scale
        new_max = tl.maximum(row_max, scores)
        rescale = tl.exp(row_max - new_max)
        weights = tl.exp(scores - new_max)
        v = tl.load(value_cache + token).to(tl.float32)
        row_max, row_sum = new_max, row_sum * rescale + weights
        acc = acc * rescale + weights * v
    tl.store(out + row, acc / tl.where(row_sum == 0.0, 1.0, row_sum))


def attention(
    query: Float[Tensor, "b h d"],
    key_cache: Float[Tensor, "n p hk d"],
    value_cache: Float[Tensor, "n p hk d"],
    seq_lens: Int32[Tensor, "b"],
    block_table: Int32[Tensor, "b m"],
    softmax_scale: float | None = None,
) -> Float[Tensor, "b h d"]:
    """Attend from the newest token of each sequence to its tokens in the cache."""
    b, heads, kv_heads, size, block_size, columns = check_decode(query, key_cache, value_cache, seq_lens, block_table)
    scale = size**-0.5 if softmax_scale is None else softmax_scale
    out = torch.empty_like(query)
    attend[b, heads](
        *(query, key_cache, value_cache, seq_lens, block_table, out, scale, columns),
        **dict(HEADS=heads, GROUP=heads // kv_heads, SIZE=size, BLOCK=block_size),
        num_stages=1,
    )
    return out
