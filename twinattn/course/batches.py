"""The timed batches of the ladders: their inputs, and what a kernel has to read, write and multiply at least.

A batch makes its inputs by name, and a rung takes those that its parameters name. Some of its outputs are held to the
reference: those of parts of the batch, each of which is a batch of its own.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.functional import normalize, pad

from refattn import replay
from refattn.rings import Ring

Lens = Sequence[tuple[int, int]]  # queries and keys of each sequence
Part = tuple[slice, dict[str, Any]]  # rows of the output, and the inputs of the batch that computes them


@dataclass(frozen=True)
class Pages:
    """Attention over keys and values of bfloat16, in shuffled blocks of a pool.

    Attributes:
        lens: queries and keys of each sequence.
        rows: whether the same keys and values also lie in rows, `key` and `value`.
        heads: query heads.
        kv_heads: KV heads.
        size: elements of a query, a key and a value.
        block_size: tokens in a block.
    """

    changes: ClassVar[tuple[str, ...]] = ()  # inputs that a call changes in place

    lens: Lens
    rows: bool = False
    heads: int = 32
    kv_heads: int = 8
    size: int = 128
    block_size: int = 16

    def make_inputs(self, device: torch.device) -> dict[str, Any]:
        """Make the inputs, by name."""
        table, blocks = shuffled_blocks(self.lens, self.block_size)
        kind: Any = dict(dtype=torch.bfloat16, device=device)
        pool = sum(map(len, blocks)), self.block_size, self.kv_heads, self.size
        query = torch.randn(sum(n for n, _ in self.lens), self.heads, self.size, **kind)
        inputs = dict(query=query, key_cache=torch.randn(pool, **kind), value_cache=torch.randn(pool, **kind))
        inputs["block_table"] = table.to(device)
        if self.rows:
            slots = torch.cat(
                [
                    (own.long()[:, None] * self.block_size + torch.arange(self.block_size)).flatten()[:n]
                    for own, (_, n) in zip(blocks, self.lens, strict=True)
                ]
            ).to(device)
            inputs |= {name: inputs[f"{name}_cache"].flatten(0, 1)[slots] for name in ("key", "value")}
        return inputs | lengths_of(self.lens, device) | dict(block_size=self.block_size)

    def reads(self) -> int:
        """Count the bytes of keys, values, queries and tables."""
        keys = 2 * sum(n for _, n in self.lens) * self.kv_heads * self.size * 2
        return keys + self.writes() + table_bytes(self.lens, self.block_size)

    def writes(self) -> int:
        """Count the bytes of the outputs."""
        return sum(n for n, _ in self.lens) * self.heads * self.size * 2

    def flops(self) -> int:
        """Count the multiplications and additions of both products, of queries with the keys that they see."""
        pairs = sum(queries * (keys - queries) + queries * (queries + 1) // 2 for queries, keys in self.lens)
        return 4 * pairs * self.heads * self.size

    def parts(self, inputs: Mapping[str, Any], rows: int) -> Iterator[Part]:
        """Yield the first and the last rows of the first and of the last sequence, at most `rows` of each."""
        for sequence in sorted({0, len(self.lens) - 1}):
            query_len = self.lens[sequence][0]
            first = sum(n for n, _ in self.lens[:sequence])
            for begin in sorted({0, max(query_len - rows, 0)}):
                end = min(begin + rows, query_len)
                yield slice(first + begin, first + end), self._part(inputs, sequence, slice(begin, end))

    def _part(self, inputs: Mapping[str, Any], sequence: int, rows: slice) -> dict[str, Any]:
        """Return some query rows of one sequence, and the keys up to the last of them, as a batch of their own."""
        query_len, seq_len = self.lens[sequence]
        first_query, first_key = (sum(lens[kind] for lens in self.lens[:sequence]) for kind in range(2))
        num_keys = seq_len - query_len + rows.stop
        part = {"query": inputs["query"][first_query + rows.start : first_query + rows.stop]}
        part |= {x: inputs[x][first_key : first_key + num_keys] for x in ("key", "value") if x in inputs}
        part |= blocks_of(inputs, ("key_cache", "value_cache"), sequence, num_keys, self.block_size)
        return part | lengths_of([(rows.stop - rows.start, num_keys)], inputs["query"].device)


@dataclass(frozen=True)
class Latents:
    """Decodes of latent attention in bfloat16, with the projections of the layer, in the sizes of DeepSeek-V3.

    Attributes:
        lens: queries, one each, and keys of each sequence.
        heads: query heads.
        rank: elements of a latent.
        rope: elements of a rotary key.
        nope: elements of a head's key that come from a latent.
        value_size: elements of a head's value.
        block_size: tokens in a block.
    """

    changes: ClassVar[tuple[str, ...]] = ()

    lens: Lens
    heads: int = 128
    rank: int = 512
    rope: int = 64
    nope: int = 128
    value_size: int = 128
    block_size: int = 64

    def make_inputs(self, device: torch.device) -> dict[str, Any]:
        """Make the inputs, by name; the pool has values that fp8 (e4m3) holds exactly, and `fp8_cache` has the same."""
        table, blocks = shuffled_blocks(self.lens, self.block_size)
        kind: Any = dict(dtype=torch.bfloat16, device=device)
        cache = torch.randn(sum(map(len, blocks)), self.block_size, self.rank + self.rope, **kind)
        fp8_cache = cache.to(torch.float8_e4m3fn)
        matrices = dict(key_projection=self.nope, value_projection=self.value_size)
        inputs: dict[str, Any] = {
            name: torch.randn(self.heads, size, self.rank, **kind) / self.rank**0.5 for name, size in matrices.items()
        }
        inputs |= dict(query=torch.randn(len(self.lens), self.heads, self.nope + self.rope, **kind))
        inputs |= dict(cache=fp8_cache.to(torch.bfloat16), fp8_cache=fp8_cache, block_table=table.to(device))
        return inputs | lengths_of(self.lens, device) | dict(block_size=self.block_size, **self._scales())

    def _scales(self) -> dict[str, float]:
        return dict(softmax_scale=(self.nope + self.rope) ** -0.5, cache_scale=1.0)

    def reads(self) -> int:
        """Count the bytes of latents and rotary keys, of both projections, and of queries and tables."""
        keys = sum(n for _, n in self.lens) * (self.rank + self.rope) * 2
        projections = self.heads * self.rank * (self.nope + self.value_size) * 2
        queries = len(self.lens) * self.heads * (self.nope + self.rope) * 2
        return keys + projections + queries + table_bytes(self.lens, self.block_size)

    def writes(self) -> int:
        """Count the bytes of the outputs."""
        return len(self.lens) * self.heads * self.value_size * 2

    def flops(self) -> int:
        """Count the multiplications and additions of absorbed queries: both products, and both projections."""
        pairs = sum(keys for _, keys in self.lens) * (2 * self.rank + self.rope)
        return 2 * self.heads * (pairs + len(self.lens) * self.rank * (self.nope + self.value_size))

    def parts(self, inputs: Mapping[str, Any], rows: int) -> Iterator[Part]:
        """Yield the first and the last sequence."""
        for sequence in sorted({0, len(self.lens) - 1}):
            own = slice(sequence, sequence + 1)
            part = {name: inputs[name] for name in ("key_projection", "value_projection", *self._scales())}
            part |= {"query": inputs["query"][own]} | lengths_of([self.lens[sequence]], inputs["query"].device)
            yield own, part | blocks_of(inputs, ("cache",), sequence, self.lens[sequence][1], self.block_size)


@dataclass(frozen=True)
class States:
    """Tokens of layers that keep a state, under the gated delta rule: bfloat16, gates and states of float32.

    Attributes:
        lens: new tokens and all tokens of each sequence; one without tokens before has no state.
        heads: value heads.
        key_heads: heads of queries and keys.
        size: elements of a query, a key and a value.
        ring: inputs that a ring has room for, where a step may replay them; 0 without rings.
    """

    changes: ClassVar[tuple[str, ...]] = ("states", "checkpoints", "ring_key", "ring_written", "ring_log_decay")

    lens: Lens
    heads: int = 32
    key_heads: int = 16
    size: int = 128
    ring: int = 0

    def make_inputs(self, device: torch.device) -> dict[str, Any]:
        """Make the inputs, by name; with rings, `states` are what the checkpoints are after the inputs in them."""
        b, t, kind = len(self.lens), sum(n for n, _ in self.lens), torch.bfloat16
        slots = torch.randperm(b + 2, device=device)[:b].int()
        inputs = {name: normalize(torch.randn(t, self.key_heads, self.size, device=device), dim=-1).to(kind)
                  for name in ("query", "key")}  # fmt: skip
        inputs["value"] = torch.randn(t, self.heads, self.size, device=device).to(kind)
        inputs["log_decay"] = -0.1 * torch.rand(t, self.heads, device=device)
        inputs["beta"] = torch.rand(t, self.heads, device=device)
        inputs["states"] = torch.randn(b + 2, self.heads, self.size, self.size, device=device)
        inputs["state_indices"] = slots
        inputs["has_initial_state"] = torch.tensor([keys > n for n, keys in self.lens], device=device)
        return inputs | (self._rings(inputs) if self.ring else {}) | lengths_of(self.lens, device)

    def _rings(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """Make checkpoints, and rings with 0 inputs, 1, 2 and so on; the fullest is full after this step."""
        checkpoints, slots, n = inputs["states"].clone(), inputs["state_indices"], len(inputs["states"])
        device, room = checkpoints.device, (n, self.ring)
        ring = Ring(
            normalize(torch.randn(*room, self.key_heads, self.size, device=device), dim=-1).to(inputs["key"].dtype),
            torch.randn(*room, self.heads, self.size, device=device),
            -0.1 * torch.rand(*room, self.heads, device=device),
        )
        cursors = torch.zeros(n, dtype=torch.int32, device=device)
        cursors[slots] = torch.arange(len(slots), dtype=torch.int32, device=device) % self.ring
        replay.flush([inputs["states"]], [ring], cursors.clone(), slots)
        rings = {f"ring_{name}": x for name, x in ring._asdict().items()}
        return dict(checkpoints=checkpoints, cursors=cursors, ring_size=self.ring, **rings)

    def reads(self) -> int:
        """Count the bytes of tokens and gates, and of the states before them."""
        row = 2 * (2 * self.key_heads + self.heads) * self.size + 8 * self.heads
        return sum(n for n, _ in self.lens) * row + sum(keys > n for n, keys in self.lens) * self._state_bytes()

    def writes(self) -> int:
        """Count the bytes of the outputs, and of the states after them."""
        return sum(n for n, _ in self.lens) * self.heads * self.size * 2 + len(self.lens) * self._state_bytes()

    def _state_bytes(self) -> int:
        return 4 * self.heads * self.size**2

    def flops(self) -> int:
        """Count three products of a vector with the state per token: what it returns for a key, the write, the read."""
        return 6 * sum(n for n, _ in self.lens) * self.heads * self.size**2

    def parts(self, inputs: Mapping[str, Any], rows: int) -> Iterator[Part]:
        """Yield the first and the last sequence, whole: each token depends on all before it."""
        for sequence in sorted({0, len(self.lens) - 1}):
            first = sum(n for n, _ in self.lens[:sequence])
            own, only = slice(first, first + self.lens[sequence][0]), slice(sequence, sequence + 1)
            part = {name: inputs[name][own] for name in ("query", "key", "value", "log_decay", "beta")}
            part |= {name: inputs[name][only] for name in ("state_indices", "has_initial_state")}
            part |= {"states": inputs["states"]}
            yield own, part | lengths_of([self.lens[sequence]], inputs["query"].device)


Batch = Pages | Latents | States


def shuffled_blocks(lens: Lens, block_size: int) -> tuple[Tensor, Sequence[Tensor]]:
    """Return a block table, with -1 past the last block of each sequence, and the blocks of each."""
    needed = [-(-n // block_size) for _, n in lens]
    blocks = torch.randperm(sum(needed), dtype=torch.int32).split(needed)
    table = torch.full((len(lens), max(needed)), -1, dtype=torch.int32)
    for row, own in zip(table, blocks, strict=True):
        row[: len(own)] = own
    return table, blocks


def blocks_of(
    inputs: Mapping[str, Any], pools: Sequence[str], sequence: int, num_keys: int, block_size: int
) -> dict[str, Any]:
    """Return the first blocks of a sequence as pools of their own, with a block table."""
    blocks = inputs["block_table"][sequence, : -(-num_keys // block_size)].long()
    table = torch.arange(len(blocks), dtype=torch.int32, device=blocks.device)[None]
    return {name: inputs[name][blocks] for name in pools} | {"block_table": table, "block_size": block_size}


def lengths_of(lens: Lens, device: torch.device) -> dict[str, Any]:
    """Return what says how long the sequences of a batch are, by name."""
    queries, keys = torch.tensor(lens, dtype=torch.int32).T
    sums = {"cu_seqlens_q": queries, "cu_seqlens_k": keys}
    tensors = {name: pad(x.cumsum(0, dtype=torch.int32), (1, 0)) for name, x in sums.items()}
    tensors |= {"seq_lens": keys.contiguous()}
    counts = dict(max_query_len=int(queries.max()), max_seq_len=int(keys.max()), num_keys=int(keys.sum()))
    return {name: x.to(device) for name, x in tensors.items()} | counts


def table_bytes(lens: Lens, block_size: int) -> int:
    """Return the bytes of a block table and of the lengths that a kernel has to read."""
    return sum(-(-n // block_size) for _, n in lens) * 4 + len(lens) * 4


LONG, MANY = ((1, 131072),), ((1, 8192),) * 64
BATCHES: dict[str, dict[str, Batch]] = {  # by ladder and name
    "decode": {
        "64 x 8192": Pages(MANY),
        "1 x 131072": Pages(LONG),
        "60 x 2048 and 4 x 65536": Pages(((1, 2048),) * 60 + ((1, 65536),) * 4),
    },
    "prefill": {
        "2 x 8192": Pages(((8192, 8192),) * 2, rows=True),
        "4 x 512 of 16896": Pages(((512, 16896),) * 4, rows=True),
        "64 x 1 of 2048, 16 x 512 and 1 x 8192": Pages(
            ((1, 2048),) * 64 + ((512, 512),) * 16 + ((8192, 8192),), rows=True
        ),
    },
    "latents": {
        "64 x 8192, 128 heads": Latents(MANY),
        "64 x 8192, 16 heads": Latents(MANY, heads=16),
        "1 x 131072, 16 heads": Latents(LONG, heads=16),
    },
    "states": {
        "1 x 8192": States(((8192, 8192),)),
        "8 x 1024": States(((1024, 1024),) * 8),
        "64 x 1": States(((1, 2),) * 64, ring=16),
    },
}
