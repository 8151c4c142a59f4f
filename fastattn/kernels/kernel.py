"""A kernel as the chooser sees it: its name, why it cannot compute a problem, and a table of its functions."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from types import ModuleType
from typing import Any

from fastattn.kernels.problem import Problem

FLAGS = tuple(name for name, default in Problem._field_defaults.items() if default is False)
KNOWN = frozenset(
    (
        *("tree", "positions", "intervals", "extends_causal"),
        *("softcap", "alibi", "alibi_sqrt", "sinks", "batch_invariant"),
        *("rounds_query", "fp8_weights", "uniform", "even"),
    )
)  # what each kernel computes, or refuses by itself; whatever comes to `Problem` later is refused until it is known


@dataclass(eq=False)
class Kernel:
    """A kernel, whose functions are called as its attributes: `kernel.attend(...)`; see `fastattn.kernels.dispatch`.

    Attributes:
        name: what `use_kernel` knows it by.
        unsupported_reason: returns why it cannot compute a problem, or None.
        attends: the storages of keys that its function `attend` takes, by their names in `problem.STORAGES`.
        trees: those of them that it takes under drafted trees.
        levels: those of them of which it takes all levels of a cascade in one call.
        functions: where each function is, `"module:function"`; the module is imported when it is first asked for.
        knows: the flags of a problem that it looks at. One that it does not know is refused.
    """

    name: str
    unsupported_reason: Callable[[Problem], str | None]
    attends: tuple[str, ...]
    functions: Mapping[str, str]
    trees: tuple[str, ...] = ()
    levels: tuple[str, ...] = ()
    knows: frozenset[str] = KNOWN

    def computes(self, problem: Problem) -> bool:
        """Return whether it has a function for a problem, be it for all of its sizes and options or not."""
        if problem.operation != "attend":
            return problem.operation in self.functions
        return problem.keys in (self.trees if problem.tree else self.levels if problem.levels > 1 else self.attends)

    def unknown(self, problem: Problem) -> str | None:
        """Return a flag of a problem that it does not know, or None."""
        return next((flag for flag in FLAGS if flag not in self.knows and getattr(problem, flag)), None)

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
