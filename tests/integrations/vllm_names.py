"""The names that docs/reference/servers.md and docs/request.md say vLLM has are in the vLLM that is installed.

Not a part of `make test`: `make vllm-test` runs it where vLLM is. `names_of` is tested without vLLM, in tests/tools.
"""

import re
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.helpers.servers import PAGE, ROOT, is_there, names_of, places_of

PLACES = places_of((ROOT / "docs/request.md").read_text(), "vLLM")


@pytest.mark.parametrize("name", sorted(names_of(PAGE.read_text(), "vLLM")))
def test_vllm_has_the_name(name, words):
    assert name in words, f"{PAGE.name}: vLLM has no {name}"


@pytest.mark.parametrize(("name", "file"), sorted(set(PLACES)))
def test_vllm_has_it_in_the_file(name, file, folder):
    assert is_there(folder, name, file), f"docs/request.md: {file} of vLLM has no {name}"


@pytest.fixture(scope="session")
def folder():
    """Return where vLLM's sources are."""
    spec = find_spec("vllm")
    assert spec is not None and spec.submodule_search_locations is not None
    return Path(spec.submodule_search_locations[0])


@pytest.fixture(scope="session")
def words(folder):
    """Return every word of vLLM's sources."""
    files = folder.rglob("*.py")
    return {word for file in files for word in re.findall(r"\w+", file.read_text(errors="ignore"))}
