"""The import rule of the fast twin, for `lint-imports`: of `refattn`, its paths and kernels import the interface alone.

A twin that calls its own oracle proves nothing. `twinattn` may import both twins; neither imports it.
"""

from grimp import ImportGraph
from importlinter import Contract, ContractCheck, output


class TwinsStayApart(Contract):
    """Every module of `fastattn` imports, of the project, `fastattn` and `refattn.interface` alone."""

    type_name = "twins_stay_apart"

    def check(self, graph: ImportGraph, verbose: bool) -> ContractCheck:
        """Look at the direct imports of each module; what those import in turn is checked at its own turn."""
        wrong = sorted(
            (importer, imported)
            for importer in graph.find_descendants("fastattn")
            for imported in graph.find_modules_directly_imported_by(importer)
            if _is_in(imported, ("refattn", "twinattn")) and not _is_in(imported, ("refattn.interface",))
        )
        return ContractCheck(kept=not wrong, metadata={"wrong": wrong})

    def render_broken_contract(self, check: ContractCheck) -> None:
        """Print each import that is not allowed."""
        for importer, imported in check.metadata["wrong"]:
            output.print_error(f"{importer} imports {imported}")


def _is_in(module: str, packages: tuple[str, ...]) -> bool:
    return any(module == package or module.startswith(package + ".") for package in packages)
