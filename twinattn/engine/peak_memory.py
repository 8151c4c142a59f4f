"""How much memory a piece of work holds at a time: on a GPU, and on a CPU where Linux keeps a high water mark."""

import ctypes
import gc
import os
from pathlib import Path

import torch


class PeakMemory:
    """Measures the most memory that a `with` block holds at a time, above what was held before it.

    On a GPU that is what torch's allocator says. On a CPU it is the resident memory of the process, by Linux's own high
    water mark, which can be set back; elsewhere `peak_bytes` stays None.
    """

    STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")

    def __init__(self, device: torch.device) -> None:
        self.cuda = device if device.type == "cuda" else None
        self.peak_bytes: int | None = None

    def __enter__(self) -> "PeakMemory":
        gc.collect()
        if self.cuda:
            torch.cuda.reset_peak_memory_stats(self.cuda)
            self.before = torch.cuda.memory_allocated(self.cuda)
        elif os.access(self.CLEAR, os.W_OK):
            # Return freed memory first, or the second twin would reuse what the first has freed.
            getattr(ctypes.CDLL(None), "malloc_trim", id)(0)
            self.CLEAR.write_text("5")  # the high water mark is what is resident now
            self.before = self._high_water_mark()
        return self

    def __exit__(self, *_: object) -> None:
        if self.cuda:
            self.peak_bytes = torch.cuda.max_memory_allocated(self.cuda) - self.before
        elif os.access(self.CLEAR, os.W_OK):
            self.peak_bytes = self._high_water_mark() - self.before

    def _high_water_mark(self) -> int:
        line = next(line for line in self.STATUS.read_text().splitlines() if line.startswith("VmHWM"))
        return int(line.split()[1]) * 1024
