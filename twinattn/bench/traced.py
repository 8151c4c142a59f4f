"""Rows of recorded shapes: the workloads of a file of FlashInfer-Bench, each beside the peers that take it."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from twinattn.bench import peers
from twinattn.bench.contender import Contender, twin
from twinattn.bench.row import Row, row_of
from twinattn.bench.work import Attention
from twinattn.kit import traces
from twinattn.kit.example import Example

AIM = "ahead of every peer"
QUERY_BEFORE = 128 + 64  # elements of a query over latents before absorption, where a workload has no scale


def rows_of_trace(file: Path, device_type: str) -> list[Row]:
    """Return a row for each workload of a file, named by its path, what it is, and its uuid.

    Args:
        file: one line of JSON per workload or trace, in the folder of a data set, beside `definitions`.
        device_type: "cpu" or "cuda".

    Raises:
        ValueError: naming the line, and what is missing or is no operation that is known.
    """
    batches, _ = traces.read(file, traces.path_of(file))
    return [_row(name, batch, device_type) for name, batch in batches.items()]


def _row(name: str, batch: Example, device_type: str) -> Row:
    queries, keys = (sum(x) for x in zip(*batch.lens, strict=True))
    kind = "decode" if queries == len(batch.lens) else "prefill"
    work = _work_of(batch)
    contenders = _on_cpu(work) if device_type == "cpu" else _on_gpu(work)
    return row_of(f"{kind}-{len(batch.lens)}-of-{keys}-keys-{name}", work, *contenders, aim=AIM)


def _work_of(batch: Example) -> Attention:
    """Return a workload of the kit as one of the benchmark, which has the same fields."""
    sizes: dict[str, Any] = dict(heads=batch.heads, head_size=batch.head_size, value_head_size=batch.value_head_size)
    usual = QUERY_BEFORE**-0.5 if batch.path == "mla" else None
    scale = batch.options.get("softmax_scale", usual)
    return Attention(batch.path, lens=batch.lens, block_size=batch.block_size, softmax_scale=scale, **sizes)


def _on_cpu(work: Attention) -> Sequence[Contender]:
    beside = dict(varlen=peers.aten_cpu, mla=peers.aten_cpu_latents, chunked_prefill=peers.aten_cpu_gathered)
    lens = {*work.lens}  # ATen's calls take sequences of one length, in whole pages, under the usual scale
    is_even = len(lens) == 1 and all(keys % work.block_size == 0 for _, keys in lens)
    is_even &= work.path == "mla" or work.softmax_scale is None
    return twin(), *([beside[work.path]()] if is_even else []), twin(package="refattn")


def _on_gpu(work: Attention) -> Sequence[Contender]:
    if work.path == "mla":
        return twin(), peers.flash_mla(), peers.fa3_latents(), peers.flashinfer_latents()
    block_size = None if work.path == "varlen" else work.block_size
    flash = peers.fa4(block_size=block_size), peers.fa3(block_size=block_size)
    if work.path == "varlen":
        return twin(), *flash, peers.fa2(block_size=None)
    is_decode = all(queries == 1 for queries, _ in work.lens)
    flashinfer = peers.flashinfer_decode() if is_decode else peers.flashinfer_prefill()
    return twin(), *flash, flashinfer, peers.fa2()
