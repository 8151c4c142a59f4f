"""Our GPU kernels go through the compiler and fit into the shared memory of GPUs that this machine need not have."""

import importlib
import json
import os
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest
from compile_kernels import SHARED_MEMORY

import fastattn.kernels


def launched() -> set[str]:
    """Name all kernels: the jitted functions whose names end so; helpers are compiled with what calls them."""
    modules = [
        importlib.import_module(m.name) for m in pkgutil.iter_modules(fastattn.kernels.__path__, "fastattn.kernels.")
    ]
    return {
        f"{m.__name__}.{name}"
        for m in modules
        for name, value in vars(m).items()
        if name.endswith("_kernel") and "triton" in type(value).__module__
    }


@pytest.mark.parametrize("capability", [(8, 9), (9, 0)], ids=str)
def test_all_kernels_compile_and_fit(capability):
    script = Path(__file__).with_name("compile_kernels.py")
    command = [sys.executable, str(script), ".".join(map(str, capability))]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    run = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert run.returncode == 0, run.stderr
    compiled = [json.loads(line) for line in run.stdout.splitlines()]
    assert launched() <= {found["kernel"] for found in compiled}
    assert max(found["shared"] for found in compiled) <= SHARED_MEMORY[capability]
