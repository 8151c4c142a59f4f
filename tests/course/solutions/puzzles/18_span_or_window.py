"""18 · An image that looks past its window.

A model with windows describes small pictures well and large ones badly, with one backend and not with the others.

Reported: vLLM 50539: https://github.com/vllm-project/vllm/pull/50539
"""

from typing import Any


def broken(seq_len: int, first: int, last: int, window: int) -> list[tuple[int, int]]:
    """Return the first and the last key that each query of a prompt sees, in a layer with a window.

    Tokens `first` to `last` are an image, whose tokens see one another. The model's mask is
    `(causal or same image) and window`, where a window of W tokens hides what is W or more tokens before the query.
    """
    seen = []
    for i in range(seq_len):
        if first <= i <= last:
            seen.append((min(first, max(0, i - window + 1)), last))
        else:
            seen.append((max(0, i - window + 1), i))
    return seen


def failing_case() -> dict[str, Any]:
    """Return a small case that `broken` gets wrong: dict(seq_len=..., first=..., last=..., window=...)."""
    return dict(seq_len=4, first=0, last=2, window=2)


def mended(seq_len: int, first: int, last: int, window: int) -> list[tuple[int, int]]:
    """Do what `broken` should do."""
    return [(max(0, i - window + 1), last if first <= i <= last else i) for i in range(seq_len)]
