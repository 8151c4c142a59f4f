"""Prove any attention kernel: the contract, property by property; ragged and poisoned batches, one tolerance.

    python -m refattn.conformance my_package:my_attention --path chunked_prefill

checks your kernel (`conformance.check`; `conformance.testing` for pytest). The names imported here need only torch;
the search for failing batches needs the extra `conformance`.
"""

from refattn.conformance.call import attend, prepare
from refattn.conformance.cases import CASES, HARMLESS, POISON, Case, Paged, build, poisoned
from refattn.conformance.example import Example
from refattn.conformance.kernel import claims
from refattn.conformance.readout import assert_same_masks, masks_by_hand, read_masks
from refattn.conformance.spec import PathSpec
from refattn.conformance.tolerance import assert_close, assert_matches_reference
from refattn.conformance.workload import Workload

__all__ = [
    "CASES",
    "HARMLESS",
    "POISON",
    "Case",
    "Example",
    "Paged",
    "PathSpec",
    "Workload",
    "assert_close",
    "assert_matches_reference",
    "assert_same_masks",
    "attend",
    "build",
    "claims",
    "masks_by_hand",
    "poisoned",
    "prepare",
    "read_masks",
]
