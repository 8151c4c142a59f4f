"""Panels as text: a grid as rows of 1 and `.`, bars as rows of `#`."""

from collections.abc import Sequence

from twinattn.course.drawing.panels import SHARED, Bars, Cell, Grid, Panel, Span


def as_text(lines: Sequence[Sequence[Panel]], note: str = "") -> str:
    """Draw with characters, panel below panel, and the note last."""
    panels = [_grid_text(panel) if isinstance(panel, Grid) else _bars_text(panel) for line in lines for panel in line]
    return "\n\n".join([*panels, note] if note else panels)


def _grid_text(grid: Grid) -> str:
    size = max([1, *(len(cell.text) for row in grid.cells for cell in row)])
    indent = max(map(len, grid.rows), default=0) + 3 if any(grid.rows) else 0
    lines = [grid.title] if grid.title else []
    if grid.spans:
        boxes = [_span_text(span, (size + 1) * (span.stop - span.start) - 1) for span in grid.spans]
        boxes = [f"| {box}" if span.start in grid.cuts else box for span, box in zip(grid.spans, boxes, strict=True)]
        lines.append(f"{'':{indent}}{' '.join(boxes)}".rstrip())
    for label, row in zip(grid.rows, grid.cells, strict=True):
        marks = [f"{_cell_text(cell):{size}}" for cell in row]
        for cut in reversed(grid.cuts):
            marks.insert(cut, "|")
        lines.append(f"{label:{indent}}{' '.join(marks)}".rstrip())
    return "\n".join(lines)


def _cell_text(cell: Cell) -> str:
    filled = "#" if cell.group == SHARED else "1"
    return cell.text or {"filled": filled, "outlined": ".", "gone": "×", "": ""}[cell.kind]


def _span_text(span: Span, size: int) -> str:
    text = span.cell.text
    if span.cell.kind == "gone":  # crossed out
        return f"[{text:-^{size - 2}}]" if size > len(text) + 3 else f"{'×':{size}}"
    return f"[{text:^{size - 2}}]" if size > len(text) + 1 else f"{text:{size}}"


def _bars_text(bars: Bars) -> str:
    size = max(map(len, bars.labels), default=0)
    lines = [
        f"{label:{size}}  {value:5.2f} {'#' * round(40 * max(0.0, value))}"
        for label, value in zip(bars.labels, bars.values, strict=True)
    ]
    return "\n".join([bars.title, *lines] if bars.title else lines)
