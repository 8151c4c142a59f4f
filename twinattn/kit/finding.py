"""The result of a check: a finding for each property, and the report of a kernel."""

import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from twinattn.kit.drawn import Drawn

FAILED = ("wrong", "raises", "crashed", "hung")  # outcomes that break the contract
ENDS = {
    "call": "it cannot be called",
    "writes": "it changes its inputs",
}  # if one of these fails, no other property is checked


@dataclass(frozen=True)
class Finding:
    """The result of one property.

    Attributes:
        property: its name.
        promise: its sentence.
        outcome: "honoured"; "wrong", "raises", "crashed", "hung"; "refused", "not claimed", "not reached".
        detail: what is wrong, or why it was not checked.
        examples: how many batches were tried.
        refused: how many of them the kernel refused.
        example: the smallest batch that fails, as code.
        dtype: in which it fails.
        mistakes: names and sentences of probable mistakes, the most probable first.
        expected: the masks of the batch's sequences, as rows of 0 and 1.
        seen: the masks read out of the kernel's output.
        code: a line that reproduces it.
        without_lse: whether the log-sum-exp was left out of the comparison, because it is wrong or not claimed.
        asked: the numbers that the failing call had beside those of the batch, such as `scale=0.3`.
        lacking: parameters that the function does not have, each with the value that it is held to.
    """

    property: str
    promise: str
    outcome: str
    detail: str = ""
    examples: int = 0
    refused: int = 0
    example: str = ""
    dtype: str = ""
    mistakes: tuple[tuple[str, str], ...] = ()
    expected: tuple[tuple[str, ...], ...] = ()
    seen: tuple[tuple[str, ...], ...] = ()
    code: str = ""
    without_lse: bool = False
    asked: str = ""
    lacking: str = ""


@dataclass
class Report:
    """The results of a kernel.

    Attributes:
        kernel: its name.
        path: the path that it computes.
        device: where the tensors were.
        findings: one for each property.
        seconds: the time that the check took.
        claims: of the kernel, by name.
        drawn: a summary of the batches.
        asked: how it was checked: the number of batches, the seed, and how often each was tried.
        notes: for its author, such as a parameter that this path does not have.
        times: by workload, if the kernel was timed.
    """

    kernel: str
    path: str
    device: str
    findings: list[Finding] = field(default_factory=list)
    seconds: float = 0.0
    claims: Mapping[str, Any] = field(default_factory=dict)
    drawn: Drawn | None = None
    asked: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    times: dict[str, Any] = field(default_factory=dict)

    @property
    def has_checked_nothing(self) -> bool:
        """Whether the kernel refused every batch of all that it claims."""
        return not any(x.outcome == "honoured" for x in self.findings) and not self.failures

    @property
    def failures(self) -> list[Finding]:
        """The findings of properties that failed."""
        return [finding for finding in self.findings if finding.outcome in FAILED]

    @property
    def not_reached(self) -> list[Finding]:
        """The findings of properties that were not checked because the time was over, or a call failed."""
        return [finding for finding in self.findings if finding.outcome == "not reached"]

    @property
    def lapses(self) -> list[Finding]:
        """The findings of properties that were hardly checked: the kernel refused more than half of the batches."""
        asked = [x for x in self.findings if x.outcome in ("honoured", "refused")]
        return [x for x in asked if x.outcome == "refused" or 2 * x.refused > x.examples]

    def as_dict(self) -> dict[str, Any]:
        """Return the report as values for JSON, with versions and the name of the device."""
        values = dict(kernel=self.kernel, path=self.path, device=self.device, seconds=self.seconds)
        values |= dict(findings=[asdict(finding) for finding in self.findings], claims=dict(self.claims))
        values |= dict(drawn=self.drawn.as_dict() if self.drawn else {}, asked=dict(self.asked), notes=list(self.notes))
        values |= dict(times=self.times) if self.times else {}
        return values | dict(about=about(self.device))


def about(device: str) -> dict[str, Any]:
    """Return the versions and the name of the device for a report."""
    try:
        ours = version("twinattn")
    except PackageNotFoundError:  # it is not installed, but on the path
        ours = ""
    is_cuda = device.startswith("cuda") and torch.cuda.is_available()
    name = torch.cuda.get_device_name(device) if is_cuda else platform.processor() or platform.machine()
    return dict(twinattn=ours, torch=torch.__version__, python=platform.python_version(), device=name)
