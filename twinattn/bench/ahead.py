"""`twinattn bench --jobs N`: rows of a GPU that are prepared at once, each in a process, and timed one after the other.

To prepare a row, some packages compile for minutes, on a CPU. So N processes prepare a row each, up to the judgement of
all answers, and wait. Only when all of them wait, or have ended, is the first one told to go on: nothing else runs on
the GPU while a row is timed.

    row 1    compile, judge                    | time |
    row 2    compile, judge | wait                    | time |
    row 3    compile, judge    | wait                        | time |
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from twinattn.bench import Bench, listed_rows
from twinattn.bench.measure import Call, Ceilings, Timing
from twinattn.bench.row import Row


def measured(bench: Bench, rows: Sequence[Row], jobs: int, trace: Path | None = None) -> Iterator[dict[str, Any]]:
    """Measure rows, some prepared at once.

    Args:
        bench: what each process measures as: its device, its ceilings, whether it is quick.
        rows: what to measure.
        jobs: how many are prepared at once. All of their inputs are in the GPU's memory together.
        trace: the file of FlashInfer-Bench that the rows are of, if they are not those of the benchmark.

    Yields:
        The record of each row, in order, as `Bench.measure` makes it; of one whose process ends without it, the error.
    """
    job = dict(
        device=str(bench.device),
        dtype=str(bench.dtype).removeprefix("torch."),
        quick=bench.quick,
        ceilings=bench.ceilings._asdict(),
        trace=None if trace is None else str(trace),
    )
    command = [sys.executable, "-m", "twinattn.bench.ahead", json.dumps(job)]

    def start(row: Row) -> "subprocess.Popen[str]":
        pipe = subprocess.PIPE
        return subprocess.Popen([*command, str(row)], stdin=pipe, stdout=pipe, text=True)

    for first in range(0, len(rows), jobs):
        some = rows[first : first + jobs]
        for row, (record, status) in zip(some, in_turns([start(row) for row in some]), strict=True):
            error = f"its process ended with exit code {status}; its last words are above"
            yield bench.record_of(row) | {"error": error} if record is None else record


def in_turns(processes: "Sequence[subprocess.Popen[str]]") -> Iterator[tuple[dict[str, Any] | None, int]]:
    """Wait until the processes of some rows have prepared theirs, and let one after the other go on.

    Args:
        processes: what they say and wait for, see `work`.

    Yields:
        The record of each, or None, and the exit code.
    """
    try:
        said = [_said(process) for process in processes]
        for process, record in zip(processes, said, strict=True):
            if record is not None and "ready" in record:
                with suppress(BrokenPipeError):  # it has ended, and says nothing more
                    print("go", file=process.stdin, flush=True)
                record = _said(process)
            yield record, process.wait()  # its memory is given back before the next row is timed
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def _said(process: "subprocess.Popen[str]") -> dict[str, Any] | None:
    """Read the next record that a process prints; None if the process has ended."""
    line = process.stdout.readline() if process.stdout else ""
    found: dict[str, Any] | None = json.loads(line) if line else None
    return found


# --- in the process of a row ---


class Waiting(Bench):
    """Measures a row, and asks before it is timed."""

    def __init__(self, *arguments: Any, ask: Callable[[], object], **more: Any) -> None:
        super().__init__(*arguments, **more)
        self._ask = ask

    def _time(self, row: Row, record: dict[str, Any], calls: dict[str, Sequence[Call]]) -> dict[str, Timing]:
        self._ask()
        return super()._time(row, record, calls)


def work(job: str, name: str) -> None:
    """Prepare a row, print `{"ready": true}`, wait for a line, time the row, and print its record.

    A row that cannot be timed is not waited for: its record comes at once.
    """
    given = json.loads(job)
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what packages print does not come between

    def ask() -> None:
        print(json.dumps({"ready": True}), file=out, flush=True)
        if not sys.stdin.readline():
            raise SystemExit(1)  # the process that asked for the row is gone

    device = torch.device(given["device"])
    (row,) = [row for row in listed_rows(device.type, given["quick"], given["trace"]) if str(row) == name]
    if device.type == "cuda":
        torch.cuda.set_device(device)
    with torch.no_grad():
        bench = Waiting(
            *(device, getattr(torch, given["dtype"]), given["quick"]),
            tell=lambda line: sys.stderr.write(f"{line}\n"),
            ceilings=Ceilings(**given["ceilings"]),
            ask=ask,
        )
        record = bench.measure(row)
    print(json.dumps(record), file=out, flush=True)


if __name__ == "__main__":
    work(*sys.argv[1:])
