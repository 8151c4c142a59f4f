"""Pages of four bits: what a write stores, byte by byte, what every kernel reads of it, and what is refused."""

import importlib
import math
import re
from contextlib import nullcontext
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch

import fastattn
import fastattn.kv_cache
import fastattn.quantized
import refattn.kv_cache
import refattn.quantized
from fastattn.kernels import order
from refattn import rounding
from refattn.four_bits import Int4Scales, Nvfp4Scales
from refattn.metadata import make_batch
from refattn.options import AttentionOptions
from tests.helpers.batches import HARMLESS, POISON, Case, assert_same_masks, masks_by_hand, plan_and_attend, read_masks
from tests.helpers.kernels_present import PRESENT
from tests.helpers.pairs import every_pair, every_pair_on_cpu
from tests.helpers.stored import (
    E4M3,
    FOUR_BITS,
    assert_twins_agree_over_quantized,
    attended_by_hand,
    bits,
    decoded,
    hadamard_by_hand,
    nearest,
    numbers_in_four_bits,
    path_of,
    store,
)
from tests.table import ODD, PLANS, rule
from twinattn.integrations import ops

SEES = {plan: rule(**PLANS[plan][1]) for plan in ("causal", "window", "local", "all")}
MIXED = Case("mixed", ((4, 6), (1, 70), (10, 33), (0, 9), (5, 2)), heads=(4, 2), padding_rows=2)
LEVELS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
each_kind = pytest.mark.parametrize("kind", FOUR_BITS)
each_package = pytest.mark.parametrize("package", ["refattn", "fastattn"], ids=["ref", "fast"])
each_twin = pytest.mark.parametrize("twin", [refattn.quantized, fastattn.quantized], ids=["ref", "fast"])
each_kernel = pytest.mark.parametrize("kernel", [x for x in PRESENT if x.name in ("cpu", "triton")], ids=str)
READERS = [  # a kernel and what it reads; "" is the reference
    *((kernel, kind) for kernel in ("", *(x.name for x in PRESENT if x.name == "cpu")) for kind in FOUR_BITS),
    *((kernel.name, "int4") for kernel in PRESENT if kernel.name == "triton"),
]
WRITERS = [None, "torch", *(kernel.name for kernel in PRESENT if kernel.name == "triton")]  # None: the reference


def written(key, value, kind, writer=None, *, slots=None, layout="NHD", device="cpu", n=3, p=4):
    """Write tokens into pools full of garbage, by the reference or by a kernel of the twin; return pools and scales."""
    twin = refattn.quantized if writer is None else fastattn.quantized
    sizes = dict(value_head_size=value.shape[-1], layout=layout, device=device)
    if kind == "nvfp4":
        sizes |= dict(of_keys=0.03, of_values=0.7)
    key_cache, value_cache, scales = getattr(twin, f"allocate_{kind}")(n, p, key.shape[1], key.shape[-1], **sizes)
    key_cache.fill_(99), value_cache.fill_(99)
    for x in (scales.key, scales.value):
        x.fill_(7.0)
    slots = torch.arange(len(key)) if slots is None else torch.tensor(slots)
    tokens = key.to(device), value.to(device), key_cache, value_cache, slots.to(device)
    if writer is None:
        twin.write(*tokens, scales=scales)
    else:
        with order.use_kernel(writer):
            twin.write(*tokens, scales=scales)
    return key_cache, value_cache, scales


# --- four bits, by example ---


def test_a_hadamard_matrix_turns_rows_and_turns_them_back():
    """One large element becomes many small ones; lengths and products of rows stay what they are."""
    one_large = torch.tensor([8.0, 0.0, 0.0, 0.0])
    assert rounding.hadamard(one_large).tolist() == [4.0, 4.0, 4.0, 4.0]
    assert rounding.hadamard(torch.tensor([0.0, 0.0, 8.0, 0.0])).tolist() == [4.0, 4.0, -4.0, -4.0]
    assert rounding.hadamard(torch.tensor([4.0, 4.0, 4.0, 4.0])).tolist() == [8.0, 0.0, 0.0, 0.0]
    for size in (1, 2, 8, 64, 96, 80, 66, 256):
        q, k = torch.randn(2, 5, size, dtype=torch.float64)
        turned = rounding.hadamard(q)
        torch.testing.assert_close(turned, q @ hadamard_by_hand(size))
        torch.testing.assert_close(rounding.hadamard(turned), q)
        torch.testing.assert_close((turned * rounding.hadamard(k)).sum(-1), (q * k).sum(-1))


@pytest.mark.core
@pytest.mark.covers("F228")
def test_a_row_of_int4_by_example():
    """Turned, the row is 3.5, 1, -4, -0.25: from -4 to 3.5 are 15 steps of 0.5, and 0 is the eighth of them."""
    row = rounding.hadamard(torch.tensor([[3.5, 1.0, -4.0, -0.25]]))
    pairs, scales = rounding.to_int4(row)
    assert abs(scales.item() - 0.5) < 1e-6 and scales.view(torch.int32).item() % 16 == 8
    assert pairs.tolist() == [[(7 + 8) + 16 * (2 + 8), (-8 + 8) + 16 * (0 + 8)]]  # -0.25 is half a step: to even, 0
    back = rounding.from_int4(pairs, scales, torch.float32)
    torch.testing.assert_close(rounding.hadamard(back), torch.tensor([[3.5, 1.0, -4.0, 0.0]]), rtol=1e-5, atol=1e-6)


@pytest.mark.core
@pytest.mark.covers("F229")
def test_a_row_of_nvfp4_by_example():
    """The largest element of 16 becomes 6; the scale is rounded to e4m3 first, and the elements by what it became."""
    row = torch.tensor([[12.0, -6.0, 2.5, 3.5, -0.5, 0.0, 1.0, 7.0, 8.0, 9.9, 5.1, -12.0, 0.4, -0.0, 3.0, 1.5]])
    pairs, scales = rounding.to_nvfp4(row, 0.5)
    assert scales.float().tolist() == [[4.0]]  # 4 * 0.5 * 6 is 12
    codes = [7, 8 + 5, 2, 4, 8, 0, 1, 5 + 1, 6, 6, 4 + 1, 8 + 7, 0, 8, 3, 2]
    assert pairs.tolist() == [[low + 16 * high for low, high in zip(codes[::2], codes[1::2], strict=True)]]
    back = rounding.from_nvfp4(pairs, scales, 0.5, torch.float32)
    assert back.tolist() == [[12, -6, 2, 4, -0.0, 0, 1, 8, 8, 8, 6, -12, 0, -0.0, 3, 2]]


@pytest.mark.core
@pytest.mark.covers("F228")
def test_a_large_element_spoils_its_row_unless_it_is_turned():
    """Of 128 elements one is 40 times the others: int4 without a turn has steps as large as most elements."""
    x = torch.randn(500, 128)
    x[:, 17] *= 40

    def error(y):
        return ((y - x).square().mean() / x[:, :17].square().mean()).sqrt().item()

    turned = rounding.from_int4(*rounding.to_int4(x), torch.float32)
    as_it_is = rounding.hadamard(rounding.from_int4(*rounding.to_int4(rounding.hadamard(x)), torch.float32))
    assert error(turned) < 0.6 * error(as_it_is)


# --- what is written ---


def int4_by_hand(x):
    """Return the bytes and the bits of the scale of one row, in float32 one number at a time."""
    turned, size = [np.float32(y) for y in x.tolist()], math.gcd(len(x), 2**20)
    step = 1
    while step < size:
        turned = [
            turned[i] + turned[i + step] if not i & step else turned[i - step] - turned[i] for i in range(len(turned))
        ]
        step *= 2
    turned = [y * np.float32(size**-0.5) for y in turned]
    low, high = min(*turned, np.float32(0)), max(*turned, np.float32(0))
    scale = max((high - low) / np.float32(15), np.finfo(np.float32).tiny)
    zero = int(np.rint(-low / scale))
    pattern = (int(scale.view(np.int32)) & -16) + zero
    scale = np.int32(pattern).view(np.float32)
    codes = [int(min(max(np.rint(y / scale) + zero, 0), 15)) for y in turned]
    return [low + 16 * high for low, high in zip(codes[::2], codes[1::2], strict=True)], pattern


def nvfp4_by_hand(x, number):
    """Return the bytes and the scales, as bytes, of one row."""
    codes, scales, number = [], [], np.float32(number)
    for group in x.float().view(-1, 16).numpy():
        byte = nearest(float(min(np.abs(group).max() / (np.float32(6) * number), np.float32(448))), E4M3)
        scales.append(byte)
        divisor = np.float32(decoded(E4M3)[byte]) * number
        for y in group:
            size = abs(float(y / divisor)) if divisor else 6.0 * float(y != 0)  # too small for a scale: reads as 0
            distances = [abs(level - min(size, 6.0)) for level in LEVELS]
            best = [i for i, distance in enumerate(distances) if distance == min(distances)]
            codes.append(next((i for i in best if i % 2 == 0), best[0]) + 8 * int(size > 0 and np.signbit(y)))
    return [low + 16 * high for low, high in zip(codes[::2], codes[1::2], strict=True)], scales


@pytest.mark.core
@pytest.mark.covers("F228", "F229")
@each_kind
@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize(("layout", "size"), [("NHD", 32), ("HND", 32), ("NHD", 96), ("NHD", 16)])
def test_write_by_hand(kind, writer, layout, size, device):
    """Every byte of every slot, and every scale; where no slot points, what was there before."""
    generator = torch.Generator().manual_seed(size)
    fused = torch.randn(4, 2, size + 48, generator=generator) * 3  # keys and values out of one projection
    key, value = fused[..., :size], fused[..., size:]
    key[0, 1], value[2, 0], key[3, 0, 5] = 0.0, 0.0, 60.0
    key[3, 1, 0], value[3, 0, 0] = -50.0, 50.0  # turned, all elements have one sign
    value[3, 1] = 1e-30
    slots = [10, -1, 0, 6]
    pools = written(key, value, kind, writer, slots=slots, layout=layout, device=device)
    key_cache, value_cache = (x.cpu() for x in pools[:2])
    scales = [x.cpu() for x in (pools[2].key, pools[2].value)]
    token_at = {slot: t for t, slot in enumerate(slots) if slot >= 0}
    for slot in range(12):
        block, row = divmod(slot, 4)
        for head in range(2):
            for x, cache, scale, number in zip(
                (key, value), (key_cache, value_cache), scales, (0.03, 0.7), strict=True
            ):
                found = cache[block, row, head].tolist(), scale[block, row, head]
                if slot not in token_at:
                    assert set(found[0]) == {99} and (found[1].float() == 7).all()
                elif kind == "int4":
                    assert (found[0], found[1].view(torch.int32).item()) == int4_by_hand(x[token_at[slot], head])
                else:
                    by_hand = nvfp4_by_hand(x[token_at[slot], head], number)
                    assert (found[0], bits(found[1]).tolist()) == by_hand


@pytest.mark.core
@pytest.mark.covers("F228", "F229")
@each_kind
@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_every_writer_writes_the_bytes_of_the_reference(kind, writer, dtype, device):
    """Of any type and size, over pools with gaps; a zero row, subnormals, the largest numbers."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(64, 2, 64, generator=generator) * 10.0 ** torch.randint(-4, 5, (64, 2, 1), generator=generator)
    x[5], x[6], x[7, 0, 0] = 0.0, 1e-42, 1e30
    x[8] = torch.arange(64) % 16 - 7.5
    x[9, :, :16] = torch.tensor([*LEVELS, 0.25, -0.25, 2.5, -0.75, 1.25, 5.0, -3.5, 1.75]) * np.float32(0.03)  # ties
    x = x.to(dtype)
    expected = written(x, x, kind, n=16)
    found = written(x, x, kind, writer, n=16, device=device)
    for one, other in zip((*expected[:2], expected[2].key), (*found[:2], found[2].key), strict=True):
        finite = torch.ones(16, 4, 2, dtype=torch.bool)
        if dtype == torch.float16 and kind == "int4":
            finite[1, 3, 0] = False  # 1e30 is infinite: a NaN by any bits
        assert torch.equal(bits(one.cpu()[finite]), bits(other.cpu()[finite]))


@pytest.mark.core
@pytest.mark.covers("F228")
@each_kind
@each_kernel
@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf])
def test_what_is_no_number_stays_with_its_sequence_and_head(kind, kernel, wrong, device):
    """NaN in a value comes out as NaN, infinity in int4 as well; in nvfp4 infinity saturates, and NaN spoils 16."""
    key, value = torch.randn(2, 6, 2, 32, generator=torch.Generator().manual_seed(4))
    value[1, 1, 7] = wrong
    *pools, scales = written(key, value, kind, "torch", slots=[0, 1, 2, 4, 5, 6], device=device)
    batch = make_batch([1, 1], [3, 3], [[0], [1]], device=device)
    query = torch.randn(2, 4, 32, generator=torch.Generator().manual_seed(5)).to(device)
    expected = torch.zeros(2, 4, 32, dtype=torch.bool)
    if kind == "int4" or math.isnan(wrong):
        expected[0, 2:, : 16 if kind == "nvfp4" else 32] = True
    for twin in (refattn.quantized, fastattn.quantized):
        with kernel.forced():
            if device != "cpu" and kind == "nvfp4" and twin is fastattn.quantized:
                with pytest.raises(NotImplementedError, match="does not compute attention to nvfp4 pages"):
                    plan_and_attend(twin, query, *pools, batch, scales=scales)
                continue
            out = plan_and_attend(twin, query, *pools, batch, scales=scales).cpu()
        assert torch.equal(out.isnan(), expected) and out[~expected].isfinite().all()


@each_kind
def test_blocks_are_copied_with_their_scales(kind, device):
    """A fork, a swap out and in: the scales of a block are pools of their own."""
    key, value = torch.randn(2, 8, 2, 32)
    key_cache, value_cache, scales = written(key, value, kind, "torch", device=device)
    pools = [key_cache, value_cache, scales.key, scales.value]
    fastattn.kv_cache.copy_blocks(pools, torch.tensor([[1, 2]], device=device))
    for pool in pools:
        assert torch.equal(bits(pool[2].cpu()), bits(pool[1].cpu()))
    host = [torch.zeros_like(pool, device="cpu")[:1] for pool in pools]
    fastattn.kv_cache.swap_blocks(pools, host, torch.tensor([[0, 0]], device=device))
    fastattn.kv_cache.swap_blocks(host, pools, torch.tensor([[0, 1]], device=device))
    for pool in pools:
        assert torch.equal(bits(pool[1].cpu()), bits(pool[0].cpu()))


# --- who sees whom, and memory that no query may see ---


@pytest.mark.covers("F228", "F229")
@pytest.mark.parametrize(
    ("package", "case", "kind", "plan"), every_pair(["refattn", "fastattn"], ODD, FOUR_BITS, SEES), ids=str
)
def test_mask(package, case, kind, plan):
    """Values of 0 and 1 in four bits: the output is the mask divided by its row count, but for rounding of a turn."""
    case = replace(case, head_size=64, value_head_size=64)
    mixed, arguments = path_of(package, plan)

    def attention(query, key_cache, value_cache, batch, **options):
        round_keys = rounding.to_int4 if kind == "int4" else partial(rounding.to_nvfp4, number=1.0)
        pools, scales = zip(round_keys(key_cache), exactly(value_cache, kind), strict=True)
        scales = Int4Scales(*scales) if kind == "int4" else Nvfp4Scales(*scales, of_values=1 / 6)
        out, lse = plan_and_attend(mixed, query.double(), *pools, batch, **arguments, scales=scales, **options)
        return torch.where(out.abs() < 1e-9, 0.0, out).float(), lse.float()

    assert_same_masks(read_masks(attention, case), masks_by_hand(case, SEES[plan]))


def exactly(cache, kind):
    """Return a pool of zeros, and of rows that are 1 in one element, in four bits; poison has a scale of NaN.

    Turned, such a row is 1/8 or -1/8 everywhere: 1 step above or below a zero point of 1.
    """
    finite = cache.nan_to_num(0, 0, 0).clamp(0, 1)
    wrong = (cache != finite).any(-1)
    if kind == "nvfp4":
        pool, scales = rounding.to_nvfp4(finite, 1 / 6)
        return pool, torch.where(wrong[..., None], torch.nan, scales.float()).to(E4M3)
    quantized = ((rounding.hadamard(finite) * 8).round() + 1).to(torch.uint8)
    scales = torch.full(cache.shape[:-1], 0.125).view(torch.int32).add(1).view(torch.float32)
    return quantized[..., ::2] + 16 * quantized[..., 1::2], scales.masked_fill(wrong, torch.nan)


@pytest.mark.parametrize(("reader", "case", "plan"), every_pair_on_cpu(READERS, ODD, SEES), ids=str)
def test_poison(reader, case, plan, device):
    """Scales of NaN, infinity and 1e4 in slots that no sequence owns change no bit."""
    kernel, kind = reader
    twin, arguments = path_of("fastattn" if kernel else "refattn", plan)
    answers = []
    for poison in (HARMLESS, POISON):
        stored = store(case, kind, dtype=torch.float16, poison=poison, device=device if kernel else "cpu")
        with order.use_kernel(kernel) if kernel else nullcontext():
            answers.append(plan_and_attend(twin, *stored.tensors, **arguments, scales=stored.scales, return_lse=True))
    for clean, dirty in zip(*answers, strict=True):
        assert torch.equal(clean, dirty)


# --- the formula, and the twins ---


@pytest.mark.core
@pytest.mark.covers("F228", "F229")
@pytest.mark.parametrize(("case", "kind", "plan"), every_pair(ODD, FOUR_BITS, SEES), ids=str)
def test_formula(case, kind, plan):
    """Softmax in float64 over numbers that are dequantized, and turned back, by hand."""
    case = replace(case, head_size=32, value_head_size=48)
    stored = store(case, kind, dtype=torch.float64)
    expected = attended_by_hand(stored, masks_by_hand(case, SEES[plan]))
    for package in ("refattn", "fastattn"):
        mixed, arguments = path_of(package, plan)
        answer = plan_and_attend(mixed, *stored.tensors, **arguments, scales=stored.scales, return_lse=True)
        for one, other in zip(answer, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-11)


@each_package
@each_kind
def test_every_byte_is_read(package, kind):
    """Each byte as the one key and the one value of a sequence, in the first of its pairs: 16 times 16 numbers."""
    pairs = torch.zeros(256, 1, 1, 8, dtype=torch.uint8)
    pairs[:, 0, 0, 0] = torch.arange(256)
    zero = torch.tensor([0.5]).view(torch.int32).add(5).view(torch.float32)  # a scale of 0.5, a zero point of 5
    scale = zero.expand(256, 1, 1) if kind == "int4" else torch.full((256, 1, 1, 1), 3.0).to(E4M3)
    scales = Int4Scales(scale, scale) if kind == "int4" else Nvfp4Scales(scale, scale, 0.5, 2.0)
    keys, values = (numbers_in_four_bits(pairs, scale, number)[:, 0, 0] for number in (0.5, 2.0))
    batch = make_batch([1] * 256, [1] * 256, [[i] for i in range(256)])
    query = torch.linspace(-1, 1, 16, dtype=torch.float64).expand(256, 1, 16)
    mixed, _ = path_of(package)
    given = dict(scales=scales, softmax_scale=1.0, return_lse=True)
    out, lse = plan_and_attend(mixed, query, pairs, pairs, batch, **given)
    torch.testing.assert_close(out[:, 0], values, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(lse[:, 0], (query[:, 0] * keys).sum(-1), rtol=1e-10, atol=1e-10)


@pytest.mark.core
@pytest.mark.covers("F228", "F229")
@pytest.mark.parametrize(
    ("kernel", "case", "kind", "plan"), every_pair_on_cpu([x.name for x in PRESENT], ODD, FOUR_BITS, SEES), ids=str
)
def test_twins(kernel, case, kind, plan, device):
    kernel = next(x for x in PRESENT if x.name == kernel)
    stored = store(case, kind, dtype=kernel.dtypes[-1], device=device)
    with kernel.forced():
        kernel.check(assert_twins_agree_over_quantized, stored, plan, again=kernel.name != "triton")


SIZES = [(16, 16), (32, 96), (80, 32), (66, 10), (128, 64), (2, 2)]
TYPES = [torch.float16, torch.float32, *(() if PRESENT[0].name == "cpu" else (torch.bfloat16,))]


@pytest.mark.skipif("triton" not in [x.name for x in PRESENT], reason="Triton comes for Linux only")
def test_a_long_prompt_is_expanded_once(device, monkeypatch):
    """By our kernel, too, where a key meets many queries; not if bits must not depend on the batch, or in float32."""
    expand = importlib.import_module("fastattn.kernels.triton.expand")
    calls, repage = [], expand.repage
    monkeypatch.setattr(expand, "repage", lambda *args, **kwargs: calls.append(1) or repage(*args, **kwargs))
    case = Case("prompt", ((70, 70), (60, 90)), heads=(4, 2), head_size=16)
    for dtype, options, expected in (
        (torch.float16, {}, True),
        (torch.float16, dict(batch_invariant=True), False),
        (torch.float32, {}, False),
    ):
        calls.clear()
        with fastattn.use_kernel("triton"):
            stored = store(case, "int4", dtype=dtype, device=device)
            assert_twins_agree_over_quantized(stored, again=False, **options)
        assert bool(calls) == expected


@pytest.mark.skipif("triton" not in [x.name for x in PRESENT], reason="Triton comes for Linux only")
@pytest.mark.parametrize(
    ("sizes", "dtype", "lens"), every_pair_on_cpu(SIZES, TYPES, [((1, 70), (2, 35)), ((31, 82), (1, 51))]), ids=str
)
def test_our_kernel_over_heads_of_any_size(sizes, dtype, lens, device):
    """Decodes in tiles of 8 rows, prompts in tiles of 64; heads that are turned in blocks; pools with gaps."""
    case = Case("sizes", lens, heads=(2, 2), head_size=sizes[0], value_head_size=sizes[1])
    stored = store(case, "int4", dtype=dtype, spread=True, device=device)
    with fastattn.use_kernel("triton"):
        assert_twins_agree_over_quantized(stored, again=False)


# --- what is refused ---


def small(kind):
    """Return a legal call over four-bit pages of 32 elements, two blocks of four tokens."""
    key_cache, value_cache, scales = getattr(refattn.quantized, f"allocate_{kind}")(2, 4, 2, 32)
    return dict(query=torch.zeros(1, 4, 32), key_cache=key_cache, value_cache=value_cache, scales=scales)


def half(pool):
    return pool[..., : pool.shape[-1] // 2]


BAD = {
    "key_cache: expected uint8 [n, p, hk, d/2=8]": lambda a: dict(query=a["query"][..., :16]),
    "query: expected an even head size for pages of 4 bits, got d=31": lambda a: dict(query=a["query"][..., :31]),
    "value_cache: expected uint8 [n=2, p=4, hk=2, dv/2]": lambda a: dict(value_cache=a["value_cache"][:1]),
    "key_cache: expected uint8 [n, p, hk, d/2=16], got int8": lambda a: dict(key_cache=a["key_cache"].view(torch.int8)),
    "scales.value: expected": lambda a: dict(scales=replace(a["scales"], value=a["scales"].value[:, :, :1])),
    "query: expected a floating point type": lambda a: dict(query=a["query"].to(E4M3)),
    "out: expected float32 [t=1, h=4, dv=32]": lambda a: dict(out=torch.zeros(1, 4, 16)),
    "scales: expected Fp8Scales or Int8Scales": lambda a: dict(scales=None),
}


@each_package
@each_kind
@pytest.mark.usefixtures("shapes_unchecked")
@pytest.mark.parametrize(("message", "change"), BAD.items(), ids=BAD)
def test_what_does_not_fit_is_named(package, kind, message, change):
    given, (twin, _) = small(kind), path_of(package)
    plan = twin.plan(make_batch([1], [3], [[0]]), block_size=4)
    with pytest.raises(ValueError, match=re.escape(message)):
        given |= change(given)
        twin.attention(given.pop("query"), given.pop("key_cache"), given.pop("value_cache"), plan, **given)


@each_twin
@each_kind
@pytest.mark.usefixtures("shapes_unchecked")
def test_a_write_that_does_not_fit_writes_nothing(twin, kind):
    given = small(kind)
    pools = [given["key_cache"], given["value_cache"], given["scales"].key, given["scales"].value]
    key, slots = torch.ones(2, 2, 32), torch.tensor([0, 1])
    legal = dict(
        key=key, value=key, key_cache=pools[0], value_cache=pools[1], slot_mapping=slots, scales=given["scales"]
    )
    for message, changes in {
        "key: expected a floating point type": dict(key=key.long()),
        "key: expected float32 [t, hk=2, d=32]": dict(key=key[..., :30]),
        "value: expected float32 [t=2, hk=2, dv=32]": dict(value=key[:, :1]),
        "slot_mapping: expected slots in 0..7": dict(slot_mapping=torch.tensor([0, 8])),
        "slot_mapping: expected each slot once": dict(slot_mapping=torch.tensor([1, 1])),
        "value_cache: expected memory of its own": dict(value_cache=pools[0]),
        "key_cache: expected memory for each element": dict(key_cache=pools[0][:1].expand(2, -1, -1, -1)),
        "scales.value: expected memory of its own": dict(scales=replace(given["scales"], key=pools[3])),
    }.items():
        with pytest.raises(ValueError, match=re.escape(message)):
            twin.write(**legal | changes)
    with pytest.raises(NotImplementedError, match="key: requires_grad, but rounding"):
        twin.write(**legal | dict(key=key.clone().requires_grad_()))
    for pool in pools:
        assert not bits(pool).any()


@each_twin
def test_sizes_that_four_bits_cannot_hold_are_refused(twin):
    for kind, message, sizes in (
        ("int4", "head_size: expected a multiple of 2 for pages of 4 bits, got 33", (2, 4, 2, 33)),
        ("nvfp4", "head_size: expected a multiple of 16 for pages of 4 bits, got 24", (2, 4, 2, 24)),
        ("int4", "num_blocks: expected a positive int", (0, 4, 2, 32)),
    ):
        with pytest.raises(ValueError, match=re.escape(message)):
            getattr(twin, f"allocate_{kind}")(*sizes)
    with pytest.raises(ValueError, match="value_head_size: expected a multiple of 2"):
        twin.allocate_int4(2, 4, 2, 32, value_head_size=5)
    with pytest.raises(ValueError, match="scales.of_keys: expected a finite number above 0"):
        twin.allocate_nvfp4(2, 4, 2, 32, of_keys=0.0)
    with pytest.raises(ValueError, match="scales.of_values: expected a number of float32"):
        twin.allocate_nvfp4(2, 4, 2, 32, of_values=1e-60)
    pool = torch.zeros(2, 4, 2, 4, dtype=torch.uint8)
    scale = torch.zeros(2, 4, 2, 1).to(E4M3)
    plan = twin.plan(make_batch([1], [3], [[0]]), block_size=4)
    with pytest.raises(ValueError, match="key_cache: expected rows of a multiple of 16 elements in nvfp4, got 8"):
        twin.attention(torch.zeros(1, 2, 8), pool, pool, plan, scales=Nvfp4Scales(scale, scale))


@each_kind
def test_gradients_of_queries_flow_and_scales_have_none(kind):
    """In the reference: products of queries and dequantized keys are differentiable; the twin has no backward."""
    stored = store(Case("", ((2, 5),), heads=(2, 1), head_size=16), kind, dtype=torch.float64)
    query = stored.query.requires_grad_()
    batch = stored.batch

    def attend(query):
        return plan_and_attend(refattn.quantized, query, *stored.tensors[1:3], batch, scales=stored.scales)

    assert torch.autograd.gradcheck(attend, query)
    with pytest.raises(NotImplementedError, match="query: requires_grad, but fastattn has no backward"):
        plan_and_attend(fastattn.quantized, query, *stored.tensors[1:3], batch, scales=stored.scales)
    if kind == "int4":
        scales = replace(stored.scales, key=stored.scales.key.clone().requires_grad_())
        with pytest.raises(NotImplementedError, match="scales.key: requires_grad, but rounding to a quantized cache"):
            plan_and_attend(refattn.quantized, query.detach(), *stored.tensors[1:3], batch, scales=scales)


@pytest.mark.skipif("triton" not in [x.name for x in PRESENT], reason="Triton comes for Linux only")
def test_a_gpu_refuses_nvfp4():
    """Nothing computes it there but the reference, and the error says so by kernel."""
    problem = order.Problem("attend", torch.device("cuda"), torch.float16, "nvfp4", 1, False, 4, 2, 64, 64, 16, 1, 9, 2)
    with pytest.raises(NotImplementedError, match="triton: does not compute attention to nvfp4 pages"):
        order.choose(problem)
    assert order.choose(problem._replace(device=torch.device("cpu"))).name == "cpu"


@each_kind
@pytest.mark.usefixtures("shapes_unchecked")
def test_operators_of_pytorch_take_no_four_bits(kind):
    given, query = small(kind), torch.zeros(1, 4, 32)
    plan = fastattn.quantized.plan(make_batch([1], [3], [[0]]), block_size=4)
    pools = given["key_cache"], given["value_cache"]
    with pytest.raises(ValueError, match="scales: expected Fp8Scales or Int8Scales for an operator of PyTorch"):
        ops.quantized(query, *pools, plan, scales=given["scales"])
    with pytest.raises(ValueError, match="scales: expected Fp8Scales or Int8Scales for an operator of PyTorch"):
        ops.write_quantized(query[:, :2], query[:, :2], *pools, torch.tensor([0]), scales=given["scales"])


@each_package
@pytest.mark.usefixtures("shapes_unchecked")
def test_other_storages_have_no_four_bits(package):
    """Ranks of one sequence take scales of 8 bits alone."""
    options, given = AttentionOptions(), small("int4")
    module = __import__(f"{package}.context_parallel", fromlist=["plan"])
    from refattn.ranks import Shard

    plan = module.plan(make_batch([1], [3], [[0]]), shard=Shard(0, 1), block_size=4)
    new = torch.zeros(1, 2, 32)
    with pytest.raises(ValueError, match="scales: expected"):
        module.attention(
            given["query"], new, new, given["key_cache"], given["value_cache"], plan, options, group=None,
            scales=given["scales"],
        )  # fmt: skip


def test_pools_with_gaps_are_read_in_place(device):
    """Strides that are no products of sizes; the twin copies nothing."""
    stored = store(MIXED, "int4", spread=True, device=device)
    assert not stored.key_cache.is_contiguous() and not stored.scales.key.is_contiguous()
    assert_twins_agree_over_quantized(stored)
