"""Replays: calls by the memo of a plan, and writes, without checks, and never in the place of another."""

import ctypes
import importlib
import itertools
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import fields, replace
from functools import partial
from unittest import mock

import pytest
import torch

import fastattn
import refattn.kv_cache
from fastattn import (
    chunked_prefill,
    dispatch,
    kv_cache,
    metadata,
    sliding_window,
    varlen,
)
from fastattn.kernels import order, replay
from fastattn.kernels.cpu import blocks as cpu_blocks
from fastattn.kernels.cpu import schedule
from fastattn.kernels.replay import Bound, memo_of
from refattn.keys import Pages, QuantizedPages, Rows
from refattn.options import AttentionOptions
from refattn.scales import Fp8Scales, Int8Scales
from tests.helpers.kernels_present import PRESENT  # the import quickens the interpreter
from tests.helpers.layers import NUMBERS, OPTIONS, PATHS, in_each_path, lay_out, plan_of
from tests.helpers.pairs import every_pair
from tests.helpers.stored import apart


def nothing_is_chosen():
    def refuse(*_):
        raise AssertionError("a kernel was chosen")

    return mock.patch.multiple(order, choose=refuse, choose_fused=refuse)


def nothing_is_checked():
    """Make a check fail that every call of attention makes."""
    return mock.patch("refattn.checks_of_calls.check_query", side_effect=AssertionError("a query was checked"))


@pytest.mark.covers("C110")
@pytest.mark.parametrize(
    ("name", "kernel", "given"),
    every_pair(PATHS, ["triton", None], [(), ("sinks", "alibi_slopes", "softcap")]),
    ids=str,
)
def test_a_call_is_replayed_with_the_tensors_of_another_layer(name, kernel, given, device):
    """The output alone by our own kernel, and with its log-sum-exp by the one that is chosen."""
    return_lse = kernel is None
    attention = PATHS[name].attention
    *first, batch, more = lay_out(name, device=device)
    *other, _, others = lay_out(name, seed=1, device=device)
    slopes, sinks = (torch.linspace(a, 1.0, 4, device=device) for a in (0.1, -2.0))
    asked = {what: dict(sinks=sinks, alibi_slopes=slopes, softcap=5.0)[what] for what in given}
    with nullcontext() if kernel is None else fastattn.use_kernel(kernel):
        plan = plan_of(name, batch)
        options = AttentionOptions(**OPTIONS, **asked)
        with nothing_is_checked(), pytest.raises(AssertionError, match="a query was checked"):
            attention(*first, plan, options, return_lse=return_lse, **more)
        changed = {what: x.flip(0) for what, x in asked.items() if what != "softcap"}
        other_options = replace(options, **changed)
        attention(*first, plan, options, return_lse=return_lse, **more)
        anew = attention(*other, plan_of(name, batch), other_options, return_lse=return_lse, **others)
        with nothing_is_chosen(), nothing_is_checked():
            replayed = attention(*other, plan, other_options, return_lse=return_lse, **others)
        out = torch.full_like(replayed[0] if return_lse else replayed, torch.nan)
        attention(*first, plan, options, out=out, return_lse=return_lse, **more)
        with nothing_is_chosen(), nothing_is_checked():
            in_out = attention(*other, plan, other_options, out=out.fill_(torch.nan), return_lse=return_lse, **others)
        if not return_lse:
            anew, replayed, in_out = (anew,), (replayed,), (in_out,)
        assert in_out[0] is out
        assert all(map(torch.equal, replayed, anew))
        assert all(map(torch.equal, in_out, anew))


def in_one_memory(x, like, shift):
    """Return a tensor and memory for an output, which begins in the middle of it if `shift`, else with it."""
    size = -(-x.numel() * x.itemsize // 16) * 16
    begin = size // 32 * 16 if shift else 0
    memory = torch.zeros(begin + size + like.nbytes, dtype=torch.uint8, device=x.device)
    own, out = memory[: x.numel() * x.itemsize], memory[begin : begin + like.nbytes]
    return own.view(x.dtype).view(x.shape).copy_(x), out.view(like.dtype).view(like.shape)


@pytest.mark.covers("A16")
@in_each_path
@pytest.mark.parametrize("twin", ["refattn", *PRESENT], ids=str)
def test_an_output_may_be_written_over_an_input(name, twin, device):
    """The bits are those in new memory, also of a replay of a call whose output was elsewhere."""
    *tensors, batch, more = lay_out(name, device=device)
    attention = PATHS[name].attention
    if twin == "refattn":
        attention = importlib.import_module(PATHS[name].__name__.replace("fastattn", "refattn")).attention
    sinks = torch.linspace(-2.0, 1.0, 4, device=device, dtype=tensors[0].dtype)

    def attend(plan, changed, **options):
        query, *pools = [changed.get(i, x) for i, x in enumerate(tensors)]
        its_options = AttentionOptions(**OPTIONS, sinks=changed.get("sinks", sinks))
        return attention(query, *pools, plan, its_options, **more, **options)

    def assert_overwritten_last():
        expected = attend(plan_of(name, batch), {})
        for i, (what, x) in enumerate({**dict(enumerate(tensors)), "sinks": sinks}.items()):
            plan, is_first_shifted = plan_of(name, batch), (i + len(name)) % 2 == 0
            for shift in (is_first_shifted, None, not is_first_shifted):
                mine, out = in_one_memory(x, expected, shift)
                out = torch.empty_like(out) if shift is None else out
                answer = attend(plan, {what: mine}, out=out)
                assert answer is out
                assert torch.equal(answer, expected), (what, shift)

    if twin == "refattn":
        assert_overwritten_last()
    else:
        with twin.forced():
            twin.check(assert_overwritten_last)


def test_an_output_beside_an_input_is_written_at_once(device):
    """In one half of a workspace, and not if its rows lie between those of the input."""
    query, *pools, batch, _ = lay_out("varlen", device=device)
    halves = torch.zeros(2, *query.shape, dtype=query.dtype, device=device)
    between = torch.zeros(query.shape[0], 2, *query.shape[1:], dtype=query.dtype, device=device).transpose(0, 1)
    for memory in (halves, halves.view_as(halves), between):
        own, out = memory if memory is not halves else reversed(memory)
        own.copy_(query)
        plan = plan_of("varlen", batch)
        expected = varlen.attention(own, *pools, plan)
        for _ in range(2):
            assert torch.equal(varlen.attention(own, *pools, plan, out=out), expected)
        assert dispatch._memory(out, own, *pools) is (None if memory is between else out)
        assert torch.equal(own, query)
    scales = Fp8Scales(torch.ones(4, device=device), 1.0)
    assert dispatch._memory(scales.key, scales) is None
    assert dispatch._memory(scales.key, scales.value, None, query) is scales.key
    assert dispatch._memory(halves[0], between[0, :0], halves[1, :, :, ::2]) is not None


def other_calls(device):
    """List calls by one plan, no two with one cache key: tensors, options, and what else is passed."""
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
        for _ in range(2):  # computed, and then replayed among the others
            for what, (tensors, options, more) in other_calls(device).items():
                options = AttentionOptions(**options)
                answer = chunked_prefill.attention(*tensors, plan, options, return_lse=True, **more)
                if what not in is_first:
                    new_plan = plan_of("chunked_prefill", batch)
                    is_first[what] = chunked_prefill.attention(*tensors, new_plan, options, return_lse=True)
                assert all(map(torch.equal, answer, is_first[what])), what
                assert "out" not in more or answer[0] is more["out"]
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


def other_number(default):
    """Return another number than the default of an option; None stands for a number that depends on the shapes."""
    return 1.0 if default is None else not default if isinstance(default, bool) else default + 1


def unchecked(kind, fields):
    """Make options or scales of any fields: no two of them have to fit."""
    made = object.__new__(kind)
    vars(made).update(fields)
    return made


@pytest.mark.parametrize("kind", ["plain", "e4m3", "int8"])
def test_calls_with_one_cache_key_are_alike(kind):
    """All that is checked, chosen and launched by is in the key, but for what the plan says and the tensors hold."""
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

    def named(forced=None, storage=Pages, return_lse=False, format=torch.float8_e4m3fn, **changes):
        given = {**good, **changes}
        its_scales = {name[7:]: given.pop(name) for name in list(given) if name.startswith("scales.")}
        its_scales |= {"format": format} if kind == "e4m3" else {}
        options = {name: given.pop(name, default) for name, default in vars(AttentionOptions()).items()}
        arguments = dict(options=unchecked(AttentionOptions, options), return_lse=return_lse, scales=None)
        if its_scales:
            arguments["scales"] = unchecked(Int8Scales if kind == "int8" else Fp8Scales, its_scales)
        query, *pools, its_scales = *map(given.pop, ("query", "key", "value")), arguments.pop("scales")
        keys = storage(*pools) if its_scales is None else QuantizedPages(*pools, its_scales)
        return dispatch.key_of(forced, query, keys, plan, **given, **arguments, more={})

    name = named()
    assert name is not None
    assert name == named(**{what: x.clone() for what, x in good.items()})
    others = [
        *(named(**{what: other}) for what, x in good.items() for other in changed(x)),
        *(named(**{what: None}) for what in good if what not in ("query", "key", "value")),
        *(named(**{what: 1.0}) for what in good if what.startswith("scales.")),
        *(named(forced="triton"), named(return_lse=True), *([named(storage=Rows)] if kind == "plain" else [])),
        *(named(**{name: other_number(default)}) for name, default in NUMBERS.items()),
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


def test_a_kernel_that_is_asked_for_is_not_replaced_by_a_replay(device):
    *tensors, batch, _ = lay_out("chunked_prefill", device=device)
    plan, refusing = plan_of("chunked_prefill", batch), "fa4" if device == "cpu" else "cpu"
    for times_chosen in (1, 0):
        chunked_prefill.attention(*tensors, plan)
        with fastattn.use_kernel(refusing), pytest.raises(NotImplementedError, match=f"{refusing}: computes on"):
            chunked_prefill.attention(*tensors, plan)
        with fastattn.use_kernel("triton"), mock.patch.object(order, "choose", wraps=order.choose) as choose:
            chunked_prefill.attention(*tensors, plan)
        assert choose.call_count == times_chosen
    assert {forced for forced, *_ in memo_of(plan).bound} == {None, "triton"}


@pytest.mark.usefixtures("shapes_unchecked")
@in_each_path
def test_bad_calls_are_refused_after_good_ones(name, device):
    """What is bad in one argument gives another cache key, whatever the path."""
    *tensors, batch, more = lay_out(name, device=device)
    query, *pools = tensors
    plan, options = plan_of(name, batch), AttentionOptions(**OPTIONS)
    bad = [
        ("", [query[..., :3] if "latents" in name else query[:, :3], *pools], {}, {}),
        ("query", [query[0], *pools], {}, {}),
        ("out", tensors, {}, dict(out=query[..., :5])),
        ("return_lse", tensors, {}, dict(return_lse=1)),
        ("sinks", tensors, dict(sinks=torch.zeros(3, device=device)), {}),
        ("options", tensors, None, {}),
    ]
    if device == "cpu":  # where the tables are read
        bad.append(("", [query, *(pool[:1] for pool in pools)], {}, {}))
    numbers = {"cache_scale": (0.0, -1.0, torch.nan, torch.inf, "1", True, 0.0), "latent_rank": (0, 10_000, 8.0, True)}
    numbers |= {"lambda_init": (torch.nan, torch.inf, "1", True), "norm_eps": (0.0, -1e-5, torch.nan, None, [1])}
    numbers["lambda_full"] = (torch.zeros(1, device=device), torch.tensor(1, device=device), 0.5)
    if device == "cpu":
        numbers["lambda_full"] += (torch.tensor(torch.nan), torch.tensor(torch.inf))
    numbers["norm_weight"] = (torch.ones(3, device=device), torch.ones(32, dtype=torch.int32, device=device))
    numbers["scales"] = (1.0, AttentionOptions(), {})
    its = {"norm_eps": 1e-5, **more} if "differential" in name else {"cache_scale": 1.0, **more}
    if "latents" not in name and "differential" not in name:
        its = more
    bad += [(what, tensors, {}, {what: x}) for what in its for x in numbers[what]]
    if "latents" in name and name != "fp8 latents":
        bad.append(("cache_scale", tensors, {}, dict(cache_scale=0.5)))
    attend = PATHS[name].attention
    for _ in range(2):
        expected = attend(*tensors, plan, options, **more)
    for what, given, asked, changes in bad:
        given_options = None if asked is None else AttentionOptions(**OPTIONS, **asked)
        with pytest.raises(ValueError, match=f"^{what}.*: expected"):
            attend(*given, plan, given_options, **{**more, **changes})
        with nothing_is_checked():
            assert torch.equal(attend(*tensors, plan, options, **more), expected)


@in_each_path
def test_threads_may_share_a_plan(name, device):
    """Each binds the call by itself, and whichever is first makes the memo."""
    layers = [lay_out(name, seed=seed, device=device) for seed in range(4)]
    batch, options = layers[0][-2], AttentionOptions(**OPTIONS)
    attend = PATHS[name].attention
    expected = [attend(*tensors, plan_of(name, batch), options, **more) for *tensors, _, more in layers]
    plan, start = plan_of(name, batch), threading.Barrier(len(layers))

    def run(layer):
        *tensors, _, more = layer
        start.wait()
        return [attend(*tensors, plan, options, **more) for _ in range(3)]

    with ThreadPoolExecutor(len(layers)) as threads:
        for answers, answer in zip(threads.map(run, layers), expected, strict=True):
            assert all(torch.equal(x, answer) for x in answers)
    assert len(memo_of(plan).bound) == 1


@in_each_path
def test_a_new_thread_replays_what_another_recorded(name, device):
    """On a GPU a thread has no context at first; the second thread meets launches that were laid out for the driver."""
    *tensors, batch, more = lay_out(name, device=device)
    plan, options = plan_of(name, batch), AttentionOptions(**OPTIONS)
    expected = PATHS[name].attention(*tensors, plan, options, **more)
    for _ in range(2):
        found = []
        thread = threading.Thread(
            target=lambda found=found: found.append(PATHS[name].attention(*tensors, plan, options, **more))
        )
        with nothing_is_checked():
            thread.start()
            thread.join()
        assert torch.equal(found[0], expected)


@pytest.mark.parametrize("name", ["tree", "differential", "int8"])
def test_a_thread_may_meet_a_schedule_half_made(name):
    """A first call stops at each line of it in turn; another thread's call goes by what is made so far."""
    files = {schedule.__file__, cpu_blocks.__file__}
    (*tensors, batch, more), (*others, _, more_of_other) = (lay_out(name, seed=seed) for seed in range(2))
    options = AttentionOptions(**OPTIONS)

    def attend(*tensors, **more):
        with fastattn.use_kernel("cpu"):  # the kernel cpu has schedules
            return PATHS[name].attention(*tensors, options=options, **more)

    first, other = partial(attend, *tensors, **more), partial(attend, *others, **more_of_other)
    expected = [call(plan=plan_of(name, batch)) for call in (first, other)]

    def answers_if_stopped(at, plan, threads):
        """Run the other call before the line with this number; return None if there are fewer."""
        lines, found = set(), []

        def trace(frame, event, _):
            if frame.f_code.co_filename not in files:
                return None
            line = frame.f_code, frame.f_lineno
            if event == "line" and line not in lines:
                lines.add(line)
                if len(lines) == at:
                    found.append(threads.submit(other, plan=plan).result())
            return trace

        before = sys.gettrace()
        sys.settrace(trace)
        try:
            return [first(plan=plan), *found]
        finally:
            sys.settrace(before)

    with ThreadPoolExecutor(1) as threads:
        for at in itertools.count(1):
            answers = answers_if_stopped(at, plan_of(name, batch), threads)
            for answer, right in zip(answers, expected, strict=False):
                assert torch.equal(answer, right), at
            if len(answers) == 1:
                break
    assert at > 30  # lines that were stopped at, and one


def test_another_plan_begins_without_a_memo():
    *tensors, batch, _ = lay_out("chunked_prefill")
    plan = plan_of("chunked_prefill", batch)
    chunked_prefill.attention(*tensors, plan)
    assert memo_of(plan).bound and not memo_of(replace(plan, causal=False)).bound
    assert "memo" not in {field.name for field in fields(plan)}


def test_out_of_memory_in_a_replay_ends_as_in_a_first_call():
    *tensors, batch, _ = lay_out("chunked_prefill")
    plan = plan_of("chunked_prefill", batch)
    answer = chunked_prefill.attention(*tensors, plan)
    (key,) = memo_of(plan).bound
    run = mock.Mock(side_effect=torch.OutOfMemoryError)
    memo_of(plan).bound[key] = Bound("cpu", run)
    assert torch.equal(chunked_prefill.attention(*tensors, plan), answer)
    run.assert_called_once()


def test_nothing_is_replayed_for_a_gpu_that_is_not_the_current_one(monkeypatch):
    """A launch goes to the current GPU; the long way makes that of the tensors the current one."""
    tensor = mock.Mock(spec=torch.Tensor, device=torch.device("cuda", 1), dtype=torch.half, shape=(1, 2, 3))
    tensor.data_ptr.return_value, tensor.stride.return_value = 16, (6, 3, 1)
    tensor.is_neg.return_value = False
    plan = plan_of("chunked_prefill", lay_out("chunked_prefill")[3])
    monkeypatch.setattr(dispatch, "Tensor", type(tensor))
    for current in (0, 1):
        monkeypatch.setattr(torch.cuda, "current_device", lambda current=current: current)
        key = dispatch.key_of(None, tensor, Pages(tensor, tensor), plan, AttentionOptions(), None, False, {})
        assert (key is not None) == (current == 1)


# --- launches by address ---


class ByAddress:
    """A launch as the driver makes it, of addresses, in the interpreter."""

    def __init__(self, launch):
        self.launch, self.calls = launch, 0

    def __call__(self, *arguments):
        def at(x, dtype):
            memory = (ctypes.c_char * dtype.itemsize).from_address(x)
            return torch.frombuffer(memory, dtype=dtype)  # the memory from its first element on: kernels take no size

        self.calls += 1
        given = [
            at(x, dtype) if type(x) is int and dtype is not None else x
            for x, dtype in zip(arguments, self.launch._types, strict=True)
        ]
        packed, self.launch._packed = self.launch._packed, None
        self.launch.replay(*given)
        self.launch._packed = packed


OF_OUR_KERNEL = (
    *("chunked_prefill", "cascade", "tree", "latents", "fp8 latents", "differential", "e4m3", "int8", "int8 cascade"),
)


@pytest.mark.parametrize(
    ("name", "lse_and_splits", "sinks"),
    [
        *every_pair(OF_OUR_KERNEL, [(False, 1), (True, 3)], [None, (1.0, -2.0, 3.0, 0.0)]),
        *((name, (False, 3), None) for name in ("chunked_prefill", "differential", "int8 cascade")),
    ],
    ids=str,
)
def test_partial_outputs_in_one_allocation_are_found_by_their_addresses(name, lse_and_splits, sinks):
    attention = pytest.importorskip("fastattn.kernels.triton.attention", reason="needs Triton")
    from fastattn.kernels.triton import differential, launch

    if not launch.INTERPRETED:
        pytest.skip("launches by the driver, on a GPU, find them so")
    *tensors, batch, more = lay_out(name)
    *others, _, other_more = lay_out(name, seed=1)
    return_lse, splits = lse_and_splits
    options = AttentionOptions(**OPTIONS, sinks=None if sinks is None else torch.tensor(sinks))
    module = differential if name == "differential" else attention
    tune, call = module.tune, PATHS[name].attention
    split = mock.patch.object(
        module, "tune", lambda *a: tune(*a)._replace(splits=splits, most_splits=splits, block_n=16)
    )
    launched = []

    def note(*arguments):
        launched.append(launch.Launch(*arguments))
        return launched[-1]

    with fastattn.use_kernel("triton"), split:
        plan = plan_of(name, batch)
        launched.clear()
        with mock.patch.object(module, "Launch", note):
            call(*tensors, plan, options, return_lse=return_lse, **more)
        num_levels = len(plan.levels) if "cascade" in name else 1
        assert len(launched) == (num_levels + 1 if splits * num_levels > 1 else 1)
        for made in launched:
            made._packed = ByAddress(made)
        anew = call(*others, plan_of(name, batch), options, return_lse=return_lse, **other_more)
        replayed = call(*others, plan, options, return_lse=return_lse, **other_more)
        assert all(made._packed.calls == 1 for made in launched)
        assert all(map(torch.equal, replayed, anew)) if return_lse else torch.equal(replayed, anew)


ON_A_CPU = {  # lengths, options, size of values, and whether ATen is called without anything around it
    "lengths differ": ((40, 33, 48), {}, 32, True),
    "whole blocks": ((32, 32), dict(softmax_scale=0.3), 32, True),
    "a window": ((40, 64), {}, 32, True),
    "one key": ((1, 1), {}, 32, False),
    "in parts": ((90,), {}, 32, False),
    "lengths far apart": ((90, 7), {}, 32, False),
    "values of another size": ((40, 33), {}, 16, False),
    "a row of padding": ((40, 33), {}, 32, False),
    "sinks": ((40, 33), dict(sinks=torch.linspace(-1.0, 1.0, 4)), 32, False),
    "slopes": ((40, 33), dict(alibi_slopes=torch.linspace(0.1, 1.0, 4)), 32, False),
    "softcap": ((40, 33), dict(softcap=2.0), 32, False),
    "no scale": ((40, 33), dict(softmax_scale=0.0), 32, False),
    "negative scale": ((40, 33), dict(softmax_scale=-0.3), 32, False),
    "invariant": ((40, 33), dict(batch_invariant=True), 32, False),
}


@pytest.mark.parametrize("return_lse", [False, True], ids=["out", "lse"])
@pytest.mark.parametrize("name", ON_A_CPU)
def test_decodes_on_a_cpu_are_replayed_with_the_tensors_of_another_layer(name, return_lse, monkeypatch):
    if "parts" in name:
        monkeypatch.setattr("fastattn.kernels.cpu.attention.BUFFER", 2 * 16 * 2 * 32)  # room for two blocks
    lens, given, value_size, is_one_call = ON_A_CPU[name]
    torch.manual_seed(0)
    rows, columns = len(lens) + ("padding" in name), -(-max(lens) // 16)
    layers = [
        [torch.randn(rows, 4, 32), torch.randn(20, 16, 2, 32), torch.randn(20, 16, 2, value_size)] for _ in range(2)
    ]
    tables = torch.randperm(20)[: columns * len(lens)].view(-1, columns).tolist()
    batch, path = metadata.make_batch([1] * len(lens), lens, tables), chunked_prefill
    arguments = dict(block_size=16)
    if "window" in name:
        path, arguments = sliding_window, dict(window_size=(20, 0), block_size=16)
    for _, *pools in layers:  # blocks that no sequence owns, and slots past the last key
        for pool in pools:
            pool[[i for i in range(20) if i not in sum(tables, [])]] = torch.nan
            for seq_len, blocks in zip(lens, tables, strict=True):
                if seq_len % 16:
                    pool[blocks[seq_len // 16], seq_len % 16 :] = torch.nan
    layers[1][1][tables[0][0], 0] = torch.nan if "key" in name else 0.0  # that is seen
    options = AttentionOptions(**given)
    plan = path.plan(batch, **arguments)
    path.attention(*layers[0], plan, options, return_lse=return_lse)
    anew = path.attention(*layers[1], path.plan(batch, **arguments), options, return_lse=return_lse)
    asked = AssertionError("the pieces were asked for")
    with mock.patch("fastattn.kernels.cpu.attention._pieces", side_effect=asked) if is_one_call else nullcontext():
        replayed = path.attention(*layers[1], plan, options, return_lse=return_lse)
    anew, replayed = ((x if return_lse else (x,)) for x in (anew, replayed))
    assert all(torch.equal(x.nan_to_num(9e9), y.nan_to_num(9e9)) for x, y in zip(replayed, anew, strict=True))
    assert replayed[0][1:].isfinite().all() and replayed[0][0].isnan().any() == ("key" in name)


# --- writes ---


def of_write(device, seed=0):
    torch.manual_seed(seed)
    key, value = torch.randn(6, 2, 8, device=device), torch.randn(6, 2, 24, device=device)
    pools = torch.zeros(5, 4, 2, 8, device=device), torch.zeros(5, 4, 2, 24, device=device)
    return [key, value, *pools, torch.tensor([7, -1, 0, 19, 4], device=device)]


@torch.no_grad()
def test_a_write_is_replayed_with_other_tensors(device):
    """Where gradients are recorded, none is on a CPU."""
    cache = pytest.importorskip("fastattn.kernels.triton.cache", reason="needs Triton")
    key, value, *pools_and_slots = of_write(device)
    replayed = cache.write(key[:5], value[:5], *pools_and_slots)
    kv_cache.write(*of_write(device))
    for seed in (1, 2, 3):
        arguments, by_launch, expected = (of_write(device, seed) for _ in range(3))
        refattn.kv_cache.write(*expected)
        replayed(*by_launch)
        with nothing_is_chosen():
            kv_cache.write(*arguments)
        for pool in (2, 3):
            assert torch.equal(arguments[pool], expected[pool])
            assert torch.equal(by_launch[pool], expected[pool])


def test_writes_with_one_cache_key_are_alike():
    """All that is checked and launched by is in the key, but for what the tensors hold."""
    good = of_write("meta")
    named = replay.key_of_write(None, *good)
    assert named == replay.key_of_write(None, *of_write("meta"))
    assert replay.key_of_write(None, *of_write("cpu")) is None
    with torch.no_grad():
        assert replay.key_of_write(None, *of_write("cpu")) not in (None, named)
    assert replay.key_of_write("triton", *good) not in (None, named)
    for i, x in enumerate(good):
        for other in (*changed(torch.empty_like(x, device="meta")), torch.empty_like(x, device="cpu")):
            layouts = [(y.device, y.dtype, y.shape, y.stride(), y.requires_grad) for y in (other, x)]
            if layouts[0] != layouts[1]:
                assert replay.key_of_write(None, *good[:i], other, *good[i + 1 :]) != named
        unaligned = torch.empty(x.numel() + 1, dtype=x.dtype, device="meta")[1:].view(x.shape)
        assert replay.key_of_write(None, *good[:i], unaligned, *good[i + 1 :]) == (named if i == 4 else None)
        for bad in (None, [1], "key", torch.nn.Parameter(x.float())):
            assert replay.key_of_write(None, *good[:i], bad, *good[i + 1 :]) is None


@pytest.mark.usefixtures("shapes_unchecked")
@torch.no_grad()
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
