"""What an exercise is, and what comes of running somebody's function on it.

An exercise is a function to write. It has a reference of the same signature, trials (arguments, from the worked example
to odd ones), and mistakes: what people write instead, each a function of the same signature. The first trial whose
answer is not the reference's is shown; if a mistake gives the same wrong answer, it is named.
"""

import copy
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from refattn.conformance import assert_close

Function = Callable[..., Any]
ALONE = "answer"  # the name of an answer that has no parts


@dataclass(frozen=True)
class Trial:
    """Arguments to try a function with.

    Attributes:
        says: what is tried, in words.
        arguments: by name; every call gets a copy.
        view: what of the answer is compared and drawn; all of it if None.
        parts: names of what the view returns, if it returns several things.
        most_elements: the largest tensor that may be made, in elements; 0 for any.
    """

    says: str
    arguments: Mapping[str, Any]
    view: Callable[[Any], Any] | None = None
    parts: Sequence[str] = ()
    most_elements: int = 0


@dataclass(frozen=True)
class Exercise:
    """A function to write.

    Attributes:
        name: of the function, and of its file after the number.
        reference: what it should compute, in the same signature.
        trials: makes the trials, the worked example first.
        mistakes: what people write instead, by a sentence that says what is wrong with it.
        hints: one after the other.
        changes: the arguments that it changes in place, which are its answer; none if it returns one.
        parts: names of what it returns, if it returns several things.
    """

    name: str
    reference: Function
    trials: Callable[[], Iterable[Trial]]
    mistakes: Mapping[str, Function]
    hints: Sequence[str]
    changes: Sequence[str] = ()
    parts: Sequence[str] = ()


@dataclass(frozen=True)
class Outcome:
    """What came of a function.

    Attributes:
        state: "done", "to do", "wrong", or "elsewhere" where this system lacks what it is written in.
        trials: how many trials there were, up to the first that went wrong.
        trial: the one that went wrong.
        reason: what is wrong with its answer.
        mistake: what is probably the cause; empty if nobody knows.
        got: the answer, by parts.
        expected: the reference's.
    """

    state: str
    trials: int = 0
    trial: Trial | None = None
    reason: str = ""
    mistake: str = ""
    got: Mapping[str, Any] = field(default_factory=dict)
    expected: Mapping[str, Any] = field(default_factory=dict)


class Once:
    """Things that can be gone through once, as what a kernel loads."""

    def __init__(self, items: Iterable[Any]) -> None:
        self.items, self.was_read = list(items), False

    def __iter__(self) -> Iterator[Any]:
        """Go through them.

        Raises:
            WrongAnswerError: the second time.
        """
        if self.was_read:
            raise WrongAnswerError("the tiles were gone through twice: each may be read only once")
        self.was_read = True
        return iter(self.items)


class WrongAnswerError(Exception):
    """An answer is not the expected one; the message says what is wrong with it."""


class LargestTensor(TorchDispatchMode):
    """Notes the largest tensor that an operation returns, views apart."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation, and look at what it returns."""
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor) and not func.is_view:
            self.elements = max(self.elements, out.numel())
        return out


def check(exercise: Exercise, function: Function, file: Path | None = None) -> Outcome:
    """Run a function on all trials of an exercise, up to the first that goes wrong.

    Args:
        exercise: what it should be.
        function: somebody's.
        file: where it stands, to say in which line an exception came from.
    """
    number = 0
    for number, trial in enumerate(exercise.trials(), 1):
        got: Mapping[str, Any] = {}
        try:
            got = _call(exercise, trial, function, trial.arguments)
            compare(got, *_both(exercise, trial, exercise.reference))
        except Exception as error:  # noqa: BLE001  # somebody's code may raise anything
            if is_to_do(error):
                return Outcome("to do")
            _, expected = _both(exercise, trial, exercise.reference)
            reason = str(error) if isinstance(error, WrongAnswerError) else describe(error, file)
            return Outcome(
                "wrong", number, trial, reason, _find_mistake(exercise, function, number, got), got, expected
            )
    return Outcome("done", number)


def is_to_do(error: BaseException | None) -> bool:
    """Return whether an error says that nothing has been written yet, also from within Triton's interpreter."""
    while error is not None:
        if isinstance(error, NotImplementedError) and not error.args or repr(NotImplementedError()) == str(error):
            return True
        error = error.__cause__
    return False


def describe(error: BaseException, file: Path | None) -> str:
    """Return in words what was raised, and in which line of somebody's file, also within Triton's interpreter."""
    causes = [error]
    while causes[-1].__cause__ is not None:
        causes.append(causes[-1].__cause__)
    for cause in reversed(causes):
        for frame in reversed(traceback.extract_tb(cause.__traceback__)):
            if file and Path(frame.filename).resolve() == file.resolve():
                return f"line {frame.lineno}, `{frame.line}`: {type(cause).__name__}: {cause}"
    return f"{type(causes[-1]).__name__}: {causes[-1]}"


def cast(value: Any, dtype: torch.dtype) -> Any:
    """Return a value with all its floating-point tensors in some type."""
    if isinstance(value, Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if isinstance(value, Once):
        return Once(cast(value.items, dtype))
    return type(value)(cast(each, dtype) for each in value) if isinstance(value, list | tuple) else value


def _call(exercise: Exercise, trial: Trial, function: Function, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Call a function with copies, and return its answer by parts.

    Raises:
        WrongAnswerError: if it returns nothing or too few things, makes too large a tensor, or changes an argument.
    """
    copies = copy.deepcopy(dict(arguments))
    if trial.most_elements and function is not exercise.reference:
        with LargestTensor() as largest:
            answer = function(**copies)
        if largest.elements > trial.most_elements:
            raise WrongAnswerError(
                f"a tensor of {largest.elements:,} numbers was made, and none needs more than {trial.most_elements:,}"
            )
    else:
        answer = function(**copies)
    for name, value in arguments.items():
        if name not in exercise.changes and not _same(copies[name], value):
            raise WrongAnswerError(f"the argument {name} was changed")
    if exercise.changes:
        answer = tuple(copies[name] for name in exercise.changes)
    elif answer is None:
        raise WrongAnswerError("it returned None: is there a `return`?")
    parts = exercise.changes or exercise.parts
    if parts and not (isinstance(answer, tuple | list) and len(answer) == len(parts)):
        raise WrongAnswerError(f"expected ({', '.join(parts)}), got {kind(answer)}")
    if trial.view is not None:
        for name, each in zip(parts, answer, strict=True):
            if not isinstance(each, Tensor):
                raise WrongAnswerError(f"{name}: expected a tensor, got {kind(each)}")
        answer, parts = trial.view(answer), trial.parts
    return dict(zip(parts, answer, strict=True)) if parts else {ALONE: answer}


def compare(got: Mapping[str, Any], expected: Mapping[str, Any], low: Mapping[str, Any]) -> None:
    """Compare an answer, part by part, with the reference in float64 and in float32.

    Numbers are compared by the one tolerance of `refattn.conformance`, everything else exactly.

    Raises:
        WrongAnswerError: saying what is wrong.
    """
    for name, want in low.items():
        mine = got[name]
        if not isinstance(want, Tensor):
            mine = mine.tolist() if isinstance(mine, Tensor) else mine
            if _plain(mine) != _plain(want):
                raise WrongAnswerError(f"{name}: not the expected {kind(want)}")
            continue
        try:
            mine = torch.as_tensor(mine)
        except (TypeError, ValueError, RuntimeError) as error:
            raise WrongAnswerError(f"{name}: expected {kind(want)}, got {kind(mine)}") from error
        if mine.shape != want.shape:
            raise WrongAnswerError(f"{name}: expected the shape {list(want.shape)}, got {list(mine.shape)}")
        if not want.is_floating_point():
            wrong = int((mine.to(want.dtype) != want).sum())
            if wrong:
                what = "cells of the mask" if want.dtype == torch.bool else "numbers"
                raise WrongAnswerError(f"{name}: {wrong} of {want.numel()} {what} wrong")
            continue
        if mine.dtype != want.dtype:
            raise WrongAnswerError(f"{name}: expected {kind(want)}, got {kind(mine)}")
        lost = mine.isnan() & ~want.isnan()
        if lost.any():
            raise WrongAnswerError(f"{name}: NaN at {lost.nonzero()[0].tolist()}")
        both = want.isnan()  # memory that nobody wrote may hold it
        try:
            assert_close(mine[~both], expected[name][~both], want[~both], name=name)
        except AssertionError as error:
            raise WrongAnswerError(str(error)) from error


def kind(value: Any) -> str:
    """Return the type of a value in words, and the shape of a tensor."""
    if isinstance(value, Tensor):
        return f"a tensor of {str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    if isinstance(value, tuple):
        return f"{len(value)} things"
    return {"int": "number", "NoneType": "None"}.get(type(value).__name__, type(value).__name__)


def _both(exercise: Exercise, trial: Trial, function: Function) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return what a function answers in float64, and in float32."""
    wide = {name: cast(value, torch.float64) for name, value in trial.arguments.items()}
    return _call(exercise, trial, function, wide), _call(exercise, trial, function, trial.arguments)


def _find_mistake(exercise: Exercise, function: Function, number: int, got: Mapping[str, Any]) -> str:
    """Return the mistake that goes wrong at the same trial for the first time, and with the same answer.

    Of several, it is the one that agrees longest on the trials after that; nothing if there is none.
    """
    trials = list(exercise.trials())
    candidates = [
        says
        for says, wrong in exercise.mistakes.items()
        if got
        and all(_agrees(exercise, trial, exercise.reference, wrong) for trial in trials[: number - 1])
        and _agrees(exercise, trials[number - 1], wrong, lambda **_: got, is_answer=True)
    ]
    for trial in trials[number:]:
        if len(candidates) > 1:
            agree = [says for says in candidates if _agrees(exercise, trial, exercise.mistakes[says], function)]
            candidates = agree or candidates
    return candidates[0] if candidates else ""


def _agrees(exercise: Exercise, trial: Trial, known: Function, other: Function, *, is_answer: bool = False) -> bool:
    """Return whether another function answers as a known one; it may return an answer by parts already."""
    try:
        parts = other() if is_answer else _call(exercise, trial, other, trial.arguments)
        compare(*map(_without_nan, (parts, *_both(exercise, trial, known))))
    except Exception:  # noqa: BLE001  # somebody's code may raise anything, and so may a mistake
        return False
    return True


def _without_nan(parts: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parts with a number in the place of NaN, so that NaN equals NaN."""
    return {
        name: value.nan_to_num(7e7) if isinstance(value, Tensor) and value.is_floating_point() else value
        for name, value in parts.items()
    }


def _same(one: Any, other: Any) -> bool:
    if isinstance(other, Tensor):
        return torch.equal(*(_without_nan({"": each})[""] for each in (one, other)))
    if isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(_same, one, other))
    return isinstance(other, Once) or bool(one == other)


def _plain(value: Any) -> Any:
    return [_plain(each) for each in value] if isinstance(value, list | tuple) else value


def draw(*shape: int, seed: int = 0) -> Tensor:
    """Draw random numbers, the same every time."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
