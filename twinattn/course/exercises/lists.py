"""An exercise over lists, for the pages of the site: what its file asks for, and its trials and answers as JSON.

The check there (`twinattn.course.exercises.in_page`) has no PyTorch. So everything that it needs is computed here, by
the functions with which the terminal checks: tensors become lists, and the answers of the reference and of each known
mistake stand beside the arguments.
"""

import json
import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from twinattn.course.exercises import learner
from twinattn.course.exercises.exercise import Exercise, Function, Once, Trial, answer_of, cast

TENSOR = re.compile(r'(?P<kind>Bool|Float|Int)\d*\[Tensor, "(?P<sizes>[^"]*)"\]')
IMPORT_OF_TENSORS = re.compile(r"^(?:from|import) (?:jaxtyping|torch)\b.*\n", re.MULTILINE)


def of_exercise(exercise: Exercise) -> str:
    """Return an exercise as JSON: its trials with the right answers, and what each known mistake answers to them."""
    trials = list(exercise.trials())
    assert not any(each.view or each.most_elements or each.most_reads for each in trials), (
        "in_page: its trials are plain"
    )
    return json.dumps(
        {
            "name": exercise.name,
            "parts": list(exercise.parts),
            "changes": list(exercise.changes),
            "explains": dict(exercise.explains),
            "trials": [
                {
                    "says": trial.says,
                    "arguments": {name: plain(value) for name, value in trial.arguments.items()},
                    "expected": answer(exercise, trial, exercise.reference),
                }
                for trial in trials
            ],
            "mistakes": [
                {"says": says, "answers": [answer_or_none(exercise, trial, mistake) for trial in trials]}
                for says, mistake in exercise.mistakes.items()
            ],
        }
    )


def answer(exercise: Exercise, trial: Trial, function: Function) -> dict[str, Any]:
    """Return what a function answers in float64, by parts, over lists."""
    wide = {name: cast(value, torch.float64) for name, value in trial.arguments.items()}
    return {part: plain(value) for part, value in answer_of(exercise, trial, function, wide).items()}


def answer_or_none(exercise: Exercise, trial: Trial, function: Function) -> dict[str, Any] | None:
    """Return what a mistake answers; None if it raises something."""
    try:
        return answer(exercise, trial, function)
    except Exception:  # noqa: BLE001  # a mistake may raise anything
        return None


def plain(value: Any) -> Any:
    """Turn tensors into lists, and tiles into a dict that says so."""
    if isinstance(value, Tensor):
        return value.tolist()
    if isinstance(value, Once):
        return {"once": plain(value.items)}
    return [plain(each) for each in value] if isinstance(value, list | tuple) else value


def stub(file: Path) -> str:
    """Return the text of an exercise's file over lists: without its title, and without tensors in its signature."""

    def nested(match: re.Match[str]) -> str:
        kind = {"Bool": "bool", "Float": "float", "Int": "int"}[match["kind"]]
        depth = len(match["sizes"].split())
        return "list[" * depth + kind + "]" * depth

    text = IMPORT_OF_TENSORS.sub("", learner.code(file))
    return re.sub(r"\n+(?=def )", "\n\n\n", TENSOR.sub(nested, text)).lstrip()
