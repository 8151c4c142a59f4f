"""Exercises in the pages of the site: their check holds the cases of the terminal's, and judges and says the same."""

import ast
import importlib
import json
import sys
from functools import cache
from pathlib import Path

import pytest
import torch

from tests.helpers.over_lists import OVER_LISTS
from tests.helpers.wrong_answers import WRONG
from twinattn.course.exercises import exercise as exercise_module
from twinattn.course.exercises import here, in_page, learner, lists
from twinattn.course.exercises.functions import EXERCISES

ROOT = Path(__file__).parent.parent.parent
STUBS, SOLUTIONS = ROOT / "notebooks" / "exercises", Path(__file__).parent / "solutions"
IN_PAGE = {exercise.name: exercise for exercise in EXERCISES if exercise.in_page}

each_exercise = pytest.mark.parametrize("exercise", IN_PAGE.values(), ids=IN_PAGE)


@pytest.fixture(autouse=True)
def as_a_learner_runs_them(shapes_unchecked):
    """Shapes are not checked there."""


@cache
def exported(name):
    return lists.of_exercise(IN_PAGE[name])


def run(name, source):
    return json.loads(in_page.run(source, exported(name)))


def solution(name):
    if name not in OVER_LISTS:
        return learner.file_of(SOLUTIONS, name).read_text()
    stub = lists.stub(learner.file_of(STUBS, name))
    return stub.replace("raise NotImplementedError", OVER_LISTS[name].strip())


@each_exercise
def test_its_cases_are_those_of_the_terminal(exercise):
    """Trial by trial; and the terminal's own check finds right what the page takes to be right."""
    page = json.loads(exported(exercise.name))
    trials = list(exercise.trials())
    assert [trial["says"] for trial in page["trials"]] == [trial.says for trial in trials]
    shown = [{name: lists.plain(value) for name, value in trial.arguments.items()} for trial in trials]
    assert json.dumps([trial["arguments"] for trial in page["trials"]]) == json.dumps(shown)
    assert [each["says"] for each in page["mistakes"]] == list(exercise.mistakes)
    for trial, each in zip(trials, page["trials"], strict=True):
        high, low = exercise_module._both(exercise, trial, exercise.reference)
        tensors = {
            part: torch.tensor(each["expected"][part], dtype=want.dtype).reshape(want.shape)
            if isinstance(want, torch.Tensor)
            else each["expected"][part]
            for part, want in low.items()
        }
        exercise_module.compare(tensors, high, low)


@pytest.mark.parametrize("name", IN_PAGE)
def test_it_is_written_over_lists(name):
    stub = lists.stub(learner.file_of(STUBS, name))
    assert run(name, stub)["state"] == "to do"
    assert not {"Tensor", "torch", "jaxtyping"} & {node.id for node in ast.walk(ast.parse(stub)) if "id" in dir(node)}
    outcome = run(name, solution(name))
    assert outcome["state"] == "done", outcome
    assert outcome["trials"] == len(list(IN_PAGE[name].trials()))


@pytest.mark.parametrize("name", [name for name in IN_PAGE if name not in OVER_LISTS])
def test_wrong_answers_are_named_as_in_the_terminal(name):
    for old, new, says in WRONG[name]:
        outcome = run(name, solution(name).replace(old, new))
        assert outcome["state"] == "wrong" and says in outcome["reason"] + outcome["mistake"]


@pytest.mark.parametrize(
    ("name", "old", "new", "says"),
    [
        ("causal_mask", "seq_len - query_len, seq_len", "query_len", "aligned at the top left"),
        ("causal_mask", "j <= i", "j < i", "a token sees itself"),
        ("causal_mask", "j <= i", "1.0", "expected True or False"),
        ("causal_mask", "[[", "[[0.5] + [", "expected 2 rows of 4, got 2 rows of [5]"),
        ("write", "slot >= 0", "slot >= -1", "Python counts -1 from the end"),
        ("write", "value_cache[block][row] = value[token]", "pass", "the values were not written"),
        ("online_softmax", "x * rescale +", "x +", "the values were not rescaled"),
        ("online_softmax", "new_max == -inf", "False", "a tile in which everything is hidden"),
        ("online_softmax", "in tiles:", "in [*tiles, *tiles]:", "gone through twice"),
        ("online_softmax", ", row_max + log(row_sum)", "", "expected (out, lse), got list"),
        ("fold", "(v - answer)", "v", "the value is added whole"),
        ("fold", "faded =", "state[0][0] = 7.0; faded =", "the argument state was changed"),
        ("rms_norm", "/ len(row) + eps", "+ eps", "divides by that of their mean"),
        ("rotate", "position * speed", "-position * speed", "the pairs turn the other way"),
        ("rotate", "-i / half", "-i / (2 * half)", "here it is -i / d"),
        ("sample", "logits[token] / temp", "logits[token] * temp", "not multiplied"),
        ("sample", "    if temperature == 0:\n        return order[0]\n", "", "ZeroDivisionError"),
        ("gather", "return ", "", "is there a `return`?"),
        ("gather", "range(seq_len)", "range(seq_len + 1)", "expected 5 entries, got 6"),
        ("gather", "cache[blocks", "kache[blocks", "NameError: name 'kache' is not defined"),
        ("fold", "faded =", "faded = =", "SyntaxError"),
        ("fold", "def fold", "def fault", "there is no function fold"),
    ],
    ids=range(22),
)
def test_what_is_wrong_over_lists_is_said(name, old, new, says):
    source = solution(name)
    assert old in source
    outcome = run(name, source.replace(old, new))
    assert outcome["state"] == "wrong" and says in outcome["reason"] + outcome.get("mistake", ""), outcome


def test_a_wrong_mask_is_drawn_and_what_was_printed_is_kept():
    source = solution("causal_mask").replace("j <= i", "j < i").replace("return", "print('here'); return")
    outcome = run("causal_mask", source)
    assert outcome["shown"].splitlines()[:3] == ["expected    got", "1 1 1 .     1 1 - .", "1 1 1 1     1 1 1 -"]
    assert outcome["printed"].startswith("here\n")


def test_the_line_that_raised_is_named():
    outcome = run("slot", "def slot(position, blocks, block_size):\n    return blocks[position / block_size]\n")
    assert outcome["reason"].startswith("line 2, `return blocks[position / block_size]`: TypeError")


def test_it_needs_the_standard_library_alone():
    tree = ast.parse(Path(in_page.__file__).read_text())
    names = [alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    assert {name.partition(".")[0] for name in names} <= sys.stdlib_module_names


def test_every_exercise_has_a_place_in_the_notebooks():
    cells = [cell for path in (ROOT / "notebooks").glob("*.ipynb") for cell in json.loads(path.read_text())["cells"]]
    text = "\n".join("".join(cell["source"]) for cell in cells if "exercise" in cell["metadata"].get("tags", ()))
    for number, exercise in enumerate(EXERCISES, 1):
        assert text.count(f"exercise [{number} · `{exercise.name}`](exercises/{number:02}_{exercise.name}.py)") == 1


def test_an_exercise_is_checked_in_a_cell(capsys):
    def slot(position, blocks, block_size):
        return blocks[0] * block_size + position % block_size

    here.check(slot, hints=1)
    printed = " ".join(capsys.readouterr().out.split())
    assert "expected 9 got 37" in printed and "not always the first" in printed and "Hint 1 of 2" in printed
    here.check(EXERCISES[0].reference)
    assert "All 6 trials are right" in capsys.readouterr().out
    with pytest.raises(ValueError, match="function: expected one named slot"):
        here.check(run)


def test_python_for_the_page_is_the_pinned_one(monkeypatch, tmp_path, capsys):
    """Another archive is refused; without npm, the site is built without Python, and that is said."""
    monkeypatch.syspath_prepend(ROOT / "docs")
    pyodide = importlib.import_module("pyodide")
    with pytest.raises(ValueError, match="expected sha512-"):
        pyodide.unpack(b"something else", tmp_path / "pyodide")
    assert not pyodide.is_here(tmp_path / "pyodide") and not (tmp_path / "pyodide").exists()
    monkeypatch.setattr(pyodide, "is_here", lambda: False)
    monkeypatch.setattr(pyodide.shutil, "which", lambda name: None)
    assert pyodide.main() == 0
    assert "Exercises will not run in the pages of the site: there is no npm" in capsys.readouterr().out
