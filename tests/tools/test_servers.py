"""The page with names of servers says in which versions they were looked up, and those are the ones that we claim."""

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
PAGE = ROOT / "docs/reference/servers.md"
GONE = re.compile(r"\((?:V0|until removed)[^)]*\)|`[^`]*` \(V0\)")


def names_of(page: str, server: str) -> set[str]:
    """Return the words in code of the columns of a server, without those that the page calls gone."""
    names: set[str] = set()
    for table in re.findall(r"(?:^\|.*\n)+", page, re.MULTILINE):
        head, _, *rows = [line.strip("|").split(" | ") for line in table.splitlines()]
        columns = [i for i, title in enumerate(head) if title.strip().startswith(f"{server}")]
        if "`" in table and head[0].strip() == "here":
            cells = [GONE.sub("", row[i]) for i in columns for row in [head, *rows]]
            names |= {word for cell in cells for code in re.findall(r"`([^`]*)`", cell) for word in words_of(code)}
    return names


def words_of(code: str) -> list[str]:
    return re.findall(r"[A-Za-z_]\w+", code)


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
