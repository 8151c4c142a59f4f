"""What a kernel asks of the machine; the answers don't change, and a path asks before every launch."""

from functools import cache
from importlib.util import find_spec

import torch


@cache
def installed(module: str) -> bool:
    """Say whether a module can be imported, without importing it (but for the packages it lies in)."""
    package = module.rpartition(".")[0]
    return (not package or installed(package)) and find_spec(module) is not None


@cache
def capability(device: torch.device) -> tuple[int, int]:
    """Give the compute capability of a CUDA device, (9, 0) for Hopper."""
    return torch.cuda.get_device_capability(device)


@cache
def num_multiprocessors(device: torch.device) -> int:
    """Give the number of multiprocessors of a CUDA device."""
    return torch.cuda.get_device_properties(device).multi_processor_count
