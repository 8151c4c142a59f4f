"""What the host makes is on the CPU, whatever default device a user of PyTorch has set."""

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
T = TypeVar("T")


def cpu_by_default(function: Callable[P, T]) -> Callable[P, T]:
    """Make tensors on the CPU where no device is named, whatever `torch.set_default_device` says."""

    @wraps(function)
    def call(*args: P.args, **options: P.kwargs) -> T:
        if torch.get_default_device().type == "cpu":
            return function(*args, **options)
        with torch.device("cpu"):
            return function(*args, **options)

    return call
