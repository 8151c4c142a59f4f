"""9 · The latent in two halves.

The output of a tile has 512 columns, and two programs share them: each has 256, in four warps. To a program, its own
half of a latent is key and value, and the other half is a key alone. Both compute all scores.

Gain: none; it loses, and shows why. An SM runs two programs, of which one multiplies while the other waits, and nothing
more is multiplied than before: of eight warps, which in Triton all lie along the 64 rows, every second four had
computed the scores that the other four had, too. But two programs fit only with half as many keys in a step and without
stages, so that each waits for all of its loads, and keys come twice from the L2 cache. Columns have to be shared by the
warps of one program.

Source: fastattn/kernels/triton/tuning.py, `_tune_latents`; DeepSeek's FlashMLA divides the columns over two groups of
warps of one program, which exchange their weights.
"""

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int32
from torch import Tensor

from fastattn import mla
from twinattn.course.ladder import check_latents, programs_at_once

# Heads of a tile, keys of a step, warps, stages, programs that an SM runs at once, and parts of the latent.
FEW, MANY = (16, 32, 4, 3, 2, 1), (64, 32, 4, 1, 2, 2)
FEWEST_KEYS = 128  # keys of a split
SPLITS = 16  # in a tile of the reduction
LOG2E = 1.4426950408889634


@triton.jit
def attend(
    query,  # [b, h, r + rope], absorbed
    cache,  # [n, p, r + rope]
    seq_lens,  # [b]
    block_table,  # [b, m]
    parts,  # [b, h, splits, r]
    lses,  # [b, h, splits], in base 2
    scale,
    columns,
    HEADS: tl.constexpr,
    RANK: tl.constexpr,
    ROPE: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    HALVES: tl.constexpr,
):
    sequence, tile, half = tl.program_id(0), tl.program_id(1) // HALVES, tl.program_id(1) % HALVES
    rows = tile * ROWS + tl.arange(0, ROWS)
    is_row = (rows < HEADS)[:, None]
    OWN: tl.constexpr = RANK // HALVES
    at, at_rope = half * OWN + tl.arange(0, OWN), RANK + tl.arange(0, ROPE)
    at_other = (1 - half) * OWN + tl.arange(0, OWN)
    row = (sequence * HEADS + rows)[:, None]
    q = tl.load(query + row * (RANK + ROPE) + at[None, :], mask=is_row, other=0.0)
    if HALVES == 2:
        q_other = tl.load(query + row * (RANK + ROPE) + at_other[None, :], mask=is_row, other=0.0)
    q_rope = tl.load(query + row * (RANK + ROPE) + at_rope[None, :], mask=is_row, other=0.0)
    part = (sequence * HEADS + rows) * tl.num_programs(2) + tl.program_id(2)
    seq_len = tl.load(seq_lens + sequence)
    keys = tl.cdiv(tl.cdiv(seq_len, KEYS), tl.num_programs(2)) * KEYS
    begin = tl.program_id(2) * keys
    end = tl.minimum(begin + keys, seq_len)
    if begin >= end:
        tl.store(lses + part, tl.full([ROWS], float("-inf"), tl.float32), mask=rows < HEADS)
        return
    table = block_table + sequence * columns

    row_max = tl.full([ROWS], float("-inf"), tl.float32)
    row_sum = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, OWN], tl.float32)
    for start in range(begin, end, KEYS):
        j = start + tl.arange(0, KEYS)
        is_key = j < end
        block = tl.load(table + j // BLOCK, mask=is_key, other=0).to(tl.int64)
        token = (block * BLOCK + j % BLOCK)[:, None] * (RANK + ROPE)
        k = tl.load(cache + token + at[None, :], mask=is_key[:, None], other=0.0)
        k_rope = tl.load(cache + token + at_rope[None, :], mask=is_key[:, None], other=0.0)
        products = tl.dot(q, tl.trans(k), input_precision="ieee")
        products = tl.dot(q_rope, tl.trans(k_rope), products, input_precision="ieee")
        if HALVES == 2:
            k_other = tl.load(cache + token + at_other[None, :], mask=is_key[:, None], other=0.0)
            products = tl.dot(q_other, tl.trans(k_other), products, input_precision="ieee")
        scores = tl.where(is_key[None, :], products * scale, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(scores, 1))
        rescale = tl.exp2(row_max - new_max)
        weights = tl.exp2(scores - new_max[:, None])
        row_max, row_sum = new_max, row_sum * rescale + tl.sum(weights, 1)
        acc = tl.dot(weights.to(k.dtype), k, acc * rescale[:, None], input_precision="ieee")
    tl.store(parts + part[:, None] * RANK + at[None, :], acc / row_sum[:, None], mask=is_row)
    tl.store(lses + part, row_max + tl.log2(row_sum), mask=(rows < HEADS) & (half == 0))


@triton.jit
def reduce(parts, lses, out, splits, RANK: tl.constexpr, SPLITS: tl.constexpr):
    row, at = tl.program_id(0), tl.arange(0, RANK)
    row_max, row_sum, acc = float("-inf"), 0.0, tl.zeros([RANK], tl.float32)
    for first in range(0, splits, SPLITS):
        split = first + tl.arange(0, SPLITS)
        scores = tl.load(lses + row * splits + split, mask=split < splits, other=float("-inf"))
        has_keys = (scores > float("-inf"))[:, None]
        new_max = tl.maximum(row_max, tl.max(scores, 0))
        base = tl.where(new_max == float("-inf"), 0.0, new_max)
        rescale = tl.exp2(row_max - base)
        weights = tl.exp2(scores - base)
        v = tl.load(parts + (row * splits + split)[:, None] * RANK + at[None, :], mask=has_keys, other=0.0)
        row_max, row_sum = new_max, row_sum * rescale + tl.sum(weights, 0)
        acc = acc * rescale + tl.sum(weights[:, None] * v, 0)
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
    rows, keys, warps, stages, per_sm, halves = FEW if heads <= 16 else MANY
    programs = triton.cdiv(heads, rows) * halves
    splits = max(1, min(programs_at_once(query.device, per_sm) // (b * programs), columns * block_size // FEWEST_KEYS))
    parts = query.new_empty(b, heads, splits, rank, dtype=torch.float32)
    lses = query.new_empty(b, heads, splits, dtype=torch.float32)
    attend[b, programs, splits](
        *(absorbed, *tensors, parts, lses, softmax_scale * LOG2E, columns),
        **dict(HEADS=heads, RANK=rank, ROPE=rope, BLOCK=block_size, ROWS=rows, KEYS=keys, HALVES=halves),
        **dict(num_warps=warps, num_stages=stages),
    )
    reduce[(b * heads,)](parts, lses, out, splits, RANK=rank, SPLITS=SPLITS)
    return mla.project(out, value_projection)
