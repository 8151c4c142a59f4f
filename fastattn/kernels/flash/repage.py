"""Copy pages into larger ones: a kernel that loads whole tiles reads pages of its own tile size fastest."""

from typing import no_type_check

import torch
import triton
import triton.language as tl
from jaxtyping import Int32, Shaped
from torch import Tensor

from refattn.interface import Batch

BLOCK_ROWS = 16


def repage(
    cache: Shaped[Tensor, "n p hk d"], batch: Batch, *, block_size: int
) -> tuple[Shaped[Tensor, "n2 p2 hk d"], Int32[Tensor, "b m2"]]:
    """Copy the tokens of a batch into a pool of their own, with larger blocks, in order; see `kernels.flash.fa4`.

    Args:
        cache: the pool.
        batch: the lengths and the block table.
        block_size: tokens in a new block, a multiple of `BLOCK_ROWS`.

    Returns:
        The new pool, with zeros past a sequence's end in its last block and anything in blocks after that, and the
        table that leads to it.
    """
    _, old_block_size, num_kv_heads, head_size = cache.shape
    assert batch.block_table is not None  # the path has checked it
    columns = -(-batch.max_seq_len // block_size)
    pool = cache.new_empty(batch.num_seqs * columns, block_size, num_kv_heads, head_size)
    table = torch.arange(len(pool), dtype=torch.int32, device=cache.device).view(batch.num_seqs, columns)
    _repage_kernel[len(pool) * block_size // BLOCK_ROWS,](
        cache,
        pool,
        batch.block_table,
        batch.seq_lens,
        cache.stride(),
        batch.block_table.stride(),
        columns,
        NUM_KV_HEADS=num_kv_heads,
        HEAD_SIZE=head_size,
        OLD_BLOCK_SIZE=old_block_size,
        BLOCK_SIZE=block_size,
        BLOCK_ROWS=BLOCK_ROWS,
    )
    return pool, table


@triton.jit(do_not_specialize=["block_table", "seq_lens", "columns"])
@no_type_check
def _repage_kernel(
    cache,
    pool,
    block_table,
    seq_lens,
    cache_strides,
    table_strides,
    columns,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    OLD_BLOCK_SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
):
    # A program copies a few tokens of a sequence, with all their heads.
    first_row = tl.program_id(0).to(tl.int64) * BLOCK_ROWS
    sequence = first_row // (columns * BLOCK_SIZE)
    token = first_row % (columns * BLOCK_SIZE) + tl.arange(0, BLOCK_ROWS)
    seq_len = tl.load(seq_lens + sequence)
    if first_row % (columns * BLOCK_SIZE) >= tl.cdiv(seq_len, BLOCK_SIZE) * BLOCK_SIZE:
        return
    is_token = token < seq_len
    block = tl.load(
        block_table + sequence * table_strides[0] + token // OLD_BLOCK_SIZE * table_strides[1], is_token, 0
    ).to(tl.int64)
    HEADS_PAD: tl.constexpr = triton.next_power_of_2(NUM_KV_HEADS)
    HEAD_PAD: tl.constexpr = triton.next_power_of_2(HEAD_SIZE)
    column = tl.arange(0, HEADS_PAD * HEAD_PAD)
    head, at_d = column // HEAD_PAD, column % HEAD_PAD
    is_column = (head < NUM_KV_HEADS) & (at_d < HEAD_SIZE)
    source = block * cache_strides[0] + token % OLD_BLOCK_SIZE * cache_strides[1]
    within = head * cache_strides[2] + at_d * cache_strides[3]
    rows = tl.load(cache + source[:, None] + within[None, :], is_token[:, None] & is_column[None, :], 0)
    place = (first_row + tl.arange(0, BLOCK_ROWS)) * (NUM_KV_HEADS * HEAD_SIZE)
    tl.store(pool + place[:, None] + (head * HEAD_SIZE + at_d)[None, :], rows, mask=is_column[None, :])
