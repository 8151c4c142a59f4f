"""What a code host runs and shows: workflows that call the targets of make and nothing else, forms, the citation."""

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import check_jsonschema
import pytest
import yaml
from click.testing import CliRunner

ROOT = Path(__file__).parent.parent.parent
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))
FORMS = sorted((ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml"))
MAKE_TARGETS = re.findall(r"^([a-z-]+):.*## ", (ROOT / "Makefile").read_text(), re.MULTILINE)
COMMAND = re.compile(
    r"make (?:[A-Z]+=\S* )*(?P<target>[a-z-]+)(?: [A-Z]+=(?:\"[^\"]*\"|\S*))*|python run\.py (?P<task>\w+)"
)

actionlint = shutil.which("actionlint", path=str(Path(sys.executable).parent))
linters = [  # per linter: the command and what it reads
    ("vendor.github-workflows", WORKFLOWS),
    ("vendor.github-issue-forms", [form for form in FORMS if form.stem != "config"]),
    ("vendor.github-issue-config", [form for form in FORMS if form.stem == "config"]),
    ("vendor.citation-file-format", [ROOT / "CITATION.cff"]),
    *([("actionlint", WORKFLOWS)] if actionlint else []),  # there are wheels of it for Linux on x86
]


def lint(linter: str, *files: Path) -> str:
    """Return what a linter finds."""
    if linter == "actionlint":
        done = subprocess.run([actionlint, "-no-color", *files], capture_output=True, text=True, check=False)
        status, found = done.returncode, done.stdout
    else:
        result = CliRunner().invoke(check_jsonschema.main, ["--builtin-schema", linter, *map(str, files)])
        status, found = result.exit_code, result.output
    assert status in (0, 1), found
    return found if status else ""


@pytest.mark.parametrize(("linter", "files"), linters, ids=[name for name, _ in linters])
def test_nothing_is_found_in_them(linter, files):
    assert files
    assert lint(linter, *files) == ""


@pytest.mark.parametrize("linter", [name for name, _ in linters if name in ("actionlint", "vendor.github-workflows")])
def test_a_linter_finds_a_mistake(linter, tmp_path):
    text = WORKFLOWS[-1].read_text()
    wrong = (
        text.replace("matrix.python", "matrix.pyhton") if linter == "actionlint" else text.replace("runs-on", "run-on")
    )
    (tmp_path / "wrong.yml").write_text(wrong)
    assert lint(linter, tmp_path / "wrong.yml")


def steps(workflow: Path) -> list[dict]:
    return [step for job in yaml.safe_load(workflow.read_text())["jobs"].values() for step in job["steps"]]


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.stem)
def test_it_calls_what_everybody_calls(workflow):
    commands = [line for step in steps(workflow) for line in step.get("run", "").splitlines()]
    assert commands
    for command in commands:
        called = COMMAND.fullmatch(re.sub(r"\$\{\{.*?\}\}", "VALUE", command))
        assert called, f"{workflow.name}: {command} is no target of make, nor a task of run.py"
        assert called["target"] in MAKE_TARGETS if called["target"] else called["task"] in ("demo", "test", "exercises")


def test_the_tests_run_with_each_python_that_the_package_names():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    named = [line.rpartition(" ")[2] for line in project["classifiers"] if re.search(r"Python :: 3\.\d+", line)]
    matrix = yaml.safe_load((ROOT / ".github/workflows/tests.yml").read_text())["jobs"]["tests"]["strategy"]["matrix"]
    assert matrix["python"] == named and f">={named[0]}" == project["requires-python"]
    assert matrix["constraints"] == ["constraints.txt"] and matrix["may-fail"] == [False]
    for more in matrix["include"]:
        assert not more["constraints"] or (ROOT / more["constraints"]).is_file()


def test_the_oldest_versions_are_the_oldest_that_are_allowed():
    """Those of pyproject.toml, where it names one; numpy has a newest there."""
    declared = re.findall(r'"(torch|transformers|triton)>=([\d.]+)', (ROOT / "pyproject.toml").read_text())
    pinned = dict(re.findall(r"^(\w+)==([\d.]+)", (ROOT / ".github/oldest.txt").read_text(), re.MULTILINE))
    assert {name for name, _ in declared} == {*pinned} - {"numpy"}
    assert all(pinned[name] == version or pinned[name] == f"{version}.0" for name, version in declared)
