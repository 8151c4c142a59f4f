"""The names that docs/reference/servers.md says vLLM has are in the vLLM that is installed.

Not a part of `make test`: `make vllm-test` runs it where vLLM is. `names_of` is tested without vLLM, in tests/tools.
"""

import re
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.helpers.servers import PAGE, names_of


@pytest.mark.parametrize("name", sorted(names_of(PAGE.read_text(), "vLLM")))
def test_vllm_has_the_name(name, words):
    assert name in words, f"{PAGE.name}: vLLM has no {name}"


@pytest.fixture(scope="session")
def words():
    """Return every word of vLLM's sources."""
    spec = find_spec("vllm")
    assert spec is not None and spec.submodule_search_locations is not None
    files = Path(spec.submodule_search_locations[0]).rglob("*.py")
    return {word for file in files for word in re.findall(r"\w+", file.read_text(errors="ignore"))}
