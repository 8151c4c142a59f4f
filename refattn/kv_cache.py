"""The paged cache: a pool of blocks, written by slot, gathered by block table, copied and swapped by block.

    pool of n = 4 blocks of p = 2 tokens      a sequence of 5 tokens with blocks [2, 0, 3]
    block 0   token 2  token 3
    block 1   (free)   (free)                 token 4 is row 0 of block 3:
    block 2   token 0  token 1                slot = block * p + row = 3 * 2 + 0 = 6
    block 3   token 4  (free)

A cache is always indexed `[n, p, hk, d]`, whatever its layout in memory: NHD is that order; HND stores the tokens of
one head together, seen through a strided view.

Source: Kwon et al. 2023, "Efficient Memory Management for Large Language Model Serving with PagedAttention".
"""

from collections.abc import Sequence

import torch
from jaxtyping import Int32, Int64, Shaped
from torch import Tensor

from refattn import allocation
from refattn.checks import rows_with_slots
from refattn.checks_of_writes import check_block_pairs, check_gather, check_slots
from refattn.modes import without_autocast

allocate = allocation.allocate_pages


def write(
    key: Shaped[Tensor, "rows hk d"],
    value: Shaped[Tensor, "rows hk dv"],
    key_cache: Shaped[Tensor, "n p hk d"],
    value_cache: Shaped[Tensor, "n p hk dv"],
    slot_mapping: Int64[Tensor, "t"],
) -> None:
    """Write new tokens into the pool, in place: token `t` goes to row `slot % p` of block `slot // p`.

    Args:
        key: the new keys; rows after the last slot are padding.
        value: the new values.
        key_cache: the pool of keys, changed in place.
        value_cache: the pool of values, changed in place.
        slot_mapping: the slot of each token, each slot at most once; -1 is padding and is not written.

    Raises:
        ValueError: if types, shapes or devices do not match, or the tokens share memory with a pool; on a CPU also if a
            slot is outside the pool or is given twice. Nothing is written then.
    """
    key, value = rows_with_slots(key, value, slot_mapping)
    check_slots(key, value, key_cache, value_cache, slot_mapping)
    for token, slot in enumerate(slot_mapping.tolist()):
        if slot == -1:
            continue
        block, row = divmod(slot, key_cache.shape[1])
        key_cache[block, row] = key[token]
        value_cache[block, row] = value[token]


@without_autocast
def gather(cache: Shaped[Tensor, "n p hk d"], blocks: Int32[Tensor, "m"], seq_len: int) -> Shaped[Tensor, "s hk d"]:
    """Read the keys or the values of one sequence, in order.

    Args:
        cache: the pool.
        blocks: the sequence's row of the block table; entries past its last block are not read.
        seq_len: tokens of the sequence, `s`.

    Returns:
        A copy of its tokens.

    Raises:
        ValueError: if there are too few blocks; on a CPU also if a block is outside the pool.
    """
    check_gather(cache, blocks, seq_len)
    j, block_size = torch.arange(seq_len, device=cache.device), cache.shape[1]
    return cache[blocks[j // block_size].long(), j % block_size]


def copy_blocks(caches: Sequence[Shaped[Tensor, "n ..."]], pairs: Int64[Tensor, "k 2"]) -> None:
    """Copy whole blocks inside their pools, in place; all sources are read before any write.

    Args:
        caches: pools with the block as first dimension; each gets the same copies. Pass a `[2, n, p, hk, d]` pool of
            keys and values as `pool.unbind(0)`, an `[n, 2, p, hk, d]` pool as `[pool]`.
        pairs: source and destination block of each copy; a destination may occur only once.

    Raises:
        ValueError: if a block is outside a pool or is written twice, or two pools share memory: pass a pool that layers
            share only once. Nothing is written then.
    """
    check_block_pairs(caches, caches, pairs, names=("caches", "caches"))
    _copy(caches, caches, pairs)


def swap_blocks(
    sources: Sequence[Shaped[Tensor, "n ..."]],
    destinations: Sequence[Shaped[Tensor, "n2 ..."]],
    pairs: Int64[Tensor, "k 2"],
) -> None:
    """Copy whole blocks from pools to other pools, which may be on another device (swap out to the host and in again).

    Args:
        sources: pools with the block as first dimension.
        destinations: as many pools of the same block shape and type, changed in place; their number of blocks and
            their device may differ.
        pairs: source and destination block of each copy; a destination may occur only once.

    Raises:
        ValueError: if the pools do not match, a block is outside its pool or is written twice, or a destination shares
            memory with another destination or with another's source. Nothing is written then.
    """
    check_block_pairs(sources, destinations, pairs)
    _copy(sources, destinations, pairs)


def _copy(sources: Sequence[Tensor], destinations: Sequence[Tensor], pairs: Tensor) -> None:
    for source, destination in zip(sources, destinations, strict=True):
        blocks = [source[block].clone() for block, _ in pairs.tolist()]
        for block, (_, target) in zip(blocks, pairs.tolist(), strict=True):
            destination[target] = block
