"""Kernels with local chunks that are wrong."""

from outsider_flash import flash, paged


def chunks_of_the_new_tokens(query, key_cache, value_cache, cu_seqlens_q, seq_lens, block_table, chunk_size):
    """With a context that is no multiple of a block, chunks are counted from the block that it ends in."""
    p = key_cache.shape[1]
    parts = paged(query, key_cache, value_cache, cu_seqlens_q, seq_lens, block_table)

    def sequences():
        for q0, q1, s, read in parts:
            context = max(0, s - q1 + q0)
            begin["at"] = context // p * p % chunk_size if context > chunk_size else 0
            yield q0, q1, s, read

    begin = {"at": 0}

    def sees(i, j, s):
        return (j <= i) & ((i - begin["at"]) // chunk_size == (j - begin["at"]) // chunk_size)

    return flash(query, sequences(), value_size=value_cache.shape[3], sees=sees)
