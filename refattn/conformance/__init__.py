"""Prove anybody's attention: ragged cases, poisoned memory, the mask read out, one tolerance. Our tests use it too."""

from refattn.conformance.call import attend, prepare
from refattn.conformance.cases import CASES, HARMLESS, POISON, Case, Paged, build, poisoned
from refattn.conformance.readout import assert_same_masks, masks_by_hand, read_masks
from refattn.conformance.spec import PathSpec
from refattn.conformance.tolerance import assert_close, assert_matches_reference

__all__ = [
    "CASES",
    "HARMLESS",
    "POISON",
    "Case",
    "Paged",
    "PathSpec",
    "assert_close",
    "assert_matches_reference",
    "assert_same_masks",
    "attend",
    "build",
    "masks_by_hand",
    "poisoned",
    "prepare",
    "read_masks",
]
