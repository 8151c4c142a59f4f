"""The kit at the sizes where kernels change their way of computing, and the names that it gives to what it finds."""

import itertools
import random

import pytest
import torch
import torch.nn.functional as F

from tests.helpers import by_hand
from tests.helpers.planted import PAST_A_SIZE, RETURNED, UNNAMED, plant
from twinattn.kit import Example, claims, combinations, contract, mistakes, sizes
from twinattn.kit import __main__ as command
from twinattn.kit import check as checking
from twinattn.kit.check import check
from twinattn.kit.kernel import BadKernelError, Kernel
from twinattn.kit.property import Broken

pytestmark = [
    pytest.mark.usefixtures("shapes_unchecked"),
    pytest.mark.filterwarnings("ignore:.*random:hypothesis.errors.HypothesisDeprecationWarning"),
]
OF = {"paged": "chunked_prefill", "write": "kv_cache", "merge": "merge", "recurrent": "recurrent"}
FLOAT32 = dict(dtypes=[torch.float32])


@pytest.fixture
def no_shrinking(monkeypatch):
    monkeypatch.setattr(checking, "SHRINKING", 0.0)
    monkeypatch.setattr(checking, "EVIDENCE", 4)
    monkeypatch.setattr(checking, "REPEATS", 3)


@pytest.mark.parametrize("name", PAST_A_SIZE)
def test_a_mistake_past_a_size_is_found_and_named(name, monkeypatch):
    mistake, prop, old, new, limits = PAST_A_SIZE[name]
    is_large = name.endswith("-bits")  # these take time
    numbers = dict(TILE=512, SPLIT=2048) if is_large else {}
    monkeypatch.setattr(checking, "SHRINKING", 0.0 if is_large else 1.0)
    monkeypatch.setattr(checking, "EVIDENCE", 1 if is_large else 4)
    monkeypatch.setattr(checking, "REPEATS", 1 if is_large else 3)
    kernel = claims(**limits)(plant("paged", old, new, **numbers))
    report = check(kernel, "chunked_prefill", examples=3, only=[prop], **FLOAT32)
    assert [name for name, _ in report.failures[0].mistakes][:1] == [mistake]
    example = checking.parse_example(report.failures[0].example)
    with pytest.raises(Broken):
        checking.reproduce(kernel, prop, example)
    checking.reproduce(plant("paged", old, old, **numbers), prop, example)


@pytest.mark.parametrize("name", UNNAMED)
@pytest.mark.usefixtures("no_shrinking")
def test_a_mistake_without_a_name_is_found(name, monkeypatch):
    kernel, prop, old, new = UNNAMED[name]
    monkeypatch.setattr(checking, "probable", lambda *args: [])  # what is known is asked above
    assert check(
        plant(kernel, old, new), OF[kernel], examples=3 if kernel == "paged" else 8, only=[prop], **FLOAT32
    ).failures


def test_there_are_enough_of_them():
    assert len(PAST_A_SIZE) >= 9 and len(UNNAMED) >= 25


def test_any_two_choices_meet():
    """In few enough batches that all of them are visited, where 20 are asked for."""
    kernel = Kernel("paged", "chunked_prefill", by_hand.paged)
    of = combinations.choices(kernel)
    cases = combinations.covering(of)
    for (one, xs), (other, ys) in itertools.combinations(of.items(), 2):
        assert {(case[one], case[other]) for case in cases} == set(itertools.product(xs, ys))
    assert {"causal", "window_size", "sinks", "layout", "poison", "return_lse", "out"} <= set(of)
    assert len(contract.all_together(kernel)) <= 40


def test_each_option_meets_each_shape():
    """And there are shapes with each number of heads, each head size and each block size."""
    kernel = Kernel("paged", "chunked_prefill", by_hand.paged)
    batches, claims_of = sizes.at_every_shape(kernel), kernel.claims
    shapes = [(x.heads, (x.head_size, x.value_size), x.block_size) for x in batches]
    for i, claimed in enumerate((claims_of.heads, claims_of.head_sizes, claims_of.block_sizes)):
        assert {shape[i] for shape in shapes} == set(claimed)
    for shape in shapes:
        met = {name for x, of in zip(batches, shapes, strict=True) if of == shape for name in x.options}
        assert {"causal", "window_size", "softmax_scale", "softcap", "alibi_slopes", "sinks"} <= met
    longest = [max(s for _, s in x.lens) for x in sizes.past_tiles(kernel)]
    assert max(longest) > 2**15 and len(batches) <= 40 and len(longest) <= 8


def test_heads_of_latents_meet_the_size_that_is_served():
    def mine(query, cache, cu_seqlens_q, seq_lens, block_table, latent_rank, softmax_scale, sinks=None): ...

    kernel = Kernel("mine", "mla", mine)
    options = [x.options for x in sizes.at_every_shape(kernel) if (x.heads, x.head_size) == ((128, 1), 576)]
    assert any("sinks" in x for x in options)


@pytest.mark.usefixtures("no_shrinking")
def test_an_lse_that_was_rounded_is_named():
    kernel = plant("paged", RETURNED, RETURNED.replace("(out, lse)", "(out, lse.to(query.dtype).float())"))
    report = check(kernel, "chunked_prefill", examples=3, only=["lse"], dtypes=[torch.bfloat16])
    assert report.failures[0].mistakes[0][0] == "lse-rounded"


# --- what is no mistake ---


def decode(query, key_cache, value_cache, block_table, seq_lens):
    """Attend from one query per sequence: nothing here could say that there are more, or none."""
    out, p = query.new_zeros(*query.shape[:2], value_cache.shape[-1]), key_cache.shape[1]
    for b, s in enumerate(seq_lens.tolist()):
        j = torch.arange(s)
        k, v = (pool[block_table[b, j // p].long(), j % p].transpose(0, 1) for pool in (key_cache, value_cache))
        if s:
            answer = F.scaled_dot_product_attention(query[b][:, None][None], k[None], v[None], enable_gqa=True)
            out[b] = answer[0, :, 0]
    return out


def test_a_decode_is_not_asked_for_what_its_parameters_cannot_say():
    kernel = Kernel("decode", "chunked_prefill", decode)
    assert kernel.claims.max_query_len == 1 and not kernel.knows_query_lens
    asked = ["empty rows", "padding", "many sequences", "edges", "many queries", "upper bounds", "tail"]
    report = check(decode, "chunked_prefill", examples=6, only=asked, **FLOAT32)
    outcomes = {finding.property: finding.outcome for finding in report.findings}
    assert outcomes.pop("padding") == "not claimed" and set(outcomes.values()) == {"honoured"}


# --- what a failure is called ---


def test_a_race_is_called_a_race():
    chance = random.Random(0)

    def races(outs, lses):
        out, lse = by_hand.merge(outs, lses)
        return (out + (chance.random() < 0.3), lse)

    report = check(races, "merge", examples=6, only=["answer"], **FLOAT32)
    (finding,) = report.failures
    assert finding.mistakes == (checking.RACE,) and finding.code.endswith(", times=1000)")
    with pytest.raises(Broken):
        checking.reproduce(races, "answer", checking.parse_example(finding.example), times=1000)


def test_a_wrong_kernel_whose_last_bits_vary_is_no_race():
    def adds_in_any_order(outs, lses):
        out, lse = by_hand.merge(outs[:1], lses[:1])
        return out * (1 + 1e-7 * random.random()), lse

    report = check(adds_in_any_order, "merge", examples=6, only=["answer"], **FLOAT32)
    assert checking.RACE not in report.failures[0].mistakes


@pytest.mark.parametrize("prop", ["tail", "outside the window"])
@pytest.mark.usefixtures("no_shrinking")
def test_of_a_nan_the_cause_is_named_that_explains_what_is_right(prop):
    """All numbers are NaN, as those of many mistakes would be; but without the poison they are right."""

    def weighs_by_zero(query, key_cache, value_cache, cu_seqlens_q, seq_lens, block_table, window_size=(-1, -1)):
        out, p = query.new_zeros(*query.shape[:2], value_cache.shape[-1]), key_cache.shape[1]
        edges = cu_seqlens_q.tolist()
        for b, s in enumerate(seq_lens.tolist()):
            first, last = edges[b], edges[b + 1]
            blocks = block_table[b, : -(-s // p)].long()
            k, v = (pool[blocks].flatten(0, 1).transpose(0, 1) for pool in (key_cache, value_cache))
            if first < last and s:
                pos, j = torch.arange(s - last + first, s)[:, None], torch.arange(k.shape[1])
                see = (j <= pos) & ((window_size[0] < 0) | (j >= pos - window_size[0]))
                q = query[first:last].transpose(0, 1)
                answer = F.scaled_dot_product_attention(q[None], k[None], v[None], attn_mask=see, enable_gqa=True)
                out[first:last] = answer[0].transpose(0, 1)
        return out

    report = check(weighs_by_zero, "chunked_prefill", examples=6, only=[prop], **FLOAT32)
    names = [name for name, _ in report.failures[0].mistakes]
    assert names[0] in ("zero-times-nan", "hidden-times-nan")
    assert not {"causal-top-left", "window-ignored", "past-the-end", "table-one-column-late"} & set(names)


def test_an_unknown_type_is_a_bad_argument(capsys):
    with pytest.raises(SystemExit) as status:
        command.main(["fastattn.merge", "--dtype", "float8"])
    assert status.value.code == 2 and "argument --dtype: invalid choice: 'float8'" in capsys.readouterr().err
    with pytest.raises(BadKernelError, match="claims none of the types asked for"):
        check("fastattn.merge", dtypes=[torch.float64], only=["answer"])


@pytest.mark.parametrize(
    ("lens", "heads", "options"),
    [
        (((3, 20), (1, 33)), (2, 1), {}),
        (((3, 20), (1, 33)), (2, 1), {"sinks": True, "window_size": (5, 0)}),
        (((5, 5), (5, 5)), (6, 2), {"causal": False, "window_size": (2, 1), "alibi_slopes": True, "softcap": 2.0}),
        (((1, 3), (0, 3), (1, 18)), (4, 4), {"sinks": True, "softmax_scale": 0.3}),
        (((4, 2),), (4, 2), {"alibi_slopes": True}),
    ],
    ids=["plain", "options", "not-causal", "decodes", "blind"],
)
def test_what_may_not_show_does_not(lens, heads, options):
    """Such mistakes are not computed when a failure is named; the others are the smaller part."""
    example = Example("chunked_prefill", lens, heads, options=options)
    arguments = example.tensors(torch.float32)
    right = mistakes.without_mistake(example.path).answers(example, arguments)
    known = list(mistakes.of_path(example.path))
    hidden = [mistake for mistake in known if not mistake.may_show(example, arguments)]
    assert len(known) / 2 < len(hidden) < len(known)
    for mistake in hidden:
        for name, x in mistake.answers(example, arguments).items():
            assert torch.allclose(x, right[name]), (mistake.name, mistake.variant)


def test_what_is_only_asked_at_landmarks_has_some():
    kernel = Kernel("paged", "chunked_prefill", by_hand.paged)
    for prop in contract.of_path("chunked_prefill"):
        assert prop.examples != 0 or prop.landmarks(kernel), prop.name
