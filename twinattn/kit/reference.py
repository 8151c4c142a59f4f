"""The outputs of the reference for an example, in a wider type and in its own, cached by the bits of the arguments."""

import ctypes
import hashlib
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor

from refattn.modes import computing_in
from twinattn.kit import gradients
from twinattn.kit import states as of_states
from twinattn.kit.call import plan_and_attend
from twinattn.kit.example import PATHS, Answers, Arguments, Example, Path
from twinattn.kit.kernel import NoMemoryError
from twinattn.kit.tolerance import WIDER, on_cpu

MOST_EXPECTED = 256  # expected outputs that are cached
MOST_AT_ONCE = 2**27  # elements of repeated keys and values: 1 GiB in float64
HEADS = dict(query=1, key=1, value=1, key_cache=2, value_cache=2, alibi_slopes=0, sinks=0)  # dimensions of heads
_EXPECTED: dict[bytes, tuple[Answers, Answers]] = {}  # by the bits of their arguments


def expected(example: Example, arguments: Arguments) -> tuple[Answers, Answers]:
    """Return the outputs of the reference in a wider type, and those of its formula in the type of the arguments.

    It computes on the CPU, whatever the device of the arguments is. A write has one exact result, the pools. Many
    properties use the same batch, so the latest results are cached by the bits of the arguments. Do not modify them.
    """
    path, arguments = PATHS[example.path], on_cpu(arguments)
    asked = hashlib.blake2b()
    _note((path.name, example.block_size, arguments), asked.update)
    if asked.digest() not in _EXPECTED:
        if len(_EXPECTED) == MOST_EXPECTED:
            _EXPECTED.pop(next(iter(_EXPECTED)))  # the oldest
        _EXPECTED[asked.digest()] = _in_memory(path, example, arguments)
    return _EXPECTED[asked.digest()]


def forget_expected() -> None:
    """Clear the cache of `expected`, where each large batch is used once."""
    _EXPECTED.clear()


def _note(x: Any, update: Callable[[Any], None]) -> None:
    """Pass every bit of some arguments to `update`: of tensors the type, shape and values, but not the strides."""
    if isinstance(x, Tensor):
        update(f"{x.dtype}{list(x.shape)}".encode())
        rows = x.detach().clone(memory_format=torch.contiguous_format)
        update(ctypes.string_at(rows.data_ptr(), rows.nbytes))  # NumPy need not be installed
    elif is_dataclass(x) and not isinstance(x, type):
        update(type(x).__name__.encode())
        _note([getattr(x, f.name) for f in fields(x)], update)
    elif isinstance(x, dict):
        _note(list(x.items()), update)
    elif isinstance(x, list | tuple):
        update(f"{len(x)}(".encode())
        for y in x:
            _note(y, update)
    else:
        update(f"{x!r},".encode())


def _in_memory(path: Path, example: Example, arguments: Arguments) -> tuple[Answers, Answers]:
    """Compute what `expected` returns, of many keys one KV head at a time, and say so if there is no room for it."""
    try:
        if _size(example) <= MOST_AT_ONCE or not _is_plain(path, arguments):
            return _expected(path, example, arguments)
        heads = [_expected(path, example, one) for one in _by_head(arguments, example.heads[1])]
        wide, low = ({name: torch.cat([x[i][name] for x in heads], 1) for name in ("out", "lse")} for i in range(2))
        return wide, low
    except (MemoryError, torch.OutOfMemoryError) as error:
        raise NoMemoryError("not drawn: this machine has no room for the reference of this batch") from error
    except RuntimeError as error:
        if "allocate memory" not in str(error):
            raise
        raise NoMemoryError("not drawn: this machine has no room for the reference of this batch") from error


def _size(example: Example) -> int:
    """Return the elements of the keys and values of the longest sequence, repeated for every query head."""
    longest = max((s for _, s in example.lens), default=0)
    return longest * example.heads[0] * (example.head_size + example.value_size)


def _is_plain(path: Path, arguments: Arguments) -> bool:
    """Return whether every KV head can be computed alone, from tensors that have a dimension of heads."""
    known = {*HEADS, "batch", "window_size", "chunk_size", "softmax_scale", "softcap", "causal", "prefixes"}
    return path.attends and "query" in arguments and arguments.keys() <= known


def _by_head(arguments: Arguments, num_kv_heads: int) -> Iterator[Arguments]:
    """Yield the arguments of each KV head, with its query heads."""
    for head in range(num_kv_heads):
        one = dict(arguments)
        for name in arguments.keys() & HEADS.keys():
            if isinstance(arguments[name], Tensor):
                one[name] = arguments[name].chunk(num_kv_heads, HEADS[name])[head]
        yield one


def _expected(path: Path, example: Example, arguments: Arguments) -> tuple[Answers, Answers]:
    """Compute what `expected` returns."""
    if path.in_place:
        return of_states.expected(arguments)
    if path.differentiates:
        return gradients.expected(arguments)
    if path.function == "write":
        pools = {name: arguments[name].clone() for name in ("key_cache", "value_cache")}
        path.module.write(**{**arguments, **pools})
        return pools, pools
    if path.function == "select":
        selected = {"out": path.module.select(**arguments)}
        return selected, selected

    def by_reference(arguments: Arguments) -> Answers:
        if path.function == "merge":
            out, lse = path.module.merge(**arguments)
        else:
            of_pages = dict(block_size=example.block_size) if path.pools else {}
            out, lse = plan_and_attend(path.module, function=path.function, **arguments, **of_pages, return_lse=True)
        return {"out": out, "lse": lse}

    dtype = (arguments["outs"][0] if path.function == "merge" else arguments["query"]).dtype
    wide = by_reference({name: _wider(value, WIDER[dtype]) for name, value in arguments.items()})
    with computing_in(dtype):
        return wide, by_reference(arguments)


def _wider(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, list):
        return [_wider(x, dtype) for x in value]
    is_code = isinstance(value, Tensor) and value.dtype.itemsize == 1
    if not isinstance(value, Tensor) or not value.is_floating_point() or is_code:
        return value
    return value.to(torch.promote_types(dtype, value.dtype))
