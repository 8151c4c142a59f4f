"""A search over shapes: random workloads of every path, held to the reference and to an oracle of its own.

workload    a call as plain numbers: drawn, written as one line, made smaller
inputs      its tensors, and how it is planned and made
oracle      what it should return: float64, a dense mask by rules on positions
moves       the same for what moves data and makes tables
trial       one call with one kernel, judged
loop        many of them
"""

from refattn.conformance.search.loop import Finding, Search, shrink, workload
from refattn.conformance.search.trial import Outcome, Truth, Twin, is_fatal, normal, reference, try_kernel
from refattn.conformance.search.workload import PATHS, Palette, Workload, draw, draw_lens, draw_palette, workload_of

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
