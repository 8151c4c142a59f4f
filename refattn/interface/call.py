"""What every call of attention is checked for, whatever stores its keys: query, options, plan, and where answers go.

These checks run in every layer, so they never read a tensor on a device, and only a few numbers per head of tensors on
a CPU. What a storage asks for besides stands beside it, in `refattn.interface.keys`.
"""

import torch
from jaxtyping import Int32
from torch import Tensor

from refattn.interface.options import AttentionOptions
from refattn.interface.plan import CascadePlan, Plan
from refattn.interface.trees import AttentionPlan, TreePlan
from refattn.interface.values import check_flag, check_numbers, check_own_memory, describe, expect, same_device


def check_query(query: Tensor) -> tuple[int, ...]:
    """Check a query `[t, h, d]` of numbers, and return its shape."""
    shape = expect(query, "query", None, ("t", "h", "d"), (None, None, None))
    check_numbers("query", query)
    if not shape[1] or not shape[2]:
        raise ValueError(f"query: expected at least one head, of a size of at least 1, got {describe(query)}")
    return shape


def check_plan(plan: object, *kinds: type, source: str = "") -> None:
    """Check that something is a plan of one of some kinds; by default, of any that a pool is read under.

    Raises:
        ValueError: naming the kinds, and where such plans come from.
    """
    kinds = kinds or (Plan, CascadePlan, TreePlan)
    if not isinstance(plan, kinds):
        *some, last = (f"a {kind.__name__}" for kind in kinds)
        named = f"{', '.join(some)} or {last}" if some else last
        raise ValueError(f"plan: expected {named}{source and f', from {source}'}, got {describe(plan)}")


def check_tokens(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    names: tuple[str, str],
    key_dims: tuple[str, ...],
    plan: Plan,
    options: AttentionOptions,
    types: tuple[torch.dtype, torch.dtype] | None = None,
) -> None:
    """Check a query against keys and values, by the names of these, and against the rows of a plan; and the options."""
    _, h, d = check_query(query)
    key_type, value_type = types or (query.dtype, query.dtype)
    shape = expect(key, names[0], key_type, key_dims, (*(None,) * (len(key_dims) - 1), d))
    if not expect(value, names[1], value_type, (*key_dims[:-1], "dv"), (*shape[:-1], None))[-1]:
        raise ValueError(f"{names[1]}: expected a head size of at least 1, got {describe(value)}")
    hk = shape[-2]
    if not hk or h % hk:
        raise ValueError(f"query: expected a number of heads that hk={hk} divides, got h={h}")
    if not isinstance(plan, Plan):
        raise ValueError(f"plan: expected a Plan, got {describe(plan)}")
    check_options(options, query)
    device, lengths = query.device, plan.batch.seq_lens
    if key.device != device or value.device != device or lengths.device != device:
        same_device(query=query, **{names[0]: key, names[1]: value}, seq_lens=lengths)
    if plan.needs is not None and plan.needs.query_rows > query.shape[0]:
        raise ValueError(
            f"query: expected at least {plan.needs.query_rows} rows, where cu_seqlens_q ends, got t={query.shape[0]}"
        )


def check_pool(name: str, pool: Tensor, plan: Plan) -> Int32[Tensor, "b m"]:
    """Check a pool against a plan: the block size, and the number of blocks."""
    num_blocks, block_size = pool.shape[:2]
    if plan.block_size is None:
        raise ValueError("plan: expected one over pages, with a block size, got one over rows, from dense.plan")
    if plan.block_size != block_size:
        raise ValueError(f"{name}: expected blocks of {plan.block_size} tokens, as in the plan, got p={block_size}")
    if plan.needs is not None and plan.needs.blocks > num_blocks:
        raise ValueError(
            f"{name}: expected at least {plan.needs.blocks} blocks, as the block table leads to block "
            f"{plan.needs.blocks - 1}, got n={num_blocks}"
        )
    assert plan.batch.block_table is not None  # a plan with a block size has one
    return plan.batch.block_table


def check_levels(name: str, pool: Tensor, plan: AttentionPlan, options: AttentionOptions) -> None:
    """Check the levels of a cascade that are shared: their blocks, and that their positions are known for ALiBi."""
    for level in plan.levels[:-1]:
        check_pool(name, pool, level.whole)
        check_positions(level.whole, options)


def check_positions(plan: Plan, options: AttentionOptions) -> None:
    """Check that a plan says where its queries stand if there is ALiBi, as they are not the last of its tokens."""
    if options.alibi_slopes is not None and plan.positions is None:
        raise ValueError(
            "alibi_slopes: expected a plan that knows the positions of its queries, got one of a batch that does not "
            "say num_tokens, the number of its query rows; make the plan of dataclasses.replace(batch, num_tokens=...)"
        )


def check_options(options: AttentionOptions, query: Tensor) -> None:
    """Check the options with one number per head against the heads, and the device, of a query."""
    if not isinstance(options, AttentionOptions):
        raise ValueError(f"options: expected AttentionOptions, got {describe(options)}")
    for name in ("alibi_slopes", "sinks"):
        numbers = getattr(options, name)
        if numbers is not None:
            if numbers.shape[0] != query.shape[1]:
                raise ValueError(f"{name}: expected floating point [h={query.shape[1]}], got {describe(numbers)}")
            same_device(query=query, **{name: numbers})


def check_result(query: Tensor, value_head_size: int, out: Tensor | None, return_lse: bool) -> None:
    """Check where an answer is to go."""
    check_flag("return_lse", return_lse)
    if out is not None:
        expect(out, "out", query.dtype, ("t", "h", "dv"), (*query.shape[:2], value_head_size))
        same_device(query=query, out=out)
        check_own_memory("out", out)
        if out.requires_grad and torch.is_grad_enabled():
            raise ValueError("out: expected memory that requires no gradient, got some that does")


def num_seqs_of(plan: Plan) -> tuple[int | None, bool]:
    """Return the sequences of the batch behind a plan, None if they are not known; and whether there may be more."""
    if plan.sequences is None:
        return plan.batch.num_seqs, False
    is_known = plan.sequences.is_cpu and plan.sequences.numel()
    return int(plan.sequences.max()) + 1 if is_known else None, True
