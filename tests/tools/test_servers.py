"""Names of servers on our pages are in their wheels, of the versions that the pages name, which are those we claim."""

import json
import re
import tomllib

import pytest

from tests.helpers.servers import ON_PAPER, PAGE, REQUEST, ROOT, TABLE, names_of, said_of

LOOKED_UP = json.loads(TABLE.read_text())


@pytest.mark.parametrize("server", ["vLLM", "SGLang"])
def test_each_name_was_found_in_the_wheel(server):
    names, places = said_of(server)
    assert len(names) > 30 and len(places) > 15
    again = "look it up: python -m tests.helpers.servers"
    assert not names - {*LOOKED_UP[server]["names"]}, again
    assert not {f"{name} in {file}" for name, file in places} - {*LOOKED_UP[server]["places"]}, again


def test_the_pages_name_the_day_and_the_versions():
    for page in (PAGE, REQUEST):
        said = f"vLLM {LOOKED_UP['vLLM']['version']} and SGLang {LOOKED_UP['SGLang']['version']} ({LOOKED_UP['date']})"
        assert said in " ".join(page.read_text().split()), page.name
    assert f"SGLang {LOOKED_UP['SGLang']['version']} " in ON_PAPER.read_text()


def test_names_are_found_and_those_that_are_gone_are_not():
    names = names_of(PAGE.read_text(), "vLLM")
    assert {"query_start_loc", "CommonAttentionMetadata", "get_dcp_local_seq_lens", "W_UK_T"} <= names and len(
        names
    ) > 60
    assert not names & {"seq_start_loc", "use_cascade", "TreeAttentionBackend", "advance_step"}


def test_the_names_were_looked_up_in_the_newest_version_that_we_allow():
    (minor,) = re.findall(r"looked up in\s+vLLM 0\.(\d+)\.\d+ and SGLang [\d.]+ \(20\d\d-\d\d-\d\d\)", PAGE.read_text())
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (bound,) = re.findall(r"vllm>=[\d.]+,<0\.(\d+)", str(project["optional-dependencies"]["vllm"]))
    assert int(minor) + 1 == int(bound), "look the names up again (tests/integrations/vllm_names.py), and say so"
