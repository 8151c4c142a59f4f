"""Prefill chunks and decodes over the paged cache, by the fastest kernel; the twin of `refattn.chunked_prefill`."""

from jaxtyping import Float
from torch import Tensor

from fastattn import dispatch
from refattn.batch import Batch
from refattn.checks import check_sizes
from refattn.keys import Pages
from refattn.options import AttentionOptions
from refattn.plan import Plan


def plan(batch: Batch, *, block_size: int, causal: bool = True, window_size: tuple[int, int] = (-1, -1)) -> Plan:
    """Plan attention over all tokens of each sequence in the cache; the twin of `refattn.chunked_prefill.plan`."""
    check_sizes(block_size=block_size)
    return Plan(batch, block_size, causal, window_size)


def attention(
    query: Float[Tensor, "t h d"],
    key_cache: Float[Tensor, "n p hk d"],
    value_cache: Float[Tensor, "n p hk dv"],
    plan: Plan,
    options: AttentionOptions = AttentionOptions(),
    *,
    return_lse: bool = False,
    out: Float[Tensor, "t h dv"] | None = None,
) -> Float[Tensor, "t h dv"] | tuple[Float[Tensor, "t h dv"], Float[Tensor, "t h"]]:
    """Attend from the new tokens of each sequence to its tokens in the cache; the twin of `refattn.chunked_prefill`.

    Arguments, results and errors are those of `refattn.chunked_prefill.attention`.

    Raises:
        NotImplementedError: if no kernel computes the combination, with the reason of each.
    """
    return dispatch.attend(query, Pages(key_cache, value_cache), plan, options, out, return_lse, Plan)
