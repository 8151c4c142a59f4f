"""13 · A block taken for a slot.

A kernel that was written for blocks of one token reads another request's keys in a server with blocks of 16.

Reported: SGLang 32902: https://github.com/sgl-project/sglang/issues/32902
"""

from typing import Any


def broken(blocks: list[int], seq_len: int, block_size: int) -> list[int]:
    """Return the slots of a sequence's tokens in the pool, in order."""
    return [blocks[j // block_size] + j % block_size for j in range(seq_len)]


def failing_case() -> dict[str, Any]:
    """Return a small case that `broken` gets wrong: dict(blocks=[...], seq_len=..., block_size=...)."""
    raise NotImplementedError


def mended(blocks: list[int], seq_len: int, block_size: int) -> list[int]:
    """Do what `broken` should do."""
    raise NotImplementedError
