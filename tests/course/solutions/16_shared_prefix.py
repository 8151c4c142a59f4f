"""16 · What requests share."""


def shared_prefix(query_lens: list[int], seq_lens: list[int], block_tables: list[list[int]], block_size: int) -> int:
    """Return how many tokens at the front all sequences have in common: whole blocks, and the same ones.

    The prefix has to end before the first new token of every sequence, or a query would see later keys.
    query_lens [1, 1], seq_lens [10, 9], block_tables [[5, 0, 3], [5, 0, 8]], block_size 4: 8.
    """
    columns = min(s - q for q, s in zip(query_lens, seq_lens, strict=True)) // block_size
    count = 0
    while count < columns and len({blocks[count] for blocks in block_tables}) == 1:
        count += 1
    return count * block_size
