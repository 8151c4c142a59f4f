"""Hold a twin to its reference by the one tolerance, `refattn.conformance.tolerance`."""

import dataclasses
import hashlib
import importlib
from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from refattn.conformance import assert_close, assert_matches_reference, attend

__all__ = ["assert_close", "assert_matches_reference", "assert_twins_agree"]

REMEMBERED = 64  # answers of the reference: kernel after kernel is held to the same ones
_answers: dict[bytes, Any] = {}


def assert_twins_agree(
    path: str | Callable[[str], ModuleType], *tensors_and_batch: Any, again: bool = True, **arguments: Any
) -> None:
    """Plan and attend with `refattn.<path>` and `fastattn.<path>` alike, and hold outputs and LSE to the rule.

    And `again` without `return_lse`, and into memory that is given, for the same output to the bit. A path that is no
    module is a function that returns the path of a package.
    """
    twin, reference = (
        path(package) if callable(path) else importlib.import_module(f"{package}.{path}")
        for package in ("fastattn", "refattn")
    )
    out, lse = attend(twin, *tensors_and_batch, **arguments, return_lse=True)

    def attend_by_reference(*tensors_and_batch: Any, **arguments: Any) -> Any:
        digest = hashlib.blake2b()
        if not _write((path, tensors_and_batch, arguments), digest):
            return attend(reference, *tensors_and_batch, **arguments)
        key = digest.digest()
        if key not in _answers:
            if len(_answers) == REMEMBERED:
                del _answers[next(iter(_answers))]
            _answers[key] = attend(reference, *tensors_and_batch, **arguments)
        return _answers[key]

    assert_matches_reference(out, lse, attend_by_reference, *tensors_and_batch, **arguments)
    if not again:
        return
    alone = attend(twin, *tensors_and_batch, **arguments)
    assert torch.equal(alone, out), "the output without return_lse is another one"
    memory = torch.full_like(out, torch.nan)
    assert attend(twin, *tensors_and_batch, **arguments, out=memory) is memory
    assert torch.equal(memory, out), "the output in memory that was given is another one"


def _write(x: Any, digest: Any) -> bool:
    """Write what the reference is called with, to the bit; False if that is unknown."""
    if isinstance(x, Tensor):
        if not x.is_cpu or x.requires_grad:
            return False
        digest.update(repr(("tensor", x.dtype, x.shape, x.stride())).encode())
        digest.update(x.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
        return True
    if dataclasses.is_dataclass(x) and not isinstance(x, type):
        parts: Any = (type(x).__name__, *((f.name, getattr(x, f.name)) for f in dataclasses.fields(x)))
    elif isinstance(x, partial):
        parts = (x.func.__qualname__, x.args, x.keywords)
    elif isinstance(x, dict):
        parts = tuple(x.items())
    elif isinstance(x, list | tuple):
        parts = tuple(x)
    else:
        digest.update(repr(x).encode())
        return x is None or isinstance(x, bool | int | float | str | torch.dtype)
    digest.update(f"{type(x).__name__} {len(parts)} ".encode())
    return all(_write(part, digest) for part in parts)
