"""2 · A tile of keys at a time.

A program loads 32 keys at once, computes 32 scores and takes all of them into the softmax in one step. The rows of a
tile of keys are spread over the threads of the program's four warps: neighbouring threads load neighbouring addresses.

Gain: a tile takes about the time that a key took, as that time was latency and not bandwidth. Loads stay coalesced:
the elements of a key lie side by side, so a warp reads whole lines of memory.

Source: Triton's tutorial 06, "Fused Attention"; Dao et al. 2022, "FlashAttention".
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
):
    sequence, head = tl.program_id(0), tl.program_id(1)
    kv_head = head // GROUP
    at = tl.arange(0, SIZE)
    row = (sequence * HEADS + head) * SIZE + at
    q = tl.load(query + row).to(tl.float32)
    seq_len = tl.load(seq_lens + sequence)
    table = block_table + sequence * columns

    row_max, row_sum, acc = float("-inf"), 0.0, tl.zeros([SIZE], tl.float32)
    for start in range(0, seq_len, KEYS):
        j = start + tl.arange(0, KEYS)
        is_key = j < seq_len
        block = tl.load(table + j // BLOCK, mask=is_key, other=0).to(tl.int64)
        token = ((block * BLOCK + j % BLOCK) * (HEADS // GROUP) + kv_head)[:, None] * SIZE + at[None, :]
        k = tl.load(key_cache + token, mask=is_key[:, None], other=0.0).to(tl.float32)
        scores = tl.where(is_key, tl.sum(q[None, :] * k, 1) * scale, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(scores, 0))
        rescale = tl.exp(row_max - new_max)
        weights = tl.exp(scores - new_max)
        v = tl.load(value_cache + token, mask=is_key[:, None], other=0.0).to(tl.float32)
        row_max, row_sum = new_max, row_sum * rescale + tl.sum(weights, 0)
        acc = acc * rescale + tl.sum(weights[:, None] * v, 0)
    tl.store(out + row, acc / tl.where(row_sum == 0.0, 1.0, row_sum))


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
    attend[b, heads](
        *(query, key_cache, value_cache, seq_lens, block_table, out, scale, columns),
        **dict(HEADS=heads, GROUP=heads // kv_heads, SIZE=size, BLOCK=block_size, KEYS=KEYS),
        num_stages=1,
    )
    return out
