"""A learner's folder: a file for each exercise, `01_slot.py` with the function `slot`, and what its first line says."""

import ast
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

FOLDER = Path("notebooks/exercises")


class FolderError(ValueError):
    """There is no such folder, file or function; the message says what was expected."""


def files(folder: Path) -> list[Path]:
    """Return the files of exercises or puzzles in a folder, in order.

    Raises:
        FolderError: if there are none.
    """
    found = sorted(folder.glob("[0-9][0-9]_*.py"))
    if not found:
        raise FolderError(f"{folder}: expected the files of the exercises, 01_slot.py and so on; found none")
    return found


def file_of(folder: Path, name: str) -> Path:
    """Return the file of an exercise or a puzzle.

    Raises:
        FolderError: if there is none.
    """
    found = sorted(folder.glob(f"[0-9][0-9]_{name}.py"))
    if not found:
        raise FolderError(f"{folder}: expected a file of {name}, as git has it; found none")
    return found[0]


def load(file: Path) -> ModuleType:
    """Import a file anew, as it is now. It may raise whatever it wants."""
    name = f"refattn_exercises_{file.stem}"
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None  # it ends in .py
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # where inspect looks for the source of a kernel
    spec.loader.exec_module(module)
    return module


def documentation(file: Path) -> str:
    """Return what a file says of itself, without running it; nothing if it cannot be read."""
    try:
        return ast.get_docstring(ast.parse(file.read_text())) or ""
    except SyntaxError:
        return ""


def title(file: Path) -> str:
    """Return the title of an exercise or puzzle: the first line of its file, without number and point."""
    first = documentation(file).partition("\n")[0]
    return first.partition(" · ")[2].removesuffix(".") or file.stem[3:]


def story(file: Path) -> str:
    """Return what a puzzle tells: the paragraphs after its title."""
    return documentation(file).partition("\n\n")[2]


def code(file: Path) -> str:
    """Return the text of a file after its title."""
    return file.read_text().split('"""\n', 1)[1].lstrip()
