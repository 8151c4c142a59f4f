"""What the kit asks of a kernel beyond numbers of about 1 and short sequences, and what its reports say."""

import json
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch

from refattn import mla, replay
from tests.helpers import by_hand
from tests.helpers.planted import plant
from tests.helpers.planted_kinds import KINDS
from twinattn.kit import Example, claims, corners, landmarks, properties
from twinattn.kit import __main__ as command
from twinattn.kit import check as checking
from twinattn.kit.check import check
from twinattn.kit.conventions import NOT_ASKED, STATED
from twinattn.kit.drawn import Drawn
from twinattn.kit.example import PATHS
from twinattn.kit.isolate import check_apart
from twinattn.kit.kernel import Kernel
from twinattn.kit.report import as_html, as_junit, as_text

pytestmark = [
    pytest.mark.usefixtures("shapes_unchecked"),
    pytest.mark.filterwarnings("ignore:.*random:hypothesis.errors.HypothesisDeprecationWarning"),
]
FLOAT32 = dict(dtypes=[torch.float32])
PATH_OF = {"paged": "chunked_prefill", "write": "kv_cache", "cascade_of_prefixes": "cascade"}


@pytest.fixture(autouse=True)
def no_shrinking(monkeypatch):
    for name, number in dict(SHRINKING=0.0, EVIDENCE=1, REPEATS=1).items():
        monkeypatch.setattr(checking, name, number)
    for name in ("PAST_16_BITS", "PAST_A_MODEL"):  # what takes as long as all the rest
        monkeypatch.setattr(landmarks, name, 2**12 + 77)
    monkeypatch.setattr(checking, "probable", lambda *args: [])  # what is known is asked elsewhere


@pytest.mark.parametrize("name", KINDS)
def test_a_mistake_is_found(name):
    kernel, prop, dtype, old, new = KINDS[name]
    tiles = dict(TILE=512, SPLIT=1024) if kernel in ("paged", "local", "quantized") else {}
    planted = plant(kernel, old, new, **tiles)
    examples = 6 if prop == "answer" else 20 if prop.startswith(("options", "other", "window")) else 3
    found = check(planted, PATH_OF.get(kernel, kernel), examples=examples, only=[prop], dtypes=[getattr(torch, dtype)])
    assert found.failures, found.findings


# --- the conventions ---


def test_each_convention_names_its_properties():
    """A sentence of that page that no property draws is one that a wrong kernel passes."""
    page = (Path(__file__).parents[2] / "docs/proof/conventions.md").read_text()
    rows = re.findall(r"^\| (.+?) \| .+ \|$", page, re.MULTILINE)
    asked = [row for row in rows if row not in ("question",) and not row.startswith("---")]
    assert sorted(asked) == sorted({**STATED, **NOT_ASKED})
    known = {(path, x.name) for path in PATHS for x in properties.of_path(path)}
    named = {(path, name) for properties in STATED.values() for path, names in properties.items() for name in names}
    assert named <= known, sorted(named - known)


# --- what is no mistake ---


def neutral(default):
    """Return a kernel with another default of `causal`."""

    def kernel(query, key, value, cu_seqlens_q, cu_seqlens_k, causal=default):
        return by_hand.varlen(query, key, value, cu_seqlens_q, cu_seqlens_k, causal=causal)

    return kernel


def test_an_option_that_is_not_asked_for_is_said():
    """Defaults differ: that of `causal` is False in some libraries, and True in others."""
    for default in (True, False):
        report = check(neutral(default), "varlen", examples=2, only=["mask", "answer"], **FLOAT32)
        assert not report.failures, as_text(report)


def test_a_log_sum_exp_near_zero_is_held_to_the_size_of_its_scores():
    """Two scores of about -0.8 and -0.6 have one of 0.007: half a rounding of a score is more than 16 of it."""

    def by_another_sum(query, cache, cu_seqlens_q, seq_lens, block_table, latent_rank, softmax_scale):
        turned = torch.arange(query.shape[-1]).flip(0)  # another order of the same products
        keys, values = cache[..., turned, None].mT, cache[..., :latent_rank].unsqueeze(2)
        batch = (cu_seqlens_q, seq_lens, block_table, 0, 0)
        return by_hand.paged(query[..., turned], keys, values, *batch, softmax_scale=softmax_scale, return_lse=True)

    kernel = Kernel("mine", "mla", by_another_sum)
    for seed in range(12):
        example = Example("mla", ((1, 2),), (1, 1), 96, 64, seed=seed)
        properties.lse(kernel, example, torch.float32, "cpu")


def test_a_log_sum_exp_of_float64_is_judged_as_the_rounded_numbers_that_it_is_of():
    def in_float64(query, key, value, cu_seqlens_q, cu_seqlens_k):
        out, lse = by_hand.varlen(query, key, value, cu_seqlens_q, cu_seqlens_k, return_lse=True)
        return out, lse.double()

    report = check(in_float64, "varlen", examples=2, only=["lse", "many keys", "edges"], **FLOAT32)
    assert not report.failures, as_text(report)


def test_tokens_of_a_tile_may_share_a_nan():
    def by_one_product(query, key, value, log_decay, beta, states, state_indices, scale, cu_seqlens_q):
        out = by_hand.recurrent(
            *(query, key, value, log_decay, beta, states, cu_seqlens_q, state_indices),
            torch.ones(len(state_indices), dtype=torch.bool),
            scale,
        )
        for first, last in cu_seqlens_q.unfold(0, 2, 1).tolist():
            for begin in range(first, last, 64):  # 0 * NaN
                out[begin : min(begin + 64, last)] += 0.0 * value[begin : min(begin + 64, last)].sum(0)
        return out

    assert not check(by_one_product, "recurrent", examples=2, only=["nan before"], **FLOAT32).failures


# --- how a check ends ---

STRANGER = """
import os, sys
from refattn import merge as right

def leaves(outs, lses):
    if len(outs) > 2:
        os._exit(0)
    return right.merge(outs, lses)

def exits(outs, lses):
    if len(outs) > 2:
        sys.exit(0)
    return right.merge(outs, lses)

def hardly(outs, lses):
    if len(outs) < 5:
        raise NotImplementedError("many parts alone")
    return right.merge(outs, lses)
"""


@pytest.fixture
def stranger(tmp_path, monkeypatch):
    (tmp_path / "stranger.py").write_text(STRANGER)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{Path(command.__file__).parents[2]}")
    return tmp_path


def test_a_process_that_ends_with_status_0_has_crashed(stranger):
    report = check_apart("stranger:leaves", "merge", examples=6, dtypes=["float32"], only=["answer"])
    (finding,) = report.failures
    assert finding.outcome == "crashed" and "status 0 in the middle of a call" in finding.detail
    assert "reproduce('stranger:leaves', 'answer', Example('merge'" in finding.code


def test_an_exit_is_an_exception():
    def exits(outs, lses):
        raise SystemExit(0)

    (finding,) = check(exits, "merge", examples=1, only=["answer"], **FLOAT32).failures
    assert finding.detail == "raised SystemExit: 0"


def test_what_is_refused_is_said_and_strict_fails(stranger, capsys, monkeypatch):
    monkeypatch.setattr(command, "check_apart", in_this_process)
    asked = ["stranger:hardly", "--path=merge", "--examples=8", "--property=answer", "--dtype=float32"]
    written = [f"--json={stranger / 'a.json'}", f"--junit={stranger / 'a.xml'}", "--repeat=2", "--heads=6/6"]
    assert command.main([*asked, *written]) == 0
    assert re.search(r"\nrefused \d+ of \d+ batches\n✓ honoured: answer\n", capsys.readouterr().out)
    assert command.main([*asked, *written, "-v"]) == 0
    said = capsys.readouterr().out
    assert re.search(r"✓ answer .* Refused \d+ of \d+ batches\.", said)
    assert re.search(r"refused \d+ of \d+ batches", said)
    assert "drawn: float32; heads 6/6; head sizes 64" in said
    report = json.loads((stranger / "a.json").read_text())
    assert report["asked"] == {"examples": 8, "repeat": 2, "seed": checking.SEED}
    assert report["about"]["torch"] == torch.__version__ and {"twinattn", "python", "device"} < set(report["about"])
    assert report["claims"]["heads"] == [[6, 6]] and report["claims"]["takes"] == ["outs", "lses"]
    assert report["drawn"]["heads"] == [[6, 6]] and report["drawn"]["batches"] > 8
    assert ElementTree.parse(stranger / "a.xml").getroot().get("failures") == "0"
    assert command.main([*asked, "--strict", written[1]]) == 1
    assert "strict: refused, or refused on most batches: answer" in capsys.readouterr().out
    assert ElementTree.parse(stranger / "a.xml").getroot().get("failures") == "1"


def in_this_process(target, path, *, dtypes, patience, tell, **options):
    """Check where it is seen what is asked."""
    return check(target, path, dtypes=[getattr(torch, name) for name in dtypes], **options)


def test_what_is_not_reached_is_no_success(monkeypatch, capsys):
    monkeypatch.setattr(command, "check_apart", in_this_process)
    assert command.main(["refattn.merge", "--examples=1", "--seconds=1e-9", "--property=answer"]) == 1
    assert "1 not reached" in capsys.readouterr().out


@pytest.mark.parametrize("text", ["", "a", "1/2/3", "0", "4/-1"])
def test_heads_are_numbers(text, capsys):
    with pytest.raises(SystemExit):
        command.main(["refattn.merge", f"--heads={text}"])
    assert "expected a number, or two as 32/8" in capsys.readouterr().err


def test_what_cannot_be_called_ends_the_search():
    """And so does an input that changes: all that comes after would speak of other numbers."""

    def flat(query, key_cache, value_cache, cu_seqlens_q, seq_lens, block_table):
        return torch.zeros(len(query), query.shape[1] * query.shape[2])

    def scales(query, key_cache, value_cache, cu_seqlens_q, seq_lens, block_table):
        return query.mul_(0.125)

    for kernel, name, says in (
        (flat, "call", "out: shape [1, 64], expected [1, 1, 64]: tokens, heads, elements of a value"),
        (scales, "call", "query: changed at [0, 0, 0]: a call may change nothing but its output"),
    ):
        report = check(kernel, "chunked_prefill", examples=1, **FLOAT32)
        (finding,) = report.failures
        assert (finding.property, finding.detail) == (name, says)
        assert {x.outcome for x in report.findings} == {"wrong", "not reached", "not claimed"}
        lines = as_text(report).splitlines()
        first = next(i for i, line in enumerate(lines) if line.startswith(("✗", "·", "?")))
        assert lines[first].startswith(f"✗ {name}") and says in lines[first + 1]
        assert lines[-1] == f"? not reached, it cannot be called: {len(report.not_reached)} properties"
        assert as_text(report, is_verbose=True).count("not reached") == 2  # in the counts, and here


def test_failures_of_one_cause_are_one():
    def raises(query, key_cache, value_cache, cu_seqlens_q, seq_lens, block_table):
        if len(seq_lens) > 1:
            raise RuntimeError("no batches")
        return by_hand.paged(query, key_cache, value_cache, cu_seqlens_q, seq_lens, block_table, 0, 0)

    report = check(raises, "chunked_prefill", examples=4, only=["mask", "answer", "tail", "call"], **FLOAT32)
    text = as_text(report)
    assert len(report.failures) == 3 and text.count("no batches") == 1
    assert "the same in 2 others: answer, tail" in text


def test_a_report_shows_the_numbers_of_a_call_that_fails():
    """Also those that are no option of the batch, such as the scale over latents."""

    def louder(query, cache, cu_seqlens_q, seq_lens, block_table, latent_rank, softmax_scale):
        return 1.01 * by_hand.mla(query, cache, cu_seqlens_q, seq_lens, block_table, latent_rank, softmax_scale)

    text = as_text(check(louder, "mla", examples=2, only=["answer"], **FLOAT32))
    assert "\n  called with latent_rank=64, softmax_scale=0.1\n" in text

    def of_a_ring(query, key, value, log_decay, beta, states, ring, ring_size, plan):
        return 1.01 * replay.attention(query, key, value, log_decay, beta, states, ring, plan)

    text = as_text(check(of_a_ring, "replay", examples=2, only=["output"], **FLOAT32))
    lacking = "delta (True is expected), scale (its default is expected)"
    assert f"no known mistake gives these numbers; the function has no parameter {lacking}" in text


def test_a_report_says_which_parameters_of_a_path_are_lacking():
    def halved(query, key, value, cu_seqlens_q, cu_seqlens_k, causal):
        return by_hand.varlen(query * 0.437, key, value, cu_seqlens_q, cu_seqlens_k, causal=causal)

    text = as_text(check(halved, "varlen", examples=2, only=["answer"], **FLOAT32))
    assert re.search(r"numbers; the function has no parameter softmax_scale \(\d+ \*\* -0.5 is expected\)", text)


# --- what was drawn ---


def test_a_report_says_what_pools_held():
    def write(latent, rope_key, cache, slot_mapping, cache_scale=1.0):
        return mla.write(latent, rope_key, cache, slot_mapping, cache_scale=cache_scale)

    report = check(write, "mla_write", examples=4, only=["output", "fp8", "packed"], **FLOAT32)
    assert "; stored e4m3, e5m2, numbers, packed; values normal, zeros" in report.drawn.line()
    drawn = Drawn("mla", ("float32",))
    drawn.add(Example("mla", value_head_size=32, options={"stored": "float8_e5m2"}))
    drawn.add(Example("mla", value_head_size=32))
    assert "; pools of float8_e5m2, the type of queries; " in drawn.line()


def test_a_report_says_what_was_drawn_and_what_was_not():
    @claims(heads=((8, 2),), head_sizes=((64, 64),), block_sizes=(16,))
    def small(query, key_cache, value_cache, cu_seqlens_q, seq_lens, block_table):
        return by_hand.paged(query, key_cache, value_cache, cu_seqlens_q, seq_lens, block_table, 0, 0)

    report = check(small, "chunked_prefill", examples=2, only=["answer"], **FLOAT32)
    lines = as_text(report, is_verbose=True).splitlines()[2:4]
    assert lines[0].startswith("drawn: float32; heads 8/2; head sizes 64; blocks of 16; up to ")
    assert lines[1].startswith(
        "not drawn: groups of 1, 2, 3, 5, 6, 7, 8, 16; head sizes 32, 80, 96, 112, 128, 192, 256, 512; "
        "blocks of 1, 8, 32, 64, 128, 256, 784"
    )
    assert lines[0] in as_html([report])
    assert 'tests="1"' in as_junit(report)


def test_many_sizes_are_named_by_the_first_and_the_last():
    drawn = Drawn("chunked_prefill", ("float32",))
    for size in range(8, 80, 8):
        drawn.add(Example("chunked_prefill", head_size=size))
    assert "; head sizes 8, 16, 24, 32, 40, 48, 56, 64, 72; " in drawn.line()
    assert "; head sizes 8 to 72 (9 of them); " in drawn.line(most=8) and "9 of them" not in drawn.line(most=9)


def test_by_default_all_that_is_usual_is_drawn():
    drawn = Drawn("chunked_prefill")
    kernel = Kernel("paged", "chunked_prefill", by_hand.paged)
    for example in [*landmarks.every_shape(kernel), *corners.of_models(kernel)]:
        drawn.add(example)
    assert drawn.missing() == ""


def test_far_keys_are_seen_through_long_chunks_and_windows():
    """A chunk of three blocks, or a window of 300 keys, would hide what is far."""
    by_path = {"local": ("chunk_size", 8270), "sliding_window": ("window_size", (7236, 0))}
    for path, (name, least) in by_path.items():
        kernel = Kernel("mine", path, getattr(by_hand, path))
        assert landmarks.example(kernel, ((1, 8270),)).options[name] >= least
        assert landmarks.example(kernel, ((1, 270),)).options[name] < least


def test_what_is_beyond_usual_claims_may_be_refused_in_any_words():
    def of_one_size(query, key, value, cu_seqlens_q, cu_seqlens_k):
        assert query.shape[-1] == value.shape[-1] <= 256, "one head size up to 256"
        return by_hand.varlen(query, key, value, cu_seqlens_q, cu_seqlens_k)

    (finding,) = check(of_one_size, "varlen", only=["sizes of models"], **FLOAT32).findings
    assert finding.outcome == "honoured" and finding.refused > 0


def test_what_takes_longest_comes_last():
    """Of a slow kernel all else is asked before its time is over."""
    for path in ("chunked_prefill", "mla", "recurrent", "kv_cache"):
        names = [x.name for x in properties.of_path(path)]
        slow = [name for name in names if name in properties.LAST]
        assert names[-len(slow) :] == slow and names[:2] == ["call", "writes"]
