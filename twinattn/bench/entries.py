"""Work and contenders of compressed keys: attention to a window and to entries, and the entries of a prompt.

Attention is bound by the keys of the window and the entries that each query sees, read once. Entries are bound by the
rows of their tokens, a value and a gate each.

Others read one list of slots per query, from one pool. So both pools lie in one tensor here, keys of tokens first.
"""

import importlib
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastattn.kernels import use_kernel
from refattn.batch import Batch
from refattn.entries import CompressedPlan
from refattn.options import AttentionOptions
from twinattn.bench.contender import Contender
from twinattn.bench.measure import Call
from twinattn.bench.sparse import SAMPLE
from twinattn.bench.work import Judge, hold
from twinattn.libraries import attn_gym, flash_mla

WINDOW = 128  # tokens


def _batch(num_seqs: int, query_len: int, seq_len: int, block_size: int, generator: torch.Generator) -> Batch:
    """Return a batch of sequences of one length, in shuffled blocks."""
    device, blocks = generator.device, -(-seq_len // block_size)
    table = torch.randperm(num_seqs * blocks, generator=generator, device=device).int().view(num_seqs, blocks)
    lens = torch.full((num_seqs,), seq_len, dtype=torch.int32, device=device)
    ends = torch.arange(num_seqs + 1, dtype=torch.int32, device=device) * query_len
    return Batch(ends, lens, table, query_len, seq_len, num_seqs * seq_len, num_seqs * query_len)


class Compressed(NamedTuple):
    """Queries, sinks, the lengths and the tables of a step, the selected entries, and both pools in one tensor."""

    query: Tensor
    sinks: Tensor
    pool: Tensor
    batch: Batch
    arguments: dict[str, Any]
    positions: Tensor | None

    @property
    def cache(self) -> Tensor:
        """The pool of keys by token `[n, p, d]`."""
        assert self.batch.block_table is not None
        size = self.arguments["block_size"]
        return self.pool[: self.batch.block_table.numel() * size].unflatten(0, (-1, size))

    @property
    def entry_cache(self) -> Tensor:
        """The pool of entries `[n, p2, d]`."""
        return self.pool[self.cache.shape[:2].numel() :].unflatten(0, (-1, self.arguments["entry_block_size"]))


@dataclass(frozen=True)
class CompressedKeys:
    """Queries over the last tokens and over entries, with the sizes of DeepSeek-V4, and a sink per head.

    Attributes:
        num_seqs: sequences.
        seq_len: tokens of each.
        ratio: tokens of an entry.
        topk: entries that each query sees, or fewer while fewer are complete; 0 for all.
        num_heads: query heads.
        size: elements of a key and of an entry.
        block_size: tokens in a block; a block of entries has those of a block of tokens.
        query_len: new tokens of each sequence.
        fp8: pools are in e4m3, with a scale of 1.
    """

    num_seqs: int
    seq_len: int
    ratio: int = 4
    topk: int = 512
    num_heads: int = 128
    size: int = 512
    block_size: int = 256
    query_len: int = 1
    fp8: bool = False

    @property
    def tokens(self) -> int:
        """Queries of all sequences."""
        return self.num_seqs * self.query_len

    @property
    def seen(self) -> int:
        """Keys that all queries of a sequence see, of either kind."""
        ends = range(self.seq_len - self.query_len + 1, self.seq_len + 1)
        return sum(min(end, WINDOW) + min(end // self.ratio, self.topk or end) for end in ends)

    def flops(self) -> int:
        """Count two products for each key that is seen."""
        return 4 * self.num_seqs * self.seen * self.num_heads * self.size

    def reads(self, itemsize: int) -> int:
        """Count each key that is seen once, the list of each query, and the queries."""
        keys = min(self.seen, self.seq_len + self.seq_len // self.ratio)  # prompts see most keys more than once
        of_queries = self.num_heads * self.size * itemsize + 4 * self.topk
        return self.num_seqs * keys * self.size * (1 if self.fp8 else itemsize) + self.tokens * of_queries

    def writes(self, itemsize: int) -> int:
        """Count the outputs once."""
        return self.tokens * self.num_heads * self.size * itemsize

    def draw(self, device: torch.device, dtype: torch.dtype, seed: int) -> Compressed:
        """Draw queries, sinks, keys, entries, and the entries that are selected."""
        generator = torch.Generator(device).manual_seed(seed)

        def normal(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
            return torch.randn(*shape, dtype=dtype, device=device, generator=generator)

        batch = _batch(self.num_seqs, self.query_len, self.seq_len, self.block_size, generator)
        assert batch.block_table is not None
        per_block, blocks = self.block_size // self.ratio, batch.block_table.numel()
        arguments = dict(ratio=self.ratio, window_size=(WINDOW - 1, 0), block_size=self.block_size)
        arguments |= dict(entry_table=batch.block_table, entry_block_size=per_block)
        positions = None
        if self.topk:
            drawn = torch.rand(self.tokens, self.seq_len // self.ratio, generator=generator, device=device)
            incomplete = torch.arange(drawn.shape[1], device=device) >= (_at(batch)[:, None] + 1) // self.ratio
            best = drawn.masked_fill_(incomplete, -1.0).topk(self.topk, dim=1)
            positions = best.indices.where(best.values >= 0, -1).sort(1).values.int()
        pool = normal(blocks * (self.block_size + per_block), self.size)
        pool = pool.to(torch.float8_e4m3fn) if self.fp8 else pool
        sinks = normal(self.num_heads, dtype=torch.float32)
        return Compressed(normal(self.tokens, self.num_heads, self.size), sinks, pool, batch, arguments, positions)

    def judge(self, inputs: Compressed) -> Judge:
        """Compute the output of some queries in float64, as one softmax."""
        rows = sorted({i * (self.tokens - 1) // (SAMPLE - 1) for i in range(SAMPLE)})
        slots = _slots(inputs, rows)
        exact, low = (
            torch.stack([_attend(inputs, i, own, dtype) for i, own in zip(rows, slots, strict=True)])
            for dtype in (torch.float64, inputs.query.dtype)
        )

        def judge(out: Tensor, _: Any = None) -> None:
            hold(out[rows], exact, low, name="out")
            out.fill_(torch.nan)

        return judge


def _at(batch: Batch) -> Tensor:
    """Return the position of each query."""
    first, end = batch.max_seq_len - batch.max_query_len, batch.max_seq_len
    return torch.arange(first, end, device=batch.device).repeat(batch.num_seqs)


def _slots(inputs: Compressed, rows: list[int] | None = None) -> Tensor:
    """Return the slots in the one pool of the keys that each query sees, or some of them: of its window, then entries.

    -1 is none.
    """
    batch, arguments = inputs.batch, inputs.arguments
    assert batch.block_table is not None
    chosen = torch.arange(batch.num_seqs * batch.max_query_len, device=batch.device) if rows is None else rows
    at = _at(batch)[chosen][:, None]
    table = batch.block_table.repeat_interleave(batch.max_query_len, 0)[chosen].long()

    def slots(tokens: Tensor, block: int, first: int) -> Tensor:
        known = tokens.clamp(min=0)
        return (first + table.gather(1, known // block) * block + known % block).where(tokens >= 0, -1)

    window = at + torch.arange(1 - WINDOW, 1, device=at.device)
    if inputs.positions is None:
        entries = torch.arange(batch.max_seq_len // arguments["ratio"], device=at.device)
        entries = entries.where(entries < (at + 1) // arguments["ratio"], -1)
    else:
        entries = inputs.positions[chosen].long()
    of_window = slots(window, arguments["block_size"], 0)
    return torch.cat([of_window, slots(entries, arguments["entry_block_size"], inputs.cache.shape[:2].numel())], 1)


def _attend(inputs: Compressed, i: int, slots: Tensor, dtype: torch.dtype) -> Tensor:
    query, keys = inputs.query[i].to(dtype), torch.stack([inputs.pool[j] for j in slots[slots >= 0].tolist()]).to(dtype)
    scores = torch.cat([query @ keys.T * query.shape[-1] ** -0.5, inputs.sinks.to(dtype)[:, None]], 1)
    return scores.softmax(-1)[:, :-1] @ keys


def compressed_twin(package: str = "fastattn", kernel: str | None = None) -> Contender:
    """Our attention; with selected entries, their part of the plan is made in each layer, as each selects anew."""

    def prepare(inputs: Compressed) -> Call:
        path = importlib.import_module(f"{package}.compressed")
        step, options = path.plan(inputs.batch, **inputs.arguments), AttentionOptions(sinks=inputs.sinks)
        cache, entry_cache = inputs.cache, inputs.entry_cache

        def call() -> Tensor:
            plan = step if inputs.positions is None else path.select_entries(step, inputs.positions)
            with nullcontext() if kernel is None else use_kernel(kernel):
                out: Tensor = path.attention(inputs.query, cache, entry_cache, plan, options)
            return out

        return call

    return Contender(package if kernel is None else f"{package}, {kernel}", prepare)


def compressed_gathered() -> Contender:
    """All keys of a decode gathered into rows, and one softmax over them and the sink, by PyTorch."""

    def prepare(inputs: Compressed) -> Call:
        slots, scale = _slots(inputs), inputs.query.shape[-1] ** -0.5
        sinks = inputs.sinks.to(inputs.query.dtype).expand(len(inputs.query), -1)[..., None]

        def call() -> Tensor:
            keys = inputs.pool[slots]
            scores = torch.cat([torch.einsum("thd,tsd->ths", inputs.query, keys) * scale, sinks], -1)
            return torch.einsum("ths,tsd->thd", scores.softmax(-1)[..., :-1], keys)

        return call

    return Contender("gather, einsum, softmax", prepare)


def compressed_flash_mla() -> Contender:
    """FlashMLA's kernel for sparse prefills, over slots that are there already."""

    def prepare(inputs: Compressed) -> Call:
        slots, size = _slots(inputs), inputs.query.shape[-1]
        return flash_mla.prepare_selected(inputs.query, inputs.pool[None], slots, size, size**-0.5, sinks=inputs.sinks)

    return Contender("FlashMLA, slots known", prepare)


def compressed_flash_mla_fp8() -> Contender:
    """FlashMLA's kernel for decodes of DeepSeek-V4, over the same values in its own rows, and slots that are known."""

    def prepare(inputs: Compressed) -> Call:
        slots, size, count = _slots(inputs), inputs.query.shape[-1], inputs.cache.shape[:2].numel()
        window, entries = slots.split([WINDOW, slots.shape[1] - WINDOW], 1)
        pools = flash_mla.pack_keys(inputs.cache), flash_mla.pack_keys(inputs.entry_cache)
        lists = window, (entries - count).where(entries >= 0, -1)
        return flash_mla.prepare_two_pools(inputs.query, pools, lists, size**-0.5, inputs.sinks)

    return Contender("FlashMLA, slots known", prepare, rows="b t h d -> (b t) h d")


def compressed_attn_gym(impl: str = "fused") -> Contender:
    """attention-gym's `gather_attn`, over slots that are there already, without the window that it could have."""

    def prepare(inputs: Compressed) -> Call:
        slots = _slots(inputs).int()
        return attn_gym.prepare_gather(inputs.query, inputs.pool, slots, inputs.sinks, impl=impl)

    return Contender("attention-gym, slots known", prepare, rows="1 h t d -> t h d")


def compressed_attn_gym_prompts(impl: str = "fused") -> Contender:
    """attention-gym's `gather_attn` over prompts, with its window over the rows of their keys, and entries in rows."""

    def prepare(inputs: Compressed) -> Call:
        batch, ratio = inputs.batch, inputs.arguments["ratio"]
        table = batch.block_table
        assert table is not None and batch.max_query_len == batch.max_seq_len  # its window is over the new tokens
        rows, entries = (
            pool[table.long()].flatten(1, 2)[:, :count].flatten(0, 1)
            for pool, count in ((inputs.cache, batch.max_seq_len), (inputs.entry_cache, batch.max_seq_len // ratio))
        )
        lists = inputs.positions
        if lists is None:
            every = torch.arange(batch.max_seq_len // ratio, device=batch.device)
            lists = every.where(every < (_at(batch)[:, None] + 1) // ratio, -1).int()
        ends = batch.cu_seqlens_q // ratio  # sequences of one length
        return attn_gym.prepare_window(
            inputs.query, rows, entries, lists, batch.cu_seqlens_q, ends, WINDOW, inputs.sinks, impl=impl
        )

    return Contender("attention-gym, rows", prepare, rows="1 h t d -> t h d")


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
