"""14 · A plan that was frozen.

A captured CUDA graph gives good answers at first. As the conversation grows, it forgets the newest tokens.

Reported: vLLM 42444: https://github.com/vllm-project/vllm/issues/42444
"""

from typing import Any


def broken(captured_len: int, replayed_len: int, num_splits: int) -> list[tuple[int, int]]:
    """Return the keys of each split, (first, after last), of a step that was captured and is replayed with more.

    Each key belongs to one of `num_splits` splits, in order; how many a split has does not matter.
    """
    size = -(-captured_len // num_splits)  # keys of a split
    return [(min(i * size, replayed_len), min((i + 1) * size, replayed_len)) for i in range(num_splits)]


def failing_case() -> dict[str, Any]:
    """Return a small case that `broken` gets wrong: dict(captured_len=..., replayed_len=..., num_splits=...)."""
    return dict(captured_len=4, replayed_len=9, num_splits=2)


def mended(captured_len: int, replayed_len: int, num_splits: int) -> list[tuple[int, int]]:
    """Do what `broken` should do."""
    size = -(-replayed_len // num_splits)  # keys of a split
    return [(min(i * size, replayed_len), min((i + 1) * size, replayed_len)) for i in range(num_splits)]
