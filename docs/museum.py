"""Make docs/proof/museum.md and its pictures: bugs that servers had, each with what it really draws.

What went wrong, where it was reported and which test catches it is said once, in docs/proof/bugs.md; what each picture
shows, in exhibits.py. `make readme` runs it.
"""

import ast
import html
import inspect
import math
import re
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import exhibits
from exhibits import EXHIBITS, PUZZLE_FILES, Exhibit, Picture

ROOT = Path(__file__).parent.parent
BUGS = ROOT / "docs/proof/bugs.md"
PAGE = ROOT / "docs/proof/museum.md"
PICTURES = ROOT / "docs/assets/museum"
INK, SEEN, WRONG = "#767676", "#0072B2", "#D55E00"  # legible on white, and on black
CELL, LETTER, GAP, LINE = 15, 7.2, 7, 20  # pixels: a cell, a letter, between runs of columns, a line of text
WIDEST = 350  # pixels of a phone's page
HEAD = """\
# A museum of bugs

> **The idea.** Each of these bugs was in a server or a kernel that many people use. Here each is a few
> lines of code, and the picture is what they really draw: every value gets a number of its own, and what comes out says
> which values reached which query.

Rows are queries, columns are keys; letters name the requests of a batch, numbers positions. A filled cell is seen, and
where weights differ, a fuller one counts more. In the bug's picture **+** marks what should not be there, and **−**
what is missing. Where a mask does not show the bug, the numbers do; a frame marks those that are wrong. Under each
picture is the code that draws it. It is ours, from [the kit](../../twinattn/kit/mistakes/__init__.py), a puzzle or
[`docs/exhibits.py`](../exhibits.py): it fails as the report says, and is not that of the server. The reference draws
what is right.

[All bugs](bugs.md), also those without a picture, each with the test that catches it. Some are also
[puzzles](../exercises.md#the-puzzles): find the case that fails, and mend the code.

"""


SYMPTOMS = {  # what a picture shows, by what a user would see
    "nan": "NaN or infinity comes out",
    "more": "a query sees what it should not: later tokens, other requests, old memory",
    "less": "a query misses what it should see: context is forgotten",
    "weights": "the keys are right, and their weights are not: answers are slightly off",
    "numbers": "a number is wrong: a length, a slot, a table, a state",
}


def rows() -> dict[tuple[str, str], tuple[str, str, str]]:
    """Read docs/proof/bugs.md: what went wrong, the reports and the tests, by heading and by the number of a report."""
    found, part = {}, ""
    for line in BUGS.read_text(encoding="utf-8").splitlines():
        if line.startswith("## "):
            part = line.removeprefix("## ")
        elif line.startswith("| ") and not line.startswith("| what"):
            says, reports, tests = (cell.strip() for cell in line.strip("|").split(" | "))
            found |= {(part, number): (says, reports, tests) for number in re.findall(r"\[(\d+)\]", reports)}
    return found


def page() -> str:
    """Make the page."""
    known, parts = rows(), list(dict.fromkeys(each.part for each in EXHIBITS))
    lines = [HEAD.rstrip(), "", "## By symptom", "", "An exhibit may have several.", ""]
    shows = {each.title: symptoms(each.draw()) for each in EXHIBITS}
    for symptom, says in SYMPTOMS.items():
        titles = [f"[{title}](#{anchor(title)})" for title, found in shows.items() if symptom in found]
        lines.append(f"- **{says}**: {'; '.join(titles)}")
    lines += ["", "## By place", "", f"{len(EXHIBITS)} exhibits:", ""]
    for part in parts:
        titles = [f"[{each.title}](#{anchor(each.title)})" for each in EXHIBITS if each.part == part]
        lines.append(f"- **[{part}](#{anchor(part)})**: {'; '.join(titles)}")
    for part in parts:
        lines += ["", f"## {part}"]
        for each in EXHIBITS:
            if each.part == part:
                lines += ["", *shown(each, *known[part, each.issue])]
    links = [line for line in BUGS.read_text(encoding="utf-8").splitlines() if re.match(r"\[\d+\]: ", line)]
    used = set(re.findall(r"\[(\d+)\]", "\n".join(lines)))
    lines += ["", *(line for line in links if line[1 : line.index("]")] in used)]
    return "\n".join(lines) + "\n"


def shown(each: Exhibit, says: str, reports: str, tests: str) -> Iterator[str]:
    """Show an exhibit."""
    about = [f"Reported: {reports}", f"Caught by: {tests}"]
    if each.puzzle:
        number, file = next((i, file) for i, file in enumerate(PUZZLE_FILES, 1) if file.stem[3:] == each.puzzle)
        about.append(f"Puzzle: [p{number} · {each.puzzle}](../../{file.relative_to(ROOT).as_posix()})")
    yield from (f"### {each.title}", "", says, "")
    yield from (f"![{described(each.draw())}](../assets/museum/{each.name}.svg)", "", each.says, "")
    yield from (" · ".join(about), "", "<details markdown><summary>The code</summary>", "")
    yield from ("```py", code_of(each.draw), "```", "", "</details>")


def symptoms(picture: Picture) -> set[str]:
    """Return the symptoms that a picture shows: names in `SYMPTOMS`."""
    pairs = [pair for lines in zip(picture.right, picture.wrong, strict=True) for pair in zip(*lines, strict=True)]
    if isinstance(pairs[0][0], str):
        wrong = {cell for should, cell in pairs if cell != should}
        return {"nan"} if wrong & {"NaN", "∞", "-∞", "−∞", "inf"} else {"numbers"}
    found = {"nan"} if any(math.isnan(cell) for _, cell in pairs) else set()
    numbers = [(should, cell) for should, cell in pairs if not math.isnan(cell) and abs(should - cell) > 1e-6]
    found |= {"more" if not should else "less" if not cell else "weights" for should, cell in numbers}
    return found - {"weights"} if found & {"more", "less"} else found


def code_of(draw: Callable[[], Picture]) -> str:
    """Return the lines of a bug: the mistake of the kit, of a puzzle or of this folder, and what runs it."""
    (function,) = ast.parse(textwrap.dedent(inspect.getsource(draw))).body
    assert isinstance(function, ast.FunctionDef)
    found: dict[str, str] = {}
    for node in ast.walk(ast.Module(function.body, [])):
        match node:
            case ast.Call(ast.Name("broken"), [ast.Constant(str(name))]):
                file = next(file for file in PUZZLE_FILES if file.stem[3:] == name)
                found[name] = _definition(file.read_text(encoding="utf-8"), "broken")
            case ast.Attribute(ast.Name(module), name) if isinstance(vars(exhibits).get(module), ModuleType):
                mistake = getattr(vars(exhibits)[module], name, None)
                if isinstance(mistake, type) and mistake.__module__.startswith("twinattn.kit."):
                    found[name] = inspect.getsource(mistake).rstrip()
            case ast.Name(name) if name not in ("Picture", "Example", "Exhibit"):
                own = vars(exhibits).get(name)
                if isinstance(own, type) and own.__module__ == exhibits.__name__:
                    found[name] = inspect.getsource(own).rstrip()
    lines = inspect.getsource(draw).splitlines()  # the decorator, the head, the docstring, and what draws
    body = "\n".join(lines[function.body[1].lineno - 1 :]).strip("\n")
    return "\n\n\n".join([*found.values(), f"{lines[function.lineno - 1]}\n{body}"])


def _definition(source: str, name: str) -> str:
    """Return a function of a file, as it stands there."""
    node = next(node for node in ast.parse(source).body if getattr(node, "name", "") == name)
    return ast.get_source_segment(source, node) or ""


def anchor(title: str) -> str:
    """Return the name that a heading has on the site, and on code hosts."""
    return re.sub(r"[^\w\s-]", "", title.lower()).replace(" ", "-")


def described(picture: Picture) -> str:
    """Describe a picture for readers who cannot see it."""
    if isinstance(picture.right[0][0], str):
        lines = zip(picture.rows, picture.right, picture.wrong, strict=True)
        told = (
            f"{row}: {', '.join(filter(None, right))}; with the bug {', '.join(filter(None, wrong))}"
            for row, right, wrong in lines
        )
        return f"Right and wrong numbers. {'. '.join(told)}."
    pairs = [pair for lines in zip(picture.right, picture.wrong, strict=True) for pair in zip(*lines, strict=True)]
    counts = {
        "marked more than they should": sum(right < wrong for right, wrong in pairs),
        "less": sum(right > wrong for right, wrong in pairs),
        "NaN": sum(math.isnan(wrong) for _, wrong in pairs),
    }
    told = ", ".join(f"{count} {what}" for what, count in counts.items() if count)
    return f"What is right, and what the bug draws. Of {len(pairs)} cells: {told}."


# --- pictures ---


def svg(picture: Picture) -> str:
    """Draw what is right and what the bug draws, side by side where a phone has room for it."""
    are_texts = isinstance(picture.right[0][0], str)
    width = widest(picture) if are_texts else CELL
    height = LINE if are_texts else CELL
    label = LETTER * max(map(len, picture.rows)) + 9
    columns = [sum(n for _, n in picture.columns[:i]) for i in range(len(picture.columns))]
    body = len(picture.right[0]) * width + GAP * (len(columns) - 1)
    for i, (name, _) in enumerate(picture.columns):  # a name may be wider than its columns
        body = max(body, columns[i] * width + i * GAP + LETTER * len(name))
    body = max(body, 8 * len("the bug"))  # in bold
    is_beside = 2 * (label + body) + 2 * GAP <= WIDEST
    panel = 2 * LINE + len(picture.rows) * height
    top = 0.0 if is_beside else panel + GAP
    drawing = Drawing()
    for cells, x, y, title in (
        (picture.right, 0.0, 0.0, "right"),
        (picture.wrong, (label + body + 2 * GAP) * is_beside, top, "the bug"),
    ):
        drawing.text(x + label, y + 14, title, bold=True)
        for i, (name, _) in enumerate(picture.columns):
            drawing.text(x + label + columns[i] * width + i * GAP, y + LINE + 14, name)
        for i, row in enumerate(cells):
            drawing.text(x, y + 2 * LINE + (i + 0.5) * height + 4, picture.rows[i])
            at = [x + label + j * width + GAP * sum(first <= j for first in columns[1:]) for j in range(len(row))]
            drawing.row(at, y + 2 * LINE + i * height, width, height, picture.right[i], row, largest(picture))
    return drawing.svg(label + body + (label + body + 2 * GAP) * is_beside, top + panel)


def widest(picture: Picture) -> float:
    """Return the width of a cell that holds every text."""
    texts = [str(x) for row in picture.right + picture.wrong for x in row]
    names = [name for name, n in picture.columns if n == 1]
    return LETTER * max(map(len, texts + names)) + 10


def largest(picture: Picture) -> float:
    """Return the weight of a full cell."""
    numbers = [x for row in picture.right + picture.wrong for x in row if isinstance(x, float) and math.isfinite(x)]
    return max(numbers, default=1.0)


class Drawing:
    """Rectangles by their style, in one path each, and texts."""

    def __init__(self) -> None:
        self.paths: dict[str, list[str]] = {}
        self.texts: list[str] = []

    def rectangle(self, x: float, y: float, width: float, height: float, style: str) -> None:
        """Add a rectangle."""
        self.paths.setdefault(style, []).append(f"M{x:.4g} {y:.4g}h{width:.3g}v{height:.3g}h-{width:.3g}z")

    def text(
        self, x: float, y: float, text: str, *, bold: bool = False, colour: str = "", middle: bool = False
    ) -> None:
        """Add a text."""
        style = ' font-weight="700"' * bold + f' fill="{colour}"' * bool(colour) + ' text-anchor="middle"' * middle
        if text:
            self.texts.append(f'<text x="{x:.4g}" y="{y:.4g}"{style}>{html.escape(text)}</text>')

    def row(self, at: list[float], y: float, width: float, height: float, right: list, row: list, full: float) -> None:
        """Add a row of cells; those that are not right are marked."""
        if not isinstance(row[0], str) and all(math.isnan(x) for x in row):
            wide = at[-1] - at[0] + width
            self.rectangle(at[0] + 1, y + 1, wide - 2, height - 2, f'fill="none" stroke="{WRONG}" stroke-width="2"')
            self.text(at[0] + wide / 2, y + height / 2 + 4, "NaN", bold=True, colour=WRONG, middle=True)
            return
        for x, should, cell in zip(at, right, row, strict=True):
            is_text = isinstance(cell, str)
            is_wrong = cell != should if is_text else abs(cell - should) > 1e-6
            edge = f'stroke="{WRONG}" stroke-width="2"' if is_wrong else f'stroke="{INK}" stroke-opacity=".4"'
            share = 0.0 if is_text else cell / full
            colour = WRONG if is_wrong else SEEN
            if share:
                self.rectangle(
                    x + 1, y + 1 + (1 - share) * (height - 2), width - 2, share * (height - 2), f'fill="{colour}"'
                )
            if cell != "" or should != "":
                self.rectangle(x + 1, y + 1, width - 2, height - 2, f'fill="none" {edge}')
            middle = (x + width / 2, y + height / 2 + 4)
            if is_text:
                self.text(*middle, cell, bold=is_wrong, colour=WRONG * is_wrong, middle=True)
            elif is_wrong and not should:
                self.text(*middle, "+", bold=True, colour="#fff" if share > 0.6 else WRONG, middle=True)
            elif is_wrong and not cell:
                self.text(*middle, "−", bold=True, colour=WRONG, middle=True)

    def svg(self, width: float, height: float) -> str:
        """Return the file."""
        size = f'width="{math.ceil(width) + 2}" height="{math.ceil(height) + 2}"'
        box = f'viewBox="-1 0 {math.ceil(width) + 2} {math.ceil(height) + 2}"'
        font = f'font-family="system-ui,sans-serif" font-size="12" fill="{INK}"'
        paths = "\n".join(f'<path {style} d="{"".join(parts)}"/>' for style, parts in self.paths.items())
        texts = "\n".join(self.texts)
        return f'<svg xmlns="http://www.w3.org/2000/svg" {size} {box} {font}>\n{paths}\n{texts}\n</svg>\n'


def main() -> None:
    """Write the page and the pictures."""
    PICTURES.mkdir(parents=True, exist_ok=True)
    drawn = {f"{each.name}.svg": svg(each.draw()) for each in EXHIBITS}
    for old in PICTURES.glob("*.svg"):
        if old.name not in drawn:
            old.unlink()
    for name, content in drawn.items():
        (PICTURES / name).write_text(content, encoding="utf-8")
    PAGE.write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()
