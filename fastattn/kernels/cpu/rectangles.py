"""One rectangle of queries and keys on a CPU: ATen's call and what it gets wrong, and matrix products under a softcap.

    flash               a call; with few queries the heads of a group are rows of it
    attend              with a bias, whatever the hidden keys hold
    attend_to_each      the same, where NaN in a key may reach no query that does not see it
    call_aten           the call itself, whose outputs are fixed

Source: PyTorch, `aten::_scaled_dot_product_flash_attention_for_cpu`.
"""

import torch
from einops import rearrange, repeat
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional

from fastattn.kernels.problem import compute_dtype
from refattn.options import AttentionOptions

SHORT = 16  # with at most this many queries, the heads of a group are rows of one call
FEW = 16  # keys; fewer are compared one by one in ATen's call, which overlooks NaN
FLASH = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
TINY = torch.finfo(torch.float32).tiny


def attend(
    query: Float[Tensor, "t h d"],
    key: Float[Tensor, "s hk d"],
    value: Float[Tensor, "s hk dv"],
    bias: Float[Tensor, "#h t s"],
    options: AttentionOptions,
) -> tuple[Float[Tensor, "t h dv"], Float[Tensor, "t h"]]:
    """Attend over some keys with a bias; keys hidden from every query may hold anything, also NaN."""
    unseen = bias[0].amax(0) == -torch.inf  # the mask is the same for all heads
    if unseen.any():
        key, value = (x.masked_fill(unseen[:, None, None], 0.0) for x in (key, value))
    if options.softcap:
        return _capped(query, key, value, bias, options)
    return flash(query, key, value, options.softmax_scale, bias=bias)


def attend_to_each(
    query: Float[Tensor, "t h d"],
    key: Float[Tensor, "s hk d"],
    value: Float[Tensor, "s hk dv"],
    bias: Float[Tensor, "#h t s"],
    options: AttentionOptions,
) -> tuple[Float[Tensor, "t h dv"], Float[Tensor, "t h"]]:
    """Attend as `attend` does, and let NaN and infinity reach only the queries that see the key or the value.

    A query with such a hidden key is recomputed, in the same place, with zeros for all keys hidden from it.
    """
    out, lse = attend(query, key, value, bias, options)
    some = ((bias[0].amin(0) == -torch.inf) & (bias[0].amax(0) > -torch.inf)).nonzero()[:, 0]  # seen by some queries
    if not len(some) or all(x[some].isfinite().all() for x in (key, value)):
        return out, lse
    hidden = bias[0] == -torch.inf  # [t, s]
    broken = ~(key[some].isfinite().all(-1) & value[some].isfinite().all(-1)).all(-1)
    for i in hidden[:, some[broken]].any(1).nonzero()[:, 0].tolist():
        own_key, own_value = (x.masked_fill(hidden[i][:, None, None], 0.0) for x in (key, value))
        own_out, own_lse = attend(query, own_key, own_value, bias, options)
        out[i], lse[i] = own_out[i], own_lse[i]
    return out, lse


def flash(
    query: Float[Tensor, "t h d"],
    key: Float[Tensor, "s hk d"],
    value: Float[Tensor, "s hk dv"],
    softmax_scale: float | None,
    *,
    causal: bool = False,
    bias: Float[Tensor, "#h t s"] | None = None,
) -> tuple[Float[Tensor, "t h dv"], Float[Tensor, "t h"]]:
    """Attend over one rectangle. With few queries, the heads that share a KV head are rows of one matrix product."""
    t, hk = query.shape[0], key.shape[1]
    k, v = rearrange(key, "s hk d -> 1 hk s d"), rearrange(value, "s hk dv -> 1 hk s dv")
    if t > SHORT or causal:
        bias = None if bias is None else bias[None]
        out, lse = call_aten(rearrange(query, "t h d -> 1 h t d"), k, v, softmax_scale, causal=causal, bias=bias)
        return rearrange(out, "1 h t dv -> t h dv"), rearrange(lse, "1 h t -> t h")
    if bias is not None:
        bias = (
            repeat(bias, "1 t s -> 1 1 (g t) s", g=query.shape[1] // hk)
            if bias.shape[0] == 1
            else rearrange(bias, "(hk g) t s -> 1 hk (g t) s", hk=hk)
        )
    out, lse = call_aten(rearrange(query, "t (hk g) d -> 1 hk (g t) d", hk=hk), k, v, softmax_scale, bias=bias)
    return rearrange(out, "1 hk (g t) dv -> t (hk g) dv", t=t), rearrange(lse, "1 hk (g t) -> t (hk g)", t=t)


def call_aten(
    query: Float[Tensor, "b h t d"],
    key: Float[Tensor, "b hk s d"],
    value: Float[Tensor, "b hk s dv"],
    softmax_scale: float | None,
    *,
    causal: bool = False,
    bias: Float[Tensor, "#b #h #t s"] | None = None,
    all_see_some: bool = False,
) -> tuple[Float[Tensor, "b h t dv"], Float[Tensor, "b h t"]]:
    """Call ATen, and fix the outputs that it gets wrong.

    It needs one head size for keys and values. For a fully masked row it returns an LSE of 0; such rows are fixed,
    unless `all_see_some`; see also `fix_lse`. Under a causal mask it multiplies `-inf` by the scale. Without a bias,
    if all scores of fewer than `FEW` keys are NaN, it overlooks them, as if there were no keys. Its exponentials of 16
    bits are off by 5e-5, so with a scale of 0 the log-sum-exp of one key would not be 0.
    """
    d, dv = query.shape[-1], value.shape[-1]
    scale = d**-0.5 if softmax_scale is None else softmax_scale
    if scale < 0:
        query, scale = -query, -scale
    is_zero = scale < TINY
    if is_zero:
        query, scale = query * 0.0, 1.0
    if d != dv:
        query, key, value = (functional.pad(x, (0, max(d, dv) - x.shape[-1])) for x in (query, key, value))
    if bias is None and key.shape[2] < FEW:
        bias = torch.zeros(1, 1, query.shape[2], key.shape[2], dtype=compute_dtype(query.dtype), device="cpu")
        if causal:
            bias = bias.masked_fill_(torch.ones_like(bias, dtype=torch.bool).triu(1), -torch.inf)
        causal, all_see_some = False, True
    out, lse = FLASH(query, key, value, 0.0, causal, attn_mask=bias, scale=scale)
    if is_zero and bias is not None:
        lse.copy_(bias.logsumexp(-1).expand_as(lse).where(lse.isfinite(), lse))
    if bias is not None and not all_see_some:
        saw_nothing = (bias == -torch.inf).all(-1).expand_as(lse)
        lse.masked_fill_(saw_nothing, -torch.inf)
        out.masked_fill_(saw_nothing[..., None], 0.0)
    fix_lse(out, lse, query, key, scale, causal=causal, bias=bias)
    return out if d == dv else out[..., :dv], lse


def fix_lse(
    out: Float[Tensor, "b h t dv"],
    lse: Float[Tensor, "b h t"],
    query: Float[Tensor, "b h t d"],
    key: Float[Tensor, "b hk s d"],
    scale: float,
    *,
    causal: bool = False,
    bias: Float[Tensor, "#b #h #t s"] | None = None,
) -> None:
    """Set the log-sum-exps of rows whose scores are all `-inf` to `-inf`; an infinite key can be the cause.

    ATen returns 0, or the logarithm of a number of keys, which would count in a merge. Its output is 0, too, so one
    column shows which rows are not affected.
    """
    if out[..., 0].all():
        return
    (b, h, t, _), (hk, s) = query.shape, key.shape[1:3]
    zeros = (out[..., 0] == 0) & (lse > -torch.inf)  # [b, h, t]
    if zeros.any():
        zeros &= (out == 0).all(-1)
    for i, head in zeros.any(-1).nonzero().tolist():
        rows = zeros[i, head].nonzero()[:, 0]
        scores = query[i, head, rows].to(lse.dtype) @ key[i, head * hk // h].to(lse.dtype).T * scale
        if bias is not None:
            scores += bias.expand(b, h, t, s)[i, head, rows]
        if causal:
            scores.masked_fill_(torch.arange(s, device="cpu") > rows[:, None], -torch.inf)
        lse[i, head, rows[scores.amax(-1) == -torch.inf]] = -torch.inf


def _capped(
    query: Float[Tensor, "t h d"],
    key: Float[Tensor, "s hk d"],
    value: Float[Tensor, "s hk dv"],
    bias: Float[Tensor, "#h t s"],
    options: AttentionOptions,
) -> tuple[Float[Tensor, "t h dv"], Float[Tensor, "t h"]]:
    """Attend over one rectangle with a softcap, by two matrix products."""
    compute = compute_dtype(query.dtype)
    scale = query.shape[-1] ** -0.5 if options.softmax_scale is None else options.softmax_scale
    group = query.shape[1] // key.shape[1]
    q = rearrange(query.to(compute) * (scale / options.softcap), "t (hk g) d -> hk (g t) d", g=group)
    k, v = rearrange(key.to(compute), "s hk d -> hk d s"), rearrange(value.to(compute), "s hk dv -> hk s dv")
    scores = rearrange((q @ k).tanh_().mul_(options.softcap), "hk (g t) s -> (hk g) t s", g=group) + bias
    saw_nothing = (bias == -torch.inf).all(-1).expand(scores.shape[:-1])  # [h, t]
    lse = scores.logsumexp(-1).masked_fill_(saw_nothing, -torch.inf)
    weights = scores.sub_(lse[..., None]).exp_().masked_fill_(saw_nothing[..., None], 0.0)
    out = rearrange(weights, "(hk g) t s -> hk (g t) s", g=group) @ v
    out = rearrange(out, "hk (g t) dv -> t (hk g) dv", g=group)
    return out.to(query.dtype), rearrange(lse, "h t -> t h")
