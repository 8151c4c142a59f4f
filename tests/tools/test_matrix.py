"""The matrix of environments: which cells it has, and what it keeps of earlier runs."""

import itertools
import json
import sys
from pathlib import Path

import pytest

from tests import matrix

ROOT = Path(__file__).parent.parent.parent
PYTHONS = [Path(f".venv-3.{minor}/bin/python") for minor in (11, 12, 13, 14)]


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_every_two_values_meet(count):
    """Of BLAS, ATen and threads with any number of Pythons, and with the Pythons if there are three."""
    cells = matrix.covering(PYTHONS[:count])
    assert len(cells) == max(9, 6 + count)
    values = [matrix.BLAS, tuple(matrix.ATEN), matrix.THREADS]
    columns = [[cell.blas for cell in cells], [cell.aten for cell in cells], [cell.threads for cell in cells]]
    if count == 3:
        values.append(tuple(PYTHONS[:3]))
        columns.append([cell.python for cell in cells])
    for one, other in itertools.combinations(range(len(columns)), 2):
        met = set(zip(columns[one], columns[other], strict=True))
        assert met >= set(itertools.product(values[one], values[other]))
    assert {cell.python for cell in cells} == set(PYTHONS[:count])


def test_files_that_are_left_out_exist():
    for file in matrix.UNAFFECTED:
        assert (ROOT / file).is_file()


def test_a_python_is_found_once(tmp_path, monkeypatch):
    """That of `.venv` and one of a folder of its version are the same; a folder without a Python counts for nothing."""
    for folder in (".venv-3.7", ".venv-3.8"):
        (tmp_path / folder / "bin").mkdir(parents=True)
    (tmp_path / ".venv-3.7/bin/python").symlink_to(sys.executable)
    monkeypatch.setattr(matrix, "ROOT", tmp_path)
    assert matrix.find_pythons() == [Path(sys.executable)]


def test_results_of_other_pythons_are_kept(tmp_path, monkeypatch, capsys):
    """Cells that run again replace their own results, and no others."""

    def pretend(cell, jobs, arguments):
        found = {"python": matrix.version(cell.python) + ".1"}
        return dict(asked=cell.asked, found=found, arguments=arguments, counts={"passed": 1}, exit_status=0, seconds=2)

    file = tmp_path / "matrix.json"
    monkeypatch.setattr(matrix, "run", pretend)
    monkeypatch.setattr(matrix, "find_pythons", lambda: [Path(sys.executable)])

    def main(*arguments):
        monkeypatch.setattr(sys, "argv", ["matrix.py", "--output", str(file), *arguments])
        with pytest.raises(SystemExit) as ended:
            matrix.main()
        return ended.value.code

    assert main("--cells", "3,4") == 0
    assert main("--cells", "4,0", "-k", "merge") == 0
    written = json.loads(file.read_text())
    assert list(written["cells"]) == ["0", "3", "4"]
    assert [cell["arguments"] for cell in written["cells"].values()] == [["-k", "merge"], [], ["-k", "merge"]]

    written["cells"]["3"]["found"]["python"] = "2.7.18"
    file.write_text(json.dumps(written))
    before = file.read_bytes()
    assert main("--cells", "0,3") == 2
    assert "results of other Pythons for cells [3]" in capsys.readouterr().err
    assert file.read_bytes() == before
    assert main("--list") == 0
