"""Check that each tensor is what its memory holds, because kernels read it by a pointer.

Most tensors are. Others are resolved where arguments are bound, or refused by name:

    negated and conjugated views      resolved: an input by a copy; an output is refused by its check
    views of vmap, grad, jvp          refused: no memory of their own; so are functional, fake and sparse tensors
    subclasses with their own         refused: their values may be anywhere
      `__torch_dispatch__`

A call is bound once, and cache keys of `fastattn.dispatch` have only tensors that passed this check.
"""

from dataclasses import is_dataclass, replace
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from refattn.checks import describe
from refattn.options import AttentionOptions
from refattn.scales import Scales

T = TypeVar("T")
_CHECKED = "has_tables_in_memory"  # attribute of a plan whose tables have passed


def in_memory(name: str, argument: T) -> T:
    """Return an argument with tensors that are what their memory holds: itself, unless a view has to be resolved.

    Args:
        name: its name in errors.
        argument: a tensor, or a list, keys, options, scales, or a plan, with all tensors in it; anything else passes.

    Raises:
        ValueError: naming a tensor that has no memory of its own.
    """
    if isinstance(argument, Tensor):
        return cast(T, _resolved(name, argument))
    if isinstance(argument, list | tuple):
        fields = getattr(argument, "_fields", None)
        names = fields or [f"{name}[{i}]" for i in range(len(argument))]
        parts = [in_memory(*part) for part in zip(names, argument, strict=True)]
        if all(part is given for part, given in zip(parts, argument, strict=True)):
            return argument
        kind: Any = type(argument)
        return cast(T, kind(parts) if fields is None else kind(*parts))
    if is_dataclass(argument) and not isinstance(argument, type):
        return cast(T, _fields_in_memory(name, argument))
    return argument


def _fields_in_memory(name: str, argument: Any) -> Any:
    """Return options, scales or a plan with such tensors; errors name the field."""
    attributes = vars(argument)
    if _CHECKED in attributes:
        return argument
    prefix = f"{name}." if isinstance(argument, Scales) else ""
    fields = {part: getattr(argument, part) for part in argument.__dataclass_fields__}  # some are in the class alone
    held = {part: value for part, value in fields.items() if not isinstance(value, bool | int | float | None)}
    parts = {part: in_memory(prefix + part, value) for part, value in held.items()}
    changes = {part: value for part, value in parts.items() if value is not fields[part]}
    if changes:
        return replace(argument, **changes)
    if not isinstance(argument, AttentionOptions | Scales):
        attributes[_CHECKED] = True
    return argument


def _resolved(name: str, x: Tensor) -> Tensor:
    if type(x).__torch_dispatch__ is not Tensor.__torch_dispatch__:
        raise ValueError(f"{name}: expected a tensor that a kernel can read in memory, got {type(x).__qualname__}")
    if is_without_memory(x):
        raise ValueError(
            f"{name}: expected a tensor that a kernel can read in memory, got {describe(x)} without memory of its own"
        )
    if not (x.is_neg() or x.is_conj()):
        return x
    if x.element_size() == 1 and x.is_floating_point():  # torch negates no fp8
        raise ValueError(f"{name}: expected a tensor that a kernel can read in memory, got a negated view of fp8")
    return torch.resolve_neg(torch.resolve_conj(x))


def is_without_memory(x: Tensor) -> bool:
    """Return whether a tensor has elements but no address; False on the device `meta`, where no tensor is read."""
    try:
        return x.data_ptr() == 0 and x.numel() > 0 and x.device.type != "meta"
    except RuntimeError:  # tensors inside a torch.func transform; sparse and nested ones
        return True


def addresses(x: Tensor) -> tuple[int, int]:
    """Return the addresses where the first element begins and the last one ends; strides are not negative."""
    elements = x.numel()
    if not x.is_contiguous() and elements:
        elements = 1 + sum(stride * (size - 1) for stride, size in zip(x.stride(), x.shape, strict=True))
    first = x.data_ptr()
    return first, first + elements * x.itemsize
