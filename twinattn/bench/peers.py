"""The peers that our twins are measured against: PyTorch's own calls, and kernels of other libraries,
called as their users call them.

A peer that is not installed is reported as missing when it is prepared.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from einops import rearrange
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from refattn.batch import Batch
from twinattn.bench.contender import Contender, by_fp8_weights, halves
from twinattn.bench.measure import Call
from twinattn.bench.work import Inputs, Judge, made_of_latents, normed_difference, of_fp8_weights
from twinattn.kit.oracle import sight
from twinattn.libraries import fa2 as fa2_package
from twinattn.libraries import fa3 as fa3_package
from twinattn.libraries import fa4 as fa4_package
from twinattn.libraries import flash_mla as flash_mla_package
from twinattn.libraries import flashinfer as flashinfer_package
from twinattn.libraries import pytorch, vllm_cpu

ATEN = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


# PyTorch's own. All of them get their keys as one rectangle, already gathered: less work than a twin has.


def aten_cpu(*, grouped: bool = False) -> Contender:
    """ATen's FlashAttention for CPU, called bare: with its causal mask, or with none for single queries.

    Args:
        grouped: hand over the query heads that share a KV head as rows of one product (single queries only).
    """

    def prepare(inputs: Inputs) -> Call:
        query, key, value = inputs.rectangles()
        causal = inputs.work.causal and query.shape[2] > 1
        if grouped:
            query = rearrange(query, "b (hk g) 1 d -> b hk g d", hk=key.shape[1])
        return lambda: ATEN(query, key, value, 0.0, causal, scale=query.shape[-1] ** -0.5)[0]

    name = "ATen call, heads grouped" if grouped else "ATen call"
    return Contender(name, prepare, rows="b hk g d -> b (hk g) d" if grouped else "b h t d -> (b t) h d")


def aten_cpu_gathered() -> Contender:
    """ATen's FlashAttention for CPU after a gather by hand: what it takes to call it over pages."""

    def prepare(inputs: Inputs) -> Call:
        table = inputs.batch.block_table
        assert table is not None
        b = len(table)
        query = rearrange(inputs.query, "(b t) h d -> b h t d", b=b).contiguous()
        alone = query.shape[2] == 1  # then the query heads that share a KV head are rows of one product
        query = rearrange(query, "b (hk g) 1 d -> b hk g d", hk=inputs.key.shape[1]) if alone else query

        def call() -> Tensor:
            key, value = (
                cache.index_select(0, table.flatten()).view(b, -1, *cache.shape[2:]).transpose(1, 2)
                for cache in (inputs.key_cache, inputs.value_cache)
            )
            out = ATEN(query, key, value, 0.0, inputs.work.causal and not alone, scale=query.shape[-1] ** -0.5)[0]
            return rearrange(out, "b hk g d -> b (hk g) d" if alone else "b h t d -> (b t) h d")

        return call

    return Contender("ATen call behind a gather", prepare)


def vllm_on_cpu(block_size: int = 128) -> Contender:
    """The attention of vLLM for CPU, over its blocks, in a layout that depends on the processor."""

    def prepare(inputs: Inputs) -> Call:
        if (reason := vllm_cpu.available()) is not None:
            raise ImportError(reason)
        return vllm_cpu.prepare(inputs.query, *inputs.paged(block_size), window_size=inputs.work.window)

    return Contender(f"vLLM, blocks of {block_size}", prepare)


def aten_cpu_latents() -> Contender:
    """ATen's FlashAttention for CPU over gathered latents, for one new token of each sequence.

    It has one size for keys and values: values are the keys, and what their rotary part adds is cut off.
    """

    def prepare(inputs: Inputs) -> Call:
        table, work = inputs.batch.block_table, inputs.work
        assert table is not None
        query = inputs.query[:, None]  # the heads are rows of one product

        def call() -> Tensor:
            key = inputs.key_cache.index_select(0, table.flatten()).view(len(table), 1, -1, work.head_size)
            out: Tensor = ATEN(query, key, key, 0.0, False, scale=work.softmax_scale)[0][..., : work.value_size]
            return out

        return call

    return Contender("ATen call behind a gather", prepare, rows="b 1 h r -> b h r")


def aten_cpu_latent_prefill() -> Contender:
    """ATen's FlashAttention for CPU with a mask, over keys and values made of all latents of one sequence at once."""

    def prepare(inputs: Inputs) -> Call:
        table, query_len, seq_len = inputs.batch.block_table, *inputs.work.lens[0]
        assert table is not None
        sees = torch.ones(query_len, seq_len, dtype=torch.bool).tril(seq_len - query_len)
        mask = torch.zeros(query_len, seq_len).masked_fill(~sees, -torch.inf)
        query = rearrange(inputs.query, "t h d -> 1 h t d").contiguous()

        def call() -> Tensor:
            rows = inputs.key_cache[table[0]].flatten(0, 1)[:seq_len]
            key, value = (rearrange(x, "s h d -> 1 h s d") for x in made_of_latents(rows, *inputs.projections))
            out: Tensor = ATEN(query, key, value, 0.0, False, attn_mask=mask, scale=query.shape[-1] ** -0.5)[0]
            return out

        return call

    return Contender("ATen call, masked, behind a gather", prepare, rows="1 h t d -> t h d")


def aten_cpu_masked() -> Contender:
    """ATen's FlashAttention for CPU with an explicit mask: how a chunk with context is one call."""

    def prepare(inputs: Inputs) -> Call:
        query, key, value = inputs.rectangles()
        mask = torch.zeros(query.shape[2], key.shape[2]).masked_fill(~_picture(inputs), -torch.inf)
        return lambda: ATEN(query, key, value, 0.0, False, attn_mask=mask, scale=query.shape[-1] ** -0.5)[0]

    return Contender("ATen call, masked", prepare, rows="b h t d -> (b t) h d")


def aten_cpu_visible() -> Contender:
    """ATen's FlashAttention for CPU over nothing but the keys that a window or a chunk shows to single queries."""

    def prepare(inputs: Inputs) -> Call:
        query, key, value = inputs.rectangles()
        first, last = (int(bound) for bound in inputs.work.span(0))
        key, value = (x[:, :, first : last + 1].contiguous() for x in (key, value))
        query = rearrange(query, "b (hk g) 1 d -> b hk g d", hk=key.shape[1])
        return lambda: ATEN(query, key, value, 0.0, False, scale=query.shape[-1] ** -0.5)[0]

    return Contender("ATen call on the visible keys", prepare, rows="b hk g d -> b (hk g) d")


def aten_cpu_chunks() -> Contender:
    """ATen's FlashAttention for CPU over the chunks of local attention, stacked as a batch: for whole chunks only."""

    def prepare(inputs: Inputs) -> Call:
        chunk = inputs.work.chunk
        query, key, value = (rearrange(x, "1 h (c t) d -> c h t d", t=chunk).contiguous() for x in inputs.rectangles())
        return lambda: ATEN(query, key, value, 0.0, True, scale=query.shape[-1] ** -0.5)[0]

    return Contender("ATen call on stacked chunks", prepare, rows="c h t d -> (c t) h d")


def sdpa(backend: SDPBackend | None = None, *, masked: bool = False) -> Contender:
    """`F.scaled_dot_product_attention`, of a backend, with its causal mask or with an explicit one."""

    def prepare(inputs: Inputs) -> Call:
        query, key, value = inputs.rectangles()
        mask = _picture(inputs) if masked else None
        causal = inputs.work.causal and query.shape[2] > 1 and not masked

        def call() -> Tensor:
            with sdpa_kernel(backend) if backend is not None else nullcontext():
                return pytorch.sdpa(query, key, value, causal=causal, mask=mask)

        return call

    of = "" if backend is None else f" {backend.name.removesuffix('_ATTENTION').lower()}"
    return Contender(f"torch sdpa{of}{', masked' if masked else ''}", prepare, rows="b h t d -> (b t) h d")


def flex() -> Contender:
    """FlexAttention, compiled, with the block mask of the row."""

    def prepare(inputs: Inputs) -> Call:
        from torch.nn.attention.flex_attention import create_block_mask

        query, key, value = inputs.rectangles()
        left, chunk, context = inputs.work.window[0], inputs.work.chunk, key.shape[2] - query.shape[2]

        def sees(_batch: Tensor, _head: Tensor, row: Tensor, j: Tensor) -> Tensor:
            i = row + context
            visible = j <= i
            if left >= 0:
                visible = visible & (j >= i - left)
            if chunk:
                visible = visible & (i // chunk == j // chunk)
            return visible

        # Not compiled, the mask is drawn whole before it becomes blocks: 4 GiB for 64k tokens.
        make = torch.compile(create_block_mask) if key.is_cuda else create_block_mask
        blocks = make(sees, None, None, query.shape[2], key.shape[2], device=key.device.type)
        return partial(pytorch.flex(), query, key, value, block_mask=blocks, enable_gqa=True)

    return Contender("FlexAttention, compiled", prepare, rows="b h t d -> (b t) h d")


def _picture(inputs: Inputs) -> Tensor:
    """Draw which keys each query sees; all sequences are alike."""
    first, last = inputs.work.span(0)
    j = torch.arange(inputs.work.lens[0][1])
    return ((j >= first[:, None]) & (j <= last[:, None])).to(inputs.query.device)


# FlashAttention, by hand


def fa4(*, block_size: int | None = 16, name: str | None = None) -> Contender:
    """The package `flash-attn-4`, over pages, or over ragged rows if `block_size` is None."""

    def prepare(inputs: Inputs) -> Call:
        return fa4_package.prepare(inputs.query, *_keys(inputs, block_size), **_mask(inputs))

    return Contender(name or ("FA4, rows" if block_size is None else f"FA4, blocks of {block_size}"), prepare)


def fa4_chunks() -> Contender:
    """The package `flash-attn-4` over virtual sequences, one per chunk of local attention, made beforehand."""

    def prepare(inputs: Inputs) -> Call:
        return fa4(name="").prepare(_whole_chunks(inputs))

    return Contender("FA4 over virtual sequences", prepare)


def fa4_cascade() -> Contender:
    """The package `flash-attn-4` twice, over the shared blocks for all queries as one sequence, and over the rest."""

    def prepare(inputs: Inputs) -> Call:
        from fastattn.merge import merge

        work, batch = inputs.work, inputs.batch
        common, b = work.shared // work.block_size, len(work.lens)
        assert batch.block_table is not None
        prefix = replace(
            batch,
            cu_seqlens_q=torch.tensor([0, b], dtype=torch.int32, device=batch.device),
            seq_lens=torch.tensor([work.shared], dtype=torch.int32, device=batch.device),
            block_table=batch.block_table[:1, :common].contiguous(),
            max_query_len=b,
            max_seq_len=work.shared,
        )
        suffix = replace(
            batch,
            seq_lens=batch.seq_lens - work.shared,
            block_table=batch.block_table[:, common:].contiguous(),
            max_seq_len=batch.max_seq_len - work.shared,
        )
        tensors = inputs.query, inputs.key_cache, inputs.value_cache
        levels = [fa4_package.prepare(*tensors, level, causal=False, return_lse=True) for level in (prefix, suffix)]

        def call() -> Tensor:
            (out, lse), (own_out, own_lse) = (level() for level in levels)
            return merge([out, own_out], [lse.contiguous(), own_lse.contiguous()])[0]

        return call

    return Contender("FA4 twice, merged", prepare)


def fa4_differential(*, wide: bool) -> Contender:
    """The package `flash-attn-4` four times, once for each softmax and value, or twice with wide values; and the norm.

    Args:
        wide: keep the two values of a pair side by side in one pool, so that a softmax takes one call.
    """

    def prepare(inputs: Inputs) -> Call:
        cache = halves(inputs)
        values = [cache[0, 1], cache[1, 1]]
        if wide:
            values = [torch.cat(values, dim=-1)]
        calls = [
            [
                fa4_package.prepare(inputs.query[:, half::2].contiguous(), cache[half, 0], value, inputs.batch)
                for value in values
            ]
            for half in (0, 1)
        ]

        def call() -> Tensor:
            first, second = (torch.cat([part().float() for part in half], dim=-1) for half in calls)
            return normed_difference(first, second).to(inputs.query.dtype)

        return call

    return Contender(f"FA4 {'twice, wide values' if wide else 'four times'}, and the norm", prepare)


def fa3(*, block_size: int | None = 16, is_scheduled: bool = False) -> Contender:
    """FlashAttention-3, over pages, or over ragged rows if `block_size` is None.

    Args:
        block_size: tokens in a page.
        is_scheduled: share out the work before the step, as vLLM does, and not in the call (over pages).
    """

    def prepare(inputs: Inputs) -> Call:
        keys = _keys(inputs, block_size)
        return fa3_package.prepare(inputs.query, *keys, **_mask(inputs), is_scheduled=is_scheduled)

    name = "FA3, rows" if block_size is None else f"FA3, blocks of {block_size}"
    return Contender(f"{name}, scheduled before" if is_scheduled else name, prepare)


def fa3_quantized() -> Contender:
    """FlashAttention-3 over pages of fp8, queries rounded, too; held to twice the error of weights in fp8, as its are.

    It computes something else than our path, which rounds no weight: a yardstick of its speed.
    """

    def prepare_call(inputs: Inputs) -> Call:
        scales, kind = inputs.scales, torch.float8_e4m3fn
        ones = torch.ones(inputs.batch.num_seqs, inputs.work.heads[1], device=inputs.query.device)
        tensors = inputs.query.to(kind), inputs.key_cache.view(kind), inputs.value_cache.view(kind)
        descales = ones, ones * torch.as_tensor(scales.key), ones * torch.as_tensor(scales.value)
        return fa3_package.prepare(*tensors, inputs.batch, descales=descales)

    def judge(inputs: Inputs) -> Judge:
        return inputs.work.judge(inputs, of_fp8_weights)

    return Contender("FA3, queries and weights in fp8", prepare_call, judge=judge)


def flashinfer_quantized() -> Contender:
    """FlashInfer's paged decode over fp8, of 16-bit queries; one scale for all values, which is 1 here."""

    def prepare_call(inputs: Inputs) -> Call:
        kind = torch.float8_e4m3fn
        pages = inputs._replace(key_cache=inputs.key_cache.view(kind), value_cache=inputs.value_cache.view(kind))
        run = flashinfer_decode().prepare(pages)
        return partial(run, k_scale=float(inputs.scales.key))

    def judge(inputs: Inputs) -> Judge:
        of_value = torch.as_tensor(inputs.scales.value)[:, None]
        return inputs.work.judge(inputs._replace(value=inputs.value / of_value))

    return Contender("FlashInfer, fp8", prepare_call, judge=judge)


def fa3_chunks() -> Contender:
    """FlashAttention-3 over virtual sequences, one per chunk of local attention, made beforehand."""

    def prepare(inputs: Inputs) -> Call:
        return fa3().prepare(_whole_chunks(inputs))

    return Contender("FA3 over virtual sequences", prepare)


def fa3_latents() -> Contender:
    """FlashAttention-3 over latents: its second query (`qv` in its own package) meets the values."""
    return Contender("FA3, second query", lambda inputs: fa3_package.prepare_latents(*_latents(inputs)))


def flash_mla() -> Contender:
    """DeepSeek's FlashMLA, its half for Hopper; it shares out the work in its first call, before the time is taken."""
    return Contender(
        "FlashMLA", lambda inputs: flash_mla_package.prepare(*_latents(inputs)), rows="b t h r -> (b t) h r"
    )


def flash_mla_fp8() -> Contender:
    """FlashMLA over latents in fp8, by its product of 8-bit values; queries are rounded before the time is taken."""

    def prepare_call(inputs: Inputs) -> Call:
        query = inputs.query.to(torch.float8_e4m3fn)
        return flash_mla_package.prepare_fp8(query, *_latents(inputs)[1:], cache_scale=inputs.scales)

    return Contender(
        "FlashMLA, queries and weights in fp8", prepare_call, rows="b t h r -> (b t) h r", judge=by_fp8_weights
    )


def _latents(inputs: Inputs) -> tuple[Tensor, Tensor, Batch, int, float]:
    """Return what attention over latents takes."""
    assert inputs.work.softmax_scale is not None
    return inputs.query, inputs.key_cache, inputs.batch, inputs.work.value_size, inputs.work.softmax_scale


def latents_by_hand() -> Contender:
    """A prefill over latents by hand: products, the package `flash-attn-4`, chunk by chunk, and a merge."""

    def prepare(inputs: Inputs) -> Call:
        from fastattn.merge import merge

        work, batch = inputs.work, inputs.batch
        chunks, size = [], work.workspace
        for start in range(0, max(seq_len - query_len for query_len, seq_len in work.lens), size):
            counts = [max(0, min(size, seq_len - query_len - start)) for query_len, seq_len in work.lens]
            lengths = torch.tensor(counts, dtype=torch.int32, device=batch.device)
            rows = replace(batch, seq_lens=lengths, block_table=None, max_seq_len=max(counts))
            chunks.append((_slots(inputs, start, counts), fa4_package.planned(rows, causal=False, return_lse=True)))
        projections, new = inputs.projections, inputs.new_rows()[:, 0]
        own = replace(batch, seq_lens=batch.query_lens, block_table=None, max_seq_len=batch.max_query_len)
        attend = fa4_package.planned(own, return_lse=True)

        def call() -> Tensor:
            answers = [attend(inputs.query, *made_of_latents(new, *projections))]
            for slots, attend_to_chunk in chunks:
                made = made_of_latents(inputs.key_cache.flatten(0, 1)[slots], *projections)
                answers.append(attend_to_chunk(inputs.query, *made))
            if len(answers) == 1:
                return answers[0][0]
            outs, lses = zip(*answers, strict=True)
            return merge(list(outs), [lse.T.contiguous() for lse in lses])[0]

        return call

    return Contender("FA4 behind products", prepare)


def _slots(inputs: Inputs, start: int, counts: Sequence[int]) -> Tensor:
    """List the pool's rows of a chunk: of each sequence some tokens from `start` on."""
    table, p = inputs.batch.block_table, inputs.work.block_size
    assert table is not None
    tokens = [torch.arange(start, start + count, device=table.device) for count in counts]
    return torch.cat([row[x // p].long() * p + x % p for row, x in zip(table, tokens, strict=True)])


def fa2(*, block_size: int | None = 256) -> Contender:
    """The package `flash-attn`, over pages of a multiple of 256, or over ragged rows if `block_size` is None."""

    def prepare(inputs: Inputs) -> Call:
        make = fa2_package.prepare if block_size is None else fa2_package.prepare_rectangle
        return make(inputs.query, *_keys(inputs, block_size), **_mask(inputs))

    name, rows = ("FA2, rows", None) if block_size is None else (f"FA2, blocks of {block_size}", "b t h d -> (b t) h d")
    return Contender(name, prepare, rows=rows)


def _whole_chunks(inputs: Inputs) -> Inputs:
    """Make sequences of the chunks that local attention cuts one sequence length into; the last may be a decode."""
    work, batch, chunk = inputs.work, inputs.batch, inputs.work.chunk
    assert batch.block_table is not None
    blocks = chunk // work.block_size
    query_len, seq_len = work.lens[0]
    if query_len == seq_len and seq_len % chunk == 0:  # prefill of one sequence: its chunks side by side
        lens = ((chunk, chunk),) * (seq_len // chunk)
        table = rearrange(batch.block_table, "1 (c m) -> c m", m=blocks)
    else:  # decodes: what they have of their last chunk
        first = (seq_len - 1) // chunk * chunk
        lens = ((1, seq_len - first),) * len(work.lens)
        table = batch.block_table[:, first // work.block_size :].contiguous()
    virtual = replace(work, lens=lens, path="chunked_prefill")
    return inputs._replace(work=virtual, batch=virtual.batch(table))


def _keys(inputs: Inputs, block_size: int | None) -> tuple[Tensor, Tensor, Batch]:
    """Return keys and values in pages of some size, or in rows, with their batch."""
    if block_size is None:
        return inputs.key, inputs.value, replace(inputs.batch, block_table=None)
    return inputs.paged(block_size)


def _mask(inputs: Inputs) -> dict[str, Any]:
    """Return who may see whom, in the libraries' words."""
    return dict(causal=inputs.work.causal, window_size=inputs.work.window)


# FlashInfer


def flashinfer_prefill(backend: str = "fa3") -> Contender:
    """FlashInfer's paged prefill: "fa3" for Hopper, or "fa2"."""

    def prepare(inputs: Inputs) -> Call:
        return flashinfer_package.prepare(*_pages(inputs), **_mask(inputs), backend=backend)

    return Contender(f"FlashInfer {backend}", prepare)


def flashinfer_tree() -> Contender:
    """FlashInfer's paged prefill with a mask for every pair of a query and a key, which only its "fa2" takes."""

    def prepare(inputs: Inputs) -> Call:
        masks = [sight(inputs.work, i).visible for i in range(len(inputs.work.lens))]
        mask = torch.cat([mask.flatten() for mask in masks]).to(inputs.query.device)
        return flashinfer_package.prepare(*_pages(inputs), custom_mask=mask, backend="fa2")

    return Contender("FlashInfer, custom mask", prepare)


def flashinfer_decode() -> Contender:
    """FlashInfer's paged decode, on tensor cores, as it is meant for grouped heads."""

    def prepare(inputs: Inputs) -> Call:
        return flashinfer_package.prepare_decode(*_pages(inputs), window_size=_mask(inputs)["window_size"])

    return Contender("FlashInfer", prepare)


def flashinfer_latents(backend: str = "fa3") -> Contender:
    """FlashInfer's latent attention: "fa3" for Hopper, or "fa2"."""
    call = partial(flashinfer_package.prepare_latents, backend=backend)
    return Contender(f"FlashInfer {backend}", lambda inputs: call(*_latents(inputs)))


def flashinfer_cascade() -> Contender:
    """FlashInfer's cascade of two levels."""

    def prepare(inputs: Inputs) -> Call:
        return flashinfer_package.prepare_cascade(*_pages(inputs), inputs.work.shared // inputs.work.block_size)

    return Contender("FlashInfer cascade", prepare)


def _pages(inputs: Inputs) -> tuple[Tensor, Tensor, Tensor, Batch]:
    return inputs.query, inputs.key_cache, inputs.value_cache, inputs.batch
