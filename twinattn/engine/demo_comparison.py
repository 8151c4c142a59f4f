"""A twin that compares: both packages compute every layer of every step, and their largest difference is kept."""

import importlib
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fastattn import kv_cache, metadata
from refattn.options import AttentionOptions
from refattn.plan import CascadePlan, Plan
from twinattn.kit.tolerance import FLOAT32_ROUNDINGS, Distance, bound


@dataclass
class Errors:
    """The errors of one layer's outputs, over all steps.

    Attributes:
        fast: largest difference between the fast twin and the reference in float64.
        low: largest difference between the reference in the model's own type and in float64.
        size: largest output.
        count: outputs compared.
    """

    fast: float = 0.0
    low: float = 0.0
    size: float = 0.0
    count: int = 0

    @property
    def tolerance(self) -> float:
        """What the one rule allows, as in the tests."""
        return bound(Distance(self.low, self.low), self.size, torch.float32).max


class Comparison:
    """A twin that computes as `fastattn` does, and compares every output with `refattn`'s.

    The engine takes it in place of a package. Of each layer only the largest errors are kept.
    """

    def __init__(self) -> None:
        self.kv_cache, self.metadata = kv_cache, metadata
        self.layers: dict[int, Errors] = {}  # a layer is known by its pool
        self.chunked_prefill = Compared("chunked_prefill", self.layers)
        self.cascade = Compared("cascade", self.layers)
        self.quantized = Compared("quantized", self.layers)

    def holds(self) -> bool:
        """Return whether every layer is within its tolerance."""
        return all(errors.fast <= errors.tolerance < torch.inf for errors in self.layers.values())

    def summary(self) -> str:
        """Return in words how far the twins were apart at most, and how far they may be."""
        layer, errors = max(enumerate(self.layers.values()), key=lambda item: item[1].fast)
        nearest = max(errors.fast / errors.tolerance for errors in self.layers.values())
        count = sum(errors.count for errors in self.layers.values())
        verdict = "[green]all are within" if self.holds() else "[red]not all are within"
        return (
            f"Largest difference between the twins over every layer and step ({count:,} outputs): {errors.fast:.2e}, "
            f"in layer {layer}, where {errors.tolerance:.2e} is allowed: twice the error that refattn has itself in "
            f"float32, measured against float64, and {FLOAT32_ROUNDINGS} units in the last place. No layer uses more "
            f"than {nearest:.0%} of its tolerance: {verdict}."
        )


class Compared:
    """A path of `fastattn` whose outputs are compared with `refattn`'s; everything else is `fastattn`'s own."""

    def __init__(self, path: str, layers: dict[int, Errors]) -> None:
        self.fast = importlib.import_module(f"fastattn.{path}")
        self.reference = importlib.import_module(f"refattn.{path}")
        self.layers = layers

    def __getattr__(self, name: str) -> Any:
        return getattr(self.fast, name)

    def attention(
        self,
        query: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        plan: Plan | CascadePlan,
        options: AttentionOptions,
        **scales: Any,
    ) -> Tensor:
        """Attend with `fastattn`, compared with `refattn` in the same type and in float64; quantized values stay so."""
        out: Tensor = self.fast.attention(query, key_cache, value_cache, plan, options, **scales)
        low = self.reference.attention(query, key_cache, value_cache, plan, options, **scales)
        wide = (key_cache, value_cache) if scales else (key_cache.double(), value_cache.double())
        exact = self.reference.attention(query.double(), *wide, plan, options, **scales)
        errors = self.layers.setdefault(key_cache.data_ptr(), Errors())
        errors.fast = max(errors.fast, _largest(out - exact))
        errors.low = max(errors.low, _largest(low - exact))
        errors.size = max(errors.size, _largest(exact))
        errors.count += out.numel()
        return out


def _largest(x: Tensor) -> float:
    return float(x.abs().nan_to_num(torch.inf, posinf=torch.inf).max())
