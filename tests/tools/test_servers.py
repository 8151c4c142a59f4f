"""The page with names of servers says in which versions they were looked up, and those are the ones that we claim."""

import re
import tomllib

from tests.helpers.servers import PAGE, ROOT, names_of


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
