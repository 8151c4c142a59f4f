"""Kernels over drafted trees that are wrong."""

import torch
from outsider_flash import flash, paged


def _ancestors(parents, word=None):
    """Return who sees whom in a tree; with a word, as bits that are kept in so many."""
    seen = []
    for node, parent in enumerate(parents):
        bits = (seen[parent] if parent >= 0 else 0) | 1 << (node if word is None else node % word)
        seen.append(bits)
    shifts = range(len(parents)) if word is None else [node % word for node in range(len(parents))]
    return torch.tensor([[bool(bits >> shift & 1) for shift in shifts] for bits in seen]).reshape(len(parents), -1)


def _over_trees(
    query, key_cache, value_cache, cu_seqlens_q, seq_lens, block_table, trees, tree_mask, extra=None, **options
):
    """Run the flash kernel sequence by sequence, with the mask of each tree."""
    out = torch.zeros(*query.shape[:2], value_cache.shape[3])
    pages = paged(query, key_cache, value_cache, cu_seqlens_q, seq_lens, block_table)
    for (q0, q1, s, read), parents in zip(pages, trees.to_lists(), strict=True):
        nodes = len(parents)

        def sees(i, j, s, parents=parents, nodes=nodes):
            node = (i[:, 0] - s + nodes).clamp(0, max(0, nodes - 1))
            mask = (j < s - nodes).expand(len(i), -1).clone()
            inside = (j[0] >= s - nodes).nonzero().flatten()
            if nodes and len(inside):
                mask[:, inside] = tree_mask(parents)[node][:, j[0][inside] - s + nodes]
            return mask

        def masked(i, j, s, sees=sees, parents=parents):
            mask = sees(i, j, s)
            return mask & extra(i, j, s, parents) if extra else mask

        one = iter([(0, q1 - q0, s, read)])
        out[q0:q1] = flash(query[q0:q1], one, value_size=value_cache.shape[3], sees=masked, **options).float()
    return out.to(query.dtype)


def ancestors_in_32_bits(query, key_cache, value_cache, cu_seqlens_q, seq_lens, block_table, trees):
    """The mask of ancestors has one word of 32 bits: node 32 is taken for node 0."""
    arguments = (query, key_cache, value_cache, cu_seqlens_q, seq_lens, block_table, trees)
    return _over_trees(*arguments, lambda parents: _ancestors(parents, 32))


def window_by_slot(query, key_cache, value_cache, cu_seqlens_q, seq_lens, block_table, trees, window_size=(-1, -1)):
    """The window counts slots, and not positions along the branch."""

    def extra(i, j, s, parents):
        return (j >= i - window_size[0]) if window_size[0] >= 0 else torch.ones_like(j > i)

    arguments = (query, key_cache, value_cache, cu_seqlens_q, seq_lens, block_table, trees)
    return _over_trees(*arguments, _ancestors, extra=extra)


def alibi_by_slot(query, key_cache, value_cache, cu_seqlens_q, seq_lens, block_table, trees, alibi_slopes=None):
    """The bias counts slots, and not positions along the branch."""
    arguments = (query, key_cache, value_cache, cu_seqlens_q, seq_lens, block_table, trees)
    return _over_trees(*arguments, _ancestors, alibi_slopes=alibi_slopes)
