"""`twinattn ladder`: a kernel from the formula to the roofline, one change per file, timed on the reader's GPU.

A ladder is a folder of notebooks/ladder; each file is a rung, a function `attention` that differs from the one before
by one change. This module lists and loads the rungs, has what all of them share, and times them beside the floor: what
the card needs at least, at the rates that it reached in the same run. A decode has to read all keys and values, and its
floor is the time of these bytes; a prompt has to multiply them with many queries, and its floor is that of a matrix
product of as many operations.
"""

import gc
import importlib.util
import inspect
import json
import re
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import cache, partial
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int32, Shaped
from torch import Tensor

from refattn.checks import check, check_folder
from refattn.modes import computing_in
from refattn.scales import FP8_FORMATS
from twinattn.course import copied
from twinattn.course.batches import BATCHES, Batch

LADDERS = tuple(BATCHES)
PER_SM = 4  # programs that an SM runs at once
MILLISECONDS = 20  # how long a rung is measured
CALLS = 10  # how many calls are timed on the CPU
JUDGED = 64  # queries at either end of a sequence whose outputs are held to the reference, where they are apart
# What an SM has: registers, room for programs, and the bytes of shared memory that each takes besides its own.
# Source: CUDA C++ Programming Guide, "Technical Specifications per Compute Capability", 8.0 to 10.0.
REGISTERS, BLOCKS_PER_SM, RESERVED = 65536, 32, 1024


class Rung(NamedTuple):
    """A file of a ladder."""

    number: int
    name: str
    title: str  # the first line of its docstring
    file: Path

    @property
    def about(self) -> list[str]:
        """The paragraphs of the docstring below its title: the idea, the gain, the source."""
        text = self.file.read_text().split('"""')[1]
        return [" ".join(part.split()) for part in text.strip().split("\n\n")[1:]]

    @property
    def synchronizes(self) -> bool:
        """Whether it reads lengths on the CPU, which no CUDA graph can capture: the rungs in PyTorch do."""
        text = self.file.read_text()
        return "@triton.jit" not in text and "\ndef plan(" not in text

    def load(self) -> ModuleType:
        """Import the file."""
        return _load(self.file)

    def missing(self, device: torch.device) -> str | None:
        """Return what the rung needs that a device does not have; None where it runs."""
        try:
            says = getattr(self.load(), "missing", None)
        except ModuleNotFoundError as error:
            if error.name != "triton":
                raise
            return "Triton, which is not installed: `pip install triton`, on Linux alone"
        return None if says is None else says(device)


@cache
def _load(file: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"ladder_{file.parent.name}_{file.stem}", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def rungs(ladder: str) -> list[Rung]:
    """Return the rungs of a ladder, from the formula up.

    Raises:
        ValueError: if there is no such ladder.
    """
    if ladder not in LADDERS:
        raise ValueError(f"ladder: expected one of {', '.join(LADDERS)}, got {ladder!r}")
    found = []
    for file in sorted((copied.folder() / "notebooks/ladder" / ladder).glob("[0-9][0-9]_*.py")):
        number, title = re.match(r'"""(\d+) · (.+)\.\n', file.read_text()).groups()  # type: ignore[union-attr]
        found.append(Rung(int(number), file.stem[3:], title, file))
    return found


# --- what all rungs share ---


class Sizes(NamedTuple):
    """The sizes of a batch over pages: sequences, heads, KV heads, head size, tokens in a block, blocks in a row."""

    b: int
    heads: int
    kv_heads: int
    size: int
    block_size: int
    columns: int


def check_decode(
    query: Float[Tensor, "b h d"],
    key_cache: Float[Tensor, "n p hk d"],
    value_cache: Float[Tensor, "n p hk d"],
    seq_lens: Int32[Tensor, "b"],
    block_table: Int32[Tensor, "b m"],
) -> Sizes:
    """Check the arguments of a decode, and return their sizes.

    Args:
        query: the newest token of each sequence.
        key_cache: the pool of keys.
        value_cache: the pool of values.
        seq_lens: keys of each sequence.
        block_table: the blocks of each sequence; entries past its last block are never read.

    Raises:
        ValueError: naming the argument that does not fit.
        NotImplementedError: if one is not contiguous: strides are not what a ladder is about.
    """
    sizes = _check_heads(
        _check(
            query=(query, "number b h d"),
            key_cache=(key_cache, "query: n p hk d"),
            value_cache=(value_cache, "query: n p hk d"),
            seq_lens=(seq_lens, "int32 b"),
            block_table=(block_table, "int32 b m"),
        )
    )
    return Sizes(*(sizes[letter] for letter in ("b", "h", "hk", "d", "p", "m")))


def check_rows(
    query: Float[Tensor, "t h d"],
    key: Float[Tensor, "s hk d"],
    value: Float[Tensor, "s hk d"],
    cu_seqlens_q: Int32[Tensor, "_"],  # [b+1]
    cu_seqlens_k: Int32[Tensor, "_"],  # [b+1]
) -> tuple[int, int, int, int]:
    """Check the arguments of a prefill over rows, and return their sizes: sequences, heads, KV heads, head size.

    Args:
        query: the last tokens of each sequence, one sequence after the other.
        key: the keys of all sequences, one after the other.
        value: the values that belong to them.
        cu_seqlens_q: where the queries of each sequence begin; the last entry is where they all end.
        cu_seqlens_k: likewise of the keys.

    Raises:
        ValueError: naming the argument that does not fit.
        NotImplementedError: if one is not contiguous.
    """
    sizes = _check_heads(
        _check(
            query=(query, "number t h d"),
            key=(key, "query: s hk d"),
            value=(value, "query: s hk d"),
            cu_seqlens_q=(cu_seqlens_q, "int32 b+1"),
            cu_seqlens_k=(cu_seqlens_k, "int32 b+1"),
        )
    )
    return len(cu_seqlens_q) - 1, sizes["h"], sizes["hk"], sizes["d"]


def check_pages(
    query: Float[Tensor, "t h d"],
    key_cache: Float[Tensor, "n p hk d"],
    value_cache: Float[Tensor, "n p hk d"],
    cu_seqlens_q: Int32[Tensor, "_"],  # [b+1]
    seq_lens: Int32[Tensor, "b"],
    block_table: Int32[Tensor, "b m"],
) -> Sizes:
    """Check the arguments of a prefill over pages, and return their sizes.

    Args:
        query: the last tokens of each sequence, one sequence after the other.
        key_cache: the pool of keys.
        value_cache: the pool of values.
        cu_seqlens_q: where the queries of each sequence begin; the last entry is where they all end.
        seq_lens: keys of each sequence.
        block_table: the blocks of each sequence; entries past its last block are never read.

    Raises:
        ValueError: naming the argument that does not fit.
        NotImplementedError: if one is not contiguous.
    """
    sizes = _check_heads(
        _check(
            query=(query, "number t h d"),
            key_cache=(key_cache, "query: n p hk d"),
            value_cache=(value_cache, "query: n p hk d"),
            seq_lens=(seq_lens, "int32 b"),
            block_table=(block_table, "int32 b m"),
            cu_seqlens_q=(cu_seqlens_q, "int32 b+1"),
        )
    )
    return Sizes(*(sizes[letter] for letter in ("b", "h", "hk", "d", "p", "m")))


class LatentSizes(NamedTuple):
    """The sizes of decodes over latents: sequences, heads, rank, rotary size, tokens in a block, blocks in a row."""

    b: int
    heads: int
    rank: int
    rope: int
    block_size: int
    columns: int


def check_latents(
    query: Float[Tensor, "b h d"],
    cache: Shaped[Tensor, "n p c"],
    seq_lens: Int32[Tensor, "b"],
    block_table: Int32[Tensor, "b m"],
    key_projection: Float[Tensor, "h nope r"],
    value_projection: Float[Tensor, "h dv r"],
) -> LatentSizes:
    """Check the arguments of decodes over latents, and return their sizes.

    Args:
        query: the newest token of each sequence, not absorbed, `d = nope + rope`, the rotary part last.
        cache: the pool of latents and rotary keys, `c = r + rope`; in the type of the query, or in fp8.
        seq_lens: keys of each sequence.
        block_table: the blocks of each sequence; entries past its last block are never read.
        key_projection: the matrices that make the keys of the heads from a latent.
        value_projection: those that make the values.

    Raises:
        ValueError: naming the argument that does not fit.
        NotImplementedError: if one is not contiguous.
    """
    is_fp8 = isinstance(cache, Tensor) and cache.dtype in FP8_FORMATS
    sizes = _check(
        query=(query, "number b h d"),
        cache=(cache, "n p c" if is_fp8 else "query: n p c"),
        seq_lens=(seq_lens, "int32 b"),
        block_table=(block_table, "int32 b m"),
        key_projection=(key_projection, "query: h nope r"),
        value_projection=(value_projection, "query: h dv r"),
    )
    rank, rope = sizes["r"], sizes["d"] - sizes["nope"]
    if sizes["c"] != rank + rope or any(x < 1 or x & (x - 1) for x in (rank, rope)):
        raise ValueError(
            "cache: expected a latent and a rotary key in each row, powers of two, "
            f"got c={sizes['c']} for r={rank} and rope={rope}"
        )
    return LatentSizes(sizes["b"], sizes["h"], rank, rope, sizes["p"], sizes["m"])


RING = dict(
    ring_key="query: n l h dk", ring_written="float n l hv dv", ring_log_decay="float n l hv", cursors="int32 n"
)


class StateSizes(NamedTuple):
    """The sizes of a step of states: tokens, sequences, value heads, their group, elements of a key and of a value."""

    t: int
    b: int
    heads: int
    group: int
    key_size: int
    value_size: int


def check_states(
    query: Float[Tensor, "t h dk"],
    key: Float[Tensor, "t h dk"],
    value: Float[Tensor, "t hv dv"],
    log_decay: Float[Tensor, "t hv"],
    beta: Float[Tensor, "t hv"],
    states: Float[Tensor, "n hv dv dk"],
    cu_seqlens_q: Int32[Tensor, "_"] | None,  # [b+1]
    state_indices: Int32[Tensor, "b"],
    has_initial_state: Bool[Tensor, "b"],
    **ring: Tensor,
) -> StateSizes:
    """Check the arguments of a step of a layer with a state, and return their sizes.

    Args:
        query: the new tokens of each sequence, one sequence after the other.
        key: their keys, of length 1.
        value: their values.
        log_decay: natural logarithm of the decay, finite.
        beta: how much of a token is written.
        states: the pool, changed in place.
        cu_seqlens_q: where the tokens of each sequence begin; the last entry is where they all end. None: one each.
        state_indices: the slot of each sequence.
        has_initial_state: which sequences have a state; others start from zeros.
        ring: the inputs since `states`, `ring_key`, `ring_written`, `ring_log_decay`, and `cursors`, how many; or none.

    Raises:
        ValueError: naming the argument that does not fit.
        NotImplementedError: if one is not contiguous.
    """
    sizes = _check(
        query=(query, "number t h dk"),
        key=(key, "query: t h dk"),
        value=(value, "query: t hv dv"),
        log_decay=(log_decay, "float t hv"),
        beta=(beta, "float t hv"),
        states=(states, "float n hv dv dk"),
        state_indices=(state_indices, "int32 b" if cu_seqlens_q is not None else "int32 t"),
        has_initial_state=(has_initial_state, "bool b" if cu_seqlens_q is not None else "bool t"),
        **({} if cu_seqlens_q is None else {"cu_seqlens_q": (cu_seqlens_q, "int32 b+1")}),
        **{name: (x, RING[name]) for name, x in ring.items()},
    )
    if sizes["hv"] % sizes["h"] or any(sizes[x] & (sizes[x] - 1) for x in ("dk", "dv")):
        raise ValueError(
            "value: expected a multiple of the heads of `key`, and powers of two as sizes of key and value, "
            f"got h={sizes['h']}, hv={sizes['hv']}, dk={sizes['dk']}, dv={sizes['dv']}"
        )
    group = sizes["hv"] // sizes["h"]
    return StateSizes(sizes["t"], sizes.get("b", sizes["t"]), sizes["hv"], group, sizes["dk"], sizes["dv"])


def _check(**tensors: tuple[Tensor, str]) -> dict[str, int]:
    """Check tensors by their letters, and return the size of each letter; `b+1` is that of `cu_seqlens_q`."""
    last = next((x for name, (x, _) in tensors.items() if name == "cu_seqlens_q"), None)
    given = {} if last is None or last.ndim != 1 else {"b": len(last) - 1, "b + 1": len(last)}
    sizes = check(given, **tensors)
    for name, (x, _) in tensors.items():
        if not x.is_contiguous():
            raise NotImplementedError(f"{name}: expected contiguous memory, got strides {list(x.stride())}")
    return sizes


def _check_heads(sizes: dict[str, int]) -> dict[str, int]:
    """Check that query heads are divided among KV heads, and that a tile holds a head; return the sizes."""
    if sizes["h"] % sizes["hk"] or sizes["d"] & (sizes["d"] - 1):
        raise ValueError(
            "query: expected a multiple of the KV heads as heads, and a power of two as head size, "
            f"got h={sizes['h']}, hk={sizes['hk']}, d={sizes['d']}"
        )
    return sizes


def programs_at_once(device: torch.device, per_sm: int = PER_SM) -> int:
    """Return how many programs of a decode a GPU runs at once, `per_sm` on each SM; a few for the interpreter."""
    sms = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4
    return per_sm * sms


# --- times ---


def measure(ladder: str, tell: Callable[[str], None], device: torch.device) -> dict[str, Any]:
    """Time each rung of a ladder on a GPU.

    Args:
        ladder: its name.
        tell: called with a line of text for each rung.
        device: the GPU.

    Returns:
        The date, the machine, and for each batch the floor and the rungs, as it goes into docs/results/ladder.

    Raises:
        AssertionError: if a rung is wrong; there is no time for a wrong output.
    """
    from triton.runtime.errors import OutOfResources

    from twinattn.bench import measure as clocks

    began = time.monotonic()
    ceilings = clocks.ceilings(device, torch.bfloat16, quick=False)
    about = {"ladder": ladder, **clocks.circumstances(), "machine": clocks.machine(device), "dtype": "bfloat16"}
    about |= {"ceilings": ceilings._asdict()}
    kernels: dict[str, dict[str, dict[str, Any]]] = {}  # by rung and name
    batches = []
    for name, batch in BATCHES[ladder].items():
        torch.manual_seed(0)
        inputs = batch.make_inputs(device)
        reads, writes, work = batch.reads(), batch.writes(), batch.flops()
        floor = max(ceilings.seconds(reads=reads, writes=writes), work / ceilings.product)
        judge = _judge(rungs(ladder)[0], batch, inputs)
        of_what = f"{(reads + writes) / 1e6:.0f} MB, {work / 1e9:.0f} GFLOP"
        tell(f"\n{name}: {of_what}, floor {1e6 * floor:.1f} µs\n{line_of('', HEAD)}")
        timed: list[dict[str, Any]] = []
        for rung in rungs(ladder):
            needed, before = rung.missing(device) or lacking(rung, inputs), _compiled()
            try:
                if needed is None:
                    call = call_of(rung, batch, inputs)
                    judge(call())
            except (torch.OutOfMemoryError, OutOfResources) as error:
                kind = "memory" if isinstance(error, torch.OutOfMemoryError) else "shared memory"
                needed = f"more {kind} than this GPU has"
            if needed is not None:
                timed.append({"number": rung.number, "name": rung.name, "missing": needed})
                tell(f"{rung.number:2} {rung.title:57} not run: it needs {needed}")
                continue
            new = [_describe(one, device) for one in _compiled() if all(one is not other for other in before)]
            kernels.setdefault(rung.name, {}).update({one["kernel"]: one for one in new})
            clock = "events" if rung.synchronizes else "graph"
            timing = clocks.summarize(clocks.on_gpu([call], clock=clock, milliseconds=MILLISECONDS))
            timed.append(
                {"number": rung.number, "name": rung.name, "clock": clock, **timing._asdict(), "cpu": _on_cpu(call)}
                | {
                    "share_of_floor": floor / timing.median,
                    "kernels": [one for _, one in sorted(kernels[rung.name].items())],
                }
            )
            tell(line_of(f"{rung.number:2} {rung.title}", _cells(timed[-1])))
            del call
        about_batch = {"name": name, **asdict(batch), "bytes": reads + writes, "operations": work, "floor": floor}
        batches.append({**about_batch, "rungs": timed})
        del inputs, judge
        torch.cuda.empty_cache()
    return {**about, "seconds": round(time.monotonic() - began, 1), "batches": batches}


HEAD = ("time", "of floor", "CPU", "registers", "spills", "shared", "per SM")


def _cells(timed: dict[str, Any]) -> list[str]:
    """Write what was found of a rung; registers and shared memory are those of its kernel, the first one by name."""
    cells = [f"{1e6 * timed['median']:.1f} µs{' *' * (timed['clock'] == 'events')}", f"{timed['share_of_floor']:.1%}"]
    cells.append(f"{1e6 * timed['cpu']:.0f} µs")
    for kernel in timed["kernels"][:1]:
        cells += [str(kernel[x]) for x in ("registers", "spills", "shared_bytes", "programs_per_sm")]
    return cells


def line_of(title: str, cells: Sequence[str]) -> str:
    """Write a line of a table: a title, and its cells."""
    return f"{title:60}" + "".join(f"{cell:>14}" for cell in cells)


def _named(function: Callable[..., Any], inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the inputs that a function has parameters for."""
    return {name: inputs[name] for name in inspect.signature(function).parameters if name in inputs}


def lacking(rung: Rung, inputs: Mapping[str, Any]) -> str | None:
    """Return what a rung needs that the inputs of a batch do not have; None if it runs."""
    needed = inspect.signature(rung.load().attention).parameters.values()
    lacking = [x.name for x in needed if x.default is inspect.Parameter.empty and x.name not in inputs]
    return f"`{lacking[0]}`, which this batch does not have" if lacking else None


def call_of(rung: Rung, batch: Batch, inputs: Mapping[str, Any]) -> Callable[[], Tensor]:
    """Return a call of a rung; a plan is made once, and what a call changes is a copy."""
    module = rung.load()
    step = {"step": module.plan(**_named(module.plan, inputs))} if hasattr(module, "plan") else {}
    return partial(module.attention, **_copied(_named(module.attention, inputs), batch), **step)


def _copied(given: dict[str, Any], batch: Batch) -> dict[str, Any]:
    """Return arguments with copies of those that a call changes in place."""
    return given | {name: given[name].clone() for name in batch.changes if name in given}


def _judge(reference: Rung, batch: Batch, inputs: Mapping[str, Any]) -> Callable[[Tensor], None]:
    """Return what holds the parts of a batch to the reference, by the one tolerance."""
    from twinattn.kit import tolerance

    attention, expected = reference.load().attention, []
    for own, part in batch.parts(inputs, JUDGED):
        given = _named(attention, part)
        wide = {name: x.float() if torch.is_tensor(x) and x.is_floating_point() else x for name, x in given.items()}
        ref = attention(**_copied(wide, batch))
        with computing_in(torch.bfloat16):
            expected.append((own, ref, attention(**_copied(given, batch))))

    def judge(out: Tensor) -> None:
        for own, ref, low in expected:
            tolerance.assert_close(out[own], ref, low)

    return judge


def _compiled() -> list[Any]:
    """List the kernels of Triton that are loaded, launched here or elsewhere."""
    from triton.compiler import CompiledKernel

    return [x for x in gc.get_objects() if type(x) is CompiledKernel and x.module is not None]


def _describe(kernel: Any, device: torch.device) -> dict[str, Any]:
    """Return what the compiler says of a kernel, and how many of its programs an SM has room for."""
    sm = torch.cuda.get_device_properties(device)
    warps, shared = kernel.metadata.num_warps, kernel.metadata.shared
    room = sm.shared_memory_per_multiprocessor, sm.max_threads_per_multi_processor
    return {
        "kernel": kernel.metadata.name,
        "registers": kernel.n_regs,
        "spills": kernel.n_spills,
        "shared_bytes": shared,
        "warps": warps,
        "stages": kernel.metadata.num_stages,
        "programs_per_sm": programs_that_fit(kernel.n_regs, warps, shared, *room),
    }


def programs_that_fit(registers: int, warps: int, shared: int, room: int, threads: int) -> int:
    """Return how many programs of a kernel an SM has room for.

    Args:
        registers: of a thread.
        warps: of a program.
        shared: bytes of shared memory of a program.
        room: those of an SM.
        threads: most threads of an SM.
    """
    of_program = -(-registers // 8) * 8 * 32 * warps  # a warp gets them in steps of 256
    fit = REGISTERS // max(of_program, 1), room // (shared + RESERVED), threads // (32 * warps)
    return min(*fit, BLOCKS_PER_SM)


def _on_cpu(call: Callable[[], Tensor]) -> float:
    """Return how long the CPU takes to launch a call, in seconds."""
    taken = []
    for _ in range(CALLS):
        torch.cuda.synchronize()
        began = time.perf_counter()
        call()
        taken.append(time.perf_counter() - began)
    torch.cuda.synchronize()
    return statistics.median(taken)


def run(ladder: str, tell: Callable[[str], None], results: Path | None = None, own: Path | None = None) -> bool:
    """List the rungs of a ladder, and time them where there is a GPU; where there is none, hold them to the formula.

    Args:
        ladder: its name.
        tell: called with a line of text for each rung.
        results: a file into which what was measured is written.
        own: a file of the reader's, which alone is held to the formula; nothing is timed.

    Returns:
        Whether all that was tried is right.

    Raises:
        ValueError: if there is no such ladder, no place for the results, no GPU although they are asked for, or a file
            of the reader's that is no rung.
    """
    from twinattn.course import interpreted, profiled

    found, on_gpu = rungs(ladder), torch.cuda.is_available()
    device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
    can_run = on_gpu or interpreted.is_on()
    if own is not None:
        interpreted.check_own(own, results, can_run)
        return interpreted.run(ladder, tell, device, own)
    if results is not None:
        check_folder("json", results.parent)
    if results is not None and not on_gpu:
        raise ValueError(f"json: expected a machine with a CUDA device to measure on, got none for {results}")
    for rung in found:
        tell(f"{rung.number:2} {rung.title}   {rung.file.name}")
        needed = rung.missing(device)
        if needed is not None:
            tell(f"   needs {needed}")
    if not on_gpu:
        all_right = not can_run or interpreted.run(ladder, tell, device)
        tell(f"\nTimes need a CUDA device. The site (make docs) shows stored ones: docs/ladder/{ladder}.md.")
        return all_right
    with torch.no_grad():
        measured = measure(ladder, tell, device)
    tell(f"\n* by events, with the launches; all others are replays of a CUDA graph. {measured['seconds']} s in all.")
    tell("CPU: what launching one call takes, without a graph. per SM: programs that one has room for.")
    for add in (None, profiled.add_to):  # the times are written before the profiler begins, which takes minutes
        if add is not None:
            add(measured, tell)
        if results is not None:
            results.parent.mkdir(parents=True, exist_ok=True)
            results.write_text(json.dumps(measured, indent=1) + "\n")
    if results is not None:
        tell(f"Written to {results}")
    return True
