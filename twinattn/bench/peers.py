"""The contenders of a row: our twins, and the peers that they are measured against, each called as its users call it.

A contender prepares everything that a server has ready before a step (pages, tables, plans, compiled kernels) and
returns the call to be timed. A peer that is not installed is reported as missing when it is prepared.
"""

import importlib
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from einops import rearrange
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from fastattn.kernels import use_kernel
from refattn.batch import Batch
from refattn.options import AttentionOptions
from refattn.scales import Fp8Scales
from twinattn.bench import measure
from twinattn.bench.measure import Call
from twinattn.bench.work import (
    LAMBDA,
    LAMBDA_INIT,
    NORM_EPS,
    Attention,
    Inputs,
    Judge,
    QuantizedWrite,
    Step,
    Tokens,
    made_of_latents,
    normed_difference,
    of_fp8_weights,
)
from twinattn.kit.oracle import sight
from twinattn.kit.search.inputs import Modules, planning
from twinattn.libraries import fa2 as fa2_package
from twinattn.libraries import fa3 as fa3_package
from twinattn.libraries import fa4 as fa4_package
from twinattn.libraries import flash_mla as flash_mla_package
from twinattn.libraries import flashinfer as flashinfer_package
from twinattn.libraries import pytorch, vllm_cpu

ATEN = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


@dataclass(frozen=True)
class Contender:
    """One way to compute a row.

    Attributes:
        name: as the report shows it.
        prepare: makes the call that is timed out of the inputs.
        rows: einops pattern that turns the answer into `[t, h, dv]`, outside of the time.
        lse: the call takes `return_lse=True`, and what it answers then is held to the rule too.
        judge: replaces the row's own judge, for a yardstick that computes something else over the same bytes.
    """

    name: str
    prepare: Callable[[Any], Call]
    rows: str | None = None
    lse: bool = False
    judge: Callable[[Any], Judge] | None = field(default=None, repr=False)


def twin(
    path: str = "", *, package: str = "fastattn", name: str | None = None, kernel: str | None = None, **planned: Any
) -> Contender:
    """A path of ours; it plans once per step, before the time is taken.

    Args:
        path: which; that of the work if empty.
        package: "fastattn" or "refattn".
        name: as the report shows it; the package, and the kernel if one is asked for, if None.
        kernel: ask for this kernel, to see whether the chosen one is the fastest.
        planned: arguments of the plan beside the batch and the block size, where the work does not say them.
    """

    def prepare_call(inputs: Inputs) -> Call:
        work = replace(inputs.work, path=path, plan_of="") if path else inputs.work
        call = _call(work, inputs, lambda name: importlib.import_module(f"{package}.{name}"), planned)
        return call if kernel is None else partial(_call_with, kernel, call)

    return Contender(name or ", ".join(filter(None, (package, kernel))), prepare_call, lse=True)


def _call(work: Attention, inputs: Inputs, modules: Modules, planned: dict[str, Any]) -> Call:
    """Plan a step with the modules of a twin, and return the call of a layer."""
    if work.path == "mla_prefill":
        return _prefill_call(work, inputs, modules("mla"))
    tensors: tuple[Tensor, ...] = (inputs.query, inputs.key_cache, inputs.value_cache)
    more: dict[str, Any] = {}
    if work.path == "varlen":
        tensors = inputs.query, inputs.key, inputs.value
    elif work.path == "differential":
        tensors = inputs.query, _halves(inputs)
        more = dict(lambda_full=tensors[1].new_tensor(LAMBDA, dtype=torch.float32), lambda_init=LAMBDA_INIT)
        more |= dict(norm_eps=NORM_EPS)
    elif work.path == "mla":
        tensors, more = tensors[:2], dict(latent_rank=work.value_size, cache_scale=inputs.scales or 1.0)
    elif work.path == "quantized":
        more = dict(scales=inputs.scales)
    plan = planning(work, modules, inputs.batch, **planned)()
    options = AttentionOptions(softmax_scale=work.softmax_scale)
    return partial(modules(work.path).attention, *tensors, plan, options, **more)


def _prefill_call(work: Attention, inputs: Inputs, mla: Any) -> Call:
    """Plan the prefill over latents: the new tokens, and the chunks of their context."""
    new, rank = inputs.new_rows()[:, 0], work.value_size
    plan = mla.plan_prefill(
        inputs.batch,
        block_size=work.block_size,
        workspace=work.workspace * len(work.lens),
        max_context_len=max(seq_len - query_len for query_len, seq_len in work.lens),
    )
    options = AttentionOptions(softmax_scale=work.query_size**-0.5)
    projections = dict(zip(("key_projection", "value_projection"), inputs.projections, strict=True))
    return partial(
        mla.prefill, inputs.query, new[:, :rank], new[:, rank:], inputs.key_cache, plan, options, **projections
    )


def over_plain_cache(contender: Contender) -> Contender:
    """Another contender, over a plain cache of what was quantized: twice the bytes."""
    return replace(
        contender,
        name=f"{contender.name}, plain cache",
        prepare=lambda inputs: contender.prepare(inputs.plain),
        judge=lambda inputs: inputs.plain.work.judge(inputs.plain),
    )


def as_chain(contender: Contender) -> Contender:
    """A yardstick for drafted trees: the same tokens as a chain, whose mask is causal, over the same bytes."""
    return replace(
        contender,
        name=f"a chain: {contender.name}",
        judge=lambda inputs: replace(inputs.work, trees="").judge(inputs),
    )


def plain_attention() -> Contender:
    """A yardstick for differential attention: one plain attention that reads the same bytes."""
    return replace(
        twin("chunked_prefill", name="plain attention, same bytes"),
        judge=lambda inputs: replace(inputs.work, path="chunked_prefill").judge(inputs),
    )


def _call_with(kernel: str, call: Call, **options: Any) -> Any:
    with use_kernel(kernel):
        return call(**options)


def layers(count: int, *, plan_in_each: bool = False) -> Contender:
    """A step of a model: a plan, and attention in each of its layers, over the same keys.

    On a GPU it fails if a layer launches a kernel that the plan launches too, as then a layer makes tables.

    Args:
        count: layers.
        plan_in_each: plan in each layer instead, as if there were no plan to keep.
    """

    def prepare_call(inputs: Inputs) -> Call:
        module = importlib.import_module(f"fastattn.{inputs.work.path}")
        make_plan = planning(inputs.work, lambda _: module, inputs.batch)
        attend = partial(module.attention, inputs.query, inputs.key_cache, inputs.value_cache)

        def call() -> Tensor:
            plan = make_plan()
            for i in range(count):
                out: Tensor = attend(make_plan() if plan_in_each and i else plan)
            return out

        if inputs.query.is_cuda and not plan_in_each:
            check_no_tables(make_plan, partial(attend, make_plan()))
        return call

    return Contender("fastattn, a plan in each layer" if plan_in_each else "fastattn", prepare_call)


def check_no_tables(make_plan: Call, attend: Call) -> None:
    """Check that attention launches none of the kernels that make a plan.

    Raises:
        RuntimeError: naming those that it launches, or where the plan launches none, so that nothing is shown.
    """
    planned, attended = measure.launches(make_plan), measure.launches(attend)
    if not planned or not attended:
        raise RuntimeError(f"expected kernels of a plan and of a layer, the profiler saw {planned} and {attended}")
    both = sorted(planned.keys() & attended.keys())
    if both:
        raise RuntimeError(f"expected no kernels of a plan in a layer, got {', '.join(both)}")


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
        cache = _halves(inputs)
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


def quantized_write_twin(package: str = "fastattn") -> Contender:
    """Our quantizing write."""

    def prepare_call(inputs: Tokens) -> Call:
        by_head = QuantizedWrite(len(inputs.key), *inputs.key.shape[1:]).scales(inputs.key.device)
        return partial(importlib.import_module(f"{package}.quantized").write, *inputs, scales=Fp8Scales(*by_head))

    return Contender(package, prepare_call)


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
        "FlashMLA, queries and weights in fp8", prepare_call, rows="b t h r -> (b t) h r", judge=_by_fp8_weights
    )


def twin_in_fp8() -> Contender:
    """Our path over latents in fp8, where queries and weights may be rounded; it rounds the queries itself."""

    def prepare_call(inputs: Inputs) -> Call:
        return partial(_call(inputs.work, inputs, partial(_path, "fastattn"), {}), query_scale=1.0, fp8_weights=True)

    return Contender("fastattn, queries and weights in fp8", prepare_call, judge=_by_fp8_weights)


def _path(package: str, name: str) -> Any:
    return importlib.import_module(f"{package}.{name}")


def _by_fp8_weights(inputs: Inputs) -> Judge:
    """Hold an answer to twice the error of weights in fp8, whose largest is 1."""
    return inputs.work.judge(inputs, partial(of_fp8_weights, largest=1.0))


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


def _halves(inputs: Inputs) -> Tensor:
    """Lay the pages out as differential attention has them: `[half, key or value, n, p, hk/2, d]`."""
    caches = inputs.key_cache, inputs.value_cache
    return torch.stack([torch.stack([cache[:, :, half::2] for cache in caches]) for half in (0, 1)])


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


# Writing the cache


def write_twin(package: str = "fastattn") -> Contender:
    """Our write of new tokens into the pool."""

    def prepare(inputs: Tokens) -> Call:
        write = importlib.import_module(f"{package}.kv_cache").write
        return partial(write, inputs.key, inputs.value, inputs.key_cache, inputs.value_cache, inputs.slots)

    return Contender(package, prepare)


def write_index_put() -> Contender:
    """The write as an assignment to indexed rows of the pool."""

    def prepare(inputs: Tokens) -> Call:
        pools = [rearrange(pool, "n p hk d -> (n p) hk d") for pool in (inputs.key_cache, inputs.value_cache)]

        def call() -> None:
            for pool, rows in zip(pools, (inputs.key, inputs.value), strict=True):
                pool[inputs.slots] = rows

        return call

    return Contender("torch index_put", prepare)


# The tables of a step


def virtual_batches_twin(package: str = "fastattn") -> Contender:
    """Our virtual batches: the plan of local attention."""

    def prepare_call(inputs: Step) -> Call:
        plan = importlib.import_module(f"{package}.local").plan
        sizes = dict(chunk_size=inputs.work.chunk, block_size=inputs.work.block_size)
        return lambda: plan(inputs.batch, **sizes).batch

    return Contender(package, prepare_call)


def virtual_batches_numpy() -> Contender:
    """Virtual batches of decodes by numpy, as servers make them: the lengths come to the host, the tables go back."""

    def prepare(inputs: Step) -> Call:
        work, batch = inputs.work, inputs.batch
        assert batch.block_table is not None
        device, table = batch.device, batch.block_table
        columns = np.arange(work.chunk // work.block_size)

        def call() -> Batch:
            seq_lens = batch.seq_lens.cpu().numpy()
            begin = (seq_lens - 1) // work.chunk * work.chunk
            used = np.minimum(begin[:, None] // work.block_size + columns, table.shape[1] - 1)
            return Batch(
                cu_seqlens_q=batch.cu_seqlens_q,
                seq_lens=torch.from_numpy(seq_lens - begin).to(device),
                block_table=table.gather(1, torch.from_numpy(used).to(device, torch.int64)),
                max_query_len=1,
                max_seq_len=work.chunk,
            )

        return call

    return Contender("numpy on the host", prepare)


def slots_twin(package: str = "fastattn") -> Contender:
    """Our slots of new tokens."""

    def prepare(inputs: Step) -> Call:
        slot_mapping = importlib.import_module(f"{package}.metadata").slot_mapping
        return partial(slot_mapping, inputs.batch, inputs.work.num_seqs, block_size=inputs.work.block_size)

    return Contender(package, prepare)
