"""The kernels that compute attention, one file each, and the choice between them.

A kernel is a module with four functions:

    supports(problem)                                          why it can't compute the problem, or None
    suits(problem)                                             whether it is the one to take among those that can
    dense(query, key, value, batch, options)                   attend over ragged rows
    paged(query, key_cache, value_cache, batch, options)       attend over pages

Both give `(out [t, h, dv], lse [t, h])` under the conventions of the project: natural log, float32 (float64 for
float64), 0 and `-inf` where a query sees nothing. A kernel that answers otherwise is adapted in its own file.

A kernel may have more, for what it does better than by calls of those:

    levels(query, key_cache, value_cache, levels)              attend to the levels of a cascade, and merge
    differential(query, cache, batch, options, subtraction)    attend to pairs of keys and values, and subtract
"""

import importlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from functools import cache, wraps
from types import ModuleType
from typing import NamedTuple, ParamSpec, TypeVar

import torch
from jaxtyping import Float, Int32
from torch import Tensor
from torch.nn.functional import rms_norm

from refattn.batch import Batch

NAMES = ("cpu", "triton", "fa4", "fa2", "torch_flash")  # those in front are asked first, whether they suit

NO_POSITIONS = "takes the query rows for the last ones of their sequences, at no other positions: take triton"
NOT_ALIGNED = "loads 16 bytes at a time, from heads that begin at multiples of that, elements side by side: take triton"

P = ParamSpec("P")
T = TypeVar("T")

_asked_for: ContextVar[str | None] = ContextVar("asked_for", default=None)


@dataclass(frozen=True, eq=False)
class Options:
    """What a path asks of a kernel besides the tensors.

    Attributes:
        causal: hide keys behind a query's own position.
        window_size: `(left, right)` in tokens, both inclusive, -1 for no limit.
        softmax_scale: factor on the dot products; `d ** -0.5` if None.
        softcap: bound on the scores; 0 for none.
        alibi_slopes: one slope a head, of any floating type: the bias is `-slope * |query position - key position|`.
        sinks: one extra logit a head.
        batch_invariant: rows must not change by a bit with what else is in the batch.
        positions: position of each query row, counted from the first key of its sequence; None where they are the last
            rows of `seq_len`. They may lie past `seq_len` (keys of a cascade's shared level) and need not be
            consecutive.
    """

    causal: bool = True
    window_size: tuple[int, int] = (-1, -1)
    softmax_scale: float | None = None
    softcap: float = 0.0
    alibi_slopes: Float[Tensor, "h"] | None = None
    sinks: Float[Tensor, "h"] | None = None
    batch_invariant: bool = False
    positions: Int32[Tensor, "t"] | None = None

    @property
    def window(self) -> tuple[int, int]:
        """The window with `causal` as what it is: a right side of 0."""
        left, right = self.window_size
        return left, 0 if self.causal else right


class Subtraction(NamedTuple):
    """How the two answers of a pair become one: `factor * norm(first - lambda_full * second)`.

    Attributes:
        lambda_full: weight of the second answer.
        norm_weight: learned factors of the norm; None where it has none.
        norm_eps: keeps the norm of zeros at zero.
        factor: of the normed difference.
    """

    lambda_full: Float[Tensor, ""]
    norm_weight: Float[Tensor, "dv"] | None
    norm_eps: float
    factor: float

    def finish(self, difference: Float[Tensor, "t half_h dv"]) -> Float[Tensor, "t half_h dv"]:
        """Norm a difference."""
        weight = None if self.norm_weight is None else self.norm_weight.to(difference.dtype)
        return rms_norm(difference, difference.shape[-1:], weight, self.norm_eps).mul(self.factor)


@dataclass(frozen=True, eq=False)
class Problem:
    """What a kernel needs to know to say whether it can compute something; no tensor is read for it.

    Attributes:
        device: where the tensors are.
        dtype: their type.
        num_heads: query heads, `h`.
        num_kv_heads: key heads, `hk`.
        head_size: elements of a query and a key, `d`.
        value_head_size: elements of a value, `dv`.
        block_size: tokens in a block of the cache; None without a cache.
        max_query_len: the most new tokens a sequence has.
        max_seq_len: the most keys a sequence has.
        num_seqs: sequences in the batch.
        options: what else is asked.
        aligned: the elements of each head lie side by side, from a multiple of 16 bytes on.
    """

    device: torch.device
    dtype: torch.dtype
    num_heads: int
    num_kv_heads: int
    head_size: int
    value_head_size: int
    block_size: int | None
    max_query_len: int
    max_seq_len: int
    num_seqs: int
    options: Options = field(default_factory=Options)
    aligned: bool = True


def _says_what_helps(function: Callable[P, T]) -> Callable[P, T]:
    """Let a function that runs out of memory on a GPU say what would help."""

    @wraps(function)
    def call(*arguments: P.args, **options: P.kwargs) -> T:
        try:
            return function(*arguments, **options)
        except torch.OutOfMemoryError as error:
            raise torch.OutOfMemoryError(
                "query: expected few enough rows for the memory that is left; take fewer at a time (an engine: "
                f"token_budget), or a smaller pool of keys and values (num_blocks). {error}"
            ) from error

    return call


@_says_what_helps
def dense(
    query: Float[Tensor, "t h d"],
    key: Float[Tensor, "s hk d"],
    value: Float[Tensor, "s hk dv"],
    batch: Batch,
    options: Options,
) -> tuple[Float[Tensor, "t h dv"], Float[Tensor, "t h"]]:
    """Attend over ragged rows with the kernel that suits them best, or with the one asked for.

    Args:
        query: query rows of all sequences.
        key: key rows of all sequences.
        value: value rows of all sequences.
        batch: the lengths.
        options: what else is asked.

    Returns:
        The outputs and their log-sum-exps.

    Raises:
        NotImplementedError: if no kernel can, or the one asked for can't, with the reasons.
    """
    return choose(_problem(query, key, value, batch, options, None)).dense(query, key, value, batch, options)


@_says_what_helps
def paged(
    query: Float[Tensor, "t h d"],
    key_cache: Float[Tensor, "n p hk d"],
    value_cache: Float[Tensor, "n p hk dv"],
    batch: Batch,
    options: Options,
) -> tuple[Float[Tensor, "t h dv"], Float[Tensor, "t h"]]:
    """Attend over pages with the kernel that suits them best, or with the one asked for.

    Args:
        query: query rows of all sequences.
        key_cache: the pool of keys.
        value_cache: the pool of values.
        batch: the lengths and the block table.
        options: what else is asked.

    Returns:
        The outputs and their log-sum-exps.

    Raises:
        NotImplementedError: if no kernel can, or the one asked for can't, with the reasons.
    """
    problem = _problem(query, key_cache, value_cache, batch, options, key_cache.shape[1])
    return choose(problem).paged(query, key_cache, value_cache, batch, options)


@_says_what_helps
def levels(
    query: Float[Tensor, "t h d"],
    key_cache: Float[Tensor, "n p hk d"],
    value_cache: Float[Tensor, "n p hk dv"],
    levels: Sequence[tuple[Batch, Options]],
) -> list[tuple[Float[Tensor, "t h dv"], Float[Tensor, "t h"]]]:
    """Attend over pages level by level, with a call for each, or with one for all where their kernel has it.

    Args:
        query: query rows of all sequences.
        key_cache: the pool of keys.
        value_cache: the pool of values.
        levels: the batch of each level, over the same query rows, and what else is asked there; sinks with the last.

    Returns:
        The answers that have yet to be merged: one a level, or one.

    Raises:
        NotImplementedError: if no kernel can, or the one asked for can't, with the reasons.
    """
    chosen = [
        choose(_problem(query, key_cache, value_cache, batch, options, key_cache.shape[1])) for batch, options in levels
    ]
    if len(set(chosen)) == 1 and hasattr(chosen[0], "levels"):
        return [chosen[0].levels(query, key_cache, value_cache, levels)]
    return [kernel.paged(query, key_cache, value_cache, *level) for kernel, level in zip(chosen, levels, strict=True)]


@_says_what_helps
def differential(
    query: Float[Tensor, "t h d"],
    cache: Float[Tensor, "2 2 n p pairs d"],
    batch: Batch,
    options: Options,
    subtraction: Subtraction,
) -> tuple[Float[Tensor, "t half_h 2*d"], Float[Tensor, "t h"]]:
    """Attend twice over pages, subtract and norm: `softmax(q1 k1) [v1; v2] - lambda * softmax(q2 k2) [v1; v2]`.

    Args:
        query: query rows of all sequences, heads in interleaved pairs.
        cache: the pool, `[half, key or value, n, p, hk/2, d]`.
        batch: the lengths and the block table.
        options: what else is asked; slopes and sinks have one number for each of the `h` heads.
        subtraction: the weight of the second softmax, and the norm.

    Returns:
        The normed differences, in the type of the query, and the log-sum-exp of each head.

    Raises:
        NotImplementedError: if no kernel can, or the one asked for can't, with the reasons.
    """
    halves = [
        replace(
            options,
            alibi_slopes=None if options.alibi_slopes is None else options.alibi_slopes[half::2].contiguous(),
            sinks=None if options.sinks is None else options.sinks[half::2].contiguous(),
        )
        for half in (0, 1)
    ]
    problem = _problem(query[:, ::2], cache[0, 0], cache[0, 1], batch, halves[0], cache.shape[3])
    kernel = choose(problem, function="differential")
    if hasattr(kernel, "differential"):
        return kernel.differential(query, cache, batch, options, subtraction)
    lse = query.new_empty(query.shape[:2], dtype=torch.float64 if query.dtype == torch.float64 else torch.float32)
    answers = []
    for half in (0, 1):
        parts = []
        for values in (cache[0, 1], cache[1, 1]):
            out, lse[:, half::2] = kernel.paged(query[:, half::2], cache[half, 0], values, batch, halves[half])
            parts.append(out.to(lse.dtype))
        answers.append(torch.cat(parts, dim=-1))
    difference = answers[0] - subtraction.lambda_full.to(lse.dtype) * answers[1]
    return subtraction.finish(difference).to(query.dtype), lse


@contextmanager
def use_kernel(name: str) -> Iterator[None]:
    """Ask for one kernel inside a `with` block; a problem that it can't compute raises, nothing takes its place.

    Args:
        name: one of `fastattn.kernels.NAMES`.

    Raises:
        ValueError: if there is no kernel of that name.
    """
    if name not in NAMES:
        raise ValueError(f"name: expected one of {', '.join(NAMES)}, got {name!r}")
    token = _asked_for.set(name)
    try:
        yield
    finally:
        _asked_for.reset(token)


def choose(problem: Problem, *, function: str | None = None) -> ModuleType:
    """Choose the kernel for a problem: the one asked for, else the first that suits it, else the first that can.

    Args:
        problem: what is to be computed.
        function: a function beyond `dense` and `paged`; kernels that have it go before all that have not.

    Returns:
        The kernel's module.

    Raises:
        NotImplementedError: if no kernel can, or the one asked for can't, with the reasons.
    """
    asked = _asked_for.get()
    names = NAMES if asked is None else (asked,)
    able = []
    for name in names:
        module = _load(name)
        if module.supports(problem) is None:
            if module.suits(problem) and (function is None or hasattr(module, function)):
                return module
            able.append(module)
    if not able:
        raise NotImplementedError(f"no kernel computes this: {_why_not(problem, names)}")
    having = [module for module in able if function is not None and hasattr(module, function)]
    suiting = [module for module in able if module.suits(problem)]
    return [*having, *suiting, *able][0]


def explain(problem: Problem) -> str:
    """Say which kernel would compute a problem, and of each other one why not.

    Args:
        problem: what is to be computed.

    Returns:
        A line a kernel.
    """
    lines = []
    for name in NAMES:
        reason = _load(name).supports(problem)
        lines.append(f"{name}: {'can' if reason is None else reason}")
    try:
        lines.append(f"chosen: {choose(problem).__name__.rsplit('.', 1)[-1]}")
    except NotImplementedError as error:
        lines.append(str(error))
    return "\n".join(lines)


@cache
def _load(name: str) -> ModuleType:
    return importlib.import_module(f"fastattn.kernels.{name}")


def _why_not(problem: Problem, names: tuple[str, ...]) -> str:
    return "; ".join(f"{name}: {_load(name).supports(problem)}" for name in names)


def _problem(
    query: Tensor, key: Tensor, value: Tensor, batch: Batch, options: Options, block_size: int | None
) -> Problem:
    return Problem(
        device=query.device,
        dtype=query.dtype,
        num_heads=query.shape[1],
        num_kv_heads=key.shape[-2],
        head_size=query.shape[2],
        value_head_size=value.shape[-1],
        block_size=block_size,
        max_query_len=batch.max_query_len,
        max_seq_len=batch.max_seq_len,
        num_seqs=batch.num_seqs,
        options=options,
        aligned=query.device.type != "cuda" or all(map(_is_aligned, (query, key, value))),
    )


def _is_aligned(x: Tensor) -> bool:
    """Say whether all heads of a tensor begin at multiples of 16 bytes, their elements side by side."""
    *strides, last = x.stride()
    size = x.element_size()
    return last == 1 and not any(stride * size % 16 for stride in (*strides, x.data_ptr() // size))
