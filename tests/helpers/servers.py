"""The names of servers on our pages, and which of them the servers' wheels have.

    python -m tests.helpers.servers DATE VLLM SGLANG      the folders `vllm` and `sglang` of unpacked wheels

writes `servers.json`: the date, the versions, and the names of our pages that are in their sources. A name that is not
in the list was not looked up, or is not there.
"""

import json
import re
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
PAGE, REQUEST, ON_PAPER = (
    ROOT / "docs" / page for page in ("reference/servers.md", "request.md", "integrations/sglang.md")
)
TABLE = Path(__file__).with_suffix(".json")
OURS = ("refattn", "fastattn", "twinattn")
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


def places_of(page: str, column: str) -> list[tuple[str, str]]:
    """Return the names in a server's column, each with its file: `EngineCore.step`, `v1/engine/core.py`."""
    found: list[tuple[str, str]] = []
    for table in re.findall(r"(?:^\|.*\n)+", page, re.MULTILINE):
        head, _, *rows = [line.strip().strip("|").split(" | ") for line in table.splitlines()]
        for i in (i for i, title in enumerate(head) if title.strip() == column):
            found += [place for row in rows for place in re.findall(r"`([\w.]+)` in `([\w/]+\.py)`", row[i])]
    return found


def is_there(folder: Path, name: str, file: str) -> bool:
    """Return whether a file defines a class or a function, or a class in it has that method or inherits it."""
    if not (folder / file).is_file():
        return False
    source = (folder / file).read_text()
    return all(re.search(rf"^ *(?:async )?(?:def|class) {part}\b", source, re.MULTILINE) for part in name.split("."))


def names_on_paper() -> set[str]:
    """Return the words in code of the page on SGLang that are none of ours, and no file or folder of its tests here."""
    text = re.sub(r"```.*?```|\]\([^)]*\)", "", ON_PAPER.read_text(), flags=re.DOTALL)
    return (
        {word for code in re.findall(r"`([^`]*)`", text) for word in words_of(code)}
        - words_in(*OURS)
        - {path.stem for path in (ROOT / "tests").rglob("sglang_*")}
    )


def words_in(*folders: str | Path) -> set[str]:
    """Return every word of the Python sources in folders."""
    files = (file for folder in folders for file in (ROOT / folder).rglob("*.py"))
    return {word for file in files for word in re.findall(r"\w+", file.read_text(errors="ignore"))}


def said_of(server: str) -> tuple[set[str], set[tuple[str, str]]]:
    """Return the names that our pages say a server has, and those with the file that they are in."""
    names = names_of(PAGE.read_text(), server) | (names_on_paper() if server == "SGLang" else set())
    return names, set(places_of(REQUEST.read_text(), server))


def main(date: str, **folders: Path) -> None:
    """Look the names up, and write those that are there."""
    table: dict[str, object] = dict(date=date)
    for server, folder in folders.items():
        names, places = said_of(server)
        root = folder / "srt" if server == "SGLang" else folder
        there = sorted(f"{name} in {file}" for name, file in places if is_there(root, name, file))
        version = re.search(r"version = '([\d.]+)'", (folder / "_version.py").read_text())
        assert version is not None
        table[server] = dict(version=version[1], names=sorted(names & words_in(folder)), places=there)
    TABLE.write_text(json.dumps(table, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1], vLLM=Path(sys.argv[2]).resolve(), SGLang=Path(sys.argv[3]).resolve())
