"""Tensors that are not what their memory holds: resolved or refused by name, whether a call is replayed or not."""

import importlib
import re
from contextlib import nullcontext
from itertools import product

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad

import fastattn
from fastattn import chunked_prefill, kv_cache
from refattn.batch import Batch
from refattn.options import AttentionOptions
from refattn.scales import Scales
from tests.helpers.layers import OPTIONS, PATHS, lay_out, plan_of

each_twin = pytest.mark.parametrize("package", ["refattn", "fastattn"])


def negated(x):
    """Return a view with the values of a tensor over memory that holds them with the other sign."""
    view = torch._neg_view(-x)
    assert view.is_neg() and torch.equal(view, x)
    return view


def negated_scales(scales):
    """Return scales each tensor of which is such a view."""
    return type(scales)(**{name: negated(x) if isinstance(x, torch.Tensor) else x for name, x in vars(scales).items()})


@pytest.mark.parametrize(
    ("name", "package", "kernel"),
    [*product(PATHS, ("refattn", "fastattn"), (None,)), ("sliding_window", "fastattn", "triton")],
)
def test_a_negated_view_is_read_as_it_says(name, package, kernel, device):
    """Each argument in turn, on a plan that replays the call with ordinary tensors."""
    path = importlib.import_module(PATHS[name].__name__.replace("fastattn", package))
    *tensors, batch, more = lay_out(name, dtype=torch.float16 if kernel else torch.float32, device=device)
    per_head = dict(sinks=torch.linspace(-2.0, 1.0, 4, device=device))
    per_head |= dict(alibi_slopes=torch.linspace(0.1, 1.0, 4, device=device))
    plan = plan_of(name, batch)

    def attend(options=per_head, **changes):
        given = [changes.pop(str(i), x) for i, x in enumerate(tensors)]
        return path.attention(*given, plan, AttentionOptions(**OPTIONS, **options), return_lse=True, **more | changes)

    with nullcontext() if kernel is None else fastattn.use_kernel(kernel):
        expected = attend()
        calls = [{str(i): negated(x)} for i, x in enumerate(tensors) if x.itemsize > 1 or x.dtype == torch.int8]
        calls += [dict(options=per_head | {what: negated(x)}) for what, x in per_head.items()]
        calls += [{what: negated(x)} for what, x in more.items() if isinstance(x, torch.Tensor)]
        calls += [dict(scales=negated_scales(x)) for x in more.values() if isinstance(x, Scales)]
        for call in calls:
            assert all(map(torch.equal, attend(**call), expected)), list(call)


@torch.no_grad()
def test_a_negated_view_is_written_as_it_says(device):
    key, value = torch.randn(3, 2, 8, device=device), torch.randn(3, 2, 8, device=device)
    slots = torch.tensor([5, -1, 0], device=device)
    for given in ((key, value), (negated(key), value), (key, negated(value))):
        pools = torch.zeros(2, 4, 4, 2, 8, device=device)
        kv_cache.write(*given, pools[0], pools[1], slots)
        assert torch.equal(pools.flatten(1, 2)[:, [5, 0]], torch.stack([key, value])[:, [0, 2]])
        assert not pools.flatten(1, 2)[:, [1, 2, 3, 4]].any()


@torch.no_grad()
@each_twin
def test_blocks_of_negated_views(package, device):
    cache = importlib.import_module(f"{package}.kv_cache")
    pool = torch.randint(-9, 9, (4, 2, 1, 8), dtype=torch.int8, device=device)
    table = torch.tensor([2, 0], dtype=torch.int32, device=device)
    assert torch.equal(cache.gather(negated(pool), table, 3), cache.gather(pool, table, 3))
    copied = torch.zeros_like(pool)
    cache.swap_blocks([negated(pool)], [copied], torch.tensor([[1, 2]]))
    assert torch.equal(copied[2], pool[1])


MEMORY = {
    "key_cache": lambda package, new, pool, slots: package.kv_cache.write(new, new, negated(pool), pool, slots),
    "value_cache": lambda package, new, pool, slots: package.kv_cache.write(new, new, pool, negated(pool), slots),
    "caches[0]": lambda package, new, pool, slots: package.kv_cache.copy_blocks([negated(pool)], slots[None]),
    "destinations[0]": lambda package, new, pool, slots: package.kv_cache.swap_blocks(
        [pool], [negated(pool)], slots[None]
    ),
    "index_cache": lambda package, new, pool, slots: package.sparse.write(new[:, 0], negated(pool[:, :, 0]), slots),
    "cache": lambda package, new, pool, slots: package.mla.write(
        new[:, 0, :4], new[:, 0, 4:], negated(pool[:, :, 0]), slots
    ),
}


@torch.no_grad()
@each_twin
@pytest.mark.parametrize("name", MEMORY)
def test_what_is_written_to_is_no_negated_view(name, package, device):
    for path in ("kv_cache", "sparse", "mla"):
        importlib.import_module(f"{package}.{path}")
    new, pool = torch.ones(2, 1, 8, device=device), torch.zeros(4, 4, 1, 8, device=device)
    for _ in range(2):  # the second time a good write is remembered
        message = f"^{re.escape(name)}: expected memory that holds its own values, got a negated view$"
        with pytest.raises(ValueError, match=message):
            MEMORY[name](importlib.import_module(package), new, pool, torch.tensor([1, 2], device=device))
        assert not pool.any()
        kv_cache.write(new, new, pool.clone(), pool.clone(), torch.tensor([1, 2], device=device))


@each_twin
def test_an_output_is_no_negated_view(package, device):
    *tensors, batch, _ = lay_out("chunked_prefill", dtype=torch.float32, device=device)
    path = importlib.import_module(f"{package}.chunked_prefill")
    plan = plan_of("chunked_prefill", batch)
    for given in (torch.zeros_like(tensors[0]), negated(torch.zeros_like(tensors[0]))) * 2:
        if not given.is_neg():
            path.attention(*tensors, plan, out=given)
            continue
        with pytest.raises(ValueError, match=r"^out: expected memory that holds its own values, got a negated view$"):
            path.attention(*tensors, plan, out=given)


@pytest.mark.parametrize("name", ["cu_seqlens_q", "seq_lens", "block_table"])
def test_a_table_is_no_negated_view(name, device):
    """Kernels read tables anew in each launch, so a copy would not follow them."""
    tables = dict(cu_seqlens_q=[0, 1], seq_lens=[3], block_table=[[2]])
    tables = {what: torch.tensor(numbers, dtype=torch.int32, device=device) for what, numbers in tables.items()}
    with pytest.raises(ValueError, match=rf"^{name}: expected int32 .*, got int32 .* in a negated view$"):
        Batch(**tables | {name: negated(tables[name])}, max_query_len=1, max_seq_len=3)


class Wrapper(torch.Tensor):
    """A tensor whose values are elsewhere."""

    @classmethod
    def __torch_dispatch__(cls, function, types, arguments=(), options=None):
        raise AssertionError("nothing is computed")


def wrapped(x):
    return torch.Tensor._make_wrapper_subclass(Wrapper, x.shape, dtype=x.dtype, device=x.device)


def freed(x):
    copy = x.clone()
    copy.untyped_storage().resize_(0)
    return copy


ELSEWHERE = {
    "vmap": lambda function, x: torch.vmap(function)(x[None]),
    "functionalize": lambda function, x: torch.func.functionalize(function)(x),
    "fake": lambda function, x: function(FakeTensorMode().from_tensor(x)),
    "a wrapper": lambda function, x: function(wrapped(x)),
    "zeros without memory": lambda function, x: function(torch._efficientzerotensor(x.shape, device=x.device)),
    "memory that is freed": lambda function, x: function(freed(x)),
}


@torch.no_grad()
@pytest.mark.parametrize("kind", ELSEWHERE)
def test_a_tensor_without_memory_is_refused_by_name(kind, device):
    """In a first call, and where a plan, or a write, remembers one with ordinary tensors."""
    *tensors, batch, _ = lay_out("chunked_prefill", dtype=torch.float32, device=device)
    plan, slots = plan_of("chunked_prefill", batch), torch.tensor([1, 4], device=device)
    new, pools = torch.ones(2, 2, tensors[1].shape[3], device=device), [torch.zeros_like(x) for x in tensors[1:]]

    def attend(query=tensors[0], key_cache=tensors[1], value_cache=tensors[2]):
        return chunked_prefill.attention(query, key_cache, value_cache, plan)

    def write(key=new, key_cache=pools[0]):
        kv_cache.write(key, new, key_cache, pools[1], slots)
        return key

    before = [x.clone() for x in pools]
    for _ in range(2):
        for function, name, x in (
            (lambda x: attend(query=x), "query", tensors[0]),
            (lambda x: attend(key_cache=x), "key_cache", tensors[1]),
            (lambda x: attend(value_cache=x), "value_cache", tensors[2]),
            (lambda x: write(key=x), "key", new),
            (lambda x: write(key_cache=x), "key_cache", pools[0]),
        ):
            with pytest.raises(ValueError, match=f"^{name}: expected a tensor that a kernel can read in memory, got "):
                ELSEWHERE[kind](function, x)
        assert all(map(torch.equal, pools, before))
        attend()
        kv_cache.write(new, new, *(x.clone() for x in pools), slots)


@pytest.mark.parametrize("kind", ["sparse", "quantized"])
@each_twin
def test_a_tensor_of_another_kind_is_refused_by_name(kind, package):
    path = importlib.import_module(f"{package}.kv_cache")
    pool = torch.ones(2, 4, 1, 8)
    other = pool.to_sparse() if kind == "sparse" else torch.quantize_per_tensor(pool, 0.1, 0, torch.qint8)
    with pytest.raises(ValueError, match=r"^caches\[0\]: expected a cache \[n, ...\], got "):
        path.copy_blocks([other], torch.tensor([[0, 1]]))
    with pytest.raises(ValueError, match=r"^key_cache: expected \[n, p, hk, d\], got "):
        path.write(pool[0], pool[0], other, pool, torch.arange(4))


@torch.no_grad()
def test_a_tangent_is_refused(device):
    """Forward-mode gradients: an output without a tangent would mean that it does not depend on the query."""
    *tensors, batch, _ = lay_out("chunked_prefill", dtype=torch.float32, device=device)
    plan = plan_of("chunked_prefill", batch)
    new, pools = torch.ones(2, 2, 64, device=device), torch.zeros(2, 5, 16, 2, 64, device=device)
    for _ in range(2):
        chunked_prefill.attention(*tensors, plan)
        kv_cache.write(new, new, *pools.clone(), torch.tensor([1, 4], device=device))
        with forward_ad.dual_level():
            query, key = (forward_ad.make_dual(x, torch.ones_like(x)) for x in (tensors[0], new))
            with pytest.raises(NotImplementedError, match=r"^query: has a tangent, but fastattn has no backward pass"):
                chunked_prefill.attention(query, *tensors[1:], plan)
            with pytest.raises(NotImplementedError, match=r"^key: has a tangent, but fastattn has no backward pass"):
                kv_cache.write(key, new, *pools, torch.tensor([1, 4], device=device))
        assert not pools.any()
