"""Write onto the benchmark's page which rows are behind their best peer, by the committed results, and why.

The reasons are in docs/proof/behind.toml. A row that is behind and has none there is an error, and so is a reason for a
row that is not behind. `make readme` runs it.
"""

import json
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from twinattn.bench import clocks
from twinattn.bench.report import duration

ROOT = Path(__file__).parent.parent
REASONS = ROOT / "docs/proof/behind.toml"
LIMITS = {"cuda": 1.02, "cpu": 1.05}  # relative to the best peer's time, by device
OURS = ("fastattn", "refattn")


class Behind(NamedTuple):
    """A row whose time is above the limit: the machine, the row, and the fastest contender that is not ours.

    Attributes:
        has_ratio: the times may be divided (`clocks.has_ratios`).
    """

    machine: str
    row: str
    ours: float
    peer: str
    its: float
    has_ratio: bool


def rows() -> Iterator[Behind]:
    """Find the rows, in the order of the results; those of the engine stand on its own page."""
    for file in sorted((ROOT / "docs/results").glob("*.json")):
        runs: list[dict[str, Any]] = json.loads(file.read_text())["runs"]
        for device, row in ((run["device"], row) for run in runs for row in run["rows"] if row["path"] != "engine"):
            twin, *others = row["contenders"]
            peers = [entry for entry in others if "median" in entry and not entry["name"].startswith(OURS)]
            if "median" in twin and peers:
                name, pair = min(
                    ((entry["name"], clocks.pair(row, entry)) for entry in peers), key=lambda x: x[1].ratio
                )
                if pair.ours > LIMITS[device] * pair.its:
                    about = file.stem, f"{row['path']}/{row['workload']}"
                    yield Behind(*about, pair.ours, name, pair.its, clocks.has_ratios(row))


def table() -> str:
    """Make a table for each machine, the largest ratio first; rows that were timed by events come last, without one.

    Raises:
        ValueError: if a row that is behind has no reason, or a reason no such row.
    """
    reasons: dict[str, dict[str, str]] = tomllib.loads(REASONS.read_text())
    found = list(rows())
    missing = [f"{x.machine}: {x.row}" for x in found if x.row not in reasons.get(x.machine, {})]
    behind = {(x.machine, x.row) for x in found}
    idle = [f"{machine}: {row}" for machine, those in reasons.items() for row in those if (machine, row) not in behind]
    if missing or idle:
        raise ValueError(
            f"{REASONS.name}: rows without a reason: {missing}; reasons of rows that are not behind: {idle}"
        )
    parts = []
    for machine in dict.fromkeys(x.machine for x in found):
        lines = [f"| {machine} | fastattn | best peer | its time | ratio | why |", "|---|--:|---|--:|--:|---|"]
        those = sorted((x for x in found if x.machine == machine), key=lambda x: (not x.has_ratio, -x.ours / x.its))
        for x in those:
            ratio = f"{x.ours / x.its:.2f}" if x.has_ratio else "by events"
            cells = (x.row, duration(x.ours), x.peer, duration(x.its), ratio, reasons[machine][x.row])
            lines.append(f"| {' | '.join(cells)} |")
        parts.append("\n".join(lines))
    return "\n\n".join(parts)
