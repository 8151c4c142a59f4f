"""Decodes over int4 pages of which a program takes two KV heads, and weights times scales of any size in bfloat16."""

import math
import os
from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton", reason="Triton comes for Linux only")

import triton
import triton.language as tl

import fastattn.quantized
import refattn.quantized
from fastattn.kernels import order
from fastattn.kernels.triton import attention, four_bits
from fastattn.kernels.triton.quantized import in_pairs
from refattn.four_bits import Int4Pages, Int4Scales
from refattn.metadata import make_batch
from refattn.options import AttentionOptions
from refattn.plan import Plan
from refattn.rounding import hadamard, to_int4
from tests.helpers.batches import HARMLESS, POISON, Case, plan_and_attend
from tests.helpers.options import per_head
from tests.helpers.stored import assert_twins_agree_over_quantized, path_of, store

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
RAGGED = ((1, 5), (1, 33), (0, 9), (1, 700), (1, 16))
HALVES = [torch.float16, *(() if IS_INTERPRETED else (torch.bfloat16,))]
each_half = pytest.mark.parametrize("dtype", HALVES, ids=str)


@pytest.fixture
def heads(monkeypatch):
    """Note of each call how many KV heads a program takes."""
    taken, choose = [], attention.two_heads

    def note(*given):
        chosen = choose(*given)
        taken.append(chosen[2].heads)
        return chosen

    monkeypatch.setattr(attention, "two_heads", note)
    return taken


def grouped(num_kv_heads, head_size=64, **more):
    """Return decodes with four queries per KV head."""
    return Case("grouped", RAGGED, heads=(4 * num_kv_heads, num_kv_heads), head_size=head_size, **more)


# --- two KV heads ---


@each_half
@pytest.mark.parametrize(
    ("num_kv_heads", "sizes", "expected"),
    [(8, (128, 128), 2), (6, (64, 64), 2), (2, (64, 128), 2), (2, (128, 64), 2), (3, (64, 64), 1), (1, (128, 128), 1)],
    ids=str,
)
def test_decodes_with_four_queries_per_head(num_kv_heads, sizes, expected, dtype, heads, device):
    """Ragged, one of no tokens, one in splits; an odd number of KV heads is taken one by one."""
    stored = store(grouped(num_kv_heads, *sizes[:1], value_head_size=sizes[1]), "int4", dtype=dtype, device=device)
    with order.use_kernel("triton"):
        assert_twins_agree_over_quantized(stored, again=not IS_INTERPRETED)
    assert set(heads) == {expected}


@each_half
@pytest.mark.parametrize("num_kv_heads", [2, 4])
@pytest.mark.parametrize(
    ("plan", "options"),
    [
        ("window", {}),
        ("untrimmed-window", dict(sinks=True)),
        ("local", {}),
        ("all", dict(softcap=1.0)),
        ("causal", dict(softmax_scale=-0.3, alibi_slopes=True)),
        ("window", dict(softcap=5.0, alibi_slopes=True, sinks=True)),
    ],
    ids=str,
)
def test_every_option_goes_with_two_heads(plan, options, num_kv_heads, dtype, heads, device):
    case = grouped(num_kv_heads)
    stored = store(case, "int4", dtype=dtype, device=device)
    with order.use_kernel("triton"):
        assert_twins_agree_over_quantized(stored, plan, again=False, **per_head(options, case, device))
    assert set(heads) == {2}


def test_a_long_sequence_is_split(heads, monkeypatch, device):
    """Each split of two heads is a partial output of its own."""
    splits, tune = [], attention.tune

    def note(*given):
        splits.append(tune(*given).splits)
        return tune(*given)

    monkeypatch.setattr(attention, "tune", note)
    stored = store(grouped(2), "int4", dtype=torch.float16, device=device)
    with order.use_kernel("triton"):
        assert_twins_agree_over_quantized(stored, again=False)
    assert set(heads) == {2} and min(splits) > 1


@pytest.mark.parametrize(
    ("change", "options"),
    [
        (dict(lens=((2, 9), (1, 40))), {}),
        (dict(heads=(4, 2)), {}),
        (dict(heads=(16, 2)), {}),
        (dict(head_size=32), {}),
        (dict(head_size=96, value_head_size=64), {}),
        (dict(value_head_size=256), {}),
        (dict(pool="HND"), {}),
        (dict(), dict(batch_invariant=True)),
    ],
    ids=str,
)
def test_other_calls_take_one_head(change, options, heads, device):
    """Several new tokens, other groups, heads that do not fill a tile, or lie apart; and bits that must not change."""
    case = replace(grouped(2), **dict(lens=((1, 9), (1, 40))) | change)
    stored = store(case, "int4", dtype=torch.float16, device=device)
    with order.use_kernel("triton"):
        assert_twins_agree_over_quantized(stored, again=False, **options)
    assert set(heads) == {1}


def test_heads_with_scales_apart_are_taken_one_by_one():
    """What the kernel reads as one row must lie in one: the elements of both heads, and their scales."""
    query, batch = torch.zeros(2, 8, 64, dtype=torch.float16), make_batch([1, 1], [3, 4], [[0], [1]])
    pool, scales = torch.zeros(2, 4, 2, 32, dtype=torch.uint8), torch.ones(2, 4, 2)
    apart = torch.ones(2, 4, 4)[..., ::2]
    for key, of_keys, of_values, expected in (
        (in_pairs(pool), scales, scales, 2),
        (in_pairs(pool), apart, scales, 1),
        (in_pairs(pool), scales, apart, 1),
        (pool, scales, scales, 1),
    ):
        quantization = four_bits.int4_quantization(Int4Scales(of_keys, of_values))
        key, value, found = four_bits.two_heads(query, key, in_pairs(pool), batch, quantization)
        assert (found.heads, key.shape[2], value.shape[2]) == (expected, 2 // expected, 2 // expected)


# --- what is no number ---


@each_half
@pytest.mark.parametrize(
    ("of", "wrong"),
    [("query", math.nan), ("query", math.inf), ("key", math.nan), ("value", math.nan), ("value", math.inf)],
)
def test_what_is_no_number_stays_with_its_head(of, wrong, dtype, heads, device):
    """NaN or infinity in a query, or in a scale of one KV head, changes no bit of any other head or sequence."""
    answers = []
    for x in (0.1, wrong):
        stored = store(grouped(4), "int4", dtype=dtype, device=device)
        if of == "query":
            stored.query[1, 6, 9] = x
        else:
            block = stored.batch.block_table[1, 1]  # the second sequence has 33 keys
            getattr(stored.scales, of)[block, 3, 1] = x
        with order.use_kernel("triton"):
            answers.append(plan_and_attend(fastattn.quantized, *stored.tensors, scales=stored.scales))
    clean, dirty = answers
    spoilt = torch.zeros(*clean.shape[:2], dtype=torch.bool, device=device)
    spoilt[1, 6:7] = True
    if of != "query":
        spoilt[1, 4:8] = True
    assert set(heads) == {2} and torch.equal(clean[~spoilt], dirty[~spoilt])
    assert not dirty[spoilt].isfinite().any()


@each_half
@pytest.mark.parametrize("plan", ["causal", "window"])
def test_memory_of_no_sequence_changes_no_bit(plan, dtype, heads, device):
    """Where a step has no key, elements are those of the first block, here a free one; its scales are not read."""
    twin, arguments = path_of("fastattn", plan)
    case, answers = replace(grouped(2), lens=((1, 5), (1, 33))), []
    for poison in (HARMLESS, POISON):
        stored = store(case, "int4", dtype=dtype, seed=3, poison=poison, device=device)
        assert 0 not in stored.batch.block_table[0, :1] and 0 not in stored.batch.block_table[1, :3]
        with order.use_kernel("triton"):
            answers.append(plan_and_attend(twin, *stored.tensors, **arguments, scales=stored.scales, return_lse=True))
    assert set(heads) == {2} and all(map(torch.equal, *answers))


# --- weights times scales in bfloat16 ---


@triton.jit
def _wide(x):
    return (x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)


@triton.jit
def _multiply_values(acc, weights, v, TILE):
    if v.dtype == tl.bfloat16:
        weights, v = _wide(weights), _wide(v)
    first, second = (weights, v) if TILE.KEYS_AXIS == 1 else (v, weights)
    return tl.dot(first, second, acc, input_precision="ieee")


@pytest.fixture
def in_bfloat16(monkeypatch):
    """Replace the product of bfloat16 in the interpreter, as NumPy has no such type: it multiplies the same bits."""
    if IS_INTERPRETED:
        monkeypatch.setattr(four_bits, "multiply_values", _multiply_values)


def attend_in_bfloat16(query, key, value, query_lens, seq_lens, scales=None):
    """Attend by the kernel in bfloat16, and by the reference in float64, to blocks of 16 tokens in order.

    Args:
        query: [t, h, d].
        key: [b, s, hk, d], or [b, s, hk, d / 2] if `scales` are given.
        value: the same.
        query_lens: the new tokens of each sequence.
        seq_lens: the keys of each.
        scales: those of both, [b, s, hk].

    Returns:
        Both outputs in float64.
    """
    (key, of_keys), (value, of_values) = (
        zip((key, value), scales, strict=True) if scales is not None else (to_int4(key), to_int4(value))
    )
    b, _, hk, _ = key.shape
    pools = [x.reshape(-1, 16, hk, x.shape[-1]) for x in (key, value)]
    scales = Int4Scales(*(x.reshape(-1, 16, hk).contiguous() for x in (of_keys, of_values)))
    batch = make_batch(query_lens, seq_lens, torch.arange(len(pools[0])).view(b, -1).tolist())
    query = query.bfloat16()
    expected = plan_and_attend(refattn.quantized, query.double(), *pools, batch, scales=scales)
    device = "cpu" if IS_INTERPRETED else "cuda"
    scales = Int4Scales(scales.key.to(device), scales.value.to(device))
    batch = make_batch(query_lens, seq_lens, torch.arange(len(pools[0])).view(b, -1).tolist(), device=device)
    pages = Int4Pages(*(pool.to(device) for pool in pools), scales)
    found, _ = attention.attend_to_keys(query.to(device), pages, Plan(batch, 16), AttentionOptions(), None)
    return found.double().cpu(), expected


def assert_rows_are_near(found, expected):
    """Rows differ by rounding in bfloat16: of the output, and of a weight times the scale of its value."""
    size = expected.abs().amax(-1, keepdim=True)
    assert found.isfinite().all() and ((found - expected).abs() <= 0.02 * size).all()


def drawn(num_kv_heads, num_keys=160, b=2, tokens=1, size=64):
    """Draw queries, with four per KV head, keys and values."""
    generator = torch.Generator().manual_seed(num_kv_heads)
    query = torch.randn(b * tokens, 4 * num_kv_heads, size, generator=generator)
    return query, *torch.randn(2, b, num_keys, num_kv_heads, size, generator=generator)


each_number_of_heads = pytest.mark.parametrize("num_kv_heads", [2, 1], ids=["two heads", "one head"])


@pytest.mark.usefixtures("in_bfloat16")
@each_number_of_heads
@pytest.mark.parametrize("factor", ["1", "1e-20", "1e-30", "1e20", "1e35", "any", "growing", "shrinking"])
def test_values_of_every_size(factor, num_kv_heads, heads):
    """Each step has a unit of its own, the next ones' may be larger, and heads and rows share none."""
    query, key, value = drawn(num_kv_heads)
    generator, steps = torch.Generator().manual_seed(1), torch.linspace(-30, 30, 160)[:, None, None]
    exponents = {
        "any": torch.randint(-30, 31, (2, 160, num_kv_heads, 1), generator=generator).float(),
        "growing": steps,
        "shrinking": -steps,
    }
    value = value * (10.0 ** exponents[factor] if factor in exponents else float(factor))
    assert_rows_are_near(*attend_in_bfloat16(query, key, value, [1, 1], [160, 77]))
    assert set(heads) == {num_kv_heads}


@pytest.mark.usefixtures("in_bfloat16")
@pytest.mark.parametrize("tokens", [2, 4, 9], ids=["8 rows", "16 rows", "64 rows"])
def test_tiles_of_all_rows(tokens):
    """Of 8 rows values are small numbers, in pairs of bytes; of 16 they are 16 larger, and of more in bytes."""
    query, key, value = drawn(1, tokens=tokens)
    value = value * 10.0 ** torch.linspace(-8, 8, 160)[:, None, None]
    assert_rows_are_near(*attend_in_bfloat16(query, key, value, [tokens, tokens], [160, 77]))


@pytest.mark.usefixtures("in_bfloat16")
@each_number_of_heads
@pytest.mark.parametrize("at", [3, 75])
def test_a_huge_value_without_weight_hides_no_other(at, num_kv_heads):
    """A key whose score is far below the others has a value of 1e37: the output is that of the others."""
    query, key, value = drawn(num_kv_heads)
    key[:, at] = -30 * query.view(2, num_kv_heads, 4, 64).sum(2)
    query = query.view(2, num_kv_heads, 4, 64).sum(2).repeat_interleave(4, 1)
    value[:, at] = 1e36 * value[:, at].sign()
    found, expected = attend_in_bfloat16(query, key, value, [1, 1], [160, 77])
    assert expected.abs().max() < 10
    assert_rows_are_near(found, expected)


@pytest.mark.usefixtures("in_bfloat16")
@each_number_of_heads
def test_a_huge_value_that_loses_its_weight_hides_no_later_one(num_kv_heads):
    """The first key has the largest score so far and a value of 1e36; later scores are higher by a hundred."""
    query, key, value = drawn(num_kv_heads)
    query = query.view(2, num_kv_heads, 4, 64).sum(2).repeat_interleave(4, 1)
    direction = query[:, ::4] / query[:, ::4].square().sum(-1, keepdim=True) * 8
    key[:, :70] = -70 * direction[:, None]
    key[:, 70:] = 70 * direction[:, None]
    value[:, 0] = 1e36 * value[:, 0].sign()
    found, expected = attend_in_bfloat16(query, key, value, [1, 1], [160, 77])
    assert expected.abs().max() < 10
    assert_rows_are_near(found, expected)


@pytest.mark.usefixtures("in_bfloat16")
def test_a_huge_value_of_a_later_token_hides_no_value_of_the_tokens_before():
    """Two tokens share a tile, and the first does not see the last key, whose value is 1e36."""
    query, key, value = drawn(1, b=1, tokens=2)
    without, _ = attend_in_bfloat16(query[:1], key, value, [1], [100])
    value[:, 100] = 1e36
    found, expected = attend_in_bfloat16(query, key, value, [2], [101])
    assert expected[0].abs().max() < 10 < expected[1].abs().max()
    assert_rows_are_near(found, expected)
    assert_rows_are_near(found[:1], without)


@pytest.mark.usefixtures("in_bfloat16")
@each_number_of_heads
def test_the_largest_scales(num_kv_heads):
    """Of 1e38, where elements are so near to the zero point that their sum, before it is normalized, is a number."""
    query, key, _ = drawn(num_kv_heads)
    quantized = torch.full((2, 160, num_kv_heads, 64), 8)
    quantized[..., 5], quantized[..., 40] = 9, 7
    value = (quantized[..., ::2] + 16 * quantized[..., 1::2]).to(torch.uint8)
    scale = torch.full((2, 160, num_kv_heads), 1e38).view(torch.int32).bitwise_and(-16).add(8).view(torch.float32)
    key, of_keys = to_int4(key)
    found, expected = attend_in_bfloat16(query, key, value, [1, 1], [1, 2], (of_keys, scale))
    row = torch.zeros(64)
    row[5], row[40] = 1e38, -1e38
    torch.testing.assert_close(expected[0, 0].float(), hadamard(row), rtol=1e-4, atol=0)
    assert_rows_are_near(found, expected)
