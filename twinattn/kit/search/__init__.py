"""A search over shapes: random workloads of every path, held to the reference and to an oracle of its own.

draw        workloads: drawn, and made smaller
inputs      the tensors of one, and how it is planned and made
sparse      the same where keys are selected, and scored
recurrent   the same for layers that keep a state
layout      which of the three it is
moves       the same for what moves data and makes tables
trial       one call with one kernel, judged
loop        many of them
"""

from twinattn.kit.search.draw import Palette, draw, draw_lens, draw_palette
from twinattn.kit.search.loop import Finding, Search, shrink, workload
from twinattn.kit.search.trial import Outcome, Truth, Twin, is_fatal, normal, reference, try_kernel
from twinattn.kit.workload import PATHS, Workload, workload_of

__all__ = [
    "PATHS",
    "Finding",
    "Outcome",
    "Palette",
    "Search",
    "Truth",
    "Twin",
    "Workload",
    "draw",
    "draw_lens",
    "draw_palette",
    "is_fatal",
    "normal",
    "reference",
    "shrink",
    "try_kernel",
    "workload",
    "workload_of",
]
