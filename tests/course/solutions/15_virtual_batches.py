"""15 · Virtual batches: local attention without a new kernel."""


def virtual_batches(
    query_lens: list[int], seq_lens: list[int], block_tables: list[list[int]], chunk_size: int, block_size: int
) -> tuple[list[int], list[int], list[list[int]]]:
    """Cut sequences at the ends of their chunks; return query_lens, seq_lens and block_tables of the pieces.

    A piece is a chunk with new tokens: how many are new, how many it has (up to the last new one), and its blocks. A
    chunk is a multiple of a block. [2], [5], [[9, 2]] in chunks and blocks of 4: [1, 1], [4, 1], [[9], [2]].
    """
    queries, lens, tables = [], [], []
    for query_len, seq_len, blocks in zip(query_lens, seq_lens, block_tables, strict=True):
        position = seq_len - query_len
        while position < seq_len:
            begin = position // chunk_size * chunk_size
            end = min(begin + chunk_size, seq_len)
            queries.append(end - position)
            lens.append(end - begin)
            tables.append(blocks[begin // block_size : -(-end // block_size)])
            position = end
    return queries, lens, tables
