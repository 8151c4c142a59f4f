"""Who may see whom, and the ALiBi bias: drawn by hand, and read out of every path."""

import dataclasses
import re
from typing import Any

import pytest
import torch

import refattn.attention
from refattn import masks
from tests.helpers.batches import Case, build
from tests.helpers.kernels_present import each_kernel
from tests.table import PATHS, rule

MASKED: dict[str, dict[str, Any]] = {  # paths that take slopes, under several arguments of their plans
    "varlen": {},
    "varlen-both-ways": dict(causal=False),
    "chunked_prefill": {},
    "chunked_prefill-both-ways": dict(causal=False),
    "chunked_prefill-window": dict(causal=False, window_size=(6, 3)),
    "sliding_window": dict(window_size=(9, 0)),
    "sliding_window-both-ways": dict(causal=False, window_size=(9, 2)),
    "sliding_window-no-left-side": dict(causal=False, window_size=(-1, 5)),
    "local": dict(chunk_size=8),
    "cascade": {},
    "cascade-window": dict(window_size=(12, 0)),
    "interval": {},
    "differential": {},
    "differential-both-ways": dict(causal=False),
}
each_path = pytest.mark.parametrize("path", MASKED)
each_type = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)

CASE = Case("alibi", ((3, 7), (1, 23), (9, 21), (6, 2), (4, 4)), heads=(4, 2), block_size=4)
SLOPES = [0.0625, 0.30078125, -0.10009765625, 1.0]  # that bfloat16 has


def expected_lse(case: Case, sees, slopes: list[float]) -> torch.Tensor:
    """Sum `exp(-slope * |i - j|)` over the visible keys of each query, one pair at a time, in float64."""
    rows = []
    for q, s in case.lens:
        for i in range(s - q, s):
            distances = torch.tensor([abs(i - j) for j in range(s) if sees(i, j)], dtype=torch.float64)
            rows.append(torch.stack([(-slope * distances).logsumexp(0) for slope in slopes]))
    return torch.stack(rows)


def call(package: str, path: str, inputs, slopes, **options):
    """Call a path with zero queries, so that the scores are the bias alone."""
    inputs = dataclasses.replace(inputs, query=torch.zeros_like(inputs.query))
    return PATHS[path.partition("-")[0]](package, inputs, alibi_slopes=slopes, return_lse=True, **options)


# --- drawn by hand ---


def test_the_pictures_of_the_docstring():
    """3 queries of 5 tokens."""
    for picture, rows in (
        (masks.causal(3, 5), ["11100", "11110", "11111"]),
        (masks.window(3, 5, (1, 0)), ["01100", "00110", "00011"]),
        (masks.chunk(3, 5, 2), ["00100", "00110", "00001"]),
        (masks.full(3, 5), ["11111", "11111", "11111"]),
        (masks.visible_keys(3, 5, causal=False, window_size=(0, 1)), ["00110", "00011", "00001"]),
        (masks.visible_keys(3, 5, causal=True, window_size=(0, 1)), ["00100", "00010", "00001"]),
    ):
        assert picture.int().tolist() == [[int(mark) for mark in row] for row in rows]


def test_the_bias_of_the_docstring():
    bias = masks.alibi(torch.tensor([1.0, 0.5]), 2, 4, dtype=torch.float32)
    assert bias.tolist() == [[[-2, -1, 0, -1], [-3, -2, -1, 0]], [[-1, -0.5, 0, -0.5], [-1.5, -1, -0.5, 0]]]


def test_later_keys_get_no_bonus_and_neither_do_those_of_a_query_before_the_first_key():
    bias = masks.alibi(torch.tensor([2.0]), 3, 1, dtype=torch.float32)  # positions -2, -1, 0
    assert bias.tolist() == [[[-4], [-2], [0]]]


@each_type
def test_the_bias_is_computed_in_the_type_of_the_scores(dtype):
    """In bfloat16 a distance of 4095 would be 4096, and a slope times it would lose its last digits."""
    slope = torch.tensor([0.30078125], dtype=dtype)
    for compute in (torch.float32, torch.float64):
        bias = masks.alibi(slope, 1, 4096, dtype=compute)
        assert bias.dtype == compute
        assert bias[0, 0].tolist() == [-0.30078125 * (4095 - j) for j in range(4096)]  # float32 has all of these


# --- read out of the paths ---


@pytest.mark.covers("A8")
@pytest.mark.parametrize("package", ["refattn", "fastattn"], ids=["ref", "fast"])
@each_path
@each_type
def test_scores_are_minus_the_slope_times_the_distance(package, path, dtype, device):
    slopes = torch.tensor(SLOPES, dtype=dtype, device=device)
    _, lse = call(package, path, build(CASE, device=device), slopes, **MASKED[path])
    expected = expected_lse(CASE, rule(**MASKED[path]), SLOPES)
    torch.testing.assert_close(lse.double().cpu(), expected, rtol=1e-6, atol=1e-6)


@each_kernel
@each_path
def test_each_kernel_takes_slopes_of_any_type(kernel, path, device):
    """The slopes are numbers that bfloat16 has, so their type must not change a bit; later keys are penalised."""
    inputs = build(CASE, device=device, dtype=kernel.dtypes[0])
    expected = expected_lse(CASE, rule(**MASKED[path]), SLOPES)

    def assert_right():
        slopes = torch.tensor(SLOPES, device=device)
        (out, lse), (same_out, same_lse) = (
            call("fastattn", path, inputs, x, **MASKED[path]) for x in (slopes, slopes.bfloat16())
        )
        torch.testing.assert_close(lse.double().cpu(), expected, rtol=1e-5, atol=1e-5)
        assert torch.equal(out, same_out) and torch.equal(lse, same_lse)

    with kernel.forced():
        kernel.check(assert_right)


# --- memory that no query may see ---


@pytest.mark.parametrize("junk", [float("nan"), float("inf"), 1e30], ids=str)
def test_a_key_that_no_query_sees_may_hold_anything(junk):
    query, key, value = torch.randn(3, 2, 4), torch.randn(6, 1, 4), torch.randn(6, 1, 4)
    visible = masks.window(3, 6, (1, 0))  # keys 0 and 1 are out of every window
    expected = refattn.attention.attend(query, key, value, visible)
    key[:2], value[:2] = junk, junk
    for one, other in zip(refattn.attention.attend(query, key, value, visible), expected, strict=True):
        assert torch.equal(one, other)


def test_a_nan_that_a_query_sees_comes_out():
    query, key, value = torch.randn(3, 2, 4), torch.randn(6, 1, 4), torch.randn(6, 1, 4)
    value[5] = float("nan")
    out, _ = refattn.attention.attend(query, key, value, masks.window(3, 6, (1, 0)), softcap=1.0)
    assert out[2].isnan().all()
    key[2] = float("nan")
    out, _ = refattn.attention.attend(query, key, value, masks.window(3, 6, (1, 0)), softcap=1.0)
    assert out[0].isnan().all()


@pytest.mark.parametrize("window_size", [3, None, (3,), [3, 0], (-2, 0), (3.0, 0), (True, 0), "30"], ids=repr)
@pytest.mark.usefixtures("shapes_unchecked")
def test_a_window_that_is_no_pair_is_named(window_size):
    message = r"window_size: expected \(left, right\), two ints, .*, got " + re.escape(repr(window_size))
    with pytest.raises(ValueError, match=message):
        masks.window(2, 3, window_size)
    with pytest.raises(ValueError, match=message):
        masks.visible_keys(2, 3, causal=True, window_size=window_size)
