"""Differential attention: two softmaxes over a cache of two halves, one subtracted."""

import contextlib
import dataclasses
import importlib
import math
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from einops import rearrange, repeat
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional

import fastattn
import fastattn.differential
import fastattn.kv_cache
import refattn.chunked_prefill
import refattn.differential
import refattn.kv_cache
import refattn.metadata
from fastattn.kernels.cpu import differential as cpu_pairs
from refattn.options import AttentionOptions
from refattn.plan import Plan
from refattn.scales import Fp8Scales, Int8Scales
from tests.helpers import interpreted
from tests.helpers.alone import assert_rows_do_not_change
from tests.helpers.batches import (
    CASES,
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
from tests.helpers.kernels_present import PRESENT, each_kernel
from tests.helpers.pairs import every_pair_on_cpu
from tests.helpers.stored import KINDS, bits, decoded, in_scales
from tests.helpers.tolerance import assert_matches_reference, assert_twins_agree

each_twin = pytest.mark.parametrize("twin", [refattn.differential, fastattn.differential], ids=["ref", "fast"])

SMALL = [case for case in CASES if max(s for _, s in case.lens) < 300]
WINDOWS = [(-1, -1), (-1, 0), (0, 0), (3, 0), (16, 0), (5000, 0), (2, 3), (-1, 2), (4, -1)]
LAMBDA = dict(lambda_full=torch.tensor(0.35), lambda_init=0.2)
OPTIONS = {
    "plain": {},
    "norm": dict(norm_weight=True, norm_eps=1e-2),
    "negative-lambda": dict(lambda_full=torch.tensor(-0.6), lambda_init=0.8),
    "scale": dict(softmax_scale=0.3),
    "negative-scale": dict(softmax_scale=-0.3),
    "not-causal": dict(causal=False),
    "window": dict(window_size=(20, 0)),
    "window-of-one": dict(window_size=(0, 0)),
    "two-sided-window": dict(causal=False, window_size=(7, 5)),
    "softcap": dict(softcap=1.0),
    "alibi": dict(alibi_slopes=True),
    "alibi-both-ways": dict(causal=False, alibi_slopes=True),
    "sinks": dict(sinks=True),
    "everything": dict(
        softmax_scale=0.2, window_size=(30, 0), softcap=5.0, alibi_slopes=True, sinks=True, norm_weight=True
    ),
}


def in_pairs(case: Case) -> Case:
    """Twice the heads, so that there is an even number of them; values are as wide as keys here."""
    h, hk = case.heads
    return dataclasses.replace(case, heads=(2 * h, 2 * hk), value_head_size=0)


def two_halves(key_cache: torch.Tensor, value_cache: torch.Tensor) -> torch.Tensor:
    """Turn ordinary pools, with their poison, into a pool of two halves: heads 0, 2, ... and heads 1, 3, ..."""
    return torch.stack(
        [torch.stack([key_cache[:, :, half::2], value_cache[:, :, half::2]]) for half in (0, 1)]
    )  # [half, key or value, n, p, hk/2, d]


def lay_out(case: Case, **options):
    """Return the positional arguments of the path, and the keys and values in plain rows."""
    inputs = build(case, **options)
    return (inputs.query, two_halves(inputs.key_cache, inputs.value_cache), inputs.batch), inputs


def filled(options: dict, case: Case, device: str) -> dict:
    """Fill in lambda, and the options that have one number per head or per element."""
    result = {**LAMBDA, **options}
    h, d = case.heads[0], case.head_size
    if "alibi_slopes" in options:
        result["alibi_slopes"] = torch.tensor([2.0 ** -(i / 2 + 1) for i in range(h)], device=device)
    if "sinks" in options:
        result["sinks"] = torch.linspace(-2.0, 3.0, h, device=device)
    if "norm_weight" in options:
        result["norm_weight"] = torch.linspace(0.5, 2.0, 2 * d, device=device)
    result["lambda_full"] = result["lambda_full"].to(device)
    return result


# --- the mask, read out ---


def softmaxes_read_out(twin, weight_of_second: float):
    """Call a twin as attention with values of `2 * d`: the same softmax twice, and a norm that changes nothing.

    An eps that dwarfs every mean square makes the norm a division by its root. A lambda of 0 shows the first softmax
    alone; a lambda of -1 adds the second to it.
    """
    root = 1e15

    def attention(query, key_cache, value_cache, batch, **options):
        keys = (key_cache, key_cache)
        values = value_cache.chunk(2, dim=-1)
        cache = torch.stack([torch.stack(pair) for pair in zip(keys, values, strict=True)])
        weight = torch.tensor(-weight_of_second, device=query.device)
        out, lse = plan_and_attend(
            twin,
            repeat(query, "t pairs d -> t (pairs two) d", two=2),
            cache,
            batch,
            lambda_full=weight,
            lambda_init=0.0,
            norm_eps=root**2,
            **options,
        )
        assert torch.equal(lse[:, ::2], lse[:, 1::2]), "the softmaxes differ"
        out = rearrange(out, "t (pairs two) d -> t pairs (two d)", two=2) * (root / (1 + weight_of_second))
        return out, lse[:, ::2]

    return attention


@pytest.mark.covers("C111")
@each_twin
@pytest.mark.parametrize("weight_of_second", [0.0, 1.0], ids=["first", "both"])
@pytest.mark.parametrize("case", SMALL, ids=str)
def test_every_query_sees_the_keys_up_to_its_position(twin, weight_of_second, case, device):
    case = dataclasses.replace(case, head_size=64, value_head_size=128)
    masks = read_masks(softmaxes_read_out(twin, weight_of_second), case, device=device)
    assert_same_masks(masks, masks_by_hand(case, lambda i, j: j <= i))


@pytest.mark.covers("C117")
@each_twin
@pytest.mark.parametrize("window", WINDOWS, ids=str)
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "both-ways"])
def test_a_window_shows_exactly_its_keys(twin, window, causal, device):
    case = Case(
        "mixed",
        ((4, 6), (1, 70), (10, 17), (40, 40), (5, 2), (1, 64)),
        heads=(2, 1),
        value_head_size=128,
        padding_rows=2,
    )
    left, right = window

    def sees(i, j):
        return (left < 0 or j >= i - left) and (right < 0 or j <= i + right) and (not causal or j <= i)

    attention = softmaxes_read_out(twin, 1.0)
    masks = read_masks(attention, case, device=device, window_size=window, causal=causal)
    assert_same_masks(masks, masks_by_hand(case, sees))


# --- arithmetic that shares no code with the reference ---


def assert_is_by_formula(out, query, keys, values, case: Case) -> None:
    """Both softmaxes by PyTorch with an explicit mask, the rest by hand in float64; lambda 0.35 and 0.2, eps 1e-3."""
    d, row = case.head_size, 0
    for (q, s), key, value in zip(case.lens, keys, values, strict=True):
        seeing = max(q - s, 0)  # the queries before it see nothing, which sdpa answers with NaN
        mine = out[row : row + q]
        assert not mine[:seeing].any()
        if q and s:
            mask = torch.ones(q, s, dtype=torch.bool, device=out.device).tril(s - q)[seeing:]
            both = torch.cat([value[:, 0::2], value[:, 1::2]], dim=-1)  # [s, pairs, 2 * d]
            first, second = (
                functional.scaled_dot_product_attention(
                    query[row + seeing : row + q, half::2].transpose(0, 1),
                    key[:, half::2].transpose(0, 1),
                    both.transpose(0, 1),
                    attn_mask=mask,
                    enable_gqa=True,
                )
                for half in (0, 1)
            )  # [pairs, t, 2 * d]
            difference = first - 0.35 * second
            norm = (difference.pow(2).sum(-1, keepdim=True) / (2 * d) + 1e-3).sqrt()
            expected = (0.8 * norm_weight(d, out.device) * difference / norm).transpose(0, 1).reshape(q - seeing, -1, d)
            torch.testing.assert_close(mine[seeing:], expected, rtol=1e-11, atol=1e-11)
        row += q
    assert not out[row:].any()


def norm_weight(d: int, device) -> torch.Tensor:
    return torch.linspace(0.5, 2.0, 2 * d, dtype=torch.float64, device=device)


def of_formula(case: Case, device) -> dict:
    """Return the arguments that `assert_is_by_formula` has in it."""
    lambda_full = torch.tensor(0.35, dtype=torch.float64, device=device)
    weight = norm_weight(case.head_size, device)
    return dict(lambda_full=lambda_full, lambda_init=0.2, norm_weight=weight, norm_eps=1e-3)


@pytest.mark.core
@pytest.mark.covers("C104", "C110")
@pytest.mark.parametrize("case", SMALL, ids=str)
def test_reference_equals_torch_sdpa_and_a_formula(case, device):
    case = in_pairs(case)
    arguments, inputs = lay_out(case, device=device, dtype=torch.float64)
    out = plan_and_attend(refattn.differential, *arguments, **of_formula(case, device))
    assert_is_by_formula(out, inputs.query, inputs.keys, inputs.values, case)


@pytest.mark.core
@pytest.mark.covers("C109")
@each_twin
@pytest.mark.parametrize("lens", [((23, 23),), ((1, 23),), ((7, 23),)], ids=["prefill", "decode", "chunk"])
def test_equals_the_eager_attention_of_diffllama(twin, lens, device):
    """The engine serves DiffLlama by this path: heads through `interleave_halves`, outputs as they are."""
    from transformers import DiffLlamaConfig
    from transformers.models.diffllama import modeling_diffllama as diffllama

    config = DiffLlamaConfig(
        hidden_size=96,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=16,
        lambda_std_dev=0.4,
        attn_implementation="eager",
    )
    torch.manual_seed(0)
    layer = diffllama.DiffLlamaAttention(config, layer_idx=3).double()
    ((query_len, seq_len),) = lens
    hidden = torch.randn(1, seq_len, 96, dtype=torch.float64)
    cos, sin = (x.double() for x in diffllama.DiffLlamaRotaryEmbedding(config)(hidden, torch.arange(seq_len)[None]))
    mask = torch.full((seq_len, seq_len), -torch.inf, dtype=torch.float64).triu(1)[None, None]
    with torch.no_grad():
        expected, _ = layer(hidden, (cos, sin), mask)
        query, key, value = (
            rearrange(project(hidden), "1 t (h d) -> 1 h t d", d=16)
            for project in (layer.q_proj, layer.k_proj, layer.v_proj)
        )
        query, key = diffllama.apply_rotary_pos_emb(query, key, cos, sin)
        query, key, value = (
            twin.interleave_halves(rearrange(x, "1 h t d -> t h d")).to(device, torch.float32)
            for x in (query, key, value)
        )
        vectors = [getattr(layer, f"lambda_{name}") for name in ("q1", "k1", "q2", "k2")]
        lambda_full = twin.compute_lambda(*vectors, lambda_init=layer.lambda_init).to(device)

        cache = twin.allocate(4, 16, 4, 16, device=device)
        batch = refattn.metadata.make_batch([seq_len], [seq_len], [[2, 1]], device=device)
        slots = refattn.metadata.slot_mapping(batch, seq_len, block_size=16)
        twin.write(key, value, cache, slots)
        batch = refattn.metadata.make_batch([query_len], [seq_len], [[2, 1]], device=device)
        out = plan_and_attend(
            twin,
            query[-query_len:],
            cache,
            batch,
            lambda_full=lambda_full,
            lambda_init=layer.lambda_init,
            norm_eps=layer.groupnorm.eps,
        )
        mine = layer.o_proj(rearrange(out, "t h d -> t (h d)").double().cpu())
    # transformers computes its softmax in float32, whatever the model is in.
    torch.testing.assert_close(mine, expected[0, -query_len:], rtol=1e-5, atol=1e-6)


@pytest.mark.core
@pytest.mark.covers("C109")
@each_twin
def test_the_norm_comes_after_the_subtraction_and_over_both_halves(twin, device):
    """So the mean square of a pair's output is that of the norm, whatever the lambda; of a head alone it is not."""
    case = Case("norm", ((5, 30), (1, 12)), heads=(4, 2))
    (query, cache, batch), _ = lay_out(case, device=device)
    for weight in (0.1, 0.9, 2.0):
        lambda_full = torch.tensor(weight, device=device)
        out = plan_and_attend(twin, query, cache, batch, lambda_full=lambda_full, lambda_init=0.3, norm_eps=1e-12)
        pairs = rearrange(out, "t (pairs two) d -> t pairs (two d)", two=2).square().mean(-1)
        torch.testing.assert_close(pairs, torch.full_like(pairs, 0.7**2), rtol=1e-5, atol=0)
        heads = out.square().mean(-1)
        assert not torch.allclose(heads, torch.full_like(heads, 0.7**2), rtol=1e-2)


@pytest.mark.core
@pytest.mark.covers("C106", "C107")
@each_twin
def test_lambda_is_a_difference_of_exponentials(twin):
    vectors = [torch.tensor(x) for x in ([0.1, 0.2], [0.3, 0.4], [0.5, -0.2], [0.1, 0.6])]
    expected = math.exp(0.1 * 0.3 + 0.2 * 0.4) - math.exp(0.5 * 0.1 - 0.2 * 0.6) + 0.8
    assert float(twin.compute_lambda(*vectors, lambda_init=0.8)) == pytest.approx(expected, rel=1e-6)
    halves = [vector.bfloat16() for vector in vectors]
    result = twin.compute_lambda(*halves, lambda_init=0.8)
    wide = twin.compute_lambda(*(vector.double() for vector in halves), lambda_init=0.8)
    assert result.dtype == torch.float32
    assert wide.dtype == torch.float64
    assert float(result) == pytest.approx(float(wide), rel=1e-6)


@each_twin
def test_halves_are_interleaved(twin):
    names = torch.tensor([11, 12, 13, 21, 22, 23]).reshape(1, 6, 1)
    assert twin.interleave_halves(names).flatten().tolist() == [11, 21, 12, 22, 13, 23]


# --- the twin against the reference ---


@pytest.mark.core
@pytest.mark.covers("C104", "C108", "C110", "C117")
@pytest.mark.parametrize("options", [OPTIONS["plain"], OPTIONS["everything"]], ids=["plain", "everything"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_twins_agree(case, options, device):
    case = in_pairs(case)
    arguments, _ = lay_out(case, device=device, dtype=torch.float32 if device == "cpu" else torch.bfloat16)
    assert_twins_agree("differential", *arguments, **filled(options, case, device))


@each_kernel
@pytest.mark.parametrize("options", OPTIONS)
def test_twins_agree_in_every_type(options, kernel, device):
    """On a CPU with the options that hold most; an option is computed in one type there, float32."""
    case = Case("mixed", ((20, 40), (1, 70), (10, 17), (3, 2)), heads=(8, 4), padding_rows=3)
    for dtype in kernel.dtypes if device != "cpu" or options in ("plain", "everything") else kernel.dtypes[:1]:
        arguments, _ = lay_out(case, device=device, dtype=dtype)
        with kernel.forced():
            kernel.check(assert_twins_agree, "differential", *arguments, **filled(OPTIONS[options], case, device))


@pytest.mark.parametrize(
    "kernel", [kernel for kernel in PRESENT if kernel.name in ("cpu", "triton")], ids=lambda kernel: kernel.name
)
def test_rows_do_not_change_with_the_rest_of_the_batch(kernel, device, monkeypatch):
    """A long sequence is not split, alone or among short ones, and a decode has the tile of a chunk."""
    if kernel.is_interpreted:  # the interpreter's own products change with a row's place
        interpreted.add_products_in_order(monkeypatch)
    case = Case("invariant", ((1, 700), (40, 60), (1, 9), (1, 300)), heads=(8, 4))
    arguments, _ = lay_out(case, device=device)
    options = filled(OPTIONS["norm"], case, device) | dict(batch_invariant=True, return_lse=True)
    with kernel.forced():
        assert_rows_do_not_change(partial(plan_and_attend, fastattn.differential, **options), *arguments)


@of_batches
@given(case=ragged_cases(head_sizes=(64, 96)), options=st.sampled_from(list(OPTIONS)), seed=st.integers(0, 2**16))
def test_twins_agree_on_drawn_batches(case, options, seed, device):
    case = in_pairs(case)
    arguments, _ = lay_out(case, device=device, seed=seed)
    assert_twins_agree("differential", *arguments, **filled(OPTIONS[options], case, device))


@pytest.mark.parametrize(
    ("sizes", "options"),
    [
        *((sizes, "everything") for sizes in ((64, 2**11, 2**12), (64, 2**23, 2**14), (1, 2**23, 1))),
        *(((8, 2**23, 2**9), options) for options in ("plain", "window-of-one", "two-sided-window", "everything")),
        *(((64, 2**11, 2**12), options) for options in ("plain", "two-sided-window")),
    ],
    ids=str,
)
def test_tiles_groups_and_slabs_of_any_size(sizes, options, monkeypatch):
    """Long chunks in several tiles, and one query more than a tile holds; decodes of several groups, where shorter ones
    see nothing in the last of the columns that go through a buffer, which may be of one block.
    """
    for name, size in zip(("TILE", "SCORES", "BUFFER"), sizes, strict=True):
        monkeypatch.setattr(cpu_pairs, name, size)
    lens = ((1, 90), (1, 80), (1, 3), (9, 40), (1, 64), (5, 2), (1, 200), (65, 129), (64, 64))
    case = Case("sizes", lens, heads=(4, 2), padding_rows=2)
    arguments, _ = lay_out(case)
    assert_twins_agree("differential", *arguments, **filled(OPTIONS[options], case, "cpu"))


# Queries of several tiles, groups of one and of three; a sequence without queries, and one that sees too few keys.
LONG = {
    "groups": Case("groups", ((50, 140), (0, 40), (24, 24), (1, 90), (23, 20)), heads=(6, 2), padding_rows=3),
    "pairs": Case("pairs", ((130, 130), (1, 150)), heads=(4, 4), block_size=48, layout="HND"),
}


# What decides which keys a tile sees, and all options at once: each by itself meets the same scores in shorter tiles.
LONG_OPTIONS = ["plain", "not-causal", "window", "window-of-one", "two-sided-window", "everything"]


@pytest.mark.parametrize(
    ("name", "options"),
    [
        *(("groups", options) for options in LONG_OPTIONS),
        *(("pairs", options) for options in ("plain", "two-sided-window", "everything")),
    ],
)
def test_long_queries_in_one_run_of_keys(name, options, device, monkeypatch):
    """Our Triton kernel, with the difference in the program that attends, as where a batch has many tiles."""
    case = LONG[name]
    from fastattn.kernels.triton import differential
    from fastattn.kernels.triton.tuning import LaunchConfig

    whole = LaunchConfig(block_m=64, block_n=64, num_warps=4, num_stages=2, splits=1, most_splits=1)
    monkeypatch.setattr(differential, "tune", lambda *_: whole)
    for dtype in (torch.float16, torch.bfloat16) if device == "cuda" else (torch.float16,):
        arguments, _ = lay_out(case, device=device, dtype=dtype)
        with fastattn.use_kernel("triton"):
            assert_twins_agree("differential", *arguments, again=False, **filled(OPTIONS[options], case, device))


@pytest.mark.core
@pytest.mark.covers("A5", "C112")
@each_kernel
def test_a_layer_without_keys_of_its_own(kernel, device):
    """You-Only-Cache-Once: queries over the cache of another layer, prefills and decodes mixed, and nothing written."""
    case = Case("yoco", ((20, 20), (1, 50), (7, 33), (1, 18)), heads=(8, 4))
    (_, cache, batch), _ = lay_out(case, device=device, dtype=kernel.dtypes[0])
    before = cache.clone()
    generator = torch.Generator().manual_seed(7)
    for heads in (8, 16):  # the other layer may have more query heads, too
        query = torch.randn(29, heads, 64, generator=generator).to(device, kernel.dtypes[0])
        with kernel.forced():
            kernel.check(assert_twins_agree, "differential", query, cache, batch, **filled({}, case, device))
    assert torch.equal(cache.nan_to_num(7.0), before.nan_to_num(7.0))


# --- rows: nothing is cached ---


def over_rows(package: str) -> SimpleNamespace:
    """Return differential attention with the plan of `varlen`."""
    varlen, path = (importlib.import_module(f"{package}.{name}") for name in ("varlen", "differential"))
    return SimpleNamespace(plan=varlen.plan, attention=path.attention)


def lay_out_rows(case: Case, **options):
    """Return the positional arguments over rows, and the keys and values of each sequence."""
    inputs = build(case, **options)
    query, key, value, batch = inputs.rows
    return (query, refattn.differential.split_halves(key, value), batch), inputs


@pytest.mark.core
@pytest.mark.covers("A7", "C104")
@pytest.mark.parametrize("package", ["refattn", "fastattn"])
@pytest.mark.parametrize("case", SMALL, ids=str)
def test_rows_are_attended_to_by_the_formula(case, package):
    """As a server measures its memory before there is a cache."""
    case = in_pairs(case)
    arguments, inputs = lay_out_rows(case, dtype=torch.float64)
    out = plan_and_attend(over_rows(package), *arguments, **of_formula(case, "cpu"))
    assert_is_by_formula(out, inputs.query, inputs.keys, inputs.values, case)


@pytest.mark.covers("A7")
@pytest.mark.parametrize(
    ("options", "kernel"),  # rows are found otherwise than pages, and all else is as over these
    [(name, kernel) for name in OPTIONS for kernel in PRESENT if not kernel.is_interpreted or name in LONG_OPTIONS],
    ids=str,
)
def test_twins_agree_over_rows(options, kernel, device):
    case = Case("mixed", ((20, 40), (1, 70), (0, 9), (5, 0), (10, 17), (3, 2)), heads=(8, 4), padding_rows=3)
    options, dtype = filled(OPTIONS[options], case, device), kernel.dtypes[0]
    arguments, _ = lay_out_rows(case, device=device, dtype=dtype)
    reference, fast = (partial(plan_and_attend, over_rows(package)) for package in ("refattn", "fastattn"))

    def hold():
        out, lse = fast(*arguments, **options, return_lse=True)
        assert_matches_reference(out, lse, reference, *arguments, **options)
        memory = torch.full_like(out, torch.nan)
        assert fast(*arguments, **options, out=memory) is memory and torch.equal(memory, out)

    with kernel.forced():
        kernel.check(hold)


@each_twin
def test_layers_of_one_plan_over_rows(twin):
    """More rows in one layer than in another, and a bound on the lengths that is far too large."""
    lens = ((4, 6), (1, 20), (7, 7))
    reference, path = over_rows("refattn"), over_rows(twin.__name__.partition(".")[0])
    (_, _, batch), _ = lay_out_rows(Case("rows", lens, heads=(4, 2)))
    plan = path.plan(dataclasses.replace(batch, max_seq_len=2**31 - 1))
    for heads, more in (((4, 2), 0), ((6, 6), 5), ((4, 2), 0)):
        (query, rows, batch), _ = lay_out_rows(Case("rows", lens, heads=heads))
        rows = torch.cat([rows, torch.full_like(rows[:, :, :more], torch.nan)], dim=2)
        out = path.attention(query, rows, plan, **LAMBDA)
        torch.testing.assert_close(out, plan_and_attend(reference, query, rows, batch, **LAMBDA), rtol=1e-5, atol=1e-5)


@each_twin
def test_halves_are_split(twin):
    key, value = (torch.randn(5, 6, 8) for _ in range(2))
    halves = twin.split_halves(key, value)
    assert halves.shape == (2, 2, 5, 3, 8)
    for head in range(6):
        for kind, source in enumerate((key, value)):
            assert torch.equal(halves[head % 2, kind, :, head // 2], source[:, head])


BAD_ROWS = {
    "a-pool": (r"cache: expected float32 \[2, 2, s, hk/2, d=64\], got float32 \[2, 2, 1,", lambda a: a | in_a_pool(a)),
    "rows-under-a-plan-over-pages": (
        r"cache: expected float32 \[2, 2, n, p, hk/2, d=64\], got float32 \[2, 2, \d+, 1, 64\]",
        lambda a: a | dict(plan=Plan(refattn.metadata.make_batch([2], [5], [[0]]), 16)),
    ),
    "too-few-rows": (
        "cache: expected at least the 25 rows that seq_lens adds up to, got 24",
        lambda a: a | {"cache": a["cache"][:, :, :24]},
    ),
    "quantized": ("scales: expected None over rows", lambda a: a | in_8_bits(a)),
}


def in_a_pool(arguments: dict) -> dict:
    return dict(cache=arguments["cache"][:, :, None])


def in_8_bits(arguments: dict) -> dict:
    return dict(cache=arguments["cache"].to(torch.float8_e4m3fn), scales=Fp8Scales(1.0, 1.0))


@each_twin
@pytest.mark.usefixtures("shapes_unchecked")
@pytest.mark.parametrize(("message", "change"), BAD_ROWS.values(), ids=BAD_ROWS)
def test_bad_rows_are_named(twin, message, change):
    (query, rows, batch), _ = lay_out_rows(Case("small", ((2, 5), (1, 20)), heads=(4, 2)))
    plan = over_rows(twin.__name__.partition(".")[0]).plan(batch)
    with pytest.raises(ValueError, match=message):
        twin.attention(**change(dict(query=query, cache=rows, plan=plan, **LAMBDA)))


@each_twin
@pytest.mark.usefixtures("shapes_unchecked")
def test_bad_heads_to_split_are_named(twin):
    key = torch.zeros(5, 3, 8)
    with pytest.raises(ValueError, match="key: expected pairs of heads, an even number, got hk=3"):
        twin.split_halves(key, key)
    with pytest.raises(ValueError, match=r"value: expected float32 \[s=5, hk=3, d=8\], got float32 \[4, 3, 8\]"):
        twin.split_halves(key, key[:4])


# --- fp8 ---


def eight_bit(
    case: Case, kind: str, *, per="head", round_query=False, device="cpu", dtype=torch.float32, poison=POISON
):
    """Lay a case out in fp8: the positional arguments, the scales, and the numbers that they are dequantized to."""
    inputs = build(case, dtype=torch.float32, poison=poison)
    cache = two_halves(inputs.key_cache, inputs.value_cache).to(KINDS[kind])  # garbage of 1e4 and inf: NaN or inf
    shape = {"sequence": (len(case.lens), case.heads[1]), "head": (case.heads[1],), "number": ()}[per]
    numbers = [in_scales(*shape, seed=i) if shape else 0.4 + 0.3 * i for i in range(3)]
    keys, values = [], []
    for numbers_of_all, rows, scale in ((keys, inputs.keys, numbers[0]), (values, inputs.values, numbers[1])):
        for i, x in enumerate(rows):
            of_heads = torch.as_tensor(scale).double().expand(len(case.lens), case.heads[1])[i]
            numbers_of_all.append(decoded(KINDS[kind])[bits(x.to(KINDS[kind])).long()] * of_heads[:, None])
    scales = [x.to(device) if isinstance(x, torch.Tensor) else x for x in numbers]
    scales = Fp8Scales(*scales[:2], scales[2] if round_query else None, KINDS[kind])
    batch = build(case, device=device).batch
    return (inputs.query.to(device, dtype), cache.to(device), batch), scales, keys, values


MIXED_QUANTIZED = Case("quantized", ((4, 6), (1, 37), (9, 17), (0, 5), (3, 2)), heads=(8, 4), padding_rows=2)
each_format = pytest.mark.parametrize("kind", ["e4m3", "e5m2"])
each_per = pytest.mark.parametrize("per", ["number", "head", "sequence"])


@pytest.mark.core
@pytest.mark.covers("C118")
@pytest.mark.parametrize("package", ["refattn", "fastattn"])
@each_format
@each_per
def test_quantized_values_are_attended_to_by_the_formula(package, kind, per):
    """Each value by its format, times its scale: that of a KV head has the head's place among the pairs."""
    case = dataclasses.replace(MIXED_QUANTIZED, head_size=32)
    arguments, scales, keys, values = eight_bit(case, kind, per=per, dtype=torch.float64)
    path = importlib.import_module(f"{package}.differential")
    for cache in (arguments[1], arguments[1].view(torch.uint8)):
        out = plan_and_attend(path, arguments[0], cache, arguments[2], **of_formula(case, "cpu"), scales=scales)
        assert_is_by_formula(out, arguments[0], keys, values, case)


@pytest.mark.covers("C108", "C118")
@pytest.mark.parametrize(
    ("options", "round_query", "kind", "kernel"),
    every_pair_on_cpu(["plain", "two-sided-window", "everything"], [False, True], ["e4m3", "e5m2"], PRESENT),
    ids=str,
)
def test_twins_agree_over_quantized_values(options, round_query, kind, kernel, device):
    per = "sequence" if options == "plain" else "head"
    arguments, scales, *_ = eight_bit(
        MIXED_QUANTIZED, kind, per=per, round_query=round_query, device=device, dtype=kernel.dtypes[0]
    )
    options = filled(OPTIONS[options], MIXED_QUANTIZED, device) | dict(scales=scales)
    with kernel.forced():
        kernel.check(assert_twins_agree, "differential", *arguments, **options)


@pytest.mark.core
@pytest.mark.covers("C118")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_twins_agree_over_quantized_values_by_default(dtype, device):
    arguments, scales, *_ = eight_bit(MIXED_QUANTIZED, "e4m3", device=device, dtype=dtype)
    options = filled(OPTIONS["norm"], MIXED_QUANTIZED, device) | dict(scales=scales)
    assert_twins_agree("differential", *arguments, **options)


@each_twin
def test_no_bit_depends_on_quantized_values_that_no_query_may_see(twin, device):
    answers = []
    for poison in (POISON, HARMLESS):
        arguments, scales, *_ = eight_bit(MIXED_QUANTIZED, "e5m2", device=device, poison=poison)
        answers.append(
            plan_and_attend(twin, *arguments, **filled({}, MIXED_QUANTIZED, device), scales=scales, return_lse=True)
        )
    for poisoned, harmless in zip(*answers, strict=True):
        assert torch.equal(poisoned, harmless)


@pytest.mark.core
@pytest.mark.covers("C118")
@each_twin
@each_format
@each_per
def test_a_write_quantizes_each_head_under_its_scale(twin, kind, per, device):
    key, value = (torch.randn(6, 6, 8, dtype=torch.bfloat16, device=device) * 3 for _ in range(2))
    of_key, of_value = (in_scales(6, seed=i).to(device) if per == "head" else 0.5 + 0.3 * i for i in (1, 2))
    cache = twin.allocate(3, 4, 6, 8, dtype=KINDS[kind], device=device)
    slots = torch.tensor([5, -1, 11, 0], device=device)  # and two rows of padding
    if per == "sequence":
        scales = Fp8Scales(in_scales(2, 6, seed=3).to(device), 1.0, format=KINDS[kind])
        with pytest.raises(ValueError, match=r"scales.key: expected a number or float32 \[hk=6\], as a token that is"):
            twin.write(key, value, cache, slots, scales=scales)
        assert not bits(cache).any()
        return
    twin.write(key, value, cache, slots, scales=Fp8Scales(of_key, of_value, format=KINDS[kind]))
    expected, largest = torch.zeros_like(cache.float()), torch.finfo(KINDS[kind]).max
    for token, slot in ((0, 5), (2, 11), (3, 0)):
        for head in range(6):
            for number, (source, scale) in enumerate(((key, of_key), (value, of_value))):
                x = source[token, head].float()
                x = x / (scale[head] if per == "head" else torch.full_like(x, scale))  # by a tensor: see `_scale_of`
                code = x.clamp(-largest, largest).to(KINDS[kind])
                expected[head % 2, number, slot // 4, slot % 4, head // 2] = code.float()
    assert torch.equal(cache.float(), expected)


BAD_SCALES = {
    "int8": (
        "scales: expected Fp8Scales for a cache of pairs, got",
        lambda a: dict(scales=Int8Scales(torch.ones(1, 1, 1))),
    ),
    "of-pairs": (
        r"scales.key: expected a number or float32 \[hk=4\]",
        lambda a: dict(scales=Fp8Scales(torch.ones(2), 1.0)),
    ),
    "of-three-heads": (r"scales.value: expected a .* \[hk=4\]", lambda a: dict(scales=Fp8Scales(1.0, torch.ones(3)))),
    "another-format": ("cache: expected float8_e5m2", lambda a: dict(scales=Fp8Scales(1.0, 1.0, format=KINDS["e5m2"]))),
    "none": ("cache: expected float32", lambda a: dict(scales=None)),
}


@each_twin
@pytest.mark.usefixtures("shapes_unchecked")
@pytest.mark.parametrize(("message", "change"), BAD_SCALES.values(), ids=BAD_SCALES)
def test_bad_scales_are_named(twin, message, change):
    """Of a write, too, before a half is written."""
    (query, cache, batch), *_ = eight_bit(MIXED_QUANTIZED, "e4m3")
    with pytest.raises(ValueError, match=message):
        plan_and_attend(twin, query, cache, batch, **LAMBDA, **change({}))
    empty, tokens = twin.allocate(2, 4, 4, 8, dtype=torch.float8_e4m3fn), torch.ones(2, 4, 8)
    with pytest.raises(ValueError, match=message.replace("cache: expected float32", "key: expected float8_e4m3fn")):
        twin.write(tokens, tokens, empty, torch.arange(2), **change({}))
    assert not bits(empty).any()


# --- the cache: moving data is bit-exact ---


@pytest.mark.core
@pytest.mark.covers("C102", "C105")
@each_twin
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_write_puts_each_head_into_its_half(twin, dtype, device):
    cache = twin.allocate(3, 4, 6, 8, dtype=dtype, device=device)
    assert cache.shape == (2, 2, 3, 4, 3, 8)
    assert not cache.any()
    key, value = (torch.randn(4, 6, 8).to(device, dtype) for _ in range(2))
    slots = torch.tensor([5, -1, 11, 0], device=device)
    twin.write(key, value, cache, slots)
    expected = torch.zeros_like(cache)
    for token, slot in ((0, 5), (2, 11), (3, 0)):
        for head in range(6):
            for kind, source in ((0, key), (1, value)):
                expected[head % 2, kind, slot // 4, slot % 4, head // 2] = source[token, head]
    assert torch.equal(cache, expected)


@pytest.mark.core
@pytest.mark.covers("C103")
@pytest.mark.parametrize("moves", [refattn.kv_cache, fastattn.kv_cache], ids=["ref", "fast"])
@each_twin
def test_blocks_are_copied_and_swapped_in_all_four_pools(twin, moves, device):
    """Copy a sequence's blocks inside the pool, swap it out to a smaller one and back: the same answer to the bit."""
    case = Case("moved", ((1, 40), (9, 30)), heads=(4, 2))
    (query, cache, batch), _ = lay_out(case, device=device)
    before = plan_and_attend(twin, query, cache, batch, **filled({}, case, device))
    n, blocks = cache.shape[2], batch.block_table[0, :3].tolist()

    cache = torch.cat([cache, torch.full_like(cache[:, :, :4], torch.nan)], dim=2)
    moves.copy_blocks(twin.pools(cache), torch.tensor([[block, n + i] for i, block in enumerate(blocks)]))
    cache[:, :, blocks] = torch.nan
    moved = batch.block_table.clone()
    moved[0, :3] = torch.tensor([n, n + 1, n + 2])
    batch = dataclasses.replace(batch, block_table=moved)
    assert torch.equal(plan_and_attend(twin, query, cache, batch, **filled({}, case, device)), before)

    host = torch.full((2, 2, 3, *cache.shape[3:]), torch.nan)
    out_and_back = torch.tensor([[n + i, 2 - i] for i in range(3)])
    moves.swap_blocks(twin.pools(cache), twin.pools(host), out_and_back)
    cache[:, :, n : n + 3] = torch.nan
    moves.swap_blocks(twin.pools(host), twin.pools(cache), out_and_back.flip(1))
    assert torch.equal(plan_and_attend(twin, query, cache, batch, **filled({}, case, device)), before)


@each_twin
def test_pools_are_views_of_any_cache(twin):
    cache = torch.zeros(3, 4, 2, 2, 8, 2).permute(3, 5, 0, 1, 2, 4)  # [2, 2, 3, 4, 2, 8], every stride odd
    for i, pool in enumerate(twin.pools(cache)):
        pool.fill_(i)
    assert cache[:, :, 0, 0, 0, 0].tolist() == [[0, 1], [2, 3]]


# --- bad input ---


@pytest.fixture
def with_threads():
    """Set the number of torch's threads, for a test."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.mark.covers("B73")
@pytest.mark.parametrize("threads", [1, 2])
def test_sinks_have_the_same_bits_in_any_batch(threads, with_threads):
    """`torch.sigmoid` and `torch.logaddexp` compute the end of a tensor in another way than the rest of it.

    Several threads multiply some matrices in another order than one does.
    """
    with_threads(threads)
    torch.manual_seed(0)
    whole = fastattn.differential.plan(
        refattn.metadata.make_batch([1] * 4, [9] * 4, [[0], [1], [2], [3]]), block_size=16
    )
    alone = fastattn.differential.plan(refattn.metadata.make_batch([1], [9], [[3]]), block_size=16)
    for _ in range(60):
        cache, query = torch.randn(2, 2, 4, 16, 1, 64), torch.randn(4, 10, 64)
        options = AttentionOptions(sinks=torch.randn(10), batch_invariant=True)
        more = dict(lambda_full=torch.tensor(0.3), lambda_init=0.2, return_lse=True)
        many = fastattn.differential.attention(query, cache, whole, options, **more)
        few = fastattn.differential.attention(query[3:], cache, alone, options, **more)
        assert all(torch.equal(x[3:], y) for x, y in zip(many, few, strict=True))


@pytest.mark.core
@pytest.mark.covers("C227")
@pytest.mark.parametrize("kernel", [None, "triton"])
@pytest.mark.parametrize("norm", [torch.nn.LayerNorm(48), torch.tanh], ids=["module", "function"])
def test_any_norm_takes_the_place_of_that_by_the_root_mean_square(norm, kernel, device):
    """A kernel that norms by itself is not asked; as many calls as ever give the same."""
    norm = norm.to(device) if isinstance(norm, torch.nn.Module) else norm
    case = Case("norms", ((3, 20), (1, 40), (0, 9)), heads=(4, 2), head_size=24)
    inputs = build(case, device=device, poison=(0.5,))
    pools = inputs.key_cache, inputs.value_cache
    cache = torch.stack([torch.stack([x[..., half::2, :] for x in pools]) for half in (0, 1)])
    fixed = dict(lambda_full=torch.tensor(0.4, device=device), lambda_init=0.25)
    with torch.no_grad():
        batch, answers = inputs.batch, {}
        for package in ("refattn", "fastattn"):
            path = importlib.import_module(f"{package}.differential")
            plan = path.plan(batch, block_size=16)
            with fastattn.use_kernel(kernel) if kernel and package == "fastattn" else contextlib.nullcontext():
                answers[package] = [path.attention(inputs.query, cache, plan, norm=norm, **fixed) for _ in range(2)]
        halves = [
            torch.cat([attend_to_half(inputs.query, cache, batch, half, other) for other in (0, 1)], -1)
            for half in (0, 1)
        ]
        expected = 0.75 * norm(halves[0] - 0.4 * halves[1])
    for out in (*answers["refattn"], *answers["fastattn"]):
        torch.testing.assert_close(out.unflatten(1, (-1, 2)).flatten(2), expected, rtol=1e-4, atol=1e-5)


def attend_to_half(query, cache, batch, half, other):
    """Attend with one head of each pair to its keys, and read the values of one half."""
    plan = refattn.chunked_prefill.plan(batch, block_size=16)
    return refattn.chunked_prefill.attention(query[:, half::2], cache[half, 0], cache[other, 1], plan)


@pytest.mark.usefixtures("shapes_unchecked")
@pytest.mark.parametrize("package", ["refattn", "fastattn"])
def test_a_norm_that_is_none_is_named(package):
    path = importlib.import_module(f"{package}.differential")
    plan = path.plan(refattn.metadata.make_batch([1], [3], [[0]]), block_size=4)
    tensors, fixed = (torch.ones(1, 2, 8), torch.ones(2, 2, 1, 4, 1, 8)), dict(lambda_full=torch.tensor(0.4))
    for more, message in (
        (dict(norm=1.0), "norm: expected a function of the differences, got 1.0"),
        (
            dict(norm=torch.tanh, norm_weight=torch.ones(16)),
            "norm_weight: expected None beside a norm of its own, got ",
        ),
        (dict(norm=torch.sum), r"norm: expected \[t=1, h/2=1, 2 \* d=16\], got float32 \[\]"),
        (dict(norm=lambda x: x > 0), "norm: expected a floating point type, got bool"),
    ):
        with pytest.raises(ValueError, match=f"^{message}"):
            path.attention(*tensors, plan, lambda_init=0.2, **fixed, **more)
    if package == "fastattn":
        with pytest.raises(NotImplementedError, match="^norm: requires_grad, but fastattn has no backward pass"):
            path.attention(*tensors, plan, lambda_init=0.2, **fixed, norm=torch.nn.LayerNorm(16))
