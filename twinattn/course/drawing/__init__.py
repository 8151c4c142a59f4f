"""Drawings of what the paths compute: masks, block tables, virtual batches, chunks, what a cascade shares, a merge.

    twinattn draw local --chunk 4 --lens 4,6 10,17 5,9 --output local.svg

prints a drawing as text, and writes it as an image if `--output` is given. In Python, a drawing is made from a batch or
a tensor, and is displayed in a notebook. It also has a text form:

    >>> from refattn import drawing, masks
    >>> print(drawing.mask(masks.causal(2, 5)).text())
    0   1 1 1 1 .
    1   1 1 1 1 1

A drawing consists of panels, and a panel is a grid of cells or a few bars. The colours are those of Okabe and Ito,
which colour-blind people can tell apart, and no information is in the colour alone. The background is transparent and
the lines are grey, so drawings work on light and on dark pages. Only figures and images need matplotlib.
"""

from twinattn.course.drawing.drawing import Drawing
from twinattn.course.drawing.examples import EXAMPLES, USES, Settings, example
from twinattn.course.drawing.panels import Bars, Cell, Grid, Span
from twinattn.course.drawing.pictures import (
    block_table,
    cascade,
    context_chunks,
    difference,
    mask,
    memory,
    merge,
    quantized_key,
    ragged,
    ranks,
    schedule,
    sequences,
    side_by_side,
    step,
    virtual_batches,
    window,
)

__all__ = [
    "EXAMPLES",
    "USES",
    "Bars",
    "Cell",
    "Drawing",
    "Grid",
    "Settings",
    "Span",
    "block_table",
    "cascade",
    "quantized_key",
    "context_chunks",
    "difference",
    "example",
    "mask",
    "memory",
    "merge",
    "ragged",
    "ranks",
    "schedule",
    "sequences",
    "side_by_side",
    "step",
    "virtual_batches",
    "window",
]
