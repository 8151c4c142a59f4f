"""One caller per library: the attention of others, each called as its users call it.

Every module has

    available()     why the library cannot be used here, in a sentence, or None
    prepare(...)    plans what a server plans before a step, and returns the call

A `prepare` takes queries, keys and values as they are laid out, and a batch; over pages if the batch has a block table,
else over rows. With `return_lse=True` its call returns an output and a log-sum-exp in rows, `[t, h, dv]` and `[t, h]`,
to the natural base. Without, it returns what the library does, so that nothing else is timed. It fixes nothing.
"""

import importlib.util
from collections.abc import Callable
from typing import Any

from torch import Tensor

Call = Callable[..., Any]


def is_installed(module: str) -> bool:
    """Return whether a module can be found."""
    try:
        return importlib.util.find_spec(module) is not None
    except Exception:  # noqa: BLE001  looking imports the parent package, which may be missing, or broken in any way
        return False


def missing(module: str) -> str | None:
    """Return that a module is not installed, or None."""
    return None if is_installed(module) else f"{module} is not installed"


def cannot_import(package: str, module: str) -> str | None:
    """Return why a module of a package cannot be imported, or None."""
    reason = missing(package)
    if reason is None:
        try:
            importlib.import_module(module)
        except Exception as error:  # noqa: BLE001  whatever a broken installation raises
            return f"{package} does not load here: {error}"
    return reason


def with_lse(call: Call) -> Call:
    """Return a call of an output `[t, h, dv]` and a log-sum-exp `[h, t]`, and perhaps more, as one of both in rows."""

    def both() -> tuple[Tensor, Tensor]:
        out, lse, *_ = call()
        return out, lse.T

    return both


def of_rectangle(call: Call) -> Call:
    """Return a call of an output `[b, t, h, dv]` and a log-sum-exp `[b, h, t]`, and perhaps more, as one in rows."""

    def both() -> tuple[Tensor, Tensor]:
        out, lse, *_ = call()
        return out.flatten(0, 1), lse.transpose(1, 2).flatten(0, 1)

    return both


def output_of(call: Call) -> Call:
    """Return a call that may answer with a log-sum-exp beside its output as one of the output alone."""

    def output() -> Tensor:
        answer = call()
        return answer[0] if isinstance(answer, tuple | list) else answer

    return output
