"""The batches that every path is tested with, as test parameters: those of `refattn.conformance`, and drawn ones."""

import pytest
from hypothesis import strategies as st

from refattn.conformance import (
    CASES,
    HARMLESS,
    POISON,
    Case,
    Paged,
    assert_same_masks,
    attend,
    build,
    masks_by_hand,
    poisoned,
    read_masks,
)
from refattn.conformance.cases import FINITE_POISON, GARBAGE, STALE

__all__ = [
    "CASES",
    "FINITE_POISON",
    "GARBAGE",
    "HARMLESS",
    "POISON",
    "STALE",
    "Case",
    "Paged",
    "assert_same_masks",
    "attend",
    "build",
    "each_case",
    "masks_by_hand",
    "poisoned",
    "ragged_cases",
    "read_masks",
]

each_case = pytest.mark.parametrize("case", CASES, ids=str)


@st.composite
def ragged_cases(draw: st.DrawFn, *, head_sizes: tuple[int, ...] = (64, 96, 128)) -> Case:
    """Draw a whole ragged batch: any mix of first chunks, later chunks, decodes, sequences without queries or keys."""
    lens = draw(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 90)), min_size=1, max_size=6))
    hk = draw(st.integers(1, 3))
    return Case(
        "drawn",
        tuple(lens),
        heads=(hk * draw(st.integers(1, 4)), hk),
        head_size=draw(st.sampled_from(head_sizes)),
        block_size=draw(st.sampled_from((1, 16, 24, 64))),
        layout=draw(st.sampled_from(("NHD", "HND"))),
        padding_rows=draw(st.integers(0, 3)),
    )
