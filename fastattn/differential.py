"""Differential attention, every key and value read once where a kernel can; the twin of `refattn.differential`."""

import torch
from jaxtyping import Float, Int64, Shaped
from torch import Tensor

from fastattn import kernels, kv_cache
from fastattn.kernels import Options, Subtraction
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
        NotImplementedError: if no kernel computes the combination, with the reason of each.

    Source: `refattn.differential.attention`.
    """
    check_differential(
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
    options = Options(
        causal=causal,
        window_size=window_size,
        softmax_scale=softmax_scale,
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        sinks=sinks,
    )
    subtraction = Subtraction(lambda_full, norm_weight, norm_eps, 1 - lambda_init)
    out, lse = kernels.differential(query, cache, batch, options, subtraction)  # [t, h/2, 2 * d]
    out = out.view(query.shape)
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

    Source: `refattn.differential.compute_lambda`.
    """
    check_lambdas(lambda_init, lambda_q1=lambda_q1, lambda_k1=lambda_k1, lambda_q2=lambda_q2, lambda_k2=lambda_k2)
    vectors = torch.stack([lambda_q1, lambda_k1, lambda_q2, lambda_k2])
    vectors = vectors if vectors.dtype == torch.float64 else vectors.float()
    first, second = (vectors[::2] * vectors[1::2]).sum(-1).exp().unbind()
    return first - second + lambda_init


def interleave_halves(heads: Shaped[Tensor, "t h d"]) -> Shaped[Tensor, "t h d"]:
    """Bring heads from the order of transformers' DiffLlama into pairs: it keeps all first heads before all second.

    Args:
        heads: query, key or value, with an even number of heads.

    Returns:
        The same heads in pairs.

    Raises:
        ValueError: if the shape is another, or the number of heads is odd.

    Source: `refattn.differential.interleave_halves`.
    """
    check_halves(heads)
    return torch.stack(heads.chunk(2, dim=1), dim=2).flatten(1, 2)


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

    Source: `refattn.differential.allocate`.
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

    Source: `refattn.differential.write`.
    """
    check_pairs(cache, key=key, value=value)
    for half in (0, 1):
        kv_cache.write(key[:, half::2], value[:, half::2], cache[half, 0], cache[half, 1], slot_mapping)


def pools(cache: Shaped[Tensor, "2 2 n p pairs d"]) -> list[Shaped[Tensor, "n p pairs d"]]:
    """Give the four pools of a cache, views with the block as first dimension.

    `kv_cache.copy_blocks` and `kv_cache.swap_blocks` take them as they are: a block is copied in all four.

    Raises:
        ValueError: if the cache has another shape.

    Source: `refattn.differential.pools`.
    """
    check_pairs(cache)
    return [pool for half in cache.unbind() for pool in half.unbind()]
