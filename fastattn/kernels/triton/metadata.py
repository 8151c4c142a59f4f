"""Compute the lengths, tables and slots of a step, each in one launch; called by the paths of `fastattn` on a GPU.

With torch's operations, each of them would take ten to twenty launches, and a decode of a small model would have to
wait for all of them.
"""

from typing import no_type_check

import torch
import triton
import triton.language as tl
from jaxtyping import Int32, Int64
from torch import Tensor

from refattn.batch import Batch
from refattn.trees import Trees

BLOCK_COLUMNS = 256
BLOCK_TOKENS = 128
BLOCK_NODES = 64


def cut_chunks(
    batch: Batch, chunk_size: int, *, block_size: int, num_chunks: int, columns: int
) -> tuple[Int32[Tensor, "_"], Int32[Tensor, "v"], Int32[Tensor, "v"], Int32[Tensor, "v columns"]]:
    """Cut each sequence into `num_chunks` virtual ones; see `fastattn.kernels.torch_ops.metadata.cut_chunks`.

    Args:
        batch: the lengths and the block table.
        chunk_size: tokens in a chunk.
        block_size: tokens in a block.
        num_chunks: virtual sequences of each sequence.
        columns: blocks of a virtual sequence.

    Returns:
        `cu_seqlens_q`, the first key, `seq_lens` and the block table of the virtual sequences.
    """
    assert batch.block_table is not None
    virtual = batch.num_seqs * num_chunks
    cu_seqlens_q = batch.cu_seqlens_q.new_empty(virtual + 1)
    first_keys, seq_lens = batch.seq_lens.new_empty(virtual), batch.seq_lens.new_empty(virtual)
    block_table = batch.block_table.new_empty(virtual, columns)
    if virtual == 0:
        return cu_seqlens_q.zero_(), first_keys, seq_lens, block_table
    _cut_chunks_kernel[(batch.num_seqs, num_chunks)](
        batch.cu_seqlens_q,
        batch.seq_lens,
        batch.block_table,
        cu_seqlens_q,
        first_keys,
        seq_lens,
        block_table,
        batch.block_table.stride(),
        batch.block_table.shape[1],
        columns,
        chunk_size,
        block_size,
        BLOCK_COLUMNS=BLOCK_COLUMNS,
    )
    return cu_seqlens_q, first_keys, seq_lens, block_table


def trim(
    batch: Batch, left: int, *, block_size: int, columns: int
) -> tuple[Int32[Tensor, "b"], Int32[Tensor, "b"], Int32[Tensor, "b columns"]]:
    """Cut off the blocks that no query sees; see `fastattn.kernels.torch_ops.metadata.trim`.

    Args:
        batch: the lengths and the block table.
        left: tokens that a query sees before itself.
        block_size: tokens in a block.
        columns: blocks that are kept of a sequence, at most.

    Returns:
        The first key that is kept, `seq_lens` and the block table.
    """
    assert batch.block_table is not None
    first_keys, seq_lens = torch.empty_like(batch.seq_lens), torch.empty_like(batch.seq_lens)
    block_table = batch.block_table.new_empty(batch.num_seqs, columns)
    if batch.num_seqs:
        _trim_kernel[(batch.num_seqs,)](
            batch.cu_seqlens_q,
            batch.seq_lens,
            batch.block_table,
            first_keys,
            seq_lens,
            block_table,
            batch.block_table.stride(),
            batch.block_table.shape[1],
            columns,
            left,
            block_size,
            BLOCK_COLUMNS=BLOCK_COLUMNS,
        )
    return first_keys, seq_lens, block_table


def slot_mapping(batch: Batch, num_tokens: int, *, block_size: int) -> Int64[Tensor, "t"]:
    """Return the slot that each new token is written to; see `fastattn.metadata.slot_mapping`.

    Args:
        batch: the lengths and the block table.
        num_tokens: query rows, padding included.
        block_size: tokens in a block.

    Returns:
        A slot for each row; -1 for padding rows and for positions below 0.
    """
    assert batch.block_table is not None
    slots = torch.empty(num_tokens, dtype=torch.int64, device=batch.device)
    if num_tokens:
        _slots_kernel[(triton.cdiv(num_tokens, BLOCK_TOKENS),)](
            batch.cu_seqlens_q,
            batch.seq_lens,
            batch.block_table,
            slots,
            batch.block_table.stride(),
            batch.num_seqs,
            batch.num_seqs.bit_length(),
            num_tokens,
            block_size,
            BLOCK_TOKENS=BLOCK_TOKENS,
        )
    return slots


def draw_trees(
    batch: Batch, trees: Trees, num_tokens: int
) -> tuple[Int32[Tensor, "b w"], Int64[Tensor, "b w words"], Int32[Tensor, "t"]]:
    """Find the depths, the ancestors and the positions of nodes; see `fastattn.kernels.torch_ops.metadata.draw_trees`.

    Every node walks up to its root by itself, so a program takes as many steps as its deepest branch has nodes.

    Args:
        batch: the lengths.
        trees: the trees.
        num_tokens: query rows, padding included.

    Returns:
        The depths, the ancestor masks, and the positions of the query rows, 0 for padding.
    """
    b, w = trees.parents.shape
    depths = trees.parents.new_empty(b, w)
    ancestors = torch.empty(b, w, trees.num_words, dtype=torch.int64, device=batch.device)
    positions = trees.parents.new_zeros(num_tokens)
    if b and w:
        _draw_trees_kernel[(b, triton.cdiv(w, BLOCK_NODES))](
            trees.parents,
            trees.lens,
            batch.cu_seqlens_q,
            batch.seq_lens,
            depths,
            ancestors,
            positions,
            trees.parents.stride(),
            trees.lens.stride(0),
            w,
            num_tokens,
            MASK_WORDS=trees.num_words,
            WORDS_PAD=triton.next_power_of_2(trees.num_words),
            BLOCK_NODES=BLOCK_NODES,
        )
    return depths, ancestors, positions


@triton.jit
@no_type_check
def _copy_row(row, new_row, stride, first, last, columns, BLOCK_COLUMNS: tl.constexpr):
    """Copy `columns` entries from `first` on; past `last`, where there is no key, repeat that entry."""
    for begin in range(0, columns, BLOCK_COLUMNS):
        column = begin + tl.arange(0, BLOCK_COLUMNS).to(tl.int64)
        blocks = tl.load(row + tl.minimum(first + column, last) * stride, mask=column < columns)
        tl.store(new_row + column, blocks, mask=column < columns)


@triton.jit(do_not_specialize=["table_columns", "columns"])
@no_type_check
def _cut_chunks_kernel(
    cu_seqlens_q,
    seq_lens,
    block_table,
    new_cu_seqlens_q,
    new_first_keys,
    new_seq_lens,
    new_block_table,
    table_strides,
    table_columns,
    columns,
    chunk_size,
    block_size,
    BLOCK_COLUMNS: tl.constexpr,
):
    """Make the virtual sequence of one chunk of a sequence.

    In 64 bits, as a chunk may end past the largest int32.
    """
    sequence = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    first_row = tl.load(cu_seqlens_q + sequence)
    last_row = tl.load(cu_seqlens_q + sequence + 1)
    seq_len = tl.load(seq_lens + sequence).to(tl.int64)
    context_len = seq_len - (last_row - first_row)
    # Division rounds towards 0 here, and the chunk of a negative position is the one below.
    first_chunk = (context_len - tl.where(context_len < 0, chunk_size - 1, 0)) // chunk_size
    begin = (first_chunk + chunk) * chunk_size
    end = tl.minimum(begin + chunk_size, seq_len)
    first_key = tl.maximum(begin, 0)

    place = sequence * tl.num_programs(1) + chunk
    tl.store(new_cu_seqlens_q + place + 1, last_row - seq_len + end)
    tl.store(new_first_keys + place, first_key)
    has_query = end > tl.maximum(begin, context_len)
    tl.store(new_seq_lens + place, tl.where(has_query, tl.maximum(end - first_key, 0), 0))
    if place == 0:
        tl.store(new_cu_seqlens_q, first_row)
    row = block_table + sequence * table_strides[0]
    new_row = new_block_table + place * columns
    _copy_row(row, new_row, table_strides[1], first_key // block_size, table_columns - 1, columns, BLOCK_COLUMNS)


@triton.jit(do_not_specialize=["table_columns", "columns", "left"])
@no_type_check
def _trim_kernel(
    cu_seqlens_q,
    seq_lens,
    block_table,
    new_first_keys,
    new_seq_lens,
    new_block_table,
    table_strides,
    table_columns,
    columns,
    left,
    block_size,
    BLOCK_COLUMNS: tl.constexpr,
):
    """Trim one sequence.

    In 64 bits, as a window may begin before the smallest int32.
    """
    sequence = tl.program_id(0).to(tl.int64)
    seq_len = tl.load(seq_lens + sequence).to(tl.int64)
    query_len = tl.load(cu_seqlens_q + sequence + 1) - tl.load(cu_seqlens_q + sequence)
    cut = tl.maximum(seq_len - query_len - left, 0) // block_size
    tl.store(new_first_keys + sequence, cut * block_size)
    tl.store(new_seq_lens + sequence, seq_len - cut * block_size)
    row = block_table + sequence * table_strides[0]
    new_row = new_block_table + sequence * columns
    _copy_row(row, new_row, table_strides[1], cut, table_columns - 1, columns, BLOCK_COLUMNS)


@triton.jit(do_not_specialize=["num_seqs", "steps", "num_tokens"])
@no_type_check
def _slots_kernel(
    cu_seqlens_q,
    seq_lens,
    block_table,
    slots,
    table_strides,
    num_seqs,
    steps,
    num_tokens,
    block_size,
    BLOCK_TOKENS: tl.constexpr,
):
    """Find the sequence of each row by binary search, then its block and its place in it."""
    row = tl.program_id(0) * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)
    low = tl.zeros([BLOCK_TOKENS], tl.int64)
    high = low + num_seqs  # the sequence is in low..high, or num_seqs for padding
    for _ in range(steps):
        middle = (low + high) // 2
        ends = tl.load(cu_seqlens_q + middle + 1, mask=middle < num_seqs, other=0)
        before = (middle < num_seqs) & (ends <= row)
        low = tl.where(before, middle + 1, low)
        high = tl.where(before, high, middle)
    real = (low < num_seqs) & (row < num_tokens)
    position = tl.load(seq_lens + low, mask=real, other=0).to(tl.int64) + row
    position -= tl.load(cu_seqlens_q + low + 1, mask=real, other=0)
    real &= position >= 0
    block = tl.load(
        block_table + low * table_strides[0] + position // block_size * table_strides[1], mask=real, other=0
    )
    slot = block.to(tl.int64) * block_size + position % block_size
    tl.store(slots + row, tl.where(real, slot, -1), mask=row < num_tokens)


@triton.jit(do_not_specialize=["parents", "tree_lens", "cu_seqlens_q", "seq_lens", "tree_width", "num_tokens"])
@no_type_check
def _draw_trees_kernel(
    parents,
    tree_lens,
    cu_seqlens_q,
    seq_lens,
    depths,
    ancestors,
    positions,
    parent_strides,
    lens_stride,
    tree_width,
    num_tokens,
    MASK_WORDS: tl.constexpr,
    WORDS_PAD: tl.constexpr,
    BLOCK_NODES: tl.constexpr,
):
    sequence = tl.program_id(0).to(tl.int64)
    node = tl.program_id(1) * BLOCK_NODES + tl.arange(0, BLOCK_NODES)
    tree_len = tl.load(tree_lens + sequence * lens_stride)
    is_node = node < tree_len
    word = tl.arange(0, WORDS_PAD)[None, :]
    mask = tl.zeros([BLOCK_NODES, WORDS_PAD], tl.int64)
    depth = tl.zeros([BLOCK_NODES], tl.int32)
    at = tl.where(is_node, node, -1)
    one = tl.full([BLOCK_NODES, WORDS_PAD], 1, tl.int64)
    while tl.max(at, 0) >= 0:
        seen = (at >= 0)[:, None] & (at[:, None] // 64 == word)
        mask |= tl.where(seen, one << (tl.where(at >= 0, at, 0) % 64).to(tl.int64)[:, None], 0)
        parent = tl.load(parents + sequence * parent_strides[0] + at * parent_strides[1], mask=at >= 0, other=-1)
        at = tl.minimum(parent, at - 1)  # ends for any entry
        depth += (at >= 0).to(tl.int32)
    places = sequence * tree_width + node
    tl.store(depths + places, depth, mask=node < tree_width)
    tl.store(
        ancestors + places[:, None] * MASK_WORDS + word, mask, mask=(node < tree_width)[:, None] & (word < MASK_WORDS)
    )
    row = tl.load(cu_seqlens_q + sequence + 1) - tree_len + node  # the query rows are the last nodes
    is_row = is_node & (row >= tl.load(cu_seqlens_q + sequence)) & (row < num_tokens)
    tl.store(positions + row, tl.load(seq_lens + sequence) - tree_len + depth, mask=is_row)
