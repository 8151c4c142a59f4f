"""The ladder of decodes: each rung is right. The files, times and pages of all ladders: a rung is one small change."""

import difflib
import importlib
import json
import os
import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton", reason="Triton comes for Linux only")

from triton.runtime.errors import OutOfResources

from refattn import chunked_prefill
from refattn.modes import computing_in
from tests.helpers import kernels_present  # noqa: F401 (quickens the interpreter)
from tests.helpers.tolerance import assert_close
from twinattn.bench import measure as clocks
from twinattn.bench.report import duration
from twinattn.course import interpreted, ladder
from twinattn.course.batches import BATCHES, Latents, Pages, States
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
OF_ANOTHER_KERNEL = {("states", 7): 76}  # the kernel of all chunks finds its chunk, and loads what the other one loads
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
    """Return the arguments of a rung, with poison wherever no query may look and past the last blocks."""
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


# --- files of all ladders ---

CHANGES = [  # rungs in PyTorch, and those that call the packages, are no change of a file
    pytest.param(below, above, id=f"{name}-{above.number}")
    for name in ladder.LADDERS
    for below, above in pairwise(ladder.rungs(name))
    if "@triton.jit" in below.file.read_text() and "@triton.jit" in above.file.read_text()
]
NUMBERS = {"decode": 12, "prefill": 13, "latents": 12, "states": 12}
each_ladder = pytest.mark.parametrize("name", ladder.LADDERS)


@pytest.mark.parametrize(("below", "above"), CHANGES)
def test_a_rung_is_one_change(below, above):
    lines = list(difflib.ndiff(code(below), code(above)))
    most = OF_ANOTHER_KERNEL.get((above.file.parent.name, above.number), MOST_LINES)
    assert 1 <= sum(line.startswith("+ ") for line in lines) <= most
    assert sum(line.startswith("- ") for line in lines) <= most // 2


@each_ladder
def test_rungs_are_short_and_say_what_they_gain(name):
    found = ladder.rungs(name)
    assert [rung.number for rung in found] == list(range(NUMBERS[name]))
    for rung in found:
        assert 30 <= rung.file.read_text().count("\n") <= 150
        idea, gain, source = rung.about
        assert idea and gain.startswith("Gain: ") and source.startswith("Source: ")


@each_ladder
def test_the_page_lists_the_files_of_its_rungs(name):
    """In Markdown, so that a reader on a code host has them, too: all in order, each with the title of its file."""
    page = (ROOT / f"docs/ladder/{name}.md").read_text()
    rows = re.findall(r"^\| \[(\d+)\]\(\.\./\.\./([^)]+)\) \| (.+) \| (.+) \|$", page, re.MULTILINE)
    found = ladder.rungs(name)
    assert [row[:3] for row in rows] == [
        (str(rung.number), rung.file.relative_to(ROOT).as_posix(), rung.title) for rung in found
    ]
    assert len({teaches for *_, teaches in rows}) == len(found)


@each_ladder
def test_the_page_lists_the_batches_that_are_timed(name):
    rows = re.findall(r"^\| ([^|]+) \| [^|]+ \|$", (ROOT / f"docs/ladder/{name}.md").read_text(), re.MULTILINE)
    assert set(BATCHES[name]) <= set(rows)


def test_an_unknown_ladder_is_refused():
    with pytest.raises(ValueError, match="ladder: expected one of decode, prefill, latents, states, got 'prefil'"):
        ladder.rungs("prefil")


# --- times, and the page ---

SMALL = {
    Pages: dict(heads=4, kv_heads=2, size=16),
    Latents: dict(heads=4, rank=32, rope=16, nope=16, value_size=16, block_size=16),
    States: dict(heads=4, key_heads=2, size=16),
}


def small(batch, lens):
    """Return a batch of the same kind, of short sequences with small heads."""
    return replace(batch, **SMALL[type(batch)], lens=lens)


def first_of(name):
    """Return the first batch that a ladder is timed on."""
    return next(iter(BATCHES[name].values()))


def raise_(error):
    raise error


@pytest.fixture(params=ladder.LADDERS)
def run(request, monkeypatch, tmp_path):
    """Return a file of results as a GPU would give it: each rung by 1 ms faster than the one before, down to 1 ms.

    Of the prefills, the last rung does not run there, and of the latents one takes more than there is.
    """
    name, found = request.param, ladder.rungs(request.param)
    batches = {key: small(batch, ((1 + i, 16 + 8 * i), (2, 3))) for i, (key, batch) in enumerate(BATCHES[name].items())}
    monkeypatch.setitem(BATCHES, name, batches)
    ceilings = clocks.Ceilings(copy=1e9, product=1e3 if name == "prefill" else 1e12, read=1e9)
    called = []
    monkeypatch.setattr(clocks, "ceilings", lambda *_, **__: ceilings)
    monkeypatch.setattr(clocks, "on_gpu", lambda calls, **_: [1e-3 * (len(found) - called[-1])] * 2)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(ladder, "_judge", lambda *_: lambda out: None)

    def module_of(rung):
        def attention(step=None):
            assert (step == "a plan") == is_planned
            called.append(rung.number)

        def decode(checkpoints, step=None):
            attention(step)

        text = rung.file.read_text()
        is_planned, is_decode = "\ndef plan(" in text, "    checkpoints: " in text
        function = decode if is_decode else attention
        return SimpleNamespace(attention=function, **({"plan": lambda: "a plan"} if is_planned else {}))

    modules = {rung.file: module_of(rung) for rung in found}
    if name == "prefill":
        modules[found[-1].file] = SimpleNamespace(missing=lambda device: "another GPU", attention=lambda: None)
    if name == "latents":
        modules[found[8].file] = SimpleNamespace(
            attention=lambda: raise_(OutOfResources(221184, 101376, "shared memory"))
        )
    monkeypatch.setattr(ladder, "_load", modules.get)
    kernel = {"kernel": "attend", "registers": 96, "spills": 2, "shared_bytes": 37888, "programs_per_sm": 5}
    compiled = iter([[], [object()], *[[]] * 99])
    monkeypatch.setattr(ladder, "_compiled", lambda: next(compiled))
    monkeypatch.setattr(ladder, "_describe", lambda *_: kernel)
    lines = []
    results = ladder.measure(name, lines.append, torch.device("cpu"))
    return json.loads(json.dumps(results)), lines


def test_a_run_has_the_times_of_all_rungs(run):
    found, lines = run
    name, rungs = found["ladder"], ladder.rungs(found["ladder"])
    assert [each["name"] for each in found["batches"]] == list(BATCHES[name])
    missing = {}
    for each in found["batches"]:
        batch = BATCHES[name][each["name"]]
        assert each["lens"] == [list(one) for one in batch.lens]
        by = 1e-3 * batch.flops() if name == "prefill" else 1e-9 * (batch.reads() + batch.writes())
        assert each["floor"] == pytest.approx(by)
        assert [row["name"] for row in each["rungs"]] == [rung.name for rung in rungs]
        for rung, row in zip(rungs, each["rungs"], strict=True):
            if "missing" in row:
                missing[each["name"], rung.number] = row["missing"]
                continue
            assert row["median"] == pytest.approx(1e-3 * (len(rungs) - rung.number))
            assert row["clock"] == ("events" if rung.number == 0 or rung.name == "absorbed" else "graph")
            assert row["share_of_floor"] == pytest.approx(each["floor"] / row["median"])
    no_rings = "`checkpoints`, which this batch does not have"
    expected = {
        "prefill": {(batch, 12): "another GPU" for batch in BATCHES[name]},
        "latents": {(batch, 8): "more shared memory than this GPU has" for batch in BATCHES[name]},
        "states": {(batch, number): no_rings for batch in ("1 x 8192", "8 x 1024") for number in (10, 11)},
    }
    assert missing == expected.get(name, {})
    first = found["batches"][0]["rungs"]
    assert first[0]["kernels"][0]["registers"] == 96 and not first[1]["kernels"]
    assert {"date", "commit", "versions", "machine"} <= found.keys()
    assert sum(rungs[1].title in line for line in lines) == 3
    assert sum("not run: it needs another GPU" in line for line in lines) == 3 * (name == "prefill")


def test_what_has_to_be_read():
    """Keys and values of 8 heads of 128 in bfloat16, the queries, the lengths, and a table of blocks of 16."""
    batch = Pages(((1, 33), (2, 1)))
    assert batch.reads() == 2 * 34 * 8 * 128 * 2 + 3 * 32 * 128 * 2 + 4 * (3 + 1) + 4 * 2
    assert batch.writes() == 3 * 32 * 128 * 2


def test_what_has_to_be_read_of_latents():
    """Latents of 512 elements and rotary keys of 64, both projections of 16 heads, queries, and blocks of 64."""
    batch = Latents(((1, 65), (1, 2)), heads=16)
    projections = 2 * 16 * 128 * 512
    assert batch.reads() == 2 * (67 * 576 + projections + 2 * 16 * 192) + 4 * (2 + 1) + 4 * 2
    assert batch.writes() == 2 * 2 * 16 * 128
    assert batch.flops() == 2 * 16 * 67 * (576 + 512) + 2 * 2 * projections


def test_what_has_to_be_read_of_states():
    """Two queries and keys of 16 heads per token, values of 32, two gates, and a state where there is one."""
    batch = States(((3, 3), (1, 2)))
    token, state = 2 * 128 * (2 * 16 + 32) + 4 * 2 * 32, 4 * 32 * 128 * 128
    assert batch.reads() == 4 * token + state
    assert batch.writes() == 4 * 2 * 32 * 128 + 2 * state
    assert batch.flops() == 4 * 32 * 3 * 2 * 128 * 128


def test_what_has_to_be_multiplied():
    """Two queries see four keys and five, three of a prompt one, two and three: two products of 32 heads of 128."""
    assert Pages(((2, 5), (3, 3))).flops() == 2 * 2 * (4 + 5 + 1 + 2 + 3) * 32 * 128


@each_ladder
def test_timed_calls_are_held_to_the_reference_at_both_ends(name, monkeypatch):
    """The reference agrees with itself, and an output that is wrong at one end of the last sequence is refused."""
    lens = ((3, 70), (90, 100)) if name in ("prefill", "states") else ((1, 70), (1, 33))
    monkeypatch.setattr(ladder, "JUDGED", 5)
    batch = small(first_of(name), lens)
    inputs = batch.make_inputs(torch.device("cpu"))
    reference = ladder.rungs(name)[0]
    judge, out = ladder._judge(reference, batch, inputs), ladder.call_of(reference, batch, inputs)()
    judge(out)
    for row in {0, -1, lens[0][0]}:
        wrong = out.clone()
        wrong[row] += 0.3
        with pytest.raises(AssertionError):
            judge(wrong)


@pytest.mark.skipif(not INTERPRETED, reason="the tensors are on a CPU")
def test_rows_and_pages_of_a_timed_batch_hold_the_same():
    """A rung over pages is timed on the numbers of one over rows; each finds its arguments by their names."""
    assert "key" not in small(first_of("decode"), ((1, 3),)).make_inputs(torch.device("cpu"))
    batch = small(first_of("prefill"), ((3, 40), (20, 20)))
    inputs = batch.make_inputs(torch.device("cpu"))
    inputs |= {x: inputs[x].float() for x in ("query", "key", "value", "key_cache", "value_cache")}
    outs = [ladder.call_of(rung, batch, inputs)() for rung in ladder.rungs("prefill")[8:12]]
    for out in outs[1:]:
        torch.testing.assert_close(out, outs[0])


@each_ladder
def test_without_a_gpu_there_are_no_times(name, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(interpreted, "run", lambda ladder, tell, device: ladder != "decode")
    lines = []
    assert ladder.run(name, lines.append) == (name != "decode" or not INTERPRETED)
    assert lines[0].startswith(" 0 The formula")
    assert "need a CUDA device" in lines[-1] and f"docs/ladder/{name}.md" in lines[-1]
    assert sum("needs a Hopper GPU" in line for line in lines) == (name == "prefill")
    with pytest.raises(ValueError, match="json: expected a machine with a CUDA device"):
        ladder.run(name, lines.append, tmp_path / "times.json")


@pytest.fixture
def pages(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "docs")
    return importlib.import_module("ladders")


def test_the_page_takes_each_measured_number_from_the_results(run, pages, monkeypatch):
    """What is written by hand has none, but for a section whose numbers `test_numbers` holds to another file."""
    found, _ = run
    name, found_rungs = found["ladder"], ladder.rungs(found["ladder"])
    by_hand = [(ROOT / f"docs/ladder/{name}.md").read_text(), *(rung.file.read_text() for rung in found_rungs)]
    by_hand[0] = re.sub(r"(?s)\n## What the profiler says of it\n.*?(?=\n## )", "", by_hand[0])
    assert not [found[0] for text in by_hand for found in MEASURED.finditer(text)]
    monkeypatch.setattr(pages, "results", lambda _: [])
    monkeypatch.setattr(pages, "known", lambda _: "")
    assert set(MEASURED.findall(pages.page(name, "."))) == {"times", "%"}  # the choices
    assert "**These rungs have not been timed yet**" in pages.page(name, ".")
    monkeypatch.setattr(pages, "results", lambda _: [found])
    shown = pages.page(name, ".")
    timed = [row for each in found["batches"] for row in each["rungs"] if "median" in row]
    for row in timed:
        assert f"{pages.time_of(row)}<br>{row['share_of_floor']:.1%}" in shown
    assert "| 96 | 2 | 37,888 | 5 |" in shown and "have not been timed yet" not in shown
    now, before = (1e-3 * (len(found_rungs) - number) for number in (2, 1))
    said = f"{duration(before)} before, {duration(now)} now, {before / now:.2f} times as fast"
    assert said in shown.replace(" by events", "")
    questions = re.findall(rf'id="predict-({name}[.]\d+)"', shown)
    numbers = {row["number"] for row in timed}
    assert questions == [f"{name}.{number}" for number in sorted(numbers) if number - 1 in numbers]


def test_a_bar_of_each_rung_is_as_long_as_its_share_of_the_floor(run, pages):
    found, _ = run
    shown = pages.bars(found["ladder"], found)
    longs = [float(x) for x in re.findall(r'width="([\d.]+)" height="14"', shown)]
    shares = [row.get("share_of_floor", 0.0) for row in found["batches"][0]["rungs"]]
    assert longs == pytest.approx([400 * share for share in shares], abs=0.05)
    assert shown.count("not timed") == {"prefill": 1, "latents": 1, "states": 2}.get(found["ladder"], 0)


def test_a_rung_that_needs_another_gpu_is_shown_without_a_time(run, pages, monkeypatch):
    found, _ = run
    monkeypatch.setattr(pages, "results", lambda _: [found])
    shown = pages.page(found["ladder"], ".")
    is_prefill = found["ladder"] == "prefill"
    assert shown.count("| needs another GPU | needs another GPU | needs another GPU |") == is_prefill
    assert shown.count(f"Not measured on {found['machine']['name']}: it needs another GPU.") == is_prefill


def test_what_a_rung_gained_is_a_cell_of_a_table(run, pages, monkeypatch):
    """On docs/ladder/flash_attention.md; nothing where a ladder, a rung or the one before was not timed."""
    found, _ = run
    monkeypatch.setattr(pages, "results", lambda _: [])
    assert pages.gain(found["ladder"], 3) == ""
    monkeypatch.setattr(pages, "results", lambda _: [found])
    last = len(ladder.rungs(found["ladder"]))
    batch = pages.batch_of(ladder.rungs(found["ladder"])[3])
    assert pages.gain(found["ladder"], 3) == f"{(last - 2) / (last - 3):.2f} times, on {batch}"
    assert pages.gain("prefill", 12) == "" or found["ladder"] != "prefill"


def test_until_a_ladder_is_timed_its_page_has_the_times_of_the_trials(pages, monkeypatch):
    """Those of the kernels on the last rungs, with the machine, the day and the commit."""
    monkeypatch.setattr(pages, "results", lambda _: [])
    shown = pages.page("prefill", ".")
    tried = json.loads((ROOT / "docs/results/tried/cuda-nvidia-h200.json").read_text())["runs"]
    (row,) = [x for x in tried if (x["path"], x["workload"]) == ("chunked_prefill", "prefill-2x8192")]
    times = " | ".join(duration(design["median"]) for design in row["designs"])
    assert f"| 2 x 8192 | {times} |" in shown and "| batch | rung 11 | rung 12 | FlashAttention-3 |" in shown
    assert f"{row['machine']['name']}, {row['date'][:10]}, commit {row['commit']}" in shown


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


@each_ladder
def test_each_rung_has_a_drawing_of_its_idea(name, pages):
    for rung in ladder.rungs(name):
        drawn = pages.drawing(rung)
        assert (drawn is None) == (rung.number == 0)
        if drawn is not None:
            lines = drawn.splitlines()[1:-1]
            assert 2 <= len(lines) <= 6 and max(map(len, lines)) <= 98, "what fits on a page"
            assert drawn in pages.part(rung, ladder.rungs(name)[0], [], ".", {})


def test_words_of_gpus_are_linked_to_the_glossary_where_they_first_occur(pages):
    """Those of the rungs once per page; and each that a reader of the last rungs needs is introduced somewhere."""
    glossary = (ROOT / "docs/glossary.md").read_text()
    assert not [place for place in pages.WORDS if f'id="{place}"' not in glossary]
    unseen = dict(pages.WORDS)
    said = pages.linked("Two stages: a warp of four warps, and `num_stages`.", unseen)
    assert said == (
        "Two [stages](../glossary.md#stage): a [warp](../glossary.md#warp) of four warps, and `num_stages`."
    )
    assert pages.linked("More stages.", unseen) == "More stages."
    found = "".join(
        f"{(ROOT / f'docs/ladder/{name}.md').read_text()}{pages.page(name, '.')}" for name in ladder.LADDERS
    )
    found += (ROOT / "docs/ladder/sm.md").read_text()
    needed = "warp stage bank-conflict occupancy register-pressure tma wgmma persistent-program warp-specialization"
    assert not [word for word in [*needed.split(), "programmatic-launch"] if f"glossary.md#{word})" not in found]


@each_ladder
def test_committed_results_have_every_rung(name, pages):
    for found in pages.results(name):
        for each in found["batches"]:
            assert [row["name"] for row in each["rungs"]] == [rung.name for rung in ladder.rungs(name)]


def test_a_change_is_shown_as_a_difference(pages):
    shown = pages.diff(RUNGS[6], RUNGS[7])
    assert "-        num_stages=1," in shown and "+        num_stages=3," in shown


def test_rungs_are_listed_where_triton_is_not_installed(monkeypatch):
    def without_triton(file):
        if "@triton.jit" in file.read_text():
            raise ModuleNotFoundError("No module named 'triton'", name="triton")

    monkeypatch.setattr(ladder, "_load", without_triton)
    monkeypatch.setattr(interpreted, "is_on", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    said = []
    ladder.run("decode", said.append)
    assert sum("needs Triton, which is not installed" in line for line in said) == len(RUNGS) - 2
    assert said[-1].startswith("\nTimes need a CUDA device")
