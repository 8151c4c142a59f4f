"""The tensors of a workload: batches and tables, pools and rows with poison and any strides, and the call itself.

All numbers are drawn on the CPU, so that they are the same on every device. The oracle reads the same tensors, by slot.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from random import Random
from typing import Any

import torch
from torch import Tensor

from refattn.batch import Batch, Prefix
from twinattn.kit.cases import FINITE_POISON, POISON, poisoned
from twinattn.kit.oracle import Answer, attend, sight
from twinattn.kit.search.tensors import laid
from twinattn.kit.workload import LARGEST, Workload

Modules = Callable[[str], Any]  # from a path's name to its module, of either twin
FP8 = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
SPARE = 3  # unused columns of a pool of latents
LAMBDA, LAMBDA_INIT, NORM_EPS = 0.35, 0.8, 1e-5


@dataclass
class Call:
    """A call of a path: its tensors on the CPU, its plan, and the oracle's output.

    Attributes:
        tensors: everything that is moved to a device, by name.
        numbers: the names of tensors in the type of the query, which may be changed.
        plan: makes the plan from the modules of a twin and the tensors.
        run: makes the call from these and the plan; it takes `return_lse` and `out`.
        expected: returns the oracle's output.
        out_shape: of the output.
        answers: the names of the two returned tensors; the second need not be an LSE.
        takes_out: whether it takes memory for the output.
    """

    tensors: dict[str, Any]
    numbers: tuple[str, ...]
    plan: Callable[[Modules, dict[str, Any]], Any]
    run: Callable[..., Any]
    expected: Callable[[], Answer]
    out_shape: tuple[int, ...] = ()
    options: dict[str, Any] = field(default_factory=dict)
    answers: tuple[str, str] = ("out", "lse")
    takes_out: bool = True


# --- batches and tables ---


def tables(work: Workload, lens: Sequence[int] | None = None, salt: int = 0) -> tuple[list[list[int]], int]:
    """Return the shuffled blocks of every sequence, shared where there are prefixes, and the size of the pool."""
    shuffle, p = Random(f"{work.seed}/blocks/{salt}"), work.block_size
    needed = [-(-s // p) for s in (lens if lens is not None else [s for _, s in work.lens])]
    free = list(range(sum(needed) + 3))
    shuffle.shuffle(free)
    owned = [[free.pop() for _ in range(count)] for count in needed]
    for first, last, blocks in work.prefixes:
        for i in range(first + 1, last):
            owned[i][:blocks] = owned[first][:blocks]
    return owned, sum(needed) + 3


def block_table(work: Workload, owned: list[list[int]], salt: int = 0) -> Tensor:
    """Return the block table in the layout of the workload, with garbage past each sequence's last block."""
    garbage = Random(f"{work.seed}/garbage/{salt}")
    columns = max(map(len, owned), default=0) + (0 if work.table == "tight" else 2)
    rows = [
        blocks + [garbage.choice((-1, 1_000_000, LARGEST, -LARGEST)) for _ in range(columns - len(blocks))]
        for blocks in owned
    ]
    table = torch.tensor(rows, dtype=torch.int32).view(len(owned), columns)
    if work.table == "every-other":
        wide = torch.full((len(owned), 2 * columns), LARGEST, dtype=torch.int32)
        wide[:, ::2] = table
        return wide[:, ::2]
    return table.T.contiguous().T if work.table == "transposed" else table


def make_batch(work: Workload, table: Tensor | None) -> Batch:
    """Return the batch of a workload with a block table."""
    query_lens, seq_lens = zip(*work.lens, strict=True)
    edges = torch.tensor([0, *query_lens]).cumsum(0)
    room = LARGEST if table is None else max(max(seq_lens), table.shape[1] * work.block_size)
    return Batch(
        edges.int(),
        torch.tensor(seq_lens, dtype=torch.int32),
        table,
        max_query_len=max(query_lens) + work.more_queries,
        max_seq_len=min(room, max(seq_lens) + work.more_keys),
        num_keys=sum(seq_lens) if work.says_num_keys else None,
        num_tokens=sum(query_lens) if work.says_num_tokens else None,
    )


def slots_of(work: Workload, blocks: list[int], seq_len: int) -> Tensor:
    """Return the slots of the tokens of a sequence."""
    j, p = torch.arange(seq_len), work.block_size
    return torch.tensor(blocks, dtype=torch.int64)[j // p] * p + j % p


def _poison(work: Workload) -> tuple[float, ...]:
    return {"mixed": POISON, "nan": (torch.nan,), "finite": FINITE_POISON, "none": (0.5,)}[work.poison]


def drawn_hidden(work: Workload, num_slots: int, slots: list[Tensor]) -> Tensor:
    """Return a mask of the slots of a pool that no query may see."""
    hidden = torch.ones(num_slots, dtype=torch.bool)
    for i, own in enumerate(slots):
        hidden[own[sight(work, i).visible.any(0)]] = False
    return hidden


def drawn_pool(
    work: Workload, generator: torch.Generator, num_blocks: int, heads: int, size: int, hidden: Tensor, kind: int
) -> Tensor:
    """Draw an unquantized pool `[n, p, heads, size]`, with poison in the `hidden` slots."""
    rows = torch.randn(num_blocks * work.block_size, heads, size, generator=generator)
    rows[hidden] = poisoned(int(hidden.sum()), heads, size, _poison(work), first=kind)
    seen = (~hidden).nonzero().flatten()
    if work.nan_at == ("key", "value")[kind % 2] and len(seen):
        rows[seen[work.seed % len(seen)], work.seed % heads, work.seed % size] = torch.nan
    return rows.to(getattr(torch, work.dtype)).view(num_blocks, work.block_size, heads, size)


def drawn_query(work: Workload, generator: torch.Generator, size: int) -> Tensor:
    """Draw query rows `[t, h, size]`, poisoned after the last sequence."""
    t, h = sum(q for q, _ in work.lens), work.heads[0]
    rows = torch.randn(t + work.padding_rows, h, size, generator=generator)
    rows[t:] = poisoned(work.padding_rows, h, size, _poison(work))
    return laid(rows.to(getattr(torch, work.dtype)), work.rows)


def drawn_options(work: Workload, generator: torch.Generator) -> dict[str, Any]:
    """Draw the options of a layer, by their names in `AttentionOptions`."""
    h = work.heads[0]
    options: dict[str, Any] = {}
    if work.softmax_scale is not None:
        options["softmax_scale"] = work.softmax_scale
    if work.softcap:
        options["softcap"] = work.softcap
    if work.alibi:
        slopes = 2.0 ** -(torch.arange(1, h + 1) % 8 + torch.rand(h, generator=generator))
        options |= dict(alibi_slopes=slopes.to(getattr(torch, work.alibi)), alibi_sqrt=work.alibi_sqrt)
    if work.sinks:
        small, large = torch.randn(h, generator=generator), 100 + 10 * torch.rand(h, generator=generator)
        mixed = torch.where(torch.arange(h) % 2 == 0, small, torch.where(torch.arange(h) % 4 == 1, large, -large))
        options["sinks"] = {"small": small, "large": large, "mixed": mixed}[work.sinks]
    if work.batch_invariant:
        options["batch_invariant"] = True
    return options


def answer_of(
    work: Workload, query: Tensor, options: dict[str, Any], read: Callable[[int], tuple[Tensor, Tensor]], size: int
) -> Answer:
    """Return the oracle's output for all sequences; padding rows are 0 with an LSE of -inf."""
    t, h = query.shape[:2]
    out, lse = torch.zeros(t, h, size, dtype=torch.float64), torch.full((t, h), -torch.inf, dtype=torch.float64)
    free, row = torch.zeros(t, dtype=torch.bool), 0
    scale = options.get("softmax_scale")
    for i, (q, _) in enumerate(work.lens):
        key, value = read(i)
        rows = slice(row, row + q)
        out[rows], lse[rows], free[rows] = attend(
            query[rows],
            key,
            value,
            sight(work, i),
            scale=query.shape[2] ** -0.5 if scale is None else scale,
            softcap=options.get("softcap", 0.0),
            slopes=options.get("alibi_slopes"),
            by_root=options.get("alibi_sqrt", False),
            sinks=options.get("sinks"),
        )
        row += q
    return Answer(out, lse, free)


# --- plans ---


def planning(work: Workload, modules: Modules, batch: Batch, **more: Any) -> Callable[[], Any]:
    """Return a function that plans the batch of a workload as its path does.

    Args:
        work: of a path of attention.
        modules: from a path's name to its module.
        batch: of the workload.
        more: all arguments of the plan except the block size, in the place of those of the workload.
    """
    name, p = work.plan_path, work.block_size
    if work.path == "mla" and name not in ("speculative", "interval"):
        name = "mla"
    planned: dict[str, Any] = dict(block_size=p, causal=work.causal, window_size=work.window)
    if more:
        planned = dict(block_size=p, **more)
    elif name == "varlen":
        del planned["block_size"]
    elif name == "interval":
        padding = [(LARGEST, -LARGEST), (-LARGEST, LARGEST), (3, 5)] * work.padding_rows  # padding may hold anything
        rows = [pair for i in range(len(work.lens)) for pair in work.interval_rows(i)] + padding[: work.padding_rows]
        first, last = torch.tensor(rows, dtype=torch.int32).view(-1, 2).T.contiguous().to(batch.device)
        planned = dict(first_visible=first, last_visible=last, block_size=p)
    elif name == "local":
        planned = dict(chunk_size=work.chunk, block_size=p, window_size=work.window)
    elif name == "cascade":
        prefixes = [Prefix(first, last, blocks * p) for first, last, blocks in work.prefixes]
        planned = dict(prefixes=prefixes, block_size=p, window_size=work.window)
    elif name == "mla":
        planned = dict(block_size=p)
    elif work.has_trees:
        parents = [work.parents(i) for i in range(len(work.lens))]
        planned["trees"] = modules("speculative").make_trees(parents, device=batch.device)
    return partial(modules(name).plan, batch, **planned)
