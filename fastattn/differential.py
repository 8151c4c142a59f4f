"""Differential attention that reads each key and value once if possible; the twin of `refattn.differential`."""

from collections.abc import Callable

import torch
from jaxtyping import Float, Int64, Shaped
from torch import Tensor

from fastattn import chunked_prefill, dispatch, kv_cache, quantized
from refattn import allocation
from refattn.batch import Batch
from refattn.checks_of_calls import check_halves, check_lambdas, check_rows_of_pairs
from refattn.checks_of_writes import check_pairs
from refattn.keys import Pairs
from refattn.modes import without_autocast
from refattn.options import AttentionOptions
from refattn.plan import Plan
from refattn.scales import Fp8Scales
from refattn.trees import AttentionPlan


def plan(batch: Batch, *, block_size: int, causal: bool = True, window_size: tuple[int, int] = (-1, -1)) -> Plan:
    """Plan attention over all tokens of each sequence in the cache; the twin of `refattn.differential.plan`."""
    return chunked_prefill.plan(batch, block_size=block_size, causal=causal, window_size=window_size)


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

    Arguments, results and errors are those of `refattn.differential.attention`. Rows are read as pages of one token. An
    fp8 cache takes four calls of a kernel for quantized pages, two per softmax. Our Triton kernel fuses the subtraction
    and the root mean square norm; on a GPU another `norm` takes four calls, which are not replayed.

    Raises:
        NotImplementedError: if no kernel computes the combination, with the reason of each.
    """
    return dispatch.attend(
        query,
        Pairs(cache, scales),
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


@without_autocast
def compute_lambda(
    lambda_q1: Float[Tensor, "d"],
    lambda_k1: Float[Tensor, "d"],
    lambda_q2: Float[Tensor, "d"],
    lambda_k2: Float[Tensor, "d"],
    *,
    lambda_init: float,
) -> Float[Tensor, ""]:
    """Return the weight of the second softmax, in float32; the twin of `refattn.differential.compute_lambda`."""
    check_lambdas(lambda_init, lambda_q1=lambda_q1, lambda_k1=lambda_k1, lambda_q2=lambda_q2, lambda_k2=lambda_k2)
    vectors = torch.stack([lambda_q1, lambda_k1, lambda_q2, lambda_k2])
    vectors = vectors if vectors.dtype == torch.float64 else vectors.float()
    first, second = (vectors[::2] * vectors[1::2]).sum(-1).exp().unbind()
    return first - second + lambda_init


@without_autocast
def interleave_halves(heads: Shaped[Tensor, "t h d"]) -> Shaped[Tensor, "t h d"]:
    """Reorder heads from transformers' DiffLlama, which has all first heads before all second, into interleaved pairs.

    Arguments, results and errors are those of `refattn.differential.interleave_halves`.
    """
    check_halves(heads)
    return torch.stack(heads.chunk(2, dim=1), dim=2).flatten(1, 2)


def split_halves(key: Shaped[Tensor, "s hk d"], value: Shaped[Tensor, "s hk d"]) -> Shaped[Tensor, "2 2 s pairs d"]:
    """Return keys and values as the rows that `attention` takes; the twin of `refattn.differential.split_halves`."""
    check_rows_of_pairs(key, value)
    return torch.stack([torch.stack([x[:, half::2] for x in (key, value)]) for half in (0, 1)])


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

    Arguments, results and errors are those of `refattn.differential.write`.
    """
    check_pairs(cache, scales=scales, key=key, value=value)
    for half in (0, 1):
        tokens = key[:, half::2], value[:, half::2], cache[half, 0], cache[half, 1], slot_mapping
        if scales is None:
            kv_cache.write(*tokens)
        else:
            quantized.write(*tokens, scales=scales.of_halves(half, half))
