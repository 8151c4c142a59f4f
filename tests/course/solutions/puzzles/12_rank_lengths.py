"""12 · A difference of lengths.

With the context on several GPUs, decodes are right and chunks of prompts are not, and not on every rank.

Reported: vLLM 47181: https://github.com/vllm-project/vllm/issues/47181
"""

from typing import Any


def broken(context_len: int, new_len: int, rank: int, num_ranks: int, interleave: int) -> int:
    """Return how many of the new tokens, which come after the context, lie on a rank; runs of `interleave` go round."""

    def on_rank(length: int) -> int:
        rounds, rest = divmod(length, num_ranks * interleave)
        return rounds * interleave + min(max(rest - rank * interleave, 0), interleave)

    return on_rank(new_len)


def failing_case() -> dict[str, Any]:
    """Return a small case that `broken` gets wrong.

    dict(context_len=..., new_len=..., rank=..., num_ranks=..., interleave=...).
    """
    return dict(context_len=1, new_len=1, rank=0, num_ranks=2, interleave=1)


def mended(context_len: int, new_len: int, rank: int, num_ranks: int, interleave: int) -> int:
    """Do what `broken` should do."""

    def on_rank(length: int) -> int:
        rounds, rest = divmod(length, num_ranks * interleave)
        return rounds * interleave + min(max(rest - rank * interleave, 0), interleave)

    return on_rank(context_len + new_len) - on_rank(context_len)
