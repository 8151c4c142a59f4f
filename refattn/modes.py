"""The context of a call: autocast, gradients, and the compute type, which a test may override."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.autograd import forward_ad

from refattn.options import PER_HEAD, AttentionOptions
from refattn.scales import Scales

P = ParamSpec("P")
T = TypeVar("T")

AUTOCAST_DEVICES = ("cpu", "cuda", "mps", "xpu")

_compute_dtype: ContextVar[torch.dtype | None] = ContextVar("compute_dtype", default=None)


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the type that the reference computes in: float64 for float64 input, else float32."""
    asked = _compute_dtype.get()
    if asked is not None:
        return asked
    return torch.float64 if dtype == torch.float64 else torch.float32


@contextmanager
def computing_in(dtype: torch.dtype) -> Iterator[None]:
    """Override the reference's compute type inside a `with` block, to measure rounding errors."""
    token = _compute_dtype.set(dtype)
    try:
        yield
    finally:
        _compute_dtype.reset(token)


def without_autocast(function: Callable[P, T]) -> Callable[P, T]:
    """Decorate a function to run with `torch.autocast` disabled.

    Autocast would run matrix products in bfloat16 or float16, whatever the types of their inputs, and it raises for
    fp8.
    """

    @wraps(function)
    def call(*arguments: P.args, **options: P.kwargs) -> T:
        active = [device for device in AUTOCAST_DEVICES if torch.is_autocast_enabled(device)]
        if not active:
            return function(*arguments, **options)
        with ExitStack() as off:
            for device in active:
                off.enter_context(torch.autocast(device, enabled=False))
            return function(*arguments, **options)

    return call


def is_autocast_enabled(device: torch.device) -> bool:
    """Return whether autocast would change what is computed on a device."""
    kind = device.type
    if kind in ("cpu", "cuda") and not torch._C._is_any_autocast_enabled():  # faster, but does not cover MPS
        return False
    return kind in AUTOCAST_DEVICES and torch.is_autocast_enabled(kind)


def has_tangents() -> bool:
    """Return whether tensors may have tangents, inside `torch.autograd.forward_ad.dual_level` or `torch.func.jvp`."""
    return forward_ad._current_level >= 0


def refuse_gradients(why: str, **arguments: Any) -> None:
    """Raise if an argument requires a gradient that the function does not have, in either mode of differentiation.

    Under `torch.no_grad()`, `requires_grad` is ignored.

    Args:
        why: the reason, which errors give after the name of the argument.
        arguments: tensors, lists and named tuples of tensors, options, scales; anything else is ignored.

    Raises:
        NotImplementedError: naming the first tensor that requires a gradient, or has a tangent.
    """
    backward, forward = torch.is_grad_enabled(), has_tangents()
    if not (backward or forward):
        return
    for name, value in arguments.items():
        for full_name, tensor in _tensors(name, value):
            if backward and tensor.requires_grad:
                raise NotImplementedError(f"{full_name}: requires_grad, but {why}")
            if forward and forward_ad.unpack_dual(tensor).tangent is not None:
                raise NotImplementedError(f"{full_name}: has a tangent, but {why}")


def _tensors(name: str, value: object) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors in an argument, each with its name for errors."""
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, AttentionOptions):
        for option in PER_HEAD:
            yield from _tensors(option, getattr(value, option))
    elif isinstance(value, Scales):
        for part, scale in vars(value).items():
            yield from _tensors(f"scales.{part}", scale)
    elif isinstance(value, list | tuple):
        fields = getattr(value, "_fields", None)
        for i, part in enumerate(value):
            yield from _tensors(f"{name}[{i}]" if fields is None else fields[i], part)
