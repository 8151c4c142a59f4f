"""Ragged attention without a cache: sequences of different lengths, flattened; each attends only to its own keys.

    cu_seqlens_q  0       2     3          query rows   a a | b | c c c
    seq_lens      3       1     2          key rows     a a a | b | c c

For encoders (`causal=False`), cross attention (any number of keys per query) and the prefill of whole prompts.
"""

from jaxtyping import Float
from torch import Tensor

from refattn.attention import attend_to
from refattn.batch import Batch
from refattn.keys import Rows
from refattn.options import AttentionOptions
from refattn.plan import Plan


def plan(batch: Batch, *, causal: bool = True, window_size: tuple[int, int] = (-1, -1)) -> Plan:
    """Plan attention over contiguous keys.

    Args:
        batch: the lengths; it needs no block table.
        causal: hide the keys after a query's own position, with the last query aligned to the last key.
        window_size: `(left, right)` in tokens, both inclusive, -1 for no limit.

    Returns:
        A plan for every layer of this step.

    Raises:
        ValueError: naming the argument that does not fit; the contents of the batch are checked on a CPU.
    """
    return Plan(batch, None, causal, window_size)


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
    """Attend from the query rows of each sequence to its key rows; `refattn.attention.attend` has the formula.

    Args:
        query: query rows of all sequences, one after the other; rows after the last sequence are padding.
        key: key rows of all sequences, one after the other; `seq_lens` has their numbers.
        value: the values of the keys.
        plan: from `plan`, once per step.
        options: the layer's options.
        return_lse: also return the log-sum-exp.
        out: where to write the outputs; a new tensor if None.

    Returns:
        The outputs; with `return_lse` also the natural log-sum-exp (float32, sinks included). A padding row and a fully
        masked query return 0 and `-inf` (a fully masked query with a sink: the sink as its LSE).

    Raises:
        ValueError: naming the argument that does not fit. Nothing is written then.

    Source: Dao et al. 2022, "FlashAttention" (the variable-length form).
    """
    return attend_to(query, Rows(key, value), plan, options, return_lse=return_lse, out=out)
