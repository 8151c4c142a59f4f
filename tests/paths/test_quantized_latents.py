"""Latents in fp8: the quantized values that are written, what every kernel reads of them, and what is refused."""

import math
import re
from contextlib import nullcontext
from dataclasses import replace
from functools import partial

import pytest
import torch
from hypothesis import given as drawn
from hypothesis import strategies as st

import fastattn.mla
import refattn.mla
import refattn.varlen
import twinattn.kit
from refattn.metadata import make_batch, slot_mapping
from refattn.options import AttentionOptions
from tests.helpers.batches import HARMLESS, POISON, Case, masks_by_hand, of_batches, ragged_cases
from tests.helpers.kernels_present import PRESENT, PRESENT_FOR_LATENTS
from tests.helpers.latents import (
    EVEN,
    OF_LATENTS,
    OPTIONS,
    RANK,
    REAL,
    ROPE,
    SCALE,
    SMALL,
    Latents,
    Sizes,
    assert_latents_seen,
    attend,
    by_reference,
    filled,
    in_8_bits,
    prefill,
)
from tests.helpers.stored import E4M3, E5M2, bits, decoded, nearest
from tests.helpers.tolerance import assert_matches_reference

KINDS = {"e4m3": E4M3, "e5m2": E5M2}
MIXED = Case("mixed", ((4, 6), (1, 70), (10, 33), (1, 65), (0, 9), (5, 5)), heads=(4, 1), padding_rows=2)
DECODES = Case("decodes", ((1, 5), (1, 33), (1, 0), (1, 700), (1, 64)), heads=(16, 1), block_size=24)
LATENT_KERNELS = [kernel for kernel in PRESENT_FOR_LATENTS if kernel.name in ("cpu", "triton")]
ON_GPU = [kernel for kernel in LATENT_KERNELS if kernel.name == "triton" and not kernel.is_interpreted]
NO_GPU = [
    pytest.param(None, marks=pytest.mark.skip(reason="the interpreter has no bfloat16, a CPU no graph"), id="none")
]
each_on_gpu = pytest.mark.parametrize("kernel", ON_GPU or NO_GPU, ids=lambda kernel: kernel.name)
READERS = [
    pytest.param(refattn.mla, nullcontext, id="ref"),
    *(pytest.param(fastattn.mla, kernel.forced, id=kernel.name) for kernel in LATENT_KERNELS),
]
each_reader = pytest.mark.parametrize(("twin", "forced"), READERS)
each_twin = pytest.mark.parametrize("twin", [refattn.mla, fastattn.mla], ids=["ref", "fast"])
each_kind = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
each_kernel = pytest.mark.parametrize("kernel", LATENT_KERNELS, ids=lambda kernel: kernel.name)


def in_reach(dtype, twin, device):
    """Return the type, or float32 where it is float64 and the twin has no kernel for it."""
    return torch.float32 if dtype == torch.float64 and twin is fastattn.mla and device != "cpu" else dtype


# --- the mask, and memory that no query may see ---


@each_reader
@each_kind
def test_every_query_sees_the_quantized_values_up_to_its_position(twin, forced, kind, device):
    """Latents of one-hot rows: a quantized value of 4 under a scale of a quarter."""
    masks = masks_by_hand(MIXED, lambda i, j: j <= i)
    with forced():
        call = partial(attend, twin, softmax_scale=1.0, cache_scale=0.25)
        assert_latents_seen(call, MIXED, masks, device, number=4.0, dtype=kind)


@each_reader
@each_kind
def test_no_bit_depends_on_what_no_query_may_see(twin, forced, kind, device):
    answers = []
    for poison in (POISON, HARMLESS):
        given = in_8_bits(MIXED, kind, device=device, poison=poison)
        call = partial(attend, twin, given.absorbed, given.cache, given.batch, softmax_scale=SCALE)
        with forced():
            answers.append(call(cache_scale=OF_LATENTS))
    for poisonous, harmless in zip(*answers, strict=True):
        assert torch.equal(poisonous, harmless)


@each_twin
@each_kind
def test_no_bit_of_a_prefill_depends_on_what_no_query_may_see(twin, kind, device):
    answers = []
    for poison in (POISON, HARMLESS):
        given = in_8_bits(MIXED, kind, device=device, poison=poison)
        arguments = given.query, given.new, given.cache, *given.projections.values(), given.batch
        answers.append(prefill(twin, *arguments, workspace=12, cache_scale=OF_LATENTS, softmax_scale=SCALE))
    for poisonous, harmless in zip(*answers, strict=True):
        assert torch.equal(poisonous, harmless)


# --- the formula ---


@each_twin
@each_kind
@pytest.mark.parametrize("options", ["plain", "everything"])
def test_a_prefill_answers_as_absorbed_queries_do(twin, kind, options):
    """In float64: its context and its new tokens are the dequantized values that the absorbed way reads."""
    given = in_8_bits(MIXED, kind, dtype=torch.float64)
    options = filled(OPTIONS[options], 4, "cpu")
    out, lse = attend(twin, given.absorbed, given.cache, given.batch, cache_scale=OF_LATENTS, **options)
    new = torch.cat([key[s - q :] for (q, s), key in zip(MIXED.lens, given.keys, strict=True)])
    new = torch.nn.functional.pad(new, (0, 0, 0, MIXED.padding_rows))
    arguments = given.query, new, given.cache, *given.projections.values(), given.batch
    made, made_lse = prefill(twin, *arguments, workspace=12, cache_scale=OF_LATENTS, **options)
    whole = twin.project(out, given.projections["value_projection"])
    torch.testing.assert_close(made, whole, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(made_lse, lse, rtol=1e-10, atol=1e-12)


# --- the twins ---


def hold(given: Latents, sizes=EVEN, **options) -> None:
    """Hold the twin to the reference over the same 8-bit values, by the one tolerance; and into memory, and alone."""
    arguments = given.absorbed, given.cache, given.batch
    fixed = dict(latent_rank=sizes.rank, cache_scale=OF_LATENTS)
    out, lse = attend(fastattn.mla, *arguments, **fixed, **options)
    assert_matches_reference(out, lse, by_reference(attend, **fixed), *arguments, **options)
    memory = torch.full_like(out, math.nan)
    assert attend(fastattn.mla, *arguments, **fixed, return_lse=False, out=memory, **options) is memory
    assert torch.equal(memory, out)


OF_QUERIES = 0.013  # such that a small query has quantized values below the smallest normal one, and some saturate


@each_twin
@each_kind
def test_formula_of_rounded_queries(twin, kind):
    """The quantized queries by hand; a weight is not rounded, whether it might be or not."""
    given = in_8_bits(MIXED, kind, dtype=torch.float64)
    fixed = dict(cache_scale=OF_LATENTS, softmax_scale=SCALE)
    largest = torch.finfo(kind).max
    of_query = OF_QUERIES if kind == E4M3 else OF_QUERIES / 99  # its quantized values reach 57344
    numbers = (given.absorbed.float() / torch.tensor(of_query)).clamp(-largest, largest)
    assert (numbers.abs() == largest).any(), "no query saturates"
    quantized_values = [nearest(x, kind) for x in numbers.nan_to_num(0.0).flatten().tolist()]
    rounded = decoded(kind)[quantized_values].view(numbers.shape) * float(torch.tensor(of_query))
    expected = attend(twin, rounded, given.cache, given.batch, **fixed)
    for allowed in (False, True):
        got = attend(twin, given.absorbed, given.cache, given.batch, query_scale=of_query, fp8_weights=allowed, **fixed)
        for x, y in zip(got, expected, strict=True):
            torch.testing.assert_close(x[:-2], y[:-2], rtol=1e-10, atol=1e-12)


@each_kernel
@pytest.mark.parametrize("case", [DECODES, replace(MIXED, heads=(24, 1))], ids=["few-rows", "many-rows"])
def test_twins_round_queries_alike(kernel, case, device):
    """To the same quantized values: what is left is the tolerance of any kernel. And each layer by its own scale."""
    case = replace(case, lens=tuple((q, min(s, 300)) for q, s in case.lens)) if kernel.is_interpreted else case
    given = in_8_bits(case, E4M3, device=device, dtype=kernel.dtypes[-1])
    plan = fastattn.mla.plan(given.batch, block_size=case.block_size)
    arguments = given.absorbed, given.cache, given.batch
    for scale in (OF_QUERIES, 0.1, 0.05):
        fixed = dict(cache_scale=OF_LATENTS, query_scale=scale)
        with kernel.forced():
            out, lse = fastattn.mla.attention(
                *arguments[:2],
                plan,
                AttentionOptions(softmax_scale=SCALE),
                latent_rank=RANK,
                **fixed,
                fp8_weights=True,
                return_lse=True,
            )
        assert_matches_reference(out, lse, by_reference(attend, **fixed), *arguments, softmax_scale=SCALE)


@each_kernel
@pytest.mark.parametrize("seed", range(4))
def test_the_error_of_a_prefill_is_that_of_keys_in_the_type_of_the_query(kernel, seed, device):
    """Scores of hundreds, a scale of 1: rounding the keys moves answers by tenths, whatever computes the attention.

    Beside the same keys, made and rounded here, it errs as little as anywhere.
    """
    sizes = Sizes(32, 8, 48, 64, 8)
    dtype = torch.bfloat16 if torch.bfloat16 in kernel.dtypes else kernel.dtypes[0]
    case = Case("steep", ((20, 90), (3, 40), (33, 150)), heads=(1, 1), block_size=1)
    given = in_8_bits(case, E4M3, sizes=sizes, dtype=dtype, device=device, seed=seed)
    options = dict(softmax_scale=1.0, alibi_slopes=torch.tensor([0.05], device=device))
    query = 16 * given.query
    arguments = query, given.new, given.cache, *given.projections.values(), given.batch
    with kernel.forced():
        out, lse = prefill(fastattn.mla, *arguments, workspace=90, cache_scale=OF_LATENTS, **options)
    quantized_values = (given.new.float() / OF_LATENTS).clamp(-448, 448).to(E4M3)  # as later steps read the new tokens
    new = (quantized_values.float() * OF_LATENTS).to(query).split([q for q, _ in case.lens])
    context = [keys[: s - q].to(query) for (q, s), keys in zip(case.lens, given.keys, strict=True)]
    latent, rope_key = torch.cat([x for pair in zip(context, new, strict=True) for x in pair]).split([32, 8], dim=1)
    key_projection, value_projection = (projection[0].mT for projection in given.projections.values())
    key = torch.cat([latent @ key_projection, rope_key], dim=1)[:, None]
    value = (latent @ value_projection)[:, None]
    rows = query, key, value, replace(given.batch, block_table=None)
    assert_matches_reference(out, lse, partial(twinattn.kit.plan_and_attend, refattn.varlen), *rows, **options)


@pytest.mark.covers("D189")
@pytest.mark.parametrize(
    ("kernel", "kind", "options"),
    [
        pytest.param(kernel, KINDS[kind], options, id=f"{kernel.name}-{kind}-{options}")
        for kernel in LATENT_KERNELS
        for kind in KINDS
        for options in OPTIONS
        if not kernel.is_interpreted or kind == "e4m3" or options in ("everything", "invariant")
    ],
)
def test_twins_agree(kernel, kind, options, device):
    given = in_8_bits(MIXED, kind, device=device, dtype=kernel.dtypes[0])
    with kernel.forced():
        hold(given, **filled(OPTIONS[options], 4, device))


@pytest.mark.parametrize(
    ("kernel", "dtype"),
    [pytest.param(kernel, dtype, id=f"{kernel.name}-{dtype}") for kernel in LATENT_KERNELS for dtype in kernel.dtypes],
)
@pytest.mark.parametrize("spare", [3, 8], ids=["odd-rows", "even-rows"])
@pytest.mark.parametrize("case", [DECODES, replace(MIXED, heads=(24, 1))], ids=["few-rows", "many-rows"])
def test_twins_agree_in_every_type(kernel, dtype, spare, case, device):
    """In pairs and not, in tiles of 16 rows and of 64, over keys that are split."""
    case = replace(case, lens=tuple((q, min(s, 300)) for q, s in case.lens)) if kernel.is_interpreted else case
    given = in_8_bits(case, E4M3, device=device, dtype=dtype, sizes=SMALL._replace(spare=spare))
    if kernel.name == "triton":
        from fastattn.kernels.triton.quantized import in_pairs
        from fastattn.kernels.triton.tuning import are_pairs

        assert are_pairs(in_pairs(given.cache.view(torch.uint8)[..., None, :RANK])) == (spare == 8)
    with kernel.forced():
        hold(given, **filled({}, case.heads[0], device))


def with_gaps(cache: torch.Tensor) -> torch.Tensor:
    """Copy a pool such that neither its blocks nor its rows nor their elements lie side by side."""
    n, p, c = cache.shape
    room = torch.full((n, p + 2, 2 * c), 127, dtype=torch.uint8, device=cache.device).view(cache.dtype)
    return room[:, :p, ::2].copy_(cache)


@each_kernel
def test_pools_with_gaps(kernel, device):
    given = in_8_bits(MIXED, E4M3, device=device, dtype=kernel.dtypes[0])
    given.cache = with_gaps(given.cache)
    with kernel.forced():
        hold(given, **filled({}, 4, device))


def test_prefills_over_pools_with_gaps(device):
    given = in_8_bits(MIXED, E4M3, device=device)
    arguments = given.query, given.new, with_gaps(given.cache), *given.projections.values(), given.batch
    fixed, options = dict(workspace=12, cache_scale=OF_LATENTS), filled({}, 4, device)
    out, lse = prefill(fastattn.mla, *arguments, **fixed, **options)
    assert_matches_reference(out, lse, by_reference(prefill, **fixed), *arguments, **options)


@of_batches
@drawn(case=ragged_cases(), kind=st.sampled_from(list(KINDS.values())), options=st.sampled_from(list(OPTIONS)))
def test_twins_agree_on_drawn_batches(case, kind, options):
    hold(in_8_bits(case, kind), **filled(OPTIONS[options], case.heads[0], "cpu"))


@pytest.mark.parametrize("kernel", [kernel for kernel in PRESENT if not kernel.is_interpreted], ids=lambda x: x.name)
@each_kind
@pytest.mark.parametrize("workspace", [12, 10**6])
def test_prefills_agree(kernel, kind, workspace, device):
    """Context and new tokens are dequantized values, in the type of the query."""
    given = in_8_bits(replace(MIXED, heads=(64, 1)), kind, device=device, dtype=kernel.dtypes[0])
    arguments = given.query, given.new, given.cache, *given.projections.values(), given.batch
    fixed, options = dict(workspace=workspace, cache_scale=OF_LATENTS), filled(OPTIONS["sinks"], 64, device)

    def hold_prefill():
        out, lse = prefill(fastattn.mla, *arguments, **fixed, **options)
        assert_matches_reference(out, lse, by_reference(prefill, **fixed), *arguments, **options)

    with kernel.forced():
        kernel.check(hold_prefill)


@each_twin
@each_kind
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
def test_a_prefill_sees_its_new_tokens_as_later_steps_do(twin, kind, dtype, device):
    """Numbers between two 8-bit values, larger than the largest, and none at all: the dequantized written values."""
    given = in_8_bits(SMALL_CASE, kind, device=device, dtype=in_reach(dtype, twin, device), poison=HARMLESS)
    dtype, generator = given.new.dtype, torch.Generator().manual_seed(1)
    given.new = torch.randn(given.new.shape, generator=generator).to(given.new) * 3
    given.new[0, 3], given.new[1, RANK + 2] = 1e9, -1e9
    written = torch.zeros_like(given.cache[:1, : len(given.new)])
    twin.write(*given.new.split((RANK, ROPE), dim=1), written, torch.arange(3, device=device), cache_scale=OF_LATENTS)
    rounded = written[0, :, : RANK + ROPE].to(dtype) * torch.tensor(OF_LATENTS)

    def answer(new):
        arguments = given.query, new, given.cache, *given.projections.values(), given.batch
        return prefill(twin, *arguments, workspace=8, cache_scale=OF_LATENTS, softmax_scale=SCALE)

    for found, expected, nearby in zip(answer(given.new), answer(rounded), answer(rounded * 1.001), strict=True):
        assert torch.equal(found, expected)
        assert torch.equal(nearby, expected)  # a thousandth more has the same quantized values


@each_twin
@each_kind
def test_a_prompt_may_be_cut_anywhere(twin, kind, device):
    """Its queries see the same keys in a chunk of one token as in a chunk of all, up to the order of sums."""
    dtype = in_reach(torch.float64, twin, device)
    rtol, atol = (1e-10, 1e-11) if dtype == torch.float64 else (1e-4, 1e-5)
    given = in_8_bits(Case("prompt", ((33, 33),), heads=(4, 1)), kind, device=device, dtype=dtype)
    generator = torch.Generator().manual_seed(2)
    given.new = torch.randn(given.new.shape, generator=generator).to(given.new)
    slots = slot_mapping(given.batch, 33, block_size=16)
    twin.write(*given.new.split((RANK, ROPE), dim=1), given.cache, slots, cache_scale=OF_LATENTS)
    answers = []
    for size in (1, 7, 33):
        parts = []
        for start in range(0, 33, size):
            rows = slice(start, min(33, start + size))
            batch = make_batch([rows.stop - start], [rows.stop], given.batch.block_table.tolist(), device=device)
            arguments = given.query[rows], given.new[rows], given.cache, *given.projections.values(), batch
            parts.append(prefill(twin, *arguments, workspace=12, cache_scale=OF_LATENTS, softmax_scale=SCALE))
        answers.append([torch.cat(part) for part in zip(*parts, strict=True)])
    absorbed = attend(twin, given.absorbed, given.cache, given.batch, cache_scale=OF_LATENTS, softmax_scale=SCALE)
    answers.append([twin.project(absorbed[0], given.projections["value_projection"]), absorbed[1]])
    for others in answers[1:]:
        for found, expected in zip(others, answers[0], strict=True):
            torch.testing.assert_close(found, expected, rtol=rtol, atol=atol)


@each_kernel
@each_kind
def test_every_code_is_read(kernel, kind, device):
    """One key of all quantized values: it is the answer, and the score of each query is one of its elements."""
    dtype = torch.float32
    numbers = decoded(kind)
    finite = numbers.isfinite()
    cache = torch.where(finite, torch.arange(256), 0).to(torch.uint8).view(kind).view(1, 1, 256).to(device)
    query = torch.eye(256, dtype=dtype, device=device)[:, None]
    for rows in (1, 32):
        for first in range(0, 256, 256 // (8 if rows > 1 else 3)):
            one = query[first : first + rows]
            batch = make_batch([len(one)], [1], [[0]], device=device)
            plan = refattn.mla.plan(batch, block_size=1)
            plan = replace(plan, causal=False)
            options, of_cache = AttentionOptions(softmax_scale=0.25), dict(latent_rank=224, cache_scale=0.5)
            with kernel.forced():
                call = partial(fastattn.mla.attention, one, cache, plan, options, **of_cache, return_lse=True)
                out, lse = call()
            expected = torch.where(finite, numbers, 0.0)
            unit = torch.finfo(dtype).eps
            torch.testing.assert_close(
                out[:, 0].cpu().double(), (expected[:224] / 2).expand(len(one), -1), rtol=unit, atol=0
            )
            torch.testing.assert_close(
                lse[:, 0].cpu().double(), expected[first : first + rows] / 8, rtol=1e-6, atol=1e-12
            )


@each_kernel
def test_nan_that_a_query_sees_comes_out(kernel, device):
    """In a query, in a quantized latent, in a rotary key; and an infinite value of e5m2, which has a weight."""
    case = Case("nan", ((2, 20), (2, 100), (2, 30)), heads=(3, 1))
    for at, value in ((35, E4M3), (RANK + 1, E4M3), (5, E5M2)):
        given = in_8_bits(case, value, device=device, dtype=kernel.dtypes[0])
        query, batch = given.absorbed, given.batch
        query[0, 1] = math.nan
        bad = torch.tensor(math.inf if value == E5M2 else math.nan).to(value).to(device)
        given.cache[batch.block_table[1, 1], 3, at] = bad
        with kernel.forced():
            out, lse = attend(fastattn.mla, query, given.cache, batch, cache_scale=OF_LATENTS, **filled({}, 3, device))
        reference = attend(refattn.mla, query, given.cache, batch, cache_scale=OF_LATENTS, **filled({}, 3, device))
        seen = torch.zeros(6, 3, dtype=torch.bool)
        seen[0, 1] = seen[2:4] = True
        assert torch.equal(reference[0].isnan().any(-1).cpu(), seen)
        assert torch.equal(out.isnan().any(-1).cpu(), seen)
        if value == E4M3:
            assert torch.equal(lse.isnan().cpu(), seen)


@pytest.mark.parametrize("of", [1e-30, 1e4, 1e30])
@each_on_gpu
@pytest.mark.parametrize("heads", [4, 24])
def test_queries_of_any_size(of, kernel, heads, device):
    """A query in bfloat16 may be larger than all of float16, or smaller, with a rotary part of zeros."""
    given = in_8_bits(replace(MIXED, heads=(heads, 1)), E4M3, device=device, dtype=torch.bfloat16)
    query = given.absorbed.nan_to_num(0.5, 0.5, 0.5).float() * of
    query[::2, :, RANK:] = 0.0
    query[1::3] = 0.0
    arguments, fixed = (query.bfloat16(), given.cache, given.batch), dict(cache_scale=OF_LATENTS)
    with kernel.forced():
        out, lse = attend(fastattn.mla, *arguments, **fixed, softmax_scale=0.1 / of)
    assert_matches_reference(out, lse, by_reference(attend, **fixed), *arguments, softmax_scale=0.1 / of)


@each_on_gpu
@pytest.mark.parametrize("heads", [16, 128])
@each_kind
def test_a_graph_stays_right_when_its_sequences_grow(kernel, heads, kind, device):
    """DeepSeek's sizes, captured short and replayed long."""
    sizes = REAL._replace(spare=64)
    case = Case("graph", ((1, 900), (1, 300), (1, 2100)), heads=(heads, 1), block_size=64)
    given = in_8_bits(case, kind, device=device, dtype=torch.bfloat16, sizes=sizes, poison=HARMLESS)
    lengths = given.batch.seq_lens.clone()
    given.batch.seq_lens.copy_(torch.tensor([5, 70, 1]))
    plan, options = fastattn.mla.plan(given.batch, block_size=64), AttentionOptions(softmax_scale=SCALE)
    of_cache, graph = dict(latent_rank=sizes.rank, cache_scale=OF_LATENTS), torch.cuda.CUDAGraph()
    call = partial(fastattn.mla.attention, given.absorbed, given.cache, plan, options, **of_cache, return_lse=True)
    with kernel.forced():
        call()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            out, lse = call()
    given.batch.seq_lens.copy_(lengths)
    graph.replay()
    arguments = given.absorbed, given.cache, given.batch
    assert_matches_reference(out, lse, by_reference(attend, **of_cache), *arguments, softmax_scale=SCALE)


@each_on_gpu
@pytest.mark.parametrize("heads", [16, 20, 128])
@each_kind
def test_twins_of_deepseeks_size_agree(kernel, heads, kind, device):
    sizes = REAL._replace(spare=64)
    lens = ((1, 5), (1, 33), (1, 0), (1, 4097), (1, 700)) if heads != 20 else ((3, 70), (20, 20), (0, 5), (2, 0))
    case = Case("real", lens, heads=(heads, 1), block_size=64, padding_rows=2)
    given = in_8_bits(case, kind, device=device, dtype=torch.bfloat16, sizes=sizes)
    with kernel.forced():
        for options in ("plain", "sinks", "invariant"):
            hold(given, sizes, **filled(OPTIONS[options], heads, device))


# --- writing ---


@each_reader
@each_kind
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bfloat16", "float32"])
def test_write_by_hand(twin, forced, kind, dtype, device):
    """The nearest value of each number; infinity saturates, NaN stays, slot -1 and the spare columns are left alone."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randn(9, RANK + ROPE, generator=generator) * torch.randn(9, 1, generator=generator).exp() * 40
    tokens[1, 3], tokens[2, RANK], tokens[3, 1], tokens[4, RANK + 1] = math.inf, -math.inf, math.nan, math.nan
    tokens[5] = 0.0
    tokens = tokens.to(dtype)
    cache = torch.full((5, 4, RANK + ROPE + 3), 99, dtype=torch.uint8).to(device).view(kind)
    expected = bits(cache.cpu()).view(20, -1)
    slots = [17, -1, 2, 0, 19, 5, 11, 8, 3]
    largest = torch.finfo(kind).max
    for slot, token in zip(slots, tokens.float() / torch.tensor(0.3), strict=True):
        if slot >= 0:
            quantized_values = [nearest(x, kind) for x in token.nan_to_num(0.0).clamp(-largest, largest).tolist()]
            quantized_values = torch.tensor(quantized_values, dtype=torch.uint8)
            expected[slot, : RANK + ROPE] = torch.where(token.isnan(), bits(token.to(kind)), quantized_values)
    latent, rope_key = tokens.to(device).split((RANK, ROPE), dim=1)
    with forced():
        twin.write(latent, rope_key, cache, torch.tensor(slots, device=device), cache_scale=0.3)
    written = cache.cpu().view(20, -1)
    is_nan = expected.view(kind).float().isnan()
    assert torch.equal(written.float().isnan(), is_nan)  # a GPU forgets the sign of NaN
    assert torch.equal(bits(written)[~is_nan], expected[~is_nan])


# --- bad input ---

SMALL_CASE = Case("small", ((2, 5), (1, 20)), heads=(4, 1))
BAD_SCALES = {
    "cache_scale: expected a finite number above 0, got 0.0": (E4M3, 0.0),
    "cache_scale: expected a finite number above 0, got nan": (E4M3, math.nan),
    "cache_scale: expected a finite number above 0, got inf": (E5M2, math.inf),
    "cache_scale: expected a number of float32, from 1.4e-45 to 3.4e+38, got 1e+39": (E4M3, 1e39),
    "cache_scale: expected a number of float32, from 1.4e-45 to 3.4e+38, got 1e-60": (E5M2, 1e-60),
    "cache_scale: expected a finite number above 0, got float32 []": (E4M3, torch.tensor(0.5)),
    "cache_scale: expected 1 for a cache of float32, which holds no fp8 values, got 0.5": (torch.float32, 0.5),
}


@each_twin
@pytest.mark.usefixtures("shapes_unchecked")
@pytest.mark.parametrize("message", BAD_SCALES)
def test_bad_scales_are_named(twin, message):
    kind, scale = BAD_SCALES[message]
    given = Latents(SMALL_CASE, poison=HARMLESS)
    cache = given.cache.to(kind)
    before = bits(cache).clone()
    latent, rope_key = given.new.split((RANK, ROPE), dim=1)
    named = pytest.raises(ValueError, match="^" + re.escape(message))
    with named:
        attend(twin, given.absorbed, cache, given.batch, cache_scale=scale, softmax_scale=SCALE)
    with named:
        arguments = given.query, given.new, cache, *given.projections.values(), given.batch
        prefill(twin, *arguments, workspace=8, cache_scale=scale, softmax_scale=SCALE)
    with named:
        twin.write(latent, rope_key, cache, torch.arange(3), cache_scale=scale)
    assert torch.equal(bits(cache), before)


BAD_ROUNDING = {
    "query_scale: expected a finite number above 0, got 0.0": (E4M3, dict(query_scale=0.0)),
    "query_scale: expected a finite number above 0, got nan": (E4M3, dict(query_scale=math.nan)),
    "query_scale: expected a number of float32, from 1.4e-45 to 3.4e+38, got 1e-50": (E4M3, dict(query_scale=1e-50)),
    "query_scale: expected None for a cache of float32, which holds no fp8 values": (
        torch.float32,
        dict(query_scale=0.5),
    ),
    "fp8_weights: expected a query_scale with it": (E4M3, dict(fp8_weights=True)),
    "fp8_weights: expected True or False, got 1": (E4M3, dict(query_scale=1.0, fp8_weights=1)),
}


@each_twin
@pytest.mark.usefixtures("shapes_unchecked")
@pytest.mark.parametrize("message", BAD_ROUNDING)
def test_bad_rounding_is_named(twin, message):
    kind, asked = BAD_ROUNDING[message]
    given = Latents(SMALL_CASE, poison=HARMLESS)
    with pytest.raises(ValueError, match="^" + re.escape(message)):
        attend(twin, given.absorbed, given.cache.to(kind), given.batch, softmax_scale=SCALE, **asked)


@each_twin
@pytest.mark.usefixtures("shapes_unchecked")
def test_bad_pools_and_writes_are_named_and_nothing_is_written(twin):
    given = Latents(SMALL_CASE, poison=HARMLESS)
    quantized_values = torch.zeros_like(given.cache).to(E4M3)
    for cache, message in (
        (
            quantized_values.view(torch.uint8),
            "latent_rank: expected a multiple of 128 for packed latents",
        ),  # as bytes are packed
        (quantized_values.view(torch.int8), "cache: expected unquantized or fp8 latents, got int8: a key"),
        (quantized_values[..., :39], "cache: expected rows of at least r + rope = 40 elements, got c=39"),
        (quantized_values[:, :, None], "cache: expected [n, p, c], got float8_e4m3fn"),
        (quantized_values[:, :8], "cache: expected blocks of 16 tokens, as in the plan, got p=8"),
    ):
        plan = twin.plan(given.batch, block_size=16)
        with pytest.raises(ValueError, match="^" + re.escape(message)):
            twin.attention(given.absorbed, cache, plan, AttentionOptions(softmax_scale=SCALE), latent_rank=RANK)
    latent, rope_key, slots = torch.ones(2, RANK), torch.ones(2, ROPE), torch.tensor([1, 2])
    for arguments, message in (
        ((latent.to(E4M3), rope_key, quantized_values, slots), "latent: expected a floating point type"),
        (
            (latent, rope_key, quantized_values.view(torch.int8), slots),
            "cache: expected unquantized or fp8 latents",
        ),
        ((latent, rope_key.half(), quantized_values, slots), "rope_key: expected float32 [t=2, rope], got float16"),
        ((latent, torch.ones(2, ROPE + 9), quantized_values, slots), "cache: expected rows of at least r + rope = 49"),
        ((latent, rope_key, quantized_values, torch.tensor([1, 10**6])), "slot_mapping: expected slots in 0.."),
        ((latent, rope_key, quantized_values, torch.tensor([1, 1])), "slot_mapping: expected each slot once"),
    ):
        with pytest.raises(ValueError, match="^" + re.escape(message)):
            twin.write(*arguments, cache_scale=0.5)
        assert not bits(quantized_values).any()
