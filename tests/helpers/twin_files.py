"""The files of both packages: which are twins, and which of these are paths."""

import ast
from functools import cache
from importlib import import_module
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
SHARED = {  # computes no attention: both twins import it; of `keys`, the fast twin takes the storages alone
    *(
        "batch",
        "plan",
        "trees",
        "states",
        "rings",
        "ranks",
        "options",
        "keys",
        "scales",
        "packed_latents",
        "four_bits",
        "index_keys",
        "entries",
    ),
    *("checks", "checks_of_calls", "checks_of_steps", "checks_of_writes", "overlap", "modes", "allocation", "steps"),
}
HANDED_ON = ("allocation", "steps")  # modules with functions that both twins hand on under their own name
REFERENCE_ONLY = {"attention", "masks", "rounding"} | SHARED
FAST_ONLY = {"kernels", "dispatch", "doctor"}
BESIDES = {"kv_cache", "merge", "metadata", "state_cache"}  # twins that are no paths, but go with them
OVER_STATES = {"recurrent", "replay"}  # paths without keys to attend to: no blocks, and no softmax to return the sum of


def parts(package: str) -> set[str]:
    """List the files and the folders of a package."""
    inside = (ROOT / package).iterdir()
    return {
        path.stem
        for path in inside
        if (path.suffix == ".py" and path.stem != "__init__") or (path.is_dir() and any(path.glob("*.py")))
    }


def public(tree: ast.Module | ast.ClassDef) -> list[ast.FunctionDef | ast.ClassDef]:
    """List the functions and classes of a file or class, without those behind an underscore."""
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    return [node for node in tree.body if isinstance(node, kinds) and not node.name.startswith("_")]


@cache
def public_names(package: str, module: str) -> list[str]:
    """List the public functions and classes of a file: its own, and `allocate = allocation.allocate_pages`."""
    tree = ast.parse((ROOT / package / f"{module}.py").read_text())
    handed_on = [
        node.targets[0].id
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.value).partition(".")[0] in HANDED_ON
    ]
    return [*(node.name for node in public(tree)), *handed_on]


def shared_types() -> dict[str, type]:
    """Return the classes that both twins share, by name."""
    modules = [import_module(f"refattn.{name}") for name in sorted(SHARED)]
    return {
        name: kind
        for module in modules
        for name, kind in vars(module).items()
        if isinstance(kind, type) and kind.__module__ == module.__name__
    }


TWINS = sorted(parts("refattn") - REFERENCE_ONLY)
PATHS = sorted(set(TWINS) - BESIDES - OVER_STATES)
