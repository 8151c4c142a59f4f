"""Every feature of the backends that the project started from has its tests, and every mark names a feature."""

import ast
import importlib
from collections import Counter
from pathlib import Path

import pytest
from mutations import FASTATTN_ALONE, MUTATIONS, UNBROKEN
from planted import replace_lines

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture
def coverage(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    return importlib.import_module("coverage_rows")


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
    for mutation in MUTATIONS:
        source = (ROOT / mutation.file).read_text()
        broken = replace_lines(source, mutation.old, mutation.new, mutation.file)
        assert broken != source, f"{mutation.name} changes nothing"
        ast.parse(broken)


def test_mutations_have_names_of_their_own():
    counts = Counter((mutation.name, mutation.file, mutation.rows) for mutation in MUTATIONS)
    assert not [key for key, count in counts.items() if count > 1]


def test_every_row_with_tests_is_broken_in_both_packages(coverage):
    """Or in what they share; or it says why not."""
    broken: dict[str, set[str]] = {}
    for mutation in MUTATIONS:
        package, module, *_ = mutation.file.split("/")
        shared = package == "refattn" and module in ("interface", "serving")
        for row in mutation.rows:
            broken.setdefault(row, set()).update(("refattn", "fastattn") if shared else (package,))
    alone = {row for rows in FASTATTN_ALONE.values() for row in rows.split()}
    tested = {row.id for row in rows(coverage) if row.state in ("done", "refused")}
    assert {*broken} | {*UNBROKEN} == tested and not {*broken} & {*UNBROKEN}
    for row, packages in broken.items():
        assert packages == ({"fastattn"} if row in alone else {"refattn", "fastattn"}), row
