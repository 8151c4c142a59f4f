"""Cases that were chosen from a product: any two values stand together in one of them."""

import itertools

import pytest

from tests.helpers.pairs import every_pair


@pytest.mark.parametrize(("sizes", "most"), [((3, 2, 2), 6), ((13, 2, 3), 39), ((4, 4, 4), 20), ((1, 5), 5)])
def test_any_two_values_stand_together(sizes, most):
    cases = every_pair(*map(range, sizes))
    assert len(set(cases)) == len(cases) <= most
    for (i, one), (j, other) in itertools.combinations(enumerate(sizes), 2):
        assert {(case[i], case[j]) for case in cases} == set(itertools.product(range(one), range(other)))
