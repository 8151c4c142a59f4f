"""17 · A plateau of zeros.

A server that selects keys answers short prompts well. In long ones thousands of keys score exactly 0, and it reads
memory that no request owns.

Reported: SGLang 30645: https://github.com/sgl-project/sglang/pull/30645
"""

from typing import Any

ROOM = 2  # scores that are equal to the lowest selected one, at most: 1024 in the server


def broken(scores: list[float], topk: int, slots: list[int]) -> list[int]:
    """Return the slots of the `topk` keys with the highest scores, by position; of equal scores, the lower positions.

    `slots` has the slot of the key at each position.
    """
    lowest = sorted(scores)[-topk]
    above = [j for j, score in enumerate(scores) if score > lowest]
    equal = [j for j, score in enumerate(scores) if score == lowest][:ROOM]
    positions = (above + equal + [-1] * topk)[:topk]  # -1 is no key
    return [slots[j] for j in sorted(positions)]


def failing_case() -> dict[str, Any]:
    """Return a small case that `broken` gets wrong: dict(scores=[...], topk=..., slots=[...])."""
    return dict(scores=[0.0, 0.0, 0.0, 0.0], topk=3, slots=[7, 6, 5, 4])


def mended(scores: list[float], topk: int, slots: list[int]) -> list[int]:
    """Do what `broken` should do."""
    best = sorted(range(len(scores)), key=lambda j: -scores[j])[:topk]  # sorted keeps the order of equal ones
    return [slots[j] for j in sorted(best)]
