"""Ragged attention without a cache: sequences of different lengths, flattened, each seeing its own keys only.

    cu_seqlens_q  0       2     3          query rows   a a | b | c c c
    seq_lens      3       1     2          key rows     a a a | b | c c

Encoders (`causal=False`), cross attention (other lengths for keys than for queries) and the prefill of whole prompts.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from refattn.attention import attend, compute_dtype
from refattn.batch import Batch, check_dense, check_options
from refattn.masks import alibi, visible_keys


def attention(
    query: Float[Tensor, "t h d"],
    key: Float[Tensor, "s hk d"],
    value: Float[Tensor, "s hk dv"],
    batch: Batch,
    *,
    causal: bool = True,
    window_size: tuple[int, int] = (-1, -1),
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    alibi_slopes: Float[Tensor, "h"] | None = None,
    sinks: Float[Tensor, "h"] | None = None,
    return_lse: bool = False,
) -> Float[Tensor, "t h dv"] | tuple[Float[Tensor, "t h dv"], Float[Tensor, "t h"]]:
    """Attend in each sequence from its query rows to its key rows; `refattn.attention.attend` has the formula.

    Args:
        query: query rows of all sequences, one after the other; rows behind the last sequence are padding.
        key: key rows of all sequences, one after the other: `batch.seq_lens` says how many each has.
        value: the values that belong to the keys.
        batch: the lengths; it needs no block table.
        causal: hide keys behind a query's own position, with the last query aligned to the last key.
        window_size: `(left, right)` in tokens, both inclusive, -1 for no limit.
        softmax_scale: factor on the dot products; `d ** -0.5` if None.
        softcap: bound on the scores; 0 for none.
        alibi_slopes: slope of each head for the bias `-slope * abs(query position - key position)`.
        sinks: one extra logit a head in the denominator.
        return_lse: also return the log-sum-exp.

    Returns:
        The outputs; with `return_lse` also the natural log-sum-exp (float32, sinks included). A padding row and a query
        that sees nothing answer 0 and `-inf` (the sink, if there is one, for a query that sees nothing).

    Raises:
        ValueError: naming the argument that does not fit.

    Source: Dao et al. 2022, "FlashAttention" (its variable-length form).
    """
    check_dense(query, key, value, batch)
    check_options(
        query,
        causal=causal,
        window_size=window_size,
        softmax_scale=softmax_scale,
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        sinks=sinks,
        return_lse=return_lse,
    )
    compute = compute_dtype(query.dtype)
    out = query.new_zeros(*query.shape[:2], value.shape[-1])
    lse = query.new_full(query.shape[:2], -torch.inf, dtype=compute)

    for (q0, q1), (k0, k1) in zip(batch.query_rows(), batch.key_rows(), strict=True):
        query_len, seq_len = q1 - q0, k1 - k0
        visible = visible_keys(query_len, seq_len, causal=causal, window_size=window_size, device=query.device)
        bias = None
        if alibi_slopes is not None:
            bias = alibi(alibi_slopes, query_len, seq_len, dtype=compute, device=query.device)
        out[q0:q1], lse[q0:q1] = attend(
            query[q0:q1],
            key[k0:k1],
            value[k0:k1],
            visible,
            softmax_scale=softmax_scale,
            softcap=softcap,
            bias=bias,
            sinks=sinks,
        )
    return (out, lse) if return_lse else out
