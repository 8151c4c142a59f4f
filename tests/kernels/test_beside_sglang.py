"""SGLang puts a plain function in the place of `triton.next_power_of_2`: our kernels call none that others replace.

Triton looks up every function that a kernel calls when the kernel is first launched, before it is compiled.
"""

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton", reason="needs Triton")

LOOK_UP = """
import importlib, pkgutil, sys
import triton
from triton.runtime.jit import JITFunction

triton.next_power_of_2 = lambda size: 1 << (size - 1).bit_length()

@triton.jit
def replaced(SIZE: triton.language.constexpr):
    PAD: triton.language.constexpr = triton.next_power_of_2(SIZE)

packages = [importlib.import_module(name) for name in ("fastattn.kernels", "twinattn.engine.kernels")]
modules = [x.name for package in packages for x in pkgutil.walk_packages(package.__path__, f"{package.__name__}.")]
kernels = {
    f"{name}.{what}": value
    for name in modules
    for what, value in vars(importlib.import_module(name)).items()
    if isinstance(value, JITFunction)
}
wrong = []
for name, kernel in {**kernels, "replaced": replaced}.items():
    try:
        kernel.cache_key
    except RuntimeError as error:
        wrong.append(name)
print(len(kernels), *wrong)
"""


def test_kernels_compile_where_a_function_of_triton_is_replaced(tmp_path):
    source = tmp_path / "look_up.py"  # Triton reads the source of a function
    source.write_text(LOOK_UP)
    compiled = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    run = subprocess.run([sys.executable, source], capture_output=True, text=True, env=compiled)
    assert not run.returncode, run.stderr[-2000:]
    count, *wrong = run.stdout.split()
    assert int(count) > 100, "all kernels are looked up"
    assert wrong == ["replaced"], "the one that names triton's function has to be found, and no other"
