"""Where the keys are, in a kernel: a storage is a NamedTuple that carries its own functions.

How keys and values are read, and dequantized if they are quantized, is `keys.how`, functions of the storage; tiles of
few rows have the axes of rows and keys the other way round:

    query(keys, queries, tile, TILE)                  the tile of queries in the type of the key product
    load(keys, tile, place, is_key, TILE)             the keys of a step, and the values that are keys, too
    products(keys, q, step, TILE)                     queries times keys, [rows, keys]
    begin(keys, TILE)                                 an empty weighted sum
    value(keys, tile, place, is_key, step, TILE)      the values of a step
    add(keys, acc, rescale, weights, v, TILE)         the weighted sum after one more step
    end(keys, acc, TILE)                              the weighted sum, [rows, dv]
    scale(keys, scale, tile)                          the scale of the scores
    finish(keys, values, tile)                        the output, from the normalized sum

Where a token lies is `keys.where`: in rows, or in pages of a block table.

    begin(where, tile, run, TILE)                     before the first step: a block table is read a step ahead
    find(where, tile, run, start, ahead, TILE)        the places of the keys of a step, and the blocks read ahead
    offset(where, place, strides)                     their offsets from the first token of a pool, in elements

A matrix product of a GPU has at least 16 rows, but 8 columns are enough. Four heads that share a KV head fill a quarter
of 16 rows, but half of 8 columns. So tiles of few rows are transposed, and `KEYS_AXIS` is 0:

    many rows    [rows 16, d] . [d, keys]    ->  scores [rows 16, keys]
    few rows     [keys, d] . [d, rows 8]     ->  scores [keys, rows 8]       half the products and half the softmax

Source: Kwon et al. 2023, "PagedAttention"; latents: DeepSeek-AI 2024, "DeepSeek-V2". The saving by
    transposed tiles was counted in the code for an NVIDIA H200 (Triton 3.6): a step of 128 keys in e4m3 takes a warp
    957 instructions instead of 1772.
"""

from typing import Any, NamedTuple, no_type_check

import triton
import triton.language as tl
from torch import Tensor

from fastattn.kernels.problem import cu_seqlens_k_of
from fastattn.kernels.triton.quantized import Quantization
from fastattn.kernels.triton.tuning import is_wide, pad, size_of
from refattn.plan import Plan

# Triton's interpreter finds a function only if it is defined above its caller.


class How(NamedTuple):
    """The functions of a storage, each a `tl.constexpr`."""

    query: Any
    load: Any
    products: Any
    begin: Any
    value: Any
    add: Any
    end: Any
    scale: Any
    finish: Any


# --- where a token lies ---


class Rows(NamedTuple):
    """Tokens of all sequences in contiguous rows, each sequence from `cu_seqlens_k` on."""

    begin: Any
    find: Any
    offset: Any
    cu_seqlens_k: Any


class Pages(NamedTuple):
    """Blocks of a pool, by a block table."""

    begin: Any
    find: Any
    offset: Any
    block_table: Any  # [b, m]
    table_row_stride: Any
    table_stride: Any
    BLOCK_SIZE: Any
    INT64_OFFSETS: Any  # whether the last token of a block may be 2**31 elements or more from its first one
    ALIGNED: Any  # whether steps begin at multiples of their size


class Place(NamedTuple):
    """The places of the keys of a step: their block, and their slot in it, as a slot of the step and one after that."""

    block: Any
    first: Any
    slot: Any


@triton.jit
@no_type_check
def begin_in_rows(where, tile, run, TILE):
    """Return the first key row of a sequence."""
    return tl.load(where.cu_seqlens_k + tile.sequence).to(tl.int64)


@triton.jit
@no_type_check
def find_in_rows(where, tile, run, start, ahead, TILE):
    """Return rows that follow one another."""
    return Place(0, 0, ahead + (start + tl.arange(0, TILE.KEYS))), ahead


@triton.jit
@no_type_check
def offset_in_rows(where, place, strides):
    """Return the offsets of rows."""
    return place.slot * strides[0]


@triton.jit
@no_type_check
def begin_in_pages(where, tile, run, TILE):
    """Read the blocks of the first step, so that its keys do not wait for them; one, if it holds all keys of a step."""
    ONE_PAGE: tl.constexpr = where.ALIGNED and where.BLOCK_SIZE % TILE.KEYS == 0
    j = run.begin
    is_key = run.begin < run.end
    if not ONE_PAGE:
        j = run.begin + tl.arange(0, TILE.KEYS)
        is_key = (j >= run.first) & (j < run.end)
    table = where.block_table + tile.sequence.to(tl.int64) * where.table_row_stride
    column = (j // where.BLOCK_SIZE).to(tl.int64)
    return tl.load(table + column * where.table_stride, mask=is_key, other=0)


@triton.jit
@no_type_check
def find_in_pages(where, tile, run, start, ahead, TILE):
    """Return the places of a step, whose blocks are read already, and read the blocks of the next step."""
    ONE_PAGE: tl.constexpr = where.ALIGNED and where.BLOCK_SIZE % TILE.KEYS == 0
    ALIKE: tl.constexpr = where.ALIGNED and (ONE_PAGE or TILE.KEYS % where.BLOCK_SIZE == 0)  # steps have the same slots
    in_step = tl.arange(0, TILE.KEYS)
    block = ahead.to(tl.uint32).to(tl.int64)  # not negative: takes fewer instructions
    later = (start if ONE_PAGE else start + in_step) + TILE.KEYS
    table = where.block_table + tile.sequence.to(tl.int64) * where.table_row_stride
    column = (later // where.BLOCK_SIZE).to(tl.int64)
    ahead = tl.load(table + column * where.table_stride, mask=later < run.end, other=0)
    slot = (in_step if ALIKE else start + in_step) % where.BLOCK_SIZE
    if where.INT64_OFFSETS:  # 64 bits for each key of a step take registers
        slot = slot.to(tl.int64)
    first = tl.full([], start, tl.int32) % where.BLOCK_SIZE if ONE_PAGE else 0
    return Place(block, first, slot), ahead


@triton.jit
@no_type_check
def offset_in_pages(where, place, strides):
    """Return the offsets of tokens: of their blocks, and within these."""
    return place.slot * strides[1] + (place.block * strides[0] + place.first * strides[1])


# --- tiles of queries, keys and values ---


@triton.jit
@no_type_check
def query_tile(queries, tile, first, SIZE: tl.constexpr, PAD: tl.constexpr):
    """Load `SIZE` elements of each query row from `first` on, [rows, PAD]."""
    at = tl.arange(0, PAD)
    rows = queries.query + tile.tokens * queries.strides[0] + tile.heads.to(tl.int64) * queries.strides[1]
    return tl.load(
        rows[:, None] + ((at + first).to(tl.int64) * queries.strides[2])[None, :],
        mask=tile.is_row[:, None] & (at < SIZE)[None, :],
        other=0.0,
    )


@triton.jit
@no_type_check
def token_tile(pool, offset, stride, is_key, first, SIZE: tl.constexpr, PAD: tl.constexpr, AXIS: tl.constexpr):
    """Load `SIZE` elements of each token from `first` on; tokens lie along the axis `AXIS`."""
    at = tl.arange(0, PAD)
    return tl.load(
        pool + tl.expand_dims(offset, 1 - AXIS) + tl.expand_dims((at + first).to(tl.int64) * stride, AXIS),
        mask=tl.expand_dims(is_key, 1 - AXIS) & tl.expand_dims(at < SIZE, AXIS),
        other=0,
    )


@triton.jit
@no_type_check
def multiply_keys(q, k, TILE):
    """Multiply queries and keys."""
    first, second = (q, k) if TILE.KEYS_AXIS == 1 else (k, q)
    return tl.dot(first, second, input_precision="ieee")


@triton.jit
@no_type_check
def multiply_values(acc, weights, v, TILE):
    """Add weighted values to a weighted sum."""
    first, second = (weights, v) if TILE.KEYS_AXIS == 1 else (v, weights)
    return tl.dot(first, second, acc, input_precision="ieee")


@triton.jit
@no_type_check
def zeros(PAD: tl.constexpr, TILE):
    """Return an empty weighted sum of values."""
    return tl.zeros([TILE.ROWS, PAD] if TILE.KEYS_AXIS == 1 else [PAD, TILE.ROWS], tl.float32)


@triton.jit
@no_type_check
def value_offset(keys, place):
    """Return the offsets of the values of a step from the first value of their head."""
    if keys.VALUE_SHIFT < 0:
        offset = keys.where.offset(keys.where, place, keys.value_strides)
    else:
        offset = keys.where.offset(keys.where, place, keys.key_strides) >> keys.VALUE_SHIFT
    return offset


# --- unquantized keys and values ---


class Numbers(NamedTuple):
    """Keys and values in the type of the queries.

    Attributes:
        how: its functions, `NUMBERS` or `LATENTS`.
        where: rows or pages.
        key: the pool of keys, or key rows.
        value: the pool of values; for latents, the pool of keys.
        key_strides: of blocks (in pages), tokens, heads and elements.
        value_strides: the same, of the values.
        HEAD_SIZE: elements of a key.
        VALUE_HEAD_SIZE: elements of a value.
        KEY_PAD: elements of a key in a tile, without those that are values.
        VALUE_PAD: elements of a value in a tile.
        VALUE_SHIFT: 0 where offsets of values are those of keys, 1 where they are half of them, else -1.
    """

    how: Any
    where: Any
    key: Any
    value: Any
    key_strides: Any
    value_strides: Any
    HEAD_SIZE: Any
    VALUE_HEAD_SIZE: Any
    KEY_PAD: Any
    VALUE_PAD: Any
    VALUE_SHIFT: Any


@triton.jit
@no_type_check
def query_of_numbers(keys, queries, tile, TILE):
    """Load a tile of queries."""
    q = query_tile(queries, tile, 0, keys.HEAD_SIZE, keys.KEY_PAD)
    if TILE.KEYS_AXIS == 0:
        q = tl.trans(q)
    return q


@triton.jit
@no_type_check
def load_keys(keys, tile, place, is_key, TILE):
    """Load the keys of a step, as they are stored."""
    pool = keys.key + tile.kv_head.to(tl.int64) * keys.key_strides[-2]
    offset = keys.where.offset(keys.where, place, keys.key_strides)
    return token_tile(pool, offset, keys.key_strides[-1], is_key, 0, keys.HEAD_SIZE, keys.KEY_PAD, TILE.KEYS_AXIS)


@triton.jit
@no_type_check
def products_of_numbers(keys, q, k, TILE):
    """Multiply queries and keys."""
    return multiply_keys(q, k, TILE)


@triton.jit
@no_type_check
def begin_numbers(keys, TILE):
    """Return an empty weighted sum."""
    return zeros(keys.VALUE_PAD, TILE)


@triton.jit
@no_type_check
def load_values(keys, tile, place, is_key, step, TILE):
    """Load the values of a step."""
    pool = keys.value + tile.kv_head.to(tl.int64) * keys.value_strides[-2]
    offset, stride = value_offset(keys, place), keys.value_strides[-1]
    return token_tile(pool, offset, stride, is_key, 0, keys.VALUE_HEAD_SIZE, keys.VALUE_PAD, 1 - TILE.KEYS_AXIS)


@triton.jit
@no_type_check
def add_numbers(keys, acc, rescale, weights, v, TILE):
    """Rescale a weighted sum and add a step to it."""
    return multiply_values(acc * tl.expand_dims(rescale, TILE.KEYS_AXIS), weights.to(v.dtype), v, TILE)


@triton.jit
@no_type_check
def end_numbers(keys, acc, TILE):
    """Transpose a weighted sum back."""
    if TILE.KEYS_AXIS == 0:
        acc = tl.trans(acc)
    return acc


@triton.jit
@no_type_check
def same_scale(keys, scale, tile):
    """Return the scale of the layer."""
    return scale


@triton.jit
@no_type_check
def same_values(keys, values, tile):
    """Return the output as it is."""
    return values


# --- latents: a value is the first elements of its key, and both are loaded once ---


class LatentQuery(NamedTuple):
    """A tile of absorbed queries: the part for rotary keys, and the part for latents."""

    rope: Any
    latent: Any


class LatentStep(NamedTuple):
    """The rotary keys of a step [d, keys], and its latents [keys, dv]."""

    rope: Any
    latent: Any


@triton.jit
@no_type_check
def latent_query(keys, queries, tile, TILE):
    """Load both tiles of queries."""
    tl.static_assert(TILE.KEYS_AXIS == 1)
    RANK: tl.constexpr = keys.VALUE_HEAD_SIZE
    latent = query_tile(queries, tile, 0, RANK, keys.VALUE_PAD)
    return LatentQuery(query_tile(queries, tile, RANK, keys.HEAD_SIZE - RANK, keys.KEY_PAD), latent)


@triton.jit
@no_type_check
def load_latents(keys, tile, place, is_key, TILE):
    """Load latents and rotary keys."""
    RANK: tl.constexpr = keys.VALUE_HEAD_SIZE
    offset, stride = keys.where.offset(keys.where, place, keys.key_strides), keys.key_strides[-1]
    latent = token_tile(keys.key, offset, stride, is_key, 0, RANK, keys.VALUE_PAD, 0)
    return LatentStep(
        token_tile(keys.key, offset, stride, is_key, RANK, keys.HEAD_SIZE - RANK, keys.KEY_PAD, 1), latent
    )


@triton.jit
@no_type_check
def latent_products(keys, q, step, TILE):
    """Multiply both parts of queries and keys."""
    products = tl.dot(q.rope, step.rope.to(q.rope.dtype), input_precision="ieee")
    return tl.dot(q.latent, tl.trans(step.latent), products, input_precision="ieee")


@triton.jit
@no_type_check
def latents_as_values(keys, tile, place, is_key, step, TILE):
    """Return the latents, which are loaded already."""
    return step.latent


NUMBERS = How(
    tl.constexpr(query_of_numbers),
    tl.constexpr(load_keys),
    tl.constexpr(products_of_numbers),
    tl.constexpr(begin_numbers),
    tl.constexpr(load_values),
    tl.constexpr(add_numbers),
    tl.constexpr(end_numbers),
    tl.constexpr(same_scale),
    tl.constexpr(same_values),
)
LATENTS = NUMBERS._replace(
    query=tl.constexpr(latent_query),
    load=tl.constexpr(load_latents),
    products=tl.constexpr(latent_products),
    value=tl.constexpr(latents_as_values),
)


# --- the keys of a call, as the kernel takes them ---


def where_of(key: Tensor, plan: Plan, *, wide: bool, aligned: bool) -> Rows | Pages:
    """Return where the tokens of a plan lie.

    Args:
        key: the pool of keys if it has four dimensions, else the key rows of all sequences.
        plan: the lengths, and the block table for pages.
        wide: whether tokens of a block may be 2**31 elements apart.
        aligned: whether steps begin at multiples of their size.
    """
    if key.ndim == 3:
        return Rows(
            begin=tl.constexpr(begin_in_rows),
            find=tl.constexpr(find_in_rows),
            offset=tl.constexpr(offset_in_rows),
            cu_seqlens_k=cu_seqlens_k_of(plan),
        )
    table = plan.batch.block_table
    assert table is not None  # a plan over pages has checked it
    return Pages(
        begin=tl.constexpr(begin_in_pages),
        find=tl.constexpr(find_in_pages),
        offset=tl.constexpr(offset_in_pages),
        block_table=table,
        table_row_stride=table.stride(0),
        table_stride=table.stride(1),
        BLOCK_SIZE=tl.constexpr(key.shape[1]),
        INT64_OFFSETS=tl.constexpr(wide),
        ALIGNED=tl.constexpr(aligned),
    )


def sizes_of(
    key: Tensor, value: Tensor, head_size: int, tile_rows: int, quantization: Quantization, *, shared: bool
) -> dict[str, Any]:
    """Return the sizes of keys and values, and of those in a tile, as constants of the kernel.

    A product of more than 16 rows has at least 64 columns. With 16 and 32, Triton 3.6 reads out of bounds for values
    that pass through registers: all fp8 values, and others in an unaligned pool.
    """
    value_head_size = size_of(value, quantization.per_byte)
    heads = quantization.heads
    per_load = heads * value_head_size // value.shape[-1]  # 2 in pairs, or in four bits; 4 in pairs of bytes of these
    key_size = head_size - value_head_size if shared else head_size
    least = 64 * quantization.per_byte if tile_rows > 16 else 16 * per_load if shared or tile_rows == 8 else per_load
    per_key = heads * head_size // key.shape[-1] if quantization.kind == "int4" else 1
    sizes = dict(
        HEAD_SIZE=head_size,
        VALUE_HEAD_SIZE=value_head_size,
        KEY_PAD=max(pad(key_size), 16 * per_key, 32 if quantization.kind == "int8" else 16),
        VALUE_PAD=max(pad(value_head_size), least),
        VALUE_SHIFT=_shift_of_values(key, value) if tile_rows == 8 else -1,  # many rows leave no registers for one
    )
    return {name: tl.constexpr(size) for name, size in sizes.items()}


def keys_of(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    plan: Plan,
    tile_rows: int,
    *,
    shared: bool = False,
    quantization: Quantization,
    aligned: bool = True,
) -> Any:
    """Return keys and values as the kernel takes them: `Numbers`, or one of `fastattn.kernels.triton.quantized_keys`.

    Args:
        query: query rows of all sequences.
        key: the pool of keys if it has four dimensions, else the key rows of all sequences; any strides.
        value: the pool of values, or the value rows.
        plan: the lengths, and the block table for pages.
        tile_rows: rows of a tile; a tile of 8 is transposed.
        shared: whether a value is the first elements of its key.
        quantization: how the pools are quantized, if they are.
        aligned: whether steps begin at multiples of their size.
    """
    token_strides = [key.stride(1), value.stride(1)]
    if quantization.kind:
        beside = quantization.key, quantization.value if quantization.storage is not None else None
        token_strides += [stride for scales in beside for stride in strides_by_head(scales)[1:2]]
    wide = key.ndim == 4 and is_wide(key.shape[1], *token_strides)
    both: dict[str, Any] = dict(where=where_of(key, plan, wide=wide, aligned=aligned), key=key, value=value)
    both |= dict(key_strides=key.stride(), value_strides=value.stride())
    both |= sizes_of(key, value, query.shape[2], tile_rows, quantization, shared=shared)
    if quantization.storage is not None:
        return quantization.storage(query, both, quantization)
    if quantization.kind:
        from fastattn.kernels.triton.quantized_keys import quantized_keys_of

        return quantized_keys_of(query, both, plan, quantization, shared=shared)
    return Numbers(how=LATENTS if shared else NUMBERS, **both)


def strides_by_head(scales: Tensor | None) -> tuple[int, ...]:
    """Return the strides of scales, with 0 for the sequences where scales are per head only."""
    if scales is None:
        return ()
    return (0, *scales.stride()) if scales.ndim == 1 else scales.stride()


def _shift_of_values(key: Tensor, value: Tensor) -> int:
    """Return `VALUE_SHIFT`."""
    if [n * key.itemsize for n in key.stride()[:-1]] != [n * value.itemsize for n in value.stride()[:-1]]:
        return -1
    return {1: 0, 2: 1}.get(value.itemsize // key.itemsize, -1)
