"""What a row of the benchmark computes: a ragged batch, the minimum amount of work, and the right answer.

The right answer is computed here by the plain formula in float64, on a sample of the query rows. It shares no code with
`refattn` or with any kernel. An answer is accepted if it is within the tolerance of the tests
(`refattn.conformance.tolerance`), with the formula in the type of the input as `low`.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise
from random import Random
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from einops import einsum, rearrange
from jaxtyping import Bool, Float, Int64, Shaped
from torch import Tensor

from refattn.conformance.tolerance import assert_close
from refattn.interface import Batch, Fp8Scales, Int8Scales

SAMPLED_ROWS = 32  # queries of a sequence whose answer is checked


class WrongAnswerError(Exception):
    """An answer is not the right one, so its speed is not reported."""


Judge = Callable[..., None]  # judge(answer, lse=None) raises a WrongAnswerError


@runtime_checkable
class Work(Protocol):
    """What a row computes."""

    def flops(self) -> int:
        """Count the floating-point operations that it takes at least."""

    def reads(self, itemsize: int) -> int:
        """Count the bytes that have to be read at least."""

    def writes(self, itemsize: int) -> int:
        """Count the bytes that have to be written at least."""

    def draw(self, device: torch.device, dtype: torch.dtype, seed: int) -> Any:
        """Draw random inputs."""

    def judge(self, inputs: Any) -> Judge:
        """Compute the right answer for some inputs, and give the function that holds an answer against it."""


@dataclass(frozen=True)
class Attention:
    """Attention over a ragged batch, in rows and in shuffled pages.

    Attributes:
        lens: new tokens and keys of each sequence.
        heads: query heads and key heads.
        head_size: elements of a query, a key and a value.
        value_head_size: elements of a value, where that is another number; 0 where it is not.
        block_size: tokens in a block.
        causal: a query sees the keys up to its own position, else all of its sequence.
        window: the most keys that a query sees, its own included; 0 for all.
        chunk: the size of the chunks that a query can't see out of (local attention); 0 for none.
        shared: leading keys that all sequences have in the same blocks.
    """

    lens: tuple[tuple[int, int], ...]
    heads: tuple[int, int] = (32, 8)
    head_size: int = 128
    block_size: int = 16
    causal: bool = True
    window: int = 0
    chunk: int = 0
    shared: int = 0
    value_head_size: int = 0

    @property
    def value_size(self) -> int:
        """Elements of a value."""
        return self.value_head_size or self.head_size

    @property
    def tokens(self) -> int:
        """Keys of the first sequence."""
        return self.lens[0][1]

    def flops(self) -> int:
        """Count two products, of `2 d` and `2 dv` operations, for each pair of a query and a key that it sees."""
        pairs = sum(int((last - first + 1).sum()) for first, last in self.sight())
        return 2 * (self.head_size + self.value_size) * self.heads[0] * pairs

    def reads(self, itemsize: int) -> int:
        """Count the queries once, and each key and value once that some query sees."""
        of_keys = (self.head_size + self.value_size) * self.visible_keys() * self.heads[1]
        return itemsize * (self.head_size * self.heads[0] * self.new_tokens() + of_keys)

    def writes(self, itemsize: int) -> int:
        """Count the outputs once."""
        return itemsize * self.value_size * self.heads[0] * self.new_tokens()

    def new_tokens(self) -> int:
        """Count the queries of all sequences."""
        return sum(query_len for query_len, _ in self.lens)

    def visible_keys(self) -> int:
        """Count the keys that some query sees, those once that sequences share."""
        keys = sum(int(last.max() - first.min()) + 1 for first, last in self.sight())
        return keys - self.shared * (len(self.lens) - 1)

    def sight(self) -> Iterator[tuple[Int64[Tensor, "t"], Int64[Tensor, "t"]]]:
        """Return the first and the last key that each query sees, one sequence after the other."""
        for query_len, seq_len in self.lens:
            position = torch.arange(seq_len - query_len, seq_len)
            first = torch.zeros_like(position)
            if self.window:
                first = (position - self.window + 1).clamp(min=0)
            if self.chunk:
                first = position // self.chunk * self.chunk
            yield first, position if self.causal else torch.full_like(position, seq_len - 1)

    def pictures(self) -> Iterator[Callable[[Int64[Tensor, "n"]], Bool[Tensor, "n s"]]]:
        """Return what draws the mask of some queries of a sequence, one sequence after the other."""
        for (first, last), (_, seq_len) in zip(self.sight(), self.lens, strict=True):
            yield partial(_between, first, last, seq_len)

    def draw(self, device: torch.device, dtype: torch.dtype, seed: int) -> Any:
        """Draw queries, keys and values, and lay the keys and values out in pages."""
        generator = torch.Generator(device).manual_seed(seed)

        def normal(rows: int, heads: int, size: int) -> Tensor:
            return torch.randn(rows, heads, size, dtype=dtype, device=device, generator=generator)

        query = normal(self.new_tokens(), self.heads[0], self.head_size)
        total = sum(seq_len for _, seq_len in self.lens)
        key, value = (normal(total, self.heads[1], size) for size in (self.head_size, self.value_size))
        for rows in (key, value):
            for begin, _ in self.key_rows():
                rows[begin : begin + self.shared] = rows[: self.shared]
        return Inputs(self, query, key, value, *self.pages(key, value, self.block_size))

    def pages(self, key: Tensor, value: Tensor, block_size: int) -> tuple[Tensor, Tensor, Batch]:
        """Lay rows out in a shuffled pool of blocks; sequences have the blocks of their shared keys in common."""
        counts = [-(-seq_len // block_size) for _, seq_len in self.lens]
        common = self.shared // block_size
        num_blocks = sum(counts) - common * (len(counts) - 1)
        order = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(0)).int().to(key.device)
        table = order.new_zeros(len(counts), max(counts))
        pools = [x.new_zeros(num_blocks, block_size, *x.shape[1:]) for x in (key, value)]
        used = 0
        for i, (count, (begin, end)) in enumerate(zip(counts, self.key_rows(), strict=True)):
            old = common if i else 0
            table[i, :old] = table[0, :old]
            blocks = order[used : used + count - old]
            table[i, old:count] = blocks
            for rows, pool in zip((key, value), pools, strict=True):
                own = rows[begin + old * block_size : end]
                padded = own.new_zeros(len(blocks) * block_size, *own.shape[1:])
                padded[: len(own)] = own
                pool[blocks] = rearrange(padded, "(m p) hk d -> m p hk d", p=block_size)
            used += len(blocks)
        return pools[0], pools[1], self.batch(table)

    def batch(self, table: Tensor) -> Batch:
        """Make the batch of this work with some block table."""
        lens = torch.tensor(self.lens, dtype=torch.int32, device=table.device)
        return Batch(
            cu_seqlens_q=torch.nn.functional.pad(lens[:, 0].cumsum(0, dtype=torch.int32), (1, 0)),
            seq_lens=torch.tensor([seq_len for _, seq_len in self.lens], dtype=torch.int32, device=table.device),
            block_table=table,
            max_query_len=max(query_len for query_len, _ in self.lens),
            max_seq_len=max(seq_len for _, seq_len in self.lens),
            num_keys=sum(seq_len for _, seq_len in self.lens),
            num_tokens=sum(query_len for query_len, _ in self.lens),
        )

    def key_rows(self) -> list[tuple[int, int]]:
        """Return the first key row of each sequence, and the row past its last one."""
        return list(pairwise(accumulate((seq_len for _, seq_len in self.lens), initial=0)))

    def query_rows(self) -> list[tuple[int, int]]:
        """Return the first query row of each sequence, and the row past its last one."""
        return list(pairwise(accumulate((query_len for query_len, _ in self.lens), initial=0)))

    def judge(self, inputs: Any) -> Judge:
        """Compute the right answer of a sample of the queries of each sequence."""
        rows: list[Tensor] = []
        exact: list[tuple[Tensor, Tensor]] = []
        low: list[tuple[Tensor, Tensor]] = []
        pictures = zip(self.query_rows(), self.key_rows(), self.pictures(), strict=True)
        for (q0, q1), (k0, k1), picture in pictures:
            sample = self.sample(q1 - q0)
            rows.append(sample + q0)
            visible = picture(sample).to(inputs.query.device)
            for answers, dtype in ((exact, torch.float64), (low, inputs.query.dtype)):
                query = inputs.query[sample + q0].to(dtype)
                answers.append(self.formula(query, *self.keys_and_values(inputs, slice(k0, k1), dtype), visible))

        def judge(out: Tensor, lse: Tensor | None = None) -> None:
            sampled = torch.cat(rows).to(out.device)
            for name, answer, part in (("out", out, 0), ("lse", lse, 1)):
                if answer is None:
                    continue
                if len(answer) != len(inputs.query):
                    raise WrongAnswerError(f"{name}: {len(answer)} rows for {len(inputs.query)} queries")
                if not answer.isfinite().all():
                    raise WrongAnswerError(f"{name}: not every element is a finite number")
                hold(
                    answer[sampled],
                    torch.cat([sequence[part] for sequence in exact]),
                    torch.cat([sequence[part] for sequence in low]),
                    name=name,
                )
            out.fill_(torch.nan)  # the next answer may get this memory, and must not pass for having written it

        return judge

    def keys_and_values(self, inputs: Any, rows: slice, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return the keys and values of a sequence in some type."""
        return inputs.key[rows].to(dtype), inputs.value[rows].to(dtype)

    def sample(self, query_len: int) -> Int64[Tensor, "n"]:
        """Choose queries to check: the ends, both sides of each boundary of a chunk, and an even spread of the rest."""
        picked = torch.linspace(0, query_len - 1, min(query_len, SAMPLED_ROWS)).round().long()
        if self.chunk:
            boundaries = torch.arange(0, query_len, self.chunk)
            picked = torch.cat([picked, boundaries, (boundaries - 1).clamp(min=0)])
        return picked.unique()

    def formula(
        self, query: Float[Tensor, "t h d"], key: Float[Tensor, "s hk d"], value: Tensor, visible: Bool[Tensor, "t s"]
    ) -> tuple[Tensor, Tensor]:
        """Compute outputs and log-sum-exps in the type of the inputs."""
        return attend(query, key, value, visible)


def _between(first: Tensor, last: Tensor, seq_len: int, sample: Tensor) -> Bool[Tensor, "n s"]:
    position = torch.arange(seq_len)
    return (position >= first[sample, None]) & (position <= last[sample, None])


@dataclass(frozen=True)
class Drafts(Attention):
    """The verification of a drafted tree in each sequence: its new tokens are the nodes, each after a drawn one."""

    def parents(self) -> list[tuple[int, ...]]:
        """Return the node that each node follows, -1 for the root, tree by tree."""
        return [(-1, *map(Random(i).randrange, range(1, query_len))) for i, (query_len, _) in enumerate(self.lens)]

    def flops(self) -> int:
        """Count two products for each pair of a node and a key that it sees: those before the tree, and a branch."""
        pairs = sum(
            int(picture(torch.arange(q)).sum()) for (q, _), picture in zip(self.lens, self.pictures(), strict=True)
        )
        return 2 * (self.head_size + self.value_size) * self.heads[0] * pairs

    def pictures(self) -> Iterator[Callable[[Int64[Tensor, "n"]], Bool[Tensor, "n s"]]]:
        """Return what draws the mask of some nodes of a tree, one sequence after the other."""
        for parents, (query_len, seq_len) in zip(self.parents(), self.lens, strict=True):
            visible = torch.ones(query_len, seq_len, dtype=torch.bool)
            visible[:, seq_len - query_len :] = torch.eye(query_len, dtype=torch.bool)
            for node, parent in enumerate(parents):
                if parent >= 0:
                    visible[node] |= visible[parent]
            yield visible.__getitem__


class Inputs(NamedTuple):
    """The inputs of a work: the same keys and values as rows, one sequence after the other, and as pages."""

    work: Attention
    query: Float[Tensor, "t h d"]
    key: Float[Tensor, "s hk d"]
    value: Float[Tensor, "s hk dv"]
    key_cache: Float[Tensor, "n p hk d"]
    value_cache: Float[Tensor, "n p hk dv"]
    batch: Batch

    def paged(self, block_size: int) -> tuple[Tensor, Tensor, Batch]:
        """Return the same keys and values in pages of some size."""
        if block_size == self.work.block_size:
            return self.key_cache, self.value_cache, self.batch
        return self.work.pages(self.key, self.value, block_size)

    def rectangles(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return query, key and value as contiguous `[b, heads, length, d]`, for sequences of one length."""
        query, key, value = (
            rearrange(rows, "(b s) h d -> b h s d", b=len(self.work.lens)).contiguous()
            for rows in (self.query, self.key, self.value)
        )
        return query, key, value


def attend(
    query: Float[Tensor, "t h d"],
    key: Float[Tensor, "s hk d"],
    value: Tensor,
    visible: Bool[Tensor, "t s"],
    softmax_scale: float | None = None,
) -> tuple[Float[Tensor, "t h dv"], Float[Tensor, "t h"]]:
    """Compute `exp(scale query key - lse) value` over the visible keys, in the type of the inputs.

    Args:
        query: of one sequence.
        key: of the sequence.
        value: likewise.
        visible: which keys each query sees.
        softmax_scale: of the scores; `1 / sqrt(d)` if None.

    Returns:
        The outputs, and their log-sum-exps.
    """
    scale = query.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    grouped = rearrange(query * scale, "t (hk g) d -> hk g t d", hk=key.shape[1])
    scores = einsum(grouped, key, "hk g t d, s hk d -> hk g t s").masked_fill(~visible, -torch.inf)
    lse = scores.logsumexp(-1)
    out = einsum(torch.exp(scores - lse[..., None]), value, "hk g t s, s hk dv -> t hk g dv")
    return rearrange(out, "t hk g dv -> t (hk g) dv"), rearrange(lse, "hk g t -> t (hk g)")


def hold(out: Tensor, exact: Tensor, low: Tensor, *, name: str) -> None:
    """Hold an answer to the rule at the top of this file.

    Raises:
        WrongAnswerError: saying by how much it is off.
    """
    try:
        assert_close(out, exact, low, name=name)
    except AssertionError as error:
        raise WrongAnswerError(str(error)) from error


@dataclass(frozen=True)
class Layers:
    """The same attention in each layer of a step, over the same keys.

    Attributes:
        work: of a layer.
        count: layers.
    """

    work: Attention
    count: int

    def flops(self) -> int:
        """Count those of all layers."""
        return self.count * self.work.flops()

    def reads(self, itemsize: int) -> int:
        """Count those of all layers; keys that no cache holds are read in each."""
        return self.count * self.work.reads(itemsize)

    def writes(self, itemsize: int) -> int:
        """Count those of all layers."""
        return self.count * self.work.writes(itemsize)

    def draw(self, device: torch.device, dtype: torch.dtype, seed: int) -> Inputs:
        """Draw the inputs of a layer."""
        return self.work.draw(device, dtype, seed)

    def judge(self, inputs: Inputs) -> Judge:
        """Judge the answer of a layer."""
        return self.work.judge(inputs)


LAMBDA, LAMBDA_INIT, NORM_EPS = 0.6, 0.4, 1e-5  # of a differential layer


class Differential(Attention):
    """Differential attention: heads in interleaved pairs, two softmaxes over both values of a pair, and a norm."""

    def flops(self) -> int:
        """Count three products for each head: its scores, and a value that is twice as wide."""
        return super().flops() * 3 // 2

    def formula(
        self, query: Float[Tensor, "t h d"], key: Float[Tensor, "s hk d"], value: Tensor, visible: Bool[Tensor, "t s"]
    ) -> tuple[Tensor, Tensor]:
        """Compute outputs and the log-sum-exps of all heads in the type of the inputs."""
        wide = rearrange(value, "s (pairs two) d -> s pairs (two d)", two=2)
        halves = [attend(query[:, half::2], key[:, half::2], wide, visible) for half in (0, 1)]
        out = normed_difference(halves[0][0], halves[1][0])
        return out, rearrange([lse for _, lse in halves], "two t pairs -> t (pairs two)")


def normed_difference(first: Float[Tensor, "t pairs dv"], second: Float[Tensor, "t pairs dv"]) -> Tensor:
    """Subtract the second answer of each pair, norm both halves of the value together, and cut them into heads."""
    difference = first - LAMBDA * second
    normed = difference * torch.rsqrt(difference.square().mean(-1, keepdim=True) + NORM_EPS)
    return rearrange((1 - LAMBDA_INIT) * normed, "t pairs (two d) -> t (pairs two) d", two=2)


@dataclass(frozen=True)
class Coded(Attention):
    """Attention over pages of codes: the right answer is that of the numbers that the codes stand for.

    Attributes:
        stored: `torch.float8_e4m3fn`, or `torch.int8` for keys with their own scales and values with one per channel.
    """

    stored: torch.dtype = torch.float8_e4m3fn

    def reads(self, itemsize: int) -> int:
        """Count a byte for each element of a key and a value, the scales of int8 keys, and the queries."""
        of_keys = self.head_size + self.value_size + (4 if self.stored == torch.int8 else 0)
        of_queries = itemsize * self.head_size * self.heads[0] * self.new_tokens()
        return of_queries + of_keys * self.visible_keys() * self.heads[1]

    def draw(self, device: torch.device, dtype: torch.dtype, seed: int) -> "CodedInputs":
        """Draw queries, keys and values, round keys and values to codes, and lay the codes out in pages."""
        plain = super().draw(device, dtype, seed)
        of_value = torch.linspace(0.5, 2.0, self.heads[1], device=device)
        if self.stored != torch.int8:
            scales: Fp8Scales | Int8Scales = Fp8Scales(0.7, of_value, format=self.stored)
            key = (plain.key.float() / 0.7).to(self.stored)
            value = (plain.value.float() / of_value[:, None]).to(self.stored)
            pages = self.pages(key.view(torch.uint8), value.view(torch.uint8), self.block_size)
            numbers = key.float() * 0.7, value.float() * of_value[:, None]
        else:
            of_key = plain.key.float().abs().amax(-1, keepdim=True) / 127
            of_channel = plain.value.float().abs().amax(0) / 127
            key, value = (
                (x.float() / scale).round().to(torch.int8)
                for x, scale in ((plain.key, of_key), (plain.value, of_channel))
            )
            pages = self.pages(key, value, self.block_size)
            at_pages, _, _ = self.pages(of_key, of_key[..., :0], self.block_size)
            scales = Int8Scales(at_pages[..., 0].contiguous(), of_channel)
            numbers = key * of_key, value * of_channel
        key_cache, value_cache, batch = pages
        return CodedInputs(self, plain.query, *numbers, key_cache, value_cache, batch, scales, plain)

    def formula(
        self, query: Float[Tensor, "t h d"], key: Float[Tensor, "s hk d"], value: Tensor, visible: Bool[Tensor, "t s"]
    ) -> tuple[Tensor, Tensor]:
        """Compute outputs and log-sum-exps in the type of the inputs; over int8 keys, of rounded queries."""
        if self.stored == torch.int8:
            scale = query.float().abs().amax(-1, keepdim=True) / 127
            query = ((query.float() / scale).round().to(query.dtype)) * scale.to(query.dtype)
        return attend(query, key, value, visible)


@dataclass(frozen=True)
class CodedDrafts(Drafts, Coded):
    """The verification of a drafted tree in each sequence, over pages of codes."""


class CodedWeights(Coded):
    """The same as FlashAttention-3 computes it: queries are rounded to fp8, too, and weights, times 256."""

    def formula(
        self, query: Float[Tensor, "t h d"], key: Float[Tensor, "s hk d"], value: Tensor, visible: Bool[Tensor, "t s"]
    ) -> tuple[Tensor, Tensor]:
        """Compute it in float64 without, and in any other type with rounded weights: what the tolerance is twice of."""
        query = query.to(self.stored).to(torch.float64)
        out, lse = attend(query, key.to(torch.float64), value.to(torch.float64), visible)
        if value.dtype == torch.float64:
            return out, lse
        group = query.shape[1] // key.shape[1]
        scores = (
            einsum(query, key.double().repeat_interleave(group, 1), "t h d, s h d -> t h s") * query.shape[2] ** -0.5
        )
        scores = scores.masked_fill(~visible[:, None], -torch.inf)
        weights = ((scores - scores.amax(-1, keepdim=True)).exp() * 256).float().to(self.stored).double() / 256
        weights = weights * (scores.amax(-1) - lse).exp()[..., None]
        out = einsum(weights, value.double().repeat_interleave(group, 1), "t h s, s h d -> t h d")
        return out.to(value.dtype), lse


class CodedInputs(NamedTuple):
    """The inputs of attention over codes: what they stand for in rows, in float32, and the codes in pages."""

    work: Coded
    query: Float[Tensor, "t h d"]
    key: Float[Tensor, "s hk d"]
    value: Float[Tensor, "s hk dv"]
    key_cache: Shaped[Tensor, "n p hk d"]
    value_cache: Shaped[Tensor, "n p hk dv"]
    batch: Batch
    scales: Fp8Scales | Int8Scales
    plain: "Inputs"


@dataclass(frozen=True)
class Latents(Attention):
    """Latent attention with absorbed queries: one key head, whose values are the first elements of its keys.

    Attributes:
        size_before: elements of a query before absorption, which the scale is made of.
    """

    heads: tuple[int, int] = (128, 1)
    head_size: int = 512 + 64
    value_head_size: int = 512
    block_size: int = 64
    size_before: int = 128 + 64

    @property
    def softmax_scale(self) -> float:
        """The scale of the scores."""
        return self.size_before**-0.5

    def reads(self, itemsize: int) -> int:
        """Count the queries once, and each latent and rotary key once that some query sees."""
        return itemsize * self.head_size * (self.heads[0] * self.new_tokens() + self.visible_keys())

    def draw(self, device: torch.device, dtype: torch.dtype, seed: int) -> "LatentInputs":
        """Draw absorbed queries and latents, and lay the latents out in pages."""
        generator = torch.Generator(device).manual_seed(seed)
        shapes = (self.new_tokens(), self.heads[0]), (sum(seq_len for _, seq_len in self.lens), 1)
        query, rows = (
            torch.randn(*shape, self.head_size, dtype=dtype, device=device, generator=generator) for shape in shapes
        )
        cache, _, batch = self.pages(rows, rows[..., :0], self.block_size)
        return LatentInputs(self, query, rows, rows[..., : self.value_size], cache.squeeze(2), batch)

    def formula(
        self, query: Float[Tensor, "t h d"], key: Float[Tensor, "s hk d"], value: Tensor, visible: Bool[Tensor, "t s"]
    ) -> tuple[Tensor, Tensor]:
        """Compute outputs and log-sum-exps in the type of the inputs."""
        return attend(query, key, value, visible, self.softmax_scale)


class LatentDrafts(Latents, Drafts):
    """The verification of a drafted tree in each sequence, over latents."""


class CodedLatents(Latents):
    """The same over codes of fp8: the right answer is that of the numbers that the codes stand for."""

    def reads(self, itemsize: int) -> int:
        """Count the queries once, and a byte for each element of a latent and a rotary key that some query sees."""
        return self.head_size * (itemsize * self.heads[0] * self.new_tokens() + self.visible_keys())

    def draw(self, device: torch.device, dtype: torch.dtype, seed: int) -> "LatentInputs":
        """Draw absorbed queries and latents, round latents to codes, and lay the codes out in pages."""
        plain, scale = super().draw(device, dtype, seed), 0.7
        codes = (plain.key.float() / scale).to(torch.float8_e4m3fn)
        pages, _, batch = self.pages(codes.view(torch.uint8), codes[..., :0].view(torch.uint8), self.block_size)
        rows, cache = codes.float() * scale, pages.squeeze(2).view(codes.dtype)
        return LatentInputs(self, plain.query, rows, rows[..., : self.value_size], cache, batch, scale, plain)


class LatentInputs(NamedTuple):
    """The inputs of absorbed latent attention: the same latents as rows, one sequence after the other, and as pages.

    Of codes the rows are what they stand for, `cache_scale` is their scale, and `plain` what they were made of.
    """

    work: Latents
    query: Float[Tensor, "t h d"]
    key: Float[Tensor, "s 1 d"]
    value: Float[Tensor, "s 1 r"]
    cache: Float[Tensor, "n p d"]
    batch: Batch
    cache_scale: float = 1.0
    plain: "LatentInputs | None" = None


@dataclass(frozen=True)
class LatentPrefill(Attention):
    """Latent attention of new tokens, whose keys and values are made of latents, as are those of their context.

    Attributes:
        latent_rank: elements of a latent.
        rope_size: elements of a query and a key that are rotary.
        workspace: the most tokens of the context whose keys and values are made at a time.
    """

    heads: tuple[int, int] = (16, 16)
    head_size: int = 128 + 64
    value_head_size: int = 128
    block_size: int = 64
    latent_rank: int = 512
    rope_size: int = 64
    workspace: int = 16384

    @property
    def made_size(self) -> int:
        """Elements of a key and a value of one head that are made of a latent."""
        return self.head_size - self.rope_size + self.value_size

    def flops(self) -> int:
        """Count the products that make keys and values besides, once for each."""
        return super().flops() + 2 * self.latent_rank * self.heads[0] * self.made_size * self.visible_keys()

    def reads(self, itemsize: int) -> int:
        """Count the queries, each latent and rotary key, and the projections once."""
        queries = self.head_size * self.heads[0] * self.new_tokens()
        latents = (self.latent_rank + self.rope_size) * self.visible_keys()
        return itemsize * (queries + latents + self.latent_rank * self.heads[0] * self.made_size)

    def draw(self, device: torch.device, dtype: torch.dtype, seed: int) -> "LatentPrefillInputs":
        """Draw queries, latents and projections, and lay the latents out in pages."""
        generator = torch.Generator(device).manual_seed(seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, dtype=dtype, device=device, generator=generator)

        h, rank = self.heads[0], self.latent_rank
        query = normal(self.new_tokens(), h, self.head_size)
        rows = normal(sum(seq_len for _, seq_len in self.lens), rank + self.rope_size)
        key_projection = normal(h, self.head_size - self.rope_size, rank) * rank**-0.5
        value_projection = normal(h, self.value_size, rank) * rank**-0.5
        cache, _, batch = self.pages(rows[:, None], rows[:, None, :0], self.block_size)
        new = torch.cat([rows[end - q : end] for (q, _), (_, end) in zip(self.lens, self.key_rows(), strict=True)])
        return LatentPrefillInputs(
            self, query, rows, new[:, :rank], new[:, rank:], cache.squeeze(2), batch, key_projection, value_projection
        )

    def keys_and_values(self, inputs: Any, rows: slice, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Make the keys and values of a sequence in some type."""
        to_key, to_value = (x.to(dtype) for x in (inputs.key_projection, inputs.value_projection))
        return made_of_latents(inputs.rows[rows].to(dtype), to_key, to_value)


class LatentPrefillInputs(NamedTuple):
    """The inputs of a prefill over latents: all of them as rows, the new ones, and all of them as pages."""

    work: LatentPrefill
    query: Float[Tensor, "t h d"]
    rows: Float[Tensor, "s c"]
    latent: Float[Tensor, "t r"]
    rope_key: Float[Tensor, "t rope"]
    cache: Float[Tensor, "n p c"]
    batch: Batch
    key_projection: Float[Tensor, "h nope r"]
    value_projection: Float[Tensor, "h dv r"]


def made_of_latents(
    rows: Float[Tensor, "s c"], key_projection: Float[Tensor, "h nope r"], value_projection: Float[Tensor, "h dv r"]
) -> tuple[Float[Tensor, "s h d"], Float[Tensor, "s h dv"]]:
    """Make the keys and values of every head of rows `[latent, rotary key]`, by one product each."""
    h, _, rank = key_projection.shape
    latent, rope_key = rows[:, :rank], rows[:, None, rank:].expand(-1, h, -1)
    key, value = ((latent @ x.flatten(0, 1).mT).unflatten(1, (h, -1)) for x in (key_projection, value_projection))
    return torch.cat([key, rope_key], dim=-1), value


@dataclass(frozen=True)
class CacheWrite:
    """New tokens written into the pool at shuffled slots.

    Attributes:
        num_tokens: tokens to write.
        num_kv_heads: key heads.
        head_size: elements of a key and of a value.
        block_size: tokens in a block.
    """

    num_tokens: int
    num_kv_heads: int = 8
    head_size: int = 128
    block_size: int = 16

    def flops(self) -> int:
        """Count none."""
        return 0

    def reads(self, itemsize: int) -> int:
        """Count each new key and value once."""
        return 2 * itemsize * self.num_tokens * self.num_kv_heads * self.head_size

    def writes(self, itemsize: int) -> int:
        """Count them once more, in the pool."""
        return self.reads(itemsize)

    def draw(self, device: torch.device, dtype: torch.dtype, seed: int) -> "Tokens":
        """Draw tokens, an empty pool twice their size, and a slot for each."""
        generator = torch.Generator(device).manual_seed(seed)
        shape = (self.num_tokens, self.num_kv_heads, self.head_size)
        key, value = (torch.randn(shape, dtype=dtype, device=device, generator=generator) for _ in range(2))
        pool = key.new_zeros(2 * self.num_tokens // self.block_size, self.block_size, *shape[1:])
        slots = torch.randperm(2 * self.num_tokens, generator=generator, device=device)[: self.num_tokens]
        return Tokens(key, value, pool, pool.clone(), slots)

    def judge(self, inputs: "Tokens") -> Judge:
        """Expect each token at its slot, bit by bit, and zeros everywhere else."""

        def judge(_: Any) -> None:
            for name, rows, pool in (
                ("key_cache", inputs.key, inputs.key_cache),
                ("value_cache", inputs.value, inputs.value_cache),
            ):
                flat = rearrange(pool, "n p hk d -> (n p) hk d")
                expected = torch.zeros_like(flat).index_copy_(0, inputs.slots, rows)
                wrong = int((flat != expected).sum())
                pool.zero_()  # the next one has to write it again
                if wrong:
                    raise WrongAnswerError(f"{name}: {wrong} elements differ")

        return judge


class CodedWrite(CacheWrite):
    """The same into a pool of fp8, each head under a scale of its own."""

    def writes(self, itemsize: int) -> int:
        """Count a byte for each element in the pool."""
        return self.reads(1)

    def draw(self, device: torch.device, dtype: torch.dtype, seed: int) -> "Tokens":
        """Draw tokens, an empty pool of codes twice their size, and a slot for each."""
        key, value, *pools, slots = super().draw(device, dtype, seed)
        key_cache, value_cache = (pool.to(torch.uint8) for pool in pools)
        return Tokens(key, value, key_cache, value_cache, slots)

    def scales(self, device: torch.device) -> tuple[Float[Tensor, "hk"], Float[Tensor, "hk"]]:
        """Return the scales of keys and of values, by head."""
        by_head = torch.linspace(0.3, 1.7, self.num_kv_heads, device=device)
        return by_head, by_head.flip(0).contiguous()

    def judge(self, inputs: "Tokens") -> Judge:
        """Expect the code of each token at its slot, bit by bit, and zeros everywhere else."""
        scales = self.scales(inputs.key.device)
        coded = [
            (x.float() / scale[:, None]).to(torch.float8_e4m3fn).view(torch.uint8)
            for x, scale in zip((inputs.key, inputs.value), scales, strict=True)
        ]
        return super().judge(inputs._replace(key=coded[0], value=coded[1]))


class Tokens(NamedTuple):
    """The inputs of a cache write."""

    key: Float[Tensor, "t hk d"]
    value: Float[Tensor, "t hk d"]
    key_cache: Shaped[Tensor, "n p hk d"]
    value_cache: Shaped[Tensor, "n p hk d"]
    slots: Int64[Tensor, "t"]


@dataclass(frozen=True)
class Decodes:
    """The tables of a step of decodes of random lengths, without any keys.

    Attributes:
        num_seqs: sequences, each with one new token.
        longest: the most tokens of a sequence.
        chunk: tokens in a chunk of local attention.
        block_size: tokens in a block.
    """

    num_seqs: int
    longest: int
    chunk: int
    block_size: int = 16

    def flops(self) -> int:
        """Count none."""
        return 0

    def reads(self, itemsize: int) -> int:
        """Count both lengths and one block of each sequence."""
        return 4 * self.num_seqs * 3

    def writes(self, itemsize: int) -> int:
        """Count two lengths of each sequence, or one slot in 64 bits."""
        return 4 * self.num_seqs * 2

    def draw(self, device: torch.device, dtype: torch.dtype, seed: int) -> "Step":
        """Draw lengths and a block table."""
        generator = torch.Generator().manual_seed(seed)
        b, columns = self.num_seqs, self.longest // self.block_size
        batch = Batch(
            cu_seqlens_q=torch.arange(b + 1, dtype=torch.int32, device=device),
            seq_lens=torch.randint(1, self.longest + 1, (b,), generator=generator).int().to(device),
            block_table=torch.randperm(b * columns, generator=generator).int().view(b, columns).to(device),
            max_query_len=1,
            max_seq_len=self.longest,
        )
        return Step(self, batch)


class Step(NamedTuple):
    """The inputs of the tables of a step."""

    work: Decodes
    batch: Batch

    @property
    def sequences(self) -> list[tuple[int, list[int]]]:
        """The length and the blocks of each sequence."""
        assert self.batch.block_table is not None
        return list(zip(self.batch.seq_lens.tolist(), self.batch.block_table.tolist(), strict=True))


class VirtualBatches(Decodes):
    """The virtual batches of local attention: for a decode the chunk that its token is in."""

    def reads(self, itemsize: int) -> int:
        """Count the blocks of a chunk of each sequence besides."""
        return super().reads(itemsize) + self._blocks()

    def writes(self, itemsize: int) -> int:
        """Count them in the new table too."""
        return super().writes(itemsize) + self._blocks()

    def _blocks(self) -> int:
        return 4 * self.num_seqs * self.chunk // self.block_size

    def judge(self, inputs: Step) -> Judge:
        """Expect one virtual sequence with a query for each sequence, over the blocks of its last chunk."""

        def judge(virtual: Batch) -> None:
            asking = virtual.query_lens.tolist()
            answers = [sequence for i, sequence in enumerate(Step(self, virtual).sequences) if asking[i]]
            for (seq_len, blocks), (num_keys, kept) in zip(inputs.sequences, answers, strict=True):
                begin = (seq_len - 1) // self.chunk * self.chunk
                expected = blocks[begin // self.block_size : (seq_len - 1) // self.block_size + 1]
                if num_keys != seq_len - begin or kept[: len(expected)] != expected:
                    raise WrongAnswerError(f"a sequence of {seq_len} tokens: {num_keys} keys, blocks {kept}")

        return judge


class Slots(Decodes):
    """The slots that the new tokens are written to."""

    def judge(self, inputs: Step) -> Judge:
        """Expect the row of the last token in its sequence's last block."""

        def judge(slots: Tensor) -> None:
            for (seq_len, blocks), slot in zip(inputs.sequences, slots.tolist(), strict=True):
                block, row = divmod(seq_len - 1, self.block_size)
                if slot != blocks[block] * self.block_size + row:
                    raise WrongAnswerError(f"slot {slot} for token {seq_len - 1} in blocks {blocks}")

        return judge
