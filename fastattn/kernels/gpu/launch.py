"""Launches that are replayed: the same kernel, grid and numbers, with the tensors of another layer.

At each launch Triton finds out anew what its arguments would compile to, and its launcher reads every argument and
asks the driver about every pointer, which takes the CPU longer than many a kernel takes the GPU. Layers differ in
their tensors only. So the memo of a plan stores what the first layer launched, its arguments laid out as the driver
reads them, and the next layer fills in its addresses. Some may be addresses inside one allocation, which needs no
tensor for each.

    Triton      find the kernel    read all arguments    check every pointer       cuLaunchKernelEx
    replay                                               write what has changed    cuLaunchKernelEx

Source: `cuLaunchKernelEx` in the CUDA driver API; the two pointers that follow a kernel's own arguments are those of
    Triton's launcher, `triton/backends/nvidia/driver.py`.
"""

import ctypes
import struct
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from threading import Lock
from typing import Any

import torch
from torch import Tensor

from fastattn.kernels.device import is_rocm
from fastattn.kernels.gpu.tile import INTERPRETED


class Launch:
    """A launch of a kernel, which is made at once and can be replayed.

    Args:
        kernel: a function of `triton.jit`.
        grid: how many programs, in one or two dimensions.
        tensors: the arguments that change, by name; numbers may be among them. Those that come later have to be of the
            same type, or of one that can be seen as it, to begin at multiples of 16 bytes if these do, and None where
            these are.
        arguments: all others, by name; those that change may be among them.
        options: warps, stages, and what else is not an argument.
    """

    def __init__(
        self,
        kernel: Any,
        grid: tuple[int, ...],
        tensors: Mapping[str, Tensor | float | None],
        arguments: Mapping[str, Any],
        options: Mapping[str, Any],
    ) -> None:
        self._compiled = kernel[grid](**{**arguments, **tensors}, **options)
        names = kernel.arg_names
        self._arguments = [arguments.get(name) for name in names]  # without the tensors, which others want to free
        self._places = [names.index(name) for name in tensors]
        self._types = [x.dtype if isinstance(x, Tensor) else None for x in tensors.values()]
        self._grid = (*grid, 1, 1)[:3]
        self._launch = kernel[grid] if INTERPRETED else self._compiled[self._grid]
        self._packed: PackedLaunch | None = None
        self._can_pack = not INTERPRETED

    def replay(self, *tensors: Tensor | float | None) -> None:
        """Launch with other tensors, or with what `part` returns, in the order in which they were given first."""
        packed = self._packed
        if packed is None and self._can_pack:
            packed = PackedLaunch.of(self._compiled, self._grid, self._arguments, self._places, tensors)
            if packed is None:
                self._can_pack = False
            else:
                self._packed = packed  # never taken back: another thread may have its addresses already
        if packed is not None:
            return packed(*tensors)
        arguments = self._arguments.copy()
        for place, x, dtype in zip(self._places, tensors, self._types, strict=True):
            arguments[place] = x.view(dtype) if isinstance(x, Tensor) and dtype is not None else x
        self._launch(*arguments)

    def part(self, memory: Tensor, first: int) -> Tensor | int:
        """Return some memory from an element on, for `replay`: its address, or a view where Triton launches."""
        return memory[first:] if self._packed is None else memory.data_ptr() + first * memory.element_size()


class SplitLaunches:
    """The launches of one call of attention: each gives some partial outputs, which the last one merges.

    Partial outputs and their log-sum-exps share one allocation, as several take the CPU longer:

        partial outputs [parts, t, h, dv] | their log-sum-exps [parts, t, h] | log-sum-exps [t, h] that nobody reads

    Args:
        shape: of the output.
        part_shape: of a partial output, `(t, h, dv)`.
        launches: each launch of attention, with the number of partial outputs before its own.
        num_parts: partial outputs of all launches.
        reduction: merges them; None if the one launch gives the output.
        with_lse: replays return the log-sum-exps; else the tensor in their place may hold anything.
    """

    def __init__(
        self,
        shape: Sequence[int],
        part_shape: tuple[int, int, int],
        launches: Sequence[tuple[Launch, int]],
        num_parts: int,
        reduction: Launch | None,
        *,
        with_lse: bool,
    ) -> None:
        num_tokens, num_heads, value_head_size = part_shape
        self._shape, self._lse_shape, rows = tuple(shape), (num_tokens, num_heads), num_tokens * num_heads
        self._at_part_lses = _aligned(num_parts * rows * value_head_size)
        self._at_lse = self._at_part_lses + _aligned(num_parts * rows)
        self._size = self._at_lse + rows
        (self._first, _), *others = launches
        self._others = [(x, n * rows * value_head_size, self._at_part_lses + n * rows) for x, n in others]
        self._reduction, self._with_lse = reduction, with_lse or reduction is None

    @property
    def is_split(self) -> bool:
        """Whether there are partial outputs, and a reduction."""
        return self._reduction is not None

    def replay(
        self,
        tensors: tuple[Tensor, ...],
        of_layer: Iterable[Tensor | float | None],
        of_reduction: Iterable[Tensor | float | None],
        out: Tensor | None,
        lse: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Compute the call with other tensors.

        Args:
            tensors: the first arguments of attention: the queries, the keys and the values.
            of_layer: its last arguments.
            of_reduction: the last arguments of the reduction.
            out: memory for the output; new memory if None.
            lse: memory for the log-sum-exps; new memory if None.
        """
        query, first, reduction = tensors[0], self._first, self._reduction
        if out is None:
            out = query.new_empty(self._shape)
        if lse is None and self._with_lse:
            lse = query.new_empty(self._lse_shape, dtype=torch.float32)
        if reduction is None:
            assert lse is not None
            first.replay(*tensors, out, lse, *of_layer)
            return out, lse
        memory = query.new_empty(self._size, dtype=torch.float32)
        first.replay(*tensors, memory, first.part(memory, self._at_part_lses), *of_layer)
        for launch, at_parts, at_part_lses in self._others:
            launch.replay(*tensors, launch.part(memory, at_parts), launch.part(memory, at_part_lses), *of_layer)
        at_lse = reduction.part(memory, self._at_lse) if lse is None else lse
        reduction.replay(memory, reduction.part(memory, self._at_part_lses), out, at_lse, *of_reduction)
        return out, memory if lse is None else lse


def _aligned(size: int) -> int:
    """Return the next number of float32 that ends at a multiple of 16 bytes."""
    return -(-size // 4) * 4


# --- arguments as the driver reads them ---

_C_TYPES = {
    **{"i1": ctypes.c_int8, "i8": ctypes.c_int8, "i16": ctypes.c_int16, "i32": ctypes.c_int32, "i64": ctypes.c_int64},
    **{"u1": ctypes.c_uint8, "u8": ctypes.c_uint8, "u16": ctypes.c_uint16, "u32": ctypes.c_uint32},
    **{"u64": ctypes.c_uint64, "fp32": ctypes.c_float, "fp64": ctypes.c_double},
}
_CELL = 8  # bytes, into which each of these fits
_INVALID_CONTEXT = 201  # CUDA_ERROR_INVALID_CONTEXT
_STREAM_SERIALIZATION = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION: begin before the launch before ends


class _Attribute(ctypes.Structure):
    _fields_ = (("id", ctypes.c_int), ("value", ctypes.c_uint64 * 8))  # CUlaunchAttribute


class _Config(ctypes.Structure):
    _fields_ = (  # CUlaunchConfig
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_memory", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("num_attributes", ctypes.c_uint),
    )


class PackedLaunch:
    """A launch by the CUDA driver, of arguments that were laid out once.

    Args:
        function: the driver's handle of the kernel.
        config: grid, threads and shared memory.
        cells: all arguments in order, as C values.
        changing: the places of those that change; None for one that the kernel does not have.
        device: the number of the GPU.
    """

    def __init__(
        self, function: int, config: _Config, cells: Sequence[Any], changing: Sequence[int | None], device: int
    ) -> None:
        self._function, self._config, self._cells = ctypes.c_void_p(function), config, cells
        self._changing = ctypes.create_string_buffer(_CELL * len(changing))  # all of them are written at once
        addresses = [ctypes.addressof(cell) for cell in cells]
        layout = ""
        for i, place in enumerate(changing):
            kind = "Q" if place is None else cells[place]._type_
            layout += f"{kind}{_CELL - struct.calcsize(kind)}x"
            if place is not None:
                addresses[place] = ctypes.addressof(self._changing) + _CELL * i
        self._write = struct.Struct(layout).pack_into
        self._pointers = (ctypes.c_void_p * len(cells))(*addresses)
        self._by_reference = ctypes.byref(config)
        self._device = device
        self._driver: Any = _cuda()
        self._lock = Lock()  # two threads may attend by one plan

    @classmethod
    def of(
        cls,
        compiled: Any,
        grid: tuple[int, ...],
        arguments: Sequence[Any],
        places: Sequence[int],
        tensors: Sequence[Tensor | float | None],
    ) -> "PackedLaunch | None":
        """Lay out the arguments of a compiled kernel; None where that is left to Triton's own launcher.

        It is, without a driver of CUDA, if the kernel needs memory of its own, if its arguments are not those that the
        driver knows of, as with a later version of Triton, and for an empty grid, which the driver refuses.
        """
        metadata, driver = compiled.metadata, _cuda()
        if driver is None or is_rocm():
            return None
        needs = (metadata.global_scratch_size, metadata.profile_scratch_size, metadata.launch_cooperative_grid)
        if any(needs) or metadata.num_ctas != 1 or 0 in grid:
            return None
        device = torch.cuda.current_device()
        _enter_context(driver, device)  # without it the driver does not say what parameters a kernel has
        given = dict(zip(places, tensors, strict=True))
        cells: list[Any] = []
        at: dict[int, int] = {}
        for place, kind in enumerate(compiled.src.signature.values()):
            first = len(cells)
            if not _lay_out(kind, given.get(place, arguments[place]), cells):
                return None
            if place in given and len(cells) > first:
                at[place] = first
        cells += [ctypes.c_uint64(0), ctypes.c_uint64(0)]  # memory of the kernel's own, and of a profiler's: none
        if _sizes_of_parameters(driver, compiled.function) != [ctypes.sizeof(cell) for cell in cells]:
            return None
        config = _Config(grid, (32 * metadata.num_warps, 1, 1), metadata.shared)
        if metadata.launch_pdl:
            attribute = _Attribute(_STREAM_SERIALIZATION, (1,))
            config.attributes, config.num_attributes = ctypes.pointer(attribute), 1
        changing = [at.get(place) for place in places]
        return cls(compiled.function, config, cells, changing, device)

    def __call__(self, *tensors: Tensor | float | None) -> None:
        """Launch on the current stream; arguments are those of `Launch.replay`."""
        values = [x if isinstance(x, (int, float)) else 0 if x is None else x.data_ptr() for x in tensors]
        with self._lock:
            self._write(self._changing, 0, *values)
            self._config.stream = torch._C._cuda_getCurrentRawStream(self._device)
            launch = self._driver.cuLaunchKernelEx
            status = launch(self._by_reference, self._function, self._pointers, None)
            if status == _INVALID_CONTEXT:  # of a thread that has not called the CUDA runtime yet
                _enter_context(self._driver, self._device)
                status = launch(self._by_reference, self._function, self._pointers, None)
        if status:
            raise RuntimeError(f"CUDA: the driver does not launch a kernel, error {status}")


def _lay_out(kind: Any, argument: Any, cells: list[Any]) -> bool:
    """Append an argument as C values, those of a tuple one by one; False if there is no such C type."""
    if isinstance(kind, tuple):
        return all(_lay_out(*one, cells) for one in zip(kind, argument, strict=True))
    if kind == "constexpr":
        return True  # it is in the kernel already
    if kind.startswith("*"):
        cells.append(ctypes.c_uint64(argument.data_ptr() if isinstance(argument, Tensor) else argument or 0))
    elif kind in _C_TYPES:
        cells.append(_C_TYPES[kind](argument))
    else:
        return False
    return True


@cache
def _cuda() -> Any | None:
    """Return the driver of CUDA, if there is one that knows the parameters of a kernel (12.4 or newer)."""
    try:
        driver = ctypes.PyDLL("libcuda.so.1")
        _ = driver.cuLaunchKernelEx, driver.cuFuncGetParamInfo
    except (OSError, AttributeError):
        return None
    return driver


def _enter_context(driver: Any, device: int) -> None:
    """Let this thread launch on a GPU: make the context that PyTorch has there the current one, if there is none.

    The CUDA runtime does so with its first call in a thread; the driver does not.
    """
    current = ctypes.c_void_p()
    driver.cuCtxGetCurrent(ctypes.byref(current))
    if not current.value:
        driver.cuCtxSetCurrent(ctypes.c_void_p(_primary_context(driver, device)))


@cache
def _primary_context(driver: Any, device: int) -> int | None:
    """Return the context of a GPU that the CUDA runtime, and so PyTorch, computes in; it is held from now on."""
    number, context = ctypes.c_int(), ctypes.c_void_p()
    driver.cuDeviceGet(ctypes.byref(number), device)
    driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), number)
    return context.value


def _sizes_of_parameters(driver: Any, function: int) -> list[int]:
    """Return how many bytes each parameter of a kernel has, as the driver knows them."""
    sizes: list[int] = []
    offset, size = ctypes.c_size_t(), ctypes.c_size_t()
    while not driver.cuFuncGetParamInfo(
        ctypes.c_void_p(function), ctypes.c_size_t(len(sizes)), ctypes.byref(offset), ctypes.byref(size)
    ):
        sizes.append(size.value)
    return sizes
