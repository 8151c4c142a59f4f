"""What a process has beside memory: a call that changes any of it changes what comes after, without a word.

A check puts all of it into a state of its own, calls, looks, and puts it back: what an earlier call had changed
already would not change again.
"""

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from twinattn.kit.property import Broken

SEED = 90_517  # such as no kernel sets
TINY = 1e-40  # a subnormal number of float32


def flushes() -> bool:
    """Return whether results near 0 become 0."""
    return not float(torch.tensor(TINY) * torch.tensor(1.0))


KNOWN: dict[str, tuple[Callable[[], Any], Callable[[Any], Any], Any]] = {  # how it is read, how set, and to what
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
    """Put the process back into its state, whatever is done."""
    before = {name: get() for name, (get, _, _) in KNOWN.items()}
    try:
        yield
    finally:
        for name, (_, put, _) in KNOWN.items():
            put(before[name])


@contextmanager
def left_alone() -> Iterator[None]:
    """Put the process into unusual states of its own, and check that a call leaves all of them as they are.

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
