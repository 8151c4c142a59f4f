"""Break each feature of docs/proof/coverage.toml once, and see that the tests marked as its proof fail: `make mutants`.

The table is tests/tools/mutations.py: small edits of the source, each with the rows whose feature it breaks. Each is
planted into a copy of the tree, in which the tests with a mark of those rows run. `make mutants ARGS="A6 D143"` takes
the mutations of these rows, `ARGS=--list` prints the table. What is found:

    caught       a mutation, after which some test of the row fails
    survives     one, after which all tests of the row pass: they do not prove it
    undecided    one, after which they took longer than `--seconds`, and none had failed until then
    idle         a mark on a test that failed after none of the row's mutations

`make mutants ARGS=--core` asks another question: how many of all mutations do the tests of `make test` catch without
the rest? The core runs once with nothing planted, and notes the functions that each case enters. After each mutation,
those cases run that enter the mutated function, until one fails: all of them, where it is in no function, or in C.
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
import threading
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
EVERYTHING = "everything"  # in place of a function
FIRST = 40  # cases whose files are imported before those of others
HITS: Counter[tuple[str, str]] = Counter()  # how many mutations of a module each test has caught


covering_tests = functools.cache(coverage_rows.covering_tests)


class Recorder:
    """A plugin of pytest: it notes the tests that fail, and skips the other cases of a test that has failed.

    It takes some cases in their order, if they are given.
    """

    def __init__(self, results: Path, cases: list[str] | None = None) -> None:
        self.results, self.cases, self.failed = results, cases, set()

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
        order = turns([item.nodeid for item in items])
        if self.cases:
            order = {case: i for i, case in enumerate(self.cases)}
        items[:] = sorted((item for item in items if item.nodeid in order), key=lambda item: order[item.nodeid])

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

    def _note(self, kind: str, what: Any) -> None:
        with self.results.open("a") as file:
            file.write(json.dumps([kind, what]) + "\n")


class Watcher(Recorder):
    """A plugin of pytest: it notes, for each case, its seconds and the functions of our packages that it enters.

    What is entered while a file is collected, or by a fixture, is noted for the file: it may be kept for other cases.
    For a case that starts a process it notes `EVERYTHING`, as it does not see the functions that the process enters.
    """

    def __init__(self, results: Path, tree: Path) -> None:
        super().__init__(results)
        self.packages = tuple(str(tree / name) + "/" for name in COPIED[:3])
        self.root = len(str(tree)) + 1
        self.entered: dict[int, Any] = {}
        self.others: dict[int, Any] = {}
        self.starts_process = False
        sys.addaudithook(self._see_event)
        self.pytest_runtest_setup()

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        """Take what is of the core."""
        from tests.conftest import is_core

        items[:] = [item for item in items if is_core(item.path) or item.get_closest_marker("core")]

    def pytest_runtest_setup(self) -> None:
        """See each call of a function: a test may have looked elsewhere."""
        sys.settrace(self._enter)
        threading.settrace(self._enter)

    pytest_runtest_call = pytest_runtest_teardown = pytest_runtest_setup

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Note what was entered since the last report."""
        super().pytest_runtest_logreport(report)
        names = {(code.co_filename[self.root :], code.co_qualname) for code in self.entered.values()}
        names = {f"{file}:{name.replace('.<locals>', '')}" for file, name in names}
        names |= {EVERYTHING} if self.starts_process else set()
        self.entered, self.starts_process = {}, False
        what = report.nodeid if report.when == "call" else file_of_test(report.nodeid)
        if names or report.when == "call":
            self._note("entered", [what, report.duration, sorted(names)])

    def _enter(self, frame: Any, event: str, argument: object) -> None:
        code = frame.f_code
        if id(code) not in self.entered and id(code) not in self.others:
            (self.entered if code.co_filename.startswith(self.packages) else self.others)[id(code)] = code

    def _see_event(self, event: str, arguments: object) -> None:
        self.starts_process |= event in ("subprocess.Popen", "os.fork", "os.posix_spawn")


def test_of(nodeid: str) -> str:
    """Return a test without its case: `tests/paths/test_x.py::test_y`."""
    return nodeid.partition("[")[0]


def file_of_test(nodeid: str) -> str:
    """Return the file of a test."""
    return nodeid.partition("::")[0]


def turns(cases: list[str]) -> dict[str, int]:
    """Return the number of each case among those of its test."""
    seen: Counter[str] = Counter()
    numbers = {}
    for case in cases:
        numbers[case] = seen[test_of(case)]
        seen[test_of(case)] += 1
    return numbers


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


def run_tests(tree: Path, stages: list[tuple[list[str], Recorder]], device: str, *, until_one_fails: bool) -> None:
    """Run tests in a copy of the tree, a stage if all before it pass: in a process of its own, which it ends."""
    results = stages[0][1].results
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
        for tests, recorder in stages:
            status = int(pytest.main([*options, *tests], plugins=[recorder]))
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
        watches: whether what each case enters is noted.
        reach: what each case entered: those that enter the function of a mutation run, until one fails.
    """

    jobs: int
    seconds: float
    device: str = "cpu"
    until: float = math.inf
    watches: bool = False
    reach: "Reach | None" = None


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
            stages = [(tests, Recorder(self.results))]
            if how.watches:
                stages = [(tests, Watcher(self.results, tree))]
            elif how.reach and mutation:  # the files of later cases need not be imported where an early one fails
                cases = how.reach.cases(mutation)
                parts = [part for part in (cases[:FIRST], cases[FIRST:]) if part]
                stages = [([*dict.fromkeys(map(file_of_test, part))], Recorder(self.results, part)) for part in parts]
            is_one_enough = mutation is not None and (not mutation.rows or how.reach is not None)
            run_tests(tree, stages, how.device, until_one_fails=is_one_enough)

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
            "entered": [what for kind, what in notes if kind == "entered"],
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
    """List the files with tests that `make test` runs."""
    from tests.conftest import has_core

    return sorted(str(x.relative_to(ROOT)) for x in (ROOT / "tests").rglob("test_*.py") if has_core(x))


def core_alone(mutations: list[Mutation], how: How, share: str, output: Path | None) -> bool:
    """Print which mutations the core tests catch without the rest; return whether they catch at least 95 of 100."""
    found = json.loads(output.read_text()) if output and output.exists() else {"core": {}}
    for name, entry in found["core"].items():
        HITS[name.split(" | ")[1].partition(":")[0], entry.get("by", "")] += 1
    part, parts = map(int, share.split("/"))
    left = [x for x in mutations[part - 1 :: parts] if name_of(x) not in found["core"]]
    start = time.monotonic()
    files = core_files()
    outcomes = run_all([(None, [file]) for file in files], how._replace(watches=True))
    unable = [file for file, outcome in zip(files, outcomes, strict=True) if outcome["status"] not in (0, 1)]
    failing = {*unable, *(test for outcome in outcomes for test in outcome["failed"])}
    reach = Reach([note for outcome in outcomes for note in outcome["entered"]], failing)
    found |= circumstances(how.device) | {"left_out": sorted({*found.get("left_out", ()), *failing})}

    def ended(mutation: Mutation | None, outcome: dict[str, Any]) -> None:
        assert mutation is not None
        caught = outcome["failed"][:1]
        HITS.update((mutation.place.partition(":")[0], test) for test in caught)
        verdict = "broken" if outcome["broken"] else "caught" if caught else "undecided"
        if verdict == "undecided" and outcome["status"] is not None:
            verdict = "missed"
        entry = {"verdict": verdict, "seconds": outcome["seconds"]}
        entry |= {"by": caught[0]} if caught else {"held by": sorted({file_of_test(x) for x in marked_for(mutation)})}
        found["core"][name_of(mutation)] = entry
        sys.stdout.write(f"{outcome['seconds']:6.1f} s  {verdict:9}  {name_of(mutation)}  {entry.get('by', '')}\n")
        sys.stdout.write("".join(f"{error}\n" for error in outcome["broken"]))
        sys.stdout.flush()
        if output:
            output.write_text(json.dumps(found, indent=1) + "\n")

    how = how._replace(reach=reach, until=how.until - (time.monotonic() - start))
    run_all([(mutation, []) for mutation in left], how, ended)
    counts = Counter(entry["verdict"] for entry in found["core"].values())
    sys.stdout.write(f"\n{len(found['core'])} of {len(mutations)} mutations: {dict(counts)}\n")
    for name, entry in found["core"].items():
        if entry["verdict"] != "caught":
            sys.stdout.write(f"{entry['verdict']}: {name}; held by {', '.join(entry['held by'])}\n")
    return counts["caught"] >= 0.95 * (counts.total() - counts["broken"])


class Reach:
    """What each case of the core entered with nothing planted, and its seconds."""

    def __init__(self, notes: list[tuple[str, float, list[str]]], failing: set[str]) -> None:
        self.seconds = {case: seconds for case, seconds, _ in notes if "::" in case and test_of(case) not in failing}
        self.turns = turns([*self.seconds])
        self.by_function: dict[str, set[str]] = {}  # cases, and files of which each case may have entered it
        for what, _, names in notes:
            for name in names:
                self.by_function.setdefault(name, set()).add(what)

    def cases(self, mutation: Mutation) -> list[str]:
        """List the cases that could catch a mutation: marked ones first, then quick ones that caught its neighbours."""
        module, _, function = mutation.place.partition(":")
        file = str(file_of(mutation.place).relative_to(ROOT).with_suffix(".py"))  # what calls C stands beside it
        near = self._entering("", f"{file}:")
        inside = self._entering(f"{file}:{function}", f"{file}:{function}.") | self._entering(EVERYTHING, EVERYTHING)
        marked = marked_for(mutation)

        def key(case: str) -> tuple[bool, bool, int, float]:
            hits = HITS[module, test_of(case)]
            is_marked = bool({test_of(case), file_of_test(case)} & marked)
            return not is_marked, case not in near, self.turns[case], self.seconds[case] / (1 + hits)

        return sorted((case for case in self.seconds if not function or case in inside), key=key)

    def _entering(self, name: str, beginning: str) -> set[str]:
        found: set[str] = set()
        for one, cases in self.by_function.items():
            if one == name or one.startswith(beginning):
                found |= cases
        return {case for case in self.seconds if case in found or file_of_test(case) in found}


def marked_for(mutation: Mutation) -> set[str]:
    """Return the tests that are marked with rows of a mutation; for a mutation of no row, the files that catch it."""
    return {test for row in mutation.rows for test in covering_tests().get(row, ())} or {*mutation.tests}


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
