"""The site builds without a warning, its links lead somewhere, and every block of code on it does what it says."""

import importlib
import json
import re
import runpy
import subprocess
import sys
import textwrap
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import unquote, urldefrag

import pytest
import torch
from mkdocs.commands.build import build
from mkdocs.config import load_config
from py_mini_racer import MiniRacer

from tests.helpers.pages import FENCE, ROOT, blocks_of, run_python
from twinattn.course.drawing import animation
from twinattn.kit import isolate
from twinattn.kit.search import command as search

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
SWAP = re.compile(r"from refattn import (.*)  # or: from fastattn.*")
MAKE_TARGETS = re.findall(r"^([a-z-]+):.*## ", (ROOT / "Makefile").read_text(), re.MULTILINE)

PLAYED = ("index", "engine", "state", "one_sm")  # pages of the explorer whose settings are in the address

MARK = re.compile(
    r"<!-- (?P<name>api|code|compiled|contract|exercise|gain|kernels|ladder|measured|picture|profiled|"
    r"reports|says|tested)\b"
    r"(?P<arguments>[^:]*?) -->"
)

each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


# --- the code on the pages ---


@each_page
def test_python_on_a_page_does_what_it_says(page, monkeypatch, shapes_unchecked):
    """As a reader runs it: without our checks of shapes, which no compiler looks through."""
    monkeypatch.setitem(sys.modules, "flash_attn", None)  # a page replaces it, for the rest of the test
    run_python(page, [block for block in blocks_of(page) if block.language == "python"], monkeypatch)


@pytest.mark.parametrize(
    "page", [page for page in PAGES if SWAP.search(page.read_text())], ids=lambda page: str(page.relative_to(ROOT))
)
def test_the_other_twin_can_be_imported_instead(page, monkeypatch):
    blocks = [block for block in blocks_of(page) if block.language == "python"]
    for block in blocks:
        block.code = SWAP.sub(r"from fastattn import \1", block.code)
    run_python(page, blocks, monkeypatch)


def run_module(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> int:
    """Run `python -m` with some arguments in this process, and return the exit status."""
    with monkeypatch.context() as patch:
        patch.setattr(sys, "argv", arguments)
        try:
            runpy.run_module(arguments[0], run_name="__main__")
        except SystemExit as ended:
            return ended.code or 0
    return 0


@pytest.fixture
def in_this_process(monkeypatch):
    """Check a kernel and search a path in this process; each would start one that imports PyTorch."""

    class Process:
        def __init__(self, command: list[str], **_: Any) -> None:
            assert command[:2] == [sys.executable, "-m"]
            self.returncode = run_module(command[2:], monkeypatch)

        def poll(self) -> int:
            return self.returncode

        wait = poll

    threads = torch.get_num_threads()
    for module in (isolate, search):  # what they run in it, test_kit.py and test_search.py do in processes
        monkeypatch.setattr(module, "subprocess", SimpleNamespace(Popen=Process, DEVNULL=subprocess.DEVNULL))
    yield
    torch.set_num_threads(threads)


@each_page
@pytest.mark.filterwarnings("ignore:.*prior to execution of")  # runpy's: the module was imported before
def test_commands_on_a_page_exist(page, monkeypatch, shapes_unchecked, in_this_process):
    """Those of Python are run in this process, which has imported PyTorch already."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(
        sys, "dont_write_bytecode", True
    )  # runpy's would have the checks of shapes in it, for everybody
    for block in blocks_of(page):
        if block.language not in ("console", "sh", "bash"):
            continue
        for line in block.code.splitlines():
            command = line.removeprefix("$ ").split("  #")[0].split()
            if command and command[0] == "make":
                assert command[1] in MAKE_TARGETS, f"{page.name}:{block.line} has no such target: {line}"
            elif command and command[0] == "python":
                assert command[1] == "-m", line
                assert run_module(command[2:], monkeypatch) == 0, line


# --- the site ---


@dataclass
class Html(HTMLParser):
    """What a built page has: ids, links, things that a browser fetches, pictures and formulas."""

    ids: set[str] = field(default_factory=set)
    links: list[str] = field(default_factory=list)
    fetched: list[str] = field(default_factory=list)
    pictures: list[dict[str, str | None]] = field(default_factory=list)
    formulas: int = 0

    def __post_init__(self) -> None:
        super().__init__()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        self.ids |= {values[key] for key in ("id", "name") if values.get(key)}
        if tag == "a" and values.get("href"):
            self.links.append(values["href"])
        if tag in ("script", "img", "iframe") and values.get("src"):
            self.fetched.append(values["src"])
        if tag == "link" and values.get("rel") in ("stylesheet", "icon", "preconnect", "preload"):
            self.fetched.append(values["href"])
        if tag == "img":
            self.pictures.append(values)
        self.formulas += tag == "math"


@pytest.fixture(scope="session")
def site(tmp_path_factory) -> dict[Path, Html]:
    """Build the site, of source files only what links lead to, and read all its pages.

    As `mkdocs build --strict`, but in this process, which has imported PyTorch already.
    """
    folder = tmp_path_factory.mktemp("site")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PLAIN_SOURCES", "1")
        patch.chdir(ROOT)
        config = load_config(strict=True, site_dir=str(folder))
        config.plugins.on_startup(command="build", dirty=False)
        build(config)  # the build raises Abort after a warning; the log names it
        config.plugins.on_shutdown()
    pages = {}
    for path in folder.rglob("*.html"):
        pages[path] = Html()
        pages[path].feed(path.read_text())
    return pages


def test_links_lead_somewhere(site):
    broken = []
    for path, page in site.items():
        for link in page.links:
            url, anchor = urldefrag(unquote(link))
            if re.match(r"[a-z]+:", url) or path.name == "404.html":
                continue
            target = (path.parent / url).resolve() if url else path
            if not target.is_file():
                broken.append(f"{path.name}: {link} is not there")
            elif anchor and any(target.match(f"explorer/{name}.html") for name in PLAYED):
                continue  # settings, see test_explorer.py, test_engine_played.py, test_state_played.py, test_one_sm.py
            elif anchor and target in site and anchor not in site[target].ids:
                broken.append(f"{path.name}: {link} has no such place")
    assert not broken, "\n".join(sorted(set(broken)))


def test_nothing_is_fetched_from_elsewhere(site):
    for path, page in site.items():
        elsewhere = [url for url in page.fetched if re.match(r"(https?:)?//", url)]
        assert not elsewhere, f"{path.name} fetches {elsewhere}"
        if path.name != "404.html":
            missing = [url for url in page.fetched if not (path.parent / url.split("?")[0]).is_file()]
            assert not missing, f"{path.name} lacks {missing}"
    for sheet in next(iter(site)).parent.rglob("*.css"):
        assert not re.search(r"(@import|url\()\s*[\"']?https?:", sheet.read_text()), sheet.name


def test_answers_are_closed(site):
    """What a cell with the tag `answer` prints stands in a part of the page that the reader has to open."""
    folder = next(path for path in site if path.name == "404.html").parent
    num_answers = 0
    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        page = (folder / "notebooks" / f"{path.stem}.html").read_text()
        answers = re.findall(r'<details class="question" data-search-exclude>.*?</details>', page, re.DOTALL)
        assert page.count('<details class="question"') == len(answers), "one of them is open"
        tagged = [
            cell for cell in json.loads(path.read_text())["cells"] if "answer" in cell["metadata"].get("tags", ())
        ]
        printed = [output for cell in tagged for output in cell.get("outputs", ()) if output.get("text")]
        assert "".join(answers).count('class="output highlight"') >= len(printed)
        assert bool(tagged) == bool(answers)
        num_answers += len(answers)
    assert num_answers > 40


def test_nothing_is_left_unmade(site):
    """Formulas are MathML, inserts are filled in, and every picture says what it is."""
    assert sum(page.formulas for page in site.values()) > 20
    for path, page in site.items():
        if "source" not in path.parts:
            html = path.read_text()
            assert "arithmatex" not in html and not MARK.search(html), path.name
        assert all(picture.get("alt") for picture in page.pictures), f"{path.name} has a picture without a description"


@pytest.mark.parametrize("is_here", [True, False])
def test_a_box_says_where_an_exercise_runs(is_here, monkeypatch):
    """In the page if Python is there and no PyTorch is needed; elsewhere always."""
    monkeypatch.syspath_prepend(ROOT / "docs")
    hooks = importlib.import_module("hooks")
    monkeypatch.setattr(hooks.pyodide, "is_here", lambda: is_here)
    monkeypatch.setattr(hooks.address, "repository", lambda: "https://github.com/Owner/twins")
    slot, attend = (hooks.written(hooks.EXERCISES[number - 1], "../") for number in (1, 6))
    assert ('data-name="slot"' in slot) == is_here and "data-name" not in attend
    assert "It needs PyTorch" in attend and "`make exercises ARGS=6`" in attend and "Hint 3 of 3" in attend
    assert "twins/blob/main/notebooks/04_chunked_prefill.ipynb" in attend and "02_paged_cache.ipynb" in slot


def test_letters_of_formulas_are_in_the_glossary():
    glossary = (ROOT / "docs/glossary.md").read_text()
    known = names_in(formulas_in(glossary)) | set(re.findall(r"`(\w+)`", glossary))
    for page in [*PAGES, *sorted((ROOT / "notebooks").glob("*.ipynb"))]:
        used = names_in(formulas_in(text_of(page)))
        assert used <= known, f"{page.name} uses {sorted(used - known)}, which the glossary does not explain"


def text_of(page: Path) -> str:
    """Return what a page or a notebook says, without its code."""
    if page.suffix == ".md":
        return FENCE.sub("", page.read_text())
    cells = json.loads(page.read_text())["cells"]
    return "\n".join(FENCE.sub("", "".join(cell["source"])) for cell in cells if cell["cell_type"] == "markdown")


def formulas_in(text: str) -> str:
    return " ".join(a or b for a, b in re.findall(r"\$\$(.+?)\$\$|\$([^$\n]+?)\$", text, re.DOTALL))


def names_in(formulas: str) -> set[str]:
    """Return the letters, the words and the Greek letters of some formulas."""
    words = set(re.findall(r"\\text\{([^}]*)\}", formulas))
    rest = re.sub(r"\\text\{[^}]*\}", " ", formulas)
    greek = set(re.findall(r"\\(lambda|alpha|beta)", rest))
    letters = set(re.findall(r"[A-Za-z]", re.sub(r"\\[a-zA-Z]+", " ", rest)))
    return {word.strip() for word in words} | greek | letters


FRONT = [ROOT / "README.md", ROOT / "CONTRIBUTING.md"]  # what people meet first, on a code host
LINKED_FROM_FRONT = sorted(
    {
        (page.parent / link).resolve()
        for page in FRONT
        for link in re.findall(r"\]\(([^)\s:#]+\.md)\)", page.read_text())
    }
    - set(FRONT)
)
FILES_WITH_LINKS = [*FRONT, *LINKED_FROM_FRONT, *sorted((ROOT / "notebooks").glob("*.ipynb"))]


@pytest.mark.parametrize("page", FILES_WITH_LINKS, ids=lambda page: page.name)
def test_links_between_files_lead_somewhere(page):
    """What is read in the repository, and not on the site, links to files of the repository."""
    for link in re.findall(r"\]\(([^)\s]+)\)", text_of(page)):
        if not re.match(r"[a-z]+:|#", link):
            assert (page.parent / urldefrag(link).url).exists(), f"{page.name} links to {link}"


def test_private_functions_that_pages_name_are_there():
    """Tables of the ladders name functions inside kernels; those of servers are looked up in their wheels."""
    sources = (
        file for part in ("refattn", "fastattn", "twinattn", "notebooks") for file in (ROOT / part).rglob("*.py")
    )
    known = {word for file in sources for word in re.findall(r"\w+", file.read_text())}
    named = {
        (str(page.relative_to(ROOT)), name)
        for page in (ROOT / "docs").rglob("*.md")
        if page.name != "servers.md"
        for code in re.findall(r"`([^`\n]+)`", page.read_text())
        for name in re.findall(r"(?<![\w.])_[a-z]\w+", code)
    }
    assert len(named) > 15
    assert {(page, name) for page, name in named if name not in known} == set()


@each_page
def test_a_page_can_be_read_on_a_code_host(page):
    """A page is plain Markdown: no syntax that only the site knows, and beside each mark a link or a caption."""
    text = page.read_text()
    assert not re.search(r"\{\{|\{%|^ *(!!!|\?\?\?|===) ", text, re.MULTILINE)
    for mark in MARK.finditer(text):
        line = text[text.rfind("\n", 0, mark.start()) + 1 : mark.start()].strip()
        arguments = mark["arguments"].split()
        if mark["name"] == "picture":
            assert re.fullmatch(rf"\*.+\* \(`twinattn draw {arguments[0]}` draws it\.\)", line), mark[0]
            continue
        (link,) = re.findall(r"\]\(([^)\s]+)\)", line)
        assert (page.parent / urldefrag(link).url).exists(), f"{page.name} links to {link}"
        if mark["name"] in ("code", "says"):
            module = link.removeprefix("../" * link.count("../")).removesuffix(".py").replace("/", ".")
            assert f"{arguments[0]}.".startswith(f"{module}."), f"{page.name}: {link} is not the file of {arguments[0]}"


def test_the_benchmark_shows_the_committed_measurements(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "docs")
    tables = importlib.import_module("readme").tables()
    assert tables.count("\n") > 8
    assert tables in (ROOT / "docs/proof/benchmark.md").read_text(), "`make readme` writes them"


def test_the_page_of_the_field_shows_the_committed_results(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "docs")
    readme = importlib.import_module("readme")
    shown = readme.honoured()
    assert shown.count("\n## ") + 1 == len(list((ROOT / "docs/results/conformance").glob("*.json")))
    assert shown in readme.FIELD.read_text(), "`make readme` writes it"


def test_pages_of_servers_show_the_committed_measurements(monkeypatch, tmp_path):
    """Servers under one load, the fastest first, by the median of the rounds after the first."""
    monkeypatch.syspath_prepend(ROOT / "docs")
    readme = importlib.import_module("readme")
    vllm, sglang = ((ROOT / f"docs/integrations/{name}.md").read_text() for name in ("vllm", "sglang"))
    assert readme.served("vLLM") in vllm and readme.inside() in vllm, "`make readme` writes them"
    assert readme.served("SGLang") in sglang, "`make readme` writes it"
    seconds = {"nano-vllm": (1.0, 4.0, 2.0, 5.0), "vLLM, FASTATTN": (9.0, 1.0, 1.25, 1.0)}
    rounds = [
        dict(
            server=server, temperature=0.0, number=i, tokens=5000, seconds=time, first=[0.1, 0.2], between=[0.01, 0.02]
        )
        for server, times in seconds.items()
        for i, time in enumerate(times)
    ]
    warmer = dict(rounds[-1], temperature=0.6, seconds=0.1)
    untold = [dict(one, server="SGLang, triton", seconds=5.0, first=None, between=None) for one in rounds[:2]]
    shown = readme.served_rounds("A GPU", dict(model="qwen3-8b", rounds=[*rounds, warmer, *untold])).splitlines()
    assert shown[0].startswith("| A GPU, qwen3-8b | tokens/s | first token |")
    in_int4 = dict(model="qwen3-8b", kv_cache_dtype="int4", rounds=rounds)
    assert readme.served_rounds("A GPU", in_int4).startswith("| A GPU, qwen3-8b, cache of int4 | tokens/s |")
    of_sglang = readme.served_rounds("A GPU", dict(model="qwen3-8b", rounds=[dict(one, number=1) for one in untold]))
    assert of_sglang.splitlines() == ["| A GPU, qwen3-8b | tokens/s |", "|---|--:|", "| SGLang, triton | 1,000 |"]
    head = dict(machine=dict(name="A GPU"), date="2026-01-02T03:04", versions=dict(torch="2.13.0"))
    (tmp_path / "load.json").write_text(json.dumps(in_int4 | head))
    monkeypatch.setattr(readme, "LOADS", tmp_path)
    assert readme.load().startswith("| A GPU, 2026-01-02, qwen3-8b, cache of int4, torch 2.13.0 | temperature |")
    assert shown[2:] == [
        f"| {server} | {rate} | 100\u00a0ms | 200\u00a0ms | 10\u00a0ms | 20\u00a0ms |"
        for server, rate in (("vLLM, FASTATTN", "5,000"), ("nano-vllm", "1,250"))
    ] + ["| SGLang, triton | 1,000 |  |  |  |  |"]


def test_every_row_behind_its_best_peer_has_its_reason(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    behind = importlib.import_module("behind")
    assert behind.table() in (ROOT / "docs/proof/benchmark.md").read_text(), "`make readme` writes it"
    first = next(behind.rows())
    assert first.ours > 1.02 * first.its and first.row in behind.REASONS.read_text()
    monkeypatch.setattr(behind, "LIMITS", {"cuda": 1.0, "cpu": 1e9})
    with pytest.raises(
        ValueError, match=r"rows without a reason: \['cuda.*; reasons of rows that are not behind: \['cpu"
    ):
        behind.table()


def test_a_report_of_a_users_gpu_is_shown(monkeypatch, tmp_path):
    """Each part by what it found, or where it found nothing by how it ended."""
    monkeypatch.syspath_prepend(ROOT / "docs")
    hooks = importlib.import_module("hooks")
    head = dict(date="2026-01-02T03:04:05+00:00", commit=None, versions=dict(torch="2.13.0", triton=None))
    doctor = dict(devices={"CPU": {"decode": dict(taken="cpu")}, "cuda:0, A GPU": {"decode": dict(taken=None)}})
    search = dict(paths=[dict(path="merge", calls={"cpu": dict(right=3, refused=1)}, findings=[{}])])
    bench = json.loads((ROOT / "docs/results/cpu-intel-xeon.json").read_text())
    kit = json.loads((ROOT / "docs/results/conformance/cpu-amd-epyc.json").read_text())
    parts = {
        name: dict(exit_status=0, seconds=90.0, found=found)
        for name, found in dict(doctor=doctor, search=search, bench=bench, kit=kit).items()
    }
    parts["tests"] = dict(exit_status=None, seconds=7200.0, found=None, last_lines=["it hung", "here"])
    report = dict(head, machine=dict(name="A GPU"), parts=parts)
    (tmp_path / "reports").mkdir()
    monkeypatch.setattr(hooks, "RESULTS", tmp_path)
    assert hooks.reports(None, "") == "There are none yet."
    (tmp_path / "reports/a-gpu.json").write_text(json.dumps(report))
    shown = hooks.reports(None, "")
    assert "### A GPU\n\n2026-01-02, 03:04 UTC, commit unknown; torch 2.13.0." in shown
    for line in (
        "| decode | cpu | none |",
        "| merge | 4 | 1 |",
        '??? note "tests: 120.0 minutes, over time"',
        "    here",
    ):
        assert line in shown
    assert "`decode-16x4096`" in shown and hooks.field.tables(kit).splitlines()[-1] in shown


def test_the_moving_picture_is_that_of_the_code():
    assert (ROOT / "docs/assets/step.svg").read_text() == animation.animation(), "`make readme` writes it"


@pytest.mark.parametrize("name", ["exercises", "puzzles"])
def test_the_page_of_exercises_lists_all_of_them(name, monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "docs")
    made = getattr(importlib.import_module("readme"), name)()
    begin, end = f"<!-- {name}: made by docs/readme.py -->", f"<!-- end of {name} -->"
    shown = (ROOT / "docs/exercises.md").read_text().partition(begin)[2].partition(end)[0]
    assert shown.strip() == made, "`make readme` writes it"


def matrix_cell(**changes) -> dict[str, Any]:
    """Make a result of a cell of `make matrix`."""
    cell = dict(
        asked=dict(blas="Zen", aten="avx2", threads=8),
        found=dict(python="3.12.1", blas="Haswell", aten="AVX2", threads=2),
        arguments=[],
        left_out=["tests/tools/test_twins.py"],
        date="2026-01-02T03:04:05+00:00",
        commit="0123456789ab",
        versions=dict(python="3.12.1", torch="2.11.0"),
        counts=dict(passed=11, failed=1, skipped=2),
        not_passed=["tests/paths/test_merge.py::test_one"],
        exit_status=1,
        seconds=90,
    )
    return cell | changes


def test_a_matrix_of_environments_is_a_table(monkeypatch):
    """A row per cell: what it ran as, and how many tests passed of how many; a run that was cut short says so."""
    monkeypatch.syspath_prepend(ROOT / "docs")
    alike = dict(python="3.11.7", blas="SkylakeX", aten="AVX512", threads=1)
    plain = dict(
        asked=dict(blas="SkylakeX", aten="avx512", threads=1), found=alike, left_out=[], counts=dict(passed=20)
    )
    crashed = dict(date=None, commit=None, versions=None, counts=None, not_passed=None, exit_status=3)
    results = dict(
        what="The tests in environments.",
        unaffected={"tests/tools/test_twins.py": "reads signatures"},
        machine=dict(name="A Processor", cores=2),
        cells={
            "0": matrix_cell(**plain, not_passed=[], exit_status=0, date="2026-01-01T00:00:00+00:00"),
            "4": matrix_cell(),
            "5": matrix_cell(**crashed),
            "6": matrix_cell(arguments=["-k", "merge"]),
        },
    )
    shown = importlib.import_module("hooks").outcomes(json.loads(json.dumps(results)))
    rows = [line.strip("| ").split(" | ") for line in shown.splitlines() if line.startswith("|")][2:]
    assert rows == [
        ["SkylakeX", "avx512", "1", "3.11.7", "0123456789ab", "20 of 20", "1.5"],
        ["Zen (Haswell)", "avx2", "8 (2)", "3.12.1", "0123456789ab", "11 of 14", "1.5"],
        ["Zen (Haswell)", "avx2", "8 (2)", "3.12.1", "unknown", "none: exit 3", "1.5"],
        ["Zen (Haswell)", "avx2", "8 (2)", "3.12.1", "0123456789ab", "11 of 14<br>`-k merge`", "1.5"],
    ]
    assert "A Processor\n\nOn 2 cores, 2026-01-01 to 2026-01-02." in shown
    assert shown.count("`tests/paths/test_merge.py::test_one`") == 1
    assert "`tests/tools/test_twins.py`, which reads signatures" in shown


def test_features_broken_on_purpose_are_a_table(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "docs")
    results = dict(
        **dict(date="2026-01-01T00:00:00+00:00", commit="0123456789ab", versions=dict(torch="2.13.0", triton=None)),
        machine=dict(name="A Processor"),
        mutants={"A1": {"refattn/a.py: nothing is copied": "caught", "fastattn/a.py: nothing is copied": "survives"}},
    )
    shown = importlib.import_module("hooks").outcomes(results)
    assert "commit 0123456789ab; torch 2.13.0. 1 of 2 times a marked test failed." in shown
    assert "| A1 | fastattn/a.py: nothing is copied | survives |" in shown


def test_a_sample_of_mutants_is_counted_by_file(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "docs")
    caught = dict(verdict="caught", by="tests/a.py::test")
    survivor = dict(verdict="survived", function="add", old="a | b", new="a & b", judgement="equivalent: b is 0")
    results = dict(
        **dict(date="2026-01-01T00:00:00+00:00", commit="0123456789ab", versions=dict(torch="2.13.0", triton=None)),
        **dict(machine=dict(name="A Processor"), tool="mutmut 3.8.1", seed=0),
        files={"refattn/a.py": dict(made=9, mutants={"1": caught, "2": survivor})},
    )
    shown = importlib.import_module("hooks").outcomes(results)
    assert "A sample of the mutants of mutmut 3.8.1\n\nA Processor" in shown and "torch 2.13.0; seed 0." in shown
    assert "| `refattn/a.py` | 9 | 2 | 1 | 1 | 0 |" in shown
    assert shown.endswith("| `refattn/a.py`, `add` | `a \\| b` becomes `a & b` | survived | equivalent: b is 0 |")


def test_what_the_core_does_not_catch_is_a_table(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "docs")
    results = dict(
        **dict(date="2026-01-01T00:00:00+00:00", commit="0123456789ab", versions=dict(torch="2.13.0", triton=None)),
        machine=dict(name="A Processor"),
        core={
            "A1 | refattn.a:copy | nothing is copied": {"verdict": "caught", "by": "tests/a.py::test_a"},
            "at large | fastattn.b | no b": {
                "verdict": "missed",
                "held by": ["tests/engine/test_b.py"],
                "judgement": "slow",
            },
        },
    )
    shown = importlib.import_module("hooks").outcomes(results)
    assert "The tests of `make test` alone catch 1 of 2 bugs; the others:" in shown
    assert shown.endswith("\n| at large, fastattn.b, no b | missed | tests/engine/test_b.py | slow |")


@pytest.mark.parametrize(("collected", "says"), [(5, "; 2 of 5 had not finished"), (3, "1 failed."), (2, "1 failed.")])
def test_more_outcomes_than_tests_leave_none_unfinished(collected, says, monkeypatch):
    """A test that fails, and once more when it is torn down, has two outcomes."""
    monkeypatch.syspath_prepend(ROOT / "docs")
    results = dict(
        **dict(date="2026-01-01T00:00:00+00:00", commit="0123456789ab", versions={}, machine=dict(name="A Processor")),
        **dict(
            collected=collected, all=dict(passed=2, failed=1), by_file={}, by_kernel={}, not_passed=[], device="cpu"
        ),
    )
    assert says in importlib.import_module("hooks").outcomes(results)


def test_every_result_of_the_tests_is_shown(monkeypatch):
    """Whatever kinds of files lie in docs/results/tests, and more than one of a kind."""
    monkeypatch.syspath_prepend(ROOT / "docs")
    hooks = importlib.import_module("hooks")
    files = sorted(hooks.RESULTS.glob("tests/*.json"))
    assert files
    shown = hooks.tested(None, "")
    for file in files:
        text, table = hooks.outcomes(json.loads(file.read_text())).rsplit("\n\n", 1)
        assert f"{text}\n\n" in shown
        assert textwrap.indent(table, "    ") in shown


def test_every_word_of_the_glossary_can_be_found_without_a_server(site):
    """The index of a site that is opened as a file is a script, and each word is an entry of its own."""
    root = next(path for path in site if path.name == "404.html").parent
    index = json.loads((root / "search/search_index.js").read_text().removeprefix("var __index = "))
    titles = {entry["title"] for entry in index["docs"] if entry["location"].startswith("glossary.html#")}
    words = re.findall(r'<h4 id="[^"]+">(.+?)</h4>', (ROOT / "docs/glossary.md").read_text())
    assert len(words) > 40
    assert set(words) <= titles
    assert {
        "GQA",
        "MQA",
        "MLA",
        "RoPE",
        "HBM",
        "arithmetic intensity",
        "continuous batching",
        "flash decoding",
    } <= titles
    start = site[root / "index.html"].fetched
    worker = next(i for i, url in enumerate(start) if url == "assets/iframe-worker.js")
    assert any("bundle" in url for url in start[worker:]), "the theme starts its search before there is a worker"


class Search:
    """The search of the site, as a browser runs it: the theme's worker in V8, over the index that was built."""

    def __init__(self, root: Path) -> None:
        self.racer = MiniRacer()
        index = (root / "search/search_index.js").read_text().removeprefix("var __index = ")
        (worker,) = root.glob("assets/javascripts/workers/search.*.min.js")
        self.racer.eval(
            "var self = globalThis, answer, console = {warn() {}};"
            "function addEventListener(name, handler) { self.ask = message => handler({data: message}); }"
            "function postMessage(message) { answer = message; }"
        )
        self.racer.eval(worker.read_text())
        self.racer.eval(f"var index = {index}; ask({{type: 0, data: {{...index, options: {{suggest: false}}}}}})")

    def __call__(self, words: str) -> list[list[tuple[str, str]]]:
        """Return the titles and the places that are found, page by page, best first."""
        self.racer.eval(f"ask({{type: 2, data: {json.dumps(words)}}})")
        pages = json.loads(self.racer.eval("JSON.stringify(answer.data.items)"))
        return [[(re.sub("<[^>]+>", "", item["title"]), item["location"]) for item in page] for page in pages]


def test_identifiers_are_found_whole_and_by_their_parts(site):
    root = next(path for path in site if path.name == "404.html").parent
    search = Search(root)
    found = search("cu_seqlens_q")
    assert 0 < len(found) < 25
    for page in found:
        text = (root / page[0][1].split("#")[0]).read_text()
        assert "cu_seqlens_q" in re.sub("<[^>]+>", "", text), page
    for words in ("slot_mapping", "split_decodes_and_prefills"):
        assert search(words)[0][0][0] == words
    assert any(title == "slot_mapping" for page in search("mapping")[:6] for title, _ in page)
    assert any("refattn.batch.Batch" in place for page in search("seqlens") for _, place in page)
    british, american = ({page[0][1].split("#")[0] for page in search(word)} for word in ("quantised", "quantized"))
    assert british == american and {"paths/quantized.html", "reference/refattn.html"} <= british


def test_the_search_leaves_out_answers_and_hints(site):
    root = next(path for path in site if path.name == "404.html").parent
    index = json.loads((root / "search/search_index.js").read_text().removeprefix("var __index = "))
    said = "\n".join(entry["text"] for entry in index["docs"])
    assert "Twice as long, and it makes 64 tokens" in (root / "notebooks/01_ragged_batch.html").read_text()
    assert "Twice as long, and it makes 64 tokens" not in said and "Hint 1 of" not in said
    search = Search(root)
    assert search("occupancy") and search("num_stages") and search("wgmma")
    assert search("seqused_k")[0][0][1].startswith("reference/arguments.html")


def test_a_page_says_what_it_is_to_those_who_link_to_it(site):
    root = next(path for path in site if path.name == "404.html").parent
    said = {}
    for path in ("index.html", "paths/cascade.html", "notebooks/03_merge.html"):
        tags = dict(re.findall(r'<meta property="(og:[\w:]+)" content="([^"]*)">', (root / path).read_text()))
        assert tags["og:site_name"] == "twinattn" and 40 < len(tags["og:description"]) < 400
        assert "[" not in tags["og:description"] and "og:image" not in tags  # an image needs an address
        said[path] = tags["og:description"]
    assert len(set(said.values())) == 3
    assert (root / "assets/preview.png").read_bytes()[16:24] == (1200).to_bytes(4) + (630).to_bytes(4)


def test_what_a_page_says_where_the_site_has_an_address(monkeypatch):
    """All of it is made of the repository's; a description is text, and a notebook has a way to Colab."""
    monkeypatch.syspath_prepend(ROOT / "docs")
    finding = importlib.import_module("finding")
    monkeypatch.setattr(finding.address, "repository", lambda: "https://github.com/Owner/twins")
    config = SimpleNamespace(site_name="twinattn", site_description="It.", site_url="", extra={})
    assert finding.on_config(config).site_url == "https://owner.github.io/twins/"
    assert config.repo_url == "https://github.com/Owner/twins" and config.repo_name == "Owner/twins"
    page = SimpleNamespace(meta={}, title="Merge", canonical_url=f"{config.site_url}m.html")
    page.file = SimpleNamespace(src_uri="notebooks/03_merge.md")
    markdown = finding.on_page_markdown("# M\n\n> *A* [b](c.md)\n> `d` <x>\n\ne", page=page, config=config, files=None)
    assert page.meta["description"] == "A b d"
    assert markdown.startswith("# M\n\n[Open in Colab](https://colab.research.google.com/github/Owner/twins/blob/main/")
    tags = finding.on_post_page("<head></head>", page=page, config=config)
    assert 'og:image" content="https://owner.github.io/twins/assets/preview.png"' in tags
    assert 'og:url" content="https://owner.github.io/twins/m.html"' in tags
    config.site_url += "dev"  # as mike has it
    tags = finding.on_post_page("<head></head>", page=page, config=config)
    assert 'og:image" content="https://owner.github.io/twins/dev/assets/preview.png"' in tags
    finding.SEEN.setdefault("top", set())
    wrong = '<head><script id="__config">{"base": "/twins/dev"}</script><a href="/twins/dev/paths/a.html"></a>'
    assert 'href="./paths/a.html"' in finding.on_post_template(wrong, template_name="404.html", config=config)
    page.file.src_uri = "paths/merge.md"
    assert finding.on_page_markdown("# M", page=page, config=config, files=None) == "# M"


def test_programs_find_every_page(site):
    root = next(path for path in site if path.name == "404.html").parent
    text = (root / "llms.txt").read_text()
    nav = re.findall(r"^ +- (?:\w+: )?(\S+)\.md$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    links = re.findall(r"^- \[.+?\]\((.+?)\): \S", text, re.MULTILINE)
    assert sorted(links) == sorted(f"{page}.html" for page in nav)
    assert all((root / link).is_file() for link in links)
    assert text.startswith("# twinattn\n\n> ") and "\n## Learn\n" in text


@pytest.mark.parametrize(
    ("asked", "top", "style"),
    [
        ("/nothing.html", "/", "/"),
        ("/twins/nothing.html", "/twins/", "/twins/"),
        ("/twins/dev/paths/nothing.html", "/twins/dev/", "/twins/dev/"),
        ("/twins/notebooks/deep/down/", "/twins/", "/twins/"),
        ("/no/such/folder.html", "/", "/"),
        ("/twins/no/such/folder.html", "/twins/", "/twins/"),
        ("/no/such/server.html", "/no/such/", None),  # nothing answers
    ],
)
def test_the_page_of_wrong_addresses_finds_the_site(asked, top, style, site):
    """Its links are relative to the top of the site, which a script finds, whatever folder the site is in."""
    page = next(path for path in site if path.name == "404.html")
    assert top_found(page.read_text(), asked, style) == top
    local = [url for url in site[page].links + site[page].fetched if not re.match(r"[a-z]+:|#", url)]
    assert len(local) > 20 and not [url for url in local if url.startswith("/")]
    assert all((page.parent / urldefrag(unquote(url)).url.split("?")[0]).exists() for url in local)


def top_found(text: str, asked: str, style: str | None = None) -> str:
    """Return the address that the 404 page finds as the top of the site, when a wrong address is asked for.

    The style of the site is in the folder `style`, as the server says that the page asks.
    """
    script = re.search(r"<head>\s*<script>(.*?)</script>", text, re.DOTALL)[1]
    racer = MiniRacer()
    racer.eval("var self = globalThis, said = '', document = {write(text) { said += text; }};")
    racer.eval(f"var location = {{pathname: {asked!r}}};")
    racer.eval(
        "function XMLHttpRequest() {} XMLHttpRequest.prototype = {open(_, address) { this.address = address; },"
        f"send() {{ this.status = this.address === {f'{style}assets/site.css'!r} ? 200 : 404; }}}};"
    )
    config = re.search(r'<script id="__config"[^>]*>(.*?)</script>\s*<script>(.*?)</script>', text, re.DOTALL)
    racer.eval(f"var element = {{textContent: {json.dumps(config[1])}}}; document.getElementById = () => element;")
    racer.eval(script)
    racer.eval(config[2])
    top = json.loads(racer.eval("element.textContent"))["base"]
    assert racer.eval("said") == f'<base href="{top}">'
    return top


@pytest.mark.parametrize(
    ("asked", "top", "root"),
    [
        ("/twins/nothing.html", "/twins/stable/", "/twins/"),
        ("/twins/paths/nothing.html", "/twins/stable/", "/twins/"),
        ("/twins/dev/paths/nothing.html", "/twins/dev/", "/twins/"),
        ("/twins/v0.1.0/nothing.html", "/twins/v0.1.0/", "/twins/"),
        ("/twins/v0.0.9/paths/nothing.html", "/twins/stable/", "/twins/"),  # a version that is gone
        ("/dev/stable/nothing.html", "/dev/stable/", "/dev/"),  # a repository with a version's name
        ("/dev/nothing.html", "/dev/stable/", "/dev/"),
        ("/nothing.html", "/stable/", "/"),
        ("/twins/nothing.html", "/twins/stable/", ""),
        ("/twins/dev/deep/nothing.html", "/twins/dev/", ""),
        ("/twins/notebooks/nothing.html", "/twins/stable/", ""),
    ],
)
def test_the_page_of_wrong_addresses_at_the_root_finds_a_version(asked, top, root, site, monkeypatch):
    """Where versions are beside one another, Pages shows one page for all."""
    monkeypatch.syspath_prepend(ROOT / "docs")
    at_root = importlib.import_module("finding").at_root
    text = next(path for path in site if path.name == "404.html").read_text()
    of_all = at_root(text, ["dev", "v0.1.0", "stable"], "stable", root)
    assert top_found(of_all, asked) == top
    with pytest.raises(ValueError, match="of one version"):
        at_root(of_all, [], "dev")


def test_no_signature_is_wider_than_a_page(site):
    for page in (path for path in site if path.parent.name == "reference"):
        signatures = re.findall(r'<div class="[^"]*doc-signature[^"]*".*?</pre>', page.read_text(), re.DOTALL)
        lines = [line for each in signatures for line in re.sub("<[^>]+>", "", each).splitlines()]
        assert max(map(len, lines), default=0) <= 130, page.name


def test_the_newcomers_way(site):
    """From the README to notebook 1, from there or from the start page to a path, and on it is the reference."""
    assert "(notebooks/01_ragged_batch.ipynb)" in (ROOT / "README.md").read_text()
    start = next(path for path in site if path.name == "index.html" and (path.parent / "notebooks").is_dir())
    first = (start.parent / "notebooks/01_ragged_batch.html").resolve()
    assert "notebooks/01_ragged_batch.html" in site[start].links
    assert any((first.parent / link).resolve() == start.parent / "paths/metadata.html" for link in site[first].links)
    assert "refattn/metadata.py" in (start.parent / "paths/metadata.html").read_text()


def test_no_script_of_the_docs_is_a_page():
    """What builds the site is no part of it: `make docs` would copy each file that is not excluded."""
    config = (ROOT / "mkdocs.yml").read_text()
    excluded = config.split("exclude_docs: |\n")[1].split("\n\n")[0].split()
    assert {file.name for file in (ROOT / "docs").glob("*.py")} <= set(excluded)
