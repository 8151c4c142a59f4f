"""Our kernels go through the compiler for GPUs that this machine need not have, and fit into them."""

import importlib
import json
import os
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import fastattn.kernels
import twinattn.engine.kernels
from fastattn.kernels import device as devices
from tests.helpers.launched import LAUNCHED

ROOT = Path(__file__).parent.parent.parent
# Kernels with strides in a tuple of a NamedTuple that has no other constant: behind an `if` Triton 3.6 forgets those
# that are 1. These have run on a GPU with it.
STRIDES_ALONE = {
    *("flash.states._gather_kernel", "flash.states._scatter_kernel", "fused_layers._qk_norm_rope_kernel"),
    *("sampling._bisect_kernel", "sampling._cut_kernel", "sampling._draw_kernel", "sampling._sum_kernel"),
    *("triton.cache._quantize_kernel", "triton.cache._write_kernel", "triton.cache._write_packed_kernel"),
    *("triton.convolution._convolve_kernel", "triton.convolution._keep_inputs_kernel", "triton.merge._merge_kernel"),
    *("triton.chunks._chunks_kernel", "triton.chunks_hopper._fold_kernel", "triton.recurrent._tokens_kernel"),
    *("triton.replay._decode_kernel", "triton.replay._flush_kernel", "triton.replay._step_kernel"),
}


def our_kernels() -> set[str]:
    """Name all kernels, the jitted functions that are launched; helpers are compiled with what calls them."""
    folders = fastattn.kernels, twinattn.engine.kernels
    names = [m.name for x in folders for m in pkgutil.walk_packages(x.__path__, f"{x.__name__}.")]
    modules = [importlib.import_module(name) for name in names]
    return {
        f"{m.__name__}.{name}"
        for m in modules
        for name, value in vars(m).items()
        if "triton" in type(value).__module__ and getattr(getattr(value, "fn", None), "__module__", "") == m.__name__
        if name.endswith("_kernel") or name in LAUNCHED
    }


def launches(gpu: str, *options: str) -> list[dict]:
    """Return the launches for a GPU: the kernel, its tile, its memory, and of decodes the registers."""
    command = [sys.executable, "-m", "tests.helpers.compile_kernels", gpu, *options]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    run = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT)
    assert run.returncode == 0, run.stderr
    return [json.loads(line) for line in run.stdout.splitlines()]


@pytest.mark.parametrize("ladder", ["prefill", "latents", "states"])
def test_the_rungs_of_a_ladder_compile_for_hopper_as_its_page_says(ladder):
    """What the page shows of rungs that were not timed is what the compiler says, by the Triton that it names."""
    stored = json.loads((ROOT / f"docs/results/ladder/compiled/{ladder}-sm_90.json").read_text())
    command = [sys.executable, "-m", "tests.helpers.compile_rungs", ladder, "sm_90"]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    run = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT)
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout)
    assert found["rungs"].keys() == stored["rungs"].keys()
    for name, rung in found["rungs"].items():
        assert rung["programs_per_sm"] >= 1, name
        assert not rung["spills"] or stored["rungs"][name]["spills"], name
    if found["versions"] == stored["versions"]:
        assert found["rungs"] == stored["rungs"]


@pytest.mark.parametrize("gpu", ["sm_80", "sm_90", "sm_100", "sm_120", "gfx942", "gfx950"])
def test_every_kernel_compiles_and_fits_with_the_tiles_that_are_chosen_for_a_gpu(gpu, request):
    """`make compile` takes every launch for each GPU; otherwise it is the largest ones for one."""
    every_launch = request.config.getoption("--every-gpu")
    if not every_launch and gpu != "sm_90":
        pytest.skip("two minutes for each GPU: make compile")
    launched = launches(gpu, *([] if every_launch else ["--largest"]))
    of_hopper = {name for name in our_kernels() if "_hopper." in name}
    assert {launch["kernel"] for launch in launched} == our_kernels() - (set() if gpu == "sm_90" else of_hopper)
    assert not [launch for launch in launched if launch["shared"] > launch["room"]], "more shared memory than there is"
    assert not [launch for launch in launched if launch["columns"] > 512], "more tensor memory than there is"
    forgotten = {launch["kernel"].partition(".kernels.")[2] for launch in launched if launch["forgotten"]}
    assert forgotten <= STRIDES_ALONE, "a NamedTuple with strides in a tuple has no other constant"
    decodes = [
        launch
        for launch in launched
        if "registers" in launch and launch["tile"].get("TILE.ROWS", launch["tile"].get("BLOCK_M", 0)) <= 16
        if ".triton.chunks." not in launch["kernel"]  # which come along with `chunks_hopper`, and spill some
    ]
    assert len(decodes) > (10 if every_launch else 6)
    assert not [launch for launch in decodes if launch["spilled"]], "registers in memory"
    if gpu != "sm_90":
        return  # the tile of 64 rows over latents and the mask of a tree were looked at for this one
    over_latents = [
        x
        for x in launched
        if "registers" in x and x["tile"].get("keys.HEAD_SIZE") == 576 and x["tile"].get("TILE.ROWS") == 64
    ]
    assert over_latents and not [x for x in over_latents if x["spilled"] > 256], "more than what lies beside the loop"
    with_roles = [launch for launch in launched if "registers" in launch and launch["kernel"] in of_hopper]
    # A window with sinks has most, 80 bytes, and none of it in a loop of steps, by its machine code.
    assert with_roles and not [x for x in with_roles if x["spilled"] > 80], "more than what lies beside the loop"
    of_states = [launch for launch in with_roles if launch["kernel"].endswith("chunks_hopper._fold_kernel")]
    assert len(of_states) == 2 and all(len(launch["in_flight"]) > 1 for launch in of_states), "one loop, and two"
    assert not [launch for launch in of_states if any(launch["in_flight"])], "registers of a product that goes on"
    assert all(launch["early"] and launch["waits"] for launch in of_states), "it begins early, and waits"
    first_of_states = [launch for launch in launched if launch["kernel"].endswith("chunks._within_kernel")]
    assert not [launch for launch in first_of_states if launch["early"]], "what is before it may be another's launch"
    assert not [launch for launch in of_states if launch["spilled"]], "registers in memory"
    of_trees = [launch for launch in launched if "registers" in launch and launch["tile"].get("mask.WORDS")]
    assert of_trees and not [launch for launch in of_trees if launch["spilled"]], "the mask of a tree in memory"
    if gpu == "sm_90":
        prefix, own, merge = launched[:3]  # those of a cascade
        assert prefix["kernel"] == own["kernel"] != merge["kernel"]
        shared, alone = (-(-level["registers"] // 8) * 8 * level["threads"] for level in (prefix, own))
        assert shared + alone <= 2**16, "no room for a program of one level beside one of the other"
        assert 3 * alone <= 2**16, "and none for three of the other, when the first level is done"


def test_the_number_of_an_amd_architecture_is_no_compute_capability(monkeypatch, forget_choices):
    """PyTorch reports (9, 4) for gfx942, which is more than (9, 0), and none of NVIDIA's instructions is there."""
    from fastattn.kernels.flash import fa2, fa3, fa4, flash_mla
    from fastattn.kernels.problem import Problem
    from fastattn.kernels.triton import launch
    from fastattn.kernels.triton import tuning as tile

    gpu = torch.device("cuda", 7)
    properties = type("Properties", (), {"shared_memory_per_block": 65536, "multi_processor_count": 304})
    monkeypatch.setattr(torch.version, "hip", "6.4")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 4))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(tile, "INTERPRETED", False)
    monkeypatch.setattr(launch, "INTERPRETED", False)
    asked = (devices.capability, devices.shared_memory, devices.is_rocm, devices.num_sms)
    for question in asked:
        question.cache_clear()
    try:
        assert not launch.can_overlap(gpu) and not launch.converts_fp8(gpu) and not tile.keeps_values_twice(gpu)
        assert devices.shared_memory(gpu) == 65536
        problem = Problem("attend", gpu, torch.bfloat16, "pages", 1, False, 8, 8, 128, 128, 16, 1, 100, 2, (-1, 0))
        assert all(kernel.unsupported_reason(problem) for kernel in (fa2, fa3, fa4, flash_mla, fa2.TORCH_FLASH))
        assert "compute capability" not in (fastattn.kernels.triton.unsupported_reason(problem) or "")
    finally:
        monkeypatch.undo()
        for question in asked:
            question.cache_clear()
