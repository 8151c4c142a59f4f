"""Blocks of code on a page, run as a reader who types them would, and held to what the page shows below them."""

import contextlib
import importlib
import io
import re
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent.parent
FENCE = re.compile(
    r"^(?P<indent> *)```(?P<language>\w+)(?: title=\"(?P<title>[^\"]*)\")?[^\n]*\n(?P<code>.*?)^(?P=indent)```$",
    re.MULTILINE | re.DOTALL,
)


@dataclass
class Block:
    """A block of code, where it stands, the file that it is, if any, and the output that the page shows below it."""

    language: str
    code: str
    line: int
    title: str | None = None
    output: str = ""


def blocks_of(page: Path) -> list[Block]:
    text = page.read_text()
    blocks: list[Block] = []
    end = 0
    for match in FENCE.finditer(text):
        code, line = textwrap.dedent(match["code"]), text[: match.start()].count("\n") + 1
        if match["language"] == "text" and blocks and not text[end : match.start()].strip():
            blocks[-1].output = code
        else:
            blocks.append(Block(match["language"], code, line, match["title"]))
        end = match.end()
    return blocks


def run_python(page: Path, blocks: list[Block], monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the blocks of a page one after the other, as a reader who types them would, and compare what they print.

    A block whose title is a file's name is that file: a module, which later blocks import.
    """
    names = {"__name__": page.stem}
    for block in blocks:
        printed = io.StringIO()
        # Lines are counted as on the page, so that an error names the right one.
        code = compile("\n" * block.line + block.code, str(page), "exec")
        with contextlib.redirect_stdout(printed):
            exec(code, names if block.title is None else new_module(block.title, monkeypatch))
        assert tidy(printed.getvalue()) == tidy(block.output), f"{page.name}:{block.line} prints something else"


def new_module(file: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Return the names of a new module, `refattn.skip` for `refattn/skip.py`, that can be imported in this test."""
    package, name = Path(file).parent.name, Path(file).stem
    assert not (ROOT / file).exists(), f"{file} is there already"
    module = ModuleType(f"{package}.{name}")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(importlib.import_module(package), name, module, raising=False)
    return vars(module)


def tidy(text: str) -> list[str]:
    return [line.rstrip() for line in text.strip().splitlines()]
