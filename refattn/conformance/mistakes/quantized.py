"""Mistakes in the scales of a quantised cache."""

from torch import Tensor

from refattn.conformance.mistakes.formula import Attention


class KeyScaleIgnored(Attention):
    """The scale of the keys is ignored."""

    paths: tuple[str, ...] = ("quantized",)

    def _dequantize(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        return key, value * self.arguments["scales"].value


class ValueScaleIgnored(Attention):
    """The scale of the values is ignored."""

    paths: tuple[str, ...] = ("quantized",)

    def _dequantize(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        return key * self.arguments["scales"].key, value


class ScalesSwapped(Attention):
    """Keys and values have each other's scale."""

    paths: tuple[str, ...] = ("quantized",)

    def _dequantize(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        return key * self.arguments["scales"].value, value * self.arguments["scales"].key


class KeyScaleForBoth(Attention):
    """Values are multiplied by the scale of the keys."""

    paths: tuple[str, ...] = ("quantized",)

    def _dequantize(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        return key * self.arguments["scales"].key, value * self.arguments["scales"].key


class ScalesInverted(Attention):
    """Codes are divided by their scales."""

    paths: tuple[str, ...] = ("quantized",)

    def _dequantize(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        return key / self.arguments["scales"].key, value / self.arguments["scales"].value
