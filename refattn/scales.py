"""The scales that dequantize a quantized cache: one definition for every path and kernel.

There is one class per kind of cache: fp8 scales are fixed for a layer, while the scales of int8 keys are stored next to
the cache, one per token and head, and are set by each write.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite

import torch
from jaxtyping import Float
from torch import Tensor

from refattn.checks import QUERY_TYPES, check, check_number, describe, same_device

FP8_FORMATS = (torch.float8_e4m3fn, torch.float8_e5m2)
SMALLEST_SCALE, LARGEST_SCALE = 2.0**-149, torch.finfo(torch.float32).max  # in float32 others are 0 or infinity


class Scales:
    """The scales of a quantized cache: a base class of dataclasses, one per kind of cache."""


@dataclass(frozen=True, eq=False)
class Fp8Scales(Scales):
    """The scales of an fp8 cache, `x = scale * quantized`, fixed before the first write.

    Each is a positive number, or a float32 tensor with one per KV head, `[hk]`, or per sequence and KV head, `[b, hk]`.
    A write has slots and no sequences, so scales per sequence are for attention only, and not for a cascade, whose
    sequences share keys.

    Attributes:
        key: the scale of the keys.
        value: the scale of the values.
        query: the scale of the queries, also by KV head: the query heads of a group share one. Queries are then
            rounded to the format before the product, as in an fp8 kernel. None: queries are not quantized.
        format: `torch.float8_e4m3fn` or `torch.float8_e5m2`. A pool has this dtype, or its bytes as `torch.uint8`.

    Raises:
        ValueError: naming the scale, what was expected and what was given; numbers are read on a CPU only.

    Source: the descales of Shah et al. 2024, "FlashAttention-3"; formats: Micikevicius et al. 2022, "FP8 Formats for
        Deep Learning".
    """

    key: float | Float[Tensor, "..."]
    value: float | Float[Tensor, "..."]
    query: float | Float[Tensor, "..."] | None = None
    format: torch.dtype = torch.float8_e4m3fn

    def __post_init__(self) -> None:
        """Check each scale alone; a path checks them against its tensors."""
        if self.format not in FP8_FORMATS:
            kind = str(self.format).removeprefix("torch.")
            raise ValueError(f"scales.format: expected float8_e4m3fn or float8_e5m2, got {kind}")
        for name, scale in self.by_name().items():
            if not isinstance(scale, Tensor):
                check_scale(f"scales.{name}", scale)
                continue
            if scale.dtype != torch.float32 or scale.ndim not in (1, 2):
                raise ValueError(f"scales.{name}: expected a number or float32 [hk] or [b, hk], got {describe(scale)}")
            _check_numbers(f"scales.{name}", scale)

    def by_name(self) -> dict[str, float | Tensor]:
        """Return the scales by name; `query` only if given."""
        scales = {"key": self.key, "value": self.value}
        return scales if self.query is None else {**scales, "query": self.query}

    def of_halves(self, key: int, value: int) -> "Fp8Scales":
        """Return the scales for the keys of half `key` and the values of half `value` of differential heads."""

        def of_heads(scale: float | Tensor, half: int) -> float | Tensor:
            return scale[..., half::2] if isinstance(scale, Tensor) else scale

        query = None if self.query is None else of_heads(self.query, key)
        return Fp8Scales(of_heads(self.key, key), of_heads(self.value, value), query, self.format)


@dataclass(frozen=True, eq=False)
class Int8Scales(Scales):
    """The scales of an int8 cache, `x = scale * quantized`, with quantized values from -127 to 127.

    Attributes:
        key: the scales of the keys, one per token of the pool and KV head, `[n, p, hk]` float32 with any strides. A
            write sets them, and copies of blocks must include them.
        value: the scales of the values, one per KV head and channel, `[hk, dv]` float32, calibrated beforehand. None:
            the pool of values is floating point and not quantized.

    Raises:
        ValueError: naming the scale, what was expected and what was given; the elements of `value` are read on a CPU
            only, those of `key` never.
    """

    key: Float[Tensor, "n p hk"]
    value: Float[Tensor, "hk dv"] | None = None

    def __post_init__(self) -> None:
        """Check the types and shapes, and the elements of `value`."""
        check(**{"scales.key": (self.key, "float32 n p hk")})
        check(**{"scales.value": (self.value, "float32 hk dv or None")})
        if self.value is not None:
            _check_numbers("scales.value", self.value)


def check_scale(name: str, scale: float) -> None:
    """Check a scale that is a Python number: above 0, and a number of float32, in which values are scaled.

    Raises:
        ValueError: naming it.
    """
    check_number(name, scale, above=0.0)
    if not SMALLEST_SCALE <= scale <= LARGEST_SCALE:
        raise ValueError(f"{name}: expected a number of float32, from 1.4e-45 to 3.4e+38, got {scale}")


def _check_numbers(name: str, scale: Tensor) -> None:
    if not scale.is_cpu:
        return
    wrong = [number for number in scale.flatten().tolist() if not isfinite(number) or number <= 0]
    if wrong:
        raise ValueError(f"{name}: expected finite numbers above 0, got {wrong[0]}")


def stored_types(
    key_cache: Tensor, value_cache: Tensor, scales: Fp8Scales | Int8Scales
) -> tuple[torch.dtype, torch.dtype]:
    """Return the dtypes that the pools of keys and values must have."""
    if isinstance(scales, Fp8Scales):
        is_bytes = isinstance(key_cache, Tensor) and key_cache.dtype == torch.uint8
        kind = torch.uint8 if is_bytes else scales.format
        return kind, kind
    if not isinstance(scales, Int8Scales):
        raise ValueError(f"scales: expected Fp8Scales or Int8Scales, got {describe(scales)}")
    if scales.value is not None:
        return torch.int8, torch.int8
    if not isinstance(value_cache, Tensor) or value_cache.dtype not in QUERY_TYPES:
        types = "bfloat16, float16, float32 or float64"
        raise ValueError(
            f"value_cache: expected a floating point type ({types}), as there is no scales.value, "
            f"got {describe(value_cache)}"
        )
    return torch.int8, value_cache.dtype


def check_no_scale_per_sequence(
    scales: Fp8Scales | Int8Scales, hk: int, why: str, *, besides: Sequence[str] = ()
) -> None:
    """Check that no scale is per sequence and head, except those named in `besides`; errors give the reason `why`."""
    for name, scale in scales.by_name().items() if isinstance(scales, Fp8Scales) else ():
        if name not in besides and isinstance(scale, Tensor) and scale.ndim == 2:
            raise ValueError(f"scales.{name}: expected a number or float32 [hk={hk}], {why}, got {describe(scale)}")


def check_scales(
    scales: Fp8Scales | Int8Scales,
    key_cache: Tensor,
    value_cache: Tensor,
    num_seqs: int | None,
    at_least: bool,
    hk: int | None = None,
) -> None:
    """Check scales against the pools, and fp8 scales against the number of sequences if known.

    `hk` is the number of KV heads; that of the pool if None.
    """
    n, p, heads, _ = key_cache.shape
    hk = heads if hk is None else hk
    if isinstance(scales, Int8Scales):
        parts = {"scales.key": (scales.key, "float32 n p hk"), "scales.value": (scales.value, "float32 hk dv or None")}
        sizes = dict(n=n, p=p, hk=hk, dv=value_cache.shape[-1])
        check(sizes, key_cache=(key_cache, "n p heads d"), **parts)
        return
    for name, scale in scales.by_name().items():
        if not isinstance(scale, Tensor):
            continue
        fits = scale.ndim == 1 or num_seqs is None or scale.shape[0] == num_seqs
        if num_seqs is not None and at_least:
            fits = fits or scale.shape[0] > num_seqs
        if scale.shape[-1] != hk or not fits:
            b = "b" if num_seqs is None else f"b>={num_seqs}" if at_least else f"b={num_seqs}"
            raise ValueError(
                f"scales.{name}: expected a number or float32 [hk={hk}] or [{b}, hk={hk}], got {describe(scale)}"
            )
        same_device(key_cache=key_cache, **{f"scales.{name}": scale})


def type_of_outputs(query: Tensor, out: Tensor | None) -> torch.dtype:
    """Return the type of the outputs: that of the query; for an fp8 query that of `out`, or bfloat16."""
    if query.dtype not in FP8_FORMATS:
        return query.dtype
    return out.dtype if isinstance(out, Tensor) and out.dtype in QUERY_TYPES else torch.bfloat16


ROUNDING = "rounding to a quantized cache has no gradient; use torch.no_grad(), or an unquantized cache"


def _refuse_int8(cache: object) -> None:
    if isinstance(cache, Tensor) and cache.dtype == torch.int8:
        raise ValueError(
            "cache: expected unquantized or fp8 latents, got int8: a key in int8 has a scale per token, a "
            "value one per channel, and a latent is both"
        )


def check_cache_scale(cache: Tensor, cache_scale: float, *, name: str = "cache_scale") -> None:
    """Check the scale of a cache of latents: 1 unless the cache is fp8; `name` is its name in errors."""
    _refuse_int8(cache)
    check_scale(name, cache_scale)
    if cache_scale != 1 and cache.dtype not in FP8_FORMATS:
        kind = str(cache.dtype).removeprefix("torch.")
        raise ValueError(f"{name}: expected 1 for a cache of {kind}, which holds no fp8 values, got {cache_scale}")


def stored_in_pairs(cache: Tensor, scales: Fp8Scales) -> torch.dtype:
    """Return the dtype that a quantized cache of pairs must have."""
    if not isinstance(scales, Fp8Scales):
        raise ValueError(f"scales: expected Fp8Scales for a cache of pairs, got {describe(scales)}")
    return stored_types(cache, cache, scales)[0]
