"""Attention over a quantized cache by the fastest kernel; the twin of `refattn.quantized`."""

from collections.abc import Sequence

import torch
from jaxtyping import Float, Float32, Int64, Shaped
from torch import Tensor

from fastattn import dispatch
from refattn import allocation
from refattn.batch import Batch
from refattn.checks import check_sizes, rows_with_slots
from refattn.checks_of_writes import check_quantized_slots, check_values
from refattn.four_bits import FourBitScales, Int4Scales, Nvfp4Scales, check_four_bit_slots
from refattn.keys import quantized_pages
from refattn.options import AttentionOptions
from refattn.plan import Plan
from refattn.scales import FP8_FORMATS, Fp8Scales, Int8Scales, type_of_outputs
from refattn.trees import AttentionPlan


def plan(batch: Batch, *, block_size: int, causal: bool = True, window_size: tuple[int, int] = (-1, -1)) -> Plan:
    """Plan attention over all tokens of each sequence in the cache; the twin of `refattn.quantized.plan`."""
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
    """Attend from the new tokens of each sequence to its tokens in a quantized cache; the twin of `refattn.quantized`.

    Arguments, results and errors are those of `refattn.quantized.attention`. An fp8 query is converted exactly to the
    type of the outputs, and its scale is multiplied into that of the keys, so any kernel can compute it.

    Raises:
        NotImplementedError: if no kernel computes the combination, with the reason of each.
    """
    keys = quantized_pages(key_cache, value_cache, scales)
    if isinstance(query, Tensor) and query.dtype in FP8_FORMATS:
        keys.check(query, plan, options, out, return_lse)
        query, scales = _as_numbers(query, scales, out)
        keys = quantized_pages(key_cache, value_cache, scales)
    return dispatch.attend(query, keys, plan, options, out, return_lse)


def _as_numbers(query: Tensor, scales: object, out: Tensor | None) -> tuple[Tensor, Fp8Scales]:
    """Return an fp8 query in the type of its outputs, and the scales with its own multiplied into that of the keys."""
    assert isinstance(scales, Fp8Scales) and scales.query is not None  # checked before
    scales = Fp8Scales(scales.key * scales.query, scales.value, format=scales.format)
    return query.to(type_of_outputs(query, out)), scales


def write(
    key: Float[Tensor, "rows hk d"],
    value: Float[Tensor, "rows hk dv"],
    key_cache: Shaped[Tensor, "n p hk _"],
    value_cache: Shaped[Tensor, "n p hk _"],
    slot_mapping: Int64[Tensor, "t"],
    *,
    scales: Fp8Scales | Int8Scales | FourBitScales,
) -> None:
    """Quantize new tokens and write them into the pool in one pass; the twin of `refattn.quantized.write`.

    Arguments and errors are those of `refattn.quantized.write`.
    """
    key, value = rows_with_slots(key, value, slot_mapping)
    tensors = dict(key=key, value=value, key_cache=key_cache, value_cache=value_cache)
    if isinstance(scales, Int4Scales | Nvfp4Scales):
        check_four_bit_slots(key, value, key_cache, value_cache, slot_mapping, scales)
        operation = "write_int4" if isinstance(scales, Int4Scales) else "write_nvfp4"
        dispatch.run(operation, **tensors, slot_mapping=slot_mapping, scales=scales)
        return
    check_quantized_slots(key, value, key_cache, value_cache, slot_mapping, scales)
    dispatch.run("write_quantized", **tensors, slot_mapping=slot_mapping, scales=scales)


allocate_int8 = allocation.allocate_int8
allocate_int4 = allocation.allocate_int4
allocate_nvfp4 = allocation.allocate_nvfp4


def value_scales(values: Sequence[Float[Tensor, "_ hk dv"]]) -> Float32[Tensor, "hk dv"]:
    """Return the scales of int8 values per KV head and channel; the twin of `refattn.quantized.value_scales`."""
    check_values(values)
    largest = values[0].new_zeros(values[0].shape[1:], dtype=torch.float32)
    for value in values:
        if len(value):
            largest = torch.maximum(largest, value.float().abs().amax(0))
    scale = largest / torch.full_like(largest, 127.0)  # on a GPU, x / 127.0 multiplies by the reciprocal
    return scale.masked_fill_(scale == 0, 1.0)
