"""A test that does not end is a failure, and not the end of the others, under the settings that all tests run with."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

ROOT = Path(__file__).parent.parent.parent

PLANTED = """
import collections, itertools, threading
from hypothesis import given, settings, strategies as st

def test_in_python():
    while True:
        pass

def test_in_a_lock():
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()

def test_in_c():
    collections.deque(itertools.count(), maxlen=0)  # no signal is looked at, and no other thread runs

@settings(deadline=None, database=None)
@given(st.integers())
def test_that_is_repeated(number):
    while True:
        pass

def test_that_ends():
    pass
"""


def test_a_test_that_does_not_end_fails(tmp_path):
    """Of whatever kind it is; the limits are those of all tests, with fewer seconds."""
    (tmp_path / "test_planted.py").write_text(PLANTED)
    command = [sys.executable, "-m", "pytest", "-c", ROOT / "pyproject.toml", "--rootdir", tmp_path, tmp_path]
    plugins = ["-p", "pytest_timeout", "-p", "xdist", "-p", "no:cacheprovider"]  # no others, which take long to import
    limits = ["-o", "timeout=0.4", "-o", "faulthandler_timeout=0.9"]
    run = subprocess.run(
        [*command, *plugins, *limits, "-n", "1", "-q"],
        cwd=tmp_path,
        env=os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert run.returncode == 1, run.stdout + run.stderr
    for name in ("test_in_python", "test_in_a_lock"):
        assert f"FAILED test_planted.py::{name} - Failed: Timeout" in run.stdout
    for name in ("test_in_c", "test_that_is_repeated"):
        assert f"crashed while running 'test_planted.py::{name}'" in run.stdout
    assert "4 failed, 1 passed" in run.stdout


@pytest.mark.parametrize(("asked", "marked"), [(None, 1), (900.0, 0), (0.0, 0)])
def test_the_limit_of_the_command_line_is_that_of_long_tests_too(asked, marked, request):
    """`make compile` asks for more than they have otherwise, as a machine may be slow."""
    (conftest,) = (
        plugin
        for plugin in request.config.pluginmanager.get_plugins()
        if getattr(plugin, "__file__", None) == str(ROOT / "tests/conftest.py")
    )
    marks, options = [], {"--device": "cpu", "--tier": "all", "timeout": asked}
    item = SimpleNamespace(
        nodeid="long", stash={}, path=Path("test_compile.py"), function=None, add_marker=marks.append
    )
    config = SimpleNamespace(getoption=lambda name, default=None: options[name])
    conftest.pytest_collection_modifyitems(config, [item])
    assert len(marks) == marked
