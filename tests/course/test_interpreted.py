"""A ladder on a laptop: rungs are held to the formula in the interpreter, and so is a file of the reader's."""

import os
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton", reason="Triton comes for Linux only")

from typer.testing import CliRunner

from tests.helpers import kernels_present  # noqa: F401 (quickens the interpreter)
from twinattn.cli import main
from twinattn.course import interpreted, ladder
from twinattn.course.batches import Latents, Pages

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
WRONG = {  # by ladder and rung: an expression, and what a reader may make of it
    ("decode", 4): ("tl.sum(weights, 1)", "tl.sum(weights, 1) * 1.01"),
    ("states", 3): ("tl.store(of_state, state)", "tl.store(of_state, state * 0.5)"),
}


@pytest.fixture(autouse=True)
def shorter(monkeypatch):
    """Make batches so small that all rungs are tried in seconds."""
    small = {
        "decode": (Pages(((1, 5), (1, 70)), heads=2, kv_heads=1, size=16),),
        "prefill": (Pages(((5, 20), (1, 5)), rows=True, heads=2, kv_heads=1, size=16),),
        "latents": (Latents(((1, 5), (1, 40)), heads=2, rank=16, rope=16, nope=24, value_size=40, block_size=16),),
        "states": tuple(replace(each, lens=each.lens[1:3]) for each in interpreted.SMALL["states"]),
    }
    for name, batches in small.items():
        monkeypatch.setitem(interpreted.SMALL, name, batches)


def run(name, file=None):
    lines = []
    is_right = interpreted.run(name, lines.append, torch.device("cuda" if torch.cuda.is_available() else "cpu"), file)
    return is_right, lines[1:]


def test_the_sizes_of_the_batches_are_said():
    """So that a reader can predict the programs of a launch."""
    lines = []
    interpreted.run("prefill", lines.append, torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    assert "   new tokens of all: 5 of 20, 1 of 5; heads 2, kv_heads 1, size 16, block_size 16" in lines[0]


@pytest.mark.parametrize("name", ladder.LADDERS)
def test_each_rung_is_held_to_the_formula(name):
    is_right, lines = run(name)
    rungs = ladder.rungs(name)[1:]
    assert is_right and len(lines) == len(rungs)
    for rung, line in zip(rungs, lines, strict=True):
        is_in_gluon = INTERPRETED and name in interpreted.ON_HOPPER
        needed = None if is_in_gluon else rung.missing(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
        assert line.startswith(f"{rung.number:2} {rung.title}")
        assert (f"needs {needed}" if needed else "right, ") in line


@pytest.mark.skipif(not INTERPRETED, reason="kernels are compiled, and their launches are not listed")
def test_launches_are_listed():
    assert run("prefill")[1][-1].endswith("_attend_kernel 3 in Gluon, in 3 orders")
    _, lines = run("states")
    assert lines[2].endswith("fold 2 x 4 x 4") and lines[6].endswith("solve 2 x 4; fold 2 x 4 x 2")


@pytest.mark.parametrize(("name", "number"), WRONG)
def test_a_changed_copy_is_held_to_the_formula(name, number, tmp_path):
    """A state that is written wrong shows in the step after."""
    rung, (right, wrong) = ladder.rungs(name)[number], WRONG[name, number]
    mine = tmp_path / "mine.py"
    mine.write_text(rung.file.read_text())
    is_right, (line,) = run(name, mine)
    assert is_right and "mine.py" in line and "right" in line
    mine = tmp_path / "mine_too.py"
    text = rung.file.read_text()
    assert text.count(right) == 1
    mine.write_text(text.replace(right, wrong))
    is_right, (line,) = run(name, mine)
    assert not is_right and "mine_too.py" in line and "WRONG: out: " in line


def test_the_command_fails_where_a_file_is_wrong(tmp_path):
    mine = tmp_path / "mine.py"
    mine.write_text(ladder.rungs("decode")[4].file.read_text().replace(*WRONG["decode", 4]))
    done = CliRunner().invoke(main, ["ladder", "decode", "--file", str(mine)])
    assert done.exit_code == 1 and "WRONG" in done.stdout
    done = CliRunner().invoke(main, ["ladder", "decode", "--file", str(tmp_path / "none.py")])
    assert done.exit_code == 2 and "file: expected a rung, got" in done.stderr


NO_RUNGS = {  # by file: its text, and what is said
    "mine.txt": ("", "file: expected a rung, a file of Python, got"),
    "mine.py": ("def attend(query): ...\n", "file: expected a rung with a function attention, got"),
}


@pytest.mark.parametrize("name", NO_RUNGS)
def test_a_file_that_is_no_rung_is_named(name, tmp_path):
    text, message = NO_RUNGS[name]
    (tmp_path / name).write_text(text)
    done = CliRunner().invoke(main, ["ladder", "decode", "--file", str(tmp_path / name)])
    assert done.exit_code == 2 and message in done.stderr


def test_no_times_of_a_file_are_written(tmp_path):
    asked = ["--file", str(ladder.rungs("decode")[4].file), "--json", str(tmp_path / "times.json")]
    done = CliRunner().invoke(main, ["ladder", "decode", *asked])
    assert done.exit_code == 2 and "json: expected none with --file" in done.stderr


NOT_RIGHT = {  # what a function of the reader's is, and what is said
    "def attention(query): pass": "WRONG: out: expected a tensor, got NoneType",
    "def attention(query): return query, query": "WRONG: out: expected a tensor, got tuple",
    "def attention(query, my_table): return query": "not run: it needs `my_table`",
    "def missing(device): return 'time'\ndef attention(query): return query": "not run: it needs time",
}


@pytest.mark.parametrize("text", NOT_RIGHT)
def test_a_file_that_is_not_tried_or_has_no_output_is_not_right(text, tmp_path):
    mine = tmp_path / "mine.py"
    mine.write_text(text)
    is_right, (line,) = run("decode", mine)
    assert not is_right and NOT_RIGHT[text] in line


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU kernels are compiled")
def test_the_interpreter_is_chosen_where_nobody_has_chosen(monkeypatch):
    """In a Python of its own: Triton reads it when it is imported."""
    code = "from twinattn.course import interpreted; print(interpreted.is_on())"
    given = {name: x for name, x in os.environ.items() if name != "TRITON_INTERPRET"}
    for asked, expected in ((None, "True"), ("0", "False")):
        environment = given | ({} if asked is None else {"TRITON_INTERPRET": asked})
        done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
        assert done.stdout.strip() == expected
