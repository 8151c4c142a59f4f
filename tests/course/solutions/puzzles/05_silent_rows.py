"""5 · Requests that say nothing.

After a request is paused, the answers of two users are swapped. Only steps in which everybody else decodes are wrong.

Reported: FlashAttention 1537: https://github.com/Dao-AILab/flash-attention/issues/1537
"""

from typing import Any


def broken(query_lens: list[int]) -> list[int]:
    """Return, for each query row of a step, the sequence that it belongs to; rows come sequence after sequence."""
    if max(query_lens, default=0) <= 1:  # a step of decodes: row i is sequence i
        return list(range(sum(query_lens)))
    return [sequence for sequence, length in enumerate(query_lens) for _ in range(length)]


def failing_case() -> dict[str, Any]:
    """Return a small case that `broken` gets wrong: dict(query_lens=[...])."""
    return dict(query_lens=[0, 1])


def mended(query_lens: list[int]) -> list[int]:
    """Do what `broken` should do."""
    return [sequence for sequence, length in enumerate(query_lens) for _ in range(length)]
