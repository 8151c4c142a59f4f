"""`twinattn bench`: measure every path against its peers in one run, and report no speed for a wrong answer."""

import gc
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from einops import rearrange
from rich.console import Console

from refattn.checks import check_device, check_folder, check_sizes
from twinattn.bench import clocks, measure, report
from twinattn.bench.contender import Contender
from twinattn.bench.measure import Call, Ceilings, Timing
from twinattn.bench.row import Row
from twinattn.bench.rows import rows
from twinattn.bench.traced import rows_of_trace
from twinattn.bench.work import Judge
from twinattn.engine.peak_memory import PeakMemory

SECONDS = 1.0  # seconds that a contender is measured on a CPU
MILLISECONDS = 20  # and on a GPU, in each round
MOST_HELD = 2**31  # bytes of inputs that are laid out at once in memory of the host
ROUNDS = 3  # or the first contender would be up to 12 % faster: a card that has rested may draw more power for a while


def run(
    device: str = "cpu",
    only: Sequence[str] = (),
    *,
    trace: Path | None = None,
    out: Path | None = None,
    quick: bool = False,
    jobs: int = 1,
    console: Console | None = None,
) -> list[dict[str, Any]]:
    """Measure, print, and write the results.

    Args:
        device: "cpu" or a CUDA device.
        only: measure the rows whose name, `path/workload`, contains one of these; all if there are none.
        trace: a file of FlashInfer-Bench, whose workloads are measured in the place of the rows.
        out: folder for the JSON, the CSV and the picture of this machine; None writes nothing. Rows that are measured
            replace those of earlier runs, others stay.
        quick: an eighth of every length and few samples: the numbers mean nothing, the answers are still checked.
        jobs: on a GPU, rows that are prepared at once, each in a process; they are timed one after the other.
        console: where to print; standard output if None.

    Returns:
        One record per row, as in the JSON.

    Raises:
        ValueError: naming the argument: if there is no such device or row, the folder is a file, or what a trace lacks.
    """
    start = time.perf_counter()
    console = console or wide_console()
    check_folder("out", out)
    place = device_of(device)
    check_sizes(jobs=jobs)
    if jobs > 1 and place.type == "cpu":
        raise ValueError(f"jobs: expected 1 on a CPU, all of whose cores are timed, got {jobs}")
    chosen = choose(listed_rows(place.type, quick, trace), only)
    dtype = torch.float32
    if place.type == "cpu":
        torch.set_num_threads(measure.all_cores())
    else:
        place = torch.device("cuda", place.index or 0)
        torch.cuda.set_device(place)
        dtype = torch.bfloat16

    with torch.no_grad():
        bench = Bench(place, dtype, quick, tell=lambda line: console.print(line, style="dim"))
        head = bench.head()
        report.print_head(console, head)
        records = []
        for record in _measured(bench, chosen, jobs, trace):
            records.append(record)
            report.print_row(console, records[-1])
            if out is not None:
                report.write(out, head, records)
    report.print_summary(console, records, time.perf_counter() - start)
    if out is not None:
        console.print(f"Written to {report.write(out, head, records, picture=True)}")
    return records


def _measured(bench: "Bench", chosen: Sequence[Row], jobs: int, trace: Path | None) -> Iterator[dict[str, Any]]:
    if jobs == 1:
        return map(bench.measure, chosen)
    from twinattn.bench import ahead  # here, as that module imports this one

    return ahead.measured(bench, chosen, jobs, trace)


def listed_rows(device_type: str, quick: bool, trace: str | Path | None = None) -> list[Row]:
    """List the rows of a kind of device; those of a file of FlashInfer-Bench if there is one."""
    return [*(rows_of_trace(Path(trace), device_type) if trace else rows(device_type, quick=quick))]


def device_of(device: str) -> torch.device:
    """Return the device of a name, or raise a ValueError if the benchmark has none for it."""
    wanted = f"device: expected cpu, or cuda where torch finds a GPU, got {device!r}"
    try:
        check_device(device)
    except ValueError:
        raise ValueError(wanted) from None
    place = torch.device(device)
    if place.type not in ("cpu", "cuda") or (place.type == "cuda" and not torch.cuda.is_available()):
        raise ValueError(wanted)
    return place


def choose(listed: Sequence[Row], only: Sequence[str]) -> list[Row]:
    """Return the rows whose name contains one of some parts, all if there are none, or raise a ValueError."""
    chosen = [row for row in listed if not only or any(part in str(row) for part in only)]
    if not chosen:
        names = "\n  ".join(map(str, listed))
        raise ValueError(f"rows: expected part of the name of a row, got {' '.join(only)!r}; there are\n  {names}")
    return chosen


def draw_inputs(row: Row, device: torch.device, dtype: torch.dtype) -> list[Any]:
    """Draw the inputs of a row, as many sets as together do not fit into the cache."""
    sets = 1 if row.clock != "graph" and device.type == "cuda" else None
    moved = row.work.reads(dtype.itemsize) + row.work.writes(dtype.itemsize)
    sets = sets or measure.input_sets(device, moved)
    inputs = [row.work.draw(device, dtype, 0)]
    if device.type == "cpu":  # pools that a window shows little of: a processor may have a cache of 300 MiB
        parts = inputs[0] if isinstance(inputs[0], tuple) else vars(inputs[0]).values()
        held = sum(x.nbytes for x in parts if isinstance(x, torch.Tensor))
        sets = min(sets, max(1, MOST_HELD // max(1, held)))
    return inputs + [row.work.draw(device, dtype, seed) for seed in range(1, sets)]


def wide_console() -> Console:
    """Return standard output, wide enough for a table where it is no terminal."""
    return Console(width=None if Console().is_terminal else 132)


class Bench:
    """Measures rows on one device."""

    def __init__(
        self,
        device: torch.device,
        dtype: torch.dtype,
        quick: bool,
        tell: Callable[[str], object] = str,
        ceilings: Ceilings | None = None,
    ) -> None:
        self.device, self.dtype, self.quick, self.tell = device, dtype, quick, tell
        self.ceilings: Ceilings = ceilings or measure.ceilings(device, dtype, quick=quick)

    def head(self) -> dict[str, Any]:
        """Describe the run: when, where, with what, and the ceilings of the machine in it."""
        return {
            **measure.circumstances(),
            "device": self.device.type,
            "dtype": str(self.dtype).removeprefix("torch."),
            "quick": self.quick,
            "machine": measure.machine(self.device),
            "ceilings": self.ceilings._asdict(),
        }

    def measure(self, row: Row) -> dict[str, Any]:
        """Measure one row; what goes wrong in it, or in one contender of it, is reported and ends nothing else."""
        record = self.record_of(row)
        torch.compiler.reset()  # or the next shapes of a compiled peer would get a kernel for any shape
        gc.collect()
        with failures_in(record):
            self._measure(row, record)
        return record

    def record_of(self, row: Row) -> dict[str, Any]:
        """Return the record of a row that has not been measured."""
        reads, writes = row.work.reads(self.dtype.itemsize), row.work.writes(self.dtype.itemsize)
        limits = {
            "bytes": self.ceilings.seconds(reads=reads, writes=writes),
            "operations": row.work.flops() / self.ceilings.product,
        }
        limit = max(limits, key=lambda name: limits[name])
        return {
            "path": row.path,
            "workload": row.name,
            "clock": "turns" if self.device.type == "cpu" else row.clock,
            "floor": limits[limit],
            "limit": limit,
            "aim": row.aim,
            "contenders": [{"name": contender.name} for contender in row.contenders],
        }

    def _measure(self, row: Row, record: dict[str, Any]) -> None:
        inputs = draw_inputs(row, self.device, self.dtype)
        judge = row.work.judge(inputs[0])
        calls: dict[str, Sequence[Call]] = {}
        judges: dict[str, Judge] = {}
        for contender, entry in zip(row.contenders, record["contenders"], strict=True):
            began = time.perf_counter()
            with failures_in(entry):
                prepared = [contender.prepare(one) for one in inputs]
                with PeakMemory(self.device) as memory:
                    out = prepared[0]()
                if row.memory:
                    entry["peak_bytes"] = memory.peak_bytes
                accept = judges[contender.name] = contender.judge(inputs[0]) if contender.judge else judge
                accept(in_rows(contender, out))
                if contender.lse:
                    out, lse = prepared[0](return_lse=True)
                    accept(in_rows(contender, out), lse)
                if row.launches and self.device.type == "cuda":
                    entry["launches"] = dict(measure.launches(prepared[0]))
                calls[contender.name] = prepared
            if self.device.type == "cuda" and not self.quick:  # its kernels were compiled, which may take a minute
                outcome = "is right" if contender.name in calls else "cannot be measured"
                self.tell(f"{row}: {contender.name} {outcome}, after {time.perf_counter() - began:.1f} s")
        timings = self._time(row, record, calls)
        for contender, entry in zip(row.contenders, record["contenders"], strict=True):
            if contender.name in timings:
                with failures_in(entry):  # once more: a plan keeps what its first call found, and later ones use it
                    judges[contender.name](in_rows(contender, calls[contender.name][0]()))
                    entry.update(timings[contender.name]._asdict(), clock=record["clock"])
            if "median" not in entry:
                entry.pop("graph", None)
        twin = record["contenders"][0].get("median", math.nan)
        record["share_of_floor"] = None if math.isnan(twin) else record["floor"] / twin
        for entry in record["contenders"]:
            if "median" in entry and not math.isnan(twin):
                entry["ratio"] = clocks.pair(record, entry).ratio

    def _time(self, row: Row, record: dict[str, Any], calls: dict[str, Sequence[Call]]) -> dict[str, Timing]:
        """Time the contenders of a row by one clock: if one cannot be captured, all by events."""
        if self.device.type == "cpu":
            return measure.take_turns(calls, seconds=0.05 if self.quick else SECONDS)
        entries = {entry["name"]: entry for entry in record["contenders"]}
        timings, failed = _in_rounds(calls, row.clock)
        if row.clock == "graph" and failed:
            by_events, errors = _in_rounds(calls, "events")
            if failed.keys() - errors:  # it works, but not in a graph
                for name, timing in timings.items():
                    entries[name]["graph"] = timing._asdict()
                for name in failed.keys() - errors:
                    entries[name]["uncaptured"] = failed[name]
                record["clock"], timings = "events", by_events
            failed = errors
        for name, error in failed.items():
            entries[name]["error"] = error
        return {name: timing for name, timing in timings.items() if name not in failed}


def _in_rounds(calls: dict[str, Sequence[Call]], clock: str) -> tuple[dict[str, Timing], dict[str, str]]:
    """Time contenders on a GPU in turns; return the times, and of those that fail the error."""
    samples: dict[str, list[float]] = {name: [] for name in calls}
    failed: dict[str, dict[str, Any]] = {}
    for _ in range(ROUNDS if clock in ("events", "graph") else 1):
        for name, its_calls in calls.items():
            if not failed.get(name):
                with failures_in(failed.setdefault(name, {})):
                    samples[name] += measure.on_gpu(its_calls, clock=clock, milliseconds=MILLISECONDS)
    errors = {name: found["error"] for name, found in failed.items() if found}
    return {name: measure.summarize(taken) for name, taken in samples.items() if name not in errors}, errors


def in_rows(contender: Contender, out: Any) -> Any:
    """Bring the answer of a contender into the shape that is judged."""
    return out if contender.rows is None else rearrange(out, contender.rows)


@contextmanager
def failures_in(record: dict[str, Any]) -> Iterator[None]:
    """Write what goes wrong into a record, so that one contender's failure does not end the run."""
    try:
        yield
    except Exception as error:  # noqa: BLE001 - packages of others fail in ways that only they can name
        record["error"] = f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]
