"""Where the keys are, read: the keys and values of each sequence of a plan as numbers, whatever stores them.

    Rows              sequence `i` has rows `cu_seqlens_k[i]` to `cu_seqlens_k[i + 1]`
    Pages             its tokens are in the blocks of row `i` of the block table
    QuantizedPages    likewise, and a number is `scale * code`; queries may be rounded as keys are
    Latents           pages of which the value is the first part of the key; codes of fp8 as in quantised pages
    PackedLatents     likewise, in bytes: codes under a scale for each 128 of them, and rotary keys as numbers

All that follows, masks and softmax and merging, is the same for each of them (`refattn.attention`).
"""

from collections.abc import Iterator

import torch
from einops import rearrange, repeat
from jaxtyping import Float, Float32, Int8, Shaped, UInt8
from torch import Tensor

from refattn.interface import Fp8Scales, Int8Scales, Keys, Latents, PackedLatents, Pages, Plan, QuantizedPages, Rows
from refattn.interface.ambient import compute_dtype
from refattn.interface.packed import LATENT_GROUP, PACKED_FORMAT, SMALLEST_SCALE, packed_parts
from refattn.kv_cache import gather

Sequences = Iterator[tuple[Float[Tensor, "_ hk d"], Float[Tensor, "_ hk dv"]]]


def read(query: Float[Tensor, "t h d"], keys: Keys, plan: Plan) -> Sequences:
    """Read the keys and the values of each sequence of a plan, in order.

    Args:
        query: the queries that will meet them: its type decides the compute type, its size what is read of latents.
        keys: where they are.
        plan: over rows for `Rows`, over pages for all others.

    Returns:
        For each sequence its keys and its values.
    """
    if isinstance(keys, Rows):
        for first, last in plan.batch.key_rows():
            yield keys.key[first:last], keys.value[first:last]
        return
    assert plan.batch.block_table is not None  # it is a plan over pages
    for i, (blocks, seq_len) in enumerate(zip(plan.batch.block_table, plan.batch.seq_lens.tolist(), strict=True)):
        if isinstance(keys, Latents | PackedLatents):
            rows = gather(rearrange(keys.cache, "n p c -> n p 1 c"), blocks, seq_len)
            if isinstance(keys, PackedLatents):
                key = read_packed(rows, keys.latent_rank, query.shape[2] - keys.latent_rank, query.dtype)
            else:
                key = read_latents(rows[..., : query.shape[2]], keys.cache_scale, query.dtype)
            yield key, key[..., : keys.latent_rank]
            continue
        key, value = (gather(cache, blocks, seq_len) for cache in keys[:2])
        if isinstance(keys, Pages):
            yield key, value
        elif isinstance(keys.scales, Fp8Scales):
            yield _read_fp8(key, value, keys.scales, _member(plan, i), query)
        else:
            of_key = gather(rearrange(keys.scales.key, "n p hk -> n p hk 1"), blocks, seq_len)
            yield _read_int8(key, value, of_key, keys.scales.value, query)


def read_query(query: Float[Tensor, "t h d"], keys: Keys, plan: Plan) -> Float[Tensor, "t h d"]:
    """Return the queries as they meet the keys: rounded to codes where quantised keys ask for that, else as they are.

    Args:
        query: query rows of all sequences.
        keys: where the keys are.
        plan: which rows belong to which sequence.

    Returns:
        The queries, in the compute type if they are rounded.
    """
    if isinstance(keys, Latents) and keys.query_scale is not None:
        compute, scale = compute_dtype(query.dtype), per_head(keys.query_scale, query.shape[1], 0).to(query.device)
        return to_fp8(query, scale, keys.cache.dtype).to(compute) * scale.to(compute)
    if not isinstance(keys, QuantizedPages):
        return query
    compute, scales = compute_dtype(query.dtype), keys.scales
    if isinstance(scales, Fp8Scales) and scales.query is None:
        return query
    rounded, num_kv_heads = query.to(compute, copy=True), keys.key_cache.shape[2]
    for i, (q0, q1) in enumerate(plan.batch.query_rows()):
        x = query[q0:q1]
        if isinstance(scales, Int8Scales):
            of_rows = row_scale(x)
            rounded[q0:q1] = to_int8(x, of_rows).to(compute) * of_rows.to(compute)
            continue
        assert scales.query is not None  # or nothing is rounded
        of_kv_heads = per_head(scales.query, num_kv_heads, _member(plan, i)).to(query.device)
        of_heads = repeat(of_kv_heads, "hk 1 -> (hk g) 1", g=query.shape[1] // num_kv_heads)
        codes = x if query.dtype == scales.format else to_fp8(x, of_heads, scales.format)
        rounded[q0:q1] = codes.to(compute) * of_heads.to(compute)
    return rounded


def read_latents(codes: Shaped[Tensor, "*rows d"], cache_scale: float, dtype: torch.dtype) -> Float[Tensor, "*rows d"]:
    """Return the latents that codes stand for, in the compute type of queries of `dtype`; 1 leaves numbers alone."""
    return codes.to(compute_dtype(dtype)) * torch.tensor(cache_scale, dtype=torch.float32, device="cpu")


def read_packed(
    rows: UInt8[Tensor, "*rows c"], latent_rank: int, rope_size: int, dtype: torch.dtype
) -> Float[Tensor, "*rows d"]:
    """Return the latents and rotary keys of packed rows, in the compute type of queries of `dtype`.

    A scale is a number of 32 bits, whatever type is computed in: a product of it and a code is rounded once.
    """
    compute = compute_dtype(dtype)
    codes, scales, rope_key = packed_parts(rows, latent_rank, rope_size)
    wide = torch.promote_types(compute, scales.dtype)
    groups = rearrange(codes.view(PACKED_FORMAT).to(wide), "... (g e) -> ... g e", e=LATENT_GROUP)
    latent = rearrange(groups * scales.to(wide)[..., None], "... g e -> ... (g e)")
    return torch.cat([latent.to(compute), rope_key.to(compute)], dim=-1)


def _member(plan: Plan, i: int) -> int:
    """Return the sequence of the batch that a sequence of a plan belongs to."""
    return i if plan.sequences is None else int(plan.sequences[i])


def _read_fp8(
    key: Shaped[Tensor, "s hk d"],
    value: Shaped[Tensor, "s hk dv"],
    scales: Fp8Scales,
    sequence: int,
    query: Float[Tensor, "t h d"],
) -> tuple[Float[Tensor, "s hk d"], Float[Tensor, "s hk dv"]]:
    """Return the keys and values of one sequence that its codes stand for."""
    compute, hk = compute_dtype(query.dtype), key.shape[1]
    of_key, of_value = (per_head(x, hk, sequence).to(query.device, compute) for x in (scales.key, scales.value))
    key, value = (codes.view(scales.format).to(compute) for codes in (key, value))
    return _times(key, of_key), _times(value, of_value)


def _read_int8(
    key: Int8[Tensor, "s hk d"],
    value: Shaped[Tensor, "s hk dv"],
    of_key: Float32[Tensor, "s hk 1"],
    of_value: Float32[Tensor, "hk dv"] | None,
    query: Float[Tensor, "t h d"],
) -> tuple[Float[Tensor, "s hk d"], Float[Tensor, "s hk dv"]]:
    """Return the keys and values of one sequence that its codes stand for."""
    compute = compute_dtype(query.dtype)
    numbers = value.to(compute) * (1.0 if of_value is None else of_value.to(compute))
    return key.to(compute) * of_key.to(compute), numbers


def _times(codes: Float[Tensor, "s hk d"], scale: Float[Tensor, "hk 1"]) -> Float[Tensor, "s hk d"]:
    """Multiply codes with their scale; NaN and infinity stay, and have no part in the gradient of the scale."""
    finite = codes.isfinite()
    return torch.where(finite, codes.masked_fill(~finite, 0.0) * scale, codes)


# --- numbers into codes ---


def to_fp8(x: Float[Tensor, "*rows heads size"], scale: Float32[Tensor, "heads 1"], kind: torch.dtype) -> Tensor:
    """Round to the nearest code of an fp8 format; what is too large becomes its largest number."""
    largest = torch.finfo(kind).max
    return (x.float() / scale).clamp(-largest, largest).to(kind)


def to_int8(
    x: Float[Tensor, "*rows heads size"], scale: Float32[Tensor, "*rows2 heads #size"]
) -> Int8[Tensor, "*rows heads size"]:
    """Round to the nearest, of two to the even; NaN, for which there is no code, becomes 0 under a scale of NaN."""
    return (x.float() / scale).round().clamp(-127, 127).nan_to_num(0.0).to(torch.int8)


def row_scale(x: Float[Tensor, "*rows heads size"]) -> Float32[Tensor, "*rows heads 1"]:
    """Return the scale of each row and head: its largest element becomes 127."""
    return scale_of(x.float().abs().amax(-1, keepdim=True))


def scale_of(largest: Float32[Tensor, "..."]) -> Float32[Tensor, "..."]:
    """Return the scale by which the largest number becomes 127; 1 if it is 0, or too small to be divided."""
    scale = largest / torch.full_like(largest, 127.0)  # a GPU divides by a number as it multiplies by its reciprocal
    return scale.masked_fill(scale == 0, 1.0)


def group_scales(latent: Float[Tensor, "_"]) -> Float32[Tensor, "_"]:
    """Return the scale of each 128 elements of a latent: its largest becomes 448; the smallest normal number for 0."""
    largest = rearrange(latent.float().abs(), "(g e) -> g e", e=LATENT_GROUP).amax(-1)
    return (largest / torch.full_like(largest, torch.finfo(PACKED_FORMAT).max)).clamp(min=SMALLEST_SCALE)


def per_head(scale: float | Float32[Tensor, "..."], num_kv_heads: int, sequence: int) -> Float32[Tensor, "hk 1"]:
    """Return the scale of each KV head for one sequence of the batch."""
    numbers = torch.as_tensor(scale, dtype=torch.float32, device=scale.device if isinstance(scale, Tensor) else "cpu")
    numbers = numbers[sequence] if numbers.ndim == 2 else numbers
    return rearrange(numbers.expand(num_kv_heads), "hk -> hk 1")
