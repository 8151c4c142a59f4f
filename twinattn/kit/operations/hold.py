"""Compare the outputs of an operation, and the arguments that it changes, bit by bit or within the one tolerance."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from twinattn.kit.bits import bits_of
from twinattn.kit.example import Arguments
from twinattn.kit.operations.operation import Answers, Mistake, Operation, word_of
from twinattn.kit.property import Broken
from twinattn.kit.tolerance import FLOAT32_ROUNDINGS, bound, distance

LOOSER = 4.0  # factor of the tolerance when an output is compared with that of a mistake


def hold(operation: Operation, arguments: Arguments, came: Answers, size: float) -> None:
    """Compare outputs with the right ones.

    Args:
        operation: the operation that was computed.
        arguments: as they were before the call, on the CPU.
        came: outputs and changed arguments by name.
        size: the size of the terms of an output, which is their sum; 0 if none is larger than the output.

    Raises:
        Broken: naming an element that differs.
    """
    wide = operation.oracle(arguments, torch.float64)
    low = operation.oracle(arguments, _type_of(operation, arguments)) if wide.keys() - operation.exact else wide
    for name, right in wide.items():
        if name not in came:
            if name in operation.optional:
                continue
            raise Broken(f"{name}: there is none")
        got = came[name]
        if not isinstance(right, Tensor | list):
            if got != right:
                raise Broken(f"{name}: got {got!r:.200}, expected {right!r:.200}")
            continue
        if not isinstance(got, Tensor):
            raise Broken(f"{name}: expected a tensor, got {type(got).__name__}")
        got, first = got.detach().cpu(), right[0] if isinstance(right, list) else right
        if got.shape != first.shape:
            raise Broken(f"{name}: shape {list(got.shape)}, expected {list(first.shape)}")
        _check_type(operation, arguments, name, got, first)
        if isinstance(right, list) or word_of(name) in operation.exact:
            _hold_exactly(name, got, right if isinstance(right, list) else [right], operation.moves)
        else:
            terms = operation.terms(arguments) if operation.terms is not None else 1
            roundings = size
            if name == "lse" and operation.score is not None:
                eps = [torch.finfo(kind).eps for kind in (_type_of(operation, arguments), torch.float32)]
                roundings = max(size, operation.score(arguments) * eps[0] / eps[1] / FLOAT32_ROUNDINGS)
            _hold_closely(name, got, right, low[name], roundings, 1.0, terms)


def agrees(operation: Operation, mistake: Mistake, arguments: Arguments, came: Answers, size: float) -> bool:
    """Return whether a mistake gives these outputs."""
    try:
        wide = mistake.oracle(arguments, torch.float64)
        low = operation.oracle(arguments, _type_of(operation, arguments))
        for name, given in wide.items():
            if name not in came and name in operation.optional:
                continue
            got = came[name].detach().cpu() if isinstance(came[name], Tensor) else came[name]
            if not isinstance(given, Tensor | list):
                if got != given:
                    return False
            elif isinstance(given, list) or word_of(name) in operation.exact:
                _hold_exactly(name, got, given if isinstance(given, list) else [given], operation.moves)
            else:
                right = operation.oracle(arguments, torch.float64)[name]
                _hold_closely(
                    name, got, given, given + (low[name].double() - right).nan_to_num(0.0, 0.0, 0.0), size, LOOSER
                )
    except (Broken, IndexError, RuntimeError, ValueError, KeyError, TypeError, AttributeError):
        return False  # the mistake cannot be made here, or gives something else
    return True


def _type_of(operation: Operation, arguments: Arguments) -> torch.dtype:
    """Return the type of a call: that of its output, or the narrowest floating-point type of its arguments."""
    if "out" in operation.types:
        arguments = {"like": arguments[operation.types["out"]]}
    kinds = [x.dtype for x in _flat(arguments) if x.is_floating_point() and x.element_size() > 1]
    return min(kinds, key=lambda kind: kind.itemsize, default=torch.float32)


def _flat(arguments: Mapping[str, Any]) -> list[Tensor]:
    lists = [x if isinstance(x, list) else [x] for x in arguments.values()]
    return [x for some in lists for x in some if isinstance(x, Tensor)]


def _check_type(operation: Operation, arguments: Arguments, name: str, got: Tensor, right: Tensor) -> None:
    """Check the type of an output: that of an argument, that of an integer reference, or else at least float32."""
    said = {str(x): str(x).removeprefix("torch.") for x in (got.dtype, right.dtype)}
    if name in operation.types:
        like = arguments[operation.types[name]]
        want = (like[0] if isinstance(like, list) else like).dtype
        if got.dtype != want:
            raise Broken(f"{name}: {said[str(got.dtype)]}, expected the type of {operation.types[name]}")
    elif got.is_floating_point() != right.is_floating_point() or (
        not right.is_floating_point() and got.dtype != right.dtype and word_of(name) not in operation.changes
    ):
        raise Broken(f"{name}: {said[str(got.dtype)]}, expected {said[str(right.dtype)]}")
    elif got.is_floating_point() and word_of(name) not in operation.exact and got.element_size() < 4:
        raise Broken(f"{name}: {said[str(got.dtype)]}, expected float32")


def _hold_exactly(name: str, got: Tensor, rights: list[Tensor], moves: bool = False) -> None:
    """Compare bit by bit with any of some tensors; -0 is not 0, and unless data only `moves`, all NaN are equal."""
    alike = torch.zeros(got.shape, dtype=torch.bool)
    for right in rights:
        if moves and got.dtype == right.dtype:
            alike |= bits_of(got) == bits_of(right)
        elif got.is_floating_point():
            ours, theirs = got.double(), right.double()
            alike |= (ours == theirs) & (ours.signbit() == theirs.signbit()) | ours.isnan() & theirs.isnan()
        else:
            alike |= got == right
    if not alike.all():
        where = (~alike).nonzero()
        at = tuple(where[0].tolist())
        if got[at].isnan() and rights[0][at].isnan():
            raise Broken(f"{name}: the NaN at {list(at)} has other bits: nothing is computed here")
        raise Broken(
            f"{name}: {len(where)} of {got.numel()} elements differ; the first is {list(at)}: "
            f"got {got[at].item():.6g}, expected {rights[len(rights) // 2][at].item():.6g}"
        )


def _hold_closely(
    name: str, got: Tensor, wide: Tensor, low: Tensor, size: float, factor: float, terms: int = 1
) -> None:
    """Compare within the tolerance; infinities and NaN must be at the same places.

    No reference is wider than an output in float64: sums in two orders then differ by a rounding per term.
    """
    came, wide = got.double(), wide.double()
    alike = (came == wide) | (came.isnan() & wide.isnan())
    off = (came - wide).abs().masked_fill(alike, 0.0)
    both = low.double().isfinite() & wide.isfinite()
    size = max(size, float(wide[wide.isfinite()].abs().max()) if wide.isfinite().any() else 0.0)
    roundings = terms if got.dtype == torch.float64 else 1
    allowed = factor * bound(distance(low.double()[both], wide[both]), roundings * size, got.dtype).max
    wrong = ~(off <= allowed)
    if wrong.any():
        at = tuple(wrong.nonzero()[0].tolist()) if off.isnan().any() else _largest(off)
        raise Broken(
            f"{name}: {int(wrong.sum())} of {got.numel()} elements differ; {list(at)} is {got[at].item():.6g}, "
            f"expected {wide[at].item():.6g}, allowed {allowed:.3e}"
        )


def _largest(off: Tensor) -> tuple[int, ...]:
    return tuple(int(i) for i in torch.unravel_index(off.argmax(), off.shape))
