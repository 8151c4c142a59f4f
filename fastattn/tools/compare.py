"""`fastattn compare`: every path computed by both twins on this machine, side by side.

For each path it runs one small workload and shows the error of the fast twin against the reference in a wider type, the
error that the tolerance allows, the times of both, and the memory that a call needs besides its arguments. This takes
seconds; `fastattn bench` takes minutes and also measures other kernels.
"""

import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from torch import Tensor

from fastattn.tools.bench import measure
from fastattn.tools.bench.report import duration
from fastattn.tools.demo import PeakMemory, check_device
from refattn import cascade, metadata, quantized
from refattn.conformance import HARMLESS, Case, Paged, assert_close, build, prepare
from refattn.conformance.tolerance import WIDER, allowed, computing_in, distance
from refattn.interface import AttentionOptions, Batch, Fp8Scales, Group, Int8Scales, Shard, Trees, simulate_ranks

TWINS = ("refattn", "fastattn")
BLOCK = 16  # tokens
SECONDS = 0.2  # for the calls of each twin on a CPU; whoever needs more for three calls gets three
MILLISECONDS = 50  # on a GPU

Answer = tuple[Tensor, ...]
Cast = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Work:
    """A piece of work for a path.

    Attributes:
        path: whose it is.
        name: the work in short.
        prepare: makes the call that is timed, given a package and what brings a tensor into a type.
        exact: it moves data, so the twins have the same bits.
        about: the work at length.
    """

    path: str
    name: str
    prepare: Callable[[str, Cast], Callable[[], Answer]]
    exact: bool = False
    about: str = ""


@dataclass(frozen=True)
class Result:
    """What came of a piece of work: the largest error, what is allowed, and seconds and bytes of each twin."""

    work: Work
    error: float
    tolerance: float
    within: bool
    seconds: dict[str, float]
    peak_bytes: dict[str, int | None]


def run(device: str = "cpu", *, quick: bool = False, console: Console | None = None) -> bool:
    """Compare the twins on every path, and print a table.

    Args:
        device: where to compute: in float32 on a CPU, in bfloat16 on a GPU.
        quick: a sixteenth of every length, to see that it works.
        console: where to print; standard output if None.

    Returns:
        Whether every answer is within its tolerance.

    Raises:
        ValueError: if there is no such device.
    """
    console = console or Console()
    check_device(device)
    place = torch.device(device)
    dtype = torch.bfloat16 if place.type == "cuda" else torch.float32
    works = list(_works(place, dtype, 16 if quick else 1))
    title = f"Both twins on {place}, {str(dtype).removeprefix('torch.')}"
    table = Table(title=title, box=SIMPLE_HEAD, padding=0)  # fits into 80 columns
    for column in ("path", "work"):
        table.add_column(column, no_wrap=True)
    for column in ("error", "allowed", "refattn", "fastattn", "MiB"):
        table.add_column(column, justify="right", no_wrap=True)
    proven = True
    for work in works:
        try:
            result = compare(work, place, dtype)
        except NotImplementedError:
            table.add_row(work.path, work.name, *["-"] * 5, style="dim")
            continue
        proven &= result.within
        table.add_row(
            work.path,
            work.name,
            "0" if work.exact else f"{result.error:.0e}",
            "0" if work.exact else f"{result.tolerance:.0e}",
            *map(duration, result.seconds.values()),
            " / ".join("-" if held is None else f"{held / 2**20:.0f}" for held in result.peak_bytes.values()),
            style="" if result.within else "red",
        )
    console.print(table)
    console.print(
        f"mixed: {works[1].about}. allowed: twice the error of the reference's own formula in that type, and rounding; "
        "the LSE is held to it, too. MiB: what a call of refattn / of fastattn holds at most, beside its arguments. "
        "A row of dashes: no kernel computes that here."
    )
    console.print("[green]Every answer is within its tolerance." if proven else "[red]Not every answer is.")
    return proven


def compare(work: Work, device: torch.device, dtype: torch.dtype) -> Result:
    """Compute a piece of work with both twins, and measure them.

    Args:
        work: what to compute.
        device: where.
        dtype: in what type.
    """
    calls = {twin: work.prepare(twin, lambda x: x.to(dtype)) for twin in TWINS}
    peak_bytes = {}
    for twin, call in calls.items():
        call()  # compiles what is to be compiled
        with PeakMemory(device) as memory:
            answer = call()
        peak_bytes[twin] = memory.peak_bytes
    exact = work.prepare("refattn", lambda x: x.to(WIDER[dtype]))()
    with computing_in(dtype):
        low = work.prepare("refattn", lambda x: x.to(dtype))()
    within = True
    for name, *parts in zip(("out", "lse"), answer, exact, low, strict=False):
        try:
            assert_close(*parts, name=name)
        except AssertionError:
            within = False
    error, tolerance = distance(answer[0], exact[0]).max, allowed(exact[0], low[0], answer[0].dtype).max
    if work.exact:
        within, tolerance = all(map(torch.equal, answer, low)), 0.0
    if device.type == "cuda":
        timed = {
            twin: measure.summarize(measure.on_gpu([call], clock="events", milliseconds=MILLISECONDS))
            for twin, call in calls.items()
        }
    else:
        timed = measure.take_turns({twin: [call] for twin, call in calls.items()}, seconds=SECONDS)
    return Result(work, error, tolerance, within, {twin: timing.median for twin, timing in timed.items()}, peak_bytes)


def _works(device: torch.device, dtype: torch.dtype, shrink: int) -> Iterator[Work]:
    """Yield a piece of work for each path; lengths are divided by `shrink`."""
    long, new = 1024 // shrink, 256 // shrink
    window, chunk, shared = long // 8, long // 4, long // 2
    lens = ((new, long), *((1, long + i) for i in range(8)))
    mixed = build(Case("mixed", lens, heads=(8, 2)), dtype=dtype, device=str(device), poison=HARMLESS)
    prompts = build(Case("prompts", ((shared, shared),) * 2, heads=(8, 2)), dtype=dtype, device=str(device))
    blocks, pools = mixed.key_cache.shape[0], mixed.tensors[1:3]
    on_pages = partial(_path, tensors=mixed.tensors[:3], batch=mixed.batch, block_size=BLOCK)
    yield _path("dense", f"2 prompts of {shared}", prompts.rows[:3], prompts.batch)
    about = f"a chunk of {new} tokens beside 8 decodes, each over {long} keys"
    yield replace(on_pages("chunked_prefill", "mixed"), about=about)
    yield on_pages("sliding_window", f"mixed, window {window}", window_size=(window - 1, 0))
    yield on_pages("local", f"mixed, chunks {chunk}", chunk_size=chunk)

    tables = [[*range(shared // BLOCK), shared // BLOCK + i] for i in range(8)]
    lengths = ([1] * 8, [shared + 1 + i for i in range(8)], tables)
    prefixes = cascade.find_prefixes(*lengths, block_size=BLOCK)
    decodes = (_draw(device, 8, 8, 64), *pools), metadata.make_batch(*lengths, device=device)
    yield _path("cascade", f"8 sharing {shared}", *decodes, prefixes=prefixes, block_size=BLOCK)
    parents = torch.tensor([[-1, 0, 0, 1, 1, 2, 3, 3]] * 8, dtype=torch.int32, device=device)
    trees = Trees(parents, torch.full((8,), 8, dtype=torch.int32, device=device))
    drafts = metadata.make_batch([8] * 8, [long // 8] * 8, [[*range(-(-long // 8 // BLOCK))]] * 8, device=device)
    tokens = (_draw(device, 64, 8, 64), *pools)
    yield _path("speculative", "8 trees of 8", tokens, drafts, trees=trees, block_size=BLOCK)

    pairs = torch.stack([torch.stack(pools)] * 2)
    subtraction = dict(lambda_full=torch.tensor(0.4, device=device), lambda_init=0.2)
    yield _path("differential", "mixed", (mixed.query, pairs), mixed.batch, **subtraction, block_size=BLOCK)
    latents = _draw(device, blocks, BLOCK, 576)
    absorbed = (_draw(device, *mixed.query.shape[:2], 576), latents)
    yield _path("mla", "mixed", absorbed, mixed.batch, latent_rank=512, softmax_scale=192**-0.5, block_size=BLOCK)
    yield Work("mla", "mixed, prefill", partial(_mla_prefill, mixed, latents, long))
    yield from _quantized(mixed)

    yield Work("context_parallel", "mixed, 2 ranks", partial(_on_two_ranks, mixed))

    parts = [_draw(device, 4 * new, 8, 64) for _ in range(2)], [_draw(device, 4 * new, 8).float() for _ in range(2)]
    yield Work("merge", f"2 of {4 * new} rows", partial(_merge, *parts))
    yield Work("kv_cache", f"write {len(mixed.query)} tokens", partial(_write, mixed), exact=True)


def _draw(device: torch.device, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(device)


def _path(path: str, name: str, tensors: tuple[Tensor, ...], batch: Batch, **arguments: Any) -> Work:
    """Return the work of a path by its `plan` and its `attention`; the plan is made before the time is taken."""

    def cast_all(cast: Cast, x: Any) -> Any:
        return cast(x) if isinstance(x, Tensor) and x.is_floating_point() else x

    def prepare_call(package: str, cast: Cast) -> Callable[[], Answer]:
        module = importlib.import_module(f"{package}.{path}")
        tokens = (cast_all(cast, x) for x in tensors)
        given = {name: cast_all(cast, x) for name, x in arguments.items()}
        return prepare(module, *tokens, batch, **given, return_lse=True)

    return Work(path, name, prepare_call)


def _mla_prefill(mixed: Paged, latents: Tensor, workspace: int, package: str, cast: Cast) -> Callable[[], Answer]:
    path = importlib.import_module(f"{package}.mla")
    device, tokens, heads = mixed.query.device, *mixed.query.shape[:2]
    plan = path.plan_prefill(mixed.batch, block_size=BLOCK, workspace=workspace)
    new = (_draw(device, tokens, heads, 192), _draw(device, tokens, 512), _draw(device, tokens, 64), latents)
    names = ("key_projection", "value_projection")
    projections = {name: cast(_draw(device, heads, 128, 512) * 512**-0.5) for name in names}
    options = AttentionOptions(softmax_scale=192**-0.5)
    return partial(path.prefill, *map(cast, new), plan, options, **projections, return_lse=True)


def _quantized(mixed: Paged) -> Iterator[Work]:
    """Yield the reads of both kinds of quantised cache, written by the reference."""
    device, (blocks, _, heads, size) = mixed.query.device, mixed.key_cache.shape
    key, value = (_draw(torch.device("cpu"), blocks * BLOCK, heads, size) + i for i in (0, 1))
    slots = torch.arange(len(key))
    key_codes, value_codes, token_scales = quantized.allocate_int8(blocks, BLOCK, heads, size)
    fp8_keys, fp8_values = (torch.zeros(blocks, BLOCK, heads, size, dtype=torch.uint8) for _ in range(2))
    channels = quantized.value_scales([value])
    of_int8, of_fp8 = Int8Scales(token_scales, channels), Fp8Scales(0.02, 0.02)
    quantized.write(key, value, key_codes, value_codes, slots, scales=of_int8)
    quantized.write(key, value, fp8_keys, fp8_values, slots, scales=of_fp8)
    kinds: dict[str, tuple[tuple[Tensor, Tensor], Fp8Scales | Int8Scales]] = {
        "int8": ((key_codes, value_codes), Int8Scales(token_scales.to(device), channels.to(device))),
        "fp8": ((fp8_keys, fp8_values), of_fp8),
    }
    for kind, (pools, scales) in kinds.items():
        tensors = (mixed.query, *(pool.to(device) for pool in pools))
        yield _path("quantized", f"mixed, {kind}", tensors, mixed.batch, scales=scales, block_size=BLOCK)


def _on_two_ranks(mixed: Paged, package: str, cast: Cast) -> Callable[[], Answer]:
    """Prepare a call per rank, in turns: each has half of the query heads, and other keys in a pool of its own."""
    path = importlib.import_module(f"{package}.context_parallel")
    device, (tokens, _, size), kv_heads = mixed.query.device, mixed.query.shape, mixed.key_cache.shape[2]
    queries = [cast(half) for half in mixed.query.chunk(2, dim=1)]
    key, value = (cast(_draw(device, tokens, kv_heads, size) + i) for i in range(2))
    pools = [[cast(_draw(device, *mixed.key_cache.shape) + rank + i) for i in range(2)] for rank in range(2)]
    plans = [path.plan(mixed.batch, shard=Shard(rank, 2), block_size=BLOCK) for rank in range(2)]

    def attend(group: Group) -> Answer:
        rank = group.rank
        answer: Answer = path.attention(
            queries[rank], key, value, *pools[rank], plans[rank], group=group, return_lse=True
        )
        return answer

    def call() -> Answer:
        return tuple(torch.cat(halves, dim=1) for halves in zip(*simulate_ranks(2, attend), strict=True))

    return call


def _merge(outs: list[Tensor], lses: list[Tensor], package: str, cast: Cast) -> Callable[[], Answer]:
    path = importlib.import_module(f"{package}.merge")
    return partial(path.merge, [cast(out) for out in outs], lses)


def _write(mixed: Paged, package: str, cast: Cast) -> Callable[[], Answer]:
    tokens = len(mixed.query)
    pools = [cast(pool).clone() for pool in mixed.tensors[1:3]]
    key, value = (cast(_draw(mixed.query.device, tokens, *pools[0].shape[2:])) for _ in range(2))
    slots = torch.arange(tokens, device=mixed.query.device).flip(0) * 2
    write = importlib.import_module(f"{package}.kv_cache").write

    def call() -> Answer:
        write(key, value, *pools, slots)
        return tuple(pools)

    return call
