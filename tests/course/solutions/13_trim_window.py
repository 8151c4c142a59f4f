"""13 · The blocks that a window still needs."""


def trim_window(
    query_len: int, seq_len: int, blocks: list[int], block_size: int, window: int
) -> tuple[int, int, list[int]]:
    """Return the position of the first key that is left, how many tokens are left, and their blocks.

    Drop every block that no query can see: each sees `window` keys, itself included.
    query_len 1, seq_len 14, blocks [9, 2, 4, 7] of 4 tokens, window 5: (8, 6, [4, 7]).
    """
    first_visible = max(0, seq_len - query_len - (window - 1))
    cut = first_visible // block_size
    return cut * block_size, seq_len - cut * block_size, blocks[cut : -(-seq_len // block_size)]
