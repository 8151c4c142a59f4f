"""What notebook 9 draws: the rooflines of the committed results."""

import json

import pytest

from twinattn.bench import roofline

RUN = {
    "device": "cpu",
    "dtype": "float32",
    "machine": {"name": "a machine"},
    "ceilings": {"copy": 1e10, "read": 2e10, "product": 1e12},
}


def row(workload: str, seconds: float, clock: str = "turns") -> dict:
    """Make a row of a results file."""
    path, _, workload = workload.partition("/")
    contenders = [{"name": "fastattn", "median": seconds}, {"name": "a peer", "median": 1.0}]
    return {"path": path, "workload": workload, "clock": clock, "contenders": contenders}


def written(folder, *runs: dict) -> roofline.Roofline:
    """Write a results file and read it as a roofline."""
    (folder / "cpu.json").write_text(json.dumps({"runs": runs}))
    return roofline.measured(folder)


def test_a_decode_has_two_operations_per_byte_in_float32(tmp_path):
    """4 d operations for each of 4 heads of a group, over the 2 d numbers of a key and a value, of 4 bytes."""
    (machine,) = written(tmp_path, RUN | {"rows": [row("chunked_prefill/decode-1x4096", 0.01)]}).machines
    (point,) = machine.points
    assert point.intensity == pytest.approx(2, rel=0.01)
    assert machine.roof(point.intensity) == pytest.approx(2 * 2e10, rel=0.01)
    assert machine.shares() == [pytest.approx(point.rate / machine.roof(point.intensity))]
    assert machine.shares("decode") == machine.shares() and machine.shares("prefill") == []


def test_the_roof_is_the_best_of_all_runs_and_flat_past_the_ridge(tmp_path):
    slower = RUN | {"ceilings": {"copy": 3e10, "product": 2e12}}  # a run of old, without the speed of reads
    (machine,) = written(
        tmp_path,
        RUN | {"rows": [row("chunked_prefill/decode-1x4096", 0.01)]},
        slower | {"rows": [row("varlen/encoder-8x512", 0.1)]},
    ).machines
    assert (machine.read, machine.product) == (3e10, 2e12)
    assert machine.roof(machine.ridge) == pytest.approx(machine.product) == machine.roof(1000 * machine.ridge)
    assert len(machine.points) == 2


def test_only_attention_on_the_clock_of_the_device_is_drawn(tmp_path):
    rows = [
        row("chunked_prefill/decode-1x4096", 0.01),
        row("chunked_prefill/decode-16x4096", 0.01, clock="host"),
        row("kv_cache/write-16384", 0.01),
        row("no_such_path/row", 0.01),
        row("varlen/encoder-8x512", 0.01) | {"contenders": [{"name": "fastattn", "error": "WrongAnswerError"}]},
    ]
    (machine,) = written(tmp_path, RUN | {"rows": rows}).machines
    assert [point.row for point in machine.points] == ["chunked_prefill/decode-1x4096"]


def test_the_picture_is_the_same_every_time_and_its_text_names_the_machines(tmp_path):
    drawn = written(tmp_path, RUN | {"rows": [row("chunked_prefill/decode-1x4096", 0.01)]})
    picture = drawn._repr_svg_()
    assert picture == drawn._repr_svg_()
    assert "a machine, float32" in picture
    assert repr(drawn).startswith("a machine, float32: ridge at 50 operations per byte; 1 rows, at ")
