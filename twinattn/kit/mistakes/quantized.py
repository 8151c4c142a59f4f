"""Mistakes in the scales of a quantized cache."""

import torch
from torch import Tensor

from twinattn.kit.example import Arguments, Example
from twinattn.kit.mistakes.formula import Attention
from twinattn.kit.mistakes.where import given


class KeyScaleIgnored(Attention):
    """The scale of the keys is ignored."""

    paths: tuple[str, ...] = ("quantized",)

    def _dequantize(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        return key, value * self._scale("value")


class ValueScaleIgnored(Attention):
    """The scale of the values is ignored."""

    paths: tuple[str, ...] = ("quantized",)

    def _dequantize(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        return key * self._scale("key"), value


class ScalesSwapped(Attention):
    """Keys and values have each other's scale."""

    paths: tuple[str, ...] = ("quantized",)

    def _dequantize(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        return key * self._scale("value"), value * self._scale("key")


class KeyScaleForBoth(Attention):
    """Values are multiplied by the scale of the keys."""

    paths: tuple[str, ...] = ("quantized",)

    def _dequantize(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        return key * self._scale("key"), value * self._scale("key")


class ScalesInverted(Attention):
    """Quantized values are divided by their scales."""

    paths: tuple[str, ...] = ("quantized",)

    def _dequantize(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        return key / self._scale("key"), value / self._scale("value")


class FormatIgnored(Attention):
    """Quantized values are read as e4m3, whatever their format is."""

    paths: tuple[str, ...] = ("quantized",)

    def _pools(self) -> tuple[Tensor, Tensor]:
        key, value = (self.arguments[name].view(torch.float8_e4m3fn).double() for name in ("key_cache", "value_cache"))
        return key.flatten(0, 1), value.flatten(0, 1)


class ScaleOfFirstHead(Attention):
    """The first of several scales, per head or per sequence and head, is used for all heads."""

    paths: tuple[str, ...] = ("quantized",)
    variants = ("of all", "of the sequence")

    def _scale(self, name: str) -> Tensor | float:
        scale = getattr(self.arguments["scales"], name)
        if not isinstance(scale, Tensor):
            return float(scale)
        row = scale[self.sequence] if scale.ndim == 2 and self.variant == "of the sequence" else scale
        return float(row.flatten()[0])


class ScaleOfFirstSequence(Attention):
    """The scales of the first sequence are used for all."""

    paths: tuple[str, ...] = ("quantized",)

    def _scale(self, name: str) -> Tensor | float:
        scale = getattr(self.arguments["scales"], name)
        return scale[0].double()[:, None] if isinstance(scale, Tensor) and scale.ndim == 2 else super()._scale(name)


class ScalesPastACount(Attention):
    """Scales per sequence are read by the place of a sequence in its launch."""

    paths: tuple[str, ...] = ("quantized",)
    past = ("sequences",)
    variants = (64, 128, 256, 512, 1024)

    @classmethod
    def may_show(cls, example: Example, arguments: Arguments, variant: int) -> bool:
        """Return whether there are more sequences than the count, and scales for each."""
        scales = arguments["scales"].key, arguments["scales"].value
        return len(example.lens) > variant and any(isinstance(x, Tensor) and x.ndim == 2 for x in scales)

    def _scale(self, name: str) -> Tensor | float:
        before = self.sequence
        self.sequence = before % self.variant
        try:
            return super()._scale(name)
        finally:
            self.sequence = before


class ScaleOfQueryHead(Attention):
    """Scales per KV head are indexed by the query head."""

    paths: tuple[str, ...] = ("quantized",)

    def _dequantize(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        return key, value

    def _grouped(self, x: Tensor) -> Tensor:
        is_value, self.is_value = getattr(self, "is_value", False), not getattr(self, "is_value", False)
        scale, heads = self._scale("value" if is_value else "key"), torch.arange(self.query.shape[1])
        if isinstance(scale, Tensor):
            scale = scale[heads.clamp(max=len(scale) - 1)]
        return super()._grouped(x) * scale


class KeyScaleAfterSoftcap(Attention):
    """The scale of the keys is applied after the softcap, not before it."""

    paths: tuple[str, ...] = ("quantized",)

    def _dequantize(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        return key, value * self._scale("value")

    def _scores(self, query: Tensor, key: Tensor, pos: Tensor, j: Tensor) -> Tensor:
        slopes, self.slopes = self.slopes, None
        scale = self._scale("key")
        if isinstance(scale, Tensor):
            scale = scale.repeat_interleave(query.shape[1] // len(scale), 0)[..., None]
        scores = scale * super()._scores(query, key, pos, j)
        self.slopes = slopes
        return scores if slopes is None else scores - slopes.double()[:, None, None] * self._distance(pos, j)


class SinksUnderKeyScale(Attention):
    """The sinks are multiplied by the scale of the keys."""

    where = given("sinks")

    paths: tuple[str, ...] = ("quantized",)

    def __init__(self, example: Example, arguments: Arguments, variant: None = None) -> None:
        super().__init__(example, arguments, variant)
        if self.sinks is not None:
            self.sinks = self.sinks * arguments["scales"].key
