"""Move rows and blocks of the paged cache, each operation in one launch; the kernel `triton` of `fastattn.kv_cache`.

Source: Kwon et al. 2023, "PagedAttention": its cache kernels.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, no_type_check

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int64, Shaped, UInt8
from torch import Tensor

from fastattn.kernels.problem import as_bytes
from fastattn.kernels.triton.constants import next_power_of_2
from fastattn.kernels.triton.launch import Launch, converts_fp8
from fastattn.kernels.triton.quantized import FORMATS, row_scale, to_fp8, to_int8
from refattn.batch import Batch
from refattn.packed_latents import LATENT_GROUP, SMALLEST_SCALE, packed_parts
from refattn.scales import Fp8Scales, Int8Scales
from refattn.trees import Accepted, Trees

BLOCK_ROWS = 16
BLOCK_ELEMENTS = 256


class Strided(NamedTuple):
    """A tensor and its strides, as a kernel takes them."""

    at: Any
    strides: Any


class Scales(NamedTuple):
    """Scales of keys or of values: a tensor with its strides, or None and one number."""

    at: Any
    strides: Any
    number: Any


def _strided(*tensors: Tensor) -> tuple[Strided, ...]:
    """Return tensors with their strides."""
    return tuple(Strided(x, x.stride()) for x in tensors)


def _scales(scale: float | Tensor | None) -> Scales:
    """Return scales as a kernel takes them; without any, 1."""
    if isinstance(scale, Tensor):
        return Scales(scale, scale.stride(), 1.0)
    return Scales(None, (), 1.0 if scale is None else scale)


def write(
    key: Shaped[Tensor, "t hk d"],
    value: Shaped[Tensor, "t hk dv"],
    key_cache: Shaped[Tensor, "n p hk d"],
    value_cache: Shaped[Tensor, "n p hk dv"],
    slot_mapping: Int64[Tensor, "t"],
) -> Callable[..., None] | None:
    """Write new keys and values into the pool, in place; see `fastattn.kv_cache.write`.

    Args:
        key: the new keys; any strides, as all tensors here.
        value: the new values.
        key_cache: the pool of keys.
        value_cache: the pool of values.
        slot_mapping: the slot of each token; -1 is not written.

    Returns:
        A function that replays the write with other tensors of the same types, shapes and strides, aligned to 16 bytes;
        None if there is nothing to write.
    """
    num_tokens, num_kv_heads, head_size = key.shape
    rows = num_tokens * num_kv_heads
    if rows == 0:
        return None
    given = dict(key=key, value=value, key_cache=key_cache, value_cache=value_cache)
    tensors = {name: as_bytes(x) for name, x in given.items()}
    launch = Launch(
        _write_kernel,
        (-(-rows // BLOCK_ROWS),),
        {f"{name}.at": x for name, x in tensors.items()} | dict(slot_mapping=slot_mapping),
        dict(zip(tensors, _strided(*tensors.values()), strict=True))
        | dict(
            slot_stride=slot_mapping.stride(0),
            rows=rows,
            NUM_KV_HEADS=num_kv_heads,
            HEAD_SIZE=head_size,
            VALUE_HEAD_SIZE=value.shape[-1],
            BLOCK_SIZE=key_cache.shape[1],
            BLOCK_ROWS=BLOCK_ROWS,
        ),
        {},
    )
    return launch.replay


def write_quantized(
    key: Float[Tensor, "t hk d"],
    value: Float[Tensor, "t hk dv"],
    key_cache: Shaped[Tensor, "n p hk d"],
    value_cache: Shaped[Tensor, "n p hk dv"],
    slot_mapping: Int64[Tensor, "t"],
    scales: Fp8Scales | Int8Scales,
) -> None:
    """Quantize new keys and values and write them into the pool, in place; see `fastattn.quantized.write`.

    Args:
        key: the new keys; any strides, as all tensors here.
        value: the new values.
        key_cache: the pool of keys.
        value_cache: the pool of values.
        slot_mapping: the slot of each token; -1 is not written.
        scales: for fp8 fixed, per tensor or head; for int8 those beside the pool, of which the keys' are written.
    """
    num_tokens, num_kv_heads, head_size = key.shape
    rows = num_tokens * num_kv_heads
    if rows == 0:
        return
    kind = FORMATS[scales.format] if isinstance(scales, Fp8Scales) else "int8"
    pools = [x if kind == "int8" else x.view(torch.uint8) for x in (key_cache, value_cache)]
    _quantize_kernel[(-(-rows // BLOCK_ROWS),)](
        *_strided(key, value, *pools),
        (_scales(scales.key), _scales(scales.value)),
        slot_mapping,
        slot_mapping.stride(0),
        rows,
        NUM_KV_HEADS=num_kv_heads,
        HEAD_SIZE=head_size,
        VALUE_HEAD_SIZE=value.shape[-1],
        BLOCK_SIZE=key_cache.shape[1],
        BLOCK_ROWS=BLOCK_ROWS,
        FORMAT=kind,
        HAS_FP8_CVT=converts_fp8(key.device),
    )


def write_packed(
    latent: Float[Tensor, "t r"],
    rope_key: Float[Tensor, "t rope"],
    cache: UInt8[Tensor, "n p c"],
    slot_mapping: Int64[Tensor, "t"],
) -> None:
    """Write latents and rotary keys into packed rows, in place; see `fastattn.mla.write`.

    Args:
        latent: the new latents; any strides.
        rope_key: their rotary keys; any strides.
        cache: the pool of packed rows.
        slot_mapping: the slot of each token; -1 is not written.
    """
    num_tokens, rank = latent.shape
    if num_tokens == 0:
        return
    quantized_values, scales, rotary = packed_parts(cache, rank, rope_key.shape[1])
    _write_packed_kernel[-(-num_tokens // BLOCK_ROWS), rank // LATENT_GROUP + 1](
        *_strided(latent, rope_key, quantized_values, scales, rotary.view(torch.int16)),
        slot_mapping,
        slot_mapping.stride(0),
        num_tokens,
        GROUPS=rank // LATENT_GROUP,
        GROUP=LATENT_GROUP,
        ROPE_SIZE=rope_key.shape[1],
        BLOCK_SIZE=cache.shape[1],
        BLOCK_ROWS=BLOCK_ROWS,
        SMALLEST=SMALLEST_SCALE,
        HAS_FP8_CVT=converts_fp8(latent.device),
    )


def copy_blocks(cache: Shaped[Tensor, "n ..."], pairs: Int64[Tensor, "k 2"]) -> None:
    """Copy whole blocks inside a pool, in place, every source as it was before; see `fastattn.kv_cache.copy_blocks`.

    One program takes the same few elements of all blocks, reads them all and then writes them all, so that a block may
    be a source and a destination.

    Args:
        cache: the pool, with the block as its first dimension.
        pairs: source and destination block of each copy, on any device; each destination once. At most
            `fastattn.kernels.triton.MAX_PAIRS` of them.
    """
    pairs, num_pairs = pairs.to(cache.device), pairs.shape[0]
    if num_pairs == 0 or cache.numel() == 0:
        return
    cache = as_bytes(cache)
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


def compact(cache: Shaped[Tensor, "n p ..."], batch: Batch, trees: Trees, accepted: Accepted, block_size: int) -> None:
    """Move accepted nodes to the first slots of their trees, in place; see `fastattn.speculative.compact`.

    One program takes the same few elements of all nodes of a tree, in their order. A node only moves to an earlier
    slot, whose own node has been moved by then if it is kept.

    Args:
        cache: the pool, with blocks and their tokens as its first dimensions, of at most four.
        batch: the lengths and the block table.
        trees: the trees.
        accepted: the nodes to keep.
        block_size: tokens in a block, as in the shape of the pool.
    """
    assert batch.block_table is not None  # the path has checked it
    if 0 in (cache.numel(), batch.num_seqs, trees.max_len):
        return
    cache = as_bytes(cache)
    while cache.ndim < 4:
        cache = cache.unsqueeze(-1)
    elements = cache.shape[2] * cache.shape[3]
    nodes, lens = accepted.nodes.contiguous(), accepted.lens.contiguous()
    _compact_kernel[batch.num_seqs, -(-elements // BLOCK_ELEMENTS)](
        cache,
        batch.block_table,
        batch.seq_lens,
        trees.lens.contiguous(),
        nodes,
        lens,
        cache.stride(),
        batch.block_table.stride(),
        trees.max_len,
        ELEMENTS=elements,
        INNER=cache.shape[3],
        BLOCK_SIZE=cache.shape[1],
        BLOCK=BLOCK_ELEMENTS,
    )


@triton.jit(do_not_specialize=["slot_mapping", "rows"])
@no_type_check
def _write_kernel(
    key,
    value,
    key_cache,
    value_cache,
    slot_mapping,
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
    HEAD_PAD: tl.constexpr = next_power_of_2(HEAD_SIZE)
    VALUE_PAD: tl.constexpr = next_power_of_2(VALUE_HEAD_SIZE) if VALUE_HEAD_SIZE else 1
    at_d = tl.arange(0, HEAD_PAD).to(tl.int64)[None, :]
    at_dv = tl.arange(0, VALUE_PAD).to(tl.int64)[None, :]

    keys = tl.load(
        key.at + (token * key.strides[0] + head * key.strides[1])[:, None] + at_d * key.strides[2],
        is_written & (at_d < HEAD_SIZE),
    )
    values = tl.load(
        value.at + (token * value.strides[0] + head * value.strides[1])[:, None] + at_dv * value.strides[2],
        is_written & (at_dv < VALUE_HEAD_SIZE),
    )
    key_rows = block * key_cache.strides[0] + place * key_cache.strides[1] + head * key_cache.strides[2]
    tl.store(key_cache.at + key_rows[:, None] + at_d * key_cache.strides[3], keys, is_written & (at_d < HEAD_SIZE))
    value_rows = block * value_cache.strides[0] + place * value_cache.strides[1] + head * value_cache.strides[2]
    tl.store(
        value_cache.at + value_rows[:, None] + at_dv * value_cache.strides[3],
        values,
        is_written & (at_dv < VALUE_HEAD_SIZE),
    )


@triton.jit(do_not_specialize=["slot_mapping", "rows"])
@no_type_check
def _quantize_kernel(
    key,
    value,
    key_cache,
    value_cache,
    scales,
    slot_mapping,
    slot_stride,
    rows,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    VALUE_HEAD_SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    FORMAT: tl.constexpr,
    HAS_FP8_CVT: tl.constexpr,
):
    # A row is a head of a token, as in `_write_kernel`. Scales of fp8 are one per head [hk]; those of int8 keys lie
    # beside the pool [n, p, hk], and are written here; those of int8 values are by head and channel [hk, dv].
    key_scales, value_scales = scales
    row = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    token, head = row // NUM_KV_HEADS, row % NUM_KV_HEADS
    slot = tl.load(slot_mapping + token * slot_stride, row < rows, -1)
    is_row = slot >= 0
    slot = tl.maximum(slot, 0)
    block, place = slot // BLOCK_SIZE, slot % BLOCK_SIZE
    HEAD_PAD: tl.constexpr = next_power_of_2(HEAD_SIZE)
    VALUE_PAD: tl.constexpr = next_power_of_2(VALUE_HEAD_SIZE) if VALUE_HEAD_SIZE else 1
    at_d = tl.arange(0, HEAD_PAD).to(tl.int64)[None, :]
    at_dv = tl.arange(0, VALUE_PAD).to(tl.int64)[None, :]
    in_key = is_row[:, None] & (at_d < HEAD_SIZE)
    in_value = is_row[:, None] & (at_dv < VALUE_HEAD_SIZE)

    keys = tl.load(
        key.at + (token * key.strides[0] + head * key.strides[1])[:, None] + at_d * key.strides[2], in_key, 0.0
    ).to(tl.float32)
    values = tl.load(
        value.at + (token * value.strides[0] + head * value.strides[1])[:, None] + at_dv * value.strides[2],
        in_value,
        0.0,
    )
    if FORMAT == "int8":
        key_scale = row_scale(keys)
        keys = to_int8(tl.div_rn(keys, tl.broadcast_to(key_scale[:, None], keys.shape)))
        if value_scales.at is not None:
            values = values.to(tl.float32)
            is_nan = tl.max((values != values).to(tl.int32), 1) > 0  # a quantized value cannot hold NaN
            key_scale = tl.where(is_nan, float("nan"), key_scale)
            at_scale = head[:, None] * value_scales.strides[0] + at_dv * value_scales.strides[1]
            values = to_int8(tl.div_rn(values, tl.load(value_scales.at + at_scale, in_value, 1.0)))
        at_scale = block * key_scales.strides[0] + place * key_scales.strides[1] + head * key_scales.strides[2]
        tl.store(key_scales.at + at_scale, key_scale, is_row)
    else:
        ones = tl.full([BLOCK_ROWS], 1.0, tl.float32)
        key_scale, value_scale = ones * key_scales.number, ones * value_scales.number
        if key_scales.at is not None:
            key_scale = tl.load(key_scales.at + head * key_scales.strides[0])
        if value_scales.at is not None:
            value_scale = tl.load(value_scales.at + head * value_scales.strides[0])
        keys = to_fp8(tl.div_rn(keys, tl.broadcast_to(key_scale[:, None], keys.shape)), FORMAT, HAS_FP8_CVT)
        values = values.to(tl.float32)
        values = to_fp8(tl.div_rn(values, tl.broadcast_to(value_scale[:, None], values.shape)), FORMAT, HAS_FP8_CVT)
    key_rows = block * key_cache.strides[0] + place * key_cache.strides[1] + head * key_cache.strides[2]
    tl.store(key_cache.at + key_rows[:, None] + at_d * key_cache.strides[3], keys, in_key)
    value_rows = block * value_cache.strides[0] + place * value_cache.strides[1] + head * value_cache.strides[2]
    tl.store(value_cache.at + value_rows[:, None] + at_dv * value_cache.strides[3], values, in_value)


@triton.jit(do_not_specialize=["slot_mapping", "rows"])
@no_type_check
def _write_packed_kernel(
    latent,
    rope_key,
    quantized_values,
    scales,
    rotary,  # bfloat16, by its bits: Triton's interpreter does not round to it
    slot_mapping,
    slot_stride,
    rows,
    GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
    ROPE_SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    SMALLEST: tl.constexpr,
    HAS_FP8_CVT: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    group = tl.program_id(1)
    slot = tl.load(slot_mapping + row * slot_stride, row < rows, -1)
    is_row = slot >= 0
    slot = tl.maximum(slot, 0)
    block, place = slot // BLOCK_SIZE, slot % BLOCK_SIZE
    if group < GROUPS:
        at = group * GROUP + tl.arange(0, GROUP)
        numbers = tl.load(
            latent.at + row[:, None] * latent.strides[0] + at.to(tl.int64)[None, :] * latent.strides[1],
            is_row[:, None],
            0.0,
        ).to(tl.float32)
        largest = tl.max(tl.abs(numbers), 1)
        scale = tl.maximum(tl.div_rn(largest, tl.full(largest.shape, 448.0, tl.float32)), SMALLEST)
        scale = tl.where(tl.max((numbers != numbers).to(tl.int32), 1) > 0, float("nan"), scale)
        rounded = to_fp8(tl.div_rn(numbers, tl.broadcast_to(scale[:, None], numbers.shape)), "e4m3", HAS_FP8_CVT)
        at_row = block * quantized_values.strides[0] + place * quantized_values.strides[1]
        tl.store(
            quantized_values.at + at_row[:, None] + at[None, :] * quantized_values.strides[2], rounded, is_row[:, None]
        )
        tl.store(
            scales.at + block * scales.strides[0] + place * scales.strides[1] + group * scales.strides[2], scale, is_row
        )
    else:  # with names of its own, as a name has one type in Triton
        ROPE_PAD: tl.constexpr = next_power_of_2(ROPE_SIZE)
        at_rope = tl.arange(0, ROPE_PAD)
        in_rope = is_row[:, None] & (at_rope < ROPE_SIZE)[None, :]
        rope = tl.load(
            rope_key.at + row[:, None] * rope_key.strides[0] + at_rope.to(tl.int64)[None, :] * rope_key.strides[1],
            in_rope,
            0.0,
        ).to(tl.float32)
        bits = rope.to(tl.uint32, bitcast=True)
        halves = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16  # to nearest, ties to even
        halves = tl.where(rope != rope, (bits >> 16) | 0x40, halves)
        at_rotary = block * rotary.strides[0] + place * rotary.strides[1]
        tl.store(rotary.at + at_rotary[:, None] + at_rope[None, :] * rotary.strides[2], halves.to(tl.int16), in_rope)


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
    at_pair = tl.arange(0, BLOCK_PAIRS).to(tl.int64)
    at = (tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK))[None, :]
    is_pair = at_pair < num_pairs
    source = tl.load(pairs + at_pair * pair_strides[0], is_pair, 0)
    destination = tl.load(pairs + at_pair * pair_strides[0] + pair_strides[1], is_pair, 0)
    mask = is_pair[:, None] & (at < block_elements)
    elements = tl.load(cache + source[:, None] * block_stride + at, mask)
    tl.debug_barrier()  # all have read before the first writes
    tl.store(cache + destination[:, None] * block_stride + at, elements, mask)


@triton.jit(do_not_specialize=["block_table", "seq_lens", "tree_lens", "nodes", "lens", "tree_width"])
@no_type_check
def _compact_kernel(
    cache,
    block_table,
    seq_lens,
    tree_lens,
    nodes,
    lens,
    cache_strides,
    table_strides,
    tree_width,
    ELEMENTS: tl.constexpr,
    INNER: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    sequence = tl.program_id(0).to(tl.int64)
    element = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_element = element < ELEMENTS
    places = (element // INNER).to(tl.int64) * cache_strides[2] + (element % INNER).to(tl.int64) * cache_strides[3]
    first = tl.load(seq_lens + sequence) - tl.load(tree_lens + sequence)
    table = block_table + sequence * table_strides[0]
    for target in range(0, tl.load(lens + sequence)):
        node = tl.load(nodes + sequence * tree_width + target)
        if node != target:
            column = ((first + node) // BLOCK_SIZE).to(tl.int64)
            block = tl.load(table + column * table_strides[1]).to(tl.int64)
            row = ((first + node) % BLOCK_SIZE).to(tl.int64)
            moved = tl.load(cache + block * cache_strides[0] + row * cache_strides[1] + places, mask=is_element)
            column = ((first + target) // BLOCK_SIZE).to(tl.int64)
            block = tl.load(table + column * table_strides[1]).to(tl.int64)
            row = ((first + target) % BLOCK_SIZE).to(tl.int64)
            tl.store(cache + block * cache_strides[0] + row * cache_strides[1] + places, moved, mask=is_element)
