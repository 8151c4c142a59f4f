"""Where the time of a step goes: scheduling, tables, copies, forward, sampling, bookkeeping. As a table and a picture.

An engine calls `mark` with what it does from here on; a profile writes down when.

    mark("scheduling")   ("tables")   ("copies")   ("forward")            ("sampling")   ("bookkeeping")   ("done")
         |── who runs ──────|── plans ───|── to the ──|── the model ───────────|── tokens ────|── text, blocks ──|
                                           device

The times are the host's. On a GPU, `forward` is the time to launch the model, and the host waits for the GPU where it
reads the tokens: in `sampling`. When the GPU begins and ends what a step has launched is read from its own clock.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median

import torch
from rich.table import Table

from twinattn.engine import Engine

PHASES = {
    "scheduling": "who runs, and blocks",
    "tables": "lengths, slots, plans",
    "copies": "to the device",
    "forward": "the model",
    "sampling": "next tokens",
    "bookkeeping": "text, prefix cache",
}
COLOURS = ("#4477aa", "#66ccee", "#ccbb44", "#bbbbbb", "#ee6677", "#228833")  # Paul Tol's bright ones
MOST_SHOWN = 8  # steps in a picture


@dataclass
class StepTimes:
    """The times of one step.

    Attributes:
        start: when it began, in seconds; only differences mean something.
        spans: what it did, from when to when, in seconds after its start.
        num_tokens: tokens that went through the model.
        num_chunks: chunks of prompts among them; 0 for a step of decodes alone.
    """

    start: float
    spans: list[tuple[str, float, float]] = field(default_factory=list)
    num_tokens: int = 0
    num_chunks: int = 0

    @property
    def seconds(self) -> float:
        """How long it took."""
        return self.spans[-1][2]

    def seconds_of(self, phase: str) -> float:
        """How long all parts of a phase took together."""
        return sum(end - start for name, start, end in self.spans if name == phase)


class GpuClock:
    """When a GPU does what the host launches, by events on its stream, on the clock of the host."""

    def __init__(self) -> None:
        self._zero = torch.cuda.Event(enable_timing=True)
        self._zero.record()
        self._zero.synchronize()
        self._start = time.perf_counter()
        self._events: list[list[torch.cuda.Event]] = []  # begin and end of each launch

    def mark(self, before: str, phase: str) -> None:
        """Put an event where the launch of a model begins or ends."""
        if phase == "forward":
            self._events.append([])
        if "forward" in (before, phase) and before != phase:
            self._events[-1].append(torch.cuda.Event(enable_timing=True))
            self._events[-1][-1].record()

    def spans(self) -> list[tuple[float, float]]:
        """Wait for the GPU; return from when to when it was at each launch, in seconds on the host's clock."""
        torch.cuda.synchronize()
        whole = [events for events in self._events if len(events) == 2]
        times = [[self._start + self._zero.elapsed_time(event) / 1e3 for event in events] for events in whole]
        return [(start, end) for start, end in times]


class Profile:
    """Writes down the times of an engine's steps, from here on.

    Attributes:
        steps: the steps that computed something, in order.
        gpu: when the GPU was at what they launched; None on a CPU.

    Args:
        engine: the engine, whose `mark` is set.
    """

    def __init__(self, engine: Engine) -> None:
        self.steps: list[StepTimes] = []
        self._engine = engine
        self._before = replace(engine.counters)
        self._step = StepTimes(0.0)
        self._phase = ""
        self.gpu = GpuClock() if engine.model.device.type == "cuda" else None
        engine.mark = self._mark

    def _mark(self, phase: str) -> None:
        now = time.perf_counter()
        if self.gpu is not None:
            self.gpu.mark(self._phase, phase)
        if phase == "scheduling":
            self._step, self._before = StepTimes(now), replace(self._engine.counters)
        else:
            begun = self._step.spans[-1][2] if self._step.spans else 0.0
            self._step.spans.append((self._phase, begun, now - self._step.start))
        self._phase = phase
        if phase == "done" and self._engine.counters.steps > self._before.steps:
            self._step.num_tokens = self._engine.counters.computed_tokens - self._before.computed_tokens
            self._step.num_chunks = self._engine.counters.chunks - self._before.chunks
            self.steps.append(self._step)


def times_table(steps: Sequence[StepTimes], title: str = "") -> Table:
    """Return the median time of each phase, and its share of the median step: of steps that only decode, and others."""
    kinds = {
        "decodes": [step for step in steps if not step.num_chunks],
        "with prompts": [step for step in steps if step.num_chunks],
    }
    shown = Table(title=title)
    shown.add_column("median")
    for kind, its in kinds.items():
        shown.add_column(f"{len(its)} {kind}", justify="right")
        shown.add_column("share", justify="right")
    shown.add_column("what it is", style="dim")
    for phase, text in PHASES.items():
        cells = []
        for its in kinds.values():
            part, whole = [step.seconds_of(phase) for step in its], [step.seconds for step in its]
            cells += [_ms(part), f"{median(part) / median(whole):.1%}" if its else "-"]
        shown.add_row(phase, *cells, text)
    shown.add_section()
    wholes = [cell for its in kinds.values() for cell in (_ms([step.seconds for step in its]), "")]
    shown.add_row("step", *wholes, "")
    return shown


def _ms(seconds: Sequence[float]) -> str:
    return f"{median(seconds) * 1e3:.2f} ms" if seconds else "-"


def some(steps: Sequence[StepTimes]) -> Sequence[StepTimes]:
    """Choose the steps of a picture: in a row, around the first that only decodes."""
    decodes = next((i for i, step in enumerate(steps) if not step.num_chunks), 0)
    first = max(0, min(decodes - MOST_SHOWN // 2, len(steps) - MOST_SHOWN))
    return steps[first : first + MOST_SHOWN]


def check_file(file: Path, name: str = "profile") -> None:
    """Check that a picture can be written into a file, which errors call by its name, before minutes are spent on it.

    Raises:
        ModuleNotFoundError: if there is no matplotlib.
        ValueError: if there is no such format or folder.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    formats = FigureCanvasAgg.filetypes
    if file.suffix[1:] not in formats or not file.parent.is_dir() or file.is_dir():
        raise ValueError(
            f"{name}: expected a file in a folder that is there, of .{', .'.join(sorted(formats))}, got {file}"
        )


def draw(runs: Mapping[str, Sequence[StepTimes]], file: Path) -> None:
    """Draw some steps of each run, one bar per step, all from their own start.

    Args:
        runs: the steps of each engine, by its name.
        file: where to write the picture, in the format of its suffix.

    Raises:
        ValueError: if there is nothing to draw, or no such format or folder.
    """
    check_file(file)
    from matplotlib.figure import Figure

    empty = [name for name, steps in runs.items() if not steps]
    if empty or not runs:
        raise ValueError(f"runs: expected some with steps, got {', '.join(empty) or 'none'} without")
    shown = {name: some(steps) for name, steps in runs.items()}
    figure = Figure(figsize=(9, 1.2 + 0.32 * sum(map(len, shown.values()))), layout="constrained")
    every = figure.subplots(len(shown), sharex=True, squeeze=False, height_ratios=[*map(len, shown.values())])[:, 0]
    for axes, (name, steps) in zip(every, shown.items(), strict=True):
        for y, step in enumerate(steps):
            for phase, colour in zip(PHASES, COLOURS, strict=True):
                bars = [(start * 1e3, (end - start) * 1e3) for found, start, end in step.spans if found == phase]
                axes.broken_barh(
                    bars, (y - 0.4, 0.8), color=colour, label=phase if (axes, y) == (every[0], 0) else None
                )
        axes.set_yticks(range(len(steps)), [_label(step) for step in steps])
        axes.invert_yaxis()
        axes.set_title(name, loc="left")
        axes.spines[["top", "right"]].set_visible(False)
    every[-1].set_xlabel("milliseconds since the step began, on the host")
    figure.legend(loc="outside upper center", ncols=len(PHASES), frameon=False)
    figure.savefig(file)


def draw_timeline(steps: Sequence[StepTimes], gpu: Sequence[tuple[float, float]], file: Path) -> None:
    """Draw some steps one after the other, on one axis: what the host did, and when the GPU was at what it launched.

    Args:
        steps: the steps, in order.
        gpu: when the GPU was at each launch, as `GpuClock.spans` returns it.
        file: where to write the picture, in the format of its suffix.

    Raises:
        ValueError: if there are no steps, or no such format or folder.
    """
    check_file(file)
    from matplotlib.figure import Figure

    if not steps:
        raise ValueError("steps: expected some, got none")
    shown = some(steps)
    zero, end = shown[0].start, shown[-1].start + shown[-1].seconds
    figure = Figure(figsize=(9, 2.2), layout="constrained")
    axes = figure.subplots()
    for phase, colour in zip(PHASES, COLOURS, strict=True):
        bars = [
            ((step.start + begun - zero) * 1e3, (done - begun) * 1e3)
            for step in shown
            for found, begun, done in step.spans
            if found == phase
        ]
        axes.broken_barh(bars, (0.6, 0.8), color=colour, label=phase)
    launches = [(begun, done) for begun, done in gpu if begun < end and done > zero]
    bars = [((begun - zero) * 1e3, (done - begun) * 1e3) for begun, done in launches]
    axes.broken_barh(bars, (-0.4, 0.8), color="#444444", edgecolor="white")
    for step in shown:
        axes.axvline((step.start - zero) * 1e3, color="black", linewidth=0.5, linestyle=":")
    axes.set(xlim=(0, (end - zero) * 1e3), yticks=[0, 1], yticklabels=["GPU", "host"])
    axes.set_xlabel("milliseconds; a dotted line is where a step begins")
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside upper center", ncols=len(PHASES), frameon=False)
    figure.savefig(file)


def _label(step: StepTimes) -> str:
    counts = {"token": step.num_tokens, "chunk": step.num_chunks}
    return ", ".join(f"{count} {name}{'s' * (count != 1)}" for name, count in counts.items() if count)
