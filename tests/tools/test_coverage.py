"""Every feature of the backends that the project started from has its tests, and every mark names a feature."""

import ast
import functools
import importlib
import json
import subprocess
import sys
from collections import Counter, defaultdict
from pathlib import Path

import pytest

from tests.helpers.twin_files import SHARED
from tests.tools.mutations import FASTATTN_ALONE, MUTATIONS, UNBROKEN
from tests.tools.mutations_at_large import AT_LARGE
from tests.tools.places import file_of, replaced

ROOT = Path(__file__).parent.parent.parent


@functools.cache
def covering_tests():
    """Read all tests once."""
    return importlib.import_module("coverage_rows").covering_tests()


@pytest.fixture
def coverage(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    module = importlib.import_module("coverage_rows")
    covering_tests()
    monkeypatch.setattr(module, "covering_tests", covering_tests)
    return module


def rows(coverage):
    return [row for backend in coverage.backends() for row in backend.rows]


def test_rows_have_ids_and_states(coverage):
    listed = rows(coverage)
    assert len({row.id for row in listed}) == len(listed) >= 178
    for row in listed:
        assert row.state in coverage.STATES, row
        assert bool(row.reason) == (row.state in ("refused", "outside")), f"a reason, where one is needed: {row}"


def test_no_row_has_lost_its_tests(coverage):
    tests = coverage.covering_tests()
    for row in rows(coverage):
        has_tests = bool(tests.get(row.id))
        if row.state in ("done", "refused"):
            assert has_tests, f'{row.id}, {row.feature!r}: no test has @pytest.mark.covers("{row.id}")'
        else:
            assert not has_tests, f"{row.id} is {row.state} in docs/proof/coverage.toml, and yet has {tests[row.id]}"


def test_every_mark_names_a_row(coverage):
    unknown = {*coverage.covering_tests()} - {row.id for row in rows(coverage)}
    assert not unknown, f"marks of rows that docs/proof/coverage.toml does not have: {sorted(unknown)}"


def test_the_page_is_made_of_them(coverage):
    assert coverage.page() == coverage.PAGE.read_text(), "`make readme` writes it"


def test_a_row_without_a_test_is_found(coverage, monkeypatch):
    tests = coverage.covering_tests()
    monkeypatch.setattr(coverage, "covering_tests", lambda: {id: names for id, names in tests.items() if id != "A4"})
    with pytest.raises(AssertionError, match="A4, .*: no test has"):
        test_no_row_has_lost_its_tests(coverage)
    monkeypatch.setattr(coverage, "covering_tests", lambda: tests | {"Z1": ["somewhere"]})
    with pytest.raises(AssertionError, match="Z1"):
        test_every_mark_names_a_row(coverage)


# --- what breaks them: tests/tools/mutations.py; `make mutants` plants it and runs the tests ---


def test_every_mutation_finds_its_lines_and_is_python():
    """Who changes a line that a mutation names finds out here, and changes the mutation."""
    broken = defaultdict(list)  # per file: its text with as many mutations at once as do not meet
    for mutation in [*MUTATIONS, *AT_LARGE]:
        asked = mutation.place, mutation.old, mutation.new
        file = file_of(mutation.place)
        source = file.read_text()
        alone = replaced(source, *asked)
        assert alone != source, f"{mutation.name} changes nothing"
        texts = broken[file]
        try:
            texts[-1:] = [replaced(texts[-1] if texts else source, *asked)]
        except LookupError:
            texts.append(alone)
    for file, texts in broken.items():
        for text in texts if file.suffix == ".py" else ():
            ast.parse(text, str(file))


def test_a_mutation_is_found_by_its_function_in_any_layout():
    source = (
        "def f():\n    return g(a, b)\n\nclass C:\n    def f(self):\n        return g(\n            a, b\n        )\n"
    )
    assert replaced(source, "module:C.f", "g(a, b)", "h()") == source.replace("g(\n            a, b\n        )", "h()")
    with pytest.raises(LookupError, match="module has 'g\\(a, b\\)' 2 times, not once"):
        replaced(source, "module", "g(a, b)", "h()")
    with pytest.raises(LookupError, match="expected one function or class C.g, found 0"):
        replaced(source, "module:C.g", "g(a, b)", "h()")


def test_mutations_have_names_of_their_own():
    counts = Counter((mutation.name, mutation.place, mutation.rows) for mutation in MUTATIONS)
    assert not [key for key, count in counts.items() if count > 1]


def test_every_row_with_tests_is_broken_in_both_packages(coverage):
    """Or in what they share; or it says why not."""
    broken: dict[str, set[str]] = {}
    for mutation in MUTATIONS:
        module, _, name = mutation.place.partition(":")
        package, module, *_ = module.replace("/", ".").split(".")
        shared = package == "refattn" and module in SHARED and (module != "keys" or name[:1].isupper())
        for row in mutation.rows:
            broken.setdefault(row, set()).add("shared" if shared else package)
    alone = {row for rows in FASTATTN_ALONE.values() for row in rows.split()}
    tested = {row.id for row in rows(coverage) if row.state in ("done", "refused")}
    assert {*broken} | {*UNBROKEN} == tested and not {*broken} & {*UNBROKEN}
    for row, packages in broken.items():
        is_of_both = packages >= {"refattn", "fastattn"} or packages & {"shared", "twinattn"}
        assert "refattn" not in packages if row in alone else is_of_both, (row, packages)


JUDGED = """
import hypothesis, json, pathlib, pytest, sys, torch, triton  # once, and not in each of the processes
from tests import mutants
caught = next(one for one in mutants.MUTATIONS if one.rows == ("D159",) and one.place.startswith("refattn.merge"))
harmless = caught._replace(name="harmless", place="refattn.merge", old="Merge partial outputs", new="Merge answers")
no_python = caught._replace(name="no Python", place="refattn.merge", old="def merge(", new="def (")
tests = ["tests/paths/test_merge.py::test_a_log_sum_exp_has_a_row_for_each_query_and_a_column_for_each_head"]
mutants.covering_tests = lambda: {"D159": tests}
chosen = [(mutation, tests) for mutation in (caught, harmless, no_python)]
outcomes = mutants.run_all(chosen, mutants.How(1, 100.0))
print(json.dumps([mutants.judge(mutation, outcome) for (mutation, _), outcome in zip(chosen, outcomes)]))
mutants.core_files = lambda: ["tests/paths/test_merge.py"]
output = pathlib.Path(sys.argv[1])
output.write_text(json.dumps({"core": {mutants.name_of(no_python): {"verdict": "of an earlier run", "held by": []}}}))
mutants.core_alone([no_python, harmless, caught], mutants.How(1, 100.0), "1/1", output)
"""


@pytest.mark.timeout(300)
def test_a_mutation_that_breaks_nothing_survives(tmp_path):
    """And what is no Python is not taken for one that is caught. The core of the tests is asked for a share."""
    command = [sys.executable, "-c", JUDGED, str(tmp_path / "core.json")]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    verdicts = [{"D159": "caught"}, {"D159": "survives"}, {"D159": "broken"}]
    assert json.dumps(verdicts) in run.stdout.splitlines()
    found = json.loads((tmp_path / "core.json").read_text())
    earlier, harmless, caught = found["core"].values()
    assert earlier["verdict"] == "of an earlier run"
    assert harmless["verdict"] == "missed" and harmless["held by"] == ["tests/paths/test_merge.py"]
    assert caught["verdict"] == "caught" and caught["by"].startswith("tests/paths/test_merge.py::")
    assert found["left_out"] == [] and found["versions"]["torch"]
