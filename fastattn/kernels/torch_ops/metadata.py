"""The tables of a step in plain torch, on any device: slots, windows, chunks, trees."""

import torch
from einops import rearrange
from jaxtyping import Int32, Int64
from torch import Tensor

from fastattn.kernels.problem import places
from refattn.batch import Batch
from refattn.trees import Trees


def slot_mapping(batch: Batch, num_tokens: int, block_size: int) -> Int64[Tensor, "t"]:
    """Compute the slot of each new token; see `fastattn.metadata.slot_mapping`."""
    assert batch.block_table is not None  # the path has checked it
    sequence, place, padding = places(batch, num_tokens)
    nowhere = padding | (place < 0)
    place = place.masked_fill(nowhere, 0)
    block = batch.block_table[sequence, place // block_size].long()
    return (block * block_size + place % block_size).masked_fill(nowhere, -1)


def trim(
    batch: Batch, left: int, block_size: int, columns: int
) -> tuple[Int32[Tensor, "b"], Int32[Tensor, "b"], Int32[Tensor, "b columns"]]:
    """Cut off the blocks that no query sees; see `fastattn.sliding_window.plan`.

    Args:
        batch: the lengths and the block table.
        left: tokens that a query sees before itself.
        block_size: tokens in a block.
        columns: blocks that are kept of a sequence, at most.

    Returns:
        The first key that is kept of each sequence, its number of keys, and its blocks. Past its last block a row
        repeats the last column of the table: no key is there.
    """
    assert batch.block_table is not None  # the path has checked it
    # In 64 bits, as a window may begin before the smallest int32.
    cut = ((batch.context_lens.long() - left).clamp(min=0) // block_size).int()  # [b], in blocks
    used = rearrange(cut, "b -> b 1") + torch.arange(columns, device=batch.device)
    table = batch.block_table.gather(1, used.clamp(max=batch.block_table.shape[1] - 1))
    return cut * block_size, batch.seq_lens - cut * block_size, table


def cut_chunks(
    batch: Batch, chunk_size: int, block_size: int, num_chunks: int, columns: int
) -> tuple[Int32[Tensor, "_"], Int32[Tensor, "v"], Int32[Tensor, "v"], Int32[Tensor, "v columns"]]:
    """Cut each sequence into `num_chunks` virtual ones; see `fastattn.local.plan`.

    Args:
        batch: the lengths and the block table.
        chunk_size: tokens in a chunk.
        block_size: tokens in a block.
        num_chunks: virtual sequences of each sequence.
        columns: blocks of a virtual sequence.

    Returns:
        `cu_seqlens_q`, the first key, `seq_lens` and the block table of the virtual sequences.
    """
    assert batch.block_table is not None  # the path has checked it
    # In 64 bits, as a chunk may end past the largest int32.
    seq_lens, context_lens = (rearrange(x.long(), "b -> b 1") for x in (batch.seq_lens, batch.context_lens))
    number = context_lens // chunk_size + torch.arange(num_chunks, device=batch.device)
    begin = number * chunk_size  # [b, chunks], of each chunk; below 0 where there are more queries than keys
    end = torch.minimum(begin + chunk_size, seq_lens)
    first_key = begin.clamp(min=0)
    num_keys = (end - first_key).clamp(min=0) * (end > torch.maximum(begin, context_lens))  # none without a query
    rows_end = end + rearrange(batch.cu_seqlens_q[1:] - batch.seq_lens, "b -> b 1")  # also of unused chunks
    # Past its last block a row repeats the sequence's last column: no key is there.
    used = rearrange(first_key // block_size, "b chunks -> b chunks 1") + torch.arange(columns, device=batch.device)
    used = rearrange(used.clamp(max=batch.block_table.shape[1] - 1), "b chunks columns -> b (chunks columns)")
    return (
        torch.cat([batch.cu_seqlens_q[:1], rearrange(rows_end.int(), "b chunks -> (b chunks)")]),
        rearrange(first_key.int(), "b chunks -> (b chunks)"),
        rearrange(num_keys.int(), "b chunks -> (b chunks)"),
        rearrange(batch.block_table.gather(1, used), "b (chunks columns) -> (b chunks) columns", chunks=num_chunks),
    )


def draw_trees(
    batch: Batch, trees: Trees, num_tokens: int
) -> tuple[Int32[Tensor, "b w"], Int64[Tensor, "b w words"], Int32[Tensor, "t"]]:
    """Find the ancestors of each node, and the positions of the query rows; see `fastattn.speculative.plan`.

    By pointer jumping: every node jumps up, twice as far each time, and takes over the mask and depth of its target.

    Args:
        batch: the lengths; the query rows of a sequence are the last nodes of its tree.
        trees: the trees.
        num_tokens: query rows, padding included.

    Returns:
        The depth of each node, the mask of the nodes that it sees, both 0 past a tree's last node, and the position of
        each query row, 0 for padding.
    """
    b, w = trees.parents.shape
    node = torch.arange(w, device=batch.device)
    is_node = node < trees.lens[:, None]  # [b, w]
    above = torch.minimum(trees.parents.long(), node - 1).where(is_node, -1)  # padding may be anything
    depth = (above >= 0).int()
    above = torch.where(above >= 0, above, node)  # a root stays where it is
    word = torch.arange(trees.num_words, device=batch.device)
    ancestors = torch.where(node[:, None] // 64 == word, torch.ones_like(word) << node[:, None] % 64, 0)
    ancestors = ancestors.where(is_node[..., None], 0)  # [b, w, words]
    for _ in range((w - 1).bit_length()):
        ancestors = ancestors | ancestors.gather(1, above[..., None].expand_as(ancestors))
        depth = depth + depth.gather(1, above)
        above = above.gather(1, above)
    if b == 0 or w == 0:
        return depth, ancestors, trees.lens.new_zeros(num_tokens)
    sequence, place, padding = places(batch, num_tokens)
    first = (batch.seq_lens - trees.lens)[sequence]
    mine = (place - first).masked_fill(padding, 0).clamp(0, w - 1)
    return depth, ancestors, (first + depth[sequence, mine]).int().masked_fill(padding, 0)
