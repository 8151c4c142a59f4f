"""The check of an exercise in a page of the site, where there is Python but no PyTorch: over lists, in Pyodide.

It holds what the terminal's check holds. The trials, the right answers and those of the known mistakes come from there
(`twinattn.course.exercises.lists`); here they are compared. So this file imports the standard library alone, and
Python in the browser runs it as it is. The tests run it, too, and let both checks judge the same answers.
"""

import contextlib
import copy
import io
import json
import math
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

YOURS = "your code"  # the name of the user's code, in tracebacks
ALONE = "answer"  # the name of an answer that has no parts
CLOSE = 1e-6  # relative to the largest element: about what float32 can tell
LONGEST = 100  # characters of a value that are shown
Answer = dict[str, Any]


class Once:
    """Tiles that can be gone through once, as what a kernel loads: the memory of one is used again for the next."""

    def __init__(self, items: Sequence[Any]) -> None:
        self.items, self.was_read = items, False

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
            for part in tile:
                _fill(part, math.nan)


class WrongAnswerError(Exception):
    """An answer is not the expected one; the message says what is wrong with it."""


def run(source: str, exercise: str) -> str:
    """Check the user's code.

    Args:
        source: the text of a file with the function.
        exercise: what `twinattn.course.exercises.lists` made of it.

    Returns:
        As JSON: the state, "done", "to do" or "wrong"; the number of trials up to the first that went wrong; what was
        tried, the call, the reason, what is shown of both answers, the likely mistake; and what was printed.
    """
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        outcome = _run(source, json.loads(exercise))
    return json.dumps(outcome | {"printed": printed.getvalue()})


def _run(source: str, exercise: Mapping[str, Any]) -> dict[str, Any]:
    written: dict[str, Any] = {"__name__": YOURS}
    try:
        exec(compile(source, YOURS, "exec"), written)
    except Exception as error:  # noqa: BLE001  # the user's code may raise anything
        return {"state": "wrong", "trials": 0, "reason": describe(error, source)}
    function = written.get(exercise["name"])
    if function is None:
        return {"state": "wrong", "trials": 0, "reason": f"there is no function {exercise['name']}"}
    return check(exercise, function, source)


def check(exercise: Mapping[str, Any], function: Callable[..., Any], source: str = "") -> dict[str, Any]:
    """Run a function on all trials of an exercise, up to the first that goes wrong."""
    for number, trial in enumerate(exercise["trials"]):
        got: Answer = {}
        try:
            got = call(exercise, trial, function)
            compare(got, trial["expected"])
        except Exception as error:  # noqa: BLE001
            if isinstance(error, NotImplementedError) and not error.args:
                return {"state": "to do"}
            reason = str(error)
            if not isinstance(error, WrongAnswerError):
                reason = explain(exercise, describe(error, source))
            arguments = ", ".join(f"{name}={_short(value)}" for name, value in trial["arguments"].items())
            return {
                "state": "wrong",
                "trials": number + 1,
                "says": trial["says"],
                "call": f"{exercise['name']}({arguments})",
                "reason": reason.removeprefix(f"{ALONE}: "),
                "shown": show(trial["expected"], got),
                "mistake": likely(exercise, function, number, got),
            }
    return {"state": "done", "trials": len(exercise["trials"])}


def call(exercise: Mapping[str, Any], trial: Mapping[str, Any], function: Callable[..., Any]) -> Answer:
    """Call a function with copies, and return its answer by parts.

    Raises:
        WrongAnswerError: if it returns nothing or too few things, or changes an argument.
    """
    arguments = copy.deepcopy(trial["arguments"])
    given = {name: Once(value["once"]) if isinstance(value, dict) else value for name, value in arguments.items()}
    answer = function(**given)
    for name, value in trial["arguments"].items():
        if name not in exercise["changes"] and not _same(arguments[name], value):
            raise WrongAnswerError(f"the argument {name} was changed")
    parts = exercise["changes"] or exercise["parts"]
    if exercise["changes"]:
        answer = [arguments[name] for name in parts]
    elif answer is None:
        raise WrongAnswerError("it returned None: is there a `return`?")
    if not parts:
        return {ALONE: answer}
    if not isinstance(answer, list | tuple) or len(answer) != len(parts):
        raise WrongAnswerError(f"expected ({', '.join(parts)}), got {_kind(answer)}")
    return dict(zip(parts, answer, strict=True))


def compare(got: Answer, expected: Answer) -> None:
    """Compare an answer, part by part.

    Raises:
        WrongAnswerError: saying what is wrong.
    """
    for name, want in expected.items():
        mine = got[name]
        if is_mask(want):
            wrong = _cells_wrong(name, mine, want)
            if wrong:
                raise WrongAnswerError(f"{name}: {wrong} of {sum(map(len, want))} cells of the mask wrong")
        elif not _same(mine, want, CLOSE * _largest(want)):
            where = _first_difference(mine, want, CLOSE * _largest(want))
            raise WrongAnswerError(f"{name}: not the expected {_kind(want)}{where}")


def _cells_wrong(name: str, mine: Any, want: list[list[bool]]) -> int:
    """Count the cells in which a mask is wrong.

    Raises:
        WrongAnswerError: if it is no mask of that shape.
    """
    size = f"{len(want)} rows of {len(want[0])}"
    if not isinstance(mine, list | tuple) or not all(isinstance(row, list | tuple) for row in mine):
        raise WrongAnswerError(f"{name}: expected a mask, {size} in a list, got {_kind(mine)}")
    if [len(row) for row in mine] != [len(row) for row in want]:
        found = f"{len(mine)} rows of {sorted({len(row) for row in mine}) or 0}"
        raise WrongAnswerError(f"{name}: expected {size}, got {found}")
    cells = [(a, b) for row, other in zip(mine, want, strict=True) for a, b in zip(row, other, strict=True)]
    if not all(isinstance(a, bool | int) for a, _ in cells):
        raise WrongAnswerError(f"{name}: expected True or False in a mask")
    return sum(bool(a) != b for a, b in cells)


def likely(exercise: Mapping[str, Any], function: Callable[..., Any], number: int, got: Answer) -> str:
    """Return the mistake that goes wrong at the same trial for the first time, and with the same answer.

    Of several, it is the one that agrees longest on the trials after that; nothing if there is none.
    """
    if not got:
        return ""
    trials = exercise["trials"]
    expected = trials[number]["expected"]
    known = [
        each
        for each in exercise["mistakes"]
        if all(_alike(each["answers"][i], trials[i]["expected"]) for i in range(number))
    ]
    candidates = [each for each in known if _alike(each["answers"][number], got)]
    for i in range(number + 1, len(trials)):
        if len(candidates) > 1:
            try:
                answer = call(exercise, trials[i], function)
            except Exception:  # noqa: BLE001
                continue
            candidates = [each for each in candidates if _alike(each["answers"][i], answer)] or candidates
    # Two mistakes at once, or half of one: then it is enough that one wrong part is as a mistake has it.
    for part, mine in got.items() if not candidates else ():
        if not _alike({part: mine}, {part: expected[part]}):
            candidates += [
                each
                for each in known
                if each["answers"][number] and _alike({part: each["answers"][number][part]}, {part: mine})
            ]
    return str(candidates[0]["says"]) if candidates else ""


def _alike(one: Answer | None, other: Answer) -> bool:
    """Return whether two answers are the same; None is that of a mistake that raised something."""
    return one is not None and all(_same(one[part], mine, CLOSE * _largest(one[part])) for part, mine in other.items())


def describe(error: BaseException, source: str) -> str:
    """Return in words what was raised, and in which line of the user's text."""
    lines = source.splitlines()
    if isinstance(error, SyntaxError) and error.filename == YOURS:
        return f"line {error.lineno}, `{(error.text or '').strip()}`: {type(error).__name__}: {error.msg}"
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if frame.filename == YOURS and frame.lineno and frame.lineno <= len(lines):
            return f"line {frame.lineno}, `{lines[frame.lineno - 1].strip()}`: {type(error).__name__}: {error}"
    return f"{type(error).__name__}: {error}"


def explain(exercise: Mapping[str, Any], described: str) -> str:
    """Return what was raised, with what it probably means in this exercise."""
    means = [says for part, says in exercise["explains"].items() if part in described]
    return f"{described}. {means[0]}" if means else described


def show(expected: Answer, got: Answer) -> str:
    """Write what was expected, and what came; of a mask, the cells that are wrong as + and -."""
    lines = []
    for part, want in expected.items():
        label = "" if part == ALONE else f"{part}: "
        if not got:
            lines.append(f"{label}expected {_short(want)}")
        elif is_mask(want):
            lines += _masks(want, got[part])
        elif not _same(got[part], want, CLOSE * _largest(want)):
            lines += [f"{label}expected {_short(want)}", f"{label}got      {_short(got[part])}"]
    return "\n".join(lines)


def _masks(want: list[list[bool]], mine: Any) -> list[str]:
    """Draw two masks side by side; in the second, + is a key too many, and - one that is missing."""
    try:
        if [len(row) for row in mine] != [len(row) for row in want]:
            return []
    except TypeError:  # it is no list of lists
        return []
    marks = {(True, True): "1", (False, False): ".", (False, True): "+", (True, False): "-"}
    width = 2 * len(want[0]) - 1
    lines = [f"{'expected':{max(width, 8)}}    got"]
    for row, other in zip(want, mine, strict=True):
        left = " ".join("1" if cell else "." for cell in row)
        right = " ".join(marks[cell, bool(a)] for cell, a in zip(row, other, strict=True))
        lines.append(f"{left:{max(width, 8)}}    {right}")
    return [*lines, "a row per query, a column per key; + is seen and should not be, - should be seen and is not"]


def is_mask(value: Any) -> bool:
    """Return whether a value is a mask: rows of True and False."""
    return (
        isinstance(value, list) and bool(value) and isinstance(value[0], list) and [*map(type, value[0][:1])] == [bool]
    )


def _same(one: Any, other: Any, off: float = 0.0) -> bool:
    """Return whether two values are the same, numbers if they are less than `off` apart; NaN is NaN."""
    if isinstance(other, dict):  # tiles
        return isinstance(one, dict) and _same(one["once"], other["once"])
    if isinstance(other, list | tuple):
        return (
            isinstance(one, list | tuple)
            and len(one) == len(other)
            and all(_same(a, b, off) for a, b in zip(one, other, strict=True))
        )
    if isinstance(other, float) and isinstance(one, int | float):
        return one == other or abs(one - other) <= off or (math.isnan(one) and math.isnan(other))
    return bool(one == other)


def _largest(value: Any) -> float:
    """Return the largest finite number of a value, by its size."""
    if isinstance(value, list | tuple):
        return max(map(_largest, value), default=0.0)
    return abs(value) if isinstance(value, int | float) and math.isfinite(value) else 0.0


def _first_difference(mine: Any, want: Any, off: float, place: str = "") -> str:
    """Return the first index at which two lists differ, in words; an empty text if they are no lists."""
    if isinstance(want, list) and isinstance(mine, list | tuple):
        for i, (got, expected) in enumerate(zip(mine, want, strict=False)):
            if not _same(got, expected, off):
                return _first_difference(got, expected, off, f"{place}[{i}]")
        return f": expected {len(want)} entries{f' at {place}' * bool(place)}, got {len(mine)}"
    return f": at {place} expected {_short(want)}, got {_short(mine)}" if place else ""


def _kind(value: Any) -> str:
    """Return the type of a value in words."""
    if isinstance(value, tuple):
        return f"{len(value)} things"
    names = {"int": "number", "float": "number", "NoneType": "None"}
    return names.get(type(value).__name__, type(value).__name__)


def _short(value: Any) -> str:
    """Write a value in short: numbers to four digits, and long lists cut."""
    text = _write(value)
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 2]} …"


def _write(value: Any) -> str:
    if isinstance(value, dict):
        return _write(value["once"])
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_write, value))}]"
    return f"{value:.4g}" if isinstance(value, float) else repr(value)


def _fill(value: list[Any], by: float) -> None:
    for i, each in enumerate(value):
        if isinstance(each, list):
            _fill(each, by)
        else:
            value[i] = by
