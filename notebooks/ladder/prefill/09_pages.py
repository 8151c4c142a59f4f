"""9 · Keys come out of pages.

In a server the keys lie in a paged cache, those of earlier chunks with those of this one. A step of 64 keys is
gathered from four blocks of 16: each key has its own address, by the block table. The entries of the next step are
loaded while this one is computed, as in the ladder of decodes.

Gain: none, it costs: addresses take instructions and registers, and rows that followed one another no longer do. What
it buys is the server: chunks, prefixes that are shared, no copy of the cache before a prompt.

Source: Kwon et al. 2023, "PagedAttention"; fastattn/kernels/triton/keys.py, `find_in_pages`.
"""

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int32
from torch import Tensor

from fastattn.kernels.problem import with_positive_scale
from twinattn.course.ladder import check_pages

ROWS = 64  # rows of a tile: queries times the heads of a group
KEYS = 64  # keys of a step
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
    attend[kv_heads, len(query) * heads // kv_heads // ROWS + b](
        *(query, *tensors[1:], out, scale * LOG2E, b, columns),
        **dict(HEADS=heads, GROUP=heads // kv_heads, SIZE=size, BLOCK=block_size, ROWS=ROWS, KEYS=KEYS),
        num_stages=1,
    )
    return out
