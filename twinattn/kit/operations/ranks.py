"""Context parallelism: each rank is called with its share of the keys, and the outputs of all ranks are compared."""

from typing import Any

import torch
from torch import Tensor

from refattn import context_parallel
from refattn.options import AttentionOptions
from refattn.ranks import Group, Shard, simulate_ranks
from twinattn.kit.example import Arguments
from twinattn.kit.operations.inputs import BATCH, LENS, Drawn, batch_of, padding_of, rows_of, unused
from twinattn.kit.operations.operation import (
    Answers,
    Case,
    Inputs,
    Mistake,
    Operation,
    OperationKernel,
    Special,
    Without,
    named,
)
from twinattn.kit.operations.scores import PADDING, expanded, softmax, visible, with_sinks
from twinattn.kit.operations.tiles import BLOCKS, Dimension, of_lengths, of_size


def draw_ranks(case: Case, dtype: torch.dtype) -> Inputs:
    """Draw whole sequences, and per rank its query heads, a pool with its share of the context, and a block table."""
    drawn, p, ranks = Drawn(case, dtype), case["block_size"], case["ranks"]
    lens, run = case["lens"], min(case["interleave"], p)
    a, d = drawn.lengths(lens), case["head_size"]
    h, hk = case["heads"][0] * ranks, case["heads"][1] * (ranks if case["heads"][1] > 1 else 1)
    hk = 2 if case["few_heads"] else hk
    t = int(a["cu_seqlens_q"][-1]) + case["padding"]
    query, key, value = drawn.normal(t, h, d), drawn.normal(t, hk, d), drawn.normal(t, hk, d)
    context = [(drawn.normal(s - q, hk, d), drawn.normal(s - q, hk, d)) for q, s in lens]
    own = [[[j for j in range(s - q) if j // run % ranks == rank] for q, s in lens] for rank in range(ranks)]
    whole = [[sum(j // run % ranks == rank for j in range(s)) for _, s in lens] for rank in range(ranks)]
    unread: dict[str, Tensor] = {}
    lists: dict[str, list[Any]] = {name: [] for name in ("key_cache", "value_cache", "block_table")}
    for rank in range(ranks):
        table, past, n = drawn.table(whole[rank], p)
        pools = [drawn.normal(n, p, hk, d) for _ in range(2)]
        for i, places in enumerate(own[rank]):
            for at, j in enumerate(places):
                for pool, x in zip(pools, context[i], strict=True):
                    pool[table["block_table"][i, at // p].long(), at % p] = x[j]
        free = unused(table["block_table"], [len(x) for x in own[rank]], n, p)
        for name, x in zip(lists, (*pools, table["block_table"]), strict=True):
            lists[name].append(x)
            unread[f"{name}[{rank}]"] = past["block_table"] if name == "block_table" else expanded(free, x)
    a |= dict(query=list(query.chunk(ranks, dim=1)), key=key, value=value, **lists)
    a |= dict(sinks=list(drawn.normal(h, dtype=torch.float32).chunk(ranks)) if case["sinks"] else None)
    a |= dict(ranks=ranks, interleave=run, window_size=case["window_size"], return_lse=True)
    a |= dict(softmax_scale=d**-0.5 if case["softmax_scale"] is None else case["softmax_scale"])
    padding = {name: padding_of(a, a[name]) for name in ("key", "value")}
    padding |= {f"query[{rank}]": padding_of(a, x) for rank, x in enumerate(a["query"])}
    return Inputs(a, unread | padding)


def over_ranks(a: Arguments, compute: torch.dtype, form: str = "right") -> Answers:
    """Return attention with all heads over all tokens at once."""
    query = torch.cat(a["query"], dim=1).to(compute)
    h, left = query.shape[1], a["window_size"][0]
    out, lse = query.new_zeros(*query.shape), query.new_full(query.shape[:2], -torch.inf)
    for i, (q0, q1, s) in enumerate(rows_of(a)):
        pairs = []
        for name in ("key", "value"):
            pools, new = a[f"{name}_cache"], a[name][q0:q1]
            tokens = [_on_rank(a, pools, i, j) for j in range(s - q1 + q0)]
            whole = torch.stack([*tokens, *new]) if s else new
            pairs.append(whole.to(compute).repeat_interleave(h // new.shape[1], dim=1).transpose(0, 1))
        key, value = pairs
        scores = query[q0:q1].transpose(0, 1) @ key.transpose(1, 2) * a["softmax_scale"]
        mask = visible(q1 - q0, s)
        if left >= 0:
            mask = mask & (torch.arange(s) >= torch.arange(s - q1 + q0, s)[:, None] - left)
        if form == "first rank":
            mask = mask & ((torch.arange(s) // a["interleave"] % a["ranks"] == 0) | (torch.arange(s) >= s - q1 + q0))
        out[q0:q1], lse[q0:q1] = softmax(scores, mask, value)
    if a["sinks"] is not None:
        times = a["ranks"] if form == "sinks per rank" else 1
        sunk = with_sinks(dict(out=out, lse=lse, sinks=torch.cat(a["sinks"]).to(compute)), compute, times)
        out, lse = sunk["out"].to(compute), sunk["lse"].to(compute)
        lse[int(a["cu_seqlens_q"][-1]) :] = -torch.inf
    return dict(out=out, lse=lse)


def _on_rank(a: Arguments, pools: list[Tensor], i: int, j: int) -> Tensor:
    """Return the token at position `j` of sequence `i` from the pool of its rank."""
    run, ranks, p = a["interleave"], a["ranks"], pools[0].shape[1]
    rank, at = j // run % ranks, j // (run * ranks) * run + j % run
    return pools[rank][a["block_table"][rank][i, at // p].long(), at % p]


def on_each_rank(kernel: OperationKernel, a: Arguments) -> Any:
    """Call the function once per rank, and concatenate the heads of all ranks."""

    def call(group: Group) -> tuple[Tensor, ...]:
        rank = group.rank
        mine = {x: y[rank] if isinstance(y, list) else y for x, y in a.items()}
        mine |= dict(group=group, rank=rank, shard=Shard(rank, a["ranks"], a["interleave"]))
        came = named(kernel.function(**kernel.asked(mine)), ("out", "lse"), frozenset({"lse"}))
        return tuple(came.values())

    parts = simulate_ranks(a["ranks"], call)
    return tuple(torch.cat(list(x), dim=1) for x in zip(*parts, strict=True))


def rank_plan(a: Arguments) -> Any:
    """Return the plan of a rank."""
    more = dict(shard=a["shard"], block_size=a["key_cache"].shape[1], window_size=a["window_size"])
    return context_parallel.plan(batch_of(a), **more)


CONTEXT_PARALLEL = Operation(
    name="context_parallel",
    function="attention",
    signature="called once per rank: `query` `[t, h of the rank, d]`, `key`, `value` `[t, hk, d]` of the new "
    "tokens, `key_cache`, "
    "`value_cache`, `block_table` of the rank's share, `cu_seqlens_q`, `seq_lens` and the like, `rank`, "
    "`ranks`, `interleave` or "
    "`shard`; `group`, with `all_gather` and `reduce_scatter`; `softmax_scale`, `window_size`, `sinks`, `return_lse`",
    draw=draw_ranks,
    oracle=over_ranks,
    sizes=dict(
        lens=LENS,
        block_size=(4, 1, 16),
        heads=((2, 1), (1, 1), (2, 2), (12, 2), (5, 1), (10, 2)),
        head_size=(16, 8),
        ranks=(2, 1, 3),
        interleave=(1, 2, 16),
        few_heads=(False,),
        softmax_scale=(0.21, None),
        sinks=(False, True),
        window_size=((-1, -1), (3, -1), (0, -1), (5, -1), (11, -1)),
        padding=(0, 2),
    ),
    dimensions=of_lengths(1025, 129, 65, head_size=8, ranks=2)
    | dict(block_size=of_size("block_size", BLOCKS), padding=of_size("padding", 513))
    | dict(heads=Dimension(lambda n: dict(heads=(n, 1)), 65), head_size=of_size("head_size", 257))
    | dict(ranks=Dimension(lambda n: dict(ranks=8), 64), interleave=of_size("interleave", BLOCKS, block_size=BLOCKS)),
    without=dict(interleave=Without(1, ("interleave",)), softmax_scale=Without(None, ("softmax_scale",))),
    options=dict(sinks=False, window_size=(-1, -1)),
    specials=(
        Special(
            "empty",
            "A rank may have no key, and a sequence no query.",
            dict(lens=((), ((1, 2), (0, 0)), ((1, 1),), ((0, 7), (2, 3)))),
        ),
        PADDING,
        Special(
            "few KV heads",
            "There may be fewer KV heads than ranks, and more than one.",
            dict(few_heads=(True,), ranks=(4, 8), heads=((1, 1), (2, 1))),
        ),
        Special("long", "There may be many keys, which kernels split.", dict(lens=(((1, 300), (2, 65)),))),
    ),
    derived={
        **BATCH,
        "plan": rank_plan,
        "block_size": lambda a: a["key_cache"].shape[1],
        "options": lambda a: AttentionOptions(softmax_scale=a["softmax_scale"], sinks=a["sinks"]),
        "shard": lambda a: Shard(0, a["ranks"], a["interleave"]),
        **{word: lambda a: None for word in ("group", "rank")},
    },
    outputs=("out", "lse"),
    optional=frozenset({"lse"}),
    types=dict(out="query"),
    strided=("query", "key", "value", "key_cache", "value_cache", "sinks"),
    pools=("key_cache", "value_cache"),
    invoke=on_each_rank,
    size=lambda a: 8.0,
    mistakes=(
        Mistake(
            "first-rank-alone", "The contexts of other ranks do not count.", lambda a, c: over_ranks(a, c, "first rank")
        ),
        Mistake("sinks-per-rank", "Sinks count once per rank.", lambda a, c: over_ranks(a, c, "sinks per rank")),
    ),
)


OPERATIONS = (CONTEXT_PARALLEL,)
