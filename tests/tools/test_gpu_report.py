"""The report of a user's GPU: what its parts are asked, what it keeps of one that fails, and no names."""

import json
import re
import runpy
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from fastattn.kernels import NAMES
from tests import gpu_report
from twinattn import cli
from twinattn.kit import __main__ as conformance
from twinattn.kit.search import command as search

HEAD = {"date": "2026-01-01T00:00:00+00:00", "machine": {"name": "A GPU"}}


@pytest.fixture
def stand_in(tmp_path, monkeypatch):
    """A module in the place of each part: it does what its first argument says."""
    (tmp_path / "part.py").write_text(
        "import json, pathlib, sys, time\n"
        "what, out = sys.argv[1], pathlib.Path(sys.argv[2])\n"
        "print(f'\\x1b[31mlooked\\x1b[0m into {pathlib.Path.home()}/x and {out}')\n"
        "if what == 'hangs': time.sleep(60)\n"
        "if what == 'folder': out.mkdir(); out = out / 'gpu.json'\n"
        "if what != 'crashes': out.write_text(json.dumps({'what': what}))\n"
        "sys.exit({'fails': 1, 'crashes': 3}.get(what, 0))\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(gpu_report, "PYTHON", [sys.executable, "-S", "-m"])
    return lambda what: ("part", what, "{out}")


def test_what_a_part_leaves(stand_in, tmp_path):
    """A part that fails keeps what it has written, and its last lines, without the name of a user's folder."""
    commands = {"tests": stand_in("fails"), "bench": stand_in("folder"), "kit": stand_in("crashes")}
    out = tmp_path / "report.json"
    gpu_report.assemble(HEAD, commands, out, limit=30.0)
    report = json.loads(out.read_text())
    parts = report["parts"]
    assert {name: report[name] for name in HEAD} == HEAD
    assert [part["exit_status"] for part in parts.values()] == [1, 0, 3]
    assert [part["found"] for part in parts.values()] == [{"what": "fails"}, {"what": "folder"}, None]
    assert "last_lines" not in parts["bench"] and parts["bench"]["command"] == "part folder {out}"
    assert parts["kit"]["last_lines"] == ["looked into ~/x and OUT/kit.json"]
    assert str(Path.home()) not in out.read_text() and str(gpu_report.ROOT) not in out.read_text()


def test_a_part_that_hangs_is_ended_and_the_others_are_kept(stand_in, tmp_path):
    out = tmp_path / "report.json"
    gpu_report.assemble(HEAD, {"doctor": stand_in("works"), "search": stand_in("hangs")}, out, limit=1.0)
    parts = json.loads(out.read_text())["parts"]
    assert parts["doctor"]["found"] == {"what": "works"} and parts["doctor"]["exit_status"] == 0
    assert parts["search"]["exit_status"] is None and parts["search"]["found"] is None


def test_every_part_is_asked_on_the_device_and_writes_where_it_is_told():
    for quick in (False, True):
        parts = gpu_report.parts("cuda:1", 60.0, 8, quick=quick)
        assert [*parts] == ["doctor", "tests", "search", "bench", "kit"]
        for name, command in parts.items():
            assert command.count("{out}") == 1
            assert name == "doctor" or command[command.index("--device") + 1] == "cuda:1"


@pytest.mark.parametrize("quick", [False, True])
def test_the_commands_of_the_parts_have_these_options(quick, capsys, pytestconfig):
    """Each is asked for its help, which takes no process: a part of a report takes minutes."""
    parts = gpu_report.parts("cpu", 60.0, 8, quick=quick)
    helps = {"search": search.main, "kit": conformance.main}
    for name, command in helps.items():
        with pytest.raises(SystemExit, match="0"):
            command(["--help"])
        helps[name] = capsys.readouterr().out
    helps["bench"] = CliRunner().invoke(cli.main, ["bench", "--help"], env={"COLUMNS": "200"}).output
    for name, text in helps.items():
        assert {word for word in parts[name] if word.startswith("--")} <= {*re.findall(r"--[a-z-]+", text)}
    assert pytestconfig.getoption("--results", default="not there") != "not there"
    assert quick == (gpu_report.ROOT / parts["tests"][-1]).is_file()


def test_a_device_that_is_not_there():
    with pytest.raises(ValueError, match="device: expected one that torch finds, got 'cuda'"):
        gpu_report.about("cuda", quick=True)


def test_the_doctor_says_the_same_to_a_file(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["doctor", str(tmp_path / "doctor.json")])
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # it would have the checks of shapes in it
    monkeypatch.delitem(sys.modules, "fastattn.doctor", raising=False)
    runpy.run_module("fastattn.doctor", run_name="__main__")
    found = json.loads((tmp_path / "doctor.json").read_text())
    (problems,) = [found["devices"]["CPU"]]
    assert {*problems["decode"]["reasons"]} == {*NAMES}
    for problem in problems.values():
        reasons = problem["reasons"]
        assert problem["taken"] is None or reasons[problem["taken"]] is None
    assert problems["batch invariant"]["taken"] == "cpu" and "computes on CUDA" in problems["decode"]["reasons"]["fa2"]
    assert torch.__version__.startswith(found["versions"]["torch"].split("+")[0])


def test_what_a_report_is_of():
    about = gpu_report.about("cpu", quick=True)
    assert about["device"] == "cpu" and about["machine"]["name"] and about["versions"]["torch"] and about["quick"]
