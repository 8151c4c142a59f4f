"""Kernels with a sliding window that are wrong."""

import torch
from outsider_flash import flash, paged

from twinattn.kit import claims


def pages_of_the_last_query(query, key_cache, value_cache, cu_seqlens_q, seq_lens, block_table, window_size=(-1, -1)):
    """The pages that a window needs are found for the last query, and the first ones of a chunk need older ones."""
    left, p = window_size[0], key_cache.shape[1]

    def span(i, s):
        return (0 if left < 0 else max(0, s - 1 - left) // p * p), s

    pages = paged(query, key_cache, value_cache, cu_seqlens_q, seq_lens, block_table)
    return flash(query, pages, value_size=value_cache.shape[3], window_size=window_size, span=span)


@claims(block_sizes=(16, 64))
def one_page_too_few(query, key_cache, value_cache, seq_lens, block_table, window_size=(-1, -1), sinks=None):
    """A decode reads as many pages as a window fills, from the last one: where it straddles one more, that is lost."""
    left, p = window_size[0], key_cache.shape[1]

    def span(i, s):
        pages = -(-s // p)
        return (0 if left < 0 else max(0, pages - -(-(left + 1) // p)) * p), s

    ends = torch.arange(len(seq_lens) + 1)
    pages = paged(query, key_cache, value_cache, ends, seq_lens, block_table)
    options = dict(window_size=window_size, span=span, sinks=sinks)
    return flash(query, pages, value_size=value_cache.shape[3], **options)
