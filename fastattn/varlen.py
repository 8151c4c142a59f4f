"""Ragged attention without a cache, by the fastest kernel; the twin of `refattn.varlen`."""

from jaxtyping import Float
from torch import Tensor

from fastattn import dispatch
from fastattn.kernels.replay import memo_of
from refattn.batch import Batch
from refattn.keys import Rows
from refattn.options import AttentionOptions
from refattn.plan import Plan


def plan(batch: Batch, *, causal: bool = True, window_size: tuple[int, int] = (-1, -1)) -> Plan:
    """Plan attention over contiguous keys; the twin of `refattn.varlen.plan`.

    `cu_seqlens_k` is computed here, once, and not in every layer, so new lengths need a new plan.
    """
    plan = Plan(batch, None, causal, window_size)
    memo_of(plan).cu_seqlens_k = batch.cu_seqlens_k
    return plan


def attention(
    query: Float[Tensor, "t h d"],
    key: Float[Tensor, "s hk d"],
    value: Float[Tensor, "s hk dv"],
    plan: Plan,
    options: AttentionOptions = AttentionOptions(),
    *,
    return_lse: bool = False,
    out: Float[Tensor, "t h dv"] | None = None,
) -> Float[Tensor, "t h dv"] | tuple[Float[Tensor, "t h dv"], Float[Tensor, "t h"]]:
    """Attend from the query rows of each sequence to its key rows; the twin of `refattn.varlen.attention`.

    Arguments, results and errors are those of `refattn.varlen.attention`.

    Raises:
        NotImplementedError: if no kernel computes the combination, with the reason of each.
    """
    return dispatch.attend(query, Rows(key, value), plan, options, out, return_lse)
