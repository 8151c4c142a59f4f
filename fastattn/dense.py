"""Ragged attention without a cache, by the fastest kernel there is; the twin of `refattn.dense`."""

from jaxtyping import Float
from torch import Tensor

from fastattn import kernels
from fastattn.kernels import Options
from refattn.batch import Batch, check_dense, check_options


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
        NotImplementedError: if no kernel computes the combination, with the reason of each.

    Source: `refattn.dense.attention`.
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
    options = Options(
        causal=causal,
        window_size=window_size,
        softmax_scale=softmax_scale,
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        sinks=sinks,
    )
    out, lse = kernels.dense(query, key, value, batch, options)
    return (out, lse) if return_lse else out
