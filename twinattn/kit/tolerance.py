"""The one tolerance: how far an output may be from the reference.

`ref` is the reference on copies in a wider type (float32; float64 for float32 input), `low` the reference formula run
in the input's own type, and `ulp` one unit in the last place at the size of `ref`:

    max|out - ref| <= 2 * max|low - ref| + ulp        and        rms(out - ref) <= 2 * rms(low - ref) + ulp

The LSE is checked by the same rule, separately. A float32 output may differ by `FLOAT32_ROUNDINGS` ulp instead of one:
two float32 results differ by the rounding errors of their dot products, a random walk, and on a batch of a few numbers
the larger of two such walks can be any multiple of the smaller.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from refattn.modes import computing_in

FLOAT32_ROUNDINGS = 16  # the square root of the largest head size, 256
WIDER = {torch.float16: torch.float32, torch.bfloat16: torch.float32, torch.float32: torch.float64}


class Distance(NamedTuple):
    """The difference of two tensors: its maximum, and its root mean square."""

    max: float
    rms: float


def distance(out: Tensor, ref: Tensor) -> Distance:
    """Return the difference of two tensors of finite numbers."""
    off = out.double() - ref.double()
    return Distance(float(off.abs().max()), float(off.square().mean().sqrt())) if off.numel() else Distance(0.0, 0.0)


def allowed(ref: Tensor, low: Tensor, dtype: torch.dtype, largest_score: float = 1.0, rounded: float = 0.0) -> Distance:
    """Return how far an output of some type may be from `ref`.

    Args:
        ref: the reference in a wider type.
        low: the reference formula in the type of the output.
        dtype: that type.
        largest_score: the largest score, if it is large: the relative error of a weight is the rounding of its score.
        rounded: the size of intermediate values, if they are larger than the output.
    """
    size = float(ref.abs().max()) if ref.numel() else 0.0
    return bound(distance(low, ref), max(size * max(1.0, largest_score), rounded), dtype)


def bound(error_of_low: Distance, size: float, dtype: torch.dtype) -> Distance:
    """Return the allowed error, given that of the reference formula in the same type, and the largest number."""
    roundings = FLOAT32_ROUNDINGS if dtype == torch.float32 else 1
    ulp = roundings * torch.finfo(dtype).eps * max(size, torch.finfo(torch.float32).tiny)
    return Distance(2 * error_of_low.max + ulp, 2 * error_of_low.rms + ulp)


def assert_close(
    out: Tensor, ref: Tensor, low: Tensor, *, name: str = "out", largest_score: float = 1.0, rounded: float = 0.0
) -> None:
    """Compare one tensor within the tolerance; infinities must be at the same places, and nothing may be NaN.

    `largest_score` and `rounded` are those of `allowed`.

    Raises:
        AssertionError: with the error and its limit.
    """
    if out.shape != ref.shape:
        raise AssertionError(f"{name}: shape {list(out.shape)}, expected {list(ref.shape)}")
    if out.isnan().any():
        raise AssertionError(f"{name}: NaN at {out.isnan().nonzero()[0].tolist()}")
    dtype, infinite = out.dtype, ref.isinf()
    if not torch.equal(out.isinf(), infinite):
        raise AssertionError(f"{name}: infinite where the reference is not, or the other way round")
    if infinite.any():
        if not torch.equal(out[infinite].double(), ref[infinite].double()):
            raise AssertionError(f"{name}: an infinity has the wrong sign")
        out, ref, low = (x[~infinite] for x in (out, ref, low))
    limits = allowed(ref, low, dtype, largest_score, rounded)._asdict()
    for measure, error in distance(out, ref)._asdict().items():
        if not error <= limits[measure]:
            raise AssertionError(f"{name}: {measure} error {error:.3e}, allowed {limits[measure]:.3e}")


def assert_matches_reference(
    out: Tensor, lse: Tensor, reference: Callable[..., tuple[Tensor, Tensor]], *arguments: Any, **options: Any
) -> None:
    """Compare an output and its LSE with the reference within the tolerance.

    The reference computes on the CPU, whatever the device of the output is.

    Args:
        out: the output, in the type of the query.
        lse: its log-sum-exp, float32.
        reference: called with the arguments and `return_lse=True`, in two types.
        arguments: tensors and batches.
        options: numbers and tensors.

    Raises:
        AssertionError: naming the tensor that is off.
    """
    dtype = out.dtype
    arguments, options = on_cpu(arguments), on_cpu(options)
    out, lse = out.cpu(), lse.cpu()
    wide = WIDER[dtype]
    ref_out, ref_lse = reference(
        *(_cast(x, wide) for x in arguments), **{k: _cast(x, wide) for k, x in options.items()}, return_lse=True
    )
    with computing_in(dtype):
        low_out, low_lse = reference(*arguments, **options, return_lse=True)
    if lse.dtype != torch.float32:
        raise AssertionError(f"lse: expected float32, got {lse.dtype}")
    assert_close(out, ref_out, low_out, name="out")
    assert_close(lse, ref_lse, low_lse, name="lse")


def on_cpu(x: Any, device: str = "cpu") -> Any:
    """Move a tensor, or all tensors in tuples, lists, dicts and dataclasses, to the CPU or another device."""
    if isinstance(x, Tensor):
        return x.to(device)
    if dataclasses.is_dataclass(x) and not isinstance(x, type):
        return dataclasses.replace(
            x, **{f.name: on_cpu(getattr(x, f.name), device) for f in dataclasses.fields(x) if f.init}
        )
    if type(x) is dict:
        return {name: on_cpu(value, device) for name, value in x.items()}
    if type(x) in (list, tuple):
        return type(x)(on_cpu(y, device) for y in x)
    return x


def _cast(x: Any, dtype: torch.dtype) -> Any:
    is_number = isinstance(x, Tensor) and x.is_floating_point() and x.itemsize > 1  # fp8 values stay what they are
    return x.to(dtype) if is_number else x
