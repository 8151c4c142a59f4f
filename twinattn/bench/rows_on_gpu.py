"""The rows of a GPU, with the workloads of servers: each path beside the kernels of other libraries."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

from torch.nn.attention import SDPBackend

from twinattn.bench import entries, generation, peers, sparse, step_peers
from twinattn.bench.contender import (
    as_chain,
    layers,
    over_plain_cache,
    plain_attention,
    twin,
    twin_in_fp8,
)
from twinattn.bench.generation import Generation
from twinattn.bench.ranks import ranks
from twinattn.bench.row import Row, row_of, work_of
from twinattn.bench.states import (
    States,
    states_attn_gym,
    states_fla,
    states_flash_qla,
    states_flashinfer,
    states_twin,
    steps_attn_gym,
    steps_flashinfer,
    steps_twin,
)
from twinattn.bench.step_work import CacheWrite, QuantizedWrite, Slots, VirtualBatches
from twinattn.bench.work import Layers, drafts, latent_prefill, latents

KERNELS = ("triton", "fa4", "fa3")  # asked for, to see whether the chosen one is the fastest
MLA_KERNELS = ("triton", "fa3", "flash_mla")
LAYERS = 32  # layers of a model, in the rows of a step


def rows_on_gpu(shrink: int) -> Iterator[Row]:
    """List the rows of a GPU, with every length divided by `shrink`."""
    yield from _prompts(shrink)
    yield from _decodes(shrink)
    yield from _trees(shrink)
    yield from _windows_and_chunks(shrink)
    yield from _prefixes_and_pairs(shrink)
    yield from _latents(shrink)
    yield from _quantized(shrink)
    yield from _selected(shrink)
    yield from _compressed(shrink)
    yield from _writes(shrink)
    yield from _time_of_the_host(shrink)
    yield from _tables()
    yield from _states(shrink)
    yield from _engine(shrink)


def _prompts(shrink: int) -> Iterator[Row]:
    """Whole, and in chunks."""
    work = partial(work_of, shrink)
    ours = twin()
    forced = [twin(kernel=kernel) for kernel in KERNELS]
    prefill = work(*[(8192, 8192)] * 2)
    yield row_of(
        f"prefill-2x{prefill.tokens}",
        prefill,
        *(ours, *forced),
        *(peers.fa4(), peers.fa4(block_size=128), peers.fa4(block_size=None), peers.fa3(), peers.fa3(block_size=None)),
        *(peers.flashinfer_prefill(), peers.sdpa(SDPBackend.CUDNN_ATTENTION), peers.sdpa(SDPBackend.FLASH_ATTENTION)),
        *(peers.flex(), peers.fa2(), peers.fa2(block_size=None)),
        aim="FA4 by hand within 2 %, 1.1 ahead of FlashInfer",
    )
    rows_alone = [peer(block_size=None) for peer in (peers.fa4, peers.fa3, peers.fa2)]
    yield row_of(
        f"prefill-2x{prefill.tokens}",
        replace(prefill, path="varlen"),
        *(ours, *forced, twin(kernel="fa2"), *rows_alone, peers.sdpa(SDPBackend.CUDNN_ATTENTION)),
        aim="FA4 by hand within 2 %",
    )
    prefill = work(*[(8192, 8192)] * 2, block_size=128)
    yield row_of(
        f"prefill-2x{prefill.tokens}-blocks-128",
        prefill,
        *(ours, *forced, peers.fa4(block_size=128), peers.fa3(block_size=128), peers.flashinfer_prefill()),
        aim="at most FA3's time (1778 µs)",
    )
    for block_size, suffix in ((16, ""), (128, "-blocks-128")):
        chunk = work(*[(512, 16384 + 512)] * 4, block_size=block_size)
        yield row_of(
            f"chunk-4x{chunk.lens[0][0]}-of-{chunk.tokens}{suffix}",
            chunk,
            *(ours, *forced, peers.fa4(block_size=block_size), peers.fa3(block_size=block_size)),
            *(peers.fa3(block_size=block_size, is_scheduled=True), peers.flashinfer_prefill(), peers.fa2()),
            aim="at most FA3's time (932 µs)",
        )


def _decodes(shrink: int) -> Iterator[Row]:
    """Of one token, and of several."""
    work = partial(work_of, shrink)
    ours = twin()
    forced = [twin(kernel=kernel) for kernel in KERNELS]
    both_fa3 = peers.fa3(), peers.fa3(is_scheduled=True)
    for b, length, aim in (
        (64, 8192, "ahead of every peer"),
        (1, 8192, "at most 11 µs"),
        (1, 131072, "at most 130 µs"),
        (8, 8192, "at most 68 µs"),
        (256, 1024, "at most 257 µs"),
    ):
        decode = work(*[(1, length)] * b)
        yield row_of(
            f"decode-{b}x{decode.tokens}",
            decode,
            *(ours, *forced, peers.flashinfer_decode(), *both_fa3, peers.fa2(), peers.fa4(), peers.sdpa()),
            aim=aim,
        )
    tokens = 16  # new tokens per sequence, whatever the lengths are divided by
    decode = replace(decode, lens=((tokens, 8192 // shrink + tokens),) * 64)
    yield row_of(
        f"decode-64x{decode.tokens}-tokens-{tokens}",
        decode,
        *(ours, *forced, *both_fa3, peers.flashinfer_prefill("fa2"), peers.flashinfer_prefill()),
        *(peers.fa2(), peers.fa4()),
        aim="at most 515 µs",
    )


def _trees(shrink: int) -> Iterator[Row]:
    """Of drafts."""
    ours = twin()
    chains = peers.fa3(), twin("chunked_prefill"), peers.flashinfer_prefill("fa2"), peers.fa4()
    for b, nodes, aim in ((64, 16, "at most 530 µs"), (8, 64, "at most 150 µs"), (1, 64, "at most 32 µs")):
        keys = 8192 // shrink
        yield row_of(
            f"tree-{b}x{keys}-drafts-{nodes}",
            drafts(((nodes, keys + nodes),) * b),
            *(ours, twin(kernel="triton"), twin(kernel="fa3"), peers.flashinfer_tree(), *map(as_chain, chains)),
            aim=aim,
        )


def _windows_and_chunks(shrink: int) -> Iterator[Row]:
    """Over some of the keys."""
    work = partial(work_of, shrink)
    ours = twin()
    forced = [twin(kernel=kernel) for kernel in KERNELS]
    decode = work(*[(1, 16384)] * 64, window=1024)
    window = decode.window[0] + 1
    yield row_of(
        f"decode-64x{decode.tokens}-window-{window}",
        decode,
        *(ours, *forced, peers.fa4(), peers.fa3(), peers.fa3(is_scheduled=True), peers.fa2()),
        peers.flashinfer_decode(),
        aim="at most 70 µs",
    )
    # Without FA3, whose windows of prefills are wrong, FlashInfer, which compiles for minutes before its first one, and
    # FA4 over rows, which hung there (flash-attn-4 4.0.0b36, NVIDIA H200: a second call did not come back).
    prefill = work((16384, 16384), window=1024)
    yield row_of(
        f"prefill-{prefill.tokens}-window-{window}",
        prefill,
        *(ours, twin(kernel="triton"), twin(kernel="fa4"), peers.fa4(), peers.fa2(), peers.flex()),
        aim="at most FA4's time",
    )

    prefill = work((65536, 65536), chunk=8192)
    yield row_of(
        f"prefill-{prefill.tokens}-chunk-{prefill.chunk}",
        prefill,
        *(ours, *forced, peers.fa4_chunks(), peers.fa3_chunks(), peers.flex()),
        aim="ahead of both",
    )
    decode = work(*[(1, 16384)] * 64, chunk=8192)
    yield row_of(
        f"decode-64x{decode.tokens}-chunk-{decode.chunk}",
        decode,
        *(ours, *forced, peers.fa4_chunks(), peers.fa3_chunks()),
        aim="ahead of both",
    )


def _prefixes_and_pairs(shrink: int) -> Iterator[Row]:
    """Cascades, and differential heads."""
    work, ours = partial(work_of, shrink), twin()
    cascade = work(*[(1, 8192 + 256)] * 64, shared=8192)
    yield row_of(
        f"decode-64-prefix-{cascade.shared}-own-{cascade.tokens - cascade.shared}",
        cascade,
        *(ours, peers.fa4_cascade(), peers.flashinfer_cascade(), twin("chunked_prefill", name="without cascade")),
        aim="at most 45 µs",
    )

    by_hand = peers.fa4_differential(wide=False), peers.fa4_differential(wide=True), plain_attention()
    decode = work(*[(1, 8192)] * 64, heads=(32, 8), head_size=64, path="differential")
    yield row_of(f"decode-64x{decode.tokens}", decode, ours, *by_hand, aim="at most 270 µs")
    prefill = work((8192, 8192), heads=(32, 32), head_size=64, path="differential")
    yield row_of(f"prefill-{prefill.tokens}", prefill, ours, *by_hand, aim="at most 0.85 ms")


def _latents(shrink: int) -> Iterator[Row]:
    """With the sizes of DeepSeek-V3: latents of 512, rotary keys of 64, before absorption 192 and 128."""
    ours = twin()
    forced = [twin(kernel=kernel) for kernel in MLA_KERNELS]
    by_hand = peers.flash_mla(), peers.fa3_latents(), peers.flashinfer_latents(), peers.flashinfer_latents("fa2")
    for b, length, heads, aim in (
        (64, 8192, 128, "at most the best peer"),
        (64, 8192, 16, "at most 152 µs"),
        (1, 131072, 128, "at most 81 µs"),
        (128, 2048, 16, "at most 78 µs"),
    ):
        decode = latents(((1, length // shrink),) * b, heads=(heads, 1))
        name = f"decode-{b}x{decode.tokens}-heads-{heads}"
        yield row_of(name, decode, ours, *forced, *by_hand, aim=aim)
    plain = [over_plain_cache(peer) for peer in (ours, twin(kernel="triton"), peers.flash_mla())]
    in_fp8 = twin_in_fp8(), peers.flash_mla_fp8()
    for b, length, heads, aim in (
        (64, 8192, 128, "at most 330 µs; rounded 230"),
        (64, 8192, 16, "at most 85 µs"),
        (1, 131072, 128, "rounded 68 µs"),
    ):
        decode = latents(((1, length // shrink),) * b, heads=(heads, 1), stored="e4m3")
        name = f"decode-{b}x{decode.tokens}-heads-{heads}-fp8"
        yield row_of(name, decode, ours, *in_fp8, *plain, aim=aim)
    tokens = 2  # new tokens per sequence, whatever the lengths are divided by
    decode = latents(((tokens, 8192 // shrink + tokens),) * 32)
    yield row_of(
        f"decode-32x{decode.tokens}-tokens-{tokens}-heads-128",
        decode,
        *(ours, *forced, *by_hand),
        aim="at most the best peer",
    )
    for b, nodes, heads in ((64, 4, 16), (32, 8, 128)):
        lens = ((nodes, 8192 // shrink + nodes),) * b
        yield row_of(
            f"tree-{b}x{8192 // shrink}-drafts-{nodes}-heads-{heads}",
            latents(lens, heads=(heads, 1), plan_of="speculative", trees="rooted"),
            *(ours, *forced, *map(as_chain, by_hand[:2])),
            aim="the best peer's time for a chain",
        )
    made = work_of(shrink, *[(8192, 8192)] * 2, heads=(16, 16), head_size=192, value_head_size=128, path="varlen")
    yield row_of(
        f"prefill-2x{made.tokens}-heads-192-128",
        made,
        *(ours, twin(kernel="fa4"), twin(kernel="fa3"), peers.fa4(block_size=None), peers.fa3(block_size=None)),
        aim="FA4 by hand within 2 %",
    )
    million = work_of(shrink, (1, 1048576), path="context_parallel", ranks=2)
    yield row_of(f"decode-1x{million.tokens}", million, ranks(2), ranks(1), clock="own", aim="at most 0.6 of one GPU")
    for query_len, seq_len in ((8192, 8192), (1024, 32768 + 1024)):
        prompts = latent_prefill(((query_len // shrink, seq_len // shrink),) * 2, workspace=8192 // shrink)
        yield Row(
            "mla",
            f"prefill-2x{prompts.lens[0][0]}-of-{prompts.tokens}",
            prompts,
            (ours, *(twin(kernel=kernel) for kernel in KERNELS[:2]), peers.latents_by_hand()),
            aim="ahead of FA4 by hand",
            memory=query_len < seq_len,
        )


def _quantized(shrink: int) -> Iterator[Row]:
    """Over fp8 and int8, beside our own rows over a plain cache."""
    work, ours = partial(work_of, shrink, path="quantized", stored="e4m3"), twin()
    plain = over_plain_cache(ours)
    for b, length, stored, aim in (
        (64, 8192, "e4m3", "at most 285 µs"),
        (8, 8192, "e4m3", "at most 38 µs"),
        (1, 131072, "e4m3", "at most 72 µs"),
        (64, 8192, "e5m2", "as e4m3"),
        (64, 8192, "int8", "at most 290 µs"),
        (64, 8192, "int4", "at most 170 µs"),
        (8, 8192, "int4", "a quarter of a plain cache"),
        (1, 131072, "int4", "a quarter of a plain cache"),
    ):
        decode = work(*[(1, length)] * b, stored=stored)
        by_hand = (peers.fa3_quantized(), peers.flashinfer_quantized()) if stored == "e4m3" else ()
        name = f"decode-{b}x{decode.tokens}-{'fp8' if stored == 'e4m3' else stored}"
        yield row_of(name, decode, ours, *by_hand, plain, aim=aim)
    forced = [twin(kernel=kernel) for kernel in KERNELS]
    for name, b, query_len, seq_len, stored in (
        ("prefill", 2, 8192, 8192, "e4m3"),
        ("chunk", 4, 512, 16384 + 512, "e4m3"),
        ("prefill", 2, 8192, 8192, "int8"),
        ("prefill", 2, 8192, 8192, "int4"),
    ):
        prompts = work(*[(query_len, seq_len)] * b, stored=stored)
        suffix = "fp8" if stored == "e4m3" else stored
        context = "" if query_len == seq_len else f"-of-{prompts.tokens}"
        yield row_of(
            f"{name}-{b}x{prompts.lens[0][0]}{context}-{suffix}",
            prompts,
            *(ours, *forced, *([peers.fa3_quantized()] if suffix == "fp8" else []), plain),
            aim="as a plain cache",
            memory=True,
        )
    nodes, keys = 16, 8192 // shrink
    trees = replace(drafts(((nodes, keys + nodes),) * 64), path="quantized", plan_of="speculative", stored="e4m3")
    yield row_of(f"tree-64x{keys}-drafts-{nodes}-fp8", trees, ours, plain, aim="ahead of a plain cache")
    cascade = work(*[(1, 8192 + 256)] * 64, shared=8192, plan_of="cascade")
    yield row_of(
        f"cascade-64-prefix-{cascade.shared}-own-{cascade.tokens - cascade.shared}-fp8",
        cascade,
        *(ours, twin("quantized", name="without cascade"), plain),
        aim="ahead of a plain cache",
    )
    write = QuantizedWrite(65536 // shrink)
    yield Row(
        "quantized",
        f"write-{write.num_tokens}-fp8",
        write,
        (step_peers.quantized_write_twin(),),
        aim="0.85 of the copy's speed",
    )


def _selected(shrink: int) -> Iterator[Row]:
    """Prompts with images of Gemma 3, and the layers of DeepSeek-V3.2."""
    length = 8192 // shrink
    spans = sparse.Spans(lens=((length, length),) * 2, every=length // 8, image=length // 32)
    ours = sparse.spans_twin(), sparse.spans_twin(kernel="triton")
    contenders = *ours, sparse.causal_call(), peers.sdpa(masked=True)
    yield row_of(f"prefill-2x{length}-images", spans, *contenders, aim="at most 1.05 of a causal call")
    for b, aim in ((16, "at most 110 µs"), (1, "")):
        index = sparse.IndexScores(b, 131072 // shrink)
        by_einsum = (sparse.scores_einsum(),)
        name = f"scores-{b}x{index.seq_len}"
        yield Row("sparse", name, index, (sparse.scores_twin(), *by_einsum), aim=aim)
    for b, aim in ((1, "at most 40 µs"), (64, "at most 90 µs")):
        best = sparse.Selection(b, 131072 // shrink, 2048 // shrink)
        name = f"select-{b}x{best.seq_len}"
        both = sparse.select_twin(), sparse.torch_topk()
        yield Row("sparse", name, best, both, aim=aim)
    for b in (1, 64, 256):
        latents = sparse.SelectedLatents(b, 32768 // shrink, 2048 // shrink)
        yield Row(
            "sparse",
            f"decode-{b}x{latents.topk}-of-{latents.seq_len}",
            latents,
            (sparse.selected_twin(), sparse.gathered()),
            aim="within 1.4 of FlashMLA's sparse decode",
        )
    for b, aim in ((1, "FlashMLA's 17 µs"), (8, ""), (64, "FlashMLA's 91 µs")):
        packed = sparse.SelectedLatents(b, 131072 // shrink, 2048 // shrink, packed=True)
        ours = sparse.selected_twin(), sparse.selected_twin(kernel="triton")
        yield Row(
            "sparse",
            f"decode-{b}x{packed.topk}-of-{packed.seq_len}-packed",
            packed,
            (*ours, sparse.selected_flash_mla_packed()),
            aim=aim,
        )
    prompt = sparse.SelectedLatents(1, 65536 // shrink, 2048 // shrink, query_len=4096 // shrink)
    yield Row(
        "sparse",
        f"prefill-{prompt.tokens}x{prompt.topk}-of-{prompt.seq_len}",
        prompt,
        (sparse.selected_twin(), sparse.selected_flash_mla()),
        aim="at most FlashMLA's time",
    )


def _compressed(shrink: int) -> Iterator[Row]:
    """Entries beside a window, of the layers of DeepSeek-V4: selected of those of 4 tokens, all of those of 128.

    Of the peers only FlashMLA reads fp8, in its kernel for decodes.
    """
    ours = entries.compressed_twin(), entries.compressed_twin(kernel="triton")
    others = entries.compressed_flash_mla(), entries.compressed_attn_gym()
    for b in (1, 64):
        for work, kind in (
            (entries.CompressedKeys(b, 131072 // shrink, ratio=4, topk=512 // shrink), "selected"),
            (entries.CompressedKeys(b, 131072 // shrink, ratio=128, topk=0), "all"),
        ):
            name = f"decode-{b}x{work.seq_len}-ratio-{work.ratio}-{kind}"
            yield Row("compressed", name, work, (*ours, *others, entries.compressed_gathered()))
            quantized = replace(work, fp8=True)
            yield Row("compressed", f"{name}-fp8", quantized, (*ours, entries.compressed_flash_mla_fp8()))
    for ratio, topk, kind in ((4, 512 // shrink, "selected"), (128, 0, "all")):
        prompt = entries.CompressedKeys(1, 8192 // shrink, ratio, topk, query_len=8192 // shrink)
        name = f"prefill-{prompt.tokens}-ratio-{ratio}-{kind}"
        yield Row("compressed", name, prompt, (*ours, *others, entries.compressed_attn_gym_prompts()))
    for ratio, overlap in ((4, True), (128, False)):
        new = entries.NewEntries(1, 8192 // shrink, 8192 // shrink, ratio=ratio, overlap=overlap)
        contenders = entries.compress_twin(), entries.compress_gathered(new)
        yield Row("compressed", f"entries-of-{new.query_len}-ratio-{ratio}", new, contenders)
    decode = entries.NewEntries(64, 8192 // shrink, 1)
    contenders = entries.compress_twin(), entries.compress_gathered(decode)
    yield Row("compressed", "entries-of-64-decodes", decode, contenders)


def _writes(shrink: int) -> Iterator[Row]:
    """Into the pool."""
    write = CacheWrite(65536 // shrink)
    yield Row(
        "kv_cache",
        f"write-{write.num_tokens}",
        write,
        (step_peers.write_twin(), step_peers.write_index_put()),
        aim="0.85 of the copy's speed",
    )


def _time_of_the_host(shrink: int) -> Iterator[Row]:
    """Of a call, and of a step with all its layers."""
    work, ours = partial(work_of, shrink), twin()
    for decode, its_peers in (
        (work(*[(1, 1024)] * 8), (peers.fa4(), peers.fa3(), peers.fa2())),
        (work(*[(1, 16384)] * 8, window=1024), (peers.fa4(), peers.fa3(), peers.fa2())),
        (work(*[(1, 16384)] * 8, chunk=8192), (peers.fa4_chunks(), peers.fa3_chunks())),
    ):
        yield row_of("host-time-of-a-call", decode, ours, *its_peers, clock="host", aim="at most 45 µs")
    for decode in (work(*[(1, 16384)] * 64, window=1024), work(*[(1, 16384)] * 64, chunk=8192)):
        for clock in ("host", "graph"):
            yield Row(
                decode.path,
                f"step-of-{LAYERS}-layers-{clock}",
                Layers(decode, LAYERS),
                (layers(LAYERS), layers(LAYERS, plan_in_each=True)),
                clock=clock,
                aim="tables once a step: no launch for them in a layer",
                launches=True,
            )


def _tables() -> Iterator[Row]:
    """Of a step of decodes."""
    for clock, aim in (("host", "under 50 µs, without a synchronisation"), ("graph", "can be captured")):
        # The peer waits for the device, which no graph can hold.
        host_only = (step_peers.virtual_batches_numpy(),) if clock == "host" else ()
        tables = VirtualBatches(256, 32768, 8192)
        virtual = (step_peers.virtual_batches_twin(), *host_only)
        yield Row("local", f"virtual-batches-256-{clock}", tables, virtual, clock=clock, aim=aim)
        slots = Slots(256, 32768, 8192)
        yield Row("metadata", f"slots-256-{clock}", slots, (step_peers.slots_twin(),), clock=clock, aim=aim)


def _states(shrink: int) -> Iterator[Row]:
    """Layers that keep one."""
    for num_seqs, query_len, heads in (
        *((b, 1, (32, 16)) for b in (1, 64, 256)),
        *((b, length // shrink, (32, 16)) for b, length in ((1, 8192), (1, 32768), (8, 1024))),
    ):
        states = States(num_seqs, query_len, heads)
        aims = {1: "2.7 µs", 64: "67 µs", 256: "258 µs"} if query_len == 1 else {}
        kind = "decode" if query_len == 1 else f"prefill-{query_len}"
        name, aim = f"{kind}-{num_seqs}x{heads[0]}-heads", aims.get(num_seqs, "the best peer")
        of_prompts = () if query_len == 1 else (states_twin(kernel="triton"), states_flash_qla())
        contenders = states_twin(), *of_prompts, states_flashinfer(), states_fla(), states_attn_gym()
        yield Row("recurrent", name, states, contenders, aim=aim)
    for num_seqs, aim in ((1, "43 µs: as without a ring"), (64, "640 µs"), (256, "2400 µs")):
        states = States(num_seqs, 1, (32, 16), steps=16)
        contenders = steps_twin("replay", 16), steps_twin("recurrent"), steps_flashinfer(), steps_attn_gym()
        yield Row("replay", f"16-decodes-{num_seqs}x32-heads", states, contenders, aim=aim)


def _engine(shrink: int) -> Iterator[Row]:
    """Prompts, decodes and both of a whole engine."""
    tokens, count, length = max(3, 65 // shrink), max(2, 32 // shrink), 256 // shrink
    contenders = (generation.engine(), generation.transformers(), generation.continuous_batching())
    for name, phase, max_tokens in (
        (f"prefill-{count}x{length}", "prefill", 1),
        (f"decode-{count}x{tokens - 1}", "decode", tokens),
        (f"answers-{count}x{length}+{tokens}", "both", tokens),
    ):
        work = Generation(max_tokens, phase, num_prompts=count, prompt_tokens=length)
        yield Row("engine", name, work, contenders, clock="own", aim="ahead of transformers")
