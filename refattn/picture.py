"""Drawings of what the paths compute: masks, block tables, virtual batches, what a cascade shares, a merge.

    python -m refattn.picture local --chunk 4 --lens 4,6 10,17 5,9 --output local.svg

prints a drawing as text and writes it as a picture. In Python a drawing is made of a batch or of a tensor, and shows
itself in a notebook. As text it says the same:

    >>> print(mask(masks.causal(2, 5)).text())
    0   1 1 1 1 .
    1   1 1 1 1 1

A drawing is some panels, and a panel is a grid of cells or a few bars. The colours are those of Okabe and Ito, which
colour-blind people can tell apart, and no colour says what no letter says. The background is transparent and the ink is
grey, so a drawing can be read on a light page and on a dark one. Only `Drawing.figure` needs matplotlib.
"""

import argparse
import io
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from pathlib import Path
from string import ascii_lowercase
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from refattn import masks
from refattn.batch import Batch, check_block_table
from refattn.local import make_virtual_batches
from refattn.metadata import make_batch
from refattn.sliding_window import trim

Rule = Callable[[int, int], Bool[Tensor, "t s"]]  # draws the mask of a sequence from its query_len and seq_len
Words = Sequence[Sequence[str]]  # the tokens of each sequence
SHARED = -1  # the group of what several sequences share


@dataclass(frozen=True)
class Cell:
    """One cell of a grid: "filled" (in the colour of its group), "outlined", "gone" (dashed), or "" for no cell."""

    kind: str = ""
    text: str = ""
    group: int = 0


@dataclass(frozen=True)
class Span:
    """A box above some columns of a grid, from `start` to before `stop`: a block of the pool."""

    start: int
    stop: int
    cell: Cell


@dataclass(frozen=True)
class Grid:
    """Rows of cells with a label to each row and column.

    Attributes:
        cells: the rows.
        rows: a label for each row, may be empty.
        columns: a label for each column, or none at all.
        spans: boxes above the columns.
        cuts: columns before which a line is drawn.
        title: what the grid is.
        width: of a cell, in heights of a cell.
    """

    cells: list[list[Cell]]
    rows: Sequence[str]
    columns: Sequence[str] = ()
    spans: Sequence[Span] = ()
    cuts: Sequence[int] = ()
    title: str = ""
    width: float = 1.0


@dataclass(frozen=True)
class Bars:
    """A bar for each label, drawn upwards (downwards below 0), of a group's colour."""

    labels: Sequence[str]
    values: Sequence[float]
    groups: Sequence[int]
    title: str = ""


@dataclass(frozen=True)
class Drawing:
    """Lines of panels, which a notebook shows as a picture.

    Attributes:
        lines: panels side by side, line below line.
        note: a sentence below them.
    """

    lines: Sequence[Sequence[Grid | Bars]]
    note: str = ""

    def text(self) -> str:
        """Draw with characters, panel below panel."""
        panels = [
            _grid_text(panel) if isinstance(panel, Grid) else _bars_text(panel) for line in self.lines for panel in line
        ]
        return "\n\n".join([*panels, self.note] if self.note else panels)

    def figure(self) -> Any:
        """Draw with matplotlib, on a transparent background.

        Raises:
            ImportError: if matplotlib is not installed.
        """
        return _figure(self)

    def save(self, path: Path | str) -> None:
        """Write a picture.

        Raises:
            ValueError: if the path ends neither in .png nor in .svg.
            ImportError: if matplotlib is not installed.
        """
        if Path(path).suffix not in (".png", ".svg"):
            raise ValueError(f"path: expected a .png or an .svg, got {path}")
        Path(path).write_bytes(self._bytes(Path(path).suffix[1:]))

    def __repr__(self) -> str:
        return self.text()  # what a terminal shows, and a notebook where it can't show the picture

    def _repr_svg_(self) -> str:
        return self._bytes("svg").decode()

    def _bytes(self, kind: str) -> bytes:
        import matplotlib

        buffer = io.BytesIO()
        # The same drawing is the same file, and its letters are letters.
        with matplotlib.rc_context({"svg.hashsalt": "refattn", "svg.fonttype": "none"}):
            metadata = dict.fromkeys(("Date", "Creator") if kind == "svg" else ("Software",))
            self.figure().savefig(buffer, format=kind, dpi=150, transparent=True, metadata=metadata)
        return buffer.getvalue()


# --- drawings of masks ---


def mask(
    visible: Bool[Tensor, "t s"],
    *,
    rows: Sequence[str] | None = None,
    columns: Sequence[str] | None = None,
    title: str = "",
    group: int = 0,
) -> Drawing:
    """Draw one mask: a row a query, a column a key, filled where the query sees the key.

    Args:
        visible: who sees whom.
        rows: names of the queries; numbers if None.
        columns: names of the keys; none if None.
        title: what to write above.
        group: which colour to take.
    """
    t, _ = visible.shape
    return Drawing([[Grid(_cells(visible, group), rows or _numbers(t), columns or (), title=title)]])


def side_by_side(**drawings: Drawing) -> Drawing:
    """Put the panels of several drawings next to each other, under the names that they are given."""
    return Drawing(
        [[replace(panel, title=name) for name, each in drawings.items() for line in each.lines for panel in line]]
    )


def sequences(batch: Batch, rule: Rule = masks.causal, *, words: Words | None = None) -> Drawing:
    """Draw the mask of each sequence of a batch, under one rule.

    Args:
        batch: the lengths.
        rule: draws the mask of a sequence from its two lengths: `masks.causal`, `partial(masks.chunk, chunk_size=4)`.
        words: the tokens of each sequence; numbers if None.
    """
    return Drawing([[_sequence(one, rule) for one in _sequences(batch, words)]])


def ragged(batch: Batch, rule: Rule = masks.causal, *, words: Words | None = None) -> Drawing:
    """Draw all sequences in one mask, query rows by key rows: each is a block on the diagonal.

    Args:
        batch: the lengths.
        rule: draws the mask of a sequence from its two lengths.
        words: the tokens of each sequence; numbers if None.
    """
    every = _sequences(batch, words)
    num_keys, before, cells = sum(one.seq_len for one in every), 0, []
    for one in every:
        for row in _cells(rule(one.query_len, one.seq_len), one.group):
            cells.append([*[Cell()] * before, *row, *[Cell()] * (num_keys - before - one.seq_len)])
        before += one.seq_len
    rows = [f"{one.name} {word}" for one in every for word in one.queries]
    return Drawing([[Grid(cells, rows, [word for one in every for word in one.words])]])


# --- drawings of batches ---


def step(batch: Batch, *, words: Words | None = None) -> Drawing:
    """Draw the tokens of a batch: each sequence with its context outlined, and the row of new tokens that is computed.

    Args:
        batch: the lengths.
        words: the tokens of each sequence; numbers if None.
    """
    every = _sequences(batch, words)
    width = _word_width(word for one in every for word in one.words)
    longest = max((one.seq_len for one in every), default=0)
    cells = [
        [
            Cell("filled" if j >= one.seq_len - one.query_len else "outlined", one.words[j], one.group)
            for j in range(one.seq_len)
        ]
        + [Cell()] * (longest - one.seq_len)
        for one in every
    ]
    row = [Cell("filled", word, one.group) for one in every for word in one.queries]
    requests = Grid(cells, [one.name for one in every], title="sequences", width=width)
    return Drawing([[requests], [Grid([row], [" "], title="query rows", width=width)]])


def block_table(batch: Batch, *, block_size: int, num_blocks: int | None = None, words: Words | None = None) -> Drawing:
    """Draw the block table of a batch, and the pool with the tokens in it.

    Args:
        batch: the lengths and the block table.
        block_size: tokens in a block, `p`.
        num_blocks: blocks in the pool; up to the last that is used if None.
        words: the tokens of each sequence; numbers if None.
    """
    every = _sequences(batch, words, block_size)
    columns = max((len(one.blocks) for one in every), default=0)
    table = [
        [Cell("filled", str(block), one.group) for block in one.blocks]
        + [Cell("outlined")] * (columns - len(one.blocks))
        for one in every
    ]
    last = max((block for one in every for block in one.blocks), default=-1)
    pool = [[Cell("outlined")] * block_size for _ in range(last + 1 if num_blocks is None else num_blocks)]
    for one in every:
        for j, word in enumerate(one.words):
            pool[one.blocks[j // block_size]][j % block_size] = Cell("filled", word, one.group)
    width = _word_width(word for one in every for word in one.words)
    return Drawing(
        [
            [
                Grid(table, [one.name for one in every], title="block table"),
                Grid(pool, [f"block {block}" for block in range(len(pool))], title="pool", width=width),
            ]
        ]
    )


def window(batch: Batch, window_size: tuple[int, int], *, block_size: int, words: Words | None = None) -> Drawing:
    """Draw a sliding window over each sequence, with the blocks above the keys; those that `trim` cuts are dashed.

    Args:
        batch: the lengths and the block table.
        window_size: `(left, right)` in tokens, both inclusive, -1 for no limit; never behind the query.
        block_size: tokens in a block, `p`.
        words: the tokens of each sequence; numbers if None.
    """
    kept = trim(batch, window_size, block_size=block_size).seq_lens.tolist()
    rule = partial(masks.visible_keys, causal=True, window_size=window_size)
    every = _sequences(batch, words, block_size)
    panels = [
        _sequence(one, rule, block_size=block_size, cut=(one.seq_len - left) // block_size)
        for one, left in zip(every, kept, strict=True)
    ]
    return Drawing([panels], note=f"{_count(panels, 'filled')} of {_count(panels)} blocks are read, × is cut off")


def virtual_batches(batch: Batch, chunk_size: int, *, block_size: int, words: Words | None = None) -> Drawing:
    """Draw local attention twice: as chunks of the sequences of a batch, and as the virtual sequences made of them.

    Args:
        batch: the lengths and the block table.
        chunk_size: tokens in a chunk, a multiple of the block size.
        block_size: tokens in a block, `p`.
        words: the tokens of each sequence; numbers if None.
    """
    every = _sequences(batch, words, block_size)
    virtual = make_virtual_batches(batch, chunk_size, block_size=block_size)
    rule = partial(masks.chunk, chunk_size=chunk_size)
    pieces = iter(zip(virtual.query_lens.tolist(), virtual.seq_lens.tolist(), strict=True))
    below: list[Grid] = []
    for one in every:
        end = one.seq_len - one.query_len
        while end < one.seq_len:
            query_len, seq_len = next(pieces)
            end += query_len
            begin = end - seq_len
            piece = _Sequence(
                f"virtual {len(below)} of {one.name}",
                one.group,
                query_len,
                seq_len,
                one.words[begin : begin + seq_len],
                one.blocks[begin // block_size : -(-end // block_size)] if seq_len else [],
            )
            below.append(_sequence(piece, masks.causal, block_size=block_size))
    above = [_sequence(one, rule, block_size=block_size, chunk_size=chunk_size) for one in every]
    return Drawing([above, below], note=f"chunks of {chunk_size} above, the virtual sequences below")


def cascade(batch: Batch, *, block_size: int, words: Words | None = None) -> Drawing:
    """Draw every block of a batch once, under all query rows that see it: the shared ones stand out.

    Args:
        batch: the lengths and the block table.
        block_size: tokens in a block, `p`.
        words: the tokens of each sequence; numbers if None.
    """
    every = _sequences(batch, words, block_size)
    users: dict[int, list[_Sequence]] = {}
    for one in every:
        for block in one.blocks:
            users.setdefault(block, []).append(one)

    cells: list[list[Cell]] = [[] for one in every for _ in one.queries]
    columns: list[str] = []
    spans = []
    for block, readers in users.items():
        group = readers[0].group if len(readers) == 1 else SHARED
        first = [one.blocks.index(block) * block_size for one in readers]  # the position of its first key in each
        length = max(min(block_size, one.seq_len - begin) for one, begin in zip(readers, first, strict=True))
        spans.append(Span(len(columns), len(columns) + length, Cell("filled", str(block), group)))
        columns += readers[0].words[first[0] : first[0] + length]
        row = 0
        for one in every:
            for position in range(one.seq_len - one.query_len, one.seq_len):
                begin = first[readers.index(one)] if one in readers else one.seq_len
                kinds = ["filled" if begin + j <= position else "outlined" for j in range(length)]
                cells[row] += [Cell(kind, group=group) for kind in kinds] if one in readers else [Cell()] * length
                row += 1
    rows = [f"{one.name} {word}" for one in every for word in one.queries]
    read = sum(one.seq_len for one in every)
    shared = ", ".join(str(block) for block, readers in users.items() if len(readers) > 1)
    note = (
        f"{len(columns)} keys are read instead of {read}: blocks {shared} only once" if shared else "nothing is shared"
    )
    return Drawing([[Grid(cells, rows, columns, spans)]], note=note)


def schedule(steps: Sequence[Mapping[str, int]], *, budget: int) -> Drawing:
    """Draw what an engine computes in each step: so many tokens of each request, in the order of the mapping.

    Args:
        steps: the new tokens of each request, by its name, step after step.
        budget: most tokens in a step.
    """
    names = sorted({name for each in steps for name in each})
    done = dict.fromkeys(names, 0)
    cells = []
    for each in steps:
        row = []
        for name, new in each.items():
            row += [Cell("filled", f"{name}{done[name] + i}", names.index(name)) for i in range(new)]
            done[name] += new
        cells.append([*row, *[Cell("outlined")] * (budget - len(row))])
    return Drawing([[Grid(cells, [f"step {i}" for i in range(len(steps))], width=1.5)]])


# --- drawings of weights ---


def merge(parts: Sequence[Float[Tensor, "_"]], *, words: Words | None = None) -> Drawing:
    """Draw how one query's answers over disjoint keys merge: weights of each part by itself, then their shares.

    Args:
        parts: the scores of the keys, part by part.
        words: the tokens of each part; numbers if None.
    """
    lses = torch.stack([scores.logsumexp(0) for scores in parts])
    shares = (lses - lses.logsumexp(0)).exp().tolist()
    labels = [_numbers(len(scores)) for scores in parts] if words is None else words
    alone = [
        Bars(
            labels[i],
            scores.softmax(0).tolist(),
            [i] * len(scores),
            f"part {ascii_lowercase[i]}, LSE {float(lses[i]):.2f}",
        )
        for i, scores in enumerate(parts)
    ]
    weights = [share * weight for share, bars in zip(shares, alone, strict=True) for weight in bars.values]
    groups = [group for bars in alone for group in bars.groups]
    title = "merged: " + " + ".join(f"{share:.2f} of {ascii_lowercase[i]}" for i, share in enumerate(shares))
    return Drawing([alone, [Bars([word for part in labels for word in part], weights, groups, title)]])


def difference(
    first: Float[Tensor, "s"], second: Float[Tensor, "s"], factor: float, *, words: Sequence[str] | None = None
) -> Drawing:
    """Draw the weights of two softmaxes, and of their difference: `first - factor * second`.

    Args:
        first: the scores of one query in the first softmax.
        second: its scores in the second.
        factor: what the second is multiplied with, lambda.
        words: the keys; numbers if None.
    """
    labels = _numbers(len(first)) if words is None else words
    one, two = first.softmax(0), second.softmax(0)
    kinds = (("first", one), ("second", two), (f"first - {factor:g} second", one - factor * two))
    return Drawing(
        [[Bars(labels, weights.tolist(), [i] * len(labels), title) for i, (title, weights) in enumerate(kinds)]]
    )


# --- what the drawings share ---


@dataclass(frozen=True, eq=False)
class _Sequence:
    """One sequence of a batch on the host."""

    name: str
    group: int
    query_len: int
    seq_len: int
    words: Sequence[str]
    blocks: Sequence[int] = field(default_factory=list)

    @property
    def queries(self) -> list[str]:
        missing = max(0, self.query_len - self.seq_len)  # queries before the first key
        return [*["-"] * missing, *self.words[max(0, self.seq_len - self.query_len) :]]


def _sequences(batch: Batch, words: Words | None, block_size: int | None = None) -> list[_Sequence]:
    tables: list[list[int]] = [[]] * batch.num_seqs
    if block_size is not None:
        tables = check_block_table(batch, block_size=block_size).tolist()
    return [
        _Sequence(
            ascii_lowercase[i % 26],
            i,
            query_len,
            seq_len,
            _numbers(seq_len) if words is None else words[i],
            tables[i][: -(-seq_len // block_size)] if block_size is not None else [],
        )
        for i, (query_len, seq_len) in enumerate(zip(batch.query_lens.tolist(), batch.seq_lens.tolist(), strict=True))
    ]


def _sequence(
    one: _Sequence, rule: Rule, *, block_size: int | None = None, cut: int = 0, chunk_size: int | None = None
) -> Grid:
    """Draw the mask of a sequence, with its blocks above it; the first `cut` of them are gone."""
    spans = []
    if block_size is not None:
        for i, block in enumerate(one.blocks):
            cell = Cell("gone", f"×{block}", one.group) if i < cut else Cell("filled", str(block), one.group)
            spans.append(Span(i * block_size, min((i + 1) * block_size, one.seq_len), cell))
    cuts = range(chunk_size, one.seq_len, chunk_size) if chunk_size else ()
    cells = _cells(rule(one.query_len, one.seq_len), one.group)
    return Grid(cells, one.queries, one.words, spans, cuts, one.name)


def _cells(visible: Bool[Tensor, "t s"], group: int) -> list[list[Cell]]:
    return [[Cell("filled" if seen else "outlined", group=group) for seen in row] for row in visible.tolist()]


def _count(panels: Sequence[Grid], kind: str | None = None) -> int:
    return sum(kind in (None, span.cell.kind) for panel in panels for span in panel.spans)


def _numbers(count: int) -> list[str]:
    return [str(i) for i in range(count)]


def _word_width(words: Iterable[str]) -> float:
    """Give the width of a cell that holds any of the words, in heights of a cell."""
    return max(1.0, 0.4 + LETTER * max(map(len, words), default=0))


# --- as text ---


def _grid_text(grid: Grid) -> str:
    size = max([1, *(len(cell.text) for row in grid.cells for cell in row)])
    indent = max(map(len, grid.rows), default=0) + 3 if any(grid.rows) else 0
    lines = [grid.title] if grid.title else []
    if grid.spans:
        boxes = [_span_text(span, (size + 1) * (span.stop - span.start) - 1) for span in grid.spans]
        boxes = [f"| {box}" if span.start in grid.cuts else box for span, box in zip(grid.spans, boxes, strict=True)]
        lines.append(f"{'':{indent}}{' '.join(boxes)}".rstrip())
    for label, row in zip(grid.rows, grid.cells, strict=True):
        marks = [f"{_mark(cell):{size}}" for cell in row]
        for cut in reversed(grid.cuts):
            marks.insert(cut, "|")
        lines.append(f"{label:{indent}}{' '.join(marks)}".rstrip())
    return "\n".join(lines)


def _mark(cell: Cell) -> str:
    filled = "#" if cell.group == SHARED else "1"
    return cell.text or {"filled": filled, "outlined": ".", "gone": "×", "": ""}[cell.kind]


def _span_text(span: Span, size: int) -> str:
    text = span.cell.text
    return f"[{text:^{size - 2}}]" if size > len(text) + 1 else f"{text:{size}}"


def _bars_text(bars: Bars) -> str:
    size = max(map(len, bars.labels), default=0)
    lines = [
        f"{label:{size}}  {value:5.2f} {'#' * round(40 * max(0.0, value))}"
        for label, value in zip(bars.labels, bars.values, strict=True)
    ]
    return "\n".join([bars.title, *lines] if bars.title else lines)


# --- as a picture: everything in heights of a cell, x to the right and y downwards ---

UNIT = 0.27  # inches that a cell is high
POINTS = 8.5  # size of letters
LETTER = 0.27  # width of a letter
LINE_WIDTH = 40.0  # panels that would go beyond it begin a line of their own
GAP = 1.6  # between panels
TITLE, SPAN = 1.2, 1.3  # room above the cells
SLANT = 52  # degrees by which words above columns are turned
BAR_HEIGHT, BAR_WIDTH = 6.0, 1.3  # of a bar of 1
INK = "#797979"  # as legible on white as on black
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00")  # of the groups
SHARED_COLOUR = "#F0E442"


def _figure(drawing: Drawing) -> Any:
    from matplotlib.figure import Figure

    figure = Figure()
    axes = figure.add_axes((0, 0, 1, 1))
    pen = _Pen(axes)
    y, widest = 0.0, LETTER * len(drawing.note)
    for line in _wrapped(drawing.lines):
        x, head = 0.0, max(_head(panel) for panel in line)
        for panel in line:
            pen.title(panel, x, y)
            pen.panel(panel, x + _left(panel), y + head)
            x += _width(panel) + GAP
        y += head + max(_body(panel) for panel in line) + GAP
        widest = max(widest, x - GAP)
    if drawing.note:
        pen.letters(0.0, y, drawing.note, ha="left")
        y += GAP
    pen.finish()
    bottom = y - GAP + 0.8
    figure.set_size_inches(UNIT * (widest + 0.6), UNIT * (bottom + 0.3))
    axes.set(xlim=(-0.3, widest + 0.3), ylim=(bottom, -0.3))
    axes.axis("off")
    return figure


def _wrapped(lines: Sequence[Sequence[Grid | Bars]]) -> list[list[Grid | Bars]]:
    wrapped: list[list[Grid | Bars]] = []
    for line in lines:
        wrapped.append([])
        for panel in line:
            if wrapped[-1] and sum(_width(other) + GAP for other in wrapped[-1]) + _width(panel) > LINE_WIDTH:
                wrapped.append([])
            wrapped[-1].append(panel)
    return [line for line in wrapped if line]


def _left(panel: Grid | Bars) -> float:
    """Say how much room the labels of the rows take."""
    longest = max(map(len, panel.rows), default=0) if isinstance(panel, Grid) else 0
    return LETTER * longest + 0.4 if longest else 0.0


def _width(panel: Grid | Bars) -> float:
    inside = BAR_WIDTH * len(panel.labels) if isinstance(panel, Bars) else panel.width * _num_columns(panel)
    # A slanted label of the last column leans out.
    lean = max(0.0, 0.62 * LETTER * len(panel.columns[-1]) - 0.3) if isinstance(panel, Grid) and panel.columns else 0.0
    return max(_left(panel) + inside + lean, LETTER * len(panel.title))


def _num_columns(grid: Grid) -> int:
    return max([len(grid.columns), *map(len, grid.cells)])


def _head(panel: Grid | Bars) -> float:
    """Say how much room there is above the cells, or above the line that bars stand on."""
    title = TITLE if panel.title else 0.0
    if isinstance(panel, Bars):
        return title + BAR_HEIGHT * max(0.0, *panel.values) + 1.0
    return title + _label_height(panel.columns) + (SPAN if panel.spans else 0.0)


def _label_height(labels: Sequence[str]) -> float:
    longest = max(map(len, labels), default=0)
    return 0.0 if not longest else 0.9 if longest <= 2 else 0.6 + 0.8 * LETTER * longest


def _body(panel: Grid | Bars) -> float:
    if isinstance(panel, Grid):
        return float(len(panel.cells))
    return _label_height(panel.labels) - BAR_HEIGHT * min(0.0, *panel.values)


class _Pen:
    """Draws panels on the axes of a figure."""

    def __init__(self, axes: Any) -> None:
        self.axes = axes
        self.rectangles: dict[tuple, list[list[tuple[float, float]]]] = {}  # corners, by style

    def title(self, panel: Grid | Bars, x: float, y: float) -> None:
        self.letters(x, y + 0.4, panel.title, ha="left", weight="bold")

    def panel(self, panel: Grid | Bars, x: float, y: float) -> None:
        if isinstance(panel, Grid):
            self.grid(panel, x, y)
        else:
            self.bars(panel, x, y)

    def grid(self, grid: Grid, x: float, y: float) -> None:
        """Draw a grid whose first cell has its corner at (x, y)."""
        for i, (label, row) in enumerate(zip(grid.rows, grid.cells, strict=True)):
            self.letters(x - 0.3, y + i + 0.5, label, ha="right")
            for j, cell in enumerate(row):
                self.box(x + j * grid.width, y + i, grid.width, 1.0, cell)
        top = y - SPAN if grid.spans else y
        for span in grid.spans:
            self.box(x + span.start * grid.width, top, (span.stop - span.start) * grid.width, 1.0, span.cell)
        for cut in grid.cuts:
            at = x + cut * grid.width
            self.axes.plot([at, at], [top, y + len(grid.cells)], color=INK, lw=1.5, clip_on=False)
        self.labels(grid.columns, x + grid.width / 2, top - 0.3, grid.width, up=True)

    def bars(self, bars: Bars, x: float, y: float) -> None:
        """Draw bars that stand on the line at y."""
        for i, (value, group) in enumerate(zip(bars.values, bars.groups, strict=True)):
            left, top = x + (i + 0.12) * BAR_WIDTH, y - BAR_HEIGHT * max(0.0, value)
            self.rectangle(left, top, 0.76 * BAR_WIDTH, BAR_HEIGHT * abs(value), facecolor=_colour(group))
            self.letters(left + 0.38 * BAR_WIDTH, top - 0.45, f"{value:.2f}")
        self.axes.plot([x, x + BAR_WIDTH * len(bars.values)], [y, y], color=INK, lw=0.8, clip_on=False)
        lowest = y - BAR_HEIGHT * min(0.0, *bars.values)
        self.labels(bars.labels, x + BAR_WIDTH / 2, lowest + 0.4, BAR_WIDTH, up=False)

    def box(self, x: float, y: float, width: float, height: float, cell: Cell) -> None:
        style: dict[str, Any] = dict(facecolor=_colour(cell.group))
        if cell.kind != "filled":
            line = (0, (3, 2)) if cell.kind == "gone" else "-"
            style = dict(facecolor="none", edgecolor=INK, linewidth=0.7, linestyle=line, alpha=0.8)
        if cell.kind:
            self.rectangle(x + 0.06, y + 0.06, width - 0.12, height - 0.12, **style)
            ink = _ink_on(_colour(cell.group)) if cell.kind == "filled" else INK
            self.letters(x + width / 2, y + height / 2, cell.text, color=ink)

    def labels(self, labels: Sequence[str], x: float, y: float, step: float, *, up: bool) -> None:
        """Write the labels of columns, above them or below: numbers upright, words aslant."""
        slanted = max(map(len, labels), default=0) > 2
        for i, label in enumerate(labels):
            if not slanted:
                self.letters(x + i * step, y - 0.1 if up else y + 0.1, label)
            elif up:
                self.letters(x + i * step - 0.1, y, label, ha="left", rotation=SLANT, rotation_mode="anchor")
            else:
                self.letters(x + i * step + 0.25, y, label, ha="right", rotation=SLANT, rotation_mode="anchor")

    def letters(self, x: float, y: float, text: str, *, color: str = INK, ha: str = "center", **style: Any) -> None:
        if text:
            self.axes.text(x, y, text, color=color, ha=ha, va="center", fontsize=POINTS, **style)

    def rectangle(self, x: float, y: float, width: float, height: float, **style: Any) -> None:
        corners = [(x, y), (x + width, y), (x + width, y + height), (x, y + height), (x, y)]
        self.rectangles.setdefault(tuple(style.items()), []).append(corners)

    def finish(self) -> None:
        """Put the rectangles on the axes: those of one style are one path, which keeps an SVG small."""
        from matplotlib.patches import PathPatch
        from matplotlib.path import Path as Outline

        for style, all_corners in self.rectangles.items():
            outline = Outline.make_compound_path(*[Outline(corners, closed=True) for corners in all_corners])
            self.axes.add_patch(PathPatch(outline, clip_on=False, **{"linewidth": 0, **dict(style)}))


def _colour(group: int) -> str:
    return SHARED_COLOUR if group == SHARED else COLOURS[group % len(COLOURS)]


def _ink_on(colour: str) -> str:
    red, green, blue = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return "white" if 0.3 * red + 0.59 * green + 0.11 * blue < 100 else "black"


# --- the command ---

# Three requests in the middle of their work: a at the end of its prompt, b writing its answer, c at its beginning.
WORDS = [text.split() for text in ("Why is the sky blue", "Why do cats purr ? They like", "Name three colours")]
LENS = ((2, 5), (1, 7), (3, 3))
TABLES = ((9, 2), (4, 7), (1,))
SYSTEM = ["You", "are", "a", "kind", "and", "patient", "museum", "guide"]  # before all three, in blocks 5 and 0


@dataclass(frozen=True)
class Settings:
    """What the drawings of the command can be told.

    Attributes:
        window: tokens in a sliding window.
        chunk: tokens in a chunk of local attention.
        block_size: tokens in a block.
        lens: query length and length of each sequence; None for the three requests.
    """

    window: int = 3
    chunk: int = 4
    block_size: int = 4
    lens: Sequence[tuple[int, int]] | None = None

    def batch(self, system: Sequence[str] = ()) -> tuple[Batch, Words | None]:
        """Make the batch, and the words of its sequences if they have any, behind the words of a system prompt."""
        lens = self.lens or [(q, s + len(system)) for q, s in LENS]
        words = None if self.lens else [[*system, *each] for each in WORDS]
        if self.lens is None and self.block_size == 4:
            tables = [[*(5, 0)[: len(system) // 4], *blocks] for blocks in TABLES]
        else:
            shared = min((s - q for q, s in lens), default=0) // self.block_size if system else 0
            blocks = count(shared)
            needed = [-(-s // self.block_size) - shared for _, s in lens]
            tables = [[*range(shared), *(next(blocks) for _ in range(number))] for number in needed]
        return make_batch([q for q, _ in lens], [s for _, s in lens], tables), words


def example(name: str, settings: Settings | None = None) -> Drawing:
    """Draw one of `EXAMPLES`.

    Raises:
        ValueError: if there is no drawing of that name, or the settings do not fit each other.
    """
    if name not in EXAMPLES:
        raise ValueError(f"name: expected one of {', '.join(EXAMPLES)}, got {name!r}")
    return EXAMPLES[name](settings or Settings())


def _chunked_prefill(settings: Settings) -> Drawing:
    batch, words = settings.batch()
    return sequences(batch, words=words)


def _dense(settings: Settings) -> Drawing:
    batch, words = settings.batch()
    return ragged(batch, words=words)


def _batch(settings: Settings) -> Drawing:
    batch, words = settings.batch()
    return step(batch, words=words)


def _block_table(settings: Settings) -> Drawing:
    batch, words = settings.batch()
    return block_table(batch, block_size=settings.block_size, num_blocks=10 if words else None, words=words)


def _sliding_window(settings: Settings) -> Drawing:
    batch, words = settings.batch()
    return window(batch, (settings.window - 1, 0), block_size=settings.block_size, words=words)


def _local(settings: Settings) -> Drawing:
    batch, words = settings.batch()
    return virtual_batches(batch, settings.chunk, block_size=settings.block_size, words=words)


def _cascade(settings: Settings) -> Drawing:
    batch, words = settings.batch(system=SYSTEM)
    return cascade(batch, block_size=settings.block_size, words=words)


def _merge(settings: Settings) -> Drawing:
    scores = torch.tensor([0.3, 0.0, 2.2, 0.4, 1.6, 0.5, 0.2])
    block_size = settings.block_size
    words = [WORDS[1][i : i + block_size] for i in range(0, 7, block_size)]
    return merge(scores.split(block_size), words=words)


def _differential(settings: Settings) -> Drawing:
    first = torch.tensor([0.3, 0.0, 2.2, 0.4, 0.1, 0.5, 0.2])
    second = torch.tensor([0.4, 0.0, 0.0, 0.5, 0.1, 0.6, 0.2])
    return difference(first, second, 0.6, words=WORDS[1])


def _engine(settings: Settings) -> Drawing:
    prompts, budget, steps = {"a": 9, "b": 5, "c": 7}, 6, []
    for _ in range(7):
        row: dict[str, int] = {}
        for name in sorted(prompts, key=lambda name: prompts[name] > 1):  # decodes first
            new = min(prompts[name], budget - sum(row.values()))
            if new:
                row[name] = new
                prompts[name] = max(1, prompts[name] - new)  # when its prompt is done, one token a step
        steps.append(row)
    return schedule(steps, budget=budget)


def _pictures(settings: Settings) -> Drawing:
    rules = {
        "everything": masks.full(8, 8),
        "causal": masks.causal(8, 8),
        f"window of {settings.window}": masks.window(8, 8, (settings.window - 1, 0)),
        f"chunks of {settings.chunk}": masks.chunk(8, 8, settings.chunk),
    }
    return side_by_side(**{name: mask(visible, group=i) for i, (name, visible) in enumerate(rules.items())})


EXAMPLES: dict[str, Callable[[Settings], Drawing]] = {
    "pictures": _pictures,
    "causal": _chunked_prefill,
    "window": _sliding_window,
    "local": _local,
    "cascade": _cascade,
    "merge": _merge,
    "table": _block_table,
    "batch": _batch,
    "dense": _dense,
    "differential": _differential,
    "engine": _engine,
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a drawing, and write it as a picture."""
    parser = argparse.ArgumentParser(prog="python -m refattn.picture", description="Draw what a path computes.")
    parser.add_argument("name", choices=EXAMPLES)
    parser.add_argument("--window", type=int, default=Settings.window, help="tokens in a sliding window")
    parser.add_argument("--chunk", type=int, default=Settings.chunk, help="tokens in a chunk of local attention")
    parser.add_argument("--block-size", type=int, default=Settings.block_size, help="tokens in a block")
    parser.add_argument(
        "--lens", type=_pair, nargs="+", metavar="Q,S", help="new tokens and all tokens of each sequence"
    )
    parser.add_argument("--output", type=Path, help="a PNG or an SVG; NAME.png if left out, - for none")
    options = parser.parse_args(arguments)
    output = options.output or Path(f"{options.name}.png")
    try:
        drawing = example(options.name, Settings(options.window, options.chunk, options.block_size, options.lens))
        if str(output) != "-":
            drawing.save(output)
    except ValueError as error:
        parser.error(str(error))
    sys.stdout.write(drawing.text() + "\n")


def _pair(text: str) -> tuple[int, int]:
    query_len, seq_len = map(int, text.split(","))
    return query_len, seq_len


if __name__ == "__main__":
    main()
