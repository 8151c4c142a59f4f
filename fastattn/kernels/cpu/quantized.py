"""Attention over quantized pages on the CPU: the kernel over pages, with key scales folded into the queries.

    fp8     (key scale * query) . quantized        one number per sequence and head: folded into the query
    int8    query . (scale * quantized)            one number per key: multiplied in when its block is gathered
    out     value scale * (weights . quantized)    per sequence and head, or per head and channel: applied to the output

Blocks are converted as they are gathered, a KV chunk at a time, and copied nowhere else. Everything is computed in
float32, float64 for float64 queries.
"""

import torch
from jaxtyping import Float, Int64, Shaped
from torch import Tensor

from fastattn.kernels.cpu.attention import paged
from fastattn.kernels.cpu.attention import tree as attend_to_tree
from fastattn.kernels.cpu.dequantize import PackedRows, QuantizedPool
from fastattn.kernels.problem import compute_dtype
from fastattn.kernels.torch_ops.merge import merge
from fastattn.kernels.torch_ops.quantized import fold_scales, row_scale, to_fp8, to_int8
from refattn.keys import PackedLatents
from refattn.options import AttentionOptions
from refattn.scales import Fp8Scales, Int8Scales
from refattn.trees import AttentionPlan, TreePlan


def attention(
    query: Float[Tensor, "t h d"],
    key_cache: Shaped[Tensor, "n p hk d"],
    value_cache: Shaped[Tensor, "n p hk dv"],
    plan: AttentionPlan,
    options: AttentionOptions,
    scales: Fp8Scales | Int8Scales,
) -> tuple[Float[Tensor, "t h dv"], Float[Tensor, "t h"]]:
    """Attend over quantized pages; in fp8, values may be the keys (latents); see `fastattn.dispatch`.

    Args:
        query: query rows of all sequences, not quantized.
        key_cache: the pool of keys.
        value_cache: the pool of values.
        plan: the levels, the last of which is that of the sequences (and of scales per sequence); or trees.
        options: the layer's options; sinks count once.
        scales: scales of the quantized values.
    """
    compute = compute_dtype(query.dtype)
    scaled_query, after = fold_scales(query, scales, plan.own, query.shape[1] // key_cache.shape[2])
    if isinstance(scales, Fp8Scales):
        keys = QuantizedPool(key_cache.view(scales.format), compute)
        values = keys if value_cache is key_cache else QuantizedPool(value_cache.view(scales.format), compute)
        scaled_query, after = scaled_query * keys.factor, after * values.factor
    else:
        keys, values = QuantizedPool(key_cache, compute, scales.key), QuantizedPool(value_cache, compute)
    out, lse = attend_to_pools(scaled_query, keys, values, plan, options)
    return (out * after.to(compute)).to(query.dtype), lse


def attend_to_pools(
    query: Float[Tensor, "t h d"],
    keys: QuantizedPool,
    values: QuantizedPool,
    plan: AttentionPlan,
    options: AttentionOptions,
) -> tuple[Float[Tensor, "t h dv"], Float[Tensor, "t h"]]:
    """Attend over pools that are dequantized as they are read, level by level, or to trees; in the type of `query`."""
    if isinstance(plan, TreePlan):
        return attend_to_tree(query, keys, values, plan, options)
    *shared, whole = (level.own for level in plan.levels)
    parts = [paged(query, keys, values, level, options.without_sinks()) for level in shared]
    parts.append(paged(query, keys, values, whole, options))
    return merge(*zip(*parts, strict=True)) if shared else parts[0]


def packed(
    query: Float[Tensor, "t h d"], keys: PackedLatents, plan: AttentionPlan, options: AttentionOptions
) -> tuple[Float[Tensor, "t h {keys.latent_rank}"], Float[Tensor, "t h"]]:
    """Attend over packed latents, which are dequantized as they are gathered; see `fastattn.dispatch`."""
    compute, rank = compute_dtype(query.dtype), keys.latent_rank
    pool = PackedRows(keys.cache[:, :, None], compute, None, rank, query.shape[2] - rank)
    if isinstance(plan, TreePlan):
        out, lse = attend_to_tree(query.to(compute), pool, pool, plan, options)
    else:
        (level,) = plan.levels
        out, lse = paged(query.to(compute), pool, pool, level.own, options)
    return out[..., :rank].to(query.dtype).contiguous(), lse


def write(
    key: Float[Tensor, "t hk d"],
    value: Float[Tensor, "t hk dv"],
    key_cache: Shaped[Tensor, "n p hk d"],
    value_cache: Shaped[Tensor, "n p hk dv"],
    slot_mapping: Int64[Tensor, "t"],
    scales: Fp8Scales | Int8Scales,
) -> None:
    """Quantize new tokens and write them into the pool; see `fastattn.quantized.write`."""
    real = slot_mapping >= 0
    if not real.all():
        key, value, slot_mapping = key[real], value[real], slot_mapping[real]
    blocks, rows = slot_mapping // key_cache.shape[1], slot_mapping % key_cache.shape[1]
    if isinstance(scales, Fp8Scales):
        for x, cache, scale in ((key, key_cache, scales.key), (value, value_cache, scales.value)):
            divisor = (
                scale[:, None]
                if isinstance(scale, Tensor)
                else torch.full((1, 1), scale, dtype=torch.float32, device="cpu")
            )
            cache.view(torch.uint8)[blocks, rows] = to_fp8(x, divisor, scales.format).view(torch.uint8)
        return
    scale = row_scale(key)
    key_cache[blocks, rows] = to_int8(key, scale)
    if scales.value is not None:
        scale = scale.masked_fill(value.isnan().any(-1, keepdim=True), torch.nan)
        value = to_int8(value, scales.value)
    value_cache[blocks, rows] = value
    scales.key[blocks, rows] = scale[..., 0]
