"""Store the results of many kernels on one machine in a file, and make tables from it."""

import importlib
import platform
import re
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from twinattn.kit.adapters import ADAPTERS
from twinattn.kit.finding import FAILED, Report
from twinattn.kit.report import MOST_ROWS, mark

COUNTED = ("honoured", "broken", "refused", "not claimed", "not reached")
NOTES = "✓ honoured · ✗ broken · ! crashed, or did not answer · – refused · empty: not claimed · ? not reached"


def results(
    reports: Sequence[Report], missing: dict[str, str], device: str, earlier: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Collect reports, with the date, the machine and the versions.

    Args:
        reports: of the kernels that were checked.
        missing: the others, and why they cannot run.
        device: where they were checked.
        earlier: results of this machine; kernels that were not checked now keep theirs, with the date of their run.

    Returns:
        The content of the machine's file.

    Raises:
        ValueError: if the earlier results are of another machine.
    """
    asked = [ADAPTERS[report.kernel] for report in reports]
    packages = {"torch": None, "triton": None} | {adapter.distribution: adapter.package for adapter in asked}
    versions = {name: _version(name, packages[name]) for name in sorted(packages)}
    found: dict[str, Any] = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": _machine(device),
        "device": device,
        "versions": {"python": platform.python_version(), "cuda": torch.version.cuda, **versions},
        "missing": missing,
        "reports": [_compact(report.as_dict()) for report in reports],
    }
    if earlier is not None:
        if earlier["machine"] != found["machine"]:
            raise ValueError(f"earlier: expected results of {found['machine']}, got those of {earlier['machine']}")
        run = {"date": earlier["date"], "versions": earlier["versions"]}
        names = {report["kernel"] for report in found["reports"]}
        found["reports"] += [{**run, **report} for report in earlier["reports"] if report["kernel"] not in names]
    found["reports"].sort(key=lambda report: list(ADAPTERS).index(report["kernel"]))
    return found


def _compact(report: dict[str, Any]) -> dict[str, Any]:
    """Leave out empty fields, the promises, and the rows of masks that no report shows."""
    for name in ("about", "asked", "claims", "drawn"):  # the same for all kernels, or in their code
        report.pop(name, None)
    report["findings"] = [
        {
            name: [mask[:MOST_ROWS] for mask in value] if name in ("expected", "seen") else value
            for name, value in finding.items()
            if value and name != "promise"
        }
        for finding in report["findings"]
    ]
    return report


def tables(found: dict[str, Any]) -> str:
    """Write a table per path, with a row per property and a column per kernel; paths with one kernel share a table."""
    parts = [f"{found['machine']}, {_when(found)}; {_versions(found)}.", NOTES]
    earlier: dict[tuple[str, str], list[str]] = {}
    for report in found["reports"]:
        if "date" in report:
            earlier.setdefault((_when(report), _versions(report)), []).append(f"`{report['kernel']}`")
    lines = [f"{when}; {versions}: {', '.join(kernels)}." for (when, versions), kernels in sorted(earlier.items())]
    if lines:
        parts.insert(1, "\n".join(["Of other runs:", "", *(f"- {line}" for line in lines)]))
    for report in found["reports"]:
        without = ", ".join(finding["property"] for finding in report["findings"] if finding.get("without_lse"))
        if without:
            parts.append(f"The LSE of `{report['kernel']}` is wrong, or not claimed. Checked without it: {without}.")
    alone = []
    for path in dict.fromkeys(report["path"] for report in found["reports"]):
        reports = [report for report in found["reports"] if report["path"] == path]
        if len(reports) == 1:
            alone += reports
            continue
        names = list(dict.fromkeys(finding["property"] for report in reports for finding in report["findings"]))
        shown = [f"`{_column(report['kernel'], path)}`" for report in reports]
        lines = [f"### {path}", "", f"| | {' | '.join(shown)} |", f"|---|{':-:|' * len(shown)}"]
        for name in names:
            cells = [_cell(report, name) for report in reports]
            if any(cells):
                lines.append(f"| {name} | {' | '.join(cells)} |")
        parts.append("\n".join(lines))
    if alone:
        lines = ["### Paths with one kernel", "", f"| | {' | '.join(COUNTED)} |", f"|---|{'--:|' * len(COUNTED)}"]
        for report in alone:
            outcomes = ["broken" if f["outcome"] in FAILED else f["outcome"] for f in report["findings"]]
            lines.append(f"| `{report['kernel']}` | {' | '.join(str(outcomes.count(name)) for name in COUNTED)} |")
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def _column(kernel: str, path: str) -> str:
    """Return the name of a kernel in the table of its path: of our twins, that of the package."""
    return kernel.partition(".")[0] if kernel.endswith(f":{path}") else kernel.removesuffix(f".{path}")


def failures(found: dict[str, Any]) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Yield each failed finding, after its report."""
    for report in found["reports"]:
        for finding in report["findings"]:
            if finding["outcome"] in FAILED:
                yield report, finding


def list_failures(found: dict[str, Any]) -> str:
    """Write a list of failures, each with its smallest batch."""
    parts = []
    for report, finding in failures(found):
        batch = f" `{finding['example']}`" if "example" in finding else ""
        kind = f", {finding['dtype']}" if "dtype" in finding else ""
        causes = " ".join(says for _, says in finding.get("mistakes", ())[:1])
        cause = f" Probably: {causes}" if causes else ""
        parts.append(f"- `{report['kernel']}`, {finding['property']}{kind}: {finding.get('detail', '')}.{batch}{cause}")
    return "\n".join(parts) or "None."


def list_not_claimed(found: dict[str, Any]) -> str:
    """Write a list of the properties that each kernel does not claim, with the reasons."""
    lines = []
    for report in found["reports"]:
        by_reason: dict[str, list[str]] = {}
        for finding in report["findings"]:
            if finding["outcome"] == "not claimed":
                by_reason.setdefault(finding.get("detail", "no reason is known"), []).append(finding["property"])
        if by_reason:
            said = "; ".join(f"*{', '.join(names)}*: {reason}" for reason, names in by_reason.items())
            lines.append(f"- `{report['kernel']}`: {said}.")
    return "\n".join(lines) or "Everything was claimed."


def _versions(run: dict[str, Any]) -> str:
    return ", ".join(f"{name} {number}" for name, number in run["versions"].items() if number)


def _when(run: dict[str, Any]) -> str:
    return f"{run['date'][:16].replace('T', ', ')} UTC"


def _cell(report: dict[str, Any], name: str) -> str:
    for finding in report["findings"]:
        if finding["property"] == name:
            outcome = finding["outcome"]
            return "" if outcome == "not claimed" else "!" if outcome in ("crashed", "hung") else mark(outcome)
    return ""


def _version(distribution: str, package: str | None) -> str | None:
    """Return the version of a distribution; if it is not installed, the `__version__` of its package, or None."""
    try:
        return version(distribution)
    except PackageNotFoundError:
        try:
            return getattr(importlib.import_module(package), "__version__", None) if package else None
        except ImportError:
            return None


def about(device: str) -> dict[str, str]:
    """Return the date, the machine and the versions of a report."""
    packages = {"Python": platform.python_version(), "torch": torch.__version__, "triton": _version("triton", None)}
    return {
        "Checked": f"{datetime.now(UTC):%Y-%m-%d, %H:%M} UTC",
        "On": f"{_machine(device)} ({device}), {platform.system()} {platform.machine()}",
        "With": ", ".join(f"{name} {number}" for name, number in packages.items() if number),
    }


def _machine(device: str) -> str:
    kind = torch.device(device).type
    if kind == "mps":
        return torch.backends.mps.get_name()
    if kind != "cpu":
        return str(torch.get_device_module(kind).get_device_name(device))
    return processor()


def processor() -> str:
    """Return the name of this machine's processor, without (R) and (TM)."""
    info = Path("/proc/cpuinfo")
    names = [line for line in info.read_text().splitlines() if line.startswith("model name")] if info.exists() else []
    name = names[0].partition(":")[2] if names else platform.processor() or platform.machine()
    return re.sub(r"\((R|TM)\)|Processor|CPU", "", name).strip()
