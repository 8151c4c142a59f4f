"""A kernel as the chooser sees it: its name, why it cannot compute a problem, and a table of its functions."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from types import ModuleType
from typing import Any

from fastattn.kernels.problem import Problem


@dataclass(eq=False)
class Kernel:
    """A kernel, whose functions are called as its attributes: `kernel.attend(...)`; see `fastattn.kernels.dispatch`.

    Attributes:
        name: what `use_kernel` knows it by.
        unsupported_reason: returns why it cannot compute a problem, or None.
        attends: the operations that are its function `attend`, each a storage of keys or what is done over one.
        functions: where each function is, `"module:function"`; the module is imported when it is first asked for.
    """

    name: str
    unsupported_reason: Callable[[Problem], str | None]
    attends: tuple[str, ...]
    functions: Mapping[str, str]

    @property
    def operations(self) -> tuple[str, ...]:
        """The names of what it computes."""
        return (*self.attends, *(name for name in self.functions if name != "attend"))

    def __getattr__(self, name: str) -> Callable[..., Any]:
        """Return a function of the table."""
        where = self.__dict__.get("functions", {}).get(name)
        if where is None:
            raise AttributeError(f"a kernel has no function {name}")
        module, function = _find(where)
        return getattr(module, function)


@cache
def _find(where: str) -> tuple[ModuleType, str]:
    module, _, function = where.partition(":")
    return import_module(module), function
