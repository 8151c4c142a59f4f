"""The command `twinattn`: every command says what it does, and an unknown one is refused."""

import re
import sys

import pytest
from typer.testing import CliRunner

from twinattn.cli import main
from twinattn.course.calls import CALLS

COMMANDS = (
    "demo",
    "serve",
    "prove",
    "search",
    "bench",
    "load",
    "ladder",
    "explain",
    "doctor",
    "notebooks",
    "exercises",
    "draw",
    "quantization",
    "quantization-quality",
)


def test_the_help_lists_every_command():
    found = CliRunner().invoke(main, ["--help"])
    assert found.exit_code == 0 and {
        command.name or command.callback.__name__ for command in main.registered_commands
    } == {*COMMANDS}
    assert all(name in found.output for name in COMMANDS)


@pytest.mark.parametrize("arguments", [["unknown"], ["bench", "--devise", "cpu"], ["serve", "--port", "-1"]], ids=str)
def test_what_a_command_does_not_know_is_refused(arguments):
    assert CliRunner().invoke(main, arguments).exit_code == 2


def test_a_drawing_is_printed(capsys):
    assert CliRunner().invoke(main, ["draw", "causal"]).exit_code == 0


def test_the_calls_of_explain_are_listed_without_triton(monkeypatch):
    for name in ("triton", "twinattn.course.explain"):
        monkeypatch.setitem(sys.modules, name, None)
    listed = CliRunner().invoke(main, ["explain"])
    assert listed.exit_code == 0
    assert re.findall(r"^  (\w+) +(.+)$", listed.output, re.MULTILINE) == list(CALLS.items())
    shown = CliRunner().invoke(main, ["explain", "--help"], env={"COLUMNS": "200"}).output
    assert f"Which call: {', '.join(CALLS)}." in shown
