"""37 · A tile of queries under a causal mask, in Triton."""

from typing import no_type_check

import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor


@triton.jit
@no_type_check
def causal_kernel(
    query, key, value, out, query_len, seq_len, scale, D: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr
):
    """Attend with ROWS queries of one head, in steps of TILE keys, and leave out the steps that no row sees.

    The queries are the last `query_len` of `seq_len` tokens, and each sees the keys up to its own position. Program i
    has the rows from i * ROWS on. Row r begins at `query + r * D`, its output at `out + r * D`, key j at `key + j * D`,
    and its value at the same place in `value`. The last tile may have fewer than ROWS rows, and the last step fewer
    than TILE keys.
    """
    first_row, dims = tl.program_id(0) * ROWS, tl.arange(0, D)
    rows = first_row + tl.arange(0, ROWS)
    is_row = (rows < query_len)[:, None]
    positions = seq_len - query_len + rows
    end = tl.minimum(seq_len - query_len + first_row + ROWS, seq_len)
    q = tl.load(query + rows[:, None] * D + dims[None, :], mask=is_row, other=0.0)
    row_max, row_sum = tl.full([ROWS], -float("inf"), tl.float32), tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, D], tl.float32)
    for start in range(0, end, TILE):
        j = start + tl.arange(0, TILE)
        offsets = j[:, None] * D + dims[None, :]
        keys = tl.load(key + offsets, mask=(j < end)[:, None], other=0.0)
        values = tl.load(value + offsets, mask=(j < end)[:, None], other=0.0)
        scores = tl.dot(q, tl.trans(keys), input_precision="ieee") * scale
        scores = tl.where(j[None, :] <= positions[:, None], scores, -float("inf"))
        new_max = tl.maximum(row_max, tl.max(scores, 1))
        rescale = tl.exp(row_max - new_max)
        weights = tl.exp(scores - new_max[:, None])
        row_max, row_sum = new_max, row_sum * rescale + tl.sum(weights, 1)
        acc = tl.dot(weights, values, acc * rescale[:, None], input_precision="ieee")
    tl.store(out + rows[:, None] * D + dims[None, :], acc / row_sum[:, None], mask=is_row)


def triton_causal(
    query: Float[Tensor, "t d"], key: Float[Tensor, "s d"], value: Float[Tensor, "s d"]
) -> Float[Tensor, "t d"]:
    """Launch the kernel, one program per 16 queries; everything is contiguous, and `d` is a power of two."""
    query_len, size = query.shape
    out = query.new_empty(query_len + 16, size)  # with room for a store without a mask, which then harms nothing
    causal_kernel[(triton.cdiv(query_len, 16),)](
        *(query, key, value, out, query_len, len(key), size**-0.5), D=size, ROWS=16, TILE=16
    )
    return out[:query_len]
