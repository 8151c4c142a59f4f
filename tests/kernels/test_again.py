"""Calls that a plan has kept, and writes: made again without checks, and never in the place of another."""

import ctypes
from contextlib import nullcontext
from unittest import mock

import kernels_present  # noqa: F401 (quickens the interpreter)
import pytest
import torch
from batches import Case, build
from stored import apart, store

import fastattn
import refattn.kv_cache
from fastattn import chunked_prefill, dense, kv_cache, local, quantized, sliding_window
from fastattn.kernels import call, dispatch
from refattn.interface import AttentionOptions, Fp8Scales, Int8Scales

CASE = Case("layers", ((2, 40), (1, 60), (0, 9)), heads=(4, 2), padding_rows=1)
PATHS = {
    "dense": (dense, {}),
    "chunked_prefill": (chunked_prefill, {}),
    "sliding_window": (sliding_window, dict(window_size=(20, 0))),
    "local": (local, dict(chunk_size=32)),
    "e4m3": (quantized, {}),
    "int8": (quantized, {}),
}
in_each_path = pytest.mark.parametrize("name", PATHS)


def lay_out(name, seed=0, dtype=torch.float16, device="cpu"):
    """Make the tensors of a layer of a path, the batch, and what its call takes besides."""
    if name in ("e4m3", "int8"):
        stored = store(CASE, name, dtype=dtype, seed=seed, poison=(0.5,), per="head", device=device)
        return *stored.tensors[:3], stored.batch, dict(scales=stored.scales)
    inputs = build(CASE, seed=seed, dtype=dtype, device=device, poison=(0.5,))
    tensors = inputs.rows if name == "dense" else inputs.tensors
    return *tensors[:3], tensors[3], {}


def plan_of(name, batch):
    path, planned = PATHS[name]
    return path.plan(batch, **planned, **({} if name == "dense" else {"block_size": 16}))


def nothing_is_chosen():
    return mock.patch.object(dispatch, "choose", side_effect=AssertionError("a kernel was chosen"))


@in_each_path
@pytest.mark.parametrize("return_lse", [False, True], ids=["out", "lse"])
@pytest.mark.parametrize("kernel", [None, "triton"], ids=["chosen", "triton"])
def test_a_call_is_made_again_with_the_tensors_of_another_layer(name, return_lse, kernel, device):
    path, _ = PATHS[name]
    *first, batch, more = lay_out(name, device=device)
    *other, _, others = lay_out(name, seed=1, device=device)
    plan = plan_of(name, batch)
    with nullcontext() if kernel is None else fastattn.use_kernel(kernel):
        path.attention(*first, plan, return_lse=return_lse, **more)
        anew = path.attention(*other, plan_of(name, batch), return_lse=return_lse, **others)
        with nothing_is_chosen():
            again = path.attention(*other, plan, return_lse=return_lse, **others)
            out = torch.full_like(again[0] if return_lse else again, torch.nan)
        path.attention(*other, plan, out=out, return_lse=return_lse, **others)
        with nothing_is_chosen():
            in_out = path.attention(*other, plan, out=out.fill_(torch.nan), return_lse=return_lse, **others)
    if not return_lse:
        anew, again, in_out = (anew,), (again,), (in_out,)
    assert in_out[0] is out
    assert all(map(torch.equal, again, anew))
    assert all(map(torch.equal, in_out, anew))


def other_calls(device):
    """List calls by one plan, no two of one name: tensors, options, and what else is passed."""
    query, keys, values, _, _ = lay_out("chunked_prefill", device=device)
    others = lay_out("chunked_prefill", seed=1, device=device)[:3]
    in_halves = lay_out("chunked_prefill", dtype=torch.float32, device=device)[:3]
    heads_first = keys.transpose(1, 2).contiguous().transpose(1, 2)
    unaligned = torch.empty(keys.numel() + 1, dtype=keys.dtype, device=device)[1:].view(keys.shape).copy_(keys)
    slopes, sinks = torch.tensor([0.5, 0.1, 0.2, 0.3], device=device), torch.tensor([1.0, -2, 3, 0], device=device)
    apart_out = torch.zeros(len(query), 4, 2 * values.shape[-1], dtype=query.dtype, device=device)[..., ::2]
    return {
        "others": (others, {}, {}),
        "float32": (in_halves, {}, {}),
        "a row of padding": ((torch.cat([query, query[:1]]), keys, values), {}, {}),
        "fewer heads": ((query[:, ::2], keys, values), {}, {}),
        "half the heads of keys": ((query[:, :2], keys[:, :, :1], values[:, :, :1]), {}, {}),
        "rows apart": ((apart(query), keys, values), {}, {}),
        "elements apart": ((query, keys, values.repeat_interleave(2, -1)[..., ::2]), {}, {}),
        "values of another size": ((query, keys, values[..., :16]), {}, {}),
        "heads before tokens": ((query, heads_first, values), {}, {}),
        "unaligned": ((query, unaligned, values), {}, {}),
        "more blocks": ((query, torch.cat([keys, keys]), torch.cat([values, values])), {}, {}),
        "scale": ((query, keys, values), dict(softmax_scale=0.3), {}),
        "negative scale": ((query, keys, values), dict(softmax_scale=-0.3), {}),
        "no scale": ((query, keys, values), dict(softmax_scale=0.0), {}),
        "softcap": ((query, keys, values), dict(softcap=2.0), {}),
        "invariant": ((query, keys, values), dict(batch_invariant=True), {}),
        "slopes": ((query, keys, values), dict(alibi_slopes=slopes), {}),
        "other slopes": ((query, keys, values), dict(alibi_slopes=slopes.flip(0)), {}),
        "slopes apart": ((query, keys, values), dict(alibi_slopes=slopes.repeat_interleave(2)[::2]), {}),
        "sinks": ((query, keys, values), dict(sinks=sinks), {}),
        "other sinks": ((query, keys, values), dict(sinks=sinks.flip(0)), {}),
        "sinks of another type": ((query, keys, values), dict(sinks=sinks.half()), {}),
        "out": ((query, keys, values), {}, dict(out=torch.zeros_like(query))),
        "out apart": ((query, keys, values), {}, dict(out=apart_out)),
    }


@pytest.mark.parametrize("kernel", [None, "triton"], ids=["chosen", "triton"])
def test_other_calls_by_the_same_plan_are_answered_as_by_a_new_one(kernel, device):
    *tensors, batch, _ = lay_out("chunked_prefill", device=device)
    plan, is_first = plan_of("chunked_prefill", batch), {}
    with nullcontext() if kernel is None else fastattn.use_kernel(kernel):
        for _ in range(2):  # kept, and then made again among the others
            for what, (tensors, options, more) in other_calls(device).items():
                options = AttentionOptions(**options)
                answer = chunked_prefill.attention(*tensors, plan, options, return_lse=True, **more)
                anew = chunked_prefill.attention(*tensors, plan_of("chunked_prefill", batch), options, return_lse=True)
                assert all(map(torch.equal, answer, anew)), what
                assert "out" not in more or answer[0] is more["out"]
                is_first.setdefault(what, anew)
    assert not torch.equal(is_first["slopes"][0], is_first["other slopes"][0])
    assert not torch.equal(is_first["sinks"][1], is_first["other sinks"][1])


def changed(x):
    """Change each of what a launch or a check sees of a tensor, and nothing else."""
    yield x.half()
    yield x[1:].clone()
    yield torch.cat([x, x])[::2]
    yield x.unsqueeze(0)
    yield x.to("meta")
    if x.is_floating_point():
        yield x.detach().clone().requires_grad_()


def unchecked(kind, fields):
    """Make options or scales of any fields: no two of them have to fit."""
    made = object.__new__(kind)
    vars(made).update(fields)
    return made


@pytest.mark.parametrize("kind", ["plain", "e4m3", "int8"])
def test_calls_of_one_name_are_alike(kind):
    """All that is checked, chosen and launched by is in the name, but for what the plan says and the tensors hold."""
    query, key, value, batch, _ = lay_out("chunked_prefill", dtype=torch.float32)
    plan, per_head = plan_of("chunked_prefill", batch), torch.ones(4)
    scales = {"key": torch.ones(2, 4), "value": torch.ones(2, 4)} if kind != "plain" else {}
    scales |= {"key": torch.ones(8, 16, 2)} if kind == "int8" else {}
    scales |= {"query": torch.ones(2, 4)} if kind == "e4m3" else {}
    good = dict(
        query=query,
        key=key,
        value=value,
        out=query.clone(),
        alibi_slopes=per_head,
        sinks=per_head,
        **{f"scales.{name}": scale for name, scale in scales.items()},
    )

    def named(asked_for=None, operation="paged", return_lse=False, format=torch.float8_e4m3fn, **changes):
        given = {**good, **changes}
        its_scales = {name[7:]: given.pop(name) for name in list(given) if name.startswith("scales.")}
        its_scales |= {"format": format} if kind == "e4m3" else {}
        options = {name: given.pop(name, default) for name, default in vars(AttentionOptions()).items()}
        arguments = dict(options=unchecked(AttentionOptions, options), return_lse=return_lse, scales=None)
        if its_scales:
            arguments["scales"] = unchecked(Int8Scales if kind == "int8" else Fp8Scales, its_scales)
        return call.name_of_call(operation, asked_for, **given, plan=plan, **arguments)

    name = named()
    assert name is not None
    assert name == named(**{what: x.clone() for what, x in good.items()})
    others = [
        *(named(**{what: other}) for what, x in good.items() for other in changed(x)),
        *(named(**{what: None}) for what in good if what not in ("query", "key", "value")),
        *(named(**{what: 1.0}) for what in good if what.startswith("scales.")),
        *(named(asked_for="triton"), named(operation="dense"), named(return_lse=True)),
        *(named(softmax_scale=1.0), named(softcap=1.0), named(batch_invariant=True), named(alibi_sqrt=True)),
        *([named(format=torch.float8_e5m2)] if kind == "e4m3" else []),
    ]
    for other in others:
        assert other is not None
        assert other != name
    for what in ("query", "key", "value", "out"):
        for bad in ([1], "query", 1.0, torch.nn.Parameter(query)):
            assert named(**{what: bad}) is None
    for bad in (1, 0, None, "yes", torch.tensor(True)):
        assert named(return_lse=bad) is None
    unaligned = torch.zeros(query.numel() + 1)[1:].view(query.shape)
    assert named(query=unaligned) is named(out=unaligned) is named(sinks=torch.ones(5)[1:]) is None
    with torch.autocast("cpu", torch.bfloat16):
        assert named() is None


def test_a_kernel_that_is_asked_for_is_not_replaced_by_a_kept_one(device):
    *tensors, batch, _ = lay_out("chunked_prefill", device=device)
    plan, refusing = plan_of("chunked_prefill", batch), "fa4" if device == "cpu" else "cpu"
    for times_chosen in (1, 0):
        chunked_prefill.attention(*tensors, plan)
        with fastattn.use_kernel(refusing), pytest.raises(NotImplementedError, match=f"{refusing}: computes on"):
            chunked_prefill.attention(*tensors, plan)
        with fastattn.use_kernel("triton"), mock.patch.object(dispatch, "choose", wraps=dispatch.choose) as choose:
            chunked_prefill.attention(*tensors, plan)
        assert choose.call_count == times_chosen
    assert {name[2] for name in plan.kept if name[0] == "paged"} == {None, "triton"}


def test_out_of_memory_in_a_kept_call_ends_as_in_a_first_one():
    *tensors, batch, _ = lay_out("chunked_prefill")
    plan = plan_of("chunked_prefill", batch)
    answer = chunked_prefill.attention(*tensors, plan)
    (name,) = [name for name in plan.kept if name[0] == "paged"]
    kept = plan.kept[name] = mock.Mock(side_effect=torch.OutOfMemoryError)
    assert torch.equal(chunked_prefill.attention(*tensors, plan), answer)
    kept.assert_called_once()


def test_nothing_is_kept_for_a_gpu_that_is_not_the_current_one(monkeypatch):
    """A launch goes to the current GPU; the long way makes that of the tensors the current one."""
    tensor = mock.Mock(spec=torch.Tensor, device=torch.device("cuda", 1), dtype=torch.half, shape=(1, 2, 3))
    tensor.data_ptr.return_value, tensor.stride.return_value = 16, (6, 3, 1)
    plan = plan_of("chunked_prefill", lay_out("chunked_prefill")[3])
    monkeypatch.setattr(call, "Tensor", type(tensor))
    for current in (0, 1):
        monkeypatch.setattr(torch.cuda, "current_device", lambda current=current: current)
        name = call.name_of_call("paged", None, tensor, tensor, tensor, plan, AttentionOptions(), None, False, None)
        assert (name is not None) == (current == 1)


# --- launches by address ---


class ByAddress:
    """A launch as the driver makes it, of addresses, in the interpreter."""

    def __init__(self, launch):
        self.launch, self.calls = launch, 0

    def __call__(self, *arguments):
        def at(x, dtype):
            memory = (ctypes.c_char * dtype.itemsize).from_address(x)
            return torch.frombuffer(memory, dtype=dtype)  # of its first element: kernels take no size

        self.calls += 1
        given = [
            at(x, dtype) if type(x) is int and dtype is not None else x
            for x, dtype in zip(arguments, self.launch._types, strict=True)
        ]
        packed, self.launch._packed = self.launch._packed, None
        self.launch.again(*given)
        self.launch._packed = packed


@pytest.mark.parametrize("name", ["chunked_prefill", "e4m3", "int8"])
@pytest.mark.parametrize("return_lse", [False, True], ids=["out", "lse"])
@pytest.mark.parametrize("splits", [1, 3])
def test_parts_in_one_piece_of_memory_are_found_by_their_addresses(name, return_lse, splits):
    attention = pytest.importorskip("fastattn.kernels.triton.attention", reason="needs Triton")
    if not attention.INTERPRETED:
        pytest.skip("launches by the driver, on a GPU, find them so")
    path, _ = PATHS[name]
    *tensors, batch, more = lay_out(name)
    sinks = AttentionOptions(sinks=torch.tensor([1.0, -2.0, 3.0, 0.0]))
    tune = attention.tune
    split = mock.patch.object(
        attention, "tune", lambda *a: tune(*a)._replace(splits=splits, most_splits=splits, block_n=16)
    )
    with fastattn.use_kernel("triton"), split:
        for options in (AttentionOptions(), sinks):
            plan = plan_of(name, batch)
            first = path.attention(*tensors, plan, options, return_lse=return_lse, **more)
            (launches,) = (x for x in plan.kept.values() if isinstance(x, attention.Launches))
            made = [x for x in (launches._attend, launches._reduce) if x is not None]
            for launch in made:
                launch._packed = ByAddress(launch)
            again = path.attention(*tensors, plan, options, return_lse=return_lse, **more)
            assert [launch._packed.calls for launch in made] == [1] * len(made) == [1] * min(splits, 2)
            assert all(map(torch.equal, again, first)) if return_lse else torch.equal(again, first)


# --- writes ---


def of_write(device, seed=0):
    torch.manual_seed(seed)
    key, value = torch.randn(6, 2, 8, device=device), torch.randn(6, 2, 24, device=device)
    pools = torch.zeros(5, 4, 2, 8, device=device), torch.zeros(5, 4, 2, 24, device=device)
    return [key, value, *pools, torch.tensor([7, -1, 0, 19, 4], device=device)]


def test_a_write_is_made_again_with_other_tensors(device):
    """On a CPU by the launch itself, as slots are checked there each time."""
    cache = pytest.importorskip("fastattn.kernels.triton.cache", reason="needs Triton")
    key, value, *pools_and_slots = of_write(device)
    again = cache.write(key[:5], value[:5], *pools_and_slots)
    kv_cache.write(*of_write(device))
    for seed in (1, 2, 3):
        arguments, by_launch, expected = (of_write(device, seed) for _ in range(3))
        refattn.kv_cache.write(*expected)
        again(*by_launch)
        with nothing_is_chosen() if device != "cpu" else nullcontext():
            kv_cache.write(*arguments)
        for pool in (2, 3):
            assert torch.equal(arguments[pool], expected[pool])
            assert torch.equal(by_launch[pool], expected[pool])


def test_writes_of_one_name_are_alike():
    """All that is checked and launched by is in the name, but for what the tensors hold."""
    good = of_write("meta")
    named = call.name_of_write(None, *good)
    assert named == call.name_of_write(None, *of_write("meta"))
    assert call.name_of_write(None, *of_write("cpu")) is None
    assert call.name_of_write("triton", *good) not in (None, named)
    for i, x in enumerate(good):
        for other in (*changed(torch.empty_like(x, device="meta")), torch.empty_like(x, device="cpu")):
            layouts = [(y.device, y.dtype, y.shape, y.stride(), y.requires_grad) for y in (other, x)]
            if layouts[0] != layouts[1]:
                assert call.name_of_write(None, *good[:i], other, *good[i + 1 :]) != named
        unaligned = torch.empty(x.numel() + 1, dtype=x.dtype, device="meta")[1:].view(x.shape)
        assert call.name_of_write(None, *good[:i], unaligned, *good[i + 1 :]) == (named if i == 4 else None)
        for bad in (None, [1], "key", torch.nn.Parameter(x.float())):
            assert call.name_of_write(None, *good[:i], bad, *good[i + 1 :]) is None


@pytest.mark.usefixtures("shapes_unchecked")
def test_bad_writes_are_refused_after_good_ones(device):
    good = of_write(device)
    for _ in range(2):
        kv_cache.write(*good)
    before = [x.clone() for x in good]
    key, value, key_cache, value_cache, slots = good
    for name, bad in (
        ("key", [key.half(), value, key_cache, value_cache, slots]),
        ("key", [key[..., :4], value, key_cache, value_cache, slots]),
        ("key", [key[:, :1], value, key_cache, value_cache, slots]),
        ("value", [key, value[:4], key_cache, value_cache, slots]),
        ("value_cache", [key, value, key_cache, value_cache[:4], slots]),
        ("value_cache", [key, value, key_cache, value_cache.to("meta"), slots]),
        ("slot_mapping", [key, value, key_cache, value_cache, slots.int()]),
        ("slot_mapping", [key, value, key_cache, value_cache, torch.cat([slots, slots])]),
        ("key", [None, value, key_cache, value_cache, slots]),
    ):
        with pytest.raises(ValueError, match=f"^{name}: expected"):
            kv_cache.write(*bad)
        assert all(map(torch.equal, good, before))
