"""Kernels over rows that are right, each in an unusual way."""

from math import inf

import torch
from outsider_flash import flash, rows, softmax_of

from twinattn.kit import claims


@claims(not_claimed={"nan": "a NaN that a query of one sequence sees is multiplied by weights of 0 in the others"})
def one_mask_over_the_batch(
    query, key, value, cu_seqlens_q, cu_seqlens_k, softmax_scale=None, sinks=None, causal=True, return_lse=False
):
    """One product of all rows with all rows, under a mask of blocks on the diagonal."""
    t, s = len(query), len(key)
    (q_ends, k_ends), sizes = (cu_seqlens_q.long(), cu_seqlens_k.long()), (t, s)
    owner_q, owner_k = (torch.full((n,), -1 - x) for x, n in enumerate(sizes))
    at_q, at_k = torch.zeros(t, dtype=torch.long), torch.zeros(s, dtype=torch.long)
    for b in range(len(q_ends) - 1):
        q0, q1, k0, k1 = (int(x) for x in (*q_ends[b : b + 2], *k_ends[b : b + 2]))
        owner_q[q0:q1], owner_k[k0:k1] = b, b
        at_q[q0:q1], at_k[k0:k1] = torch.arange(k1 - k0 - q1 + q0, k1 - k0), torch.arange(k1 - k0)
    sees = owner_q[:, None] == owner_k
    sees = sees & (at_k <= at_q[:, None]) if causal else sees
    query = query.masked_fill(~sees.any(1)[:, None, None], 0.0)
    out, lse = softmax_of(query, key, value, sees, query.shape[2] ** -0.5 if softmax_scale is None else softmax_scale)
    if sinks is not None:
        both = torch.logaddexp(lse, sinks.float())
        out, lse = out * torch.exp(lse - both)[..., None], both
    out[int(q_ends[-1]) :], lse[int(q_ends[-1]) :] = 0.0, -inf
    return (out.to(query.dtype), lse) if return_lse else out.to(query.dtype)


def longest_sequences_first(query, key, value, cu_seqlens_q, cu_seqlens_k, window_size=(-1, -1), causal=True):
    """Sequences are sorted by length, and written back to where they were."""
    lens = rows(query, cu_seqlens_q, cu_seqlens_k.diff())
    firsts = cu_seqlens_k.tolist()
    order = sorted(range(len(lens)), key=lambda b: -lens[b][2])
    sequences = (
        (lens[b][0], lens[b][1], lens[b][2], lambda j, k0=firsts[b]: (key[k0 + j], value[k0 + j])) for b in order
    )
    return flash(query, sequences, value_size=value.shape[2], window_size=window_size, causal=causal)
