"""Kernels in Gluon as Python functions, their launches, and our kernels for Hopper on a CPU.

A kernel's function is the one that stands in its file. Only the names that it uses are others here: `gl` and `tl`, what
is imported from Gluon's modules for Hopper, and what it calls of `triton.jit` and `gluon.jit`. Numbers that are passed
to a launch are scalars of 32 or 64 bits, and constants are Python's.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import product
from types import FunctionType, SimpleNamespace
from typing import Any
from unittest import mock

import torch
import triton.language as tl
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper as gluon_hopper
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from fastattn.kernels import device as devices
from fastattn.kernels.triton import attention, hopper, latents_hopper, prompts_hopper
from twinattn.course.gluon import memory, transfers
from twinattn.course.gluon.machine import Machine, Program, specialize
from twinattn.course.gluon.values import FUNCTIONS, Kind, Value, address_of, value_of

SMS = 3  # that our kernels for Hopper see on a CPU: programs which take several tiles each
_SHORT = {"fp16": "float16", "bf16": "bfloat16", "fp32": "float32", "fp8e4nv": "float8e4nv", "fp8e5": "float8e5"}


class Interpreted:
    """A kernel of `gluon.jit` that runs on a CPU when it is launched.

    Args:
        kernel: the kernel.
        seed: of the order of what runs at the same time; each launch takes the next one.
    """

    def __init__(self, kernel: Any, seed: int = 0) -> None:
        self.arg_names, self.do_not_specialize = kernel.arg_names, kernel.do_not_specialize
        self._run, self._name = _here(kernel), kernel.fn.__name__
        self.seed = seed
        self.launched: list[str] = []  # the name of the kernel and its programs, by launch

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        """Return a function that launches the kernel, with its arguments and `num_warps`.

        It raises KernelError for a mistake in the kernel; see the docstring of this package.
        """
        warps: list[int] = []

        def launch(*arguments: Any, num_warps: int = 0) -> None:
            warps.append(num_warps or warps[-1])  # a launch that is replayed has those of the first
            self._launch((*grid, 1, 1)[:3], arguments, warps[-1])

        return launch

    def _launch(self, grid: tuple[int, ...], arguments: Sequence[Any], num_warps: int) -> None:
        machine = Machine.now = Machine(self.seed)
        self.seed += 1
        self.launched.append(f"{self._name} {' x '.join(map(str, grid)).removesuffix(' x 1').removesuffix(' x 1')}")
        run = partial(self._run, *map(_given, arguments))
        machine.run(
            [
                partial(machine.start, "the kernel", Program(place, grid), num_warps, run)
                for place in product(*map(range, grid))
            ]
        )


@contextmanager
def hopper_on_a_cpu(seed: int = 0) -> Iterator[list[Interpreted]]:
    """Let `fastattn` launch its kernels for Hopper on a CPU, for the calls that they take there.

    These are calls in float16: of prompts with more than 128 rows per sequence and KV head, and of 64 rows over latents
    of 512 + 64 numbers. They need `fastattn.use_kernel("triton")` and TRITON_INTERPRET=1.

    Args:
        seed: of the order of what runs at the same time.

    Yields:
        The kernels, whose `launched` says what ran.
    """
    kernels = [Interpreted(one._attend_kernel, seed) for one in (prompts_hopper, latents_hopper)]
    with ExitStack() as stack:
        for module in (hopper, prompts_hopper, latents_hopper):
            stack.enter_context(mock.patch.object(module, "is_there", lambda device: True))
        for module, kernel in zip((prompts_hopper, latents_hopper), kernels, strict=True):
            stack.enter_context(mock.patch.object(module, "_attend_kernel", kernel))
        stack.enter_context(mock.patch.object(attention, "INTERPRETED", False))
        stack.enter_context(mock.patch.object(devices, "num_sms", lambda device: SMS))
        yield kernels


# --- what a kernel sees ---


def _assembly(text: str, constraints: str, args: Sequence[Value], dtype: Kind, is_pure: bool, pack: int) -> Value:
    """Execute the instructions that our kernels have in PTX; another one is an error."""
    first, _, rest = text.partition(";")
    rounding = re.fullmatch(r"cvt\.rn\.(bf16|f16)x2\.f32 \$0, \$([12]), \$([12])", first)
    if rounding is not None:
        found = args[0].data.to(torch.bfloat16 if rounding[1] == "bf16" else torch.float16)
        in_order = rounding[2] > rounding[3]  # the first operand is the upper half, and so the second element
        return Value(found if in_order else found.unflatten(-1, (-1, 2)).flip(-1).flatten(-2), args[0].layout)
    barrier = re.fullmatch(r"bar\.(sync|arrive) (\d+), (\d+)", first)
    if rest.strip() != "mov.b32 $0, $1;" or not (barrier or first.startswith("nanosleep.")):
        raise NotImplementedError(f"inline assembly: {text}")
    if barrier is not None:
        memory.meet(int(barrier[2]), int(barrier[3]), waits=barrier[1] == "sync")
    return args[0]


def _range(*bounds: Any) -> Iterator[Value]:
    return (value_of(i) for i in range(*map(int, bounds)))


_LANGUAGE = SimpleNamespace(
    **FUNCTIONS,
    allocate_shared_memory=memory.allocate,
    warp_specialize=specialize,
    inline_asm_elementwise=_assembly,
    program_id=lambda axis: value_of(Machine.now.current.program.place[axis]),
    num_programs=lambda axis: value_of(Machine.now.current.program.grid[axis]),
    num_warps=lambda: Machine.now.current.num_warps,
    debug_barrier=lambda: Machine.now.wait(),
)
_MBARRIER = SimpleNamespace(
    MBarrierLayout=gluon_hopper.mbarrier.MBarrierLayout,
    init=memory.Barrier.init,
    arrive=memory.arrive,
    expect=memory.Barrier.expect_bytes,
    wait=lambda barrier, phase: barrier.wait(int(phase)),
)
_ASYNC_COPY = SimpleNamespace(
    async_copy_global_to_shared=transfers.copy_by_threads,
    mbarrier_arrive=transfers.arrive_after_copies,
    commit_group=lambda: None,
    wait_group=transfers.wait_for_copies,
)
_INSTEAD = [  # the objects that a module imports, and those that a kernel in it sees instead
    (gl, _LANGUAGE),
    (tl, _LANGUAGE),
    (gluon_hopper.mbarrier, _MBARRIER),
    (gluon_hopper.async_copy, _ASYNC_COPY),
    (gluon_hopper.tma, SimpleNamespace(async_copy_global_to_shared=transfers.copy_tile)),
    (gluon_hopper.fence_async_shared, memory.fence),
    (gluon_hopper.warpgroup_mma, transfers.multiply),
    (gluon_hopper.warpgroup_mma_wait, transfers.wait_for_products),
]
# By the names of a module, which stay alive with it: those that a kernel in it sees.
_names: dict[int, tuple[dict[str, Any], dict[str, Any]]] = {}


def _here(x: Any) -> Any:
    """Return what a kernel sees for something that it uses."""
    for there, here in _INSTEAD:
        if x is there:
            return here
    if isinstance(x, tl.constexpr):
        return _here(x.value)
    if isinstance(x, tl.dtype):
        return FUNCTIONS[_SHORT.get(x.name, x.name)]
    function = getattr(x, "fn", None)
    if isinstance(function, FunctionType):  # a function of `gluon.jit` or `triton.jit`, also if it is interpreted
        defaults = tuple(map(_here, function.__defaults__ or ()))
        return FunctionType(function.__code__, _names_here(function.__globals__), function.__name__, defaults)
    return x


def _names_here(names: dict[str, Any]) -> dict[str, Any]:
    if id(names) not in _names:
        found: dict[str, Any] = {"range": _range}
        _names[id(names)] = names, found  # before its functions, which see it, too
        found |= {name: _here(x) for name, x in names.items() if not name.startswith("__")}
    return _names[id(names)][1]


def _given(x: Any) -> Any:
    """Return an argument of a launch as the kernel sees it."""
    if isinstance(x, Tensor):
        return address_of(x)
    if isinstance(x, tuple):
        each = map(_given, x)
        return type(x)(*each) if hasattr(x, "_fields") else tuple(each)
    if isinstance(x, (int, float)) and not isinstance(x, bool):
        return value_of(x)
    if x is None or isinstance(x, (bool, TensorDescriptor, tl.constexpr)):
        return _here(x)
    raise TypeError(f"argument: expected a tensor, a number, None, a tensor map or a tuple of these, got {type(x)}")
