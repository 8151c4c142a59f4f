"""Writes, copies and moves inside pools in plain torch, on any device."""

from collections.abc import Callable

import torch
from jaxtyping import Float, Int64, Shaped, UInt8
from torch import Tensor

from fastattn.kernels.problem import as_integers
from refattn.batch import Batch
from refattn.checks import rows_with_slots
from refattn.checks_of_writes import check_slot_numbers
from refattn.packed_latents import LATENT_GROUP, PACKED_FORMAT, SMALLEST_SCALE, packed_parts
from refattn.trees import Accepted, Trees


def write(
    key: Shaped[Tensor, "t hk d"],
    value: Shaped[Tensor, "t hk dv"],
    key_cache: Shaped[Tensor, "n p hk d"],
    value_cache: Shaped[Tensor, "n p hk dv"],
    slot_mapping: Int64[Tensor, "t"],
) -> Callable[..., None] | None:
    """Write new tokens into the pool; see `fastattn.kv_cache.write`.

    Returns:
        On a CPU, a function that writes other tensors of the same types, shapes and strides, and checks their slots;
        else None.
    """
    _write_rows(key, value, key_cache, value_cache, slot_mapping, bool((slot_mapping < 0).any()))
    return _write_again if slot_mapping.is_cpu else None


def _write_again(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor) -> None:
    """Repeat an earlier write with other tensors, whose slots are not checked yet."""
    has_padding = check_slot_numbers(slot_mapping, key_cache.shape[0] * key_cache.shape[1])
    _write_rows(*rows_with_slots(key, value, slot_mapping), key_cache, value_cache, slot_mapping, has_padding)


def _write_rows(
    key: Shaped[Tensor, "t hk d"],
    value: Shaped[Tensor, "t hk dv"],
    key_cache: Shaped[Tensor, "n p hk d"],
    value_cache: Shaped[Tensor, "n p hk dv"],
    slot_mapping: Int64[Tensor, "t"],
    has_padding: bool,
) -> None:
    if has_padding:
        real = slot_mapping >= 0
        key, value, slot_mapping = key[real], value[real], slot_mapping[real]
    for new, cache in ((key, key_cache), (value, value_cache)):
        if cache.element_size() < 4:
            new, cache = as_integers(new), as_integers(cache)
        block_size = cache.shape[1]
        if cache.stride(0) == block_size * cache.stride(1):  # slots are rows of a view
            cache.flatten(0, 1).index_copy_(0, slot_mapping, new)
        else:
            cache[slot_mapping // block_size, slot_mapping % block_size] = new


def write_packed(
    latent: Float[Tensor, "t r"],
    rope_key: Float[Tensor, "t rope"],
    cache: UInt8[Tensor, "n p c"],
    slot_mapping: Int64[Tensor, "t"],
) -> None:
    """Write latents and rotary keys into packed rows, all at once; see `fastattn.mla.write`."""
    written = slot_mapping >= 0
    latent, rope_key, slot_mapping = latent[written], rope_key[written], slot_mapping[written]
    blocks, rows = slot_mapping // cache.shape[1], slot_mapping % cache.shape[1]
    quantized, scales, rotary = packed_parts(cache, latent.shape[1], rope_key.shape[1])
    groups, largest = latent.float().unflatten(1, (-1, LATENT_GROUP)), torch.finfo(PACKED_FORMAT).max
    scale = groups.abs().amax(-1)
    scale = (scale / torch.full_like(scale, largest)).clamp_(min=SMALLEST_SCALE)
    rounded = (groups / scale[..., None]).clamp_(-largest, largest).to(PACKED_FORMAT)
    quantized[blocks, rows] = rounded.view(torch.uint8).flatten(1)
    scales[blocks, rows] = scale
    as_integers(rotary)[blocks, rows] = as_integers(rope_key.to(rotary.dtype))


def read_packed(
    rows: UInt8[Tensor, "*rows c"], latent_rank: int, rope_size: int, dtype: torch.dtype
) -> Float[Tensor, "*rows d"]:
    """Dequantize packed rows to a type, the latents before the rotary keys."""
    quantized, scales, rotary = packed_parts(rows, latent_rank, rope_size)
    numbers = quantized.view(PACKED_FORMAT).float().unflatten(-1, (-1, LATENT_GROUP)) * scales[..., None]
    return torch.cat([numbers.flatten(-2).to(dtype), rotary.to(dtype)], -1)


def copy_blocks(cache: Shaped[Tensor, "n ..."], pairs: Int64[Tensor, "k 2"]) -> None:
    """Copy blocks inside a pool; see `fastattn.kv_cache.copy_blocks`."""
    cache = as_integers(cache)
    blocks = cache.index_select(0, pairs[:, 0].to(cache.device))
    cache.index_copy_(0, pairs[:, 1].to(cache.device), blocks)


def compact(cache: Shaped[Tensor, "n p ..."], batch: Batch, trees: Trees, accepted: Accepted, block_size: int) -> None:
    """Move accepted nodes to the first slots of their trees; see `fastattn.speculative.compact`."""
    assert batch.block_table is not None  # the path has checked it
    cache = as_integers(cache)
    target = torch.arange(trees.max_len, device=batch.device)
    sequence, target = ((target < accepted.lens[:, None]) & (accepted.nodes != target)).nonzero(as_tuple=True)
    first = (batch.seq_lens - trees.lens)[sequence]
    sources, targets = first + accepted.nodes[sequence, target], first + target
    blocks = [batch.block_table[sequence, place // block_size].long() for place in (sources, targets)]
    cache[blocks[1], targets % block_size] = cache[blocks[0], sources % block_size]  # all are read before
