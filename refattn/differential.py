"""Differential attention: two softmaxes over the same values, and the second subtracted from the first.

What both weigh alike is noise, and cancels. One query, six keys:

      softmax(q1 k1)             .1 .2 .1 .4 .1 .1
    - lambda * softmax(q2 k2)    .1 .2 .1 .0 .1 .1      (softmax 2 times a lambda of 0.6)
    = weights                    .0 .0 .0 .4 .0 .0      of [v1; v2], both halves of a pair's value

Heads come in pairs, interleaved, and the pool has a half for each side of the pairs:

    query, key, value    head  0  1 | 2  3 | ...         1 and 2 of pair 0 | 1 and 2 of pair 1 | ...
    cache                [half, key or value, n, p, hk/2, d]
        cache[0]         k1 and v1: an ordinary pool of keys and one of values
        cache[1]         k2 and v2
"""

import torch
from einops import rearrange
from jaxtyping import Float, Int64, Shaped
from torch import Tensor

from refattn import kv_cache
from refattn.attention import attend, compute_dtype
from refattn.batch import (
    Batch,
    check_differential,
    check_halves,
    check_lambdas,
    check_memory,
    check_options,
    check_pairs,
    check_sizes,
)
from refattn.masks import alibi, visible_keys


def attention(
    query: Float[Tensor, "t h d"],
    cache: Float[Tensor, "2 2 n p pairs d"],
    batch: Batch,
    *,
    lambda_full: Float[Tensor, ""],
    lambda_init: float,
    norm_weight: Float[Tensor, "2*d"] | None = None,
    norm_eps: float = 1e-5,
    causal: bool = True,
    window_size: tuple[int, int] = (-1, -1),
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    alibi_slopes: Float[Tensor, "h"] | None = None,
    sinks: Float[Tensor, "h"] | None = None,
    return_lse: bool = False,
) -> Float[Tensor, "t h d"] | tuple[Float[Tensor, "t h d"], Float[Tensor, "t h"]]:
    """Attend from the new tokens of each sequence to all its tokens in the cache, twice, and take the difference.

        difference = softmax(q1 k1) [v1; v2] - lambda * softmax(q2 k2) [v1; v2]       for each pair of heads
        out        = (1 - lambda_init) * norm_weight * difference / sqrt(mean(difference ** 2) + norm_eps)

    The norm comes after the subtraction, over both halves of the value; its output is cut into the two heads of the
    pair again. Pair `i` reads key pair `i // g`. Nothing is written here (see `write`), so a layer that has no keys of
    its own passes its queries and the cache of the layer whose keys it reuses, prefills and decodes in any mixture.

    Args:
        query: new tokens of all sequences, heads in interleaved pairs; rows behind the last sequence are padding.
        cache: the pool, `[half, key or value, n, p, hk/2, d]`; any strides.
        batch: the lengths and the block table.
        lambda_full: weight of the second softmax, from `compute_lambda`.
        lambda_init: the constant of the layer that was learned around, `0.8 - 0.6 * exp(-0.3 * layer)`.
        norm_weight: learned factors of the norm; None where it has none.
        norm_eps: keeps the norm of zeros at zero; above 0.
        causal: hide keys behind a query's own position; False shows every key of the sequence.
        window_size: `(left, right)` in tokens, both inclusive, -1 for no limit.
        softmax_scale: factor on the dot products; `d ** -0.5` if None.
        softcap: bound on the scores; 0 for none.
        alibi_slopes: slope of each head for the bias `-slope * abs(query position - key position)`.
        sinks: one extra logit a head in the denominator of its softmax.
        return_lse: also return the log-sum-exps.

    Returns:
        The outputs; with `return_lse` also the natural log-sum-exps (float32, sinks included), one a head: those of
        heads 0 and 1 belong to the two softmaxes of pair 0. They tell where a head looked; they cannot merge outputs,
        as those are differences behind a norm. A padding row and a query that sees nothing answer 0 and `-inf` (the
        sink, if there is one, for a query that sees nothing).

    Raises:
        ValueError: naming the argument that does not fit.

    Source: Ye et al. 2024, "Differential Transformer"; reuse of a cache: Sun et al. 2024, "You Only Cache Once".
    """
    block_table = check_differential(
        query,
        cache,
        batch,
        lambda_full=lambda_full,
        lambda_init=lambda_init,
        norm_weight=norm_weight,
        norm_eps=norm_eps,
    )
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
    out = torch.zeros_like(query)
    lse = query.new_full(query.shape[:2], -torch.inf, dtype=compute)

    for (q0, q1), seq_len, blocks in zip(batch.query_rows(), batch.seq_lens.tolist(), block_table, strict=True):
        visible = visible_keys(q1 - q0, seq_len, causal=causal, window_size=window_size, device=query.device)
        bias = None
        if alibi_slopes is not None:
            bias = alibi(alibi_slopes, q1 - q0, seq_len, dtype=compute, device=query.device)
        values = torch.cat([kv_cache.gather(cache[half, 1], blocks, seq_len) for half in (0, 1)], dim=-1)  # [v1; v2]
        answers = []
        for half in (0, 1):
            heads = slice(half, None, 2)
            answer, lse[q0:q1, heads] = attend(
                query[q0:q1, heads].to(compute),
                kv_cache.gather(cache[half, 0], blocks, seq_len),
                values,
                visible,
                softmax_scale=softmax_scale,
                softcap=softcap,
                bias=None if bias is None else bias[heads],
                sinks=None if sinks is None else sinks[heads],
            )
            answers.append(answer)  # [t, h/2, 2 * d]
        difference = answers[0] - lambda_full.to(compute) * answers[1]
        normed = difference * torch.rsqrt(difference.square().mean(-1, keepdim=True) + norm_eps)
        if norm_weight is not None:
            normed = normed * norm_weight.to(compute)
        out[q0:q1] = rearrange((1 - lambda_init) * normed, "t pairs (two d) -> t (pairs two) d", two=2)
    return (out, lse) if return_lse else out


def compute_lambda(
    lambda_q1: Float[Tensor, "d"],
    lambda_k1: Float[Tensor, "d"],
    lambda_q2: Float[Tensor, "d"],
    lambda_k2: Float[Tensor, "d"],
    *,
    lambda_init: float,
) -> Float[Tensor, ""]:
    """Give the weight of the second softmax, `exp(q1 . k1) - exp(q2 . k2) + lambda_init`, in float32.

    Args:
        lambda_q1: learned, as are the other three.
        lambda_k1: its partner in the first product.
        lambda_q2: of the second product.
        lambda_k2: its partner.
        lambda_init: the constant of the layer.

    Returns:
        One number for all heads of the layer; it changes with the weights only, so compute it once.

    Raises:
        ValueError: if the vectors differ in type, shape or device, or `lambda_init` is no finite number.

    Source: Ye et al. 2024, "Differential Transformer", equation 2.
    """
    check_lambdas(lambda_init, lambda_q1=lambda_q1, lambda_k1=lambda_k1, lambda_q2=lambda_q2, lambda_k2=lambda_k2)
    compute = compute_dtype(lambda_q1.dtype)
    first, second = (lambda_q1.to(compute) * lambda_k1).sum(), (lambda_q2.to(compute) * lambda_k2).sum()
    return torch.exp(first) - torch.exp(second) + lambda_init


def interleave_halves(heads: Shaped[Tensor, "t h d"]) -> Shaped[Tensor, "t h d"]:
    """Bring heads from the order of transformers' DiffLlama into pairs: it keeps all first heads before all second.

        DiffLlama    1a 1b 1c 2a 2b 2c
        here         1a 2a 1b 2b 1c 2c

    Queries, keys and values go through here before they are used or written. Outputs need no way back: DiffLlama, too,
    gives each pair's output of `2 * d` in one piece.

    Args:
        heads: query, key or value, with an even number of heads.

    Returns:
        The same heads in pairs.

    Raises:
        ValueError: if the shape is another, or the number of heads is odd.

    Source: `DiffLlamaAttention` in transformers.
    """
    check_halves(heads)
    return rearrange(heads, "t (two pairs) d -> t (pairs two) d", two=2)


def allocate(
    num_blocks: int,
    block_size: int,
    num_kv_heads: int,
    head_size: int,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> Shaped[Tensor, "2 2 n p pairs d"]:
    """Make an empty pool, `[half, key or value, n, p, hk/2, d]`.

    Args:
        num_blocks: blocks in the pool, `n`.
        block_size: tokens in a block, `p`.
        num_kv_heads: key heads, `hk`, an even number.
        head_size: elements of a key and of a value, `d`.
        dtype: type of an element.
        device: where the pool is.

    Returns:
        The pool, filled with zeros.

    Raises:
        ValueError: if a size is not positive, the heads are no pairs, or there is no such type or device.
    """
    check_sizes(num_blocks=num_blocks, block_size=block_size, num_kv_heads=num_kv_heads, head_size=head_size)
    check_memory(dtype, device)
    if num_kv_heads % 2:
        raise ValueError(f"num_kv_heads: expected pairs, an even number, got {num_kv_heads}")
    return torch.zeros(2, 2, num_blocks, block_size, num_kv_heads // 2, head_size, dtype=dtype, device=device)


def write(
    key: Shaped[Tensor, "t hk d"],
    value: Shaped[Tensor, "t hk d"],
    cache: Shaped[Tensor, "2 2 n p pairs d"],
    slot_mapping: Int64[Tensor, "t"],
) -> None:
    """Write new tokens into the pool, in place: the first heads of the pairs to one half, the second to the other.

    Args:
        key: the new keys, heads in interleaved pairs.
        value: the new values, likewise.
        cache: the pool, changed in place.
        slot_mapping: the slot of each token, each at most once; -1 is padding and is written nowhere.

    Raises:
        ValueError: if types, shapes or devices do not match; on a CPU also if a slot is outside the pool or comes
            twice. Nothing is written then.
    """
    check_pairs(cache, key=key, value=value)
    for half in (0, 1):
        kv_cache.write(key[:, half::2], value[:, half::2], cache[half, 0], cache[half, 1], slot_mapping)


def pools(cache: Shaped[Tensor, "2 2 n p pairs d"]) -> list[Shaped[Tensor, "n p pairs d"]]:
    """Give the four pools of a cache, views with the block as first dimension.

    `kv_cache.copy_blocks` and `kv_cache.swap_blocks` take them as they are: a block is copied in all four.

    Raises:
        ValueError: if the cache has another shape.
    """
    check_pairs(cache)
    return [cache[half, kind] for half in (0, 1) for kind in (0, 1)]
