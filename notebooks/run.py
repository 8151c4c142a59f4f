"""Run every notebook from top to bottom, and compare what its cells print with what is stored in it.

    python notebooks/run.py              all of them
    python notebooks/run.py 03 --inplace stores what 03 prints

Answers to exercises are code in Markdown cells; they run where they stand. A cell tagged `varies` prints times or
memory, which are not compared; the one tagged `install` is for Colab, and is not counted. They run in an empty folder,
as there, where no file of the repository is.
"""

import argparse
import os
import re
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import nbformat
from jupyter_client.manager import start_new_kernel
from nbclient import NotebookClient

FOLDER = Path(__file__).parent
EMPTY = tempfile.TemporaryDirectory()  # removed with this process
ANSWER = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
LIMIT = 60  # seconds a notebook may take
AS_NEW = """
import matplotlib.pyplot
import torch
matplotlib.pyplot.close("all")
matplotlib.pyplot.rcdefaults()
torch.manual_seed(torch.Generator().initial_seed())
torch.set_default_dtype(torch.float32)
get_ipython().reset()
"""


def main() -> None:
    """Run what the command line asks for; the exit status says whether all of it printed what it stores."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("numbers", nargs="*", metavar="NUMBER", help="the first digits of a file's name; all if none")
    parser.add_argument("--inplace", action="store_true", help="store what the cells print")
    arguments = parser.parse_args()
    for number in arguments.numbers:
        if not notebooks([number]):
            parser.error(f"NUMBER: expected the first digits of a notebook's name, got {number!r}")
    wrong = 0
    for path in notebooks(arguments.numbers):
        executed, seconds = execute(path)
        differences = compare(nbformat.read(path, as_version=4), executed)
        if arguments.inplace:
            nbformat.write(executed, path)
        wrong += seconds > LIMIT or (bool(differences) and not arguments.inplace)
        print(f"{path.name:32} {seconds:5.1f} s   {'; '.join(differences) or 'prints what it stores'}")
    sys.exit(wrong > 0)


def notebooks(numbers: list[str] | None = None) -> list[Path]:
    """Return the notebooks in reading order: all, or those whose names begin with a number of `numbers`."""
    return [path for path in sorted(FOLDER.glob("*.ipynb")) if not numbers or path.name.startswith(tuple(numbers))]


def start_kernel() -> Any:
    """Start a process that runs notebooks one after the other, and imports torch once; who starts it shuts it down."""
    kernel, client = start_new_kernel(kernel_name="python3", cwd=EMPTY.name, env={"OMP_NUM_THREADS": "1"} | os.environ)
    client.stop_channels()
    return kernel


def execute(path: Path, kernel: Any = None) -> tuple[Any, float]:
    """Run a notebook, answers included, in a process of its own or in that of `start_kernel`.

    There it begins without names and pictures, with the settings and the random numbers of a new process; modules stay.

    Returns:
        The notebook with the outputs of its own cells, and the seconds that it took, on one core unless OMP_NUM_THREADS
        says otherwise: by the clock, or those in which the core was busy with it if they are less, so that what else
        the machine does is not counted.

    Raises:
        nbclient.exceptions.CellExecutionError: if a cell or an answer fails.
    """
    notebook = nbformat.read(path, as_version=4)
    own = notebook.cells
    notebook.cells = [cell for each in own for cell in (each, *_answers(each))]
    if kernel is not None:
        notebook.cells.insert(0, nbformat.v4.new_code_cell(AS_NEW))
    client = NotebookClient(
        notebook,
        km=kernel,
        kernel_name="python3",
        timeout=2 * LIMIT,
        record_timing=False,
        coalesce_streams=True,
        resources={"metadata": {"path": EMPTY.name}},
    )
    start, busy = time.perf_counter(), os.times()
    client.execute(env={"OMP_NUM_THREADS": "1"} | os.environ)
    seconds, after = time.perf_counter() - start, os.times()
    busy_seconds = after.children_user + after.children_system - busy.children_user - busy.children_system
    notebook.cells = own
    for cell in own:
        if "install" in cell.metadata.get("tags", ()):
            cell.execution_count = None
    for number, cell in enumerate((cell for cell in own if _is_counted(cell)), 1):
        cell.execution_count = number
        for output in cell.outputs:
            if "execution_count" in output:
                output.execution_count = number
    notebook.metadata = {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
    }
    return notebook, seconds if kernel is not None else min(seconds, busy_seconds)


def compare(stored: Any, executed: Any) -> list[str]:
    """Return which cells print or draw something else than they did."""
    return [
        f"cell {cell.execution_count} shows something else than it stores"
        for before, cell in zip(stored.cells, executed.cells, strict=True)
        if cell.cell_type == "code" and "varies" not in cell.metadata.get("tags", ()) and _texts(before) != _texts(cell)
    ]


def _is_counted(cell: Any) -> bool:
    return cell.cell_type == "code" and "install" not in cell.metadata.get("tags", ())


def _answers(cell: Any) -> list[Any]:
    if cell.cell_type != "markdown":
        return []
    return [nbformat.v4.new_code_cell(code) for code in ANSWER.findall(cell.source)]


def _texts(cell: Any) -> list[str]:
    """Return what a cell prints and shows as text; a drawing says as text what it shows as a picture."""
    return [output.get("text") or output.get("data", {}).get("text/plain", "") for output in cell.outputs]


if __name__ == "__main__":
    main()
