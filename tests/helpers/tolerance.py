"""Hold a twin to its reference by the one tolerance, `twinattn.kit.tolerance`."""

import importlib
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

from twinattn.kit import assert_close, assert_matches_reference, plan_and_attend

__all__ = ["assert_close", "assert_matches_reference", "assert_twins_agree"]


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
    out, lse = plan_and_attend(twin, *tensors_and_batch, **arguments, return_lse=True)

    def attend_by_reference(*tensors_and_batch: Any, **arguments: Any) -> Any:
        return plan_and_attend(reference, *tensors_and_batch, **arguments)

    assert_matches_reference(out, lse, attend_by_reference, *tensors_and_batch, **arguments)
    if not again:
        return
    alone = plan_and_attend(twin, *tensors_and_batch, **arguments)
    assert torch.equal(alone, out), "the output without return_lse is another one"
    memory = torch.full_like(out, torch.nan)
    assert plan_and_attend(twin, *tensors_and_batch, **arguments, out=memory) is memory
    assert torch.equal(memory, out), "the output in memory that was given is another one"
