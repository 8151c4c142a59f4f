"""Prefill chunks and decodes in one flattened batch over the paged cache: what a serving engine runs at every step.

One step with a first chunk, a later chunk and a decode; `n` marks new tokens, whose keys are in the cache already:

                  keys            query rows
    first chunk   n n n n         4        seq_len = query_len
    later chunk   . . . . n n     2        seq_len = context + query_len
    decode        . . . . . . n   1        query_len = 1

All three are the same computation: the last `query_len` of `seq_len` tokens attend to everything before them.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from refattn.attention import attend, compute_dtype
from refattn.batch import Batch, check_options, check_paged
from refattn.kv_cache import gather
from refattn.masks import alibi, visible_keys


def attention(
    query: Float[Tensor, "t h d"],
    key_cache: Float[Tensor, "n p hk d"],
    value_cache: Float[Tensor, "n p hk dv"],
    batch: Batch,
    *,
    causal: bool = True,
    window_size: tuple[int, int] = (-1, -1),
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    alibi_slopes: Float[Tensor, "h"] | None = None,
    sinks: Float[Tensor, "h"] | None = None,
    batch_invariant: bool = False,
    return_lse: bool = False,
) -> Float[Tensor, "t h dv"] | tuple[Float[Tensor, "t h dv"], Float[Tensor, "t h"]]:
    """Attend from the new tokens of each sequence to all its tokens in the cache, the new ones included.

    Write the new keys and values first (`kv_cache.write`). `refattn.attention.attend` has the formula.

    Args:
        query: new tokens of all sequences, one after the other; rows behind the last sequence are padding.
        key_cache: the pool of keys; any strides.
        value_cache: the pool of values.
        batch: the lengths and the block table.
        causal: hide keys behind a query's own position; False shows every key of the sequence.
        window_size: `(left, right)` in tokens, both inclusive, -1 for no limit.
        softmax_scale: factor on the dot products; `d ** -0.5` if None.
        softcap: bound on the scores; 0 for none.
        alibi_slopes: slope of each head for the bias `-slope * abs(query position - key position)`.
        sinks: one extra logit a head in the denominator.
        batch_invariant: give rows that do not change by a bit with what else is in the batch. Here they never do: the
            sequences are computed one by one.
        return_lse: also return the log-sum-exp.

    Returns:
        The outputs; with `return_lse` also the natural log-sum-exp (float32, sinks included). A padding row and a query
        that sees nothing answer 0 and `-inf` (the sink, if there is one, for a query that sees nothing).

    Raises:
        ValueError: naming the argument that does not fit.

    Source: Agrawal et al. 2023, "Sarathi"; Kwon et al. 2023, "PagedAttention".
    """
    block_table = check_paged(query, key_cache, value_cache, batch)
    check_options(
        query,
        causal=causal,
        window_size=window_size,
        softmax_scale=softmax_scale,
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        sinks=sinks,
        batch_invariant=batch_invariant,
        return_lse=return_lse,
    )
    compute = compute_dtype(query.dtype)
    out = query.new_zeros(*query.shape[:2], value_cache.shape[-1])
    lse = query.new_full(query.shape[:2], -torch.inf, dtype=compute)

    for (q0, q1), seq_len, blocks in zip(batch.query_rows(), batch.seq_lens.tolist(), block_table, strict=True):
        visible = visible_keys(q1 - q0, seq_len, causal=causal, window_size=window_size, device=query.device)
        bias = None
        if alibi_slopes is not None:
            bias = alibi(alibi_slopes, q1 - q0, seq_len, dtype=compute, device=query.device)
        out[q0:q1], lse[q0:q1] = attend(
            query[q0:q1],
            gather(key_cache, blocks, seq_len),
            gather(value_cache, blocks, seq_len),
            visible,
            softmax_scale=softmax_scale,
            softcap=softcap,
            bias=bias,
            sinks=sinks,
        )
    return (out, lse) if return_lse else out
