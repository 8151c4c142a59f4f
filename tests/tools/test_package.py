"""The package and the repository as others meet them: types, links, tasks without make, the notebooks in the wheel.

What takes an empty environment is `make release-check`.
"""

import importlib
import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.helpers.twin_files import SHARED
from twinattn.bench import roofline
from twinattn.course import copied as course

ROOT = Path(__file__).parent.parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
SOMEWHERE = "https://github.com/Owner/twins"
LINK = re.compile(r"\]\(([^)\s]+)\)")


@pytest.fixture
def address(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "docs")
    return importlib.import_module("address")


@pytest.mark.parametrize("package", ["refattn", "fastattn"])
def test_type_checkers_read_our_types(package):
    assert (ROOT / package / "py.typed").is_file()
    assert "Typing :: Typed" in PROJECT["project"]["classifiers"]


# --- the repository's address ---


def test_the_kit_needs_no_numpy():
    """Its extra does not bring it; what only tests and the demo need may."""
    for file in [*(ROOT / "twinattn/kit").rglob("*.py"), *(ROOT / f"refattn/{name}.py" for name in SHARED)]:
        assert not re.search(r"\.numpy\(\)|^\s*(import|from) numpy", file.read_text(), re.MULTILINE), file


def test_without_an_address_nothing_is_made_of_it(address):
    assert address.urls("") == {}
    assert [make("") for make in (address.site, address.badges, address.clone)] == [""] * 3
    assert address.colab("", "01_ragged_batch.ipynb") == ""
    assert "http" not in address.citation("") and f"repository-code: {SOMEWHERE}\n" in address.citation(SOMEWHERE)


def test_all_links_are_made_of_one_address(address):
    links = [*address.urls(SOMEWHERE).values(), *LINK.findall(address.badges(SOMEWHERE))]
    assert "https://owner.github.io/twins/" in links
    assert all("wner" in link and "twins" in link for link in links if "assets/colab-badge" not in link)
    assert address.colab(SOMEWHERE, "03_merge.ipynb", "v1.0") == (
        "https://colab.research.google.com/github/Owner/twins/blob/v1.0/notebooks/03_merge.ipynb"
    )
    assert address.colab("https://example.org/a/b", "03_merge.ipynb") == ""  # Colab opens files of GitHub
    assert f"git clone {SOMEWHERE}\ncd twins\n" in address.clone(SOMEWHERE)


@pytest.mark.parametrize("wrong", ["github.com/a/b", "https://github.com/a", "https://github.com/a/b/", "git@host:a/b"])
def test_an_address_that_links_cannot_be_made_of(wrong, address, tmp_path):
    (tmp_path / "pyproject.toml").write_text(f'[tool.twinattn]\nrepository = "{wrong}"\n')
    with pytest.raises(ValueError, match="expected https://github.com/OWNER/NAME, got"):
        address.repository(tmp_path)


@pytest.mark.parametrize(
    ("version", "ref"),
    [("1.2", "v1.2"), ("0.1.0rc1", "v0.1.0rc1"), ("0.1.0.dev738", "main"), ("0.1.0.dev2+g12ab", "main")],
)
def test_links_of_a_release_lead_to_its_tag(version, ref, address):
    assert address.ref_of(version) == ref


def test_links_of_the_readme_on_a_package_index(address):
    page = (ROOT / "README.md").read_text()
    code = address.FENCE.findall(page)
    relative = {link for link in LINK.findall(address.FENCE.sub("", page)) if not re.match(r"[a-z]+:|#", link)}
    assert len(relative) > 40
    for repository in ("", SOMEWHERE):
        shown = address.without_relative_links(page, repository, "v1.0")
        assert address.FENCE.findall(shown) == code
        links = LINK.findall(address.FENCE.sub("", shown))
        assert not [link for link in links if not re.match(r"[a-z]+:|#", link)]
        ours = {link.removeprefix(SOMEWHERE) for link in links if link.startswith(SOMEWHERE)}
        assert ours >= {f"/{'raw' if link.endswith('.svg') else 'blob'}/v1.0/{link}" for link in relative if repository}
    code = "```python\nf = table[i](x)\n```"
    assert address.without_relative_links(f"[a](b.md)\n\n{code}\n", "", "main") == f"a\n\n{code}\n"
    assert address.without_relative_links("a ![b](c.svg)", "", "main") == "a "
    assert address.without_relative_links("[`a[i]`](b.py), [c](#d)", "", "main") == "`a[i]`, [c](#d)"


def test_the_readme_shows_what_is_made_of_the_address(address):
    readme = importlib.import_module("readme")
    page = (ROOT / "README.md").read_text()
    for name, text in readme.of_address(address.repository()).items():
        shown = page.partition(f"<!-- {name}: made by docs/readme.py -->")[2].partition(f"<!-- end of {name} -->")[0]
        assert shown.strip() == text, "`make readme` writes it"
    assert (ROOT / "CITATION.cff").read_text() == address.citation(address.repository()), "`make readme` writes it"


# --- with make, and without ---


def dry(*command: str) -> list[list[str]]:
    """Return the commands that make would run."""
    environment = {"PATH": os.environ["PATH"]}  # nothing of a make that runs these tests
    asked = ["make", "-n", "VENV=not-there", *command]
    made = subprocess.run(asked, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    return [shlex.split(line.partition(" || ")[0], comments=True) for line in made.stdout.splitlines()]


def task_file():
    spec = importlib.util.spec_from_file_location("run_of_the_root", ROOT / "run.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", ["demo", "test", "prove", "exercises", "lab"])
def test_make_and_python_alone_do_the_same(name):
    *installs, command = dry(name, "ARGS=--some option")
    extras, arguments = task_file().TASKS[name]
    assert [words[1:] for words in installs] == [["run.py", "install", extra] for extra in extras]
    assert [word for word in command if "=" not in word] == ["not-there/bin/python", *arguments, "--some", "option"]
    assert set(extras) - {"model"} <= set(PROJECT["project"]["optional-dependencies"])


def test_the_model_is_the_one_that_the_demo_asks_for():
    from twinattn.engine import demo_model

    assert task_file().MODEL == demo_model.WHEEL


def run(folder: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess:
    """Run a copy of run.py, in whose folder nothing else is, with an environment that need not be there."""
    (folder / "run.py").write_text((ROOT / "run.py").read_text())
    command = [sys.executable, str(folder / "run.py"), *arguments]
    return subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, check=False)


def test_a_python_that_is_too_old_makes_no_environment(tmp_path):
    """As if this one were: the version is all that run.py looks at."""
    lines = "import sys; sys.version_info = (3, 9, 6, 'final', 0); exec(open('run.py').read())"
    (tmp_path / "run.py").write_text((ROOT / "run.py").read_text())
    done = subprocess.run([sys.executable, "-c", lines], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "expected Python 3.11 or newer, got 3.9" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["run.py"]


def test_an_environment_that_is_broken_is_named_and_left(tmp_path):
    python = tmp_path / "mine/bin/python"
    python.parent.mkdir(parents=True)
    python.write_text("#!/bin/sh\nexit 1\n")  # as one of an older Python answers
    python.chmod(0o755)
    (tmp_path / "mine/work.txt").write_text("a user's")
    (tmp_path / "venv.py").write_text("def create(*arguments, **options): ...")  # a real one takes seconds
    done = run(tmp_path, "demo", VENV="mine")
    assert done.returncode == 1
    assert "mine: expected an environment of Python 3.11 or newer with pip; remove it" in done.stderr
    assert (tmp_path / "mine/work.txt").exists() and not (tmp_path / "mine/.demo").exists()


def test_what_needs_linux_says_so_elsewhere(monkeypatch, capsys):
    module = task_file()
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(module, "install", lambda extra: pytest.fail("nothing is installed for it"))
    monkeypatch.setattr(module, "FOLDER", Path("not-there"))
    assert module.main(["test"]) == 0
    assert "needs Linux" in capsys.readouterr().out


def test_what_is_no_task_is_answered_with_those_that_are(tmp_path):
    assert run(tmp_path, "--help").returncode == 0
    wrong = run(tmp_path, "tset")
    assert wrong.returncode == 2 and "python run.py exercises" in wrong.stdout


# --- the notebooks and the measurements in the package ---


@pytest.fixture(params=["checkout", "wheel"])
def package(request, tmp_path, monkeypatch):
    """A package as a checkout has it, and as a wheel does: with the files that pyproject.toml puts into it."""
    if request.param == "wheel":
        for source, target in PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["force-include"].items():
            place = tmp_path / target.removeprefix("twinattn/course/")
            place.parent.mkdir(parents=True, exist_ok=True)
            place.symlink_to(ROOT / source)
        monkeypatch.setattr(course, "PACKAGED", tmp_path)
    return request.param


@pytest.mark.usefixtures("package")
def test_the_notebooks_are_copied_where_a_reader_wants_them(tmp_path):
    first = course.copy(tmp_path / "mine")
    assert first.is_file() and first.parent == tmp_path / "mine"
    expected = {path.name for path in (ROOT / "notebooks").glob("*.ipynb")}
    assert expected <= {path.name for path in first.parent.iterdir()}
    assert (tmp_path / "mine/exercises/01_slot.py").is_file() and not (tmp_path / "mine/run.py").exists()
    with pytest.raises(ValueError, match="folder: expected one that is not there yet"):
        course.copy(tmp_path / "mine")


@pytest.mark.usefixtures("package")
def test_the_measurements_are_read_from_wherever_they_are(monkeypatch):
    monkeypatch.setattr(roofline, "_points", lambda run: [])  # the points take seconds
    assert {machine.name for machine in roofline.measured().machines} == {"NVIDIA H200", "Intel Xeon"}
