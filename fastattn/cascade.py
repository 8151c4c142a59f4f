"""Cascade attention: each level is a plan for a paged kernel; the twin of `refattn.cascade`.

Any paged kernel can compute a cascade: the shared levels without a causal mask, because all their keys precede all
queries, and the last level as usual. Our Triton kernel merges all levels in one launch; the outputs of other kernels
are merged afterwards. The plan has the positions of the queries, for windows and ALiBi.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from jaxtyping import Float, Int32
from torch import Tensor

from fastattn import dispatch
from fastattn.metadata import positions
from refattn import steps
from refattn.batch import Batch, Prefix
from refattn.checks import LARGEST_INT32, check_window
from refattn.checks_of_steps import check_prefixes
from refattn.keys import Pages
from refattn.options import AttentionOptions
from refattn.plan import CascadePlan, Plan


def plan(
    batch: Batch, *, prefixes: Sequence[Prefix], block_size: int, window_size: tuple[int, int] = (-1, -1)
) -> CascadePlan:
    """Plan a level for each depth of the tree of prefixes, and a last one for the keys not shared.

    The twin of `refattn.cascade.plan`, which reads the batch on the host. Here tables are sliced on the device, so the
    maxima of a level are upper bounds. A window or ALiBi needs query positions, so a batch on a device must have
    `num_tokens`.

    Raises:
        ValueError: as there; also for a window over prefixes if a batch on a device has no `num_tokens`. For ALiBi, an
            option of the layer, `attention` raises instead.
    """
    block_table = check_prefixes(prefixes, batch, block_size=block_size)
    left, right = check_window(window_size)
    left = -1 if left >= batch.max_seq_len - 1 else left  # hides nothing, so needs no positions
    num_tokens = int(batch.cu_seqlens_q[-1]) if batch.device.type == "cpu" else batch.num_tokens
    if num_tokens is None and left >= 0 and prefixes:
        raise ValueError(
            "num_tokens: expected the number of query rows, which a window needs, got None: a batch on a device "
            "is not read, so make the plan of dataclasses.replace(batch, num_tokens=...)"
        )
    where = None if num_tokens is None else positions(batch, num_tokens).int()
    begins, tree = [0] * batch.num_seqs, _tree(prefixes)
    levels = []
    for depth in range(max((depth for depth, _, _ in tree), default=-1) + 1):
        owners = {prefix.first: prefix for level, _, prefix in tree if level == depth}
        groups, i = [], 0
        while i < batch.num_seqs:
            group = owners.get(i, Prefix(i, i + 1, begins[i]))
            groups.append(group)
            i = group.last
        keys, first_keys = _level(batch, block_table, groups, begins, block_size)
        levels.append(Plan(keys, block_size, False, (left, -1), first_keys=first_keys, positions=where))
        for first, last, end in groups:
            begins[first:last] = [end] * (last - first)
    first_keys = _on_device(begins, batch)
    own_keys = replace(
        batch,
        seq_lens=batch.seq_lens - first_keys,
        block_table=_cut(block_table, begins, None, block_size),
        max_seq_len=max(0, batch.max_seq_len - min(begins, default=0)),
        num_keys=None,
    )
    levels.append(Plan(own_keys, block_size, True, (left, right), first_keys=first_keys))
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

    Arguments, results and errors are those of `refattn.cascade.attention`.

    Raises:
        NotImplementedError: if no kernel computes the combination, with the reason of each.
    """
    return dispatch.attend(query, Pages(key_cache, value_cache), plan, options, out, return_lse, CascadePlan)


find_prefixes = steps.find_prefixes


def _level(
    batch: Batch,
    block_table: Int32[Tensor, "b m"],
    groups: Sequence[Prefix],
    begins: Sequence[int],
    block_size: int,
) -> tuple[Batch, Int32[Tensor, "groups"]]:
    """Return the batch of a level's groups, with keys from `begins` to the groups' ends, and their first keys."""
    firsts = [group.first for group in groups]
    starts, ends = [begins[first] for first in firsts], [group.end for group in groups]
    lengths = [end - start for start, end in zip(starts, ends, strict=True)]
    edges = _on_device([*firsts, batch.num_seqs], batch)
    longest = max((last - first) * batch.max_query_len for first, last, _ in groups)
    keys = Batch(
        cu_seqlens_q=batch.cu_seqlens_q[edges],
        seq_lens=_on_device(lengths, batch),
        block_table=_cut(block_table[_on_device(firsts, batch)], starts, max(lengths), block_size),
        max_query_len=min(longest, LARGEST_INT32 if batch.num_tokens is None else batch.num_tokens),
        max_seq_len=max(lengths),
        num_keys=sum(lengths),
        num_tokens=batch.num_tokens,
    )
    return keys, _on_device(starts, batch)


def _cut(
    block_table: Int32[Tensor, "b m"], starts: Sequence[int], longest: int | None, block_size: int
) -> Int32[Tensor, "b columns"]:
    """Return the columns of each row from its first key on, for up to `longest` keys; the rest may hold anything."""
    m = block_table.shape[1]
    columns = m - min(starts, default=0) // block_size if longest is None else -(-longest // block_size)
    if not columns or not len(block_table):
        return block_table[:, :0]
    first = steps.to_device(torch.tensor(starts, device="cpu"), block_table.device)[:, None] // block_size
    used = first + torch.arange(columns, device=block_table.device)
    return block_table.gather(1, used.clamp(max=m - 1))


def _on_device(numbers: Sequence[int], batch: Batch) -> Int32[Tensor, "_"]:
    return steps.to_device(torch.tensor(numbers, dtype=torch.int32, device="cpu"), batch.device)


def _tree(prefixes: Sequence[Prefix]) -> list[tuple[int, int, Prefix]]:
    """Return (level, first key not in an enclosing prefix, prefix) of each prefix, outer ones first."""
    tree: list[tuple[int, int, Prefix]] = []
    above: list[Prefix] = []
    for prefix in sorted(prefixes, key=_outside_in):
        while above and not above[-1].encloses(prefix):
            above.pop()
        tree.append((len(above), above[-1].end if above else 0, prefix))
        above.append(prefix)
    return tree


def _outside_in(prefix: Prefix) -> tuple[int, int, int]:
    return prefix.first, -prefix.last, prefix.end
