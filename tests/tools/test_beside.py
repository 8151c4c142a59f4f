"""`twinattn bench --beside` times two checkouts in turns, finds the slower one, and gives a wrong answer no time."""

import json
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from twinattn.bench import beside
from twinattn.cli import main

ROOT = Path(__file__).parents[2]
ROW = "chunked_prefill/decode-1x512"
CALL = "    return dispatch.attend(query, "


def bench(*arguments):
    return CliRunner().invoke(main, ["bench", "--quick", *map(str, arguments)])


@pytest.fixture
def checkout(tmp_path):
    """Return a function that copies the packages into a folder, with other words for the call of its kernel."""

    def copy(name, new):
        folder = tmp_path / name
        for package in ("refattn", "fastattn", "twinattn"):
            shutil.copytree(ROOT / package, folder / package, ignore=shutil.ignore_patterns("__pycache__"))
        file = folder / "fastattn/chunked_prefill.py"
        text = file.read_text()
        assert text.count(CALL) == 1
        file.write_text(text.replace(CALL, new))
        return folder

    return copy


def test_checkouts_are_timed_in_turns(checkout, tmp_path, monkeypatch):
    """Found are one that takes longer, one that is wrong, one that fails and one that cannot be imported."""
    monkeypatch.setattr(beside, "ROUNDS", 2)
    edits = {
        "slow": "    __import__('time').sleep(0.3)\n" + CALL,
        "wrong": CALL.replace("query", "query * 2"),
        "fails": CALL.replace("query", "query.nothing"),
        "broken": "    return ] ",
    }
    others = [f"--beside={checkout(name, new)}" for name, new in edits.items()]
    result = bench("--rows", ROW, *others, f"--out={tmp_path}")
    assert result.exit_code == 0, result.output
    (record,) = json.loads((tmp_path / "beside.json").read_text())["runs"]
    assert f"{record['path']}/{record['workload']}" == ROW and record["machine"] and record["date"]
    ours, slow, wrong, fails, broken = record["designs"]
    assert ours["design"].startswith("this checkout")
    assert [one["design"] for one in record["designs"][1:]] == [str(tmp_path / name) for name in edits]
    assert 0 < ours["low"] <= ours["median"] <= ours["high"]
    assert ours["median"] < 0.3 <= slow["low"], "each call of the slow one sleeps for 0.3 seconds"
    assert wrong["error"].startswith("WrongAnswerError") and fails["error"].startswith("AttributeError")
    assert broken["error"] == "its process has ended"
    assert not [one for one in (wrong, fails, broken) if "median" in one]
    printed = result.output.splitlines()
    assert printed[0].split() == [ROW, "time", "spread", "of", "this", "one's"]
    assert "1.000" in printed[1] and "WrongAnswerError" in result.output


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--beside", "tests"], "beside: expected a checkout whose twinattn has bench --beside, too, got "),
        (["--beside", ".", "--rows", "nothing"], "rows: expected part of the name of a row, got 'nothing'"),
        (["--beside", ".", "--trace", "tests"], "trace: expected none with --beside"),
        (["--beside", ".", "--device", "cuda"], "device: expected cpu, or cuda where torch finds a GPU, got 'cuda'"),
        (["--beside", ".", "--out", "README.md"], "out: expected a folder"),
    ],
)
def test_what_is_refused(arguments, says, monkeypatch):
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    result = bench(*arguments)
    assert result.exit_code == 2 and result.output.startswith(says)
