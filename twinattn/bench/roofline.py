"""The roofline: how fast each measured attention runs, compared with the most that its machine allows.

    operations per second
      |        ________  product       the rate of a large matrix product
      |      /
      |    /  read * intensity         the rate of memory, times the operations for each byte
      |  /
      +------------------  operations per byte (intensity)

Source: Williams et al. 2009, "Roofline: an insightful visual performance model".
"""

import io
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from twinattn.bench.rows import rows
from twinattn.bench.work import Attention
from twinattn.course import copied as course

INK = "#797979"  # as legible on white as on black
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7")  # one per machine


class Point(NamedTuple):
    """A measured row: its operations per byte, and its operations per second."""

    row: str
    intensity: float
    rate: float


@dataclass(frozen=True)
class Machine:
    """The roof of a machine, and what was measured under it.

    Attributes:
        name: of the processor.
        dtype: of the numbers.
        memory: its memory in bytes, None where the results do not say.
        multiprocessors: of a GPU, None of a CPU.
        read: bytes per second that it reads, the best of all runs.
        product: operations per second of a matrix product, the best of all runs.
        points: the rows.
    """

    name: str
    dtype: str
    memory: int | None
    multiprocessors: int | None
    read: float
    product: float
    points: Sequence[Point]

    @property
    def ridge(self) -> float:
        """The operations per byte from which on arithmetic takes longer than memory."""
        return self.product / self.read

    def roof(self, intensity: float) -> float:
        """Return the operations per second that the machine allows at an intensity."""
        return min(intensity * self.read, self.product)

    def shares(self, workload: str = "") -> list[float]:
        """Return the share of the roof that each row reaches, of those whose workload begins with `workload`."""
        return [
            point.rate / self.roof(point.intensity)
            for point in self.points
            if point.row.partition("/")[2].startswith(workload)
        ]


@dataclass(frozen=True)
class Roofline:
    """The machines that were measured. A notebook displays them as a picture."""

    machines: Sequence[Machine]

    def __repr__(self) -> str:
        return "\n".join(
            f"{machine.name}, {machine.dtype}: ridge at {machine.ridge:.0f} operations per byte; {len(machine.points)} "
            f"rows, at {min(machine.shares()):.0%} to {max(machine.shares()):.0%} of the roof"
            for machine in self.machines
        )

    def _repr_svg_(self) -> str:
        import matplotlib
        from matplotlib.figure import Figure

        colours = dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), INK)
        with matplotlib.rc_context({"svg.hashsalt": "twinattn", "svg.fonttype": "none"} | colours):
            figure = Figure(figsize=(8, 4.5), layout="constrained")
            axes = figure.add_subplot(facecolor="none")
            intensities = torch.logspace(0, 4, 200).tolist()
            for color, marker, machine in zip(COLOURS, "oDs^", self.machines, strict=False):
                axes.loglog(intensities, [machine.roof(x) for x in intensities], color=color)
                _, x, y = zip(*machine.points, strict=True)
                axes.scatter(x, y, color=color, marker=marker, s=24, label=f"{machine.name}, {machine.dtype}")
            axes.set(xlabel="operations per byte", ylabel="operations per second")
            axes.legend(frameon=False)
            buffer = io.BytesIO()
            figure.savefig(buffer, format="svg", transparent=True, metadata=dict.fromkeys(("Date", "Creator")))
        return buffer.getvalue().decode()


def measured(folder: Path | str | None = None) -> Roofline:
    """Read the roof of every machine in a folder of results, and the rows that compute attention.

    Rows of the host's time are left out: a call comes back before the GPU is done.

    Args:
        folder: where `twinattn.bench.report.write` writes; None for the measurements that come with the package.
    """
    files = sorted(Path(folder or course.folder() / "docs/results").glob("*.json"))
    return Roofline([_machine(json.loads(file.read_text())["runs"]) for file in files])


def _machine(runs: Sequence[dict[str, Any]]) -> Machine:
    head, ceilings = runs[0], [run["ceilings"] for run in runs]
    return Machine(
        head["machine"]["name"],
        head["dtype"],
        head["machine"].get("memory_bytes"),
        head["machine"].get("multiprocessors"),
        read=max(ceiling.get("read", ceiling["copy"]) for ceiling in ceilings),  # runs of old did not measure reads
        product=max(ceiling["product"] for ceiling in ceilings),
        points=[point for run in runs for point in _points(run)],
    )


def _points(run: dict[str, Any]) -> list[Point]:
    works = {str(row): row.work for row in rows(run["device"], quick=False)}
    itemsize = getattr(torch, run["dtype"]).itemsize
    points = []
    for record in run["rows"]:
        name = f"{record['path']}/{record['workload']}"
        work, seconds = works.get(name), record["contenders"][0].get("median")
        if seconds and isinstance(work, Attention) and record["clock"] != "host":
            moved = work.reads(itemsize) + work.writes(itemsize)
            points.append(Point(name, work.flops() / moved, work.flops() / seconds))
    return points
