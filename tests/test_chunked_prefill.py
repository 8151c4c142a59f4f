"""Prefill chunks and decodes in one batch over the paged cache."""

import dataclasses
import math
from unittest import mock

import pytest
import torch
from batches import CASES, Case, assert_same_masks, build, each_case, masks_by_hand, ragged_cases, read_masks
from hypothesis import given
from hypothesis import strategies as st
from kernels_present import each_kernel
from tolerance import assert_twins_agree
from torch.nn import functional

import fastattn.chunked_prefill
import refattn.chunked_prefill
from fastattn.kernels import Options, cpu, fa4, triton_cache

each_twin = pytest.mark.parametrize("twin", [refattn.chunked_prefill, fastattn.chunked_prefill], ids=["ref", "fast"])
WINDOWS = [(-1, -1), (-1, 0), (0, 0), (3, 0), (16, 0), (5000, 0), (2, 3), (-1, 2), (4, -1), (0, 16)]

SMALL = [case for case in CASES if max(s for _, s in case.lens) < 300]
OPTIONS = {
    "plain": {},
    "scale": dict(softmax_scale=0.3),
    "not-causal": dict(causal=False),
    "window": dict(window_size=(20, 0)),
    "window-of-one": dict(window_size=(0, 0)),
    "two-sided-window": dict(causal=False, window_size=(7, 5)),
    "softcap": dict(softcap=1.0),
    "alibi": dict(alibi_slopes=True),
    "sinks": dict(sinks=True),
    "everything": dict(softmax_scale=0.2, window_size=(30, 0), softcap=5.0, alibi_slopes=True, sinks=True),
}


BAD_INPUT = {
    "two-dimensional-query": (r"query: expected \[t, h, d\]", lambda a: a | {"query": a["query"][0]}),
    "heads-do-not-divide": (
        "query: expected a number of heads that hk=2 divides, got h=3",
        lambda a: a | {"query": a["query"][:, :3]},
    ),
    "another-type": ("key_cache: expected float32", lambda a: a | {"key_cache": a["key_cache"].half()}),
    "another-head-size": ("key_cache: .* d=64", lambda a: a | {"key_cache": a["key_cache"][..., :32]}),
    "pools-differ": ("value_cache: expected", lambda a: a | {"value_cache": a["value_cache"][:-1]}),
    "window-below-minus-one": ("window_size: expected", lambda a: a | {"window_size": (-2, 0)}),
    "negative-softcap": ("softcap: expected", lambda a: a | {"softcap": -1.0}),
    "too-few-sinks": (r"sinks: expected floating point \[h=4\]", lambda a: a | {"sinks": torch.zeros(3)}),
    "integer-slopes": (
        "alibi_slopes: expected",
        lambda a: a | {"alibi_slopes": torch.zeros(4, dtype=torch.int32)},
    ),
}


def per_head(options: dict, case: Case, device: str) -> dict:
    """Fill in the options that have one number a head."""
    h = case.heads[0]
    filled = dict(options)
    if "alibi_slopes" in options:
        filled["alibi_slopes"] = torch.tensor([2.0 ** -(i + 1) for i in range(h)], device=device)
    if "sinks" in options:
        filled["sinks"] = torch.linspace(-2.0, 3.0, h, device=device)
    return filled


# --- the mask, read out ---


@each_twin
@pytest.mark.parametrize("case", SMALL, ids=str)
def test_every_query_sees_the_keys_up_to_its_position(twin, case, device):
    case = Case(**{**case.__dict__, "head_size": 64, "value_head_size": 64})
    assert_same_masks(read_masks(twin.attention, case, device=device), masks_by_hand(case, lambda i, j: j <= i))


@each_twin
@pytest.mark.parametrize("window", WINDOWS, ids=str)
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "both-ways"])
def test_a_window_shows_exactly_its_keys(twin, window, causal, device):
    case = Case("mixed", ((4, 6), (1, 70), (10, 17), (40, 40), (5, 2), (1, 64)), heads=(2, 1), padding_rows=2)
    left, right = window

    def sees(i, j):
        return (left < 0 or j >= i - left) and (right < 0 or j <= i + right) and (not causal or j <= i)

    masks = read_masks(twin.attention, case, device=device, window_size=window, causal=causal)
    assert_same_masks(masks, masks_by_hand(case, sees))


@each_twin
def test_a_softcap_does_not_unmask(twin, device):
    case = Case("softcap", ((10, 17), (1, 9), (6, 6)), heads=(2, 1))
    masks = read_masks(twin.attention, case, device=device, softcap=1.0, window_size=(3, 0))
    assert_same_masks(masks, masks_by_hand(case, lambda i, j: i - 3 <= j <= i))


# --- arithmetic that shares no code with the reference ---


@each_case
def test_reference_equals_torch_sdpa_with_a_mask(case, device):
    inputs = build(case, device=device, dtype=torch.float64)
    out = refattn.chunked_prefill.attention(*inputs.tensors)
    row = 0
    for (q, s), key, value in zip(case.lens, inputs.keys, inputs.values, strict=True):
        mine = out[row : row + q]
        seeing = max(q - s, 0)  # the queries before it see nothing, which sdpa answers with NaN
        assert not mine[:seeing].any()
        if q and s:
            mask = torch.ones(q, s, dtype=torch.bool, device=device).tril(s - q)[seeing:]
            expected = functional.scaled_dot_product_attention(
                inputs.query[row + seeing : row + q].transpose(0, 1),
                key.transpose(0, 1),
                value.transpose(0, 1),
                attn_mask=mask,
                enable_gqa=True,
            )
            torch.testing.assert_close(mine[seeing:], expected.transpose(0, 1), rtol=1e-12, atol=1e-12)
        row += q
    assert not out[row:].any()


def test_reference_equals_a_sum_by_hand():
    """One query, three keys, every option, in plain Python floats."""
    case = Case("by-hand", ((1, 3),), heads=(1, 1), head_size=2, block_size=2)
    inputs = build(case, dtype=torch.float64)
    scale, cap, slope, sink = 0.7, 1.5, 0.25, 0.4
    scores = []
    for j in range(3):
        dot = sum(float(inputs.query[0, 0, c]) * float(inputs.keys[0][j, 0, c]) for c in range(2))
        scores.append(cap * math.tanh(scale * dot / cap) - slope * (2 - j))
    total = sum(math.exp(score) for score in scores) + math.exp(sink)
    expected = [sum(math.exp(s) * float(inputs.values[0][j, 0, c]) for j, s in enumerate(scores)) for c in range(2)]
    out, lse = refattn.chunked_prefill.attention(
        *inputs.tensors,
        softmax_scale=scale,
        softcap=cap,
        alibi_slopes=torch.tensor([slope], dtype=torch.float64),
        sinks=torch.tensor([sink], dtype=torch.float64),
        return_lse=True,
    )
    assert out[0, 0].tolist() == pytest.approx([x / total for x in expected], rel=1e-13)
    assert float(lse) == pytest.approx(math.log(total), rel=1e-13)


# --- the twin against the reference ---


@each_kernel
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@each_case
def test_twins_agree(case, options, kernel, device):
    inputs = build(case, device=device, dtype=kernel.dtypes[0])
    with kernel.asked_for():
        kernel.check(assert_twins_agree, "chunked_prefill", *inputs.tensors, **per_head(options, case, device))


@each_kernel
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_twins_agree_in_every_type(options, kernel, device):
    case = Case("mixed", ((40, 60), (1, 170), (10, 17), (1, 64), (33, 33)), heads=(6, 3), padding_rows=3)
    for dtype in kernel.dtypes:
        inputs = build(case, device=device, dtype=dtype)
        with kernel.asked_for():
            kernel.check(assert_twins_agree, "chunked_prefill", *inputs.tensors, **per_head(options, case, device))


@given(case=ragged_cases(), options=st.sampled_from(list(OPTIONS)), seed=st.integers(0, 2**16))
def test_twins_agree_on_drawn_batches(case, options, seed, device):
    inputs = build(case, device=device, seed=seed)
    assert_twins_agree("chunked_prefill", *inputs.tensors, **per_head(OPTIONS[options], case, device))


@each_twin
def test_rows_do_not_change_with_the_company(twin, device):
    case = Case("company", ((1, 300), (1, 290), (30, 100), (1, 310), (4, 44)), heads=(4, 2))
    inputs = build(case, device=device)
    together = twin.attention(*inputs.tensors, batch_invariant=True)
    row = 0
    for i, (q, s) in enumerate(case.lens):
        alone = refattn.batch.Batch(
            torch.tensor([0, q], dtype=torch.int32, device=device),
            inputs.batch.seq_lens[i : i + 1],
            inputs.batch.block_table[i : i + 1],
            q,
            s,
        )
        out = twin.attention(
            inputs.query[row : row + q], inputs.key_cache, inputs.value_cache, alone, batch_invariant=True
        )
        assert torch.equal(out, together[row : row + q]), f"sequence {i} changed"
        row += q


@each_kernel
@pytest.mark.parametrize("options", ["plain", "sinks"])
@pytest.mark.parametrize("case", [case for case in SMALL if case.head_size <= 128], ids=str)
def test_pages_that_are_copied_into_larger_ones(case, options, kernel, device, monkeypatch):
    """As flash-attn-4 does before long prefills, and here before all."""
    monkeypatch.setattr(fa4, "QUERY_ROWS", 0)
    repage = mock.Mock(wraps=triton_cache.repage)
    monkeypatch.setattr(triton_cache, "repage", repage)
    inputs = build(case, device=device, dtype=kernel.dtypes[0])
    with kernel.asked_for():
        kernel.check(assert_twins_agree, "chunked_prefill", *inputs.tensors, **per_head(OPTIONS[options], case, device))
    assert repage.called == (kernel.name == "fa4")


LONG_PROMPTS = dict(lens=((8192, 8192),) * 2, heads=(32, 8), head_size=128, block_size=16, left=-1)


@pytest.mark.parametrize(
    ("change", "copies"),
    [
        ({}, True),
        (dict(left=1023), False),
        (dict(block_size=128), False),
        (dict(head_size=256), False),
        (dict(lens=((1024, 8192),) * 2), False),
        (dict(lens=((8192, 2**17),) * 2), False),
        (dict(lens=()), False),
    ],
    ids=["long", "window", "large-pages", "large-heads", "few-queries", "many-keys", "nobody"],
)
def test_pages_are_copied_where_it_pays(change, copies):
    """From sizes alone; tensors on `meta` have no contents to read."""
    lens, (h, hk), d, p, left = (LONG_PROMPTS | change).values()
    longest = max((s for _, s in lens), default=0)
    batch = refattn.batch.Batch(
        torch.empty(len(lens) + 1, dtype=torch.int32, device="meta"),
        torch.empty(len(lens), dtype=torch.int32, device="meta"),
        torch.empty(len(lens), -(-longest // p), dtype=torch.int32, device="meta"),
        max((q for q, _ in lens), default=0),
        longest,
    )
    query = torch.empty(sum(q for q, _ in lens), h, d, dtype=torch.bfloat16, device="meta")
    pool = torch.empty(8, p, hk, d, dtype=torch.bfloat16, device="meta")
    assert fa4._should_copy(query, pool, pool, batch, Options(window_size=(left, 0))) == copies


@each_kernel
def test_a_batch_that_is_advanced_in_place_is_read_again(kernel, device):
    """Nothing that a twin keeps of a batch may outlive a write to its tensors."""
    inputs = build(Case("steps", ((1, 40), (1, 20), (3, 47)), heads=(4, 2)), device=device, dtype=kernel.dtypes[0])
    query, key_cache, value_cache, batch = inputs.tensors
    key_cache, value_cache = key_cache.nan_to_num(0.5), value_cache.nan_to_num(0.5)
    with kernel.asked_for():
        kernel.check(assert_twins_agree, "chunked_prefill", query, key_cache, value_cache, batch)
        batch.seq_lens.sub_(1)
        kernel.check(assert_twins_agree, "chunked_prefill", query, key_cache, value_cache, batch)
        batch.block_table[0, 0] = batch.block_table[1, 0]
        kernel.check(assert_twins_agree, "chunked_prefill", query, key_cache, value_cache, batch)


@each_kernel
def test_one_length_may_have_any_stride(kernel, device):
    """A single length out of a table of the scheduler, whose stride means nothing but is looked at."""
    inputs = build(Case("column", ((30, 40),), heads=(4, 2)), device=device, dtype=kernel.dtypes[0])
    query, key_cache, value_cache, batch = inputs.tensors
    column = torch.stack([batch.seq_lens, batch.seq_lens], dim=1)[:, 0]
    assert column.stride() == (2,)
    with kernel.asked_for():
        one = dataclasses.replace(batch, seq_lens=column)
        kernel.check(assert_twins_agree, "chunked_prefill", query, key_cache, value_cache, one)


# --- bad input ---


@each_twin
@pytest.mark.usefixtures("shapes_unchecked")
@pytest.mark.parametrize(("message", "change"), BAD_INPUT.values(), ids=BAD_INPUT)
def test_bad_input_is_named(twin, message, change, device):
    inputs = build(Case("small", ((2, 5), (1, 20))), device=device)
    good = dict(query=inputs.query, key_cache=inputs.key_cache, value_cache=inputs.value_cache, batch=inputs.batch)
    with pytest.raises(ValueError, match=message):
        twin.attention(**change(good))


@each_twin
@pytest.mark.usefixtures("shapes_unchecked")
def test_a_block_outside_the_pool_is_named(twin):
    inputs = build(Case("small", ((2, 5), (1, 20))))
    inputs.batch.block_table[1, 1] = 99
    with pytest.raises(
        ValueError, match="block_table: expected entries in 0..5 for the blocks that sequence 1 uses, got 99"
    ):
        twin.attention(*inputs.tensors)


@pytest.mark.parametrize("twin", [refattn.chunked_prefill, fastattn.chunked_prefill], ids=["ref", "fast"])
def test_what_has_passed_is_checked_again_once_it_is_written_to(twin):
    inputs = build(Case("decodes", ((1, 20), (1, 9))))
    twin.attention(*inputs.tensors)
    kept = inputs.batch.block_table.clone()
    inputs.batch.block_table[1, 0] = 10**6
    with pytest.raises(ValueError, match="block_table: expected entries in 0.."):
        twin.attention(*inputs.tensors)
    inputs.batch.block_table.copy_(kept)
    inputs.batch.seq_lens[0] = 10**6
    with pytest.raises(ValueError, match="columns for the 1000000 keys of sequence 0"):
        twin.attention(*inputs.tensors)


def test_a_kernel_without_memory_says_what_helps(monkeypatch):
    inputs = build(Case("c", ((2, 6),)))
    monkeypatch.setattr(cpu, "paged", mock.Mock(side_effect=torch.OutOfMemoryError("CUDA out of memory. Tried 9 GiB")))
    with pytest.raises(torch.OutOfMemoryError, match=r"query: .* token_budget.*num_blocks\). CUDA .* 9 GiB"):
        fastattn.chunked_prefill.attention(*inputs.tensors)
