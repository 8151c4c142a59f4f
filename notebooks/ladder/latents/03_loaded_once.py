"""3 · A value is its key: loaded once.

The tile of latents that was multiplied with the query is still there when the weights are known. It is the tile of
values, too, so nothing more is loaded. A kernel for any pair of pools cannot know that the two are one.

Gain: one of two loads of each latent. But most of the second ones came from a cache, and now the tile waits in
registers, in the order of one product, to be rearranged for the other. Where tiles lie in shared memory, in the rungs
below, both products read one copy.

Source: DeepSeek-AI 2024, "DeepSeek-V2" (2.1.2); fastattn/kernels/triton/keys.py.
"""

import triton
import triton.language as tl
from jaxtyping import Float, Int32
from torch import Tensor

from fastattn import mla
from twinattn.course.ladder import check_latents

KEYS = 8  # keys of a step


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
    KEYS: tl.constexpr,
):
    sequence, head = tl.program_id(0), tl.program_id(1)
    at, at_rope = tl.arange(0, RANK), RANK + tl.arange(0, ROPE)
    row = sequence * HEADS + head
    q = tl.load(query + row * (RANK + ROPE) + at).to(tl.float32)
    q_rope = tl.load(query + row * (RANK + ROPE) + at_rope).to(tl.float32)
    seq_len = tl.load(seq_lens + sequence)
    table = block_table + sequence * columns

    row_max, row_sum, acc = float("-inf"), 0.0, tl.zeros([RANK], tl.float32)
    for start in range(0, seq_len, KEYS):
        j = start + tl.arange(0, KEYS)
        is_key = j < seq_len
        block = tl.load(table + j // BLOCK, mask=is_key, other=0).to(tl.int64)
        token = (block * BLOCK + j % BLOCK)[:, None] * (RANK + ROPE)
        k = tl.load(cache + token + at[None, :], mask=is_key[:, None], other=0.0)
        k_rope = tl.load(cache + token + at_rope[None, :], mask=is_key[:, None], other=0.0)
        products = tl.sum(q[None, :] * k.to(tl.float32), 1) + tl.sum(q_rope[None, :] * k_rope.to(tl.float32), 1)
        scores = tl.where(is_key, products * scale, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(scores, 0))
        rescale = tl.exp(row_max - new_max)
        weights = tl.exp(scores - new_max)
        row_max, row_sum = new_max, row_sum * rescale + tl.sum(weights, 0)
        acc = acc * rescale + tl.sum(weights[:, None] * k.to(tl.float32), 0)
    tl.store(out + row * RANK + at, acc / tl.where(row_sum == 0.0, 1.0, row_sum))


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
    attend[b, heads](
        *(absorbed, *tensors, out, softmax_scale, columns),
        **dict(HEADS=heads, RANK=rank, ROPE=rope, BLOCK=block_size, KEYS=KEYS),
        **dict(num_warps=8, num_stages=1),
    )
    return mla.project(out, value_projection)
