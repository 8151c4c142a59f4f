"""What Nsight Compute says of a rung of a ladder: the bytes that its kernels read from memory, and shares of the peaks.

`ncu` is a command of NVIDIA. It starts a Python of its own, which runs this file: the call of a rung once to compile,
and once more between `cudaProfilerStart` and `cudaProfilerStop`. `ncu` empties the caches before each kernel and fixes
the clock of the GPU, so a duration that it reports is none of the ladder's.

Source: NVIDIA, Nsight Compute CLI, "Command Line Options" and "Metrics".
"""

import csv
import shutil
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from twinattn.course.batches import BATCHES
from twinattn.course.ladder import call_of, line_of, rungs

BYTES, SECONDS = "dram__bytes_read.sum", "gpu__time_duration.sum"
MEMORY, SM = (f"{unit}__throughput.avg.pct_of_peak_sustained_elapsed" for unit in ("dram", "sm"))
NO_NCU = "no ncu here: Nsight Compute, which comes with the CUDA toolkit, would add what each rung reads"
LONGEST = 300  # seconds for a rung


class Profiled(NamedTuple):
    """What one call of a rung did, in all of its kernels."""

    bytes_read: int  # from the memory of the GPU; what the L2 cache has is not among them
    memory: float  # share of the peak rate of memory, in its kernels by their time
    sm: float  # share of the peak of the busiest part of the SMs


class NotProfiledError(RuntimeError):
    """`ncu` is there, and has no counters of the kernels."""


def is_there() -> bool:
    """Return whether `ncu` is installed."""
    return shutil.which("ncu") is not None


def add_to(measured: dict[str, Any], tell: Callable[[str], None]) -> None:
    """Add what `ncu` says of each rung of Triton, where it is installed, on the first batch that the rung was timed on.

    Args:
        measured: the results of `measure`; a rung that was profiled gets another entry, `profile`.
        tell: called with a line of text for each rung.
    """
    if not is_there():
        tell(f"\n{NO_NCU}.")
        return
    tell(f"\nBy ncu, caches empty:\n{line_of('', ('read', 'of the least', 'memory', 'SM'))}")
    for rung in rungs(measured["ladder"]):
        timed = ((each, row) for each in measured["batches"] for row in each["rungs"] if row["name"] == rung.name)
        batch, row = next(((each, row) for each, row in timed if "median" in row), (None, None))
        if batch is None or row is None or row["clock"] == "events":
            continue
        try:
            found = profile(measured["ladder"], rung.number, batch["name"])
        except NotProfiledError as error:
            tell(f"no more of it: {error}")
            return
        row["profile"] = found._asdict()
        least = BATCHES[measured["ladder"]][batch["name"]].reads()
        shares = (f"{share:.0%}" for share in (found.bytes_read / least, found.memory, found.sm))
        tell(line_of(f"{rung.number:2} {rung.title}", [f"{found.bytes_read / 1e6:.0f} MB", *shares]))


def profile(ladder: str, number: int, batch: str) -> Profiled:
    """Profile a rung on a batch of its ladder.

    Args:
        ladder: its name.
        number: that of the rung.
        batch: the name of the batch.

    Raises:
        NotProfiledError: if `ncu` may not read the counters of this GPU, or the call fails.
    """
    command = ["ncu", "--csv", "--print-units", "base", "--profile-from-start", "off"]
    command += ["--metrics", ",".join((BYTES, SECONDS, MEMORY, SM))]
    command += [sys.executable, "-m", "twinattn.course.profiled", ladder, str(number), batch]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=LONGEST)
    except subprocess.TimeoutExpired:
        raise NotProfiledError(f"ncu took more than {LONGEST} seconds") from None
    if done.returncode:
        lines = (done.stdout + done.stderr).strip().splitlines() or ["it said nothing"]
        raise NotProfiledError(next((line for line in lines if line.startswith("==ERROR==")), lines[-1]))
    return parse(done.stdout)


def parse(text: str) -> Profiled:
    """Read what `ncu --csv` prints: a line per kernel and metric, below lines of its own and of the program.

    Raises:
        NotProfiledError: if there is no kernel, or one lacks a metric.
    """
    _, found, table = text.partition('"ID",')
    kernels: dict[str, dict[str, float]] = defaultdict(dict)
    for row in csv.DictReader((found + table).splitlines()):
        try:
            kernels[row["ID"]][row["Metric Name"]] = float(row["Metric Value"].replace(",", ""))
        except (KeyError, ValueError, AttributeError):
            continue  # a line that is none of the table, or "n/a"
    if not kernels:
        raise NotProfiledError("ncu saw no kernel")
    for metric in (BYTES, SECONDS, MEMORY, SM):
        if any(metric not in of_kernel for of_kernel in kernels.values()):
            raise NotProfiledError(f"ncu has no {metric} here")
    seconds = sum(of_kernel[SECONDS] for of_kernel in kernels.values())

    def share(metric: str) -> float:
        return sum(x[metric] * x[SECONDS] for x in kernels.values()) / seconds / 100

    return Profiled(int(sum(of_kernel[BYTES] for of_kernel in kernels.values())), share(MEMORY), share(SM))


def call_twice(ladder: str, number: int, name: str) -> None:
    """Call a rung twice on a batch of its ladder; the second call is for the profiler."""
    batch = BATCHES[ladder][name]
    torch.manual_seed(0)
    with torch.no_grad():
        call = call_of(rungs(ladder)[number], batch, batch.make_inputs(torch.device("cuda")))
        call()
        torch.cuda.synchronize()
        torch.cuda.profiler.start()
        call()
        torch.cuda.synchronize()
        torch.cuda.profiler.stop()


if __name__ == "__main__":
    call_twice(sys.argv[1], int(sys.argv[2]), sys.argv[3])
