"""A stand-in for a CUDA graph that repeats launches: operations of PyTorch, and kernels in Triton's interpreter.

`tape.Tape` repeats a path as a whole. Here its Python is not repeated, either: a launch has the grid, the numbers and
the memory that it was recorded with.
"""

import torch
from triton.runtime import interpreter

from tests.helpers.tape import Tape

READS = (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default)


class Recording(Tape):
    """Records launches while it is entered, and fails where the host would wait for a device."""

    @property
    def launches(self):
        """How many launches of kernels were recorded."""
        return sum(bool(args) and isinstance(args[0], interpreter.GridExecutor) for _, args, _, _ in self.calls)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert self.inside or func not in READS, f"{func} waits for the device"
        return super().__torch_dispatch__(func, types, args, kwargs)


def record_launches(monkeypatch) -> None:
    """Let a `Recording` that is entered note each launch."""
    launch = interpreter.GridExecutor.__call__

    def noted(self, *args, **kwargs):
        recording = Tape.current
        if recording is None:
            return launch(self, *args, **kwargs)
        return recording.record(launch, (self, *args), kwargs)

    monkeypatch.setattr(interpreter.GridExecutor, "__call__", noted)
