"""41 · Warp specialization: a producer and a consumer, in Gluon."""

from typing import no_type_check

import torch
from jaxtyping import Float
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from twinattn.course.gluon.interpret import Interpreted

SIZE = gl.constexpr(64)  # queries, keys of a tile, and numbers of each
BYTES = gl.constexpr(64 * 64 * 2)  # bytes of a tile
SLOTS = gl.constexpr(2)
SHARED = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2))
BLOCKED = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))
SCORES = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))  # what a product returns


@gluon.jit
@no_type_check
def load(key_tiles, keys, full, empty, num_keys):
    """Copy the keys to shared memory, tile i into slot i % SLOTS; the last tile may have fewer keys, and then zeros.

    `keys.index(slot)` is a slot, and `full.index(slot)` and `empty.index(slot)` are its barriers; each expects one
    arrival. In round 0 a slot has its first tile, in round 1 its second, and so on: tile i has round i // SLOTS.

        mbarrier.wait(barrier, parity)         wait until the phase of a parity is over: 0 for phase 0, 1 for phase 1,
                                               0 for phase 2 and so on; at phase 0, a wait for parity 1 is over at once
        mbarrier.expect(barrier, BYTES)        arrive at `full`; its phase is over when as many bytes have come, too
        tma.async_copy_global_to_shared(key_tiles, [row, column], barrier, slot)
                                               start to copy the tile of keys from a row on; its bytes count at `full`
    """
    raise NotImplementedError


@gluon.jit
@no_type_check
def multiply(queries, keys, full, empty, out, num_keys):
    """Multiply all queries with the keys of each tile, store the scores, and give the slot back to `load`.

    A product takes a tile as [numbers, keys]. A slot has [keys, numbers]; its `.permute((1, 0))` is the same memory,
    transposed. As it is started with `use_acc=False`, `zeros` only says what it returns.

        zeros = gl.zeros([SIZE, SIZE], gl.float32, SCORES)
        scores = warpgroup_mma(queries, tile, zeros, use_acc=False, is_async=True)      start a product, and go on
        scores = warpgroup_mma_wait(0, deps=[scores])     wait until no product is under way
        mbarrier.arrive(barrier)                          arrive at `empty`: this ends its phase
        store(out, scores, tile, num_keys)                store the scores of a tile, by its number
    """
    raise NotImplementedError


@gluon.jit
@no_type_check
def store(out, scores, tile, num_keys):
    """Store the scores of a tile, without what is past the last key."""
    rows = gl.arange(0, SIZE, layout=gl.SliceLayout(1, SCORES))[:, None]
    columns = tile * SIZE + gl.arange(0, SIZE, layout=gl.SliceLayout(0, SCORES))[None, :]
    gl.store(out + (rows * num_keys + columns), scores, mask=columns < num_keys)


@gluon.jit
@no_type_check
def pipeline_kernel(query, key_tiles, out, num_keys):
    """Compute scores, with four warps that multiply and one that loads ahead of them."""
    rows = gl.arange(0, SIZE, layout=gl.SliceLayout(1, BLOCKED))[:, None]
    columns = gl.arange(0, SIZE, layout=gl.SliceLayout(0, BLOCKED))[None, :]
    tile = gl.load(query + (rows * SIZE + columns))
    queries = gl.allocate_shared_memory(gl.float16, [SIZE, SIZE], SHARED, tile)
    keys = gl.allocate_shared_memory(gl.float16, [SLOTS, SIZE, SIZE], SHARED)
    full = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(SLOTS):
        mbarrier.init(full.index(slot), count=1)
        mbarrier.init(empty.index(slot), count=1)
    fence_async_shared()  # queries are written by threads, which products see only behind a fence
    gl.warp_specialize(
        [(multiply, (queries, keys, full, empty, out, num_keys)), (load, (key_tiles, keys, full, empty, num_keys))],
        [1],  # warps of `load`
        [24],  # registers of each of its threads
    )


def gluon_pipeline(query: Float[Tensor, "64 64"], key: Float[Tensor, "s 64"]) -> Float[Tensor, "orders 64 s"]:
    """Return query @ key.T in float32, by the kernel on a CPU, once in each of 24 orders of what runs together."""
    tiles = TensorDescriptor(key, list(key.shape), [64, 1], [64, 64], SHARED.value)
    out = torch.zeros(24, 64, len(key))
    kernel = Interpreted(pipeline_kernel)
    for scores in out:
        kernel[(1,)](query, tiles, scores, len(key), num_warps=4)
    return out
