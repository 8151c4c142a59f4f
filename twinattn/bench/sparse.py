"""Work and contenders of intervals and of selected keys.

An index scan is bound by the bytes of the index keys, and a selection by reading the scores once. Attention to selected
keys reads each of them once for each query.
"""

import importlib
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from einops import einsum
from torch import Tensor

from fastattn import mla
from fastattn.kernels import use_kernel
from refattn.batch import Batch
from refattn.index_keys import INDEX_FORMAT, SCALE_BYTES
from refattn.options import AttentionOptions
from refattn.packed_latents import LATENT_GROUP, PACKED_FORMAT, packed_parts, packed_size
from refattn.plan import Plan
from twinattn.bench.contender import Contender, twin
from twinattn.bench.measure import Call
from twinattn.bench.work import Attention, Inputs, Judge, WrongAnswerError, hold
from twinattn.libraries import flash_mla

MOST_WRITTEN = 2**18  # latents that are drawn at a time
SAMPLE = 4  # sequences whose answer is checked


# --- intervals ---


@dataclass(frozen=True, repr=False)
class Spans(Attention):
    """Prompts with images, whose tokens see all of their image.

    Attributes:
        every: tokens from the beginning of an image to that of the next one.
        image: tokens of an image.
    """

    path: str = "interval"
    every: int = 1024
    image: int = 256

    def interval_rows(self, i: int) -> list[tuple[int, int]]:
        """Return the first and the last key that each query of a sequence may see."""
        q, s = self.lens[i]
        ends = [(at, at // self.every * self.every + self.image - 1) for at in range(s - q, s)]
        return [(0, min(end, s - 1) if at <= end else at) for at, end in ends]


def spans_twin(package: str = "fastattn", kernel: str | None = None) -> Contender:
    """Our attention under the intervals of the work, planned once per step."""

    def prepare(inputs: Inputs) -> Call:
        work, path = inputs.work, importlib.import_module(f"{package}.interval")
        last = torch.cat([work.span(i)[1] for i in range(len(work.lens))]).int().to(inputs.query.device)
        plan = path.plan(inputs.batch, last_visible=last, block_size=work.block_size)

        def call(**more: Any) -> Any:
            with nullcontext() if kernel is None else use_kernel(kernel):
                return path.attention(inputs.query, inputs.key_cache, inputs.value_cache, plan, **more)

        return call

    return Contender(package if kernel is None else f"{package}, {kernel}", prepare, lse=True)


def causal_call() -> Contender:
    """A yardstick: the causal call of our twin over the same keys, without the later keys of images."""
    return replace(
        twin("chunked_prefill", name="a causal call"),
        judge=lambda inputs: _causal(inputs.work).judge(inputs),
        prepare=lambda inputs: twin("chunked_prefill").prepare(inputs._replace(work=_causal(inputs.work))),
    )


def _causal(work: Attention) -> Attention:
    return Attention(
        "chunked_prefill", lens=work.lens, heads=work.heads, head_size=work.head_size, block_size=work.block_size
    )


# --- the index ---


class Indexed(NamedTuple):
    """Index queries, their weights, a quantized pool and scales, and the plan of a step."""

    query: Tensor
    weights: Tensor
    cache: Tensor
    plan: Plan


@dataclass(frozen=True)
class IndexScores:
    """Scores of decodes over an index of fp8.

    Attributes:
        num_seqs: decodes.
        seq_len: keys of each.
        num_heads: index heads.
        size: elements of an index key.
        block_size: tokens in a block.
    """

    num_seqs: int
    seq_len: int
    num_heads: int = 64
    size: int = 128
    block_size: int = 64

    def flops(self) -> int:
        """Count a product for each head and key."""
        return 2 * self.num_seqs * self.seq_len * self.num_heads * self.size

    def reads(self, itemsize: int) -> int:
        """Count each quantized value and each scale once, and the queries."""
        of_queries = self.num_seqs * self.num_heads * (self.size * itemsize + 4)
        return self.num_seqs * self.seq_len * (self.size + SCALE_BYTES) + of_queries

    def writes(self, itemsize: int) -> int:
        """Count a float32 for each key."""
        return 4 * self.num_seqs * self.seq_len

    def draw(self, device: torch.device, dtype: torch.dtype, seed: int) -> Indexed:
        """Draw queries and a pool in shuffled blocks."""
        generator = torch.Generator(device).manual_seed(seed)
        blocks = -(-self.seq_len // self.block_size)
        shape = (self.num_seqs * blocks, self.block_size, self.size + SCALE_BYTES)
        cache = torch.empty(shape, dtype=torch.uint8, device=device)
        pages, at = cache.flatten(1), self.block_size * self.size
        keys = torch.randn(len(cache), at, device=device, generator=generator)
        pages[:, :at] = keys.to(INDEX_FORMAT).view(torch.uint8)
        scales = torch.rand(len(cache), self.block_size, device=device, generator=generator) + 0.5
        pages[:, at:] = scales.view(torch.uint8)
        table = torch.randperm(len(cache), generator=generator, device=device).int().view(self.num_seqs, blocks)
        lens = torch.full((self.num_seqs,), self.seq_len, dtype=torch.int32, device=device)
        rows = torch.arange(self.num_seqs + 1, dtype=torch.int32, device=device)
        batch = Batch(rows, lens, table, 1, self.seq_len, self.num_seqs * self.seq_len, self.num_seqs)
        shape_of_queries = (self.num_seqs, self.num_heads, self.size)
        query = torch.randn(shape_of_queries, dtype=dtype, device=device, generator=generator)
        weights = torch.randn(shape_of_queries[:2], device=device, generator=generator)
        return Indexed(query, weights, cache, Plan(batch, self.block_size))

    def keys(self, inputs: Indexed, i: int) -> Tensor:
        """Return the index keys of a sequence as numbers."""
        assert inputs.plan.batch.block_table is not None
        pages = inputs.cache.flatten(1)[inputs.plan.batch.block_table[i].long()]
        at = self.block_size * self.size
        quantized = pages[:, :at].reshape(-1, self.size).view(INDEX_FORMAT).double()
        scales = pages[:, at:].contiguous().view(torch.float32).reshape(-1, 1)
        return (quantized * scales.double())[: self.seq_len]

    def judge(self, inputs: Indexed) -> Judge:
        """Compute the scores of some sequences in float64."""
        rows = range(min(SAMPLE, self.num_seqs))
        exact, low = (
            torch.stack([_score(inputs, self.keys(inputs, i), i, dtype) for i in rows])
            for dtype in (torch.float64, inputs.query.dtype)
        )

        def judge(scores: Tensor, _: Any = None) -> None:
            hold(scores[: len(exact)], exact, low, name="scores")
            scores.fill_(torch.nan)

        return judge


def _score(inputs: Indexed, keys: Tensor, i: int, dtype: torch.dtype) -> Tensor:
    products = einsum(inputs.query[i].to(dtype), keys.to(dtype), "h d, s d -> h s").relu()
    return einsum(inputs.weights[i].to(dtype), products, "h, h s -> s")


def scores_twin(package: str = "fastattn") -> Contender:
    """Our scores."""

    def prepare(inputs: Indexed) -> Call:
        return partial(importlib.import_module(f"{package}.sparse").scores, *inputs)

    return Contender(package, prepare)


def scores_einsum() -> Contender:
    """An einsum over numbers that are there already, in the type of the queries: twice the bytes, and no gather."""

    def prepare(inputs: Indexed) -> Call:
        batch = inputs.plan.batch
        _, num_heads, size = inputs.query.shape
        work = IndexScores(batch.num_seqs, batch.max_seq_len, num_heads, size, inputs.cache.shape[1])
        keys = torch.stack([work.keys(inputs, i).to(inputs.query.dtype) for i in range(batch.num_seqs)])

        def call() -> Tensor:
            products = torch.einsum("bhd,bsd->bhs", inputs.query, keys).relu_()
            return torch.einsum("bh,bhs->bs", inputs.weights.to(products.dtype), products).float()

        return call

    return Contender("einsum over numbers", prepare)


# --- the selection ---


@dataclass(frozen=True)
class Selection:
    """The best keys of some rows of scores, of which many are exactly 0.

    Attributes:
        rows: of scores.
        seq_len: scores of a row.
        topk: keys to select.
    """

    rows: int
    seq_len: int
    topk: int = 2048

    def flops(self) -> int:
        """Count none."""
        return 0

    def reads(self, itemsize: int) -> int:
        """Count each score once."""
        return 4 * self.rows * self.seq_len

    def writes(self, itemsize: int) -> int:
        """Count each position once."""
        return 4 * self.rows * self.topk

    def draw(self, device: torch.device, dtype: torch.dtype, seed: int) -> tuple[Tensor, int]:
        """Draw scores in float32, whatever the type of the layer is."""
        generator = torch.Generator(device).manual_seed(seed)
        scores = torch.randn(self.rows, self.seq_len, device=device, generator=generator)
        return scores.sub_(1.0).relu_(), self.topk

    def judge(self, inputs: tuple[Tensor, int]) -> Judge:
        """Expect the positions that the rule says."""
        scores, topk = inputs
        order = scores.sort(dim=1, descending=True, stable=True).indices[:, :topk].sort(dim=1).values

        def judge(selected: Tensor, _: Any = None) -> None:
            wrong = int((selected.long() != order).sum())
            if wrong:
                raise WrongAnswerError(f"select: {wrong} positions differ")
            selected.fill_(-7)

        return judge


def select_twin(package: str = "fastattn") -> Contender:
    """Our selection."""

    def prepare(inputs: tuple[Tensor, int]) -> Call:
        return partial(importlib.import_module(f"{package}.sparse").select, *inputs)

    return Contender(package, prepare)


def torch_topk() -> Contender:
    """`torch.topk`, whose choice among equal scores is its own: only its scores are held to the right ones."""

    def judge_scores(inputs: tuple[Tensor, int]) -> Judge:
        scores, topk = inputs
        best = scores.sort(dim=1, descending=True).values[:, :topk]

        def judge(selected: Tensor, _: Any = None) -> None:
            if not torch.equal(scores.gather(1, selected).sort(dim=1, descending=True).values, best):
                raise WrongAnswerError("topk: not the highest scores")

        return judge

    def prepare(inputs: tuple[Tensor, int]) -> Call:
        scores, topk = inputs
        return lambda: scores.topk(topk, dim=1, sorted=False).indices

    return Contender("torch.topk", prepare, judge=judge_scores)


# --- attention to what was selected ---


class Selected(NamedTuple):
    """Absorbed queries, latents, and the positions that each query sees."""

    query: Tensor
    cache: Tensor
    batch: Batch
    positions: Tensor
    rank: int


@dataclass(frozen=True)
class SelectedLatents:
    """Queries that attend to some latents of their sequence each, with the sizes of DeepSeek-V3.2.

    Attributes:
        num_seqs: sequences.
        seq_len: keys of each.
        topk: keys that each query sees.
        num_heads: query heads.
        rank: elements of a latent.
        rope: of its rotary key.
        block_size: tokens in a block.
        query_len: queries of each sequence.
        packed: latents are in rows of bytes, 656 with these sizes.
    """

    num_seqs: int
    seq_len: int
    topk: int = 2048
    num_heads: int = 128
    rank: int = 512
    rope: int = 64
    block_size: int = 64
    query_len: int = 1
    packed: bool = False

    @property
    def tokens(self) -> int:
        """Queries of all sequences."""
        return self.num_seqs * self.query_len

    def flops(self) -> int:
        """Count two products for each key that is seen."""
        return 2 * self.tokens * self.topk * self.num_heads * (2 * self.rank + self.rope)

    def reads(self, itemsize: int) -> int:
        """Count each selected latent once, its slot, and the queries."""
        size = self.rank + self.rope
        row = packed_size(self.rank, self.rope) if self.packed else size * itemsize
        seen = min(self.tokens * self.topk, self.num_seqs * self.seq_len)  # prompts read most latents more than once
        return seen * row + self.tokens * (4 * self.topk + self.num_heads * size * itemsize)

    def writes(self, itemsize: int) -> int:
        """Count the outputs once."""
        return self.tokens * self.num_heads * self.rank * itemsize

    def draw(self, device: torch.device, dtype: torch.dtype, seed: int) -> Selected:
        """Draw queries, latents in shuffled blocks, and positions."""
        generator = torch.Generator(device).manual_seed(seed)
        normal = partial(torch.randn, dtype=dtype, device=device, generator=generator)
        blocks, size = -(-self.seq_len // self.block_size), self.rank + self.rope
        table = torch.randperm(self.num_seqs * blocks, generator=generator, device=device).int()
        lens = torch.full((self.num_seqs,), self.seq_len, dtype=torch.int32, device=device)
        ends = torch.arange(self.num_seqs + 1, dtype=torch.int32, device=device) * self.query_len
        batch = Batch(ends, lens, table.view(self.num_seqs, blocks), self.query_len, self.seq_len, None, self.tokens)
        visible = self.seq_len - self.query_len + 1  # by the first query, and so by all
        drawn = torch.rand(self.tokens, visible, generator=generator, device=device)
        positions = drawn.topk(self.topk, dim=1).indices.sort(1).values.int()
        query, num_blocks = normal(self.tokens, self.num_heads, size), self.num_seqs * blocks
        if not self.packed:
            return Selected(query, normal(num_blocks, self.block_size, size), batch, positions, self.rank)
        pool = mla.allocate(num_blocks, self.block_size, self.rank, self.rope, dtype=torch.uint8, device=device)
        for slots in torch.arange(num_blocks * self.block_size, device=device).split(MOST_WRITTEN):
            mla.write(normal(len(slots), self.rank), normal(len(slots), self.rope), pool, slots)
        return Selected(query, pool, batch, positions, self.rank)

    def judge(self, inputs: Selected) -> Judge:
        """Compute the output of some queries in float64."""
        return judge_of_some(_attend, inputs, self.tokens)


def judge_of_some(attend: Callable[[Any, int, torch.dtype], Tensor], inputs: Any, num_tokens: int) -> Judge:
    """Return the judge of a work whose first few queries are computed in float64, each by `attend`."""
    exact, low = (
        torch.stack([attend(inputs, i, dtype) for i in range(min(SAMPLE, num_tokens))])
        for dtype in (torch.float64, inputs.query.dtype)
    )

    def judge(out: Tensor, _: Any = None) -> None:
        hold(out[: len(exact)], exact, low, name="out")
        out.fill_(torch.nan)

    return judge


def _attend(inputs: Selected, i: int, dtype: torch.dtype) -> Tensor:
    latents, query = _rows(inputs, _slots(inputs)[i], dtype), inputs.query[i].to(dtype)
    weights = (query @ latents.T * query.shape[-1] ** -0.5).softmax(-1)
    return weights @ latents[:, : inputs.rank]


def _rows(inputs: Selected, slots: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the latents and rotary keys in some slots as numbers, packed ones as the format says."""
    rows = inputs.cache.flatten(0, 1)[slots]
    if rows.dtype != torch.uint8:
        return rows.to(dtype)
    quantized, scales, rope_key = packed_parts(rows, inputs.rank, inputs.query.shape[-1] - inputs.rank)
    numbers = quantized.view(PACKED_FORMAT).to(dtype).unflatten(-1, (-1, LATENT_GROUP)) * scales.to(dtype)[..., None]
    return torch.cat([numbers.flatten(-2), rope_key.to(dtype)], -1)


def _slots(inputs: Selected) -> Tensor:
    assert inputs.batch.block_table is not None
    block_size, positions = inputs.cache.shape[1], inputs.positions.long()
    table = inputs.batch.block_table.repeat_interleave(inputs.batch.max_query_len, 0)
    return table.gather(1, positions // block_size).long() * block_size + positions % block_size


def selected_twin(package: str = "fastattn", kernel: str | None = None) -> Contender:
    """Our attention to selected latents; its plan is made in each layer, as each selects anew."""

    def prepare(inputs: Selected) -> Call:
        path, block_size = importlib.import_module(f"{package}.sparse"), inputs.cache.shape[1]
        options = AttentionOptions(softmax_scale=inputs.query.shape[-1] ** -0.5)

        def call() -> Tensor:
            plan = path.plan(inputs.batch, positions=inputs.positions, block_size=block_size)
            with nullcontext() if kernel is None else use_kernel(kernel):
                out: Tensor = path.latent_attention(inputs.query, inputs.cache, plan, options, latent_rank=inputs.rank)
            return out

        return call

    return Contender(package if kernel is None else f"{package}, {kernel}", prepare)


def gathered() -> Contender:
    """The selected latents gathered into rows, and PyTorch's own attention over them."""

    def prepare(inputs: Selected) -> Call:
        slots, scale = _slots(inputs), inputs.query.shape[-1] ** -0.5

        def call() -> Tensor:
            rows = _rows(inputs, slots, inputs.query.dtype)
            scores = torch.einsum("bhd,bsd->bhs", inputs.query, rows) * scale
            return torch.einsum("bhs,bsd->bhd", scores.softmax(-1), rows[..., : inputs.rank])

        return call

    return Contender("gather, einsum, softmax", prepare)


def selected_flash_mla() -> Contender:
    """FlashMLA's kernel for selected latents, over slots that are there already."""

    def prepare(inputs: Selected) -> Call:
        scale = inputs.query.shape[-1] ** -0.5
        return flash_mla.prepare_selected(inputs.query, inputs.cache, _slots(inputs), inputs.rank, scale)

    return Contender("FlashMLA, slots known", prepare)


def selected_flash_mla_packed() -> Contender:
    """FlashMLA's kernel for sparse decodes over packed latents, over slots that are there already."""

    def prepare(inputs: Selected) -> Call:
        slots, scale = _slots(inputs), inputs.query.shape[-1] ** -0.5
        return flash_mla.prepare_packed(inputs.query, inputs.cache, slots, inputs.rank, scale)

    return Contender("FlashMLA, slots known", prepare, rows="b t h r -> (b t) h r")
