"""What the site generates: pictures, tables of measurements, formulas, notebooks and source files.

In a page, a line that ends with a comment is replaced by what the function of that name in `INSERTS` returns. What
stands before the comment is for those who read the page on a code host, which hides comments: a link, or a caption.

    *Caption.* ... <!-- picture local -->                   an example of twinattn.course.drawing, drawn with the site
    [...](...) <!-- code refattn.local.attention -->        a function as it stands in its file, without its docstring
    [...](...) <!-- code refattn.local.plan whole -->       and with it
    ... <!-- says fastattn.cascade -->                      what a file says of itself, after its first sentence
    ... <!-- kernels -->                                    the kernels, and what each is
    ... <!-- rules -->                                      which kernel goes first, and what that rests on
    ... <!-- measured local -->                             the measured rows of a path
    ... <!-- parts -->                                      the launches of calls, and how long each takes
    ... <!-- profiled chunked_prefill -->                   what a profiler counted in launches of a path, side by side
    ... <!-- tested -->                                     the results of the tests on other machines and processors
    ... <!-- reports -->                                    what `make gpu-report` wrote on machines of others
    ... <!-- contract -->                                   the properties that a kernel is checked for
    ... <!-- contract varlen_backward -->                    those of its gradients
    ... <!-- api refattn -->                                what the docstrings of a package say
    ... <!-- ladder decode -->                              the rungs of a ladder: changes, questions, measurements
    | ... | <!-- gain prefill 3 -->                         what a rung of a ladder gained, as another cell of the row
    ... <!-- compiled decode mla -->                        the kernel of calls, as the compiler sees it
    ... <!-- exercise slot -->                              the box in which an exercise is written
    ... <!-- progress -->                                   how many questions of the notebooks a reader answered

A notebook becomes a page of its own, and so does every source file. A page links to the file in the repository, so that
the link leads somewhere on a code host too; the site turns it into one to the file's page. A link whose text names a
test leads to the line of that test, which must exist:

    [`refattn/local.py`](../../refattn/local.py)
    [`test_strided_parts`](../../tests/paths/test_merge.py)
"""

import ast
import base64
import functools
import html
import json
import os
import posixpath
import re
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import address
import folds
import ladders
import profiles
import pyodide
from latex2mathml.converter import convert as latex_to_mathml
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page
from readme import RESULTS, ROOT, duration, exercise_of, fastest_peer, places

from fastattn.kernels import order
from twinattn.bench import clocks
from twinattn.course import drawing
from twinattn.course.exercises import in_page, learner, lists, predict
from twinattn.course.exercises.exercise import Exercise
from twinattn.course.exercises.functions import EXERCISES
from twinattn.kit import field
from twinattn.kit.properties import PROPERTIES, of_path
from twinattn.kit.property import ATTENDS

INSERT = re.compile(r"^(?P<instead>.+) <!-- (?P<name>\w+)(?P<arguments>.*?) -->$", re.MULTILINE)
CAPTION = re.compile(r"\*(.+?)\* ")
LINK_TO_SOURCE = re.compile(r"\[(?P<text>[^\]]*)\]\((?P<path>[^)\s]+\.(?:py|c))\)")
LINK_TO_NOTEBOOK = re.compile(r"\]\((?:\.\./)+notebooks/(?P<name>\w+)\.ipynb")
LINK_TO_EXPLORER = re.compile(r"\[([^\]]*)\]\(((?:\.\./)*explorer/(?:index|engine|state|one_sm))\.md(#[^)\s]+)\)")
FEW_TABLES = 3  # tables of trials that a page shows at once
ANSWER = "What do you think? Open the answer"
FORMULA = re.compile(r'<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>', re.DOTALL)
FOLDED = re.compile(r'<details class="(?:question|tip)"')  # answers and hints, which the search does not print
SOURCE_OF_IDEA = re.compile(
    r'<details class="source" open>\s*<summary>(.*?)</summary>\s*(?:<p>(.*?)</p>)?\s*</details>', re.DOTALL
)
DEFINITION = re.compile(r" *(async def|class|def) ")
SOURCES = (
    *("refattn/**/*.py", "fastattn/**/*.py", "fastattn/**/*.c", "twinattn/**/*.py"),
    *("tests/**/*.py", "notebooks/exercises/**/*.py", "notebooks/ladder/**/*.py", "docs/exhibits.py"),
)


# --- what mkdocs calls ---


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Add the pages of notebooks and source files, and the pictures."""
    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        for name, content in notebook_files(path):
            files.append(File.generated(config, name, content=content))
    for name in drawing.EXAMPLES:
        files.append(File.generated(config, f"pictures/{name}.svg", content=drawing.example(name)._repr_svg_()))
    files.append(File.generated(config, "assets/exercises/in_page.py", content=Path(in_page.__file__).read_text()))
    for exercise in (each for each in EXERCISES if each.in_page):
        name = f"assets/exercises/{exercise.name}.json"
        files.append(File.generated(config, name, content=lists.of_exercise(exercise)))
    for path in source_files():
        name = page_of(path)
        if os.environ.get("PLAIN_SOURCES"):  # for tests: pages of hundreds of files take most of a build
            files.append(File.generated(config, name, content="", inclusion=InclusionLevel.EXCLUDED))
            files.append(File.generated(config, f"{name.removesuffix('.md')}.html", content=places_in(path)))
            continue
        files.append(File.generated(config, name, content=source_page(path), inclusion=InclusionLevel.NOT_IN_NAV))
    return files


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Replace the inserts of a page."""

    def insert(match: re.Match[str]) -> str:
        name = match["name"]
        if name not in INSERTS:
            raise PluginError(f"{page.file.src_uri}: no insert is called {name!r}; there are {', '.join(INSERTS)}")
        return INSERTS[name](page, match["instead"], *match["arguments"].split())

    if page.file.src_uri.startswith(("source/", "notebooks/")):  # their links are turned where they are made
        return markdown
    markdown = LINK_TO_SOURCE.sub(lambda match: link(page, **match.groupdict()), markdown)
    markdown = LINK_TO_NOTEBOOK.sub(lambda match: f"]({to(page, 'notebooks/' + match['name'])}.md", markdown)
    return INSERT.sub(insert, LINK_TO_EXPLORER.sub(r'<a href="\2.html\3">\1</a>', markdown))


def on_page_content(content: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Make MathML of formulas, and a paragraph of a docstring's source; keep answers and hints from the search."""

    def formula(match: re.Match[str]) -> str:
        display = "inline" if match[1] == "span" else "block"
        return latex_to_mathml(html.unescape(match[2]), display=display)

    content = SOURCE_OF_IDEA.sub(r"<p><strong>Source:</strong> \1 \2</p>", FORMULA.sub(formula, content))
    return FOLDED.sub(r"\g<0> data-search-exclude", content)


# --- inserts ---


def code(page: Page, instead: str, name: str, extent: str = "") -> str:
    """Show a function as it stands in its file, less its docstring unless it is to be whole."""
    path, function = module_file(name), name.split(".")[-1]
    lines = path.read_text().splitlines()
    node = definition(path, function)
    body = node.body[1:] if ast.get_docstring(node) and extent != "whole" else node.body
    shown = lines[node.lineno - 1 : node.body[0].lineno - 1] + lines[body[0].lineno - 1 : node.end_lineno]
    source = textwrap.dedent("\n".join(shown))
    return f'```{{.python title="{path.relative_to(ROOT).as_posix()}"}}\n{source}\n```'


def says(page: Page, instead: str, module: str) -> str:
    """Show what a file says of itself, after its first sentence."""
    _, _, rest = documentation(module_file(module)).partition("\n\n")
    return re.sub(r"^Source: .*", "", rest, flags=re.MULTILINE | re.DOTALL)


def kernels(page: Page, instead: str) -> str:
    """List the kernels, with the first sentence of each file."""
    lines = ["| kernel | what it is |", "|---|---|"]
    for name, module in order.MODULES.items():
        path = module_file(module.partition(":")[0])
        sentence = documentation(path).split("\n\n")[0].replace("\n", " ")
        lines.append(f"| [`{name}`]({to(page, page_of(path))}) | {sentence} |")
    return "\n".join(lines)


def rules(page: Page, instead: str) -> str:
    """List the rules that say which kernel goes first."""
    lines = ["| where | kernels | measured |", "|---|---|---|"]
    for rule in order.RULES:
        measured = " ".join(rule.measured.split()).replace("*", "\\*")
        lines.append(f"| {rule.name} | {', '.join(f'`{name}`' for name in rule.kernels)} | {measured} |")
    return "\n".join(lines)


def exercise(page: Page, instead: str, name: str) -> str:
    """Show the box of an exercise."""
    found = next(exercise for exercise in EXERCISES if exercise.name == name)
    return written(found, posixpath.relpath(".", posixpath.dirname(page.file.src_uri)) + "/")


def api(page: Page, instead: str, package: str) -> str:
    """Describe a package from its docstrings: its modules, and of a folder that exports names those names."""
    folder = ROOT / package
    modules = [path.stem for path in folder.glob("*.py") if not path.stem.startswith("_")]
    folders = [path.parent.name for path in folder.glob("*/__init__.py") if "__all__" in path.read_text()]
    return "\n\n".join(f"::: {package}.{name}" for name in sorted(modules + folders))


def picture(page: Page, instead: str, name: str) -> str:
    """Draw a picture. Its caption, which says what to see in it, is what stands between asterisks in the page."""
    if name not in drawing.EXAMPLES:
        raise PluginError(
            f"{page.file.src_uri}: no picture is called {name!r}; there are {', '.join(drawing.EXAMPLES)}"
        )
    caption = CAPTION.match(instead)
    if not caption:
        raise PluginError(f"{page.file.src_uri}: the picture {name!r} has no *caption* before its mark")
    return figure(to(page, f"pictures/{name}.svg"), caption[1])


def measured(page: Page, instead: str, path: str = "") -> str:
    """Show the measured rows of a path in short, or all of each machine."""
    results = {file: json.loads(file.read_text())["runs"] for file in sorted(RESULTS.glob("*.json"))}
    if not path:
        return "\n\n".join(machine(page, *item) for item in results.items())
    rows: dict[str, list[dict[str, Any]]] = {}  # rows per machine
    for run in (run for runs in results.values() for run in runs):
        rows.setdefault(f"{run['machine']['name']}, {run['dtype']}", []).extend(
            row for row in run["rows"] if row["path"] == path
        )
    shown = "\n\n".join(f"*{name}*\n\n{in_short(some)}" for name, some in rows.items() if some)
    return (
        f"## Measured\n\n{shown}\n\n*Floor* is the least time that the work takes at the rates of that machine. "
        "What was measured, and how: [benchmark](../proof/benchmark.md)."
        if shown
        else ""
    )


def tried(page: Page, instead: str, path: str) -> str:
    """Show the designs of a path's kernel that were measured, with what the compiler made of each."""
    shown = []
    for file in sorted(RESULTS.glob("tried/*.json")):
        for run in (run for run in json.loads(file.read_text())["runs"] if run["path"] == path):
            versions = ", ".join(f"{name} {number}" for name, number in run["versions"].items())
            is_whole = "registers" in run["designs"][0]  # else the times alone were taken
            lines = ["| design | median |", "|---|--:|"]
            if is_whole:
                lines = ["| design | median | range | registers | spilled |", "|---|--:|--:|--:|--:|"]
            for found in run["designs"]:
                cells = [found["design"], four_digits(found["median"])]
                if is_whole:
                    cells.append(f"{four_digits(found['low'])} to {four_digits(found['high'])}")
                    cells += ["" if found[x] is None else str(found[x]) for x in ("registers", "spilled_bytes")]
                lines.append(f"| {' | '.join(cells)} |")
            about = (
                f"*{run['workload']}*, {run['machine']['name']}, {run['date'][:10]}, commit {run['commit']}; {versions}"
            )
            shown.append(f"{about}\n\n" + "\n".join(lines))
    if len(shown) <= FEW_TABLES:
        return "\n\n".join(shown)
    return folded(f"All {len(shown)} trials of this path", shown)


def four_digits(seconds: float) -> str:
    """Return a time to four digits."""
    return f"{seconds * 1e6:.4g} µs" if seconds < 0.01 else f"{seconds * 1e3:.4g} ms"


def profiled(page: Page, instead: str, path: str) -> str:
    """Show what Nsight Compute counted in launches of a path."""
    return profiles.tables(path)


def parts(page: Page, instead: str) -> str:
    """Show the launches of calls, folded, a table for each machine."""
    shown = ["What each launch of some of these calls takes, by torch's profiler:"]
    for file in sorted(RESULTS.glob("parts/*.json")):
        run = json.loads(file.read_text())
        lines = ["| row | contender | launch | of a call | median |", "|---|---|---|--:|--:|"]
        for found in run["rows"]:
            for contender in found["contenders"]:
                for one in contender["launches"]:
                    name, time = html.escape(one["kernel"][:64]), four_digits(one["seconds"])
                    lines.append(f"| {found['row']} | {contender['name']} | {name} | {one['launches']:g} | {time} |")
        about = f"{run['machine']['name']}, {run['date'][:10]}, commit {run['commit']}"
        shown.append(folded(f"Launches: {about}; torch {run['versions']['torch']}", ["\n".join(lines)]))
    return "\n\n".join(shown)


def tested(page: Page, instead: str) -> str:
    """Show the results of the tests on machines that few readers have, and as on other processors; tables folded."""
    shown = [outcomes(json.loads(path.read_text())).rsplit("\n\n", 1) for path in sorted(RESULTS.glob("tests/*.json"))]
    return "\n\n".join(f"{text}\n\n{folded('The numbers', [table])}" for text, table in shown)


def reports(page: Page, instead: str) -> str:
    """Show the files of `make gpu-report`."""
    files = sorted(RESULTS.glob("reports/*.json"))
    return "\n\n".join(report(json.loads(file.read_text())) for file in files) or "There are none yet."


def contract(page: Page, instead: str, path: str = "") -> str:
    """List the properties that a kernel is checked for, and on which paths; or those of a path that has its own."""
    if path:
        rows = [f"| {found.name} | {found.promise} |" for found in of_path(path)]
        return "\n".join([instead, "", "| property | promise |", "|---|---|", *rows])
    lines = ["| property | promise | on |", "|---|---|---|"]
    for found in PROPERTIES:
        promise = found.promise.replace("|", r"\|")
        lines.append(f"| {found.name} | {promise} | {in_short_of_paths(found.paths)} |")
    return "\n".join(lines)


def in_short_of_paths(names: Sequence[str]) -> str:
    """Name paths: all, the attention paths except two at most, or each."""
    missing = [name for name in ATTENDS if name not in names]
    if not names or len(missing) > 2:
        return ", ".join(names) or "all paths"
    most = f"attention paths{' except ' * bool(missing)}{' and '.join(missing)}"
    return ", ".join([*(name for name in names if name not in ATTENDS), most])


def progress(page: Page, instead: str) -> str:
    """Make the element in which docs/assets/predict.js shows how many questions and exercises a reader has done."""
    books = []
    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        cells = json.loads(path.read_text())["cells"]
        title = "".join(cells[0]["source"]).splitlines()[0].removeprefix("# ")
        numbers = list(predict.questions(cells))
        boxes = [exercise_of(cell) for cell in cells if "exercise" in cell["metadata"].get("tags", ())]
        names = [exercise.name for exercise in boxes if exercise.in_page and pyodide.is_here()]
        url = to(page, f"notebooks/{path.stem}.html")
        books.append({"title": title, "url": url, "numbers": numbers, "exercises": names})
    return f'{instead}\n\n<div class="progress" data-notebooks="{html.escape(json.dumps(books))}"></div>'


def ladder(page: Page, instead: str, name: str) -> str:
    """Show the rungs of a ladder."""
    return ladders.page(name, to(page, f"source/notebooks/ladder/{name}"))


def gain(page: Page, instead: str, name: str, number: str) -> str:
    """Add what a rung gained to the row of a table."""
    return f"{instead} {ladders.gain(name, int(number))} |"


def compiled(page: Page, instead: str, *names: str) -> str:
    """Show the kernel of some calls as the compiler sees it, a tab for each."""
    return folds.tabs(names) or instead


INSERTS = {
    insert.__name__: insert
    for insert in (
        api,
        code,
        compiled,
        contract,
        exercise,
        gain,
        kernels,
        ladder,
        rules,
        measured,
        parts,
        picture,
        profiled,
        progress,
        reports,
        says,
        tested,
        tried,
    )
}


def figure(url: str, caption: str) -> str:
    """Show a picture, with a sentence that says what to see in it."""
    return f'<figure markdown="span">\n  ![{caption}]({url})\n  <figcaption>{caption}</figcaption>\n</figure>'


# --- measurements: files of `twinattn.bench.report` ---


def in_short(rows: list[dict[str, Any]]) -> str:
    """Make a table of some rows: the twin, the fastest of its peers, and the reference."""
    lines = ["| workload | floor | fastattn | fastest peer | refattn |", "|---|--:|--:|--:|--:|"]
    for row in rows:
        twin, *others = row["contenders"]
        fastest = fastest_peer(row)
        references = [entry for entry in others if "median" in entry and entry["name"].startswith("refattn")]
        cells = [
            f"`{row['workload']}`{'' if clocks.has_ratios(row) else '<br>by events'}",
            duration(row["floor"]),
            f"**{duration(clocks.seconds(twin))}**" if "median" in twin else "—",
            f"{duration(clocks.seconds(fastest))}<br>{fastest['name']}" if fastest else "—",
            duration(references[0]["median"]) if references else "—",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def machine(page: Page, file: Path, runs: list[dict[str, Any]]) -> str:
    """Show the results of a machine: the picture of them, and the tables of each path and of the runs, folded."""
    parts = [f"## {runs[0]['machine']['name']}, {runs[0]['dtype']}"]
    if file.with_suffix(".svg").exists():
        caption = "Further left is faster; the dashed line is the floor. Filled: fastattn. Hollow: other code."
        parts.append(figure(to(page, f"results/{file.stem}.svg"), caption))
    for path in dict.fromkeys(row["path"] for run in runs for row in run["rows"]):
        of_path = [(run, [row for row in run["rows"] if row["path"] == path]) for run in runs]
        rows = [row for _, some in of_path for row in some]
        content = [f"{_when(run)}\n\n{contenders(some)}" for run, some in of_path if some]
        parts.append(folded(f"{path}: {len(rows)} workload{'s' * (len(rows) > 1)}{_beside_peers(rows)}", content))
    lines = ["| run | versions | read | copy | matrix product |", "|---|---|--:|--:|--:|"]
    for run in runs:
        versions = ", ".join(f"{name} {number}" for name, number in run["versions"].items() if number)
        ceilings = run["ceilings"]
        moved = [f"{ceilings[name] / 1e9:,.4g} GB/s" if name in ceilings else "—" for name in ("read", "copy")]
        product = f"{ceilings['product'] / 1e12:.3g} TFLOP/s"
        lines.append(f"| {' | '.join([_when(run), versions, *moved, product])} |")
    return "\n\n".join([*parts, folded("The runs: versions and ceilings", ["\n".join(lines)])])


def contenders(rows: list[dict[str, Any]]) -> str:
    """Make a table of all that was measured for some rows."""
    lines = ["| workload | | time | of the floor | times fastattn |", "|---|---|--:|--:|--:|"]
    for row in rows:
        name = f"`{row['workload']}`<br>floor {duration(row['floor'])} ({row['limit']})"
        for entry in row["contenders"]:
            if "median" in entry:
                is_of_the_host = row.get("clock") == "host"  # the host's clock does not wait for what the floor counts
                share = "" if is_of_the_host else f"{row['floor'] / entry['median']:.0%}"
                in_a_graph = f"<br>{duration(entry['graph']['median'])} in a graph" if "graph" in entry else ""
                ratio = f"{entry['ratio']:.2f}" if "ratio" in entry else "" if clocks.has_ratios(row) else "by events"
                numbers = [f"{duration(entry['median'])}{in_a_graph}", share, ratio]
            else:
                reason = entry.get("error", row.get("error", ""))
                numbers = ["wrong answer" if reason.startswith("WrongAnswer") else "did not run", "", ""]
            lines.append(f"| {name} | {entry['name']} | {' | '.join(numbers)} |")
            name = ""
    return "\n".join(lines)


def folded(title: str, parts: list[str], *, kind: str = "note") -> str:
    """Make a part of a page that is closed until the reader opens it."""
    return f'??? {kind} "{title}"\n\n' + textwrap.indent("\n\n".join(parts), "    ")


def _when(run: dict[str, Any]) -> str:
    return f"{run['date'][:16].replace('T', ', ')} UTC"


def _beside_peers(rows: list[dict[str, Any]]) -> str:
    """Return the range of fastattn's time over that of the fastest peer, over the rows whose clock allows it."""
    pairs = [(row, fastest_peer(row)) for row in rows if clocks.has_ratios(row) and "median" in row["contenders"][0]]
    shares = [1 / clocks.pair(row, peer).ratio for row, peer in pairs if peer]
    if not shares:
        return ""
    ends = dict.fromkeys(f"{share:.2f}" for share in (min(shares), max(shares)))
    return f", {' to '.join(ends)} times as long as the fastest peer"


def _code(text: str) -> str:
    """Return code for a cell of a table."""
    return f"`{text}`".replace("|", "\\|")


def outcomes(results: dict[str, Any]) -> str:
    """Show a file of `pytest --results`, `make matrix`, `make mutants` or a mutation tool, or compute-sanitizer's."""
    if "cells" in results:
        return environments(results)
    versions = ", ".join(f"{name} {number}" for name, number in results["versions"].items() if number)
    ran = f"{results['machine']['name']}, {results['date'][:16].replace('T', ', ')} UTC, commit {results['commit']}"
    if "memcheck" in results:
        lines = ["| command | tests passed | errors of memory |", "|---|--:|--:|"]
        lines += [f"| `{run['command']}` | {run['passed']} | {run['errors']} |" for run in results["memcheck"]]
        return f"### Memory\n\n{ran}; {versions}.\n\n" + "\n".join(lines)
    if "tool" in results:
        kinds = "caught", "survived", "timed out"
        lines = ["| file | mutants | run | caught | survived | timed out |", "|---|--:|--:|--:|--:|--:|"]
        left = ["| file and function | the change | | |", "|---|---|---|---|"]
        for file, entry in results["files"].items():
            run = [one["verdict"] for one in entry["mutants"].values()]
            counts = [entry["made"], len(run), *map(run.count, kinds)]
            lines.append(f"| `{file}` | {' | '.join(map(str, counts))} |")
            for one in (one for one in entry["mutants"].values() if one["verdict"] != "caught"):
                change = f"{_code(one['old'])} becomes {_code(one['new'])}"
                left.append(f"| `{file}`, `{one['function']}` | {change} | {one['verdict']} | {one['judgement']} |")
        head = f"### A sample of the mutants of {results['tool']}\n\n{ran}; {versions}; seed {results['seed']}."
        return f"{head}\n\n" + "\n".join(lines) + "\n\n" + "\n".join(left)
    if "core" in results:
        found = results["core"]
        left = {name: entry for name, entry in found.items() if entry["verdict"] != "caught"}
        lines = [
            "| row, place and what is broken | | tests that hold it | why it is not in the core |",
            "|---|---|---|---|",
        ]
        for name, entry in left.items():
            cells = name.replace(" | ", ", "), entry["verdict"], ", ".join(entry["held by"]), entry.get("judgement", "")
            lines.append(f"| {' | '.join(cells)} |")
        caught = f"The tests of `make test` alone catch {len(found) - len(left)} of {len(found)} bugs; the others:"
        return (
            f"### Features broken on purpose, and the core of the tests\n\n{ran}; {versions}. {caught}\n\n"
            + "\n".join(lines)
        )
    if "mutants" in results:
        lines = ["| row | what is broken | its tests |", "|---|---|---|"]
        lines += [
            f"| {row} | {name} | {it} |" for row, found in results["mutants"].items() for name, it in found.items()
        ]
        verdicts = [verdict for found in results["mutants"].values() for verdict in found.values()]
        caught = f"{verdicts.count('caught')} of {len(verdicts)} times a marked test failed"
        return f"### Features broken on purpose\n\n{ran}; {versions}. {caught}.\n\n" + "\n".join(lines)
    counts = ", ".join(f"{count} {outcome}" for outcome, count in results["all"].items())
    left = results["collected"] - sum(results["all"].values())
    # A test that fails again when it is torn down has two outcomes, so there may be more outcomes than tests.
    unfinished = f"; {left} of {results['collected']} had not finished when the run was ended" if left > 0 else ""
    seen = sorted(results["all"])
    lines = [f"| | {' | '.join(seen)} |", f"|---|{'--:|' * len(seen)}"]
    for name, group in (*sorted(results["by_file"].items()), *results["by_kernel"].items()):
        shown = f"`{name}`" if name.endswith(".py") else f"those that ask for `{name}`"
        lines.append(f"| {shown} | {' | '.join(str(group.get(outcome, 0)) for outcome in seen)} |")
    names = "".join(f" Not passed: `{name}`." for name in results["not_passed"])
    where = "GPU" if results["device"] == "cuda" else "CPU"
    head = f"### Answers on the {where} at {results['commit'][:7]}"
    return f"{head}\n\n{ran}; {versions}. {counts}{unfinished}.{names}\n\n" + "\n".join(lines)


def environments(results: dict[str, Any]) -> str:
    """Show a file of `make matrix`, a row per cell: what it ran as, how many tests passed, and how long they took."""
    cells = results["cells"].values()
    dates = sorted({cell["date"][:10] for cell in cells if cell["date"]})
    when = " to ".join(dict.fromkeys([*dates[:1], *dates[-1:]]))
    ran = f"On {results['machine']['cores']} cores, {when}"
    lines = ["| BLAS | ATen | threads | Python | commit | passed | minutes |", "|---|---|--:|---|---|--:|--:|"]
    for cell in cells:
        taken = [_taken(cell, name) for name in ("blas", "aten", "threads")]
        about = [cell["found"]["python"], cell["commit"] or "unknown"]
        lines.append(f"| {' | '.join([*taken, *about, _passed(cell), format(cell['seconds'] / 60, '.1f')])} |")
    failed = dict.fromkeys(name for cell in cells for name in cell["not_passed"] or ())
    failures = "".join(f" Not passed: `{name}`." for name in failed)
    left_out = sorted({file for cell in cells for file in cell["left_out"]})
    reasons = "; ".join(f"`{file}`, which {results['unaffected'][file]}" for file in left_out)
    some = f" Runs in several threads leave out what no processor changes: {reasons}." if left_out else ""
    head = f"### As on other processors, run by {results['machine']['name']}"
    return f"{head}\n\n{ran}.{failures}{some}\n\n" + "\n".join(lines)


def _taken(cell: dict[str, Any], name: str) -> str:
    """Write what a cell asked for, and after it what the library says that it took, if that is something else."""
    asked, found = str(cell["asked"][name]), str(cell["found"][name])
    return asked if asked.lower() == found.lower() else f"{asked} ({found})"


def _passed(cell: dict[str, Any]) -> str:
    """Write how many tests of a cell passed, of how many, and which part of the tests was asked for."""
    counts = cell["counts"]
    passed = f"{counts.get('passed', 0)} of {sum(counts.values())}" if counts else f"none: exit {cell['exit_status']}"
    return f"{passed}<br>`{' '.join(cell['arguments'])}`" if cell.get("arguments") else passed


def report(found: dict[str, Any]) -> str:
    """Show a file of `make gpu-report`: each part that has an answer, folded, and those that ended otherwise."""
    versions = ", ".join(f"{name} {number}" for name, number in found["versions"].items() if number)
    head = f"### {found['machine']['name']}\n\n{_when(found)}, commit {found['commit'] or 'unknown'}; {versions}."
    show = {
        "doctor": _taken_kernels,
        "tests": outcomes,
        "search": _searched,
        "bench": lambda part: in_short([row for run in part["runs"] for row in run["rows"]]),
        "kit": field.tables,
    }
    shown = [head]
    for name, part in found["parts"].items():
        ended = {0: "", None: ", over time"}.get(part["exit_status"], f", exit {part['exit_status']}")
        lines = part.get("last_lines", ())
        content = [show[name](part["found"])] if part["found"] else ["\n".join(["```text", *lines, "```"])]
        shown.append(folded(f"{name}: {part['seconds'] / 60:.1f} minutes{ended}", content))
    return "\n\n".join(shown)


def _taken_kernels(found: dict[str, Any]) -> str:
    """Make a table of which kernel is taken for what on each device."""
    devices = found["devices"]
    lines = [f"| | {' | '.join(devices)} |", f"|---|{'---|' * len(devices)}"]
    for problem in dict.fromkeys(name for problems in devices.values() for name in problems):
        taken = [problems.get(problem, {}).get("taken") or "none" for problems in devices.values()]
        lines.append(f"| {problem} | {' | '.join(taken)} |")
    return "\n".join(lines)


def _searched(found: dict[str, Any]) -> str:
    """Make a table of how many calls a search made of each path, and what it found."""
    lines = ["| path | calls | findings |", "|---|--:|--:|"]
    for path in found["paths"]:
        calls = sum(sum(kinds.values()) for kinds in path["calls"].values())
        lines.append(f"| {path['path']} | {calls} | {len(path['findings'])} |")
    return "\n".join(lines)


# --- source files ---


def source_files() -> Iterator[Path]:
    """Yield the files of the project that have a page."""
    for pattern in SOURCES:
        yield from sorted(ROOT.glob(pattern))


def page_of(path: Path) -> str:
    """Return the name of a source file's page."""
    return f"source/{path.relative_to(ROOT).as_posix()}.md"


def source_page(path: Path) -> str:
    """Show a source file, with numbered lines that can be linked to."""
    name = path.relative_to(ROOT).as_posix()
    fence = "`" * 6
    head = f"---\ntitle: {name}\nsearch:\n  exclude: true\nhide:\n  - toc\n---\n\n# `{name}`\n\n"
    return f'{head}{fence}{{.{"python" if path.suffix == ".py" else "c"} linenums="1"}}\n{path.read_text()}{fence}\n'


def places_in(path: Path) -> str:
    """Make the page of a source file with nothing but the places that links lead to."""
    if path.suffix != ".py":
        return ""
    lines = (i for i, line in enumerate(path.read_text().splitlines(), 1) if DEFINITION.match(line))
    return "".join(f'<i id="__codelineno-0-{line}"></i>' for line in lines)


def link(page: Page, text: str, path: str) -> str:
    """Turn a link to a source file into one to its page, and a link to a test into one to its line."""
    source = (ROOT / "docs" / page.file.src_uri).parent.joinpath(path).resolve()
    if not source.is_file():
        raise PluginError(f"{page.file.src_uri}: there is no file {path}")
    target = to(page, page_of(source))
    test = re.fullmatch(r"`(test_\w+)`", text)
    if not test:
        return f"[{text}]({target})"
    found = re.search(rf"^ *def {test[1]}\(", source.read_text(), re.MULTILINE)  # a file of tests takes long to parse
    if not found:
        raise PluginError(f"{page.file.src_uri}: {path} has no {test[1]}")
    line = found.string[: found.end()].count("\n") + 1
    return f'<a href="{target.removesuffix(".md")}.html#__codelineno-0-{line}"><code>{test[1]}</code></a>'


def module_file(name: str) -> Path:
    """Return the file of a module, or of the module that a dotted name begins with."""
    path = ROOT
    for part in name.split("."):
        path = path / part
        if path.with_suffix(".py").is_file():
            return path.with_suffix(".py")
    if (path / "__init__.py").is_file():
        return path / "__init__.py"
    raise PluginError(f"there is no module {name}")


def documentation(path: Path) -> str:
    """Return the docstring of a file."""
    return ast.get_docstring(ast.parse(path.read_text())) or ""


def definition(path: Path, name: str) -> ast.FunctionDef | ast.ClassDef:
    """Find a function or class of a file."""
    found = definitions(path.read_text()).get(name) if path.exists() else None
    if found is None:
        raise PluginError(f"{path.relative_to(ROOT)} has no {name}")
    return found


@functools.cache  # hundreds of links lead into some files
def definitions(source: str) -> dict[str, ast.FunctionDef | ast.ClassDef]:
    """Return the functions and classes of a file's text by their names; of a name the outermost, and the first."""
    found: dict[str, ast.FunctionDef | ast.ClassDef] = {}
    nodes: list[ast.AST] = [ast.parse(source)]
    for node in nodes:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.setdefault(node.name, node)
        # Only the statements in a statement: expressions, most of a file, define nothing.
        nodes += (x for x in ast.iter_child_nodes(node) if isinstance(x, ast.stmt | ast.excepthandler | ast.match_case))
    return found


def to(page: Page, target: str) -> str:
    """Return the way from a page to another file of the site."""
    return posixpath.relpath(target, posixpath.dirname(page.file.src_uri))


# --- notebooks ---


def notebook_files(path: Path) -> Iterator[tuple[str, str | bytes]]:
    """Make a page of a notebook, and a file of each of its pictures. Answers are closed until the reader opens them.

    The tag `answer` makes an answer of a cell: of what code prints, of Markdown as a whole. `answer-code` closes the
    code as well, where it gives the answer away. Neighbouring cells with the tag are one answer. A cell with the tag
    `predict` becomes a field in which the reader predicts, and which opens the answer (docs/assets/predict.js). One
    with the tag `exercise` becomes a box in which the reader writes it (docs/assets/exercise.js).
    """
    parts: list[str] = []
    answer: list[str] = []
    pictures = 0
    cells = json.loads(path.read_text())["cells"]
    asked = iter(predict.questions(cells).values())
    for cell in cells:
        tags = cell["metadata"].get("tags", ())
        if answer and {"predict", "exercise"} & set(tags):
            parts.append(folded(ANSWER, answer, kind="question"))
            answer = []
        if "predict" in tags:
            parts.append(prediction(next(asked)))
            continue
        if "exercise" in tags:
            parts.append(written(exercise_of(cell), "../"))
            continue
        source = "".join(cell["source"])
        source = f"```python\n{source}\n```" if cell["cell_type"] == "code" else text_of_notebook(path, source)
        if "install" in tags:  # the cell is for Colab
            continue
        shown = []
        for output in cell.get("outputs", ()):
            data = output.get("data", {})
            text = output.get("text") or data.get("text/plain", "")
            kind = next((kind for kind in ("image/svg+xml", "image/png") if kind in data), None)
            if kind:
                pictures += 1
                name = f"{path.stem}-{pictures}.{kind[6:9]}"
                drawn = "".join(data[kind])
                yield f"notebooks/{name}", drawn if kind == "image/svg+xml" else base64.b64decode(drawn)
                described = cell["metadata"].get("alt", "what the cell above draws")
                shown.append(f"![{described}]({name}){{ .drawn }}")
            elif text:
                shown.append(f"```{{.text .output}}\n{''.join(text).rstrip()}\n```")
        if "answer" not in tags and answer:
            parts.append(folded(ANSWER, answer, kind="question"))
            answer = []
        asks = (
            cell["cell_type"] == "code" and "answer-code" not in tags and not answer
        )  # its code belongs to the question
        for part in [source, *shown]:
            (parts if "answer" not in tags or (asks and part is source) else answer).append(part)
    yield f"notebooks/{path.stem}.md", "\n\n".join(parts)


def prediction(question: dict[str, Any]) -> str:
    """Make the element that docs/assets/predict.js turns into a field; without a script, it shows nothing.

    What is right is encoded, so that it is not read by accident.
    """
    names = ("number", "says", "within", "mask")
    data = {name: question[name] for name in names if name in question} | {"right": question["right"]}
    if "choose" in question:
        data["choose"] = sorted(question["choose"])
    encoded = base64.b64encode(json.dumps(data).encode()).decode()
    return f'<div class="predict" id="predict-{question["number"]}" data-question="{encoded}"></div>'


def written(exercise: Exercise, top: str) -> str:
    """Make the box of an exercise: its stub and hints, and where it is checked.

    Where the site has Python, docs/assets/exercise.js turns the stub of one that needs no PyTorch into an editor.

    Args:
        exercise: the exercise.
        top: the way from the page to the top of the site.
    """
    file = learner.file_of(ROOT / "notebooks/exercises", exercise.name)
    title, number = learner.title(file), int(file.stem[:2])
    runs = exercise.in_page and pyodide.is_here()
    about = f' data-name="{exercise.name}" data-title="{html.escape(title)}"' * runs
    effort = f"{'●' * exercise.level}{'○' * (3 - exercise.level)} {exercise.minutes} minutes"
    colab = address.colab(address.repository(), f"{places()[exercise.name]}.ipynb")
    cell = f"[in Colab]({colab})" if colab else "in a notebook"
    source = f"[`{file.relative_to(ROOT).as_posix()}`]({top}source/notebooks/exercises/{file.name}.md)"
    elsewhere = (
        f"{source}, checked by `make exercises ARGS={number}`, or {cell}: "
        f"`from twinattn.course.exercises.here import check`, then `check({exercise.name})`. [How]({top}exercises.md)"
    )
    why = "On your machine: " if runs else "Write it in " if exercise.in_page else "It needs PyTorch. Write it in "
    stub = lists.stub(file) if exercise.in_page else learner.code(file)
    hints = [
        folded(f"Hint {i} of {len(exercise.hints)}", [hint], kind="tip") for i, hint in enumerate(exercise.hints, 1)
    ]
    shown = f"```python\n{stub.rstrip()}\n```"
    parts = [
        f'<div class="exercise" id="write-{exercise.name}"{about} markdown>',
        f'**Write it: {title[0].lower()}{title[1:]}** <span class="effort">{effort}</span>',
        shown if exercise.in_page else folded("What to write", [shown]),
        *hints,
        f"{why}{elsewhere}\n{{ .elsewhere }}",
        "</div>",
    ]
    return "\n\n".join(parts)


def text_of_notebook(path: Path, source: str) -> str:
    """Turn the links of a Markdown cell into those of the site."""
    source = (
        source.replace("<details>", '<details markdown="1">').replace(".ipynb", ".md").replace("](../docs/", "](../")
    )
    source = re.sub(r"\]\(\.\./((?:refattn|fastattn|twinattn|tests)/[\w/]+\.py)", r"](../source/\1.md", source)
    source = re.sub(r"\]\((exercises/[\w/]+\.py)\)", r"](../source/notebooks/\1.md)", source)
    return LINK_TO_EXPLORER.sub(r'<a href="\2.html\3">\1</a>', source)
