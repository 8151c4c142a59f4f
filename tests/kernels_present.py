"""The kernels that this machine can run, as test parameters."""

from contextlib import AbstractContextManager
from dataclasses import dataclass

import pytest
import torch

import fastattn


@dataclass(frozen=True)
class Kernel:
    """A kernel by name, and the types that it is tested in."""

    name: str
    dtypes: tuple[torch.dtype, ...]

    def asked_for(self) -> AbstractContextManager[None]:
        """Ask for this kernel inside a `with` block."""
        return fastattn.use_kernel(self.name)

    def check(self, assertion, *arguments, **options) -> None:
        """Run an assertion; a refusal must say which kernel refuses and why."""
        try:
            assertion(*arguments, **options)
        except NotImplementedError as error:
            assert self.name in str(error) and len(str(error)) > len(self.name) + 20, "a refusal without a reason"
            assert self.name != "cpu", "the CPU kernel computes everything"


def _present() -> list[Kernel]:
    return [Kernel("cpu", (torch.float32, torch.bfloat16, torch.float16))]


each_kernel = pytest.mark.parametrize("kernel", _present(), ids=lambda kernel: kernel.name)
