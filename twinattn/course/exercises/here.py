"""Check an exercise where it was written: in a cell of a notebook, as in Colab.

from twinattn.course.exercises.here import check

check(slot)
"""

from pathlib import Path

from rich.console import Console

from twinattn.course.exercises import exercise, report
from twinattn.course.exercises.exercise import Function
from twinattn.course.exercises.functions import EXERCISES


def check(function: Function, *, hints: int = 0) -> None:
    """Check a function, and print what came of it.

    Args:
        function: whose name is that of an exercise.
        hints: how many to show.

    Raises:
        ValueError: if no exercise has its name.
    """
    name = function.__name__
    found = {each.name: each for each in EXERCISES}.get(name)
    if found is None:
        names = ", ".join(each.name for each in EXERCISES)
        raise ValueError(f"function: expected one named {names}; got {name}")
    console = Console(highlight=False)
    outcome = exercise.check(found, function, Path(function.__code__.co_filename))
    if outcome.state == "wrong":
        report.show_wrong(console, name, outcome)
    elif outcome.state == "to do":
        console.print(f"To do: write {name} where it says raise.")
    else:
        console.print(f"✓ All {outcome.trials} trials are right.")
    for i, hint in enumerate(found.hints[:hints], 1):
        console.print(f"Hint {i} of {len(found.hints)}: {hint}", markup=False)
