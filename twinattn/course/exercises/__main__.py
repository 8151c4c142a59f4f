"""The command: `twinattn exercises` lists the exercises, `twinattn exercises 3` checks the third.

twinattn exercises                what there is, and how far you are
twinattn exercises 3              check exercise 3; p3 is puzzle 3; the name does as well
twinattn exercises 3 --hint       and show a hint; --hint --hint shows two
twinattn exercises 3 --watch      check again whenever its file is saved
twinattn exercises --serve        let SmolLM2 answer a question with your functions
"""

import argparse
import importlib.util
import inspect
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console
from rich.text import Text

from twinattn.course.exercises import exercise as exercise_module
from twinattn.course.exercises import learner, report
from twinattn.course.exercises.exercise import Exercise, Function, Outcome, TimeLimit, check, describe, is_to_do
from twinattn.course.exercises.functions import EXERCISES
from twinattn.course.exercises.puzzles import PUZZLES, Puzzle
from twinattn.course.exercises.puzzles import describe as describe_case
from twinattn.progress import Progress

COMMAND = "twinattn exercises"


def to_type(arguments: str, file: Path) -> str:
    """Return the command with some arguments for a file, as a user types it, by make or by itself."""
    folder = file.parent.parent if file.parent.name == "puzzles" else file.parent
    if folder != learner.FOLDER and "MAKELEVEL" not in os.environ:
        arguments += f" --folder {folder}"
    return f'make exercises ARGS="{arguments}"' if "MAKELEVEL" in os.environ else f"{COMMAND} {arguments}"


@dataclass(frozen=True)
class Task:
    """An exercise, with the user's file."""

    number: str
    exercise: Exercise
    file: Path

    @property
    def name(self) -> str:
        """The name of its function."""
        return self.exercise.name

    @property
    def hints(self) -> Sequence[str]:
        """What helps, one after the other."""
        return self.exercise.hints

    @property
    def title(self) -> str:
        """What it is about."""
        return learner.title(self.file)

    def function(self) -> Function | None:
        """Import the file as it is now, and return the function; None if it has none of that name."""
        return getattr(learner.load(self.file), self.name, None)

    @property
    def effort(self) -> str:
        """How hard it is, and how long it takes."""
        return f"{'●' * self.exercise.level}{'○' * (3 - self.exercise.level)} {self.exercise.minutes:2} min"

    def check(self) -> Outcome:
        """Check the function."""
        needs = self.exercise.needs
        if needs and importlib.util.find_spec(needs) is None:
            return Outcome("not here", reason=f"It needs {needs}, which there is for Linux only.")
        try:
            with TimeLimit(exercise_module.SECONDS):
                function = self.function()
                if function is None:
                    return Outcome("wrong", reason=f"{self.file.name} has no function {self.name}")
                return check(self.exercise, function, self.file)
        except Exception as error:  # noqa: BLE001  # the user's file may raise anything
            return Outcome("to do") if is_to_do(error) else Outcome("wrong", reason=describe(error, self.file))


@dataclass(frozen=True)
class PuzzleTask:
    """A puzzle, with the user's file."""

    number: str
    puzzle: Puzzle
    file: Path

    @property
    def name(self) -> str:
        """The name of the puzzle."""
        return self.puzzle.name

    @property
    def hints(self) -> Sequence[str]:
        """What helps, one after the other."""
        return self.puzzle.hints

    @property
    def title(self) -> str:
        """What it is about."""
        return learner.title(self.file)

    effort = ""

    def check(self) -> Outcome:
        """Check the failing case, and then what was mended."""
        try:
            with TimeLimit(exercise_module.SECONDS):
                return self._check()
        except TimeoutError as error:
            return Outcome("wrong", reason=describe(error, self.file))

    def _check(self) -> Outcome:
        case: object = None
        try:
            module = learner.load(self.file)
            case = module.failing_case()
            expected = list(inspect.signature(self.puzzle.arguments).parameters)
            if not isinstance(case, dict) or sorted(case) != sorted(expected):
                return Outcome("wrong", reason=f"failing_case: expected a dict of {', '.join(expected)}; got {case}")
            tried = check(self.puzzle.exercise("broken", [case]), module.broken, self.file)
        except Exception as error:  # noqa: BLE001  # the user's file may raise anything
            return Outcome("to do") if is_to_do(error) else Outcome("wrong", reason=describe(error, self.file))
        if tried.state == "done":
            reason = (
                f"failing_case: broken gives the right answer for {describe_case(case)}; find one that it gets wrong"
            )
            return Outcome("wrong", reason=reason)
        mended = check(self.puzzle.exercise("mended", self.puzzle.contract), module.mended, self.file)
        return replace(tried, state="found") if mended.state == "to do" else mended


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command.

    Args:
        arguments: of the command line; those of the process if None.

    Returns:
        The exit status: 0 if what was checked is right.
    """
    parser = argparse.ArgumentParser(
        prog=COMMAND, description="Write a serving engine's attention yourself.", allow_abbrev=False
    )
    parser.add_argument("which", nargs="?", help="number or name; all if left out")
    parser.add_argument("--hint", action="count", default=0, help="show a hint; twice for two")
    parser.add_argument("--watch", action="store_true", help="check again whenever the file is saved")
    parser.add_argument("--serve", action="store_true", help="let SmolLM2 answer with your functions")
    parser.add_argument("--folder", type=Path, default=learner.FOLDER, help="yours; ./notebooks/exercises if left out")
    options = parser.parse_args(arguments)
    if (options.watch or options.hint) and (options.which is None or options.serve):
        parser.error("which: expected an exercise with --watch or --hint, got none")
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before Triton is imported
    console = Console(highlight=False)
    try:
        tasks = all_tasks(options.folder)
        if options.serve:
            return serve(console, tasks)
        if options.which is None:
            return show_all(console, tasks)
        task = find(tasks, options.which)
        if options.watch:
            watch(console, task, tasks)
            return 0
        return show(console, task, tasks, hints=options.hint)
    except learner.FolderError as error:
        parser.error(str(error))
    except KeyboardInterrupt:
        console.print("\nStopped.")
        return 130


def all_tasks(folder: Path) -> list[Task | PuzzleTask]:
    """Return the exercises and the puzzles, with their files in a folder.

    Raises:
        FolderError: if a file is missing.
    """
    exercises = [
        Task(str(number), exercise, learner.file_of(folder, exercise.name))
        for number, exercise in enumerate(EXERCISES, 1)
    ]
    puzzles = [
        PuzzleTask(f"p{number}", puzzle, learner.file_of(folder / "puzzles", puzzle.name))
        for number, puzzle in enumerate(PUZZLES, 1)
    ]
    return [*exercises, *puzzles]


def find(tasks: Sequence[Task | PuzzleTask], which: str) -> Task | PuzzleTask:
    """Return a task by its number, its name or its file.

    Raises:
        FolderError: if there is none.
    """
    wanted = Path(which).stem.lower()
    for task in tasks:
        if wanted.lstrip("0") in (task.number, task.name) or wanted == task.file.stem:
            return task
    numbers = f"a number from 1 to {len(EXERCISES)}, p1 to p{len(PUZZLES)}"
    raise learner.FolderError(f"{which}: expected {numbers}, or a name; `{COMMAND}` lists them")


def show_all(console: Console, tasks: Sequence[Task | PuzzleTask]) -> int:
    """Check everything, list it, and say what comes next."""
    states: dict[str, str] = {}
    with Progress(lambda: f"{len(states)} of {len(tasks)} checked"):
        for task in tasks:
            states[task.number] = task.check().state
    rows = {task.number: (states[task.number], task.name, task.effort, task.title) for task in tasks}
    exercises = [number for number in rows if number.isdigit()]
    console.print("[bold]Write a serving engine's attention yourself[/bold], a function at a time.\n")
    console.print(report.list_table({number: rows[number] for number in exercises}))
    console.print("\n[bold]Puzzles[/bold]: bugs that servers had. Find a case that goes wrong, and fix it.\n")
    console.print(report.list_table({number: row for number, row in rows.items() if number not in exercises}))
    console.print("\n", report.progress_bar(sum(state == "done" for state in states.values()), len(tasks)), sep="")
    show_next(console, next((task for task in tasks if states[task.number] not in ("done", "not here")), None))
    return 0


def show(console: Console, task: Task | PuzzleTask, tasks: Sequence[Task | PuzzleTask], *, hints: int = 0) -> int:
    """Check one task, and show what came of it and what comes next."""
    outcome = task.check()
    mark, style = report.MARKS[outcome.state]
    console.print(Text.assemble((f"{mark} {task.number} · {task.name}", f"bold {style}"), f"  {task.title}\n"))
    is_puzzle = isinstance(task, PuzzleTask)
    if outcome.state == "wrong":
        report.show_wrong(console, "mended" if is_puzzle else task.name, outcome)
    elif outcome.state == "found":
        console.print("[green]Found:[/green] broken goes wrong there.\n")
        report.show_wrong(console, "broken", outcome)
        console.print(f"Now write [bold]mended[/bold] in {task.file}: it is checked on all cases.")
    elif outcome.state == "to do" and is_puzzle:
        console.print(f"{learner.story(task.file)}\n")
        console.print(f"To do: open [bold]{task.file}[/bold], read broken, and write failing_case; then mended.")
    elif outcome.state == "to do":
        console.print(f"To do: open [bold]{task.file}[/bold], and write {task.name} where it says raise.")
    elif outcome.state == "not here":
        console.print(outcome.reason)
    for i, hint in enumerate(task.hints[:hints], 1):
        console.print(Text.assemble((f"Hint {i} of {len(task.hints)}: ", "bold"), hint))
    if outcome.state == "done":
        console.print(f"All {outcome.trials} trials are right.")
        place = tasks.index(task)
        others = [*tasks[place + 1 :], *tasks[:place]]
        show_next(console, next((each for each in others if each.check().state not in ("done", "not here")), None))
    elif hints < len(task.hints):
        console.print(f"A hint: {to_type(task.number + ' --hint' * (hints + 1), task.file)}", style="dim")
    return int(outcome.state == "wrong")


def show_next(console: Console, task: Task | PuzzleTask | None) -> None:
    """Show what comes next."""
    if task is None:
        console.print("\nNothing is left to write.")
        return
    console.print(f"\nNext: [bold]{task.file}[/bold]  {task.title}\n      {to_type(task.number, task.file)}")


def serve(console: Console, tasks: Sequence[Task | PuzzleTask]) -> int:
    """Answer with a real model and the functions that are right."""
    from twinattn.course.exercises import serve as module

    console.print(
        "Checking your functions, and then answering two questions four times: 2 to 5 minutes.\n", style="dim"
    )
    done = [task for task in tasks if isinstance(task, Task) and task.check().state == "done"]
    functions = {task.name: getattr(learner.load(task.file), task.name) for task in done}
    numbers = {task.name: task.number for task in tasks}
    try:
        return int(not module.serve(console, functions, numbers))
    except (ImportError, FileNotFoundError) as error:
        console.print(f"{error}\nThis needs transformers and the model; `make demo` brings both.")
    return 2


def watch(console: Console, task: Task | PuzzleTask, tasks: Sequence[Task | PuzzleTask]) -> None:
    """Check whenever the file is saved, until Ctrl-C."""
    seen = None
    try:
        while True:
            saved = task.file.stat().st_mtime_ns
            if saved != seen:
                seen = saved
                console.clear()
                show(console, task, tasks)
                console.print(f"\nWatching {task.file}; Ctrl-C ends.", style="dim")
            time.sleep(0.2)
    except KeyboardInterrupt:
        console.print()


if __name__ == "__main__":
    sys.exit(main())
