"""Break each feature of docs/proof/coverage.toml once, and see that the tests marked as its proof fail: `make mutants`.

The table is tests/tools/mutations.py: small edits of the source, each with the rows whose feature it breaks. Each is
planted into a copy of the tree, in which the tests with a mark of those rows run. `make mutants ARGS="A6 D143"` takes
the mutations of these rows, `ARGS=--list` prints the table. What is found:

    caught       a mutation, after which some test of the row fails
    survives     one, after which all tests of the row pass: they do not prove it
    undecided    one, after which they took longer than `--seconds`, and none had failed until then
    idle         a mark on a test that failed after none of the row's mutations

`make mutants ARGS=--core` asks another question: how many of all mutations do the tests of `make test` catch without
the rest? After each, those tests of the core run that are marked with its rows, and then the others, until one fails.
`--share 2/4` takes every fourth mutation from the second on, `--until 500` begins none after that many seconds, and
what is in the file of `--output` is not run again, so the whole can be had in pieces.

Torch, Triton and transformers are imported once: each mutation runs in a process that is forked from this one.
"""

import argparse
import functools
import itertools
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "docs")]

import coverage_rows  # noqa: E402

from tests.tools.mutations import MUTATIONS, UNBROKEN, Mutation  # noqa: E402
from tests.tools.mutations_at_large import AT_LARGE  # noqa: E402
from tests.tools.places import file_of, replaced  # noqa: E402

COPIED = (
    "refattn",
    "fastattn",
    "twinattn",
    "tests",
    "docs/proof",
    "docs/coverage_rows.py",
    "pyproject.toml",
    "README.md",
)
LARGE = "at large"  # in place of a row
TIMES = itertools.count(2**31)  # timestamps of planted files, in seconds: no compiled file has them
LOADED = ("torch", "triton", "transformers.modeling_utils", "hypothesis", "jaxtyping", "beartype", "einops", "pytest")
HAS_TIME_LIMITS = find_spec("pytest_timeout") is not None
HITS: Counter[str] = Counter()  # how many mutations each test has caught: those with most come first


covering_tests = functools.cache(coverage_rows.covering_tests)


class Recorder:
    """A plugin of pytest: it notes the tests that fail, and skips the other cases of a test that has failed.

    It leaves out tests that fail without a mutation: they prove nothing here.
    """

    def __init__(self, results: Path, left_out: frozenset[str] = frozenset()) -> None:
        self.results, self.left_out, self.failed = results, left_out, set()

    def pytest_addoption(self, parser: Any) -> None:
        """Accept the time limits of pyproject.toml where pytest-timeout is not installed."""
        for name in () if HAS_TIME_LIMITS else ("timeout", "timeout_method"):
            parser.addini(name, "of pytest-timeout")

    def pytest_configure(self, config: Any) -> None:
        """Make Hypothesis look for any failure, not for the smallest one."""
        if not HAS_TIME_LIMITS:
            config.addinivalue_line("markers", "timeout(seconds): of pytest-timeout")
        from hypothesis import Phase, settings

        phases = (Phase.explicit, Phase.generate)
        settings.register_profile("mutants", settings.get_profile("same"), phases=phases)
        settings.load_profile("mutants")

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        """Take the first case of each test first, then the second of each."""
        items[:] = [item for item in items if test_of(item.nodeid) not in self.left_out]
        seen: dict[str, int] = {}

        def place(item: Any) -> tuple[int, int]:
            seen[test_of(item.nodeid)] = seen.get(test_of(item.nodeid), 0) + 1
            return seen[test_of(item.nodeid)], -HITS[test_of(item.nodeid)]

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


def run_tests(tree: Path, stages: list[list[str]], results: Path, how: "How", *, until_one_fails: bool) -> None:
    """Run tests in a copy of the tree, a stage if all before it pass: in a process of its own, which it ends."""
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
        options = ["-q", "-p", "no:cacheprovider", "--tb=short", "--device", how.device]
        options += ["-x"] if until_one_fails else []
        for tests in stages:
            status = int(pytest.main([*options, *tests], plugins=[Recorder(results, how.left_out)]))
            if status == pytest.ExitCode.NO_TESTS_COLLECTED:  # all of them are left out
                status = 0
            if status:
                break
    except BaseException:  # noqa: BLE001  # whatever it is, the parent must not see two of itself
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        with results.open("a") as file:
            file.write(json.dumps(["ended", status]) + "\n")
        os._exit(0)


class How(NamedTuple):
    """How mutations are run.

    Attributes:
        jobs: processes, each with a mutation of its own.
        seconds: the most that the tests of one take.
        device: where the twins compute.
        until: seconds after which no mutation is begun.
        then: files of tests that run after those of a mutation, if all of these pass.
        left_out: tests that fail without a mutation.
    """

    jobs: int
    seconds: float
    device: str = "cpu"
    until: float = math.inf
    then: tuple[str, ...] = ()
    left_out: frozenset[str] = frozenset()


class Run:
    """One mutation, planted into a tree, and the tests of its rows, running."""

    def __init__(self, mutation: Mutation | None, tests: list[str], tree: Path, how: How) -> None:
        self.mutation, self.tests, self.tree = mutation, tests, tree
        self.results = tree.with_suffix(".jsonl")
        self.results.write_text("")
        self.planted = None if mutation is None else plant(mutation, tree)
        self.start = time.monotonic()
        self.process = os.fork()
        if self.process == 0:
            is_one_enough = mutation is not None and (not mutation.rows or bool(how.then))
            stages = [stage for stage in (tests, [*how.then]) if stage]
            run_tests(tree, stages, self.results, how, until_one_fails=is_one_enough)

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


def run_all(
    chosen: list[tuple[Mutation | None, list[str]]],
    how: How,
    ended: Callable[[Mutation | None, dict[str, Any]], None] = say,
) -> list[dict[str, Any]]:
    """Run each mutation with its tests, in order, and return what came of each: nothing if it was not begun."""
    outcomes: list[dict[str, Any]] = [{} for _ in chosen]
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        trees = [Path(folder) / str(i) for i in range(min(how.jobs, len(chosen)))]
        for tree in trees:
            copy_tree(tree)
        waiting, running = list(range(len(chosen))), {}
        try:
            while waiting or running:
                while waiting and trees:
                    i = waiting.pop(0)
                    running[i] = Run(*chosen[i], trees.pop(), how)
                time.sleep(0.05)
                for i, run in list(running.items()):
                    if run.is_over(how.seconds):
                        outcomes[i] = run.outcome()
                        trees.append(running.pop(i).tree)
                        ended(chosen[i][0], outcomes[i])
                if time.monotonic() - start > how.until:
                    waiting.clear()
        finally:
            for run in running.values():  # after an interrupt
                run.is_over(0.0)
    return outcomes


# --- the core alone ---


def core_files() -> list[str]:
    """List the files of tests that `make test` runs."""
    from tests.conftest import is_core

    return sorted(str(x.relative_to(ROOT)) for x in (ROOT / "tests").rglob("test_*.py") if is_core(x))


def core_alone(mutations: list[Mutation], how: How, share: str, output: Path | None) -> bool:
    """Print which mutations the core tests catch without the rest; return whether they catch at least 95 of 100."""
    found = json.loads(output.read_text()) if output and output.exists() else {"core": {}}
    HITS.update(entry["by"] for entry in found["core"].values() if "by" in entry)
    part, parts = map(int, share.split("/"))
    left = [x for x in mutations[part - 1 :: parts] if name_of(x) not in found["core"]]
    start = time.monotonic()
    files = core_files()
    outcomes = run_all([(None, [file]) for file in files], how)
    unable = [file for file, outcome in zip(files, outcomes, strict=True) if outcome["status"] not in (0, 1)]
    failing = {test for outcome in outcomes for test in outcome["failed"]}
    files = [file for file in files if file not in unable]
    found |= circumstances(how.device) | {"left_out": sorted({*found.get("left_out", ()), *unable, *failing})}
    tests = {row: [x for x in marked if x.partition("::")[0] in files] for row, marked in covering_tests().items()}

    def ended(mutation: Mutation | None, outcome: dict[str, Any]) -> None:
        assert mutation is not None
        caught = outcome["failed"][:1]
        HITS.update(caught)
        marked = {test for row in mutation.rows for test in covering_tests().get(row, ())} or {*mutation.tests}
        verdict = "broken" if outcome["broken"] else "caught" if caught else "undecided"
        if verdict == "undecided" and outcome["status"] is not None:
            verdict = "missed"
        entry = {"verdict": verdict, "seconds": outcome["seconds"]}
        entry |= {"by": caught[0]} if caught else {"held by": sorted({x.partition("::")[0] for x in marked})}
        found["core"][name_of(mutation)] = entry
        sys.stdout.write(f"{outcome['seconds']:6.1f} s  {verdict:9}  {name_of(mutation)}  {entry.get('by', '')}\n")
        sys.stdout.write("".join(f"{error}\n" for error in outcome["broken"]))
        sys.stdout.flush()
        if output:
            output.write_text(json.dumps(found, indent=1) + "\n")

    of_rows = {name_of(x): sorted({test for row in x.rows for test in tests.get(row, ())}) for x in left}
    how = how._replace(then=tuple(files), left_out=frozenset(failing), until=how.until - (time.monotonic() - start))
    run_all([(mutation, of_rows[name_of(mutation)]) for mutation in left], how, ended)
    counts = Counter(entry["verdict"] for entry in found["core"].values())
    sys.stdout.write(f"\n{len(found['core'])} of {len(mutations)} mutations: {dict(counts)}\n")
    for name, entry in found["core"].items():
        if entry["verdict"] != "caught":
            sys.stdout.write(f"{entry['verdict']}: {name}; held by {', '.join(entry['held by'])}\n")
    return counts["caught"] >= 0.95 * (counts.total() - counts["broken"])


def name_of(mutation: Mutation) -> str:
    """Return a name that no other mutation has."""
    return f"{' '.join(mutation.rows) or LARGE} | {mutation.place} | {mutation.name}"


def circumstances(device: str) -> dict[str, Any]:
    """Return date, commit, versions and machine, by another process: what is forked has to import what is planted."""
    program = (
        "import json, sys, torch\nfrom twinattn.bench import measure\nabout = measure.circumstances()\n"
        "about |= dict(device=sys.argv[1], machine=measure.machine(torch.device(sys.argv[1])))\n"
        "print(json.dumps(about))"
    )
    command = [sys.executable, "-c", program, device]
    run = subprocess.run(command, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, check=True)
    about: dict[str, Any] = json.loads(run.stdout)
    return about


def main() -> None:
    """Run the mutations that the command line asks for; the exit status says whether all of them were caught."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("rows", nargs="*", help="rows, as A6 D143; all if none")
    parser.add_argument("--jobs", type=int, default=2, help="processes, each with a mutation of its own")
    parser.add_argument(
        "--seconds", type=float, help="the most that the tests of a mutation take: 60, or 400 with --core"
    )
    parser.add_argument("--device", default="cpu", help="where the twins compute: cpu or cuda")
    parser.add_argument("--name", default="", help="only mutations with this in their name or place")
    parser.add_argument("--unbroken", action="store_true", help="plant nothing: the tests have to pass")
    parser.add_argument(
        "--at-large", action="store_true", help="those of no row: kernels, plans, serving, integrations"
    )
    parser.add_argument("--core", action="store_true", help="all of both, by the tests of `make test` alone")
    parser.add_argument("--share", default="1/1", help="with --core: 2/4 takes the second of four parts")
    parser.add_argument(
        "--until", type=float, default=math.inf, help="with --core: seconds, after which no further mutation begins"
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
    for mutation in AT_LARGE if options.at_large or (options.core and not options.rows) else []:
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
        if find_spec(name.partition(".")[0]):
            __import__(name)
    how = How(options.jobs, options.seconds or (400.0 if options.core else 60.0), options.device, options.until)
    if options.core:
        mutations = [mutation for mutation, _ in chosen if mutation is not None]
        sys.exit(not core_alone(mutations, how, options.share, options.output))
    outcomes = run_all(chosen, how)
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
        about = circumstances(options.device) | {"mutants": verdicts}
        about["idle"] = {row: marks for row, marks in idle.items() if marks}
        about["unbroken"] = UNBROKEN
        options.output.write_text(json.dumps(about, indent=1) + "\n")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
