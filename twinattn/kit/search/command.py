"""Search for wrong outputs: random workloads of every path and kernel, compared with the reference and an oracle.

Each path is searched in its own process, because a kernel may end it: an illegal memory access leaves a GPU's context
unusable. Each call is logged to a file before it is made. If a process ends or hangs, another one continues after that
call, and leaves out that kernel with such sizes and types.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from importlib import import_module
from pathlib import Path
from typing import Any, TextIO
from unittest import mock

import torch
from rich.console import Console
from rich.table import Table

from refattn.checks import QUERY_TYPES, check_device, check_file, check_folder, check_number, check_sizes
from twinattn.kit.search import PATHS, Search, Truth, Twin, is_fatal, normal, try_kernel, workload_of

CHILD = "--one-path"  # the first argument of a process that searches one path
CANNOT_GO_ON = 86  # exit status of a process that can no longer use its device
PATIENCE = 240.0  # seconds without a new line in the log after which a call hangs: the first may compile for a minute
REPORTS = 5.0  # seconds between two logs of the counts
ON_CPU = ("cpu", "native")  # kernels for CPUs
MOST_RESTARTS = 20
MOST_REASONS = 30  # printed reasons of refusals
WITHOUT_NAN = {
    "flash_mla": "FlashMLA leaves out a split of the keys whose scores are NaN, and has no option for it "
    "(docs/proof/conventions.md)"
}

_chosen: ContextVar[list[str] | None] = ContextVar("_chosen", default=None)


# --- the twin ---


def twin(kernels: Sequence[str | None]) -> Twin:
    """Return the fast twin with the kernels to try, by name; None for its own choice."""
    return Twin(lambda path: import_module(f"fastattn.{path}"), tuple(kernels), _asking, WITHOUT_NAN)


def kernels_to_try(device: str, names: Sequence[str]) -> list[str | None]:
    """Return the kernels to try on a device: those named ("default" for the twin's choice), or all.

    On a CPU these are the twin's choice, and `cpu`, which computes decodes if there is no C compiler; with
    `TRITON_INTERPRET=1` also our Triton kernels, in Triton's interpreter.

    Raises:
        ValueError: for an unknown name.
    """
    from fastattn.kernels import NAMES

    if names:
        unknown = [name for name in names if name not in (*NAMES, "default")]
        if unknown:
            raise ValueError(f"kernels: expected default or one of {', '.join(NAMES)}, got {unknown[0]!r}")
        return [None if name == "default" else name for name in names]
    if device == "cpu":
        return [None, "cpu", *(["triton"] if os.environ.get("TRITON_INTERPRET") == "1" else [])]
    return [None, *(name for name in NAMES if name not in ON_CPU)]


@contextmanager
def _asking(name: str | None) -> Iterator[list[str]]:
    """Use a kernel inside the context, and yield a list that collects the names of the chosen kernels."""
    from fastattn.kernels import order

    noted: list[str] = []
    token = _chosen.set(noted)
    try:
        with ExitStack() as stack:
            if name is not None:
                stack.enter_context(order.use_kernel(name))
            yield noted
    finally:
        _chosen.reset(token)


@contextmanager
def _noting_choices() -> Iterator[None]:
    """Patch the choice of kernels so that each chosen name is recorded."""
    from fastattn.kernels import order

    def noting(choose: Any) -> Any:
        def choose_and_note(*arguments: Any) -> Any:
            kernel = choose(*arguments)
            noted = _chosen.get()
            if noted is not None and kernel is not None:
                noted.append(kernel.name)
            return kernel

        return choose_and_note

    with ExitStack() as stack:
        for name in ("choose", "choose_fused"):
            wrapped = getattr(order, name)
            note = noting(wrapped)
            if hasattr(wrapped, "cache_clear"):
                note.cache_clear = wrapped.cache_clear
            stack.enter_context(mock.patch.object(order, name, note))
        yield


# --- one path, in a process of its own ---


def _search(task: dict[str, Any], log: TextIO) -> int:
    def say(**event: Any) -> None:
        log.write(json.dumps(event) + "\n")

    torch.set_num_threads(task["threads"])
    search = Search(
        task["path"],
        twin(task["kernels"]),
        seed=task["seed"],
        device=task["device"],
        dtypes=tuple(task["dtypes"]),
        longest=task["longest"],
        before=lambda work, kernel: say(call=work.as_line(), kernel=kernel, sizes=work.sizes),
        skipped=[(kernel, sizes) for kernel, sizes in task["skipped"]],
    )
    reported = time.monotonic()
    with _noting_choices():
        try:
            for index in search.run(seconds=task["seconds"], workloads=task["workloads"], first=task["first"]):
                say(done=index)
                if time.monotonic() - reported > REPORTS:
                    say(counts=_counts(search))
                    reported = time.monotonic()
        except Exception as error:
            say(counts=_counts(search))
            if not is_fatal(error):
                raise
            say(crashed=f"{type(error).__name__}: {error}"[:500])
            return CANNOT_GO_ON
    say(counts=_counts(search), over=True)
    return 0


def _counts(search: Search) -> dict[str, Any]:
    return dict(
        calls=[[*key, count] for key, count in search.calls.items()],
        refused=[[*key, count] for key, count in search.refused.items()],
        exceptions=[[*key, count] for key, count in search.exceptions.items()],
        faults=[[*key, count] for key, count in search.faults.items()],
        findings=[finding._asdict() for finding in search.findings],
        roundings=[finding._asdict() for finding in search.roundings],
    )


class _Process:
    """A process that searches a path, and its replacements after a crash; the parent reads their logs."""

    def __init__(self, task: dict[str, Any], folder: Path) -> None:
        self.task, self.folder, self.restarts = task, folder, 0
        self.skipped: list[tuple[str | None, str]] = []
        self.calls: Counter[tuple[str, str, str]] = Counter()
        self.refused: Counter[tuple[str, str]] = Counter()
        self.exceptions: Counter[tuple[str, str]] = Counter()
        self.faults: Counter[tuple[Any, ...]] = Counter()
        self.findings: list[dict[str, Any]] = []
        self.roundings: list[dict[str, Any]] = []
        self.end = time.monotonic() + task["seconds"]
        self.is_over = False
        self._start(task["first"])

    @property
    def path(self) -> str:
        return str(self.task["path"])

    def _start(self, first: int) -> None:
        self.last, self.crashed = first - 1, ""
        self.call: dict[str, Any] = {}
        self.counts: dict[str, Any] = {}
        self.calls_since: list[dict[str, Any]] = []  # the last workload that was done
        self.log, self.errors = (self.folder / f"{self.path}-{self.restarts}.{kind}" for kind in ("jsonl", "txt"))
        self.log.touch()
        self.reader = self.log.open()
        task = {**self.task, "first": first, "seconds": max(1.0, self.end - time.monotonic()), "skipped": self.skipped}
        if task["workloads"] is not None:
            task["workloads"] -= first - self.task["first"]
        with self.errors.open("w") as errors:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "twinattn.kit.search.command", CHILD, str(self.log), json.dumps(task)],
                stdout=subprocess.DEVNULL,
                stderr=errors,
                env={**os.environ, "OMP_NUM_THREADS": str(self.task["threads"])},
            )
        self.heard = time.monotonic()

    def look(self) -> None:
        """Read new lines of the log, and start another process if this one has crashed or hangs."""
        code = self.process.poll()
        for line in self.reader:
            self.heard = time.monotonic()
            try:
                self._take(json.loads(line))
            except json.JSONDecodeError:  # the process ended in the middle of a line
                continue
        if code is None and time.monotonic() - self.heard < PATIENCE:
            return
        if code is None:
            self.process.kill()
            self.process.wait()
            self._note_end("hang", f"no answer in {PATIENCE:.0f} s")
        elif code:
            said = (self.errors.read_text().strip().splitlines() or [""])[-1]
            self._note_end("crash", self.crashed or f"its process ended with status {code}: {said}"[:500])
        self._add_up()
        self.reader.close()
        may_go_on = self.end - time.monotonic() > 2 and self.restarts < MOST_RESTARTS
        if code == 0 or not may_go_on or not self.call:
            self.is_over = True
            return
        self.restarts += 1
        self._start(self.last + 2)  # after the workload that ended it

    def _take(self, event: dict[str, Any]) -> None:
        if "call" in event:
            self.call = event
            self.calls_since.append(event)
        elif "done" in event:
            self.last = event["done"]
            self.calls_since = []
        elif "crashed" in event:
            self.crashed = event["crashed"]
        self.counts = event.get("counts", self.counts)

    def _note_end(self, kind: str, detail: str) -> None:
        """Record how a process ended, once per kernel and kind, and skip such calls from now on."""
        line, kernel = self.call.get("call", ""), self.call.get("kernel")
        calls = [call for call in self.calls_since if call["kernel"] == kernel]
        if not self.faults[kernel, kind, normal(detail)[:120]]:
            found_in = calls[0]["call"] if calls else line
            self.findings.append(dict(kernel=kernel, kind=kind, detail=detail, line=line, found_in=found_in))
        self.faults[kernel, kind, normal(detail)[:120]] += 1
        for call in (calls[0], calls[-1]) if calls else ():  # as drawn, and as shrunk when the process ended
            if (kernel, call["sizes"]) not in self.skipped:
                self.skipped.append((kernel, call["sizes"]))

    def _add_up(self) -> None:
        for name in ("calls", "refused", "exceptions", "faults"):
            for *key, count in self.counts.get(name, ()):
                getattr(self, name)[tuple(key)] += count
        self.findings += self.counts.get("findings", [])
        self.roundings += self.counts.get("roundings", [])
        self.counts = {}

    def stop(self) -> None:
        """End the process, if it still runs."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()

    def as_dict(self) -> dict[str, Any]:
        """Return the results of the path for a JSON file."""
        calls: dict[str, dict[str, int]] = {}
        for (asked, chosen, kind), count in sorted(self.calls.items()):
            name = asked if chosen in ("", asked) else f"{asked}: {chosen}"
            calls.setdefault(name, {})[kind] = calls.get(name, {}).get(kind, 0) + count
        reasons: dict[str, dict[str, dict[str, int]]] = dict(refused={}, exceptions={})
        for kind, counts in (("refused", self.refused), ("exceptions", self.exceptions)):
            for (asked, reason), count in counts.most_common():
                reasons[kind].setdefault(asked, {})[reason] = count
        return dict(
            path=self.path,
            restarts=self.restarts,
            skipped=[dict(kernel=kernel or "default", sizes=sizes) for kernel, sizes in self.skipped],
            calls=calls,
            **reasons,
            faults=[
                dict(kernel=k or "default", kind=kind, about=about, times=n)
                for (k, kind, about), n in self.faults.items()
            ],
            findings=self.findings,
            roundings=self.roundings,
        )


# --- the command ---


def run(
    paths: Sequence[str] = (),
    *,
    device: str = "cpu",
    seconds: float = 30.0,
    workloads: int | None = None,
    kernels: Sequence[str] = (),
    dtypes: Sequence[str] = (),
    longest: int = 4097,
    seed: int | None = None,
    jobs: int | None = None,
    results: Path | None = None,
    log: Path | None = None,
) -> bool:
    """Search paths, print what was tried, refused and found, and return whether nothing was found.

    Args:
        paths: to search; all if empty.
        device: where the fast twin computes.
        seconds: for each path.
        workloads: for each path at most.
        kernels: names of kernels, "default" for the twin's own choice; all available ones if empty.
        dtypes: of queries, by name.
        longest: approximate limit on the tokens of a sequence; use a small one for interpreted kernels.
        seed: of all workloads; from the clock if None.
        jobs: paths that are searched at a time.
        results: JSON file to write.
        log: folder for the logs of all calls.

    Raises:
        ValueError: naming the invalid argument, before anything runs.
    """
    from twinattn.bench import measure

    _check_device(device)
    check_number("seconds", seconds, above=0)
    sizes = dict(workloads=workloads, longest=longest, jobs=jobs)
    check_sizes(**{name: size for name, size in sizes.items() if size is not None})
    check_file("results", results)
    check_folder("log", log)
    names = list(paths) or list(PATHS)
    unknown = [name for name in names if name not in PATHS]
    if unknown:
        raise ValueError(f"paths: expected some of {', '.join(PATHS)}, got {unknown[0]!r}")
    chosen = kernels_to_try(device, kernels)
    types = list(dtypes) or ["float32", "float16", "bfloat16"]
    known = [str(dtype).removeprefix("torch.") for dtype in QUERY_TYPES]
    for dtype in types:
        if dtype not in known:
            raise ValueError(f"dtypes: expected some of {', '.join(known)}, got {dtype!r}")
    seed = int(time.time()) % 1_000_000 if seed is None else seed
    cores = measure.all_cores()
    jobs = max(1, min(len(names), (cores if device == "cpu" else cores // 2) if jobs is None else jobs))
    console = Console()
    console.print(f"seed {seed}, {seconds:g} s for each of {len(names)} paths, {jobs} at a time, on {device}")
    task = dict(kernels=chosen, seed=seed, device=device, dtypes=types, seconds=seconds, workloads=workloads, first=0)
    task["longest"] = longest
    about = {**measure.circumstances(), "machine": measure.machine(torch.device(device)), "device": device}
    about |= dict(seed=seed, seconds=seconds, workloads=workloads, longest=longest)
    about |= dict(kernels=[kernel or "default" for kernel in chosen], dtypes=types)
    ordered: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = log or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        waiting = [{**task, "path": name, "threads": max(1, cores // jobs)} for name in names]
        running: list[_Process] = []
        over: list[_Process] = []
        try:
            while waiting or running:
                while waiting and len(running) < jobs:
                    running.append(_Process(waiting.pop(0), folder))
                time.sleep(0.2)
                for process in list(running):
                    process.look()
                    if process.is_over:
                        running.remove(process)
                        over.append(process)
                        _show_path(console, process.as_dict())
                        found = {one.path: one.as_dict() for one in over}
                        ordered = [found[name] for name in names if name in found]
                        if results is not None:  # after each path, so that an interrupted run keeps its results
                            results.write_text(json.dumps({**about, "paths": ordered}, indent=1) + "\n")
        finally:
            for process in running:
                process.stop()
    _show(console, ordered)
    return not any(path["findings"] for path in ordered)


def _check_device(device: str) -> None:
    check_device(device)
    if torch.device(device).type not in ("cpu", "cuda"):
        raise ValueError(f"device: expected cpu, or cuda where torch finds a GPU, got {device!r}")


def _show_path(console: Console, found: dict[str, Any]) -> None:
    count = sum(sum(kinds.values()) for kinds in found["calls"].values())
    console.print(f"{found['path']}: {count} calls, {len(found['findings'])} findings")


def _show(console: Console, paths: Sequence[dict[str, Any]]) -> None:
    """Print one line per kind of fault, the counts per path and kernel, and the reasons of refusals."""

    def say(text: str, style: str | None = None) -> None:
        console.print(text, style=style, markup=False, highlight=False, soft_wrap=True)

    findings = [(found["path"], finding) for found in paths for finding in found["findings"]]
    alike: dict[tuple[str, str], list[tuple[str, dict[str, Any]]]] = {}
    for path, finding in findings:
        alike.setdefault((finding["kind"], normal(finding["detail"])), []).append((path, finding))
    for (kind, _), group in alike.items():
        path, smallest = min(group, key=lambda one: len(one[1]["line"]))
        where: dict[str, list[str]] = {}
        for of_path, finding in group:
            where.setdefault(of_path, []).append(finding["kernel"] or "default")
        by = "; ".join(f"{of} by {', '.join(dict.fromkeys(kernels))}" for of, kernels in where.items())
        say(f"{kind}, {by}: {smallest['detail']}", "red")
        asked = "" if smallest["kernel"] is None else f" --kernels {smallest['kernel']}"
        say(f"    twinattn search{asked} --replay '{smallest['line']}'")
    if findings:
        say(f"FOUND {len(alike)} kinds of faults in {len(findings)} calls", "bold red")
    else:
        say("found nothing", "bold green")
    kinds = ("right", "refused", "rounding", "exception", "wrong", "raw error")
    table = Table(*("path", "kernel"), *kinds, title="calls")
    for found in paths:
        rows: dict[str, Counter[str]] = {}
        for name, calls in found["calls"].items():
            rows.setdefault(name.partition(":")[0], Counter()).update(calls)
        for name, calls in rows.items():
            table.add_row(found["path"], name, *(str(calls[kind] or "") for kind in kinds))
    console.print(table)
    for found in paths:
        if found["skipped"]:
            skipped = ", ".join(f"{one['kernel']} with {one['sizes']}" for one in found["skipped"])
            say(f"{found['path']}: left out after a process ended: {skipped}")
        for finding in found["roundings"][:2]:
            say(f"rounding, {found['path']} by {finding['kernel'] or 'default'}: {finding['detail']}")
    for title, name in (("known exceptions", "exceptions"), ("refused", "refused")):
        reasons: Counter[tuple[str, str]] = Counter()
        for found in paths:
            for kernel, counts in found[name].items():
                for reason, count in counts.items():
                    reasons[kernel, reason] += count
        for (kernel, reason), count in reasons.most_common(MOST_REASONS):
            say(f"{title}: {count} by {kernel}: {reason[:160]}")
        if len(reasons) > MOST_REASONS:
            say(f"{title}: {len(reasons) - MOST_REASONS} reasons more, in the file of results")


def replay(line: str, *, device: str = "cpu", kernels: Sequence[str] = ()) -> bool:
    """Repeat the call of one line with each kernel, print the outcomes, and return whether none is a fault.

    Args:
        line: a workload as the search prints it.
        device: where the fast twin computes.
        kernels: as in `run`.

    Raises:
        ValueError: if the line is not a workload, or there is no such device or kernel.
    """
    _check_device(device)
    truth = Truth(workload_of(line), device)
    console, right = Console(), True
    chosen = kernels_to_try(device, kernels)
    with _noting_choices():
        for kernel in chosen:
            outcome = try_kernel(truth, twin(chosen), kernel)
            right = right and not outcome.is_fault
            by = f" ({'+'.join(outcome.chosen)})" if outcome.chosen else ""
            said = f"{kernel or 'default'}{by}: {outcome.kind} {outcome.detail}".rstrip()
            console.print(said, markup=False, highlight=False, soft_wrap=True)
    return right


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line, and return 0 if nothing was found, 1 if something was, 2 if the arguments are wrong."""
    given = sys.argv[1:] if arguments is None else list(arguments)
    if given[:1] == [CHILD]:
        with Path(given[1]).open("a", buffering=1) as log:
            return _search(json.loads(given[2]), log)
    parser = argparse.ArgumentParser(prog="twinattn search", description=__doc__.partition("\n")[0])
    parser.add_argument("--device", default="cpu", help="where to compute: cpu, cuda, cuda:1 ...")
    parser.add_argument("--seconds", type=float, default=30.0, help="for each path (default: %(default)s)")
    parser.add_argument("--workloads", type=int, help="the most workloads of each path")
    parser.add_argument("--paths", nargs="+", default=[], metavar="PATH", help=f"of {', '.join(PATHS)}; all if none")
    parser.add_argument(
        "--kernels", nargs="+", default=[], metavar="NAME", help='kernels to try, "default" for the choice; all if none'
    )
    parser.add_argument("--dtypes", nargs="+", default=[], metavar="DTYPE", help="types of queries (default: three)")
    parser.add_argument("--longest", type=int, default=4097, help="tokens of a sequence (default: %(default)s)")
    parser.add_argument("--seed", type=int, help="the same batches again (default: from the clock)")
    parser.add_argument("--jobs", type=int, help="paths at a time (default: one per core, on a GPU one per two cores)")
    parser.add_argument("--results", type=Path, help="JSON file for what was found")
    parser.add_argument("--log", type=Path, help="folder for the calls of each path, one line per call")
    parser.add_argument("--replay", metavar="LINE", help="repeat one call, by the line that a search printed")
    options = vars(parser.parse_args(given))
    line = options.pop("replay")
    try:
        if line is not None:
            return 0 if replay(line, device=options["device"], kernels=options["kernels"]) else 1
        return 0 if run(options.pop("paths"), **options) else 1
    except ValueError as error:
        Console(stderr=True).print(str(error), markup=False, highlight=False, soft_wrap=True)
        return 2


if __name__ == "__main__":
    sys.exit(main())
