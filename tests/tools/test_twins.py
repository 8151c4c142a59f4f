"""Twins have the same files, the same public names and the same signatures; every path plans and attends."""

import ast
import importlib
import inspect
import sys

import pytest

from tests.helpers.twin_files import BESIDES, FAST_ONLY, PATHS, REFERENCE_ONLY, ROOT, TWINS, parts, public, public_names

SOURCES = sorted(
    path.relative_to(ROOT).as_posix()
    for package in ("refattn", "fastattn", "twinattn")
    for path in (ROOT / package).rglob("*.py")
)


def signature(function) -> list[tuple]:
    """List what a caller has to know of each argument; two options that print alike are the same default."""
    return [(p.name, p.kind, repr(p.default)) for p in inspect.signature(function).parameters.values()]


def test_every_reference_has_a_twin():
    assert parts("fastattn") - FAST_ONLY == set(TWINS)
    assert set(TWINS) >= BESIDES, "the list names what is not there"
    assert set(PATHS) >= {"chunked_prefill", "varlen", "differential"}
    assert parts("refattn") >= REFERENCE_ONLY, "the list names what is not there"
    assert parts("fastattn") >= FAST_ONLY, "the list names what is not there"


@pytest.mark.parametrize("module", TWINS)
def test_signatures_are_the_same(module):
    names = {*public_names("refattn", module)}
    reference, twin = (importlib.import_module(f"{package}.{module}") for package in ("refattn", "fastattn"))
    for name in names:
        ours, theirs = getattr(reference, name), getattr(twin, name, None)
        assert theirs is not None, f"fastattn.{module} has no {name}"
        assert signature(theirs) == signature(ours), name
    assert {*public_names("fastattn", module)} <= names, f"fastattn.{module} has public names that refattn has not"
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
    assert "block_size" in inspect.signature(module.plan).parameters or path == "varlen"


def code_of(package: str, module: str) -> dict[str, str]:
    """Read what each function of a file computes: its statements, if more than three, with the full names in them."""
    tree, names = ast.parse((ROOT / package / f"{module}.py").read_text()), {}
    for node in tree.body:
        if isinstance(node, ast.ImportFrom):
            names |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Assign):  # `allocate = allocation.allocate_pages`, and constants
            module_name, dot, rest = ast.unparse(node.value).partition(".")
            names[ast.unparse(node.targets[0])] = names.get(module_name, module_name) + dot + rest
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            names[node.name] = f"{package}.{module}.{node.name}"

    found = {}
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            body = node.body[1:] if ast.get_docstring(node) else node.body
            inside = [x for statement in body for x in ast.walk(statement)]
            for x in inside:
                if isinstance(x, ast.Name):
                    x.id = names.get(x.id, x.id)
            if sum(isinstance(x, ast.stmt) for x in inside) > 3:
                found[node.name] = "\n".join(map(ast.unparse, body))
    return found


def test_no_function_stands_in_both_packages():
    """A function whose every name is the same thing in both packages belongs into a file that both import."""
    for module in TWINS:
        ours, theirs = code_of("refattn", module), code_of("fastattn", module)
        twice = {name for name, code in theirs.items() if code in ours.values()}
        assert not twice, f"{module}: {twice} stand line for line in refattn, too"


def test_a_function_that_stands_twice_is_found(tmp_path, monkeypatch):
    """Unless it calls what each package has of its own."""
    body = "    check_sizes(n=n)\n    a = n + 1\n    if n:\n        {}\n    return a\n"
    for package in ("refattn", "fastattn"):
        imports = f"from refattn.checks import check_sizes\nfrom {package} import kv_cache\n\n\n"
        functions = f"def same(n):\n{body.format('a = -a')}\n\ndef own(n):\n{body.format('kv_cache.write(a)')}"
        (tmp_path / package).mkdir()
        (tmp_path / package / "path.py").write_text(imports + functions)
    monkeypatch.setattr(sys.modules[__name__], "ROOT", tmp_path)
    ours, theirs = code_of("refattn", "path"), code_of("fastattn", "path")
    assert ours["same"] == theirs["same"] and ours["own"] != theirs["own"]


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
