"""14 · A plan that was frozen.

A recorded step answers well at first. As the conversation grows, it forgets the newest words.

Reported: vLLM 42444: https://github.com/vllm-project/vllm/issues/42444
"""

from typing import Any


def broken(captured_len: int, replayed_len: int, num_splits: int) -> list[tuple[int, int]]:
    """Return the keys of each split, (first, after last), of a step that was recorded and is replayed with more."""
    size = -(-captured_len // num_splits)  # keys of a split
    return [(min(i * size, replayed_len), min((i + 1) * size, replayed_len)) for i in range(num_splits)]


def failing_case() -> dict[str, Any]:
    """Return a small case that `broken` gets wrong: dict(captured_len=..., replayed_len=..., num_splits=...)."""
    raise NotImplementedError


def mended(captured_len: int, replayed_len: int, num_splits: int) -> list[tuple[int, int]]:
    """Do what `broken` should do."""
    raise NotImplementedError
