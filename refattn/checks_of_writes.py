"""Checks of writes by slots, copies of blocks, gathers, and the allocation of int8 pools."""

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from refattn.checks import (
    QUERY_TYPES,
    check,
    check_can_be_written,
    check_list,
    check_memory,
    check_numbers,
    check_own_memory,
    check_sizes,
    describe,
    is_int,
    is_ordinary,
)
from refattn.modes import refuse_gradients
from refattn.overlap import check_apart, check_pools_apart
from refattn.packed_latents import check_packed, is_packed, packed_parts
from refattn.scales import (
    FP8_FORMATS,
    ROUNDING,
    Fp8Scales,
    Int8Scales,
    check_cache_scale,
    check_no_scale_per_sequence,
    check_scales,
    stored_in_pairs,
    stored_types,
)

FEW_SLOTS = 512  # up to this many, sorting in Python is faster than in torch
DENSE_SLOTS = 8  # bincount finds duplicates if the highest slot is below this many times the count
WRITTEN = "as a token that is written knows no sequence"  # the reason in errors


def check_slots(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    *,
    types: tuple[torch.dtype, torch.dtype] | None = None,
) -> None:
    """Check a write of new tokens `[t, hk, d]` into the pool `[n, p, hk, d]` by slots `[t]`.

    Tokens have the dtypes of the caches, or `types`.

    Raises:
        ValueError: naming the argument that does not fit, or shares memory with a pool; on a CPU also if a slot is
            outside the pool or given twice.
    """
    sizes = check(check(key_cache=(key_cache, "n p hk d")), value_cache=(value_cache, "n p hk dv"))
    check_sizes(block_size=sizes["p"])
    key_type, value_type = types or (key_cache.dtype, value_cache.dtype)
    check(
        sizes,
        key=(key, "t hk d", key_type),
        value=(value, "t hk dv", value_type),
        key_cache=(key_cache, "n p hk d"),
        value_cache=(value_cache, "n p hk dv"),
        slot_mapping=(slot_mapping, "int64 t"),
    )
    check_can_be_written(key_cache=key_cache, value_cache=value_cache)
    check_own_memory("key_cache", key_cache)
    check_own_memory("value_cache", value_cache)
    check_apart(dict(key_cache=key_cache, value_cache=value_cache), dict(key=key, value=value))
    if slot_mapping.is_cpu:
        check_slot_numbers(slot_mapping, key_cache.shape[0] * key_cache.shape[1])


def check_slot_numbers(slot_mapping: Tensor, num_slots: int) -> bool:
    """Check on a CPU that slots `[t]` are in a pool and, except for -1, unique; return whether some are -1.

    Raises:
        ValueError: naming a slot that is not.
    """
    count = slot_mapping.numel()
    if count == 0:
        return False
    if count <= FEW_SLOTS:
        slots = sorted(slot_mapping.tolist())
        lowest, highest = slots[0], slots[-1]
    else:
        lowest, highest = (int(end) for end in slot_mapping.aminmax())
    if lowest < -1 or highest >= num_slots:
        wrong = lowest if lowest < -1 else highest
        raise ValueError(f"slot_mapping: expected slots in 0..{num_slots - 1}, or -1 for padding, got {wrong}")
    if count <= FEW_SLOTS:
        twice = [slot for slot, following in pairwise(slots) if slot == following >= 0]
    elif highest < DENSE_SLOTS * count:  # counting is O(highest slot), faster than sorting if most slots are written
        twice = ((slot_mapping + 1).bincount()[1:] > 1).nonzero()[:1, 0].tolist()
    else:
        ordered = slot_mapping.sort().values
        twice = ordered[1:][(ordered[1:] == ordered[:-1]) & (ordered[1:] >= 0)][:1].tolist()
    if twice:
        raise ValueError(f"slot_mapping: expected each slot once, got slot {twice[0]} for several tokens")
    return lowest < 0


def check_quantized_slots(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    scales: Fp8Scales | Int8Scales,
) -> None:
    """Check a quantizing write of new tokens `[t, hk, d]` into the pool `[n, p, hk, d]` by slots `[t]`.

    Raises:
        ValueError: naming the argument; on a CPU also if a slot is outside the pool, or given twice.
    """
    stored = stored_types(key_cache, value_cache, scales)
    check(key_cache=(key_cache, "n p hk d", stored[0]))
    check(value_cache=(value_cache, "n p hk dv", stored[1]))
    for name, tensor in (("key", key), ("value", value)):
        check_numbers(name, tensor)
    kept_as_it_is = isinstance(scales, Int8Scales) and scales.value is None
    check_slots(
        key,
        value,
        key_cache,
        value_cache,
        slot_mapping,
        types=(key.dtype, value_cache.dtype if kept_as_it_is else key.dtype),
    )
    check_no_scale_per_sequence(scales, key_cache.shape[2], WRITTEN, besides=("query",))
    check_scales(scales, key_cache, value_cache, None, at_least=False)
    if isinstance(scales, Int8Scales):
        check_own_memory("scales.key", scales.key)
        pools = {"key_cache": key_cache, "value_cache": value_cache, "scales.key": scales.key}
        check_apart(
            pools, dict(key=key, value=value) | ({} if scales.value is None else {"scales.value": scales.value})
        )
    refuse_gradients(ROUNDING, key=key, value=None if kept_as_it_is else value, scales=scales)


def check_latent_slots(
    latent: Tensor, rope_key: Tensor, cache: Tensor, slot_mapping: Tensor, *, cache_scale: float
) -> None:
    """Check a write of new latents `[t, r]` and rotary keys `[t, rope]` into the cache `[n, p, c]` by slots `[t]`.

    They have the type of the cache, or any floating point type if the cache is fp8 or packed.

    Raises:
        ValueError: naming the argument; on a CPU also if a slot is outside the pool, or given twice.
    """
    check(cache=(cache, "n p c"))
    check_cache_scale(cache, cache_scale)
    kind = cache.dtype
    if kind in FP8_FORMATS or is_packed(cache):
        kind = check_numbers("latent", latent)
        refuse_gradients(ROUNDING, latent=latent, rope_key=rope_key)
    sizes = check(
        latent=(latent, "t r", kind),
        rope_key=(rope_key, "t rope", kind),
        cache=(cache, "n p c"),
        slot_mapping=(slot_mapping, "int64 t"),
    )
    rank, rope = sizes["r"], sizes["rope"]
    check_own_memory("cache", cache)
    check_apart(dict(cache=cache), dict(latent=latent, rope_key=rope_key))
    pages = cache[:, :, None]
    if is_packed(cache):
        check_packed(cache, rank, rope)
        quantized, _, rotary = packed_parts(pages, rank, rope)
        pools = quantized, rotary
    else:
        if rank + rope > cache.shape[2]:
            raise ValueError(
                f"cache: expected rows of at least r + rope = {rank + rope} elements, got c={cache.shape[2]}"
            )
        check_own_memory("cache", cache[..., : rank + rope])
        pools = pages[..., :rank], pages[..., rank : rank + rope]
    check_can_be_written(cache=cache)
    check_slots(latent[:, None], rope_key[:, None], *pools, slot_mapping, types=(kind, kind))


def check_pairs(cache: Tensor, *, scales: Fp8Scales | None = None, **tokens: Tensor) -> None:
    """Check a write of new keys and values `[t, hk, d]` of differential attention.

    With scales the cache is fp8, and tokens have any floating point type.

    Raises:
        ValueError: naming the first that does not fit the cache `[2, 2, n, p, hk/2, d]`.
    """
    kind = None if scales is None else stored_in_pairs(cache, scales)
    sizes = check(cache=(cache, "2 2 n p hk/2 d", kind))
    hk = 2 * sizes["hk/2"]
    for name, tensor in tokens.items():
        kind = cache.dtype if scales is None else check_numbers(name, tensor)
        check(dict(hk=hk, d=sizes["d"]), **{name: (tensor, "t hk d", kind)})
    if tokens:
        check_own_memory("cache", cache)
        check_apart(dict(cache=cache), tokens)
    if scales is not None:
        check_no_scale_per_sequence(scales, hk, WRITTEN, besides=("query",))
        check_scales(scales, cache[0, 0], cache[0, 1], None, at_least=False, hk=hk)


def check_block_pairs(
    sources: Sequence[Tensor],
    destinations: Sequence[Tensor],
    pairs: Tensor,
    *,
    names: tuple[str, str] = ("sources", "destinations"),
) -> None:
    """Check a copy of whole blocks between caches; the block is their first dimension.

    Raises:
        ValueError: if the caches differ in number, block shape or type, or a written one shares memory with another; if
            the pairs are on a CPU, also if a block is outside its pool or is written twice.
    """
    for name, caches in zip(names, (sources, destinations), strict=True):
        if not isinstance(caches, (list, tuple)):
            raise ValueError(f"{name}: expected a list of caches, got {describe(caches)}")
        for i, cache in enumerate(caches):
            if not isinstance(cache, Tensor) or not is_ordinary(cache) or cache.ndim < 1:
                raise ValueError(f"{name}[{i}]: expected a cache [n, ...], got {describe(cache)}")
    if len(sources) != len(destinations):
        raise ValueError(f"{names[1]}: expected {len(sources)} caches, as in sources, got {len(destinations)}")
    for i, (source, destination) in enumerate(zip(sources, destinations, strict=True)):
        if source.dtype != destination.dtype or source.shape[1:] != destination.shape[1:]:
            raise ValueError(f"{names[1]}[{i}]: expected blocks as in {describe(source)}, got {describe(destination)}")
        check_own_memory(f"{names[1]}[{i}]", destination)
        check_can_be_written(**{f"{names[1]}[{i}]": destination})
    check_pools_apart(names[1], destinations, None if sources is destinations else (names[0], sources))
    check(pairs=(pairs, "int64 k 2"))
    if not pairs.is_cpu or not pairs.numel() or not sources:
        return
    for column, caches in ((0, sources), (1, destinations)):
        n = min(cache.shape[0] for cache in caches)
        if int(pairs[:, column].min()) < 0 or int(pairs[:, column].max()) >= n:
            raise ValueError(f"pairs: expected blocks in 0..{n - 1}, got {pairs[:, column].tolist()}")
    if pairs[:, 1].unique().numel() != pairs.shape[0]:
        raise ValueError(f"pairs: expected each destination once, got {pairs[:, 1].tolist()}")


def check_gather(cache: Tensor, blocks: Tensor, seq_len: int) -> None:
    """Check that a row of a block table has blocks for `seq_len` tokens of a cache `[n, p, hk, d]`.

    Raises:
        ValueError: if there are too few blocks; on a CPU also if a block is outside the pool.
    """
    sizes = check(cache=(cache, "n p hk d"), blocks=(blocks, "int32 m"))
    check_sizes(block_size=sizes["p"])
    room = sizes["m"] * sizes["p"]
    if not is_int(seq_len) or not 0 <= seq_len <= room:
        raise ValueError(f"seq_len: expected 0..{room} for {blocks.shape[0]} blocks, got {describe(seq_len)}")
    needed = -(-seq_len // cache.shape[1])
    if blocks.is_cpu and needed:
        used = blocks[:needed]
        if int(used.min()) < 0 or int(used.max()) >= cache.shape[0]:
            raise ValueError(f"blocks: expected entries in 0..{cache.shape[0] - 1}, got {used.tolist()}")


def check_int8_pools(
    num_blocks: int,
    block_size: int,
    num_kv_heads: int,
    head_size: int,
    value_head_size: int,
    layout: str,
    value_dtype: torch.dtype,
    device: torch.device | str,
) -> None:
    """Check the sizes, layout, dtype of values and device of int8 pools to be allocated in one buffer.

    Raises:
        ValueError: naming the argument, what was expected and what was given.
    """
    check_sizes(
        num_blocks=num_blocks,
        block_size=block_size,
        num_kv_heads=num_kv_heads,
        head_size=head_size,
        value_head_size=value_head_size,
    )
    check_memory(value_dtype, device, name="value_dtype")
    if value_dtype != torch.int8 and value_dtype not in QUERY_TYPES:
        kind = str(value_dtype).removeprefix("torch.")
        raise ValueError(f"value_dtype: expected int8, bfloat16, float16, float32 or float64, got {kind}")
    if layout not in ("NHD", "HND"):
        raise ValueError(f'layout: expected "NHD" or "HND", got {layout!r}')
    key_bytes = num_blocks * block_size * num_kv_heads * head_size
    if key_bytes % value_dtype.itemsize:
        raise ValueError(
            f"head_size: expected keys of a multiple of {value_dtype.itemsize} bytes in all, as a value of that size "
            f"begins where they end, got {key_bytes}"
        )


def check_values(values: Sequence[Tensor]) -> None:
    """Check the arguments of `quantized.value_scales`, values `[t, hk, dv]`; on a CPU also that all are finite.

    Raises:
        ValueError: naming the tensor, what was expected and what was given.
    """
    check_list("values", values, "tensors [t, hk, dv]")
    if not values:
        raise ValueError("values: expected at least one tensor [t, hk, dv], got none")
    for i, value in enumerate(values):
        check(
            **{
                "values[0]": (values[0], "float s hk dv" if i else "float t hk dv"),
                f"values[{i}]": (value, "float t hk dv"),
            }
        )
        if value.is_cpu and not value.isfinite().all():
            raise ValueError(f"values[{i}]: expected finite numbers, got others")
