"""The reference differentiates on every path, past masked rows and poisoned memory; the fast twin refuses by name."""

import importlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from batches import CASES, POISON, Case, Paged, attend, build
from ranks import attend_on_all
from torch import Tensor

import fastattn
import refattn.kv_cache
import refattn.merge
import refattn.mla
import refattn.quantized
from refattn.interface import AttentionOptions, Fp8Scales, Int8Scales, Prefix

# A chunk with context, a decode, keys nobody asks for, rows that see nothing, a whole prompt; NaN and inf around them.
CASE = Case("small", ((3, 14), (1, 13), (0, 3), (3, 1)), heads=(4, 2), head_size=6, block_size=4, padding_rows=2)
PARENTS = [[-1, 0, 0, 1], [-1], []]  # of trees in the sequences that have no more queries than keys
LATENT, ROPE, NOPE, VALUE = 4, 2, 3, 5  # elements of a latent, of a rotary key, of the rest of a key, of a value
WITH_CONTEXT = replace(CASE, lens=tuple((q, s) for q, s in CASE.lens if q <= s))  # no query comes before all keys
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "everything": dict(
        window_size=(5, 0),
        softcap=2.0,
        alibi_slopes=torch.linspace(0.1, 0.5, 4, dtype=torch.float64),
        sinks=torch.linspace(-2.0, 3.0, 4, dtype=torch.float64),
    ),
}


@dataclass(frozen=True)
class Call:
    """A path as a function of the tensors that it may be differentiated by, and what those are."""

    function: Callable[..., Any]  # of the package, of tensors by their names, and of options
    tensors: dict[str, Tensor]
    windowed: bool = True  # it takes a window


def laid_out(case: Case = CASE, **changes: Any) -> Paged:
    return build(replace(case, **changes), dtype=torch.float64)


def over_pages(name: str, **planned: Any) -> Call:
    inputs = laid_out()

    def call(package: str, query: Tensor, key_cache: Tensor, value_cache: Tensor, **options: Any) -> Any:
        path = importlib.import_module(f"{package}.{name}")
        return attend(path, query, key_cache, value_cache, inputs.batch, **planned, **options)

    tensors = dict(query=inputs.query, key_cache=inputs.key_cache, value_cache=inputs.value_cache)
    return Call(call, tensors, windowed="window_size" not in planned)


def over_rows() -> Call:
    query, key, value, batch = laid_out().rows

    def call(package: str, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Any:
        return attend(importlib.import_module(f"{package}.dense"), query, key, value, batch, **options)

    return Call(call, dict(query=query, key=key, value=value))


def cascade() -> Call:
    """The first two sequences share two blocks."""
    inputs = laid_out()
    inputs.batch.block_table[1, :2] = inputs.batch.block_table[0, :2]
    made = over_pages("cascade", prefixes=[Prefix(0, 2, 8)])

    def call(package: str, *, query: Tensor, key_cache: Tensor, value_cache: Tensor, **options: Any) -> Any:
        path = importlib.import_module(f"{package}.cascade")
        prefixes = [Prefix(0, 2, 8)]
        return attend(path, query, key_cache, value_cache, inputs.batch, prefixes=prefixes, **options)

    return Call(call, made.tensors)


def trees() -> Call:
    """The last nodes of each tree ask; two of the first tree follow one node."""
    inputs = laid_out(WITH_CONTEXT)

    def call(package: str, query: Tensor, key_cache: Tensor, value_cache: Tensor, **options: Any) -> Any:
        path = importlib.import_module(f"{package}.speculative")
        forest = path.make_trees(PARENTS)
        return attend(path, query, key_cache, value_cache, inputs.batch, trees=forest, **options)

    return Call(call, dict(query=inputs.query, key_cache=inputs.key_cache, value_cache=inputs.value_cache))


def differential(norm: bool) -> Call:
    inputs = laid_out()
    pools = inputs.key_cache, inputs.value_cache
    cache = torch.stack([torch.stack([pool[:, :, half::2] for pool in pools]) for half in (0, 1)])
    more = dict(norm_weight=torch.linspace(0.5, 1.5, 12, dtype=torch.float64)) if norm else {}

    def call(package: str, query: Tensor, cache: Tensor, **more: Any) -> Any:
        path = importlib.import_module(f"{package}.differential")
        return attend(path, query, cache, inputs.batch, lambda_init=0.2, **more)

    return Call(
        call, dict(query=inputs.query, cache=cache, lambda_full=torch.tensor(0.35, dtype=torch.float64), **more)
    )


def latents(of_trees: bool) -> Call:
    inputs = laid_out(WITH_CONTEXT)
    fixed: dict[str, Any] = dict(latent_rank=LATENT, softmax_scale=0.4, block_size=CASE.block_size)

    def call(package: str, query: Tensor, cache: Tensor, **options: Any) -> Any:
        mla, path = (importlib.import_module(f"{package}.{name}") for name in ("mla", "speculative"))
        if not of_trees:
            return attend(mla, query, cache, inputs.batch, **fixed, **options)
        mixed = SimpleNamespace(plan=path.plan, attention=mla.attention)
        forest = path.make_trees(PARENTS)
        return attend(mixed, query, cache, inputs.batch, trees=forest, **fixed, **options)

    return Call(call, dict(query=inputs.query, cache=inputs.key_cache[:, :, 0]), windowed=of_trees)


def latent_prefill() -> Call:
    """Contexts in chunks of a workspace, and merged."""
    inputs = laid_out(WITH_CONTEXT, head_size=NOPE + ROPE)
    cache = laid_out(WITH_CONTEXT, head_size=LATENT + ROPE).key_cache[:, :, 0]
    generator = torch.Generator().manual_seed(0)
    shapes = dict(
        latent=(len(inputs.query), LATENT),
        rope_key=(len(inputs.query), ROPE),
        key_projection=(4, NOPE, LATENT),
        value_projection=(4, VALUE, LATENT),
    )
    drawn = {name: torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in shapes.items()}
    for name in ("latent", "rope_key"):
        drawn[name][-CASE.padding_rows :] = torch.nan

    def call(package: str, *, return_lse: bool = False, out: Any = None, **tensors: Any) -> Any:
        path = importlib.import_module(f"{package}.mla")
        plan = path.plan_prefill(inputs.batch, block_size=CASE.block_size, workspace=16)
        options = {name: tensors.pop(name) for name in ("softcap", "alibi_slopes", "sinks") if name in tensors}
        assert len(plan.chunks) > 1
        rows = [tensors.pop(name) for name in ("query", "latent", "rope_key", "cache")]
        its_options = AttentionOptions(softmax_scale=0.4, **options)
        return path.prefill(*rows, plan, its_options, **tensors, return_lse=return_lse, out=out)

    return Call(call, dict(query=inputs.query, cache=cache, **drawn), windowed=False)


def over_ranks() -> Call:
    inputs = laid_out(WITH_CONTEXT)

    def call(package: str, query: Tensor, key_cache: Tensor, value_cache: Tensor, **options: Any) -> Any:
        return attend_on_all(package, 2, query, key_cache, value_cache, inputs.batch, interleave=2, **options)

    return Call(call, dict(query=inputs.query, key_cache=inputs.key_cache, value_cache=inputs.value_cache))


def written() -> Call:
    """New keys and values, written into the pool before they are read."""
    inputs = laid_out(WITH_CONTEXT)

    def call(package: str, query: Tensor, key: Tensor, value: Tensor, key_cache: Tensor, **options: Any) -> Any:
        kv_cache, metadata, path = (
            importlib.import_module(f"{package}.{name}") for name in ("kv_cache", "metadata", "chunked_prefill")
        )
        slots = metadata.slot_mapping(inputs.batch, len(query), block_size=CASE.block_size)
        pools = key_cache.clone(), inputs.value_cache.clone()
        kv_cache.write(key, value, *pools, slots)
        return attend(path, query, *pools, inputs.batch, **options)

    new = {}
    for name, cache in (("key", inputs.key_cache), ("value", inputs.value_cache)):
        new[name] = torch.randn(len(inputs.query), *cache.shape[2:], dtype=torch.float64)
        new[name][-CASE.padding_rows :] = torch.nan
    return Call(call, dict(query=inputs.query, **new, key_cache=inputs.key_cache))


CALLS = {
    "dense": over_rows(),
    "chunked_prefill": over_pages("chunked_prefill"),
    "chunked_prefill-both-ways": over_pages("chunked_prefill", causal=False, window_size=(4, 2)),
    "sliding_window": over_pages("sliding_window", window_size=(5, 0)),
    "local": over_pages("local", chunk_size=8),
    "cascade": cascade(),
    "speculative": trees(),
    "differential": differential(norm=False),
    "differential-norm": differential(norm=True),
    "mla": latents(of_trees=False),
    "mla-trees": latents(of_trees=True),
    "mla-prefill": latent_prefill(),
    "context_parallel": over_ranks(),
    "write": written(),
}
each_call = pytest.mark.parametrize("name", CALLS)
each_options = pytest.mark.parametrize("options", OPTIONS)


def filled(call: Call, options: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return all tensors of a call, those of its options too, and the options that are none."""
    given = dict(OPTIONS[options])
    if not call.windowed:
        given.pop("window_size", None)
    tensors = call.tensors | {name: x for name, x in given.items() if isinstance(x, Tensor)}
    return tensors, {name: x for name, x in given.items() if not isinstance(x, Tensor)}


def leaves_of(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: x.detach().clone().requires_grad_() for name, x in tensors.items()}


def gradients_of(call: Call, tensors: dict[str, Tensor], fixed: dict[str, Any]) -> dict[str, Tensor]:
    """Differentiate a loss that has a part in every output and log-sum-exp, those of -inf too."""
    leaves = leaves_of(tensors)
    answer = call.function("refattn", **leaves, **fixed, return_lse=True)
    weights = [torch.linspace(-1.0, 2.0, x.numel(), dtype=x.dtype).view_as(x) for x in answer]
    return dict(zip(leaves, torch.autograd.grad(answer, list(leaves.values()), weights), strict=True))


# --- the reference ---


@each_options
@each_call
def test_gradients_of_the_reference_are_those_of_finite_differences(name, options):
    """Of outputs and log-sum-exps alike; memory that nobody owns holds NaN, inf, -inf and 1e4."""
    call = CALLS[name]
    tensors, fixed = filled(call, options)
    names = list(tensors)

    def answer(*leaves: Tensor) -> tuple[Tensor, Tensor]:
        out, lse = call.function("refattn", **dict(zip(names, leaves, strict=True)), **fixed, return_lse=True)
        return out, lse.masked_fill(lse == -torch.inf, 0.0)  # or a difference of two of them would be NaN

    leaves = tuple(leaves_of(tensors).values())
    assert torch.autograd.gradcheck(answer, leaves, fast_mode=True, check_undefined_grad=False)


@each_options
@each_call
def test_what_nobody_sees_does_not_reach_a_gradient(name, options):
    """Rows of zero gradient, be they keys outside all windows or queries that see nothing, hold NaN and inf in turn."""
    call = CALLS[name]
    tensors, fixed = filled(call, options)
    clean = gradients_of(call, tensors, fixed)
    poisoned = {}
    for which, x in tensors.items():
        if x.ndim < 2 or which in ("key_projection", "value_projection"):
            poisoned[which] = x
            continue
        has_heads = which != "cache" or x.ndim > 3
        rows = x.flatten(-2) if has_heads and x.ndim > 2 else x
        unseen = (clean[which].view_as(rows) == 0).all(-1, keepdim=True)
        poison = torch.tensor(POISON, dtype=x.dtype)[torch.arange(rows.numel()) % len(POISON)].view_as(rows)
        poisoned[which] = torch.where(unseen, poison, rows).view_as(x)
    assert any(not x.isfinite().all() for x in poisoned.values())
    for which, gradient in gradients_of(call, poisoned, fixed).items():
        assert gradient.any()
        assert torch.equal(gradient, clean[which]), which
