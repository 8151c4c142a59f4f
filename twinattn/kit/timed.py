"""Time a kernel, and check every timed output: `twinattn prove my_package:my_attention --path mla --time`.

Every timed call has its own inputs, drawn just before it from a seed that did not exist when the kernel was imported,
and its own order of sequences. Its outputs are copied before the clock stops, into memory that held NaN. All copies are
compared with the reference after the last call, in random order, in a process that never imports the kernel. If any of
them is wrong, no time is reported.
"""

import json
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import SystemRandom
from time import monotonic, perf_counter
from typing import Any, TextIO

import torch
from torch import Tensor

from twinattn.kit import traces
from twinattn.kit.adapters import kernel_of
from twinattn.kit.bits import bits_of
from twinattn.kit.check import claims_as_words, parse_example
from twinattn.kit.example import PATHS, SELECTED, Answers, Arguments, Example
from twinattn.kit.finding import Finding, Report
from twinattn.kit.hold import ask, hold, raised
from twinattn.kit.isolate import Tail, tuples, watch
from twinattn.kit.kernel import BadKernelError, Kernel, find, notes_on
from twinattn.kit.landmarks import Lens, example
from twinattn.kit.property import Broken, CrashedError, RefusedError
from twinattn.kit.reference import forget_expected

WARM_UPS = 3  # calls before the clock, after the one that compiles
CALLS = 20  # timed calls
FEWEST = 5  # outputs that are compared with the reference, however long it takes
TOPK = 256  # selected keys of a query
FLUSHED = 2**28  # bytes written between two calls on a GPU, to flush its caches
USUAL = ((32, 8), (128, 1), (32, 2), (128, 128), (576, 512), 16, 64)  # preferred heads, head sizes and block sizes
LENS: dict[str, Lens] = {
    "decode": ((1, 197), (1, 513), (1, 78), (1, 350)),
    "prompt": ((128, 128), (61, 61), (97, 97)),
    "mixed": ((1, 300), (64, 201), (1, 90), (40, 40)),
}
ON_GPU = {"decode": (8, 4), "prompt": (16, 1), "mixed": (8, 4)}  # factors on a GPU: of lengths, of sequences

# Taken before any kernel is imported, which might replace them.
_DRAWN = SystemRandom()
_COPY, _EMPTY, _FULL, _EQUAL = Tensor.copy_, torch.empty, torch.full, torch.equal
_SYNCHRONIZE = torch.accelerator.synchronize


@dataclass
class Measured:
    """The timed calls: the batch of each, its seconds, and copies of its outputs."""

    examples: list[Example]
    seconds: list[float]
    answers: list[Answers]


def workloads(kernel: Kernel, device: str) -> dict[str, Example]:
    """Return the batches to time, by name: those with several queries per sequence only if the kernel claims them.

    Raises:
        BadKernelError: if its path is not attention.
    """
    if kernel.path not in PATHS or not PATHS[kernel.path].attends:
        attends = ", ".join(path.name for path in PATHS.values() if path.attends)
        raise BadKernelError(f"--time: expected a path of attention, {attends}; got {kernel.path}")
    claims = kernel.claims
    shape = _usual(claims.heads), _usual(claims.head_sizes), _usual(claims.block_sizes)
    options: dict[str, Any] = {"topk": TOPK} if kernel.path in SELECTED else {}
    found = {}
    for name, lens in LENS.items():
        if claims.max_query_len is not None and max(q for q, _ in lens) > claims.max_query_len:
            continue
        if device != "cpu":
            keys, times = ON_GPU[name]
            lens = tuple((q if q == 1 else q * keys, s * keys) for q, s in lens) * times
        found[name] = example(kernel, lens, shape, **options)
    return found


def _usual(claimed: Sequence[Any]) -> Any:
    """Return a claimed size, one of `USUAL` if possible."""
    return next((x for x in USUAL if x in claimed), claimed[0])


def replayed(kernel: Kernel, file: Path) -> tuple[dict[str, Example], torch.dtype]:
    """Return the batches of a file of FlashInfer-Bench, by name, and the type of their queries.

    Raises:
        BadKernelError: if they are not of the kernel's path, or the kernel does not take their scale.
    """
    try:
        batches, dtype = traces.read(file, kernel.path)
    except ValueError as error:
        raise BadKernelError(str(error)) from error
    scales = {x.options["softmax_scale"] for x in batches.values() if x.options}
    if scales and not kernel.takes("softmax_scale"):
        raise BadKernelError(f"--trace: expected a kernel with a parameter softmax_scale, which is {min(scales)} there")
    return batches, dtype


def time_kernel(
    target: str | Callable[..., Any] | Kernel,
    path: str | None = None,
    *,
    device: str = "cpu",
    dtype: torch.dtype | None = None,
    calls: int = CALLS,
    only: Sequence[str] | None = None,
    trace: Path | None = None,
    seconds: float = 600.0,
) -> Report:
    """Time a kernel in this process, and compare its outputs with the reference; `time_apart` uses two processes.

    Args:
        target: as in `check`.
        path: which path it computes.
        device: where the tensors are.
        dtype: of the queries; if None bfloat16 on a GPU, if the kernel claims it, else the first that it claims.
        calls: timed calls of each workload.
        only: names of workloads.
        trace: a file of FlashInfer-Bench, to time its workloads, by default in their type.
        seconds: for comparing the outputs of a workload; at least five are compared, however long it takes.

    Raises:
        BadKernelError: if the kernel cannot be called, or its path is not attention.
    """
    kernel = kernel_of(target, path)
    began = monotonic()
    batches, usual = replayed(kernel, trace) if trace else (workloads(kernel, device), _dtype(kernel, device))
    dtype = dtype or usual
    report = Report(kernel.name, kernel.path, device, claims=claims_as_words(kernel), notes=notes_on(kernel))
    for name, batch in batches.items():
        if only is None or name in only:
            try:
                measured = measure(kernel, batch, dtype, device, calls)
            except (Broken, RefusedError) as error:
                report.findings.append(_finding(name, batch, dtype, error))
            else:
                judge(report, name, measured, dtype, seconds)
    report.seconds = round(monotonic() - began, 1)
    return report


def measure(
    kernel: Kernel,
    batch: Example,
    dtype: torch.dtype,
    device: str,
    calls: int,
    on_call: Callable[[], None] = lambda: None,
) -> Measured:
    """Time calls of a kernel, each on its own inputs, and keep their outputs; `on_call` is called before each.

    Raises:
        Broken: if it raises, returns no valid output, or returns memory that an earlier call returned or that it is
            still writing.
        RefusedError: if it refuses.
    """
    one = anew(batch)
    ask(kernel, one, one.tensors(dtype, device), return_lse=False)
    kernel.calls.clear()
    measured = Measured([], [], [])
    returned: list[Answers] = []  # kept alive, so that the allocator does not reuse this memory
    room: dict[str, tuple[torch.Size, torch.dtype]] = {}
    seats: Arguments = {}
    for turn in range(WARM_UPS + calls):
        on_call()
        fresh = anew(batch)
        arguments = _seated(fresh.tensors(dtype, device), seats)
        given = kernel.asked(fresh, arguments | dict(return_lse=False))
        copies = {name: _FULL(shape, torch.nan, dtype=kind, device=device) for name, (shape, kind) in room.items()}
        _spoil([*copies.values(), arguments["query"]])
        with raised(kernel, arguments):
            answers, taken = _clocked(kernel, given, copies, device)
        _look(answers, room if turn else {}, turn - WARM_UPS)
        if not turn:
            room = {name: (x.shape, x.dtype) for name, x in answers.items()}
        if turn >= WARM_UPS:
            measured.examples.append(fresh)
            measured.seconds.append(taken)
            measured.answers.append({name: x.cpu() for name, x in copies.items()})
            returned.append(answers)
    _hold_still(returned, measured.answers)
    return measured


def _clocked(kernel: Kernel, given: Arguments, copies: Answers, device: str) -> tuple[Answers, float]:
    """Call a kernel, copy its outputs, wait for the whole device, and return the outputs and the seconds."""
    _wait(device)
    start = perf_counter()
    answers = kernel.named(kernel.function(**given))
    for name, x in copies.items():  # an output that is not ready now is not in the copy
        _COPY(x, answers[name])
    _wait(device)
    return answers, perf_counter() - start


def anew(batch: Example) -> Example:
    """Return the same batch with a new seed, and its sequences in another order."""
    return replace(batch, seed=_DRAWN.randrange(2**31), lens=tuple(_DRAWN.sample(batch.lens, len(batch.lens))))


def _seated(arguments: Arguments, seats: Arguments) -> Arguments:
    """Put the tensors of a call at the addresses of the call before, so that an address cannot identify an input."""
    tensors = {name: x for name, x in arguments.items() if isinstance(x, Tensor) and x.is_contiguous()}
    for name, x in tensors.items():
        seat = seats.setdefault(name, x)
        if seat is not x and seat.shape == x.shape:
            tensors[name] = _COPY(seat, x)
    return arguments | tensors


def _wait(device: str) -> None:
    """Wait for all streams of a device."""
    if device != "cpu":
        _SYNCHRONIZE(device)


def _spoil(like: Sequence[Tensor]) -> None:
    """Put NaN into memory that the next `torch.empty` may get, and flush the caches of a GPU."""
    for x in [_FULL(y.shape, torch.nan, dtype=y.dtype, device=y.device) for y in like for _ in range(2)]:
        del x
    if like[0].device.type != "cpu":
        _EMPTY(FLUSHED, dtype=torch.uint8, device=like[0].device).zero_()


def _look(answers: Answers, room: dict[str, tuple[torch.Size, torch.dtype]], turn: int) -> None:
    """Check that a call returned plain tensors with the shapes and types of the first call."""
    for name, x in answers.items():
        if type(x) is not Tensor:
            raise Broken(f"{name}: expected a plain tensor, got {type(x).__name__}")
    came = {name: (x.shape, x.dtype) for name, x in answers.items()}
    if room and came != room:
        raise Broken(f"call {turn}: expected {_says(room)}, as before, got {_says(came)}")


def _says(room: dict[str, tuple[torch.Size, torch.dtype]]) -> str:
    return ", ".join(f"{name} {list(shape)} {str(kind).removeprefix('torch.')}" for name, (shape, kind) in room.items())


def _hold_still(returned: Sequence[Answers], copies: Sequence[Answers]) -> None:
    """Check that outputs do not share memory, and have not changed since the clock stopped."""
    owners: dict[int, int] = {}
    for i, answers in enumerate(returned):
        for x in answers.values():
            owner = owners.setdefault(x.untyped_storage().data_ptr(), i)
            if owner != i and x.numel():
                raise Broken(f"out: calls {owner} and {i} return the same memory: an output that is kept would change")
    for i, (answers, kept) in enumerate(zip(returned, copies, strict=True)):
        for name, x in answers.items():
            if not _EQUAL(bits_of(x.detach().cpu().contiguous()), bits_of(kept[name])):
                raise Broken(f"{name}: call {i} was still writing when the clock stopped, or a later call changed it")


# --- after the clock ---


def judge(report: Report, name: str, measured: Measured, dtype: torch.dtype, seconds: float) -> None:
    """Compare the timed outputs with the reference, in random order, time the reference, and add both to a report."""
    reference = find(PATHS[report.path].module, report.path)
    order, ends, times, held = list(range(len(measured.examples))), monotonic() + seconds, list[float](), 0
    _DRAWN.shuffle(order)
    for i in order:
        if held >= FEWEST and monotonic() > ends:
            break
        batch = measured.examples[i]
        arguments = batch.tensors(dtype)
        try:
            hold(batch, arguments, measured.answers[i])
        except Broken as error:
            late = Broken(f"call {i} of {len(order)} that were timed: {error}")
            report.findings.append(_finding(name, batch, dtype, late, held + 1))
            return
        forget_expected()
        held += 1
        given = reference.asked(batch, batch.tensors(dtype, report.device) | dict(return_lse=False))
        copies = {"out": torch.empty(measured.answers[i]["out"].shape, dtype=dtype, device=report.device)}
        times.append(_clocked(reference, given, copies, report.device)[1])
    ours, its = _summary(measured.seconds), _summary(times[1:] or times)  # without the first call, a warm-up
    report.times[name] = dict(
        seconds=ours,
        reference=its,
        samples=measured.seconds,
        calls=len(order),
        held=held,
        batch=repr(measured.examples[0]),
    )
    says = f"{_as_text(ours)}; reference {_as_text(its)}, {its['median'] / ours['median']:.2f} times as long"
    promise = f"{says}; {held} of {len(order)} outputs held to it."
    report.findings.append(Finding(name, promise, "honoured", examples=held, dtype=_word(dtype)))


def _finding(name: str, batch: Example, dtype: torch.dtype, error: Exception, examples: int = 1) -> Finding:
    """Return the finding of a workload that failed or was refused."""
    outcome = "refused" if isinstance(error, RefusedError) else "raises" if "raised " in str(error) else "wrong"
    promise = "What is timed is right, in every call."
    refused = examples if outcome == "refused" else 0
    return Finding(name, promise, outcome, str(error), examples, refused, repr(batch), _word(dtype))


def _summary(samples: Sequence[float]) -> dict[str, float]:
    """Return the median of some times, and their 20th and 80th percentiles."""
    if len(samples) < 2:
        return dict.fromkeys(("median", "low", "high"), samples[0])
    fifths = statistics.quantiles(samples, n=5, method="inclusive")
    return dict(median=statistics.median(samples), low=fifths[0], high=fifths[3])


def _as_text(times: dict[str, float]) -> str:
    scale, unit = (1e6, "us") if times["median"] < 1e-3 else (1e3, "ms")
    median, low, high = (f"{scale * times[name]:.4g}" for name in ("median", "low", "high"))
    return f"{median} {unit} ({low} to {high})"


def _dtype(kernel: Kernel, device: str) -> torch.dtype:
    claimed = kernel.claims.dtypes
    return torch.bfloat16 if device != "cpu" and torch.bfloat16 in claimed else claimed[0]


def _word(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# --- in two processes ---


def time_apart(
    target: str,
    path: str | None = None,
    *,
    device: str = "cpu",
    dtypes: Sequence[str] = (),
    calls: int = CALLS,
    seconds: float = 600.0,
    patience: float = 60.0,
    limits: dict[str, Any] | None = None,
    trace: Path | None = None,
    write_trace: Path | None = None,
    tell: Callable[[str], None] | None = None,
) -> Report:
    """Time a kernel in its own process, and compare its outputs with the reference in this one.

    Args:
        target: as in `check_apart`.
        path: which path it computes.
        device: where the tensors are.
        dtypes: names of types, only the first of which is used; as in `time_kernel` if empty.
        calls: timed calls of each workload.
        seconds: for all calls, and as long again for comparing their outputs.
        patience: seconds without a new line in the log after which the process is killed.
        limits: claims that replace those of the kernel.
        trace: a file of FlashInfer-Bench, to time its workloads.
        write_trace: a folder for the workloads as a data set of FlashInfer-Bench.
        tell: called with how far it is, several times a second while calls are timed.

    Raises:
        BadKernelError: if the kernel cannot be called, or its path is not attention.
        ValueError: if a workload cannot be written.
    """
    began = monotonic()
    tell = tell or (lambda text: None)
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder, "log")
        tail, called = Tail(log), 0

        def look() -> None:
            nonlocal called
            called += sum("alive" in event for event in tail.new())
            tell(f"{called} calls timed")

        task = dict(target=target, path=path, device=device, dtypes=list(dtypes), calls=calls, limits=limits or {})
        task |= dict(trace=str(trace) if trace else "")
        outcome, status = watch(task, log, patience, seconds, module=__name__, environment={}, on_look=look)
        events = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
        head: dict[str, Any] = (
            events[0] if events else {"error": f"{target}: its process ended before the first call: {status}"}
        )
        if "error" in head:
            raise BadKernelError(head["error"])
        dtype = getattr(torch, head["dtype"])
        report = Report(target, head["path"], device, claims=head["claims"], notes=tuple(head["notes"]))
        report.asked = dict(calls=calls)
        if write_trace is not None:
            asked = {name: parse_example(text) for name, text in head["workloads"].items()}
            traces.write(write_trace, {name: x for name, x in asked.items() if isinstance(x, Example)}, dtype)
        done = {event["workload"]: event for event in events[1:] if "workload" in event}
        for name, text in head["workloads"].items():
            event = done.get(name)
            if event is None:
                says = status or "its process ended with status 0 in the middle of a call"
                finding = Finding(name, "It can be timed.", outcome or "crashed", says, example=text)
                report.findings.append(finding)
                outcome, status = "not reached", "the process of the kernel had ended"
            elif "finding" in event:
                report.findings.append(Finding(**{key: tuples(value) for key, value in event["finding"].items()}))
            else:
                answers = torch.load(Path(folder, event["file"]), weights_only=True)
                parsed = [parse_example(text) for text in event["examples"]]
                batches = [x for x in parsed if isinstance(x, Example)]
                assert len(batches) == len(parsed)
                tell(f"comparing the outputs of {name} with the reference")
                measured = Measured(batches, event["seconds"], answers)
                judge(report, name, measured, dtype, seconds / len(head["workloads"]))
    report.seconds = round(monotonic() - began, 1)
    return report


def main() -> None:
    """Time the kernel of the task in the second argument, and log to the file that the first argument names."""
    log = Path(sys.argv[1])
    with log.open("w", buffering=1) as file:
        sys.exit(_do(json.loads(sys.argv[2]), file, log.parent))


def _do(task: dict[str, Any], log: TextIO, folder: Path) -> int:
    def say(**event: Any) -> None:
        log.write(json.dumps(event) + "\n")

    device = task["device"]
    try:
        kernel = kernel_of(task["target"], task["path"])
        limits = {name: tuples(values) for name, values in task["limits"].items()}
        kernel = replace(kernel, limits={**kernel.limits, **limits}) if limits else kernel
        trace = Path(task["trace"]) if task["trace"] else None
        batches, usual = replayed(kernel, trace) if trace else (workloads(kernel, device), _dtype(kernel, device))
    except BadKernelError as error:
        say(error=str(error))
        return 2
    dtype = getattr(torch, task["dtypes"][0]) if task["dtypes"] else usual
    names = {name: repr(batch) for name, batch in batches.items()}
    about = dict(claims=claims_as_words(kernel), notes=notes_on(kernel), path=kernel.path)
    say(**about, dtype=_word(dtype), workloads=names)
    for i, (name, batch) in enumerate(batches.items()):
        try:
            measured = measure(kernel, batch, dtype, device, task["calls"], on_call=lambda: say(alive=True))
        except (Broken, RefusedError) as error:
            say(workload=name, finding=vars(_finding(name, batch, dtype, error)))
            continue
        except CrashedError as error:
            say(
                workload=name,
                finding=vars(replace(_finding(name, batch, dtype, Broken(str(error))), outcome="crashed")),
            )
            return 0
        torch.save(measured.answers, folder / str(i))
        say(workload=name, file=str(i), seconds=measured.seconds, examples=[repr(x) for x in measured.examples])
    return 0


if __name__ == "__main__":
    main()
