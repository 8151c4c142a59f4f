"""The calculator of docs/ladder/sm.md runs in V8: it counts programs per SM as the ladder does on a GPU."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from py_mini_racer import MiniRacer

from twinattn.course import ladder

ROOT = Path(__file__).parent.parent.parent
H200 = 3
MEASURED = json.loads((ROOT / "docs/results/ladder/cuda-nvidia-h200.json").read_text())
KERNELS = {
    f"{rung['name']}-{kernel['kernel']}": kernel
    for rung in MEASURED["batches"][0]["rungs"]
    for kernel in rung["kernels"]
}


@pytest.fixture(scope="module")
def evaluate():
    with MiniRacer() as racer:
        racer.eval((ROOT / "docs/ladder/sm.js").read_text())

        def call(expression: str, *given: Any) -> Any:
            return json.loads(racer.eval(f"JSON.stringify(((given) => {expression})({json.dumps(given)}))"))

        yield call


@pytest.mark.parametrize("name", KERNELS)
def test_an_sm_has_room_for_as_many_programs_as_on_the_gpu_that_was_measured(evaluate, name):
    kernel = KERNELS[name]
    takes = dict(gpu=H200, registers=kernel["registers"], warps=kernel["warps"], shared=kernel["shared_bytes"])
    assert evaluate("sm.launch(sm.legal(given[0])).perSm", takes) == kernel["programs_per_sm"]


def test_each_budget_is_counted_as_the_ladder_counts_it(evaluate, monkeypatch):
    gpu = evaluate("sm.GPUS[given[0]]", H200)
    has = SimpleNamespace(
        shared_memory_per_multiprocessor=gpu["shared"], max_threads_per_multi_processor=gpu["threads"]
    )
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: has)
    found = set()
    for registers in range(16, 256, 7):
        for warps in (1, 2, 4, 8, 16):
            for shared in (0, 1, 1024, 37888, 99 * 1024, 227 * 1024):
                metadata = SimpleNamespace(name="attend", num_warps=warps, num_stages=1, shared=shared)
                kernel: Any = SimpleNamespace(metadata=metadata, n_regs=registers, n_spills=0)
                expected = ladder._describe(kernel, torch.device("cuda"))["programs_per_sm"]
                takes = dict(gpu=H200, registers=registers, warps=warps, shared=shared)
                launch = evaluate("sm.launch(sm.legal(given[0]))", takes)
                assert launch["perSm"] == expected, takes
                found |= {*launch["limits"]}
    assert found == {"registers", "shared", "threads", "programs"}


def test_waves_hold_all_programs(evaluate):
    for launched in (1, 8, 131, 132, 792, 793, 800, 99999):
        found = evaluate("sm.launch(sm.legal(given[0]))", dict(launched=launched))
        assert (found["waves"] - 1) * found["atOnce"] + found["last"] == launched
        assert 0 < found["last"] <= found["atOnce"] and 0 < found["busy"] <= 1


def test_what_does_not_fit_has_no_waves(evaluate):
    found = evaluate("sm.launch(sm.legal(given[0]))", dict(gpu=1, shared=100 * 1024))
    assert (found["perSm"], found["waves"], found["limits"]) == (0, 0, ["shared"])


def test_settings_survive_the_address(evaluate):
    settings = dict(gpu=1, registers=255, warps=8, shared=1, launched=3, latency=500)
    assert evaluate("sm.fromHash('#' + sm.toHash(given[0]))", settings) == settings
    assert evaluate("sm.toHash(sm.legal({}))") == ""
    assert evaluate("sm.fromHash('#registers=9999&nobody=3&warps=x')") == evaluate("sm.legal({registers: 255})")


def test_the_page_says_what_the_calculator_says(evaluate):
    page = " ".join((ROOT / "docs/ladder/sm.md").read_text().split())
    assert "25 KB per SM" in page and round(evaluate("sm.launch(sm.legal({})).needed") / 1000) == 25
    assert "5.5 KB per SM" in page and round(evaluate("sm.launch(sm.legal({gpu: 1})).needed") / 1000, 1) == 5.5
    assert "512 of 792, in one wave: 65 %" in page and round(100 * evaluate("sm.launch(sm.legal({})).busy")) == 65
    assert evaluate("sm.launch(sm.legal({launched: 1024})).last") == 232 and "the second has 232" in page
    for gpu, kilobytes in ((0, 81), (1, 49)):
        fits, no_more = (dict(gpu=gpu, registers=32, shared=shared * 1024) for shared in (kilobytes, kilobytes + 1))
        assert evaluate("sm.launch(sm.legal(given[0])).perSm", fits) == 2 and f"{kilobytes} KB" in page
        assert evaluate("sm.launch(sm.legal(given[0])).perSm", no_more) == 1
