"""The page that follows a request through the files: its functions are called in its order, and as long as it says."""

import ast
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

import fastattn
import fastattn.chunked_prefill
from refattn import metadata
from tests.helpers.servers import PAGE as NAMES
from tests.helpers.servers import ROOT, is_there, places_of
from tests.helpers.tiny_models import make_llama
from twinattn.course import first_engine

PAGE = (ROOT / "docs/request.md").read_text()
ROW = re.compile(
    r"^\| [^|]*\| `(?P<name>[\w.]+)` \| (?:\[`(?P<file>[^`]+)`\]\([^)]*\) \| )?(?P<lines>\d+) \|$", re.MULTILINE
)
FIRST = "twinattn/course/first_engine.py"


def rows_of(title: str) -> list[tuple[str, str, int]]:
    """Return the functions of a section's table: file, name, lines."""
    section = PAGE.split(f"\n## {title}\n")[1].split("\n## ")[0]
    return [(row["file"] or FIRST, row["name"], int(row["lines"])) for row in ROW.finditer(section)]


def called(call: Callable[[], Any]) -> list[tuple[str, str]]:
    """Return our functions that a call goes through: file and name, up to the first launch of Triton."""
    seen: list[tuple[str, str]] = []
    has_launched = False

    def note(frame: FrameType, event: str, _: Any) -> None:
        nonlocal has_launched
        file = frame.f_code.co_filename
        has_launched |= "/triton/runtime/" in file
        if event == "call" and file.startswith(str(ROOT)) and not has_launched:
            seen.append((str(Path(file).relative_to(ROOT)), frame.f_code.co_qualname))

    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    return seen


def assert_in_this_order(rows: list[tuple[str, str, int]], calls: list[tuple[str, str]]) -> None:
    left = iter(calls)
    for file, name, _ in rows:
        assert any(call == (file, name) for call in left), f"{name} of {file} is not called after the row before it"


def generate() -> None:
    first_engine.FirstEngine(make_llama(), num_blocks=8, block_size=4).generate([[1, 2, 3]], 1)


@pytest.mark.usefixtures("shapes_unchecked")
def test_the_first_engine_calls_them_in_this_order():
    calls, rows = called(generate), rows_of("In the first engine")
    assert len(rows) == 10
    assert_in_this_order(rows, calls)
    assert_in_this_order(rows_of("Into the reference"), calls)


@pytest.mark.usefixtures("shapes_unchecked")
def test_the_twin_calls_them_in_this_order(device):
    pytest.importorskip("triton", reason="Triton comes for Linux only")
    path, query, pools = fastattn.chunked_prefill, torch.randn(1, 4, 64), torch.randn(2, 8, 16, 2, 64)
    tensors = [x.to(device) for x in (query, *pools)]
    batch = metadata.make_batch([1], [40], [[1, 2, 3]], device=device)
    rows = rows_of("Into the twin, to the launch")
    with fastattn.use_kernel("triton"):
        path.attention(*tensors, path.plan(batch, block_size=16))  # the first in the process imports and chooses
        plan = path.plan(batch, block_size=16)
        assert_in_this_order(rows, called(lambda: path.attention(*tensors, plan)))
        later = called(lambda: path.attention(*tensors, plan))
    assert_in_this_order([(*rows[1][:2], 0), ("fastattn/kernels/triton/launch.py", "Launch.replay", 0)], later)
    assert not {name for _, name in later} & {"choose", "bind_attend"}, "it is bound"


def lines_of(file: str, name: str) -> int:
    """Return how many lines a function of the first engine has, and of others their file."""
    source = (ROOT / file).read_text()
    if file != FIRST:
        return len(source.splitlines())
    found = {node.name: node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef)}
    node = found[name.split(".")[-1]]
    assert node.end_lineno is not None
    return node.end_lineno - node.lineno + 1


def test_they_are_as_long_as_it_says():
    """To a tenth."""
    titles = ("In the first engine", "Into the reference", "Into the twin, to the launch")
    rows = [(*row, lines_of(*row[:2])) for title in titles for row in rows_of(title)]
    assert [row for row in rows if abs(row[2] - row[3]) > max(2, row[3] / 10)] == [], "file, name, said, real"


def test_the_first_engine_is_as_long_as_it_says():
    (lines,) = re.findall(r"a whole server in (\d+) lines", PAGE)
    assert abs(int(lines) - len((ROOT / FIRST).read_text().splitlines())) <= 10


def test_the_large_engine_has_the_names():
    places = places_of(PAGE, "`twinattn.engine`")
    assert len(places) > 15
    assert [place for place in places if not is_there(ROOT / "twinattn/engine", *place)] == []


def test_servers_were_looked_up_in_the_versions_of_the_page_of_names():
    says = re.compile(r"looked up in\s+vLLM ([\d.]+) and SGLang ([\d.]+)")
    assert says.findall(PAGE) == says.findall(NAMES.read_text())
    assert all(len(places_of(PAGE, server)) > 15 for server in ("vLLM", "SGLang"))
