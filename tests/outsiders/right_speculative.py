"""Kernels over drafted trees that are right."""

from math import inf

import torch
from outsider_flash import paged, softmax_of


def branch_by_branch(query, key_cache, value_cache, cu_seqlens_q, seq_lens, block_table, trees, return_lse=False):
    """Each node gathers the context and its own branch, by walking up its parents: no mask at all."""
    out, lse = torch.zeros(*query.shape[:2], value_cache.shape[3]), torch.full(query.shape[:2], -inf)
    pages = paged(query, key_cache, value_cache, cu_seqlens_q, seq_lens, block_table)
    for (q0, q1, s, read), parents in zip(pages, trees.to_lists(), strict=True):
        begin = s - len(parents)
        for row in range(q0, q1):
            node, branch = len(parents) - q1 + row, []
            while node >= 0:
                branch.append(begin + node)
                node = parents[node]
            j = torch.tensor([*branch, *range(begin)], dtype=torch.long)
            if len(j):
                sees = torch.ones(1, len(j), dtype=torch.bool)
                one = softmax_of(query[row : row + 1], *read(j), sees, query.shape[2] ** -0.5)
                out[row], lse[row] = one[0][0], one[1][0]
    return (out.to(query.dtype), lse) if return_lse else out.to(query.dtype)
