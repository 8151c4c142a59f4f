"""The names of servers that docs/reference/servers.md has in its tables."""

import re
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
