"""Where the time of a step goes: scheduling, tables, copies, forward, sampling, bookkeeping. As a table and a picture.

An engine calls `mark` with what it does from here on; a profile writes down when.

    mark("scheduling")   ("tables")   ("copies")   ("forward")            ("sampling")   ("bookkeeping")   ("done")
         |── who runs ──────|── plans ───|── to the ──|── the model ───────────|── tokens ────|── text, blocks ──|
                                           device

The times are the host's. On a GPU, `forward` is the time to launch the model, and the host waits for the GPU where it
reads the tokens: in `sampling`.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median

from rich.table import Table

from refattn.serving import Engine

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


class Profile:
    """Writes down the times of an engine's steps, from here on.

    Attributes:
        steps: the steps that computed something, in order.

    Args:
        engine: the engine, whose `mark` is set.
    """

    def __init__(self, engine: Engine) -> None:
        self.steps: list[StepTimes] = []
        self._engine = engine
        self._before = replace(engine.counters)
        self._step = StepTimes(0.0)
        self._phase = ""
        engine.mark = self._mark

    def _mark(self, phase: str) -> None:
        now = time.perf_counter()
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


def check_file(file: Path) -> None:
    """Check that a picture can be written into a file, before minutes are spent on what it shows.

    Raises:
        ModuleNotFoundError: if there is no matplotlib.
        ValueError: if there is no such format or folder.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    formats = FigureCanvasAgg.filetypes
    if file.suffix[1:] not in formats or not file.parent.is_dir():
        raise ValueError(
            f"profile: expected a file in a folder that is there, of .{', .'.join(sorted(formats))}, got {file}"
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


def _label(step: StepTimes) -> str:
    counts = {"token": step.num_tokens, "chunk": step.num_chunks}
    return ", ".join(f"{count} {name}{'s' * (count != 1)}" for name, count in counts.items() if count)
