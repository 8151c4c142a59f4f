"""What tests share is in tests/helpers: no test module imports another."""

import ast
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent


def imported(source: str) -> set[str]:
    """List the modules that a file imports, and the names that it takes from them, with dots."""
    names, nodes = set(), [ast.parse(source)]
    for node in nodes:
        # Only the statements in a statement: expressions, most of a file, import nothing.
        nodes += (x for x in ast.iter_child_nodes(node) if isinstance(x, ast.stmt | ast.excepthandler | ast.match_case))
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        if isinstance(node, ast.ImportFrom):
            names |= {"." * node.level + f"{node.module or ''}.{alias.name}" for alias in node.names}
    return names


def of_tests(names: set[str]) -> set[str]:
    return {name for name in names if any(part.startswith("test_") for part in name.split("."))}


def test_no_test_module_imports_another():
    for file in sorted((ROOT / "tests").rglob("*.py")):
        assert not of_tests(imported(file.read_text())), (
            f"{file.relative_to(ROOT)}: move what is shared to tests/helpers"
        )


def test_such_an_import_is_found():
    for line in (
        "from tests.paths.test_mla import x",
        "import test_mla",
        "from . import test_mla",
        "from .test_mla import x",
    ):
        assert of_tests(imported(f"def f():\n    {line}"))
    assert not of_tests(imported("from tests.helpers.batches import Case"))


def test_files_that_are_read_before_pytest_is_configured_import_no_triton():
    """Whether Triton interprets is settled when it is imported, and pytest is configured to decide that."""
    for file in sorted((ROOT / "tests").glob("*/conftest.py")):
        done = subprocess.run(
            [
                sys.executable,
                "-c",
                "import runpy, sys; runpy.run_path(sys.argv[1]); print('triton' in sys.modules)",
                file,
            ],
            cwd=ROOT,
            capture_output=True,
            text=True,
        )
        assert done.stdout.strip() == "False", f"{file.relative_to(ROOT)}: {done.stderr}"
