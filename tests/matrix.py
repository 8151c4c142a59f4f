"""The tests as on processors, Pythons and numbers of threads that this machine need not have: `make matrix`.

The last bits of a product depend on the instructions of the processor. NumPy's BLAS, which Triton's interpreter
multiplies with, takes those of the processor that OPENBLAS_CORETYPE names. PyTorch's own loops take those that
ATEN_CPU_CAPABILITY names, and oneDNN, which multiplies halves for it, those of ONEDNN_MAX_CPU_ISA, set to go with them.

Nine cells have every pair of values of these four, so that whatever fails by two of them together fails in some cell:

                     ATen: default             avx2                    avx512
    BLAS: Haswell          1 thread,  3.11     2 threads, 3.13         8 threads, 3.12
          Zen              2 threads, 3.12     8 threads, 3.11         1 thread,  3.13
          SkylakeX         8 threads, 3.13     1 thread,  3.12         2 threads, 3.11

Where there are fewer Pythons, those that there are take all places; a fourth one gets a cell of its own. With one
thread, as `make test` has, all tests run; the other cells leave out the files of `UNAFFECTED`, whose answers no
processor changes. Results are written after each cell, so that `--cells 3,4` can run these two again. A file keeps the
results of one processor and one set of Pythons: `--output` names another one for others.
"""

import argparse
import dataclasses
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent
BLAS = ("Haswell", "Zen", "SkylakeX")
ATEN = {"default": {"ONEDNN_MAX_CPU_ISA": "SSE41"}, "avx2": {"ONEDNN_MAX_CPU_ISA": "AVX2"}, "avx512": {}}
THREADS = (1, 2, 8)
UNAFFECTED = {  # files, and why no processor changes what they find
    "tests/kernels/test_compile.py": "compiles for GPUs",
    "tests/tools/test_drawing.py": "draws",
    "tests/tools/test_matrix.py": "runs nothing",
    "tests/tools/test_time_limit.py": "lets tests hang",
    "tests/tools/test_twins.py": "reads signatures",
}
PROBE = """
import ctypes, json, platform
from pathlib import Path
import numpy, torch

def blas():
    for file in (Path(numpy.__file__).parent.parent / "numpy.libs").glob("*openblas*"):
        name = ctypes.CDLL(str(file)).scipy_openblas_get_corename64_
        name.restype = ctypes.c_char_p
        return name().decode()

print(json.dumps({
    "python": platform.python_version(),
    "blas": blas(),
    "aten": torch.backends.cpu.get_cpu_capability(),
    "threads": torch.get_num_threads(),
}))
"""


@dataclasses.dataclass(frozen=True)
class Cell:
    """One run of the tests: as on which processor, in how many threads, and by which Python."""

    blas: str
    aten: str
    threads: int
    python: Path

    @property
    def asked(self) -> dict[str, str | int]:
        """What the libraries are to take."""
        return {"blas": self.blas, "aten": self.aten, "threads": self.threads}

    @property
    def environment(self) -> dict[str, str]:
        """The variables that make it so. There may be more threads than cores, so those that wait sleep."""
        return {
            "OPENBLAS_CORETYPE": self.blas,
            "ATEN_CPU_CAPABILITY": self.aten,
            **ATEN[self.aten],
            "OMP_NUM_THREADS": str(self.threads),
            "MKL_DYNAMIC": "FALSE",  # or PyTorch would take no more threads than there are cores
            "OMP_WAIT_POLICY": "passive",
        }


def covering(pythons: list[Path]) -> list[Cell]:
    """Choose the cells: an orthogonal array of nine for three Pythons, and one more for each other Python."""
    cells = [
        Cell(BLAS[i], list(ATEN)[j], THREADS[(i + j) % 3], pythons[(i + 2 * j) % 3 % len(pythons)])
        for i in range(3)
        for j in range(3)
    ]
    return cells + [Cell(BLAS[0], "avx2", 1, python) for python in pythons[3:]]


def find_pythons() -> list[Path]:
    """Find the Python that runs this, and those of `.venv-3.12` and the like beside it, one of each version."""
    others = (folder / "bin/python" for folder in sorted(ROOT.glob(".venv-3.*"), key=lambda folder: folder.suffix))
    found: dict[str, Path] = {}
    for python in (Path(sys.executable), *(python for python in others if python.exists())):
        found.setdefault(version(python), python)
    return list(found.values())


def version(python: Path) -> str:
    """Return the version of a Python, as "3.12"."""
    command = [python, "-c", "import sys; print('%d.%d' % sys.version_info[:2])"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def run(cell: Cell, jobs: int, arguments: list[str]) -> dict:
    """Run the tests of a cell, and return what came of them; their output goes to the terminal."""
    environment = {name: value for name, value in os.environ.items() if name != "ONEDNN_MAX_CPU_ISA"} | cell.environment
    probe = subprocess.run([cell.python, "-c", PROBE], env=environment, capture_output=True, text=True, check=True)
    left_out = [] if cell.threads == 1 else [file for file in UNAFFECTED if file not in arguments]
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder) / "results.json"
        command = [cell.python, "-m", "pytest", "-n", str(jobs), "--dist", "worksteal", "--results", results, "-q"]
        limits = ["--timeout=600", "-o", "faulthandler_timeout=900"]  # more threads than cores take longer
        start = time.perf_counter()
        status = subprocess.run(
            [*command, *limits, *(f"--ignore={file}" for file in left_out), *arguments],
            cwd=ROOT,
            env=environment,
            check=False,
        ).returncode
        seconds = time.perf_counter() - start
        found = json.loads(results.read_text()) if results.exists() else {}
    return {
        "asked": cell.asked,
        "found": json.loads(probe.stdout),
        "arguments": arguments,
        "left_out": left_out,
        "date": found.get("date"),
        "commit": found.get("commit"),
        "versions": found.get("versions"),
        "counts": found.get("all"),
        "not_passed": found.get("not_passed"),
        "exit_status": status,
        "seconds": round(seconds),
    }


def is_of(cell: Cell, result: dict) -> bool:
    """Return whether a result is one of this cell, from an earlier run."""
    return result["asked"] == cell.asked and result["found"]["python"].startswith(version(cell.python) + ".")


def machine() -> dict:
    """Describe this machine."""
    info = Path("/proc/cpuinfo")
    names = re.findall(r"^model name\s*: (.*)$", info.read_text(), re.MULTILINE) if info.exists() else []
    return {"name": names[0] if names else "unknown", "cores": os.cpu_count()}


def main() -> None:
    """Run the cells that the command line asks for; the exit status says whether all of their tests passed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cells", help="numbers of cells, as 3,4; all if none")
    parser.add_argument("--jobs", type=int, default=2, help="processes that the tests of a cell run in")
    parser.add_argument("--list", action="store_true", help="print the cells, and run none")
    parser.add_argument("--output", type=Path, help="the file of the results; one of docs/results/tests if none")
    options, arguments = parser.parse_known_args()  # the rest is pytest's: files, -k
    pythons = find_pythons()
    cells = covering(pythons)
    numbers = options.cells.split(",") if options.cells is not None else []
    unknown = [number for number in numbers if number not in map(str, range(len(cells)))]
    if unknown:
        parser.error(f"--cells: expected numbers from 0 to {len(cells) - 1}, as 3,4, got {unknown[0]!r}")
    if options.jobs < 1:
        parser.error(f"--jobs: expected at least 1, got {options.jobs}")
    if options.output and (options.output.is_dir() or not options.output.parent.is_dir()):
        parser.error(f"--output: expected a file in a folder that is there, got {str(options.output)!r}")
    slug = re.sub(r"[^a-z0-9]+", "-", machine()["name"].lower()).strip("-")
    file = options.output or ROOT / f"docs/results/tests/matrix-{slug}.json"
    written = json.loads(file.read_text())["cells"] if file.exists() else {}
    chosen = {i: cell for i, cell in enumerate(cells) if not numbers or str(i) in numbers}
    others = [i for i, cell in chosen.items() if str(i) in written and not is_of(cell, written[str(i)])]
    if others and not options.list:
        parser.error(f"{file} has results of other Pythons for cells {others}: name another file with --output")
    failed = False
    for number, cell in chosen.items():
        head = f"cell {number}: {cell.blas}, {cell.aten}, threads: {cell.threads}, Python {version(cell.python)}"
        sys.stdout.write(head + "\n")
        sys.stdout.flush()
        if options.list:
            continue
        result = run(cell, options.jobs, arguments)
        failed |= result["exit_status"] != 0
        written[str(number)] = result
        about = {
            "what": "The tests in environments that cover every pair of values of BLAS, ATen, threads and Python. "
            "Cells with one thread run all tests; the others leave out the files of `left_out`. `found` is what NumPy "
            "and PyTorch said that they take.",
            "unaffected": UNAFFECTED,
            "machine": machine(),
            "cells": dict(sorted(written.items(), key=lambda pair: int(pair[0]))),
        }
        file.write_text(json.dumps(about, indent=1) + "\n")
        sys.stdout.write(f"{head}: {result['counts']} in {result['seconds']} s\n")
    sys.exit(failed)


if __name__ == "__main__":
    main()
