"""The paged cache, read and written by whole blocks or whole batches; the twin of `refattn.kv_cache`."""

from collections.abc import Sequence

from einops import rearrange
from jaxtyping import Int32, Int64, Shaped
from torch import Tensor

from fastattn import dispatch
from fastattn.kernels.memory import in_memory
from fastattn.kernels.order import forced
from fastattn.kernels.problem import as_bytes, as_integers
from fastattn.kernels.replay import bind_write, bound_write, key_of_write
from refattn import allocation
from refattn.checks import rows_with_slots
from refattn.checks_of_writes import check_block_pairs, check_gather, check_slots
from refattn.modes import refuse_gradients

allocate = allocation.allocate_pages


def write(
    key: Shaped[Tensor, "rows hk d"],
    value: Shaped[Tensor, "rows hk dv"],
    key_cache: Shaped[Tensor, "n p hk d"],
    value_cache: Shaped[Tensor, "n p hk dv"],
    slot_mapping: Int64[Tensor, "t"],
) -> None:
    """Write new tokens into the pool, in place: token `t` goes to row `slot % p` of block `slot // p`.

    Arguments, results and errors are those of `refattn.kv_cache.write`.
    """
    cache_key = key_of_write(forced.get(), key, value, key_cache, value_cache, slot_mapping)
    bound = bound_write(cache_key, (key, value), (key_cache, value_cache))
    if bound is not None:
        bound(key, value, key_cache, value_cache, slot_mapping)
        return
    key, value = rows_with_slots(key, value, slot_mapping)
    check_slots(key, value, key_cache, value_cache, slot_mapping)
    tensors = dict(key=key, value=value, key_cache=key_cache, value_cache=value_cache)
    bind_write(cache_key, dispatch.run("write", **tensors, slot_mapping=slot_mapping), tensors.values())


def gather(cache: Shaped[Tensor, "n p hk d"], blocks: Int32[Tensor, "m"], seq_len: int) -> Shaped[Tensor, "s hk d"]:
    """Read the keys or the values of one sequence, in order; the twin of `refattn.kv_cache.gather`."""
    check_gather(cache, blocks, seq_len)
    cache = in_memory("cache", cache)
    used = blocks[: -(-seq_len // cache.shape[1])]
    rows = rearrange(as_bytes(cache).index_select(0, used), "m p hk d -> (m p) hk d")[:seq_len]
    return rows.view(cache.dtype)


def copy_blocks(caches: Sequence[Shaped[Tensor, "n ..."]], pairs: Int64[Tensor, "k 2"]) -> None:
    """Copy whole blocks inside their pools, in place; all sources are read before any write.

    Arguments, results and errors are those of `refattn.kv_cache.copy_blocks`.
    """
    check_block_pairs(caches, caches, pairs, names=("caches", "caches"))
    dispatch.run_in_each("copy_blocks", caches, pairs=pairs)


def swap_blocks(
    sources: Sequence[Shaped[Tensor, "n ..."]],
    destinations: Sequence[Shaped[Tensor, "n2 ..."]],
    pairs: Int64[Tensor, "k 2"],
) -> None:
    """Copy whole blocks from pools to other pools, which may be on another device (swap out to the host and in again).

    Arguments, results and errors are those of `refattn.kv_cache.swap_blocks`.
    """
    check_block_pairs(sources, destinations, pairs)
    refuse_gradients(dispatch.NO_BACKWARD, sources=sources, destinations=destinations)
    sources = in_memory("sources", sources)
    for source, destination in zip(sources, destinations, strict=True):
        _copy(as_integers(source), as_integers(destination), pairs)


def _copy(source: Tensor, destination: Tensor, pairs: Tensor) -> None:
    blocks = source.index_select(0, pairs[:, 0].to(source.device))
    destination.index_copy_(0, pairs[:, 1].to(destination.device), blocks.to(destination.device))
