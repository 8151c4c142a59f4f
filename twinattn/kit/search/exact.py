"""Compare tensors and all memory of a call exactly."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from twinattn.kit.search.tensors import copied, memory, moved


class MovedWronglyError(Exception):
    """A function moved data wrongly, wrote other memory, or made a wrong table."""


def expect(name: str, came: Tensor, expected: Tensor) -> None:
    """Compare a tensor exactly; NaN is equal to NaN."""
    came, expected = came.cpu(), expected.cpu()
    if came.dtype != expected.dtype or came.shape != expected.shape:
        raise MovedWronglyError(
            f"{name}: expected {expected.dtype} {list(expected.shape)}, got {came.dtype} {list(came.shape)}"
        )
    differs = came != expected
    if came.is_floating_point():
        came, expected = came.double(), expected.double()
        differs = ~((came == expected) | (came.isnan() & expected.isnan()))
    if differs.any():
        where = differs.nonzero()[0].tolist()
        raise MovedWronglyError(
            f"{name}: expected {expected[tuple(where)].item()} at {where}, got {came[tuple(where)].item()}"
        )


def run_and_compare(
    call: Callable[[dict[str, Any]], Any],
    tensors: dict[str, Any],
    change: Callable[[dict[str, Any]], None],
    device: str,
    stay: Sequence[str] = (),
) -> Any:
    """Make a call on a device, apply the expected `change` on the CPU, and compare all memory.

    The tensors named in `stay` stay on the host in the call, too.

    Raises:
        MovedWronglyError: if any memory differs.
    """
    there = {name: copied(x) if device == "cpu" or name in stay else moved(x, device) for name, x in tensors.items()}
    answer = call(there)
    change(tensors)
    for name, x in tensors.items():
        for piece, other in zip(memory(x).values(), memory(there[name]).values(), strict=True):
            other = other.cpu()
            if not torch.equal(piece, other):
                where = int((piece != other).nonzero()[0])
                raise MovedWronglyError(f"{name}: byte {where} of its memory is another one")
    return answer
