"""A stand-in for CUDA graphs on a CPU: it records what a step computes, and repeats it over the same memory.

What is Python in a step is not repeated, as in a graph: a number that was read, or a table that was made of a list,
stays what it was. Only the contents of tensors change. A path is repeated as a whole, as on a CPU its
kernels read tables on the host; the plan that it gets is the recorded one, over the same tensors.
"""

from collections.abc import Callable

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fastattn import chunked_prefill, kv_cache, metadata, mla, recurrent, replay

PATHS = (
    (recurrent, "attention"),
    (recurrent, "convolve"),
    (replay, "attention"),
    (chunked_prefill, "attention"),
    (mla, "attention"),
    (kv_cache, "write"),
    (mla, "write"),
    (metadata, "positions"),
    (metadata, "slot_mapping"),
)


class Tape(TorchDispatchMode):
    """Records operations while it is entered; `replay` repeats them, into the memory of the recorded results."""

    current = None

    def __init__(self):
        super().__init__()
        self.calls, self.inside = [], False

    def __enter__(self):
        Tape.current = self
        return super().__enter__()

    def __exit__(self, *error):
        Tape.current = None
        return super().__exit__(*error)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return self.record(func, args, kwargs or {})

    def record(self, func, args, kwargs):
        if self.inside:
            return func(*args, **kwargs)
        self.inside = True
        try:
            result = func(*args, **kwargs)
        finally:
            self.inside = False
        self.calls.append((func, args, kwargs, tensors(result)))
        return result

    def replay(self):
        for func, args, kwargs, before in self.calls:
            for x in (*args, *kwargs.values()):
                getattr(x, "__dict__", {}).pop("memo", None)  # what a plan's first layer worked out
            for old, new in zip(before, tensors(func(*args, **kwargs)), strict=True):
                if old.data_ptr() != new.data_ptr():  # it is no view of what was there before
                    old.copy_(new)


def tensors(result):
    return [x for x in tree_leaves(result) if isinstance(x, torch.Tensor)]


def tape_recorder(monkeypatch) -> Callable:
    """Return what stands in for `cuda_graphs._record` on a CPU: it computes a step, and records it."""

    def taped(path):
        def call(*args, **kwargs):
            tape = Tape.current
            return path(*args, **kwargs) if tape is None else tape.record(path, args, kwargs)

        return call

    for module, name in PATHS:
        monkeypatch.setattr(module, name, taped(getattr(module, name)))

    def record(step, runner, name):
        step()
        tape = Tape()
        with tape:
            result = step()

        def replay():
            tape.replay()
            return result.clone()  # a copy, so that it does not change while it is read

        return replay

    return record
