"""What pages and docstrings say in numbers is so: times are of result files or carry their day, lines are counted."""

import ast
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.helpers.pages import FENCE
from tests.helpers.twin_files import SHARED

ROOT = Path(__file__).parent.parent.parent
UNITS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6}
TIME = re.compile(r"(?<![\w.])\d[\d.,]*[ \u00a0]?(ms|us|µs|seconds?|minutes?|hours?)\b")
DATED = re.compile(r"\b20\d\d-\d\d-\d\d\b|\b(?=[0-9a-f]*\d)(?=[0-9a-f]*[a-f])[0-9a-f]{7}\b")
MADE = re.compile(r"<!-- (\w+): made by.*?<!-- end of \1 -->", re.DOTALL)

CUDA = "cuda-nvidia-h200"
MLA, MLA_16, MLA_SHORT = (
    f"mla/decode-{name}" for name in ("64x8192-heads-128", "64x8192-heads-16", "128x2048-heads-16")
)
TREES, LONG_TREES = "speculative/tree-64x8192-drafts-16", "speculative/tree-8x8192-drafts-64"
PACKED = "sparse/decode-{}x2048-of-131072-packed"
BY_KERNEL = [f"fastattn, {kernel}" for kernel in ("flash_mla", "fa3", "triton")]
STATES = "recurrent/prefill-{}-heads"
STATES_LONG, STATES_MANY, STATES_ONE = (STATES.format(x) for x in ("32768-1x32", "1024-8x32", "8192-1x32"))
ORDER, KERNELS = "fastattn/kernels/order.py", "docs/paths/kernels.md"
HELD = [  # a sentence with # for its times, their unit, and the row and the contender of docs/results of each
    (
        *(ORDER, "us", "8192 keys take it # us and ours #"),
        [(f"{MLA}-fp8", "fastattn, plain cache"), (f"{MLA}-fp8", "fastattn, triton, plain cache")],
    ),
    (ORDER, "us", "FlashAttention-3 took #", [(MLA, "fastattn, fa3")]),
    (ORDER, "us", "FlashAttention-3 and ours take #, # and # us", [(MLA_16, name) for name in BY_KERNEL]),
    (ORDER, "us", "over 2048 keys #, # and # us", [(MLA_SHORT, name) for name in BY_KERNEL]),
    (ORDER, "us", "then take it # us", [(f"{MLA}-fp8", "fastattn, queries and weights in fp8")]),
    (
        *(ORDER, "ms", "8192 keys it takes # ms, ours #, flash-attn-4 #"),
        [
            ("chunked_prefill/decode-64x8208-tokens-16", name)
            for name in ("FA3, blocks of 16", "fastattn, triton", "FA4, blocks of 16")
        ],
    ),
    (
        *(
            ORDER,
            "us",
            "takes ours # us, and its kernel # behind a launch that finds the slots; 8 of them take it # and ours #",
        ),
        [
            (PACKED.format(b), name)
            for b, name in ((1, BY_KERNEL[2]), (1, "FlashMLA, slots known"), (8, "fastattn"), (8, BY_KERNEL[2]))
        ],
    ),
    (
        *(ORDER, "ms", "8192 keys take # ms so and # by ours alone, 8 of 64 nodes # and #"),
        [(row, name) for row in (TREES, LONG_TREES) for name in ("fastattn", "fastattn, triton")],
    ),
    (
        *(ORDER, "ms", "16 heads take #, # and by ours alone # ms, 32 of 8 nodes and 128 heads #, # and #"),
        [
            (row, name)
            for row in ("mla/tree-64x8192-drafts-4-heads-16", "mla/tree-32x8192-drafts-8-heads-128")
            for name in BY_KERNEL
        ],
    ),
    (
        *(KERNELS, "µs", "128 heads our kernel takes # µs where FlashMLA takes #"),
        [(f"{MLA}-fp8", "fastattn, triton, plain cache"), (f"{MLA}-fp8", "fastattn, plain cache")],
    ),
    (
        *(KERNELS, "µs", "takes it # µs and `flash_qla` #, one of 32768 tokens # and #, and eight of 1024 # and #"),
        [(row, name) for row in (STATES_ONE, STATES_LONG, STATES_MANY) for name in (BY_KERNEL[2], "fastattn")],
    ),
    (
        *(ORDER, "us", "tokens take # us by FlashQLA and # by ours, 8 x 1024 take # and #, and 1 x 8192 take # and #"),
        [(row, name) for row in (STATES_LONG, STATES_MANY, STATES_ONE) for name in ("fastattn", BY_KERNEL[2])],
    ),
]
LAST_RUNG = "docs/ladder/prefill.md"
CYCLES, INSTRUCTIONS, BUSY = "Elapsed Cycles", "Executed Instructions", "Compute (SM) Throughput"


class Profile(NamedTuple):
    """The metrics of the kernels on that page by their names, in the order of its columns."""

    then: dict[str, float]
    first: dict[str, float]
    second: dict[str, float]
    fa3: dict[str, float]


PROFILED = {  # a sentence of that page with # for its numbers, and each of these: of one kernel, or the same of several
    "busy for # % of the cycles, those of FlashAttention-3 for # %, with # % fewer instructions": lambda found: (
        [found.then[BUSY]],
        [found.fa3[BUSY]],
        [100 - 100 * found.fa3[INSTRUCTIONS] / found.then[INSTRUCTIONS]],
    ),
    "no kernel takes more than # % of the peak rate of memory": lambda found: (
        [max(x["DRAM Throughput"] for x in found)],
    ),
    "For # % of the cycles an SM of d3f8ca40 had no program": lambda found: ([idle(found.then)],),
    "draw tiles from a counter, for # %": lambda found: ([idle(found.first), idle(found.second)],),
    "These take # times the cycles of FlashAttention-3 in place of #": lambda found: (
        [x[CYCLES] / found.fa3[CYCLES] for x in (found.first, found.second)],
        [found.then[CYCLES] / found.fa3[CYCLES]],
    ),
    "by themselves: # % fewer cycles, with # % more instructions": lambda found: (
        [100 - 100 * found.second[CYCLES] / found.first[CYCLES]],
        [100 * found.second[INSTRUCTIONS] / found.first[INSTRUCTIONS] - 100],
    ),
}
WAITS = {  # the same of what warps wait for: our kernel and FlashAttention-3
    "turns: # times its cycles, with # % more instructions": lambda ours, fa3: (
        ours["cycles"] / fa3["cycles"],
        100 * ours["instructions"] / fa3["instructions"] - 100,
    ),
    "at barriers of warps # million cycles are lost for # million": lambda ours, fa3: (
        at_barriers(ours),
        at_barriers(fa3),
    ),
    "goes through # steps: # cycles per warp and step, where the two kernels are # cycles per step apart": (
        lambda ours, fa3: (
            STEPS,
            1e6 * (at_barriers(ours) - at_barriers(fa3)) / (SMS * 8 * STEPS),
            (ours["cycles"] - fa3["cycles"]) / STEPS,
        )
    ),
    "all heads together read # MB from memory": lambda ours, fa3: (ours["read_bytes"] / 1e6,),
}
COUNTED = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
SMS = 132
# A tile has 32 positions of 4 heads, and a step 128 keys: of two prompts of 8192 tokens and 8 KV heads, per SM
STEPS = 2 * 8 * sum(-(-32 * (i + 1) // 128) for i in range(8192 // 32)) / SMS
MODELLED = {  # times that a model of a machine gives, which a test of their own computes
    "docs/explorer/engine.md": "tests/tools/test_engine_played.py",
}
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), ROOT / "docs/proof/behind.toml"]
MODULES = sorted((ROOT / "fastattn").rglob("*.py"))


def one_line(text: str) -> str:
    return " ".join(text.split())


def pattern(sentence: str) -> re.Pattern[str]:
    return re.compile(r"(\d+(?:\.\d+)?)".join(map(re.escape, sentence.split("#"))))


def words(string: ast.expr) -> str:
    """Return what a string says, without what is formatted into it."""
    parts = string.values if isinstance(string, ast.JoinedStr) else [string]
    return "".join(str(part.value) for part in parts if isinstance(part, ast.Constant))


def paragraphs(file: Path) -> list[str]:
    """Split what a page says, or docstrings and rules of a module: without code, and without tables made of results."""
    text = file.read_text()
    if file.suffix == ".py":
        nodes = (
            node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Module | ast.FunctionDef | ast.ClassDef)
        )
        said = [ast.get_docstring(node) or "" for node in nodes]
        rules = (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call))
        said += [words(rule.args[-1]) for rule in rules if isinstance(rule.func, ast.Name) and rule.func.id == "Rule"]
        text = "\n\n".join(said)
    if file.suffix == ".toml":
        text = text.replace("\n", "\n\n")
    return [one_line(part) for part in re.split(r"\n\n", FENCE.sub("", MADE.sub("", text)))]


@pytest.mark.parametrize(("file", "unit", "sentence", "sources"), HELD, ids=[sentence for *_, sentence, _ in HELD])
def test_a_sentence_has_the_times_of_the_committed_results(file, unit, sentence, sources):
    """To the digits that it shows, and so does one that was copied onto a page."""
    runs = json.loads((ROOT / f"docs/results/{CUDA}.json").read_text())["runs"]
    rows = {f"{row['path']}/{row['workload']}": row for run in runs for row in run["rows"]}
    found = pattern(sentence).search(one_line((ROOT / file).read_text()))
    assert found, f"{file} has no such sentence; change it here, too"
    for said, (row, contender) in zip(found.groups(), sources, strict=True):
        (entry,) = [entry for entry in rows[row]["contenders"] if entry["name"] == contender]
        digits = len(said.partition(".")[2])
        assert f"{entry['median'] / UNITS[unit]:.{digits}f}" == said, f"{row}, {contender}: {entry['median']}"


def idle(kernel: dict[str, float]) -> float:
    """Return in how many of a hundred cycles an SM has no program, on average."""
    return 100 - 100 * kernel["SM Active Cycles"] * kernel["# SMs"] / kernel["Total SM Elapsed Cycles"]


def profile() -> Profile:
    """Read the committed profile of prompts; what sections a metric is in is left out."""
    (run,) = json.loads((ROOT / f"docs/results/profiled/{CUDA}.json").read_text())["runs"]
    sections = [kernel["metrics"].values() for kernel in run["kernels"]]
    return Profile(*({name: value for section in each for name, value in section.items()} for each in sections))


@pytest.mark.parametrize("sentence", PROFILED)
def test_a_sentence_has_the_numbers_of_the_committed_profile(sentence):
    """To the digits that it shows."""
    said = pattern(sentence).search(one_line((ROOT / LAST_RUNG).read_text()))
    assert said, f"{LAST_RUNG} has no such sentence; change it here, too"
    for shown, values in zip(said.groups(), PROFILED[sentence](profile()), strict=True):
        digits = len(shown.partition(".")[2])
        assert {f"{value:.{digits}f}" for value in values} == {shown}


def at_barriers(kernel: dict[str, Any]) -> float:
    """Return for how many cycles warps waited at barriers of warps, in millions."""
    return kernel["stalls"]["barrier"] * kernel["instructions"] / 1e6


@pytest.mark.parametrize("sentence", WAITS)
def test_a_sentence_has_the_numbers_of_what_warps_wait_for(sentence):
    """To the digits that it shows."""
    (run,) = json.loads((ROOT / f"docs/results/profiled/{CUDA}.json").read_text())["stalls"]
    ours, _, fa3 = run["kernels"]
    said = pattern(sentence).search(one_line((ROOT / LAST_RUNG).read_text()))
    assert said, f"{LAST_RUNG} has no such sentence; change it here, too"
    found = [
        f"{value:.{len(shown.partition('.')[2])}f}"
        for shown, value in zip(said.groups(), WAITS[sentence](ours, fa3), strict=True)
    ]
    assert found == list(said.groups())


def test_the_page_of_states_says_how_far_prompts_are_from_their_floors():
    batches = json.loads((ROOT / f"docs/results/ladder/states-{CUDA}.json").read_text())["batches"]
    one, eight = (COUNTED[round(1 / batch["rungs"][9]["share_of_floor"])] for batch in batches[:2])
    page = one_line((ROOT / "docs/ladder/states.md").read_text())
    assert f"takes some {one} times as long, and eight prompts {eight} times (H200" in page


def test_all_profiled_kernels_give_tensor_cores_the_same_work():
    """As the page says: their busy share times all cycles, as exactly as two digits of a percent can say."""
    work = [kernel[BUSY] * kernel["Total SM Elapsed Cycles"] for kernel in profile()]
    assert len(work) == 4 and max(work) / min(work) - 1 < 0.01 / 69.66


@pytest.mark.parametrize("file", [*PAGES, *MODULES], ids=lambda file: str(file.relative_to(ROOT)))
def test_each_time_is_held_or_dated(file):
    """A paragraph with a time names its day or its commit, or a sentence of `HELD` has the time."""
    name = str(file.relative_to(ROOT))
    if name in MODELLED:
        assert f'"{name}"' in (ROOT / MODELLED[name]).read_text()
        return
    for paragraph in paragraphs(file):
        rest = paragraph
        for of_file, _, sentence, _ in HELD:
            if of_file == name:
                rest = pattern(sentence).sub("", rest)
        assert DATED.search(rest) or not TIME.search(rest), f"{name}: {TIME.search(rest)[0]}: {paragraph}"


def test_the_reference_is_as_long_as_contributing_says():
    """The files of the paths, with what they share, and those that both twins share."""
    text = " ".join((ROOT / "CONTRIBUTING.md").read_text().split())
    said = re.search(r"about ([\d,]+) lines with their docstrings; .*? are about ([\d,]+) more", text)
    files = set((ROOT / "refattn").glob("*.py"))
    shared = {file for file in files if file.stem in SHARED - {"keys"}}  # how keys are read is the reference's own
    assert {imported for file in files for imported in imported_by(file)} <= files
    for some, count in zip((files - shared, shared), said.groups(), strict=True):
        lines = sum(len(file.read_text().splitlines()) for file in some)
        assert abs(lines - int(count.replace(",", ""))) <= 100, f"{lines} lines"


def imported_by(file: Path) -> Iterator[Path]:
    """Find the files of `refattn` that one of them imports."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("refattn"):
            for name in (node.module, *(f"{node.module}.{alias.name}" for alias in node.names)):
                place = ROOT / name.replace(".", "/")
                yield from (path for path in (place.with_suffix(".py"), place / "__init__.py") if path.exists())


def test_no_command_of_the_install_page_needs_a_release_that_is_not_there():
    """Until the changelog has a version, it comes from a clone or a wheel; what will be is said after that."""
    if re.search(r"^## \[\d", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE):
        return
    install = (ROOT / "docs/install.md").read_text().split("## Into an environment of your own")[1]
    assert install.lstrip().startswith("There is no release yet.") and "pip" not in (ROOT / "README.md").read_text()
    before, _, behind = install.partition("From the first release on")
    assert "pip install twinattn" not in install and '"twinattn' not in before and behind.count('"twinattn') == 1


def test_the_readme_counts_exercises_and_notebooks():
    text = (ROOT / "README.md").read_text()
    functions = re.search(r"\[(\d+) functions to write\]", text)[1]
    assert len(list((ROOT / "notebooks/exercises").glob("[0-9]*.py"))) == int(functions)
    assert len(list((ROOT / "notebooks").glob("*.ipynb"))) == 19 and "nineteen notebooks" in text
