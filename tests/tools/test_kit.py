"""The kit that proves any kernel: it finds planted mistakes, names them, and leaves right kernels alone."""

import dataclasses
import json
import os
import re
import sys
import time
from pathlib import Path
from types import ModuleType

import pytest
import torch

import fastattn.chunked_prefill
import refattn.merge
import refattn.varlen
from refattn import mla, recurrent, sparse
from refattn.keys import read_packed
from refattn.metadata import make_batch
from refattn.options import AttentionOptions, RecurrentOptions
from tests.helpers import by_hand, planted_backward
from tests.helpers.gpu_package_doubles import fa3_library, install
from tests.helpers.planted import PAST_A_SIZE, PLANTED, UNNAMED, plant
from tests.helpers.planted_kinds import KINDS
from twinattn.kit import Example, claims, field, hold, isolate, landmarks, mistakes, properties, reference
from twinattn.kit import __main__ as command
from twinattn.kit import check as checking
from twinattn.kit import kernel as kernels
from twinattn.kit.adapters import ADAPTERS, kernel_of
from twinattn.kit.call import plan_and_attend
from twinattn.kit.check import check, reproduce
from twinattn.kit.example import PACKED, PATHS
from twinattn.kit.field import list_failures, results, tables
from twinattn.kit.isolate import check_apart
from twinattn.kit.kernel import BadKernelError, Kernel, find
from twinattn.kit.operations import OPERATIONS
from twinattn.kit.over_slots import over_gathered_states
from twinattn.kit.properties import PROPERTIES
from twinattn.kit.property import Broken, CrashedError
from twinattn.kit.report import MOST_ROWS, as_html, as_text

pytestmark = [
    pytest.mark.usefixtures("shapes_unchecked", "no_shrinking"),  # each takes as long as all the rest
    pytest.mark.filterwarnings("ignore:.*random:hypothesis.errors.HypothesisDeprecationWarning"),  # from beartype
    pytest.mark.filterwarnings("ignore:.*(flex_attention|return_lse)"),
]

BY_HAND = {"paged": "chunked_prefill", "write": "kv_cache", "cascade_of_prefixes": "cascade"} | {
    name: name
    for name in (
        *("varlen", "local", "sliding_window", "quantized", "mla", "cascade", "differential", "merge"),
        *("interval", "sparse", "sparse_latents", "packed_latents", "select", "recurrent", "speculative"),
    )
}
# Not called by their names: of several tokens of padding, which one stays in the last slot is up to the machine.
BLAMED_OTHERWISE = ("padding-writes-last",)


TILES = dict(TILE=64, SPLIT=256)  # with which a kernel by hand is faster
PATIENCE = {name: getattr(checking, name) for name in ("SHRINKING", "EVIDENCE", "REPEATS")}


@pytest.fixture
def no_shrinking(monkeypatch):
    """Take less time than a person would give it."""
    monkeypatch.setattr(checking, "SHRINKING", 0.0)
    monkeypatch.setattr(checking, "EVIDENCE", 4)
    monkeypatch.setattr(checking, "REPEATS", 2)
    for name in ("PAST_16_BITS", "PAST_A_MODEL"):  # test_conformance_sizes.py asks for as many as there are
        monkeypatch.setattr(landmarks, name, 2**9 + 9)


@pytest.fixture
def quick(monkeypatch):
    """Ask for fewer sequences, and let kernels by hand take more keys at a time."""
    for name in ("PAST_8_BITS", "PAST_2048"):
        monkeypatch.setattr(landmarks, name, 2**5 + 5)
    monkeypatch.setattr(landmarks, "SPLIT", (150, 250, 420))
    for name, number in dict(LONG_STEP=77, LONG_LIST=96, WIDE_WINDOW=70).items():
        monkeypatch.setattr(landmarks, name, number)
    for name, number in TILES.items():
        monkeypatch.setattr(by_hand, name, number)


@pytest.fixture
def patience(no_shrinking, monkeypatch):
    """Take the time that a person gives it."""
    for name, value in PATIENCE.items():
        monkeypatch.setattr(checking, name, value)


@pytest.mark.parametrize(("kernel", "mistake", "name", "old", "new"), PLANTED, ids=[f"{x[0]}-{x[1]}" for x in PLANTED])
def test_planted(kernel, mistake, name, old, new):
    """Each is caught, and called by its name."""
    report = check(plant(kernel, old, new), BY_HAND[kernel], examples=6, dtypes=[torch.float32], only=[name])
    assert report.failures, "nothing was found"
    if mistake not in BLAMED_OTHERWISE:
        assert [says for says, _ in report.failures[0].mistakes][:1] == [mistake]


def test_how_many_are_planted():
    assert len(PLANTED) >= 60
    assert len({x[2:] for x in PLANTED}) == len(PLANTED)
    assert sum(x[1] in BLAMED_OTHERWISE for x in PLANTED) <= len(PLANTED) / 10


def test_the_page_says_how_many_mistakes_are_known_and_found():
    page = (Path(__file__).parents[2] / "docs/proof/prove_your_kernel.md").read_text()
    known = len({mistake.name for path in PATHS for mistake in mistakes.of_path(path)})
    assert re.findall(r"(\d+) (?:known )?mistakes\b", page.partition("## Your function")[0]) == [str(known)]
    assert f"The kit knows {known} mistakes by name." in page
    named = len(PLANTED) - sum(x[1] in BLAMED_OTHERWISE for x in PLANTED)
    counts = [(len(PLANTED), named), *((len(x), len(x)) for x in (PAST_A_SIZE, planted_backward.PLANTED))]
    rows = re.findall(r"\| (\d+) \| (\d+) \| (\d*)", page)
    assert rows == [(str(n), str(n), str(names)) for n, names in counts] + [
        (*[str(len(x))] * 2, "") for x in (UNNAMED, KINDS)
    ]


@pytest.mark.parametrize("name", BY_HAND)
@pytest.mark.usefixtures("quick")
def test_no_complaint(name):
    """Two right kernels of each path: one in all types, and our twin in float32, as the tests of paths have the others.

    They meet the same batches, which the reference need answer only once.
    """
    path, tried = BY_HAND[name], []
    of_sparse = {"select": ":select", "sparse_latents": ":latent_attention", "packed_latents": ":latent_attention"}
    function = of_sparse.get(path, "")
    twin = f"fastattn.{'sparse' if function else path}{function}"
    # a cascade with one prefix is asked alone: the twin is asked beside the one with several
    for target, examples in ((getattr(by_hand, name), 2), (twin, 1))[: 1 if name == "cascade" else 2]:
        in_types = dict(dtypes=[torch.float32]) if target == twin else {}
        report = check(target, path, examples=examples, **in_types)
        assert not report.failures, as_text(report)
        tried += [finding.examples for finding in report.findings]
    assert sum(tried) > (100 if PATHS[path].attends else 20)  # a thousand of all paths


def test_packed_rows_may_be_read_under_a_causal_mask():
    """By our twin, and by a kernel that reads the scale of a latent's first group for all."""
    report = check("fastattn.packed_mla", only=["mask", "answer", "tail"], examples=1, dtypes=[torch.float32])
    assert [finding.outcome for finding in report.findings] == ["honoured"] * 3, as_text(report)

    @claims(heads=((4, 1),), head_sizes=((264, 256),), block_sizes=(16,))
    def one_scale(query, cache, batch, latent_rank, softmax_scale):
        rows = cache.clone()
        rows[..., latent_rank + 4 : latent_rank + 8] = cache[..., latent_rank : latent_rank + 4]
        options = AttentionOptions(softmax_scale=softmax_scale)
        return mla.attention(query, rows, mla.plan(batch, block_size=16), options, latent_rank=latent_rank)

    report = check(one_scale, "packed_mla", only=["answer"], examples=4, dtypes=[torch.float32])
    assert report.failures[0].mistakes[0][0] == "first-scale-for-all"


def test_who_rounds_packed_latents_once_and_sums_in_float32_is_right():
    """Where a query sees one key, both roundings of the formula in 16 bits may cancel, and this one is left."""

    @claims(heads=((1, 1),), head_sizes=((264, 256),), block_sizes=(16,))
    def rounds_once(query, cache, batch, latent_rank, positions, softmax_scale, return_lse):
        rows = read_packed(cache, latent_rank, query.shape[2] - latent_rank, torch.float32).to(query.dtype)
        plan = sparse.plan(batch, positions=positions, block_size=16)
        options = AttentionOptions(softmax_scale=softmax_scale)
        return sparse.latent_attention(query, rows, plan, options, latent_rank=latent_rank, return_lse=return_lse)

    report = check(rounds_once, "packed_latents", only=["scale", "lse"], examples=10, dtypes=[torch.bfloat16])
    assert not report.failures, as_text(report)


def test_a_kernel_of_one_kind_of_layer_is_asked_for_that_kind_and_keeps_states_that_were_not_moved():
    asked = set()

    def prepare(query, key, value, log_decay, beta, before, cu_seqlens_q, scale):
        batch = make_batch(cu_seqlens_q.diff().tolist(), (cu_seqlens_q.diff() + 1).tolist())
        plan = recurrent.plan(batch, state_indices=torch.arange(len(before), dtype=torch.int32))
        asked.add(log_decay.ndim)
        options = RecurrentOptions(scale=scale)
        return lambda: (recurrent.attention(query, key, value, log_decay, beta, before, plan, options), before)

    kernel = over_gathered_states(prepare, layers=("kda",))
    report = check(kernel, "recurrent", only=["answer", "many sequences", "no tokens"], examples=2)
    assert [finding.outcome for finding in report.findings] == ["honoured"] * 3, as_text(report)
    assert asked == {3}, "a decay per channel"


def decode_over_states(query, key, value, log_decay, beta, states, state_indices, scale):
    """All sequences at once, as servers decode; padding has slot -1."""
    group, is_real = value.shape[1] // query.shape[1], state_indices >= 0
    query, key = (x.float().repeat_interleave(group, 1) for x in (query, key))
    slots = state_indices.clamp(min=0).long()
    after = states[slots] * log_decay.exp()[..., None, None]
    seen = torch.einsum("bhvk, bhk -> bhv", after, key)
    after += torch.einsum("bhv, bhk -> bhvk", beta[..., None] * (value.float() - seen), key)
    states[slots[is_real]] = after[is_real]
    out = torch.einsum("bhvk, bhk -> bhv", after, query * scale) * is_real[:, None, None]
    return out.to(value.dtype)


def test_a_decode_over_states_is_asked_for_one_token_of_each():
    """It need not know where sequences begin, and has no layers but those that it claims."""
    report = check(decode_over_states, "recurrent", examples=1)
    assert not report.failures, as_text(report)
    not_claimed = {finding.property for finding in report.findings if finding.outcome == "not claimed"}
    assert not_claimed == {
        *("padding", "beginnings", "no tokens", "entries unused", "drafts", "steps", "chunks"),
        *("decay per channel", "without delta", "autocast", "out"),
    }


@pytest.mark.usefixtures("quick")
def test_the_reference_of_a_path_passes_its_own_contract():
    report = check("refattn.chunked_prefill", examples=1, dtypes=[torch.float32])
    assert not report.failures, as_text(report)
    assert {finding.property for finding in report.findings if finding.outcome == "not claimed"} == {"graph"}


# --- what a failure says ---

WINDOW = ("paged", "j >= pos - window_size[0]", "j >= pos - window_size[0] - 1")


@pytest.mark.usefixtures("patience")
def test_a_failure_shrinks_and_is_drawn():
    kernel = plant(*WINDOW)
    report = check(kernel, "chunked_prefill", only=["window"], dtypes=[torch.float32])
    (finding,) = report.failures
    assert finding.example == repr(Example("chunked_prefill", lens=((1, 2),), options={"window_size": (0, 0)}))
    assert (finding.expected, finding.seen) == ((("01",),), (("11",),))
    text = as_text(report)
    assert "expected   seen\n    . 1        X 1" in text
    assert "probably window-one-too-many" in text
    page = as_html([report], field.about("cpu"))
    assert "window-one-too-many" in page and 'class="extra"' in page and "http" not in page
    assert "1 failed, 0 not claimed" in page and f"torch {torch.__version__}" in page and "Checked: 20" in page
    assert 'class="key missing"' in page and "prefers-color-scheme: dark" in page
    with pytest.raises(Broken, match="query row 0 should not see key 0"):
        reproduce(kernel, "window", checking.parse_example(finding.example))


@pytest.mark.parametrize("rows", [1, MOST_ROWS, MOST_ROWS + 1, 65545])
def test_a_long_mask_is_cut_in_both_kinds_of_report(rows):
    """A kernel with a wrong row among 65,545 got a page of 14.6 MB: all rows of both masks were drawn."""
    finding = checking.Finding(
        "window", "A window is a window.", "wrong", expected=(("01",) * rows,), seen=(("11",) * rows,)
    )
    report = checking.Report("mine", "chunked_prefill", "cpu", [finding])
    text, page = as_text(report), as_html([report])
    drawn, left_out = min(rows, MOST_ROWS), rows - MOST_ROWS
    assert text.count("    . 1        X 1") == drawn and page.count("<tr><td class=") == 2 * drawn
    assert (f"... {left_out} more rows" in text) == (f"{left_out:,} more rows are left out" in page) == (left_out > 0)
    assert page.count("more rows") == (left_out > 0) and len(page) < 10_000


def test_failures_of_one_mistake_share_a_heading():
    """A window that is one too wide breaks many properties; what no mistake explains is grouped by what went wrong."""
    wide, other = ("wide", "The window is too wide."), ("other", "Something else.")

    def failed(name, mistakes=(), detail="out: max error 3.0e-01, allowed 1.5e-06"):
        batch = f"Example({name!r})"
        return checking.Finding(
            name, f"{name} holds.", "wrong", detail, example=batch, dtype="float32", mistakes=mistakes
        )

    report = checking.Report("mine", "chunked_prefill", "cpu")
    report.findings = [
        checking.Finding("call", "It can be called.", "honoured"),
        failed("mask", (wide, other), "query row 0 should not see key 0"),
        failed("answer"),
        checking.Finding("alibi", "", "not claimed", "has no parameter alibi_slopes"),
        failed("window", (wide,)),
        failed("tail", (), "out: max error 9.9e+00, allowed nan"),
        failed("softcap", (other,)),
        checking.Finding("range", "", "refused", "no such scale"),
        checking.Finding("again", "", "not reached", "the time was over"),
        checking.Finding("nan", "A NaN shows.", "honoured"),
    ]
    brief, verbose = (as_text(report, is_verbose=is_verbose).splitlines() for is_verbose in (False, True))
    listed = [line for line in brief if line.startswith(("✓", "·", "–", "?"))]
    assert listed == [
        "✓ honoured: call, nan",
        "· not claimed: alibi",
        "– refused, no such scale: range",
        "? not reached, the time was over: again",
    ]
    first = brief.index("✗ probably wide: The window is too wide.")
    assert brief[first + 1 : first + 6] == [
        "  2 properties show it: mask, window",
        "  mask: mask holds.",
        "  query row 0 should not see key 0",
        "  smallest batch, float32: Example('mask')",
        "  or other: Something else.",
    ]
    headings = [line for line in brief if line.startswith("✗")]
    assert headings[1:] == ["✗ answer: answer holds.", "✗ softcap: softcap holds."]
    assert "  the same in 1 others: tail" in brief and "  probably other: Something else." in brief
    assert sum(line.startswith("✗ ") for line in verbose) == 10, "a line for each, and a section for each"
    assert [line for line in verbose if line.startswith("  smallest")] == [
        f"  smallest batch, float32: Example({name!r})" for name in ("mask", "answer", "window", "tail", "softcap")
    ]


def test_a_kernel_may_be_a_file(tmp_path, monkeypatch):
    file = tmp_path / "in_a_file.py"
    file.write_text("from helper_of_it import attention as mine\n")
    (tmp_path / "helper_of_it.py").write_text("def attention(query, key_cache, value_cache, batch): ...\n")
    monkeypatch.setattr("sys.path", sys.path[:])
    monkeypatch.chdir(tmp_path)
    for target in (f"{file}:mine", "./in_a_file.py:mine"):
        assert find(target, "chunked_prefill").function is sys.modules["in_a_file"].mine
    with pytest.raises(BadKernelError, match="in_a_file.py has no yours"):
        find("in_a_file.py:yours", "chunked_prefill")
    with pytest.raises(BadKernelError, match="nowhere.py cannot be imported: there is no such file"):
        find("nowhere.py:mine", "chunked_prefill")
    (tmp_path / "json.py").write_text("")
    with pytest.raises(BadKernelError, match="another module json already"):
        find("json.py:mine", "chunked_prefill")


def test_a_tree_that_is_ignored_is_named():
    def flat(query, key_cache, value_cache, batch):
        return by_hand.paged(query, key_cache, value_cache, batch.cu_seqlens_q, batch.seq_lens, batch.block_table, 0, 0)

    report = check(flat, "speculative", only=["mask"], dtypes=[torch.float32])
    assert report.failures[0].mistakes[0][0] == "tree-ignored"


def test_an_exception_is_a_failure_with_its_message():
    def raises(query, key_cache, value_cache, batch):
        raise IndexError("out of range")

    report = check(raises, "chunked_prefill", only=["answer"], examples=1, dtypes=[torch.float32])
    assert report.failures[0].detail == "raised IndexError: out of range"
    assert report.failures[0].outcome == "raises"


def test_a_kernel_that_answers_zeros_is_found():
    def zeros(query, key_cache, value_cache, batch):
        return torch.zeros_like(query)

    report = check(zeros, "chunked_prefill", only=["mask", "answer"], examples=1, dtypes=[torch.float32])
    assert [finding.outcome for finding in report.findings] == ["wrong", "wrong"]


def test_a_kernel_that_writes_its_inputs_is_found():
    def scales_in_place(query, key, value, cu_seqlens_q, cu_seqlens_k, softmax_scale=None):
        return by_hand.varlen(query.mul_(query.shape[-1] ** -0.5), key, value, cu_seqlens_q, cu_seqlens_k, 1.0)

    report = check(scales_in_place, "varlen", only=["writes"], examples=1, dtypes=[torch.float32])
    assert report.failures[0].detail.startswith("query: changed at [0, 0, 0]")


def test_a_kernel_that_remembers_is_found():
    sums = []

    def remembers(outs, lses):
        sums.append(len(outs[0]))
        out, lse = by_hand.merge(outs, lses)
        return (out + 1 if len(sums) % 3 == 0 else out), lse

    report = check(remembers, "merge", only=["again"], examples=1, dtypes=[torch.float32])
    assert report.failures[0].detail.startswith("in the second call, out: max error")


def test_offsets_of_32_bits_are_found():
    def overflows(query, key_cache, value_cache, cu_seqlens_q, seq_lens, block_table):
        far = (block_table.long() * key_cache.stride(0)) >= 2**31
        return by_hand.paged(
            query, key_cache, value_cache, cu_seqlens_q, seq_lens, block_table.masked_fill(far, 0), 0, 0
        )

    report = check(overflows, "chunked_prefill", only=["answer", "offsets"], examples=6, dtypes=[torch.float16])
    assert [finding.outcome for finding in report.findings] == ["honoured", "wrong"]


# --- a log-sum-exp that is wrong ---

BASE_TWO = "torch.log(total) + whole).T", "(torch.log(total) + whole) * LOG2E).T"


def failed(report):
    return [finding.property for finding in report.failures]


@pytest.mark.usefixtures("quick")
def test_a_wrong_lse_is_one_finding():
    report = check(plant("paged", *BASE_TWO, **TILES), "chunked_prefill", examples=2, dtypes=[torch.float32])
    assert failed(report) == ["lse"]
    without = {finding.property for finding in report.findings if finding.without_lse}
    assert without == {x.name for x in properties.of_path("chunked_prefill") if x.compares_lse} - {
        *("lse", "batch invariance", "invariant tokens", "graph"),  # the others are not asked
        *("root of the distance", "autocast"),
    }
    assert "Tensors may be views: other layouts, gaps between rows and pages. Checked without the LSE." in as_text(
        report, is_verbose=True
    )
    report.kernel = "fa2-pages"
    assert "The LSE of `fa2-pages` is wrong, or not claimed. Checked without it: far windows, empty rows," in tables(
        json.loads(json.dumps(results([report], {}, "cpu")))
    )


@pytest.mark.usefixtures("quick")
def test_a_wrong_lse_hides_no_wrong_output():
    """The window is too long, and what it should hide is seen."""
    kernel = plant("paged", (BASE_TWO[0], WINDOW[1]), (BASE_TWO[1], WINDOW[2]), **TILES)
    report = check(kernel, "chunked_prefill", examples=2, dtypes=[torch.float32])
    windows = ["far windows", "many queries", "outside the window"]
    assert failed(report) == ["window", "lse", *windows, "options at shapes", "options past tiles"]
    assert report.failures[4].mistakes[0][0] == "window-one-too-many"  # among all that let NaN in, the one found before
    assert not any(finding.detail.startswith("lse") for finding in report.failures if finding.property != "lse")


@pytest.mark.usefixtures("quick")
def test_a_mistake_that_small_batches_show_is_named_in_long_ones():
    """Where others are not looked for, as there are too many."""
    kernel = plant(*WINDOW[:2], "j > pos - window_size[0]", TILE=2048, SPLIT=2**20)
    asked = dict(only=["window", "options past tiles"], examples=1, dtypes=[torch.float32])
    report = check(kernel, "chunked_prefill", **asked)
    assert [finding.mistakes[0][0] for finding in report.failures] == ["window-one-too-few"] * 2


def test_a_wrong_lse_is_looked_at_where_it_is_not_asked_for():
    """So it is in a test per property, and after a crash, in the next process."""
    report = check(plant("paged", *BASE_TWO), "chunked_prefill", examples=2, dtypes=[torch.float32], only=["tail"])
    assert [(finding.outcome, finding.without_lse) for finding in report.findings] == [("honoured", True)]
    alone = check(by_hand.paged, "chunked_prefill", examples=2, dtypes=[torch.float32], only=["tail"])
    assert [(finding.outcome, finding.without_lse) for finding in alone.findings] == [("honoured", False)]


def test_a_merge_with_a_wrong_lse():
    def doubles(outs, lses):
        out, lse = by_hand.merge(outs, lses)
        return out, 2 * lse

    assert failed(check(doubles, "merge", examples=2, dtypes=[torch.float32])) == ["lse"]


def test_an_lse_that_is_not_claimed_is_not_compared():
    @claims(not_claimed={"lse": "is to the base 2"})
    def in_base_two(outs, lses):
        out, lse = by_hand.merge(outs, lses)
        return out, lse / 0.6931471805599453

    assert not check(in_base_two, "merge", examples=2, dtypes=[torch.float32]).failures


def test_the_lse_is_asked_before_what_compares_it():
    for path in PATHS:
        names = [x.name for x in properties.of_path(path) if x.compares_lse]
        assert "lse" not in names[1:]


def test_two_properties_ask_all_shapes_and_the_others_two():
    def refuses(query, key_cache, value_cache, batch):
        raise NotImplementedError("nothing on this card")

    asked = {"mask": set(), "tail": set()}

    def note(name, example):
        asked[name].add((example.heads, example.head_size, example.block_size))

    check(refuses, "chunked_prefill", examples=60, dtypes=[torch.float32], only=list(asked), on_example=note)
    assert asked["tail"] == {((1, 1), 64, 16), ((4, 2), 128, 64)}
    assert len(asked["mask"]) > 10


# --- what is asked of a kernel ---


@pytest.mark.usefixtures("quick")
def test_what_a_kernel_does_not_claim_is_listed():
    @claims(dtypes=(torch.float32,), block_sizes=(16,), not_claimed={"nan": "its documentation says so"})
    def small(query, key_cache, value_cache, batch):
        return by_hand.paged(query, key_cache, value_cache, batch.cu_seqlens_q, batch.seq_lens, batch.block_table, 0, 0)

    report = check(small, "chunked_prefill", examples=1)
    assert not report.failures, as_text(report)
    reasons = {finding.property: finding.detail for finding in report.findings if finding.outcome == "not claimed"}
    assert reasons["softcap"] == "has no parameter softcap"
    assert reasons["lse"] == "returns no log-sum-exp"
    assert reasons["nan"] == "its documentation says so"


def test_what_a_kernel_refuses_is_no_failure():
    def refuses(query, key_cache, value_cache, batch, softcap=0.0):
        if softcap:
            raise NotImplementedError("no softcap on this card")
        return by_hand.paged(query, key_cache, value_cache, batch.cu_seqlens_q, batch.seq_lens, batch.block_table, 0, 0)

    report = check(refuses, "chunked_prefill", only=["softcap"], examples=2, dtypes=[torch.float32])
    assert [(x.outcome, x.detail) for x in report.findings] == [("refused", "no softcap on this card")]


def raising(message, **limits):
    @claims(**limits)
    def kernel(query, key_cache, value_cache, batch):
        raise RuntimeError(f"{message}\nand where")

    return lambda: check(kernel, "chunked_prefill", only=["answer"], examples=2, dtypes=[torch.float32]).findings[0]


def test_a_refusal_may_be_known_by_its_words():
    finding = raising("q must be 16 bytes wide", refusals=("must be 16 bytes",))()
    assert (finding.outcome, finding.detail) == ("refused", "q must be 16 bytes wide")
    finding = raising("q must be 8 bytes wide", refusals=("must be 16 bytes",))()
    assert (finding.outcome, finding.detail) == ("raises", "raised RuntimeError: q must be 8 bytes wide")


def test_an_error_ends_the_process_only_if_the_device_does_not_answer_any_more(monkeypatch):
    look = raising("CUDA error: invalid argument")
    assert look().outcome == "raises"
    monkeypatch.setattr(hold, "_answers_still", lambda arguments: False)
    with pytest.raises(CrashedError, match="RuntimeError: CUDA error: invalid argument"):
        look()


@pytest.mark.parametrize(
    ("target", "path", "message"),
    [
        ("no_such_module:f", "merge", "no_such_module cannot be imported"),
        ("refattn.merge:f", "merge", "refattn.merge has no f"),
        ("refattn.merge:merge", "fusion", "path: expected one of varlen"),
        ("refattn.merge:merge", None, "say which path"),
        ("refattn.masks", None, "say which path"),
        (lambda query, key, value, seqlens_q: query, "varlen", "did you mean cu_seqlens_q"),
        (lambda *args, **options: args[0], "varlen", r"names no parameters, but takes \*args, \*\*options"),
        (torch.softmax, "merge", "names no parameters"),
        (torch.softmax, "add_sinks", "names no parameters"),
    ],
    ids=["module", "function", "path", "no-path", "module-of-no-path", "parameter", "starred", "builtin", "operation"],
)
def test_what_cannot_be_called_is_named(target, path, message):
    with pytest.raises(BadKernelError, match=message):
        kernel_of(target, path)


FLASH = """
def attention(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, sm_scale=None, dropout_p=0.0):
    return refattn.varlen.attention(q, k, v, plan(cu_seqlens_q, cu_seqlens_k), AttentionOptions(sm_scale))

def decode(q, /, k_cache, v_cache, *, cache_seqlens, page_table, causal=True):
    pass

def unknown(q, k, v, cu_seqlens_q, cu_seqlens_k, workspace):
    pass

def plan(*offsets):
    return refattn.varlen.plan(make_batch(*(x.diff().tolist() for x in offsets)))
"""
OURS = "from refattn.metadata import make_batch\nfrom refattn.options import AttentionOptions\nimport refattn.varlen\n"


def test_a_kernel_with_the_names_of_other_libraries_is_told_how_to_be_called(tmp_path, monkeypatch):
    """By a function that can be pasted below it, if each required parameter has a counterpart."""
    monkeypatch.chdir(tmp_path)
    file = Path("flash_names.py")
    file.write_text(OURS + FLASH)
    with pytest.raises(BadKernelError, match="has a parameter 'max_seqlen_k' .*; did you mean max_seq_len") as refused:
        kernel_of("flash_names.py:attention", "varlen")
    Path("called.py").write_text(OURS + FLASH + str(refused.value).partition("\n\n")[2])
    (finding,) = check("called.py:attention_by_name", "varlen", only=["scale"], examples=2).findings
    assert finding.outcome == "honoured"
    with pytest.raises(BadKernelError) as refused:
        kernel_of("flash_names.py:decode", "chunked_prefill")
    assert str(refused.value).endswith(
        "def decode_by_name(query, key_cache, value_cache, seq_lens, block_table, causal=True):\n    return decode("
        "query, k_cache=key_cache, v_cache=value_cache, cache_seqlens=seq_lens, page_table=block_table, causal=causal)"
    )
    with pytest.raises(BadKernelError, match="A function of a few lines with these names"):
        kernel_of("flash_names.py:unknown", "varlen")


class Merge(torch.nn.Module):
    def forward(self, outs: list[torch.Tensor], lses: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        return refattn.merge.merge(outs, lses)


@torch.library.custom_op("twinattn_tests::merge", mutates_args=())
def merge_op(outs: list[torch.Tensor], lses: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    return refattn.merge.merge(outs, lses)


@torch.jit.script
def scripted_merge(outs: list[torch.Tensor], lses: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    logs = torch.stack(lses)
    weights = torch.softmax(logs, 0)
    weights = torch.where(weights.isnan(), torch.zeros_like(weights), weights).to(outs[0].dtype)
    return (torch.stack(outs) * weights[..., None]).sum(0), torch.logsumexp(logs, 0)


@pytest.mark.parametrize(
    "callable",
    [
        Merge(),
        torch.compile(Merge(), backend="eager"),
        merge_op,
        torch.ops.twinattn_tests.merge,
        torch.ops.twinattn_tests.merge.default,
        scripted_merge,
    ],
    ids=["module", "compiled-module", "op", "packet", "overload", "script"],
)
def test_what_names_its_parameters_elsewhere_is_a_kernel(callable):
    kernel = Kernel("merge", "merge", callable)
    assert [*kernel.parameters] == ["outs", "lses"]
    assert not check(kernel, only=["call"], examples=2, dtypes=[torch.float32]).failures


@pytest.mark.parametrize("sees_later", [True, False])
def test_a_kernel_of_encoders_is_asked_without_a_causal_mask(sees_later):
    @claims(causal=False, heads=((2, 1),), head_sizes=((64, 64),))
    def encoder(query, key, value, cu_seqlens_q, cu_seqlens_k, causal):
        if causal:
            raise NotImplementedError("an encoder has no causal mask")
        batch = make_batch(*(x.diff().tolist() for x in (cu_seqlens_q, cu_seqlens_k)))
        return plan_and_attend(refattn.varlen, query, key, value, batch, causal=not sees_later)

    report = check(encoder, "varlen", only=["call", "answer", "scale"], examples=4, dtypes=[torch.float32])
    assert bool(report.failures) != sees_later
    assert not any(finding.refused for finding in report.findings)


def test_our_twins_alone_are_asked_for_the_conventions():
    """A stranger's module with the functions of a path has not promised them."""
    theirs = ModuleType("chunked_prefill")
    theirs.plan = lambda batch, *, block_size: fastattn.chunked_prefill.plan(batch, block_size=block_size)

    def attention(query, key_cache, value_cache, plan, options):
        return fastattn.chunked_prefill.attention(query, key_cache, value_cache, plan, options)

    theirs.attention = attention
    assert not find(theirs).claims.conventions
    assert find("fastattn.chunked_prefill").claims.conventions
    assert find("fastattn.merge:merge", "merge").claims.conventions


def test_every_path_has_properties_and_every_property_a_path():
    for path in PATHS:
        assert len(properties.of_path(path)) >= 6
    assert all(set(x.paths) <= set(PATHS) for x in PROPERTIES)


def test_an_example_is_code():
    example = Example("local", ((1, 5), (3, 3)), (4, 2), options={"chunk_size": 16})
    assert checking.parse_example(repr(example)) == example
    garbage = Example("merge", options={"parts": 2, "garbage": float("nan")})
    assert repr(checking.parse_example(repr(garbage))) == repr(garbage)
    with pytest.raises(ValueError, match="example: expected Example"):
        checking.parse_example("print('no')")


# --- kernels in processes of their own ---

STRANGER = """
import os, time
from refattn import merge as right

def dies(outs, lses):
    if len(outs) > 2:
        os.abort()
    return right.merge(outs, lses)

def hangs(outs, lses):
    if len(outs) > 2:
        time.sleep(600)
    return right.merge(outs, lses)
"""


@pytest.fixture
def stranger(tmp_path, monkeypatch):
    (tmp_path / "stranger.py").write_text(STRANGER)
    root = Path(command.__file__).parents[2]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), str(root)]))
    return tmp_path


@pytest.mark.parametrize(
    ("function", "outcome", "detail"), [("dies", "crashed", "SIGABRT"), ("hangs", "hung", "no answer in")]
)
def test_a_kernel_that_takes_its_process_with_it(stranger, function, outcome, detail):
    asked = dict(examples=8, dtypes=["float32"], only=["answer"], patience=2.5)  # after its first line; 60 before it
    report = check_apart(f"stranger:{function}", "merge", **asked)
    (finding,) = report.failures
    assert finding.outcome == outcome and detail in finding.detail
    assert checking.parse_example(finding.example).options["parts"] > 2


def test_a_kernel_that_is_checked_when_the_time_is_over_does_not_hang(stranger):
    task = dict(target="stranger:hangs", path="merge", device="cpu", dtypes=["float32"], examples=8, only=["answer"])
    ended = isolate.watch(task | dict(seconds=1.0), stranger / "log", 60.0, 1.0)
    assert ended == ("not reached", "the time was over while it was checked")


def test_time_in_which_others_run_is_not_counted(monkeypatch, tmp_path):
    """A process that is ready to run has had the time that it was on a processor; one that waits, all of it."""
    now, stat = [100.0], tmp_path / "stat"
    ticks = os.sysconf("SC_CLK_TCK")

    def process(state, seconds):
        stat.write_text(f"1 (a) b) {state} {'0 ' * 10}{int(seconds * ticks)} 0 0")

    monkeypatch.setattr(isolate.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(isolate, "Path", lambda _: stat)
    process("R", 5)
    clock = isolate._Clock(1)
    now[0] += 30
    process("R", 7)
    assert clock.tick() == pytest.approx(2)
    now[0] += 30
    process("S", 7)
    assert clock.tick() == 30
    stat.unlink()
    now[0] += 4
    assert clock.tick() == 4


@pytest.mark.parametrize(("target", "path"), [("refattn.kv_cache", "copy_blocks"), ("refattn.local", "local")])
def test_what_there_is_no_memory_for_is_no_fault_of_a_kernel(monkeypatch, target, path):
    def full(*args, **options):
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(kernels.mmap, "mmap", full)
    (finding,) = check(target, path, only=["offsets"], examples=1, dtypes=[torch.float32]).findings
    assert finding.outcome == "not claimed" and finding.detail.startswith("not drawn: this machine has no "), finding


def test_a_reference_that_has_no_memory_is_no_fault_of_a_kernel(monkeypatch):
    def full(*args):
        raise RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 byte")

    reference.forget_expected()
    monkeypatch.setattr(reference, "_expected", full)
    (finding,) = check("refattn.local", only=["answer"], examples=2, dtypes=[torch.float32]).findings
    assert finding.outcome == "not claimed" and finding.detail.startswith("not drawn: this machine has no "), finding


@pytest.mark.parametrize("path", ["varlen", "chunked_prefill", "sliding_window"])
def test_many_keys_are_computed_one_kv_head_at_a_time(monkeypatch, path):
    """So that a group of 4 over 2**18 keys takes 2 GB and not 16; the outputs are the same."""
    options = {"sinks": True, "alibi_slopes": True} | ({"window_size": (9, 0)} if path == "sliding_window" else {})
    example = Example(path, lens=((3, 70), (1, 9)), heads=(6, 2), options=options)
    arguments = example.tensors(torch.float32, "cpu")
    reference.forget_expected()
    whole = reference.expected(example, arguments)
    reference.forget_expected()
    monkeypatch.setattr(reference, "MOST_AT_ONCE", 0)
    calls, compute = [], reference._expected
    monkeypatch.setattr(reference, "_expected", lambda *args: calls.append(1) or compute(*args))
    parts = reference.expected(example, arguments)
    reference.forget_expected()
    assert len(calls) == 2
    for one, other in zip(whole, parts, strict=True):
        for name in ("out", "lse"):
            torch.testing.assert_close(one[name], other[name])


_ASKED = ("refattn.merge", "--examples=2", "--property=answer", "--dtype=float32")


def test_the_command(stranger, capsys):
    written = [f"--json={stranger / 'a.json'}", f"--html={stranger / 'a.html'}"]
    assert command.main([*_ASKED, *written]) == 0
    assert "✓ honoured: answer\n" in capsys.readouterr().out
    assert command.main([*_ASKED, "-v"]) == 0
    printed = capsys.readouterr().out
    assert "✓ answer  The output is that of the formula" in printed and "-v shows" not in printed
    assert json.loads((stranger / "a.json").read_text())["findings"][0]["outcome"] == "honoured"
    assert (stranger / "a.html").read_text().startswith("<!doctype html>")


def test_the_command_says_what_cannot_be_called(stranger, capsys):
    assert command.main(["stranger:missing", "--path=merge"]) == 2
    assert "stranger has no missing" in capsys.readouterr().err


@pytest.mark.parametrize("device", ["mps", "meta", "cuda:99", "no device"])
def test_a_device_that_is_not_here_is_named(device, capsys):
    if device == "mps" and torch.backends.mps.is_available():
        pytest.skip("it is")
    for asked in (["refattn.merge"], ["--list"], ["--all-installed"]):
        assert command.main([*asked, f"--device={device}"]) == 2
        said = capsys.readouterr().err
        assert said.startswith("device: expected one that computes here (cpu") and f"got '{device}': " in said
        assert said.count("\n") == 1 and len(said) < 400
    with pytest.raises(BadKernelError, match="device: expected one that computes here"):
        check("refattn.merge", device=device)


@pytest.mark.parametrize("path", PATHS)
def test_arguments_are_made_for_any_device(path):
    """None of them stays behind, or has a type that only some devices have: MPS has no float64."""
    options = dict(shared=1) if path == "cascade" else {}
    heads = (2, 2) if path == "differential" else (4, 2)
    sizes = (136, 128) if path in PACKED else (64, 0)
    made = Example(path, ((1, 20), (3, 30)), heads, *sizes, options=options).tensors(torch.float32, "meta")
    tensors = list(tensors_of(made))
    assert {x.device.type for x in tensors} == {"meta"} and torch.float64 not in {x.dtype for x in tensors}


def tensors_of(x):
    """Yield the tensors in what a call gets."""
    if isinstance(x, torch.Tensor):
        yield x
    elif dataclasses.is_dataclass(x):
        yield from tensors_of([getattr(x, field.name) for field in dataclasses.fields(x)])
    elif isinstance(x, dict | list | tuple):
        for y in x.values() if isinstance(x, dict) else x:
            yield from tensors_of(y)


def test_a_call_is_waited_for_on_its_device(monkeypatch):
    waited = []
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cpu"))
    monkeypatch.setattr(torch.accelerator, "synchronize", waited.append)
    for path in ("merge", "varlen_backward"):  # lists of tensors; a call that is differentiated
        example = Example(path, ((2, 2),), (1, 1), options=dict(parts=2) if path == "merge" else {})
        find(f"refattn.{path.removesuffix('_backward')}", path)(example, example.tensors(torch.float32))
    assert waited == [torch.device("cpu")] * 2


def test_the_command_lists_adapters(capsys):
    assert command.main(["--list"]) == 0
    out = capsys.readouterr().out
    assert "sdpa" in out and "flashinfer is not installed" in out


# --- adapters ---


WITH_DOUBLES = [
    *("fa2", "fa2-pages", "fa2-decode", "fa3", "fa3-pages", "fa3-latents", "fa4", "fa4-pages"),
    *("flashinfer", "flashinfer-decode", "flashinfer-latents", "flashinfer-merge", "flash_mla"),
    "flash_mla-packed",
    *("fla-gdn", "fla-gdn-recurrent", "fla-kda", "fla-kda-recurrent", "fla-mamba2", "fla-mamba2-recurrent"),
    *("attn-gym-gdn", "attn-gym-gdn-recurrent", "attn-gym-kda", "attn-gym-kda-recurrent"),
    *("flash-qla", "flashinfer-gdn"),
    *("attn-gym-gather", "attn-gym-gather-prompts", "flash_mla-compressed"),
]


@pytest.mark.parametrize("name", WITH_DOUBLES)
def test_adapters_call_their_packages_rightly(name, monkeypatch):
    """With stand-ins of the packages' signatures, which compute rightly."""
    install(monkeypatch)
    kernel = ADAPTERS[name].kernel()
    with fa3_library():
        report = check(kernel, only=_asked(kernel), examples=1, dtypes=[torch.bfloat16])
    assert not report.failures, as_text(report)


def _asked(kernel):
    names = ("mask", "answer", "lse", "window", "padding slot", "read scale")
    names += ("output", "one softmax", "selected", "first entry")
    return [x.name for x in properties.of_path(kernel.path) if x.name in names]


@pytest.mark.parametrize("name", [x for x in ADAPTERS if x.startswith("fastattn.") and ADAPTERS[x].path in OPERATIONS])
def test_adapters_of_operations_lead_to_our_twins(name):
    """By a name that a report has, from which `reproduce` finds the same function again."""
    report = check(name, only=["output"], examples=1, dtypes=[torch.bfloat16])
    assert report.kernel == name and report.path == name.partition(":")[2]
    assert not report.failures and any(x.outcome == "honoured" for x in report.findings), as_text(report)


def test_sdpa():
    report = check("sdpa", only=["mask", "answer", "range", "strides"], examples=2, dtypes=[torch.float32])
    assert not report.failures, as_text(report)


def test_flex(monkeypatch):
    """Not compiled here, which takes longer than the rest of this file."""
    from torch.nn.attention import flex_attention

    monkeypatch.setattr("twinattn.libraries.pytorch.flex", lambda **_: flex_attention.flex_attention)
    report = check("flex-lse", only=["mask", "answer", "window", "lse"], examples=1, dtypes=[torch.float32])
    assert [finding.outcome for finding in report.findings] == ["honoured"] * 4, as_text(report)


def test_the_tables_of_the_field():
    report = check(by_hand.merge, "merge", examples=1, dtypes=[torch.float32])
    report.kernel = "fastattn.merge"
    broken = check(lambda outs, lses: (outs[0], lses[0]), "merge", only=["answer"], examples=1)
    broken.kernel = "sglang-merge"
    found = json.loads(json.dumps(results([report, broken], {"fa2": "is not installed"}, "cpu")))
    assert "| answer | ✓ | ✗ |" in tables(found)
    assert "`sglang-merge`, answer" in list_failures(found)


def test_kernels_that_are_not_checked_now_keep_their_results():
    report = check(by_hand.merge, "merge", only=["answer"], examples=1, dtypes=[torch.float32])

    def run(name, earlier=None):
        report.kernel = name
        return json.loads(json.dumps(results([report], {}, "cpu", earlier)))

    first = run("sglang-merge") | {"date": "2020-01-02T03:04:05+00:00"}
    both = run("fastattn.merge", first)
    assert [report["kernel"] for report in both["reports"]] == ["fastattn.merge", "sglang-merge"]
    (line,) = [line for line in tables(both).splitlines() if line.startswith("- 2020-01-02, 03:04 UTC; python ")]
    assert line.endswith(": `sglang-merge`.")
    again = run("sglang-merge", both)
    assert [report.get("date") for report in again["reports"]] == [both["date"], None]
    with pytest.raises(ValueError, match=r"earlier: expected results of .*, got those of a laptop"):
        run("fastattn.merge", first | {"machine": "a laptop"})


@pytest.mark.usefixtures("patience")
def test_a_search_has_an_end():
    """The time that shrinking may take is bounded."""
    began = time.monotonic()
    check(plant(*WINDOW), "chunked_prefill", only=["outside the window"], dtypes=[torch.float32])
    assert time.monotonic() - began < 6 * checking.SHRINKING
