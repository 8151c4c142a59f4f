"""`fastattn compare`: a row for every path, and a wrong twin does not pass."""

import pytest
import torch
from typer.testing import CliRunner

import fastattn.chunked_prefill
from fastattn.tools import compare
from fastattn.tools.cli import main
from tests.helpers.twin_files import BESIDES, PATHS


@pytest.fixture(autouse=True)
def short(monkeypatch):
    monkeypatch.setattr(compare, "SECONDS", 0.0)


CPU = torch.device("cpu")


def test_every_path_has_a_row():
    result = CliRunner().invoke(main, ["compare", "--quick"], env={"COLUMNS": "80"})
    assert result.exit_code == 0, result.output
    rows = [line.split() for line in result.output.splitlines()]
    named = {cells[0] for cells in rows if cells}
    assert {*PATHS, *BESIDES} - {"metadata"} <= named
    assert "…" not in result.output, "it fits a terminal of 80 columns"
    assert "Every answer is within its tolerance." in result.output


def work_of(path):
    return next(work for work in compare._works(CPU, torch.float32, 32) if work.path == path)


def test_the_numbers_are_those_of_the_twins():
    result = compare.compare(work_of("chunked_prefill"), CPU, torch.float32)
    assert result.within and 0 < result.error <= result.tolerance < 1e-4
    assert list(result.seconds) == list(result.peak_bytes) == ["refattn", "fastattn"]
    assert all(seconds > 0 for seconds in result.seconds.values())


def test_a_wrong_twin_is_told_of(monkeypatch):
    right = fastattn.chunked_prefill.attention

    def wrong(*args, **options):
        out, lse = right(*args, **options)
        out[0, 0, 0] += 1e-3
        return out, lse

    monkeypatch.setattr(fastattn.chunked_prefill, "attention", wrong)
    only = [work_of("chunked_prefill")]
    assert not compare.compare(only[0], CPU, torch.float32).within
    monkeypatch.setattr(compare, "_works", lambda *_: only * 2)
    result = CliRunner().invoke(main, ["compare", "--quick"])
    assert result.exit_code == 1 and "Not every answer is." in result.output


def test_what_no_kernel_computes_is_a_row_of_dashes(monkeypatch):
    def refuse(*args, **options):
        raise NotImplementedError("no kernel")

    monkeypatch.setattr(fastattn.chunked_prefill, "attention", refuse)
    only = [work_of("chunked_prefill")]
    monkeypatch.setattr(compare, "_works", lambda *_: only * 2)
    result = CliRunner().invoke(main, ["compare"])
    assert result.exit_code == 0 and result.output.count("-  ") >= 2


def test_a_device_that_is_not_there():
    result = CliRunner().invoke(main, ["compare", "--device", "tpu"])
    assert result.exit_code == 2 and "device: expected one of cpu" in result.output
