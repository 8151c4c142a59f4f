"""Schedules: how a package shares out the work of a step, made from its lengths once for all layers."""

import ctypes
from collections.abc import Callable, Hashable
from typing import Any

import torch

from fastattn.kernels.replay import memo_of
from refattn.plan import Plan

UNKNOWN = object()
MOST_OF_SIZES = 256  # schedules that no length changes; with one more, all are forgotten

_of_sizes: dict[Hashable, Any] = {}


def schedule_of(plan: Plan, name: Hashable, make: Callable[[], Any]) -> Any:
    """Return the schedule in the memo of a plan, or make one and store it there.

    The lengths of a plan may be advanced in place, and a captured graph is replayed with others: a schedule is that of
    one version of the lengths, and one that a graph has made is used in that graph only. Streams share none, as a call
    may count in it what is done.

    Args:
        plan: the lengths.
        name: whose schedule it is, and all that it depends on besides the plan.
        make: launches what makes it.
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
    """Return a schedule that no length changes, for the stream or the capture that is under way, or make one.

    Args:
        name: whose schedule it is, and all that it depends on.
        make: launches what makes it, now or with the first call.
    """
    where = where_called()
    if where is UNKNOWN:
        return make()
    if len(_of_sizes) >= MOST_OF_SIZES:
        _of_sizes.clear()
    known = _of_sizes.get((name, where), UNKNOWN)
    if known is UNKNOWN:  # and not looked up again: another thread may forget all
        known = _of_sizes[name, where] = make()
    return known


def where_called() -> Hashable:
    """Return the stream, or the capture that is under way; `UNKNOWN` for one that can't be told from others.

    What one of them makes of a plan belongs to it: another stream would read it too early, and the memory of a graph is
    the graph's, whatever becomes of the plan.
    """
    if not torch.cuda.is_available():
        return None
    if not torch.cuda.is_current_stream_capturing():
        return torch.cuda.current_stream().cuda_stream
    capture = _capture()
    return UNKNOWN if capture is None else capture


def _capture() -> tuple[str, int] | None:
    """Return what tells the capture that is under way from all others of the process; None if the driver is silent."""
    status, number = ctypes.c_int(), ctypes.c_uint64()
    stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
    try:
        ask = ctypes.CDLL("libcuda.so.1").cuStreamGetCaptureInfo_v2
    except (OSError, AttributeError):
        return None
    error = ask(stream, ctypes.byref(status), ctypes.byref(number), None, None, None)
    return None if error or not number.value else ("capture", number.value)
