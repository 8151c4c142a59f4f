"""Entry points of this package for processes in which it is not installed, and processes that are ended with theirs."""

import contextlib
import importlib.metadata
import os
import signal
import subprocess
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


def declared(folder: Path, group: str) -> Path:
    """Return a folder with this package's entry points of a group; it has none if the package is installed."""
    points = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"][group]
    found = {point.value for point in importlib.metadata.entry_points(group=group)}
    return write(folder / "twinattn", group, {} if found.issuperset(points.values()) else points)


def write(folder: Path, group: str, points: dict[str, str]) -> Path:
    """Make a folder that declares entry points to whom it is on the path, and return it."""
    if points:  # a folder without them would hide those of an installed package of its name
        info = folder / f"{folder.name}-0.dist-info"
        info.mkdir(parents=True, exist_ok=True)
        lines = [f"{name} = {value}" for name, value in points.items()]
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {folder.name}\nVersion: 0\n")
        (info / "entry_points.txt").write_text("\n".join([f"[{group}]", *lines, ""]))
    return folder


@contextlib.contextmanager
def running(command: Sequence[str], log: Path, **more: Any) -> Iterator[subprocess.Popen[bytes]]:
    """Run a command in the background; all processes that it has started end with the block."""
    with log.open("wb") as said:
        process = subprocess.Popen(command, stdout=said, stderr=said, start_new_session=True, **more)
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
