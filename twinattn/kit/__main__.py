"""`twinattn prove my_package:my_attention --path chunked_prefill`: check a kernel against the contract.

Exit status: 0 if the kernel honours all that it claims; 1 if not, if a property was not reached, or if it refuses every
batch; 2 if there is no such kernel or device. With `--strict` it is also 1 if the kernel refuses more than half of the
batches of a property.

`twinattn prove vacuous my_test.py::check chunked_prefill`: run your check on known mistakes; 1 if it lets one pass.
"""

import argparse
import json
import os
import sys
from concurrent.futures import ThreadPoolExecutor, as_completed
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from refattn.checks import check_file, check_folder, check_number, check_sizes
from twinattn.kit import field
from twinattn.kit.adapters import ADAPTERS
from twinattn.kit.example import PATHS
from twinattn.kit.finding import Finding, Report
from twinattn.kit.isolate import check_apart
from twinattn.kit.kernel import HALVES, BadKernelError, check_device, find
from twinattn.kit.operations import OPERATIONS
from twinattn.kit.properties import of_path
from twinattn.kit.report import STYLES, as_html, as_junit, lines, mark
from twinattn.kit.timed import time_apart
from twinattn.kit.vacuity import PLANTED, find_check, vacuous
from twinattn.progress import Progress


def main(arguments: list[str] | None = None) -> int:
    """Check the kernel that the command line names, and return the exit status."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments[:1] == ["vacuous"]:
        return _vacuous(arguments[1:])
    parser = _parser()
    asked = parser.parse_args(arguments)
    console = Console(highlight=False, soft_wrap=True)
    try:
        check_device(asked.device)
        _check_options(asked)
    except (BadKernelError, ValueError) as error:
        sys.stderr.write(f"{error}\n")
        return 2
    if asked.list:
        for adapter in ADAPTERS.values():
            reason = adapter.why_not(asked.device)
            console.print(Text(f"{adapter.name:24} {adapter.path:16} {'runs here' if reason is None else reason}"))
        console.print(Text("\noperations beside attention, for --path, and what a function of each may take"))
        for operation in OPERATIONS.values():
            console.print(Text(f"{operation.name:24} {operation.signature.replace('`', '')}"))
        return 0
    options: dict[str, Any] = dict(
        device=asked.device,
        dtypes=asked.dtype,
        examples=asked.examples,
        only=asked.only,
        seconds=asked.seconds,
        patience=asked.patience,
        repeat=asked.repeat,
        limits={name: tuple(x) for name in ("heads", "head_sizes", "block_sizes") if (x := getattr(asked, name))},
    )
    if asked.all_installed:
        return _all(asked, options, console)
    if asked.kernel is None:
        parser.error("name a kernel as module:function, or use --list")
    return _check_one(asked, options, console)


def _parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(
        prog="twinattn prove",
        description="Check an attention kernel against the contract, property by property.",
        epilog="Example: twinattn prove my_package:my_attention --path chunked_prefill",
    )
    parser.add_argument(
        "kernel", nargs="?", help="module:function, file.py:function, a module of a path, or the name of an adapter"
    )
    parser.add_argument(
        "--path",
        choices=[*PATHS, *OPERATIONS],
        metavar="PATH",
        help="the path that the kernel computes: varlen over rows, chunked_prefill over pages, decodes included; "
        f"or one of {', '.join(name for name in (*PATHS, *OPERATIONS) if name not in ('varlen', 'chunked_prefill'))}",
    )
    parser.add_argument("--device", default="cpu", help="a torch device that is here: cpu, cuda, cuda:1, mps, xpu ...")
    parser.add_argument(
        "--property", action="append", dest="only", metavar="NAME", help="check only this property; may be repeated"
    )
    parser.add_argument(
        "--dtype",
        action="append",
        default=[],
        choices=[str(dtype).removeprefix("torch.") for dtype in HALVES],
        help="may be repeated; default: all types that the kernel claims",
    )
    parser.add_argument(
        "--examples", type=int, default=20, help="batches per property, fewer in each further type (%(default)s)"
    )
    parser.add_argument("--seconds", type=float, default=600.0, help="time limit for one kernel (%(default)s)")
    parser.add_argument("--patience", type=float, default=60.0, help="seconds to wait for one call (%(default)s)")
    parser.add_argument("--repeat", type=int, default=1, help="how often each batch is tried, for races (%(default)s)")
    parser.add_argument(
        "--strict", action="store_true", help="fail if the kernel refuses more than half of the batches of a property"
    )
    for option, name, says in (
        ("--heads", "heads", "numbers of query heads and KV heads, as 32/8"),
        ("--head-size", "head_sizes", "head size, as 80, or the sizes of a key and a value, as 576/512"),
        ("--block-size", "block_sizes", "tokens in a block"),
    ):
        kind = int if name == "block_sizes" else pair
        parser.add_argument(
            option, dest=name, action="append", type=kind, metavar="N", help=f"{says}; instead of what it claims"
        )
    parser.add_argument(
        "--time", action="store_true", help="time --examples calls of each workload, and check their outputs"
    )
    parser.add_argument(
        "--trace", type=Path, metavar="FILE", help="with --time: the workloads of this FlashInfer-Bench file (JSONL)"
    )
    parser.add_argument(
        "--write-trace", type=Path, metavar="FOLDER", help="with --time: write the workloads here, for FlashInfer-Bench"
    )
    parser.add_argument(
        "-v", "--verbose", action="store_true", help="print a line for each property, and each failure by itself"
    )
    parser.add_argument("--junit", type=Path, help="write the report to this file, as JUnit XML")
    parser.add_argument("--json", type=Path, help="write the report to this file")
    parser.add_argument("--html", type=Path, help="write the report to this file, as one HTML page")
    parser.add_argument("--list", action="store_true", help="list the adapters, and why some cannot run here")
    parser.add_argument("--all-installed", action="store_true", help="check every adapter that runs here")
    parser.add_argument(
        "--adapter", action="append", help="with --all-installed: only names that contain this; may be repeated"
    )
    parser.add_argument(
        "--jobs",
        type=int,
        default=max(1, (os.cpu_count() or 1) // 4),
        help="with --all-installed: kernels checked at a time",
    )
    parser.add_argument("--out", type=Path, help="with --all-installed: write the results to this file")
    return parser


def _check_one(asked: argparse.Namespace, options: dict[str, Any], console: Console) -> int:
    """Check one kernel, print and write its report, and return the exit status."""
    far = ["its process starts"]
    options["tell"] = partial(far.__setitem__, 0)
    try:
        with Progress(lambda: f"{asked.kernel}: {far[0]}"):
            report = _timed(asked, options) if asked.time else check_apart(asked.kernel, asked.path, **options)
    except (BadKernelError, ValueError) as error:
        sys.stderr.write(f"{error}\n")
        return 2
    if asked.json:
        asked.json.write_text(json.dumps(report.as_dict(), indent=1) + "\n")
    if asked.html:
        asked.html.write_text(as_html([report], field.about(asked.device)))
    if asked.junit:
        asked.junit.write_text(as_junit(report, is_strict=asked.strict))
    show(report, console, is_verbose=asked.verbose)
    if asked.strict and report.lapses:
        console.print(f"strict: refused, or refused on most batches: {', '.join(x.property for x in report.lapses)}")
    if report.has_checked_nothing:
        console.print("nothing was checked: the kernel refuses every batch", style="yellow")
    broken = report.failures or report.not_reached or report.has_checked_nothing
    return 1 if broken or (asked.strict and report.lapses) else 0


def _timed(asked: argparse.Namespace, options: dict[str, Any]) -> Report:
    """Time a kernel, and compare the timed outputs with the reference."""
    taken = {name: options[name] for name in ("device", "dtypes", "seconds", "patience", "limits", "tell")}
    return time_apart(
        asked.kernel, asked.path, calls=asked.examples, trace=asked.trace, write_trace=asked.write_trace, **taken
    )


def pair(text: str) -> tuple[int, int]:
    """Parse two numbers, as 32/8 or 32,8; a single number stands for both.

    Raises:
        ArgumentTypeError: if the text is anything else.
    """
    numbers = text.replace(",", "/").split("/")
    if len(numbers) > 2 or not all(x.isdecimal() and int(x) for x in numbers):
        raise argparse.ArgumentTypeError(f"expected a number, or two as 32/8, got {text!r}")
    return int(numbers[0]), int(numbers[-1])


def _check_options(asked: argparse.Namespace) -> None:
    """Check the numbers, names and output files of the command line.

    Raises:
        ValueError: naming the option.
    """
    check_number("--seconds", asked.seconds, above=0)
    check_number("--patience", asked.patience, above=0)
    check_sizes(**{"--examples": asked.examples, "--jobs": asked.jobs, "--repeat": asked.repeat})
    check_file("--json", asked.json)
    check_file("--html", asked.html)
    check_file("--junit", asked.junit)
    check_folder("--out", asked.out.parent if asked.out else None)
    if asked.time and (asked.only or asked.all_installed or asked.repeat != 1):
        raise ValueError("--time: expected one kernel, without --property, --repeat and --all-installed")
    for option in ("trace", "write_trace"):
        if getattr(asked, option) and not asked.time:
            raise ValueError(f"--{option.replace('_', '-')}: expected --time, which replays workloads")
    check_folder("--write-trace", asked.write_trace)
    known = {x.name for path in (*PATHS, *OPERATIONS) for x in of_path(path)}
    for name in asked.only or ():
        if name not in known:
            raise ValueError(f"--property: expected one of {', '.join(sorted(known))}, got {name!r}")
    if asked.adapter and not any(part in name for part in asked.adapter for name in ADAPTERS):
        raise ValueError(f"--adapter: expected part of one of {', '.join(ADAPTERS)}, got {asked.adapter[0]!r}")


def _vacuous(arguments: list[str]) -> int:
    """Show which known mistakes a user's check lets pass."""
    parser = argparse.ArgumentParser(
        prog="twinattn prove vacuous",
        description="Run a check of yours against kernels with known mistakes: which of them does it let pass?",
        epilog="Example: twinattn prove vacuous tests/test_attention.py::check chunked_prefill",
    )
    parser.add_argument("check", help="file.py::function or module:function, which takes a kernel")
    parser.add_argument("path", choices=list(PLANTED), help="the path that the kernel computes")
    parser.add_argument("--like", help="your kernel, module:function; the kernels with mistakes get its parameters")
    asked = parser.parse_args(arguments)
    far = ["a kernel without a mistake"]
    try:
        like = find(asked.like, asked.path).function if asked.like else None
        with Progress(lambda: f"{asked.check}: {far[0]}"):
            found = vacuous(find_check(asked.check), asked.path, like=like, tell=partial(far.__setitem__, 0))
    except (BadKernelError, ValueError) as error:
        sys.stderr.write(f"{error}\n")
        return 2
    console = Console(highlight=False)
    console.print(found.title)
    table = Table("mistake", "what is wrong", "forms", "a batch that shows it", box=None, pad_edge=False)
    for x in found.missed:
        table.add_row(Text(x.name), Text(x.says), f"{x.forms} of {x.of}", Text(x.shown_by))
    if found.missed:
        console.print(table)
    return 1 if found.missed else 0


def show(report: Report, console: Console, *, is_verbose: bool) -> None:
    """Print a report."""
    for style, text in lines(report, is_verbose=is_verbose):
        console.print(Text(text, style=style))
    if not is_verbose and not report.times:
        console.print(
            Text("\n-v shows what each property promises, why some are not claimed, and every failure.", "dim")
        )


def _all(asked: argparse.Namespace, options: dict[str, Any], console: Console) -> int:
    """Check every adapter that runs here, some at a time, and write the results."""
    parts = asked.adapter
    chosen = [
        x for x in ADAPTERS.values() if (any(part in x.name for part in parts) if parts else x.package != "refattn")
    ]  # the others are compared with the reference
    chosen = [x for x in chosen if asked.path in (None, x.path)]
    missing = {x.name: reason for x in chosen if (reason := x.why_not(asked.device)) is not None}
    for name, reason in missing.items():
        console.print(Text(f"· {name}: {reason}", style="dim"))

    running: dict[str, str] = {}  # how far each kernel is that is being checked

    def run(name: str) -> Report:
        running[name] = "its process starts"
        tell = partial(running.__setitem__, name)
        try:
            only = options["only"]
            if only is not None:
                only = [x.name for x in of_path(ADAPTERS[name].path) if x.name in only]
            report = check_apart(name, **options | dict(only=only, tell=tell))
        except BadKernelError as error:
            report = Report(name, ADAPTERS[name].path, asked.device)
            report.findings = [Finding("call", "It can be called.", "crashed", str(error))]
        sign = mark("wrong" if report.failures else "honoured")
        count = sum(finding.outcome == "honoured" for finding in report.findings)
        failed = ", ".join(f"{finding.property} ({finding.outcome})" for finding in report.failures)
        del running[name]
        progress.erase()
        console.print(
            Text(f"{sign} {name}: {count} honoured; {failed or 'none failed'}; {report.seconds:.0f} s", STYLES[sign])
        )
        return report

    def far() -> str:
        now = [f"{name}: {text}" for name, text in list(running.items())]
        return "; ".join([f"{len(reports)} of {len(chosen) - len(missing)} kernels", *now])

    reports: list[Report] = []
    earlier = json.loads(asked.out.read_text()) if asked.out and asked.out.exists() else None
    with Progress(far) as progress, ThreadPoolExecutor(asked.jobs) as pool:
        for done in as_completed([pool.submit(run, x.name) for x in chosen if x.name not in missing]):
            reports.append(done.result())
            if asked.out:  # after each kernel, so that its results survive if this process is killed
                asked.out.parent.mkdir(parents=True, exist_ok=True)
                found = field.results(reports, missing, asked.device, earlier)
                asked.out.write_text(json.dumps(found, indent=1) + "\n")
    if asked.html:
        asked.html.write_text(as_html(reports, field.about(asked.device)))
    return 1 if any(report.failures for report in reports) else 0


if __name__ == "__main__":
    sys.exit(main())
