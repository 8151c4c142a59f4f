"""Twins have the same files, the same public names and the same signatures; every path plans and attends."""

import ast
import importlib
import inspect

import pytest

from tests.helpers.twin_files import BESIDES, FAST_ONLY, PATHS, REFERENCE_ONLY, ROOT, TWINS, parts

SOURCES = sorted(
    path.relative_to(ROOT).as_posix()
    for package in ("refattn", "fastattn", "twinattn")
    for path in (ROOT / package).rglob("*.py")
)


def public(tree: ast.Module | ast.ClassDef) -> list[ast.FunctionDef | ast.ClassDef]:
    """List the functions and classes of a file or class, without those behind an underscore."""
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    return [node for node in tree.body if isinstance(node, kinds) and not node.name.startswith("_")]


def public_names(package: str, module: str) -> set[str]:
    """Read the public functions and classes that a file defines itself."""
    return {node.name for node in public(ast.parse((ROOT / package / f"{module}.py").read_text()))}


def signature(function) -> list[tuple]:
    """List what a caller has to know of each argument; two options that print alike are the same default."""
    return [(p.name, p.kind, repr(p.default)) for p in inspect.signature(function).parameters.values()]


def test_every_reference_has_a_twin():
    assert parts("fastattn") - FAST_ONLY == set(TWINS)
    assert set(TWINS) >= BESIDES, "the list names what is not there"
    assert set(PATHS) >= {"chunked_prefill", "dense", "differential"}
    assert parts("refattn") >= REFERENCE_ONLY, "the list names what is not there"
    assert parts("fastattn") >= FAST_ONLY, "the list names what is not there"


@pytest.mark.parametrize("module", TWINS)
def test_signatures_are_the_same(module):
    names = public_names("refattn", module)
    reference, twin = (importlib.import_module(f"{package}.{module}") for package in ("refattn", "fastattn"))
    for name in names:
        ours, theirs = getattr(reference, name), getattr(twin, name, None)
        assert theirs is not None, f"fastattn.{module} has no {name}"
        assert signature(theirs) == signature(ours), name
    assert public_names("fastattn", module) <= names, f"fastattn.{module} has public names that refattn has not"
    assert names, f"refattn.{module} has no public name"


@pytest.mark.parametrize("package", ["refattn", "fastattn"])
@pytest.mark.parametrize("path", PATHS)
def test_every_path_plans_and_attends(path, package):
    """A plan of a batch first, and what it planned in the place of the batch when a layer attends."""
    module = importlib.import_module(f"{package}.{path}")
    first, *others = inspect.signature(module.plan).parameters.values()
    assert first.name == "batch"
    assert all(p.kind is inspect.Parameter.KEYWORD_ONLY for p in others)
    takes = inspect.signature(module.attention).parameters
    positional = [name for name, p in takes.items() if p.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD]
    assert positional[0] == "query" and positional[-2:] == ["plan", "options"]
    assert takes["return_lse"].default is False and takes["out"].default is None
    assert "block_size" in inspect.signature(module.plan).parameters or path == "dense"


@pytest.mark.parametrize("source", SOURCES)
def test_every_public_function_is_described(source):
    """Modules, and the public classes, functions and methods in them."""
    tree = ast.parse((ROOT / source).read_text())
    assert ast.get_docstring(tree), f"{source} has no docstring"
    for node in public(tree):
        assert ast.get_docstring(node), f"{source}: {node.name} has no docstring"
        for member in public(node) if isinstance(node, ast.ClassDef) else []:
            described = ast.get_docstring(member) or any(
                isinstance(decorator, ast.Name) and decorator.id == "overload" for decorator in member.decorator_list
            )
            assert described, f"{source}: {node.name}.{member.name} has no docstring"
