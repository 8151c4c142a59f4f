"""The reference differentiates on every path, past masked rows and poisoned memory; the fast twin refuses by name."""

import importlib
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import refattn.kv_cache
import refattn.merge
import refattn.mla
import refattn.quantized
from refattn.metadata import make_batch
from refattn.options import AttentionOptions
from refattn.ranks import simulate_ranks
from refattn.scales import Fp8Scales, Int8Scales
from tests.helpers.batches import POISON, Case, Paged, build, plan_and_attend
from tests.helpers.stored import KINDS, store
from tests.table import PATHS, Path, Step

# A chunk with context, a decode, keys without queries, rows that see nothing, a whole prompt; NaN and inf around them.
CASE = Case("small", ((3, 14), (1, 13), (0, 3), (3, 1)), heads=(4, 2), head_size=6, block_size=4, padding_rows=2)
PARENTS = [[-1, 0, 0, 1], [-1], []]  # trees of the sequences that have no more queries than keys
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

    function: Callable[..., Any]  # takes the package, tensors by name, and options
    tensors: dict[str, Tensor]
    left_out: tuple[str, ...] = ()  # options that it does not take


def laid_out(case: Case = CASE) -> Paged:
    return build(case, dtype=torch.float64)


def of(path: Path, case: Case = CASE, **arguments: Any) -> Call:
    """Return the call of a path of the table, and its tensors; `arguments` go before those of the table."""
    inputs = laid_out(case)
    given, batch = path.tensors(inputs) | arguments, path.batch(inputs)
    tensors = {name: x.double() for name, x in given.items() if isinstance(x, Tensor)}
    fixed = {name: x for name, x in given.items() if name not in tensors}

    def call(package: str, **options: Any) -> Any:
        return path.attend(package, batch, {name: options.pop(name) for name in tensors}, **fixed | options)

    left_out = [name for name in OPTIONS["everything"] if not path.accepts("refattn", name)]
    if not path.takes("window_size") or "window_size" in arguments:
        left_out.append("window_size")
    return Call(call, tensors, tuple(left_out))


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
        return plan_and_attend(path, query, *pools, inputs.batch, **options)

    new = {}
    for name, cache in (("key", inputs.key_cache), ("value", inputs.value_cache)):
        new[name] = torch.randn(len(inputs.query), *cache.shape[2:], dtype=torch.float64)
        new[name][-CASE.padding_rows :] = torch.nan
    return Call(call, dict(query=inputs.query, **new, key_cache=inputs.key_cache))


def branching(step: Step) -> dict[str, Any]:
    """The last nodes of each tree ask; two of the first tree follow one node."""
    return dict(trees=step.path.make_trees(PARENTS))


CALLS = {
    **{name: of(PATHS[name]) for name in ("varlen", "chunked_prefill", "cascade", "interval", "differential")},
    "chunked_prefill-both-ways": of(PATHS["chunked_prefill"], causal=False, window_size=(4, 2)),
    "sliding_window": of(PATHS["sliding_window"], window_size=(5, 0)),
    "local": of(PATHS["local"], chunk_size=8),
    "speculative": of(replace(PATHS["speculative"], planned=branching), WITH_CONTEXT),
    "differential-norm": of(PATHS["differential"], norm_weight=torch.linspace(0.5, 1.5, 12)),
    "mla": of(PATHS["mla"], WITH_CONTEXT, softmax_scale=0.4),
    "mla-trees": of(replace(PATHS["mla-trees"], planned=branching), WITH_CONTEXT, softmax_scale=0.4),
    "mla-prefill": of(PATHS["mla-prefill"], WITH_CONTEXT, softmax_scale=0.4),
    "context_parallel": of(PATHS["context_parallel"], WITH_CONTEXT, interleave=2),
    "compressed": of(PATHS["compressed"], window_size=(5, 0)),
    "sparse": of(PATHS["sparse"]),
    "sparse-latents": of(PATHS["sparse-latents"], softmax_scale=0.4),
    "write": written(),
}
each_call = pytest.mark.parametrize("name", CALLS)
each_options = pytest.mark.parametrize("options", OPTIONS)


def filled(call: Call, options: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return all tensors of a call, those of its options too, and the options that are none."""
    given = {name: x for name, x in OPTIONS[options].items() if name not in call.left_out}
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


def test_no_path_is_left_out():
    """Over 8 bits, keys and values are no tensors to differentiate by: `test_gradients_through_quantized_values`."""
    assert {*CALLS} >= {name for name in PATHS if not name.startswith("quantized")}


# --- the reference ---


@each_options
@each_call
def test_gradients_of_the_reference_are_those_of_finite_differences(name, options):
    """Of outputs and log-sum-exps alike; memory that no sequence owns holds NaN, inf, -inf and 1e4."""
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
def test_what_no_query_sees_does_not_reach_a_gradient(name, options):
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


@pytest.mark.parametrize("count", [1, 2, 3])
def test_gradients_of_merges(count):
    """Also where a query saw nothing in one part, or in any; what its output holds there is NaN."""
    outs = [torch.randn(4, 2, 3, dtype=torch.float64) for _ in range(count)]
    lses = [torch.randn(4, 2, dtype=torch.float64) for _ in range(count)]
    for out, lse in zip(outs, lses, strict=True):
        out[0], lse[0] = torch.nan, -torch.inf
    outs[0][1], lses[0][1] = torch.nan, -torch.inf
    parts = [x.requires_grad_() for x in (*outs, *lses)]
    sinks = torch.randn(2, dtype=torch.float64, requires_grad=True)

    def merged(*parts: Tensor) -> tuple[Tensor, Tensor]:
        out, lse = refattn.merge.merge(parts[:count], parts[count:])
        return out, lse.masked_fill(lse == -torch.inf, 0.0)

    def with_sinks(sinks: Tensor, *parts: Tensor) -> tuple[Tensor, Tensor]:
        return refattn.merge.add_sinks(*refattn.merge.merge(parts[:count], parts[count:]), sinks)

    assert torch.autograd.gradcheck(merged, parts, check_undefined_grad=False)
    assert torch.autograd.gradcheck(with_sinks, (sinks, *parts), check_undefined_grad=False)
    out, lse = refattn.merge.merge(outs, lses)
    for part, gradient in zip(parts, torch.autograd.grad(out.sum() + lse.sum(), parts), strict=True):
        assert gradient.isfinite().all()
        assert (gradient[~part.isfinite()] == 0).all()


@pytest.mark.parametrize("package", ["refattn", "fastattn"])
def test_gradients_of_what_goes_with_latents_and_pairs(package):
    """Products with the projections, and the weight of the second softmax: both twins differentiate."""
    mla, pairs = (importlib.import_module(f"{package}.{name}") for name in ("mla", "differential"))
    shapes = dict(query=(3, 2, 5), to_key=(2, 3, 4), latent=(3, 2, 4), to_value=(2, 5, 4))
    x = {name: torch.randn(shape, dtype=torch.float64, requires_grad=True) for name, shape in shapes.items()}
    vectors = [torch.randn(5, dtype=torch.float64, requires_grad=True) for _ in range(4)]
    check = partial(torch.autograd.gradcheck, check_undefined_grad=False)
    assert check(mla.absorb, (x["query"], x["to_key"]))
    assert check(mla.project, (x["latent"], x["to_value"]))
    assert check(partial(pairs.compute_lambda, lambda_init=0.3), vectors)
    assert check(pairs.interleave_halves, (x["query"],))


@pytest.mark.parametrize("kind", ["e4m3", "e5m2", "int8", "int8-half"])
def test_gradients_through_quantized_values(kind):
    """By scales, and by a query that is not rounded, along one direction; 8-bit values that no query sees are NaN."""
    stored = store(CASE, kind, dtype=torch.float64, per="head", round_query=False)
    for j in range(6):  # before the windows of the first sequence
        block, row = int(stored.batch.block_table[0, j // CASE.block_size]), j % CASE.block_size
        if isinstance(stored.scales, Int8Scales):
            stored.scales.key[block, row] = torch.nan
        else:
            stored.key_cache[block, row] = stored.value_cache[block, row] = torch.nan
    given = {name: x for name, x in vars(stored.scales).items() if isinstance(x, Tensor)}
    given |= {} if isinstance(stored.scales, Int8Scales) else {"the query": stored.query}

    def answer(given: dict[str, Tensor]) -> Tensor:
        scales = replace(stored.scales, **{name: x for name, x in given.items() if name != "the query"})
        tensors = given.get("the query", stored.query), *stored.tensors[1:]
        out, lse = plan_and_attend(refattn.quantized, *tensors, window_size=(5, 0), scales=scales, return_lse=True)
        return out.sin().sum() + lse.masked_fill(lse == -torch.inf, 0.0).sum()

    leaves = leaves_of(given)
    gradients = torch.autograd.grad(answer(leaves), list(leaves.values()))
    generator, step = torch.Generator().manual_seed(0), 2.0**-14
    for (name, x), gradient in zip(given.items(), gradients, strict=True):
        assert gradient.isfinite().all() and gradient.any()
        direction = torch.randn(x.shape, generator=generator).sign().to(x)
        above, below = (x + sign * step * direction for sign in (1, -1))
        expected = answer(given | {name: above}) - answer(given | {name: below})
        found = (gradient.double() * (above.double() - below.double()).nan_to_num()).sum()
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-8)


def test_rounding_refuses_gradients_by_name():
    stored = store(CASE, "e4m3", per="head")
    wanting = stored.query.requires_grad_()
    with pytest.raises(NotImplementedError, match="^query: requires_grad, but rounding to a quantized cache has no"):
        plan_and_attend(refattn.quantized, *stored.tensors, scales=stored.scales)
    new = torch.zeros(3, 2, 6, requires_grad=True)
    scales, slots = Fp8Scales(1.0, 1.0), torch.arange(3)
    pools = refattn.kv_cache.allocate(2, 4, 2, 6, dtype=torch.float8_e4m3fn)
    with pytest.raises(NotImplementedError, match="^value: requires_grad, but rounding"):
        refattn.quantized.write(new.detach(), new, *pools, slots, scales=scales)
    quantized_values = refattn.mla.allocate(2, 4, 4, 2, dtype=torch.float8_e4m3fn)
    with pytest.raises(NotImplementedError, match="^rope_key: requires_grad, but rounding"):
        refattn.mla.write(new.detach()[:, 0, :4], new[:, 0, 4:], quantized_values, slots)
    with torch.no_grad():
        plan_and_attend(refattn.quantized, wanting, *stored.tensors[1:], scales=stored.scales)
        refattn.quantized.write(new, new, *pools, slots, scales=scales)
        refattn.mla.write(new[:, 0, :4], new[:, 0, 4:], quantized_values, slots)


# --- memory that is written to ---


@pytest.mark.parametrize("package", ["refattn", "fastattn"])
def test_memory_to_write_to_requires_no_gradient(package):
    inputs = laid_out()
    leaf = torch.zeros_like(inputs.query, requires_grad=True)
    path, kv_cache, mla = (
        importlib.import_module(f"{package}.{name}") for name in ("chunked_prefill", "kv_cache", "mla")
    )
    with pytest.raises(ValueError, match="^out: expected memory that requires no gradient"):
        plan_and_attend(path, *inputs.tensors, out=leaf)
    with torch.no_grad():
        assert plan_and_attend(path, *inputs.tensors, out=leaf) is leaf
    key, slots, pairs = torch.zeros(3, 2, 6), torch.arange(3), torch.tensor([[0, 1]])
    pool, leaf = torch.zeros(2, 2, 4, 2, 6), torch.zeros(2, 2, 4, 2, 6, requires_grad=True)
    expected = "expected memory to write to, got a leaf that requires a gradient"
    for name, call in {
        "value_cache": lambda: kv_cache.write(key, key, pool[0], leaf[1], slots),
        "caches[0]": lambda: kv_cache.copy_blocks([leaf[0]], pairs),
        "destinations[0]": lambda: kv_cache.swap_blocks([pool[0]], [leaf[1]], pairs),
        "cache": lambda: mla.write(key[:, 0], key[:, 1, :0], leaf[0, :, :, 0], slots),
    }.items():
        with pytest.raises(ValueError, match=rf"^{re.escape(name)}: {expected}"):
            call()
        with torch.no_grad():
            call()


# --- the fast twin ---


@each_call
def test_the_fast_twin_refuses_gradients_by_name(name):
    call = CALLS[name]
    tensors, fixed = filled(call, "everything")
    expected = call.function("fastattn", **tensors, **fixed)
    for which in tensors:
        wanting = tensors | {which: tensors[which].clone().requires_grad_()}
        on_rank = which.removesuffix("_cache") if name == "context_parallel" else which  # new keys are of the pool, too
        with pytest.raises(NotImplementedError, match=f"^{on_rank}: requires_grad, but fastattn has no backward pass"):
            call.function("fastattn", **wanting, **fixed)
        with torch.no_grad():
            assert torch.equal(call.function("fastattn", **wanting, **fixed), expected)


@pytest.mark.parametrize("name", ["varlen", "chunked_prefill", "e4m3", "int8"])
def test_calls_that_a_plan_has_kept_refuse_gradients_too(name, device):
    """A call without a record of gradients is kept, and is no call with one."""
    path = importlib.import_module("fastattn.quantized" if name in KINDS else f"fastattn.{name}")
    more = {}
    if name in KINDS:
        stored = store(CASE, name, per="head", device=device)
        query, keys, values, batch = stored.tensors
        more["scales"] = stored.scales
    else:
        inputs = build(CASE, device=device)
        query, keys, values, batch = inputs.rows if name == "varlen" else inputs.tensors
    plan = path.plan(batch, **({} if name == "varlen" else {"block_size": CASE.block_size}))
    sinks, slopes = torch.ones(4, device=device), torch.ones(4, device=device)
    for options in (AttentionOptions(), AttentionOptions(sinks=sinks, alibi_slopes=slopes)):
        wanted = [query, sinks] if options.sinks is not None else [query]
        wanted += [] if name in KINDS else [values]
        for x in wanted:
            x.requires_grad_()
            for _ in range(2):
                with torch.no_grad():
                    path.attention(query, keys, values, plan, options, **more)
                with pytest.raises(NotImplementedError, match="requires_grad"):
                    path.attention(query, keys, values, plan, options, **more)
            x.requires_grad_(False)
            path.attention(query, keys, values, plan, options, **more)


def test_the_fast_twin_refuses_gradients_of_what_goes_with_attention(device):
    """Merges, writes and copies; latents that are written, by their own names."""
    kv_cache, merge, mla, pairs, quantized, speculative = (
        importlib.import_module(f"fastattn.{name}")
        for name in ("kv_cache", "merge", "mla", "differential", "quantized", "speculative")
    )
    x = torch.randn(3, 2, 6, device=device)
    wanting, lse = x.clone().requires_grad_(), torch.zeros(3, 2, device=device)
    slots, block_pairs = torch.arange(3, device=device), torch.tensor([[0, 1]], device=device)
    pools = kv_cache.allocate(2, 4, 2, 6, device=device)
    quantized_values = kv_cache.allocate(2, 4, 2, 6, dtype=torch.float8_e4m3fn, device=device)
    latents, halves = mla.allocate(2, 4, 4, 2, device=device), pairs.allocate(2, 4, 2, 6, device=device)
    recorded = pools[0] + wanting[0, 0]  # no leaf
    batch = make_batch([2], [2], [[0]], device=device)
    forest = speculative.make_trees([[-1, 0]], device=device)
    accepted = speculative.accept(batch, forest, *torch.zeros(2, 2, dtype=torch.int64, device=device))
    scales = Fp8Scales(1.0, 1.0)
    calls = {
        "outs[1]": lambda: merge.merge([x, wanting], [lse, lse]),
        "lses[0]": lambda: merge.merge([x, x], [wanting[..., 0], lse]),
        "lse": lambda: merge.add_sinks(x, wanting[..., 0], torch.ones(2, device=device)),
        "sinks": lambda: merge.add_sinks(x, lse, wanting[0, :, 0]),
        "key": lambda: kv_cache.write(wanting, x, *pools, slots),
        "value": lambda: pairs.write(x, wanting, halves, slots),
        "rope_key": lambda: mla.write(x[:, 0, :4], wanting[:, 0, 4:], latents, slots),
        "key ": lambda: quantized.write(wanting, x, *quantized_values, slots, scales=scales),
        "cache": lambda: kv_cache.copy_blocks([recorded], block_pairs),
        "destinations[0]": lambda: kv_cache.swap_blocks([pools[0]], [recorded], block_pairs),
        "cache ": lambda: speculative.compact([recorded], batch, forest, accepted, block_size=4),
    }
    for name, call in calls.items():
        with pytest.raises(NotImplementedError, match=rf"^{re.escape(name.strip())}: requires_grad"):
            call()
        with torch.no_grad():
            call()
    for pool in (*pools, latents, halves):
        assert not pool.requires_grad


def test_ranks_record_gradients_where_their_caller_does():
    assert simulate_ranks(2, lambda group: torch.is_grad_enabled()) == [True, True]
    with torch.no_grad():
        assert simulate_ranks(2, lambda group: torch.is_grad_enabled()) == [False, False]
