"""Long runs say how far they are, on standard error alone: one line on a terminal, plain lines elsewhere."""

import io
import json
import re
import threading
import time

import pytest

from twinattn import progress
from twinattn.kit import __main__ as prove
from twinattn.kit import isolate
from twinattn.kit.isolate import Tail, check_apart
from twinattn.progress import ERASE, Progress


class Terminal(io.StringIO):
    """A text that a terminal is shown."""

    def isatty(self):
        return True


def wait_for(condition):
    ends = time.monotonic() + 30
    while not condition() and time.monotonic() < ends:
        time.sleep(0.01)
    assert condition()


def test_a_line_is_rewritten_on_a_terminal_and_erased_at_the_end(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "20")
    out, far = Terminal(), iter(range(10**9))
    with Progress(lambda: f"{next(far)} of many, many more", out, every=0.01) as line:
        wait_for(lambda: out.getvalue().count(ERASE) >= 3)
        line.erase()
    shown = out.getvalue()
    assert "\n" not in shown and shown.endswith(ERASE)
    lines = [text for text in shown.split(ERASE) if text]
    assert [text[:9] for text in lines[:2]] == ["0 of many", "1 of many"]
    assert max(map(len, lines)) == 19, "a line that wraps could not be erased"


@pytest.mark.parametrize(("kind", "term"), [(io.StringIO, "xterm"), (Terminal, "dumb")])
def test_elsewhere_plain_lines_come(kind, term, monkeypatch):
    monkeypatch.setenv("TERM", term)
    out = kind()
    assert Progress(lambda: "", out).every == progress.REPEAT == 10.0
    with Progress(lambda: "3 of 4", out, every=0.01):
        wait_for(lambda: out.getvalue().count("\n") >= 2)
    assert all(re.fullmatch(r"3 of 4, \d+ s", line) for line in out.getvalue().splitlines())
    assert not [thread for thread in threading.enumerate() if "_run" in thread.name]


def test_a_run_that_is_short_says_nothing():
    out = io.StringIO()
    with Progress(lambda: "far", out):
        pass
    assert out.getvalue() == ""


def test_a_log_is_read_as_it_grows(tmp_path):
    tail = Tail(tmp_path / "log")
    assert tail.new() == []
    with (tmp_path / "log").open("w", buffering=1) as log:
        log.write('{"a": 1}\n{"b"')
        log.flush()
        assert tail.new() == [{"a": 1}] and tail.new() == []
        log.write(": 2}\n")
        assert tail.new() == [{"b": 2}] and tail.new() == []


def test_what_is_told_follows_the_log(tmp_path):
    log, said = tmp_path / "log", []
    look = isolate._teller(log, 1, said.append)
    look()
    assert said == [], "the process has not begun to write"
    events = [{"properties": ["call", "answer"]}, {"example": 1, "property": "call"}, {"finding": {}}]
    for event in events:
        with log.open("a") as file:
            file.write(json.dumps(event) + "\n")
        look()
    assert said == [
        "1 of 3 properties, 0 batches",
        "1 of 3 properties, 1 batches; now call",
        "2 of 3 properties, 1 batches",
    ]


@pytest.mark.usefixtures("shapes_unchecked")
def test_a_check_tells_how_far_it_is(monkeypatch):
    monkeypatch.setattr(isolate, "LOOK", 0.001)
    said: list[str] = []
    report = check_apart(
        "refattn.merge", "merge", only=["call", "answer"], examples=2, dtypes=["float32"], tell=said.append
    )
    assert [finding.outcome for finding in report.findings] == ["honoured"] * 2
    numbers = [
        int(re.fullmatch(r"(\d) of 2 properties, \d+ batches(?:; now (?:call|answer))?", text)[1]) for text in said
    ]
    assert numbers == sorted(numbers) and numbers[-1] == 2, "and once more at its end"


def test_prove_says_how_far_it_is_on_standard_error_alone(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(progress, "REPEAT", 0.01)
    files = [f"--{kind}={tmp_path / kind}" for kind in ("json", "junit")]
    asked = ["refattn.merge", "--examples=2", "--property=answer", "--dtype=float32"]
    assert prove.main([*asked, *files]) == 0
    printed, said = capsys.readouterr()
    assert re.search(r"^refattn\.merge: its process starts, \d+ s$", said, re.MULTILINE)
    assert "its process starts" not in printed
    json.loads((tmp_path / "json").read_text())
    assert not [kind for kind in ("json", "junit") if "process starts" in (tmp_path / kind).read_text()]
