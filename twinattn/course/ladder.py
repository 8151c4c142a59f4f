"""`twinattn ladder decode`: a kernel from the formula to the roofline, one change per file, timed on the reader's GPU.

A ladder is a folder of notebooks/ladder; each file is a rung, a function `attention` that differs from the one before
by one change. This module lists and loads the rungs, has what all of them share, and times them beside the floor: the
time that reading the keys and values takes at the rate that the card reached in the same run.
"""

import gc
import importlib.util
import json
import re
import statistics
import time
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int32
from torch import Tensor

from refattn.checks import check, check_folder
from refattn.modes import computing_in
from twinattn.course import copied

LADDERS = ("decode",)
HEADS, KV_HEADS, SIZE, BLOCK = 32, 8, 128, 16  # the timed batches, in bfloat16
BATCHES = {
    "64 x 8192": (8192,) * 64,
    "1 x 131072": (131072,),
    "60 x 2048 and 4 x 65536": (2048,) * 60 + (65536,) * 4,
}
PER_SM = 4  # programs that an SM runs at once
MILLISECONDS = 20  # how long a rung is measured
CALLS = 10  # how many calls are timed on the CPU
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

    def load(self) -> ModuleType:
        """Import the file."""
        return _load(self.file)


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
    """The sizes of a batch of decodes: sequences, heads, KV heads, head size, tokens in a block, blocks in a row."""

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
    """Check the arguments of a rung, and return their sizes.

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
    tensors = dict(
        query=query, key_cache=key_cache, value_cache=value_cache, seq_lens=seq_lens, block_table=block_table
    )
    letters = ("number b h d", "query: n p hk d", "query: n p hk d", "int32 b", "int32 b m")
    sizes = check(**{name: (x, kind) for (name, x), kind in zip(tensors.items(), letters, strict=True)})
    for name, x in tensors.items():
        if not x.is_contiguous():
            raise NotImplementedError(f"{name}: expected contiguous memory, got strides {list(x.stride())}")
    if sizes["h"] % sizes["hk"] or sizes["d"] & (sizes["d"] - 1):
        raise ValueError(
            "query: expected a multiple of the KV heads as heads, and a power of two as head size, "
            f"got h={sizes['h']}, hk={sizes['hk']}, d={sizes['d']}"
        )
    return Sizes(*(sizes[letter] for letter in ("b", "h", "hk", "d", "p", "m")))


def programs_at_once(device: torch.device) -> int:
    """Return how many programs of a decode a GPU runs at once; a few for Triton's interpreter."""
    sms = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4
    return PER_SM * sms


# --- times ---


class Inputs(NamedTuple):
    """The arguments of a rung."""

    query: Tensor
    key_cache: Tensor
    value_cache: Tensor
    seq_lens: Tensor
    block_table: Tensor


def make_inputs(lens: Sequence[int], device: torch.device) -> Inputs:
    """Make a batch of decodes in shuffled blocks of a pool."""
    needed = [-(-n // BLOCK) for n in lens]
    order = torch.randperm(sum(needed), dtype=torch.int32)
    table = torch.full((len(lens), max(needed)), -1, dtype=torch.int32)
    for row, blocks in zip(table, order.split(needed), strict=True):
        row[: len(blocks)] = blocks
    kind: Any = dict(dtype=torch.bfloat16, device=device)
    key_cache, value_cache = (torch.randn(len(order), BLOCK, KV_HEADS, SIZE, **kind) for _ in range(2))
    seq_lens = torch.tensor(lens, dtype=torch.int32, device=device)
    return Inputs(torch.randn(len(lens), HEADS, SIZE, **kind), key_cache, value_cache, seq_lens, table.to(device))


def bytes_moved(lens: Sequence[int]) -> tuple[int, int]:
    """Return the bytes that a decode has to read, and to write: keys, values, queries and tables; outputs."""
    rows = len(lens) * HEADS * SIZE * 2
    table = sum(-(-n // BLOCK) for n in lens) * 4 + len(lens) * 4
    return 2 * sum(lens) * KV_HEADS * SIZE * 2 + rows + table, rows


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
    from twinattn.bench import measure as clocks

    began = time.monotonic()
    ceilings = clocks.ceilings(device, torch.bfloat16, quick=False)
    about = {"ladder": ladder, **clocks.circumstances(), "machine": clocks.machine(device), "dtype": "bfloat16"}
    about |= {"heads": [HEADS, KV_HEADS], "head_size": SIZE, "block_size": BLOCK, "ceilings": ceilings._asdict()}
    kernels: dict[str, dict[str, dict[str, Any]]] = {}  # by rung and name
    batches = []
    for name, lens in BATCHES.items():
        torch.manual_seed(0)
        inputs = make_inputs(lens, device)
        reads, writes = bytes_moved(lens)
        floor = ceilings.seconds(reads=reads, writes=writes)
        judge = _judge(rungs(ladder)[0], inputs)
        tell(f"\n{name}: {reads / 1e6:.0f} MB, floor {1e6 * floor:.1f} µs\n{_line('', HEAD)}")
        timed = []
        for rung in rungs(ladder):
            call = _call(rung, inputs, sum(lens))
            before = _compiled()
            judge(call())
            new = [_describe(one, device) for one in _compiled() if all(one is not other for other in before)]
            kernels.setdefault(rung.name, {}).update({one["kernel"]: one for one in new})
            clock = "graph" if rung.number else "events"  # the reference reads lengths on the CPU
            timing = clocks.summarize(clocks.on_gpu([call], clock=clock, milliseconds=MILLISECONDS))
            timed.append(
                {"number": rung.number, "name": rung.name, "clock": clock, **timing._asdict(), "cpu": _on_cpu(call)}
                | {
                    "share_of_floor": floor / timing.median,
                    "kernels": [one for _, one in sorted(kernels[rung.name].items())],
                }
            )
            tell(_line(f"{rung.number:2} {rung.title}", _cells(timed[-1])))
        batches.append({"name": name, "lens": sorted(lens), "bytes": reads + writes, "floor": floor, "rungs": timed})
        del inputs, judge, call
        torch.cuda.empty_cache()
    return {**about, "seconds": round(time.monotonic() - began, 1), "batches": batches}


HEAD = ("time", "of floor", "CPU", "registers", "spills", "shared", "per SM")


def _cells(timed: dict[str, Any]) -> list[str]:
    """Write what was found of a rung; registers and shared memory are those of `attend`, its first kernel."""
    cells = [f"{1e6 * timed['median']:.1f} µs{' *' * (timed['clock'] == 'events')}", f"{timed['share_of_floor']:.1%}"]
    cells.append(f"{1e6 * timed['cpu']:.0f} µs")
    for kernel in timed["kernels"][:1]:
        cells += [str(kernel[x]) for x in ("registers", "spills", "shared_bytes", "programs_per_sm")]
    return cells


def _line(title: str, cells: Sequence[str]) -> str:
    return f"{title:60}" + "".join(f"{cell:>14}" for cell in cells)


def _call(rung: Rung, inputs: Inputs, num_keys: int) -> Callable[[], Tensor]:
    """Return a call of a rung; a plan is made once."""
    module = rung.load()
    step = {}
    if hasattr(module, "plan"):
        step["step"] = module.plan(inputs.seq_lens, inputs.block_table, inputs.key_cache.shape[1], num_keys)
    return partial(module.attention, *inputs, **step)


def _judge(reference: Rung, inputs: Inputs) -> Callable[[Tensor], None]:
    """Return what holds the output of the first and the last sequence to the reference, by the one tolerance."""
    from twinattn.kit import tolerance

    expected = []
    for row in sorted({0, len(inputs.query) - 1}):
        its = slice(row, row + 1)
        blocks = inputs.block_table[row][inputs.block_table[row] >= 0].long()
        pools = [cache[blocks] for cache in (inputs.key_cache, inputs.value_cache)]
        table = torch.arange(len(blocks), dtype=torch.int32, device=blocks.device)[None]
        attention = reference.load().attention
        ref = attention(inputs.query[its].float(), *(x.float() for x in pools), inputs.seq_lens[its], table)
        with computing_in(torch.bfloat16):
            low = attention(inputs.query[its], *pools, inputs.seq_lens[its], table)
        expected.append((its, ref, low))

    def judge(out: Tensor) -> None:
        for its, ref, low in expected:
            tolerance.assert_close(out[its], ref, low)

    return judge


def _compiled() -> list[Any]:
    """List the kernels of Triton that are loaded, launched here or elsewhere."""
    from triton.compiler import CompiledKernel

    return [x for x in gc.get_objects() if type(x) is CompiledKernel and x.module is not None]


def _describe(kernel: Any, device: torch.device) -> dict[str, Any]:
    """Return what the compiler says of a kernel, and how many of its programs an SM has room for."""
    sm = torch.cuda.get_device_properties(device)
    warps, shared = kernel.metadata.num_warps, kernel.metadata.shared
    registers = -(-kernel.n_regs // 8) * 8 * 32 * warps  # a warp gets them in steps of 256
    room = (
        REGISTERS // max(registers, 1),
        sm.shared_memory_per_multiprocessor // (shared + RESERVED),
        sm.max_threads_per_multi_processor // (32 * warps),
        BLOCKS_PER_SM,
    )
    return {
        "kernel": kernel.metadata.name,
        "registers": kernel.n_regs,
        "spills": kernel.n_spills,
        "shared_bytes": shared,
        "warps": warps,
        "stages": kernel.metadata.num_stages,
        "programs_per_sm": min(room),
    }


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


def run(ladder: str, tell: Callable[[str], None], results: Path | None = None) -> None:
    """List the rungs of a ladder, time them where there is a GPU, and write what was found into a file.

    Raises:
        ValueError: if there is no such ladder, no place for the file, or no GPU although a file is asked for.
    """
    found = rungs(ladder)
    if results is not None:
        check_folder("json", results.parent)
    for rung in found:
        tell(f"{rung.number:2} {rung.title}   {rung.file.name}")
    if not torch.cuda.is_available():
        if results is not None:
            raise ValueError(f"json: expected a machine with a CUDA device to measure on, got none for {results}")
        tell("\nTimes need a CUDA device; docs/ladder/decode.md has those of a stored run.")
        return
    with torch.no_grad():
        measured = measure(ladder, tell, torch.device("cuda", torch.cuda.current_device()))
    tell(f"\n* by events, with the launches; all others are replays of a CUDA graph. {measured['seconds']} s in all.")
    tell("CPU: what launching one call takes, without a graph. per SM: programs that one has room for.")
    if results is not None:
        results.parent.mkdir(parents=True, exist_ok=True)
        results.write_text(json.dumps(measured, indent=1) + "\n")
        tell(f"Written to {results}")
