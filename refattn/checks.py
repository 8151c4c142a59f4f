"""Checks of single arguments: numbers, flags, windows, dtypes and shapes of tensors, `out`.

A `ValueError` names the argument, what was expected and what was given. These run in every layer, so they never read a
tensor on a device, and on a CPU only tensors with one element per head.
"""

import sys
from collections.abc import Sequence
from dataclasses import fields
from functools import lru_cache
from math import isfinite
from pathlib import Path
from typing import Any, cast, get_args

import torch
from torch import Tensor

LARGEST_INT32 = 2**31 - 1
QUERY_TYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def check_sizes(**sizes: int) -> None:
    """Check that the named sizes are positive ints within int32.

    Raises:
        ValueError: naming the first that is not.
    """
    for name, size in sizes.items():
        if not is_int(size) or size < 1:
            raise ValueError(f"{name}: expected a positive int, got {describe(size)}")
        if size > LARGEST_INT32:
            raise ValueError(f"{name}: expected at most {LARGEST_INT32}, got {size}")


def check_int(name: str, value: int, *, at_most: int | None = LARGEST_INT32) -> None:
    """Check a length or a count: a Python int of at least 0, and of at most `at_most` (int32 by default).

    Raises:
        ValueError: naming it.
    """
    if not is_int(value) or value < 0:
        raise ValueError(f"{name}: expected a Python int of at least 0, got {describe(value)}")
    if at_most is not None and value > at_most:
        raise ValueError(f"{name}: expected at most {at_most}, got {value}")


def check_number(name: str, value: float, *, at_least: float | None = None, above: float | None = None) -> None:
    """Check that a Python number is finite and not too small.

    Raises:
        ValueError: naming it.
    """
    is_number = isinstance(value, (float, int)) and not isinstance(value, bool)
    finite = is_number and -sys.float_info.max <= value <= sys.float_info.max
    if not finite or (at_least is not None and value < at_least) or (above is not None and value <= above):
        bound = "" if at_least is None else f" of at least {at_least:g}"
        bound = bound if above is None else f" above {above:g}"
        raise ValueError(f"{name}: expected a finite number{bound}, got {describe(value)}")


def check_flag(name: str, value: bool) -> None:
    """Check a flag.

    Raises:
        ValueError: naming it, if it is neither True nor False.
    """
    if value is not True and value is not False:
        raise ValueError(f"{name}: expected True or False, got {describe(value)}")


def check_window(window_size: tuple[int, int]) -> tuple[int, int]:
    """Check a window, `(left, right)` in tokens, and return it.

    Raises:
        ValueError: if it is not a pair of ints of at least -1 within int32.
    """
    if type(window_size) is tuple and len(window_size) == 2:
        left, right = window_size
        if is_int(left) and is_int(right) and -1 <= left <= LARGEST_INT32 and -1 <= right <= LARGEST_INT32:
            return left, right
    raise ValueError(
        f"window_size: expected (left, right), two ints, each at least -1 (no limit) and at most {LARGEST_INT32}, "
        f"got {window_size!r}"
    )


def check_chunk(chunk_size: int, block_size: int) -> None:
    """Check the chunk size of local attention: a multiple of the block size.

    Raises:
        ValueError: naming the size, what was expected and what was given.
    """
    check_sizes(chunk_size=chunk_size, block_size=block_size)
    if chunk_size % block_size:
        raise ValueError(f"chunk_size: expected a multiple of block_size={block_size}, got {chunk_size}")


def tensors_of(kind: type) -> tuple[str, ...]:
    """Return the names of the fields of a dataclass that are annotated as tensors, optional or not."""
    one_of = {one.name: get_args(one.type) or (one.type,) for one in fields(kind)}
    return tuple(name for name, kinds in one_of.items() if any(getattr(x, "array_type", x) is Tensor for x in kinds))


def check_per_head(name: str, numbers: Tensor, size: int | None = None) -> None:
    """Check an option with one element per head, `[h]`: any floating point type; on a CPU also that all are finite.

    Args:
        name: its name in errors.
        numbers: the tensor.
        size: number of heads; None for any.

    Raises:
        ValueError: naming the option, what was expected and what was given.
    """
    is_one = isinstance(numbers, Tensor) and numbers.ndim == 1 and numbers.is_floating_point()
    if not is_one or (size is not None and numbers.shape[0] != size):
        wanted = "[h]" if size is None else f"[h={size}]"
        raise ValueError(f"{name}: expected floating point {wanted}, got {describe(numbers)}")
    if numbers.is_cpu and not all(map(isfinite, numbers.tolist())):
        raise ValueError(f"{name}: expected finite numbers, got {numbers.tolist()}")


def check_memory(dtype: torch.dtype, device: torch.device | str, *, name: str = "dtype") -> None:
    """Check the dtype and the device of a tensor to be allocated; `name` is the dtype's name in errors.

    Raises:
        ValueError: if `dtype` is not a torch dtype, or the device is not available.
    """
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name}: expected a torch.dtype, got {describe(dtype)}")
    check_device(device)


def check_device(device: torch.device | str) -> None:
    """Check that a device is available.

    Raises:
        ValueError: if it is not.
    """
    try:
        place = torch.device(device)
    except (RuntimeError, TypeError):
        raise ValueError(f"device: expected a torch.device or its name, got {describe(device)}") from None
    try:
        _find_device(place)
    except (RuntimeError, AssertionError):  # torch has no such device, or no support for it
        raise ValueError(f"device: expected one that is here, got '{place}'") from None


@lru_cache
def _find_device(device: torch.device) -> None:
    """Allocate an empty tensor on a device, which raises if the device is not available; cached."""
    torch.empty(0, device=device)


def check_file(name: str, file: Path | None) -> None:
    """Check that a file can be written, before its content is computed.

    Raises:
        ValueError: if it is a folder, or its parent folder does not exist.
    """
    if file is not None and (file.is_dir() or not file.parent.is_dir()):
        raise ValueError(f"{name}: expected a file in a folder that is there, got {str(file)!r}")


def check_folder(name: str, folder: Path | None) -> None:
    """Check that a folder exists or can be made.

    Raises:
        ValueError: if the folder or one of its parents is a file.
    """
    if folder is not None and not next(path for path in (folder, *folder.parents) if path.exists()).is_dir():
        raise ValueError(f"{name}: expected a folder, or one that can be made, got {str(folder)!r}")


def same_device(**tensors: Tensor) -> None:
    """Check that the named tensors are on one device.

    Raises:
        ValueError: naming the first tensor on another device.
    """
    (first, reference), *others = tensors.items()
    for name, tensor in others:
        if tensor.device != reference.device:
            raise ValueError(f"{name}: expected {reference.device}, where {first} is, got {tensor.device}")


def check_can_be_written(**memory: Tensor) -> None:
    """Check that tensors can be written in place: with grad mode on, no leaf that requires a gradient can.

    Raises:
        ValueError: naming the first that is such a leaf, or a view of one.
    """
    if not torch.is_grad_enabled():
        return
    for name, tensor in memory.items():
        base = tensor if tensor._base is None else tensor._base
        if base.requires_grad and base.is_leaf:
            raise ValueError(f"{name}: expected memory to write to, got a leaf that requires a gradient, or its view")


Declared = tuple[Tensor | None, str] | tuple[Tensor | None, str, torch.dtype | None]


def check(sizes: dict[str, int] | None = None, /, **tensors: Declared) -> dict[str, int]:
    """Check the dtypes, shapes and devices of tensors by letters; a letter has the same size in all tensors.

        check(query=(query, "number t h d"), key=(key, "query: s hk d"), lens=(lens, "int32 b"))

    The letters may follow a torch dtype, `float` for any floating point type, `number` for `QUERY_TYPES`, or `name:`
    for the dtype of that tensor; or a dtype is the third item of the tuple. With `or None` at the end, a tensor is
    optional. A dimension may be a number, or an expression like `b+1` with its size in `sizes`.

    No tensor may be sparse, nested or quantized by torch, and no integer tensor a negated view: kernels read tables in
    place at each launch, so they cannot be copied.

    Args:
        sizes: required sizes of letters.
        tensors: tensors and their letters, by name.

    Returns:
        The size of each letter.

    Raises:
        ValueError: naming the first tensor that does not fit.
    """
    given = sizes or {}
    sizes, first = dict(given), None
    for name, declared in tensors.items():
        tensor, (dtype, kind, dims, numbers, is_optional) = declared[0], _read_letters(declared[1])
        if tensor is None and is_optional:
            continue
        if len(declared) == 3:
            dtype = declared[2]
        elif kind in tensors:
            dtype = cast(Tensor, tensors[kind][0]).dtype
        sizes |= numbers
        fits = isinstance(tensor, Tensor) and (dtype is None or tensor.dtype == dtype) and is_ordinary(tensor)
        if tensor is None or not fits or tensor.ndim != len(dims):
            raise _misfit(name, dtype, given, tensors)
        if tuple(map(sizes.setdefault, dims, tensor.shape)) != tensor.shape:
            raise _misfit(name, dtype, given, tensors)
        if kind == "number":
            check_numbers(name, tensor)
        elif kind == "float":
            check_floating(name, tensor)
        first = first or (name, tensor)
        if tensor.device != first[1].device:
            same_device(**dict([first]), **{name: tensor})
    return sizes


@lru_cache(maxsize=1024)
def _read_letters(letters: str) -> tuple[torch.dtype | None, str, tuple[str, ...], dict[str, int], bool]:
    """Return the dtype or kind, the dimensions, the numbers among them, and whether the tensor is optional."""
    is_optional = letters.endswith(" or None")
    spaced = letters.removesuffix(" or None")
    for sign in "+-*":
        spaced = spaced.replace(sign, f"\0{sign}\0")
    words = [word.replace("\0", " ") for word in spaced.split()]
    dtype, kind = None, ""
    if words and (words[0] in ("float", "number") or words[0].endswith(":")):
        kind = words.pop(0).removesuffix(":")
    elif words and isinstance(getattr(torch, words[0], None), torch.dtype):
        dtype = getattr(torch, words.pop(0))
    return dtype, kind, tuple(words), {word: int(word) for word in words if word.isdigit()}, is_optional


def _misfit(name: str, dtype: torch.dtype | None, given: dict[str, int], tensors: dict[str, Declared]) -> ValueError:
    """Return the error for a tensor that does not fit, with the sizes known from earlier tensors."""
    known = dict(given)
    for other, declared in tensors.items():
        dims = _read_letters(declared[1])[2]
        if other == name:
            break
        if declared[0] is not None:
            known = dict(zip(dims, declared[0].shape, strict=True)) | known
    wanted = (f"{dim}={known[dim]}" if dim in known and not dim.isdigit() else dim for dim in dims)
    kind = f"{str(dtype).removeprefix('torch.')} " if dtype is not None else ""
    return ValueError(f"{name}: expected {kind}[{', '.join(wanted)}], got {describe(tensors[name][0])}")


def check_own_memory(name: str, tensor: Tensor) -> None:
    """Check by its strides that a tensor to be written has separate memory for each element.

    The stride of each dimension has to exceed the extent of all dimensions with smaller strides, as in slices and
    transposed tensors. A negated or conjugated view raises, because its memory holds other values than the view.

    Raises:
        ValueError: naming it.
    """
    if tensor.is_neg() or tensor.is_conj():
        view = "negated" if tensor.is_neg() else "conjugated"
        raise ValueError(f"{name}: expected memory that holds its own values, got a {view} view")
    if tensor.is_contiguous():
        return
    end = 0  # offset of the last element of the dimensions so far
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride <= end:
                raise ValueError(f"{name}: expected memory for each element, got strides of {tensor.stride()}")
            end += stride * (size - 1)


def check_side_by_side(name: str, table: Tensor) -> None:
    """Check that a table is contiguous: kernels take its pointer at each launch, without strides.

    A copy would not see in-place updates of the table for the next step.

    Raises:
        ValueError: naming it.
    """
    if not table.is_contiguous():
        strides = f"a stride of {table.stride(0)}" if table.ndim == 1 else f"strides of {table.stride()}"
        raise ValueError(f"{name}: expected its entries side by side, got {strides}")


def check_floating(name: str, tensor: Tensor) -> None:
    """Check that a tensor has a floating point type.

    Raises:
        ValueError: naming it.
    """
    if not tensor.is_floating_point():
        raise ValueError(f"{name}: expected a floating point type, got {describe(tensor)}")


def check_numbers(name: str, tensor: Tensor) -> torch.dtype:
    """Check that an argument is a tensor with a dtype of `QUERY_TYPES`, and return the dtype.

    Raises:
        ValueError: if it is not.
    """
    if not isinstance(tensor, Tensor) or tensor.dtype not in QUERY_TYPES:
        types = "bfloat16, float16, float32 or float64"
        raise ValueError(f"{name}: expected a floating point type ({types}), got {describe(tensor)}")
    return tensor.dtype


def check_normed(normed: Tensor, difference: Tensor) -> Tensor:
    """Check the result of a norm of differences `[t, h/2, 2*d]`, and return it.

    Raises:
        ValueError: if it has another shape, or is not floating point.
    """
    check(dict(zip(("t", "h/2", "2 * d"), difference.shape, strict=True)), norm=(normed, "float t h/2 2*d"))
    return normed


def check_list(name: str, values: Sequence[Any], what: str) -> None:
    """Check that an argument is a sequence, but not a string.

    Raises:
        ValueError: naming it.
    """
    if not isinstance(values, Sequence) or isinstance(values, (str, bytes)):
        raise ValueError(f"{name}: expected a list of {what}, got {describe(values)}")


def is_int(value: object) -> bool:
    """Return whether a value is a Python int, but not a bool."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_ordinary(tensor: Tensor) -> bool:
    """Return whether a tensor is strided: not sparse, nested, quantized by torch, or a negated view of integers."""
    if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_quantized:
        return False
    return tensor.dtype not in (torch.int32, torch.int64) or not tensor.is_neg()


def describe(value: object) -> str:
    """Return a short description of an argument for errors."""
    if isinstance(value, Tensor):
        dtype = str(value.dtype).removeprefix("torch.")
        if value.is_nested:
            return f"{dtype} in a nested tensor"
        layout = "" if value.layout is torch.strided else f" in the layout {value.layout}"
        return f"{dtype} {list(value.shape)}{layout}{' in a negated view' if value.is_neg() else ''}"
    if value is None or isinstance(value, (bool, int, float, str)):
        return repr(value)
    if isinstance(value, torch.device):
        return repr(str(value))
    kind = type(value)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def rows_with_slots(key: Tensor, value: Tensor, slot_mapping: Tensor) -> tuple[Tensor, Tensor]:
    """Drop the padding rows of new keys and values, past the end of `slot_mapping`."""
    tensors = (key, value, slot_mapping)
    if all(isinstance(x, Tensor) and x.ndim for x in tensors) and key.shape[0] == value.shape[0] > len(slot_mapping):
        return key[: len(slot_mapping)], value[: len(slot_mapping)]
    return key, value


def check_query(query: Tensor) -> tuple[int, ...]:
    """Check a query `[t, h, d]` of one of `QUERY_TYPES`, and return its shape."""
    sizes = check(query=(query, "number t h d"))
    if not sizes["h"] or not sizes["d"]:
        raise ValueError(f"query: expected at least one head, of a size of at least 1, got {describe(query)}")
    return query.shape


def check_result(query: Tensor, value_head_size: int, out: Tensor | None, return_lse: bool) -> None:
    """Check `out` and `return_lse`."""
    check_flag("return_lse", return_lse)
    if out is not None:
        check(dict(dv=value_head_size), query=(query, "t h d"), out=(out, "query: t h dv"))
        check_own_memory("out", out)
        if out.requires_grad and torch.is_grad_enabled():
            raise ValueError("out: expected memory that requires no gradient, got some that does")
