"""Kernels in Gluon as Python functions, their launches, and our kernels for Hopper on a CPU.

A kernel's function is the one that stands in its file. Only the names that it uses are others here: `gl` and `tl`, what
is imported from Gluon's modules for Hopper, and what it calls of `triton.jit` and `gluon.jit`. Numbers that are passed
to a launch are scalars of 32 or 64 bits, and constants are Python's.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial, reduce
from itertools import product
from threading import Lock
from types import CellType, FunctionType, SimpleNamespace
from typing import Any
from unittest import mock

import torch
import triton.language as tl
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper as gluon_hopper
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from fastattn.kernels import device as devices
from fastattn.kernels import order
from fastattn.kernels.triton import (
    attention,
    compressed_hopper,
    differential_hopper,
    hopper,
    latents_hopper,
    prompts_hopper,
)
from twinattn.course.gluon import memory, transfers
from twinattn.course.gluon.machine import Machine, Program, specialize
from twinattn.course.gluon.values import FUNCTIONS, Kind, Value, address_of, require, value_of

SMS = 3  # that our kernels for Hopper see on a CPU: programs which take several tiles each
_ONE_LAUNCH = Lock()  # at a time, of all threads
_SHORT = {"fp16": "float16", "bf16": "bfloat16", "fp32": "float32", "fp8e4nv": "float8e4nv", "fp8e5": "float8e5"}


class Interpreted:
    """A kernel of `gluon.jit` that runs on a CPU when it is launched.

    Args:
        kernel: the kernel.
        seed: of the order of what runs at the same time; each launch takes the next one.
    """

    def __init__(self, kernel: Any, seed: int = 0) -> None:
        self.arg_names, self.do_not_specialize = kernel.arg_names, kernel.do_not_specialize
        self._constants = {kernel.arg_names[place] for place in kernel.constexprs}
        self._names = _Names()
        self._run, self._name = self._names.here(kernel), kernel.fn.__name__
        self.seed = seed
        self.launched: list[str] = []  # the name of the kernel and its programs, by launch

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        """Return a function that launches the kernel, with its arguments and `num_warps`.

        It raises KernelError for a mistake in the kernel; see the docstring of this package.
        """
        warps = [4]

        def launch(*arguments: Any, num_warps: int = 0, **named: Any) -> None:
            warps.append(num_warps or warps[-1])  # a launch that is replayed has those of the first
            given = dict(zip(self.arg_names[: len(arguments)], arguments, strict=True)) | named
            with _ONE_LAUNCH:
                self._launch((*grid, 1, 1)[:3], given, warps[-1])

        return launch

    def _launch(self, grid: tuple[int, ...], given: dict[str, Any], num_warps: int) -> None:
        machine = Machine.now = Machine(self.seed)
        self.seed += 1
        self.launched.append(f"{self._name} {' x '.join(map(str, grid)).removesuffix(' x 1').removesuffix(' x 1')}")
        seen = {
            name: self._names.here(x) if name in self._constants else self._names.given(x) for name, x in given.items()
        }
        run = partial(self._run, **seen)
        try:
            machine.run(
                [
                    partial(machine.start, "the kernel", Program(place, grid), num_warps, run)
                    for place in product(*map(range, grid))
                ]
            )
        finally:
            del Machine.now  # with all that it refers to


@contextmanager
def hopper_on_a_cpu(seed: int = 0) -> Iterator[list[Interpreted]]:
    """Run the kernels for Hopper on a CPU where `fastattn` would launch them on a GPU.

    They take calls in float16: of prompts with more than 128 rows per sequence and KV head, or 64 per pair of KV heads,
    of 64 rows over latents of 512 + 64 numbers, and of 64 heads over compressed keys of 512. All need
    `fastattn.use_kernel("triton")` and TRITON_INTERPRET=1.

    A plan keeps its launches: one that was used before launches no kernel for Hopper here, and one that is first used
    here goes on with these later.

    Args:
        seed: of the order of what runs at the same time.

    Yields:
        The kernels, whose `launched` says what ran.
    """
    modules = prompts_hopper, latents_hopper, differential_hopper, compressed_hopper
    kernels = [Interpreted(one._attend_kernel, seed) for one in modules]
    with ExitStack() as stack:
        for module in (hopper, *modules):
            stack.enter_context(mock.patch.object(module, "is_there", lambda device: True))
        for module, kernel in zip(modules, kernels, strict=True):
            stack.enter_context(mock.patch.object(module, "_attend_kernel", kernel))
        stack.enter_context(mock.patch.object(attention, "INTERPRETED", False))
        stack.enter_context(mock.patch.object(devices, "num_sms", lambda device: SMS))
        stack.callback(order.forget)  # choices of kernels, here and after
        order.forget()
        yield kernels


# --- what a kernel sees ---


def _assembly(text: str, constraints: str, args: Sequence[Value], dtype: Kind, is_pure: bool, pack: int) -> Value:
    """Execute the instructions that our kernels have in PTX; another one is an error."""
    first, _, rest = text.partition(";")
    rounding = re.fullmatch(r"cvt\.rn\.(bf16|f16)x2\.f32 \$0, \$([12]), \$([12])", first)
    if rounding is not None:
        found = args[0].data.to(torch.bfloat16 if rounding[1] == "bf16" else torch.float16)
        if "max." in rest and "min." in rest:  # within the finite numbers, where NaN is the lowest
            ends = torch.finfo(found.dtype)
            found = found.nan_to_num(nan=ends.min, posinf=ends.max, neginf=ends.min)
        in_order = rounding[2] > rounding[3]  # the first operand is the upper half, and so the second element
        return Value(found if in_order else found.unflatten(-1, (-1, 2)).flip(-1).flatten(-2), args[0].layout)
    if re.fullmatch(r"\{ .* @p nanosleep\.u32 1; mov\.b32 \$0, \$2; mov\.b32 \$1, \$3; \}", text):
        return args[0]
    barrier = re.fullmatch(r"bar\.(sync|arrive) (\d+), (\d+)", first)
    if rest.strip() != "mov.b32 $0, $1;" or barrier is None:
        raise NotImplementedError(f"inline assembly: {text}")
    memory.meet(int(barrier[2]), int(barrier[3]), waits=barrier[1] == "sync")
    return args[0]


def _range(*bounds: Any) -> Iterator[Value]:
    """Count in the type that holds all bounds; a step below 0 is a constant."""
    require(len(bounds) < 3 or not isinstance(bounds[2], Value) or int(bounds[2]) > 0, "range: a step of 0 or below")
    kinds = [value_of(one).data.dtype for one in bounds]
    kind = reduce(torch.promote_types, kinds)
    return (Value(torch.tensor(i, dtype=kind)) for i in range(*map(int, bounds)))


_LANGUAGE = SimpleNamespace(
    **FUNCTIONS,
    allocate_shared_memory=memory.allocate,
    warp_specialize=specialize,
    inline_asm_elementwise=_assembly,
    program_id=lambda axis: value_of(Machine.now.current.program.place[axis]),
    num_programs=lambda axis: value_of(Machine.now.current.program.grid[axis]),
    num_warps=lambda: Machine.now.current.num_warps,
    debug_barrier=lambda: Machine.now.wait(),
    # A launch begins here when the one before it has ended.
    extra=SimpleNamespace(cuda=SimpleNamespace(gdc_wait=lambda: None, gdc_launch_dependents=lambda: None)),
)
_MBARRIER = SimpleNamespace(
    MBarrierLayout=gluon_hopper.mbarrier.MBarrierLayout,
    init=memory.Barrier.init,
    arrive=memory.arrive,
    expect=lambda barrier, size, pred=True: barrier.expect_bytes(int(size)) if pred else None,
    wait=lambda barrier, phase, pred=True, deps=(): barrier.wait(int(phase)) if pred else None,
)
_ASYNC_COPY = SimpleNamespace(
    async_copy_global_to_shared=transfers.copy_by_threads,
    mbarrier_arrive=transfers.arrive_after_copies,
    commit_group=transfers.commit_copies,
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


class _Names:
    """The global names of kernels, by module: the objects that a module has now, those of Gluon replaced by ours."""

    def __init__(self) -> None:
        self._modules: dict[int, dict[str, Any]] = {}  # by the names of a module

    def here(self, x: Any) -> Any:
        """Translate an object that a kernel uses: Gluon's modules to ours, functions of kernels to Python's."""
        for there, instead in _INSTEAD:
            if x is there:
                return instead
        if isinstance(x, tl.constexpr):
            return self.here(x.value)
        if isinstance(x, tl.dtype):
            return FUNCTIONS[_SHORT.get(x.name, x.name)]
        function = getattr(x, "fn", None)
        if not isinstance(function, FunctionType):
            return x
        # A function of `gluon.jit` or `triton.jit`, also if it is interpreted.
        defaults = tuple(map(self.here, function.__defaults__ or ()))
        cells = tuple(CellType(self.here(one.cell_contents)) for one in function.__closure__ or ())
        found = FunctionType(function.__code__, self._of(function.__globals__), function.__name__, defaults, cells)
        found.__kwdefaults__ = {name: self.here(one) for name, one in (function.__kwdefaults__ or {}).items()}
        return found

    def _of(self, names: dict[str, Any]) -> dict[str, Any]:
        if id(names) not in self._modules:
            found = self._modules[id(names)] = {"range": _range}  # before its functions, which see it, too
            found |= {name: self.here(x) for name, x in names.items() if not name.startswith("__")}
        return self._modules[id(names)]

    def given(self, x: Any) -> Any:
        """Convert an argument of a launch: a tensor to an address, a number to a scalar."""
        if isinstance(x, Tensor):
            return address_of(x)
        if isinstance(x, tuple):
            each = map(self.given, x)
            return type(x)(*each) if hasattr(x, "_fields") else tuple(each)
        if isinstance(x, (int, float)):
            return value_of(x)
        if x is None or isinstance(x, (TensorDescriptor, tl.constexpr)):
            return self.here(x)
        raise TypeError(f"argument: expected a tensor, a number, None, a tensor map or a tuple of these, got {type(x)}")
