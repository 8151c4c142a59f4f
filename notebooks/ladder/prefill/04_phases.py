"""4 · Two phases: steps without a mask, and those on the diagonal.

Every row of a tile sees all keys up to its first row: there nothing has to be compared. `tl.static_range` writes the
loop out twice, once without the comparison and once with it for the last steps, which the diagonal cuts.

Gain: a comparison and a choice per score, which the threads do while the tensor cores wait. The longer the context,
the larger the share of steps that need none. On an H200 the change alone did not gain, and chunks after long
contexts lost by it; why was not found. The kernels of the last rungs have it, too. A branch inside the loop would cost
more than it spares: the compiler could no longer move the products of one step beside the softmax of another.

Source: Dao 2023, "FlashAttention-2"; Triton's tutorial 06 (`STAGE`).
"""

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int32
from torch import Tensor

from twinattn.course.ladder import check_rows

ROWS = 64  # queries of a tile
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
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
):
    head, first_row, sequence = tl.program_id(0), tl.program_id(1) * ROWS, tl.program_id(2)
    first_query, first_key = tl.load(cu_seqlens_q + sequence), tl.load(cu_seqlens_k + sequence)
    query_len = tl.load(cu_seqlens_q + sequence + 1) - first_query
    seq_len = tl.load(cu_seqlens_k + sequence + 1) - first_key
    if first_row >= query_len:
        return
    context = seq_len - query_len
    rows = first_row + tl.arange(0, ROWS)
    positions = context + rows
    is_row = (rows < query_len)[:, None]
    end = tl.minimum(context + first_row + ROWS, seq_len)  # past the last key that some row sees
    whole = tl.maximum(context + first_row + 1, 0) // KEYS * KEYS  # every row sees the steps before
    at = tl.arange(0, SIZE)
    place = ((first_query + rows).to(tl.int64) * HEADS + head)[:, None] * SIZE + at[None, :]
    q = tl.load(query + place, mask=is_row, other=0.0)

    row_max = tl.full([ROWS], float("-inf"), tl.float32)
    row_sum = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, SIZE], tl.float32)
    for masked in tl.static_range(2):
        for start in range(whole if masked else 0, end if masked else whole, KEYS):
            j = start + tl.arange(0, KEYS)
            is_key = (j < end)[:, None]
            token = ((first_key + j).to(tl.int64) * (HEADS // GROUP) + head // GROUP)[:, None] * SIZE + at[None, :]
            k = tl.load(key + token, mask=is_key, other=0.0)
            scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
            if masked:
                scores = tl.where(j[None, :] <= positions[:, None], scores, float("-inf"))
            new_max = tl.maximum(row_max, tl.max(scores, 1))
            base = tl.where(new_max == float("-inf"), 0.0, new_max)  # a row that has seen no key yet has no maximum
            rescale = tl.exp(row_max - base)
            weights = tl.exp(scores - base[:, None])
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
    max_query_len: int,
    softmax_scale: float | None = None,
) -> Float[Tensor, "t h d"]:
    """Attend from the last tokens of each sequence to all its tokens up to themselves."""
    b, heads, kv_heads, size = check_rows(query, key, value, cu_seqlens_q, cu_seqlens_k)
    scale = size**-0.5 if softmax_scale is None else softmax_scale
    out = torch.empty_like(query)
    attend[heads, triton.cdiv(max_query_len, ROWS), b](
        *(query, key, value, cu_seqlens_q, cu_seqlens_k, out, scale),
        **dict(HEADS=heads, GROUP=heads // kv_heads, SIZE=size, ROWS=ROWS, KEYS=KEYS),
        num_stages=1,
    )
    return out
