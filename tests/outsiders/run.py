"""Run the kit over every kernel of this folder; exit status 1 if a wrong one passes, or a right one does not."""

import argparse
import json
import multiprocessing
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path

HERE = Path(__file__).resolve().parent
Result = dict[str, object]


def kernels() -> Iterator[tuple[str, str, str]]:
    """Yield the file, the function and the path of each kernel; the name of a file is that of its path."""
    for file in sorted(HERE.glob("*_*.py")):
        kind, _, path = file.stem.partition("_")
        if kind not in ("wrong", "right"):
            continue
        for line in file.read_text().splitlines():
            if line.startswith("def ") and not line.startswith("def _"):
                yield str(file), line[4:].partition("(")[0], path


def run(file: str, function: str, path: str, examples: int) -> Result:
    """Check one kernel, and say what came of it."""
    import torch

    from twinattn.kit.check import check

    torch.set_num_threads(1)
    began = time.monotonic()
    report = check(f"{file}:{function}", path, examples=examples)
    return dict(
        kernel=f"{Path(file).stem}:{function}",
        is_wrong=Path(file).stem.startswith("wrong"),
        seconds=round(time.monotonic() - began, 1),
        honoured=sum(finding.outcome == "honoured" for finding in report.findings),
        failures=[
            dict(
                property=finding.property,
                detail=finding.detail,
                names=[name for name, _ in finding.mistakes],
                example=finding.example,
                dtype=finding.dtype,
            )
            for finding in report.failures
        ],
    )


def crashed(file: str, function: str, path: str, error: BaseException) -> Result:
    """Report an error of the kit itself, which is one whatever the kernel."""
    says = dict(property="the kit raised", detail=repr(error), names=[type(error).__name__], example="", dtype="")
    is_wrong = Path(file).stem.startswith("wrong")
    name = f"{Path(file).stem}:{function}"
    return dict(kernel=name, is_wrong=is_wrong, seconds=0.0, honoured=0, failures=[says], crashed=True)


def is_surprising(result: Result) -> bool:
    """Return whether a wrong kernel passed, or a right one did not, or the kit itself raised an error."""
    return "crashed" in result or bool(result["failures"]) != result["is_wrong"]


def table(results: list[Result]):
    """Make a table of what came of each kernel, with the names that the kit gave."""
    from rich.table import Table

    shown = Table("kernel", "found", "properties that fail", "probable names", "seconds")
    for result in sorted(results, key=lambda result: (not result["is_wrong"], str(result["kernel"]))):
        failures = result["failures"]
        names = dict.fromkeys(name for failure in failures for name in failure["names"][:1])
        verdict = ("found" if failures else "MISSED") if result["is_wrong"] else ("BLAMED" if failures else "passes")
        verdict = "KIT RAISES" if "crashed" in result else verdict
        properties = ", ".join(failure["property"] for failure in failures)
        shown.add_row(result["kernel"], verdict, properties, ", ".join(names), str(result["seconds"]))
    return shown


def main() -> None:
    """Check the kernels whose names contain a word, some at a time, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("words", nargs="*", help="only kernels whose file and name contain one of them")
    parser.add_argument("--jobs", type=int, default=2, help="kernels checked at a time (2)")
    parser.add_argument("--examples", type=int, default=20, help="batches per property and type (20)")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    arguments = parser.parse_args()
    chosen = [
        (file, function, path)
        for file, function, path in kernels()
        if not arguments.words or any(word in f"{Path(file).stem}:{function}" for word in arguments.words)
    ]
    from rich.console import Console

    console, results = Console(), []
    with ProcessPoolExecutor(arguments.jobs, multiprocessing.get_context("spawn")) as pool:
        waiting = {pool.submit(run, *kernel, arguments.examples): kernel for kernel in chosen}
        for done in as_completed(waiting):
            error = done.exception()
            results.append(done.result() if error is None else crashed(*waiting[done], error))
            if arguments.json:
                arguments.json.write_text(json.dumps(results, indent=1))
    console.print(table(results))
    surprises = sum(map(is_surprising, results))
    console.print(f"{len(results)} kernels, {surprises} of them wrong and passed, or right and blamed")
    sys.exit(1 if surprises else 0)


if __name__ == "__main__":
    main()
