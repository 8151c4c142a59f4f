"""Work and contenders of compressed keys: decodes over a window and entries, and the entries of a prompt.

Attention is bound by the keys of the window and the entries that each query sees, read once. Entries are bound by the
rows of their tokens, a value and a gate each.
"""

import importlib
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastattn.kernels import use_kernel
from refattn.batch import Batch
from refattn.entries import CompressedPlan
from refattn.options import AttentionOptions
from twinattn.bench.contender import Contender
from twinattn.bench.measure import Call
from twinattn.bench.sparse import judge_of_some
from twinattn.bench.work import Judge, hold

WINDOW = 128  # tokens


def _batch(num_seqs: int, query_len: int, seq_len: int, block_size: int, generator: torch.Generator) -> Batch:
    """Return a batch of sequences of one length, in shuffled blocks."""
    device, blocks = generator.device, -(-seq_len // block_size)
    table = torch.randperm(num_seqs * blocks, generator=generator, device=device).int().view(num_seqs, blocks)
    lens = torch.full((num_seqs,), seq_len, dtype=torch.int32, device=device)
    ends = torch.arange(num_seqs + 1, dtype=torch.int32, device=device) * query_len
    return Batch(ends, lens, table, query_len, seq_len, num_seqs * seq_len, num_seqs * query_len)


class Compressed(NamedTuple):
    """Queries, both pools, the lengths and the tables of a step, and the selected entries."""

    query: Tensor
    cache: Tensor
    entry_cache: Tensor
    batch: Batch
    arguments: dict[str, Any]
    positions: Tensor | None


@dataclass(frozen=True)
class CompressedKeys:
    """Decodes over the last tokens and over entries, with the sizes of DeepSeek-V4.

    Attributes:
        num_seqs: decodes.
        seq_len: tokens of each.
        ratio: tokens of an entry.
        topk: entries that each query sees; 0 for all.
        num_heads: query heads.
        size: elements of a key and of an entry.
        block_size: tokens in a block; a block of entries has those of a block of tokens.
    """

    num_seqs: int
    seq_len: int
    ratio: int = 4
    topk: int = 512
    num_heads: int = 128
    size: int = 512
    block_size: int = 256

    @property
    def seen(self) -> int:
        """Keys that a query sees, of either kind."""
        return WINDOW + (self.topk or self.seq_len // self.ratio)

    def flops(self) -> int:
        """Count two products for each key that is seen."""
        return 4 * self.num_seqs * self.seen * self.num_heads * self.size

    def reads(self, itemsize: int) -> int:
        """Count each key that is seen once, and the queries."""
        return self.num_seqs * (self.seen + self.num_heads) * self.size * itemsize + 4 * self.num_seqs * self.topk

    def writes(self, itemsize: int) -> int:
        """Count the outputs once."""
        return self.num_seqs * self.num_heads * self.size * itemsize

    def draw(self, device: torch.device, dtype: torch.dtype, seed: int) -> Compressed:
        """Draw queries, keys, entries, and the entries that are selected."""
        generator = torch.Generator(device).manual_seed(seed)
        normal = partial(torch.randn, dtype=dtype, device=device, generator=generator)
        batch = _batch(self.num_seqs, 1, self.seq_len, self.block_size, generator)
        assert batch.block_table is not None
        per_block, blocks = self.block_size // self.ratio, batch.block_table.numel()
        arguments = dict(ratio=self.ratio, window_size=(WINDOW - 1, 0), block_size=self.block_size)
        arguments |= dict(entry_table=batch.block_table, entry_block_size=per_block)
        positions = None
        if self.topk:
            drawn = torch.rand(self.num_seqs, self.seq_len // self.ratio, generator=generator, device=device)
            positions = drawn.topk(self.topk, dim=1).indices.sort(1).values.int()
        pools = normal(blocks, self.block_size, self.size), normal(blocks, per_block, self.size)
        return Compressed(normal(self.num_seqs, self.num_heads, self.size), *pools, batch, arguments, positions)

    def judge(self, inputs: Compressed) -> Judge:
        """Compute the output of some queries in float64, as one softmax."""
        return judge_of_some(_attend, inputs, self.num_seqs)


def _slots(inputs: Compressed) -> tuple[Tensor, Tensor]:
    """Return the slots of the keys of each window, and of the entries that each query sees."""
    table, p = inputs.batch.block_table, inputs.cache.shape[1]
    assert table is not None
    end, per_block = inputs.batch.max_seq_len, inputs.entry_cache.shape[1]
    window = torch.arange(end - WINDOW, end, device=table.device).expand(len(table), -1)
    every = torch.arange(end // inputs.arguments["ratio"], device=table.device).expand(len(table), -1)
    entries = every if inputs.positions is None else inputs.positions.long()
    found = ((window, p), (entries, per_block))
    window, entries = (table.gather(1, x // block).long() * block + x % block for x, block in found)
    return window, entries


def _attend(inputs: Compressed, i: int, dtype: torch.dtype) -> Tensor:
    window, entries = (slots[i] for slots in _slots(inputs))
    keys = torch.cat([inputs.cache.flatten(0, 1)[window], inputs.entry_cache.flatten(0, 1)[entries]]).to(dtype)
    query = inputs.query[i].to(dtype)
    return (query @ keys.T * query.shape[-1] ** -0.5).softmax(-1) @ keys


def compressed_twin(package: str = "fastattn", kernel: str | None = None) -> Contender:
    """Our attention; with selected entries, their part of the plan is made in each layer, as each selects anew."""

    def prepare(inputs: Compressed) -> Call:
        path = importlib.import_module(f"{package}.compressed")
        step, options = path.plan(inputs.batch, **inputs.arguments), AttentionOptions()

        def call() -> Tensor:
            plan = step if inputs.positions is None else path.select_entries(step, inputs.positions)
            with nullcontext() if kernel is None else use_kernel(kernel):
                out: Tensor = path.attention(inputs.query, inputs.cache, inputs.entry_cache, plan, options)
            return out

        return call

    return Contender(package if kernel is None else f"{package}, {kernel}", prepare)


def compressed_gathered() -> Contender:
    """Both sets of keys gathered into rows, and one softmax over them, by PyTorch."""

    def prepare(inputs: Compressed) -> Call:
        (window, entries), scale = _slots(inputs), inputs.query.shape[-1] ** -0.5

        def call() -> Tensor:
            keys = torch.cat([inputs.cache.flatten(0, 1)[window], inputs.entry_cache.flatten(0, 1)[entries]], 1)
            scores = torch.einsum("bhd,bsd->bhs", inputs.query, keys) * scale
            return torch.einsum("bhs,bsd->bhd", scores.softmax(-1), keys)

        return call

    return Contender("gather, einsum, softmax", prepare)


# --- entries ---


class Rows(NamedTuple):
    """The pool of rows, the bias, and the lengths and tables of a step."""

    row_cache: Tensor
    bias: Tensor
    batch: Batch
    arguments: dict[str, Any]


@dataclass(frozen=True)
class NewEntries:
    """The entries that the new tokens of some sequences complete, with the sizes of DeepSeek-V4.

    Attributes:
        num_seqs: sequences.
        seq_len: tokens of each.
        query_len: new tokens of each.
        ratio: tokens of an entry.
        overlap: whether entries overlap.
        size: elements of an entry.
        block_size: tokens in a block.
    """

    num_seqs: int
    seq_len: int
    query_len: int
    ratio: int = 4
    overlap: bool = True
    size: int = 512
    block_size: int = 256

    @property
    def width(self) -> int:
        """Elements of a value."""
        return 2 * self.size if self.overlap else self.size

    @property
    def entries(self) -> int:
        """New entries."""
        return self.num_seqs * (self.seq_len // self.ratio - (self.seq_len - self.query_len) // self.ratio)

    def flops(self) -> int:
        """Count a product and an addition for each element of a row."""
        return 2 * self.entries * self.ratio * self.width

    def reads(self, itemsize: int) -> int:
        """Count each row once, and the bias."""
        return 2 * self.entries * self.ratio * self.width * itemsize + 4 * self.ratio * self.width

    def writes(self, itemsize: int) -> int:
        """Count the entries once."""
        return self.entries * self.size * itemsize

    def draw(self, device: torch.device, dtype: torch.dtype, seed: int) -> Rows:
        """Draw rows in shuffled blocks."""
        generator = torch.Generator(device).manual_seed(seed)
        batch = _batch(self.num_seqs, self.query_len, self.seq_len, self.block_size, generator)
        assert batch.block_table is not None
        shape = batch.block_table.numel(), self.block_size, 2 * self.width
        rows = torch.randn(*shape, dtype=dtype, device=device, generator=generator)
        bias = torch.randn(self.ratio, self.width, device=device, generator=generator)
        arguments = dict(ratio=self.ratio, overlap=self.overlap, window_size=(WINDOW - 1, 0))
        arguments |= dict(entry_table=batch.block_table, block_size=self.block_size)
        return Rows(rows, bias, batch, arguments | dict(entry_block_size=self.block_size // self.ratio))

    def judge(self, inputs: Rows) -> Judge:
        """Compute the entries of the first sequence in float64."""
        exact, low = (_pool(self, inputs, dtype)[0] for dtype in (torch.float64, inputs.row_cache.dtype))

        def judge(out: Tensor, _: Any = None) -> None:
            hold(out[: len(exact)], exact, low, name="entries")
            out.fill_(torch.nan)

        return judge


def _pool(work: NewEntries, inputs: Rows, dtype: torch.dtype) -> Tensor:
    """Return the new entries of each sequence `[b, e, d]`, from rows that are gathered; it needs whole entries."""
    table, (r, w, d) = inputs.batch.block_table, (work.ratio, work.width, work.size)
    assert table is not None
    first, end = (work.seq_len - work.query_len) // r, work.seq_len // r
    tokens = torch.arange(max(first - work.overlap, 0) * r, end * r, device=table.device)
    read = inputs.row_cache[table[:, tokens // work.block_size].long(), tokens % work.block_size].to(dtype)
    value, gate = read[..., :w].unflatten(1, (-1, r)), read[..., w:].unflatten(1, (-1, r)) + inputs.bias.to(dtype)
    if work.overlap:
        if first == 0:
            value, gate = (
                torch.cat([torch.full_like(x[:, :1], fill), x], 1) for x, fill in ((value, 0.0), (gate, -torch.inf))
            )
        value, gate = (torch.cat([x[:, :-1, :, :d], x[:, 1:, :, d:]], 2) for x in (value, gate))
    return (gate.softmax(2) * value).sum(2)


def compress_twin(package: str = "fastattn", kernel: str | None = None) -> Contender:
    """Our entries."""

    def prepare(inputs: Rows) -> Call:
        path = importlib.import_module(f"{package}.compressed")
        plan: CompressedPlan = path.plan(inputs.batch, **inputs.arguments)

        def call() -> Tensor:
            with nullcontext() if kernel is None else use_kernel(kernel):
                out: Tensor = path.compress(inputs.row_cache, plan, bias=inputs.bias)
            return out

        return call

    return Contender(package if kernel is None else f"{package}, {kernel}", prepare)


def compress_gathered(work: NewEntries) -> Contender:
    """The rows gathered, and a softmax over them, by PyTorch."""
    return Contender(
        "gather, softmax, sum", lambda inputs: lambda: _pool(work, inputs, inputs.row_cache.dtype).flatten(0, 1)
    )
