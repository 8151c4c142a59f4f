"""Prefill chunks and decodes in one flattened batch over the paged cache: what a serving engine runs at every step.

One step with a first chunk, a later chunk and a decode; `n` marks new tokens, whose keys are in the cache already:

                  keys            query rows
    first chunk   n n n n         4        seq_len = query_len
    later chunk   . . . . n n     2        seq_len = context + query_len
    decode        . . . . . . n   1        query_len = 1

All three are the same computation: the last `query_len` of `seq_len` tokens attend to everything before them.
"""

from jaxtyping import Float
from torch import Tensor

from refattn.attention import attend_to
from refattn.batch import Batch
from refattn.checks import check_sizes
from refattn.checks_of_calls import check_plan
from refattn.keys import Pages
from refattn.options import AttentionOptions
from refattn.plan import Plan


def plan(batch: Batch, *, block_size: int, causal: bool = True, window_size: tuple[int, int] = (-1, -1)) -> Plan:
    """Plan attention over all tokens of each sequence in the cache.

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
    """Attend from the new tokens of each sequence to its tokens in the cache, the new ones included.

    Write the new keys and values first (`kv_cache.write`). `refattn.attention.attend` has the formula.

    Args:
        query: new tokens of all sequences, one after the other; rows after the last sequence are padding.
        key_cache: the pool of keys; any strides.
        value_cache: the pool of values.
        plan: from `plan`, once per step.
        options: the layer's options.
        return_lse: also return the log-sum-exp.
        out: where to write the outputs; a new tensor if None.

    Returns:
        The outputs; with `return_lse` also the natural log-sum-exp (float32, sinks included). A padding row and a fully
        masked query return 0 and `-inf` (a fully masked query with a sink: the sink as its LSE).

    Raises:
        ValueError: naming the argument that does not fit. Nothing is written then.

    Source: Agrawal et al. 2023, "Sarathi"; Kwon et al. 2023, "PagedAttention".
    """
    check_plan(plan, Plan)
    return attend_to(query, Pages(key_cache, value_cache), plan, options, return_lse=return_lse, out=out)
