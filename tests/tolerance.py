"""The one rule by which a twin equals its reference.

`ref` is the reference on copies in a wider type (float32; float64 for float32 input), `low` the reference formula run
in the input's own type, and `ulp` one unit in the last place at the size of `ref`:

    max|out - ref| <= 2 * max|low - ref| + ulp        and        rms(out - ref) <= 2 * rms(low - ref) + ulp

The LSE is held to the same rule by itself. What is answered in float32 is allowed `FLOAT32_ROUNDINGS` ulp instead of
one: two float32 answers differ by the roundings of their dot products, a random walk, and on a batch of a few numbers
the larger of two such walks can be any multiple of the smaller.
"""

import dataclasses
import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor

FLOAT32_ROUNDINGS = 16  # the square root of the largest head size, 256
WIDER = {torch.float16: torch.float32, torch.bfloat16: torch.float32, torch.float32: torch.float64}


def assert_twins_agree(path: str, *arguments: Any, function: str = "attention", **options: Any) -> None:
    """Call `refattn.<path>` and `fastattn.<path>` alike, and hold outputs and LSE to the rule."""
    twin = getattr(importlib.import_module(f"fastattn.{path}"), function)
    reference = getattr(importlib.import_module(f"refattn.{path}"), function)
    out, lse = twin(*arguments, **options, return_lse=True)
    assert_matches_reference(out, lse, reference, *arguments, **options)
    alone = twin(*arguments, **options)
    assert torch.equal(alone, out), "the output without return_lse is another one"


def assert_matches_reference(
    out: Tensor, lse: Tensor, reference: Callable[..., Any], *arguments: Any, **options: Any
) -> None:
    """Hold an output and its LSE to the rule, given the reference function and its arguments.

    The reference computes on the CPU, whatever the device of the twin is.
    """
    dtype = out.dtype
    arguments, options = _on_cpu(arguments), dict(zip(options, _on_cpu(tuple(options.values())), strict=True))
    out, lse = out.cpu(), lse.cpu()
    wide_arguments, wide_options = _cast(arguments, WIDER[dtype]), _cast_dict(options, WIDER[dtype])
    ref_out, ref_lse = reference(*wide_arguments, **wide_options, return_lse=True)
    with _computing_in(dtype):
        low_out, low_lse = reference(*arguments, **options, return_lse=True)

    assert lse.dtype == torch.float32, f"lse: expected float32, got {lse.dtype}"
    assert_close(out, ref_out, low_out, name="out")
    assert_close(lse, ref_lse, low_lse, name="lse")


def assert_close(out: Tensor, ref: Tensor, low: Tensor, *, name: str = "out") -> None:
    """Hold one tensor to the rule; infinities must stand at the same places."""
    assert out.shape == ref.shape, f"{name}: shape {list(out.shape)}, expected {list(ref.shape)}"
    epsilon = torch.finfo(out.dtype).eps * (FLOAT32_ROUNDINGS if out.dtype == torch.float32 else 1)
    out, ref, low = (x.double() for x in (out, ref, low))
    assert not out.isnan().any(), f"{name}: NaN at {out.isnan().nonzero()[0].tolist()}"
    infinite = ref.isinf()
    assert torch.equal(out.isinf(), infinite), f"{name}: infinite where the reference is not, or the other way round"
    assert torch.equal(out[infinite], ref[infinite]), f"{name}: an infinity has the wrong sign"
    out, ref, low = (x[~infinite] for x in (out, ref, low))
    if not out.numel():
        return
    ulp = epsilon * max(float(ref.abs().max()), torch.finfo(torch.float32).tiny)
    for measure, size in (("max", _largest), ("rms", _rms)):
        error, allowed = size(out - ref), 2 * size(low - ref) + ulp
        assert error <= allowed, f"{name}: {measure} error {error:.3e}, allowed {allowed:.3e}"


def _largest(x: Tensor) -> float:
    return float(x.abs().max())


def _rms(x: Tensor) -> float:
    return float(x.square().mean().sqrt())


def _on_cpu(values: tuple[Any, ...]) -> tuple[Any, ...]:
    """Move tensors and batches, and what a tuple or list holds of them, to the CPU."""
    return tuple(_one_on_cpu(x) for x in values)


def _one_on_cpu(x: Any) -> Any:
    if isinstance(x, Tensor):
        return x.cpu()
    if dataclasses.is_dataclass(x) and not isinstance(x, type):
        return dataclasses.replace(x, **{f.name: _one_on_cpu(getattr(x, f.name)) for f in dataclasses.fields(x)})
    if type(x) in (list, tuple):
        return type(x)(_one_on_cpu(y) for y in x)
    return x


def _cast(values: tuple[Any, ...], dtype: torch.dtype) -> list[Any]:
    return [x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x for x in values]


def _cast_dict(values: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    return dict(zip(values, _cast(tuple(values.values()), dtype), strict=True))


@contextmanager
def _computing_in(dtype: torch.dtype) -> Iterator[None]:
    """Make the reference compute in a type of ours instead of casting up."""
    users = [module for name, module in sys.modules.items() if name.startswith("refattn.")]
    patches = [mock.patch.object(m, "compute_dtype", lambda _: dtype) for m in users if hasattr(m, "compute_dtype")]
    for patch in patches:
        patch.start()
    try:
        yield
    finally:
        for patch in patches:
            patch.stop()
