"""Cascade attention: a level is a batch of its own for a paged kernel; the twin of `refattn.cascade`.

Any kernel computes it: the shared levels without a causal mask, as every query is past every key there, and the last
level as ever. Our Triton kernel reduces the parts of all levels at once; the answers of another are merged.

The sequences of a group need not be of one length, so the query rows of a shared level do not stand at the end of its
keys. Where ALiBi or a window depends on where they stand, the kernel gets their positions, and one that cannot take
them refuses.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from jaxtyping import Float, Int32, Int64
from torch import Tensor

from fastattn import kernels
from fastattn.kernels import Options
from fastattn.merge import merge
from fastattn.metadata import make_batch, positions
from refattn.batch import (
    Batch,
    Level,
    Machine,
    Prefix,
    check_device,
    check_levels,
    check_machine,
    check_options,
    check_paged,
    check_prefixes,
    check_requests,
    check_sizes,
    check_tree,
)

# Measured; `refattn.cascade` says how.
H200 = Machine(
    workers=132,
    bytes_per_second=4.2e12,
    flops_per_second=7e14,
    launch_seconds=5e-6,
    tile_rows=128,
    tile_keys=64,
)
CPU = Machine(
    workers=2,
    bytes_per_second=1.1e10,
    flops_per_second=1.2e11,
    launch_seconds=2.5e-4,
    tile_rows=16,
    tile_keys=16,
)


def attention(
    query: Float[Tensor, "t h d"],
    key_cache: Float[Tensor, "n p hk d"],
    value_cache: Float[Tensor, "n p hk dv"],
    batch: Batch,
    *,
    levels: Sequence[Level],
    window_size: tuple[int, int] = (-1, -1),
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    alibi_slopes: Float[Tensor, "h"] | None = None,
    sinks: Float[Tensor, "h"] | None = None,
    return_lse: bool = False,
) -> Float[Tensor, "t h dv"] | tuple[Float[Tensor, "t h dv"], Float[Tensor, "t h"]]:
    """Attend causally from the new tokens of each sequence to all its tokens in the cache, level by level.

    Args:
        query: new tokens of all sequences, one after the other; rows behind the last sequence are padding.
        key_cache: the pool of keys; any strides.
        value_cache: the pool of values.
        batch: the lengths and the block table, as without a cascade.
        levels: who shares which keys, from `make_levels`; the last level holds what nobody shares.
        window_size: `(left, right)` in tokens, both inclusive, -1 for no limit.
        softmax_scale: factor on the dot products; `d ** -0.5` if None.
        softcap: bound on the scores; 0 for none.
        alibi_slopes: slope of each head for the bias `-slope * abs(query position - key position)`.
        sinks: one extra logit a head in the denominator, counted once.
        return_lse: also return the log-sum-exp.

    Returns:
        The outputs; with `return_lse` also the natural log-sum-exp (float32, sinks included). A padding row and a query
        that sees nothing answer 0 and `-inf` (the sink, if there is one, for a query that sees nothing).

    Raises:
        ValueError: naming the argument that does not fit.
        NotImplementedError: if no kernel computes the combination, with the reason of each.

    Source: `refattn.cascade.attention`.
    """
    check_paged(query, key_cache, value_cache, batch)
    check_options(
        query,
        window_size=window_size,
        softmax_scale=softmax_scale,
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        sinks=sinks,
        return_lse=return_lse,
    )
    check_levels(batch, levels, block_size=key_cache.shape[1], num_blocks=key_cache.shape[0])
    *shared, own = levels
    last = Options(
        window_size=window_size,
        softmax_scale=softmax_scale,
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        sinks=sinks,  # counted once, with the part that every query has
    )
    # Every query of a group is past the keys of a shared level: no causal mask, and no right side of a window.
    left = window_size[0] if window_size[0] < batch.max_seq_len - 1 else -1
    before = replace(last, causal=False, window_size=(left, -1), sinks=None)
    work = [(level.batch, before) for level in shared]
    if shared and (left >= 0 or alibi_slopes is not None):
        places = positions(batch, query.shape[0])
        work = [(level.batch, replace(before, positions=_positions_in(level, places))) for level in shared]
    parts = kernels.levels(query, key_cache, value_cache, [*work, (own.batch, last)])
    out, lse = merge(*zip(*parts, strict=True)) if len(parts) > 1 else parts[0]
    return (out, lse) if return_lse else out


def find_prefixes(
    query_lens: Sequence[int],
    seq_lens: Sequence[int],
    block_tables: Sequence[Sequence[int]],
    *,
    block_size: int,
) -> list[Prefix]:
    """Find every prefix that a run of neighbouring sequences shares, as a tree: outer ones before what they enclose.

    Args:
        query_lens: new tokens of each request.
        seq_lens: tokens of each request, the new ones included.
        block_tables: pool blocks of each request, in order.
        block_size: tokens in a block, `p`.

    Returns:
        The prefixes; none where nobody shares.

    Raises:
        ValueError: if the arguments differ in length, a length is negative, or a request has too few blocks.

    Source: `refattn.cascade.find_prefixes`; one pass over the neighbours, as over the LCP array of a suffix tree.
    """
    check_sizes(block_size=block_size)
    check_requests(query_lens, seq_lens, block_tables, block_size=block_size)
    full_blocks = [max(0, s - q) // block_size for q, s in zip(query_lens, seq_lens, strict=True)]
    found: list[Prefix] = []
    growing: list[tuple[int, int]] = []  # prefixes that the next sequence may share too: blocks, first sequence
    for i in range(len(seq_lens)):
        count = 0
        if i + 1 < len(seq_lens):
            count = _common_length(block_tables[i], block_tables[i + 1], min(full_blocks[i], full_blocks[i + 1]))
        first = i
        while growing and growing[-1][0] > count:
            blocks, first = growing.pop()
            found.append(Prefix(first, i + 1, blocks * block_size))
        if count and (not growing or growing[-1][0] < count):
            growing.append((count, first))
    return sorted(found, key=_outside_in)


def make_levels(
    query_lens: Sequence[int],
    seq_lens: Sequence[int],
    block_tables: Sequence[Sequence[int]],
    prefixes: Sequence[Prefix],
    *,
    block_size: int,
    device: torch.device | str = "cpu",
) -> list[Level]:
    """Build the levels of a cascade: the outermost prefixes, then those inside them, and at last what nobody shares.

    Args:
        query_lens: new tokens of each request.
        seq_lens: tokens of each request, the new ones included.
        block_tables: pool blocks of each request, in order.
        prefixes: any of those that `find_prefixes` found, in any order; none gives the last level alone.
        block_size: tokens in a block, `p`.
        device: where the tensors of the levels are to be.

    Returns:
        The levels, for every layer of this step.

    Raises:
        ValueError: if a prefix is no multiple of the block size, reaches into the queries of one of its sequences, is
            not in the same blocks for all of them, or overlaps another without being nested with it.

    Source: `refattn.cascade.make_levels`.
    """
    check_prefixes(prefixes, query_lens, seq_lens, block_tables, block_size=block_size)
    check_device(device)
    begins, tree = [0] * len(seq_lens), _tree(prefixes)
    levels = []
    for depth in range(max((depth for depth, _, _ in tree), default=-1) + 2):
        owners = {prefix.first: prefix for level, _, prefix in tree if level == depth}
        own = not owners  # the last level: what nobody shares
        groups, i = [], 0
        while i < len(seq_lens):
            group = owners.get(i, Prefix(i, i + 1, seq_lens[i] if own else begins[i]))
            groups.append(group)
            i = group.last
        batch = make_batch(
            [sum(query_lens[first:last]) for first, last, _ in groups],
            [end - begins[first] for first, _, end in groups],
            [block_tables[first][begins[first] // block_size : -(-end // block_size)] for first, _, end in groups],
            device=device,
        )
        first_keys = torch.tensor([begins[first] for first, _, _ in groups], dtype=torch.int32).to(device)
        levels.append(Level(batch, first_keys))
        for first, last, end in groups:
            begins[first:last] = [end] * (last - first)
    return levels


def estimate_seconds(
    query_lens: Sequence[int],
    seq_lens: Sequence[int],
    prefixes: Sequence[Prefix],
    *,
    num_heads: int,
    num_kv_heads: int,
    head_size: int,
    element_size: int,
    machine: Machine,
) -> float:
    """Estimate how long a cascade over some prefixes takes; without prefixes, how long attention takes.

    Args:
        query_lens: new tokens of each request.
        seq_lens: tokens of each request, the new ones included.
        prefixes: what is shared.
        num_heads: query heads, `h`.
        num_kv_heads: key heads, `hk`.
        head_size: elements of a key and of a value, `d`.
        element_size: bytes of an element.
        machine: the hardware, for example `H200` or `CPU` of this module.

    Returns:
        The estimate in seconds.

    Raises:
        ValueError: if the arguments differ in length, or a size is not positive.

    Source: `refattn.cascade.estimate_seconds`.
    """
    check_requests(query_lens, seq_lens, None)
    check_tree(prefixes)
    check_machine(machine)
    check_sizes(num_heads=num_heads, num_kv_heads=num_kv_heads, head_size=head_size, element_size=element_size)
    begins, tree = [0] * len(seq_lens), _tree(prefixes)
    work = []  # level, queries, keys; level -1 is what nobody shares
    for level, begin, prefix in tree:
        work.append((level, sum(query_lens[prefix.first : prefix.last]), prefix.end - begin))
        begins[prefix.first : prefix.last] = [prefix.end] * (prefix.last - prefix.first)
    work += [(-1, q, s - begin) for q, s, begin in zip(query_lens, seq_lens, begins, strict=True)]
    tiles: dict[int, int] = {}
    for level, num_queries, num_keys in work:
        rows = num_queries * num_heads // num_kv_heads
        count = num_kv_heads * -(-rows // machine.tile_rows) * -(-num_keys // machine.tile_keys)
        tiles[level] = tiles.get(level, 0) + count
    seconds_per_tile = machine.workers * max(
        2 * machine.tile_keys * head_size * element_size / machine.bytes_per_second,
        4 * machine.tile_rows * machine.tile_keys * head_size / machine.flops_per_second,
    )
    waves = sum(-(-count // machine.workers) for count in tiles.values())
    return len(tiles) * machine.launch_seconds + waves * seconds_per_tile


def should_use_cascade(
    query_lens: Sequence[int],
    seq_lens: Sequence[int],
    prefixes: Sequence[Prefix],
    *,
    num_heads: int,
    num_kv_heads: int,
    head_size: int,
    element_size: int,
    machine: Machine,
) -> bool:
    """Say whether a cascade over these prefixes is faster than attention without one, by `estimate_seconds`.

    Args:
        query_lens: new tokens of each request.
        seq_lens: tokens of each request, the new ones included.
        prefixes: what is shared.
        num_heads: query heads, `h`.
        num_kv_heads: key heads, `hk`.
        head_size: elements of a key and of a value, `d`.
        element_size: bytes of an element.
        machine: the hardware, for example `H200` or `CPU` of this module.

    Raises:
        ValueError: if the arguments differ in length, or a size is not positive.

    Source: `refattn.cascade.should_use_cascade`.
    """
    shape = dict(num_heads=num_heads, num_kv_heads=num_kv_heads, head_size=head_size, element_size=element_size)
    without, with_cascade = (
        estimate_seconds(query_lens, seq_lens, chosen, **shape, machine=machine) for chosen in ([], prefixes)
    )
    return with_cascade < without


def worthwhile_prefixes(
    query_lens: Sequence[int],
    seq_lens: Sequence[int],
    prefixes: Sequence[Prefix],
    *,
    num_heads: int,
    num_kv_heads: int,
    head_size: int,
    element_size: int,
    machine: Machine,
) -> list[Prefix]:
    """Leave out of a tree of prefixes what costs more than it saves, by `estimate_seconds`.

    Args:
        query_lens: new tokens of each request.
        seq_lens: tokens of each request, the new ones included.
        prefixes: what is shared, from `find_prefixes`.
        num_heads: query heads, `h`.
        num_kv_heads: key heads, `hk`.
        head_size: elements of a key and of a value, `d`.
        element_size: bytes of an element.
        machine: the hardware, for example `H200` or `CPU` of this module.

    Returns:
        The prefixes to keep, those first that save most; none where no cascade is worth it.

    Raises:
        ValueError: if the arguments differ in length, or a size is not positive.

    Source: `refattn.cascade.worthwhile_prefixes`.
    """
    shape = dict(num_heads=num_heads, num_kv_heads=num_kv_heads, head_size=head_size, element_size=element_size)
    check_tree(prefixes)
    begins = {prefix: begin for _, begin, prefix in _tree(prefixes)}
    ranking = sorted(prefixes, key=lambda x: (x.last - x.first - 1) * (x.end - begins[x]), reverse=True)
    best, best_seconds = 0, float("inf")
    for count in range(len(ranking) + 1):
        seconds = estimate_seconds(query_lens, seq_lens, ranking[:count], **shape, machine=machine)
        if seconds < best_seconds:
            best, best_seconds = count, seconds
    return ranking[:best]


def _positions_in(level: Level, places: Int64[Tensor, "t"]) -> Int32[Tensor, "t"]:
    """Return the position of each query row, counted from the first key that its group has at a level."""
    if level.batch.num_seqs:
        rows = torch.arange(len(places), device=places.device)
        group = torch.searchsorted(level.batch.cu_seqlens_q[1:], rows, right=True).clamp(max=level.batch.num_seqs - 1)
        places = places - level.first_keys[group]
    return places.int()


def _common_length(blocks: Sequence[int], others: Sequence[int], limit: int) -> int:
    """Give how many of the first `limit` blocks are the same: by bisection, as whole slices compare fastest."""
    low, high = 0, limit
    while low < high:
        middle = (low + high + 1) // 2
        if blocks[low:middle] == others[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _tree(prefixes: Sequence[Prefix]) -> list[tuple[int, int, Prefix]]:
    """Give each prefix with its level and its first key that no other encloses, outer ones before what they enclose."""
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
