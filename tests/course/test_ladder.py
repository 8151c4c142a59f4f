"""The ladder: each rung is right, and differs from the one before by little."""

import difflib
import importlib
import json
import os
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton", reason="Triton comes for Linux only")

from refattn import chunked_prefill
from refattn.modes import computing_in
from tests.helpers import kernels_present  # noqa: F401 (quickens the interpreter)
from tests.helpers.tolerance import assert_close
from twinattn.bench import measure as clocks
from twinattn.bench.report import duration
from twinattn.course import ladder
from twinattn.kit import Case, build
from twinattn.kit.check import check
from twinattn.kit.tolerance import WIDER

ROOT = Path(__file__).parent.parent.parent
PROPERTIES = ("call", "writes", "mask", "answer", "empty rows", "blocks", "tail")
MEASURED = re.compile(r"\d[\d.,]* ?(µs|us|ms|ns|s|%|[GT]B/s|times)(?!\w)")
RUNGS = ladder.rungs("decode")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
HALF = torch.float16 if INTERPRETED else torch.bfloat16  # the interpreter multiplies matrices of bfloat16 wrongly
MOST_LINES = 48  # that a rung adds to the one before: the reduction is a kernel of its own
CASES = {
    "group": Case("group", tuple((1, n) for n in (5, 33, 0, 64, 17)), heads=(8, 2)),
    "one-head-each": Case("one-head-each", ((1, 40), (1, 32)), heads=(3, 3), block_size=24),
    "odd-group": Case("odd-group", ((1, 3), (1, 48)), heads=(6, 2), head_size=128, block_size=1),
    "large-pages": Case("large-pages", ((1, 65), (1, 64)), heads=(5, 1), block_size=64),
    "nothing": Case("nothing", ((1, 0),), heads=(4, 2)),
}


@pytest.fixture(autouse=True)
def few_keys_are_split(monkeypatch):
    """Let a few keys be several tiles and splits."""
    small = dict(KEYS=16, FEWEST_KEYS=16, MOST_KEYS=16, SPLITS=2, SEQUENCES=2)
    for rung in RUNGS:
        for name, value in small.items():
            if hasattr(rung.load(), name):
                monkeypatch.setattr(rung.load(), name, value)


def arguments_of(paged):
    """Return what a rung takes; poison is wherever no query may look, and in the table past a last block."""
    return paged.query, paged.key_cache, paged.value_cache, paged.batch.seq_lens, paged.batch.block_table


def expect(case, paged, dtype):
    """Return the output by the reference, in a wider type and in its own."""
    plan = chunked_prefill.plan(paged.batch, block_size=case.block_size)
    wide = (x.to(WIDER[dtype]) for x in (paged.query, paged.key_cache, paged.value_cache))
    with computing_in(dtype):
        low = chunked_prefill.attention(paged.query, paged.key_cache, paged.value_cache, plan)
    return chunked_prefill.attention(*wide, plan), low


@pytest.mark.parametrize("dtype", [torch.float32, HALF], ids=str)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("rung", RUNGS, ids=lambda rung: rung.name)
def test_each_rung_is_right(rung, name, dtype, device):
    paged = build(CASES[name], dtype=dtype, device=device)
    out = rung.load().attention(*arguments_of(paged))
    ref, low = expect(CASES[name], build(CASES[name], dtype=dtype), dtype)
    assert_close(out.cpu(), ref, low)


@pytest.mark.parametrize("rung", RUNGS, ids=lambda rung: rung.name)
def test_the_scale_is_that_of_the_call(rung, device):
    paged = build(CASES["odd-group"], device=device)
    out = rung.load().attention(*arguments_of(paged), softmax_scale=0.3)
    same = rung.load().attention(paged.query * (0.3 * 128**0.5), *arguments_of(paged)[1:])
    torch.testing.assert_close(out, same, atol=1e-5, rtol=1e-5)


@pytest.mark.skipif(not INTERPRETED, reason="a GPU compiles each of the shapes")
@pytest.mark.parametrize("rung", RUNGS, ids=lambda rung: rung.name)
def test_each_rung_keeps_the_contract(rung):
    few = dict(heads=((6, 2),), head_sizes=((64, 64),), block_sizes=(16,))
    report = check(
        rung.load().attention, "chunked_prefill", dtypes=[torch.float32], examples=1, only=PROPERTIES, limits=few
    )
    assert {found.property: found.outcome for found in report.findings} == dict.fromkeys(PROPERTIES, "honoured")


@pytest.mark.skipif(not INTERPRETED, reason="kernels are compiled")
def test_long_sequences_get_the_splits():
    """By shares, the splits of a ragged batch have about the same number of keys; before, all had as many splits."""
    paged = build(CASES["group"])
    seen = {}
    for rung in RUNGS[8:10]:
        module, launched = rung.load(), []
        reduce = module.reduce

        class Seen:
            def __getitem__(self, grid, reduce=reduce, launched=launched):
                def launch(parts, lses, *arguments, **sizes):
                    launched.append((lses > -torch.inf).sum(-1)[:, 0].tolist())
                    reduce[grid](parts, lses, *arguments, **sizes)

                return launch

        module.reduce = Seen()
        module.attention(*arguments_of(paged))
        module.reduce = reduce
        seen[rung.name] = launched[0]
    assert seen == {"splits": [1, 1, 0, 1, 1], "balance": [1, 2, 0, 4, 1]}


@pytest.mark.usefixtures("shapes_unchecked")
@pytest.mark.parametrize(
    ("argument", "wrong", "message"),
    [
        (0, lambda x: x[..., :48].contiguous(), "query: expected|key_cache: expected"),
        (1, lambda x: x.transpose(1, 2), "key_cache: expected|value_cache: expected"),
        (3, lambda x: x.long(), r"seq_lens: expected int32 \[b"),
        (4, lambda x: x[:1], "block_table: expected"),
    ],
)
def test_bad_input_is_named(argument, wrong, message):
    given = list(arguments_of(build(CASES["group"])))
    given[argument] = wrong(given[argument])
    for rung in RUNGS[1:]:
        with pytest.raises((ValueError, NotImplementedError), match=message):
            rung.load().attention(*given)


def code(rung):
    """Return the lines of a rung below its docstring."""
    return rung.file.read_text().split('"""', 2)[2].splitlines()


@pytest.mark.parametrize("below", range(1, len(RUNGS) - 2))
def test_a_rung_is_one_change(below):
    """The first and the last are calls of the packages, and no change of a file."""
    lines = list(difflib.ndiff(code(RUNGS[below]), code(RUNGS[below + 1])))
    assert 1 <= sum(line.startswith("+ ") for line in lines) <= MOST_LINES
    assert sum(line.startswith("- ") for line in lines) <= MOST_LINES // 2


def test_rungs_are_short_and_say_what_they_gain():
    assert [rung.number for rung in RUNGS] == list(range(12))
    for rung in RUNGS:
        assert 30 <= rung.file.read_text().count("\n") <= 150
        idea, gain, source = rung.about
        assert idea and gain.startswith("Gain: ") and source.startswith("Source: ")


def test_an_unknown_ladder_is_refused():
    with pytest.raises(ValueError, match="ladder: expected one of decode, got 'prefil'"):
        ladder.rungs("prefil")


# --- times, and the page ---


@pytest.fixture
def run(monkeypatch, tmp_path):
    """Return a file of results as a GPU would give it: each rung by 1 ms faster than the one before, down to 1 ms."""
    small = {name: (16 + 8 * i, 3) for i, name in enumerate(ladder.BATCHES)}
    monkeypatch.setattr(ladder, "BATCHES", small)
    for name, value in (("HEADS", 4), ("KV_HEADS", 2), ("SIZE", 16)):
        monkeypatch.setattr(ladder, name, value)
    ticks = iter([1e-3 * (12 - number) for _ in small for number in range(12)])
    ceilings = clocks.Ceilings(copy=1e9, product=1e12, read=1e9)
    monkeypatch.setattr(clocks, "ceilings", lambda *_, **__: ceilings)
    monkeypatch.setattr(clocks, "on_gpu", lambda calls, **_: [next(ticks)] * 2)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(ladder, "_judge", lambda *_: lambda out: None)
    planned = SimpleNamespace(attention=lambda *_, step: step, plan=lambda *_: "a plan")
    modules = {RUNGS[-1].file: planned}
    monkeypatch.setattr(ladder, "_load", lambda file: modules.get(file) or SimpleNamespace(attention=lambda *_: None))
    kernel = {"kernel": "attend", "registers": 96, "spills": 2, "shared_bytes": 37888, "programs_per_sm": 5}
    compiled = iter([[], [object()], *[[]] * 99])
    monkeypatch.setattr(ladder, "_compiled", lambda: next(compiled))
    monkeypatch.setattr(ladder, "_describe", lambda *_: kernel)
    lines = []
    found = ladder.measure("decode", lines.append, torch.device("cpu"))
    return json.loads(json.dumps(found)), lines


def test_a_run_has_the_times_of_all_rungs(run):
    found, lines = run
    assert [each["name"] for each in found["batches"]] == list(ladder.BATCHES)
    for each in found["batches"]:
        reads, writes = ladder.bytes_moved(each["lens"])
        assert each["floor"] == pytest.approx(1e-9 * (reads + writes))
        assert [row["name"] for row in each["rungs"]] == [rung.name for rung in RUNGS]
        assert [row["clock"] for row in each["rungs"]] == ["events"] + ["graph"] * 11
        assert each["rungs"][1]["median"] == pytest.approx(11e-3)
    first = found["batches"][0]["rungs"]
    assert first[0]["kernels"][0]["registers"] == 96 and not first[1]["kernels"]
    assert {"date", "commit", "versions", "machine"} <= found.keys()
    assert sum("One program per sequence and head" in line for line in lines) == 3


def test_what_has_to_be_read():
    """Keys and values of 8 heads of 128 in bfloat16, the queries, the lengths, and a table of blocks of 16."""
    assert ladder.bytes_moved((33, 1)) == (
        2 * 34 * 8 * 128 * 2 + 2 * 32 * 128 * 2 + 4 * (3 + 1) + 4 * 2,
        2 * 32 * 128 * 2,
    )


def test_without_a_gpu_there_are_no_times(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    lines = []
    ladder.run("decode", lines.append)
    assert lines[0].startswith(" 0 The formula") and "need a CUDA device" in lines[-1]
    with pytest.raises(ValueError, match="json: expected a machine with a CUDA device"):
        ladder.run("decode", lines.append, tmp_path / "decode.json")


@pytest.fixture
def pages(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "docs")
    return importlib.import_module("ladders")


def test_the_page_takes_each_measured_number_from_the_results(run, pages, monkeypatch):
    """What is written by hand has none."""
    by_hand = [(ROOT / "docs/ladder/decode.md").read_text(), *(rung.file.read_text() for rung in RUNGS)]
    assert not [found[0] for text in by_hand for found in MEASURED.finditer(text)]
    found, _ = run
    monkeypatch.setattr(pages, "results", lambda _: [])
    assert set(MEASURED.findall(pages.page("decode", "."))) == {"times", "%"}  # the choices
    monkeypatch.setattr(pages, "results", lambda _: [found])
    shown = pages.page("decode", ".")
    for each in found["batches"]:
        for row in each["rungs"]:
            assert f"{pages.time_of(row)}<br>{row['share_of_floor']:.1%}" in shown
    assert "| 96 | 2 | 37,888 | 5 |" in shown
    assert f"{duration(11e-3)} before, {duration(10e-3)} now, 1.10 times as fast" in shown
    questions = re.findall(r'id="predict-(decode[.]\d+)"', shown)
    assert questions == [f"decode.{number}" for number in range(1, 12)]


@pytest.mark.parametrize(
    ("times", "name"),
    [
        (0.5, "slower"),
        (0.96, "within 5 %"),
        (1.04, "within 5 %"),
        (1.3, "1.05 to 1.5 times"),
        (80, "more than 10 times"),
    ],
)
def test_a_factor_is_one_of_the_choices(times, name, pages):
    assert pages.bucket(times) == name


def test_committed_results_have_every_rung(pages):
    for found in pages.results("decode"):
        for each in found["batches"]:
            assert [row["name"] for row in each["rungs"]] == [rung.name for rung in RUNGS]


def test_a_change_is_shown_as_a_difference(pages):
    shown = pages.diff(RUNGS[6], RUNGS[7])
    assert "-        num_stages=1," in shown and "+        num_stages=3," in shown
