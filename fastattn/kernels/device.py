"""Properties of the machine that kernels depend on, looked up once and cached."""

import importlib
import sys
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from torch.torch_version import TorchVersion


@cache
def cannot_import(module: str, package: str, *names: str) -> str | None:
    """Return why a module of a package can't be used, or None: it is not installed, broken, or of another package.

    A folder of another package is importable, too: `flash_attn`, for example, where only flash-attn-4 is installed.

    Args:
        module: the module to import.
        package: the package that has to be installed for it.
        names: names that have to be in the module.
    """
    try:
        found = importlib.import_module(module)
    except (ImportError, OSError) as error:
        return f"the package {package} can't be imported: {error}"
    if found.__name__.startswith("twinattn."):  # ours, under its name: it would call itself
        return f"the package {package} can't be imported: {found.__name__} has taken its name"
    missing = [name for name in names if not hasattr(found, name)]
    if missing:
        return f"the package {package} can't be imported: the module {module} that is here has no {', '.join(missing)}"
    return None


def package_version(package: str) -> str | None:
    """Return the version of a package from its metadata, else from its module; None if there is none."""
    try:
        return version(package)
    except PackageNotFoundError:  # a build that is not installed may still be found and imported
        module = package.replace("-", "_")
        return None if cannot_import(module, package) else getattr(sys.modules[module], "__version__", None)


def on_gpu(device: torch.device) -> AbstractContextManager[None]:
    """Make a GPU the current one, which launches, streams and events belong to; do nothing for other devices."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


@cache
def cannot_interpret() -> str | None:
    """Return why Triton's interpreter can't run here, or None: that of Triton 3.6 needs a numpy older than 2.4."""
    triton, numpy = (TorchVersion(package_version(name)) for name in ("triton", "numpy"))
    if triton < "3.7" and numpy >= "2.4":
        return "the interpreter of Triton 3.6 fails with numpy 2.4 or later: install numpy<2.4, or Triton 3.7"
    if triton >= "3.9":
        _fix_masks()
    return None


def _fix_masks() -> None:
    """Make a comparison of two scalars a mask in Triton's interpreter, as it is where kernels are compiled.

    The interpreter gives `mask & (a < b)` the integer type of `a`: a comparison keeps the type of its operands, and is
    broadcast to a block in that type. Triton 3.9 refuses such a mask; earlier versions take it.
    """
    import numpy as np
    from triton.runtime import interpreter

    def create_splat(self: Any, block_type: Any, scalar: Any) -> Any:
        dtype = interpreter._get_np_dtype(block_type.scalar)
        return interpreter.TensorHandle(np.full(block_type.shape, scalar.data, dtype), block_type.scalar)

    interpreter.InterpreterBuilder.create_splat = create_splat


@cache
def is_rocm() -> bool:
    """Return whether PyTorch's "cuda" devices are AMD GPUs."""
    return torch.version.hip is not None


@cache
def capability(device: torch.device) -> tuple[int, int]:
    """Return the compute capability of a CUDA device, (9, 0) for Hopper; (0, 0) for AMD GPUs and CPUs, without one.

    PyTorch returns the number of the architecture there, (9, 4) for gfx942, which says nothing about instructions.
    """
    return (0, 0) if is_rocm() or device.type != "cuda" else torch.cuda.get_device_capability(device)


@cache
def shared_memory(device: torch.device) -> int:
    """Return the bytes of shared memory that a program may have on a CUDA device.

    This is the opt-in limit where torch reports one, else the default limit. An AMD GPU has no opt-in limit.
    """
    about = torch.cuda.get_device_properties(device)
    optional = 0 if is_rocm() else getattr(about, "shared_memory_per_block_optin", 0)
    return optional or getattr(about, "shared_memory_per_block", 48 * 1024)


@cache
def num_sms(device: torch.device) -> int:
    """Return the number of SMs of a CUDA device."""
    return torch.cuda.get_device_properties(device).multi_processor_count
