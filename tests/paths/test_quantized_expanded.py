"""Quantized caches by kernels for numbers: their quantized values are expanded into memory before they attend.

Where there is no GPU, Triton's interpreter expands, and the kernel for plain pages on a CPU stands in for
flash-attn-4's.
"""

import importlib
import os
from dataclasses import replace
from functools import partial

import pytest

pytest.importorskip("triton", reason="Triton comes for Linux only")

import torch

import fastattn.metadata
import fastattn.quantized
import refattn.quantized
from fastattn.kernels import cpu, order
from fastattn.kernels.flash import cannot_expand, fa4
from fastattn.kernels.triton.expand import repage, round_queries
from fastattn.kernels.triton.four_bits import int4_quantization
from fastattn.kernels.triton.quantized import quantization_of
from refattn.keys import Pages
from refattn.metadata import make_batch
from refattn.plan import Plan
from refattn.scales import Fp8Scales, Int8Scales
from tests.helpers.batches import HARMLESS, POISON, Case
from tests.helpers.kernels_present import HALVES, PRESENT, Kernel
from tests.helpers.steps import record
from tests.helpers.stored import (
    KINDS,
    PLANS,
    Stored,
    apart,
    assert_twins_agree_over_quantized,
    numbers_of,
    path_of,
    store,
)
from tests.helpers.tolerance import assert_matches_reference
from tests.table import LEFT, ODD
from twinattn.kit import plan_and_attend

ON_CPU = os.environ["TWINATTN_TEST_DEVICE"] == "cpu"
TYPES = (torch.float16,) if ON_CPU else HALVES  # the interpreter rounds to bfloat16 by cutting bits off
KERNELS = [Kernel("fa4", TYPES)] if ON_CPU else [kernel for kernel in PRESENT if kernel.name in ("fa3", "fa4")]
MIXED = Case("mixed", ((4, 6), (1, 70), (10, 33), (1, 165), (0, 9), (5, 2)), heads=(4, 2), padding_rows=2)
CASES = [*ODD, replace(MIXED, layout="HND", head_size=128)]
each_kernel = pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
each_type = pytest.mark.parametrize("dtype", TYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
each_kind = pytest.mark.parametrize("kind", KINDS)
SCALED = [(kind, per) for kind in ("e4m3", "e5m2") for per in ("number", "head", "sequence")] + [("int8", "token")]
each_scaled = pytest.mark.parametrize(("kind", "per"), SCALED, ids=["-".join(pair) for pair in SCALED])


@pytest.fixture(autouse=True)
def stand_in(monkeypatch):
    """Make flash-attn-4 compute on a CPU; what it refuses there is what cannot be expanded."""
    if ON_CPU:
        monkeypatch.setattr(importlib.import_module(repage.__module__), "BLOCK_ROWS", 64)  # for fewer programs
        monkeypatch.setattr(
            fa4, "paged", lambda query, key, value, *others: cpu.attend(query, Pages(key, value), *others)
        )
        monkeypatch.setattr(fa4.KERNEL, "unsupported_reason", cannot_expand)
        order._choose.cache_clear()
    yield
    order._choose.cache_clear()


def check(kernel: Kernel, stored: Stored, plan: str = "causal", **options) -> None:
    with kernel.forced():
        kernel.check(assert_twins_agree_over_quantized, stored, plan, again=False, **options)


def store_for(case: Case, kind: str, dtype: torch.dtype, **asked) -> Stored:
    """Lay a case out in 8 bits; numbers beside int8 keys are in the type of the queries."""
    stored = store(case, kind, dtype=dtype, **asked)
    if kind == "int8-half":
        stored.value_cache = stored.value_cache.to(dtype)
    return stored


# --- what the quantized values become ---


@each_type
@each_scaled
def test_pages_hold_scales_times_quantized_values_to_the_bit(kind, per, dtype, device):
    """Rounded once, of padded pools with heads outside of tokens; zeros past the end of a sequence in its last page."""
    case = Case(
        "pools",
        ((2, 40), (0, 0), (1, 129), (0, 9)),
        heads=(3, 3),
        head_size=24,
        value_head_size=40,
        block_size=8,
        layout="HND",
    )
    stored = store_for(case, kind, dtype, per=per, spread=True, device=device)
    quantization, batch, fp8 = quantization_of(stored.scales), stored.batch, isinstance(stored.scales, Fp8Scales)
    pools = [x.view(torch.uint8) if fp8 else x for x in (stored.key_cache, stored.value_cache)]
    for pool, rows, number, scales in zip(
        pools,
        (stored.keys, stored.values),
        quantization.numbers[1:],
        (quantization.key, quantization.value),
        strict=True,
    ):
        held = quantization.kind if pool.itemsize == 1 else ""
        asked = dict(block_size=64, dtype=dtype, kind=held, number=number, scales=scales)
        pages, table = repage(pool, batch, **asked)
        for exact, blocks, (_, s) in zip(rows, table, case.lens, strict=True):
            used = pages[blocks[: -(-s // 64)].long()].flatten(0, 1).cpu()
            assert torch.equal(used[:s], exact.float().to(dtype)) and not used[s:].any()
        before = table.clone()
        _, same = repage(pool, batch, table=table.fill_(-1), **asked)
        assert same is table and torch.equal(table, before), "a kept table is not written anew"


@each_type
def test_int4_pages_hold_rows_that_are_turned_back(dtype, device):
    """Of padded pools with heads outside of tokens, and heads of which two thirds are turned together."""
    case = Case("turned", ((2, 40), (0, 0), (1, 129)), heads=(3, 3), head_size=24, value_head_size=64, layout="HND")
    stored = store(case, "int4", dtype=dtype, spread=True, device=device)
    quantization = int4_quantization(stored.scales)
    for pool, rows, scales in (
        (stored.key_cache, stored.keys, quantization.key),
        (stored.value_cache, stored.values, quantization.value),
    ):
        pages, table = repage(pool, stored.batch, block_size=64, dtype=dtype, kind="int4", scales=scales)
        for exact, blocks, (_, s) in zip(rows, table, case.lens, strict=True):
            used = pages[blocks[: -(-s // 64)].long()].flatten(0, 1).cpu()
            torch.testing.assert_close(used[:s].double(), exact, rtol=torch.finfo(dtype).eps / 2, atol=1e-5)
            assert not used[s:].any()


@each_type
@pytest.mark.parametrize("kind", ["e4m3", "e5m2", "int8"])
def test_every_code_is_expanded(kind, dtype, device):
    quantized_values = torch.arange(256).to(torch.uint8).view(KINDS[kind])
    expected = (numbers_of(quantized_values).float() * 0.7).to(dtype)
    pool = quantized_values.view(torch.int8 if kind == "int8" else torch.uint8).view(1, 1, 1, 256).to(device)
    pages, _ = repage(
        pool, make_batch([1], [1], [[0]], device=device), block_size=64, dtype=dtype, kind=kind, number=0.7
    )
    torch.testing.assert_close(pages[0, 0, 0].cpu(), expected, rtol=0, atol=0, equal_nan=True)


@each_type
@each_scaled
def test_queries_are_rounded_to_the_bit(kind, per, dtype, device):
    """Of any strides, with a row of zeros, one with NaN and infinity, and numbers that saturate."""
    case = Case("queries", ((40, 40), (0, 3), (1, 70), (5, 9)), heads=(4, 2), head_size=24, padding_rows=3)
    stored = store(case, kind, dtype=dtype, per=per, device=device)
    query = apart(stored.query.transpose(0, 1)).transpose(0, 1)
    query[3, 1], query[4, 0, 5], query[5, 2, 7], query[6] = 0.0, torch.nan, torch.inf, query[6] * 1000
    rounded = round_queries(query, Plan(stored.batch, 16), quantization_of(stored.scales))
    exact, scales, row = query.cpu().float(), stored.scales, 0
    for i, (q, _) in enumerate(case.lens):
        x = exact[row : row + q]
        if isinstance(scales, Int8Scales):
            scale = x.abs().amax(-1, keepdim=True) / 127
            scale = torch.where(scale == 0, 1.0, scale)
            quantized_values = (x / scale).round().nan_to_num(0.0)
        else:
            numbers = torch.as_tensor(scales.query).cpu()
            scale = (numbers[i] if numbers.ndim == 2 else numbers.expand(2)).repeat_interleave(2)[:, None]
            largest = torch.finfo(scales.format).max
            quantized_values = (x / scale).clamp(-largest, largest).to(scales.format).float()
        expected = (quantized_values * scale).to(dtype)
        torch.testing.assert_close(rounded[row : row + q].cpu(), expected, rtol=0, atol=0, equal_nan=True)
        row += q


# --- attention ---


@pytest.mark.covers("A22", "B98")
@each_kernel
@each_type
@pytest.mark.parametrize(
    ("case", "kind"),  # pages are found by the case, and expanded by the kind
    [*((CASES[0], kind) for kind in KINDS), *((case, kind) for case in CASES[1:] for kind in ("e4m3", "int8", "int4"))],
    ids=str,
)
def test_twins(case, kind, dtype, kernel, device):
    check(kernel, store_for(case, kind, dtype, device=device))


@each_kernel
@pytest.mark.parametrize("kind", ["e4m3", "int8", "int4"])
@pytest.mark.parametrize("plan", [plan for plan in PLANS if plan != "causal"])
def test_twins_of_each_plan(kind, plan, kernel, device):
    check(kernel, store_for(MIXED, kind, TYPES[0], device=device), plan)


@each_kernel
@pytest.mark.parametrize(
    ("kind", "per"),  # what a scale belongs to has nothing to do with the format
    [("e4m3", "number"), ("e4m3", "head"), ("e5m2", "head"), ("e4m3", "sequence"), ("int8", "token")],
)
@pytest.mark.parametrize("round_query", [False, True], ids=["query-as-it-is", "query-rounded"])
def test_scales_over_padded_pools(kind, per, round_query, kernel, device):
    case = replace(MIXED, head_size=32)
    check(kernel, store_for(case, kind, TYPES[0], per=per, round_query=round_query, spread=True, device=device))


@each_kernel
@pytest.mark.parametrize("kind", ["e4m3", "int8", "int4"])
def test_prompts_of_several_pages(kind, kernel, device):
    """Longer than a page, and than a tile of any kernel; the second one goes on from a context."""
    case = Case("prompts", ((300, 300), (140, 500), (1, 131)), heads=(4, 2), head_size=64)
    check(kernel, store_for(case, kind, TYPES[0], device=device))


@each_kernel
@pytest.mark.parametrize(
    ("plan", "kind"),  # the plan decides which pages are expanded; their contents are the quantized values
    [*(("causal", kind) for kind in (*KINDS, "int4")), ("untrimmed-window", "e4m3"), ("local", "int8")],
)
def test_poison(kind, plan, kernel, device):
    """Quantized values of NaN, scales of NaN, infinity and 1e4 in slots that no sequence owns change no bit."""
    twin, arguments = path_of("fastattn", plan)
    answers = []

    def answer(stored):
        answers.append(plan_and_attend(twin, *stored.tensors, **arguments, scales=stored.scales, return_lse=True))

    for poison in (HARMLESS, POISON):
        with kernel.forced():
            kernel.check(answer, store_for(MIXED, kind, TYPES[0], poison=poison, device=device))
    for clean, dirty in zip(*answers, strict=True) if answers else ():
        assert torch.equal(clean, dirty)


@each_kernel
@pytest.mark.parametrize("kind", ["e4m3", "int8"])
def test_what_is_before_every_window_may_be_nan(kind, kernel, device):
    """In pages that are expanded all the same, beside keys that are seen."""
    case = Case("before", ((9, 165), (70, 170)), heads=(4, 2), head_size=64)
    stored = store_for(case, kind, TYPES[0], device=device)
    twin, arguments = path_of("fastattn", "untrimmed-window")
    reference, _ = path_of("refattn", "untrimmed-window")
    clean = [x.clone() for x in stored.in_bytes[:3]]
    scales = stored.scales if kind == "e4m3" else replace(stored.scales, key=stored.scales.key.clone())
    for i, (q, s) in enumerate(case.lens):
        for j in range(s - q - LEFT):
            place = stored.batch.block_table[i, j // 16], j % 16
            if kind == "e4m3":
                stored.key_cache.view(torch.uint8)[place] = stored.value_cache.view(torch.uint8)[place] = 0x7F
            else:
                stored.scales.key[place] = torch.nan

    def assert_right():
        out, lse = plan_and_attend(twin, *stored.in_bytes, **arguments, scales=stored.scales, return_lse=True)
        assert_matches_reference(
            out, lse, partial(plan_and_attend, reference), *clean, stored.batch, **arguments, scales=scales
        )

    with kernel.forced():
        kernel.check(assert_right)


@each_kernel
@pytest.mark.parametrize("kind", ["e4m3", "int8"])
def test_nan_that_a_query_sees_comes_out(kind, kernel, device):
    """Of a value for fp8, of a key's scale for int8; with no other head or sequence."""
    case = Case("seen", ((40, 60), (7, 30)), heads=(4, 2), head_size=64)
    stored = store_for(case, kind, TYPES[0], device=device)
    block, place = stored.batch.block_table[0, 2], 5  # key 37, which queries 17 to 39 see
    if kind == "e4m3":
        stored.value_cache.view(torch.uint8)[block, place, 1] = 0x7F
    else:
        if kernel.name == "fa3":
            pytest.skip("leaves a split whose scores are NaN out of the sum")
        stored.scales.key[block, place, 1] = torch.nan
    with kernel.forced():
        out = plan_and_attend(fastattn.quantized, *stored.tensors, scales=stored.scales)
    is_nan = out.isnan().any(-1)
    assert is_nan[17:40, 2:].all() and not is_nan[:, :2].any() and not is_nan[40:].any()


@each_kernel
@each_kind
def test_layers_of_a_step_share_a_plan_and_no_scale(kind, kernel, device):
    """The plan keeps the table of the new pages; what is in them is written anew in each layer, its answer to `out`."""
    case = Case("layers", ((20, 40), (30, 200)), heads=(3, 3), head_size=32)
    stored = store_for(case, kind, TYPES[0], per="head", device=device)
    scales = stored.scales
    other = {name: x * 1.7 for name, x in vars(scales).items() if isinstance(x, torch.Tensor)}
    plan = fastattn.quantized.plan(stored.batch, block_size=16)
    with kernel.forced():
        for layer in (scales, replace(scales, **other), scales):
            shared = fastattn.quantized.attention(*stored.tensors[:3], plan, scales=layer)
            memory = torch.full_like(shared, torch.nan)
            assert plan_and_attend(fastattn.quantized, *stored.tensors, scales=layer, out=memory) is memory
            assert torch.equal(shared, memory)


@each_kernel
@pytest.mark.parametrize("kind", ["e4m3", "int8"])
def test_a_step_is_captured_once_and_replayed_for_any_other(kind, kernel, device):
    """With sequences that are shorter and longer than those it was captured with, more of them and fewer."""
    buffers = fastattn.metadata.make_buffers(5, device=device, columns=21, max_query_len=40, max_seq_len=300)
    steps = [((30, 40), (1, 9)), ((40, 290), (1, 5), (9, 77), (2, 2)), ((1, 16),)]
    stores = [
        store_for(Case("step", lens, heads=(4, 2)), kind, TYPES[0], per="head", seed=i, device=device)
        for i, lens in enumerate(steps)
    ]
    query = torch.zeros(56, 4, 64, dtype=TYPES[0], device=device)
    blocks = max(len(stored.key_cache) for stored in stores)
    pools = [stores[0].key_cache.new_zeros(blocks, 16, 2, 64) for _ in "kv"]
    scales = stores[0].scales
    if isinstance(scales, Int8Scales):
        scales = replace(scales, key=torch.zeros(blocks, 16, 2, device=device))

    def step() -> tuple[torch.Tensor, torch.Tensor]:
        with kernel.forced():
            return plan_and_attend(fastattn.quantized, query, *pools, buffers, scales=scales, return_lse=True)

    replay = None
    for stored in stores:
        rows = len(stored.query)
        fastattn.metadata.refill(buffers, stored.batch)
        query.zero_()
        query[:rows] = stored.query
        for pool, mine in zip(pools, (stored.key_cache, stored.value_cache), strict=True):
            pool.view(torch.uint8)[: len(mine)] = mine.view(torch.uint8)
        if isinstance(scales, Int8Scales):
            scales.key[: len(stored.scales.key)] = stored.scales.key
        replay = replay or record(step, device)
        out, lse = replay()
        on_host = {name: x.cpu() for name, x in vars(stored.scales).items() if isinstance(x, torch.Tensor)}
        reference = partial(plan_and_attend, refattn.quantized, scales=replace(stored.scales, **on_host))
        assert_matches_reference(out[:rows], lse[:rows], reference, *stored.in_bytes)
        assert not out[rows:].any(), "a padding row holds something"
