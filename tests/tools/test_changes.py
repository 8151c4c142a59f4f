"""The worked examples of "How to change it": each patch applies, passes its own tests, and touches few files.

Where one no longer applies, `git apply -3` it, resolve what is left, and write `git diff` into it again.
"""

import ast
import os
import re
import shutil
import subprocess
import sys

import pytest

from tests.helpers.pages import ROOT, blocks_of

PAGE = ROOT / "docs/proof/change_it.md"
PACKAGES = "refattn", "fastattn", "twinattn"
MOST_FILES = {"dilated_window": 7, "head_temperature": 6}  # package files that the design allows a mask, an option
KERNELS, TRITON = "fastattn/kernels", "fastattn/kernels/triton"
NAMED = {  # what names a storage or a kernel, its own file, and the other files that the page lists
    "packed latents": (
        r"packed_latents|PackedLatents|PACKED|\"packed\"",
        "refattn/packed_latents.py",
        ["refattn/keys.py", *(f"{KERNELS}/{name}.py" for name in ("problem", "kernel", "order"))]
        + [f"{TRITON}/{name}.py" for name in ("quantized_keys", "attention", "__init__")],
    ),
    "flash-attn-4": ("fa4", f"{KERNELS}/flash/fa4.py", [f"{KERNELS}/order.py", "fastattn/doctor.py"]),
}
OWN_OF_FOUR_BITS = ("four_bits.py", "int4_elements.py", "turned_rows.py")
FOUR_BITS = {  # package files that name pages of four bits in their code, by what for, but for their own
    "to read them": [
        *("refattn/keys.py", "refattn/rounding.py", f"{KERNELS}/problem.py", f"{KERNELS}/kernel.py"),
        *(f"{KERNELS}/cpu/__init__.py", f"{TRITON}/__init__.py", f"{TRITON}/attention.py"),
    ],
    "to write them": [
        *("refattn/quantized.py", "fastattn/quantized.py", "refattn/allocation.py", f"{KERNELS}/torch_ops/__init__.py"),
    ],
    "for speed": [
        *(f"{KERNELS}/flash/fa3.py", f"{KERNELS}/flash/fa4.py", f"{KERNELS}/order.py"),
        *(f"{TRITON}/expand.py", f"{TRITON}/tuning.py", f"{TRITON}/keys.py"),
    ],
}

each_change = pytest.mark.parametrize("name", MOST_FILES)


def parts_of(name: str) -> dict[str, str]:
    """Return what a patch does to each file."""
    text = (PAGE.parent / f"changes/{name}.patch").read_text()
    return {re.match(r"a/(\S+)", part)[1]: part for part in re.split(r"^diff --git ", text, flags=re.MULTILINE)[1:]}


@each_change
def test_a_change_touches_few_files(name):
    touched = [file for file in parts_of(name) if file.split("/")[0] in PACKAGES]
    assert 0 < len(touched) <= MOST_FILES[name]
    row = next(line for line in PAGE.read_text().splitlines() if f"changes/{name}.patch" in line)
    assert f"| {len(touched)} |" in row, f"the page says of {touched}: {row}"


@each_change
def test_a_change_passes_its_tests(name, tmp_path):
    for folder in (*PACKAGES, "tests"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    subprocess.run(["git", "apply", PAGE.parent / f"changes/{name}.patch"], cwd=tmp_path, check=True)
    tests = [sys.executable, "-m", "pytest", "-q", f"tests/paths/test_{name}.py"]
    around = os.environ | {"PYTHONPATH": str(tmp_path)}
    done = subprocess.run(tests, cwd=tmp_path, env=around, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("name", NAMED)
def test_a_storage_and_a_kernel_are_in_the_files_that_the_page_lists(name):
    word, own, others = NAMED[name]
    assert all(re.search(word, (ROOT / file).read_text()) for file in (own, *others))
    row = next(line for line in PAGE.read_text().splitlines() if line.startswith("|") and name in line)
    assert f"| {len(others)} and its own |" in row
    assert {own, *others} <= set(re.findall(r"\]\(\.\./\.\./(\S+?)\)", PAGE.read_text()))


def code_of(file):
    """Return the code of a file without comments and docstrings."""
    tree = ast.parse(file.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node) is not None:
            node.body[0].value = ast.Constant("")
    return ast.unparse(tree)


def test_four_bits_are_in_the_files_that_the_page_counts():
    files = [file for package in PACKAGES[:2] for file in (ROOT / package).rglob("*.py")]
    naming = {file for file in files if re.search("int4|nvfp4|four_?bit", code_of(file), re.IGNORECASE)}
    assert len([file for file in naming if file.name in OWN_OF_FOUR_BITS]) == 6
    found = {file.relative_to(ROOT).as_posix() for file in naming if file.name not in OWN_OF_FOUR_BITS}
    assert found == {file for listed in FOUR_BITS.values() for file in listed}
    rows = PAGE.read_text().splitlines()
    for what, listed in FOUR_BITS.items():
        (row,) = [line for line in rows if re.match(rf"\| \d+ \| {what}\b", line)]
        assert row.startswith(f"| {len(listed)} |")
        assert {*listed} == {*re.findall(r"\]\(\.\./\.\./(\S+?)\)", row)}
    first, second, _ = map(len, FOUR_BITS.values())
    assert f"it is {first + second} files and its own" in PAGE.read_text()


def test_the_page_shows_what_the_patches_do():
    shown = [block for block in blocks_of(PAGE) if block.language == "diff"]
    patches = [parts_of(name) for name in MOST_FILES]
    assert {block.title for block in shown} == {
        file for parts in patches for file in parts if file.split("/")[0] in PACKAGES
    }
    for block in shown:
        lines = lines_of(block.code)
        assert any(f"\n{lines}\n" in f"\n{lines_of(parts.get(block.title, ''))}\n" for parts in patches), block.title


def lines_of(text: str) -> str:
    return "\n".join(line.rstrip() for line in text.strip("\n").splitlines())
