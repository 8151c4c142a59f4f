"""Kernels with local chunks that are right."""

from outsider_flash import flash, paged


def masked_chunks(query, key_cache, value_cache, cu_seqlens_q, seq_lens, block_table, chunk_size, alibi_slopes=None):
    """A mask over the whole sequence, and no virtual sequences; tiles skip the chunks before those of their rows."""

    def sees(i, j, s):
        return (j <= i) & (i // chunk_size == j // chunk_size)

    def span(i, s):
        return max(0, int(i[0])) // chunk_size * chunk_size, max(0, int(i[-1]) + 1)

    pages = paged(query, key_cache, value_cache, cu_seqlens_q, seq_lens, block_table)
    return flash(query, pages, value_size=value_cache.shape[3], sees=sees, span=span, alibi_slopes=alibi_slopes)
