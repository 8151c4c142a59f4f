"""What a call asks for: each kernel states the fields of options, plans and storages that it knows, and refuses others.

So a field that comes tomorrow is ignored by no kernel of today.
"""

import inspect
from dataclasses import fields, make_dataclass, replace

import pytest
import torch

import fastattn
from fastattn import context_parallel, mla, recurrent
from fastattn.kernels import Problem, order
from fastattn.kernels import problem as problems
from fastattn.kernels.kernel import Kernel
from fastattn.kernels.problem import asked_of
from refattn.options import AttentionOptions, RecurrentOptions
from refattn.plan import CascadePlan
from refattn.ranks import Shard, simulate_ranks
from refattn.trees import TreePlan
from tests.helpers.layers import OPTIONS, PATHS, in_each_path, lay_out, plan_of
from tests.helpers.twin_files import shared_types

KNOWN = {name: order.load(name).knows for name in order.NAMES}


def asks_more(known, *, new=True):
    """Return options, a plan or scales of a type with one field more, which asks for something if `new`."""
    kind = type(known)
    wider = make_dataclass(kind.__name__, [("new", bool, False)], bases=(kind,), frozen=True, eq=False)
    made = object.__new__(wider)
    its_fields = {x.name: getattr(known, x.name) for x in fields(kind)}
    vars(made).update(its_fields, new=new)
    return made


def test_nothing_is_known_by_default():
    parameter = inspect.signature(Kernel).parameters["knows"]
    assert parameter.default is inspect.Parameter.empty


@pytest.mark.parametrize("kernel", KNOWN)
def test_what_a_kernel_knows_is_there(kernel):
    """A field that goes leaves no name behind."""
    for full_name in KNOWN[kernel]:
        kind, _, name = full_name.partition(".")
        there = shared_types().get(kind) or getattr(problems, kind)
        assert name in (getattr(there, "_fields", None) or [x.name for x in fields(there)]), full_name


@pytest.mark.parametrize("kernel", KNOWN)
@pytest.mark.parametrize("name", ["chunked_prefill", "cascade", "tree", "e4m3"])
def test_each_kernel_refuses_a_field_that_it_does_not_know(name, kernel, monkeypatch):
    """On any machine: here nothing else stands in the way of it."""
    *_, batch, more = lay_out(name)
    options, plan = AttentionOptions(**OPTIONS), plan_of(name, batch)
    its = order.load(kernel)
    monkeypatch.setattr(its, "unsupported_reason", lambda problem: None)
    monkeypatch.setattr(type(its), "computes", lambda self, problem: True)
    given = [options, plan, *more.values()]
    before = {None: asked_of(*given)}
    for i, x in enumerate(given):
        assert asked_of(*given[:i], asks_more(x, new=False), *given[i + 1 :]) == before[None]
        problem = Problem("attend", batch.device, torch.float16, asks=asked_of(asks_more(x)) - before[None])
        assert order.unsupported_reason(kernel, problem) == f"does not know {type(x).__name__}.new"


@in_each_path
@torch.no_grad()
def test_a_call_with_a_field_that_no_kernel_knows_is_refused(name, device):
    """At its default it is not there; and no call that was recorded is replayed in its place."""
    *tensors, batch, more = lay_out(name, dtype=torch.float32, device=device)
    options, plan, attention = AttentionOptions(**OPTIONS), plan_of(name, batch), PATHS[name].attention
    right = attention(*tensors, plan, options, **more)
    for _ in range(2):
        for kind, its_plan, its_options in (
            ("AttentionOptions", plan, asks_more(options)),
            (type(plan).__name__, asks_more(plan), options),
            ("Batch", with_wider_batch(plan), options),
        ):
            with pytest.raises(NotImplementedError, match=f"^no kernel computes .*: does not know {kind}.new"):
                attention(*tensors, its_plan, its_options, **more)
        for its_plan, its_options in ((plan, asks_more(options, new=False)), (asks_more(plan, new=False), options)):
            assert torch.equal(attention(*tensors, its_plan, its_options, **more), right)
    if "scales" in more:
        with pytest.raises(NotImplementedError, match=f"know {type(more['scales']).__name__}.new"):
            attention(*tensors, plan, options, **more | dict(scales=asks_more(more["scales"])))


def with_wider_batch(plan):
    """Return a plan whose batch, or that of its levels, asks for more."""
    if isinstance(plan, CascadePlan):
        return CascadePlan(plan.batch, tuple(map(with_wider_batch, plan.levels)))
    if isinstance(plan, TreePlan):
        return replace(plan, whole=with_wider_batch(plan.whole))
    return replace(plan, batch=asks_more(plan.batch))


@torch.no_grad()
def test_a_step_of_states_with_a_field_that_no_kernel_knows_is_refused(device):
    key, value = torch.ones(3, 1, 4, device=device), torch.ones(3, 1, 4, device=device)
    tensors = key, key, value, *(torch.zeros(3, 1, device=device) for _ in range(2))
    batch = fastattn.metadata.make_batch([2, 1], [2, 1], device=str(device))
    plan = recurrent.plan(batch, state_indices=torch.tensor([1, 0], dtype=torch.int32, device=device))
    options, states = RecurrentOptions(), torch.zeros(2, 1, 4, 4, device=device)
    for its_plan, its_options in ((plan, asks_more(options)), (asks_more(plan), options)):
        kind = "RecurrentOptions" if its_plan is plan else "StatePlan"
        with pytest.raises(NotImplementedError, match=f"know {kind}.new"):
            recurrent.attention(*tensors, states, its_plan, its_options)
        with pytest.raises(NotImplementedError, match=f"know {kind}.new"):
            recurrent.state_map(*tensors[1:], its_plan, its_options)
    assert not states.any()
    weight, inputs = torch.ones(4, 3, device=device), torch.ones(3, 4, device=device)
    with pytest.raises(NotImplementedError, match=r"know StatePlan.new"):
        recurrent.convolve(inputs, weight, torch.zeros(2, 2, 4, device=device), asks_more(plan))


@torch.no_grad()
def test_a_plan_of_several_calls_with_a_field_that_none_knows_is_refused(device):
    query, cache, batch, more = lay_out("latents", dtype=torch.float32, device=device)
    plan = mla.plan_prefill(batch, block_size=16, workspace=40)
    latent, rope_key = query[:, 0, :64], query[:, 0, 64:]
    projections = [torch.ones(4, 64, 64, device=device)] * 2
    named = dict(zip(("key_projection", "value_projection"), projections, strict=True))
    for its_plan, kind in (
        (asks_more(plan), "PrefillPlan"),
        (replace(plan, chunks=(asks_more(plan.chunks[0]), *plan.chunks[1:])), "ContextChunk"),
    ):
        with pytest.raises(NotImplementedError, match=f"^no kernel computes mla.prefill: it does not know {kind}.new"):
            mla.prefill(query, latent, rope_key, cache, its_plan, AttentionOptions(**OPTIONS), **named)
    *tensors, batch, _ = lay_out("chunked_prefill", dtype=torch.float32, device=device)
    plan = context_parallel.plan(batch, block_size=16, shard=Shard(0, 1))
    new = torch.ones(len(tensors[0]), *tensors[1].shape[2:], device=device)
    with pytest.raises(NotImplementedError, match=r"it does not know ContextParallelPlan.new"):
        simulate_ranks(
            1,
            lambda group: context_parallel.attention(tensors[0], new, new, *tensors[1:], asks_more(plan), group=group),
        )
