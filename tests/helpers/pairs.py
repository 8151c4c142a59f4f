"""Fewer cases than a product has, in which any two values still stand together."""

import itertools
import os
from collections.abc import Iterable
from typing import Any


def every_pair(*lists: Iterable[Any]) -> list[tuple[Any, ...]]:
    """Choose cases with a value of each list, so that any two values of two lists are in some case together.

    A mistake that one value or two bring about shows in one of them. The next case is always the first of those with
    most pairs that none has had yet.
    """
    values = [list(one) for one in lists]
    left = [tuple(enumerate(case)) for case in itertools.product(*map(range, map(len, values)))]  # places in the lists
    chosen, seen = [], set()

    def new(case: tuple) -> int:
        return sum(pair not in seen for pair in itertools.combinations(case, 2))

    while left and new(best := max(left, key=new)):
        left.remove(best)
        chosen.append(tuple(values[of][at] for of, at in best))
        seen.update(itertools.combinations(best, 2))
    return chosen


def every_pair_on_cpu(*lists: Iterable[Any]) -> list[tuple[Any, ...]]:
    """Choose the cases of `every_pair` on a CPU; on a GPU, where each may have its own kernel, the whole product."""
    on_cpu = os.environ["TWINATTN_TEST_DEVICE"] == "cpu"
    return every_pair(*lists) if on_cpu else list(itertools.product(*lists))
