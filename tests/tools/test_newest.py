"""Each dependency has a bound above, and `make newest` says which versions lie outside and what they break."""

import json
import tomllib

import pytest
from packaging.requirements import Requirement

from tests import newest

PROJECT = tomllib.loads((newest.ROOT / "pyproject.toml").read_text())


def test_every_dependency_has_a_bound_above_what_is_tested():
    project, tested = PROJECT["project"], newest.pinned()
    lines = [line for extra in project["optional-dependencies"].values() for line in extra]
    for line in [*PROJECT["build-system"]["requires"], *project["dependencies"], *lines]:
        required = Requirement(line)
        if required.name != "twinattn":
            assert any(bound.operator == "<" for bound in required.specifier), f"{line} has no bound"
            if required.name in tested:
                assert tested[required.name] in required.specifier, f"{line} leaves out {tested[required.name]}"


def test_what_is_installed_is_all_that_the_tests_need():
    required = newest.requirements(PROJECT, newest.EXTRA)
    assert required["triton"][2] == "; platform_system == 'Linux'" and required["mkdocstrings"][0] == "[python]"
    assert {"torch", "transformers", "openai", "hypothesis", "ruff"} <= set(required) and "twinattn" not in required


def test_versions_outside_the_bounds_are_named():
    bounds = {"one": ">=1,<2.4", "two": "<2", "three": ">=0.1,<3", "four": "", "five": "<9"}
    installed = dict(one="2.4.0.post1", two="1.99", three="3.0rc1", four="4")
    assert newest.outside(installed, bounds) == [
        "one 2.4.0.post1 is outside >=1,<2.4",
        "three 3.0rc1 is outside >=0.1,<3",
    ]


@pytest.mark.parametrize("broken", [["a.py::test_b", "c.py"], []])
def test_the_dependency_that_breaks_tests_is_named(broken, monkeypatch, capsys):
    """As if the newest transformers broke one test and one file, and the newest rich none."""
    now = dict(transformers="99.1", rich=newest.pinned()["rich"], hypothesis="99")

    def install(*arguments):
        now.update(argument.split("==") for argument in arguments if "==" in argument.partition(";")[0])

    def run(cache, *arguments):
        failed = broken if now["transformers"] == "99.1" else []
        (cache / "v/cache").mkdir(parents=True, exist_ok=True)
        (cache / "v/cache/lastfailed").write_text(json.dumps(dict.fromkeys(failed, True)))
        return len(failed) > 0

    monkeypatch.setattr(newest, "pip", install)
    monkeypatch.setattr(newest, "pytest", run)
    monkeypatch.setattr(newest, "versions", now.copy)
    monkeypatch.setattr(newest, "PYTHON", newest.ROOT / "run.py")  # something that is there
    assert newest.main([]) == bool(broken)
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("transformers 99.1 is outside >=5.23,<") for line in lines)
    tested = newest.pinned()["transformers"]
    blamed = [f"transformers 99.1 breaks 2 of 2 tests, which pass with {tested}"] if broken else []
    assert [line for line in lines if "breaks" in line] == blamed
    assert now["transformers"] == "99.1", "the newest is there again"
