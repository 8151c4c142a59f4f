"""Every exhibit of the museum of bugs shows what its bug draws now, and hangs beside the test that catches it."""

import importlib
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture
def museum(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    return importlib.import_module("museum")


def test_pictures_are_what_the_bugs_draw(museum):
    """All are drawn again; a bug that draws what is right is none."""
    names = [each.name for each in museum.EXHIBITS]
    assert len(set(names)) == len(names) >= 50
    assert {f"{name}.svg" for name in names} == {file.name for file in museum.PICTURES.iterdir()}
    for each in museum.EXHIBITS:
        picture = each.draw()
        assert str(picture.right) != str(picture.wrong), each.name
        assert "nan" not in str(picture.right), each.name
        width = sum(count for _, count in picture.columns)
        for cells in (picture.right, picture.wrong):
            assert len(cells) == len(picture.rows) and {len(row) for row in cells} == {width}, each.name
        drawn = museum.svg(picture)
        assert (museum.PICTURES / f"{each.name}.svg").read_text(encoding="utf-8") == drawn, "`make readme` draws them"
        assert int(re.search(r'width="(\d+)"', drawn)[1]) <= 358, f"{each.name} is wider than a phone"


def test_the_page_is_up_to_date(museum):
    assert museum.PAGE.read_text(encoding="utf-8") == museum.page(), "`make readme` writes it"


def test_every_exhibit_shows_its_code(museum):
    """The bug, be it of the kit, of a puzzle or of the museum, and what draws it."""
    codes = {each.name: museum.code_of(each.draw) for each in museum.EXHIBITS}
    for name, code in codes.items():
        compile(code, name, "exec")
        assert f"def {name}() -> Picture:" in code
    assert codes["nan_out_of_nothing"].startswith("def broken(outs")
    assert codes["a_sequence_without_keys"].startswith("class EmptyUnwritten(")
    assert "class RowsAreSequences(" in codes["requests_that_say_nothing"]
    assert "class Cut(Attention" in codes["a_window_cut_to_the_number_of_keys"]


def test_symptoms_are_what_the_pictures_show(museum):
    found = {each.name: museum.symptoms(each.draw()) for each in museum.EXHIBITS}
    assert all(found.values()) and set().union(*found.values()) == set(museum.SYMPTOMS)
    assert found["a_sequence_without_keys"] == {"nan"} and found["two_logarithms"] == {"weights"}
    assert found["a_cap_that_unmasks"] == {"more"} and "less" in found["a_window_cut_to_the_number_of_keys"]


def test_every_exhibit_has_its_row_and_its_test(museum):
    """What went wrong, the report and the tests are those of the list of bugs, and the tests are there."""
    rows = museum.rows()
    for each in museum.EXHIBITS:
        says, reports, tests = rows[each.part, each.issue]
        assert says and f"[{each.issue}]" in reports
        named = re.findall(r"\[`(\w+)`\]\(\.\./\.\./(tests/[\w/]+\.py)\)", tests)
        assert named, each.name
        for test, file in named:
            assert re.search(rf"^ *def {test}\(", (ROOT / file).read_text(encoding="utf-8"), re.MULTILINE), (test, file)


def test_every_puzzle_with_a_report_hangs_in_the_museum(museum):
    """Beside the exhibit of the report that the puzzle names."""
    hung = {each.puzzle: museum.rows()[each.part, each.issue][1] for each in museum.EXHIBITS if each.puzzle}
    for file in museum.PUZZLE_FILES:
        reported = re.search(r"^Reported: .*/(\d+)$", file.read_text(encoding="utf-8"), re.MULTILINE)
        if reported:
            assert f"[{reported[1]}]" in hung[file.stem[3:]], file.name


def test_paths_link_to_their_bugs(museum):
    pages = "".join(page.read_text(encoding="utf-8") for page in (ROOT / "docs/paths").glob("*.md"))
    for part in {each.part for each in museum.EXHIBITS}:
        assert f"(../proof/museum.md#{museum.anchor(part)})" in pages, part
