"""Operations other than attention: moves, writes, metadata, scores, states, drafts, ranks.

operation    a row of the table, and how a function is called
inputs       random numbers, batches and pools     memory     strides, poison, offsets
hold         comparison with the right output      properties the properties of every operation
moves, ...   the rows
"""

from collections.abc import Callable
from types import ModuleType
from typing import Any

from twinattn.kit.kernel import BadKernelError, resolve
from twinattn.kit.operations import (
    batches,
    drafts,
    entries,
    four_bits,
    latents,
    moves,
    ranks,
    rings,
    scores,
    states,
    written,
    written_four_bits,
)
from twinattn.kit.operations.operation import Case, Operation, OperationKernel
from twinattn.kit.operations.properties import OperationProperty, of_operation

OPERATIONS: dict[str, Operation] = {
    x.name: x
    for x in (
        *moves.OPERATIONS,
        *written.OPERATIONS,
        *written_four_bits.OPERATIONS,
        *states.OPERATIONS,
        *rings.OPERATIONS,
        *entries.OPERATIONS,
        *scores.OPERATIONS,
        *four_bits.OPERATIONS,
        *latents.OPERATIONS,
        *ranks.OPERATIONS,
        *batches.OPERATIONS,
        *drafts.OPERATIONS,
    )
}


def find_operation(target: str | Callable[..., Any] | ModuleType, path: str) -> OperationKernel:
    """Find a function that computes an operation, given the function, a module that has it, or a name.

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
