"""Check kernels in separate processes: one that crashes, hangs or corrupts its device does not affect the others.

A process logs to a file, line by line, each batch before the kernel is called, and each finding. If it dies, or writes
nothing for too long, the file names the property and the batch; the process is killed, and another one continues with
the remaining properties.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, TextIO

import torch

from twinattn.kit import properties
from twinattn.kit.adapters import kernel_of
from twinattn.kit.check import SEED, check, claims_as_words, parse_example
from twinattn.kit.drawn import Drawn
from twinattn.kit.example import Example
from twinattn.kit.finding import Finding, Report
from twinattn.kit.kernel import BadKernelError, notes_on
from twinattn.kit.property import CrashedError

STARTS = 60.0  # seconds that a process may take for its imports
LOOK = 0.1  # seconds between two looks at a process
ONE_THREAD = {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"}  # several kernels may be checked at a time
CANNOT_GO_ON = 70  # exit status of a process that can no longer use its device


def check_apart(
    target: str,
    path: str | None = None,
    *,
    device: str = "cpu",
    dtypes: Sequence[str] = (),
    examples: int = 20,
    only: Sequence[str] | None = None,
    seconds: float = 600.0,
    patience: float = 60.0,
    repeat: int = 1,
    limits: Mapping[str, Any] | None = None,
    on_finding: Callable[[Finding], None] | None = None,
    tell: Callable[[str], None] | None = None,
) -> Report:
    """Check a kernel in its own process, as `check` does.

    Args:
        target: `module:function`, a module of a path, or the name of an adapter.
        path: which path it computes.
        device: where the tensors are.
        dtypes: their names; those that the kernel claims if none.
        examples: batches per property in the first type, and fewer in each other type.
        only: names of properties.
        seconds: for all properties; those after that are reported as not reached.
        patience: seconds without a new line in the log, but for those it waits for a CPU, until the process is killed.
        repeat: how often each batch is tried.
        limits: claims that replace those of the kernel.
        on_finding: called with every finding, when its process has ended.
        tell: called with how far the check is, several times a second.

    Raises:
        BadKernelError: if the kernel cannot be called at all.
    """
    began = time.monotonic()
    found: dict[str, Finding] = {}
    report = Report(target, path or "", device, asked=dict(examples=examples, repeat=repeat, seed=SEED))
    left = list(only) if only is not None else None
    while True:
        rest = seconds - (time.monotonic() - began)
        with tempfile.TemporaryDirectory() as folder:
            log = Path(folder, "log")
            task: dict[str, Any] = dict(
                target=target, path=path, device=device, dtypes=list(dtypes), examples=examples, only=left
            )
            task |= dict(repeat=repeat, limits=dict(limits or {}))
            look = None if tell is None else _teller(log, len(found), tell)
            outcome, status = watch(task | dict(seconds=rest), log, patience, rest + patience, on_look=look)
            events = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
        names, last = None, None
        for event in events:
            if "error" in event:
                raise BadKernelError(event["error"])
            if "properties" in event:
                names, report.kernel, report.path = event["properties"], event["kernel"], event["path"]
                report.claims, report.notes = event["claims"], tuple(event["notes"])
                report.drawn = report.drawn or Drawn(report.path, tuple(event["dtypes"]))
            elif "finding" in event:
                finding = finding_of(event["finding"])
                found[finding.property], last = finding, None
                if on_finding is not None:
                    on_finding(finding)
            else:
                last = event
                if report.drawn is not None and "crashed" not in event:
                    report.drawn.add(parse_example(event["example"]))
        if names is None:
            raise BadKernelError(f"{target}: its process ended before the first property: {status}")
        if last is not None and "crashed" in last:
            outcome, status = "crashed", last["crashed"]
        left = [name for name in names if name not in found]
        if left and not outcome:
            outcome, status = "crashed", "its process ended with status 0 in the middle of a call"
        if not left:
            break
        last = last or dict(property=left[0])
        finding = found[last["property"]] = _interrupted(report, last, outcome, status)
        if on_finding is not None:
            on_finding(finding)
        left.remove(finding.property)
        if not left or time.monotonic() - began > seconds:
            break
    for name in left or ():
        prop = next(x for x in properties.of_path(report.path) if x.name == name)
        found[name] = Finding(name, prop.promise, "not reached", "the time was over")
    order = [x.name for x in properties.of_path(report.path)]
    report.findings = sorted(found.values(), key=lambda finding: order.index(finding.property))
    report.seconds = round(time.monotonic() - began, 1)
    return report


def _interrupted(report: Report, last: dict[str, Any], outcome: str, status: str) -> Finding:
    """Return the finding of the property that was checked when its process ended."""
    name, example = last["property"], last.get("example", "")
    prop = next(x for x in properties.of_path(report.path) if x.name == name)
    kind = example.partition("(")[0]
    says = f"from twinattn.kit.check import {kind}, reproduce; reproduce({report.kernel!r}, {name!r}, {example})"
    code = says if example and outcome != "not reached" else ""
    return Finding(name, prop.promise, outcome, status, 0, 0, example, code=code)


class Tail:
    """The events that a process logs, one JSON object per line, as they come.

    Args:
        log: the file of the process.
    """

    def __init__(self, log: Path) -> None:
        self.log, self.read = log, 0

    def new(self) -> list[dict[str, Any]]:
        """Return the events since the last call."""
        if not self.log.exists():
            return []
        with self.log.open("rb") as file:
            file.seek(self.read)
            whole, end, _ = file.read().rpartition(b"\n")  # the last line may be half written
        self.read += len(whole) + len(end)
        return [json.loads(line) for line in whole.splitlines()]


def _teller(log: Path, before: int, tell: Callable[[str], None]) -> Callable[[], None]:
    """Return a function that tells how far a check is, after `before` properties of earlier processes."""
    tail, done, of, batches, now = Tail(log), before, 0, 0, ""

    def look() -> None:
        nonlocal done, of, batches, now
        for event in tail.new():
            if "properties" in event:
                of = done + len(event["properties"])
            elif "finding" in event:
                done, now = done + 1, ""
            elif "example" in event:
                batches, now = batches + 1, event["property"]
        if of:
            tell(f"{done} of {of} properties, {batches} batches{f'; now {now}' if now else ''}")

    return look


def watch(
    task: dict[str, Any],
    log: Path,
    patience: float,
    seconds: float,
    *,
    module: str = "twinattn.kit.isolate",
    environment: Mapping[str, str] = ONE_THREAD,
    on_look: Callable[[], None] | None = None,
) -> tuple[str, str]:
    """Run a task in a process, and return its outcome ("" if well, "crashed", "hung", "not reached") and a reason.

    While it runs, `on_look` is called several times a second, and once more at its end.
    """
    said = log.with_name("stderr")
    with said.open("w") as errors:
        process = subprocess.Popen(
            [sys.executable, "-m", module, str(log), json.dumps(task)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=errors,
            start_new_session=True,
            env={**environment, **os.environ},
        )
    size, began, waited = 0, time.monotonic(), 0.0
    clock = _Clock(process.pid)
    try:
        while process.poll() is None:
            now, before = time.monotonic(), size
            size = log.stat().st_size if log.exists() else 0
            took = clock.tick()
            waited = waited + took if size == before else 0.0
            if waited > (patience if size else max(patience, STARTS)):
                return "hung", f"no answer in {waited:.0f} s of its own: --patience says how many it may take"
            if now - began > seconds:
                return "not reached", "the time was over while it was checked"
            if on_look is not None:
                on_look()
            time.sleep(LOOK)
        if on_look is not None:
            on_look()
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    if process.returncode == 0:
        return "", ""
    if process.returncode < 0:
        return "crashed", f"its process ended with {signal.Signals(-process.returncode).name}"
    words = (said.read_text().strip().splitlines() or [""])[-1]
    return "crashed", f"its process ended with status {process.returncode}: {words}"


class _Clock:
    """The time that a process has had: not that in which it was ready to run, and others ran on the machine."""

    def __init__(self, process: int) -> None:
        self.file = Path(f"/proc/{process}/stat")
        self.last, self.used = time.monotonic(), self._read()[1]

    def tick(self) -> float:
        """Return the seconds since the last tick: those on a processor if it wants to run, all of them if it waits."""
        now, before, (wants_to_run, used) = time.monotonic(), self.used, self._read()
        passed, self.last, self.used = now - self.last, now, used
        return min(passed, max(0.0, used - before)) if wants_to_run else passed

    def _read(self) -> tuple[bool, float]:
        """Return whether it wants to run, and its seconds on a processor; without a /proc, as if it waited."""
        try:
            words = self.file.read_text().rpartition(")")[2].split()
        except OSError:
            return False, 0.0
        return words[0] == "R", (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")


def finding_of(values: dict[str, Any]) -> Finding:
    """Make a finding from its values in JSON."""
    return Finding(**{name: tuples(value) for name, value in values.items()})


def tuples(x: Any) -> Any:
    """Turn lists into tuples, which JSON does not have."""
    return tuple(map(tuples, x)) if isinstance(x, list) else x


def main() -> None:
    """Run the task in the second argument, and log to the file that the first argument names."""
    with Path(sys.argv[1]).open("w", buffering=1) as log:
        sys.exit(_do(json.loads(sys.argv[2]), log))


def _do(task: dict[str, Any], log: TextIO) -> int:
    current: dict[str, str] = {}

    def say(**event: Any) -> None:
        log.write(json.dumps(event) + "\n")

    def on_example(name: str, example: Example) -> None:
        current.update(property=name, example=repr(example))
        say(**current)

    try:
        kernel = kernel_of(task["target"], task["path"])
        limits = {name: tuples(values) for name, values in task.get("limits", {}).items()}
        kernel = replace(kernel, limits={**kernel.limits, **limits}) if limits else kernel
        names = [x.name for x in properties.of_path(kernel.path)]
        chosen = names if task["only"] is None else task["only"]
        dtypes = [getattr(torch, name) for name in task["dtypes"]] or None
        claims = claims_as_words(kernel)
        kinds = [name for name in claims["dtypes"] if name in (task["dtypes"] or claims["dtypes"])]
        asked = [name for name in names if name in chosen]
        say(
            kernel=task["target"],
            path=kernel.path,
            properties=asked,
            claims=claims,
            dtypes=kinds,
            notes=notes_on(kernel),
        )
        check(
            kernel,
            device=task["device"],
            dtypes=dtypes,
            examples=task["examples"],
            only=task["only"],
            seconds=task["seconds"],
            repeat=task.get("repeat", 1),
            on_finding=lambda finding: say(finding=asdict(finding)),
            on_example=on_example,
        )
    except BadKernelError as error:
        say(error=str(error))
        return 2
    except CrashedError as error:
        say(**current, crashed=str(error))
        return CANNOT_GO_ON
    return 0


if __name__ == "__main__":
    main()
