"""7 · The last chunk.

A model with local attention is right on every prompt of 8192 tokens, and forgets the end of one of 8193.

Reported: vLLM 16209: https://github.com/vllm-project/vllm/issues/16209
"""

from typing import Any


def broken(query_len: int, seq_len: int, chunk_size: int) -> list[tuple[int, int]]:
    """Cut a sequence at the ends of its chunks. Return (new tokens, tokens) of each piece that has new tokens."""
    first = seq_len - query_len
    pieces = []
    for chunk in range(first // chunk_size, seq_len // chunk_size):
        begin, end = chunk * chunk_size, (chunk + 1) * chunk_size
        pieces.append((end - max(first, begin), end - begin))
    return pieces


def failing_case() -> dict[str, Any]:
    """Return a small case that `broken` gets wrong.

    dict(query_len=..., seq_len=..., chunk_size=...): at least one new token.
    """
    return dict(query_len=1, seq_len=9, chunk_size=8)


def mended(query_len: int, seq_len: int, chunk_size: int) -> list[tuple[int, int]]:
    """Do what `broken` should do."""
    first = seq_len - query_len
    pieces = []
    for chunk in range(first // chunk_size, -(-seq_len // chunk_size)):
        begin, end = chunk * chunk_size, min((chunk + 1) * chunk_size, seq_len)
        pieces.append((end - max(first, begin), end - begin))
    return pieces
