"""The import rule of the fast twin, for `lint-imports`: of `refattn` it imports only what computes no attention.

A twin that calls its own oracle proves nothing. `twinattn` may import both twins; neither imports it.
"""

import ast
from importlib.util import find_spec
from pathlib import Path

from grimp import ImportGraph
from importlinter import Contract, ContractCheck, output

from tests.helpers.twin_files import SHARED


class TwinsStayApart(Contract):
    """Every module of `fastattn` imports, of the project, `fastattn`, what both twins share, and types of storages."""

    type_name = "twins_stay_apart"

    def check(self, graph: ImportGraph, verbose: bool) -> ContractCheck:
        """Look at the direct imports of each module; what those import in turn is checked at its own turn."""
        modules = tuple(f"refattn.{name}" for name in SHARED)
        wrong = []
        for importer in sorted(graph.find_descendants("fastattn")):
            imported = graph.find_modules_directly_imported_by(importer)
            wrong += [
                (importer, name)
                for name in imported
                if _is_in(name, ("refattn", "twinattn")) and not _is_in(name, modules)
            ]
            if "refattn.keys" in imported:
                wrong += [
                    (importer, f"refattn.keys.{name}")
                    for name in _taken(importer, "refattn.keys")
                    if not (name[0].isupper() or name in ("latents_of", "quantized_pages"))
                ]
        return ContractCheck(kept=not wrong, metadata={"wrong": wrong})

    def render_broken_contract(self, check: ContractCheck) -> None:
        """Print each import that is not allowed."""
        for importer, imported in check.metadata["wrong"]:
            output.print_error(f"{importer} imports {imported}")


def _is_in(module: str, packages: tuple[str, ...]) -> bool:
    return any(module == package or module.startswith(package + ".") for package in packages)


def _taken(importer: str, module: str) -> list[str]:
    """List the names that a module takes from another."""
    spec = find_spec(importer)
    assert spec is not None and spec.origin is not None
    nodes = [node for node in ast.walk(ast.parse(Path(spec.origin).read_text())) if isinstance(node, ast.ImportFrom)]
    return [alias.name for node in nodes if node.module == module for alias in node.names]
