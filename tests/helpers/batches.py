"""The batches that every path is tested with, as test parameters: those of `twinattn.kit`, and drawn ones."""

from dataclasses import replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st

from refattn.plan import Plan
from twinattn.kit import (
    CASES,
    HARMLESS,
    POISON,
    Case,
    Paged,
    assert_same_masks,
    build,
    masks_by_hand,
    plan_and_attend,
    poisoned,
    read_masks,
)
from twinattn.kit.cases import FINITE_POISON, GARBAGE, STALE
from twinattn.kit.search import draw_lens

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
    "build",
    "each_case",
    "first_keys",
    "masks_by_hand",
    "of_batches",
    "plan_and_attend",
    "poisoned",
    "ragged_cases",
    "read_masks",
]


def first_keys(plan: Plan) -> list[int]:
    """List the first key of each sequence that has queries; all are 0 where a plan does not say."""
    starts = [0] * plan.batch.num_seqs if plan.first_keys is None else plan.first_keys.tolist()
    return [start for start, q in zip(starts, plan.batch.query_lens.tolist(), strict=True) if q]


each_case = pytest.mark.parametrize("case", CASES, ids=str)
# Half as many generated batches as generated numbers: each is a call of both twins.
of_batches = settings(max_examples=settings.default.max_examples // 2)


def with_a_prompt(cases: st.SearchStrategy[Case], *, shortest: int) -> st.SearchStrategy[Case]:
    """Draw cases that have a prompt of some tokens or more, before, between or after the other sequences."""
    prompts = st.tuples(st.integers(shortest, 300), st.integers(0, 200), st.integers(0, 6))

    def put_in(case: Case, prompt: tuple[int, int, int]) -> Case:
        query_len, context, at = prompt
        return replace(case, lens=(*case.lens[:at], (query_len, context + query_len), *case.lens[at:]))

    return st.builds(put_in, cases, prompts)


@st.composite
def ragged_cases(draw: st.DrawFn, *, head_sizes: tuple[int, ...] = (64, 96, 128), longest: int = 90) -> Case:
    """Draw a whole ragged batch, with the lengths that the search tries."""
    random = draw(st.randoms(use_true_random=False))  # Hypothesis chooses each of its numbers
    hk = random.randint(1, 3)
    return Case(
        "drawn",
        draw_lens(random, longest=longest),
        heads=(hk * random.randint(1, 4), hk),
        head_size=random.choice(head_sizes),
        block_size=random.choice((1, 16, 24, 64)),
        layout=random.choice(("NHD", "HND")),
        padding_rows=random.randint(0, 3),
    )
