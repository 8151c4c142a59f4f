"""Break each feature of docs/proof/coverage.toml once, and see that the tests marked as its proof fail: `make mutants`.

The table is tests/tools/mutations.py: small edits of the source, each with the rows whose feature it breaks. Each is
planted into a copy of the tree, in which the tests with a mark of those rows run. `make mutants ARGS="A6 D143"` takes
the mutations of these rows, `ARGS=--list` prints the table. What is found:

    caught       a mutation, after which some test of the row fails
    survives     one, after which all tests of the row pass: they do not prove it
    undecided    one, after which they took longer than `--seconds`, and none had failed until then
    idle         a mark on a test that failed after none of the row's mutations

Torch, Triton and transformers are imported once: each mutation runs in a process that is forked from this one.
"""

import argparse
import functools
import itertools
import json
import os
import shutil
import signal
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "docs")]

import coverage_rows  # noqa: E402

from tests.tools.mutations import MUTATIONS, UNBROKEN, Mutation  # noqa: E402
from tests.tools.mutations_at_large import AT_LARGE  # noqa: E402
from tests.tools.places import file_of, replaced  # noqa: E402

COPIED = ("refattn", "fastattn", "twinattn", "tests", "docs/proof", "docs/coverage_rows.py", "pyproject.toml")
LARGE = "at large"  # in place of a row
TIMES = itertools.count(2**31)  # timestamps of planted files, in seconds: no compiled file has them
LOADED = ("torch", "triton", "transformers.modeling_utils", "hypothesis", "jaxtyping", "beartype", "einops", "pytest")


covering_tests = functools.cache(coverage_rows.covering_tests)


class Recorder:
    """A plugin of pytest: it notes the tests that fail, and skips the other cases of a test that has failed."""

    def __init__(self, results: Path) -> None:
        self.results, self.failed = results, set()

    def pytest_configure(self, config: Any) -> None:
        """Make Hypothesis look for any failure, not for the smallest one."""
        from hypothesis import Phase, settings

        phases = (Phase.explicit, Phase.generate)
        settings.register_profile("mutants", settings.get_profile("same"), phases=phases)
        settings.load_profile("mutants")

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        """Take the first case of each test first, then the second of each."""
        seen: dict[str, int] = {}

        def place(item: Any) -> int:
            seen[test_of(item.nodeid)] = seen.get(test_of(item.nodeid), 0) + 1
            return seen[test_of(item.nodeid)]

        places = {item: place(item) for item in items}
        items.sort(key=places.__getitem__)

    def pytest_runtest_protocol(self, item: Any) -> bool | None:
        """Skip what is known."""
        return True if test_of(item.nodeid) in self.failed else None

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Note a failure: of a fixture, too, which may be where a test asserts."""
        if report.failed:
            self.failed.add(test_of(report.nodeid))
            self._note("failed", test_of(report.nodeid))

    def pytest_collectreport(self, report: Any) -> None:
        """Note a file that cannot be imported: such a mutation says nothing."""
        if report.failed:
            self._note("broken", str(report.longrepr)[-2000:])

    def _note(self, kind: str, what: str) -> None:
        with self.results.open("a") as file:
            file.write(json.dumps([kind, what]) + "\n")


def test_of(nodeid: str) -> str:
    """Return a test without its case: `tests/paths/test_x.py::test_y`."""
    return nodeid.partition("[")[0]


def plant(mutation: Mutation, tree: Path) -> tuple[Path, str]:
    """Plant a mutation into a copy of the tree; return the file, and what was in it."""
    file = file_of(mutation.place, tree)
    source = file.read_text()
    file.write_text(replaced(source, mutation.place, mutation.old, mutation.new))
    now = next(TIMES)
    os.utime(file, (now, now))
    return file, source


def copy_tree(to: Path) -> None:
    """Copy what the tests need."""
    for name in COPIED:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, to / name, ignore=shutil.ignore_patterns("__pycache__", "node_modules"))
        else:
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, to / name)


def run_tests(tree: Path, tests: list[str], results: Path, device: str, *, until_one_fails: bool) -> None:
    """Run tests in a copy of the tree: in a process of its own, which it ends."""
    status = -1  # unless pytest comes to its end
    try:
        os.setsid()
        log = os.open(results.with_suffix(".log"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.chdir(tree)
        ours = {str(ROOT / folder) for folder in ("", "docs", "tests")}  # no others: an environment may lie there
        sys.path[:] = [str(tree), *(path for path in sys.path if path and path not in ours)]
        for name in [name for name in sys.modules if name.partition(".")[0] == "tests"]:
            del sys.modules[name]  # the tree has its own
        os.environ["PYTHONPATH"] = str(tree)
        vars(sys.modules["__main__"]).pop("__file__", None)  # a process that is spawned would import it, from here
        import jaxtyping
        import pytest

        jaxtyping.install_import_hook = lambda *arguments, **options: None  # shapes go unchecked: twice as quick
        options = ["-q", "-p", "no:cacheprovider", "--tb=short", "--device", device]
        options += ["-x"] if until_one_fails else []
        status = int(pytest.main([*options, *tests], plugins=[Recorder(results)]))
    except BaseException:  # noqa: BLE001  # whatever it is, the parent must not see two of itself
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        with results.open("a") as file:
            file.write(json.dumps(["ended", status]) + "\n")
        os._exit(0)


class Run:
    """One mutation, planted into a tree, and the tests of its rows, running."""

    def __init__(self, mutation: Mutation | None, tests: list[str], tree: Path, device: str) -> None:
        self.mutation, self.tests, self.tree = mutation, tests, tree
        self.results = tree.with_suffix(".jsonl")
        self.results.write_text("")
        self.planted = None if mutation is None else plant(mutation, tree)
        self.start = time.monotonic()
        self.process = os.fork()
        if self.process == 0:
            run_tests(tree, tests, self.results, device, until_one_fails=mutation is not None and not mutation.rows)

    def is_over(self, seconds: float) -> bool:
        """Return whether it has ended, and end it after that many seconds."""
        ended = os.waitpid(self.process, os.WNOHANG)[0] != 0
        if not ended and time.monotonic() - self.start > seconds:
            os.killpg(self.process, signal.SIGKILL)
            os.waitpid(self.process, 0)
            ended = True
        if ended and self.planted is not None:
            file, source = self.planted
            file.write_text(source)
        return ended

    def outcome(self) -> dict[str, Any]:
        """Return what came of it."""
        notes = [json.loads(line) for line in self.results.read_text().splitlines()]
        status = next((what for kind, what in notes if kind == "ended"), None)
        broken = [what for kind, what in notes if kind == "broken"]
        if broken or status not in (None, 0, 1):
            broken.append(self.results.with_suffix(".log").read_text()[-2000:])
        return {
            "failed": sorted({what for kind, what in notes if kind == "failed"}),
            "broken": broken,
            "status": status,
            "seconds": round(time.monotonic() - self.start, 1),
        }


def run_all(
    chosen: list[tuple[Mutation | None, list[str]]], jobs: int, seconds: float, device: str
) -> list[dict[str, Any]]:
    """Run each mutation with its tests, in order, and return what came of each."""
    outcomes: list[dict[str, Any]] = [{} for _ in chosen]
    with tempfile.TemporaryDirectory() as folder:
        trees = [Path(folder) / str(i) for i in range(jobs)]
        for tree in trees:
            copy_tree(tree)
        waiting, running = list(range(len(chosen))), {}
        try:
            while waiting or running:
                while waiting and trees:
                    i = waiting.pop(0)
                    running[i] = Run(*chosen[i], trees.pop(), device)
                time.sleep(0.05)
                for i, run in list(running.items()):
                    if run.is_over(seconds):
                        outcomes[i] = run.outcome()
                        trees.append(running.pop(i).tree)
                        say(chosen[i][0], outcomes[i])
        finally:
            for run in running.values():  # after an interrupt
                run.is_over(0.0)
    return outcomes


def say(mutation: Mutation | None, outcome: dict[str, Any]) -> None:
    """Print what came of a mutation."""
    name = "nothing broken" if mutation is None else f"{mutation.place}: {mutation.name} ({' '.join(mutation.rows)})"
    judged = {} if mutation is None else judge(mutation, outcome)
    left = [f"{row} {verdict}" for row, verdict in judged.items() if verdict != "caught"]
    verdict = ", ".join(left) or ("caught" if mutation else f"failed: {outcome['failed'] or 'none'}")
    sys.stdout.write(f"{outcome['seconds']:6.1f} s  {name}: {verdict}\n")
    for error in outcome["broken"]:
        sys.stdout.write(error + "\n")
    sys.stdout.flush()


def judge(mutation: Mutation, outcome: dict[str, Any]) -> dict[str, str]:
    """Return, for each row of a mutation, what its tests did."""
    tests = covering_tests()
    verdicts = {}
    for row in mutation.rows or (LARGE,):
        if outcome["broken"]:
            verdicts[row] = "broken"
        elif {*(outcome["failed"] if row == LARGE else tests.get(row, []))} & {*outcome["failed"]}:
            verdicts[row] = "caught"
        else:
            verdicts[row] = "undecided" if outcome["status"] is None else "survives"
    return verdicts


def main() -> None:
    """Run the mutations that the command line asks for; the exit status says whether all of them were caught."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("rows", nargs="*", help="rows, as A6 D143; all if none")
    parser.add_argument("--jobs", type=int, default=2, help="processes, each with a mutation of its own")
    parser.add_argument("--seconds", type=float, default=60.0, help="the most that the tests of a mutation take")
    parser.add_argument("--device", default="cpu", help="where the twins compute: cpu or cuda")
    parser.add_argument("--name", default="", help="only mutations with this in their name or place")
    parser.add_argument("--unbroken", action="store_true", help="plant nothing: the tests have to pass")
    parser.add_argument(
        "--at-large", action="store_true", help="those of no row: kernels, plans, serving, integrations"
    )
    parser.add_argument("--list", action="store_true", help="print the mutations, and run none")
    parser.add_argument("--output", type=Path, help="JSON file to write the results to")
    options = parser.parse_args()
    listed = {row.id: row for backend in coverage_rows.backends() for row in backend.rows}
    unknown = {*options.rows} - {*listed}
    if unknown:
        parser.error(f"no rows of docs/proof/coverage.toml: {', '.join(sorted(unknown))}")
    tests = covering_tests()
    chosen: list[tuple[Mutation | None, list[str]]] = []
    for mutation in AT_LARGE if options.at_large else []:
        if options.name in f"{mutation.place} {mutation.name}":
            chosen.append((mutation, list(mutation.tests)))
    for mutation in [] if options.at_large else MUTATIONS:
        rows = tuple(row for row in mutation.rows if not options.rows or row in options.rows)
        if rows and options.name in f"{mutation.place} {mutation.name}":
            chosen.append((mutation._replace(rows=rows), sorted({test for row in rows for test in tests.get(row, [])})))
    if options.unbroken:
        chosen = [(None, sorted({test for _, tests in chosen for test in tests}))]
    if options.list:
        for mutation, _ in chosen:
            sys.stdout.write(f"{' '.join(mutation.rows):24} {mutation.place}: {mutation.name}\n")
        return
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if options.device == "cpu":
        os.environ.setdefault("TRITON_INTERPRET", "1")
    for name in LOADED:
        __import__(name)
    outcomes = run_all(chosen, options.jobs, options.seconds, options.device)
    if options.unbroken:
        sys.exit(bool(outcomes[0]["failed"] or outcomes[0]["broken"] or outcomes[0]["status"] != 0))
    verdicts: dict[str, dict[str, str]] = {}
    failed: dict[str, set[str]] = {}
    for (mutation, _), outcome in zip(chosen, outcomes, strict=True):
        for row, verdict in judge(mutation, outcome).items():
            verdicts.setdefault(row, {})[f"{mutation.place}: {mutation.name}"] = verdict
            failed.setdefault(row, set()).update(outcome["failed"])
    idle = {row: [test for test in tests[row] if test not in failed[row]] for row in verdicts if row in tests}
    wrong = {row: found for row, found in verdicts.items() if {*found.values()} != {"caught"}}
    sys.stdout.write(
        f"\n{len(chosen)} mutations of {len(verdicts)} rows; {len(wrong)} rows with one that is not caught\n"
    )
    for row, found in wrong.items():
        for name, verdict in found.items():
            if verdict != "caught":
                sys.stdout.write(f"{row} {verdict}: {name}\n")
    for row, marks in idle.items():
        for test in marks:
            sys.stdout.write(f"{row} idle: {test}\n")
    if options.output:
        import torch

        from twinattn.bench import measure  # not before: what is forked has to import what is planted

        machine = measure.machine(torch.device(options.device))
        about = {**measure.circumstances(), "device": options.device, "machine": machine}
        about["mutants"] = verdicts
        about["idle"] = {row: marks for row, marks in idle.items() if marks}
        about["unbroken"] = UNBROKEN
        options.output.write_text(json.dumps(about, indent=1) + "\n")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
