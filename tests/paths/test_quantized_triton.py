"""Quantized caches by our Triton kernels, interpreted on a CPU and compiled on a GPU."""

import math
import os
from dataclasses import replace
from functools import partial

import pytest

pytest.importorskip("triton", reason="Triton comes for Linux only")

import torch

import fastattn
import fastattn.local
import fastattn.quantized
import refattn.quantized
from fastattn.kernels import Problem, order
from fastattn.kernels.triton.quantized import in_pairs
from fastattn.kernels.triton.tuning import are_pairs
from refattn.metadata import make_batch
from refattn.scales import Fp8Scales, Int8Scales
from tests.helpers import (
    interpreted,
    kernels_present,  # noqa: F401 (quickens the interpreter)
)
from tests.helpers.batches import HARMLESS, POISON, Case
from tests.helpers.pairs import every_pair_on_cpu
from tests.helpers.stored import (
    E4M3,
    E5M2,
    KINDS,
    apart,
    assert_twins_agree_over_quantized,
    bits,
    decoded,
    in_scales,
    over_quantized,
    path_of,
    store,
)
from tests.helpers.tolerance import assert_close
from tests.table import CHUNK, ODD
from twinattn.kit import assert_matches_reference, plan_and_attend

MIXED = Case("mixed", ((4, 6), (1, 70), (10, 33), (0, 9), (5, 2)), heads=(4, 2), padding_rows=2)
ON_CPU = os.environ["TWINATTN_TEST_DEVICE"] == "cpu"
TYPES = [
    torch.float16,
    torch.float32,
    *(() if ON_CPU else (torch.bfloat16,)),
]  # the interpreter's products of it are wrong
each_type = pytest.mark.parametrize("dtype", TYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
each_kind = pytest.mark.parametrize("kind", KINDS)
each_format = pytest.mark.parametrize("kind", [E4M3, E5M2], ids=["e4m3", "e5m2"])


@pytest.fixture(autouse=True)
def ours():
    with fastattn.use_kernel("triton"):
        yield


hold = partial(assert_twins_agree_over_quantized, again=False)

# --- attention ---


@each_kind
@pytest.mark.parametrize("case", ODD[:3], ids=str)
def test_twins(case, kind, device):
    hold(store(case, kind, dtype=torch.float16, device=device))


@each_type
@each_kind
def test_twins_of_each_type_over_padded_pools(kind, dtype, device):
    hold(store(MIXED, kind, dtype=dtype, spread=True, device=device))


@each_kind
def test_values_at_odd_addresses_are_read_one_at_a_time(kind, device):
    stored = store(MIXED, kind, dtype=torch.float16, device=device)
    n, p, hk, dv = stored.value_cache.shape
    room = torch.zeros(n, p, hk, dv + 1, dtype=stored.value_cache.dtype, device=device)
    assert are_pairs(in_pairs(stored.value_cache)) == (kind != "int8-half")
    stored.value_cache = room[..., :dv].copy_(stored.value_cache)
    assert not are_pairs(in_pairs(stored.value_cache))
    hold(stored)


@pytest.mark.parametrize(
    ("kind", "dtype", "per", "round_query"), every_pair_on_cpu(KINDS, TYPES, ["number", "head"], [False, True]), ids=str
)
def test_scales(kind, per, round_query, dtype, device):
    case = replace(MIXED, heads=(4, 2), head_size=32)
    hold(store(case, kind, dtype=dtype, per=per, round_query=round_query, device=device))


@pytest.mark.parametrize(
    ("sizes", "kind", "dtype"),
    every_pair_on_cpu([(16, 16), (32, 32), (80, 32), (64, 16), (16, 64)], KINDS, TYPES),
    ids=str,
)
def test_small_heads_of_many_rows(sizes, kind, dtype, device):
    """Products of 64 rows with few columns, which Triton 3.6 computed wrongly over fp8 on an H200."""
    lens = ((31, 82), (1, 51))
    case = Case("small-heads", lens, heads=(2, 2), head_size=sizes[0], value_head_size=sizes[1])
    hold(store(case, kind, dtype=dtype, per="head", device=device))


@pytest.mark.covers("B180")
@pytest.mark.parametrize(
    ("per", "kind", "dtype"), every_pair_on_cpu(["number", "head", "sequence"], [E4M3, E5M2], TYPES), ids=str
)
def test_queries_in_fp8(per, kind, dtype, device):
    """Without `out` the answer is of bfloat16, which the interpreter multiplies wrongly."""
    stored = store(MIXED, "e4m3" if kind == E4M3 else "e5m2", dtype=dtype, per=per, device=device)
    quantized_values = stored.query.float().to(kind)
    twin, out = over_quantized("fastattn", "quantized"), torch.empty_like(stored.query)
    answer = plan_and_attend(
        twin, quantized_values, *stored.tensors[1:], scales=stored.scales, return_lse=True, out=out
    )
    assert answer[0] is out

    def by_reference(query, *others, **options):
        """In the type that the rule asks for: that of the memory for the outputs."""
        out = torch.empty(query.shape, dtype=query.dtype)
        return plan_and_attend(
            over_quantized("refattn", "quantized"), quantized_values.cpu(), *others, **options, out=out
        )

    assert_matches_reference(*answer, by_reference, stored.query, *stored.tensors[1:], scales=stored.scales)
    if not ON_CPU and dtype == torch.bfloat16:
        alone = plan_and_attend(twin, quantized_values, *stored.tensors[1:], scales=stored.scales)
        assert torch.equal(alone, out)


@each_kind
def test_zero_scale(kind, device):
    """All scores are 0 then, whatever the quantized values are."""
    hold(store(MIXED, kind, device=device), softmax_scale=0.0)


@each_type
@pytest.mark.parametrize("kind", ["e4m3", "int8", "int8-half"])
def test_tiles_of_many_rows(kind, dtype, device):
    """With wide tiles quantized values go through shared memory as numbers on a GPU."""
    case = Case("prompts", ((40, 70),), heads=(4, 2), head_size=64, value_head_size=128)
    hold(store(case, kind, dtype=dtype, device=device))


@each_kind
@pytest.mark.parametrize("plan", ["causal", "local"])
def test_poison(kind, plan, device):
    """Quantized values of NaN, scales of NaN, infinity and 1e4 in slots that no sequence owns change no bit."""
    twin, arguments = path_of("fastattn", plan)
    answers = []
    for poison in (HARMLESS, POISON):
        stored = store(ODD[0], kind, dtype=torch.float16, poison=poison, device=device)
        answers.append(plan_and_attend(twin, *stored.tensors, **arguments, scales=stored.scales, return_lse=True))
    for clean, dirty in zip(*answers, strict=True):
        assert torch.equal(clean, dirty)


@each_type
@pytest.mark.parametrize("rows", [1, 256], ids=["decode", "prefill"])
@pytest.mark.parametrize("kind", ["e4m3", "e5m2", "int8"])
def test_every_code_is_read(kind, rows, dtype, device):
    """One key and one value of all quantized values: the value is the answer, and each query's score one element of the
    key.

    A GPU takes the largest score off in the same step as it scales, so that the weight of a single key is 1 to a
    rounding: the answer may be a unit in the last place away, where the next value is hundreds of them away.
    """
    quantized_values = torch.arange(256).to(torch.uint8).view(KINDS[kind])
    numbers = quantized_values.double() if kind == "int8" else decoded(KINDS[kind])
    finite = numbers.isfinite()
    value = quantized_values.view(1, 1, 1, 256).to(device)
    key = torch.where(finite, quantized_values.view(torch.uint8), 0).view(KINDS[kind]).view(1, 1, 1, 256).to(device)
    query = torch.eye(256, dtype=dtype, device=device)[:, None]  # for int8 each has a scale of its own, 1 / 127
    if kind == "int8":
        scales = Int8Scales(torch.full((1, 1, 1), 0.5).to(device), torch.full((1, 256), 0.125).to(device))
    else:
        scales = Fp8Scales(0.5, 0.125, format=KINDS[kind])
    for first in range(0, 256, 256 if rows > 1 else 51):
        batch = make_batch([rows], [1], [[0]], device=device)
        call = partial(
            plan_and_attend, fastattn.quantized, query[first : first + rows], softmax_scale=0.25, causal=False
        )
        out, lse = call(key, value, batch, scales=scales, return_lse=True)
        expected = (numbers / 8).to(dtype).expand(rows, 256)
        unit = 0.0 if ON_CPU else torch.finfo(dtype).eps
        torch.testing.assert_close(out[:, 0].cpu(), expected, rtol=unit, atol=0, equal_nan=True)
        expected = numbers[first : first + rows].nan_to_num(0, 0, 0) / 8
        torch.testing.assert_close(lse[:, 0].cpu().double(), expected, rtol=1e-6, atol=1e-12)
    if not finite.all():
        assert call(value, key, batch, scales=scales).isnan().all()


@pytest.mark.parametrize("dtype", [x for x in TYPES if x != torch.float16], ids=str)
@pytest.mark.parametrize("of", [1e-30, 1e4, 1e30])
def test_queries_of_any_size(of, dtype, device):
    """A query in bfloat16 may be larger than all of float16, or smaller, and beside it another one very small, or 0."""
    stored = store(MIXED, "e4m3", dtype=torch.float32, round_query=False, device=device)
    stored.query = torch.nan_to_num(stored.query, 0.5, 0.5, 0.5)
    stored.query[1::2] *= of
    if of < 1:
        stored.query[::2] = 0.0  # or its scores would be 1e30, of which float32 knows no two that are close
    stored.query = stored.query.to(dtype)
    hold(stored, softmax_scale=1.0 / of)


@each_type
def test_a_query_that_is_nan_comes_out_as_nan_alone(dtype, device):
    for kind in ("e4m3", "int8"):
        stored = store(MIXED, kind, dtype=dtype, device=device)
        before = plan_and_attend(fastattn.quantized, *stored.tensors, scales=stored.scales)
        stored.query[4, 2, 7] = torch.nan
        after = plan_and_attend(fastattn.quantized, *stored.tensors, scales=stored.scales)
        assert after[4, 2].isnan().all()
        after[4, 2] = before[4, 2]
        assert torch.equal(after[:-2], before[:-2])


@each_kind
def test_decodes_and_prefills_agree_to_the_bit(kind, device, monkeypatch):
    """The same bytes, read by one query and by many, from 88 to 256 keys, alone and beside others."""
    if device == "cpu":
        interpreted.add_products_in_order(monkeypatch)
    for s in (97, 200) if device == "cpu" else (88, 96, 97, 113, 128, 129, 200, 256):
        rows = 40 if device == "cpu" else s
        case = Case("", ((rows, s), (3, 40)), heads=(2, 1), head_size=32)
        stored = store(case, kind, dtype=torch.float16, per="head", device=device)
        call = partial(plan_and_attend, fastattn.quantized, scales=stored.scales, return_lse=True, batch_invariant=True)
        table = stored.batch.block_table[0, : -(-s // 16)].tolist()
        many = call(*stored.tensors)
        for few in (1, 7):
            batch = make_batch([few], [s], [table], device=device)
            alone = call(stored.query[rows - few : rows], *stored.tensors[1:3], batch)
            for one, other in zip(alone, many, strict=True):
                assert torch.equal(one, other[rows - few : rows])


@pytest.mark.parametrize("kind", ["e4m3", "int8"])
def test_long_keys_are_split(kind, device):
    case = Case("long", ((1, 1100), (1, 300)), heads=(4, 2), head_size=64)
    hold(store(case, kind, dtype=torch.float16, device=device))


def test_scales_of_sequences_go_with_virtual_ones(device):
    case = Case("virtual", ((0, 60), (70, 130), (1, 49), (0, 9), (2, 97)), heads=(4, 2), head_size=32)
    stored = store(case, "e4m3", dtype=torch.float16, device=device)
    assert fastattn.local.plan(stored.batch, chunk_size=CHUNK, block_size=16).sequences is not None
    hold(stored, "local")


# --- what is written ---


def pools(kind: str, device: str, tokens: int, size: int, **numbers) -> tuple:
    """Make two pools alike, full of garbage, and scales for each."""
    both = []
    for _ in range(2):
        if kind in ("e4m3", "e5m2"):
            key_cache, value_cache = (torch.full((tokens // 4 + 1, 4, 2, size), 99, dtype=torch.uint8) for _ in "kv")
            scales = Fp8Scales(numbers.get("key", 0.7), numbers.get("value", 1.3), format=KINDS[kind])
        else:
            key_cache, value_cache, of_key = fastattn.quantized.allocate_int8(
                tokens // 4 + 1, 4, 2, size, value_dtype=KINDS[kind]
            )
            of_value = in_scales(2, size, seed=7) / 40
            scales = Int8Scales(of_key.fill_(-7.0).to(device), of_value.to(device) if kind == "int8" else None)
        both.append((key_cache.to(device), value_cache.to(device), scales))
    return both


def assert_written_alike(key, value, slots, both) -> None:
    for twin, (key_cache, value_cache, scales) in zip((refattn.quantized, fastattn.quantized), both, strict=True):
        twin.write(key, value, key_cache, value_cache, slots, scales=scales)
    for ours, theirs in zip(*(x[:2] for x in both), strict=True):
        assert torch.equal(bits(ours), bits(theirs))
    if isinstance(both[0][2], Int8Scales):
        torch.testing.assert_close(both[0][2].key, both[1][2].key, rtol=0, atol=0, equal_nan=True)


@each_format
@pytest.mark.parametrize("scale", [1.0, 0.7, 2.0**-9])
@pytest.mark.parametrize("numbers", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
def test_all_numbers_of_16_bits_are_rounded_as_the_reference_rounds(kind, scale, numbers, device):
    """Ties, subnormals, what saturates, infinity and NaN: all of them."""
    x = torch.arange(-(2**15), 2**15).to(torch.int16).view(numbers).view(32, 2, 1024)
    largest = torch.finfo(kind).max
    expected = (x.float() / scale).clamp(-largest, largest).to(kind).view(torch.uint8)
    cache = torch.zeros(2, 8, 4, 2, 1024, dtype=torch.uint8, device=device)
    slots = torch.arange(32, device=device)
    fastattn.quantized.write(x.to(device), x.to(device), *cache, slots, scales=Fp8Scales(scale, scale, format=kind))
    for pool in cache.cpu().view(2, 32, 2, 1024):
        assert torch.equal(without_sign_of_nan(pool, kind), without_sign_of_nan(expected, kind))


def without_sign_of_nan(quantized_values: torch.Tensor, kind: torch.dtype) -> torch.Tensor:
    """Return quantized values with one NaN instead of two: a GPU forgets its sign as soon as it divides."""
    return torch.where(quantized_values.view(kind).float().isnan(), quantized_values & 0x7F, quantized_values)


@each_type
@each_kind
@pytest.mark.parametrize("per", ["number", "head"])
def test_writes_are_the_reference_to_the_bit(kind, per, dtype, device):
    """Numbers of all sizes and odd ones; padding slots, slots in any order; keys and values from one projection."""
    generator = torch.Generator().manual_seed(3)
    tokens, size = 37, 48
    fused = torch.randn(tokens, 2, 2 * size, generator=generator) * torch.randn(tokens, 2, 1, generator=generator).exp()
    fused[3, 1] = 0.0
    fused[4, 0, 2], fused[5, 0, 60], fused[6, 1, 1], fused[7, 1, 50] = math.nan, math.nan, math.inf, -math.inf
    fused[8, 0, :size] = 1e-45
    fused[9] *= 1e4
    fused[10, :, :size] = torch.arange(size) - 23.5  # ties of int8, under a scale of its own
    fused[10, :, 0] = 127.0
    fused = fused.to(device, dtype)
    key, value = fused[..., :size], fused[..., size:]
    value = value.half() if kind == "int8-half" else value
    slots = torch.randperm(tokens, generator=generator)
    slots[5::9] = -1
    scales = {} if per == "number" else dict(key=in_scales(2, seed=1).to(device), value=in_scales(2, seed=2).to(device))
    assert_written_alike(key, value, slots.to(device), pools(kind, device, tokens, size, **scales))


@each_kind
def test_writes_into_padded_pools_and_nothing_else(kind, device):
    both = [
        (apart(key_cache), apart(value_cache), replace(scales, key=apart(scales.key)) if kind[0] == "i" else scales)
        for key_cache, value_cache, scales in pools(kind, device, 9, 24)
    ]
    key, value = torch.randn(2, 9, 2, 24).to(device)
    value = value.half() if kind == "int8-half" else value
    assert_written_alike(key, value, torch.tensor([8, -1, 3, 0, 5, -1, 7, 2, 1]).to(device), both)


def test_divisions_are_rounded_as_they_should_be(device):
    """Quotients that end near a tie: an approximate division gets some of them wrong."""
    generator = torch.Generator().manual_seed(5)
    scale = torch.rand(1, generator=generator).item() + 0.5
    quantized_values = torch.arange(256, dtype=torch.uint8).view(E4M3).float()
    quantized_values = quantized_values[quantized_values.isfinite() & (quantized_values > 0)].sort().values
    ties = (quantized_values[1:] + quantized_values[:-1]) / 2 * torch.tensor(scale)  # and the numbers beside each
    x = torch.cat([ties, ties.nextafter(torch.tensor(0.0)), ties.nextafter(torch.tensor(1e9))])
    x = torch.nn.functional.pad(x, (0, 384 - len(x))).view(1, 1, 384)
    expected = (x / scale).to(E4M3).view(torch.uint8)
    cache = torch.zeros(2, 1, 1, 1, 384, dtype=torch.uint8, device=device)
    slots = torch.zeros(1, dtype=torch.int64, device=device)
    fastattn.quantized.write(x.to(device), x.to(device), *cache, slots, scales=Fp8Scales(scale, scale))
    assert torch.equal(cache.cpu().view(2, 384), expected.view(1, 384).expand(2, -1))


# --- which kernel ---


def test_a_gpu_computes_decodes_by_our_kernel():
    gpu = torch.device("cuda")
    problem = Problem(
        "attend",
        gpu,
        torch.bfloat16,
        "quantized",
        1,
        False,
        4,
        2,
        64,
        64,
        16,
        1,
        100,
        3,
        stored=(E4M3, E4M3),
        num_tokens=3,
    )
    assert order.priorities(problem) == ("triton",)


def test_values_in_float64_are_refused(device):
    stored = store(MIXED, "int8-half", dtype=torch.float32, device=device)
    with pytest.raises(NotImplementedError, match="multiplies values of up to 32 bits, not those of float64"):
        plan_and_attend(
            fastattn.quantized,
            stored.query,
            stored.key_cache,
            stored.value_cache.double(),
            stored.batch,
            scales=stored.scales,
        )


def test_weights_rounded_to_fp8_would_break_the_tolerance():
    """Why FlashAttention-3 does not take this operation: its second product is one of fp8, too, weights times 256."""
    case = Case("decodes", ((1, 300), (1, 200)), heads=(4, 2), head_size=64)
    stored = store(case, "e4m3", dtype=torch.bfloat16, per="head", round_query=False)
    pools = [x.view(torch.uint8) for x in (stored.key_cache, stored.value_cache)]
    low, exact = (
        plan_and_attend(refattn.quantized, query, *pools, stored.batch, scales=stored.scales)
        for query in (stored.query, stored.query.float())
    )
    answers = {}
    for is_rounded in (False, True):
        answers[is_rounded] = out = torch.zeros_like(low)
        for i, (key, value) in enumerate(zip(stored.keys, stored.values, strict=True)):
            for head in range(4):
                scores = key[:, head // 2] @ stored.query[i, head].double() / 8
                weights = (scores - scores.max()).exp()
                rounded = (weights * 256).float().to(E4M3).double() / 256 if is_rounded else weights
                out[i, head] = rounded @ value[:, head // 2] / weights.sum()
    assert_close(answers[False], exact, low)
    with pytest.raises(AssertionError, match="error"):
        assert_close(answers[True], exact, low)
