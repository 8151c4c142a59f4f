"""Gradients of the loss `sum(out * grad_out) + sum(lse * grad_lse)` of `varlen` attention.

A kernel is differentiated by autograd; or, if it has a parameter `grad_out`, it is the backward itself. Either way the
result is `dq`, `dk`, `dv`, and `dsinks` if there are sinks.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from refattn import varlen
from refattn.modes import computing_in
from twinattn.kit import oracle
from twinattn.kit.call import plan_and_attend
from twinattn.kit.tolerance import WIDER, bound, distance
from twinattn.kit.workload import Workload

OF = {"query": "dq", "key": "dk", "value": "dv", "sinks": "dsinks"}  # the gradient of each, by its name in an answer
NAMES = {**OF, "alibi_slopes": "dslopes"}  # and those that are asked for alone
OURS = ("grad_out", "grad_lse", "deterministic")  # not parameters of the reference's forward


class NoGradientError(NotImplementedError):
    """The kernel returns no log-sum-exp that can be differentiated."""


def tensors(example: Workload, options: Mapping[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """Draw the gradient of the outputs, and with the option `grad_lse` that of the log-sum-exps."""
    generator = torch.Generator().manual_seed(1000 + example.seed)
    shape = example.num_tokens + example.padding_rows, example.heads[0]

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=generator, dtype=torch.float32)

    made: dict[str, Any] = dict(grad_out=normal(*shape, example.value_size).to(dtype))
    return made | (dict(grad_lse=normal(*shape)) if options.get("grad_lse") else {})


def leaves_of(arguments: Mapping[str, Any], wanted: Sequence[str] = ()) -> dict[str, Tensor]:
    """Return the inputs to differentiate with respect to, with their strides: all of them, or those wanted."""
    chosen = wanted or tuple(OF)
    return {
        name: arguments[name].detach().requires_grad_()
        for name in NAMES
        if name in chosen and isinstance(arguments.get(name), Tensor)
    }


def differentiate(
    attention: Callable[[dict[str, Any]], Any], arguments: Mapping[str, Any], wanted: Sequence[str] = ()
) -> dict[str, Tensor]:
    """Differentiate attention by autograd.

    Args:
        attention: takes the arguments, and returns an output, or an output and its log-sum-exp.
        arguments: with `grad_out`, and perhaps `grad_lse`.
        wanted: names of tensors; all if empty.

    Returns:
        The gradients by name; zeros for an input that the output does not depend on.

    Raises:
        NoGradientError: if there is a `grad_lse`, and the log-sum-exp has no gradient.
    """
    leaves = leaves_of(arguments, wanted)
    with torch.enable_grad():
        came = attention({**arguments, **leaves})
    answers = [came] if isinstance(came, Tensor) else list(came[:2])
    given = [arguments["grad_out"]]
    if "grad_lse" in arguments:
        has_none = len(answers) < 2 or not answers[1].requires_grad
        if has_none and _has_lse_gradient({**arguments, **leaves}):
            raise NoGradientError("returns no log-sum-exp that has a gradient")
        given += [arguments["grad_lse"].to(x.dtype) for x in answers[1:]]
    if answers[0].shape != given[0].shape:
        raise TypeError(f"out: shape {list(answers[0].shape)}, expected {list(given[0].shape)}")
    outputs = [x for x in answers[: len(given)] if x.requires_grad]
    grads = [grad for x, grad in zip(answers, given, strict=False) if x.requires_grad]
    inputs = list(leaves.values())
    found = torch.autograd.grad(outputs, inputs, grads, allow_unused=True) if outputs else [None] * len(inputs)
    return {
        NAMES[name]: torch.zeros_like(x) if grad is None else grad
        for (name, x), grad in zip(leaves.items(), found, strict=True)
    }


def _has_lse_gradient(arguments: Mapping[str, Any]) -> bool:
    """Return whether the log-sum-exps depend on an input: not in a batch in which no query sees a key."""
    with torch.enable_grad():
        return forward({name: x for name, x in arguments.items() if name != "return_lse"})[1].requires_grad


def forward(arguments: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    """Return the output of the reference and its log-sum-exp."""
    answer: tuple[Tensor, Tensor] = plan_and_attend(
        varlen, **{name: x for name, x in arguments.items() if name not in OURS}, return_lse=True
    )
    return answer


def expected(arguments: Mapping[str, Any], wanted: Sequence[str] = ()) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the gradients of the reference in a wider type, and those of its formula in the type of the query."""
    dtype = arguments["query"].dtype
    wider = {
        name: x.to(WIDER[dtype]) if isinstance(x, Tensor) and x.is_floating_point() else x
        for name, x in arguments.items()
    }
    with computing_in(dtype):
        low = differentiate(forward, arguments, wanted)
    return differentiate(forward, wider, wanted), low


def sizes(example: Workload, arguments: Mapping[str, Any]) -> dict[str, float]:
    """Return the largest sum of absolute terms in each gradient, in which nothing cancels: roundings scale with it."""
    scale = arguments.get("softmax_scale")
    scale = example.head_size**-0.5 if scale is None else scale
    lse = arguments.get("grad_lse")
    lse = torch.zeros(arguments["query"].shape[:2]) if lse is None else lse
    options: dict[str, Any] = dict(scale=scale, softcap=arguments.get("softcap", 0.0))
    options |= dict(slopes=arguments.get("alibi_slopes"), sinks=arguments.get("sinks"))
    largest, of_sinks, of_slopes = dict.fromkeys(OF.values(), 0.0), torch.zeros(()), torch.zeros(())
    row, first = 0, 0
    for i, (q, s) in enumerate(example.lens):
        rows, keys = slice(row, row + q), slice(first, first + s)
        query, grad_out, grad_lse = (x.detach()[rows] for x in (arguments["query"], arguments["grad_out"], lse))
        key, value = (arguments[name].detach()[keys] for name in ("key", "value"))
        seen = oracle.sight(example, i)
        _, found = oracle.differentiate(query, key, value, seen, grad_out, grad_lse, **options)
        for name, x in zip(("dq", "dk", "dv"), found, strict=False):
            largest[name] = max(largest[name], float(x.abs().max()) if x.numel() else 0.0)
        of_sinks, of_slopes = of_sinks + found.dsinks, of_slopes + found.dslopes
        row, first = rows.stop, keys.stop
    for name, x in (("dsinks", of_sinks), ("dslopes", of_slopes)):
        largest[name] = float(x.abs().max()) if x.numel() else 0.0
    return largest


def assert_close(
    name: str,
    came: Tensor,
    wide: Tensor,
    low: Tensor,
    size: float,
    dtype: torch.dtype,
    *,
    largest_score: float = 1.0,
) -> None:
    """Compare a gradient within the one tolerance, with roundings relative to the size of its terms.

    For a query that sees one key, `grad_out . v` and `delta` cancel: the gradient is 0, and a right kernel is off by
    the rounding of either.

    Raises:
        AssertionError: with the error and its limit.
    """
    if came.shape != wide.shape:
        raise AssertionError(f"{name}: shape {list(came.shape)}, expected {list(wide.shape)}")
    if not came.isfinite().all():
        what = "NaN" if came.isnan().any() else "infinite"
        raise AssertionError(f"{name}: {what} at {(~came.isfinite()).nonzero()[0].tolist()}")
    limits = bound(distance(low, wide), size * max(1.0, largest_score), dtype)._asdict()
    for measure, error in distance(came, wide)._asdict().items():
        if not error <= limits[measure]:
            raise AssertionError(f"{name}: {measure} error {error:.3e}, allowed {limits[measure]:.3e}")
