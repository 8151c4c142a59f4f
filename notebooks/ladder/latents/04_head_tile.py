"""4 · A tile of 16 heads, multiplied by tensor cores.

All heads share the keys, so heads are the rows of a tile: 16 of them, which is the least that a tensor core multiplies.
A score is the sum of two products of tiles (`tl.dot`), of the latents and of the rotary keys. A step has 32 keys
in place of eight, and a program half as many warps.

Gain: a latent that was loaded serves 16 heads in place of one, and tensor cores multiply many times as fast as threads
do. With 16 heads nothing is read twice any more; with 128, eight programs read the same keys.

Source: Ainslie et al. 2023, "GQA"; NVIDIA, PTX ISA, `mma`; fastattn/kernels/triton/tuning.py, `LATENT_16`.
"""

import triton
import triton.language as tl
from jaxtyping import Float, Int32
from torch import Tensor

from fastattn import mla
from twinattn.course.ladder import check_latents

ROWS = 16  # heads of a tile
KEYS = 32  # keys of a step


@triton.jit
def attend(
    query,  # [b, h, r + rope], absorbed
    cache,  # [n, p, r + rope]
    seq_lens,  # [b]
    block_table,  # [b, m]
    out,  # [b, h, r]
    scale,
    columns,
    HEADS: tl.constexpr,
    RANK: tl.constexpr,
    ROPE: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
):
    sequence, rows = tl.program_id(0), tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    is_row = (rows < HEADS)[:, None]
    at, at_rope = tl.arange(0, RANK), RANK + tl.arange(0, ROPE)
    row = (sequence * HEADS + rows)[:, None]
    q = tl.load(query + row * (RANK + ROPE) + at[None, :], mask=is_row, other=0.0)
    q_rope = tl.load(query + row * (RANK + ROPE) + at_rope[None, :], mask=is_row, other=0.0)
    seq_len = tl.load(seq_lens + sequence)
    table = block_table + sequence * columns

    row_max = tl.full([ROWS], float("-inf"), tl.float32)
    row_sum = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, RANK], tl.float32)
    for start in range(0, seq_len, KEYS):
        j = start + tl.arange(0, KEYS)
        is_key = j < seq_len
        block = tl.load(table + j // BLOCK, mask=is_key, other=0).to(tl.int64)
        token = (block * BLOCK + j % BLOCK)[:, None] * (RANK + ROPE)
        k = tl.load(cache + token + at[None, :], mask=is_key[:, None], other=0.0)
        k_rope = tl.load(cache + token + at_rope[None, :], mask=is_key[:, None], other=0.0)
        products = tl.dot(q, tl.trans(k), input_precision="ieee")
        products = tl.dot(q_rope, tl.trans(k_rope), products, input_precision="ieee")
        scores = tl.where(is_key[None, :], products * scale, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(scores, 1))
        rescale = tl.exp(row_max - new_max)
        weights = tl.exp(scores - new_max[:, None])
        row_max, row_sum = new_max, row_sum * rescale + tl.sum(weights, 1)
        acc = tl.dot(weights.to(k.dtype), k, acc * rescale[:, None], input_precision="ieee")
    values = acc / tl.where(row_sum == 0.0, 1.0, row_sum)[:, None]
    tl.store(out + row * RANK + at[None, :], values, mask=is_row)


def attention(
    query: Float[Tensor, "b h d"],
    cache: Float[Tensor, "n p c"],
    seq_lens: Int32[Tensor, "b"],
    block_table: Int32[Tensor, "b m"],
    key_projection: Float[Tensor, "h nope r"],
    value_projection: Float[Tensor, "h dv r"],
    softmax_scale: float,
) -> Float[Tensor, "b h dv"]:
    """Attend from the newest token of each sequence to its latents."""
    tensors = cache, seq_lens, block_table
    b, heads, rank, rope, block_size, columns = check_latents(query, *tensors, key_projection, value_projection)
    absorbed = mla.absorb(query, key_projection)
    out = query.new_empty(b, heads, rank)
    attend[b, triton.cdiv(heads, ROWS)](
        *(absorbed, *tensors, out, softmax_scale, columns),
        **dict(HEADS=heads, RANK=rank, ROPE=rope, BLOCK=block_size, ROWS=ROWS, KEYS=KEYS),
        num_stages=1,
    )
    return mla.project(out, value_projection)
