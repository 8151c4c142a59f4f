"""The rows of a CPU, small enough for a laptop: each path beside the calls of PyTorch, vLLM's kernel and `refattn`."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

from twinattn.bench import entries, generation, peers, sparse, step_peers
from twinattn.bench.contender import (
    as_chain,
    over_plain_cache,
    plain_attention,
    twin,
)
from twinattn.bench.generation import Generation
from twinattn.bench.row import Row, row_of, work_of
from twinattn.bench.states import States, states_transformers, states_twin, steps_twin
from twinattn.bench.step_work import CacheWrite, Slots, VirtualBatches
from twinattn.bench.work import drafts, latent_prefill, latents


def rows_on_cpu(shrink: int) -> Iterator[Row]:
    """List the rows of a CPU, with every length divided by `shrink`."""
    yield from _prompts_and_decodes(shrink)
    yield from _windows_and_chunks(shrink)
    yield from _prefixes_and_pairs(shrink)
    yield from _latents(shrink)
    yield from _quantized_and_drafted(shrink)
    yield from _writes_and_tables(shrink)
    yield from _states(
        (1, 4096 // shrink, (8, 4), False, "10 x refattn"),
        (1, 4096 // shrink, (8, 4), True, "10 x refattn"),
        (16, 1, (8, 4), False, "ahead of transformers"),
    )
    decodes = States(16, 1, (8, 4), steps=8)
    yield Row("replay", "8-decodes-16x8-heads", decodes, (steps_twin("replay", 8), steps_twin("recurrent")))
    yield from _selected(shrink)
    yield from _compressed(shrink)
    yield from _engine(shrink)


def _prompts_and_decodes(shrink: int) -> Iterator[Row]:
    """Over all keys."""
    work = partial(work_of, shrink, heads=(8, 2), head_size=64)
    ours, reference = twin(), twin(package="refattn")
    prefill = work((4096, 4096))
    aten = peers.aten_cpu_gathered(), peers.aten_cpu()
    yield row_of(
        f"prefill-{prefill.tokens}",
        prefill,
        *(ours, *aten, peers.flex(), peers.sdpa(masked=True), reference),
        aim="1.15 of the ATen call over the same pages, ahead of FlexAttention, 5 x refattn",
    )
    chunk = work((512, 4096 + 512))
    yield row_of(
        f"chunk-{chunk.lens[0][0]}-of-{chunk.tokens}",
        chunk,
        *(ours, peers.aten_cpu_masked(), peers.flex(), peers.sdpa(masked=True), reference),
        aim="1.15 of the ATen call",
    )
    for b in (1, 16):
        decode = work(*[(1, 4096)] * b)
        yield row_of(
            f"decode-{b}x{decode.tokens}",
            decode,
            *(ours, twin(kernel="cpu"), peers.vllm_on_cpu()),
            *(peers.aten_cpu_gathered(), peers.aten_cpu(grouped=True), peers.sdpa(), reference),
            aim="ahead of the ATen call over contiguous keys, 1.3 of vLLM",
        )
    encoder = work(*[(512, 512)] * 8, heads=(8, 8), causal=False, path="varlen")
    yield row_of(
        f"encoder-8x{encoder.lens[0][1]}",
        encoder,
        *(ours, peers.aten_cpu(), peers.sdpa(), reference),
        aim="1.15 of the ATen call",
    )
    for length in (2048, 8192, 32768):
        narrow = work((length, length), heads=(2, 1))
        quadratic = (peers.sdpa(masked=True), reference) if length <= 8192 else ()
        yield row_of(
            f"memory-{narrow.tokens}",
            narrow,
            *(ours, peers.aten_cpu(), *quadratic),
            aim="memory that grows with the tokens, not with their square",
            memory=True,
        )


def _windows_and_chunks(shrink: int) -> Iterator[Row]:
    """Over some of them."""
    work = partial(work_of, shrink, heads=(8, 2), head_size=64)
    ours, reference = twin(), twin(package="refattn")
    for length in (2048, 8192, 32768, 65536):
        decode = work(*[(1, length)] * 4, window=1024)
        yield row_of(
            f"decode-4x{decode.tokens}-window-{decode.window[0] + 1}",
            decode,
            *(
                ours,
                twin(kernel="cpu"),
                peers.vllm_on_cpu(),
                peers.aten_cpu_visible(),
                peers.sdpa(masked=True),
                reference,
            ),
            aim="the same at every length, ahead of the ATen call on the visible keys",
        )
    for length in (2048, 8192, 32768):
        prefill = work((length, length), chunk=1024)
        quadratic = (peers.flex(), peers.sdpa(masked=True)) if length <= 2048 else ()
        yield row_of(
            f"prefill-{prefill.tokens}-chunk-{prefill.chunk}",
            prefill,
            *(ours, peers.aten_cpu_chunks(), *quadratic, *([reference] if length <= 8192 else [])),
            aim="linear in the length",
        )


def _prefixes_and_pairs(shrink: int) -> Iterator[Row]:
    """Cascades, and differential heads."""
    work = partial(work_of, shrink, heads=(8, 2), head_size=64)
    ours, reference = twin(), twin(package="refattn")
    cascade = work(*[(1, 4096 + 64)] * 16, shared=4096)
    yield row_of(
        f"decode-16-prefix-{cascade.shared}-own-{cascade.tokens - cascade.shared}",
        cascade,
        *(ours, twin("chunked_prefill", name="without cascade"), reference),
        aim="4 x without a cascade",
    )
    decode = work(*[(1, 4096)] * 16, heads=(8, 4), path="differential")
    yield row_of(
        f"decode-16x{decode.tokens}",
        decode,
        *(ours, plain_attention(), reference),
        aim="1.2 of plain attention over the same bytes",
    )


def _latents(shrink: int) -> Iterator[Row]:
    """Small ones, of any model."""
    ours, reference = twin(), twin(package="refattn")
    sizes = dict(heads=(8, 1), head_size=128 + 32, value_head_size=128, block_size=16)
    decode = latents(((1, 2048 // shrink),) * 8, size_before=96, **sizes)
    yield row_of(
        f"decode-8x{decode.tokens}",
        decode,
        *(ours, peers.aten_cpu_latents(), reference),
        aim="1.15 of the ATen call over the same pages",
    )
    yield row_of(
        f"decode-8x{decode.tokens}-fp8",
        replace(decode, stored="e4m3"),
        *(ours, over_plain_cache(ours), reference),
        aim="at most the plain cache's time",
    )
    new, context = 1024 // shrink, 3072 // shrink
    prompt = latent_prefill(
        ((new, context + new),), made=(64, 96), workspace=context // 3, **sizes | dict(heads=(8, 8))
    )
    yield Row(
        "mla",
        f"prefill-{new}-of-{prompt.tokens}",
        prompt,
        (ours, peers.aten_cpu_latent_prefill(), reference),
        aim="1.15 of the ATen call",
    )


def _quantized_and_drafted(shrink: int) -> Iterator[Row]:
    """Over 8 bits, and drafted trees."""
    work = partial(work_of, shrink, heads=(8, 2), head_size=64)
    ours, reference = twin(), twin(package="refattn")
    for stored, name in (("e4m3", "fp8"), ("int8", "int8")):
        decode = work(*[(1, 4096)] * 16, path="quantized", stored=stored)
        yield row_of(
            f"decode-16x{decode.tokens}-{name}",
            decode,
            *(ours, over_plain_cache(ours), reference),
            aim="at most the plain cache's time",
        )
    nodes = 16
    yield row_of(
        f"tree-4x{4096 // shrink}-drafts-{nodes}",
        drafts(((nodes, 4096 // shrink + nodes),) * 4, heads=(8, 2), head_size=64),
        *(ours, as_chain(twin("chunked_prefill")), reference),
        aim="1.15 of a chain",
    )


def _writes_and_tables(shrink: int) -> Iterator[Row]:
    """What a step does beside attention."""
    write = CacheWrite(16384 // shrink, num_kv_heads=2, head_size=64)
    yield Row(
        "kv_cache",
        f"write-{write.num_tokens}",
        write,
        (step_peers.write_twin(), step_peers.write_index_put(), step_peers.write_twin("refattn")),
        aim="as an index_put",
    )
    yield Row(
        "local",
        "virtual-batches-256",
        VirtualBatches(256, 32768, 8192),
        (
            step_peers.virtual_batches_twin(),
            step_peers.virtual_batches_numpy(),
            step_peers.virtual_batches_twin("refattn"),
        ),
    )
    yield Row(
        "metadata", "slots-256", Slots(256, 32768, 8192), (step_peers.slots_twin(), step_peers.slots_twin("refattn"))
    )


def _states(*works: tuple[int, int, tuple[int, int], bool, str]) -> Iterator[Row]:
    """Make rows of layers that keep a state: requests, new tokens of each, heads, the kind of decay, the aim."""
    for num_seqs, query_len, heads, per_channel, aim in works:
        work = States(num_seqs, query_len, heads, per_channel=per_channel)
        kind = "decode" if query_len == 1 else f"prefill-{query_len}"
        name = f"{kind}-{num_seqs}x{heads[0]}-heads" + ("-per-channel" if per_channel else "")
        transformers = () if per_channel else (states_transformers(),)
        yield Row("recurrent", name, work, (states_twin(), *transformers, states_twin("refattn")), aim=aim)


def _selected(shrink: int) -> Iterator[Row]:
    """Intervals and selected keys, small."""
    length = 2048 // shrink
    spans = sparse.Spans(lens=((length, length),), heads=(8, 2), head_size=64, every=length // 4, image=length // 8)
    contenders = sparse.spans_twin(), sparse.causal_call(), peers.aten_cpu_masked(), peers.sdpa(masked=True)
    reference = sparse.spans_twin("refattn")
    yield row_of(f"prefill-{length}-images", spans, *contenders, reference, aim="1.05 of a causal call")
    index = sparse.IndexScores(4, 8192 // shrink, num_heads=16)
    yield Row(
        "sparse",
        f"scores-4x{index.seq_len}",
        index,
        (sparse.scores_twin(), sparse.scores_einsum(), sparse.scores_twin("refattn")),
    )
    best = sparse.Selection(4, 32768 // shrink, 2048 // shrink)
    yield Row("sparse", f"select-4x{best.seq_len}", best, (sparse.select_twin(), sparse.torch_topk()))
    sizes: dict[str, Any] = dict(num_heads=16, rank=128, rope=32)
    latents = sparse.SelectedLatents(4, 16384 // shrink, 2048 // shrink, **sizes)
    for work, name in ((latents, ""), (replace(latents, packed=True), "-packed")):
        yield Row(
            "sparse",
            f"decode-4x{latents.topk}-of-{latents.seq_len}{name}",
            work,
            (sparse.selected_twin(), sparse.gathered()),
        )


def _compressed(shrink: int) -> Iterator[Row]:
    """Entries beside a window, small."""
    sizes: dict[str, Any] = dict(num_heads=16, size=128, block_size=128)
    for work, kind in (
        (entries.CompressedKeys(4, 8192 // shrink, ratio=4, topk=512 // shrink, **sizes), "selected"),
        (entries.CompressedKeys(4, 32768 // shrink, ratio=32, topk=0, **sizes), "all"),
    ):
        reference = entries.compressed_twin("refattn")
        contenders = entries.compressed_twin(), entries.compressed_gathered(), reference
        yield Row("compressed", f"decode-4x{work.seq_len}-ratio-{work.ratio}-{kind}", work, contenders)
    new = entries.NewEntries(1, 2048 // shrink, 2048 // shrink, size=128, block_size=128)
    contenders = entries.compress_twin(), entries.compress_gathered(new), entries.compress_twin("refattn")
    yield Row("compressed", f"entries-of-{new.query_len}", new, contenders)


def _engine(shrink: int) -> Iterator[Row]:
    """Prompts and decodes of a whole engine."""
    tokens = max(3, 24 // shrink)
    for phase, work, aim in (
        ("prefill", Generation(1, "prefill"), ""),
        (f"decode-8x{tokens - 1}", Generation(tokens, "decode"), "1.3 of transformers"),
    ):
        contenders = (generation.engine(), generation.transformers())
        yield Row("engine", phase, work, contenders, clock="own", aim=aim)
        contenders = (generation.engine(packed=True), generation.transformers())
        yield Row("engine", f"{phase}-packed", work, contenders, clock="own", aim="ahead of transformers")
