"""Schedules of packages: how the work of a step is divided over SMs, made from its lengths once for all layers."""

import ctypes
from collections.abc import Callable, Hashable
from typing import Any

import torch

from fastattn.kernels.replay import memo_of
from refattn.plan import Plan
from refattn.states import StatePlan

UNKNOWN = object()
MOST_OF_SIZES = 256  # schedules by sizes alone; one more clears all

_of_sizes: dict[Hashable, Any] = {}


def schedule_of(plan: Plan | StatePlan, name: Hashable, make: Callable[[], Any]) -> Any:
    """Return the schedule in the memo of a plan, or make one and store it there.

    The lengths of a plan may be advanced in place, and a captured graph is replayed with others. So a schedule belongs
    to one version of the lengths, and one made in a graph is used in that graph only. Streams share none, as a call may
    count finished tiles in it.

    Args:
        plan: the lengths.
        name: the name of the kernel, and all that the schedule depends on besides the plan.
        make: makes it by a launch.
    """
    lengths = plan.batch.cu_seqlens_q, plan.batch.seq_lens
    where = where_called()
    if where is UNKNOWN:
        return make()
    if any(x.is_inference() for x in lengths):  # inference tensors do not count their versions
        return make()
    version = tuple(x._version for x in lengths)
    schedules = memo_of(plan).schedules
    known = schedules.get((name, where))
    if known is None or known[0] != version:
        known = schedules[name, where] = (version, make())
    return known[1]


def schedule_of_sizes(name: Hashable, make: Callable[[], Any]) -> Any:
    """Return a schedule that depends on sizes alone, for the current stream or graph capture, or make one.

    Args:
        name: the name of the kernel, and all that the schedule depends on.
        make: makes it by a launch, now or with the first call.
    """
    where = where_called()
    if where is UNKNOWN:
        return make()
    if len(_of_sizes) >= MOST_OF_SIZES:
        _of_sizes.clear()
    known = _of_sizes.get((name, where), UNKNOWN)
    if known is UNKNOWN:  # not looked up again: another thread may clear all
        known = _of_sizes[name, where] = make()
    return known


def where_called() -> Hashable:
    """Return the current stream or graph capture; `UNKNOWN` for a capture that can't be told from others.

    What is made of a plan in one of them belongs to it: another stream would read it too early, and memory that a graph
    has allocated belongs to the graph, even if the plan outlives it.
    """
    if not torch.cuda.is_available():
        return None
    if not torch.cuda.is_current_stream_capturing():
        return torch.cuda.current_stream().cuda_stream
    capture = _capture()
    return UNKNOWN if capture is None else capture


def _capture() -> tuple[str, int] | None:
    """Return an id of the current capture, unique in the process; None if the driver gives none."""
    status, number = ctypes.c_int(), ctypes.c_uint64()
    stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
    try:
        ask = ctypes.CDLL("libcuda.so.1").cuStreamGetCaptureInfo_v2
    except (OSError, AttributeError):
        return None
    error = ask(stream, ctypes.byref(status), ctypes.byref(number), None, None, None)
    return None if error or not number.value else ("capture", number.value)
