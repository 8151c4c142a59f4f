"""What must not change when code only moves: the bits of every output, the public names, the texts of errors.

    python -m tests.golden before.json              run the cases of every path and write what came of them
    python -m tests.golden before.json after.json   say where two such files differ; 1 if they do

Bits depend on the processor, on threads and on the versions of PyTorch and Triton, so such a file belongs to a machine
and a day: write one before a change, one after it, and keep neither. `--device cuda` does it on a GPU.

    outputs     of each test of test_every_path and test_composition, every tensor that a path returned, hashed
    names       of each module of the twins, its public functions and classes, with their signatures
    errors      of each test of test_bad_input, the texts that it saw
"""

import functools
import hashlib
import importlib
import inspect
import json
import os
import pkgutil
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

FILES = tuple(f"tests/paths/{name}.py" for name in ("test_every_path", "test_composition", "test_bad_input"))
COMPUTES = ("attention", "prefill", "merge")  # the functions of a path whose outputs are hashed
OTHERS = ("dispatch", "doctor")  # no paths, at the top of a twin
OUTPUT = "TWINATTN_GOLDEN"


def names() -> dict[str, str]:
    """List the public functions and classes of the twins, with their signatures."""
    from tests.helpers.twin_files import public_names  # not before pytest has seen that it rewrites its assertions

    found = {}
    for package in ("refattn", "fastattn"):
        for module in path_modules(package):
            for name in public_names(package, module.__name__.rpartition(".")[2]):
                found[f"{module.__name__}.{name}"] = str(inspect.signature(getattr(module, name)))
    return found


def path_modules(package: str) -> list[ModuleType]:
    """Import the modules at the top of a package."""
    top = importlib.import_module(package)
    listed = [one.name for one in pkgutil.iter_modules(top.__path__) if not one.ispkg and one.name not in OTHERS]
    return [importlib.import_module(f"{package}.{name}") for name in listed]


def digest(x: Any) -> Any:
    """Return a hash of a tensor, its type and shape included; of several, one each."""
    if isinstance(x, tuple | list):
        return [digest(one) for one in x]
    if not isinstance(x, torch.Tensor):
        return None
    bits = x.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
    return hashlib.sha256(f"{x.dtype} {tuple(x.shape)}".encode() + bits).hexdigest()[:16]


class Golden:
    """A plugin of pytest that notes outputs and errors by test."""

    def __init__(self, output: str) -> None:
        self.output, self.test = output, ""
        self.outputs: dict[str, list[Any]] = defaultdict(list)
        self.errors: dict[str, list[str]] = defaultdict(list)

    def pytest_collection_finish(self) -> None:
        for package in ("refattn", "fastattn"):
            for module in path_modules(package):
                for name in COMPUTES:
                    if hasattr(module, name):
                        setattr(module, name, self._noting(f"{module.__name__}.{name}", getattr(module, name)))
        leave = pytest.RaisesExc.__exit__

        def leave_and_note(raises: Any, kind: Any, error: Any, trace: Any) -> Any:
            if error is not None:
                self.errors[self.test].append(f"{kind.__name__}: {error}")
            return leave(raises, kind, error, trace)

        pytest.RaisesExc.__exit__ = leave_and_note  # type: ignore[method-assign]

    def _noting(self, name: str, function: Any) -> Any:
        @functools.wraps(function)
        def call(*arguments: Any, **options: Any) -> Any:
            result = function(*arguments, **options)
            if "test_bad_input" not in self.test:
                self.outputs[self.test].append([name, digest(result)])
            return result

        return call

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: Any) -> Any:
        self.test = item.nodeid
        return (yield)

    def pytest_sessionfinish(self) -> None:
        worker = os.environ.get("PYTEST_XDIST_WORKER", "main")
        Path(f"{self.output}.{worker}").write_text(json.dumps({"outputs": self.outputs, "errors": self.errors}))


def pytest_configure(config: pytest.Config) -> None:
    """Take part in a run of pytest with `-p tests.golden`."""
    config.pluginmanager.register(Golden(os.environ[OUTPUT]))


def write(file: Path, options: list[str]) -> int:
    """Run the tests and write a file; return the exit status of pytest."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.golden", *FILES, *options]
    status = subprocess.run(command, env={**os.environ, OUTPUT: str(file)}, check=False).returncode
    found: dict[str, dict[str, Any]] = {"outputs": {}, "errors": {}, "names": names()}
    for part in file.parent.glob(f"{file.name}.*"):
        for kind, notes in json.loads(part.read_text()).items():
            found[kind] |= notes
        part.unlink()
    file.write_text(json.dumps(found, indent=0, sort_keys=True) + "\n")
    return status


def compare(before: Path, after: Path) -> int:
    """Print where two files differ; 1 if they do."""
    first, second = (json.loads(file.read_text()) for file in (before, after))
    differs = False
    for kind in first:
        gone, new = sorted({*first[kind]} - {*second[kind]}), sorted({*second[kind]} - {*first[kind]})
        other = [name for name in first[kind] if name in second[kind] and first[kind][name] != second[kind][name]]
        differs |= bool(gone or other)
        sys.stdout.write(f"{kind}: {len(first[kind])} before, {len(gone)} gone, {len(new)} new, {len(other)} differ\n")
        for name in (*gone, *other):
            sys.stdout.write(f"  {name}\n")
    return int(differs)


if __name__ == "__main__":
    files = [Path(x) for x in sys.argv[1:] if x.endswith(".json")]
    others = [x for x in sys.argv[1:] if not x.endswith(".json")]
    sys.exit(compare(*files) if len(files) == 2 else write(files[0].resolve(), others))
