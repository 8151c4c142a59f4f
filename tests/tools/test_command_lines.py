"""Command lines with wrong values: exit status 2 and the name of the argument, before anything runs."""

import sys
from pathlib import Path
from unittest import mock

import pytest
from typer.testing import CliRunner

import twinattn.bench
import twinattn.course.drawing.__main__ as drawing
import twinattn.course.exercises.__main__ as exercises
import twinattn.kit.__main__ as conformance
from notebooks import run as notebooks
from tests import matrix
from twinattn.bench import quantization_error, quantization_quality
from twinattn.cli import main
from twinattn.course import copied as course
from twinattn.kit.search import command as search

NOTHING_RUNS = (  # what would be the first to run
    (search, "_Process"),
    (search, "try_kernel"),
    (conformance, "check_apart"),
    (twinattn.bench, "Bench"),
    (drawing, "example"),
    (notebooks, "execute"),
    (matrix, "run"),
    (quantization_error, "measure"),
    (quantization_quality, "measure"),
    (course.shutil, "copytree"),
    (exercises, "watch"),
    (exercises, "serve"),
)
EXERCISES = Path(notebooks.__file__).parent / "exercises"
KERNEL = "refattn.chunked_prefill --path chunked_prefill"


WRONG = (  # the command, its arguments, and what is said
    (search, "--workloads 0", "workloads: expected a positive int, got 0"),
    (search, "--workloads many", "argument --workloads: invalid int value"),
    (search, "--seconds -1", "seconds: expected a finite number above 0, got -1.0"),
    (search, "--seconds nan", "seconds: expected a finite number above 0, got nan"),
    (search, "--dtypes float99", "dtypes: expected some of bfloat16, float16, float32, float64, got 'float99'"),
    (search, "--longest -5", "longest: expected a positive int, got -5"),
    (search, "--jobs 0", "jobs: expected a positive int, got 0"),
    (search, "--device gpu", "device: expected a torch.device or its name, got 'gpu'"),
    (search, "--device cuda:99", "device: expected one that is here, got 'cuda:99'"),
    (search, "--device meta", "device: expected cpu, or cuda where torch finds a GPU, got 'meta'"),
    (search, "--results nowhere/x.json", "results: expected a file in a folder that is there"),
    (search, "--log file", "log: expected a folder, or one that can be made, got 'file'"),
    (search, "--paths nowhere", "paths: expected some of"),
    (search, "--kernels fa9", "kernels: expected default or one of"),
    (search, "--replay {} --device gpu", "device: expected a torch.device or its name"),
    ("fastattn", "search --longest 0", ""),
    ("fastattn", "bench --quick --device gpu", "device: expected cpu, or cuda where torch finds a GPU, got 'gpu'"),
    ("fastattn", "bench --quick --device cuda:99", "device: expected cpu, or cuda where torch finds a GPU"),
    ("fastattn", "bench --quick --rows nonsense", "rows: expected part of the name of a row"),
    ("fastattn", "bench --quick --out file", "out: expected a folder, or one that can be made, got 'file'"),
    ("fastattn", "load --temperature -1", "temperature: expected a finite number of at least 0, got -1.0"),
    ("fastattn", "load --picture nowhere/x.svg", "picture: expected a file in a folder that is there"),
    ("fastattn", "load --nano-vllm nowhere", "nano_vllm: expected a folder, got 'nowhere'"),
    ("fastattn", "quantization --out file/there", "out: expected a folder, or one that can be made"),
    ("fastattn", "quantization-quality --out file/there", "out: expected a folder, or one that can be made"),
    ("fastattn", "notebooks file", "folder: expected one that is not there yet"),
    ("fastattn", "notebooks file/there", "folder: expected a folder, or one that can be made"),
    ("fastattn", "ladder prefil", "ladder: expected one of decode, prefill, latents, states, got 'prefil'"),
    ("fastattn", "ladder --json file/there/x.json", "json: expected a folder, or one that can be made"),
    ("fastattn", "doctor now", "unexpected extra argument"),
    (conformance, f"{KERNEL} --examples 0", "--examples: expected a positive int, got 0"),
    (conformance, f"{KERNEL} --seconds -1", "--seconds: expected a finite number above 0, got -1.0"),
    (conformance, f"{KERNEL} --patience nan", "--patience: expected a finite number above 0, got nan"),
    (conformance, f"{KERNEL} --json nowhere/x.json", "--json: expected a file in a folder that is there"),
    (conformance, f"{KERNEL} --html .", "--html: expected a file in a folder that is there"),
    (conformance, f"{KERNEL} --property beauty", "--property: expected one of"),
    (conformance, f"{KERNEL} --device gpu", "device: expected one that computes here"),
    (conformance, f"{KERNEL} --dtype int4", "argument --dtype: invalid choice"),
    (conformance, "--all-installed --jobs 0", "--jobs: expected a positive int, got 0"),
    (conformance, "--all-installed --adapter nowhere", "--adapter: expected part of one of"),
    (conformance, "--all-installed --out file/x.json", "--out: expected a folder, or one that can be made"),
    (conformance, "vacuous nowhere::check varlen", "nowhere"),
    (drawing, "nowhere", "argument NAME: invalid choice: 'nowhere'"),
    (drawing, "window --window 0", "window: expected at least 1, got 0"),
    (drawing, "window --output nowhere/x.svg", "output: expected a file in a folder that is there"),
    (exercises, f"99 --folder {EXERCISES}", "99: expected a number from 1 to"),
    (exercises, "--watch", "which: expected an exercise with --watch or --hint, got none"),
    (exercises, "--serve --hint", "which: expected an exercise with --watch or --hint, got none"),
    (exercises, "1 --folder nowhere", "nowhere"),
    (notebooks, "99", "NUMBER: expected the first digits of a notebook's name, got '99'"),
    (matrix, "--cells 99", "--cells: expected numbers from 0 to 8, as 3,4, got '99'"),
    (matrix, "--cells x", "--cells: expected numbers from 0 to 8, as 3,4, got 'x'"),
    (matrix, "--jobs 0", "--jobs: expected at least 1, got 0"),
    (matrix, "--output nowhere/x.json", "--output: expected a file in a folder that is there"),
)


@pytest.fixture
def status(capsys, monkeypatch, tmp_path):
    """Run a command line in an empty folder with a file in it, and return its status and what it said."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    with mock.patch.multiple(matrix, find_pythons=lambda: [sys.executable], machine=lambda: {"name": "one"}):
        for module, name in NOTHING_RUNS:
            monkeypatch.setattr(module, name, mock.Mock(side_effect=AssertionError(f"{name} runs")))

        def run(command, line):
            if command == "fastattn":
                result = CliRunner().invoke(main, line.split())
                return result.exit_code, result.output
            monkeypatch.setattr(sys, "argv", [command.__name__, *line.split()])
            try:
                code = command.main()
            except SystemExit as error:
                code = error.code
            return code, capsys.readouterr().err

        yield run


@pytest.mark.parametrize(
    ("command", "line", "message"), WRONG, ids=lambda part: getattr(part, "__name__", part).replace(" ", "_")[:40]
)
def test_a_wrong_value_is_named(status, command, line, message):
    code, said = status(command, line)
    assert code == 2 and message in " ".join(said.split())
