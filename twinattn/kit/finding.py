"""What came of a check: a finding for each property, and the report of a kernel."""

import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from twinattn.kit.drawn import Drawn

FAILED = ("wrong", "raises", "crashed", "hung")  # outcomes that break the contract


@dataclass(frozen=True)
class Finding:
    """What came of one property.

    Attributes:
        property: its name.
        promise: what it says.
        outcome: "honoured"; "wrong", "raises", "crashed", "hung"; "refused", "not claimed", "not reached".
        detail: what is wrong, or why it was not asked.
        examples: how many batches were tried.
        refused: how many of them the kernel refused.
        example: the smallest batch that fails, as code.
        dtype: in which it fails.
        mistakes: what is probably wrong: names and sentences, the most probable first.
        expected: the masks of the batch's sequences, as rows of 0 and 1.
        seen: those read out of the kernel's answers.
        code: a line that reproduces it.
        without_lse: whether it would compare the log-sum-exp, too, and did not, as that is wrong or not claimed.
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


@dataclass
class Report:
    """What a kernel honours, property by property.

    Attributes:
        kernel: its name.
        path: what it computes.
        device: where the tensors were.
        findings: one for each property.
        seconds: that it took.
        claims: of the kernel, by name.
        drawn: what it was asked.
        asked: how it was checked: the number of batches, the seed, and how often each was tried.
        notes: what its author should know, such as a parameter that has no meaning.
        times: of a kernel that was timed, by workload.
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
        """Where the contract is broken."""
        return [finding for finding in self.findings if finding.outcome in FAILED]

    @property
    def not_reached(self) -> list[Finding]:
        """What was not asked, as the time was over, or the kernel cannot be called."""
        return [finding for finding in self.findings if finding.outcome == "not reached"]

    @property
    def lapses(self) -> list[Finding]:
        """What is claimed and hardly checked: the kernel refused all batches, or more than half of them."""
        asked = [x for x in self.findings if x.outcome in ("honoured", "refused")]
        return [x for x in asked if x.outcome == "refused" or 2 * x.refused > x.examples]

    def as_dict(self) -> dict[str, Any]:
        """Return the report as JSON has it, with what two reports are told apart by."""
        values = dict(kernel=self.kernel, path=self.path, device=self.device, seconds=self.seconds)
        values |= dict(findings=[asdict(finding) for finding in self.findings], claims=dict(self.claims))
        values |= dict(drawn=self.drawn.as_dict() if self.drawn else {}, asked=dict(self.asked), notes=list(self.notes))
        values |= dict(times=self.times) if self.times else {}
        return values | dict(about=about(self.device))


def about(device: str) -> dict[str, Any]:
    """Return the versions and the name of the device that a report is of."""
    try:
        ours = version("twinattn")
    except PackageNotFoundError:  # it is not installed, but on the path
        ours = ""
    is_cuda = device.startswith("cuda") and torch.cuda.is_available()
    name = torch.cuda.get_device_name(device) if is_cuda else platform.processor() or platform.machine()
    return dict(twinattn=ours, torch=torch.__version__, python=platform.python_version(), device=name)
