"""Partial answers merge, exactly, by their log-sum-exp."""

import math
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import fastattn
import fastattn.merge
import refattn.attention
import refattn.merge
from tests.helpers.kernels_present import PRESENT
from tests.helpers.tolerance import assert_close

each_twin = pytest.mark.parametrize("twin", [refattn.merge, fastattn.merge], ids=["ref", "fast"])
NOTHING = -math.inf


def halves(device, *, t=7, h=4, s=40, cut=15, d=16, dtype=torch.float64):
    """Draw one attention, and the same over the keys before and after a cut."""
    generator = torch.Generator().manual_seed(t * s)
    q, k, v = (torch.randn(n, h, d, generator=generator).to(device, dtype) for n in (t, s, s))
    everything = torch.ones(t, s, dtype=torch.bool, device=device)
    whole = refattn.attention.attend(q, k, v, everything)
    parts = [refattn.attention.attend(q, k[rows], v[rows], everything[:, rows]) for rows in (slice(cut), slice(cut, s))]
    return whole, *zip(*parts, strict=True)


@pytest.mark.covers("B78")
@each_twin
def test_two_parts_of_the_keys_give_the_whole(twin, device):
    (out, lse), outs, lses = halves(device)
    merged, merged_lse = twin.merge(outs, lses)
    torch.testing.assert_close(merged, out, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(merged_lse, lse, rtol=1e-12, atol=1e-14)


@each_twin
@pytest.mark.parametrize(("s", "cut"), [(3136, 3072), (10, 8), (10, 2)])
def test_a_long_prefix_and_a_short_suffix(twin, s, cut, device):
    """3072 + 64 keys, and shards of 8 and of 2: where a base-2 LSE in a natural-log merge shows."""
    (out, lse), outs, lses = halves(device, t=3, s=s, cut=cut)
    merged, merged_lse = twin.merge(outs, lses)
    torch.testing.assert_close(merged, out, rtol=1e-12, atol=1e-14)
    wrong, _ = twin.merge(outs, [x / math.log(2) for x in lses])
    assert (wrong - out).abs().max() > 1e-3, "the case is too easy to show a wrong base"


@pytest.mark.parametrize("kernel", [k.name for k in PRESENT if k.name in ("cpu", "triton")])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("number", [2, 8, 9, 15, 16, 300])
def test_hundreds_of_parts_are_as_exact_as_two(kernel, dtype, number, device):
    """Those of one query row each see a few keys; the last one, and every seventh, saw nothing and holds NaN."""
    t, h, s, d = 2, 3, 2 * number, 16
    q, k, v = (torch.randn(n, h, d, device=device, dtype=torch.float64) for n in (t, s, s))
    everything = torch.ones(t, s, dtype=torch.bool, device=device)
    empty = [part % 7 == 6 or part == number - 1 for part in range(number)]
    for part, is_empty in enumerate(empty):
        everything[:, 2 * part : 2 * part + 2] = not is_empty
    expected, expected_lse = refattn.attention.attend(q, k, v, everything)
    parts = []
    for part, is_empty in enumerate(empty):
        rows = slice(2 * part, 2 * part + 2)
        out, lse = refattn.attention.attend(q, k[rows], v[rows], everything[:, rows])
        parts.append((out.fill_(math.nan).to(dtype) if is_empty else out.to(dtype), lse.float()))
    with fastattn.use_kernel("triton" if kernel == "triton" else "torch"):
        out, lse = fastattn.merge.merge(*zip(*parts, strict=True))
    assert out.dtype == dtype and lse.dtype == torch.float32
    exact, _ = refattn.merge.merge([part.double() for part, _ in parts], [lse.double() for _, lse in parts])
    torch.testing.assert_close(out.double(), exact, rtol=2 * torch.finfo(dtype).eps, atol=4e-6)  # rounded once
    torch.testing.assert_close(lse.double(), expected_lse, rtol=0, atol=1e-5)
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=4 * torch.finfo(dtype).eps + 1e-5)


@pytest.mark.skipif("triton" not in [k.name for k in PRESENT], reason="needs Triton")
def test_no_launch_takes_more_parts_than_a_few(device):
    """Each number of parts is a compilation, which takes the longer the more there are: 91 s for 128."""
    from fastattn.kernels.triton import merge as triton_merge

    launched = []

    class Kernel:
        def __getitem__(self, grid):
            return lambda outs, *arguments, NUM_PARTS, **sizes: launched.append((len(outs), NUM_PARTS))

    states = [(torch.zeros(2, 3, 4, device=device), torch.zeros(2, 3, device=device))] * 300
    with mock.patch.object(triton_merge, "_merge_kernel", Kernel()), fastattn.use_kernel("triton"):
        fastattn.merge.merge(*zip(*states, strict=True))
    assert all(given == number <= triton_merge.PARTS_AT_ONCE for given, number in launched)
    assert sum(number - 1 for _, number in launched) == 299, "every part is merged once"
    assert len(set(launched)) <= 2, "more compilations than one for many parts and one for the rest"


@each_twin
def test_numbers_by_hand(twin, device):
    """Weights 1 and 3 give (1 * 2 + 3 * 6) / 4 = 5 and an LSE of log 4."""
    outs = [torch.full((1, 1, 1), x, device=device) for x in (2.0, 6.0)]
    lses = [torch.full((1, 1), math.log(x), device=device) for x in (1.0, 3.0)]
    out, lse = twin.merge(outs, lses)
    assert float(out) == pytest.approx(5.0, rel=1e-6)
    assert float(lse) == pytest.approx(math.log(4.0), rel=1e-6)


@pytest.mark.covers("D159")
@each_twin
def test_a_log_sum_exp_has_a_row_for_each_query_and_a_column_for_each_head(twin, device):
    """Two queries of three heads, each with weights of its own: taken as heads of queries, they are other ones."""
    weights = torch.tensor([[[1.0, 2.0, 5.0], [3.0, 7.0, 4.0]], [[9.0, 6.0, 2.0], [4.0, 1.0, 12.0]]], device=device)
    outs = torch.tensor([2.0, 6.0], device=device)[:, None, None, None].expand(2, 2, 3, 1)
    out, lse = twin.merge(outs.unbind(), weights.log().unbind())
    torch.testing.assert_close(out[..., 0], (2.0 * weights[0] + 6.0 * weights[1]) / weights.sum(0))
    torch.testing.assert_close(lse, weights.sum(0).log())


@each_twin
@pytest.mark.parametrize("junk", [0.0, math.nan, math.inf, 1e30], ids=str)
def test_a_part_that_saw_nothing_counts_for_nothing(twin, junk, device):
    empty = (torch.full((2, 3, 4), junk, device=device), torch.full((2, 3), NOTHING, device=device))
    real = (torch.randn(2, 3, 4, device=device), torch.randn(2, 3, device=device))
    for parts in ([empty, real], [real, empty], [empty, real, empty]):
        out, lse = twin.merge(*zip(*parts, strict=True))
        assert torch.equal(out, real[0]) and torch.equal(lse, real[1])


@each_twin
@pytest.mark.parametrize("junk", [0.0, math.nan], ids=str)
def test_parts_that_all_saw_nothing_give_nothing_again(twin, junk, device):
    empty = (torch.full((2, 3, 4), junk, device=device), torch.full((2, 3), NOTHING, device=device))
    out, lse = twin.merge(*zip(empty, empty, strict=True))
    assert not out.any() and (lse == NOTHING).all()
    again, lse_again = twin.merge([out, out], [lse, lse])
    assert not again.any() and (lse_again == NOTHING).all()


@each_twin
def test_extreme_weights_do_not_overflow(twin, device):
    outs = [torch.full((1, 1, 2), x, device=device) for x in (1.0, 2.0, 3.0)]
    lses = [torch.full((1, 1), x, device=device) for x in (1e4, -1e4, 1e4)]
    out, lse = twin.merge(outs, lses)
    assert out.flatten().tolist() == pytest.approx([2.0, 2.0], rel=1e-3)  # float32 is 1e-3 apart near 1e4
    assert float(lse) == pytest.approx(1e4 + math.log(2))


@each_twin
def test_strided_parts(twin, device):
    """One part padded, the other not: neither may be read with the other's strides."""
    (out, lse), outs, lses = halves(device)
    padded = torch.full((7, 4, 24), math.nan, dtype=torch.float64, device=device)
    padded[..., :16] = outs[0]
    lse_of_heads_first = lses[1].T.contiguous().T
    merged, merged_lse = twin.merge([padded[..., :16], outs[1]], [lses[0], lse_of_heads_first])
    torch.testing.assert_close(merged, out, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(merged_lse, lse, rtol=1e-12, atol=1e-14)


@pytest.mark.covers("B57")
@each_twin
@pytest.mark.parametrize("sink", [-3.0, 0.0, 2.5, 1e4], ids=str)
def test_a_sink_is_one_more_key_without_a_value(twin, sink, device):
    (out, lse), _, _ = halves(device, h=2)
    share = 1 / (1 + torch.exp(sink - lse))
    got, got_lse = twin.add_sinks(out, lse, torch.full((2,), sink, dtype=torch.float64, device=device))
    torch.testing.assert_close(got, out * share[..., None], rtol=1e-12, atol=1e-300)
    torch.testing.assert_close(
        got_lse,
        lse + torch.log1p(torch.exp(sink - lse)).clamp(max=1e308).where(sink - lse < 700, sink - lse),
        rtol=1e-12,
        atol=1e-14,
    )


@each_twin
def test_a_query_that_saw_nothing_answers_its_sink(twin, device):
    out, lse = torch.full((1, 2, 4), math.nan, device=device), torch.full((1, 2), NOTHING, device=device)
    sinks = torch.tensor([0.5, -1.0], device=device)
    got, got_lse = twin.add_sinks(out, lse, sinks)
    assert not got.any() and torch.equal(got_lse[0], sinks)


@given(
    parts=st.integers(1, 5),
    shape=st.tuples(st.integers(0, 5), st.integers(1, 4), st.integers(1, 9)),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    empty=st.floats(0, 1),
    seed=st.integers(0, 999),
)
def test_twins_agree(parts, shape, dtype, empty, seed, device):
    generator = torch.Generator().manual_seed(seed)
    outs, lses = [], []
    for _ in range(parts):
        outs.append(torch.randn(shape, generator=generator).to(device, dtype))
        lse = torch.randn(shape[:2], generator=generator) * 4
        lses.append(lse.masked_fill(torch.rand(shape[:2], generator=generator) < empty, NOTHING).to(device))
    out, lse = fastattn.merge.merge(outs, lses)
    exact, exact_lse = refattn.merge.merge([x.double() for x in outs], [x.double() for x in lses])
    low, low_lse = refattn.merge.merge(outs, lses)
    assert out.dtype == dtype and lse.dtype == torch.float32
    assert_close(out, exact, low)
    assert_close(lse, exact_lse, low_lse, name="lse")


@each_twin
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("parts", [1, 2, 7])
def test_halves_are_rounded_once(twin, dtype, parts, device):
    """Every element is the exact answer rounded to its type: by Python's floats, and no tolerance of the reference.

    A merge that rounds on the way, the weights or a sum, is off by another rounding in a tenth of the elements.
    """
    generator = torch.Generator().manual_seed(parts)
    outs = [torch.randn(5, 4, 16, generator=generator).to(dtype) for _ in range(parts)]
    lses = [torch.randn(5, 4, generator=generator) * 2 for _ in range(parts)]
    out, lse = twin.merge([x.to(device) for x in outs], [x.to(device) for x in lses])
    assert out.dtype == dtype and lse.dtype == torch.float32
    for row in range(5):
        for head in range(4):
            weights = [math.exp(float(x[row, head])) for x in lses]
            assert float(lse[row, head]) == pytest.approx(math.log(sum(weights)), rel=1e-6, abs=1e-6)
            for column in range(16):
                values = [float(x[row, head, column]) for x in outs]
                exact = sum(w * x for w, x in zip(weights, values, strict=True)) / sum(weights)
                largest = max(w * abs(x) for w, x in zip(weights, values, strict=True)) / sum(weights)
                ulp = 2.0 ** (math.frexp(exact)[1] - 1) * torch.finfo(dtype).eps
                # Half an ulp for the one rounding; 1e-6 of what was added for the float32 before it.
                assert abs(float(out[row, head, column]) - exact) <= 0.5 * ulp + 1e-6 * largest


@each_twin
@pytest.mark.parametrize("of_lse", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("of_out", [torch.float16, torch.float32, torch.float64], ids=str)
def test_outputs_and_log_sum_exps_keep_their_types(twin, of_out, of_lse, device):
    """Whichever is the wider, both are computed in it: each answer is the one in float64, rounded once to its type."""
    generator = torch.Generator().manual_seed(0)
    outs = [torch.randn(5, 4, 16, generator=generator, dtype=torch.float64).to(device, of_out) for _ in range(3)]
    lses = [torch.randn(5, 4, generator=generator, dtype=torch.float64).to(device, of_lse) for _ in range(3)]
    sinks = torch.randn(4, generator=generator, dtype=torch.float64).to(device, of_lse)
    weights = torch.stack([lse.double().exp() for lse in lses])
    whole = sum(w[..., None] * out.double() for w, out in zip(weights, outs, strict=True)) / weights.sum(0)[..., None]
    share = 1 / (1 + torch.exp(sinks.double() - lses[0].double()))
    exact = torch.float64 in (of_out, of_lse)
    for (out, lse), expected, expected_lse in (
        (twin.merge(outs, lses), whole, weights.sum(0).log()),
        (twin.add_sinks(outs[0], lses[0], sinks), outs[0].double() * share[..., None], lses[0].double() - share.log()),
    ):
        assert out.dtype == of_out and lse.dtype == of_lse
        for one, other in ((out, expected), (lse, expected_lse)):
            rounding = torch.finfo(one.dtype).eps / 2
            tolerance = rounding + (1e-14 if exact else 1e-6)
            torch.testing.assert_close(one.double(), other, rtol=tolerance, atol=0.1 * tolerance)
