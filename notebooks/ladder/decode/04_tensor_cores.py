"""4 · The products run on tensor cores.

`tl.dot` multiplies two tiles in the type of the cache, bfloat16, and adds up in float32. A tensor core takes 16 rows
at least, so a group of 4 heads fills a quarter of them, and the rest multiply zeros.

Gain: far fewer instructions, and far fewer registers, as no product waits to be added up and no key is turned into
float32; so more programs fit on an SM at once (occupancy). What remains is waiting for memory.

Source: NVIDIA, PTX ISA, `mma`; Triton's tutorial 03, "Matrix Multiplication".
"""

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int32
from torch import Tensor

from twinattn.course.ladder import check_decode

KEYS = 32  # keys per tile


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
    KEYS: tl.constexpr,
    ROWS: tl.constexpr,
):
    sequence, kv_head = tl.program_id(0), tl.program_id(1)
    in_group = tl.arange(0, ROWS)
    is_row = (in_group < GROUP)[:, None]
    at = tl.arange(0, SIZE)
    row = (sequence * HEADS + kv_head * GROUP + in_group)[:, None] * SIZE + at[None, :]
    q = tl.load(query + row, mask=is_row, other=0.0)
    seq_len = tl.load(seq_lens + sequence)
    table = block_table + sequence * columns

    row_max = tl.full([ROWS], float("-inf"), tl.float32)
    row_sum = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, SIZE], tl.float32)
    for start in range(0, seq_len, KEYS):
        j = start + tl.arange(0, KEYS)
        is_key = j < seq_len
        block = tl.load(table + j // BLOCK, mask=is_key, other=0).to(tl.int64)
        token = ((block * BLOCK + j % BLOCK) * (HEADS // GROUP) + kv_head)[:, None] * SIZE + at[None, :]
        k = tl.load(key_cache + token, mask=is_key[:, None], other=0.0)
        products = tl.dot(q, tl.trans(k), input_precision="ieee")
        scores = tl.where(is_key[None, :], products * scale, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(scores, 1))
        rescale = tl.exp(row_max - new_max)
        weights = tl.exp(scores - new_max[:, None])
        v = tl.load(value_cache + token, mask=is_key[:, None], other=0.0)
        row_max, row_sum = new_max, row_sum * rescale + tl.sum(weights, 1)
        acc = tl.dot(weights.to(v.dtype), v, acc * rescale[:, None], input_precision="ieee")
    tl.store(out + row, acc / tl.where(row_sum == 0.0, 1.0, row_sum)[:, None], mask=is_row)


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
    rows = max(16, triton.next_power_of_2(heads // kv_heads))
    attend[b, kv_heads](
        *(query, key_cache, value_cache, seq_lens, block_table, out, scale, columns),
        **dict(HEADS=heads, GROUP=heads // kv_heads, SIZE=size, BLOCK=block_size, KEYS=KEYS, ROWS=rows),
        num_stages=1,
    )
    return out
