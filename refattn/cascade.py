"""Cascade attention: attend to shared keys once, with the queries of all sequences that share them, and merge.

Four sequences and their blocks; three share the first two blocks, and two of those a third one:

                  level 0     level 1     level 2, the last: keys not shared
    a  7 3 5 9     ( 7 3       ( 5         9
    b  7 3 5 2 8   (           (           2 8          output of b = merge(over 7 3, over 5, over 2 8)
    c  7 3 4       (                       4
    d  6 1                                 6 1          ( one group: its keys are read once

Each level has its own plan, whose "sequences" are groups of consecutive sequences: the queries of a, b and c are
contiguous, so they can be treated as the queries of one long sequence with the keys of blocks 7 and 3.
"""

from collections.abc import Sequence
from math import ceil

import torch
from jaxtyping import Float
from torch import Tensor

from refattn import steps
from refattn.attention import attend_to
from refattn.batch import Batch, Prefix
from refattn.checks import check_window
from refattn.checks_of_calls import check_plan
from refattn.checks_of_steps import check_prefixes
from refattn.keys import Pages
from refattn.metadata import make_batch, positions
from refattn.options import AttentionOptions
from refattn.plan import CascadePlan, Plan


def plan(
    batch: Batch, *, prefixes: Sequence[Prefix], block_size: int, window_size: tuple[int, int] = (-1, -1)
) -> CascadePlan:
    """Plan a level for the outermost prefixes, one for those inside them, and a last one for the keys not shared.

    Args:
        batch: the lengths and the block table.
        prefixes: any prefixes from `find_prefixes`, in any order; without prefixes there is only the last level.
        block_size: tokens in a block, `p`.
        window_size: `(left, right)` in tokens, both inclusive, -1 for no limit. A cascade is causal.

    Returns:
        The levels, for every layer of this step.

    Raises:
        ValueError: if a prefix is not a multiple of the block size, or overlaps another without being nested with it;
            on a CPU also if it extends into the queries of one of its sequences, or its sequences have different
            blocks.
    """
    block_table = check_prefixes(prefixes, batch, block_size=block_size)
    check_window(window_size)
    query_lens, seq_lens, tables = batch.query_lens.tolist(), batch.seq_lens.tolist(), block_table.tolist()
    places = positions(batch, sum(query_lens)).int()
    begins = [0] * batch.num_seqs  # the first key of each sequence not yet in a level
    levels = []

    def add_level(groups: Sequence[Prefix], *, shared: bool) -> None:
        keys = make_batch(
            [sum(query_lens[first:last]) for first, last, _ in groups],
            [end - begins[first] for first, _, end in groups],
            [tables[first][begins[first] // block_size : ceil(end / block_size)] for first, _, end in groups],
            device=batch.device,
        )
        starts = torch.tensor([begins[first] for first, _, _ in groups], dtype=torch.int32, device=batch.device)
        if shared:  # all keys precede all queries, but each query of a group has its own position
            levels.append(Plan(keys, block_size, False, (window_size[0], -1), first_keys=starts, positions=places))
        else:
            levels.append(Plan(keys, block_size, True, window_size, first_keys=starts))
        for first, last, end in groups:
            begins[first:last] = [end] * (last - first)

    waiting = list(prefixes)
    while waiting:
        outermost = [p for p in waiting if not any(other.encloses(p) for other in waiting)]
        waiting = [p for p in waiting if p not in outermost]
        members = {i for first, last, _ in outermost for i in range(first, last)}
        alone = [Prefix(i, i + 1, begins[i]) for i in range(batch.num_seqs) if i not in members]  # no keys here
        add_level(sorted([*outermost, *alone]), shared=True)
    add_level([Prefix(i, i + 1, seq_lens[i]) for i in range(batch.num_seqs)], shared=False)
    return CascadePlan(batch, tuple(levels))


def attention(
    query: Float[Tensor, "t h d"],
    key_cache: Float[Tensor, "n p hk d"],
    value_cache: Float[Tensor, "n p hk dv"],
    plan: CascadePlan,
    options: AttentionOptions = AttentionOptions(),
    *,
    return_lse: bool = False,
    out: Float[Tensor, "t h dv"] | None = None,
) -> Float[Tensor, "t h dv"] | tuple[Float[Tensor, "t h dv"], Float[Tensor, "t h"]]:
    """Attend causally from the new tokens of each sequence to all its tokens in the cache, level by level.

    The output equals that of `chunked_prefill.attention` on the same batch.

    Args:
        query: new tokens of all sequences, one after the other; rows after the last sequence are padding.
        key_cache: the pool of keys; any strides.
        value_cache: the pool of values.
        plan: from `plan`, once per step.
        options: the layer's options; sinks count once.
        return_lse: also return the log-sum-exp.
        out: where to write the outputs; a new tensor if None.

    Returns:
        As `chunked_prefill.attention`.

    Raises:
        ValueError: naming the argument that does not fit. Nothing is written then.

    Source: Juravsky et al. 2024, "Hydragen"; Ye et al. 2024, "Cascade Inference" (FlashInfer).
    """
    check_plan(plan, CascadePlan)
    return attend_to(query, Pages(key_cache, value_cache), plan, options, return_lse=return_lse, out=out)


find_prefixes = steps.find_prefixes
