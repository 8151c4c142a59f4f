"""10 · The shape of the launch: rows, warps, stages.

The kernel is the same; a tile has 128 rows, shared by eight warps, and the keys of the next two steps are on their way
to shared memory while this one is computed. With heads of 128 in 16 bits such a program takes 128 KB of shared memory
and more than half of the registers of an SM: it has the SM for itself.

Gain: each key that comes into shared memory meets twice as many rows, and products wait less for loads. The price is
room: two programs shared an SM before, and one multiplied while the other took exponentials. More rows would need more
registers than a thread can have, and would spill; more keys or stages, more shared memory than there is.

Source: Dao 2023, "FlashAttention-2" (3.3); NVIDIA, PTX ISA, `cp.async`; fastattn/kernels/triton/tuning.py.
"""

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int32
from torch import Tensor

from fastattn.kernels.problem import with_positive_scale
from fastattn.kernels.triton.tuning import LaunchConfig, fit
from twinattn.course.ladder import check_pages

# Rows of a tile, keys of a step; `fit` takes stages, then keys, then rows away where shared memory is short.
SHAPE = LaunchConfig(block_m=128, block_n=64, num_warps=8, num_stages=3, splits=1, most_splits=1)
LOG2E = 1.4426950408889634


@triton.jit
def first_tile(cu_seqlens_q, sequence, GROUP: tl.constexpr, ROWS: tl.constexpr):
    # Each sequence before may have a tile that is not full.
    return tl.load(cu_seqlens_q + sequence) * GROUP // ROWS + sequence


@triton.jit
def attend(
    query,  # [t, h, d]
    key_cache,  # [n, p, hk, d]
    value_cache,
    cu_seqlens_q,  # [b+1]
    seq_lens,  # [b]
    block_table,  # [b, m]
    out,  # [t, h, d]
    scale,
    num_seqs,
    columns,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
):
    kv_head, tile = tl.program_id(0), tl.num_programs(1) - 1 - tl.program_id(1)  # the last ones first
    sequence, last = tile * 0, num_seqs - 1
    while sequence < last:  # by halving: the last sequence whose first tile is not after this one
        middle = (sequence + last + 1) // 2
        if first_tile(cu_seqlens_q, middle, GROUP, ROWS) <= tile:
            sequence = middle
        else:
            last = middle - 1
    first_row = (tile - first_tile(cu_seqlens_q, sequence, GROUP, ROWS)) * ROWS
    first_query, seq_len = tl.load(cu_seqlens_q + sequence), tl.load(seq_lens + sequence)
    query_len = tl.load(cu_seqlens_q + sequence + 1) - first_query
    if first_row >= query_len * GROUP:
        return
    context = seq_len - query_len
    rows = first_row + tl.arange(0, ROWS)
    positions = context + rows // GROUP
    is_row = (rows < query_len * GROUP)[:, None]
    end = tl.minimum(context + (first_row + ROWS - 1) // GROUP + 1, seq_len)  # past the last key that some row sees
    whole = tl.maximum(context + first_row // GROUP + 1, 0) // KEYS * KEYS  # every row sees the steps before
    at = tl.arange(0, SIZE)
    head = kv_head * GROUP + rows % GROUP
    place = ((first_query + rows // GROUP).to(tl.int64) * HEADS + head)[:, None] * SIZE + at[None, :]
    q = tl.load(query + place, mask=is_row, other=0.0)
    table = block_table + sequence.to(tl.int64) * columns

    row_max = tl.full([ROWS], float("-inf"), tl.float32)
    row_sum = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, SIZE], tl.float32)
    first = tl.arange(0, KEYS)
    ahead = tl.load(table + first // BLOCK, mask=first < end, other=0)
    for masked in tl.static_range(2):
        for start in range(whole if masked else 0, end if masked else whole, KEYS):
            j = start + tl.arange(0, KEYS)
            is_key = (j < end)[:, None]
            block = ahead.to(tl.int64)
            ahead = tl.load(table + (j + KEYS) // BLOCK, mask=j + KEYS < end, other=0)
            token = ((block * BLOCK + j % BLOCK) * (HEADS // GROUP) + kv_head)[:, None] * SIZE + at[None, :]
            k = tl.load(key_cache + token, mask=is_key, other=0.0)
            scores = tl.dot(q, tl.trans(k), input_precision="ieee")
            if masked:
                scores = tl.where(j[None, :] <= positions[:, None], scores, float("-inf"))
            new_max = tl.maximum(row_max, tl.max(scores, 1) * scale)
            base = tl.where(new_max == float("-inf"), 0.0, new_max)  # a row that has seen no key yet has no maximum
            rescale = tl.exp2(row_max - base)
            weights = tl.exp2(scores * scale - base[:, None])
            v = tl.load(value_cache + token, mask=is_key, other=0.0)
            row_max, row_sum = new_max, row_sum * rescale + tl.sum(weights, 1)
            acc = tl.dot(weights.to(v.dtype), v, acc * rescale[:, None], input_precision="ieee")
    tl.store(out + place, acc / tl.where(row_sum == 0.0, 1.0, row_sum)[:, None], mask=is_row)


def attention(
    query: Float[Tensor, "t h d"],
    key_cache: Float[Tensor, "n p hk d"],
    value_cache: Float[Tensor, "n p hk d"],
    cu_seqlens_q: Int32[Tensor, "_"],  # [b+1]
    seq_lens: Int32[Tensor, "b"],
    block_table: Int32[Tensor, "b m"],
    softmax_scale: float | None = None,
) -> Float[Tensor, "t h d"]:
    """Attend from the last tokens of each sequence to all its tokens up to themselves."""
    tensors = query, key_cache, value_cache, cu_seqlens_q, seq_lens, block_table
    b, heads, kv_heads, size, block_size, columns = check_pages(*tensors)
    query, scale = with_positive_scale(query, softmax_scale)
    out = torch.empty_like(query)
    size_bytes = size * query.itemsize
    shape = fit(SHAPE, query.device, row_bytes=size_bytes, key_bytes=2 * size_bytes)
    attend[kv_heads, len(query) * heads // kv_heads // shape.block_m + b](
        *(query, *tensors[1:], out, scale * LOG2E, b, columns),
        **dict(HEADS=heads, GROUP=heads // kv_heads, SIZE=size, BLOCK=block_size),
        **dict(ROWS=shape.block_m, KEYS=shape.block_n, num_warps=shape.num_warps, num_stages=shape.num_stages),
    )
    return out
