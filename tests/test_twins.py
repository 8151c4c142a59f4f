"""Twins have the same files, the same public names and the same signatures."""

import ast
import importlib
import inspect
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
REFERENCE_ONLY = {"__init__", "attention", "masks", "batch"}
FAST_ONLY = {"__init__", "__main__", "cli", "demo", "doctor"}


def modules(package: str) -> set[str]:
    return {path.stem for path in (ROOT / package).glob("*.py")}


TWINS = sorted(modules("refattn") - REFERENCE_ONLY)


def public_names(package: str, module: str) -> set[str]:
    """Read the functions and classes that a file defines itself, without those behind an underscore."""
    tree = ast.parse((ROOT / package / f"{module}.py").read_text())
    kinds = (ast.FunctionDef, ast.ClassDef)
    return {node.name for node in tree.body if isinstance(node, kinds) and not node.name.startswith("_")}


def test_every_reference_has_a_twin():
    assert modules("fastattn") - FAST_ONLY == set(TWINS)
    assert {"merge", "kv_cache", "metadata", "dense", "chunked_prefill", "engine"} <= set(TWINS)


@pytest.mark.parametrize("module", TWINS)
def test_signatures_are_the_same(module):
    names = public_names("refattn", module)
    reference, twin = (importlib.import_module(f"{package}.{module}") for package in ("refattn", "fastattn"))
    for name in names:
        ours, theirs = getattr(reference, name), getattr(twin, name, None)
        assert theirs is not None, f"fastattn.{module} has no {name}"
        expected = [(p.name, p.kind, p.default) for p in inspect.signature(ours).parameters.values()]
        assert [(p.name, p.kind, p.default) for p in inspect.signature(theirs).parameters.values()] == expected, name
    assert public_names("fastattn", module) <= names, f"fastattn.{module} has public names that refattn has not"
    assert names, f"refattn.{module} has no public name"


@pytest.mark.parametrize("module", TWINS)
def test_every_public_function_is_described(module):
    for package in ("refattn", "fastattn"):
        loaded = importlib.import_module(f"{package}.{module}")
        for name in public_names(package, module):
            assert inspect.getdoc(getattr(loaded, name)), f"{package}.{module}.{name} has no docstring"
