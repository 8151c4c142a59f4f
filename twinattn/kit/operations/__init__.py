"""Operations beside attention that the kit checks: moves, writes, metadata, scores, states, drafts, ranks.

operation    what a row of the table says, and how a function is called
inputs       what inputs are drawn from            memory     where they lie
hold         the right output, or not              properties what is promised of every operation
moves, ...   the rows
"""

from collections.abc import Callable
from types import ModuleType
from typing import Any

from twinattn.kit.kernel import BadKernelError, resolve
from twinattn.kit.operations import batches, drafts, latents, moves, ranks, scores, states, written
from twinattn.kit.operations.operation import Case, Operation, OperationKernel
from twinattn.kit.operations.properties import OperationProperty, of_operation

OPERATIONS: dict[str, Operation] = {
    x.name: x
    for x in (
        *moves.OPERATIONS,
        *written.OPERATIONS,
        *states.OPERATIONS,
        *scores.OPERATIONS,
        *latents.OPERATIONS,
        *ranks.OPERATIONS,
        *batches.OPERATIONS,
        *drafts.OPERATIONS,
    )
}


def find_operation(target: str | Callable[..., Any] | ModuleType, path: str) -> OperationKernel:
    """Find a function that computes an operation: itself, a module that has it, or where it is.

    Raises:
        BadKernelError: if there is none, or it cannot be called; it says why.
    """
    name, found = resolve(target)
    operation = OPERATIONS[path]
    if isinstance(found, ModuleType):
        if not hasattr(found, operation.function):
            raise BadKernelError(f"{name} has no function {operation.function!r}")
        found = getattr(found, operation.function)
    return OperationKernel(name, operation, found)


__all__ = ["OPERATIONS", "Case", "Operation", "OperationKernel", "OperationProperty", "find_operation", "of_operation"]
