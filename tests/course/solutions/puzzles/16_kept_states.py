"""16 · A prefix without its state.

A hybrid model answers well, and badly as soon as it has cached the prefix of a question. The cached keys are right.

Reported: modular 6681: https://github.com/modular/modular/issues/6681
"""

from typing import Any


def broken(num_cached: int, kept: list[int], block_size: int) -> int:
    """Return how many of the first tokens of a prompt need not be computed, if some layers have keys and some a state.

    The keys of the first `num_cached` tokens are in the cache, which shares whole blocks. States were kept after some
    numbers of tokens; all of them are of this prompt.
    """
    return num_cached // block_size * block_size


def failing_case() -> dict[str, Any]:
    """Return a small case that `broken` gets wrong: dict(num_cached=..., kept=[...], block_size=...)."""
    return dict(num_cached=8, kept=[4], block_size=4)


def mended(num_cached: int, kept: list[int], block_size: int) -> int:
    """Do what `broken` should do."""
    cached = num_cached // block_size * block_size
    return max((length for length in kept if length <= cached), default=0)
