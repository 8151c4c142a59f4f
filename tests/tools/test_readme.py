"""The README is one page, its blocks of Python print what it shows, and what pages tell to install is there."""

import re
import sys
import tomllib

import pytest

from tests.helpers.pages import ROOT, blocks_of, run_python
from twinattn.kit import __main__ as prove

README = ROOT / "README.md"
EXTRAS = re.compile(r"pip install [^`\n]*?(?:twinattn|\.|\.whl)\[([a-z0-9,]+)\]")


@pytest.mark.usefixtures("shapes_unchecked")
def test_the_blocks_of_the_readme_print_what_it_shows(monkeypatch):
    monkeypatch.setitem(sys.modules, "flash_attn", None)  # a block replaces it, for the rest of the test
    blocks = [block for block in blocks_of(README) if block.language == "python"]
    assert len(blocks) == 1
    run_python(README, blocks, monkeypatch)


def test_the_kernel_that_the_readme_proves_is_proven(capsys):
    (kernel,) = re.findall(r"^make prove ARGS=(\S+) ", README.read_text(), re.MULTILINE)
    assert prove.main([kernel, "--examples=1", "--property=answer"]) == 0
    assert "✓ honoured: answer\n" in capsys.readouterr().out


def test_the_readme_is_one_page():
    text = README.read_text()
    assert text.count("\n") <= 110
    assert len([word for word in text.split() if word != "|"]) <= 900


def test_each_path_has_its_files_in_the_readme():
    """A reference, a twin, a test and a page of its name; most have a notebook."""
    table = re.search(r"^\| path \| what .*?\n\n", README.read_text(), re.MULTILINE | re.DOTALL)[0]
    listed = re.findall(r"\(refattn/(\w+)\.py\) \| \[fastattn\]\(fastattn/(\w+)\.py\) \| .*?test_(\w+)\.py", table)
    assert all(len(set(names)) == 1 for names in listed)
    paths = {file.stem for file in (ROOT / "fastattn").glob("*.py")} & {
        file.stem for file in (ROOT / "docs/paths").glob("*.md")
    }
    assert {names[0] for names in listed} == paths and len(paths) == 17
    assert table.count("](notebooks/") >= 15 and table.count("](docs/paths/") == 18


def test_every_extra_that_a_page_names_is_one():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    pages = [README, *(ROOT / "docs").rglob("*.md")]
    named = {name for page in pages for found in EXTRAS.findall(page.read_text()) for name in found.split(",")}
    assert {"kit", "notebooks"} <= named <= set(extras)
