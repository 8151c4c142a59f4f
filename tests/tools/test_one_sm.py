"""The time line of docs/explorer/one_sm.md runs in V8: it predicts the stored trials, and its lanes are possible."""

import json
import re
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import pytest
from py_mini_racer import MiniRacer

from fastattn.kernels.triton.latents_hopper import RANK, ROPE
from fastattn.kernels.triton.tuning import LATENT_64

ROOT = Path(__file__).parent.parent.parent
EXPLORER = ROOT / "docs/explorer"
LADDER = json.loads((ROOT / "docs/results/ladder/latents-cuda-nvidia-h200.json").read_text())
(TRIED,) = (
    run
    for run in json.loads((ROOT / "docs/results/tried/cuda-nvidia-h200.json").read_text())["runs"]
    if run["workload"] == "decode-64x8192-heads-128-fp8"
)
DESIGNS = {  # a trial's name in the page's code, and how its design begins in the stored results
    "together": "Triton, as it was: every warp loads",
    "before": "Gluon: a third group of warps brings keys; it is waited for before the product with values",
    "after": "the same; it is waited for after that",
    "nothing": "nothing is brought",
}
SETTINGS = {
    "together": dict(roles="together"),
    "before": dict(wait="before"),
    "after": {},
    "nothing": dict(loads=0),
}
ALL = [
    dict(roles=roles, slots=slots, wait=wait, loads=loads)
    for roles, slots, wait, loads in product(("together", "apart", "turn"), (1, 2, 3, 4), ("after", "before"), (1, 0))
]


@pytest.fixture(scope="module")
def evaluate():
    with MiniRacer() as racer:
        racer.eval((EXPLORER / "one_sm.js").read_text())

        def call(expression: str, *given: Any) -> Any:
            return json.loads(racer.eval(f"JSON.stringify(((given) => {expression})({json.dumps(given)}))"))

        yield call


def measured(name: str) -> float:
    """Return the time of a trial, in microseconds."""
    (design,) = (each for each in TRIED["designs"] if each["design"].startswith(DESIGNS[name]))
    return 1e6 * design["median"]


def test_what_it_rests_on_is_stored(evaluate):
    assert evaluate("oneSm.TRIALS") == pytest.approx({name: measured(name) for name in DESIGNS})
    assert evaluate("oneSm.PRODUCT") == pytest.approx(LADDER["ceilings"]["product"] / 1e12, rel=1e-5)
    assert evaluate("oneSm.SMS") == LADDER["machine"]["multiprocessors"]
    sizes = evaluate("oneSm.SIZES")
    assert sizes == dict(rows=LATENT_64.block_m, keys=LATENT_64.block_n, rank=RANK, rope=ROPE, steps=8192 // 64)
    (kernel,) = LADDER["batches"][0]["rungs"][10]["kernels"]
    numbers = 6 * 4 * LATENT_64.block_m  # of each row a factor, a last key, and the maxima and sums of two consumers
    barriers = kernel["shared_bytes"] - evaluate("oneSm.play({}).shared") - numbers
    assert 0 < barriers < 512, "queries, weights, two slots and these are what the kernel takes"
    assert LATENT_64.num_stages == 2, "the slots of the trial of all warps together"


@pytest.mark.parametrize("name", SETTINGS)
def test_it_predicts_a_stored_trial(evaluate, name):
    """To 1 %, as the page says; the one of all warps together is no part of what durations were fitted to."""
    found = evaluate("oneSm.play(given[0])", SETTINGS[name])
    assert found["total"] == pytest.approx(measured(name), rel=0.01)
    assert evaluate("oneSm.trial(oneSm.legal(given[0]))", SETTINGS[name]) == name
    assert "within 1 %" in (EXPLORER / "one_sm.md").read_text()


def test_a_prediction_uses_no_time_of_its_own(evaluate):
    """What all warps together take is in no duration."""
    source = (EXPLORER / "one_sm.js").read_text().split("function durations()")[1].split("\n  }\n")[0]
    assert {*re.findall(r"TRIALS\.(\w+)", source)} == {"before", "after", "nothing"}


@pytest.mark.parametrize("settings", ALL, ids=lambda settings: "-".join(map(str, settings.values())))
def test_the_lanes_are_possible(evaluate, settings):
    """No lane does two things at once, and keys are converted, multiplied and replaced in this order."""
    found, takes = evaluate("oneSm.play(given[0])", settings), evaluate("oneSm.durations()")
    lanes: dict[str, list[dict[str, Any]]] = {lane: [] for lane in found["lanes"]}
    for bar in found["bars"]:
        lanes[bar["lane"]].append(bar)
        if bar["kind"] in takes:
            assert bar["end"] - bar["start"] == pytest.approx(takes[bar["kind"]])
    for bars in lanes.values():
        bars.sort(key=lambda bar: bar["start"])
        assert all(one["end"] <= next_["start"] + 1e-9 for one, next_ in pairwise(bars))
    at = {(bar["kind"], bar["step"]): bar for bar in found["bars"] if not bar["kind"].startswith("wait")}
    stuck = settings["roles"] == "apart" and settings["slots"] == 1 and settings["loads"]
    assert (found["total"] is None) == bool(stuck)
    if stuck:
        waits = {bar["kind"]: bar["step"] for bar in found["bars"] if bar["kind"] in ("wait: full", "wait: empty")}
        assert waits == {"wait: full": 1, "wait: empty": 1} and ("convert", 1) not in at
        return
    kinds = ["load", "convert"] * settings["loads"] + ["scores", "softmax", "values"]
    for step in range(128):
        parts = [at[kind, step] for kind in kinds]
        assert all(one["end"] <= next_["start"] + 1e-9 for one, next_ in pairwise(parts))
        before = step - settings["slots"]
        if settings["loads"] and before >= 0 and settings["roles"] != "together":
            assert at["convert", step]["start"] >= at["values", before]["end"] - 1e-9, "its slot was in use"
        if settings["wait"] == "before" and settings["roles"] == "apart" and settings["loads"] and step < 127:
            assert at["values", step]["start"] >= at["convert", step + 1]["end"] - 1e-9
    assert len(at) == 128 * (len(kinds) + 2 * (settings["loads"] and settings["roles"] != "together"))


def test_the_answers_of_the_page_are_right(evaluate):
    page = " ".join((EXPLORER / "one_sm.md").read_text().split())

    def total(**settings: Any) -> float:
        return evaluate("oneSm.play(given[0]).total", settings)

    idle = 1 - evaluate("oneSm.play(given[0]).busy", dict(roles="together"))["tensor cores"]
    assert f"For {100 * idle:.0f} % of it" in page
    assert total(roles="together", slots=1) - total(roles="together") == pytest.approx(
        127 * evaluate("oneSm.durations().load")
    )
    assert total(slots=3) == total() and total(slots=3, wait="before") == pytest.approx(total(), rel=0.005)
    assert evaluate("oneSm.play({slots: 3}).shared > oneSm.SHARED && oneSm.play({}).shared <= oneSm.SHARED")
    free = evaluate("oneSm.play(given[0]).busy", {})
    assert free["loading warps"] > 0.99, "the limit"
    assert total(roles="turn") == pytest.approx(total()) and total(roles="turn", loads=0) < 0.8 * total(loads=0)
    two_in_turn = next(x for x in TRIED["designs"] if x["design"].startswith("the same; two steps in turn"))
    assert f"took {1e6 * two_in_turn['median']:.0f} µs" in page and two_in_turn["spilled_bytes"] == 96


def test_settings_are_in_the_address(evaluate):
    for settings in ALL:
        assert evaluate("oneSm.fromHash('#' + oneSm.toHash(given[0]))", settings | {"first": 7}) == settings | {
            "first": 7
        }
    assert evaluate("oneSm.toHash(oneSm.fromHash('#slots=99&roles=all&wait=x&first=-1&nonsense'))") == "slots=4"
    for page in (EXPLORER / "one_sm.md", EXPLORER / "index.md", ROOT / "docs/ladder/latents.md"):
        for hash_ in re.findall(r"explorer/one_sm\.md#([^)\s]+)\)", page.read_text()):
            settings = evaluate("oneSm.fromHash(given[0])", hash_)
            assert all(str(settings[name]) == value for name, value in (item.split("=") for item in hash_.split("&")))
