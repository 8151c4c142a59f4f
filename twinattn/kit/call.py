"""Call a path in one line: plan, options and attention from one list of arguments, for tests and notebooks."""

import inspect
import itertools
from collections.abc import Callable
from dataclasses import fields
from functools import partial
from types import ModuleType
from typing import Any

from refattn.options import AttentionOptions

OPTIONS = tuple(field.name for field in fields(AttentionOptions))


def prepare(
    path: ModuleType, *tensors_and_batch: Any, function: str = "attention", **arguments: Any
) -> Callable[..., Any]:
    """Plan a step, and return a function that attends in one of its layers.

    Args:
        path: a module with `plan` and `attention`, of any package.
        tensors_and_batch: the arguments of `attention` before its plan, then the batch; or none, and all of them by
            name.
        function: the name of the function, if it is not `attention`.
        arguments: those of `plan` (`causal`, `chunk_size`, ...), of `AttentionOptions` (`softcap`, ...) and of
            `attention` (`return_lse`, ...), in any order. The block size defaults to that of the cache.

    Returns:
        The function; it takes more keyword arguments of `attention`.
    """
    attention = getattr(path, function)
    if not tensors_and_batch:
        before_plan = itertools.takewhile(lambda name: name != "plan", inspect.signature(attention).parameters)
        tensors_and_batch = tuple(arguments.pop(name) for name in (*before_plan, "batch"))
    *tensors, batch = tensors_and_batch
    takes = inspect.signature(path.plan).parameters
    planned = {name: arguments.pop(name) for name in list(arguments) if name in takes}
    if "block_size" in takes and "block_size" not in planned:
        planned["block_size"] = tensors[-1].shape[-3]  # [.., p, hk, d]
    options = AttentionOptions(**{name: arguments.pop(name) for name in OPTIONS if name in arguments})
    return partial(attention, *tensors, path.plan(batch, **planned), options, **arguments)


def plan_and_attend(path: ModuleType, *tensors_and_batch: Any, **arguments: Any) -> Any:
    """Plan a step and attend in one layer of it; the arguments are those of `prepare`."""
    return prepare(path, *tensors_and_batch, **arguments)()
