"""Measure times and the ceilings of a machine, and describe the machine.

On a CPU the contenders of a row take turns, call by call, so that whatever else the machine does slows all of them.
On a GPU they take turns in rounds (`triton.testing`): as replays of a CUDA graph, or, if one of a row cannot be
captured, call by call between events, with the cache flushed before each (`clocks`). If a row's inputs fit into the
cache, calls alternate between several sets of inputs.
"""

import math
import os
import platform
import random
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from fastattn.kernels.device import package_version
from twinattn.kit.field import processor

Call = Callable[..., Any]  # without arguments, or with `return_lse`

MOST_SAMPLES = 200  # samples per call; more don't move the median
FEWEST_SAMPLES = 3  # samples per call on a CPU, however long it takes
FEW_SAMPLES = 5  # samples of a call that measures its own time
WARM_UP = 0.25  # seconds, after which a GPU's clock is the one that it can hold for what it computes
CACHES = 3  # the input sets of a row together are at least this many times the last-level cache
PACKAGES = (
    "twinattn",
    "torch",
    "triton",
    "numpy",
    "flash-attn",
    "flash-attn-3",
    "flash-attn-4",
    "vllm",
    "sglang",
    "sglang-kernel",
    "flashinfer-python",
    "sgl-flash-mla",
    "transformers",
)


class Timing(NamedTuple):
    """How long a call takes, in seconds: the median, and between what a fifth and four fifths of the samples lie."""

    median: float
    low: float
    high: float


class Timed(NamedTuple):
    """The answer of a call that looks at the clock itself, because only a part of it is to be timed."""

    answer: Any
    seconds: float


class Ceilings(NamedTuple):
    """What a machine reaches at best, measured in the same run; nothing says that a kernel cannot pass them.

    Attributes:
        copy: bytes per second, read and written, by a copy.
        product: operations per second of a matrix product.
        read: bytes per second of memory that is read, and hardly any written; at least those of the copy.
    """

    copy: float
    product: float
    read: float

    def seconds(self, *, reads: int, writes: int) -> float:
        """Return how long bytes take: those read and as many written as in a copy, further ones read as in a sum."""
        copied = min(reads, writes) + writes
        return copied / self.copy + max(reads - writes, 0) / self.read


def take_turns(calls: dict[str, Sequence[Call]], *, seconds: float) -> dict[str, Timing]:
    """Time the contenders of a row on a CPU, in turns. A step's layers after its first one are timed, which are most.

    Args:
        calls: of each contender the same call over each set of inputs.
        seconds: the time that each may use, or what three calls take if that is more.

    Returns:
        The timing of each.
    """
    samples: dict[str, list[float]] = {name: [] for name in calls}
    turn = 0
    for each in calls.values():
        for call in each:
            call()  # the first call with a plan is checked, and later ones replay it
    while True:
        waiting = [
            name
            for name, taken in samples.items()
            if len(taken) < FEWEST_SAMPLES or (sum(taken) < seconds and len(taken) < MOST_SAMPLES)
        ]
        if not waiting:
            return {name: summarize(taken) for name, taken in samples.items()}
        random.shuffle(waiting)  # or the same one would always come behind the one that leaves the caches worst
        for name in waiting:
            turn += 1  # never the inputs that the one before has just brought into the cache
            samples[name].append(_seconds(calls[name][turn % len(calls[name])]))


def on_gpu(calls: Sequence[Call], *, clock: str, milliseconds: int) -> list[float]:
    """Time one contender on a GPU, after it has run for a while.

    Args:
        calls: the same call over each set of inputs.
        clock: "events" (one call at a time, the cache flushed before it), "graph" (replays of a CUDA graph of all the
            calls), "host" (until the call comes back, whatever the GPU has left to do) or "own" (the call's, see
            `Timed`).
        milliseconds: how long to measure.

    Returns:
        The seconds of single calls.
    """
    from triton import testing

    if clock == "own":
        calls[0]()  # the first call was to be judged, the second may record what later ones replay
        return _on_host(calls[0], FEW_SAMPLES)
    if clock == "host":
        return _on_host(calls[0], MOST_SAMPLES)
    _warm_up(calls)
    if clock == "events":
        return [1e-3 * taken for taken in testing.do_bench(calls[0], rep=milliseconds, return_mode="all")]
    taken = testing.do_bench_cudagraph(lambda: [call() for call in calls], rep=milliseconds, return_mode="all")
    return [1e-3 * one / len(calls) for one in taken]


def launches(call: Call) -> Counter[str]:
    """Count the kernels, copies and fills that a call launches on a GPU, by name.

    Args:
        call: it is made once before, for what a first call compiles and finds out.
    """
    from torch.profiler import ProfilerActivity, profile

    call()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        call()
        torch.cuda.synchronize()
    return Counter(event.name for event in profiler.events() or () if event.device_type.name == "CUDA")


def ceilings(device: torch.device, dtype: torch.dtype, *, quick: bool) -> Ceilings:
    """Measure what the device reaches, over memory much larger than its caches, and in a product of random numbers."""
    cpu = device.type == "cpu"
    size = (2**25 if quick else 2**28) if cpu else 2**32
    source = torch.ones(size // 4, device=device)
    target = torch.full_like(source, 2)
    n = (1024 if quick else 2048) if cpu else 8192
    a, b = (torch.randn(n, n, device=device).to(dtype) for _ in range(2))
    calls: dict[str, Call] = {"copy": lambda: target.copy_(source), "product": lambda: a @ b}
    reads = _reads(source)
    for name, read in reads.items():
        total = float(read().sum())
        if not math.isclose(total, source.numel(), rel_tol=1e-6):
            raise RuntimeError(f"{name}: expected a sum of {source.numel()}, got {total}")
    if cpu:
        times = take_turns({name: [call] for name, call in (calls | reads).items()}, seconds=0.2 if quick else 1.5)
    else:  # replays for what reads: to flush the cache leaves it full of what has to be written back first. Not for the
        # copy, which a recording hands to another engine of the GPU, at two thirds of the speed.
        times = {name: summarize(on_gpu([call], clock="events", milliseconds=100)) for name, call in calls.items()}
        times |= {name: summarize(on_gpu([call], clock="graph", milliseconds=100)) for name, call in reads.items()}
    copied = 2 * size / times["copy"].low  # undisturbed
    summed = max(size / times[name].low for name in reads)
    # A CPU may copy more than it adds up; the lower of two roofs would be passed.
    return Ceilings(copy=copied, product=2 * n**3 / times["product"].low, read=max(copied, summed))


def _reads(source: torch.Tensor) -> dict[str, Call]:
    """Return ways to read numbers and write next to nothing: a sum by torch, on a GPU also by kernels of ours."""
    reads: dict[str, Call] = {"read by torch.sum": source.sum}
    if source.is_cuda:
        from twinattn.bench import reading

        reads |= {f"read by {shape}": partial(reading.sums, source, shape) for shape in reading.SHAPES}
    return reads


def input_sets(device: torch.device, bytes_of_one: int) -> int:
    """Return how many sets of inputs together no longer fit into the cache."""
    if device.type == "cuda":
        cache = torch.cuda.get_device_properties(device).L2_cache_size
    else:
        sizes = (path.read_text().strip() for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"))
        cache = max((int(size.removesuffix("K")) * 1024 for size in sizes if size.endswith("K")), default=2**25)
    return max(1, min(64, -(-CACHES * cache // bytes_of_one)))


def machine(device: torch.device) -> dict[str, Any]:
    """Describe the hardware."""
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        return {
            "name": properties.name,
            "capability": f"{properties.major}.{properties.minor}",
            "multiprocessors": properties.multi_processor_count,
            "memory_bytes": properties.total_memory,
        }
    return {
        "name": processor(),
        "cores": torch.get_num_threads(),
        "vector_instructions": torch.backends.cpu.get_cpu_capability(),
    }


def circumstances() -> dict[str, Any]:
    """Return the date, the commit and the versions of a measurement."""
    versions = {"python": platform.python_version(), "cuda": torch.version.cuda}
    versions |= {package: package_version(package) for package in PACKAGES}
    return {"date": datetime.now(UTC).isoformat(timespec="seconds"), "commit": _commit(), "versions": versions}


def all_cores() -> int:
    """Count the cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _warm_up(calls: Sequence[Call]) -> None:
    end = time.perf_counter() + WARM_UP
    while time.perf_counter() < end:
        for call in calls:
            call()
        torch.cuda.synchronize()


def _on_host(call: Call, count: int) -> list[float]:
    samples = []
    for _ in range(count):
        torch.cuda.synchronize()  # or a full queue would make the host wait
        samples.append(_seconds(call))
    torch.cuda.synchronize()
    return samples


def _seconds(call: Call) -> float:
    start = time.perf_counter()
    answer = call()
    return answer.seconds if isinstance(answer, Timed) else time.perf_counter() - start


def summarize(samples: Sequence[float]) -> Timing:
    """Return the median of some seconds, and between what three fifths of them lie."""
    quantiles = torch.tensor([0.5, 0.2, 0.8], dtype=torch.float64)
    return Timing(*torch.tensor(samples, dtype=torch.float64).quantile(quantiles).tolist())


def _commit() -> str | None:
    """Name the commit, with `-dirty` after it if files have changed since; None outside a clone."""
    try:
        command = ["git", "describe", "--always", "--dirty", "--abbrev=12"]
        return subprocess.run(
            command, cwd=Path(__file__).parent, capture_output=True, text=True, check=True
        ).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None
