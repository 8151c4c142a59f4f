"""15 · Virtual batches: local attention without a new kernel."""


def virtual_batches(
    query_lens: list[int], seq_lens: list[int], block_tables: list[list[int]], chunk_size: int, block_size: int
) -> tuple[list[int], list[int], list[list[int]]]:
    """Cut sequences at the ends of their chunks; return query_lens, seq_lens and block_tables of the pieces.

    A piece is a chunk with new tokens: how many are new, how many it has (up to the last new one), and its blocks. A
    chunk is a multiple of a block. [2], [5], [[9, 2]] in chunks and blocks of 4: [1, 1], [4, 1], [[9], [2]].
    """
    raise NotImplementedError
