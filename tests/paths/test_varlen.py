"""Ragged attention without a cache: encoder, cross attention, plain prefill."""

from functools import partial

import pytest
import torch
from torch.nn import functional

import fastattn.varlen
import refattn.chunked_prefill
import refattn.varlen
from fastattn.kernels.cpu import attention as cpu
from refattn.batch import Batch
from refattn.metadata import make_batch
from tests.helpers.batches import (
    Case,
    assert_same_masks,
    build,
    each_case,
    masks_by_hand,
    plan_and_attend,
    read_masks,
)
from tests.helpers.kernels_present import each_kernel
from tests.helpers.options import SMALL, WINDOWS, each_kernel_case_and_option, per_head
from tests.helpers.tolerance import assert_twins_agree

each_twin = pytest.mark.parametrize("twin", [refattn.varlen, fastattn.varlen], ids=["ref", "fast"])


@pytest.mark.covers("A25", "A29", "B50")
@each_twin
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "encoder"])
@pytest.mark.parametrize("case", SMALL, ids=str)
def test_masks(twin, causal, case, device):
    case = Case(**{**case.__dict__, "head_size": 64, "value_head_size": 64})
    masks = read_masks(partial(plan_and_attend, twin), case, paged=False, device=device, causal=causal)
    assert_same_masks(masks, masks_by_hand(case, lambda i, j: j <= i or not causal))


@pytest.mark.covers("A30")
@each_twin
@pytest.mark.parametrize("window", WINDOWS, ids=str)
def test_an_encoder_window_counts_both_sides(twin, window, device):
    case = Case("encoders", ((40, 40), (7, 7), (5, 20), (1, 1)), heads=(2, 1))
    left, right = window
    masks = read_masks(
        partial(plan_and_attend, twin), case, paged=False, device=device, window_size=window, causal=False
    )
    sees = masks_by_hand(case, lambda i, j: (left < 0 or j >= i - left) and (right < 0 or j <= i + right))
    assert_same_masks(masks, sees)


@pytest.mark.covers("A31")
@each_twin
def test_cross_attention_over_encoders_of_different_lengths(twin, device):
    """Several decoder tokens each, and one encoder of length 0, whose queries see nothing."""
    case = Case("cross", ((3, 11), (1, 0), (2, 40), (4, 1)), heads=(4, 2))
    inputs = build(case, device=device)
    out, lse = plan_and_attend(twin, *inputs.rows, causal=False, return_lse=True)
    row = 0
    for (q, s), key, value in zip(case.lens, inputs.keys, inputs.values, strict=True):
        mine = slice(row, row + q)
        if s:
            expected = functional.scaled_dot_product_attention(
                inputs.query[mine].double().transpose(0, 1),
                key.double().transpose(0, 1),
                value.double().transpose(0, 1),
                enable_gqa=True,
            )
            torch.testing.assert_close(out[mine].double(), expected.transpose(0, 1), rtol=1e-5, atol=1e-6)
        else:
            assert not out[mine].any() and (lse[mine] == -torch.inf).all()
        row += q


@each_case
def test_the_cache_changes_nothing(case, device):
    """The same tokens in a pool and in plain rows answer alike, to the bit."""
    inputs = build(case, device=device)
    assert torch.equal(
        plan_and_attend(refattn.varlen, *inputs.rows), plan_and_attend(refattn.chunked_prefill, *inputs.tensors)
    )


@pytest.mark.covers("A7", "B61")
@each_kernel_case_and_option(("mixed",), ("everything",))  # rows are found otherwise than pages, and that is all
def test_twins_agree(case, options, kernel, device):
    inputs = build(case, device=device, dtype=kernel.dtypes[0])
    with kernel.forced():
        kernel.check(assert_twins_agree, "varlen", *inputs.rows, **per_head(options, case, device))


@pytest.mark.parametrize("heads", [(4, 2, 64, 64), (3, 3, 32, 48)], ids=str)
@pytest.mark.parametrize(
    ("lens", "given", "is_one_call"),
    [
        ([20] * 3, dict(causal=False), True),
        ([20] * 3, dict(causal=True, sinks=True), True),
        ([3] * 4, dict(causal=True), True),
        ([1] * 2, dict(causal=False, softmax_scale=-0.5), True),
        ([20, 21, 19], dict(causal=False), False),
        ([0] * 2, dict(causal=False), False),
        ([20] * 2, dict(causal=True, window_size=(5, 0)), False),
        ([20] * 2, dict(causal=True, softcap=3.0), False),
        ([20] * 2, dict(causal=False, padding=1), False),
    ],
    ids=str,
)
def test_sequences_of_one_length_are_one_call_on_a_cpu(lens, given, is_one_call, heads, monkeypatch):
    h, hk, d, dv = heads
    torch.manual_seed(0)
    tensors = [torch.randn(sum(lens) + given.get("padding", 0), *size) for size in ((h, d), (hk, d), (hk, dv))]
    tensors[1:] = [x[: sum(lens)] for x in tensors[1:]]
    if given.get("sinks"):
        given = given | dict(sinks=torch.linspace(-1.0, 1.0, h))
    batch = make_batch(lens, lens)
    arguments = {name: x for name, x in given.items() if name != "padding"}
    assert_twins_agree("varlen", *tensors, batch, **arguments)
    calls, flash = [], cpu.rectangles.FLASH
    monkeypatch.setattr(
        cpu.rectangles, "FLASH", lambda *args, **options: calls.append(len(args[0])) or flash(*args, **options)
    )
    plan_and_attend(fastattn.varlen, *tensors, batch, **arguments)
    assert (calls == [len(lens)]) == is_one_call


@each_kernel
def test_no_layer_sums_the_lengths_anew(kernel, device, monkeypatch):
    inputs = build(Case("encoders", ((40, 40), (7, 7), (5, 20), (1, 1)), heads=(6, 2)), device=device)
    query, key, value = (x.to(kernel.dtypes[0]) for x in inputs.rows[:3])
    plan = fastattn.varlen.plan(inputs.rows[3], causal=False)
    with kernel.forced():
        first = fastattn.varlen.attention(query, key, value, plan)
        if kernel.name != "cpu":  # it reads the lengths on the host
            monkeypatch.setattr(Batch, "cu_seqlens_k", property(lambda batch: pytest.fail("summed in a layer")))
        second = fastattn.varlen.attention(query, key, value, plan)
    assert torch.equal(first, second)
