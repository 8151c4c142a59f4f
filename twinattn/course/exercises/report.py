"""What a learner sees: expected against got, with numbers; how far they are; what to do next."""

from collections.abc import Mapping
from math import ceil
from typing import Any

import torch
from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text
from torch import Tensor

from twinattn.course.drawing import Cell, Drawing, Grid
from twinattn.course.exercises.exercise import ALONE, Once, Outcome, kind, plain

COLUMNS = 6  # numbers of a row that are shown
CELLS = 24  # columns of a mask that are shown
MARKS = {
    "done": ("✓", "green"),
    "to do": ("·", "dim"),
    "wrong": ("✗", "red"),
    "found": ("◐", "yellow"),
    "not here": ("–", "dim"),
}


def show_wrong(console: Console, name: str, outcome: Outcome) -> None:
    """Show the trial that went wrong: what was asked, what was expected, what came, what is probably the cause."""
    if outcome.trial is not None:
        console.print(Text.assemble(("Tried: ", "bold"), outcome.trial.says))
        arguments = ", ".join(f"{name}={_short(value)}" for name, value in outcome.trial.arguments.items())
        console.print(_indented(Text(f"{name}({arguments})", style="dim")))
    console.print(Text.assemble(("Wrong: ", "bold red"), outcome.reason.removeprefix(f"{ALONE}: ")))
    for part, expected in outcome.expected.items():
        drawn = _difference(part, expected, outcome.got[part]) if outcome.got else _expected(part, expected)
        if drawn is not None:
            console.print(_indented(drawn, above=1))
    console.print()
    if outcome.mistake:
        console.print(Text.assemble(("Probably: ", "bold yellow"), f"{outcome.mistake.removesuffix('.')}."))


def _indented(drawn: RenderableType, *, above: int = 0) -> Padding:
    return Padding(drawn, (above, 0, 0, 2), expand=False)


def _difference(part: str, expected: Any, got: Any) -> RenderableType | None:
    """Draw expected against got; nothing where they are equal or cannot be drawn together."""
    if isinstance(expected, Tensor):
        try:
            got = torch.as_tensor(got)
        except (TypeError, ValueError, RuntimeError):  # it is something else
            return None
        if got.shape != expected.shape:
            return None
        if expected.dtype == torch.bool:
            return None if torch.equal(expected, got.bool()) else _masks(part, expected, got.bool())
        return _numbers(part, expected, got)
    if plain(expected) == plain(got):
        return None
    label = "" if part == ALONE else f"{part}: "
    return Group(Text(f"{label}expected {_short(expected)}"), Text(f"{label}got      {_short(got)}", style="red"))


def _expected(part: str, expected: Any) -> RenderableType | None:
    if isinstance(expected, Tensor):
        return None
    return Text(f"expected {_short(expected)}")


def _masks(part: str, expected: Tensor, got: Tensor) -> RenderableType:
    """Draw two masks side by side; in the second, + is a key too many, and - one that is missing."""
    wrong = expected != got
    first = max(0, int(wrong.any(0).nonzero()[0]) - CELLS // 2) if expected.shape[1] > CELLS else 0
    keys = slice(first, first + CELLS)
    marks = {(True, True): "1", (False, False): ".", (False, True): "+", (True, False): "-"}

    def grid(title: str, texts: list[list[str]]) -> Text:
        cells = [[Cell("filled", text) for text in row] for row in texts]
        rows = [str(i) for i in range(len(cells))]
        text = Text(Drawing([[Grid(cells, rows, title=title)]]).text())
        text.highlight_regex(r"(?<=[ ])[+-](?= |$)", "bold red")
        text.highlight_regex(r"\+(?= |$)|-(?= |$)", "bold red")
        return text

    table = Table.grid(padding=(0, 4))
    want = [[marks[cell, cell] for cell in row] for row in expected[:, keys].tolist()]
    mine = [
        [marks[cell, other] for cell, other in zip(row, others, strict=True)]
        for row, others in zip(expected[:, keys].tolist(), got[:, keys].tolist(), strict=True)
    ]
    table.add_row(grid("expected", want), grid("got", mine))
    legend = "a row per query, a column per key; + is seen and should not be, - should be seen and is not"
    beginning = f"from key {first} on; " if first else ""
    return Group(table, Text(beginning + legend, style="dim"))


def _numbers(part: str, expected: Tensor, got: Tensor) -> RenderableType | None:
    """Show the first row of numbers that is wrong."""
    wide = 1e-5 * float(expected.nan_to_num(0, 0, 0).abs().max()) if expected.numel() else 0.0
    off = ~torch.isclose(expected.double(), got.double(), rtol=1e-5, atol=wide, equal_nan=True)
    if not off.any():
        return None
    where = off.nonzero()[0].tolist()
    row = tuple(where[:-1])
    start = where[-1] // COLUMNS * COLUMNS if where else 0
    numbers = [(x[row] if where else x.reshape(1))[start : start + COLUMNS] for x in (expected, got)]
    bad = (off[row] if where else off.reshape(1))[start : start + COLUMNS]
    place = ", ".join([*map(str, row), ":"]) if where else ""
    table = Table(box=None, padding=(0, 1))
    table.add_column()
    for i in range(len(bad)):
        table.add_column(str(start + i) if where else "", justify="right", style="dim")
    table.add_row("expected", *(Text(_number(x), style="default") for x in numbers[0].tolist()))
    marked = zip(numbers[1].tolist(), bad.tolist(), strict=True)
    table.add_row("got", *(Text(_number(x), style="bold red" if wrong else "default") for x, wrong in marked))
    table.add_row("", *(Text("≠" if wrong else "", style="bold red") for wrong in bad.tolist()))
    count, rows = int(off.sum()), expected.numel()
    title = Text(f"{part}[{place}]" if place else part, style="italic")
    return Group(title, table, Text(f"{count} of {rows} numbers are off", style="dim"))


def _number(x: float) -> str:
    return str(x) if isinstance(x, int) else f"{x:.4g}"


def _short(value: Any) -> str:
    """Write a value in short: small ones as they are, tensors by type and shape."""
    if isinstance(value, Tensor):
        return (
            str(value.tolist()) if value.numel() <= 8 and value.ndim <= 1 else kind(value).removeprefix("a tensor of ")
        )
    if isinstance(value, Once):
        return f"{len(value.items)} tiles"
    if isinstance(value, list | tuple) and value and isinstance(value[0], Tensor):
        return f"{len(value)} tensors"
    return str(value)


def progress_bar(done: int, total: int, width: int = 24) -> Text:
    """Draw the user's progress."""
    filled = ceil(width * done / total) if total else 0
    return Text.assemble(("█" * filled, "green"), ("░" * (width - filled), "dim"), f" {done} of {total}")


def list_table(rows: Mapping[str, tuple[str, str, str, str]]) -> Table:
    """Make the list of exercises: number, state, name, how hard it is, title."""
    table = Table(box=None, show_header=False, padding=(0, 1))
    for number, (state, name, effort, title) in rows.items():
        mark, style = MARKS[state]
        cells = Text(mark, style=style), Text(name, style="bold"), Text(effort, style="dim", no_wrap=True), Text(title)
        table.add_row(Text(number, justify="right"), *cells)
    return table
