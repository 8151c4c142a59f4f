"""Differential attention: two softmaxes over the same values, the second subtracted from the first.

Weights that both softmaxes give to a key are noise and cancel. One query, six keys:

      softmax(q1 k1)             .1 .2 .1 .4 .1 .1
    - lambda * softmax(q2 k2)    .1 .2 .1 .0 .1 .1      (softmax 2 times a lambda of 0.6)
    = weights                    .0 .0 .0 .4 .0 .0      of [v1; v2], both halves of a pair's value

Heads come in interleaved pairs, and the pool has one half for the first head of each pair and one for the second:

    query, key, value    head  0  1 | 2  3 | ...         pair 0 | pair 1 | ...
    cache                [half, key or value, n, p, hk/2, d]
        cache[0]         k1 and v1: an ordinary pool of keys and one of values
        cache[1]         k2 and v2

Without a cache (an encoder, or a profiling run before the cache is allocated), keys and values are rows,
`[half, key or value, s, hk/2, d]`, with a plan from `varlen`. A cache may be fp8, with the scales of `quantized`.
"""

from collections.abc import Callable

import torch
from einops import rearrange
from jaxtyping import Float, Int64, Shaped
from torch import Tensor

from refattn import allocation, chunked_prefill, kv_cache, quantized
from refattn.attention import attend_plan, finish
from refattn.batch import Batch
from refattn.checks import check_normed
from refattn.checks_of_calls import check_halves, check_lambdas, check_rows_of_pairs
from refattn.checks_of_writes import check_pairs
from refattn.keys import Pairs
from refattn.modes import compute_dtype, without_autocast
from refattn.options import AttentionOptions
from refattn.plan import Plan
from refattn.scales import Fp8Scales
from refattn.trees import AttentionPlan


def plan(batch: Batch, *, block_size: int, causal: bool = True, window_size: tuple[int, int] = (-1, -1)) -> Plan:
    """Plan attention over all tokens of each sequence in the cache, as `chunked_prefill.plan`.

    Args:
        batch: the lengths and the block table.
        block_size: tokens in a block, `p`.
        causal: hide the keys after a query's own position; False shows every key of the sequence.
        window_size: `(left, right)` in tokens, both inclusive, -1 for no limit.

    Returns:
        A plan for every layer of this step.

    Raises:
        ValueError: naming the argument that does not fit; the contents of the batch are checked on a CPU.
    """
    return chunked_prefill.plan(batch, block_size=block_size, causal=causal, window_size=window_size)


@without_autocast
def attention(
    query: Float[Tensor, "t h d"],
    cache: Shaped[Tensor, "2 2 *pages pairs d"],
    plan: AttentionPlan,
    options: AttentionOptions = AttentionOptions(),
    *,
    lambda_full: Float[Tensor, ""],
    lambda_init: float,
    norm_weight: Float[Tensor, "2*d"] | None = None,
    norm_eps: float = 1e-5,
    norm: Callable[[Tensor], Tensor] | None = None,
    return_lse: bool = False,
    out: Float[Tensor, "t h d"] | None = None,
    scales: Fp8Scales | None = None,
) -> Float[Tensor, "t h d"] | tuple[Float[Tensor, "t h d"], Float[Tensor, "t h"]]:
    """Attend from the new tokens of each sequence to all its tokens in the cache, twice, and take the difference.

        difference = softmax(q1 k1) [v1; v2] - lambda * softmax(q2 k2) [v1; v2]       for each pair of heads
        out        = (1 - lambda_init) * norm_weight * difference / sqrt(mean(difference ** 2) + norm_eps)

    The norm comes after the subtraction, over both halves of the value; its output is split into the two heads of the
    pair again. Pair `i` reads KV pair `i // g`. Nothing is written here (see `write`), so a layer without keys of its
    own passes the cache of the layer whose keys it reuses.

    Args:
        query: new tokens of all sequences, heads in interleaved pairs; rows after the last sequence are padding.
        cache: the pool, `[half, key or value, n, p, hk/2, d]`; any strides. Rows `[half, key or value, s, hk/2, d]`
            under a plan over rows (`split_halves`).
        plan: from `plan` or another path over pages, once per step; also a cascade or draft trees. Over rows, from
            `varlen.plan`.
        options: the layer's options; slopes and sinks have one element for each of the `h` heads.
        lambda_full: weight of the second softmax, from `compute_lambda`.
        lambda_init: the constant of the layer in `lambda_full`, `0.8 - 0.6 * exp(-0.3 * layer)`.
        norm_weight: learned factors of the norm; None if it has none.
        norm_eps: added to the mean square in the norm.
        norm: replaces that norm: a function or module from differences `[t, h/2, 2*d]` in the compute type to a tensor
            of the same shape. Its result for zeros is the output of a fully masked query. None: the root mean square
            norm above.
        return_lse: also return the log-sum-exps.
        out: where to write the outputs; a new tensor if None.
        scales: the scales of an fp8 cache, as in `quantized.attention`; scales per KV head are in the order of
            interleaved pairs. None for a cache in the type of the query.

    Returns:
        The outputs; with `return_lse` also the natural log-sum-exps (float32, sinks included), one per head: heads 0
        and 1 are the two softmaxes of pair 0. They cannot be used to merge outputs, which are normalized differences. A
        padding row and a fully masked query return 0 and `-inf` (a fully masked query with a sink: the sink as its
        LSE).

    Raises:
        ValueError: naming the argument that does not fit. Nothing is written then.

    Source: Ye et al. 2024, "Differential Transformer"; reuse of a cache: Sun et al. 2024, "You Only Cache Once".
    """
    keys, answers, lses = Pairs(cache, scales), [], []
    keys.check(
        query,
        plan,
        options,
        out,
        return_lse,
        lambda_full=lambda_full,
        lambda_init=lambda_init,
        norm_weight=norm_weight,
        norm_eps=norm_eps,
        norm=norm,
    )
    for half in (0, 1):
        queries, its_options = query[:, half::2], options.of_heads(slice(half, None, 2))
        parts = [attend_plan(queries, keys.of_halves(half, other), plan, its_options) for other in (0, 1)]
        answers.append(torch.cat([out for out, _ in parts], dim=-1))  # over [v1; v2]: [t, h/2, 2 * d]
        lses.append(parts[0][1])
    difference = answers[0] - lambda_full.to(answers[0].dtype) * answers[1]
    if norm is not None:
        normed = check_normed(norm(difference), difference)
    else:
        normed = difference * torch.rsqrt(difference.square().mean(-1, keepdim=True) + norm_eps)
    if norm_weight is not None:
        normed = normed * norm_weight.to(normed.dtype)
    result = rearrange((1 - lambda_init) * normed, "t pairs (two d) -> t (pairs two) d", two=2)
    both = rearrange(lses, "two t pairs -> t (pairs two)")
    return finish(result, both, query.dtype, return_lse=return_lse, out=out)


def compute_lambda(
    lambda_q1: Float[Tensor, "d"],
    lambda_k1: Float[Tensor, "d"],
    lambda_q2: Float[Tensor, "d"],
    lambda_k2: Float[Tensor, "d"],
    *,
    lambda_init: float,
) -> Float[Tensor, ""]:
    """Return the weight of the second softmax, in float32.

        exp(lambda_q1 . lambda_k1) - exp(lambda_q2 . lambda_k2) + lambda_init

    Args:
        lambda_q1: learned vector of the first product.
        lambda_k1: learned vector of the first product.
        lambda_q2: learned vector of the second product.
        lambda_k2: learned vector of the second product.
        lambda_init: the constant of the layer.

    Returns:
        One number for all heads of the layer. It depends only on the weights, so compute it once.

    Raises:
        ValueError: if the vectors differ in type, shape or device, or `lambda_init` is not a finite number.

    Source: Ye et al. 2024, "Differential Transformer", equation 2.
    """
    check_lambdas(lambda_init, lambda_q1=lambda_q1, lambda_k1=lambda_k1, lambda_q2=lambda_q2, lambda_k2=lambda_k2)
    compute = compute_dtype(lambda_q1.dtype)
    first, second = (lambda_q1.to(compute) * lambda_k1).sum(), (lambda_q2.to(compute) * lambda_k2).sum()
    return torch.exp(first) - torch.exp(second) + lambda_init


def interleave_halves(heads: Shaped[Tensor, "t h d"]) -> Shaped[Tensor, "t h d"]:
    """Reorder heads from transformers' DiffLlama, which has all first heads before all second, into interleaved pairs.

        DiffLlama    1a 1b 1c 2a 2b 2c
        here         1a 2a 1b 2b 1c 2c

    Apply it to queries, keys and values before they are used or written. Outputs need no conversion: DiffLlama also
    returns the `2 * d` elements of a pair contiguously.

    Args:
        heads: query, key or value, with an even number of heads.

    Returns:
        The same heads in interleaved pairs.

    Raises:
        ValueError: if the shape does not fit, or the number of heads is odd.

    Source: `DiffLlamaAttention` in transformers.
    """
    check_halves(heads)
    return rearrange(heads, "t (two pairs) d -> t (pairs two) d", two=2)


def split_halves(key: Shaped[Tensor, "s hk d"], value: Shaped[Tensor, "s hk d"]) -> Shaped[Tensor, "2 2 s pairs d"]:
    """Return keys and values as the rows that `attention` takes: first heads of pairs in one half, second in the other.

    Args:
        key: the keys of all sequences, one after the other, heads in interleaved pairs.
        value: the values, in the same pairs.

    Returns:
        A copy, `[half, key or value, s, hk/2, d]`.

    Raises:
        ValueError: if types, shapes or devices do not match, or the number of heads is odd.
    """
    check_rows_of_pairs(key, value)
    return rearrange([key, value], "kind s (pairs two) d -> two kind s pairs d", two=2)


allocate = allocation.allocate_pairs
pools = allocation.pools_of_pairs


def write(
    key: Shaped[Tensor, "rows hk d"],
    value: Shaped[Tensor, "rows hk d"],
    cache: Shaped[Tensor, "2 2 n p pairs d"],
    slot_mapping: Int64[Tensor, "t"],
    *,
    scales: Fp8Scales | None = None,
) -> None:
    """Write new tokens into the pool, in place: the first heads of pairs to one half, the second to the other.

    Args:
        key: the new keys, heads in interleaved pairs; rows after the last slot are padding.
        value: the new values, in the same pairs.
        cache: the pool, changed in place.
        slot_mapping: the slot of each token, each slot at most once; -1 is padding and is not written.
        scales: the scales of an fp8 cache, not per sequence; tokens of any floating point type are quantized as in
            `quantized.write`. None: tokens have the type of the cache.

    Raises:
        ValueError: if types, shapes or devices do not match; on a CPU also if a slot is outside the pool or is given
            twice. Nothing is written then.
    """
    check_pairs(cache, scales=scales, key=key, value=value)
    for half in (0, 1):
        tokens = key[:, half::2], value[:, half::2], cache[half, 0], cache[half, 1], slot_mapping
        if scales is None:
            kv_cache.write(*tokens)
        else:
            quantized.write(*tokens, scales=scales.of_halves(half, half))
