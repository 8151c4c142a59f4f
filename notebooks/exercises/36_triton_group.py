"""36 · The heads of a group are rows of one tile, in Triton."""

from typing import no_type_check

import torch
import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor


@triton.jit
@no_type_check
def group_kernel(
    query, key, value, out, seq_len, scale, kv_heads,
    GROUP: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Attend with all query heads of one KV head, as rows of a tile, so that each key is loaded once for all of them.

    Program j has KV head j and the query heads j * GROUP, j * GROUP + 1 and so on, GROUP of them. Both products are
    products of tiles, `tl.dot`, which takes 16 rows at least: ROWS is a power of two, 16 or more, and the rows from
    GROUP on are no heads. Query head h begins at `query + h * D`, its output at `out + h * D`; the key of token t
    begins at `key + (t * kv_heads + j) * D`, and its value at the same place in `value`. The last tile may have fewer
    than TILE keys.
    """
    raise NotImplementedError


def triton_group(
    query: Float[Tensor, "h d"], key: Float[Tensor, "s hk d"], value: Float[Tensor, "s hk d"]
) -> Float[Tensor, "h d"]:
    """Launch the kernel, one program per KV head; everything is contiguous, and `d` is a power of two."""
    heads, size = query.shape
    kv_heads = key.shape[1]
    group = heads // kv_heads
    rows = max(16, triton.next_power_of_2(group))
    out = query.new_empty(heads + rows, size)  # with room for a store without a mask, which then harms nothing
    group_kernel[(kv_heads,)](
        *(query, key, value, out, len(key), size**-0.5, kv_heads), GROUP=group, D=size, ROWS=rows, TILE=16
    )
    return out[:heads]
