"""Four-bit pages: two quantized values per byte, and their scales in pools of their own.

    a row of bytes    | 1 0 | 3 2 | 5 4 | ...           element 2 i in the low four bits of byte i, 2 i + 1 in the high

    format    quantized to                          scale of keys and values
    int4      an integer from 0 to 15               one per token and KV head, and a zero point: x = scale * (q - zero)
    nvfp4     0, .5, 1, 1.5, 2, 3, 4 or 6, signed   e4m3, one per 16 elements, times one number per pool

An int4 scale is a float32 whose last four bits are its zero point, so that both take four bytes. The number itself is
the scale: its last bits change it by less than 2e-6. A key of 128 elements takes 68 bytes in int4, 72 in nvfp4, and 256
in bfloat16.

Source: the zero point in the scale is that of vLLM's int4 cache with scales per token and head; the asymmetric format:
    Jacob et al. 2018, "Quantization and Training of Neural Networks for Efficient Integer-Arithmetic-Only Inference";
    NVIDIA 2025, "Introducing NVFP4".
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Float8e4m3fn, Float32, Int32, UInt8
from torch import Tensor

from refattn.checks import (
    check,
    check_can_be_written,
    check_numbers,
    check_own_memory,
    check_query,
    check_result,
    check_sizes,
)
from refattn.checks_of_calls import check_levels, check_plan, check_pool, check_tokens
from refattn.checks_of_writes import check_slot_numbers
from refattn.modes import refuse_gradients
from refattn.options import AttentionOptions
from refattn.overlap import check_apart
from refattn.scales import ROUNDING, Scales, check_scale
from refattn.trees import AttentionPlan

LARGEST = 15  # the largest int4 value, and the largest zero point
SMALLEST_INT4_SCALE = torch.finfo(torch.float32).tiny  # the scale of a row of zeros
GROUP = 16  # elements under one scale in nvfp4
GROUP_FORMAT = torch.float8_e4m3fn  # the format of the scales of groups
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # the numbers of nvfp4; bit 3 is the sign


@dataclass(frozen=True, eq=False)
class Int4Scales(Scales):
    """The scales of int4 pages, one per token of the pool and KV head; each has its zero point in its last four bits.

    A write sets them, and copies of blocks must include them.

    Attributes:
        key: the scales of the keys; any strides.
        value: the scales of the values.

    Raises:
        ValueError: naming the scale, what was expected and what was given.
    """

    key: Float32[Tensor, "n p hk"]
    value: Float32[Tensor, "n p hk"]

    def __post_init__(self) -> None:
        """Check the types and shapes."""
        check(**{"scales.key": (self.key, "float32 n p hk"), "scales.value": (self.value, "float32 n p hk")})


@dataclass(frozen=True, eq=False)
class Nvfp4Scales(Scales):
    """The scales of nvfp4 pages: one per 16 elements, which a write sets, times a number that is fixed before it.

    Attributes:
        key: the scales of the groups of each key, e4m3; any strides. Copies of blocks must include them.
        value: those of each value.
        of_keys: the number for all keys; the largest key that is not cut off is 6 * 448 times as large.
        of_values: the number for all values.

    Raises:
        ValueError: naming the scale, what was expected and what was given.
    """

    key: Float8e4m3fn[Tensor, "n p hk groups"]
    value: Float8e4m3fn[Tensor, "n p hk value_groups"]
    of_keys: float = 1.0
    of_values: float = 1.0

    def __post_init__(self) -> None:
        """Check the types, the shapes and the numbers."""
        parts = {"scales.key": (self.key, "float8_e4m3fn n p hk d/16")}
        check(**parts, **{"scales.value": (self.value, "float8_e4m3fn n p hk dv/16")})
        check_scale("scales.of_keys", self.of_keys)
        check_scale("scales.of_values", self.of_values)


FourBitScales = Int4Scales | Nvfp4Scales


def turned_size(head_size: int) -> int:
    """Return how many elements of a head are turned together: the largest power of two that divides its size."""
    return head_size & -head_size


def zero_points(scales: Float32[Tensor, "*rows"]) -> Int32[Tensor, "*rows"]:
    """Return the zero points of int4 scales, 0 to 15: their last four bits."""
    return scales.view(torch.int32) & LARGEST


def check_four_bits(
    key_cache: Tensor, value_cache: Tensor, scales: FourBitScales, head_size: int | None = None
) -> tuple[int, int]:
    """Check pools of four-bit pages and their scales; return the head sizes of keys and values.

    Args:
        key_cache: the pool of keys, bytes `[n, p, hk, d/2]`.
        value_cache: the pool of values, bytes `[n, p, hk, dv/2]`.
        scales: as they come beside the pools.
        head_size: elements of a query, `d`; None if there is none.

    Raises:
        ValueError: naming the argument that does not fit.
    """
    if head_size is not None and head_size % 2:
        raise ValueError(f"query: expected an even head size for pages of 4 bits, got d={head_size}")
    known = {} if head_size is None else {"d/2": head_size // 2}
    sizes = check(known, key_cache=(key_cache, "uint8 n p hk d/2"), value_cache=(value_cache, "uint8 n p hk dv/2"))
    check_sizes(block_size=sizes["p"])
    d, dv = 2 * sizes["d/2"], 2 * sizes["dv/2"]
    kinds = ("float32 n p hk", "float32 n p hk")
    if isinstance(scales, Nvfp4Scales):
        kinds = ("float8_e4m3fn n p hk d/16", "float8_e4m3fn n p hk dv/16")
        for name, size in (("key_cache", d), ("value_cache", dv)):
            if size % GROUP:
                raise ValueError(f"{name}: expected rows of a multiple of {GROUP} elements in nvfp4, got {size}")
    rows = {name: sizes[name] for name in ("n", "p", "hk")} | {"d/16": d // GROUP, "dv/16": dv // GROUP}
    parts = {"scales.key": (scales.key, kinds[0]), "scales.value": (scales.value, kinds[1])}
    check(rows, key_cache=(key_cache, "n p hk d/2"), **parts)
    return d, dv


def check_four_bit_slots(
    key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor, scales: FourBitScales
) -> None:
    """Check a write of new tokens `[t, hk, d]` into four-bit pages by slots `[t]`.

    Raises:
        ValueError: naming the argument that does not fit, or shares memory with a pool; on a CPU also if a slot is
            outside the pool or given twice.
    """
    for name, tensor in (("key", key), ("value", value)):
        check_numbers(name, tensor)
    d, dv = check_four_bits(key_cache, value_cache, scales)
    n, p, hk, _ = key_cache.shape
    sizes = dict(n=n, p=p, hk=hk, d=d, dv=dv)
    tokens = {"key": (key, "t hk d", key.dtype), "value": (value, "t hk dv", key.dtype)}
    check(sizes, **tokens, key_cache=(key_cache, "n p hk d/2"), slot_mapping=(slot_mapping, "int64 t"))
    pools = {"key_cache": key_cache, "value_cache": value_cache, "scales.key": scales.key, "scales.value": scales.value}
    check_can_be_written(**pools)
    for name, pool in pools.items():
        check_own_memory(name, pool)
    check_apart(pools, dict(key=key, value=value))
    if slot_mapping.is_cpu:
        check_slot_numbers(slot_mapping, n * p)
    refuse_gradients(ROUNDING, key=key, value=value)


class Int4Pages(NamedTuple):
    """Keys and values in four bits, turned by a Hadamard matrix.

    Attributes:
        key_cache: the pool of keys, two elements per byte.
        value_cache: the pool of values.
        scales: the scale of each key and of each value, with zero points.
    """

    key_cache: UInt8[Tensor, "n p hk half"]
    value_cache: UInt8[Tensor, "n p hk value_half"]
    scales: Int4Scales

    @property
    def value_head_size(self) -> int:
        """Elements of a value, `dv`."""
        return 2 * self.value_cache.shape[-1]

    def check(
        self,
        query: Tensor,
        plan: AttentionPlan,
        options: AttentionOptions,
        out: Tensor | None,
        return_lse: bool,
    ) -> None:
        """Check a call over int4 pages: the checks of pages, and that the scales fit.

        Raises:
            ValueError: naming the argument, what was expected and what was given.
        """
        _check_pages(self, query, plan, options, out, return_lse)


class Nvfp4Pages(NamedTuple):
    """Keys and values in four bits, with a scale per 16 elements.

    Attributes:
        key_cache: the pool of keys, two elements per byte.
        value_cache: the pool of values.
        scales: the scales of the groups of each key and of each value, and a number for all of each.
    """

    key_cache: UInt8[Tensor, "n p hk half"]
    value_cache: UInt8[Tensor, "n p hk value_half"]
    scales: Nvfp4Scales

    @property
    def value_head_size(self) -> int:
        """Elements of a value, `dv`."""
        return 2 * self.value_cache.shape[-1]

    def check(
        self,
        query: Tensor,
        plan: AttentionPlan,
        options: AttentionOptions,
        out: Tensor | None,
        return_lse: bool,
    ) -> None:
        """Check a call over nvfp4 pages: the checks of pages, and that the scales fit.

        Raises:
            ValueError: naming the argument, what was expected and what was given.
        """
        _check_pages(self, query, plan, options, out, return_lse)


def _check_pages(
    keys: Int4Pages | Nvfp4Pages,
    query: Tensor,
    plan: AttentionPlan,
    options: AttentionOptions,
    out: Tensor | None,
    return_lse: bool,
) -> None:
    _, _, size = check_query(query)
    check_four_bits(keys.key_cache, keys.value_cache, keys.scales, size)
    check_plan(plan)
    # The sizes are checked on dummy views of as many elements; their contents are not used.
    key = keys.key_cache[..., :1].expand(-1, -1, -1, size)
    value = keys.value_cache[..., :1].expand(-1, -1, -1, keys.value_head_size)
    types = torch.uint8, torch.uint8
    check_tokens(query, key, value, ("key_cache", "value_cache"), "n p", plan.own, options, types)
    check_result(query, keys.value_head_size, out, return_lse)
    check_pool("key_cache", key, plan.own)
    check_levels("key_cache", key, plan, options)
    refuse_gradients(ROUNDING, scales=keys.scales)
