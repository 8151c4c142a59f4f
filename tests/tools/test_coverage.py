"""Every feature of the backends that the project started from has its tests, and every mark names a feature."""

import importlib
from pathlib import Path

import pytest

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
