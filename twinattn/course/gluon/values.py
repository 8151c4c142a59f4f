"""Tensors, scalars and addresses of a kernel, and the functions of `gl` and `tl` that compute with them.

Numbers are torch's; the rules are Triton's where they differ: integers are divided towards zero, a scalar widens what
it is added to, a maximum leaves out NaN, and memory that is not loaded is NaN. An address is an offset in the memory of
its tensor, and one outside of that memory is an error.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import index
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl


class KernelError(AssertionError):
    """A mistake in a kernel."""


def require(condition: object, message: str) -> None:
    """Raise a KernelError unless something is so."""
    if not condition:
        raise KernelError(message)


@dataclass(frozen=True)
class Kind:
    """The type of an element, or of an address of such elements."""

    torch: torch.dtype
    is_address: bool = False

    @property
    def element_ty(self) -> "Kind":
        """The type of what lies at an address."""
        require(self.is_address, "element_ty: a number is no address")
        return Kind(self.torch)

    @property
    def value(self) -> "Kind":
        """The type itself, as of a constant that holds one."""
        return self

    @property
    def primitive_bitwidth(self) -> int:
        """The bits of an element."""
        return self.torch.itemsize * 8


KINDS = {
    **{"int1": Kind(torch.bool), "int8": Kind(torch.int8), "uint8": Kind(torch.uint8), "int16": Kind(torch.int16)},
    **{"int32": Kind(torch.int32), "int64": Kind(torch.int64), "float16": Kind(torch.float16)},
    **{"bfloat16": Kind(torch.bfloat16), "float32": Kind(torch.float32)},
    **{"float8e4nv": Kind(torch.float8_e4m3fn), "float8e5": Kind(torch.float8_e5m2)},
}


class Value:
    """A tensor, or a scalar without dimensions; a product has no numbers until it is waited for."""

    def __init__(
        self, data: Tensor | None, layout: Any = None, memory: Tensor | None = None, product: Any = None
    ) -> None:
        self._data, self.layout, self.memory, self.product = data, layout, memory, product

    @property
    def data(self) -> Tensor:
        """The numbers, or offsets of addresses."""
        if self._data is None:
            raise KernelError("a product is read before it is waited for")
        return self._data

    def become(self, data: Tensor) -> None:
        """Have the numbers of a product that was waited for."""
        self._data, self.product = data, None

    @property
    def dtype(self) -> Kind:
        """The type of an element."""
        return Kind(self.data.dtype) if self.memory is None else Kind(self.memory.dtype, is_address=True)

    @property
    def type(self) -> SimpleNamespace:
        """What a kernel reads of the type: the layout."""
        return SimpleNamespace(layout=self.layout)

    @property
    def shape(self) -> tuple[int, ...]:
        """The sizes."""
        return tuple(self.data.shape)

    def to(self, kind: Kind, bitcast: bool = False) -> "Value":
        """Convert, or read the bits as another type."""
        require(not bitcast or self.data.dtype.itemsize == kind.torch.itemsize, "bitcast: types of as many bits")
        return Value(self.data.view(kind.torch) if bitcast else self.data.to(kind.torch), self.layout)

    def reshape(self, shape: Sequence[int]) -> "Value":
        """Return the same elements in another shape."""
        return Value(self.data.reshape(tuple(shape)))

    def permute(self, order: Sequence[int]) -> "Value":
        """Return the same elements with the axes in another order."""
        return Value(self.data.permute(tuple(order)))

    def __getitem__(self, at: Any) -> "Value":
        sliced = isinstance(self.layout, gl.SliceLayout)
        return Value(self.data[at], self.layout.parent if sliced else None, self.memory)

    def __neg__(self) -> "Value":
        return Value(-self.data, self.layout)

    def __invert__(self) -> "Value":
        return Value(torch.bitwise_not(self.data), self.layout)

    def __bool__(self) -> bool:
        return bool(self.data)

    def __index__(self) -> int:
        return index(self.data)


def value_of(x: Any, like: torch.dtype | None = None) -> Value:
    """Return a number as a value, in the type of another if that can hold it."""
    if isinstance(x, Value):
        return x
    if isinstance(x, bool):
        return Value(torch.tensor(x))
    if isinstance(x, int):
        fits = like is not None and like is not torch.bool
        return Value(torch.tensor(x, dtype=like if fits else torch.int32 if -(2**31) <= x < 2**31 else torch.int64))
    if not isinstance(x, float):
        raise TypeError(f"number: expected one, got {type(x)}")
    return Value(torch.tensor(x, dtype=like if like is not None and like.is_floating_point else torch.float32))


def _both(name: str, x: Value, other: Any) -> Value:
    """Compute from two values in the type that holds both; addresses move by offsets."""
    y = value_of(other, x.data.dtype)
    if x.memory is not None or y.memory is not None:
        return _moved_by(name, x, y)
    kind = torch.promote_types(x.data.dtype, y.data.dtype)
    if name in ("truediv", "mod") and kind in (torch.float16, torch.bfloat16):
        kind = torch.float32
    require(name != "floordiv" or not kind.is_floating_point, "//: expected integers")
    return Value(_COMPUTED[name](x.data.to(kind), y.data.to(kind)), _layout_of(x, y))


def _moved_by(name: str, x: Value, y: Value) -> Value:
    """Return addresses at some distances from others."""
    if x.memory is None and name == "add":
        x, y = y, x
    is_offset = y.memory is None and not y.data.dtype.is_floating_point
    require(x.memory is not None and is_offset and name in ("add", "sub"), "addresses move by integers, and no more")
    return Value(_COMPUTED[name](x.data, y.data), _layout_of(x, y), x.memory)


_COMPUTED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    **{"add": torch.add, "sub": torch.sub, "mul": torch.mul, "truediv": torch.true_divide, "mod": torch.fmod},
    **{"rshift": torch.bitwise_right_shift, "lshift": torch.bitwise_left_shift, "and": torch.bitwise_and},
    **{"or": torch.bitwise_or, "xor": torch.bitwise_xor, "lt": torch.lt, "le": torch.le, "gt": torch.gt},
    **{"ge": torch.ge, "eq": torch.eq, "ne": torch.ne},
    "floordiv": lambda x, y: torch.div(x, y, rounding_mode="trunc"),
    "maximum": lambda x, y: torch.fmax(x, y) if x.is_floating_point() else torch.maximum(x, y),
    "minimum": lambda x, y: torch.fmin(x, y) if x.is_floating_point() else torch.minimum(x, y),
}


def _set_operators() -> None:
    for name in _COMPUTED.keys() - {"maximum", "minimum"}:
        setattr(Value, f"__{name}__", lambda x, y, name=name: _both(name, x, y))
        setattr(Value, f"__r{name}__", lambda x, y, name=name: _both(name, value_of(y, x.data.dtype), x))


_set_operators()


def _layout_of(*values: Value) -> Any:
    """Return the layout of the first value that has one, those with more axes before others."""
    known = [x for x in values if x.layout is not None]
    return max(known, key=lambda x: x.data.ndim).layout if known else None


# --- memory ---


def address_of(tensor: Tensor) -> Value:
    """Return the address of the first element of a tensor."""
    memory = torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage())
    return Value(torch.tensor(tensor.storage_offset()), None, memory)


def moved(address: Value, offsets: Tensor) -> Value:
    """Return addresses at some distances from one."""
    return Value(address.data + offsets, None, address.memory)


def _memory_of(address: Value) -> Tensor:
    if address.memory is None:
        raise KernelError("a number is no address")
    return address.memory


def _places(address: Value, mask: Any) -> tuple[Tensor, Tensor]:
    """Return the offsets of addresses, and which of them are asked for; each must lie in its memory."""
    asked = value_of(True if mask is None else mask).data
    offsets, asked = torch.broadcast_tensors(address.data.to(torch.int64), asked)
    used = offsets[asked]
    low, high = (int(used.min()), int(used.max())) if used.numel() else (0, 0)
    size = _memory_of(address).numel()
    require(not used.numel() or (low >= 0 and high < size), f"addresses {low} to {high} of a memory of {size} elements")
    return offsets, asked


def poison(dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
    """Return the contents of memory before the first write: NaN, or a large integer."""
    if dtype.is_floating_point:
        return torch.full(tuple(shape), torch.nan, dtype=torch.float32).to(dtype)
    return torch.full(tuple(shape), 85).to(dtype)


def load(address: Value, mask: Any = None, other: Any = None, **hints: Any) -> Value:
    """Load elements where a mask is true, else another number; nothing asked for is nothing known."""
    offsets, asked = _places(address, mask)
    memory = _memory_of(address)
    rest = poison(memory.dtype, ()) if other is None else value_of(other, memory.dtype).data.to(memory.dtype)
    found = memory[torch.where(asked, offsets, 0)] if memory.numel() else rest.expand(offsets.shape)
    return Value(torch.where(asked, found, rest), address.layout)


def store(address: Value, value: Any, mask: Any = None) -> None:
    """Store elements where a mask is true."""
    offsets, asked = _places(address, mask)
    memory = _memory_of(address)
    data = value_of(value, memory.dtype).data.to(memory.dtype).expand(offsets.shape)
    memory[offsets[asked]] = data[asked]


def atomic_add(address: Value, value: Any, mask: Any = None, sem: str = "acq_rel") -> Value:
    """Add to elements one after the other, and return what each was before."""
    offsets, asked = _places(address, mask)
    memory = _memory_of(address)
    more = value_of(value, memory.dtype).data.to(memory.dtype).expand(offsets.shape)
    before = poison(memory.dtype, offsets.shape)
    for at in asked.nonzero().tolist():
        place = int(offsets[tuple(at)])
        before[tuple(at)] = memory[place]
        memory[place] += more[tuple(at)]
    return Value(before, value_of(value).layout)


# --- functions ---


def _maximum(x: Any, y: Any) -> Value:
    return _both("maximum", *_one_value(x, y))


def _minimum(x: Any, y: Any) -> Value:
    return _both("minimum", *_one_value(x, y))


def _one_value(x: Any, y: Any) -> tuple[Value, Any]:
    return (x, y) if isinstance(x, Value) else (value_of(y), x)


def _where(condition: Value, x: Any, y: Any) -> Value:
    like = next((one.data.dtype for one in (x, y) if isinstance(one, Value)), None)
    x, y = value_of(x, like), value_of(y, like)
    kind = torch.promote_types(x.data.dtype, y.data.dtype)
    return Value(torch.where(condition.data, x.data.to(kind), y.data.to(kind)), _layout_of(x, y, condition))


def _reduced(x: Value, axis: int, data: Tensor) -> Value:
    return Value(data, None if x.layout is None else gl.SliceLayout(axis, x.layout))


def _max(x: Value, axis: int) -> Value:
    data = _of_32_bits(x.data)
    if not data.dtype.is_floating_point:
        return _reduced(x, axis, data.amax(axis))
    numbers = torch.where(data.isnan(), -torch.inf, data).amax(axis)
    return _reduced(x, axis, torch.where(data.isnan().all(axis), torch.nan, numbers))


def _sum(x: Value, axis: int) -> Value:
    data = x.data if x.data.dtype.is_floating_point else _of_32_bits(x.data)
    return _reduced(x, axis, data.sum(axis, dtype=data.dtype))


def _of_32_bits(data: Tensor) -> Tensor:
    """Return narrow numbers in 32 bits, as reductions do."""
    if data.dtype.itemsize >= 4:
        return data
    return data.to(torch.float32 if data.dtype.is_floating_point else torch.int32)


def _arange(start: int, end: int, layout: Any = None) -> Value:
    return Value(torch.arange(start, end, dtype=torch.int32), layout)


def _full(shape: Sequence[int], number: Any, kind: Kind, layout: Any = None) -> Value:
    return Value(value_of(number).data.to(kind.torch).expand(tuple(shape)).clone(), layout)


def _split(x: Value) -> tuple[Value, Value]:
    return Value(x.data[..., 0]), Value(x.data[..., 1])


def _join(x: Value, y: Value) -> Value:
    return Value(torch.stack((x.data, y.data), -1))


def _cdiv(x: Any, y: Any) -> Any:
    return (x + (y - 1)) // y


def _static_assert(condition: Any, message: str = "a static assertion fails") -> None:
    require(condition, message)


def _of_each(compute: Callable[[Tensor], Tensor]) -> Callable[[Any], Value]:
    return lambda x: Value(compute(value_of(x).data), value_of(x).layout)


FUNCTIONS: dict[str, Any] = {
    **KINDS,
    **{"load": load, "store": store, "atomic_add": atomic_add, "where": _where, "maximum": _maximum},
    **{"minimum": _minimum, "max": _max, "sum": _sum, "arange": _arange, "full": _full, "split": _split, "join": _join},
    **{"zeros": lambda shape, kind, layout=None: _full(shape, 0, kind, layout), "cdiv": _cdiv, "static_range": range},
    **{"exp2": _of_each(torch.exp2), "log2": _of_each(torch.log2), "abs": _of_each(torch.abs)},
    "rsqrt": _of_each(torch.rsqrt),
    **{"expand_dims": lambda x, axis: Value(x.data.unsqueeze(axis), None, x.memory), "static_assert": _static_assert},
    "convert_layout": lambda x, layout, assert_trivial=False: Value(x.data, layout, x.memory),
    "constexpr": lambda x: x,
    **{"floor": _of_each(torch.floor), "exp": _of_each(torch.exp), "log": _of_each(torch.log)},
}
LAYOUTS = (
    *("BlockedLayout", "SliceLayout", "DotOperandLayout", "NVMMADistributedLayout", "NVMMASharedLayout"),
    "SwizzledSharedLayout",
)
FUNCTIONS |= {name: getattr(gl, name) for name in LAYOUTS}
