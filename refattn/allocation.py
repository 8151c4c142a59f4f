"""Allocation of pools for the keys, latents and states of all sequences.

Nothing here computes attention; both twins use these functions.

    allocate_pages         keys and values, in blocks                  kv_cache, quantized (fp8)
    allocate_int8          the same in int8, with scales of keys       quantized
    allocate_int4          in 4 bits, with scales of both              quantized
    allocate_nvfp4         in 4 bits, with scales of 16 elements       quantized
    allocate_pairs         both halves of pairs of heads               differential
    pools_of_pairs         the four pools in such a cache              differential
    allocate_latents       latents, both key and value                 mla
    allocate_index_keys    keys of the indexer                         sparse
    allocate_states        one matrix per slot and head                state_cache
    allocate_inputs        the last inputs of a convolution            state_cache
    allocate_rings         inputs of a state since its checkpoint      replay
    allocate_cursors       how many inputs each ring holds             replay
"""

from typing import Any

import torch
from einops import rearrange
from jaxtyping import Float, Float32, Int8, Int32, Shaped, UInt8
from torch import Tensor

from refattn.checks import check_device, check_flag, check_memory, check_sizes
from refattn.checks_of_writes import check_int8_pools, check_pairs
from refattn.four_bits import GROUP, GROUP_FORMAT, Int4Scales, Nvfp4Scales
from refattn.index_keys import SCALE_BYTES, check_index_pool
from refattn.packed_latents import packed_size
from refattn.rings import Ring

LAYOUTS = {"NHD": "(n p hk d) -> n p hk d", "HND": "(n hk p d) -> n p hk d"}  # memory order -> index order


def allocate_pages(
    num_blocks: int,
    block_size: int,
    num_kv_heads: int,
    head_size: int,
    *,
    value_head_size: int | None = None,
    layout: str = "NHD",
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> tuple[Shaped[Tensor, "n p hk d"], Shaped[Tensor, "n p hk dv"]]:
    """Allocate a pool of keys and one of values.

    Args:
        num_blocks: blocks in the pool, `n`.
        block_size: tokens in a block, `p`.
        num_kv_heads: KV heads, `hk`.
        head_size: elements of a key, `d`.
        value_head_size: elements of a value, `dv`; `head_size` if None.
        layout: "NHD" (tokens outside heads) or "HND" (heads outside tokens); the index order is the same.
        dtype: dtype of the pool.
        device: device of the pool.

    Returns:
        `key_cache` and `value_cache`, filled with zeros.

    Raises:
        ValueError: if a size is not positive, or there is no such layout, type or device.
    """
    value_head_size = head_size if value_head_size is None else value_head_size
    check_sizes(
        num_blocks=num_blocks,
        block_size=block_size,
        num_kv_heads=num_kv_heads,
        head_size=head_size,
        value_head_size=value_head_size,
    )
    check_memory(dtype, device)
    if layout not in tuple(LAYOUTS):
        raise ValueError(f'layout: expected "NHD" or "HND", got {layout!r}')
    shape = dict(n=num_blocks, p=block_size, hk=num_kv_heads)
    rows = num_blocks * block_size * num_kv_heads
    keys, values = (torch.zeros(rows * size, dtype=dtype, device=device) for size in (head_size, value_head_size))
    return rearrange(keys, LAYOUTS[layout], **shape), rearrange(values, LAYOUTS[layout], **shape)


def allocate_int8(
    num_blocks: int,
    block_size: int,
    num_kv_heads: int,
    head_size: int,
    *,
    value_head_size: int | None = None,
    layout: str = "NHD",
    value_dtype: torch.dtype = torch.int8,
    device: torch.device | str = "cpu",
) -> tuple[Int8[Tensor, "n p hk d"], Shaped[Tensor, "n p hk dv"], Float32[Tensor, "n p hk"]]:
    """Allocate pools of int8 keys and their values as views of one buffer, and a pool of the keys' scales.

        int8 values      | keys | values |          two equal parts if d = dv
        16-bit values    | keys | values        |   one byte per element of a key, two per element of a value

    All values follow all keys in the buffer, not interleaved by block; copy blocks through the views.

    Args:
        num_blocks: blocks in the pool, `n`.
        block_size: tokens in a block, `p`.
        num_kv_heads: KV heads, `hk`.
        head_size: elements of a key, `d`.
        value_head_size: elements of a value, `dv`; `head_size` if None.
        layout: "NHD" (tokens outside heads) or "HND" (heads outside tokens); the index order is the same.
        value_dtype: `torch.int8`, or a floating point type for unquantized values.
        device: device of the pools.

    Returns:
        `key_cache` and `value_cache`, filled with zeros, and the scales of the keys for `Int8Scales.key`, filled with
        ones.

    Raises:
        ValueError: if a size is not positive, the bytes of the keys are not a multiple of the size of a value, or there
            is no such layout, type or device.
    """
    value_head_size = head_size if value_head_size is None else value_head_size
    check_int8_pools(num_blocks, block_size, num_kv_heads, head_size, value_head_size, layout, value_dtype, device)
    shape = dict(n=num_blocks, p=block_size, hk=num_kv_heads)
    rows = num_blocks * block_size * num_kv_heads
    key_bytes, value_bytes = rows * head_size, rows * value_head_size * value_dtype.itemsize
    buffer = torch.zeros(key_bytes + value_bytes, dtype=torch.int8, device=device)
    key_cache = rearrange(buffer[:key_bytes], LAYOUTS[layout], **shape)
    value_cache = rearrange(buffer[key_bytes:].view(value_dtype), LAYOUTS[layout], **shape)
    scales = torch.ones(rows, dtype=torch.float32, device=device)
    return key_cache, value_cache, rearrange(scales, LAYOUTS[layout], **shape)[..., 0]


def allocate_int4(
    num_blocks: int,
    block_size: int,
    num_kv_heads: int,
    head_size: int,
    *,
    value_head_size: int | None = None,
    layout: str = "NHD",
    device: torch.device | str = "cpu",
) -> tuple[UInt8[Tensor, "n p hk half"], UInt8[Tensor, "n p hk value_half"], Int4Scales]:
    """Allocate pools of int4 keys and values, and the scales of both.

    Args:
        num_blocks: blocks in the pool, `n`.
        block_size: tokens in a block, `p`.
        num_kv_heads: KV heads, `hk`.
        head_size: elements of a key, `d`; even.
        value_head_size: elements of a value, `dv`, even; `head_size` if None.
        layout: "NHD" (tokens outside heads) or "HND" (heads outside tokens); the index order is the same.
        device: device of the pools.

    Returns:
        `key_cache` and `value_cache`, filled with zeros, and their scales, filled with zeros.

    Raises:
        ValueError: if a size is not positive or a head size is odd, or there is no such layout or device.
    """
    sizes = num_blocks, block_size, num_kv_heads
    where: dict[str, Any] = dict(layout=layout, device=device)
    halves = _halves(head_size, value_head_size, 2)
    pools = allocate_pages(*sizes, halves[0], value_head_size=halves[1], dtype=torch.uint8, **where)
    of_keys, of_values = allocate_pages(*sizes, 1, dtype=torch.float32, **where)
    return *pools, Int4Scales(of_keys[..., 0], of_values[..., 0])


def allocate_nvfp4(
    num_blocks: int,
    block_size: int,
    num_kv_heads: int,
    head_size: int,
    *,
    value_head_size: int | None = None,
    layout: str = "NHD",
    of_keys: float = 1.0,
    of_values: float = 1.0,
    device: torch.device | str = "cpu",
) -> tuple[UInt8[Tensor, "n p hk half"], UInt8[Tensor, "n p hk value_half"], Nvfp4Scales]:
    """Allocate pools of nvfp4 keys and values, and the scales of both.

    Args:
        num_blocks: blocks in the pool, `n`.
        block_size: tokens in a block, `p`.
        num_kv_heads: KV heads, `hk`.
        head_size: elements of a key, `d`; a multiple of 16.
        value_head_size: elements of a value, `dv`, a multiple of 16; `head_size` if None.
        layout: "NHD" (tokens outside heads) or "HND" (heads outside tokens); the index order is the same.
        of_keys: the number that all scales of keys are multiplied by.
        of_values: that of the values.
        device: device of the pools.

    Returns:
        `key_cache` and `value_cache`, filled with zeros, and their scales, filled with zeros.

    Raises:
        ValueError: if a size is not positive or a head size is no multiple of 16, a number is not above 0, or there is
            no such layout or device.
    """
    sizes = num_blocks, block_size, num_kv_heads
    where: dict[str, Any] = dict(layout=layout, device=device)
    halves = _halves(head_size, value_head_size, GROUP)
    pools = allocate_pages(*sizes, halves[0], value_head_size=halves[1], dtype=torch.uint8, **where)
    groups = (2 * half // GROUP for half in halves)
    scales = allocate_pages(*sizes, next(groups), value_head_size=next(groups), dtype=GROUP_FORMAT, **where)
    return *pools, Nvfp4Scales(*scales, of_keys, of_values)


def _halves(head_size: int, value_head_size: int | None, divisor: int) -> tuple[int, int]:
    """Return half of both head sizes, the bytes of rows of four bits."""
    sizes = dict(head_size=head_size, value_head_size=head_size if value_head_size is None else value_head_size)
    check_sizes(**sizes)
    for name, size in sizes.items():
        if size % divisor:
            raise ValueError(f"{name}: expected a multiple of {divisor} for pages of 4 bits, got {size}")
    return head_size // 2, sizes["value_head_size"] // 2


def allocate_pairs(
    num_blocks: int,
    block_size: int,
    num_kv_heads: int,
    head_size: int,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> Shaped[Tensor, "2 2 n p pairs d"]:
    """Allocate a pool for differential attention, `[half, key or value, n, p, hk/2, d]`.

    Args:
        num_blocks: blocks in the pool, `n`.
        block_size: tokens in a block, `p`.
        num_kv_heads: KV heads, `hk`, an even number.
        head_size: elements of a key and of a value, `d`.
        dtype: dtype of the pool; `torch.float8_e4m3fn` or `torch.float8_e5m2` for a quantized cache.
        device: device of the pool.

    Returns:
        The pool, filled with zeros.

    Raises:
        ValueError: if a size is not positive, the number of heads is odd, or there is no such type or device.
    """
    check_sizes(num_blocks=num_blocks, block_size=block_size, num_kv_heads=num_kv_heads, head_size=head_size)
    check_memory(dtype, device)
    if num_kv_heads % 2:
        raise ValueError(f"num_kv_heads: expected pairs, an even number, got {num_kv_heads}")
    return torch.zeros(2, 2, num_blocks, block_size, num_kv_heads // 2, head_size, dtype=dtype, device=device)


def pools_of_pairs(cache: Shaped[Tensor, "2 2 n p pairs d"]) -> list[Shaped[Tensor, "n p pairs d"]]:
    """Return the four pools of a cache of pairs, views with the block as first dimension.

    Pass them to `kv_cache.copy_blocks` and `kv_cache.swap_blocks`, which copy a block in all four.

    Raises:
        ValueError: if the cache has a wrong shape.
    """
    check_pairs(cache)
    return [cache[half, kind] for half in (0, 1) for kind in (0, 1)]


def allocate_latents(
    num_blocks: int,
    block_size: int,
    latent_rank: int,
    rope_size: int,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> Shaped[Tensor, "n p c"]:
    """Allocate a pool of latents; there is no pool of values.

    Args:
        num_blocks: blocks in the pool, `n`.
        block_size: tokens in a block, `p`.
        latent_rank: elements of a latent, `r`.
        rope_size: elements of a rotary key, `rope`.
        dtype: dtype of the pool; `torch.float8_e4m3fn` or `torch.float8_e5m2` for quantized values, `torch.uint8` for
            packed rows.
        device: device of the pool.

    Returns:
        The pool, `c = r + rope`, filled with zeros; for packed rows, `c = r + 4 * r / 128 + 2 * rope` bytes.

    Raises:
        ValueError: if a size is not positive or not valid for packed rows, or there is no such type or device.
    """
    check_sizes(num_blocks=num_blocks, block_size=block_size, latent_rank=latent_rank, rope_size=rope_size)
    check_memory(dtype, device)
    size = packed_size(latent_rank, rope_size) if dtype == torch.uint8 else latent_rank + rope_size
    return torch.zeros(num_blocks, block_size, size, dtype=dtype, device=device)


def allocate_index_keys(
    num_blocks: int,
    block_size: int,
    *,
    index_size: int = 128,
    dtype: torch.dtype = torch.uint8,
    device: torch.device | str = "cpu",
) -> Shaped[Tensor, "n p c"]:
    """Allocate a pool of index keys.

    In a pool of bytes, the fp8 values of all tokens of a block come first, then their scales; with blocks of 4 tokens:

        block   key 0 | key 1 | key 2 | key 3 | scale 0 | scale 1 | scale 2 | scale 3
        bytes   128      128      128      128      4         4         4         4

    Args:
        num_blocks: blocks in the pool, `n`.
        block_size: tokens in a block, `p`.
        index_size: elements of an index key, a multiple of 4 in a pool of bytes.
        dtype: `torch.uint8` for fp8 values (e4m3) and scales, or the type of unquantized keys.
        device: device of the pool.

    Returns:
        `[n, p, d]`, or `[n, p, d + 4]` bytes; `d + 4` is the number of bytes per token, not their place in the block.

    Raises:
        ValueError: if a size or the type is not valid, or there is no such device.

    Source: `indexer_k_quant_and_cache` of vLLM; DeepGEMM, `fp8_paged_mqa_logits`.
    """
    check_index_pool(num_blocks, block_size, index_size, dtype, device)
    bytes_of_scale = SCALE_BYTES if dtype == torch.uint8 else 0
    return torch.zeros(num_blocks, block_size, index_size + bytes_of_scale, dtype=dtype, device=device)


def allocate_states(
    num_slots: int,
    num_value_heads: int,
    value_head_size: int,
    key_head_size: int,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> Float[Tensor, "n hv dv dk"]:
    """Allocate a pool of states.

    Args:
        num_slots: slots in the pool, `n`.
        num_value_heads: heads of the values, `hv`.
        value_head_size: elements of a value, `dv`.
        key_head_size: elements of a key, `dk`.
        dtype: dtype of the pool. A 16-bit state is rounded at every step that writes it.
        device: device of the pool.

    Returns:
        The pool, filled with zeros.

    Raises:
        ValueError: if a size is not positive, or there is no such type or device.
    """
    check_sizes(
        num_slots=num_slots,
        num_value_heads=num_value_heads,
        value_head_size=value_head_size,
        key_head_size=key_head_size,
    )
    check_memory(dtype, device)
    return torch.zeros(num_slots, num_value_heads, value_head_size, key_head_size, dtype=dtype, device=device)


def allocate_inputs(
    num_slots: int,
    width: int,
    num_channels: int,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> Float[Tensor, "n w c"]:
    """Allocate a pool for the last inputs of a convolution.

    Args:
        num_slots: slots in the pool, `n`: the same slots as those of the states.
        width: inputs that an output depends on; `width - 1` of them are kept.
        num_channels: channels, `c`.
        dtype: dtype of the pool.
        device: device of the pool.

    Returns:
        The pool `[n, width - 1, c]`, filled with zeros.

    Raises:
        ValueError: if a size is not positive, or there is no such type or device.
    """
    check_sizes(num_slots=num_slots, width=width, num_channels=num_channels)
    check_memory(dtype, device)
    return torch.zeros(num_slots, width - 1, num_channels, dtype=dtype, device=device)


def allocate_rings(
    num_slots: int,
    ring_size: int,
    num_key_heads: int,
    num_value_heads: int,
    value_head_size: int,
    key_head_size: int,
    *,
    per_channel: bool = False,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> Ring:
    """Make empty rings for the inputs of one layer; what is not a key is in float32, or float64 with such keys.

    Args:
        num_slots: slots in the pool, `n`.
        ring_size: inputs that each has room for, `l`.
        num_key_heads: heads of the keys, `h`.
        num_value_heads: heads of the values, `hv`.
        value_head_size: elements of a value, `dv`.
        key_head_size: elements of a key, `dk`.
        per_channel: whether each key channel has a decay of its own.
        dtype: type of a key; that of the keys of the layer rounds nothing.
        device: where the rings are.

    Returns:
        The rings, filled with zeros.

    Raises:
        ValueError: if a size is not positive, or there is no such type or device.
    """
    check_sizes(
        num_slots=num_slots,
        ring_size=ring_size,
        num_key_heads=num_key_heads,
        num_value_heads=num_value_heads,
        value_head_size=value_head_size,
        key_head_size=key_head_size,
    )
    check_flag("per_channel", per_channel)
    check_memory(dtype, device)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    gates = (num_value_heads, key_head_size) if per_channel else (num_value_heads,)
    return Ring(
        torch.zeros(num_slots, ring_size, num_key_heads, key_head_size, dtype=dtype, device=device),
        torch.zeros(num_slots, ring_size, num_value_heads, value_head_size, dtype=wide, device=device),
        torch.zeros(num_slots, ring_size, *gates, dtype=wide, device=device),
    )


def allocate_cursors(num_slots: int, *, device: torch.device | str = "cpu") -> Int32[Tensor, "n"]:
    """Make the cursors of empty rings, one per slot for all layers.

    Args:
        num_slots: slots in the pools, `n`.
        device: where the cursors are.

    Returns:
        Zeros.

    Raises:
        ValueError: if there is no slot, or no such device.
    """
    check_sizes(num_slots=num_slots)
    check_device(device)
    return torch.zeros(num_slots, dtype=torch.int32, device=device)
