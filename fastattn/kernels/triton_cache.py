"""Move rows and blocks of the paged cache, each job in one launch; `fastattn.kv_cache` calls these on CUDA.

Source: Kwon et al. 2023, "PagedAttention": its cache kernels.
"""

from typing import no_type_check

import torch
import triton
import triton.language as tl
from jaxtyping import Int32, Int64, Shaped
from torch import Tensor

from refattn.batch import Batch

BLOCK_ROWS = 16
MAX_PAIRS = 1024  # copies that one program can hold


def write(
    key: Shaped[Tensor, "t hk d"],
    value: Shaped[Tensor, "t hk dv"],
    key_cache: Shaped[Tensor, "n p hk d"],
    value_cache: Shaped[Tensor, "n p hk dv"],
    slot_mapping: Int64[Tensor, "t"],
) -> None:
    """Write new keys and values into the pool, in place; see `fastattn.kv_cache.write`.

    Args:
        key: the new keys; any strides, as all tensors here.
        value: the new values.
        key_cache: the pool of keys.
        value_cache: the pool of values.
        slot_mapping: the slot of each token; -1 is written nowhere.
    """
    num_tokens, num_kv_heads, head_size = key.shape
    rows = num_tokens * num_kv_heads
    if rows == 0:
        return
    key, value, key_cache, value_cache = (_bytes(x) for x in (key, value, key_cache, value_cache))
    _write_kernel[(-(-rows // BLOCK_ROWS),)](
        key,
        value,
        key_cache,
        value_cache,
        slot_mapping,
        key.stride(),
        value.stride(),
        key_cache.stride(),
        value_cache.stride(),
        slot_mapping.stride(0),
        rows,
        NUM_KV_HEADS=num_kv_heads,
        HEAD_SIZE=head_size,
        VALUE_HEAD_SIZE=value.shape[-1],
        BLOCK_SIZE=key_cache.shape[1],
        BLOCK_ROWS=BLOCK_ROWS,
    )


def can_copy(cache: Shaped[Tensor, "n ..."], num_pairs: int) -> bool:
    """Say whether `copy_blocks` can make so many copies: one program has to hold them, and a block has no gaps."""
    last = sum(stride * (size - 1) for stride, size in zip(cache.stride()[1:], cache.shape[1:], strict=True))
    return num_pairs <= MAX_PAIRS and last == cache.shape[1:].numel() - 1


def copy_blocks(cache: Shaped[Tensor, "n ..."], pairs: Int64[Tensor, "k 2"]) -> None:
    """Copy whole blocks inside a pool, in place, every source as it was before; see `fastattn.kv_cache.copy_blocks`.

    One program takes the same few elements of all blocks, reads them all and then writes them all, so that a block may
    be a source and a destination.

    Args:
        cache: the pool, with the block as its first dimension.
        pairs: source and destination block of each copy, such as `can_copy` allows; each destination once.
    """
    num_pairs = pairs.shape[0]
    if num_pairs == 0 or cache.numel() == 0:
        return
    cache = _bytes(cache)
    block_elements = cache[0].numel()
    block_pairs = 1 << (num_pairs - 1).bit_length()
    block = max(8, min(2048, 8192 // block_pairs))
    _copy_kernel[(-(-block_elements // block),)](
        cache,
        pairs,
        cache.stride(0),
        pairs.stride(),
        num_pairs,
        block_elements,
        BLOCK_PAIRS=block_pairs,
        BLOCK=block,
    )


def repage(
    cache: Shaped[Tensor, "n p hk d"], batch: Batch, *, block_size: int
) -> tuple[Shaped[Tensor, "n2 p2 hk d"], Int32[Tensor, "b m2"]]:
    """Copy the tokens of a batch into a pool of their own, with larger blocks, in order; see `fastattn.kernels.fa4`.

    Args:
        cache: the pool.
        batch: the lengths and the block table.
        block_size: tokens in a new block, a multiple of `BLOCK_ROWS`.

    Returns:
        The new pool, with zeros behind a sequence's end in its last block and anything in blocks behind that, and the
        table that leads to it.
    """
    _, old_block_size, num_kv_heads, head_size = cache.shape
    assert batch.block_table is not None  # the path has checked it
    columns = -(-batch.max_seq_len // block_size)
    dtype, cache = cache.dtype, _bytes(cache)
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
    return pool.view(dtype), table


def _bytes(x: Tensor) -> Tensor:
    """See elements of one byte as bytes: an 8-bit float can be moved by GPUs that can't compute with it."""
    return x.view(torch.uint8) if x.element_size() == 1 else x


@triton.jit(do_not_specialize=["slot_mapping", "rows"])
@no_type_check
def _write_kernel(
    key,
    value,
    key_cache,
    value_cache,
    slot_mapping,
    key_strides,
    value_strides,
    key_cache_strides,
    value_cache_strides,
    slot_stride,
    rows,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    VALUE_HEAD_SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
):
    # A row is a head of a token.
    row = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    token, head = row // NUM_KV_HEADS, row % NUM_KV_HEADS
    slot = tl.load(slot_mapping + token * slot_stride, row < rows, -1)
    is_written = (slot >= 0)[:, None]
    slot = tl.maximum(slot, 0)
    block, place = slot // BLOCK_SIZE, slot % BLOCK_SIZE
    HEAD_PAD: tl.constexpr = triton.next_power_of_2(HEAD_SIZE)
    VALUE_PAD: tl.constexpr = triton.next_power_of_2(VALUE_HEAD_SIZE)
    at_d = tl.arange(0, HEAD_PAD)[None, :]
    at_dv = tl.arange(0, VALUE_PAD)[None, :]

    keys = tl.load(
        key + (token * key_strides[0] + head * key_strides[1])[:, None] + at_d * key_strides[2],
        is_written & (at_d < HEAD_SIZE),
    )
    values = tl.load(
        value + (token * value_strides[0] + head * value_strides[1])[:, None] + at_dv * value_strides[2],
        is_written & (at_dv < VALUE_HEAD_SIZE),
    )
    key_rows = block * key_cache_strides[0] + place * key_cache_strides[1] + head * key_cache_strides[2]
    tl.store(key_cache + key_rows[:, None] + at_d * key_cache_strides[3], keys, is_written & (at_d < HEAD_SIZE))
    value_rows = block * value_cache_strides[0] + place * value_cache_strides[1] + head * value_cache_strides[2]
    tl.store(
        value_cache + value_rows[:, None] + at_dv * value_cache_strides[3],
        values,
        is_written & (at_dv < VALUE_HEAD_SIZE),
    )


@triton.jit(do_not_specialize=["pairs", "num_pairs"])
@no_type_check
def _copy_kernel(
    cache,
    pairs,
    block_stride,
    pair_strides,
    num_pairs,
    block_elements,
    BLOCK_PAIRS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    at_pair = tl.arange(0, BLOCK_PAIRS)
    at = (tl.program_id(0) * BLOCK + tl.arange(0, BLOCK))[None, :]
    is_pair = at_pair < num_pairs
    source = tl.load(pairs + at_pair * pair_strides[0], is_pair, 0)
    destination = tl.load(pairs + at_pair * pair_strides[0] + pair_strides[1], is_pair, 0)
    mask = is_pair[:, None] & (at < block_elements)
    elements = tl.load(cache + source[:, None] * block_stride + at, mask)
    tl.debug_barrier()  # all have read before the first writes
    tl.store(cache + destination[:, None] * block_stride + at, elements, mask)


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
