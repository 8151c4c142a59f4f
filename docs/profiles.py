"""The tables of profiles: what Nsight Compute counted in some launches, side by side.

The numbers are in docs/results/profiled, in the sections and units of `ncu`, where `tests.helpers.ncu_results` writes
them. Two rows are computed here: bytes are a rate times a duration, and the share of time in which an SM has a program
is its active cycles over all cycles. What warps wait for is shown in cycles of warps: `ncu` divides them by the
instructions that warps issued. That tensor cores are busy is the share of the busiest pipeline: `ncu` names it
"Tensor", or "Shared" and says that tensor operations dominate it.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

PROFILED = Path(__file__).parent.parent / "docs/results/profiled"
SPEED, LAUNCH, MEMORY = "GPU Speed Of Light Throughput", "Launch Statistics", "Memory Workload Analysis"
SMS = "GPU and Memory Workload Distribution"


def value(section: str, name: str, write: str, scale: float = 1) -> Callable[[dict[str, Any]], str]:
    """Return a function that formats a metric of a kernel, times `scale`."""
    return lambda kernel: write.format(kernel["metrics"][section][name] * scale)


def bytes_moved(kernel: dict[str, Any]) -> float:
    """Return the bytes between the memory of the GPU and its L2 cache: their rate times the duration in nanoseconds."""
    return float(kernel["metrics"][MEMORY]["Memory Throughput"] * kernel["metrics"][SPEED]["Duration"] * 1e-9)


def share_with_a_program(kernel: dict[str, Any]) -> float:
    """Return in which share of its cycles an SM has a program, on average."""
    active, of_all = kernel["metrics"][SPEED]["SM Active Cycles"], kernel["metrics"][SMS]["Total SM Elapsed Cycles"]
    return float(active * kernel["metrics"][LAUNCH]["# SMs"] / of_all)


ROWS: dict[str, Callable[[dict[str, Any]], str]] = {
    "duration": value(SPEED, "Duration", "{:.3f} ms", 1e-6),
    "clock of the SMs": value(SPEED, "SM Frequency", "{:.2f} GHz", 1e-9),
    "cycles": value(SPEED, "Elapsed Cycles", "{:,.0f} thousand", 1e-3),
    "an SM has a program": lambda kernel: f"{share_with_a_program(kernel):.1%}",
    "tensor cores busy": value(SPEED, "Compute (SM) Throughput", "{:.1f}%"),
    "unit of exponentials (XU) busy": lambda kernel: f"{kernel['said']['by_instructions_percent']:.1f}%",
    "issue slots busy": value("Compute Workload Analysis", "Issue Slots Busy", "{:.1f}%"),
    "no warp of a scheduler can issue": value("Scheduler Statistics", "No Eligible", "{:.1f}%"),
    "instructions of warps": value("Instruction Statistics", "Executed Instructions", "{:.1f} million", 1e-6),
    "registers per thread, at the launch": value(LAUNCH, "Registers Per Thread", "{}"),
    "shared memory of a program": value(LAUNCH, "Dynamic Shared Memory Per Block", "{:,} bytes"),
    "active warps per SM": value("Occupancy", "Achieved Active Warps Per SM", "{:.0f}"),
    "requests to spilled registers": value(MEMORY, "Local Memory Spilling Requests", "{:,}"),
    "bytes from and to memory": lambda kernel: f"{bytes_moved(kernel) / 1e6:.0f} MB",
    "rate of memory": value(MEMORY, "Memory Throughput", "{:.0f} GB/s", 1e-9),
    "of its peak": value(SPEED, "DRAM Throughput", "{:.1f}%"),
    "found in L2": value(MEMORY, "L2 Hit Rate", "{:.1f}%"),
}


def waited(reason: str) -> Callable[[dict[str, Any]], str]:
    """Return a function that formats for how many cycles warps could not issue, for a reason."""
    return lambda kernel: f"{kernel['stalls'][reason] * kernel['instructions'] / 1e6:.0f} million"


STALLS: dict[str, Callable[[dict[str, Any]], str]] = {
    "cycles": lambda kernel: f"{kernel['cycles'] / 1e3:,.0f} thousand",
    "instructions of warps": lambda kernel: f"{kernel['instructions'] / 1e6:.1f} million",
    "at a barrier of warps": waited("barrier"),
    "for a result of a fixed latency": waited("wait"),
    "for memory, `mbarrier`s among it": waited("long_scoreboard"),
    "for shared memory, exponentials and shuffles": waited("short_scoreboard"),
    "for a product": waited("gmma"),
    "for the dispatch of a unit": waited("dispatch_stall"),
    "read from memory": lambda kernel: f"{kernel['read_bytes'] / 1e6:.0f} MB",
    "written to memory": lambda kernel: f"{kernel['written_bytes'] / 1e6:.0f} MB",
}


def tables(path: str) -> str:
    """Make a table for each profile of a path's kernels: a column per launch, below what each of them is."""
    shown = []
    for file in sorted(PROFILED.glob("*.json")):
        found = json.loads(file.read_text())
        for kind, rows in (("runs", ROWS), ("stalls", STALLS)):
            for run in (run for run in found[kind] if run["path"] == path):
                shown += _table(run, rows)
    return "\n\n".join(shown)


def _table(run: dict[str, Any], rows: dict[str, Callable[[dict[str, Any]], str]]) -> list[str]:
    """Make one table, behind what it is of."""
    versions = ", ".join(f"{name} {number}" for name, number in run["versions"].items())
    machine = f"{run['machine']['name']}, {run['date']}, commit {run['commit']}; {versions}"
    about = f"*{run['workload']}*, {machine}. `{run['command']}`:"
    kernels = run["kernels"]
    designs = [f"- {x['head']}: {x['design']}" for x in kernels if x["head"] != x["design"]]
    lines = [f"| | {' | '.join(x['head'] for x in kernels)} |", "|---|" + "--:|" * len(kernels)]
    lines += [f"| {name} | {' | '.join(map(write, kernels))} |" for name, write in rows.items()]
    return [about, "\n".join(designs), "\n".join(lines)]
