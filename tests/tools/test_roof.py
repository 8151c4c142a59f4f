"""The roof on the pages of the ladders runs in V8: it counts what the ladders count, and moves as their floors do."""

import importlib
import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from py_mini_racer import MiniRacer

from twinattn.bench.measure import Ceilings
from twinattn.course.batches import BATCHES

ROOT = Path(__file__).parent.parent.parent
UNIFORM = [
    pytest.param(ladder, name, id=f"{ladder}-{name}")
    for ladder, batches in BATCHES.items()
    for name, batch in batches.items()
    if len(set(batch.lens)) == 1
]


@pytest.fixture(scope="module")
def evaluate():
    with MiniRacer() as racer:
        racer.eval((ROOT / "docs/ladder/roof.js").read_text())

        def call(expression: str, *given: Any) -> Any:
            return json.loads(racer.eval(f"JSON.stringify(((given) => {expression})({json.dumps(given)}))"))

        yield call


@pytest.fixture
def pages(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "docs")
    return importlib.import_module("ladders")


def of_page(pages, ladder, found=None):
    """Return what the page hands to the picture."""
    shown = pages.roof(ladder, found)
    return json.loads(pages.html.unescape(shown.split('data-roof="')[1].split('"></div>')[0]))


@pytest.mark.parametrize(("ladder", "name"), UNIFORM)
def test_a_timed_batch_has_the_floor_of_the_ladder(ladder, name, evaluate, pages):
    data, batch = of_page(pages, ladder), BATCHES[ladder][name]
    own = next(each for each in data["batches"] if each["name"] == name)
    given = data["kind"], ladder, data["fixed"], own["settings"], data["rates"]
    found = evaluate("roof.floor(given[0], roof.batch(given[1], given[2], given[3]), given[4])", *given)
    reads, writes, work = batch.reads(), batch.writes(), batch.flops()
    assert (found["reads"], found["writes"], found["flops"]) == (reads, writes, work)
    rates = Ceilings(**data["rates"])
    assert found["bytes"] == pytest.approx(rates.seconds(reads=reads, writes=writes))
    assert found["operations"] == pytest.approx(work / rates.product)
    assert found["seconds"] == max(found["bytes"], found["operations"])
    assert found["limit"] == ("bytes" if found["bytes"] > found["operations"] else "operations")


@pytest.mark.parametrize("ladder", BATCHES)
def test_any_batch_is_counted_as_in_python(ladder, evaluate, pages):
    data, first = of_page(pages, ladder), next(iter(BATCHES[ladder].values()))
    for count, keys, queries, heads in ((1, 128, 1, 16), (7, 1000, 3, 128), (300, 131071, 131071, 1), (2, 1, 1, 8)):
        settings = {"count": count, "keys": keys}
        lens, more = {"decode": (1, keys), "latents": (1, keys), "prefill": (min(queries, keys), keys)}.get(ladder), {}
        if ladder == "states":
            lens = keys, max(keys, 2)
        if ladder == "latents":
            more = {"heads": heads}
        if ladder == "prefill":
            settings["queries"] = queries
        batch = replace(first, lens=(lens,) * count, **more)
        given = data["kind"], ladder, data["fixed"], settings | more, data["rates"]
        found = evaluate("roof.floor(given[0], roof.batch(given[1], given[2], given[3]), given[4])", *given)
        expected = batch.reads(), batch.writes(), batch.flops()
        assert (found["reads"], found["writes"], found["flops"]) == expected, settings


@pytest.mark.parametrize("ladder", BATCHES)
def test_sliders_reach_each_timed_batch(ladder, evaluate, pages):
    """To about a hundredth, as a slider has a thousand places."""
    sliders = evaluate("roof.SLIDERS[given[0]]", ladder)
    for each in of_page(pages, ladder)["batches"]:
        assert set(each["settings"]) == set(sliders)
        for name, x in each["settings"].items():
            place = evaluate("roof.toPlace(given[0], given[1])", sliders[name], x)
            assert 0 <= place <= 1000
            assert evaluate("roof.fromPlace(given[0], given[1])", sliders[name], place) == pytest.approx(x, rel=0.02)


def test_more_heads_turn_a_decode_of_latents_from_bytes_to_operations(evaluate, pages):
    data = of_page(pages, "latents")
    limits = [
        evaluate(
            "roof.floor(given[0], roof.batch('latents', given[1], given[2]), given[3]).limit",
            *(data["kind"], data["fixed"], {"count": 64, "keys": 8192, "heads": heads}, data["rates"]),
        )
        for heads in (16, 128)
    ]
    assert limits == ["bytes", "operations"]


@pytest.mark.parametrize("ladder", BATCHES)
def test_the_picture_has_the_rungs_that_were_timed(ladder, pages):
    for found in pages.results(ladder):
        for each in of_page(pages, ladder, found)["batches"]:
            rows = next(x["rungs"] for x in found["batches"] if x["name"] == each["name"])
            timed = [{x: row[x] for x in ("number", "name", "median")} for row in rows if "median" in row]
            assert each["rungs"] == timed and timed


def test_what_is_the_same_in_all_batches_is_said_once(pages):
    """All batches of a ladder have one kind and one size; only what a slider sets differs."""
    for ladder, batches in BATCHES.items():
        fixed = of_page(pages, ladder)["fixed"]
        for batch in batches.values():
            assert asdict(batch).items() >= fixed.items()


def test_without_any_result_there_are_no_rates_and_no_roof(pages, monkeypatch, tmp_path):
    monkeypatch.setattr(pages, "RESULTS", tmp_path)
    assert pages.roof("decode", None) == ""
