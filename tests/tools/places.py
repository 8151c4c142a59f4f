"""Where a mutation is planted: a module, a function or class in it, and text inside, whatever stands around it.

    refattn.kv_cache:write          in this function, wherever it stands in its file
    refattn.plan          in this file, in none of its functions
    fastattn/kernels/native/attention.c     no Python: by its path

Spaces and line breaks of the text do not count, so a change of layout, or a move within the file, breaks no mutation.
"""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent


def file_of(place: str, root: Path = ROOT) -> Path:
    """Return the file of a place in a tree."""
    module = place.partition(":")[0]
    if "/" in module:
        return root / module
    file = root.joinpath(*module.split("."))
    return file / "__init__.py" if file.is_dir() else file.with_suffix(".py")


def lines_of(source: str, name: str) -> tuple[int, int]:
    """Return where a function or class, or `Class.method`, begins and ends in a source, with its decorators.

    Raises:
        LookupError: if there is not exactly one of that name.
    """
    nodes: list[ast.AST] = [ast.parse(source)]
    for part in name.split("."):
        kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
        nodes = [x for node in nodes for x in _inside(node) if isinstance(x, kinds) and x.name == part]
    if len(nodes) != 1:
        raise LookupError(f"expected one function or class {name}, found {len(nodes)}")
    (node,) = nodes
    first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
    lines = source.splitlines(keepends=True)
    return len("".join(lines[: first - 1])), len("".join(lines[: node.end_lineno]))


def _inside(node: ast.AST) -> list[ast.AST]:
    """List what stands in a node, in branches and loops, too, but not what stands in its functions and classes."""
    found: list[ast.AST] = []
    for child in ast.iter_child_nodes(node):
        is_own = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        found += [child] if is_own else _inside(child)
    return found


def replaced(source: str, place: str, old: str | tuple[str, ...], new: str | tuple[str, ...]) -> str:
    """Replace text in a place by other text; each piece has to be there exactly once.

    Raises:
        LookupError: if it is not.
    """
    name = place.partition(":")[2]
    for before, after in zip(*((x,) if isinstance(x, str) else x for x in (old, new)), strict=True):
        begin, end = lines_of(source, name) if name else (0, len(source))
        found = [*re.finditer(_text(before), source[begin:end])]
        if len(found) != 1:
            raise LookupError(f"{place} has {before!r} {len(found)} times, not once")
        (match,) = found
        after = (after.lstrip() if before[:1].isspace() else after).rstrip("\n")
        source = source[: begin + match.start()] + after + source[begin + match.end() :]
    return source


def _text(old: str) -> str:
    """Return a pattern of a text in any layout."""
    return r"\s*".join(re.escape(word) for word in re.findall(r"\w+|[^\w\s]", old))
