"""No file of the packages has more than 600 lines, and no function more than 80 but the body of a kernel."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
PACKAGES = ("refattn", "fastattn", "twinattn")
MOST_LINES_OF_A_FILE, MOST_LINES_OF_A_FUNCTION = 600, 80
# Those that are longer, with the most lines that they may have: a limit only goes down.
LONG_FILES: dict[str, int] = {}
LONG_FUNCTIONS = {
    "fastattn/kernels/triton/attention.py:attend_levels": 85,
    "refattn/differential.py:attention": 82,
    "twinattn/engine/engine.py:__init__": 93,  # half of it is arguments, and their checks
    "twinattn/integrations/flash_attn.py:flash_attn_with_kvcache": 99,
    "twinattn/kit/check.py:check": 97,
    "twinattn/kit/isolate.py:check_apart": 89,
    "twinattn/kit/search/command.py:run": 87,
}


def sources() -> Iterator[tuple[str, str]]:
    """Return each file of the packages, and its text."""
    for package in PACKAGES:
        for file in sorted((ROOT / package).rglob("*.py")):
            yield str(file.relative_to(ROOT)), file.read_text()


def files() -> dict[str, int]:
    """Return the lines of each file."""
    return {file: len(text.splitlines()) for file, text in sources()}


def functions() -> dict[str, int]:
    """Return the lines of the longest function of each name in each file, kernels apart."""
    found: dict[str, int] = {}
    for file, text in sources():
        for node in ast.walk(ast.parse(text)):
            is_function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            if is_function and not any("jit" in ast.unparse(decorator) for decorator in node.decorator_list):
                name = f"{file}:{node.name}"
                found[name] = max(found.get(name, 0), node.end_lineno - node.lineno + 1)
    return found


@pytest.mark.parametrize(
    ("measure", "most", "named"),
    [(files, MOST_LINES_OF_A_FILE, LONG_FILES), (functions, MOST_LINES_OF_A_FUNCTION, LONG_FUNCTIONS)],
    ids=["files", "functions"],
)
def test_nothing_is_too_long(measure, most, named):
    lines = measure()
    assert len(lines) > 300, "it does not see them"
    too_long = {name: count for name, count in lines.items() if count > named.get(name, most)}
    assert not too_long, "cut it along a question that a reader would ask"
    assert not {name for name in named if lines.get(name, 0) <= most}, "it is short enough by now: take it off the list"
