"""Intervals that extend a causal mask, for kernels without intervals: they attend up to each query, ours after it.

In a prompt with images nearly all keys that a query sees come before it. So a package's kernel attends under a causal
mask, and one launch of ours merges its output with the later keys that a query sees:

    image            causal           after
    1 . . . .        1 . . . .        . . . . .
    1 1 1 1 .        1 1 . . .        . . 1 1 .       two tiles of queries have work, at most
    1 1 1 1 .   =    1 1 1 . .   +    . . . 1 .
    1 1 1 1 .        1 1 1 1 .        . . . . .
    1 1 1 1 1        1 1 1 1 1        . . . . .
"""

from collections.abc import Callable
from dataclasses import replace

from jaxtyping import Float
from torch import Tensor

from fastattn.kernels.problem import places
from fastattn.kernels.replay import memo_of
from fastattn.kernels.schedule import UNKNOWN, where_called
from refattn.keys import Keys, Pages, Rows
from refattn.options import AttentionOptions
from refattn.plan import Plan


def attend_up_to_and_after(
    attend: Callable[..., tuple[Tensor, Tensor]],
    query: Float[Tensor, "t h d"],
    keys: Keys,
    plan: Plan,
    options: AttentionOptions,
    out: Float[Tensor, "t h dv"] | None,
) -> tuple[Float[Tensor, "t h dv"], Float[Tensor, "t h"]]:
    """Attend to rows or pages under intervals that extend a causal mask; `attend` adds the sinks.

    Args:
        attend: the function of a kernel with causal masks.
        query: query rows of all sequences.
        keys: where the keys are.
        plan: the intervals.
        options: the layer's options.
        out: where the outputs may be written.
    """
    from fastattn.kernels.flash.recompute import attend_after

    assert isinstance(keys, Rows | Pages)  # `cannot_extend` has checked it
    (key, value), (causal, after) = keys, _parts(plan)
    answer = attend(query, keys, causal, options, out)
    return attend_after(query, key, value, after, options, *answer)


def _parts(plan: Plan) -> tuple[Plan, Plan]:
    """Return a plan of the causal mask, and one of the later keys, which the memo stores."""
    memo, where = memo_of(plan), where_called()
    parts = memo.parts.get(where)
    if parts is None:
        assert plan.first_visible is not None  # it has intervals
        after = memo.after
        if after is None:
            after = places(plan.batch, len(plan.first_visible))[1].int() + 1
        causal = replace(plan, causal=True, first_visible=None, last_visible=None, extends_causal=False)
        parts = causal, replace(plan, first_visible=after, extends_causal=False)
        for part in parts:
            memo_of(part).cu_seqlens_k = memo.cu_seqlens_k
        if where is not UNKNOWN:
            memo.parts[where] = parts
    return parts
