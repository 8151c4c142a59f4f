"""The kernels that this machine can run, as test parameters."""

import os
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
            assert self.name not in ("cpu", "triton"), "our own kernels compute everything that they are tested with"


def _present(device: str) -> list[Kernel]:
    if device == "cpu":
        # Under Triton's interpreter our kernels run here too; its `tl.dot` is wrong for bfloat16.
        return [Kernel("cpu", (torch.float32, torch.bfloat16, torch.float16)), Kernel("triton", (torch.float16,))]
    halves = (torch.bfloat16, torch.float16)
    fast = [Kernel(name, halves) for name in ("fa4", "fa2", "torch_flash")]
    return [*fast, Kernel("triton", (*halves, torch.float32))]


each_kernel = pytest.mark.parametrize(
    "kernel", _present(os.environ["TWINATTN_TEST_DEVICE"]), ids=lambda kernel: kernel.name
)
