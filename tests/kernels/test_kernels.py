"""The choice of a kernel, what each refuses, and the adapters of those that only a GPU has, over doubles of them."""

import ast
import importlib
import inspect
import pkgutil
import re
import sys
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from unittest import mock

import pytest
import torch
from einops import einsum, repeat

import fastattn
import fastattn.chunked_prefill
import fastattn.differential
import fastattn.kernels
import fastattn.kv_cache
import fastattn.local
import fastattn.merge
import fastattn.metadata
import fastattn.sliding_window
import fastattn.varlen
import refattn.chunked_prefill
import refattn.differential
import refattn.metadata
import refattn.varlen
from fastattn import dispatch
from fastattn.kernels import Problem, cpu, order, problem, triton
from fastattn.kernels import device as devices
from fastattn.kernels.flash import fa2, fa3, fa4, flash_mla
from fastattn.kernels.flash import recompute as gpu_repair
from fastattn.kernels.problem import Subtraction
from fastattn.kernels.triton import attention as triton_attention
from fastattn.kernels.triton import cache as triton_cache
from fastattn.kernels.triton import differential as triton_differential
from fastattn.kernels.triton import merge as triton_merge
from fastattn.kernels.triton import metadata as triton_metadata
from refattn.keys import Pages, Pairs, Rows
from refattn.options import AttentionOptions
from refattn.plan import CascadePlan, Plan
from tests.helpers.batches import Case, build, plan_and_attend
from tests.helpers.kernels_present import PRESENT, Kernel, each_kernel, has_to_compute
from tests.helpers.options import given, per_head
from tests.helpers.tolerance import assert_matches_reference, assert_twins_agree
from tests.helpers.twin_files import SHARED

ON_GPU = Problem(
    operation="attend",
    device=torch.device("cuda"),
    dtype=torch.bfloat16,
    keys="rows",
    num_heads=4,
    num_kv_heads=2,
    head_size=64,
    value_head_size=64,
    block_size=None,
    max_query_len=100,
    max_seq_len=200,
    num_seqs=2,
    window=(-1, 0),
)
by_pages, by_rows = partial(plan_and_attend, refattn.chunked_prefill), partial(plan_and_attend, refattn.varlen)


@pytest.fixture
def hopper(monkeypatch):
    """Pretend that there is a Hopper with all packages, for code that only asks."""
    for module in (triton, fa4, fa3, flash_mla, fa2):
        monkeypatch.setattr(module, "capability", lambda device: (9, 0))
        monkeypatch.setattr(module, "cannot_import", lambda name, package, *names: None, raising=False)
    monkeypatch.setattr(order, "num_sms", lambda device: 132)
    monkeypatch.setattr(order, "capability", lambda device: (9, 0))
    monkeypatch.setattr(fa2, "_refusal", lambda *asked: None)
    for module in (fa3, flash_mla):
        monkeypatch.setattr(module, "_cannot_load", lambda: None)
    monkeypatch.setattr(fa3, "_refusal", lambda *asked, **options: None)


# --- the choice ---


@pytest.mark.core
@pytest.mark.covers("B58")
@pytest.mark.usefixtures("hopper")
def test_no_package_is_given_the_root_of_the_distance():
    """Only flash-attn takes slopes at all, and it multiplies the distance itself."""
    slopes = ON_GPU._replace(keys="rows", block_size=None, alibi=True)
    assert order.unsupported_reason("fa2", slopes) is None
    for name in ("fa2", "fa3", "fa4", "torch_flash"):
        reason = order.unsupported_reason(name, slopes._replace(alibi_sqrt=True))
        assert reason is not None and re.search("ALiBi|distance", reason), f"{name}: {reason}"


def test_a_kernel_is_asked_for_inside_its_block_only(monkeypatch):
    monkeypatch.setattr(order, "unsupported_reason", lambda name, problem: None)

    def asked():
        problem = ON_GPU._replace(device=torch.device("cpu"), dtype=torch.float16)
        return order.choose(problem).name

    assert asked() == "native"
    with fastattn.use_kernel("triton"):
        assert asked() == "triton"
        with fastattn.use_kernel("cpu"):
            assert asked() == "cpu"
        assert asked() == "triton"
        with pytest.raises(KeyError), fastattn.use_kernel("cpu"):
            raise KeyError
        assert asked() == "triton"
        with (
            pytest.raises(ValueError, match="name: expected one of native, cpu, torch, triton, .*, got 'fa5'"),
            fastattn.use_kernel("fa5"),
        ):
            pass
        assert asked() == "triton"
    assert asked() == "native"


def of_kernels(monkeypatch, names, **described):
    """Replace the kernels by these, in this order: each with a reason or None, and functions besides `attend`."""
    kernels = {}
    for name, (reason, *operations) in described.items():
        functions = {operation: f"kernels.{name}:{operation}" for operation in operations}
        kernels[name] = fastattn.kernels.kernel.Kernel(
            name, lambda problem, reason=reason: reason, ("rows", "pages"), functions, cpu.KERNEL.knows
        )
    monkeypatch.setattr(order, "NAMES", tuple(described))
    monkeypatch.setattr(order, "MODULES", {name: f"kernels.{name}" for name in described})
    monkeypatch.setattr(order, "load", kernels.__getitem__)
    monkeypatch.setattr(order, "priorities", lambda problem: tuple(names))


@pytest.mark.covers("A14")
@pytest.mark.parametrize(
    ("names", "described", "chosen"),
    [
        ("abc", dict(a=["no"], b=[None], c=[None]), "b"),
        ("bca", dict(a=[None], b=["no"], c=[None]), "c"),
        ("bca", dict(a=[None], b=["no"], c=["no"]), "a"),
        ("cba", dict(a=[None], b=[None], c=[None]), "c"),
    ],
    ids=["first-that-can", "of-those-that-go-first", "last-resort", "not-in-the-order-of-names"],
)
def test_which_kernel_is_chosen(names, described, chosen, monkeypatch):
    of_kernels(monkeypatch, names, **described)
    assert order.choose(ON_GPU).name == chosen
    assert order.explain(ON_GPU).splitlines()[-1] == f"chosen: {chosen}"


@pytest.mark.parametrize(
    ("names", "described", "asked", "fused", "chosen"),
    [
        ("ab", dict(a=[None], b=[None, "differential"]), None, "b", "a"),
        ("ba", dict(a=[None], b=[None, "differential"]), None, "b", "b"),
        ("ab", dict(a=[None], b=["no", "differential"]), None, None, "a"),
        ("bca", dict(a=[None], b=[None], c=["no", "differential"]), None, None, "b"),
        ("ab", dict(a=[None], b=[None]), None, None, "a"),
        ("ab", dict(a=[None], b=[None, "differential"]), "a", None, "a"),
        ("ab", dict(a=[None, "differential"], b=[None, "differential"]), "b", "b", "b"),
    ],
    ids=[
        *("function-goes-first", "function-of-the-first", "function-refused", "then-the-first-that-can"),
        *("no-kernel-has-the-function", "asked-for-without-the-function", "asked-for-with-the-function"),
    ],
)
def test_who_subtracts(names, described, asked, fused, chosen, monkeypatch):
    """A kernel that has the whole operation goes before all that would be called four times."""
    of_kernels(monkeypatch, names, **described)
    kernel = order.choose_fused(ON_GPU._replace(operation="differential", keys="pages"), asked)
    assert (kernel and kernel.name) == fused
    assert order._choose(ON_GPU, asked).name == chosen


def test_no_kernel_can(monkeypatch):
    of_kernels(monkeypatch, "ab", a=["has no time"], b=["has no mind"])
    with pytest.raises(NotImplementedError, match="no kernel computes attention to rows: a: has no time; b: has no"):
        order.choose(ON_GPU)
    assert order.explain(ON_GPU).splitlines()[:2] == ["a: has no time", "b: has no mind"]
    with fastattn.use_kernel("b"), pytest.raises(NotImplementedError, match="attention to rows: b: has no mind$"):
        order.choose(ON_GPU)
    assert (
        order.explain(ON_GPU._replace(operation="merge")).splitlines()[0] == "a: does not compute the operation merge"
    )


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("operation", ["recurrent", "convolve", "score_index"])
def test_nothing_that_waits_for_a_gpu_takes_the_place_of_a_kernel(operation):
    """Plain torch reads lengths on the host: of what our kernel refuses there, it is not the next choice."""
    on_gpu = Problem(operation, torch.device("cuda"), torch.float64)
    with pytest.raises(NotImplementedError, match=f"the operation {operation}: triton: .*; torch: reads the lengths"):
        order.choose(on_gpu)
    assert order.choose(on_gpu._replace(dtype=torch.bfloat16)).name == "triton"
    assert order.choose(on_gpu._replace(device=torch.device("cpu"))).name == "torch"


@pytest.mark.usefixtures("hopper")
def test_what_a_kernel_lacks_is_chosen_as_ever():
    """FlashAttention writes no cache and makes no table; over pairs of heads it is called four times."""
    with fastattn.use_kernel("flash_mla"):
        assert order.choose(ON_GPU).name == order.priorities(ON_GPU)[0], "it has latents alone"
    for name in ("fa4", "fa3", "fa2", "torch_flash"):
        with fastattn.use_kernel(name):
            assert order.choose(ON_GPU).name == name
            for operation in ("merge", "write", "copy_blocks", "slot_mapping", "trim", "cut_chunks"):
                moved = Problem(operation, torch.device("cuda"), torch.float32)
                assert order.choose(moved).name == "triton"
                assert order.explain(moved).splitlines()[-1] == "chosen: triton"
            sinks = Problem("add_sinks", torch.device("cuda"), torch.float32)
            assert order.choose(sinks).name == "torch"
    decodes = ON_GPU._replace(keys="pages", block_size=256, max_query_len=1)
    differential = decodes._replace(operation="differential")
    for name in ("fa4", "fa3", "fa2"):
        assert order.choose_fused(differential, name) is None
        assert order._choose(decodes, name).name == name
    assert order.choose_fused(differential, None) is triton.KERNEL
    assert order.choose_fused(differential, "triton") is triton.KERNEL


@pytest.mark.parametrize("name", order.NAMES)
def test_a_kernel_has_the_operations_that_it_names(name):
    """As functions, and still so when every file of its folder has been imported under a name of its own."""
    module, kernel = importlib.import_module(order.MODULES[name].partition(":")[0]), order.load(name)
    for file in pkgutil.iter_modules(getattr(module, "__path__", []), f"{module.__name__}."):
        importlib.import_module(file.name)
    for function in kernel.functions:
        assert inspect.isfunction(getattr(kernel, function)), function
    assert ("attend" in kernel.functions) == bool(kernel.attends)
    assert {*kernel.trees, *kernel.levels} <= {*kernel.attends} <= {*problem.STORAGES.values()}
    assert kernel.name == name


QUANTIZED = ON_GPU._replace(
    keys="quantized",
    num_heads=32,
    num_kv_heads=8,
    head_size=128,
    value_head_size=128,
    block_size=16,
    max_query_len=8192,
    max_seq_len=8192,
    num_tokens=2 * 8192,
    stored=(torch.float8_e4m3fn, torch.float8_e4m3fn),
)
DECODES = dict(max_query_len=1, num_tokens=2)


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize(
    ("chosen", "change"),
    [
        ("fa4", {}),
        ("fa4", dict(stored=(torch.int8, torch.bfloat16), rounds_query=True)),
        ("fa4", dict(aligned=False, rounds_query=True)),
        ("fa4", dict(max_query_len=1024, num_tokens=2048, max_seq_len=2047, window=(1023, 0))),
        ("triton", dict(max_query_len=1024, num_tokens=2048, max_seq_len=65536, window=(1023, 0))),
        ("triton", DECODES),
        ("triton", dict(num_seqs=65, num_tokens=8192 + 64)),
        ("triton", dict(num_seqs=65, num_tokens=65 * 8192)),
        ("triton", dict(max_query_len=200, num_tokens=400, max_seq_len=200)),
        ("triton", dict(batch_invariant=True)),
        ("triton", dict(stored=(torch.int8, torch.float16), rounds_query=True)),
        ("triton", dict(aligned=False)),
        ("triton", dict(positions=True)),
        ("triton", dict(alibi=True)),
        ("triton", dict(dtype=torch.float32)),
    ],
    ids=[
        *("prompts", "numbers-for-values", "rounded-queries", "window", "window-in-many-keys", "decodes"),
        *("decodes-beside-a-prompt", "many-prompts", "few-operations", "batch-invariant", "other-numbers"),
        *("not-aligned", "positions", "alibi", "float32"),
    ],
)
def test_quantized_values_are_expanded_where_a_key_meets_many_queries(chosen, change):
    problem = QUANTIZED._replace(**change)
    assert order.choose(problem).name == chosen
    assert order.explain(problem).splitlines()[-1] == f"chosen: {chosen}"


@pytest.mark.usefixtures("hopper")
def test_quantized_values_are_expanded_or_refused_where_it_is_asked_for():
    for name in ("fa4", "fa3"):
        module = order.load(name)
        with fastattn.use_kernel(name):
            assert order.choose(QUANTIZED) is module is order.choose(QUANTIZED._replace(**DECODES))
            for reason, change in (
                ("at most 512 MiB of them, not 2080", dict(num_seqs=65)),
                (
                    "values of the type of the keys or of the queries, .*bfloat16, not .*float16",
                    dict(stored=(torch.int8, torch.float16)),
                ),
                ("ALiBi", dict(alibi=True)),
                ("take triton", dict(batch_invariant=True)),
            ):
                with pytest.raises(NotImplementedError, match=f"quantized pages: {name}: .*{reason}"):
                    order.choose(QUANTIZED._replace(**change))
    for name in ("fa2", "torch_flash", "flash_mla"):
        assert order.unsupported_reason(name, QUANTIZED) == "does not compute attention to quantized pages"


# --- what goes with attention ---


def tokens_and_slots(device):
    """Lay out new tokens, their pools, and the slot of each, with padding."""
    generator = torch.Generator().manual_seed(2)
    key, value = (torch.randn(7, 2, 24, generator=generator).to(device) for _ in range(2))
    slots = torch.tensor([3, -1, 17, 0, 22, 5, -1], device=device)
    return key, value, *fastattn.kv_cache.allocate(3, 8, 2, 24, device=device), slots


def write(device):
    key, value, *pools, slots = tokens_and_slots(device)
    fastattn.kv_cache.write(key, value, *pools, slots)
    return pools


def copy_blocks(device):
    generator = torch.Generator().manual_seed(3)
    pool = torch.randn(5, 8, 2, 24, generator=generator).to(device)
    fastattn.kv_cache.copy_blocks([pool], torch.tensor([[0, 3], [3, 1]], device=device))
    return [pool]


def merge(device):
    """Where one part has seen all that there is, its weight is 1 and nothing is rounded."""
    generator = torch.Generator().manual_seed(4)
    outs = [torch.randn(6, 4, 24, generator=generator).to(device) for _ in range(2)]
    lses = [torch.randn(6, 4, generator=generator).to(device) for _ in range(2)]
    for part in range(2):
        lses[part][part::2], outs[part][part::2] = -torch.inf, torch.nan
    return fastattn.merge.merge(outs, lses)


TABLES = Case("tables", ((4, 60), (1, 17), (0, 5), (30, 30), (5, 2)), padding_rows=3)


def slot_mapping(device):
    return [fastattn.metadata.slot_mapping(build(TABLES, device=device).batch, 43, block_size=16)]


def planned(plan):
    batch = plan.batch
    return [batch.cu_seqlens_q, batch.seq_lens, batch.block_table, plan.first_keys]


def trim(device):
    return planned(fastattn.sliding_window.plan(build(TABLES, device=device).batch, window_size=(20, 0), block_size=16))


def cut_chunks(device):
    return planned(fastattn.local.plan(build(TABLES, device=device).batch, chunk_size=32, block_size=16))


BESIDE_ATTENTION = {
    write: (triton_cache, "write"),
    copy_blocks: (triton_cache, "copy_blocks"),
    merge: (triton_merge, "merge"),
    slot_mapping: (triton_metadata, "slot_mapping"),
    trim: (triton_metadata, "trim"),
    cut_chunks: (triton_metadata, "cut_chunks"),
}


@pytest.mark.parametrize("call", BESIDE_ATTENTION, ids=lambda call: call.__name__)
@pytest.mark.parametrize("asked", [None, *order.NAMES])
def test_what_runs_is_what_the_choice_says(asked, call, device):
    """The launch itself is watched, and the same problem explained."""
    module, program = BESIDE_ATTENTION[call]
    problems, choose = [], order.choose

    def note(problem):
        problems.append(problem)
        return choose(problem)

    with (
        mock.patch.object(order, "choose", note),
        mock.patch.object(module, program, wraps=getattr(module, program)) as launch,
        fastattn.use_kernel(asked or "cpu"),  # the kernel cpu has none of these operations
    ):
        answer = call(device)
        (problem,) = [problem for problem in problems if problem.operation == call.__name__]
        chosen = order.explain(problem).splitlines()[-1]
    expected = asked if asked in ("torch", "triton") else "torch" if device == "cpu" else "triton"
    assert chosen == f"chosen: {expected}"
    assert launch.called == (expected == "triton")
    with fastattn.use_kernel("torch"):
        by_torch = call(device)
    for one, other in zip(answer, by_torch, strict=True):
        assert torch.equal(one, other)


# --- where answers go ---


def in_two_levels(inputs, case):
    """Split a batch of decodes after its first 32 keys, which none of them shares."""
    batch = inputs.batch
    above = replace(batch, seq_lens=torch.full_like(batch.seq_lens, 32), block_table=batch.block_table[:, :2])
    below = replace(batch, seq_lens=batch.seq_lens - 32, block_table=batch.block_table[:, 2:])
    p = case.block_size
    return CascadePlan(
        batch, (Plan(above, p, causal=False), Plan(below, p, first_keys=torch.full_like(batch.seq_lens, 32)))
    )


@pytest.mark.covers("A16")
@each_kernel
@pytest.mark.parametrize("layout", ["side-by-side", "with-gaps"])
@pytest.mark.parametrize("way", ["varlen", "paged", "levels", "differential"])
def test_memory_that_is_given_is_written(way, layout, kernel, device):
    case = Case("given", ((1, 40), (1, 70), (1, 33)), heads=(4, 2), block_size=16, padding_rows=2)
    inputs = build(case, device=device, dtype=kernel.dtypes[-1] if kernel.name == "triton" else kernel.dtypes[0])
    function, more = dispatch.compute, {}
    if way == "varlen":
        query, key, value, *others = given(*inputs.rows)
        asked = query, Rows(key, value), *others
    elif way == "differential":
        _, tensors = in_pairs(case.lens, device, inputs.query.dtype)
        query, cache, *others = given(*tensors)
        asked = query, Pairs(cache), *others
        more = dict(lambda_full=torch.tensor(0.35, device=device), lambda_init=0.2, norm_weight=None, norm_eps=1e-5)
    else:
        query, *pools = inputs.tensors[:3]
        plan = in_two_levels(inputs, case) if way == "levels" else given(*inputs.tensors)[3]
        asked = query, Pages(*pools), plan, AttentionOptions()

    def hold():
        expected, expected_lse = function(*asked, **more)
        memory = torch.full_like(torch.cat([expected, expected], dim=-1), torch.nan)
        memory = memory[..., : expected.shape[-1]] if layout == "with-gaps" else torch.full_like(expected, torch.nan)
        out, lse = function(*asked, memory, **more)
        assert out is memory
        assert torch.equal(memory, expected) and torch.equal(lse, expected_lse)

    with kernel.forced():
        kernel.check(hold)


@pytest.mark.parametrize("way", ["whole", "splits"])
def test_our_kernel_writes_where_it_is_told_to(way, device, monkeypatch):
    """Without a copy: the launch itself has the memory."""
    inputs = build(Case("c", ((1, 70), (5, 40)), heads=(2, 1), padding_rows=1), device=device)
    splits = 1 if way == "whole" else 3
    chosen = triton_attention.tune

    def attend_here(query, key, value, plan, options, out=None):
        return triton_attention.attend_levels(query, key, value, [plan], options, out)[:2]

    monkeypatch.setattr(
        triton_attention, "tune", lambda *asked: chosen(*asked)._replace(splits=splits, most_splits=splits, block_n=16)
    )
    expected, expected_lse = attend_here(*given(*inputs.tensors))
    memory = torch.full_like(expected, torch.nan)
    out, lse = attend_here(*given(*inputs.tensors), memory)
    assert out is memory and torch.equal(out, expected) and torch.equal(lse, expected_lse)
    _, (query, cache, batch) = in_pairs(((3, 70), (1, 40)), device)
    tuning = triton_differential.LaunchConfig(16, 16, 4, 2, splits, splits)
    monkeypatch.setattr(triton_differential, "tune", lambda *asked: tuning)
    asked = *given(query, cache, batch), Subtraction(torch.tensor(0.35, device=device), None, 1e-5, 0.8)
    expected, _ = triton_differential.differential(*asked)
    memory = torch.full_like(query, torch.nan)
    out, _ = triton_differential.differential(*asked, memory)
    assert out is memory and torch.equal(out, expected)


# --- who may import whom ---


SHARED_MODULES = tuple(f"refattn.{name}" for name in SHARED)
MAY_IMPORT = {
    "cpu": {
        "fastattn.kernels.torch_ops.merge",
        "fastattn.kernels.torch_ops.quantized",
        "fastattn.kernels.torch_ops.four_bits",
    },
    "native": {"fastattn.kernels.torch_ops.quantized"},
    "torch_ops": set(),
    "triton": set(),
    "flash": {"fastattn.kernels.triton"},
}


def imported_by(file: Path) -> set[str]:
    """Name all that a file of ours imports from our packages, with the names that it takes from a module."""
    names = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, "a relative import"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
    return {name for name in names if name.partition(".")[0] in ("fastattn", "refattn")}


@pytest.mark.parametrize("folder", MAY_IMPORT)
def test_a_kernel_imports_no_other_kernel(folder):
    """Beside its own folder: what a problem is, what the device is, what both twins take; and not the chooser."""
    root = Path(fastattn.kernels.__file__).parent
    files = sorted((root / folder).rglob("*.py"))
    assert len(files) >= 3
    shared = (
        "fastattn.kernels.kernel",
        "fastattn.kernels.problem",
        "fastattn.kernels.replay",
        "fastattn.kernels.schedule",
        "fastattn.kernels.device",
        *SHARED_MODULES,
    )
    always = (*shared, f"fastattn.kernels.{folder}")
    for file in files:
        for name in imported_by(file):
            allowed = any(f"{name}.".startswith(f"{module}.") for module in (*always, *MAY_IMPORT[folder]))
            assert allowed, f"{file.relative_to(root)} imports {name}"


def test_what_all_kernels_share_imports_no_kernel():
    root = Path(fastattn.kernels.__file__).parent
    may = {
        "problem.py": (*SHARED_MODULES, "fastattn.kernels.replay"),
        "memory.py": SHARED_MODULES,
        "replay.py": (*SHARED_MODULES, "fastattn.kernels.memory"),
        "schedule.py": (*SHARED_MODULES, "fastattn.kernels.replay"),
        "device.py": (),
        "kernel.py": (*SHARED_MODULES, "fastattn.kernels.problem"),
        "pairs.py": (*SHARED_MODULES, "fastattn.kernels.problem", "fastattn.kernels.replay"),
        "order.py": ("fastattn.kernels.device", "fastattn.kernels.kernel", "fastattn.kernels.problem"),
        "__init__.py": ("fastattn.kernels.problem", "fastattn.kernels.order"),
    }
    assert {file.name for file in root.glob("*.py")} == set(may)
    for file, modules in may.items():
        for name in imported_by(root / file):
            assert any(f"{name}.".startswith(f"{module}.") for module in modules), f"{file} imports {name}"


# --- differential attention ---


def in_pairs(lens, device, dtype=torch.float32):
    """Lay out queries and a cache of two halves."""
    case = Case("pairs", lens, heads=(8, 4), head_size=24, padding_rows=2)
    inputs = build(case, device=device, dtype=dtype)
    halves = [torch.stack([x[:, :, half::2] for x in (inputs.key_cache, inputs.value_cache)]) for half in (0, 1)]
    return case, (inputs.query, torch.stack(halves), inputs.batch)


@pytest.mark.parametrize(
    "asked", [dict(), dict(softcap=3.0, window_size=(9, 0), alibi_slopes=True, sinks=True)], ids=len
)
def test_differential_by_a_kernel_that_has_only_attention(asked, monkeypatch):
    """By four calls: each half of the heads with its own slopes and sinks, over the values of both halves."""
    case, arguments = in_pairs(((5, 30), (1, 40), (3, 2)), "cpu")
    functions = {"attend": cpu.KERNEL.functions["attend"]}
    only_attention = fastattn.kernels.kernel.Kernel(
        "only_attention", cpu.unsupported_reason, ("rows", "pages"), functions, cpu.KERNEL.knows
    )
    monkeypatch.setattr(cpu, "attend", mock.Mock(wraps=cpu.attend))
    monkeypatch.setattr(order, "load", lambda name: only_attention)
    options = dict(lambda_full=torch.tensor(0.35), lambda_init=0.2, norm_weight=torch.linspace(0.5, 2.0, 48))
    assert_twins_agree("differential", *arguments, **options, **per_head(asked, case, "cpu"))
    assert cpu.attend.call_count == 3 * 4


# --- the differential kernel of ours ---


def subtracted(query, cache, plan, options, **subtraction):
    """Compute differential attention without the checks of its path."""
    return dispatch.compute(query, Pairs(cache), plan, options, norm_weight=None, norm_eps=1e-5, **subtraction)


@pytest.mark.parametrize("splits", [1, 3, 20])
@pytest.mark.parametrize("asked", ["sinks", "window-and-slopes"])
def test_a_split_differential_of_an_odd_head_size(splits, asked, device, monkeypatch):
    """Parts of more splits than are merged at a time, some without keys, and columns that no value has."""
    tuning = triton_differential.LaunchConfig(16, 16, 4, 2, splits, splits)
    monkeypatch.setattr(triton_differential, "tune", lambda *_: tuning)
    case, (query, cache, batch) = in_pairs(((3, 70), (1, 331), (0, 5), (3, 2)), device)
    arguments = query, cache, with_strided_table(batch)
    options = dict(sinks=True) if asked == "sinks" else dict(causal=False, window_size=(40, 3), alibi_slopes=True)
    learned = dict(lambda_full=torch.tensor(0.35, device=device), lambda_init=0.2)
    weight = torch.linspace(0.5, 2.0, 96, device=device)[::2]  # with a stride
    options = per_head(options, case, device) | learned | dict(norm_weight=weight)
    with fastattn.use_kernel("triton"):
        out, lse = plan_and_attend(fastattn.differential, *arguments, **options, return_lse=True)
    assert_matches_reference(out, lse, partial(plan_and_attend, refattn.differential), *arguments, **options)


@pytest.mark.parametrize("splits", [1, 3])
def test_differential_reads_nothing_that_no_query_may_see(splits, device, monkeypatch):
    tuning = triton_differential.LaunchConfig(16, 16, 4, 2, splits, splits)
    monkeypatch.setattr(triton_differential, "tune", lambda *_: tuning)
    _, (query, cache, batch) = in_pairs(((2, 70), (1, 41)), device)
    subtraction = dict(lambda_full=torch.tensor(0.35, device=device), lambda_init=0.2)
    answers = []
    for what in (0.0, torch.nan):
        pools = cache.nan_to_num(what)
        table = batch.block_table.clone()
        for blocks, first, end in zip(table, (60, 32), (70, 41), strict=True):
            for j in (*range(first), *range(end, -(-end // 16) * 16)):
                pools[:, :, blocks[j // 16], j % 16] = what
            blocks[: first // 16] = 1_000_000
        asked = given(query, pools, replace(batch, block_table=table), window_size=(8, 0))
        with fastattn.use_kernel("triton"):
            answers.append(subtracted(*asked, **subtraction))
    for one, other in zip(*answers, strict=True):
        assert torch.equal(one, other)
    assert torch.isfinite(answers[0][0]).all()


@each_kernel
def test_differential_at_any_positions(kernel, device):
    """One position further, and a window that shows one key more to the left and one less to the right.

    Who subtracts by itself has no positions, so that these are four calls.
    """
    if kernel.name not in ("cpu", "triton"):
        pytest.skip("FlashAttention has no positions, which it says")
    _, (query, cache, batch) = in_pairs(
        ((4, 70), (8, 41)), device, torch.float32
    )  # few rows: Triton compiles 7 kernels
    subtraction = dict(lambda_full=torch.tensor(0.35, device=device), lambda_init=0.2)
    first_keys = torch.tensor([7, 1000], dtype=torch.int32, device=device)
    positions = torch.tensor([*range(66, 70), *range(33, 41), 0, 0], dtype=torch.int32, device=device)
    slopes = torch.linspace(0.1, 0.8, 8, device=device)
    there = dict(causal=False, window_size=(9, 2), alibi_slopes=slopes)

    def answer(**options):
        return subtracted(*given(query, cache, batch, **options), **subtraction)

    with kernel.forced():
        expected = answer(**there)
        at_them = answer(**there, positions=positions)
        absolute = positions + torch.cat([first_keys[:1].expand(4), first_keys[1:].expand(10)])
        elsewhere = answer(**there, positions=absolute, first_keys=first_keys)
        unmoved = answer(causal=False, window_size=(9, 2))
        moved = answer(causal=False, window_size=(10, 1), positions=positions + 1)
    for one, other in ((expected, at_them), (expected, elsewhere), (unmoved, moved)):
        torch.testing.assert_close(one, other)
    learned = dict(lambda_full=torch.tensor(0.35, device=device), lambda_init=0.2)

    def by(twin, query, cache, batch, positions, **options):
        plan = Plan(batch, 16, causal=False, window_size=(9, 2), positions=positions)
        return twin.differential.attention(query, cache, plan, **options)

    with kernel.forced():
        out, lse = by(fastattn, query, cache, batch, positions + 3, **learned, return_lse=True)
    assert_matches_reference(out, lse, partial(by, refattn), query, cache, batch, positions + 3, **learned)


# --- what they refuse ---


ASKED = {
    "plain": {},
    "not-causal": dict(window=(-1, -1)),
    "window": dict(window=(9, 0)),
    "two-sided-window": dict(window=(7, 5)),
    "softcap": dict(softcap=True),
    "alibi": dict(alibi=True),
    "alibi-both-ways": dict(window=(-1, -1), alibi=True),
    "sinks": dict(sinks=True),
    "invariant": dict(batch_invariant=True),
    "positions": dict(positions=True),
}


@pytest.mark.core
@pytest.mark.covers("E174")
@pytest.mark.usefixtures("hopper")
def test_values_of_another_size_are_computed_or_refused_by_name():
    """Keys of 192 and values of 128, as of latents: rows can be padded, a pool is not; one kernel has both sizes."""
    problem = ON_GPU._replace(head_size=192, value_head_size=128)
    for name in ("fa2", "torch_flash", "fa4", "fa3", "triton"):
        assert order.unsupported_reason(name, problem) is None
    assert order.choose(problem._replace(num_seqs=64, max_query_len=2048)).name == "fa4"
    pages = problem._replace(keys="pages", block_size=256, max_query_len=1)
    larger = problem._replace(head_size=128, value_head_size=192)
    for name, asked, refused in (
        ("fa2", pages, "one head size for keys and values over pages, .*, not 192 and 128"),
        ("fa2", larger, "one head size for keys and values, or smaller values, .*, not 128 and 192"),
        ("torch_flash", larger, "one head size for keys and values, or smaller values, .*, not 128 and 192"),
    ):
        with fastattn.use_kernel(name), pytest.raises(NotImplementedError, match=f"{name}: {refused}"):
            order.choose(asked)


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("name", ["triton", "fa4", "fa3", "fa2", "torch_flash"])
def test_each_kernel_refuses_nothing_that_it_has_to_compute(name):
    module = order.load(name)
    computed = 0
    for asked in ASKED.values():
        for size, value_size in ((64, 64), (96, 96), (128, 128), (256, 256), (96, 64), (40, 40)):
            for block_size, query_len in ((None, 100), (None, 1), (16, 100), (16, 1), (256, 1), (256, 9)):
                for dtype in (torch.bfloat16, torch.float16, torch.float32):
                    problem = ON_GPU._replace(
                        keys="rows" if block_size is None else "pages",
                        dtype=dtype,
                        head_size=size,
                        value_head_size=value_size,
                        block_size=block_size,
                        max_query_len=query_len,
                        **asked,
                    )
                    has_to = has_to_compute(name, problem)
                    computed += has_to
                    reason = order.unsupported_reason(name, problem)
                    assert not module.computes(problem) or reason == module.unsupported_reason(problem)
                    assert not has_to or reason is None, f"{name} refuses {problem}: {reason}"
                    assert reason is None or len(reason) > 20
    assert computed > 100, "it has to compute hardly anything"


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("other", map(order.load, ("fa4", "fa3", "fa2", "torch_flash")), ids=lambda kernel: kernel.name)
def test_flash_attention_refuses_what_it_would_answer_wrongly(other):
    assert other.unsupported_reason(ON_GPU) is None
    assert "positions" in other.unsupported_reason(ON_GPU._replace(positions=True))
    assert "side by side" in other.unsupported_reason(ON_GPU._replace(aligned=False))
    assert "float32" in other.unsupported_reason(ON_GPU._replace(dtype=torch.float32))
    assert "cpu" in other.unsupported_reason(ON_GPU._replace(device=torch.device("cpu")))


@pytest.mark.usefixtures("hopper")
def test_flash_attention_4_refuses_head_sizes_with_which_it_reads_other_memory():
    """Illegal accesses of 4.0.0b36 on an NVIDIA H200: 16 beside 64, and 160 over pages, whatever the page."""
    pages = ON_GPU._replace(keys="pages", block_size=16, window=(-1, 0))
    for sizes, over_rows, over_pages in (
        ((16, 16), True, True),
        ((16, 64), False, False),
        ((32, 64), True, True),
        ((64, 128), True, True),
        ((160, 160), True, False),
        ((192, 128), True, False),
        ((256, 256), True, True),
    ):
        for asked, computes in ((ON_GPU, over_rows), (pages, over_pages)):
            reason = fa4.unsupported_reason(asked._replace(head_size=sizes[0], value_head_size=sizes[1]))
            assert (reason is None) == computes and (computes or "memory that is not its own" in reason), (
                sizes,
                reason,
            )


@pytest.mark.parametrize(
    ("matter", "options"),
    [
        (False, dict(causal=False)),
        (False, dict(causal=False, softcap=2.0, sinks=True)),
        (True, dict()),
        (True, dict(causal=False, window_size=(5, -1))),
        (True, dict(causal=False, alibi_slopes=True)),
    ],
    ids=["everyone-sees-all", "as-does-a-softcap", "causal", "window", "slopes"],
)
def test_positions_are_asked_for_where_they_matter(matter, options):
    """So that a shared level of a cascade, which all see, goes to a kernel without them."""
    case = Case("c", ((2, 6), (1, 9)))
    inputs = build(case)
    positions = torch.arange(3, dtype=torch.int32)
    for where in (positions, None):
        more = {} if where is None else dict(positions=where)
        query, *pools, plan, options_given = given(*inputs.tensors, **more, **per_head(options, case, "cpu"))
        asked = problem.attention_problem(query, Pages(*pools), plan, options_given)
        assert asked.positions == (matter and where is not None)


@pytest.mark.parametrize(
    ("aligned", "make"),
    [
        (True, lambda x: x),
        (True, lambda x: x[1:, 1:]),
        (True, lambda x: x.transpose(0, 1)),
        (True, lambda x: x[..., 8:]),
        (True, lambda x: x[:1].expand(3, -1, -1)),
        (False, lambda x: x[..., 4:]),
        (False, lambda x: x[..., ::2]),
        (False, lambda x: x.transpose(1, 2)),
        (False, lambda x: torch.zeros(3, 4, 36, dtype=torch.bfloat16)[..., :32]),
    ],
    ids=[
        *("whole", "later-rows", "heads-first", "16-bytes-further", "expanded", "8-bytes-further", "every-second"),
        *("heads-inside", "rows-of-72-bytes"),
    ],
)
def test_heads_that_can_be_loaded_16_bytes_at_a_time(aligned, make):
    assert problem.has_aligned_heads(make(torch.zeros(3, 4, 32, dtype=torch.bfloat16))) == aligned


def test_rows_at_multiples_of_16_elements():
    """Of other strides the compiler does not know that 16 bytes are aligned, and copies of a kernel fail to compile."""
    rows = torch.zeros(3 * 4 * 528 + 1, dtype=torch.float16)
    assert problem.has_rows_at_16(rows[:-1].view(3, 4, 528)[..., :512])
    of_520, swapped, later = rows[: 12 * 520].view(3, 4, 520)[..., :512], rows[:-1].view(3, 528, 4).mT, rows[1:]
    assert not any(map(problem.has_rows_at_16, (of_520, swapped, later.view(3, 4, 528))))


def test_a_refusal_of_what_a_kernel_has_to_compute_fails(monkeypatch, forget_choices):
    inputs = build(Case("c", ((2, 6),)))

    def ask(**options):
        with fastattn.use_kernel("cpu"):
            plan_and_attend(fastattn.chunked_prefill, *inputs.tensors, **options)

    kernel = Kernel("cpu", (torch.float32,))
    kernel.check(ask)
    monkeypatch.setattr(cpu.KERNEL, "unsupported_reason", lambda problem: "it would rather not compute today")
    forget_choices()
    with pytest.raises(AssertionError, match="cpu has to compute this: .*rather not"):
        kernel.check(ask)
    monkeypatch.setattr("tests.helpers.kernels_present.has_to_compute", lambda name, problem: False)
    kernel.check(ask)
    monkeypatch.setattr(cpu.KERNEL, "unsupported_reason", lambda problem: "no")
    with pytest.raises(AssertionError, match="without a reason"):
        kernel.check(ask)
    with pytest.raises(AssertionError, match="no kernel has been asked"):
        kernel.check(mock.Mock(side_effect=NotImplementedError("cpu: a path may not refuse what kernels compute")))
    assert {kernel.name for kernel in PRESENT} & {"cpu", "triton"}


# --- packages that are installed in part ---


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder on the path for packages, and a Hopper without any others."""
    packages = ("flash_attn", "flash_mla", fa3.INTERFACE)
    for name in [name for name in sys.modules if name.split(".")[0] in packages]:
        monkeypatch.delitem(sys.modules, name)
    without = [p for p in sys.path if not any(Path(p, package).exists() for package in packages)]
    monkeypatch.setattr(sys, "path", [str(tmp_path), *without])
    monkeypatch.setattr(order, "num_sms", lambda device: 132)
    monkeypatch.setattr(order, "capability", lambda device: (9, 0))
    monkeypatch.setattr(fa2, "_refusal", lambda *asked: None)
    monkeypatch.setattr(fa3, "_find_library", lambda: None)
    monkeypatch.setattr(fa3, "LIBRARY", "_no_such_library")  # a test before may have loaded it into this process
    for module in (triton, fa4, fa3, flash_mla, fa2):
        monkeypatch.setattr(module, "capability", lambda device: (9, 0))
    remembered = (devices.cannot_import, fa3._cannot_load, flash_mla._cannot_load)
    for function in remembered:
        function.cache_clear()
    importlib.invalidate_caches()
    yield tmp_path
    for name in [name for name in sys.modules if name.split(".")[0] in packages]:
        del sys.modules[name]
    for function in remembered:
        function.cache_clear()


def lay(folder: Path, name: str, *functions: str) -> None:
    """Lay a module with some functions into a folder; the folders on the way to it hold nothing else."""
    file = folder / f"{name}.py"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("\n".join(f"def {function}(): ..." for function in functions))


WINDOWED = ON_GPU._replace(window=(9, 0), head_size=96, value_head_size=96)  # ours has no roles for such heads
CHUNK = WINDOWED._replace(window=(-1, 0), num_seqs=64, max_query_len=2048, max_seq_len=2048)
LATENTS = ON_GPU._replace(keys="latents", num_heads=128, num_kv_heads=1, head_size=576, value_head_size=512)
LATENTS = LATENTS._replace(block_size=64, max_query_len=1, uniform=True)


def test_a_folder_that_another_package_fills_is_no_package(folder):
    """With flash-attn-4 alone `flash_attn` can be imported, and has nothing of flash-attn."""
    lay(folder, "flash_attn/cute/interface", "_flash_attn_fwd")
    reason = order.unsupported_reason("fa2", WINDOWED)
    assert reason is not None
    assert reason.startswith(
        "the package flash-attn can't be imported: the module flash_attn that is here has no flash"
    )
    assert order.unsupported_reason("fa4", CHUNK) is None
    assert order.choose(WINDOWED).name == "torch_flash"
    assert order.choose(CHUNK).name == "fa4"
    with fastattn.use_kernel("fa2"), pytest.raises(NotImplementedError, match="fa2: the package flash-attn can't"):
        order.choose(WINDOWED)


def test_flash_attn_alone_is_enough(folder):
    """Without flash-attn-4, whose folder may stand there empty."""
    lay(folder, "flash_attn/__init__", "flash_attn_varlen_func", "flash_attn_with_kvcache")
    assert order.choose(WINDOWED).name == "fa2"
    assert order.choose(CHUNK).name == "fa2"
    assert "No module named 'flash_attn.cute'" in order.unsupported_reason("fa4", CHUNK)
    devices.cannot_import.cache_clear()
    (folder / "flash_attn" / "cute").mkdir()
    importlib.invalidate_caches()
    assert "the package flash-attn-4 can't be imported" in order.unsupported_reason("fa4", CHUNK)
    devices.cannot_import.cache_clear()
    lay(folder, "flash_attn/cute/interface", "flash_attn_func")
    importlib.invalidate_caches()
    assert "flash_attn.cute.interface that is here has no _flash_attn_fwd" in order.unsupported_reason("fa4", CHUNK)


@pytest.mark.parametrize("name", ["flash_attn", "flash_attn_interface", "flash_mla", "flash_mla/flash_mla_interface"])
def test_empty_folders_are_no_packages(name, folder):
    (folder / name).mkdir(parents=True)
    assert order.choose(WINDOWED).name == "torch_flash"
    assert order.choose(CHUNK).name == "torch_flash"
    assert order.choose(LATENTS).name == "triton"
    for kernel, asked in (("fa2", CHUNK), ("fa3", CHUNK), ("fa4", CHUNK), ("flash_mla", LATENTS)):
        assert "can't be imported: " in order.unsupported_reason(kernel, asked)


def test_deepseeks_own_package_is_not_the_one_with_the_half_for_hopper(folder):
    lay(folder, "flash_mla/__init__", "flash_mla_with_kvcache")
    lay(folder, "flash_mla/flash_mla_interface", "flash_mla_with_kvcache", "FlashMLASchedMeta")
    assert "module flash_mla that is here has no has_legacy" in order.unsupported_reason("flash_mla", LATENTS)


# --- adapters, with doubles of what they call ---

TILE = 64  # keys that a double loads at a time


@dataclass
class Double:
    """FlashAttention: whole tiles of keys, a weight of 0 for those that are hidden, and its own word for nothing.

    Attributes:
        nothing: its log-sum-exp where a query sees nothing, or NaN.
        zeros_past_end: it loads zeros past the end of a sequence.
    """

    nothing: float
    zeros_past_end: bool

    def attend(self, query, keys, values, seq_len, window, scale, softcap, slopes=None, *, drops_rows=False):
        """Attend from the rows of one sequence to `seq_len` of its keys, which come in whole tiles."""
        assert scale > 0, "it masks before it scales"
        if self.zeros_past_end:
            keys, values = keys.clone(), values.clone()
            keys[seq_len:], values[seq_len:] = 0.0, 0.0
        group = query.shape[1] // keys.shape[1]
        k, v = (repeat(x.float(), "s hk d -> s (hk g) d", g=group) for x in (keys, values))
        scores = einsum(query.float(), k, "t h d, s h d -> h t s") * scale
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        i = torch.arange(seq_len - len(query), seq_len)[:, None]
        j = torch.arange(len(keys))[None, :]
        if slopes is not None:
            assert slopes.dtype == torch.float32
            bias = slopes[:, None, None] * (j if drops_rows else -(i - j).abs())
            scores = scores + bias
        left, right = window
        hidden = j >= seq_len
        hidden = hidden | ((left >= 0) & (j < i - left)) | ((right >= 0) & (j > i + right))
        scores = scores.masked_fill(hidden, -torch.inf)
        lse = scores.logsumexp(-1)
        weights = (scores - lse[..., None]).exp().masked_fill(hidden, 0.0)
        out = einsum(weights, v, "h t s, s h dv -> t h dv").to(query.dtype)
        out[lse.T.isneginf()] = torch.nan
        return out, torch.where(torch.isfinite(lse), lse, self.nothing)

    def over(self, query, starts, tiles_of, lengths, window, *how, **besides):
        """Attend in each sequence; rows of none hold anything."""
        out = torch.full((*query.shape[:2], tiles_of(0)[1].shape[-1]), torch.nan, dtype=query.dtype)
        lse = torch.full((query.shape[1], len(query)), torch.nan)
        for i, (first, last) in enumerate(zip(starts[:-1], starts[1:], strict=True)):
            if first < last:
                answer = self.attend(query[first:last], *tiles_of(i), lengths[i], window, *how, **besides)
                out[first:last], lse[:, first:last] = answer
        return out, lse


def tiles_of_rows(key, value, ends):
    """Tiles of rows that lie one after the other: past a sequence's end are the rows of the next, or nothing."""

    def tiles(i):
        first, length = ends[i], -(-(ends[i + 1] - ends[i]) // TILE) * TILE
        rows = [x[first : first + length] for x in (key, value)]
        return [torch.cat([x, x.new_zeros(length - len(x), *x.shape[1:])]) for x in rows]

    return tiles


def tiles_of_pages(key, value, table, lengths):
    """Whole pages; the table leads nowhere past them."""
    assert table.stride(-1) == 1

    def tiles(i):
        blocks = table[i, : -(-lengths[i] // key.shape[1])].long()
        return [x[blocks].flatten(0, 1) for x in (key, value)]

    return tiles


def install_fa4(monkeypatch):
    double = Double(-torch.inf, zeros_past_end=False)

    def forward(
        q, k, v, *, cu_seqlens_q, max_seqlen_q, max_seqlen_k, softmax_scale, causal, window_size_left,
        window_size_right, softcap, return_lse, out, cu_seqlens_k=None, seqused_k=None, page_table=None,
    ):  # fmt: skip
        assert return_lse
        assert causal == (window_size_right == 0)
        for lengths in (cu_seqlens_q, cu_seqlens_k, seqused_k):
            assert lengths is None or (lengths.stride() == (1,) and lengths.dtype == torch.int32)
        assert out is None or problem.has_aligned_heads(out), "it stores 16 bytes at a time"
        window = [-1 if side is None else side for side in (window_size_left, window_size_right)]
        lengths = (cu_seqlens_k.diff() if page_table is None else seqused_k).tolist()
        tiles = (
            tiles_of_rows(k, v, cu_seqlens_k.tolist())
            if page_table is None
            else tiles_of_pages(k, v, page_table, lengths)
        )
        result, lse = double.over(q, cu_seqlens_q.tolist(), tiles, lengths, window, softmax_scale, softcap)
        return result if out is None else out.copy_(result), lse, None, None

    package, cute, interface = (ModuleType(f"flash_attn{name}") for name in ("", ".cute", ".cute.interface"))
    package.__path__ = cute.__path__ = []
    interface._flash_attn_fwd = forward
    for module in (package, cute, interface):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    return fa4


def flash2(query, key, value, starts, ends, longest, scale, causal, window, softcap=0.0, slopes=None):
    """FlashAttention-2 over rows, with what it makes of a window and of ALiBi."""
    double = Double(torch.inf, zeros_past_end=True)
    assert query.shape[-1] == key.shape[-1] == value.shape[-1], "it has one head size"
    for lengths in (starts, ends):
        assert lengths.is_contiguous() and lengths.dtype == torch.int32
    left, right = (-1 if side >= longest else side for side in window)
    right = 0 if causal else right
    is_causal = left < 0 and right == 0
    if left < 0 <= right:
        left = longest
    if left >= 0 > right:
        right = longest
    starts, ends = starts.tolist(), ends.tolist()
    lengths = [last - first for first, last in zip(ends[:-1], ends[1:], strict=True)]
    tiles = tiles_of_rows(key, value, ends)
    how = ((left, right), scale, softcap, slopes)
    out, lse = double.over(query, starts, tiles, lengths, *how, drops_rows=is_causal)
    return torch.empty_like(query).copy_(out), lse  # laid out as the query is


def install_fa2(monkeypatch):
    def varlen(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, *, softmax_scale, causal, window_size, softcap,
        alibi_slopes, return_attn_probs,
    ):  # fmt: skip
        assert return_attn_probs
        assert max_seqlen_q > 1, "it would take row i for sequence i"
        out, lse = flash2(
            q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_k, softmax_scale, causal, window_size, softcap, alibi_slopes
        )
        return out, lse, None

    def with_kvcache(
        q, k_cache, v_cache, *, cache_seqlens, block_table, softmax_scale, window_size, softcap, alibi_slopes,
        num_splits, return_softmax_lse,
    ):  # fmt: skip
        assert return_softmax_lse
        assert q.shape[:2] == (len(cache_seqlens), 1)
        assert cache_seqlens.is_contiguous() and cache_seqlens.dtype == block_table.dtype == torch.int32
        double, lengths = Double(torch.inf, zeros_past_end=True), cache_seqlens.tolist()
        tiles = tiles_of_pages(k_cache, v_cache, block_table, lengths)
        starts = list(range(len(q) + 1))
        how = (window_size, softmax_scale, softcap, alibi_slopes)
        out, lse = double.over(q.flatten(0, 1), starts, tiles, lengths, *how)
        return out[:, None], lse.T[..., None]

    package = ModuleType("flash_attn")
    package.flash_attn_varlen_func, package.flash_attn_with_kvcache = varlen, with_kvcache
    monkeypatch.setitem(sys.modules, "flash_attn", package)
    return fa2


def install_torch_flash(monkeypatch):
    def forward(
        q, k, v, starts, ends, max_q, max_k, dropout, causal, probs, *, scale, window_size_left, window_size_right
    ):
        assert max_q > 1
        assert not dropout
        window = window_size_left, window_size_right
        return *flash2(q, k, v, starts, ends, max_k, scale, causal, window), None, None, None

    monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", forward)

    def varlen(query, key, value, plan, options, out):
        return fa2.attend_by_torch(query, Rows(key, value), plan, options, out)

    return SimpleNamespace(varlen=varlen)


CALLED = {
    "plain": {},
    "no-scale": dict(softmax_scale=0.0),
    "negative-scale": dict(softmax_scale=-0.3),
    "not-causal": dict(causal=False),
    "window": dict(window_size=(9, 0)),
    "wide-window": dict(window_size=(5000, 0)),
    "right-window": dict(causal=False, window_size=(-1, 3)),
    "two-sided-window": dict(causal=False, window_size=(7, 5)),
    "softcap": dict(softcap=1.0),
    "alibi": dict(alibi_slopes=True),
    "alibi-both-ways": dict(causal=False, alibi_slopes=True),
    "alibi-in-a-window": dict(causal=False, window_size=(-1, 3), alibi_slopes=True),
    "sinks": dict(sinks=True),
}
ADAPTERS = {"fa4": install_fa4, "fa2": install_fa2, "torch_flash": install_torch_flash}
RAGGED = Case("ragged", ((4, 6), (1, 70), (10, 17), (0, 9), (5, 2), (3, 0), (17, 24)), heads=(4, 2), padding_rows=3)


def with_strided_table(batch):
    """Return the table as every second column of another."""
    table = torch.stack([batch.block_table, torch.full_like(batch.block_table, -1)], dim=2)[:, :, 0]
    assert table.stride(1) == 2
    return replace(batch, block_table=table)


def poison(inputs):
    """Put NaN and inf into what no query sees: the padding rows, and the slots past each sequence's end."""
    inputs.query[len(inputs.query) - 3 :] = torch.nan
    for blocks, keys in zip(inputs.batch.block_table, inputs.keys, strict=True):
        for place in range(len(keys), -(-len(keys) // inputs.key_cache.shape[1]) * inputs.key_cache.shape[1]):
            block = blocks[place // inputs.key_cache.shape[1]]
            inputs.key_cache[block, place % inputs.key_cache.shape[1]] = torch.inf
            inputs.value_cache[block, place % inputs.key_cache.shape[1]] = torch.nan


@pytest.mark.covers("D129", "E175")
@pytest.mark.skipif("PRESENT[0].name != 'cpu'", reason="the kernels themselves are there")
@pytest.mark.parametrize(
    ("name", "over", "options"),
    [
        (name, over, options)
        for name, over in (
            ("fa4", "rows"),
            ("fa4", "pages"),
            ("fa2", "rows"),
            ("fa2", "pages"),
            ("torch_flash", "rows"),
        )
        for options in CALLED
        if not ("alibi" in options and name != "fa2") and not (options == "softcap" and name == "torch_flash")
    ],
)
def test_what_an_adapter_asks_and_what_it_answers(name, over, options, monkeypatch):
    kernel = ADAPTERS[name](monkeypatch)
    case = RAGGED
    if over == "pages" and name == "fa2":
        lens = tuple((min(q, 1), s) for q, s in RAGGED.lens)
        case = replace(RAGGED, lens=lens, block_size=256)
    inputs = build(case, dtype=torch.float16)
    poison(inputs)
    if options == "plain":
        inputs = replace(inputs, batch=with_strided_table(inputs.batch))
    options = per_head(CALLED[options], case, "cpu")
    if over == "rows":
        asked, function, reference, arguments = given(*inputs.rows, **options), kernel.varlen, by_rows, inputs.rows
    else:
        asked, function, reference = given(*inputs.tensors, **options), kernel.paged, by_pages
        arguments = inputs.tensors
    out, lse = function(*asked, None)
    assert_matches_reference(out, lse, reference, *arguments, **options)
    memory = torch.full_like(out, torch.nan)
    again, _ = function(*asked, memory)
    assert torch.equal(again, out)
    assert (again is memory) == (name == "fa4"), "which alone writes where it is told to"


@pytest.mark.core
@pytest.mark.covers("E173")
@pytest.mark.skipif("PRESENT[0].name != 'cpu'", reason="the kernels themselves are there")
@pytest.mark.parametrize("options", [{}, dict(window_size=(9, 0)), dict(sinks=True)], ids=["plain", "window", "sinks"])
@pytest.mark.parametrize("name", ["fa2", "torch_flash"])
def test_smaller_values_are_padded_with_zeros(name, options, monkeypatch):
    """Of a kernel with one head size; in a window the answers that NaN has spoilt are computed again."""
    kernel = ADAPTERS[name](monkeypatch)
    case = replace(RAGGED, head_size=96, value_head_size=64)
    inputs = build(case, dtype=torch.float16)
    inputs.query[len(inputs.query) - 3 :] = torch.nan
    options = per_head(options, case, "cpu")
    out, lse = kernel.varlen(*given(*inputs.rows, **options), None)
    assert out.shape == (*inputs.query.shape[:2], 64) and out.is_contiguous()
    assert_matches_reference(out, lse, by_rows, *inputs.rows, **options)


@pytest.mark.skipif("PRESENT[0].name != 'cpu'", reason="the kernels themselves are there")
@pytest.mark.parametrize("name", ["fa2", "torch_flash"])
def test_outputs_laid_out_as_the_query_are_fixed_up_where_they_lie(name, monkeypatch):
    """Heads outside of tokens, and a NaN before the window, which spoils rows that are then computed again."""
    kernel = ADAPTERS[name](monkeypatch)
    query, key, value = (torch.randn(n, h, 16, dtype=torch.float16) for n, h in ((5, 4), (7, 2), (7, 2)))
    query = query.transpose(0, 1).contiguous().transpose(0, 1)
    batch = refattn.metadata.make_batch([5], [7])
    for x in (key, value):
        x[:2] = torch.nan
    asked = given(query, key, value, batch, window_size=(0, 0))
    out, lse = kernel.varlen(*asked, None)
    assert_matches_reference(out, lse, by_rows, query, key, value, batch, window_size=(0, 0))


@pytest.mark.skipif("PRESENT[0].name != 'cpu'", reason="the kernels themselves are there")
@pytest.mark.parametrize(("name", "over"), [("fa4", "rows"), ("fa4", "pages"), ("fa2", "rows"), ("fa2", "pages")])
def test_strides_of_a_single_sequence_and_of_a_single_block(name, over, monkeypatch):
    """To torch a table of one column has its columns side by side, whatever its strides; packages ask for a 1."""
    kernel = ADAPTERS[name](monkeypatch)
    for lens in (((1, 100), (1, 9), (0, 4)), ((1, 100),)):
        inputs = build(Case("c", lens, heads=(4, 2), block_size=256), dtype=torch.float16)
        batch = replace(inputs.batch, block_table=inputs.batch.block_table.T.contiguous().T[:, :1])
        if len(lens) == 1:
            batch = replace(batch, block_table=torch.stack([batch.block_table] * 3, dim=2)[:, :, 0])
            batch = replace(batch, seq_lens=torch.stack([batch.seq_lens] * 3, dim=1)[:, 1])
            assert batch.seq_lens.stride() == (3,)
        assert batch.block_table.stride(-1) == 3
        inputs = replace(inputs, batch=batch)
        arguments, reference = (inputs.rows, by_rows) if over == "rows" else (inputs.tensors, by_pages)
        asked = given(*arguments)
        out, lse = (kernel.varlen if over == "rows" else kernel.paged)(*asked, None)
        assert_matches_reference(out, lse, reference, *arguments)


@pytest.mark.core
@pytest.mark.skipif("PRESENT[0].name != 'cpu'", reason="the kernels themselves are there")
def test_memory_for_an_answer_that_begins_anywhere(monkeypatch):
    """A kernel that writes into the memory given cannot do so where its stores would not be aligned."""
    kernel = install_fa4(monkeypatch)
    inputs = build(Case("c", ((3, 20),), heads=(4, 2)), dtype=torch.float16)
    asked = given(*inputs.rows)
    expected, _ = kernel.varlen(*asked, None)
    for offset in (0, 1, 8):
        memory = torch.empty(expected.numel() + 8, dtype=torch.float16)[offset:][: expected.numel()].view_as(expected)
        out, _ = kernel.varlen(*asked, memory)
        assert torch.equal(out, expected)
        assert (out is memory) == (offset != 1)


@pytest.mark.skipif("PRESENT[0].name != 'cpu'", reason="the kernels themselves are there")
@pytest.mark.parametrize("sink", [89.0, 200.0, 1e4, -1e4])
@pytest.mark.parametrize("name", ADAPTERS)
def test_a_sink_far_from_the_scores(name, sink, monkeypatch):
    kernel = ADAPTERS[name](monkeypatch)
    inputs = build(RAGGED, dtype=torch.float16)
    sinks = torch.tensor([sink, 0.0, sink, -sink])
    out, lse = kernel.varlen(*given(*inputs.rows, sinks=sinks), None)
    assert_matches_reference(out, lse, by_rows, *inputs.rows, sinks=sinks)


@pytest.mark.skipif("PRESENT[0].name != 'cpu'", reason="the kernels themselves are there")
@pytest.mark.parametrize("name", ADAPTERS)
@pytest.mark.parametrize("where", ["key", "value"])
def test_nan_of_one_sequence_is_its_own(name, where, monkeypatch):
    """The rows of the next sequence are in the same tile, and no row of the one with NaN answers a number."""
    kernel = ADAPTERS[name](monkeypatch)
    case = Case("c", ((20, 20), (3, 3), (30, 41)), heads=(2, 1))
    query, key, value, batch = build(case, dtype=torch.float16).rows
    expected, expected_lse = kernel.varlen(*given(query, key, value, batch, causal=False), None)
    (key if where == "key" else value)[20] = torch.nan
    out, lse = kernel.varlen(*given(query, key, value, batch, causal=False), None)
    others = torch.tensor([not 20 <= row < 23 for row in range(53)])
    torch.testing.assert_close(out[others], expected[others], rtol=2e-3, atol=1e-3)
    assert torch.equal(lse[others], expected_lse[others])
    assert out[20:23].isnan().all()
    assert lse[20:23].isnan().all() == (where == "key")


@pytest.mark.skipif("PRESENT[0].name != 'cpu'", reason="the kernels themselves are there")
def test_pages_that_were_copied_need_no_repair(monkeypatch):
    """The copy has zeros past the end of a sequence."""
    install_fa4(monkeypatch)
    monkeypatch.setattr(fa4, "QUERY_ROWS", 0)
    inputs = build(RAGGED, dtype=torch.float16)
    poison(inputs)
    with mock.patch.object(gpu_repair, "recompute") as recompute:
        out, lse = fa4.paged(*given(*inputs.tensors), None)
    assert not recompute.called
    assert_matches_reference(out, lse, by_pages, *inputs.tensors)
