"""Selected keys over ranks: positions are of the whole sequence, and a rank's block table is of its own keys.

Context parallelism takes no list of keys. Whoever selects attends on each rank to those that the rank has, by their
indices there, and merges.
"""

import inspect
import random

import pytest
import torch

import fastattn
import fastattn.context_parallel
import fastattn.sparse
import refattn
import refattn.context_parallel
import refattn.sparse
from refattn import merge, metadata
from refattn.ranks import Shard, simulate_ranks

PACKAGES = {"refattn": refattn, "fastattn": fastattn}
LENS, PAGE, TOPK = [(3, 30), (1, 1), (2, 19)], 4, 6
each_package = pytest.mark.parametrize("package", PACKAGES.values(), ids=PACKAGES)


def of_rank(path, shard, keys):
    """Return a rank's batch, with the keys of each sequence at their indices there, and its pool."""
    own = [path.own_positions(len(key), shard) for key in keys]
    tables, pool = [], torch.full((32, PAGE, 2, 16), torch.nan, dtype=torch.float64)
    for place, key in zip(own, keys, strict=True):
        first = sum(map(len, tables))
        tables.append(list(range(first, first + -(-len(place) // PAGE))))
        for k, j in enumerate(place.tolist()):
            pool[tables[-1][k // PAGE], k % PAGE] = key[j]
    return metadata.make_batch([q for q, _ in LENS], [len(place) for place in own], tables), pool


def drawn():
    """Draw queries, the keys of each sequence, and the positions that were selected of the whole."""
    torch.manual_seed(0)
    choose = random.Random(0)
    query = torch.randn(sum(q for q, _ in LENS), 4, 16, dtype=torch.float64)
    keys = [torch.randn(s, 2, 16, dtype=torch.float64) for _, s in LENS]
    rows = [choose.sample(range(s), min(s, TOPK)) for q, s in LENS for _ in range(q)]
    return query, keys, torch.tensor([row + [-1] * (TOPK - len(row)) for row in rows], dtype=torch.int32)


def at_home(path, positions, shard):
    """Return the indices on a rank of selected positions, and -1 for those of other ranks."""
    there = positions.clamp(min=0) // shard.interleave % shard.num_ranks == shard.rank
    index = path.local_lens(positions.clamp(min=0).flatten(), shard).view_as(positions)
    return torch.where(there & (positions >= 0), index, -1)


def over_all(package, query, keys, lists_of, num_ranks, interleave):
    """Attend on each rank to what its lists say, and merge."""
    parts = []
    for rank in range(num_ranks):
        shard = Shard(rank, num_ranks, interleave)
        batch, pool = of_rank(package.context_parallel, shard, keys)
        plan = package.sparse.plan(batch, positions=lists_of(shard), block_size=PAGE)
        parts.append(package.sparse.attention(query, pool, pool, plan, return_lse=True))
    return merge.merge(*zip(*parts, strict=True))


@each_package
@pytest.mark.parametrize(("num_ranks", "interleave"), [(2, 1), (2, 4), (3, 2)])
def test_selected_keys_by_their_indices_on_the_ranks_are_those_of_the_whole(package, num_ranks, interleave):
    query, keys, positions = drawn()
    whole = over_all(package, query, keys, lambda _: positions, 1, 1)
    path = package.context_parallel
    ranks = over_all(package, query, keys, lambda shard: at_home(path, positions, shard), num_ranks, interleave)
    for found, expected in zip(ranks, whole, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


@each_package
def test_positions_of_the_whole_are_other_keys_of_a_rank_or_none_that_it_has(package):
    """What servers did: a position that the rank's table has is taken, and nothing tells; one past it is named."""
    query, keys, positions = drawn()
    with pytest.raises(ValueError, match="positions: expected 0..14, or -1 for none, of query row 0, got 27"):
        over_all(package, query, keys, lambda _: positions, 2, 1)
    positions = torch.where(positions < 9, positions, -1)  # among those of the first rank and of the second
    positions[3] = -1  # the sequence of this row has one key
    whole, _ = over_all(package, query, keys, lambda _: positions, 1, 1)
    ranks, _ = over_all(package, query, keys, lambda _: positions, 2, 1)
    assert (ranks - whole).abs().max() > 1


@each_package
@pytest.mark.usefixtures("shapes_unchecked")
def test_context_parallelism_takes_no_selected_keys(package):
    """Neither where it plans, nor where it attends: a plan of selected keys is refused by name."""
    path = package.context_parallel
    assert "positions" not in inspect.signature(path.plan).parameters
    batch, pool = of_rank(path, Shard(0, 2), drawn()[1])
    plan = package.sparse.plan(batch, positions=torch.zeros(6, 1, dtype=torch.int32), block_size=PAGE)
    rows = [torch.zeros(6, h, 16, dtype=torch.float64) for h in (1, 2, 2)]
    with pytest.raises(ValueError, match="plan: expected a ContextParallelPlan, got refattn.plan.Plan"):
        path.attention(*rows, pool, pool, plan, group=simulate_ranks(2, lambda group: group)[0])
