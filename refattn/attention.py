"""The one formula: softmax attention of some queries over some keys, under a picture of who may see whom."""

import torch
from einops import einsum, rearrange, repeat
from jaxtyping import Bool, Float
from torch import Tensor


def attend(
    query: Float[Tensor, "t h d"],
    key: Float[Tensor, "s hk d"],
    value: Float[Tensor, "s hk dv"],
    visible: Bool[Tensor, "t s"],
    *,
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    bias: Float[Tensor, "h t s"] | None = None,
    sinks: Float[Tensor, "h"] | None = None,
) -> tuple[Float[Tensor, "t h dv"], Float[Tensor, "t h"]]:
    """Attend with every query to the keys that it may see.

    For a query `i` of head `h`, over the keys `j` with `visible[i, j]`:

        score[j] = softmax_scale * query[i, h] . key[j, h // g]
        score[j] = softcap * tanh(score[j] / softcap)              if softcap
        score[j] = score[j] + bias[h, i, j]                        if bias
        lse      = log(sum_j exp(score[j]) + exp(sinks[h]))        the sink only if given
        out      = sum_j exp(score[j] - lse) * value[j, h // g]

    The order matters: the cap and the bias come before the mask, so neither can make a hidden key visible again.
    A query that sees nothing answers 0 with an LSE of `-inf` (with a sink: 0, and the sink as its LSE). A key that no
    query sees may hold anything, NaN included; a NaN that a query sees comes out as NaN.

    Args:
        query: the new tokens, one row a token.
        key: the keys of one sequence; query head `h` reads key head `h // g`, with `g = h // hk` heads a group.
        value: the values that belong to the keys; their head size may differ from that of the keys.
        visible: the picture, true where query `t` may see key `s`.
        softmax_scale: factor on the dot products; `d ** -0.5` if None.
        softcap: bound on the scores, in units of the scaled score; 0 for no bound.
        bias: added to the scaled, capped scores (ALiBi).
        sinks: one extra logit a head, which takes its share of the softmax and brings no value.

    Returns:
        The outputs in the type of `query`, and the log-sum-exp of each row: natural log, float32 (float64 for float64
        queries), the sink included.

    Source: Vaswani et al. 2017, "Attention Is All You Need"; grouped heads: Ainslie et al. 2023, "GQA"; sinks:
        OpenAI 2025, gpt-oss.
    """
    compute = compute_dtype(query.dtype)
    group = query.shape[1] // key.shape[1]
    scale = query.shape[2] ** -0.5 if softmax_scale is None else softmax_scale
    k = repeat(key.to(compute), "s hk d -> s (hk g) d", g=group)
    v = repeat(value.to(compute), "s hk dv -> s (hk g) dv", g=group)
    nobody_sees = rearrange(~visible.any(0), "s -> s 1 1")
    v = v.masked_fill(nobody_sees, 0.0)  # such memory may hold anything, and 0 * NaN is NaN

    scores = einsum(query.to(compute) * scale, k, "t h d, s h d -> h t s")
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    if bias is not None:
        scores = scores + bias.to(compute)
    scores = scores.masked_fill(~visible, -torch.inf)

    lse = scores.logsumexp(-1)  # [h, t], -inf where a query sees nothing
    if sinks is not None:
        lse = torch.logaddexp(lse, repeat(sinks.to(compute), "h -> h t", t=lse.shape[1]))
    weights = torch.exp(scores - lse[..., None]).masked_fill(~visible, 0.0)  # the fill turns -inf - -inf into 0
    out = einsum(weights, v, "h t s, s h dv -> t h dv")
    return out.to(query.dtype), lse.T


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """Give the type that a reference computes in: float64 for float64 input, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32
