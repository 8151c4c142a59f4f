"""Which times of a record may be compared: those by one clock.

On a GPU that is CUDA graphs, wherever every contender of a row can be captured: by events, a call that launches many
kernels takes as long as its launches. Where one cannot, all are timed by events, the record says why, and the graph
times of the others stand beside. Then two contenders that were both captured are compared by their graphs, and others
by events. A row that was timed by events for no such reason is older than this rule: its times have no ratio.
"""

from typing import Any, NamedTuple


class Pair(NamedTuple):
    """The times of fastattn and of another contender, in seconds, and the clock that took both."""

    ours: float
    its: float
    clock: str

    @property
    def ratio(self) -> float:
        """How many times as long as fastattn the other one takes."""
        return self.its / self.ours


def seconds(entry: dict[str, Any]) -> float:
    """Return the time of a contender without its launches, if it could be captured."""
    median: float = entry.get("graph", entry)["median"]
    return median


def pair(record: dict[str, Any], entry: dict[str, Any]) -> Pair:
    """Return the times that may be compared, of a contender and of fastattn, which both have some."""
    twin = record["contenders"][0]
    if "graph" in twin and "graph" in entry:
        return Pair(seconds(twin), seconds(entry), "graph")
    return Pair(twin["median"], entry["median"], record["clock"])


def has_ratios(record: dict[str, Any]) -> bool:
    """Say whether times of a row may be divided: not if it was timed by events and all could have been captured."""
    return record["clock"] != "events" or any("uncaptured" in entry for entry in record["contenders"])


def check(record: dict[str, Any]) -> None:
    """Raise a ValueError if the contenders of a row were timed by different clocks, or have ratios without one."""
    name = f"{record['path']}/{record['workload']}"
    clocks = {entry["name"]: entry.get("clock") for entry in record["contenders"] if "median" in entry}
    if set(clocks.values()) - {record["clock"]}:
        raise ValueError(f"{name}: expected one clock for all contenders, {record['clock']}, got {clocks}")
    if not has_ratios(record) and any("ratio" in entry for entry in record["contenders"]):
        raise ValueError(f"{name}: expected no ratio of times by events that may be those of launches")
