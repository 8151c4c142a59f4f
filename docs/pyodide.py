"""Python in the browser: `python docs/pyodide.py` puts the core of Pyodide into docs/assets/pyodide.

The pages of notebooks run some exercises by it (docs/assets/exercise.js), from the site's own files. They are 13 MB,
so the repository does not hold them: npm fetches them, in a version that is pinned here by its hash. Where there is no
npm, or no network, the site is built without them, and its exercises say where else they run.

Pyodide is under the Mozilla Public License 2.0: https://github.com/pyodide/pyodide.
"""

import base64
import hashlib
import io
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

VERSION = "314.0.7"
INTEGRITY = "sha512-0YvXxEhfEdpLfb/XkM2BFAeMROq0iMUX2bzzH9pOttyMcWkwq+HbE5uyuGD82LN7y2q+SNvi/6V5JEsOlD2R1A=="
FILES = ("pyodide.mjs", "pyodide.asm.mjs", "pyodide.asm.wasm", "python_stdlib.zip", "pyodide-lock.json")
FOLDER = Path(__file__).parent / "assets" / "pyodide"


def is_here(folder: Path = FOLDER) -> bool:
    """Return whether the files of this version are there."""
    stamp = folder / "VERSION"
    return stamp.is_file() and stamp.read_text() == VERSION and all((folder / name).is_file() for name in FILES)


def unpack(archive: bytes, folder: Path) -> None:
    """Put the files of npm's archive into a folder.

    Raises:
        ValueError: if the archive is not the one that is pinned; nothing is written.
    """
    found = f"sha512-{base64.b64encode(hashlib.sha512(archive).digest()).decode()}"
    if found != INTEGRITY:
        raise ValueError(f"pyodide {VERSION}: expected {INTEGRITY}, got {found}")
    folder.mkdir(parents=True, exist_ok=True)
    with tarfile.open(fileobj=io.BytesIO(archive)) as files:
        for name in FILES:
            content = files.extractfile(f"package/{name}")
            assert content is not None  # the hash says what is inside
            (folder / name).write_bytes(content.read())
    (folder / "VERSION").write_text(VERSION)


def main() -> int:
    """Fetch what is missing, and return the exit status."""
    if is_here():
        return 0
    npm = shutil.which("npm")
    with tempfile.TemporaryDirectory() as folder:
        patience = ["--fetch-retries=1", "--fetch-timeout=60000"]
        command = [npm or "npm", "pack", "--silent", *patience, "--pack-destination", folder, f"pyodide@{VERSION}"]
        why = "there is no npm"
        if npm:
            subprocess.run(command, capture_output=True, check=False)
            why = f"npm cannot fetch pyodide {VERSION}"
        archives = list(Path(folder).glob("*.tgz"))
        if not archives:
            sys.stdout.write(f"Exercises will not run in the pages of the site: {why}\n")
            return 0
        try:
            unpack(archives[0].read_bytes(), FOLDER)
        except ValueError as error:
            sys.stderr.write(f"{error}\n")
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
