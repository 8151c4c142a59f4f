"""Layers with compressed keys: random sequences in poisoned pools, steps of them, and the formula over all tokens."""

import math
from contextlib import nullcontext
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

import fastattn.compressed
import refattn.compressed
from fastattn.kernels.order import use_kernel
from refattn import mla
from refattn.batch import Batch
from refattn.metadata import make_batch, slot_mapping
from refattn.options import AttentionOptions

BLOCK, ENTRY_BLOCK = 4, 2  # tokens and entries in a block


def twin_of(package: str) -> ModuleType:
    """Return the path of a package, or of the package of a kernel."""
    return refattn.compressed if package in ("refattn", "reference") else fastattn.compressed


@dataclass
class Layer:
    """The numbers of some sequences in one layer, of all tokens that they will ever have.

    Attributes:
        values, gates: `[b][s, w]`, a row per token.
        keys: `[b][s, d]` of the window.
        queries: `[b][s, h, d]`.
        bias: `[ratio, w]`.
        ratio: tokens of an entry.
        overlap: whether entries overlap.
        left: tokens of the window before a query.
    """

    values: list[Tensor]
    gates: list[Tensor]
    keys: list[Tensor]
    queries: list[Tensor]
    bias: Tensor
    ratio: int
    overlap: bool
    left: int

    @classmethod
    def draw(
        cls,
        *lens: int,
        ratio: int = 4,
        overlap: bool = False,
        left: int = 2,
        heads: int = 2,
        size: int = 8,
        dtype: torch.dtype = torch.float32,
        seed: int = 0,
    ) -> "Layer":
        """Draw sequences of some lengths."""
        g = torch.Generator().manual_seed(seed)
        width = 2 * size if overlap else size

        def normal(*shape: int) -> list[Tensor]:
            return [torch.randn(s, *shape, generator=g, dtype=torch.float64).to(dtype) for s in lens]

        values, gates = normal(width), [2 * x for x in normal(width)]
        bias = torch.randn(ratio, width, generator=g, dtype=torch.float64).float()
        return cls(values, gates, normal(size), normal(heads, size), bias, ratio, overlap, left)

    # --- the formula, in float64, over whole sequences ---

    def entries_by_hand(self, i: int) -> Tensor:
        """Return all entries of a sequence, element by element."""
        value, gate, bias = (x.double() for x in (self.values[i], self.gates[i], self.bias))
        size, r = self.keys[i].shape[1], self.ratio
        out = torch.zeros(len(value) // r, size, dtype=torch.float64)
        for w in range(len(out)):
            for c in range(size):
                own = c + (size if self.overlap else 0)
                terms = [
                    (float(gate[t, own] + bias[t - w * r, own]), float(value[t, own])) for t in range(w * r, w * r + r)
                ]
                if self.overlap and w > 0:
                    first = (w - 1) * r
                    terms += [(float(gate[t, c] + bias[t - first, c]), float(value[t, c])) for t in range(first, w * r)]
                total = math.fsum(math.exp(g) for g, _ in terms)
                out[w, c] = math.fsum(math.exp(g) * v for g, v in terms) / total
        return out

    def attended_by_hand(
        self, i: int, t: int, entries: Tensor, *, sinks: Tensor | None = None, chosen: list[int] | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return the output and the LSE of the query at a position: one softmax over window, entries and sink."""
        window = range(max(0, t - self.left), t + 1)
        seen = range((t + 1) // self.ratio) if chosen is None else chosen
        keys = [self.keys[i][j].double() for j in window] + [entries[e].double() for e in seen]
        query = self.queries[i][t].double()
        out, lse = torch.zeros_like(query), torch.zeros(len(query), dtype=torch.float64)
        for head in range(len(query)):
            scores = [float(query[head] @ key) / math.sqrt(len(key)) for key in keys]
            total = math.fsum(map(math.exp, scores))
            total += 0.0 if sinks is None else math.exp(float(sinks[head]))
            for score, key in zip(scores, keys, strict=True):
                out[head] += math.exp(score) / total * key
            lse[head] = math.log(total)
        return out, lse


class Pools:
    """The pools of a layer, full of poison, and the blocks of each sequence; stepped by a package or by a kernel."""

    def __init__(self, layer: Layer, *, poison: float = math.nan, seed: int = 0, device: str = "cpu") -> None:
        """Deal out shuffled blocks."""
        self.layer, self.device = layer, device
        g = torch.Generator().manual_seed(seed)
        lens, size = [len(x) for x in layer.keys], layer.keys[0].shape[1]
        width, dtype = layer.values[0].shape[1], layer.keys[0].dtype

        def tables(lens: list[int], block: int) -> tuple[list[list[int]], int]:
            counts = [-(-n // block) for n in lens]
            free = torch.randperm(sum(counts) + 3, generator=g).tolist()
            return [[free.pop() for _ in range(count)] for count in counts], sum(counts) + 3

        self.blocks, n = tables(lens, BLOCK)
        self.entry_blocks, m = tables([x // layer.ratio for x in lens], ENTRY_BLOCK)
        place = dict(dtype=dtype, device=device)
        self.rows = torch.full((n, BLOCK, 2 * width), poison, **place)
        self.cache = torch.full((n, BLOCK, size), poison, **place)
        self.entries = torch.full((m, ENTRY_BLOCK, size), poison, **place)

    def batch(self, parts: list[tuple[int, int]]) -> Batch:
        """Return the batch of a step: the first and one past the last new token of each sequence; table garbage past
        each.
        """
        lens = [end - first for first, end in parts], [end for _, end in parts]
        used = [blocks[: -(-end // BLOCK)] for blocks, (_, end) in zip(self.blocks, parts, strict=True)]
        return make_batch(*lens, used, device=self.device)

    def plan(self, package: str, parts: list[tuple[int, int]], *, batch: Batch | None = None) -> Any:
        """Plan a step."""
        layer, columns = self.layer, max([1, *map(len, self.entry_blocks)])
        table = torch.full((len(parts), columns), -1, dtype=torch.int32, device=self.device)
        for i, (blocks, (_, end)) in enumerate(zip(self.entry_blocks, parts, strict=True)):
            used = blocks[: -(-(end // layer.ratio) // ENTRY_BLOCK)]
            table[i, : len(used)] = torch.tensor(used, dtype=torch.int32)
        return twin_of(package).plan(
            self.batch(parts) if batch is None else batch,
            ratio=layer.ratio,
            overlap=layer.overlap,
            window_size=(layer.left, 0),
            entry_table=table,
            block_size=BLOCK,
            entry_block_size=ENTRY_BLOCK,
        )

    def write(self, plan: Any, parts: list[tuple[int, int]]) -> None:
        """Write the rows and the keys of new tokens."""
        value, gate, key = (self.of(parts, x) for x in (self.layer.values, self.layer.gates, self.layer.keys))
        slots = slot_mapping(plan.batch, len(key), block_size=BLOCK)
        mla.write(value, gate, self.rows, slots)
        mla.write(key, key[:, :0], self.cache, slots)

    def step(
        self,
        kernel: str,
        parts: list[tuple[int, int]],
        options: AttentionOptions = AttentionOptions(),
        *,
        select: Any = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Write new tokens, compute their entries, and attend: return the new entries, outputs and LSEs.

        Entries are stored as they are, without norm and rotation. `select` makes positions of entries from the plan.
        """
        with nullcontext() if kernel in ("reference", "refattn", "fastattn") else use_kernel(kernel):
            path, plan = twin_of(kernel), self.plan(kernel, parts)
            self.write(plan, parts)
            new = path.compress(self.rows, plan, bias=self.layer.bias.to(self.device))
            mla.write(new, new[:, :0], self.entries, plan.slots)
            if select is not None:
                plan = path.select_entries(plan, select(plan))
            query = self.of(parts, self.layer.queries)
            out, lse = path.attention(query, self.cache, self.entries, plan, options, return_lse=True)
        return new[plan.slots >= 0].cpu(), out.cpu(), lse.cpu()

    def of(self, parts: list[tuple[int, int]], tensors: list[Tensor]) -> Tensor:
        """Return the rows of a step."""
        return torch.cat([x[first:end] for x, (first, end) in zip(tensors, parts, strict=True)]).to(self.device)
