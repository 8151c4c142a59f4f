"""Our kernels go through the compiler for GPUs that this machine need not have, and fit into them."""

import importlib
import json
import os
import pkgutil
import subprocess
import sys
from pathlib import Path

import fastattn.kernels


def our_kernels() -> set[str]:
    """Name all kernels: the jitted functions whose names end so; helpers are compiled with what calls them."""
    modules = [
        importlib.import_module(m.name) for m in pkgutil.walk_packages(fastattn.kernels.__path__, "fastattn.kernels.")
    ]
    return {
        f"{m.__name__}.{name}"
        for m in modules
        for name, value in vars(m).items()
        if name.endswith("_kernel") and "triton" in type(value).__module__
    }


def launches(capability: str) -> list[dict]:
    """Return all launches for a GPU: the kernel, its registers and threads. Triton refuses too much shared memory."""
    script = Path(__file__).with_name("compile_kernels.py")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    run = subprocess.run(
        [sys.executable, str(script), capability], capture_output=True, text=True, check=False, env=environment
    )
    assert run.returncode == 0, run.stderr
    return [json.loads(line) for line in run.stdout.splitlines()]


def test_all_kernels_compile_and_fit_into_a_small_gpu():
    assert {launch["kernel"] for launch in launches("8.9")} == our_kernels()


def test_all_kernels_compile_for_hopper_and_levels_of_a_cascade_fit_beside_each_other():
    launched = launches("9.0")
    assert {launch["kernel"] for launch in launched} == our_kernels()
    prefix, own, merge = launched[:3]  # those of a cascade
    assert prefix["kernel"] == own["kernel"] != merge["kernel"]
    shared, alone = (-(-level["registers"] // 8) * 8 * level["threads"] for level in (prefix, own))
    assert shared + alone <= 2**16, "a multiprocessor has no room for a program of one level beside one of the other"
    assert 3 * alone <= 2**16, "and none for three of the other, when the first level is done"
