"""Panels as a figure of matplotlib, and as the bytes of a PNG or an SVG.

The unit of every coordinate is the height of a cell; x grows to the right and y downwards.
"""

import io
from collections.abc import Iterable, Sequence
from typing import Any

from twinattn.course.drawing.panels import SHARED, Bars, Cell, Grid, Panel

UNIT = 0.27  # height of a cell in inches
POINTS = 8.5  # font size
LETTER = 0.27  # width of a letter
LINE_WIDTH = 40.0  # a panel that would reach beyond it begins a new line
GAP = 1.6  # between panels
TITLE, SPAN = 1.2, 1.3  # room for them above the cells
SLANT = 52  # angle of words above and below columns, in degrees
BAR_HEIGHT, BAR_WIDTH = 6.0, 1.3  # the size of a bar whose value is 1
INK = "#767676"  # legible on white (4.5 : 1), and nearly as well on black
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00")  # one per group
SHARED_COLOUR = "#F0E442"


def as_figure(lines: Sequence[Sequence[Panel]], note: str = "") -> Any:
    """Draw with matplotlib, on a transparent background: line below line, and the note last.

    Raises:
        ImportError: if matplotlib is not installed.
    """
    from matplotlib.figure import Figure

    figure = Figure()
    axes = figure.add_axes((0, 0, 1, 1))
    canvas = _Canvas(axes)
    y, max_width = 0.0, LETTER * len(note)
    for line in _wrapped_lines(lines):
        x, head = 0.0, max(_head_height(panel) for panel in line)
        for panel in line:
            canvas.title(panel, x, y)
            canvas.panel(panel, x + _label_width(panel), y + head)
            x += _panel_width(panel) + GAP
        y += head + max(_body_height(panel) for panel in line) + GAP
        max_width = max(max_width, x - GAP)
    if note:
        canvas.text(0.0, y, note, ha="left")
        y += GAP
    canvas.finish()
    bottom = y - GAP + 0.8
    figure.set_size_inches(UNIT * (max_width + 0.6), UNIT * (bottom + 0.3))
    axes.set(xlim=(-0.3, max_width + 0.3), ylim=(bottom, -0.3))
    axes.axis("off")
    return figure


def as_image(lines: Sequence[Sequence[Panel]], note: str = "", kind: str = "svg") -> bytes:
    """Return the bytes of an image file, which are equal for equal drawings.

    Args:
        lines: panels side by side, line below line.
        note: a sentence below them.
        kind: "svg" or "png".

    Raises:
        ImportError: if matplotlib is not installed.
    """
    import matplotlib

    buffer = io.BytesIO()
    # No random ids and no date, and text that stays text, so that it can be searched.
    with matplotlib.rc_context({"svg.hashsalt": "refattn", "svg.fonttype": "none"}):
        metadata = dict.fromkeys(("Date", "Creator") if kind == "svg" else ("Software",))
        as_figure(lines, note).savefig(buffer, format=kind, dpi=150, transparent=True, metadata=metadata)
    return buffer.getvalue()


def cell_width(words: Iterable[str]) -> float:
    """Return the width of a cell that has room for any of the words, in heights of a cell."""
    return max(1.0, 0.4 + LETTER * max(map(len, words), default=0))


# --- sizes of panels ---


def _wrapped_lines(lines: Sequence[Sequence[Panel]]) -> list[list[Panel]]:
    wrapped: list[list[Panel]] = []
    for line in lines:
        wrapped.append([])
        for panel in line:
            if (
                wrapped[-1]
                and sum(_panel_width(other) + GAP for other in wrapped[-1]) + _panel_width(panel) > LINE_WIDTH
            ):
                wrapped.append([])
            wrapped[-1].append(panel)
    return [line for line in wrapped if line]


def _label_width(panel: Panel) -> float:
    """Return the width of the labels of the rows."""
    longest = max(map(len, panel.rows), default=0) if isinstance(panel, Grid) else 0
    return LETTER * longest + 0.4 if longest else 0.0


def _panel_width(panel: Panel) -> float:
    inside = BAR_WIDTH * len(panel.labels) if isinstance(panel, Bars) else panel.width * _num_columns(panel)
    # A slanted label of the last column leans out.
    lean = max(0.0, 0.62 * LETTER * len(panel.columns[-1]) - 0.3) if isinstance(panel, Grid) and panel.columns else 0.0
    return max(_label_width(panel) + inside + lean, LETTER * len(panel.title))


def _num_columns(grid: Grid) -> int:
    return max([len(grid.columns), *map(len, grid.cells)])


def _head_height(panel: Panel) -> float:
    """Return the height above the cells, or above the line that bars stand on."""
    title = TITLE if panel.title else 0.0
    if isinstance(panel, Bars):
        return title + BAR_HEIGHT * max(0.0, *panel.values) + 1.0
    return title + _label_height(panel.columns) + (SPAN if panel.spans else 0.0)


def _label_height(labels: Sequence[str]) -> float:
    longest = max(map(len, labels), default=0)
    return 0.0 if not longest else 0.9 if longest <= 2 else 0.6 + 0.8 * LETTER * longest


def _body_height(panel: Panel) -> float:
    """Return the height of the cells, or of what is below the line that bars stand on."""
    if isinstance(panel, Grid):
        return float(len(panel.cells))
    return _label_height(panel.labels) - BAR_HEIGHT * min(0.0, *panel.values)


# --- drawing ---


class _Canvas:
    """The axes of a figure, and what is drawn on them."""

    def __init__(self, axes: Any) -> None:
        self.axes = axes
        self.rectangles: dict[tuple, list[list[tuple[float, float]]]] = {}  # corners, by style

    def title(self, panel: Panel, x: float, y: float) -> None:
        self.text(x, y + 0.4, panel.title, ha="left", weight="bold")

    def panel(self, panel: Panel, x: float, y: float) -> None:
        if isinstance(panel, Grid):
            self.grid(panel, x, y)
        else:
            self.bars(panel, x, y)

    def grid(self, grid: Grid, x: float, y: float) -> None:
        """Draw a grid whose first cell has its corner at (x, y)."""
        for i, (label, row) in enumerate(zip(grid.rows, grid.cells, strict=True)):
            self.text(x - 0.3, y + i + 0.5, label, ha="right")
            for j, cell in enumerate(row):
                self.box(x + j * grid.width, y + i, grid.width, 1.0, cell)
        top = y - SPAN if grid.spans else y
        for span in grid.spans:
            self.box(x + span.start * grid.width, top, (span.stop - span.start) * grid.width, 1.0, span.cell)
        for cut in grid.cuts:
            at = x + cut * grid.width
            self.axes.plot([at, at], [top, y + len(grid.cells)], color=INK, lw=1.5, clip_on=False)
        self.labels(grid.columns, x + grid.width / 2, top - 0.3, grid.width, above=True)

    def bars(self, bars: Bars, x: float, y: float) -> None:
        """Draw bars that stand on the line at y."""
        for i, (value, group) in enumerate(zip(bars.values, bars.groups, strict=True)):
            left, top = x + (i + 0.12) * BAR_WIDTH, y - BAR_HEIGHT * max(0.0, value)
            self.rectangle(left, top, 0.76 * BAR_WIDTH, BAR_HEIGHT * abs(value), facecolor=_group_colour(group))
            self.text(left + 0.38 * BAR_WIDTH, top - 0.45, f"{value:.2f}")
        self.axes.plot([x, x + BAR_WIDTH * len(bars.values)], [y, y], color=INK, lw=0.8, clip_on=False)
        lowest = y - BAR_HEIGHT * min(0.0, *bars.values)
        self.labels(bars.labels, x + BAR_WIDTH / 2, lowest + 0.4, BAR_WIDTH, above=False)

    def box(self, x: float, y: float, width: float, height: float, cell: Cell) -> None:
        """Draw a cell, a little smaller than its box."""
        if not cell.kind:
            return
        if cell.kind == "filled":
            fill = _group_colour(cell.group)
            style: dict[str, Any] = dict(facecolor=fill)
            colour = text_colour(fill)
        else:
            line = (0, (3, 2)) if cell.kind == "gone" else "-"
            style = dict(facecolor="none", edgecolor=INK, linewidth=0.7, linestyle=line, alpha=0.8)
            colour = INK
        self.rectangle(x + 0.06, y + 0.06, width - 0.12, height - 0.12, **style)
        self.text(x + width / 2, y + height / 2, cell.text, color=colour)
        if cell.kind == "gone":
            self.cross(x + width / 2, y + height / 2, width / 2 - 0.06, height / 2 - 0.06)

    def cross(self, x: float, y: float, half_width: float, half_height: float) -> None:
        """Cross out a box around (x, y), but for a text in its middle if it is wide enough."""
        start = 0.6 / half_width if half_width > 1 else 0.0
        for right in (-half_width, half_width):
            for down in (-half_height, half_height):
                ends = [x + start * right, x + right], [y + start * down, y + down]
                self.axes.plot(*ends, color=INK, lw=0.7, alpha=0.8, clip_on=False)

    def labels(self, labels: Sequence[str], x: float, y: float, step: float, *, above: bool) -> None:
        """Write the labels of columns, above or below them: numbers upright, words slanted."""
        slanted = max(map(len, labels), default=0) > 2
        for i, label in enumerate(labels):
            if not slanted:
                self.text(x + i * step, y - 0.1 if above else y + 0.1, label)
            elif above:
                self.text(x + i * step - 0.1, y, label, ha="left", rotation=SLANT, rotation_mode="anchor")
            else:
                self.text(x + i * step + 0.25, y, label, ha="right", rotation=SLANT, rotation_mode="anchor")

    def text(self, x: float, y: float, text: str, *, color: str = INK, ha: str = "center", **style: Any) -> None:
        if text:
            self.axes.text(x, y, text, color=color, ha=ha, va="center", fontsize=POINTS, **style)

    def rectangle(self, x: float, y: float, width: float, height: float, **style: Any) -> None:
        corners = [(x, y), (x + width, y), (x + width, y + height), (x, y + height), (x, y)]
        self.rectangles.setdefault(tuple(style.items()), []).append(corners)

    def finish(self) -> None:
        """Put the rectangles on the axes: those of one style are one path, which keeps an SVG small."""
        from matplotlib.patches import PathPatch
        from matplotlib.path import Path

        for style, all_corners in self.rectangles.items():
            outline = Path.make_compound_path(*[Path(corners, closed=True) for corners in all_corners])
            self.axes.add_patch(PathPatch(outline, clip_on=False, **{"linewidth": 0, **dict(style)}))


def _group_colour(group: int) -> str:
    return SHARED_COLOUR if group == SHARED else COLOURS[group % len(COLOURS)]


def text_colour(fill: str) -> str:
    """Return the colour, black or white, that is legible on a fill."""
    red, green, blue = (int(fill[i : i + 2], 16) for i in (1, 3, 5))
    return "white" if 0.3 * red + 0.59 * green + 0.11 * blue < 100 else "black"
