"""8 · The longest tiles first.

Under a causal mask the last tile of a prompt sees all its keys, the first one hardly any. A GPU begins programs in the
order of their numbers, so the numbers are turned around: the tile with the most work begins first.

Gain: at the end of a launch, SMs that are done wait for those that are not. With short programs at the end the wait is
short. The fewer programs there are per SM, the more it matters: of two long prompts each SM has dozens, and the end is
a small part of the launch. Only the order within a sequence is known to be right: where a long sequence stands in the
batch decides for the rest.

Source: Graham 1969, "Bounds on Multiprocessing Timing Anomalies" (longest processing time first);
fastattn/kernels/triton/load_hopper.py, `find_tile`.
"""

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int32
from torch import Tensor

from fastattn.kernels.problem import with_positive_scale
from twinattn.course.ladder import check_rows

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
    key,  # [s, hk, d]
    value,
    cu_seqlens_q,  # [b+1]
    cu_seqlens_k,
    out,  # [t, h, d]
    scale,
    num_seqs,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    SIZE: tl.constexpr,
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
    first_query, first_key = tl.load(cu_seqlens_q + sequence), tl.load(cu_seqlens_k + sequence)
    query_len = tl.load(cu_seqlens_q + sequence + 1) - first_query
    seq_len = tl.load(cu_seqlens_k + sequence + 1) - first_key
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

    row_max = tl.full([ROWS], float("-inf"), tl.float32)
    row_sum = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, SIZE], tl.float32)
    for masked in tl.static_range(2):
        for start in range(whole if masked else 0, end if masked else whole, KEYS):
            j = start + tl.arange(0, KEYS)
            is_key = (j < end)[:, None]
            token = ((first_key + j).to(tl.int64) * (HEADS // GROUP) + kv_head)[:, None] * SIZE + at[None, :]
            k = tl.load(key + token, mask=is_key, other=0.0)
            scores = tl.dot(q, tl.trans(k), input_precision="ieee")
            if masked:
                scores = tl.where(j[None, :] <= positions[:, None], scores, float("-inf"))
            new_max = tl.maximum(row_max, tl.max(scores, 1) * scale)
            base = tl.where(new_max == float("-inf"), 0.0, new_max)  # a row that has seen no key yet has no maximum
            rescale = tl.exp2(row_max - base)
            weights = tl.exp2(scores * scale - base[:, None])
            v = tl.load(value + token, mask=is_key, other=0.0)
            row_max, row_sum = new_max, row_sum * rescale + tl.sum(weights, 1)
            acc = tl.dot(weights.to(v.dtype), v, acc * rescale[:, None], input_precision="ieee")
    tl.store(out + place, acc / tl.where(row_sum == 0.0, 1.0, row_sum)[:, None], mask=is_row)


def attention(
    query: Float[Tensor, "t h d"],
    key: Float[Tensor, "s hk d"],
    value: Float[Tensor, "s hk d"],
    cu_seqlens_q: Int32[Tensor, "_"],  # [b+1]
    cu_seqlens_k: Int32[Tensor, "_"],  # [b+1]
    softmax_scale: float | None = None,
) -> Float[Tensor, "t h d"]:
    """Attend from the last tokens of each sequence to all its tokens up to themselves."""
    b, heads, kv_heads, size = check_rows(query, key, value, cu_seqlens_q, cu_seqlens_k)
    query, scale = with_positive_scale(query, softmax_scale)
    out = torch.empty_like(query)
    attend[kv_heads, len(query) * heads // kv_heads // ROWS + b](
        *(query, key, value, cu_seqlens_q, cu_seqlens_k, out, scale * LOG2E, b),
        **dict(HEADS=heads, GROUP=heads // kv_heads, SIZE=size, ROWS=ROWS, KEYS=KEYS),
        num_stages=1,
    )
    return out
