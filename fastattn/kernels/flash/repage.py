"""Copy pages into larger ones: a kernel that loads whole tiles reads pages of its own tile size fastest.

Codes of a quantised pool become what they stand for on the way, rounded into the type of the new pool.
"""

from typing import no_type_check

import torch
import triton
import triton.language as tl
from jaxtyping import Float32, Int32, Shaped
from torch import Tensor

from fastattn.kernels.gpu.quantized import dequantize
from fastattn.kernels.gpu.tile import converts_fp8, pad
from refattn.batch import Batch

BLOCK_ROWS = 16
MOST_ELEMENTS = 16384  # of a program: with more of them, registers run out


def repage(
    cache: Shaped[Tensor, "n p hk d"],
    batch: Batch,
    *,
    block_size: int,
    table: Int32[Tensor, "b m2"] | None = None,
    dtype: torch.dtype | None = None,
    codes: str = "",
    number: float = 1.0,
    scales: Float32[Tensor, "..."] | None = None,
    sequences: Int32[Tensor, "b"] | None = None,
) -> tuple[Shaped[Tensor, "n2 p2 hk d"], Int32[Tensor, "b m2"]]:
    """Copy the tokens of a batch into a pool of their own, with larger blocks, in order; see `kernels.flash.fa4`.

    Args:
        cache: the pool; codes of fp8 are seen as bytes.
        batch: the lengths and the block table.
        block_size: tokens in a new block, a multiple of `BLOCK_ROWS`.
        table: where to write the new table; new memory if None.
        dtype: the type of the new pool; that of the old one if None.
        codes: what the pool holds, "e4m3", "e5m2" or "int8"; "" for numbers, which are copied as they are.
        number: the scale of all codes, without `scales`.
        scales: of fp8 per head `[hk]`, or per sequence and head `[b, hk]`; of int8 per head and channel `[hk, d]`, or
            per token of the pool and head `[n, p, hk]`.
        sequences: the sequence of the batch that the scales of a sequence are those of; None where they are the same.

    Returns:
        The new pool, with zeros past a sequence's end in its last block and anything in blocks after that, and the
        table that leads to it.
    """
    _, old_block_size, num_kv_heads, head_size = cache.shape
    assert batch.block_table is not None  # the path has checked it
    columns = -(-batch.max_seq_len // block_size)
    pool = cache.new_empty(batch.num_seqs * columns, block_size, num_kv_heads, head_size, dtype=dtype)
    table = batch.block_table.new_empty(batch.num_seqs, columns) if table is None else table
    if not len(pool):
        return pool, table
    per, strides = _layout_of(scales, codes)
    rows = min(BLOCK_ROWS, max(1, MOST_ELEMENTS // (pad(num_kv_heads) * pad(head_size))))
    _repage_kernel[len(pool) * block_size // rows,](
        cache,
        pool,
        table,
        batch.block_table,
        batch.seq_lens,
        scales,
        number,
        sequences,
        cache.stride(),
        batch.block_table.stride(),
        strides,
        columns,
        NUM_KV_HEADS=num_kv_heads,
        HEAD_SIZE=head_size,
        OLD_BLOCK_SIZE=old_block_size,
        BLOCK_SIZE=block_size,
        BLOCK_ROWS=rows,
        CODES=codes,
        PER=per,
        HAS_FP8_CVT=converts_fp8(cache.device),
    )
    return pool, table


def _layout_of(scales: Tensor | None, codes: str) -> tuple[str, tuple[int, ...]]:
    """Return what there is a scale for, and the strides; one of 0 for the sequences where all have the same."""
    if scales is None:
        return "number", ()
    if codes == "int8":
        return "token" if scales.ndim == 3 else "channel", scales.stride()
    return "sequence", (0, *scales.stride()) if scales.ndim == 1 else scales.stride()


@triton.jit(do_not_specialize=["table", "block_table", "seq_lens", "columns"])
@no_type_check
def _repage_kernel(
    cache,
    pool,
    table,
    block_table,
    seq_lens,
    scales,
    number,
    sequences,
    cache_strides,
    table_strides,
    scale_strides,
    columns,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    OLD_BLOCK_SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    CODES: tl.constexpr,
    PER: tl.constexpr,
    HAS_FP8_CVT: tl.constexpr,
):
    # A program copies a few tokens of a sequence, with all their heads.
    first_row = tl.program_id(0).to(tl.int64) * BLOCK_ROWS
    if first_row % BLOCK_SIZE == 0:
        tl.store(table + first_row // BLOCK_SIZE, (first_row // BLOCK_SIZE).to(tl.int32))
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
    head, at_d = (column // HEAD_PAD).to(tl.int64), (column % HEAD_PAD).to(tl.int64)
    is_column = (head < NUM_KV_HEADS) & (at_d < HEAD_SIZE)
    place = token % OLD_BLOCK_SIZE
    source = block * cache_strides[0] + place * cache_strides[1]
    within = head * cache_strides[2] + at_d * cache_strides[3]
    mask = is_token[:, None] & is_column[None, :]
    rows = tl.load(cache + source[:, None] + within[None, :], mask, 0)
    if CODES != "":
        if PER == "token":
            at_head = tl.arange(0, HEADS_PAD).to(tl.int64)
            of_tokens = block * scale_strides[0] + place * scale_strides[1]
            at_scale = of_tokens[:, None] + (at_head * scale_strides[2])[None, :]
            of_heads = tl.load(scales + at_scale, is_token[:, None] & (at_head < NUM_KV_HEADS)[None, :], 0.0)
            scale = tl.broadcast_to(of_heads[:, :, None], [BLOCK_ROWS, HEADS_PAD, HEAD_PAD])
            scale = tl.reshape(scale, [BLOCK_ROWS, HEADS_PAD * HEAD_PAD])
        elif PER == "channel":
            scale = tl.load(scales + head * scale_strides[0] + at_d * scale_strides[1], is_column, 0.0)[None, :]
        elif PER == "sequence":
            member = sequence
            if sequences is not None:
                member = tl.load(sequences + sequence).to(tl.int64)
            scale = tl.load(scales + member * scale_strides[0] + head * scale_strides[1], is_column, 0.0)[None, :]
        else:
            scale = number
        rows = dequantize(rows, CODES, HAS_FP8_CVT).to(tl.float32) * scale
    target = (first_row + tl.arange(0, BLOCK_ROWS)) * (NUM_KV_HEADS * HEAD_SIZE)
    at_target = target[:, None] + (head * HEAD_SIZE + at_d)[None, :]
    tl.store(pool + at_target, rows.to(pool.dtype.element_ty), mask=is_column[None, :])
