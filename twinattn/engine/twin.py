"""The package that computes what an engine asks for, `refattn` or `fastattn`, by its modules."""

import importlib
from collections.abc import Callable
from typing import Any

from torch import Tensor

from twinattn.engine import fast_sampling, sampling


class Twin:
    """The package that computes, by its modules: each is imported by name when it is first needed.

    Args:
        package: `refattn`, `fastattn`, or anything with modules of those names.
    """

    def __init__(self, package: Any) -> None:
        self.package = package

    @property
    def sample(self) -> Callable[..., Tensor]:
        """What draws the next tokens: beside `fastattn` on the device, else row by row."""
        return fast_sampling.sample if getattr(self.package, "__name__", None) == "fastattn" else sampling.sample

    def __getattr__(self, module: str) -> Any:
        """Return a module of the package."""
        found = getattr(self.package, module, None) or importlib.import_module(f"{self.package.__name__}.{module}")
        setattr(self, module, found)
        return found
