"""37 · A tile of queries under a causal mask, in Triton."""

from typing import no_type_check

import torch
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
    raise NotImplementedError


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
