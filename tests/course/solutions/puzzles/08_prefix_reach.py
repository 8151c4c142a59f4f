"""8 · A prefix that reaches too far.

Sending the same prompt twice at once gives another answer than sending it alone.

Reported: vLLM 11635: https://github.com/vllm-project/vllm/issues/11635
"""

from typing import Any


def broken(query_lens: list[int], seq_lens: list[int], block_tables: list[list[int]], block_size: int) -> int:
    """Return how many tokens all sequences share at the front: whole and equal blocks, before any new token."""
    count = 0
    while count < min(seq_lens) // block_size and len({blocks[count] for blocks in block_tables}) == 1:
        count += 1
    return count * block_size


def failing_case() -> dict[str, Any]:
    """Return a small case that `broken` gets wrong.

    dict(query_lens=[...], seq_lens=[...], block_tables=[[...], ...], block_size=...).
    """
    return dict(query_lens=[2, 2], seq_lens=[8, 8], block_tables=[[5, 0], [5, 0]], block_size=4)


def mended(query_lens: list[int], seq_lens: list[int], block_tables: list[list[int]], block_size: int) -> int:
    """Do what `broken` should do."""
    count = 0
    while (
        count < min(s - q for q, s in zip(query_lens, seq_lens, strict=True)) // block_size
        and len({blocks[count] for blocks in block_tables}) == 1
    ):
        count += 1
    return count * block_size
