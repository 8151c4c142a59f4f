"""The parameters of a callable: of a function, a module of torch.nn, an operator of torch, or a scripted function."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch


def parameters_of(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    """Return the parameters of a callable by name, in their order.

    Raises:
        ValueError: if it names none that a call by name could use: builtins, and wrappers that take `*args`.
    """
    schema = _schema_of(function)
    if schema is not None:
        return {one.name: _parameter(one) for one in schema.arguments}
    try:
        found = inspect.signature(_called(function)).parameters
    except ValueError as error:  # a builtin
        raise ValueError("names no parameters") from error
    variable = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD
    if found and all(parameter.kind in variable for parameter in found.values()):
        raise ValueError(f"names no parameters, but takes {', '.join(map(str, found.values()))}")
    return found


def _called(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return what names the parameters: of a module its `forward`, also where it is compiled."""
    function = getattr(function, "_orig_mod", function)
    return function.forward if isinstance(function, torch.nn.Module) else function


def _schema_of(function: Callable[..., Any]) -> Any:
    """Return the schema of an operator or of a scripted function; None for others."""
    if isinstance(function, torch._ops.OpOverloadPacket):
        function = function.default
    function = getattr(function, "_opoverload", function)  # an operator of torch.library.custom_op has it inside
    if isinstance(function, torch._ops.OpOverload):
        return function._schema
    return function.schema if isinstance(function, torch.jit.ScriptFunction) else None


def _parameter(argument: Any) -> inspect.Parameter:
    """Return an argument of a schema as a parameter."""
    kind = inspect.Parameter.KEYWORD_ONLY if argument.kwarg_only else inspect.Parameter.POSITIONAL_OR_KEYWORD
    default = argument.default_value if argument.has_default_value() else inspect.Parameter.empty
    return inspect.Parameter(argument.name, kind, default=default)
