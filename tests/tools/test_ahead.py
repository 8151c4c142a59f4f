"""`twinattn bench --jobs` prepares rows at once, times one after the other, and loses none."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from twinattn.bench import Bench, ahead, choose, listed_rows
from twinattn.cli import main

ROOT = Path(__file__).parents[2]
ROW = """
import sys, time
log, name, prepare, kind = sys.argv[1:]
def note(what):
    with open(log, "a") as file:
        file.write(f"{what} {name}\\n")
time.sleep(float(prepare))
note("prepared")
if kind == "dies":
    raise SystemExit(3)
if kind != "fails":
    print('{"ready": true}', flush=True)
    if not sys.stdin.readline():
        raise SystemExit(1)
    note("begins")
    if kind == "dies late":
        raise SystemExit(4)
    time.sleep(0.1)
    note("ends")
print(f'{{"workload": "{name}"}}', flush=True)
"""


@pytest.fixture
def bench():
    return Bench(torch.device("cpu"), torch.float32, quick=True)


def test_none_is_timed_before_all_are_prepared(tmp_path):
    log, kinds = tmp_path / "log", ["", "slow", "dies", "fails", "dies late", ""]
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", ROW, str(log), str(i), "1" if kind == "slow" else "0", kind],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for i, kind in enumerate(kinds)
    ]
    found = [*ahead.in_turns(processes)]
    assert found == [
        *(({"workload": name}, 0) for name in "01"),
        *((None, 3), ({"workload": "3"}, 0), (None, 4), ({"workload": "5"}, 0)),
    ]
    said = log.read_text().splitlines()
    assert sorted(said[: len(kinds)]) == [f"prepared {i}" for i in range(len(kinds))]
    assert said[len(kinds) :] == ["begins 0", "ends 0", "begins 1", "ends 1", "begins 4", "begins 5", "ends 5"]


def test_processes_of_rows_end_with_who_asked_for_them(tmp_path):
    command = [sys.executable, "-c", ROW, str(tmp_path / "log"), "0", "0", ""]
    pipe = subprocess.PIPE
    processes = [subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) for _ in range(2)]
    turns = ahead.in_turns(processes)
    next(turns)
    turns.close()
    assert all(process.returncode is not None for process in processes)


def test_records_are_those_of_one_process(bench):
    rows = choose(listed_rows("cpu", True), ["chunked_prefill/decode-1x512", "sliding_window/decode"])[:2]
    assert len(rows) == 2
    records = [*ahead.measured(bench, rows, jobs=2)]
    for row, record in zip(rows, records, strict=True):
        alone = bench.measure(row)
        assert record.keys() == alone.keys() and f"{record['path']}/{record['workload']}" == str(row)
        assert [one["name"] for one in record["contenders"]] == [one["name"] for one in alone["contenders"]]
        assert "median" in record["contenders"][0], record
        assert record["floor"] == alone["floor"], "by the same ceilings"


def test_a_row_whose_process_ends_says_so(bench, monkeypatch, capfd):
    (row,) = choose(listed_rows("cpu", True), ["chunked_prefill/decode-1x512"])
    monkeypatch.setattr(type(row), "__str__", lambda self: "no/such-row")
    (record,) = ahead.measured(bench, [row], jobs=1)
    assert record["error"] == "its process ended with exit code 1; its last words are above"
    assert record["contenders"][0] == {"name": "fastattn"} and record["workload"] == row.name
    assert "ValueError" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--jobs", "2"], "jobs: expected 1 on a CPU, all of whose cores are timed, got 2"),
        (["--jobs", "0"], "jobs: expected a positive int, got 0"),
        (["--jobs", "2", "--beside", "."], "jobs: expected none with --beside"),
    ],
)
def test_what_is_refused(arguments, says, monkeypatch):
    monkeypatch.chdir(ROOT)
    result = CliRunner().invoke(main, ["bench", "--quick", *arguments])
    assert result.exit_code == 2 and result.output.startswith(says)
