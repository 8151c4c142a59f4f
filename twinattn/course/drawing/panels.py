"""What a drawing is made of: grids of cells, and bars."""

from collections.abc import Sequence
from dataclasses import dataclass

SHARED = -1  # the group of what several sequences share


@dataclass(frozen=True)
class Cell:
    """One cell of a grid.

    Attributes:
        kind: "filled" (in the colour of its group), "outlined", "gone" (dashed and crossed out), or "" for no cell.
        text: what is written in it.
        group: selects its colour: the index of a sequence, or `SHARED`.
    """

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
    """Rows of cells, with labels for rows and columns.

    Attributes:
        cells: the rows.
        rows: a label for each row; it may be empty.
        columns: a label for each column, or no labels at all.
        spans: boxes above the columns.
        cuts: columns before which a line is drawn.
        title: what the grid shows.
        width: the width of a cell, in heights of a cell.
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
    """A bar for each label in the colour of its group, drawn upwards, or downwards where its value is negative."""

    labels: Sequence[str]
    values: Sequence[float]
    groups: Sequence[int]
    title: str = ""


Panel = Grid | Bars
