"""Every block of Python in the README does what it says."""

import sys

import pytest

from tests.helpers.pages import ROOT, blocks_of, run_python

README = ROOT / "README.md"


@pytest.mark.usefixtures("shapes_unchecked")
def test_the_blocks_of_the_readme_print_what_it_shows(monkeypatch):
    monkeypatch.setitem(sys.modules, "flash_attn", None)  # which a block takes the place of, for the rest of the test
    blocks = [block for block in blocks_of(README) if block.language == "python"]
    assert len(blocks) >= 2
    run_python(README, blocks, monkeypatch)
