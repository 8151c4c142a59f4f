"""`twinattn bench --beside FOLDER`: `fastattn` of other checkouts and of this one in turns: what a change gains.

A process has one package of a name, so each checkout has a process of its own, which holds the inputs of a row and its
call. This one tells them, one after the other and in a random order, to take a few samples: whatever else a machine
does, and the clock that it has reached, is the same for all.
"""

import itertools
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from refattn.checks import check_folder
from twinattn.bench import choose, device_of, draw_inputs, failures_in, in_rows, measure, report
from twinattn.bench.row import Row
from twinattn.bench.rows import rows

HERE = Path(__file__).resolve().parents[2]
ROUNDS = 9  # turns of each checkout
MILLISECONDS = 20  # a turn takes on a GPU
SECONDS, WARM_UP = 0.05, 0.1  # a turn takes on a CPU, or three calls, and how long it runs before: threads of a process
# that waited may share a core at first


def run(
    device: str, only: Sequence[str], folders: Sequence[Path], *, out: Path | None, quick: bool, console: Console
) -> list[dict[str, Any]]:
    """Time the twin of this checkout and of others in turns, over rows of the benchmark; print and return the times.

    Args:
        device: "cpu" or a CUDA device.
        only: the rows whose name, `path/workload`, contains one of these; all if there are none.
        folders: the other checkouts.
        out: a folder for `beside.json`, whose entries have the form of those in `docs/results/tried`; None writes none.
        quick: an eighth of every length: the numbers mean nothing, the answers are still checked.
        console: where to print.

    Returns:
        For each row its path and workload, and `designs`: of each checkout the `median`, `low` and `high` seconds of a
        call, or an `error`, if its answer is not within the tolerance, for example.

    Raises:
        ValueError: if a folder has no `fastattn`, `out` is a file, or there is no such row or device.
    """
    check_folder("out", out)
    place = device_of(device)
    places = [HERE, *(folder.resolve() for folder in folders)]
    for folder in places[1:]:
        if not (folder / "twinattn" / "bench" / "beside.py").is_file():
            raise ValueError(f"beside: expected a checkout whose twinattn has bench --beside, too, got {folder}")
    chosen = choose(rows(place.type, quick=quick), only)
    head = measure.circumstances()
    head["versions"] = {name: version for name, version in head["versions"].items() if version}
    head["machine"] = measure.machine(place)
    records = []
    with _started(places, device, quick) as checkouts:
        for name in map(str, chosen):
            records.append(_row(name, checkouts))
            _print(console, name, records[-1]["designs"])
            if out is not None:
                out.mkdir(parents=True, exist_ok=True)
                text = json.dumps({"runs": [head | record for record in records]}, indent=1, ensure_ascii=False)
                (out / "beside.json").write_text(text + "\n")
    return records


def _row(name: str, checkouts: "Sequence[Checkout]") -> dict[str, Any]:
    """Have all checkouts prepare a row, then time those whose answer is right in turns."""
    path, _, workload = name.partition("/")
    for checkout in checkouts:
        checkout.tell(prepare=name)
    found = [(checkout, checkout.answer()) for checkout in checkouts]
    able = [(checkout, said) for checkout, said in found if "error" not in said]
    for _ in range(ROUNDS):
        for checkout, said in random.sample(able, len(able)):
            checkout.tell(time=name)
            turn = checkout.answer()
            said["seconds"] = said.get("seconds", []) + turn.pop("seconds", [])
            said.update(turn)
    designs = [
        {"design": str(checkout)}
        | ({"error": said["error"]} if "error" in said else measure.summarize(said["seconds"])._asdict())
        for checkout, said in found
    ]
    return {"path": path, "workload": workload, "designs": designs}


def _print(console: Console, name: str, designs: Sequence[dict[str, Any]]) -> None:
    """Print the times of a row: this checkout first, and of how much of its time the others take."""
    table = Table(box=None, pad_edge=False)
    table.add_column(name, min_width=48, no_wrap=True)
    for column in ("time", "spread", "of this one's"):
        table.add_column(column, justify="right", min_width=8, no_wrap=True)
    table.add_column("", overflow="fold", style="red")
    for entry in designs:
        if "error" in entry:
            table.add_row(entry["design"], "-", "", "", entry["error"])
            continue
        spread = f"{(entry['high'] - entry['low']) / entry['median']:.0%}"
        ratio = f"{entry['median'] / designs[0]['median']:.3f}" if "median" in designs[0] else ""
        table.add_row(entry["design"], report.duration(entry["median"]), spread, ratio, "")
    console.print(table)
    console.print()


class Checkout:
    """A process with the packages of one checkout.

    Args:
        folder: the checkout.
        device: where it computes.
        quick: an eighth of every length.
    """

    def __init__(self, folder: Path, device: str, quick: bool) -> None:
        self.folder = folder
        inherited = os.environ.get("PYTHONPATH")
        path = os.pathsep.join([str(folder), *([inherited] if inherited else [])])
        command = [sys.executable, "-P", "-m", "twinattn.bench.beside", str(folder), device, "quick" if quick else ""]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(
            command, stdin=pipe, stdout=pipe, text=True, env={**os.environ, "PYTHONPATH": path}
        )

        self.commit = self.answer().get("commit")  # what it says first, if it can be imported

    def __str__(self) -> str:
        """Name the folder, and its commit if it is a clone."""
        name = "this checkout" if self.folder == HERE else str(self.folder)
        return f"{name}, {self.commit}" if self.commit else name

    def tell(self, **order: str) -> None:
        """Send an order; one that has ended reads none."""
        with suppress(BrokenPipeError):
            print(json.dumps(order), file=self.process.stdin, flush=True)

    def answer(self) -> dict[str, Any]:
        """Wait for the answer to an order."""
        line = self.process.stdout.readline() if self.process.stdout else ""
        said: dict[str, Any] = json.loads(line) if line else {"error": "its process has ended"}
        return said


@contextmanager
def _started(folders: Sequence[Path], device: str, quick: bool) -> Iterator[list[Checkout]]:
    """Start a process per checkout, and end them all."""
    checkouts = [Checkout(folder, device, quick) for folder in folders]
    try:
        yield checkouts
    finally:
        for checkout in checkouts:
            checkout.process.kill()
            checkout.process.communicate()


# --- in the process of a checkout ---


def work(folder: str, device: str, quick: str) -> None:
    """Print the commit, then read orders from standard input, one JSON object a line, and print an answer to each.

    {"prepare": row}    make the inputs and the call of the twin, and judge its answer
    {"time": row}       take some samples: {"seconds": [..]}
    """
    import fastattn

    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what packages print does not come between
    if Path(folder) not in Path(fastattn.__file__).resolve().parents:
        raise RuntimeError(f"expected the package of {folder}, got {fastattn.__file__}")
    place = torch.device(device)
    if place.type == "cpu":
        torch.set_num_threads(measure.all_cores())
    known = {str(row): row for row in rows(place.type, quick=bool(quick))}
    print(json.dumps({"commit": measure.circumstances()["commit"]}), file=out, flush=True)
    calls: list[measure.Call] = []
    for line in sys.stdin:
        order = json.loads(line)
        said: dict[str, Any] = {}
        with failures_in(said), torch.no_grad():
            if "prepare" in order:
                calls = []  # before the inputs of the next row are made
                calls = _prepare(known[order["prepare"]], place)
            else:
                said["seconds"] = _samples(calls, place, known[order["time"]].clock)
        print(json.dumps(said), file=out, flush=True)


def _prepare(row: Row, device: torch.device) -> list[measure.Call]:
    """Return the calls of the twin over each set of inputs; the answer of the first is judged, as by the benchmark."""
    twin = row.contenders[0]
    inputs = draw_inputs(row, device, torch.float32 if device.type == "cpu" else torch.bfloat16)
    calls = [twin.prepare(one) for one in inputs]
    accept = (twin.judge or row.work.judge)(inputs[0])
    accept(in_rows(twin, calls[0]()))
    if twin.lse:
        out, lse = calls[0](return_lse=True)
        accept(in_rows(twin, out), lse)
    accept(in_rows(twin, calls[0]()))  # a later call replays the first
    return calls


def _samples(calls: Sequence[measure.Call], device: torch.device, clock: str) -> list[float]:
    """Take the samples of one turn, after some calls that are not timed: a process that has waited is slow at first."""
    if device.type == "cuda":
        return measure.on_gpu(calls, clock=clock, milliseconds=MILLISECONDS)
    end = time.perf_counter() + WARM_UP
    for call in itertools.cycle(calls):
        call()
        if time.perf_counter() > end:
            break
    return [measure.take_turns({"twin": calls}, seconds=SECONDS)["twin"].median]


if __name__ == "__main__":
    work(*sys.argv[1:])
