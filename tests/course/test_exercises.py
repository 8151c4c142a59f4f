"""Every exercise can be solved, its check fails for the stub and for wrong answers, and it says what is wrong."""

import importlib.util
import inspect
import json
import os
import re
import shutil
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from tests.helpers.over_lists import named_in_page
from tests.helpers.wrong_answers import WRONG
from twinattn.course.exercises import __main__ as command
from twinattn.course.exercises import exercise as exercise_module
from twinattn.course.exercises import learner, lists, report
from twinattn.course.exercises.exercise import check
from twinattn.course.exercises.functions import EXERCISES

ROOT = Path(__file__).parent.parent.parent
STUBS, SOLUTIONS = ROOT / "notebooks" / "exercises", Path(__file__).parent / "solutions"

each_exercise = pytest.mark.parametrize("exercise", EXERCISES, ids=lambda exercise: exercise.name)
each_wrong_answer = pytest.mark.parametrize(
    ("name", "number"), [(name, i) for name, answers in WRONG.items() for i in range(len(answers))]
)


@pytest.fixture(autouse=True)
def as_a_learner_runs_them(shapes_unchecked):
    """Shapes are not checked there: an answer of the wrong shape is for the check to refuse."""


def skip_compiled(exercise):
    if exercise.needs == "triton":
        pytest.importorskip("triton", reason="Triton comes for Linux only")
        if os.environ.get("TRITON_INTERPRET") != "1":
            pytest.skip("kernels are compiled, and a learner's runs in the interpreter")


def run(exercise, folder):
    skip_compiled(exercise)
    file = learner.file_of(folder, exercise.name)
    return command.Task("1", exercise, file).check()


def drawn(exercise, outcome, width=80):
    console = Console(file=StringIO(), width=width, highlight=False)
    report.show_wrong(console, exercise.name, outcome)
    return console.file.getvalue()


@each_exercise
def test_the_solution_passes(exercise):
    outcome = run(exercise, SOLUTIONS)
    assert outcome.state == "done", outcome.reason
    assert outcome.trials >= 3


@each_exercise
def test_the_stub_is_to_do(exercise):
    assert run(exercise, STUBS).state == "to do"


IMPORT = re.compile(r"^(?:import|from) (?:.*\([^)]*\)|.*)\n", re.MULTILINE)


@pytest.mark.parametrize("task", command.all_tasks(STUBS), ids=lambda task: task.name)
def test_a_solution_needs_no_import_that_its_file_lacks(task, tmp_path):
    """A reader who begins to type has torch at hand; only what `refattn` already computes is left to import."""
    if isinstance(task, command.Task):
        skip_compiled(task.exercise)
    solution = SOLUTIONS / task.file.relative_to(STUBS)
    given, imports = IMPORT.findall(task.file.read_text()), IMPORT.findall(solution.read_text())
    lines = [*given, *(line for line in imports if line.startswith("from refattn"))]
    (tmp_path / solution.name).write_text("".join(lines) + IMPORT.sub("", learner.code(solution)))
    outcome = replace(task, file=tmp_path / solution.name).check()
    assert outcome.state == "done", outcome.reason
    assert "import torch\n" in given or "from torch import Tensor\n" not in given


@each_exercise
def test_the_stub_and_the_reference_have_one_signature(exercise):
    skip_compiled(exercise)
    stub = getattr(learner.load(learner.file_of(STUBS, exercise.name)), exercise.name)
    for trial in exercise.trials():
        assert list(inspect.signature(stub).parameters) == list(trial.arguments)


@each_wrong_answer
def test_a_wrong_answer_is_named(name, number, tmp_path):
    exercise = next(exercise for exercise in EXERCISES if exercise.name == name)
    old, new, says = WRONG[name][number]
    file = tmp_path / learner.file_of(SOLUTIONS, name).name
    source = learner.file_of(SOLUTIONS, name).read_text()
    assert old in source
    file.write_text(source.replace(old, new))
    outcome = run(exercise, tmp_path)
    assert outcome.state == "wrong"
    assert says in outcome.reason + outcome.mistake
    text = drawn(exercise, outcome)
    assert "Tried: " in text and "Wrong: " in text and max(map(len, text.splitlines())) <= 80


def test_every_exercise_has_wrong_answers():
    assert list(WRONG) == [exercise.name for exercise in EXERCISES]
    assert all(len(answers) >= 2 for answers in WRONG.values())


@each_exercise
def test_known_mistakes_are_named(exercise):
    """In the terminal, and at the same trial in the pages of the site."""
    page = json.loads(lists.of_exercise(exercise)) if exercise.in_page else None
    for says, mistake in exercise.mistakes.items():
        outcome = check(exercise, mistake)
        assert outcome.state == "wrong" and outcome.mistake == says, outcome.reason
        assert page is None or named_in_page(page, says) == (outcome.trials, says)


def test_files_are_numbered_in_the_order_of_the_exercises():
    names = [f"{i:02}_{exercise.name}" for i, exercise in enumerate(EXERCISES, 1)]
    assert [file.stem for file in learner.files(STUBS)] == names
    assert [file.stem for file in learner.files(SOLUTIONS)] == names


def test_nothing_of_the_learner_is_changed_by_a_check(tmp_path):
    shutil.copytree(STUBS, tmp_path / "mine")
    before = {file: file.read_text() for file in (tmp_path / "mine").glob("*.py")}
    command.main(["--folder", str(tmp_path / "mine")])
    assert {file: file.read_text() for file in (tmp_path / "mine").glob("*.py")} == before


def test_the_page_shows_what_the_command_prints(tmp_path, monkeypatch, capsys):
    page = (ROOT / "docs" / "exercises.md").read_text()
    answer = re.search(r"For `(return .*?)` it prints", page)[1]
    shutil.copytree(STUBS, tmp_path / "notebooks" / "exercises")
    file = tmp_path / "notebooks" / "exercises" / "01_slot.py"
    file.write_text(file.read_text().replace("raise NotImplementedError", answer))
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("MAKELEVEL", "1")  # as make sets it
    assert command.main(["1", "--folder", str(tmp_path / "notebooks" / "exercises")]) == 1
    printed = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert re.search(r"```text\n(.*?)```", page, re.DOTALL)[1].splitlines() == printed


def test_what_needs_another_system_is_no_red_mark(monkeypatch, capsys):
    """On a Mac there is no Triton, in which exercise 23 is written."""
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *more: None if name == "triton" else find(name, *more)
    )
    monkeypatch.setattr(command, "all_tasks", lambda folder, every=command.all_tasks: every(folder)[22:24])
    assert command.main(["23", "--folder", str(STUBS)]) == 0
    assert "for Linux only" in capsys.readouterr().out
    assert command.main(["--folder", str(STUBS)]) == 0
    printed = capsys.readouterr().out
    assert "✗" not in printed and re.search(r"23 +– +triton_decode", printed)
    assert "Next:" in printed


@pytest.mark.parametrize(
    ("name", "body", "says"),
    [
        ("slot", "return blocks[position / block_size]", "line 10, `return blocks[position / block_size]`: TypeError"),
        ("merge", "return outs[0], None", "out: max error"),
        ("merge", "return outs[0] + 1, None", "lse: expected a tensor of float32 [1, 1], got None"),
        ("paged_attention", "return [], []", "out: expected a tensor, got list"),
        ("attend", "return query", "expected (out, lse), got a tensor of float32 [1, 4]"),
        ("gather", "return cache.flatten(0, 1)[:seq_len].double()", "expected a tensor of float32"),
        ("merge", "outs[0].zero_(); return outs[0], lses[0]", "the argument outs was changed"),
        ("triton_decode", "return tl.load(nothing)", "`return tl.load(nothing)`: NameError"),
        ("tree_mask", "return 'a mask'", "answer: expected a tensor of bool [3, 3], got str"),
    ],
    ids=range(9),
)
def test_what_goes_wrong_is_said_and_shown(name, body, says, tmp_path):
    exercise = next(exercise for exercise in EXERCISES if exercise.name == name)
    stub = learner.file_of(STUBS, name)
    (tmp_path / stub.name).write_text(stub.read_text().replace("raise NotImplementedError", body))
    outcome = run(exercise, tmp_path)
    assert outcome.state == "wrong" and says in outcome.reason
    assert "Wrong: " in drawn(exercise, outcome)


def test_a_file_that_is_no_python_is_said(tmp_path):
    (tmp_path / "01_slot.py").write_text("def slot(")
    outcome = run(EXERCISES[0], tmp_path)
    assert "SyntaxError" in outcome.reason and "Wrong: " in drawn(EXERCISES[0], outcome)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["99"], "expected a number from 1 to 41, p1 to p18, or a name"),
        (["1", "--folder", "nowhere"], "nowhere: expected a file of slot"),
        (["1", "--watsch"], "unrecognized arguments: --watsch"),
    ],
    ids=range(3),
)
def test_a_mistyped_command_is_said(arguments, says, capsys):
    with pytest.raises(SystemExit):
        command.main([*arguments, "--folder", str(STUBS)] if "--folder" not in arguments else arguments)
    assert says in " ".join(capsys.readouterr().err.split())


def test_hints_come_one_by_one(capsys):
    command.main(["1", "--hint", "--folder", str(STUBS)])
    one = capsys.readouterr().out
    command.main(["slot", "--hint", "--hint", "--folder", str(STUBS)])
    two = capsys.readouterr().out
    assert "Hint 1 of 2" in one and "Hint 2 of 2" not in one and "Hint 2 of 2" in two


def test_watching_checks_again_when_the_file_is_saved(tmp_path, monkeypatch, capsys):
    shutil.copytree(STUBS, tmp_path / "mine")
    file = tmp_path / "mine" / "01_slot.py"

    naps = iter(range(3))

    def nap(seconds):
        if next(naps) == 2:
            raise KeyboardInterrupt
        file.write_text((SOLUTIONS / "01_slot.py").read_text())
        os.utime(file, ns=(1, 1))  # another time than before, whatever the clock's resolution

    monkeypatch.setattr(command.time, "sleep", nap)
    assert command.main(["1", "--watch", "--folder", str(tmp_path / "mine")]) == 0
    printed = capsys.readouterr().out
    assert printed.index("To do: ") < printed.index("All 6 trials are right")


def test_a_task_is_found_by_number_name_and_file():
    tasks = command.all_tasks(STUBS)
    for which in ("3", "03", "write", "03_write", "notebooks/exercises/03_write.py"):
        assert command.find(tasks, which).exercise is EXERCISES[2]
    for which in ("p2", "P2", "padding", "notebooks/exercises/puzzles/02_padding.py"):
        assert command.find(tasks, which).puzzle.name == "padding"


def test_a_loop_that_never_ends_is_ended(tmp_path, monkeypatch):
    monkeypatch.setattr(exercise_module, "SECONDS", 0.3)
    stub = learner.file_of(STUBS, "slot")
    (tmp_path / stub.name).write_text(stub.read_text().replace("raise NotImplementedError", "while True:\n        0"))
    outcome = run(EXERCISES[0], tmp_path)
    assert (
        outcome.state == "wrong" and "is there a loop that never ends?" in outcome.reason and "line " in outcome.reason
    )


def test_what_this_system_lacks_is_no_mistake(monkeypatch, tmp_path, capsys):
    """Without Triton, its exercise is neither wrong nor the next one to do."""
    monkeypatch.setattr(command.importlib.util, "find_spec", lambda name: None)
    assert command.main(["23", "--folder", str(STUBS)]) == 0
    assert "for Linux only" in capsys.readouterr().out
    shutil.copytree(SOLUTIONS, tmp_path / "mine")
    assert command.main(["22", "--folder", str(tmp_path / "mine")]) == 0
    assert "Nothing is left to write" in capsys.readouterr().out


def test_what_is_left_may_stand_before_what_is_done(tmp_path, capsys, monkeypatch):
    monkeypatch.delenv("MAKELEVEL", raising=False)
    shutil.copytree(STUBS, tmp_path / "mine")
    shutil.copy(SOLUTIONS / "puzzles" / "18_span_or_window.py", tmp_path / "mine" / "puzzles")
    assert command.main(["p18", "--folder", str(tmp_path / "mine")]) == 0
    printed = capsys.readouterr().out
    printed = "".join(printed.split("\n"))
    assert "01_slot.py" in printed and f"1 --folder {tmp_path / 'mine'}" in printed


def test_a_mask_of_numbers_is_said(tmp_path):
    stub = learner.file_of(STUBS, "causal_mask")
    body = "import torch\n    return torch.zeros(query_len, seq_len)"
    (tmp_path / stub.name).write_text(stub.read_text().replace("raise NotImplementedError", body))
    assert "expected a tensor of bool [2, 4], got a tensor of float32" in run(EXERCISES[4], tmp_path).reason
