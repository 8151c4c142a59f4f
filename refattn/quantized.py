"""Attention over a quantized cache: keys and values in 8 or 4 bits, and the scales that dequantize them.

    write        quantized = round(x / scale), within the range of the format
    attention    x' = scale * quantized, then attention over x' as usual

    format    quantized to                              scale of a key         scale of a value       of a query
    fp8       an 8-bit float: e4m3 up to 448,           fixed: one, per        as for a key           as for a key, or
              e5m2 up to 57344                          head, per sequence                            not quantized
    int8      an integer from -127 to 127               its own largest        fixed: per head and    its own largest
                                                        element / 127          channel; or not        element / 127
                                                                               quantized
    int4      an integer from 0 to 15, of the     its own range         its own range / 15     not quantized
              row turned by a Hadamard matrix     / 15, a zero point    and a zero point
    nvfp4     e2m1: up to 6                       of each 16 elements:  as for a key           not quantized
                                                  e4m3, up to 448

The write computes the scales of int8 keys, one per token and KV head, and stores them in their own pool
(`allocate_int8`). An fp8 cache needs no such pool: use `kv_cache.allocate` with `dtype=torch.float8_e4m3fn`.
`kv_cache.copy_blocks` and `swap_blocks` move blocks of all; pass the scales that a write sets as further pools.

Four bits: `refattn.four_bits` has the bytes, `refattn.rounding` the arithmetic. A turned key has the same product with
a turned query, so a kernel turns the query and the output; here each key and value is turned back as it is read.

Rounding is computed in float32, to nearest, ties to even. Values that are too large saturate, infinity included; a
plain cast would give infinity for e5m2, and NaN for e4m3 before PyTorch 2.12. NaN stays NaN. Int8 cannot represent it,
so the scale of a key is NaN if the key, or the int8 value of that token and head, has a NaN, and every output that sees
the token is NaN. In a row with its own scale infinity becomes NaN, too.

Source: Micikevicius et al. 2022, "FP8 Formats for Deep Learning"; Shah et al. 2024, "FlashAttention-3"; 8-bit integers
    with a scale for each row: Dettmers et al. 2022, "LLM.int8()"; turned caches: Ashkboos et al. 2024, "QuaRot".
"""

from collections.abc import Sequence

import torch
from einops import rearrange
from jaxtyping import Float, Float32, Int64, Shaped, UInt8
from torch import Tensor

from refattn import allocation
from refattn.attention import attend_to
from refattn.batch import Batch
from refattn.checks import check_sizes, rows_with_slots
from refattn.checks_of_writes import check_quantized_slots, check_values
from refattn.four_bits import FourBitScales, Int4Scales, Nvfp4Scales, check_four_bit_slots
from refattn.keys import quantized_pages
from refattn.options import AttentionOptions
from refattn.plan import Plan
from refattn.rounding import per_head, row_scale, scale_of, to_fp8, to_int4, to_int8, to_nvfp4
from refattn.scales import Fp8Scales, Int8Scales
from refattn.trees import AttentionPlan


def plan(batch: Batch, *, block_size: int, causal: bool = True, window_size: tuple[int, int] = (-1, -1)) -> Plan:
    """Plan attention over all tokens of each sequence in the cache, as `chunked_prefill.plan` does.

    A plan does not depend on the type of the cache, so one from `sliding_window`, `local`, `cascade` or `speculative`
    works here, too.

    Args:
        batch: the lengths and the block table.
        block_size: tokens in a block, `p`.
        causal: hide the keys after a query's own position; False shows every key of the sequence.
        window_size: `(left, right)` in tokens, both inclusive, -1 for no limit.

    Returns:
        A plan for every layer of this step.

    Raises:
        ValueError: naming the argument that does not fit; the contents of the batch are checked on a CPU.
    """
    check_sizes(block_size=block_size)
    return Plan(batch, block_size, causal, window_size)


def attention(
    query: Float[Tensor, "t h d"],
    key_cache: Shaped[Tensor, "n p hk _"],
    value_cache: Shaped[Tensor, "n p hk _"],
    plan: AttentionPlan,
    options: AttentionOptions = AttentionOptions(),
    *,
    scales: Fp8Scales | Int8Scales | FourBitScales,
    return_lse: bool = False,
    out: Float[Tensor, "t h dv"] | None = None,
) -> Float[Tensor, "t h dv"] | tuple[Float[Tensor, "t h dv"], Float[Tensor, "t h"]]:
    """Attend from the new tokens of each sequence to its tokens in a quantized cache, the new ones included.

        key'[j]   = key scale * quantized key[j]          value'[j] = value scale * quantized value[j]
        query'    = query scale * quantized query         for int8, and for fp8 if `scales.query` is given
        out       = attention(query', key', value')            under the mask of the plan

    for int4    key'[j] = hadamard(scale[j] * (quantized key[j] - zero[j])), values the same; the query is unchanged
    for nvfp4   key'[j] = number * scale of each 16 elements * quantized key[j]

    Write the new keys and values first (`write`).

    Args:
        query: new tokens of all sequences; rows after the last sequence are padding. Unquantized, or already in the fp8
            format of the cache under `scales.query`, and then not rounded again.
        key_cache: the pool of keys; any strides. fp8, in its own dtype or as bytes (`torch.uint8`), int8, or 4 bits, as
            bytes of two elements, `d/2` for each head.
        value_cache: the pool of values, of the same type; for int8 keys without `scales.value`, floating point.
        plan: from `plan` or another path over pages, once per step; also a cascade or draft trees.
        options: the layer's options; sinks count once.
        scales: the scales of the layer. Scales per sequence follow the sequences of the batch, even if the plan has
            virtual sequences. A cascade takes no scale per sequence, because shared keys were written under one scale.
        return_lse: also return the log-sum-exp.
        out: where to write the outputs; a new tensor if None.

    Returns:
        As `chunked_prefill.attention`, in the type of `query`; for an fp8 query in the type of `out`, or bfloat16.

    Raises:
        ValueError: naming the argument that does not fit. Nothing is written then.

    Source: the descales of Shah et al. 2024, "FlashAttention-3".
    """
    keys = quantized_pages(key_cache, value_cache, scales)
    return attend_to(query, keys, plan, options, return_lse=return_lse, out=out)


def write(
    key: Float[Tensor, "rows hk d"],
    value: Float[Tensor, "rows hk dv"],
    key_cache: Shaped[Tensor, "n p hk _"],
    value_cache: Shaped[Tensor, "n p hk _"],
    slot_mapping: Int64[Tensor, "t"],
    *,
    scales: Fp8Scales | Int8Scales | FourBitScales,
) -> None:
    """Quantize new tokens and write them into the pool, in place; for int8 also the scales of the keys.

        fp8     quantized = cast(clamp(x / scale, -largest, largest))
        int8    quantized = clamp(round(x / scale), -127, 127)         scale of a key = max |x| / 127, or 1 if that is 0
        int4    quantized = clamp(round(y / scale) + zero, 0, 15)      y = hadamard(x), scale = (max y - min y) / 15
        nvfp4   quantized = e2m1(x / (scale number))                   scale of 16 elements = e4m3(max |x| / (6 number))

    So a key of zeros stays zero. For int8 without `scales.value`, values are written unquantized.

    Args:
        key: the new keys, of any floating point type; rows after the last slot are padding.
        value: the new values.
        key_cache: the pool of keys, changed in place.
        value_cache: the pool of values, changed in place.
        slot_mapping: the slot of each token, each slot at most once; -1 is padding and is not written.
        scales: as in `attention`; `Int8Scales.key` is changed in place, and both pools of scales of 4 bits. A key or
            value scale per sequence raises.

    Raises:
        ValueError: if types, shapes or devices do not match, or the tokens share memory with a pool; on a CPU also if a
            slot is outside the pool or is given twice. Nothing is written then.

    Source: vLLM's `reshape_and_cache_flash`, which divides by fixed scales.
    """
    key, value = rows_with_slots(key, value, slot_mapping)
    if isinstance(scales, Int4Scales | Nvfp4Scales):
        _write_four_bits(key, value, key_cache, value_cache, slot_mapping, scales)
        return
    check_quantized_slots(key, value, key_cache, value_cache, slot_mapping, scales)
    for token, slot in enumerate(slot_mapping.tolist()):
        if slot == -1:
            continue
        block, row = divmod(slot, key_cache.shape[1])
        if isinstance(scales, Fp8Scales):
            for x, cache, scale in ((key, key_cache, scales.key), (value, value_cache, scales.value)):
                of_heads = per_head(scale, key.shape[1], 0).to(key.device)
                cache.view(scales.format)[block, row] = to_fp8(x[token], of_heads, scales.format)
            continue
        scale = row_scale(key[token])
        key_cache[block, row] = to_int8(key[token], scale)
        scales.key[block, row] = rearrange(scale, "hk 1 -> hk")
        if scales.value is None:
            value_cache[block, row] = value[token]
        else:
            value_cache[block, row] = to_int8(value[token], scales.value)
            scales.key[block, row].masked_fill_(value[token].isnan().any(-1), torch.nan)


def _write_four_bits(
    key: Float[Tensor, "t hk d"],
    value: Float[Tensor, "t hk dv"],
    key_cache: UInt8[Tensor, "n p hk half"],
    value_cache: UInt8[Tensor, "n p hk value_half"],
    slot_mapping: Int64[Tensor, "t"],
    scales: FourBitScales,
) -> None:
    """Quantize new tokens to four bits; write them and their scales into the pools, in place."""
    check_four_bit_slots(key, value, key_cache, value_cache, slot_mapping, scales)
    for token, slot in enumerate(slot_mapping.tolist()):
        if slot == -1:
            continue
        block, row = divmod(slot, key_cache.shape[1])
        if isinstance(scales, Int4Scales):
            key_cache[block, row], scales.key[block, row] = to_int4(key[token])
            value_cache[block, row], scales.value[block, row] = to_int4(value[token])
        else:
            key_cache[block, row], scales.key[block, row] = to_nvfp4(key[token], scales.of_keys)
            value_cache[block, row], scales.value[block, row] = to_nvfp4(value[token], scales.of_values)


allocate_int8 = allocation.allocate_int8
allocate_int4 = allocation.allocate_int4
allocate_nvfp4 = allocation.allocate_nvfp4


def value_scales(values: Sequence[Float[Tensor, "_ hk dv"]]) -> Float32[Tensor, "hk dv"]:
    """Return the scales of int8 values per KV head and channel, from the values of calibration data.

        scale[h, c] = max over all tokens of |value[t, h, c]| / 127, or 1 if that is 0

    Args:
        values: the values of one layer, one tensor per calibration batch.

    Returns:
        The scales, for `Int8Scales.value`. Larger values than in the calibration data saturate.

    Raises:
        ValueError: if there are no tensors, or they differ in heads or sizes; on a CPU also if a value is not finite.
    """
    check_values(values)
    largest = torch.stack([_largest(value) for value in values]).amax(0)
    return scale_of(largest)


def _largest(value: Float[Tensor, "t hk dv"]) -> Float32[Tensor, "hk dv"]:
    zeros = torch.zeros(1, *value.shape[1:], dtype=torch.float32, device=value.device)  # for a tensor without tokens
    return torch.cat([value.float().abs(), zeros]).amax(0)
