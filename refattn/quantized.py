"""Attention over a quantized cache: keys and values of 8 bits each, and the scales that turn them back into numbers.

    write        quantized = round(x / scale), within the range of the format
    attention    x' = scale * quantized, then attention over x' as usual

    format    quantized to                              scale of a key         scale of a value       of a query
    fp8       a float of 8 bits: e4m3 up to 448,        fixed: one, per        likewise               likewise, or the
              e5m2 up to 57344                          head, per sequence                            query stays
    int8      a whole number from -127 to 127           its own largest        fixed: per head and    its own largest
                                                        element / 127          channel; or the        element / 127
                                                                               value stays

The scales of int8 keys are worked out by the write, one for each token and KV head, and lie beside the pool
(`allocate_int8`). Nothing lies beside a pool of fp8: `kv_cache.allocate` makes one of `dtype=torch.float8_e4m3fn`.
`kv_cache.copy_blocks` and `swap_blocks` move blocks of either, those of int8 with their scales as one more cache.

All rounding is computed in float32, to the nearest value, ties to even. A number that is too large for a format becomes
its largest number, infinity too; a cast alone would give infinity for e5m2, and NaN for e4m3 before PyTorch 2.12. NaN
stays NaN. Int8 has no value for it, so the scale of a key is NaN if the key or an int8 value of that token and head has
one, and every answer that sees the token is NaN. A row with its own scale has no largest number, so infinity in it
comes out as NaN, too.

Source: Micikevicius et al. 2022, "FP8 Formats for Deep Learning"; Shah et al. 2024, "FlashAttention-3"; 8-bit integers
    with a scale for each row: Dettmers et al. 2022, "LLM.int8()".
"""

from collections.abc import Sequence

import torch
from einops import rearrange
from jaxtyping import Float, Float32, Int64, Shaped
from torch import Tensor

from refattn import allocation
from refattn.attention import attend_to
from refattn.batch import Batch
from refattn.checks import check_sizes, rows_with_slots
from refattn.checks_of_writes import check_quantized_slots, check_values
from refattn.keys import QuantizedPages
from refattn.options import AttentionOptions
from refattn.plan import Plan
from refattn.rounding import per_head, row_scale, scale_of, to_fp8, to_int8
from refattn.scales import Fp8Scales, Int8Scales
from refattn.trees import AttentionPlan


def plan(batch: Batch, *, block_size: int, causal: bool = True, window_size: tuple[int, int] = (-1, -1)) -> Plan:
    """Plan attention over all tokens of each sequence in the cache, as `chunked_prefill.plan` does.

    A plan says where keys are, and not what they are made of: one of `sliding_window`, `local`, `cascade` or
    `speculative` is as good here.

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
    key_cache: Shaped[Tensor, "n p hk d"],
    value_cache: Shaped[Tensor, "n p hk dv"],
    plan: AttentionPlan,
    options: AttentionOptions = AttentionOptions(),
    *,
    scales: Fp8Scales | Int8Scales,
    return_lse: bool = False,
    out: Float[Tensor, "t h dv"] | None = None,
) -> Float[Tensor, "t h dv"] | tuple[Float[Tensor, "t h dv"], Float[Tensor, "t h"]]:
    """Attend from the new tokens of each sequence to its tokens in a quantized cache, the new ones included.

        key'[j]   = key scale * quantized key[j]          value'[j] = value scale * quantized value[j]
        query'    = query scale * quantized query         for int8, and for fp8 if there is a scale for it
        out       = attention(query', key', value')            of the path that the plan is of

    Write the new keys and values first (`write`).

    Args:
        query: new tokens of all sequences; rows after the last sequence are padding. Not quantized, or already fp8 of
            the format of the cache, under `scales.query`: no kernel rounds it again.
        key_cache: the pool of keys; any strides. fp8 as its own type or as bytes (`torch.uint8`), or int8.
        value_cache: the pool of values, of the same type; floating point under int8 keys without `scales.value`.
        plan: from `plan`, or of another path over pages, once per step; levels of a cascade and drafted trees, too.
        options: those of the layer; the sinks are counted once.
        scales: what the layer's quantized values are multiplied with. Scales per sequence are those of the batch, in a
            plan of virtual sequences, too. A cascade takes none per sequence: what several share was written under one
            scale.
        return_lse: also return the log-sum-exp.
        out: where to write the outputs; a new tensor if None.

    Returns:
        As `chunked_prefill.attention`, in the type of `query`; for a query in fp8 in that of `out`, bfloat16 without.

    Raises:
        ValueError: naming the argument that does not fit. Nothing is written then.

    Source: the descales of Shah et al. 2024, "FlashAttention-3".
    """
    keys = QuantizedPages(key_cache, value_cache, scales)
    return attend_to(query, keys, plan, options, return_lse=return_lse, out=out)


def write(
    key: Float[Tensor, "rows hk d"],
    value: Float[Tensor, "rows hk dv"],
    key_cache: Shaped[Tensor, "n p hk d"],
    value_cache: Shaped[Tensor, "n p hk dv"],
    slot_mapping: Int64[Tensor, "t"],
    *,
    scales: Fp8Scales | Int8Scales,
) -> None:
    """Quantize new tokens and write them into the pool, in place, with the scales that are worked out for them.

        fp8     quantized = cast(clamp(x / scale, -largest, largest))
        int8    quantized = clamp(round(x / scale), -127, 127)         scale of a key = max |x| / 127, or 1 if that is 0

    So a key of zeros stays zero. Int8 values without a `scales.value` are written as they are.

    Args:
        key: the new keys, of any floating point type; rows after the last slot are padding.
        value: the new values.
        key_cache: the pool of keys, changed in place.
        value_cache: the pool of values, changed in place.
        slot_mapping: the slot of each token, each at most once; -1 is padding and is not written.
        scales: as in `attention`; `scales.key` of int8 is changed in place. Scales per sequence are refused.

    Raises:
        ValueError: if types, shapes or devices do not match, or tokens lie in a pool, too; on a CPU also if a slot is
            outside the pool or is given twice. Nothing is written then.

    Source: the write of vLLM's `reshape_and_cache_flash`, which divides by fixed scales.
    """
    key, value = rows_with_slots(key, value, slot_mapping)
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


allocate_int8 = allocation.allocate_int8


def value_scales(values: Sequence[Float[Tensor, "_ hk dv"]]) -> Float32[Tensor, "hk dv"]:
    """Return the scale of int8 values per KV head and channel, from values that a model has computed.

        scale[h, c] = max over all tokens of |value[t, h, c]| / 127, or 1 if that is 0

    Args:
        values: those of one layer, as many tensors as there are: each batch of a data set.

    Returns:
        The scales, for `Int8Scales.value`. What is larger than all that was seen here saturates.

    Raises:
        ValueError: if there are no tensors, or they differ in heads or sizes; on a CPU also if a number is not finite.
    """
    check_values(values)
    largest = torch.stack([_largest(value) for value in values]).amax(0)
    return scale_of(largest)


def _largest(value: Float[Tensor, "t hk dv"]) -> Float32[Tensor, "hk dv"]:
    zeros = torch.zeros(1, *value.shape[1:], dtype=torch.float32, device=value.device)  # no token is a tensor, too
    return torch.cat([value.float().abs(), zeros]).amax(0)
