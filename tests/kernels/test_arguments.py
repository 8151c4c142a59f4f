"""Our kernels take at most 15 arguments, and the functions that they call 8: the rest are NamedTuples with names."""

import ast
from collections.abc import Iterator
from pathlib import Path

from tests.helpers.launched import LAUNCHED

ROOT = Path(__file__).parent.parent.parent
MOST_OF_A_KERNEL, MOST_OF_A_FUNCTION = 15, 8


def jitted() -> Iterator[tuple[str, ast.FunctionDef]]:
    """List the functions that Triton or Gluon compiles, by file and name."""
    for folder in ("fastattn", "twinattn"):
        for file in sorted((ROOT / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(file.read_text())):
                if isinstance(node, ast.FunctionDef) and any(
                    ast.unparse(x).startswith(("triton.jit", "gluon.jit")) for x in node.decorator_list
                ):
                    yield f"{file.relative_to(ROOT)}:{node.name}", node


def test_kernels_take_few_arguments():
    counts = {name: len(node.args.args) for name, node in jitted()}
    longer = {}
    for name, count in counts.items():
        function = name.partition(":")[2]
        is_kernel = function.endswith("_kernel") or function in LAUNCHED
        if count > (MOST_OF_A_KERNEL if is_kernel else MOST_OF_A_FUNCTION):
            longer[name] = count
    assert len(counts) > 100 and not longer, longer
