"""Global state of a process: a call that changes any of it silently changes later computations.

A check first sets all of it to unusual values, and restores it afterwards: a change that an earlier call had made
already would otherwise go unnoticed.
"""

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from twinattn.kit.property import Broken

SEED = 90_517  # unlikely to be set by a kernel
TINY = 1e-40  # a subnormal number of float32


def flushes() -> bool:
    """Return whether subnormal results are flushed to 0."""
    return not float(torch.tensor(TINY) * torch.tensor(1.0))


KNOWN: dict[str, tuple[Callable[[], Any], Callable[[Any], Any], Any]] = {  # getter, setter, unusual value
    "the random numbers of torch": (
        torch.get_rng_state,
        torch.set_rng_state,
        torch.Generator().manual_seed(SEED).get_state(),
    ),
    "the random numbers of Python": (random.getstate, random.setstate, random.Random(SEED).getstate()),
    "the default type": (torch.get_default_dtype, torch.set_default_dtype, torch.float32),
    "the flush of numbers near 0": (flushes, torch.set_flush_denormal, False),
    "the number of threads": (torch.get_num_threads, torch.set_num_threads, 2),
    "whether gradients are recorded": (torch.is_grad_enabled, torch.set_grad_enabled, True),
    "the precision of float32 products": (
        torch.get_float32_matmul_precision,
        torch.set_float32_matmul_precision,
        "highest",
    ),
    "whether operations are deterministic": (
        torch.get_deterministic_debug_mode,
        torch.set_deterministic_debug_mode,
        0,
    ),
}


@contextmanager
def restored() -> Iterator[None]:
    """Restore the state of the process on exit."""
    before = {name: get() for name, (get, _, _) in KNOWN.items()}
    try:
        yield
    finally:
        for name, (_, put, _) in KNOWN.items():
            put(before[name])


@contextmanager
def left_alone() -> Iterator[None]:
    """Set unusual values for the state of the process, and check on exit that none has changed.

    Raises:
        Broken: naming what was changed.
    """
    with restored():
        for _, put, value in KNOWN.values():
            put(value)
        known = {name: get() for name, (get, _, _) in KNOWN.items()}
        yield
        changed = [name for name, (get, _, _) in KNOWN.items() if not _same(known[name], get())]
    if changed:
        raise Broken(f"the process: a call changed {', '.join(changed)}")


def _same(one: Any, other: Any) -> bool:
    return bool(torch.equal(one, other)) if isinstance(one, torch.Tensor) else bool(one == other)
