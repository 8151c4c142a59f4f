"""Keep what a page shows of a profile by Nsight Compute: `python -m tests.helpers.ncu_results ncu.csv about.json`.

The first file is the output of `ncu --set full --page details --csv`. The second has what that output lacks: the date,
commit, versions, machine, path and workload of the run, the command, and `designs`: for each profiled launch, in their
order, its `design` and the `head` of its column in a table. The run is printed, as docs/results/profiled has it:
numbers in the units of `ncu`, sorted into its sections. Nothing is computed.

With `--stalls` before both files, the first is the output of `ncu --set full --page raw --csv`, which alone has the
reasons of stalls.
"""

import csv
import json
import re
import sys
from pathlib import Path
from typing import Any

KEPT = {  # sections and metrics, by the names that ncu gives them
    "GPU Speed Of Light Throughput": (
        *("Duration", "SM Frequency", "Elapsed Cycles", "SM Active Cycles", "Compute (SM) Throughput"),
        *("Memory Throughput", "DRAM Throughput", "L1/TEX Cache Throughput", "L2 Cache Throughput"),
    ),
    "GPU and Memory Workload Distribution": ("Total SM Elapsed Cycles",),
    "Compute Workload Analysis": ("SM Busy", "Issue Slots Busy", "Executed Ipc Active"),
    "Memory Workload Analysis": (
        *("Memory Throughput", "L1/TEX Hit Rate", "L2 Hit Rate", "L2 Compression Input Sectors"),
        "Local Memory Spilling Requests",
    ),
    "Scheduler Statistics": ("No Eligible", "Active Warps Per Scheduler", "Eligible Warps Per Scheduler"),
    "Warp State Statistics": ("Warp Cycles Per Issued Instruction",),
    "Instruction Statistics": ("Executed Instructions",),
    "Launch Statistics": (
        *("# SMs", "Grid Size", "Block Size", "Registers Per Thread", "Dynamic Shared Memory Per Block"),
        "Driver Shared Memory Per Block",
    ),
    "Occupancy": ("Theoretical Occupancy", "Achieved Occupancy", "Achieved Active Warps Per SM"),
    "Source Counters": ("Branch Instructions",),
}
SAID = {  # numbers that ncu says in sentences alone: the rule, and what the sentence is
    "HighPipeUtilization": r"(?P<pipeline>\w+) is the highest-utilized pipeline \((?P<pipeline_percent>[\d.]+)%\)"
    r".*?(?:It's dominated by its (?P<dominated_by>.+?) sub-pipeline.*?)?"
    r"highest utilized pipeline \((?P<by_instructions_percent>[\d.]+)%\) is (?P<by_instructions>\w+)",
    "FPInstructions": r"executes (?P<fp32_fused>\d+) fused and (?P<fp32_not_fused>\d+) non-fused FP32 instructions",
    "UncoalescedGlobalAccess": r"a total of (?P<excessive_sectors>\d+) excessive sectors "
    r"\(\d+% of the total (?P<sectors>\d+) sectors\)",
    "MemoryCacheAccessPattern": r"for global stores .*?only (?P<stored_bytes_per_sector>[\d.]+) of the 32 bytes",
}


def number(text: str) -> int | float | str:
    """Return a number that `ncu` wrote, with commas between thousands; what is none stays text."""
    plain = text.replace(",", "")
    return int(plain) if plain.isdigit() else float(plain) if re.fullmatch(r"\d+\.\d+", plain) else text


def run_of(text: str, about: dict[str, Any]) -> dict[str, Any]:
    """Return a run as docs/results/profiled has it.

    Args:
        text: what `ncu` printed.
        about: what it does not say, with `design` and `head` of each launch in `designs`.

    Raises:
        ValueError: if there is another number of launches than designs, or a launch lacks a metric.
    """
    _, found, table = text.partition('"ID",')
    rows = list(csv.DictReader((found + table).splitlines()))
    launches = sorted({row["ID"] for row in rows}, key=int)
    about = dict(about)
    designs = about.pop("designs")
    if len(launches) != len(designs):
        raise ValueError(f"{len(launches)} launches, and {len(designs)} designs")
    units: dict[str, dict[str, str]] = {}
    kernels = []
    for launch, design in zip(launches, designs, strict=True):
        mine = [row for row in rows if row["ID"] == launch]
        values = {(row["Section Name"], row["Metric Name"]): row for row in mine}
        metrics: dict[str, dict[str, Any]] = {}
        for section, names in KEPT.items():
            for name in names:
                if (section, name) not in values:
                    raise ValueError(f"launch {launch} has no {name} in {section}")
                row = values[section, name]
                units.setdefault(section, {})[name] = row["Metric Unit"]
                metrics.setdefault(section, {})[name] = number(row["Metric Value"])
        said = {}
        for row in mine:
            sentence = re.search(SAID[row["Rule Name"]], row["Rule Description"]) if row["Rule Name"] in SAID else None
            said |= {name: number(value) for name, value in (sentence.groupdict() if sentence else {}).items() if value}
        kernels.append({**design, "kernel": mine[0]["Kernel Name"], "metrics": metrics, "said": said})
    return {**about, "units": units, "kernels": kernels}


STALL = re.compile(r"smsp__average_warps_issue_stalled_(\w+)_per_issue_active\.ratio")
COUNTED = {  # names of metrics in docs/results/profiled, and in the output of `ncu`
    "cycles": "sm__cycles_elapsed.max",
    "instructions": "smsp__inst_executed.sum",
    "read_bytes": "dram__bytes_read.sum",
    "written_bytes": "dram__bytes_write.sum",
}


def stalls_of(text: str, about: dict[str, Any]) -> dict[str, Any]:
    """Return the stall reasons of each launch, in the form of docs/results/profiled.

    Args:
        text: what `ncu --page raw --csv` printed: a row of names, a row of units, and a row for each launch.
        about: as for `run_of`.

    Raises:
        ValueError: if there is another number of launches than designs.
    """
    about = dict(about)
    designs = about.pop("designs")
    _, found, table = text.partition('"ID",')
    launches = list(csv.DictReader((found + table).splitlines()))[1:]
    if len(launches) != len(designs):
        raise ValueError(f"{len(launches)} launches, and {len(designs)} designs")
    kernels = []
    for launch, design in zip(launches, designs, strict=True):
        stalls = {reason[1]: number(value) for name, value in launch.items() if (reason := STALL.fullmatch(name))}
        counted = {ours: number(launch[name]) for ours, name in COUNTED.items()}
        kernels.append({**design, "kernel": launch["Kernel Name"], **counted, "stalls": stalls})
    return {**about, "kernels": kernels}


if __name__ == "__main__":
    *asked, output_file, about_file = sys.argv[1:]
    make = stalls_of if asked == ["--stalls"] else run_of
    made = make(Path(output_file).read_text(), json.loads(Path(about_file).read_text()))
    sys.stdout.write(json.dumps(made, indent=1) + "\n")
