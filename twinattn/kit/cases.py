"""Test batches of a path: ragged, with shuffled blocks, and poisoned where nothing may be read."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from refattn.batch import Batch
from twinattn.kit.workload import Workload

STALE = 1e4  # a large number changes an output without making it NaN
POISON = (float("nan"), float("inf"), -float("inf"), STALE)  # values of memory that no query may see, in turn
FINITE_POISON = (STALE, -STALE)  # disappears where it is multiplied by 0
HARMLESS = (0.5,)  # the value instead, for outputs to compare bit for bit with those over poison
GARBAGE = (-1, 1_000_000)  # entries of a block table past a sequence's last block


@dataclass(frozen=True, init=False, repr=False)
class Case(Workload):
    """A ragged batch for any path over unquantized keys and values.

    Attributes:
        name: of the batch; the test id.
    """

    name: str = ""
    heads: tuple[int, int] = (4, 2)

    def __init__(
        self,
        name: str,
        lens: tuple[tuple[int, int], ...],
        heads: tuple[int, int] = (4, 2),
        head_size: int = 64,
        value_head_size: int = 0,
        block_size: int = 16,
        layout: str = "NHD",
        padding_rows: int = 0,
        **more: Any,
    ) -> None:
        """Set the fields that differ between cases; `layout` is that of the pool."""
        object.__setattr__(self, "name", name)
        sizes = (heads, head_size, value_head_size, block_size, padding_rows)
        super().__init__(more.pop("path", "chunked_prefill"), lens, *sizes, **{"pool": layout, **more})

    def __str__(self) -> str:
        """Name the case."""
        return self.name

    def __repr__(self) -> str:
        return self._as_code(self.name, "name", "path")


CASES = [
    Case("decode", ((1, 1),)),
    Case("decode-long", ((1, 4097),), heads=(4, 1)),
    Case("decodes-ragged", ((1, 5), (1, 33), (1, 16), (1, 700), (1, 17)), heads=(8, 2)),
    Case("chunk", ((113, 203),), heads=(3, 3), block_size=64),
    Case("first-chunk", ((239, 239),), heads=(6, 2), head_size=96),
    Case("more-queries-than-keys", ((239, 1), (5, 2), (5, 0)), heads=(4, 4)),
    Case("empty-rows", ((0, 5), (5, 0), (0, 0), (2, 2)), heads=(4, 1)),
    Case("silent-and-decoding", ((0, 7), (1, 9), (0, 3), (1, 40)), heads=(8, 2)),
    Case("mixed", ((4, 6), (1, 17), (10, 17), (5, 9), (1, 64), (3, 3)), heads=(6, 3), padding_rows=5),
    Case("verification", ((4, 20), (4, 131), (3, 48)), heads=(9, 3)),
    Case("odd-blocks", ((7, 50), (1, 29), (33, 33)), block_size=24),
    Case("one-token-in-last-block", ((1, 33), (2, 17), (16, 49)), heads=(4, 4)),
    Case("exact-blocks", ((1, 32), (16, 16), (3, 64))),
    Case("heads-first", ((5, 37), (1, 18), (20, 20)), layout="HND", heads=(6, 2)),
    Case("narrow-values", ((5, 37), (1, 18), (20, 20)), head_size=96, value_head_size=64),
    Case("wide-values", ((5, 37), (1, 18), (20, 20)), head_size=64, value_head_size=128),
    Case("head-size-256", ((9, 30), (1, 70)), head_size=256, heads=(2, 1)),
]


@dataclass(frozen=True)
class Paged:
    """The tensors of a case: a poisoned pool, and the same keys and values as plain rows."""

    query: Tensor  # [t, h, d]
    key_cache: Tensor  # [n, p, hk, d]
    value_cache: Tensor
    batch: Batch
    keys: list[Tensor]  # one per sequence [s, hk, d]
    values: list[Tensor]
    more_keys: Tensor  # rows past the last sequence
    more_values: Tensor

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Batch]:
        """The positional arguments of a path over the paged cache."""
        return self.query, self.key_cache, self.value_cache, self.batch

    @property
    def rows(self) -> tuple[Tensor, Tensor, Tensor, Batch]:
        """The positional arguments of a path over plain rows."""
        key, value = torch.cat([*self.keys, self.more_keys]), torch.cat([*self.values, self.more_values])
        return self.query, key, value, self.batch


def build(
    case: Workload,
    *,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    seed: int = 0,
    keys: list[Tensor] | None = None,
    values: list[Tensor] | None = None,
    poison: Sequence[float] = POISON,
) -> Paged:
    """Make the tensors of a case: a shuffled pool, with poison in all memory that no query may see.

    That is free blocks, slots past each sequence's end, and rows past the last sequence. The values are drawn on the
    CPU, so that they are the same on every device; they do not depend on the poison.
    """
    generator, shuffle = torch.Generator().manual_seed(seed), random.Random(seed)
    h, hk = case.heads
    d, p = case.head_size, case.block_size
    dv = case.value_size
    seq_lens = [s for _, s in case.lens]

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float32).to(dtype)

    query = draw(case.num_tokens + case.padding_rows, h, d)
    query[len(query) - case.padding_rows :] = poisoned(case.padding_rows, h, d, poison).to(dtype)
    keys = [draw(s, hk, d) for s in seq_lens] if keys is None else [x.to(dtype) for x in keys]
    values = [draw(s, hk, dv) for s in seq_lens] if values is None else [x.to(dtype) for x in values]

    needed = [-(-s // p) for s in seq_lens]
    num_blocks = sum(needed) + 3
    free = list(range(num_blocks))
    shuffle.shuffle(free)
    columns = max(needed, default=0) + 2
    rows_of_table = [[shuffle.choice(GARBAGE) for _ in range(columns)] for _ in seq_lens]
    table = torch.tensor(rows_of_table, dtype=torch.int32).view(len(seq_lens), columns)
    pools = []
    owned = [[free.pop() for _ in range(count)] for count in needed]
    for kind, (rows, size) in enumerate(((keys, d), (values, dv))):
        pool = poisoned(num_blocks * p, hk, size, poison, first=kind).to(dtype).view(num_blocks, p, hk, size)
        for i, blocks in enumerate(owned):
            if blocks:
                table[i, : len(blocks)] = torch.tensor(blocks, dtype=torch.int32)
                for block, part in zip(blocks, rows[i].split(p), strict=True):
                    pool[block, : len(part)] = part
        if case.pool == "HND":
            pool = pool.transpose(1, 2).contiguous().to(device).transpose(1, 2)
        pools.append(pool.to(device))

    lengths = torch.tensor([0, *(q for q, _ in case.lens)])
    batch = Batch(
        cu_seqlens_q=lengths.cumsum(0).int().to(device),
        seq_lens=torch.tensor(seq_lens, dtype=torch.int32, device=device),
        block_table=table.to(device),
        max_query_len=max((q for q, _ in case.lens), default=0),
        max_seq_len=max(seq_lens, default=0),
        num_tokens=case.num_tokens,
    )
    more_keys, more_values = (
        poisoned(case.padding_rows, hk, size, poison, first=kind).to(device, dtype) for kind, size in enumerate((d, dv))
    )
    return Paged(
        query.to(device),
        pools[0],
        pools[1],
        batch,
        [x.to(device) for x in keys],
        [x.to(device) for x in values],
        more_keys,
        more_values,
    )


def poisoned(rows: int, heads: int, size: int, poison: Sequence[float] = POISON, *, first: int = 0) -> Tensor:
    """Return rows of poison `[rows, heads, size]`, of another kind in each head and in each next row."""
    if len(poison) == 1:
        return torch.full((rows, heads, size), poison[0], dtype=torch.float32)
    turn = torch.arange(rows)[:, None] + torch.arange(heads) + first
    return torch.tensor(poison, dtype=torch.float32)[turn % len(poison)][..., None].repeat(1, 1, size)
