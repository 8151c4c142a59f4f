"""Replay launches: the same kernel, grid and numbers, with the tensors of another layer.

At each launch Triton re-specializes its arguments, and its launcher reads every argument and queries the driver about
every pointer. This takes longer on the CPU than many kernels take on the GPU. Layers differ in their tensors only. So
the memo of a plan stores the launch of the first layer, with its arguments laid out as the driver reads them, and the
next layer fills in its addresses. Some may be addresses inside one allocation, without a tensor for each.

    Triton      find the kernel    read all arguments    check every pointer       cuLaunchKernelEx
    replay                                               write what has changed    cuLaunchKernelEx

Kernels are compiled here, too (`compiled_for`): arguments are NamedTuples, and Triton's launcher would recompile for
each number in them that happens to be 1 or a multiple of 16.

Source: `cuLaunchKernelEx` in the CUDA driver API; the two pointers that follow a kernel's own arguments are those of
    Triton's launcher, `triton/backends/nvidia/driver.py`.
"""

import ctypes
import struct
from collections.abc import Hashable, Iterable, Mapping, Sequence
from functools import cache
from threading import Lock
from typing import Any, no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton._utils import canonicalize_dtype
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from fastattn.kernels import device as devices
from fastattn.kernels.device import is_rocm
from fastattn.kernels.triton.tensor_map import TensorMap, kind_of, over

INTERPRETED = triton.knobs.runtime.interpret  # kernels run in Python, on CPU tensors
CHANGING = (  # these change from batch to batch, and must not cause a recompilation
    *("block_table", "cu_seqlens_q", "cu_seqlens_k", "seq_lens", "positions", "first_keys", "table_row_stride"),
    *("num_tokens", "num_seqs", "programs", "splits", "left", "right", "first_visible", "last_visible"),
    *("tree_lens", "depths", "ancestors", "tree_width", "prefix_lse_head_stride"),
)


class Launch:
    """A kernel launch, made at once, that can be replayed.

    Args:
        kernel: a function of `triton.jit` or `gluon.jit`.
        grid: the number of programs, in up to three dimensions.
        changing: the arguments that change, by name, with their current values: tensors, their tensor maps, for which
            a replay takes tensors, and scales, which are numbers passed as float32. A field of a NamedTuple is named as
            it is read, `"keys.key"`. Later values must have the same type, or one that can be viewed as it, begin at
            multiples of 16 bytes if these do, and be None where these are.
        arguments: all others, by name: tensors, numbers, None, and NamedTuples of these.
        options: warps, stages, and other options of a launch.
    """

    def __init__(
        self,
        kernel: Any,
        grid: tuple[int, ...],
        changing: Mapping[str, Tensor | float | None],
        arguments: Mapping[str, Any],
        options: Mapping[str, Any],
    ) -> None:
        # An int 1 would be a constant of the kernel, though the next layer may have another scale.
        changing = {name: float(x) if isinstance(x, int) else x for name, x in changing.items()}
        twice = changing.keys() & arguments.keys()
        assert not twice, f"arguments that change and do not: {sorted(twice)}"
        given = {**changing, **arguments}
        all_arguments = tuple(given[name] for name in kernel.arg_names)
        self._paths = _paths_of(changing, kernel.arg_names, all_arguments)
        if any("." in name for name in changing):
            all_arguments = _with(all_arguments, self._paths, changing.values())
        self._grid = (*grid, 1, 1)[:3]
        self._can_pack = not INTERPRETED
        if INTERPRETED:
            self._launch = kernel[grid]
            self._launch(*all_arguments, **options)
        else:
            self._compiled = compiled_for(kernel, all_arguments, options)
            self._launch = self._compiled[self._grid]
            self._launch(*all_arguments)
        self._arguments = _with(all_arguments, self._paths, [None] * len(changing))  # so that they can be freed
        self._types = [x.dtype if isinstance(x, Tensor) else None for x in changing.values()]
        maps = [(i, x) for i, x in enumerate(changing.values()) if isinstance(x, TensorDescriptor)]
        self._maps = {i: over(x, x.base.new_empty(0)) for i, x in maps}
        self._packed: PackedLaunch | None = None

    def replay(self, *tensors: Tensor | float | None) -> None:
        """Launch with other tensors, or with results of `part`, in the order of `changing`."""
        packed = self._packed
        if packed is None and self._can_pack:
            packed = PackedLaunch.of(self._compiled, self._grid, self._arguments, self._paths, self._mapped(tensors))
            if packed is None:
                self._can_pack = False
            else:
                self._packed = packed  # never unset: another thread may have its addresses already
        if packed is not None:
            return packed(*tensors)
        seen = (
            x.view(dtype) if isinstance(x, Tensor) and dtype is not None else x
            for x, dtype in zip(self._mapped(tensors) if self._maps else tensors, self._types, strict=True)
        )
        self._launch(*_with(self._arguments, self._paths, seen))

    def _mapped(self, tensors: Sequence[Any]) -> Sequence[Any]:
        """Return tensors with tensor maps where the kernel takes them."""
        return [over(self._maps[i], x) if i in self._maps else x for i, x in enumerate(tensors)]

    def part(self, memory: Tensor, first: int) -> Tensor | int:
        """Return memory from an element on, for `replay`: its address, or a view for Triton's launcher."""
        return memory[first:] if self._packed is None else memory.data_ptr() + first * memory.element_size()


class SplitLaunches:
    """The launches of one call of attention: each gives some partial outputs, which the last one merges.

    Partial outputs and their log-sum-exps share one allocation, as several take the CPU longer:

        partial outputs [parts, t, h, dv] | their log-sum-exps [parts, t, h] | log-sum-exps [t, h] that are never read

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
        layer_args: Iterable[Tensor | float | None],
        of_reduction: Iterable[Tensor | float | None],
        out: Tensor | None,
        lse: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Compute the call with other tensors.

        Args:
            tensors: the first arguments of attention: the queries, the keys and the values.
            layer_args: its last arguments.
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
            first.replay(*tensors, out, lse, *layer_args)
            return out, lse
        memory = query.new_empty(self._size, dtype=torch.float32)
        first.replay(*tensors, memory, first.part(memory, self._at_part_lses), *layer_args)
        for launch, at_parts, at_part_lses in self._others:
            launch.replay(*tensors, launch.part(memory, at_parts), launch.part(memory, at_part_lses), *layer_args)
        at_lse = reduction.part(memory, self._at_lse) if lse is None else lse
        reduction.replay(memory, reduction.part(memory, self._at_part_lses), out, at_lse, *of_reduction)
        return out, memory if lse is None else lse


def _aligned(size: int) -> int:
    """Round a number of float32 elements up to a multiple of 16 bytes."""
    return -(-size // 4) * 4


# --- launches that begin while the launch before them ends ---


def can_overlap(device: torch.device) -> bool:
    """Return whether a kernel can start while the one before it ends (programmatic dependent launch)."""
    return not INTERPRETED and devices.capability(device) >= (9, 0)


def converts_fp8(device: torch.device) -> bool:
    """Return whether a GPU has instructions that turn fp8 into float16, and float32 into fp8."""
    return not INTERPRETED and devices.capability(device) >= (8, 9)


def overlapping(device: torch.device, *, after_ours: bool) -> dict[str, bool]:
    """Return the launch options of a kernel that begins with `pdl_wait`.

    Args:
        device: the device of the launch.
        after_ours: another such kernel was launched just before. Only then may this one start early: it waits for that
            one alone, and a package's kernel may end before the launch that precedes it.
    """
    overlap = can_overlap(device)
    return {"OVERLAP": overlap} | ({"launch_pdl": True} if overlap and after_ours else {})


@triton.jit
@no_type_check
def pdl_wait(OVERLAP: tl.constexpr):
    """Wait until the launch before has ended and can be read, and let the next one start early.

    Nothing may be read or written above this: memory of the launch before may be reused by this one.
    """
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


# --- arguments as the compiler sees them ---

Path = tuple[int, ...]  # the place of an argument, or that and the place of a field within it


def _paths_of(changing: Iterable[str], names: Sequence[str], arguments: Sequence[Any]) -> list[Path]:
    """Return the paths of arguments and fields, `"keys.key"` for example."""
    paths: list[Path] = []
    for name in changing:
        argument, _, field = name.partition(".")
        place = names.index(argument)
        paths.append((place, arguments[place]._fields.index(field)) if field else (place,))
    return paths


def _with(arguments: Sequence[Any], paths: Iterable[Path], values: Iterable[Any]) -> tuple[Any, ...]:
    """Return arguments with other values at some paths."""
    changed = list(arguments)
    fields: dict[int, dict[str, Any]] = {}
    for (place, *field), value in zip(paths, values, strict=True):
        if field:
            fields.setdefault(place, {})[arguments[place]._fields[field[0]]] = value
        else:
            changed[place] = value
    for place, others in fields.items():
        changed[place] = changed[place]._replace(**others)
    return tuple(changed)


_compiled: dict[Hashable, Any] = {}  # by kernel, what the compiler knows of its arguments, options and GPU


def compiled_for(kernel: Any, arguments: tuple[Any, ...], options: Mapping[str, Any]) -> Any:
    """Compile a kernel for arguments like these, once.

    The compiler specializes on numbers that are 1 or a multiple of 16, and on aligned pointers. Triton's own launcher
    does so for each field of a NamedTuple, and recompiles whenever a field that changes from step to step happens to be
    such a number. Here `do_not_specialize` of `triton.jit` names fields, too.
    """
    changing = frozenset(kernel.do_not_specialize)
    device = torch.cuda.current_device() if torch.cuda.is_available() else 0
    fixed = tuple(arguments[place] for place in kernel.constexprs)
    others = [
        (name, x)
        for place, (name, x) in enumerate(zip(kernel.arg_names, arguments, strict=True))
        if place not in kernel.constexprs
    ]
    key = (id(kernel), device, fixed, _known(others, changing), *options.items())
    if key not in _compiled:
        constants: dict[Path, Any] = {}
        aligned: list[Path] = []
        signature = {}
        for place, (parameter, x) in enumerate(zip(kernel.params, arguments, strict=True)):
            if parameter.is_constexpr:
                signature[parameter.name], constants[(place,)] = "constexpr", x
            else:
                signature[parameter.name] = _kind_of(x, parameter.name, (place,), changing, constants, aligned)
        # Deepest first: Triton 3.6 forgets a constant in a tuple within a NamedTuple, behind an `if`, unless a field of
        # the NamedTuple itself is set to a constant after it.
        constants = dict(sorted(constants.items(), key=lambda one: -len(one[0])))
        source = GluonASTSource if kernel.is_gluon() else ASTSource
        attributes = {path: [["tt.divisibility", 16]] for path in aligned}
        _compiled[key] = triton.compile(source(kernel, signature, constants, attributes), options=dict(options))
    return _compiled[key]


def _known(arguments: Iterable[tuple[str, Any]], changing: frozenset[str]) -> tuple[Hashable, ...]:
    """Return the properties that the compiler specializes on. Every launch that is not replayed calls this function."""
    known: list[Any] = []
    for name, x in arguments:
        kind = type(x)
        if kind is tl.constexpr:
            value = x.value
            known.append(value if isinstance(value, (int, str)) else id(value))  # a function, or a type
        elif isinstance(x, Tensor):
            known += (x.dtype, name in changing or x.data_ptr() % 16 == 0)
        elif kind is int:
            multiple = 0 if name in changing else 16 if x % 16 == 0 else int(x == 1)
            known += (kind, multiple, -(2**31) <= x < 2**31)
        elif isinstance(x, tuple):
            known += (kind, len(x), *_known(zip(_fields_of(x), x, strict=True), changing))
        elif isinstance(x, TensorDescriptor):
            known.append(kind_of(x))
        else:
            known.append(kind if kind is float else x)
    return tuple(known)


def _kind_of(
    x: Any,
    name: str,
    path: Path,
    changing: frozenset[str],
    constants: dict[Path, Any],
    aligned: list[Path],
) -> Any:
    """Return the type of an argument in a signature; note constants, and multiples of 16."""
    if isinstance(x, tuple):
        fields = enumerate(zip(x, _fields_of(x), strict=True))
        kinds = [_kind_of(one, field, (*path, i), changing, constants, aligned) for i, (one, field) in fields]
        return type(x)(*kinds) if hasattr(x, "_fields") else tuple(kinds)
    if isinstance(x, TensorDescriptor):
        return kind_of(x)
    fixed = name not in changing
    if x is None or isinstance(x, (bool, str, tl.constexpr)) or (fixed and type(x) is int and x == 1):
        constants[path] = x.value if isinstance(x, tl.constexpr) else x
        return "constexpr"
    if isinstance(x, float):
        return "fp32"
    if fixed and (x.data_ptr() if isinstance(x, Tensor) else x) % 16 == 0:
        aligned.append(path)
    if isinstance(x, Tensor):
        return f"*{canonicalize_dtype(x.dtype)}"
    return "i32" if -(2**31) <= x < 2**31 else "i64"


def _fields_of(x: tuple[Any, ...]) -> Sequence[str]:
    """Return the names of the fields of a tuple, empty for a plain one."""
    return getattr(x, "_fields", ("",) * len(x))


# --- arguments as the driver reads them ---

_C_TYPES = {
    **{"i1": ctypes.c_int8, "i8": ctypes.c_int8, "i16": ctypes.c_int16, "i32": ctypes.c_int32, "i64": ctypes.c_int64},
    **{"u1": ctypes.c_uint8, "u8": ctypes.c_uint8, "u16": ctypes.c_uint16, "u32": ctypes.c_uint32},
    **{"u64": ctypes.c_uint64, "fp32": ctypes.c_float, "fp64": ctypes.c_double},
}
_CELL = 8  # bytes; each of these types fits
_INVALID_CONTEXT = 201  # CUDA_ERROR_INVALID_CONTEXT
_STREAM_SERIALIZATION = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION: begin while the launch before ends


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
    """A launch by the CUDA driver, with arguments that are laid out once.

    Args:
        function: the driver's handle of the kernel.
        config: grid, threads and shared memory.
        cells: all arguments in order, as C values.
        changing: the places of arguments that change; None for one that the kernel does not have.
        maps: tensor maps among them, by their number in `changing`.
        device: the number of the GPU.
    """

    def __init__(
        self,
        function: int,
        config: _Config,
        cells: Sequence[Any],
        changing: Sequence[int | None],
        maps: Mapping[int, TensorMap],
        device: int,
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
        self._maps = maps
        self._device = device
        self._driver: Any = _cuda()
        self._lock = Lock()  # two threads may share a plan

    @classmethod
    def of(
        cls,
        compiled: Any,
        grid: tuple[int, ...],
        arguments: tuple[Any, ...],
        paths: Sequence[Path],
        tensors: Sequence[Tensor | float | None],
    ) -> "PackedLaunch | None":
        """Lay out the arguments of a compiled kernel; None where Triton's own launcher is needed.

        It is needed without a CUDA driver, for kernels with scratch memory, clusters or a cooperative grid, if the
        driver reports other parameters (a later version of Triton), and for an empty grid, which the driver refuses.
        """
        metadata, driver = compiled.metadata, _cuda()
        if driver is None or is_rocm():
            return None
        needs = (metadata.global_scratch_size, metadata.profile_scratch_size, metadata.launch_cooperative_grid)
        if any(needs) or metadata.num_ctas != 1 or 0 in grid:
            return None
        device = torch.cuda.current_device()
        _enter_context(driver, device)  # without it the driver does not report parameters
        cells: list[Any] = []
        at: dict[Path, int] = {}  # the cell of an argument or a field
        kinds = tuple(compiled.src.signature.values())
        copied = getattr(metadata, "tensordesc_meta", None) or []
        described = [(i, x) for i, x in enumerate(tensors) if isinstance(x, TensorDescriptor)]
        if len(copied) != len(described) or None in copied:
            return None
        maps = {i: TensorMap(driver, x, about) for (i, x), about in zip(described, copied, strict=True)}
        given = [maps.get(i, x) for i, x in enumerate(tensors)]
        if not _lay_out(kinds, _with(arguments, paths, given), cells, at):
            return None
        cells += [ctypes.c_uint64(0), ctypes.c_uint64(0)]  # scratch memory of the kernel, and of a profiler: none
        if _sizes_of_parameters(driver, compiled.function) != [ctypes.sizeof(cell) for cell in cells]:
            return None
        config = _Config(grid, (32 * metadata.num_warps, 1, 1), metadata.shared)
        if metadata.launch_pdl:
            attribute = _Attribute(_STREAM_SERIALIZATION, (1,))
            config.attributes, config.num_attributes = ctypes.pointer(attribute), 1
        changing = [None if i in maps else at.get(path) for i, path in enumerate(paths)]
        return cls(compiled.function, config, cells, changing, maps, device)

    def __call__(self, *tensors: Tensor | float | None) -> None:
        """Launch on the current stream; arguments are those of `Launch.replay`."""
        values = [x if isinstance(x, (int, float)) else 0 if x is None else x.data_ptr() for x in tensors]
        with self._lock:
            self._write(self._changing, 0, *values)
            for i, one in self._maps.items():
                one.point_to(int(values[i]))
            self._config.stream = torch._C._cuda_getCurrentRawStream(self._device)
            launch = self._driver.cuLaunchKernelEx
            status = launch(self._by_reference, self._function, self._pointers, None)
            if status == _INVALID_CONTEXT:  # this thread has not called the CUDA runtime yet
                _enter_context(self._driver, self._device)
                status = launch(self._by_reference, self._function, self._pointers, None)
        if status:
            raise RuntimeError(f"CUDA: the driver does not launch a kernel, error {status}")


def _lay_out(kind: Any, argument: Any, cells: list[Any], at: dict[Path, int], path: Path = ()) -> bool:
    """Append an argument as C values, those of a tuple one by one; False if there is no such C type."""
    if isinstance(kind, tuple):
        both = enumerate(zip(kind, argument, strict=True))
        return all(_lay_out(*one, cells, at, (*path, place)) for place, one in both)
    if kind == "constexpr":
        return True  # it is compiled in
    at[path] = len(cells)
    if kind.startswith("*"):
        cells.append(ctypes.c_uint64(argument.data_ptr() if isinstance(argument, Tensor) else argument or 0))
    elif kind in _C_TYPES:
        cells.append(_C_TYPES[kind](argument))
    elif isinstance(argument, TensorMap):  # its sizes and strides are parameters of their own
        cells.append(argument.cell)
        cells += [ctypes.c_int32(n) for n in argument.shape] + [ctypes.c_int64(n) for n in argument.strides]
    else:
        return False
    return True


@cache
def _cuda() -> Any | None:
    """Return the CUDA driver, if there is one that reports the parameters of a kernel (12.4 or newer), else None."""
    try:
        driver = ctypes.PyDLL("libcuda.so.1")
        _ = driver.cuLaunchKernelEx, driver.cuFuncGetParamInfo
    except (OSError, AttributeError):
        return None
    return driver


def _enter_context(driver: Any, device: int) -> None:
    """Make PyTorch's context of a GPU current in this thread, if it has none, so that it can launch there.

    The CUDA runtime does so with its first call in a thread; the driver does not.
    """
    current = ctypes.c_void_p()
    driver.cuCtxGetCurrent(ctypes.byref(current))
    if not current.value:
        driver.cuCtxSetCurrent(ctypes.c_void_p(_primary_context(driver, device)))


@cache
def _primary_context(driver: Any, device: int) -> int | None:
    """Return the context of a GPU that the CUDA runtime, and so PyTorch, computes in; it stays retained."""
    number, context = ctypes.c_int(), ctypes.c_void_p()
    driver.cuDeviceGet(ctypes.byref(number), device)
    driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), number)
    return context.value


def _sizes_of_parameters(driver: Any, function: int) -> list[int]:
    """Return the bytes of each parameter of a kernel, as the driver reports them."""
    sizes: list[int] = []
    offset, size = ctypes.c_size_t(), ctypes.c_size_t()
    while not driver.cuFuncGetParamInfo(
        ctypes.c_void_p(function), ctypes.c_size_t(len(sizes)), ctypes.byref(offset), ctypes.byref(size)
    ):
        sizes.append(size.value)
    return sizes
