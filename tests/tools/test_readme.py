"""Every block of Python in the README does what it says, and what it tells to install is there."""

import re
import sys
import tomllib

import pytest

from tests.helpers.pages import ROOT, blocks_of, run_python

README = ROOT / "README.md"
EXTRAS = re.compile(r"pip install [^`\n]*?(?:twinattn|\.|\.whl)\[([a-z0-9,]+)\]")


@pytest.mark.usefixtures("shapes_unchecked")
def test_the_blocks_of_the_readme_print_what_it_shows(monkeypatch):
    monkeypatch.setitem(sys.modules, "flash_attn", None)  # which a block takes the place of, for the rest of the test
    blocks = [block for block in blocks_of(README) if block.language == "python"]
    assert len(blocks) >= 2
    run_python(README, blocks, monkeypatch)


def test_every_extra_that_a_page_names_is_one():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    pages = [README, *(ROOT / "docs").rglob("*.md")]
    named = {name for page in pages for found in EXTRAS.findall(page.read_text()) for name in found.split(",")}
    assert {"kit", "notebooks"} <= named <= set(extras)
