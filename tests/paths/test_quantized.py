"""Quantized caches: the bytes that are written, what is read of them, and who may see whom as in any other cache."""

import importlib
import itertools
import math
import re
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import fastattn.kv_cache
import fastattn.quantized
import refattn.kv_cache
import refattn.local
import refattn.quantized
from fastattn.kernels import order
from refattn import checks_of_writes
from refattn.batch import Batch, Prefix
from refattn.keys import QuantizedPages
from refattn.metadata import make_batch
from refattn.options import AttentionOptions
from refattn.plan import Plan
from refattn.scales import Fp8Scales, Int8Scales
from tests.helpers.batches import (
    HARMLESS,
    POISON,
    Case,
    assert_same_masks,
    build,
    masks_by_hand,
    of_batches,
    plan_and_attend,
    ragged_cases,
    read_masks,
)
from tests.helpers.options import OPTIONS, per_head
from tests.helpers.pairs import every_pair
from tests.helpers.stored import (
    E4M3,
    E5M2,
    KINDS,
    Stored,
    apart,
    assert_twins_agree_over_quantized,
    attended_by_hand,
    bits,
    decoded,
    in_8_bits,
    in_scales,
    nearest,
    numbers_of,
    over_quantized,
    path_of,
    store,
)
from tests.table import CHUNK, ODD, PLANS, rule

SEES = {plan: rule(**PLANS[plan][1]) for plan in ("causal", "window", "local", "all")}
FEW = [ODD[0], ODD[1]]
PAIRS = [("causal", kind) for kind in KINDS] + [
    (plan, kind) for plan in SEES if plan != "causal" for kind in ("e4m3", "int8")
]
each_of_odd = pytest.mark.parametrize(("case", "kind", "plan"), every_pair(ODD, KINDS, SEES), ids=str)
each_twin = pytest.mark.parametrize("twin", [refattn.quantized, fastattn.quantized], ids=["ref", "fast"])
each_package = pytest.mark.parametrize("package", ["refattn", "fastattn"], ids=["ref", "fast"])
each_kind = pytest.mark.parametrize("kind", KINDS)
each_format = pytest.mark.parametrize("kind", [E4M3, E5M2], ids=["e4m3", "e5m2"])


@pytest.fixture(autouse=True)
def only_on_cpu(device):
    if device != "cpu":
        pytest.skip("what a GPU computes is shown in test_quantized_triton.py")


# --- who sees whom, and memory that no query may see ---


@pytest.mark.parametrize(
    ("package", "case", "kind", "plan"), every_pair(["refattn", "fastattn"], ODD, KINDS, SEES), ids=str
)
def test_mask(package, case, kind, plan):
    """Values of 1 under scales other than 1, so that a value that is read without its scale shows, too."""
    case = replace(case, head_size=64, value_head_size=64)
    mixed, arguments = path_of(package, plan)

    def attention(query, key_cache, value_cache, batch, **options):
        *pools, scales = in_8_bits(key_cache, value_cache, kind)
        return plan_and_attend(mixed, query, *pools, batch, **arguments, scales=scales, **options)

    assert_same_masks(read_masks(attention, case), masks_by_hand(case, SEES[plan]))


@pytest.mark.parametrize(("package", "case", "pair"), every_pair(["refattn", "fastattn"], ODD, PAIRS), ids=str)
def test_poison(package, case, pair):
    """Quantized values of NaN, scales of NaN, infinity and 1e4 in slots that no sequence owns change no bit."""
    plan, kind = pair
    mixed, arguments = path_of(package, plan)
    answers = []
    for poison in (HARMLESS, POISON):
        stored = store(case, kind, poison=poison)
        answers.append(plan_and_attend(mixed, *stored.tensors, **arguments, scales=stored.scales, return_lse=True))
    for clean, dirty in zip(*answers, strict=True):
        assert torch.equal(clean, dirty)


# --- the formula ---


@pytest.mark.covers("B95")
@each_of_odd
def test_formula(case, kind, plan):
    stored = store(replace(case, head_size=16, value_head_size=24), kind, dtype=torch.float64)
    assert_is_by_hand(stored, replace(case, head_size=16), plan)


@pytest.mark.covers("A18", "A21", "A23", "B51")
@pytest.mark.parametrize(
    ("kind", "per", "round_query"), every_pair(KINDS, ["number", "head", "sequence"], [False, True]), ids=str
)
def test_scales(kind, per, round_query):
    case = Case("scales", ((4, 6), (1, 37), (9, 17), (0, 5), (3, 2)), heads=(6, 3), head_size=16, padding_rows=2)
    stored = store(case, kind, dtype=torch.float64, per=per, round_query=round_query)
    assert_is_by_hand(stored, case, "causal")


def assert_is_by_hand(stored: Stored, case: Case, plan: str) -> None:
    expected = attended_by_hand(stored, masks_by_hand(case, SEES[plan]))
    for package in ("refattn", "fastattn"):
        mixed, arguments = path_of(package, plan)
        answer = plan_and_attend(mixed, *stored.tensors, **arguments, scales=stored.scales, return_lse=True)
        for one, other in zip(answer, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)


# --- queries that arrive in fp8 ---

FP8_QUERIES = Case("fp8-queries", ((4, 6), (1, 37), (9, 17), (0, 5), (3, 2)), heads=(6, 3), padding_rows=2)


def with_query_in_fp8(stored: Stored) -> tuple[torch.Tensor, Stored]:
    """Return queries as 8-bit values, rows of padding too; and what they stand for, as queries that are not rounded."""
    quantized_values = (stored.query.float() * 3).to(stored.scales.format)
    heads = stored.query.shape[1] // stored.key_cache.shape[2]
    sequences = torch.arange(stored.batch.num_seqs).repeat_interleave(stored.batch.query_lens.long())
    of_query = torch.as_tensor(stored.scales.query).double().expand(stored.batch.num_seqs, stored.key_cache.shape[2])
    numbers = numbers_of(quantized_values)
    numbers[: len(sequences)] *= of_query[sequences].repeat_interleave(heads, 1)[..., None]
    return quantized_values, replace(stored, query=numbers, scales=replace(stored.scales, query=None))


@pytest.mark.covers("B180")
@pytest.mark.parametrize(
    ("package", "kind", "per", "plan"),
    every_pair(["refattn", "fastattn"], [E4M3, E5M2], ["number", "head", "sequence"], ["causal", "window", "local"]),
    ids=str,
)
def test_queries_in_fp8_are_what_they_are_rounded_to(package, kind, per, plan):
    """By hand in float64; the layer has quantized them, and nothing rounds them again."""
    name = next(name for name, dtype in KINDS.items() if dtype == kind)
    stored = store(FP8_QUERIES, name, dtype=torch.float64, per=per)
    quantized_values, numbers = with_query_in_fp8(stored)
    expected, expected_lse = attended_by_hand(numbers, masks_by_hand(FP8_QUERIES, SEES[plan]))
    mixed, arguments = path_of(package, plan)
    out = torch.empty(*quantized_values.shape[:2], stored.value_cache.shape[3])
    call = partial(plan_and_attend, mixed, quantized_values, *stored.tensors[1:], **arguments, scales=stored.scales)
    answer, lse = call(return_lse=True, out=out)
    assert answer is out and lse.dtype == torch.float32
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(lse.double(), expected_lse, rtol=1e-5, atol=1e-5)
    alone, alone_lse = call(return_lse=True)
    assert alone.dtype == torch.bfloat16
    torch.testing.assert_close(alone.double(), expected, rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(alone_lse, lse, rtol=1e-6, atol=1e-6)


@pytest.mark.covers("B180")
@each_package
@pytest.mark.parametrize("per", ["number", "head"])
def test_a_layer_quantizes_queries_as_attention_does(package, per):
    """Under a plan of any path: quantized values made outside give what numbers give that are rounded inside."""
    stored = store(FP8_QUERIES, "e4m3", per=per)
    of_heads = torch.as_tensor(stored.scales.query).expand(3).repeat_interleave(2)[:, None]
    quantized_values = (stored.query / of_heads).clamp(-448, 448).to(E4M3)
    for name, planned in (("quantized", {}), ("cascade", dict(prefixes=())), ("speculative", {})):
        call = partial(plan_and_attend, over_quantized(package, name), **planned, scales=stored.scales, return_lse=True)
        out = torch.empty(*quantized_values.shape[:2], stored.value_cache.shape[3])
        inside, outside = call(*stored.tensors), call(quantized_values, *stored.tensors[1:], out=out)
        for one, other in zip(inside, outside, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


BAD_FP8_QUERIES = {
    "no-scale": (
        "scales.query: expected the scale of a query that comes as float8_e4m3fn [19, 6, 64], got none",
        lambda a: a | dict(scales=replace(a["scales"], query=None)),
    ),
    "another-format": (
        "query: expected float8_e4m3fn [t, h, d], got float8_e5m2",
        lambda a: a | dict(query=a["query"].to(E5M2)),
    ),
    "no-pages": ("query: expected float8_e4m3fn [t, h, d]", lambda a: a | dict(query=a["query"][0])),
    "another-head-size": (
        "key_cache: expected float8_e4m3fn [n, p, hk, d=32]",
        lambda a: a | dict(query=a["query"][..., :32]),
    ),
    "out-of-quantized values": (
        "out: expected bfloat16 [t=19, h=6, dv=64]",
        lambda a: a | dict(out=torch.zeros(19, 6, 64).to(E4M3)),
    ),
    "scale-of-another-number-of-heads": (
        "scales.query: expected a number or float32 [hk=3]",
        lambda a: a | dict(scales=replace(a["scales"], query=torch.ones(2))),
    ),
}


@each_package
@pytest.mark.usefixtures("shapes_unchecked")
@pytest.mark.parametrize(("message", "change"), BAD_FP8_QUERIES.values(), ids=BAD_FP8_QUERIES)
def test_bad_queries_in_fp8_are_named(package, message, change):
    stored = store(FP8_QUERIES, "e4m3", per="head")
    quantized_values, _ = with_query_in_fp8(stored)
    mixed, _ = path_of(package)
    plan = mixed.plan(stored.batch, block_size=16)
    query, *pools = quantized_values, stored.key_cache, stored.value_cache
    good = dict(query=query, key_cache=pools[0], value_cache=pools[1], plan=plan, scales=stored.scales)
    with pytest.raises(ValueError, match=re.escape(message)):
        mixed.attention(**change(good))


# --- the twins ---


@pytest.mark.covers("A22", "B93")
@each_of_odd
def test_twins(case, kind, plan):
    assert_twins_agree_over_quantized(store(case, kind), plan)


@pytest.mark.covers("B92", "B224")
@pytest.mark.parametrize(
    ("kind", "case", "options"), every_pair(KINDS, FEW, [name for name in OPTIONS if name != "plain"]), ids=str
)
def test_twins_with_options(case, kind, options):
    options = per_head(OPTIONS[options], case, "cpu")
    plan = "window" if options.pop("window_size", None) else "causal"
    options.pop("causal", None)
    assert_twins_agree_over_quantized(store(case, kind), plan, **options)


@pytest.mark.parametrize(
    ("kind", "dtype", "spread"), every_pair(KINDS, [torch.bfloat16, torch.float16], [False, True]), ids=str
)
def test_twins_of_half_types_over_padded_pools(kind, dtype, spread):
    """Page strides that are not the product of the sizes, of the pools and of the scales beside them."""
    case = Case("mixed", ((4, 6), (1, 70), (10, 33), (1, 65), (0, 9), (5, 2)), heads=(6, 3), padding_rows=2)
    assert_twins_agree_over_quantized(store(case, kind, dtype=dtype, spread=spread))
    assert_twins_agree_over_quantized(store(case, kind, dtype=dtype, spread=spread), "local", sinks=torch.randn(6))


@of_batches
@given(case=ragged_cases(head_sizes=(16, 64)), kind=st.sampled_from(list(KINDS)), plan=st.sampled_from(list(SEES)))
def test_twins_of_drawn_batches(case, kind, plan):
    case = replace(case, block_size=16 if plan == "local" else case.block_size)
    assert_twins_agree_over_quantized(store(case, kind), plan)


@pytest.mark.covers("D126")
def test_scales_of_sequences_go_with_virtual_ones():
    """A sequence without queries has no virtual one, and one with many has several (SGLang 37785)."""
    case = Case("virtual", ((0, 60), (70, 130), (1, 49), (0, 9), (2, 97)), heads=(4, 2), head_size=16)
    stored = store(case, "e4m3", dtype=torch.float64)
    expected, _ = attended_by_hand(stored, masks_by_hand(case, SEES["local"]))
    for plans in ("refattn", "fastattn"):
        for attends in ("refattn", "fastattn"):
            mixed, arguments = path_of(plans, "local")
            mixed.attention = importlib.import_module(f"{attends}.quantized").attention
            out = plan_and_attend(mixed, *stored.tensors, **arguments, scales=stored.scales)
            torch.testing.assert_close(out, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.covers("B83")
@each_package
@each_kind
def test_levels_of_a_cascade_merge(package, kind):
    """Each level of its plan, one by one, over the same bytes; and all at once: both are attention over all keys."""
    cascade, merge, module = (
        importlib.import_module(f"{package}.{name}") for name in ("cascade", "merge", "quantized")
    )
    case = Case("", ((2, 70), (1, 50), (3, 35)), heads=(4, 2), head_size=16)
    stored = store(case, kind, per="head")
    table = stored.batch.block_table.clone()
    table[1:, :2] = table[0, :2]  # 32 keys are everybody's
    batch = replace(stored.batch, block_table=table)
    call = partial(module.attention, *stored.tensors[:3], scales=stored.scales, return_lse=True)
    plan = cascade.plan(batch, prefixes=[Prefix(0, 3, 32)], block_size=16)
    assert len(plan.levels) == 2
    merged = merge.merge(*zip(*map(call, plan.levels), strict=True))
    for one, at_once, other in zip(merged, call(plan), call(module.plan(batch, block_size=16)), strict=True):
        torch.testing.assert_close(one, other, rtol=2e-6, atol=2e-6)
        torch.testing.assert_close(at_once, other, rtol=2e-6, atol=2e-6)


@pytest.mark.covers("B98", "B100")
@each_kind
@each_package
def test_decodes_and_prefills_agree(package, kind):
    """The same bytes, read by one query and by many, from 88 to 256 keys (vLLM 54035: from 97 keys on they did not)."""
    module = importlib.import_module(f"{package}.quantized")
    for s in (88, 96, 97, 129, 256):
        case = Case("", ((s, s),), heads=(4, 2), head_size=32)
        stored = store(case, kind)
        one = make_batch([1], [s], [stored.batch.block_table[0, : -(-s // 16)].tolist()])
        call = partial(plan_and_attend, module, scales=stored.scales, return_lse=True)
        many = call(*stored.tensors)
        alone = call(stored.query[-1:], *stored.tensors[1:3], one)
        for row, rows in zip(alone, many, strict=True):
            torch.testing.assert_close(row[0], rows[-1], rtol=2e-6, atol=2e-6)
        if package == "refattn":
            continue
        many = call(*stored.tensors, batch_invariant=True)
        for few in (1, 7, 40):
            batch = make_batch([few], [s], [stored.batch.block_table[0, : -(-s // 16)].tolist()])
            alone = call(stored.query[-few:], *stored.tensors[1:3], batch, batch_invariant=True)
            for row, rows in zip(alone, many, strict=True):
                assert torch.equal(row, rows[-few:])


def test_128k_keys():
    """With queries of zero the answer is the mean value, and the LSE the logarithm of the number of keys."""
    n, p = 131072 // 128, 128
    key_cache, value_cache = fastattn.kv_cache.allocate(n, p, 1, 16, dtype=E4M3)
    value_cache.view(torch.uint8).copy_(torch.randint(0, 120, value_cache.shape))
    batch = make_batch([1], [n * p], [torch.randperm(n).tolist()])
    scales = Fp8Scales(0.3, 1.7)
    out, lse = plan_and_attend(
        fastattn.quantized, torch.zeros(1, 2, 16), key_cache, value_cache, batch, scales=scales, return_lse=True
    )
    expected = decoded(E4M3)[value_cache.view(torch.uint8).long()].mean((0, 1)) * 1.7
    torch.testing.assert_close(out[0].double(), expected.expand(2, -1), rtol=1e-4, atol=0)
    torch.testing.assert_close(lse, torch.full((1, 2), math.log(n * p)), rtol=1e-6, atol=0)


# --- what is written ---


def pools(twin, kind, *, n=5, p=4, hk=2, d=8, dv=6, layout="NHD", scale=None):
    """Make pools full of garbage, and scales for a write."""
    cache = importlib.import_module(f"{twin.__name__.partition('.')[0]}.kv_cache")
    if kind in ("e4m3", "e5m2"):
        key_cache, value_cache = cache.allocate(n, p, hk, d, value_head_size=dv, layout=layout, dtype=KINDS[kind])
        scales = Fp8Scales(in_scales(hk, seed=5), in_scales(hk, seed=6), format=KINDS[kind])
        scales = scales if scale is None else Fp8Scales(scale, scale, format=KINDS[kind])
    else:
        key_cache, value_cache, key_scale = twin.allocate_int8(
            n, p, hk, d, value_head_size=dv, layout=layout, value_dtype=KINDS[kind]
        )
        scales = Int8Scales(key_scale.fill_(-7.0), in_scales(hk, dv, seed=7) / 40 if kind == "int8" else None)
    for x in (key_cache, value_cache):
        x.fill_(torch.nan if x.is_floating_point() else 99)
    return key_cache, value_cache, scales


@pytest.mark.covers("B101")
@each_twin
@each_format
def test_every_code_is_written_and_read_back(twin, kind):
    """Under a scale that is a power of two; -0.0, subnormals and NaN among them. Infinity becomes the largest."""
    numbers = decoded(kind).float()
    key = numbers.view(4, 8, 8) * 2.0**-3
    key_cache, value_cache = (torch.full((1, 4, 8, 8), 99, dtype=torch.uint8) for _ in range(2))
    scales = Fp8Scales(2.0**-3, 2.0**-3, format=kind)
    twin.write(key, key, key_cache, value_cache, torch.arange(4), scales=scales)
    quantized_values = torch.arange(256)
    quantized_values = torch.where(numbers.isinf(), quantized_values - 1, quantized_values)
    for cache in (key_cache, value_cache):
        read = decoded(kind)[cache.flatten().long()]
        assert torch.equal(read.isnan(), numbers.isnan())
        assert torch.equal(cache.flatten()[~numbers.isnan()], quantized_values[~numbers.isnan()].to(torch.uint8))


@pytest.mark.covers("A17", "A20")
@each_twin
@each_format
def test_every_code_is_read(twin, kind):
    """Each quantized value as the one key, the one value, of a sequence: its value comes out, its score is the LSE."""
    quantized_values = torch.arange(256, dtype=torch.uint8).view(256, 1, 1, 1)
    finite = decoded(kind).isfinite()
    batch = make_batch([1] * 256, [1] * 256, [[i] for i in range(256)])
    query, options = torch.full((256, 1, 1), 0.5), dict(softmax_scale=1.0, return_lse=True)
    for cache, kernel in itertools.product(
        (quantized_values, quantized_values.view(kind)), (None, "cpu") if twin is fastattn.quantized else (None,)
    ):
        with nullcontext() if kernel is None else fastattn.use_kernel(kernel):
            out, lse = plan_and_attend(
                twin, query, cache, cache, batch, scales=Fp8Scales(0.5, 3.0, format=kind), **options
            )
        assert torch.equal(out[finite].flatten().double(), decoded(kind)[finite] * 3)
        assert torch.equal(lse[finite].flatten().double(), decoded(kind)[finite] / 4)
        assert out[~finite].isnan().all()


@pytest.mark.covers("A19")
@each_twin
@each_format
def test_fp8_rounds_to_the_nearest_and_saturates(twin, kind):
    largest, smallest = torch.finfo(kind).max, torch.finfo(kind).smallest_normal
    x = torch.cat(
        [
            torch.tensor([0.0, -0.0, largest, largest * 1.03, largest * 2, -largest * 1e3, 3e38, math.inf, -math.inf]),
            torch.tensor([1.0625, 1.1875, 1.125, 1.375, smallest / 2, smallest / 3, smallest * 1e-3, 1e-45]),
            torch.randn(39) * 10,
        ]
    )
    for scale in (1.0, 0.7):
        given = x * scale
        key_cache, value_cache = torch.zeros(2, 1, 1, 1, 56, dtype=torch.uint8)
        twin.write(
            given.view(1, 1, 56),
            given.view(1, 1, 56),
            key_cache,
            value_cache,
            torch.zeros(1).long(),
            scales=Fp8Scales(scale, scale, format=kind),
        )
        divided = (given.numpy() / np.float32(scale)).clip(-largest, largest)
        assert key_cache.flatten().tolist() == [nearest(float(y), kind) for y in divided]
        assert torch.equal(key_cache, value_cache)


@pytest.mark.covers("A19")
@each_twin
@each_kind
@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("spread", [False, True], ids=["varlen", "padded"])
def test_write_by_hand(twin, kind, layout, spread):
    key_cache, value_cache, scales = pools(twin, kind, layout=layout)
    if spread:
        key_cache, value_cache = apart(key_cache), apart(value_cache)
        if isinstance(scales, Int8Scales):
            scales = Int8Scales(apart(scales.key), scales.value)
    before = [x.clone() for x in (key_cache, value_cache)]
    fused = torch.randn(4, 2, 14) * 3  # keys and values out of one projection
    key, value = fused[..., :8], fused[..., 8:]
    key[0, 1] = 0.0
    value[2, 0] = 1e4 if kind == "int8" else 0.0
    value = value.half() if kind == "int8-half" else value
    slots = [17, -1, 0, 6]
    twin.write(key, value, key_cache, value_cache, torch.tensor(slots), scales=scales)
    places = {slot: t for t, slot in enumerate(slots) if slot >= 0}
    for block in range(5):
        for row in range(4):
            t = places.get(block * 4 + row)
            for head in range(2):
                stored = key_cache[block, row, head], value_cache[block, row, head]
                if t is None:
                    for one, old in zip(stored, before, strict=True):
                        assert torch.equal(bits(one), bits(old[block, row, head])), "written where no slot points"
                    assert not isinstance(scales, Int8Scales) or scales.key[block, row, head] == -7
                    continue
                x, y = key[t, head].numpy(), value[t, head].numpy()
                if isinstance(scales, Fp8Scales):
                    expected = [
                        [nearest(float(z), scales.format) for z in numbers / scale[head].numpy()]
                        for numbers, scale in ((x, scales.key), (y, scales.value))
                    ]
                    assert [bits(one).tolist() for one in stored] == expected
                    continue
                scale = np.abs(x).max() / np.float32(127) or np.float32(1)
                assert scales.key[block, row, head].item() == scale
                assert stored[0].tolist() == np.rint(x / scale).tolist()
                if kind == "int8":
                    y = np.clip(np.rint(y / scales.value[head].numpy()), -127, 127)
                assert stored[1].tolist() == y.tolist()


@pytest.mark.covers("B95")
@each_twin
def test_int8_rounds_to_even_and_zeros_come_back_as_zeros(twin):
    key_cache, value_cache, scales = pools(twin, "int8-half", n=1, p=3, hk=1, d=6, dv=2)
    key = torch.tensor([[127.0, 0.5, 1.5, 2.5, -0.5, -3.5], [0.0, -0.0, 0.0, 0.0, 0.0, 0.0], [1e-45] * 6])[:, None]
    value = torch.ones(3, 1, 2, dtype=torch.float16)
    twin.write(key, value, key_cache, value_cache, torch.arange(3), scales=scales)
    assert key_cache[0, 0, 0].tolist() == [127, 0, 2, 2, 0, -4]
    assert not key_cache[0, 1:].any()
    assert scales.key[0, :, 0].tolist() == [1.0, 1.0, 1.0]


@each_twin
@each_kind
@pytest.mark.parametrize("of", ["key", "value", "infinite key"])
def test_what_is_no_number_comes_out_as_nan(twin, kind, of):
    """Int8 has no NaN: the scale of the token's key has it. Of an infinite key, fp8 has the largest number."""
    key_cache, value_cache, scales = pools(twin, kind, n=2, d=8, dv=8)
    tokens = dict(key=torch.randn(6, 2, 8), value=torch.randn(6, 2, 8))
    tokens[of.split()[-1]][3, 1, 5] = torch.inf if "infinite" in of else torch.nan
    value = tokens["value"].half() if kind == "int8-half" else tokens["value"]
    twin.write(tokens["key"], value, key_cache, value_cache, torch.arange(6), scales=scales)
    batch = make_batch([1, 1], [6, 3], [[0, 1], [0]])  # the second does not see that token, in its own last block
    out = plan_and_attend(twin, torch.randn(2, 4, 8), key_cache, value_cache, batch, scales=scales)
    assert out[1].isfinite().all() and out[0, :2].isfinite().all()
    assert out[0, 2:, 5].isnan().all() == (of != "infinite key" or kind.startswith("int8"))


@pytest.mark.covers("B97")
@given(data=st.data(), kind=st.sampled_from(list(KINDS)), dtype=st.sampled_from([torch.float32, torch.bfloat16]))
def test_twins_write_the_same_bits(data, kind, dtype):
    slots = data.draw(st.lists(st.integers(-1, 19), unique=True, max_size=20))
    key, value = torch.randn(len(slots), 2, 8).to(dtype), torch.randn(len(slots), 2, 6).to(dtype)
    value = value.half() if kind == "int8-half" else value
    written = []
    for twin in (refattn.quantized, fastattn.quantized):
        *both, scales = pools(twin, kind, layout=data.draw(st.sampled_from(["NHD", "HND"])))
        twin.write(key, value, *both, torch.tensor(slots, dtype=torch.int64), scales=scales)
        written.append([*both, *([scales.key] if isinstance(scales, Int8Scales) else [])])
    for ours, theirs in zip(*written, strict=True):
        assert torch.equal(bits(ours), bits(theirs))


# --- pools, scales ---


@pytest.mark.covers("B48", "B94")
@each_twin
@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("value_dtype", [torch.int8, torch.float16, torch.bfloat16], ids=str)
def test_int8_pools_share_one_buffer(twin, layout, value_dtype):
    """Keys first, and what is left of the buffer is values: two thirds of it in 16 bits, in a flat order."""
    n, p, hk, d = 3, 4, 2, 8
    key_cache, value_cache, scales = twin.allocate_int8(n, p, hk, d, layout=layout, value_dtype=value_dtype)
    assert key_cache.shape == value_cache.shape == (n, p, hk, d) and scales.shape == (n, p, hk)
    assert key_cache.untyped_storage().data_ptr() == value_cache.untyped_storage().data_ptr()
    size = n * p * hk * d
    assert key_cache.untyped_storage().nbytes() == size * (1 + value_dtype.itemsize)
    strides = (p * hk * d, hk * d, d, 1) if layout == "NHD" else (p * hk * d, d, p * d, 1)
    assert key_cache.stride() == value_cache.stride() == strides
    assert value_cache.storage_offset() * value_dtype.itemsize == size and key_cache.storage_offset() == 0
    assert scales.stride() == tuple(stride // d for stride in strides[:3])
    assert not key_cache.any() and not value_cache.any() and (scales == 1).all()


@each_twin
@pytest.mark.parametrize("kind", ["int8", "int8-half"])
def test_copied_and_swapped_blocks_take_their_scales_along(twin, kind):
    cache = importlib.import_module(f"{twin.__name__.partition('.')[0]}.kv_cache")
    key_cache, value_cache, scales = pools(twin, kind, n=4, dv=8)
    key, value = torch.randn(8, 2, 8), torch.randn(8, 2, 8)
    value = value.half() if kind == "int8-half" else value
    twin.write(key, value, key_cache, value_cache, torch.arange(8), scales=scales)
    call = partial(plan_and_attend, twin, torch.randn(8, 4, 8), key_cache, value_cache, scales=scales)
    before = call(make_batch([8], [8], [[0, 1]]))
    caches = [key_cache, value_cache, scales.key]
    cache.copy_blocks(caches, torch.tensor([[0, 3]]))
    assert torch.equal(call(make_batch([8], [8], [[3, 1]])), before)
    host = [torch.zeros_like(x) for x in caches]
    cache.swap_blocks(caches, host, torch.tensor([[1, 0], [3, 2]]))
    cache.swap_blocks(host, caches, torch.tensor([[0, 2], [2, 1]]))
    assert torch.equal(call(make_batch([8], [8], [[1, 2]])), before)


@pytest.mark.covers("B96")
@each_twin
def test_values_are_calibrated_per_channel(twin):
    values = [3 * torch.randn(9, 2, 6), torch.randn(0, 2, 6), torch.randn(5, 2, 6)]
    for value in values:
        value[:, 1, 2] = 0.0
    largest = np.abs(torch.cat(values).numpy()).max(0)
    expected = np.where(largest == 0, np.float32(1), largest / np.float32(127))
    assert np.array_equal(twin.value_scales(values).numpy(), expected)
    assert torch.equal(twin.value_scales([x.bfloat16() for x in values[:2]]), twin.value_scales([values[0].bfloat16()]))
    assert torch.equal(twin.value_scales([values[1]]), torch.ones(2, 6))


# --- what quantization adds ---


def test_the_error_of_each_format_is_that_of_its_steps():
    """Of Gaussian numbers. Rounding moves a number by half a step at most, and by step / sqrt(12) in the mean square.

    The steps: 2^-3 (e4m3) or 2^-2 (e5m2) of the power of two below a number, the smallest normal one at least; for
    int8 one 127th of the largest of a row (keys) or of a channel (values).
    """
    key, value = torch.randn(2, 512, 2, 128)
    for kind in KINDS:
        key_cache, value_cache, scales = pools(fastattn.quantized, kind, n=32, p=16, d=128, dv=128, scale=0.02)
        if kind == "int8":
            scales = Int8Scales(scales.key, fastattn.quantized.value_scales([value]))
        tokens = value.half() if kind == "int8-half" else value
        fastattn.quantized.write(key, tokens, key_cache, value_cache, torch.arange(512), scales=scales)
        for x, cache in ((key, key_cache), (value, value_cache)):
            read = numbers_of(cache.flatten(0, 1))
            if isinstance(scales, Fp8Scales):
                read = read * np.float32(0.02).item()
                unit = (x.abs().double() / np.float32(0.02).item()).clamp(
                    min=torch.finfo(scales.format).smallest_normal
                )
                step = 2.0 ** unit.log2().floor() * torch.finfo(scales.format).eps * np.float32(0.02).item()
            elif cache is key_cache:
                step = scales.key.flatten(0, 1)[..., None].double()
                read = read * step
            elif kind == "int8":
                step = scales.value.double()
                read = read * step
            else:
                step = x.abs().double().clamp(min=torch.finfo(torch.float16).smallest_normal)
                step = 2.0 ** step.log2().floor() * torch.finfo(torch.float16).eps
            error, step = read - x.double(), step.expand(x.shape)
            assert (error.abs() <= step / 2 * (1 + 1e-4)).all(), kind
            rms = error.square().mean().sqrt() / step.square().mean().sqrt()
            assert abs(rms * math.sqrt(12) - 1) < 0.05, kind
            if isinstance(scales, Fp8Scales):
                assert (error.abs() <= x.abs() * torch.finfo(scales.format).eps / 2 + 1e-4).all(), kind


@each_kind
def test_the_error_of_an_answer_is_bounded_by_those_of_its_keys_and_values(kind):
    """Scores off by `a` at most change a weight by a factor of exp(2 a) at most; values off by `b`, an answer by b."""
    s, d = 200, 64
    key, value, query = torch.randn(s, 2, d), torch.randn(s, 2, d), torch.randn(s, 4, d)
    key_cache, value_cache, scales = pools(refattn.quantized, kind, n=13, p=16, d=d, dv=d, scale=0.02)
    if kind == "int8":
        scales = Int8Scales(scales.key, refattn.quantized.value_scales([value]))
    tokens = value.half() if kind == "int8-half" else value
    refattn.quantized.write(key, tokens, key_cache, value_cache, torch.arange(s), scales=scales)
    plain = build(Case("", ((s, s),)), keys=[key], values=[value])
    out, lse = plan_and_attend(
        fastattn.quantized,
        query,
        key_cache,
        value_cache,
        make_batch([s], [s], [list(range(13))]),
        scales=scales,
        return_lse=True,
    )
    exact, exact_lse = plan_and_attend(
        importlib.import_module("refattn.chunked_prefill"), query, *plain.tensors[1:], return_lse=True
    )
    # Half a step, of the format or of 127 to the largest element of a row; of the query, too, for int8.
    half_step = {"e4m3": 2.0**-4, "e5m2": 2.0**-3}.get(kind)

    def off(x, largest):
        return x.abs() * half_step + 1e-4 if half_step else (largest / 254).expand(x.shape)

    q, k = query.unflatten(1, (2, 2)), key
    key_off = off(k, k.abs().amax(-1, keepdim=True))
    query_off = torch.zeros_like(q) if half_step else off(q, q.abs().amax(-1, keepdim=True))
    score_off = torch.einsum("thgd,shd->thgs", q.abs() + query_off, key_off) + torch.einsum(
        "thgd,shd->thgs", query_off, k.abs()
    )
    a = score_off.amax(-1).flatten(1) * d**-0.5  # [t, h]
    b = off(value, value.abs().amax(0)).amax((0, 2)) if kind != "int8-half" else torch.full((2,), 4 * 2.0**-11)
    b = b.repeat_interleave(2)[None, :]
    largest = value.abs().amax((0, 2)).repeat_interleave(2)[None, :]
    assert ((lse - exact_lse).abs() <= a * 1.001 + 1e-5).all()
    bound = (torch.exp(2 * a) - 1) * largest + b
    assert ((out - exact).abs().amax(-1) <= bound * 1.001 + 1e-5).all()


# --- bad input ---


def good(kind: str) -> dict:
    query = torch.randn(3, 4, 8)
    key_cache, value_cache, scales = pools(refattn.quantized, kind)
    for x in (key_cache, value_cache):
        x.copy_(torch.zeros(x.shape))
    batch = make_batch([2, 1], [5, 3], [[1, 2], [4]])
    return dict(query=query, key_cache=key_cache, value_cache=value_cache, batch=batch, scales=scales)


def int8(key=(5, 4, 2), value=(2, 6)):
    return Int8Scales(torch.ones(key), None if value is None else torch.ones(value))


BAD_ATTENTION = {
    "scales: expected Fp8Scales or Int8Scales, got None": ("e4m3", dict(scales=None)),
    "scales: expected Fp8Scales or Int8Scales, got dict": ("e4m3", dict(scales={"key": 1.0, "value": 1.0})),
    "key_cache: expected float8_e4m3fn [n, p, hk, d=8], got float8_e5m2": (
        "e4m3",
        dict(key_cache=torch.zeros(5, 4, 2, 8, dtype=E5M2)),
    ),
    "key_cache: expected float8_e4m3fn [n, p, hk, d=8], got float32": ("e4m3", dict(key_cache=torch.zeros(5, 4, 2, 8))),
    "value_cache: expected float8_e4m3fn [n=5, p=4, hk=2, dv], got uint8": (
        "e4m3",
        dict(value_cache=torch.zeros(5, 4, 2, 6, dtype=torch.uint8)),
    ),
    "key_cache: expected int8 [n, p, hk, d=8], got uint8": (
        "int8",
        dict(key_cache=torch.zeros(5, 4, 2, 8, dtype=torch.uint8)),
    ),
    "value_cache: expected int8 [n=5, p=4, hk=2, dv], got float16": (
        "int8",
        dict(value_cache=torch.zeros(5, 4, 2, 6).half()),
    ),
    "value_cache: expected a floating point type (bfloat16, float16, float32 or float64), as there is no scales.va": (
        "int8",
        dict(scales=int8(value=None)),
    ),
    "scales.key: expected a number or float32 [hk=2] or [b=2, hk=2], got float32 [3]": (
        "e4m3",
        dict(scales=Fp8Scales(torch.ones(3), 1.0)),
    ),
    "scales.value: expected a number or float32 [hk=2] or [b=2, hk=2], got float32 [3, 2]": (
        "e4m3",
        dict(scales=Fp8Scales(1.0, torch.ones(3, 2))),
    ),
    "scales.query: expected a number or float32 [hk=2] or [b=2, hk=2], got float32 [2, 4]": (
        "e4m3",
        dict(scales=Fp8Scales(1.0, 1.0, torch.ones(2, 4))),
    ),
    "scales.key: expected float32 [n=5, p=4, hk=2], got float32 [5, 4, 3]": (
        "int8",
        dict(scales=int8(key=(5, 4, 3), value=(3, 6))),
    ),
    "scales.value: expected float32 [hk=2, dv=6], got float32 [2, 8]": ("int8", dict(scales=int8(value=(2, 8)))),
    "scales.key: expected cpu, where key_cache is, got meta": (
        "e4m3",
        dict(scales=Fp8Scales(torch.ones(2, device="meta"), 1.0)),
    ),
    "scales.value: expected cpu, where key_cache is, got meta": (
        "int8",
        dict(scales=Int8Scales(torch.ones(5, 4, 2), torch.ones(2, 6, device="meta"))),
    ),
    "query: expected a floating point type": ("e4m3", dict(query=torch.zeros(3, 4, 8, dtype=torch.int8))),
    "scales.query: expected the scale of a query": ("int8", dict(query=torch.zeros(3, 4, 8).to(E4M3))),
    "query: expected a number of heads that hk=2 divides": ("int8", dict(query=torch.zeros(3, 3, 8))),
    "sinks: expected floating point [h=4]": ("e4m3", dict(sinks=torch.zeros(3))),
    "out: expected float32 [t=3, h=4, dv=6]": ("int8", dict(out=torch.zeros(3, 4, 8))),
    "key_cache: expected blocks of 8 tokens, as in the plan, got p=4": ("e4m3", dict(block_size=8)),
}


@each_twin
@pytest.mark.parametrize("message", BAD_ATTENTION)
@pytest.mark.usefixtures("shapes_unchecked")
def test_bad_arguments_of_attention(twin, message):
    kind, bad = BAD_ATTENTION[message]
    arguments = good(kind)
    plan_and_attend(twin, **good(kind))
    with pytest.raises(ValueError, match="^" + re.escape(message)):
        plan_and_attend(twin, **{**arguments, **bad})


@pytest.mark.parametrize("message", [message for message, (_, bad) in BAD_ATTENTION.items() if "block_size" not in bad])
@pytest.mark.usefixtures("shapes_unchecked")
def test_bad_arguments_are_named_where_the_plan_keeps_a_good_call(message):
    kind, bad = BAD_ATTENTION[message]
    arguments = good(kind)
    plan = fastattn.quantized.plan(arguments.pop("batch"), block_size=4)
    first = fastattn.quantized.attention(**arguments, plan=plan)
    options = AttentionOptions(**{name: bad[name] for name in bad if name == "sinks"})
    wrong = {**arguments, **{name: bad[name] for name in bad if name != "sinks"}}
    with pytest.raises(ValueError, match="^" + re.escape(message)):
        fastattn.quantized.attention(**wrong, plan=plan, options=options)
    with mock.patch.object(order, "choose", side_effect=AssertionError("it was not kept")):
        assert torch.equal(fastattn.quantized.attention(**arguments, plan=plan), first)


BAD_WRITES = {
    "key: expected a floating point type (bfloat16, float16, float32 or float64), got int8": (
        "int8",
        dict(key=torch.zeros(2, 2, 8, dtype=torch.int8)),
    ),
    "value: expected float32 [t=2, hk=2, dv=6], got bfloat16": ("e4m3", dict(value=torch.zeros(2, 2, 6).bfloat16())),
    "value: expected float16 [t=2, hk=2, dv=6], got float32": ("int8-half", dict(value=torch.zeros(2, 2, 6))),
    "key: expected float32 [t, hk=2, d=8], got float32 [2, 2, 4]": ("e5m2", dict(key=torch.zeros(2, 2, 4))),
    "slot_mapping: expected int64 [t=2], got int32": ("e4m3", dict(slot_mapping=torch.zeros(2, dtype=torch.int32))),
    "slot_mapping: expected slots in 0..19, or -1 for padding, got 20": (
        "int8",
        dict(slot_mapping=torch.tensor([3, 20])),
    ),
    "slot_mapping: expected each slot once, got slot 7": ("e4m3", dict(slot_mapping=torch.tensor([7, 7]))),
    "scales.key: expected a number or float32 [hk=2], as a token that is written knows no sequence, got float32": (
        "e4m3",
        dict(scales=Fp8Scales(torch.ones(2, 2), 1.0)),
    ),
    "scales.value: expected a number or float32 [hk=2]": ("e4m3", dict(scales=Fp8Scales(1.0, torch.ones(5)))),
    "scales.key: expected float32 [n=5, p=4, hk=2], got float32 [5, 2, 4]": (
        "int8",
        dict(scales=int8(key=(5, 2, 4), value=(4, 6))),
    ),
    "key_cache: expected float8_e5m2 [n, p, hk, d], got float8_e4m3fn": (
        "e4m3",
        dict(scales=Fp8Scales(1.0, 1.0, format=E5M2)),
    ),
    "key_cache: expected int8 [n, p, hk, d], got float8_e4m3fn": ("e4m3", dict(scales=int8())),
    "value_cache: expected [n=5, p=4, hk=2, dv], got float8_e4m3fn [3,": (
        "e4m3",
        dict(value_cache=torch.zeros(3, 4, 2, 6).to(E4M3)),
    ),
}


@each_twin
@pytest.mark.parametrize("message", BAD_WRITES)
@pytest.mark.usefixtures("shapes_unchecked")
def test_bad_writes_are_named_and_nothing_is_written(twin, message):
    kind, bad = BAD_WRITES[message]
    key_cache, value_cache, scales = pools(twin, kind)
    value = torch.randn(2, 2, 6)
    arguments = dict(
        key=torch.randn(2, 2, 8),
        value=value.half() if kind == "int8-half" else value,
        key_cache=key_cache,
        value_cache=value_cache,
        slot_mapping=torch.tensor([3, 5]),
        scales=scales,
    )
    given = {**arguments, **bad}
    memory = [given["key_cache"], given["value_cache"]]
    memory += [given["scales"].key] if isinstance(given["scales"], Int8Scales) else []
    before = [bits(x).clone() for x in memory]
    with pytest.raises(ValueError, match="^" + re.escape(message)):
        twin.write(**given)
    assert all(torch.equal(bits(x), old) for x, old in zip(memory, before, strict=True))
    twin.write(**arguments)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Fp8Scales(0.0, 1.0), "scales.key: expected a finite number above 0, got 0.0"),
        (lambda: Fp8Scales(1.0, math.nan), "scales.value: expected a finite number above 0, got nan"),
        (lambda: Fp8Scales(1.0, 1.0, math.inf), "scales.query: expected a finite number above 0, got inf"),
        (lambda: Fp8Scales(1e39, 1.0), "scales.key: expected a number of float32, from 1.4e-45 to 3.4e+38, got 1e+39"),
        (lambda: Fp8Scales(1.0, 1e-46), "scales.value: expected a number of float32, from 1.4e-45 to 3.4e+38, got 1e-"),
        (lambda: Fp8Scales(None, 1.0), "scales.key: expected a finite number above 0, got None"),
        (lambda: Fp8Scales(torch.tensor([1.0, -1.0]), 1.0), "scales.key: expected finite numbers above 0, got -1.0"),
        (lambda: Fp8Scales(1.0, torch.tensor([[math.inf]])), "scales.value: expected finite numbers above 0, got inf"),
        (
            lambda: Fp8Scales(torch.ones(2).half(), 1.0),
            "scales.key: expected a number or float32 [hk] or [b, hk], got float16",
        ),
        (
            lambda: Fp8Scales(torch.ones(()), 1.0),
            "scales.key: expected a number or float32 [hk] or [b, hk], got float32 []",
        ),
        (
            lambda: Fp8Scales(1.0, 1.0, format=torch.int8),
            "scales.format: expected float8_e4m3fn or float8_e5m2, got int8",
        ),
        (lambda: Int8Scales(torch.ones(5, 4)), "scales.key: expected float32 [n, p, hk], got float32 [5, 4]"),
        (lambda: Int8Scales(torch.ones(5, 4, 2).half()), "scales.key: expected float32 [n, p, hk], got float16"),
        (lambda: int8(value=(2,)), "scales.value: expected float32 [hk, dv], got float32 [2]"),
        (
            lambda: Int8Scales(torch.ones(5, 4, 2), torch.zeros(2, 6)),
            "scales.value: expected finite numbers above 0, got 0.0",
        ),
    ],
)
@pytest.mark.usefixtures("shapes_unchecked")
def test_bad_scales_are_named(make, message):
    with pytest.raises(ValueError, match="^" + re.escape(message)):
        make()


@each_twin
@pytest.mark.usefixtures("shapes_unchecked")
def test_bad_sizes_and_values_are_named(twin):
    for sizes, options, message in (
        ((0, 4, 2, 8), {}, "num_blocks: expected a positive int, got 0"),
        ((5, 4, 2, 8), dict(value_head_size=2.5), "value_head_size: expected a positive int, got 2.5"),
        ((5, 4, 2, 8), dict(layout="DHN"), 'layout: expected "NHD" or "HND"'),
        ((5, 4, 2, 8), dict(value_dtype="int8"), "value_dtype: expected a torch.dtype, got 'int8'"),
        ((5, 4, 2, 8), dict(value_dtype=torch.int32), "value_dtype: expected int8, bfloat16, float16, float32"),
        ((5, 4, 2, 8), dict(device="nowhere"), "device: expected a torch.device or its name"),
        ((1, 1, 1, 3), dict(value_dtype=torch.float16), "head_size: expected keys of a multiple of 2 bytes in all"),
    ):
        with pytest.raises(ValueError, match="^" + re.escape(message)):
            twin.allocate_int8(*sizes, **options)
    for values, message in (
        ([], "values: expected at least one tensor [t, hk, dv], got none"),
        (torch.zeros(3, 2, 6), "values: expected a list of tensors [t, hk, dv], got float32 [3, 2, 6]"),
        ([torch.zeros(3, 2)], "values[0]: expected [t, hk, dv], got float32 [3, 2]"),
        ([torch.zeros(3, 2, 6), torch.zeros(3, 2, 7)], "values[1]: expected [t, hk=2, dv=6], got float32 [3, 2, 7]"),
        ([torch.zeros(3, 2, 6, dtype=torch.int8)], "values[0]: expected a floating point type, got int8"),
        ([torch.full((3, 2, 6), math.inf)], "values[0]: expected finite numbers"),
    ):
        with pytest.raises(ValueError, match="^" + re.escape(message)):
            twin.value_scales(values)


@pytest.mark.usefixtures("shapes_unchecked")
def test_scales_of_sequences_fit_the_batch_of_a_plan():
    """A plan of virtual sequences has no number of those of the batch, so it needs as many as it has parts of."""
    case = Case("", ((1, 60), (1, 130)), heads=(4, 2), head_size=16)
    stored = store(case, "e4m3")
    plan = refattn.local.plan(stored.batch, chunk_size=CHUNK, block_size=16)
    assert plan.sequences.tolist() == [0, 1]
    for rows, fits in ((1, False), (2, True), (3, True)):
        scales = Fp8Scales(torch.ones(rows, 2), 1.0)
        for twin in (refattn.quantized, fastattn.quantized):
            call = partial(twin.attention, *stored.tensors[:3], plan, scales=scales)
            if fits:
                call()
                continue
            with pytest.raises(
                ValueError, match=r"^scales.key: expected a number or float32 \[hk=2\] or \[b>=2, hk=2\]"
            ):
                call()
    with pytest.raises(ValueError, match=r"^sequences: expected int32 \[b=2\], got int64 \[2\]"):
        replace(plan, sequences=plan.sequences.long())


@pytest.mark.usefixtures("shapes_unchecked")
def test_the_checks_read_nothing_on_a_device():
    """Tensors without contents pass them, so nothing waits for a device."""
    nowhere = partial(torch.empty, device="meta")
    ints = partial(nowhere, dtype=torch.int32)
    batch = Batch(ints(3), ints(2), ints(2, 7), 2, 20)
    query, slots = nowhere(3, 4, 8), nowhere(3, dtype=torch.int64)
    for kind in (E4M3, torch.int8):
        pool = nowhere(10, 4, 2, 8).to(kind)
        if kind == E4M3:
            scales = Fp8Scales(nowhere(2, 2), nowhere(2), nowhere(2, 2))
            written = Fp8Scales(nowhere(2), nowhere(2), nowhere(2, 2))
        else:
            scales = written = Int8Scales(nowhere(10, 4, 2), nowhere(2, 8))
        for plan in (Plan(batch, 4), Plan(batch, 4, sequences=ints(2))):
            QuantizedPages(pool, pool, scales).check(query, plan, AttentionOptions(), None, False)
        checks_of_writes.check_quantized_slots(query[:, :2], query[:, :2], pool, pool, slots, written)
    checks_of_writes.check_values([query])


def test_a_query_is_not_changed():
    for kind in KINDS:
        stored = store(ODD[0], kind)
        before = stored.query.clone()
        for package in ("refattn", "fastattn"):
            plan_and_attend(path_of(package)[0], *stored.tensors, scales=stored.scales)
        assert torch.equal(bits(stored.query), bits(before))


@each_package
@pytest.mark.usefixtures("shapes_unchecked")
def test_what_reads_no_quantized_values_says_so(package):
    """A pool of pairs refuses 8 bits by name, one of latents int8, and every path of a plain cache both."""
    cascade, differential, mla, plain, module = (
        importlib.import_module(f"{package}.{name}")
        for name in ("cascade", "differential", "mla", "chunked_prefill", "quantized")
    )
    key_cache, value_cache, scales = pools(module, "e4m3", dv=8)
    batch = make_batch([1, 1], [5, 6], [[1, 2], [1, 3]])
    query, levels = torch.randn(2, 4, 8), cascade.plan(batch, prefixes=[Prefix(0, 2, 4)], block_size=4)
    with pytest.raises(ValueError, match=r"^key_cache: expected float32 .*, got float8_e4m3fn"):
        cascade.attention(query, key_cache, value_cache, levels)
    with pytest.raises(ValueError, match=r"^key_cache: expected float32 .*, got float8_e4m3fn"):
        plain.attention(query, key_cache, value_cache, plain.plan(batch, block_size=4))
    with pytest.raises(ValueError, match=r"^cache: expected unquantized or fp8 latents, got int8"):
        latents = torch.zeros(5, 4, 8, dtype=torch.int8)
        options = AttentionOptions(softmax_scale=1.0)
        mla.attention(query, latents, mla.plan(batch, block_size=4), options, latent_rank=6)
    with pytest.raises(ValueError, match=r"^cache: expected float32 .*, got float8_e4m3fn"):
        pairs = torch.zeros(2, 2, 5, 4, 1, 8).to(E4M3)
        arguments = dict(lambda_full=torch.tensor(0.5), lambda_init=0.5)
        differential.attention(query, pairs, differential.plan(batch, block_size=4), **arguments)
