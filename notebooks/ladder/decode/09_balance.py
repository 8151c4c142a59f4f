"""9 · Splits by share of the keys.

In a ragged batch all sequences got the same number of splits, so the longest one ran alone at the end. Now each gets
splits by its share of all keys, and the device counts these: a captured graph stays right when its sequences grow.

Gain: none where all are equally long. Where a few are long, the time falls from that of the longest sequence towards
that of the average.

Source: Ye et al. 2025, "FlashInfer"; fastattn/kernels/triton/merge.py, `share_run`.
"""

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int32
from torch import Tensor

from twinattn.course.ladder import check_decode, programs_at_once

KEYS = 32  # keys per tile
MOST_KEYS = 2048  # keys per program, where the table leaves the length open
SEQUENCES = 128  # that are counted at once
SPLITS = 16  # in a tile of the reduction
LOG2E = 1.4426950408889634


@triton.jit
def attend(
    query,  # [b, h, d]
    key_cache,  # [n, p, hk, d]
    value_cache,
    seq_lens,  # [b]
    block_table,  # [b, m]
    parts,  # [b, h, splits, d]
    lses,  # [b, h, splits], in base 2
    scale,
    columns,
    at_once,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    KEYS: tl.constexpr,
    ROWS: tl.constexpr,
    SEQUENCES: tl.constexpr,
):
    sequence, kv_head = tl.program_id(0), tl.program_id(1)
    in_group = tl.arange(0, ROWS)
    is_row = (in_group < GROUP)[:, None]
    at = tl.arange(0, SIZE)
    row = (sequence * HEADS + kv_head * GROUP + in_group)[:, None] * SIZE + at[None, :]
    q = tl.load(query + row, mask=is_row, other=0.0)
    part = (sequence * HEADS + kv_head * GROUP + in_group) * tl.num_programs(2) + tl.program_id(2)
    seq_len = tl.load(seq_lens + sequence)
    all_keys = 0
    for first in range(0, tl.num_programs(0), SEQUENCES):
        number = first + tl.arange(0, SEQUENCES)
        all_keys += tl.sum(tl.load(seq_lens + number, mask=number < tl.num_programs(0), other=0), 0)
    share = seq_len / tl.maximum(all_keys, 1) * at_once
    splits = tl.minimum(tl.maximum((share + 0.5).to(tl.int32), 1), tl.num_programs(2))
    keys = tl.cdiv(tl.cdiv(seq_len, KEYS), splits) * KEYS
    begin = tl.program_id(2) * keys
    end = tl.minimum(begin + keys, seq_len)
    if begin >= end:
        tl.store(lses + part, tl.full([ROWS], float("-inf"), tl.float32), mask=in_group < GROUP)
        return
    table = block_table + sequence * columns

    row_max = tl.full([ROWS], float("-inf"), tl.float32)
    row_sum = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, SIZE], tl.float32)
    first = begin + tl.arange(0, KEYS)
    ahead = tl.load(table + first // BLOCK, mask=first < end, other=0)
    for start in range(begin, end, KEYS):
        j = start + tl.arange(0, KEYS)
        is_key = j < end
        block = ahead.to(tl.int64)
        ahead = tl.load(table + (j + KEYS) // BLOCK, mask=j + KEYS < end, other=0)
        token = ((block * BLOCK + j % BLOCK) * (HEADS // GROUP) + kv_head)[:, None] * SIZE + at[None, :]
        k = tl.load(key_cache + token, mask=is_key[:, None], other=0.0)
        products = tl.dot(q, tl.trans(k), input_precision="ieee")
        scores = tl.where(is_key[None, :], products * scale, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(scores, 1))
        rescale = tl.exp2(row_max - new_max)
        weights = tl.exp2(scores - new_max[:, None])
        v = tl.load(value_cache + token, mask=is_key[:, None], other=0.0)
        row_max, row_sum = new_max, row_sum * rescale + tl.sum(weights, 1)
        acc = tl.dot(weights.to(v.dtype), v, acc * rescale[:, None], input_precision="ieee")
    tl.store(parts + part[:, None] * SIZE + at[None, :], acc / row_sum[:, None], mask=is_row)
    tl.store(lses + part, row_max + tl.log2(row_sum), mask=in_group < GROUP)


@triton.jit
def reduce(parts, lses, out, splits, SIZE: tl.constexpr, SPLITS: tl.constexpr):
    row = tl.program_id(0)
    at = tl.arange(0, SIZE)
    row_max, row_sum, acc = float("-inf"), 0.0, tl.zeros([SIZE], tl.float32)
    for first in range(0, splits, SPLITS):
        split = first + tl.arange(0, SPLITS)
        scores = tl.load(lses + row * splits + split, mask=split < splits, other=float("-inf"))
        has_keys = (scores > float("-inf"))[:, None]
        new_max = tl.maximum(row_max, tl.max(scores, 0))
        base = tl.where(new_max == float("-inf"), 0.0, new_max)
        rescale = tl.exp2(row_max - base)
        weights = tl.exp2(scores - base)
        v = tl.load(parts + (row * splits + split)[:, None] * SIZE + at[None, :], mask=has_keys, other=0.0)
        row_max, row_sum = new_max, row_sum * rescale + tl.sum(weights, 0)
        acc = acc * rescale + tl.sum(weights[:, None] * v, 0)
    tl.store(out + row * SIZE + at, acc / tl.where(row_sum == 0.0, 1.0, row_sum))


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
    scale = (size**-0.5 if softmax_scale is None else softmax_scale) * LOG2E
    out = torch.empty_like(query)
    rows = max(16, triton.next_power_of_2(heads // kv_heads))
    at_once = programs_at_once(query.device) // kv_heads
    splits = max(1, min(at_once, columns * block_size // MOST_KEYS))
    parts = query.new_empty(b, heads, splits, size, dtype=torch.float32)
    lses = query.new_empty(b, heads, splits, dtype=torch.float32)
    attend[b, kv_heads, splits](
        *(query, key_cache, value_cache, seq_lens, block_table, parts, lses, scale, columns, at_once),
        **dict(
            HEADS=heads, GROUP=heads // kv_heads, SIZE=size, BLOCK=block_size, KEYS=KEYS, ROWS=rows, SEQUENCES=SEQUENCES
        ),
        num_stages=3,
    )
    reduce[(b * heads,)](parts, lses, out, splits, SIZE=size, SPLITS=SPLITS)
    return out
