"""Fewer cases than a product has, in which any two values still stand together."""

import itertools
from collections.abc import Iterable
from typing import Any


def every_pair(*lists: Iterable[Any]) -> list[tuple[Any, ...]]:
    """Choose cases with a value of each list, so that any two values of two lists are in some case together.

    A mistake that one value or two bring about shows in one of them. The next case is always the first of those with
    most pairs that none has had yet.
    """
    left = [tuple(enumerate(case)) for case in itertools.product(*map(list, lists))]  # a value, and the list it is of
    chosen, seen = [], []

    def new(case: tuple) -> int:
        return sum(pair not in seen for pair in itertools.combinations(case, 2))

    while left and new(best := max(left, key=new)):
        left.remove(best)
        chosen.append(tuple(value for _, value in best))
        seen += itertools.combinations(best, 2)
    return chosen
