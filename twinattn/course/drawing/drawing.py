"""A drawing: rows of panels that can be shown as text, as a figure, as an image file, or in a notebook."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from twinattn.course.drawing.figure import as_figure, as_image
from twinattn.course.drawing.panels import Panel
from twinattn.course.drawing.text import as_text


@dataclass(frozen=True)
class Drawing:
    """Lines of panels. A notebook displays them as an image.

    Attributes:
        lines: panels side by side, line below line.
        note: a sentence below them.
    """

    lines: Sequence[Sequence[Panel]]
    note: str = ""

    def text(self) -> str:
        """Draw with characters, panel below panel."""
        return as_text(self.lines, self.note)

    def figure(self) -> Any:
        """Draw with matplotlib, on a transparent background.

        Raises:
            ImportError: if matplotlib is not installed.
        """
        return as_figure(self.lines, self.note)

    def save(self, path: Path | str) -> None:
        """Write an image file.

        Raises:
            ValueError: if the path ends neither in .png nor in .svg.
            ImportError: if matplotlib is not installed.
        """
        suffix = Path(path).suffix
        if suffix not in (".png", ".svg"):
            raise ValueError(f"path: expected a .png or an .svg, got {path}")
        Path(path).write_bytes(as_image(self.lines, self.note, suffix[1:]))

    def __repr__(self) -> str:
        return self.text()  # what a terminal shows, and a notebook that cannot display the image

    def _repr_svg_(self) -> str:
        return as_image(self.lines, self.note, "svg").decode()
