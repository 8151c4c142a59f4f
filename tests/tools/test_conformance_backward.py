"""The kit proves gradients: it finds mistakes planted in a backward, names them, and leaves right kernels alone."""

import functools
import itertools

import pytest
import torch

from tests.helpers import backward_by_hand
from tests.helpers.gpu_package_doubles import install
from tests.helpers.planted_backward import PLANTED, plant
from twinattn.kit import (
    Example,
    backward,
    claims,
    gradients,
    landmarks,
    mistakes,
    oracle,
    properties,
    property,
    vacuous,
)
from twinattn.kit import __main__ as command
from twinattn.kit import check as checking
from twinattn.kit.adapters import ADAPTERS
from twinattn.kit.check import check
from twinattn.kit.checks import everything
from twinattn.kit.kernel import find
from twinattn.kit.report import as_text

pytestmark = [
    pytest.mark.usefixtures("shapes_unchecked"),
    pytest.mark.filterwarnings("ignore:.*random:hypothesis.errors.HypothesisDeprecationWarning"),
]
PATH = "varlen_backward"
FLOAT32 = dict(dtypes=[torch.float32])


@pytest.fixture
def no_shrinking(monkeypatch):
    monkeypatch.setattr(checking, "SHRINKING", 0.0)
    monkeypatch.setattr(checking, "EVIDENCE", 2)
    monkeypatch.setattr(checking, "REPEATS", 2)


@pytest.fixture
def unnamed(monkeypatch, no_shrinking):
    """Take no time to look for what is wrong."""
    monkeypatch.setattr(checking, "probable", lambda *args: [])


@pytest.mark.parametrize(("mistake", "name", "old", "new"), PLANTED, ids=[f"{x[0]}-{x[1]}" for x in PLANTED])
@pytest.mark.usefixtures("no_shrinking")
def test_planted(mistake, name, old, new):
    report = check(plant(old, new), PATH, examples=4, only=[name], **FLOAT32)
    assert report.failures, "nothing was found"
    assert [says for says, _ in report.failures[0].mistakes][:1] == [mistake], as_text(report)


def test_enough_is_planted():
    """Three of four known mistakes of a backward, and two of a forward, whose gradients are right for what it does."""
    named = {x[0] for x in PLANTED}
    known = {x.name for x in mistakes.of_path(PATH) if not x.is_of_forward}
    assert len(named & known) >= 0.75 * len(known) and len(named - known) >= 2
    assert named <= {x.name for x in mistakes.of_path(PATH)}


@pytest.mark.parametrize("lens", [(), ((0, 0), (0, 3)), ((3, 0),)], ids=str)
def test_a_batch_in_which_nothing_is_seen_has_no_gradient_and_no_fault(lens):
    """Whether the kernel computes gradients, or autograd does."""
    example = Example(PATH, lens=lens, heads=(2, 1), options={"grad_lse": True})

    def explicit(grad_out, query, key, value, cu_seqlens_q, cu_seqlens_k, causal, out, lse, grad_lse):
        assert not sum(min(q, s) for q, s in lens), "no query sees a key"
        return torch.zeros_like(query), torch.zeros_like(key), torch.zeros_like(value)

    for function in (backward_by_hand.varlen, explicit):
        backward.of_log_sum_exp(find(function, PATH), example, torch.float32, "cpu")


def test_slopes_without_a_gradient_are_found():
    @claims(heads=((4, 2),), head_sizes=((64, 64),))
    @functools.wraps(backward_by_hand.varlen)
    def kernel(**arguments):
        slopes = arguments["alibi_slopes"]
        return backward_by_hand.varlen(**arguments | dict(alibi_slopes=None if slopes is None else slopes.detach()))

    (finding,) = check(kernel, PATH, examples=2, only=["slopes gradient"], **FLOAT32).findings
    assert finding.outcome == "wrong" and finding.detail.startswith("dslopes: all zeros, or none")


# --- right kernels ---


def test_a_right_kernel_is_not_blamed(monkeypatch):
    """By hand; also where its outputs, and so delta, are rounded to bfloat16."""
    monkeypatch.setattr(backward_by_hand, "TILE", 128)  # a larger tile is faster
    monkeypatch.setattr(landmarks, "PAST_8_BITS", 2**5 + 5)

    @claims(heads=((1, 1), (4, 2)), head_sizes=((64, 64),))  # fewer than by default
    @functools.wraps(backward_by_hand.varlen)
    def kernel(**arguments):
        return backward_by_hand.varlen(**arguments)

    rounded = dict(dtypes=[torch.bfloat16], only=["gradients", "sinks", "empty rows", "lse gradient"])
    assert not check(kernel, PATH, examples=2, **rounded).failures
    report = check(kernel, PATH, examples=1, **FLOAT32)
    assert not report.failures, as_text(report)
    assert [x.property for x in report.findings if x.outcome != "honoured"] == ["batch invariance"]


def test_the_reference_passes():
    asked = ["empty rows", "padding", "strides of the gradient", "one at a time", "batch invariance", "nan", "writes"]
    report = check("refattn.varlen", PATH, examples=2, only=asked, **FLOAT32)
    assert [x.outcome for x in report.findings] == ["honoured"] * len(asked), as_text(report)


def test_the_fast_twin_refuses():
    report = check("fastattn.varlen", PATH, examples=1, only=["gradients", "sinks"], **FLOAT32)
    assert {(x.outcome, x.detail.partition(",")[0]) for x in report.findings} == {("refused", "query: requires_grad")}


def test_a_backward_that_is_called_itself():
    """With the output and the log-sum-exp of the forward; without a parameter for its gradient, that is not claimed."""

    def backward(grad_out, query, key, value, out, lse, cu_seqlens_q, cu_seqlens_k, sinks=None):
        names = dict(query=query, key=key, value=value, sinks=sinks, grad_out=grad_out)
        again, lse_again = backward_by_hand.varlen(
            query, key, value, cu_seqlens_q, cu_seqlens_k, sinks=sinks, return_lse=True
        )
        torch.testing.assert_close(out, again)
        torch.testing.assert_close(lse, lse_again)

        def forward(given):
            tensors = (given[name] for name in ("query", "key", "value"))
            return backward_by_hand.varlen(*tensors, cu_seqlens_q, cu_seqlens_k, sinks=given["sinks"])

        return tuple(gradients.differentiate(forward, names).values())

    asked = ["mask", "gradients", "sinks", "lse gradient", "one at a time"]
    report = check(backward, PATH, examples=2, only=asked, **FLOAT32)
    outcomes = {x.property: x.outcome for x in report.findings}
    assert outcomes == dict.fromkeys(asked, "honoured") | dict.fromkeys(asked[3:], "not claimed"), as_text(report)


@pytest.mark.usefixtures("unnamed")
def weights_of_the_given_lse(
    grad_out,
    query,
    key,
    value,
    out,
    lse,
    cu_seqlens_q,
    cu_seqlens_k,
    grad_lse=None,
    window_size=(-1, -1),
    softmax_scale=None,
):
    """Weights are `exp(score - lse)`, all in float32: each is off by a rounding of the log-sum-exp, too."""
    dq, dk, dv = (torch.zeros_like(x) for x in (query, key, value))
    group, ends, key_ends = query.shape[1] // key.shape[1], cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    for i in range(len(ends) - 1):
        rows, keys = slice(ends[i], ends[i + 1]), slice(key_ends[i], key_ends[i + 1])
        n, s = ends[i + 1] - ends[i], key_ends[i + 1] - key_ends[i]
        pos, j = torch.arange(s - n, s)[:, None], torch.arange(s)
        see = (j <= pos) & (j >= pos - window_size[0]) if window_size[0] >= 0 else j <= pos
        for h in range(query.shape[1]):
            q, k, v, go = query[rows, h], key[keys, h // group], value[keys, h // group], grad_out[rows, h]
            scale = query.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
            p = (scale * (q @ k.T) - lse[rows, h, None]).exp().masked_fill(~see, 0.0)
            delta = (go * out[rows, h]).sum(-1, keepdim=True) - (0.0 if grad_lse is None else grad_lse[rows, h, None])
            ds = p * (go @ v.T - delta) * scale
            dq[rows, h] += ds @ k
            dk[keys, h // group] += ds.T @ q
            dv[keys, h // group] += p.T @ go
    return dq, dk, dv


def test_weights_may_be_off_by_the_rounding_of_their_log_sum_exp():
    """Where scores are of about 12, so is the log-sum-exp, and a weight is off by a rounding of that size."""
    options = dict(window_size=(4, 0), softmax_scale=-0.3, grad_lse=True)
    lens = ((5, 5), (1, 17), (9, 40), (1, 1))
    for seed in range(4):
        example = Example(PATH, lens, (4, 2), 128, 0, 64, options=options, seed=seed)
        everything(find(weights_of_the_given_lse, PATH), example, torch.float32, "cpu")


LARGE_SCORES = [
    Example(PATH, ((1, 295), (4, 40)), (3, 3), 128, options={"softmax_scale": scale}, seed=seed)
    for scale, seed in itertools.product((0.3, -0.3), range(4))
]


@pytest.mark.parametrize("example", LARGE_SCORES)
def test_weights_may_be_off_by_the_rounding_of_their_score(example):
    """A score of about 10 is a sum of 128 terms: its rounding error is a relative error of `exp(score - lse)`."""
    everything(find(weights_of_the_given_lse, PATH), example, torch.float32, "cpu")


WRONG_WEIGHTS = dict(
    lse_in_16_bits=lambda a: a | dict(lse=a["lse"].bfloat16().float()),
    ln_2_of_four_digits=lambda a: a | dict(lse=a["lse"] * (0.6931 / 0.693147)),
    scores_in_tf32=lambda a: a | dict(query=(a["query"].view(torch.int32) & ~0x1FFF).view(torch.float32)),
    delta_in_16_bits=lambda a: a | dict(out=a["out"].half().float()),
    a_key_lost=lambda a: a | dict(key=torch.cat([a["key"][:294], -a["key"][294:295], a["key"][295:]])),
)


@pytest.mark.parametrize("example", LARGE_SCORES)
@pytest.mark.parametrize("name", WRONG_WEIGHTS)
def test_wrong_weights_are_found_where_scores_are_large(name, example):
    @functools.wraps(weights_of_the_given_lse)
    def kernel(**arguments):
        return weights_of_the_given_lse(**WRONG_WEIGHTS[name](arguments))

    with pytest.raises(property.Broken):
        everything(find(kernel, PATH), example, torch.float32, "cpu")


def test_sdpa_and_its_scale():
    """A scale of 0 gives NaN where it is causal: `docs/proof/conformance.md` has it."""
    asked = ["gradients", "empty rows", "strides of the gradient"]
    report = check("sdpa-backward", examples=1, only=asked, **FLOAT32)
    assert [x.outcome for x in report.findings] == ["honoured"] * 3, as_text(report)
    with pytest.raises(property.Broken, match="NaN at"):
        checking.reproduce("sdpa-backward", "scale", Example(PATH, ((2, 2),), options={"softmax_scale": 0.0}))


@pytest.mark.parametrize("name", ["fa2-backward", "fa4-backward"])
def test_adapters_call_their_packages_rightly(name, monkeypatch):
    install(monkeypatch)
    kernel = ADAPTERS[name].kernel()
    report = check(kernel, only=["mask", "lse gradient", "deterministic"], examples=1, dtypes=[torch.bfloat16])
    assert [x.outcome for x in report.findings] == ["honoured"] * 3, as_text(report)


# --- what is no gradient, or no number ---


def test_an_lse_without_a_gradient_is_not_claimed():
    def detached(query, key, value, cu_seqlens_q, cu_seqlens_k, return_lse=False):
        answer = backward_by_hand.varlen(query, key, value, cu_seqlens_q, cu_seqlens_k, return_lse=return_lse)
        return (answer[0], answer[1].detach()) if return_lse else answer

    report = check(detached, PATH, examples=1, only=["lse gradient"], **FLOAT32)
    assert [(x.outcome, x.detail) for x in report.findings] == [
        ("not claimed", "returns no log-sum-exp that has a gradient")
    ]


def races(query, key, value, cu_seqlens_q, cu_seqlens_k, deterministic=False):
    """The scale is a bit more each time, as sums in another order are."""
    races.calls = getattr(races, "calls", 0) + 1
    scale = query.shape[-1] ** -0.5 * (1 + 2.0**-23 * (races.calls % 5))
    return backward_by_hand.varlen(query, key, value, cu_seqlens_q, cu_seqlens_k, softmax_scale=scale)


@pytest.mark.usefixtures("unnamed")
def test_other_bits_each_time_are_found_where_the_same_are_promised():
    report = check(races, PATH, examples=2, only=["gradients", "deterministic"], **FLOAT32)
    assert [x.outcome for x in report.findings] == ["honoured", "wrong"]
    assert "the same call gives other bits" in report.failures[0].detail


@pytest.mark.usefixtures("unnamed")
def test_one_gradient_at_a_time():
    """A backward that adds the gradient of values only where that of queries is wanted, too."""

    class Gate(torch.autograd.Function):
        @staticmethod
        def forward(ctx, query, value):
            ctx.wants = query.requires_grad
            return value.clone()

        @staticmethod
        def backward(ctx, grad):
            return None, grad if ctx.needs_input_grad[0] else 0 * grad

    def gated(query, key, value, cu_seqlens_q, cu_seqlens_k):
        return backward_by_hand.varlen(query, key, Gate.apply(query, value), cu_seqlens_q, cu_seqlens_k)

    report = check(gated, PATH, examples=1, only=["gradients", "one at a time"], **FLOAT32)
    assert [x.outcome for x in report.findings] == ["honoured", "wrong"]
    assert report.failures[0].detail.startswith("where value alone requires a gradient, dv")


def spills(query, key, value, cu_seqlens_q, cu_seqlens_k):
    """Outputs whose gradients are mixed: a row has a part in that of the row after it, times 0."""
    out = backward_by_hand.varlen(query, key, value, cu_seqlens_q, cu_seqlens_k)
    return out + 0 * out.roll(1, 0).nan_to_num()


@pytest.mark.usefixtures("unnamed")
def test_a_nan_that_reaches_other_sequences_is_found():
    report = check(spills, PATH, examples=3, only=["gradients", "nan"], **FLOAT32)
    assert [x.outcome for x in report.findings] == ["honoured", "wrong"]
    assert "with a NaN in another sequence" in report.failures[0].detail


# --- the oracle ---


@pytest.mark.parametrize(
    "options",
    [{}, dict(sinks=True, softcap=2.0, alibi_slopes=True, window_size=(5, 0), grad_lse=True), dict(causal=False)],
    ids=["plain", "everything", "not-causal"],
)
def test_the_oracle_by_hand_is_the_reference_by_autograd(options):
    """And the formula of the known mistakes, without a mistake, is both; the sizes bound what they are of."""
    example = Example(PATH, ((3, 14), (1, 1), (0, 3), (3, 1), (5, 0)), (4, 2), options=options, padding_rows=2)
    arguments = example.tensors(torch.float64)
    if "sinks" in arguments:
        arguments["sinks"] = arguments["sinks"].double()
    found = gradients.differentiate(gradients.forward, arguments)
    again = mistakes.without_mistake(PATH).answers(example, arguments)
    sizes = gradients.sizes(example, arguments)
    for name, x in found.items():
        torch.testing.assert_close(again[name], x, rtol=1e-11, atol=1e-12)
        assert x.abs().max() <= 8 * sizes[name]
    row = first = 0
    lse = arguments.get("grad_lse", torch.zeros(arguments["query"].shape[:2]))
    of_sinks = 0
    for i, (q, s) in enumerate(example.lens):
        rows, keys = slice(row, row + q), slice(first, first + s)
        row, first = rows.stop, keys.stop
        mine = (arguments["query"][rows], arguments["key"][keys], arguments["value"][keys])
        by_hand, _ = oracle.differentiate(
            *mine,
            oracle.sight(example, i),
            arguments["grad_out"][rows],
            lse[rows],
            scale=example.head_size**-0.5,
            softcap=arguments.get("softcap", 0.0),
            slopes=arguments.get("alibi_slopes"),
            sinks=arguments.get("sinks"),
        )
        of_sinks = of_sinks + by_hand.dsinks
        for name, x in zip(("dq", "dk", "dv"), by_hand, strict=False):
            torch.testing.assert_close(x, found[name][rows if name == "dq" else keys], rtol=1e-11, atol=1e-12)
    if "sinks" in arguments:
        torch.testing.assert_close(of_sinks, found["dsinks"], rtol=1e-11, atol=1e-12)


def test_a_landmark_of_gradients_is_a_property_of_the_contract():
    names = [x.name for x in properties.of_path(PATH)]
    assert len(names) == len(set(names)) >= 20 and "gradients" in names
    assert find("refattn.varlen", PATH).claims.heads[-1] == (4, 2)


# --- is a test vacuous? ---


def grad_of_one_sum(attention):
    """A test as people write it: one prompt, as many heads of keys as of queries, a loss that is a sum."""
    query, key, value = (torch.randn(5, 2, 64, generator=torch.Generator().manual_seed(i)) for i in range(3))
    ends = torch.tensor([0, 5], dtype=torch.int32)
    hidden = torch.ones(5, 5).triu(1).bool()

    def plain(query, key, value):
        scores = torch.einsum("thd,shd->hts", query, key) / 8
        return torch.einsum("hts,shd->thd", scores.masked_fill(hidden, -torch.inf).softmax(-1), value)

    found = []
    for function in (plain, lambda *tensors: attention(*tensors, ends, ends)):
        leaves = [x.clone().requires_grad_() for x in (query, key, value)]
        found.append(torch.autograd.grad(function(*leaves).sum(), leaves))
    for expected, came in zip(*found, strict=True):
        torch.testing.assert_close(came, expected)


def small(query, key, value, cu_seqlens_q, cu_seqlens_k):
    """Its parameters are what is asked of kernels with mistakes."""
    return backward_by_hand.varlen(query, key, value, cu_seqlens_q, cu_seqlens_k)


def test_what_a_test_lets_pass():
    found = vacuous(grad_of_one_sum, PATH, like=small)
    missed = {x.name: x for x in found.missed}
    assert {"delta-left-out", "scale-missing-in-dq", "backward-not-causal"} <= set(found.caught)
    assert {"one-head-of-group", "backward-top-left", "gradient-taken-for-contiguous"} <= set(missed)
    assert not any("sink" in name or "cap" in name for name in missed), "its kernel takes neither"
    assert not set(found.caught) & set(missed)
    assert str(found).startswith(f"{len(missed)} of {len(missed) + len(found.caught)} mistakes in {PATH} pass")
    example = checking.parse_example(missed["one-head-of-group"].shown_by)
    assert example.heads[0] > example.heads[1], "which shows it"


def test_a_test_that_cannot_pass_is_refused():
    with pytest.raises(ValueError, match=r"^check: it fails for a right kernel, too: AssertionError"):
        vacuous(lambda attention: torch.testing.assert_close(1, 2), "varlen")
    with pytest.raises(ValueError, match=r"^check: it returns False for a right kernel"):
        vacuous(lambda attention: False, "varlen")
    with pytest.raises(ValueError, match=r"^path: expected one of varlen, .*, got 'merge'"):
        vacuous(lambda attention: True, "merge")


def test_a_test_that_fails_for_everything_wrong():
    """One of the kit's own properties, with few mistakes."""

    def by_the_kit(attention):
        @claims(heads=((4, 2),))
        def kernel(query, key, value, cu_seqlens_q, cu_seqlens_k):
            return attention(query, key, value, cu_seqlens_q, cu_seqlens_k)

        return not check(kernel, PATH, examples=2, only=["gradients"], **FLOAT32).failures

    kinds = "one-head-of-group", "delta-left-out"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checking, "probable", lambda *args: [])
        for name in ("SHRINKING", "EVIDENCE", "REPEATS"):
            patch.setattr(checking, name, 1 if name == "EVIDENCE" else 0)
        patch.setattr(mistakes, "KNOWN", [x for x in mistakes.KNOWN if names(x) & set(kinds)])
        found = vacuous(by_the_kit, PATH, like=small)
    assert not found.missed and set(found.caught) == set(kinds)


def names(kind):
    return {x.name for x in mistakes._variants(kind, kind)}


def test_the_command_says_what_passes(tmp_path, capsys, monkeypatch):
    """Of a file, with the status of a test that lets something pass."""
    (tmp_path / "mine.py").write_text("def check(attention):\n    return True\n")
    patched = [x for x in mistakes.KNOWN if names(x) & {"one-head-of-group", "delta-left-out"}]
    monkeypatch.setattr(mistakes, "KNOWN", patched)
    monkeypatch.setenv("COLUMNS", "200")
    assert command.main(["vacuous", f"{tmp_path / 'mine.py'}::check", PATH]) == 1
    shown = capsys.readouterr().out
    assert shown.startswith(f"2 of 2 mistakes in {PATH} pass") and "one-head-of-group" in shown and "2 of 2" in shown
    assert command.main(["vacuous", f"{tmp_path / 'mine.py'}::missing", PATH]) == 2
    assert "has no function 'missing'" in capsys.readouterr().err
