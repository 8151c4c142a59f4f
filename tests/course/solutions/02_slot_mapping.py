"""2 · The slots of a step's new tokens."""


def slot_mapping(
    query_lens: list[int], seq_lens: list[int], block_tables: list[list[int]], block_size: int
) -> list[int]:
    """Return the slot of each new token, sequence after sequence: the last `query_len` of its `seq_len` tokens.

    One number per sequence: its new tokens, all its tokens, and its blocks of `block_size` slots.
    query_lens [2, 1], seq_lens [5, 7], block_tables [[9, 2], [4, 7]], block_size 4: [39, 8, 30].
    """
    slots = []
    for query_len, seq_len, blocks in zip(query_lens, seq_lens, block_tables, strict=True):
        for position in range(seq_len - query_len, seq_len):
            slots.append(blocks[position // block_size] * block_size + position % block_size)
    return slots
