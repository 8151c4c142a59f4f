"""A search over shapes: random workloads of every path, compared with the reference and an independent oracle.

draw        random workloads, and how to shrink them
inputs      the tensors, the plan and the call of a workload
compressed  the same for entries beside a window, and for how they are computed
sparse      the same for selected keys, and their scores
recurrent   the same for layers that keep a state
replay      the same for those that replay their last inputs
layout      the choice between these four
moves       checks of functions that move data or make tables
trial       one call of one kernel, and its comparison
loop        many calls
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
