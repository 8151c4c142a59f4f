"""What a row of the benchmark computes: a workload, the minimum amount of work, and the right answer.

The right answer is that of the oracle (`twinattn.kit.oracle`) in float64, on a sample of the query rows. It
shares no code with the reference or with any kernel. An answer is accepted if it is within the tolerance of the tests
(`twinattn.kit.tolerance`), with the reference formula in the type of the input as `low`.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, pairwise
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from einops import rearrange
from jaxtyping import Float, Int64, Shaped
from torch import Tensor

from refattn import attention as reference
from refattn.batch import Batch
from refattn.four_bits import Int4Scales
from refattn.modes import computing_in
from refattn.rounding import from_int4, to_int4
from refattn.scales import Fp8Scales, Int8Scales
from twinattn.kit import oracle
from twinattn.kit.oracle import Sight, sight
from twinattn.kit.tolerance import assert_close
from twinattn.kit.workload import Workload

SAMPLED_ROWS = 32  # queries of a sequence whose answer is checked
FORMATS = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2, "int8": torch.int8, "int4": torch.uint8}
LAMBDA, LAMBDA_INIT, NORM_EPS = 0.6, 0.4, 1e-5  # constants of a differential layer
KEY_SCALE = 0.7  # the scale of fp8 keys


class WrongAnswerError(Exception):
    """An answer is not the right one, so its speed is not reported."""


Judge = Callable[..., None]  # judge(answer, lse=None) raises a WrongAnswerError
Attend = Callable[..., tuple[Tensor, Tensor]]  # attend(query, key, value, sight, scale)


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


@dataclass(frozen=True, repr=False)
class Attention(Workload):
    """Attention over a ragged batch, in rows and in shuffled pages.

    A workload with the heads of a server, where nothing else is said. Differential heads are interleaved; fp8 has one
    scale for keys and one for the values of each head, int8 one for each key and one for each channel of the values,
    int4 one for each key and each value.

    Attributes:
        made: elements of a key and a value that are made of a latent, the rotary part left out.
    """

    path: str = "chunked_prefill"
    heads: tuple[int, int] = (32, 8)
    head_size: int = 128
    made: tuple[int, int] = (128, 128)

    @property
    def made_sizes(self) -> tuple[int, int]:
        """Elements of a key and a value that are made of a latent."""
        return self.made

    @property
    def tokens(self) -> int:
        """Keys of the first sequence."""
        return self.lens[0][1]

    @property
    def shared(self) -> int:
        """Leading keys that all sequences have in the same blocks."""
        return self.prefixes[0][2] * self.block_size if self.prefixes else 0

    @property
    def is_latent(self) -> bool:
        """Whether keys and values are those of a latent, or made of it."""
        return self.path in ("mla", "mla_prefill")

    def flops(self) -> int:
        """Count two products for each pair of a query and a key that it sees, and those that make keys and values.

        A differential head has three: its scores, and a value that is twice as wide. Of ranks, count those of one.
        """
        flops = 2 * (self.query_size + self.output_size) * self.heads[0] * sum(map(self._pairs, range(len(self.lens))))
        if self.path == "differential":
            flops = flops * 3 // 2
        if self.path == "mla_prefill":
            flops += 2 * self.value_size * self.heads[0] * sum(self.made) * self.visible_keys()
        return flops // self._shares

    def reads(self, itemsize: int) -> int:
        """Count the queries once, and each key and value, or latent, once that some query sees.

        Also count the scales of int8 keys and of int4 pages, and the projections of latents.
        """
        of_queries = itemsize * self.query_size * self.heads[0] * self.num_tokens
        elements = self.head_size if self.is_latent else (self.head_size + self.value_size) * self.heads[1]
        of_key = elements * (itemsize if self.stored == "numbers" else 1)
        if self.stored == "int8":
            of_key += 4 * self.heads[1]
        if self.stored == "int4":
            of_key = of_key // 2 + 2 * 4 * self.heads[1]
        of_projections = itemsize * self.value_size * self.heads[0] * sum(self.made)
        reads = of_queries + of_key * self.visible_keys() + (of_projections if self.path == "mla_prefill" else 0)
        return reads // self._shares

    def writes(self, itemsize: int) -> int:
        """Count the outputs once."""
        return itemsize * self.output_size * self.heads[0] * self.num_tokens

    @property
    def _shares(self) -> int:
        """Ranks that share the keys: the least that one of them reads and computes is its share."""
        return self.ranks if self.path == "context_parallel" else 1

    def _pairs(self, i: int) -> int:
        """Count the pairs of a query and a key that it sees, in a sequence."""
        if self.has_trees:
            return int(sight(self, i).visible.sum())
        first, last = self.span(i)
        return int((last - first + 1).sum())

    def visible_keys(self) -> int:
        """Count the keys that some query sees, those once that sequences share."""
        spans = [self.span(i) for i in range(len(self.lens))]
        keys = sum(int(last.max() - first.min()) + 1 for first, last in spans)
        return keys - self.shared * (len(self.lens) - 1)

    def draw(self, device: torch.device, dtype: torch.dtype, seed: int) -> "Inputs":
        """Draw queries, keys and values or latents, and lay the keys and values out in pages."""
        generator = torch.Generator(device).manual_seed(seed)
        normal = partial(torch.randn, dtype=dtype, device=device, generator=generator)
        (h, hk), total = self.heads, sum(seq_len for _, seq_len in self.lens)
        query = normal(self.num_tokens, h, self.query_size)
        if self.is_latent:
            inputs = self._of_latents(query, normal(total, 1, self.head_size))
        else:
            key, value = (normal(total, hk, size) for size in (self.head_size, self.value_size))
            for rows in (key, value):
                for begin, _ in self.key_rows():
                    rows[begin : begin + self.shared] = rows[: self.shared]
            inputs = Inputs(self, query, key, value, *self.pages(key, value, self.block_size))
        if self.path == "mla_prefill":
            sizes, rank = self.made_sizes, self.value_size
            return inputs._replace(projections=tuple(normal(h, size, rank) * rank**-0.5 for size in sizes))
        return inputs if self.stored == "numbers" else _quantized(inputs)

    def _of_latents(self, query: Tensor, rows: Tensor) -> "Inputs":
        """Lay latents out in pages; their values are the first elements of their keys."""
        pages, _, batch = self.pages(rows, rows[..., :0], self.block_size)
        cache = pages.squeeze(2)
        return Inputs(self, query, rows, rows[..., : self.value_size], cache, cache, batch)

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

    def judge(self, inputs: "Inputs", formula: Callable[..., tuple[Tensor, Tensor]] | None = None) -> Judge:
        """Compute the right answer of a sample of the queries of each sequence.

        Args:
            inputs: that were drawn.
            formula: computes it; that of the path if None.
        """
        compute, rows = formula or the_formula, []
        exact: list[tuple[Tensor, Tensor]] = []
        low: list[tuple[Tensor, Tensor]] = []
        for i, ((q0, q1), (k0, k1)) in enumerate(zip(self.query_rows(), self.key_rows(), strict=True)):
            sample = self.sample(q1 - q0)
            rows.append(sample + q0)
            seen = Sight(*(x.to(inputs.query.device) for x in sight(self, i, sample)))
            for answers, attend, dtype in (
                (exact, _exactly, torch.float64),
                (low, _by_reference, inputs.query.dtype),
            ):
                query = inputs.query[sample + q0].to(dtype)
                answers.append(compute(self, attend, query, *self.keys_and_values(inputs, slice(k0, k1), dtype), seen))

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

    def keys_and_values(self, inputs: "Inputs", rows: slice, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return the keys and values of a sequence in some type."""
        if self.path == "mla_prefill":
            return made_of_latents(inputs.key[rows, 0].to(dtype), *(x.to(dtype) for x in inputs.projections))
        return inputs.key[rows].to(dtype), inputs.value[rows].to(dtype)

    def sample(self, query_len: int) -> Int64[Tensor, "n"]:
        """Choose queries to check: the ends, both sides of each boundary of a chunk, and an even spread of the rest."""
        picked = torch.linspace(0, query_len - 1, min(query_len, SAMPLED_ROWS)).round().long()
        if self.chunk:
            boundaries = torch.arange(0, query_len, self.chunk)
            picked = torch.cat([picked, boundaries, (boundaries - 1).clamp(min=0)])
        return picked.unique()


def workload(
    lens: tuple[tuple[int, int], ...],
    *,
    path: str = "",
    window: int = 0,
    chunk: int = 0,
    shared: int = 0,
    block_size: int = 16,
    **more: Any,
) -> Attention:
    """Make a workload out of numbers of tokens.

    Args:
        lens: new tokens and keys of each sequence.
        path: that of what the next three say, if empty.
        window: the most keys that a query sees, its own included; 0 for all.
        chunk: the size of the chunks that a query can't see out of (local attention); 0 for none.
        shared: leading keys that all sequences have in the same blocks.
        block_size: tokens in a block.
        more: fields of an `Attention`.

    Raises:
        ValueError: if chunks or the shared keys end within a block.
    """
    if chunk % block_size or shared % block_size:
        raise ValueError(f"chunk, shared: expected multiples of block_size={block_size}, got {chunk} and {shared}")
    path = path or ("local" if chunk else "sliding_window" if window else "cascade" if shared else "chunked_prefill")
    return Attention(
        path,
        lens=lens,
        block_size=block_size,
        window=(window - 1, 0) if window else (-1, -1),
        chunk_blocks=chunk // block_size or 1,
        prefixes=((0, len(lens), shared // block_size),) if shared else (),
        **more,
    )


def latents(lens: tuple[tuple[int, int], ...], *, size_before: int = 192, **more: Any) -> Attention:
    """Make a workload of latent attention with absorbed queries, with the sizes of DeepSeek-V3.

    Args:
        lens: new tokens and keys of each sequence.
        size_before: elements of a query before absorption, which the scale is made of.
        more: fields of an `Attention`.
    """
    sizes = dict(heads=(128, 1), head_size=512 + 64, value_head_size=512, block_size=64)
    return Attention("mla", lens=lens, softmax_scale=size_before**-0.5, **{**sizes, **more})


def latent_prefill(lens: tuple[tuple[int, int], ...], **more: Any) -> Attention:
    """Make a workload of latent attention whose new tokens have keys and values made of latents, as has their context.

    Args:
        lens: new tokens and keys of each sequence.
        more: fields of an `Attention`.
    """
    sizes: dict[str, Any] = dict(heads=(16, 16), head_size=512 + 64, value_head_size=512, block_size=64)
    return Attention("mla_prefill", lens=lens, **{**sizes, "workspace": 8192, **more})


def drafts(lens: tuple[tuple[int, int], ...], **more: Any) -> Attention:
    """Make a workload of drafted trees: the new tokens of a sequence are the nodes, each after a drawn one."""
    return Attention("speculative", lens=lens, trees="rooted", **more)


class Inputs(NamedTuple):
    """The inputs of a workload: the same keys and values as rows, one sequence after the other, and as pages.

    Attributes:
        work: whose they are.
        query: `[t, h, d]`.
        key: of a quantized cache the numbers that it stands for; latents `[s, 1, d]`.
        value: likewise.
        key_cache: pages `[n, p, hk, d]`, of latents `[n, p, d]`.
        value_cache: likewise; of latents the same.
        batch: with the block table.
        scales: of a quantized cache; one number of latents.
        plain: what was quantized.
        projections: what makes a key and a value of a latent, `[h, size, r]`.
    """

    work: Attention
    query: Float[Tensor, "t h d"]
    key: Float[Tensor, "s hk d"]
    value: Float[Tensor, "s hk dv"]
    key_cache: Shaped[Tensor, "n p ..."]
    value_cache: Shaped[Tensor, "n p ..."]
    batch: Batch
    scales: Any = None
    plain: Any = None  # Inputs
    projections: tuple[Tensor, ...] = ()

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

    def new_rows(self) -> Tensor:
        """Return the keys of the new tokens, or their latents, `[t, hk, d]`."""
        ends = zip(self.work.lens, self.work.key_rows(), strict=True)
        return torch.cat([self.key[end - query_len : end] for (query_len, _), (_, end) in ends])


def _quantized(plain: Inputs) -> Inputs:
    """Round keys and values, or latents, and lay them out in pages once more."""
    work, kind = plain.work, FORMATS[plain.work.stored]
    path = work.path if work.is_latent else work.plan_of or "chunked_prefill"
    plain = plain._replace(work=replace(work, path=path, stored="numbers"))
    if work.is_latent:
        quantized = (plain.key.float() / KEY_SCALE).to(kind)
        inputs = work._of_latents(plain.query, quantized.view(torch.uint8))
        rows, cache = quantized.float() * KEY_SCALE, inputs.key_cache.view(kind)
        value = rows[..., : work.value_size]
        return inputs._replace(key=rows, value=value, key_cache=cache, value_cache=cache, scales=KEY_SCALE, plain=plain)
    if work.stored == "int4":
        (key, of_key), (value, of_value) = to_int4(plain.key), to_int4(plain.value)
        pages = work.pages(key, value, work.block_size)
        of_keys, of_values, _ = work.pages(of_key[..., None], of_value[..., None], work.block_size)
        beside = Int4Scales(of_keys[..., 0].contiguous(), of_values[..., 0].contiguous())
        key, value = (from_int4(x, scale, torch.float32) for x, scale in ((key, of_key), (value, of_value)))
        return Inputs(work, plain.query, key, value, *pages, scales=beside, plain=plain)
    of_value = torch.linspace(0.5, 2.0, work.heads[1], device=plain.query.device)
    if kind != torch.int8:
        scales: Fp8Scales | Int8Scales = Fp8Scales(KEY_SCALE, of_value, format=kind)
        key = (plain.key.float() / KEY_SCALE).to(kind)
        value = (plain.value.float() / of_value[:, None]).to(kind)
        pages = work.pages(key.view(torch.uint8), value.view(torch.uint8), work.block_size)
        numbers = key.float() * KEY_SCALE, value.float() * of_value[:, None]
    else:
        of_key = plain.key.float().abs().amax(-1, keepdim=True) / 127
        of_channel = plain.value.float().abs().amax(0) / 127
        key, value = (
            (x.float() / scale).round().to(torch.int8) for x, scale in ((plain.key, of_key), (plain.value, of_channel))
        )
        pages = work.pages(key, value, work.block_size)
        at_pages, _, _ = work.pages(of_key, of_key[..., :0], work.block_size)
        scales = Int8Scales(at_pages[..., 0].contiguous(), of_channel)
        numbers = key * of_key, value * of_channel
    key, value = numbers
    return Inputs(work, plain.query, key, value, *pages, scales=scales, plain=plain)


# --- the right answer ---


def _exactly(query: Tensor, key: Tensor, value: Tensor, seen: Sight, scale: float) -> tuple[Tensor, Tensor]:
    """Attend by the oracle."""
    answer = oracle.attend(query, key, value, seen, scale=scale)
    return answer.out, answer.lse


def _by_reference(query: Tensor, key: Tensor, value: Tensor, seen: Sight, scale: float) -> tuple[Tensor, Tensor]:
    """Attend by the formula of the reference, in the type of the query."""
    with computing_in(query.dtype):
        return reference.attend(query, key, value, seen.visible, softmax_scale=scale)


def the_formula(
    work: Workload, attend: Attend, query: Tensor, key: Tensor, value: Tensor, seen: Sight
) -> tuple[Tensor, Tensor]:
    """Compute the outputs and log-sum-exps of some queries of a sequence; over int8 keys, of rounded queries."""
    scale = query.shape[-1] ** -0.5 if work.softmax_scale is None else work.softmax_scale
    if work.stored == "int8":
        of_query = query.float().abs().amax(-1, keepdim=True) / 127
        query = ((query.float() / of_query).round().to(query.dtype)) * of_query.to(query.dtype)
    if work.path != "differential":
        return attend(query, key, value, seen, scale)
    wide = rearrange(value, "s (pairs two) d -> s pairs (two d)", two=2)
    halves = [attend(query[:, half::2], key[:, half::2], wide, seen, scale) for half in (0, 1)]
    out = normed_difference(halves[0][0], halves[1][0])
    return out, rearrange([lse for _, lse in halves], "two t pairs -> t (pairs two)")


def of_fp8_weights(
    work: Workload,
    attend: Attend,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    seen: Sight,
    *,
    largest: float = 256.0,
) -> tuple[Tensor, Tensor]:
    """Compute it as FlashAttention-3 does over fp8: queries are rounded to fp8, too, and weights, times 256.

    FlashMLA does so over latents, and its `largest` weight is 1. This rounds weights in all types but float64: the
    tolerance is twice that.
    """
    kind, dtype = FORMATS[work.stored], value.dtype
    query, key, value = (x.to(torch.float64) for x in (query.to(kind), key, value))
    scale = query.shape[2] ** -0.5 if work.softmax_scale is None else work.softmax_scale
    out, lse = _exactly(query, key, value, seen, scale)
    if dtype == torch.float64:
        return out, lse
    groups = rearrange(query, "t (k g) d -> t k g d", k=key.shape[1])
    scores = torch.einsum("tkgd,skd->tkgs", groups, key).flatten(1, 2) * scale
    scores = scores.masked_fill(~seen.visible[:, None], -torch.inf)
    weights = ((scores - scores.amax(-1, keepdim=True)).exp() * largest).float().to(kind).double() / largest
    weights = rearrange(weights * (scores.amax(-1) - lse).exp()[..., None], "t (k g) s -> t k g s", k=key.shape[1])
    return torch.einsum("tkgs,skd->tkgd", weights, value).flatten(1, 2).to(dtype), lse


def normed_difference(first: Float[Tensor, "t pairs dv"], second: Float[Tensor, "t pairs dv"]) -> Tensor:
    """Subtract the second answer of each pair, norm both halves of the value together, and cut them into heads."""
    difference = first - LAMBDA * second
    normed = difference * torch.rsqrt(difference.square().mean(-1, keepdim=True) + NORM_EPS)
    return rearrange((1 - LAMBDA_INIT) * normed, "t pairs (two d) -> t (pairs two) d", two=2)


def made_of_latents(
    rows: Float[Tensor, "s c"], key_projection: Float[Tensor, "h nope r"], value_projection: Float[Tensor, "h dv r"]
) -> tuple[Float[Tensor, "s h d"], Float[Tensor, "s h dv"]]:
    """Make the keys and values of every head of rows `[latent, rotary key]`, by one product each."""
    h, _, rank = key_projection.shape
    latent, rope_key = rows[:, :rank], rows[:, None, rank:].expand(-1, h, -1)
    key, value = ((latent @ x.flatten(0, 1).mT).unflatten(1, (h, -1)) for x in (key_projection, value_projection))
    return torch.cat([key, rope_key], dim=-1), value


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
