"""Checks of functions that make tables: positions, slots, block tables, trees, selected keys."""

from dataclasses import replace
from random import Random

import torch
from torch import Tensor

from refattn.batch import Batch
from refattn.ranks import Shard
from twinattn.kit.search.exact import expect
from twinattn.kit.search.inputs import Modules, block_table, make_batch, slots_of, tables
from twinattn.kit.search.tensors import moved
from twinattn.kit.workload import Workload


def _on_device(work: Workload, device: str) -> tuple[list[list[int]], Batch, Batch]:
    owned, _ = tables(work)
    batch = make_batch(work, block_table(work, owned))
    return owned, batch, moved(batch, device)


def _places(work: Workload) -> list[int]:
    places = [s - q + k for q, s in work.lens for k in range(q)]
    return places + [0] * work.padding_rows


def positions(work: Workload, modules: Modules, device: str) -> None:
    """Check the position of each new token, 0 for padding."""
    _, _, batch = _on_device(work, device)
    places = _places(work)
    expect("positions", modules("metadata").positions(batch, len(places)), torch.tensor(places, dtype=torch.int64))


def _slots(work: Workload, owned: list[list[int]], window: int | None = None, later: int = 0) -> Tensor:
    """Return the slots of new tokens after `later` more steps, in each of which every sequence grows."""
    result, p = [], work.block_size
    for blocks, (q, s) in zip(owned, work.lens, strict=True):
        for place in range(s - q, s):
            now = place + later * q
            written = now >= 0 and (window is None or place > s - 1 - window)
            result.append(blocks[now // p] * p + now % p if written else -1)
    return torch.tensor(result + [-1] * work.padding_rows, dtype=torch.int64)


def slot_mapping(work: Workload, modules: Modules, device: str) -> None:
    """Check the slots of new tokens, with windows of several sizes."""
    owned, _, batch = _on_device(work, device)
    for window in (None, 1 + work.seed % 40, 2**31 - 1):
        expected = _slots(work, owned, window)
        came = modules("metadata").slot_mapping(batch, len(expected), block_size=work.block_size, window=window)
        expect(f"slots with window {window}", came, expected)


def advance(work: Workload, modules: Modules, device: str) -> None:
    """Check the lengths and slots of a step, and of the one after it."""
    longer = replace(work, lens=tuple((q, s + q) for q, s in work.lens))
    owned, _ = tables(longer)  # with room for one step more
    batch = moved(make_batch(work, block_table(work, owned)), device)
    slots = modules("metadata").slot_mapping(batch, len(_places(work)), block_size=work.block_size)
    expect("slots", slots, _slots(work, owned))
    after = modules("metadata").advance(batch, slots, block_size=work.block_size)
    expect("seq_lens", after.seq_lens, torch.tensor([s + q for q, s in work.lens], dtype=torch.int32))
    expect("slots after", slots, _slots(work, owned, later=1))


def from_slots(work: Workload, modules: Modules, device: str) -> None:
    """Check a block table that is read out of the slots of tokens."""
    owned, _ = tables(work)
    p, longest = work.block_size, max(s for _, s in work.lens)
    kind = torch.int32 if work.seed % 2 else torch.int64
    rows = Random(work.seed).sample(range(len(work.lens) + 3), len(work.lens))
    token_slots = torch.full((len(work.lens) + 3, longest + 4), -1, dtype=kind)
    for row, blocks, (_, s) in zip(rows, owned, work.lens, strict=True):
        token_slots[row, :s] = slots_of(work, blocks, s).to(kind)
    columns = min(max(map(len, owned), default=0) + work.seed % 3, -(-(longest + 4) // p))
    if not columns:
        return
    expected = torch.zeros(len(owned), columns, dtype=torch.int32)
    for i, blocks in enumerate(owned):
        expected[i, : len(blocks)] = torch.tensor(blocks, dtype=torch.int32)
    arguments = (token_slots, torch.tensor(rows), torch.tensor([s for _, s in work.lens], dtype=torch.int32))
    came = modules("metadata").block_table_from_slots(*(x.to(device) for x in arguments), block_size=p, columns=columns)
    expect("block_table", came, expected)


def ranks(work: Workload, modules: Modules, device: str) -> None:
    """Check the batch, the slots and the lengths of each rank of a shared sequence."""
    p, interleave = work.block_size, min(work.interleave, work.block_size)
    work = replace(work, lens=tuple((min(q, s), s) for q, s in work.lens))
    for rank in range(work.ranks):
        shard = Shard(rank, work.ranks, interleave)
        own = [[j for j in range(s) if j // interleave % work.ranks == rank] for _, s in work.lens]
        owned, _ = tables(work, [len(x) for x in own], salt=rank)
        batch = moved(make_batch(work, block_table(work, owned)), device)
        batch = replace(batch, max_seq_len=max(s for _, s in work.lens))
        expect(
            "local_lens",
            modules("context_parallel").local_lens(batch.seq_lens, shard),
            torch.tensor([len(x) for x in own], dtype=torch.int32),
        )
        slots = []
        for blocks, mine, (q, s) in zip(owned, own, work.lens, strict=True):
            place = {j: k for k, j in enumerate(mine)}
            for j in range(s - q, s):
                k = place.get(j)
                slots.append(-1 if k is None else blocks[k // p] * p + k % p)
        expected = torch.tensor(slots + [-1] * work.padding_rows, dtype=torch.int64)
        came = modules("context_parallel").slot_mapping(batch, len(expected), shard=shard, block_size=p)
        expect(f"slots of rank {rank}", came, expected)


def select(work: Workload, modules: Modules, device: str) -> None:
    """Select keys by rank: the number of keys with a higher score, or with an equal one at a lower position."""
    g, t, s = torch.Generator().manual_seed(work.seed), max(1, work.num_tokens % 40), max(s for _, s in work.lens)
    scores = torch.randn(t, s, generator=g)
    if work.seed % 2:
        scores = scores.mul(2).round()  # many are equal, and some are -0
    scores[torch.rand(t, s, generator=g) < (0.1, 0.5, 0.95)[work.seed % 3]] = -torch.inf
    if work.seed % 5 == 0:
        scores[torch.rand(t, s, generator=g) < 0.1] = torch.nan
    expected = torch.full((t, work.topk), -1, dtype=torch.int32)
    at = torch.arange(s)
    for row, numbers in enumerate(scores):
        rank = numbers.nan_to_num(torch.inf, posinf=torch.inf, neginf=-torch.inf)  # NaN is above all numbers
        before = (rank[None] > rank[:, None]) | ((rank[None] == rank[:, None]) & (at[None] < at[:, None]))
        taken = ((before.sum(1) < work.topk) & (rank != -torch.inf)).nonzero().flatten()
        expected[row, : len(taken)] = taken.int()
    came = modules("sparse").select(scores.to(device), work.topk)
    expect("selected", came, expected)


def slots_of_selected(work: Workload, modules: Modules, device: str) -> None:
    """Check the slots of selected positions, -1 for none."""
    owned, _, batch = _on_device(work, device)
    chosen, rows, expected, p = Random(work.seed), [], [], work.block_size
    for i, (q, s) in enumerate(work.lens):
        for _ in range(q):
            row = [chosen.randint(-1, s - 1) for _ in range(work.topk)]
            rows.append(row)
            expected.append([owned[i][j // p] * p + j % p if j >= 0 else -1 for j in row])
    rows += [[1_000_000] * work.topk] * work.padding_rows
    expected += [[-1] * work.topk] * work.padding_rows
    positions, slots = (torch.tensor(x, dtype=torch.int32).view(-1, work.topk) for x in (rows, expected))
    expect("slots", modules("sparse").slots(batch, positions.to(device), block_size=p), slots)


def accepted_slots(work: Workload, modules: Modules, device: str) -> None:
    """Check the slots that keep the states of accepted drafts."""
    chosen, columns = Random(work.seed), 1 + work.seed % 9
    rows = [[chosen.randint(-1, 99) for _ in range(columns)] for _ in work.lens]
    accepted = [chosen.randint(1, columns) if row[0] >= 0 else chosen.choice((-3, 0, 1 << 20)) for row in rows]
    expected = [row[number - 1] if row[0] >= 0 else row[0] for row, number in zip(rows, accepted, strict=True)]
    tables = (torch.tensor(x, dtype=torch.int32).to(device) for x in (rows, accepted))
    expect("slots", modules("state_cache").accepted_slots(*tables), torch.tensor(expected, dtype=torch.int32))


def trees(work: Workload, modules: Modules, device: str) -> None:
    """Check depths, ancestors and positions of drafted trees."""
    work = replace(work, trees=work.trees or "deep")
    _, _, batch = _on_device(work, device)
    trees = modules("speculative").make_trees([work.parents(i) for i in range(len(work.lens))], device=device)
    places: list[int] = []
    for i, (q, s) in enumerate(work.lens):
        depths: list[int] = []
        for parent in work.parents(i):
            depths.append(depths[parent] + 1 if parent >= 0 else 0)
        places += [s - len(depths) + depth for depth in depths[len(depths) - q :]]
    places += [0] * work.padding_rows
    came = modules("speculative").positions(batch, trees, len(places))
    expect("positions", came, torch.tensor(places, dtype=torch.int64))


def accept(work: Workload, modules: Modules, device: str) -> None:
    """Accept the longest branch that agrees; of equally long ones that with the lowest last node."""
    work, chosen = replace(work, trees=work.trees or "deep", growing=0), Random(work.seed)
    _, _, batch = _on_device(work, device)
    trees = modules("speculative").make_trees([work.parents(i) for i in range(len(work.lens))], device=device)
    rows = sum(q for q, _ in work.lens) + work.padding_rows
    drafts, says = ([chosen.randint(0, 1 + work.seed % 3) for _ in range(rows)] for _ in range(2))
    nodes, counts, following, row = [], [], [], 0
    width = max(q for q, _ in work.lens)
    for i, (q, _) in enumerate(work.lens):
        parents = work.parents(i)
        paths: list[list[int]] = []
        for node, parent in enumerate(parents):
            right = parent < 0 or (paths[parent] and drafts[row + node] == says[row + parent])
            paths.append(([*paths[parent]] if parent >= 0 else []) + [node] if right else [])
        best: list[int] = []
        for path in paths:
            best = path if len(path) > len(best) else best
        nodes.append(best + [-1] * (width - len(best)))
        counts.append(len(best))
        following.append(says[row + best[-1]] if best else -1)
        row += q
    came = modules("speculative").accept(
        batch,
        trees,
        torch.tensor(drafts, dtype=torch.int64, device=device),
        torch.tensor(says, dtype=torch.int64, device=device),
    )
    expect("nodes", came.nodes, torch.tensor(nodes, dtype=torch.int32).view(len(nodes), width))
    expect("lens", came.lens, torch.tensor(counts, dtype=torch.int32))
    expect("next_tokens", came.next_tokens, torch.tensor(following, dtype=torch.int64))
