"""`twinattn notebooks`: the notebooks and exercises, and the measurements that they show, from the package."""

import shutil
from pathlib import Path

from refattn.checks import check_folder

PACKAGED = Path(__file__).parent  # laid out as the repository is
NOT_FOR_READERS = ("run.py", "__pycache__", ".ipynb_checkpoints")


def folder() -> Path:
    """Return the folder that has `notebooks` and `docs/results`: inside an installed package, or the repository."""
    return PACKAGED if (PACKAGED / "notebooks").is_dir() else PACKAGED.parent.parent


def copy(to: Path) -> Path:
    """Copy the notebooks and the exercises into a new folder, and return the first notebook there.

    Raises:
        ValueError: if there is something already, which may be a reader's work, or no folder can be made there.
    """
    check_folder("folder", to.parent)
    if to.exists():
        raise ValueError(f"folder: expected one that is not there yet, got {to}")
    shutil.copytree(folder() / "notebooks", to, ignore=shutil.ignore_patterns(*NOT_FOR_READERS))
    return to / "01_ragged_batch.ipynb"
