"""The results of the benchmark: a table to look at, JSON and CSV to keep, and the picture of the docs."""

import csv
import json
import re
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from twinattn.bench import clocks

OURS_ASKED_FOR = "fastattn, "  # how the name of a contender begins that is fastattn by a kernel that was asked for
NOTABLY_FASTER = 0.98  # as a share of the chosen kernel's time
NO_FLOOR = 1e-6  # seconds; below it a row is about launches, and the floor says nothing
INK = "#808080"  # reads on white and on black
OURS = "#e4572e"
PEERS = {  # colour and marker, by how a contender's name begins
    "FA4": ("#4c8bf5", "o"),
    "FA3": ("#8e6bd8", "<"),
    "FA2": ("#00a6c7", "s"),
    "FlashInfer": ("#c99700", "^"),
    "FlashMLA": ("#b4436c", ">"),
    "ATen": ("#4c8bf5", "s"),
    "vLLM": ("#b4436c", "d"),
    "torch": ("#2ca58d", "v"),
    "FlexAttention": ("#b07aa1", "P"),
    "transformers": ("#c99700", "X"),
    "without cascade": ("#a0522d", "h"),
    "plain attention": ("#6b8e23", "p"),
    "numpy": ("#2ca58d", "8"),
    "refattn": (INK, "o"),
}


def print_head(console: Console, head: dict[str, Any]) -> None:
    """Describe the machine."""
    versions = ", ".join(f"{name} {number}" for name, number in head["versions"].items() if number)
    copy, read, product = (head["ceilings"][name] for name in ("copy", "read", "product"))
    console.print(f"{head['machine']['name']}, {head['dtype']}; {versions}")
    console.print(
        f"Ceilings in this run: read {read / 1e9:.4g} GB/s, copy {copy / 1e9:.4g} GB/s, "
        f"matrix product {product / 1e12:.3g} TFLOP/s"
    )
    console.print(
        "The floor is the time at these rates; a ratio above 1 says how many times longer a peer takes than fastattn."
    )


def print_row(console: Console, record: dict[str, Any]) -> None:
    """Print a row: the twin, and its peers below it."""
    table = Table(box=None, pad_edge=False)
    table.add_column(f"{record['path']}  {record['workload']}", min_width=48, no_wrap=True)
    for column in ("time", "spread", "ratio", "of floor"):
        table.add_column(column, justify="right", min_width=8, no_wrap=True)
    table.add_column("in a graph" if any("graph" in entry for entry in record["contenders"]) else "", justify="right")
    besides = {name for entry in record["contenders"] for name in ("peak_bytes", "launches") if name in entry}
    table.add_column("memory" if "peak_bytes" in besides else "launches" if besides else "", justify="right")
    table.add_column("", overflow="fold", style="red")
    for entry in record["contenders"]:
        if "median" not in entry:
            table.add_row(entry["name"], "-", "", "", "", "", "", entry.get("error", record.get("error", "")))
            continue
        table.add_row(
            entry["name"],
            duration(entry["median"]),
            f"{(entry['high'] - entry['low']) / entry['median']:.0%}",
            f"{entry['ratio']:.3g}" if "ratio" in entry else "",
            f"{record['floor'] / entry['median']:.1%}",
            duration(entry["graph"]["median"]) if "graph" in entry else "",
            _besides(entry),
        )
    console.print(table)
    aim = f"; aim: {record['aim']}" if record["aim"] else ""
    clock = ", timed by events, as one cannot be captured" if record.get("clock") == "events" else ""
    console.print(Text(f"floor {duration(record['floor'])}, by its {record['limit']}{clock}{aim}", style="dim"))
    console.print()


def _besides(entry: dict[str, Any]) -> str:
    """Write what was measured of a contender besides its time: peak memory, or the number of launches."""
    if entry.get("peak_bytes") is not None:
        return f"{entry['peak_bytes'] / 2**20:.0f} MiB"
    return str(sum(entry["launches"].values())) if "launches" in entry else ""


def print_summary(console: Console, records: Sequence[dict[str, Any]], seconds: float) -> None:
    """Print in a line how many rows there are, and in how many of them the twin is ahead."""
    measured = [record for record in records if "median" in record["contenders"][0]]
    ahead = sum(all(entry.get("ratio", 1) >= 1 for entry in _peers(record)) for record in measured)
    wrong = sum("WrongAnswer" in entry.get("error", "") for record in records for entry in record["contenders"])
    console.print(
        f"{len(measured)} of {len(records)} rows measured in {seconds:.0f} s; fastattn ahead of all its peers in "
        f"{ahead}; {wrong} answers outside the tolerance, which have no speed."
    )
    for record in measured:
        for entry in record["contenders"][1:]:
            if entry["name"].startswith(OURS_ASKED_FOR) and entry.get("ratio", 1) < NOTABLY_FASTER:
                row = f"{record['path']}/{record['workload']}"
                console.print(
                    f"Faster than what was chosen in {row}: {entry['name']}, {entry['ratio']:.3g} of its time."
                )


def _peers(record: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the contenders of a row that are not fastattn, by whichever kernel."""
    return [entry for entry in record["contenders"][1:] if not entry["name"].startswith(OURS_ASKED_FOR)]


def duration(seconds: float) -> str:
    """Write a time with three digits and its unit."""
    units = {1.0: "s", 1e-3: "ms", 1e-6: "µs"}
    size = next((size for size in units if seconds >= size), 1e-6)
    return f"{seconds / size:.3g} {units[size]}"


def write(folder: Path, head: dict[str, Any], records: Sequence[dict[str, Any]], *, picture: bool = False) -> Path:
    """Write the results of a machine; rows measured now replace the same rows of earlier runs.

    Args:
        folder: where the results of all machines are; `<machine>.json`, `.csv` and `.svg` in it are written.
        head: when, where and with what the rows were measured.
        records: the rows.
        picture: draw the picture too, if matplotlib is there.

    Returns:
        The JSON file. Its runs are listed by age, each with the rows that no later run has measured again.

    Raises:
        ValueError: if contenders of a row were timed by different clocks (`clocks.check`); nothing is written.
    """
    for record in records:
        clocks.check(record)
    folder.mkdir(parents=True, exist_ok=True)
    slug = re.sub(r"[^a-z0-9]+", "-", head["machine"]["name"].lower()).strip("-")
    file = folder / f"{head['device']}-{slug}{'-quick' if head['quick'] else ''}.json"
    runs = json.loads(file.read_text())["runs"] if file.exists() else []
    new = {_name(record) for record in records}
    for run in runs:
        run["rows"] = [record for record in run["rows"] if _name(record) not in new]
    runs = [run for run in runs if run["rows"] and run["date"] != head["date"]] + [{**head, "rows": list(records)}]
    file.write_text(json.dumps({"runs": runs}, indent=1) + "\n")
    _write_csv(file.with_suffix(".csv"), runs)
    if picture and find_spec("matplotlib"):
        draw(file)
    return file


def draw(file: Path) -> Path:
    """Draw the picture of a results file: how many times the floor each contender takes, a line per row.

    Rows of the host's time are left out: a call comes back before the GPU is done, which is what the floor is of.

    It is an SVG without a background, in tones that read on white and on black.

    Args:
        file: the JSON.

    Returns:
        The picture.
    """
    import matplotlib
    from matplotlib.figure import Figure

    rows = [record for run in json.loads(file.read_text())["runs"] for record in run["rows"]]
    rows = [record for record in rows if "median" in record["contenders"][0] and record["floor"] > NO_FLOOR]
    rows = [record for record in rows if record.get("clock") != "host"]
    rows.sort(key=_name)  # a path's rows side by side, whenever they were measured
    with matplotlib.rc_context({"svg.hashsalt": "twinattn", "text.color": INK, "axes.labelcolor": INK}):
        figure = Figure(figsize=(9, 1.5 + 0.32 * len(rows)), layout="constrained")
        axes = figure.add_subplot()
        for family, (color, marker) in PEERS.items():
            points = [
                (clocks.seconds(entry) / record["floor"], -i)
                for i, record in enumerate(rows)
                for entry in record["contenders"][1:]
                if "median" in entry and entry["name"].startswith(family)
            ]
            if points:
                x, y = ([point[i] for point in points] for i in (0, 1))
                axes.scatter(x, y, s=36, marker=marker, facecolors="none", edgecolors=color, label=family)
        ours = [clocks.seconds(record["contenders"][0]) for record in rows]
        shares = [median / record["floor"] for median, record in zip(ours, rows, strict=True)]
        axes.scatter(shares, [-i for i in range(len(rows))], s=60, color=OURS, marker="D", label="fastattn", zorder=3)
        for i, median in enumerate(ours):
            axes.text(1.01, -i, duration(median), transform=axes.get_yaxis_transform(), va="center")
        axes.axvline(1, color=INK, linewidth=1, linestyle="--")
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter(lambda x, _: f"{x:g}")
        axes.set_yticks([-i for i in range(len(rows))], [_label(record) for record in rows])
        axes.set_xlabel("times the floor of the hardware (dashed), further left is faster; right: time of fastattn")
        axes.grid(axis="x", color=INK, alpha=0.25)
        axes.tick_params(which="both", colors=INK, length=0)
        axes.spines[:].set_visible(False)
        figure.legend(loc="outside upper center", ncols=5, frameon=False)
        picture = file.with_suffix(".svg")
        figure.savefig(picture, transparent=True, metadata={"Date": None})
    return picture


def _write_csv(file: Path, runs: Sequence[dict[str, Any]]) -> None:
    fields = ("median", "low", "high", "ratio", "peak_bytes", "error")
    with file.open("w", newline="") as target:
        lines = csv.writer(target, lineterminator="\n")
        lines.writerow(("date", "machine", "dtype", "path", "workload", "clock", "floor", "contender", *fields))
        for run in runs:
            for record in run["rows"]:
                about = (run["date"], run["machine"]["name"], run["dtype"], record["path"], record["workload"])
                for entry in record["contenders"]:
                    values = (entry.get(field, "") for field in fields)
                    clock = entry.get("clock", record["clock"])
                    lines.writerow((*about, clock, record["floor"], entry["name"], *values))


def _label(record: dict[str, Any]) -> str:
    return f"{record['path']}  {record['workload']}{'' if clocks.has_ratios(record) else ', by events'}"


def _name(record: dict[str, Any]) -> tuple[str, str]:
    return record["path"], record["workload"]
