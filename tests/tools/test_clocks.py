"""A row of the benchmark has one clock for all its contenders, and no ratio that may be the launches of one of them."""

import importlib
import json
from pathlib import Path

import pytest
import torch

from twinattn.bench import Bench, clocks, measure, report
from twinattn.bench.row import Row
from twinattn.bench.rows import rows
from twinattn.bench.step_work import Slots

ROOT = Path(__file__).parent.parent.parent
RESULTS = sorted((ROOT / "docs/results").glob("*.json"))
SECONDS = {  # seconds of contenders, by clock; None where it fails
    "fastattn": {"graph": 2e-3, "events": 3e-3},
    "many launches": {"graph": 1e-3, "events": 8e-3},
    "in no graph": {"graph": None, "events": 6e-3},
    "broken": {"graph": None, "events": None},
}


@pytest.fixture
def timed(monkeypatch):
    """Time contenders of a row on a GPU that is not there; return the record, and the turns."""
    turns = []

    def on_gpu(calls, *, clock, milliseconds):
        turns.append((clock, calls[0]))
        if SECONDS[calls[0]][clock] is None:
            raise RuntimeError(f"not by {clock}")
        return [SECONDS[calls[0]][clock]] * 5

    monkeypatch.setattr(measure, "on_gpu", on_gpu)
    monkeypatch.setattr(measure, "ceilings", lambda *_, **__: measure.Ceilings(copy=1.0, product=1.0, read=1.0))

    def time_them(*names, clock="graph"):
        bench = Bench(torch.device("cpu"), torch.float32, quick=True)
        bench.device = torch.device("cuda")
        record = dict(path="local", workload="small", clock=clock, contenders=[dict(name=name) for name in names])
        timings = bench._time(Row("local", "small", Slots(1, 1, 1), (), clock=clock), record, {x: [x] for x in names})
        for entry in record["contenders"]:
            if entry["name"] in timings:
                entry.update(timings[entry["name"]]._asdict(), clock=record["clock"])
        clocks.check(record)
        return record, turns

    return time_them


def test_contenders_that_can_be_captured_are_timed_by_graphs(timed):
    record, turns = timed("fastattn", "many launches")
    ours, its = record["contenders"]
    assert turns == [("graph", "fastattn"), ("graph", "many launches")] * 3
    assert (record["clock"], ours["median"], its["median"]) == ("graph", 2e-3, 1e-3)
    assert clocks.pair(record, its) == (2e-3, 1e-3, "graph")


def test_where_one_cannot_be_captured_all_are_timed_by_events(timed):
    """And those that can are compared by their graphs: that of many launches is twice as fast, and not slower."""
    record, _ = timed("fastattn", "many launches", "in no graph", "broken")
    ours, its, in_no_graph, broken = record["contenders"]
    assert (record["clock"], ours["median"], its["median"], in_no_graph["median"]) == ("events", 3e-3, 8e-3, 6e-3)
    assert in_no_graph["uncaptured"] == "RuntimeError: not by graph" and "graph" not in in_no_graph
    assert clocks.pair(record, its) == (2e-3, 1e-3, "graph")
    assert clocks.pair(record, in_no_graph) == (3e-3, 6e-3, "events") and clocks.has_ratios(record)
    assert broken == dict(name="broken", error="RuntimeError: not by events")


def test_one_that_fails_by_any_clock_changes_no_clock(timed):
    record, turns = timed("fastattn", "broken")
    assert (record["clock"], record["contenders"][0]["median"]) == ("graph", 2e-3)
    assert record["contenders"][1] == dict(name="broken", error="RuntimeError: not by events")
    assert [turn for turn in turns if turn[1] == "broken"] == [("graph", "broken"), ("events", "broken")]


def test_rows_are_timed_by_graphs_unless_they_say_otherwise():
    assert {row.clock for row in rows("cuda", quick=False)} == {"graph", "host", "own"}


@pytest.mark.parametrize("file", RESULTS, ids=lambda file: file.stem)
def test_committed_rows_have_one_clock(file):
    for row in (row for run in json.loads(file.read_text())["runs"] for row in run["rows"]):
        clocks.check(row)


def test_a_row_of_two_clocks_is_not_written(tmp_path):
    contenders = [dict(name="fastattn", median=1.0, clock="graph"), dict(name="FLA", median=2.0, clock="events")]
    record = dict(path="recurrent", workload="prefill", clock="graph", contenders=contenders)
    with pytest.raises(ValueError, match="recurrent/prefill: expected one clock for all contenders, graph, got {'fast"):
        report.write(tmp_path, {}, [record])
    contenders[0].update(clock="events", ratio=1.0)
    with pytest.raises(ValueError, match="expected no ratio of times by events that may be those of launches"):
        report.write(tmp_path, {}, [record | dict(clock="events")])
    assert not list(tmp_path.iterdir())


def test_pages_divide_no_times_of_before_the_rule(monkeypatch):
    """Of a row that was timed by events though all could be captured, both times are shown, and their clock."""
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    readme, hooks = importlib.import_module("readme"), importlib.import_module("hooks")
    old = dict(path="recurrent", workload="prefill", clock="events", floor=1e-4, limit="bytes")
    old["contenders"] = [dict(name="fastattn", median=5e-4), dict(name="FLA", median=8e-4)]
    assert readme.line("a prompt", old, False) == (
        "| a prompt | by events | **500\u00a0µs** | 800\u00a0µs | FLA | recurrent |"
    )
    assert "0.62" not in hooks.contenders([old]) + hooks.in_short([old]) and hooks._beside_peers([old]) == ""
    new = old | dict(contenders=[*old["contenders"], dict(name="host", median=9e-4, uncaptured="no")])
    for entry, graph in zip(new["contenders"], (4e-4, 5e-4), strict=False):
        entry |= dict(graph=dict(median=graph), ratio=1.0)
    assert "| 0.80 | **400\u00a0µs** | 500\u00a0µs | FLA |" in readme.line("a prompt", new, False)
