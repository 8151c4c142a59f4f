"""What a row of the benchmark computes: a ragged batch to attend over, the least that it takes, and the right answer.

The right answer is drawn here from the plain formula in float64, on a sample of the query rows, and shares no code with
`refattn` or with any kernel. An answer counts when it keeps the rule of the tests (`refattn.conformance.tolerance`),
with the formula in the type of the input as `low`.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from einops import einsum, rearrange
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from refattn.conformance.tolerance import assert_close
from refattn.interface import Batch

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

    @property
    def tokens(self) -> int:
        """Keys of the first sequence."""
        return self.lens[0][1]

    def flops(self) -> int:
        """Count two products of `2 d` operations for each pair of a query and a key that it sees."""
        pairs = sum(int((last - first + 1).sum()) for first, last in self.sight())
        return 4 * self.head_size * self.heads[0] * pairs

    def reads(self, itemsize: int) -> int:
        """Count the queries once, and each key and value once that some query sees."""
        keys = sum(int(last.max() - first.min()) + 1 for first, last in self.sight())
        keys -= self.shared * (len(self.lens) - 1)
        return self.writes(itemsize) + 2 * itemsize * self.head_size * keys * self.heads[1]

    def writes(self, itemsize: int) -> int:
        """Count the outputs once; they are as large as the queries."""
        return itemsize * self.head_size * self.heads[0] * sum(query_len for query_len, _ in self.lens)

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

    def draw(self, device: torch.device, dtype: torch.dtype, seed: int) -> "Inputs":
        """Draw queries, keys and values, and lay the keys and values out in pages."""
        generator = torch.Generator(device).manual_seed(seed)

        def normal(rows: int, heads: int) -> Tensor:
            return torch.randn(rows, heads, self.head_size, dtype=dtype, device=device, generator=generator)

        query = normal(sum(query_len for query_len, _ in self.lens), self.heads[0])
        total = sum(seq_len for _, seq_len in self.lens)
        key, value = normal(total, self.heads[1]), normal(total, self.heads[1])
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

    def judge(self, inputs: "Inputs") -> Judge:
        """Compute the right answer of a sample of the queries of each sequence."""
        rows, exact, low = [], [], []
        for (q0, _), (k0, k1), sight in zip(self.query_rows(), self.key_rows(), self.sight(), strict=True):
            first, last = sight
            sample = self.sample(len(first))
            position = torch.arange(k1 - k0)
            visible = (position >= first[sample, None]) & (position <= last[sample, None])
            rows.append(sample + q0)
            pieces = inputs.query[sample + q0], inputs.key[k0:k1], inputs.value[k0:k1], visible.to(inputs.query.device)
            exact.append(self.formula(*(x.double() if x.is_floating_point() else x for x in pieces)))
            low.append(self.formula(*pieces))

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


class Inputs(NamedTuple):
    """The inputs of a work: the same keys and values as rows, one sequence after the other, and as pages."""

    work: Attention
    query: Float[Tensor, "t h d"]
    key: Float[Tensor, "s hk d"]
    value: Float[Tensor, "s hk d"]
    key_cache: Float[Tensor, "n p hk d"]
    value_cache: Float[Tensor, "n p hk d"]
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
    query: Float[Tensor, "t h d"], key: Float[Tensor, "s hk d"], value: Tensor, visible: Bool[Tensor, "t s"]
) -> tuple[Float[Tensor, "t h dv"], Float[Tensor, "t h"]]:
    """Compute `exp(query key / sqrt(d) - lse) value` over the visible keys, in the type of the inputs."""
    grouped = rearrange(query * query.shape[-1] ** -0.5, "t (hk g) d -> hk g t d", hk=key.shape[1])
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


class Tokens(NamedTuple):
    """The inputs of a cache write."""

    key: Float[Tensor, "t hk d"]
    value: Float[Tensor, "t hk d"]
    key_cache: Float[Tensor, "n p hk d"]
    value_cache: Float[Tensor, "n p hk d"]
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
