"""The scales that turn codes of a quantised cache back into numbers: one definition for every path and kernel.

There is one class per kind of cache, because their scales differ: those of fp8 are fixed for a layer, while those of
int8 keys are stored next to the cache, one per token and head, and are set by each write.
"""

from dataclasses import dataclass
from math import isfinite

import torch
from jaxtyping import Float
from torch import Tensor

from refattn.interface.values import check_number, describe, expect

FP8_FORMATS = (torch.float8_e4m3fn, torch.float8_e5m2)


@dataclass(frozen=True, eq=False)
class Fp8Scales:
    """The scales of an fp8 cache, `x = scale * code`, fixed before anything is written.

    Each is a positive number, or a float32 tensor with one for each KV head `[hk]`, or for each sequence and KV head
    `[b, hk]`. A token that is written knows no sequence, so scales per sequence are for reading only; and for no
    cascade, whose sequences share what was written.

    Attributes:
        key: of the keys.
        value: of the values.
        query: of the queries, by KV head, too: the heads of a group share one. Queries are then rounded to the format
            before they meet the keys, as a kernel does that multiplies in fp8. None: they stay as they are.
        format: `torch.float8_e4m3fn` or `torch.float8_e5m2`. A pool has this type, or is its bytes, `torch.uint8`.

    Raises:
        ValueError: naming the scale, what was expected and what came; numbers are read on a CPU only.

    Source: the descales of Shah et al. 2024, "FlashAttention-3"; formats: Micikevicius et al. 2022, "FP8 Formats for
        Deep Learning".
    """

    key: float | Float[Tensor, "..."]
    value: float | Float[Tensor, "..."]
    query: float | Float[Tensor, "..."] | None = None
    format: torch.dtype = torch.float8_e4m3fn

    def __post_init__(self) -> None:
        """Check every scale by itself; a path checks them against its tensors."""
        if self.format not in FP8_FORMATS:
            kind = str(self.format).removeprefix("torch.")
            raise ValueError(f"scales.format: expected float8_e4m3fn or float8_e5m2, got {kind}")
        for name, scale in self.by_name().items():
            if not isinstance(scale, Tensor):
                check_number(f"scales.{name}", scale, above=0.0)
                continue
            if scale.dtype != torch.float32 or scale.ndim not in (1, 2):
                raise ValueError(f"scales.{name}: expected a number or float32 [hk] or [b, hk], got {describe(scale)}")
            _check_numbers(f"scales.{name}", scale)

    def by_name(self) -> dict[str, float | Tensor]:
        """Return the scales that there are by their names."""
        scales = {"key": self.key, "value": self.value}
        return scales if self.query is None else {**scales, "query": self.query}

    def of_halves(self, key: int, value: int) -> "Fp8Scales":
        """Return the scales of one half of the pairs of differential attention for keys, and of one for values."""

        def of_heads(scale: float | Tensor, half: int) -> float | Tensor:
            return scale[..., half::2] if isinstance(scale, Tensor) else scale

        query = None if self.query is None else of_heads(self.query, key)
        return Fp8Scales(of_heads(self.key, key), of_heads(self.value, value), query, self.format)


@dataclass(frozen=True, eq=False)
class Int8Scales:
    """The scales of an int8 cache, `x = scale * code`, codes from -127 to 127.

    Attributes:
        key: of the keys, one for each token of the pool and KV head, `[n, p, hk]` float32 with any strides. A write
            fills them in, and copies of blocks have to take them along.
        value: of the values, one for each KV head and channel, `[hk, dv]` float32, calibrated beforehand. None: the
            pool of values holds floating point numbers, and they are left as they are.

    Raises:
        ValueError: naming the scale, what was expected and what came; the numbers of `value` are read on a CPU only,
            those of `key` never.
    """

    key: Float[Tensor, "n p hk"]
    value: Float[Tensor, "hk dv"] | None = None

    def __post_init__(self) -> None:
        """Check the types and the shapes, and the numbers that do not change."""
        expect(self.key, "scales.key", torch.float32, ("n", "p", "hk"), (None, None, None))
        if self.value is not None:
            expect(self.value, "scales.value", torch.float32, ("hk", "dv"), (None, None))
            _check_numbers("scales.value", self.value)


def _check_numbers(name: str, scale: Tensor) -> None:
    if not scale.is_cpu:
        return
    wrong = [number for number in scale.flatten().tolist() if not isfinite(number) or number <= 0]
    if wrong:
        raise ValueError(f"{name}: expected finite numbers above 0, got {wrong[0]}")
