"""Cascade attention: keys that sequences share are attended once, by the queries of all of them, and the parts merge.

Four sequences and their blocks; three share the first two blocks, and two of those a third one:

                  level 0     level 1     level 2, the last: what nobody shares
    a  7 3 5 9     ( 7 3       ( 5         9
    b  7 3 5 2 8   (           (           2 8          answer of b = merge(over 7 3, over 5, over 2 8)
    c  7 3 4       (                       4
    d  6 1                                 6 1          ( one group: its keys are read once

A level is a batch itself, whose "sequences" are groups of neighbouring sequences: the queries of a, b and c lie one
after the other, so they are the queries of one long sequence that has the keys of blocks 7 and 3.
"""

from collections.abc import Sequence
from itertools import pairwise
from math import ceil

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from refattn.attention import attend, compute_dtype
from refattn.batch import (
    Batch,
    Level,
    Machine,
    Prefix,
    check_block_table,
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
from refattn.kv_cache import gather
from refattn.masks import alibi, visible_keys
from refattn.merge import merge
from refattn.metadata import make_batch

# By these, `estimate_seconds` says what the decodes in docs/results took an H200, within a fifth.
H200 = Machine(
    workers=132,
    bytes_per_second=4.2e12,
    flops_per_second=7e14,
    launch_seconds=5e-6,
    tile_rows=128,
    tile_keys=64,
)
CPU = Machine(  # two cores with AVX-512, float32; a launch is a call of a path from Python
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

    The answer is that of `chunked_prefill.attention` on the same batch.

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

    Source: Juravsky et al. 2024, "Hydragen"; Ye et al. 2024, "Cascade Inference" (FlashInfer).
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
    compute = compute_dtype(query.dtype)
    visible, bias = _whole_picture(query, batch, window_size, alibi_slopes)

    outs, lses = [], []
    for level in levels:
        block_table = check_block_table(level.batch, block_size=key_cache.shape[1])
        out = query.new_zeros(*query.shape[:2], value_cache.shape[-1], dtype=compute)
        lse = query.new_full(query.shape[:2], -torch.inf, dtype=torch.promote_types(compute, torch.float32))
        groups = zip(level.batch.query_rows(), level.first_keys.tolist(), level.batch.seq_lens.tolist(), strict=True)
        for ((q0, q1), first_key, num_keys), blocks in zip(groups, block_table, strict=True):
            keys = slice(first_key, first_key + num_keys)
            out[q0:q1], lse[q0:q1] = attend(
                query[q0:q1].to(compute),
                gather(key_cache, blocks, num_keys),
                gather(value_cache, blocks, num_keys),
                visible[q0:q1, keys],
                softmax_scale=softmax_scale,
                softcap=softcap,
                bias=bias[:, q0:q1, keys],
                sinks=sinks if level is levels[-1] else None,  # counted once, where every query comes by
            )
        outs.append(out)
        lses.append(lse)

    out, lse = merge(outs, lses)
    out = out.to(query.dtype)
    return (out, lse) if return_lse else out


def find_prefixes(
    query_lens: Sequence[int],
    seq_lens: Sequence[int],
    block_tables: Sequence[Sequence[int]],
    *,
    block_size: int,
) -> list[Prefix]:
    """Find every prefix that a run of neighbouring sequences shares, as a tree: outer ones before what they enclose.

    Shared means the same blocks. Equal tokens in other blocks would have to be read again, so they do not count, and
    nor does a block that holds a query's own key or later ones. For the drawing above:

        Prefix(first=0, last=3, end=2 blocks), Prefix(first=0, last=2, end=3 blocks)

    Requests that share a prefix have to be neighbours to be found; sorting them by their block tables makes them so.

    Args:
        query_lens: new tokens of each request.
        seq_lens: tokens of each request, the new ones included.
        block_tables: pool blocks of each request, in order.
        block_size: tokens in a block, `p`.

    Returns:
        The prefixes; none where nobody shares.

    Raises:
        ValueError: if the arguments differ in length, a length is negative, or a request has too few blocks.
    """
    check_sizes(block_size=block_size)
    check_requests(query_lens, seq_lens, block_tables, block_size=block_size)
    num_seqs = len(seq_lens)
    full_blocks = [max(0, s - q) // block_size for q, s in zip(query_lens, seq_lens, strict=True)]  # before any query
    shared = []  # blocks that each sequence shares with the next one
    for i in range(num_seqs - 1):
        count = 0
        while count < min(full_blocks[i : i + 2]) and block_tables[i][count] == block_tables[i + 1][count]:
            count += 1
        shared.append(count)

    def split(first: int, last: int, above: int) -> list[Prefix]:
        if last - first < 2:
            return []
        count = min(shared[first : last - 1])
        found = [Prefix(first, last, count * block_size)] if count > above else []
        cuts = [first, *(i + 1 for i in range(first, last - 1) if shared[i] == count), last]
        for left, right in pairwise(cuts):
            found += split(left, right, count)
        return found

    return split(0, num_seqs, 0)


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
    """
    check_prefixes(prefixes, query_lens, seq_lens, block_tables, block_size=block_size)
    check_device(device)
    num_seqs = len(seq_lens)
    begins = [0] * num_seqs  # the first key of each sequence that no level has yet
    levels = []

    def add_level(ends: Sequence[Prefix]) -> None:
        batch = make_batch(
            [sum(query_lens[first:last]) for first, last, _ in ends],
            [end - begins[first] for first, _, end in ends],
            [block_tables[first][begins[first] // block_size : ceil(end / block_size)] for first, _, end in ends],
            device=device,
        )
        first_keys = torch.tensor([begins[first] for first, _, _ in ends], dtype=torch.int32, device=device)
        levels.append(Level(batch, first_keys))
        for first, last, end in ends:
            begins[first:last] = [end] * (last - first)

    waiting = list(prefixes)
    while waiting:
        outermost = sorted(p for p in waiting if not any(other.encloses(p) for other in waiting))
        waiting = [p for p in waiting if p not in outermost]
        members = {i for first, last, _ in outermost for i in range(first, last)}
        alone = [Prefix(i, i + 1, begins[i]) for i in range(num_seqs) if i not in members]  # no keys at this level
        add_level(sorted([*outermost, *alone]))
    add_level([Prefix(i, i + 1, seq_lens[i]) for i in range(num_seqs)])
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

    A launch cuts its work into tiles, `tile_rows` query rows times `tile_keys` keys of one key head, and deals them out
    to the workers. All workers do one tile each at the same time: a wave. A tile takes as long as its keys and values
    take to read or its two products to compute, whichever is longer, and every level is one more launch:

        seconds = sum over levels: launch_seconds + ceil(tiles / workers) * max(read, compute)

    The products are the same with and without a cascade. What it saves is reading (the shared keys once, not once a
    sequence) and empty rows (a tile with one query of one sequence takes as long as a full one); what it costs are the
    launches, and waves that are not full.

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

    Source: the waves are those of vLLM's `use_cascade_attention`.
    """
    check_requests(query_lens, seq_lens, None)
    check_tree(prefixes)
    check_machine(machine)
    check_sizes(num_heads=num_heads, num_kv_heads=num_kv_heads, head_size=head_size, element_size=element_size)
    per_worker = machine.workers / machine.bytes_per_second, machine.workers / machine.flops_per_second
    read = 2 * machine.tile_keys * head_size * element_size * per_worker[0]
    compute = 4 * machine.tile_rows * machine.tile_keys * head_size * per_worker[1]

    tiles: dict[int, int] = {}  # of each level

    def add_tiles(level: int, num_queries: int, num_keys: int) -> None:
        rows = num_queries * num_heads // num_kv_heads
        count = num_kv_heads * ceil(rows / machine.tile_rows) * ceil(num_keys / machine.tile_keys)
        tiles[level] = tiles.get(level, 0) + count

    for prefix in prefixes:
        above = [other for other in prefixes if other.encloses(prefix)]
        begin = max((other.end for other in above), default=0)
        add_tiles(len(above), sum(query_lens[prefix.first : prefix.last]), prefix.end - begin)
    for i, (query_len, seq_len) in enumerate(zip(query_lens, seq_lens, strict=True)):
        begin = max((prefix.end for prefix in prefixes if prefix.first <= i < prefix.last), default=0)
        add_tiles(-1, query_len, seq_len - begin)
    return sum(machine.launch_seconds + ceil(count / machine.workers) * max(read, compute) for count in tiles.values())


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
    """
    shape = dict(num_heads=num_heads, num_kv_heads=num_kv_heads, head_size=head_size, element_size=element_size)
    with_cascade = estimate_seconds(query_lens, seq_lens, prefixes, **shape, machine=machine)
    return with_cascade < estimate_seconds(query_lens, seq_lens, [], **shape, machine=machine)


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

    A block that two of many sequences share by chance would cost a level of its own. So the prefixes are ranked by the
    key reads that they save, and the best of all beginnings of that ranking is kept: all, some, or none.

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
    """
    check_tree(prefixes)
    shape = dict(num_heads=num_heads, num_kv_heads=num_kv_heads, head_size=head_size, element_size=element_size)

    def saved_reads(prefix: Prefix) -> int:
        begin = max((other.end for other in prefixes if other.encloses(prefix)), default=0)
        return (prefix.last - prefix.first - 1) * (prefix.end - begin)

    ranking = sorted(prefixes, key=saved_reads, reverse=True)
    choices = [ranking[:count] for count in range(len(ranking) + 1)]
    return min(choices, key=lambda chosen: estimate_seconds(query_lens, seq_lens, chosen, **shape, machine=machine))


def _whole_picture(
    query: Float[Tensor, "t h d"],
    batch: Batch,
    window_size: tuple[int, int],
    alibi_slopes: Float[Tensor, "h"] | None,
) -> tuple[Bool[Tensor, "t s"], Float[Tensor, "h t s"]]:
    """Draw who may see whom in all sequences, by absolute positions; each level attends to its columns of this."""
    t, h = query.shape[:2]
    visible = torch.zeros(t, batch.max_seq_len, dtype=torch.bool, device=query.device)
    compute = compute_dtype(query.dtype)
    bias = query.new_zeros(h, t, batch.max_seq_len, dtype=compute)
    for (q0, q1), seq_len in zip(batch.query_rows(), batch.seq_lens.tolist(), strict=True):
        visible[q0:q1, :seq_len] = visible_keys(
            q1 - q0, seq_len, causal=True, window_size=window_size, device=query.device
        )
        if alibi_slopes is not None:
            bias[:, q0:q1, :seq_len] = alibi(alibi_slopes, q1 - q0, seq_len, dtype=compute, device=query.device)
    return visible, bias
