"""What an exercise is, and what comes of running a user's function on it.

An exercise is a function to write. It has a reference of the same signature, trials (arguments, from the worked example
to odd ones), and mistakes: what people write instead, each a function of the same signature. The first trial whose
answer is not the reference's is shown; if a mistake gives the same wrong answer, it is named.
"""

import copy
import threading
import time
import traceback
from _thread import interrupt_main
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from twinattn.kit import assert_close

Function = Callable[..., Any]
ALONE = "answer"  # the name of an answer that has no parts
SECONDS = 60.0  # that a check may take; the slowest, a kernel in Triton's interpreter, takes a few
ARITHMETIC = {"mm", "bmm", "mv", "dot", "addmm", "baddbmm", "exp", "_softmax", "logsumexp", "sum", "mean", "amax"}


@dataclass(frozen=True)
class Trial:
    """Arguments to try a function with.

    Attributes:
        says: what is tried, in words.
        arguments: by name; every call gets a copy.
        view: what of the answer is compared and drawn; all of it if None.
        parts: names of what the view returns, if it returns several things.
        most_elements: the largest tensor that may be made, in elements; 0 for any.
        too_large: what a larger tensor probably is, and what to do instead.
        most_reads: how many elements of `read_from` may be read, counted once for every time; 0 for any.
        read_from: the arguments whose reads are counted.
        in_a_kernel: whether all arithmetic belongs into a kernel, so that none may be done by PyTorch.
    """

    says: str
    arguments: Mapping[str, Any]
    view: Callable[[Any], Any] | None = None
    parts: Sequence[str] = ()
    most_elements: int = 0
    too_large: str = ""
    most_reads: int = 0
    read_from: Sequence[str] = ()
    in_a_kernel: bool = False


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
        explains: what an exception probably means, by a part of its text.
        needs: a module that it needs and that not every system has.
        level: how hard it is, from 1 to 3.
        minutes: that it takes, about.
        in_page: whether it can be written over lists, without PyTorch, as in the pages of the site.
    """

    name: str
    reference: Function
    trials: Callable[[], Iterable[Trial]]
    mistakes: Mapping[str, Function]
    hints: Sequence[str]
    changes: Sequence[str] = ()
    parts: Sequence[str] = ()
    explains: Mapping[str, str] = field(default_factory=dict)
    needs: str = ""
    level: int = 1
    minutes: int = 5
    in_page: bool = False


@dataclass(frozen=True)
class Outcome:
    """What came of a function.

    Attributes:
        state: "done", "to do", "wrong", or "not here" if this system lacks something that it needs.
        trials: how many trials there were, up to the first that went wrong.
        trial: the one that went wrong.
        reason: what is wrong with its answer.
        mistake: what is probably the cause; empty if not known.
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
    """Tiles that can be gone through once, as what a kernel loads: the memory of one is used again for the next."""

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
        return self._one_by_one()

    def _one_by_one(self) -> Iterator[Any]:
        for item in self.items:
            tile = copy.deepcopy(item)
            yield tile
            for tensor in tile:
                tensor.fill_(torch.nan)


class WrongAnswerError(Exception):
    """An answer is not the expected one; the message says what is wrong with it."""


class TimeLimit:
    """Ends what the main thread does after some seconds, by the same interrupt as Ctrl-C, on every system.

    Raises:
        TimeoutError: when it is left, if it took longer.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds, self.is_over = seconds, False
        self.timer = threading.Timer(seconds, self._end)
        self.timer.daemon = True

    def _end(self) -> None:
        self.is_over = True
        interrupt_main()

    def __enter__(self) -> None:
        """Begin."""
        self.timer.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        """End, and say so if it was too late."""
        self.timer.cancel()
        if not self.is_over:
            return
        if kind is None:  # it was done just before the interrupt, which is still to come
            try:
                time.sleep(1)
            except KeyboardInterrupt:
                return
        too_long = TimeoutError(f"it was not done after {self.seconds:.0f} seconds; is there a loop that never ends?")
        raise too_long.with_traceback(where) from None


class Watch(TorchDispatchMode):
    """Notes what operations do: the largest tensor they return, what they read of some tensors, and which they are."""

    def __init__(self, pools: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self.largest, self.reads, self.names = 0, 0, set[str]()
        self._storages = {pool.untyped_storage().data_ptr() for pool in pools}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation, and look at what it takes and returns; views do nothing."""
        out = func(*args, **(kwargs or {}))
        if func.is_view:
            return out
        name = func.overloadpacket.__name__
        self.names.add(name)
        size = out.numel() if isinstance(out, Tensor) else 0
        self.largest = max(self.largest, size)
        for tensor in tree_leaves((args, kwargs)):
            if isinstance(tensor, Tensor) and tensor.untyped_storage().data_ptr() in self._storages:
                self.reads += size if name in ("index", "index_select", "gather", "embedding") else tensor.numel()
        return out


def check(exercise: Exercise, function: Function, file: Path | None = None) -> Outcome:
    """Run a function on all trials of an exercise, up to the first that goes wrong.

    Args:
        exercise: what it should be.
        function: the user's.
        file: where it stands, to say in which line an exception came from.
    """
    number = 0
    for number, trial in enumerate(exercise.trials(), 1):
        got: Mapping[str, Any] = {}
        try:
            got = answer_of(exercise, trial, function, trial.arguments)
            compare(got, *_both(exercise, trial, exercise.reference))
        except Exception as error:  # noqa: BLE001  # the user's code may raise anything
            if is_to_do(error):
                return Outcome("to do")
            _, expected = _both(exercise, trial, exercise.reference)
            reason = str(error) if isinstance(error, WrongAnswerError) else explain(exercise, describe(error, file))
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
    """Return in words what was raised, and in which line of the user's file, also within Triton's interpreter."""
    causes = [error]
    while causes[-1].__cause__ is not None:
        causes.append(causes[-1].__cause__)
    for cause in reversed(causes):
        for frame in reversed(traceback.extract_tb(cause.__traceback__)):
            if file and Path(frame.filename).resolve() == file.resolve():
                return f"line {frame.lineno}, `{frame.line}`: {type(cause).__name__}: {cause}"
    return f"{type(causes[-1]).__name__}: {causes[-1]}"


def explain(exercise: Exercise, described: str) -> str:
    """Return what was raised, with what it probably means in this exercise."""
    means = [says for part, says in exercise.explains.items() if part in described]
    return f"{described}. {means[0]}" if means else described


def cast(value: Any, dtype: torch.dtype) -> Any:
    """Return a value with all its floating-point tensors in some type."""
    if isinstance(value, Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if isinstance(value, Once):
        return Once(cast(value.items, dtype))
    return type(value)(cast(each, dtype) for each in value) if isinstance(value, list | tuple) else value


def answer_of(exercise: Exercise, trial: Trial, function: Function, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Call a function with copies, and return its answer by parts.

    Raises:
        WrongAnswerError: if it returns nothing or too few things, makes too large a tensor, or changes an argument.
    """
    copies = copy.deepcopy(dict(arguments))
    is_watched = trial.most_elements or trial.most_reads or trial.in_a_kernel
    if is_watched and function not in (exercise.reference, *exercise.mistakes.values()):
        with Watch(copies[name] for name in trial.read_from) as seen:
            answer = function(**copies)
        _check_work(trial, seen)
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
        for name, each in zip(parts, answer, strict=True) if parts else ():
            if not isinstance(each, Tensor):
                raise WrongAnswerError(f"{name}: expected a tensor, got {kind(each)}")
        answer, parts = trial.view(answer), trial.parts
    return dict(zip(parts, answer, strict=True)) if parts else {ALONE: answer}


def _check_work(trial: Trial, seen: Watch) -> None:
    """Check how a function came to its answer, where that is what the exercise is about.

    Raises:
        WrongAnswerError: saying what it should not have done.
    """
    if trial.most_elements and seen.largest > trial.most_elements:
        probably = f": {trial.too_large}" if trial.too_large else ""
        found = f"a tensor of {seen.largest:,} elements was made, and none needs more than {trial.most_elements:,}"
        raise WrongAnswerError(found + probably)
    if trial.most_reads and seen.reads > trial.most_reads:
        raise WrongAnswerError(
            f"{seen.reads:,} elements of {' and '.join(trial.read_from)} were read, and {trial.most_reads:,} are "
            "enough: read what is shared once, for all queries together"
        )
    by_torch = sorted(seen.names & ARITHMETIC)
    if trial.in_a_kernel and by_torch:
        raise WrongAnswerError(
            f"PyTorch computed something ({', '.join(by_torch)}); here all arithmetic belongs into the kernel"
        )


def compare(got: Mapping[str, Any], expected: Mapping[str, Any], low: Mapping[str, Any]) -> None:
    """Compare an answer, part by part, with the reference in float64 and in float32.

    Numbers are compared by the one tolerance of `twinattn.kit`, everything else exactly.

    Raises:
        WrongAnswerError: saying what is wrong.
    """
    for name, want in low.items():
        mine = got[name]
        if not isinstance(want, Tensor):
            mine = mine.tolist() if isinstance(mine, Tensor) else mine
            if plain(mine) != plain(want):
                raise WrongAnswerError(f"{name}: not the expected {kind(want)}{_first_difference(mine, want)}")
            continue
        try:
            mine = torch.as_tensor(mine)
        except (TypeError, ValueError, RuntimeError) as error:
            raise WrongAnswerError(f"{name}: expected {kind(want)}, got {kind(mine)}") from error
        if mine.shape != want.shape:
            raise WrongAnswerError(f"{name}: expected the shape {list(want.shape)}, got {list(mine.shape)}")
        if want.dtype == torch.bool and mine.is_floating_point():
            raise WrongAnswerError(f"{name}: expected {kind(want)}, got {kind(mine)}; a mask is True or False")
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
        hidden = want.isnan() & ~mine.isnan()
        if hidden.any():
            raise WrongAnswerError(
                f"{name}: a number at {hidden.nonzero()[0].tolist()}, where NaN went in; it has to come out, too"
            )
        both = want.isnan()  # unwritten memory may hold it
        try:
            assert_close(mine[~both], expected[name][~both], want[~both], name=name)
        except AssertionError as error:
            raise WrongAnswerError(str(error)) from error


def _first_difference(mine: Any, want: Any) -> str:
    """Return the first index at which two lists differ, in words; an empty text if they are no lists."""
    if not (isinstance(mine, list | tuple) and isinstance(want, list | tuple)):
        return ""
    for i, (got, expected) in enumerate(zip(mine, want, strict=False)):
        if plain(got) != plain(expected):
            return f": at index {i} expected {plain(expected)}, got {plain(got)}"
    return f": expected {len(want)} entries, got {len(mine)}"


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
    return answer_of(exercise, trial, function, wide), answer_of(exercise, trial, function, trial.arguments)


def _find_mistake(exercise: Exercise, function: Function, number: int, got: Mapping[str, Any]) -> str:
    """Return the mistake that goes wrong at the same trial for the first time, and with the same answer.

    Of several, it is the one that agrees longest on the trials after that; nothing if there is none.
    """
    if not got:
        return ""
    trials = list(exercise.trials())
    trial = trials[number - 1]
    known = {
        says: wrong
        for says, wrong in exercise.mistakes.items()
        if all(_agrees(exercise, each, exercise.reference, wrong) for each in trials[: number - 1])
    }
    candidates = [says for says, wrong in known.items() if _is_like(exercise, trial, wrong, got)]
    for each in trials[number:]:
        if len(candidates) > 1:
            agree = [says for says in candidates if _agrees(exercise, each, exercise.mistakes[says], function)]
            candidates = agree or candidates
    # Two mistakes at once, or half of one: then it is enough that one wrong part is as a mistake has it.
    for part, mine in got.items() if not candidates else ():
        if not _is_like(exercise, trial, exercise.reference, {part: mine}):
            candidates += [says for says, wrong in known.items() if _is_like(exercise, trial, wrong, {part: mine})]
    return candidates[0] if candidates else ""


def _agrees(exercise: Exercise, trial: Trial, known: Function, other: Function) -> bool:
    """Return whether another function answers as a known one."""
    try:
        answer = answer_of(exercise, trial, other, trial.arguments)
    except Exception:  # noqa: BLE001  # the user's code may raise anything, and so may a mistake
        return False
    return _is_like(exercise, trial, known, answer)


def _is_like(exercise: Exercise, trial: Trial, known: Function, answer: Mapping[str, Any]) -> bool:
    """Return whether the parts of an answer are those of a known function."""
    try:
        both = [{name: each[name] for name in answer} for each in _both(exercise, trial, known)]
        compare(*map(_without_nan, (answer, *both)))
    except Exception:  # noqa: BLE001  # a mistake may raise anything
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


def plain(value: Any) -> Any:
    """Return a value with lists in place of tuples."""
    return [plain(each) for each in value] if isinstance(value, list | tuple) else value


def draw(*shape: int, seed: int = 0) -> Tensor:
    """Draw random numbers, the same every time."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
